/* Copies of memory that nobody reads soon. */
#ifndef DCP_BASE_STREAM_COPY_H
#define DCP_BASE_STREAM_COPY_H

#include <stddef.h>

/* As memcpy, past the caches: the destination's lines are not read first, and what is in the caches stays there. The C library
 * does so too, but only for copies far larger than most tensors. */
void dcp__stream_copy(void *dst, const void *src, size_t n);

#endif
