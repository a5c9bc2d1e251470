/* Arithmetic on extents and strides. */
#include <stdio.h>

#include "base/checked.h"
#include "state/strided.h"

dcp_tensor dcp_tensor_make(dcp_dtype dtype, int ndim, const int64_t *extents, void *data)
{
    return (dcp_tensor){.dtype = dtype, .ndim = ndim, .extents = extents, .data = data};
}

dcp_status dcp_tensor_elems(const dcp_tensor *t, int64_t *out, dcp_error *err)
{
    if (!t || t->ndim < 0 || t->ndim > DCP_MAX_NDIM || (t->ndim && !t->extents)) {
        return dcp__fail(err, DCP_ARG, "tensor: %d dimensions, expected 0 to %d, with extents", t ? t->ndim : -1, DCP_MAX_NDIM);
    }
    for (int i = 0; i < t->ndim; i++) {
        if (t->extents[i] < 0) {
            return dcp__fail(err, DCP_ARG, "tensor: extent %lld of dimension %d is negative", (long long)t->extents[i], i);
        }
    }
    if (!dcp__elems(t->ndim, t->extents, out)) {
        return dcp__fail(err, DCP_LIMIT, "tensor: the number of elements exceeds 63 bits");
    }
    return DCP_OK;
}

void dcp__row_major(int ndim, const int64_t *extents, int64_t *strides)
{
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = stride;
        stride *= extents[i] > 1 ? extents[i] : 1;
    }
}

static bool has_no_elements(int ndim, const int64_t *extents)
{
    for (int i = 0; i < ndim; i++) {
        if (extents[i] == 0) {
            return true;
        }
    }
    return false;
}

bool dcp__is_row_major(int ndim, const int64_t *extents, const int64_t *strides)
{
    if (!strides || has_no_elements(ndim, extents)) {
        return true;
    }
    int64_t expected = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        if (extents[i] != 1) {
            if (strides[i] != expected) {
                return false;
            }
            expected *= extents[i];
        }
    }
    return true;
}

int64_t dcp__element_at(int ndim, const int64_t *index, const int64_t *strides)
{
    int64_t at = 0;
    for (int d = 0; d < ndim; d++) {
        at += index[d] * strides[d];
    }
    return at;
}

bool dcp__elems(int ndim, const int64_t *extents, int64_t *out)
{
    int64_t n = 1;
    bool overflows = false;
    for (int i = 0; i < ndim; i++) {
        if (extents[i] < 0) {
            return false;
        }
        overflows |= !dcp__mul_i64(n, extents[i], &n);
    }
    /* A zero anywhere makes the product zero, whatever the others are. */
    bool is_empty = has_no_elements(ndim, extents);
    if (overflows && !is_empty) {
        return false;
    }
    *out = is_empty ? 0 : n;
    return true;
}

int64_t dcp__box_at(int ndim, const int64_t *extents, int64_t start, int64_t left, int64_t *offsets, int64_t *sizes)
{
    int64_t strides[DCP_MAX_NDIM], elems = 1;
    dcp__row_major(ndim, extents, strides);
    int cut = ndim - 1;
    while (cut > 0 && start % strides[cut - 1] == 0 && strides[cut - 1] <= left) {
        cut--;
    }
    for (int d = 0; d < ndim; d++) {
        offsets[d] = start / strides[d];
        start %= strides[d];
        sizes[d] = d < cut ? 1 : extents[d] - offsets[d];
        if (d == cut && sizes[d] > left / strides[d]) {
            sizes[d] = left / strides[d];
        }
        elems *= sizes[d];
    }
    return elems;
}

bool dcp__span_elems(int ndim, const int64_t *extents, const int64_t *strides, int64_t *out)
{
    if (!strides) {
        return dcp__elems(ndim, extents, out);
    }
    int64_t last = 0;
    for (int i = 0; i < ndim; i++) {
        int64_t reach;
        if (extents[i] < 0 || strides[i] < 0) {
            return false;
        }
        if (extents[i] > 1 && (!dcp__mul_i64(extents[i] - 1, strides[i], &reach) || !dcp__add_i64(last, reach, &last))) {
            return false;
        }
    }
    if (has_no_elements(ndim, extents)) {
        *out = 0;
        return true;
    }
    return dcp__add_i64(last, 1, out);
}

dcp__printable dcp__print_shape(int ndim, const int64_t *extents)
{
    dcp__printable p = {"["};
    size_t at = 1;
    for (int d = 0; d < ndim && at < sizeof p.text - 26; d++) {
        at += (size_t)snprintf(p.text + at, sizeof p.text - at, "%s%lld", d ? ", " : "", (long long)extents[d]);
    }
    snprintf(p.text + at, sizeof p.text - at, "]");
    return p;
}
