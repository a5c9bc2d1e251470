/* Lets a function decide which calls on another storage fail: how tests see what a full disk or a dying machine does. */
#include <pthread.h>

#include "storage/shim.h"

typedef struct fault_storage {
    dcp__shim shim;
    dcp_fault_fn fn;
    void *user;
    pthread_mutex_t lock; /* one call of fn at a time */
} fault_storage;

static const char *op_name(dcp_storage_op op)
{
    static const char *const names[DCP_OP_COUNT] = {
        "open", "read", "write", "sync", "close", "stat", "list", "rename", "remove", "make directory", "sync directory", "lock",
    };
    return names[op];
}

/* Asks fn. A message of its own is kept; otherwise the error says what was refused. */
static dcp_status ask(dcp_storage *st, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    fault_storage *fs = (fault_storage *)st;
    dcp_error fault = DCP_ERROR_INIT;
    pthread_mutex_lock(&fs->lock);
    dcp_status status = fs->fn(fs->user, op, name, n, offset, &fault);
    pthread_mutex_unlock(&fs->lock);
    if (status != DCP_OK && err) {
        int sys_errno = fault.sys_errno;
        if (!fault.message[0]) {
            dcp__fail(&fault, status, "%s %s: refused on purpose", op_name(op), dcp__print(dcp_str_of(name)).text);
        }
        fault.code = status;
        fault.sys_errno = sys_errno;
        *err = fault;
    }
    return status;
}

static dcp_status ask_file(dcp_file *f, dcp_storage_op op, size_t n, uint64_t offset, dcp_error *err)
{
    return ask(f->storage, op, ((dcp__shim_file *)f)->name, n, offset, err);
}

static dcp_status fault_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_OPEN, name, 0, 0, err);
    return status == DCP_OK ? dcp__shim_open(st, name, flags, out, err) : status;
}

static dcp_status fault_read_at(dcp_file *f, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    dcp_status status = ask_file(f, DCP_OP_READ, n, offset, err);
    return status == DCP_OK ? inner->storage->ops->read_at(inner, buf, n, offset, got, err) : status;
}

static dcp_status fault_write_at(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    dcp_status status = ask_file(f, DCP_OP_WRITE, n, offset, err);
    return status == DCP_OK ? inner->storage->ops->write_at(inner, buf, n, offset, err) : status;
}

static dcp_status fault_sync(dcp_file *f, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    dcp_status status = ask_file(f, DCP_OP_SYNC, 0, 0, err);
    return status == DCP_OK ? inner->storage->ops->sync(inner, err) : status;
}

/* The inner file is closed whatever fn says. */
static dcp_status fault_close(dcp_file *f, dcp_error *err)
{
    dcp_status refused = ask_file(f, DCP_OP_CLOSE, 0, 0, err);
    dcp_status status = dcp__shim_close(f, refused == DCP_OK ? err : NULL);
    return refused == DCP_OK ? status : refused;
}

static dcp_status fault_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_STAT, name, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->stat(dcp__inner(st), name, out, err) : status;
}

static dcp_status fault_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_LIST, name, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->list(dcp__inner(st), name, fn, user, err) : status;
}

static dcp_status fault_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_RENAME, from, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->rename(dcp__inner(st), from, to, err) : status;
}

static dcp_status fault_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_REMOVE, name, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->remove(dcp__inner(st), name, err) : status;
}

static dcp_status fault_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_MAKE_DIR, name, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->make_dir(dcp__inner(st), name, err) : status;
}

static dcp_status fault_sync_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    dcp_status status = ask(st, DCP_OP_SYNC_DIR, name, 0, 0, err);
    return status == DCP_OK ? dcp__inner(st)->ops->sync_dir(dcp__inner(st), name, err) : status;
}

static dcp_status fault_lock(dcp_file *f, bool *locked, dcp_error *err)
{
    dcp_file *inner = dcp__inner_file(f);
    dcp_status status = ask_file(f, DCP_OP_LOCK, 0, 0, err);
    return status == DCP_OK ? inner->storage->ops->lock(inner, locked, err) : status;
}

static void fault_free(dcp_storage *st)
{
    pthread_mutex_destroy(&((fault_storage *)st)->lock);
    dcp__shim_free(st);
}

static const dcp_storage_ops fault_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .name = "fault",
    .open = fault_open,
    .read_at = fault_read_at,
    .write_at = fault_write_at,
    .sync = fault_sync,
    .close = fault_close,
    .stat = fault_stat,
    .list = fault_list,
    .rename = fault_rename,
    .remove = fault_remove,
    .make_dir = fault_make_dir,
    .sync_dir = fault_sync_dir,
    .lock = fault_lock,
    .free = fault_free,
    .space = dcp__shim_space,
};

dcp_status dcp_storage_fault(dcp_context *ctx, dcp_storage *inner, dcp_fault_fn fn, void *user, dcp_storage **out, dcp_error *err)
{
    if (!fn || !out) {
        return dcp__fail(err, DCP_ARG, "fault storage: no function, or no place for the result");
    }
    dcp__shim *shim;
    dcp_status status = dcp__shim_create(dcp__context(ctx), sizeof(fault_storage), &fault_ops, inner, &shim, err);
    if (status == DCP_OK) {
        fault_storage *fs = (fault_storage *)shim;
        fs->fn = fn;
        fs->user = user;
        pthread_mutex_init(&fs->lock, NULL);
        *out = &shim->base;
    }
    return status;
}
