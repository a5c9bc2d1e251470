/* What the files behind record.h share. */
#ifndef DCP_FORMAT_RECORD_INTERNAL_H
#define DCP_FORMAT_RECORD_INTERNAL_H

#include "format/record.h"

/* What data.pkl of a plain tensor says (formats.md 3.7). */
typedef struct dcp__tensor_pickle {
    dcp_dtype dtype;
    dcp_str key; /* of the storage; points into the pickle */
    uint64_t elems;
    size_t elem_bytes; /* of the storage, 1 if untyped */
    bool is_untyped;
    int64_t storage_offset;
    int ndim;
    int64_t sizes[DCP_MAX_NDIM], strides[DCP_MAX_NDIM];
} dcp__tensor_pickle;

/* Recognises exactly the opcodes that PyTorch writes for a tensor without conj and neg bits, with or without memo opcodes.
 * False for anything else: that is for the pickle machine. Nothing is checked but the form. */
bool dcp__tensor_pickle_match(const uint8_t *pickle, size_t n, dcp__tensor_pickle *out);

/* A legacy torch.save file. Sets all but ctx of *a; on failure *a is to be reset by the caller. */
dcp_status dcp__legacy_open(const dcp__source *src, dcp__archive *a, dcp_error *err);
/* Is what the first n bytes hold the magic number of a legacy file? */
bool dcp__is_legacy(const uint8_t *bytes, size_t n);

#endif
