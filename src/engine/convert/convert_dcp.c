/* A DCP directory: by one rank, with the chunks of the source, or as by several, which are threads of this call. */
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "engine/convert/convert.h"
#include "engine/convert/rank_threads.h"
#include "engine/read/read_plan.h"
#include "plan/mesh.h"
#include "state/numbers.h"
#include "state/strided.h"

/* Elements of an item in another dtype than they are read in, or of a box of it. */
typedef struct feed {
    dcp__conversion *c;
    const dcp__cv_item *item;
    dcp_write_item source; /* as the source has it; pull NULL: read as a box of the whole */
} feed;

typedef struct rank_saves {
    dcp__conversion *c;
    const dcp__selection *s;
    dcp_context ctx; /* of the ranks: a share of the conversion's */
    const char *to;
    int world;
    dcp__gate gate;
} rank_saves;

/* ---- elements ---- */

/* n bytes of the box, from byte `offset` on. */
static dcp_status dequantize(const feed *f, const dcp_write_item *as, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const dcp__cv_item *item = f->item;
    size_t elem = dcp_dtype_bytes(item->dtype);
    int64_t at = (int64_t)(offset / elem), left = (int64_t)(n / elem), block = f->c->opts->dequantize_block;
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    uint64_t lost = 0;
    dcp__cv_segment segment = {.start = (uint64_t)at, .n = (uint64_t)left};
    char *out = buf;
    dcp_status status = DCP_OK;
    while (left > 0 && status == DCP_OK) {
        int64_t elems = dcp__box_at(as->ndim, as->box.sizes, at, left, offsets, sizes);
        uint64_t more = 0;
        for (int d = 0; d < as->ndim; d++) {
            offsets[d] += as->box.offsets[d];
        }
        dcp_box box = {offsets, sizes};
        dcp_tensor dst = dcp_tensor_make(item->dtype, as->ndim, sizes, out);
        status = dcp_read_dequantized(f->c->ck, item->quantized, block ? block : DCP_QUANTIZED_BLOCK, &box, &dst, &more, err);
        lost += more;
        at += elems;
        left -= elems;
        out += (size_t)elems * elem;
    }
    return status == DCP_OK ? dcp__cv_count_cast(f->c, item, &segment, lost, err) : status;
}

static dcp_status read_source(const feed *f, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    return f->source.pull ? f->source.pull(f->source.pull_user, &f->source, offset, buf, n, err)
                          : dcp__read_item_bytes(f->c->ck, f->item->entry, &f->source, offset, buf, n, err);
}

static dcp_status cast(const feed *f, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    size_t from = dcp_dtype_bytes(f->source.dtype), to = dcp_dtype_bytes(f->item->dtype), elems = n / to;
    void *in = dcp__alloc(f->c->ctx, elems * from);
    if (!in) {
        return dcp__nomem(err);
    }
    dcp_status status = read_source(f, offset / to * from, in, elems * from, err);
    if (status == DCP_OK) {
        dcp__cv_segment segment = {.item = 0, .start = offset / to, .n = elems};
        status = dcp__cv_count_cast(f->c, f->item, &segment, dcp__cast(f->source.dtype, in, f->item->dtype, buf, elems), err);
    }
    dcp__free(f->c->ctx, in);
    return status;
}

static dcp_status pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const feed *f = user;
    if (f->item->quantized) {
        return dequantize(f, item, offset, buf, n, err);
    }
    return f->source.dtype == f->item->dtype ? read_source(f, offset, buf, n, err) : cast(f, offset, buf, n, err);
}

/* ---- plans ---- */

/* Puts a feed between the source and items of the plan from number `first` on. */
static dcp_status feed_items(dcp__conversion *c, dcp_save_plan *p, size_t first, const dcp__cv_item *item, dcp_error *err)
{
    for (size_t i = first; i < p->n; i++) {
        dcp_write_item *out = &p->items[i];
        feed *f = dcp__arena_alloc(&p->arena, sizeof *f);
        if (!f) {
            return dcp__nomem(err);
        }
        *f = (feed){c, item, *out};
        out->bytes = out->bytes / dcp_dtype_bytes(out->dtype) * dcp_dtype_bytes(item->dtype);
        out->dtype = out->tensor.dtype = item->dtype;
        out->pull = pull;
        out->pull_user = f;
    }
    return DCP_OK;
}

static dcp_status add_with_chunks(dcp__conversion *c, dcp_save_plan *p, const dcp__cv_item *item, dcp_error *err)
{
    dcp_write_item name = {.fqn = item->fqn, .path = item->path, .path_len = item->path_len};
    size_t first = p->n;
    dcp_status status = dcp__plan_add_tensor(c->ck, p, item->entry, &name, err);
    return status == DCP_OK && item->dtype != item->entry->item.dtype ? feed_items(c, p, first, item, err) : status;
}

/* The rows of one rank. */
static dcp_status add_rows(dcp__conversion *c, dcp_save_plan *p, const dcp__cv_item *item, int world, int rank, dcp_error *err)
{
    const dcp_item *from = &item->entry->item;
    dcp_dtype dtype = item->quantized ? item->dtype : from->dtype; /* of what the feed gets */
    static const int by_rows = 0, whole = DCP_REPLICATE;
    dcp_write_item out = {.kind = DCP_ITEM_TENSOR,
                          .fqn = item->fqn,
                          .path = item->path,
                          .path_len = item->path_len,
                          .dtype = dtype,
                          .ndim = item->ndim,
                          .global_extents = item->extents};
    size_t first = p->n;
    int64_t elems, *offsets = dcp__arena_alloc(&p->arena, 2 * (size_t)item->ndim * sizeof *offsets);
    if (!offsets) {
        return dcp__nomem(err);
    }
    int64_t *sizes = offsets + item->ndim;
    dcp__mesh_box(1, &world, item->ndim && item->bytes ? &by_rows : &whole, rank, item->ndim, item->extents, offsets, sizes);
    out.box = (dcp_box){offsets, sizes};
    out.tensor = dcp_tensor_make(dtype, item->ndim, sizes, NULL);
    dcp__elems(item->ndim, sizes, &elems);
    uint64_t parts[] = {item->tie, (uint64_t)rank};
    out.tie = item->tie ? dcp__xxh3_64(parts, sizeof parts) | 1 : 0;
    if (elems == 0 && item->bytes) {
        out.dtype = item->dtype;
        return dcp__save_plan_add_absent(p, &out, err);
    }
    out.pull = pull; /* a plan wants one; the feed is made of the item */
    dcp_status status = dcp_save_plan_add(p, &out, err);
    if (status == DCP_OK) {
        p->items[first].pull = NULL;
        status = feed_items(c, p, first, item, err);
    }
    return status;
}

static dcp_status add_object(dcp_save_plan *p, const dcp__cv_item *item, dcp_error *err)
{
    dcp_write_item out = {
        .kind = DCP_ITEM_OBJECT, .fqn = item->fqn, .path = item->path, .path_len = item->path_len, .object = item->object};
    return dcp_save_plan_add(p, &out, err);
}

static dcp_status make_plan(const rank_saves *r, int rank, dcp_save_plan **out, dcp_error *err)
{
    const dcp__selection *s = r->s;
    dcp_save_plan *p;
    dcp_status status = dcp__save_plan_create(s->c->ctx, &p, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        const dcp__cv_item *item = &s->items[i];
        status = item->kind == DCP_ITEM_OBJECT       ? add_object(p, item, err)
                 : r->world == 1 && !item->quantized ? add_with_chunks(s->c, p, item, err)
                                                     : add_rows(s->c, p, item, r->world, rank, err);
    }
    status = status == DCP_OK ? dcp__save_plan_add_containers(p, s->containers, s->n_containers, err) : status;
    if (status != DCP_OK) {
        dcp_save_plan_free(p);
        return status;
    }
    *out = p;
    return DCP_OK;
}

/* ---- saves ---- */

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    dcp__conversion *c = user;
    (void)total;
    return dcp__cv_tell(c, done);
}

static void set_opts(const rank_saves *r, dcp_comm *comm, dcp_save_opts *out)
{
    const dcp_convert_opts *o = r->c->opts;
    *out = (dcp_save_opts)DCP_SAVE_OPTS_INIT;
    out->storage = o->storage;
    out->overwrite = o->overwrite;
    out->no_sync = o->no_sync;
    out->files = o->files;
    out->file_per_item = o->file_per_item;
    out->align_payloads = o->align_payloads;
    out->transform = o->transform;
    out->target_release = o->target_release;
    out->comm = comm;
    out->progress = o->progress && r->world == 1 ? on_progress : NULL;
    out->user = r->c;
}

static void note(rank_saves *r, const dcp_save_report *one, double check_seconds)
{
    dcp__conversion *c = r->c;
    pthread_mutex_lock(&c->lock);
    c->report.n_files += one->n_files;
    c->report.bytes += one->bytes;
    c->report.n_shared += one->n_tied;
    c->report.write_seconds += one->write_seconds + one->sync_seconds;
    c->report.check_seconds += check_seconds;
    pthread_mutex_unlock(&c->lock);
}

static dcp_status save(rank_saves *r, const dcp_save_opts *opts, dcp_status mine, const dcp_save_plan *plan, dcp_error *err)
{
    dcp_save_session *session;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_status status = dcp__save_begin(&r->ctx, r->to, opts, mine, &session, err);
    if (status != DCP_OK) {
        return status;
    }
    session->gate = &r->gate;
    status = dcp_save_write(session, plan, err);
    double start = dcp__now();
    if (status == DCP_OK && !r->c->opts->no_check) {
        status = dcp__session_read_back(session, err);
    }
    double seconds = dcp__now() - start;
    if (status != DCP_OK) {
        dcp_save_abort(session);
        return status;
    }
    status = dcp_save_commit(session, &report, err);
    if (status == DCP_OK) {
        note(r, &report, seconds);
    }
    return status;
}

static dcp_status save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    rank_saves *r = user;
    dcp_save_plan *plan = NULL;
    dcp_save_opts opts;
    set_opts(r, comm, &opts);
    dcp_status mine = make_plan(r, rank, &plan, err);
    dcp_status status = save(r, &opts, mine, plan, err);
    dcp_save_plan_free(plan);
    return status;
}

/* ---- before ---- */

/* Chunks that are copied as they are: nobody will read the tensor as a whole, and find that some of it is in none of them. */
static dcp_status check_chunks(const dcp__selection *s, const dcp__cv_item *item, dcp_error *err)
{
    static uint8_t unused; /* a plan wants a target, and does not touch it */
    const dcp_item *from = &item->entry->item;
    dcp_read_request whole = {.item = from, .dst = dcp_tensor_make(from->dtype, from->ndim, from->extents, &unused)};
    dcp__read_plan plan = {0};
    dcp_status status = dcp__plan_read(s->c->ck, &whole, 1, &plan, err);
    dcp__read_plan_reset(&plan);
    return status;
}

/* What is read in pieces, of which no CRC tells anything: by several ranks, or with its scales. */
static dcp_status check_item(void *arg, size_t i, int worker, dcp_error *err)
{
    (void)worker;
    const dcp__selection *s = arg;
    const dcp__cv_item *item = &s->items[i];
    if (item->kind != DCP_ITEM_TENSOR) {
        return DCP_OK;
    }
    return item->quantized || s->c->opts->ranks > 1 ? dcp__cv_check_source(s, item, false, err) : check_chunks(s, item, err);
}

/* Equal rows of tied tensors are one record. */
static dcp_status find_ties(const dcp__selection *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        dcp__cv_item *item = &s->items[i];
        bool can_tie = item->kind == DCP_ITEM_TENSOR && !item->quantized;
        status = can_tie ? dcp__tie_of_entry(s->c->ck, item->entry, &item->tie, err) : DCP_OK;
    }
    return status;
}

static uint64_t total_bytes(const dcp__selection *s)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < s->n; i++) {
        sum += s->items[i].bytes;
    }
    return sum;
}

static dcp_status prepare(const rank_saves *r, dcp__selection *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (r->c->opts->transform == NULL) {
        status = dcp__cv_check_space(r->c, "", total_bytes(s), err);
    }
    if (r->world > 1) {
        status = status == DCP_OK ? find_ties(s, err) : status;
    }
    return status == DCP_OK ? dcp__parallel(s->n, dcp__cv_threads(s->c->ctx), check_item, s, err) : status;
}

static void count(const dcp__selection *s)
{
    for (size_t i = 0; i < s->n; i++) {
        s->c->report.n_tensors += s->items[i].kind == DCP_ITEM_TENSOR;
        s->c->report.n_objects += s->items[i].kind == DCP_ITEM_OBJECT;
    }
}

/* Ranks that write at the same time share threads and memory. */
static int divide(dcp_context *ctx, int world)
{
    int at_once = world < ctx->threads ? world : ctx->threads;
    ctx->threads /= at_once;
    ctx->memory_bytes /= (uint64_t)at_once;
    return at_once;
}

dcp_status dcp__cv_to_dcp(dcp__selection *s, const char *to, dcp_error *err)
{
    dcp__conversion *c = s->c;
    rank_saves r = {.c = c, .s = s, .ctx = *c->ctx, .to = to, .world = c->opts->ranks > 1 ? c->opts->ranks : 1};
    dcp_status status = prepare(&r, s, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__gate_init(&r.gate, divide(&r.ctx, r.world));
    status = dcp__run_ranks(&r.ctx, r.world, save_rank, &r, err);
    dcp__gate_reset(&r.gate);
    if (status == DCP_OK) {
        count(s);
    }
    return status;
}
