#include "escape.h"

#include "cli.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Bytes that a sequence of UTF-8 with this first byte has; 0 if none starts so. */
static size_t sequence_len(unsigned char lead)
{
    if (lead < 0x80) {
        return 1;
    }
    if (lead >= 0xc2 && lead <= 0xdf) {
        return 2;
    }
    if ((lead & 0xf0) == 0xe0) {
        return 3;
    }
    return lead >= 0xf0 && lead <= 0xf4 ? 4 : 0;
}

size_t escape_decode(const char *p, size_t len, uint32_t *out)
{
    static const uint32_t first_of_len[] = {0, 0, 0x80, 0x800, 0x10000};
    static const unsigned char lead_mask[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    size_t n = len ? sequence_len((unsigned char)p[0]) : 0;
    if (n == 0 || n > len) {
        return 0;
    }
    uint32_t c = (unsigned char)p[0] & lead_mask[n];
    for (size_t i = 1; i < n; i++) {
        if (((unsigned char)p[i] & 0xc0) != 0x80) {
            return 0;
        }
        c = c << 6 | ((unsigned char)p[i] & 0x3f);
    }
    if (c < first_of_len[n] || c > 0x10ffff) {
        return 0;
    }
    *out = c;
    return n;
}

static bool is_between(uint32_t c, uint32_t first, uint32_t last)
{
    return c >= first && c <= last;
}

/* Control characters, surrogates, line and paragraph separators, marks that change the direction of writing. */
static bool is_unprintable(uint32_t c)
{
    return c < 0x20 || is_between(c, 0x7f, 0x9f) || is_between(c, 0xd800, 0xdfff) || is_between(c, 0x200e, 0x200f) ||
           is_between(c, 0x2028, 0x202e) || is_between(c, 0x2066, 0x2069) || c == 0xfeff;
}

/* Writes the escape of one unprintable character, at most 6 bytes and a NUL. */
static size_t put_escape(char out[8], uint32_t c)
{
    const char *short_form = c == '\n' ? "\\n" : c == '\t' ? "\\t" : c == '\r' ? "\\r" : NULL;
    if (short_form) {
        return (size_t)snprintf(out, 8, "%s", short_form);
    }
    return (size_t)snprintf(out, 8, c <= 0xff ? "\\x%02" PRIx32 : "\\u%04" PRIx32, c);
}

/* Escapes the character at p; returns how many bytes of input it took. */
static size_t escape_one(const char *p, size_t len, escape_style style, char out[8], size_t *out_len)
{
    uint32_t c = 0;
    size_t n = escape_decode(p, len, &c);
    if (n == 0) {
        *out_len = put_escape(out, (unsigned char)p[0]);
        return 1;
    }
    if (is_unprintable(c)) {
        *out_len = put_escape(out, c);
    } else if (c == '\\' && style == ESCAPE_NAME) {
        memcpy(out, "\\\\", 2);
        *out_len = 2;
    } else {
        memcpy(out, p, n);
        *out_len = n;
    }
    return n;
}

char *escape_text(dcp_str text, escape_style style)
{
    if (text.len == 0 && style == ESCAPE_NAME) {
        text = dcp_str_of("\"\"");
    }
    /* One byte of input becomes at most four: \xHH. */
    char *out = must_alloc(text.len + 3, 4);
    size_t n = 0, len;
    for (size_t i = 0; i < text.len; n += len) {
        i += escape_one(text.ptr + i, text.len - i, style, out + n, &len);
    }
    out[n] = 0;
    return out;
}

void escape_print(FILE *out, dcp_str text, escape_style style)
{
    char *safe = escape_text(text, style);
    fputs(safe, out);
    free(safe);
}

const char *escape_size(uint64_t bytes, char buf[ESCAPE_SIZE_BYTES])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(buf, ESCAPE_SIZE_BYTES, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    return buf;
}

char *escape_shape(int ndim, const int64_t *extents)
{
    /* An extent takes at most 20 characters and ", ". */
    char *out = must_alloc((size_t)ndim + 1, 22);
    size_t n = 0;
    out[n++] = '[';
    for (int i = 0; i < ndim; i++) {
        n += (size_t)sprintf(out + n, "%s%" PRId64, i ? ", " : "", extents[i]);
    }
    memcpy(out + n, "]", 2);
    return out;
}
