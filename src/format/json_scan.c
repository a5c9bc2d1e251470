#include "format/json_scan.h"

#include <string.h>

#include "base/error.h"
#include "state/value.h"

static dcp_status fault(const dcp__jscan *s, const char *at, const char *why, dcp_error *err)
{
    return dcp__fail_at(err, DCP_FORMAT, s->offset + (uint64_t)(at - s->start), "%s: %s", s->what, why);
}

static void skip_space(dcp__jscan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r')) {
        s->p++;
    }
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

char dcp__jscan_peek(dcp__jscan *s)
{
    skip_space(s);
    char c = s->p < s->end ? *s->p : 0;
    return c == '-' || is_digit(c) ? '0' : c && strchr("{[\"tfn", c) ? c : 0;
}

/* What nests deeper is skipped by recursion, whatever max_depth may be. */
#define MAX_DEPTH 1000

dcp_status dcp__jscan_enter(dcp__jscan *s, dcp_error *err)
{
    uint32_t allowed = s->arena->ctx->limits.max_depth < MAX_DEPTH ? s->arena->ctx->limits.max_depth : MAX_DEPTH;
    skip_space(s);
    if (s->depth >= allowed) {
        return dcp__fail_at(err, DCP_LIMIT, s->offset + (uint64_t)(s->p - s->start), "%s is nested deeper than %u levels",
                            s->what, allowed);
    }
    s->depth++;
    s->p++;
    return DCP_OK;
}

dcp_status dcp__jscan_more(dcp__jscan *s, char close, bool *is_first, bool *more, dcp_error *err)
{
    skip_space(s);
    *more = !(s->p < s->end && *s->p == close);
    if (!*more) {
        s->depth--;
        s->p++;
        return DCP_OK;
    }
    if (!*is_first) {
        if (s->p == s->end || *s->p != ',') {
            return fault(s, s->p, close == '}' ? "\",\" or \"}\" expected" : "\",\" or \"]\" expected", err);
        }
        s->p++;
    }
    *is_first = false;
    return DCP_OK;
}

/* ---- strings ---- */

/* The value of four hexadecimal digits, -1 if they are none. */
static int32_t hex4(const dcp__jscan *s, const char *p)
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        char c = s->end - p > i ? p[i] : 0;
        int digit = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) {
            return -1;
        }
        value = value << 4 | digit;
    }
    return value;
}

static char *put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xC0 | c >> 6);
        *out++ = (char)(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        *out++ = (char)(0xE0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    } else {
        *out++ = (char)(0xF0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 0x3F));
        *out++ = (char)(0x80 | (c >> 6 & 0x3F));
        *out++ = (char)(0x80 | (c & 0x3F));
    }
    return out;
}

/* \uXXXX at *p, behind the u: one code point, of two escapes if it is a pair of surrogates. False if it is none. */
static bool take_code_point(const dcp__jscan *s, const char **p, uint32_t *out)
{
    int32_t first = hex4(s, *p);
    *p += 4;
    *out = (uint32_t)first;
    if (first < 0 || (first >= 0xDC00 && first <= 0xDFFF)) {
        return false;
    }
    if (first < 0xD800 || first > 0xDBFF) {
        return true;
    }
    bool has_second = s->end - *p > 6 && (*p)[0] == '\\' && (*p)[1] == 'u';
    int32_t second = has_second ? hex4(s, *p + 2) : -1;
    *p += 6;
    *out = 0x10000 + ((uint32_t)(first - 0xD800) << 10) + (uint32_t)(second - 0xDC00);
    return second >= 0xDC00 && second <= 0xDFFF;
}

/* Decodes an escape at *p, behind the backslash. NULL: it is none. */
static char *take_escape(const dcp__jscan *s, const char **p, char *out)
{
    static const char escapes[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    char c = *(*p)++;
    const char *found = c ? strchr(escapes, c) : NULL;
    uint32_t code_point;
    if (found) {
        *out++ = values[found - escapes];
        return out;
    }
    return c == 'u' && take_code_point(s, p, &code_point) ? put_utf8(out, code_point) : NULL;
}

/* The text between the quotes, some of it escaped. It does not get longer. */
static dcp_status decode(dcp__jscan *s, const char *from, const char *to, dcp_str *out, dcp_error *err)
{
    char *made = dcp__arena_alloc(s->arena, (size_t)(to - from)), *end = made;
    if (!made) {
        return dcp__arena_fail(s->arena, err);
    }
    for (const char *p = from; p < to;) {
        if (*p != '\\') {
            *end++ = *p++;
            continue;
        }
        const char *escape = p++;
        end = take_escape(s, &p, end);
        if (!end) {
            return fault(s, escape, "invalid escape in a string", err);
        }
    }
    *out = (dcp_str){made, (size_t)(end - made)};
    return DCP_OK;
}

/* UTF-8 without surrogates. */
static bool is_utf8(dcp_str text)
{
    if (!dcp__is_wtf8(text)) {
        return false;
    }
    for (const char *p = text.ptr, *end = p + text.len; (p = memchr(p, 0xED, (size_t)(end - p))) != NULL; p++) {
        if ((uint8_t)p[1] >= 0xA0) {
            return false;
        }
    }
    return true;
}

dcp_status dcp__jscan_string(dcp__jscan *s, dcp_str *out, dcp_error *err)
{
    skip_space(s);
    if (s->p == s->end || *s->p != '"') {
        return fault(s, s->p, "string expected", err);
    }
    const char *from = ++s->p;
    bool has_escapes = false;
    for (; s->p < s->end && *s->p != '"'; s->p++) {
        if ((uint8_t)*s->p < 0x20) {
            return fault(s, s->p, "control character in a string", err);
        }
        if (*s->p == '\\') {
            has_escapes = true;
            s->p += s->end - s->p > 1; /* whatever follows, it does not end the string */
        }
    }
    if (s->p >= s->end) {
        return fault(s, s->end, "the text ends in a string", err);
    }
    *out = (dcp_str){from, (size_t)(s->p++ - from)};
    if (!is_utf8(*out)) {
        return fault(s, from, "a string is not UTF-8", err);
    }
    return has_escapes ? decode(s, from, s->p - 1, out, err) : DCP_OK;
}

dcp_status dcp__jscan_name(dcp__jscan *s, dcp_str *out, dcp_error *err)
{
    skip_space(s);
    const char *at = s->p;
    dcp_status status = dcp__jscan_string(s, out, err);
    if (status != DCP_OK) {
        return status;
    }
    if (memchr(out->ptr, 0, out->len)) {
        return fault(s, at, "a name with a NUL in it", err);
    }
    skip_space(s);
    if (s->p == s->end || *s->p != ':') {
        return fault(s, s->p, "\":\" expected", err);
    }
    s->p++;
    return DCP_OK;
}

/* ---- numbers ---- */

static const char *skip_digits(const dcp__jscan *s, const char *p)
{
    while (p < s->end && is_digit(*p)) {
        p++;
    }
    return p;
}

/* Behind the integer part: a fraction, an exponent. NULL if one of them lacks its digits. */
static const char *skip_fraction(const dcp__jscan *s, const char *p)
{
    if (p < s->end && *p == '.') {
        const char *digits = p + 1;
        p = skip_digits(s, digits);
        if (p == digits) {
            return NULL;
        }
    }
    if (p < s->end && (*p == 'e' || *p == 'E')) {
        p++;
        p += p < s->end && (*p == '+' || *p == '-');
        const char *digits = p;
        p = skip_digits(s, digits);
        if (p == digits) {
            return NULL;
        }
    }
    return p;
}

static bool to_int64(const char *p, const char *end, bool is_negative, int64_t *out)
{
    int64_t value = 0;
    for (; p < end; p++) {
        int digit = *p - '0';
        if (__builtin_mul_overflow(value, 10, &value) ||
            (is_negative ? __builtin_sub_overflow(value, digit, &value) : __builtin_add_overflow(value, digit, &value))) {
            return false;
        }
    }
    *out = value;
    return true;
}

dcp_status dcp__jscan_number(dcp__jscan *s, int64_t *out, bool *is_int, dcp_error *err)
{
    skip_space(s);
    const char *at = s->p, *digits = at + (at < s->end && *at == '-');
    const char *whole = skip_digits(s, digits);
    bool is_good = whole > digits && (*digits != '0' || whole == digits + 1);
    const char *end = is_good ? skip_fraction(s, whole) : NULL;
    if (!end) {
        return fault(s, at, "invalid number", err);
    }
    s->p = end;
    *is_int = end == whole && to_int64(digits, whole, digits > at, out);
    return DCP_OK;
}

/* ---- any value ---- */

static dcp_status skip_word(dcp__jscan *s, const char *word, dcp_error *err)
{
    size_t len = strlen(word);
    if ((size_t)(s->end - s->p) < len || memcmp(s->p, word, len) != 0) {
        return fault(s, s->p, "invalid value", err);
    }
    s->p += len;
    return DCP_OK;
}

static dcp_status skip_container(dcp__jscan *s, char open, dcp_error *err)
{
    bool is_first = true, more = true;
    dcp_str unused;
    dcp_status status = dcp__jscan_enter(s, err);
    while (status == DCP_OK) {
        status = dcp__jscan_more(s, open == '{' ? '}' : ']', &is_first, &more, err);
        if (status != DCP_OK || !more) {
            break;
        }
        status = open == '{' ? dcp__jscan_name(s, &unused, err) : DCP_OK;
        status = status == DCP_OK ? dcp__jscan_skip(s, err) : status;
    }
    return status;
}

dcp_status dcp__jscan_skip(dcp__jscan *s, dcp_error *err)
{
    int64_t number;
    bool is_int;
    dcp_str text;
    char first = dcp__jscan_peek(s);
    switch (first) {
    case '{':
    case '[': return skip_container(s, first, err);
    case '"': return dcp__jscan_string(s, &text, err);
    case '0': return dcp__jscan_number(s, &number, &is_int, err);
    case 't': return skip_word(s, "true", err);
    case 'f': return skip_word(s, "false", err);
    case 'n': return skip_word(s, "null", err);
    default: return fault(s, s->p, "value expected", err);
    }
}

dcp_status dcp__jscan_end(dcp__jscan *s, dcp_error *err)
{
    skip_space(s);
    return s->p == s->end ? DCP_OK : fault(s, s->p, "the text goes on behind its end", err);
}
