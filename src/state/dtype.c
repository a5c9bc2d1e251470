/* The table of element types (formats.md 3.9). */
#include <string.h>

#include "dcp/state.h"

static const struct {
    const char *name;
    uint8_t bytes;
    uint16_t release; /* first PyTorch that loads it, major * 100 + minor */
} table[DCP_DTYPE_COUNT] = {
    [DCP_FLOAT32] = {"float32", 4, 201},
    [DCP_FLOAT64] = {"float64", 8, 201},
    [DCP_FLOAT16] = {"float16", 2, 201},
    [DCP_BFLOAT16] = {"bfloat16", 2, 201},
    [DCP_INT8] = {"int8", 1, 201},
    [DCP_UINT8] = {"uint8", 1, 201},
    [DCP_INT16] = {"int16", 2, 201},
    [DCP_INT32] = {"int32", 4, 201},
    [DCP_INT64] = {"int64", 8, 201},
    [DCP_BOOL] = {"bool", 1, 201},
    [DCP_COMPLEX64] = {"complex64", 8, 201},
    [DCP_COMPLEX128] = {"complex128", 16, 201},
    [DCP_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, 202},
    [DCP_FLOAT8_E5M2] = {"float8_e5m2", 1, 202},
    [DCP_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1, 203},
    [DCP_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1, 203},
    [DCP_COMPLEX32] = {"complex32", 4, 203},
    [DCP_UINT16] = {"uint16", 2, 206},
    [DCP_UINT32] = {"uint32", 4, 206},
    [DCP_UINT64] = {"uint64", 8, 206},
    [DCP_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", 1, 207},
    [DCP_FLOAT4_E2M1FN_X2] = {"float4_e2m1fn_x2", 1, 210},
    [DCP_BCOMPLEX32] = {"bcomplex32", 4, 214},
};

static bool is_known(dcp_dtype dtype)
{
    return (unsigned)dtype < DCP_DTYPE_COUNT && table[dtype].name;
}

const char *dcp_dtype_name(dcp_dtype dtype)
{
    return is_known(dtype) ? table[dtype].name : "?";
}

size_t dcp_dtype_bytes(dcp_dtype dtype)
{
    return is_known(dtype) ? table[dtype].bytes : 0;
}

int dcp_dtype_release(dcp_dtype dtype)
{
    return is_known(dtype) ? table[dtype].release : 0;
}

dcp_dtype dcp_dtype_from_name(dcp_str name)
{
    for (int i = DCP_DTYPE_NONE + 1; i < DCP_DTYPE_COUNT; i++) {
        if (strlen(table[i].name) == name.len && memcmp(table[i].name, name.ptr, name.len) == 0) {
            return (dcp_dtype)i;
        }
    }
    return DCP_DTYPE_NONE;
}
