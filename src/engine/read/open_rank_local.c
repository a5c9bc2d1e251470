/* Rank-local checkpoints: one metadata file for each rank, joined into one (formats.md 6). Chunks of sharded tensors are united;
 * a name that several ranks hold whole is one value for each of them. */
#include <stdio.h>
#include <string.h>

#include "engine/read/checkpoint.h"
#include "state/strided.h"

/* One rank's entry of a name. */
typedef struct contribution {
    uint32_t part, entry;
    struct contribution *next;
} contribution;

/* A name and all who have it, in order of ranks. */
typedef struct group {
    contribution *first, *last;
    size_t count;
} group;

typedef struct join {
    dcp_checkpoint *ck;
    const int *ranks;
    dcp__metadata *meta;
    group *groups;
    size_t n_groups;
    uint32_t *first_storage; /* [part]: where its storages begin */
    dcp__strmap files, transforms;
} join;

static const dcp__entry *entry_of(const join *j, const contribution *c)
{
    return &j->ck->parts[c->part]->entries[c->entry];
}

/* ---- reading the parts ---- */

static dcp_status read_part(dcp_checkpoint *ck, int rank, dcp_error *err)
{
    char name[32];
    snprintf(name, sizeof name, "__%d.metadata", rank);
    dcp_status status = dcp__read_metadata_file(ck, name, NULL, &ck->parts[ck->n_parts], err);
    ck->n_parts += status == DCP_OK;
    return status;
}

static dcp_status check_ranks(const int *ranks, size_t n, dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        if (ranks[i] != (int)i) {
            return dcp__fail(err, DCP_NOT_FOUND, "__%zu.metadata is missing: metadata of ranks up to %d is there", i,
                             ranks[n - 1]);
        }
    }
    return DCP_OK;
}

/* Our own facts tell how many ranks there were, and that they took part in the same save. */
static dcp_status check_same_save(const dcp_checkpoint *ck, dcp_error *err)
{
    const dcp__own_facts *first = &ck->parts[0]->own;
    for (size_t i = 0; i < ck->n_parts; i++) {
        const dcp__own_facts *own = &ck->parts[i]->own;
        bool is_same = own->present == first->present && own->save_id.len == first->save_id.len &&
                       (own->save_id.len == 0 || memcmp(own->save_id.ptr, first->save_id.ptr, own->save_id.len) == 0);
        if (!is_same) {
            return dcp__fail(err, DCP_FORMAT, "__%zu.metadata comes from another save than __0.metadata", i);
        }
    }
    if (first->present && first->world > 0 && (size_t)first->world < ck->n_parts) {
        return dcp__fail(err, DCP_FORMAT, "__%zu.metadata is of no rank of the save, which had %d", ck->n_parts - 1,
                         first->world);
    }
    if (first->present && first->world > 0 && (size_t)first->world != ck->n_parts) {
        return dcp__fail(err, DCP_NOT_FOUND, "__%zu.metadata is missing: the save had %d rank%s", ck->n_parts, first->world,
                         dcp__plural((uint64_t)first->world));
    }
    return DCP_OK;
}

/* ---- what each rank has ---- */

static size_t total(const dcp_checkpoint *ck, size_t offset)
{
    size_t sum = 0;
    for (size_t p = 0; p < ck->n_parts; p++) {
        size_t n;
        memcpy(&n, (const char *)ck->parts[p] + offset, sizeof n);
        sum += n;
    }
    return sum;
}
#define TOTAL(ck, field) total(ck, offsetof(dcp__metadata, field))

static bool has_elements(const dcp__metadata *m, const dcp__entry *e)
{
    if (e->item.kind != DCP_ITEM_TENSOR || e->item.bytes == 0) {
        return true; /* a tensor without elements counts as it is */
    }
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        int64_t elems;
        if (dcp__elems(e->item.ndim, m->chunks[e->first_chunk + i].sizes, &elems) && elems > 0) {
            return true;
        }
    }
    return false;
}

static bool are_empty_alike(const dcp__entry *a, const dcp__entry *b)
{
    const dcp_item *x = &a->item, *y = &b->item;
    return x->kind == DCP_ITEM_TENSOR && y->kind == DCP_ITEM_TENSOR && x->bytes == 0 && y->bytes == 0 && x->dtype == y->dtype &&
           x->ndim == y->ndim && memcmp(x->extents, y->extents, (size_t)x->ndim * sizeof *x->extents) == 0;
}

static dcp_status add_contribution(join *j, uint32_t part, uint32_t entry, dcp_error *err)
{
    const dcp__metadata *m = j->ck->parts[part];
    uint64_t existing;
    dcp_status status = dcp__strmap_add(&j->meta->by_fqn, m->entries[entry].item.fqn, j->n_groups, &existing, err);
    contribution *c = dcp__arena_alloc(&j->meta->arena, sizeof *c);
    if (status != DCP_OK || !c) {
        return status != DCP_OK ? status : dcp__arena_fail(&j->meta->arena, err);
    }
    group *g = &j->groups[existing == UINT64_MAX ? j->n_groups++ : existing];
    if (g->count && (!has_elements(m, &m->entries[entry]) || are_empty_alike(entry_of(j, g->first), &m->entries[entry]))) {
        return DCP_OK; /* an empty shard says nothing that the others do not, nor does another empty tensor */
    }
    if (g->count == 1 && !has_elements(j->ck->parts[g->first->part], entry_of(j, g->first))) {
        *g = (group){0};
    }
    *c = (contribution){part, entry, NULL};
    *(g->last ? &g->last->next : &g->first) = c;
    g->last = c;
    g->count++;
    return DCP_OK;
}

static dcp_status group_by_name(join *j, dcp_error *err)
{
    for (uint32_t p = 0; p < j->ck->n_parts; p++) {
        for (uint32_t e = 0; e < j->ck->parts[p]->n_entries; e++) {
            dcp_status status = add_contribution(j, p, e, err);
            if (status != DCP_OK) {
                return status;
            }
        }
    }
    return DCP_OK;
}

/* ---- files and storages ---- */

static dcp_status intern(dcp__strmap *map, dcp_str *list, size_t *n, dcp_str name, uint32_t *index, dcp_error *err)
{
    uint64_t existing;
    dcp_status status = dcp__strmap_add(map, name, *n, &existing, err);
    if (status != DCP_OK) {
        return status;
    }
    if (existing == UINT64_MAX) {
        existing = *n;
        list[(*n)++] = name;
    }
    *index = (uint32_t)existing;
    return DCP_OK;
}

static dcp_status join_storages(join *j, dcp_error *err)
{
    dcp__metadata *m = j->meta;
    for (size_t p = 0; p < j->ck->n_parts; p++) {
        const dcp__metadata *part = j->ck->parts[p];
        j->first_storage[p] = (uint32_t)m->n_storages;
        for (size_t i = 0; i < part->n_storages; i++) {
            dcp__storage s = part->storages[i];
            uint32_t file, transforms;
            dcp_status status = intern(&j->files, m->files, &m->n_files, part->files[s.file], &file, err);
            if (status == DCP_OK) {
                status =
                    intern(&j->transforms, m->transforms, &m->n_transforms, part->transforms[s.transforms], &transforms, err);
            }
            if (status != DCP_OK) {
                return status;
            }
            if (transforms > UINT16_MAX) {
                return dcp__fail(err, DCP_LIMIT, "more than %d lists of transforms", UINT16_MAX);
            }
            s.file = file;
            s.transforms = (uint16_t)transforms;
            m->storages[m->n_storages++] = s;
        }
    }
    return DCP_OK;
}

/* Digests of the files; each file belongs to one rank. */
static dcp_status join_own(join *j, dcp_error *err)
{
    dcp__metadata *m = j->meta;
    m->own = j->ck->parts[0]->own;
    m->own.rank = -1;
    m->own.records = dcp__arena_alloc(&m->arena, m->n_files * sizeof *m->own.records);
    m->own.n_records = dcp__arena_alloc(&m->arena, m->n_files * sizeof *m->own.n_records);
    if (!m->own.records || !m->own.n_records) {
        return dcp__arena_fail(&m->arena, err);
    }
    memset(m->own.records, 0, m->n_files * sizeof *m->own.records);
    memset(m->own.n_records, 0, m->n_files * sizeof *m->own.n_records);
    for (size_t p = 0; p < j->ck->n_parts; p++) {
        const dcp__metadata *part = j->ck->parts[p];
        for (size_t f = 0; part->own.records && f < part->n_files; f++) {
            uint64_t index;
            if (dcp__strmap_get(&j->files, part->files[f], &index) && part->own.records[f]) {
                m->own.records[index] = part->own.records[f];
                m->own.n_records[index] = part->own.n_records[f];
            }
        }
    }
    return DCP_OK;
}

/* ---- entries ---- */

static void add_chunk(join *j, const contribution *c, dcp__chunk chunk)
{
    if (chunk.storage != DCP__NO_STORAGE) {
        chunk.storage += j->first_storage[c->part];
    }
    j->meta->chunks[j->meta->n_chunks++] = chunk;
}

static dcp__entry *add_entry(join *j, const contribution *c, int rank)
{
    dcp__entry *e = &j->meta->entries[j->meta->n_entries++];
    *e = *entry_of(j, c);
    e->item.rank = rank;
    e->first_chunk = j->meta->n_chunks;
    if (e->storage != DCP__NO_STORAGE) {
        e->storage += j->first_storage[c->part];
    }
    return e;
}

/* An entry with the chunks of one rank alone. */
static void add_single(join *j, const contribution *c, int rank)
{
    const dcp__entry *from = entry_of(j, c);
    add_entry(j, c, rank);
    for (size_t i = 0; from->item.kind == DCP_ITEM_TENSOR && i < from->item.n_chunks; i++) {
        add_chunk(j, c, j->ck->parts[c->part]->chunks[from->first_chunk + i]);
    }
}

static bool is_whole(const join *j, const contribution *c)
{
    const dcp__entry *e = entry_of(j, c);
    if (e->item.kind != DCP_ITEM_TENSOR) {
        return true;
    }
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const int64_t *sizes = j->ck->parts[c->part]->chunks[e->first_chunk + i].sizes;
        if (e->item.ndim == 0 || memcmp(sizes, e->item.extents, (size_t)e->item.ndim * sizeof *sizes) == 0) {
            return true;
        }
    }
    return false;
}

static dcp_status check_alike(const join *j, const contribution *a, const contribution *b, dcp_error *err)
{
    const dcp_item *x = &entry_of(j, a)->item, *y = &entry_of(j, b)->item;
    if (x->dtype == y->dtype && x->ndim == y->ndim && memcmp(x->extents, y->extents, (size_t)x->ndim * sizeof *x->extents) == 0) {
        return DCP_OK;
    }
    return dcp__fail(err, DCP_FORMAT, "item \"%s\": ranks %d and %d disagree on its dtype or global shape",
                     dcp__print(x->fqn).text, j->ranks[a->part], j->ranks[b->part]);
}

/* Unites the chunks of a sharded tensor; replicas of a chunk are dropped. */
static dcp_status add_united(join *j, const group *g, dcp_error *err)
{
    dcp__strmap seen;
    dcp_status status = DCP_OK;
    dcp__entry *e = add_entry(j, g->first, -1);
    size_t box_bytes = (size_t)e->item.ndim * sizeof(int64_t);
    dcp__strmap_init(&seen, j->ck->ctx);
    for (const contribution *c = g->first; c && status == DCP_OK; c = c->next) {
        status = check_alike(j, g->first, c, err);
        const dcp__entry *from = entry_of(j, c);
        for (size_t i = 0; i < from->item.n_chunks && status == DCP_OK; i++) {
            dcp__chunk chunk = j->ck->parts[c->part]->chunks[from->first_chunk + i];
            uint64_t other;
            status = dcp__strmap_add(&seen, (dcp_str){(const char *)chunk.offsets, box_bytes}, j->meta->n_chunks, &other, err);
            if (status == DCP_OK && (other == UINT64_MAX || memcmp(j->meta->chunks[other].sizes, chunk.sizes, box_bytes) != 0)) {
                add_chunk(j, c, chunk);
            }
        }
    }
    e->item.n_chunks = j->meta->n_chunks - e->first_chunk;
    dcp__strmap_reset(&seen);
    return status;
}

static dcp_status add_group(join *j, const group *g, dcp_error *err)
{
    bool is_per_rank = false;
    for (const contribution *c = g->first; c; c = c->next) {
        is_per_rank |= is_whole(j, c);
    }
    if (g->count == 1) {
        add_single(j, g->first, -1);
    } else if (is_per_rank) {
        for (const contribution *c = g->first; c; c = c->next) {
            add_single(j, c, j->ranks[c->part]);
        }
    } else {
        return add_united(j, g, err);
    }
    return DCP_OK;
}

static dcp_status add_groups(join *j, dcp_error *err)
{
    dcp__strmap_reset(&j->meta->by_fqn); /* so far by group, from now on by entry */
    for (size_t i = 0; i < j->n_groups; i++) {
        size_t first = j->meta->n_entries;
        dcp_status status = add_group(j, &j->groups[i], err);
        if (status == DCP_OK) {
            status = dcp__strmap_add(&j->meta->by_fqn, j->meta->entries[first].item.fqn, first, NULL, err);
        }
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

/* ---- all together ---- */

static dcp_status allocate(join *j, dcp_error *err)
{
    dcp_checkpoint *ck = j->ck;
    dcp__metadata *m = j->meta;
    dcp_status status = dcp__metadata_reserve(m, TOTAL(ck, n_entries), TOTAL(ck, n_chunks), TOTAL(ck, n_storages),
                                              TOTAL(ck, n_files), TOTAL(ck, n_transforms), err);
    if (status != DCP_OK) {
        return status;
    }
    size_t group_bytes = TOTAL(ck, n_entries) * sizeof *j->groups;
    j->groups = dcp__arena_alloc(&m->arena, group_bytes);
    j->first_storage = dcp__arena_alloc(&m->arena, ck->n_parts * sizeof *j->first_storage);
    if (!j->groups || !j->first_storage) {
        return dcp__arena_fail(&m->arena, err);
    }
    memset(j->groups, 0, group_bytes);
    uint32_t none;
    m->n_transforms = 0;
    return intern(&j->transforms, m->transforms, &m->n_transforms, (dcp_str){"", 0}, &none, err);
}

static dcp_status join_parts(dcp_checkpoint *ck, const int *ranks, dcp_error *err)
{
    join j = {.ck = ck, .ranks = ranks};
    dcp_status status = dcp__metadata_create(ck->ctx, &ck->meta, err);
    if (status != DCP_OK) {
        return status;
    }
    j.meta = ck->meta;
    dcp__strmap_init(&j.files, ck->ctx);
    dcp__strmap_init(&j.transforms, ck->ctx);
    j.meta->version = ck->parts[0]->version;
    j.meta->extras = ck->parts[0]->extras;
    j.meta->release_from = ck->parts[0]->release_from;
    j.meta->release_to = ck->parts[0]->release_to;
    j.meta->has_planner_data = ck->parts[0]->has_planner_data;
    status = allocate(&j, err);
    status = status == DCP_OK ? group_by_name(&j, err) : status;
    status = status == DCP_OK ? join_storages(&j, err) : status;
    status = status == DCP_OK && ck->parts[0]->own.present ? join_own(&j, err) : status;
    status = status == DCP_OK ? add_groups(&j, err) : status;
    dcp__strmap_reset(&j.files);
    dcp__strmap_reset(&j.transforms);
    return status;
}

static dcp_status load_one_rank(dcp_checkpoint *ck, const int *ranks, size_t n, int rank, dcp_error *err)
{
    char name[32];
    for (size_t i = 0; i < n; i++) {
        if (ranks[i] == rank) {
            snprintf(name, sizeof name, "__%d.metadata", rank);
            return dcp__read_metadata_file(ck, name, NULL, &ck->meta, err);
        }
    }
    return dcp__fail(err, DCP_NOT_FOUND, "there is no __%d.metadata, only those of %zu other ranks", rank, n);
}

dcp_status dcp__open_rank_local(dcp_checkpoint *ck, const int *ranks, size_t n, int only_rank, dcp_error *err)
{
    ck->world = ranks[n - 1] + 1;
    if (only_rank >= 0) {
        return load_one_rank(ck, ranks, n, only_rank, err);
    }
    dcp_status status = check_ranks(ranks, n, err);
    if (status != DCP_OK) {
        return status;
    }
    ck->parts = dcp__calloc(ck->ctx, n, sizeof(dcp__metadata *));
    if (!ck->parts) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = read_part(ck, ranks[i], err);
    }
    status = status == DCP_OK ? check_same_save(ck, err) : status;
    return status == DCP_OK ? join_parts(ck, ranks, err) : status;
}
