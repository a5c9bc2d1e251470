/* Descriptors of tensors, and what they borrow. */
#include "core.h"

#include <limits.h>
#include <string.h>

/* ---- what is borrowed ---- */

int keep_init(core_keep *k)
{
    *k = (core_keep){.objects = PyList_New(0)};
    return k->objects ? 0 : -1;
}

void keep_reset(core_keep *k)
{
    for (size_t i = 0; i < k->n_buffers; i++) {
        PyBuffer_Release(k->buffers[i]);
        PyMem_Free(k->buffers[i]);
    }
    PyMem_Free(k->buffers);
    Py_CLEAR(k->objects);
    *k = (core_keep){0};
}

int keep_object(core_keep *k, PyObject *object)
{
    return PyList_Append(k->objects, object);
}

/* The view of an object's buffer, released with k. */
static const Py_buffer *keep_buffer(core_keep *k, PyObject *object, int flags)
{
    if (k->n_buffers == k->cap_buffers) {
        size_t cap = k->cap_buffers ? 2 * k->cap_buffers : 16;
        Py_buffer **grown = PyMem_Realloc(k->buffers, cap * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return NULL;
        }
        k->buffers = grown;
        k->cap_buffers = cap;
    }
    Py_buffer *view = PyMem_Malloc(sizeof *view);
    if (!view) {
        PyErr_NoMemory();
        return NULL;
    }
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        PyMem_Free(view);
        return NULL;
    }
    k->buffers[k->n_buffers++] = view;
    return view;
}

int keep_bytes(core_keep *k, PyObject *object, const void **bytes, size_t *len)
{
    const Py_buffer *view = keep_buffer(k, object, PyBUF_SIMPLE);
    if (!view) {
        return -1;
    }
    *bytes = view->buf;
    *len = (size_t)view->len;
    return 0;
}

/* ---- the buffer protocol ---- */

/* Format characters of the struct module, with the native sizes of both sides. */
static dcp_dtype dtype_of_format(const char *format, Py_ssize_t bytes)
{
    static const dcp_dtype is_signed[] = {0, DCP_INT8, DCP_INT16, 0, DCP_INT32, 0, 0, 0, DCP_INT64};
    static const dcp_dtype is_unsigned[] = {0, DCP_UINT8, DCP_UINT16, 0, DCP_UINT32, 0, 0, 0, DCP_UINT64};
    bool is_little = format[0] == '<' || format[0] == '=' || format[0] == '@';
    bool is_big = format[0] == '>' || format[0] == '!';
    const char *c = format + (is_little || is_big);
    bool is_complex = c[0] == 'Z';
    c += is_complex;
    if (c[0] == 0 || c[1] != 0 || bytes < 1 || bytes > 16 || (is_big && bytes > 1)) {
        return DCP_DTYPE_NONE;
    }
    if (is_complex) {
        return c[0] == 'f' ? DCP_COMPLEX64 : c[0] == 'd' ? DCP_COMPLEX128 : DCP_DTYPE_NONE;
    }
    switch (c[0]) {
    case '?': return DCP_BOOL;
    case 'e': return DCP_FLOAT16;
    case 'f': return DCP_FLOAT32;
    case 'd': return DCP_FLOAT64;
    default: break;
    }
    if (bytes <= 8 && strchr("bhilqn", c[0])) {
        return is_signed[bytes];
    }
    return bytes <= 8 && strchr("BHILQN", c[0]) ? is_unsigned[bytes] : DCP_DTYPE_NONE;
}

/* Without strides, as ctypes has it, the elements are dense. */
static bool strides_in_elements(const Py_buffer *view, int64_t *strides)
{
    for (int d = 0; view->strides && d < view->ndim; d++) {
        if (view->strides[d] < 0 || view->strides[d] % view->itemsize != 0) {
            return false;
        }
        strides[d] = view->strides[d] / view->itemsize;
    }
    return true;
}

int tensor_from_buffer(core_keep *k, PyObject *object, bool is_target, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    const Py_buffer *view = keep_buffer(k, object, PyBUF_STRIDES | PyBUF_FORMAT | (is_target ? PyBUF_WRITABLE : 0));
    if (!view) { /* no buffer, or one that cannot be written, or a dtype that buffers do not know */
        if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    dcp_dtype dtype = dtype_of_format(view->format ? view->format : "B", view->itemsize);
    if (dtype == DCP_DTYPE_NONE || view->ndim > DCP_MAX_NDIM || !strides_in_elements(view, numbers + DCP_MAX_NDIM)) {
        return 0;
    }
    for (int d = 0; d < view->ndim; d++) {
        numbers[d] = view->shape[d];
    }
    *out = (dcp_tensor){.dtype = dtype,
                        .ndim = view->ndim,
                        .extents = numbers,
                        .strides = view->strides ? numbers + DCP_MAX_NDIM : NULL,
                        .data = view->buf};
    return 1;
}

/* ---- numbers ---- */

int integers_from(PyObject *sequence, Py_ssize_t n, int64_t *out, const char *what)
{
    PyObject *tuple = PyTuple_Check(sequence) ? Py_NewRef(sequence) : PySequence_Tuple(sequence);
    if (!tuple) {
        return -1;
    }
    if (n >= 0 && PyTuple_Size(tuple) != n) {
        PyErr_Format(PyExc_ValueError, "%s: %zd numbers, expected %zd", what, PyTuple_Size(tuple), n);
        Py_DECREF(tuple);
        return -1;
    }
    n = PyTuple_Size(tuple);
    if (n > DCP_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: %zd dimensions, at most %d are possible", what, n, DCP_MAX_NDIM);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) {
            n = -1;
        }
    }
    Py_DECREF(tuple);
    return (int)n;
}

PyObject *integers_to(const int64_t *numbers, size_t n)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple && i < n; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (!number || PyTuple_SetItem(tuple, (Py_ssize_t)i, number) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

dcp_dtype dtype_from(PyObject *name)
{
    dcp_str text = {0};
    text.ptr = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, (Py_ssize_t *)&text.len) : NULL;
    dcp_dtype dtype = text.ptr ? dcp_dtype_from_name(text) : DCP_DTYPE_NONE;
    if (dtype == DCP_DTYPE_NONE && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "no dtype %R", name);
    }
    return dtype;
}

/* ---- memory ---- */

/* Bytes up to the end of the last element that a tensor touches, from its first one; more than any memory has if they are too
 * many to be counted. */
static long long reach_of(const dcp_tensor *t)
{
    long long dense = 1, last = 0, step, bytes;
    bool is_over = false;
    for (int d = 0; d < t->ndim; d++) {
        if (t->extents[d] == 0) {
            return 0;
        }
        is_over |= __builtin_mul_overflow(dense, t->extents[d], &dense);
        is_over |= t->strides &&
                   (__builtin_mul_overflow(t->extents[d] - 1, t->strides[d], &step) || __builtin_add_overflow(last, step, &last));
    }
    is_over |= __builtin_mul_overflow(t->strides ? last : dense - 1, (long long)dcp_dtype_bytes(t->dtype), &bytes);
    is_over |= __builtin_add_overflow(bytes, (long long)dcp_dtype_bytes(t->dtype), &bytes);
    return is_over ? LLONG_MAX : bytes;
}

int refuse_beyond(const dcp_tensor *t, long long bytes)
{
    long long needed = reach_of(t);
    if (needed <= 0 || needed <= bytes) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "the tensor reaches over %lld bytes of memory, its storage has %lld there", needed,
                 bytes > 0 ? bytes : 0LL);
    return -1;
}

bool is_overlapping(const dcp_tensor *target)
{
    bool has_elements = true, repeats = false;
    for (int d = 0; target->strides && d < target->ndim; d++) {
        has_elements &= target->extents[d] != 0;
        repeats |= target->strides[d] == 0 && target->extents[d] > 1;
    }
    return has_elements && repeats;
}

/* ---- descriptors ---- */

static PyObject *descriptor_item(PyObject *descriptor, Py_ssize_t i)
{
    PyObject *item = PyTuple_GetItem(descriptor, i);
    if (!item && PyErr_ExceptionMatches(PyExc_IndexError)) {
        PyErr_Format(PyExc_ValueError, "descriptor %R is too short", descriptor);
    }
    return item;
}

char descriptor_kind(PyObject *descriptor)
{
    PyObject *kind = PyTuple_Check(descriptor) && PyTuple_Size(descriptor) > 0 ? PyTuple_GetItem(descriptor, 0) : NULL;
    Py_ssize_t len = 0;
    const char *text = kind && PyUnicode_Check(kind) ? PyUnicode_AsUTF8AndSize(kind, &len) : NULL;
    if (!text || len != 1) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "describe() must return a descriptor or None, not %R", descriptor);
        return 0;
    }
    return text[0];
}

/* Item i of a tuple, which may be missing; borrowed. */
static PyObject *optional_item(PyObject *tuple, Py_ssize_t i)
{
    return PyTuple_Size(tuple) > i ? PyTuple_GetItem(tuple, i) : NULL;
}

/* Shape, strides (or None) and address, and how many bytes there are from there on (NULL or None: enough). */
static int parts_from(PyObject *shape, PyObject *strides, PyObject *address, PyObject *bytes, dcp_tensor *out,
                      int64_t numbers[2 * DCP_MAX_NDIM])
{
    out->ndim = integers_from(shape, -1, numbers, "shape");
    if (out->ndim < 0) {
        return -1;
    }
    out->extents = numbers;
    if (strides != Py_None) {
        if (integers_from(strides, out->ndim, numbers + DCP_MAX_NDIM, "strides") < 0) {
            return -1;
        }
        out->strides = numbers + DCP_MAX_NDIM;
    }
    out->data = PyLong_AsVoidPtr(address);
    if (!out->data && PyErr_Occurred()) {
        return -1;
    }
    long long there = bytes && bytes != Py_None ? PyLong_AsLongLong(bytes) : LLONG_MAX;
    return PyErr_Occurred() ? -1 : refuse_beyond(out, there);
}

static int plain_from(core_keep *k, PyObject *d, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    PyObject *dtype = descriptor_item(d, 1), *shape = descriptor_item(d, 2), *strides = descriptor_item(d, 3);
    PyObject *address = descriptor_item(d, 4);
    *out = (dcp_tensor){.dtype = dtype && shape && strides && address ? dtype_from(dtype) : DCP_DTYPE_NONE};
    if (out->dtype == DCP_DTYPE_NONE || keep_object(k, d) < 0 || device_from(optional_item(d, 6), &out->device) < 0) {
        return -1;
    }
    return parts_from(shape, strides, address, optional_item(d, 7), out, numbers);
}

int tensor_from_descriptor(core_keep *k, PyObject *d, bool is_target, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM])
{
    int found;
    PyObject *object;
    switch (descriptor_kind(d)) {
    case 't': return plain_from(k, d, out, numbers);
    case 'b':
    case 'd':
        object = descriptor_item(d, 1);
        if (!object) {
            return -1;
        }
        found = descriptor_kind(d) == 'b' ? tensor_from_buffer(k, object, is_target, out, numbers)
                                          : tensor_from_dlpack(k, object, is_target, out, numbers);
        if (found == 0) {
            PyErr_Format(PyExc_ValueError, "%R: its memory, dtype or strides cannot be used%s", (PyObject *)Py_TYPE(object),
                         is_target ? ", or not be written" : "");
        }
        return found > 0 ? 0 : -1;
    case 0: return -1;
    default: PyErr_Format(PyExc_ValueError, "no tensor descriptor: %R", d); return -1;
    }
}

static dcp_value *raise_status(const dcp_error *err)
{
    errors_raise(err, NULL, NULL);
    return NULL;
}

/* A chunk (offsets, shape, strides or None, address) at its place in the arrays. */
static int chunk_from(PyObject *entry, dcp_dtype dtype, int ndim, int64_t *numbers, dcp_tensor *chunk, dcp_box *box)
{
    PyObject *offsets = PyTuple_Check(entry) ? descriptor_item(entry, 0) : NULL;
    PyObject *shape = offsets ? descriptor_item(entry, 1) : NULL, *strides = shape ? descriptor_item(entry, 2) : NULL;
    PyObject *address = strides ? descriptor_item(entry, 3) : NULL;
    if (!address) {
        return PyErr_Occurred() ? -1 : (PyErr_SetString(PyExc_TypeError, "a chunk must be a tuple"), -1);
    }
    *chunk = (dcp_tensor){.dtype = dtype};
    if (device_from(optional_item(entry, 4), &chunk->device) < 0 ||
        parts_from(shape, strides, address, optional_item(entry, 5), chunk, numbers) < 0 ||
        integers_from(offsets, ndim, numbers + 2 * DCP_MAX_NDIM, "offsets of a chunk") < 0) {
        return -1;
    }
    if (chunk->ndim != ndim) {
        PyErr_Format(PyExc_ValueError, "a chunk of %d dimensions in a tensor of %d", chunk->ndim, ndim);
        return -1;
    }
    *box = (dcp_box){numbers + 2 * DCP_MAX_NDIM, numbers};
    return 0;
}

/* ("s", dtype, global shape, [chunk, ...], keepalive) */
static dcp_value *sharded_from(core_keep *k, PyObject *d)
{
    int64_t extents[DCP_MAX_NDIM];
    PyObject *name = descriptor_item(d, 1), *shape = descriptor_item(d, 2), *list = descriptor_item(d, 3);
    dcp_dtype dtype = name && shape && list ? dtype_from(name) : DCP_DTYPE_NONE;
    int ndim = dtype != DCP_DTYPE_NONE ? integers_from(shape, -1, extents, "global shape") : -1;
    PyObject *chunks = ndim >= 0 && keep_object(k, d) == 0 ? PySequence_Tuple(list) : NULL;
    if (!chunks) {
        return NULL;
    }
    size_t n = (size_t)PyTuple_Size(chunks);
    dcp_tensor *tensors = PyMem_Calloc(n + 1, sizeof *tensors);
    dcp_box *boxes = PyMem_Calloc(n + 1, sizeof *boxes);
    int64_t *numbers = PyMem_Calloc(n + 1, 3 * DCP_MAX_NDIM * sizeof *numbers);
    dcp_value *v = NULL;
    dcp_error err = DCP_ERROR_INIT;
    size_t done = 0;
    if (!tensors || !boxes || !numbers) {
        PyErr_NoMemory();
    } else {
        while (done < n && chunk_from(PyTuple_GetItem(chunks, (Py_ssize_t)done), dtype, ndim, numbers + 3 * DCP_MAX_NDIM * done,
                                      &tensors[done], &boxes[done]) == 0) {
            done++;
        }
        if (done == n && dcp_sharded_create(NULL, dtype, ndim, extents, n, tensors, boxes, &v, &err) != DCP_OK) {
            raise_status(&err);
        }
    }
    PyMem_Free(tensors);
    PyMem_Free(boxes);
    PyMem_Free(numbers);
    Py_DECREF(chunks);
    return v;
}

dcp_value *value_from_descriptor(core_keep *k, PyObject *d, bool is_target)
{
    int64_t numbers[2 * DCP_MAX_NDIM];
    dcp_tensor t;
    dcp_value *v;
    dcp_error err = DCP_ERROR_INIT;
    char kind = descriptor_kind(d);
    if (kind == 's') {
        return sharded_from(k, d);
    }
    if (kind == 0 || tensor_from_descriptor(k, d, is_target, &t, numbers) < 0) {
        return NULL;
    }
    return dcp_tensor_create(NULL, &t, &v, &err) == DCP_OK ? v : raise_status(&err);
}
