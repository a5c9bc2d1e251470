/*
 * dcp/async.h - saves that go on while the caller computes.
 *
 *     dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
 *     dcp_op *op;
 *     dcp_stager_create(NULL, NULL, &opts.stager, &err);             // once
 *     dcp_save_async(NULL, "run/step-1000", state, &opts, &op, &err); // returns when the state may be changed
 *     ...                                                             // the next steps
 *     if (dcp_op_wait(op, 0, NULL, &err) != DCP_OK) { ... }           // before the next save, or at the end
 *     dcp_op_free(op);
 *     dcp_stager_free(opts.stager);
 *
 * dcp_save_async takes a snapshot of the state, tensors in host memory too, and hands it to a thread of its own. What the caller
 * waits for is a copy in memory. The copy lies in blocks of a stager, which keeps them from save to save.
 *
 * Threads: an operation may be looked at, waited for and canceled from any thread, but freed only when no other call uses it. A
 * stager may be used from several threads: saves wait for each other or are refused, as its options say.
 */
#ifndef DCP_ASYNC_H
#define DCP_ASYNC_H

#include "save.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- stagers ---- */

typedef enum dcp_pin_policy {
    DCP_PIN_NEVER = 0,
    DCP_PIN_PREFERRED = 1, /* memory that cannot be registered is used as it is; a warning tells once, with the driver's code */
    DCP_PIN_REQUIRED = 2   /* memory that cannot be registered fails the save */
} dcp_pin_policy;

typedef struct dcp_stager_opts {
    size_t struct_size;
    uint64_t cap_bytes;    /* most memory of all blocks; 0: what the state needs. A larger state is saved all the same: see
                              dcp_save_async. */
    bool is_shared;        /* blocks of shared memory, each with a file descriptor; otherwise private memory */
    dcp_pin_policy pin;    /* register the blocks with pin_device, so that copies from it need not wait */
    dcp_device pin_device; /* UNSUPPORTED from dcp_stager_create where its library is absent; with PREFERRED it goes without */
    size_t max_register_bytes; /* in one piece; 0: 64 GiB */
    bool helper; /* large payloads are written by a process of its own, dcp-writer: it moves ranges of the blocks, which
                    must be is_shared, to local files and does nothing else. It is started by the first save, serves all
                    of them, is replaced when it has died, and ends with the stager or this process. Where it is not
                    found: UNSUPPORTED from dcp_stager_create. */
    const char *helper_path; /* of dcp-writer; NULL: as the environment's DCP_WRITER says, else beside the library */
    bool refuse_busy;        /* a save while another one is under way is refused with STATE; otherwise it waits */
} dcp_stager_opts;

#define DCP_STAGER_OPTS_INIT DCP_INIT(dcp_stager_opts)

typedef struct dcp_stager dcp_stager;

/* Makes a stager without any memory. opts may be NULL. Errors: ARG, NOMEM, UNSUPPORTED, DEVICE. Local. */
DCP_API dcp_status dcp_stager_create(dcp_context *ctx, const dcp_stager_opts *opts, dcp_stager **out, dcp_error *err);
/* Takes the memory that a snapshot of this state needs (at most the cap) and touches it, so that the first save does not wait for
 * the kernel to give it. The state is not read. Errors: NOMEM, DEVICE, LIMIT, STATE (closed). Waits for a save under way. */
DCP_API dcp_status dcp_stager_reserve(dcp_stager *stager, dcp_value *state, dcp_error *err);
/* Waits for the save that is under way, and gives back all memory, registrations and descriptors. Saves after it are refused with
 * STATE. May be called again. */
DCP_API void dcp_stager_close(dcp_stager *stager);
/* Closes and frees it; operations need not be freed before. NULL is allowed. */
DCP_API void dcp_stager_free(dcp_stager *stager);

typedef struct dcp_stager_info {
    size_t struct_size;
    uint64_t mapped_bytes, used_bytes, pinned_bytes; /* of blocks */
    uint64_t peak_bytes;                             /* most that were mapped at a time */
    size_t n_blocks;
    size_t n_registered, n_unregistered, n_failed_unregister; /* blocks, since the stager was made */
    int64_t native_code; /* of the driver, for the first block that could not be registered; 0: none */
} dcp_stager_info;

#define DCP_STAGER_INFO_INIT DCP_INIT(dcp_stager_info)

/* What the stager holds now. Errors: ARG. */
DCP_API dcp_status dcp_stager_get_info(dcp_stager *stager, dcp_stager_info *info, dcp_error *err);

/* ---- saves ---- */

typedef struct dcp_async_opts {
    size_t struct_size;
    /* As for dcp_save; texts are copied. storage, comm, cache and failures are used until the operation is done, and progress is
     * called from its threads. With comm, which must have DCP_COMM_ANY_THREAD, the save works on a duplicate: the caller may go
     * on using his. The stager keeps the duplicate for the next save with the same comm, so comm must live as long as the stager.
     */
    dcp_save_opts save;
    dcp_stager *stager; /* borrowed until the operation is done; NULL: one for this save alone */
    bool stage_later;   /* also the snapshot is taken in the background: the state must not change before dcp_op_wait_staged, and
                           must not be freed by then */
    bool low_priority;  /* the save's threads run as batch work: lowest CPU priority, idle I/O class */
    uint64_t max_bytes_per_second; /* of tensor elements written; 0: no bound */
} dcp_async_opts;

#define DCP_ASYNC_OPTS_INIT DCP_INIT_WITH(dcp_async_opts, save, DCP_SAVE_OPTS_INIT)

/* A save under way. */
typedef struct dcp_op dcp_op;

/* Takes a snapshot and begins to save it; collective with opts->save.comm. When it returns, the state is the caller's again. If
 * the stager has not room for all of it, it returns once what has no room is written: the state is then never held twice. opts
 * may be NULL.
 *
 * It returns an error, and no operation, for faults of the call itself: ARG, STATE (stager closed, or busy and refusing),
 * UNSUPPORTED (comm without DCP_COMM_ANY_THREAD), NOMEM, and what dcp_comm_duplicate returns. With comm the ranks tell each other
 * by it whether they can start: if one cannot, PEER on all of them at once, with the rank and its cause. All that happens
 * afterwards, while staging too, is kept by the operation and returned by the waits, so that all ranks learn of it; other saves
 * with the stager are not affected. */
DCP_API dcp_status dcp_save_async(dcp_context *ctx, const char *path, dcp_value *state, const dcp_async_opts *opts, dcp_op **out,
                                  dcp_error *err);

/* Waits until the save is done, and returns its result, as often as it is asked; report may be NULL and is filled on success.
 * Errors: those of dcp_save; TIMEOUT (after timeout_ms, unless 0; the save goes on), ARG. */
DCP_API dcp_status dcp_op_wait(dcp_op *op, uint32_t timeout_ms, dcp_save_report *report, dcp_error *err);
/* Waits until the state may be changed; the result of staging alone. */
DCP_API dcp_status dcp_op_wait_staged(dcp_op *op, uint32_t timeout_ms, dcp_error *err);
/* True if the save is done, well or not. False for NULL. */
DCP_API bool dcp_op_poll(dcp_op *op);
/* Asks the save to stop. It ends with CANCELED (PEER with comm) unless it is committing already; the previous checkpoint stays.
 * Does not wait. NULL is allowed. */
DCP_API void dcp_op_cancel(dcp_op *op);

typedef enum dcp_phase {
    DCP_PHASE_STAGING = 0,
    DCP_PHASE_PLANNING = 1,
    DCP_PHASE_WRITING = 2,
    DCP_PHASE_COMMITTING = 3,
    DCP_PHASE_DONE = 4
} dcp_phase;

typedef struct dcp_op_progress {
    size_t struct_size;
    dcp_phase phase;
    uint64_t total_bytes;  /* of tensor elements that this process has to write; all that it holds, before that is known */
    uint64_t staged_bytes; /* copied; parts that are written without a copy do not count */
    uint64_t written_bytes;
    double stall_seconds;    /* that dcp_save_async took */
    double seconds;          /* since then, until the end */
    double bytes_per_second; /* written, since writing began */
    double seconds_left;     /* at this rate; -1: not known */
} dcp_op_progress;

#define DCP_OP_PROGRESS_INIT DCP_INIT(dcp_op_progress)

/* How far the save is; never waits for it. Errors: ARG. */
DCP_API dcp_status dcp_op_get_progress(dcp_op *op, dcp_op_progress *progress, dcp_error *err);
/* Waits until the save is done and frees the handle; its result, if nobody asked for it, is lost but for a warning. NULL is
 * allowed. */
DCP_API void dcp_op_free(dcp_op *op);

/* What low_priority does, for saves that a program makes in threads of its own: the calling thread, and those that it starts from
 * now on, run as batch work, with the lowest CPU priority and the idle I/O class. What the system refuses is done without. */
DCP_API void dcp_lower_priority(void);

#ifdef __cplusplus
}
#endif
#endif
