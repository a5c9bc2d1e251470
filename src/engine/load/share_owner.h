/* Who reads what several ranks want. Chunks have owners among the ranks; all tell the owner which cells of it they want, and the
 * owner answers each of them. Pure: bytes in, bytes out.
 *
 * A wish: for each cell, in the order of dcp__cell_compare: distance from the entry before; chunk of the entry; box within it.
 * An answer: for each cell of the wish, in its order: 0 if nobody else wants it; else 1 + the number of the set of ranks that do,
 * counted from 0 in the order in which they are first mentioned; if this is the first time, the number of its ranks and each
 * one's distance from the one before; then the position in the set of the one that reads it. */
#ifndef DCP_ENGINE_SHARE_OWNER_H
#define DCP_ENGINE_SHARE_OWNER_H

#include "comm/collective.h"
#include "engine/load/share_cells.h"
#include "plan/global_plan.h"

/* Chunks are dealt to the ranks in runs. */
uint32_t dcp__share_owner(const dcp__metadata *m, const dcp__chunk *c, int world);

/* Cells in the order of owners, and of dcp__cell_compare for each. Errors: NOMEM. */
dcp_status dcp__share_wish(dcp_context *ctx, const dcp__metadata *m, const dcp__cell *cells, size_t n, int world, dcp__mail *out,
                           dcp_error *err);
/* The owner's part: of each set of ranks, each one reads an equal part of the bytes, in one run of the order in which they lie in
 * the files. Errors: FORMAT, NOMEM. */
dcp_status dcp__share_answer(dcp_context *ctx, const dcp__metadata *m, int rank, const dcp__parts *wishes, dcp__mail *out,
                             dcp_error *err);

/* Sets of ranks, each once. */
typedef struct dcp__rank_sets {
    dcp_context *ctx;
    dcp__arena arena;
    dcp__rank_set *sets;
    size_t n, cap;
    dcp__strmap by_ranks;
} dcp__rank_sets;

void dcp__rank_sets_init(dcp__rank_sets *s, dcp_context *ctx);
void dcp__rank_sets_reset(dcp__rank_sets *s);
/* ranks are copied. Errors: NOMEM. */
dcp_status dcp__rank_sets_add(dcp__rank_sets *s, const uint32_t *ranks, size_t n, uint32_t *out, dcp_error *err);

/* Takes an owner's answer to the wish of these cells: fills in set and reader. Errors: FORMAT, NOMEM. */
dcp_status dcp__share_accept(dcp__rank_sets *sets, int world, int rank, int owner, const void *bytes, size_t len,
                             dcp__cell *cells, size_t n, dcp_error *err);

#endif
