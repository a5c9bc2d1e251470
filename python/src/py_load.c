/* load(): a checkpoint into a tree of Python objects. */
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* ---- the arguments ---- */

typedef struct load_args {
    PyObject *source, *path, *tree; /* path: bytes, owned; NULL: source is an open Checkpoint */
    PyObject *describe, *load_object, *convert, *group, *include, *exclude, *rename, *per_rank, *difference, *progress,
        *tensor_types, *make_tensor, *make_opaque, *stream, *filling;
    const char *prefix;
    int threads;
    unsigned long long memory_bytes;
    int partial, exact, check_crc, objects_for_tensors;
    dcp_load_opts opts;
    const char **included, **excluded, **own;
} load_args;

static char *keywords[] = {"source",       "tree",      "describe",    "load_object", "convert",      "group",
                           "partial",      "exact",     "include",     "exclude",     "prefix",       "rename",
                           "per_rank",     "check_crc", "difference",  "threads",     "memory_bytes", "progress",
                           "tensor_types", "rank",      "make_tensor", "make_opaque", "stream",       "objects_for_tensors",
                           "filling",      NULL};

static int parse(load_args *a, PyObject *args, PyObject *kwargs)
{
    *a = (load_args){.prefix = "", .opts = DCP_LOAD_OPTS_INIT};
    int rank = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$OOOOppOOsOOpOiKOOiOOOpO:load", keywords, &a->source, &a->tree,
                                     &a->describe, &a->load_object, &a->convert, &a->group, &a->partial, &a->exact, &a->include,
                                     &a->exclude, &a->prefix, &a->rename, &a->per_rank, &a->check_crc, &a->difference,
                                     &a->threads, &a->memory_bytes, &a->progress, &a->tensor_types, &rank, &a->make_tensor,
                                     &a->make_opaque, &a->stream, &a->objects_for_tensors, &a->filling)) {
        return -1;
    }
    a->opts.open.rank = rank;
    return is_checkpoint(a->source) || PyUnicode_FSConverter(a->source, &a->path) ? 0 : -1;
}

static PyObject *function_of(PyObject *object)
{
    return object == Py_None ? NULL : object;
}

static int set_opts(load_args *a)
{
    dcp_load_opts *o = &a->opts;
    a->load_object = function_of(a->load_object);
    a->convert = function_of(a->convert);
    a->rename = function_of(a->rename);
    a->difference = function_of(a->difference);
    a->filling = function_of(a->filling);
    a->make_tensor = function_of(a->make_tensor);
    a->make_opaque = function_of(a->make_opaque);
    o->open.check_crc = a->check_crc;
    o->partial = a->partial;
    o->exact = a->exact;
    o->objects_for_tensors = a->objects_for_tensors;
    o->prefix = a->prefix[0] ? a->prefix : NULL;
    if (strings_from(a->include, &a->included, &o->n_include) < 0 || strings_from(a->exclude, &a->excluded, &o->n_exclude) < 0 ||
        strings_from(a->per_rank, &a->own, &o->n_per_rank) < 0) {
        return -1;
    }
    o->include = a->included;
    o->exclude = a->excluded;
    o->per_rank = a->own;
    return group_use(a->group, &o->comm);
}

/* ---- hooks ---- */

/* What was found for an object: kept until there is the interpreter lock. */
typedef struct found {
    char *fqn; /* with the path's texts, one block of the C library */
    size_t fqn_len;
    dcp_key *path;
    size_t path_len;
    dcp_value *value;
    char *record; /* its bytes, where they can be had */
    size_t record_len;
} found;

typedef struct load_call {
    core_call call; /* first: the hooks get this as `user` */
    load_args *args;
    core_tree *tree;
    dcp_load_report report;
    bool in_group;
    found *found;
    size_t n_found, cap_found;
    PyObject *owner;   /* capsule of the context that values were made with */
    PyObject *objects; /* {fqn: (path, fqn, value)}; a load that was tried again finds them twice */
    PyObject *filled;  /* list of the tensors that are filled */
} load_call;

static char *rename_hook(void *user, dcp_str fqn)
{
    load_call *l = user;
    char *copy = NULL;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *name = l->call.exception ? NULL : str_to_python(fqn);
    PyObject *renamed = name ? PyObject_CallFunctionObjArgs(l->args->rename, name, NULL) : NULL;
    const char *text = renamed && renamed != Py_None ? PyUnicode_AsUTF8AndSize(renamed, NULL) : NULL;
    if (text) {
        copy = strdup(text);
    }
    if (PyErr_Occurred()) {
        errors_take(&l->call.exception, NULL);
    }
    Py_XDECREF(name);
    Py_XDECREF(renamed);
    PyGILState_Release(gil);
    return copy;
}

static void difference_hook(void *user, dcp_difference_kind kind, dcp_str fqn, const char *text)
{
    static const char *const kinds[] = {[DCP_DIFF_MISSING] = "missing",
                                        [DCP_DIFF_UNEXPECTED] = "unexpected",
                                        [DCP_DIFF_SHAPE] = "shape",
                                        [DCP_DIFF_DTYPE] = "dtype",
                                        [DCP_DIFF_KIND] = "kind"};
    load_call *l = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *name = str_to_python(fqn);
    PyObject *line = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    PyObject *done = name && line ? PyObject_CallFunction(l->args->difference, "sOO", kinds[kind], name, line) : NULL;
    if (!done) {
        errors_take(&l->call.exception, NULL);
    }
    Py_XDECREF(name);
    Py_XDECREF(line);
    Py_XDECREF(done);
    PyGILState_Release(gil);
}

static dcp_value *convert_hook(void *user, dcp_str fqn, dcp_value *tensor, dcp_dtype saved)
{
    load_call *l = user;
    dcp_value *v = NULL;
    PyGILState_STATE gil = PyGILState_Ensure();
    const core_leaf *leaf = tree_leaf_of(l->tree, tensor);
    PyObject *name = leaf && !l->call.exception ? str_to_python(fqn) : NULL;
    PyObject *d = name ? PyObject_CallFunction(l->args->convert, "OOs", name, leaf->object, dcp_dtype_name(saved)) : NULL;
    if (d && d != Py_None) {
        v = value_from_descriptor(&l->tree->keep, d, true);
    }
    if (PyErr_Occurred()) {
        errors_take(&l->call.exception, NULL);
    }
    Py_XDECREF(d);
    Py_XDECREF(name);
    PyGILState_Release(gil);
    return v;
}

static bool has_overlap(dcp_value *tensor)
{
    const dcp_tensor *whole = dcp_value_tensor(tensor);
    bool repeats = whole && is_overlapping(whole);
    for (size_t i = 0; !whole && !repeats && i < dcp_value_count(tensor); i++) {
        dcp_tensor chunk;
        dcp_box box;
        dcp_sharded_chunk(tensor, i, &chunk, &box);
        repeats = is_overlapping(&chunk);
    }
    return repeats;
}

/* Whether a target may be filled; -1 with an exception if not. */
static int check_target(const load_call *l, PyObject *name, dcp_value *tensor, const core_leaf *leaf)
{
    if (has_overlap(tensor)) {
        PyErr_Format(PyExc_RuntimeError, "%U: " ONE_PLACE, name);
        return -1;
    }
    if (!leaf->is_described || !l->args->filling) {
        return 0;
    }
    PyObject *done = PyObject_CallFunctionObjArgs(l->args->filling, name, leaf->object, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static dcp_status target_hook(void *user, dcp_str fqn, dcp_value *tensor, dcp_error *err)
{
    load_call *l = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    const core_leaf *leaf = tree_leaf_of(l->tree, tensor);
    PyObject *name = leaf ? str_to_python(fqn) : NULL;
    int result = !leaf ? 0 : !name || check_target(l, name, tensor, leaf) < 0 ? -1 : PyList_Append(l->filled, leaf->object);
    dcp_status status = result < 0 ? errors_take(&l->call.exception, err) : DCP_OK;
    Py_XDECREF(name);
    PyGILState_Release(gil);
    return status;
}

/* ---- objects ---- */

static void found_reset(found *f)
{
    free(f->fqn);
    free(f->path);
    dcp_value_free(f->value);
    dcp_text_free(NULL, f->record); /* all contexts here have the same allocator */
    *f = (found){0};
}

/* Names of a plan do not outlive it. */
static bool copy_names(const dcp_load_object *object, found *f)
{
    size_t bytes = object->fqn.len + 1;
    for (size_t i = 0; i < object->path_len; i++) {
        bytes += object->path[i].is_int ? 0 : object->path[i].string.len;
    }
    f->fqn = malloc(bytes);
    f->path = calloc(object->path_len + 1, sizeof *f->path);
    if (!f->fqn || !f->path) {
        return false;
    }
    char *at = f->fqn;
    memcpy(at, object->fqn.ptr, object->fqn.len);
    at += f->fqn_len = object->fqn.len;
    f->path_len = object->path_len;
    for (size_t i = 0; i < object->path_len; i++) {
        f->path[i] = object->path[i];
        if (!f->path[i].is_int) {
            memcpy(at, object->path[i].string.ptr, object->path[i].string.len);
            f->path[i].string.ptr = at;
            at += object->path[i].string.len;
        }
    }
    return true;
}

/* Is a value made of what Python has of its own alone? Such values need no other reader. Bounded: a value that is shared very
 * often is no plain one. */
static bool is_plain(const dcp_value *v, size_t *left)
{
    dcp_kind kind = dcp_value_kind(v);
    if (*left == 0) {
        return false;
    }
    --*left;
    if (kind == DCP_KIND_SIZE || kind == DCP_KIND_DTYPE || kind == DCP_KIND_DEVICE || kind >= DCP_KIND_TENSOR) {
        return false;
    }
    bool is_container = kind >= DCP_KIND_LIST && kind <= DCP_KIND_ORDERED_DICT;
    for (size_t i = 0; is_container && i < dcp_value_count(v); i++) {
        if (!is_plain(dcp_value_at(v, i), left)) {
            return false;
        }
    }
    return true;
}

/* Decodes it here if that says all there is to say, else takes the record for load_object(). A record that this library cannot
 * decode may be one that load_object() can. */
static dcp_status read_found(const load_call *l, const dcp_load_object *object, found *f, dcp_error *err)
{
    size_t left = 1000000;
    dcp_error fault = DCP_ERROR_INIT;
    bool is_object = object->item && object->item->kind == DCP_ITEM_OBJECT;
    dcp_status status = dcp_read_load_object(object, &f->value, &fault);
    bool wants_record =
        status == DCP_OK ? !is_plain(f->value, &left) : status == DCP_FORMAT || status == DCP_UNSUPPORTED || status == DCP_LIMIT;
    if (is_object && l->args->load_object && wants_record &&
        dcp_read_record(object->ck, object->item, &f->record, &f->record_len, NULL) == DCP_OK) {
        return DCP_OK;
    }
    if (status != DCP_OK) {
        *err = fault;
    }
    return status;
}

/* The keys of Python's own containers on the way: flattening has made text of them. */
static PyObject *key_in(PyObject *container, const dcp_key *key)
{
    PyObject *text = key->is_int ? PyLong_FromLongLong(key->integer) : str_to_python(key->string);
    if (!text || !container || key->is_int) {
        return text;
    }
    PyObject *keys = PyMapping_Check(container) ? PyMapping_Keys(container) : NULL, *match = NULL;
    int is_there = keys ? PySequence_Contains(keys, text) : 1;
    for (Py_ssize_t i = 0; is_there == 0 && !match && i < PyList_Size(keys); i++) {
        PyObject *k = PyList_GetItem(keys, i), *name = PyObject_Str(k);
        if (name && PyObject_RichCompareBool(name, text, Py_EQ) == 1) {
            match = Py_NewRef(k);
        }
        Py_XDECREF(name);
    }
    PyErr_Clear();
    Py_XDECREF(keys);
    if (!match) {
        return text;
    }
    Py_DECREF(text);
    return match;
}

/* The common case without a list of all keys. */
static PyObject *step_into(PyObject *container, PyObject *key)
{
    PyObject *next = container ? PyObject_GetItem(container, key) : NULL;
    if (!next) {
        PyErr_Clear();
    }
    return next;
}

static PyObject *path_in(PyObject *root, const found *f)
{
    PyObject *path = PyTuple_New((Py_ssize_t)f->path_len), *at = Py_NewRef(root);
    for (size_t i = 0; path && i < f->path_len; i++) {
        dcp_key plain = f->path[i];
        PyObject *key = plain.is_int ? PyLong_FromLongLong(plain.integer) : str_to_python(plain.string);
        PyObject *next = key ? step_into(at, key) : NULL;
        if (key && !next) {
            Py_DECREF(key);
            key = key_in(at, &plain);
            next = key ? step_into(at, key) : NULL;
        }
        Py_XDECREF(at);
        at = next;
        if (!key || PyTuple_SetItem(path, (Py_ssize_t)i, key) < 0) {
            Py_CLEAR(path);
        }
    }
    Py_XDECREF(at);
    return path;
}

static PyObject *object_of(const load_call *l, const found *f, PyObject *fqn)
{
    if (f->record) {
        PyObject *bytes = PyBytes_FromStringAndSize(f->record, (Py_ssize_t)f->record_len);
        PyObject *value = bytes ? PyObject_CallFunction(l->args->load_object, "OO", fqn, bytes) : NULL;
        Py_XDECREF(bytes);
        return value;
    }
    PyObject *value = value_to_python(f->value, l->args->make_tensor, l->args->make_opaque, l->owner);
    if (!value && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "item %R holds objects that cannot be made here", fqn);
    }
    return value;
}

/* With the interpreter lock. */
static int finish_object(load_call *l, const found *f)
{
    PyObject *fqn = str_to_python((dcp_str){f->fqn, f->fqn_len});
    PyObject *value = fqn ? object_of(l, f, fqn) : NULL;
    PyObject *path = value ? path_in(l->args->tree, f) : NULL;
    PyObject *entry = path ? PyTuple_Pack(3, path, fqn, value) : NULL;
    int result = entry ? PyDict_SetItem(l->objects, fqn, entry) : -1;
    Py_XDECREF(fqn);
    Py_XDECREF(value);
    Py_XDECREF(path);
    Py_XDECREF(entry);
    return result;
}

/* An empty one at the end of the list. */
static found *new_found(load_call *l)
{
    if (l->n_found == l->cap_found) {
        size_t cap = l->cap_found ? 2 * l->cap_found : 32;
        found *grown = realloc(l->found, cap * sizeof *grown);
        if (!grown) {
            return NULL;
        }
        l->found = grown;
        l->cap_found = cap;
    }
    l->found[l->n_found] = (found){0};
    return &l->found[l->n_found++];
}

static dcp_status finish_at_once(load_call *l, const found *f, dcp_error *err)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    dcp_status status = finish_object(l, f) < 0 ? errors_take(&l->call.exception, err) : DCP_OK;
    PyGILState_Release(gil);
    return status;
}

/* In a group objects are finished at once, so that a failure is one of the load on all ranks; else when the caller's thread,
 * whose settings may matter to load_object(), has come back. */
static dcp_status object_hook(void *user, const dcp_load_object *object, dcp_error *err)
{
    load_call *l = user;
    if (l->call.exception) {
        return dcp_error_set(err, DCP_CANCELED, "a callback raised an exception");
    }
    found *f = new_found(l);
    if (!f || !copy_names(object, f)) {
        return dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    dcp_status status = read_found(l, object, f, err);
    if (status == DCP_OK && l->in_group) {
        status = finish_at_once(l, f, err);
        found_reset(f);
        l->n_found--;
    }
    return status;
}

static int finish_objects(load_call *l)
{
    int result = 0;
    for (size_t i = 0; i < l->n_found && result == 0; i++) {
        result = finish_object(l, &l->found[i]);
    }
    return result;
}

/* ---- the call ---- */

static dcp_status work(void *arg, dcp_error *err)
{
    load_call *l = arg;
    load_args *a = l->args;
    return a->path ? dcp_load(l->call.ctx, PyBytes_AsString(a->path), l->tree->root, &a->opts, &l->report, err)
                   : dcp_load_from(checkpoint_of(a->source), l->tree->root, &a->opts, &l->report, err);
}

static void set_hooks(load_call *l, const dcp_error *failed)
{
    dcp_load_opts *o = &l->args->opts;
    o->user = l;
    o->stream = l->tree->stream_handle;
    o->object = object_hook;
    o->progress = call_progress;
    o->target = target_hook;
    o->rename = l->args->rename ? rename_hook : NULL;
    o->convert = l->args->convert ? convert_hook : NULL;
    o->failures = l->call.failures;
    o->failed = failed->code != DCP_OK ? failed : NULL;
    l->report = (dcp_load_report)DCP_LOAD_REPORT_INIT;
    l->report.user = l;
    l->report.difference = l->args->difference ? difference_hook : NULL;
}

static PyObject *report_to_python(const dcp_load_report *r)
{
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:d,s:d}", "n_missing", (Py_ssize_t)r->n_missing, "n_unexpected",
                         (Py_ssize_t)r->n_unexpected, "n_shape", (Py_ssize_t)r->n_shape, "n_dtype", (Py_ssize_t)r->n_dtype,
                         "n_kind", (Py_ssize_t)r->n_kind, "n_tensors", (Py_ssize_t)r->n_tensors, "n_objects",
                         (Py_ssize_t)r->n_objects, "bytes", (unsigned long long)r->bytes, "plan_seconds", r->plan_seconds,
                         "read_seconds", r->read_seconds);
}

static PyObject *result_of(load_call *l)
{
    PyObject *report = finish_objects(l) == 0 ? report_to_python(&l->report) : NULL;
    PyObject *objects = report ? PyDict_Values(l->objects) : NULL;
    PyObject *result = objects ? PyTuple_Pack(3, report, objects, l->filled) : NULL;
    Py_XDECREF(report);
    Py_XDECREF(objects);
    return result;
}

static PyObject *load(load_args *a)
{
    load_call l = {.args = a, .in_group = a->opts.comm != NULL};
    core_tree tree;
    dcp_error failed = DCP_ERROR_INIT;
    dcp_status status = DCP_OK;
    PyObject *result = NULL;
    l.tree = &tree;
    if (tree_begin(&tree, a->describe, NULL, a->tensor_types) < 0 || (!a->path && !checkpoint_of(a->source)) ||
        call_begin(&l.call, a->threads, a->memory_bytes, a->progress) < 0) {
        return NULL;
    }
    tree.is_target = true;
    tree.stream = a->stream;
    l.owner = a->path ? l.call.context : checkpoint_context(a->source);
    l.objects = PyDict_New();
    l.filled = PyList_New(0);
    int made = l.objects && l.filled ? tree_make(&tree, a->tree, l.in_group, &l.call, &failed) : -1;
    if (made == 0) {
        set_hooks(&l, &failed);
        checkpoint_enter(a->source);
        status = call_run(&l.call, work, &l, !l.in_group);
        checkpoint_leave(a->source);
        group_done(a->group, &l.call.exception);
        result = status == DCP_OK && !l.call.exception ? result_of(&l) : NULL;
    }
    for (size_t i = 0; i < l.n_found; i++) {
        found_reset(&l.found[i]);
    }
    free(l.found);
    if (call_end(&l.call, status) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(l.objects);
    Py_XDECREF(l.filled);
    tree_reset(&tree);
    return result;
}

PyObject *core_load(PyObject *module, PyObject *args, PyObject *kwargs)
{
    load_args a;
    (void)module;
    PyObject *result = parse(&a, args, kwargs) == 0 && set_opts(&a) == 0 ? load(&a) : NULL;
    strings_free(a.included);
    strings_free(a.excluded);
    strings_free(a.own);
    Py_XDECREF(a.path);
    return result;
}
