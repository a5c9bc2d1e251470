#include "base/hash.h"

#include <isa-l/crc.h>
#include <string.h>
#include <zlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

uint32_t dcp__crc32(uint32_t crc, const void *data, size_t len)
{
    return crc32_gzip_refl(crc, data, len);
}

uint32_t dcp__crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
    return (uint32_t)crc32_combine(crc_a, crc_b, (z_off_t)len_b);
}

static dcp__digest canonical(XXH128_hash_t h)
{
    XXH128_canonical_t c;
    dcp__digest d;
    XXH128_canonicalFromHash(&c, h);
    memcpy(d.bytes, c.digest, sizeof d.bytes);
    return d;
}

dcp__digest dcp__xxh3_128(const void *data, size_t len)
{
    return canonical(XXH3_128bits(data, len));
}

uint64_t dcp__xxh3_64(const void *data, size_t len)
{
    return XXH3_64bits(data, len);
}

size_t dcp__hasher_bytes(void)
{
    return sizeof(XXH3_state_t);
}

void dcp__hasher_init(dcp__hasher *h)
{
    XXH3_128bits_reset((XXH3_state_t *)h);
}

void dcp__hasher_update(dcp__hasher *h, const void *data, size_t len)
{
    XXH3_128bits_update((XXH3_state_t *)h, data, len);
}

dcp__digest dcp__hasher_digest(const dcp__hasher *h)
{
    return canonical(XXH3_128bits_digest((const XXH3_state_t *)h));
}
