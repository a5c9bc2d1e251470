/* Exceptions: one class for each status, all below libdcp.Error. */
#include "core.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define N_CODES (-DCP_PEER + 1)

typedef struct error_class {
    dcp_status code;
    const char *name;
    const char *builtin, *second; /* classes of Python that it is as well; NULL: none */
    const char *doc;
} error_class;

static const error_class classes[] = {
    {DCP_ARG, "ArgumentError", "ValueError", NULL, "An argument is wrong in itself."},
    {DCP_STATE, "StateError", "AssertionError", NULL, "A call out of order, or a precondition does not hold."},
    {DCP_NOMEM, "OutOfMemoryError", "MemoryError", NULL, "No memory is left."},
    {DCP_UNSUPPORTED, "UnsupportedError", "NotImplementedError", NULL, "A feature, library or device is absent."},
    {DCP_INTERNAL, "InternalError", "RuntimeError", NULL, "A fault of libdcp itself."},
    {DCP_NOT_FOUND, "NotFoundError", "FileNotFoundError", NULL, "No such file or checkpoint."},
    {DCP_EXISTS, "ExistsError", "RuntimeError", NULL, "A checkpoint is in the way and may not be replaced."},
    {DCP_IO, "StorageError", "OSError", NULL, "The storage failed; see errno."},
    {DCP_NOSPACE, "NoSpaceError", "OSError", NULL, "The storage is full."},
    {DCP_DEVICE, "DeviceError", "RuntimeError", NULL, "A device or its driver refused; see native_code."},
    {DCP_TIMEOUT, "DeadlineError", "TimeoutError", NULL, "A rank or phase missed its deadline."},
    {DCP_CANCELED, "CanceledError", NULL, NULL, "Stopped by the caller."},
    {DCP_FORMAT, "FormatError", "RuntimeError", "ValueError", "The content of a file is not acceptable."},
    {DCP_CHECKSUM, "ChecksumError", "RuntimeError", "ValueError", "Stored and computed checksums differ."},
    {DCP_LIMIT, "LimitError", "ValueError", NULL, "A limit was exceeded."},
    {DCP_MISMATCH, "MismatchError", "ValueError", NULL, "Shape, dtype, kind or structure differs from what was asked for."},
    {DCP_PEER, "PeerError", NULL, NULL, "One or more ranks failed; see failures."},
};

static PyObject *base, *by_code[N_CODES], *missing_key;

static PyObject *builtin(const char *name)
{
    PyObject *module = PyImport_ImportModule("builtins");
    PyObject *type = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return type;
}

/* class <name>(Error, <first>, <second>) */
static PyObject *make_class(PyObject *module, const char *name, const char *doc, const char *first, const char *second)
{
    char qualified[64];
    PyObject *a = first ? builtin(first) : NULL, *b = second ? builtin(second) : NULL, *bases = NULL, *type = NULL;
    if ((!first || a) && (!second || b)) {
        bases = b ? PyTuple_Pack(3, base, a, b) : a ? PyTuple_Pack(2, base, a) : PyTuple_Pack(1, base);
    }
    snprintf(qualified, sizeof qualified, "libdcp.%s", name);
    if (bases) {
        type = PyErr_NewExceptionWithDoc(qualified, doc, bases, NULL);
    }
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(bases);
    if (type && PyModule_AddObjectRef(module, name, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

static PyObject *make_base(PyObject *module)
{
    static const char doc[] =
        "Base of all errors of libdcp.\n\n"
        "code: name of the status, such as \"FORMAT\"; errno: of the failed system call, or 0; native_code: of a device\n"
        "driver or MPI, or 0; rank: where it happened, or -1; offset: byte position in the file that the message names, or\n"
        "None; failures: list of (rank, code, errno, native_code, offset, message) of all ranks that failed; cause: the\n"
        "exception of this process that it stems from, or None.";
    PyObject *dict = Py_BuildValue("{s:O,s:i,s:i,s:i,s:O,s:(),s:O}", "code", Py_None, "errno", 0, "native_code", 0, "rank", -1,
                                   "offset", Py_None, "failures", "cause", Py_None);
    PyObject *type = dict ? PyErr_NewExceptionWithDoc("libdcp.Error", doc, NULL, dict) : NULL;
    Py_XDECREF(dict);
    if (type && PyModule_AddObjectRef(module, "Error", type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

int errors_init(PyObject *module)
{
    base = make_base(module);
    if (!base) {
        return -1;
    }
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        const error_class *c = &classes[i];
        by_code[-c->code] = make_class(module, c->name, c->doc, c->builtin, c->second);
        if (!by_code[-c->code]) {
            return -1;
        }
    }
    missing_key = make_class(module, "MissingKeyError", "Names of the state are not in the checkpoint.", "RuntimeError", NULL);
    return missing_key ? 0 : -1;
}

/* ---- raising ---- */

static PyObject *offset_to_python(uint64_t offset)
{
    return offset == DCP_NO_OFFSET ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(offset);
}

static PyObject *failures_to_python(const dcp_failures *failures)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < dcp_failures_count(failures); i++) {
        const dcp_failure *f = dcp_failures_at(failures, i);
        PyObject *text = PyUnicode_DecodeUTF8(f->message, (Py_ssize_t)strlen(f->message), "replace");
        PyObject *offset = offset_to_python(f->offset);
        PyObject *entry = text && offset ? Py_BuildValue("(isiLOO)", f->rank, dcp_status_name(f->code), f->sys_errno,
                                                         (long long)f->native_code, offset, text)
                                         : NULL;
        Py_XDECREF(text);
        Py_XDECREF(offset);
        if (!entry || PyList_Append(list, entry) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(entry);
    }
    return list;
}

/* Sets an attribute; steals value. */
static int set(PyObject *object, const char *name, PyObject *value)
{
    int result = value ? PyObject_SetAttrString(object, name, value) : -1;
    Py_XDECREF(value);
    return result;
}

/* A NOT_FOUND that no system call said is one of names in a checkpoint. */
static PyObject *class_of(const dcp_error *err)
{
    int i = -(int)err->code;
    if (err->code == DCP_NOT_FOUND && strstr(err->message, "state and checkpoint differ")) {
        return missing_key;
    }
    return i > 0 && i < N_CODES && by_code[i] ? by_code[i] : by_code[-DCP_INTERNAL];
}

PyObject *errors_raise(const dcp_error *err, const dcp_failures *failures, PyObject *cause)
{
    bool is_fault = !cause || PyErr_GivenExceptionMatches(cause, PyExc_Exception); /* others, as KeyboardInterrupt, are orders */
    if (cause && (!is_fault || err->code != DCP_PEER || dcp_failures_count(failures) == 0)) {
        PyErr_SetObject((PyObject *)Py_TYPE(cause), cause);
        Py_DECREF(cause);
        return NULL;
    }
    PyObject *text = PyUnicode_DecodeUTF8(err->message, (Py_ssize_t)strlen(err->message), "replace");
    PyObject *type = class_of(err);
    PyObject *exception = text ? PyObject_CallFunctionObjArgs(type, text, NULL) : NULL;
    Py_XDECREF(text);
    if (exception && set(exception, "code", PyUnicode_FromString(dcp_status_name(err->code))) == 0 &&
        set(exception, "errno", PyLong_FromLong(err->sys_errno)) == 0 &&
        set(exception, "native_code", PyLong_FromLongLong(err->native_code)) == 0 &&
        set(exception, "rank", PyLong_FromLong(err->rank)) == 0 && set(exception, "offset", offset_to_python(err->offset)) == 0 &&
        set(exception, "failures", failures_to_python(err->code == DCP_PEER ? failures : NULL)) == 0) {
        if (cause) {
            PyException_SetCause(exception, Py_NewRef(cause));
            PyObject_SetAttrString(exception, "cause", cause);
        }
        PyErr_SetObject(type, exception);
    }
    Py_XDECREF(exception);
    Py_XDECREF(cause);
    return NULL;
}

PyObject *errors_raise_text(dcp_status code, const char *fmt, ...)
{
    dcp_error err = DCP_ERROR_INIT;
    va_list args;
    va_start(args, fmt);
    err.code = code;
    vsnprintf(err.message, sizeof err.message, fmt, args);
    va_end(args);
    return errors_raise(&err, NULL, NULL);
}

/* ---- taking ---- */

PyObject *errors_fetch(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace) {
        PyException_SetTraceback(value, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
}

/* The status table of the library, read backwards. */
static dcp_status status_of(PyObject *exception)
{
    static const struct {
        PyObject **type;
        dcp_status code;
    } known[] = {
        {&PyExc_KeyboardInterrupt, DCP_CANCELED},
        {&PyExc_TimeoutError, DCP_TIMEOUT},
        {&PyExc_FileNotFoundError, DCP_NOT_FOUND},
        {&PyExc_OSError, DCP_IO},
        {&PyExc_MemoryError, DCP_NOMEM},
        {&PyExc_NotImplementedError, DCP_UNSUPPORTED},
        {&PyExc_AssertionError, DCP_STATE},
        {&PyExc_ValueError, DCP_ARG},
        {&PyExc_TypeError, DCP_ARG},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (PyErr_GivenExceptionMatches(exception, *known[i].type)) {
            return known[i].code;
        }
    }
    return DCP_STATE;
}

static int errno_of(PyObject *exception)
{
    PyObject *number = PyObject_GetAttrString(exception, "errno");
    long value = number && PyLong_Check(number) ? PyLong_AsLong(number) : 0;
    Py_XDECREF(number);
    PyErr_Clear();
    return (int)value;
}

static void describe(PyObject *exception, dcp_error *err)
{
    PyObject *type_name = PyType_GetName(Py_TYPE(exception)), *text = PyObject_Str(exception);
    PyObject *line = type_name && text ? PyUnicode_FromFormat("%U: %U", type_name, text) : NULL;
    PyObject *bytes = line ? PyUnicode_AsEncodedString(line, "utf-8", "replace") : NULL;
    dcp_error_set(err, status_of(exception), "%s", bytes ? PyBytes_AsString(bytes) : "a callback raised an exception");
    err->sys_errno = errno_of(exception);
    Py_XDECREF(type_name);
    Py_XDECREF(text);
    Py_XDECREF(line);
    Py_XDECREF(bytes);
    PyErr_Clear();
}

dcp_status errors_take(PyObject **kept, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    dcp_error *to = err ? err : &own;
    PyObject *exception = errors_fetch();
    if (!exception) {
        return dcp_error_set(to, DCP_INTERNAL, "a callback failed without an exception");
    }
    describe(exception, to);
    if (*kept) {
        Py_DECREF(exception);
    } else {
        *kept = exception;
    }
    return to->code;
}
