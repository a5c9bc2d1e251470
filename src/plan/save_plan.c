/* From a state to the list of what is to be written. */
#include "plan/save_plan.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#include "plan/coverage.h"
#include "state/strided.h"

/* ---- items ---- */

static dcp_status add_item(dcp_save_plan *p, dcp_write_item item, dcp_error *err)
{
    void *array = p->items;
    if (!dcp__grow(p->ctx, &array, &p->cap, p->n + 1, sizeof *p->items)) {
        return dcp__nomem(err);
    }
    p->items = array;
    p->items[p->n++] = item;
    return DCP_OK;
}

static dcp_write_item item_of(const dcp_leaf *leaf, dcp_item_kind kind)
{
    return (dcp_write_item){.fqn = leaf->fqn, .path = leaf->path, .path_len = leaf->path_len, .kind = kind};
}

static dcp_status set_bytes(dcp_write_item *item, dcp_error *err)
{
    int64_t elems;
    uint64_t bytes;
    size_t elem_bytes = dcp_dtype_bytes(item->dtype);
    if (elem_bytes == 0 || !dcp__elems(item->ndim, item->global_extents, &elems) ||
        !dcp__mul_u64((uint64_t)elems, elem_bytes, &bytes) || bytes > INT64_MAX) {
        return dcp__fail(err, elem_bytes ? DCP_LIMIT : DCP_ARG, "item \"%s\": %s", dcp__print(item->fqn).text,
                         elem_bytes ? "its size in bytes overflows" : "no such dtype");
    }
    dcp__elems(item->ndim, item->box.sizes, &elems); /* part of the above */
    item->bytes = (uint64_t)elems * elem_bytes;
    if (item->bytes && !item->tensor.data && !item->pull) {
        return dcp__fail(err, DCP_ARG, "item \"%s\": the tensor has no memory", dcp__print(item->fqn).text);
    }
    return DCP_OK;
}

static dcp_status add_tensor(dcp_save_plan *p, const dcp_leaf *leaf, dcp_error *err)
{
    const dcp_tensor *t = dcp_value_tensor(leaf->value);
    dcp_write_item item = item_of(leaf, DCP_ITEM_TENSOR);
    int64_t *zeros = dcp__arena_alloc(&p->arena, (size_t)t->ndim * sizeof *zeros);
    if (!zeros) {
        return dcp__nomem(err);
    }
    memset(zeros, 0, (size_t)t->ndim * sizeof *zeros);
    item.dtype = t->dtype;
    item.ndim = t->ndim;
    item.global_extents = t->extents;
    item.box = (dcp_box){zeros, t->extents};
    item.tensor = *t;
    dcp_status status = set_bytes(&item, err);
    return status == DCP_OK ? add_item(p, item, err) : status;
}

/* Chunks of one process must not overlap; whether all processes together leave gaps is a matter of the global plan. */
static dcp_status check_chunks(dcp_save_plan *p, const dcp_leaf *leaf, int ndim, const int64_t *extents, dcp_error *err)
{
    size_t n = dcp_value_count(leaf->value);
    dcp_box *boxes = dcp__alloc(p->ctx, n * sizeof *boxes);
    dcp__tiling tiling;
    if (!boxes) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        dcp_tensor unused;
        dcp_sharded_chunk(leaf->value, i, &unused, &boxes[i]);
    }
    dcp_status status = dcp__check_tiling(p->ctx, ndim, extents, boxes, n, &tiling, err);
    dcp__free(p->ctx, boxes);
    if (status == DCP_OK && tiling.fault == DCP__TILING_OVERLAP) {
        status = dcp__fail(err, DCP_ARG, "item \"%s\": its chunks %zu and %zu overlap", dcp__print(leaf->fqn).text, tiling.a,
                           tiling.b);
    }
    return status;
}

dcp_status dcp__save_plan_add_absent(dcp_save_plan *p, const dcp_write_item *item, dcp_error *err)
{
    void *array = p->absent;
    if (!dcp__grow(p->ctx, &array, &p->cap_absent, p->n_absent + 1, sizeof *p->absent)) {
        return dcp__nomem(err);
    }
    p->absent = array;
    p->absent[p->n_absent++] = (dcp__absent){*item, p->n};
    return DCP_OK;
}

/* A tensor without elements has one chunk, at 0, whatever its chunks are; all ranks hold it. */
static dcp_status add_empty(dcp_save_plan *p, dcp_write_item *item, dcp_error *err)
{
    int64_t *zeros = dcp__arena_alloc(&p->arena, (size_t)item->ndim * sizeof *zeros);
    if (!zeros) {
        return dcp__nomem(err);
    }
    memset(zeros, 0, (size_t)item->ndim * sizeof *zeros);
    item->box = (dcp_box){zeros, item->global_extents};
    item->tensor = dcp_tensor_make(item->dtype, item->ndim, item->global_extents, NULL);
    dcp_status status = set_bytes(item, err);
    return status == DCP_OK ? add_item(p, *item, err) : status;
}

static dcp_status add_sharded(dcp_save_plan *p, const dcp_leaf *leaf, dcp_error *err)
{
    dcp_write_item item = item_of(leaf, DCP_ITEM_TENSOR);
    item.dtype = dcp_value_dtype(leaf->value);
    dcp_sharded_shape(leaf->value, &item.ndim, &item.global_extents);
    int64_t elems = 0;
    dcp__elems(item.ndim, item.global_extents, &elems);
    size_t n = dcp_value_count(leaf->value), n_before = p->n;
    dcp_status status = check_chunks(p, leaf, item.ndim, item.global_extents, err);
    if (status == DCP_OK && elems == 0) {
        return add_empty(p, &item, err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        dcp_sharded_chunk(leaf->value, i, &item.tensor, &item.box);
        status = set_bytes(&item, err);
        if (status == DCP_OK && item.bytes) {
            status = add_item(p, item, err);
        }
    }
    return status == DCP_OK && p->n == n_before ? dcp__save_plan_add_absent(p, &item, err) : status;
}

static dcp_status add_leaf(dcp_save_plan *p, const dcp_leaf *leaf, dcp_error *err)
{
    switch (dcp_value_kind(leaf->value)) {
    case DCP_KIND_TENSOR: return add_tensor(p, leaf, err);
    case DCP_KIND_SHARDED: return add_sharded(p, leaf, err);
    default: break;
    }
    dcp_write_item item = item_of(leaf, DCP_ITEM_OBJECT);
    item.object = leaf->value;
    return add_item(p, item, err);
}

/* ---- the plan ---- */

dcp_status dcp__save_plan_add_containers(dcp_save_plan *p, const dcp__container *containers, size_t n, dcp_error *err)
{
    void *array = p->containers;
    if (!dcp__grow(p->ctx, &array, &p->cap_containers, p->n_containers + n, sizeof *p->containers)) {
        return dcp__nomem(err);
    }
    p->containers = array;
    if (n) {
        memcpy(p->containers + p->n_containers, containers, n * sizeof *containers);
    }
    p->n_containers += n;
    return DCP_OK;
}

dcp_status dcp__save_plan_name(dcp_save_plan *p, dcp_str fqn, const dcp_key *path, size_t path_len, int rank,
                               dcp_write_item *item, dcp_error *err)
{
    char prefix[24];
    item->fqn = fqn;
    item->path = path;
    item->path_len = path_len;
    if (rank < 0) {
        return DCP_OK;
    }
    size_t len = (size_t)snprintf(prefix, sizeof prefix, "rank.%d.", rank);
    char *name = dcp__arena_alloc(&p->arena, len + fqn.len + 1);
    dcp_key *longer = dcp__arena_alloc(&p->arena, (path_len + 2) * sizeof *longer);
    dcp_str digits = dcp__arena_str(&p->arena, (dcp_str){prefix + 5, len - 6});
    if (!name || !longer || !digits.ptr) {
        return dcp__nomem(err);
    }
    memcpy(name, prefix, len);
    memcpy(name + len, fqn.ptr, fqn.len + 1);
    longer[0] = dcp_key_str("rank");
    longer[1] = (dcp_key){.string = digits};
    if (path_len) {
        memcpy(longer + 2, path, path_len * sizeof *path);
    }
    item->fqn = (dcp_str){name, len + fqn.len};
    item->path = longer;
    item->path_len = path_len + 2;
    return DCP_OK;
}

/* What each rank has for itself; its name gets the rank's number where the plans of all ranks meet. */
static void mark_per_rank(dcp_save_plan *p, const dcp_save_opts *o)
{
    for (size_t i = 0; o && o->comm && i < p->n; i++) {
        for (size_t k = 0; k < o->n_per_rank; k++) {
            p->items[i].per_rank |= fnmatch(o->per_rank[k], p->items[i].fqn.ptr, 0) == 0;
        }
    }
}

static dcp_status fill(dcp_save_plan *p, dcp_value *state, dcp_error *err)
{
    dcp_status status = dcp_flatten(p->ctx, state, DCP_FLATTEN_2_4, &p->flat, err);
    size_t n = status == DCP_OK ? dcp_flat_count(p->flat) : 0;
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = add_leaf(p, dcp_flat_leaf(p->flat, i), err);
    }
    if (status != DCP_OK) {
        return status;
    }
    size_t n_containers;
    const dcp__container *containers = dcp__flat_containers(p->flat, &n_containers);
    return dcp__save_plan_add_containers(p, containers, n_containers, err);
}

dcp_status dcp__save_plan_create(dcp_context *ctx, dcp_save_plan **out, dcp_error *err)
{
    dcp_save_plan *p = dcp__calloc(ctx, 1, sizeof *p);
    if (!p) {
        return dcp__nomem(err);
    }
    p->ctx = ctx;
    dcp__arena_init(&p->arena, ctx, UINT64_MAX);
    *out = p;
    return DCP_OK;
}

dcp_status dcp__save_plan_hold(dcp_save_plan *p, dcp_value *v, dcp_error *err)
{
    void *array = p->values;
    if (!dcp__grow(p->ctx, &array, &p->cap_values, p->n_values + 1, sizeof(dcp_value *))) {
        dcp_value_free(v);
        return dcp__nomem(err);
    }
    p->values = array;
    p->values[p->n_values++] = v;
    return DCP_OK;
}

dcp_status dcp__plan_save_of_rank(dcp_context *ctx, dcp_value *state, const dcp_save_opts *opts, dcp_save_plan **out,
                                  dcp_error *err)
{
    dcp_save_plan *p = NULL;
    bool is_known = opts && opts->struct_size == sizeof *opts; /* else the next step refuses them */
    if (!state || !out) {
        return dcp__fail(err, DCP_ARG, "save: no %s", state ? "place for the plan" : "state");
    }
    dcp_status status = dcp__save_plan_create(dcp__context(ctx), &p, err);
    if (status != DCP_OK) {
        return status;
    }
    status = fill(p, state, err);
    if (status != DCP_OK) {
        dcp_save_plan_free(p);
        return status;
    }
    mark_per_rank(p, is_known ? opts : NULL);
    *out = p;
    return DCP_OK;
}

dcp_status dcp_plan_save(dcp_context *ctx, dcp_value *state, dcp_save_plan **out, dcp_error *err)
{
    return dcp__plan_save_of_rank(ctx, state, NULL, out, err);
}

void dcp_save_plan_free(dcp_save_plan *p)
{
    if (p) {
        dcp_flat_free(p->flat);
        for (size_t i = 0; i < p->n_values; i++) {
            dcp_value_free(p->values[i]);
        }
        dcp__free(p->ctx, p->values);
        dcp__free(p->ctx, p->items);
        dcp__free(p->ctx, p->absent);
        dcp__free(p->ctx, p->containers);
        dcp__arena_reset(&p->arena);
        dcp__free(p->ctx, p);
    }
}

size_t dcp_save_plan_count(const dcp_save_plan *p)
{
    return p ? p->n : 0;
}

const dcp_write_item *dcp_save_plan_item(const dcp_save_plan *p, size_t i)
{
    return i < dcp_save_plan_count(p) ? &p->items[i] : NULL;
}

/* What is wrong with an item that a caller made, NULL: nothing. */
static const char *fault_of(const dcp_write_item *item)
{
    const dcp_tensor *t = &item->tensor;
    if (!item->fqn.ptr || (item->path_len && !item->path)) {
        return "no name or path";
    }
    if (item->kind == DCP_ITEM_OBJECT) {
        return item->object ? NULL : "no object";
    }
    if (item->kind != DCP_ITEM_TENSOR || item->ndim < 0 || item->ndim > DCP_MAX_NDIM) {
        return item->kind == DCP_ITEM_TENSOR ? "too many dimensions" : "no such kind";
    }
    if (item->ndim && (!item->global_extents || !item->box.offsets || !item->box.sizes)) {
        return "no shape";
    }
    for (int d = 0; d < item->ndim; d++) {
        int64_t extent = item->global_extents[d], offset = item->box.offsets[d], size = item->box.sizes[d];
        if (extent < 0 || offset < 0 || size < 0 || offset > extent || size > extent - offset) {
            return "its part is not within the tensor";
        }
        if (t->data && (t->ndim != item->ndim || !t->extents || t->extents[d] != size)) {
            return "the memory has another shape";
        }
    }
    return t->data && t->dtype != item->dtype ? "the memory has another dtype" : NULL;
}

dcp_status dcp_save_plan_add(dcp_save_plan *p, const dcp_write_item *item, dcp_error *err)
{
    if (!p || !item) {
        return dcp__fail(err, DCP_ARG, "save: no %s", p ? "item" : "plan");
    }
    const char *fault = fault_of(item);
    if (fault) {
        dcp_str name = item->fqn.ptr ? item->fqn : dcp_str_of("");
        return dcp__fail(err, DCP_ARG, "item \"%s\": %s", dcp__print(name).text, fault);
    }
    dcp_write_item copy = *item;
    copy.bytes = 0;
    dcp_status status = item->kind == DCP_ITEM_TENSOR ? set_bytes(&copy, err) : DCP_OK;
    return status == DCP_OK ? add_item(p, copy, err) : status;
}

void dcp_save_plan_remove(dcp_save_plan *p, size_t i)
{
    if (i < dcp_save_plan_count(p)) {
        memmove(&p->items[i], &p->items[i + 1], (p->n - i - 1) * sizeof *p->items);
        p->n--;
        for (size_t a = 0; a < p->n_absent; a++) {
            p->absent[a].before -= p->absent[a].before > i;
        }
    }
}
