/* Stream transforms of whole records (formats.md 7). A small registry, by name. */
#ifndef DCP_FORMAT_TRANSFORM_H
#define DCP_FORMAT_TRANSFORM_H

#include "base/context.h"
#include "base/source.h"

/* Receives decoded bytes in order; a failure stops the decoding. */
typedef dcp_status (*dcp__sink_fn)(void *user, const void *bytes, size_t n, dcp_error *err);

/* Checks a list of descriptors ("stream.zstd/1", several joined by ","; "" is none): known names and versions, one distinct name.
 * Errors: UNSUPPORTED (named). */
dcp_status dcp__transform_check(dcp_str descriptors, dcp_error *err);
/* Decodes all of src through the descriptors into the sink, in bounded memory: two equal descriptors mean encoded twice. Every
 * byte of src must belong to a frame. Errors: FORMAT (offset), CHECKSUM (of a frame), LIMIT (a window over 128 MiB), UNSUPPORTED,
 * NOMEM, the source's and the sink's. */
dcp_status dcp__transform_decode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err);
/* Encodes all of src into the sink: one frame without content size, level 3, as PyTorch writes it. Errors: as above. */
dcp_status dcp__transform_encode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err);

#endif
