/* After the writing: what ranks tell owners and the coordinator, and the parts of the metadata that owners make of it.
 *
 * A fragment is the version, the numbers of names and chunks, and then each name: the rank where it is first seen (from that of
 * the name before) and its place in that rank's plan, what is said about it, the number of its chunks, and for each chunk its
 * box, its writer (from that of the chunk before) and where it is. */
#include <stdio.h>

#include "plan/owner.h"

void dcp__data_file_name(int rank, const char *generation, size_t n, char name[64])
{
    bool has_generation = generation && generation[0];
    snprintf(name, 64, "__%d_%.32s%s%zu.distcp", rank, has_generation ? generation : "", has_generation ? "_" : "", n);
}

/* ---- results ---- */

static dcp_status take_results(dcp__owner *o, int rank, dcp__wire *w, dcp_error *err)
{
    uint64_t end = 0;
    bool is_open = false;
    for (size_t i = o->first_item[rank]; i < o->first_item[rank + 1]; i++) {
        uint32_t c = o->items[i];
        if (c == DCP__NONE || o->chunks[c].writer != (uint32_t)rank) {
            continue;
        }
        if (!is_open && dcp__get_varint(w) != DCP__WIRE_VERSION) {
            dcp__wire_spoil(w);
        }
        is_open = true;
        dcp__get_placed(w, &o->placed[c], &end);
        o->n_placed++;
    }
    return w->bad || dcp__wire_left(w) ? dcp__wire_fail(w, "result", rank, err) : DCP_OK;
}

dcp_status dcp__owner_take_results(dcp__owner *o, int rank, const void *bytes, size_t len, dcp_error *err)
{
    dcp__wire w = dcp__wire_of(bytes, len);
    if (rank != o->next_result || rank >= o->next_rank) {
        return dcp__fail(err, DCP_STATE, "result of rank %d comes out of order", rank);
    }
    if (!o->placed) {
        o->placed = dcp__calloc(o->ctx, o->n_chunks, sizeof *o->placed);
    }
    if (!o->placed) {
        return dcp__nomem(err);
    }
    o->next_result++;
    return take_results(o, rank, &w, err);
}

/* ---- fragments ---- */

typedef struct last_chunk {
    uint64_t writer, end;
} last_chunk;

static void put_chunks(const dcp__owner *o, const dcp__owned_entry *e, last_chunk *last, dcp__buf *b)
{
    dcp__put_varint(b, e->n_chunks);
    for (uint32_t i = e->first_chunk; i != DCP__NONE; i = o->chunks[i].next) {
        const dcp__owned_chunk *c = &o->chunks[i];
        if (e->is.kind == DCP_ITEM_TENSOR) {
            dcp__put_box(b, e->is.ndim, e->is.extents, dcp__chunk_offsets(o, c), dcp__chunk_sizes(o, c));
        }
        dcp__put_delta(b, c->writer, last->writer);
        dcp__put_placed(b, &o->placed[i], &last->end);
        last->writer = c->writer;
    }
}

static void put_fragment(const dcp__owner *o, dcp__wire_writer *names, dcp__buf *b)
{
    last_chunk last = {0, 0};
    uint32_t rank = 0;
    dcp__buf_put_byte(b, DCP__WIRE_VERSION);
    dcp__put_varint(b, o->n_entries);
    dcp__put_varint(b, o->n_chunks);
    for (size_t i = 0; i < o->n_entries; i++) {
        const dcp__owned_entry *e = &o->entries[i];
        dcp__put_varint(b, e->first_rank - rank);
        dcp__put_varint(b, e->ordinal);
        dcp__put_entry(names, b, &e->is);
        put_chunks(o, e, &last, b);
        rank = e->first_rank;
    }
}

dcp_status dcp__owner_fragment(const dcp__owner *o, dcp__buf *out, dcp_error *err)
{
    size_t start = out->len;
    dcp__wire_writer names;
    if (o->next_result != o->local->opts.world || o->n_placed != o->n_chunks) {
        return dcp__fail(err, DCP_STATE, "results of %zu of %zu chunks from %d of %d ranks", o->n_placed, o->n_chunks,
                         o->next_result, o->local->opts.world);
    }
    if (o->n_entries == 0) {
        return DCP_OK;
    }
    dcp__wire_writer_init(&names, o->ctx);
    put_fragment(o, &names, out);
    dcp__wire_writer_reset(&names);
    if (out->failed) {
        out->len = start;
        return dcp__nomem(err);
    }
    return DCP_OK;
}

/* ---- facts: version; files, each with its number of digests and these; containers ---- */

void dcp__put_container(dcp__buf *b, const dcp__container *c)
{
    dcp__put_path(b, c->path, c->path_len);
    dcp__put_varint(b, c->kind.len);
    dcp__buf_put(b, c->kind.ptr, c->kind.len);
}

dcp_status dcp__facts_encode(const dcp__local *l, const dcp__hellos *hellos, const dcp__file_facts *files, size_t n_files,
                             dcp__buf *out, dcp_error *err)
{
    bool is_known = l->opts.rank > 0 && hellos->of[l->opts.rank].leader == 0;
    size_t start = out->len, n = is_known ? 0 : l->plan->n_containers;
    if (n_files == 0 && n == 0) {
        return DCP_OK;
    }
    dcp__buf_put_byte(out, DCP__WIRE_VERSION);
    dcp__put_varint(out, n_files);
    for (size_t i = 0; i < n_files; i++) {
        dcp__put_varint(out, files[i].n_records);
        dcp__buf_put(out, files[i].records, files[i].n_records * sizeof *files[i].records);
    }
    dcp__put_varint(out, n);
    for (size_t i = 0; i < n; i++) {
        size_t before = l->plan->containers[i].before;
        dcp__put_container(out, &l->plan->containers[i]);
        dcp__put_varint(out, before == SIZE_MAX ? 0 : before + 1);
    }
    if (out->failed) {
        out->len = start;
        return dcp__nomem(err);
    }
    return DCP_OK;
}
