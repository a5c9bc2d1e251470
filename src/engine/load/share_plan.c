/* Finding out what several ranks want. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "engine/load/share.h"
#include "engine/save/group_plan.h"

#define MOST_BUNDLE_BYTES ((uint64_t)8 << 20)
#define LEAST_BUNDLE_BYTES ((uint64_t)64 << 10)
#define CELL_BYTES ((uint64_t)1 << 20) /* small enough to be dealt out evenly, large enough for long reads */

/* ---- is there anything to share? ---- */

/* Equal on ranks for which a place in the metadata means the same bytes, and that look at the same checksums. With a save id it
 * is known already that they have opened the same checkpoint; without one the path has to do. Never 0. */
static uint64_t fingerprint(const dcp_checkpoint *ck)
{
    const dcp__metadata *m = ck->meta;
    const uint64_t parts[] = {m->n_entries,
                              m->n_chunks,
                              m->n_files,
                              dcp__xxh3_64(m->storages, m->n_storages * sizeof *m->storages),
                              m->save_id.ptr ? 0 : dcp__xxh3_64(ck->path, strlen(ck->path)),
                              ck->check_crc};
    uint64_t h = dcp__xxh3_64(parts, sizeof parts);
    return h ? h : 1;
}

/* Two buffers to send from, and one for each rank that sends at a time, out of a quarter of the budget: half is for reading. */
static uint64_t bundle_bytes(uint64_t memory_bytes, int world)
{
    uint64_t senders = (uint64_t)(world < DCP__MOST_SENDERS ? world : DCP__MOST_SENDERS);
    uint64_t bytes = memory_bytes / 4 / (senders + 2);
    return bytes > MOST_BUNDLE_BYTES ? MOST_BUNDLE_BYTES : bytes < LEAST_BUNDLE_BYTES ? LEAST_BUNDLE_BYTES : bytes;
}

/* Collective. 0 in *bytes: nothing is shared. */
static dcp_status agree_to_share(const dcp__step *step, const dcp__share *s, dcp_status mine, bool wanted, uint64_t *bytes,
                                 dcp_error *err)
{
    uint64_t *of = dcp__alloc(step->ctx, (size_t)s->world * sizeof *of);
    uint64_t least = UINT64_MAX;
    mine = mine == DCP_OK && !of ? dcp__nomem(err) : mine;
    dcp_status status = dcp__agree_u64(step, mine, mine == DCP_OK && wanted ? fingerprint(s->ck) : 0, of, err);
    *bytes = 0;
    bool all_same = status == DCP_OK && s->world > 1 && of[0] != 0;
    for (int r = 1; all_same && r < s->world; r++) {
        all_same = of[r] == of[0];
    }
    if (all_same) {
        status = dcp__agree_u64(step, DCP_OK, s->ck->ctx->memory_bytes, of, err);
        for (int r = 0; r < s->world && status == DCP_OK; r++) {
            least = of[r] < least ? of[r] : least;
        }
        *bytes = bundle_bytes(least, s->world);
    }
    dcp__free(step->ctx, of);
    return status;
}

/* ---- asking ---- */

static int compare_by_owner(const void *a, const void *b)
{
    const dcp__cell *x = a, *y = b;
    return x->owner != y->owner ? (x->owner > y->owner) - (x->owner < y->owner) : dcp__cell_compare(x, y);
}

static dcp_status make_wish(dcp__share *s, dcp__mail *out, dcp_error *err)
{
    s->cell_bytes = s->bundle_bytes < CELL_BYTES ? s->bundle_bytes : CELL_BYTES;
    dcp_status status = dcp__cells_cut(&s->reads, s->cell_bytes, &s->cells, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < s->cells.n; i++) {
        s->cells.cells[i].owner = dcp__share_owner(s->ck->meta, s->cells.cells[i].piece.chunk, s->world);
    }
    if (s->cells.n) {
        qsort(s->cells.cells, s->cells.n, sizeof *s->cells.cells, compare_by_owner);
    }
    return dcp__share_wish(s->ck->ctx, s->ck->meta, s->cells.cells, s->cells.n, s->world, out, err);
}

static dcp_status accept_all(dcp__share *s, const dcp__parts *answers, dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t first = 0;
    for (int o = 0; o < s->world && status == DCP_OK; o++) {
        size_t len, n = 0;
        const uint8_t *bytes = dcp__part(answers, o, &len);
        while (first + n < s->cells.n && s->cells.cells[first + n].owner == (uint32_t)o) {
            n++;
        }
        status = dcp__share_accept(&s->sets, s->world, s->rank, o, bytes, len, s->cells.cells + first, n, err);
        first += n;
    }
    return status;
}

/* ---- sorting what came back ---- */

static int compare_sets(const dcp__rank_set *a, const dcp__rank_set *b)
{
    for (size_t i = 0; i < a->n && i < b->n; i++) {
        if (a->ranks[i] != b->ranks[i]) {
            return a->ranks[i] < b->ranks[i] ? -1 : 1;
        }
    }
    return (a->n > b->n) - (a->n < b->n);
}

/* Sender and receivers come to the same order on their own: by sender, then by set, so that many cells go to the same ranks at a
 * time, then by place. */
static int compare_to_send(const void *a, const void *b, void *arg)
{
    const dcp__cell *x = *(dcp__cell *const *)a, *y = *(dcp__cell *const *)b;
    const dcp__share *s = arg;
    if (x->reader != y->reader) {
        return x->reader < y->reader ? -1 : 1;
    }
    if (x->set != y->set) {
        return compare_sets(&s->sets.sets[x->set], &s->sets.sets[y->set]);
    }
    return dcp__cell_compare_places(s->ck->meta, x, y);
}

static dcp_status cut_records(dcp__share *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < s->cells.n && status == DCP_OK; i++) {
        const dcp__cell *c = &s->cells.cells[i];
        if (c->is_record && c->set != DCP__NOBODY) {
            status = dcp__cells_cut_record(c, s->ck->meta, s->cell_bytes, &s->records, err);
        }
    }
    return status;
}

static void list_shared(dcp__share *s, dcp__cell *c)
{
    if (c->reader == (uint32_t)s->rank) {
        s->outgoing[s->n_outgoing++] = c;
    } else {
        s->incoming[s->n_incoming++] = c;
        s->first_incoming[c->reader + 1]++;
    }
}

static dcp_status sort_shared(dcp__share *s, dcp_error *err)
{
    dcp_status status = cut_records(s, err);
    if (status != DCP_OK) {
        return status;
    }
    s->outgoing = dcp__calloc(s->ck->ctx, s->cells.n + s->records.n, sizeof(dcp__cell *));
    s->incoming = dcp__calloc(s->ck->ctx, s->cells.n + s->records.n, sizeof(dcp__cell *));
    s->first_incoming = dcp__calloc(s->ck->ctx, (size_t)s->world + 1, sizeof *s->first_incoming);
    if (!s->outgoing || !s->incoming || !s->first_incoming) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->cells.n; i++) {
        dcp__cell *c = &s->cells.cells[i];
        if (!c->is_record && c->set != DCP__NOBODY) {
            list_shared(s, c);
        }
    }
    for (size_t i = 0; i < s->records.n; i++) {
        list_shared(s, &s->records.cells[i]);
    }
    for (int r = 0; r < s->world; r++) {
        s->first_incoming[r + 1] += s->first_incoming[r];
    }
    qsort_r(s->outgoing, s->n_outgoing, sizeof(dcp__cell *), compare_to_send, s);
    qsort_r(s->incoming, s->n_incoming, sizeof(dcp__cell *), compare_to_send, s);
    return DCP_OK;
}

/* Pieces of which nothing is shared are read as they are; of others the cells that nobody else wants. A record is one cell, so it
 * is shared by all of its pieces or by none. */
static dcp_status find_alone(dcp__share *s, dcp_error *err)
{
    const dcp__read_plan *r = &s->reads;
    bool *has_shared = dcp__calloc(s->ck->ctx, r->n_pieces, sizeof *has_shared);
    s->alone = dcp__calloc(s->ck->ctx, r->n_pieces + s->cells.n, sizeof *s->alone);
    if (!has_shared || !s->alone) {
        dcp__free(s->ck->ctx, has_shared);
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->cells.n; i++) {
        const dcp__cell *c = &s->cells.cells[i];
        for (size_t k = 0; k < c->n; k++) {
            has_shared[c->first + k] |= c->set != DCP__NOBODY;
        }
    }
    for (size_t i = 0; i < r->n_pieces; i++) {
        if (!has_shared[i]) {
            s->alone[s->n_alone++] = r->pieces[i];
        }
    }
    for (size_t i = 0; i < s->cells.n; i++) {
        const dcp__cell *c = &s->cells.cells[i];
        if (has_shared[c->first] && c->set == DCP__NOBODY) {
            s->alone[s->n_alone++] = c->piece;
        }
    }
    dcp__free(s->ck->ctx, has_shared);
    return DCP_OK;
}

/* ---- all ---- */

static dcp_status ask(const dcp__step *step, dcp__share *s, dcp_error *err)
{
    dcp__mail mail = {0};
    dcp__parts wishes = {0}, answers = {0};
    dcp_status mine = make_wish(s, &mail, err);
    dcp_status status = dcp__exchange_mail(step, mine, &mail, &wishes, err);
    if (status == DCP_OK) {
        mine = dcp__share_answer(s->ck->ctx, s->ck->meta, s->rank, &wishes, &mail, err);
        status = dcp__exchange_mail(step, mine, &mail, &answers, err);
    }
    if (status == DCP_OK) {
        mine = accept_all(s, &answers, err);
        mine = mine == DCP_OK ? sort_shared(s, err) : mine;
        mine = mine == DCP_OK ? find_alone(s, err) : mine;
        status = dcp__agree(step, mine, err);
    }
    dcp__parts_free(&wishes);
    dcp__parts_free(&answers);
    return status;
}

static dcp_status take_all_alone(dcp__share *s, dcp_error *err)
{
    dcp_status status = find_alone(s, err);
    s->first_incoming = dcp__calloc(s->ck->ctx, (size_t)s->world + 1, sizeof *s->first_incoming);
    return status == DCP_OK && !s->first_incoming ? dcp__nomem(err) : status;
}

dcp_status dcp__share_plan(const dcp__step *step, dcp_checkpoint *ck, dcp_status mine, const dcp_read_request *requests, size_t n,
                           bool wanted, dcp__share *s, dcp_error *err)
{
    *s = (dcp__share){.ck = ck, .rank = dcp__step_rank(step), .world = dcp__step_size(step)};
    if (mine == DCP_OK) {
        dcp__rank_sets_init(&s->sets, ck->ctx);
        dcp__cells_init(&s->cells, ck->ctx);
        dcp__cells_init(&s->records, ck->ctx);
        mine = dcp__plan_read(ck, requests, n, &s->reads, err);
    }
    dcp_status status = agree_to_share(step, s, mine, wanted, &s->bundle_bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    return s->bundle_bytes ? ask(step, s, err) : dcp__agree(step, take_all_alone(s, err), err);
}

void dcp__share_reset(dcp__share *s)
{
    if (s->sets.ctx) {
        dcp__read_plan_reset(&s->reads);
        dcp__cells_reset(&s->cells);
        dcp__cells_reset(&s->records);
        dcp__rank_sets_reset(&s->sets);
        dcp__free(s->ck->ctx, s->outgoing);
        dcp__free(s->ck->ctx, s->incoming);
        dcp__free(s->ck->ctx, s->first_incoming);
        dcp__free(s->ck->ctx, s->alone);
    }
}
