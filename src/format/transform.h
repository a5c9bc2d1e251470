/* Stream transforms of whole records (formats.md 7). A small registry, by name. */
#ifndef DCP_FORMAT_TRANSFORM_H
#define DCP_FORMAT_TRANSFORM_H

#include "base/context.h"
#include "base/source.h"

/* Receives decoded bytes in order; a failure stops the decoding. */
typedef dcp_status (*dcp__sink_fn)(void *user, const void *bytes, size_t n, dcp_error *err);

/* Checks a list of descriptors ("stream.zstd/1", several joined by ","): known names and versions, one distinct name.
 * Errors: UNSUPPORTED (named). */
dcp_status dcp__transform_check(dcp_str descriptors, dcp_error *err);
/* Decodes all of src through the descriptors into the sink, in bounded memory. Errors: FORMAT (offset), UNSUPPORTED, NOMEM,
 * the source's and the sink's. */
dcp_status dcp__transform_decode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err);
/* Encodes n bytes; the output is appended to what the sink has. */
dcp_status dcp__transform_encode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err);

#endif
