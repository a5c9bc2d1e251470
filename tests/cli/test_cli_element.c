/* Values of the small floats: OCP "8-bit Floating Point Specification" and "Microscaling Formats", and what PyTorch 2.13 gives
 * for the same codes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "element.h"
#include "nested_json.h"
#include "summary.h"

typedef struct code_value {
    dcp_dtype dtype;
    unsigned code;
    double value;
} code_value;

static const code_value code_values[] = {
    {DCP_FLOAT8_E4M3FN, 0x01, 0x1p-9},
    {DCP_FLOAT8_E4M3FN, 0x07, 0x7p-9},
    {DCP_FLOAT8_E4M3FN, 0x08, 0x1p-6},
    {DCP_FLOAT8_E4M3FN, 0x38, 1},
    {DCP_FLOAT8_E4M3FN, 0x7e, 448},
    {DCP_FLOAT8_E4M3FN, 0x7f, NAN},
    {DCP_FLOAT8_E4M3FN, 0xff, NAN},
    {DCP_FLOAT8_E4M3FN, 0xfe, -448},
    {DCP_FLOAT8_E4M3FN, 0x80, -0.0},
    {DCP_FLOAT8_E5M2, 0x01, 0x1p-16},
    {DCP_FLOAT8_E5M2, 0x3c, 1},
    {DCP_FLOAT8_E5M2, 0x7b, 57344},
    {DCP_FLOAT8_E5M2, 0x7c, INFINITY},
    {DCP_FLOAT8_E5M2, 0xfc, -INFINITY},
    {DCP_FLOAT8_E5M2, 0x7d, NAN},
    {DCP_FLOAT8_E5M2, 0xfe, NAN},
    {DCP_FLOAT8_E5M2, 0x80, -0.0},
    {DCP_FLOAT8_E4M3FNUZ, 0x01, 0x1p-10},
    {DCP_FLOAT8_E4M3FNUZ, 0x40, 1},
    {DCP_FLOAT8_E4M3FNUZ, 0x7f, 240},
    {DCP_FLOAT8_E4M3FNUZ, 0x80, NAN},
    {DCP_FLOAT8_E4M3FNUZ, 0xff, -240},
    {DCP_FLOAT8_E5M2FNUZ, 0x01, 0x1p-17},
    {DCP_FLOAT8_E5M2FNUZ, 0x40, 1},
    {DCP_FLOAT8_E5M2FNUZ, 0x7f, 57344},
    {DCP_FLOAT8_E5M2FNUZ, 0x80, NAN},
    {DCP_FLOAT8_E5M2FNUZ, 0xff, -57344},
    {DCP_FLOAT8_E8M0FNU, 0x00, 0x1p-127},
    {DCP_FLOAT8_E8M0FNU, 0x7f, 1},
    {DCP_FLOAT8_E8M0FNU, 0xfe, 0x1p127},
    {DCP_FLOAT8_E8M0FNU, 0xff, NAN},
    {DCP_FLOAT16, 0x0001, 0x1p-24},
    {DCP_FLOAT16, 0x3c00, 1},
    {DCP_FLOAT16, 0x7bff, 65504},
    {DCP_FLOAT16, 0xfc00, -INFINITY},
    {DCP_FLOAT16, 0x7e00, NAN},
    {DCP_FLOAT16, 0x3555, 0x1.554p-2},
    {DCP_BFLOAT16, 0x3f80, 1},
    {DCP_BFLOAT16, 0x0001, 0x1p-133},
    {DCP_BFLOAT16, 0xff80, -INFINITY},
    {DCP_BFLOAT16, 0x7f7f, 0x1.fep127},
    {DCP_BFLOAT16, 0x7fc0, NAN},
};

static void element__small_floats_have_the_published_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof code_values / sizeof *code_values; i++) {
        const code_value *c = &code_values[i];
        unsigned char bytes[] = {(unsigned char)(c->code & 0xff), (unsigned char)(c->code >> 8)};
        double got;
        element_reals(c->dtype, bytes, 1, &got);
        if (isnan(c->value) ? !isnan(got) : got != c->value || signbit(got) != signbit(c->value)) {
            fail_msg("%s 0x%x: %g, not %g", dcp_dtype_name(c->dtype), c->code, got, c->value);
        }
    }
}

static void element__a_float4_byte_is_two_numbers_low_nibble_first(void **state)
{
    (void)state;
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    for (unsigned i = 0; i < 256; i++) {
        unsigned char byte = (unsigned char)i;
        double got[2];
        element_reals(DCP_FLOAT4_E2M1FN_X2, &byte, 1, got);
        assert_true(got[0] == values[i & 15] && got[1] == values[i >> 4]);
    }
}

static void element__integers_keep_every_bit(void **state)
{
    (void)state;
    static const unsigned char ones[8] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const unsigned char low[8] = {0, 0, 0, 0, 0, 0, 0, 0x80};
    int64_t i;
    uint64_t u;
    element_ints(DCP_INT8, ones, 1, &i);
    assert_true(i == -1);
    element_ints(DCP_INT16, low + 6, 1, &i);
    assert_true(i == INT16_MIN);
    element_ints(DCP_INT32, low + 4, 1, &i);
    assert_true(i == INT32_MIN);
    element_ints(DCP_INT64, low, 1, &i);
    assert_true(i == INT64_MIN);
    element_ints(DCP_BOOL, ones, 1, &i);
    assert_true(i == 255);
    element_uints(DCP_UINT8, ones, 1, &u);
    assert_true(u == UINT8_MAX);
    element_uints(DCP_UINT64, ones, 1, &u);
    assert_true(u == UINT64_MAX);
}

static void assert_text(dcp_dtype dtype, const void *elem, const char *expected)
{
    char buf[ELEMENT_TEXT_BYTES];
    assert_string_equal(element_text(dtype, elem, buf), expected);
}

static void element__text_is_pythons(void **state)
{
    (void)state;
    assert_text(DCP_BOOL, "\1", "True");
    assert_text(DCP_BOOL, "\0", "False");
    assert_text(DCP_INT8, "\xfe", "-2");
    assert_text(DCP_UINT64, "\xff\xff\xff\xff\xff\xff\xff\xff", "18446744073709551615");
    assert_text(DCP_FLOAT32, (const float[]){0.1f}, "0.1");
    assert_text(DCP_FLOAT64, (const double[]){-INFINITY}, "-inf");
    assert_text(DCP_COMPLEX64, (const float[]){1, -2}, "(1.0-2.0j)");
    assert_text(DCP_COMPLEX128, (const double[]){NAN, INFINITY}, "(nan+infj)");
    assert_text(DCP_FLOAT4_E2M1FN_X2, "\x71", "(0.5, 6.0)");
}

/* ---- summaries ---- */

static void summary__range_of_large_integers_is_exact(void **state)
{
    (void)state;
    const uint64_t u[] = {UINT64_MAX, UINT64_MAX - 1, UINT64_MAX};
    const int64_t i[] = {INT64_MIN, INT64_MIN + 1, 0};
    summary s;
    summary_init(&s, DCP_UINT64);
    summary_add(&s, u, 3);
    assert_true(s.min_uint == UINT64_MAX - 1 && s.max_uint == UINT64_MAX && s.n_zeros == 0);
    summary_init(&s, DCP_INT64);
    summary_add(&s, i, 3);
    assert_true(s.min_int == INT64_MIN && s.max_int == 0 && s.n_zeros == 1);
}

static void summary__nans_and_infinities_are_counted_apart(void **state)
{
    (void)state;
    const float values[] = {NAN, 2, -0.0f, INFINITY, 4, -INFINITY, NAN};
    summary s;
    summary_init(&s, DCP_FLOAT32);
    summary_add(&s, values, 3);
    summary_add(&s, values + 3, 4);
    assert_true(s.n_elems == 7 && s.n_nans == 2 && s.n_infs == 2 && s.n_zeros == 1);
    assert_true(s.has_range && isinf(s.min_real) && s.min_real < 0 && isinf(s.max_real));
    assert_true(s.n_summed == 3 && s.sum == 6);
    assert_true(s.n_first == 7);
    assert_memory_equal(s.first, values, sizeof values);
}

static void summary__of_nothing_or_nans_has_no_range(void **state)
{
    (void)state;
    const double nan_value = NAN;
    summary s;
    summary_init(&s, DCP_FLOAT64);
    assert_false(s.has_range);
    summary_add(&s, &nan_value, 1);
    assert_false(s.has_range);
    assert_true(s.n_summed == 0 && s.n_nans == 1);
}

static void summary__complex_numbers_have_a_mean_and_no_range(void **state)
{
    (void)state;
    const float values[] = {1, 2, 3, 4, NAN, 0, 0, INFINITY, 0, 0};
    summary s;
    summary_init(&s, DCP_COMPLEX64);
    summary_add(&s, values, 5);
    assert_true(!s.has_range && s.n_nans == 1 && s.n_infs == 1 && s.n_zeros == 1 && s.n_summed == 3);
    assert_true(s.sum == 4 && s.sum_imag == 6);
}

/* Longer than one block, in uneven pieces: 0 + 1 + .. + 9999. */
static void summary__pieces_add_up(void **state)
{
    (void)state;
    static int32_t values[10000];
    summary s;
    for (int32_t i = 0; i < 10000; i++) {
        values[i] = i;
    }
    summary_init(&s, DCP_INT32);
    summary_add(&s, values, 3);
    summary_add(&s, values + 3, 4097);
    summary_add(&s, values + 4100, 5900);
    assert_true(s.sum == 49995000 && s.min_int == 0 && s.max_int == 9999 && s.n_elems == 10000);
    assert_true(s.n_first == SUMMARY_FIRST);
    assert_memory_equal(s.first, values, SUMMARY_FIRST * sizeof *values);
}

/* ---- nested lists ---- */

static void assert_nested(dcp_dtype dtype, int ndim, const int64_t *shape, const void *elems, size_t n, size_t piece,
                          const char *expected)
{
    char *text;
    size_t len;
    FILE *out = open_memstream(&text, &len);
    nested_json nested;
    assert_true(nested_json_begin(&nested, out, dtype, ndim, shape));
    for (size_t i = 0; i < n; i += piece) {
        size_t left = n - i;
        nested_json_add(&nested, (const char *)elems + i * dcp_dtype_bytes(dtype), left < piece ? left : piece);
    }
    fclose(out);
    assert_string_equal(text, expected);
    free(text);
}

static void nested_json__lists_follow_the_shape(void **state)
{
    (void)state;
    const int8_t values[] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int64_t shape[] = {2, 1, 4}, cube[] = {2, 2, 2}, row[] = {8};
    for (size_t piece = 1; piece <= 8; piece++) {
        assert_nested(DCP_INT8, 3, shape, values, 8, piece, "[[[1, 2, 3, 4]], [[5, 6, 7, 8]]]\n");
        assert_nested(DCP_INT8, 3, cube, values, 8, piece, "[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]\n");
        assert_nested(DCP_INT8, 1, row, values, 8, piece, "[1, 2, 3, 4, 5, 6, 7, 8]\n");
    }
    assert_nested(DCP_INT8, 0, NULL, values, 1, 1, "1\n");
}

static void nested_json__complex_numbers_and_pairs_are_lists_of_two(void **state)
{
    (void)state;
    const float z[] = {1, -2, NAN, 0.5f};
    const int64_t shape[] = {2};
    assert_nested(DCP_COMPLEX64, 1, shape, z, 2, 1, "[[1.0, -2.0], [\"NaN\", 0.5]]\n");
    assert_nested(DCP_COMPLEX64, 0, NULL, z, 1, 1, "[1.0, -2.0]\n");
    assert_nested(DCP_FLOAT4_E2M1FN_X2, 1, shape, "\x71\x08", 2, 2, "[[0.5, 6.0], [-0.0, 0.0]]\n");
}

/* As numpy.zeros(shape).tolist() */
static void nested_json__tensors_without_elements_show_their_shape(void **state)
{
    (void)state;
    const int64_t none[] = {0}, rows[] = {0, 8}, middle[] = {3, 0, 2}, deep[] = {2, 2, 0};
    assert_nested(DCP_INT8, 1, none, NULL, 0, 1, "[]\n");
    assert_nested(DCP_INT8, 2, rows, NULL, 0, 1, "[]\n");
    assert_nested(DCP_INT8, 3, middle, NULL, 0, 1, "[[], [], []]\n");
    assert_nested(DCP_INT8, 3, deep, NULL, 0, 1, "[[[], []], [[], []]]\n");
}

static void nested_json__endless_empty_lists_are_refused(void **state)
{
    (void)state;
    const int64_t shape[] = {1000, 1001, 0}, overflow[] = {INT64_MAX, INT64_MAX, 0};
    nested_json nested;
    assert_false(nested_json_begin(&nested, stdout, DCP_INT8, 3, shape));
    assert_false(nested_json_begin(&nested, stdout, DCP_INT8, 3, overflow));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(element__small_floats_have_the_published_values),
        cmocka_unit_test(element__a_float4_byte_is_two_numbers_low_nibble_first),
        cmocka_unit_test(element__integers_keep_every_bit),
        cmocka_unit_test(element__text_is_pythons),
        cmocka_unit_test(summary__range_of_large_integers_is_exact),
        cmocka_unit_test(summary__nans_and_infinities_are_counted_apart),
        cmocka_unit_test(summary__of_nothing_or_nans_has_no_range),
        cmocka_unit_test(summary__complex_numbers_have_a_mean_and_no_range),
        cmocka_unit_test(summary__pieces_add_up),
        cmocka_unit_test(nested_json__lists_follow_the_shape),
        cmocka_unit_test(nested_json__complex_numbers_and_pairs_are_lists_of_two),
        cmocka_unit_test(nested_json__tensors_without_elements_show_their_shape),
        cmocka_unit_test(nested_json__endless_empty_lists_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
