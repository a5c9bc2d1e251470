/* Files of a checkpoint: names, opening, and a bounded set of open data files. */
#include <string.h>

#include "engine/read/checkpoint.h"

/* More stay open only while they are read. */
#define MAX_IDLE_FILES 128

static bool has_part(dcp_str path, const char *part)
{
    size_t len = strlen(part);
    for (size_t i = 0; i <= path.len;) {
        const char *slash = memchr(path.ptr + i, '/', path.len - i);
        size_t end = slash ? (size_t)(slash - path.ptr) : path.len;
        if (end - i == len && memcmp(path.ptr + i, part, len) == 0) {
            return true;
        }
        i = end + 1;
    }
    return false;
}

dcp_status dcp__file_name(const dcp_checkpoint *ck, dcp_str relative, char **out, dcp_error *err)
{
    if (relative.len == 0 || memchr(relative.ptr, 0, relative.len)) {
        return dcp__fail(err, DCP_FORMAT, "\"%s\" is no file name", dcp__print(relative).text);
    }
    bool is_absolute = relative.ptr[0] == '/';
    if (!ck->allow_outside && (is_absolute || has_part(relative, ".."))) {
        return dcp__fail(err, DCP_FORMAT, "file \"%s\" lies outside the checkpoint", dcp__print(relative).text);
    }
    size_t dir_len = is_absolute ? 0 : strlen(ck->dir);
    char *name = dcp__alloc(ck->ctx, dir_len + relative.len + 2);
    if (!name) {
        return dcp__nomem(err);
    }
    memcpy(name, ck->dir, dir_len);
    size_t slash = dir_len > 0;
    name[dir_len] = '/';
    memcpy(name + dir_len + slash, relative.ptr, relative.len);
    name[dir_len + slash + relative.len] = 0;
    *out = name;
    return DCP_OK;
}

static dcp_status open_file(const dcp_checkpoint *ck, const char *name, dcp_file **out, uint64_t *bytes, dcp_error *err)
{
    /* The files of a Hugging Face cache are links to blobs outside; those of the other layouts have no reason to be. */
    bool is_beneath = !ck->allow_outside && (ck->layout == DCP_LAYOUT_DCP || ck->layout == DCP_LAYOUT_RANK_LOCAL);
    const dcp_storage_ops *ops = ck->storage->ops;
    dcp_file *f;
    dcp_stat st;
    dcp_status status = ops->open(ck->storage, name, DCP_OPEN_READ | (is_beneath ? DCP_OPEN_BENEATH : 0), &f, err);
    if (status != DCP_OK) {
        return status;
    }
    status = ops->stat(ck->storage, name, &st, err);
    if (status != DCP_OK) {
        ops->close(f, NULL);
        return status;
    }
    *out = f;
    *bytes = st.bytes;
    return DCP_OK;
}

dcp_status dcp__open_relative(const dcp_checkpoint *ck, dcp_str relative, dcp_file **out, uint64_t *bytes, dcp_error *err)
{
    char *name;
    dcp_status status = dcp__file_name(ck, relative, &name, err);
    if (status == DCP_OK) {
        status = open_file(ck, name, out, bytes, err);
        dcp__free(ck->ctx, name);
    }
    return status;
}

dcp_status dcp__read_exact(dcp_file *f, void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    size_t got = 0;
    dcp_status status = f->storage->ops->read_at(f, buf, n, offset, &got, err);
    if (status == DCP_OK && got < n) {
        return dcp__fail_at(err, DCP_FORMAT, offset + got, "file ends at %llu, expected %zu bytes at %llu",
                            (unsigned long long)(offset + got), n, (unsigned long long)offset);
    }
    return status;
}

dcp_status dcp__read_file(const dcp_checkpoint *ck, const char *relative, uint64_t max_bytes, dcp__buf *out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__open_relative(ck, dcp_str_of(relative), &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    if (bytes > max_bytes) {
        status = dcp__fail(err, DCP_LIMIT, "%llu bytes, at most %llu are read", (unsigned long long)bytes,
                           (unsigned long long)max_bytes);
    } else if (!dcp__buf_reserve(out, bytes)) {
        status = dcp__nomem(err);
    } else {
        status = dcp__read_exact(f, out->data + out->len, bytes, 0, err);
        out->len += status == DCP_OK ? bytes : 0;
    }
    f->storage->ops->close(f, NULL);
    return status;
}

/* Closes files that nobody uses; the lock is held. */
static void close_idle(dcp_checkpoint *ck)
{
    for (size_t i = 0; i < ck->meta->n_files; i++) {
        dcp__data_file *d = &ck->files[i];
        if (d->file && d->users == 0) {
            ck->storage->ops->close(d->file, NULL);
            d->file = NULL;
            ck->n_open--;
        }
    }
}

static dcp_status open_data_file(dcp_checkpoint *ck, uint32_t file, dcp_error *err)
{
    dcp__data_file *d = &ck->files[file];
    if (ck->n_open >= MAX_IDLE_FILES) {
        close_idle(ck);
    }
    dcp_status status = dcp__open_relative(ck, ck->meta->files[file], &d->file, &d->bytes, err);
    ck->n_open += status == DCP_OK;
    return status;
}

dcp_status dcp__file_acquire(dcp_checkpoint *ck, uint32_t file, dcp_file **out, uint64_t *bytes, dcp_error *err)
{
    dcp__data_file *d = &ck->files[file];
    pthread_mutex_lock(&ck->lock);
    dcp_status status = d->file ? DCP_OK : open_data_file(ck, file, err);
    if (status == DCP_OK) {
        d->users++;
        *out = d->file;
        *bytes = d->bytes;
    }
    pthread_mutex_unlock(&ck->lock);
    return status;
}

void dcp__file_release(dcp_checkpoint *ck, uint32_t file)
{
    pthread_mutex_lock(&ck->lock);
    ck->files[file].users--;
    pthread_mutex_unlock(&ck->lock);
}

void dcp__close_files(dcp_checkpoint *ck)
{
    if (ck->files) {
        close_idle(ck);
        dcp__free(ck->ctx, ck->files);
        ck->files = NULL;
    }
}

static dcp_status read_from_file(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    dcp_status status = dcp__read_exact(self->user, buf, n, self->start + offset, err);
    if (status != DCP_OK && err && err->offset != DCP_NO_OFFSET) {
        err->offset -= self->start; /* as for every source, relative to it */
    }
    return status;
}

dcp__source dcp__source_file(dcp_file *f, uint64_t start, uint64_t bytes)
{
    return (dcp__source){.read = read_from_file, .size = bytes, .user = f, .start = start};
}
