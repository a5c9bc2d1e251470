/* Python's scalars to values: exact types only, since what a subclass adds would be lost. */
#include "core.h"

static int check(dcp_status status, const dcp_error *err)
{
    if (status != DCP_OK) {
        errors_raise(err, NULL, NULL);
        return -1;
    }
    return 0;
}

int str_from_python(PyObject *text, dcp_str *out, PyObject **holder)
{
    *holder = NULL;
    out->ptr = PyUnicode_AsUTF8AndSize(text, (Py_ssize_t *)&out->len);
    if (out->ptr) {
        return 0;
    }
    PyErr_Clear(); /* lone surrogates */
    *holder = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (!*holder) {
        return -1;
    }
    out->ptr = PyBytes_AsString(*holder);
    out->len = (size_t)PyBytes_Size(*holder);
    return 0;
}

int text_converter(PyObject *text, void *out)
{
    PyObject **bytes = out;
    if (!text) { /* a later argument was wrong */
        Py_CLEAR(*bytes);
        return 1;
    }
    *bytes = text == Py_None ? NULL : PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    return *bytes ? Py_CLEANUP_SUPPORTED : text == Py_None;
}

const char *text_of(PyObject *bytes)
{
    return bytes ? PyBytes_AsString(bytes) : NULL;
}

static int from_str(PyObject *object, dcp_value **out)
{
    dcp_str text;
    PyObject *holder;
    dcp_error err = DCP_ERROR_INIT;
    if (str_from_python(object, &text, &holder) < 0) {
        return -1;
    }
    dcp_status status = dcp_string_create(NULL, text, out, &err);
    Py_XDECREF(holder);
    return check(status, &err);
}

/* The bytes of a long integer: one more bit than it has, for the sign. */
static int from_bigint(PyObject *object, dcp_value **out)
{
    dcp_error err = DCP_ERROR_INIT;
    PyObject *bits = PyObject_CallMethod(object, "bit_length", NULL);
    Py_ssize_t n = bits ? PyLong_AsSsize_t(bits) / 8 + 1 : -1;
    PyObject *bytes = bits && !PyErr_Occurred() ? PyObject_CallMethod(object, "to_bytes", "ns", n, "little") : NULL;
    Py_XDECREF(bits);
    if (bytes == NULL && PyErr_ExceptionMatches(PyExc_OverflowError)) { /* unsigned only: the number is negative */
        PyObject *inverse;
        PyErr_Clear();
        inverse = PyNumber_Invert(object);
        bytes = inverse ? PyObject_CallMethod(inverse, "to_bytes", "ns", n, "little") : NULL;
        Py_XDECREF(inverse);
        uint8_t *digits = bytes ? (uint8_t *)PyBytes_AsString(bytes) : NULL;
        for (Py_ssize_t i = 0; digits && i < n; i++) {
            digits[i] = (uint8_t)~digits[i]; /* -x - 1 is the complement of x; nobody else has this object yet */
        }
    }
    if (!bytes) {
        return -1;
    }
    dcp_status status = dcp_bigint_create(NULL, (const uint8_t *)PyBytes_AsString(bytes), (size_t)n, out, &err);
    Py_DECREF(bytes);
    return check(status, &err);
}

static int from_int(PyObject *object, dcp_value **out)
{
    int overflow;
    dcp_error err = DCP_ERROR_INIT;
    long long i = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow ? from_bigint(object, out) : check(dcp_int_create(NULL, i, out, &err), &err);
}

static int from_bytes(PyObject *object, bool is_bytearray, dcp_value **out)
{
    dcp_error err = DCP_ERROR_INIT;
    const void *bytes = is_bytearray ? PyByteArray_AsString(object) : PyBytes_AsString(object);
    size_t n = (size_t)(is_bytearray ? PyByteArray_Size(object) : PyBytes_Size(object));
    return check(dcp_bytes_create(NULL, is_bytearray ? DCP_KIND_BYTEARRAY : DCP_KIND_BYTES, bytes, n, out, &err), &err);
}

int scalar_from_python(PyObject *object, bool *is_known, dcp_value **out)
{
    PyTypeObject *type = Py_TYPE(object);
    dcp_error err = DCP_ERROR_INIT;
    *is_known = true;
    if (object == Py_None) {
        return check(dcp_none_create(NULL, out, &err), &err);
    }
    if (type == &PyBool_Type) {
        return check(dcp_bool_create(NULL, object == Py_True, out, &err), &err);
    }
    if (type == &PyLong_Type) {
        return from_int(object, out);
    }
    if (type == &PyFloat_Type) {
        return check(dcp_float_create(NULL, PyFloat_AsDouble(object), out, &err), &err);
    }
    if (type == &PyUnicode_Type) {
        return from_str(object, out);
    }
    if (type == &PyBytes_Type || type == &PyByteArray_Type) {
        return from_bytes(object, type == &PyByteArray_Type, out);
    }
    if (type == &PyComplex_Type) {
        return check(dcp_complex_create(NULL, PyComplex_RealAsDouble(object), PyComplex_ImagAsDouble(object), out, &err), &err);
    }
    *is_known = false;
    return 0;
}
