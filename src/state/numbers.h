/* Elements as numbers: decoding them, and casts from one dtype to another as PyTorch's `to` does them. */
#ifndef DCP_STATE_NUMBERS_H
#define DCP_STATE_NUMBERS_H

#include "dcp/state.h"

typedef enum dcp__number_class {
    DCP__NUMBER_NONE = 0,
    DCP__NUMBER_BOOL,
    DCP__NUMBER_INT,
    DCP__NUMBER_UINT,
    DCP__NUMBER_REAL,
    DCP__NUMBER_COMPLEX, /* two reals an element */
    DCP__NUMBER_PAIR     /* two numbers of four bits an element */
} dcp__number_class;

dcp__number_class dcp__number_class_of(dcp_dtype dtype);
/* Numbers in one element: 2 for complex ones and pairs, else 1. */
size_t dcp__numbers_each(dcp_dtype dtype);
/* What the two numbers of a complex are; other dtypes are what they are. */
dcp_dtype dcp__number_dtype(dcp_dtype dtype);

/* A floating point number of at most 16 bits: sign, exponent, mantissa from the top. */
typedef struct dcp__float_form {
    int exponent_bits, mantissa_bits, bias;
    uint32_t largest; /* code of the largest finite number */
    uint32_t nan;     /* a code that is no number */
    bool has_infinity;
    bool is_unsigned_zero; /* the code of -0 is the only NaN */
} dcp__float_form;

/* NULL for dtypes of another kind, float32 and float64 among them. */
const dcp__float_form *dcp__float_form_of(dcp_dtype dtype);

/* Decodes n elements, dcp__numbers_each for each of them. Everything is exact but integers of more than 53 bits. */
void dcp__decode_reals(dcp_dtype dtype, const void *elems, size_t n, double *out);
/* Booleans and integers; those of uint64 as two's complement. */
void dcp__decode_ints(dcp_dtype dtype, const void *elems, size_t n, int64_t *out);

/* True for equal dtypes, between reals, integers and booleans, and between complex numbers. Not from or to
 * float4_e2m1fn_x2, and not to float8_e8m0fnu, which are codes for others to make sense of. */
bool dcp__can_cast(dcp_dtype from, dcp_dtype to);
/* Casts n elements. Reals are rounded to the nearest, to even between two; to integers towards zero. Returns how many do not fit:
 * finite numbers that become infinite or NaN, infinities that become NaN, and what is outside the range of an integer, which
 * becomes the nearest that is inside, NaN 0. */
uint64_t dcp__cast(dcp_dtype from, const void *src, dcp_dtype to, void *dst, size_t n);

#endif
