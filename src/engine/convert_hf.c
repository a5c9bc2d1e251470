/* A Hugging Face directory: which tensor goes to which file, the files, the index. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "engine/convert_safetensors.h"
#include "engine/hf_names.h"
#include "format/hf.h"
#include "format/json_read.h"
#include "storage/storage.h"

#define SINGLE "model.safetensors"
#define EXTENSION ".safetensors"
#define MAX_INDEX_BYTES ((uint64_t)1 << 30)
#define LOCK ".libdcp-convert" /* in the directory while a conversion to it runs */

typedef struct hf {
    dcp__selection *s;
    dcp__conversion *c;
    dcp_context *ctx;
    const char *to;   /* the directory in the storage */
    dcp__arena arena; /* names of files */
    dcp_str *files;   /* within the directory */
    size_t n_files, cap_files;
    uint32_t *file_of; /* [item]; of tensors */
    bool has_index;
    dcp__cv_tensors *tensors; /* [file] */
    char **paths;             /* [file]: in the storage */
    bool *was_kept;           /* [file] */
    json_t *old_index;        /* that is being replaced; NULL: none */
    dcp_file *lock;           /* rank 0: open while nobody else may convert to the directory; NULL: none */
} hf;

/* ---- which file ---- */

static dcp_status add_file(hf *h, dcp_str name, dcp_error *err)
{
    void *array = h->files;
    bool ok = dcp__grow(h->ctx, &array, &h->cap_files, h->n_files + 1, sizeof *h->files);
    h->files = array;
    dcp_str copy = ok ? dcp__arena_str(&h->arena, name) : name;
    if (!ok || !copy.ptr) {
        return dcp__nomem(err);
    }
    h->files[h->n_files++] = copy;
    return DCP_OK;
}

static dcp_status add_numbered(hf *h, size_t i, size_t n, dcp_error *err)
{
    char name[80];
    snprintf(name, sizeof name, "model-%05zu-of-%05zu" EXTENSION, i + 1, n);
    return add_file(h, dcp_str_of(name), err);
}

/* One after the other until a file is full. */
static dcp_status assign_by_size(hf *h, dcp_error *err)
{
    uint64_t limit = h->c->opts->max_file_bytes ? h->c->opts->max_file_bytes : UINT64_MAX, used = 0;
    size_t n = 1;
    bool is_empty = true;
    for (size_t i = 0; i < h->s->n; i++) {
        const dcp__cv_item *item = &h->s->items[i];
        if (item->kind != DCP_ITEM_TENSOR) {
            continue;
        }
        if (!is_empty && (item->bytes > limit || used > limit - item->bytes)) {
            n++;
            used = 0;
        }
        h->file_of[i] = (uint32_t)(n - 1);
        used += item->bytes;
        is_empty = false;
    }
    h->has_index = n > 1;
    dcp_status status = n == 1 ? add_file(h, dcp_str_of(SINGLE), err) : DCP_OK;
    for (size_t i = 0; i < n && n > 1 && status == DCP_OK; i++) {
        status = add_numbered(h, i, n, err);
    }
    return status;
}

/* ---- by a mapping ---- */

/* A file that lies in the directory itself, and that readers find. */
static bool is_file_name(const char *name)
{
    size_t len = strlen(name), ext = sizeof EXTENSION - 1;
    return len > ext && name[0] != '.' && !strchr(name, '/') && strcmp(name + len - ext, EXTENSION) == 0;
}

/* Index files name files, PyTorch's mappings number them. */
static dcp_status mapped_name(const char *tensor, json_t *value, json_int_t highest, char *out, size_t room, dcp_error *err)
{
    const char *text = json_string_value(value);
    if (json_is_integer(value) && json_integer_value(value) >= 1 && json_integer_value(value) <= UINT32_MAX) {
        snprintf(out, room, "model-%05lld-of-%05lld" EXTENSION, (long long)json_integer_value(value), (long long)highest);
        return DCP_OK;
    }
    if (!text || !is_file_name(text) || strlen(text) >= room) {
        return dcp__fail(err, DCP_FORMAT, "mapping: tensor '%s' goes to no file such as model-00001-of-00002.safetensors",
                         dcp__print(dcp_str_of(tensor)).text);
    }
    snprintf(out, room, "%s", text);
    return DCP_OK;
}

static json_int_t highest_number(json_t *map)
{
    const char *name;
    json_t *value;
    json_int_t highest = 1;
    json_object_foreach(map, name, value)
    {
        highest = json_integer_value(value) > highest ? json_integer_value(value) : highest;
    }
    return highest;
}

/* Names are those of the source if the mapping is the source's own. */
static dcp_status assign_item(hf *h, json_t *map, json_int_t highest, dcp__strmap *files, size_t i, bool is_own, dcp_error *err)
{
    char file[256];
    const dcp__cv_item *item = &h->s->items[i];
    dcp_str name = is_own ? item->entry->item.fqn : item->fqn;
    json_t *value = json_object_getn(map, name.ptr, name.len);
    uint64_t number;
    if (!value) {
        return dcp__fail(err, DCP_MISMATCH, "mapping: tensor '%s' is not in it", dcp__print(name).text);
    }
    dcp_status status = mapped_name(name.ptr, value, highest, file, sizeof file, err);
    if (status == DCP_OK && !dcp__strmap_get(files, dcp_str_of(file), &number)) {
        number = h->n_files;
        status = add_file(h, dcp_str_of(file), err);
        status = status == DCP_OK ? dcp__strmap_add(files, h->files[number], number, NULL, err) : status;
    }
    h->file_of[i] = status == DCP_OK ? (uint32_t)number : 0;
    return status;
}

static dcp_status check_none_absent(const hf *h, json_t *map, dcp_error *err)
{
    dcp__strmap names;
    const char *name;
    json_t *value;
    dcp_status status = DCP_OK;
    uint64_t at;
    dcp__strmap_init(&names, h->ctx);
    for (size_t i = 0; i < h->s->n && status == DCP_OK; i++) {
        status = h->s->items[i].kind == DCP_ITEM_TENSOR ? dcp__strmap_add(&names, h->s->items[i].fqn, i, NULL, err) : DCP_OK;
    }
    if (status == DCP_OK) {
        json_object_foreach(map, name, value)
        {
            if (!dcp__strmap_get(&names, dcp_str_of(name), &at)) {
                status = dcp__fail(err, DCP_MISMATCH, "mapping: there is no tensor '%s'", dcp__print(dcp_str_of(name)).text);
                break;
            }
        }
    }
    dcp__strmap_reset(&names);
    return status;
}

static dcp_status assign_by_map(hf *h, dcp_str text, bool is_own, dcp_error *err)
{
    json_t *root, *map;
    dcp__strmap files;
    dcp_status status = dcp__json_parse(h->ctx, text, DCP_NO_OFFSET, "mapping", &root, err);
    if (status != DCP_OK) {
        return status;
    }
    map = json_object_get(root, "weight_map");
    map = map ? map : root;
    dcp__strmap_init(&files, h->ctx);
    if (!json_is_object(map)) {
        status = dcp__fail(err, DCP_FORMAT, "mapping: weight_map is no object");
    }
    status = status == DCP_OK && !is_own ? check_none_absent(h, map, err) : status;
    json_int_t highest = status == DCP_OK ? highest_number(map) : 0;
    for (size_t i = 0; i < h->s->n && status == DCP_OK; i++) {
        if (h->s->items[i].kind == DCP_ITEM_TENSOR) {
            status = assign_item(h, map, highest, &files, i, is_own, err);
        }
    }
    dcp__strmap_reset(&files);
    json_decref(root);
    h->has_index = true;
    return status;
}

/* A file of the local file system, whole. */
static dcp_status read_local(const char *path, dcp__buf *out, dcp_error *err)
{
    FILE *f = fopen(path, "rb");
    size_t got;
    if (!f) {
        return dcp__fail_errno(err, errno, "%s", path);
    }
    do {
        if (!dcp__buf_reserve(out, 65536)) {
            break;
        }
        got = fread(out->data + out->len, 1, 65536, f);
        out->len += got;
    } while (got && out->len < MAX_INDEX_BYTES);
    bool failed = ferror(f);
    fclose(f);
    return failed ? dcp__fail(err, DCP_IO, "%s: cannot be read", path) : out->failed ? dcp__nomem(err) : DCP_OK;
}

/* The source's own index, if it has one: *is_there. */
static dcp_status read_own_index(const hf *h, dcp__buf *out, bool *is_there, dcp_error *err)
{
    *is_there = false;
    if (h->c->ck->layout != DCP_LAYOUT_HF) {
        return DCP_OK;
    }
    dcp_status status = dcp__read_file(h->c->ck, DCP__HF_INDEX, MAX_INDEX_BYTES, out, err);
    *is_there = status == DCP_OK;
    return status == DCP_NOT_FOUND ? DCP_OK : status;
}

static dcp_status assign(hf *h, dcp_error *err)
{
    const dcp_convert_opts *o = h->c->opts;
    dcp__buf text;
    bool is_there = false;
    dcp_status status = DCP_OK;
    dcp__buf_init(&text, h->ctx);
    if (o->mapping) {
        status = read_local(o->mapping, &text, err);
        is_there = true;
    } else if (!o->max_file_bytes) {
        status = read_own_index(h, &text, &is_there, err);
    }
    if (status == DCP_OK) {
        dcp_str json = {(const char *)text.data, text.len};
        status = is_there ? assign_by_map(h, json, !o->mapping, err) : assign_by_size(h, err);
    }
    dcp__buf_reset(&text);
    return status;
}

/* ---- what is in the directory ---- */

typedef struct looking {
    const hf *h;
    dcp_error *err;
    dcp__names strangers; /* tensor files that this conversion does not make, and what was to become some */
} looking;

static bool is_made(const hf *h, const char *name, const char *ending)
{
    for (size_t i = 0; i < h->n_files; i++) {
        size_t len = strlen(h->files[i].ptr);
        if (strncmp(h->files[i].ptr, name, len) == 0 && strcmp(name + len, ending) == 0) {
            return true;
        }
    }
    return false;
}

/* Called as the files of a model are. */
static bool is_usual_name(const char *name, const char *ending)
{
    uint64_t part, parts;
    size_t single = sizeof SINGLE - 1, ext = sizeof EXTENSION - 1;
    if (strncmp(name, SINGLE, single) == 0 && strcmp(name + single, ending) == 0) {
        return true;
    }
    return dcp__hf_take(&name, "model-", &part) && dcp__hf_take(&name, "-of-", &parts) && strncmp(name, EXTENSION, ext) == 0 &&
           strcmp(name + ext, ending) == 0;
}

/* What a conversion that was killed left: one that is running has the directory's lock. */
static bool is_remnant(const hf *h, const char *name)
{
    return is_usual_name(name, DCP__CV_TEMPORARY) && !is_made(h, name, DCP__CV_TEMPORARY);
}

static dcp_status look_at(void *user, const char *name, dcp_entry_type type)
{
    looking *l = user;
    if (strcmp(name, ".metadata") == 0) {
        return dcp__fail(l->err, DCP_EXISTS, "a checkpoint of another form is there");
    }
    if (type != DCP_ENTRY_DIR && ((is_file_name(name) && !is_made(l->h, name, "")) || is_remnant(l->h, name))) {
        return dcp__names_add(l->h->ctx, &l->strangers, name, l->err);
    }
    return DCP_OK;
}

static char *join(const hf *h, const char *name)
{
    size_t room = strlen(h->to) + strlen(name) + 2;
    char *out = dcp__alloc(h->ctx, room);
    if (out) {
        snprintf(out, room, "%s%s%s", h->to, *h->to ? "/" : "", name);
    }
    return out;
}

/* A file of the model that is being replaced: its index names it, or it is called as such files are. */
static bool is_of_old(const hf *h, const char *name)
{
    const char *tensor;
    json_t *file;
    if (is_usual_name(name, "")) {
        return true;
    }
    json_object_foreach(json_object_get(h->old_index, "weight_map"), tensor, file)
    {
        if (json_is_string(file) && strcmp(json_string_value(file), name) == 0) {
            return true;
        }
    }
    return false;
}

static dcp_status check_strangers(const hf *h, const dcp__names *strangers, dcp_error *err)
{
    for (size_t i = 0; i < strangers->n; i++) {
        if (!is_remnant(h, strangers->names[i]) && (!h->c->opts->overwrite || !is_of_old(h, strangers->names[i]))) {
            return dcp__fail(err, DCP_EXISTS, "%s is there, and would be read together with the new files", strangers->names[i]);
        }
    }
    return DCP_OK;
}

static void read_old_index(hf *h)
{
    char *path = join(h, DCP__HF_INDEX);
    dcp_file *f;
    dcp_stat st;
    const dcp_storage_ops *ops = h->c->storage->ops;
    if (path && ops->stat(h->c->storage, path, &st, NULL) == DCP_OK && st.bytes <= MAX_INDEX_BYTES &&
        ops->open(h->c->storage, path, DCP_OPEN_READ, &f, NULL) == DCP_OK) {
        char *text = dcp__alloc(h->ctx, (size_t)st.bytes);
        size_t got = 0;
        if (text && ops->read_at(f, text, (size_t)st.bytes, 0, &got, NULL) == DCP_OK &&
            dcp__json_parse(h->ctx, (dcp_str){text, got}, DCP_NO_OFFSET, "index", &h->old_index, NULL) != DCP_OK) {
            h->old_index = NULL;
        }
        dcp__free(h->ctx, text);
        ops->close(f, NULL);
    }
    dcp__free(h->ctx, path);
}

/* Two conversions may give their files different names, so files that are locked do not keep them apart. */
static dcp_status lock_place(hf *h, dcp_error *err)
{
    char *path = join(h, LOCK);
    dcp_status status = path ? dcp__open_locked(h->c->storage, path, &h->lock, err) : dcp__nomem(err);
    dcp__free(h->ctx, path);
    return status == DCP_OK && !h->lock ? dcp__cv_fail_busy(err) : status;
}

static void unlock_place(hf *h)
{
    char *path = h->lock ? join(h, LOCK) : NULL;
    if (path) {
        h->c->storage->ops->remove(h->c->storage, path, NULL);
    }
    if (h->lock) {
        h->c->storage->ops->close(h->lock, NULL);
        h->lock = NULL;
    }
    dcp__free(h->ctx, path);
}

/* Rank 0's; strangers are files of the old model, and what killed conversions left, to be removed at the end. */
static dcp_status look_around(hf *h, dcp__names *strangers, dcp_error *err)
{
    const dcp_storage_ops *ops = h->c->storage->ops;
    looking l = {.h = h, .err = err};
    char *index = join(h, DCP__HF_INDEX);
    dcp_status status = !index ? dcp__nomem(err) : ops->make_dir ? ops->make_dir(h->c->storage, h->to, err) : DCP_OK;
    status = status == DCP_OK ? lock_place(h, err) : status;
    status = status == DCP_OK ? ops->list(h->c->storage, h->to, look_at, &l, err) : status;
    status = status == DCP_NOT_FOUND ? DCP_OK : status; /* a storage without directories */
    read_old_index(h);
    status = status == DCP_OK ? check_strangers(h, &l.strangers, err) : status;
    if (status == DCP_OK && h->old_index && !h->c->opts->overwrite && !h->c->opts->resume) {
        status = dcp__fail(err, DCP_EXISTS, DCP__HF_INDEX " is there");
    }
    for (size_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        status = dcp__cv_check_absent(h->c, h->paths[i], err);
    }
    dcp__free(h->ctx, index);
    *strangers = l.strangers;
    return status;
}

/* ---- files ---- */

static dcp_status lay_out_file(hf *h, size_t file, dcp_error *err)
{
    size_t n = 0, *items = dcp__calloc(h->ctx, h->s->n, sizeof *items);
    if (!items) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < h->s->n; i++) {
        if (h->s->items[i].kind == DCP_ITEM_TENSOR && h->file_of[i] == file) {
            items[n++] = i;
        }
    }
    dcp_status status = dcp__cv_lay_out_tensors(h->s, h->paths[file], items, n, &h->tensors[file], err);
    dcp__free(h->ctx, items);
    return status;
}

static dcp_status lay_out(hf *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    h->tensors = dcp__calloc(h->ctx, h->n_files, sizeof *h->tensors);
    h->paths = dcp__calloc(h->ctx, h->n_files, sizeof *h->paths);
    h->was_kept = dcp__calloc(h->ctx, h->n_files, sizeof *h->was_kept);
    if (!h->tensors || !h->paths || !h->was_kept) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        h->paths[i] = join(h, h->files[i].ptr);
        status = h->paths[i] ? lay_out_file(h, i, err) : dcp__nomem(err);
    }
    return status;
}

/* Files are dealt over the ranks. */
static bool is_mine(const hf *h, size_t file)
{
    return file % (size_t)dcp__step_size(&h->c->step) == (size_t)dcp__step_rank(&h->c->step);
}

static dcp_status check_space(const hf *h, dcp_error *err)
{
    uint64_t bytes = 0;
    dcp_stat st;
    for (size_t i = 0; i < h->n_files; i++) {
        bool is_there = h->c->opts->resume && h->c->storage->ops->stat(h->c->storage, h->paths[i], &st, NULL) == DCP_OK;
        bytes += is_there ? 0 : h->tensors[i].file.bytes;
    }
    return dcp__cv_check_space(h->c, h->to, bytes, err);
}

/* Where nothing is replaced a finished file gets its name at once, so that another try finds it: without an index, or with its
 * only file missing, the directory is no model yet. Otherwise all of them are finished first. */
static dcp_status make_file(void *arg, size_t i, int worker, dcp_error *err)
{
    hf *h = arg;
    size_t file = i * (size_t)dcp__step_size(&h->c->step) + (size_t)dcp__step_rank(&h->c->step);
    dcp__cv_file *f = &h->tensors[file].file;
    (void)worker;
    dcp_status status = dcp__cv_write_file(f, &h->was_kept[file], err);
    if (status == DCP_OK && !h->c->opts->overwrite && !h->was_kept[file]) {
        status = dcp__cv_publish_file(f, err);
    }
    dcp__cv_release_file(f); /* the directory is locked */
    if (status == DCP_OK) {
        pthread_mutex_lock(&h->c->lock);
        h->c->report.n_kept += h->was_kept[file];
        h->c->report.n_tensors += f->n_places;
        pthread_mutex_unlock(&h->c->lock);
    }
    return status;
}

/* Several files at once, which share the threads: while one waits for the disk another goes on. */
static dcp_status write_files(hf *h, dcp_error *err)
{
    size_t mine = 0;
    int threads = dcp__cv_threads(h->ctx), at_once;
    for (size_t i = 0; i < h->n_files; i++) {
        mine += is_mine(h, i);
    }
    at_once = mine < (size_t)threads ? (int)mine : threads;
    for (size_t i = 0; i < h->n_files && at_once > 1; i++) {
        h->tensors[i].file.workers = threads / at_once;
    }
    return dcp__parallel(mine, at_once > 1 ? at_once : 1, make_file, h, err);
}

static dcp_status publish_files(hf *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < h->n_files && h->c->opts->overwrite && status == DCP_OK; i++) {
        status = is_mine(h, i) && !h->was_kept[i] ? dcp__cv_publish_file(&h->tensors[i].file, err) : DCP_OK;
    }
    return status;
}

static void discard_files(hf *h)
{
    for (size_t i = 0; i < h->n_files && h->tensors; i++) {
        if (h->tensors[i].file.name && is_mine(h, i)) {
            dcp__cv_discard_file(&h->tensors[i].file);
        }
    }
}

/* ---- the index ---- */

static json_t *make_index(const hf *h)
{
    json_t *root = json_object(), *map = json_object(), *facts = json_object();
    uint64_t total = 0;
    bool ok = root && map && facts;
    for (size_t i = 0; i < h->s->n && ok; i++) {
        const dcp__cv_item *item = &h->s->items[i];
        if (item->kind == DCP_ITEM_TENSOR) {
            total += item->bytes;
            ok = json_object_setn_new(map, item->fqn.ptr, item->fqn.len, json_string(h->files[h->file_of[i]].ptr)) == 0;
        }
    }
    ok = ok && json_object_set_new(facts, "total_size", json_integer((json_int_t)total)) == 0;
    ok = ok && json_object_set(root, "metadata", facts) == 0 && json_object_set(root, "weight_map", map) == 0;
    json_decref(map);
    json_decref(facts);
    if (!ok) {
        json_decref(root);
        return NULL;
    }
    return root;
}

static dcp_status put_index(const hf *h, dcp_error *err)
{
    json_t *index = make_index(h);
    char *text = index ? json_dumps(index, JSON_INDENT(2)) : NULL, *path = join(h, DCP__HF_INDEX);
    dcp_status status = text && path ? dcp__cv_put_file(h->c, path, text, strlen(text), err) : dcp__nomem(err);
    free(text);
    json_decref(index);
    dcp__free(h->ctx, path);
    return status;
}

/* Once all files are there. */
static dcp_status finish(hf *h, const dcp__names *strangers, dcp_error *err)
{
    dcp_status status = h->has_index ? put_index(h, err) : DCP_OK;
    char *index = join(h, DCP__HF_INDEX);
    if (status == DCP_OK && !h->has_index && h->old_index && index) {
        status = h->c->storage->ops->remove(h->c->storage, index, err);
    }
    dcp__free(h->ctx, index);
    for (size_t i = 0; i < strangers->n && status == DCP_OK; i++) {
        char *path = join(h, strangers->names[i]);
        status = path ? h->c->storage->ops->remove(h->c->storage, path, err) : dcp__nomem(err);
        dcp__free(h->ctx, path);
    }
    return status;
}

/* ---- all ---- */

static dcp_status put_objects(const hf *h, dcp_error *err)
{
    char *path = join(h, "objects.pt");
    dcp_status status = path ? dcp__cv_put_objects(h->s, path, err) : dcp__nomem(err);
    dcp__free(h->ctx, path);
    return status;
}

static dcp_status convert(hf *h, dcp_error *err)
{
    bool is_first = dcp__step_rank(&h->c->step) == 0;
    dcp__names strangers = {0};
    dcp_status status = assign(h, err);
    status = status == DCP_OK ? lay_out(h, err) : status;
    status = status == DCP_OK && is_first ? look_around(h, &strangers, err) : status;
    status = status == DCP_OK && is_first ? check_space(h, err) : status;
    status = dcp__agree(&h->c->step, status, err);
    if (status == DCP_OK) {
        status = write_files(h, err);
        status = status == DCP_OK && is_first ? put_objects(h, err) : status;
        status = dcp__agree(&h->c->step, status, err);
    }
    if (status == DCP_OK) {
        status = dcp__agree(&h->c->step, publish_files(h, err), err);
    }
    if (status != DCP_OK) {
        discard_files(h);
    }
    bool is_published = status == DCP_OK;
    status = is_published && is_first ? finish(h, &strangers, err) : status;
    unlock_place(h);
    if (is_published) { /* last: nobody returns before the lock's name is gone */
        status = dcp__agree(&h->c->step, status, err);
    }
    dcp__names_reset(h->ctx, &strangers);
    return status;
}

dcp_status dcp__cv_to_hf(dcp__selection *s, const char *to, dcp_error *err)
{
    hf h = {.s = s, .c = s->c, .ctx = s->c->ctx, .to = to};
    dcp__arena_init(&h.arena, h.ctx, UINT64_MAX);
    h.file_of = dcp__calloc(h.ctx, s->n, sizeof *h.file_of);
    dcp_status status = h.file_of ? convert(&h, err) : dcp__agree(&s->c->step, dcp__nomem(err), err);
    for (size_t i = 0; i < h.n_files; i++) {
        if (h.tensors) {
            dcp__cv_tensors_reset(&h.tensors[i], h.ctx);
        }
        if (h.paths) {
            dcp__free(h.ctx, h.paths[i]);
        }
    }
    json_decref(h.old_index);
    dcp__free(h.ctx, h.tensors);
    dcp__free(h.ctx, h.paths);
    dcp__free(h.ctx, h.was_kept);
    dcp__free(h.ctx, h.files);
    dcp__free(h.ctx, h.file_of);
    dcp__arena_reset(&h.arena);
    return status;
}
