#include "storage/storage.h"

#include <string.h>

void dcp_storage_free(dcp_storage *st)
{
    if (st) {
        st->ops->free(st);
    }
}

dcp_status dcp__open_flags_check(const char *name, unsigned flags, dcp_error *err)
{
    const unsigned all = DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_EXCLUSIVE | DCP_OPEN_TRUNCATE |
                         DCP_OPEN_BENEATH | DCP_OPEN_DIRECT | DCP_OPEN_WRITEBACK;
    const char *fault = NULL;
    if (flags & ~all) {
        fault = "unknown bits";
    } else if (!(flags & (DCP_OPEN_READ | DCP_OPEN_WRITE))) {
        fault = "neither READ nor WRITE";
    } else if ((flags & (DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE)) && !(flags & DCP_OPEN_WRITE)) {
        fault = "CREATE or TRUNCATE without WRITE";
    } else if ((flags & DCP_OPEN_EXCLUSIVE) && !(flags & DCP_OPEN_CREATE)) {
        fault = "EXCLUSIVE without CREATE";
    }
    if (fault) {
        return dcp__fail(err, DCP_ARG, "open %s: flags 0x%x: %s", dcp__print(dcp_str_of(name)).text, flags, fault);
    }
    return DCP_OK;
}

dcp_status dcp__io_range_check(const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    if (offset > INT64_MAX || n > INT64_MAX - offset) {
        return dcp__fail_at(err, DCP_ARG, offset, "%s: %zu bytes at %llu are beyond the largest possible file",
                            dcp__print(dcp_str_of(name)).text, n, (unsigned long long)offset);
    }
    return DCP_OK;
}

dcp_status dcp__storage_check(const dcp_storage *st, dcp_error *err)
{
    if (!st || !st->ops) {
        return dcp__fail(err, DCP_ARG, "no storage given");
    }
    const dcp_storage_ops *ops = st->ops;
    if (ops->abi_version != DCP_STORAGE_ABI || ops->struct_size < sizeof *ops) {
        return dcp__fail(err, DCP_ARG, "storage: version %u with a table of %zu bytes, expected %u with %zu", ops->abi_version,
                         ops->struct_size, DCP_STORAGE_ABI, sizeof *ops);
    }
    if (!ops->name || !ops->open || !ops->read_at || !ops->write_at || !ops->sync || !ops->close || !ops->stat || !ops->list ||
        !ops->remove || !ops->free) {
        return dcp__fail(err, DCP_ARG, "storage %s: a function that may not be NULL is",
                         ops->name ? ops->name : "without a name");
    }
    return DCP_OK;
}

bool dcp__name_is_beneath(const char *name)
{
    if (name[0] == '/') {
        return false;
    }
    int64_t depth = 0;
    while (*name && depth >= 0) {
        size_t len = strcspn(name, "/");
        if (len == 2 && name[0] == '.' && name[1] == '.') {
            depth--;
        } else if (len > 0 && !(len == 1 && name[0] == '.')) {
            depth++;
        }
        name += len;
        name += *name == '/';
    }
    return depth >= 0;
}

dcp_status dcp__synced(dcp_status status, const dcp_error *fault, dcp_error *err)
{
    if (status == DCP_UNSUPPORTED) {
        return DCP_OK;
    }
    if (status != DCP_OK && err) {
        *err = *fault;
    }
    return status;
}

static dcp_status put_bytes(dcp_file *f, const void *bytes, size_t n, bool is_durable, dcp_error *err)
{
    const dcp_storage_ops *ops = f->storage->ops;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = n ? ops->write_at(f, bytes, n, 0, err) : DCP_OK;
    return status == DCP_OK && is_durable ? dcp__synced(ops->sync(f, &fault), &fault, err) : status;
}

dcp_status dcp__write_file(dcp_storage *st, const char *name, const void *bytes, size_t n, bool is_durable, dcp_error *err)
{
    dcp_file *f;
    dcp_status status = st->ops->open(st, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE, &f, err);
    if (status != DCP_OK) {
        return status;
    }
    status = put_bytes(f, bytes, n, is_durable, err);
    dcp_status closed = st->ops->close(f, status == DCP_OK ? err : NULL);
    status = status == DCP_OK ? closed : status;
    if (status != DCP_OK) {
        st->ops->remove(st, name, NULL);
    }
    return status;
}

/* Another holder may rename or remove the file between the two steps: then the name is that of another file, or of none. */
#define LOCK_TRIES 8

static dcp_status try_lock(dcp_file *f, bool *locked, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    *locked = true;
    if (!f->storage->ops->lock) {
        return DCP_OK;
    }
    return dcp__synced(f->storage->ops->lock(f, locked, &fault), &fault, err);
}

dcp_status dcp__open_locked(dcp_storage *st, const char *name, dcp_file **out, dcp_error *err)
{
    bool locked = false;
    dcp_status status = DCP_OK;
    *out = NULL;
    for (int i = 0; i < LOCK_TRIES && status == DCP_OK && !locked; i++) {
        dcp_file *f;
        status = st->ops->open(st, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, err);
        if (status != DCP_OK) {
            break;
        }
        status = try_lock(f, &locked, err);
        if (status == DCP_OK && locked) {
            *out = f;
        } else {
            st->ops->close(f, NULL);
        }
    }
    return status;
}
