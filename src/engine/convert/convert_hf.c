/* A Hugging Face directory: which tensor goes to which file, the files, the index. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "engine/convert/convert_safetensors.h"
#include "engine/convert/hf_dir.h"
#include "format/json_read.h"

#define MAX_INDEX_BYTES ((uint64_t)1 << 30)

typedef struct hf {
    dcp__selection *s;
    dcp__conversion *c;
    dcp_context *ctx;
    dcp__names files;  /* within the directory */
    uint32_t *file_of; /* [item]; of tensors */
    bool has_index;
    dcp__cv_tensors *tensors; /* [file] */
    char **paths;             /* [file]: in the storage */
    bool *was_kept;           /* [file] */
    bool is_complete;         /* the model that is there has an index, and must not be mixed with another one */
    dcp__hf_dir dir;          /* rank 0's */
} hf;

/* ---- which file ---- */

static dcp_status add_numbered(hf *h, size_t i, size_t n, dcp_error *err)
{
    char name[80];
    snprintf(name, sizeof name, "model-%05zu-of-%05zu" DCP__HF_EXTENSION, i + 1, n);
    return dcp__names_add(h->ctx, &h->files, name, err);
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
    dcp_status status = n == 1 ? dcp__names_add(h->ctx, &h->files, DCP__HF_SINGLE, err) : DCP_OK;
    for (size_t i = 0; i < n && n > 1 && status == DCP_OK; i++) {
        status = add_numbered(h, i, n, err);
    }
    return status;
}

/* ---- by a mapping ---- */

/* A file that lies in the directory itself, and that readers find. */
static bool is_file_name(const char *name)
{
    size_t len = strlen(name), ext = sizeof DCP__HF_EXTENSION - 1;
    return len > ext && name[0] != '.' && !strchr(name, '/') && strcmp(name + len - ext, DCP__HF_EXTENSION) == 0;
}

/* Index files name files, PyTorch's mappings number them. */
static dcp_status mapped_name(const char *tensor, json_t *value, json_int_t highest, char *out, size_t room, dcp_error *err)
{
    const char *text = json_string_value(value);
    if (json_is_integer(value) && json_integer_value(value) >= 1 && json_integer_value(value) <= UINT32_MAX) {
        snprintf(out, room, "model-%05lld-of-%05lld" DCP__HF_EXTENSION, (long long)json_integer_value(value), (long long)highest);
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
        number = h->files.n;
        status = dcp__names_add(h->ctx, &h->files, file, err);
        status = status == DCP_OK ? dcp__strmap_add(files, dcp_str_of(h->files.names[number]), number, NULL, err) : status;
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

/* ---- the directory ---- */

static dcp__hf_model model_of(const hf *h)
{
    return (dcp__hf_model){&h->files, h->has_index};
}

static bool is_made(const hf *h, const char *name)
{
    for (size_t i = 0; i < h->files.n; i++) {
        if (strcmp(h->files.names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* A file of the model that is being replaced: its index names it, or it is called as such files are. */
static bool is_of_old(const hf *h, const char *name)
{
    return dcp__hf_is_usual_name(name) || (h->dir.index && dcp__hf_is_indexed(h->dir.index, name)) ||
           (h->dir.mark && dcp__hf_is_marked(h->dir.mark, name));
}

/* Files that are neither made nor replaced would be read together with the new ones. */
static dcp_status check_strangers(const hf *h, dcp_error *err)
{
    const dcp_convert_opts *o = h->c->opts;
    for (size_t i = 0; i < h->dir.live.n; i++) {
        const char *name = h->dir.live.names[i];
        if (o->overwrite ? !is_made(h, name) && !is_of_old(h, name) : !is_made(h, name)) {
            return dcp__fail(err, DCP_EXISTS, "%s is there, and would be read together with the new files", name);
        }
    }
    if (h->dir.has_index && !o->overwrite && !o->resume) {
        return dcp__fail(err, DCP_EXISTS, DCP__HF_INDEX " is there");
    }
    return DCP_OK;
}

/* Readers find files of another generation by an index alone. */
static dcp_status rename_all(hf *h, uint64_t generation, dcp_error *err)
{
    for (size_t i = 0; i < h->files.n && generation; i++) {
        char *name = dcp__hf_name(h->ctx, h->files.names[i], generation);
        if (!name) {
            return dcp__nomem(err);
        }
        dcp__free(h->ctx, h->files.names[i]);
        h->files.names[i] = name;
    }
    h->has_index |= generation > 0;
    return DCP_OK;
}

/* Rank 0's: looks what is there, and calls the files as that demands. */
static dcp_status enter(hf *h, const char *to, uint64_t *generation, dcp_error *err)
{
    const dcp_convert_opts *o = h->c->opts;
    const dcp__hf_model m = model_of(h);
    h->dir = (dcp__hf_dir){.ctx = h->ctx, .storage = h->c->storage, .path = to, .no_sync = o->no_sync};
    dcp_status status = dcp__hf_enter(&h->dir, err);
    if (status == DCP_OK && o->overwrite) {
        status = check_strangers(h, err);
        status = status == DCP_OK ? dcp__hf_generation(&h->dir, &m, generation, err) : status;
        return status == DCP_OK ? rename_all(h, *generation, err) : status;
    }
    if (status == DCP_OK && o->resume) {
        status = dcp__hf_found_generation(&h->dir, &m, generation, err);
    }
    status = status == DCP_OK ? rename_all(h, *generation, err) : status;
    return status == DCP_OK ? check_strangers(h, err) : status;
}

/* Collective: what rank 0 finds and the others learn is one number: the generation, and in its last bit whether there is a
 * model. */
static dcp_status find_names(hf *h, const char *to, dcp_status status, dcp_error *err)
{
    uint64_t generation = 0, found = 0;
    uint64_t *all = dcp__calloc(h->ctx, (size_t)dcp__step_size(&h->c->step), sizeof *all);
    status = status == DCP_OK && !all ? dcp__nomem(err) : status;
    if (status == DCP_OK && dcp__step_rank(&h->c->step) == 0) {
        status = enter(h, to, &generation, err);
        found = generation << 1 | h->dir.has_index;
    }
    status = dcp__agree_u64(&h->c->step, status, found, all, err);
    found = status == DCP_OK ? all[0] : 0;
    dcp__free(h->ctx, all);
    h->is_complete = found & 1;
    bool is_named = dcp__step_rank(&h->c->step) == 0;
    return status == DCP_OK && !is_named ? rename_all(h, found >> 1, err) : status;
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

static char *join(const hf *h, const char *to, const char *name)
{
    return dcp__hf_join(&(dcp__hf_dir){.ctx = h->ctx, .path = to}, name);
}

static dcp_status lay_out(hf *h, const char *to, dcp_error *err)
{
    dcp_status status = DCP_OK;
    h->tensors = dcp__calloc(h->ctx, h->files.n, sizeof *h->tensors);
    h->paths = dcp__calloc(h->ctx, h->files.n, sizeof *h->paths);
    h->was_kept = dcp__calloc(h->ctx, h->files.n, sizeof *h->was_kept);
    if (!h->tensors || !h->paths || !h->was_kept) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < h->files.n && status == DCP_OK; i++) {
        h->paths[i] = join(h, to, h->files.names[i]);
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
    for (size_t i = 0; i < h->files.n; i++) {
        bool is_there = h->c->opts->resume && h->c->storage->ops->stat(h->c->storage, h->paths[i], &st, NULL) == DCP_OK;
        bytes += is_there ? 0 : h->tensors[i].file.bytes;
    }
    return dcp__cv_check_space(h->c, h->dir.path, bytes, err);
}

/* Rank 0's. */
static dcp_status begin(hf *h, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < h->files.n && status == DCP_OK; i++) {
        status = dcp__cv_check_absent(h->c, h->paths[i], err);
    }
    status = status == DCP_OK ? check_space(h, err) : status;
    return status == DCP_OK ? dcp__hf_begin(&h->dir, &m, err) : status;
}

/* Where nothing is replaced a finished file gets its name at once, so that another try finds it: until the end it is ignored.
 * Otherwise all of them are finished first. */
static dcp_status make_file(void *arg, size_t i, int worker, dcp_error *err)
{
    hf *h = arg;
    size_t file = i * (size_t)dcp__step_size(&h->c->step) + (size_t)dcp__step_rank(&h->c->step);
    dcp__cv_file *f = &h->tensors[file].file;
    (void)worker;
    dcp_status status = dcp__cv_write_file(f, &h->was_kept[file], err);
    if (status == DCP_OK && !h->c->opts->overwrite && !h->was_kept[file] && h->is_complete) {
        status =
            dcp__fail(err, DCP_EXISTS, "it is not what it should be, in a model that is complete: only overwriting replaces it");
        status = dcp__cv_in_file(h->c, f->name, status, err);
    }
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
    for (size_t i = 0; i < h->files.n; i++) {
        mine += is_mine(h, i);
    }
    at_once = mine < (size_t)threads ? (int)mine : threads;
    for (size_t i = 0; i < h->files.n && at_once > 1; i++) {
        h->tensors[i].file.workers = threads / at_once;
    }
    return dcp__parallel(mine, at_once > 1 ? at_once : 1, make_file, h, err);
}

static dcp_status publish_files(hf *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < h->files.n && h->c->opts->overwrite && status == DCP_OK; i++) {
        status = is_mine(h, i) && !h->was_kept[i] ? dcp__cv_publish_file(&h->tensors[i].file, err) : DCP_OK;
    }
    return status;
}

static void discard_files(hf *h)
{
    for (size_t i = 0; i < h->files.n && h->tensors; i++) {
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
            ok = json_object_setn_new(map, item->fqn.ptr, item->fqn.len, json_string(h->files.names[h->file_of[i]])) == 0;
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

/* Once all files are there. */
static dcp_status finish(hf *h, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    json_t *index = h->has_index ? make_index(h) : NULL;
    char *text = index ? json_dumps(index, JSON_INDENT(2)) : NULL;
    dcp_status status = h->has_index && !text ? dcp__nomem(err) : dcp__hf_commit(&h->dir, &m, text, err);
    free(text);
    json_decref(index);
    return status;
}

/* ---- all ---- */

static dcp_status put_objects(const hf *h, dcp_error *err)
{
    char *path = dcp__hf_join(&h->dir, DCP__HF_OBJECTS);
    dcp_status status = path ? dcp__cv_put_objects(h->s, path, err) : dcp__nomem(err);
    dcp__free(h->ctx, path);
    return status;
}

static dcp_status write_and_publish(hf *h, bool is_first, dcp_error *err)
{
    dcp_status status = dcp__agree(&h->c->step, is_first ? begin(h, err) : DCP_OK, err);
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
    return status;
}

static dcp_status convert(hf *h, const char *to, dcp_error *err)
{
    bool is_first = dcp__step_rank(&h->c->step) == 0;
    dcp_status status = find_names(h, to, assign(h, err), err);
    if (status != DCP_OK) {
        dcp__hf_leave(&h->dir);
        return status;
    }
    status = dcp__agree(&h->c->step, lay_out(h, to, err), err);
    status = status == DCP_OK ? write_and_publish(h, is_first, err) : status;
    bool is_published = status == DCP_OK;
    status = is_published && is_first ? finish(h, err) : status;
    if (status != DCP_OK && is_first) {
        const dcp__hf_model m = model_of(h);
        dcp__hf_take_back(&h->dir, &m, !h->c->opts->overwrite);
    }
    dcp__hf_leave(&h->dir);
    if (is_published) { /* last: nobody returns before the lock's name is gone */
        status = dcp__agree(&h->c->step, status, err);
    }
    return status;
}

dcp_status dcp__cv_to_hf(dcp__selection *s, const char *to, dcp_error *err)
{
    hf h = {.s = s, .c = s->c, .ctx = s->c->ctx};
    h.file_of = dcp__calloc(h.ctx, s->n, sizeof *h.file_of);
    dcp_status status = h.file_of ? convert(&h, to, err) : dcp__agree(&s->c->step, dcp__nomem(err), err);
    for (size_t i = 0; i < h.files.n; i++) {
        if (h.tensors) {
            dcp__cv_tensors_reset(&h.tensors[i], h.ctx);
        }
        if (h.paths) {
            dcp__free(h.ctx, h.paths[i]);
        }
    }
    dcp__free(h.ctx, h.tensors);
    dcp__free(h.ctx, h.paths);
    dcp__free(h.ctx, h.was_kept);
    dcp__free(h.ctx, h.file_of);
    dcp__names_reset(h.ctx, &h.files);
    return status;
}
