/* Equality of values. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "state/value.h"

static dcp_value *integer(int64_t i)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_int_create(NULL, i, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *real(double d)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_float_create(NULL, d, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *text(const char *s)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_string_create(NULL, dcp_str_of(s), &v, NULL), DCP_OK);
    return v;
}

static dcp_value *bytes(dcp_kind kind, const char *s)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_bytes_create(NULL, kind, s, strlen(s), &v, NULL), DCP_OK);
    return v;
}

/* A sequence or set of integers. */
static dcp_value *seq(dcp_kind kind, size_t n, const int64_t *items)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_seq_create(NULL, kind, &v, NULL), DCP_OK);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(dcp_list_append(v, integer(items[i]), NULL), DCP_OK);
    }
    return v;
}

/* A dict with the keys in the order of the text, each with its own letter's value. */
static dcp_value *dict(bool is_ordered, const char *keys)
{
    dcp_value *v = NULL;
    assert_int_equal(is_ordered ? dcp_ordered_dict_create(NULL, &v, NULL) : dcp_dict_create(NULL, &v, NULL), DCP_OK);
    for (; *keys; keys++) {
        assert_int_equal(dcp_dict_set_int(v, (char[]){*keys, 0}, *keys, NULL), DCP_OK);
    }
    return v;
}

/* Takes over both references. */
static void expect(bool expected, dcp_value *a, dcp_value *b)
{
    assert_true(dcp_value_equal(a, a) && dcp_value_equal(b, b));
    assert_int_equal(dcp_value_equal(a, b), expected);
    assert_int_equal(dcp_value_equal(b, a), expected);
    dcp_value_free(a);
    dcp_value_free(b);
}

static void equal__leaves(void **state)
{
    (void)state;
    expect(true, integer(5), integer(5));
    expect(false, integer(5), integer(6));
    expect(false, integer(1), real(1));
    expect(true, real(NAN), real(-NAN));
    expect(false, real(0.0), real(-0.0));
    expect(true, text("a"), text("a"));
    expect(false, text("a"), text("ab"));
    expect(false, text("a"), bytes(DCP_KIND_BYTES, "a"));
    expect(false, bytes(DCP_KIND_BYTEARRAY, "a"), bytes(DCP_KIND_BYTES, "a"));
    dcp_value *t, *f;
    assert_int_equal(dcp_bool_create(NULL, true, &t, NULL), DCP_OK);
    assert_int_equal(dcp_bool_create(NULL, false, &f, NULL), DCP_OK);
    expect(false, t, f);
    const uint8_t big[9] = {1, 0, 0, 0, 0, 0, 0, 0, 1}, other[9] = {2, 0, 0, 0, 0, 0, 0, 0, 1};
    assert_int_equal(dcp_bigint_create(NULL, big, 9, &t, NULL), DCP_OK);
    assert_int_equal(dcp_bigint_create(NULL, big, 9, &f, NULL), DCP_OK);
    expect(true, t, f);
    assert_int_equal(dcp_bigint_create(NULL, big, 9, &t, NULL), DCP_OK);
    assert_int_equal(dcp_bigint_create(NULL, other, 9, &f, NULL), DCP_OK);
    expect(false, t, f);
    assert_int_equal(dcp_complex_create(NULL, 1, 2, &t, NULL), DCP_OK);
    assert_int_equal(dcp_complex_create(NULL, 1, -2, &f, NULL), DCP_OK);
    expect(false, t, f);
    assert_int_equal(dcp_dtype_create(NULL, DCP_INT8, &t, NULL), DCP_OK);
    assert_int_equal(dcp_dtype_create(NULL, DCP_UINT8, &f, NULL), DCP_OK);
    expect(false, t, f);
    assert_false(dcp_value_equal(NULL, t = integer(0)));
    assert_true(dcp_value_equal(NULL, NULL));
    dcp_value_free(t);
}

static void equal__sequences_and_sets(void **state)
{
    (void)state;
    const int64_t abc[] = {1, 2, 3}, cab[] = {3, 1, 2}, abd[] = {1, 2, 4}, aab[] = {1, 1, 2}, abb[] = {1, 2, 2};
    expect(true, seq(DCP_KIND_LIST, 3, abc), seq(DCP_KIND_LIST, 3, abc));
    expect(false, seq(DCP_KIND_LIST, 3, abc), seq(DCP_KIND_LIST, 3, cab));
    expect(false, seq(DCP_KIND_LIST, 3, abc), seq(DCP_KIND_LIST, 2, abc));
    expect(false, seq(DCP_KIND_LIST, 3, abc), seq(DCP_KIND_TUPLE, 3, abc));
    expect(true, seq(DCP_KIND_SET, 3, abc), seq(DCP_KIND_SET, 3, cab));
    expect(false, seq(DCP_KIND_FROZENSET, 3, abc), seq(DCP_KIND_FROZENSET, 3, abd));
    expect(false, seq(DCP_KIND_SET, 3, abc), seq(DCP_KIND_SET, 3, aab));
    expect(true, seq(DCP_KIND_SET, 3, aab), seq(DCP_KIND_SET, 3, abb)); /* {1, 2}, however often it was said */
}

static void equal__dicts(void **state)
{
    (void)state;
    expect(true, dict(false, "abc"), dict(false, "cab"));
    expect(true, dict(true, "abc"), dict(true, "abc"));
    expect(false, dict(true, "abc"), dict(true, "cab"));
    expect(false, dict(true, "abc"), dict(false, "abc"));
    expect(false, dict(false, "abc"), dict(false, "ab"));
    expect(false, dict(false, "abc"), dict(false, "abd"));
    dcp_value *changed = dict(false, "abc"), *int_key = dict(false, ""), *str_key = dict(false, "");
    assert_int_equal(dcp_dict_set_int(changed, "b", 0, NULL), DCP_OK);
    expect(false, dict(false, "abc"), changed);
    assert_int_equal(dcp_dict_set(int_key, dcp_key_int(1), integer(0), NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_int(str_key, "1", 0, NULL), DCP_OK);
    expect(false, int_key, str_key);
}

static dcp_value *tensor(dcp_dtype dtype, int ndim, const int64_t *extents, const int64_t *strides, void *data)
{
    dcp_tensor t = {.dtype = dtype, .ndim = ndim, .extents = extents, .strides = strides, .data = data};
    dcp_value *v = NULL;
    assert_int_equal(dcp_tensor_create(NULL, &t, &v, NULL), DCP_OK);
    return v;
}

static void equal__tensors_compare_elements_not_layout(void **state)
{
    (void)state;
    int32_t rows[6] = {1, 2, 3, 4, 5, 6}, cols[6] = {1, 4, 2, 5, 3, 6}, gap[8] = {1, 2, 3, 9, 4, 5, 6, 8},
            other[6] = {1, 2, 3, 4, 5, 7};
    const int64_t shape[] = {2, 3}, flat[] = {6}, empty[] = {0, 3};
    expect(true, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_INT32, 2, shape, (int64_t[]){1, 2}, cols));
    expect(true, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_INT32, 2, shape, (int64_t[]){4, 1}, gap));
    expect(false, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_INT32, 2, shape, NULL, cols));
    expect(false, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_INT32, 2, shape, NULL, other));
    expect(false, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_UINT32, 2, shape, NULL, rows));
    expect(false, tensor(DCP_INT32, 2, shape, NULL, rows), tensor(DCP_INT32, 1, flat, NULL, rows));
    expect(true, tensor(DCP_INT32, 2, empty, NULL, NULL), tensor(DCP_INT32, 2, empty, NULL, rows));
    expect(true, tensor(DCP_INT32, 0, NULL, NULL, rows), tensor(DCP_INT32, 0, NULL, NULL, cols));
    float nan[2] = {NAN, 1}, same[2] = {NAN, 1};
    expect(true, tensor(DCP_FLOAT32, 1, (int64_t[]){2}, NULL, nan), tensor(DCP_FLOAT32, 1, (int64_t[]){2}, NULL, same));
}

static void equal__tensors_that_cannot_be_read_equal_themselves_only(void **state)
{
    (void)state;
    dcp_tensor t = dcp_tensor_make(DCP_INT8, 1, (int64_t[]){4}, NULL);
    dcp__lazy lazy = {.storage = 0};
    dcp_value *a = NULL, *b = NULL;
    assert_int_equal(dcp__lazy_tensor_create(NULL, &t, &lazy, &a, NULL), DCP_OK);
    assert_int_equal(dcp__lazy_tensor_create(NULL, &t, &lazy, &b, NULL), DCP_OK);
    expect(false, a, b);
    t.device = (dcp_device){DCP_DEVICE_CUDA, 0};
    t.data = (void *)(uintptr_t)4096; /* an address on a device: must not be touched */
    assert_int_equal(dcp_tensor_create(NULL, &t, &a, NULL), DCP_OK);
    assert_int_equal(dcp_tensor_create(NULL, &t, &b, NULL), DCP_OK);
    expect(true, a, b);
    assert_int_equal(dcp_tensor_create(NULL, &t, &a, NULL), DCP_OK);
    t.device.index = 1;
    assert_int_equal(dcp_tensor_create(NULL, &t, &b, NULL), DCP_OK);
    expect(false, a, b);
}

static dcp_value *sharded(int64_t offset, int64_t global, float *data)
{
    dcp_tensor chunk = dcp_tensor_make(DCP_FLOAT32, 1, (int64_t[]){2}, data);
    dcp_box box = {&offset, (int64_t[]){2}};
    dcp_value *v = NULL;
    assert_int_equal(dcp_sharded_create(NULL, DCP_FLOAT32, 1, &global, 1, &chunk, &box, &v, NULL), DCP_OK);
    return v;
}

static void equal__sharded_tensors(void **state)
{
    (void)state;
    float a[2] = {1, 2}, b[2] = {1, 2}, c[2] = {1, 3};
    expect(true, sharded(2, 8, a), sharded(2, 8, b));
    expect(false, sharded(2, 8, a), sharded(2, 8, c));
    expect(false, sharded(2, 8, a), sharded(4, 8, a));
    expect(false, sharded(2, 8, a), sharded(2, 9, a));
}

static dcp_value *opaque(const char *name, dcp_value *args, dcp_value *state)
{
    dcp__opaque parts = {
        .form = DCP__OPAQUE_REDUCE, .module = dcp_str_of("m"), .name = dcp_str_of(name), .args = args, .state = state};
    dcp_value *v = NULL;
    assert_int_equal(dcp__opaque_create(NULL, &parts, &v, NULL), DCP_OK);
    return v;
}

static void equal__opaque_values_compare_all_parts(void **state)
{
    (void)state;
    expect(true, opaque("C", integer(1), integer(2)), opaque("C", integer(1), integer(2)));
    expect(false, opaque("C", integer(1), integer(2)), opaque("C", integer(1), integer(3)));
    expect(false, opaque("C", integer(1), integer(2)), opaque("C", integer(1), NULL));
    expect(false, opaque("C", integer(1), NULL), opaque("D", integer(1), NULL));
}

/* Each level refers twice to the one below. */
static dcp_value *doubling(int levels, int64_t leaf)
{
    dcp_value *v = integer(leaf);
    for (int i = 0; i < levels; i++) {
        dcp_value *outer = NULL;
        assert_int_equal(dcp_list_create(NULL, &outer, NULL), DCP_OK);
        assert_int_equal(dcp_list_append(outer, dcp_value_retain(v), NULL), DCP_OK);
        assert_int_equal(dcp_list_append(outer, v, NULL), DCP_OK);
        v = outer;
    }
    return v;
}

static void equal__shared_parts_are_compared_once(void **state)
{
    (void)state;
    expect(true, doubling(200, 1), doubling(200, 1)); /* 2^200 paths */
    expect(false, doubling(200, 1), doubling(200, 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal__leaves),
        cmocka_unit_test(equal__sequences_and_sets),
        cmocka_unit_test(equal__dicts),
        cmocka_unit_test(equal__tensors_compare_elements_not_layout),
        cmocka_unit_test(equal__tensors_that_cannot_be_read_equal_themselves_only),
        cmocka_unit_test(equal__sharded_tensors),
        cmocka_unit_test(equal__opaque_values_compare_all_parts),
        cmocka_unit_test(equal__shared_parts_are_compared_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
