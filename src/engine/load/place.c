#include "engine/load/place.h"

#include <stdlib.h>

#include "plan/coverage.h"
#include "state/numbers.h"
#include "state/strided.h"

static int compare_by_item(const void *a, const void *b)
{
    const dcp__entry *x = dcp__entry_of((*(const dcp_read_request *const *)a)->item);
    const dcp__entry *y = dcp__entry_of((*(const dcp_read_request *const *)b)->item);
    return (x > y) - (x < y);
}

dcp_status dcp__placer_init(dcp__placer *p, dcp_context *ctx, const dcp_read_request *requests, size_t n, void *stream,
                            dcp_error *err)
{
    *p = (dcp__placer){.n = n};
    dcp__buf_init(&p->packed, ctx);
    dcp__buf_init(&p->cast, ctx);
    p->requests = dcp__calloc(ctx, n, sizeof *p->requests);
    if (!p->requests) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        p->requests[i] = &requests[i];
    }
    if (n) {
        qsort(p->requests, n, sizeof *p->requests, compare_by_item);
    }
    return dcp__device_targets_use(ctx, requests, n, stream, &p->transfer, err);
}

void dcp__placer_reset(dcp__placer *p)
{
    dcp__transfer_free(p->transfer);
    dcp__free(p->packed.ctx, p->requests);
    dcp__buf_reset(&p->packed);
    dcp__buf_reset(&p->cast);
}

dcp_status dcp__placer_sync(dcp__placer *p, dcp_error *err)
{
    return p->transfer ? dcp__transfer_sync(p->transfer, err) : DCP_OK;
}

/* The first request for an entry, or for one behind it. */
static size_t first_request(const dcp__placer *p, const dcp__entry *e)
{
    size_t from = 0, to = p->n;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (dcp__entry_of(p->requests[middle]->item) < e) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return from;
}

/* Elements in host memory: sizes of a box, strides in elements. */
typedef struct view {
    const char *data;
    dcp_dtype dtype;
    int ndim;
    const int64_t *sizes;
    int64_t strides[DCP_MAX_NDIM];
} view;

static const char *view_at(const view *v, const int64_t *offsets)
{
    return v->data + dcp__element_at(v->ndim, offsets, v->strides) * (int64_t)dcp_dtype_bytes(v->dtype);
}

static bool make_room(dcp__buf *b, size_t bytes)
{
    b->len = 0;
    return dcp__buf_reserve(b, bytes);
}

/* Packs the elements and casts them: *v is them then. */
static dcp_status cast(dcp__placer *p, view *v, dcp_dtype to, dcp_error *err)
{
    int64_t elems, strides[DCP_MAX_NDIM];
    size_t in = dcp_dtype_bytes(v->dtype), out = dcp_dtype_bytes(to);
    dcp__elems(v->ndim, v->sizes, &elems);
    if (!make_room(&p->packed, (size_t)elems * in) || !make_room(&p->cast, (size_t)elems * out)) {
        return dcp__nomem(err);
    }
    dcp__row_major(v->ndim, v->sizes, strides);
    dcp__copy_strided(p->packed.data, strides, v->data, v->strides, v->ndim, v->sizes, in);
    dcp__cast(v->dtype, p->packed.data, to, p->cast.data, (size_t)elems);
    *v = (view){.data = (char *)p->cast.data, .dtype = to, .ndim = v->ndim, .sizes = v->sizes};
    dcp__row_major(v->ndim, v->sizes, v->strides);
    return DCP_OK;
}

static dcp_status copy_to_device(dcp__lane *l, const view *v, char *dst, const int64_t *strides, dcp_error *err)
{
    int64_t elems, offsets[DCP_MAX_NDIM], part[DCP_MAX_NDIM], packed[DCP_MAX_NDIM];
    size_t each = dcp_dtype_bytes(v->dtype);
    dcp_status status = DCP_OK;
    dcp__elems(v->ndim, v->sizes, &elems);
    for (int64_t at = 0; at < elems && status == DCP_OK;) {
        char *ring;
        int64_t n = dcp__box_at(v->ndim, v->sizes, at, (int64_t)(l->slot_bytes / each), offsets, part);
        status = dcp__lane_reserve(l, (size_t)n * each, &ring, err);
        if (status == DCP_OK) {
            dcp__row_major(v->ndim, part, packed);
            dcp__copy_strided(ring, packed, view_at(v, offsets), v->strides, v->ndim, part, each);
            int64_t to = dcp__element_at(v->ndim, offsets, strides);
            status = dcp__lane_scatter(l, dst + to * (int64_t)each, strides, v->ndim, part, each, ring, err);
        }
        at += n;
    }
    return status;
}

static dcp_status to_device(dcp__placer *p, dcp_device device, const view *v, char *dst, const int64_t *strides, dcp_error *err)
{
    dcp__lane *l;
    dcp_status status = dcp__lane_acquire(p->transfer, device, &l, err);
    if (status == DCP_OK) {
        status = copy_to_device(l, v, dst, strides, err);
        dcp__lane_release(p->transfer, l);
    }
    return status;
}

/* v: the part that the request wants, which begins at `at` of its target. */
static dcp_status place_part(dcp__placer *p, const dcp_read_request *r, view *v, const int64_t *at, dcp_error *err)
{
    const dcp_tensor *t = &r->dst;
    size_t each = dcp_dtype_bytes(t->dtype);
    int64_t row_major[DCP_MAX_NDIM];
    dcp_status status = t->dtype == v->dtype ? DCP_OK : cast(p, v, t->dtype, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__row_major(t->ndim, t->extents, row_major);
    const int64_t *strides = t->strides ? t->strides : row_major;
    char *dst = (char *)t->data + dcp__element_at(t->ndim, at, strides) * (int64_t)each;
    if (t->device.type != DCP_DEVICE_CPU) {
        return to_device(p, t->device, v, dst, strides, err);
    }
    dcp__copy_strided(dst, strides, v->data, v->strides, t->ndim, v->sizes, each);
    return DCP_OK;
}

static dcp_status place_box(dcp__placer *p, const dcp_read_request *r, const dcp_box *box, const view *whole, uint64_t *bytes,
                            dcp_error *err)
{
    static const int64_t zeros[DCP_MAX_NDIM];
    int64_t in_target[DCP_MAX_NDIM], in_box[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], elems;
    dcp_box wanted = r->box.offsets ? r->box : (dcp_box){zeros, r->item->extents};
    if (!dcp__box_overlap(whole->ndim, &wanted, box, in_target, in_box, sizes)) {
        return DCP_OK;
    }
    view part = *whole;
    part.data = view_at(whole, in_box);
    part.sizes = sizes;
    dcp__elems(whole->ndim, sizes, &elems);
    dcp_status status = place_part(p, r, &part, in_target, err);
    *bytes += status == DCP_OK ? (uint64_t)elems * dcp_dtype_bytes(r->dst.dtype) : 0;
    return status;
}

dcp_status dcp__place(dcp__placer *p, const dcp__entry *e, const dcp_box *box, const void *from, uint64_t *bytes, dcp_error *err)
{
    dcp_status status = DCP_OK;
    view whole = {.data = from, .dtype = e->item.dtype, .ndim = e->item.ndim, .sizes = box->sizes};
    dcp__row_major(whole.ndim, whole.sizes, whole.strides);
    for (size_t i = first_request(p, e); i < p->n && dcp__entry_of(p->requests[i]->item) == e && status == DCP_OK; i++) {
        status = place_box(p, p->requests[i], box, &whole, bytes, err);
    }
    return status == DCP_OK ? DCP_OK : dcp__prefix(err, status, "item \"%s\": ", dcp__print(e->item.fqn).text);
}
