/* Texts and long integers of pickles. */
#include "format/pickle_machine.h"

#include "state/value.h"

/* A node with room for the text; *out is set at the end. */
static dcp_status alloc_text(dcp__pmachine *m, uint64_t bytes, dcp__pkind kind, dcp__ptext **out, dcp_error *err)
{
    if (bytes > m->ctx->limits.max_string_bytes || bytes >= UINT32_MAX) {
        return dcp__fail_at(err, DCP_LIMIT, m->position, "pickle: a value of %llu bytes, %llu are allowed",
                            (unsigned long long)bytes, (unsigned long long)m->ctx->limits.max_string_bytes);
    }
    *out = dcp__pnode_alloc(m, sizeof **out + (size_t)bytes + 1, kind, (size_t)bytes);
    return *out ? DCP_OK : dcp__arena_fail(m->arena, err);
}

/* Ends a text node whose bytes are in place. */
static dcp_status finish_text(dcp__pmachine *m, dcp__ptext *t, dcp__pv *out, dcp_error *err)
{
    t->text[t->node.count] = 0;
    if (t->node.kind == DCP__P_STR) {
        if (!dcp__is_wtf8((dcp_str){t->text, t->node.count})) {
            return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: a string of %u bytes is not UTF-8", t->node.count);
        }
    }
    *out = dcp__pv_of_node(t);
    return DCP_OK;
}

dcp_status dcp__ptext_make(dcp__pmachine *m, const void *bytes, size_t n, dcp__pkind kind, dcp__pv *out, dcp_error *err)
{
    dcp__ptext *t;
    dcp_status status = alloc_text(m, n, kind, &t, err);
    if (status != DCP_OK) {
        return status;
    }
    if (n) {
        memcpy(t->text, bytes, n);
    }
    return finish_text(m, t, out, err);
}

/* The payload goes on behind the window: it is read straight into the node. */
static dcp_status read_long_text(dcp__pmachine *m, const uint8_t **p, uint64_t bytes, dcp__pkind kind, dcp__pv *out,
                                 dcp_error *err)
{
    uint64_t position = dcp__pwindow_position(&m->window, *p);
    dcp__ptext *t;
    dcp_status status = dcp__pwindow_claim(&m->window, *p, bytes, "a value", err);
    if (status != DCP_OK) {
        return status;
    }
    status = alloc_text(m, bytes, kind, &t, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__source_read(m->window.src, position, t->text, (size_t)bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    status = finish_text(m, t, out, err);
    return status == DCP_OK ? dcp__pwindow_seek(&m->window, position + bytes, p, err) : status;
}

dcp_status dcp__ptext_read(dcp__pmachine *m, const uint8_t **p, uint64_t bytes, dcp__pkind kind, dcp__pv *out, dcp_error *err)
{
    if (bytes > (uint64_t)(m->window.end - *p)) {
        return read_long_text(m, p, bytes, kind, out, err);
    }
    dcp_status status = dcp__ptext_make(m, *p, (size_t)bytes, kind, out, err);
    *p += bytes;
    return status;
}

dcp_status dcp__plong_make(dcp__pmachine *m, const uint8_t *bytes, size_t n, dcp__pv *out, dcp_error *err)
{
    while (n > 0 && bytes[n - 1] == (n > 1 && (bytes[n - 2] & 0x80) ? 0xff : 0)) {
        n--; /* a byte that only repeats the sign */
    }
    if (n <= 8) {
        int64_t value = n && (bytes[n - 1] & 0x80) ? -1 : 0;
        memcpy(&value, bytes, n);
        if (value >= -((int64_t)1 << 60) && value < (int64_t)1 << 60) {
            *out = dcp__pv_of_int(value);
            return DCP_OK;
        }
    }
    return dcp__ptext_make(m, bytes, n, DCP__P_INT, out, err);
}
