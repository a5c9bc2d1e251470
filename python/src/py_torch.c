/* The fast way into torch.Tensor: its attributes, read here. Nothing of torch is imported or linked. */
#include <string.h>

#include "core.h"

/* torch.dtype objects that have been seen; there are some thirty, and they live as long as torch. */
#define MAX_KNOWN 64
static struct {
    PyObject *object;
    dcp_dtype dtype;
} known[MAX_KNOWN];
static size_t n_known;
static PyObject *strided; /* torch.strided, once it has been seen */

static int ask_dtype(PyObject *object, dcp_dtype *out)
{
    dcp_str name = {0};
    PyObject *text = PyObject_Str(object);
    name.ptr = text ? PyUnicode_AsUTF8AndSize(text, (Py_ssize_t *)&name.len) : NULL;
    if (!name.ptr) {
        Py_XDECREF(text);
        return -1;
    }
    bool is_torch = name.len > 6 && memcmp(name.ptr, "torch.", 6) == 0;
    *out = is_torch ? dcp_dtype_from_name((dcp_str){name.ptr + 6, name.len - 6}) : DCP_DTYPE_NONE;
    Py_DECREF(text);
    if (n_known < MAX_KNOWN) {
        known[n_known].object = Py_NewRef(object);
        known[n_known++].dtype = *out;
    }
    return 0;
}

static int dtype_of(PyObject *tensor, dcp_dtype *out)
{
    PyObject *object = PyObject_GetAttr(tensor, names.dtype);
    if (!object) {
        return -1;
    }
    for (size_t i = 0; i < n_known; i++) {
        if (known[i].object == object) {
            *out = known[i].dtype;
            Py_DECREF(object);
            return 0;
        }
    }
    int result = ask_dtype(object, out);
    Py_DECREF(object);
    return result;
}

/* 1 or 0, -1 with an exception. */
static int has_flag(PyObject *tensor, PyObject *attribute)
{
    PyObject *flag = PyObject_GetAttr(tensor, attribute);
    int result = flag ? flag == Py_True : -1;
    Py_XDECREF(flag);
    return result;
}

static int answers(PyObject *tensor, PyObject *method)
{
    PyObject *flag = PyObject_CallMethodObjArgs(tensor, method, NULL);
    int result = flag ? flag == Py_True : -1;
    Py_XDECREF(flag);
    return result;
}

static int is_strided(PyObject *tensor)
{
    PyObject *layout = PyObject_GetAttr(tensor, names.layout);
    if (!layout) {
        return -1;
    }
    if (!strided) {
        PyObject *text = PyObject_Str(layout);
        if (text && PyUnicode_CompareWithASCIIString(text, "torch.strided") == 0) {
            strided = Py_NewRef(layout);
        }
        Py_XDECREF(text);
    }
    int result = layout == strided;
    Py_DECREF(layout);
    return PyErr_Occurred() ? -1 : result;
}

/* Host memory as it lies: dense, of a known dtype, without a conjugation or negation that is still to be done. */
static int is_plain(PyObject *tensor, dcp_dtype *dtype)
{
    int result = has_flag(tensor, names.is_cpu);
    if (result > 0) {
        result = is_strided(tensor);
    }
    if (result > 0) {
        result = dtype_of(tensor, dtype) < 0 ? -1 : *dtype != DCP_DTYPE_NONE;
    }
    if (result > 0) {
        int is_neg = answers(tensor, names.is_neg);
        result = is_neg < 0 ? -1 : !is_neg;
    }
    if (result > 0 &&
        (*dtype == DCP_COMPLEX32 || *dtype == DCP_COMPLEX64 || *dtype == DCP_COMPLEX128 || *dtype == DCP_BCOMPLEX32)) {
        int is_conj = answers(tensor, names.is_conj);
        result = is_conj < 0 ? -1 : !is_conj;
    }
    return result;
}

static int shape_of(PyObject *tensor, dcp_tensor *out, int64_t *numbers)
{
    PyObject *shape = PyObject_GetAttr(tensor, names.shape);
    out->ndim = shape ? integers_from(shape, -1, numbers, "shape") : -1;
    Py_XDECREF(shape);
    int is_dense = out->ndim >= 0 ? answers(tensor, names.is_contiguous) : -1;
    if (is_dense != 0) {
        return is_dense < 0 ? -1 : 0;
    }
    PyObject *strides = PyObject_CallMethodObjArgs(tensor, names.stride, NULL);
    int n = strides ? integers_from(strides, out->ndim, numbers + DCP_MAX_NDIM, "strides") : -1;
    Py_XDECREF(strides);
    out->strides = numbers + DCP_MAX_NDIM;
    return n < 0 ? -1 : 0;
}

/* The memory, kept: other threads may give the tensor another one meanwhile (`p.data = ...`). */
static PyObject *keep_storage(core_keep *k, PyObject *tensor)
{
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, names.untyped_storage, NULL);
    if (storage && keep_object(k, storage) < 0) {
        Py_CLEAR(storage);
    }
    Py_XDECREF(storage);
    return storage; /* the list has it */
}

/* What a method without arguments returns, an int; -1 with an exception. */
static long long number_of(PyObject *object, PyObject *method)
{
    PyObject *number = PyObject_CallMethodObjArgs(object, method, NULL);
    long long result = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return result;
}

/* Where in its storage a tensor begins. */
static int locate_in(PyObject *tensor, PyObject *storage, dcp_tensor *out)
{
    long long elems = number_of(tensor, names.storage_offset), nbytes = elems < 0 ? -1 : number_of(storage, names.nbytes);
    long long offset = elems * (long long)dcp_dtype_bytes(out->dtype);
    PyObject *address = nbytes < 0 ? NULL : PyObject_CallMethodObjArgs(storage, names.data_ptr, NULL);
    char *start = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    out->data = start ? start + offset : NULL;
    return PyErr_Occurred() ? -1 : refuse_beyond(out, nbytes - offset);
}

int tensor_from_torch(core_keep *k, PyObject *tensor, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    *out = (dcp_tensor){.extents = numbers};
    int result = is_plain(tensor, &out->dtype);
    if (result <= 0) {
        return result;
    }
    PyObject *storage = keep_storage(k, tensor);
    return storage && shape_of(tensor, out, numbers) == 0 && locate_in(tensor, storage, out) == 0 ? 1 : -1;
}
