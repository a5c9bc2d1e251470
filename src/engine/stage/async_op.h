/* A save under way: what its caller's calls and its thread share. */
#ifndef DCP_ENGINE_ASYNC_OP_H
#define DCP_ENGINE_ASYNC_OP_H

#include <pthread.h>

#include "dcp/async.h"
#include "engine/save/device_source.h"
#include "engine/stage/stage.h"
#include "engine/stage/stager.h"
#include "plan/save_plan.h"

/* A tensor that the stager has no room for. It is written out of the caller's memory while the caller waits. */
typedef struct dcp__head {
    dcp_op *op;
    dcp_write_item item; /* as it was */
    dcp__device_source device;
    struct dcp__head *next_tied; /* a ring of those that may share a record: of one tie */
    bool is_done;                /* guarded by the operation's lock */
} dcp__head;

struct dcp_op {
    dcp_context *ctx;
    char *path;
    dcp_async_opts opts;                                                     /* texts are owned copies; progress is ours */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes); /* the caller's */
    void *progress_user;
    dcp_error failed; /* of opts */
    dcp_stager *stager;
    bool owns_stager;
    dcp_value *original; /* until it is staged */
    dcp__snapshot snapshot;
    dcp__transfer *transfer; /* of staging */
    dcp_save_plan *plan;
    dcp__head *heads;
    size_t n_heads;
    bool waits_for_all; /* something unstaged can only be followed by the end of the writing */
    pthread_t thread;
    bool has_thread;
    double start;

    uint64_t total_bytes, staged_bytes, written_bytes; /* by atomic operations */
    uint32_t is_canceled;

    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    dcp_phase phase;
    bool is_writing; /* what heads are read for now is written */
    size_t n_heads_left;
    bool is_staged, is_done, was_asked;
    double stall_seconds, write_started, end;
    dcp_status staged_status, status;
    dcp_error staged_err, err;
    dcp_save_report report;
    dcp_rank_report *ranks; /* [rank], of report */
};

/* ---- async_stage.c ---- */

/* What must be done in the caller's thread, before the rest of the staging may go on elsewhere. */
dcp_status dcp__op_look(dcp_op *op, dcp_value *state, dcp_error *err);
/* Copies, and makes the plan. */
dcp_status dcp__op_stage(dcp_op *op, dcp_error *err);
/* The plan of all ranks is made: heads that this rank does not write are done. */
void dcp__op_begin_writing(dcp_op *op, const dcp_save_session *session);
/* Everything that was read out of the caller's memory has been; also after a failure. */
void dcp__op_end_writing(dcp_op *op);
/* Frees what staging took; blocks go back to the stager. */
void dcp__op_unstage(dcp_op *op);

#endif
