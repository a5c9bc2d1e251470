/* Ranks as a mesh, and the box of a tensor that each of them holds. */
#ifndef DCP_PLAN_MESH_H
#define DCP_PLAN_MESH_H

#include "dcp/base.h"

#define DCP__MAX_MESH_RANKS 4096

/* Product of the sizes. Errors: ARG (a size below 1, more than DCP__MAX_MESH_RANKS ranks). */
dcp_status dcp__mesh_ranks(int n_dims, const int *sizes, int *out, dcp_error *err);

/* The box of rank `rank`, whose coordinates are row-major. axes[i] is the axis of the tensor that dimension i of the mesh splits,
 * or negative where it replicates. Each split is that of torch.chunk: all parts have ceil(n / parts) indexes, but for the last
 * ones, which have fewer or none; several dimensions on one axis split it one after the other, as DTensor does. */
void dcp__mesh_box(int n_dims, const int *mesh, const int *axes, int rank, int ndim, const int64_t *extents, int64_t *offsets,
                   int64_t *sizes);

#endif
