/* Which record holds which chunk. Keys are (fqn, offset); the index in a key is only a hint, with which nearly every chunk of a
 * real file is found at once. Else the chunks of a tensor are searched by their offsets. */
#include "format/metadata_build.h"

typedef struct join {
    dcp__mbuild *b;
    uint32_t *entry_of; /* [name]: entry, DCP__NO_NAME if there is none */
    uint32_t *order;    /* [chunk]: of a sorted tensor, the chunk that comes at this place */
    uint8_t *is_sorted; /* [entry]: 0 not looked at yet, 1 ascending as it is, 2 by `order` */
    bool has_extra;     /* storages that belong to nothing */
} join;

static int compare_offsets(const int64_t *a, const int64_t *b, int ndim)
{
    for (int i = 0; i < ndim; i++) {
        if (a[i] != b[i]) {
            return a[i] < b[i] ? -1 : 1;
        }
    }
    return 0;
}

static bool is_ascending(const dcp__chunk *chunks, size_t n, int ndim)
{
    for (size_t i = 1; i < n; i++) {
        if (compare_offsets(chunks[i - 1].offsets, chunks[i].offsets, ndim) >= 0) {
            return false;
        }
    }
    return true;
}

static void sift_down(const dcp__chunk *chunks, uint32_t *heap, size_t root, size_t n, int ndim)
{
    for (size_t below = 2 * root + 1; below < n; below = 2 * root + 1) {
        if (below + 1 < n && compare_offsets(chunks[heap[below]].offsets, chunks[heap[below + 1]].offsets, ndim) < 0) {
            below++;
        }
        if (compare_offsets(chunks[heap[root]].offsets, chunks[heap[below]].offsets, ndim) >= 0) {
            return;
        }
        uint32_t swapped = heap[root];
        heap[root] = heap[below];
        heap[below] = swapped;
        root = below;
    }
}

/* Heap sort, because it needs no memory and has no bad case. */
static void sort_chunks(const dcp__chunk *chunks, uint32_t *order, size_t n, int ndim)
{
    for (size_t i = 0; i < n; i++) {
        order[i] = (uint32_t)i;
    }
    for (size_t i = n / 2; i-- > 0;) {
        sift_down(chunks, order, i, n, ndim);
    }
    for (size_t end = n; end-- > 1;) {
        uint32_t swapped = order[0];
        order[0] = order[end];
        order[end] = swapped;
        sift_down(chunks, order, 0, end, ndim);
    }
}

static dcp_status prepare_entry(join *j, uint32_t entry, dcp_error *err)
{
    const dcp__metadata *md = j->b->md;
    const dcp__entry *e = &md->entries[entry];
    const dcp__chunk *chunks = md->chunks + e->first_chunk;
    if (is_ascending(chunks, e->item.n_chunks, e->item.ndim)) {
        j->is_sorted[entry] = 1;
        return DCP_OK;
    }
    if (!j->order && !(j->order = dcp__alloc(j->b->ctx, md->n_chunks * sizeof *j->order))) {
        return dcp__nomem(err);
    }
    sort_chunks(chunks, j->order + e->first_chunk, e->item.n_chunks, e->item.ndim);
    j->is_sorted[entry] = 2;
    return DCP_OK;
}

/* A later entry of the same key replaces an earlier one, as in a dict. */
static void set_storage(join *j, uint32_t *place, uint32_t storage)
{
    j->has_extra |= *place != DCP__NO_STORAGE;
    *place = storage;
}

/* Gives the storage to all chunks of a tensor at that offset; false if there are none. */
static bool place_by_search(join *j, uint32_t entry, const int64_t *offset, uint32_t storage)
{
    const dcp__entry *e = &j->b->md->entries[entry];
    dcp__chunk *chunks = j->b->md->chunks + e->first_chunk;
    const uint32_t *order = j->is_sorted[entry] == 2 ? j->order + e->first_chunk : NULL;
    size_t low = 0, high = e->item.n_chunks;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        bool is_below = compare_offsets(chunks[order ? order[middle] : middle].offsets, offset, e->item.ndim) < 0;
        low = is_below ? middle + 1 : low;
        high = is_below ? high : middle;
    }
    bool found = false;
    for (; low < e->item.n_chunks; low++) {
        dcp__chunk *c = &chunks[order ? order[low] : low];
        if (compare_offsets(c->offsets, offset, e->item.ndim) != 0) {
            break;
        }
        set_storage(j, &c->storage, storage);
        found = true;
    }
    return found;
}

static dcp_status place(join *j, const dcp__mindex *index, uint32_t storage, dcp_error *err)
{
    dcp__metadata *md = j->b->md;
    uint32_t entry = j->entry_of[index->name];
    dcp__entry *e = entry == DCP__NO_NAME ? NULL : &md->entries[entry];
    bool is_tensor = e && e->item.kind == DCP_ITEM_TENSOR;
    if (!e || is_tensor != (index->offset != NULL) || (is_tensor && (int)index->offset->node.count != e->item.ndim)) {
        j->has_extra = true;
        return DCP_OK;
    }
    if (!is_tensor) {
        set_storage(j, &e->storage, storage);
        return DCP_OK;
    }
    dcp_status status = j->is_sorted[entry] ? DCP_OK : prepare_entry(j, entry, err);
    if (status != DCP_OK) {
        return status;
    }
    const int64_t *offset = index->offset->values;
    size_t hint = index->hint >= 0 ? (size_t)index->hint : SIZE_MAX;
    /* In a strictly ascending tensor no other chunk has these offsets. */
    if (j->is_sorted[entry] == 1 && hint < e->item.n_chunks) {
        dcp__chunk *c = &md->chunks[e->first_chunk + hint];
        if (c->offsets == offset || compare_offsets(c->offsets, offset, e->item.ndim) == 0) {
            set_storage(j, &c->storage, storage);
            return DCP_OK;
        }
    }
    j->has_extra |= !place_by_search(j, entry, offset, storage);
    return DCP_OK;
}

/* Keeps the storages that belong to something, in order. */
static dcp_status drop_extra(dcp__mbuild *b, dcp_error *err)
{
    dcp__metadata *md = b->md;
    uint32_t *moved = dcp__calloc(b->ctx, md->n_storages, sizeof *moved);
    if (!moved) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < md->n_chunks; i++) {
        if (md->chunks[i].storage != DCP__NO_STORAGE) {
            moved[md->chunks[i].storage] = 1;
        }
    }
    for (size_t i = 0; i < md->n_entries; i++) {
        if (md->entries[i].storage != DCP__NO_STORAGE) {
            moved[md->entries[i].storage] = 1;
        }
    }
    uint32_t n = 0;
    for (size_t i = 0; i < md->n_storages; i++) {
        if (moved[i]) {
            md->storages[n] = md->storages[i];
            moved[i] = n++;
        }
    }
    for (size_t i = 0; i < md->n_chunks; i++) {
        if (md->chunks[i].storage != DCP__NO_STORAGE) {
            md->chunks[i].storage = moved[md->chunks[i].storage];
        }
    }
    for (size_t i = 0; i < md->n_entries; i++) {
        if (md->entries[i].storage != DCP__NO_STORAGE) {
            md->entries[i].storage = moved[md->entries[i].storage];
        }
    }
    md->n_storages = n;
    dcp__free(b->ctx, moved);
    return DCP_OK;
}

static dcp_status start(join *j, dcp_error *err)
{
    dcp__mbuild *b = j->b;
    j->entry_of = dcp__alloc(b->ctx, b->names.n * sizeof *j->entry_of);
    j->is_sorted = dcp__calloc(b->ctx, b->md->n_entries, sizeof *j->is_sorted);
    if (!j->entry_of || !j->is_sorted) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < b->names.n; i++) {
        uint64_t entry;
        j->entry_of[i] = dcp__strmap_get(&b->md->by_fqn, b->names.texts[i], &entry) ? (uint32_t)entry : DCP__NO_NAME;
    }
    return DCP_OK;
}

/* Of whatever class it is: a key that has a name is known by it. */
static dcp_status refuse_key(dcp__pv key, uint64_t at, dcp_error *err)
{
    dcp__pv fields[DCP__MFIELD_COUNT] = {0};
    const dcp__pobject *o = dcp__pv_object(key);
    size_t n;
    bool has_fields = o && dcp__mfields_read(o->state, fields, DCP__MFIELD_COUNT, &n);
    dcp__pv name = has_fields ? fields[DCP__MFIELD_FQN] : 0;
    dcp_status status = dcp__mrefuse(at, "a key of storage_data", key, err);
    return name && dcp__pv_is_str(name) ? dcp__prefix(err, status, "item \"%s\": ", dcp__print(dcp__pv_text(name)).text) : status;
}

static dcp_status refuse_value(const dcp__mbuild *b, uint64_t key, dcp__pv value, uint64_t at, dcp_error *err)
{
    dcp_status status = dcp__mrefuse(at, "a value of storage_data", value, err);
    if (key == DCP__MROW_UNWANTED) {
        return status;
    }
    return dcp__prefix(err, status, "item \"%s\": ", dcp__print(b->names.texts[b->indexes[key].name]).text);
}

static dcp_status place_all(join *j, const dcp__pv *items, size_t n, uint64_t at, dcp_error *err)
{
    size_t n_placed = 0;
    for (size_t i = 0; i < n; i += 2) {
        uint64_t key, value;
        if (dcp__mrow_of(items[i], &key) != DCP__MROW_INDEX) {
            return refuse_key(items[i], at, err);
        }
        if (dcp__mrow_of(items[i + 1], &value) != DCP__MROW_INFO) {
            return refuse_value(j->b, key, items[i + 1], at, err);
        }
        if (key == DCP__MROW_UNWANTED) {
            continue;
        }
        if (value == DCP__MROW_UNWANTED) {
            j->b->must_repeat = true;
            return dcp__fail_at(err, DCP_INTERNAL, at, "metadata: a record is needed that was given up");
        }
        dcp_status status = place(j, &j->b->indexes[key], (uint32_t)value, err);
        if (status != DCP_OK) {
            return status;
        }
        n_placed++;
    }
    j->has_extra |= n_placed != j->b->md->n_storages;
    return DCP_OK;
}

dcp_status dcp__mjoin(dcp__mbuild *b, dcp__pv storage_data, uint64_t at, dcp_error *err)
{
    join j = {.b = b};
    const dcp__pv *items;
    size_t n;
    dcp_status status = dcp__mdict_items(b->md, storage_data, "storage_data", at, &items, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    status = start(&j, err);
    if (status == DCP_OK) {
        status = place_all(&j, items, n, at, err);
    }
    if (status == DCP_OK && j.has_extra) {
        status = drop_extra(b, err);
    }
    dcp__free(b->ctx, j.entry_of);
    dcp__free(b->ctx, j.is_sorted);
    dcp__free(b->ctx, j.order);
    return status;
}
