/* A value of the same kind as another one, of other children. */
#ifndef DCP_STATE_CHILDREN_H
#define DCP_STATE_CHILDREN_H

#include "dcp/state.h"

/* Makes of a child what stands in its place: a new reference, or one more to the same. */
typedef dcp_status (*dcp__child_fn)(void *user, dcp_value *child, dcp_value **out, dcp_error *err);

/* *out is a new value of v's kind, with its keys or its class, of what fn makes of its children, in order. v is a sequence, set,
 * dict or opaque value. Errors: those of fn, NOMEM. */
dcp_status dcp__map_children(dcp_context *ctx, const dcp_value *v, dcp__child_fn fn, void *user, dcp_value **out, dcp_error *err);

#endif
