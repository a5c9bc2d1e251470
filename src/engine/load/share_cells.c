#include "engine/load/share_cells.h"

#include <string.h>

#include "plan/coverage.h"

#define MOST_RECORD_CELLS ((uint64_t)64 << 10) /* of a record: 64 GiB */

/* How a chunk is cut: index by index in the dimensions before `dim`, and by `step` in that one. */
typedef struct grid {
    int dim; /* -1: not at all */
    int64_t step;
} grid;

/* As many whole inner dimensions as fit into max_bytes, and as many indexes of the next one. */
static grid grid_of(const dcp__piece *p, uint64_t max_bytes)
{
    uint64_t inner = dcp_dtype_bytes(p->entry->item.dtype);
    int d = p->entry->item.ndim;
    while (d > 0 && (uint64_t)p->chunk->sizes[d - 1] <= max_bytes / inner) {
        inner *= (uint64_t)p->chunk->sizes[--d];
    }
    return d == 0 ? (grid){-1, 0} : (grid){d - 1, (int64_t)(max_bytes / inner)};
}

/* The end of the cell that begins at `from` in dimension d. */
static int64_t cell_end(grid g, int d, int64_t from, int64_t end)
{
    if (d > g.dim) {
        return end;
    }
    int64_t next = d < g.dim ? from + 1 : (from / g.step + 1) * g.step;
    return next < end ? next : end;
}

/* Adds a part of a cell. */
static dcp_status add_cell(dcp__cells *c, const dcp__cell *of, const int64_t *at, const int64_t *sizes, dcp_error *err)
{
    const dcp__piece *p = &of->piece;
    size_t ndim = (size_t)p->entry->item.ndim;
    void *cells = c->cells;
    int64_t *kept = dcp__arena_alloc(&c->arena, 3 * ndim * sizeof *kept);
    if (!kept || !dcp__grow(c->ctx, &cells, &c->cap, c->n + 1, sizeof *c->cells)) {
        return dcp__nomem(err);
    }
    c->cells = cells;
    uint64_t bytes = dcp_dtype_bytes(p->entry->item.dtype);
    for (size_t d = 0; d < ndim; d++) {
        kept[d] = p->in_wanted[d] + at[d] - p->in_chunk[d];
        kept[ndim + d] = at[d];
        kept[2 * ndim + d] = sizes[d];
        bytes *= (uint64_t)sizes[d];
    }
    dcp__cell *cell = &c->cells[c->n++];
    *cell = *of;
    cell->piece.in_wanted = kept;
    cell->piece.in_chunk = kept + ndim;
    cell->piece.sizes = kept + 2 * ndim;
    cell->piece.bytes = bytes;
    return DCP_OK;
}

/* The innermost dimension runs fastest, so that cells are in the order of a row-major record. */
static dcp_status cut_cell(dcp__cells *c, const dcp__cell *whole, grid g, dcp_error *err)
{
    int64_t at[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    const dcp__piece *p = &whole->piece;
    int ndim = p->entry->item.ndim, d;
    memcpy(at, p->in_chunk, (size_t)ndim * sizeof *at);
    do {
        for (d = 0; d < ndim; d++) {
            sizes[d] = cell_end(g, d, at[d], p->in_chunk[d] + p->sizes[d]) - at[d];
        }
        dcp_status status = add_cell(c, whole, at, sizes, err);
        if (status != DCP_OK) {
            return status;
        }
        for (d = ndim - 1; d >= 0; d--) {
            at[d] += sizes[d];
            if (at[d] < p->in_chunk[d] + p->sizes[d]) {
                break;
            }
            at[d] = p->in_chunk[d];
        }
    } while (d >= 0);
    return DCP_OK;
}

/* Of a compressed record a part costs as much as the whole, and a checksum is one of the whole. */
static bool is_read_whole(const dcp__read_plan *plan, const dcp__unit *u)
{
    return u->storage->transforms != 0 || (plan->ck->check_crc && dcp__reads_whole_chunk(plan, u));
}

static bool is_on_host(const dcp__piece *p)
{
    return p->request->dst.device.type == DCP_DEVICE_CPU;
}

/* Metadata may claim chunks that nothing holds; what is made of one here must stay small. */
static bool is_believable(const dcp__piece *p, uint64_t cell_bytes)
{
    const dcp_item *item = &p->entry->item;
    uint64_t bytes = dcp_dtype_bytes(item->dtype);
    if (!dcp__box_is_inside(item->ndim, item->extents, p->chunk->offsets, p->chunk->sizes)) {
        return false;
    }
    for (int d = 0; d < item->ndim; d++) {
        bytes *= (uint64_t)p->chunk->sizes[d]; /* part of a tensor whose size in bytes fits */
    }
    return bytes / cell_bytes < MOST_RECORD_CELLS;
}

/* The record of a chunk as one cell, unless some of it is wanted on a device. */
static dcp_status add_record(dcp__cells *c, const dcp__read_plan *plan, const dcp__unit *u, uint64_t cell_bytes, dcp_error *err)
{
    static const int64_t zeros[DCP_MAX_NDIM];
    const dcp__piece *first = &plan->pieces[u->first];
    dcp__cell record = {.piece = *first, .first = u->first, .n = u->n, .is_record = true, .set = DCP__NOBODY};
    bool is_shareable = is_believable(first, cell_bytes);
    for (size_t i = 0; i < u->n; i++) {
        is_shareable &= is_on_host(&first[i]);
    }
    record.piece.in_wanted = record.piece.in_chunk = zeros;
    return is_shareable ? add_cell(c, &record, zeros, first->chunk->sizes, err) : DCP_OK;
}

static dcp_status cut_unit(dcp__cells *c, const dcp__read_plan *plan, const dcp__unit *u, uint64_t cell_bytes, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (is_read_whole(plan, u)) {
        return add_record(c, plan, u, cell_bytes, err);
    }
    for (size_t i = u->first; i < u->first + u->n && status == DCP_OK; i++) {
        const dcp__piece *p = &plan->pieces[i];
        const dcp__cell whole = {.piece = *p, .first = i, .n = 1, .set = DCP__NOBODY};
        status = is_on_host(p) ? cut_cell(c, &whole, grid_of(p, cell_bytes), err) : DCP_OK;
    }
    return status;
}

dcp_status dcp__cells_cut(const dcp__read_plan *plan, uint64_t cell_bytes, dcp__cells *out, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < plan->n_units && status == DCP_OK; i++) {
        status = cut_unit(out, plan, &plan->units[i], cell_bytes, err);
    }
    return status;
}

/* Small records are read as always: several at a time, or together with their neighbours. */
dcp_status dcp__cells_cut_record(const dcp__cell *record, const dcp__metadata *m, uint64_t cell_bytes, dcp__cells *out,
                                 dcp_error *err)
{
    const dcp__storage *s = &m->storages[record->piece.chunk->storage];
    grid g = grid_of(&record->piece, cell_bytes);
    dcp__cell whole = *record;
    whole.is_part = g.dim >= 0 || (s->transforms == 0 && !dcp__is_small(s));
    return cut_cell(out, &whole, g, err);
}

void dcp__cells_init(dcp__cells *c, dcp_context *ctx)
{
    *c = (dcp__cells){.ctx = ctx};
    dcp__arena_init(&c->arena, ctx, UINT64_MAX);
}

void dcp__cells_reset(dcp__cells *c)
{
    if (c->ctx) {
        dcp__arena_reset(&c->arena);
        dcp__free(c->ctx, c->cells);
    }
}

static int compare_numbers(uint64_t a, uint64_t b)
{
    return (a > b) - (a < b);
}

static int compare_boxes(int n, const int64_t *a, const int64_t *b)
{
    for (int d = 0; d < n; d++) {
        if (a[d] != b[d]) {
            return a[d] < b[d] ? -1 : 1;
        }
    }
    return 0;
}

int dcp__cell_compare(const dcp__cell *a, const dcp__cell *b)
{
    int ndim = a->piece.entry->item.ndim;
    int order = (a->piece.entry > b->piece.entry) - (a->piece.entry < b->piece.entry);
    order = order ? order : (a->piece.chunk > b->piece.chunk) - (a->piece.chunk < b->piece.chunk);
    order = order ? order : compare_boxes(ndim, a->piece.in_chunk, b->piece.in_chunk);
    return order ? order : compare_boxes(ndim, a->piece.sizes, b->piece.sizes);
}

int dcp__cell_compare_places(const dcp__metadata *m, const dcp__cell *a, const dcp__cell *b)
{
    const dcp__storage *x = &m->storages[a->piece.chunk->storage], *y = &m->storages[b->piece.chunk->storage];
    int order = compare_numbers(x->file, y->file);
    order = order ? order : compare_numbers(x->offset, y->offset);
    return order ? order : dcp__cell_compare(a, b);
}
