/* What a rank wants from a checkpoint, in cells that other ranks that want the same cut in the same way. */
#ifndef DCP_ENGINE_SHARE_CELLS_H
#define DCP_ENGINE_SHARE_CELLS_H

#include "engine/read_plan.h"

#define DCP__NOBODY UINT32_MAX

/* A part of a piece. Its boxes are in the cells' arena. */
typedef struct dcp__cell {
    dcp__piece piece;
    size_t whole;    /* index of the piece that it is a part of */
    uint32_t owner;  /* the rank that knows all who want it */
    uint32_t set;    /* who wants it, an index in a table; DCP__NOBODY: this rank alone */
    uint32_t reader; /* the rank of the set that reads it */
} dcp__cell;

typedef struct dcp__cells {
    dcp_context *ctx;
    dcp__arena arena;
    dcp__cell *cells;
    size_t n, cap;
} dcp__cells;

/* Cuts the pieces of a plan along a grid that only depends on their chunks and on cell_bytes, which cells do not exceed. Pieces
 * of chunks that must be read whole are not cut. What cannot be shared is left out: targets that are not in host memory, and such
 * pieces of more than whole_bytes. Free it in every case. Errors: NOMEM. */
dcp_status dcp__cells_cut(const dcp__read_plan *plan, uint64_t cell_bytes, uint64_t whole_bytes, dcp__cells *out, dcp_error *err);
void dcp__cells_reset(dcp__cells *c);

/* Where cells stand in the metadata, and within a chunk: an order that is the same on all ranks. */
int dcp__cell_compare(const dcp__cell *a, const dcp__cell *b);
/* The order of their bytes: by file and offset, then as above. */
int dcp__cell_compare_places(const dcp__metadata *m, const dcp__cell *a, const dcp__cell *b);

#endif
