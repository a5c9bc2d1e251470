/* In-place changes of elements: byte order, and what the conj and neg bits of a record ask for. Data may be unaligned. */
#include <string.h>

#include "base/bytes.h"
#include "state/strided.h"

/* What the numbers of a dtype are made of. */
typedef enum number { UNSIGNED_ONLY, INTEGER, SIGN_BIT, SIGN_BIT_NO_NEGATIVE_ZERO, TWO_NIBBLES } number;

static bool is_complex(dcp_dtype dtype)
{
    return dtype == DCP_COMPLEX32 || dtype == DCP_BCOMPLEX32 || dtype == DCP_COMPLEX64 || dtype == DCP_COMPLEX128;
}

static size_t number_bytes(dcp_dtype dtype)
{
    return dcp_dtype_bytes(dtype) / (is_complex(dtype) ? 2 : 1);
}

static number number_of(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_INT8:
    case DCP_UINT8:
    case DCP_INT16:
    case DCP_UINT16:
    case DCP_INT32:
    case DCP_UINT32:
    case DCP_INT64:
    case DCP_UINT64: return INTEGER;
    case DCP_FLOAT8_E4M3FNUZ:
    case DCP_FLOAT8_E5M2FNUZ: return SIGN_BIT_NO_NEGATIVE_ZERO;
    case DCP_FLOAT4_E2M1FN_X2: return TWO_NIBBLES;
    case DCP_BOOL:
    case DCP_FLOAT8_E8M0FNU: return UNSIGNED_ONLY;
    default: return SIGN_BIT;
    }
}

static void swap_numbers(uint8_t *p, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++, p += bytes) {
        if (bytes == 2) {
            dcp__store16(p, __builtin_bswap16(dcp__load16(p)));
        } else if (bytes == 4) {
            dcp__store32(p, __builtin_bswap32(dcp__load32(p)));
        } else {
            dcp__store64(p, __builtin_bswap64(dcp__load64(p)));
        }
    }
}

void dcp__swap_elements(void *data, size_t n, dcp_dtype dtype)
{
    size_t bytes = number_bytes(dtype);
    if (bytes > 1) {
        swap_numbers(data, n * (is_complex(dtype) ? 2 : 1), bytes);
    }
}

/* The sign is the top bit of the last byte. */
static void flip_signs(uint8_t *p, size_t n, size_t bytes, size_t step)
{
    for (size_t i = 0; i < n; i++, p += step) {
        p[bytes - 1] ^= 0x80;
    }
}

void dcp__conjugate(void *data, size_t n, dcp_dtype dtype)
{
    if (is_complex(dtype)) {
        size_t half = number_bytes(dtype);
        flip_signs((uint8_t *)data + half, n, half, 2 * half);
    }
}

static void negate_integers(uint8_t *p, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++, p += bytes) {
        uint64_t v = 0;
        memcpy(&v, p, bytes);
        v = 0 - v; /* wraps, as PyTorch's does */
        memcpy(p, &v, bytes);
    }
}

void dcp__negate(void *data, size_t n, dcp_dtype dtype)
{
    uint8_t *p = data;
    size_t bytes = number_bytes(dtype);
    switch (number_of(dtype)) {
    case INTEGER: negate_integers(p, n, bytes); break;
    case SIGN_BIT: flip_signs(p, n * (is_complex(dtype) ? 2 : 1), bytes, bytes); break;
    case SIGN_BIT_NO_NEGATIVE_ZERO: /* 0x80 is NaN there */
        for (size_t i = 0; i < n; i++) {
            p[i] ^= p[i] & 0x7F ? 0x80 : 0;
        }
        break;
    case TWO_NIBBLES:
        for (size_t i = 0; i < n; i++) {
            p[i] ^= 0x88;
        }
        break;
    case UNSIGNED_ONLY: break; /* PyTorch has no negation for them */
    }
}
