/* The byte ranges that the metadata names, file by file. */
#include <stdlib.h>

#include "engine/read/checkpoint.h"

static int compare(const void *a, const void *b, void *arg)
{
    const dcp__storage *storages = arg;
    const dcp__storage *x = &storages[*(const uint32_t *)a], *y = &storages[*(const uint32_t *)b];
    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    if (x->length != y->length) {
        return x->length < y->length ? -1 : 1;
    }
    return (x > y) - (x < y);
}

/* Most saves name the ranges of a file in ascending order. */
static bool is_sorted(const dcp__metadata *m, const uint32_t *order)
{
    for (size_t i = 1; i < m->n_storages; i++) {
        if (compare(&order[i - 1], &order[i], m->storages) > 0) {
            return false;
        }
    }
    return true;
}

static dcp_status make(dcp_checkpoint *ck, dcp_error *err)
{
    const dcp__metadata *m = ck->meta;
    uint32_t *order = dcp__alloc(ck->ctx, m->n_storages * sizeof *order);
    size_t *first = dcp__calloc(ck->ctx, m->n_files + 2, sizeof *first);
    if (!order || !first) {
        dcp__free(ck->ctx, order);
        dcp__free(ck->ctx, first);
        return dcp__nomem(err);
    }
    /* Counted one place ahead, so that after the placing first[f] is where file f begins. */
    for (size_t i = 0; i < m->n_storages; i++) {
        first[m->storages[i].file + 2]++;
    }
    for (size_t f = 1; f <= m->n_files; f++) {
        first[f + 1] += first[f];
    }
    for (size_t i = 0; i < m->n_storages; i++) {
        order[first[m->storages[i].file + 1]++] = (uint32_t)i;
    }
    if (!is_sorted(m, order)) {
        qsort_r(order, m->n_storages, sizeof *order, compare, m->storages);
    }
    ck->ranges = (dcp__ranges){order, first};
    return DCP_OK;
}

dcp_status dcp__get_ranges(const dcp_checkpoint *ck, const dcp__ranges **out, dcp_error *err)
{
    dcp_checkpoint *owner = (dcp_checkpoint *)ck; /* what is made here was always part of it */
    pthread_mutex_lock(&owner->lock);
    dcp_status status = owner->ranges.order ? DCP_OK : make(owner, err);
    pthread_mutex_unlock(&owner->lock);
    if (status == DCP_OK) {
        *out = &owner->ranges;
    }
    return status;
}
