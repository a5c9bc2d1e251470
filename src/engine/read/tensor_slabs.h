/* A tensor in row-major pieces of bounded size. */
#ifndef DCP_ENGINE_TENSOR_SLABS_H
#define DCP_ENGINE_TENSOR_SLABS_H

#include "engine/read/checkpoint.h"

/* A slab is one index in each dimension before `dim`, up to `step` indexes of that, and all of those behind: slabs follow one
 * another in row-major order. */
typedef struct dcp__slabs {
    int ndim, dim;
    int64_t step;
    const int64_t *extents;                             /* borrowed */
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM]; /* of the current one */
    int64_t elems;                                      /* of the current one */
    int64_t largest;                                    /* elements of the largest one; 0 if there is none */
    bool is_started;
} dcp__slabs;

/* Slabs of at most max_elems elements (1 at least). */
void dcp__slabs_init(dcp__slabs *s, int ndim, const int64_t *extents, int64_t max_elems);
/* Moves to the first or next one; false at the end. A tensor without elements has none. */
bool dcp__slabs_next(dcp__slabs *s);
/* Reads the current one, row-major. */
dcp_status dcp__slabs_read(const dcp__slabs *s, dcp_checkpoint *ck, const dcp_item *item, void *buf, dcp_error *err);

#endif
