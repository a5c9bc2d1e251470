/* Opening: which layout is it, and where is its metadata. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/read/checkpoint.h"
#include "format/hf.h"

static const char metadata_name[] = ".metadata";
static const char temporary_name[] = ".metadata.tmp";
static const char index_name[] = DCP__HF_INDEX;

const char *dcp_layout_name(dcp_layout layout)
{
    switch (layout) {
    case DCP_LAYOUT_DCP: return "dcp";
    case DCP_LAYOUT_RANK_LOCAL: return "rank-local dcp";
    case DCP_LAYOUT_HF: return "hugging face";
    case DCP_LAYOUT_SAFETENSORS: return "safetensors";
    case DCP_LAYOUT_TORCH_ZIP: return "torch.save";
    case DCP_LAYOUT_TORCH_LEGACY: return "torch.save (legacy)";
    }
    return "?";
}

/* ---- what a directory looks like ---- */

typedef struct listing {
    dcp_context *ctx;
    int *ranks; /* of __<rank>.metadata */
    size_t n_ranks, cap_ranks;
    char **tensors; /* *.safetensors */
    size_t n_tensors, cap_tensors;
    size_t n_current; /* the first so many of them are the model's */
    size_t n_entries, n_data, n_torch;
    bool has_metadata, has_unfinished, has_index, has_sharded, is_marked;
    bool failed; /* out of memory */
} listing;

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), end_len = strlen(end);
    return len >= end_len && strcmp(name + len - end_len, end) == 0;
}

/* The rank of "__12.metadata", -1 for other names: PyTorch writes no leading zeros. */
static int rank_of(const char *name)
{
    if (strncmp(name, "__", 2) != 0 || name[2] < '0' || name[2] > '9' || (name[2] == '0' && name[3] != '.')) {
        return -1;
    }
    char *end;
    unsigned long rank = strtoul(name + 2, &end, 10);
    return strcmp(end, metadata_name) == 0 && rank < INT_MAX ? (int)rank : -1;
}

static void add_rank(listing *l, int rank)
{
    void *array = l->ranks;
    l->failed |= !dcp__grow(l->ctx, &array, &l->cap_ranks, l->n_ranks + 1, sizeof *l->ranks);
    l->ranks = array;
    if (!l->failed) {
        l->ranks[l->n_ranks++] = rank;
    }
}

static void add_tensors(listing *l, const char *name)
{
    void *array = l->tensors;
    l->failed |= !dcp__grow(l->ctx, &array, &l->cap_tensors, l->n_tensors + 1, sizeof *l->tensors);
    l->tensors = array;
    char *copy = l->failed ? NULL : dcp__strndup(l->ctx, name, strlen(name));
    if (copy) {
        l->tensors[l->n_tensors++] = copy;
    } else {
        l->failed = true;
    }
}

static dcp_status see_entry(void *user, const char *name, dcp_entry_type type)
{
    listing *l = user;
    l->n_entries++;
    if (type == DCP_ENTRY_DIR) {
        l->has_sharded |= strcmp(name, "sharded") == 0;
        return DCP_OK;
    }
    if (rank_of(name) >= 0) {
        add_rank(l, rank_of(name));
    } else if (ends_with(name, ".safetensors")) {
        add_tensors(l, name);
    }
    l->has_metadata |= strcmp(name, metadata_name) == 0;
    l->has_unfinished |= ends_with(name, ".metadata.tmp");
    l->has_index |= strcmp(name, index_name) == 0;
    l->is_marked |= strcmp(name, DCP__HF_MARK) == 0;
    l->n_data += ends_with(name, ".distcp");
    l->n_torch += ends_with(name, ".pt") || ends_with(name, ".pth") || ends_with(name, ".bin");
    return l->failed ? DCP_NOMEM : DCP_OK;
}

static void listing_reset(listing *l)
{
    for (size_t i = 0; i < l->n_tensors; i++) {
        dcp__free(l->ctx, l->tensors[i]);
    }
    dcp__free(l->ctx, l->tensors);
    dcp__free(l->ctx, l->ranks);
}

/* No checkpoint: says what is there instead. */
static dcp_status explain(const listing *l, dcp_error *err)
{
    if (l->n_entries == 0) {
        return dcp__fail(err, DCP_NOT_FOUND, "no checkpoint: the directory is empty");
    }
    if (l->has_unfinished) {
        return dcp__fail(err, DCP_NOT_FOUND,
                         "no checkpoint: .metadata is missing and .metadata.tmp is there, a save did not finish");
    }
    if (l->n_data) {
        return dcp__fail(
            err, DCP_NOT_FOUND,
            "no checkpoint: .metadata is missing beside %zu .distcp files; the save did not finish, or .metadata was "
            "written on another node or not copied",
            l->n_data);
    }
    if (l->n_tensors) {
        return dcp__fail(
            err, DCP_NOT_FOUND,
            "no checkpoint: the %zu .safetensors file%s here are of a model that is being written, or whose writer was "
            "killed (%s names them)",
            l->n_tensors, dcp__plural(l->n_tensors), DCP__HF_MARK);
    }
    if (l->has_index) {
        return dcp__fail(err, DCP_NOT_FOUND, "no checkpoint: %s is there but no .safetensors file", index_name);
    }
    if (l->has_sharded) {
        return dcp__fail(err, DCP_NOT_FOUND, "no checkpoint: not consolidated, open the directory sharded/ below it");
    }
    if (l->n_torch) {
        return dcp__fail(err, DCP_NOT_FOUND,
                         "no distributed checkpoint: %zu torch.save file%s (.pt, .pth, .bin), to be opened one by one",
                         l->n_torch, dcp__plural(l->n_torch));
    }
    return dcp__fail(err, DCP_NOT_FOUND, "no checkpoint: none of the files here (%zu entr%s) belongs to one", l->n_entries,
                     l->n_entries == 1 ? "y" : "ies");
}

/* ---- a DCP directory ---- */

dcp_status dcp__read_metadata_file(dcp_checkpoint *ck, const char *name, const dcp_str *only, dcp__metadata **out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__open_relative(ck, dcp_str_of(name), &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__source src = dcp__source_file(f, 0, bytes);
    status = dcp__metadata_read(ck->ctx, &src, only, out, err);
    f->storage->ops->close(f, NULL);
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "%s: ", name);
    }
    ck->metadata_bytes += bytes;
    return DCP_OK;
}

/* Where a storage cannot rename, a crash may leave .metadata in pieces while the whole of it stands in .metadata.tmp; its trailer
 * tells that it is whole. */
static bool recover(dcp_checkpoint *ck, const dcp_str *only)
{
    dcp__metadata *m;
    if (dcp__read_metadata_file(ck, temporary_name, only, &m, NULL) != DCP_OK) {
        return false;
    }
    if (!m->has_trailer) {
        dcp__metadata_free(m);
        return false;
    }
    ck->meta = m;
    ck->is_recovered = true;
    return true;
}

/* `.metadata` by way of memory: for the ranks of a group one of them reads it. */
static dcp_status read_shared_metadata(dcp_checkpoint *ck, const dcp_str *only, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (!ck->given) {
        status = dcp__read_file(ck, metadata_name, UINT64_MAX, ck->kept, err);
    }
    const dcp__buf *b = ck->given ? ck->given : ck->kept;
    const dcp__source src = dcp__source_memory(b->data, b->len);
    status = status == DCP_OK ? dcp__metadata_read(ck->ctx, &src, only, &ck->meta, err) : status;
    if (status != DCP_OK) {
        if (ck->kept) {
            ck->kept->len = 0; /* the others find out by themselves what is there */
        }
        return dcp__prefix(err, status, "%s: ", metadata_name);
    }
    ck->metadata_bytes += b->len;
    return DCP_OK;
}

static dcp_status load_dcp(dcp_checkpoint *ck, const listing *l, const dcp_str *only, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    only = only->ptr ? only : NULL;
    ck->layout = DCP_LAYOUT_DCP;
    dcp_status status = ck->given || ck->kept ? read_shared_metadata(ck, only, &fault)
                                              : dcp__read_metadata_file(ck, metadata_name, only, &ck->meta, &fault);
    if ((status == DCP_FORMAT || status == DCP_CHECKSUM || status == DCP_LIMIT) && l->has_unfinished && recover(ck, only)) {
        dcp__log(ck->ctx, DCP_LOG_WARNING, "%s: %s; %s is used instead", ck->path, fault.message, temporary_name);
        return DCP_OK;
    }
    if (status != DCP_OK && err) {
        *err = fault;
    }
    return status;
}

/* ---- any directory ---- */

static int compare_ints(const void *a, const void *b)
{
    int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static dcp_status list_once(dcp_checkpoint *ck, listing *l, bool *is_stale, dcp_error *err)
{
    *is_stale = false;
    dcp_status status = ck->storage->ops->list(ck->storage, ck->dir, see_entry, l, err);
    if (l->failed) {
        status = dcp__nomem(err);
    }
    l->n_current = l->n_tensors;
    if (status == DCP_OK && l->is_marked) {
        status = dcp__select_tensor_files(ck, l->tensors, &l->n_current, l->has_index, err);
        *is_stale = status == DCP_NOT_FOUND;
    }
    return status;
}

/* Again if the writer of a model has come to its end meanwhile: its mark is gone, and so are files of the listing. */
static dcp_status list_directory(dcp_checkpoint *ck, listing *l, dcp_error *err)
{
    bool is_stale;
    dcp_status status = list_once(ck, l, &is_stale, err);
    for (int i = 0; i < 2 && is_stale; i++) {
        listing_reset(l);
        *l = (listing){.ctx = ck->ctx};
        status = list_once(ck, l, &is_stale, err);
    }
    return status;
}

static dcp_status load_directory(dcp_checkpoint *ck, const dcp_open_opts *o, dcp_error *err)
{
    listing l = {.ctx = ck->ctx, .has_metadata = ck->given != NULL};
    dcp_status status = ck->given ? DCP_OK : list_directory(ck, &l, err);
    if (status != DCP_OK) {
        goto done;
    }
    if (l.has_metadata && o->rank < 0) {
        status = load_dcp(ck, &l, &o->only, err);
    } else if (l.n_ranks) {
        ck->layout = DCP_LAYOUT_RANK_LOCAL;
        qsort(l.ranks, l.n_ranks, sizeof *l.ranks, compare_ints);
        status = dcp__open_rank_local(ck, l.ranks, l.n_ranks, o->rank, err);
    } else if (l.has_metadata) {
        status = load_dcp(ck, &l, &o->only, err); /* one rank was asked for, and all ranks have this one file */
    } else if (l.n_current) {
        ck->layout = DCP_LAYOUT_HF;
        qsort(l.tensors, l.n_current, sizeof *l.tensors, compare_names);
        status = dcp__open_safetensors(ck, (const char **)l.tensors, l.n_current, l.has_index, err);
    } else {
        status = explain(&l, err);
    }
done:
    listing_reset(&l);
    return status;
}

/* ---- one file ---- */

static dcp_status load_file(dcp_checkpoint *ck, const char *name, dcp_error *err)
{
    uint8_t head[16];
    size_t got = 0;
    uint64_t bytes;
    dcp_file *f;
    dcp_status status = dcp__open_relative(ck, dcp_str_of(name), &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    status = f->storage->ops->read_at(f, head, sizeof head, 0, &got, err);
    f->storage->ops->close(f, NULL);
    if (status != DCP_OK) {
        return status;
    }
    switch (dcp__sniff_bytes(head, got, bytes)) {
    case DCP__IS_ZIP: ck->layout = DCP_LAYOUT_TORCH_ZIP; return dcp__open_torch(ck, name, err);
    case DCP__IS_LEGACY: ck->layout = DCP_LAYOUT_TORCH_LEGACY; return dcp__open_torch(ck, name, err);
    case DCP__IS_SAFETENSORS: ck->layout = DCP_LAYOUT_SAFETENSORS; return dcp__open_safetensors(ck, &name, 1, false, err);
    default: break;
    }
    if (strcmp(name, metadata_name) == 0 || ends_with(name, ".distcp")) {
        return dcp__fail(err, DCP_FORMAT, "one file of a checkpoint; open its directory");
    }
    return dcp__fail_at(err, DCP_FORMAT, 0, "neither a torch.save nor a safetensors file (%llu bytes)",
                        (unsigned long long)bytes);
}

/* ---- the way in ---- */

static dcp_status check_opts(const dcp_open_opts *given, dcp_open_opts *o, dcp_error *err)
{
    *o = (dcp_open_opts)DCP_OPEN_OPTS_INIT;
    if (!given) {
        return DCP_OK;
    }
    if (given->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "open options: struct_size %zu, expected %zu", given->struct_size, sizeof *o);
    }
    *o = *given;
    return DCP_OK;
}

/* Splits a path into the directory and, for a file, its name. */
static dcp_status split_path(dcp_checkpoint *ck, const char *path, bool is_dir, const char **name, dcp_error *err)
{
    const char *slash = strrchr(path, '/');
    size_t dir_len = is_dir ? strlen(path) : slash ? (size_t)(slash - path) : 0;
    *name = is_dir ? NULL : slash ? slash + 1 : path;
    ck->dir = dcp__strndup(ck->ctx, path, dir_len);
    return ck->dir ? DCP_OK : dcp__nomem(err);
}

/* The local file system: the storage's root is the directory itself, so that nothing else is within reach. */
static dcp_status attach_local(dcp_checkpoint *ck, const char *path, bool *is_dir, const char **name, dcp_error *err)
{
    dcp_storage *root;
    dcp_stat st;
    dcp_status status = dcp_storage_posix(ck->ctx, path, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    status = root->ops->stat(root, "", &st, err);
    *is_dir = status == DCP_OK && st.type == DCP_ENTRY_DIR;
    if (status == DCP_OK && *is_dir) {
        ck->storage = root;
        ck->owns_storage = true;
        *name = NULL;
        ck->dir = dcp__strndup(ck->ctx, "", 0);
        return ck->dir ? DCP_OK : dcp__nomem(err);
    }
    dcp_storage_free(root);
    if (status != DCP_OK) {
        return status;
    }
    status = split_path(ck, path, false, name, err);
    if (status != DCP_OK) {
        return status;
    }
    const char *dir = *name == path ? "." : ck->dir[0] ? ck->dir : "/";
    status = dcp_storage_posix(ck->ctx, dir, &ck->storage, err);
    ck->owns_storage = status == DCP_OK;
    ck->dir[0] = 0;
    return status;
}

static dcp_status attach(dcp_checkpoint *ck, dcp_storage *storage, const char *path, bool *is_dir, const char **name,
                         dcp_error *err)
{
    if (!storage) {
        return attach_local(ck, path, is_dir, name, err);
    }
    dcp_stat st;
    ck->storage = storage;
    dcp_status status = storage->ops->stat(storage, path, &st, err);
    *is_dir = status == DCP_OK && st.type == DCP_ENTRY_DIR;
    return status == DCP_OK ? split_path(ck, path, *is_dir, name, err) : status;
}

/* The record's length stands for an object's size. */
static void set_object_bytes(dcp__metadata *m)
{
    for (size_t i = 0; i < m->n_entries; i++) {
        dcp__entry *e = &m->entries[i];
        if (e->item.kind == DCP_ITEM_OBJECT && e->storage != DCP__NO_STORAGE) {
            e->item.bytes = m->storages[e->storage].length;
        }
    }
}

static dcp_status open_into(dcp_checkpoint *ck, const char *path, const dcp_open_opts *o, dcp_error *err)
{
    bool is_dir;
    const char *name;
    ck->path = dcp__strndup(ck->ctx, path, strlen(path));
    if (!ck->path) {
        return dcp__nomem(err);
    }
    dcp_status status = attach(ck, o->storage, path, &is_dir, &name, err);
    if (status == DCP_OK) {
        status = is_dir ? load_directory(ck, o, err) : load_file(ck, name, err);
    }
    if (status == DCP_OK) {
        set_object_bytes(ck->meta);
        dcp__describe_writer(ck);
        ck->files = dcp__calloc(ck->ctx, ck->meta->n_files, sizeof *ck->files);
        status = ck->files ? DCP_OK : dcp__nomem(err);
    }
    return status;
}

dcp_status dcp_checkpoint_open(dcp_context *ctx, const char *path, const dcp_open_opts *opts, dcp_checkpoint **out,
                               dcp_error *err)
{
    return dcp__checkpoint_open(ctx, path, opts, NULL, NULL, out, err);
}

dcp_status dcp__checkpoint_open(dcp_context *ctx, const char *path, const dcp_open_opts *opts, dcp__buf *kept,
                                const dcp__buf *given, dcp_checkpoint **out, dcp_error *err)
{
    dcp_open_opts o;
    ctx = dcp__context(ctx);
    if (!path || !out) {
        return dcp__fail(err, DCP_ARG, "open: %s is missing", path ? "a place for the result" : "the path");
    }
    dcp_status status = check_opts(opts, &o, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp_checkpoint *ck = dcp__calloc(ctx, 1, sizeof *ck);
    if (!ck) {
        return dcp__nomem(err);
    }
    ck->ctx = ctx;
    ck->allow_outside = o.allow_outside;
    ck->check_crc = o.check_crc;
    ck->allow_shard_gaps = o.allow_shard_gaps;
    ck->kept = o.rank < 0 ? kept : NULL; /* who looks at one rank's part may not find what others do */
    ck->given = o.rank < 0 ? given : NULL;
    pthread_mutex_init(&ck->lock, NULL);
    status = open_into(ck, path, &o, err);
    if (status != DCP_OK) {
        dcp_checkpoint_close(ck);
        return dcp__prefix(err, status, "%s: ", path);
    }
    ck->kept = NULL;
    ck->given = NULL;
    *out = ck;
    return DCP_OK;
}

static void free_blobs(dcp_checkpoint *ck)
{
    while (ck->blobs) {
        dcp__blob *next = ck->blobs->next;
        dcp__safetensors_reset(&ck->blobs->header);
        dcp__free(ck->ctx, ck->blobs);
        ck->blobs = next;
    }
}

void dcp_checkpoint_close(dcp_checkpoint *ck)
{
    if (!ck) {
        return;
    }
    dcp_context *ctx = ck->ctx;
    if (ck->meta) {
        dcp__close_files(ck);
        dcp__metadata_free(ck->meta);
    }
    dcp__spool_drop(ck);
    free_blobs(ck);
    for (size_t i = 0; i < ck->n_parts; i++) {
        dcp__metadata_free(ck->parts[i]);
    }
    for (size_t i = 0; i < ck->n_headers; i++) {
        dcp__safetensors_reset(&ck->headers[i]);
    }
    dcp__free(ctx, ck->ranges.order);
    dcp__free(ctx, ck->ranges.first);
    dcp__free(ctx, ck->parts);
    dcp__free(ctx, ck->headers);
    dcp__free(ctx, ck->values);
    dcp__free(ctx, ck->compared);
    dcp_flat_free(ck->flat);
    if (ck->archive.ctx) {
        dcp__archive_reset(&ck->archive);
    }
    if (ck->owns_storage) {
        dcp_storage_free(ck->storage);
    }
    dcp__free(ctx, ck->dir);
    dcp__free(ctx, ck->path);
    pthread_mutex_destroy(&ck->lock);
    dcp__free(ctx, ck);
}
