#include "format/pickle_window.h"

#include "format/pickle_ops.h"

#define WINDOW_BYTES ((size_t)256 << 10)
#define LONGEST_GLOBAL_BYTES ((size_t)8 << 10) /* both lines; real ones have some tens */

dcp_status dcp__pwindow_open(dcp__pwindow *w, dcp_context *ctx, const dcp__source *src, dcp_error *err)
{
    *w = (dcp__pwindow){.ctx = ctx, .src = src};
    if (src->base) {
        w->start = src->base;
        w->end = w->start + src->size;
        return DCP_OK;
    }
    w->buffer = dcp__alloc(ctx, WINDOW_BYTES);
    if (!w->buffer) {
        return dcp__nomem(err);
    }
    w->start = w->end = w->buffer;
    return DCP_OK;
}

void dcp__pwindow_close(dcp__pwindow *w)
{
    dcp__free(w->ctx, w->buffer);
    w->buffer = NULL;
}

dcp_status dcp__pwindow_seek(dcp__pwindow *w, uint64_t position, const uint8_t **p, dcp_error *err)
{
    if (!w->buffer) {
        *p = w->start + position;
        return DCP_OK;
    }
    uint64_t left = w->src->size - position;
    size_t n = left < WINDOW_BYTES ? (size_t)left : WINDOW_BYTES;
    dcp_status status = dcp__source_read(w->src, position, w->buffer, n, err);
    if (status == DCP_OK) {
        w->start_position = position;
        w->end = w->buffer + n;
        *p = w->start;
    }
    return status;
}

/* Tries to have `want` bytes in the window at *p; fewer only at the end of the source. */
static dcp_status want(dcp__pwindow *w, const uint8_t **p, size_t bytes, dcp_error *err)
{
    bool has_more = dcp__pwindow_position(w, w->end) < w->src->size;
    if ((size_t)(w->end - *p) >= bytes || !has_more) {
        return DCP_OK;
    }
    return dcp__pwindow_seek(w, dcp__pwindow_position(w, *p), p, err);
}

/* Bytes of an opcode and its fixed arguments, length prefixes included. */
static size_t opcode_bytes(uint8_t op)
{
    switch (op) {
    case OP_PROTO:
    case OP_BININT1:
    case OP_BINGET:
    case OP_BINPUT:
    case OP_LONG1:
    case OP_SHORT_BINSTRING:
    case OP_SHORT_BINBYTES:
    case OP_SHORT_BINUNICODE: return 2;
    case OP_BININT2: return 3;
    case OP_BININT:
    case OP_LONG_BINGET:
    case OP_LONG_BINPUT:
    case OP_LONG4:
    case OP_BINSTRING:
    case OP_BINBYTES:
    case OP_BINUNICODE: return 5;
    case OP_FRAME:
    case OP_BINFLOAT:
    case OP_BINBYTES8:
    case OP_BYTEARRAY8:
    case OP_BINUNICODE8: return 9;
    default: return 1;
    }
}

dcp_status dcp__pwindow_opcode(dcp__pwindow *w, const uint8_t **p, dcp_error *err)
{
    dcp_status status = want(w, p, OP_MAX_BYTES, err);
    if (status != DCP_OK) {
        return status;
    }
    size_t have = (size_t)(w->end - *p);
    if (have == 0 || have < opcode_bytes(**p)) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pwindow_position(w, *p), "pickle ends before its end mark");
    }
    return DCP_OK;
}

dcp_status dcp__pwindow_lines(dcp__pwindow *w, const uint8_t **p, size_t *first, size_t *second, dcp_error *err)
{
    dcp_status status = want(w, p, LONGEST_GLOBAL_BYTES, err);
    if (status != DCP_OK) {
        return status;
    }
    size_t have = (size_t)(w->end - *p);
    have = have < LONGEST_GLOBAL_BYTES ? have : LONGEST_GLOBAL_BYTES;
    const uint8_t *a = have ? memchr(*p, '\n', have) : NULL;
    const uint8_t *b = a ? memchr(a + 1, '\n', have - (size_t)(a + 1 - *p)) : NULL;
    if (!b) {
        return dcp__fail_at(err, DCP_FORMAT, dcp__pwindow_position(w, *p), "pickle: no end to the name of a global");
    }
    *first = (size_t)(a - *p);
    *second = (size_t)(b - a - 1);
    return DCP_OK;
}

dcp_status dcp__pwindow_claim(const dcp__pwindow *w, const uint8_t *p, uint64_t bytes, const char *what, dcp_error *err)
{
    uint64_t position = dcp__pwindow_position(w, p);
    if (!dcp__range_fits(position, bytes, w->src->size)) {
        return dcp__fail_at(err, DCP_FORMAT, position, "pickle: %s of %llu bytes exceeds the end at %llu", what,
                            (unsigned long long)bytes, (unsigned long long)w->src->size);
    }
    return DCP_OK;
}
