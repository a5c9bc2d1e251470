/* From pickle nodes to values: what the files behind object.h share. */
#ifndef DCP_FORMAT_OBJECT_BUILDER_H
#define DCP_FORMAT_OBJECT_BUILDER_H

#include "base/strmap.h"
#include "format/object.h"
#include "format/pickle.h"
#include "state/value.h"

typedef struct dcp__builder {
    dcp_context *ctx;
    dcp__object *object; /* receives the storages */
    size_t storages_cap;
    dcp__strmap by_key; /* storage key -> index */
    dcp_value **kept;   /* a reference to what a node became; the node's client word is its index plus one */
    size_t n_kept, kept_cap;
    uint64_t left_bytes; /* that values may still take */
} dcp__builder;

static inline bool dcp__str_is(dcp_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.ptr, text, s.len) == 0;
}

/* The value of a node. depth counts from the root. */
dcp_status dcp__build(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err);
/* The same for a caller who may not need it after all: it is kept, so that building the node again, as a part of something
 * opaque, costs nothing. (Otherwise n nested calls would take 2^n steps.) */
dcp_status dcp__build_once(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err);

/* A callable, its arguments and the object that they came from (NULL in a wrapper's inner call). */
typedef struct dcp__call {
    const dcp__pglobal *callable;
    const dcp__pv *args;
    size_t n_args;
    const dcp__pobject *object;
    uint64_t start; /* position for errors */
} dcp__call;

/* callable(*args) for the callables that are known, without ever calling anything. *out stays NULL where the callable or its
 * arguments are of another kind: the object is opaque then. */
dcp_status dcp__build_call(dcp__builder *b, const dcp__call *call, unsigned depth, dcp_value **out, dcp_error *err);
/* The calls that make tensors: module torch._utils, function as named. */
dcp_status dcp__build_tensor(dcp__builder *b, const dcp__call *call, unsigned depth, dcp_value **out, dcp_error *err);

/* The storage that a persistent id names; *index is SIZE_MAX if it names none of a known class. */
dcp_status dcp__builder_storage(dcp__builder *b, const dcp__pobject *id, size_t *index, dcp_error *err);

/* Storage classes by name ("FloatStorage"); false if it is none. Quantised ones have dtype NONE. */
typedef struct dcp__storage_class {
    dcp_dtype dtype;
    size_t elem_bytes;
    bool is_untyped;
} dcp__storage_class;
bool dcp__storage_class_find(dcp_str module, dcp_str name, dcp__storage_class *out);

/* A view of a storage of storage_bytes: what formats.md 3.8 requires. *span_bytes runs from element 0 to the end of the last. */
dcp_status dcp__check_view(dcp_dtype dtype, int ndim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset,
                           uint64_t storage_bytes, uint64_t *span_bytes, dcp_error *err);

#endif
