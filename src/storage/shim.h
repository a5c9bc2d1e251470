/* What storages that wrap another have in common. */
#ifndef DCP_STORAGE_SHIM_H
#define DCP_STORAGE_SHIM_H

#include "storage/storage.h"

/* Shims embed it first. */
typedef struct dcp__shim {
    dcp_storage base;
    dcp_storage_ops ops; /* a table of its own: capabilities and what is NULL are as in the inner storage */
    dcp_context *ctx;
    dcp_storage *inner; /* borrowed */
} dcp__shim;

typedef struct dcp__shim_file {
    dcp_file base;
    dcp_file *inner;
    char name[];
} dcp__shim_file;

/* Makes a shim of `bytes` zeroed bytes around inner. Errors: ARG, NOMEM. */
dcp_status dcp__shim_create(dcp_context *ctx, size_t bytes, const dcp_storage_ops *ops, dcp_storage *inner, dcp__shim **out,
                            dcp_error *err);

/* Opens the inner file and wraps it; closing frees the wrapper in every case. */
dcp_status dcp__shim_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err);
dcp_status dcp__shim_close(dcp_file *f, dcp_error *err);
dcp_status dcp__shim_space(dcp_storage *st, const char *name, uint64_t *free_bytes, dcp_error *err);
/* For shims that hold nothing else. */
void dcp__shim_free(dcp_storage *st);

static inline dcp_storage *dcp__inner(dcp_storage *st)
{
    return ((dcp__shim *)st)->inner;
}
static inline dcp_file *dcp__inner_file(dcp_file *f)
{
    return ((dcp__shim_file *)f)->inner;
}

#endif
