/* Groups of ranks whose exchanges are Python functions. */
#include <string.h>

#include "core.h"

/* What a communicator calls. A copy of the communicator has the functions of another Group, which may be gone before it. */
typedef struct functions {
    size_t users;                                /* Groups and communicators; with the interpreter lock */
    PyObject *alltoall, *all_gather, *duplicate; /* all_gather, duplicate: None where there is none */
    PyObject *exception;                         /* of one of them; taken by the call that it happened in */
    int rank, size;
} functions;

typedef struct core_group {
    PyObject_HEAD functions *functions;
    dcp_comm *comm;
} core_group;

static PyTypeObject *group_type;

/* ---- the callbacks, from the library, without the interpreter lock ---- */

static PyObject *view_of(const void *bytes, size_t n, bool is_writable)
{
    return n ? PyMemoryView_FromMemory((char *)bytes, (Py_ssize_t)n, is_writable ? PyBUF_WRITE : PyBUF_READ) : Py_NewRef(Py_None);
}

/* Ends the use of memory that is not the callback's any more. Where it kept the view in use, there is no way to take it back. */
static void release_view(PyObject *view)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = view && view != Py_None ? PyObject_CallMethodObjArgs(view, names.release, NULL) : NULL;
    Py_XDECREF(done);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

static void release_views(PyObject *list)
{
    for (Py_ssize_t i = 0; list && i < PyList_Size(list); i++) {
        release_view(PyList_GetItem(list, i));
    }
    Py_XDECREF(list);
}

static PyObject *views_of(int n, const dcp_comm_send *send, const dcp_comm_recv *recv)
{
    PyObject *list = PyList_New(n);
    for (int i = 0; list && i < n; i++) {
        PyObject *view = send ? view_of(send[i].ptr, send[i].bytes, false) : view_of(recv[i].ptr, recv[i].bytes, true);
        if (!view || PyList_SetItem(list, i, view) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static dcp_status finish(functions *g, PyObject *answer, dcp_error *err)
{
    if (answer) {
        Py_DECREF(answer);
        return DCP_OK;
    }
    return errors_take(&g->exception, err);
}

static dcp_status alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms, dcp_error *err)
{
    functions *g = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *sends = views_of(g->size, send, NULL), *recvs = sends ? views_of(g->size, NULL, recv) : NULL;
    PyObject *answer = recvs ? PyObject_CallFunction(g->alltoall, "OOd", sends, recvs, timeout_ms / 1000.0) : NULL;
    release_views(sends);
    release_views(recvs);
    dcp_status status = finish(g, answer, err);
    PyGILState_Release(gil);
    return status;
}

static dcp_status all_gather(void *user, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    functions *g = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *own = view_of(mine, n, false), *out = own ? view_of(all, n * (size_t)g->size, true) : NULL;
    PyObject *answer = out ? PyObject_CallFunction(g->all_gather, "OOd", own, out, timeout_ms / 1000.0) : NULL;
    release_view(own);
    release_view(out);
    Py_XDECREF(own);
    Py_XDECREF(out);
    dcp_status status = finish(g, answer, err);
    PyGILState_Release(gil);
    return status;
}

static dcp_status duplicate(void *user, uint32_t timeout_ms, void **out, dcp_error *err)
{
    functions *g = user;
    dcp_status status = DCP_OK;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *other = PyObject_CallFunction(g->duplicate, "d", timeout_ms / 1000.0);
    if (other && !PyObject_TypeCheck(other, group_type)) {
        PyErr_SetString(PyExc_TypeError, "duplicate() must return a Group");
        Py_CLEAR(other);
    }
    if (other) {
        *out = ((core_group *)other)->functions;
        ((functions *)*out)->users++;
        Py_DECREF(other);
    } else {
        status = errors_take(&g->exception, err);
    }
    PyGILState_Release(gil);
    return status;
}

static void drop(functions *f)
{
    if (f && --f->users == 0) {
        Py_XDECREF(f->alltoall);
        Py_XDECREF(f->all_gather);
        Py_XDECREF(f->duplicate);
        Py_XDECREF(f->exception);
        PyMem_Free(f);
    }
}

static void release(void *user)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    drop(user);
    PyGILState_Release(gil);
}

/* ---- the object ---- */

static int connect(core_group *g, bool any_thread)
{
    functions *f = g->functions;
    dcp_comm_callbacks callbacks = DCP_COMM_CALLBACKS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    callbacks.user = f;
    callbacks.rank = f->rank;
    callbacks.size = f->size;
    callbacks.caps = any_thread ? DCP_COMM_ANY_THREAD : 0;
    callbacks.alltoall = alltoall;
    callbacks.all_gather = f->all_gather == Py_None ? NULL : all_gather;
    callbacks.duplicate = f->duplicate == Py_None ? NULL : duplicate;
    callbacks.release = release;
    if (dcp_comm_from_callbacks(NULL, &callbacks, &g->comm, &err) != DCP_OK) {
        errors_raise(&err, NULL, NULL);
        return -1;
    }
    f->users++;
    return 0;
}

static int take_timeout(PyObject *seconds, uint32_t *timeout_ms)
{
    if (seconds == Py_None) {
        return 0;
    }
    double s = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (!(s > 0 && s < 4e6)) {
        PyErr_SetString(PyExc_ValueError, "timeout_s must be a number of seconds above 0, at most 4 million");
        return -1;
    }
    *timeout_ms = s * 1000 < 1 ? 1 : (uint32_t)(s * 1000);
    return 0;
}

static bool is_function(PyObject *object, bool may_be_none)
{
    return PyCallable_Check(object) || (may_be_none && object == Py_None);
}

static PyObject *group_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"rank", "size", "alltoall", "all_gather", "duplicate", "any_thread", "timeout_s", NULL};
    int rank, size, any_thread = 0;
    uint32_t timeout_ms = 0; /* the library's default */
    PyObject *exchange = Py_None, *gather = Py_None, *copy = Py_None, *seconds = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|$OOOpO:Group", keywords, &rank, &size, &exchange, &gather, &copy,
                                     &any_thread, &seconds)) {
        return NULL;
    }
    if (!is_function(exchange, false) || !is_function(gather, true) || !is_function(copy, true)) {
        PyErr_SetString(PyExc_TypeError, "alltoall, all_gather and duplicate must be callable");
        return NULL;
    }
    if (take_timeout(seconds, &timeout_ms) < 0) {
        return NULL;
    }
    core_group *g = object_new(type);
    if (!g) {
        return NULL;
    }
    g->functions = PyMem_Calloc(1, sizeof *g->functions);
    if (!g->functions) {
        Py_DECREF(g);
        return PyErr_NoMemory();
    }
    *g->functions = (functions){.users = 1,
                                .rank = rank,
                                .size = size,
                                .alltoall = Py_NewRef(exchange),
                                .all_gather = Py_NewRef(gather),
                                .duplicate = Py_NewRef(copy)};
    if (connect(g, any_thread) < 0) {
        Py_CLEAR(g);
    } else if (timeout_ms) {
        dcp_comm_set_timeout(g->comm, timeout_ms);
    }
    return (PyObject *)g;
}

/* Functions that a communicator elsewhere uses as well are not this object's to give up. */
static bool owns_functions(const core_group *g)
{
    return g->functions && g->functions->users <= 1 + (size_t)(g->comm != NULL);
}

static int group_traverse(PyObject *self, visitproc visit, void *arg)
{
    core_group *g = (core_group *)self;
    Py_VISIT(Py_TYPE(self));
    if (owns_functions(g)) {
        Py_VISIT(g->functions->alltoall);
        Py_VISIT(g->functions->all_gather);
        Py_VISIT(g->functions->duplicate);
        Py_VISIT(g->functions->exception);
    }
    return 0;
}

static int group_clear(PyObject *self)
{
    core_group *g = (core_group *)self;
    if (owns_functions(g)) {
        Py_CLEAR(g->functions->alltoall);
        Py_CLEAR(g->functions->all_gather);
        Py_CLEAR(g->functions->duplicate);
        Py_CLEAR(g->functions->exception);
    }
    return 0;
}

static void group_free(PyObject *self)
{
    core_group *g = (core_group *)self;
    PyObject_GC_UnTrack(self);
    dcp_comm_free(g->comm);
    drop(g->functions);
    object_free(self);
}

static PyObject *get_rank(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((core_group *)self)->functions->rank);
}

static PyObject *get_size(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((core_group *)self)->functions->size);
}

static PyObject *get_broken(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(dcp_comm_is_broken(((core_group *)self)->comm));
}

static PyGetSetDef group_members[] = {
    {"rank", get_rank, NULL, "Rank of this process in the group.", NULL},
    {"size", get_size, NULL, "Number of ranks.", NULL},
    {"is_broken", get_broken, NULL, "True after an exchange failed: every later one raises StateError.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static const char group_doc[] =
    "Group(rank, size, *, alltoall, all_gather=None, duplicate=None, any_thread=False, timeout_s=None)\n--\n\n"
    "Ranks that save and load together, connected by functions of the caller.\n\n"
    "alltoall(sends, recvs, timeout_s): sends[r] is a memoryview of the bytes for rank r, recvs[r] a writable one for the bytes\n"
    "from rank r, None for no bytes; the sizes are known on both sides. all_gather(mine, out, timeout_s): the equally long\n"
    "bytes of every rank, in order of ranks. duplicate(timeout_s): another Group of the same ranks with traffic of its own.\n"
    "The views must not be used after a function has returned. any_thread: the functions may be called on another thread than\n"
    "the caller's. timeout_s: deadline of each exchange, 30 minutes by default.";

static PyType_Slot group_slots[] = {
    {Py_tp_doc, (void *)group_doc},
    {Py_tp_new, group_new},
    {Py_tp_dealloc, group_free},
    {Py_tp_traverse, group_traverse},
    {Py_tp_clear, group_clear},
    {Py_tp_getset, group_members},
    {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "libdcp._core.Group",
    .basicsize = sizeof(core_group),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = group_slots,
};

int group_init(PyObject *module)
{
    group_type = (PyTypeObject *)PyType_FromSpec(&group_spec);
    return group_type ? PyModule_AddObjectRef(module, "Group", (PyObject *)group_type) : -1;
}

int group_use(PyObject *group, dcp_comm **comm)
{
    *comm = NULL;
    if (!group || group == Py_None) {
        return 0;
    }
    if (!PyObject_TypeCheck(group, group_type)) {
        PyErr_Format(PyExc_TypeError, "group must be a libdcp Group, not %R", (PyObject *)Py_TYPE(group));
        return -1;
    }
    *comm = ((core_group *)group)->comm;
    return 0;
}

void group_done(PyObject *group, PyObject **exception)
{
    if (group && group != Py_None) {
        functions *f = ((core_group *)group)->functions;
        if (*exception) {
            Py_CLEAR(f->exception);
        } else {
            *exception = f->exception;
            f->exception = NULL;
        }
    }
}
