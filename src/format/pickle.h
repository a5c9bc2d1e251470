/* The restricted pickle machine: turns a pickle of protocol 2 to 5 into plain nodes. It never imports, calls or looks anything
 * up: a global is the pair (module, name), an object is how Python would make it.
 *
 * The stream is read once, through a small window. Hooks may turn an object into a row of a table as soon as it is complete, and
 * give its nodes back: metadata of any size is parsed in little more memory than its result and the memo. The memo then holds the
 * row, too. Should the stream come back to something that was given back for good, the reading starts again and keeps all. */
#ifndef DCP_FORMAT_PICKLE_H
#define DCP_FORMAT_PICKLE_H

#include "base/arena.h"
#include "base/source.h"

/* A value: an immediate (small integer, None, bool, what a hook made), or a node. Two equal words are the same value or node. */
typedef uint64_t dcp__pv;

typedef enum dcp__pkind {
    DCP__P_NONE = 1,
    DCP__P_BOOL,
    DCP__P_INT, /* any size */
    DCP__P_FLOAT,
    DCP__P_STR, /* UTF-8, lone surrogates allowed */
    DCP__P_BYTES,
    DCP__P_BYTEARRAY,
    DCP__P_TUPLE,
    DCP__P_LIST,
    DCP__P_SET,
    DCP__P_FROZENSET,
    DCP__P_DICT,   /* pairs in stream order: equal keys are not merged, the last one counts */
    DCP__P_GLOBAL, /* a class or function by its name */
    DCP__P_OBJECT, /* see dcp__pobject */
    DCP__P_INTS,   /* an int64_t array; only hooks make it */
    DCP__P_CLIENT  /* an immediate made by a hook */
} dcp__pkind;

/* What all nodes begin with. */
typedef struct dcp__pnode {
    uint8_t kind;
    uint8_t flags;   /* internal */
    uint16_t height; /* internal */
    uint32_t count;  /* elements, bytes of a text; a dict's keys and values counted both */
    uint32_t memo;   /* internal */
    uint64_t client; /* 0 at first, then whatever the client wants: what it made of the node */
} dcp__pnode;

#define DCP__P_SHARED 1 /* in flags: the node can be reached in more than one way */

typedef struct dcp__ptext { /* STR, BYTES, BYTEARRAY, big INT */
    dcp__pnode node;
    char text[]; /* NUL-terminated; of an INT: two's complement, little-endian */
} dcp__ptext;

typedef struct dcp__pfloat {
    dcp__pnode node;
    double value;
} dcp__pfloat;

typedef struct dcp__ptuple { /* TUPLE */
    dcp__pnode node;
    dcp__pv items[];
} dcp__ptuple;

typedef struct dcp__pints { /* INTS */
    dcp__pnode node;
    int64_t values[];
} dcp__pints;

typedef struct dcp__plist { /* LIST, SET, FROZENSET; DICT: key, value, key, value */
    dcp__pnode node;
    dcp__pv *items;
    size_t cap;
} dcp__plist;

typedef struct dcp__pglobal {
    dcp__pnode node;
    dcp_str module, name;
} dcp__pglobal;

typedef enum dcp__pform {
    DCP__PFORM_REDUCE = 1, /* callable(*args) */
    DCP__PFORM_NEWOBJ,     /* callable.__new__(callable, *args) */
    DCP__PFORM_NEWOBJ_EX,  /* the same with **kwargs */
    DCP__PFORM_PERSID      /* BINPERSID; args is the id, of any kind */
} dcp__pform;

/* An object, not made. Parts are 0 where the stream had none. */
typedef struct dcp__pobject {
    dcp__pnode node;
    dcp__pv callable; /* a global as a rule, but any value is possible */
    dcp__pv args;     /* a tuple, except for PERSID and hostile streams: check */
    dcp__pv kwargs;
    dcp__pv state;  /* of the last BUILD */
    dcp__pv items;  /* LIST of what APPEND(S) or ADDITEMS added */
    dcp__pv pairs;  /* DICT of what SETITEM(S) set */
    uint64_t start; /* where its first opcode begins */
    uint64_t end;   /* behind the last opcode that made or changed it */
    dcp__pform form;
} dcp__pobject;

/* ---- looking at values ---- */

#define DCP__PV_NONE ((dcp__pv)0x02)
#define DCP__PV_FALSE ((dcp__pv)0x0a)
#define DCP__PV_TRUE ((dcp__pv)0x12)

/* Low three bits: 0 node, 1 integer of 61 bits, 2 the constants, 3 a hook's. */
static inline bool dcp__pv_is_node(dcp__pv v)
{
    return (v & 7) == 0;
}
static inline dcp__pnode *dcp__pv_node(dcp__pv v)
{
    return (dcp__pnode *)(uintptr_t)v;
}
static inline dcp__pv dcp__pv_of_client(uint64_t number) /* below 2^61 */
{
    return number << 3 | 3;
}
static inline bool dcp__pv_is_client(dcp__pv v)
{
    return (v & 7) == 3;
}
static inline uint64_t dcp__pv_client(dcp__pv v)
{
    return v >> 3;
}

static inline dcp__pkind dcp__pv_kind(dcp__pv v)
{
    switch (v & 7) {
    case 0: return (dcp__pkind)dcp__pv_node(v)->kind;
    case 1: return DCP__P_INT;
    case 2: return v == DCP__PV_NONE ? DCP__P_NONE : DCP__P_BOOL;
    default: return DCP__P_CLIENT;
    }
}
/* "str", "dict", ..., as Python says it. For messages. */
const char *dcp__pv_kind_name(dcp__pv v);

bool dcp__pv_int_node(dcp__pv v, int64_t *out);
/* True if v is an integer (no bool) that fits. */
static inline bool dcp__pv_int(dcp__pv v, int64_t *out)
{
    if ((v & 7) == 1) {
        *out = (int64_t)v >> 3;
        return true;
    }
    return dcp__pv_int_node(v, out);
}
/* Bytes of a STR, BYTES, BYTEARRAY, or of an INT that is a node; {NULL, 0} for others. NUL-terminated. */
static inline dcp_str dcp__pv_text(dcp__pv v)
{
    if (!dcp__pv_is_node(v)) {
        return (dcp_str){NULL, 0};
    }
    const dcp__ptext *t = (const dcp__ptext *)dcp__pv_node(v);
    bool is_text = t->node.kind >= DCP__P_STR && t->node.kind <= DCP__P_BYTEARRAY;
    return is_text || t->node.kind == DCP__P_INT ? (dcp_str){t->text, t->node.count} : (dcp_str){NULL, 0};
}
static inline bool dcp__pv_is_str(dcp__pv v)
{
    return dcp__pv_kind(v) == DCP__P_STR;
}
/* Elements of a TUPLE, LIST, SET, FROZENSET, or keys and values of a DICT in turn; *n is 0 for others. */
static inline const dcp__pv *dcp__pv_items(dcp__pv v, size_t *n)
{
    const dcp__pnode *node = v && dcp__pv_is_node(v) ? dcp__pv_node(v) : NULL;
    bool is_list = node && node->kind >= DCP__P_LIST && node->kind <= DCP__P_DICT;
    bool is_tuple = node && node->kind == DCP__P_TUPLE;
    *n = is_list || is_tuple ? node->count : 0;
    return is_list ? ((const dcp__plist *)node)->items : is_tuple ? ((const dcp__ptuple *)node)->items : NULL;
}
/* NULL for other kinds. */
static inline const dcp__pglobal *dcp__pv_global(dcp__pv v)
{
    return dcp__pv_kind(v) == DCP__P_GLOBAL ? (const dcp__pglobal *)dcp__pv_node(v) : NULL;
}
static inline const dcp__pobject *dcp__pv_object(dcp__pv v)
{
    return dcp__pv_kind(v) == DCP__P_OBJECT ? (const dcp__pobject *)dcp__pv_node(v) : NULL;
}
static inline double dcp__pv_float(dcp__pv v) /* of a FLOAT */
{
    return ((const dcp__pfloat *)dcp__pv_node(v))->value;
}
/* True if the value may be reached in several ways: who expands a graph into a tree keeps what it made of such nodes (in
 * node->client), or a few shared lists grow without bound. Nodes that are not shared are seen once. */
static inline bool dcp__pv_is_shared(dcp__pv v)
{
    return dcp__pv_is_node(v) && (dcp__pv_node(v)->flags & DCP__P_SHARED);
}
/* Is v the global module.name? */
bool dcp__pv_is_global(dcp__pv v, const char *module, const char *name);

/* ---- reading ---- */

typedef struct dcp__pmachine dcp__pmachine;

/* The state that BUILD is to give to an object. */
typedef struct dcp__pstate {
    dcp__pv value;
    const dcp__pv *pairs; /* of a dict: its n / 2 keys and values in turn, which need not stand in the value yet */
    size_t n;
} dcp__pstate;

/* What a client may do while the stream is read; members may be NULL. A hook that sets *out has taken the place of the node:
 * *out goes on the stack and into the memo, and the tuple of arguments or the state is given back. It leaves *out alone (0) to
 * let the machine make what it makes without hooks. */
typedef struct dcp__pickle_hooks {
    void *user;
    /* callable(args[0], ..., args[n - 1]). */
    dcp_status (*reduce)(void *user, dcp__pmachine *m, dcp__pv callable, const dcp__pv *args, size_t n, dcp__pv *out,
                         dcp_error *err);
    /* BUILD: object is whatever is on the stack, state is not yet stored in it. A shared object cannot be replaced, since there
     * are other references to it: set its client word instead. */
    dcp_status (*build)(void *user, dcp__pmachine *m, dcp__pv object, const dcp__pstate *state, dcp__pv *out, dcp_error *err);
    /* Whether a dict or object need keep a pair that is set in it; asked of those of which one half is a hook's value. */
    bool (*keeps)(void *user, dcp__pv key, dcp__pv value);
    /* The reading failed: a chance to say in front of the message where, from what is on the stack. */
    void (*failed)(void *user, const dcp__pmachine *m, dcp_error *err);
    /* The stream is read from its start again; nothing will be given back this time. What hooks made is void. */
    void (*restart)(void *user);
} dcp__pickle_hooks;

/* For hooks. */
uint64_t dcp__pmachine_position(const dcp__pmachine *m); /* of the opcode at work, in the source */
dcp__arena *dcp__pmachine_arena(dcp__pmachine *m);
/* The value that is n below the topmost of those that the opcode at work takes, 0 if there is none: only good for guesses. */
dcp__pv dcp__pmachine_below(const dcp__pmachine *m, size_t n);
/* The value that is n below the topmost of the stack, whatever marks lie between, 0 if there is none: only good for messages. */
dcp__pv dcp__pmachine_stacked(const dcp__pmachine *m, size_t n);
/* Gives the node back, not what is in it. Nothing happens if it is 0, shared, or no node. */
void dcp__pmachine_recycle(dcp__pmachine *m, dcp__pv v);
/* The same, and the memo gets `with` in its place: a value that is as good. */
void dcp__pmachine_replace(dcp__pmachine *m, dcp__pv v, dcp__pv with);
/* Asks for a second reading, since something is needed that was given back. To be returned by the hook. */
dcp_status dcp__pmachine_restart(dcp__pmachine *m, dcp_error *err);
/* A TUPLE or LIST of integers as INTS: in place if nobody else has it. LIMIT/NOMEM from the arena; FORMAT (at the current
 * position) if an element is no integer that fits int64. */
dcp_status dcp__pmachine_ints(dcp__pmachine *m, dcp__pv seq, dcp__pv *out, dcp_error *err);

/* A pickle that was read. */
typedef struct dcp__pickle {
    dcp__arena arena; /* owns all nodes */
    dcp__pv root;
    uint64_t end; /* position behind STOP, in the source */
    int protocol;
} dcp__pickle;

/* Reads the pickle that starts at `offset` of src. hooks may be NULL. The graph that comes out has no cycles and is nested at
 * most limits.max_depth deep; a node may stand in several places. Errors: FORMAT (with offset: bad opcode, cut, wrong operand,
 * recursive structure, text that is no UTF-8), LIMIT (depth, memory, string), NOMEM, the source's, the hooks'. */
dcp_status dcp__pickle_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, const dcp__pickle_hooks *hooks,
                            dcp__pickle *out, dcp_error *err);
void dcp__pickle_reset(dcp__pickle *p);

#endif
