/* Copies of tensors' elements into host memory, many at once: from devices too, strided on both sides, with casts. */
#ifndef DCP_ENGINE_TENSOR_PAIRS_H
#define DCP_ENGINE_TENSOR_PAIRS_H

#include "base/context.h"
#include "dcp/state.h"

/* Shapes are equal, dtypes can be cast; shapes, strides and memory are borrowed. */
typedef struct dcp__tensor_pair {
    dcp_tensor from, to; /* to: in host memory */
    int64_t elems;
    size_t order;
} dcp__tensor_pair;

typedef struct dcp__tensor_pairs {
    dcp_context *ctx;
    dcp__tensor_pair *pairs;
    size_t n, cap;
} dcp__tensor_pairs;

/* Notes a copy; those without elements are nothing to do. Errors: NOMEM, LIMIT. */
dcp_status dcp__tensor_pairs_add(dcp__tensor_pairs *p, const dcp_tensor *from, const dcp_tensor *to, dcp_error *err);
/* Makes all copies, by the context's threads; of several into the same tensor, as tied ones are, the last that was noted. Those
 * from a device wait for what is in the stream. Errors: NOMEM, UNSUPPORTED, DEVICE, ARG. */
dcp_status dcp__tensor_pairs_copy(dcp__tensor_pairs *p, void *stream, dcp_error *err);
void dcp__tensor_pairs_reset(dcp__tensor_pairs *p);

#endif
