/* Values to Python's objects. */
#include <string.h>

#include "core.h"

/* ---- memory of tensors ---- */

/* Owns a tensor value and shows its bytes. */
typedef struct memory {
    PyObject_HEAD dcp_value *value;
    PyObject *owner;
    Py_ssize_t bytes;
} memory;

static PyTypeObject *memory_type;

static int memory_get(PyObject *self, Py_buffer *view, int flags)
{
    memory *m = (memory *)self;
    return PyBuffer_FillInfo(view, self, dcp_value_tensor(m->value)->data, m->bytes, 0, flags);
}

static Py_ssize_t memory_length(PyObject *self)
{
    return ((memory *)self)->bytes;
}

static void memory_free(PyObject *self)
{
    memory *m = (memory *)self;
    dcp_value_free(m->value);
    Py_XDECREF(m->owner);
    object_free(self);
}

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "Memory of a tensor that was read: a writable buffer of bytes."},
    {Py_tp_dealloc, memory_free},
    {Py_bf_getbuffer, memory_get},
    {Py_sq_length, memory_length},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "libdcp._core.Memory",
    .basicsize = sizeof(memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = memory_slots,
};

int memory_init(PyObject *module)
{
    memory_type = (PyTypeObject *)PyType_FromSpec(&memory_spec);
    return memory_type ? PyModule_AddObjectRef(module, "Memory", (PyObject *)memory_type) : -1;
}

static PyObject *memory_of(dcp_value *v, PyObject *owner)
{
    int64_t elems = 0;
    const dcp_tensor *t = dcp_value_tensor(v);
    memory *m = dcp_tensor_elems(t, &elems, NULL) == DCP_OK ? object_new(memory_type) : NULL;
    if (m) {
        m->value = dcp_value_retain(v);
        m->owner = Py_XNewRef(owner);
        m->bytes = (Py_ssize_t)elems * (Py_ssize_t)dcp_dtype_bytes(t->dtype);
    }
    return (PyObject *)m;
}

/* ---- shared values stay shared ---- */

typedef struct pair {
    const dcp_value *value;
    PyObject *object; /* held */
} pair;

typedef struct writer {
    PyObject *tensor, *opaque, *owner;
    pair *pairs; /* open addressing */
    size_t n_pairs, n_slots;
} writer;

static PyObject *convert(writer *w, dcp_value *v);

static pair *slot_of(pair *pairs, size_t n_slots, const dcp_value *v)
{
    size_t i = ((uintptr_t)v >> 4) * 0x9E3779B97F4A7C15u >> 20;
    for (;; i++) {
        pair *p = &pairs[i & (n_slots - 1)];
        if (!p->value || p->value == v) {
            return p;
        }
    }
}

static int grow(writer *w)
{
    size_t n = w->n_slots ? 2 * w->n_slots : 32;
    pair *pairs = PyMem_Calloc(n, sizeof *pairs);
    if (!pairs) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < w->n_slots; i++) {
        if (w->pairs[i].value) {
            *slot_of(pairs, n, w->pairs[i].value) = w->pairs[i];
        }
    }
    PyMem_Free(w->pairs);
    w->pairs = pairs;
    w->n_slots = n;
    return 0;
}

/* Steals and returns object, NULL if that fails. */
static PyObject *remember(writer *w, const dcp_value *v, PyObject *object)
{
    if (object && 2 * w->n_pairs >= w->n_slots && grow(w) < 0) {
        Py_CLEAR(object);
    }
    if (object) {
        *slot_of(w->pairs, w->n_slots, v) = (pair){v, Py_NewRef(object)};
        w->n_pairs++;
    }
    return object;
}

/* ---- scalars ---- */

PyObject *str_to_python(dcp_str s)
{
    return PyUnicode_DecodeUTF8(s.ptr ? s.ptr : "", (Py_ssize_t)s.len, "surrogatepass");
}

static PyObject *bigint_to_python(const dcp_value *v)
{
    dcp_str bytes = dcp_value_bigint(v);
    PyObject *empty = PyTuple_New(0), *function = PyObject_GetAttr((PyObject *)&PyLong_Type, names.from_bytes), *number = NULL;
    PyObject *kwargs =
        Py_BuildValue("{s:y#,s:s,s:O}", "bytes", bytes.ptr, (Py_ssize_t)bytes.len, "byteorder", "little", "signed", Py_True);
    if (empty && function && kwargs) {
        number = PyObject_Call(function, empty, kwargs);
    }
    Py_XDECREF(empty);
    Py_XDECREF(function);
    Py_XDECREF(kwargs);
    return number;
}

static PyObject *int_to_python(const dcp_value *v)
{
    int64_t i;
    return dcp_value_int(v, &i) ? PyLong_FromLongLong(i) : bigint_to_python(v);
}

/* ---- what Python has no type of its own for ---- */

static PyObject *opaque_to_python(const writer *w, const char *kind, dcp_str text)
{
    PyObject *name = w->opaque ? str_to_python(text) : NULL;
    PyObject *object = name ? PyObject_CallFunction(w->opaque, "sO", kind, name) : NULL;
    Py_XDECREF(name);
    return object;
}

static PyObject *tensor_to_python(writer *w, dcp_value *v)
{
    const dcp_tensor *t = dcp_value_tensor(v);
    if (!w->tensor) {
        return NULL;
    }
    PyObject *shape = integers_to(t->extents, (size_t)t->ndim);
    PyObject *data = !shape ? NULL : t->data ? memory_of(v, w->owner) : Py_NewRef(Py_None);
    PyObject *object = data ? PyObject_CallFunction(w->tensor, "sOO", dcp_dtype_name(t->dtype), shape, data) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(data);
    return object ? remember(w, v, object) : NULL;
}

/* ---- containers ---- */

static PyObject *tuple_of_elements(writer *w, dcp_value *v)
{
    size_t n = dcp_value_count(v);
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple && i < n; i++) {
        PyObject *element = convert(w, dcp_value_at(v, i));
        if (!element || PyTuple_SetItem(tuple, (Py_ssize_t)i, element) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

static PyObject *seq_to_python(writer *w, dcp_value *v)
{
    PyObject *elements = tuple_of_elements(w, v), *object = NULL;
    if (elements) {
        switch (dcp_value_kind(v)) {
        case DCP_KIND_LIST: object = PySequence_List(elements); break;
        case DCP_KIND_SET: object = PySet_New(elements); break;
        case DCP_KIND_FROZENSET: object = PyFrozenSet_New(elements); break;
        default: object = Py_NewRef(elements); break;
        }
    }
    Py_XDECREF(elements);
    return remember(w, v, object);
}

static PyObject *key_to_python(dcp_key key)
{
    return key.is_int ? PyLong_FromLongLong(key.integer) : str_to_python(key.string);
}

static PyObject *dict_to_python(writer *w, dcp_value *v)
{
    bool is_ordered = dcp_value_kind(v) == DCP_KIND_ORDERED_DICT;
    PyObject *dict = is_ordered ? PyObject_CallNoArgs((PyObject *)names.ordered_dict) : PyDict_New();
    for (size_t i = 0; dict && i < dcp_value_count(v); i++) {
        PyObject *key = key_to_python(dcp_dict_key(v, i)), *value = key ? convert(w, dcp_value_at(v, i)) : NULL;
        if (!value || PyObject_SetItem(dict, key, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return remember(w, v, dict);
}

/* ---- everything ---- */

static PyObject *scalar_to_python(dcp_value *v)
{
    dcp_str s = dcp_value_str(v);
    switch (dcp_value_kind(v)) {
    case DCP_KIND_NONE: return Py_NewRef(Py_None);
    case DCP_KIND_BOOL: return PyBool_FromLong(dcp_value_bool(v));
    case DCP_KIND_INT: return int_to_python(v);
    case DCP_KIND_FLOAT: return PyFloat_FromDouble(dcp_value_float(v));
    case DCP_KIND_COMPLEX: return PyComplex_FromDoubles(dcp_value_float(v), dcp_value_imag(v));
    case DCP_KIND_STR: return str_to_python(s);
    default: return PyBytes_FromStringAndSize(s.ptr, (Py_ssize_t)s.len);
    }
}

static PyObject *convert_new(writer *w, dcp_value *v)
{
    dcp_str s = dcp_value_str(v);
    switch (dcp_value_kind(v)) {
    case DCP_KIND_BYTEARRAY: return remember(w, v, PyByteArray_FromStringAndSize(s.ptr, (Py_ssize_t)s.len));
    case DCP_KIND_LIST:
    case DCP_KIND_TUPLE:
    case DCP_KIND_SET:
    case DCP_KIND_FROZENSET: return seq_to_python(w, v);
    case DCP_KIND_SIZE: return w->opaque ? seq_to_python(w, v) : NULL;
    case DCP_KIND_DICT:
    case DCP_KIND_ORDERED_DICT: return dict_to_python(w, v);
    case DCP_KIND_DTYPE: return opaque_to_python(w, "torch.dtype", dcp_str_of(dcp_dtype_name(dcp_value_dtype(v))));
    case DCP_KIND_DEVICE: return opaque_to_python(w, "torch.device", s);
    case DCP_KIND_TENSOR: return tensor_to_python(w, v);
    case DCP_KIND_OPAQUE: return opaque_to_python(w, "object", dcp_opaque_class(v));
    default: return scalar_to_python(v);
    }
}

static PyObject *convert(writer *w, dcp_value *v)
{
    pair *seen = w->n_pairs ? slot_of(w->pairs, w->n_slots, v) : NULL;
    if (seen && seen->value) {
        return Py_NewRef(seen->object);
    }
    return convert_new(w, v);
}

PyObject *value_to_python(dcp_value *v, PyObject *tensor, PyObject *opaque, PyObject *owner)
{
    writer w = {.tensor = tensor, .opaque = opaque, .owner = owner};
    PyObject *object = convert(&w, v);
    for (size_t i = 0; i < w.n_slots; i++) {
        Py_XDECREF(w.pairs[i].object);
    }
    PyMem_Free(w.pairs);
    return object;
}

PyObject *path_to_python(const dcp_key *path, size_t n)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple && i < n; i++) {
        PyObject *key = key_to_python(path[i]);
        if (!key || PyTuple_SetItem(tuple, (Py_ssize_t)i, key) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}
