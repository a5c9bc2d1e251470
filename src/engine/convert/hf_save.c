/* Hugging Face directories: each rank writes what is its own of a state into files of its own, shards or whole tensors, with
 * where that belongs (formats.md 8.3, 11). All of them get their names after all are written. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/convert/convert.h"
#include "engine/convert/hf_dir.h"
#include "engine/convert/hf_file.h"
#include "engine/convert/hf_layout.h"
#include "engine/save/device_items.h"
#include "engine/save/group_plan.h"
#include "format/json_read.h"
#include "storage/storage.h"

/* One file of this rank. */
typedef struct own_file {
    uint32_t number;
    dcp__hf_output content;
} own_file;

typedef struct hf_save {
    dcp_context *ctx;
    const dcp_hf_save_opts *opts;
    dcp_save_opts device_opts;
    dcp_storage *storage;
    bool owns_storage;
    dcp__hf_dir dir; /* entered by rank 0 alone */
    dcp__step step;
    int rank, world;
    dcp_save_plan *plan;
    dcp__group_plan group;
    dcp__hf_layout layout;
    uint32_t *empty; /* numbers of the shards that have no file */
    size_t n_empty;
    own_file *files;
    size_t n_files, n_written; /* temporary files that are there */
    dcp__transfer *transfer;   /* NULL: no tensor is on a device */
    dcp__device_items devices;
    uint64_t generation; /* of names */
    /* Rank 0's: */
    json_t *owners;     /* name of a file, of the first generation -> rank */
    json_t *weight_map; /* tensor -> the same name */
    json_int_t total_size;
    dcp__names names; /* of all files, within the directory */
    dcp_hf_save_report report;
} hf_save;

/* ---- names ---- */

/* Of a file of this rank, in the storage. Allocated. */
static char *path_of(const hf_save *h, const own_file *f, const char *ending, dcp_error *err)
{
    char usual[DCP__HF_NAME_BYTES], temporary[DCP__HF_NAME_BYTES + 40];
    dcp__hf_layout_name(&h->layout, f->number, usual);
    char *name = dcp__hf_name(h->ctx, usual, h->generation), *path = NULL;
    if (name) {
        snprintf(temporary, sizeof temporary, "%s%s", name, ending);
        path = dcp__hf_join(&h->dir, temporary);
    }
    dcp__free(h->ctx, name);
    if (!path) {
        dcp__nomem(err);
    }
    return path;
}

/* ---- what is to be written ---- */

static void drop_objects(dcp_save_plan *p)
{
    for (size_t i = p->n; i-- > 0;) {
        if (p->items[i].kind == DCP_ITEM_OBJECT) {
            dcp_save_plan_remove(p, i);
        }
    }
}

static dcp_status make_plan(hf_save *h, dcp_value *state, dcp_error *err)
{
    dcp_status status = dcp_plan_save(h->ctx, state, &h->plan, err);
    if (status == DCP_OK && h->opts->drop_objects) {
        drop_objects(h->plan);
    }
    status = status == DCP_OK ? dcp__hf_layout_init(&h->layout, h->ctx, h->opts, h->rank, err) : status;
    return status == DCP_OK ? dcp__hf_layout_check(&h->layout, h->plan, err) : status;
}

/* Collective. Decides which file each item goes to. */
static dcp_status number_items(hf_save *h, uint64_t *words, dcp_error *err)
{
    dcp_status status = dcp__hf_layout_number(&h->layout, h->plan, h->group.local->writes, err);
    status = dcp__agree_u64(&h->step, status, dcp__hf_layout_word(&h->layout), words, err);
    if (status != DCP_OK) {
        return status;
    }
    for (int r = 0; r < h->world; r++) {
        if (!dcp__hf_layout_writes(words[r])) {
            h->empty[h->n_empty++] = (uint32_t)r + 1;
        }
    }
    return dcp__agree(&h->step, dcp__hf_layout_agree(&h->layout, words, h->world, h->plan->n, err), err);
}

/* ---- layout of the files ---- */

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Makes a file for each number that this rank's items have. */
static dcp_status list_files(hf_save *h, dcp_error *err)
{
    size_t n = 0;
    uint32_t *numbers = dcp__calloc(h->ctx, h->plan->n, sizeof *numbers);
    h->files = dcp__calloc(h->ctx, h->plan->n, sizeof *h->files);
    if (!numbers || !h->files) {
        dcp__free(h->ctx, numbers);
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < h->plan->n; i++) {
        if (h->layout.number_of[i]) {
            numbers[n++] = h->layout.number_of[i];
        }
    }
    if (n) {
        qsort(numbers, n, sizeof *numbers, by_number);
    }
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || numbers[i] != numbers[i - 1]) {
            h->files[h->n_files++].number = numbers[i];
        }
    }
    dcp__free(h->ctx, numbers);
    return DCP_OK;
}

static dcp_status lay_out_file(hf_save *h, own_file *f, const dcp_write_item **items, dcp_error *err)
{
    dcp__st_opts shards = {.world = h->world, .empty = h->empty, .n_empty = h->n_empty};
    size_t n = 0;
    for (size_t i = 0; i < h->plan->n; i++) {
        if (h->layout.number_of[i] == f->number) {
            items[n++] = &h->plan->items[i];
        }
    }
    return dcp__hf_output_make(h->ctx, items, n, h->opts->whole ? NULL : &shards, &f->content, err);
}

static dcp_status lay_out(hf_save *h, dcp_error *err)
{
    dcp_status status =
        dcp__device_items_attach(h->ctx, &h->device_opts, &h->transfer, h->plan->items, h->plan->n, &h->devices, err);
    const dcp_write_item **items = dcp__calloc(h->ctx, h->plan->n, sizeof *items);
    status = status == DCP_OK && !items ? dcp__nomem(err) : status;
    status = status == DCP_OK ? list_files(h, err) : status;
    for (size_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        status = lay_out_file(h, &h->files[i], items, err);
    }
    dcp__free(h->ctx, items);
    return status;
}

/* ---- what rank 0 knows of all files ---- */

static bool put_file_facts(const hf_save *h, const own_file *f, json_t *files, json_t *map, json_int_t *total)
{
    char name[DCP__HF_NAME_BYTES];
    dcp__hf_layout_name(&h->layout, f->number, name);
    bool ok = json_object_set_new(files, name, json_integer(h->rank)) == 0;
    for (size_t i = 0; i < f->content.n && h->opts->whole && ok; i++) {
        const dcp_write_item *item = f->content.items[i];
        ok = json_object_setn_new(map, item->fqn.ptr, item->fqn.len, json_string(name)) == 0;
        *total += (json_int_t)item->bytes;
    }
    return ok;
}

/* Of this rank: {"files": {name: rank}, "weight_map": {tensor: name}, "total_size": bytes}; the map only of whole tensors. */
static char *own_facts(const hf_save *h)
{
    json_t *files = json_object(), *map = json_object(), *root = NULL;
    json_int_t total = 0;
    bool ok = files && map;
    for (size_t i = 0; i < h->n_files && ok; i++) {
        ok = put_file_facts(h, &h->files[i], files, map, &total);
    }
    root = ok ? json_pack("{sOsOsI}", "files", files, "weight_map", map, "total_size", total) : NULL;
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    json_decref(files);
    json_decref(map);
    return text;
}

static dcp_status add_files(hf_save *h, const json_t *files, int rank, dcp_error *err)
{
    const char *name;
    json_t *unused;
    json_object_foreach((json_t *)files, name, unused)
    {
        const json_t *other = json_object_get(h->owners, name);
        if (other) {
            return dcp__fail(err, DCP_ARG, "ranks %d and %d both have tensors of %s: give each file to one rank, or save shards",
                             (int)json_integer_value(other), rank, name);
        }
        if (json_object_set_new(h->owners, name, json_integer(rank)) != 0) {
            return dcp__nomem(err);
        }
    }
    return DCP_OK;
}

static dcp_status add_facts(hf_save *h, int rank, dcp_str text, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(h->ctx, text, DCP_NO_OFFSET, "list of files of a rank", &root, err);
    if (status != DCP_OK) {
        return status;
    }
    status = add_files(h, json_object_get(root, "files"), rank, err);
    if (status == DCP_OK && json_object_update(h->weight_map, json_object_get(root, "weight_map")) != 0) {
        status = dcp__nomem(err);
    }
    h->total_size += json_integer_value(json_object_get(root, "total_size"));
    json_decref(root);
    return status;
}

/* Rank 0's. */
static dcp_status merge_facts(hf_save *h, const dcp__parts *facts, dcp_error *err)
{
    h->owners = json_object();
    h->weight_map = json_object();
    dcp_status status = h->owners && h->weight_map ? DCP_OK : dcp__nomem(err);
    for (int r = 0; r < h->world && status == DCP_OK; r++) {
        size_t len;
        const char *text = (const char *)dcp__part(facts, r, &len);
        status = add_facts(h, r, (dcp_str){text, len}, err);
    }
    return status;
}

/* Collective. */
static dcp_status collect_facts(hf_save *h, dcp_status mine, dcp_error *err)
{
    dcp__parts facts = {0};
    char *text = mine == DCP_OK ? own_facts(h) : NULL;
    mine = mine == DCP_OK && !text ? dcp__nomem(err) : mine;
    dcp_status status = dcp__gather(&h->step, mine, 0, text, text ? strlen(text) : 0, &facts, err);
    if (status == DCP_OK) {
        status = dcp__agree(&h->step, h->rank == 0 ? merge_facts(h, &facts, err) : DCP_OK, err);
    }
    dcp__parts_free(&facts);
    free(text);
    return status;
}

/* ---- files ---- */

static dcp_status write_file(hf_save *h, const own_file *f, dcp_error *err)
{
    char *path = path_of(h, f, DCP__CV_TEMPORARY, err);
    dcp_status status = path ? dcp__hf_output_write(&f->content, h->storage, path, h->opts->no_sync, err) : DCP_NOMEM;
    dcp__free(h->ctx, path);
    h->n_written += status == DCP_OK;
    h->report.n_tensors += f->content.n;
    h->report.bytes += f->content.bytes;
    return status;
}

static dcp_status write_files(hf_save *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        status = write_file(h, &h->files[i], err);
    }
    return status;
}

static void discard_files(hf_save *h)
{
    for (size_t i = 0; i < h->n_written; i++) {
        char *path = path_of(h, &h->files[i], DCP__CV_TEMPORARY, NULL);
        if (path) {
            h->storage->ops->remove(h->storage, path, NULL);
        }
        dcp__free(h->ctx, path);
    }
}

static dcp_status publish_files(hf_save *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        char *from = path_of(h, &h->files[i], DCP__CV_TEMPORARY, err), *to = path_of(h, &h->files[i], "", err);
        status = from && to ? h->storage->ops->rename(h->storage, from, to, err) : DCP_NOMEM;
        h->report.n_files += status == DCP_OK;
        dcp__free(h->ctx, from);
        dcp__free(h->ctx, to);
    }
    if (status == DCP_OK && h->n_files && !h->opts->no_sync && h->storage->ops->sync_dir) {
        dcp_error fault = DCP_ERROR_INIT;
        status = dcp__synced(h->storage->ops->sync_dir(h->storage, h->dir.path, &fault), &fault, err);
    }
    return status;
}

/* ---- the directory: rank 0's part ---- */

static dcp__hf_model model_of(const hf_save *h)
{
    return (dcp__hf_model){&h->names, h->opts->whole};
}

/* Called as files are that a save may replace. */
static bool is_replaceable(const hf_save *h, const char *name)
{
    return h->opts->overwrite && (strncmp(name, "shard-", 6) == 0 || dcp__hf_is_usual_name(name));
}

static dcp_status enter(hf_save *h, dcp_error *err)
{
    dcp_status status = dcp__hf_enter(&h->dir, err);
    for (size_t i = 0; i < h->dir.live.n && status == DCP_OK; i++) {
        const char *name = h->dir.live.names[i];
        if (!is_replaceable(h, name)) {
            status = dcp__fail(err, DCP_EXISTS, "%s is there, and would be read together with the new files", name);
        }
    }
    if (status == DCP_OK && h->dir.has_index && !h->opts->overwrite) {
        status = dcp__fail(err, DCP_EXISTS, DCP__HF_INDEX " is there");
    }
    return status;
}

/* Names of the files of all ranks, as they are called so far. */
static dcp_status list_names(hf_save *h, dcp_error *err)
{
    const char *usual;
    json_t *unused;
    dcp__names_reset(h->ctx, &h->names);
    json_object_foreach(h->owners, usual, unused)
    {
        char *name = dcp__hf_name(h->ctx, usual, h->generation);
        dcp_status status = name ? dcp__names_add(h->ctx, &h->names, name, err) : dcp__nomem(err);
        dcp__free(h->ctx, name);
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

static dcp_status begin(hf_save *h, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    dcp_status status = list_names(h, err);
    status = status == DCP_OK ? dcp__hf_generation(&h->dir, &m, &h->generation, err) : status;
    status = status == DCP_OK ? list_names(h, err) : status;
    return status == DCP_OK ? dcp__hf_begin(&h->dir, &m, err) : status;
}

/* The names in the map become those of the generation. */
static bool rename_in_map(const hf_save *h)
{
    const char *tensor;
    json_t *file;
    bool ok = true;
    json_object_foreach(h->weight_map, tensor, file)
    {
        char *name = dcp__hf_name(h->ctx, json_string_value(file), h->generation);
        ok = ok && name && json_string_set(file, name) == 0;
        dcp__free(h->ctx, name);
    }
    return ok;
}

static char *index_text(const hf_save *h)
{
    json_t *index =
        rename_in_map(h) ? json_pack("{s{sI}sO}", "metadata", "total_size", h->total_size, "weight_map", h->weight_map) : NULL;
    char *text = index ? json_dumps(index, JSON_INDENT(2)) : NULL;
    json_decref(index);
    return text;
}

static dcp_status commit(hf_save *h, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    char *index = m.has_index ? index_text(h) : NULL;
    dcp_status status = m.has_index && !index ? dcp__nomem(err) : dcp__hf_commit(&h->dir, &m, index, err);
    free(index);
    return status;
}

static void take_back(hf_save *h)
{
    const dcp__hf_model m = model_of(h);
    dcp__hf_take_back(&h->dir, &m, false);
}

/* ---- all ---- */

/* Collective. When it returns all ranks know their files, and that nothing but reading and storing can fail any more. */
static dcp_status prepare(hf_save *h, dcp_value *state, dcp_error *err)
{
    uint64_t *words = dcp__calloc(h->ctx, (size_t)h->world, sizeof *words);
    h->empty = dcp__calloc(h->ctx, (size_t)h->world, sizeof *h->empty);
    dcp_status status = words && h->empty ? make_plan(h, state, err) : dcp__nomem(err);
    status = status == DCP_OK && h->rank == 0 ? enter(h, err) : status;
    status = dcp__group_plan_make(&h->group, h->plan, status, NULL, NULL, err);
    status = status == DCP_OK ? number_items(h, words, err) : status;
    status = status == DCP_OK ? collect_facts(h, lay_out(h, err), err) : status;
    if (status == DCP_OK) {
        status = h->rank == 0 ? begin(h, err) : DCP_OK;
        status = dcp__agree_u64(&h->step, status, h->generation, words, err);
        h->generation = status == DCP_OK ? words[0] : 0;
    }
    dcp__free(h->ctx, words);
    return status;
}

static dcp_status write_and_publish(hf_save *h, dcp_error *err)
{
    dcp_status status = dcp__agree(&h->step, write_files(h, err), err);
    status = status == DCP_OK ? dcp__agree(&h->step, publish_files(h, err), err) : status;
    if (status != DCP_OK) {
        discard_files(h);
    }
    return status;
}

static dcp_status save(hf_save *h, dcp_value *state, dcp_error *err)
{
    dcp_status status = prepare(h, state, err);
    status = status == DCP_OK ? write_and_publish(h, err) : status;
    bool is_published = status == DCP_OK;
    status = is_published && h->rank == 0 ? commit(h, err) : status;
    if (status != DCP_OK && h->rank == 0) {
        take_back(h);
    }
    dcp__hf_leave(&h->dir);
    return is_published ? dcp__agree(&h->step, status, err) : status; /* nobody returns before the lock's name is gone */
}

static dcp_status attach(hf_save *h, const char *path, dcp_error *err)
{
    dcp_status status = DCP_OK;
    h->storage = h->opts->storage;
    if (!h->storage) {
        status = dcp_storage_posix(h->ctx, path, &h->storage, err);
        h->owns_storage = status == DCP_OK;
    }
    h->dir = (dcp__hf_dir){h->ctx, h->storage, .path = h->owns_storage ? "" : path, .no_sync = h->opts->no_sync};
    return status;
}

static void set_up(hf_save *h)
{
    h->step = (dcp__step){h->ctx, h->opts->comm, "write", h->opts->failures};
    h->rank = dcp__step_rank(&h->step);
    h->world = dcp__step_size(&h->step);
    h->group.step = h->step;
    h->group.step.phase = "plan";
    h->group.opts = (dcp__global_opts){.world = h->world, .rank = h->rank, .dedup_to_lowest = h->opts->dedup_to_lowest};
    h->device_opts.stream = h->opts->stream;
    h->device_opts.copy_ahead_bytes = h->opts->copy_ahead_bytes;
}

static void reset(hf_save *h)
{
    for (size_t i = 0; i < h->n_files; i++) {
        dcp__hf_output_reset(&h->files[i].content);
    }
    dcp__device_items_reset(&h->devices);
    dcp__transfer_free(h->transfer);
    dcp__group_plan_reset(&h->group);
    dcp__hf_layout_reset(&h->layout);
    dcp_save_plan_free(h->plan);
    dcp__names_reset(h->ctx, &h->names);
    json_decref(h->owners);
    json_decref(h->weight_map);
    dcp__free(h->ctx, h->files);
    dcp__free(h->ctx, h->empty);
    if (h->owns_storage) {
        dcp_storage_free(h->storage);
    }
}

dcp_status dcp_hf_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_hf_save_opts *opts,
                       dcp_hf_save_report *report, dcp_error *err)
{
    static const dcp_hf_save_opts none = DCP_HF_SAVE_OPTS_INIT;
    if (!path || !state || (opts && opts->struct_size != sizeof *opts) || (report && report->struct_size != sizeof *report)) {
        return dcp__fail(err, DCP_ARG, "hugging face: no path or state, or options of another version");
    }
    ctx = dcp__context(ctx);
    hf_save h = {.ctx = ctx,
                 .opts = opts ? opts : &none,
                 .device_opts = DCP_SAVE_OPTS_INIT,
                 .devices = {.ctx = ctx},
                 .report = DCP_HF_SAVE_REPORT_INIT};
    set_up(&h);
    dcp_status status = dcp__agree(&h.step, attach(&h, path, err), err);
    status = status == DCP_OK ? save(&h, state, err) : status;
    reset(&h);
    if (status == DCP_OK && report) {
        *report = h.report;
    }
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", path);
}
