/* Bytes that can be read at any position: a buffer, a range of a file, a decompressed record. Parsers read from these, so that
 * they do no I/O of their own. Offsets in errors count from the start of the source. */
#ifndef DCP_BASE_SOURCE_H
#define DCP_BASE_SOURCE_H

#include <string.h>

#include "base/checked.h"
#include "base/error.h"

typedef struct dcp__source {
    /* Reads exactly n bytes at offset; the caller has checked that they lie within `size`. */
    dcp_status (*read)(const struct dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err);
    uint64_t size;
    const void *base; /* a buffer's bytes; others leave it NULL and use `user` */
    void *user;
    uint64_t start; /* position of byte 0 in `user` */
} dcp__source;

static inline dcp_status dcp__source_read(const dcp__source *s, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    if (!dcp__range_fits(offset, n, s->size)) {
        return dcp__fail_at(err, DCP_FORMAT, offset, "%zu bytes at %llu exceed the end at %llu", n, (unsigned long long)offset,
                            (unsigned long long)s->size);
    }
    return n ? s->read(s, offset, buf, n, err) : DCP_OK;
}

/* A buffer, borrowed. */
dcp__source dcp__source_memory(const void *data, size_t len);

#endif
