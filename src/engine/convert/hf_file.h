/* A safetensors file with PyTorch's offsets and the global shapes in its header, made of write items (formats.md 8.3, 11). */
#ifndef DCP_ENGINE_HF_FILE_H
#define DCP_ENGINE_HF_FILE_H

#include "dcp/save.h"
#include "format/safetensors_writer.h"

typedef struct dcp__hf_output {
    dcp_context *ctx;
    const dcp_write_item **items; /* in the order of the file */
    uint64_t *offsets;            /* of their elements in it */
    size_t n;
    dcp__buf header;
    uint64_t bytes; /* of the whole file */
} dcp__hf_output;

/* Lays the file out: wide elements first, so that all are aligned, else in the order given. Items are borrowed. opts: for the
 * header. Reset in every case. Errors: UNSUPPORTED (objects, dtypes), those of dcp__safetensors_header. */
dcp_status dcp__hf_output_make(dcp_context *ctx, const dcp_write_item *const *items, size_t n, const dcp__st_opts *opts,
                               dcp__hf_output *out, dcp_error *err);
void dcp__hf_output_reset(dcp__hf_output *f);

/* Writes it under a name, front to back, and makes it durable unless `no_sync`. After an error nothing is left of it. */
dcp_status dcp__hf_output_write(const dcp__hf_output *f, dcp_storage *storage, const char *name, bool no_sync, dcp_error *err);

#endif
