/* Publishing a save. The metadata file is the mark: before its rename the old checkpoint holds, after it the new one. Only then
 * is removed what nobody names any more. */
#include <string.h>

#include "engine/session.h"

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

dcp_status dcp_save_commit(dcp_save_session *s, dcp_save_report *report, dcp_error *err)
{
    outcome out = UNPUBLISHED;
    bool is_clean = false;
    if (!s) {
        return dcp__fail(err, DCP_ARG, "save: no session");
    }
    double start = dcp__now();
    dcp_status status = dcp__check_save_report(report, err);
    if (status == DCP_OK && s->metadata.len == 0) {
        status = dcp__fail(err, DCP_STATE, "save: nothing has been written");
    }
    status = status == DCP_OK ? publish(s, &out, err) : status;
    if (status == DCP_OK) {
        is_clean = clean_up(s);
    }
    s->report.commit_seconds = dcp__now() - start;
    if (status != DCP_OK) {
        dcp__prefix(err, status, "%s: ", s->path);
    } else if (report) {
        *report = s->report;
    }
    if (out == UNPUBLISHED) {
        dcp_save_abort(s);
    } else {
        dcp__session_free(s, !is_clean);
    }
    return status;
}
