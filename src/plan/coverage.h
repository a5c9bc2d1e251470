/* Geometry of chunks: overlap of boxes, and whether a set of chunks tiles a tensor. Pure. */
#ifndef DCP_PLAN_COVERAGE_H
#define DCP_PLAN_COVERAGE_H

#include "base/context.h"
#include "dcp/state.h"

/* Overlap of a wanted box and a chunk: where it starts in each of them, and its sizes. False if it is empty. Boxes lie within
 * the same tensor; sums fit in int64. */
bool dcp__box_overlap(int ndim, const dcp_box *wanted, const dcp_box *chunk, int64_t *in_wanted, int64_t *in_chunk,
                      int64_t *sizes);

/* Whether no number is negative and the box ends within the extents. */
bool dcp__box_is_inside(int ndim, const int64_t *extents, const int64_t *offsets, const int64_t *sizes);
/* Whether it has no elements. */
bool dcp__box_is_empty(int ndim, const int64_t *sizes);

typedef enum dcp__tiling_fault {
    DCP__TILING_OK = 0,
    DCP__TILING_OUTSIDE, /* chunk a is not within the tensor, or has a negative number */
    DCP__TILING_OVERLAP, /* chunks a and b share elements */
    DCP__TILING_GAP      /* `missing` elements are in no chunk; the first of them in row-major order is at `at` */
} dcp__tiling_fault;

typedef struct dcp__tiling {
    dcp__tiling_fault fault;
    size_t a, b;
    int64_t missing;
    int64_t at[DCP_MAX_NDIM];
} dcp__tiling;

/* Checks that chunks tile [0, extents): within bounds, pairwise disjoint, nothing missing. Chunks with no elements only need to
 * be within bounds. Exact, O(n log n) for chunks that are cut along one dimension or on a grid. Errors: NOMEM only. */
dcp_status dcp__check_tiling(dcp_context *ctx, int ndim, const int64_t *extents, const dcp_box *chunks, size_t n,
                             dcp__tiling *out, dcp_error *err);

#endif
