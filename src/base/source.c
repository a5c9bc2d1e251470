#include "base/source.h"

static dcp_status read_memory(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    memcpy(buf, (const char *)self->base + offset, n);
    return DCP_OK;
}

dcp__source dcp__source_memory(const void *data, size_t len)
{
    return (dcp__source){.read = read_memory, .size = len, .base = data};
}
