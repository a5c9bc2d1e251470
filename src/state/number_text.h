/* Numbers as Python writes them. */
#ifndef DCP_STATE_NUMBER_TEXT_H
#define DCP_STATE_NUMBER_TEXT_H

#include "base/buf.h"

#define DCP__FLOAT_TEXT_BYTES 32

typedef enum dcp__float_style {
    DCP__FLOAT_PLAIN = 0,
    DCP__FLOAT_POINT = 1, /* "1.0", not "1" */
    DCP__FLOAT_SIGN = 2   /* "+1" */
} dcp__float_style;

/* The shortest text that reads back as d, Python's format 'r'; style is an OR of dcp__float_style. Returns its length. */
size_t dcp__float_text(double d, int style, char out[DCP__FLOAT_TEXT_BYTES]);

/* Steps that dcp__bigint_text takes for an integer of len bytes: the square of its length. */
uint64_t dcp__bigint_steps(size_t len);
/* Appends an integer of len >= 1 two's complement, little-endian bytes in decimal. False when out of memory. */
bool dcp__bigint_text(dcp__buf *out, const uint8_t *bytes, size_t len);

#endif
