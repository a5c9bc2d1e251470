/* A growable run of bytes. A failed append sets `failed` and the rest is ignored, so that writers check once at the end. */
#ifndef DCP_BASE_BUF_H
#define DCP_BASE_BUF_H

#include <string.h>

#include "base/context.h"

typedef struct dcp__buf {
    dcp_context *ctx;
    uint8_t *data;
    size_t len, cap;
    bool failed; /* out of memory */
} dcp__buf;

void dcp__buf_init(dcp__buf *b, dcp_context *ctx);
void dcp__buf_reset(dcp__buf *b); /* frees */
/* Room for `bytes` more at data + len; false (and failed) when out of memory. */
bool dcp__buf_reserve(dcp__buf *b, size_t bytes);

static inline void dcp__buf_put(dcp__buf *b, const void *bytes, size_t len)
{
    if (len && (len <= b->cap - b->len || dcp__buf_reserve(b, len)) && !b->failed) {
        memcpy(b->data + b->len, bytes, len);
        b->len += len;
    }
}
static inline void dcp__buf_put_byte(dcp__buf *b, uint8_t byte)
{
    dcp__buf_put(b, &byte, 1);
}
void dcp__buf_printf(dcp__buf *b, const char *fmt, ...) DCP_PRINTF(2, 3);

#endif
