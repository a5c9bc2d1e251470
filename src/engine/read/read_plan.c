/* Requests to a plan: which parts of which records, in what order. */
#include "engine/read/read_plan.h"

#include <stdlib.h>
#include <string.h>

#include "plan/coverage.h"
#include "state/strided.h"

#define SMALL_BYTES ((uint64_t)128 << 10) /* records up to this size are read whole */
#define WINDOW_GAP_BYTES ((uint64_t)16 << 10)

/* ---- requests ---- */

static dcp_status check_target(const dcp_item *item, const dcp_box *box, const dcp_tensor *dst, dcp_error *err)
{
    if (item->dtype == DCP_DTYPE_NONE) {
        return dcp__refuse_dtype(item, err);
    }
    if (dst->dtype != item->dtype) {
        return dcp__fail(err, DCP_MISMATCH, "it is %s, the target %s", dcp_dtype_name(item->dtype), dcp_dtype_name(dst->dtype));
    }
    if (dst->ndim != item->ndim) {
        return dcp__fail(err, DCP_MISMATCH, "it has %d dimensions, the target %d", item->ndim, dst->ndim);
    }
    for (int d = 0; d < item->ndim; d++) {
        if (dst->extents[d] != box->sizes[d]) {
            return dcp__fail(err, DCP_MISMATCH, "dimension %d: %lld wanted, the target has %lld", d, (long long)box->sizes[d],
                             (long long)dst->extents[d]);
        }
    }
    int64_t span;
    if (dst->strides && !dcp__span_elems(dst->ndim, dst->extents, dst->strides, &span)) {
        return dcp__fail(err, DCP_ARG, "the target's strides are negative or too large");
    }
    return DCP_OK;
}

static dcp_box whole_box(const dcp_item *item, int64_t zeros[DCP_MAX_NDIM])
{
    memset(zeros, 0, DCP_MAX_NDIM * sizeof *zeros);
    return (dcp_box){zeros, item->extents};
}

/* ---- pieces ---- */

static dcp_status add_piece(dcp__read_plan *r, const dcp_read_request *q, const dcp__entry *e, const dcp__chunk *c,
                            const dcp_box *wanted, dcp_error *err)
{
    int64_t in_wanted[DCP_MAX_NDIM], in_chunk[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    size_t ndim = (size_t)e->item.ndim;
    dcp_box chunk = {c->offsets, c->sizes};
    if (!dcp__box_overlap(e->item.ndim, wanted, &chunk, in_wanted, in_chunk, sizes)) {
        return DCP_OK;
    }
    int64_t *kept = dcp__arena_alloc(&r->arena, 3 * ndim * sizeof *kept);
    void *array = r->pieces;
    if (!kept || !dcp__grow(r->ck->ctx, &array, &r->cap_pieces, r->n_pieces + 1, sizeof *r->pieces)) {
        return dcp__nomem(err);
    }
    r->pieces = array;
    memcpy(kept, in_wanted, ndim * sizeof *kept);
    memcpy(kept + ndim, in_chunk, ndim * sizeof *kept);
    memcpy(kept + 2 * ndim, sizes, ndim * sizeof *kept);
    int64_t elems = 1;
    for (size_t d = 0; d < ndim; d++) {
        elems *= sizes[d]; /* part of a tensor whose size in bytes fits */
    }
    uint64_t bytes = (uint64_t)elems * dcp_dtype_bytes(e->item.dtype);
    r->pieces[r->n_pieces++] = (dcp__piece){q, e, c, kept, kept + ndim, kept + 2 * ndim, bytes};
    r->bytes += bytes;
    return DCP_OK;
}

/* The pieces from `first` on must tile the box exactly; PyTorch reads holes as whatever was there. */
static dcp_status check_coverage(dcp__read_plan *r, const dcp__entry *e, const dcp_box *wanted, size_t first, dcp_error *err)
{
    size_t n = r->n_pieces - first;
    int64_t elems;
    if (!dcp__elems(e->item.ndim, wanted->sizes, &elems)) {
        return dcp__fail(err, DCP_LIMIT, "its number of elements overflows");
    }
    if (n == 1 && r->pieces[first].bytes == (uint64_t)elems * dcp_dtype_bytes(e->item.dtype)) {
        return DCP_OK;
    }
    dcp__tiling t;
    dcp_box *boxes = dcp__alloc(r->ck->ctx, n * sizeof *boxes);
    if (!boxes) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        boxes[i] = (dcp_box){r->pieces[first + i].in_wanted, r->pieces[first + i].sizes};
    }
    dcp_status status = dcp__check_tiling(r->ck->ctx, e->item.ndim, wanted->sizes, boxes, n, &t, err);
    dcp__free(r->ck->ctx, boxes);
    if (status != DCP_OK || t.fault == DCP__TILING_OK) {
        return status;
    }
    if (t.fault == DCP__TILING_GAP) {
        for (int d = 0; d < e->item.ndim; d++) {
            t.at[d] += wanted->offsets[d];
        }
        return dcp__fail(err, DCP_FORMAT, "its chunks leave out %lld of the elements wanted, the first at %s",
                         (long long)t.missing, dcp__print_shape(e->item.ndim, t.at).text);
    }
    return dcp__fail(err, DCP_FORMAT, "its chunks overlap: %td and %td",
                     r->pieces[first + t.a].chunk - &r->ck->meta->chunks[e->first_chunk],
                     r->pieces[first + t.b].chunk - &r->ck->meta->chunks[e->first_chunk]);
}

static dcp_status add_request(dcp__read_plan *r, const dcp_read_request *q, dcp_error *err)
{
    int64_t zeros[DCP_MAX_NDIM];
    const dcp__entry *e = dcp__entry_of(q->item);
    dcp_box wanted = q->box.offsets || q->item->ndim == 0 ? q->box : whole_box(q->item, zeros);
    if (q->item->kind != DCP_ITEM_TENSOR) {
        return dcp__fail(err, DCP_MISMATCH, "it is an object, not a tensor");
    }
    dcp_status status = dcp__check_box(q->item, &wanted, err);
    status = status == DCP_OK ? check_target(q->item, &wanted, &q->dst, err) : status;
    size_t first = r->n_pieces;
    for (size_t i = 0; i < q->item->n_chunks && status == DCP_OK; i++) {
        status = add_piece(r, q, e, &r->ck->meta->chunks[e->first_chunk + i], &wanted, err);
    }
    if (status == DCP_OK && r->n_pieces > first && !q->dst.data) {
        status = dcp__fail(err, DCP_ARG, "the target has no memory");
    }
    return status == DCP_OK ? check_coverage(r, e, &wanted, first, err) : status;
}

/* ---- units and steps ---- */

static const dcp__storage *storage_of(const dcp__read_plan *r, const dcp__piece *p)
{
    return &r->ck->meta->storages[p->chunk->storage];
}

static int compare_storages(const dcp__storage *a, const dcp__storage *b)
{
    if (a->file != b->file) {
        return a->file < b->file ? -1 : 1;
    }
    if (a->offset != b->offset) {
        return a->offset < b->offset ? -1 : 1;
    }
    return (a > b) - (a < b);
}

static int compare_pieces(const void *a, const void *b, void *arg)
{
    const dcp__piece *x = a, *y = b;
    int order = compare_storages(storage_of(arg, x), storage_of(arg, y));
    return order ? order : (x->chunk > y->chunk) - (x->chunk < y->chunk);
}

static dcp_status check_places(const dcp__read_plan *r, dcp_error *err)
{
    for (size_t i = 0; i < r->n_pieces; i++) {
        if (r->pieces[i].chunk->storage == DCP__NO_STORAGE) {
            const dcp__entry *e = r->pieces[i].entry;
            dcp__fail(err, DCP_FORMAT, "the metadata names no place for chunk %td",
                      r->pieces[i].chunk - &r->ck->meta->chunks[e->first_chunk]);
            return dcp__in_item(r->ck, -1, e->item.fqn, DCP_FORMAT, err);
        }
    }
    return DCP_OK;
}

static dcp_status make_units(dcp__read_plan *r, dcp_error *err)
{
    r->units = dcp__alloc(r->ck->ctx, r->n_pieces * sizeof *r->units);
    if (!r->units) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < r->n_pieces; i++) {
        if (i == 0 || r->pieces[i].chunk != r->pieces[i - 1].chunk) {
            r->units[r->n_units++] = (dcp__unit){i, 0, storage_of(r, &r->pieces[i])};
        }
        r->units[r->n_units - 1].n++;
    }
    return DCP_OK;
}

bool dcp__is_small(const dcp__storage *s)
{
    return s->length <= SMALL_BYTES && s->transforms == 0 && s->length <= UINT64_MAX - s->offset;
}

static dcp_status make_steps(dcp__read_plan *r, dcp_error *err)
{
    r->steps = dcp__alloc(r->ck->ctx, r->n_units * sizeof *r->steps);
    if (!r->steps) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < r->n_units; i++) {
        const dcp__storage *s = r->units[i].storage;
        dcp__read_step *last = r->n_steps ? &r->steps[r->n_steps - 1] : NULL;
        bool small = dcp__is_small(s);
        if (small && last && last->is_window && r->units[last->first].storage->file == s->file &&
            s->offset <= last->hi + WINDOW_GAP_BYTES && s->offset + s->length - last->lo <= DCP__WINDOW_BYTES) {
            last->n++;
            last->hi = s->offset + s->length > last->hi ? s->offset + s->length : last->hi;
        } else {
            r->steps[r->n_steps++] = (dcp__read_step){i, 1, s->offset, s->offset + s->length, small};
        }
    }
    return DCP_OK;
}
/* ---- all ---- */

static dcp_status plan_requests(dcp__read_plan *r, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (!requests[i].item) {
            return dcp__fail(err, DCP_ARG, "read: request %zu has no item", i);
        }
        dcp_status status = add_request(r, &requests[i], err);
        if (status != DCP_OK) {
            return dcp__in_item(r->ck, -1, requests[i].item->fqn, status, err);
        }
    }
    return check_places(r, err);
}

/* Elsewhere a record has the storage of one tensor. */
static dcp_status remember_crcs(dcp__read_plan *r, dcp_error *err)
{
    if (r->ck->values && r->ck->check_crc && !r->ck->compared) {
        r->compared = dcp__calloc(r->ck->ctx, r->ck->archive.object.n_storages, sizeof *r->compared);
        return r->compared ? DCP_OK : dcp__nomem(err);
    }
    return DCP_OK;
}

static dcp_status order_pieces(dcp__read_plan *r, dcp_error *err)
{
    if (r->n_pieces == 0) {
        return DCP_OK;
    }
    dcp_status status = remember_crcs(r, err);
    if (status != DCP_OK) {
        return status;
    }
    qsort_r(r->pieces, r->n_pieces, sizeof *r->pieces, compare_pieces, r);
    status = make_units(r, err);
    return status == DCP_OK ? make_steps(r, err) : status;
}

dcp_status dcp__plan_read(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, dcp__read_plan *r, dcp_error *err)
{
    *r = (dcp__read_plan){.ck = ck};
    dcp__arena_init(&r->arena, ck->ctx, UINT64_MAX);
    dcp_status status = plan_requests(r, requests, n, err);
    return status == DCP_OK ? order_pieces(r, err) : status;
}

dcp_status dcp__plan_pieces(dcp_checkpoint *ck, const dcp__piece *pieces, size_t n, dcp__read_plan *r, dcp_error *err)
{
    *r = (dcp__read_plan){.ck = ck};
    dcp__arena_init(&r->arena, ck->ctx, UINT64_MAX);
    r->pieces = dcp__calloc(ck->ctx, n, sizeof *r->pieces);
    if (!r->pieces) {
        return dcp__nomem(err);
    }
    for (; r->n_pieces < n; r->n_pieces++) {
        r->pieces[r->n_pieces] = pieces[r->n_pieces];
        r->bytes += pieces[r->n_pieces].bytes;
    }
    dcp_status status = check_places(r, err);
    return status == DCP_OK ? order_pieces(r, err) : status;
}

void dcp__read_plan_reset(dcp__read_plan *r)
{
    dcp__arena_reset(&r->arena);
    dcp__free(r->ck->ctx, r->pieces);
    dcp__free(r->ck->ctx, r->units);
    dcp__free(r->ck->ctx, r->steps);
    dcp__free(r->ck->ctx, r->compared);
}
