/* Values from pickles: object records and torch.save files (formats.md 4). */
#ifndef DCP_FORMAT_OBJECT_H
#define DCP_FORMAT_OBJECT_H

#include "base/source.h"
#include "dcp/state.h"

/* The storages that the tensors of one pickle name, in order of first appearance. */
typedef struct dcp__storage_ref {
    dcp_str key;        /* "0": member data/0 */
    dcp_dtype dtype;    /* of a typed storage class; DCP_DTYPE_NONE for UntypedStorage and for quantised classes */
    bool is_untyped;
    uint64_t elems;     /* as the persistent id says; bytes if untyped */
    size_t elem_bytes;  /* 1 if untyped */
} dcp__storage_ref;

typedef struct dcp__object {
    dcp_context *ctx;
    dcp_value *value;              /* tensors in it are lazy (state/value.h), storage indexes the list below */
    dcp__storage_ref *storages;
    size_t n_storages;
    uint64_t end;                  /* position behind STOP */
} dcp__object;

/* Decodes one pickle that starts at `offset` of src. Tensors: _rebuild_tensor_v2/v3 and the wrappers of formats.md 3.7; other
 * rebuild functions and unknown classes become opaque values. Errors: FORMAT (offset), LIMIT, NOMEM, the source's. */
dcp_status dcp__object_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, dcp__object *out, dcp_error *err);
void dcp__object_reset(dcp__object *o);

#endif
