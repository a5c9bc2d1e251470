/* safetensors headers to write (formats.md 8.1, 8.2). */
#ifndef DCP_FORMAT_SAFETENSORS_WRITER_H
#define DCP_FORMAT_SAFETENSORS_WRITER_H

#include "base/buf.h"
#include "dcp/state.h"

typedef struct dcp__st_entry {
    dcp_str name;
    dcp_dtype dtype;
    int ndim;
    const int64_t *extents;        /* as in PyTorch; the last one of float4_e2m1fn_x2 is doubled in the file */
    const int64_t *saved_offsets;  /* NULL: no sharding info for any tensor (all or none) */
    const int64_t *global_extents; /* with saved_offsets: our own key; NULL: none */
} dcp__st_entry;

typedef struct dcp__st_opts {
    int world;             /* ranks that take part in the save, for our own key; 0: not stated */
    const uint32_t *empty; /* with world: numbers of shards without a file, ascending, from 1 on */
    size_t n_empty;
    const dcp_str *extra_keys; /* further texts for __metadata__ */
    const dcp_str *extra_values;
    size_t n_extra;
} dcp__st_opts;

/* Appends length and header JSON, padded with spaces to a multiple of 8; offsets[i] receives where tensor i starts, counted from
 * the start of the blob, in the order given, without gaps; *total the length of the blob. opts may be NULL. Writes nothing that
 * a reader would refuse. Errors: UNSUPPORTED (dtype, named; a float4 scalar), LIMIT (header over 100 MB or max_header_bytes,
 * sizes), ARG (name twice, reserved, or no text that JSON readers take; a shape that does not fit), NOMEM. On an error `out` is
 * as before. */
dcp_status dcp__safetensors_header(dcp__buf *out, const dcp__st_entry *entries, size_t n, const dcp__st_opts *opts,
                                   uint64_t *offsets, uint64_t *total, dcp_error *err);

#endif
