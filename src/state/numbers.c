#include "state/numbers.h"

#include <math.h>

#include "base/bytes.h"

dcp__number_class dcp__number_class_of(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_DTYPE_NONE:
    case DCP_DTYPE_COUNT: return DCP__NUMBER_NONE;
    case DCP_BOOL: return DCP__NUMBER_BOOL;
    case DCP_INT8:
    case DCP_INT16:
    case DCP_INT32:
    case DCP_INT64: return DCP__NUMBER_INT;
    case DCP_UINT8:
    case DCP_UINT16:
    case DCP_UINT32:
    case DCP_UINT64: return DCP__NUMBER_UINT;
    case DCP_COMPLEX32:
    case DCP_BCOMPLEX32:
    case DCP_COMPLEX64:
    case DCP_COMPLEX128: return DCP__NUMBER_COMPLEX;
    case DCP_FLOAT4_E2M1FN_X2: return DCP__NUMBER_PAIR;
    default: return DCP__NUMBER_REAL;
    }
}

size_t dcp__numbers_each(dcp_dtype dtype)
{
    return dcp__number_class_of(dtype) >= DCP__NUMBER_COMPLEX ? 2 : 1;
}

dcp_dtype dcp__number_dtype(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_COMPLEX32: return DCP_FLOAT16;
    case DCP_BCOMPLEX32: return DCP_BFLOAT16;
    case DCP_COMPLEX64: return DCP_FLOAT32;
    case DCP_COMPLEX128: return DCP_FLOAT64;
    default: return dtype;
    }
}

const dcp__float_form *dcp__float_form_of(dcp_dtype dtype)
{
    static const dcp__float_form half = {5, 10, 15, 0x7bff, 0x7e00, true, false};
    static const dcp__float_form bfloat = {8, 7, 127, 0x7f7f, 0x7fc0, true, false};
    static const dcp__float_form e4m3fn = {4, 3, 7, 0x7e, 0x7f, false, false};
    static const dcp__float_form e5m2 = {5, 2, 15, 0x7b, 0x7f, true, false};
    static const dcp__float_form e4m3fnuz = {4, 3, 8, 0x7f, 0x80, false, true};
    static const dcp__float_form e5m2fnuz = {5, 2, 16, 0x7f, 0x80, false, true};
    switch (dtype) {
    case DCP_FLOAT16: return &half;
    case DCP_BFLOAT16: return &bfloat;
    case DCP_FLOAT8_E4M3FN: return &e4m3fn;
    case DCP_FLOAT8_E5M2: return &e5m2;
    case DCP_FLOAT8_E4M3FNUZ: return &e4m3fnuz;
    case DCP_FLOAT8_E5M2FNUZ: return &e5m2fnuz;
    default: return NULL;
    }
}

/* ---- reals ---- */

static double load_float(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

static double load_double(const uint8_t *p)
{
    double d;
    memcpy(&d, p, sizeof d);
    return d;
}

static double load_bfloat(const uint8_t *p)
{
    uint32_t bits = (uint32_t)dcp__load16(p) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static double decode_code(const dcp__float_form *f, uint32_t code)
{
    uint32_t sign_bit = 1u << (f->exponent_bits + f->mantissa_bits), magnitude = code & (sign_bit - 1);
    uint32_t exponent = magnitude >> f->mantissa_bits, mantissa = magnitude & ((1u << f->mantissa_bits) - 1);
    double sign = code & sign_bit ? -1 : 1;
    if (f->is_unsigned_zero && code == f->nan) {
        return NAN;
    }
    if (magnitude > f->largest) {
        return f->has_infinity && mantissa == 0 ? sign * (double)INFINITY : NAN;
    }
    uint32_t digits = exponent ? mantissa | 1u << f->mantissa_bits : mantissa;
    return ldexp(sign * (double)digits, (exponent ? (int)exponent : 1) - f->bias - f->mantissa_bits);
}

/* float4_e2m1fn: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. */
static double decode_nibble(uint32_t code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/* Those of 8 bits through a table of all codes. */
static void decode_bytes(dcp_dtype dtype, const uint8_t *p, size_t n, double *out)
{
    double table[256];
    const dcp__float_form *f = dcp__float_form_of(dtype);
    for (uint32_t code = 0; code < 256; code++) {
        table[code] = f ? decode_code(f, code) : code == 0xff ? NAN : ldexp(1, (int)code - 127); /* float8_e8m0fnu */
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = table[p[i]];
    }
}

static void decode_pairs(const uint8_t *p, size_t n, double *out)
{
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = decode_nibble(p[i] & 15u);
        out[2 * i + 1] = decode_nibble(p[i] >> 4u);
    }
}

static void decode_integers(dcp_dtype dtype, const void *elems, size_t n, double *out)
{
    for (size_t i = 0; i < n; i++) {
        int64_t v;
        dcp__decode_ints(dtype, (const uint8_t *)elems + i * dcp_dtype_bytes(dtype), 1, &v);
        out[i] = dtype == DCP_UINT64 ? (double)(uint64_t)v : (double)v;
    }
}

void dcp__decode_reals(dcp_dtype dtype, const void *elems, size_t n, double *out)
{
    const uint8_t *p = elems;
    size_t numbers = n * dcp__numbers_each(dtype);
    switch (dcp__number_dtype(dtype)) {
    case DCP_FLOAT32:
        for (size_t i = 0; i < numbers; i++) {
            out[i] = load_float(p + 4 * i);
        }
        break;
    case DCP_FLOAT64:
        for (size_t i = 0; i < numbers; i++) {
            out[i] = load_double(p + 8 * i);
        }
        break;
    case DCP_BFLOAT16:
        for (size_t i = 0; i < numbers; i++) {
            out[i] = load_bfloat(p + 2 * i);
        }
        break;
    case DCP_FLOAT16:
        for (size_t i = 0; i < numbers; i++) {
            out[i] = decode_code(dcp__float_form_of(DCP_FLOAT16), dcp__load16(p + 2 * i));
        }
        break;
    case DCP_FLOAT4_E2M1FN_X2: decode_pairs(p, n, out); break;
    default:
        if (dcp__number_class_of(dtype) == DCP__NUMBER_REAL) {
            decode_bytes(dtype, p, n, out);
        } else {
            decode_integers(dtype, p, n, out);
        }
    }
}

/* ---- integers ---- */

#define DECODE(type)                                                                                                             \
    for (size_t i = 0; i < n; i++) {                                                                                             \
        type v;                                                                                                                  \
        memcpy(&v, p + i * sizeof v, sizeof v);                                                                                  \
        out[i] = (int64_t)v;                                                                                                     \
    }                                                                                                                            \
    break

void dcp__decode_ints(dcp_dtype dtype, const void *elems, size_t n, int64_t *out)
{
    const uint8_t *p = elems;
    switch (dtype) {
    case DCP_INT8: DECODE(int8_t);
    case DCP_INT16: DECODE(int16_t);
    case DCP_INT32: DECODE(int32_t);
    case DCP_UINT16: DECODE(uint16_t);
    case DCP_UINT32: DECODE(uint32_t);
    case DCP_INT64:
    case DCP_UINT64: DECODE(int64_t);
    default: DECODE(uint8_t);
    }
}
