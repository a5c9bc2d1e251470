#include "engine/verify/diff_values.h"

#include <math.h>
#include <string.h>

#include "state/numbers.h"

#define BATCH 256

/* A difference of two elements and what it is measured against. */
typedef struct distance {
    double abs, size;
} distance;

static bool is_whole(dcp_dtype dtype)
{
    dcp__number_class c = dcp__number_class_of(dtype);
    return c == DCP__NUMBER_BOOL || c == DCP__NUMBER_INT || c == DCP__NUMBER_UINT;
}

bool dcp__can_compare(dcp_dtype a, dcp_dtype b)
{
    return a == b || (dcp__numbers_each(a) == 1 && dcp__numbers_each(b) == 1) ||
           (dcp__number_class_of(a) == DCP__NUMBER_COMPLEX && dcp__number_class_of(b) == DCP__NUMBER_COMPLEX);
}

static double apart(double a, double b)
{
    if (isnan(a) || isnan(b)) {
        return isnan(a) && isnan(b) ? 0 : (double)INFINITY;
    }
    return a == b ? 0 : fabs(a - b); /* equal infinities are not NaN apart */
}

static distance between_reals(const double *a, const double *b, size_t each)
{
    double first = apart(a[0], b[0]);
    if (each == 1) {
        return (distance){first, fabs(b[0])};
    }
    return (distance){hypot(first, apart(a[1], b[1])), hypot(b[0], b[1])};
}

/* Exact, also beyond 53 bits. */
static distance between_ints(dcp_dtype dtype, int64_t a, int64_t b)
{
    bool is_unsigned = dtype == DCP_UINT64;
    bool is_less = is_unsigned ? (uint64_t)a < (uint64_t)b : a < b;
    uint64_t apart = is_less ? (uint64_t)b - (uint64_t)a : (uint64_t)a - (uint64_t)b;
    return (distance){(double)apart, is_unsigned ? (double)(uint64_t)b : fabs((double)b)};
}

static void note(dcp__value_diff *out, uint64_t at, distance d)
{
    double rel = d.size > 0 ? d.abs / d.size : d.abs > 0 ? (double)INFINITY : 0;
    rel = isnan(rel) ? (double)INFINITY : rel; /* infinity of infinity */
    out->first = out->n++ ? out->first : at;
    out->max_abs = d.abs > out->max_abs ? d.abs : out->max_abs;
    out->max_rel = rel > out->max_rel ? rel : out->max_rel;
}

typedef struct decoded {
    int64_t ints[BATCH];
    double reals[2 * BATCH];
} decoded;

static void decode(dcp_dtype dtype, const void *elems, size_t n, bool as_ints, decoded *out)
{
    if (as_ints) {
        dcp__decode_ints(dtype, elems, n, out->ints);
    } else {
        dcp__decode_reals(dtype, elems, n, out->reals);
    }
}

static bool within(distance d, const dcp__tolerance *t)
{
    double limit = t->abs + (t->rel > 0 ? t->rel * d.size : 0);
    return d.abs == 0 || (d.abs <= limit && !isinf(d.abs));
}

static void compare_batch(dcp_dtype dtype_a, const uint8_t *a, dcp_dtype dtype_b, const uint8_t *b, size_t n, uint64_t at,
                          const dcp__tolerance *t, dcp__value_diff *out)
{
    decoded x, y;
    size_t each = dcp__numbers_each(dtype_a), bytes = dcp_dtype_bytes(dtype_a);
    bool as_ints = dtype_a == dtype_b && is_whole(dtype_a), as_bits = dtype_a == dtype_b && t->abs <= 0 && t->rel <= 0;
    if (dtype_a == dtype_b && memcmp(a, b, n * bytes) == 0) {
        return;
    }
    decode(dtype_a, a, n, as_ints, &x);
    decode(dtype_b, b, n, as_ints, &y);
    for (size_t i = 0; i < n; i++) {
        distance d =
            as_ints ? between_ints(dtype_a, x.ints[i], y.ints[i]) : between_reals(&x.reals[i * each], &y.reals[i * each], each);
        bool is_equal = as_bits ? memcmp(a + i * bytes, b + i * bytes, bytes) == 0 : within(d, t);
        if (!is_equal) {
            note(out, at + i, d);
        }
    }
}

void dcp__compare_values(dcp_dtype dtype_a, const void *a, dcp_dtype dtype_b, const void *b, size_t n, uint64_t at,
                         const dcp__tolerance *tolerance, dcp__value_diff *out)
{
    size_t bytes_a = dcp_dtype_bytes(dtype_a), bytes_b = dcp_dtype_bytes(dtype_b);
    if (dtype_a == dtype_b && memcmp(a, b, n * bytes_a) == 0) {
        return;
    }
    for (size_t i = 0; i < n; i += BATCH) {
        size_t batch = n - i < BATCH ? n - i : BATCH;
        compare_batch(dtype_a, (const uint8_t *)a + i * bytes_a, dtype_b, (const uint8_t *)b + i * bytes_b, batch, at + i,
                      tolerance, out);
    }
}
