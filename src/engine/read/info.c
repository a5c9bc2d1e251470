/* Questions about an open checkpoint that its metadata answers. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/read/checkpoint.h"

size_t dcp_checkpoint_count(const dcp_checkpoint *ck)
{
    return ck ? ck->meta->n_entries : 0;
}

const dcp_item *dcp_checkpoint_item(const dcp_checkpoint *ck, size_t i)
{
    return i < dcp_checkpoint_count(ck) ? &ck->meta->entries[i].item : NULL;
}

static bool is_named(const dcp_item *item, dcp_str fqn)
{
    return item->fqn.len == fqn.len && (fqn.len == 0 || memcmp(item->fqn.ptr, fqn.ptr, fqn.len) == 0);
}

/* First entry of a name; entries of single ranks follow each other. */
static const dcp_item *first_of(const dcp_checkpoint *ck, dcp_str fqn, size_t *index)
{
    uint64_t found;
    if (!ck || !dcp__strmap_get(&ck->meta->by_fqn, fqn, &found)) {
        return NULL;
    }
    *index = (size_t)found;
    return &ck->meta->entries[found].item;
}

const dcp_item *dcp_checkpoint_find(const dcp_checkpoint *ck, dcp_str fqn)
{
    size_t i;
    const dcp_item *item = first_of(ck, fqn, &i);
    const dcp_item *next = item ? dcp_checkpoint_item(ck, i + 1) : NULL;
    return next && item->rank >= 0 && is_named(next, fqn) ? NULL : item;
}

const dcp_item *dcp_checkpoint_find_rank(const dcp_checkpoint *ck, dcp_str fqn, int rank)
{
    size_t i;
    const dcp_item *item = first_of(ck, fqn, &i);
    while (item && is_named(item, fqn)) {
        if (item->rank < 0 || item->rank == rank) {
            return item;
        }
        item = dcp_checkpoint_item(ck, ++i);
    }
    return NULL;
}

static void describe_storage(const dcp__metadata *m, uint32_t storage, dcp_chunk_info *out)
{
    if (storage == DCP__NO_STORAGE) {
        out->file = NULL;
        out->transforms = "";
        return;
    }
    const dcp__storage *s = &m->storages[storage];
    out->file = m->files[s->file].ptr;
    out->offset = s->offset;
    out->length = s->length;
    out->transforms = m->transforms[s->transforms].ptr;
}

dcp_status dcp_item_chunk(const dcp_checkpoint *ck, const dcp_item *item, size_t i, dcp_chunk_info *out, dcp_error *err)
{
    if (!ck || !item || !out || i >= item->n_chunks) {
        return dcp__fail(err, DCP_ARG, "chunk %zu of %zu", i, item ? item->n_chunks : 0);
    }
    const dcp__entry *e = dcp__entry_of(item);
    dcp_chunk_info info = {0};
    if (item->kind == DCP_ITEM_TENSOR) {
        const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + i];
        info.box = (dcp_box){c->offsets, c->sizes};
        describe_storage(ck->meta, c->storage, &info);
    } else {
        describe_storage(ck->meta, e->storage, &info);
        if (ck->values) {
            info.file = ck->meta->files[0].ptr;
        }
    }
    *out = info;
    return DCP_OK;
}

/* The rank in "__3_0.distcp" or "shard-00004-model-...", -1 for other names. */
static int rank_in_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    bool is_shard = strncmp(name, "shard-", 6) == 0;
    const char *digits = is_shard ? name + 6 : strncmp(name, "__", 2) == 0 ? name + 2 : "";
    char *end;
    if (*digits < '0' || *digits > '9') {
        return -1;
    }
    unsigned long rank = strtoul(digits, &end, 10);
    if (*end != (is_shard ? '-' : '_') || rank > INT_MAX || (is_shard && rank == 0)) {
        return -1;
    }
    return (int)rank - is_shard;
}

static int world_of(const dcp_checkpoint *ck)
{
    int world = ck->world ? ck->world : 1;
    if (ck->meta->own.present && ck->meta->own.world > world) {
        world = ck->meta->own.world;
    }
    for (size_t i = 0; i < ck->meta->n_files; i++) {
        int rank = rank_in_name(ck->meta->files[i].ptr);
        world = rank >= world ? rank + 1 : world;
    }
    return world;
}

static const char *or_empty(dcp_str s)
{
    return s.ptr ? s.ptr : "";
}

dcp_status dcp_checkpoint_get_info(const dcp_checkpoint *ck, dcp_checkpoint_info *out, dcp_error *err)
{
    if (!ck || !out || out->struct_size != sizeof *out) {
        return dcp__fail(err, DCP_ARG, "info: no checkpoint, or a struct_size that is not %zu", sizeof *out);
    }
    const dcp__metadata *m = ck->meta;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    info.layout = ck->layout;
    info.world = world_of(ck);
    info.writer = ck->writer;
    info.version = or_empty(m->version);
    info.save_id = or_empty(m->save_id.ptr ? m->save_id : m->own.save_id);
    info.checkpoint_id = or_empty(m->checkpoint_id.ptr ? m->checkpoint_id : m->own.checkpoint_id);
    info.n_items = m->n_entries;
    info.n_chunks = m->n_chunks;
    info.n_files = m->n_files;
    info.metadata_bytes = ck->metadata_bytes;
    for (size_t i = 0; i < m->n_entries; i++) {
        bool is_tensor = m->entries[i].item.kind == DCP_ITEM_TENSOR;
        info.n_tensors += is_tensor;
        info.tensor_bytes += is_tensor ? m->entries[i].item.bytes : 0;
    }
    info.n_objects = info.n_items - info.n_tensors;
    *out = info;
    return DCP_OK;
}

static void release_text(char *text, size_t n, int release)
{
    snprintf(text, n, "%d.%d", release / 100, release % 100);
}

void dcp__describe_writer(dcp_checkpoint *ck)
{
    const dcp__metadata *m = ck->meta;
    char from[32], to[32];
    if (m->own.present && m->own.writer.ptr) {
        snprintf(ck->writer, sizeof ck->writer, "%s", m->own.writer.ptr);
    } else if (m->release_from) {
        release_text(from, sizeof from, m->release_from);
        release_text(to, sizeof to, m->release_to);
        if (m->release_to == 0) {
            snprintf(ck->writer, sizeof ck->writer, "PyTorch %s or newer", from);
        } else {
            snprintf(ck->writer, sizeof ck->writer, m->release_from == m->release_to ? "PyTorch %s" : "PyTorch %s to %s", from,
                     to);
        }
    }
}

/* ---- files ---- */

/* Bytes and number of the distinct ranges of a file. */
static void count_records(const dcp__metadata *m, const dcp__ranges *ranges, size_t file, dcp_file_info *out)
{
    const dcp__storage *previous = NULL;
    for (size_t i = ranges->first[file]; i < ranges->first[file + 1]; i++) {
        const dcp__storage *s = &m->storages[ranges->order[i]];
        if (!previous || previous->offset != s->offset || previous->length != s->length) {
            out->n_records++;
            out->referenced += s->length;
        }
        previous = s;
    }
}

dcp_status dcp_checkpoint_file(const dcp_checkpoint *ck, size_t i, dcp_file_info *out, dcp_error *err)
{
    if (!ck || !out || i >= ck->meta->n_files) {
        return dcp__fail(err, DCP_ARG, "file %zu of %zu", i, ck ? ck->meta->n_files : 0);
    }
    dcp_file_info info = {.name = ck->meta->files[i].ptr, .rank = rank_in_name(ck->meta->files[i].ptr)};
    dcp_stat st;
    char *name;
    dcp_status status = dcp__file_name(ck, ck->meta->files[i], &name, err);
    if (status != DCP_OK) {
        return dcp__in_item(ck, -1, (dcp_str){NULL, 0}, status, err);
    }
    status = ck->storage->ops->stat(ck->storage, name, &st, err);
    dcp__free(ck->ctx, name);
    if (status != DCP_OK && status != DCP_NOT_FOUND) {
        return dcp__in_item(ck, (int64_t)i, (dcp_str){NULL, 0}, status, err);
    }
    info.present = status == DCP_OK;
    info.bytes = status == DCP_OK ? st.bytes : 0;
    const dcp__ranges *ranges;
    status = dcp__get_ranges(ck, &ranges, err);
    if (status != DCP_OK) {
        return status;
    }
    count_records(ck->meta, ranges, i, &info);
    *out = info;
    return DCP_OK;
}
