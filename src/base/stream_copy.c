#include "base/stream_copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE_BYTES ((size_t)64)
#define PAGE_BYTES ((size_t)4096)
#define PAGES 4                         /* side by side, so that several rows of the memory are open at a time */
#define LEAST_BYTES ((size_t)256 << 10) /* less may well be read from the caches */

static void copy_line(char *to, const char *from)
{
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)from);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + 32));
    __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + 48));
    _mm_stream_si128((__m128i *)(void *)to, a);
    _mm_stream_si128((__m128i *)(void *)(to + 16), b);
    _mm_stream_si128((__m128i *)(void *)(to + 32), c);
    _mm_stream_si128((__m128i *)(void *)(to + 48), d);
}

static void copy_pages(char *to, const char *from)
{
    for (size_t at = 0; at < PAGE_BYTES; at += LINE_BYTES) {
        for (size_t page = 0; page < PAGES; page++) {
            _mm_prefetch(from + (page + PAGES) * PAGE_BYTES + at, _MM_HINT_T0); /* beyond the end it does nothing */
            copy_line(to + page * PAGE_BYTES + at, from + page * PAGE_BYTES + at);
        }
    }
}

void dcp__stream_copy(void *dst, const void *src, size_t n)
{
    char *to = dst;
    const char *from = src;
    size_t head = (LINE_BYTES - (uintptr_t)to % LINE_BYTES) % LINE_BYTES;
    if (n >= LEAST_BYTES) {
        memcpy(to, from, head);
        for (to += head, from += head, n -= head; n >= PAGES * PAGE_BYTES; n -= PAGES * PAGE_BYTES) {
            copy_pages(to, from);
            to += PAGES * PAGE_BYTES;
            from += PAGES * PAGE_BYTES;
        }
        _mm_sfence(); /* before another thread is told */
    }
    memcpy(to, from, n);
}
#else
void dcp__stream_copy(void *dst, const void *src, size_t n)
{
    memcpy(dst, src, n);
}
#endif
