/* Elements from the source to the output, a segment at a time: read, checked against the source's CRC, cast, and hashed. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/convert/convert.h"
#include "engine/convert/dequantize.h"
#include "engine/read/tensor_slabs.h"
#include "state/numbers.h"
#include "state/strided.h"
#include "state/value.h"

#define CACHE_BYTES ((size_t)128 << 10) /* one step of the checksums */

/* ---- cutting ---- */

static bool add_segment(dcp__segments *out, dcp__cv_segment segment)
{
    void *array = out->list;
    bool ok = dcp__grow(out->ctx, &array, &out->cap, out->n + 1, sizeof *out->list);
    out->list = array;
    if (ok) {
        out->list[out->n++] = segment;
    }
    return ok;
}

/* A tensor, or rows of it, whose elements follow each other from `start` on. */
static dcp_status cut_run(const dcp__cv_item *item, size_t number, uint32_t chunk, uint64_t start, const int64_t *sizes,
                          dcp__segments *out, dcp_error *err)
{
    size_t in = dcp_dtype_bytes(item->entry->item.dtype), as = dcp_dtype_bytes(item->dtype);
    dcp__slabs slabs;
    dcp__slabs_init(&slabs, item->ndim, sizes, (int64_t)(DCP__CV_SEGMENT_BYTES / (in > as ? in : as)));
    while (dcp__slabs_next(&slabs)) {
        dcp__cv_segment segment = {.item = (uint32_t)number, .chunk = chunk, .start = start, .n = (uint64_t)slabs.elems};
        if (!add_segment(out, segment)) {
            return dcp__nomem(err);
        }
        start += (uint64_t)slabs.elems;
    }
    return DCP_OK;
}

/* A chunk of whole rows, and where its elements begin in the tensor. */
typedef struct row_chunk {
    uint32_t number; /* among the entry's */
    int64_t row, rows;
} row_chunk;

static int compare_rows(const void *a, const void *b)
{
    const row_chunk *x = a, *y = b;
    return (x->row > y->row) - (x->row < y->row);
}

static bool is_of_whole_rows(const dcp_item *item, const dcp__chunk *c)
{
    for (int d = 1; d < item->ndim; d++) {
        if (c->offsets[d] != 0 || c->sizes[d] != item->extents[d]) {
            return false;
        }
    }
    return true;
}

/* The chunks in order if they are the tensor's rows one after the other; *n is 0 if they are not. */
static dcp_status find_rows(const dcp__selection *s, const dcp__entry *e, row_chunk **out, size_t *n, dcp_error *err)
{
    row_chunk *rows = dcp__calloc(s->c->ctx, e->item.n_chunks, sizeof *rows);
    int64_t next = 0, total = e->item.ndim ? e->item.extents[0] : 1;
    size_t found = 0;
    *n = 0;
    *out = rows;
    if (!rows) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const dcp__chunk *c = &s->c->ck->meta->chunks[e->first_chunk + i];
        int64_t elems = 0;
        dcp__elems(e->item.ndim, c->sizes, &elems);
        if (elems && (!is_of_whole_rows(&e->item, c) || c->storage == DCP__NO_STORAGE)) {
            return DCP_OK;
        }
        if (elems) {
            rows[found++] = (row_chunk){(uint32_t)i, e->item.ndim ? c->offsets[0] : 0, e->item.ndim ? c->sizes[0] : 1};
        }
    }
    qsort(rows, found, sizeof *rows, compare_rows);
    for (size_t i = 0; i < found; i++) {
        if (rows[i].row != next) {
            return DCP_OK;
        }
        next += rows[i].rows;
    }
    *n = next == total ? found : 0;
    return DCP_OK;
}

dcp_status dcp__cv_cut(const dcp__selection *s, size_t number, dcp__segments *out, dcp_error *err)
{
    const dcp__cv_item *item = &s->items[number];
    const dcp__entry *e = item->entry;
    row_chunk *rows;
    size_t n;
    if (item->elems == 0) {
        return DCP_OK;
    }
    if (item->quantized) {
        return cut_run(item, number, DCP__NO_CHUNK, 0, item->extents, out, err);
    }
    dcp_status status = find_rows(s, e, &rows, &n, err);
    uint64_t row_elems = item->elems / (uint64_t)(e->item.ndim ? e->item.extents[0] : 1);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        const dcp__chunk *c = &s->c->ck->meta->chunks[e->first_chunk + rows[i].number];
        status = cut_run(item, number, rows[i].number, (uint64_t)rows[i].row * row_elems, c->sizes, out, err);
    }
    if (status == DCP_OK && n == 0) {
        status = cut_run(item, number, DCP__NO_CHUNK, 0, e->item.extents, out, err);
    }
    dcp__free(s->c->ctx, rows);
    return status;
}

/* ---- checksums of the source ---- */

static dcp_status check_chunk(const dcp__selection *s, const dcp__entry *e, size_t chunk, bool is_run, dcp_error *err)
{
    dcp_checkpoint *ck = s->c->ck;
    const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + chunk];
    dcp__located l;
    dcp_status status = dcp__locate_chunk(ck, e, c, &l, err);
    if (status == DCP_OK) {
        const dcp__payload *p = &l.payload;
        bool in_order = !p->is_big_endian && !p->is_conj && !p->is_neg && dcp__is_row_major(p->ndim, p->sizes, p->strides);
        bool has_crc = p->storage.has_crc && !p->storage.is_deflated, is_whole = p->span_bytes == p->storage.full_bytes;
        bool is_summed = has_crc && is_run && in_order && is_whole;
        s->crcs[e->first_chunk + chunk] = (dcp__cv_crc){p->storage.crc, is_summed};
        if (has_crc && !is_summed && !dcp__mark_compared(ck, e)) {
            status = dcp__check_storage_crc(ck->ctx, &l.source, &p->storage, err);
        }
        if (status != DCP_OK) {
            dcp__to_file_offset(&l, err);
        }
        dcp__located_release(ck, &l);
    }
    return status == DCP_OK ? status : dcp__in_item(ck, ck->meta->storages[c->storage].file, e->item.fqn, status, err);
}

static dcp_status check_entry(const dcp__selection *s, const dcp__entry *e, bool is_run, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < e->item.n_chunks && status == DCP_OK; i++) {
        const dcp__chunk *c = &s->c->ck->meta->chunks[e->first_chunk + i];
        int64_t elems = 0;
        dcp__elems(e->item.ndim, c->sizes, &elems);
        bool is_there = elems && c->storage != DCP__NO_STORAGE;
        if (is_there && (s->c->ck->values || s->c->ck->meta->storages[c->storage].form == DCP__FORM_RECORD)) {
            status = check_chunk(s, e, i, is_run, err);
        }
    }
    return status;
}

dcp_status dcp__cv_check_source(const dcp__selection *s, const dcp__cv_item *item, bool is_summed, dcp_error *err)
{
    dcp_status status = check_entry(s, item->entry, is_summed, err);
    if (status == DCP_OK && item->quantized) {
        status = check_entry(s, dcp__entry_of(item->quantized->scales), false, err);
    }
    return status;
}

static dcp_status compare_crc(const dcp__selection *s, const dcp__cv_segment *segment, uint32_t crc, dcp_error *err)
{
    const dcp__entry *e = s->items[segment->item].entry;
    const dcp__cv_crc *known = &s->crcs[e->first_chunk + segment->chunk];
    const dcp__chunk *c = &s->c->ck->meta->chunks[e->first_chunk + segment->chunk];
    if (!known->is_summed || known->expected == crc) {
        return DCP_OK;
    }
    dcp_status status = dcp__fail(err, DCP_CHECKSUM, "crc-32 of the payload is %08x, the record says %08x", crc, known->expected);
    return dcp__in_item(s->c->ck, s->c->ck->meta->storages[c->storage].file, e->item.fqn, status, err);
}

dcp_status dcp__cv_check_crcs(const dcp__selection *s, const dcp__cv_segment *segments, size_t n, dcp_error *err)
{
    size_t elem = n ? dcp_dtype_bytes(s->items[segments[0].item].entry->item.dtype) : 0;
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < n && segments[i].chunk != DCP__NO_CHUNK && status == DCP_OK;) {
        uint32_t crc = 0, chunk = segments[i].chunk;
        const dcp__cv_segment *first = &segments[i];
        for (; i < n && segments[i].chunk == chunk; i++) {
            crc = dcp__crc32_combine(crc, segments[i].source_crc, segments[i].n * elem);
        }
        status = compare_crc(s, first, crc, err);
    }
    return status;
}

/* ---- buffers ---- */

static bool has_casts(const dcp__selection *s)
{
    for (size_t i = 0; i < s->n; i++) {
        if (dcp__cv_is_changed(&s->items[i])) {
            return true;
        }
    }
    return false;
}

void dcp__cv_buffers_free(dcp_context *ctx, dcp__cv_buffers *b, int n)
{
    for (int i = 0; b && i < n; i++) {
        if (b[i].out != b[i].in) {
            dcp__free_aligned(ctx, b[i].out);
        }
        dcp__free_aligned(ctx, b[i].in);
        dcp__free_aligned(ctx, b[i].hasher);
    }
    dcp__free(ctx, b);
}

dcp_status dcp__cv_buffers_create(const dcp__selection *s, int n, dcp__cv_buffers **out, dcp_error *err)
{
    dcp_context *ctx = s->c->ctx;
    bool two = has_casts(s);
    dcp__cv_buffers *b = dcp__calloc(ctx, (size_t)n, sizeof *b);
    for (int i = 0; b && i < n; i++) {
        b[i].in = dcp__alloc_aligned(ctx, 4096, DCP__CV_SEGMENT_BYTES);
        b[i].out = two ? dcp__alloc_aligned(ctx, 4096, DCP__CV_SEGMENT_BYTES) : b[i].in;
        b[i].hasher = dcp__alloc_aligned(ctx, 64, dcp__hasher_bytes());
        if (!b[i].in || !b[i].out || !b[i].hasher) {
            dcp__cv_buffers_free(ctx, b, n);
            return dcp__nomem(err);
        }
    }
    *out = b;
    return b ? DCP_OK : dcp__nomem(err);
}

/* ---- reading ---- */

dcp_status dcp__cv_read_elems(dcp_checkpoint *ck, const dcp_item *item, uint64_t start, uint64_t n, void *buf, dcp_error *err)
{
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], at = (int64_t)start, left = (int64_t)n;
    char *out = buf;
    dcp_status status = DCP_OK;
    while (left > 0 && status == DCP_OK) {
        int64_t elems = item->ndim ? dcp__box_at(item->ndim, item->extents, at, left, offsets, sizes) : 1;
        dcp_box box = {offsets, sizes};
        dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, sizes, out);
        status = dcp_read(ck, item, &box, &dst, err);
        at += elems;
        left -= elems;
        out += (size_t)elems * dcp_dtype_bytes(item->dtype);
    }
    return status;
}

dcp_status dcp__cv_count_cast(dcp__conversion *c, const dcp__cv_item *item, const dcp__cv_segment *segment, uint64_t lost,
                              dcp_error *err)
{
    pthread_mutex_lock(&c->lock);
    c->report.n_cast += segment->n;
    c->report.n_lost += lost;
    pthread_mutex_unlock(&c->lock);
    if (lost == 0 || c->opts->allow_overflow) {
        return DCP_OK;
    }
    return dcp__fail(err, DCP_MISMATCH, "%" PRIu64 " of the %" PRIu64 " numbers from element %" PRIu64 " on do not fit %s", lost,
                     segment->n * dcp__numbers_each(item->dtype), segment->start, dcp_dtype_name(item->dtype));
}

static uint32_t checksum(const uint8_t *bytes, size_t n, dcp__hasher *hasher)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < n; i += CACHE_BYTES) {
        size_t part = n - i < CACHE_BYTES ? n - i : CACHE_BYTES;
        crc = dcp__crc32(crc, bytes + i, part);
        dcp__hasher_update(hasher, bytes + i, part);
    }
    return crc;
}

/* Elements that are not the source's, into b->out. */
static dcp_status read_changed(const dcp__selection *s, dcp__cv_segment *segment, const dcp__cv_buffers *b, dcp_error *err)
{
    const dcp__cv_item *item = &s->items[segment->item];
    const dcp_item *from = &item->entry->item;
    uint64_t lost = 0;
    dcp_status status;
    if (item->quantized) {
        status = dcp__dequantize_elems(s->c->ck, item->quantized, s->c->opts->dequantize_block, item->dtype, segment->start,
                                       segment->n, b->out, &lost, err);
    } else {
        status = dcp__cv_read_elems(s->c->ck, from, segment->start, segment->n, b->in, err);
        if (status == DCP_OK) {
            lost = dcp__cast(from->dtype, b->in, item->dtype, b->out, segment->n);
            segment->source_crc = dcp__crc32(0, b->in, segment->n * dcp_dtype_bytes(from->dtype));
        }
    }
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__cv_count_cast(s->c, item, segment, lost, err);
    return status == DCP_OK ? status : dcp__prefix(err, status, "item \"%s\": ", dcp__print(from->fqn).text);
}

dcp_status dcp__cv_read(const dcp__selection *s, dcp__cv_segment *segment, const dcp__cv_buffers *b, dcp_error *err)
{
    const dcp__cv_item *item = &s->items[segment->item];
    bool is_changed = dcp__cv_is_changed(item);
    uint8_t *elems = is_changed ? b->out : b->in;
    dcp_status status = is_changed ? read_changed(s, segment, b, err)
                                   : dcp__cv_read_elems(s->c->ck, &item->entry->item, segment->start, segment->n, b->in, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__hasher_init(b->hasher);
    segment->crc = checksum(elems, segment->n * dcp_dtype_bytes(item->dtype), b->hasher);
    segment->digest = dcp__hasher_digest(b->hasher);
    segment->source_crc = is_changed ? segment->source_crc : segment->crc;
    return DCP_OK;
}

dcp_status dcp__cv_read_back(const dcp__cv_segment *segment, dcp_checkpoint *made, const dcp_item *item, const dcp__cv_buffers *b,
                             dcp_error *err)
{
    dcp_status status = dcp__cv_read_elems(made, item, segment->start, segment->n, b->in, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__digest digest = dcp__xxh3_128(b->in, segment->n * dcp_dtype_bytes(item->dtype));
    if (memcmp(&digest, &segment->digest, sizeof digest) != 0) {
        return dcp__fail(err, DCP_CHECKSUM,
                         "item \"%s\": what was written is not what is read back, in the %" PRIu64 " elements from %" PRIu64
                         " on",
                         dcp__print(item->fqn).text, segment->n, segment->start);
    }
    return DCP_OK;
}

/* ---- progress ---- */

bool dcp__cv_tell(dcp__conversion *c, uint64_t done_bytes)
{
    pthread_mutex_lock(&c->lock);
    c->done_bytes = done_bytes;
    bool goes_on = !c->opts->progress || c->opts->progress(c->opts->user, c->done_bytes, c->total_bytes);
    pthread_mutex_unlock(&c->lock);
    return goes_on;
}

dcp_status dcp__cv_advance(dcp__conversion *c, uint64_t bytes, dcp_error *err)
{
    pthread_mutex_lock(&c->lock);
    c->done_bytes += bytes;
    uint64_t done = c->done_bytes < c->total_bytes ? c->done_bytes : c->total_bytes;
    bool goes_on = !c->opts->progress || c->opts->progress(c->opts->user, done, c->total_bytes);
    pthread_mutex_unlock(&c->lock);
    return goes_on ? DCP_OK : dcp__fail(err, DCP_CANCELED, "convert: canceled by the caller");
}
