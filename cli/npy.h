/*
 * npy.h - NumPy's file format, version 1.0.
 * Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
 */
#ifndef DCP_CLI_NPY_H
#define DCP_CLI_NPY_H

#include <dcp/state.h>

/* NumPy's descriptor of a dtype, "<f4"; NULL if NumPy has no such type (bfloat16, the 8-bit floats, ..). */
const char *npy_descr(dcp_dtype dtype);
/* The unsigned integer of the same width, "<u2"; NULL if there is none. */
const char *npy_descr_bits(dcp_dtype dtype);

#define NPY_HEADER_BYTES 4096

/* The header in front of row-major data; returns its length, a multiple of 64. */
size_t npy_header(const char *descr, int ndim, const int64_t *shape, char out[NPY_HEADER_BYTES]);

#endif
