#include "element.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

element_class element_class_of(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_BOOL: return ELEMENT_BOOL;
    case DCP_INT8:
    case DCP_INT16:
    case DCP_INT32:
    case DCP_INT64: return ELEMENT_INT;
    case DCP_UINT8:
    case DCP_UINT16:
    case DCP_UINT32:
    case DCP_UINT64: return ELEMENT_UINT;
    case DCP_COMPLEX32:
    case DCP_BCOMPLEX32:
    case DCP_COMPLEX64:
    case DCP_COMPLEX128: return ELEMENT_COMPLEX;
    case DCP_FLOAT4_E2M1FN_X2: return ELEMENT_PAIR;
    default: return ELEMENT_REAL;
    }
}

size_t element_numbers(dcp_dtype dtype)
{
    return element_class_of(dtype) >= ELEMENT_COMPLEX ? 2 : 1;
}

bool element_is_single(dcp_dtype dtype)
{
    return dtype != DCP_FLOAT64 && dtype != DCP_COMPLEX128;
}

/* ---- floating point: sign, exponent, mantissa ---- */

/* What a code whose exponent bits are all ones means. */
typedef enum special_rule {
    SPECIAL_IEEE, /* infinity, or NaN if the mantissa is not 0 */
    SPECIAL_FN,   /* finite; NaN only if the mantissa is all ones too */
    SPECIAL_NONE  /* finite */
} special_rule;

typedef struct float_form {
    int exponent_bits, mantissa_bits, bias;
    special_rule special;
    bool is_unsigned_zero; /* "uz": the code of -0 is the only NaN */
} float_form;

static const float_form half_form = {5, 10, 15, SPECIAL_IEEE, false};
static const float_form e4m3fn_form = {4, 3, 7, SPECIAL_FN, false};
static const float_form e5m2_form = {5, 2, 15, SPECIAL_IEEE, false};
static const float_form e4m3fnuz_form = {4, 3, 8, SPECIAL_NONE, true};
static const float_form e5m2fnuz_form = {5, 2, 16, SPECIAL_NONE, true};
static const float_form e2m1fn_form = {2, 1, 1, SPECIAL_NONE, false};

static double decode(const float_form *f, unsigned code)
{
    unsigned mantissa_ones = (1u << f->mantissa_bits) - 1, exponent_ones = (1u << f->exponent_bits) - 1;
    unsigned mantissa = code & mantissa_ones, exponent = code >> f->mantissa_bits & exponent_ones;
    unsigned sign = code >> (f->mantissa_bits + f->exponent_bits) & 1;
    if (f->is_unsigned_zero && sign && !exponent && !mantissa) {
        return NAN;
    }
    if (exponent == exponent_ones && f->special == SPECIAL_IEEE) {
        return mantissa ? NAN : sign ? -INFINITY : INFINITY;
    }
    if (exponent == exponent_ones && f->special == SPECIAL_FN && mantissa == mantissa_ones) {
        return NAN;
    }
    unsigned digits = exponent ? mantissa | (mantissa_ones + 1) : mantissa;
    int power = (exponent ? (int)exponent : 1) - f->bias - f->mantissa_bits;
    return ldexp(sign ? -(double)digits : digits, power);
}

static uint16_t load16(const unsigned char *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static double load_bfloat16(const unsigned char *p)
{
    uint32_t bits = (uint32_t)load16(p) << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static double load_float(const unsigned char *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

static double load_double(const unsigned char *p)
{
    double d;
    memcpy(&d, p, sizeof d);
    return d;
}

/* Decodes the element at p: one number, or two for complex numbers and pairs. */
static void load_reals(dcp_dtype dtype, const unsigned char *p, double out[2])
{
    switch (dtype) {
    case DCP_FLOAT32: out[0] = load_float(p); break;
    case DCP_FLOAT64: out[0] = load_double(p); break;
    case DCP_FLOAT16: out[0] = decode(&half_form, load16(p)); break;
    case DCP_BFLOAT16: out[0] = load_bfloat16(p); break;
    case DCP_FLOAT8_E4M3FN: out[0] = decode(&e4m3fn_form, *p); break;
    case DCP_FLOAT8_E5M2: out[0] = decode(&e5m2_form, *p); break;
    case DCP_FLOAT8_E4M3FNUZ: out[0] = decode(&e4m3fnuz_form, *p); break;
    case DCP_FLOAT8_E5M2FNUZ: out[0] = decode(&e5m2fnuz_form, *p); break;
    case DCP_FLOAT8_E8M0FNU: out[0] = *p == 0xff ? NAN : ldexp(1, *p - 127); break;
    case DCP_FLOAT4_E2M1FN_X2:
        out[0] = decode(&e2m1fn_form, *p & 0xf);
        out[1] = decode(&e2m1fn_form, *p >> 4);
        break;
    case DCP_COMPLEX32:
        out[0] = decode(&half_form, load16(p));
        out[1] = decode(&half_form, load16(p + 2));
        break;
    case DCP_BCOMPLEX32:
        out[0] = load_bfloat16(p);
        out[1] = load_bfloat16(p + 2);
        break;
    case DCP_COMPLEX64:
        out[0] = load_float(p);
        out[1] = load_float(p + 4);
        break;
    case DCP_COMPLEX128:
        out[0] = load_double(p);
        out[1] = load_double(p + 8);
        break;
    default: out[0] = NAN; break;
    }
}

/* The dtypes that most bytes are of have loops of their own. */
void element_reals(dcp_dtype dtype, const void *elems, size_t n, double *out)
{
    const unsigned char *p = elems;
    size_t size = dcp_dtype_bytes(dtype), numbers = element_numbers(dtype);
    if (dtype == DCP_FLOAT32) {
        for (size_t i = 0; i < n; i++) {
            out[i] = load_float(p + 4 * i);
        }
    } else if (dtype == DCP_BFLOAT16) {
        for (size_t i = 0; i < n; i++) {
            out[i] = load_bfloat16(p + 2 * i);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            load_reals(dtype, p + i * size, out + i * numbers);
        }
    }
}

/* ---- integers ---- */

static uint64_t load_uint(const unsigned char *p, size_t size)
{
    uint64_t out = 0;
    for (size_t i = 0; i < size; i++) {
        out |= (uint64_t)p[i] << 8 * i;
    }
    return out;
}

void element_uints(dcp_dtype dtype, const void *elems, size_t n, uint64_t *out)
{
    const unsigned char *p = elems;
    size_t size = dcp_dtype_bytes(dtype);
    for (size_t i = 0; i < n; i++) {
        out[i] = load_uint(p + i * size, size);
    }
}

void element_ints(dcp_dtype dtype, const void *elems, size_t n, int64_t *out)
{
    const unsigned char *p = elems;
    size_t size = dcp_dtype_bytes(dtype);
    uint64_t sign = dtype == DCP_BOOL ? 0 : (uint64_t)1 << (8 * size - 1);
    for (size_t i = 0; i < n; i++) {
        /* Flipping the sign bit and taking its weight off again extends the sign. */
        out[i] = (int64_t)((load_uint(p + i * size, size) ^ sign) - sign);
    }
}

/* ---- text ---- */

static void reals_json(json_writer *w, dcp_dtype dtype, const void *elem)
{
    double numbers[2];
    bool is_single = element_is_single(dtype), is_two = element_numbers(dtype) == 2;
    element_reals(dtype, elem, 1, numbers);
    if (is_two) {
        jw_begin_inline(w, '[');
    }
    jw_real(w, numbers[0], is_single);
    if (is_two) {
        jw_real(w, numbers[1], is_single);
        jw_end(w, ']');
    }
}

void element_json(json_writer *w, dcp_dtype dtype, const void *elem)
{
    int64_t i;
    uint64_t u;
    switch (element_class_of(dtype)) {
    case ELEMENT_BOOL:
        element_ints(dtype, elem, 1, &i);
        jw_bool(w, i != 0);
        break;
    case ELEMENT_INT:
        element_ints(dtype, elem, 1, &i);
        jw_int(w, i);
        break;
    case ELEMENT_UINT:
        element_uints(dtype, elem, 1, &u);
        jw_uint(w, u);
        break;
    default: reals_json(w, dtype, elem); break;
    }
}

const char *element_real_text(double value, bool is_single, char buf[JW_REAL_BYTES])
{
    if (isnan(value)) {
        return strcpy(buf, "nan");
    }
    if (isinf(value)) {
        return strcpy(buf, value < 0 ? "-inf" : "inf");
    }
    return jw_format_real(value, is_single, buf);
}

static const char *reals_text(dcp_dtype dtype, const void *elem, char *buf)
{
    double numbers[2] = {0};
    char first[JW_REAL_BYTES], second[JW_REAL_BYTES];
    bool is_single = element_is_single(dtype);
    element_reals(dtype, elem, 1, numbers);
    element_real_text(numbers[0], is_single, first);
    element_real_text(numbers[1], is_single, second);
    switch (element_class_of(dtype)) {
    case ELEMENT_PAIR: snprintf(buf, ELEMENT_TEXT_BYTES, "(%s, %s)", first, second); break;
    case ELEMENT_COMPLEX: snprintf(buf, ELEMENT_TEXT_BYTES, "(%s%s%sj)", first, second[0] == '-' ? "" : "+", second); break;
    default: snprintf(buf, ELEMENT_TEXT_BYTES, "%s", first); break;
    }
    return buf;
}

const char *element_text(dcp_dtype dtype, const void *elem, char buf[ELEMENT_TEXT_BYTES])
{
    int64_t i;
    uint64_t u;
    switch (element_class_of(dtype)) {
    case ELEMENT_BOOL: element_ints(dtype, elem, 1, &i); return strcpy(buf, i ? "True" : "False");
    case ELEMENT_INT:
        element_ints(dtype, elem, 1, &i);
        snprintf(buf, ELEMENT_TEXT_BYTES, "%" PRId64, i);
        return buf;
    case ELEMENT_UINT:
        element_uints(dtype, elem, 1, &u);
        snprintf(buf, ELEMENT_TEXT_BYTES, "%" PRIu64, u);
        return buf;
    default: return reals_text(dtype, elem, buf);
    }
}
