/* Values from pickles: object records and torch.save files (formats.md 4). */
#ifndef DCP_FORMAT_OBJECT_H
#define DCP_FORMAT_OBJECT_H

#include "base/source.h"
#include "dcp/state.h"

/* The storages that the tensors of one pickle name, in order of first appearance. */
typedef struct dcp__storage_ref {
    dcp_str key;     /* "0": member data/0 */
    dcp_dtype dtype; /* of a typed storage class; DCP_DTYPE_NONE for UntypedStorage and for quantised classes */
    bool is_untyped;
    uint64_t elems;      /* as the persistent id says; bytes if untyped */
    size_t elem_bytes;   /* 1 if untyped */
    int64_t view_of;     /* index of the storage of which this one is a part (legacy files only); -1 */
    uint64_t view_start; /* where in that storage, in elements */
} dcp__storage_ref;

typedef struct dcp__object {
    dcp_context *ctx;
    dcp_value *value; /* tensors in it are lazy (state/value.h), storage indexes the list below */
    dcp__storage_ref *storages;
    size_t n_storages;
    uint64_t end; /* position behind STOP */
} dcp__object;

/* Decodes one pickle that starts at `offset` of src. Tensors: _rebuild_tensor_v2/v3 and the wrappers of formats.md 3.7; other
 * rebuild functions and unknown classes become opaque values, and so does a dict with a key that is neither str nor int64
 * (class builtins.dict or collections.OrderedDict, entries in `pairs`). A node that the pickle refers to twice is one value with
 * two references. Errors: FORMAT (offset), LIMIT, NOMEM, the source's. */
dcp_status dcp__object_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, dcp__object *out, dcp_error *err);
void dcp__object_reset(dcp__object *o);

#endif
