/* Reading boxes of tensors: carries out the plan, some steps at a time. */
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "engine/read/device_target.h"
#include "engine/read/read_plan.h"
#include "state/strided.h"
#include "state/value.h"

#define PART_BYTES ((uint64_t)8 << 20)
#define BATCH_STEPS 64
#define LARGE_CLAIM_BYTES ((uint64_t)16 << 20)
#define ONE_WORKER_BYTES ((uint64_t)1 << 20) /* less is not worth a thread */

/* A part of a step for one worker: a window, or the indexes [from, to) of one dimension of a piece. */
typedef struct part {
    const dcp__read_step *step;
    size_t located; /* index in run.located */
    const dcp__piece *piece;
    int dim;
    int64_t from, to;
} part;

typedef struct worker {
    dcp__tile_buf window, tile;
} worker;

typedef struct run {
    dcp_checkpoint *ck;
    const dcp__read_plan *plan;
    dcp_read_opts opts;
    pthread_mutex_t lock; /* guards done_bytes and the caller's progress function */
    uint64_t done_bytes;
    const dcp__read_step *batch; /* steps being read */
    size_t n_batch;
    part *parts;
    size_t n_parts, cap_parts;
    worker *workers;
    int n_workers;
    dcp__located located[BATCH_STEPS]; /* n_batch are valid: last, since clearing all would take longer than a small read */
} run;

/* ---- copying out ---- */

/* Reads the indexes [from, to) of dimension dim of a piece (dim -1: all of it). */
dcp_status dcp__read_piece(const dcp__read_plan *plan, const dcp__piece *p, const dcp__source *src, const dcp__payload *payload,
                           int dim, int64_t from, int64_t to, dcp__tile_buf *buf, dcp_error *err)
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
    size_t elem_bytes = dcp_dtype_bytes(dst->dtype);
    char *first = (char *)dst->data + at * (int64_t)elem_bytes;
    if (dst->device.type != DCP_DEVICE_CPU) {
        return dcp__read_box_to_device(plan->transfer, dst->device, src, payload, start, sizes, first, strides, elem_bytes, buf,
                                       err);
    }
    return dcp__read_box(src, payload, start, sizes, first, strides, buf, err);
}

bool dcp__reads_whole_chunk(const dcp__read_plan *r, const dcp__unit *u)
{
    for (size_t i = 0; i < u->n; i++) {
        const dcp__piece *p = &r->pieces[u->first + i];
        if (memcmp(p->sizes, p->chunk->sizes, (size_t)p->entry->item.ndim * sizeof *p->sizes) == 0) {
            return true;
        }
    }
    return false;
}

dcp_status dcp__compare_storage_crc(const dcp__storage_span *storage, uint32_t crc, dcp_error *err)
{
    return crc == storage->crc ? DCP_OK
                               : dcp__fail_at(err, DCP_CHECKSUM, storage->offset,
                                              "crc-32 of the payload is %08x, the record says %08x", crc, storage->crc);
}

dcp_status dcp__check_storage_crc(dcp_context *ctx, const dcp__source *src, const dcp__storage_span *storage, dcp_error *err)
{
    uint8_t *block = dcp__alloc(ctx, DCP__WINDOW_BYTES);
    if (!block) {
        return dcp__nomem(err);
    }
    uint32_t crc = 0;
    dcp_status status = DCP_OK;
    for (uint64_t done = 0; done < storage->bytes && status == DCP_OK;) {
        size_t n = storage->bytes - done < DCP__WINDOW_BYTES ? (size_t)(storage->bytes - done) : DCP__WINDOW_BYTES;
        status = dcp__source_read(src, storage->offset + done, block, n, err);
        crc = status == DCP_OK ? dcp__crc32(crc, block, n) : crc;
        done += n;
    }
    dcp__free(ctx, block);
    return status == DCP_OK ? dcp__compare_storage_crc(storage, crc, err) : status;
}

/* If the CRC of a unit's storage is wrong, whoever has looked first says so, which ends the read. */
static bool is_compared(const dcp__read_plan *r, const dcp__unit *u)
{
    if (!r->compared) {
        return false;
    }
    const dcp__entry *e = r->pieces[u->first].entry;
    int64_t storage = dcp__value_lazy(r->ck->values[e - r->ck->meta->entries])->storage;
    return __atomic_exchange_n(&r->compared[storage], true, __ATOMIC_RELAXED);
}

dcp_status dcp__check_unit_crc(const dcp__read_plan *r, const dcp__unit *u, const dcp__source *src, const dcp__payload *p,
                               dcp_error *err)
{
    if (!r->ck->check_crc || r->ck->compared || !p->storage.has_crc || p->storage.is_deflated || !dcp__reads_whole_chunk(r, u)) {
        return DCP_OK;
    }
    return is_compared(r, u) ? DCP_OK : dcp__check_storage_crc(r->ck->ctx, src, &p->storage, err);
}

/* ---- large units ---- */

static dcp_status locate_step(void *arg, size_t i, int w, dcp_error *err)
{
    (void)w;
    run *r = arg;
    const dcp__read_step *s = &r->batch[i];
    const dcp__unit *u = &r->plan->units[s->first];
    const dcp__piece *first = &r->plan->pieces[u->first];
    dcp__located *l = &r->located[i];
    *l = (dcp__located){0};
    if (s->is_window) {
        return DCP_OK;
    }
    dcp_status status = dcp__locate_chunk(r->ck, first->entry, first->chunk, l, err);
    if (status == DCP_OK) {
        status = dcp__check_unit_crc(r->plan, u, &l->source, &l->payload, err);
        if (status != DCP_OK) {
            dcp__to_file_offset(l, err);
            dcp__to_record_offset(u->storage, status, err);
        }
    }
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
static int outermost(const dcp__piece *p, const dcp__payload *payload)
{
    int best = -1;
    for (int d = 0; d < payload->ndim; d++) {
        if (p->sizes[d] > 1 && (best < 0 || payload->strides[d] > payload->strides[best])) {
            best = d;
        }
    }
    return best;
}

static dcp_status cut_piece(run *r, size_t located, const dcp__piece *p, dcp_error *err)
{
    int dim = outermost(p, &r->located[located].payload);
    const dcp__read_step *s = &r->batch[located];
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
        const dcp__read_step *s = &r->batch[i];
        if (s->is_window) {
            status = add_part(r, (part){.step = s}, err);
            continue;
        }
        const dcp__unit *u = &r->plan->units[s->first];
        for (size_t k = 0; k < u->n && status == DCP_OK; k++) {
            status = cut_piece(r, i, &r->plan->pieces[u->first + k], err);
        }
    }
    return status;
}

static uint64_t part_bytes(const run *r, const part *p)
{
    uint64_t bytes = 0;
    if (!p->step->is_window) {
        return p->dim < 0 ? p->piece->bytes : p->piece->bytes / (uint64_t)p->piece->sizes[p->dim] * (uint64_t)(p->to - p->from);
    }
    for (size_t i = 0; i < p->step->n; i++) {
        const dcp__unit *u = &r->plan->units[p->step->first + i];
        for (size_t k = 0; k < u->n; k++) {
            bytes += r->plan->pieces[u->first + k].bytes;
        }
    }
    return bytes;
}

static dcp_status advance(run *r, const part *p, dcp_error *err)
{
    if (!r->opts.progress) {
        return DCP_OK;
    }
    pthread_mutex_lock(&r->lock);
    r->done_bytes += part_bytes(r, p);
    bool goes_on = r->opts.progress(r->opts.user, r->done_bytes, r->plan->bytes);
    pthread_mutex_unlock(&r->lock);
    return goes_on ? DCP_OK : dcp__fail(err, DCP_CANCELED, "stopped by the caller");
}

static dcp_status read_part(run *r, const part *p, int w, dcp_error *err)
{
    if (p->step->is_window) {
        return dcp__read_window(r->plan, p->step, &r->workers[w].window, &r->workers[w].tile, err);
    }
    const dcp__located *l = &r->located[p->located];
    dcp_status status =
        dcp__read_piece(r->plan, p->piece, &l->source, &l->payload, p->dim, p->from, p->to, &r->workers[w].tile, err);
    if (status == DCP_OK) {
        return status;
    }
    dcp__to_file_offset(l, err);
    dcp__to_record_offset(r->plan->units[p->step->first].storage, status, err);
    return dcp__in_item(r->ck, l->file, p->piece->entry->item.fqn, status, err);
}

static dcp_status do_part(void *arg, size_t i, int w, dcp_error *err)
{
    run *r = arg;
    dcp_status status = read_part(r, &r->parts[i], w, err);
    return status == DCP_OK ? advance(r, &r->parts[i], err) : status;
}

static dcp_status read_batch(run *r, dcp_error *err)
{
    memset(r->located, 0, r->n_batch * sizeof *r->located);
    dcp_status status = dcp__parallel(r->n_batch, r->n_workers, locate_step, r, err);
    status = status == DCP_OK ? cut_batch(r, err) : status;
    status = status == DCP_OK ? dcp__parallel(r->n_parts, r->n_workers, do_part, r, err) : status;
    for (size_t i = 0; i < r->n_batch; i++) {
        dcp__located_release(r->ck, &r->located[i]);
    }
    return status;
}

/* ---- all ---- */

static uint64_t ring_bytes(const dcp__read_plan *plan)
{
    return plan->transfer ? dcp__transfer_ring_bytes(plan->transfer) : 0;
}

/* What a step's record may take in memory when it is decoded. */
static uint64_t decoded_bytes(const run *r, const dcp__read_step *s, uint64_t most)
{
    const dcp__unit *u = &r->plan->units[s->first];
    const dcp__piece *p = &r->plan->pieces[u->first];
    if (s->is_window || u->storage->transforms == 0) {
        return 0;
    }
    uint64_t bytes = dcp__spool_limit(r->ck, p->entry, p->chunk);
    return bytes < most ? bytes : most;
}

/* Steps that are read together. What they decode is held until all are done: a quarter of the budget, as much as each thread may
 * have in memory for one record. */
static size_t count_batch(const run *r, size_t first)
{
    const dcp_context *ctx = r->ck->ctx;
    size_t n = 0;
    uint64_t left = ctx->memory_bytes / 4;
    while (n < BATCH_STEPS && first + n < r->plan->n_steps) {
        uint64_t bytes = decoded_bytes(r, &r->plan->steps[first + n], ctx->memory_bytes / 4 / (uint64_t)ctx->threads);
        if (bytes > left) {
            break;
        }
        left -= bytes;
        n++;
    }
    return n;
}

static dcp_status read_steps(run *r, dcp_error *err)
{
    dcp_status status = DCP_OK;
    dcp_context *ctx = r->ck->ctx;
    r->n_workers =
        r->plan->bytes < ONE_WORKER_BYTES ? 1 : dcp__affordable_threads(ctx, 2 * DCP__WINDOW_BYTES + ring_bytes(r->plan));
    r->workers = dcp__calloc(ctx, (size_t)r->n_workers, sizeof *r->workers);
    if (!r->workers) {
        return dcp__nomem(err);
    }
    for (int i = 0; i < r->n_workers; i++) {
        r->workers[i] = (worker){{.ctx = ctx}, {.ctx = ctx}};
    }
    for (size_t i = 0; i < r->plan->n_steps && status == DCP_OK; i += r->n_batch) {
        r->batch = &r->plan->steps[i];
        r->n_batch = count_batch(r, i);
        status = read_batch(r, err);
    }
    for (int i = 0; i < r->n_workers; i++) {
        dcp__tile_buf_reset(&r->workers[i].window);
        dcp__tile_buf_reset(&r->workers[i].tile);
    }
    dcp__free(ctx, r->workers);
    dcp__free(ctx, r->parts);
    return status;
}

static dcp_status carry_out(dcp_checkpoint *ck, const dcp__read_plan *plan, const dcp_read_opts *opts, dcp_error *err)
{
    run *r = dcp__alloc(ck->ctx, sizeof *r); /* too large for the stacks of some threads */
    if (!r) {
        return dcp__nomem(err);
    }
    memset(r, 0, offsetof(run, located));
    r->ck = ck;
    r->plan = plan;
    r->opts = *opts;
    pthread_mutex_init(&r->lock, NULL);
    dcp_status status = read_steps(r, err);
    pthread_mutex_destroy(&r->lock);
    dcp__free(ck->ctx, r);
    return status;
}

static dcp_status check_large_unit(dcp_checkpoint *ck, const dcp__read_plan *plan, const dcp__unit *u, dcp_error *err)
{
    const dcp__piece *p = &plan->pieces[u->first];
    dcp__located l;
    if (p->bytes <= LARGE_CLAIM_BYTES) {
        return DCP_OK;
    }
    dcp_status status = dcp__locate_chunk(ck, p->entry, p->chunk, &l, err);
    if (status != DCP_OK) {
        return dcp__in_item(ck, u->storage->file, p->entry->item.fqn, status, err);
    }
    dcp__located_release(ck, &l);
    return DCP_OK;
}

dcp_status dcp__check_readable(dcp_checkpoint *ck, const dcp_item *item, dcp_error *err)
{
    if (item->bytes <= LARGE_CLAIM_BYTES) {
        return dcp__check_dtype(ck, item, err);
    }
    char nothing; /* a plan needs a place, and does not touch it */
    const dcp_read_request q = {item, {NULL, NULL}, dcp_tensor_make(item->dtype, item->ndim, item->extents, &nothing)};
    dcp__read_plan plan;
    dcp_status status = dcp__plan_read(ck, &q, 1, &plan, err);
    for (size_t i = 0; i < plan.n_units && status == DCP_OK; i++) {
        status = check_large_unit(ck, &plan, &plan.units[i], err);
    }
    dcp__read_plan_reset(&plan);
    return status;
}

static dcp_status check_chunk_crc(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp_error *err)
{
    dcp__located l;
    const dcp__storage *s = &ck->meta->storages[c->storage];
    dcp_status status = dcp__locate_chunk(ck, e, c, &l, err);
    if (status == DCP_OK && l.payload.storage.has_crc && !l.payload.storage.is_deflated) {
        status = dcp__check_storage_crc(ck->ctx, &l.source, &l.payload.storage, err);
        if (status != DCP_OK) {
            dcp__to_file_offset(&l, err);
            dcp__to_record_offset(s, status, err);
        }
    }
    dcp__located_release(ck, &l);
    return status == DCP_OK ? status : dcp__in_item(ck, s->file, e->item.fqn, status, err);
}

dcp_status dcp_item_check_crc(dcp_checkpoint *ck, const dcp_item *item, dcp_error *err)
{
    if (!ck || !item) {
        return dcp__fail(err, DCP_ARG, "check: no %s", ck ? "item" : "checkpoint");
    }
    const dcp__entry *e = dcp__entry_of(item);
    dcp_status status = DCP_OK;
    for (size_t i = 0; item->kind == DCP_ITEM_TENSOR && i < item->n_chunks && status == DCP_OK; i++) {
        const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + i];
        status = c->storage == DCP__NO_STORAGE ? DCP_OK : check_chunk_crc(ck, e, c, err); /* a missing one is told by reading */
    }
    return status;
}

/* Carries a plan out, waits for the copies to devices, and resets it. */
static dcp_status finish_plan(dcp_checkpoint *ck, dcp__read_plan *plan, dcp_status status, const dcp_read_opts *opts,
                              dcp_error *err)
{
    status = status == DCP_OK ? carry_out(ck, plan, opts, err) : status;
    if (status == DCP_OK && plan->transfer) {
        status = dcp__transfer_sync(plan->transfer, err);
    }
    dcp__transfer_free(plan->transfer);
    dcp__read_plan_reset(plan);
    return status;
}

dcp_status dcp__read_pieces(dcp_checkpoint *ck, const dcp__piece *pieces, size_t n, const dcp_read_opts *opts, dcp_error *err)
{
    dcp__read_plan plan;
    dcp_status status = dcp__plan_pieces(ck, pieces, n, &plan, err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = dcp__device_targets_use(ck->ctx, pieces[i].request, 1, opts->stream, &plan.transfer, err);
    }
    return finish_plan(ck, &plan, status, opts, err);
}

dcp_status dcp_read_many_with(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, const dcp_read_opts *opts,
                              dcp_error *err)
{
    static const dcp_read_opts defaults = DCP_READ_OPTS_INIT;
    if (!ck || (n && !requests)) {
        return dcp__fail(err, DCP_ARG, "read: no %s", ck ? "requests" : "checkpoint");
    }
    if (opts && opts->struct_size != sizeof *opts) {
        return dcp__fail(err, DCP_ARG, "read options: struct_size %zu, expected %zu", opts->struct_size, sizeof *opts);
    }
    dcp__read_plan plan;
    opts = opts ? opts : &defaults;
    dcp_status status = dcp__plan_read(ck, requests, n, &plan, err);
    status = status == DCP_OK ? dcp__device_targets_use(ck->ctx, requests, n, opts->stream, &plan.transfer, err) : status;
    return finish_plan(ck, &plan, status, opts, err);
}

dcp_status dcp_read_many(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    return dcp_read_many_with(ck, requests, n, NULL, err);
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
