/* A save, step by step. */
#include "engine/session.h"

dcp_status dcp_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_save_opts *opts, dcp_save_report *report,
                    dcp_error *err)
{
    dcp_save_plan *plan;
    dcp_save_session *session = NULL;
    double start = dcp__now();
    dcp_status status = dcp__check_save_report(report, err);
    status = status == DCP_OK ? dcp_plan_save(ctx, state, &plan, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    double planned = dcp__now() - start;
    status = dcp_save_begin(ctx, path, opts, &session, err);
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
