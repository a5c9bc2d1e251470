#include "plan/mesh.h"

#include "base/error.h"

dcp_status dcp__mesh_ranks(int n_dims, const int *sizes, int *out, dcp_error *err)
{
    int64_t n = 1;
    for (int i = 0; i < n_dims; i++) {
        if (sizes[i] < 1) {
            return dcp__fail(err, DCP_ARG, "dimension %d of the mesh has %d ranks", i, sizes[i]);
        }
        n *= sizes[i];
        if (n > DCP__MAX_MESH_RANKS) {
            return dcp__fail(err, DCP_ARG, "the mesh has more than %d ranks", DCP__MAX_MESH_RANKS);
        }
    }
    *out = (int)n;
    return DCP_OK;
}

static void split(int64_t *offset, int64_t *size, int parts, int part)
{
    int64_t each = *size / parts + (*size % parts != 0);
    int64_t start = each * part < *size ? each * part : *size;
    *offset += start;
    *size = *size - start < each ? *size - start : each;
}

void dcp__mesh_box(int n_dims, const int *mesh, const int *axes, int rank, int ndim, const int64_t *extents, int64_t *offsets,
                   int64_t *sizes)
{
    int inner = 1;
    for (int i = 0; i < n_dims; i++) {
        inner *= mesh[i];
    }
    for (int d = 0; d < ndim; d++) {
        offsets[d] = 0;
        sizes[d] = extents[d];
    }
    for (int i = 0; i < n_dims; i++) {
        inner /= mesh[i];
        if (axes[i] >= 0) {
            split(&offsets[axes[i]], &sizes[axes[i]], mesh[i], rank / inner % mesh[i]);
        }
    }
}
