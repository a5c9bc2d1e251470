#include "format/json_read.h"

#include <limits.h>
#include <string.h>

/* What jansson 2.14 takes at most for each of these on a 64-bit machine, with the value behind it and malloc's own share. An
 * empty object alone is 230 bytes, so a hostile header could otherwise cost 77 times its size. */
#define OBJECT_BYTES 256
#define ARRAY_BYTES 160
#define VALUE_BYTES 96

typedef struct scan {
    uint64_t memory_bytes;
    uint32_t depth;
    bool is_string, is_escaped;
} scan;

static void scan_in_string(scan *s, char c)
{
    if (s->is_escaped) {
        s->is_escaped = false;
    } else if (c == '\\') {
        s->is_escaped = true;
    } else if (c == '"') {
        s->is_string = false;
    }
}

static void scan_structure(scan *s, char c)
{
    switch (c) {
    case '"': s->is_string = true; break;
    case ',':
    case ':': s->memory_bytes += VALUE_BYTES; break;
    case '{':
    case '[':
        s->memory_bytes += c == '{' ? OBJECT_BYTES : ARRAY_BYTES;
        s->depth++;
        break;
    case '}':
    case ']': s->depth -= s->depth > 0; break;
    default: break;
    }
}

static uint64_t place(uint64_t start, size_t position)
{
    return start == DCP_NO_OFFSET ? start : start + position;
}

/* jansson has no limits of its own but a depth of 2048, and takes no allocator for one call: so limits are checked in advance. */
static dcp_status check_limits(const dcp_limits *limits, dcp_str text, uint64_t start, const char *what, dcp_error *err)
{
    scan s = {0};
    for (size_t i = 0; i < text.len; i++) {
        if (s.is_string) {
            scan_in_string(&s, text.ptr[i]);
            continue;
        }
        scan_structure(&s, text.ptr[i]);
        if (s.depth > limits->max_depth) {
            return dcp__fail_at(err, DCP_LIMIT, place(start, i), "%s is nested deeper than %u levels", what, limits->max_depth);
        }
    }
    if (s.memory_bytes > limits->max_parse_bytes) {
        return dcp__fail_at(err, DCP_LIMIT, place(start, 0), "%s would take %llu bytes of memory, the limit is %llu", what,
                            (unsigned long long)s.memory_bytes, (unsigned long long)limits->max_parse_bytes);
    }
    return DCP_OK;
}

dcp_status dcp__json_parse(dcp_context *ctx, dcp_str text, uint64_t start, const char *what, json_t **out, dcp_error *err)
{
    if (text.len > INT_MAX) { /* jansson's positions are int */
        return dcp__fail_at(err, DCP_LIMIT, place(start, 0), "%s has %zu bytes, at most %d can be read", what, text.len, INT_MAX);
    }
    dcp_status status = check_limits(&ctx->limits, text, start, what, err);
    if (status != DCP_OK) {
        return status;
    }
    json_error_t fault;
    json_t *root = json_loadb(text.ptr ? text.ptr : "", text.len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &fault);
    if (!root) {
        if (json_error_code(&fault) == json_error_out_of_memory) {
            return dcp__nomem(err);
        }
        return dcp__fail_at(err, DCP_FORMAT, place(start, fault.position > 0 ? (size_t)fault.position : 0), "%s: %s", what,
                            dcp__print(dcp_str_of(fault.text)).text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return dcp__fail_at(err, DCP_FORMAT, place(start, 0), "%s is no JSON object", what);
    }
    *out = root;
    return DCP_OK;
}
