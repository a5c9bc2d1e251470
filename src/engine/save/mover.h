/* The helper process: moves ranges of shared memory to files. Planning, small records, checksums and the commit stay here. It is
 * started when it is first needed, serves all saves of a stager or handle, and is started anew when it has died. */
#ifndef DCP_ENGINE_MOVER_H
#define DCP_ENGINE_MOVER_H

#include "dcp/backend.h"
#include "dcp/save.h"
#include "device/host_pool.h"

typedef struct dcp_helper dcp__mover;

#define DCP__MOVED_BYTES ((size_t)64 << 10) /* shorter writes take longer to hand over than to make */

/* pool: whose blocks are moved from where they lie; NULL: none. executable NULL: $DCP_WRITER, else what lies beside the library.
 * Nothing is started. Errors: UNSUPPORTED (there is none). */
dcp_status dcp__mover_create(dcp_context *ctx, dcp__host_pool *pool, const char *executable, dcp__mover **out, dcp_error *err);
/* Ends the process. NULL is allowed. */
void dcp__mover_free(dcp__mover *m);

/* Whether to go on waiting for the process; what it says instead is the result. From the thread that writes. */
typedef struct dcp__mover_check {
    dcp_status (*goes_on)(void *user, dcp_error *err);
    void *user;
} dcp__mover_check;

/* As write_at of the file's storage. What does not lie in the pool's shared memory goes by way of a block of the mover's own;
 * what does not go to the local file system is written by the caller's process, as is everything where m is NULL. From any
 * thread. check is asked some times a second while there is no answer (NULL: it waits for ever); the process is killed if it says
 * no, and the next write starts another one. Errors: also IO, with the way in which the process has ended; those of check. */
dcp_status dcp__mover_write_at(dcp__mover *m, dcp_file *f, const void *bytes, size_t n, uint64_t offset,
                               const dcp__mover_check *check, dcp_error *err);

#endif
