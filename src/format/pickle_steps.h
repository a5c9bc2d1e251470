/* What opcodes do to stack, marks and memo. Inline, since a large stream goes through these millions of times. */
#ifndef DCP_FORMAT_PICKLE_STEPS_H
#define DCP_FORMAT_PICKLE_STEPS_H

#include "format/pickle_machine.h"

/* ---- the stack ---- */

dcp_status dcp__pstack_grow(dcp__pmachine *m, dcp_error *err);
/* FORMAT: too few values on the stack. */
dcp_status dcp__punderflow(const dcp__pmachine *m, dcp_error *err);
/* FORMAT: `what` finds a value of a kind that it cannot take. */
dcp_status dcp__pmisfit(const dcp__pmachine *m, const char *what, dcp__pv v, dcp_error *err);

static inline dcp_status dcp__ppush(dcp__pmachine *m, dcp__pv v, dcp_error *err)
{
    if (m->top == m->cap) {
        dcp_status status = dcp__pstack_grow(m, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    m->stack[m->top] = v;
    m->starts[m->top++] = m->position;
    return DCP_OK;
}

/* Are there n values above the newest mark? */
static inline bool dcp__phas(const dcp__pmachine *m, size_t n)
{
    return m->top - m->floor >= n;
}

/* Pushes a node that was just made; NULL if it could not be. */
static inline dcp_status dcp__ppush_node(dcp__pmachine *m, const void *node, dcp_error *err)
{
    return node ? dcp__ppush(m, dcp__pv_of_node(node), err) : dcp__arena_fail(m->arena, err);
}

static inline dcp_status dcp__ppush_text(dcp__pmachine *m, const uint8_t **p, size_t opcode_bytes, uint64_t bytes,
                                         dcp__pkind kind, dcp_error *err)
{
    dcp__pv v;
    *p += opcode_bytes;
    dcp_status status = dcp__ptext_read(m, p, bytes, kind, &v, err);
    return status == DCP_OK ? dcp__ppush(m, v, err) : status;
}

/* Replaces the n topmost values by an object. */
static inline dcp_status dcp__pobject_make(dcp__pmachine *m, size_t n, dcp__pform form, dcp__pobject **out, dcp_error *err)
{
    dcp__pobject *o = dcp__pnode_alloc(m, sizeof *o, DCP__P_OBJECT, 0);
    if (!o) {
        return dcp__arena_fail(m->arena, err);
    }
    m->top -= n;
    o->callable = o->args = o->kwargs = o->state = o->items = o->pairs = 0;
    o->start = m->starts[m->top];
    o->end = m->position + 1;
    o->form = form;
    m->stack[m->top++] = dcp__pv_of_node(o);
    *out = o;
    return DCP_OK;
}

/* ---- marks ---- */

/* Takes the newest mark off; the values above it are stack[mark->top .. top). */
static inline dcp_status dcp__ppop_mark(dcp__pmachine *m, dcp__pmark *mark, dcp_error *err)
{
    if (m->n_marks == 0) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: an opcode finds no mark");
    }
    *mark = m->marks[--m->n_marks];
    m->floor = m->n_marks ? m->marks[m->n_marks - 1].top : 0;
    return DCP_OK;
}

/* ---- memo ---- */

/* Adds pieces until entry i has one. */
dcp_status dcp__pmemo_grow(dcp__pmachine *m, size_t i, dcp_error *err);

static inline void dcp__pshare(dcp__pv v)
{
    if (v && dcp__pv_is_node(v)) {
        dcp__pv_node(v)->flags |= DCP__P_SHARED;
    }
}

/* A node knows one number in the memo; one that has two counts as shared. */
static inline void dcp__pmemo_keep(dcp__pmachine *m, dcp__pv *place, size_t i)
{
    dcp__pv v = m->stack[m->top - 1];
    *place = v;
    if (dcp__pv_is_node(v)) {
        dcp__pnode *node = dcp__pv_node(v);
        node->flags |= node->memo ? DCP__P_SHARED : 0;
        node->memo = (uint32_t)i + 1;
    }
}

/* ---- opcodes whose payload has any length, and what else is rare (pickle_rare.c) ---- */

/* Carries out the opcode at *p, which moves behind it. FORMAT for those that are not accepted. */
dcp_status dcp__pmachine_rare(dcp__pmachine *m, const uint8_t **p, dcp_error *err);

#endif
