/* Open checkpoints. */
#include <stdlib.h>
#include <string.h>

#include "core.h"

#define MOVE_BYTES ((uint64_t)4 << 20) /* smaller reads are over before anybody could interrupt them */

typedef struct checkpoint {
    PyObject_HEAD PyObject *context; /* capsule: what was read out of the checkpoint outlives it */
    dcp_checkpoint *ck;              /* NULL: closed */
    int users;
} checkpoint;

static PyTypeObject *checkpoint_type;

bool is_checkpoint(PyObject *object)
{
    return PyObject_TypeCheck(object, checkpoint_type);
}

dcp_checkpoint *checkpoint_of(PyObject *object)
{
    checkpoint *c = (checkpoint *)object;
    if (!c->ck) {
        errors_raise_text(DCP_STATE, "the checkpoint has been closed");
    }
    return c->ck;
}

PyObject *checkpoint_context(PyObject *object)
{
    return ((checkpoint *)object)->context;
}

void checkpoint_enter(PyObject *object)
{
    if (is_checkpoint(object)) {
        ((checkpoint *)object)->users++;
    }
}

void checkpoint_leave(PyObject *object)
{
    if (is_checkpoint(object)) {
        ((checkpoint *)object)->users--;
    }
}

static PyObject *checkpoint_close(PyObject *self, PyObject *unused)
{
    checkpoint *c = (checkpoint *)self;
    (void)unused;
    if (c->users) {
        return errors_raise_text(DCP_STATE, "the checkpoint is in use on another thread");
    }
    dcp_checkpoint_close(c->ck);
    c->ck = NULL;
    Py_RETURN_NONE;
}

static void checkpoint_free(PyObject *self)
{
    checkpoint *c = (checkpoint *)self;
    dcp_checkpoint_close(c->ck);
    Py_XDECREF(c->context);
    object_free(self);
}

/* ---- items ---- */

/* "rank.<r>.<name>" is how the own values of single ranks are called. */
static const dcp_item *find_own(const dcp_checkpoint *ck, dcp_str name)
{
    char *end;
    if (name.len < 8 || memcmp(name.ptr, "rank.", 5) != 0 || name.ptr[5] < '0' || name.ptr[5] > '9') {
        return NULL;
    }
    long rank = strtol(name.ptr + 5, &end, 10);
    if (*end != '.' || rank > INT32_MAX) {
        return NULL;
    }
    size_t skip = (size_t)(end + 1 - name.ptr);
    const dcp_item *item = dcp_checkpoint_find_rank(ck, (dcp_str){name.ptr + skip, name.len - skip}, (int)rank);
    return item && item->rank >= 0 ? item : NULL;
}

static const dcp_item *find(const dcp_checkpoint *ck, PyObject *fqn)
{
    dcp_str name;
    PyObject *holder;
    if (!PyUnicode_Check(fqn)) {
        PyErr_Format(PyExc_TypeError, "a name must be a str, not %R", (PyObject *)Py_TYPE(fqn));
        return NULL;
    }
    if (str_from_python(fqn, &name, &holder) < 0) {
        return NULL;
    }
    const dcp_item *item = dcp_checkpoint_find(ck, name);
    item = item ? item : find_own(ck, name);
    Py_XDECREF(holder);
    if (!item) {
        PyErr_SetObject(PyExc_KeyError, fqn);
    }
    return item;
}

static PyObject *name_of(const dcp_item *item)
{
    PyObject *name = str_to_python(item->fqn);
    if (name && item->rank >= 0) {
        PyObject *longer = PyUnicode_FromFormat("rank.%d.%U", item->rank, name);
        Py_DECREF(name);
        name = longer;
    }
    return name;
}

static const char *kind_of(const dcp_item *item)
{
    return item->kind == DCP_ITEM_TENSOR ? "tensor" : "object";
}

static PyObject *dtype_of(const dcp_item *item)
{
    return item->kind == DCP_ITEM_TENSOR ? PyUnicode_FromString(dcp_dtype_name(item->dtype)) : Py_NewRef(Py_None);
}

static PyObject *shape_of(const dcp_item *item)
{
    return item->kind == DCP_ITEM_TENSOR ? integers_to(item->extents, (size_t)item->ndim) : Py_NewRef(Py_None);
}

static PyObject *checkpoint_names(PyObject *self, PyObject *unused)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    size_t n = ck ? dcp_checkpoint_count(ck) : 0;
    PyObject *list = ck ? PyList_New((Py_ssize_t)n) : NULL;
    (void)unused;
    for (size_t i = 0; list && i < n; i++) {
        PyObject *name = name_of(dcp_checkpoint_item(ck, i));
        if (!name || PyList_SetItem(list, (Py_ssize_t)i, name) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *checkpoint_item(PyObject *self, PyObject *fqn)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    const dcp_item *item = ck ? find(ck, fqn) : NULL;
    if (!item) {
        return NULL;
    }
    PyObject *dtype = dtype_of(item), *shape = shape_of(item), *path = path_to_python(item->path, item->path_len);
    PyObject *result = dtype && shape && path ? Py_BuildValue("(sOOKnO)", kind_of(item), dtype, shape,
                                                              (unsigned long long)item->bytes, (Py_ssize_t)item->n_chunks, path)
                                              : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(path);
    return result;
}

/* (offsets, sizes, file, offset, length, transforms) */
static PyObject *chunk_to_python(const dcp_checkpoint *ck, const dcp_item *item, size_t i)
{
    dcp_chunk_info c;
    dcp_error err = DCP_ERROR_INIT;
    size_t ndim = item->kind == DCP_ITEM_TENSOR ? (size_t)item->ndim : 0;
    if (dcp_item_chunk(ck, item, i, &c, &err) != DCP_OK) {
        return errors_raise(&err, NULL, NULL);
    }
    PyObject *offsets = integers_to(c.box.offsets, ndim), *sizes = integers_to(c.box.sizes, ndim);
    PyObject *file = c.file ? str_to_python(dcp_str_of(c.file)) : Py_NewRef(Py_None);
    PyObject *chunk = offsets && sizes && file ? Py_BuildValue("(OOOKKs)", offsets, sizes, file, (unsigned long long)c.offset,
                                                               (unsigned long long)c.length, c.transforms)
                                               : NULL;
    Py_XDECREF(offsets);
    Py_XDECREF(sizes);
    Py_XDECREF(file);
    return chunk;
}

static PyObject *row_to_python(const dcp_checkpoint *ck, const dcp_item *item)
{
    PyObject *chunks = PyList_New((Py_ssize_t)item->n_chunks), *row = NULL;
    for (size_t i = 0; chunks && i < item->n_chunks; i++) {
        PyObject *chunk = chunk_to_python(ck, item, i);
        if (!chunk || PyList_SetItem(chunks, (Py_ssize_t)i, chunk) < 0) {
            Py_CLEAR(chunks);
        }
    }
    PyObject *name = name_of(item), *dtype = dtype_of(item), *shape = shape_of(item);
    PyObject *path = path_to_python(item->path, item->path_len);
    if (chunks && name && dtype && shape && path) {
        row = Py_BuildValue("(OsOOOO)", name, kind_of(item), dtype, shape, path, chunks);
    }
    Py_XDECREF(chunks);
    Py_XDECREF(name);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(path);
    return row;
}

static PyObject *checkpoint_rows(PyObject *self, PyObject *unused)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    size_t n = ck ? dcp_checkpoint_count(ck) : 0;
    PyObject *list = ck ? PyList_New((Py_ssize_t)n) : NULL;
    (void)unused;
    for (size_t i = 0; list && i < n; i++) {
        PyObject *row = row_to_python(ck, dcp_checkpoint_item(ck, i));
        if (!row || PyList_SetItem(list, (Py_ssize_t)i, row) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *checkpoint_info(PyObject *self, PyObject *unused)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    dcp_checkpoint_info i = DCP_CHECKPOINT_INFO_INIT;
    dcp_error err = DCP_ERROR_INIT;
    (void)unused;
    if (!ck) {
        return NULL;
    }
    if (dcp_checkpoint_get_info(ck, &i, &err) != DCP_OK) {
        return errors_raise(&err, NULL, NULL);
    }
    PyObject *d = PyDict_New();
    if (d && put(d, "layout", PyUnicode_FromString(dcp_layout_name(i.layout))) == 0 &&
        put(d, "world", PyLong_FromLong(i.world)) == 0 && put(d, "writer", str_to_python(dcp_str_of(i.writer))) == 0 &&
        put(d, "version", str_to_python(dcp_str_of(i.version))) == 0 &&
        put(d, "save_id", str_to_python(dcp_str_of(i.save_id))) == 0 &&
        put(d, "checkpoint_id", str_to_python(dcp_str_of(i.checkpoint_id))) == 0 &&
        put(d, "n_items", PyLong_FromSize_t(i.n_items)) == 0 && put(d, "n_tensors", PyLong_FromSize_t(i.n_tensors)) == 0 &&
        put(d, "n_objects", PyLong_FromSize_t(i.n_objects)) == 0 && put(d, "n_chunks", PyLong_FromSize_t(i.n_chunks)) == 0 &&
        put(d, "n_files", PyLong_FromSize_t(i.n_files)) == 0 &&
        put(d, "tensor_bytes", PyLong_FromUnsignedLongLong(i.tensor_bytes)) == 0 &&
        put(d, "metadata_bytes", PyLong_FromUnsignedLongLong(i.metadata_bytes)) == 0) {
        return d;
    }
    Py_XDECREF(d);
    return NULL;
}

/* ---- reading ---- */

/* One work of the library on a checkpoint. */
typedef struct job {
    core_call call; /* first: the hooks get this as `user` */
    dcp_checkpoint *ck;
    dcp_read_request *requests;
    size_t n;
    void *stream;
    const dcp_item *item;
    dcp_value *value;
    char *record;
    size_t record_len;
    bool with_data;
    uint8_t digest[32];
    dcp_verify_opts verify;
    dcp_verify_report verified;
    PyObject *defect, *defects;
} job;

static int run(PyObject *self, job *j, core_work work, bool may_move, PyObject *progress)
{
    j->ck = checkpoint_of(self);
    if (!j->ck || call_begin(&j->call, 0, 0, progress) < 0) {
        return -1;
    }
    checkpoint_enter(self);
    dcp_status status = call_run(&j->call, work, j, may_move);
    checkpoint_leave(self);
    return call_end(&j->call, status);
}

static dcp_status do_read(void *arg, dcp_error *err)
{
    job *j = arg;
    dcp_read_opts opts = {.struct_size = sizeof opts, .progress = call_progress, .user = j, .stream = j->stream};
    return dcp_read_many_with(j->ck, j->requests, j->n, &opts, err);
}

/* What one request needs besides the struct of the library. */
typedef struct numbers {
    int64_t tensor[2 * DCP_MAX_NDIM], offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
} numbers;

/* (fqn, offsets or None, sizes or None, descriptor) */
static int request_from(const dcp_checkpoint *ck, core_keep *keep, PyObject *fqn, PyObject *offsets, PyObject *sizes,
                        PyObject *descriptor, dcp_read_request *out, numbers *n)
{
    *out = (dcp_read_request){.item = find(ck, fqn)};
    if (!out->item || tensor_from_descriptor(keep, descriptor, true, &out->dst, n->tensor) < 0) {
        return -1;
    }
    if (is_overlapping(&out->dst)) {
        PyErr_Format(PyExc_RuntimeError, "%U: " ONE_PLACE, fqn);
        return -1;
    }
    if (offsets == Py_None) {
        return 0;
    }
    if (integers_from(offsets, out->item->ndim, n->offsets, "offsets") < 0 ||
        integers_from(sizes, out->item->ndim, n->sizes, "sizes") < 0) {
        return -1;
    }
    out->box = (dcp_box){n->offsets, n->sizes};
    return 0;
}

static uint64_t bytes_of(const dcp_read_request *requests, size_t n)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t elems;
        bytes += dcp_tensor_elems(&requests[i].dst, &elems, NULL) == DCP_OK
                     ? (uint64_t)elems * dcp_dtype_bytes(requests[i].dst.dtype)
                     : 0;
    }
    return bytes;
}

/* entries: a tuple of tuples. */
static int read_entries(PyObject *self, PyObject *entries, PyObject *progress, void *stream)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    core_keep keep = {0};
    size_t n = (size_t)PyTuple_Size(entries);
    job j = {.n = n, .stream = stream, .requests = PyMem_Calloc(n + 1, sizeof *j.requests)};
    numbers *all = PyMem_Calloc(n + 1, sizeof *all);
    int result = !ck || keep_init(&keep) < 0 ? -1 : 0;
    if (result == 0 && (!j.requests || !all)) {
        PyErr_NoMemory();
        result = -1;
    }
    for (size_t i = 0; i < n && result == 0; i++) {
        PyObject *fqn, *offsets, *sizes, *descriptor;
        result =
            PyArg_ParseTuple(PyTuple_GetItem(entries, (Py_ssize_t)i), "OOOO;a request must be (name, offsets, sizes, descriptor)",
                             &fqn, &offsets, &sizes, &descriptor)
                ? request_from(ck, &keep, fqn, offsets, sizes, descriptor, &j.requests[i], &all[i])
                : -1;
    }
    if (result == 0) {
        result = run(self, &j, do_read, bytes_of(j.requests, n) >= MOVE_BYTES, progress);
    }
    keep_reset(&keep);
    PyMem_Free(j.requests);
    PyMem_Free(all);
    return result;
}

static PyObject *checkpoint_read_many(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"requests", "progress", "stream", NULL};
    PyObject *requests, *progress = NULL, *number = NULL;
    void *stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OO:read_many", keywords, &requests, &progress, &number) ||
        stream_from(number, &stream) < 0) {
        return NULL;
    }
    PyObject *entries = PySequence_Tuple(requests);
    int result = entries ? read_entries(self, entries, progress, stream) : -1;
    Py_XDECREF(entries);
    return result == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyObject *checkpoint_read(PyObject *self, PyObject *args)
{
    PyObject *entries = PyTuple_Pack(1, args);
    int result = entries ? read_entries(self, entries, NULL, NULL) : -1;
    Py_XDECREF(entries);
    return result == 0 ? Py_NewRef(Py_None) : NULL;
}

static dcp_status do_record(void *arg, dcp_error *err)
{
    job *j = arg;
    return dcp_read_record(j->ck, j->item, &j->record, &j->record_len, err);
}

static PyObject *checkpoint_object_bytes(PyObject *self, PyObject *fqn)
{
    const dcp_checkpoint *ck = checkpoint_of(self);
    job j = {.item = ck ? find(ck, fqn) : NULL};
    if (!j.item) {
        return NULL;
    }
    PyObject *bytes = run(self, &j, do_record, j.item->bytes >= MOVE_BYTES, NULL) == 0
                          ? PyBytes_FromStringAndSize(j.record, (Py_ssize_t)j.record_len)
                          : NULL;
    dcp_text_free(NULL, j.record); /* of the ordinary allocator, as all contexts here */
    return bytes;
}

static dcp_status do_object(void *arg, dcp_error *err)
{
    job *j = arg;
    return dcp_read_object(j->ck, j->item, &j->value, err);
}

static dcp_status do_tree(void *arg, dcp_error *err)
{
    job *j = arg;
    return dcp_read_tree(j->ck, j->with_data, &j->value, err);
}

static PyObject *finish_value(PyObject *self, job *j, PyObject *tensor, PyObject *opaque)
{
    PyObject *object = value_to_python(j->value, tensor == Py_None ? NULL : tensor, opaque == Py_None ? NULL : opaque,
                                       ((checkpoint *)self)->context);
    dcp_value_free(j->value);
    if (!object && !PyErr_Occurred()) {
        errors_raise_text(DCP_UNSUPPORTED, "it holds tensors or objects of classes that are not known here");
    }
    return object;
}

static PyObject *checkpoint_object(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"fqn", "make_tensor", "make_opaque", NULL};
    PyObject *fqn, *tensor = Py_None, *opaque = Py_None;
    const dcp_checkpoint *ck = checkpoint_of(self);
    if (!ck || !PyArg_ParseTupleAndKeywords(args, kwargs, "O|$OO:object", keywords, &fqn, &tensor, &opaque)) {
        return NULL;
    }
    job j = {.item = find(ck, fqn)};
    return j.item && run(self, &j, do_object, j.item->bytes >= MOVE_BYTES, NULL) == 0 ? finish_value(self, &j, tensor, opaque)
                                                                                      : NULL;
}

static PyObject *checkpoint_tree(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"make_tensor", "make_opaque", "with_data", NULL};
    PyObject *tensor = Py_None, *opaque = Py_None;
    int with_data = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOp:tree", keywords, &tensor, &opaque, &with_data)) {
        return NULL;
    }
    job j = {.with_data = with_data};
    return run(self, &j, do_tree, true, NULL) == 0 ? finish_value(self, &j, tensor, opaque) : NULL;
}

/* ---- checking ---- */

static dcp_status do_hash(void *arg, dcp_error *err)
{
    job *j = arg;
    return dcp_item_sha256(j->ck, j->item, j->digest, err);
}

static PyObject *checkpoint_hash(PyObject *self, PyObject *fqn)
{
    static const char digits[] = "0123456789abcdef";
    char text[65];
    const dcp_checkpoint *ck = checkpoint_of(self);
    job j = {.item = ck ? find(ck, fqn) : NULL};
    if (!j.item || run(self, &j, do_hash, true, NULL) < 0) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof j.digest; i++) {
        text[2 * i] = digits[j.digest[i] >> 4];
        text[2 * i + 1] = digits[j.digest[i] & 15];
    }
    return PyUnicode_FromStringAndSize(text, 64);
}

static PyObject *defect_to_python(const dcp_defect *d)
{
    PyObject *file = d->file ? str_to_python(dcp_str_of(d->file)) : Py_NewRef(Py_None);
    PyObject *fqn = d->fqn.ptr ? str_to_python(d->fqn) : Py_NewRef(Py_None);
    PyObject *offset = d->offset == DCP_NO_OFFSET ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(d->offset);
    PyObject *text = PyUnicode_DecodeUTF8(d->message, (Py_ssize_t)strlen(d->message), "replace");
    PyObject *result = file && fqn && offset && text ? Py_BuildValue("{s:s,s:O,s:O,s:O,s:O}", "code", dcp_status_name(d->code),
                                                                     "file", file, "fqn", fqn, "offset", offset, "message", text)
                                                     : NULL;
    Py_XDECREF(file);
    Py_XDECREF(fqn);
    Py_XDECREF(offset);
    Py_XDECREF(text);
    return result;
}

static void on_defect(void *user, const dcp_defect *defect)
{
    job *j = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *d = defect_to_python(defect), *done = NULL;
    if (d && PyList_Append(j->defects, d) == 0) {
        done = j->defect ? PyObject_CallFunctionObjArgs(j->defect, d, NULL) : Py_NewRef(Py_None);
    }
    if (!done) {
        errors_take(&j->call.exception, NULL);
    }
    Py_XDECREF(d);
    Py_XDECREF(done);
    PyGILState_Release(gil);
}

static dcp_status do_verify(void *arg, dcp_error *err)
{
    job *j = arg;
    return dcp_verify(j->ck, &j->verify, &j->verified, err);
}

static PyObject *checkpoint_verify(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"quick", "defect", "progress", NULL};
    int quick = 0;
    PyObject *defect = Py_None, *progress = NULL, *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pOO:verify", keywords, &quick, &defect, &progress)) {
        return NULL;
    }
    job j = {.verify = DCP_VERIFY_OPTS_INIT, .verified = DCP_VERIFY_REPORT_INIT, .defect = defect == Py_None ? NULL : defect};
    j.verify.quick = quick;
    j.verify.defect = on_defect;
    j.verify.progress = call_progress;
    j.verify.user = &j;
    j.defects = PyList_New(0);
    if (j.defects && run(self, &j, do_verify, true, progress) == 0) {
        const dcp_verify_report *r = &j.verified;
        result = Py_BuildValue("{s:n,s:n,s:n,s:n,s:K,s:O,s:O}", "n_defects", (Py_ssize_t)r->n_defects, "n_records",
                               (Py_ssize_t)r->n_records, "n_files", (Py_ssize_t)r->n_files, "n_unchecked",
                               (Py_ssize_t)r->n_unchecked, "bytes", (unsigned long long)r->bytes, "has_digests",
                               r->has_digests ? Py_True : Py_False, "defects", j.defects);
    }
    Py_XDECREF(j.defects);
    return result;
}

/* ---- the type ---- */

static PyObject *checkpoint_self(PyObject *self, PyObject *unused)
{
    (void)unused;
    return checkpoint_of(self) ? Py_NewRef(self) : NULL;
}

static PyObject *checkpoint_exit(PyObject *self, PyObject *unused)
{
    return checkpoint_close(self, unused);
}

static PyMethodDef methods[] = {
    {"info", checkpoint_info, METH_NOARGS, "info()\n--\n\nFacts about the whole, as a dict."},
    {"names", checkpoint_names, METH_NOARGS, "names()\n--\n\nNames of all items, in the order of the metadata."},
    {"item", checkpoint_item, METH_O, "item(fqn)\n--\n\n(kind, dtype, shape, bytes, n_chunks, path) of an item."},
    {"rows", checkpoint_rows, METH_NOARGS,
     "rows()\n--\n\nAll items: (fqn, kind, dtype, shape, path, [(offsets, sizes, file, offset, length, transforms), ...])."},
    {"read", checkpoint_read, METH_VARARGS,
     "read(fqn, offsets, sizes, descriptor)\n--\n\nReads a box of a tensor (None, None: all of it) into a tensor descriptor."},
    {"read_many", (PyCFunction)(void (*)(void))checkpoint_read_many, METH_VARARGS | METH_KEYWORDS,
     "read_many(requests, *, progress=None, stream=None)\n--\n\nReads (fqn, offsets, sizes, descriptor) requests as one plan."},
    {"object_bytes", checkpoint_object_bytes, METH_O, "object_bytes(fqn)\n--\n\nThe record of an object, as its saver made it."},
    {"object", (PyCFunction)(void (*)(void))checkpoint_object, METH_VARARGS | METH_KEYWORDS,
     "object(fqn, *, make_tensor=None, make_opaque=None)\n--\n\nAn object, decoded. UnsupportedError if it holds what Python's\n"
     "own types do not and there is no function for it: make_tensor(dtype, shape, memory), make_opaque(kind, text)."},
    {"tree", (PyCFunction)(void (*)(void))checkpoint_tree, METH_VARARGS | METH_KEYWORDS,
     "tree(*, make_tensor, make_opaque, with_data=True)\n--\n\nThe whole checkpoint, nested as it was saved."},
    {"verify", (PyCFunction)(void (*)(void))checkpoint_verify, METH_VARARGS | METH_KEYWORDS,
     "verify(quick=False, defect=None, progress=None)\n--\n\nChecks everything that can be checked; a report, as a dict."},
    {"hash", checkpoint_hash, METH_O, "hash(fqn)\n--\n\nSHA-256 of the row-major little-endian bytes of a tensor."},
    {"close", checkpoint_close, METH_NOARGS, "close()\n--\n\nCloses the files. Later calls raise StateError."},
    {"__enter__", checkpoint_self, METH_NOARGS, NULL},
    {"__exit__", checkpoint_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "An open checkpoint; see open()."},
    {Py_tp_dealloc, checkpoint_free},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "libdcp._core.Checkpoint",
    .basicsize = sizeof(checkpoint),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

int checkpoint_init(PyObject *module)
{
    checkpoint_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return checkpoint_type ? PyModule_AddObjectRef(module, "Checkpoint", (PyObject *)checkpoint_type) : -1;
}

/* ---- opening ---- */

typedef struct opening {
    dcp_context *ctx;
    const char *path;
    dcp_open_opts opts;
    dcp_checkpoint *ck;
} opening;

static dcp_status do_open(void *arg, dcp_error *err)
{
    opening *o = arg;
    return dcp_checkpoint_open(o->ctx, o->path, &o->opts, &o->ck, err);
}

static PyObject *open_at(opening *o)
{
    core_call call;
    PyObject *context = context_new(0, 0, &o->ctx);
    checkpoint *c = context ? object_new(checkpoint_type) : NULL;
    if (!c || call_begin(&call, 0, 0, NULL) < 0) {
        Py_XDECREF(context);
        Py_XDECREF((PyObject *)c);
        return NULL;
    }
    c->context = context;
    dcp_status status = call_run(&call, do_open, o, false);
    c->ck = o->ck;
    if (call_end(&call, status) < 0) {
        Py_CLEAR(c);
    }
    return (PyObject *)c;
}

PyObject *core_open(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"path", "rank", "check_crc", "allow_outside", "allow_shard_gaps", NULL};
    opening o = {.opts = DCP_OPEN_OPTS_INIT};
    PyObject *path;
    int check_crc = 0, allow_outside = 0, allow_shard_gaps = 0;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$ippp:open", keywords, PyUnicode_FSConverter, &path, &o.opts.rank,
                                     &check_crc, &allow_outside, &allow_shard_gaps)) {
        return NULL;
    }
    o.opts.check_crc = check_crc;
    o.opts.allow_outside = allow_outside;
    o.opts.allow_shard_gaps = allow_shard_gaps;
    o.path = PyBytes_AsString(path);
    PyObject *result = open_at(&o);
    Py_DECREF(path);
    return result;
}

/* ---- the newest ---- */

typedef struct search {
    const char *dir;
    char *found;
} search;

static dcp_status do_latest(void *arg, dcp_error *err)
{
    search *s = arg;
    return dcp_latest(NULL, s->dir, NULL, NULL, NULL, &s->found, err);
}

PyObject *core_latest(PyObject *module, PyObject *path)
{
    core_call call;
    search s = {0};
    PyObject *dir, *result = NULL;
    (void)module;
    if (!PyUnicode_FSConverter(path, &dir)) {
        return NULL;
    }
    s.dir = PyBytes_AsString(dir);
    if (call_begin(&call, 0, 0, NULL) == 0 && call_end(&call, call_run(&call, do_latest, &s, false)) == 0) {
        PyObject *parent = PyUnicode_DecodeFSDefault(s.dir), *name = PyUnicode_DecodeFSDefault(s.found);
        bool is_below = s.found[0] && strcmp(s.found, ".") != 0;
        bool has_slash = s.dir[0] && s.dir[strlen(s.dir) - 1] == '/';
        if (parent && name) {
            result = is_below ? PyUnicode_FromFormat("%U%s%U", parent, has_slash ? "" : "/", name) : Py_NewRef(parent);
        }
        Py_XDECREF(parent);
        Py_XDECREF(name);
    }
    dcp_text_free(NULL, s.found);
    Py_DECREF(dir);
    return result;
}
