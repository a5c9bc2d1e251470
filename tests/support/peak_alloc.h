/* An allocator that knows the most bytes that were allocated at any one time. */
#ifndef TESTS_SUPPORT_PEAK_ALLOC_H
#define TESTS_SUPPORT_PEAK_ALLOC_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

typedef struct peak_alloc {
    size_t now, most;
} peak_alloc;

static inline void *peak_alloc_resize(void *user, void *ptr, size_t bytes)
{
    peak_alloc *p = user;
    size_t *block = ptr ? (size_t *)ptr - 2 : NULL; /* the size is kept in front */
    size_t before = block ? block[0] : 0;
    if (bytes == 0) {
        __atomic_fetch_sub(&p->now, before, __ATOMIC_RELAXED);
        free(block);
        return NULL;
    }
    block = realloc(block, bytes + 2 * sizeof *block);
    assert_non_null(block);
    block[0] = bytes;
    size_t now = __atomic_add_fetch(&p->now, bytes - before, __ATOMIC_RELAXED),
           most = __atomic_load_n(&p->most, __ATOMIC_RELAXED);
    while (now > most && !__atomic_compare_exchange_n(&p->most, &most, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return block + 2;
}

#endif
