/* Casts: batches are decoded to doubles, or to integers where both sides are, and encoded again. */
#include <math.h>

#include "base/bytes.h"
#include "state/numbers.h"

#define BATCH 512

/* ---- reals ---- */

/* The code of a number, rounded to the nearest; *lost counts those that do not fit. A double's digits are all kept until the one
 * rounding, by rint, of the number in units of the last place. */
static uint32_t encode(const dcp__float_form *f, double d, uint64_t *lost)
{
    uint32_t sign = signbit(d) ? 1u << (f->exponent_bits + f->mantissa_bits) : 0;
    double a = fabs(d);
    if (isnan(d)) {
        return f->nan | (f->is_unsigned_zero ? 0 : sign);
    }
    if (!isinf(d)) {
        int power = a > 0 ? ilogb(a) : 1 - f->bias;
        power = power < 1 - f->bias ? 1 - f->bias : power;
        double units = power - f->mantissa_bits > 1000 ? (double)INFINITY : rint(ldexp(a, f->mantissa_bits - power));
        double code = units + ldexp(power + f->bias - 1, f->mantissa_bits); /* carries into the exponent by itself */
        if (code <= f->largest) {
            return f->is_unsigned_zero && code == 0 ? 0 : sign | (uint32_t)code;
        }
        ++*lost;
    } else if (!f->has_infinity) {
        ++*lost;
    }
    return f->has_infinity ? sign | (f->largest + 1) : f->nan | (f->is_unsigned_zero ? 0 : sign);
}

static void encode_floats(const double *in, size_t n, uint8_t *out, uint64_t *lost)
{
    for (size_t i = 0; i < n; i++) {
        float v = (float)in[i];
        *lost += isinf(v) && !isinf(in[i]);
        memcpy(out + 4 * i, &v, sizeof v);
    }
}

static void encode_reals(dcp_dtype to, const double *in, size_t n, uint8_t *out, uint64_t *lost)
{
    const dcp__float_form *f = dcp__float_form_of(to);
    if (to == DCP_FLOAT64) {
        memcpy(out, in, n * sizeof *in);
    } else if (to == DCP_FLOAT32) {
        encode_floats(in, n, out, lost);
    } else if (f->exponent_bits + f->mantissa_bits == 15) {
        for (size_t i = 0; i < n; i++) {
            dcp__store16(out + 2 * i, (uint16_t)encode(f, in[i], lost));
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            out[i] = (uint8_t)encode(f, in[i], lost);
        }
    }
}

/* ---- integers ---- */

static int bits_of(dcp_dtype dtype)
{
    return (int)(8 * dcp_dtype_bytes(dtype));
}

/* The nearest integer of a dtype, as two's complement. */
static int64_t to_integer(dcp_dtype to, double d, uint64_t *lost)
{
    bool is_signed = dcp__number_class_of(to) == DCP__NUMBER_INT;
    int digits = bits_of(to) - is_signed;
    double end = ldexp(1, digits), t = trunc(d);
    if (isnan(d)) {
        ++*lost;
        return 0;
    }
    if (t >= end) {
        ++*lost;
        return digits == 64 ? -1 : (int64_t)(((uint64_t)1 << digits) - 1);
    }
    if (t < (is_signed ? -end : 0)) {
        ++*lost;
        return is_signed ? -(int64_t)((uint64_t)1 << (digits - 1)) * 2 : 0;
    }
    return t >= 0x1p63 ? (int64_t)(uint64_t)t : (int64_t)t;
}

/* The same for an integer; is_high: v stands for v + 2^64. */
static int64_t fit_integer(dcp_dtype to, int64_t v, bool is_high, uint64_t *lost)
{
    int bits = bits_of(to);
    bool is_signed = dcp__number_class_of(to) == DCP__NUMBER_INT;
    int64_t largest = bits == 64 ? INT64_MAX : is_signed ? ((int64_t)1 << (bits - 1)) - 1 : ((int64_t)1 << bits) - 1;
    int64_t smallest = is_signed ? -largest - 1 : 0;
    if (bits == 64 && !is_signed && (is_high || v >= 0)) {
        return v;
    }
    if (!is_high && v >= smallest && v <= largest) {
        return v;
    }
    ++*lost;
    return is_high || v > largest ? largest : smallest;
}

static void store_integer(dcp_dtype to, int64_t v, uint8_t *out)
{
    memcpy(out, &v, dcp_dtype_bytes(to)); /* little-endian: the low bytes come first */
}

static void encode_integers(dcp_dtype from, dcp_dtype to, const int64_t *in, size_t n, uint8_t *out, uint64_t *lost)
{
    size_t each = dcp_dtype_bytes(to);
    for (size_t i = 0; i < n; i++) {
        bool is_high = from == DCP_UINT64 && in[i] < 0;
        int64_t v = to == DCP_BOOL ? in[i] != 0 : fit_integer(to, in[i], is_high, lost);
        store_integer(to, v, out + i * each);
    }
}

/* A 64-bit integer as a double that rounds to anything shorter as the integer does: what is cut off leaves its lowest bit set. */
static double sticky(int64_t v, bool is_unsigned)
{
    bool is_negative = v < 0 && !is_unsigned;
    uint64_t a = is_negative ? 0 - (uint64_t)v : (uint64_t)v;
    if (a >> 53) {
        a = (a & ~(uint64_t)0x7ff) | (a & 0x7ff ? 0x800 : 0);
    }
    return is_negative ? -(double)a : (double)a;
}

/* ---- batches ---- */

static bool is_whole(dcp_dtype dtype)
{
    dcp__number_class c = dcp__number_class_of(dtype);
    return c == DCP__NUMBER_BOOL || c == DCP__NUMBER_INT || c == DCP__NUMBER_UINT;
}

bool dcp__can_cast(dcp_dtype from, dcp_dtype to)
{
    bool from_complex = dcp__number_class_of(from) == DCP__NUMBER_COMPLEX;
    if (!dcp_dtype_bytes(from) || !dcp_dtype_bytes(to)) {
        return false;
    }
    return from == to || (from != DCP_FLOAT4_E2M1FN_X2 && to != DCP_FLOAT4_E2M1FN_X2 && to != DCP_FLOAT8_E8M0FNU &&
                          from_complex == (dcp__number_class_of(to) == DCP__NUMBER_COMPLEX));
}

static void cast_integers(dcp_dtype from, const uint8_t *src, dcp_dtype to, uint8_t *dst, size_t n, uint64_t *lost)
{
    int64_t ints[BATCH];
    double reals[BATCH];
    dcp__decode_ints(from, src, n, ints);
    if (is_whole(to)) {
        encode_integers(from, to, ints, n, dst, lost);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        bool is_unsigned = from == DCP_UINT64;
        double exact = is_unsigned ? (double)(uint64_t)ints[i] : (double)ints[i];
        reals[i] = to == DCP_FLOAT64 ? exact : sticky(ints[i], is_unsigned);
    }
    encode_reals(to, reals, n, dst, lost);
}

static void cast_reals(dcp_dtype from, const uint8_t *src, dcp_dtype to, uint8_t *dst, size_t n, uint64_t *lost)
{
    double reals[BATCH];
    dcp__decode_reals(from, src, n, reals);
    if (!is_whole(to)) {
        encode_reals(to, reals, n, dst, lost);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        int64_t v = to == DCP_BOOL ? reals[i] != 0 : to_integer(to, reals[i], lost);
        store_integer(to, v, dst + i * dcp_dtype_bytes(to));
    }
}

/* What most casts are: the upper half of a float, rounded. Those that become infinite are beyond the largest bfloat16 by half a
 * unit of its last place. */
static uint64_t float_to_bfloat(const uint8_t *src, uint8_t *dst, size_t n)
{
    uint64_t lost = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = dcp__load32(src + 4 * i), magnitude = bits & 0x7fffffff;
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (bits >> 16 & 0x8000) | 0x7fc0;
        lost += magnitude >= 0x7f7f8000 && magnitude < 0x7f800000;
        dcp__store16(dst + 2 * i, (uint16_t)(magnitude > 0x7f800000 ? nan : rounded));
    }
    return lost;
}

static void bfloat_to_float(const uint8_t *src, uint8_t *dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        dcp__store32(dst + 4 * i, (uint32_t)dcp__load16(src + 2 * i) << 16);
    }
}

uint64_t dcp__cast(dcp_dtype from, const void *src, dcp_dtype to, void *dst, size_t n)
{
    size_t each = dcp__numbers_each(from), numbers = n * each;
    uint64_t lost = 0;
    if (from == to) {
        memcpy(dst, src, n * dcp_dtype_bytes(from));
        return 0;
    }
    from = dcp__number_dtype(from);
    to = dcp__number_dtype(to);
    if (from == DCP_FLOAT32 && to == DCP_BFLOAT16) {
        return float_to_bfloat(src, dst, numbers);
    }
    if (from == DCP_BFLOAT16 && to == DCP_FLOAT32) {
        bfloat_to_float(src, dst, numbers);
        return 0;
    }
    for (size_t i = 0; i < numbers; i += BATCH) {
        size_t batch = numbers - i < BATCH ? numbers - i : BATCH;
        const uint8_t *in = (const uint8_t *)src + i * dcp_dtype_bytes(from);
        uint8_t *out = (uint8_t *)dst + i * dcp_dtype_bytes(to);
        (is_whole(from) ? cast_integers : cast_reals)(from, in, to, out, batch, &lost);
    }
    return lost;
}
