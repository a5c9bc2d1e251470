/* The plan of a read.
 *
 * requests -> pieces (a request's overlap with one chunk) -> units (all pieces of one chunk), sorted by file and offset -> steps:
 * neighbouring small units are read together as one window, a large one is located first and then read in parts. */
#ifndef DCP_ENGINE_READ_PLAN_H
#define DCP_ENGINE_READ_PLAN_H

#include "device/transfer.h"
#include "engine/read/checkpoint.h"

typedef struct dcp__piece {
    const dcp_read_request *request;
    const dcp__entry *entry;
    const dcp__chunk *chunk;
    const int64_t *in_wanted, *in_chunk, *sizes; /* ndim each */
    uint64_t bytes;
} dcp__piece;

typedef struct dcp__unit {
    size_t first, n; /* pieces */
    const dcp__storage *storage;
} dcp__unit;

typedef struct dcp__read_step {
    size_t first, n; /* units; one if it is large */
    uint64_t lo, hi; /* a window's bytes in the file */
    bool is_window;
} dcp__read_step;

typedef struct dcp__read_plan {
    dcp_checkpoint *ck;
    dcp__arena arena; /* the pieces' boxes */
    dcp__piece *pieces;
    size_t n_pieces, cap_pieces;
    dcp__unit *units;
    size_t n_units;
    dcp__read_step *steps;
    size_t n_steps;
    bool *compared;          /* of torch.save files, [storage of the archive]: whose CRC is looked at already; NULL: none is */
    uint64_t bytes;          /* wanted in all */
    dcp__transfer *transfer; /* to targets on devices; NULL: there are none. Borrowed. */
} dcp__read_plan;

/* Checks the requests and plans them. The requests stay borrowed. Free the plan in every case. */
dcp_status dcp__plan_read(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, dcp__read_plan *plan, dcp_error *err);
/* The same for pieces that are known already, whose boxes stay borrowed too. Nothing is checked but that they have a place. */
dcp_status dcp__plan_pieces(dcp_checkpoint *ck, const dcp__piece *pieces, size_t n, dcp__read_plan *plan, dcp_error *err);
void dcp__read_plan_reset(dcp__read_plan *plan);
/* Plans pieces and reads them. */
dcp_status dcp__read_pieces(dcp_checkpoint *ck, const dcp__piece *pieces, size_t n, const dcp_read_opts *opts, dcp_error *err);

/* ---- reading pieces, for the two ways of reading a step ---- */

#define DCP__WINDOW_BYTES ((uint64_t)4 << 20)

/* Whether a record is read whole, in a window with others. */
bool dcp__is_small(const dcp__storage *s);

/* Reads the indexes [from, to) of dimension dim of a piece (dim -1: all of it). */
dcp_status dcp__read_piece(const dcp__read_plan *plan, const dcp__piece *p, const dcp__source *src, const dcp__payload *payload,
                           int dim, int64_t from, int64_t to, dcp__tile_buf *buf, dcp_error *err);
/* Whether a piece of it is all of the chunk. */
bool dcp__reads_whole_chunk(const dcp__read_plan *plan, const dcp__unit *u);
/* Checks the CRC of a payload if that was asked for and a piece needs all of it; of a storage with several views once. */
dcp_status dcp__check_unit_crc(const dcp__read_plan *plan, const dcp__unit *u, const dcp__source *src, const dcp__payload *p,
                               dcp_error *err);
/* Reads a window and all units in it. */
dcp_status dcp__read_window(const dcp__read_plan *plan, const dcp__read_step *s, dcp__tile_buf *window, dcp__tile_buf *tile,
                            dcp_error *err);

#endif
