/* Hugging Face shards: each rank writes what is its own of a state into files of its own, with where that belongs
 * (formats.md 8.3, 11). All of them get their names after all are written. */
#include <stdio.h>
#include <string.h>

#include "engine/convert.h"
#include "engine/group_plan.h"
#include "engine/hf_dir.h"
#include "engine/session.h"
#include "engine/write_records.h"
#include "format/safetensors_writer.h"
#include "plan/save_plan.h"
#include "storage/storage.h"

#define BLOCK_BYTES ((size_t)4 << 20)
#define NAME_BYTES 96

typedef struct hf_save {
    dcp_context *ctx;
    const dcp_hf_save_opts *opts;
    dcp_storage *storage;
    bool owns_storage;
    dcp__hf_dir dir; /* entered by rank 0 alone */
    dcp__step step;
    int rank, world;
    dcp_save_plan *plan;
    dcp__group_plan group;
    uint32_t *file_of;   /* [item]: chunks of one name go to files of their own, since a file has each name once */
    uint64_t n_files;    /* of this rank: 1 or more */
    uint64_t parts;      /* that every rank's names tell of */
    uint64_t generation; /* of names */
    dcp__names files;    /* rank 0: those of all ranks, within the directory */
    size_t n_written;    /* temporary files that are there */
    dcp_hf_save_report report;
} hf_save;

/* ---- names ---- */

/* Within the directory. */
static char *shard_name(const hf_save *h, int rank, uint64_t file)
{
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "shard-%05d-model-%05llu-of-%05llu" DCP__HF_EXTENSION, rank + 1, (unsigned long long)file + 1,
             (unsigned long long)h->parts);
    return dcp__hf_name(h->ctx, name, h->generation);
}

/* Of a file of this rank, in the storage. */
static char *file_name(const hf_save *h, uint64_t file, const char *end, dcp_error *err)
{
    char *name = shard_name(h, h->rank, file);
    size_t room = strlen(h->dir.path) + NAME_BYTES;
    char *path = name ? dcp__alloc(h->ctx, room) : NULL;
    if (path) {
        snprintf(path, room, "%s%s%s%s", h->dir.path, *h->dir.path ? "/" : "", name, end);
    } else {
        dcp__nomem(err);
    }
    dcp__free(h->ctx, name);
    return path;
}

/* ---- what is to be written ---- */

static dcp_status check_items(const dcp_save_plan *p, dcp_error *err)
{
    for (size_t i = 0; i < p->n; i++) {
        const dcp_write_item *item = &p->items[i];
        if (item->kind == DCP_ITEM_OBJECT) {
            return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\" is no tensor, which this form cannot hold",
                             dcp__print(item->fqn).text);
        }
        if (item->tensor.data && item->tensor.device.type != DCP_DEVICE_CPU) {
            return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\" is on a device; copy it to host memory first",
                             dcp__print(item->fqn).text);
        }
    }
    return DCP_OK;
}

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
    return status == DCP_OK ? check_items(h->plan, err) : status;
}

/* The k-th chunk of a name that this rank writes goes to its file number k. */
static dcp_status assign_files(hf_save *h, dcp_error *err)
{
    dcp__strmap names;
    dcp_status status = DCP_OK;
    uint32_t *counts = dcp__calloc(h->ctx, h->plan->n, sizeof *counts); /* [first item of a name] */
    h->file_of = dcp__calloc(h->ctx, h->plan->n, sizeof *h->file_of);
    h->n_files = 1; /* also of a rank that has nothing: the file tells that it took part */
    dcp__strmap_init(&names, h->ctx);
    if (!counts || !h->file_of) {
        status = dcp__nomem(err);
    }
    for (size_t i = 0; i < h->plan->n && status == DCP_OK; i++) {
        uint64_t first;
        if (!h->group.local->writes[i]) {
            continue;
        }
        status = dcp__strmap_add(&names, h->plan->items[i].fqn, i, &first, err);
        if (status == DCP_OK) {
            first = first == UINT64_MAX ? i : first;
            h->file_of[i] = counts[first]++;
            h->n_files = counts[first] > h->n_files ? counts[first] : h->n_files;
        }
    }
    dcp__strmap_reset(&names);
    dcp__free(h->ctx, counts);
    return status;
}

/* ---- files ---- */

static dcp_status write_elements(const hf_save *h, dcp_file *f, const dcp_write_item *item, uint64_t at, uint8_t *buf,
                                 dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (uint64_t done = 0; done < item->bytes && status == DCP_OK;) {
        size_t n = item->bytes - done < BLOCK_BYTES ? (size_t)(item->bytes - done) : BLOCK_BYTES;
        const uint8_t *bytes;
        status = dcp__item_bytes(item, done, n, buf, &bytes, err);
        status = status == DCP_OK ? h->storage->ops->write_at(f, bytes, n, at + done, err) : status;
        done += n;
    }
    return status == DCP_OK ? status : dcp__prefix(err, status, "item \"%s\": ", dcp__print(item->fqn).text);
}

/* The items of one file, its header, and where each begins. */
typedef struct shard {
    const dcp_write_item **items;
    dcp__st_entry *entries;
    uint64_t *offsets;
    size_t n;
    dcp__buf header;
} shard;

static dcp_status lay_out(hf_save *h, uint64_t file, shard *s, dcp_error *err)
{
    uint64_t total;
    dcp__st_opts opts = {.world = h->world};
    size_t n = h->plan->n;
    dcp__buf_init(&s->header, h->ctx);
    s->items = dcp__calloc(h->ctx, n, sizeof *s->items);
    s->entries = dcp__calloc(h->ctx, n, sizeof *s->entries);
    s->offsets = dcp__calloc(h->ctx, n, sizeof *s->offsets);
    if (!s->items || !s->entries || !s->offsets) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        const dcp_write_item *item = &h->plan->items[i];
        static const int64_t nowhere = 0; /* a scalar's offsets */
        if (h->group.local->writes[i] && h->file_of[i] == file) {
            s->items[s->n] = item;
            s->entries[s->n++] = (dcp__st_entry){.name = item->fqn,
                                                 .dtype = item->dtype,
                                                 .ndim = item->ndim,
                                                 .extents = item->box.sizes,
                                                 .saved_offsets = item->ndim ? item->box.offsets : &nowhere,
                                                 .global_extents = item->ndim ? item->global_extents : &nowhere};
        }
    }
    return dcp__safetensors_header(&s->header, s->entries, s->n, &opts, s->offsets, &total, err);
}

static dcp_status write_content(hf_save *h, const shard *s, dcp_file *f, dcp_error *err)
{
    uint8_t *buf = dcp__alloc_aligned(h->ctx, 4096, BLOCK_BYTES);
    dcp_status status = buf ? h->storage->ops->write_at(f, s->header.data, s->header.len, 0, err) : dcp__nomem(err);
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        status = write_elements(h, f, s->items[i], s->offsets[i], buf, err);
        h->report.bytes += s->items[i]->bytes;
    }
    h->report.bytes += s->header.len;
    dcp__free_aligned(h->ctx, buf);
    if (status == DCP_OK && !h->opts->no_sync) {
        dcp_error fault = DCP_ERROR_INIT;
        status = dcp__synced(h->storage->ops->sync(f, &fault), &fault, err);
    }
    return status;
}

static dcp_status write_file(hf_save *h, uint64_t file, dcp_error *err)
{
    shard s = {0};
    dcp_file *f;
    char *name = file_name(h, file, DCP__CV_TEMPORARY, err);
    dcp_status status = name ? lay_out(h, file, &s, err) : DCP_NOMEM;
    if (status == DCP_OK) {
        unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE | (h->opts->no_sync ? 0 : DCP_OPEN_WRITEBACK);
        status = h->storage->ops->open(h->storage, name, flags, &f, err);
    }
    if (status == DCP_OK) {
        h->n_written++;
        status = write_content(h, &s, f, err);
        dcp_status closed = h->storage->ops->close(f, status == DCP_OK ? err : NULL);
        status = status == DCP_OK ? closed : status;
    }
    h->report.n_tensors += s.n;
    dcp__buf_reset(&s.header);
    dcp__free(h->ctx, s.items);
    dcp__free(h->ctx, s.entries);
    dcp__free(h->ctx, s.offsets);
    dcp__free(h->ctx, name);
    return status;
}

static void discard_files(hf_save *h)
{
    for (uint64_t i = 0; i < h->n_written; i++) {
        char *name = file_name(h, i, DCP__CV_TEMPORARY, NULL);
        if (name) {
            h->storage->ops->remove(h->storage, name, NULL);
        }
        dcp__free(h->ctx, name);
    }
}

static dcp_status publish_files(hf_save *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (uint64_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        char *from = file_name(h, i, DCP__CV_TEMPORARY, err), *to = file_name(h, i, "", err);
        status = from && to ? h->storage->ops->rename(h->storage, from, to, err) : DCP_NOMEM;
        h->report.n_files += status == DCP_OK;
        dcp__free(h->ctx, from);
        dcp__free(h->ctx, to);
    }
    if (status == DCP_OK && !h->opts->no_sync && h->storage->ops->sync_dir) {
        dcp_error fault = DCP_ERROR_INIT;
        status = dcp__synced(h->storage->ops->sync_dir(h->storage, h->dir.path, &fault), &fault, err);
    }
    return status;
}

/* ---- the directory: rank 0's part ---- */

static dcp__hf_model model_of(const hf_save *h)
{
    return (dcp__hf_model){&h->files, false};
}

static dcp_status enter(hf_save *h, dcp_error *err)
{
    dcp_status status = dcp__hf_enter(&h->dir, err);
    for (size_t i = 0; i < h->dir.live.n && status == DCP_OK; i++) {
        const char *name = h->dir.live.names[i];
        if (!h->opts->overwrite || strncmp(name, "shard-", 6) != 0) {
            status = dcp__fail(err, DCP_EXISTS, "%s is there, and would be read together with the new files", name);
        }
    }
    return status;
}

/* Names of the shards of all ranks, as they are called so far. */
static dcp_status list_files(hf_save *h, const uint64_t *files, dcp_error *err)
{
    dcp_status status = DCP_OK;
    dcp__names_reset(h->ctx, &h->files);
    for (int r = 0; r < h->world; r++) {
        for (uint64_t i = 0; i < files[r] && status == DCP_OK; i++) {
            char *name = shard_name(h, r, i);
            status = name ? dcp__names_add(h->ctx, &h->files, name, err) : dcp__nomem(err);
            dcp__free(h->ctx, name);
        }
    }
    return status;
}

static dcp_status begin(hf_save *h, const uint64_t *files, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    dcp_status status = list_files(h, files, err);
    status = status == DCP_OK ? dcp__hf_generation(&h->dir, &m, &h->generation, err) : status;
    status = status == DCP_OK ? list_files(h, files, err) : status;
    return status == DCP_OK ? dcp__hf_begin(&h->dir, &m, err) : status;
}

static dcp_status commit(hf_save *h, dcp_error *err)
{
    const dcp__hf_model m = model_of(h);
    return dcp__hf_commit(&h->dir, &m, NULL, err);
}

static void take_back(hf_save *h)
{
    const dcp__hf_model m = model_of(h);
    dcp__hf_take_back(&h->dir, &m, false);
}

/* ---- all ---- */

/* Files of this rank, how many parts the names of all tell of, and of which generation they are. */
static dcp_status find_names(hf_save *h, uint64_t *values, dcp_error *err)
{
    dcp_status status = assign_files(h, err);
    status = dcp__agree_u64(&h->step, status, h->n_files, values, err);
    for (int r = 0; r < h->world && status == DCP_OK; r++) {
        h->parts = values[r] > h->parts ? values[r] : h->parts;
    }
    if (status != DCP_OK) {
        return status;
    }
    status = h->rank == 0 ? begin(h, values, err) : DCP_OK;
    status = dcp__agree_u64(&h->step, status, h->generation, values, err);
    h->generation = status == DCP_OK ? values[0] : 0;
    return status;
}

static dcp_status write_and_publish(hf_save *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (uint64_t i = 0; i < h->n_files && status == DCP_OK; i++) {
        status = write_file(h, i, err);
    }
    status = dcp__agree(&h->step, status, err);
    status = status == DCP_OK ? dcp__agree(&h->step, publish_files(h, err), err) : status;
    if (status != DCP_OK) {
        discard_files(h);
    }
    return status;
}

static dcp_status save(hf_save *h, dcp_value *state, uint64_t *values, dcp_error *err)
{
    dcp_status status = values ? make_plan(h, state, err) : dcp__nomem(err);
    status = status == DCP_OK && h->rank == 0 ? enter(h, err) : status;
    status = dcp__group_plan_make(&h->group, h->plan, status, NULL, NULL, err);
    status = status == DCP_OK ? find_names(h, values, err) : status;
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

dcp_status dcp_hf_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_hf_save_opts *opts,
                       dcp_hf_save_report *report, dcp_error *err)
{
    static const dcp_hf_save_opts none = DCP_HF_SAVE_OPTS_INIT;
    if (!path || !state || (opts && opts->struct_size != sizeof *opts) || (report && report->struct_size != sizeof *report)) {
        return dcp__fail(err, DCP_ARG, "hugging face: no path or state, or options of another version");
    }
    ctx = dcp__context(ctx);
    hf_save h = {.ctx = ctx, .opts = opts ? opts : &none, .report = DCP_HF_SAVE_REPORT_INIT};
    h.step = (dcp__step){ctx, h.opts->comm, "write", h.opts->failures};
    h.rank = dcp__step_rank(&h.step);
    h.world = dcp__step_size(&h.step);
    h.group.step = h.step;
    h.group.step.phase = "plan";
    h.group.opts = (dcp__global_opts){.world = h.world, .rank = h.rank};
    uint64_t *values = dcp__calloc(ctx, (size_t)h.world, sizeof *values);
    dcp_status status = dcp__agree(&h.step, attach(&h, path, err), err);
    status = status == DCP_OK ? save(&h, state, values, err) : status;
    dcp__group_plan_reset(&h.group);
    dcp_save_plan_free(h.plan);
    dcp__names_reset(ctx, &h.files);
    dcp__free(ctx, values);
    dcp__free(ctx, h.file_of);
    if (h.owns_storage) {
        dcp_storage_free(h.storage);
    }
    if (status == DCP_OK && report) {
        *report = h.report;
    }
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", path);
}
