/* The insides of the pickle machine, shared by its files only. */
#ifndef DCP_FORMAT_PICKLE_MACHINE_H
#define DCP_FORMAT_PICKLE_MACHINE_H

#include "format/pickle.h"
#include "format/pickle_window.h"

#define DCP__P_VISITING 2 /* in flags: below itself, if met again */

/* Nodes that were given back, by size in words. */
#define DCP__P_CLASSES 64
/* Arrays of lists and dicts that were outgrown or given back, by log2 of their elements. */
#define DCP__P_ARRAY_CLASSES 40

/* In the memo: what was here was given back. */
#define DCP__PV_GONE ((dcp__pv)0x1a)

#define DCP__P_PIECE ((size_t)1 << 15) /* entries */

typedef struct dcp__pmark {
    size_t top;     /* of the stack when the mark was set */
    uint64_t start; /* position of the mark */
} dcp__pmark;

struct dcp__pmachine {
    dcp_context *ctx;
    dcp__arena *arena;
    dcp__pwindow window;
    const dcp__pickle_hooks *hooks; /* never NULL */
    uint64_t position;              /* of the opcode at work */
    dcp__pv *stack;
    uint64_t *starts; /* [slot]: position of the first opcode of the value */
    size_t top, cap;
    size_t floor; /* the stack's top at the newest mark */
    dcp__pmark *marks;
    size_t n_marks, marks_cap;
    /* The memo, in pieces from an arena of its own: millions of entries would otherwise be moved, and touched page by page. */
    dcp__arena memo_arena;
    dcp__pv **pieces; /* [entry / DCP__P_PIECE] */
    size_t n_pieces, pieces_cap;
    dcp__pv *memo_next, *memo_end; /* place of entry n_memo, and where its piece ends; equal if there is none yet */
    size_t n_memo;
    bool has_gaps;  /* entries were put at numbers above n_memo */
    bool keeps_all; /* second reading */
    bool must_restart;
    dcp__pv empty_tuple; /* there is one for all, as in Python */
    void *free_nodes[DCP__P_CLASSES];
    void *free_arrays[DCP__P_ARRAY_CLASSES];
    dcp__plist *free_lists; /* empty ones with a small array */
    int protocol;
};

/* Where entry i of the memo is; it has a piece. */
static inline dcp__pv *dcp__pmachine_memo(const dcp__pmachine *m, size_t i)
{
    return &m->pieces[i / DCP__P_PIECE][i % DCP__P_PIECE];
}

/* ---- nodes (pickle_nodes.c). NULL: out of memory or over the limit, dcp__arena_fail tells which. ---- */

/* A node with nothing set but kind, flags and count. */
static inline void *dcp__pnode_alloc(dcp__pmachine *m, size_t bytes, dcp__pkind kind, size_t count)
{
    size_t words = (bytes + 7) / 8;
    void *free = words < DCP__P_CLASSES ? m->free_nodes[words] : NULL;
    dcp__pnode *node = free;
    if (free) {
        memcpy(&m->free_nodes[words], free, sizeof(void *));
    } else {
        node = dcp__arena_alloc(m->arena, bytes);
        if (!node) {
            return NULL;
        }
    }
    *node = (dcp__pnode){.kind = (uint8_t)kind, .count = (uint32_t)count};
    return node;
}

/* An empty list, set or dict. */
dcp__plist *dcp__plist_alloc(dcp__pmachine *m, dcp__pkind kind);
/* Appends n values. */
dcp_status dcp__plist_append(dcp__pmachine *m, dcp__plist *list, const dcp__pv *items, size_t n, dcp_error *err);

/* ---- texts (pickle_text.c) ---- */

/* Makes a text node of the payload at p, which may reach beyond the window; *p moves behind it. */
dcp_status dcp__ptext_read(dcp__pmachine *m, const uint8_t **p, uint64_t bytes, dcp__pkind kind, dcp__pv *out, dcp_error *err);
/* Makes a text node of bytes in memory. */
dcp_status dcp__ptext_make(dcp__pmachine *m, const void *bytes, size_t n, dcp__pkind kind, dcp__pv *out, dcp_error *err);
/* The integer of a LONG1 or LONG4: two's complement, little-endian, n bytes. */
dcp_status dcp__plong_make(dcp__pmachine *m, const uint8_t *bytes, size_t n, dcp__pv *out, dcp_error *err);

static inline dcp__pv dcp__pv_of_node(const void *node)
{
    return (dcp__pv)(uintptr_t)node;
}
static inline dcp__pv dcp__pv_of_int(int64_t i) /* |i| < 2^60 */
{
    return (uint64_t)i << 3 | 1;
}

/* ---- running (pickle_machine.c) ---- */

/* Builds from p, the pickle's first byte, to STOP. */
dcp_status dcp__pmachine_run(dcp__pmachine *m, const uint8_t *p, dcp__pv *root, uint64_t *end, dcp_error *err);

/* ---- checking the result (pickle_check.c) ---- */

/* Refuses graphs with cycles (FORMAT) and such that are nested deeper than max_depth (LIMIT). at: offset for the message. */
dcp_status dcp__pickle_check(dcp_context *ctx, dcp__pv root, uint32_t max_depth, uint64_t at, dcp_error *err);

#endif
