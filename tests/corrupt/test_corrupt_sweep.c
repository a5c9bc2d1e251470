/* Every file of good checkpoints cut off at many lengths, and many of their bytes changed: each time the checkpoint does not
 * open, or verification finds a defect, or nothing has changed. */
#include "corrupt/damage.h"
#include "support/random.h"

#define GOLDEN_2_13 "golden/2.13.0/"
#define MAX_FILES 16
#define CUTS 24 /* of each file; times DCP_TEST_ROUNDS */
#define FLIPS 48

typedef struct subject {
    const char *dir, *path;
    bool has_crc; /* of all payloads */
} subject;

static const subject subjects[] = {
    {GOLDEN_2_13 "sharded/ckpt", "", true},     {GOLDEN_2_13 "objects/ckpt", "", true},
    {GOLDEN_2_13 "zstd/ckpt", "", true},        {GOLDEN_2_13 "safetensors_records/ckpt", "", false},
    {GOLDEN_2_13 "hf_sharded/ckpt", "", false}, {GOLDEN_2_13 "torch_save", "file.pt", true},
    {GOLDEN_2_13 "rank_local/ckpt", "", true},  {GOLDEN_2_13 "shapes/ckpt", "", true},
};
#define N_SUBJECTS (sizeof subjects / sizeof subjects[0])

typedef struct files {
    size_t n;
    char names[MAX_FILES][128];
} files;

static dcp_status add_name(void *user, const char *name, dcp_entry_type type)
{
    files *f = user;
    if (type == DCP_ENTRY_FILE && strcmp(name, "expect.json") != 0) {
        assert_true(f->n < MAX_FILES);
        snprintf(f->names[f->n++], sizeof f->names[0], "%s", name);
    }
    return DCP_OK;
}

static files files_of(dcp_storage *st)
{
    files f = {0};
    assert_int_equal(st->ops->list(st, "", add_name, &f, NULL), DCP_OK);
    return f;
}

/* ---- what comes of it ---- */

typedef enum verdict { REFUSED, FOUND, UNCHANGED, CHANGED } verdict;

static size_t count_changed(const meter *m, dcp_checkpoint *ck, const values *before)
{
    size_t n = 0;
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        dcp_error err = DCP_ERROR_INIT;
        value v;
        if (value_read(m->ctx, ck, item, &v, &err) != DCP_OK) {
            n++; /* verification has to tell as well */
            continue;
        }
        const value *old = values_find(before, v.fqn, v.rank);
        n += !old || !value_equal(&v, old);
        value_free(&v);
    }
    return n + (dcp_checkpoint_count(ck) < before->n);
}

static verdict judge(dcp_storage *st, const subject *s, const values *before, uint64_t bytes)
{
    meter m;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_checkpoint *ck;
    verdict out = REFUSED;
    opts.storage = st;
    opts.check_crc = true;
    meter_start(&m);
    if (dcp_checkpoint_open(m.ctx, s->path, &opts, &ck, &err) == DCP_OK) {
        size_t changed = count_changed(&m, ck, before);
        assert_int_equal(dcp_verify(ck, NULL, &report, &err), DCP_OK);
        out = report.n_defects ? FOUND : changed ? CHANGED : UNCHANGED;
        dcp_checkpoint_close(ck);
    } else {
        assert_true(err.message[0]);
    }
    assert_true(m.peak < (int64_t)(64 * bytes) + (48 << 20));
    meter_stop(&m);
    return out;
}

typedef void (*sweep_fn)(dcp_storage *st, const subject *s, const char *name, const values *before, test_random *r);

static void sweep(sweep_fn fn, const char *what)
{
    test_random r = test_random_seeded(what);
    for (size_t i = 0; i < N_SUBJECTS; i++) {
        dcp_storage *st = memory_copy(subjects[i].dir);
        values before = values_of(st, subjects[i].path);
        files f = files_of(st);
        for (size_t k = 0; k < f.n; k++) {
            fn(st, &subjects[i], f.names[k], &before, &r);
        }
        values_free(&before);
        dcp_storage_free(st);
    }
}

static int rounds(int n)
{
    const char *text = getenv("DCP_TEST_ROUNDS");
    return text ? n * atoi(text) : n;
}

/* ---- cut off ---- */

static void cut_everywhere(dcp_storage *st, const subject *s, const char *name, const values *before, test_random *r)
{
    file_bytes good = get_file(st, name);
    for (int i = 0; i < rounds(CUTS) && good.n; i++) {
        size_t n = i < 4 ? (size_t)i : i < 8 ? good.n - (size_t)(i - 3) : (size_t)test_random_below(r, (int64_t)good.n);
        n = n < good.n ? n : 0;
        set_file(st, name, good.data, n);
        verdict v = judge(st, s, before, good.n);
        if (v != REFUSED && v != FOUND) {
            fail_msg("%s/%s cut to %zu of %zu bytes: nothing is said", s->dir, name, n, good.n);
        }
    }
    set_file(st, name, good.data, good.n);
    free(good.data);
}

static void cut__is_noticed_at_every_length(void **state)
{
    (void)state;
    sweep(cut_everywhere, "cut");
}

/* ---- changed ---- */

static bool is_data(const char *name)
{
    return strstr(name, ".distcp") || strstr(name, ".pt");
}

static void flip_somewhere(dcp_storage *st, const subject *s, const char *name, const values *before, test_random *r)
{
    file_bytes good = get_file(st, name);
    size_t counts[4] = {0};
    for (int i = 0; i < rounds(FLIPS) && good.n; i++) {
        size_t at = (size_t)test_random_below(r, (int64_t)good.n);
        uint8_t mask = (uint8_t)(1 + test_random_below(r, 255));
        good.data[at] ^= mask;
        set_file(st, name, good.data, good.n);
        verdict v = judge(st, s, before, good.n);
        counts[v]++;
        if (v == CHANGED && s->has_crc && is_data(name)) {
            fail_msg("%s/%s: byte %zu xor %02x: other values and nothing is said", s->dir, name, at, mask);
        }
        good.data[at] ^= mask;
    }
    set_file(st, name, good.data, good.n);
    free(good.data);
    print_message("%s/%s: %zu refused, %zu found, %zu unchanged, %zu changed\n", s->dir, name, counts[REFUSED], counts[FOUND],
                  counts[UNCHANGED], counts[CHANGED]);
}

static void flip__gives_no_other_values_where_a_crc_covers_them(void **state)
{
    (void)state;
    sweep(flip_somewhere, "flip");
}

/* ---- our own: trailer and digests cover every byte ---- */

static dcp_value *some_state(void)
{
    static float numbers[64];
    const int64_t extents[] = {8, 8};
    dcp_value *root;
    for (int i = 0; i < 64; i++) {
        numbers[i] = (float)i;
    }
    const dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, numbers);
    assert_int_equal(dcp_dict_create(NULL, &root, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_tensor(root, "w", &t, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_string(root, "name", "value", NULL), DCP_OK);
    return root;
}

static void own__every_changed_byte_is_noticed(void **state)
{
    (void)state;
    const subject own = {"own", "ckpt", true};
    test_random r = test_random_seeded("own");
    dcp_storage *st;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *root = some_state();
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    opts.storage = st;
    if (dcp_save(NULL, "ckpt", root, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
    values before = values_of(st, "ckpt");
    const char *const names[] = {"ckpt/.metadata", "ckpt/__0_0.distcp"};
    for (size_t f = 0; f < 2; f++) {
        file_bytes good = get_file(st, names[f]);
        for (size_t at = 0; at < good.n; at += f ? 7 : 1) {
            uint8_t mask = (uint8_t)(1 + test_random_below(&r, 255));
            good.data[at] ^= mask;
            set_file(st, names[f], good.data, good.n);
            verdict v = judge(st, &own, &before, good.n);
            if (v == CHANGED || (v == UNCHANGED && f)) {
                fail_msg("%s: byte %zu xor %02x: nothing is said", names[f], at, mask);
            }
            good.data[at] ^= mask;
        }
        set_file(st, names[f], good.data, good.n);
        free(good.data);
    }
    values_free(&before);
    dcp_storage_free(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cut__is_noticed_at_every_length),
        cmocka_unit_test(flip__gives_no_other_values_where_a_crc_covers_them),
        cmocka_unit_test(own__every_changed_byte_is_noticed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
