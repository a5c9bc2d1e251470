#include "engine/read/device_target.h"

#include "state/strided.h"

static bool is_on_device(const dcp_tensor *t)
{
    int64_t elems;
    return t->device.type != DCP_DEVICE_CPU && dcp__elems(t->ndim, t->extents, &elems) && elems > 0;
}

dcp_status dcp__device_targets_use(dcp_context *ctx, const dcp_read_request *requests, size_t n, void *stream,
                                   dcp__transfer **out, dcp_error *err)
{
    dcp__transfer_opts opts = {.stream = stream, .slot_bytes = DCP__TARGET_SLOT_BYTES, .n_slots = DCP__TARGET_SLOTS};
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        if (!is_on_device(&requests[i].dst)) {
            continue;
        }
        status = *out ? DCP_OK : dcp__transfer_create(ctx, &opts, out, err);
        status = status == DCP_OK ? dcp__transfer_use(*out, requests[i].dst.device, err) : status;
        if (status != DCP_OK) {
            return dcp__prefix(err, status, "item \"%s\": ", dcp__print(requests[i].item->fqn).text);
        }
    }
    return status;
}

/* What goes through the ring at a time: a box that begins at element `at` of the one that is wanted. */
static dcp_status read_part(dcp__lane *l, const dcp__source *src, const dcp__payload *p, const int64_t *start,
                            const int64_t *sizes, int64_t *at, char *dst, const int64_t *dst_strides, size_t elem_bytes,
                            dcp__tile_buf *buf, dcp_error *err)
{
    int64_t offsets[DCP_MAX_NDIM], part[DCP_MAX_NDIM], from[DCP_MAX_NDIM], strides[DCP_MAX_NDIM];
    char *ring;
    int64_t elems = dcp__box_at(p->ndim, sizes, *at, (int64_t)(l->slot_bytes / elem_bytes), offsets, part);
    for (int d = 0; d < p->ndim; d++) {
        from[d] = start[d] + offsets[d];
    }
    *at += elems;
    dcp__row_major(p->ndim, part, strides);
    dcp_status status = dcp__lane_reserve(l, (size_t)elems * elem_bytes, &ring, err);
    status = status == DCP_OK ? dcp__read_box(src, p, from, part, ring, strides, buf, err) : status;
    return status == DCP_OK ? dcp__lane_scatter(l, dst + dcp__element_at(p->ndim, offsets, dst_strides) * (int64_t)elem_bytes,
                                                dst_strides, p->ndim, part, elem_bytes, ring, err)
                            : status;
}

dcp_status dcp__read_box_to_device(dcp__transfer *t, dcp_device device, const dcp__source *src, const dcp__payload *p,
                                   const int64_t *start, const int64_t *sizes, char *dst, const int64_t *dst_strides,
                                   size_t elem_bytes, dcp__tile_buf *buf, dcp_error *err)
{
    int64_t elems, at = 0;
    dcp__lane *l;
    if (!dcp__elems(p->ndim, sizes, &elems)) {
        return dcp__fail(err, DCP_INTERNAL, "a box of endless size");
    }
    dcp_status status = dcp__lane_acquire(t, device, &l, err);
    if (status != DCP_OK) {
        return status;
    }
    while (at < elems && status == DCP_OK) {
        status = read_part(l, src, p, start, sizes, &at, dst, dst_strides, elem_bytes, buf, err);
    }
    dcp__lane_release(t, l);
    return status;
}
