/* A checkpoint as the source of a save: what is written is read at that moment. */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "engine/save/copy.h"
#include "format/pickle_writer.h"
#include "state/strided.h"
#include "state/value.h"

/* ---- reading row-major bytes ---- */

dcp_status dcp__read_item_bytes(dcp_checkpoint *ck, const dcp__entry *e, const dcp_write_item *item, uint64_t offset, void *buf,
                                size_t n, dcp_error *err)
{
    size_t elem = dcp_dtype_bytes(item->dtype);
    int64_t start = (int64_t)(offset / elem), left = (int64_t)(n / elem);
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    char *out = buf;
    dcp_status status = DCP_OK;
    while (left > 0 && status == DCP_OK) {
        int64_t elems = dcp__box_at(item->ndim, item->box.sizes, start, left, offsets, sizes);
        for (int d = 0; d < item->ndim; d++) {
            offsets[d] += item->box.offsets[d];
        }
        dcp_box box = {offsets, sizes};
        dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, sizes, out);
        status = dcp_read(ck, &e->item, &box, &dst, err);
        start += elems;
        left -= elems;
        out += (size_t)elems * elem;
    }
    return status;
}

/* The records of a copy get new checksums, so the old ones must be right: a block is not a whole record, and its CRC is taken
 * over all blocks of the item. */

static dcp_status in_origin(const dcp__origin *from, dcp_status status, dcp_error *err)
{
    uint32_t file = from->ck->meta->storages[from->chunk->storage].file;
    return status == DCP_OK ? status : dcp__in_item(from->ck, file, from->entry->item.fqn, status, err);
}

static dcp_status read_plain(const dcp__origin *from, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    uint32_t index = from->ck->meta->storages[from->chunk->storage].file;
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__file_acquire(from->ck, index, &f, &bytes, err);
    if (status == DCP_OK) {
        status = dcp__read_exact(f, buf, n, from->offset + offset, err);
        dcp__file_release(from->ck, index);
    }
    return in_origin(from, status, err);
}

bool dcp__mark_compared(dcp_checkpoint *ck, const dcp__entry *e)
{
    if (!ck->compared) {
        return false;
    }
    int64_t storage = dcp__value_lazy(ck->values[e - ck->meta->entries])->storage;
    return __atomic_exchange_n(&ck->compared[storage], true, __ATOMIC_RELAXED);
}

/* Before the first of several blocks. The CRC of a storage whose order is another one is checked at once. */
static dcp_status look_at_origin(dcp__origin *from, dcp_error *err)
{
    dcp__located l;
    dcp_status status = dcp__locate_chunk(from->ck, from->entry, from->chunk, &l, err);
    if (status != DCP_OK) {
        return in_origin(from, status, err);
    }
    const dcp__payload *p = &l.payload;
    bool in_order = !p->is_big_endian && !p->is_conj && !p->is_neg && dcp__is_row_major(p->ndim, p->sizes, p->strides);
    bool has_crc = from->ck->check_crc && p->storage.has_crc;
    from->is_plain = in_order && l.file_offset != DCP_NO_OFFSET;
    from->offset = from->is_plain ? l.file_offset + p->offset : 0;
    from->is_summed = has_crc && in_order && p->span_bytes == p->storage.full_bytes;
    from->expected = p->storage.crc;
    from->crc_at = l.file_offset != DCP_NO_OFFSET ? l.file_offset + p->storage.offset : DCP_NO_OFFSET;
    from->crc = 0;
    if (has_crc && !from->is_summed && !p->storage.is_deflated && !dcp__mark_compared(from->ck, from->entry)) {
        status = dcp__check_storage_crc(from->ck->ctx, &l.source, &p->storage, err);
    }
    if (status != DCP_OK) {
        dcp__to_file_offset(&l, err);
    }
    dcp__located_release(from->ck, &l);
    return in_origin(from, status, err);
}

dcp_status dcp__origin_read(dcp__origin *from, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    bool reads_compare = from->ck->check_crc && !from->ck->compared;
    if (from->chunk->storage == DCP__NO_STORAGE || (n == item->bytes && reads_compare)) {
        from->is_summed = false;
        return dcp__read_item_bytes(from->ck, from->entry, item, offset, buf, n, err);
    }
    dcp_status status = offset == 0 ? look_at_origin(from, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    return from->is_plain ? read_plain(from, offset, buf, n, err)
                          : dcp__read_item_bytes(from->ck, from->entry, item, offset, buf, n, err);
}

dcp_status dcp__origin_compare(const dcp__origin *from, uint32_t crc, dcp_error *err)
{
    if (!from->is_summed || crc == from->expected) {
        return DCP_OK;
    }
    dcp_status status =
        dcp__fail_at(err, DCP_CHECKSUM, from->crc_at, "crc-32 of the payload is %08x, the record says %08x", crc, from->expected);
    return in_origin(from, status, err);
}

dcp_status dcp__origin_pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    dcp__origin *from = user;
    dcp_status status = dcp__origin_read(from, item, offset, buf, n, err);
    if (status != DCP_OK || !from->is_summed) {
        return status;
    }
    from->crc = dcp__crc32(from->crc, buf, n);
    return offset + n == item->bytes ? dcp__origin_compare(from, from->crc, err) : DCP_OK;
}

/* ---- items ---- */

static dcp_status is_blob(dcp_checkpoint *ck, const dcp__storage *s, bool *out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes, offset;
    dcp__sniff sniff = DCP__IS_UNKNOWN;
    dcp_status status = dcp__file_acquire(ck, s->file, &f, &bytes, err);
    if (status == DCP_OK) {
        status = dcp__sniff_storage(f, bytes, s, &offset, &sniff, err);
        dcp__file_release(ck, s->file);
    }
    *out = sniff == DCP__IS_SAFETENSORS;
    return status;
}

/* The tensors of a safetensors blob have one place and are different all the same. */
dcp_status dcp__tie_of(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, uint64_t *tie, dcp_error *err)
{
    const dcp__storage *s = &ck->meta->storages[c->storage];
    uint64_t parts[5] = {s->file, s->offset, s->length};
    bool blob = false;
    dcp_status status = DCP_OK;
    if (ck->values) {
        const dcp_value *v = ck->values[e - ck->meta->entries];
        const dcp_tensor *t = dcp_value_tensor(v);
        parts[3] = (uint64_t)dcp__value_lazy(v)->storage_offset;
        parts[4] = t->strides ? dcp__xxh3_64(t->strides, (size_t)t->ndim * sizeof *t->strides) : 0;
    } else if (s->form == DCP__FORM_RECORD) {
        status = is_blob(ck, s, &blob, err);
    }
    *tie = blob ? 0 : dcp__xxh3_64(parts, sizeof parts) | 1;
    return status;
}

dcp_status dcp__tie_of_entry(dcp_checkpoint *ck, const dcp__entry *e, uint64_t *tie, dcp_error *err)
{
    size_t box_bytes = (size_t)e->item.ndim * sizeof(int64_t);
    uint64_t sum = 1;
    *tie = 0;
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + i];
        uint64_t one = 0;
        dcp_status status = c->storage == DCP__NO_STORAGE ? DCP_OK : dcp__tie_of(ck, e, c, &one, err);
        if (status != DCP_OK || one == 0) {
            return status;
        }
        uint64_t parts[] = {sum, one, dcp__xxh3_64(c->offsets, box_bytes), dcp__xxh3_64(c->sizes, box_bytes)};
        sum = dcp__xxh3_64(parts, sizeof parts);
    }
    *tie = e->item.bytes ? sum | 1 : 0;
    return DCP_OK;
}

dcp_status dcp__plan_add_tensor(dcp_checkpoint *ck, dcp_save_plan *p, const dcp__entry *e, const dcp_write_item *name,
                                dcp_error *err)
{
    dcp_write_item item = {.kind = DCP_ITEM_TENSOR,
                           .fqn = name->fqn,
                           .path = name->path,
                           .path_len = name->path_len,
                           .dtype = e->item.dtype,
                           .ndim = e->item.ndim,
                           .global_extents = e->item.extents,
                           .pull = dcp__origin_pull};
    dcp_status status = dcp__check_dtype(ck, &e->item, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__origin *origins = dcp__arena_alloc(&p->arena, e->item.n_chunks * sizeof *origins);
    if (!origins) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < e->item.n_chunks && status == DCP_OK; i++) {
        const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + i];
        int64_t elems;
        if (!dcp__elems(e->item.ndim, c->sizes, &elems) || (elems == 0 && (e->item.bytes || i > 0))) {
            continue; /* an empty shard; a tensor without elements has one */
        }
        origins[i] = (dcp__origin){.ck = ck, .entry = e, .chunk = c};
        item.pull_user = &origins[i];
        item.box = (dcp_box){c->offsets, c->sizes};
        item.tie = 0;
        status = elems && c->storage != DCP__NO_STORAGE ? dcp__tie_of(ck, e, c, &item.tie, err) : DCP_OK;
        if (status != DCP_OK) {
            return dcp__in_item(ck, ck->meta->storages[c->storage].file, e->item.fqn, status, err);
        }
        item.tensor = dcp_tensor_make(e->item.dtype, e->item.ndim, c->sizes, NULL);
        status = dcp_save_plan_add(p, &item, err);
    }
    return status;
}

/* A value that has storages outside of tensors, such as a quantised tensor, cannot be written anew, since nothing tells what else
 * refers to them. */
static dcp_status can_be_written(dcp_context *ctx, const dcp_value *v, bool *out, dcp_error *err)
{
    dcp__buf pickle;
    dcp__write_storage *storages = NULL;
    size_t n;
    dcp_error fault = DCP_ERROR_INIT;
    dcp__buf_init(&pickle, ctx);
    dcp_status status = dcp__pickle_value(&pickle, v, &storages, &n, &fault);
    dcp__free(ctx, storages);
    dcp__buf_reset(&pickle);
    *out = status != DCP_UNSUPPORTED;
    if (status != DCP_OK && *out && err) {
        *err = fault;
    }
    return *out ? status : DCP_OK;
}

/* In place of such a value: the record that it was read from, as it is, kept by the plan. Objects of torch.save files have none
 * of their own. */
static dcp_status take_record(dcp_checkpoint *ck, dcp_save_plan *p, const dcp_item *item, dcp_value **v, dcp_error *err)
{
    char *bytes;
    size_t len;
    dcp_status status = ck->values ? dcp__fail(err, DCP_UNSUPPORTED, "a value that refers to a storage outside of tensors")
                                   : dcp_read_record(ck, item, &bytes, &len, err);
    if (status != DCP_OK) {
        return ck->values ? dcp__in_item(ck, 0, item->fqn, status, err) : status;
    }
    char *kept = dcp__arena_alloc(&p->arena, len);
    if (kept) {
        memcpy(kept, bytes, len);
        dcp_value_free(*v);
        *v = NULL;
        status = dcp_record_create(ck->ctx, kept, len, v, err);
    }
    dcp_text_free(ck->ctx, bytes);
    return kept ? status : dcp__arena_fail(&p->arena, err);
}

dcp_status dcp__read_for_copy(dcp_checkpoint *ck, dcp_save_plan *p, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    dcp_value *v;
    bool is_writable;
    dcp_status status = dcp_read_object(ck, item, &v, err);
    if (status != DCP_OK) {
        return status;
    }
    status = can_be_written(ck->ctx, v, &is_writable, err);
    if (status == DCP_OK && !is_writable) {
        status = take_record(ck, p, item, &v, err);
    }
    if (status != DCP_OK) {
        dcp_value_free(v);
        return status;
    }
    *out = v;
    return DCP_OK;
}

static dcp_status add_object(dcp_checkpoint *ck, dcp_save_plan *p, size_t index, int rank, dcp_error *err)
{
    const dcp__entry *e = &ck->meta->entries[index];
    dcp_write_item item = {.kind = DCP_ITEM_OBJECT};
    dcp_value *v;
    dcp_status status = dcp__save_plan_name(p, e->item.fqn, e->item.path, e->item.path_len, rank, &item, err);
    status = status == DCP_OK ? dcp__read_for_copy(ck, p, &e->item, &v, err) : status;
    status = status == DCP_OK ? dcp__save_plan_hold(p, v, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    item.object = v;
    return dcp_save_plan_add(p, &item, err);
}

dcp_status dcp__plan_add_entry(dcp_checkpoint *ck, dcp_save_plan *p, size_t index, int rank, dcp_error *err)
{
    const dcp__entry *e = &ck->meta->entries[index];
    dcp_write_item name;
    if (e->item.kind != DCP_ITEM_TENSOR) {
        return add_object(ck, p, index, rank, err);
    }
    dcp_status status = dcp__save_plan_name(p, e->item.fqn, e->item.path, e->item.path_len, rank, &name, err);
    return status == DCP_OK ? dcp__plan_add_tensor(ck, p, e, &name, err) : status;
}

const dcp__container *dcp__containers_of(const dcp_checkpoint *ck, size_t *n)
{
    if (ck->flat) {
        return dcp__flat_containers(ck->flat, n);
    }
    *n = ck->meta->own.n_containers;
    return ck->meta->own.containers;
}

dcp_status dcp__plan_add_own_facts(const dcp_checkpoint *ck, dcp_save_plan *p, dcp_error *err)
{
    size_t n;
    const dcp__container *containers = dcp__containers_of(ck, &n);
    p->extras = ck->meta->extras;
    p->own_extras = ck->meta->own.extras;
    return dcp__save_plan_add_containers(p, containers, n, err);
}

dcp_status dcp_plan_copy(dcp_checkpoint *ck, dcp_save_plan **out, dcp_error *err)
{
    dcp_save_plan *p;
    if (!ck || !out) {
        return dcp__fail(err, DCP_ARG, "copy: no %s", ck ? "place for the plan" : "checkpoint");
    }
    dcp_status status = dcp__save_plan_create(ck->ctx, &p, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < ck->meta->n_entries && status == DCP_OK; i++) {
        status = dcp__plan_add_entry(ck, p, i, ck->meta->entries[i].item.rank, err);
    }
    status = status == DCP_OK ? dcp__plan_add_own_facts(ck, p, err) : status;
    if (status != DCP_OK) {
        dcp_save_plan_free(p);
        return status;
    }
    *out = p;
    return DCP_OK;
}

dcp_status dcp__open_origin(dcp_context *ctx, const char *path, const dcp_open_opts *given, dcp_checkpoint **out, dcp_error *err)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    if (given && given->struct_size != sizeof opts) {
        return dcp_checkpoint_open(ctx, path, given, out, err); /* which refuses it */
    }
    opts = given ? *given : opts;
    opts.check_crc = true; /* else a broken record would come out with a CRC that is right */
    dcp_status status = dcp_checkpoint_open(ctx, path, &opts, &ck, err);
    if (status != DCP_OK) {
        return status;
    }
    if (ck->values) {
        ck->compared = dcp__calloc(ck->ctx, ck->archive.object.n_storages, sizeof *ck->compared);
        if (!ck->compared) {
            dcp_checkpoint_close(ck);
            return dcp__nomem(err);
        }
    }
    *out = ck;
    return DCP_OK;
}

/* ---- the save ---- */

dcp_status dcp__save_planned(dcp_context *ctx, const char *to, const dcp_save_opts *opts, dcp_status mine,
                             const dcp_save_plan *plan, dcp__gate *gate, dcp_save_report *report, dcp_error *err)
{
    dcp_save_session *session;
    dcp_status status = dcp__save_begin(ctx, to, opts, mine, &session, err);
    if (status != DCP_OK) {
        return status;
    }
    session->gate = gate;
    status = dcp_save_write(session, plan, err);
    if (status == DCP_OK) {
        return dcp_save_commit(session, report, err);
    }
    dcp_save_abort(session);
    return status;
}

dcp_status dcp_copy(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to, const dcp_save_opts *opts,
                    dcp_save_report *report, dcp_error *err)
{
    dcp_checkpoint *ck;
    dcp_save_plan *plan = NULL;
    if (!from || !to) {
        return dcp__fail(err, DCP_ARG, "copy: no path");
    }
    ctx = dcp__context(ctx);
    dcp_status status = dcp__open_origin(ctx, from, open, &ck, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_plan_copy(ck, &plan, err);
    status = status == DCP_OK ? dcp__save_planned(ctx, to, opts, DCP_OK, plan, NULL, report, err) : status;
    dcp_save_plan_free(plan);
    dcp_checkpoint_close(ck);
    return status;
}
