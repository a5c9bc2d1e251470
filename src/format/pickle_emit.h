/* Opcodes that both pickle writers emit. A full buffer shows at the end, in out->failed. */
#ifndef DCP_FORMAT_PICKLE_EMIT_H
#define DCP_FORMAT_PICKLE_EMIT_H

#include <string.h>

#include "base/buf.h"
#include "base/bytes.h"
#include "format/pickle_ops.h"

/* An opcode and its little-endian argument of n bytes. */
static inline void dcp__emit_op(dcp__buf *out, uint8_t op, uint64_t arg, size_t n)
{
    uint8_t bytes[9] = {op};
    dcp__store64(bytes + 1, arg);
    dcp__buf_put(out, bytes, 1 + n);
}

/* Bytes of the shortest two's complement form of v, at least 1. */
static inline size_t dcp__int_bytes(int64_t v)
{
    uint64_t magnitude = (uint64_t)(v < 0 ? ~v : v);
    return magnitude ? (size_t)(64 - __builtin_clzll(magnitude)) / 8 + 1 : 1;
}

/* BININT1, BININT2, BININT or LONG1: the first that fits, as Python does. */
static inline void dcp__emit_int(dcp__buf *out, int64_t v)
{
    if (v >= 0 && v <= UINT8_MAX) {
        dcp__emit_op(out, OP_BININT1, (uint64_t)v, 1);
    } else if (v >= 0 && v <= UINT16_MAX) {
        dcp__emit_op(out, OP_BININT2, (uint64_t)v, 2);
    } else if (v >= INT32_MIN && v <= INT32_MAX) {
        dcp__emit_op(out, OP_BININT, (uint64_t)v, 4);
    } else {
        size_t n = dcp__int_bytes(v);
        dcp__emit_op(out, OP_LONG1, n, 1);
        dcp__buf_put(out, &v, n);
    }
}

static inline void dcp__emit_binget(dcp__buf *out, uint32_t index)
{
    dcp__emit_op(out, index <= UINT8_MAX ? OP_BINGET : OP_LONG_BINGET, index, index <= UINT8_MAX ? 1 : 4);
}

static inline void dcp__emit_binput(dcp__buf *out, uint32_t index)
{
    dcp__emit_op(out, index <= UINT8_MAX ? OP_BINPUT : OP_LONG_BINPUT, index, index <= UINT8_MAX ? 1 : 4);
}

#endif
