/* One byte, odd: decoded twice; then the encoded record. */
#include "format/transform.h"

#define ENOUGH_BYTES ((uint64_t)16 << 20)

static dcp_status count(void *user, const void *bytes, size_t n, dcp_error *err)
{
    uint64_t *total = user;
    (void)bytes;
    *total += n;
    return *total > ENOUGH_BYTES ? dcp__fail(err, DCP_CANCELED, "enough") : DCP_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size > 0) {
        dcp_str descriptors = dcp_str_of(data[0] & 1 ? "stream.zstd/1,stream.zstd/1" : "stream.zstd/1");
        dcp__source src = dcp__source_memory(data + 1, size - 1);
        uint64_t total = 0;
        dcp__transform_decode(dcp__context(NULL), descriptors, &src, count, &total, NULL);
    }
    return 0;
}
