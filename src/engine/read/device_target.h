/* Tensors on devices as targets of a read: what is read goes through the ring of a lane. */
#ifndef DCP_ENGINE_DEVICE_TARGET_H
#define DCP_ENGINE_DEVICE_TARGET_H

#include "device/transfer.h"
#include "engine/read/checkpoint.h"

#define DCP__TARGET_SLOT_BYTES ((size_t)4 << 20)
#define DCP__TARGET_SLOTS 3

/* A transfer to the devices of the targets, which waits for what is in the caller's stream; *out stays NULL if there are none. */
dcp_status dcp__device_targets_use(dcp_context *ctx, const dcp_read_request *requests, size_t n, void *stream,
                                   dcp__transfer **out, dcp_error *err);
/* As dcp__read_box, with dst on a device. Does not wait for the copies: dcp__transfer_sync does. */
dcp_status dcp__read_box_to_device(dcp__transfer *t, dcp_device device, const dcp__source *src, const dcp__payload *p,
                                   const int64_t *start, const int64_t *sizes, char *dst, const int64_t *dst_strides,
                                   size_t elem_bytes, dcp__tile_buf *buf, dcp_error *err);

#endif
