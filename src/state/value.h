/* The node behind dcp_value, for the layers above that build trees from files or walk them to write. */
#ifndef DCP_STATE_VALUE_H
#define DCP_STATE_VALUE_H

#include "base/context.h"
#include "dcp/state.h"

/* Where the elements of a tensor are that was parsed but not read: a storage of the archive that it came from. */
typedef struct dcp__lazy {
    int64_t storage;        /* index in the archive's list of storages; -1: not lazy */
    int64_t storage_offset; /* in elements */
    bool is_conj, is_neg;   /* to be applied on reading */
    const dcp_value *base; /* to be written as a view of this tensor, row-major, at storage_offset; NULL: it is none. Borrowed. */
} dcp__lazy;

/* How Python would make an opaque value. Parts are NULL where the pickle had none. Nothing of it is ever called. */
typedef enum dcp__opaque_form {
    DCP__OPAQUE_GLOBAL = 1, /* the class or function itself */
    DCP__OPAQUE_REDUCE,     /* callable(*args) */
    DCP__OPAQUE_NEWOBJ,     /* cls.__new__(cls, *args) */
    DCP__OPAQUE_NEWOBJ_EX,  /* cls.__new__(cls, *args, **kwargs) */
    DCP__OPAQUE_PERSID      /* a persistent id of a kind that is not known; args holds the id */
} dcp__opaque_form;

typedef struct dcp__opaque {
    dcp__opaque_form form;
    dcp_str module, name; /* of the callable; NUL-terminated, owned */
    dcp_str qualified;    /* "module.name", owned */
    uint64_t bytes;       /* span in the pickle */
    dcp_value *callable;  /* where the callable is itself no global, else NULL */
    dcp_value *args;      /* tuple */
    dcp_value *kwargs;    /* dict; NEWOBJ_EX */
    dcp_value *state;     /* argument of BUILD */
    dcp_value *items;     /* list: APPEND(S), ADDITEMS */
    dcp_value *pairs;     /* list of key, value, key, value: SETITEM(S); keys may be of any kind */
} dcp__opaque;

/* Makes an opaque value; takes over the references in *parts on success, copies module and name. */
dcp_status dcp__opaque_create(dcp_context *ctx, const dcp__opaque *parts, dcp_value **out, dcp_error *err);
const dcp__opaque *dcp__value_opaque(const dcp_value *v); /* NULL for other kinds */
/* A tensor that is not read: as dcp_tensor_create with data NULL, and where its elements are. */
dcp_status dcp__lazy_tensor_create(dcp_context *ctx, const dcp_tensor *t, const dcp__lazy *lazy, dcp_value **out, dcp_error *err);
const dcp__lazy *dcp__value_lazy(const dcp_value *v); /* NULL if v is no tensor or not lazy */
/* Gives a lazy tensor row-major memory of its own, not initialised, and ends its laziness. */
dcp_status dcp__lazy_tensor_materialize(dcp_value *v, dcp_error *err);

/* True for dicts, ordered or not. */
static inline bool dcp__has_keys(const dcp_value *v)
{
    return dcp_value_kind(v) == DCP_KIND_DICT || dcp_value_kind(v) == DCP_KIND_ORDERED_DICT;
}

/* Recursion over a tree stops here with LIMIT: the context's max_depth, or what any thread's stack can bear. */
uint32_t dcp__depth_limit(const dcp_context *ctx);
/* And after so many values, counted each time that it comes to them: shared ones may be reached in ever so many ways. */
uint64_t dcp__visit_limit(const dcp_context *ctx);

/* True if text is UTF-8 in which lone surrogates may occur. */
bool dcp__is_wtf8(dcp_str text);

#endif
