#include "engine/load/torchfile.h"

#include <string.h>
#include <sys/stat.h>

#include "engine/load/broadcast.h"
#include "engine/save/session.h"
#include "plan/wire.h"

/* ---- the reader ---- */

struct dcp_torchfile_reader {
    dcp_context *ctx;
    char *path; /* NULL: none yet */
    int coordinator;
};

dcp_status dcp_torchfile_reader_open(dcp_context *ctx, const char *path, int coordinator, dcp_torchfile_reader **out,
                                     dcp_error *err)
{
    ctx = dcp__context(ctx);
    if (!out || coordinator < 0) {
        return dcp__fail(err, DCP_ARG,
                         out ? "torch.save reader: coordinator %d is no rank" : "torch.save reader: no place for it",
                         coordinator);
    }
    dcp_torchfile_reader *r = dcp__calloc(ctx, 1, sizeof *r);
    if (!r) {
        return dcp__nomem(err);
    }
    r->ctx = ctx;
    r->coordinator = coordinator;
    dcp_status status = dcp_torchfile_reader_reset(r, path, err);
    if (status != DCP_OK) {
        dcp__free(ctx, r);
        return status;
    }
    *out = r;
    return DCP_OK;
}

dcp_status dcp_torchfile_reader_reset(dcp_torchfile_reader *reader, const char *path, dcp_error *err)
{
    char *copy = path ? dcp__strndup(reader->ctx, path, strlen(path)) : NULL;
    if (path && !copy) {
        return dcp__nomem(err);
    }
    dcp__free(reader->ctx, reader->path);
    reader->path = copy;
    return DCP_OK;
}

const char *dcp_torchfile_reader_path(const dcp_torchfile_reader *reader)
{
    return reader->path;
}

void dcp_torchfile_reader_close(dcp_torchfile_reader *reader)
{
    if (reader) {
        dcp__free(reader->ctx, reader->path);
        dcp__free(reader->ctx, reader);
    }
}

bool dcp_torchfile_validate_id(const char *path)
{
    struct stat st;
    return path && stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

/* ---- what is in the file, for ranks that cannot see it ---- */

static void put_items(const dcp_checkpoint *ck, dcp__buf *out)
{
    dcp__wire_writer w;
    dcp__wire_writer_init(&w, ck->ctx);
    dcp__put_varint(out, ck->meta->n_entries);
    for (size_t i = 0; i < ck->meta->n_entries; i++) {
        const dcp_item *item = &ck->meta->entries[i].item;
        dcp_key key = {.string = item->fqn}; /* nobody asks for the path */
        dcp__put_entry(&w, out,
                       &(dcp__wire_entry){.fqn = item->fqn,
                                          .path = &key,
                                          .path_len = 1,
                                          .kind = item->kind,
                                          .dtype = item->dtype,
                                          .ndim = item->ndim,
                                          .extents = item->extents});
    }
    dcp__wire_writer_reset(&w);
}

static dcp_status add_item(dcp__metadata *m, const dcp__wire_entry *from, dcp_error *err)
{
    dcp_str fqn = dcp__arena_str(&m->arena, from->fqn);
    size_t bytes = (size_t)from->ndim * sizeof *from->extents;
    int64_t *extents = dcp__arena_alloc(&m->arena, bytes);
    if (!fqn.ptr || !extents) {
        return dcp__arena_fail(&m->arena, err);
    }
    if (bytes) {
        memcpy(extents, from->extents, bytes);
    }
    m->entries[m->n_entries] = (dcp__entry){
        .item = {.fqn = fqn, .kind = from->kind, .rank = -1, .dtype = from->dtype, .ndim = from->ndim, .extents = extents},
        .storage = DCP__NO_STORAGE};
    return dcp__strmap_add(&m->by_fqn, fqn, m->n_entries++, NULL, err);
}

static dcp_status get_items(dcp__metadata *m, int from, const dcp__buf *message, dcp_error *err)
{
    dcp__wire_reader r;
    dcp__wire in = dcp__wire_of(message->data, message->len);
    size_t n = (size_t)dcp__get_bounded(&in, message->len);
    dcp_status status = dcp__metadata_reserve(m, n, 0, 0, 0, 0, err);
    dcp__wire_reader_init(&r, m->ctx);
    while (status == DCP_OK && m->n_entries < n) {
        dcp__wire_entry e;
        status = dcp__get_entry(&r, &in, &e, err);
        status = status == DCP_OK && in.bad ? dcp__wire_fail(&in, "list of items", from, err) : status;
        status = status == DCP_OK ? add_item(m, &e, err) : status;
    }
    dcp__wire_reader_reset(&r);
    return status;
}

/* A checkpoint without files that lists what another rank has found. */
static dcp_status list_items(dcp_context *ctx, const char *path, int from, const dcp__buf *message, dcp_checkpoint **out,
                             dcp_error *err)
{
    dcp_checkpoint *ck = dcp__calloc(ctx, 1, sizeof *ck);
    if (!ck) {
        return dcp__nomem(err);
    }
    ck->ctx = ctx;
    pthread_mutex_init(&ck->lock, NULL);
    ck->path = dcp__strndup(ctx, path, strlen(path));
    dcp_status status = ck->path ? dcp__metadata_create(ctx, &ck->meta, err) : dcp__nomem(err);
    status = status == DCP_OK ? get_items(ck->meta, from, message, err) : status;
    if (status != DCP_OK) {
        dcp_checkpoint_close(ck);
        return status;
    }
    *out = ck;
    return DCP_OK;
}

/* ---- the load ---- */

static dcp_status check(const dcp__step *step, const char *path, const dcp_load_opts *opts, dcp_error *err)
{
    if (opts->failed) {
        return dcp__fail_as(err, opts->failed);
    }
    if (!path) {
        return dcp__fail(err, DCP_STATE, "load: the torch.save reader has no path");
    }
    int coordinator = opts->torchfile->coordinator, size = dcp__step_size(step);
    if (coordinator >= size) {
        return dcp__fail(err, DCP_ARG, "load: coordinator %d is no rank of a group of %d", coordinator, size);
    }
    return DCP_OK;
}

/* Collective. */
static dcp_status agree_on_coordinator(const dcp__step *step, dcp_status mine, int coordinator, dcp_error *err)
{
    size_t n = (size_t)dcp__step_size(step);
    uint64_t *of = dcp__alloc(step->ctx, n * sizeof *of);
    mine = mine == DCP_OK && !of ? dcp__nomem(err) : mine;
    dcp_status status = dcp__agree_u64(step, mine, (uint64_t)coordinator, of, err);
    for (size_t r = 1; status == DCP_OK && r < n; r++) {
        if (of[r] != of[0]) {
            status = dcp__fail(err, DCP_STATE, "load: rank 0 takes %llu for the coordinator, rank %zu takes %llu",
                               (unsigned long long)of[0], r, (unsigned long long)of[r]);
        }
    }
    dcp__free(step->ctx, of);
    return status;
}

static dcp_status open_file(dcp_context *ctx, const char *path, const dcp_load_opts *opts, dcp_checkpoint **out, dcp__buf *items,
                            dcp_error *err)
{
    dcp_status status = dcp_checkpoint_open(ctx, path, &opts->open, out, err);
    if (status != DCP_OK) {
        return status;
    }
    if ((*out)->layout != DCP_LAYOUT_TORCH_ZIP && (*out)->layout != DCP_LAYOUT_TORCH_LEGACY) {
        return dcp__fail(err, DCP_FORMAT, "%s: no torch.save file", path);
    }
    put_items(*out, items);
    return items->failed ? dcp__nomem(err) : DCP_OK;
}

/* Collective. The file on the coordinator, on the other ranks a list of what is in it. */
static dcp_status open_for_all(const dcp__step *step, const char *path, const dcp_load_opts *opts, dcp_checkpoint **out,
                               dcp_error *err)
{
    int coordinator = opts->torchfile->coordinator;
    bool is_coordinator = dcp__step_rank(step) == coordinator;
    dcp_status status = agree_on_coordinator(step, check(step, path, opts, err), coordinator, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__buf items;
    dcp__buf_init(&items, step->ctx);
    dcp_status mine = is_coordinator ? open_file(step->ctx, path, opts, out, &items, err) : DCP_OK;
    status = dcp__broadcast(step, mine, coordinator, &items, err);
    if (status == DCP_OK) {
        mine = is_coordinator ? DCP_OK : list_items(step->ctx, path, coordinator, &items, out, err);
        status = dcp__agree(step, mine, err);
    }
    dcp__buf_reset(&items);
    return status;
}

static bool has_casts(const dcp_load_plan *plan)
{
    for (size_t i = 0; i < plan->n_requests; i++) {
        if (plan->requests[i].dst.dtype != plan->requests[i].item->dtype) {
            return true;
        }
    }
    return false;
}

/* Collective. One process alone can read straight into its targets, unless they want other elements than are there. */
static dcp_status read_for_all(const dcp__step *step, dcp_checkpoint *ck, dcp_load_plan *plan, const dcp_load_opts *opts,
                               dcp_load_report *report, dcp_error *err)
{
    if (dcp__step_size(step) == 1 && !has_casts(plan)) {
        return dcp__agree(step, dcp_load_read(ck, plan, report, err), err);
    }
    double start = dcp__now();
    dcp_read_opts read_opts = {sizeof read_opts, plan->progress, plan->user, plan->stream};
    dcp__share_bytes bytes = {0, 0};
    dcp_status status =
        dcp__broadcast_tensors(step, opts->torchfile->coordinator, ck, plan->requests, plan->n_requests, &read_opts, &bytes, err);
    if (status == DCP_OK) {
        dcp__report_read(plan, bytes, start, report);
    }
    return status;
}

dcp_status dcp__load_torchfile(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts,
                               dcp_load_report *report, dcp_error *err)
{
    dcp__step step = {ctx, opts->comm, "plan", opts->failures};
    dcp_checkpoint *ck = NULL;
    dcp_load_plan *plan = NULL;
    double start = dcp__now();
    path = path ? path : opts->torchfile->path;
    dcp_status status = open_for_all(&step, path, opts, &ck, err);
    if (status == DCP_OK) {
        status = dcp__agree(&step, dcp__plan_load(ck, state, opts, true, &plan, report, err), err);
    }
    if (status == DCP_OK) {
        if (report) {
            report->plan_seconds = dcp__now() - start;
        }
        step.phase = "read";
        status = read_for_all(&step, ck, plan, opts, report, err);
    }
    dcp_load_plan_free(plan);
    dcp_checkpoint_close(ck);
    return status;
}
