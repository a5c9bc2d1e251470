/* The whole checkpoint as one tree. */
#include <stdio.h>
#include <string.h>

#include "engine/read/checkpoint.h"
#include "state/containers.h"
#include "state/value.h"

typedef struct tree {
    dcp_checkpoint *ck;
    dcp__arena arena; /* paths of values of single ranks */
    dcp_leaf *leaves;
    dcp_read_request *requests;
    size_t n_leaves, n_requests;
    size_t next_container; /* of our own facts */
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
    dcp_status status = dcp__check_readable(t->ck, item, err);
    status = status == DCP_OK ? dcp_tensor_alloc(t->ck->ctx, item->dtype, item->ndim, item->extents, out, err) : status;
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

/* Leaves for the dicts that had no element when they were saved and stood before leaf `n`. */
static dcp_status add_empty_dicts(tree *t, size_t n, dcp_error *err)
{
    const dcp__own_facts *own = &t->ck->meta->own;
    dcp_status status = DCP_OK;
    for (; t->next_container < own->n_containers && status == DCP_OK; t->next_container++) {
        const dcp__container *c = &own->containers[t->next_container];
        dcp_leaf leaf = {.path = c->path, .path_len = c->path_len};
        if (c->before > n) {
            break; /* they are in order, but for files of others, whose dicts come at the end */
        }
        if (c->path_len == 0 || c->kind.len != 4 || memcmp(c->kind.ptr, "dict", 4) != 0) {
            continue;
        }
        status = dcp_dict_create(t->ck->ctx, &leaf.value, err);
        if (status == DCP_OK) {
            t->leaves[t->n_leaves++] = leaf;
        }
    }
    return status;
}

/* below: only items whose names go on from this one; ptr NULL: all. */
static bool is_below(const dcp_item *item, dcp_str name)
{
    return !name.ptr ||
           (item->fqn.len > name.len && item->fqn.ptr[name.len] == '.' && memcmp(item->fqn.ptr, name.ptr, name.len) == 0);
}

static dcp_status build(tree *t, dcp_str below, bool with_data, dcp_value **out, dcp_error *err)
{
    size_t n = t->ck->meta->n_entries;
    t->leaves = dcp__alloc(t->ck->ctx, (n + t->ck->meta->own.n_containers) * sizeof *t->leaves);
    t->requests = dcp__alloc(t->ck->ctx, n * sizeof *t->requests);
    dcp_status status = t->leaves && t->requests ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        const dcp_item *item = &t->ck->meta->entries[i].item;
        status = below.ptr ? DCP_OK : add_empty_dicts(t, i, err);
        status = status == DCP_OK && is_below(item, below) ? add_leaf(t, item, with_data, err) : status;
    }
    status = status == DCP_OK && !below.ptr ? add_empty_dicts(t, SIZE_MAX, err) : status;
    status = status == DCP_OK ? dcp_read_many(t->ck, t->requests, t->n_requests, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    dcp_value *root;
    status = dcp_unflatten(t->ck->ctx, t->leaves, t->n_leaves, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    const dcp__own_facts *own = &t->ck->meta->own;
    status = dcp__restore_containers(root, own->containers, own->n_containers, err);
    if (status != DCP_OK) {
        dcp_value_free(root);
        return status;
    }
    *out = root;
    return DCP_OK;
}

static dcp_status read_tree(dcp_checkpoint *ck, dcp_str below, bool with_data, dcp_value **out, dcp_error *err)
{
    tree t = {.ck = ck};
    dcp__arena_init(&t.arena, ck->ctx, UINT64_MAX);
    dcp_status status = build(&t, below, with_data, out, err);
    for (size_t i = 0; i < t.n_leaves; i++) {
        dcp_value_free(t.leaves[i].value);
    }
    dcp__free(ck->ctx, t.leaves);
    dcp__free(ck->ctx, t.requests);
    dcp__arena_reset(&t.arena);
    return status;
}

dcp_status dcp_read_tree(dcp_checkpoint *ck, bool with_data, dcp_value **out, dcp_error *err)
{
    if (!ck || !out) {
        return dcp__fail(err, DCP_ARG, "read: no %s", ck ? "place for the result" : "checkpoint");
    }
    return read_tree(ck, (dcp_str){NULL, 0}, with_data, out, err);
}

/* Paths have at least as many parts as the name has dots; where the name ends in one of them is found by adding them up. */
static dcp_value *descend(dcp_value *root, const dcp_item *item, dcp_str name)
{
    dcp_value *at = root;
    size_t len = 0;
    for (size_t i = 0; at && i < item->path_len && len < name.len; i++) {
        char digits[24];
        dcp_key key = item->path[i];
        len += (i > 0) + (key.is_int ? (size_t)snprintf(digits, sizeof digits, "%lld", (long long)key.integer) : key.string.len);
        at = key.is_int ? dcp_value_at(at, (size_t)key.integer) : dcp_dict_get(at, dcp__stored_key(at, key));
    }
    return len == name.len ? at : NULL;
}

dcp_status dcp__read_subtree(dcp_checkpoint *ck, dcp_str name, dcp_value **out, dcp_error *err)
{
    dcp_value *root, *found = NULL;
    dcp_status status = read_tree(ck, name, true, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < ck->meta->n_entries && !found; i++) {
        const dcp_item *item = &ck->meta->entries[i].item;
        found = is_below(item, name) ? descend(root, item, name) : NULL;
    }
    if (found) {
        *out = dcp_value_retain(found);
    } else {
        status = dcp__fail(err, DCP_MISMATCH, "items below \"%s\" do not form one value", dcp__print(name).text);
    }
    dcp_value_free(root);
    return status;
}
