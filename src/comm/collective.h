/*
 * What saves and loads do together, made once out of the functions of a communicator.
 *
 * Each call ends in an agreement: every rank says whether it is well so far, and either all go on or all return PEER with the
 * same list of failing ranks. So a rank that has failed still calls, with its status in `mine` and the cause in *err:
 *
 *     dcp__step step = {ctx, comm, "write", failures};
 *     dcp_status status = write_my_files(..., err);
 *     status = dcp__agree(&step, status, err);        (one small all_gather if all are well)
 *
 * Outputs are written only if all ranks succeed. A rank that lacks the memory for what it is to receive is a failing rank. If the
 * communicator itself fails (TIMEOUT, STATE, IO, ..) its status comes back with the phase in front of the message, and ranks may
 * see different ones; a rank that had failed before keeps its own cause. All calls wait by the communicator's default deadline.
 */
#ifndef DCP_COMM_COLLECTIVE_H
#define DCP_COMM_COLLECTIVE_H

#include "base/buf.h"
#include "dcp/backend.h"

typedef struct dcp__step {
    dcp_context *ctx;       /* for the memory of what is received; not NULL */
    dcp_comm *comm;         /* NULL: a lone rank, whose failure comes back as it is instead of as PEER */
    const char *phase;      /* for messages: "plan", "write", "read"; at most 11 bytes. Equal on all ranks: STATE if not. */
    dcp_failures *failures; /* emptied, then filled with PEER; NULL: not wanted */
} dcp__step;

/* 0 and 1 for a step without a communicator. */
int dcp__step_rank(const dcp__step *step);
int dcp__step_size(const dcp__step *step);

/* The agreement alone. It is a barrier too. */
dcp_status dcp__agree(const dcp__step *step, dcp_status mine, dcp_error *err);
/* Also gives every rank's value to all: values has an entry for each rank; NULL: not wanted. */
dcp_status dcp__agree_u64(const dcp__step *step, dcp_status mine, uint64_t value, uint64_t *values, dcp_error *err);

/* Bytes of several ranks in one block: those of rank r are starts[r] to starts[r + 1] of data. */
typedef struct dcp__parts {
    dcp_context *ctx;
    uint8_t *data;
    size_t *starts; /* n + 1 entries */
    int n;          /* 0: empty */
} dcp__parts;

static inline const uint8_t *dcp__part(const dcp__parts *parts, int rank, size_t *bytes)
{
    *bytes = parts->starts[rank + 1] - parts->starts[rank];
    return parts->data + parts->starts[rank];
}
void dcp__parts_free(dcp__parts *parts);

/* Brings the bytes of every rank to root. *out is empty on the others. */
dcp_status dcp__gather(const dcp__step *step, dcp_status mine, int root, const void *bytes, size_t n, dcp__parts *out,
                       dcp_error *err);
/* Brings what is in `io` of root into the (empty) `io` of all others. */
dcp_status dcp__broadcast(const dcp__step *step, dcp_status mine, int root, dcp__buf *io, dcp_error *err);
/* Sends send[r] to each rank r, of sizes that the receivers do not know. send may be NULL: nothing to anybody. */
dcp_status dcp__exchange(const dcp__step *step, dcp_status mine, const dcp_comm_send *send, dcp__parts *out, dcp_error *err);

#endif
