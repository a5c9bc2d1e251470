/* Puts pickles together, opcode by opcode. */
#ifndef TESTS_SUPPORT_PICKLE_ASM_H
#define TESTS_SUPPORT_PICKLE_ASM_H

#include <stdint.h>
#include <string.h>

#include "base/buf.h"
#include "base/bytes.h"

/* Bytes given as a string literal, NULs included. */
#define pk_raw(b, literal) dcp__buf_put(b, literal, sizeof(literal) - 1)

static inline void pk_op(dcp__buf *b, int op)
{
    dcp__buf_put_byte(b, (uint8_t)op);
}
static inline void pk_u32(dcp__buf *b, uint32_t v)
{
    dcp__buf_put(b, &v, sizeof v);
}
static inline void pk_str_n(dcp__buf *b, const char *s, size_t n)
{
    if (n < 256) {
        pk_op(b, 0x8c);
        pk_op(b, (int)n);
    } else {
        pk_op(b, 'X');
        pk_u32(b, (uint32_t)n);
    }
    dcp__buf_put(b, s, n);
}
static inline void pk_str(dcp__buf *b, const char *s)
{
    pk_str_n(b, s, strlen(s));
}
/* The smallest opcode that fits, as Python does. */
static inline void pk_int(dcp__buf *b, int64_t v)
{
    if (v >= 0 && v < 256) {
        pk_op(b, 'K');
        pk_op(b, (int)v);
    } else if (v >= 0 && v < 65536) {
        uint16_t s = (uint16_t)v;
        pk_op(b, 'M');
        dcp__buf_put(b, &s, 2);
    } else if (v >= INT32_MIN && v <= INT32_MAX) {
        pk_op(b, 'J');
        pk_u32(b, (uint32_t)v);
    } else {
        pk_raw(b, "\x8a\x08");
        dcp__buf_put(b, &v, 8);
    }
}
static inline void pk_global(dcp__buf *b, const char *module, const char *name)
{
    pk_str(b, module);
    pk_str(b, name);
    pk_op(b, 0x93);
}
static inline void pk_object(dcp__buf *b, const char *module, const char *name)
{
    pk_global(b, module, name);
    pk_raw(b, ")\x81");
}
static inline void pk_tuple(dcp__buf *b, const int64_t *v, size_t n)
{
    if (n == 0) {
        pk_op(b, ')');
        return;
    }
    pk_op(b, '(');
    for (size_t i = 0; i < n; i++) {
        pk_int(b, v[i]);
    }
    pk_op(b, 't');
}
/* torch.Size */
static inline void pk_size(dcp__buf *b, const int64_t *v, size_t n)
{
    pk_global(b, "torch", "Size");
    pk_tuple(b, v, n);
    pk_raw(b, "\x85R");
}

#endif
