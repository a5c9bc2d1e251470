#include "engine/convert/hf_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/convert/convert.h"
#include "format/json_read.h"
#include "storage/storage.h"

#define LOCK ".libdcp-convert" /* in the directory while somebody writes to it */
#define MAX_JSON_BYTES ((uint64_t)1 << 30)

/* ---- files ---- */

char *dcp__hf_join(const dcp__hf_dir *d, const char *name)
{
    size_t room = strlen(d->path) + strlen(name) + 2;
    char *out = dcp__alloc(d->ctx, room);
    if (out) {
        snprintf(out, room, "%s%s%s", d->path, *d->path ? "/" : "", name);
    }
    return out;
}

static dcp_status sync_names(const dcp__hf_dir *d, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (d->no_sync || !d->storage->ops->sync_dir) {
        return DCP_OK;
    }
    return dcp__synced(d->storage->ops->sync_dir(d->storage, d->path, &fault), &fault, err);
}

static bool is_there(const dcp__hf_dir *d, const char *name)
{
    dcp_stat st;
    char *path = dcp__hf_join(d, name);
    bool found = path && d->storage->ops->stat(d->storage, path, &st, NULL) == DCP_OK;
    dcp__free(d->ctx, path);
    return found;
}

/* One that is not there is no mistake. */
static dcp_status remove_name(const dcp__hf_dir *d, const char *name, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    char *path = dcp__hf_join(d, name);
    dcp_status status = path ? d->storage->ops->remove(d->storage, path, &fault) : dcp__nomem(&fault);
    dcp__free(d->ctx, path);
    if (status == DCP_NOT_FOUND) {
        return DCP_OK;
    }
    if (status != DCP_OK && err) {
        *err = fault;
    }
    return status;
}

static dcp_status read_text(const dcp__hf_dir *d, const char *path, char **out, size_t *len, dcp_error *err)
{
    const dcp_storage_ops *ops = d->storage->ops;
    dcp_file *f;
    dcp_stat st;
    dcp_status status = ops->stat(d->storage, path, &st, err);
    if (status == DCP_OK && st.bytes > MAX_JSON_BYTES) {
        status = dcp__fail(err, DCP_LIMIT, "%llu bytes", (unsigned long long)st.bytes);
    }
    status = status == DCP_OK ? ops->open(d->storage, path, DCP_OPEN_READ, &f, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    char *text = dcp__alloc(d->ctx, (size_t)st.bytes + 1);
    status = text ? ops->read_at(f, text, (size_t)st.bytes, 0, len, err) : dcp__nomem(err);
    ops->close(f, NULL);
    if (status != DCP_OK) {
        dcp__free(d->ctx, text);
        return status;
    }
    *out = text;
    return DCP_OK;
}

static dcp_status read_json(const dcp__hf_dir *d, const char *name, json_t **out, dcp_error *err)
{
    char *path = dcp__hf_join(d, name), *text = NULL;
    size_t len = 0;
    dcp_status status = path ? read_text(d, path, &text, &len, err) : dcp__nomem(err);
    if (status == DCP_OK) {
        status = dcp__json_parse(d->ctx, (dcp_str){text, len}, 0, name, out, err);
    }
    dcp__free(d->ctx, text);
    dcp__free(d->ctx, path);
    return status;
}

/* ---- texts, under temporary names first ---- */

static dcp_status write_part(const dcp__hf_dir *d, const char *part, const char *text, dcp_error *err)
{
    char *path = dcp__hf_join(d, part);
    dcp_status status = path ? dcp__write_file(d->storage, path, text, strlen(text), !d->no_sync, err) : dcp__nomem(err);
    dcp__free(d->ctx, path);
    return status;
}

static dcp_status rename_part(const dcp__hf_dir *d, const char *part, const char *name, dcp_error *err)
{
    char *from = dcp__hf_join(d, part), *to = dcp__hf_join(d, name);
    dcp_status status = from && to ? d->storage->ops->rename(d->storage, from, to, err) : dcp__nomem(err);
    dcp__free(d->ctx, from);
    dcp__free(d->ctx, to);
    return status == DCP_OK ? sync_names(d, err) : status;
}

#define INDEX_PART DCP__HF_INDEX DCP__CV_TEMPORARY
#define MARK_PART DCP__HF_MARK DCP__CV_TEMPORARY

static bool has_name(const dcp__names *list, const char *name)
{
    for (size_t i = 0; i < list->n; i++) {
        if (strcmp(list->names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

static bool list_names(json_t *out, const dcp__names *names, const dcp__names *without)
{
    bool ok = out != NULL;
    for (size_t i = 0; i < names->n && ok; i++) {
        if (!without || !has_name(without, names->names[i])) {
            ok = json_array_append_new(out, json_string(names->names[i])) == 0;
        }
    }
    return ok;
}

/* is_switched: the new files are the model, else those that are there. What is dead is ignored with the others. */
static dcp_status write_mark(const dcp__hf_dir *d, const dcp__hf_model *m, bool is_switched, dcp_error *err)
{
    json_t *root = json_object(), *model = json_array(), *ignored = json_array();
    bool ok = root && list_names(is_switched ? ignored : model, &d->live, m->files);
    ok = ok && list_names(is_switched ? model : ignored, m->files, NULL) && list_names(ignored, &d->dead, m->files);
    ok = ok && json_object_set(root, "model", model) == 0 && json_object_set(root, "ignored", ignored) == 0;
    char *text = ok ? json_dumps(root, JSON_INDENT(1)) : NULL;
    dcp_status status = text ? write_part(d, MARK_PART, text, err) : dcp__nomem(err);
    free(text);
    json_decref(model);
    json_decref(ignored);
    json_decref(root);
    return status;
}

static dcp_status unmark(const dcp__hf_dir *d, dcp_error *err)
{
    dcp_status status = remove_name(d, DCP__HF_MARK, err);
    return status == DCP_OK ? sync_names(d, err) : status;
}

/* ---- what is there ---- */

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), end_len = strlen(end);
    return len >= end_len && strcmp(name + len - end_len, end) == 0;
}

bool dcp__hf_is_usual_name(const char *name)
{
    size_t stem = dcp__hf_stem_bytes(dcp_str_of(name)), len = sizeof "model" - 1;
    if (!ends_with(name, DCP__HF_EXTENSION) || stem < len || strncmp(name, "model", len) != 0) {
        return false;
    }
    return stem == len || (name[len] == '.' && len + 1 + strspn(name + len + 1, "0123456789") == stem);
}

typedef struct looking {
    dcp__hf_dir *d;
    dcp_error *err;
    bool is_marked;
    dcp__names parts; /* files under temporary names */
} looking;

static dcp_status look_at(void *user, const char *name, dcp_entry_type type)
{
    looking *l = user;
    if (strcmp(name, ".metadata") == 0) {
        return dcp__fail(l->err, DCP_EXISTS, "a checkpoint of another form is there");
    }
    l->is_marked |= strcmp(name, DCP__HF_MARK) == 0;
    l->d->has_index |= strcmp(name, DCP__HF_INDEX) == 0;
    if (type == DCP_ENTRY_DIR) {
        return DCP_OK;
    }
    if (ends_with(name, DCP__HF_EXTENSION)) {
        return dcp__names_add(l->d->ctx, &l->d->live, name, l->err);
    }
    return ends_with(name, DCP__CV_TEMPORARY) ? dcp__names_add(l->d->ctx, &l->parts, name, l->err) : DCP_OK;
}

/* Moves the names for which is_dead says so to the dead ones. */
static dcp_status sort_out(dcp__hf_dir *d, dcp__names *from, bool (*is_dead)(const dcp__hf_dir *d, const char *name),
                           dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t n = 0;
    for (size_t i = 0; i < from->n; i++) {
        char *name = from->names[i];
        if (status == DCP_OK && is_dead(d, name)) {
            status = dcp__names_add(d->ctx, &d->dead, name, err);
            dcp__free(d->ctx, name);
        } else {
            from->names[n++] = name;
        }
    }
    from->n = n;
    return status;
}

/* A file that a mark names and that readers do not take for one of the model. */
static bool is_dead_file(const dcp__hf_dir *d, const char *name)
{
    return d->mark && dcp__hf_is_marked(d->mark, name) && !dcp__hf_is_current(d->mark, d->index, name);
}

/* What was to become a file of a model. Those who write here have the lock; a conversion to one file beside has not, and calls it
 * as its caller wants. A mark names it as such if another writer has found it dead, and died too. */
static bool is_dead_part(const dcp__hf_dir *d, const char *name)
{
    char *whole = dcp__strndup(d->ctx, name, strlen(name) - (sizeof DCP__CV_TEMPORARY - 1));
    bool is_marked = whole && d->mark && (dcp__hf_is_marked(d->mark, whole) || dcp__hf_is_marked(d->mark, name));
    bool is_dead = whole && (is_marked || dcp__hf_is_usual_name(whole) || strcmp(whole, DCP__HF_INDEX) == 0 ||
                             strcmp(whole, DCP__HF_MARK) == 0 || strcmp(whole, DCP__HF_OBJECTS) == 0);
    dcp__free(d->ctx, whole);
    return is_dead;
}

/* One that is in pieces, as a crash may leave it if nothing is synced, says nothing. */
static dcp_status read_mark(dcp__hf_dir *d, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = read_json(d, DCP__HF_MARK, &d->mark, &fault);
    if (status == DCP_FORMAT) {
        d->mark = json_object();
        return d->mark ? DCP_OK : dcp__nomem(err);
    }
    if (status != DCP_OK && err) {
        *err = fault;
    }
    return status;
}

static dcp_status look(dcp__hf_dir *d, dcp_error *err)
{
    looking l = {.d = d, .err = err};
    dcp_status status = d->storage->ops->list(d->storage, d->path, look_at, &l, err);
    status = status == DCP_NOT_FOUND ? DCP_OK : status; /* a storage without directories */
    if (status == DCP_OK && d->has_index && read_json(d, DCP__HF_INDEX, &d->index, NULL) != DCP_OK) {
        d->index = NULL; /* it will be replaced, or stand in the way */
    }
    if (status == DCP_OK && l.is_marked) {
        status = read_mark(d, err);
    }
    status = status == DCP_OK ? sort_out(d, &d->live, is_dead_file, err) : status;
    status = status == DCP_OK ? sort_out(d, &l.parts, is_dead_part, err) : status;
    dcp__names_reset(d->ctx, &l.parts);
    return status;
}

dcp_status dcp__hf_enter(dcp__hf_dir *d, dcp_error *err)
{
    const dcp_storage_ops *ops = d->storage->ops;
    if (!ops->rename) {
        return dcp__fail(err, DCP_UNSUPPORTED, "the storage %s cannot rename", ops->name);
    }
    dcp_stat st;
    char *path = dcp__hf_join(d, LOCK);
    d->is_made = *d->path && ops->stat(d->storage, d->path, &st, NULL) == DCP_NOT_FOUND;
    dcp_status status = !path ? dcp__nomem(err) : ops->make_dir ? ops->make_dir(d->storage, d->path, err) : DCP_OK;
    status = status == DCP_OK ? dcp__open_locked(d->storage, path, &d->lock, err) : status;
    dcp__free(d->ctx, path);
    if (status == DCP_OK && !d->lock) {
        status = dcp__cv_fail_busy(err);
    }
    return status == DCP_OK ? look(d, err) : status;
}

void dcp__hf_leave(dcp__hf_dir *d)
{
    if (d->lock) {
        remove_name(d, LOCK, NULL);
        d->storage->ops->close(d->lock, NULL);
        d->lock = NULL;
        if (d->is_made) {
            d->storage->ops->remove(d->storage, d->path, NULL); /* which succeeds if there is nothing in it */
        }
    }
    dcp__names_reset(d->ctx, &d->live);
    dcp__names_reset(d->ctx, &d->dead);
    json_decref(d->index);
    json_decref(d->mark);
    d->index = d->mark = NULL;
}

/* ---- names of the new files ---- */

/* One rename replaces one file that stands alone. */
static bool is_one_step(const dcp__hf_dir *d, const dcp__hf_model *m)
{
    return m->files->n == 1 && !m->has_index && !d->has_index && !d->mark &&
           (d->live.n == 0 || (d->live.n == 1 && strcmp(d->live.names[0], m->files->names[0]) == 0));
}

char *dcp__hf_name(dcp_context *ctx, const char *name, uint64_t generation)
{
    size_t room = strlen(name) + 24, stem = dcp__hf_stem_bytes(dcp_str_of(name));
    char *out = dcp__alloc(ctx, room);
    if (out && generation) {
        snprintf(out, room, "%.*s.%llu%s", (int)stem, name, (unsigned long long)generation, name + stem);
    } else if (out) {
        snprintf(out, room, "%s", name);
    }
    return out;
}

static dcp_status look_for(const dcp__hf_dir *d, const dcp__hf_model *m, uint64_t generation, bool *is_taken, dcp_error *err)
{
    *is_taken = false;
    for (size_t i = 0; i < m->files->n && !*is_taken; i++) {
        char *name = dcp__hf_name(d->ctx, m->files->names[i], generation);
        if (!name) {
            return dcp__nomem(err);
        }
        *is_taken = has_name(&d->live, name);
        dcp__free(d->ctx, name);
    }
    return DCP_OK;
}

dcp_status dcp__hf_generation(const dcp__hf_dir *d, const dcp__hf_model *m, uint64_t *out, dcp_error *err)
{
    bool is_taken = !is_one_step(d, m);
    uint64_t generation = 0;
    dcp_status status = is_taken ? look_for(d, m, generation, &is_taken, err) : DCP_OK;
    while (status == DCP_OK && is_taken) {
        status = look_for(d, m, ++generation, &is_taken, err);
    }
    if (status == DCP_OK) {
        *out = generation;
    }
    return status;
}

dcp_status dcp__hf_found_generation(const dcp__hf_dir *d, const dcp__hf_model *m, uint64_t *out, dcp_error *err)
{
    enum { HIGHEST = 2 }; /* new files are of another generation than the old ones, which are of one */
    for (uint64_t generation = 0; generation <= HIGHEST; generation++) {
        bool is_taken = false;
        dcp_status status = look_for(d, m, generation, &is_taken, err);
        if (status != DCP_OK || is_taken) {
            *out = status == DCP_OK ? generation : 0;
            return status;
        }
    }
    *out = 0;
    return DCP_OK;
}

/* ---- one model takes another's place ---- */

dcp_status dcp__hf_begin(dcp__hf_dir *d, const dcp__hf_model *m, dcp_error *err)
{
    if (is_one_step(d, m)) {
        return DCP_OK;
    }
    dcp_status status = write_mark(d, m, false, err);
    d->is_marking = status == DCP_OK;
    return status == DCP_OK ? rename_part(d, MARK_PART, DCP__HF_MARK, err) : status;
}

/* With an index its rename is the switch. Without one it is that of the mark, or, if the old model has an index, its removal. */
static dcp_status switch_over(dcp__hf_dir *d, const dcp__hf_model *m, const char *index, dcp_error *err)
{
    dcp_status status = m->has_index ? write_part(d, INDEX_PART, index, err) : write_mark(d, m, true, err);
    if (status != DCP_OK) {
        return status;
    }
    d->is_switched = true; /* also if it says that it has failed */
    status = m->has_index ? rename_part(d, INDEX_PART, DCP__HF_INDEX, err) : rename_part(d, MARK_PART, DCP__HF_MARK, err);
    if (status == DCP_OK && !m->has_index && d->has_index) {
        status = remove_name(d, DCP__HF_INDEX, err);
        status = status == DCP_OK ? sync_names(d, err) : status;
    }
    return status;
}

static dcp_status remove_all(const dcp__hf_dir *d, const dcp__names *list, const dcp__names *but, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < list->n && status == DCP_OK; i++) {
        status = but && has_name(but, list->names[i]) ? DCP_OK : remove_name(d, list->names[i], err);
    }
    return status;
}

static dcp_status remove_rest(const dcp__hf_dir *d, const dcp__hf_model *m, dcp_error *err)
{
    dcp_status status = remove_all(d, &d->live, m->files, err);
    status = status == DCP_OK ? remove_all(d, &d->dead, m->files, err) : status;
    return status == DCP_OK && d->live.n + d->dead.n ? sync_names(d, err) : status;
}

dcp_status dcp__hf_commit(dcp__hf_dir *d, const dcp__hf_model *m, const char *index, dcp_error *err)
{
    if (!d->is_marking) {
        return remove_rest(d, m, err);
    }
    dcp_status status = switch_over(d, m, index, err);
    status = status == DCP_OK ? remove_rest(d, m, err) : status;
    return status == DCP_OK ? unmark(d, err) : status;
}

static bool is_any_there(const dcp__hf_dir *d, const dcp__names *list)
{
    for (size_t i = 0; i < list->n; i++) {
        if (is_there(d, list->names[i])) {
            return true;
        }
    }
    return false;
}

void dcp__hf_take_back(dcp__hf_dir *d, const dcp__hf_model *m, bool keeps)
{
    if (!d->is_marking || d->is_switched) {
        return;
    }
    bool has_model = d->has_index && !d->mark; /* which says by itself what counts */
    bool is_clean = keeps ? has_model || (!is_any_there(d, m->files) && !is_any_there(d, &d->dead))
                          : remove_all(d, m->files, &d->live, NULL) == DCP_OK && remove_all(d, &d->dead, NULL, NULL) == DCP_OK;
    remove_name(d, MARK_PART, NULL);
    if (is_clean && sync_names(d, NULL) == DCP_OK) {
        unmark(d, NULL);
    }
}
