#include "engine/load/share_record.h"

#include "base/hash.h"
#include "base/pool.h"
#include "state/strided.h"

/* The parts that are being read. */
typedef struct reading {
    dcp__record_reader *record;
    dcp__cell *const *parts;
    uint8_t **to;           /* [n] */
    uint32_t *crcs;         /* [n] */
    dcp__tile_buf *buffers; /* one for each worker */
} reading;

/* ---- the record ---- */

/* True if the elements, one after the other, are all bytes that the CRC is of. */
static bool is_all_of_storage(const dcp__payload *p, uint64_t bytes)
{
    int64_t row_major[DCP_MAX_NDIM];
    dcp__row_major(p->ndim, p->sizes, row_major);
    for (int d = 0; d < p->ndim; d++) {
        if (p->sizes[d] > 1 && p->strides[d] != row_major[d]) {
            return false;
        }
    }
    return p->offset == p->storage.offset && p->storage.bytes == bytes && !p->is_big_endian && !p->is_conj && !p->is_neg;
}

/* As an error of a read looks. */
static dcp_status blame(const dcp__record_reader *r, const dcp__piece *p, dcp_status status, dcp_error *err)
{
    const dcp__storage *s = &r->ck->meta->storages[p->chunk->storage];
    dcp__to_file_offset(&r->located, err);
    dcp__to_record_offset(s, status, err);
    return dcp__in_item(r->ck, s->file, p->entry->item.fqn, status, err);
}

static uint64_t chunk_bytes(const dcp__piece *p)
{
    uint64_t bytes = dcp_dtype_bytes(p->entry->item.dtype);
    for (int d = 0; d < p->entry->item.ndim; d++) {
        bytes *= (uint64_t)p->chunk->sizes[d];
    }
    return bytes;
}

static dcp_status open_record(dcp__record_reader *r, const dcp__piece *p, dcp_error *err)
{
    const dcp__storage_span *span = &r->located.payload.storage;
    dcp_status status = dcp__locate_chunk(r->ck, p->entry, p->chunk, &r->located, err);
    if (status != DCP_OK) {
        return dcp__in_item(r->ck, r->ck->meta->storages[p->chunk->storage].file, p->entry->item.fqn, status, err);
    }
    r->chunk = p->chunk;
    r->left = chunk_bytes(p);
    r->crc = 0;
    r->takes_crc = false;
    if (!r->ck->check_crc || !span->has_crc || span->is_deflated) {
        return DCP_OK;
    }
    r->takes_crc = is_all_of_storage(&r->located.payload, r->left);
    if (r->takes_crc) {
        return DCP_OK;
    }
    status = dcp__check_storage_crc(r->ck->ctx, &r->located.source, span, err);
    return status == DCP_OK ? DCP_OK : blame(r, p, status, err);
}

static dcp_status close_record(dcp__record_reader *r, const dcp__piece *p, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (r->takes_crc) {
        status = dcp__compare_storage_crc(&r->located.payload.storage, r->crc, err);
        status = status == DCP_OK ? DCP_OK : blame(r, p, status, err);
    }
    dcp__record_reader_reset(r);
    return status;
}

void dcp__record_reader_reset(dcp__record_reader *r)
{
    if (r->chunk) {
        dcp__located_release(r->ck, &r->located);
        r->chunk = NULL;
    }
}

/* ---- its parts ---- */

static dcp_status read_part(void *arg, size_t i, int worker, dcp_error *err)
{
    reading *x = arg;
    const dcp__record_reader *r = x->record;
    const dcp__piece *p = &x->parts[i]->piece;
    int64_t strides[DCP_MAX_NDIM];
    dcp__row_major(p->entry->item.ndim, p->sizes, strides);
    dcp_status status = dcp__read_box(&r->located.source, &r->located.payload, p->in_chunk, p->sizes, x->to[i], strides,
                                      &x->buffers[worker], err);
    if (status != DCP_OK) {
        return blame(r, p, status, err);
    }
    x->crcs[i] = r->takes_crc ? dcp__crc32(0, x->to[i], (size_t)p->bytes) : 0;
    return DCP_OK;
}

static void advance(reading *x, size_t n)
{
    dcp__record_reader *r = x->record;
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = x->parts[i]->piece.bytes;
        r->crc = dcp__crc32_combine(r->crc, x->crcs[i], bytes);
        r->left -= bytes;
    }
}

static dcp_status read_parts(reading *x, size_t n, int n_workers, dcp_error *err)
{
    dcp_context *ctx = x->record->ck->ctx;
    for (int w = 0; w < n_workers; w++) {
        x->buffers[w] = (dcp__tile_buf){.ctx = ctx};
    }
    dcp_status status = dcp__parallel(n, n_workers, read_part, x, err);
    for (int w = 0; w < n_workers; w++) {
        dcp__tile_buf_reset(&x->buffers[w]);
    }
    if (status == DCP_OK) {
        advance(x, n);
    }
    return status;
}

static dcp_status read_to(dcp__record_reader *r, dcp__cell *const *parts, size_t n, uint8_t *to, dcp_error *err)
{
    dcp_context *ctx = r->ck->ctx;
    int n_workers = dcp__affordable_threads(ctx, DCP__WINDOW_BYTES);
    reading x = {.record = r, .parts = parts};
    x.to = dcp__calloc(ctx, n, sizeof *x.to);
    x.crcs = dcp__calloc(ctx, n, sizeof *x.crcs);
    x.buffers = dcp__calloc(ctx, (size_t)n_workers, sizeof *x.buffers);
    for (size_t i = 0; x.to && i < n; i++) {
        x.to[i] = to;
        to += parts[i]->piece.bytes;
    }
    dcp_status status = x.to && x.crcs && x.buffers ? read_parts(&x, n, n_workers, err) : dcp__nomem(err);
    dcp__free(ctx, x.to);
    dcp__free(ctx, x.crcs);
    dcp__free(ctx, x.buffers);
    return status;
}

dcp_status dcp__record_read(dcp__record_reader *r, dcp__cell *const *parts, size_t n, uint8_t *to, dcp_error *err)
{
    const dcp__piece *first = &parts[0]->piece;
    dcp_status status = r->chunk == first->chunk ? DCP_OK : open_record(r, first, err);
    status = status == DCP_OK ? read_to(r, parts, n, to, err) : status;
    return status == DCP_OK && r->left == 0 ? close_record(r, first, err) : status;
}
