/* Comparing checkpoints, against differences that are put in and counted here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/memory_store.h"
#include "support/random.h"

#define MAX_SEEN 16

typedef struct seen {
    dcp_item_difference d[MAX_SEEN];
    char names[MAX_SEEN][32];
    int64_t first[MAX_SEEN][4];
    size_t n;
} seen;

static void see(void *user, const dcp_item_difference *d)
{
    seen *s = user;
    const dcp_item *item = d->a ? d->a : d->b;
    assert_true(s->n < MAX_SEEN && strlen(d->text) > 0);
    s->d[s->n] = *d;
    snprintf(s->names[s->n], sizeof s->names[0], "%s", item->fqn.ptr);
    for (int i = 0; d->first && i < item->ndim && i < 4; i++) {
        s->first[s->n][i] = d->first[i];
    }
    s->n++;
}

static const dcp_item_difference *find(const seen *s, const char *name)
{
    for (size_t i = 0; i < s->n; i++) {
        if (strcmp(s->names[i], name) == 0) {
            return &s->d[i];
        }
    }
    fail_msg("no difference of %s", name);
    return NULL;
}

/* Saves and frees a state. */
static void save(const char *path, dcp_value *state)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    if (dcp_save(NULL, path, state, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(state);
}

static dcp_diff_report diff(double atol, double rtol, seen *out)
{
    dcp_checkpoint *a = reopen("a"), *b = reopen("b");
    dcp_diff_opts opts = DCP_DIFF_OPTS_INIT;
    dcp_diff_report report = DCP_DIFF_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    out->n = 0;
    opts.atol = atol;
    opts.rtol = rtol;
    opts.difference = see;
    opts.user = out;
    if (dcp_diff(a, b, &opts, &report, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(report.n_differences, out->n);
    dcp_checkpoint_close(a);
    dcp_checkpoint_close(b);
    return report;
}

/* One tensor on each side. */
static void save_both(dcp_dtype dtype_a, void *a, dcp_dtype dtype_b, void *b, int ndim, const int64_t *shape)
{
    for (int side = 0; side < 2; side++) {
        dcp_value *state;
        dcp_dict_create(NULL, &state, NULL);
        dcp_tensor t = dcp_tensor_make(side ? dtype_b : dtype_a, ndim, shape, side ? b : a);
        dcp_dict_set_tensor(state, "t", &t, NULL);
        save(side ? "b" : "a", state);
    }
}

/* ---- structure ---- */

static void diff__every_kind_of_difference_is_told(void **state)
{
    (void)state;
    dcp_value *a, *b;
    float f[6] = {0, 1, 2, 3, 4, 5};
    int64_t row[] = {6}, grid[] = {2, 3};
    dcp_tensor flat = dcp_tensor_make(DCP_FLOAT32, 1, row, f), folded = dcp_tensor_make(DCP_FLOAT32, 2, grid, f);
    dcp_tensor as_int = dcp_tensor_make(DCP_INT32, 1, row, f);
    dcp_dict_create(NULL, &a, NULL);
    dcp_dict_create(NULL, &b, NULL);
    dcp_dict_set_tensor(a, "same", &flat, NULL);
    dcp_dict_set_tensor(b, "same", &flat, NULL);
    dcp_dict_set_tensor(a, "gone", &flat, NULL);
    dcp_dict_set_tensor(b, "new", &flat, NULL);
    dcp_dict_set_tensor(a, "shape", &flat, NULL);
    dcp_dict_set_tensor(b, "shape", &folded, NULL);
    dcp_dict_set_tensor(a, "dtype", &flat, NULL);
    dcp_dict_set_tensor(b, "dtype", &as_int, NULL);
    dcp_dict_set_tensor(a, "kind", &flat, NULL);
    dcp_dict_set_int(b, "kind", 3, NULL);
    dcp_dict_set_int(a, "step", 7, NULL);
    dcp_dict_set_int(b, "step", 8, NULL);
    dcp_dict_set_string(a, "text", "x", NULL);
    dcp_dict_set_string(b, "text", "x", NULL);
    save("a", a);
    save("b", b);
    seen s;
    dcp_diff_report r = diff(0, 0, &s);
    assert_int_equal(s.n, 6);
    assert_int_equal(find(&s, "gone")->kind, DCP_DIFF_MISSING);
    assert_int_equal(find(&s, "new")->kind, DCP_DIFF_UNEXPECTED);
    assert_int_equal(find(&s, "shape")->kind, DCP_DIFF_SHAPE);
    assert_int_equal(find(&s, "dtype")->kind, DCP_DIFF_DTYPE);
    assert_int_equal(find(&s, "dtype")->n_different, 5); /* all but the zero: the bits of a float as an integer */
    assert_int_equal(find(&s, "kind")->kind, DCP_DIFF_KIND);
    assert_int_equal(find(&s, "step")->kind, DCP_DIFF_VALUE);
    assert_null(find(&s, "gone")->b);
    assert_null(find(&s, "new")->a);
    assert_int_equal(r.n_items, 6);
    assert_int_equal(r.n_missing + r.n_unexpected + r.n_shape + r.n_dtype + r.n_kind + r.n_value, 6);
}

/* ---- values ---- */

static void diff__counts_places_and_errors(void **state)
{
    (void)state;
    float a[12], b[12];
    int64_t shape[] = {3, 4};
    seen s;
    for (int i = 0; i < 12; i++) {
        a[i] = b[i] = (float)i;
    }
    b[6] = 6.5f;
    b[11] = 9;
    save_both(DCP_FLOAT32, a, DCP_FLOAT32, b, 2, shape);
    dcp_diff_report r = diff(0, 0, &s);
    assert_int_equal(s.n, 1);
    assert_int_equal(s.d[0].n_different, 2);
    assert_int_equal(s.first[0][0], 1);
    assert_int_equal(s.first[0][1], 2);
    assert_true(s.d[0].max_abs == 2 && s.d[0].max_rel == 2.0 / 9 && r.max_abs == 2);
    diff(0.5, 0, &s); /* 6 and 6.5 are just equal */
    assert_int_equal(s.d[0].n_different, 1);
    assert_int_equal(s.first[0][0], 2);
    assert_int_equal(s.first[0][1], 3);
    diff(0, 0.25, &s);
    assert_int_equal(s.n, 0);
}

static void diff__nan_infinity_and_signs_of_zero(void **state)
{
    (void)state;
    float a[] = {NAN, INFINITY, 0.0f, NAN, INFINITY, -INFINITY}, b[] = {NAN, INFINITY, -0.0f, 1, 1, INFINITY};
    int64_t shape[] = {6};
    seen s;
    save_both(DCP_FLOAT32, a, DCP_FLOAT32, b, 1, shape);
    diff(0, 0, &s);
    assert_int_equal(s.d[0].n_different, 4);
    assert_int_equal(s.first[0][0], 2);
    assert_true(isinf(s.d[0].max_abs) && isinf(s.d[0].max_rel));
    diff(1e30, 1e30, &s); /* no tolerance makes these three equal */
    assert_int_equal(s.d[0].n_different, 3);
    assert_int_equal(s.first[0][0], 3);
}

static void diff__integers_beyond_53_bits(void **state)
{
    (void)state;
    uint64_t a[] = {UINT64_MAX, 5}, b[] = {UINT64_MAX - 1, 5};
    int64_t c[] = {INT64_MIN}, d[] = {INT64_MAX}, two[] = {2}, one[] = {1};
    seen s;
    save_both(DCP_UINT64, a, DCP_UINT64, b, 1, two);
    diff(0.5, 0, &s);
    assert_int_equal(s.d[0].n_different, 1);
    assert_true(s.d[0].max_abs == 1);
    save_both(DCP_INT64, c, DCP_INT64, d, 1, one);
    diff(0, 0, &s);
    assert_true(s.d[0].max_abs == 0x1p64);
}

static void diff__other_dtypes_are_compared_as_numbers(void **state)
{
    (void)state;
    float a[] = {1, 2, 3.001953125f};        /* the last is no bfloat16 */
    uint16_t b[] = {0x3f80, 0x4000, 0x4040}; /* 1, 2, 3 */
    float c[] = {1, 2, 0, -1};
    int64_t three[] = {3}, two[] = {2};
    seen s;
    save_both(DCP_FLOAT32, a, DCP_BFLOAT16, b, 1, three);
    diff(0, 0, &s);
    assert_int_equal(s.d[0].kind, DCP_DIFF_DTYPE);
    assert_int_equal(s.d[0].n_different, 1);
    assert_true(s.d[0].max_abs == 0.001953125);
    save_both(DCP_COMPLEX64, c, DCP_FLOAT32, c, 1, two); /* no order between these */
    diff(0, 0, &s);
    assert_int_equal(s.d[0].kind, DCP_DIFF_DTYPE);
    assert_int_equal(s.d[0].n_different, 0);
}

/* Over several slabs, with elements changed at random: their number, the first one and the largest error are known. */
static void diff__random_changes_are_found(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("diff");
    int64_t shape[] = {3, 7, 190000};
    size_t n = 3 * 7 * 190000;
    float *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b);
    for (int round = 0; round < 3; round++) {
        size_t first = n, changed = 0;
        double largest = 0;
        for (size_t i = 0; i < n; i++) {
            a[i] = b[i] = (float)(i % 1000);
        }
        for (int64_t i = test_random_below(&rnd, 40); i >= 0; i--) {
            size_t at = (size_t)test_random_below(&rnd, (int64_t)n);
            float by = (float)(1 + test_random_below(&rnd, 100));
            if (a[at] == b[at]) {
                b[at] += by;
                changed++;
                first = at < first ? at : first;
                largest = by > largest ? by : largest;
            }
        }
        seen s;
        save_both(DCP_FLOAT32, a, DCP_FLOAT32, b, 3, shape);
        dcp_diff_report r = diff(0, 0, &s);
        assert_int_equal(s.d[0].n_different, changed);
        assert_int_equal((size_t)((s.first[0][0] * 7 + s.first[0][1]) * 190000 + s.first[0][2]), first);
        assert_true(s.d[0].max_abs == largest);
        assert_int_equal(r.bytes, n * sizeof *a);
    }
    free(a);
    free(b);
}

/* ---- failures ---- */

static bool stop(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    assert_true(done <= total);
    return false;
}

static void diff__is_canceled_and_refuses_wrong_arguments(void **state)
{
    (void)state;
    float a[] = {1}, b[] = {2};
    int64_t shape[] = {1};
    dcp_diff_opts opts = DCP_DIFF_OPTS_INIT;
    dcp_diff_report report = DCP_DIFF_REPORT_INIT;
    save_both(DCP_FLOAT32, a, DCP_FLOAT32, b, 1, shape);
    dcp_checkpoint *x = reopen("a"), *y = reopen("b");
    opts.progress = stop;
    assert_int_equal(dcp_diff(x, y, &opts, &report, NULL), DCP_CANCELED);
    opts.progress = NULL;
    opts.rtol = -1;
    assert_int_equal(dcp_diff(x, y, &opts, &report, NULL), DCP_ARG);
    assert_int_equal(dcp_diff(x, NULL, NULL, &report, NULL), DCP_ARG);
    assert_int_equal(dcp_diff(x, y, NULL, NULL, NULL), DCP_OK);
    dcp_checkpoint_close(x);
    dcp_checkpoint_close(y);
}

static dcp_status diff_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_diff_report report = DCP_DIFF_REPORT_INIT;
    dcp_checkpoint *a = NULL, *b = NULL;
    (void)user;
    open.storage = storage;
    dcp_status status = dcp_checkpoint_open(ctx, "a", &open, &a, err);
    status = status == DCP_OK ? dcp_checkpoint_open(ctx, "b", &open, &b, err) : status;
    status = status == DCP_OK ? dcp_diff(a, b, NULL, &report, err) : status;
    dcp_checkpoint_close(a);
    dcp_checkpoint_close(b);
    return status;
}

static void diff__every_failed_allocation_is_survived(void **state)
{
    (void)state;
    for (int side = 0; side < 2; side++) {
        dcp_value *v;
        float f[] = {1, (float)side};
        int64_t shape[] = {2};
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, shape, f);
        dcp_dict_create(NULL, &v, NULL);
        dcp_dict_set_tensor(v, "t", &t, NULL);
        dcp_dict_set_int(v, "step", side, NULL);
        save(side ? "b" : "a", v);
    }
    assert_true(failing_alloc_walk(diff_for_walk, NULL) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(diff__every_kind_of_difference_is_told),
        cmocka_unit_test(diff__counts_places_and_errors),
        cmocka_unit_test(diff__nan_infinity_and_signs_of_zero),
        cmocka_unit_test(diff__integers_beyond_53_bits),
        cmocka_unit_test(diff__other_dtypes_are_compared_as_numbers),
        cmocka_unit_test(diff__random_changes_are_found),
        cmocka_unit_test(diff__is_canceled_and_refuses_wrong_arguments),
        cmocka_unit_test(diff__every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
