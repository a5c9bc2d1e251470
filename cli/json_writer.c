#include "json_writer.h"

#include "escape.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_inline(const json_writer *w)
{
    return w->inline_depth && w->depth >= w->inline_depth;
}

static void new_line(json_writer *w)
{
    fprintf(w->out, "\n%*s", w->depth, "");
}

/* What goes in front of a key or an element. */
static void separate(json_writer *w)
{
    if (w->after_key) {
        w->after_key = false;
        return;
    }
    if (!w->is_empty) {
        fputs(is_inline(w) ? ", " : ",", w->out);
    }
    if (w->depth && !is_inline(w)) {
        new_line(w);
    }
    w->is_empty = false;
}

void jw_begin(json_writer *w, char bracket)
{
    separate(w);
    fputc(bracket, w->out);
    w->depth++;
    w->is_empty = true;
}

void jw_begin_inline(json_writer *w, char bracket)
{
    jw_begin(w, bracket);
    if (!w->inline_depth) {
        w->inline_depth = w->depth;
    }
}

void jw_end(json_writer *w, char bracket)
{
    bool was_inline = is_inline(w);
    if (w->inline_depth == w->depth) {
        w->inline_depth = 0;
    }
    w->depth--;
    if (!w->is_empty && !was_inline) {
        new_line(w);
    }
    fputc(bracket, w->out);
    w->is_empty = false;
    if (w->depth == 0) {
        fputc('\n', w->out);
    }
}

static void put_char(FILE *out, uint32_t c, const char *bytes, size_t n)
{
    if (c == '"' || c == '\\') {
        fprintf(out, "\\%c", (int)c);
    } else if (c < 0x20 || (c >= 0x7f && c <= 0x9f) || (c >= 0xd800 && c <= 0xdfff)) {
        fprintf(out, "\\u%04" PRIx32, c);
    } else {
        fwrite(bytes, 1, n, out);
    }
}

static void put_string(json_writer *w, dcp_str text)
{
    fputc('"', w->out);
    for (size_t i = 0; i < text.len;) {
        uint32_t c = 0;
        size_t n = escape_decode(text.ptr + i, text.len - i, &c);
        if (n == 0) {
            c = 0xdc00u + (unsigned char)text.ptr[i];
            n = 1;
        }
        put_char(w->out, c, text.ptr + i, n);
        i += n;
    }
    fputc('"', w->out);
}

void jw_key(json_writer *w, dcp_str key)
{
    separate(w);
    put_string(w, key);
    fputs(": ", w->out);
    w->after_key = true;
}

void jw_string(json_writer *w, dcp_str text)
{
    separate(w);
    put_string(w, text);
}

void jw_int(json_writer *w, int64_t i)
{
    separate(w);
    fprintf(w->out, "%" PRId64, i);
}

void jw_uint(json_writer *w, uint64_t u)
{
    separate(w);
    fprintf(w->out, "%" PRIu64, u);
}

void jw_bool(json_writer *w, bool b)
{
    separate(w);
    fputs(b ? "true" : "false", w->out);
}

void jw_null(json_writer *w)
{
    separate(w);
    fputs("null", w->out);
}

static bool reads_back(double value, bool is_single, const char *text)
{
    return is_single ? strtof(text, NULL) == (float)value : strtod(text, NULL) == value;
}

/* Up to DBL_DIG (FLT_DIG) digits every number stays itself, so the search starts there; only subnormals may be shorter. */
static void format_finite(double value, bool is_single, char *buf, size_t size)
{
    double smallest = is_single ? (double)FLT_MIN : DBL_MIN;
    int digits = is_single ? FLT_DIG : DBL_DIG;
    if (fabs(value) < smallest) {
        digits = 1;
    }
    do {
        snprintf(buf, size, "%.*g", digits, value);
    } while (!reads_back(value, is_single, buf) && digits++ < 17);
    if (!strpbrk(buf, ".e")) {
        strcat(buf, ".0");
    }
}

const char *jw_format_real(double value, bool is_single, char buf[JW_REAL_BYTES])
{
    if (isnan(value)) {
        return strcpy(buf, "\"NaN\"");
    }
    if (isinf(value)) {
        return strcpy(buf, value < 0 ? "\"-Infinity\"" : "\"Infinity\"");
    }
    format_finite(value, is_single, buf, JW_REAL_BYTES);
    return buf;
}

void jw_real(json_writer *w, double value, bool is_single)
{
    char buf[JW_REAL_BYTES];
    separate(w);
    fputs(jw_format_real(value, is_single, buf), w->out);
}

void jw_key_string(json_writer *w, const char *key, const char *text)
{
    jw_key(w, dcp_str_of(key));
    jw_string(w, dcp_str_of(text));
}

void jw_key_uint(json_writer *w, const char *key, uint64_t u)
{
    jw_key(w, dcp_str_of(key));
    jw_uint(w, u);
}

void jw_key_bool(json_writer *w, const char *key, bool b)
{
    jw_key(w, dcp_str_of(key));
    jw_bool(w, b);
}

void jw_key_begin(json_writer *w, const char *key, char bracket)
{
    jw_key(w, dcp_str_of(key));
    jw_begin(w, bracket);
}

void jw_key_shape(json_writer *w, const char *key, int ndim, const int64_t *extents)
{
    jw_key(w, dcp_str_of(key));
    jw_begin_inline(w, '[');
    for (int i = 0; i < ndim; i++) {
        jw_int(w, extents[i]);
    }
    jw_end(w, ']');
}
