#include "state/clone.h"

#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/strmap.h"
#include "state/children.h"
#include "state/node.h"

typedef struct cloner {
    dcp_context *ctx;
    dcp__clone_memory_fn fn;
    void *user;
    dcp__arena keys;  /* addresses of originals, keys of `done` */
    dcp__strmap done; /* address of an original that may stand in several places -> address of its copy */
} cloner;

static dcp_status clone(cloner *c, dcp_value *v, uint32_t depth, dcp_value **out, dcp_error *err);

/* ---- tensors ---- */

static dcp_status offer(cloner *c, dcp_tensor *t, dcp_error *err)
{
    return t->data ? c->fn(c->user, t, err) : DCP_OK;
}

static dcp_status clone_tensor(cloner *c, const dcp_value *v, dcp_value **out, dcp_error *err)
{
    const dcp_tensor *t = dcp_value_tensor(v);
    const dcp__lazy *lazy = dcp__value_lazy(v);
    if (lazy && !t->data) {
        return dcp__lazy_tensor_create(c->ctx, t, lazy, out, err);
    }
    dcp_value *copy;
    dcp_status status = dcp_tensor_create(c->ctx, t, &copy, err);
    if (status != DCP_OK) {
        return status;
    }
    status = offer(c, &((dcp__tensor_node *)copy)->tensor, err);
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

static dcp_status clone_sharded(cloner *c, const dcp_value *v, dcp_value **out, dcp_error *err)
{
    const dcp__sharded_node *n = (const dcp__sharded_node *)v;
    dcp_box *boxes = dcp__alloc(c->ctx, n->n_chunks * sizeof *boxes);
    dcp_value *copy = NULL;
    if (!boxes) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n->n_chunks; i++) {
        boxes[i] = (dcp_box){n->offsets + i * (size_t)n->ndim, n->chunks[i].extents};
    }
    dcp_status status = dcp_sharded_create(c->ctx, n->dtype, n->ndim, n->extents, n->n_chunks, n->chunks, boxes, &copy, err);
    dcp__free(c->ctx, boxes);
    for (size_t i = 0; i < n->n_chunks && status == DCP_OK; i++) {
        /* The chunks lie in the copy's own block. */
        status = offer(c, (dcp_tensor *)&((dcp__sharded_node *)copy)->chunks[i], err);
    }
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

/* A finished record borrows its bytes; the copy has them in its own block. */
static dcp_status clone_record(cloner *c, const dcp_value *v, dcp_value **out, dcp_error *err)
{
    dcp_str bytes = dcp_value_str(v);
    size_t total;
    dcp__record_node *n = dcp__add_size(bytes.len, sizeof *n, &total) ? dcp__node_alloc(c->ctx, DCP_KIND_RECORD, total) : NULL;
    if (!n) {
        return dcp__nomem(err);
    }
    n->bytes = (dcp_str){(char *)(n + 1), bytes.len};
    if (bytes.len) {
        memcpy(n + 1, bytes.ptr, bytes.len);
    }
    *out = &n->head;
    return DCP_OK;
}

/* ---- all ---- */

/* What the children of a value are cloned with. */
typedef struct below {
    cloner *c;
    uint32_t depth;
} below;

static dcp_status clone_child(void *user, dcp_value *child, dcp_value **out, dcp_error *err)
{
    const below *b = user;
    return clone(b->c, child, b->depth, out, err);
}

static dcp_status clone_node(cloner *c, dcp_value *v, uint32_t depth, dcp_value **out, dcp_error *err)
{
    if (dcp__is_kind(v, DCP_KIND_TENSOR)) {
        return clone_tensor(c, v, out, err);
    }
    if (dcp__is_kind(v, DCP_KIND_SHARDED)) {
        return clone_sharded(c, v, out, err);
    }
    if (dcp__is_kind(v, DCP_KIND_RECORD)) {
        return clone_record(c, v, out, err);
    }
    return dcp__map_children(c->ctx, v, clone_child, &(below){c, depth + 1}, out, err);
}

static bool may_change(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_TENSOR) || dcp__is_kind(v, DCP_KIND_SHARDED) || dcp__is_kind(v, DCP_KIND_OPAQUE) ||
           dcp__is_kind(v, DCP_KIND_RECORD) || dcp__is_seq(v) || dcp__is_dict(v);
}

static dcp_str key_of(const dcp_value *const *v)
{
    return (dcp_str){(const char *)v, sizeof *v};
}

static dcp_status remember(cloner *c, const dcp_value *v, const dcp_value *copy, dcp_error *err)
{
    const dcp_value **kept = dcp__arena_alloc(&c->keys, sizeof *kept);
    if (!kept) {
        return dcp__nomem(err);
    }
    *kept = v;
    return dcp__strmap_add(&c->done, key_of(kept), (uint64_t)(uintptr_t)copy, NULL, err);
}

static dcp_status clone(cloner *c, dcp_value *v, uint32_t depth, dcp_value **out, dcp_error *err)
{
    uint64_t done;
    const dcp_value *const key = v;
    if (!may_change(v)) {
        *out = dcp_value_retain(v);
        return DCP_OK;
    }
    if (depth > dcp__depth_limit(c->ctx)) {
        return dcp__fail(err, DCP_LIMIT, "the state is nested deeper than %u", dcp__depth_limit(c->ctx));
    }
    bool is_shared = __atomic_load_n(&v->refs, __ATOMIC_RELAXED) > 1;
    if (is_shared && dcp__strmap_get(&c->done, key_of(&key), &done)) {
        *out = dcp_value_retain((dcp_value *)(uintptr_t)done);
        return DCP_OK;
    }
    dcp_value *copy;
    dcp_status status = clone_node(c, v, depth, &copy, err);
    if (status == DCP_OK && is_shared) {
        status = remember(c, v, copy, err);
        if (status != DCP_OK) {
            dcp_value_free(copy);
        }
    }
    if (status == DCP_OK) {
        *out = copy;
    }
    return status;
}

dcp_status dcp__value_clone(dcp_context *ctx, dcp_value *v, dcp__clone_memory_fn fn, void *user, dcp_value **out, dcp_error *err)
{
    cloner c = {.ctx = ctx, .fn = fn, .user = user};
    dcp__arena_init(&c.keys, ctx, UINT64_MAX);
    dcp__strmap_init(&c.done, ctx);
    dcp_status status = clone(&c, v, 0, out, err);
    dcp__strmap_reset(&c.done);
    dcp__arena_reset(&c.keys);
    return status;
}
