/* Elements of two tensors side by side. */
#ifndef DCP_ENGINE_DIFF_VALUES_H
#define DCP_ENGINE_DIFF_VALUES_H

#include "dcp/state.h"

typedef struct dcp__tolerance {
    double abs, rel; /* both 0: bits are compared, if the dtypes are equal */
} dcp__tolerance;

/* What differs so far. */
typedef struct dcp__value_diff {
    uint64_t n;     /* elements beyond the tolerance */
    uint64_t first; /* position of the first of them */
    double max_abs, max_rel;
} dcp__value_diff;

/* Is there a way to compare them? */
bool dcp__can_compare(dcp_dtype a, dcp_dtype b);
/* Compares n elements at a and b; the first is at position `at` of the whole. */
void dcp__compare_values(dcp_dtype dtype_a, const void *a, dcp_dtype dtype_b, const void *b, size_t n, uint64_t at,
                         const dcp__tolerance *tolerance, dcp__value_diff *out);

#endif
