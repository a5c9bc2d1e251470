/* Copies between strided N-d views of host memory. */
#ifndef DCP_STATE_STRIDED_H
#define DCP_STATE_STRIDED_H

#include "base/error.h"
#include "dcp/state.h"

/* Row-major strides in elements; extents of 0 count as 1, as PyTorch does. */
void dcp__row_major(int ndim, const int64_t *extents, int64_t *strides);
/* True if the elements lie row-major without gaps (strides of extents <= 1 do not matter); strides NULL counts as row-major. */
bool dcp__is_row_major(int ndim, const int64_t *extents, const int64_t *strides);
/* Product of extents, false on overflow or a negative extent. */
bool dcp__elems(int ndim, const int64_t *extents, int64_t *out);
/* Index of the last element that a view touches plus one, 0 without elements; false on overflow or a negative stride. */
bool dcp__span_elems(int ndim, const int64_t *extents, const int64_t *strides, int64_t *out);

/* Where an element lies in a view, in elements from its first one. */
int64_t dcp__element_at(int ndim, const int64_t *index, const int64_t *strides);
/* The largest box of a tensor that begins at element `start`, in row-major order, and holds at most `left` elements: whole inner
 * dimensions, as many indexes of one dimension as fit, one index of those outside. Returns its number of elements. */
int64_t dcp__box_at(int ndim, const int64_t *extents, int64_t start, int64_t left, int64_t *offsets, int64_t *sizes);

/* "[4, 8]", for messages; cut where it is very long. */
dcp__printable dcp__print_shape(int ndim, const int64_t *extents);

/* Copies prod(extents) elements of elem_bytes (1 to 16) each. Strides in elements; the areas do not overlap. Dimensions are
 * merged where both sides allow it, so that contiguous runs are one memcpy; transposes go in cache-sized tiles. */
void dcp__copy_strided(void *dst, const int64_t *dst_strides, const void *src, const int64_t *src_strides, int ndim,
                       const int64_t *extents, size_t elem_bytes);
/* Swaps the bytes of n elements in place: of each half of a complex. */
void dcp__swap_elements(void *data, size_t n, dcp_dtype dtype);
/* Negates n elements in place: imaginary parts only, or whole values. */
void dcp__conjugate(void *data, size_t n, dcp_dtype dtype);
void dcp__negate(void *data, size_t n, dcp_dtype dtype);

#endif
