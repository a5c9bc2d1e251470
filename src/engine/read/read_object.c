/* Objects: decoded from their record, or taken from the tree of a torch.save file; tensors in them are read as well. */
#include <string.h>

#include "engine/read/checkpoint.h"
#include "state/children.h"
#include "state/strided.h"
#include "state/value.h"

/* What the tensors of one object are read from. */
typedef struct reading {
    dcp_checkpoint *ck;
    const dcp__archive *archive;
    dcp__source source;
    dcp__tile_buf buf;
    dcp__strmap copies;   /* address of a value -> address of its copy, borrowed from the containers above */
    dcp__strmap compared; /* numbers of the storages whose CRC is right; in the values, which outlive it */
    dcp__arena arena;     /* the keys of copies */
} reading;

/* ---- tensors ---- */

/* Once for a storage, however many views of it there are. */
static dcp_status compare_crc(reading *r, const dcp_value *v, const dcp__storage_span *storage, dcp_error *err)
{
    const dcp__lazy *lazy = dcp__value_lazy(v);
    dcp_str key = {(const char *)&lazy->storage, sizeof lazy->storage};
    uint64_t unused;
    if (!r->ck->check_crc || !storage->has_crc || storage->is_deflated || dcp__strmap_get(&r->compared, key, &unused)) {
        return DCP_OK;
    }
    dcp_status status = dcp__check_storage_crc(r->ck->ctx, &r->source, storage, err);
    return status == DCP_OK ? dcp__strmap_add(&r->compared, key, 0, NULL, err) : status;
}

static dcp_status read_tensor(reading *r, dcp_value *from, dcp_value *to, dcp_error *err)
{
    dcp__payload p;
    dcp__source source = r->source;
    dcp__spool *inflated = NULL;
    int64_t zeros[DCP_MAX_NDIM] = {0}, strides[DCP_MAX_NDIM];
    dcp_status status = dcp__archive_payload(r->archive, from, &p, err);
    status = status == DCP_OK ? compare_crc(r, from, &p.storage, err) : status;
    if (status == DCP_OK && p.storage.is_deflated) {
        status = dcp__spool_inflate(r->ck, &source, &p.storage, &inflated, err);
        if (status == DCP_OK) {
            source = dcp__spool_source(inflated);
            p.offset -= p.storage.offset;
        }
    }
    status = status == DCP_OK ? dcp__lazy_tensor_materialize(to, err) : status;
    if (status == DCP_OK) {
        dcp__row_major(p.ndim, p.sizes, strides);
        status = dcp__read_box(&source, &p, zeros, p.sizes, dcp_value_tensor(to)->data, strides, &r->buf, err);
    }
    if (inflated) {
        dcp__spool_release(r->ck, inflated);
    }
    return status;
}

/* ---- copies ---- */

/* Values may stand in many places, so each is copied once: the depth of a tree of shared lists says nothing about its size. */
static bool find_copy(const reading *r, dcp_value *const *key, dcp_value **out)
{
    uint64_t copy;
    if (!dcp__strmap_get(&r->copies, (dcp_str){(const char *)key, sizeof *key}, &copy)) {
        return false;
    }
    *out = dcp_value_retain((dcp_value *)(uintptr_t)copy);
    return true;
}

static dcp_status note_copy(reading *r, dcp_value *v, dcp_value *copy, dcp_error *err)
{
    dcp_value **key = dcp__arena_alloc(&r->arena, sizeof(dcp_value *));
    if (!key) {
        return dcp__nomem(err);
    }
    *key = v;
    return dcp__strmap_add(&r->copies, (dcp_str){(const char *)key, sizeof *key}, (uintptr_t)copy, NULL, err);
}

static dcp_status copy_tensor(reading *r, dcp_value *v, dcp_value **out, dcp_error *err)
{
    dcp_value *copy;
    dcp_status status = dcp__lazy_tensor_create(r->ck->ctx, dcp_value_tensor(v), dcp__value_lazy(v), &copy, err);
    if (status != DCP_OK) {
        return status;
    }
    status = read_tensor(r, v, copy, err);
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

static bool is_container(dcp_kind kind)
{
    return kind >= DCP_KIND_LIST && kind <= DCP_KIND_ORDERED_DICT && kind != DCP_KIND_SIZE;
}

/* *out is a new reference to a value with all tensors below read; the reader of objects has bounded the depth. */
static dcp_status copy_below(void *user, dcp_value *v, dcp_value **out, dcp_error *err)
{
    reading *r = user;
    dcp_kind kind = dcp_value_kind(v);
    dcp_value *copy;
    if (kind != DCP_KIND_TENSOR && kind != DCP_KIND_OPAQUE && !is_container(kind)) {
        *out = dcp_value_retain(v);
        return DCP_OK;
    }
    if (find_copy(r, &v, out)) {
        return DCP_OK;
    }
    dcp_status status =
        kind == DCP_KIND_TENSOR ? copy_tensor(r, v, &copy, err) : dcp__map_children(r->ck->ctx, v, copy_below, r, &copy, err);
    if (status != DCP_OK) {
        return status;
    }
    status = note_copy(r, v, copy, err);
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

dcp_status dcp__read_value(dcp_checkpoint *ck, const dcp__archive *a, const dcp__source *src, dcp_value *v, dcp_value **out,
                           dcp_error *err)
{
    if (a->object.n_storages == 0) {
        *out = dcp_value_retain(v);
        return DCP_OK;
    }
    reading r = {.ck = ck, .archive = a, .source = *src, .buf = {.ctx = ck->ctx}};
    dcp__strmap_init(&r.copies, ck->ctx);
    dcp__strmap_init(&r.compared, ck->ctx);
    dcp__arena_init(&r.arena, ck->ctx, UINT64_MAX);
    dcp_status status = copy_below(&r, v, out, err);
    dcp__tile_buf_reset(&r.buf);
    dcp__strmap_reset(&r.copies);
    dcp__strmap_reset(&r.compared);
    dcp__arena_reset(&r.arena);
    return status;
}

/* ---- objects ---- */

static dcp_status read_from_tree(dcp_checkpoint *ck, const dcp__entry *e, dcp_value **out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__file_acquire(ck, 0, &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__source src = dcp__source_file(f, 0, bytes);
    status = dcp__read_value(ck, &ck->archive, &src, ck->values[e - ck->meta->entries], out, err);
    dcp__file_release(ck, 0);
    return status;
}

/* What becomes of a record: a value, or with value NULL its bytes. */
typedef struct wanted {
    dcp_value **value;
    char **bytes;
    size_t *bytes_len;
} wanted;

static dcp_status copy_record(dcp_checkpoint *ck, const dcp__source *src, const wanted *w, dcp_error *err)
{
    if (src->size >= SIZE_MAX) {
        return dcp__fail(err, DCP_LIMIT, "record of %llu bytes", (unsigned long long)src->size);
    }
    char *copy = dcp__alloc(ck->ctx, (size_t)src->size + 1);
    if (!copy) {
        return dcp__nomem(err);
    }
    dcp_status status = dcp__source_read(src, 0, copy, (size_t)src->size, err);
    if (status != DCP_OK) {
        dcp__free(ck->ctx, copy);
        return status;
    }
    copy[src->size] = 0;
    *w->bytes = copy;
    *w->bytes_len = (size_t)src->size;
    return DCP_OK;
}

static dcp_status take_record(dcp_checkpoint *ck, const dcp__source *src, const wanted *w, dcp_error *err)
{
    dcp__archive archive = {0};
    if (!w->value) {
        return copy_record(ck, src, w, err);
    }
    dcp_status status = dcp__archive_open(ck->ctx, src, &archive, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__read_value(ck, &archive, src, archive.object.value, w->value, err);
    dcp__archive_reset(&archive);
    return status;
}

static dcp_status read_decoded_record(dcp_checkpoint *ck, uint32_t storage, const wanted *w, dcp_error *err)
{
    dcp__spool *spool;
    dcp__located decoded = {.file_offset = DCP_NO_OFFSET};
    dcp_status status = dcp__spool_acquire(ck, storage, dcp__spool_limit(ck, NULL, NULL), &spool, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__source src = dcp__spool_source(spool);
    status = take_record(ck, &src, w, err);
    if (status != DCP_OK) {
        dcp__to_file_offset(&decoded, err);
    }
    dcp__spool_release(ck, spool);
    return status;
}

static dcp_status read_stored_record(dcp_checkpoint *ck, const dcp__storage *s, const wanted *w, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp__located place = {.file_offset = s->offset};
    dcp_status status = dcp__file_acquire(ck, s->file, &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!dcp__range_fits(s->offset, s->length, bytes)) {
        status = dcp__fail_at(err, DCP_FORMAT, 0, "record of %llu bytes at %llu exceeds the file's %llu",
                              (unsigned long long)s->length, (unsigned long long)s->offset, (unsigned long long)bytes);
    } else {
        dcp__source src = dcp__source_file(f, s->offset, s->length);
        status = take_record(ck, &src, w, err);
    }
    if (status != DCP_OK) {
        dcp__to_file_offset(&place, err);
        dcp__to_record_offset(s, status, err);
    }
    dcp__file_release(ck, s->file);
    return status;
}

static dcp_status read_record(dcp_checkpoint *ck, uint32_t storage, const wanted *w, dcp_error *err)
{
    const dcp__storage *s = &ck->meta->storages[storage];
    if (!s->transforms) {
        return read_stored_record(ck, s, w, err);
    }
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__file_acquire(ck, s->file, &f, &bytes, err);
    if (status != DCP_OK) {
        return status; /* none of what is in the record */
    }
    status = read_decoded_record(ck, storage, w, err);
    if (status != DCP_OK) {
        dcp__to_record_offset(s, status, err);
    }
    dcp__file_release(ck, s->file);
    return status;
}

static dcp_status read_item(dcp_checkpoint *ck, const dcp_item *item, const wanted *w, dcp_error *err)
{
    const dcp__entry *e = dcp__entry_of(item);
    int64_t file = -1;
    dcp_status status;
    if (item->kind != DCP_ITEM_OBJECT) {
        status = dcp__fail(err, DCP_MISMATCH, "it is a tensor, not an object");
    } else if (ck->values) {
        status = w->value ? read_from_tree(ck, e, w->value, err)
                          : dcp__fail(err, DCP_UNSUPPORTED, "it is part of a torch.save file and has no record of its own");
        file = 0;
    } else if (e->storage == DCP__NO_STORAGE) {
        status = dcp__fail(err, DCP_FORMAT, "the metadata names no place for it");
    } else {
        status = read_record(ck, e->storage, w, err);
        file = ck->meta->storages[e->storage].file;
    }
    return status == DCP_OK ? status : dcp__in_item(ck, file, item->fqn, status, err);
}

dcp_status dcp_read_object(dcp_checkpoint *ck, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    if (!ck || !item || !out) {
        return dcp__fail(err, DCP_ARG, "read: no %s", !ck ? "checkpoint" : !item ? "item" : "place for the result");
    }
    return read_item(ck, item, &(wanted){.value = out}, err);
}

dcp_status dcp_read_record(dcp_checkpoint *ck, const dcp_item *item, char **out, size_t *out_len, dcp_error *err)
{
    if (!ck || !item || !out || !out_len) {
        return dcp__fail(err, DCP_ARG, "read: no %s", !ck ? "checkpoint" : !item ? "item" : "place for the result");
    }
    return read_item(ck, item, &(wanted){.bytes = out, .bytes_len = out_len}, err);
}
