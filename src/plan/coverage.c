/* Whether chunks tile a tensor.
 *
 * Overlaps: chunks that a plane separates cannot overlap, and whatever shards tensors (rows, columns, meshes) can be taken apart
 * by planes. So the set is sorted along one dimension, cut wherever nothing crosses, and each part goes on with the next
 * dimension until it is a single chunk. What no plane divides is swept along one dimension while a tree knows which of the open
 * chunks meet the next one along a second dimension; only those pairs are tested.
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
    uint64_t visits_left; /* then dividing has not paid, and the rest is swept */
    int64_t *tree;        /* 2 x n_leaves, of the sweep */
    size_t n_leaves;      /* a power of two, less than 2 x n_items */
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

/* The two dimensions with the fewest meetings; both 0 if there is only one. */
static void choose_dims(work *w, const segment *s, int *sweep, int *across)
{
    uint64_t fewest = UINT64_MAX, second = UINT64_MAX;
    *sweep = *across = 0;
    for (int d = 0; d < w->ndim; d++) {
        uint64_t pairs = count_meetings(w, s, d);
        if (pairs < fewest) {
            second = fewest;
            *across = *sweep;
            fewest = pairs;
            *sweep = d;
        } else if (pairs < second) {
            second = pairs;
            *across = d;
        }
    }
}

/* The open chunks: leaf i of the tree is the item of the i-th smallest start along `across`, and holds where it ends if it is
 * open, else INT64_MIN; a node holds the largest number below it. */
static void set_leaf(work *w, size_t leaf, int64_t end)
{
    size_t i = w->n_leaves + leaf;
    w->tree[i] = end;
    while (i > 1) {
        i /= 2;
        int64_t left = w->tree[2 * i], right = w->tree[2 * i + 1];
        w->tree[i] = left > right ? left : right;
    }
}

/* First leaf from `from` on that ends behind `start`; n_leaves if there is none. */
static size_t next_reaching(const work *w, size_t from, int64_t start)
{
    if (from >= w->n_leaves) {
        return w->n_leaves;
    }
    size_t i = w->n_leaves + from;
    while (w->tree[i] <= start) {
        while (i & 1) { /* up, as long as nothing is to the right */
            i /= 2;
        }
        if (i == 0) {
            return w->n_leaves;
        }
        i++;
    }
    while (i < w->n_leaves) {
        i = w->tree[2 * i] > start ? 2 * i : 2 * i + 1;
    }
    return i - w->n_leaves;
}

/* Sorts the items by their start along `across`, empties the tree, and puts the events of the sweep into keys: the end of each
 * item (2 x leaf) and its start (2 x leaf + 1), at equal places ends first. */
static void prepare_sweep(work *w, const segment *s, int sweep, int across)
{
    size_t n = s->end - s->begin;
    sort_items(w, s, across);
    for (w->n_leaves = 1; w->n_leaves < n;) {
        w->n_leaves *= 2;
    }
    for (size_t i = 0; i < 2 * w->n_leaves; i++) {
        w->tree[i] = INT64_MIN;
    }
    for (size_t i = 0; i < n; i++) {
        size_t item = w->items[s->begin + i];
        w->keys[i] = (keyed){end_of(w, item, sweep), 2 * i};
        w->keys[n + i] = (keyed){start_of(w, item, sweep), 2 * i + 1};
    }
    sort_keys(w, 2 * n);
}

static bool find_overlap_by_sweep(work *w, const segment *s, dcp__tiling *out)
{
    int sweep, across;
    choose_dims(w, s, &sweep, &across);
    prepare_sweep(w, s, sweep, across);
    for (size_t e = 0; e < 2 * (s->end - s->begin); e++) {
        size_t leaf = w->keys[e].item / 2, item = w->items[s->begin + leaf];
        if (w->keys[e].item % 2 == 0) {
            set_leaf(w, leaf, INT64_MIN);
            continue;
        }
        int64_t start = start_of(w, item, across), end = end_of(w, item, across);
        for (size_t i = next_reaching(w, 0, start); i < w->n_leaves; i = next_reaching(w, i + 1, start)) {
            size_t other = w->items[s->begin + i];
            if (start_of(w, other, across) >= end) {
                break;
            }
            if (overlap(w, item, other)) {
                report_overlap(item, other, out);
                return true;
            }
        }
        set_leaf(w, leaf, end);
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
        if (s.end > s.begin && find_overlap_by_sweep(w, &s, out)) {
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

bool dcp__box_is_inside(int ndim, const int64_t *extents, const int64_t *offsets, const int64_t *sizes)
{
    for (int d = 0; d < ndim; d++) {
        if (offsets[d] < 0 || sizes[d] < 0 || offsets[d] > extents[d] || sizes[d] > extents[d] - offsets[d]) {
            return false;
        }
    }
    return true;
}

bool dcp__box_is_empty(int ndim, const int64_t *sizes)
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
    w->tree = dcp__calloc(ctx, n, 4 * sizeof *w->tree);
    return w->items && w->keys && w->scratch && w->stack && w->tree;
}

static void release(work *w, dcp_context *ctx)
{
    dcp__free(ctx, w->items);
    dcp__free(ctx, w->keys);
    dcp__free(ctx, w->scratch);
    dcp__free(ctx, w->stack);
    dcp__free(ctx, w->tree);
}

static void check(work *w, size_t n, int64_t elems, dcp__tiling *out)
{
    int64_t missing = elems;
    for (size_t i = 0; i < n; i++) {
        if (!dcp__box_is_empty(w->ndim, w->chunks[i].sizes)) {
            w->items[w->n_items++] = i;
        }
    }
    /* A mesh needs one visit of each chunk for each dimension. */
    w->visits_left = (uint64_t)w->n_items * 4 * (uint64_t)(w->ndim + 1);
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
        if (!dcp__box_is_inside(ndim, extents, chunks[i].offsets, chunks[i].sizes)) {
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
