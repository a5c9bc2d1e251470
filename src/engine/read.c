/* Reading boxes of tensors.
 *
 * requests -> pieces (a request's overlap with one chunk) -> units (all pieces of one storage range), sorted by file and offset
 * -> steps: neighbouring small units are read together as one window, a large one is located first and then read in parts. */
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "engine/engine.h"
#include "plan/coverage.h"
#include "state/strided.h"

#define SMALL_BYTES ((uint64_t)128 << 10) /* records up to this size are read whole */
#define WINDOW_BYTES ((uint64_t)4 << 20)
#define WINDOW_GAP_BYTES ((uint64_t)16 << 10)
#define PART_BYTES ((uint64_t)8 << 20)
#define BATCH_STEPS 64
#define ONE_WORKER_BYTES ((uint64_t)1 << 20) /* less is not worth a thread */

typedef struct piece {
    const dcp_read_request *request;
    const dcp__entry *entry;
    const dcp__chunk *chunk;
    const int64_t *in_wanted, *in_chunk, *sizes; /* ndim each */
    uint64_t bytes;
} piece;

typedef struct unit {
    size_t first, n; /* pieces */
    const dcp__storage *storage;
} unit;

typedef struct step {
    size_t first, n; /* units; one if it is large */
    uint64_t lo, hi; /* a window's bytes in the file */
    bool is_window;
} step;

/* A part of a step for one worker: a window, or the indexes [from, to) of one dimension of a piece. */
typedef struct part {
    const step *step;
    size_t located; /* index in run.located */
    const piece *piece;
    int dim;
    int64_t from, to;
} part;

typedef struct worker {
    dcp__tile_buf window, tile;
} worker;

typedef struct run {
    dcp_checkpoint *ck;
    dcp__arena arena; /* pieces' boxes */
    piece *pieces;
    size_t n_pieces, cap_pieces;
    unit *units;
    size_t n_units;
    step *steps;
    size_t n_steps;
    const step *batch; /* steps being read */
    size_t n_batch;
    dcp__located located[BATCH_STEPS];
    part *parts;
    size_t n_parts, cap_parts;
    worker *workers;
    int n_workers;
    uint64_t bytes;
} run;

/* ---- requests ---- */

static dcp_status check_box(const dcp_item *item, const dcp_box *box, dcp_error *err)
{
    for (int d = 0; d < item->ndim; d++) {
        int64_t offset = box->offsets[d], size = box->sizes[d];
        if (offset < 0 || size < 0 || offset > item->extents[d] || size > item->extents[d] - offset) {
            return dcp__fail(err, DCP_ARG, "box [%lld, %lld) of dimension %d exceeds its extent %lld", (long long)offset,
                             (long long)offset + (long long)size, d, (long long)item->extents[d]);
        }
    }
    return DCP_OK;
}

static dcp_status check_target(const dcp_item *item, const dcp_box *box, const dcp_tensor *dst, dcp_error *err)
{
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
    if (dst->device.type != DCP_DEVICE_CPU) {
        return dcp__fail(err, DCP_UNSUPPORTED, "the target is not in host memory");
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

static dcp_status add_piece(run *r, const dcp_read_request *q, const dcp__entry *e, const dcp__chunk *c, const dcp_box *wanted,
                            dcp_error *err)
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
    r->pieces[r->n_pieces++] = (piece){q, e, c, kept, kept + ndim, kept + 2 * ndim, bytes};
    r->bytes += bytes;
    return DCP_OK;
}

/* The pieces from `first` on must tile the box exactly; PyTorch reads holes as whatever was there. */
static dcp_status check_coverage(run *r, const dcp__entry *e, const dcp_box *wanted, size_t first, dcp_error *err)
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
        return dcp__fail(err, DCP_FORMAT, "its chunks leave out %lld of the elements wanted", (long long)t.missing);
    }
    return dcp__fail(err, DCP_FORMAT, "its chunks overlap: %td and %td",
                     r->pieces[first + t.a].chunk - &r->ck->meta->chunks[e->first_chunk],
                     r->pieces[first + t.b].chunk - &r->ck->meta->chunks[e->first_chunk]);
}

static dcp_status add_request(run *r, const dcp_read_request *q, dcp_error *err)
{
    int64_t zeros[DCP_MAX_NDIM];
    const dcp__entry *e = dcp__entry_of(q->item);
    dcp_box wanted = q->box.offsets || q->item->ndim == 0 ? q->box : whole_box(q->item, zeros);
    if (q->item->kind != DCP_ITEM_TENSOR) {
        return dcp__fail(err, DCP_MISMATCH, "it is an object, not a tensor");
    }
    dcp_status status = check_box(q->item, &wanted, err);
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

static const dcp__storage *storage_of(const run *r, const piece *p)
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
    const piece *x = a, *y = b;
    int order = compare_storages(storage_of(arg, x), storage_of(arg, y));
    return order ? order : (x->chunk > y->chunk) - (x->chunk < y->chunk);
}

static dcp_status check_places(const run *r, dcp_error *err)
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

static dcp_status make_units(run *r, dcp_error *err)
{
    r->units = dcp__alloc(r->ck->ctx, r->n_pieces * sizeof *r->units);
    if (!r->units) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < r->n_pieces; i++) {
        if (i == 0 || r->pieces[i].chunk != r->pieces[i - 1].chunk) {
            r->units[r->n_units++] = (unit){i, 0, storage_of(r, &r->pieces[i])};
        }
        r->units[r->n_units - 1].n++;
    }
    return DCP_OK;
}

static bool is_small(const dcp__storage *s)
{
    return s->length <= SMALL_BYTES && s->transforms == 0 && s->length <= UINT64_MAX - s->offset;
}

static dcp_status make_steps(run *r, dcp_error *err)
{
    r->steps = dcp__alloc(r->ck->ctx, r->n_units * sizeof *r->steps);
    if (!r->steps) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < r->n_units; i++) {
        const dcp__storage *s = r->units[i].storage;
        step *last = r->n_steps ? &r->steps[r->n_steps - 1] : NULL;
        bool small = is_small(s);
        if (small && last && last->is_window && r->units[last->first].storage->file == s->file &&
            s->offset <= last->hi + WINDOW_GAP_BYTES && s->offset + s->length - last->lo <= WINDOW_BYTES) {
            last->n++;
            last->hi = s->offset + s->length > last->hi ? s->offset + s->length : last->hi;
        } else {
            r->steps[r->n_steps++] = (step){i, 1, s->offset, s->offset + s->length, small};
        }
    }
    return DCP_OK;
}

/* ---- copying out ---- */

/* Reads the indexes [from, to) of dimension dim of a piece (dim -1: all of it). */
static dcp_status read_piece(const piece *p, const dcp__source *src, const dcp__payload *payload, int dim, int64_t from,
                             int64_t to, dcp__tile_buf *buf, dcp_error *err)
{
    int64_t start[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], strides[DCP_MAX_NDIM];
    const dcp_tensor *dst = &p->request->dst;
    if (!dst->strides) {
        dcp__row_major(dst->ndim, dst->extents, strides);
    }
    int64_t at = 0;
    for (int d = 0; d < dst->ndim; d++) {
        strides[d] = dst->strides ? dst->strides[d] : strides[d];
        int64_t skip = d == dim ? from : 0;
        start[d] = p->in_chunk[d] + skip;
        sizes[d] = d == dim ? to - from : p->sizes[d];
        at += (p->in_wanted[d] + skip) * strides[d];
    }
    char *first = (char *)dst->data + at * (int64_t)dcp_dtype_bytes(dst->dtype);
    return dcp__read_box(src, payload, start, sizes, first, strides, buf, err);
}

static bool reads_whole_chunk(const run *r, const unit *u)
{
    for (size_t i = 0; i < u->n; i++) {
        const piece *p = &r->pieces[u->first + i];
        if (memcmp(p->sizes, p->chunk->sizes, (size_t)p->entry->item.ndim * sizeof *p->sizes) == 0) {
            return true;
        }
    }
    return false;
}

static dcp_status check_crc(const run *r, const unit *u, const dcp__source *src, const dcp__payload *p, dcp__tile_buf *buf,
                            dcp_error *err)
{
    if (!r->ck->check_crc || !p->storage.has_crc || p->storage.is_deflated || !reads_whole_chunk(r, u)) {
        return DCP_OK;
    }
    uint8_t *block = dcp__alloc(buf->ctx, WINDOW_BYTES);
    if (!block) {
        return dcp__nomem(err);
    }
    uint32_t crc = 0;
    dcp_status status = DCP_OK;
    for (uint64_t done = 0; done < p->storage.bytes && status == DCP_OK;) {
        size_t n = p->storage.bytes - done < WINDOW_BYTES ? (size_t)(p->storage.bytes - done) : WINDOW_BYTES;
        status = dcp__source_read(src, p->storage.offset + done, block, n, err);
        crc = status == DCP_OK ? dcp__crc32(crc, block, n) : crc;
        done += n;
    }
    dcp__free(buf->ctx, block);
    if (status == DCP_OK && crc != p->storage.crc) {
        return dcp__fail_at(err, DCP_CHECKSUM, p->storage.offset, "crc-32 of the payload is %08x, the record says %08x", crc,
                            p->storage.crc);
    }
    return status;
}

/* ---- windows ---- */

/* A payload inside the window's buffer; false if the bytes are of a form that has to be located in the file. */
static bool locate_in_window(const run *r, const step *s, const unit *u, const uint8_t *data, dcp__located *out,
                             dcp_status *status, dcp_error *err)
{
    const dcp_checkpoint *ck = r->ck;
    const piece *p = &r->pieces[u->first];
    const uint8_t *bytes = data + (u->storage->offset - s->lo);
    *out = (dcp__located){.file = u->storage->file, .file_offset = u->storage->offset};
    out->source = dcp__source_memory(bytes, u->storage->length);
    if (ck->values || u->storage->form == DCP__FORM_RAW) {
        return false;
    }
    dcp__sniff form = dcp__sniff_bytes(bytes, u->storage->length, u->storage->length);
    if (form != DCP__IS_ZIP && form != DCP__IS_LEGACY) {
        return false;
    }
    *status = dcp__record_payload(ck->ctx, &out->source, &out->payload, err);
    if (*status == DCP_OK) {
        *status = dcp__check_payload(p->entry, p->chunk, &out->payload, err);
    }
    return *status != DCP_OK || !out->payload.storage.is_deflated;
}

/* A payload that was located in the file, read from the window instead where it lies in it. */
static void aim_at_window(const step *s, const uint8_t *data, dcp__located *l)
{
    const dcp__payload *p = &l->payload;
    if (l->file_offset == 0 && p->offset >= s->lo && p->span_bytes <= s->hi - s->lo &&
        p->offset - s->lo <= s->hi - s->lo - p->span_bytes && p->storage.offset >= s->lo) {
        l->source = dcp__source_memory(data, s->hi - s->lo);
        l->payload.offset -= s->lo;
        l->payload.storage.offset -= s->lo;
        l->file_offset = s->lo;
    }
}

static dcp_status read_unit_of_window(const run *r, const step *s, const unit *u, const uint8_t *data, dcp__tile_buf *buf,
                                      dcp_error *err)
{
    dcp__located l;
    dcp_status status = DCP_OK;
    const piece *first = &r->pieces[u->first];
    if (!locate_in_window(r, s, u, data, &l, &status, err)) {
        status = dcp__locate_chunk(r->ck, first->entry, first->chunk, &l, err);
        if (status == DCP_OK) {
            aim_at_window(s, data, &l);
        }
    }
    status = status == DCP_OK ? check_crc(r, u, &l.source, &l.payload, buf, err) : status;
    for (size_t i = 0; i < u->n && status == DCP_OK; i++) {
        status = read_piece(first + i, &l.source, &l.payload, -1, 0, 0, buf, err);
    }
    if (status != DCP_OK) {
        dcp__to_file_offset(&l, err);
    }
    dcp__located_release(r->ck, &l);
    return status == DCP_OK ? status : dcp__in_item(r->ck, u->storage->file, first->entry->item.fqn, status, err);
}

/* Reads what there is of a window; a file that ends early is left to the units that it concerns. */
static dcp_status fill_window(const run *r, const step *s, dcp__tile_buf *buf, dcp_error *err)
{
    uint32_t index = r->units[s->first].storage->file;
    size_t n = (size_t)(s->hi - s->lo);
    dcp_file *f;
    uint64_t bytes;
    if (buf->bytes < n) {
        dcp__tile_buf_reset(buf);
        buf->data = dcp__alloc_aligned(buf->ctx, 4096, n < WINDOW_BYTES ? WINDOW_BYTES : n);
        if (!buf->data) {
            return dcp__nomem(err);
        }
        buf->bytes = n < WINDOW_BYTES ? WINDOW_BYTES : n;
    }
    dcp_status status = dcp__file_acquire(r->ck, index, &f, &bytes, err);
    if (status == DCP_OK) {
        status = dcp__read_exact(f, buf->data, n, s->lo, err);
        dcp__file_release(r->ck, index);
    }
    return status;
}

/* Names the item whose record the end of the file cuts, rather than the window. */
static dcp_status blame_unit(const run *r, const step *s, dcp_status status, dcp_error *err)
{
    const unit *u = &r->units[s->first];
    for (size_t i = 0; err && err->offset != DCP_NO_OFFSET && i < s->n; i++) {
        const dcp__storage *st = r->units[s->first + i].storage;
        if (st->offset + st->length > err->offset) {
            u = &r->units[s->first + i];
            break;
        }
    }
    return dcp__in_item(r->ck, u->storage->file, r->pieces[u->first].entry->item.fqn, status, err);
}

static dcp_status read_window(const run *r, const step *s, worker *w, dcp_error *err)
{
    dcp_status status = fill_window(r, s, &w->window, err);
    if (status != DCP_OK) {
        return blame_unit(r, s, status, err);
    }
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        status = read_unit_of_window(r, s, &r->units[s->first + i], w->window.data, &w->tile, err);
    }
    return status;
}

/* ---- large units ---- */

static dcp_status locate_step(void *arg, size_t i, int w, dcp_error *err)
{
    run *r = arg;
    const step *s = &r->batch[i];
    const unit *u = &r->units[s->first];
    const piece *first = &r->pieces[u->first];
    dcp__located *l = &r->located[i];
    *l = (dcp__located){0};
    if (s->is_window) {
        return DCP_OK;
    }
    dcp_status status = dcp__locate_chunk(r->ck, first->entry, first->chunk, l, err);
    status = status == DCP_OK ? check_crc(r, u, &l->source, &l->payload, &r->workers[w].tile, err) : status;
    return status == DCP_OK ? status : dcp__in_item(r->ck, u->storage->file, first->entry->item.fqn, status, err);
}

static dcp_status add_part(run *r, part p, dcp_error *err)
{
    void *array = r->parts;
    if (!dcp__grow(r->ck->ctx, &array, &r->cap_parts, r->n_parts + 1, sizeof *r->parts)) {
        return dcp__nomem(err);
    }
    r->parts = array;
    r->parts[r->n_parts++] = p;
    return DCP_OK;
}

/* The dimension that lies outermost in the file, so that parts are ranges that follow each other. */
static int outermost(const piece *p, const dcp__payload *payload)
{
    int best = -1;
    for (int d = 0; d < payload->ndim; d++) {
        if (p->sizes[d] > 1 && (best < 0 || payload->strides[d] > payload->strides[best])) {
            best = d;
        }
    }
    return best;
}

static dcp_status cut_piece(run *r, size_t located, const piece *p, dcp_error *err)
{
    int dim = outermost(p, &r->located[located].payload);
    const step *s = &r->batch[located];
    if (dim < 0 || p->bytes <= PART_BYTES) {
        return add_part(r, (part){s, located, p, -1, 0, 0}, err);
    }
    int64_t n = p->sizes[dim];
    int64_t by = (int64_t)(PART_BYTES / (p->bytes / (uint64_t)n + 1));
    by = by < 1 ? 1 : by;
    dcp_status status = DCP_OK;
    for (int64_t from = 0; from < n && status == DCP_OK; from += by) {
        status = add_part(r, (part){s, located, p, dim, from, n - from < by ? n : from + by}, err);
    }
    return status;
}

static dcp_status cut_batch(run *r, dcp_error *err)
{
    dcp_status status = DCP_OK;
    r->n_parts = 0;
    for (size_t i = 0; i < r->n_batch && status == DCP_OK; i++) {
        const step *s = &r->batch[i];
        if (s->is_window) {
            status = add_part(r, (part){.step = s}, err);
            continue;
        }
        const unit *u = &r->units[s->first];
        for (size_t k = 0; k < u->n && status == DCP_OK; k++) {
            status = cut_piece(r, i, &r->pieces[u->first + k], err);
        }
    }
    return status;
}

static dcp_status read_part(void *arg, size_t i, int w, dcp_error *err)
{
    run *r = arg;
    const part *p = &r->parts[i];
    if (p->step->is_window) {
        return read_window(r, p->step, &r->workers[w], err);
    }
    const dcp__located *l = &r->located[p->located];
    dcp_status status = read_piece(p->piece, &l->source, &l->payload, p->dim, p->from, p->to, &r->workers[w].tile, err);
    if (status == DCP_OK) {
        return status;
    }
    dcp__to_file_offset(l, err);
    return dcp__in_item(r->ck, l->file, p->piece->entry->item.fqn, status, err);
}

static dcp_status read_batch(run *r, dcp_error *err)
{
    memset(r->located, 0, sizeof r->located);
    dcp_status status = dcp__parallel(r->n_batch, r->n_workers, locate_step, r, err);
    status = status == DCP_OK ? cut_batch(r, err) : status;
    status = status == DCP_OK ? dcp__parallel(r->n_parts, r->n_workers, read_part, r, err) : status;
    for (size_t i = 0; i < r->n_batch; i++) {
        dcp__located_release(r->ck, &r->located[i]);
    }
    return status;
}

/* ---- all ---- */

static dcp_status read_steps(run *r, dcp_error *err)
{
    dcp_status status = DCP_OK;
    r->n_workers = r->bytes < ONE_WORKER_BYTES ? 1 : r->ck->ctx->threads;
    r->workers = dcp__calloc(r->ck->ctx, (size_t)r->n_workers, sizeof *r->workers);
    if (!r->workers) {
        return dcp__nomem(err);
    }
    for (int i = 0; i < r->n_workers; i++) {
        r->workers[i] = (worker){{.ctx = r->ck->ctx}, {.ctx = r->ck->ctx}};
    }
    for (size_t i = 0; i < r->n_steps && status == DCP_OK; i += r->n_batch) {
        r->batch = &r->steps[i];
        r->n_batch = r->n_steps - i < BATCH_STEPS ? r->n_steps - i : BATCH_STEPS;
        status = read_batch(r, err);
    }
    for (int i = 0; i < r->n_workers; i++) {
        dcp__tile_buf_reset(&r->workers[i].window);
        dcp__tile_buf_reset(&r->workers[i].tile);
    }
    return status;
}

static dcp_status plan(run *r, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        dcp_status status = add_request(r, &requests[i], err);
        if (status != DCP_OK) {
            return dcp__in_item(r->ck, -1, requests[i].item->fqn, status, err);
        }
    }
    dcp_status status = check_places(r, err);
    if (status == DCP_OK && r->n_pieces) {
        qsort_r(r->pieces, r->n_pieces, sizeof *r->pieces, compare_pieces, r);
        status = make_units(r, err);
        status = status == DCP_OK ? make_steps(r, err) : status;
    }
    return status;
}

dcp_status dcp_read_many(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    if (!ck || (n && !requests)) {
        return dcp__fail(err, DCP_ARG, "read: no %s", ck ? "requests" : "checkpoint");
    }
    for (size_t i = 0; i < n; i++) {
        if (!requests[i].item) {
            return dcp__fail(err, DCP_ARG, "read: request %zu has no item", i);
        }
    }
    run *r = dcp__calloc(ck->ctx, 1, sizeof *r);
    if (!r) {
        return dcp__nomem(err);
    }
    r->ck = ck;
    dcp__arena_init(&r->arena, ck->ctx, UINT64_MAX);
    dcp_status status = plan(r, requests, n, err);
    status = status == DCP_OK ? read_steps(r, err) : status;
    dcp__arena_reset(&r->arena);
    dcp__free(ck->ctx, r->pieces);
    dcp__free(ck->ctx, r->units);
    dcp__free(ck->ctx, r->steps);
    dcp__free(ck->ctx, r->parts);
    dcp__free(ck->ctx, r->workers);
    dcp__free(ck->ctx, r);
    return status;
}

dcp_status dcp_read(dcp_checkpoint *ck, const dcp_item *item, const dcp_box *box, const dcp_tensor *dst, dcp_error *err)
{
    if (!ck || !item || !dst) {
        return dcp__fail(err, DCP_ARG, "read: no %s", !ck ? "checkpoint" : !item ? "item" : "target");
    }
    dcp_read_request q = {item, {NULL, NULL}, *dst};
    if (box) {
        q.box = *box;
    }
    return dcp_read_many(ck, &q, 1, err);
}
