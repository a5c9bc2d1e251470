/* The context behind the public handle, and all heap access: everything goes through these functions. */
#ifndef DCP_BASE_CONTEXT_H
#define DCP_BASE_CONTEXT_H

#include "base/error.h"
#include "dcp/base.h"

struct dcp_context {
    dcp_allocator allocator;
    dcp_log_fn log;
    void *log_user;
    dcp_log_level log_level;
    int threads;           /* >= 1 */
    uint64_t memory_bytes; /* > 0 */
    dcp_limits limits;     /* no zero fields */
};

/* ctx itself, or the built-in context for NULL. Every public function that takes a context calls it once. */
dcp_context *dcp__context(dcp_context *ctx);

/* NULL when out of memory (bytes 0 gives a valid pointer). */
void *dcp__alloc(dcp_context *ctx, size_t bytes);
void *dcp__calloc(dcp_context *ctx, size_t count, size_t bytes);
void *dcp__realloc(dcp_context *ctx, void *ptr, size_t bytes);
void dcp__free(dcp_context *ctx, void *ptr);
char *dcp__strndup(dcp_context *ctx, const char *text, size_t len);

/* Grows an array of elem_bytes each to hold at least `need` elements, doubling. *cap is in elements. False: out of memory. */
bool dcp__grow(dcp_context *ctx, void **array, size_t *cap, size_t need, size_t elem_bytes);

/* Memory at a multiple of align (a power of two), for I/O buffers. Freed with dcp__free_aligned. */
void *dcp__alloc_aligned(dcp_context *ctx, size_t align, size_t bytes);
void dcp__free_aligned(dcp_context *ctx, void *ptr);

/* How many threads an operation may use if each needs bytes_each of buffers: the context's number, less if they would take more
 * than half of the memory budget; at least 1. */
int dcp__affordable_threads(const dcp_context *ctx, uint64_t bytes_each);

void dcp__log(dcp_context *ctx, dcp_log_level level, const char *fmt, ...) DCP_PRINTF(3, 4);

#endif
