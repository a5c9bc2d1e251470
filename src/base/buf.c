#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>

void dcp__buf_init(dcp__buf *b, dcp_context *ctx)
{
    *b = (dcp__buf){.ctx = ctx};
}

void dcp__buf_reset(dcp__buf *b)
{
    dcp__free(b->ctx, b->data);
    dcp__buf_init(b, b->ctx);
}

bool dcp__buf_reserve(dcp__buf *b, size_t bytes)
{
    if (!b->failed && bytes > SIZE_MAX - b->len) {
        b->failed = true;
    }
    if (!b->failed) {
        void *data = b->data;
        b->failed = !dcp__grow(b->ctx, &data, &b->cap, b->len + bytes, 1);
        b->data = data;
    }
    return !b->failed;
}

void dcp__buf_printf(dcp__buf *b, const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int len = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (len >= 0 && dcp__buf_reserve(b, (size_t)len + 1)) {
        vsnprintf((char *)b->data + b->len, (size_t)len + 1, fmt, again);
        b->len += (size_t)len;
    }
    va_end(again);
}
