/* Whether chunks tile a tensor.
 *
 * Overlaps: chunks that a plane separates cannot overlap, and whatever shards tensors (rows, columns, meshes) can be taken apart
 * by planes. So the set is sorted along one dimension, cut wherever nothing crosses, and each part goes on with the next
 * dimension until it is a single chunk. What no plane divides is tested in pairs, of those only that meet along the dimension
 * with the fewest such.
 *
 * Gaps: of disjoint chunks, the volumes tell. The first missing element is found one coordinate at a time: the first slab along a
 * dimension whose cross-sections do not add up has it. */
#include "plan/coverage.h"

#include <string.h>

#include "base/checked.h"
#include "state/strided.h"

typedef struct keyed {
    int64_t key;
    size_t item;
} keyed;

/* items[begin, end) that are still to be told apart; no plane across the last `tried` dimensions before `dim` divides them. */
typedef struct segment {
    size_t begin, end;
    int dim, tried;
} segment;

typedef struct work {
    int ndim;
    const int64_t *extents;
    const dcp_box *chunks;
    size_t *items; /* chunks with elements */
    size_t n_items;
    keyed *keys, *scratch; /* 2 x n_items each */
    segment *stack;        /* a segment has two items at least, so n_items / 2 are enough */
    size_t n_segments;
    uint64_t visits_left; /* then dividing has not paid, and pairs are tested */
} work;

static int64_t start_of(const work *w, size_t chunk, int dim)
{
    return w->chunks[chunk].offsets[dim];
}

static int64_t end_of(const work *w, size_t chunk, int dim)
{
    return w->chunks[chunk].offsets[dim] + w->chunks[chunk].sizes[dim];
}

/* ---- sorting ---- */

static bool is_sorted(const keyed *k, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if (k[i - 1].key > k[i].key) {
            return false;
        }
    }
    return true;
}

static void merge(const keyed *from, keyed *to, size_t begin, size_t middle, size_t end)
{
    size_t a = begin, b = middle;
    for (size_t i = begin; i < end; i++) {
        to[i] = a < middle && (b >= end || from[a].key <= from[b].key) ? from[a++] : from[b++];
    }
}

/* Stable. Chunks mostly come in order. */
static void sort_keys(work *w, size_t n)
{
    if (is_sorted(w->keys, n)) {
        return;
    }
    for (size_t width = 1; width < n; width *= 2) {
        for (size_t i = 0; i < n; i += 2 * width) {
            size_t middle = i + width < n ? i + width : n, end = middle + width < n ? middle + width : n;
            merge(w->keys, w->scratch, i, middle, end);
        }
        keyed *t = w->keys;
        w->keys = w->scratch;
        w->scratch = t;
    }
}

/* Sorts the items of a segment by where they start along dim. */
static void sort_items(work *w, const segment *s, int dim)
{
    size_t n = s->end - s->begin;
    for (size_t i = 0; i < n; i++) {
        size_t item = w->items[s->begin + i];
        w->keys[i] = (keyed){start_of(w, item, dim), item};
    }
    sort_keys(w, n);
    for (size_t i = 0; i < n; i++) {
        w->items[s->begin + i] = w->keys[i].item;
    }
}

/* ---- overlaps ---- */

static bool overlap(const work *w, size_t a, size_t b)
{
    for (int d = 0; d < w->ndim; d++) {
        if (start_of(w, a, d) >= end_of(w, b, d) || start_of(w, b, d) >= end_of(w, a, d)) {
            return false;
        }
    }
    return true;
}

static void report_overlap(size_t a, size_t b, dcp__tiling *out)
{
    out->fault = DCP__TILING_OVERLAP;
    out->a = a < b ? a : b;
    out->b = a < b ? b : a;
}

/* Number of pairs that meet along dim: for each start, the items that are open there. */
static uint64_t count_meetings(work *w, const segment *s, int dim)
{
    size_t n = s->end - s->begin, open = 0;
    uint64_t pairs = 0;
    for (size_t i = 0; i < n; i++) {
        size_t item = w->items[s->begin + i];
        w->keys[2 * i] = (keyed){start_of(w, item, dim), 1};
        w->keys[2 * i + 1] = (keyed){end_of(w, item, dim), 0};
    }
    sort_keys(w, 2 * n);
    for (size_t i = 0; i < 2 * n;) {
        size_t opened = 0, closed = 0;
        int64_t at = w->keys[i].key;
        for (; i < 2 * n && w->keys[i].key == at; i++) {
            opened += w->keys[i].item;
            closed += 1 - w->keys[i].item;
        }
        open -= closed;
        for (; opened; opened--) {
            pairs += open++;
        }
    }
    return pairs;
}

static bool find_overlap_by_pairs(work *w, const segment *s, dcp__tiling *out)
{
    uint64_t fewest = UINT64_MAX;
    int dim = 0;
    for (int d = 0; d < w->ndim; d++) {
        uint64_t pairs = count_meetings(w, s, d);
        if (pairs < fewest) {
            fewest = pairs;
            dim = d;
        }
    }
    sort_items(w, s, dim);
    keyed *open = w->scratch; /* keys are where they end */
    size_t n_open = 0;
    for (size_t i = s->begin; i < s->end; i++) {
        size_t item = w->items[i], kept = 0;
        int64_t start = start_of(w, item, dim);
        for (size_t j = 0; j < n_open; j++) {
            if (open[j].key > start) {
                if (overlap(w, open[j].item, item)) {
                    report_overlap(open[j].item, item, out);
                    return true;
                }
                open[kept++] = open[j];
            }
        }
        open[kept] = (keyed){end_of(w, item, dim), item};
        n_open = kept + 1;
    }
    return false;
}

/* Cuts a segment that is sorted along dim wherever no item crosses. False if there is no such place. */
static bool divide(work *w, const segment *s, int dim)
{
    size_t begin = s->begin;
    int64_t reach = end_of(w, w->items[begin], dim);
    for (size_t i = s->begin + 1; i <= s->end; i++) {
        if (i < s->end && start_of(w, w->items[i], dim) < reach) {
            int64_t end = end_of(w, w->items[i], dim);
            reach = end > reach ? end : reach;
            continue;
        }
        if (begin == s->begin && i == s->end) {
            return false;
        }
        if (i - begin > 1) {
            w->stack[w->n_segments++] = (segment){begin, i, (dim + 1) % w->ndim, 1};
        }
        begin = i;
        reach = i < s->end ? end_of(w, w->items[i], dim) : 0;
    }
    return true;
}

static bool find_overlap(work *w, dcp__tiling *out)
{
    if (w->n_items < 2) {
        return false;
    }
    if (w->ndim == 0) {
        report_overlap(w->items[0], w->items[1], out);
        return true;
    }
    w->stack[w->n_segments++] = (segment){0, w->n_items, 0, 0};
    while (w->n_segments) {
        segment s = w->stack[--w->n_segments];
        while (s.tried < w->ndim && w->visits_left >= s.end - s.begin) {
            w->visits_left -= s.end - s.begin;
            sort_items(w, &s, s.dim);
            if (divide(w, &s, s.dim)) {
                s.end = s.begin;
                break;
            }
            s.dim = (s.dim + 1) % w->ndim;
            s.tried++;
        }
        if (s.end > s.begin && find_overlap_by_pairs(w, &s, out)) {
            return true;
        }
    }
    return false;
}

/* ---- gaps ---- */

/* Elements of a chunk in dimensions from `dim` on. They fit, because those of the whole tensor do. */
static int64_t volume_from(const work *w, const int64_t *sizes, int dim)
{
    int64_t volume = 1;
    for (int d = dim; d < w->ndim; d++) {
        volume *= sizes[d];
    }
    return volume;
}

/* First position along dim where the cross-sections of the items do not fill the slab. */
static int64_t first_thin_slab(work *w, int dim)
{
    for (size_t i = 0; i < w->n_items; i++) {
        size_t item = w->items[i];
        w->keys[2 * i] = (keyed){start_of(w, item, dim), 2 * item};
        w->keys[2 * i + 1] = (keyed){end_of(w, item, dim), 2 * item + 1};
    }
    size_t n = 2 * w->n_items;
    sort_keys(w, n);
    int64_t full = volume_from(w, w->extents, dim + 1), filled = 0, at = 0;
    for (size_t i = 0;; at = w->keys[i].key) {
        for (; i < n && w->keys[i].key == at; i++) {
            int64_t section = volume_from(w, w->chunks[w->keys[i].item / 2].sizes, dim + 1);
            filled += w->keys[i].item % 2 ? -section : section;
        }
        if (filled < full || i == n) {
            return at;
        }
    }
}

/* For disjoint items that leave something out. */
static void find_gap(work *w, dcp__tiling *out)
{
    memset(out->at, 0, sizeof out->at);
    for (int d = 0; d < w->ndim && w->n_items; d++) {
        int64_t at = first_thin_slab(w, d);
        size_t kept = 0;
        for (size_t i = 0; i < w->n_items; i++) {
            if (start_of(w, w->items[i], d) <= at && at < end_of(w, w->items[i], d)) {
                w->items[kept++] = w->items[i];
            }
        }
        w->n_items = kept;
        out->at[d] = at;
    }
}

/* ---- all of it ---- */

static bool is_outside(int ndim, const int64_t *extents, const dcp_box *c)
{
    for (int d = 0; d < ndim; d++) {
        if (c->offsets[d] < 0 || c->sizes[d] < 0 || c->offsets[d] > extents[d] || c->sizes[d] > extents[d] - c->offsets[d]) {
            return true;
        }
    }
    return false;
}

static bool is_empty(int ndim, const int64_t *sizes)
{
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 0) {
            return true;
        }
    }
    return false;
}

static bool allocate(work *w, dcp_context *ctx, size_t n)
{
    w->items = dcp__calloc(ctx, n, sizeof *w->items);
    w->keys = dcp__calloc(ctx, n, 2 * sizeof *w->keys);
    w->scratch = dcp__calloc(ctx, n, 2 * sizeof *w->scratch);
    w->stack = dcp__calloc(ctx, n / 2 + 1, sizeof *w->stack);
    return w->items && w->keys && w->scratch && w->stack;
}

static void release(work *w, dcp_context *ctx)
{
    dcp__free(ctx, w->items);
    dcp__free(ctx, w->keys);
    dcp__free(ctx, w->scratch);
    dcp__free(ctx, w->stack);
}

static void check(work *w, size_t n, int64_t elems, dcp__tiling *out)
{
    int64_t missing = elems;
    for (size_t i = 0; i < n; i++) {
        if (!is_empty(w->ndim, w->chunks[i].sizes)) {
            w->items[w->n_items++] = i;
        }
    }
    /* Enough to divide a set 32 times along each dimension. */
    w->visits_left = (uint64_t)w->n_items * 32 * (uint64_t)(w->ndim + 1);
    if (find_overlap(w, out)) {
        return;
    }
    for (size_t i = 0; i < w->n_items; i++) {
        missing -= volume_from(w, w->chunks[w->items[i]].sizes, 0);
    }
    if (missing > 0) {
        out->fault = DCP__TILING_GAP;
        out->missing = missing;
        find_gap(w, out);
    }
}

dcp_status dcp__check_tiling(dcp_context *ctx, int ndim, const int64_t *extents, const dcp_box *chunks, size_t n,
                             dcp__tiling *out, dcp_error *err)
{
    dcp__tiling result = {.fault = DCP__TILING_OK};
    int64_t elems;
    for (size_t i = 0; i < n; i++) {
        if (is_outside(ndim, extents, &chunks[i])) {
            result.fault = DCP__TILING_OUTSIDE;
            result.a = i;
            *out = result;
            return DCP_OK;
        }
    }
    if (!dcp__elems(ndim, extents, &elems)) { /* nothing can hold so many */
        result.fault = DCP__TILING_GAP;
        result.missing = INT64_MAX;
        *out = result;
        return DCP_OK;
    }
    ctx = dcp__context(ctx);
    work w = {.ndim = ndim, .extents = extents, .chunks = chunks};
    dcp_status status = DCP_OK;
    if (!allocate(&w, ctx, n)) {
        status = dcp__nomem(err);
        goto err_work;
    }
    check(&w, n, elems, &result);
    *out = result;
err_work:
    release(&w, ctx);
    return status;
}

bool dcp__box_overlap(int ndim, const dcp_box *wanted, const dcp_box *chunk, int64_t *in_wanted, int64_t *in_chunk,
                      int64_t *sizes)
{
    for (int d = 0; d < ndim; d++) {
        int64_t start = wanted->offsets[d] > chunk->offsets[d] ? wanted->offsets[d] : chunk->offsets[d];
        int64_t wanted_end = wanted->offsets[d] + wanted->sizes[d], chunk_end = chunk->offsets[d] + chunk->sizes[d];
        int64_t end = wanted_end < chunk_end ? wanted_end : chunk_end;
        if (start >= end) {
            return false;
        }
        in_wanted[d] = start - wanted->offsets[d];
        in_chunk[d] = start - chunk->offsets[d];
        sizes[d] = end - start;
    }
    return true;
}
