#include "engine/read/tensor_slabs.h"

#include "state/strided.h"

void dcp__slabs_init(dcp__slabs *s, int ndim, const int64_t *extents, int64_t max_elems)
{
    int64_t inner = 1, elems = 0;
    int d = ndim - 1;
    while (d > 0 && extents[d] <= max_elems / inner) {
        inner *= extents[d] > 0 ? extents[d] : 1;
        d--;
    }
    *s = (dcp__slabs){.ndim = ndim, .dim = d, .step = 1, .extents = extents};
    if (d >= 0) {
        s->step = max_elems / inner < 1 ? 1 : max_elems / inner < extents[d] ? max_elems / inner : extents[d];
    }
    dcp__elems(ndim, extents, &elems); /* 0 if it overflows, which the metadata of no item does */
    s->largest = elems ? s->step * inner : 0;
}

static void set_sizes(dcp__slabs *s)
{
    s->elems = 1;
    for (int d = 0; d < s->ndim; d++) {
        int64_t left = s->extents[d] - s->offsets[d];
        s->sizes[d] = d < s->dim ? 1 : d == s->dim && left > s->step ? s->step : left;
        s->elems *= s->sizes[d];
    }
}

bool dcp__slabs_next(dcp__slabs *s)
{
    bool is_first = !s->is_started;
    int d = s->dim;
    s->is_started = true;
    if (is_first && s->largest) {
        set_sizes(s);
        return true;
    }
    for (; d >= 0 && s->largest; d--) {
        s->offsets[d] += d == s->dim ? s->step : 1;
        if (s->offsets[d] < s->extents[d]) {
            set_sizes(s);
            return true;
        }
        s->offsets[d] = 0;
    }
    return false;
}

dcp_status dcp__slabs_read(const dcp__slabs *s, dcp_checkpoint *ck, const dcp_item *item, void *buf, dcp_error *err)
{
    dcp_box box = {s->offsets, s->sizes};
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, s->sizes, buf);
    return dcp_read(ck, item, &box, &dst, err);
}
