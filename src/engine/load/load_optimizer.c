/* The state of an optimizer without a template: what there is, and how it is cut, comes from the metadata and from the caller's
 * description of the model. As PyTorch's load_sharded_optimizer_state_dict. */
#include <string.h>

#include "comm/collective.h"
#include "dcp/load.h"
#include "engine/save/copy.h"
#include "plan/mesh.h"
#include "state/containers.h"
#include "state/strided.h"

/* Position of a parameter's name in the path of its state: ("optim", "state", "layer.weight", "exp_avg"). */
#define PARAMETER_KEY 2

struct dcp_optimizer {
    dcp_context *ctx;
    dcp_value *state;
    dcp_value **chunks; /* memory of the sharded tensors in it */
    size_t n_chunks;
};

typedef struct loading {
    dcp_context *ctx;
    dcp_checkpoint *ck;
    const dcp_optimizer_opts *opts;
    dcp_optimizer *out;
    dcp__arena arena; /* boxes */
    dcp_leaf *leaves;
    size_t n_leaves;
    dcp_read_request *requests;
    size_t n_requests;
} loading;

/* ---- which ---- */

static bool is_below(const dcp_key *path, size_t path_len, const char *key)
{
    return path_len > 0 && !path[0].is_int && path[0].string.len == strlen(key) &&
           memcmp(path[0].string.ptr, key, path[0].string.len) == 0;
}

static const dcp_model_shard *shard_of(const loading *l, const dcp_item *item)
{
    for (size_t i = 0; i < l->opts->n_shards && item->path_len > PARAMETER_KEY; i++) {
        dcp_key key = item->path[PARAMETER_KEY];
        const dcp_model_shard *s = &l->opts->shards[i];
        if (!key.is_int && key.string.len == strlen(s->name) && memcmp(key.string.ptr, s->name, key.string.len) == 0) {
            return s;
        }
    }
    return NULL;
}

/* ---- tensors ---- */

static dcp_status check_shard(const dcp_item *item, const dcp_model_shard *s, dcp_error *err)
{
    bool fits = s->ndim == item->ndim;
    for (int d = 0; d < item->ndim && fits; d++) {
        fits = s->box.offsets[d] >= 0 && s->box.sizes[d] >= 0 && s->box.offsets[d] <= item->extents[d] &&
               s->box.sizes[d] <= item->extents[d] - s->box.offsets[d];
    }
    return fits ? DCP_OK
                : dcp__fail(err, DCP_MISMATCH, "item \"%s\" of %s: the shard of \"%s\" is not within it",
                            dcp__print(item->fqn).text, dcp__print_shape(item->ndim, item->extents).text,
                            dcp__print(dcp_str_of(s->name)).text);
}

static void add_request(loading *l, const dcp_item *item, dcp_box box, dcp_value *target)
{
    l->requests[l->n_requests++] = (dcp_read_request){.item = item, .box = box, .dst = *dcp_value_tensor(target)};
}

/* One element: whole on every rank. */
static dcp_status whole_tensor(loading *l, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    dcp_status status = dcp_tensor_alloc(l->ctx, item->dtype, item->ndim, item->extents, out, err);
    if (status == DCP_OK) {
        add_request(l, item, (dcp_box){NULL, NULL}, *out);
    }
    return status;
}

/* This rank's rows of the tensor, or of the model's shard of it, as a sharded tensor of that shape. */
static dcp_status row_tensor(loading *l, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    static const int by_rows = 0;
    const dcp_model_shard *s = shard_of(l, item);
    dcp_status status = s ? check_shard(item, s, err) : DCP_OK;
    const int64_t *extents = s ? s->box.sizes : item->extents;
    int64_t elems, *offsets = dcp__arena_alloc(&l->arena, 3 * (size_t)item->ndim * sizeof *offsets);
    if (status != DCP_OK || !offsets) {
        return status != DCP_OK ? status : dcp__nomem(err);
    }
    int64_t *sizes = offsets + item->ndim, *from = sizes + item->ndim;
    int world = l->opts->world ? l->opts->world : 1;
    dcp__mesh_box(1, &world, &by_rows, l->opts->rank, item->ndim, extents, offsets, sizes);
    dcp_box box = {offsets, sizes};
    dcp__elems(item->ndim, sizes, &elems);
    if (elems == 0) {
        return dcp_sharded_create(l->ctx, item->dtype, item->ndim, extents, 0, NULL, NULL, out, err);
    }
    dcp_value *chunk;
    status = dcp_tensor_alloc(l->ctx, item->dtype, item->ndim, sizes, &chunk, err);
    if (status != DCP_OK) {
        return status;
    }
    l->out->chunks[l->out->n_chunks++] = chunk;
    for (int d = 0; d < item->ndim; d++) {
        from[d] = offsets[d] + (s ? s->box.offsets[d] : 0);
    }
    add_request(l, item, (dcp_box){from, sizes}, chunk);
    return dcp_sharded_create(l->ctx, item->dtype, item->ndim, extents, 1, dcp_value_tensor(chunk), &box, out, err);
}

static dcp_status load_item(loading *l, const dcp_item *item, dcp_value **out, dcp_error *err)
{
    int64_t elems = 0;
    if (item->kind == DCP_ITEM_OBJECT) {
        return dcp_read_object(l->ck, item, out, err);
    }
    dcp_status status = dcp__check_readable(l->ck, item, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__elems(item->ndim, item->extents, &elems);
    return item->ndim == 0 || elems == 1 ? whole_tensor(l, item, out, err) : row_tensor(l, item, out, err);
}

/* ---- the tree ---- */

static dcp_status collect(loading *l, const char *key, dcp_error *err)
{
    size_t n = dcp_checkpoint_count(l->ck);
    dcp_status status = DCP_OK;
    l->leaves = dcp__calloc(l->ctx, n, sizeof *l->leaves);
    l->requests = dcp__calloc(l->ctx, n, sizeof *l->requests);
    l->out->chunks = dcp__calloc(l->ctx, n, sizeof(dcp_value *));
    if (!l->leaves || !l->requests || !l->out->chunks) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        const dcp_item *item = dcp_checkpoint_item(l->ck, i);
        dcp_leaf leaf = {.fqn = item->fqn, .path = item->path, .path_len = item->path_len};
        if (item->rank < 0 && is_below(item->path, item->path_len, key)) {
            status = load_item(l, item, &leaf.value, err);
            if (status == DCP_OK) {
                l->leaves[l->n_leaves++] = leaf;
            }
        }
    }
    return status;
}

static dcp_status build(loading *l, dcp_error *err)
{
    size_t n;
    const dcp__container *containers = dcp__containers_of(l->ck, &n);
    dcp_status status = l->n_leaves ? dcp_unflatten(l->ctx, l->leaves, l->n_leaves, &l->out->state, err)
                                    : dcp_dict_create(l->ctx, &l->out->state, err);
    return status == DCP_OK ? dcp__restore_containers(l->out->state, containers, n, err) : status;
}

static dcp_status load(loading *l, const char *path, const char *key, dcp_error *err)
{
    dcp_status status = dcp_checkpoint_open(l->ctx, path, &l->opts->open, &l->ck, err);
    status = status == DCP_OK ? collect(l, key, err) : status;
    status = status == DCP_OK ? dcp_read_many(l->ck, l->requests, l->n_requests, err) : status;
    status = status == DCP_OK ? build(l, err) : status;
    for (size_t i = 0; i < l->n_leaves; i++) {
        dcp_value_free(l->leaves[i].value);
    }
    dcp__free(l->ctx, l->leaves);
    dcp__free(l->ctx, l->requests);
    dcp_checkpoint_close(l->ck);
    return status;
}

static dcp_status check_opts(const char *path, const char *key, const dcp_optimizer_opts *o, dcp_optimizer **out, dcp_error *err)
{
    if (!path || !key || !out || !o || o->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "optimizer: no path, key, options or place for the result, or options of another version");
    }
    int world = o->world ? o->world : 1;
    if (world < 1 || o->rank < 0 || o->rank >= world || (o->n_shards && !o->shards)) {
        return dcp__fail(err, DCP_ARG, "optimizer: rank %d of %d, or no shards", o->rank, world);
    }
    return DCP_OK;
}

dcp_status dcp_load_optimizer(dcp_context *ctx, const char *path, const char *key, const dcp_optimizer_opts *opts,
                              dcp_optimizer **out, dcp_error *err)
{
    dcp_status status = check_opts(path, key, opts, out, err);
    if (status != DCP_OK) {
        return status;
    }
    ctx = dcp__context(ctx);
    loading l = {.ctx = ctx, .opts = opts, .out = dcp__calloc(ctx, 1, sizeof *l.out)};
    dcp__step step = {ctx, opts->comm, "read", opts->failures};
    dcp__arena_init(&l.arena, ctx, UINT64_MAX);
    if (l.out) {
        l.out->ctx = ctx;
        status = load(&l, path, key, err);
    } else {
        status = dcp__nomem(err);
    }
    dcp__arena_reset(&l.arena);
    status = dcp__agree(&step, status, err);
    if (status != DCP_OK) {
        dcp_optimizer_free(l.out);
        return status;
    }
    *out = l.out;
    return DCP_OK;
}

dcp_value *dcp_optimizer_state(const dcp_optimizer *o)
{
    return o ? o->state : NULL;
}

void dcp_optimizer_free(dcp_optimizer *o)
{
    if (!o) {
        return;
    }
    dcp_value_free(o->state);
    for (size_t i = 0; i < o->n_chunks; i++) {
        dcp_value_free(o->chunks[i]);
    }
    dcp__free(o->ctx, o->chunks);
    dcp__free(o->ctx, o);
}

dcp_device dcp_device_for_rank(dcp_device_type type, int rank, int n_local)
{
    return (dcp_device){type, type == DCP_DEVICE_CPU || n_local < 1 || rank < 0 ? 0 : rank % n_local};
}
