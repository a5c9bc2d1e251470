/* Trees from flattened paths. Paths may come from a file: lists cannot be made to grow far beyond the number of leaves. */
#include "state/node.h"

typedef struct builder {
    dcp_context *ctx;
    dcp_value *root;
    dcp_value **made; /* containers, borrowed; to be finished at the end */
    size_t n_made, cap_made;
    uint64_t slots_left; /* list elements that may still be added */
    dcp_error *err;
} builder;

static dcp_status mismatch(builder *b, const dcp_leaf *leaf, size_t depth, const char *what)
{
    return dcp__fail(b->err, DCP_MISMATCH, "%s: at item %zu of its path is %s", dcp__print(leaf->fqn).text, depth, what);
}

/* Makes the container under path[depth]: its kind is told by the next item. */
static dcp_status make_container(builder *b, bool is_list, dcp_value **out)
{
    void *made = b->made;
    bool ok = dcp__grow(b->ctx, &made, &b->cap_made, b->n_made + 1, sizeof *b->made);
    b->made = made;
    if (!ok) {
        return dcp__nomem(b->err);
    }
    dcp_value *v;
    dcp_status status = is_list ? dcp_list_create(b->ctx, &v, b->err) : dcp_dict_create(b->ctx, &v, b->err);
    if (status == DCP_OK) {
        v->is_building = true;
        b->made[b->n_made++] = v;
        *out = v;
    }
    return status;
}

/* Lets a list reach up to an index; new elements are NULL until the end. */
static dcp_status extend(builder *b, dcp__seq *s, const dcp_leaf *leaf, int64_t index)
{
    if (index < 0 || (uint64_t)index > b->ctx->limits.max_list_index) {
        return dcp__fail(b->err, DCP_LIMIT, "%s: list index %lld is not within 0 to %llu", dcp__print(leaf->fqn).text,
                         (long long)index, (unsigned long long)b->ctx->limits.max_list_index);
    }
    if ((size_t)index < s->count) {
        return DCP_OK;
    }
    uint64_t added = (uint64_t)index + 1 - s->count;
    if (added > b->slots_left) {
        return dcp__fail(b->err, DCP_LIMIT, "%s: lists have more than %llu elements without a value", dcp__print(leaf->fqn).text,
                         (unsigned long long)b->ctx->limits.max_list_index);
    }
    void *items = s->items;
    bool ok = dcp__grow(b->ctx, &items, &s->base.link.cap, (size_t)index + 1, sizeof *s->items);
    s->items = items;
    if (!ok) {
        return dcp__nomem(b->err);
    }
    b->slots_left -= added;
    while (s->count <= (size_t)index) {
        s->items[s->count++] = NULL;
    }
    return DCP_OK;
}

/* What stands under a key of a container; NULL if nothing does. A list is extended. */
static dcp_status look(builder *b, dcp_value *container, const dcp_leaf *leaf, size_t depth, dcp_value **out)
{
    dcp_key key = leaf->path[depth];
    if (dcp__is_dict(container)) {
        *out = dcp_dict_get(container, key);
        return DCP_OK;
    }
    dcp__seq *s = (dcp__seq *)container;
    dcp_status status = extend(b, s, leaf, key.integer);
    if (status == DCP_OK) {
        *out = s->items[key.integer];
    }
    return status;
}

/* Puts a value where nothing was. Takes over the reference on success. */
static dcp_status put(builder *b, dcp_value *container, dcp_key key, dcp_value *v)
{
    if (dcp__is_dict(container)) {
        return dcp_dict_set(container, key, v, b->err);
    }
    ((dcp__seq *)container)->items[key.integer] = v;
    return DCP_OK;
}

/* The container that the path goes through at path[depth]; made if it is new. */
static dcp_status step(builder *b, dcp_value *container, const dcp_leaf *leaf, size_t depth, dcp_value **out)
{
    bool is_list = leaf->path[depth + 1].is_int;
    dcp_value *next = NULL;
    dcp_status status = look(b, container, leaf, depth, &next);
    if (status != DCP_OK) {
        return status;
    }
    if (!next) {
        status = make_container(b, is_list, &next);
        if (status == DCP_OK) {
            status = put(b, container, leaf->path[depth], next);
            if (status != DCP_OK) {
                b->n_made--;
                dcp_value_free(next);
            }
        }
    } else if (!next->is_building) {
        status = mismatch(b, leaf, depth, "a value");
    } else if (is_list != (next->kind == DCP_KIND_LIST)) {
        status = mismatch(b, leaf, depth, is_list ? "a dict, not a list" : "a list, not a dict");
    }
    *out = next;
    return status;
}

static dcp_status place(builder *b, const dcp_leaf *leaf)
{
    if (!leaf->path_len || !leaf->path || !leaf->value) {
        return dcp__fail(b->err, DCP_ARG, "%s: no path or no value", dcp__print(leaf->fqn).text);
    }
    if (leaf->path_len > dcp__depth_limit(b->ctx)) {
        return dcp__fail(b->err, DCP_LIMIT, "%s: path of %zu items is deeper than %u", dcp__print(leaf->fqn).text, leaf->path_len,
                         dcp__depth_limit(b->ctx));
    }
    dcp_value *container = b->root, *there = NULL;
    size_t last = leaf->path_len - 1;
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < last; i++) {
        status = step(b, container, leaf, i, &container);
    }
    status = status == DCP_OK ? look(b, container, leaf, last, &there) : status;
    if (status != DCP_OK) {
        return status;
    }
    if (there) {
        return mismatch(b, leaf, last, there->is_building ? "a container" : "another value");
    }
    status = put(b, container, leaf->path[last], dcp_value_retain(leaf->value));
    if (status != DCP_OK) {
        dcp_value_free(leaf->value);
    }
    return status;
}

/* Puts None where lists have gaps, one for all. */
static dcp_status finish(builder *b)
{
    dcp_value *none = NULL;
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < b->n_made && status == DCP_OK; i++) {
        b->made[i]->is_building = false;
        dcp__seq *s = (dcp__seq *)b->made[i];
        for (size_t j = 0; dcp__is_seq(b->made[i]) && j < s->count && status == DCP_OK; j++) {
            if (s->items[j]) {
                continue;
            }
            status = none ? DCP_OK : dcp_none_create(b->ctx, &none, b->err);
            s->items[j] = status == DCP_OK ? dcp_value_retain(none) : NULL;
        }
    }
    dcp_value_free(none);
    return status;
}

dcp_status dcp_unflatten(dcp_context *ctx, const dcp_leaf *leaves, size_t n, dcp_value **out, dcp_error *err)
{
    if (n && !leaves) {
        return dcp__fail(err, DCP_ARG, "unflatten: %zu leaves at no address", n);
    }
    builder b = {.ctx = dcp__context(ctx), .err = err};
    b.slots_left = b.ctx->limits.max_list_index;
    for (size_t i = 0; i < n; i++) {
        b.slots_left += leaves[i].path_len;
    }
    dcp_status status = make_container(&b, false, &b.root);
    for (size_t i = 0; status == DCP_OK && i < n; i++) {
        status = place(&b, &leaves[i]);
    }
    status = status == DCP_OK ? finish(&b) : status;
    dcp__free(b.ctx, b.made);
    if (status != DCP_OK) {
        dcp_value_free(b.root);
        return status;
    }
    *out = b.root;
    return DCP_OK;
}
