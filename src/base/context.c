#include "base/context.h"

#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static void *resize_with_malloc(void *user, void *ptr, size_t bytes)
{
    (void)user;
    if (bytes == 0) {
        free(ptr);
        return NULL;
    }
    /* No block can be larger than this, and checkers take a request for one as a mistake of the caller. */
    return bytes > PTRDIFF_MAX ? NULL : realloc(ptr, bytes);
}

static int usable_cpus(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n < 1 ? 1 : n > 8 ? 8 : n;
}

static void set_defaults(dcp_context *ctx)
{
    dcp_limits *l = &ctx->limits;
    l->struct_size = sizeof *l;
    l->max_depth = l->max_depth ? l->max_depth : 256;
    l->max_parse_bytes = l->max_parse_bytes ? l->max_parse_bytes : (uint64_t)4 << 30;
    l->max_string_bytes = l->max_string_bytes ? l->max_string_bytes : (uint64_t)1 << 30;
    l->max_header_bytes = l->max_header_bytes ? l->max_header_bytes : 100000000;
    l->max_list_index = l->max_list_index ? l->max_list_index : 1000000;
    ctx->threads = ctx->threads > 0 ? ctx->threads : usable_cpus();
    ctx->memory_bytes = ctx->memory_bytes ? ctx->memory_bytes : (uint64_t)192 << 20;
}

static dcp_context builtin = {
    .allocator = {resize_with_malloc, NULL},
    .log_level = DCP_LOG_WARNING,
};
static pthread_once_t builtin_once = PTHREAD_ONCE_INIT;

static void set_builtin(void)
{
    set_defaults(&builtin);
}

/* The built-in one is the same for everybody and never changes after its first use. */
dcp_context *dcp__context(dcp_context *ctx)
{
    if (ctx) {
        return ctx;
    }
    pthread_once(&builtin_once, set_builtin);
    return &builtin;
}

dcp_status dcp_context_create(const dcp_context_opts *opts, dcp_context **out, dcp_error *err)
{
    dcp_context_opts o = DCP_CONTEXT_OPTS_INIT;
    if (!out) {
        return dcp__fail(err, DCP_ARG, "context: no place for the result");
    }
    if (opts) {
        if (opts->struct_size != sizeof o) {
            return dcp__fail(err, DCP_ARG, "context options: struct_size %zu, expected %zu", opts->struct_size, sizeof o);
        }
        o = *opts;
    }
    dcp_allocator allocator = o.allocator ? *o.allocator : (dcp_allocator){resize_with_malloc, NULL};
    dcp_context *ctx = allocator.resize(allocator.user, NULL, sizeof *ctx);
    if (!ctx) {
        return dcp__nomem(err);
    }
    *ctx = (dcp_context){
        .allocator = allocator,
        .log = o.log,
        .log_user = o.log_user,
        .log_level = o.log_level,
        .threads = o.threads,
        .memory_bytes = o.memory_bytes,
        .limits = o.limits,
    };
    set_defaults(ctx);
    *out = ctx;
    return DCP_OK;
}

void dcp_context_free(dcp_context *ctx)
{
    if (ctx) {
        dcp_allocator allocator = ctx->allocator;
        allocator.resize(allocator.user, ctx, 0);
    }
}

void dcp_text_free(dcp_context *ctx, char *text)
{
    dcp__free(dcp__context(ctx), text);
}

void *dcp_context_resize(dcp_context *ctx, void *ptr, size_t bytes)
{
    ctx = dcp__context(ctx);
    return ctx->allocator.resize(ctx->allocator.user, ptr, bytes);
}

void *dcp__alloc(dcp_context *ctx, size_t bytes)
{
    return ctx->allocator.resize(ctx->allocator.user, NULL, bytes ? bytes : 1);
}

void *dcp__calloc(dcp_context *ctx, size_t count, size_t bytes)
{
    size_t total;
    if (!dcp__mul_size(count, bytes, &total)) {
        return NULL;
    }
    void *ptr = dcp__alloc(ctx, total);
    if (ptr) {
        memset(ptr, 0, total);
    }
    return ptr;
}

void *dcp__realloc(dcp_context *ctx, void *ptr, size_t bytes)
{
    return ctx->allocator.resize(ctx->allocator.user, ptr, bytes ? bytes : 1);
}

void dcp__free(dcp_context *ctx, void *ptr)
{
    if (ptr) {
        ctx->allocator.resize(ctx->allocator.user, ptr, 0);
    }
}

char *dcp__strndup(dcp_context *ctx, const char *text, size_t len)
{
    char *copy = dcp__alloc(ctx, len + 1);
    if (copy) {
        if (len) {
            memcpy(copy, text, len);
        }
        copy[len] = 0;
    }
    return copy;
}

bool dcp__grow(dcp_context *ctx, void **array, size_t *cap, size_t need, size_t elem_bytes)
{
    if (need <= *cap) {
        return true;
    }
    size_t want = *cap ? *cap * 2 : 8, bytes;
    want = want < need ? need : want;
    if (!dcp__mul_size(want, elem_bytes, &bytes)) {
        return false;
    }
    void *grown = dcp__realloc(ctx, *array, bytes);
    if (!grown) {
        return false;
    }
    *array = grown;
    *cap = want;
    return true;
}

/* The block's own address stands in the word before the aligned one. */
void *dcp__alloc_aligned(dcp_context *ctx, size_t align, size_t bytes)
{
    size_t total;
    if (!dcp__add_size(bytes, align + sizeof(void *), &total)) {
        return NULL;
    }
    char *block = dcp__alloc(ctx, total);
    if (!block) {
        return NULL;
    }
    uintptr_t start = ((uintptr_t)block + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    char *aligned = block + (start - (uintptr_t)block);
    memcpy(aligned - sizeof(void *), &block, sizeof(void *));
    return aligned;
}

void dcp__free_aligned(dcp_context *ctx, void *ptr)
{
    if (ptr) {
        void *block;
        memcpy(&block, (char *)ptr - sizeof(void *), sizeof(void *));
        dcp__free(ctx, block);
    }
}

int dcp__affordable_threads(const dcp_context *ctx, uint64_t bytes_each)
{
    uint64_t affordable = ctx->memory_bytes / 2 / bytes_each;
    return affordable < 1 ? 1 : affordable < (uint64_t)ctx->threads ? (int)affordable : ctx->threads;
}

void dcp__log(dcp_context *ctx, dcp_log_level level, const char *fmt, ...)
{
    if (!ctx->log || level > ctx->log_level) {
        return;
    }
    char line[DCP_ERROR_MESSAGE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    ctx->log(ctx->log_user, level, line);
}
