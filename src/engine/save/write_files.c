/* Data files of one rank of a save that is planned and published by other means. */
#include <string.h>

#include "engine/save/session.h"
#include "engine/save/write_records.h"

#define MAX_PREFIX_BYTES 200

static dcp_status check_prefix(const char *prefix, dcp_error *err)
{
    size_t len = strlen(prefix);
    if (len == 0 || len > MAX_PREFIX_BYTES || prefix[0] == '.' || strchr(prefix, '/')) {
        return dcp__fail(err, DCP_ARG, "prefix \"%s\" of file names", dcp__print(dcp_str_of(prefix)).text);
    }
    return DCP_OK;
}

static dcp_status make_directory(dcp_save_session *s, dcp_error *err)
{
    return s->storage->ops->make_dir ? s->storage->ops->make_dir(s->storage, s->dir, err) : DCP_OK;
}

static dcp_status write_all(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    dcp_status status = make_directory(s, err);
    status = status == DCP_OK ? dcp__write_whole_plan(s, plan, err) : status;
    return status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
}

static void note_written(const dcp_save_session *s, size_t n, dcp_written *out)
{
    for (size_t i = 0; i < n; i++) {
        const dcp__placed *p = &s->placed[i];
        out[i] = (dcp_written){p->file, p->is_transformed, p->offset, p->length};
    }
}

dcp_status dcp_write_files(dcp_context *ctx, const char *path, const char *prefix, const dcp_save_plan *plan,
                           const dcp_save_opts *opts, dcp_written *out, dcp_save_report *report, dcp_error *err)
{
    dcp_save_session *s = NULL;
    if (!path || !prefix || !plan || !out) {
        return dcp__fail(err, DCP_ARG, "write: no %s",
                         !path     ? "path"
                         : !prefix ? "prefix"
                         : !plan   ? "plan"
                                   : "place for the result");
    }
    if (opts && opts->struct_size == sizeof *opts && (opts->comm || opts->rank_local)) {
        return dcp__fail(err, DCP_ARG, "write: a communicator, or a save of one rank, is for dcp_save");
    }
    dcp_status status = check_prefix(prefix, err);
    status = status == DCP_OK ? dcp__check_save_report(report, err) : status;
    status = status == DCP_OK ? dcp__session_detached(ctx, path, opts, &s, err) : status;
    if (status == DCP_OK) {
        s->prefix = prefix;
        status = write_all(s, plan, err);
    }
    if (status != DCP_OK) {
        dcp_save_abort(s);
        return dcp__prefix(err, status, "%s: ", path);
    }
    note_written(s, dcp_save_plan_count(plan), out);
    if (report) {
        s->report.ranks = report->ranks;
        s->report.n_ranks = 0;
        *report = s->report;
    }
    dcp__session_free(s, false);
    return DCP_OK;
}
