/* A torch.save file as a checkpoint: its tree flattened by the rule of PyTorch 2.4 and newer. */
#include <string.h>

#include "engine/read/checkpoint.h"
#include "state/containers.h"
#include "state/value.h"

/* The archive is kept open through its source, which reads from the one data file. */
static dcp_status open_archive(dcp_checkpoint *ck, const char *name, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__open_relative(ck, dcp_str_of(name), &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__source src = dcp__source_file(f, 0, bytes);
    status = dcp__archive_open(ck->ctx, &src, &ck->archive, err);
    f->storage->ops->close(f, NULL);
    return status;
}

/* One storage entry for each storage of the archive, so that tied tensors are seen to be tied. */
static void add_storages(dcp_checkpoint *ck)
{
    dcp__metadata *m = ck->meta;
    size_t n = ck->archive.object.n_storages;
    for (size_t i = 0; i < n; i++) {
        m->storages[i] =
            (dcp__storage){.offset = ck->archive.spans[i].offset, .length = ck->archive.spans[i].bytes, .form = DCP__FORM_RAW};
    }
    m->n_storages = n;
}

static void fill_tensor(dcp__metadata *m, dcp__entry *e, const dcp_value *v, const int64_t *zeros)
{
    const dcp_tensor *t = dcp_value_tensor(v);
    const dcp__lazy *lazy = dcp__value_lazy(v);
    int64_t elems = 1;
    for (int d = 0; d < t->ndim; d++) {
        elems *= t->extents[d]; /* the reader of the archive has checked it against the storage */
    }
    e->item.kind = DCP_ITEM_TENSOR;
    e->item.dtype = t->dtype;
    e->item.ndim = t->ndim;
    e->item.extents = t->extents;
    e->item.bytes = (uint64_t)elems * dcp_dtype_bytes(t->dtype);
    m->chunks[m->n_chunks++] =
        (dcp__chunk){zeros, t->extents, lazy && lazy->storage >= 0 ? (uint32_t)lazy->storage : DCP__NO_STORAGE};
}

static dcp_status add_entries(dcp_checkpoint *ck, dcp_str name, const dcp_leaf *leaves, size_t n, dcp_error *err)
{
    dcp__metadata *m = ck->meta;
    dcp_status status = dcp__metadata_reserve(m, n, n, ck->archive.object.n_storages, 1, 0, err);
    int64_t *zeros = dcp__arena_alloc(&m->arena, DCP_MAX_NDIM * sizeof *zeros);
    ck->values = dcp__calloc(ck->ctx, n, sizeof(dcp_value *));
    if (status != DCP_OK || !zeros || !ck->values) {
        return status != DCP_OK ? status : dcp__nomem(err);
    }
    add_storages(ck);
    m->files[m->n_files++] = name;
    memset(zeros, 0, DCP_MAX_NDIM * sizeof *zeros);
    for (size_t i = 0; i < n; i++) {
        const dcp_leaf *leaf = &leaves[i];
        dcp__entry *e = &m->entries[m->n_entries++];
        *e = (dcp__entry){.item = {.fqn = leaf->fqn,
                                   .kind = DCP_ITEM_OBJECT,
                                   .rank = -1,
                                   .n_chunks = 1,
                                   .path = leaf->path,
                                   .path_len = leaf->path_len},
                          .first_chunk = m->n_chunks,
                          .storage = DCP__NO_STORAGE};
        ck->values[i] = leaf->value;
        if (dcp_value_kind(leaf->value) == DCP_KIND_TENSOR) {
            fill_tensor(m, e, leaf->value, zeros);
        }
        status = dcp__strmap_add(&m->by_fqn, leaf->fqn, i, NULL, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

/* Whatever is not a dict at the top is one item without a name. */
static dcp_status add_root(dcp_checkpoint *ck, dcp_str name, dcp_error *err)
{
    dcp_value *root = ck->archive.object.value;
    dcp_kind kind = dcp_value_kind(root);
    if (kind != DCP_KIND_DICT && kind != DCP_KIND_ORDERED_DICT) {
        dcp_leaf leaf = {.fqn = {"", 0}, .value = root};
        return add_entries(ck, name, &leaf, 1, err);
    }
    dcp_status status = dcp__flatten_any(ck->ctx, root, DCP_FLATTEN_2_4, &ck->flat, err);
    if (status != DCP_OK) {
        return status;
    }
    return add_entries(ck, name, dcp_flat_leaf(ck->flat, 0), dcp_flat_count(ck->flat), err);
}

dcp_status dcp__open_torch(dcp_checkpoint *ck, const char *name, dcp_error *err)
{
    dcp_status status = open_archive(ck, name, err);
    status = status == DCP_OK ? dcp__metadata_create(ck->ctx, &ck->meta, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    ck->world = 1;
    dcp_str file = dcp__arena_str(&ck->meta->arena, dcp_str_of(name));
    return file.ptr ? add_root(ck, file, err) : dcp__arena_fail(&ck->meta->arena, err);
}
