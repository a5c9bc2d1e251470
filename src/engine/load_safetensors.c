/* One safetensors file, or a Hugging Face directory of them. */
#include <string.h>

#include "engine/engine.h"
#include "format/hf.h"

static const char index_name[] = DCP__HF_INDEX;

static dcp_status read_header(dcp_checkpoint *ck, const char *name, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__open_relative(ck, dcp_str_of(name), &f, &bytes, err);
    if (status == DCP_OK) {
        dcp__source src = dcp__source_file(f, 0, bytes);
        status = dcp__safetensors_open(ck->ctx, &src, true, &ck->headers[ck->n_headers], err);
        f->storage->ops->close(f, NULL);
    }
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "%s: ", name);
    }
    ck->metadata_bytes += ck->headers[ck->n_headers++].header_bytes;
    return DCP_OK;
}

static dcp_status read_index(dcp_checkpoint *ck, dcp__buf *index, dcp_error *err)
{
    dcp_status status = dcp__read_file(ck, index_name, ck->ctx->limits.max_header_bytes, index, err);
    ck->metadata_bytes += index->len;
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", index_name);
}

dcp_status dcp__load_safetensors(dcp_checkpoint *ck, const char **names, size_t n, bool has_index, dcp_error *err)
{
    dcp__buf index;
    dcp_status status = DCP_OK;
    dcp__hf_file *files = dcp__calloc(ck->ctx, n, sizeof *files);
    dcp__buf_init(&index, ck->ctx);
    ck->headers = dcp__calloc(ck->ctx, n, sizeof *ck->headers);
    if (!files || !ck->headers) {
        status = dcp__nomem(err);
        goto done;
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = read_header(ck, names[i], err);
        files[i] = (dcp__hf_file){dcp_str_of(names[i]), &ck->headers[i]};
    }
    if (status == DCP_OK && has_index) {
        status = read_index(ck, &index, err);
    }
    if (status == DCP_OK) {
        const char *content = index.data ? (const char *)index.data : ""; /* an empty index is one, though a bad one */
        dcp_str text = {has_index ? content : NULL, index.len};
        status = ck->layout == DCP_LAYOUT_SAFETENSORS
                     ? dcp__safetensors_metadata(ck->ctx, files, &ck->meta, err)
                     : dcp__hf_metadata(ck->ctx, files, n, text, ck->allow_shard_gaps, &ck->meta, err);
    }
done:
    dcp__buf_reset(&index);
    dcp__free(ck->ctx, files);
    return status;
}
