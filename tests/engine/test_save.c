/* Saving and loading back in one process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
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
        cmocka_unit_test(save__names_that_collide_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
