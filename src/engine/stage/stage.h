/* A snapshot of a state: a tree of its own, whose tensors lie in blocks of a pool. */
#ifndef DCP_ENGINE_STAGE_H
#define DCP_ENGINE_STAGE_H

#include "device/host_pool.h"
#include "device/transfer.h"
#include "state/clone.h"

/* Memory of one or several tensors of the state: tensors that overlap are copied together, so that they share memory in the
 * snapshot as well. A view with gaps that lies in no other tensor is copied without them. */
typedef struct dcp__region {
    const char *from;
    size_t bytes;
    dcp_device device;
    dcp_tensor gathered; /* the view, if it is copied without its gaps; else data NULL */
    char *to;            /* NULL: not staged */
} dcp__region;

typedef struct dcp__snapshot {
    dcp_context *ctx;
    dcp_value *state; /* its tensors point to what was staged, else to the original's memory */
    dcp__host_pool *pool;
    struct dcp__stage_slot *slots; /* tensors of the state */
    size_t n_slots, cap_slots;
    dcp__region *regions;
    size_t n_regions;
    struct dcp__stage_chunk *chunks;
    size_t n_chunks;
    uint64_t total_bytes;
    uint64_t *staged_bytes; /* counts what is copied, by atomic operations; set before dcp__snapshot_copy */
    bool is_partial;        /* the pool has not room for all */
} dcp__snapshot;

/* Clones the tree and finds out what there is to copy. Call dcp__snapshot_reset in every case. */
dcp_status dcp__snapshot_begin(dcp_context *ctx, dcp_value *state, dcp__host_pool *pool, dcp__snapshot *out, dcp_error *err);
/* Takes blocks, for the last tensors first: where the cap ends, the first ones stay where they are. */
dcp_status dcp__snapshot_take_blocks(dcp__snapshot *s, dcp_error *err);
/* Has the kernel give the memory of all blocks. */
dcp_status dcp__snapshot_touch(dcp__snapshot *s, dcp_error *err);
/* Copies; on return the state's tensors point to their copies. Devices are in use by the transfer (NULL if there are none). */
dcp_status dcp__snapshot_copy(dcp__snapshot *s, dcp__transfer *transfer, dcp_error *err);
/* Calls fn for each device that tensors lie on, perhaps several times. */
dcp_status dcp__snapshot_devices(const dcp__snapshot *s, dcp_status (*fn)(void *user, dcp_device device, dcp_error *err),
                                 void *user, dcp_error *err);
/* True if the memory of a tensor of the snapshot's state is still the caller's. */
bool dcp__snapshot_is_unstaged(const dcp__snapshot *s, const dcp_tensor *t);
/* Number of tensors of the state that are still the caller's. */
size_t dcp__snapshot_count_unstaged(const dcp__snapshot *s);
/* Frees the tree and gives the blocks back. */
void dcp__snapshot_reset(dcp__snapshot *s);

#endif
