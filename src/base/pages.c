#include "base/pages.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

size_t dcp__page_bytes(void)
{
    long bytes = sysconf(_SC_PAGESIZE); /* 64 KiB on many ARM hosts */
    return bytes > 0 ? (size_t)bytes : 4096;
}

bool dcp__whole_pages(size_t bytes, size_t *out)
{
    size_t page = dcp__page_bytes(), sum;
    if (!dcp__add_size(bytes, page - 1, &sum)) {
        return false;
    }
    *out = sum & ~(page - 1);
    return true;
}

/* Cuts off what is no whole page of its own; false if nothing is left. */
static bool only_whole_pages(char **ptr, size_t *n)
{
    size_t page = dcp__page_bytes(), head = (page - (uintptr_t)*ptr % page) % page;
    if (*n < head || *n - head < page) {
        return false;
    }
    *ptr += head;
    *n = (*n - head) & ~(page - 1);
    return true;
}

static bool populate(char *ptr, size_t n)
{
    return madvise(ptr, n, MADV_POPULATE_WRITE) == 0;
}

void dcp__pages_touch(void *ptr, size_t n)
{
    char *at = ptr;
    if (!only_whole_pages(&at, &n) || populate(at, n)) {
        return;
    }
    size_t page = dcp__page_bytes();
    for (size_t i = 0; i < n; i += page) {
        volatile char *byte = at + i;
        *byte = *byte;
    }
}

void dcp__pages_expect(void *ptr, size_t n)
{
    char *at = ptr;
    unsigned char is_there = 0;
    if (only_whole_pages(&at, &n) && mincore(at, dcp__page_bytes(), &is_there) == 0 && !(is_there & 1)) {
        populate(at, n); /* where it cannot, the writing does */
    }
}
