/* Tensors as values: borrowed, owned, lazy, sharded; arithmetic on shapes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <string.h>

#include "state/strided.h"
#include "state/value.h"
#include "support/failing_alloc.h"

static void shape__elems_and_span(void **state)
{
    (void)state;
    int64_t n = 0;
    const int64_t huge = INT64_C(1) << 40;
    assert_true(dcp__elems(0, NULL, &n) && n == 1);
    assert_true(dcp__elems(3, (int64_t[]){2, 3, 4}, &n) && n == 24);
    assert_true(dcp__elems(3, (int64_t[]){huge, huge, 0}, &n) && n == 0);
    assert_false(dcp__elems(2, (int64_t[]){huge, huge}, &n));
    assert_false(dcp__elems(2, (int64_t[]){0, -1}, &n));
    assert_true(dcp__span_elems(2, (int64_t[]){3, 4}, (int64_t[]){1, 3}, &n) && n == 12);
    assert_true(dcp__span_elems(2, (int64_t[]){3, 4}, (int64_t[]){0, 10}, &n) && n == 31);
    assert_true(dcp__span_elems(2, (int64_t[]){0, 4}, (int64_t[]){huge, 1}, &n) && n == 0);
    assert_true(dcp__span_elems(0, NULL, NULL, &n) && n == 1);
    assert_false(dcp__span_elems(1, (int64_t[]){huge}, (int64_t[]){huge}, &n));
    assert_false(dcp__span_elems(1, (int64_t[]){2}, (int64_t[]){-1}, &n));
    assert_false(dcp__span_elems(1, (int64_t[]){2}, (int64_t[]){INT64_MAX}, &n)); /* the last index fits, the count does not */
}

/* Strides of empty and 0-d tensors as PyTorch writes them: formats.md 3.8. */
static void shape__row_major_strides(void **state)
{
    (void)state;
    int64_t s[3];
    dcp__row_major(2, (int64_t[]){0, 8}, s);
    assert_true(s[0] == 8 && s[1] == 1);
    dcp__row_major(3, (int64_t[]){3, 0, 2}, s);
    assert_true(s[0] == 2 && s[1] == 2 && s[2] == 1);
    assert_true(dcp__is_row_major(3, (int64_t[]){2, 3, 4}, (int64_t[]){12, 4, 1}));
    assert_true(dcp__is_row_major(3, (int64_t[]){2, 1, 4}, (int64_t[]){4, 99, 1}));
    assert_true(dcp__is_row_major(2, (int64_t[]){0, 4}, (int64_t[]){77, 78}));
    assert_true(dcp__is_row_major(2, (int64_t[]){5, 4}, NULL));
    assert_true(dcp__is_row_major(0, NULL, NULL));
    assert_false(dcp__is_row_major(2, (int64_t[]){2, 3}, (int64_t[]){1, 2}));
    assert_false(dcp__is_row_major(2, (int64_t[]){2, 3}, (int64_t[]){4, 1}));
    assert_false(dcp__is_row_major(1, (int64_t[]){2}, (int64_t[]){0}));
}

static void tensor__shape_is_copied_and_data_borrowed(void **state)
{
    (void)state;
    float w[6];
    int64_t extents[] = {2, 3}, strides[] = {1, 2};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, w);
    t.strides = strides;
    dcp_value *v = NULL;
    assert_int_equal(dcp_tensor_create(NULL, &t, &v, NULL), DCP_OK);
    memset(extents, 0, sizeof extents);
    memset(strides, 0, sizeof strides);
    const dcp_tensor *got = dcp_value_tensor(v);
    assert_true(got->extents[0] == 2 && got->extents[1] == 3 && got->strides[0] == 1 && got->strides[1] == 2);
    assert_ptr_equal(got->data, w);
    assert_int_equal(dcp_value_dtype(v), DCP_FLOAT32);
    assert_null(dcp__value_lazy(v));
    dcp_value_free(v);
}

static dcp_status try_tensor(dcp_dtype dtype, int ndim, const int64_t *extents, const int64_t *strides, void *data)
{
    dcp_tensor t = {.dtype = dtype, .ndim = ndim, .extents = extents, .strides = strides, .data = data};
    dcp_value *v = NULL;
    dcp_status status = dcp_tensor_create(NULL, &t, &v, NULL);
    assert_true((status == DCP_OK) == (v != NULL));
    dcp_value_free(v);
    return status;
}

static void tensor__bad_shapes_are_refused(void **state)
{
    (void)state;
    char b[16];
    const int64_t huge = INT64_C(1) << 61;
    assert_int_equal(try_tensor(DCP_INT8, 0, NULL, NULL, b), DCP_OK);
    assert_int_equal(try_tensor(DCP_INT8, 1, (int64_t[]){0}, NULL, NULL), DCP_OK);
    assert_int_equal(try_tensor(DCP_INT8, 1, (int64_t[]){1}, NULL, NULL), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, 1, NULL, NULL, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, -1, NULL, NULL, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, DCP_MAX_NDIM + 1, (int64_t[DCP_MAX_NDIM + 1]){0}, NULL, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, 1, (int64_t[]){-1}, NULL, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, 1, (int64_t[]){2}, (int64_t[]){-1}, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_DTYPE_NONE, 0, NULL, NULL, b), DCP_ARG);
    assert_int_equal(try_tensor(DCP_INT8, 2, (int64_t[]){huge, 8}, NULL, b), DCP_LIMIT);
    assert_int_equal(try_tensor(DCP_INT64, 1, (int64_t[]){huge}, NULL, b), DCP_LIMIT);
    assert_int_equal(try_tensor(DCP_INT8, 1, (int64_t[]){16}, (int64_t[]){INT64_MAX / 2}, b), DCP_LIMIT);
    dcp_value *v;
    assert_int_equal(dcp_tensor_create(NULL, NULL, &v, NULL), DCP_ARG);
}

static void tensor__alloc_owns_aligned_memory(void **state)
{
    (void)state;
    dcp_value *v = NULL;
    assert_int_equal(dcp_tensor_alloc(NULL, DCP_FLOAT64, 2, (int64_t[]){3, 5}, &v, NULL), DCP_OK);
    const dcp_tensor *t = dcp_value_tensor(v);
    assert_int_equal((uintptr_t)t->data % 64, 0);
    memset(t->data, 1, 3 * 5 * 8);
    dcp_value_free(v);
    assert_int_equal(dcp_tensor_alloc(NULL, DCP_FLOAT64, 1, (int64_t[]){0}, &v, NULL), DCP_OK);
    dcp_value_free(v);
    assert_int_equal(dcp_tensor_alloc(NULL, DCP_FLOAT64, 1, (int64_t[]){INT64_MAX / 8}, &v, NULL), DCP_NOMEM);
}

static void lazy_tensor__becomes_row_major_memory(void **state)
{
    (void)state;
    dcp_tensor t = dcp_tensor_make(DCP_INT16, 2, (int64_t[]){4, 5}, NULL);
    t.strides = (int64_t[]){1, 4};
    dcp__lazy lazy = {.storage = 3, .storage_offset = 7, .is_neg = true};
    dcp_value *v = NULL;
    assert_int_equal(dcp__lazy_tensor_create(NULL, &t, &lazy, &v, NULL), DCP_OK);
    assert_null(dcp_value_tensor(v)->data);
    assert_int_equal(dcp__value_lazy(v)->storage, 3);
    assert_int_equal(dcp__value_lazy(v)->storage_offset, 7);
    assert_true(dcp__value_lazy(v)->is_neg && !dcp__value_lazy(v)->is_conj);
    assert_int_equal(dcp_value_tensor(v)->strides[1], 4);
    assert_int_equal(dcp__lazy_tensor_materialize(v, NULL), DCP_OK);
    assert_null(dcp__value_lazy(v));
    assert_null(dcp_value_tensor(v)->strides);
    memset(dcp_value_tensor(v)->data, 0, 40);
    assert_int_equal(dcp__lazy_tensor_materialize(v, NULL), DCP_STATE);
    dcp_value_free(v);
}

static dcp_status try_sharded(dcp_dtype dtype, int64_t rows, int64_t cols, int64_t row, int64_t col, void *data)
{
    dcp_tensor chunk = dcp_tensor_make(dtype, 2, (int64_t[]){rows, cols}, data);
    dcp_box box = {(int64_t[]){row, col}, (int64_t[]){2, 3}};
    dcp_value *v = NULL;
    dcp_status status = dcp_sharded_create(NULL, DCP_FLOAT32, 2, (int64_t[]){8, 6}, 1, &chunk, &box, &v, NULL);
    dcp_value_free(v);
    return status;
}

static void sharded__chunks_must_fit(void **state)
{
    (void)state;
    float data[6];
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 3, 6, 3, data), DCP_OK);
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 3, 7, 3, data), DCP_ARG);
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 3, 0, INT64_MAX, data), DCP_ARG);
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 3, -1, 3, data), DCP_ARG);
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 2, 0, 0, data), DCP_MISMATCH);
    assert_int_equal(try_sharded(DCP_INT32, 2, 3, 0, 0, data), DCP_MISMATCH);
    assert_int_equal(try_sharded(DCP_FLOAT32, 2, 3, 0, 0, NULL), DCP_ARG);
}

static void sharded__shapes_are_copied(void **state)
{
    (void)state;
    float data[6];
    int64_t sizes[2][2] = {{2, 3}, {0, 3}}, offsets[2][2] = {{0, 0}, {8, 3}}, strides[2] = {1, 2}, global[2] = {8, 6};
    dcp_tensor chunks[2] = {dcp_tensor_make(DCP_FLOAT32, 2, sizes[0], data), dcp_tensor_make(DCP_FLOAT32, 2, sizes[1], NULL)};
    chunks[0].strides = strides;
    dcp_box boxes[2] = {{offsets[0], sizes[0]}, {offsets[1], sizes[1]}}, box;
    dcp_value *v = NULL;
    assert_int_equal(dcp_sharded_create(NULL, DCP_FLOAT32, 2, global, 2, chunks, boxes, &v, NULL), DCP_OK);
    memset(sizes, 0, sizeof sizes);
    memset(offsets, 0, sizeof offsets);
    memset(strides, 0, sizeof strides);
    memset(global, 0, sizeof global);
    int ndim = 0;
    const int64_t *extents = NULL;
    dcp_tensor chunk;
    assert_true(dcp_sharded_shape(v, &ndim, &extents));
    assert_true(ndim == 2 && extents[0] == 8 && extents[1] == 6);
    assert_int_equal(dcp_value_count(v), 2);
    assert_int_equal(dcp_value_dtype(v), DCP_FLOAT32);
    assert_true(dcp_sharded_chunk(v, 0, &chunk, &box));
    assert_true(chunk.extents[0] == 2 && chunk.extents[1] == 3 && chunk.strides[0] == 1 && chunk.strides[1] == 2);
    assert_ptr_equal(chunk.data, data);
    assert_true(dcp_sharded_chunk(v, 1, &chunk, &box));
    assert_null(chunk.strides);
    assert_true(box.offsets[0] == 8 && box.offsets[1] == 3 && box.sizes[0] == 0 && box.sizes[1] == 3);
    assert_false(dcp_sharded_chunk(v, 2, &chunk, &box));
    dcp_value_free(v);
    assert_int_equal(dcp_sharded_create(NULL, DCP_FLOAT32, 1, (int64_t[]){4}, 0, NULL, NULL, &v, NULL), DCP_OK);
    assert_int_equal(dcp_value_count(v), 0);
    dcp_value_free(v);
}

static dcp_status make_tensors(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    float data[6];
    int64_t extents[] = {2, 3}, offsets[] = {0, 0};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, data);
    dcp_box box = {offsets, extents};
    dcp__lazy lazy = {.storage = 0};
    dcp_value *v[4] = {NULL, NULL, NULL, NULL};
    dcp_status s = dcp_tensor_create(ctx, &t, &v[0], err);
    s = s == DCP_OK ? dcp_tensor_alloc(ctx, DCP_INT8, 2, extents, &v[1], err) : s;
    s = s == DCP_OK ? dcp_sharded_create(ctx, DCP_FLOAT32, 2, extents, 1, &t, &box, &v[2], err) : s;
    s = s == DCP_OK ? dcp__lazy_tensor_create(ctx, &t, &lazy, &v[3], err) : s;
    s = s == DCP_OK ? dcp__lazy_tensor_materialize(v[3], err) : s;
    for (int i = 0; i < 4; i++) {
        dcp_value_free(v[i]);
    }
    return s;
}

static void tensors__out_of_memory_leaks_nothing(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(make_tensors, NULL) >= 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shape__elems_and_span),
        cmocka_unit_test(shape__row_major_strides),
        cmocka_unit_test(tensor__shape_is_copied_and_data_borrowed),
        cmocka_unit_test(tensor__bad_shapes_are_refused),
        cmocka_unit_test(tensor__alloc_owns_aligned_memory),
        cmocka_unit_test(lazy_tensor__becomes_row_major_memory),
        cmocka_unit_test(sharded__chunks_must_fit),
        cmocka_unit_test(sharded__shapes_are_copied),
        cmocka_unit_test(tensors__out_of_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
