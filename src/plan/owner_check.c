/* What is wrong with the chunks of all ranks together. Every tensor is looked at, whatever is wrong with others. */
#include <stdarg.h>
#include <stdio.h>

#include "plan/coverage.h"
#include "plan/owner.h"

#define MOST_FAULT_BYTES 16384
#define MOST_PER_TENSOR 8

/* ---- telling ---- */

void dcp__note(dcp__owner *o, dcp__fault_kind kind, const char *fmt, ...)
{
    char line[700];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(line, sizeof line - 1, fmt, args);
    va_end(args);
    size_t len = n < 0 ? 0 : (size_t)n < sizeof line - 1 ? (size_t)n : sizeof line - 2;
    o->n_faults++;
    o->n_clashes += kind == DCP__FAULT_CLASH;
    if (o->faults.len + len + 1 <= MOST_FAULT_BYTES) {
        line[len] = '\n';
        dcp__buf_put(&o->faults, line, len + 1);
    }
}

/* "[0:2, 4:8]" */
dcp__printable dcp__text_of_box(int ndim, const int64_t *offsets, const int64_t *sizes)
{
    dcp__printable p = {"["};
    size_t at = 1;
    for (int d = 0; d < ndim && at < sizeof p.text - 48; d++) {
        uint64_t end = (uint64_t)offsets[d] + (uint64_t)sizes[d];
        at += (size_t)snprintf(p.text + at, sizeof p.text - at, "%s%lld:%llu", d ? ", " : "", (long long)offsets[d],
                               (unsigned long long)end);
    }
    snprintf(p.text + at, sizeof p.text - at, "]");
    return p;
}

/* ---- looking ---- */

typedef struct checker {
    dcp__owner *o;
    dcp_box *boxes;
    uint32_t *chunks; /* that the boxes belong to */
    size_t n, cap_boxes, cap_chunks;
} checker;

static dcp_status collect(checker *k, const dcp__owned_entry *e, dcp_error *err)
{
    void *boxes = k->boxes, *chunks = k->chunks;
    bool ok = dcp__grow(k->o->ctx, &boxes, &k->cap_boxes, e->n_chunks, sizeof *k->boxes);
    k->boxes = boxes;
    ok = ok && dcp__grow(k->o->ctx, &chunks, &k->cap_chunks, e->n_chunks, sizeof *k->chunks);
    k->chunks = chunks;
    if (!ok) {
        return dcp__nomem(err);
    }
    k->n = 0;
    for (uint32_t c = e->first_chunk; c != DCP__NONE; c = k->o->chunks[c].next) {
        k->boxes[k->n] = (dcp_box){dcp__chunk_offsets(k->o, &k->o->chunks[c]), dcp__chunk_sizes(k->o, &k->o->chunks[c])};
        k->chunks[k->n++] = c;
    }
    return DCP_OK;
}

/* The dimension along which one chunk is smaller than its tensor, if it is the only one; ndim if there is none; -1 otherwise. */
static int cut_dimension(const dcp__wire_entry *is, const dcp_box *box)
{
    int dim = is->ndim;
    for (int d = 0; d < is->ndim; d++) {
        if (box->offsets[d] != 0 || box->sizes[d] != is->extents[d]) {
            if (dim != is->ndim) {
                return -1;
            }
            dim = d;
        }
    }
    return dim;
}

/* Chunks that follow each other along one dimension, first to last: most tensors of most plans. */
static bool is_plain_row(const checker *k, const dcp__wire_entry *is)
{
    int dim = k->n ? cut_dimension(is, &k->boxes[0]) : -1;
    if (dim < 0 || dim == is->ndim) {
        return dim >= 0 && k->n == 1;
    }
    int64_t end = 0;
    for (size_t i = 0; i < k->n; i++) {
        const dcp_box *b = &k->boxes[i];
        if (cut_dimension(is, b) != dim || b->offsets[dim] != end || b->sizes[dim] > is->extents[dim] - end) {
            return false;
        }
        end += b->sizes[dim];
    }
    return end == is->extents[dim];
}

static dcp__printable print_chunk(const checker *k, int ndim, size_t i)
{
    return dcp__text_of_box(ndim, k->boxes[i].offsets, k->boxes[i].sizes);
}

static uint32_t rank_of(const checker *k, size_t i)
{
    return dcp__chunk_first_rank(k->o, &k->o->chunks[k->chunks[i]]);
}

static void note_fault(checker *k, const dcp__wire_entry *is, const dcp__tiling *t)
{
    dcp__printable name = dcp__print(is->fqn);
    int64_t a[DCP_MAX_NDIM], b[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    switch (t->fault) {
    case DCP__TILING_OUTSIDE:
        dcp__note(k->o, DCP__FAULT_CHUNKS, "item \"%s\": chunk %s of rank %u is not within %s", name.text,
                  print_chunk(k, is->ndim, t->a).text, rank_of(k, t->a), dcp__print_shape(is->ndim, is->extents).text);
        break;
    case DCP__TILING_OVERLAP:
        dcp__box_overlap(is->ndim, &k->boxes[t->a], &k->boxes[t->b], a, b, sizes);
        for (int d = 0; d < is->ndim; d++) {
            a[d] += k->boxes[t->a].offsets[d];
        }
        dcp__note(k->o, DCP__FAULT_CHUNKS, "item \"%s\": chunks %s of rank %u and %s of rank %u overlap in %s", name.text,
                  print_chunk(k, is->ndim, t->a).text, rank_of(k, t->a), print_chunk(k, is->ndim, t->b).text, rank_of(k, t->b),
                  dcp__text_of_box(is->ndim, a, sizes).text);
        break;
    default:
        dcp__note(k->o, DCP__FAULT_CHUNKS, "item \"%s\" of shape %s: %lld elements are in no chunk, the first at %s", name.text,
                  dcp__print_shape(is->ndim, is->extents).text, (long long)t->missing, dcp__print_shape(is->ndim, t->at).text);
    }
}

static void drop(checker *k, size_t i)
{
    memmove(&k->boxes[i], &k->boxes[i + 1], (k->n - i - 1) * sizeof *k->boxes);
    memmove(&k->chunks[i], &k->chunks[i + 1], (k->n - i - 1) * sizeof *k->chunks);
    k->n--;
}

/* A faulty chunk is taken out and the rest looked at again, some times. Whether something is missing cannot be told then. */
static dcp_status check_tensor(checker *k, const dcp__owned_entry *e, dcp_error *err)
{
    dcp__tiling t = {.fault = DCP__TILING_OK};
    for (int faults = 0; faults < MOST_PER_TENSOR; faults++) {
        dcp_status status = dcp__check_tiling(k->o->ctx, e->is.ndim, e->is.extents, k->boxes, k->n, &t, err);
        if (status != DCP_OK) {
            return status;
        }
        if (t.fault == DCP__TILING_OK || (t.fault == DCP__TILING_GAP && (faults || k->o->local->opts.allow_gaps))) {
            break;
        }
        note_fault(k, &e->is, &t);
        if (t.fault == DCP__TILING_GAP) {
            break;
        }
        drop(k, t.fault == DCP__TILING_OUTSIDE ? t.a : t.b);
    }
    return DCP_OK;
}

dcp_status dcp__owner_check(dcp__owner *o, dcp_error *err)
{
    checker k = {.o = o};
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < o->n_entries && status == DCP_OK; i++) {
        const dcp__owned_entry *e = &o->entries[i];
        if (e->is.kind != DCP_ITEM_TENSOR || e->has_clash) {
            continue;
        }
        status = collect(&k, e, err);
        if (status == DCP_OK && !is_plain_row(&k, &e->is)) {
            status = check_tensor(&k, e, err);
        }
    }
    if (status == DCP_OK && o->faults.failed) {
        status = dcp__nomem(err);
    }
    dcp__free(o->ctx, k.boxes);
    dcp__free(o->ctx, k.chunks);
    return status;
}
