/* Directories of safetensors files (formats.md 8.3, 8.4), put together into the common metadata. */
#ifndef DCP_FORMAT_HF_H
#define DCP_FORMAT_HF_H

#include <jansson.h>

#include "format/metadata.h"
#include "format/safetensors.h"

/* The file that says which tensor is where. */
#define DCP__HF_INDEX "model.safetensors.index.json"

/* Stands in a directory while one model takes another's place: {"model": [..], "ignored": [..]}, names of files. The ignored ones
 * are not of the model, either not yet or no more. */
#define DCP__HF_MARK ".libdcp-replacing"

/* Is a tensor file of the model, where a mark stands? If there is an index (else NULL) that alone says so. */
bool dcp__hf_is_current(const json_t *mark, const json_t *index, const char *name);
/* Does the mark name the file, as either? */
bool dcp__hf_is_marked(const json_t *mark, const char *name);
/* Does the index send a tensor to the file? */
bool dcp__hf_is_indexed(const json_t *index, const char *name);

/* Bytes of a name in front of "-0000X-of-0000Y.safetensors", or of ".safetensors" if there are no such numbers. */
size_t dcp__hf_stem_bytes(dcp_str name);

/* One file of the directory with its parsed header. */
typedef struct dcp__hf_file {
    dcp_str name;
    const dcp__safetensors *header;
} dcp__hf_file;

/* index is the text of DCP__HF_INDEX, ptr NULL if there is none. Checks that the files form a whole sequence
 * (shards R from 1 without a gap, unless allow_gaps, up to the number of ranks where our own key states it; parts X from 1 to Y,
 * unless an index names the files), that the index agrees with the files, and computes global shapes: our own key where present,
 * else the largest offset + extent. Tensors become entries with DCP__FORM_RAW chunks, in the order of the files and of their
 * data; own.world is the number of ranks as far as keys or names tell. Headers and names may be freed afterwards. Whether chunks
 * cover a tensor is left to the verification and to reading. Errors: FORMAT (files contradict each other or the index), NOT_FOUND
 * (a file that the index names, a missing shard or part, numbered), LIMIT, NOMEM. */
dcp_status dcp__hf_metadata(dcp_context *ctx, const dcp__hf_file *files, size_t n, dcp_str index, bool allow_gaps,
                            dcp__metadata **out, dcp_error *err);
/* The same for one file on its own, whatever sequence its name may belong to. */
dcp_status dcp__safetensors_metadata(dcp_context *ctx, const dcp__hf_file *file, dcp__metadata **out, dcp_error *err);

#endif
