#include "engine/save/device_source.h"

#include <string.h>

#include "base/error.h"
#include "state/strided.h"

bool dcp__is_on_device(const dcp_tensor *t)
{
    return t->data && t->device.type != DCP_DEVICE_CPU;
}

dcp_status dcp__device_transfer(dcp_context *ctx, const dcp_save_opts *opts, dcp__transfer **out, dcp_error *err)
{
    uint64_t slots = 1 + (opts->copy_ahead_bytes + DCP__DEVICE_SLOT_BYTES - 1) / DCP__DEVICE_SLOT_BYTES;
    dcp__transfer_opts o = {.stream = opts->stream,
                            .slot_bytes = DCP__DEVICE_SLOT_BYTES,
                            .n_slots = slots < DCP__LANE_MAX_SLOTS ? (int)slots : DCP__LANE_MAX_SLOTS};
    return dcp__transfer_create(ctx, &o, out, err);
}

dcp__device_source dcp__device_source_of(dcp__transfer *transfer, const dcp_tensor *t, uint64_t bytes)
{
    return (dcp__device_source){.transfer = transfer, .tensor = *t, .bytes = bytes};
}

void dcp__device_source_reset(dcp__device_source *s)
{
    dcp__lane_release(s->transfer, s->lane);
    s->lane = NULL;
}

static int slot_of(const dcp__device_source *s, uint64_t offset)
{
    return (int)(offset / s->lane->slot_bytes % (unsigned)s->lane->n_slots);
}

/* Copies from the beginning on; whatever the ring held is done with. */
static dcp_status start(dcp__device_source *s, dcp_error *err)
{
    dcp_status status = s->lane ? DCP_OK : dcp__lane_acquire(s->transfer, s->tensor.device, &s->lane, err);
    for (int i = 0; status == DCP_OK && i < s->lane->n_slots; i++) {
        status = dcp__lane_wait(s->lane, i, err);
    }
    s->issued = s->consumed = 0;
    return status;
}

/* Puts copies under way for as much as the ring holds beyond what has been taken. */
static dcp_status copy_ahead(dcp__device_source *s, dcp_error *err)
{
    dcp__lane *l = s->lane;
    dcp_status status = DCP_OK;
    uint64_t taken_slots = s->consumed / l->slot_bytes; /* whole ones are free again */
    uint64_t limit = (taken_slots + (unsigned)l->n_slots) * l->slot_bytes;
    while (s->issued < s->bytes && s->issued < limit && status == DCP_OK) {
        int slot = slot_of(s, s->issued);
        uint64_t left = s->bytes - s->issued;
        size_t n = left < l->slot_bytes ? (size_t)left : l->slot_bytes;
        status = l->driver->ops->to_host(l->driver, l->index, dcp__lane_slot(l, slot), (const char *)s->tensor.data + s->issued,
                                         n, l->is_pinned, l->stream, err);
        status = status == DCP_OK ? dcp__lane_mark(l, slot, err) : status;
        s->issued += n;
    }
    return status;
}

static dcp_status take(dcp__device_source *s, char *out, size_t n, dcp_error *err)
{
    dcp_status status = DCP_OK;
    while (n && status == DCP_OK) {
        int slot = slot_of(s, s->consumed);
        size_t within = (size_t)(s->consumed % s->lane->slot_bytes), part = s->lane->slot_bytes - within;
        part = part < n ? part : n;
        status = copy_ahead(s, err);
        status = status == DCP_OK ? dcp__lane_wait(s->lane, slot, err) : status;
        if (status == DCP_OK) {
            memcpy(out, dcp__lane_slot(s->lane, slot) + within, part);
        }
        s->consumed += part;
        out += part;
        n -= part;
    }
    return status == DCP_OK && s->lane->n_slots > 1 ? copy_ahead(s, err) : status;
}

dcp_status dcp__device_source_pull(dcp__device_source *s, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const dcp_tensor *t = &s->tensor;
    dcp_status status = DCP_OK;
    if (offset == 0) {
        status = start(s, err);
    } else if (!s->lane || offset != s->consumed) {
        return dcp__fail(err, DCP_INTERNAL, "a tensor on a device was read at %llu instead of %llu", (unsigned long long)offset,
                         (unsigned long long)s->consumed);
    }
    if (status == DCP_OK && dcp__is_row_major(t->ndim, t->extents, t->strides)) {
        status = take(s, buf, n, err);
    } else if (status == DCP_OK) {
        status = dcp__lane_gather(s->lane, t, offset, n, buf, err);
        s->consumed += n;
    }
    if (status != DCP_OK || s->consumed == s->bytes) {
        dcp__device_source_reset(s);
    }
    return status;
}
