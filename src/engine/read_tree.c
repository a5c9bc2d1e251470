/* The whole checkpoint as one tree. */
#include <stdio.h>
#include <string.h>

#include "engine/engine.h"
#include "state/value.h"

typedef struct tree {
    dcp_checkpoint *ck;
    dcp__arena arena; /* paths of values of single ranks */
    dcp_leaf *leaves;
    dcp_read_request *requests;
    size_t n_leaves, n_requests;
} tree;

/* ("rank", "3", rest...) */
static dcp_status rank_path(tree *t, const dcp_item *item, dcp_leaf *leaf, dcp_error *err)
{
    char text[16];
    dcp_key *path = dcp__arena_alloc(&t->arena, (item->path_len + 2) * sizeof *path);
    snprintf(text, sizeof text, "%d", item->rank);
    dcp_str rank = dcp__arena_str(&t->arena, dcp_str_of(text));
    if (!path || !rank.ptr) {
        return dcp__arena_fail(&t->arena, err);
    }
    path[0] = dcp_key_str("rank");
    path[1] = (dcp_key){.string = rank};
    memcpy(path + 2, item->path, item->path_len * sizeof *path);
    leaf->path = path;
    leaf->path_len = item->path_len + 2;
    return DCP_OK;
}

static dcp_status tensor_leaf(tree *t, const dcp_item *item, bool with_data, dcp_value **out, dcp_error *err)
{
    if (!with_data) {
        static const dcp__lazy unread = {.storage = -1};
        dcp_tensor shape = dcp_tensor_make(item->dtype, item->ndim, item->extents, NULL);
        return dcp__lazy_tensor_create(t->ck->ctx, &shape, &unread, out, err);
    }
    dcp_status status = dcp_tensor_alloc(t->ck->ctx, item->dtype, item->ndim, item->extents, out, err);
    if (status == DCP_OK) {
        t->requests[t->n_requests++] = (dcp_read_request){.item = item, .dst = *dcp_value_tensor(*out)};
    }
    return status;
}

static dcp_status add_leaf(tree *t, const dcp_item *item, bool with_data, dcp_error *err)
{
    dcp_leaf leaf = {.fqn = item->fqn, .path = item->path, .path_len = item->path_len};
    dcp_status status = item->rank >= 0 ? rank_path(t, item, &leaf, err) : DCP_OK;
    if (status == DCP_OK) {
        status = item->kind == DCP_ITEM_TENSOR ? tensor_leaf(t, item, with_data, &leaf.value, err)
                                               : dcp_read_object(t->ck, item, &leaf.value, err);
    }
    if (status == DCP_OK) {
        t->leaves[t->n_leaves++] = leaf;
    }
    return status;
}

static dcp_status build(tree *t, bool with_data, dcp_value **out, dcp_error *err)
{
    size_t n = t->ck->meta->n_entries;
    t->leaves = dcp__alloc(t->ck->ctx, n * sizeof *t->leaves);
    t->requests = dcp__alloc(t->ck->ctx, n * sizeof *t->requests);
    dcp_status status = t->leaves && t->requests ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = add_leaf(t, &t->ck->meta->entries[i].item, with_data, err);
    }
    status = status == DCP_OK ? dcp_read_many(t->ck, t->requests, t->n_requests, err) : status;
    return status == DCP_OK ? dcp_unflatten(t->ck->ctx, t->leaves, t->n_leaves, out, err) : status;
}

dcp_status dcp_read_tree(dcp_checkpoint *ck, bool with_data, dcp_value **out, dcp_error *err)
{
    if (!ck || !out) {
        return dcp__fail(err, DCP_ARG, "read: no %s", ck ? "place for the result" : "checkpoint");
    }
    tree t = {.ck = ck};
    dcp__arena_init(&t.arena, ck->ctx, UINT64_MAX);
    dcp_status status = build(&t, with_data, out, err);
    for (size_t i = 0; i < t.n_leaves; i++) {
        dcp_value_free(t.leaves[i].value);
    }
    dcp__free(ck->ctx, t.leaves);
    dcp__free(ck->ctx, t.requests);
    dcp__arena_reset(&t.arena);
    return status;
}
