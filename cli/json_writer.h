/*
 * json_writer.h - JSON to a stream, as it is made.
 *
 * Strings may be WTF-8: a lone surrogate becomes \udXXX, a byte that is no UTF-8 at all \udcXX, as Python's surrogateescape
 * has it, so that json.loads and os.fsencode give back the bytes. NaN and infinities, which JSON does not have, become the
 * strings "NaN", "Infinity" and "-Infinity".
 */
#ifndef DCP_CLI_JSON_WRITER_H
#define DCP_CLI_JSON_WRITER_H

#include <dcp/base.h>
#include <stdio.h>

typedef struct json_writer {
    FILE *out;
    int depth;
    int inline_depth; /* from this depth on everything stands in one line; 0: nowhere */
    bool is_empty;    /* the open container has no element so far */
    bool after_key;
} json_writer;

#define JSON_WRITER(out)                                                                                                         \
    {                                                                                                                            \
        (out), 0, 0, true, false                                                                                                 \
    }

void jw_begin(json_writer *w, char bracket);        /* '{' or '[' */
void jw_begin_inline(json_writer *w, char bracket); /* the same, in one line */
void jw_end(json_writer *w, char bracket);          /* '}' or ']'; after the outermost one comes a newline */
void jw_key(json_writer *w, dcp_str key);
void jw_string(json_writer *w, dcp_str text);
void jw_int(json_writer *w, int64_t i);
void jw_uint(json_writer *w, uint64_t u);
void jw_bool(json_writer *w, bool b);
void jw_null(json_writer *w);
/* Shortest digits that read back as the same double, or as the same float if is_single. */
void jw_real(json_writer *w, double value, bool is_single);

/* A key and its value. */
void jw_key_string(json_writer *w, const char *key, const char *text);
void jw_key_uint(json_writer *w, const char *key, uint64_t u);
void jw_key_bool(json_writer *w, const char *key, bool b);
void jw_key_begin(json_writer *w, const char *key, char bracket);
void jw_key_shape(json_writer *w, const char *key, int ndim, const int64_t *extents);

#define JW_REAL_BYTES 40

/* The number as JSON has it, "0.1" or "\"NaN\""; returns buf. */
const char *jw_format_real(double value, bool is_single, char buf[JW_REAL_BYTES]);

#endif
