/* Views of device memory that are not linear. */
#include <string.h>

#include "device/transfer.h"
#include "state/strided.h"

/* ---- from the device: spans, and the elements out of them ---- */

/* A box of elements: where it begins on the device, and where its row-major image goes. */
typedef struct box {
    int ndim;
    const int64_t *strides, *image_strides;
    size_t elem_bytes;
    const char *from;
    char *to;
    int64_t sizes[DCP_MAX_NDIM];
} box;

static uint64_t span_bytes(const box *b)
{
    uint64_t last = 0;
    for (int d = 0; d < b->ndim; d++) {
        last += (uint64_t)(b->sizes[d] - 1) * (uint64_t)b->strides[d];
    }
    return (last + 1) * b->elem_bytes;
}

static int longest(const box *b)
{
    int best = 0;
    for (int d = 1; d < b->ndim; d++) {
        if ((b->sizes[d] - 1) * b->strides[d] > (b->sizes[best] - 1) * b->strides[best]) {
            best = d;
        }
    }
    return best;
}

static dcp_status fetch_span(dcp__lane *l, const box *b, size_t bytes, dcp_error *err)
{
    dcp_status status = l->driver->ops->to_host(l->driver, l->index, l->ring, b->from, bytes, l->is_pinned, l->stream, err);
    status = status == DCP_OK ? l->driver->ops->stream_sync(l->driver, l->index, l->stream, err) : status;
    if (status == DCP_OK) {
        dcp__copy_strided(b->to, b->image_strides, l->ring, b->strides, b->ndim, b->sizes, b->elem_bytes);
    }
    return status;
}

/* Halves the box until its span fits into the ring: 63 times at most for each dimension, each with a box on the stack. */
static dcp_status fetch_box(dcp__lane *l, const box *b, dcp_error *err)
{
    uint64_t bytes = span_bytes(b);
    if (bytes <= l->slot_bytes * (size_t)l->n_slots) {
        return fetch_span(l, b, (size_t)bytes, err);
    }
    int d = longest(b);
    box half = *b;
    half.sizes[d] = b->sizes[d] / 2;
    dcp_status status = fetch_box(l, &half, err);
    half.from += half.sizes[d] * b->strides[d] * (int64_t)b->elem_bytes;
    half.to += half.sizes[d] * b->image_strides[d] * (int64_t)b->elem_bytes;
    half.sizes[d] = b->sizes[d] - half.sizes[d];
    return status == DCP_OK ? fetch_box(l, &half, err) : status;
}

dcp_status dcp__lane_gather(dcp__lane *l, const dcp_tensor *t, uint64_t offset, size_t n, void *out, dcp_error *err)
{
    size_t elem = dcp_dtype_bytes(t->dtype);
    int64_t start = (int64_t)(offset / elem), left = (int64_t)(n / elem);
    int64_t row_major[DCP_MAX_NDIM], offsets[DCP_MAX_NDIM];
    box b = {.ndim = t->ndim, .strides = t->strides, .image_strides = row_major, .elem_bytes = elem, .to = out};
    dcp__row_major(t->ndim, t->extents, row_major);
    b.strides = t->strides ? t->strides : row_major;
    dcp_status status = l->driver->ops->stream_sync(l->driver, l->index, l->stream, err); /* the ring is overwritten */
    while (left > 0 && status == DCP_OK) {
        int64_t done = dcp__box_at(t->ndim, t->extents, start, left, offsets, b.sizes);
        int64_t at = dcp__element_at(t->ndim, offsets, b.strides);
        b.from = (const char *)t->data + at * (int64_t)elem;
        status = fetch_box(l, &b, err);
        b.to += done * (int64_t)elem;
        start += done;
        left -= done;
    }
    return status;
}

/* ---- to the device: runs ---- */

/* Drops dimensions of one element, and merges those that lie behind each other without a gap. */
static int merge(int ndim, const int64_t *sizes, const int64_t *strides, int64_t *out_sizes, int64_t *out_strides)
{
    int n = 0;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 1) {
            continue;
        }
        if (n && out_strides[n - 1] == sizes[d] * strides[d]) {
            out_sizes[n - 1] *= sizes[d];
        } else {
            out_sizes[n++] = sizes[d];
        }
        out_strides[n - 1] = strides[d];
    }
    return n;
}

dcp_status dcp__lane_scatter(dcp__lane *l, char *dst, const int64_t *strides, int ndim, const int64_t *sizes, size_t elem_bytes,
                             const char *from, dcp_error *err)
{
    int64_t n[DCP_MAX_NDIM], step[DCP_MAX_NDIM], index[DCP_MAX_NDIM] = {0};
    int left = merge(ndim, sizes, strides, n, step);
    bool has_run = left > 0 && step[left - 1] == 1;
    size_t run = (has_run ? (size_t)n[left - 1] : 1) * elem_bytes;
    left -= has_run;
    for (;;) {
        int64_t at = dcp__element_at(left, index, step);
        dcp_status status = l->driver->ops->to_device(l->driver, l->index, dst + at * (int64_t)elem_bytes, from, run,
                                                      l->is_pinned, l->stream, err);
        if (status != DCP_OK) {
            return status;
        }
        from += run;
        int d = left - 1;
        while (d >= 0 && ++index[d] == n[d]) {
            index[d--] = 0;
        }
        if (d < 0) {
            return DCP_OK;
        }
    }
}
