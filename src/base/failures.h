/* Filling a list of failing ranks, and the one message that stands for all of them. */
#ifndef DCP_BASE_FAILURES_H
#define DCP_BASE_FAILURES_H

#include "base/context.h"

#define DCP__CAUSES_SHOWN 8

/* NULL is allowed for the list in each of these. */
void dcp__failures_clear(dcp_failures *failures);
/* Adds a copy. A rank that is there already keeps its first failure. Without memory the failure counts as lost. */
void dcp__failures_add(dcp_failures *failures, const dcp_failure *failure);

/* Fills err with PEER, naming the phase and the causes, and with the numbers of the first one. `causes` are the first min(total,
 * DCP__CAUSES_SHOWN) of `total` failures in a group of `size` ranks. Takes no memory. Returns DCP_PEER. */
dcp_status dcp__fail_peers(dcp_error *err, const char *phase, const dcp_failure *causes, size_t total, int size);

#endif
