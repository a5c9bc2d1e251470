/* Conversions: the options, the parts of the output, and what is common to all forms. */
#include "engine/convert/convert.h"

#include <stdio.h>
#include <string.h>

/* ---- options ---- */

static dcp_status check_opts(const dcp_convert_opts *o, const dcp_convert_report *report, dcp_error *err)
{
    if (!o || o->struct_size != sizeof *o || (report && report->struct_size != sizeof *report)) {
        return dcp__fail(err, DCP_ARG, "convert: no options, or those of another version");
    }
    if (o->to < DCP_TO_DCP || o->to > DCP_TO_HF) {
        return dcp__fail(err, DCP_ARG, "convert: no form to convert to");
    }
    if (o->comm && (o->to != DCP_TO_HF || o->n_parts)) {
        return dcp__fail(err, DCP_ARG, "convert: several ranks make a Hugging Face directory only, and one of it");
    }
    if (o->ranks < 0 || o->ranks > DCP_MAX_CONVERT_RANKS || (o->ranks > 1 && o->to != DCP_TO_DCP)) {
        return dcp__fail(err, DCP_ARG, "convert: %d ranks", o->ranks);
    }
    if ((o->mapping || o->max_file_bytes || o->resume) && o->to != DCP_TO_HF) {
        return dcp__fail(err, DCP_ARG, "convert: a mapping, a file size and resuming are for Hugging Face directories");
    }
    if (o->mapping && o->max_file_bytes) {
        return dcp__fail(err, DCP_ARG, "convert: a mapping says which file has which tensor, a file size has no meaning then");
    }
    if ((o->files > 1 || o->file_per_item || o->align_payloads || o->transform || o->target_release) && o->to != DCP_TO_DCP) {
        return dcp__fail(
            err, DCP_ARG,
            "convert: numbers of files, a file for each item, alignment, a transform and a release are for DCP directories");
    }
    if (o->dequantize_block < 0) {
        return dcp__fail(err, DCP_ARG, "convert: blocks of %lld", (long long)o->dequantize_block);
    }
    if (o->resume && o->overwrite) {
        return dcp__fail(err, DCP_ARG, "convert: what is there is kept or replaced, not both");
    }
    return DCP_OK;
}

static dcp_status check_parts(const dcp_convert_opts *o, dcp_error *err)
{
    for (size_t i = 0; i < o->n_parts; i++) {
        const char *name = o->parts[i].name;
        if (!name || !o->parts[i].names || !*name || name[0] == '.' || strchr(name, '/')) {
            return dcp__fail(err, DCP_ARG, "convert: \"%s\" is no name for a part",
                             name ? dcp__print(dcp_str_of(name)).text : "");
        }
        for (size_t k = 0; k < i; k++) {
            if (strcmp(name, o->parts[k].name) == 0) {
                return dcp__fail(err, DCP_ARG, "convert: two parts are called \"%s\"", name);
            }
        }
    }
    return DCP_OK;
}

/* ---- where the output goes ---- */

/* The output in a storage: of the caller, or the directory around it. */
typedef struct target {
    dcp_storage *owned; /* NULL: the caller's */
    char *path;         /* as the caller gave it, and the part's name */
    const char *name;   /* in the storage */
} target;

static dcp_status join_path(dcp__conversion *c, const char *to, size_t part, char **out, dcp_error *err)
{
    const dcp_convert_opts *o = c->opts;
    const char *name = part == SIZE_MAX ? "" : o->parts[part].name;
    const char *extension = part == SIZE_MAX              ? ""
                            : o->to == DCP_TO_TORCH       ? ".pt"
                            : o->to == DCP_TO_SAFETENSORS ? ".safetensors"
                                                          : "";
    size_t len = strlen(to), room;
    while (len > 1 && to[len - 1] == '/') {
        len--;
    }
    room = len + strlen(name) + strlen(extension) + 2;
    *out = dcp__alloc(c->ctx, room);
    if (!*out) {
        return dcp__nomem(err);
    }
    snprintf(*out, room, "%.*s%s%s%s", (int)len, to, *name && len ? "/" : "", name, extension);
    return DCP_OK;
}

/* The local file system: the storage's root is the directory that the output stands in. */
static dcp_status attach_local(dcp__conversion *c, target *t, dcp_error *err)
{
    char *slash = strrchr(t->path, '/');
    const char *root = !slash ? "." : slash == t->path ? "/" : t->path;
    t->name = slash ? slash + 1 : t->path;
    if (!*t->name) {
        return dcp__fail(err, DCP_ARG, "convert: \"%s\" is no place for an output", t->path);
    }
    if (slash && slash != t->path) {
        *slash = 0;
    }
    dcp_status status = dcp_storage_posix(c->ctx, root, &t->owned, err);
    if (status == DCP_OK) {
        status = t->owned->ops->make_dir(t->owned, "", err);
    }
    if (slash && slash != t->path) {
        *slash = '/';
    }
    return status;
}

static dcp_status attach(dcp__conversion *c, const char *to, size_t part, target *t, dcp_error *err)
{
    *t = (target){0};
    dcp_status status = join_path(c, to, part, &t->path, err);
    if (status != DCP_OK) {
        return status;
    }
    if (c->opts->storage) {
        t->name = t->path;
        c->storage = c->opts->storage;
        return DCP_OK;
    }
    status = attach_local(c, t, err);
    c->storage = t->owned;
    return status;
}

static void detach(dcp__conversion *c, target *t)
{
    dcp_storage_free(t->owned);
    dcp__free(c->ctx, t->path);
    c->storage = NULL;
}

/* ---- one output ---- */

static dcp_status write_form(dcp__selection *s, const target *t, dcp_error *err)
{
    switch (s->c->opts->to) {
    case DCP_TO_TORCH: return dcp__cv_to_torch(s, t->name, err);
    case DCP_TO_SAFETENSORS: return dcp__cv_to_safetensors(s, t->name, err);
    case DCP_TO_HF: return dcp__cv_to_hf(s, t->name, err);
    case DCP_TO_DCP: break;
    }
    return dcp__cv_to_dcp(s, t->path, err); /* saves have their own way to a place */
}

/* Bytes to be read and, if they are checked, to be read back. */
static uint64_t bytes_to_do(const dcp__conversion *c)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->ck->meta->n_entries; i++) {
        bytes += c->ck->meta->entries[i].item.kind == DCP_ITEM_TENSOR ? c->ck->meta->entries[i].item.bytes : 0;
    }
    return bytes;
}

/* Objects are checked when they are read, tensors by the segments that are read of them. */
static dcp_status select_part(dcp__conversion *c, size_t part, dcp__selection *s, dcp_error *err)
{
    c->ck->check_crc = true;
    dcp_status status = dcp__cv_select(c, part, s, err);
    c->ck->check_crc = c->opts->to == DCP_TO_DCP && c->opts->ranks <= 1;
    return status;
}

/* Puts the output's path in front. A save has done so by itself, with the name that it has in the storage. */
static dcp_status in_output(const dcp__conversion *c, const target *t, dcp_status status, dcp_error *err)
{
    size_t len = t->name ? strlen(t->name) : 0;
    if (status == DCP_OK || !err) {
        return status;
    }
    if (c->opts->to == DCP_TO_DCP && strncmp(err->message, t->name, len) == 0 && strncmp(err->message + len, ": ", 2) == 0) {
        memmove(err->message, err->message + len + 2, strlen(err->message + len + 2) + 1);
    }
    return dcp__prefix(err, status, "%s: ", t->path);
}

static dcp_status convert_part(dcp__conversion *c, const char *to, size_t part, dcp_error *err)
{
    dcp__selection s = {0};
    target t = {0};
    dcp_status status = select_part(c, part, &s, err);
    status = status == DCP_OK ? attach(c, to, part, &t, err) : status;
    status = dcp__agree(&c->step, status, err);
    if (status == DCP_OK) {
        status = write_form(&s, &t, err);
        status = in_output(c, &t, status, err);
    }
    detach(c, &t);
    dcp__selection_reset(&s);
    return status;
}

/* ---- all ---- */

static dcp_status open_source(dcp__conversion *c, const char *from, dcp_error *err)
{
    dcp_status status = dcp__open_origin(c->ctx, from, &c->opts->open, &c->ck, err);
    status = status == DCP_OK ? dcp__edits_compile(c->ctx, c->opts->edits, c->opts->n_edits, &c->edits, err) : status;
    return status == DCP_OK ? dcp__cv_check_patterns(c, err) : status;
}

static dcp_status run(dcp__conversion *c, const char *from, const char *to, dcp_error *err)
{
    size_t n_parts = c->opts->n_parts;
    dcp_status status = dcp__agree(&c->step, open_source(c, from, err), err);
    if (status != DCP_OK) {
        return status;
    }
    c->total_bytes = bytes_to_do(c) * (c->opts->no_check || c->opts->to == DCP_TO_DCP ? 1 : 2);
    if (n_parts == 0) {
        return convert_part(c, to, SIZE_MAX, err);
    }
    for (size_t i = 0; i < n_parts && status == DCP_OK; i++) {
        status = convert_part(c, to, i, err);
    }
    return status;
}

dcp_status dcp_convert(dcp_context *ctx, const char *from, const char *to, const dcp_convert_opts *opts,
                       dcp_convert_report *report, dcp_error *err)
{
    if (!from || !to) {
        return dcp__fail(err, DCP_ARG, "convert: no path");
    }
    dcp_status status = check_opts(opts, report, err);
    status = status == DCP_OK ? check_parts(opts, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    ctx = dcp__context(ctx);
    dcp__conversion c = {.ctx = ctx, .opts = opts, .report = DCP_CONVERT_REPORT_INIT, .step = {ctx, opts->comm, "convert", NULL}};
    pthread_mutex_init(&c.lock, NULL);
    status = run(&c, from, to, err);
    dcp__edits_reset(&c.edits);
    dcp_checkpoint_close(c.ck);
    pthread_mutex_destroy(&c.lock);
    if (status == DCP_OK && report) {
        *report = c.report;
    }
    return status;
}
