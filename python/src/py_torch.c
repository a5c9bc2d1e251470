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

/* Another tensor of the same memory, kept: other threads may give this one another memory meanwhile (`p.data = ...`). */
static PyObject *keep_alias(core_keep *k, PyObject *tensor)
{
    PyObject *alias = PyObject_CallMethodObjArgs(tensor, names.detach, NULL);
    if (alias && keep_object(k, alias) < 0) {
        Py_CLEAR(alias);
    }
    Py_XDECREF(alias);
    return alias; /* the list has it */
}

int tensor_from_torch(core_keep *k, PyObject *tensor, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    *out = (dcp_tensor){.extents = numbers};
    int result = is_plain(tensor, &out->dtype);
    if (result <= 0) {
        return result;
    }
    PyObject *alias = keep_alias(k, tensor);
    if (!alias || shape_of(alias, out, numbers) < 0) {
        return -1;
    }
    PyObject *address = PyObject_CallMethodObjArgs(alias, names.data_ptr, NULL);
    out->data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return PyErr_Occurred() ? -1 : 1;
}
