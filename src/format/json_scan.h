/* JSON read front to back, without a tree: for large texts of a known grammar, where a tree would cost most of the time and many
 * times the memory. The caller asks for what it expects; what it does not know it skips. */
#ifndef DCP_FORMAT_JSON_SCAN_H
#define DCP_FORMAT_JSON_SCAN_H

#include "base/arena.h"

typedef struct dcp__jscan {
    dcp__arena *arena; /* for strings with escapes */
    const char *start, *p, *end;
    uint64_t offset;  /* of start in the file, for errors */
    const char *what; /* names the text in messages */
    uint32_t depth;   /* objects and arrays that have been entered */
} dcp__jscan;

/* All of these: FORMAT where the text is not JSON, with the place; LIMIT and NOMEM of the arena. */

/* What the next value begins with: one of {["tfn, '0' for a number, 0 for anything else. */
char dcp__jscan_peek(dcp__jscan *s);
/* Enters a value that begins with { or [, as peek has told. LIMIT: nested deeper than max_depth of the arena's context, or 1000.
 */
dcp_status dcp__jscan_enter(dcp__jscan *s, dcp_error *err);
/* Whether there is another member or element before `close`, which is passed if there is none. *is_first is true at first. */
dcp_status dcp__jscan_more(dcp__jscan *s, char close, bool *is_first, bool *more, dcp_error *err);
/* The name of a member, and the colon behind it. FORMAT also for a name with a NUL in it. */
dcp_status dcp__jscan_name(dcp__jscan *s, dcp_str *out, dcp_error *err);
/* A string: part of the text, or in the arena. Not NUL-terminated. */
dcp_status dcp__jscan_string(dcp__jscan *s, dcp_str *out, dcp_error *err);
/* A number. *is_int is false if it is no integer that fits int64. */
dcp_status dcp__jscan_number(dcp__jscan *s, int64_t *out, bool *is_int, dcp_error *err);
/* Any value. */
dcp_status dcp__jscan_skip(dcp__jscan *s, dcp_error *err);
/* FORMAT unless only white space is left. */
dcp_status dcp__jscan_end(dcp__jscan *s, dcp_error *err);

#endif
