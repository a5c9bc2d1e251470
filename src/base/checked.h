/* Arithmetic on sizes that may come from a file. Each returns false on overflow and then leaves *out alone. */
#ifndef DCP_BASE_CHECKED_H
#define DCP_BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DCP__CHECKED(name, type, builtin)                                                                                        \
    static inline bool name(type a, type b, type *out)                                                                           \
    {                                                                                                                            \
        type r;                                                                                                                  \
        return builtin(a, b, &r) ? false : ((*out = r), true);                                                                   \
    }
DCP__CHECKED(dcp__add_size, size_t, __builtin_add_overflow)
DCP__CHECKED(dcp__mul_size, size_t, __builtin_mul_overflow)
DCP__CHECKED(dcp__add_u64, uint64_t, __builtin_add_overflow)
DCP__CHECKED(dcp__mul_u64, uint64_t, __builtin_mul_overflow)
DCP__CHECKED(dcp__add_i64, int64_t, __builtin_add_overflow)
DCP__CHECKED(dcp__mul_i64, int64_t, __builtin_mul_overflow)
#undef DCP__CHECKED

/* True if [offset, offset + length) lies within [0, total). */
static inline bool dcp__range_fits(uint64_t offset, uint64_t length, uint64_t total)
{
    return offset <= total && length <= total - offset;
}

/* Rounds up to a multiple of align, a power of two; the caller knows that it does not overflow. */
static inline uint64_t dcp__align_up(uint64_t x, uint64_t align)
{
    return (x + align - 1) & ~(align - 1);
}

#endif
