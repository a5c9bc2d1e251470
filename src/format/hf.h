/* Directories of safetensors files (formats.md 8.3, 8.4), put together into the common metadata. */
#ifndef DCP_FORMAT_HF_H
#define DCP_FORMAT_HF_H

#include "format/metadata.h"
#include "format/safetensors.h"

/* One file of the directory with its parsed header. */
typedef struct dcp__hf_file {
    dcp_str name;
    const dcp__safetensors *header;
} dcp__hf_file;

/* index is the text of model.safetensors.index.json, ptr NULL if there is none. Checks that the shard files form a whole sequence
 * (shard-0000R of a known count), that the index agrees with the files, and computes global shapes: our own key where present,
 * else the largest offset + extent. Tensors become entries with DCP__FORM_RAW chunks. Whether chunks cover a tensor is left to the
 * verification and to reading. Errors: FORMAT, NOT_FOUND (a file that the index names, a missing shard), NOMEM. */
dcp_status dcp__hf_metadata(dcp_context *ctx, const dcp__hf_file *files, size_t n, dcp_str index, dcp__metadata **out,
                            dcp_error *err);

#endif
