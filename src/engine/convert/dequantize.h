/* Tensors that are stored as small numbers and scales. */
#ifndef DCP_ENGINE_DEQUANTIZE_H
#define DCP_ENGINE_DEQUANTIZE_H

#include "dcp/convert.h"
#include "engine/read/checkpoint.h"

/* True if the item holds the scales of another one. */
bool dcp__is_scales(const dcp_checkpoint *ck, const dcp_item *item);
/* Elements [start, start + n) of the tensor that a pair stands for, row-major. block 0: 128. *lost: how many do not fit dtype. */
dcp_status dcp__dequantize_elems(dcp_checkpoint *ck, const dcp_quantized *q, int64_t block, dcp_dtype dtype, uint64_t start,
                                 uint64_t n, void *out, uint64_t *lost, dcp_error *err);

#endif
