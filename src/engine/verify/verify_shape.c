/* Do the chunks of each tensor tile it, and has each a place? Asks the metadata alone. */
#include <stdio.h>
#include <string.h>

#include "engine/verify/verify.h"
#include "plan/coverage.h"
#include "state/strided.h"

/* After so many faults of one tensor the rest of it is not looked for. */
#define MAX_FAULTS 32

/* "[0, 4] + [2, 4]": where it is and how large; long ones are cut. */
typedef struct box_text {
    char text[160];
} box_text;

static size_t put_numbers(char *text, size_t n, size_t cap, int ndim, const int64_t *numbers)
{
    n += (size_t)snprintf(text + n, cap - n, "[");
    for (int d = 0; d < ndim; d++) {
        if (n + 30 > cap) {
            n += (size_t)snprintf(text + n, cap - n, ", ...");
            break;
        }
        n += (size_t)snprintf(text + n, cap - n, "%s%lld", d ? ", " : "", (long long)numbers[d]);
    }
    return n + (size_t)snprintf(text + n, cap - n, "]");
}

static box_text print_box(int ndim, const dcp_box *box)
{
    box_text out;
    size_t n = put_numbers(out.text, 0, 76, ndim, box->offsets);
    n += (size_t)snprintf(out.text + n, sizeof out.text - n, " + ");
    put_numbers(out.text, n, sizeof out.text, ndim, box->sizes);
    return out;
}

/* The chunks of one tensor that are still looked at. */
typedef struct tiling_set {
    dcp__verify *v;
    const dcp__entry *e;
    dcp_box *boxes;
    size_t *chunk; /* index in meta->chunks of each box */
    size_t n;
} tiling_set;

/* Where a chunk's bytes are: so that the defect names file and offset. */
static int64_t place_of(const tiling_set *t, size_t i, uint64_t *offset)
{
    const dcp__metadata *m = t->v->ck->meta;
    uint32_t s = m->chunks[t->chunk[i]].storage;
    *offset = s == DCP__NO_STORAGE ? DCP_NO_OFFSET : m->storages[s].offset;
    return s == DCP__NO_STORAGE ? -1 : (int64_t)m->storages[s].file;
}

static void drop(tiling_set *t, size_t i)
{
    t->n--;
    t->boxes[i] = t->boxes[t->n];
    t->chunk[i] = t->chunk[t->n];
}

static void report_outside(const tiling_set *t, const dcp__tiling *f)
{
    uint64_t offset;
    char shape[160];
    int64_t file = place_of(t, f->a, &offset);
    put_numbers(shape, 0, sizeof shape, t->e->item.ndim, t->e->item.extents);
    dcp__verify_defect(t->v, file, t->e->item.fqn, DCP_FORMAT, offset, "chunk %zu, %s, is not within the tensor's %s",
                       t->chunk[f->a] - t->e->first_chunk, print_box(t->e->item.ndim, &t->boxes[f->a]).text, shape);
}

static void report_overlap(const tiling_set *t, const dcp__tiling *f)
{
    uint64_t offset, ignored;
    const dcp__metadata *m = t->v->ck->meta;
    int64_t file = place_of(t, f->b, &offset), other = place_of(t, f->a, &ignored);
    dcp__verify_defect(t->v, file, t->e->item.fqn, DCP_FORMAT, offset, "chunks %zu, %s in %s, and %zu, %s, overlap",
                       t->chunk[f->a] - t->e->first_chunk, print_box(t->e->item.ndim, &t->boxes[f->a]).text,
                       other < 0 ? "no file" : dcp__print(m->files[other]).text, t->chunk[f->b] - t->e->first_chunk,
                       print_box(t->e->item.ndim, &t->boxes[f->b]).text);
}

static void report_gap(const tiling_set *t, const dcp__tiling *f)
{
    char at[160];
    put_numbers(at, 0, sizeof at, t->e->item.ndim, f->at);
    dcp__verify_defect(t->v, -1, t->e->item.fqn, DCP_FORMAT, DCP_NO_OFFSET,
                       "%lld element%s in none of its %zu chunk%s, the first at %s", (long long)f->missing,
                       f->missing == 1 ? " is" : "s are", t->e->item.n_chunks, dcp__plural(t->e->item.n_chunks), at);
}

/* Each faulty chunk is reported and left out, until the rest is sound. What is missing only because of an overlap that was taken
 * out is not reported. */
static dcp_status check_tiling(tiling_set *t, dcp_error *err)
{
    for (int i = 0; i < MAX_FAULTS; i++) {
        dcp__tiling f = {0};
        dcp_status status = dcp__check_tiling(t->v->ck->ctx, t->e->item.ndim, t->e->item.extents, t->boxes, t->n, &f, err);
        if (status != DCP_OK || f.fault == DCP__TILING_OK) {
            return status;
        }
        if (f.fault == DCP__TILING_GAP) {
            if (i == 0) {
                report_gap(t, &f);
            }
            return DCP_OK;
        }
        if (f.fault == DCP__TILING_OVERLAP) {
            report_overlap(t, &f);
        } else {
            report_outside(t, &f);
        }
        drop(t, f.fault == DCP__TILING_OVERLAP ? f.b : f.a);
    }
    dcp__verify_defect(t->v, -1, t->e->item.fqn, DCP_FORMAT, DCP_NO_OFFSET, "more faults of its chunks are not listed");
    return DCP_OK;
}

static void check_place(dcp__verify *v, const dcp__entry *e, size_t chunk)
{
    int64_t elems;
    const dcp__chunk *c = &v->ck->meta->chunks[chunk];
    bool is_empty = dcp__elems(e->item.ndim, c->sizes, &elems) && elems == 0;
    if (c->storage == DCP__NO_STORAGE && !is_empty) {
        dcp_box box = {c->offsets, c->sizes};
        dcp__verify_defect(v, -1, e->item.fqn, DCP_FORMAT, DCP_NO_OFFSET, "the metadata names no place for chunk %zu, %s",
                           chunk - e->first_chunk, print_box(e->item.ndim, &box).text);
    }
}

static dcp_status check_tensor(dcp__verify *v, const dcp__entry *e, dcp_error *err)
{
    size_t n = e->item.n_chunks;
    tiling_set t = {.v = v, .e = e, .n = n};
    t.boxes = dcp__calloc(v->ck->ctx, n, sizeof *t.boxes);
    t.chunk = dcp__calloc(v->ck->ctx, n, sizeof *t.chunk);
    dcp_status status = t.boxes && t.chunk ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; status == DCP_OK && i < n; i++) {
        const dcp__chunk *c = &v->ck->meta->chunks[e->first_chunk + i];
        t.boxes[i] = (dcp_box){c->offsets, c->sizes};
        t.chunk[i] = e->first_chunk + i;
        check_place(v, e, t.chunk[i]);
    }
    status = status == DCP_OK ? check_tiling(&t, err) : status;
    dcp__free(v->ck->ctx, t.boxes);
    dcp__free(v->ck->ctx, t.chunk);
    return status;
}

dcp_status dcp__verify_entries(dcp__verify *v, dcp_error *err)
{
    const dcp__metadata *m = v->ck->meta;
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < m->n_entries; i++) {
        const dcp__entry *e = &m->entries[i];
        if (e->item.kind == DCP_ITEM_TENSOR) {
            status = check_tensor(v, e, err);
        } else if (e->storage == DCP__NO_STORAGE && !v->ck->values) {
            dcp__verify_defect(v, -1, e->item.fqn, DCP_FORMAT, DCP_NO_OFFSET, "the metadata names no place for the object");
        }
    }
    return status;
}
