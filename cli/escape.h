/*
 * escape.h - text from checkpoints on a terminal.
 *
 * Names in a checkpoint are hostile until shown otherwise: control characters could drive the terminal, line breaks could
 * forge lines, bidirectional marks could reorder them. They are printed as escapes.
 */
#ifndef DCP_CLI_ESCAPE_H
#define DCP_CLI_ESCAPE_H

#include <dcp/base.h>
#include <stdio.h>

typedef enum escape_style {
    ESCAPE_NAME, /* unambiguous: backslashes are doubled, the empty name is "" */
    ESCAPE_TEXT  /* backslashes stand for themselves: messages, Python literals */
} escape_style;

/* One code point of UTF-8 or WTF-8 (surrogates decode). Returns its bytes; 0 if the bytes are none, or at the end. */
size_t escape_decode(const char *p, size_t len, uint32_t *out);

/* The text with \n, \t, \xHH and \uHHHH in place of what must not reach a terminal; freed with free. Never NULL. */
char *escape_text(dcp_str text, escape_style style);
void escape_print(FILE *out, dcp_str text, escape_style style);

#define ESCAPE_SIZE_BYTES 32

/* "1.5 GiB"; returns buf. */
const char *escape_size(uint64_t bytes, char buf[ESCAPE_SIZE_BYTES]);
/* "[3, 5]"; freed with free. */
char *escape_shape(int ndim, const int64_t *extents);

/* What a noun of which there are n ends in: "s" unless n is 1. */
static inline const char *plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

#endif
