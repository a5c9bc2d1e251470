/* Memory that save() gives back before its end. */
#include <stdlib.h>

#include "core.h"

static bool is_lent(void *user, const dcp_tensor *t)
{
    const core_lending *l = user;
    const char *at = t->data;
    size_t low = 0, high = l->n; /* the ranges before low begin at the address or below, those from high on above it */
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (l->ranges[middle].start <= at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 && at < l->ranges[low - 1].start + l->ranges[low - 1].bytes;
}

/* On a thread of the library's. */
static void returned(void *user)
{
    const core_lending *l = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = PyObject_CallNoArgs(l->returned);
    if (!result) {
        PyErr_WriteUnraisable(l->returned);
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
}

static int compare(const void *a, const void *b)
{
    const char *x = ((const core_range *)a)->start, *y = ((const core_range *)b)->start;
    return x < y ? -1 : x > y;
}

/* Storages may share memory, such as that of one array. */
static void merge(core_lending *l)
{
    size_t n = 0;
    qsort(l->ranges, l->n, sizeof *l->ranges, compare);
    for (size_t i = 1; i < l->n; i++) {
        core_range *last = &l->ranges[n], *next = &l->ranges[i];
        if (next->start > last->start + last->bytes) {
            l->ranges[++n] = *next;
        } else if (next->start + next->bytes > last->start + last->bytes) {
            last->bytes = (size_t)(next->start - last->start) + next->bytes;
        }
    }
    l->n = l->n ? n + 1 : 0;
}

static int take_ranges(core_lending *l, PyObject *tuple)
{
    size_t n = (size_t)PyTuple_Size(tuple);
    l->ranges = PyMem_Calloc(n + 1, sizeof *l->ranges);
    if (!l->ranges) {
        PyErr_NoMemory();
        return -1;
    }
    for (; l->n < n; l->n++) {
        PyObject *address, *entry = PyTuple_GetItem(tuple, (Py_ssize_t)l->n);
        unsigned long long bytes;
        if (!PyArg_ParseTuple(entry, "OK;lent memory must be (address, bytes)", &address, &bytes)) {
            return -1;
        }
        l->ranges[l->n] = (core_range){PyLong_AsVoidPtr(address), (size_t)bytes};
        if (PyErr_Occurred()) {
            return -1;
        }
    }
    merge(l);
    return 0;
}

int lending_ask(core_lending *l, PyObject *lent, PyObject *told, const dcp_lending **out)
{
    *l = (core_lending){.table = {is_lent, returned, l}, .returned = told};
    if (!lent || lent == Py_None) {
        return 0;
    }
    PyObject *answer = PyObject_CallNoArgs(lent);
    PyObject *tuple = answer && answer != Py_None ? PySequence_Tuple(answer) : NULL;
    int result = tuple ? take_ranges(l, tuple) : answer == Py_None ? 0 : -1;
    Py_XDECREF(tuple);
    Py_XDECREF(answer);
    *out = result == 0 && l->n ? &l->table : NULL;
    return result;
}

void lending_reset(core_lending *l)
{
    PyMem_Free(l->ranges);
    *l = (core_lending){0};
}
