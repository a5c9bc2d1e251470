/* What saves in the background need beside save(): Helper, Control, lower_priority(). */
#include <math.h>
#include <time.h>

#include "core.h"

/* ---- Helper ---- */

typedef struct helper {
    PyObject_HEAD PyObject *context; /* that the handle was made with */
    dcp_helper *handle;
} helper;

static PyTypeObject *helper_type;

static PyObject *helper_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", NULL};
    PyObject *path = NULL;
    dcp_context *ctx;
    dcp_error err = DCP_ERROR_INIT;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:Helper", keywords, PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    helper *h = object_new(type);
    h = h && (h->context = context_new(0, 0, &ctx)) ? h : (Py_XDECREF((PyObject *)h), NULL);
    if (h && dcp_helper_create(ctx, path ? PyBytes_AsString(path) : NULL, &h->handle, &err) != DCP_OK) {
        Py_CLEAR(h);
        errors_raise(&err, NULL, NULL);
    }
    Py_XDECREF(path);
    return (PyObject *)h;
}

static void helper_free(PyObject *self)
{
    helper *h = (helper *)self;
    Py_BEGIN_ALLOW_THREADS dcp_helper_free(h->handle);
    Py_END_ALLOW_THREADS Py_XDECREF(h->context);
    object_free(self);
}

int helper_use(PyObject *object, dcp_helper **out)
{
    *out = NULL;
    if (!object || object == Py_None) {
        return 0;
    }
    if (!PyObject_TypeCheck(object, helper_type)) {
        PyErr_Format(PyExc_TypeError, "helper must be a Helper, not %R", (PyObject *)Py_TYPE(object));
        return -1;
    }
    *out = ((helper *)object)->handle;
    return 0;
}

static PyType_Slot helper_slots[] = {
    {Py_tp_doc,
     "Helper(path=None)\n--\n\nThe process dcp-writer, for helper= of save() and write_items(): started by the first of "
     "them that\nneeds it, serves all of them, is replaced when it has died, and ends with this object. path: of the "
     "executable."},
    {Py_tp_new, helper_new},
    {Py_tp_dealloc, helper_free},
    {0, NULL},
};

static PyType_Spec helper_spec = {
    .name = "libdcp._core.Helper",
    .basicsize = sizeof(helper),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = helper_slots,
};

/* ---- Control ---- */

struct core_control {
    PyObject_HEAD pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    double bytes_per_second; /* at most; 0: no bound */
    double started, last;    /* when it was first, and last, told how far the save is; 0: not yet */
    uint64_t done_bytes, total_bytes;
    bool is_canceled;
};

static PyTypeObject *control_type;

core_control *control_of(PyObject *object)
{
    return PyObject_TypeCheck(object, control_type) ? (core_control *)object : NULL;
}

/* Until so many bytes may have been written. The lock is held. */
static void keep_to_rate(core_control *c)
{
    double due = c->started + (double)c->done_bytes / c->bytes_per_second, whole;
    double fraction = modf(due, &whole);
    struct timespec until = {(time_t)whole, (long)(fraction * 1e9)};
    while (!c->is_canceled && seconds_now() < due) {
        pthread_cond_timedwait(&c->changed, &c->lock, &until);
    }
}

bool control_note(core_control *c, uint64_t done_bytes, uint64_t total_bytes)
{
    pthread_mutex_lock(&c->lock);
    c->last = seconds_now();
    c->started = c->started > 0 ? c->started : c->last;
    c->done_bytes = done_bytes;
    c->total_bytes = total_bytes;
    if (c->bytes_per_second > 0) {
        keep_to_rate(c);
    }
    bool goes_on = !c->is_canceled;
    pthread_mutex_unlock(&c->lock);
    return goes_on;
}

static PyObject *control_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"max_bytes_per_second", NULL};
    double rate = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$d:Control", keywords, &rate)) {
        return NULL;
    }
    if (!isfinite(rate) || rate < 0) {
        PyErr_SetString(PyExc_ValueError, "max_bytes_per_second must be 0 (no bound) or more");
        return NULL;
    }
    core_control *c = object_new(type);
    if (c) {
        pthread_condattr_t attr;
        pthread_condattr_init(&attr);
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        pthread_cond_init(&c->changed, &attr);
        pthread_condattr_destroy(&attr);
        pthread_mutex_init(&c->lock, NULL);
        c->bytes_per_second = rate;
    }
    return (PyObject *)c;
}

static void control_free(PyObject *self)
{
    core_control *c = (core_control *)self;
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    object_free(self);
}

static PyObject *control_cancel(PyObject *self, PyObject *unused)
{
    core_control *c = (core_control *)self;
    (void)unused;
    pthread_mutex_lock(&c->lock);
    c->is_canceled = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    Py_RETURN_NONE;
}

static PyObject *control_state(PyObject *self, PyObject *unused)
{
    core_control *c = (core_control *)self;
    (void)unused;
    pthread_mutex_lock(&c->lock);
    unsigned long long done = c->done_bytes, total = c->total_bytes;
    double seconds = c->started > 0 ? (done < total ? seconds_now() : c->last) - c->started : 0;
    pthread_mutex_unlock(&c->lock);
    return Py_BuildValue("(KKd)", done, total, seconds);
}

static PyObject *control_is_canceled(PyObject *self, void *unused)
{
    core_control *c = (core_control *)self;
    (void)unused;
    pthread_mutex_lock(&c->lock);
    bool is_canceled = c->is_canceled;
    pthread_mutex_unlock(&c->lock);
    return PyBool_FromLong(is_canceled);
}

static PyMethodDef control_methods[] = {
    {"cancel", control_cancel, METH_NOARGS, "cancel()\n--\n\nThe work ends with CanceledError at its next block."},
    {"state", control_state, METH_NOARGS, "state()\n--\n\n(bytes done, bytes in all, seconds since the first of them were done)"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef control_members[] = {
    {"is_canceled", control_is_canceled, NULL, "Whether cancel() has been called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot control_slots[] = {
    {Py_tp_doc,
     "Control(*, max_bytes_per_second=0)\n--\n\nA hand on work that goes on in another thread, in place of a function for "
     "progress=: it is asked and\ntold without the interpreter lock. One for each piece of work."},
    {Py_tp_new, control_new},
    {Py_tp_dealloc, control_free},
    {Py_tp_methods, control_methods},
    {Py_tp_getset, control_members},
    {0, NULL},
};

static PyType_Spec control_spec = {
    .name = "libdcp._core.Control",
    .basicsize = sizeof(core_control),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = control_slots,
};

/* ---- the module's ---- */

PyObject *core_lower_priority(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    dcp_lower_priority();
    Py_RETURN_NONE;
}

int background_init(PyObject *module)
{
    helper_type = (PyTypeObject *)PyType_FromSpec(&helper_spec);
    control_type = (PyTypeObject *)PyType_FromSpec(&control_spec);
    return helper_type && control_type && PyModule_AddObjectRef(module, "Helper", (PyObject *)helper_type) == 0 &&
                   PyModule_AddObjectRef(module, "Control", (PyObject *)control_type) == 0
               ? 0
               : -1;
}
