/* Counts what goes through to another storage. Tests hold readers to "only the bytes that the slice needs" with it. */
#include "storage/shim.h"

typedef struct count_storage {
    dcp__shim shim;
    dcp_storage_counts *counts;
} count_storage;

static void add(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}

static dcp_storage_counts *counts_of(dcp_storage *st)
{
    return ((count_storage *)st)->counts;
}

static dcp_status count_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    add(&counts_of(st)->opens, 1);
    return dcp__shim_open(st, name, flags, out, err);
}

static dcp_status count_read_at(dcp_file *f, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    add(&counts_of(f->storage)->reads, 1);
    dcp_status status = inner->storage->ops->read_at(inner, buf, n, offset, got, err);
    if (status == DCP_OK) {
        add(&counts_of(f->storage)->bytes_read, *got);
    }
    return status;
}

static dcp_status count_write_at(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    add(&counts_of(f->storage)->writes, 1);
    dcp_status status = inner->storage->ops->write_at(inner, buf, n, offset, err);
    if (status == DCP_OK) {
        add(&counts_of(f->storage)->bytes_written, n);
    }
    return status;
}

static dcp_status count_sync(dcp_file *f, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    add(&counts_of(f->storage)->syncs, 1);
    return inner->storage->ops->sync(inner, err);
}

static dcp_status count_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    add(&counts_of(st)->stats, 1);
    return dcp__inner(st)->ops->stat(dcp__inner(st), name, out, err);
}

static dcp_status count_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    add(&counts_of(st)->lists, 1);
    return dcp__inner(st)->ops->list(dcp__inner(st), name, fn, user, err);
}

static dcp_status count_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    add(&counts_of(st)->renames, 1);
    return dcp__inner(st)->ops->rename(dcp__inner(st), from, to, err);
}

static dcp_status count_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    add(&counts_of(st)->removes, 1);
    return dcp__inner(st)->ops->remove(dcp__inner(st), name, err);
}

static dcp_status count_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    return dcp__inner(st)->ops->make_dir(dcp__inner(st), name, err);
}

static dcp_status count_sync_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    add(&counts_of(st)->syncs, 1);
    return dcp__inner(st)->ops->sync_dir(dcp__inner(st), name, err);
}

static dcp_status count_lock(dcp_file *f, bool *locked, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    return inner->storage->ops->lock(inner, locked, err);
}

static const dcp_storage_ops count_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .name = "count",
    .open = count_open,
    .read_at = count_read_at,
    .write_at = count_write_at,
    .sync = count_sync,
    .close = dcp__shim_close,
    .stat = count_stat,
    .list = count_list,
    .rename = count_rename,
    .remove = count_remove,
    .make_dir = count_make_dir,
    .sync_dir = count_sync_dir,
    .lock = count_lock,
    .free = dcp__shim_free,
    .space = dcp__shim_space,
};

dcp_status dcp_storage_count(dcp_context *ctx, dcp_storage *inner, dcp_storage_counts *counts, dcp_storage **out, dcp_error *err)
{
    if (!counts || !out) {
        return dcp__fail(err, DCP_ARG, "count storage: no place for the counts or the result");
    }
    dcp__shim *shim;
    dcp_status status = dcp__shim_create(dcp__context(ctx), sizeof(count_storage), &count_ops, inner, &shim, err);
    if (status == DCP_OK) {
        ((count_storage *)shim)->counts = counts;
        *out = &shim->base;
    }
    return status;
}
