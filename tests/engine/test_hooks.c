/* What callers with object models of their own use: finished records, objects handed over, other dtypes, progress, and ranks that
 * have failed before they take part. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/ranks.h"

static dcp_storage *memory_storage(void)
{
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    return st;
}

static dcp_value *new_dict(void)
{
    dcp_value *d;
    assert_int_equal(dcp_dict_create(NULL, &d, NULL), DCP_OK);
    return d;
}

static void save(dcp_storage *st, const char *path, dcp_value *state, dcp_save_opts opts)
{
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    if (dcp_save(NULL, path, state, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
}

static dcp_checkpoint *open_in(dcp_storage *st, const char *path)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &opts, &ck, NULL), DCP_OK);
    return ck;
}

/* ---- records ---- */

/* A dict of n entries: a record of any size that is a real one. */
static dcp_value *object_of(int64_t n)
{
    dcp_value *list, *v;
    dcp_list_create(NULL, &list, NULL);
    for (int64_t i = 0; i < n; i++) {
        dcp_int_create(NULL, i * 1000003, &v, NULL);
        dcp_list_append(list, v, NULL);
    }
    return list;
}

static void record_of(dcp_storage *st, const char *path, const char *name, char **bytes, size_t *n)
{
    dcp_checkpoint *ck = open_in(st, path);
    const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(name));
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_read_record(ck, item, bytes, n, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_checkpoint_close(ck);
}

static void copy_record(int64_t n_entries, const char *transform)
{
    dcp_storage *st = memory_storage();
    dcp_value *first = new_dict(), *second = new_dict(), *record, *object = object_of(n_entries), *loaded;
    char *bytes, *again;
    size_t n, n_again;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    dcp_dict_set(first, dcp_key_str("o"), dcp_value_retain(object), NULL);
    save(st, "first", first, opts);
    record_of(st, "first", "o", &bytes, &n);
    assert_memory_equal(bytes, "PK\3\4", 4);

    assert_int_equal(dcp_record_create(NULL, bytes, n, &record, NULL), DCP_OK);
    dcp_dict_set(second, dcp_key_str("same"), record, NULL);
    dcp_dict_set_int(second, "step", 3, NULL);
    opts.transform = transform;
    save(st, "second", second, opts);
    record_of(st, "second", "same", &again, &n_again);
    assert_int_equal(n, n_again);
    assert_memory_equal(bytes, again, n);

    dcp_checkpoint *ck = open_in(st, "second");
    assert_int_equal(dcp_read_object(ck, dcp_checkpoint_find(ck, dcp_str_of("same")), &loaded, NULL), DCP_OK);
    assert_true(dcp_value_equal(object, loaded));
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    dcp_checkpoint_close(ck);

    dcp_value_free(loaded);
    dcp_value_free(object);
    dcp_value_free(first);
    dcp_value_free(second);
    dcp_text_free(NULL, bytes);
    dcp_text_free(NULL, again);
    dcp_storage_free(st);
}

static void save__finished_records_are_written_as_they_are(void **unused)
{
    (void)unused;
    copy_record(3, NULL);
    copy_record(3, "stream.zstd/1");
    copy_record(300000, NULL); /* longer than what is packed together, and than a writer's buffer */
    copy_record(300000, "stream.zstd/1");
}

static void save__a_record_cannot_be_part_of_another_object(void **unused)
{
    (void)unused;
    dcp_storage *st = memory_storage();
    dcp_value *state = new_dict(), *tuple, *record;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    dcp_seq_create(NULL, DCP_KIND_TUPLE, &tuple, NULL);
    dcp_record_create(NULL, "PK", 2, &record, NULL);
    dcp_list_append(tuple, record, NULL);
    dcp_dict_set(state, dcp_key_str("t"), tuple, NULL);
    assert_int_equal(dcp_save(NULL, "", state, &opts, NULL, NULL), DCP_ARG);
    dcp_value_free(state);
    dcp_storage_free(st);
}

static void record__no_record_of_a_tensor(void **unused)
{
    (void)unused;
    dcp_storage *st = memory_storage();
    dcp_value *state = new_dict();
    int64_t extents[] = {4};
    float data[4] = {1, 2, 3, 4};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, extents, data);
    char *bytes;
    size_t n;
    dcp_dict_set_tensor(state, "w", &t, NULL);
    save(st, "", state, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    dcp_checkpoint *ck = open_in(st, "");
    assert_int_equal(dcp_read_record(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), &bytes, &n, NULL), DCP_MISMATCH);
    dcp_checkpoint_close(ck);
    dcp_value_free(state);
    dcp_storage_free(st);
}

/* ---- loading ---- */

#define N_BIG (1 << 20)

typedef struct hooks {
    int64_t step;
    int n_objects, n_converts, n_progress;
    double doubles[4];
    bool stops;
    uint64_t last_done, total;
    bool fails;
} hooks;

static dcp_status take_object(void *user, const dcp_load_object *object, dcp_error *err)
{
    hooks *h = user;
    dcp_value *v;
    h->n_objects++;
    if (h->fails) {
        return dcp_error_set(err, DCP_STATE, "not wanted");
    }
    dcp_status status = dcp_read_load_object(object, &v, err);
    if (status == DCP_OK) {
        if (object->path_len == 2 && strcmp(object->fqn.ptr, "opt.step") == 0) {
            dcp_value_int(v, &h->step);
        }
        dcp_value_free(v);
    }
    return status;
}

static dcp_value *take_doubles(void *user, dcp_str fqn, dcp_value *tensor, dcp_dtype saved)
{
    hooks *h = user;
    dcp_value *v = NULL;
    int64_t extents[] = {4};
    h->n_converts++;
    if (strcmp(fqn.ptr, "w") == 0 && dcp_value_dtype(tensor) == DCP_FLOAT32 && saved == DCP_FLOAT64) {
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT64, 1, extents, h->doubles);
        dcp_tensor_create(NULL, &t, &v, NULL);
    }
    return v;
}

static bool progress(void *user, uint64_t done, uint64_t total)
{
    hooks *h = user;
    h->n_progress++;
    h->stops |= done < h->last_done;
    h->last_done = done;
    h->total = total;
    return !h->stops;
}

typedef struct fixture {
    dcp_storage *st;
    double w[4];
    float *big;
} fixture;

static void set_tensor(dcp_value *state, const char *name, dcp_dtype dtype, int64_t n, void *data)
{
    dcp_tensor t = dcp_tensor_make(dtype, 1, &n, data);
    assert_int_equal(dcp_dict_set_tensor(state, name, &t, NULL), DCP_OK);
}

static dcp_value *state_of(dcp_dtype dtype, void *w, float *big)
{
    dcp_value *state = new_dict(), *opt = new_dict();
    set_tensor(state, "w", dtype, 4, w);
    set_tensor(state, "big", DCP_FLOAT32, N_BIG, big);
    dcp_dict_set_int(opt, "step", 41, NULL);
    dcp_dict_set(state, dcp_key_str("opt"), opt, NULL);
    return state;
}

static int set_up(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    f->st = memory_storage();
    f->big = calloc(N_BIG, sizeof *f->big);
    for (int i = 0; i < 4; i++) {
        f->w[i] = i + 0.5;
    }
    f->big[N_BIG - 1] = 7;
    dcp_value *v = state_of(DCP_FLOAT64, f->w, f->big);
    save(f->st, "", v, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    dcp_value_free(v);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    dcp_storage_free(f->st);
    free(f->big);
    free(f);
    return 0;
}

static dcp_status load_into(const fixture *f, dcp_value *into, hooks *h, dcp_load_report *report)
{
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = f->st;
    opts.object = take_object;
    opts.convert = take_doubles;
    opts.progress = progress;
    opts.user = h;
    return dcp_load(NULL, "", into, &opts, report, NULL);
}

static void load__objects_and_other_dtypes_go_to_the_caller(void **state)
{
    const fixture *f = *state;
    hooks h = {0};
    float w[4] = {-1, -1, -1, -1}, *big = calloc(N_BIG, sizeof *big);
    dcp_value *into = state_of(DCP_FLOAT32, w, big), *step;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    dcp_dict_set_int(dcp_dict_get_str(into, "opt"), "step", 0, NULL);
    assert_int_equal(load_into(f, into, &h, &report), DCP_OK);
    assert_int_equal(h.step, 41);
    assert_int_equal(h.n_objects, 1);
    assert_int_equal(h.n_converts, 1);
    assert_memory_equal(h.doubles, f->w, sizeof f->w);
    assert_true(w[0] == -1 && big[N_BIG - 1] == 7);
    assert_int_equal(report.n_tensors, 2);
    int64_t kept = -1;
    step = dcp_dict_get_str(dcp_dict_get_str(into, "opt"), "step");
    assert_true(dcp_value_int(step, &kept) && kept == 0); /* the state's own was left alone */
    assert_int_equal(h.last_done, h.total);
    assert_int_equal(h.total, N_BIG * 4 + 32);
    dcp_value_free(into);
    free(big);
}

static void load__a_refused_conversion_is_a_difference(void **state)
{
    const fixture *f = *state;
    hooks h = {0};
    int64_t w[4];
    float *big = calloc(N_BIG, sizeof *big);
    dcp_value *into = state_of(DCP_INT64, w, big);
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    assert_int_equal(load_into(f, into, &h, &report), DCP_MISMATCH);
    assert_int_equal(report.n_dtype, 1);
    assert_int_equal(h.n_objects, 0);
    dcp_value_free(into);
    free(big);
}

static void load__a_caller_that_refuses_an_object_ends_the_load(void **state)
{
    const fixture *f = *state;
    hooks h = {.fails = true};
    float *big = calloc(N_BIG, sizeof *big);
    double w[4];
    dcp_value *into = state_of(DCP_FLOAT64, w, big);
    assert_int_equal(load_into(f, into, &h, NULL), DCP_STATE);
    dcp_value_free(into);
    free(big);
}

static void load__progress_that_says_no_cancels(void **state)
{
    const fixture *f = *state;
    hooks h = {.stops = true};
    float *big = calloc(N_BIG, sizeof *big);
    double w[4];
    dcp_value *into = state_of(DCP_FLOAT64, w, big);
    assert_int_equal(load_into(f, into, &h, NULL), DCP_CANCELED);
    assert_int_equal(h.n_objects, 0);
    dcp_value_free(into);
    free(big);
}

typedef struct targets {
    char named[64];
    const char *refused;
} targets;

static dcp_status note_target(void *user, dcp_str fqn, dcp_value *tensor, dcp_error *err)
{
    targets *t = user;
    assert_int_equal(dcp_value_kind(tensor), DCP_KIND_TENSOR);
    strcat(strcat(t->named, fqn.ptr), " ");
    bool is_refused = t->refused && strcmp(t->refused, fqn.ptr) == 0;
    return is_refused ? dcp_error_set(err, DCP_NOSPACE, "not this one") : DCP_OK;
}

static dcp_status load_targets(const fixture *f, dcp_value *into, const char *left_out, targets *t)
{
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = f->st;
    opts.exclude = &left_out;
    opts.n_exclude = left_out != NULL;
    opts.partial = true;
    opts.target = note_target;
    opts.user = t;
    return dcp_load(NULL, "", into, &opts, NULL, NULL);
}

static void load__what_is_filled_is_named_before(void **state)
{
    const fixture *f = *state;
    targets some = {0}, all = {0}, refusing = {.refused = "big"};
    float *big = calloc(N_BIG, sizeof *big);
    double w[4] = {0}, other[4];
    dcp_value *into = state_of(DCP_FLOAT64, w, big);
    set_tensor(into, "not there", DCP_FLOAT64, 4, other);
    assert_int_equal(load_targets(f, into, NULL, &refusing), DCP_NOSPACE);
    assert_true(w[0] == 0 && big[N_BIG - 1] == 0);
    assert_int_equal(load_targets(f, into, "w", &some), DCP_OK);
    assert_string_equal(some.named, "big ");
    assert_int_equal(load_targets(f, into, NULL, &all), DCP_OK);
    assert_string_equal(all.named, "w big ");
    dcp_value_free(into);
    free(big);
}

/* ---- contexts ---- */

static void save__a_plan_cache_outlives_the_contexts_of_saves(void **unused)
{
    (void)unused;
    dcp_storage *st = memory_storage();
    dcp_value *state = new_dict();
    dcp_plan_cache *cache;
    dcp_dict_set_int(state, "step", 3, NULL);
    assert_int_equal(dcp_plan_cache_create(NULL, &cache, NULL), DCP_OK);
    for (int i = 0; i < 3; i++) {
        dcp_context *ctx;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        dcp_save_report report = DCP_SAVE_REPORT_INIT;
        opts.storage = st;
        opts.cache = cache;
        opts.overwrite = true;
        assert_int_equal(dcp_context_create(NULL, &ctx, NULL), DCP_OK);
        assert_int_equal(dcp_save(ctx, "", state, &opts, &report, NULL), DCP_OK);
        assert_int_equal(report.was_planned_before, i > 0);
        dcp_context_free(ctx);
    }
    dcp_plan_cache_free(cache);
    dcp_value_free(state);
    dcp_storage_free(st);
}

/* ---- ranks that have failed before ---- */

typedef struct group_run {
    dcp_storage *st;
    bool is_load;
    int n_failures[4], failed_rank[4];
    dcp_status failed_code[4];
} group_run;

static dcp_status one_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_run *g = user;
    dcp_error failed = {sizeof failed, DCP_NOMEM, 12, 0, -1, DCP_NO_OFFSET, "no room for the state"};
    dcp_save_opts save_opts = DCP_SAVE_OPTS_INIT;
    dcp_load_opts load_opts = DCP_LOAD_OPTS_INIT;
    dcp_failures *failures;
    dcp_value *state;
    dcp_failures_create(NULL, &failures, NULL);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_int(state, "step", 3, NULL);
    save_opts.storage = load_opts.open.storage = g->st;
    save_opts.comm = load_opts.comm = comm;
    save_opts.failures = load_opts.failures = failures;
    save_opts.failed = load_opts.failed = rank == 2 ? &failed : NULL;
    dcp_value *mine = rank == 2 ? NULL : state;
    dcp_status status =
        g->is_load ? dcp_load(NULL, "there", mine, &load_opts, NULL, err) : dcp_save(NULL, "", mine, &save_opts, NULL, err);
    g->n_failures[rank] = (int)dcp_failures_count(failures);
    if (g->n_failures[rank]) {
        g->failed_rank[rank] = dcp_failures_at(failures, 0)->rank;
        g->failed_code[rank] = dcp_failures_at(failures, 0)->code;
    }
    dcp_value_free(state);
    dcp_failures_free(failures);
    return status;
}

static void group__a_rank_that_has_failed_tells_the_others(void **unused)
{
    (void)unused;
    for (int is_load = 0; is_load < 2; is_load++) {
        group_run g = {.st = memory_storage(), .is_load = is_load};
        rank_thread out[4];
        dcp_stat st;
        dcp_value *state = new_dict();
        dcp_dict_set_int(state, "step", 3, NULL);
        save(g.st, "there", state, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        run_ranks(4, one_rank, &g, out);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(out[r].status, DCP_PEER);
            assert_int_equal(g.n_failures[r], 1);
            assert_int_equal(g.failed_rank[r], 2);
            assert_int_equal(g.failed_code[r], DCP_NOMEM);
        }
        assert_int_equal(g.st->ops->stat(g.st, ".metadata", &st, NULL), DCP_NOT_FOUND);
        dcp_value_free(state);
        dcp_storage_free(g.st);
    }
}

/* ---- memory that is lent ---- */

#define LENT_BYTES ((size_t)2 << 20)

typedef struct lender {
    dcp_value *tensors[6], *inner; /* a tensor inside an object */
    bool lends_plain, lends_inner;
    int n_returned;
    uint64_t done_bytes; /* atomic: told by one thread, looked at by another */
    uint64_t done_at_return;
    bool is_refusing;
} lender;

static bool is_lent(void *user, const dcp_tensor *t)
{
    lender *l = user;
    const void *lent[] = {dcp_value_tensor(l->tensors[3])->data, dcp_value_tensor(l->tensors[4])->data};
    return (l->lends_plain && (t->data == lent[0] || t->data == lent[1])) ||
           (l->lends_inner && t->data == dcp_value_tensor(l->inner)->data);
}

/* The caller goes on working with it. */
static void returned(void *user)
{
    lender *l = user;
    l->n_returned++;
    l->done_at_return = __atomic_load_n(&l->done_bytes, __ATOMIC_RELAXED);
    for (int i = 3; l->lends_plain && i < 5; i++) {
        memset(dcp_value_tensor(l->tensors[i])->data, 0xee, LENT_BYTES);
    }
    if (l->lends_inner) {
        memset(dcp_value_tensor(l->inner)->data, 0xee, 100);
    }
}

static bool note_done(void *user, uint64_t done, uint64_t total)
{
    lender *l = user;
    (void)total;
    __atomic_store_n(&l->done_bytes, done, __ATOMIC_RELAXED);
    return !l->is_refusing;
}

static dcp_value *filled(size_t bytes, int first)
{
    dcp_value *v;
    int64_t extents[] = {(int64_t)bytes};
    assert_int_equal(dcp_tensor_alloc(NULL, DCP_UINT8, 1, extents, &v, NULL), DCP_OK);
    for (size_t k = 0; k < bytes; k++) {
        ((uint8_t *)dcp_value_tensor(v)->data)[k] = (uint8_t)(k * 31 + (size_t)first);
    }
    return v;
}

static dcp_value *lending_state(lender *l)
{
    dcp_value *state = new_dict(), *tuple;
    char key[8];
    for (int i = 0; i < 6; i++) {
        l->tensors[i] = filled(LENT_BYTES, i);
        snprintf(key, sizeof key, "t%d", i);
        dcp_dict_set(state, dcp_key_str(key), l->tensors[i], NULL);
    }
    l->inner = filled(100, 9);
    dcp_seq_create(NULL, DCP_KIND_TUPLE, &tuple, NULL);
    dcp_list_append(tuple, l->inner, NULL);
    dcp_dict_set(state, dcp_key_str("object"), tuple, NULL);
    return state;
}

static dcp_status lend(dcp_context *ctx, dcp_storage *st, dcp_value *state, lender *l, dcp_save_opts opts)
{
    dcp_lending lending = {is_lent, returned, l};
    opts.lending = &lending;
    opts.progress = note_done;
    opts.user = l;
    opts.storage = st;
    opts.overwrite = true;
    l->n_returned = 0;
    l->done_bytes = l->done_at_return = 0;
    return dcp_save(ctx, "ck", state, &opts, NULL, NULL);
}

/* What is lent is written first and told once, and what becomes of it afterwards is not saved. */
static void save__lent_memory_is_returned_when_it_is_written(void **unused)
{
    (void)unused;
    dcp_context *ctx;
    dcp_context_opts one = DCP_CONTEXT_OPTS_INIT;
    one.threads = 1;
    assert_int_equal(dcp_context_create(&one, &ctx, NULL), DCP_OK);
    for (int round = 0; round < 10; round++) {
        lender l = {.lends_plain = true, .lends_inner = round & 1}, again = {0};
        dcp_storage *st = memory_storage();
        dcp_value *state = lending_state(&l), *expected = lending_state(&again), *tree;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        opts.files = 1 + round / 2 % 2;
        opts.file_per_item = round / 2 == 2;
        opts.transform = round / 2 == 3 ? "stream.zstd/1" : NULL;
        opts.serialization = round / 2 == 4 ? DCP_SERIALIZE_SAFETENSORS : DCP_SERIALIZE_TORCH_SAVE;
        assert_int_equal(lend(round % 2 ? NULL : ctx, st, state, &l, opts), DCP_OK);
        assert_int_equal(l.n_returned, 1);
        if (round % 2 == 0 && !opts.transform) { /* told with the last block, of which progress is told next */
            assert_true(l.done_at_return <= 2 * LENT_BYTES);
        }
        dcp_checkpoint *ck = open_in(st, "ck");
        assert_int_equal(dcp_read_tree(ck, true, &tree, NULL), DCP_OK);
        assert_true(dcp_value_equal(tree, expected));
        assert_false(dcp_value_equal(tree, state));
        dcp_checkpoint_close(ck);
        dcp_value_free(tree);
        dcp_value_free(state);
        dcp_value_free(expected);
        dcp_storage_free(st);
    }
    dcp_context_free(ctx);
}

static void save__nothing_lent_is_told_at_once_and_a_failure_not(void **unused)
{
    (void)unused;
    lender l = {0};
    dcp_storage *st = memory_storage();
    dcp_value *state = lending_state(&l);
    assert_int_equal(lend(NULL, st, state, &l, (dcp_save_opts)DCP_SAVE_OPTS_INIT), DCP_OK);
    assert_int_equal(l.n_returned, 1);
    assert_int_equal(l.done_at_return, 0);
    l.lends_plain = l.is_refusing = true;
    assert_int_equal(lend(NULL, st, state, &l, (dcp_save_opts)DCP_SAVE_OPTS_INIT), DCP_CANCELED);
    assert_int_equal(l.n_returned, 0);
    dcp_value_free(state);
    dcp_storage_free(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(save__finished_records_are_written_as_they_are),
        cmocka_unit_test(save__a_record_cannot_be_part_of_another_object),
        cmocka_unit_test(record__no_record_of_a_tensor),
        cmocka_unit_test_setup_teardown(load__objects_and_other_dtypes_go_to_the_caller, set_up, tear_down),
        cmocka_unit_test_setup_teardown(load__a_refused_conversion_is_a_difference, set_up, tear_down),
        cmocka_unit_test_setup_teardown(load__a_caller_that_refuses_an_object_ends_the_load, set_up, tear_down),
        cmocka_unit_test_setup_teardown(load__what_is_filled_is_named_before, set_up, tear_down),
        cmocka_unit_test_setup_teardown(load__progress_that_says_no_cancels, set_up, tear_down),
        cmocka_unit_test(save__lent_memory_is_returned_when_it_is_written),
        cmocka_unit_test(save__nothing_lent_is_told_at_once_and_a_failure_not),
        cmocka_unit_test(save__a_plan_cache_outlives_the_contexts_of_saves),
        cmocka_unit_test(group__a_rank_that_has_failed_tells_the_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
