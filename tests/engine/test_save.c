/* Saving and loading back in one process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/memory_copy.h"
#include "support/random_state.h"

static dcp_storage *memory_storage(void)
{
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    return st;
}

static void save(dcp_storage *st, dcp_value *state, dcp_save_opts opts, dcp_save_report *report)
{
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    if (dcp_save(NULL, "", state, &opts, report, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
}

static dcp_checkpoint *open_in(dcp_storage *st)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    if (dcp_checkpoint_open(NULL, "", &opts, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return ck;
}

static dcp_value *read_all(dcp_storage *st)
{
    dcp_checkpoint *ck = open_in(st);
    dcp_value *tree;
    dcp_error err = DCP_ERROR_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    if (dcp_read_tree(ck, true, &tree, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(dcp_verify(ck, NULL, &verified, &err), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    dcp_checkpoint_close(ck);
    return tree;
}

/* ---- random options ---- */

static dcp_save_opts random_opts(test_random *rnd)
{
    dcp_save_opts o = DCP_SAVE_OPTS_INIT;
    o.files = (int)test_random_below(rnd, 4);
    o.file_per_item = test_random_below(rnd, 4) == 0;
    o.align_payloads = test_random_below(rnd, 3) == 0;
    o.transform = test_random_below(rnd, 4) == 0 ? "stream.zstd/1" : NULL;
    return o;
}

static void save__any_tree_comes_back_as_it_was(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("save trees");
    for (int i = 0; i < 300; i++) {
        dcp_storage *st = memory_storage();
        dcp_value *state = random_state(&rnd);
        save(st, state, random_opts(&rnd), NULL);
        dcp_value *loaded = read_all(st);
        if (!dcp_value_equal(state, loaded)) {
            char *a, *b;
            dcp_value_repr(state, 0, &a, NULL, NULL);
            dcp_value_repr(loaded, 0, &b, NULL, NULL);
            fail_msg("case %d:\n%s\n%s", i, a, b);
        }
        dcp_value_free(state);
        dcp_value_free(loaded);
        dcp_storage_free(st);
    }
}

/* Tensors of the dtypes that safetensors have. */
static dcp_value *safetensors_state(test_random *rnd)
{
    static const dcp_dtype dtypes[] = {DCP_FLOAT32, DCP_BFLOAT16, DCP_INT64, DCP_BOOL, DCP_UINT8, DCP_FLOAT8_E4M3FN};
    dcp_value *state, *v;
    char key[16];
    dcp_dict_create(NULL, &state, NULL);
    for (int i = 0; i < 9; i++) {
        int64_t extents[] = {test_random_below(rnd, 5), i == 3 ? 200000 : test_random_below(rnd, 40)}, elems;
        dcp_dtype dtype = dtypes[test_random_below(rnd, 6)];
        assert_int_equal(dcp_tensor_alloc(NULL, dtype, i % 3, extents, &v, NULL), DCP_OK);
        dcp_tensor_elems(dcp_value_tensor(v), &elems, NULL);
        random_fill(rnd, dcp_value_tensor(v)->data, (size_t)elems * dcp_dtype_bytes(dtype));
        snprintf(key, sizeof key, "t%d", i);
        dcp_dict_set(state, dcp_key_str(key), v, NULL);
    }
    dcp_dict_set_int(state, "step", 5, NULL);
    dcp_dict_set_string(state, "name", "x", NULL);
    return state;
}

static void save__safetensors_in_data_files_come_back(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("save safetensors");
    for (int i = 0; i < 50; i++) {
        dcp_storage *st = memory_storage();
        dcp_value *state = safetensors_state(&rnd);
        dcp_save_opts opts = random_opts(&rnd);
        opts.transform = NULL;
        opts.serialization = DCP_SERIALIZE_SAFETENSORS;
        save(st, state, opts, NULL);
        dcp_value *loaded = read_all(st);
        assert_true(dcp_value_equal(state, loaded));
        dcp_value_free(state);
        dcp_value_free(loaded);
        dcp_storage_free(st);
    }
}

/* ---- many saves in one directory ---- */

typedef struct names {
    char text[256][64];
    size_t n;
} names;

static dcp_status note_name(void *user, const char *name, dcp_entry_type type)
{
    names *l = user;
    assert_int_equal(type, DCP_ENTRY_FILE);
    assert_true(l->n < 256);
    snprintf(l->text[l->n++], 64, "%s", name);
    return DCP_OK;
}

/* Just the files that the save reported: those that the metadata names, and those of its name that hold nothing. */
static void check_files(dcp_storage *st, const dcp_save_report *report)
{
    static names listed;
    dcp_checkpoint *ck = open_in(st);
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    size_t n_named = 0;
    listed.n = 0;
    assert_int_equal(st->ops->list(st, "", note_name, &listed, NULL), DCP_OK);
    dcp_checkpoint_get_info(ck, &info, NULL);
    for (size_t i = 0; i < listed.n; i++) {
        bool is_named = strcmp(listed.text[i], ".metadata") == 0;
        for (size_t k = 0; k < info.n_files; k++) {
            dcp_file_info f;
            assert_int_equal(dcp_checkpoint_file(ck, k, &f, NULL), DCP_OK);
            assert_true(f.present);
            is_named |= strcmp(f.name, listed.text[i]) == 0;
        }
        dcp_stat s;
        assert_int_equal(st->ops->stat(st, listed.text[i], &s, NULL), DCP_OK);
        if (!is_named && s.bytes) {
            fail_msg("left over: %s", listed.text[i]);
        }
        n_named += is_named;
    }
    assert_int_equal(n_named, info.n_files + 1);
    assert_int_equal(listed.n, report->n_files + 1);
    dcp_checkpoint_close(ck);
}

static void save__twenty_saves_in_one_directory_leave_the_files_of_the_last(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("save chain");
    for (int chain = 0; chain < 5; chain++) {
        dcp_storage *st = memory_storage();
        for (int i = 0; i < 20; i++) {
            bool as_safetensors = test_random_below(&rnd, 4) == 0;
            dcp_value *state = as_safetensors ? safetensors_state(&rnd) : random_state(&rnd);
            dcp_save_opts opts = random_opts(&rnd);
            dcp_save_report report = DCP_SAVE_REPORT_INIT;
            opts.transform = as_safetensors ? NULL : opts.transform;
            opts.serialization = as_safetensors ? DCP_SERIALIZE_SAFETENSORS : DCP_SERIALIZE_TORCH_SAVE;
            opts.overwrite = true;
            save(st, state, opts, &report);
            dcp_value *loaded = read_all(st);
            assert_true(dcp_value_equal(state, loaded));
            check_files(st, &report);
            dcp_value_free(state);
            dcp_value_free(loaded);
        }
        dcp_storage_free(st);
    }
}

/* ---- unusual states ---- */

static void round_trip(dcp_value *state)
{
    dcp_storage *st = memory_storage();
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, NULL);
    dcp_value *loaded = read_all(st);
    assert_true(dcp_value_equal(state, loaded));
    dcp_value_free(loaded);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__empty_state_leaves_metadata_and_an_empty_file(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_storage *st = memory_storage();
    dcp_stat s;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_dict_create(NULL, &state, NULL);
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, &report);
    assert_int_equal(report.n_items, 0);
    assert_int_equal(report.bytes, 0);
    assert_int_equal(st->ops->stat(st, "__0_0.distcp", &s, NULL), DCP_OK); /* as PyTorch does */
    assert_int_equal(s.bytes, 0);
    dcp_value *loaded = read_all(st);
    assert_true(dcp_value_equal(state, loaded));
    dcp_value_free(loaded);
    for (int per_item = 0; per_item < 2; per_item++) { /* and again, over it */
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        opts.overwrite = true;
        opts.file_per_item = per_item;
        save(st, state, opts, &report);
        check_files(st, &report);
    }
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__nan_bits_are_kept(void **unused)
{
    (void)unused;
    uint32_t bits[1000];
    int64_t n[] = {1000};
    for (uint32_t i = 0; i < 1000; i++) {
        bits[i] = 0x7fc00000 | i | i << 31;
    }
    dcp_value *state;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, n, bits);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "nan", &t, NULL);
    dcp_storage *st = memory_storage();
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, NULL);
    dcp_value *loaded = read_all(st);
    assert_memory_equal(dcp_value_tensor(dcp_dict_get_str(loaded, "nan"))->data, bits, sizeof bits);
    dcp_value_free(loaded);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__any_name_comes_back(void **unused)
{
    (void)unused;
    static const dcp_str keys[] = {
        {"", 0},          {"nul\0inside", 10}, {"\xc3\xa9\xe6\xbc\xa2\xf0\x9f\x98\x80", 9}, {"a/b", 3}, {"..", 2},
        {"\n\t\"'\\", 5}, {"\xed\xa0\x80", 3} /* a lone surrogate */};
    dcp_value *state, *v;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        dcp_key key = {.string = keys[i]};
        int64_t extents[] = {3};
        dcp_tensor_alloc(NULL, DCP_INT16, 1, extents, &v, NULL);
        memset(dcp_value_tensor(v)->data, (int)i, 6);
        assert_int_equal(dcp_dict_set(state, key, v, NULL), DCP_OK);
    }
    round_trip(state);
}

/* One value in several places, and tensors where only an object record can hold them. */
static void save__shared_values_and_tensors_inside_tuples_come_back(void **unused)
{
    (void)unused;
    test_random rnd = {77};
    dcp_value *state, *tuple, *shared = random_tensor(&rnd), *inner;
    dcp_dict_create(NULL, &state, NULL);
    dcp_seq_create(NULL, DCP_KIND_TUPLE, &tuple, NULL);
    dcp_list_append(tuple, dcp_value_retain(shared), NULL);
    dcp_list_append(tuple, dcp_value_retain(shared), NULL);
    for (int i = 0; i < 12; i++) {
        dcp_list_append(tuple, random_tensor(&rnd), NULL);
    }
    dcp_dict_create(NULL, &inner, NULL);
    dcp_dict_set_int(inner, "n", 1, NULL);
    dcp_dict_set(state, dcp_key_str("tuple"), tuple, NULL);
    dcp_dict_set(state, dcp_key_str("again"), dcp_value_retain(tuple), NULL);
    dcp_dict_set(state, dcp_key_str("one"), dcp_value_retain(inner), NULL);
    dcp_dict_set(state, dcp_key_str("two"), inner, NULL);
    dcp_dict_set(state, dcp_key_str("shared"), shared, NULL);
    round_trip(state);
}

/* What PyTorch pickled, classes that we do not know among it, is passed on. */
static void copy__objects_of_unknown_classes_pass_through(void **unused)
{
    (void)unused;
    dcp_storage *from = memory_copy("golden/2.13.0/objects/ckpt"), *to = memory_storage();
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    open.storage = from;
    opts.storage = to;
    assert_int_equal(dcp_copy(NULL, "", &open, "", &opts, NULL, NULL), DCP_OK);
    dcp_value *a = read_all(from), *b = read_all(to);
    assert_true(dcp_value_equal(a, b));
    dcp_value_free(a);
    dcp_value_free(b);
    dcp_storage_free(from);
    dcp_storage_free(to);
}

/* ---- ties and views ---- */

static void save__tied_tensors_are_one_record_and_views_their_own_elements(void **unused)
{
    (void)unused;
    enum { N = 1 << 18 };
    float *big = calloc(N, sizeof *big);
    for (int i = 0; i < N; i++) {
        big[i] = (float)i;
    }
    int64_t all[] = {N}, few[] = {10}, step[] = {3};
    dcp_tensor whole = dcp_tensor_make(DCP_FLOAT32, 1, all, big), view = dcp_tensor_make(DCP_FLOAT32, 1, few, big + 5);
    dcp_tensor stepped = {DCP_FLOAT32, 1, few, step, big + 7, {DCP_DEVICE_CPU, 0}};
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "a", &whole, NULL);
    dcp_dict_set_tensor(state, "tied", &whole, NULL);
    dcp_dict_set_tensor(state, "view", &view, NULL);
    dcp_dict_set_tensor(state, "stepped", &stepped, NULL);
    dcp_storage *st = memory_storage();
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, &report);
    assert_int_equal(report.n_items, 4);
    assert_int_equal(report.n_records, 3);
    assert_int_equal(report.n_tied, 1);
    assert_true(report.bytes < N * sizeof(float) + 3 * 2048);
    dcp_value *loaded = read_all(st);
    assert_true(dcp_value_equal(state, loaded));
    dcp_value_free(loaded);
    dcp_value_free(state);
    dcp_storage_free(st);
    free(big);
}

/* ---- loading in place ---- */

static void load__fills_strided_tensors_and_replaces_objects_in_place(void **unused)
{
    (void)unused;
    float data[12], target[24] = {0};
    int64_t shape[] = {3, 4}, strides[] = {1, 6};
    for (int i = 0; i < 12; i++) {
        data[i] = (float)i + 1;
    }
    dcp_value *state, *into;
    dcp_tensor from = dcp_tensor_make(DCP_FLOAT32, 2, shape, data);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "w", &from, NULL);
    dcp_dict_set_int(state, "epoch", 7, NULL);
    dcp_storage *st = memory_storage();
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, NULL);

    dcp_tensor to = {DCP_FLOAT32, 2, shape, strides, target, {DCP_DEVICE_CPU, 0}};
    dcp_dict_create(NULL, &into, NULL);
    dcp_dict_set_tensor(into, "w", &to, NULL);
    dcp_dict_set_int(into, "epoch", 0, NULL);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    opts.open.storage = st;
    assert_int_equal(dcp_load(NULL, "", into, &opts, &report, NULL), DCP_OK);
    for (int r = 0; r < 3; r++) {
        for (int c = 0; c < 4; c++) {
            assert_true(target[r + 6 * c] == data[4 * r + c]);
        }
    }
    int64_t epoch;
    assert_true(dcp_value_int(dcp_dict_get_str(into, "epoch"), &epoch));
    assert_int_equal(epoch, 7);
    assert_int_equal(report.n_tensors, 1);
    assert_int_equal(report.n_objects, 1);
    assert_int_equal(report.bytes, sizeof data);
    dcp_value_free(state);
    dcp_value_free(into);
    dcp_storage_free(st);
}

/* A tensor of the same shape in other memory: dimensions in random order, with gaps. */
static dcp_value *strided_like(test_random *rnd, const dcp_tensor *t, void **memory)
{
    int64_t strides[DCP_MAX_NDIM], span = 1 + test_random_below(rnd, 2);
    int order[DCP_MAX_NDIM];
    for (int d = 0; d < t->ndim; d++) {
        int other = (int)test_random_below(rnd, d + 1);
        order[d] = order[other];
        order[other] = d;
    }
    for (int d = 0; d < t->ndim; d++) {
        strides[order[d]] = span;
        span = span * (t->extents[order[d]] ? t->extents[order[d]] : 1) + test_random_below(rnd, 3);
    }
    *memory = calloc((size_t)span, dcp_dtype_bytes(t->dtype));
    dcp_tensor to = {t->dtype, t->ndim, t->extents, strides, *memory, {DCP_DEVICE_CPU, 0}};
    dcp_value *v;
    assert_int_equal(dcp_tensor_create(NULL, &to, &v, NULL), DCP_OK);
    return v;
}

static void load__any_strides_on_both_sides(void **unused)
{
    (void)unused;
    enum { N = 8 };
    test_random rnd = test_random_seeded("load strides");
    for (int round = 0; round < 100; round++) {
        dcp_value *state, *into;
        void *saved[N], *loaded[N];
        char key[16];
        dcp_dict_create(NULL, &state, NULL);
        dcp_dict_create(NULL, &into, NULL);
        for (int i = 0; i < N; i++) {
            dcp_value *contiguous = random_tensor(&rnd), *v;
            const dcp_tensor *t = dcp_value_tensor(contiguous);
            int64_t elems = 0;
            snprintf(key, sizeof key, "t%d", i);
            v = strided_like(&rnd, t, &saved[i]);
            dcp_tensor_elems(t, &elems, NULL);
            if (elems) { /* some content: the first elements of the memory */
                random_fill(&rnd, saved[i], dcp_dtype_bytes(t->dtype));
            }
            dcp_dict_set(state, dcp_key_str(key), v, NULL);
            dcp_dict_set(into, dcp_key_str(key), strided_like(&rnd, t, &loaded[i]), NULL);
            dcp_value_free(contiguous);
        }
        dcp_storage *st = memory_storage();
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.open.storage = st;
        save(st, state, random_opts(&rnd), NULL);
        assert_int_equal(dcp_load(NULL, "", into, &opts, NULL, NULL), DCP_OK);
        assert_true(dcp_value_equal(state, into));
        dcp_value_free(state);
        dcp_value_free(into);
        for (int i = 0; i < N; i++) {
            free(saved[i]);
            free(loaded[i]);
        }
        dcp_storage_free(st);
    }
}

typedef struct seen {
    size_t n[6];
} seen;

static void see_difference(void *user, dcp_difference_kind kind, dcp_str fqn, const char *text)
{
    (void)fqn;
    (void)text;
    ((seen *)user)->n[kind]++;
}

static void load__differences_are_all_reported_and_nothing_is_changed(void **unused)
{
    (void)unused;
    float a[4] = {1, 2, 3, 4}, b[4] = {9, 9, 9, 9};
    double d[4] = {0};
    int64_t four[] = {4}, two[] = {2, 2};
    dcp_value *state, *into;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, four, a);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "good", &t, NULL);
    dcp_dict_set_tensor(state, "shape", &t, NULL);
    dcp_dict_set_tensor(state, "dtype", &t, NULL);
    dcp_dict_set_int(state, "kind", 1, NULL);
    dcp_dict_set_int(state, "extra", 1, NULL);
    dcp_storage *st = memory_storage();
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, NULL);

    dcp_dict_create(NULL, &into, NULL);
    t = dcp_tensor_make(DCP_FLOAT32, 1, four, b);
    dcp_dict_set_tensor(into, "good", &t, NULL);
    dcp_dict_set_tensor(into, "kind", &t, NULL);
    dcp_dict_set_tensor(into, "missing", &t, NULL);
    t = dcp_tensor_make(DCP_FLOAT32, 2, two, b);
    dcp_dict_set_tensor(into, "shape", &t, NULL);
    t = dcp_tensor_make(DCP_FLOAT64, 1, four, d);
    dcp_dict_set_tensor(into, "dtype", &t, NULL);
    seen s = {{0}};
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.open.storage = st;
    report.difference = see_difference;
    report.user = &s;
    assert_int_equal(dcp_load(NULL, "", into, &opts, &report, &err), DCP_MISMATCH);
    assert_int_equal(report.n_missing, 1);
    assert_int_equal(report.n_unexpected, 1);
    assert_int_equal(report.n_shape, 1);
    assert_int_equal(report.n_dtype, 1);
    assert_int_equal(report.n_kind, 1);
    for (int k = DCP_DIFF_MISSING; k <= DCP_DIFF_KIND; k++) {
        assert_int_equal(s.n[k], 1);
    }
    assert_true(b[0] == 9);

    /* lenient and selected: what is there and fits is loaded */
    const char *only[] = {"good", "missing"};
    opts.include = only;
    opts.n_include = 2;
    report = (dcp_load_report)DCP_LOAD_REPORT_INIT;
    assert_int_equal(dcp_load(NULL, "", into, &opts, &report, NULL), DCP_NOT_FOUND);
    opts.partial = true;
    assert_int_equal(dcp_load(NULL, "", into, &opts, &report, NULL), DCP_OK);
    assert_true(b[0] == 1 && b[3] == 4);
    dcp_value_free(state);
    dcp_value_free(into);
    dcp_storage_free(st);
}

static char *to_old_name(void *user, dcp_str fqn)
{
    (void)user;
    return strcmp(fqn.ptr, "model.new") == 0 ? strdup("model.old") : strdup(fqn.ptr);
}

static void load__prefix_rename_and_values_below_an_empty_list(void **unused)
{
    (void)unused;
    float a[2] = {1, 2}, b[2] = {0};
    int64_t two[] = {2};
    dcp_value *state, *model, *list, *first, *into;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, two, a);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &model, NULL);
    dcp_dict_set_tensor(model, "old", &t, NULL);
    dcp_list_create(NULL, &list, NULL);
    dcp_dict_create(NULL, &first, NULL);
    dcp_dict_set_int(first, "a", 5, NULL);
    dcp_list_append(list, first, NULL);
    dcp_dict_set(model, dcp_key_str("groups"), list, NULL);
    dcp_dict_set(state, dcp_key_str("model"), model, NULL);
    dcp_storage *st = memory_storage();
    save(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT, NULL);

    dcp_dict_create(NULL, &into, NULL);
    t = dcp_tensor_make(DCP_FLOAT32, 1, two, b);
    dcp_dict_set_tensor(into, "new", &t, NULL);
    dcp_value *empty;
    dcp_list_create(NULL, &empty, NULL);
    dcp_dict_set(into, dcp_key_str("groups"), empty, NULL);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.open.storage = st;
    opts.prefix = "model.";
    opts.rename = to_old_name;
    opts.exact = true;
    if (dcp_load(NULL, "", into, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(b[0] == 1 && b[1] == 2);
    assert_true(dcp_value_equal(dcp_dict_get_str(into, "groups"), dcp_dict_get_str(dcp_dict_get_str(state, "model"), "groups")));
    dcp_value_free(state);
    dcp_value_free(into);
    dcp_storage_free(st);
}

/* ---- refusals ---- */

static void save__an_existing_checkpoint_is_only_replaced_on_request(void **unused)
{
    (void)unused;
    dcp_storage *st = memory_storage();
    dcp_value *one, *two;
    dcp_dict_create(NULL, &one, NULL);
    dcp_dict_create(NULL, &two, NULL);
    dcp_dict_set_int(one, "n", 1, NULL);
    dcp_dict_set_int(two, "n", 2, NULL);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    save(st, one, opts, NULL);
    opts.storage = st;
    assert_int_equal(dcp_save(NULL, "", two, &opts, NULL, NULL), DCP_EXISTS);
    dcp_value *loaded = read_all(st);
    assert_true(dcp_value_equal(loaded, one));
    dcp_value_free(loaded);
    opts.overwrite = true;
    save(st, two, opts, NULL);
    loaded = read_all(st);
    assert_true(dcp_value_equal(loaded, two));
    dcp_value_free(loaded);
    dcp_value_free(one);
    dcp_value_free(two);
    dcp_storage_free(st);
}

static void save__a_target_that_does_not_know_a_dtype_is_refused_before_writing(void **unused)
{
    (void)unused;
    uint8_t byte = 1;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT8_E4M3FN, 0, NULL, &byte);
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "f8", &t, NULL);
    dcp_storage *st = memory_storage(), *counting;
    dcp_storage_counts counts = {0};
    dcp_storage_count(NULL, st, &counts, &counting, NULL);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    opts.storage = counting;
    opts.target_release = 201;
    assert_int_equal(dcp_save(NULL, "", state, &opts, &report, NULL), DCP_UNSUPPORTED);
    dcp_stat info;
    assert_int_equal(st->ops->stat(st, "__0_0.distcp", &info, NULL), DCP_NOT_FOUND);
    opts.target_release = 0;
    assert_int_equal(dcp_save(NULL, "", state, &opts, &report, NULL), DCP_OK);
    assert_int_equal(report.target_release, 202);
    dcp_value_free(state);
    dcp_storage_free(counting);
    dcp_storage_free(st);
}

/* A path may be any bytes, but a text in a pickle is Unicode: PyTorch and we could not read the metadata. */
static void save__a_place_that_is_no_text_is_not_noted(void **unused)
{
    (void)unused;
    dcp_storage *st = memory_storage();
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_int(state, "n", 1, NULL);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.checkpoint_id = "run/\xfe\xff";
    save(st, state, opts, NULL);
    dcp_checkpoint *ck = open_in(st);
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    assert_int_equal(dcp_checkpoint_get_info(ck, &info, NULL), DCP_OK);
    assert_string_equal(info.checkpoint_id, "");
    dcp_checkpoint_close(ck);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__names_that_collide_are_refused(void **unused)
{
    (void)unused;
    dcp_value *state, *inner;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &inner, NULL);
    dcp_dict_set_int(inner, "b", 1, NULL);
    dcp_dict_set_int(state, "a.b", 2, NULL);
    dcp_dict_set(state, dcp_key_str("a"), inner, NULL);
    dcp_storage *st = memory_storage();
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    assert_int_equal(dcp_save(NULL, "", state, &opts, NULL, NULL), DCP_MISMATCH);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__options_that_make_no_sense_are_refused(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_storage *st = memory_storage();
    dcp_stat s;
    dcp_dict_create(NULL, &state, NULL);
    dcp_save_opts wrong[10];
    for (size_t i = 0; i < 10; i++) {
        wrong[i] = (dcp_save_opts)DCP_SAVE_OPTS_INIT;
        wrong[i].storage = st;
    }
    wrong[0].struct_size--;
    wrong[1].files = -1;
    wrong[2].files = 1001;
    wrong[3].target_release = 200;
    wrong[4].save_id = "not an id";
    wrong[5].save_id = "";
    wrong[6].save_id = "0123456789012345678901234567890123456789";
    wrong[7].serialization = (dcp_serialization)7;
    wrong[8].serialization = DCP_SERIALIZE_SAFETENSORS;
    wrong[8].transform = "stream.zstd/1";
    wrong[9].transform = "stream.unknown/1";
    for (size_t i = 0; i < 10; i++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = dcp_save(NULL, "", state, &wrong[i], NULL, &err);
        if (status != (i == 9 ? DCP_UNSUPPORTED : DCP_ARG)) {
            fail_msg("case %zu: %s: %s", i, dcp_status_name(status), err.message);
        }
    }
    assert_int_equal(dcp_save(NULL, NULL, state, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_save(NULL, "", NULL, &wrong[1], NULL, NULL), DCP_ARG);
    assert_int_equal(st->ops->stat(st, ".metadata", &s, NULL), DCP_NOT_FOUND);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void save__what_cannot_be_saved_is_refused(void **unused)
{
    (void)unused;
    uint8_t byte = 1;
    int64_t huge[] = {INT64_C(1) << 40, INT64_C(1) << 40}, one[] = {1};
    dcp_value *state, *v;
    dcp_storage *st = memory_storage();
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    dcp_dict_create(NULL, &state, NULL);
    dcp_tensor t = dcp_tensor_make(DCP_UINT8, 2, huge, &byte);
    assert_int_not_equal(dcp_dict_set_tensor(state, "huge", &t, NULL), DCP_OK);
    t = dcp_tensor_make(DCP_UINT8, DCP_MAX_NDIM + 1, huge, &byte);
    assert_int_not_equal(dcp_dict_set_tensor(state, "deep", &t, NULL), DCP_OK);
    /* 2^61 elements of 8 bytes: the elements can be counted, the bytes cannot. Stride 0, so that there is memory for them. */
    int64_t many[] = {INT64_C(1) << 61}, still[] = {0};
    double d[3] = {1, 2, 3};
    t = (dcp_tensor){DCP_FLOAT64, 1, many, still, d, {DCP_DEVICE_CPU, 0}};
    assert_int_equal(dcp_dict_set_tensor(state, "many", &t, NULL), DCP_LIMIT);
    /* 2^59 of them, in three tensors: each fits in a file, all together do not. */
    many[0] = INT64_C(1) << 59;
    for (int i = 0; i < 3; i++) {
        char key[8];
        snprintf(key, sizeof key, "%d", i);
        t.data = d + i;
        assert_int_equal(dcp_dict_set_tensor(state, key, &t, NULL), DCP_OK);
    }
    assert_int_equal(dcp_save(NULL, "", state, &opts, NULL, NULL), DCP_LIMIT);
    dcp_value_free(state);

    dcp_dict_create(NULL, &state, NULL);
    t = dcp_tensor_make(DCP_UINT8, 1, one, &byte);
    t.device.type = (dcp_device_type)99; /* on every machine there is no such device */
    assert_int_equal(dcp_dict_set_tensor(state, "device", &t, NULL), DCP_OK);
    assert_int_equal(dcp_save(NULL, "", state, &opts, NULL, NULL), DCP_ARG);
    dcp_value_free(state);

    dcp_list_create(NULL, &v, NULL);
    assert_int_not_equal(dcp_save(NULL, "", v, &opts, NULL, NULL), DCP_OK); /* no dict */
    dcp_value_free(v);
    dcp_stat s;
    assert_int_equal(st->ops->stat(st, ".metadata", &s, NULL), DCP_NOT_FOUND);
    assert_int_equal(st->ops->stat(st, "__0_0.distcp", &s, NULL), DCP_NOT_FOUND);
    dcp_storage_free(st);
}

/* ---- plans that callers change ---- */

static dcp_save_plan *empty_plan(dcp_value **state)
{
    dcp_save_plan *plan;
    dcp_dict_create(NULL, state, NULL);
    assert_int_equal(dcp_plan_save(NULL, *state, &plan, NULL), DCP_OK);
    return plan;
}

static void plan__items_that_contradict_themselves_are_refused(void **unused)
{
    (void)unused;
    float data[6] = {0};
    int64_t extents[] = {2, 3}, zeros[] = {0, 0}, other[] = {3, 3}, negative[] = {-1, 3};
    dcp_value *state;
    dcp_save_plan *plan = empty_plan(&state);
    dcp_key key = dcp_key_str("w");
    dcp_write_item good = {.fqn = dcp_str_of("w"),
                           .path = &key,
                           .path_len = 1,
                           .kind = DCP_ITEM_TENSOR,
                           .dtype = DCP_FLOAT32,
                           .ndim = 2,
                           .global_extents = extents,
                           .box = {zeros, extents},
                           .tensor = dcp_tensor_make(DCP_FLOAT32, 2, extents, data)};
    dcp_write_item wrong[10];
    for (size_t i = 0; i < 10; i++) {
        wrong[i] = good;
    }
    wrong[0].fqn.ptr = NULL;
    wrong[1].path = NULL;
    wrong[2].kind = (dcp_item_kind)9;
    wrong[3].kind = DCP_ITEM_OBJECT;
    wrong[4].ndim = DCP_MAX_NDIM + 1;
    wrong[5].box.sizes = other;
    wrong[6].tensor.extents = other;
    wrong[7].tensor.dtype = DCP_INT32;
    wrong[8].global_extents = negative;
    wrong[9].tensor.data = NULL;
    for (size_t i = 0; i < 10; i++) {
        if (dcp_save_plan_add(plan, &wrong[i], NULL) != DCP_ARG) {
            fail_msg("item %zu was taken", i);
        }
    }
    assert_int_equal(dcp_save_plan_count(plan), 0);
    assert_int_equal(dcp_save_plan_add(plan, &good, NULL), DCP_OK);
    assert_int_equal(dcp_save_plan_item(plan, 0)->bytes, sizeof data);
    assert_null(dcp_save_plan_item(plan, 1));
    dcp_save_plan_remove(plan, 5);
    dcp_save_plan_remove(plan, 0);
    assert_int_equal(dcp_save_plan_count(plan), 0);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static dcp_status write_plan(const dcp_save_plan *plan)
{
    dcp_storage *st = memory_storage();
    dcp_save_session *s;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_stat left;
    opts.storage = st;
    assert_int_equal(dcp_save_begin(NULL, "", &opts, &s, NULL), DCP_OK);
    dcp_status status = dcp_save_write(s, plan, NULL);
    if (status == DCP_OK) {
        status = dcp_save_commit(s, NULL, NULL);
    } else {
        dcp_save_abort(s);
        assert_int_equal(st->ops->stat(st, "__0_0.distcp", &left, NULL), DCP_NOT_FOUND);
    }
    dcp_storage_free(st);
    return status;
}

static void plan__chunks_may_leave_gaps_but_not_overlap(void **unused)
{
    (void)unused;
    float data[6] = {0};
    int64_t extents[] = {6}, sizes[] = {3}, first[] = {0}, middle[] = {2}, last[] = {3};
    dcp_value *state;
    dcp_save_plan *plan = empty_plan(&state);
    dcp_key key = dcp_key_str("w");
    dcp_write_item item = {.fqn = dcp_str_of("w"),
                           .path = &key,
                           .path_len = 1,
                           .kind = DCP_ITEM_TENSOR,
                           .dtype = DCP_FLOAT32,
                           .ndim = 1,
                           .global_extents = extents,
                           .box = {first, sizes},
                           .tensor = dcp_tensor_make(DCP_FLOAT32, 1, sizes, data)};
    assert_int_equal(dcp_save_plan_add(plan, &item, NULL), DCP_OK);
    assert_int_equal(write_plan(plan), DCP_OK); /* another process may hold the rest */
    item.box.offsets = middle;
    assert_int_equal(dcp_save_plan_add(plan, &item, NULL), DCP_OK);
    assert_int_equal(write_plan(plan), DCP_ARG);
    dcp_save_plan_remove(plan, 1);
    item.box.offsets = last;
    assert_int_equal(dcp_save_plan_add(plan, &item, NULL), DCP_OK);
    assert_int_equal(write_plan(plan), DCP_OK);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(save__any_tree_comes_back_as_it_was),
        cmocka_unit_test(save__tied_tensors_are_one_record_and_views_their_own_elements),
        cmocka_unit_test(load__fills_strided_tensors_and_replaces_objects_in_place),
        cmocka_unit_test(load__differences_are_all_reported_and_nothing_is_changed),
        cmocka_unit_test(load__prefix_rename_and_values_below_an_empty_list),
        cmocka_unit_test(save__an_existing_checkpoint_is_only_replaced_on_request),
        cmocka_unit_test(save__a_target_that_does_not_know_a_dtype_is_refused_before_writing),
        cmocka_unit_test(save__a_place_that_is_no_text_is_not_noted),
        cmocka_unit_test(save__names_that_collide_are_refused),
        cmocka_unit_test(save__safetensors_in_data_files_come_back),
        cmocka_unit_test(save__twenty_saves_in_one_directory_leave_the_files_of_the_last),
        cmocka_unit_test(save__empty_state_leaves_metadata_and_an_empty_file),
        cmocka_unit_test(save__nan_bits_are_kept),
        cmocka_unit_test(save__any_name_comes_back),
        cmocka_unit_test(save__shared_values_and_tensors_inside_tuples_come_back),
        cmocka_unit_test(copy__objects_of_unknown_classes_pass_through),
        cmocka_unit_test(load__any_strides_on_both_sides),
        cmocka_unit_test(save__options_that_make_no_sense_are_refused),
        cmocka_unit_test(save__what_cannot_be_saved_is_refused),
        cmocka_unit_test(plan__items_that_contradict_themselves_are_refused),
        cmocka_unit_test(plan__chunks_may_leave_gaps_but_not_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
