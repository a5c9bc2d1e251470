/* Opcodes that are rare in real streams, or foreign to them. */
#include "base/bytes.h"
#include "format/pickle_ops.h"
#include "format/pickle_steps.h"

/* ---- memo and stack ---- */

/* Entries from n_memo to i are not set, up to now. */
static void mark_gap(dcp__pmachine *m, size_t i)
{
    m->has_gaps |= i > m->n_memo;
    for (size_t k = m->n_memo; k <= i; k++) {
        *dcp__pmachine_memo(m, k) = 0;
    }
    m->n_memo = i + 1;
    m->memo_next = m->memo_end = NULL;
}

/* An entry is put at a number of the stream's choice. Real streams count up, so that two bytes at least belong to each entry; a
 * number that is too large for the position is hostile. */
static dcp_status op_put(dcp__pmachine *m, size_t i, dcp_error *err)
{
    if (!dcp__phas(m, 1)) {
        return dcp__punderflow(m, err);
    }
    if (i > m->position / 2 || i >= UINT32_MAX - DCP__P_PIECE) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: memo entry %zu is more than the stream can hold", i);
    }
    if (i >= m->n_memo) {
        dcp_status status = dcp__pmemo_grow(m, i, err);
        if (status != DCP_OK) {
            return status;
        }
        mark_gap(m, i);
    }
    dcp__pshare(*dcp__pmachine_memo(m, i)); /* what it was still has this number */
    dcp__pmemo_keep(m, dcp__pmachine_memo(m, i), i);
    return DCP_OK;
}

static dcp_status op_dup(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 1)) {
        return dcp__punderflow(m, err);
    }
    dcp__pshare(m->stack[m->top - 1]);
    return dcp__ppush(m, m->stack[m->top - 1], err);
}

static dcp_status op_pop(dcp__pmachine *m, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    if (dcp__phas(m, 1)) {
        m->top--;
        return DCP_OK;
    }
    return dcp__ppop_mark(m, &mark, err); /* with nothing above it, POP takes the mark itself */
}

static dcp_status op_pop_mark(dcp__pmachine *m, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    dcp_status status = dcp__ppop_mark(m, &mark, err);
    if (status == DCP_OK) {
        m->top = mark.top;
    }
    return status;
}

/* ---- containers, globals and objects ---- */

static dcp_status op_frozenset(dcp__pmachine *m, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    dcp_status status = dcp__ppop_mark(m, &mark, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__plist *set = dcp__plist_alloc(m, DCP__P_FROZENSET);
    if (!set) {
        return dcp__arena_fail(m->arena, err);
    }
    const dcp__pv *items = m->top > mark.top ? m->stack + mark.top : NULL; /* there may be no stack yet */
    status = dcp__plist_append(m, set, items, m->top - mark.top, err);
    m->top = mark.top;
    if (status == DCP_OK) {
        status = dcp__ppush_node(m, set, err);
    }
    if (status == DCP_OK) {
        m->starts[m->top - 1] = mark.start;
    }
    return status;
}

static dcp_status push_global(dcp__pmachine *m, dcp_str module, dcp_str name, dcp_error *err)
{
    dcp__pglobal *g = dcp__pnode_alloc(m, sizeof *g, DCP__P_GLOBAL, 0);
    if (g) {
        g->module = module;
        g->name = name;
    }
    return dcp__ppush_node(m, g, err);
}

static dcp_status op_global(dcp__pmachine *m, const uint8_t **p, dcp_error *err)
{
    size_t first, second;
    dcp__pv module, name;
    dcp_status status = dcp__pwindow_lines(&m->window, p, &first, &second, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__ptext_make(m, *p, first, DCP__P_STR, &module, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__ptext_make(m, *p + first + 1, second, DCP__P_STR, &name, err);
    if (status != DCP_OK) {
        return status;
    }
    *p += first + second + 2;
    return push_global(m, dcp__pv_text(module), dcp__pv_text(name), err);
}

static dcp_status op_stack_global(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 2)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv module = m->stack[m->top - 2], name = m->stack[m->top - 1];
    if (!dcp__pv_is_str(module) || !dcp__pv_is_str(name)) {
        return dcp__pmisfit(m, "the name of a global", dcp__pv_is_str(module) ? name : module, err);
    }
    uint64_t start = m->starts[m->top - 2];
    m->top -= 2;
    dcp_status status = push_global(m, dcp__pv_text(module), dcp__pv_text(name), err);
    if (status == DCP_OK) {
        m->starts[m->top - 1] = start;
    }
    return status;
}

static dcp_status op_newobj_ex(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 3)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv callable = m->stack[m->top - 3], args = m->stack[m->top - 2], kwargs = m->stack[m->top - 1];
    if (dcp__pv_kind(args) != DCP__P_TUPLE || dcp__pv_kind(kwargs) != DCP__P_DICT) {
        return dcp__pmisfit(m, "the arguments of a class", dcp__pv_kind(args) != DCP__P_TUPLE ? args : kwargs, err);
    }
    dcp__pobject *o = NULL;
    dcp_status status = dcp__pobject_make(m, 3, DCP__PFORM_NEWOBJ_EX, &o, err);
    if (status == DCP_OK) {
        o->callable = callable;
        o->args = args;
        o->kwargs = kwargs;
    }
    return status;
}

static dcp_status op_persid(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 1)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv id = m->stack[m->top - 1];
    dcp__pobject *o = NULL;
    dcp_status status = dcp__pobject_make(m, 1, DCP__PFORM_PERSID, &o, err);
    if (status == DCP_OK) {
        o->args = id;
    }
    return status;
}

/* ---- scalars ---- */

static dcp_status op_float(dcp__pmachine *m, const uint8_t *bytes, dcp_error *err)
{
    dcp__pfloat *f = dcp__pnode_alloc(m, sizeof *f, DCP__P_FLOAT, 0);
    uint64_t bits = __builtin_bswap64(dcp__load64(bytes));
    if (f) {
        memcpy(&f->value, &bits, sizeof f->value);
    }
    return dcp__ppush_node(m, f, err);
}

/* The bytes go through a text node, since a long one may reach beyond the window. */
static dcp_status op_long(dcp__pmachine *m, const uint8_t **p, size_t opcode_bytes, uint64_t bytes, dcp_error *err)
{
    dcp__pv raw, v;
    *p += opcode_bytes;
    dcp_status status = dcp__ptext_read(m, p, bytes, DCP__P_BYTES, &raw, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__plong_make(m, (const uint8_t *)dcp__pv_text(raw).ptr, (size_t)bytes, &v, err);
    dcp__pmachine_recycle(m, raw);
    return status == DCP_OK ? dcp__ppush(m, v, err) : status;
}

static dcp_status op_proto(dcp__pmachine *m, uint8_t protocol, dcp_error *err)
{
    if (protocol < 2 || protocol > 5) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: protocol %u, known are 2 to 5", protocol);
    }
    m->protocol = protocol;
    return DCP_OK;
}

/* ---- the choice ---- */

dcp_status dcp__pmachine_rare(dcp__pmachine *m, const uint8_t **at, dcp_error *err)
{
    const uint8_t *p = *at;
    switch (*p) {
    case OP_GLOBAL: ++*at; return op_global(m, at, err);
    case OP_LONG1: return op_long(m, at, 2, p[1], err);
    case OP_LONG4: return op_long(m, at, 5, dcp__load32(p + 1), err);
    case OP_SHORT_BINSTRING: return dcp__ppush_text(m, at, 2, p[1], DCP__P_STR, err);
    case OP_BINSTRING:
    case OP_BINUNICODE: return dcp__ppush_text(m, at, 5, dcp__load32(p + 1), DCP__P_STR, err);
    case OP_BINUNICODE8: return dcp__ppush_text(m, at, 9, dcp__load64(p + 1), DCP__P_STR, err);
    case OP_SHORT_BINBYTES: return dcp__ppush_text(m, at, 2, p[1], DCP__P_BYTES, err);
    case OP_BINBYTES: return dcp__ppush_text(m, at, 5, dcp__load32(p + 1), DCP__P_BYTES, err);
    case OP_BINBYTES8: return dcp__ppush_text(m, at, 9, dcp__load64(p + 1), DCP__P_BYTES, err);
    case OP_BYTEARRAY8: return dcp__ppush_text(m, at, 9, dcp__load64(p + 1), DCP__P_BYTEARRAY, err);
    case OP_BINFLOAT: *at += 9; return op_float(m, p + 1, err);
    case OP_PROTO: *at += 2; return op_proto(m, p[1], err);
    case OP_BINPUT: *at += 2; return op_put(m, p[1], err);
    case OP_LONG_BINPUT: *at += 5; return op_put(m, dcp__load32(p + 1), err);
    default: break;
    }
    ++*at;
    switch (*p) {
    case OP_POP: return op_pop(m, err);
    case OP_POP_MARK: return op_pop_mark(m, err);
    case OP_DUP: return op_dup(m, err);
    case OP_EMPTY_SET: return dcp__ppush_node(m, dcp__plist_alloc(m, DCP__P_SET), err);
    case OP_FROZENSET: return op_frozenset(m, err);
    case OP_STACK_GLOBAL: return op_stack_global(m, err);
    case OP_NEWOBJ_EX: return op_newobj_ex(m, err);
    case OP_BINPERSID: return op_persid(m, err);
    default: return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: opcode 0x%02x is not accepted", *p);
    }
}
