/* save(): a tree of Python objects to a checkpoint. */
#include <string.h>

#include "core.h"

/* ---- the plan cache ---- */

typedef struct plan_cache {
    PyObject_HEAD dcp_plan_cache *cache;
} plan_cache;

static PyTypeObject *plan_cache_type;

static PyObject *plan_cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    dcp_error err = DCP_ERROR_INIT;
    if ((args && PyTuple_Size(args)) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "PlanCache() takes no arguments");
        return NULL;
    }
    plan_cache *c = object_new(type);
    if (c && dcp_plan_cache_create(NULL, &c->cache, &err) != DCP_OK) {
        Py_CLEAR(c);
        errors_raise(&err, NULL, NULL);
    }
    return (PyObject *)c;
}

static void plan_cache_free(PyObject *self)
{
    dcp_plan_cache_free(((plan_cache *)self)->cache);
    object_free(self);
}

static PyType_Slot plan_cache_slots[] = {
    {Py_tp_doc, "Keeps the plan of a sequence of saves of the same structure, so that it is made once."},
    {Py_tp_new, plan_cache_new},
    {Py_tp_dealloc, plan_cache_free},
    {0, NULL},
};

static PyType_Spec plan_cache_spec = {
    .name = "libdcp._core.PlanCache",
    .basicsize = sizeof(plan_cache),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = plan_cache_slots,
};

int plan_cache_init(PyObject *module)
{
    plan_cache_type = (PyTypeObject *)PyType_FromSpec(&plan_cache_spec);
    return plan_cache_type ? PyModule_AddObjectRef(module, "PlanCache", (PyObject *)plan_cache_type) : -1;
}

/* ---- the arguments ---- */

typedef struct save_args {
    PyObject *path, *tree, *checkpoint_id; /* path and checkpoint_id: bytes, owned */
    PyObject *describe, *pickle, *group, *per_rank, *cache, *rank_local, *progress, *tensor_types, *stream, *helper, *lent,
        *returned;
    const char *serialization, *on_failure;
    int threads;
    unsigned long long memory_bytes;
    int overwrite, sync, file_per_item, dedup_to_lowest, check_content, align_payloads;
    dcp_save_opts opts;
    const char **patterns;
} save_args;

static char *keywords[] = {"path",           "tree",           "describe",      "pickle",
                           "group",          "coordinator",    "overwrite",     "sync",
                           "files",          "file_per_item",  "serialization", "transform",
                           "target_release", "save_id",        "checkpoint_id", "dedup_to_lowest",
                           "check_content",  "per_rank",       "cache",         "rank_local",
                           "threads",        "memory_bytes",   "on_failure",    "progress",
                           "tensor_types",   "align_payloads", "stream",        "copy_ahead_bytes",
                           "helper",         "lent",           "returned",      NULL};

static int parse(save_args *a, PyObject *args, PyObject *kwargs)
{
    unsigned long long copy_ahead = DCP_COPY_AHEAD_BYTES;
    *a = (save_args){.serialization = "torch_save", .on_failure = "return", .sync = 1, .opts = DCP_SAVE_OPTS_INIT};
    int is_good = PyArg_ParseTupleAndKeywords(
        args, kwargs, "O&O|$OOOippipszizO&ppOOOiKsOOpOKOOO:save", keywords, PyUnicode_FSConverter, &a->path, &a->tree,
        &a->describe, &a->pickle, &a->group, &a->opts.coordinator, &a->overwrite, &a->sync, &a->opts.files, &a->file_per_item,
        &a->serialization, &a->opts.transform, &a->opts.target_release, &a->opts.save_id, text_converter, &a->checkpoint_id,
        &a->dedup_to_lowest, &a->check_content, &a->per_rank, &a->cache, &a->rank_local, &a->threads, &a->memory_bytes,
        &a->on_failure, &a->progress, &a->tensor_types, &a->align_payloads, &a->stream, &copy_ahead, &a->helper, &a->lent,
        &a->returned);
    a->opts.copy_ahead_bytes = copy_ahead;
    a->opts.checkpoint_id = text_of(a->checkpoint_id);
    return is_good ? 0 : -1;
}

int serialization_from(const char *text, dcp_serialization *out)
{
    bool is_safetensors = strcmp(text, "safetensors") == 0;
    if (!is_safetensors && strcmp(text, "torch_save") != 0) {
        PyErr_Format(PyExc_ValueError, "serialization must be \"torch_save\" or \"safetensors\", not \"%s\"", text);
        return -1;
    }
    *out = is_safetensors ? DCP_SERIALIZE_SAFETENSORS : DCP_SERIALIZE_TORCH_SAVE;
    return 0;
}

static int set_enums(save_args *a)
{
    bool is_warn = strcmp(a->on_failure, "warn") == 0;
    if (!is_warn && strcmp(a->on_failure, "return") != 0) {
        PyErr_Format(PyExc_ValueError, "on_failure must be \"return\" or \"warn\", not \"%s\"", a->on_failure);
        return -1;
    }
    a->opts.on_failure = is_warn ? DCP_FAILURE_WARN : DCP_FAILURE_RETURN;
    return serialization_from(a->serialization, &a->opts.serialization);
}

static int set_cache(save_args *a)
{
    if (!a->cache || a->cache == Py_None) {
        return 0;
    }
    if (!PyObject_TypeCheck(a->cache, plan_cache_type)) {
        PyErr_Format(PyExc_TypeError, "cache must be a PlanCache, not %R", (PyObject *)Py_TYPE(a->cache));
        return -1;
    }
    a->opts.cache = ((plan_cache *)a->cache)->cache;
    return 0;
}

static int set_opts(save_args *a)
{
    dcp_save_opts *o = &a->opts;
    o->overwrite = a->overwrite;
    o->no_sync = !a->sync;
    o->file_per_item = a->file_per_item;
    o->align_payloads = a->align_payloads;
    o->dedup_to_lowest = a->dedup_to_lowest;
    o->check_content = a->check_content;
    if (a->rank_local && a->rank_local != Py_None) {
        o->rank_local = true;
        if (!PyArg_ParseTuple(a->rank_local, "ii;rank_local must be (rank, world)", &o->rank, &o->world)) {
            return -1;
        }
    }
    if (a->lent && a->lent != Py_None && (!a->returned || !PyCallable_Check(a->returned))) {
        PyErr_SetString(PyExc_TypeError, "lent memory needs a function `returned`");
        return -1;
    }
    if (set_enums(a) < 0 || set_cache(a) < 0 || strings_from(a->per_rank, &a->patterns, &o->n_per_rank) < 0 ||
        helper_use(a->helper, &o->helper) < 0) {
        return -1;
    }
    o->per_rank = a->patterns;
    return group_use(a->group, &o->comm);
}

/* ---- the report ---- */

static PyObject *rank_to_python(const dcp_rank_report *r)
{
    return Py_BuildValue("{s:d,s:d,s:d,s:K}", "plan_seconds", r->plan_seconds, "write_seconds", r->write_seconds, "sync_seconds",
                         r->sync_seconds, "bytes", (unsigned long long)r->bytes);
}

static PyObject *ranks_to_python(const dcp_save_report *r)
{
    size_t n = (size_t)r->world < r->n_ranks ? (size_t)r->world : r->n_ranks;
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *rank = rank_to_python(&r->ranks[i]);
        if (!rank || PyList_SetItem(list, (Py_ssize_t)i, rank) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *degraded_to_python(unsigned degraded)
{
    static const struct {
        dcp_degraded flag;
        const char *name;
    } known[] = {{DCP_DEGRADED_SYNC, "sync"}, {DCP_DEGRADED_RENAME, "rename"}, {DCP_DEGRADED_LOCK, "lock"}};
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof known / sizeof known[0]; i++) {
        PyObject *name = degraded & known[i].flag ? PyUnicode_FromString(known[i].name) : NULL;
        if (name && PyList_Append(list, name) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(name);
    }
    return list;
}

PyObject *save_report_to_python(const dcp_save_report *r)
{
    PyObject *d = PyDict_New();
    if (d && put(d, "save_id", PyUnicode_FromString(r->save_id)) == 0 &&
        put(d, "status", PyUnicode_FromString(dcp_status_name(r->status))) == 0 &&
        put(d, "plan_seconds", PyFloat_FromDouble(r->plan_seconds)) == 0 &&
        put(d, "write_seconds", PyFloat_FromDouble(r->write_seconds)) == 0 &&
        put(d, "sync_seconds", PyFloat_FromDouble(r->sync_seconds)) == 0 &&
        put(d, "commit_seconds", PyFloat_FromDouble(r->commit_seconds)) == 0 &&
        put(d, "bytes", PyLong_FromUnsignedLongLong(r->bytes)) == 0 &&
        put(d, "payload_bytes", PyLong_FromUnsignedLongLong(r->payload_bytes)) == 0 &&
        put(d, "n_items", PyLong_FromSize_t(r->n_items)) == 0 && put(d, "n_records", PyLong_FromSize_t(r->n_records)) == 0 &&
        put(d, "n_files", PyLong_FromSize_t(r->n_files)) == 0 && put(d, "n_tied", PyLong_FromSize_t(r->n_tied)) == 0 &&
        put(d, "degraded", degraded_to_python(r->degraded)) == 0 &&
        put(d, "target_release", PyLong_FromLong(r->target_release)) == 0 &&
        put(d, "was_planned_before", PyBool_FromLong(r->was_planned_before)) == 0 &&
        put(d, "plan_bytes", PyLong_FromUnsignedLongLong(r->plan_bytes)) == 0 &&
        put(d, "world", PyLong_FromLong(r->world)) == 0 && put(d, "slowest_rank", PyLong_FromLong(r->slowest_rank)) == 0 &&
        put(d, "ranks", ranks_to_python(r)) == 0) {
        return d;
    }
    Py_XDECREF(d);
    return NULL;
}

/* ---- the call ---- */

typedef struct save_job {
    save_args *args;
    core_call *call;
    core_tree *tree;
    dcp_save_report *report;
} save_job;

static dcp_status work(void *arg, dcp_error *err)
{
    save_job *j = arg;
    return dcp_save(j->call->ctx, PyBytes_AsString(j->args->path), j->tree->root, &j->args->opts, j->report, err);
}

/* The save failed, and the caller wants to go on; but not after Ctrl-C. */
static void forgive(core_call *c)
{
    if (c->exception && !PyErr_GivenExceptionMatches(c->exception, PyExc_KeyboardInterrupt)) {
        Py_CLEAR(c->exception);
    }
}

/* Makes the tree, and finds out what of its memory is lent. */
static int look_at(save_args *a, core_tree *tree, core_lending *lending, core_call *call, dcp_error *failed)
{
    bool in_group = a->opts.comm != NULL;
    if (tree_make(tree, a->tree, in_group, call, failed) < 0) {
        return -1;
    }
    if (failed->code != DCP_OK || lending_ask(lending, a->lent, a->returned, &a->opts.lending) == 0) {
        return 0;
    }
    return in_group ? (errors_take(&call->exception, failed), 0) : -1;
}

static PyObject *save(save_args *a)
{
    core_call call;
    core_tree tree;
    core_lending lending = {0};
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_error failed = DCP_ERROR_INIT;
    dcp_status status = DCP_OK;
    PyObject *result = NULL;
    if (tree_begin(&tree, a->describe, a->pickle, a->tensor_types) < 0 ||
        call_begin(&call, a->threads, a->memory_bytes, a->progress) < 0) {
        return NULL;
    }
    tree.stream = a->stream;
    report.n_ranks = a->opts.comm ? (size_t)dcp_comm_size(a->opts.comm) : 1;
    report.ranks = PyMem_Calloc(report.n_ranks, sizeof *report.ranks);
    int made = report.ranks ? look_at(a, &tree, &lending, &call, &failed) : (PyErr_NoMemory(), -1);
    if (made == 0) {
        a->opts.progress = call_progress;
        a->opts.user = &call;
        a->opts.stream = tree.stream_handle;
        a->opts.failures = call.failures;
        a->opts.failed = failed.code != DCP_OK ? &failed : NULL;
        status = call_run(&call, work, &(save_job){a, &call, &tree, &report}, a->opts.comm == NULL);
        group_done(a->group, &call.exception);
        if (status == DCP_OK && report.status != DCP_OK) {
            forgive(&call);
        }
    }
    if (call_end(&call, status) == 0 && made == 0) {
        result = save_report_to_python(&report);
    }
    PyMem_Free(report.ranks);
    lending_reset(&lending);
    tree_reset(&tree);
    return result;
}

PyObject *core_save(PyObject *module, PyObject *args, PyObject *kwargs)
{
    save_args a;
    (void)module;
    PyObject *result = parse(&a, args, kwargs) == 0 && set_opts(&a) == 0 ? save(&a) : NULL;
    strings_free(a.patterns);
    Py_XDECREF(a.path);
    Py_XDECREF(a.checkpoint_id);
    return result;
}
