#include "engine/stage/tensor_pairs.h"

#include <stdlib.h>

#include "base/pages.h"
#include "base/pool.h"
#include "base/stream_copy.h"
#include "engine/save/device_source.h"
#include "engine/save/write_records.h"
#include "state/numbers.h"
#include "state/strided.h"

#define PART_BYTES ((size_t)4 << 20) /* what one thread copies at a time, on the side of the larger elements */
#define RING_SLOTS 2

dcp_status dcp__tensor_pairs_add(dcp__tensor_pairs *p, const dcp_tensor *from, const dcp_tensor *to, dcp_error *err)
{
    int64_t elems;
    void *array = p->pairs;
    if (!dcp__elems(from->ndim, from->extents, &elems)) {
        return dcp__fail(err, DCP_LIMIT, "a tensor of %s has too many elements",
                         dcp__print_shape(from->ndim, from->extents).text);
    }
    if (elems == 0) {
        return DCP_OK;
    }
    if (!dcp__grow(p->ctx, &array, &p->cap, p->n + 1, sizeof *p->pairs)) {
        return dcp__nomem(err);
    }
    p->pairs = array;
    p->pairs[p->n] = (dcp__tensor_pair){*from, *to, elems, p->n};
    p->n++;
    return DCP_OK;
}

void dcp__tensor_pairs_reset(dcp__tensor_pairs *p)
{
    dcp__free(p->ctx, p->pairs);
    *p = (dcp__tensor_pairs){.ctx = p->ctx};
}

/* ---- one part ---- */

/* Elements [first, first + n) of a pair, in row-major order. */
typedef struct part {
    const dcp__tensor_pair *pair;
    int64_t first, n;
} part;

typedef struct copying {
    dcp_context *ctx;
    dcp__transfer *transfer; /* NULL: nothing lies on a device */
    part *parts;
    size_t n;
} copying;

/* Row-major bytes of a part: where they lie, or in buf. */
static dcp_status fetch(const copying *c, const part *p, void *buf, const void **out, dcp_error *err)
{
    const dcp_tensor *from = &p->pair->from;
    size_t elem = dcp_dtype_bytes(from->dtype), n = (size_t)p->n * elem;
    uint64_t offset = (uint64_t)p->first * elem;
    if (from->device.type == DCP_DEVICE_CPU) {
        const uint8_t *bytes;
        dcp_status status = dcp__item_bytes(&(dcp_write_item){.tensor = *from}, offset, n, buf, &bytes, err);
        *out = bytes;
        return status;
    }
    dcp__lane *lane;
    dcp_status status = dcp__lane_acquire(c->transfer, from->device, &lane, err);
    if (status == DCP_OK) {
        status = dcp__lane_gather(lane, from, offset, n, buf, err);
        dcp__lane_release(c->transfer, lane);
    }
    *out = buf;
    return status;
}

/* Puts row-major elements where they belong in a view. */
static void scatter(const part *p, const char *elements)
{
    const dcp_tensor *to = &p->pair->to;
    size_t elem = dcp_dtype_bytes(to->dtype);
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], row_major[DCP_MAX_NDIM];
    for (int64_t done = 0; done < p->n;) {
        int64_t n = dcp__box_at(to->ndim, to->extents, p->first + done, p->n - done, offsets, sizes);
        int64_t at = dcp__element_at(to->ndim, offsets, to->strides);
        dcp__row_major(to->ndim, sizes, row_major);
        dcp__copy_strided((char *)to->data + at * (int64_t)elem, to->strides, elements + (size_t)done * elem, row_major, to->ndim,
                          sizes, elem);
        done += n;
    }
}

/* Casts where the dtypes differ, through `buf`; into `at`, or scattered if that is NULL. */
static void put(const part *p, const void *bytes, char *buf, char *at)
{
    dcp_dtype from = p->pair->from.dtype, to = p->pair->to.dtype;
    if (from != to) {
        char *cast = at ? at : buf;
        dcp__cast(from, bytes, to, cast, (size_t)p->n);
        bytes = cast;
    }
    if (!at) {
        scatter(p, bytes);
    } else if (bytes != at) {
        dcp__stream_copy(at, bytes, (size_t)p->n * dcp_dtype_bytes(to));
    }
}

/* Linear targets of the same dtype are filled straight away. */
static dcp_status copy_part(void *arg, size_t i, int worker, dcp_error *err)
{
    (void)worker;
    const copying *c = arg;
    const part *p = &c->parts[i];
    const dcp_tensor *from = &p->pair->from, *to = &p->pair->to;
    bool is_cast = from->dtype != to->dtype;
    size_t from_bytes = (size_t)p->n * dcp_dtype_bytes(from->dtype), to_bytes = (size_t)p->n * dcp_dtype_bytes(to->dtype);
    char *at = NULL, *buf = NULL;
    const void *bytes;
    if (dcp__is_row_major(to->ndim, to->extents, to->strides)) {
        at = (char *)to->data + (uint64_t)p->first * dcp_dtype_bytes(to->dtype);
        dcp__pages_expect(at, to_bytes);
    }
    if (!at || is_cast) {
        buf = dcp__alloc(c->ctx, from_bytes + to_bytes);
        if (!buf) {
            return dcp__nomem(err);
        }
    }
    dcp_status status = fetch(c, p, buf ? buf : at, &bytes, err);
    if (status == DCP_OK) {
        put(p, bytes, buf ? buf + from_bytes : NULL, at);
    }
    dcp__free(c->ctx, buf);
    return status;
}

/* ---- all ---- */

static int compare_targets(const void *a, const void *b)
{
    const dcp__tensor_pair *x = a, *y = b;
    if (x->to.data != y->to.data) {
        return (uintptr_t)x->to.data < (uintptr_t)y->to.data ? -1 : 1;
    }
    return (x->order > y->order) - (x->order < y->order);
}

/* Pairs are sorted by target: one of those that are not the last of theirs? */
static bool is_overwritten(const dcp__tensor_pairs *pairs, size_t i)
{
    const dcp__tensor_pair *p = &pairs->pairs[i];
    return i + 1 < pairs->n && p[1].to.data == p->to.data && p[1].elems == p->elems && p[1].to.dtype == p->to.dtype;
}

static int64_t elems_of_part(const dcp__tensor_pair *p)
{
    size_t from = dcp_dtype_bytes(p->from.dtype), to = dcp_dtype_bytes(p->to.dtype);
    return (int64_t)(PART_BYTES / (from > to ? from : to));
}

static dcp_status cut_parts(copying *c, const dcp__tensor_pairs *pairs, dcp_error *err)
{
    size_t most = 0;
    for (size_t i = 0; i < pairs->n; i++) {
        most += (size_t)(pairs->pairs[i].elems / elems_of_part(&pairs->pairs[i])) + 1;
    }
    c->parts = dcp__alloc(c->ctx, most * sizeof *c->parts);
    if (!c->parts) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < pairs->n; i++) {
        const dcp__tensor_pair *p = &pairs->pairs[i];
        int64_t most_elems = elems_of_part(p);
        for (int64_t at = 0; at < p->elems && !is_overwritten(pairs, i); at += most_elems) {
            c->parts[c->n++] = (part){p, at, p->elems - at < most_elems ? p->elems - at : most_elems};
        }
    }
    return DCP_OK;
}

static dcp_status use_devices(copying *c, const dcp__tensor_pairs *pairs, void *stream, dcp_error *err)
{
    dcp__transfer_opts opts = {.stream = stream, .slot_bytes = DCP__DEVICE_SLOT_BYTES, .n_slots = RING_SLOTS};
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < pairs->n && status == DCP_OK; i++) {
        const dcp_tensor *from = &pairs->pairs[i].from;
        if (from->device.type == DCP_DEVICE_CPU) {
            continue;
        }
        status = c->transfer ? DCP_OK : dcp__transfer_create(c->ctx, &opts, &c->transfer, err);
        status = status == DCP_OK ? dcp__transfer_use(c->transfer, from->device, err) : status;
    }
    return status;
}

dcp_status dcp__tensor_pairs_copy(dcp__tensor_pairs *pairs, void *stream, dcp_error *err)
{
    copying c = {.ctx = pairs->ctx};
    if (pairs->n) {
        qsort(pairs->pairs, pairs->n, sizeof *pairs->pairs, compare_targets);
    }
    dcp_status status = use_devices(&c, pairs, stream, err);
    status = status == DCP_OK ? cut_parts(&c, pairs, err) : status;
    status = status == DCP_OK ? dcp__parallel(c.n, c.ctx->threads, copy_part, &c, err) : status;
    dcp__transfer_free(c.transfer);
    dcp__free(c.ctx, c.parts);
    return status;
}
