#include "base/arena.h"

#include <string.h>
#include <sys/mman.h>

#define FIRST_BLOCK_BYTES ((size_t)16 << 10)
#define LARGEST_BLOCK_BYTES ((size_t)16 << 20)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

struct dcp__arena_block {
    struct dcp__arena_block *older;
    size_t bytes; /* of the space behind the header */
};

void dcp__arena_init(dcp__arena *a, dcp_context *ctx, uint64_t limit_bytes)
{
    *a = (dcp__arena){.ctx = ctx, .limit_bytes = limit_bytes};
}

void dcp__arena_reset(dcp__arena *a)
{
    struct dcp__arena_block *b = a->blocks;
    while (b) {
        struct dcp__arena_block *older = b->older;
        dcp__free_aligned(a->ctx, b);
        b = older;
    }
    dcp__arena_init(a, a->ctx, a->limit_bytes);
}

void *dcp__arena_grow(dcp__arena *a, size_t bytes)
{
    size_t block = a->blocks ? a->blocks->bytes * 2 : FIRST_BLOCK_BYTES;
    block = block > LARGEST_BLOCK_BYTES ? LARGEST_BLOCK_BYTES : block;
    if (bytes > SIZE_MAX - HUGE_PAGE_BYTES) {
        a->used_bytes = UINT64_MAX;
        return NULL;
    }
    size_t rounded = (bytes + 7) & ~(size_t)7;
    block = block < rounded ? rounded : block;
    if (a->used_bytes > a->limit_bytes || block > a->limit_bytes - a->used_bytes) {
        block = rounded; /* the last ones are exact, so that the limit is */
    }
    if (a->used_bytes > a->limit_bytes || block > a->limit_bytes - a->used_bytes) {
        a->used_bytes = UINT64_MAX;
        return NULL;
    }
    size_t header = sizeof(struct dcp__arena_block);
    bool is_huge = block + header >= HUGE_PAGE_BYTES;
    struct dcp__arena_block *b = dcp__alloc_aligned(a->ctx, is_huge ? HUGE_PAGE_BYTES : 64, block + header);
    if (!b) {
        return NULL;
    }
    if (is_huge) {
        madvise(b, (block + header) & ~(HUGE_PAGE_BYTES - 1), MADV_HUGEPAGE); /* a wish; failure changes nothing */
    }
    b->older = a->blocks;
    b->bytes = block;
    a->blocks = b;
    a->used_bytes += block;
    char *start = (char *)b + header;
    a->next = start + rounded;
    a->end = start + block;
    return start;
}

dcp_str dcp__arena_str(dcp__arena *a, dcp_str s)
{
    char *p = s.len < SIZE_MAX ? dcp__arena_alloc(a, s.len + 1) : NULL;
    if (!p) {
        return (dcp_str){NULL, 0};
    }
    if (s.len) {
        memcpy(p, s.ptr, s.len);
    }
    p[s.len] = 0;
    return (dcp_str){p, s.len};
}

dcp_status dcp__arena_fail(const dcp__arena *a, dcp_error *err)
{
    if (a->used_bytes > a->limit_bytes) {
        return dcp__fail(err, DCP_LIMIT, "content needs more than %llu bytes of memory", (unsigned long long)a->limit_bytes);
    }
    return dcp__nomem(err);
}
