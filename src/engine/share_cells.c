#include "engine/share_cells.h"

#include <string.h>

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

static dcp_status add_cell(dcp__cells *c, const dcp__piece *p, size_t whole, const int64_t *at, const int64_t *sizes,
                           dcp_error *err)
{
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
    *cell = (dcp__cell){.piece = *p, .whole = whole, .set = DCP__NOBODY};
    cell->piece.in_wanted = kept;
    cell->piece.in_chunk = kept + ndim;
    cell->piece.sizes = kept + 2 * ndim;
    cell->piece.bytes = bytes;
    return DCP_OK;
}

/* The innermost dimension runs fastest, so that cells are in the order of a row-major record. */
static dcp_status cut_piece(dcp__cells *c, const dcp__piece *p, size_t whole, grid g, dcp_error *err)
{
    int64_t at[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    int ndim = p->entry->item.ndim, d;
    memcpy(at, p->in_chunk, (size_t)ndim * sizeof *at);
    do {
        for (d = 0; d < ndim; d++) {
            sizes[d] = cell_end(g, d, at[d], p->in_chunk[d] + p->sizes[d]) - at[d];
        }
        dcp_status status = add_cell(c, p, whole, at, sizes, err);
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
static bool must_be_whole(const dcp__read_plan *plan, const dcp__piece *p)
{
    return plan->ck->check_crc || plan->ck->meta->storages[p->chunk->storage].transforms != 0;
}

dcp_status dcp__cells_cut(const dcp__read_plan *plan, uint64_t cell_bytes, uint64_t whole_bytes, dcp__cells *out, dcp_error *err)
{
    dcp_status status = DCP_OK;
    *out = (dcp__cells){.ctx = plan->ck->ctx};
    dcp__arena_init(&out->arena, out->ctx, UINT64_MAX);
    for (size_t i = 0; i < plan->n_pieces && status == DCP_OK; i++) {
        const dcp__piece *p = &plan->pieces[i];
        bool is_whole = must_be_whole(plan, p);
        if (p->request->dst.device.type == DCP_DEVICE_CPU && !(is_whole && p->bytes > whole_bytes)) {
            status = cut_piece(out, p, i, is_whole ? (grid){-1, 0} : grid_of(p, cell_bytes), err);
        }
    }
    return status;
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
