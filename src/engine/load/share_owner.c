#include "engine/load/share_owner.h"

#include <stdlib.h>
#include <string.h>

#include "plan/coverage.h"
#include "plan/plan_mail.h"

uint32_t dcp__share_owner(const dcp__metadata *m, const dcp__chunk *c, int world)
{
    return (uint32_t)((uint64_t)(c - m->chunks) * (uint64_t)world / m->n_chunks);
}

/* ---- sets ---- */

void dcp__rank_sets_init(dcp__rank_sets *s, dcp_context *ctx)
{
    *s = (dcp__rank_sets){.ctx = ctx};
    dcp__arena_init(&s->arena, ctx, UINT64_MAX);
    dcp__strmap_init(&s->by_ranks, ctx);
}

void dcp__rank_sets_reset(dcp__rank_sets *s)
{
    if (s->ctx) {
        dcp__free(s->ctx, s->sets);
        dcp__strmap_reset(&s->by_ranks);
        dcp__arena_reset(&s->arena);
    }
}

dcp_status dcp__rank_sets_add(dcp__rank_sets *s, const uint32_t *ranks, size_t n, uint32_t *out, dcp_error *err)
{
    uint64_t found;
    if (dcp__strmap_get(&s->by_ranks, (dcp_str){(const char *)ranks, n * sizeof *ranks}, &found)) {
        *out = (uint32_t)found;
        return DCP_OK;
    }
    void *sets = s->sets;
    uint32_t *kept = dcp__arena_alloc(&s->arena, n * sizeof *kept);
    if (!kept || !dcp__grow(s->ctx, &sets, &s->cap, s->n + 1, sizeof *s->sets)) {
        return dcp__nomem(err);
    }
    s->sets = sets;
    memcpy(kept, ranks, n * sizeof *kept);
    dcp_status status = dcp__strmap_add(&s->by_ranks, (dcp_str){(const char *)kept, n * sizeof *kept}, s->n, NULL, err);
    if (status == DCP_OK) {
        *out = (uint32_t)s->n;
        s->sets[s->n++] = (dcp__rank_set){kept, n};
    }
    return status;
}

/* ---- wishes ---- */

dcp_status dcp__share_wish(dcp_context *ctx, const dcp__metadata *m, const dcp__cell *cells, size_t n, int world, dcp__mail *out,
                           dcp_error *err)
{
    dcp__mail mail;
    dcp_status status = dcp__mail_init(&mail, ctx, world, err);
    if (status != DCP_OK) {
        return status;
    }
    size_t i = 0;
    for (int o = 0; o < world; o++) {
        size_t last = 0;
        mail.start[o] = mail.bytes.len;
        for (; i < n && cells[i].owner == (uint32_t)o; i++) {
            const dcp__piece *p = &cells[i].piece;
            size_t entry = (size_t)(p->entry - m->entries);
            dcp__put_varint(&mail.bytes, entry - last);
            dcp__put_varint(&mail.bytes, (size_t)(p->chunk - m->chunks) - p->entry->first_chunk);
            dcp__put_box(&mail.bytes, p->entry->item.ndim, p->chunk->sizes, p->in_chunk, p->sizes);
            last = entry;
        }
    }
    mail.start[world] = mail.bytes.len;
    return dcp__mail_finish(&mail, out, err);
}

/* ---- the owner ---- */

/* A cell that a rank wants. */
typedef struct wish {
    dcp__cell cell;
    uint32_t rank;
} wish;

typedef struct decider {
    dcp_context *ctx;
    const dcp__metadata *m;
    uint32_t rank;
    int world;
    dcp__arena arena; /* boxes */
    wish *wishes;     /* rank by rank, in the order of their messages */
    size_t n, cap;
    size_t *first;  /* [world + 1] */
    wish **sorted;  /* by place, then by rank */
    uint32_t *some; /* [world]: room for a set */
    dcp__rank_sets sets;
    uint64_t *set_bytes, *set_done;
} decider;

/* The entry and the chunk that come next in a message; false if there are none such, or not of this owner. */
static bool find_chunk(const decider *o, dcp__wire *w, size_t *entry, dcp__piece *out)
{
    const dcp__metadata *m = o->m;
    *entry += (size_t)dcp__get_bounded(w, m->n_entries);
    uint64_t chunk = dcp__get_varint(w);
    if (w->bad || *entry >= m->n_entries || m->entries[*entry].item.kind != DCP_ITEM_TENSOR ||
        chunk >= m->entries[*entry].item.n_chunks) {
        return false;
    }
    out->entry = &m->entries[*entry];
    out->chunk = &m->chunks[out->entry->first_chunk + chunk];
    return out->chunk->storage != DCP__NO_STORAGE && dcp__share_owner(m, out->chunk, o->world) == o->rank;
}

static dcp_status take_wish(decider *o, int rank, dcp__wire *w, size_t *entry, dcp_error *err)
{
    void *wishes = o->wishes;
    dcp__piece p = {0};
    if (!find_chunk(o, w, entry, &p)) {
        return dcp__wire_fail(w, "wish", rank, err);
    }
    int ndim = p.entry->item.ndim;
    int64_t *box = dcp__arena_alloc(&o->arena, 2 * (size_t)ndim * sizeof *box);
    if (!box || !dcp__grow(o->ctx, &wishes, &o->cap, o->n + 1, sizeof *o->wishes)) {
        return dcp__nomem(err);
    }
    o->wishes = wishes;
    dcp__get_box(w, ndim, p.chunk->sizes, box, box + ndim);
    if (w->bad || !dcp__box_is_inside(ndim, p.chunk->sizes, box, box + ndim) || dcp__box_is_empty(ndim, box + ndim)) {
        return dcp__wire_fail(w, "wish", rank, err);
    }
    p.in_chunk = box;
    p.sizes = box + ndim;
    p.bytes = dcp_dtype_bytes(p.entry->item.dtype);
    for (int d = 0; d < ndim; d++) {
        p.bytes *= (uint64_t)p.sizes[d]; /* part of a tensor whose size in bytes fits */
    }
    o->wishes[o->n++] = (wish){{.piece = p, .set = DCP__NOBODY}, (uint32_t)rank};
    return DCP_OK;
}

static dcp_status take_wishes(decider *o, const dcp__parts *messages, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < o->world && status == DCP_OK; r++) {
        size_t len, entry = 0;
        const uint8_t *bytes = dcp__part(messages, r, &len);
        dcp__wire w = dcp__wire_of(bytes, len);
        while (dcp__wire_left(&w) && status == DCP_OK) {
            status = take_wish(o, r, &w, &entry, err);
        }
        o->first[r + 1] = o->n;
    }
    return status;
}

static int compare_wishes(const void *a, const void *b, void *m)
{
    const wish *x = *(wish *const *)a, *y = *(wish *const *)b;
    int order = dcp__cell_compare_places(m, &x->cell, &y->cell);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static size_t end_of_cell(const decider *o, size_t first)
{
    size_t end = first + 1;
    while (end < o->n && dcp__cell_compare(&o->sorted[first]->cell, &o->sorted[end]->cell) == 0) {
        end++;
    }
    return end;
}

/* Equal wishes of several ranks become a set. A rank that has the same twice reads it for itself the second time. */
static dcp_status find_sets(decider *o, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0, end; i < o->n && status == DCP_OK; i = end) {
        size_t n = 0;
        uint32_t set;
        end = end_of_cell(o, i);
        for (size_t k = i; k < end; k++) {
            if (n == 0 || o->some[n - 1] != o->sorted[k]->rank) {
                o->some[n++] = o->sorted[k]->rank;
            }
        }
        if (n < 2) {
            continue;
        }
        status = dcp__rank_sets_add(&o->sets, o->some, n, &set, err);
        for (size_t k = i; k < end && status == DCP_OK; k++) {
            bool is_first = k == i || o->sorted[k - 1]->rank != o->sorted[k]->rank;
            o->sorted[k]->cell.set = is_first ? set : DCP__NOBODY;
        }
    }
    return status;
}

/* Runs of equal length in bytes; a cell belongs to the run that its middle is in. Owners begin with different members, as each
 * may have one cell only. */
static uint32_t reader_of(const decider *o, uint32_t set, uint64_t bytes)
{
    size_t members = o->sets.sets[set].n;
    size_t start = (size_t)o->rank * members / (size_t)o->world;
    size_t run = (size_t)((o->set_done[set] + bytes / 2) / (o->set_bytes[set] / members + 1));
    o->set_done[set] += bytes;
    return o->sets.sets[set].ranks[(start + run) % members];
}

static void choose_readers(decider *o)
{
    for (size_t i = 0, end; i < o->n; i = end) {
        const dcp__cell *first = &o->sorted[i]->cell;
        end = end_of_cell(o, i);
        if (first->set == DCP__NOBODY) {
            continue;
        }
        uint32_t reader = reader_of(o, first->set, first->piece.bytes);
        for (size_t k = i; k < end; k++) {
            o->sorted[k]->cell.reader = reader;
        }
    }
}

static dcp_status decide(decider *o, dcp_error *err)
{
    o->sorted = dcp__calloc(o->ctx, o->n, sizeof(wish *));
    if (!o->sorted) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < o->n; i++) {
        o->sorted[i] = &o->wishes[i];
    }
    qsort_r(o->sorted, o->n, sizeof(wish *), compare_wishes, (void *)o->m);
    dcp_status status = find_sets(o, err);
    o->set_bytes = dcp__calloc(o->ctx, o->sets.n, sizeof *o->set_bytes);
    o->set_done = dcp__calloc(o->ctx, o->sets.n, sizeof *o->set_done);
    if (status != DCP_OK || !o->set_bytes || !o->set_done) {
        return status == DCP_OK ? dcp__nomem(err) : status;
    }
    for (size_t i = 0; i < o->n; i = end_of_cell(o, i)) {
        const dcp__cell *c = &o->sorted[i]->cell;
        if (c->set != DCP__NOBODY) {
            o->set_bytes[c->set] += c->piece.bytes;
        }
    }
    choose_readers(o);
    return DCP_OK;
}

/* ---- answers ---- */

static void put_set(dcp__buf *b, const dcp__rank_set *set)
{
    dcp__put_varint(b, set->n);
    for (size_t i = 0; i < set->n; i++) {
        dcp__put_varint(b, set->ranks[i] - (i ? set->ranks[i - 1] : 0));
    }
}

static size_t position_in(const dcp__rank_set *set, uint32_t rank)
{
    size_t i = 0;
    while (set->ranks[i] != rank) {
        i++;
    }
    return i;
}

/* told[set]: 1 + its number in this answer, 0: not mentioned yet. */
static void put_answer(const decider *o, int rank, uint32_t *told, dcp__buf *b)
{
    uint32_t n_told = 0;
    memset(told, 0, o->sets.n * sizeof *told);
    for (size_t i = o->first[rank]; i < o->first[rank + 1]; i++) {
        const dcp__cell *c = &o->wishes[i].cell;
        if (c->set == DCP__NOBODY) {
            dcp__put_varint(b, 0);
            continue;
        }
        const dcp__rank_set *set = &o->sets.sets[c->set];
        bool is_new = told[c->set] == 0;
        told[c->set] = is_new ? ++n_told : told[c->set];
        dcp__put_varint(b, told[c->set]);
        if (is_new) {
            put_set(b, set);
        }
        dcp__put_varint(b, position_in(set, c->reader));
    }
}

static dcp_status put_answers(const decider *o, dcp__mail *out, dcp_error *err)
{
    dcp__mail mail;
    uint32_t *told = dcp__calloc(o->ctx, o->sets.n, sizeof *told);
    dcp_status status = told ? dcp__mail_init(&mail, o->ctx, o->world, err) : dcp__nomem(err);
    if (status != DCP_OK) {
        dcp__free(o->ctx, told);
        return status;
    }
    for (int r = 0; r < o->world; r++) {
        mail.start[r] = mail.bytes.len;
        put_answer(o, r, told, &mail.bytes);
    }
    mail.start[o->world] = mail.bytes.len;
    dcp__free(o->ctx, told);
    return dcp__mail_finish(&mail, out, err);
}

dcp_status dcp__share_answer(dcp_context *ctx, const dcp__metadata *m, int rank, const dcp__parts *wishes, dcp__mail *out,
                             dcp_error *err)
{
    decider o = {.ctx = ctx, .m = m, .rank = (uint32_t)rank, .world = wishes->n};
    dcp__arena_init(&o.arena, ctx, UINT64_MAX);
    dcp__rank_sets_init(&o.sets, ctx);
    o.first = dcp__calloc(ctx, (size_t)o.world + 1, sizeof *o.first);
    o.some = dcp__calloc(ctx, (size_t)o.world, sizeof *o.some);
    dcp_status status = o.first && o.some ? take_wishes(&o, wishes, err) : dcp__nomem(err);
    status = status == DCP_OK ? decide(&o, err) : status;
    status = status == DCP_OK ? put_answers(&o, out, err) : status;
    dcp__free(ctx, o.wishes);
    dcp__free(ctx, o.first);
    dcp__free(ctx, o.sorted);
    dcp__free(ctx, o.some);
    dcp__free(ctx, o.set_bytes);
    dcp__free(ctx, o.set_done);
    dcp__rank_sets_reset(&o.sets);
    dcp__arena_reset(&o.arena);
    return status;
}

/* ---- what a rank hears ---- */

typedef struct listener {
    dcp__rank_sets *sets;
    uint32_t world, rank;
    dcp__wire w;
    uint32_t *heard; /* sets in the order of their first mention */
    size_t n_heard, cap_heard;
    uint32_t *some; /* [world] */
} listener;

/* Ascending, of two or more, this rank among them. */
static bool get_set(listener *l, size_t *n)
{
    bool has_me = false;
    uint64_t rank = 0;
    *n = (size_t)dcp__get_bounded(&l->w, l->world);
    for (size_t i = 0; i < *n && !l->w.bad; i++) {
        uint64_t distance = dcp__get_bounded(&l->w, l->world);
        rank += distance;
        if (rank >= l->world || (i > 0 && distance == 0)) {
            return false;
        }
        l->some[i] = (uint32_t)rank;
        has_me |= rank == l->rank;
    }
    return !l->w.bad && *n >= 2 && has_me;
}

static dcp_status hear_cell(listener *l, int owner, dcp__cell *c, dcp_error *err)
{
    uint64_t number = dcp__get_bounded(&l->w, l->n_heard + 1);
    if (number > l->n_heard) {
        size_t n;
        void *heard = l->heard;
        if (!get_set(l, &n)) {
            return dcp__wire_fail(&l->w, "answer", owner, err);
        }
        if (!dcp__grow(l->sets->ctx, &heard, &l->cap_heard, l->n_heard + 1, sizeof *l->heard)) {
            return dcp__nomem(err);
        }
        l->heard = heard;
        dcp_status status = dcp__rank_sets_add(l->sets, l->some, n, &l->heard[l->n_heard], err);
        if (status != DCP_OK) {
            return status;
        }
        l->n_heard++;
    }
    if (number > 0) {
        const dcp__rank_set *set = &l->sets->sets[l->heard[number - 1]];
        c->set = l->heard[number - 1];
        c->reader = set->ranks[dcp__get_bounded(&l->w, set->n - 1)];
    }
    return l->w.bad ? dcp__wire_fail(&l->w, "answer", owner, err) : DCP_OK;
}

dcp_status dcp__share_accept(dcp__rank_sets *sets, int world, int rank, int owner, const void *bytes, size_t len,
                             dcp__cell *cells, size_t n, dcp_error *err)
{
    listener l = {.sets = sets, .world = (uint32_t)world, .rank = (uint32_t)rank, .w = dcp__wire_of(bytes, len)};
    l.some = dcp__calloc(sets->ctx, (size_t)world, sizeof *l.some);
    dcp_status status = l.some ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = hear_cell(&l, owner, &cells[i], err);
    }
    if (status == DCP_OK && dcp__wire_left(&l.w)) {
        status = dcp__wire_fail(&l.w, "answer", owner, err);
    }
    dcp__free(sets->ctx, l.some);
    dcp__free(sets->ctx, l.heard);
    return status;
}
