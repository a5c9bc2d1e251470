/* convert(): a checkpoint of any form to one of another. */
#include <string.h>

#include "core.h"

/* Lists of texts that the options point to. */
typedef struct convert_lists {
    const char **include, **exclude, **edits, **cast_names, **cast_dtypes, **part_names, **part_patterns;
    dcp_convert_cast *casts;
    dcp_convert_part *parts;
} convert_lists;

typedef struct convert_args {
    PyObject *from, *to; /* bytes, owned */
    PyObject *include, *exclude, *edits, *cast_names, *cast_dtypes, *part_names, *part_patterns, *group, *progress;
    const char *form, *alias, *objects, *dequantize;
    int overwrite, resume, sync, check, allow_overflow, allow_shard_gaps, file_per_item, align_payloads, threads;
    unsigned long long max_file_bytes, memory_bytes;
    long long dequantize_block;
    dcp_convert_opts opts;
    convert_lists lists;
} convert_args;

static char *keywords[] = {"source",
                           "target",
                           "form",
                           "include",
                           "exclude",
                           "edits",
                           "cast_names",
                           "cast_dtypes",
                           "part_names",
                           "part_patterns",
                           "alias",
                           "objects",
                           "max_file_bytes",
                           "mapping",
                           "ranks",
                           "files",
                           "file_per_item",
                           "align_payloads",
                           "transform",
                           "target_release",
                           "overwrite",
                           "resume",
                           "sync",
                           "check",
                           "dequantize",
                           "dequantize_block",
                           "allow_overflow",
                           "allow_shard_gaps",
                           "group",
                           "threads",
                           "memory_bytes",
                           "progress",
                           NULL};

static int parse(convert_args *a, PyObject *args, PyObject *kwargs)
{
    *a = (convert_args){.form = "dcp", .alias = "copy", .objects = "error", .sync = 1, .check = 1, .opts = DCP_CONVERT_OPTS_INIT};
    return PyArg_ParseTupleAndKeywords(
               args, kwargs, "O&O&|$sOOOOOOOssKziippzippppzLppOiKO:convert", keywords, PyUnicode_FSConverter, &a->from,
               PyUnicode_FSConverter, &a->to, &a->form, &a->include, &a->exclude, &a->edits, &a->cast_names, &a->cast_dtypes,
               &a->part_names, &a->part_patterns, &a->alias, &a->objects, &a->max_file_bytes, &a->opts.mapping, &a->opts.ranks,
               &a->opts.files, &a->file_per_item, &a->align_payloads, &a->opts.transform, &a->opts.target_release, &a->overwrite,
               &a->resume, &a->sync, &a->check, &a->dequantize, &a->dequantize_block, &a->allow_overflow, &a->allow_shard_gaps,
               &a->group, &a->threads, &a->memory_bytes, &a->progress)
               ? 0
               : -1;
}

/* ---- options ---- */

typedef struct choice {
    const char *name;
    int value;
} choice;

/* The value of a name in a table that ends with an empty row; -1 with an exception. */
static int choose(const char *what, const char *name, const choice *choices)
{
    for (const choice *c = choices; c->name; c++) {
        if (strcmp(c->name, name) == 0) {
            return c->value;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s must not be \"%s\"", what, name);
    return -1;
}

static int set_choices(convert_args *a)
{
    static const choice forms[] = {
        {"dcp", DCP_TO_DCP}, {"torch", DCP_TO_TORCH}, {"safetensors", DCP_TO_SAFETENSORS}, {"hf", DCP_TO_HF}, {NULL, 0}};
    static const choice aliases[] = {{"copy", DCP_ALIAS_COPY}, {"drop", DCP_ALIAS_DROP}, {"error", DCP_ALIAS_ERROR}, {NULL, 0}};
    static const choice objects[] = {
        {"error", DCP_OBJECTS_ERROR}, {"drop", DCP_OBJECTS_DROP}, {"beside", DCP_OBJECTS_BESIDE}, {NULL, 0}};
    int form = choose("form", a->form, forms), alias = form < 0 ? -1 : choose("alias", a->alias, aliases);
    int object = alias < 0 ? -1 : choose("objects", a->objects, objects);
    if (object < 0) {
        return -1;
    }
    a->opts.to = (dcp_convert_form)form;
    a->opts.alias = (dcp_alias)alias;
    a->opts.objects = (dcp_objects)object;
    return 0;
}

static dcp_dtype dtype_named(const char *name)
{
    dcp_dtype dtype = dcp_dtype_from_name(dcp_str_of(name));
    if (dtype == DCP_DTYPE_NONE) {
        PyErr_Format(PyExc_ValueError, "there is no dtype \"%s\"", name);
    }
    return dtype;
}

/* Two lists that belong together, of the same length. */
static int pair_from(PyObject *keys, PyObject *values, const char *what, const char ***key_list, const char ***value_list,
                     size_t *n)
{
    size_t n_values;
    if (strings_from(keys, key_list, n) < 0 || strings_from(values, value_list, &n_values) < 0) {
        return -1;
    }
    if (n_values != *n) {
        PyErr_Format(PyExc_ValueError, "%s: lists of different lengths", what);
        return -1;
    }
    return 0;
}

static int set_casts(convert_args *a)
{
    convert_lists *l = &a->lists;
    if (pair_from(a->cast_names, a->cast_dtypes, "casts", &l->cast_names, &l->cast_dtypes, &a->opts.n_casts) < 0) {
        return -1;
    }
    l->casts = PyMem_Calloc(a->opts.n_casts + 1, sizeof *l->casts);
    if (!l->casts) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < a->opts.n_casts; i++) {
        l->casts[i] = (dcp_convert_cast){l->cast_names[i], dtype_named(l->cast_dtypes[i])};
        if (l->casts[i].dtype == DCP_DTYPE_NONE) {
            return -1;
        }
    }
    a->opts.casts = l->casts;
    return 0;
}

static int set_parts(convert_args *a)
{
    convert_lists *l = &a->lists;
    if (pair_from(a->part_names, a->part_patterns, "parts", &l->part_names, &l->part_patterns, &a->opts.n_parts) < 0) {
        return -1;
    }
    l->parts = PyMem_Calloc(a->opts.n_parts + 1, sizeof *l->parts);
    if (!l->parts) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < a->opts.n_parts; i++) {
        l->parts[i] = (dcp_convert_part){l->part_names[i], l->part_patterns[i]};
    }
    a->opts.parts = l->parts;
    return 0;
}

static int set_opts(convert_args *a)
{
    dcp_convert_opts *o = &a->opts;
    convert_lists *l = &a->lists;
    o->max_file_bytes = a->max_file_bytes;
    o->overwrite = a->overwrite;
    o->resume = a->resume;
    o->no_sync = !a->sync;
    o->no_check = !a->check;
    o->allow_overflow = a->allow_overflow;
    o->file_per_item = a->file_per_item;
    o->align_payloads = a->align_payloads;
    o->open.allow_shard_gaps = a->allow_shard_gaps;
    o->dequantize = a->dequantize ? dtype_named(a->dequantize) : DCP_DTYPE_NONE;
    o->dequantize_block = a->dequantize_block;
    if (a->dequantize && o->dequantize == DCP_DTYPE_NONE) {
        return -1;
    }
    if (set_choices(a) < 0 || strings_from(a->include, &l->include, &o->n_include) < 0 ||
        strings_from(a->exclude, &l->exclude, &o->n_exclude) < 0 || strings_from(a->edits, &l->edits, &o->n_edits) < 0 ||
        set_casts(a) < 0 || set_parts(a) < 0) {
        return -1;
    }
    o->include = l->include;
    o->exclude = l->exclude;
    o->edits = l->edits;
    return group_use(a->group, &o->comm);
}

static void lists_reset(convert_lists *l)
{
    const char **all[] = {l->include, l->exclude, l->edits, l->cast_names, l->cast_dtypes, l->part_names, l->part_patterns};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        strings_free(all[i]);
    }
    PyMem_Free(l->casts);
    PyMem_Free(l->parts);
}

/* ---- the call ---- */

typedef struct convert_job {
    convert_args *args;
    core_call *call;
    dcp_convert_report report;
} convert_job;

static dcp_status work(void *arg, dcp_error *err)
{
    convert_job *j = arg;
    return dcp_convert(j->call->ctx, PyBytes_AsString(j->args->from), PyBytes_AsString(j->args->to), &j->args->opts, &j->report,
                       err);
}

static PyObject *report_to_python(const dcp_convert_report *r)
{
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:K,s:d,s:d}", "n_tensors", (Py_ssize_t)r->n_tensors,
                         "n_objects", (Py_ssize_t)r->n_objects, "n_files", (Py_ssize_t)r->n_files, "n_kept",
                         (Py_ssize_t)r->n_kept, "n_shared", (Py_ssize_t)r->n_shared, "n_aliases_dropped",
                         (Py_ssize_t)r->n_aliases_dropped, "n_objects_dropped", (Py_ssize_t)r->n_objects_dropped, "n_dequantized",
                         (Py_ssize_t)r->n_dequantized, "bytes", (unsigned long long)r->bytes, "n_cast",
                         (unsigned long long)r->n_cast, "n_lost", (unsigned long long)r->n_lost, "write_seconds",
                         r->write_seconds, "check_seconds", r->check_seconds);
}

static PyObject *convert(convert_args *a)
{
    core_call call;
    if (call_begin(&call, a->threads, a->memory_bytes, a->progress) < 0) {
        return NULL;
    }
    convert_job j = {a, &call, DCP_CONVERT_REPORT_INIT};
    a->opts.progress = call_progress;
    a->opts.user = &call;
    dcp_status status = call_run(&call, work, &j, a->opts.comm == NULL);
    group_done(a->group, &call.exception);
    return call_end(&call, status) == 0 ? report_to_python(&j.report) : NULL;
}

PyObject *core_convert(PyObject *module, PyObject *args, PyObject *kwargs)
{
    convert_args a;
    (void)module;
    PyObject *result = parse(&a, args, kwargs) == 0 && set_opts(&a) == 0 ? convert(&a) : NULL;
    lists_reset(&a.lists);
    Py_XDECREF(a.from);
    Py_XDECREF(a.to);
    return result;
}
