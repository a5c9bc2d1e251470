#include "state/children.h"

#include "state/node.h"

static dcp_status create_alike(dcp_context *ctx, const dcp_value *v, dcp_value **out, dcp_error *err)
{
    dcp_kind kind = dcp_value_kind(v);
    return kind == DCP_KIND_DICT           ? dcp_dict_create(ctx, out, err)
           : kind == DCP_KIND_ORDERED_DICT ? dcp_ordered_dict_create(ctx, out, err)
                                           : dcp_seq_create(ctx, kind, out, err);
}

static dcp_status fill(dcp_value *copy, const dcp_value *v, dcp__child_fn fn, void *user, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < dcp_value_count(v) && status == DCP_OK; i++) {
        dcp_value *child;
        status = fn(user, dcp_value_at(v, i), &child, err);
        if (status == DCP_OK) {
            status = dcp__is_dict(v) ? dcp_dict_set(copy, dcp_dict_key(v, i), child, err) : dcp_list_append(copy, child, err);
            if (status != DCP_OK) {
                dcp_value_free(child);
            }
        }
    }
    return status;
}

static dcp_status map_container(dcp_context *ctx, const dcp_value *v, dcp__child_fn fn, void *user, dcp_value **out,
                                dcp_error *err)
{
    dcp_value *copy;
    dcp_status status = create_alike(ctx, v, &copy, err);
    if (status != DCP_OK) {
        return status;
    }
    status = fill(copy, v, fn, user, err);
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

static dcp_status map_opaque(dcp_context *ctx, const dcp_value *v, dcp__child_fn fn, void *user, dcp_value **out, dcp_error *err)
{
    dcp__opaque copy = *dcp__value_opaque(v);
    dcp_value **const parts[] = {&copy.callable, &copy.args, &copy.kwargs, &copy.state, &copy.items, &copy.pairs};
    const size_t n = sizeof parts / sizeof parts[0];
    dcp_status status = DCP_OK;
    size_t done = 0;
    while (done < n && status == DCP_OK) {
        status = *parts[done] ? fn(user, *parts[done], parts[done], err) : DCP_OK;
        done += status == DCP_OK;
    }
    status = status == DCP_OK ? dcp__opaque_create(ctx, &copy, out, err) : status;
    for (size_t i = 0; i < done && status != DCP_OK; i++) {
        dcp_value_free(*parts[i]);
    }
    return status;
}

dcp_status dcp__map_children(dcp_context *ctx, const dcp_value *v, dcp__child_fn fn, void *user, dcp_value **out, dcp_error *err)
{
    return dcp__is_kind(v, DCP_KIND_OPAQUE) ? map_opaque(ctx, v, fn, user, out, err) : map_container(ctx, v, fn, user, out, err);
}
