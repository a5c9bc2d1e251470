/* write_safetensors(): tensors to one safetensors file, or to a stream of Python's. */
#include <stdlib.h>

#include "core.h"

/* ---- a stream as a storage with one file, which is written front to back ---- */

typedef struct stream_storage {
    dcp_storage base;
    core_call *call;
    PyObject *write; /* borrowed */
} stream_storage;

typedef struct stream_file {
    dcp_file base;
    uint64_t end; /* what has been written */
} stream_file;

static dcp_status stream_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    (void)name;
    (void)flags;
    stream_file *f = calloc(1, sizeof *f);
    if (!f) {
        return dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    f->base.storage = st;
    *out = &f->base;
    return DCP_OK;
}

/* With the interpreter lock. What the stream takes of the bytes from `done` on; raw streams may take less than they are given. */
static Py_ssize_t hand_out(PyObject *write, PyObject *bytes, Py_ssize_t done)
{
    Py_ssize_t n = PyBytes_Size(bytes), result = -1;
    PyObject *whole = PyMemoryView_FromObject(bytes);
    PyObject *rest = whole ? PySequence_GetSlice(whole, done, n) : NULL;
    PyObject *taken = rest ? PyObject_CallFunctionObjArgs(write, rest, NULL) : NULL;
    if (taken) {
        result = taken == Py_None ? n - done : PyLong_AsSsize_t(taken);
    }
    if (taken && !PyErr_Occurred() && (result < 0 || result > n - done)) {
        PyErr_Format(PyExc_OSError, "write() took %zd of %zd bytes", result, n - done);
    }
    Py_XDECREF(taken);
    Py_XDECREF(rest);
    Py_XDECREF(whole);
    return PyErr_Occurred() ? -1 : result;
}

/* A copy, since nobody knows how long the stream will use what it is given. */
static int write_copy(PyObject *write, const void *buf, size_t n)
{
    PyObject *bytes = PyBytes_FromStringAndSize(buf, (Py_ssize_t)n);
    Py_ssize_t done = 0, taken = bytes ? 0 : -1;
    while (taken >= 0 && done < (Py_ssize_t)n) {
        taken = hand_out(write, bytes, done);
        done += taken;
    }
    Py_XDECREF(bytes);
    return taken < 0 ? -1 : 0;
}

static dcp_status stream_write_at(dcp_file *file, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    stream_file *f = (stream_file *)file;
    stream_storage *s = (stream_storage *)file->storage;
    if (offset != f->end) {
        return dcp_error_set(err, DCP_INTERNAL, "a stream is at %llu, not at %llu", (unsigned long long)f->end,
                             (unsigned long long)offset);
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    dcp_status status = write_copy(s->write, buf, n) < 0 ? errors_take(&s->call->exception, err) : DCP_OK;
    PyGILState_Release(gil);
    f->end += n;
    return status;
}

/* Whoever has opened the stream closes it. */
static dcp_status stream_close(dcp_file *file, dcp_error *err)
{
    (void)err;
    free(file);
    return DCP_OK;
}

static const dcp_storage_ops stream_ops = {
    .struct_size = sizeof stream_ops,
    .abi_version = DCP_STORAGE_ABI,
    .name = "stream",
    .open = stream_open,
    .write_at = stream_write_at,
    .close = stream_close,
};

/* ---- the call ---- */

typedef struct write_args {
    PyObject *path, *tree, *output, *describe, *stream; /* path: bytes, owned; NULL: output is a stream */
    const char *name;
    int sync;
} write_args;

typedef struct write_job {
    core_call *call;
    const char *path, *name;
    core_tree tree;
    dcp_save_opts opts;
    dcp_save_plan *plan;
    dcp_written *written;
} write_job;

static dcp_status work(void *arg, dcp_error *err)
{
    write_job *j = arg;
    dcp_status status = dcp_plan_save(NULL, j->tree.root, &j->plan, err); /* outlives the call */
    if (status == DCP_OK) {
        j->written = calloc(dcp_save_plan_count(j->plan) + 1, sizeof *j->written);
        status = j->written ? DCP_OK : dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    return status == DCP_OK ? dcp_hf_write_file(j->call->ctx, j->path, j->name, j->plan, &j->opts, j->written, err) : status;
}

static PyObject *places_to_python(const write_job *j)
{
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < dcp_save_plan_count(j->plan); i++) {
        PyObject *name = str_to_python(dcp_save_plan_item(j->plan, i)->fqn);
        PyObject *place =
            Py_BuildValue("(KK)", (unsigned long long)j->written[i].offset, (unsigned long long)j->written[i].length);
        if (!name || !place || PyDict_SetItem(dict, name, place) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(name);
        Py_XDECREF(place);
    }
    return dict;
}

static PyObject *write_file(const write_args *a, PyObject *write)
{
    core_call call;
    stream_storage streams = {.base = {&stream_ops}, .call = &call, .write = write};
    write_job j = {.call = &call, .path = a->path ? PyBytes_AsString(a->path) : "", .name = a->name, .opts = DCP_SAVE_OPTS_INIT};
    PyObject *result = NULL;
    if (tree_begin(&j.tree, a->describe, NULL, NULL) < 0 || call_begin(&call, 0, 0, NULL) < 0) {
        return NULL;
    }
    dcp_status status = DCP_OK;
    j.tree.stream = a->stream;
    int made = tree_make(&j.tree, a->tree, false, &call, NULL);
    if (made == 0) {
        j.opts.storage = write ? &streams.base : NULL;
        j.opts.no_sync = write || !a->sync;
        j.opts.stream = j.tree.stream_handle;
        status = call_run(&call, work, &j, write == NULL); /* streams are used by the thread that has opened them */
    }
    if (call_end(&call, status) == 0 && made == 0) {
        result = places_to_python(&j);
    }
    dcp_save_plan_free(j.plan);
    free(j.written);
    tree_reset(&j.tree);
    return result;
}

PyObject *core_write_safetensors(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tree", "describe", "path", "name", "output", "sync", "stream", NULL};
    write_args a = {.name = "stream", .sync = 1};
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$O&sOpO:write_safetensors", keywords, &a.tree, &a.describe,
                                     PyUnicode_FSConverter, &a.path, &a.name, &a.output, &a.sync, &a.stream)) {
        return NULL;
    }
    PyObject *result = NULL, *write = NULL;
    if (!a.path == !a.output) {
        PyErr_SetString(PyExc_TypeError, "either path and name are wanted, or output");
    } else if (!a.output || (write = PyObject_GetAttrString(a.output, "write"))) {
        result = write_file(&a, write);
    }
    Py_XDECREF(write);
    Py_XDECREF(a.path);
    return result;
}
