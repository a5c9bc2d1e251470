/* Tensors in DLPack capsules. Source: the DLPack specification, 1.1 (dlpack.h), and the Python specification that goes with it. A
 * capsule that nobody consumes frees its tensor itself, so one is borrowed by holding it. */
#include <string.h>

#include "core.h"

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides may be NULL: row-major */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_versioned {
    struct {
        uint32_t major, minor;
    } version;
    void *manager_ctx;
    void (*deleter)(struct dl_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

enum { DL_CPU = 1, DL_CUDA_HOST = 3, DL_ROCM_HOST = 11 };
enum { DL_READ_ONLY = 1 };

typedef struct known_dtype {
    uint8_t code, bits;
    dcp_dtype dtype;
} known_dtype;

static dcp_dtype dtype_of(const dl_tensor *t)
{
    static const known_dtype known[] = {
        {0, 8, DCP_INT8},
        {0, 16, DCP_INT16},
        {0, 32, DCP_INT32},
        {0, 64, DCP_INT64},
        {1, 8, DCP_UINT8},
        {1, 16, DCP_UINT16},
        {1, 32, DCP_UINT32},
        {1, 64, DCP_UINT64},
        {2, 16, DCP_FLOAT16},
        {2, 32, DCP_FLOAT32},
        {2, 64, DCP_FLOAT64},
        {4, 16, DCP_BFLOAT16},
        {5, 32, DCP_COMPLEX32},
        {5, 64, DCP_COMPLEX64},
        {5, 128, DCP_COMPLEX128},
        {6, 8, DCP_BOOL},
        {10, 8, DCP_FLOAT8_E4M3FN},
        {11, 8, DCP_FLOAT8_E4M3FNUZ},
        {12, 8, DCP_FLOAT8_E5M2},
        {13, 8, DCP_FLOAT8_E5M2FNUZ},
        {14, 8, DCP_FLOAT8_E8M0FNU},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (known[i].code == t->dtype.code && known[i].bits == t->dtype.bits && t->dtype.lanes == 1) {
            return known[i].dtype;
        }
    }
    return DCP_DTYPE_NONE;
}

static const dl_tensor *tensor_in(PyObject *capsule, bool *is_read_only)
{
    *is_read_only = false;
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        return PyCapsule_GetPointer(capsule, "dltensor");
    }
    const dl_versioned *v = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (!v) {
        return NULL;
    }
    if (v->version.major != 1) {
        PyErr_Format(PyExc_BufferError, "DLPack version %u is not known", v->version.major);
        return NULL;
    }
    *is_read_only = (v->flags & DL_READ_ONLY) != 0;
    return &v->tensor;
}

int tensor_from_dlpack(core_keep *k, PyObject *capsule, bool is_target, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    bool is_read_only;
    const dl_tensor *t = tensor_in(capsule, &is_read_only);
    if (!t || keep_object(k, capsule) < 0) {
        return -1;
    }
    bool is_host = t->device.type == DL_CPU || t->device.type == DL_CUDA_HOST || t->device.type == DL_ROCM_HOST;
    if (!is_host || t->ndim < 0 || t->ndim > DCP_MAX_NDIM || (is_target && is_read_only)) {
        return 0;
    }
    *out = (dcp_tensor){.dtype = dtype_of(t), .ndim = t->ndim, .extents = numbers};
    memcpy(numbers, t->shape, (size_t)t->ndim * sizeof *numbers);
    if (t->strides) {
        memcpy(numbers + DCP_MAX_NDIM, t->strides, (size_t)t->ndim * sizeof *numbers);
        out->strides = numbers + DCP_MAX_NDIM;
    }
    for (int d = 0; t->strides && d < t->ndim; d++) {
        if (t->strides[d] < 0) {
            return 0;
        }
    }
    out->data = t->data ? (char *)t->data + t->byte_offset : NULL;
    return out->dtype != DCP_DTYPE_NONE;
}
