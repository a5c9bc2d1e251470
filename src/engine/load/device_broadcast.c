/* Device memory of one rank for all others. */
#include <string.h>

#include "comm/collective.h"
#include "device/transfer.h"

#define PART_BYTES ((size_t)4 << 20) /* that is under way at a time */
#define RING_SLOTS 2

typedef struct broadcasting {
    dcp__step step;
    dcp_device device;
    char *ptr;
    uint64_t bytes;
    int root;
    dcp__transfer *transfer;
    dcp__lane *lane;
} broadcasting;

static dcp_status begin(broadcasting *b, void *stream, dcp_error *err)
{
    dcp__transfer_opts opts = {.stream = stream, .slot_bytes = PART_BYTES, .n_slots = RING_SLOTS};
    if (b->device.type == DCP_DEVICE_CPU || (!b->ptr && b->bytes)) {
        return dcp__fail(err, DCP_ARG, "broadcast: no %s", b->ptr ? "device" : "address");
    }
    dcp_status status = dcp__transfer_create(b->step.ctx, &opts, &b->transfer, err);
    status = status == DCP_OK ? dcp__transfer_use(b->transfer, b->device, err) : status;
    return status == DCP_OK ? dcp__lane_acquire(b->transfer, b->device, &b->lane, err) : status;
}

static dcp_status fetch(const broadcasting *b, uint64_t at, size_t n, dcp__buf *out, dcp_error *err)
{
    dcp__lane *l = b->lane;
    dcp_status status = l->driver->ops->to_host(l->driver, l->index, l->ring, b->ptr + at, n, l->is_pinned, l->stream, err);
    status = status == DCP_OK ? l->driver->ops->stream_sync(l->driver, l->index, l->stream, err) : status;
    if (status == DCP_OK) {
        dcp__buf_put(out, l->ring, n);
        status = out->failed ? dcp__nomem(err) : DCP_OK;
    }
    return status;
}

/* Does not wait: the next part comes while this one is being copied. */
static dcp_status store(const broadcasting *b, uint64_t at, const dcp__buf *in, dcp_error *err)
{
    dcp__lane *l = b->lane;
    char *ring;
    dcp_status status = dcp__lane_reserve(l, in->len, &ring, err);
    if (status != DCP_OK) {
        return status;
    }
    memcpy(ring, in->data, in->len);
    return l->driver->ops->to_device(l->driver, l->index, b->ptr + at, ring, in->len, l->is_pinned, l->stream, err);
}

/* *mine is what became of this rank so far; a failure of any rank ends the broadcast of all at the next part. */
static dcp_status move_part(const broadcasting *b, uint64_t at, dcp_status *mine, dcp_error *err)
{
    bool is_root = dcp__step_rank(&b->step) == b->root;
    size_t n = b->bytes - at < PART_BYTES ? (size_t)(b->bytes - at) : PART_BYTES;
    dcp__buf part;
    dcp__buf_init(&part, b->step.ctx);
    if (is_root && *mine == DCP_OK) {
        *mine = fetch(b, at, n, &part, err);
    }
    dcp_status status = dcp__broadcast(&b->step, *mine, b->root, &part, err);
    if (status == DCP_OK && !is_root) {
        *mine = part.len == n ? store(b, at, &part, err)
                              : dcp__fail(err, DCP_MISMATCH, "broadcast: %zu bytes came instead of %zu", part.len, n);
    }
    dcp__buf_reset(&part);
    return status;
}

static dcp_status through_host(broadcasting *b, void *stream, dcp_error *err)
{
    dcp_status mine = begin(b, stream, err), status = DCP_OK;
    for (uint64_t at = 0; at < b->bytes && status == DCP_OK; at += PART_BYTES) {
        status = move_part(b, at, &mine, err);
    }
    if (status == DCP_OK && mine == DCP_OK && b->transfer) {
        mine = dcp__transfer_sync(b->transfer, err);
    }
    status = status == DCP_OK ? dcp__agree(&b->step, mine, err) : status;
    if (b->transfer) {
        dcp__lane_release(b->transfer, b->lane);
    }
    dcp__transfer_free(b->transfer);
    return status;
}

dcp_status dcp_device_broadcast(dcp_context *ctx, dcp_comm *comm, dcp_device device, void *device_ptr, uint64_t bytes, int root,
                                void *stream, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    if (!comm || root < 0 || root >= comm->size) {
        return dcp__fail(err, DCP_ARG, "broadcast: no %s", comm ? "such root" : "communicator");
    }
    if (comm->ops->broadcast_device) {
        return dcp_comm_broadcast_device(comm, device_ptr, (size_t)bytes, root, stream, 0, err);
    }
    broadcasting b = {
        .step = {dcp__context(ctx), comm, "broadcast", NULL}, .device = device, .ptr = device_ptr, .bytes = bytes, .root = root};
    return through_host(&b, stream, err);
}
