/*
 * An allocator that fails on demand, and a driver that walks a body through every out-of-memory path.
 *
 *     static dcp_status open_and_close(dcp_context *ctx, void *user, dcp_error *err)
 *     {
 *         thing *t;
 *         dcp_status status = thing_open(ctx, user, &t, err);
 *         if (status == DCP_OK) {
 *             thing_close(t);
 *         }
 *         return status;
 *     }
 *     ...
 *     assert_true(failing_alloc_walk(open_and_close, data) > 0); // a walk without allocations tests nothing
 */
#ifndef TESTS_SUPPORT_FAILING_ALLOC_H
#define TESTS_SUPPORT_FAILING_ALLOC_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "dcp/base.h"

typedef struct failing_alloc {
    size_t calls;      /* allocations and resizes so far; frees do not count */
    size_t fail_at;    /* the call of this number fails; SIZE_MAX: none */
    bool keep_failing; /* and all after it too */
    size_t failed;     /* how many failed */
    int64_t live;      /* blocks that are not freed */
} failing_alloc;

static inline void *failing_alloc_resize(void *user, void *ptr, size_t bytes)
{
    failing_alloc *fa = (failing_alloc *)user;
    if (bytes == 0) {
        __atomic_fetch_sub(&fa->live, ptr ? 1 : 0, __ATOMIC_RELAXED);
        free(ptr);
        return NULL;
    }
    size_t call = __atomic_fetch_add(&fa->calls, 1, __ATOMIC_RELAXED);
    if (call == fa->fail_at || (fa->keep_failing && call > fa->fail_at)) {
        __atomic_fetch_add(&fa->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    void *out = realloc(ptr, bytes);
    __atomic_fetch_add(&fa->live, out && !ptr ? 1 : 0, __ATOMIC_RELAXED);
    return out;
}

/* A context on top of fa. Its own block is the first that counts as live. threads 0: the default. */
static inline dcp_context *failing_alloc_context(failing_alloc *fa, int threads)
{
    dcp_allocator allocator = {failing_alloc_resize, fa};
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx = NULL;
    opts.allocator = &allocator;
    opts.threads = threads;
    *fa = (failing_alloc){0, SIZE_MAX, false, 0, 0};
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    return ctx;
}

/* Releases all that it made, also when it succeeds. */
typedef dcp_status (*failing_alloc_body)(dcp_context *ctx, void *user, dcp_error *err);

/* One run with the n-th allocation failing. True if a failure was hit; then the result must be NOMEM, or OK where the code can
 * do without. Nothing may be left allocated. */
static inline bool failing_alloc_try(failing_alloc_body body, void *user, size_t n, bool keep_failing)
{
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 0);
    dcp_error err = DCP_ERROR_INIT;
    fa.calls = 0;
    fa.fail_at = n;
    fa.keep_failing = keep_failing;
    dcp_status status = body(ctx, user, &err);
    bool hit = fa.failed > 0;
    if (status != DCP_OK && (!hit || status != DCP_NOMEM)) {
        fail_msg("allocation %zu failing: %s: %s", n, dcp_status_name(status), err.message);
    }
    if (status != DCP_OK) {
        assert_int_equal(err.code, DCP_NOMEM);
    }
    if (fa.live != 1) {
        fail_msg("allocation %zu failing: %lld blocks leaked", n, (long long)fa.live - 1);
    }
    dcp_context_free(ctx);
    assert_int_equal(fa.live, 0);
    return hit;
}

/* Runs body with allocation 0, 1, 2, .. failing, alone and with all later ones, until a run meets no failure; that one must
 * succeed. Returns the number of allocations of that run. */
static inline size_t failing_alloc_walk(failing_alloc_body body, void *user)
{
    size_t n = 0;
    while (failing_alloc_try(body, user, n, false)) {
        failing_alloc_try(body, user, n, true);
        n++;
    }
    return n;
}

#endif
