/* What the parts of the global plan know of a rank's own plan. */
#ifndef DCP_PLAN_LOCAL_PLAN_H
#define DCP_PLAN_LOCAL_PLAN_H

#include "base/bytes.h"
#include "plan/global_plan.h"
#include "plan/wire.h"

/* What is said about one of its names. */
dcp__wire_entry dcp__local_describe(const dcp__local *l, size_t entry);

/* Owner of name i of n, where all list the same ones; and otherwise. */
int dcp__owner_of_position(size_t i, size_t n, int world);
int dcp__owner_of_name(dcp_str fqn, int world);

/* Which entries go to which owner, in order: entries[start[o] .. start[o + 1]); fills l->sent and l->sent_start too. Both are
 * allocated. Errors: NOMEM. */
typedef struct dcp__route {
    uint32_t *entries;
    size_t *start;    /* [world + 1], and one more for the making */
    uint32_t *owners; /* [entry] */
} dcp__route;
dcp_status dcp__local_route(dcp__local *l, const dcp__hellos *hellos, dcp__route *out, dcp_error *err);
void dcp__route_reset(dcp_context *ctx, dcp__route *r);

/* Path and kind. */
void dcp__put_container(dcp__buf *b, const dcp__container *c);

#endif
