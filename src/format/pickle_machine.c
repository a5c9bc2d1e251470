/* Opcodes to nodes: those that real streams are made of. pickle_rare.c has the others. */
#include "base/bytes.h"
#include "format/pickle_ops.h"
#include "format/pickle_steps.h"

dcp_status dcp__pstack_grow(dcp__pmachine *m, dcp_error *err)
{
    size_t cap = m->cap ? m->cap * 2 : 256;
    if (cap * (sizeof *m->stack + sizeof *m->starts) > m->ctx->limits.max_parse_bytes) {
        return dcp__fail_at(err, DCP_LIMIT, m->position, "pickle: more than %zu values on the stack", m->top);
    }
    dcp__pv *stack = dcp__realloc(m->ctx, m->stack, cap * sizeof *stack);
    m->stack = stack ? stack : m->stack;
    uint64_t *starts = stack ? dcp__realloc(m->ctx, m->starts, cap * sizeof *starts) : NULL;
    m->starts = starts ? starts : m->starts;
    m->cap = starts ? cap : m->cap;
    return starts ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp__punderflow(const dcp__pmachine *m, dcp_error *err)
{
    return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: an opcode finds too few values on the stack");
}

dcp_status dcp__pmisfit(const dcp__pmachine *m, const char *what, dcp__pv v, dcp_error *err)
{
    return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: %s finds %s", what, dcp__pv_kind_name(v));
}

/* ---- marks ---- */

static dcp_status op_mark(dcp__pmachine *m, dcp_error *err)
{
    if (m->n_marks == m->marks_cap) {
        void *marks = m->marks;
        if (m->marks_cap * sizeof *m->marks > m->ctx->limits.max_parse_bytes) {
            return dcp__fail_at(err, DCP_LIMIT, m->position, "pickle: more than %zu marks", m->n_marks);
        }
        if (!dcp__grow(m->ctx, &marks, &m->marks_cap, m->n_marks + 1, sizeof *m->marks)) {
            return dcp__nomem(err);
        }
        m->marks = marks;
    }
    m->marks[m->n_marks++] = (dcp__pmark){m->top, m->position};
    m->floor = m->top;
    return DCP_OK;
}

/* ---- memo ---- */

dcp_status dcp__pmemo_grow(dcp__pmachine *m, size_t i, dcp_error *err)
{
    while (i / DCP__P_PIECE >= m->n_pieces) {
        void *pieces = m->pieces;
        if (!dcp__grow(m->ctx, &pieces, &m->pieces_cap, m->n_pieces + 1, sizeof *m->pieces)) {
            return dcp__nomem(err);
        }
        m->pieces = pieces;
        dcp__pv *piece = dcp__arena_alloc(&m->memo_arena, DCP__P_PIECE * sizeof *piece);
        if (!piece) {
            return dcp__arena_fail(&m->memo_arena, err);
        }
        m->pieces[m->n_pieces++] = piece;
    }
    return DCP_OK;
}

/* Sets the place of the next entry. */
static dcp_status prepare_memo(dcp__pmachine *m, dcp_error *err)
{
    dcp_status status = dcp__pmemo_grow(m, m->n_memo, err);
    if (status == DCP_OK) {
        m->memo_next = dcp__pmachine_memo(m, m->n_memo);
        m->memo_end = m->memo_next + (DCP__P_PIECE - m->n_memo % DCP__P_PIECE);
    }
    return status;
}

/* Makes sure that there is a place for the next entry. Python numbers entries by how many there are. After a gap other readers
 * may count in other ways. */
static inline dcp_status need_memo(dcp__pmachine *m, dcp_error *err)
{
    if (m->memo_next != m->memo_end) {
        return DCP_OK;
    }
    if (m->has_gaps || m->n_memo >= UINT32_MAX - DCP__P_PIECE) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: no number for an entry of the memo");
    }
    return prepare_memo(m, err);
}

static inline dcp_status op_memoize(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 1)) {
        return dcp__punderflow(m, err);
    }
    dcp_status status = need_memo(m, err);
    if (status == DCP_OK) {
        dcp__pmemo_keep(m, m->memo_next++, m->n_memo++);
    }
    return status;
}

static inline dcp_status get_memo(dcp__pmachine *m, size_t i, dcp_error *err)
{
    dcp__pv v = i < m->n_memo ? *dcp__pmachine_memo(m, i) : 0;
    if (!v) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: memo entry %zu is fetched before it is set", i);
    }
    if (v == DCP__PV_GONE) {
        return dcp__pmachine_restart(m, err);
    }
    dcp__pshare(v);
    return dcp__ppush(m, v, err);
}

/* ---- tuples, lists, dicts ---- */

static inline dcp_status op_tuple_n(dcp__pmachine *m, size_t n, dcp_error *err)
{
    if (!dcp__phas(m, n)) {
        return dcp__punderflow(m, err);
    }
    dcp__ptuple *t = dcp__pnode_alloc(m, sizeof *t + n * sizeof *t->items, DCP__P_TUPLE, n);
    if (!t) {
        return dcp__arena_fail(m->arena, err);
    }
    m->top -= n;
    for (size_t i = 0; i < n; i++) {
        t->items[i] = m->stack[m->top + i];
    }
    m->stack[m->top++] = dcp__pv_of_node(t); /* begins where its first element does */
    return DCP_OK;
}

static dcp_status op_tuple(dcp__pmachine *m, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    dcp_status status = dcp__ppop_mark(m, &mark, err);
    if (status != DCP_OK) {
        return status;
    }
    size_t n = m->top - mark.top;
    if (n >= UINT32_MAX) {
        return dcp__fail_at(err, DCP_LIMIT, m->position, "pickle: tuple of %zu elements", n);
    }
    if (n == 0) {
        status = dcp__ppush(m, m->empty_tuple, err);
    } else {
        status = op_tuple_n(m, n, err);
    }
    if (status == DCP_OK) {
        m->starts[m->top - 1] = mark.start;
    }
    return status;
}

/* The list in *part, made on first use. */
static dcp_status part_of(dcp__pmachine *m, dcp__pv *part, dcp__pkind kind, dcp__plist **out, dcp_error *err)
{
    if (!*part) {
        dcp__plist *list = dcp__plist_alloc(m, kind);
        if (!list) {
            return dcp__arena_fail(m->arena, err);
        }
        *part = dcp__pv_of_node(list);
    }
    *out = (dcp__plist *)dcp__pv_node(*part);
    return DCP_OK;
}

/* The container of a kind below the values from stack[from] on, or the part of an object that stands for it. */
static inline dcp_status container(dcp__pmachine *m, size_t from, dcp__pkind kind, const char *what, dcp__plist **out,
                                   dcp_error *err)
{
    if (from <= m->floor) {
        return dcp__punderflow(m, err);
    }
    dcp__pv v = m->stack[from - 1];
    dcp__pkind found = dcp__pv_kind(v);
    if (found == kind) {
        *out = (dcp__plist *)dcp__pv_node(v);
        return DCP_OK;
    }
    if (found != DCP__P_OBJECT) {
        return dcp__pmisfit(m, what, v, err);
    }
    dcp__pobject *o = (dcp__pobject *)dcp__pv_node(v);
    o->end = m->position + 1;
    return kind == DCP__P_DICT ? part_of(m, &o->pairs, kind, out, err) : part_of(m, &o->items, DCP__P_LIST, out, err);
}

/* Closes up the pairs from stack[from] on that stay: a hook may say no to those in which it has a part. */
static void drop_pairs(dcp__pmachine *m, size_t from)
{
    size_t kept = from;
    for (size_t i = from; i < m->top; i += 2) {
        dcp__pv key = m->stack[i], value = m->stack[i + 1];
        bool is_hooked = dcp__pv_is_client(key) || dcp__pv_is_client(value);
        if (!is_hooked || m->hooks->keeps(m->hooks->user, key, value)) {
            m->stack[kept] = key;
            m->stack[kept + 1] = value;
            kept += 2;
        }
    }
    m->top = kept;
}

/* Adds stack[from .. top) to the container below. */
static inline dcp_status extend(dcp__pmachine *m, size_t from, dcp__pkind kind, const char *what, dcp_error *err)
{
    dcp__plist *list = NULL;
    dcp_status status = container(m, from, kind, what, &list, err);
    if (status != DCP_OK) {
        return status;
    }
    if (kind == DCP__P_DICT && (m->top - from) % 2) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: a dict's key has no value");
    }
    if (kind == DCP__P_DICT && m->hooks->keeps) {
        drop_pairs(m, from);
    }
    status = dcp__plist_append(m, list, m->stack + from, m->top - from, err);
    m->top = from;
    return status;
}

static inline dcp_status extend_marked(dcp__pmachine *m, dcp__pkind kind, const char *what, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    dcp_status status = dcp__ppop_mark(m, &mark, err);
    return status == DCP_OK ? extend(m, mark.top, kind, what, err) : status;
}

static inline dcp_status extend_by(dcp__pmachine *m, size_t n, dcp__pkind kind, const char *what, dcp_error *err)
{
    return dcp__phas(m, n + 1) ? extend(m, m->top - n, kind, what, err) : dcp__punderflow(m, err);
}

/* ---- globals and objects ---- */

/* Two values, a class or function and its arguments, become an object. */
static inline dcp_status make_called(dcp__pmachine *m, dcp__pform form, dcp_error *err)
{
    dcp__pv callable = m->stack[m->top - 2], args = m->stack[m->top - 1];
    dcp__pobject *o = NULL;
    dcp_status status = dcp__pobject_make(m, 2, form, &o, err);
    if (status == DCP_OK) {
        o->callable = callable;
        o->args = args;
    }
    return status;
}

static inline dcp_status op_newobj(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 2)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv args = m->stack[m->top - 1];
    if (dcp__pv_kind(args) != DCP__P_TUPLE) {
        return dcp__pmisfit(m, "the arguments of a class", args, err);
    }
    return make_called(m, DCP__PFORM_NEWOBJ, err);
}

/* EMPTY_TUPLE and NEWOBJ at once: how nearly every object begins. */
static inline dcp_status new_without_args(dcp__pmachine *m, dcp_error *err)
{
    dcp__pobject *o = NULL;
    dcp__pv callable = m->stack[m->top - 1];
    m->position++;
    dcp_status status = dcp__pobject_make(m, 1, DCP__PFORM_NEWOBJ, &o, err);
    if (status == DCP_OK) {
        o->callable = callable;
        o->args = m->empty_tuple;
    }
    return status;
}

static inline dcp_status op_reduce(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 2)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv args = m->stack[m->top - 1], made = 0;
    if (dcp__pv_kind(args) != DCP__P_TUPLE) {
        return dcp__pmisfit(m, "the arguments of a function", args, err);
    }
    if (m->hooks->reduce) {
        size_t n;
        const dcp__pv *items = dcp__pv_items(args, &n);
        dcp_status status = m->hooks->reduce(m->hooks->user, m, m->stack[m->top - 2], items, n, &made, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    if (made) {
        m->top--;
        m->stack[m->top - 1] = made;
        dcp__pmachine_recycle(m, args);
        return DCP_OK;
    }
    return make_called(m, DCP__PFORM_REDUCE, err);
}

/* Whether TUPLE1 at p[-1] is followed by MEMOIZE and REDUCE, as in every torch.Size, and a hook may do without the tuple. */
static inline bool is_call_of_one(const dcp__pmachine *m, const uint8_t *p)
{
    return m->window.end - p >= 2 && p[0] == OP_MEMOIZE && p[1] == OP_REDUCE && m->hooks->reduce && !m->keeps_all &&
           dcp__phas(m, 2);
}

/* The three at once. What the hook takes is as if the tuple had been made and given back. */
static inline dcp_status call_of_one(dcp__pmachine *m, dcp_error *err)
{
    dcp__pv made = 0;
    dcp_status status = need_memo(m, err);
    m->position += 2;
    if (status == DCP_OK) {
        status = m->hooks->reduce(m->hooks->user, m, m->stack[m->top - 2], &m->stack[m->top - 1], 1, &made, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    if (made) {
        *m->memo_next++ = DCP__PV_GONE;
        m->n_memo++;
        m->top--;
        m->stack[m->top - 1] = made;
        return DCP_OK;
    }
    status = op_tuple_n(m, 1, err);
    if (status == DCP_OK) {
        dcp__pmemo_keep(m, m->memo_next++, m->n_memo++);
        status = make_called(m, DCP__PFORM_REDUCE, err);
    }
    return status;
}

/* BUILD where no hook took the object's place. */
static inline dcp_status keep_state(dcp__pmachine *m, dcp__pv object, dcp__pv state, dcp_error *err)
{
    if (dcp__pv_kind(object) != DCP__P_OBJECT) {
        return dcp__pmisfit(m, "BUILD", object, err);
    }
    dcp__pobject *o = (dcp__pobject *)dcp__pv_node(object);
    m->top--;
    o->state = state;
    o->end = m->position + 1;
    return DCP_OK;
}

/* BUILD where a hook did. */
static inline void take_place(dcp__pmachine *m, dcp__pv object, dcp__pv state, dcp__pv made)
{
    m->top--;
    m->stack[m->top - 1] = made;
    dcp__pmachine_replace(m, object, made);
    dcp__pmachine_recycle(m, state);
}

static inline dcp_status op_build(dcp__pmachine *m, dcp_error *err)
{
    if (!dcp__phas(m, 2)) {
        return dcp__punderflow(m, err);
    }
    dcp__pv object = m->stack[m->top - 2], state = m->stack[m->top - 1], made = 0;
    if (m->hooks->build) {
        dcp__pstate given = {.value = state};
        given.pairs = dcp__pv_kind(state) == DCP__P_DICT ? dcp__pv_items(state, &given.n) : NULL;
        dcp_status status = m->hooks->build(m->hooks->user, m, object, &given, &made, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    if (made) {
        take_place(m, object, state, made);
        return DCP_OK;
    }
    return keep_state(m, object, state, err);
}

/* Whether SETITEMS at p[-1] fills an empty dict of which only BUILD, which follows, can know: the state of nearly every object.
 */
static inline bool is_state_in_passing(const dcp__pmachine *m, const uint8_t *p)
{
    if (p == m->window.end || *p != OP_BUILD || !m->hooks->build || m->keeps_all || m->n_marks == 0) {
        return false;
    }
    size_t from = m->floor, floor = m->n_marks > 1 ? m->marks[m->n_marks - 2].top : 0;
    if (from - floor < 2 || (m->top - from) % 2 || dcp__pv_kind(m->stack[from - 1]) != DCP__P_DICT) {
        return false;
    }
    const dcp__pnode *dict = dcp__pv_node(m->stack[from - 1]);
    return !dict->count && !(dict->flags & DCP__P_SHARED);
}

/* SETITEMS and BUILD at once: the pairs go into the dict only if the hook leaves it to the machine. */
static inline dcp_status build_in_passing(dcp__pmachine *m, dcp_error *err)
{
    dcp__pmark mark = {0, 0};
    dcp_status status = dcp__ppop_mark(m, &mark, err);
    size_t top = m->top;
    dcp__pv object = m->stack[mark.top - 2], state = m->stack[mark.top - 1], made = 0;
    dcp__pstate given = {.value = state, .pairs = m->stack + mark.top, .n = top - mark.top};
    m->top = mark.top;
    m->position++;
    if (status == DCP_OK) {
        status = m->hooks->build(m->hooks->user, m, object, &given, &made, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    if (made) {
        take_place(m, object, state, made);
        return DCP_OK;
    }
    m->top = top;
    status = extend(m, mark.top, DCP__P_DICT, "SETITEMS", err);
    return status == DCP_OK ? keep_state(m, object, state, err) : status;
}

/* ---- scalars ---- */

static dcp_status op_stop(const dcp__pmachine *m, dcp__pv *root, dcp_error *err)
{
    if (m->n_marks || m->top != 1) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: %zu values and %zu marks at its end", m->top, m->n_marks);
    }
    *root = m->stack[0];
    return DCP_OK;
}

dcp_status dcp__pmachine_run(dcp__pmachine *m, const uint8_t *p, dcp__pv *root, uint64_t *end, dcp_error *err)
{
    dcp__ptuple *empty = dcp__pnode_alloc(m, sizeof *empty, DCP__P_TUPLE, 0);
    if (!empty) {
        return dcp__arena_fail(m->arena, err);
    }
    empty->node.flags |= DCP__P_SHARED;
    m->empty_tuple = dcp__pv_of_node(empty);
    for (;;) {
        dcp_status status = DCP_OK;
        const uint8_t *moved = p; /* so that p itself, whose address nobody has, stays in a register */
        if (m->window.end - p < OP_MAX_BYTES) {
            status = dcp__pwindow_opcode(&m->window, &moved, err);
            if (status != DCP_OK) {
                return status;
            }
            p = moved;
        }
        m->position = dcp__pwindow_position(&m->window, p);
        switch (*p++) {
        case OP_MEMOIZE: status = op_memoize(m, err); break;
        case OP_BINGET: status = get_memo(m, *p++, err); break;
        case OP_LONG_BINGET:
            status = get_memo(m, dcp__load32(p), err);
            p += 4;
            break;
        case OP_BININT1: status = dcp__ppush(m, dcp__pv_of_int(*p++), err); break;
        case OP_BININT2:
            status = dcp__ppush(m, dcp__pv_of_int(dcp__load16(p)), err);
            p += 2;
            break;
        case OP_BININT:
            status = dcp__ppush(m, dcp__pv_of_int((int32_t)dcp__load32(p)), err);
            p += 4;
            break;
        case OP_SHORT_BINUNICODE:
            status = dcp__ppush_text(m, &moved, 2, *p, DCP__P_STR, err);
            p = moved;
            break;
        case OP_MARK: status = op_mark(m, err); break;
        case OP_EMPTY_TUPLE:
            if (p < m->window.end && *p == OP_NEWOBJ && dcp__phas(m, 1)) {
                status = new_without_args(m, err);
                p++;
            } else {
                status = dcp__ppush(m, m->empty_tuple, err);
            }
            break;
        case OP_TUPLE1:
            if (is_call_of_one(m, p)) {
                status = call_of_one(m, err);
                p += 2;
            } else {
                status = op_tuple_n(m, 1, err);
            }
            break;
        case OP_TUPLE2: status = op_tuple_n(m, 2, err); break;
        case OP_TUPLE3: status = op_tuple_n(m, 3, err); break;
        case OP_TUPLE: status = op_tuple(m, err); break;
        case OP_NONE: status = dcp__ppush(m, DCP__PV_NONE, err); break;
        case OP_NEWTRUE: status = dcp__ppush(m, DCP__PV_TRUE, err); break;
        case OP_NEWFALSE: status = dcp__ppush(m, DCP__PV_FALSE, err); break;
        case OP_EMPTY_DICT: status = dcp__ppush_node(m, dcp__plist_alloc(m, DCP__P_DICT), err); break;
        case OP_SETITEMS:
            if (is_state_in_passing(m, p)) {
                status = build_in_passing(m, err);
                p++;
            } else {
                status = extend_marked(m, DCP__P_DICT, "SETITEMS", err);
            }
            break;
        case OP_SETITEM: status = extend_by(m, 2, DCP__P_DICT, "SETITEM", err); break;
        case OP_EMPTY_LIST: status = dcp__ppush_node(m, dcp__plist_alloc(m, DCP__P_LIST), err); break;
        case OP_APPENDS: status = extend_marked(m, DCP__P_LIST, "APPENDS", err); break;
        case OP_ADDITEMS: status = extend_marked(m, DCP__P_SET, "ADDITEMS", err); break;
        case OP_APPEND: status = extend_by(m, 1, DCP__P_LIST, "APPEND", err); break;
        case OP_NEWOBJ: status = op_newobj(m, err); break;
        case OP_REDUCE: status = op_reduce(m, err); break;
        case OP_BUILD: status = op_build(m, err); break;
        case OP_FRAME: p += 8; break;
        case OP_STOP: *end = m->position + 1; return op_stop(m, root, err);
        default:
            status = dcp__pmachine_rare(m, &moved, err);
            p = moved;
            break;
        }
        if (status != DCP_OK) {
            return status;
        }
        if (p < m->window.end && *p == OP_MEMOIZE) { /* follows most opcodes that make something */
            m->position = dcp__pwindow_position(&m->window, p++);
            status = op_memoize(m, err);
            if (status != DCP_OK) {
                return status;
            }
        }
    }
}
