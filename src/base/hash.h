/* Checksums, by ISA-L, zlib and xxHash. */
#ifndef DCP_BASE_HASH_H
#define DCP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct dcp__digest {
    uint8_t bytes[16]; /* XXH3-128 in canonical (big-endian) form */
} dcp__digest;

/* CRC-32 of zip files (reflected 0xEDB88320), continued from crc; start with 0. */
uint32_t dcp__crc32(uint32_t crc, const void *data, size_t len);
/* CRC of A followed by B from their CRCs and B's length. */
uint32_t dcp__crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

dcp__digest dcp__xxh3_128(const void *data, size_t len);
uint64_t dcp__xxh3_64(const void *data, size_t len);

/* XXH3-128 in pieces. Memory: the caller's. */
typedef struct dcp__hasher dcp__hasher;
size_t dcp__hasher_bytes(void); /* allocate so much, aligned to 64 */
void dcp__hasher_init(dcp__hasher *h);
void dcp__hasher_update(dcp__hasher *h, const void *data, size_t len);
dcp__digest dcp__hasher_digest(const dcp__hasher *h);

#endif
