/* Publishing a save. The metadata file is the mark: before its rename the old checkpoint holds, after it the new one. Only then
 * is removed what nobody names any more. */
#include <stdio.h>
#include <string.h>

#include "engine/session.h"

static const char final_name[] = ".metadata", temporary_name[] = ".metadata.tmp";

/* ---- publishing ---- */

static dcp_status sync_directory(dcp_save_session *s, dcp_error *err)
{
    const dcp_storage_ops *ops = s->storage->ops;
    dcp_status status = s->opts.no_sync || !ops->sync_dir ? DCP_OK : ops->sync_dir(s->storage, s->dir, err);
    if (status == DCP_UNSUPPORTED) {
        s->report.degraded |= DCP_DEGRADED_SYNC;
        status = DCP_OK;
    }
    return status;
}

static dcp_status write_metadata(dcp_save_session *s, const char *relative, dcp_error *err)
{
    dcp_file *f;
    dcp_status status =
        dcp__session_open(s, relative, DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE | DCP_OPEN_BENEATH, &f, err);
    if (status != DCP_OK) {
        return status;
    }
    status = s->storage->ops->write_at(f, s->metadata.data, s->metadata.len, 0, err);
    status = status == DCP_OK ? dcp__session_sync(s, f, err) : status;
    dcp_status closed = s->storage->ops->close(f, status == DCP_OK ? err : NULL);
    return status == DCP_OK ? closed : status;
}

static dcp_status rename_metadata(dcp_save_session *s, dcp_error *err)
{
    char *from, *to;
    dcp_status status = dcp__session_name(s, temporary_name, &from, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__session_name(s, final_name, &to, err);
    if (status == DCP_OK) {
        status = s->storage->ops->rename(s->storage, from, to, err);
        dcp__free(s->ctx, to);
    }
    dcp__free(s->ctx, from);
    return status;
}

/* The step after which the new checkpoint holds. *published also says so if what follows fails. */
static dcp_status publish(dcp_save_session *s, bool *published, dcp_error *err)
{
    dcp_status status = sync_directory(s, err);
    bool renames = s->storage->ops->rename && (s->storage->ops->caps & DCP_STORAGE_RENAME);
    if (status == DCP_OK && renames) {
        status = write_metadata(s, temporary_name, err);
        status = status == DCP_OK ? rename_metadata(s, err) : status;
        if (status != DCP_OK) {
            dcp__session_remove(s, temporary_name, NULL);
        }
        renames = status != DCP_UNSUPPORTED;
        status = renames ? status : DCP_OK;
    }
    if (status == DCP_OK && !renames) {
        s->report.degraded |= DCP_DEGRADED_RENAME;
        status = write_metadata(s, final_name, err);
        if (status != DCP_OK && !s->replaces) {
            dcp__session_remove(s, final_name, NULL);
        }
    }
    *published = status == DCP_OK;
    return status == DCP_OK ? sync_directory(s, err) : status;
}

/* ---- cleaning up ---- */

/* "__<rank>_<generation>_<n>.distcp", without the middle part for the empty generation. */
static bool is_of_generation(const char *name, const char *generation)
{
    size_t n = strncmp(name, "__", 2) == 0 ? strspn(name + 2, "0123456789") : 0;
    const char *rest = name + 2 + n;
    size_t len = strlen(generation);
    if (n == 0 || *rest != '_') {
        return false;
    }
    if (len) {
        if (strncmp(rest + 1, generation, len) != 0 || rest[1 + len] != '_') {
            return false;
        }
        rest += 1 + len;
    }
    n = strspn(rest + 1, "0123456789");
    return n && strcmp(rest + 1 + n, ".distcp") == 0;
}

typedef struct sweep {
    dcp_save_session *session;
    dcp__strmap keep; /* names of this save's files */
    dcp__names found;
} sweep;

static bool is_kept(const sweep *w, const char *name)
{
    uint64_t index;
    return dcp__strmap_get(&w->keep, dcp_str_of(name), &index);
}

static dcp_status see_leftover(void *user, const char *name, dcp_entry_type type)
{
    sweep *w = user;
    const dcp_save_session *s = w->session;
    for (size_t i = 0; type == DCP_ENTRY_FILE && i < s->dead_generations.n; i++) {
        if (is_of_generation(name, s->dead_generations.names[i]) && !is_kept(w, name)) {
            return dcp__names_add(s->ctx, &w->found, name, NULL);
        }
    }
    return DCP_OK;
}

/* A name that leads out of the directory is not ours to remove. */
static bool is_inside(const char *name)
{
    return name[0] != '/' && strcmp(name, "..") != 0 && strncmp(name, "../", 3) != 0 && !strstr(name, "/../") &&
           (strlen(name) < 3 || strcmp(name + strlen(name) - 3, "/..") != 0);
}

/* Failures are told, not returned: the save itself has succeeded. */
static void remove_old(const sweep *w, const char *name)
{
    dcp_save_session *s = w->session;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = is_kept(w, name) || !is_inside(name) ? DCP_OK : dcp__session_remove(s, name, &err);
    if (status != DCP_OK && status != DCP_NOT_FOUND) {
        dcp__log(s->ctx, DCP_LOG_WARNING, "%s: left over: %s", s->path, err.message);
    }
}

static void remove_all(const sweep *w, const dcp__names *names)
{
    for (size_t i = 0; i < names->n; i++) {
        remove_old(w, names->names[i]);
    }
}

static void clean_up(dcp_save_session *s)
{
    sweep w = {.session = s};
    dcp_status status = DCP_OK;
    dcp__strmap_init(&w.keep, s->ctx);
    for (size_t i = 0; i < s->created.n && status == DCP_OK; i++) {
        status = dcp__strmap_add(&w.keep, dcp_str_of(s->created.names[i]), i, NULL, NULL);
    }
    if (status == DCP_OK) { /* without memory everything stays for the next save */
        if (s->dead_generations.n) {
            s->storage->ops->list(s->storage, s->dir, see_leftover, &w, NULL);
        }
        remove_all(&w, &s->old_files);
        remove_all(&w, &w.found);
        remove_all(&w, &s->dead_intents);
    }
    dcp__names_reset(s->ctx, &w.found);
    dcp__strmap_reset(&w.keep);
}

dcp_status dcp_save_commit(dcp_save_session *s, dcp_save_report *report, dcp_error *err)
{
    bool published = false;
    dcp_status status;
    if (!s) {
        return dcp__fail(err, DCP_ARG, "save: no session");
    }
    if (report && report->struct_size != sizeof *report) {
        status = dcp__fail(err, DCP_ARG, "save report: struct_size %zu, expected %zu", report->struct_size, sizeof *report);
    } else if (s->metadata.len == 0) {
        status = dcp__fail(err, DCP_STATE, "save: nothing has been written");
    } else {
        double start = dcp__now();
        status = publish(s, &published, err);
        if (published && status == DCP_OK) {
            clean_up(s);
        }
        s->report.commit_seconds = dcp__now() - start;
    }
    if (status != DCP_OK) {
        dcp__prefix(err, status, "%s: ", s->path);
    } else if (report) {
        *report = s->report;
    }
    if (published) {
        dcp__session_free(s);
    } else {
        dcp_save_abort(s);
    }
    return status;
}
