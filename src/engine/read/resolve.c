/* Where the elements of a chunk are: opens its record, or its entry in a safetensors file, and holds what it reads from. */
#include <stdio.h>
#include <string.h>

#include "engine/read/checkpoint.h"
#include "state/strided.h"

const dcp__entry *dcp__entry_of(const dcp_item *item)
{
    return (const dcp__entry *)((const char *)item - offsetof(dcp__entry, item));
}

dcp_status dcp__in_item(const dcp_checkpoint *ck, int64_t file, dcp_str fqn, dcp_status code, dcp_error *err)
{
    if (fqn.ptr) {
        dcp__prefix(err, code, "item \"%s\": ", dcp__print(fqn).text);
    }
    if (file >= 0) {
        dcp__prefix(err, code, "file \"%s\", ", dcp__print(ck->meta->files[file]).text);
    }
    return dcp__prefix(err, code, "%s: ", ck->path);
}

/* ---- checks ---- */

dcp_status dcp__refuse_dtype(const dcp_item *item, dcp_error *err)
{
    return dcp__fail(err, DCP_UNSUPPORTED, "its dtype, torch.%s, is not one that is read here",
                     dcp__print(dcp__entry_of(item)->other_dtype).text);
}

dcp_status dcp__check_dtype(const dcp_checkpoint *ck, const dcp_item *item, dcp_error *err)
{
    if (item->kind != DCP_ITEM_TENSOR || item->dtype != DCP_DTYPE_NONE) {
        return DCP_OK;
    }
    return dcp__in_item(ck, -1, item->fqn, dcp__refuse_dtype(item, err), err);
}

dcp_status dcp__check_box(const dcp_item *item, const dcp_box *box, dcp_error *err)
{
    for (int d = 0; d < item->ndim; d++) {
        int64_t offset = box->offsets[d], size = box->sizes[d];
        if (offset < 0 || size < 0 || offset > item->extents[d] || size > item->extents[d] - offset) {
            return dcp__fail(err, DCP_ARG, "%lld elements from %lld on exceed the extent of dimension %d, %lld", (long long)size,
                             (long long)offset, d, (long long)item->extents[d]);
        }
    }
    return DCP_OK;
}

dcp_status dcp__check_payload(const dcp__entry *e, const dcp__chunk *c, const dcp__payload *p, dcp_error *err)
{
    if (p->dtype != e->item.dtype) {
        return dcp__fail(err, DCP_FORMAT, "the record holds %s, the metadata says %s", dcp_dtype_name(p->dtype),
                         dcp_dtype_name(e->item.dtype));
    }
    if (p->ndim != e->item.ndim || memcmp(p->sizes, c->sizes, (size_t)p->ndim * sizeof *p->sizes) != 0) {
        return dcp__fail(err, DCP_FORMAT, "the record holds shape %s, the metadata says %s",
                         dcp__print_shape(p->ndim, p->sizes).text, dcp__print_shape(e->item.ndim, c->sizes).text);
    }
    return DCP_OK;
}

static dcp_status check_range(uint64_t offset, uint64_t length, uint64_t bytes, dcp_error *err)
{
    if (dcp__range_fits(offset, length, bytes)) {
        return DCP_OK;
    }
    return dcp__fail_at(err, DCP_FORMAT, offset, "%llu bytes at %llu exceed the file's %llu", (unsigned long long)length,
                        (unsigned long long)offset, (unsigned long long)bytes);
}

/* ---- holding the data file ---- */

static dcp_status hold_file(dcp_checkpoint *ck, dcp__located *out, uint32_t file, dcp_file **f, uint64_t *bytes, dcp_error *err)
{
    dcp_status status = dcp__file_acquire(ck, file, f, bytes, err);
    out->holds_file = status == DCP_OK;
    return status;
}

void dcp__located_release(dcp_checkpoint *ck, dcp__located *l)
{
    if (l->inflated) {
        dcp__spool_release(ck, l->inflated);
    }
    if (l->spool) {
        dcp__spool_release(ck, l->spool);
    }
    if (l->holds_file) {
        dcp__file_release(ck, l->file);
    }
    *l = (dcp__located){.file = l->file};
}

void dcp__to_file_offset(const dcp__located *l, dcp_error *err)
{
    if (err && err->offset != DCP_NO_OFFSET) {
        err->offset = l->file_offset == DCP_NO_OFFSET ? DCP_NO_OFFSET : err->offset + l->file_offset;
    }
}

void dcp__to_record_offset(const dcp__storage *s, dcp_status code, dcp_error *err)
{
    bool is_content = code == DCP_FORMAT || code == DCP_CHECKSUM || code == DCP_LIMIT || code == DCP_UNSUPPORTED;
    if (err && is_content && err->offset == DCP_NO_OFFSET) {
        err->offset = s->offset;
    }
}

/* ---- raw elements ---- */

static void raw_payload(const dcp__entry *e, const int64_t *sizes, uint64_t offset, uint64_t bytes, dcp__payload *p)
{
    *p = (dcp__payload){.dtype = e->item.dtype, .ndim = e->item.ndim, .offset = offset, .span_bytes = bytes};
    p->storage = (dcp__storage_span){.offset = offset, .bytes = bytes, .full_bytes = bytes};
    if (p->ndim) {
        memcpy(p->sizes, sizes, (size_t)p->ndim * sizeof *sizes);
    }
    dcp__row_major(p->ndim, p->sizes, p->strides);
}

static dcp_status locate_raw(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp__located *out, dcp_error *err)
{
    const dcp__storage *s = &ck->meta->storages[c->storage];
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = hold_file(ck, out, s->file, &f, &bytes, err);
    status = status == DCP_OK ? check_range(s->offset, s->length, bytes, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    out->source = dcp__source_file(f, 0, bytes);
    out->file_offset = 0;
    raw_payload(e, c->sizes, s->offset, s->length, &out->payload);
    return DCP_OK;
}

/* ---- torch.save files ---- */

static dcp_status locate_in_archive(dcp_checkpoint *ck, const dcp__entry *e, dcp__located *out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = hold_file(ck, out, 0, &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    out->source = dcp__source_file(f, 0, bytes);
    out->file_offset = 0;
    return dcp__archive_payload(&ck->archive, ck->values[e - ck->meta->entries], &out->payload, err);
}

/* ---- safetensors blobs in .distcp files ---- */

/* With a transform the metadata points at an empty zstd frame, one for each tensor, and the blob follows the last, as it is. */
static const uint8_t empty_frame[9] = {0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x00, 0x01, 0x00, 0x00};

static dcp_status skip_empty_frames(dcp_file *f, uint64_t bytes, uint64_t *offset, dcp_error *err)
{
    uint8_t frame[sizeof empty_frame];
    while (dcp__range_fits(*offset, sizeof frame, bytes)) {
        dcp_status status = dcp__read_exact(f, frame, sizeof frame, *offset, err);
        if (status != DCP_OK) {
            return status;
        }
        if (memcmp(frame, empty_frame, sizeof frame) != 0) {
            break;
        }
        *offset += sizeof frame;
    }
    return DCP_OK;
}

/* The parsed header of the blob at `offset`; parsed once, under the lock. */
static dcp_status find_blob(dcp_checkpoint *ck, uint32_t file, dcp_file *f, uint64_t bytes, uint64_t offset, dcp__blob **out,
                            dcp_error *err)
{
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&ck->lock);
    dcp__blob *b = ck->blobs;
    while (b && (b->file != file || b->offset != offset)) {
        b = b->next;
    }
    if (!b) {
        dcp__source src = dcp__source_file(f, offset, bytes - offset);
        b = dcp__calloc(ck->ctx, 1, sizeof *b);
        status = b ? dcp__safetensors_open(ck->ctx, &src, true, &b->header, err) : dcp__nomem(err);
        if (status == DCP_OK) {
            b->file = file;
            b->offset = offset;
            b->next = ck->blobs;
            ck->blobs = b;
        } else {
            dcp__free(ck->ctx, b);
        }
    }
    pthread_mutex_unlock(&ck->lock);
    *out = b;
    return status;
}

static dcp_status locate_in_blob(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp_file *f, uint64_t bytes,
                                 uint64_t offset, dcp__located *out, dcp_error *err)
{
    dcp__blob *b;
    uint64_t index;
    dcp_status status = find_blob(ck, out->file, f, bytes, offset, &b, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!dcp__strmap_get(&b->header.by_name, e->item.fqn, &index)) {
        return dcp__fail_at(err, DCP_FORMAT, offset, "the safetensors header at %llu does not name it",
                            (unsigned long long)offset);
    }
    const dcp__st_tensor *t = &b->header.tensors[index];
    size_t shape_bytes = (size_t)e->item.ndim * sizeof(int64_t);
    if (t->dtype != e->item.dtype || t->ndim != e->item.ndim || memcmp(t->extents, c->sizes, shape_bytes) != 0 ||
        (t->saved_offsets && memcmp(t->saved_offsets, c->offsets, shape_bytes) != 0)) {
        return dcp__fail_at(err, DCP_FORMAT, offset,
                            "the safetensors header at %llu contradicts the metadata on dtype, shape or place",
                            (unsigned long long)offset);
    }
    out->source = dcp__source_file(f, offset, bytes - offset);
    out->file_offset = offset;
    raw_payload(e, c->sizes, t->offset, t->bytes, &out->payload);
    return DCP_OK;
}

/* ---- records ---- */

dcp_status dcp__sniff_storage(dcp_file *f, uint64_t bytes, const dcp__storage *s, uint64_t *offset, dcp__sniff *out,
                              dcp_error *err)
{
    uint8_t head[16];
    dcp_status status = DCP_OK;
    *offset = s->offset;
    if (s->transforms) {
        status = skip_empty_frames(f, bytes, offset, err);
    }
    uint64_t left = *offset < bytes ? bytes - *offset : 0;
    size_t n = left < sizeof head ? (size_t)left : sizeof head;
    status = status == DCP_OK ? dcp__read_exact(f, head, n, *offset, err) : status;
    if (status == DCP_OK) {
        *out = dcp__sniff_bytes(head, n, left);
    }
    return status;
}

static dcp_status locate_record(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp__located *out, dcp_error *err)
{
    const dcp__storage *s = &ck->meta->storages[c->storage];
    dcp_file *f;
    uint64_t bytes, offset;
    dcp__sniff sniff;
    dcp_status status = hold_file(ck, out, s->file, &f, &bytes, err);
    status = status == DCP_OK ? dcp__sniff_storage(f, bytes, s, &offset, &sniff, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    if (sniff == DCP__IS_SAFETENSORS) {
        return locate_in_blob(ck, e, c, f, bytes, offset, out, err);
    }
    status = check_range(s->offset, s->length, bytes, err);
    if (status == DCP_OK && s->transforms) {
        status = dcp__spool_acquire(ck, c->storage, dcp__spool_limit(ck, e, c), &out->spool, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    out->source = out->spool ? dcp__spool_source(out->spool) : dcp__source_file(f, s->offset, s->length);
    out->file_offset = out->spool ? DCP_NO_OFFSET : s->offset;
    status = dcp__record_payload(ck->ctx, &out->source, &out->payload, err);
    if (status != DCP_OK) {
        dcp__to_file_offset(out, err);
    }
    return status;
}

/* ---- any ---- */

/* A deflated storage is read from its inflated bytes. */
static dcp_status inflate_storage(dcp_checkpoint *ck, dcp__located *out, dcp_error *err)
{
    dcp__payload *p = &out->payload;
    if (!p->storage.is_deflated) {
        return DCP_OK;
    }
    dcp_status status = dcp__spool_inflate(ck, &out->source, &p->storage, &out->inflated, err);
    if (status == DCP_OK) {
        out->source = dcp__spool_source(out->inflated);
        out->file_offset = DCP_NO_OFFSET;
        p->offset -= p->storage.offset;
    }
    return status;
}

dcp_status dcp__locate_chunk(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp__located *out, dcp_error *err)
{
    *out = (dcp__located){0};
    if (c->storage == DCP__NO_STORAGE) {
        return dcp__fail(err, DCP_FORMAT, "the metadata names no place for one of its chunks");
    }
    const dcp__storage *s = &ck->meta->storages[c->storage];
    out->file = s->file;
    dcp_status status;
    if (ck->values) {
        status = locate_in_archive(ck, e, out, err);
    } else if (s->form == DCP__FORM_RAW) {
        status = locate_raw(ck, e, c, out, err);
    } else {
        status = locate_record(ck, e, c, out, err);
    }
    status = status == DCP_OK ? dcp__check_payload(e, c, &out->payload, err) : status;
    status = status == DCP_OK ? inflate_storage(ck, out, err) : status;
    if (status != DCP_OK) {
        if (out->holds_file) {
            dcp__to_record_offset(s, status, err);
        }
        dcp__located_release(ck, out);
    }
    return status;
}
