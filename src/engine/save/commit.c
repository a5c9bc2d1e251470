/* Publishing a save. The metadata file is the mark: before its rename the old checkpoint holds, after it the new one. Only then
 * is removed what nobody names any more. */
#include <stdio.h>
#include <string.h>

#include "engine/save/session.h"

static const char final_name[] = ".metadata", temporary_name[] = ".metadata.tmp";

/* ---- publishing ---- */

typedef enum outcome {
    UNPUBLISHED, /* the old checkpoint holds; this save can be taken back */
    PUBLISHED,   /* the new one holds */
    UNCERTAIN    /* one of them holds, so that the files of both must stay */
} outcome;

/* Writes a metadata file from its start and makes it durable. What stood there before is emptied durably first where it is not
 * known to be gone: a crash then leaves no mixture. */
static dcp_status write_metadata(dcp_save_session *s, const char *name, const dcp__buf *bytes, bool empty_first, dcp_error *err)
{
    dcp_file *f;
    dcp_status status = dcp__session_open(s, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE, &f, err);
    if (status != DCP_OK) {
        return status;
    }
    status = empty_first ? dcp__session_sync(s, f, err) : DCP_OK;
    status = status == DCP_OK ? s->storage->ops->write_at(f, bytes->data, bytes->len, 0, err) : status;
    status = status == DCP_OK ? dcp__session_sync(s, f, err) : status;
    dcp_status closed = s->storage->ops->close(f, status == DCP_OK ? err : NULL);
    return status == DCP_OK ? closed : status;
}

static dcp_status read_metadata(dcp_save_session *s, const char *name, dcp__buf *bytes, dcp_error *err)
{
    dcp_file *f;
    dcp_stat st;
    size_t got = 0;
    dcp_status status = dcp__session_stat(s, name, &st, err);
    status = status == DCP_OK ? dcp__session_open(s, name, DCP_OPEN_READ, &f, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    if (!dcp__buf_reserve(bytes, (size_t)st.bytes)) {
        status = dcp__nomem(err);
    } else {
        status = s->storage->ops->read_at(f, bytes->data, (size_t)st.bytes, 0, &got, err);
        bytes->len = status == DCP_OK ? got : 0;
    }
    s->storage->ops->close(f, NULL);
    return status;
}

dcp_status dcp__session_repair(dcp_save_session *s, dcp_error *err)
{
    dcp__buf bytes;
    dcp__buf_init(&bytes, s->ctx);
    dcp_status status = read_metadata(s, temporary_name, &bytes, err);
    status = status == DCP_OK ? write_metadata(s, final_name, &bytes, true, err) : status;
    dcp__buf_reset(&bytes);
    return status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
}

/* A rename that reports a failure may have happened all the same, as on NFS when the answer is lost: the temporary file tells. */
static dcp_status publish_by_rename(dcp_save_session *s, outcome *out, bool *is_refused, dcp_error *err)
{
    dcp_stat st;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = write_metadata(s, temporary_name, &s->metadata, false, err);
    if (status != DCP_OK) {
        dcp__session_remove(s, temporary_name, NULL);
        return status;
    }
    status = dcp__session_rename(s, temporary_name, final_name, &fault);
    *is_refused = status == DCP_UNSUPPORTED;
    if (status == DCP_OK) {
        *out = PUBLISHED;
    } else if (*is_refused) {
        status = DCP_OK;
    } else {
        *out = dcp__session_stat(s, temporary_name, &st, NULL) == DCP_OK ? UNPUBLISHED : UNCERTAIN;
        if (*out == UNPUBLISHED) {
            dcp__session_remove(s, temporary_name, NULL);
        }
        if (err) {
            *err = fault;
        }
    }
    return status;
}

/* Takes a failed attempt back: the bytes that were there, or none. */
static dcp_status restore_metadata(dcp_save_session *s, const dcp__buf *old, bool was_there)
{
    if (was_there) {
        return write_metadata(s, final_name, old, true, NULL);
    }
    dcp_status status = dcp__session_remove(s, final_name, NULL);
    return status == DCP_NOT_FOUND ? DCP_OK : status;
}

/* Without rename. Where there is a checkpoint, its metadata is written over, or hidden if it is rank-local; until that is done
 * the whole of the new one stands in the temporary file, durably, for dcp_checkpoint_open to fall back on. */
static dcp_status publish_in_place(dcp_save_session *s, outcome *out, dcp_error *err)
{
    dcp__buf old;
    dcp_error fault = DCP_ERROR_INIT;
    s->report.degraded |= DCP_DEGRADED_RENAME;
    dcp__buf_init(&old, s->ctx);
    dcp_status status = read_metadata(s, final_name, &old, &fault);
    bool was_there = status == DCP_OK;
    if (status == DCP_NOT_FOUND) {
        status = DCP_OK;
    } else if (status != DCP_OK && err) {
        *err = fault;
    }
    if (status == DCP_OK && s->replaces) {
        status = write_metadata(s, temporary_name, &s->metadata, true, err);
        status = status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
    }
    if (status == DCP_OK) {
        status = write_metadata(s, final_name, &s->metadata, true, err);
        *out = status == DCP_OK ? PUBLISHED : restore_metadata(s, &old, was_there) == DCP_OK ? UNPUBLISHED : UNCERTAIN;
    }
    status = status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
    if (*out != UNCERTAIN) {
        dcp__session_remove(s, temporary_name, NULL);
    }
    dcp__buf_reset(&old);
    return status;
}

static dcp_status publish(dcp_save_session *s, outcome *out, dcp_error *err)
{
    bool is_refused = !s->storage->ops->rename || !(s->storage->ops->caps & DCP_STORAGE_RENAME);
    dcp_status status = dcp__session_sync_dir(s, err);
    if (status == DCP_OK && !is_refused) {
        status = publish_by_rename(s, out, &is_refused, err);
    }
    if (status == DCP_OK && is_refused) {
        status = publish_in_place(s, out, err);
    }
    if (*out == UNCERTAIN) {
        dcp__prefix(err, status, "which checkpoint holds is not certain, the files of both stay: ");
    }
    status = *out == PUBLISHED && status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
    if (*out == PUBLISHED && status != DCP_OK) {
        dcp__prefix(err, status, "the new checkpoint is complete, but not safe from a crash, the files of the old one stay: ");
    }
    return status;
}

/* ---- cleaning up ---- */

static bool is_created(const dcp_save_session *s, const char *name)
{
    for (size_t i = 0; i < s->created.n; i++) {
        if (strcmp(s->created.names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* Failures are told, not returned: the save itself has succeeded. True if nothing is left over. */
static bool remove_all(dcp_save_session *s, const dcp__names *list)
{
    bool is_clean = true;
    for (size_t i = 0; i < list->n; i++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = is_created(s, list->names[i]) ? DCP_OK : dcp__session_remove(s, list->names[i], &err);
        if (status != DCP_OK && status != DCP_NOT_FOUND) {
            dcp__log(s->ctx, DCP_LOG_WARNING, "%s: left over: %s", s->path, err.message);
            is_clean = false;
        }
    }
    return is_clean;
}

/* The intent goes when the removals are durable: after a crash it would be missed. */
static bool clean_up(dcp_save_session *s)
{
    bool is_clean = remove_all(s, &s->doomed);
    remove_all(s, &s->dead_intents); /* what they name is in this save's intent too */
    return is_clean && (s->doomed.n == 0 || dcp__session_sync_dir(s, NULL) == DCP_OK);
}

/* ---- one rank for itself ---- */

/* `__<rank>.metadata`, which was not there: nothing is replaced, and nothing has to be taken back but the file itself. */
static dcp_status publish_rank(dcp_save_session *s, outcome *out, dcp_error *err)
{
    char name[40], temporary[48];
    snprintf(name, sizeof name, "__%d.metadata", s->rank);
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    bool renames = s->storage->ops->rename && (s->storage->ops->caps & DCP_STORAGE_RENAME);
    dcp_status status = dcp__session_sync_dir(s, err);
    status = status == DCP_OK ? write_metadata(s, renames ? temporary : name, &s->metadata, false, err) : status;
    if (status == DCP_OK && renames) {
        status = dcp__session_rename(s, temporary, name, err);
    }
    if (status != DCP_OK) {
        dcp__session_remove(s, renames ? temporary : name, NULL);
        return status;
    }
    s->report.degraded |= renames ? 0 : DCP_DEGRADED_RENAME;
    *out = PUBLISHED;
    return dcp__session_sync_dir(s, err);
}

/* ---- the reports of all ranks ---- */

static dcp_rank_report own_report(const dcp_save_session *s)
{
    return (dcp_rank_report){s->report.plan_seconds, s->report.write_seconds, s->report.sync_seconds, s->report.bytes};
}

static double seconds_of(const dcp_rank_report *r)
{
    return r->plan_seconds + r->write_seconds + r->sync_seconds;
}

/* The save stands already: without these figures it stands as well. */
static void gather_reports(dcp_save_session *s, dcp_rank_report *ranks, size_t n)
{
    int world = dcp__step_size(&s->step);
    dcp_rank_report mine = own_report(s);
    dcp_rank_report *all = dcp__alloc(s->ctx, (size_t)world * sizeof *all);
    dcp_status status = dcp__agree(&s->step, all ? DCP_OK : DCP_NOMEM, NULL);
    if (status == DCP_OK && s->step.comm) {
        status = dcp_comm_all_gather(s->step.comm, &mine, sizeof mine, all, 0, NULL);
    } else if (all) {
        all[0] = mine;
    }
    for (int r = 0; status == DCP_OK && r < world; r++) {
        s->report.slowest_rank = seconds_of(&all[r]) > seconds_of(&all[s->report.slowest_rank]) ? r : s->report.slowest_rank;
        if ((size_t)r < n) {
            ranks[r] = all[r];
        }
    }
    dcp__free(s->ctx, all);
}

/* ---- the step ---- */

/* Collective. What became of the checkpoint, as the coordinator saw it. If that cannot be learnt, both may hold. io has room:
 * there must be no want of memory once the checkpoint may stand. */
static dcp_status share_outcome(dcp_save_session *s, dcp_status mine, dcp__buf *io, outcome *out, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (s->is_coordinator) {
        dcp__buf_put(io, out, sizeof *out);
    }
    dcp_status status = dcp__broadcast(&s->step, DCP_OK, s->group.coordinator, io, &fault);
    if (!s->is_coordinator) {
        *out = UNCERTAIN;
        if (status == DCP_OK && io->len == sizeof *out) {
            memcpy(out, io->data, sizeof *out);
        }
    }
    if (status == DCP_OK || mine != DCP_OK) {
        return dcp__agree(&s->step, mine, err);
    }
    if (err) {
        *err = fault;
    }
    return status;
}

static dcp_status publish_of_group(dcp_save_session *s, outcome *out, dcp_error *err)
{
    dcp__buf io;
    dcp__buf_init(&io, s->ctx);
    dcp_status status = s->is_foreign ? DCP_OK : dcp__session_collect(s, err);
    if (status == DCP_OK) {
        status = dcp__agree(&s->step, dcp__buf_reserve(&io, sizeof *out) ? DCP_OK : dcp__nomem(err), err);
    }
    if (status == DCP_OK) {
        dcp_status mine = !s->is_coordinator ? DCP_OK : s->opts.rank_local ? publish_rank(s, out, err) : publish(s, out, err);
        status = share_outcome(s, mine, &io, out, err);
    }
    dcp__buf_reset(&io);
    return status;
}

/* The session's context may be gone before the cache: its bytes become the cache's own. */
static bool copy_plan(dcp_plan_cache *to, const dcp__plan_cache *from)
{
    dcp__plan_cache copy = *from;
    dcp__buf_init(&copy.bytes, to->ctx);
    dcp__buf_put(&copy.bytes, from->bytes.data, from->bytes.len);
    if (copy.bytes.failed) {
        dcp__buf_reset(&copy.bytes);
        return false;
    }
    to->cache = copy;
    return true;
}

/* The next save of this structure need not be planned. A cache that cannot be filled stays empty. */
static void fill_cache(dcp_save_session *s)
{
    dcp_plan_cache *c = s->opts.cache;
    dcp__plan_cache made;
    if (c && !s->group.was_cached) {
        dcp__plan_cache_reset(&c->cache);
        c->is_filled = dcp__group_plan_keep(&s->group, &made) == DCP_OK;
        if (c->is_filled) {
            c->is_filled = copy_plan(c, &made);
            dcp__plan_cache_reset(&made);
        }
    }
}

dcp_status dcp_save_commit(dcp_save_session *s, dcp_save_report *report, dcp_error *err)
{
    outcome out = UNPUBLISHED;
    bool is_clean = true;
    if (!s) {
        return dcp__fail(err, DCP_ARG, "save: no session");
    }
    double start = dcp__now();
    dcp_status status = dcp__check_save_report(report, err);
    if (status == DCP_OK && !s->placed && !(s->is_foreign && s->is_written)) {
        status = dcp__fail(err, DCP_STATE, "save: nothing has been written");
    }
    s->step.phase = "commit";
    status = dcp__agree(&s->step, status, err);
    status = status == DCP_OK ? publish_of_group(s, &out, err) : status;
    if (status == DCP_OK) {
        is_clean = clean_up(s);
        fill_cache(s);
        gather_reports(s, report ? report->ranks : NULL, report && report->ranks ? report->n_ranks : 0);
    }
    s->report.commit_seconds = dcp__now() - start;
    if (status != DCP_OK) {
        dcp__prefix(err, status, "%s: ", s->path);
    } else if (report) {
        s->report.ranks = report->ranks;
        s->report.n_ranks = report->n_ranks;
        *report = s->report;
    }
    if (out == UNPUBLISHED) {
        dcp__session_take_back(s);
        dcp_save_abort(s);
    } else {
        dcp__session_free(s, !is_clean || status != DCP_OK);
    }
    return status;
}
