/* A checkpoint as other ranks would have written it: each of them is a thread with a plan of its own, whose elements come from
 * the one open source. */
#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "engine/convert/rank_threads.h"
#include "engine/save/copy.h"
#include "plan/mesh.h"
#include "state/strided.h"

/* What becomes of one entry of the source. */
typedef struct target {
    dcp_checkpoint *ck;
    const dcp__entry *entry;
    dcp_write_item item; /* all but the box */
    const int *axes;     /* [dimension of the mesh]; NULL: replicated */
    uint64_t tie;        /* of all chunks; 0: of no other entry */
} target;

typedef struct reshard {
    dcp_context ctx; /* of the ranks and the source: the caller's, with a share of its threads and memory */
    dcp_checkpoint *ck;
    const dcp_reshard_opts *opts;
    const dcp_save_opts *save;
    const char *to;
    int world;
    dcp_save_plan *names; /* owns the targets' names and objects */
    target *targets;
    int *default_axes, *no_axes;
    dcp__gate gate;
    dcp_save_report *reports; /* [rank] */
    pthread_mutex_t lock;     /* guards done_bytes, is_canceled and the caller's progress function */
    uint64_t done_bytes, total_bytes;
    bool is_canceled;
} reshard;

/* ---- progress: of the check and of all ranks together ---- */

static bool tell(reshard *r, uint64_t more)
{
    pthread_mutex_lock(&r->lock);
    r->done_bytes += more;
    if (r->save && r->save->progress && !r->is_canceled) {
        uint64_t done = r->done_bytes < r->total_bytes ? r->done_bytes : r->total_bytes;
        r->is_canceled = !r->save->progress(r->save->user, done, r->total_bytes);
    }
    bool goes_on = !r->is_canceled;
    pthread_mutex_unlock(&r->lock);
    return goes_on;
}

/* ---- the source, checked before it is read in pieces ---- */

typedef struct check {
    reshard *r;
    uint64_t done;
    char first[DCP_ERROR_MESSAGE_BYTES];
    dcp_status code;
} check;

static void keep_first(void *user, const dcp_defect *defect)
{
    check *c = user;
    if (c->code == DCP_OK) {
        c->code = defect->code;
        snprintf(c->first, sizeof c->first, "%s%s%s", defect->file ? defect->file : "", defect->file ? ": " : "",
                 defect->message);
    }
}

static bool on_check(void *user, uint64_t done, uint64_t total)
{
    check *c = user;
    c->r->total_bytes = total + total; /* about as much is written as was read */
    uint64_t more = done - c->done;
    c->done = done;
    return tell(c->r, more);
}

/* Ranks read records in pieces, of which no CRC tells anything. */
static dcp_status check_source(reshard *r, dcp_error *err)
{
    check c = {.r = r};
    dcp_verify_opts opts = DCP_VERIFY_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    opts.defect = keep_first;
    opts.progress = on_check;
    opts.user = &c;
    dcp_status status = dcp_verify(r->ck, &opts, &report, err);
    if (status == DCP_OK && report.n_defects) {
        return dcp__fail(err, c.code, "%s: %zu defect%s, the first: %s", r->ck->path, report.n_defects,
                         report.n_defects == 1 ? "" : "s", c.first);
    }
    r->ck->check_crc = false;
    return status;
}

/* ---- targets ---- */

static const int *axes_of(const reshard *r, const target *t)
{
    for (size_t i = 0; i < r->opts->n_placements; i++) {
        if (fnmatch(r->opts->placements[i].names, t->item.fqn.ptr, 0) == 0) {
            return r->opts->placements[i].axes;
        }
    }
    return r->default_axes;
}

static dcp_status place(const reshard *r, target *t, dcp_error *err)
{
    t->axes = t->item.ndim ? axes_of(r, t) : NULL;
    for (int i = 0; t->axes && i < r->opts->n_mesh; i++) {
        if (t->axes[i] >= t->item.ndim) {
            return dcp__fail(err, DCP_ARG, "item \"%s\" has no axis %d to be split: its shape has %d",
                             dcp__print(t->item.fqn).text, t->axes[i], t->item.ndim);
        }
    }
    return DCP_OK;
}

static dcp_status pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const target *t = user;
    return dcp__read_item_bytes(t->ck, t->entry, item, offset, buf, n, err);
}

static dcp_status make_target(reshard *r, size_t index, dcp_error *err)
{
    target *t = &r->targets[index];
    const dcp__entry *e = &r->ck->meta->entries[index];
    const dcp_item *from = &e->item;
    *t = (target){.ck = r->ck, .entry = e, .item = {.kind = from->kind}};
    dcp_status status = dcp__save_plan_name(r->names, from->fqn, from->path, from->path_len, from->rank, &t->item, err);
    if (status == DCP_OK && from->kind == DCP_ITEM_OBJECT) {
        dcp_value *v;
        status = dcp_read_object(r->ck, from, &v, err);
        status = status == DCP_OK ? dcp__save_plan_hold(r->names, v, err) : status;
        t->item.object = status == DCP_OK ? v : NULL;
        return status;
    }
    t->item.dtype = from->dtype;
    t->item.ndim = from->ndim;
    t->item.global_extents = from->extents;
    t->item.pull = pull;
    t->item.pull_user = t;
    status = status == DCP_OK ? place(r, t, err) : status;
    return status == DCP_OK ? dcp__tie_of_entry(r->ck, t->entry, &t->tie, err) : status;
}

/* A pattern without a match is mistyped. */
static dcp_status check_patterns(const reshard *r, dcp_error *err)
{
    for (size_t i = 0; i < r->opts->n_placements; i++) {
        const char *names = r->opts->placements[i].names;
        bool matches = false;
        for (size_t k = 0; k < r->ck->meta->n_entries && !matches; k++) {
            const dcp_write_item *item = &r->targets[k].item;
            matches = item->kind == DCP_ITEM_TENSOR && fnmatch(names, item->fqn.ptr, 0) == 0;
        }
        if (!matches) {
            return dcp__fail(err, DCP_NOT_FOUND, "%s: no tensor is called \"%s\"", r->ck->path,
                             dcp__print(dcp_str_of(names)).text);
        }
    }
    return DCP_OK;
}

static dcp_status make_targets(reshard *r, dcp_error *err)
{
    size_t n = r->ck->meta->n_entries;
    dcp_status status = dcp__save_plan_create(&r->ctx, &r->names, err);
    r->targets = dcp__calloc(&r->ctx, n, sizeof *r->targets);
    if (status == DCP_OK && !r->targets) {
        status = dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = make_target(r, i, err);
    }
    return status == DCP_OK ? check_patterns(r, err) : status;
}

/* ---- one rank ---- */

static uint64_t tie_of_box(const target *t, const int64_t *offsets)
{
    uint64_t parts[] = {t->tie, dcp__xxh3_64(offsets, (size_t)t->item.ndim * sizeof *offsets)};
    return t->tie ? dcp__xxh3_64(parts, sizeof parts) | 1 : 0;
}

static dcp_status add_tensor(const reshard *r, const target *t, int rank, dcp_save_plan *p, dcp_error *err)
{
    dcp_write_item item = t->item;
    int64_t elems;
    int64_t *offsets = dcp__arena_alloc(&p->arena, 2 * (size_t)item.ndim * sizeof *offsets);
    if (!offsets) {
        return dcp__nomem(err);
    }
    int64_t *sizes = offsets + item.ndim;
    bool has_elements = t->entry->item.bytes > 0;
    dcp__mesh_box(r->opts->n_mesh, r->opts->mesh, t->axes && has_elements ? t->axes : r->no_axes, rank, item.ndim,
                  item.global_extents, offsets, sizes);
    item.box = (dcp_box){offsets, sizes};
    item.tensor = dcp_tensor_make(item.dtype, item.ndim, sizes, NULL);
    item.tie = tie_of_box(t, offsets);
    dcp__elems(item.ndim, sizes, &elems); /* a part of the whole */
    return elems == 0 && has_elements ? dcp__save_plan_add_absent(p, &item, err) : dcp_save_plan_add(p, &item, err);
}

static dcp_status make_plan(reshard *r, int rank, dcp_save_plan **out, dcp_error *err)
{
    dcp_save_plan *p;
    dcp_status status = dcp__save_plan_create(&r->ctx, &p, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < r->ck->meta->n_entries && status == DCP_OK; i++) {
        const target *t = &r->targets[i];
        status = t->item.kind == DCP_ITEM_TENSOR ? add_tensor(r, t, rank, p, err) : dcp_save_plan_add(p, &t->item, err);
    }
    status = status == DCP_OK ? dcp__plan_add_own_facts(r->ck, p, err) : status;
    if (status != DCP_OK) {
        dcp_save_plan_free(p);
        return status;
    }
    *out = p;
    return DCP_OK;
}

typedef struct rank_progress {
    reshard *all;
    uint64_t done;
} rank_progress;

static bool on_write(void *user, uint64_t done, uint64_t total)
{
    rank_progress *p = user;
    (void)total;
    uint64_t more = done - p->done;
    p->done = done;
    return tell(p->all, more);
}

static dcp_status save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    reshard *r = user;
    dcp_save_plan *plan = NULL;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    rank_progress progress = {.all = r};
    opts = r->save ? *r->save : opts;
    opts.comm = comm;
    opts.failures = rank == 0 ? opts.failures : NULL;
    opts.progress = opts.progress ? on_write : NULL;
    opts.user = &progress;
    dcp_status mine = make_plan(r, rank, &plan, err);
    dcp_status status = dcp__save_planned(&r->ctx, r->to, &opts, mine, plan, &r->gate, &r->reports[rank], err);
    dcp_save_plan_free(plan);
    return status;
}

/* ---- the report of all ---- */

static double longer(double a, double b)
{
    return a > b ? a : b;
}

static void sum_reports(const reshard *r, dcp_save_report *out)
{
    dcp_save_report sum = r->reports[r->save ? r->save->coordinator : 0];
    sum.ranks = out->ranks;
    sum.n_ranks = out->n_ranks;
    sum.n_items = sum.n_records = sum.n_files = sum.n_tied = 0;
    sum.bytes = sum.payload_bytes = sum.plan_bytes = 0;
    for (int i = 0; i < r->world; i++) {
        const dcp_save_report *one = &r->reports[i];
        sum.n_items += one->n_items;
        sum.n_records += one->n_records;
        sum.n_files += one->n_files;
        sum.n_tied += one->n_tied;
        sum.bytes += one->bytes;
        sum.payload_bytes += one->payload_bytes;
        sum.plan_bytes += one->plan_bytes;
        sum.degraded |= one->degraded;
        sum.plan_seconds = longer(sum.plan_seconds, one->plan_seconds);
        sum.write_seconds = longer(sum.write_seconds, one->write_seconds);
        sum.sync_seconds = longer(sum.sync_seconds, one->sync_seconds);
        sum.target_release = one->target_release > sum.target_release ? one->target_release : sum.target_release;
        if (out->ranks && (size_t)i < out->n_ranks) {
            out->ranks[i] = (dcp_rank_report){one->plan_seconds, one->write_seconds, one->sync_seconds, one->bytes};
        }
    }
    *out = sum;
}

/* ---- all together ---- */

static dcp_status check_opts(const dcp_reshard_opts *o, const dcp_save_opts *save, int *world, dcp_error *err)
{
    if (!o || o->struct_size != sizeof *o || o->n_mesh < 0 || (o->n_mesh && !o->mesh) || (o->n_placements && !o->placements)) {
        return dcp__fail(err, DCP_ARG, "reshard: no mesh, or options of another version");
    }
    for (size_t i = 0; i < o->n_placements; i++) {
        if (!o->placements[i].names || (o->n_mesh && !o->placements[i].axes)) {
            return dcp__fail(err, DCP_ARG, "reshard: placement %zu has no names or no axes", i);
        }
    }
    if (save && save->struct_size != sizeof *save) {
        return dcp__fail(err, DCP_ARG, "save options: struct_size %zu, expected %zu", save->struct_size, sizeof *save);
    }
    if (save && (save->comm || save->rank_local || save->cache || save->n_per_rank)) {
        return dcp__fail(err, DCP_ARG,
                         "reshard: the ranks are threads of its own; comm, rank_local, cache and per_rank are not "
                         "for it");
    }
    return dcp__mesh_ranks(o->n_mesh, o->mesh, world, err);
}

/* Ranks that write at the same time share threads and memory; as many write at once as there are threads. */
static int divide(dcp_context *ctx, int world)
{
    int at_once = world < ctx->threads ? world : ctx->threads;
    ctx->threads /= at_once;
    ctx->memory_bytes /= (uint64_t)at_once;
    return at_once;
}

static dcp_status make_axes(reshard *r, dcp_error *err)
{
    size_t n = (size_t)r->opts->n_mesh;
    r->default_axes = dcp__alloc(&r->ctx, n * sizeof *r->default_axes);
    r->no_axes = dcp__alloc(&r->ctx, n * sizeof *r->no_axes);
    r->reports = dcp__calloc(&r->ctx, (size_t)r->world, sizeof *r->reports);
    if (!r->default_axes || !r->no_axes || !r->reports) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        r->default_axes[i] = i + 1 == n ? 0 : DCP_REPLICATE;
        r->no_axes[i] = DCP_REPLICATE;
    }
    for (int i = 0; i < r->world; i++) {
        r->reports[i] = (dcp_save_report)DCP_SAVE_REPORT_INIT;
    }
    return DCP_OK;
}

static dcp_status run(reshard *r, const char *from, const dcp_open_opts *open, dcp_error *err)
{
    dcp_status status = make_axes(r, err);
    status = status == DCP_OK ? dcp_checkpoint_open(&r->ctx, from, open, &r->ck, err) : status;
    status = status == DCP_OK ? make_targets(r, err) : status; /* mistakes in the arguments show before anything is read */
    status = status == DCP_OK ? check_source(r, err) : status;
    if (status == DCP_OK) {
        dcp__gate_init(&r->gate, divide(&r->ctx, r->world));
        status = dcp__run_ranks(&r->ctx, r->world, save_rank, r, err);
        dcp__gate_reset(&r->gate);
    }
    return status;
}

dcp_status dcp_reshard(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to,
                       const dcp_reshard_opts *opts, const dcp_save_opts *save, dcp_save_report *report, dcp_error *err)
{
    reshard r = {.ctx = *dcp__context(ctx), .opts = opts, .save = save, .to = to};
    if (!from || !to) {
        return dcp__fail(err, DCP_ARG, "reshard: no path");
    }
    dcp_status status = check_opts(opts, save, &r.world, err);
    status = status == DCP_OK ? dcp__check_save_report(report, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    pthread_mutex_init(&r.lock, NULL);
    status = run(&r, from, open, err);
    if (status == DCP_OK && report) {
        sum_reports(&r, report);
    }
    pthread_mutex_destroy(&r.lock);
    dcp_save_plan_free(r.names);
    dcp_checkpoint_close(r.ck);
    dcp__free(&r.ctx, r.targets);
    dcp__free(&r.ctx, r.reports);
    dcp__free(&r.ctx, r.no_axes);
    dcp__free(&r.ctx, r.default_axes);
    return status;
}
