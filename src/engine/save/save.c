/* A save, step by step. */
#include "engine/save/session.h"

dcp_status dcp_plan_cache_create(dcp_context *ctx, dcp_plan_cache **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    dcp_plan_cache *c = dcp__calloc(ctx, 1, sizeof *c);
    if (!c) {
        return dcp__nomem(err);
    }
    c->ctx = ctx;
    *out = c;
    return DCP_OK;
}

void dcp_plan_cache_free(dcp_plan_cache *c)
{
    if (c) {
        dcp__plan_cache_reset(&c->cache);
        dcp__free(c->ctx, c);
    }
}

static dcp_status failed_before(const dcp_save_opts *opts, dcp_error *err)
{
    const dcp_error *failed = opts && opts->struct_size == sizeof *opts ? opts->failed : NULL;
    return failed ? dcp__fail_as(err, failed) : DCP_OK;
}

/* A rank that fails goes on to the next step with its status, where all of them learn of it. */
static dcp_status save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_save_opts *opts, dcp_save_report *report,
                       dcp_error *err)
{
    dcp_save_plan *plan = NULL;
    dcp_save_session *session;
    double start = dcp__now();
    dcp_status status = failed_before(opts, err);
    status = status == DCP_OK ? dcp__check_save_report(report, err) : status;
    status = status == DCP_OK ? dcp__plan_save_of_rank(ctx, state, opts, &plan, err) : status;
    double planned = dcp__now() - start;
    status = dcp__save_begin(ctx, path, opts, status, &session, err);
    if (status == DCP_OK) {
        session->report.plan_seconds = planned;
        status = dcp_save_write(session, plan, err);
        if (status == DCP_OK) {
            status = dcp_save_commit(session, report, err);
        } else {
            dcp_save_abort(session);
        }
    }
    dcp_save_plan_free(plan);
    return status;
}

dcp_status dcp__settle_save(dcp_context *ctx, const dcp_save_opts *opts, dcp_status status, const dcp_error *fault,
                            dcp_save_report *report)
{
    bool goes_on = opts && opts->struct_size == sizeof *opts && opts->on_failure == DCP_FAILURE_WARN;
    if (!goes_on || status == DCP_OK || status == DCP_ARG || status == DCP_STATE) {
        return status;
    }
    dcp__log(ctx, DCP_LOG_WARNING, "no checkpoint was saved: %s", fault->message);
    if (report) {
        report->status = status;
    }
    return DCP_OK;
}

dcp_status dcp_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_save_opts *opts, dcp_save_report *report,
                    dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    ctx = dcp__context(ctx);
    if (!path) {
        return dcp__fail(err, DCP_ARG, "save: no path");
    }
    err = err ? err : &own;
    return dcp__settle_save(ctx, opts, save(ctx, path, state, opts, report, err), err, report);
}
