/* Elements as numbers. Expected values are published ones of each format, and what rounding to the nearest means: found from
 * neighbouring codes, not from the code under test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "state/numbers.h"
#include "support/random.h"

static const dcp_dtype small_floats[] = {DCP_FLOAT16,     DCP_BFLOAT16,        DCP_FLOAT8_E4M3FN,
                                         DCP_FLOAT8_E5M2, DCP_FLOAT8_E4M3FNUZ, DCP_FLOAT8_E5M2FNUZ};
#define N_SMALL (sizeof small_floats / sizeof *small_floats)

static double decode(dcp_dtype dtype, uint32_t code)
{
    double out[2];
    dcp__decode_reals(dtype, &code, 1, out);
    return out[0];
}

/* The code that a number is cast to; *lost: 1 if it does not fit. */
static uint32_t encode(dcp_dtype dtype, double d, uint64_t *lost)
{
    uint32_t code = 0;
    *lost = dcp__cast(DCP_FLOAT64, &d, dtype, &code, 1);
    return code;
}

static uint32_t n_codes(dcp_dtype dtype)
{
    return dcp_dtype_bytes(dtype) == 1 ? 256 : 65536;
}

static void decode__published_values(void **state)
{
    (void)state;
    static const struct {
        dcp_dtype dtype;
        uint32_t code;
        double value;
    } rows[] = {
        {DCP_FLOAT16, 0x7bff, 65504},
        {DCP_FLOAT16, 0x0001, 0x1p-24},
        {DCP_FLOAT16, 0xfc00, -INFINITY},
        {DCP_BFLOAT16, 0x7f7f, 0x1.fep127},
        {DCP_BFLOAT16, 0x0001, 0x1p-133},
        {DCP_FLOAT8_E4M3FN, 0x7e, 448},
        {DCP_FLOAT8_E4M3FN, 0x01, 0x1p-9},
        {DCP_FLOAT8_E5M2, 0x7b, 57344},
        {DCP_FLOAT8_E5M2, 0x01, 0x1p-16},
        {DCP_FLOAT8_E5M2, 0x7c, INFINITY},
        {DCP_FLOAT8_E4M3FNUZ, 0x7f, 240},
        {DCP_FLOAT8_E4M3FNUZ, 0x01, 0x1p-10},
        {DCP_FLOAT8_E5M2FNUZ, 0x7f, 57344},
        {DCP_FLOAT8_E5M2FNUZ, 0x81, -0x1p-17},
        {DCP_FLOAT8_E8M0FNU, 0, 0x1p-127},
        {DCP_FLOAT8_E8M0FNU, 254, 0x1p127},
        {DCP_FLOAT4_E2M1FN_X2, 0x07, 6},
        {DCP_FLOAT4_E2M1FN_X2, 0x09, -0.5},
        {DCP_BOOL, 1, 1},
        {DCP_INT8, 0x80, -128},
        {DCP_UINT16, 0xffff, 65535},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        assert_true(decode(rows[i].dtype, rows[i].code) == rows[i].value);
    }
    assert_true(isnan(decode(DCP_FLOAT8_E4M3FN, 0x7f)) && isnan(decode(DCP_FLOAT8_E4M3FN, 0xff)));
    assert_true(isnan(decode(DCP_FLOAT8_E4M3FNUZ, 0x80)) && isnan(decode(DCP_FLOAT8_E8M0FNU, 255)));
    assert_true(isnan(decode(DCP_FLOAT16, 0x7c01)) && isnan(decode(DCP_FLOAT8_E5M2, 0x7d)));
}

static void cast__every_code_comes_back(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_SMALL; k++) {
        dcp_dtype dtype = small_floats[k];
        for (uint32_t code = 0; code < n_codes(dtype); code++) {
            uint64_t lost;
            double value = decode(dtype, code);
            uint32_t back = encode(dtype, value, &lost);
            if (isnan(value) ? !isnan(decode(dtype, back)) : back != code) {
                fail_msg("%s: %x is %g, comes back as %x", dcp_dtype_name(dtype), code, value, back);
            }
            assert_int_equal(lost, 0);
        }
    }
}

/* Between two neighbours the middle goes to the even code, and anything beside it to the nearer one. */
static void cast__rounds_to_the_nearest_and_to_even(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_SMALL; k++) {
        dcp_dtype dtype = small_floats[k];
        uint32_t sign = n_codes(dtype) / 2;
        for (uint32_t code = 0; code + 1 < sign; code++) {
            double low = decode(dtype, code), high = decode(dtype, code + 1), middle = (low + high) / 2;
            uint64_t lost;
            if (isinf(high) || isnan(high)) {
                break;
            }
            assert_int_equal(encode(dtype, middle, &lost), code + (code & 1));
            assert_int_equal(encode(dtype, nextafter(middle, low), &lost), code);
            assert_int_equal(encode(dtype, nextafter(middle, high), &lost), code + 1);
            assert_int_equal(encode(dtype, -nextafter(middle, high), &lost), (code + 1) | sign);
        }
    }
}

static void cast__what_does_not_fit_is_counted(void **state)
{
    (void)state;
    static const struct {
        double value;
        dcp_dtype to;
        uint64_t code, lost;
    } rows[] = {
        {65519, DCP_FLOAT16, 0x7bff, 0},
        {65520, DCP_FLOAT16, 0x7c00, 1},
        {-1e300, DCP_FLOAT16, 0xfc00, 1},
        {INFINITY, DCP_FLOAT16, 0x7c00, 0},
        {464, DCP_FLOAT8_E4M3FN, 0x7e, 0},
        {465, DCP_FLOAT8_E4M3FN, 0x7f, 1},
        {INFINITY, DCP_FLOAT8_E4M3FN, 0x7f, 1},
        {-1e9, DCP_FLOAT8_E4M3FNUZ, 0x80, 1},
        {-0.0, DCP_FLOAT8_E4M3FNUZ, 0, 0},
        {1e39, DCP_FLOAT32, 0x7f800000, 1},
        {1e-300, DCP_FLOAT32, 0, 0},
        {127.9, DCP_INT8, 127, 0},
        {128, DCP_INT8, 127, 1},
        {-129, DCP_INT8, 0x80, 1},
        {-0.9, DCP_UINT8, 0, 0},
        {-1, DCP_UINT8, 0, 1},
        {NAN, DCP_INT32, 0, 1},
        {0x1p63, DCP_INT64, INT64_MAX, 1},
        {-0x1p63, DCP_INT64, (uint64_t)1 << 63, 0},
        {0x1.8p63, DCP_UINT64, (uint64_t)3 << 62, 0},
        {0x1p64, DCP_UINT64, UINT64_MAX, 1},
        {0.5, DCP_BOOL, 1, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t code = 0;
        uint64_t lost = dcp__cast(DCP_FLOAT64, &rows[i].value, rows[i].to, &code, 1);
        if (code != rows[i].code || lost != rows[i].lost) {
            fail_msg("%g as %s: %llx, %llu lost", rows[i].value, dcp_dtype_name(rows[i].to), (unsigned long long)code,
                     (unsigned long long)lost);
        }
    }
}

static void cast__integers_to_integers(void **state)
{
    (void)state;
    static const int64_t in[] = {0, -1, 127, 128, -129, 65535, INT64_MAX, INT64_MIN};
    int8_t i8[8];
    uint16_t u16[8];
    uint64_t u64[8];
    bool flags[8];
    assert_int_equal(dcp__cast(DCP_INT64, in, DCP_INT8, i8, 8), 5);
    assert_int_equal(dcp__cast(DCP_INT64, in, DCP_UINT16, u16, 8), 4);
    assert_int_equal(dcp__cast(DCP_INT64, in, DCP_UINT64, u64, 8), 3);
    assert_int_equal(dcp__cast(DCP_INT64, in, DCP_BOOL, flags, 8), 0);
    static const int8_t as_i8[] = {0, -1, 127, 127, -128, 127, 127, -128};
    static const uint16_t as_u16[] = {0, 0, 127, 128, 0, 65535, 65535, 0};
    assert_memory_equal(i8, as_i8, sizeof i8);
    assert_memory_equal(u16, as_u16, sizeof u16);
    assert_true(u64[6] == INT64_MAX && u64[7] == 0 && flags[7] && !flags[0]);
    uint64_t high = UINT64_MAX;
    int64_t back;
    assert_int_equal(dcp__cast(DCP_UINT64, &high, DCP_INT64, &back, 1), 1);
    assert_true(back == INT64_MAX);
}

/* The compiler's own conversions are the reference. */
static void cast__random_numbers_agree_with_the_compiler(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("cast");
    for (int i = 0; i < 200000; i++) {
        int64_t n = (int64_t)test_random_next(&rnd) >> test_random_below(&rnd, 64);
        uint64_t u = test_random_next(&rnd) >> test_random_below(&rnd, 64);
        float from_n, from_u, expected_n = (float)n, expected_u = (float)u;
        dcp__cast(DCP_INT64, &n, DCP_FLOAT32, &from_n, 1);
        dcp__cast(DCP_UINT64, &u, DCP_FLOAT32, &from_u, 1);
        assert_memory_equal(&from_n, &expected_n, 4);
        assert_memory_equal(&from_u, &expected_u, 4);
        uint32_t bits = (uint32_t)test_random_next(&rnd);
        float f;
        memcpy(&f, &bits, sizeof f);
        double d = f;
        uint64_t lost_f, lost_d;
        uint16_t fast = 0, slow = 0;
        lost_f = dcp__cast(DCP_FLOAT32, &f, DCP_BFLOAT16, &fast, 1);
        lost_d = dcp__cast(DCP_FLOAT64, &d, DCP_BFLOAT16, &slow, 1);
        assert_int_equal(fast, slow);
        assert_int_equal(lost_f, lost_d);
    }
}

static void cast__complex_numbers_by_their_parts(void **state)
{
    (void)state;
    static const float in[] = {1.5f, -2, 70000, 0.25f};
    uint16_t out[4];
    assert_int_equal(dcp__cast(DCP_COMPLEX64, in, DCP_COMPLEX32, out, 2), 1);
    static const uint16_t expected[] = {0x3e00, 0xc000, 0x7c00, 0x3400};
    assert_memory_equal(out, expected, sizeof out);
    assert_false(dcp__can_cast(DCP_COMPLEX64, DCP_FLOAT32));
    assert_false(dcp__can_cast(DCP_FLOAT4_E2M1FN_X2, DCP_FLOAT32));
    assert_true(dcp__can_cast(DCP_FLOAT8_E8M0FNU, DCP_FLOAT32));
    assert_true(dcp__can_cast(DCP_FLOAT4_E2M1FN_X2, DCP_FLOAT4_E2M1FN_X2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decode__published_values),
        cmocka_unit_test(cast__every_code_comes_back),
        cmocka_unit_test(cast__rounds_to_the_nearest_and_to_even),
        cmocka_unit_test(cast__what_does_not_fit_is_counted),
        cmocka_unit_test(cast__integers_to_integers),
        cmocka_unit_test(cast__random_numbers_agree_with_the_compiler),
        cmocka_unit_test(cast__complex_numbers_by_their_parts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
