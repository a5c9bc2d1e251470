/* A directory: up to 8 pieces of {1 byte n, name of n bytes, 2 bytes length, header text}; a piece without a name is the index.
 * The data behind the headers exists as a size only: nothing may read it. */
#include <stdlib.h>

#include "base/bytes.h"
#include "format/hf.h"

#define MAX_FILES 8

typedef struct text {
    const uint8_t *bytes;
    size_t len;
} text;

static dcp_status read_header(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const text *t = self->user;
    uint8_t length[8];
    (void)err;
    if (offset < 8) {
        dcp__store64(length, t->len);
        memcpy(buf, length + offset, n);
    } else if (dcp__range_fits(offset - 8, n, t->len)) {
        memcpy(buf, t->bytes + (offset - 8), n);
    } else {
        abort();
    }
    return DCP_OK;
}

static bool take(text *in, size_t n, text *out)
{
    if (n > in->len) {
        return false;
    }
    *out = (text){in->bytes, n};
    in->bytes += n;
    in->len -= n;
    return true;
}

/* The next name and content. */
static bool take_piece(text *in, text *name, text *content)
{
    text length;
    return take(in, 1, &length) && take(in, length.bytes[0], name) && take(in, 2, &length) &&
           take(in, dcp__load16(length.bytes), content);
}

static void check(const dcp__metadata *m)
{
    for (size_t i = 0; i < m->n_entries; i++) {
        const dcp__entry *e = &m->entries[i];
        for (size_t k = 0; k < e->item.n_chunks; k++) {
            const dcp__chunk *c = &m->chunks[e->first_chunk + k];
            for (int d = 0; d < e->item.ndim; d++) {
                if (c->offsets[d] + c->sizes[d] > e->item.extents[d]) {
                    abort();
                }
            }
            if (m->storages[c->storage].file >= m->n_files) {
                abort();
            }
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    text in = {data, size}, name, content;
    dcp__safetensors headers[MAX_FILES];
    dcp__hf_file files[MAX_FILES];
    size_t n = 0;
    dcp_str index = {NULL, 0};
    while (n < MAX_FILES && take_piece(&in, &name, &content)) {
        if (name.len == 0) {
            index = (dcp_str){(const char *)content.bytes, content.len};
            continue;
        }
        dcp__source src = {.read = read_header, .size = 8 + content.len + ((uint64_t)1 << 50), .user = &content};
        if (dcp__safetensors_open(dcp__context(NULL), &src, false, &headers[n], NULL) == DCP_OK) {
            files[n] = (dcp__hf_file){{(const char *)name.bytes, name.len}, &headers[n]};
            n++;
        }
    }
    dcp__metadata *m;
    if (dcp__hf_metadata(dcp__context(NULL), files, n, index, n % 2, &m, NULL) == DCP_OK) {
        check(m);
        dcp__metadata_free(m);
    }
    for (size_t i = 0; i < n; i++) {
        dcp__safetensors_reset(&headers[i]);
    }
    return 0;
}
