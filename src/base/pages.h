/* Pages of the host's memory. */
#ifndef DCP_BASE_PAGES_H
#define DCP_BASE_PAGES_H

#include <stdbool.h>
#include <stddef.h>

size_t dcp__page_bytes(void);
/* Rounded up to whole pages; false on overflow. */
bool dcp__whole_pages(size_t bytes, size_t *out);
/* Has the kernel give all pages of [ptr, ptr + n) now, without changing what they hold. They must be writable. */
void dcp__pages_touch(void *ptr, size_t n);
/* The same, if the first whole page of the range has not been given yet: to be called before memory is filled. A page at a time,
 * as it is written to, takes the kernel half as long again; asking in vain costs a system call. */
void dcp__pages_expect(void *ptr, size_t n);

#endif
