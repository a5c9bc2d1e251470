/*
 * The storage to copy from: it shows what is below one directory of another storage as if that were everything, and so has every
 * function of the table in its simplest form. It uses nothing but dcp/backend.h. What a storage of your own must keep to stands
 * at each function; tests/conformance/test_storage.c checks it: add yours to the list there.
 */
#include <stdio.h>
#include <stdlib.h>

#include "dcp/backend.h"

dcp_status template_storage_create(dcp_storage *inner, dcp_storage **out, dcp_error *err);

/* The public struct comes first, so that a pointer to one is a pointer to the other. */
typedef struct template_storage {
    dcp_storage base;
    dcp_storage *inner; /* borrowed */
} template_storage;

typedef struct template_file {
    dcp_file base;
    dcp_file *inner;
} template_file;

/* One line, lower case, the exact cause. Returns the code, so that a failure is one statement. err may be NULL. */
static dcp_status fail(dcp_error *err, dcp_status code, const char *what, const char *name)
{
    if (err) {
        err->code = code;
        err->sys_errno = 0;
        err->offset = DCP_NO_OFFSET;
        snprintf(err->message, sizeof err->message, "%s: %s", name, what);
    }
    return code;
}

/* Flags: see dcp_open_flags. A wish that cannot be fulfilled (DIRECT) is UNSUPPORTED, the caller asks again without it.
 * *out is written on success only. */
static dcp_status template_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    template_storage *ts = (template_storage *)st;
    template_file *f = malloc(sizeof *f);
    if (!f) {
        return fail(err, DCP_NOMEM, "out of memory", name);
    }
    *f = (template_file){{st}, NULL};
    dcp_status status = ts->inner->ops->open(ts->inner, name, flags, &f->inner, err);
    if (status != DCP_OK) {
        free(f);
        return status;
    }
    *out = &f->base;
    return DCP_OK;
}

/* Never short but at the end of the file: where the system below returns less, ask again. Many threads read one file at once, so
 * there is no position to keep. At or behind the end *got is 0 and the call succeeds. */
static dcp_status template_read_at(dcp_file *file, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    dcp_file *inner = ((template_file *)file)->inner;
    return inner->storage->ops->read_at(inner, buf, n, offset, got, err);
}

/* All or an error. Several threads write disjoint ranges, in any order if the storage says DCP_STORAGE_RANDOM_WRITE. */
static dcp_status template_write_at(dcp_file *file, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    dcp_file *inner = ((template_file *)file)->inner;
    return inner->storage->ops->write_at(inner, buf, n, offset, err);
}

/* After it returns the bytes survive a loss of power; a storage that cannot promise that returns UNSUPPORTED. */
static dcp_status template_sync(dcp_file *file, dcp_error *err)
{
    dcp_file *inner = ((template_file *)file)->inner;
    return inner->storage->ops->sync(inner, err);
}

/* Frees in every case; the status says whether all that was written has arrived. */
static dcp_status template_close(dcp_file *file, dcp_error *err)
{
    dcp_file *inner = ((template_file *)file)->inner;
    dcp_status status = inner->storage->ops->close(inner, err);
    free(file);
    return status;
}

/* NOT_FOUND is an answer here, not an accident: callers ask whether a file is there. */
static dcp_status template_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->stat(inner, name, out, err);
}

/* fn may call any function of the storage, so no lock is held while it runs. */
static dcp_status template_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->list(inner, name, fn, user, err);
}

/* A reader sees the old file or the new one, never neither. Leave it NULL where that cannot be promised. */
static dcp_status template_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->rename(inner, from, to, err);
}

/* A directory only if it is empty. */
static dcp_status template_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->remove(inner, name, err);
}

/* Parents are made as well, and what is there already is fine. Leave it NULL where directories need not be made. */
static dcp_status template_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->make_dir(inner, name, err);
}

/* For names what sync is for bytes. Leave it NULL where names are durable as soon as a call returns. */
static dcp_status template_sync_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_storage *inner = ((template_storage *)st)->inner;
    return inner->ops->sync_dir(inner, name, err);
}

/* Never waits. A second holder in the same process is refused like one in another. Leave it NULL where there are no locks. */
static dcp_status template_lock(dcp_file *file, bool *locked, dcp_error *err)
{
    dcp_file *inner = ((template_file *)file)->inner;
    return inner->storage->ops->lock(inner, locked, err);
}

static void template_free(dcp_storage *st)
{
    free(st);
}

/* One constant table for all instances; new functions come at its end, struct_size tells which are there. */
static const dcp_storage_ops template_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .caps = DCP_STORAGE_RENAME | DCP_STORAGE_RANDOM_WRITE | DCP_STORAGE_DURABLE,
    .name = "template",
    .open = template_open,
    .read_at = template_read_at,
    .write_at = template_write_at,
    .sync = template_sync,
    .close = template_close,
    .stat = template_stat,
    .list = template_list,
    .rename = template_rename,
    .remove = template_remove,
    .make_dir = template_make_dir,
    .sync_dir = template_sync_dir,
    .lock = template_lock,
    .free = template_free,
};

/* inner must have all functions, as posix has: NULL is not passed on here. */
dcp_status template_storage_create(dcp_storage *inner, dcp_storage **out, dcp_error *err)
{
    template_storage *ts = malloc(sizeof *ts);
    if (!ts) {
        return fail(err, DCP_NOMEM, "out of memory", "template storage");
    }
    *ts = (template_storage){{&template_ops}, inner};
    *out = &ts->base;
    return DCP_OK;
}
