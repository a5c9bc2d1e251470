/* JSON texts from files, through jansson, within the limits of the context. */
#ifndef DCP_FORMAT_JSON_READ_H
#define DCP_FORMAT_JSON_READ_H

#include <jansson.h>

#include "base/context.h"

/* Parses a text that must be one JSON object; *out is freed with json_decref. `what` names it in messages. Names must be unique,
 * integers fit int64, nesting stay within max_depth, and the estimate of jansson's memory within max_parse_bytes. Errors carry
 * `start` plus the position in the text as offset; DCP_NO_OFFSET for start: the text has no place of its own in a file.
 * Errors: FORMAT, LIMIT, NOMEM. */
dcp_status dcp__json_parse(dcp_context *ctx, dcp_str text, uint64_t start, const char *what, json_t **out, dcp_error *err);

#endif
