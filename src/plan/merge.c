/* The metadata of all ranks from the fragments of the owners. */
#include <stdlib.h>

#include "plan/plan_mail.h"

/* A name's place in the order of first appearance. */
typedef struct placing {
    uint64_t key; /* rank, then place in its plan */
    uint32_t entry;
} placing;

typedef struct merger {
    dcp_context *ctx;
    const dcp__merge_input *in;
    dcp__metadata *m;
    placing *order;
    uint32_t *first_file; /* [world + 1]: files of each rank */
    dcp__container *containers;
    size_t n_containers, cap_containers;
    dcp__strmap known; /* containers, as bytes */
    dcp__wire_reader names;
} merger;

static dcp_status malformed(const dcp__wire *w, const char *what, int rank, dcp_error *err)
{
    return dcp__wire_fail(w, what, rank, err);
}

/* ---- facts ---- */

/* The number of a rank's files; each takes a byte at least. */
static dcp_status count_files(merger *g, dcp_error *err)
{
    uint64_t n = 0;
    for (int r = 0; r < g->in->world; r++) {
        dcp__wire w = dcp__wire_of(g->in->facts[r], g->in->fact_lens[r]);
        if (g->in->fact_lens[r]) {
            bool is_right = dcp__get_varint(&w) == DCP__WIRE_VERSION;
            n += dcp__get_bounded(&w, dcp__wire_left(&w));
            if (!is_right || w.bad) {
                return malformed(&w, "facts", r, err);
            }
        }
        if (n >= UINT32_MAX) {
            return dcp__fail(err, DCP_LIMIT, "too many files");
        }
        g->first_file[r + 1] = (uint32_t)n;
    }
    return DCP_OK;
}

static dcp_status take_file(merger *g, dcp__wire *w, int rank, size_t n, dcp_error *err)
{
    dcp__metadata *m = g->m;
    char name[64];
    uint64_t n_records = dcp__get_bounded(w, dcp__wire_left(w) / sizeof(dcp__digest));
    const uint8_t *bytes = dcp__get_bytes(w, n_records * sizeof(dcp__digest));
    if (w->bad) {
        return malformed(w, "facts", rank, err);
    }
    dcp__data_file_name(rank, g->in->generation, n, name);
    dcp__digest *digests = n_records ? dcp__arena_alloc(&m->arena, (size_t)n_records * sizeof *digests) : NULL;
    m->files[m->n_files] = dcp__arena_str(&m->arena, dcp_str_of(name));
    if ((n_records && !digests) || !m->files[m->n_files].ptr) {
        return dcp__arena_fail(&m->arena, err);
    }
    if (n_records) {
        memcpy(digests, bytes, (size_t)n_records * sizeof *digests);
    }
    m->own.records[m->n_files] = digests;
    m->own.n_records[m->n_files] = (size_t)n_records;
    m->n_files++;
    return DCP_OK;
}

/* Where a container comes among the leaves is known for those of rank 0, whose leaves come first. */
static dcp_status take_container(merger *g, dcp__wire *w, int rank, dcp_error *err)
{
    dcp__container c = {.before = SIZE_MAX};
    const uint8_t *start = w->p;
    uint64_t existing;
    dcp_status status = dcp__get_path(w, &g->m->arena, &c.path, &c.path_len, err);
    if (status != DCP_OK) {
        return status;
    }
    uint64_t n = dcp__get_varint(w);
    const uint8_t *kind = dcp__get_bytes(w, n);
    dcp_str bytes = {(const char *)start, (size_t)(w->p - start)};
    uint64_t before = dcp__get_varint(w);
    if (w->bad) {
        return malformed(w, "facts", rank, err);
    }
    c.kind = dcp__arena_str(&g->m->arena, (dcp_str){(const char *)kind, (size_t)n});
    c.before = rank == 0 && before ? (size_t)before - 1 : SIZE_MAX;
    if (!c.kind.ptr) {
        return dcp__arena_fail(&g->m->arena, err);
    }
    status = dcp__strmap_add(&g->known, bytes, 0, &existing, err);
    if (status != DCP_OK || existing != UINT64_MAX) {
        return status;
    }
    void *array = g->containers;
    if (!dcp__grow(g->ctx, &array, &g->cap_containers, g->n_containers + 1, sizeof c)) {
        return dcp__nomem(err);
    }
    g->containers = array;
    g->containers[g->n_containers++] = c;
    return DCP_OK;
}

static dcp_status take_facts(merger *g, int rank, dcp_error *err)
{
    dcp__wire w = dcp__wire_of(g->in->facts[rank], g->in->fact_lens[rank]);
    dcp_status status = DCP_OK;
    if (g->in->fact_lens[rank] == 0) {
        return DCP_OK;
    }
    dcp__get_varint(&w);
    size_t n = (size_t)dcp__get_varint(&w); /* both have been looked at */
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = take_file(g, &w, rank, i, err);
    }
    n = status == DCP_OK ? (size_t)dcp__get_bounded(&w, dcp__wire_left(&w)) : 0;
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = take_container(g, &w, rank, err);
    }
    return status == DCP_OK && (w.bad || dcp__wire_left(&w)) ? malformed(&w, "facts", rank, err) : status;
}

static dcp_status keep_containers(merger *g, dcp_error *err)
{
    dcp__own_facts *own = &g->m->own;
    dcp__container *copy = dcp__arena_alloc(&g->m->arena, g->n_containers * sizeof *copy);
    if (!copy) {
        return dcp__arena_fail(&g->m->arena, err);
    }
    if (g->n_containers) {
        memcpy(copy, g->containers, g->n_containers * sizeof *copy);
    }
    own->containers = copy;
    own->n_containers = g->n_containers;
    return DCP_OK;
}

/* ---- fragments ---- */

typedef struct counts {
    size_t entries, chunks;
} counts;

/* The head of a fragment; each name takes three bytes at least and each chunk four. */
static dcp_status take_head(dcp__wire *w, int rank, counts *n, dcp_error *err)
{
    bool is_right = dcp__get_varint(w) == DCP__WIRE_VERSION;
    n->entries = (size_t)dcp__get_bounded(w, dcp__wire_left(w));
    n->chunks = (size_t)dcp__get_bounded(w, dcp__wire_left(w));
    return is_right && !w->bad ? DCP_OK : malformed(w, "fragment", rank, err);
}

static dcp_status count_fragments(merger *g, counts *all, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < g->in->world && status == DCP_OK; r++) {
        counts n = {0, 0};
        dcp__wire w = dcp__wire_of(g->in->fragments[r], g->in->fragment_lens[r]);
        status = g->in->fragment_lens[r] ? take_head(&w, r, &n, err) : DCP_OK;
        all->entries += n.entries;
        all->chunks += n.chunks;
        if (status == DCP_OK && (all->entries >= UINT32_MAX || all->chunks >= UINT32_MAX)) {
            return dcp__fail(err, DCP_LIMIT, "too many chunks");
        }
    }
    return status;
}

typedef struct reading {
    dcp__wire w;
    int owner;
    uint64_t rank, writer, end;
    counts left;
} reading;

static dcp_status take_place(merger *g, reading *f, uint32_t *storage, dcp_error *err)
{
    dcp__placed p;
    f->writer = dcp__get_delta(&f->w, f->writer);
    dcp__get_placed(&f->w, &p, &f->end);
    if (f->w.bad || f->writer >= (uint64_t)g->in->world || p.file >= g->first_file[f->writer + 1] - g->first_file[f->writer] ||
        (p.is_transformed && !g->in->transform)) {
        return malformed(&f->w, "fragment", f->owner, err);
    }
    *storage = (uint32_t)g->m->n_storages++;
    g->m->storages[*storage] =
        (dcp__storage){p.offset, p.length, g->first_file[f->writer] + p.file, p.is_transformed, DCP__FORM_RECORD};
    return DCP_OK;
}

static dcp_status take_chunk(merger *g, reading *f, const dcp_item *item, dcp_error *err)
{
    size_t ndim = (size_t)item->ndim;
    int64_t *numbers = dcp__arena_alloc(&g->m->arena, 2 * ndim * sizeof *numbers);
    if (!numbers) {
        return dcp__arena_fail(&g->m->arena, err);
    }
    dcp__chunk *c = &g->m->chunks[g->m->n_chunks++];
    dcp__get_box(&f->w, item->ndim, item->extents, numbers, numbers + ndim);
    c->offsets = numbers;
    c->sizes = numbers + ndim;
    return take_place(g, f, &c->storage, err);
}

static dcp_status take_chunks(merger *g, reading *f, dcp__entry *e, dcp_error *err)
{
    size_t n = (size_t)dcp__get_bounded(&f->w, f->left.chunks);
    dcp_status status = DCP_OK;
    if (f->w.bad || (e->item.kind == DCP_ITEM_OBJECT && n != 1)) {
        return malformed(&f->w, "fragment", f->owner, err);
    }
    f->left.chunks -= n;
    e->item.n_chunks = n;
    e->first_chunk = g->m->n_chunks;
    e->storage = DCP__NO_STORAGE;
    if (e->item.kind == DCP_ITEM_OBJECT) {
        return take_place(g, f, &e->storage, err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = take_chunk(g, f, &e->item, err);
    }
    return status;
}

static dcp_status own_texts(merger *g, const dcp__wire_entry *said, dcp_item *item, dcp_error *err)
{
    dcp__arena *a = &g->m->arena;
    int64_t *extents = dcp__arena_alloc(a, (size_t)said->ndim * sizeof *extents);
    *item =
        (dcp_item){.fqn = dcp__arena_str(a, said->fqn), .kind = said->kind, .rank = -1, .dtype = said->dtype, .ndim = said->ndim};
    if (!extents || !item->fqn.ptr) {
        return dcp__arena_fail(a, err);
    }
    if (said->ndim) {
        memcpy(extents, said->extents, (size_t)said->ndim * sizeof *extents);
    }
    item->extents = extents;
    return dcp__get_entry_path(&g->names, a, item->fqn, &item->path, &item->path_len, err);
}

static dcp_status take_entry(merger *g, reading *f, dcp_error *err)
{
    dcp__wire_entry said;
    dcp__entry *e = &g->m->entries[g->m->n_entries];
    uint64_t step = dcp__get_bounded(&f->w, (uint64_t)g->in->world), ordinal = dcp__get_bounded(&f->w, UINT32_MAX), existing;
    dcp_status status = dcp__get_entry(&g->names, &f->w, &said, err);
    if (status != DCP_OK) {
        return status;
    }
    f->rank += step;
    if (f->w.bad || f->rank >= (uint64_t)g->in->world) {
        return malformed(&f->w, "fragment", f->owner, err);
    }
    g->order[g->m->n_entries] = (placing){f->rank << 32 | ordinal, (uint32_t)g->m->n_entries};
    status = own_texts(g, &said, &e->item, err);
    status = status == DCP_OK ? dcp__strmap_add(&g->m->by_fqn, e->item.fqn, g->m->n_entries, &existing, err) : status;
    if (status == DCP_OK && existing != UINT64_MAX) {
        return dcp__fail(err, DCP_MISMATCH, "item \"%s\" is saved twice", dcp__print(e->item.fqn).text);
    }
    g->m->n_entries++;
    return status == DCP_OK ? take_chunks(g, f, e, err) : status;
}

static dcp_status take_fragment(merger *g, int owner, dcp_error *err)
{
    reading f = {.w = dcp__wire_of(g->in->fragments[owner], g->in->fragment_lens[owner]), .owner = owner};
    if (g->in->fragment_lens[owner] == 0) {
        return DCP_OK;
    }
    dcp__wire_reader_restart(&g->names);
    dcp_status status = take_head(&f.w, owner, &f.left, err);
    for (; f.left.entries > 0 && status == DCP_OK; f.left.entries--) {
        status = take_entry(g, &f, err);
    }
    return status == DCP_OK && dcp__wire_left(&f.w) ? malformed(&f.w, "fragment", owner, err) : status;
}

/* ---- order ---- */

static int compare_placings(const void *a, const void *b)
{
    const placing *x = a, *y = b;
    if (x->key != y->key) {
        return x->key < y->key ? -1 : 1;
    }
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

static bool is_in_order(const merger *g)
{
    for (size_t i = 1; i < g->m->n_entries; i++) {
        if (compare_placings(&g->order[i - 1], &g->order[i]) > 0) {
            return false;
        }
    }
    return true;
}

/* Tables in which entry after entry has its chunks, and storages stand in the same order. */
typedef struct tables {
    dcp__entry *entries;
    dcp__chunk *chunks;
    dcp__storage *storages;
    size_t n_chunks, n_storages;
} tables;

static uint32_t move_storage(const dcp__metadata *m, tables *t, uint32_t storage)
{
    t->storages[t->n_storages] = m->storages[storage];
    return (uint32_t)t->n_storages++;
}

static void move_entry(const dcp__metadata *m, tables *t, const dcp__entry *from, dcp__entry *to)
{
    *to = *from;
    to->first_chunk = t->n_chunks;
    if (from->item.kind == DCP_ITEM_OBJECT) {
        to->storage = move_storage(m, t, from->storage);
        return;
    }
    for (size_t c = 0; c < from->item.n_chunks; c++) {
        dcp__chunk *chunk = &t->chunks[t->n_chunks++];
        *chunk = m->chunks[from->first_chunk + c];
        chunk->storage = move_storage(m, t, chunk->storage);
    }
}

static void exchange(dcp__metadata *m, tables *t)
{
    tables old = {m->entries, m->chunks, m->storages, 0, 0};
    m->entries = t->entries;
    m->chunks = t->chunks;
    m->storages = t->storages;
    *t = old;
}

static dcp_status put_in_order(merger *g, dcp_error *err)
{
    dcp__metadata *m = g->m;
    if (is_in_order(g)) {
        return DCP_OK;
    }
    tables t = {.entries = dcp__calloc(g->ctx, m->n_entries, sizeof *t.entries),
                .chunks = dcp__calloc(g->ctx, m->n_chunks, sizeof *t.chunks),
                .storages = dcp__calloc(g->ctx, m->n_storages, sizeof *t.storages)};
    dcp_status status = t.entries && t.chunks && t.storages ? DCP_OK : dcp__nomem(err);
    if (status == DCP_OK) {
        qsort(g->order, m->n_entries, sizeof *g->order, compare_placings);
        for (size_t i = 0; i < m->n_entries; i++) {
            move_entry(m, &t, &m->entries[g->order[i].entry], &t.entries[i]);
        }
        exchange(m, &t);
        dcp__strmap_reset(&m->by_fqn);
        for (size_t i = 0; i < m->n_entries && status == DCP_OK; i++) {
            status = dcp__strmap_add(&m->by_fqn, m->entries[i].item.fqn, i, NULL, err);
        }
    }
    dcp__free(g->ctx, t.entries);
    dcp__free(g->ctx, t.chunks);
    dcp__free(g->ctx, t.storages);
    return status;
}

/* ---- all of it ---- */

static dcp_status allocate(merger *g, dcp_error *err)
{
    counts n = {0, 0};
    dcp__metadata *m = g->m;
    dcp_status status = count_fragments(g, &n, err);
    status = status == DCP_OK ? count_files(g, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    size_t n_files = g->first_file[g->in->world];
    g->order = dcp__calloc(g->ctx, n.entries, sizeof *g->order);
    m->own.records = dcp__arena_alloc(&m->arena, n_files * sizeof *m->own.records);
    m->own.n_records = dcp__arena_alloc(&m->arena, n_files * sizeof *m->own.n_records);
    if (!g->order || !m->own.records || !m->own.n_records) {
        return dcp__nomem(err);
    }
    return dcp__metadata_reserve(m, n.entries, n.chunks, n.entries + n.chunks, n_files, 1, err);
}

static dcp_status set_transform(merger *g, dcp_error *err)
{
    if (g->in->transform) {
        g->m->transforms[1] = dcp__arena_str(&g->m->arena, dcp_str_of(g->in->transform));
        if (!g->m->transforms[1].ptr) {
            return dcp__arena_fail(&g->m->arena, err);
        }
        g->m->n_transforms = 2;
    }
    return DCP_OK;
}

static dcp_status merge_all(merger *g, dcp_error *err)
{
    dcp_status status = allocate(g, err);
    status = status == DCP_OK ? set_transform(g, err) : status;
    for (int r = 0; r < g->in->world && status == DCP_OK; r++) {
        status = take_facts(g, r, err);
    }
    for (int r = 0; r < g->in->world && status == DCP_OK; r++) {
        status = take_fragment(g, r, err);
    }
    status = status == DCP_OK ? keep_containers(g, err) : status;
    return status == DCP_OK ? put_in_order(g, err) : status;
}

dcp_status dcp__merge_fragments(dcp_context *ctx, const dcp__merge_input *in, dcp__metadata **out, dcp_error *err)
{
    merger g = {.ctx = dcp__context(ctx), .in = in};
    dcp_status status = dcp__metadata_create(g.ctx, &g.m, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__strmap_init(&g.known, g.ctx);
    dcp__wire_reader_init(&g.names, g.ctx);
    g.m->own.present = true;
    g.m->own.world = in->world;
    g.first_file = dcp__calloc(g.ctx, (size_t)in->world + 1, sizeof *g.first_file);
    status = g.first_file ? merge_all(&g, err) : dcp__nomem(err);
    dcp__free(g.ctx, g.order);
    dcp__free(g.ctx, g.first_file);
    dcp__free(g.ctx, g.containers);
    dcp__strmap_reset(&g.known);
    dcp__wire_reader_reset(&g.names);
    if (status != DCP_OK) {
        dcp__metadata_free(g.m);
        return status;
    }
    *out = g.m;
    return DCP_OK;
}
