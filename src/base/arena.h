/* Memory that is freed all at once. Blocks grow with use and are advised to be huge pages where the kernel offers them, since
 * the first touch of small pages is what parsing large metadata would spend its time on. */
#ifndef DCP_BASE_ARENA_H
#define DCP_BASE_ARENA_H

#include "base/context.h"

typedef struct dcp__arena {
    dcp_context *ctx;
    struct dcp__arena_block *blocks; /* newest first */
    char *next, *end;
    uint64_t used_bytes;  /* handed out so far */
    uint64_t limit_bytes; /* dcp__arena_alloc returns NULL beyond it */
} dcp__arena;

void dcp__arena_init(dcp__arena *a, dcp_context *ctx, uint64_t limit_bytes);
void dcp__arena_reset(dcp__arena *a); /* frees everything */
void *dcp__arena_grow(dcp__arena *a, size_t bytes);

/* 8-byte aligned, a valid pointer for 0 bytes too; NULL when out of memory or over the limit (a->used_bytes > a->limit_bytes
 * tells which). */
static inline void *dcp__arena_alloc(dcp__arena *a, size_t bytes)
{
    size_t rounded = (bytes + !bytes + 7) & ~(size_t)7;
    if (rounded < bytes || rounded > (size_t)(a->end - a->next)) {
        return dcp__arena_grow(a, bytes);
    }
    void *p = a->next;
    a->next += rounded;
    return p;
}

/* A NUL-terminated copy; ptr is NULL on failure. */
dcp_str dcp__arena_str(dcp__arena *a, dcp_str s);
/* NOMEM or LIMIT, whichever made the last allocation fail. */
dcp_status dcp__arena_fail(const dcp__arena *a, dcp_error *err);

#endif
