/* Ranks as threads of this call. */
#ifndef DCP_ENGINE_RANK_THREADS_H
#define DCP_ENGINE_RANK_THREADS_H

#include "dcp/backend.h"

/* What one rank does. comm is NULL if it is alone. */
typedef dcp_status (*dcp__rank_fn)(void *user, dcp_comm *comm, int rank, dcp_error *err);

/* Runs fn on n ranks at once and waits for all; of several failures that of the lowest rank is returned. No rank begins unless
 * all threads could be started. Errors: also LIMIT (no more threads), NOMEM. */
dcp_status dcp__run_ranks(dcp_context *ctx, int n, dcp__rank_fn fn, void *user, dcp_error *err);

#endif
