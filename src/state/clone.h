/* A tree of its own: for saves that go on after the caller has got his tree back. */
#ifndef DCP_STATE_CLONE_H
#define DCP_STATE_CLONE_H

#include "dcp/state.h"

/* The memory of a tensor in a clone, to be turned to a copy of the elements. */
typedef dcp_status (*dcp__clone_memory_fn)(void *user, dcp_tensor *tensor, dcp_error *err);

/* Copies containers, opaque values and the shapes of tensors; other leaves never change and are shared. What stands in several
 * places of the tree does so in the copy. The tensors of the copy borrow the memory of the original's; each that has some is
 * handed to fn once, and stays where it is as long as the copy lives. Errors: NOMEM, LIMIT (depth), those of fn. */
dcp_status dcp__value_clone(dcp_context *ctx, dcp_value *v, dcp__clone_memory_fn fn, void *user, dcp_value **out, dcp_error *err);

#endif
