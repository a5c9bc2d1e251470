/* One rank's own plan as the others will see it: names, their chunks, and hashes of both. */
#include "plan/local_plan.h"

#include <string.h>

#include "state/strided.h"

#define OBJECT_WEIGHT 1024

uint64_t dcp__item_weight(const dcp_write_item *item)
{
    return item->bytes || item->kind == DCP_ITEM_TENSOR ? item->bytes : OBJECT_WEIGHT;
}

dcp__wire_entry dcp__local_describe(const dcp__local *l, size_t entry)
{
    const dcp_write_item *item = l->entries[entry].item;
    bool is_tensor = item->kind == DCP_ITEM_TENSOR;
    return (dcp__wire_entry){.fqn = {item->fqn.ptr ? item->fqn.ptr : "", item->fqn.len},
                             .path = item->path,
                             .path_len = item->path_len,
                             .kind = item->kind,
                             .dtype = is_tensor ? item->dtype : DCP_DTYPE_NONE,
                             .ndim = is_tensor ? item->ndim : 0,
                             .extents = item->global_extents,
                             .per_rank = item->per_rank};
}

/* ---- grouping by name ---- */

static const char *wrong_numbers(const dcp_write_item *item, bool has_box)
{
    if (item->kind != DCP_ITEM_TENSOR && item->kind != DCP_ITEM_OBJECT) {
        return "no such kind of item";
    }
    if (item->kind == DCP_ITEM_OBJECT) {
        return NULL;
    }
    if (item->ndim < 0 || item->ndim > DCP_MAX_NDIM || dcp_dtype_bytes(item->dtype) == 0) {
        return "number of dimensions or dtype out of range";
    }
    for (int d = 0; d < item->ndim; d++) {
        if (item->global_extents[d] < 0 || (has_box && (item->box.offsets[d] < 0 || item->box.sizes[d] < 0))) {
            return "negative size or offset";
        }
    }
    return NULL;
}

static bool is_same_kind(const dcp_write_item *a, const dcp_write_item *b)
{
    if (a->kind != b->kind || a->per_rank != b->per_rank) {
        return false;
    }
    return a->kind == DCP_ITEM_OBJECT ||
           (a->dtype == b->dtype && a->ndim == b->ndim &&
            (a->ndim == 0 || memcmp(a->global_extents, b->global_extents, (size_t)a->ndim * sizeof(int64_t)) == 0));
}

static bool is_same_name(dcp_str a, dcp_str b)
{
    return a.len == b.len && (a.ptr == b.ptr || a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

/* Chunks without elements of tensors that have some are not listed. */
static bool is_listed(const dcp_write_item *item)
{
    int64_t elems = 1;
    if (item->kind == DCP_ITEM_OBJECT || (dcp__elems(item->ndim, item->box.sizes, &elems) && elems > 0)) {
        return true;
    }
    return dcp__elems(item->ndim, item->global_extents, &elems) && elems == 0;
}

typedef struct grouping {
    dcp__local *l;
    dcp__strmap by_name;
    uint32_t *entry_of; /* [item] */
    size_t last;        /* entry that the last item belongs to */
} grouping;

static dcp_status find_entry(grouping *g, const dcp_write_item *item, size_t *out, dcp_error *err)
{
    dcp__local *l = g->l;
    if (l->n_entries && is_same_name(l->entries[g->last].item->fqn, item->fqn)) {
        *out = g->last;
        return DCP_OK;
    }
    uint64_t existing;
    dcp_status status = dcp__strmap_add(&g->by_name, item->fqn, l->n_entries, &existing, err);
    if (status != DCP_OK) {
        return status;
    }
    if (existing == UINT64_MAX) {
        existing = l->n_entries;
        l->entries[l->n_entries++].item = item;
    }
    *out = g->last = (size_t)existing;
    return DCP_OK;
}

static dcp_status group_item(grouping *g, const dcp_write_item *item, bool has_box, size_t *entry, dcp_error *err)
{
    const char *wrong = wrong_numbers(item, has_box);
    if (wrong) {
        return dcp__fail(err, DCP_ARG, "item \"%s\": %s", dcp__print(item->fqn).text, wrong);
    }
    dcp_status status = find_entry(g, item, entry, err);
    if (status != DCP_OK) {
        return status;
    }
    const dcp_write_item *first = g->l->entries[*entry].item;
    if (first != item && (item->kind == DCP_ITEM_OBJECT || !is_same_kind(first, item))) {
        return dcp__fail(err, DCP_MISMATCH, "item \"%s\" is in the plan twice%s", dcp__print(item->fqn).text,
                         item->kind == DCP_ITEM_OBJECT && first->kind == DCP_ITEM_OBJECT ? "" : ", as different things");
    }
    return DCP_OK;
}

/* Items and what is absent, in the order of the plan. */
static dcp_status group_all(grouping *g, dcp_error *err)
{
    const dcp_save_plan *p = g->l->plan;
    dcp_status status = DCP_OK;
    size_t absent = 0, entry;
    for (size_t i = 0; i <= p->n && status == DCP_OK; i++) {
        for (; absent < p->n_absent && p->absent[absent].before <= i && status == DCP_OK; absent++) {
            status = group_item(g, &p->absent[absent].item, false, &entry, err);
        }
        if (i == p->n || status != DCP_OK) {
            break;
        }
        status = group_item(g, &p->items[i], true, &entry, err);
        if (status == DCP_OK) {
            bool listed = is_listed(&p->items[i]);
            uint64_t weight = dcp__item_weight(&p->items[i]);
            g->entry_of[i] = listed ? (uint32_t)entry : UINT32_MAX;
            g->l->entries[entry].n += listed;
            g->l->bytes += listed && weight < UINT64_MAX - g->l->bytes ? weight : 0;
        }
    }
    return status;
}

static void fill_order(grouping *g)
{
    dcp__local *l = g->l;
    size_t at = 0;
    for (size_t e = 0; e < l->n_entries; e++) {
        l->entries[e].first = at;
        at += l->entries[e].n;
        l->entries[e].n = 0;
    }
    for (size_t i = 0; i < l->plan->n; i++) {
        if (g->entry_of[i] != UINT32_MAX) {
            dcp__local_entry *e = &l->entries[g->entry_of[i]];
            l->order[e->first + e->n++] = (uint32_t)i;
        }
    }
}

/* Length of "rank.<digits>." at the start of a name, 0 if it does not begin so. rank may be NULL. */
static size_t rank_prefix(dcp_str fqn, uint64_t *rank)
{
    size_t first = 5, n = first;
    uint64_t number = 0;
    if (fqn.len <= first || memcmp(fqn.ptr, "rank.", first) != 0) {
        return 0;
    }
    for (; n < fqn.len && n < first + 10 && fqn.ptr[n] >= '0' && fqn.ptr[n] <= '9'; n++) {
        number = number * 10 + (uint64_t)(fqn.ptr[n] - '0');
    }
    if (n == first || n == fqn.len || fqn.ptr[n] != '.') {
        return 0;
    }
    if (rank) {
        *rank = number;
    }
    return n + 1;
}

/* Does a name stand for what an own value of this rank will be called? Names of other ranks' values are seen by their owner, or
 * by that rank if all list the same names. */
static dcp_status check_own_names(const grouping *g, dcp_error *err)
{
    const dcp__local *l = g->l;
    for (size_t e = 0; e < l->n_entries; e++) {
        dcp_str fqn = l->entries[e].item->fqn;
        uint64_t rank = 0, found;
        size_t n = l->entries[e].item->per_rank ? 0 : rank_prefix(fqn, &rank);
        dcp_str rest = {fqn.ptr + n, fqn.len - n};
        if (n && rank == (uint64_t)l->opts.rank && dcp__strmap_get(&g->by_name, rest, &found) &&
            l->entries[found].item->per_rank) {
            return dcp__fail(err, DCP_MISMATCH, "item \"%s\" has the name of this rank's own value of \"%s\"",
                             dcp__print(fqn).text, dcp__print(rest).text);
        }
    }
    return DCP_OK;
}

static dcp_status group(dcp__local *l, dcp_error *err)
{
    size_t n = l->plan->n, most = n + l->plan->n_absent;
    grouping g = {.l = l};
    dcp__strmap_init(&g.by_name, l->ctx);
    l->entries = dcp__calloc(l->ctx, most, sizeof *l->entries);
    l->order = dcp__calloc(l->ctx, n, sizeof *l->order);
    l->sent = dcp__calloc(l->ctx, n, sizeof *l->sent);
    l->writes = dcp__calloc(l->ctx, n, sizeof *l->writes);
    g.entry_of = dcp__calloc(l->ctx, n, sizeof *g.entry_of);
    dcp_status status = DCP_OK;
    if (!l->entries || !l->order || !l->sent || !l->writes || !g.entry_of) {
        status = dcp__nomem(err);
    }
    status = status == DCP_OK ? group_all(&g, err) : status;
    status = status == DCP_OK ? check_own_names(&g, err) : status;
    if (status == DCP_OK) {
        fill_order(&g);
    }
    dcp__free(l->ctx, g.entry_of);
    dcp__strmap_reset(&g.by_name);
    return status;
}

/* ---- hashes: of the same bytes that would be sent ---- */

static void put_names(const dcp__local *l, dcp__wire_writer *w, dcp__buf *b)
{
    for (size_t e = 0; e < l->n_entries; e++) {
        dcp__wire_entry entry = dcp__local_describe(l, e);
        dcp__put_entry(w, b, &entry);
    }
    for (size_t i = 0; i < l->plan->n_containers; i++) {
        dcp__put_container(b, &l->plan->containers[i]);
    }
}

static void put_structure(const dcp__local *l, dcp__buf *b)
{
    const uint64_t numbers[] = {(uint64_t)l->opts.world, (uint64_t)l->opts.rank, l->opts.dedup_to_lowest,
                                l->opts.allow_gaps,      l->opts.small_bytes,    l->plan->n,
                                l->opts.options_bytes};
    dcp__buf_put(b, l->names.bytes, sizeof l->names.bytes);
    dcp__buf_put(b, numbers, sizeof numbers);
    dcp__buf_put(b, l->opts.options, l->opts.options_bytes);
    for (size_t e = 0; e < l->n_entries; e++) {
        const dcp__local_entry *entry = &l->entries[e];
        dcp__put_varint(b, entry->n);
        for (size_t i = 0; i < entry->n && entry->item->kind == DCP_ITEM_TENSOR; i++) {
            const dcp_write_item *item = &l->plan->items[l->order[entry->first + i]];
            dcp__put_varint(b, l->order[entry->first + i]);
            dcp__put_box(b, item->ndim, item->global_extents, item->box.offsets, item->box.sizes);
        }
    }
}

static dcp_status hash(dcp__local *l, dcp_error *err)
{
    dcp__buf b;
    dcp__wire_writer w;
    dcp__buf_init(&b, l->ctx);
    dcp__wire_writer_init(&w, l->ctx);
    put_names(l, &w, &b);
    l->names = dcp__xxh3_128(b.data, b.len);
    bool failed = b.failed;
    b.len = 0;
    put_structure(l, &b);
    l->structure = dcp__xxh3_128(b.data, b.len);
    failed |= b.failed;
    dcp__wire_writer_reset(&w);
    dcp__buf_reset(&b);
    return failed ? dcp__nomem(err) : DCP_OK;
}

/* ---- making ---- */

dcp_status dcp__local_make(const dcp_save_plan *plan, const dcp__global_opts *opts, dcp__local **out, dcp_error *err)
{
    if (opts->world < 1 || opts->rank < 0 || opts->rank >= opts->world) {
        return dcp__fail(err, DCP_ARG, "plan: rank %d of %d", opts->rank, opts->world);
    }
    if (plan->n + plan->n_absent >= UINT32_MAX) {
        return dcp__fail(err, DCP_LIMIT, "plan: %zu items are too many", plan->n);
    }
    dcp__local *l = dcp__calloc(plan->ctx, 1, sizeof *l);
    if (!l) {
        return dcp__nomem(err);
    }
    l->ctx = plan->ctx;
    l->plan = plan;
    l->opts = *opts;
    l->opts.allow_gaps |= opts->world == 1;
    dcp_status status = group(l, err);
    status = status == DCP_OK ? hash(l, err) : status;
    if (status != DCP_OK) {
        dcp__local_free(l);
        return status;
    }
    l->opts.options = NULL; /* borrowed until here */
    *out = l;
    return DCP_OK;
}

void dcp__local_free(dcp__local *l)
{
    if (l) {
        dcp__free(l->ctx, l->entries);
        dcp__free(l->ctx, l->order);
        dcp__free(l->ctx, l->sent);
        dcp__free(l->ctx, l->sent_start);
        dcp__free(l->ctx, l->writes);
        dcp__free(l->ctx, l);
    }
}

/* ---- hellos ---- */

/* Version, world, structure, names, bytes, key of the cache. */
void dcp__hello_encode(const dcp__local *l, const dcp__plan_cache *cache, uint8_t out[DCP__HELLO_BYTES])
{
    bool has_cache = cache && memcmp(&cache->structure, &l->structure, sizeof l->structure) == 0;
    dcp__store32(out, DCP__WIRE_VERSION);
    dcp__store32(out + 4, (uint32_t)l->opts.world);
    memcpy(out + 8, l->structure.bytes, 16);
    memcpy(out + 24, l->names.bytes, 16);
    dcp__store64(out + 40, l->bytes);
    dcp__store64(out + 48, has_cache ? cache->key : 0);
}

static uint64_t key_of_structures(const dcp__hello *of, size_t world, uint8_t *scratch)
{
    for (size_t r = 0; r < world; r++) {
        memcpy(scratch + 16 * r, of[r].structure.bytes, 16);
    }
    uint64_t key = dcp__xxh3_64(scratch, 16 * world);
    return key ? key : 1;
}

static dcp_status find_leaders(dcp__hellos *h, dcp_error *err)
{
    dcp__strmap by_names;
    dcp_status status = DCP_OK;
    dcp__strmap_init(&by_names, h->ctx);
    h->is_uniform = true;
    for (int r = 0; r < h->world && status == DCP_OK; r++) {
        uint64_t leader;
        dcp_str names = {(const char *)h->of[r].names.bytes, sizeof h->of[r].names.bytes};
        status = dcp__strmap_add(&by_names, names, (uint64_t)r, &leader, err);
        h->of[r].leader = leader == UINT64_MAX ? r : (int)leader;
        h->is_uniform &= h->of[r].leader == 0;
    }
    dcp__strmap_reset(&by_names);
    return status;
}

static dcp_status decode_hello(const uint8_t *p, int rank, int world, dcp__hello *out, dcp_error *err)
{
    uint32_t version = dcp__load32(p), its_world = dcp__load32(p + 4);
    if (version != DCP__WIRE_VERSION || its_world != (uint32_t)world) {
        dcp_status status =
            version != DCP__WIRE_VERSION
                ? dcp__fail(err, DCP_FORMAT, "rank %d speaks version %u of plans, not %d", rank, version, DCP__WIRE_VERSION)
                : dcp__fail(err, DCP_FORMAT, "rank %d saves with %u ranks, not %d", rank, its_world, world);
        if (err) {
            err->rank = rank;
        }
        return status;
    }
    memcpy(out->structure.bytes, p + 8, 16);
    memcpy(out->names.bytes, p + 24, 16);
    out->bytes = dcp__load64(p + 40);
    out->cache_key = dcp__load64(p + 48);
    return DCP_OK;
}

dcp_status dcp__hellos_decode(dcp_context *ctx, const void *bytes, size_t len, int world, dcp__hellos *out, dcp_error *err)
{
    dcp__hellos h = {.ctx = dcp__context(ctx), .world = world};
    if (world < 1 || len != (size_t)world * DCP__HELLO_BYTES) {
        return dcp__fail(err, DCP_FORMAT, "the first words of %d ranks have %zu bytes", world, len);
    }
    h.of = dcp__calloc(h.ctx, (size_t)world, sizeof *h.of);
    uint8_t *scratch = dcp__calloc(h.ctx, (size_t)world, 16);
    dcp_status status = h.of && scratch ? DCP_OK : dcp__nomem(err);
    for (int r = 0; r < world && status == DCP_OK; r++) {
        status = decode_hello((const uint8_t *)bytes + (size_t)r * DCP__HELLO_BYTES, r, world, &h.of[r], err);
    }
    status = status == DCP_OK ? find_leaders(&h, err) : status;
    if (status == DCP_OK) {
        h.key = key_of_structures(h.of, (size_t)world, scratch);
        *out = h;
    } else {
        dcp__free(h.ctx, h.of);
    }
    dcp__free(h.ctx, scratch);
    return status;
}

void dcp__hellos_reset(dcp__hellos *h)
{
    dcp__free(h->ctx, h->of);
    h->of = NULL;
}

/* ---- owners ---- */

int dcp__owner_of_position(size_t i, size_t n, int world)
{
    return (int)((uint64_t)i * (uint64_t)world / n); /* both are below 2^32 */
}

/* A rank's own value is saved as "rank.<r>.<name>", which another name may be as it stands. Both must have one owner, who then
 * sees that they clash. */
int dcp__owner_of_name(dcp_str fqn, int world)
{
    for (size_t n; (n = rank_prefix(fqn, NULL)) > 0;) {
        fqn = (dcp_str){fqn.ptr + n, fqn.len - n};
    }
    return (int)(dcp__xxh3_64(fqn.ptr, fqn.len) % (uint64_t)world);
}

int dcp__owner_of(const dcp__local *l, const dcp__hellos *hellos, size_t entry)
{
    return hellos->is_uniform ? dcp__owner_of_position(entry, l->n_entries, l->opts.world)
                              : dcp__owner_of_name(l->entries[entry].item->fqn, l->opts.world);
}
