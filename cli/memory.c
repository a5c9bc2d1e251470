#include "cli.h"

#include <stdlib.h>

void *must_resize(void *p, size_t n, size_t size)
{
    /* realloc(p, 0) may free p, so at least one byte is asked for. */
    void *q = reallocarray(p, n ? n : 1, size ? size : 1);
    if (!q) {
        complain("out of memory");
        exit(EXIT_PROBLEM);
    }
    return q;
}

void *must_alloc(size_t n, size_t size)
{
    return must_resize(NULL, n, size);
}
