/* A load, step by step. */
#include "engine/load/load.h"

#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "comm/collective.h"
#include "engine/load/share.h"
#include "engine/load/torchfile.h"
#include "engine/save/session.h"
#include "state/containers.h"
#include "state/value.h"

/* ---- objects ---- */

static dcp_status read_new_tensor(dcp_checkpoint *ck, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    dcp_value *v;
    dcp_status status = dcp__check_readable(ck, item, err);
    status = status == DCP_OK ? dcp_tensor_alloc(ck->ctx, item->dtype, item->ndim, item->extents, &v, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_read(ck, item, NULL, dcp_value_tensor(v), err);
    if (status != DCP_OK) {
        dcp_value_free(v);
        return status;
    }
    *out = v;
    return DCP_OK;
}

static dcp_status read_target(dcp_checkpoint *ck, const dcp_item *item, dcp_str name, dcp_value **out, dcp_error *err)
{
    if (!item) {
        return dcp__read_subtree(ck, name, out, err);
    }
    return item->kind == DCP_ITEM_TENSOR ? read_new_tensor(ck, item, out, err) : dcp_read_object(ck, item, out, err);
}

dcp_status dcp_read_load_object(const dcp_load_object *object, dcp_value **out, dcp_error *err)
{
    if (!object || !out) {
        return dcp__fail(err, DCP_ARG, "load: no %s", object ? "place for the object" : "object");
    }
    return read_target(object->ck, object->item, object->name, out, err);
}

static dcp_status hand_over_objects(dcp_checkpoint *ck, const dcp_load_plan *plan, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < plan->n_objects && status == DCP_OK; i++) {
        const dcp__object_target *t = &plan->objects[i];
        dcp_load_object object = {t->leaf->fqn, t->leaf->path, t->leaf->path_len, ck, t->item, t->name};
        status = plan->object(plan->user, &object, err);
    }
    return status;
}

/* Puts a value at a path of the state; takes the reference on success. */
static dcp_status put_at(dcp_value *state, const dcp_leaf *leaf, dcp_value *value, dcp_error *err)
{
    dcp_value *at = state;
    for (size_t i = 0; i < leaf->path_len; i++) {
        dcp_key key = dcp__has_keys(at) ? dcp__stored_key(at, leaf->path[i]) : leaf->path[i];
        if (i + 1 == leaf->path_len) {
            return dcp__has_keys(at) ? dcp_dict_set(at, key, value, err) : dcp_list_set(at, (size_t)key.integer, value, err);
        }
        at = dcp__has_keys(at) ? dcp_dict_get(at, key) : dcp_value_at(at, (size_t)key.integer);
    }
    return dcp__fail(err, DCP_INTERNAL, "a leaf without a path");
}

/* All are read before the first is put in place. */
static dcp_status load_objects(dcp_checkpoint *ck, dcp_load_plan *plan, dcp_error *err)
{
    size_t n = 0;
    dcp_status status = DCP_OK;
    dcp_value **values = dcp__calloc(plan->ctx, plan->n_objects, sizeof(dcp_value *));
    if (!values) {
        return dcp__nomem(err);
    }
    while (n < plan->n_objects && status == DCP_OK) {
        status = read_target(ck, plan->objects[n].item, plan->objects[n].name, &values[n], err);
        n += status == DCP_OK;
    }
    for (size_t i = 0; i < n; i++) {
        if (status == DCP_OK) {
            status = put_at(plan->state, plan->objects[i].leaf, values[i], err);
            if (status == DCP_OK) {
                continue;
            }
        }
        dcp_value_free(values[i]);
    }
    dcp__free(plan->ctx, values);
    return status;
}

/* ---- steps ---- */

uint64_t dcp__bytes_of_requests(const dcp_read_request *requests, size_t n)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t elems;
        if (dcp_tensor_elems(&requests[i].dst, &elems, NULL) == DCP_OK) {
            bytes += (uint64_t)elems * dcp_dtype_bytes(requests[i].dst.dtype);
        }
    }
    return bytes;
}

void dcp__report_read(const dcp_load_plan *plan, dcp__share_bytes bytes, double start, dcp_load_report *report)
{
    if (report) {
        report->n_tensors = plan->n_requests;
        report->n_objects = plan->n_objects;
        report->bytes += dcp__bytes_of_requests(plan->requests, plan->n_requests);
        report->read_bytes = bytes.read;
        report->received_bytes = bytes.received;
        report->read_seconds = dcp__now() - start;
    }
}

static dcp_status finish_read(dcp_checkpoint *ck, dcp_load_plan *plan, dcp__share_bytes bytes, double start,
                              dcp_load_report *report, dcp_error *err)
{
    dcp_status status = plan->object ? hand_over_objects(ck, plan, err) : load_objects(ck, plan, err);
    if (status == DCP_OK) {
        dcp__report_read(plan, bytes, start, report);
    }
    return status;
}

dcp_status dcp_load_read(dcp_checkpoint *ck, dcp_load_plan *plan, dcp_load_report *report, dcp_error *err)
{
    if (!ck || !plan) {
        return dcp__fail(err, DCP_ARG, "load: no %s", ck ? "plan" : "checkpoint");
    }
    double start = dcp__now();
    dcp_read_opts opts = {sizeof opts, plan->progress, plan->user, plan->stream};
    dcp_status status = dcp_read_many_with(ck, plan->requests, plan->n_requests, &opts, err);
    dcp__share_bytes bytes = {dcp__bytes_of_requests(plan->requests, plan->n_requests), 0};
    return status == DCP_OK ? finish_read(ck, plan, bytes, start, report, err) : status;
}

/* Collective. The same for a group, whose ranks read for each other. */
static dcp_status read_together(const dcp__step *step, dcp_checkpoint *ck, dcp_load_plan *plan, const dcp_load_opts *opts,
                                dcp_load_report *report, dcp_error *err)
{
    double start = dcp__now();
    dcp_read_opts read_opts = {sizeof read_opts, plan->progress, plan->user, plan->stream};
    dcp__share share;
    dcp__share_bytes bytes;
    dcp_status status = dcp__share_plan(step, ck, DCP_OK, plan->requests, plan->n_requests, !opts->no_read_once, &share, err);
    status = status == DCP_OK ? dcp__share_read(step, &share, &read_opts, &bytes, err) : status;
    dcp__share_reset(&share);
    return status == DCP_OK ? dcp__agree(step, finish_read(ck, plan, bytes, start, report, err), err) : status;
}

/* What a rank opened, for all to compare; 0 for checkpoints without a save id. */
static uint64_t identity_of(const dcp_checkpoint *ck)
{
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    dcp_checkpoint_get_info(ck, &info, NULL);
    return info.save_id[0] ? dcp__xxh3_64(info.save_id, strlen(info.save_id)) : 0;
}

/* All ranks have a plan, and of the same checkpoint. */
static dcp_status agree_on_plan(const dcp__step *step, dcp_status mine, const dcp_checkpoint *ck, dcp_error *err)
{
    size_t n = (size_t)dcp__step_size(step);
    uint64_t *ids = dcp__alloc(step->ctx, n * sizeof *ids);
    if (!ids && mine == DCP_OK) {
        mine = dcp__nomem(err);
    }
    dcp_status status = dcp__agree_u64(step, mine, mine == DCP_OK ? identity_of(ck) : 0, ids, err);
    for (size_t r = 1; status == DCP_OK && r < n; r++) {
        if (ids[r] != ids[0]) {
            status = dcp__fail(err, DCP_STATE, "ranks 0 and %zu opened different checkpoints: one was saved in the meantime", r);
        }
    }
    dcp__free(step->ctx, ids);
    return status;
}

/* ck is NULL on a rank that could not open it: `mine`. Such a rank goes on to where all of them learn of it. */
static dcp_status load_together(dcp_context *ctx, dcp_checkpoint *ck, dcp_status mine, dcp_value *state,
                                const dcp_load_opts *opts, dcp_load_report *report, dcp_error *err)
{
    bool is_known = opts && opts->struct_size == sizeof *opts;
    dcp__step step = {ctx, is_known ? opts->comm : NULL, "plan", is_known ? opts->failures : NULL};
    dcp_load_plan *plan = NULL;
    double start = dcp__now();
    mine = mine == DCP_OK && is_known && opts->failed ? dcp__fail_as(err, opts->failed) : mine;
    mine = mine == DCP_OK ? dcp_plan_load(ck, state, opts, &plan, report, err) : mine;
    dcp_status status = agree_on_plan(&step, mine, ck, err);
    if (status == DCP_OK) {
        if (report) {
            report->plan_seconds = dcp__now() - start;
        }
        step.phase = "read";
        status = dcp__step_size(&step) > 1 ? read_together(&step, ck, plan, opts, report, err)
                                           : dcp__agree(&step, dcp_load_read(ck, plan, report, err), err);
    }
    dcp_load_plan_free(plan);
    return status;
}

dcp_status dcp_load_from(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, dcp_load_report *report, dcp_error *err)
{
    if (!ck) {
        return dcp__fail(err, DCP_ARG, "load: no checkpoint");
    }
    if (opts && opts->struct_size == sizeof *opts && opts->torchfile) {
        return dcp__fail(err, DCP_ARG, "load: a torch.save reader opens its file itself");
    }
    return load_together(ck->ctx, ck, DCP_OK, state, opts, report, err);
}

/* Collective up to where all know what rank 0 has found. It alone lists the directory and reads `.metadata`. Ranks that know the
 * place by another path look for themselves, and so do all where it is another form of checkpoint. is_over: the ranks have
 * agreed on a failure. */
static dcp_status open_together(dcp_context *ctx, const char *path, const dcp_load_opts *opts, dcp_checkpoint **out,
                                bool *is_over, dcp_error *err)
{
    const dcp__step step = {ctx, opts->comm, "plan", opts->failures};
    const uint64_t place = dcp__xxh3_64(path, strlen(path));
    dcp__buf metadata; /* and behind it the place */
    dcp__buf_init(&metadata, ctx);
    dcp_status mine = opts->failed ? dcp__fail_as(err, opts->failed) : DCP_OK;
    if (mine == DCP_OK && opts->comm->rank == 0) {
        mine = dcp__checkpoint_open(ctx, path, &opts->open, &metadata, NULL, out, err);
        dcp__buf_put(&metadata, &place, sizeof place);
        mine = mine == DCP_OK && metadata.failed ? dcp__nomem(err) : mine;
    }
    dcp_status status = dcp__broadcast(&step, mine, 0, &metadata, err);
    *is_over = status != DCP_OK;
    if (status == DCP_OK && opts->comm->rank != 0) {
        metadata.len -= sizeof place;
        bool is_told = metadata.len && memcmp(metadata.data + metadata.len, &place, sizeof place) == 0;
        status = dcp__checkpoint_open(ctx, path, &opts->open, NULL, is_told ? &metadata : NULL, out, err);
    }
    dcp__buf_reset(&metadata);
    return status;
}

static dcp_status load_once(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts,
                            dcp_load_report *report, char save_id[DCP__SAVE_ID_BYTES], dcp_error *err)
{
    dcp_checkpoint *ck = NULL;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    if (opts->torchfile) {
        return dcp__load_torchfile(ctx, path, state, opts, report, err);
    }
    if (!path) {
        return dcp__fail(err, DCP_ARG, "load: no path");
    }
    bool is_over = false, has_group = opts->comm && opts->comm->size > 1;
    dcp_status status =
        has_group ? open_together(ctx, path, opts, &ck, &is_over, err) : dcp_checkpoint_open(ctx, path, &opts->open, &ck, err);
    if (status == DCP_OK) {
        dcp_checkpoint_get_info(ck, &info, NULL);
        snprintf(save_id, DCP__SAVE_ID_BYTES, "%s", info.save_id);
    }
    if (!is_over) {
        status = load_together(ctx, ck, status, state, opts, report, err);
    }
    dcp_checkpoint_close(ck);
    return status;
}

/* ---- a checkpoint that is replaced meanwhile ---- */

#define MAX_TRIES 4

static bool speaks_of_files(dcp_status status)
{
    return status == DCP_NOT_FOUND || status == DCP_FORMAT || status == DCP_CHECKSUM;
}

/* Whether a failure is what a save may cause that replaces the checkpoint: files are gone, or are others, or the ranks have seen
 * different checkpoints. The same on all ranks of a group. */
static bool may_be_replaced(dcp_status status, const dcp_failures *failures)
{
    size_t n = dcp_failures_count(failures), n_files = 0;
    for (size_t i = 0; i < n; i++) {
        n_files += speaks_of_files(dcp_failures_at(failures, i)->code);
    }
    return status == DCP_PEER ? n && n_files == n : speaks_of_files(status) || status == DCP_STATE;
}

static bool is_other_now(dcp_context *ctx, const char *path, const dcp_load_opts *opts, const char *save_id)
{
    dcp_checkpoint *ck = NULL;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    bool is_other = false;
    if (save_id[0] && dcp_checkpoint_open(ctx, path, &opts->open, &ck, NULL) == DCP_OK) {
        dcp_checkpoint_get_info(ck, &info, NULL);
        is_other = info.save_id[0] && strcmp(info.save_id, save_id) != 0;
    }
    dcp_checkpoint_close(ck);
    return is_other;
}

/* Collective. Rank 0 looks, since the others may see the change at different moments. */
static bool is_replaced(dcp_context *ctx, const char *path, const dcp_load_opts *opts, const char *save_id)
{
    const dcp__step step = {ctx, opts->comm, "plan", NULL};
    if (dcp__step_size(&step) == 1) {
        return is_other_now(ctx, path, opts, save_id);
    }
    uint64_t *values = dcp__calloc(ctx, (size_t)opts->comm->size, sizeof *values);
    dcp_status mine = values ? DCP_OK : DCP_NOMEM;
    uint64_t seen = opts->comm->rank == 0 && is_other_now(ctx, path, opts, save_id);
    dcp_status status = dcp__agree_u64(&step, mine, seen, values, NULL);
    bool result = status == DCP_OK && values[0];
    dcp__free(ctx, values);
    return result;
}

/* Loads, and again where a save has replaced the checkpoint under the load, so that it gets the new one. The failures of the last
 * try are what the caller gets. */
static dcp_status load_until_it_stays(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts,
                                      dcp_load_report *report, dcp_error *err)
{
    dcp_load_report given = report ? *report : (dcp_load_report)DCP_LOAD_REPORT_INIT;
    dcp_status status = DCP_OK;
    for (int tries = 1; tries <= MAX_TRIES; tries++) {
        char save_id[DCP__SAVE_ID_BYTES] = "";
        if (report) {
            *report = given;
        }
        status = load_once(ctx, path, state, opts, report, save_id, err);
        if (status == DCP_OK || opts->torchfile || tries == MAX_TRIES || !may_be_replaced(status, opts->failures) ||
            !is_replaced(ctx, path, opts, save_id)) {
            break;
        }
    }
    return status;
}

dcp_status dcp_load(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts, dcp_load_report *report,
                    dcp_error *err)
{
    static const dcp_load_opts defaults = DCP_LOAD_OPTS_INIT;
    dcp_status status = opts ? dcp__check_load_opts(opts, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    ctx = dcp__context(ctx);
    dcp_load_opts own = opts ? *opts : defaults;
    dcp_failures *failures = NULL;
    dcp_error failed = DCP_ERROR_INIT;
    if (!own.failures && dcp_failures_create(ctx, &failures, &failed) == DCP_OK) {
        own.failures = failures;
    }
    if (!own.failures && !own.failed) {
        own.failed = &failed; /* or this rank would not know whether the others try again */
    }
    status = load_until_it_stays(ctx, path, state, &own, report, err);
    dcp_failures_free(failures);
    return status;
}
