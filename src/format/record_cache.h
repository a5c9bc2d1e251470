/* Layouts of tensor records, kept: records of one dtype and shape differ in their CRCs only, and checkpoints have many of few
 * shapes. Not for several threads at once: each worker has its own. */
#ifndef DCP_FORMAT_RECORD_CACHE_H
#define DCP_FORMAT_RECORD_CACHE_H

#include "dcp/state.h"
#include "format/archive_writer.h"

typedef struct dcp__record_cache dcp__record_cache;

/* Keeps at most n_slots layouts, about 2 KiB each with the usual alignment. opts->prefix is borrowed until the cache is freed.
 * Errors: NOMEM. */
dcp_status dcp__record_cache_create(dcp_context *ctx, const dcp__archive_opts *opts, size_t n_slots, dcp__record_cache **out,
                                    dcp_error *err);
void dcp__record_cache_free(dcp__record_cache *c); /* NULL is allowed */
/* The layout of a row-major tensor's record, which has one storage. Borrowed until the next call. Errors: ARG, LIMIT, NOMEM. */
dcp_status dcp__record_cache_get(dcp__record_cache *c, dcp_dtype dtype, int ndim, const int64_t *extents,
                                 const dcp__archive_layout **out, dcp_error *err);

#endif
