/* UTF-8 in which lone surrogates may occur: what Python's "surrogatepass" accepts. */
#include "base/bytes.h"
#include "state/node.h"

#define HIGH_BITS UINT64_C(0x8080808080808080)

static bool is_continuation(uint8_t c)
{
    return (c & 0xC0) == 0x80;
}

/* Length of the sequence at p, of which `left` bytes exist; 0 if it is not valid. */
static size_t sequence_len(const uint8_t *p, size_t left)
{
    if (p[0] < 0x80) {
        return 1;
    }
    size_t len = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || left < len) {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if (!is_continuation(p[i])) {
            return 0;
        }
    }
    bool is_overlong = (p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xF0 && p[1] < 0x90);
    bool is_too_large = p[0] == 0xF4 && p[1] > 0x8F;
    return is_overlong || is_too_large ? 0 : len;
}

bool dcp__is_wtf8(dcp_str text)
{
    const uint8_t *p = (const uint8_t *)text.ptr;
    for (size_t i = 0; i < text.len;) {
        if (text.len - i >= 8 && !(dcp__load64(p + i) & HIGH_BITS)) {
            i += 8; /* most names are ASCII */
            continue;
        }
        size_t len = sequence_len(p + i, text.len - i);
        if (!len) {
            return false;
        }
        i += len;
    }
    return true;
}

uint32_t dcp__wtf8_next(dcp_str text, size_t *pos)
{
    const uint8_t *p = (const uint8_t *)text.ptr + *pos;
    if (p[0] < 0x80) {
        *pos += 1;
        return p[0];
    }
    int more = p[0] >= 0xF0 ? 3 : p[0] >= 0xE0 ? 2 : 1;
    uint32_t c = p[0] & (0x3Fu >> more);
    for (int i = 1; i <= more; i++) {
        c = c << 6 | (p[i] & 0x3Fu);
    }
    *pos += (size_t)more + 1;
    return c;
}
