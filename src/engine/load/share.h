/* Reading once what several ranks of a load want: one of them reads it and sends it to the others.
 *
 * All of them cut what they want along the same grid (share_cells.h), learn who else wants each cell and which of them reads it
 * (share_owner.h), and then go through rounds, in each of which a rank sends some of its cells to one set of ranks, while it
 * reads the next ones and what it alone wants. */
#ifndef DCP_ENGINE_SHARE_H
#define DCP_ENGINE_SHARE_H

#include "engine/load/share_owner.h"

#define DCP__MOST_SENDERS 64 /* in a round; more would take much memory for what comes in */

typedef struct dcp__share {
    dcp_checkpoint *ck;
    int rank, world;
    dcp__read_plan reads; /* all that this rank wants */
    dcp__cells cells;
    dcp__cells records; /* the shared ones, cut */
    dcp__rank_sets sets;
    uint64_t bundle_bytes, cell_bytes; /* at most that many are sent in a round, and are in a cell */
    dcp__cell **outgoing;              /* that this rank reads, in the order in which it sends them */
    size_t n_outgoing;
    dcp__cell **incoming; /* of others, sender by sender, in that order */
    size_t n_incoming;
    size_t *first_incoming; /* [world + 1] */
    dcp__piece *alone;      /* what this rank reads for itself */
    size_t n_alone;
} dcp__share;

/* Collective. mine and *err: why this rank does not even want anything. wanted: false on any rank, nothing is shared. Free it in
 * every case. Errors: PEER, and those of dcp_read_many inside it. */
dcp_status dcp__share_plan(const dcp__step *step, dcp_checkpoint *ck, dcp_status mine, const dcp_read_request *requests, size_t n,
                           bool wanted, dcp__share *out, dcp_error *err);
void dcp__share_reset(dcp__share *s);

/* From the storage, and from other ranks. */
typedef struct dcp__share_bytes {
    uint64_t read, received;
} dcp__share_bytes;

/* Collective. Reads all that was planned. A failure of any rank ends it on all of them. */
dcp_status dcp__share_read(const dcp__step *step, dcp__share *s, const dcp_read_opts *opts, dcp__share_bytes *out,
                           dcp_error *err);

#endif
