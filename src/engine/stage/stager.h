/* The pool behind a stager, and whose turn it is. */
#ifndef DCP_ENGINE_STAGER_H
#define DCP_ENGINE_STAGER_H

#include <pthread.h>

#include "dcp/async.h"
#include "device/host_pool.h"
#include "engine/save/mover.h"

struct dcp_stager {
    dcp_context *ctx;
    dcp_stager_opts opts;
    dcp_device_driver *driver; /* that blocks are registered with; NULL: none */
    pthread_mutex_t lock;      /* guards the fields below */
    pthread_cond_t changed;
    bool is_busy, is_closed;
    dcp__host_pool *pool;     /* NULL once it is closed */
    dcp__mover *mover;        /* NULL: no helper process was asked for, or it is closed */
    dcp_comm *comm;           /* of the last save that had one */
    dcp_comm *comm_duplicate; /* of it, for the saves' own traffic */
};

/* Has the stager to itself until dcp__stager_leave, also for a reservation. Errors: STATE. */
dcp_status dcp__stager_enter(dcp_stager *s, dcp_error *err);
void dcp__stager_leave(dcp_stager *s);
/* Between the two: the duplicate of a communicator, which is made anew unless the stagers of all ranks have one. Collective then.
 */
dcp_status dcp__stager_duplicate(dcp_stager *s, dcp_comm *comm, bool all_have_one, dcp_comm **out, dcp_error *err);

#endif
