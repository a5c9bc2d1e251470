/* Saves under somebody else's planner and collectives: claim(), write_items(), Claim.publish(). */
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* ---- options that both share ---- */

typedef struct shared_args {
    PyObject *path; /* bytes, owned */
    const char *serialization;
    int sync, file_per_item, threads, align_payloads;
    unsigned long long memory_bytes;
    PyObject *progress;
    dcp_save_opts opts;
} shared_args;

static int set_shared(shared_args *a)
{
    a->opts.no_sync = !a->sync;
    a->opts.file_per_item = a->file_per_item;
    a->opts.align_payloads = a->align_payloads;
    return serialization_from(a->serialization, &a->opts.serialization);
}

/* ---- writing ---- */

/* The plan of items, all of which stay the caller's. Names are numbers: nobody sees them but in messages. */
typedef struct item_list {
    core_keep keep;
    dcp_save_plan *plan;
    dcp_value **values;
    char (*names)[24];
    int64_t (*numbers)[2 * DCP_MAX_NDIM];
    size_t n;
} item_list;

static const int64_t zeros[DCP_MAX_NDIM];

static int add_tensor(item_list *l, dcp_write_item *item, size_t i, PyObject *descriptor)
{
    dcp_error err = DCP_ERROR_INIT;
    if (tensor_from_descriptor(&l->keep, descriptor, false, &item->tensor, l->numbers[i]) < 0) {
        return -1;
    }
    item->kind = DCP_ITEM_TENSOR;
    item->dtype = item->tensor.dtype;
    item->ndim = item->tensor.ndim;
    item->global_extents = item->tensor.extents;
    item->box = (dcp_box){zeros, item->tensor.extents};
    /* Tensors without elements may have no address. */
    static char nothing;
    item->tensor.data = item->tensor.data ? item->tensor.data : &nothing;
    /* The value checks what the descriptor says of the memory. */
    if (dcp_tensor_create(NULL, &item->tensor, &l->values[i], &err) != DCP_OK ||
        dcp_save_plan_add(l->plan, item, &err) != DCP_OK) {
        errors_raise(&err, NULL, NULL);
        return -1;
    }
    return 0;
}

static int add_record(item_list *l, dcp_write_item *item, size_t i, PyObject *object)
{
    const void *bytes;
    size_t len;
    dcp_error err = DCP_ERROR_INIT;
    if (keep_bytes(&l->keep, object, &bytes, &len) < 0) {
        return -1;
    }
    if (dcp_record_create(NULL, bytes, len, &l->values[i], &err) == DCP_OK) {
        item->kind = DCP_ITEM_OBJECT;
        item->object = l->values[i];
        if (dcp_save_plan_add(l->plan, item, &err) == DCP_OK) {
            return 0;
        }
    }
    errors_raise(&err, NULL, NULL);
    return -1;
}

/* A tensor descriptor, or a bytes-like object; either may stand in a tuple of one. */
static int add_item(item_list *l, size_t i, PyObject *object)
{
    PyObject *first = PyTuple_Check(object) && PyTuple_Size(object) ? PyTuple_GetItem(object, 0) : NULL;
    if (first && PyTuple_Size(object) == 1) {
        return add_item(l, i, first);
    }
    PyOS_snprintf(l->names[i], sizeof l->names[i], "%zu", i);
    dcp_write_item item = {.fqn = dcp_str_of(l->names[i])};
    return first ? add_tensor(l, &item, i, object) : add_record(l, &item, i, object);
}

static int items_begin(item_list *l, PyObject *items)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *empty;
    *l = (item_list){.n = (size_t)PyTuple_Size(items)};
    l->values = PyMem_Calloc(l->n + 1, sizeof(dcp_value *));
    l->names = PyMem_Calloc(l->n + 1, sizeof *l->names);
    l->numbers = PyMem_Calloc(l->n + 1, sizeof *l->numbers);
    if (!l->values || !l->names || !l->numbers) {
        PyErr_NoMemory();
        return -1;
    }
    dcp_status status = dcp_dict_create(NULL, &empty, &err);
    if (status == DCP_OK) {
        status = dcp_plan_save(NULL, empty, &l->plan, &err);
        dcp_value_free(empty);
    }
    if (status != DCP_OK) {
        errors_raise(&err, NULL, NULL);
        return -1;
    }
    int result = keep_init(&l->keep);
    for (size_t i = 0; i < l->n && result == 0; i++) {
        result = add_item(l, i, PyTuple_GetItem(items, (Py_ssize_t)i));
    }
    return result;
}

static void items_end(item_list *l)
{
    dcp_save_plan_free(l->plan);
    for (size_t i = 0; l->values && i < l->n; i++) {
        dcp_value_free(l->values[i]);
    }
    PyMem_Free(l->values);
    PyMem_Free(l->names);
    PyMem_Free(l->numbers);
    keep_reset(&l->keep);
}

typedef struct write_job {
    const shared_args *args;
    core_call *call;
    const char *prefix;
    item_list list;
    dcp_written *written;
} write_job;

static dcp_status do_write(void *arg, dcp_error *err)
{
    write_job *j = arg;
    return dcp_write_files(j->call->ctx, PyBytes_AsString(j->args->path), j->prefix, j->list.plan, &j->args->opts, j->written,
                           NULL, err);
}

static PyObject *written_to_python(const write_job *j)
{
    PyObject *list = PyList_New((Py_ssize_t)j->list.n);
    for (size_t i = 0; list && i < j->list.n; i++) {
        const dcp_written *w = &j->written[i];
        PyObject *file = PyUnicode_FromFormat("%s%u.distcp", j->prefix, (unsigned)w->file);
        PyObject *entry =
            file ? Py_BuildValue("(NKK)", file, (unsigned long long)w->offset, (unsigned long long)w->length) : NULL;
        if (!entry || PyList_SetItem(list, (Py_ssize_t)i, entry) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *write_all(shared_args *a, const char *prefix, PyObject *items)
{
    core_call call;
    write_job j = {.args = a, .call = &call, .prefix = prefix};
    PyObject *result = NULL;
    dcp_status status = DCP_OK;
    if (call_begin(&call, a->threads, a->memory_bytes, a->progress) < 0) {
        return NULL;
    }
    int made = items_begin(&j.list, items);
    j.written = made == 0 ? PyMem_Calloc(j.list.n + 1, sizeof *j.written) : NULL;
    if (made == 0 && !j.written) {
        PyErr_NoMemory();
        made = -1;
    }
    if (made == 0) {
        a->opts.progress = call_progress;
        a->opts.user = &call;
        status = call_run(&call, do_write, &j, true);
        a->opts.user = NULL;
    }
    if (call_end(&call, status) == 0 && made == 0) {
        result = written_to_python(&j);
    }
    PyMem_Free(j.written);
    items_end(&j.list);
    return result;
}

PyObject *core_write_items(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {
        "path",    "prefix",       "items",          "files",    "file_per_item", "sync",   "transform",        "serialization",
        "threads", "memory_bytes", "align_payloads", "progress", "stream",        "helper", "copy_ahead_bytes", NULL};
    shared_args a = {.sync = 1, .serialization = "torch_save", .opts = DCP_SAVE_OPTS_INIT};
    unsigned long long copy_ahead = DCP_COPY_AHEAD_BYTES;
    const char *prefix;
    PyObject *items, *stream = NULL, *helper = NULL, *result = NULL;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&sO|$ippzsiKpOOOK:write_items", keywords, PyUnicode_FSConverter, &a.path,
                                     &prefix, &items, &a.opts.files, &a.file_per_item, &a.sync, &a.opts.transform,
                                     &a.serialization, &a.threads, &a.memory_bytes, &a.align_payloads, &a.progress, &stream,
                                     &helper, &copy_ahead)) {
        return NULL;
    }
    a.opts.copy_ahead_bytes = copy_ahead;
    bool is_good = set_shared(&a) == 0 && stream_from(stream, &a.opts.stream) == 0 && helper_use(helper, &a.opts.helper) == 0;
    PyObject *tuple = is_good ? PySequence_Tuple(items) : NULL;
    result = tuple ? write_all(&a, prefix, tuple) : NULL;
    Py_XDECREF(tuple);
    Py_DECREF(a.path);
    return result;
}

/* ---- claims ---- */

typedef struct claim {
    PyObject_HEAD PyObject *context; /* that the session was made with */
    dcp_save_session *session;       /* NULL: published, or given up */
} claim;

static PyTypeObject *claim_type;

static dcp_save_session *session_of(PyObject *self)
{
    claim *c = (claim *)self;
    if (!c->session) {
        errors_raise_text(DCP_STATE, "the claim has been published or given up");
    }
    return c->session;
}

typedef struct claim_job {
    core_call *call;
    const char *path;
    const dcp_save_opts *opts;
    dcp_save_session *session;
    const dcp_described *rows;
    size_t n;
    dcp_save_report report;
} claim_job;

static dcp_status do_claim(void *arg, dcp_error *err)
{
    claim_job *j = arg;
    return dcp_save_begin(j->call->ctx, j->path, j->opts, &j->session, err);
}

static PyObject *claim_place(shared_args *a)
{
    core_call call;
    claim_job j = {.call = &call, .path = PyBytes_AsString(a->path), .opts = &a->opts};
    claim *c = object_new(claim_type);
    if (!c || call_begin(&call, 0, 0, NULL) < 0) {
        Py_XDECREF((PyObject *)c);
        return NULL;
    }
    dcp_status status = call_run(&call, do_claim, &j, false);
    c->session = j.session;
    c->context = Py_NewRef(call.context); /* the session lives on in it */
    if (call_end(&call, status) < 0) {
        Py_CLEAR(c);
    }
    return (PyObject *)c;
}

PyObject *core_claim(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", "overwrite", "world", "sync", "save_id", "checkpoint_id", "target_release", NULL};
    shared_args a = {.sync = 1, .serialization = "torch_save", .opts = DCP_SAVE_OPTS_INIT};
    PyObject *checkpoint_id = NULL;
    int overwrite = 0;
    (void)module;
    a.opts.world = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$pipzO&i:claim", keywords, PyUnicode_FSConverter, &a.path, &overwrite,
                                     &a.opts.world, &a.sync, &a.opts.save_id, text_converter, &checkpoint_id,
                                     &a.opts.target_release)) {
        return NULL;
    }
    PyObject *result = NULL;
    a.opts.overwrite = overwrite;
    a.opts.checkpoint_id = text_of(checkpoint_id);
    if (a.opts.world < 1) {
        PyErr_Format(PyExc_ValueError, "world must be 1 or more, not %d", a.opts.world);
    } else if (set_shared(&a) == 0) {
        result = claim_place(&a);
    }
    Py_DECREF(a.path);
    Py_XDECREF(checkpoint_id);
    return result;
}

/* ---- rows ---- */

/* What rows of Python point to, until the metadata has been made. */
typedef struct row_list {
    dcp_described *rows;
    size_t n;
    PyObject *keep; /* list: texts that are not UTF-8 */
    void **blocks;
    size_t n_blocks, cap_blocks;
} row_list;

static void *row_alloc(row_list *l, size_t count, size_t bytes)
{
    if (l->n_blocks == l->cap_blocks) {
        size_t cap = l->cap_blocks ? 2 * l->cap_blocks : 64;
        void **grown = PyMem_Realloc(l->blocks, cap * sizeof *grown);
        if (!grown) {
            PyErr_NoMemory();
            return NULL;
        }
        l->blocks = grown;
        l->cap_blocks = cap;
    }
    void *block = PyMem_Calloc(count + 1, bytes);
    if (!block) {
        PyErr_NoMemory();
        return NULL;
    }
    l->blocks[l->n_blocks++] = block;
    return block;
}

static void rows_free(row_list *l)
{
    for (size_t i = 0; i < l->n_blocks; i++) {
        PyMem_Free(l->blocks[i]);
    }
    PyMem_Free(l->blocks);
    Py_XDECREF(l->keep);
}

static int row_text(row_list *l, PyObject *object, dcp_str *out)
{
    PyObject *holder;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "a text is wanted, not %R", object);
        return -1;
    }
    if (str_from_python(object, out, &holder) < 0 || PyList_Append(l->keep, holder ? holder : object) < 0) {
        return -1;
    }
    Py_XDECREF(holder);
    return 0;
}

static const int64_t *row_numbers(row_list *l, PyObject *sequence, Py_ssize_t n, const char *what)
{
    int64_t numbers[DCP_MAX_NDIM];
    int got = integers_from(sequence, n, numbers, what);
    int64_t *kept = got < 0 ? NULL : row_alloc(l, (size_t)got, sizeof *kept);
    if (kept) {
        memcpy(kept, numbers, (size_t)got * sizeof *kept);
    }
    return kept;
}

static int row_path(row_list *l, PyObject *object, dcp_item *item)
{
    PyObject *path = PySequence_Tuple(object);
    size_t n = path ? (size_t)PyTuple_Size(path) : 0;
    dcp_key *keys = path ? row_alloc(l, n, sizeof *keys) : NULL;
    int result = keys && PyList_Append(l->keep, path) == 0 ? 0 : -1;
    for (size_t i = 0; i < n && result == 0; i++) {
        PyObject *key = PyTuple_GetItem(path, (Py_ssize_t)i);
        if (PyLong_Check(key)) {
            keys[i] = dcp_key_int(PyLong_AsLongLong(key));
            result = PyErr_Occurred() ? -1 : 0;
        } else {
            result = row_text(l, key, &keys[i].string);
        }
    }
    Py_XDECREF(path);
    item->path = keys;
    item->path_len = n;
    return result;
}

/* (offsets, sizes, file, offset, length, transforms) */
static int row_chunk(row_list *l, const dcp_item *item, PyObject *entry, dcp_chunk_info *c)
{
    PyObject *offsets, *sizes, *file, *transforms = NULL;
    dcp_str text;
    unsigned long long offset, length;
    if (!PyTuple_Check(entry) ||
        !PyArg_ParseTuple(entry, "OOOKK|O;a chunk must be (offsets, sizes, file, offset, length, transforms)", &offsets, &sizes,
                          &file, &offset, &length, &transforms)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a chunk must be a tuple");
        }
        return -1;
    }
    if (row_text(l, file, &text) < 0) {
        return -1;
    }
    *c = (dcp_chunk_info){.file = text.ptr, .offset = offset, .length = length, .transforms = ""};
    if (transforms && transforms != Py_None) {
        if (row_text(l, transforms, &text) < 0) {
            return -1;
        }
        c->transforms = text.ptr;
    }
    if (item->kind == DCP_ITEM_TENSOR) {
        c->box.offsets = row_numbers(l, offsets, item->ndim, "offsets of a chunk");
        c->box.sizes = c->box.offsets ? row_numbers(l, sizes, item->ndim, "sizes of a chunk") : NULL;
        return c->box.sizes ? 0 : -1;
    }
    return 0;
}

static int row_tensor(row_list *l, PyObject *dtype, PyObject *shape, dcp_item *item)
{
    int64_t numbers[DCP_MAX_NDIM];
    item->kind = DCP_ITEM_TENSOR;
    item->dtype = dtype_from(dtype);
    item->ndim = item->dtype == DCP_DTYPE_NONE ? -1 : integers_from(shape, -1, numbers, "shape");
    item->extents = item->ndim < 0 ? NULL : row_numbers(l, shape, item->ndim, "shape");
    return item->extents ? 0 : -1;
}

/* (fqn, kind, dtype, shape, path, chunks) */
static int row_from(row_list *l, PyObject *entry, dcp_described *row)
{
    PyObject *fqn, *dtype, *shape, *path, *list;
    const char *kind;
    dcp_item *item = &row->item;
    if (!PyTuple_Check(entry) || !PyArg_ParseTuple(entry, "OsOOOO;a row must be (fqn, kind, dtype, shape, path, chunks)", &fqn,
                                                   &kind, &dtype, &shape, &path, &list)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "a row must be a tuple");
        }
        return -1;
    }
    bool is_tensor = strcmp(kind, "tensor") == 0;
    if (!is_tensor && strcmp(kind, "object") != 0) {
        PyErr_Format(PyExc_ValueError, "kind must be \"tensor\" or \"object\", not \"%s\"", kind);
        return -1;
    }
    item->kind = DCP_ITEM_OBJECT;
    if (row_text(l, fqn, &item->fqn) < 0 || (is_tensor && row_tensor(l, dtype, shape, item) < 0) || row_path(l, path, item) < 0) {
        return -1;
    }
    PyObject *chunks = PySequence_Tuple(list);
    item->n_chunks = chunks ? (size_t)PyTuple_Size(chunks) : 0;
    dcp_chunk_info *infos = chunks ? row_alloc(l, item->n_chunks, sizeof *infos) : NULL;
    int result = infos && PyList_Append(l->keep, chunks) == 0 ? 0 : -1;
    for (size_t i = 0; i < item->n_chunks && result == 0; i++) {
        result = row_chunk(l, item, PyTuple_GetItem(chunks, (Py_ssize_t)i), &infos[i]);
    }
    Py_XDECREF(chunks);
    row->chunks = infos;
    return result;
}

static int rows_from(row_list *l, PyObject *rows)
{
    *l = (row_list){.keep = PyList_New(0)};
    PyObject *tuple = l->keep ? PySequence_Tuple(rows) : NULL;
    l->n = tuple ? (size_t)PyTuple_Size(tuple) : 0;
    l->rows = tuple ? row_alloc(l, l->n, sizeof *l->rows) : NULL;
    int result = l->rows && PyList_Append(l->keep, tuple) == 0 ? 0 : -1;
    for (size_t i = 0; i < l->n && result == 0; i++) {
        result = row_from(l, PyTuple_GetItem(tuple, (Py_ssize_t)i), &l->rows[i]);
    }
    Py_XDECREF(tuple);
    return result;
}

/* ---- publishing ---- */

static dcp_status do_publish(void *arg, dcp_error *err)
{
    claim_job *j = arg;
    dcp_status status = dcp_save_describe(j->session, j->rows, j->n, err);
    if (status != DCP_OK) {
        dcp_save_abort(j->session);
        return status;
    }
    return dcp_save_commit(j->session, &j->report, err);
}

static PyObject *publish(claim *c, dcp_save_session *session, const row_list *rows)
{
    core_call call;
    claim_job j = {.call = &call, .session = session, .rows = rows->rows, .n = rows->n, .report = DCP_SAVE_REPORT_INIT};
    if (call_begin(&call, 0, 0, NULL) < 0) {
        return NULL;
    }
    c->session = NULL; /* used up, whatever comes of it */
    dcp_status status = call_run(&call, do_publish, &j, false);
    return call_end(&call, status) == 0 ? save_report_to_python(&j.report) : NULL;
}

static PyObject *claim_publish(PyObject *self, PyObject *rows)
{
    row_list list;
    dcp_save_session *session = session_of(self);
    if (!session) {
        return NULL;
    }
    PyObject *result = rows_from(&list, rows) == 0 ? publish((claim *)self, session, &list) : NULL;
    rows_free(&list);
    return result;
}

static dcp_status do_abort(void *arg, dcp_error *err)
{
    (void)err;
    dcp_save_abort(arg);
    return DCP_OK;
}

static PyObject *claim_abort(PyObject *self, PyObject *unused)
{
    core_call call;
    claim *c = (claim *)self;
    (void)unused;
    if (c->session) {
        if (call_begin(&call, 0, 0, NULL) < 0) {
            return NULL;
        }
        dcp_save_session *session = c->session;
        c->session = NULL;
        if (call_end(&call, call_run(&call, do_abort, session, false)) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *claim_generation(PyObject *self, void *unused)
{
    const dcp_save_session *session = session_of(self);
    (void)unused;
    return session ? PyUnicode_FromString(dcp_save_generation(session)) : NULL;
}

static PyObject *claim_save_id(PyObject *self, void *unused)
{
    const dcp_save_session *session = session_of(self);
    (void)unused;
    return session ? PyUnicode_FromString(dcp_save_id(session)) : NULL;
}

/* Forgotten claims are given up. */
static void claim_free(PyObject *self)
{
    claim *c = (claim *)self;
    dcp_save_abort(c->session);
    Py_XDECREF(c->context);
    object_free(self);
}

static PyMethodDef methods[] = {
    {"publish", claim_publish, METH_O,
     "publish(rows)\n--\n\nWrites the metadata out of rows in the form of Checkpoint.rows(), atomically, and removes what only "
     "the old\n"
     "checkpoint used. The claim is used up; after a failure nothing is published and the files of all ranks are removed."},
    {"abort", claim_abort, METH_NOARGS, "abort()\n--\n\nGives up: removes the files of all ranks. Does nothing after publish()."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef members[] = {
    {"generation", claim_generation, NULL, "Part of the file names, \"__<rank>_<generation>_\"; \"\" where none is needed.",
     NULL},
    {"save_id", claim_save_id, NULL, "The save id, a UUID.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The place of a save that is planned and carried out by other means; see claim()."},
    {Py_tp_dealloc, claim_free},
    {Py_tp_methods, methods},
    {Py_tp_getset, members},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "libdcp._core.Claim",
    .basicsize = sizeof(claim),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int claim_init(PyObject *module)
{
    claim_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return claim_type ? PyModule_AddObjectRef(module, "Claim", (PyObject *)claim_type) : -1;
}
