/*
 * slice.h - NumPy's basic slicing in an argument: "3", "1:5", ":,2:4", "...,-1", "::2".
 *
 * As in NumPy, slices are clipped to the tensor and integers outside it are errors; an integer drops its dimension.
 * Steps are positive.
 */
#ifndef DCP_CLI_SLICE_H
#define DCP_CLI_SLICE_H

#include <dcp/state.h>

typedef struct slice_dim {
    int64_t start, step, count; /* elements start, start + step, .., count of them; step >= 1 */
    bool is_dropped;            /* an integer stood here: count is 1, and the result lacks the dimension */
} slice_dim;

typedef struct slice {
    int ndim; /* of the tensor */
    slice_dim dims[DCP_MAX_NDIM];
} slice;

#define SLICE_MESSAGE_BYTES 256

/* text NULL: everything. False: message says why. */
bool slice_parse(const char *text, int ndim, const int64_t *extents, slice *out, char message[SLICE_MESSAGE_BYTES]);
/* Shape of the result; returns its number of dimensions. */
int slice_shape(const slice *s, int64_t shape[DCP_MAX_NDIM]);

#endif
