#include "storage/shim.h"

#include <string.h>

dcp_status dcp__shim_create(dcp_context *ctx, size_t bytes, const dcp_storage_ops *ops, dcp_storage *inner, dcp__shim **out,
                            dcp_error *err)
{
    dcp_status status = dcp__storage_check(inner, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__shim *s = dcp__calloc(ctx, 1, bytes);
    if (!s) {
        return dcp__nomem(err);
    }
    s->ops = *ops;
    s->ops.caps = inner->ops->caps;
    s->ops.rename = inner->ops->rename ? ops->rename : NULL;
    s->ops.make_dir = inner->ops->make_dir ? ops->make_dir : NULL;
    s->ops.sync_dir = inner->ops->sync_dir ? ops->sync_dir : NULL;
    s->ops.lock = inner->ops->lock ? ops->lock : NULL;
    s->ops.space = inner->ops->space ? ops->space : NULL;
    s->base.ops = &s->ops;
    s->ctx = ctx;
    s->inner = inner;
    *out = s;
    return DCP_OK;
}

dcp_status dcp__shim_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    dcp__shim *s = (dcp__shim *)st;
    size_t name_bytes = strlen(name) + 1;
    dcp__shim_file *f = dcp__alloc(s->ctx, sizeof *f + name_bytes);
    if (!f) {
        return dcp__nomem(err);
    }
    f->base.storage = st;
    memcpy(f->name, name, name_bytes);
    dcp_status status = s->inner->ops->open(s->inner, name, flags, &f->inner, err);
    if (status != DCP_OK) {
        dcp__free(s->ctx, f);
        return status;
    }
    *out = &f->base;
    return DCP_OK;
}

dcp_status dcp__shim_close(dcp_file *file, dcp_error *err)
{
    dcp__shim_file *f = (dcp__shim_file *)file;
    dcp__shim *s = (dcp__shim *)file->storage;
    dcp_status status = s->inner->ops->close(f->inner, err);
    dcp__free(s->ctx, f);
    return status;
}

dcp_status dcp__shim_space(dcp_storage *st, const char *name, uint64_t *free_bytes, dcp_error *err)
{
    dcp_storage *inner = ((dcp__shim *)st)->inner;
    return inner->ops->space(inner, name, free_bytes, err);
}

void dcp__shim_free(dcp_storage *st)
{
    dcp__free(((dcp__shim *)st)->ctx, st);
}
