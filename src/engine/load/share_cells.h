/* What a rank wants from a checkpoint, in cells that other ranks that want the same cut in the same way. */
#ifndef DCP_ENGINE_SHARE_CELLS_H
#define DCP_ENGINE_SHARE_CELLS_H

#include "engine/read/read_plan.h"

#define DCP__NOBODY UINT32_MAX

/* A part of a piece, or all of a record that has to be read whole, or a part of such a one. Its boxes are in the cells' arena. */
typedef struct dcp__cell {
    dcp__piece piece;        /* of a record: in_wanted says nothing */
    size_t first, n;         /* the pieces of the plan that want some of it */
    bool is_record, is_part; /* of a record: is_part if it is to be read in turn with its neighbours (share_record.h) */
    uint32_t owner;          /* the rank that knows all who want it */
    uint32_t set;            /* who wants it, an index in a table; DCP__NOBODY: this rank alone */
    uint32_t reader;         /* the rank of the set that reads it */
} dcp__cell;

typedef struct dcp__cells {
    dcp_context *ctx;
    dcp__arena arena;
    dcp__cell *cells;
    size_t n, cap;
} dcp__cells;

void dcp__cells_init(dcp__cells *c, dcp_context *ctx);
void dcp__cells_reset(dcp__cells *c);
/* Cuts the pieces of a plan along a grid that only depends on their chunks and on cell_bytes, which cells do not exceed. A record
 * that must be read whole becomes one cell, however large, and however small the parts that are wanted. What is wanted in memory
 * that is not the host's is left out. Errors: NOMEM. */
dcp_status dcp__cells_cut(const dcp__read_plan *plan, uint64_t cell_bytes, dcp__cells *out, dcp_error *err);
/* Adds the cells of a record, along the same grid and in the order of its elements. Errors: NOMEM. */
dcp_status dcp__cells_cut_record(const dcp__cell *record, const dcp__metadata *m, uint64_t cell_bytes, dcp__cells *out,
                                 dcp_error *err);

/* Where cells stand in the metadata, and within a chunk: an order that is the same on all ranks. */
int dcp__cell_compare(const dcp__cell *a, const dcp__cell *b);
/* The order of their bytes: by file and offset, then as above. */
int dcp__cell_compare_places(const dcp__metadata *m, const dcp__cell *a, const dcp__cell *b);

#endif
