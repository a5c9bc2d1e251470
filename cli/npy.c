#include "npy.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *npy_descr(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_FLOAT16: return "<f2";
    case DCP_FLOAT32: return "<f4";
    case DCP_FLOAT64: return "<f8";
    case DCP_INT8: return "|i1";
    case DCP_INT16: return "<i2";
    case DCP_INT32: return "<i4";
    case DCP_INT64: return "<i8";
    case DCP_UINT8: return "|u1";
    case DCP_UINT16: return "<u2";
    case DCP_UINT32: return "<u4";
    case DCP_UINT64: return "<u8";
    case DCP_BOOL: return "|b1";
    case DCP_COMPLEX64: return "<c8";
    case DCP_COMPLEX128: return "<c16";
    default: return NULL;
    }
}

const char *npy_descr_bits(dcp_dtype dtype)
{
    switch (dcp_dtype_bytes(dtype)) {
    case 1: return "|u1";
    case 2: return "<u2";
    case 4: return "<u4";
    case 8: return "<u8";
    default: return NULL;
    }
}

/* A tuple as Python writes it: one element has a comma behind it. At most 64 dimensions of 21 characters fit any header. */
static size_t put_shape(char *out, int ndim, const int64_t *shape)
{
    size_t n = 0;
    for (int i = 0; i < ndim; i++) {
        n += (size_t)sprintf(out + n, "%s%" PRId64, i ? ", " : "", shape[i]);
    }
    n += (size_t)sprintf(out + n, "%s", ndim == 1 ? "," : "");
    return n;
}

size_t npy_header(const char *descr, int ndim, const int64_t *shape, char out[NPY_HEADER_BYTES])
{
    static const char magic[] = "\x93NUMPY\x01\x00";
    const size_t text_at = 10; /* magic, version, two bytes of length */
    size_t n = text_at;
    memcpy(out, magic, 8);
    n += (size_t)sprintf(out + n, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
    n += put_shape(out + n, ndim, shape);
    n += (size_t)sprintf(out + n, "), }");
    size_t len = (n + 1 + 63) / 64 * 64;
    memset(out + n, ' ', len - n);
    out[len - 1] = '\n';
    out[8] = (char)((len - text_at) & 0xff);
    out[9] = (char)((len - text_at) >> 8);
    return len;
}
