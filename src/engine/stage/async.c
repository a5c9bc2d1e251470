/* Saves in the background: submitting, the thread, waiting. */
#include "dcp/async.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/collective.h"
#include "engine/save/session.h"
#include "engine/stage/async_op.h"

/* ---- time ---- */

static struct timespec at_time(double seconds)
{
    time_t whole = (time_t)seconds;
    return (struct timespec){whole, (long)((seconds - (double)whole) * 1e9)};
}

/* Waits for a change until a moment of dcp__now's clock. False: it has come. The lock is held. */
static bool wait_until(dcp_op *op, double deadline)
{
    struct timespec t = at_time(deadline);
    return pthread_cond_timedwait(&op->changed, &op->lock, &t) != ETIMEDOUT;
}

static void set_phase(dcp_op *op, dcp_phase phase)
{
    pthread_mutex_lock(&op->lock);
    op->phase = phase;
    if (phase == DCP_PHASE_WRITING) {
        op->write_started = dcp__now();
    }
    pthread_mutex_unlock(&op->lock);
}

/* ---- progress, bandwidth and cancellation: all by the save's own progress function ---- */

static bool is_canceled(const dcp_op *op)
{
    return __atomic_load_n(&op->is_canceled, __ATOMIC_RELAXED) != 0;
}

/* Waits until so many bytes may have been written. */
static void keep_to_rate(dcp_op *op, uint64_t done)
{
    if (op->opts.max_bytes_per_second) {
        pthread_mutex_lock(&op->lock);
        double due = op->write_started + (double)done / (double)op->opts.max_bytes_per_second;
        while (!is_canceled(op) && dcp__now() < due && wait_until(op, due)) {
        }
        pthread_mutex_unlock(&op->lock);
    }
}

static bool note_progress(void *user, uint64_t done, uint64_t total)
{
    dcp_op *op = user;
    __atomic_store_n(&op->total_bytes, total, __ATOMIC_RELAXED);
    __atomic_store_n(&op->written_bytes, done, __ATOMIC_RELAXED);
    keep_to_rate(op, done);
    bool goes_on = !op->progress || op->progress(op->progress_user, done, total);
    return goes_on && !is_canceled(op);
}

/* ---- the thread ---- */

/* Threads that are started from this one inherit all of it. */
void dcp_lower_priority(void)
{
    enum { IOPRIO_WHO_PROCESS = 1, IOPRIO_CLASS_IDLE = 3, IOPRIO_CLASS_SHIFT = 13 };
    const struct sched_param none = {0};
    sched_setscheduler(0, SCHED_BATCH, &none);
    setpriority(PRIO_PROCESS, 0, 19); /* of the thread, on Linux */
    syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_CLASS_IDLE << IOPRIO_CLASS_SHIFT);
}

static dcp_status write_and_commit(dcp_op *op, dcp_save_session *session, dcp_error *err)
{
    if (op->stager->mover) {
        session->mover = op->stager->mover;
    }
    dcp_status status = dcp_plan_save_global(session, op->plan, err);
    if (status == DCP_OK) {
        set_phase(op, DCP_PHASE_WRITING);
        dcp__op_begin_writing(op, session);
        status = dcp_save_write(session, op->plan, err);
    }
    dcp__op_end_writing(op);
    if (status != DCP_OK) {
        dcp_save_abort(session);
        return status;
    }
    set_phase(op, DCP_PHASE_COMMITTING);
    return dcp_save_commit(session, &op->report, err);
}

/* A rank that could not stage goes on to where all of them learn of it. */
static dcp_status save_snapshot(dcp_op *op, dcp_status staged, dcp_error *err)
{
    dcp_save_session *session;
    set_phase(op, DCP_PHASE_PLANNING);
    if (staged == DCP_OK && is_canceled(op)) {
        staged = dcp__fail(err, DCP_CANCELED, "stopped by the caller");
    }
    dcp_status status = dcp__save_begin(op->ctx, op->path, &op->opts.save, staged, &session, err);
    return status == DCP_OK ? write_and_commit(op, session, err) : status;
}

static void keep_staging_result(dcp_op *op, dcp_status status, const dcp_error *err)
{
    pthread_mutex_lock(&op->lock);
    op->staged_status = status;
    op->staged_err = *err;
    if (status != DCP_OK || (op->n_heads_left == 0 && !op->waits_for_all)) {
        op->is_staged = true;
        pthread_cond_broadcast(&op->changed);
    }
    pthread_mutex_unlock(&op->lock);
}

/* The memory goes back before anybody learns that the save is done. */
static void finish(dcp_op *op, dcp_status status, const dcp_error *err)
{
    dcp__op_end_writing(op);
    dcp__op_unstage(op);
    dcp__stager_leave(op->stager);
    if (op->owns_stager) {
        dcp_stager_free(op->stager);
    }
    op->stager = NULL;
    pthread_mutex_lock(&op->lock);
    op->status = dcp__settle_save(op->ctx, &op->opts.save, status, err, &op->report);
    op->err = *err;
    op->phase = DCP_PHASE_DONE;
    op->end = dcp__now();
    op->is_done = true;
    pthread_cond_broadcast(&op->changed);
    pthread_mutex_unlock(&op->lock);
}

static void *run(void *arg)
{
    dcp_op *op = arg;
    dcp_error err = DCP_ERROR_INIT;
    if (op->opts.low_priority && op->has_thread) {
        dcp_lower_priority();
    }
    dcp_status status = op->staged_status;
    if (status == DCP_OK && op->opts.stage_later) {
        status = dcp__op_stage(op, &err);
        keep_staging_result(op, status, &err);
    } else {
        err = op->staged_err;
    }
    status = save_snapshot(op, status, &err);
    finish(op, status, &err);
    return NULL;
}

/* ---- submitting ---- */

/* Faults for which there is no communicator to speak of them with, or that are the same on all ranks. */
static dcp_status check_opts(const dcp_async_opts *opts, dcp_error *err)
{
    if (opts && opts->struct_size != sizeof *opts) {
        return dcp__fail(err, DCP_ARG, "async options: struct_size %zu, expected %zu", opts->struct_size, sizeof *opts);
    }
    if (opts && opts->save.struct_size != sizeof opts->save) {
        return dcp__fail(err, DCP_ARG, "save options: struct_size %zu, expected %zu", opts->save.struct_size, sizeof opts->save);
    }
    if (opts && opts->save.comm && !(opts->save.comm->caps & DCP_COMM_ANY_THREAD)) {
        return dcp__fail(err, DCP_UNSUPPORTED, "communicator %s cannot be used from a thread of the save's own",
                         opts->save.comm->ops->name);
    }
    return DCP_OK;
}

static dcp_status check(const char *path, dcp_op **out, dcp_error *err)
{
    return path && out ? DCP_OK : dcp__fail(err, DCP_ARG, "save: no %s", path ? "place for the operation" : "path");
}

static dcp_status copy_text(dcp_context *ctx, const char **text, dcp_error *err)
{
    if (*text) {
        *text = dcp__strndup(ctx, *text, strlen(*text));
        return *text ? DCP_OK : dcp__nomem(err);
    }
    return DCP_OK;
}

/* The texts of an operation, all owned: those that were not copied yet are NULL. */
static dcp_status copy_opts(dcp_op *op, const dcp_async_opts *given, dcp_error *err)
{
    dcp_save_opts *o = &op->opts.save;
    if (given) {
        op->opts = *given;
    }
    const char *texts[] = {o->transform, o->save_id, o->checkpoint_id};
    o->transform = o->save_id = o->checkpoint_id = NULL;
    op->progress = o->progress;
    op->progress_user = o->user;
    o->progress = note_progress;
    o->user = op;
    o->lending = NULL;
    if (o->failed) {
        op->failed = *o->failed;
        o->failed = &op->failed;
    }
    const char **places[] = {&o->transform, &o->save_id, &o->checkpoint_id};
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0] && status == DCP_OK; i++) {
        status = copy_text(op->ctx, &texts[i], err);
        *places[i] = status == DCP_OK ? texts[i] : NULL;
    }
    return status;
}

static void free_op(dcp_op *op)
{
    dcp_context *ctx = op->ctx;
    dcp__free(ctx, (char *)op->opts.save.transform);
    dcp__free(ctx, (char *)op->opts.save.save_id);
    dcp__free(ctx, (char *)op->opts.save.checkpoint_id);
    dcp__free(ctx, op->path);
    dcp__free(ctx, op->ranks);
    pthread_cond_destroy(&op->changed);
    pthread_mutex_destroy(&op->lock);
    dcp__free(ctx, op);
}

static dcp_status make_report(dcp_op *op, dcp_error *err)
{
    size_t n = op->opts.save.comm ? (size_t)op->opts.save.comm->size : 1;
    op->report = (dcp_save_report)DCP_SAVE_REPORT_INIT;
    op->ranks = dcp__calloc(op->ctx, n, sizeof *op->ranks);
    op->report.ranks = op->ranks;
    op->report.n_ranks = n;
    return op->ranks ? DCP_OK : dcp__nomem(err);
}

static dcp_status make_op(dcp_context *ctx, const char *path, const dcp_async_opts *opts, dcp_op **out, dcp_error *err)
{
    pthread_condattr_t clock;
    dcp_op *op = dcp__calloc(ctx, 1, sizeof *op);
    if (!op) {
        return dcp__nomem(err);
    }
    op->ctx = ctx;
    op->opts = (dcp_async_opts)DCP_ASYNC_OPTS_INIT;
    op->staged_err = op->err = (dcp_error)DCP_ERROR_INIT;
    op->start = dcp__now();
    pthread_mutex_init(&op->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* dcp__now's */
    pthread_cond_init(&op->changed, &clock);
    pthread_condattr_destroy(&clock);
    dcp_status status = copy_opts(op, opts, err);
    status = status == DCP_OK ? make_report(op, err) : status;
    op->path = status == DCP_OK ? dcp__strndup(ctx, path, strlen(path)) : NULL;
    status = status == DCP_OK && !op->path ? dcp__nomem(err) : status;
    if (status != DCP_OK) {
        free_op(op);
        return status;
    }
    *out = op;
    return DCP_OK;
}

/* Has the stager to itself from here on. */
static dcp_status enter_stager(dcp_op *op, dcp_error *err)
{
    op->stager = op->opts.stager;
    if (!op->stager) {
        dcp_status status = dcp_stager_create(op->ctx, NULL, &op->stager, err);
        if (status != DCP_OK) {
            return status;
        }
        op->owns_stager = true;
    }
    return dcp__stager_enter(op->stager, err);
}

/* A rank that cannot start would leave the others waiting in the save's first exchange. So all of them say in the caller's thread
 * whether they can, by the caller's communicator: the save's own may be in use by the save before, and a rank with another stager
 * than last time has none yet. */
static dcp_status agree_to_start(dcp_op *op, const dcp__step *step, dcp_status mine, dcp_error *err)
{
    size_t size = (size_t)dcp__step_size(step);
    if (!step->comm) {
        return mine;
    }
    uint64_t *have = mine == DCP_OK ? dcp__alloc(step->ctx, size * sizeof *have) : NULL;
    mine = mine == DCP_OK && !have ? dcp__nomem(err) : mine;
    bool has_comm = mine == DCP_OK && op->stager->comm == step->comm;
    dcp_status status = dcp__agree_u64(step, mine, has_comm, have, err);
    for (size_t r = 0; r < size && status == DCP_OK; r++) {
        has_comm &= have[r] != 0;
    }
    dcp__free(step->ctx, have);
    return status == DCP_OK ? dcp__stager_duplicate(op->stager, step->comm, has_comm, &op->opts.save.comm, err) : status;
}

/* Of an operation that does not start. op may be NULL. */
static void drop_op(dcp_op *op, bool has_turn)
{
    if (!op) {
        return;
    }
    if (has_turn) {
        dcp__stager_leave(op->stager);
    }
    if (op->owns_stager) {
        dcp_stager_free(op->stager);
    }
    free_op(op);
}

static void stage_now(dcp_op *op, dcp_value *state)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = op->opts.save.failed ? dcp__fail_as(&err, &op->failed) : dcp__op_look(op, state, &err);
    if (status == DCP_OK && !op->opts.stage_later) {
        status = dcp__op_stage(op, &err);
    }
    if (status != DCP_OK || !op->opts.stage_later) {
        keep_staging_result(op, status, &err);
    }
}

/* Without a thread to be had the save is done here and now, which is late but right. */
static void start(dcp_op *op)
{
    op->has_thread = true;
    int code = pthread_create(&op->thread, NULL, run, op);
    if (code != 0) {
        op->has_thread = false;
        dcp__log(op->ctx, DCP_LOG_WARNING, "%s: saved in the caller's thread, since no other can be started: %s", op->path,
                 strerror(code));
        run(op);
    }
}

dcp_status dcp_save_async(dcp_context *ctx, const char *path, dcp_value *state, const dcp_async_opts *opts, dcp_op **out,
                          dcp_error *err)
{
    dcp_op *op = NULL;
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    ctx = dcp__context(ctx);
    dcp_status status = check_opts(opts, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp_comm *comm = opts ? opts->save.comm : NULL;
    status = check(path, out, err);
    status = status == DCP_OK ? make_op(ctx, path, opts, &op, err) : status;
    status = status == DCP_OK ? enter_stager(op, err) : status;
    bool has_turn = status == DCP_OK;
    status = agree_to_start(op, &(dcp__step){ctx, comm, "start", comm ? opts->save.failures : NULL}, status, err);
    if (status != DCP_OK) {
        drop_op(op, has_turn);
        return status;
    }
    stage_now(op, state);
    start(op);
    if (!op->opts.stage_later) {
        dcp_op_wait_staged(op, 0, NULL);
    }
    pthread_mutex_lock(&op->lock);
    op->stall_seconds = dcp__now() - op->start;
    pthread_mutex_unlock(&op->lock);
    *out = op;
    return DCP_OK;
}

/* ---- waiting ---- */

/* Waits for *flag, which the lock guards; the lock is held. */
static dcp_status wait_for(dcp_op *op, const bool *flag, uint32_t timeout_ms, dcp_error *err)
{
    double deadline = dcp__now() + timeout_ms * 1e-3;
    while (!*flag) {
        if (timeout_ms == 0) {
            pthread_cond_wait(&op->changed, &op->lock);
        } else if (!wait_until(op, deadline) && !*flag) {
            return dcp__fail(err, DCP_TIMEOUT, "%s: not done after %u ms", op->path, timeout_ms);
        }
    }
    return DCP_OK;
}

static dcp_status deliver(dcp_status status, const dcp_error *kept, dcp_error *err)
{
    if (status != DCP_OK && err) {
        *err = *kept;
    }
    return status;
}

dcp_status dcp_op_wait_staged(dcp_op *op, uint32_t timeout_ms, dcp_error *err)
{
    if (!op) {
        return dcp__fail(err, DCP_ARG, "wait: no operation");
    }
    pthread_mutex_lock(&op->lock);
    dcp_status status = wait_for(op, &op->is_staged, timeout_ms, err);
    status = status == DCP_OK ? deliver(op->staged_status, &op->staged_err, err) : status;
    pthread_mutex_unlock(&op->lock);
    return status;
}

/* The caller's room for the reports of ranks stays his. */
static void copy_report(const dcp_op *op, dcp_save_report *out)
{
    dcp_rank_report *ranks = out->ranks;
    size_t n = ranks ? out->n_ranks : 0;
    n = n < op->report.n_ranks ? n : op->report.n_ranks;
    *out = op->report;
    out->ranks = ranks;
    out->n_ranks = n;
    if (n) {
        memcpy(ranks, op->ranks, n * sizeof *ranks);
    }
}

dcp_status dcp_op_wait(dcp_op *op, uint32_t timeout_ms, dcp_save_report *report, dcp_error *err)
{
    if (!op) {
        return dcp__fail(err, DCP_ARG, "wait: no operation");
    }
    dcp_status status = dcp__check_save_report(report, err);
    if (status != DCP_OK) {
        return status;
    }
    pthread_mutex_lock(&op->lock);
    status = wait_for(op, &op->is_done, timeout_ms, err);
    if (status == DCP_OK) {
        op->was_asked = true;
        status = deliver(op->status, &op->err, err);
        if (status == DCP_OK && report) {
            copy_report(op, report);
        }
    }
    pthread_mutex_unlock(&op->lock);
    return status;
}

bool dcp_op_poll(dcp_op *op)
{
    if (!op) {
        return false;
    }
    pthread_mutex_lock(&op->lock);
    bool is_done = op->is_done;
    pthread_mutex_unlock(&op->lock);
    return is_done;
}

void dcp_op_cancel(dcp_op *op)
{
    if (op) {
        __atomic_store_n(&op->is_canceled, 1, __ATOMIC_RELAXED);
        pthread_mutex_lock(&op->lock);
        pthread_cond_broadcast(&op->changed); /* what sleeps to keep to a rate */
        pthread_mutex_unlock(&op->lock);
    }
}

dcp_status dcp_op_get_progress(dcp_op *op, dcp_op_progress *p, dcp_error *err)
{
    if (!op || !p || p->struct_size != sizeof *p) {
        return dcp__fail(err, DCP_ARG, "progress: no %s", !op ? "operation" : "place for it of this version");
    }
    pthread_mutex_lock(&op->lock);
    double now = op->is_done ? op->end : dcp__now(), writing = op->write_started > 0 ? now - op->write_started : 0;
    uint64_t total = __atomic_load_n(&op->total_bytes, __ATOMIC_RELAXED);
    uint64_t written = __atomic_load_n(&op->written_bytes, __ATOMIC_RELAXED);
    double rate = writing > 0 ? (double)written / writing : 0;
    *p = (dcp_op_progress){.struct_size = sizeof *p,
                           .phase = op->phase,
                           .total_bytes = total,
                           .staged_bytes = __atomic_load_n(&op->staged_bytes, __ATOMIC_RELAXED),
                           .written_bytes = written,
                           .stall_seconds = op->stall_seconds,
                           .seconds = now - op->start,
                           .bytes_per_second = rate,
                           .seconds_left = op->is_done ? 0
                                           : rate > 0  ? (double)(total - written) / rate
                                                       : -1};
    pthread_mutex_unlock(&op->lock);
    return DCP_OK;
}

void dcp_op_free(dcp_op *op)
{
    if (!op) {
        return;
    }
    if (op->has_thread) {
        pthread_join(op->thread, NULL);
    }
    if (op->status != DCP_OK && !op->was_asked) {
        dcp__log(op->ctx, DCP_LOG_WARNING, "a save has failed that nobody waited for: %s", op->err.message);
    }
    free_op(op);
}
