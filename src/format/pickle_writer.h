/* Pickles, protocol 2, byte for byte as PyTorch writes them (formats.md 3.7, 4). */
#ifndef DCP_FORMAT_PICKLE_WRITER_H
#define DCP_FORMAT_PICKLE_WRITER_H

#include "base/buf.h"
#include "dcp/state.h"

/* data.pkl of a tensor record: a row-major tensor of that shape over a storage of exactly its elements, key "0", on "cpu".
 * Errors: ARG, LIMIT (size overflows), NOMEM. */
dcp_status dcp__pickle_tensor(dcp__buf *out, dcp_dtype dtype, int ndim, const int64_t *extents, dcp_error *err);

/* The storages of a value that is about to be written: memory of its tensors, each distinct one once, in order of appearance. */
typedef struct dcp__write_storage {
    const dcp_value *tensor; /* first tensor value that uses it */
    uint64_t bytes;          /* of the storage as it will be written: row-major elements of `tensor` */
} dcp__write_storage;

/* data.pkl of any value. Tensors (not sharded ones: ARG) are written row-major under keys "0", "1", ...; tensors that are equal
 * in dtype, shape, strides and memory share one, lazy ones that are equal in dtype, shape, strides and place, and lazy ones with
 * a base, which keep their strides, have that of their base. A value that stands in several places is written once and fetched
 * after; so are equal strings. *storages is allocated with out's context, NULL if there are none. Opaque values are written back
 * from their parts. On an error, out's length is unchanged. Errors: ARG, LIMIT (depth, a text of 4 GiB), UNSUPPORTED (a global's
 * name that this protocol cannot spell; an opaque value with a storage of its own, such as a quantised tensor: its record can
 * only be copied as it is), NOMEM. */
dcp_status dcp__pickle_value(dcp__buf *out, const dcp_value *v, dcp__write_storage **storages, size_t *n, dcp_error *err);

#endif
