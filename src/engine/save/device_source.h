/* Tensors on devices as something to be written: items that are pulled, each through a lane, with copies ahead of the writing. */
#ifndef DCP_ENGINE_DEVICE_SOURCE_H
#define DCP_ENGINE_DEVICE_SOURCE_H

#include "dcp/save.h"
#include "device/transfer.h"

#define DCP__DEVICE_SLOT_BYTES ((size_t)1 << 20)

/* One tensor. Pulled by one thread at a time, in ascending order, from 0 on; as often as one likes. */
typedef struct dcp__device_source {
    dcp__transfer *transfer;
    dcp_tensor tensor;
    uint64_t bytes;
    dcp__lane *lane;           /* while it is being pulled */
    uint64_t issued, consumed; /* bytes: copies under way up to, taken up to */
} dcp__device_source;

dcp__device_source dcp__device_source_of(dcp__transfer *transfer, const dcp_tensor *t, uint64_t bytes);
/* As dcp_pull_fn. */
dcp_status dcp__device_source_pull(dcp__device_source *s, uint64_t offset, void *buf, size_t n, dcp_error *err);
/* Gives back the lane of a source that was not pulled to its end. */
void dcp__device_source_reset(dcp__device_source *s);

/* A plan's transfer: rings for one item each, of copy_ahead_bytes and what is being written. */
dcp_status dcp__device_transfer(dcp_context *ctx, const dcp_save_opts *opts, dcp__transfer **out, dcp_error *err);
bool dcp__is_on_device(const dcp_tensor *t);

#endif
