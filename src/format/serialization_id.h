/* The two hashes in `.data/serialization_id` (formats.md 3.6). No loader reads them; they are made to match PyTorch's bytes. */
#ifndef DCP_FORMAT_SERIALIZATION_ID_H
#define DCP_FORMAT_SERIALIZATION_ID_H

#include "base/context.h"

#define DCP__SERIALIZATION_ID_BYTES 40

static inline uint64_t dcp__hash_combine(uint64_t seed, uint64_t value)
{
    return seed ^ (value + 0x9e3779b9u + (seed << 6) + (seed >> 2));
}

/* Hash of the member names of an archive with n storages. Constant time up to 3 storages, else it takes 20 bytes of scratch
 * memory for each. Errors: NOMEM, LIMIT. */
dcp_status dcp__name_hash(dcp_context *ctx, size_t n, bool is_old_form, uint64_t *out, dcp_error *err);

/* The 40 digits. */
void dcp__serialization_id(uint64_t name_hash, uint64_t data_hash, uint8_t out[DCP__SERIALIZATION_ID_BYTES]);

#endif
