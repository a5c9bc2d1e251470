/* Depth and cycles of a graph that a pickle made. Every node is entered once, on a stack of our own that is as deep as the limit.
 */
#include "format/pickle_machine.h"

typedef struct frame {
    dcp__pnode *node;
    size_t next; /* child to look at */
} frame;

/* What stands below a node: child i, 0 if it is absent. False: there is no child i. */
static bool child(const dcp__pnode *node, size_t i, dcp__pv *out)
{
    if (node->kind == DCP__P_OBJECT) {
        const dcp__pobject *o = (const dcp__pobject *)node;
        const dcp__pv parts[] = {o->callable, o->args, o->kwargs, o->state, o->items, o->pairs};
        *out = i < 6 ? parts[i] : 0;
        return i < 6;
    }
    size_t n;
    const dcp__pv *items = dcp__pv_items(dcp__pv_of_node(node), &n);
    *out = i < n ? items[i] : 0;
    return i < n;
}

static bool is_inner(dcp__pv v)
{
    if (!v || !dcp__pv_is_node(v)) {
        return false;
    }
    dcp__pkind kind = dcp__pv_kind(v);
    return (kind >= DCP__P_TUPLE && kind <= DCP__P_DICT) || kind == DCP__P_OBJECT;
}

static void raise_height(dcp__pnode *node, unsigned height)
{
    node->height = node->height < height ? (uint16_t)height : node->height;
}

/* Heights count from 1 for a node without inner nodes below it. */
static dcp_status walk(frame *stack, size_t max_depth, uint64_t at, dcp_error *err)
{
    size_t depth = 1;
    while (depth > 0) {
        frame *f = &stack[depth - 1];
        dcp__pv v;
        if (!child(f->node, f->next, &v)) {
            unsigned height = f->node->height;
            f->node->flags &= (uint8_t)~DCP__P_VISITING;
            depth--;
            if (depth > 0) {
                raise_height(stack[depth - 1].node, height + 1);
            }
            continue;
        }
        f->next++;
        if (!is_inner(v)) {
            continue;
        }
        dcp__pnode *below = dcp__pv_node(v);
        if (below->flags & DCP__P_VISITING) {
            return dcp__fail_at(err, DCP_FORMAT, at, "pickle: %s contains itself", dcp__pv_kind_name(v));
        }
        if (depth + (below->height ? below->height : 1) > max_depth) {
            return dcp__fail_at(err, DCP_LIMIT, at, "pickle: values nested deeper than %zu", max_depth);
        }
        if (below->height) {
            raise_height(f->node, below->height + 1u);
            continue;
        }
        below->height = 1;
        below->flags |= DCP__P_VISITING;
        stack[depth++] = (frame){below, 0};
    }
    return DCP_OK;
}

dcp_status dcp__pickle_check(dcp_context *ctx, dcp__pv root, uint32_t max_depth, uint64_t at, dcp_error *err)
{
    size_t depth = max_depth < UINT16_MAX - 1 ? max_depth : UINT16_MAX - 1;
    if (!is_inner(root)) {
        return DCP_OK;
    }
    frame *stack = dcp__alloc(ctx, depth * sizeof *stack);
    if (!stack) {
        return dcp__nomem(err);
    }
    stack[0] = (frame){dcp__pv_node(root), 0};
    stack[0].node->height = 1;
    stack[0].node->flags |= DCP__P_VISITING;
    dcp_status status = walk(stack, depth, at, err);
    dcp__free(ctx, stack);
    return status;
}
