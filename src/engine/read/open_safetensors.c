/* One safetensors file, or a Hugging Face directory of them. */
#include <string.h>

#include "engine/read/checkpoint.h"
#include "format/hf.h"
#include "format/json_read.h"

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

static dcp_status read_json(dcp_checkpoint *ck, const char *name, json_t **out, dcp_error *err)
{
    dcp__buf text;
    dcp__buf_init(&text, ck->ctx);
    dcp_status status = dcp__read_file(ck, name, ck->ctx->limits.max_header_bytes, &text, err);
    if (status == DCP_OK) {
        dcp_str json = {text.data ? (const char *)text.data : "", text.len};
        status = dcp__json_parse(ck->ctx, json, 0, name, out, err);
    } else {
        dcp__prefix(err, status, "%s: ", name);
    }
    dcp__buf_reset(&text);
    return status;
}

static size_t select_current(char **names, size_t n, const json_t *mark, const json_t *index)
{
    size_t n_current = 0;
    for (size_t i = 0; i < n; i++) {
        char *name = names[i];
        if (dcp__hf_is_current(mark, index, name)) {
            names[i] = names[n_current];
            names[n_current++] = name;
        }
    }
    return n_current;
}

dcp_status dcp__select_tensor_files(dcp_checkpoint *ck, char **names, size_t *n, bool has_index, dcp_error *err)
{
    json_t *mark = NULL, *index = NULL;
    dcp_status status = read_json(ck, DCP__HF_MARK, &mark, err);
    if (status == DCP_OK && has_index) {
        status = read_json(ck, index_name, &index, err);
    }
    if (status == DCP_OK) {
        *n = select_current(names, *n, mark, index);
    }
    json_decref(mark);
    json_decref(index);
    return status;
}

dcp_status dcp__open_safetensors(dcp_checkpoint *ck, const char **names, size_t n, bool has_index, dcp_error *err)
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
