/* Little-endian loads and stores at any address. */
#ifndef DCP_BASE_BYTES_H
#define DCP_BASE_BYTES_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "libdcp runs on little-endian machines"
#endif

static inline uint16_t dcp__load16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint32_t dcp__load32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline uint64_t dcp__load64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void dcp__store16(void *p, uint16_t v)
{
    memcpy(p, &v, sizeof v);
}
static inline void dcp__store32(void *p, uint32_t v)
{
    memcpy(p, &v, sizeof v);
}
static inline void dcp__store64(void *p, uint64_t v)
{
    memcpy(p, &v, sizeof v);
}

#endif
