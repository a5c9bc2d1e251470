/* Runs the same function over many tasks on several threads. */
#ifndef DCP_BASE_POOL_H
#define DCP_BASE_POOL_H

#include "base/context.h"

/* Task i of a run; worker is 0 .. n_workers - 1 and names a thread, for buffers of its own. */
typedef dcp_status (*dcp__task_fn)(void *arg, size_t i, int worker, dcp_error *err);

/* Runs tasks 0 .. n - 1 in ascending order of start on at most n_workers threads, the calling one among them. After a failure no
 * further task starts; of several failures the one of the lowest task is returned. n_workers is cut to n; a thread that cannot
 * be started is done without. */
dcp_status dcp__parallel(size_t n, int n_workers, dcp__task_fn fn, void *arg, dcp_error *err);

#endif
