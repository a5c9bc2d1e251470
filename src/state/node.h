/* Memory layout of values, shared by the files of this layer only. Every node starts with a dcp_value; the kind says which of the
 * structs below it is. Kinds with references to other values are "composite" and start with a dcp__composite. */
#ifndef DCP_STATE_NODE_H
#define DCP_STATE_NODE_H

#include "state/value.h"

struct dcp_value {
    dcp_context *ctx;
    uint32_t refs; /* by atomic operations only */
    uint8_t kind;
    bool is_big;      /* DCP_KIND_INT: a dcp__text of its bytes, not a dcp__scalar */
    bool is_building; /* a container that dcp_unflatten is filling */
};

/* none, bool, int of 64 bits, float, dtype */
typedef struct dcp__scalar {
    dcp_value head;
    union {
        int64_t integer;
        double real;
        bool boolean;
        dcp_dtype dtype;
    } as;
} dcp__scalar;

typedef struct dcp__complex {
    dcp_value head;
    double re, im;
} dcp__complex;

/* str, bytes, bytearray, device name, int of more than 64 bits; NUL-terminated */
typedef struct dcp__text {
    dcp_value head;
    size_t len;
    char bytes[];
} dcp__text;

/* a finished record: bytes are borrowed */
typedef struct dcp__record_node {
    dcp_value head;
    dcp_str bytes;
} dcp__record_node;

typedef struct dcp__composite {
    dcp_value head;
    union {
        size_t cap;           /* of the array that the struct goes on with */
        dcp_value *next_dead; /* once the last reference is gone: list of nodes to be freed */
    } link;
} dcp__composite;

/* list, tuple, size, set, frozenset */
typedef struct dcp__seq {
    dcp__composite base;
    size_t count;
    dcp_value **items;
} dcp__seq;

typedef struct dcp__dict_entry {
    char *text; /* owned; NULL: an integer key */
    union {
        size_t len;
        int64_t integer;
    } key;
    dcp_value *value;
} dcp__dict_entry;

/* dict, ordered dict: entries in insertion order, and from a certain size on a hash index of their positions */
typedef struct dcp__dict {
    dcp__composite base;
    size_t count;
    dcp__dict_entry *entries;
    struct dcp__dict_slot *slots; /* NULL while small */
    size_t n_slots;               /* 0 or a power of two */
} dcp__dict;

typedef struct dcp__tensor_node {
    dcp_value head;
    dcp_tensor tensor; /* extents and strides point to shape[] */
    dcp__lazy lazy;
    void *owned; /* memory of the elements if it is the value's own, else NULL */
    int64_t shape[];
} dcp__tensor_node;

typedef struct dcp__sharded_node {
    dcp_value head;
    dcp_dtype dtype;
    int ndim;
    size_t n_chunks;
    const int64_t *extents;   /* global */
    const dcp_tensor *chunks; /* in the same block, as is all that they point to but their data */
    const int64_t *offsets;   /* n_chunks x ndim */
    int64_t numbers[];
} dcp__sharded_node;

typedef struct dcp__opaque_node {
    dcp__composite base;
    dcp__opaque parts;
} dcp__opaque_node;

static inline bool dcp__is_kind(const dcp_value *v, dcp_kind kind)
{
    return v && v->kind == kind;
}
static inline bool dcp__is_seq(const dcp_value *v)
{
    return v && v->kind >= DCP_KIND_LIST && v->kind <= DCP_KIND_FROZENSET;
}
static inline bool dcp__is_dict(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_DICT) || dcp__is_kind(v, DCP_KIND_ORDERED_DICT);
}

/* A node with one reference, nothing but its head filled in; NULL when out of memory. */
void *dcp__node_alloc(dcp_context *ctx, dcp_kind kind, size_t bytes);
/* A dcp__text node; the same errors as the public makers. */
dcp_status dcp__text_create(dcp_context *ctx, dcp_kind kind, const void *bytes, size_t len, dcp_value **out, dcp_error *err);
/* Frees entries, keys and index of a dict, not the values. */
void dcp__dict_release(dcp__dict *d);

/* Gives an entry another key and keeps its position; nothing happens if `from` is absent or `to` is there. `to` is an integer. */
dcp_status dcp__dict_rename(dcp_value *dict, dcp_key from, dcp_key to, dcp_error *err);

/* The code point at *pos of valid WTF-8 text; moves *pos behind it. */
uint32_t dcp__wtf8_next(dcp_str text, size_t *pos);

/* Dicts, and opaque values that Python would know as mappings. */
bool dcp__is_mapping(const dcp_value *v);
size_t dcp__mapping_count(const dcp_value *v);
/* Value i of a mapping and its key: *odd_key is NULL and *key set, or *odd_key is a key that is neither string nor int64. */
dcp_value *dcp__mapping_at(const dcp_value *v, size_t i, dcp_key *key, const dcp_value **odd_key);
/* True for an opaque value of that module and name; module "builtins" stands for "__builtin__" too. */
bool dcp__is_opaque_named(const dcp_value *v, const char *module, const char *name);

#endif
