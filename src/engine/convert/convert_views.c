/* Where the tensors of a torch.save file lie in its storages, and which of them are views of another one. */
#include <stdlib.h>

#include "engine/convert/convert.h"
#include "state/strided.h"
#include "state/value.h"

static const dcp_value *value_of(const dcp__selection *s, size_t item)
{
    const dcp_checkpoint *ck = s->c->ck;
    return ck->values ? ck->values[s->items[item].entry - ck->meta->entries] : NULL;
}

/* What holds most comes before what it holds. */
static int compare_extents(const void *a, const void *b)
{
    const dcp__cv_extent *x = a, *y = b;
    if (x->storage != y->storage) {
        return x->storage < y->storage ? -1 : 1;
    }
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    if (x->end != y->end) {
        return x->end > y->end ? -1 : 1;
    }
    if (x->is_row_major != y->is_row_major) {
        return x->is_row_major ? -1 : 1;
    }
    return (x->item > y->item) - (x->item < y->item);
}

dcp_status dcp__cv_list_extents(const dcp__selection *s, dcp__cv_extent **out, size_t *n, dcp_error *err)
{
    dcp__cv_extent *list = dcp__calloc(s->c->ctx, s->n, sizeof *list);
    *out = list;
    *n = 0;
    if (!list) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->n; i++) {
        const dcp_value *v = value_of(s, i);
        const dcp_tensor *t = v ? dcp_value_tensor(v) : NULL;
        int64_t span;
        if (t && dcp__value_lazy(v) && dcp__span_elems(t->ndim, t->extents, t->strides, &span) && span) {
            int64_t elem = (int64_t)dcp_dtype_bytes(t->dtype), begin = dcp__value_lazy(v)->storage_offset * elem;
            list[(*n)++] = (dcp__cv_extent){dcp__value_lazy(v)->storage, begin, begin + span * elem, i,
                                            dcp__is_row_major(t->ndim, t->extents, t->strides)};
        }
    }
    if (*n) {
        qsort(list, *n, sizeof *list, compare_extents);
    }
    return DCP_OK;
}

/* Are the elements written as they lie in the source, or cast one by one? Those of a lazy conjugate or negation are not. */
static bool keeps_order(const dcp__selection *s, size_t item)
{
    const dcp__lazy *lazy = dcp__value_lazy(value_of(s, item));
    return !s->items[item].quantized && !lazy->is_conj && !lazy->is_neg;
}

static bool is_within(const dcp__selection *s, const dcp__cv_extent *x, const dcp__cv_extent *base)
{
    const dcp__cv_item *item = &s->items[x->item], *of = &s->items[base->item];
    return x->storage == base->storage && x->end <= base->end && item->entry->item.dtype == of->entry->item.dtype;
}

/* Begins only ascend, so what reaches furthest of the row-major ones of a dtype holds all that another one could hold. */
static void find_views(const dcp__selection *s, const dcp__cv_extent *list, size_t n, dcp__cv_view *views)
{
    const dcp__cv_extent *bases[DCP_DTYPE_COUNT] = {NULL}; /* [dtype as written] */
    for (size_t i = 0; i < n; i++) {
        const dcp__cv_extent *x = &list[i];
        const dcp__cv_item *item = &s->items[x->item];
        const dcp__cv_extent **base = &bases[item->dtype];
        if (item->same_as != x->item || !keeps_order(s, x->item)) {
            continue;
        }
        if (*base && is_within(s, x, *base)) {
            int64_t elem = (int64_t)dcp_dtype_bytes(item->entry->item.dtype);
            views[x->item] = (dcp__cv_view){(*base)->item, (x->begin - (*base)->begin) / elem};
        } else if (x->is_row_major) {
            *base = x;
        }
    }
}

dcp_status dcp__cv_find_views(const dcp__selection *s, dcp__cv_view *views, dcp_error *err)
{
    dcp__cv_extent *list;
    size_t n;
    dcp_status status = dcp__cv_list_extents(s, &list, &n, err);
    for (size_t i = 0; i < s->n; i++) {
        views[i] = (dcp__cv_view){i, 0};
    }
    if (status == DCP_OK) {
        find_views(s, list, n, views);
    }
    for (size_t i = 0; i < s->n; i++) {
        views[i] = views[s->items[i].same_as];
    }
    dcp__free(s->c->ctx, list);
    return status;
}

const int64_t *dcp__cv_strides(const dcp__selection *s, size_t item)
{
    return dcp_value_tensor(value_of(s, item))->strides;
}
