/* Devices: their names, the caller's streams, and whether the vendor's library is there. */
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "dcp/device.h"

int device_from(PyObject *name, dcp_device *out)
{
    static const struct {
        const char *name;
        dcp_device_type type;
    } known[] = {{"cpu", DCP_DEVICE_CPU}, {"cuda", DCP_DEVICE_CUDA}, {"npu", DCP_DEVICE_NPU}};
    *out = (dcp_device){DCP_DEVICE_CPU, 0};
    if (!name || name == Py_None) {
        return 0;
    }
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    for (size_t i = 0; text && i < sizeof known / sizeof known[0]; i++) {
        size_t len = strlen(known[i].name);
        char *end = NULL;
        if (strncmp(text, known[i].name, len) != 0 || (text[len] && text[len] != ':')) {
            continue;
        }
        long index = text[len] ? strtol(text + len + 1, &end, 10) : 0;
        if (index >= 0 && index < 1024 && (!text[len] || (end != text + len + 1 && *end == 0))) {
            *out = (dcp_device){known[i].type, known[i].type == DCP_DEVICE_CPU ? 0 : (int)index};
            return 0;
        }
    }
    if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "no device %R", name);
    }
    return -1;
}

int stream_from(PyObject *number, void **out)
{
    *out = number && number != Py_None ? PyLong_AsVoidPtr(number) : NULL;
    return PyErr_Occurred() ? -1 : 0;
}

int stream_asked(PyObject *stream, void **out)
{
    if (!stream || !PyCallable_Check(stream)) {
        return stream_from(stream, out);
    }
    PyObject *number = PyObject_CallNoArgs(stream);
    int result = number ? stream_from(number, out) : -1;
    Py_XDECREF(number);
    return result;
}

PyObject *core_open_device(PyObject *module, PyObject *name)
{
    dcp_device device;
    dcp_device_driver *driver = NULL;
    dcp_error err = DCP_ERROR_INIT;
    (void)module;
    if (device_from(name, &device) < 0) {
        return NULL;
    }
    if (dcp_device_open(NULL, device.type, NULL, &driver, &err) != DCP_OK) {
        errors_raise(&err, NULL, NULL);
        return NULL;
    }
    dcp_device_close(driver);
    return Py_NewRef(Py_None);
}
