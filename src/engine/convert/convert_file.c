/* One file of the output: written by several threads under a temporary name, read back, published. */
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "engine/convert/convert.h"
#include "engine/save/write_records.h"
#include "format/archive_writer.h"
#include "state/containers.h"
#include "state/value.h"
#include "storage/storage.h"

/* Not a name that anything takes for a tensor file. */

typedef struct making {
    dcp__cv_file *f;
    dcp_context *ctx;
    dcp_storage *storage;
    char *temporary;
    dcp_file *file;       /* being written; NULL: only digests are wanted */
    dcp_checkpoint *made; /* being read back */
    dcp__segments segments;
    size_t *firsts; /* [place]: its first segment; n_places + 1 values */
    dcp__cv_buffers *buffers;
    int n_workers;
    uint32_t *crcs; /* torch, [storage] */
} making;

static dcp_status in_file(const making *m, dcp_status status, dcp_error *err)
{
    return dcp__cv_in_file(m->f->s->c, m->f->name, status, err);
}

/* ---- preparation ---- */

int dcp__cv_threads(const dcp_context *ctx)
{
    return dcp__affordable_threads(ctx, (uint64_t)3 * DCP__CV_SEGMENT_BYTES);
}

static dcp_status cut_places(making *m, dcp_error *err)
{
    dcp_status status = DCP_OK;
    m->firsts = dcp__calloc(m->ctx, m->f->n_places + 1, sizeof *m->firsts);
    if (!m->firsts) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < m->f->n_places && status == DCP_OK; i++) {
        m->firsts[i] = m->segments.n;
        status = dcp__cv_cut(m->f->s, m->f->places[i].item, &m->segments, err);
    }
    m->firsts[m->f->n_places] = m->segments.n;
    return status;
}

/* The name under which a file is made. */
static dcp_status temporary_name(dcp_context *ctx, const char *name, char **out, dcp_error *err)
{
    size_t room = strlen(name) + sizeof DCP__CV_TEMPORARY;
    *out = dcp__alloc(ctx, room);
    if (!*out) {
        return dcp__nomem(err);
    }
    snprintf(*out, room, "%s" DCP__CV_TEMPORARY, name);
    return DCP_OK;
}

static dcp_status prepare(making *m, dcp__cv_file *f, dcp_error *err)
{
    *m = (making){.f = f, .ctx = f->s->c->ctx, .storage = f->s->c->storage};
    m->segments.ctx = m->ctx;
    m->n_workers = f->workers ? f->workers : dcp__cv_threads(m->ctx);
    m->crcs = f->archive ? dcp__calloc(m->ctx, f->n_storages, sizeof *m->crcs) : NULL;
    if (f->archive && !m->crcs) {
        return dcp__nomem(err);
    }
    dcp_status status = temporary_name(m->ctx, f->name, &m->temporary, err);
    status = status == DCP_OK ? cut_places(m, err) : status;
    return status == DCP_OK ? dcp__cv_buffers_create(f->s, m->n_workers, &m->buffers, err) : status;
}

static void dispose(making *m)
{
    dcp__cv_buffers_free(m->ctx, m->buffers, m->n_workers);
    dcp__free(m->ctx, m->segments.list);
    dcp__free(m->ctx, m->firsts);
    dcp__free(m->ctx, m->temporary);
    dcp__free(m->ctx, m->crcs);
}

/* ---- tensors ---- */

/* The place that a segment is of: the last one whose first segment is not behind it. */
static size_t place_of(const making *m, size_t segment)
{
    size_t low = 0, high = m->f->n_places;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (m->firsts[middle] <= segment) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static dcp_status copy_segment(void *arg, size_t i, int worker, dcp_error *err)
{
    making *m = arg;
    const dcp__selection *s = m->f->s;
    dcp__cv_segment *segment = &m->segments.list[i];
    const dcp__cv_buffers *b = &m->buffers[worker];
    size_t place = place_of(m, i), elem = dcp_dtype_bytes(s->items[segment->item].dtype);
    dcp_status status = DCP_OK;
    if (i == m->firsts[place]) {
        status = dcp__cv_check_source(s, &s->items[segment->item], segment->chunk != DCP__NO_CHUNK, err);
    }
    status = status == DCP_OK ? dcp__cv_read(s, segment, b, err) : status;
    if (status == DCP_OK && m->file) {
        bool is_changed = dcp__cv_is_changed(&s->items[segment->item]);
        uint64_t at = m->f->places[place].offset + segment->start * elem;
        status = m->storage->ops->write_at(m->file, is_changed ? b->out : b->in, segment->n * elem, at, err);
        status = in_file(m, status, err);
    }
    return status == DCP_OK ? dcp__cv_advance(s->c, segment->n * elem, err) : status;
}

/* Once all segments are read: the CRCs of the source, and those of the archive's storages. */
static dcp_status sum_up(making *m, dcp_error *err)
{
    const dcp__selection *s = m->f->s;
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < m->f->n_places && status == DCP_OK; i++) {
        const dcp__cv_segment *first = &m->segments.list[m->firsts[i]];
        size_t n = m->firsts[i + 1] - m->firsts[i], elem = dcp_dtype_bytes(s->items[m->f->places[i].item].dtype);
        uint32_t crc = 0;
        status = dcp__cv_check_crcs(s, first, n, err);
        for (size_t k = 0; k < n && m->crcs; k++) {
            crc = dcp__crc32_combine(crc, first[k].crc, first[k].n * elem);
        }
        if (m->crcs) {
            m->crcs[m->f->places[i].storage] = crc;
        }
    }
    return status;
}

static dcp_status copy_tensors(making *m, dcp_error *err)
{
    dcp_status status = dcp__parallel(m->segments.n, m->n_workers, copy_segment, m, err);
    return status == DCP_OK ? sum_up(m, err) : status;
}

/* ---- what is around them ---- */

/* A storage whose elements are in memory: of a tensor inside an object. */
static dcp_status put_memory(making *m, size_t storage, uint64_t at, dcp_error *err)
{
    const dcp_tensor *t = dcp_value_tensor(m->f->storages[storage].tensor);
    dcp_write_item item = {.tensor = *t};
    uint64_t bytes = m->f->storages[storage].bytes;
    dcp_status status = DCP_OK;
    for (uint64_t done = 0; done < bytes && status == DCP_OK;) {
        size_t n = bytes - done < DCP__CV_SEGMENT_BYTES ? (size_t)(bytes - done) : DCP__CV_SEGMENT_BYTES;
        const uint8_t *elems;
        status = dcp__item_bytes(&item, done, n, m->buffers[0].in, &elems, err);
        if (status == DCP_OK) {
            m->crcs[storage] = dcp__crc32(m->crcs[storage], elems, n);
            status = m->storage->ops->write_at(m->file, elems, n, at + done, err);
        }
        done += n;
    }
    return status;
}

static dcp_status put_piece(making *m, size_t k, uint64_t at, dcp_error *err)
{
    size_t n = dcp__archive_piece_bytes(m->f->archive, k);
    uint8_t *piece = dcp__alloc(m->ctx, n);
    if (!piece) {
        return dcp__nomem(err);
    }
    dcp__archive_piece(m->f->archive, k, m->crcs, piece);
    dcp_status status = m->storage->ops->write_at(m->file, piece, n, at, err);
    dcp__free(m->ctx, piece);
    return status;
}

static dcp_status put_archive(making *m, dcp_error *err)
{
    const dcp__cv_file *f = m->f;
    uint64_t at = 0;
    dcp_status status = DCP_OK;
    for (size_t k = 0; k < f->n_storages && status == DCP_OK; k++) {
        bool in_memory = dcp_value_tensor(f->storages[k].tensor)->data != NULL;
        status = in_memory ? put_memory(m, k, dcp__archive_storage_offset(f->archive, k), err) : DCP_OK;
    }
    for (size_t k = 0; k <= f->n_storages && status == DCP_OK; k++) {
        status = put_piece(m, k, at, err);
        at = k < f->n_storages ? dcp__archive_storage_offset(f->archive, k) + f->storages[k].bytes : at;
    }
    return status;
}

static dcp_status put_rest(making *m, dcp_error *err)
{
    if (m->f->archive) {
        return in_file(m, put_archive(m, err), err);
    }
    return in_file(m, m->storage->ops->write_at(m->file, m->f->header->data, m->f->header->len, 0, err), err);
}

/* ---- reading back ---- */

static dcp_status find_made(const making *m, size_t item, const dcp_item **out, dcp_error *err)
{
    const dcp__cv_item *want = &m->f->s->items[item];
    const dcp_item *found = dcp_checkpoint_find(m->made, want->fqn);
    size_t shape = (size_t)want->ndim * sizeof *want->extents;
    if (!found || found->kind != DCP_ITEM_TENSOR || found->dtype != want->dtype || found->ndim != want->ndim ||
        (shape && memcmp(found->extents, want->extents, shape) != 0)) {
        return dcp__fail(err, DCP_CHECKSUM, "item \"%s\" is not there as it was written", dcp__print(want->fqn).text);
    }
    *out = found;
    return DCP_OK;
}

static dcp_status check_segment(void *arg, size_t i, int worker, dcp_error *err)
{
    making *m = arg;
    const dcp__cv_segment *segment = &m->segments.list[i];
    const dcp_item *item;
    dcp_status status = find_made(m, segment->item, &item, err);
    status = status == DCP_OK ? dcp__cv_read_back(segment, m->made, item, &m->buffers[worker], err) : status;
    uint64_t bytes = segment->n * dcp_dtype_bytes(m->f->s->items[segment->item].dtype);
    return status == DCP_OK ? dcp__cv_advance(m->f->s->c, bytes, err) : status;
}

/* What stands at a path of a torch.save file: a leaf, or a container. */
static dcp_value *walk(dcp_value *at, const dcp__cv_item *item)
{
    for (size_t i = 0; i < item->path_len && at; i++) {
        dcp_key key = item->path[i];
        at = dcp_value_kind(at) == DCP_KIND_LIST ? dcp_value_at(at, (size_t)key.integer)
                                                 : dcp_dict_get(at, dcp__stored_key(at, key));
    }
    return at;
}

static dcp_status check_object(const making *m, const dcp__cv_item *want, dcp_error *err)
{
    dcp_value *found = walk(m->made->archive.object.value, want), *v = NULL;
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = found ? dcp__file_acquire(m->made, 0, &f, &bytes, err) : DCP_OK;
    if (found && status == DCP_OK) {
        dcp__source src = dcp__source_file(f, 0, bytes);
        status = dcp__read_value(m->made, &m->made->archive, &src, found, &v, err);
        dcp__file_release(m->made, 0);
    }
    if (status == DCP_OK && (!v || !dcp_value_equal(v, want->object))) {
        status =
            dcp__fail(err, DCP_CHECKSUM, "item \"%s\": what was written is not what is read back", dcp__print(want->fqn).text);
    }
    dcp_value_free(v);
    return status;
}

/* All names of a torch.save file, also those that share a storage with another one. */
static dcp_status check_names(const making *m, dcp_error *err)
{
    const dcp__selection *s = m->f->s;
    dcp_status status = DCP_OK;
    if (!m->f->archive) {
        return dcp_checkpoint_count(m->made) == m->f->n_places
                   ? DCP_OK
                   : dcp__fail(err, DCP_CHECKSUM, "%zu tensors were written, %zu are there", m->f->n_places,
                               dcp_checkpoint_count(m->made));
    }
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        const dcp_item *item;
        status = s->items[i].kind == DCP_ITEM_TENSOR ? find_made(m, i, &item, err) : check_object(m, &s->items[i], err);
    }
    return status;
}

static dcp_status check(making *m, const char *name, dcp_error *err)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = m->storage;
    dcp_status status = dcp_checkpoint_open(m->ctx, name, &opts, &m->made, err);
    if (status != DCP_OK) {
        return status;
    }
    status = check_names(m, err);
    status = status == DCP_OK ? dcp__parallel(m->segments.n, m->n_workers, check_segment, m, err) : status;
    dcp_checkpoint_close(m->made);
    m->made = NULL;
    return in_file(m, status, err);
}

/* ---- the file ---- */

dcp_status dcp__cv_fail_busy(dcp_error *err)
{
    return dcp__fail(err, DCP_EXISTS, "another conversion to this place is running");
}

/* Locked before it is emptied: it may be another one's. The lock is kept until the file has its name, in a handle of its own,
 * since the one that is written is closed before: only then is known that all went well. */
static dcp_status open_temporary(making *m, dcp_error *err)
{
    const dcp__conversion *c = m->f->s->c;
    dcp_status status = dcp__open_locked(m->storage, m->temporary, &m->f->held, err);
    if (status == DCP_OK && !m->f->held) {
        status = dcp__cv_fail_busy(err);
    }
    m->f->is_written = status == DCP_OK;
    status = in_file(m, status, err);
    /* Looked at again: another conversion may have ended since the first time. */
    status = status == DCP_OK ? dcp__cv_check_absent(c, m->f->name, err) : status;
    if (status == DCP_OK) {
        const unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_TRUNCATE | (c->opts->no_sync ? 0 : DCP_OPEN_WRITEBACK);
        status = in_file(m, m->storage->ops->open(m->storage, m->temporary, flags, &m->file, err), err);
    }
    if (status != DCP_OK) {
        dcp__cv_discard_file(m->f);
    }
    return status;
}

/* Durable, where the storage can, unless the options say no. */
static dcp_status sync_file(const dcp__conversion *c, dcp_file *file, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    return c->opts->no_sync ? DCP_OK : dcp__synced(file->storage->ops->sync(file, &fault), &fault, err);
}

static dcp_status finish(making *m, dcp_status status, dcp_error *err)
{
    status = status == DCP_OK ? sync_file(m->f->s->c, m->file, err) : status;
    dcp_status closed = m->storage->ops->close(m->file, status == DCP_OK ? err : NULL);
    m->file = NULL;
    return in_file(m, status == DCP_OK ? closed : status, err);
}

static dcp_status write_all(making *m, dcp_error *err)
{
    dcp__conversion *c = m->f->s->c;
    double start = dcp__now(), written, checked;
    dcp_status status = open_temporary(m, err);
    if (status != DCP_OK) {
        return status;
    }
    status = copy_tensors(m, err);
    status = status == DCP_OK ? put_rest(m, err) : status;
    status = finish(m, status, err);
    written = dcp__now();
    if (status == DCP_OK && !c->opts->no_check) {
        status = check(m, m->temporary, err);
    }
    checked = dcp__now();
    pthread_mutex_lock(&c->lock);
    c->report.write_seconds += written - start;
    c->report.check_seconds += checked - written;
    c->report.bytes += status == DCP_OK ? m->f->bytes : 0;
    pthread_mutex_unlock(&c->lock);
    if (status != DCP_OK) {
        dcp__cv_discard_file(m->f);
    }
    return status;
}

/* Is a file of that name there, with these bytes? Reads the source for what it should hold. */
static dcp_status look_for_finished(making *m, bool *is_finished, dcp_error *err)
{
    dcp_stat st;
    *is_finished = false;
    if (!m->f->s->c->opts->resume || m->storage->ops->stat(m->storage, m->f->name, &st, NULL) != DCP_OK ||
        st.bytes != m->f->bytes) {
        return DCP_OK;
    }
    dcp_status status = copy_tensors(m, err);
    if (status == DCP_OK) {
        *is_finished = check(m, m->f->name, NULL) == DCP_OK;
    }
    return status;
}

dcp_status dcp__cv_write_file(dcp__cv_file *f, bool *was_kept, dcp_error *err)
{
    making m;
    dcp_status status = prepare(&m, f, err);
    status = status == DCP_OK ? look_for_finished(&m, was_kept, err) : status;
    if (status == DCP_OK && !*was_kept) {
        status = write_all(&m, err);
    }
    dispose(&m);
    return status;
}

/* ---- names ---- */

/* The directory's names are durable from here on, where the storage can. */
static dcp_status sync_parent(const dcp__conversion *c, const char *name, dcp_error *err)
{
    const char *slash = strrchr(name, '/');
    if (c->opts->no_sync || !c->storage->ops->sync_dir) {
        return DCP_OK;
    }
    char *dir = dcp__strndup(c->ctx, name, slash ? (size_t)(slash - name) : 0);
    if (!dir) {
        return dcp__nomem(err);
    }
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = dcp__synced(c->storage->ops->sync_dir(c->storage, dir, &fault), &fault, err);
    dcp__free(c->ctx, dir);
    return status;
}

static dcp_status rename_temporary(const dcp__conversion *c, const char *temporary, const char *name, dcp_error *err)
{
    if (!c->storage->ops->rename) {
        return dcp__fail(err, DCP_UNSUPPORTED, "the storage %s cannot rename", c->storage->ops->name);
    }
    dcp_status status = c->storage->ops->rename(c->storage, temporary, name, err);
    return status == DCP_OK ? sync_parent(c, name, err) : status;
}

dcp_status dcp__cv_publish_file(dcp__cv_file *f, dcp_error *err)
{
    char *temporary;
    dcp_status status = temporary_name(f->s->c->ctx, f->name, &temporary, err);
    if (status == DCP_OK) {
        status = rename_temporary(f->s->c, temporary, f->name, err);
        pthread_mutex_lock(&f->s->c->lock);
        f->s->c->report.n_files += status == DCP_OK;
        pthread_mutex_unlock(&f->s->c->lock);
        dcp__free(f->s->c->ctx, temporary);
    }
    if (status == DCP_OK) {
        f->is_written = false;
        dcp__cv_release_file(f);
    } else {
        dcp__cv_discard_file(f);
    }
    return dcp__cv_in_file(f->s->c, f->name, status, err);
}

void dcp__cv_release_file(dcp__cv_file *f)
{
    if (f->held) {
        f->held->storage->ops->close(f->held, NULL);
        f->held = NULL;
    }
}

void dcp__cv_discard_file(dcp__cv_file *f)
{
    char *temporary;
    if (f->is_written && temporary_name(f->s->c->ctx, f->name, &temporary, NULL) == DCP_OK) {
        f->s->c->storage->ops->remove(f->s->c->storage, temporary, NULL);
        dcp__free(f->s->c->ctx, temporary);
    }
    f->is_written = false;
    dcp__cv_release_file(f);
}

dcp_status dcp__cv_in_file(const dcp__conversion *c, const char *name, dcp_status status, dcp_error *err)
{
    const char *slash = strrchr(name, '/');
    if (status == DCP_OK || c->opts->to != DCP_TO_HF) {
        return status; /* the output has the name of its only file */
    }
    return dcp__prefix(err, status, "%s: ", slash ? slash + 1 : name);
}

dcp_status dcp__cv_check_absent(const dcp__conversion *c, const char *name, dcp_error *err)
{
    dcp_stat st;
    dcp_status status = c->storage->ops->stat(c->storage, name, &st, NULL);
    if (status == DCP_NOT_FOUND) {
        return DCP_OK;
    }
    if (status != DCP_OK) {
        return c->storage->ops->stat(c->storage, name, &st, err);
    }
    if (st.type != DCP_ENTRY_FILE) {
        status = dcp__fail(err, DCP_EXISTS, "it is there, and is no file");
    } else if (!c->opts->overwrite && !c->opts->resume) {
        status = dcp__fail(err, DCP_EXISTS, "it is there");
    }
    return dcp__cv_in_file(c, name, status, err);
}

dcp_status dcp__cv_check_space(const dcp__conversion *c, const char *dir, uint64_t bytes, dcp_error *err)
{
    uint64_t free_bytes;
    if (!c->storage->ops->space || c->storage->ops->space(c->storage, dir, &free_bytes, NULL) != DCP_OK || free_bytes >= bytes) {
        return DCP_OK; /* or nothing tells: writing will */
    }
    return dcp__fail(err, DCP_NOSPACE, "%llu bytes are needed, %llu are free", (unsigned long long)bytes,
                     (unsigned long long)free_bytes);
}

dcp_status dcp__cv_put_file(const dcp__conversion *c, const char *name, const void *bytes, size_t n, dcp_error *err)
{
    char *temporary;
    dcp_status status = temporary_name(c->ctx, name, &temporary, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__write_file(c->storage, temporary, bytes, n, !c->opts->no_sync, err);
    if (status == DCP_OK) {
        status = rename_temporary(c, temporary, name, err);
        if (status != DCP_OK) {
            c->storage->ops->remove(c->storage, temporary, NULL);
        }
    }
    dcp__free(c->ctx, temporary);
    return dcp__cv_in_file(c, name, status, err);
}
