#include "format/metadata_extra.h"

#include "format/metadata_words.h"
#include "format/pickle_emit.h"

typedef struct encoder {
    dcp__buf out;
    size_t max_bytes;
} encoder;

static void op(encoder *e, uint8_t opcode)
{
    dcp__buf_put_byte(&e->out, opcode);
}

static void put_long(encoder *e, dcp_str bytes)
{
    dcp__emit_op(&e->out, bytes.len <= UINT8_MAX ? OP_LONG1 : OP_LONG4, bytes.len, bytes.len <= UINT8_MAX ? 1 : 4);
    dcp__buf_put(&e->out, bytes.ptr, bytes.len);
}

static void put_bytes(encoder *e, dcp_str bytes)
{
    dcp__emit_op(&e->out, bytes.len <= UINT8_MAX ? OP_SHORT_BINBYTES : OP_BINBYTES, bytes.len, bytes.len <= UINT8_MAX ? 1 : 4);
    dcp__buf_put(&e->out, bytes.ptr, bytes.len);
}

static void put_float(encoder *e, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    dcp__emit_op(&e->out, OP_BINFLOAT, __builtin_bswap64(bits), 8);
}

/* What comes before the elements of a container, and after them; 0: nothing. False for values of other kinds. */
static bool brackets(dcp__pkind kind, uint8_t *first, uint8_t *last)
{
    switch (kind) {
    case DCP__P_TUPLE: *first = 0, *last = OP_TUPLE; return true;
    case DCP__P_LIST: *first = OP_EMPTY_LIST, *last = OP_APPENDS; return true;
    case DCP__P_SET: *first = OP_EMPTY_SET, *last = OP_ADDITEMS; return true;
    case DCP__P_FROZENSET: *first = 0, *last = OP_FROZENSET; return true;
    case DCP__P_DICT: *first = OP_EMPTY_DICT, *last = OP_SETITEMS; return true;
    default: return false;
    }
}

static bool put_value(encoder *e, dcp__pv v);

static bool put_container(encoder *e, dcp__pv v)
{
    uint8_t first, last;
    size_t n;
    if (!brackets(dcp__pv_kind(v), &first, &last)) {
        return false;
    }
    const dcp__pv *items = dcp__pv_items(v, &n);
    if (first) {
        op(e, first);
    }
    op(e, OP_MARK);
    for (size_t i = 0; i < n; i++) {
        if (!put_value(e, items[i])) {
            return false;
        }
    }
    op(e, last);
    return true;
}

/* False if the value is no plain data, or too large. Values are nested at most max_depth deep. */
static bool put_value(encoder *e, dcp__pv v)
{
    int64_t i;
    if (e->out.len > e->max_bytes || e->out.failed) {
        return false;
    }
    switch (dcp__pv_kind(v)) {
    case DCP__P_NONE: op(e, OP_NONE); return true;
    case DCP__P_BOOL: op(e, v == DCP__PV_TRUE ? OP_NEWTRUE : OP_NEWFALSE); return true;
    case DCP__P_INT:
        if (dcp__pv_int(v, &i)) {
            dcp__emit_int(&e->out, i);
        } else {
            put_long(e, dcp__pv_text(v));
        }
        return true;
    case DCP__P_FLOAT: put_float(e, dcp__pv_float(v)); return true;
    case DCP__P_STR: dcp__put_text(&e->out, dcp__pv_text(v)); return true;
    case DCP__P_BYTES: put_bytes(e, dcp__pv_text(v)); return true;
    default: return put_container(e, v);
    }
}

static dcp_status keep(dcp__arena *arena, const encoder *e, dcp__pv key, dcp__extra *out, dcp_error *err)
{
    out->name = dcp__pv_text(key);
    out->opcodes = dcp__arena_str(arena, (dcp_str){(const char *)e->out.data, e->out.len});
    return out->opcodes.ptr ? DCP_OK : dcp__arena_fail(arena, err);
}

dcp_status dcp__mextras_take(dcp__arena *arena, const dcp__pv *pairs, size_t n, bool (*is_known)(dcp__pv key), uint64_t max_bytes,
                             dcp__extras *out, dcp_error *err)
{
    dcp_status status = DCP_OK;
    *out = (dcp__extras){NULL, 0};
    for (size_t i = 0; i + 1 < n && status == DCP_OK; i += 2) {
        if (!dcp__pv_is_str(pairs[i]) || is_known(pairs[i])) {
            continue;
        }
        encoder e = {.max_bytes = max_bytes < SIZE_MAX / 4 ? (size_t)max_bytes : SIZE_MAX / 4};
        out->list = out->list ? out->list : dcp__arena_alloc(arena, n / 2 * sizeof *out->list);
        dcp__buf_init(&e.out, arena->ctx);
        if (!out->list) {
            status = dcp__arena_fail(arena, err);
        } else if (put_value(&e, pairs[i + 1]) && !e.out.failed) {
            status = keep(arena, &e, pairs[i], &out->list[out->n++], err);
        } else if (e.out.failed) {
            status = dcp__nomem(err);
        }
        dcp__buf_reset(&e.out);
    }
    return status;
}
