/* Host memory for staging: page-aligned blocks, mapped and registered once, used again and again, never more than a cap. */
#ifndef DCP_DEVICE_HOST_POOL_H
#define DCP_DEVICE_HOST_POOL_H

#include "base/context.h"
#include "dcp/device.h"

typedef enum dcp__pin_policy {
    DCP__PIN_NEVER = 0,
    DCP__PIN_PREFERRED, /* what cannot be registered is used as it is; the first time is told */
    DCP__PIN_REQUIRED   /* what cannot be registered is an error */
} dcp__pin_policy;

typedef struct dcp__host_pool_opts {
    uint64_t cap_bytes;        /* all blocks together; 0: no cap */
    bool is_shared;            /* shared memory, with one descriptor for each block */
    dcp__pin_policy pin;       /* with `driver` and `index` */
    dcp_device_driver *driver; /* borrowed */
    int index;
    size_t max_register_bytes; /* see dcp_pin */
} dcp__host_pool_opts;

typedef struct dcp__host_block {
    char *ptr;
    size_t bytes; /* whole pages */
    int fd;       /* of shared memory, else -1 */
    bool is_pinned;
    bool is_used;
    dcp_registration registration;
    struct dcp__host_block *next;
} dcp__host_block;

typedef struct dcp__host_pool_stats {
    uint64_t mapped_bytes, used_bytes, pinned_bytes, peak_bytes;
    size_t n_blocks, n_registered, n_unregistered, n_failed_unregister;
    int64_t native_code; /* of the first registration that failed */
} dcp__host_pool_stats;

typedef struct dcp__host_pool dcp__host_pool;

dcp_status dcp__host_pool_create(dcp_context *ctx, const dcp__host_pool_opts *opts, dcp__host_pool **out, dcp_error *err);
/* With all its blocks, also those in use. NULL is allowed. A block that cannot be unregistered stays mapped. */
void dcp__host_pool_free(dcp__host_pool *p);

/* The smallest free block of at least `bytes`, or a new one; free blocks are unmapped where the cap asks for it. Not enough room:
 * waits for blocks to come back if `wait`, else LIMIT; LIMIT also for more than the cap. Errors: NOMEM, DEVICE (REQUIRED). From
 * any thread. */
dcp_status dcp__host_pool_acquire(dcp__host_pool *p, size_t bytes, bool wait, dcp__host_block **out, dcp_error *err);
/* NULL is allowed. */
void dcp__host_pool_release(dcp__host_pool *p, dcp__host_block *b);
/* The block in use that holds this range; NULL: none. */
const dcp__host_block *dcp__host_pool_find(dcp__host_pool *p, const void *ptr, size_t n);
/* Bytes that acquire could still give, whatever the blocks are; UINT64_MAX without a cap. */
uint64_t dcp__host_pool_room(dcp__host_pool *p);
/* Unmaps free blocks, the largest first, until at most keep_bytes are mapped. */
void dcp__host_pool_trim(dcp__host_pool *p, uint64_t keep_bytes);
dcp__host_pool_stats dcp__host_pool_get_stats(dcp__host_pool *p);

#endif
