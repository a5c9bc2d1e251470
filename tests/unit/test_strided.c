/* Strided copies against a loop over all elements; byte order, conj and neg. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "state/strided.h"

static uint64_t seed;

static uint64_t next_random(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static int64_t below(int64_t n)
{
    return (int64_t)(next_random() % (uint64_t)n);
}

/* Strides of a random permutation of the dimensions, sometimes with gaps. */
static int64_t random_strides(int ndim, const int64_t *extents, int64_t *strides)
{
    int order[DCP_MAX_NDIM];
    int64_t stride = 1 + (below(4) == 0);
    for (int i = 0; i < ndim; i++) {
        order[i] = i;
    }
    for (int i = ndim - 1; i > 0 && below(4); i--) {
        int j = (int)below(i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (int i = ndim - 1; i >= 0; i--) {
        strides[order[i]] = stride;
        stride *= extents[order[i]] ? extents[order[i]] : 1;
        stride += below(4) == 0 ? below(3) : 0;
    }
    return stride;
}

static void copy_by_element(char *dst, const int64_t *ds, const char *src, const int64_t *ss, int ndim, const int64_t *extents,
                            size_t elem)
{
    int64_t total = 1;
    for (int i = 0; i < ndim; i++) {
        total *= extents[i];
    }
    for (int64_t n = 0; n < total; n++) {
        int64_t rest = n, d = 0, s = 0;
        for (int i = ndim - 1; i >= 0; i--) {
            d += rest % extents[i] * ds[i];
            s += rest % extents[i] * ss[i];
            rest /= extents[i];
        }
        memcpy(dst + d * (int64_t)elem, src + s * (int64_t)elem, elem);
    }
}

static void check_random_copy(void)
{
    static const int64_t most[] = {1, 3000, 90, 20, 9, 6, 4};
    int ndim = (int)below(7);
    size_t elem = below(3) ? (size_t)1 << below(5) : (size_t)(1 + below(16));
    int64_t extents[6], ds[6], ss[6];
    for (int i = 0; i < ndim; i++) {
        extents[i] = below(30) == 0 ? 0 : below(5) == 0 ? 1 : 1 + below(most[ndim]);
    }
    size_t dst_bytes = (size_t)random_strides(ndim, extents, ds) * elem;
    size_t src_bytes = (size_t)random_strides(ndim, extents, ss) * elem;
    if (ndim && below(10) == 0) {
        ss[below(ndim)] = 0; /* an expanded source */
    }
    char *src = malloc(src_bytes + 1), *got = malloc(dst_bytes + 1), *want = malloc(dst_bytes + 1);
    for (size_t i = 0; i < src_bytes; i++) {
        src[i + 1] = (char)next_random();
    }
    memset(got, 0x55, dst_bytes + 1);
    memset(want, 0x55, dst_bytes + 1);
    /* one byte off: payloads start at odd addresses */
    dcp__copy_strided(got + 1, ds, src + 1, ss, ndim, extents, elem);
    copy_by_element(want + 1, ds, src + 1, ss, ndim, extents, elem);
    assert_memory_equal(got, want, dst_bytes + 1);
    free(src);
    free(got);
    free(want);
}

static void copy_strided__equals_a_loop_over_elements(void **state)
{
    (void)state;
    for (int i = 0; i < 6000; i++) {
        check_random_copy();
    }
}

static void copy_strided__null_strides_are_row_major(void **state)
{
    (void)state;
    const int32_t src[6] = {1, 2, 3, 4, 5, 6};
    int32_t dst[6] = {0};
    dcp__copy_strided(dst, (int64_t[]){1, 2}, src, NULL, 2, (int64_t[]){2, 3}, 4);
    assert_memory_equal(dst, ((int32_t[]){1, 4, 2, 5, 3, 6}), sizeof dst);
    dcp__copy_strided(dst, NULL, src, (int64_t[]){1, 2}, 2, (int64_t[]){2, 3}, 4);
    assert_memory_equal(dst, ((int32_t[]){1, 3, 5, 2, 4, 6}), sizeof dst);
    dcp__copy_strided(dst, NULL, src + 4, NULL, 0, NULL, 4);
    assert_int_equal(dst[0], 5);
}

static void copy_strided__dimensions_up_to_the_limit(void **state)
{
    (void)state;
    int64_t extents[DCP_MAX_NDIM], reversed[DCP_MAX_NDIM];
    for (int i = 0; i < DCP_MAX_NDIM; i++) {
        extents[i] = i % 8 == 0 ? 2 : 1;
        reversed[i] = i % 8 == 0 ? INT64_C(1) << i / 8 : 1;
    }
    uint16_t src[256], dst[512] = {0};
    for (int i = 0; i < 256; i++) {
        src[i] = (uint16_t)i;
    }
    dcp__copy_strided(dst, reversed, src, NULL, DCP_MAX_NDIM, extents, 2);
    for (unsigned i = 0; i < 256; i++) {
        unsigned mirrored = 0;
        for (unsigned b = 0; b < 8; b++) {
            mirrored |= (i >> b & 1) << (7 - b);
        }
        assert_int_equal(dst[mirrored], i);
    }
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void copy_strided__rates(void **state)
{
    (void)state;
    enum { N = 4096 };
    const size_t bytes = (size_t)N * N * 4;
    char *src = malloc(bytes), *dst = malloc(bytes);
    memset(src, 1, bytes);
    memset(dst, 2, bytes);
    const struct {
        const char *what;
        int64_t n;
        int64_t strides[2];
        size_t elem;
    } cases[] = {
        {"contiguous", N, {N, 1}, 4},
        {"transpose of 4-byte elements", N, {1, N}, 4},
        {"transpose of 2-byte elements", N, {1, N}, 2},
        {"transpose of 1-byte elements", N, {1, N}, 1},
        {"transpose of 8-byte elements", N / 2, {1, N / 2}, 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double best = 1e9;
        for (int r = 0; r < 5; r++) {
            double start = seconds();
            dcp__copy_strided(dst, NULL, src, cases[i].strides, 2, (int64_t[]){cases[i].n, cases[i].n}, cases[i].elem);
            double taken = seconds() - start;
            best = taken < best ? taken : best;
        }
        double copied = (double)(cases[i].n * cases[i].n) * (double)cases[i].elem;
        print_message("%s: %.2f GB/s\n", cases[i].what, copied / best / 1e9);
        assert_true(best > 0);
    }
    free(src);
    free(dst);
}

/* ---- elements ---- */

static void swap_elements__reverses_each_number(void **state)
{
    (void)state;
    char f64[9] = "x12345678", c64[9] = "x12345678", c128[17] = "x1234567890abcdef", bf[5] = "x1234", u8[3] = "x12";
    dcp__swap_elements(f64 + 1, 1, DCP_FLOAT64);
    assert_memory_equal(f64, "x87654321", 9);
    dcp__swap_elements(c64 + 1, 1, DCP_COMPLEX64);
    assert_memory_equal(c64, "x43218765", 9);
    dcp__swap_elements(c128 + 1, 1, DCP_COMPLEX128);
    assert_memory_equal(c128, "x87654321fedcba09", 17);
    dcp__swap_elements(bf + 1, 2, DCP_BFLOAT16);
    assert_memory_equal(bf, "x2143", 5);
    dcp__swap_elements(bf + 1, 1, DCP_COMPLEX32);
    assert_memory_equal(bf, "x1234", 5);
    dcp__swap_elements(u8 + 1, 2, DCP_UINT8);
    assert_memory_equal(u8, "x12", 3);
}

static void conjugate__negates_imaginary_parts_only(void **state)
{
    (void)state;
    float c[4] = {1, 2, -3, -4};
    dcp__conjugate(c, 2, DCP_COMPLEX64);
    assert_true(c[0] == 1 && c[1] == -2 && c[2] == -3 && c[3] == 4);
    dcp__conjugate(c, 4, DCP_FLOAT32);
    assert_true(c[1] == -2);
    uint16_t halves[2] = {0x3c00, 0x3c00};
    dcp__conjugate(halves, 1, DCP_COMPLEX32);
    assert_int_equal(halves[0], 0x3c00);
    assert_int_equal(halves[1], 0xbc00);
}

static void negate__follows_the_dtype(void **state)
{
    (void)state;
    double d[2] = {1.5, -0.0};
    dcp__negate(d, 2, DCP_FLOAT64);
    assert_true(d[0] == -1.5 && d[1] == 0 && !signbit(d[1]));
    float c[2] = {1, -2};
    dcp__negate(c, 1, DCP_COMPLEX64);
    assert_true(c[0] == -1 && c[1] == 2);
    int32_t i[3] = {5, -7, INT32_MIN};
    dcp__negate(i, 3, DCP_INT32);
    assert_true(i[0] == -5 && i[1] == 7 && i[2] == INT32_MIN);
    int64_t wide[1] = {3};
    dcp__negate(wide, 1, DCP_INT64);
    assert_true(wide[0] == -3);
    uint8_t fnuz[3] = {0x00, 0x80, 0x38};
    dcp__negate(fnuz, 3, DCP_FLOAT8_E4M3FNUZ);
    assert_memory_equal(fnuz, "\x00\x80\xb8", 3); /* zero has one sign, 0x80 is NaN */
    uint8_t fn[2] = {0x00, 0x38};
    dcp__negate(fn, 2, DCP_FLOAT8_E5M2);
    assert_memory_equal(fn, "\x80\xb8", 2);
    uint8_t x2[1] = {0x21};
    dcp__negate(x2, 1, DCP_FLOAT4_E2M1FN_X2);
    assert_int_equal(x2[0], 0xa9);
    uint8_t flags[2] = {0, 1};
    dcp__negate(flags, 2, DCP_BOOL);
    assert_memory_equal(flags, "\0\1", 2);
}

int main(int argc, char **argv)
{
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL) | 1;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copy_strided__equals_a_loop_over_elements),
        cmocka_unit_test(copy_strided__null_strides_are_row_major),
        cmocka_unit_test(copy_strided__dimensions_up_to_the_limit),
        cmocka_unit_test(copy_strided__rates),
        cmocka_unit_test(swap_elements__reverses_each_number),
        cmocka_unit_test(conjugate__negates_imaginary_parts_only),
        cmocka_unit_test(negate__follows_the_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
