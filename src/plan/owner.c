/* The owner's side of the plan: messages of all ranks become tables of names and chunks in which equal chunks of several ranks
 * are one, and clashes are noticed. */
#include "plan/owner.h"

#include <stdio.h>

#include "state/strided.h"

/* A message being taken in. */
typedef struct intake {
    dcp__owner *o;
    dcp__wire w;
    int rank;
    bool has_content;
    dcp__wire_reader names;
    dcp_error *err;
} intake;

static dcp_status malformed(const intake *in)
{
    return dcp__wire_fail(&in->w, "plan", in->rank, in->err);
}

static bool grow(dcp__owner *o, void **array, size_t *cap, size_t need, size_t elem_bytes)
{
    return need <= *cap || dcp__grow(o->ctx, array, cap, need, elem_bytes);
}

/* ---- sets of ranks ---- */

static dcp_status add_node(dcp__owner *o, uint32_t parent, uint32_t rank, uint32_t *out, dcp_error *err)
{
    void *array = o->sets;
    if (!grow(o, &array, &o->cap_sets, o->n_sets + 1, sizeof *o->sets)) {
        return dcp__nomem(err);
    }
    o->sets = array;
    o->sets[o->n_sets] = (dcp__set_node){parent, rank, o->n_sets ? o->sets[parent].n + 1 : 0, 0};
    *out = (uint32_t)o->n_sets++;
    return DCP_OK;
}

/* The set with one rank more. */
static dcp_status join(dcp__owner *o, uint32_t set, uint32_t rank, uint32_t *out, dcp_error *err)
{
    uint32_t child = o->sets[set].newest_child;
    if (child && o->sets[child].rank == rank) {
        *out = child;
        return DCP_OK;
    }
    dcp_status status = add_node(o, set, rank, &child, err);
    if (status == DCP_OK) {
        o->sets[set].newest_child = child;
        *out = child;
    }
    return status;
}

uint32_t dcp__chunk_first_rank(const dcp__owner *o, const dcp__owned_chunk *c)
{
    uint32_t node = c->set;
    while (o->sets[node].n > 1) {
        node = o->sets[node].parent;
    }
    return o->sets[node].rank;
}

/* ---- names ---- */

static bool is_named(const dcp__owner *o, size_t entry, dcp_str fqn)
{
    dcp_str name = o->entries[entry].is.fqn;
    return name.len == fqn.len && (fqn.len == 0 || memcmp(name.ptr, fqn.ptr, fqn.len) == 0);
}

/* Ranks mostly list names in the same order: the next one is tried first. */
static bool look_up(dcp__owner *o, dcp_str fqn, uint64_t *entry)
{
    size_t next = o->last_entry + 1;
    if (next < o->n_entries && is_named(o, next, fqn)) {
        o->last_entry = next;
        *entry = next;
        return true;
    }
    if (!dcp__strmap_get(&o->by_name, fqn, entry)) {
        return false;
    }
    o->last_entry = (size_t)*entry;
    return true;
}

/* Adds a name; e's texts are owned already. */
static dcp_status add_entry(intake *in, const dcp__wire_entry *e, uint32_t ordinal)
{
    dcp__owner *o = in->o;
    void *array = o->entries;
    if (!grow(o, &array, &o->cap_entries, o->n_entries + 1, sizeof *o->entries)) {
        return dcp__nomem(in->err);
    }
    o->entries = array;
    dcp_status status = dcp__strmap_add(&o->by_name, e->fqn, o->n_entries, NULL, in->err);
    int64_t elems = 1;
    bool is_countable = e->kind == DCP_ITEM_OBJECT || dcp__elems(e->ndim, e->extents, &elems);
    if (status == DCP_OK) {
        o->last_entry = o->n_entries;
        o->entries[o->n_entries++] = (dcp__owned_entry){.is = *e,
                                                        .first_rank = (uint32_t)in->rank,
                                                        .ordinal = ordinal,
                                                        .first_chunk = DCP__NONE,
                                                        .last_chunk = DCP__NONE,
                                                        .has_elems = !is_countable || elems > 0};
    }
    return status;
}

/* Copies what is said about a name. */
static dcp_status own_entry(intake *in, const dcp__wire_entry *e, dcp__wire_entry *out)
{
    dcp__arena *a = &in->o->arena;
    int64_t *extents = dcp__arena_alloc(a, (size_t)e->ndim * sizeof *extents);
    *out = *e;
    out->fqn = dcp__arena_str(a, e->fqn);
    if (!extents || !out->fqn.ptr) {
        return dcp__arena_fail(a, in->err);
    }
    if (e->ndim) {
        memcpy(extents, e->extents, (size_t)e->ndim * sizeof *extents);
    }
    out->extents = extents;
    return dcp__get_entry_path(&in->names, a, out->fqn, &out->path, &out->path_len, in->err);
}

/* A value of one rank only: "rank.3.name" at ("rank", "3", ...). */
static dcp_status rename_for_rank(intake *in, dcp__wire_entry *e)
{
    dcp__arena *a = &in->o->arena;
    char prefix[32], digits[16];
    size_t n = (size_t)snprintf(prefix, sizeof prefix, "rank.%d.", in->rank);
    dcp_str number = {digits, (size_t)snprintf(digits, sizeof digits, "%d", in->rank)};
    char *fqn = dcp__arena_alloc(a, n + e->fqn.len + 1);
    dcp_key *path = dcp__arena_alloc(a, (e->path_len + 3) * sizeof *path);
    number = dcp__arena_str(a, number);
    if (!fqn || !path || !number.ptr) {
        return dcp__arena_fail(a, in->err);
    }
    memcpy(fqn, prefix, n);
    memcpy(fqn + n, e->fqn.ptr, e->fqn.len + 1);
    path[0] = dcp_key_str("rank");
    path[1] = (dcp_key){.string = number};
    if (e->path_len) {
        memcpy(path + 2, e->path, e->path_len * sizeof *path);
    } else { /* a name without a path stands at the root */
        path[2] = (dcp_key){.string = e->fqn};
    }
    e->fqn = (dcp_str){fqn, n + e->fqn.len};
    e->path = path;
    e->path_len = e->path_len ? e->path_len + 2 : 3;
    return DCP_OK;
}

/* A rank that says something else about a name than the first one is noted once for each name. */
static bool agrees(intake *in, dcp__owned_entry *mine, const dcp__wire_entry *e)
{
    const dcp__wire_entry *is = &mine->is;
    bool same_kind = is->kind == e->kind && is->per_rank == e->per_rank;
    bool is_same = same_kind && is->dtype == e->dtype && is->ndim == e->ndim &&
                   (e->ndim == 0 || memcmp(is->extents, e->extents, (size_t)e->ndim * sizeof *e->extents) == 0);
    if (is_same || mine->has_clash) {
        return is_same;
    }
    mine->has_clash = true;
    dcp__printable printed = dcp__print(is->fqn);
    const char *name = printed.text;
    if (is->kind != e->kind) {
        dcp__note(in->o, DCP__FAULT_CLASH, "item \"%s\": rank %u has %s, rank %d has %s", name, mine->first_rank,
                  is->kind == DCP_ITEM_OBJECT ? "an object" : "a tensor", in->rank,
                  e->kind == DCP_ITEM_OBJECT ? "an object" : "a tensor");
    } else if (!same_kind) {
        dcp__note(in->o, DCP__FAULT_CLASH, "item \"%s\" of rank %d has the name of a rank's own value", name, in->rank);
    } else {
        dcp__note(in->o, DCP__FAULT_CLASH, "item \"%s\": rank %u has %s %s, rank %d has %s %s", name, mine->first_rank,
                  dcp_dtype_name(is->dtype), dcp__print_shape(is->ndim, is->extents).text, in->rank, dcp_dtype_name(e->dtype),
                  dcp__print_shape(e->ndim, e->extents).text);
    }
    return false;
}

/* The entry that a name belongs to, added if need be. DCP__NONE: a clash. */
static dcp_status settle(intake *in, const dcp__wire_entry *e, uint32_t ordinal, uint32_t *out)
{
    uint64_t found;
    dcp_status status = DCP_OK;
    if (!look_up(in->o, e->fqn, &found)) {
        found = in->o->n_entries;
        status = add_entry(in, e, ordinal);
    }
    if (status == DCP_OK) {
        *out = agrees(in, &in->o->entries[found], e) ? (uint32_t)found : DCP__NONE;
    }
    return status;
}

static bool is_mine(const dcp__owner *o, dcp_str fqn, size_t ordinal)
{
    const dcp__global_opts *opts = &o->local->opts;
    if (!o->hellos->is_uniform) {
        return dcp__owner_of_name(fqn, opts->world) == opts->rank;
    }
    return ordinal < o->local->n_entries && dcp__owner_of_position(ordinal, o->local->n_entries, opts->world) == opts->rank;
}

/* A leader's name. */
static dcp_status take_name(intake *in, uint64_t *next_ordinal)
{
    dcp__owner *o = in->o;
    dcp__wire_entry e;
    void *said = o->said;
    uint64_t ordinal = *next_ordinal + dcp__get_bounded(&in->w, UINT32_MAX);
    dcp_status status = dcp__get_entry(&in->names, &in->w, &e, in->err);
    if (status != DCP_OK) {
        return status;
    }
    if (in->w.bad || ordinal >= UINT32_MAX || !is_mine(o, e.fqn, (size_t)ordinal)) {
        return malformed(in);
    }
    *next_ordinal = ordinal + 1;
    if (!grow(o, &said, &o->cap_said, o->n_said + 1, sizeof *o->said)) {
        return dcp__nomem(in->err);
    }
    o->said = said;
    dcp__said *s = &o->said[o->n_said];
    *s = (dcp__said){.ordinal = (uint32_t)ordinal, .entry = DCP__NONE};
    status = own_entry(in, &e, &s->is);
    status = status == DCP_OK && !e.per_rank ? settle(in, &s->is, s->ordinal, &s->entry) : status;
    o->n_said += status == DCP_OK;
    return status;
}

/* ---- chunks ---- */

static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 32;
}

static size_t hash_box(uint32_t entry, const int64_t *numbers, size_t n)
{
    uint64_t h = entry;
    for (size_t i = 0; i < n; i++) {
        h = mix(h, (uint64_t)numbers[i]);
    }
    return (size_t)mix(h, n);
}

static bool is_chunk(const dcp__owner *o, const dcp__owned_chunk *c, uint32_t entry, const int64_t *numbers, size_t n)
{
    return c->entry == entry && (n == 0 || memcmp(o->numbers + c->numbers, numbers, n * sizeof *numbers) == 0);
}

static void insert_slot(dcp__owner *o, uint32_t chunk)
{
    const dcp__owned_chunk *c = &o->chunks[chunk];
    size_t n = 2 * (size_t)o->entries[c->entry].is.ndim, i = hash_box(c->entry, o->numbers + c->numbers, n);
    while (o->slots[i & (o->n_slots - 1)]) {
        i++;
    }
    o->slots[i & (o->n_slots - 1)] = chunk + 1;
}

static bool grow_slots(dcp__owner *o)
{
    uint32_t *old = o->slots;
    size_t n_slots = o->n_slots ? o->n_slots * 2 : 64;
    uint32_t *slots = dcp__calloc(o->ctx, n_slots, sizeof *slots);
    if (!slots) {
        return false;
    }
    o->slots = slots;
    o->n_slots = n_slots;
    for (size_t i = 0; i < o->n_chunks; i++) {
        insert_slot(o, (uint32_t)i);
    }
    dcp__free(o->ctx, old);
    return true;
}

/* The chunk whose numbers stand at the end of o->numbers, or DCP__NONE. */
static uint32_t find_chunk(const dcp__owner *o, uint32_t entry, size_t n)
{
    const int64_t *numbers = o->numbers + o->n_numbers;
    for (size_t i = hash_box(entry, numbers, n); o->n_slots; i++) {
        uint32_t slot = o->slots[i & (o->n_slots - 1)];
        if (slot == 0) {
            break;
        }
        if (is_chunk(o, &o->chunks[slot - 1], entry, numbers, n)) {
            return slot - 1;
        }
    }
    return DCP__NONE;
}

static void link_chunk(dcp__owner *o, uint32_t entry, uint32_t chunk)
{
    dcp__owned_entry *e = &o->entries[entry];
    if (e->first_chunk == DCP__NONE) {
        e->first_chunk = chunk;
    } else {
        o->chunks[e->last_chunk].next = chunk;
    }
    e->last_chunk = chunk;
    e->n_chunks++;
}

static dcp_status add_chunk(intake *in, uint32_t entry, size_t n_numbers, uint64_t weight, uint32_t *out)
{
    dcp__owner *o = in->o;
    void *chunks = o->chunks;
    if ((o->n_chunks + 1) * 2 > o->n_slots && !grow_slots(o)) {
        return dcp__nomem(in->err);
    }
    if (!grow(o, &chunks, &o->cap_chunks, o->n_chunks + 1, sizeof *o->chunks)) {
        return dcp__nomem(in->err);
    }
    o->chunks = chunks;
    uint32_t set;
    dcp_status status = join(o, 0, (uint32_t)in->rank, &set, in->err);
    if (status != DCP_OK) {
        return status;
    }
    *out = (uint32_t)o->n_chunks;
    o->chunks[o->n_chunks++] = (dcp__owned_chunk){entry, DCP__NONE, set, DCP__NONE, o->n_numbers, weight};
    o->n_numbers += n_numbers;
    link_chunk(o, entry, *out);
    insert_slot(o, *out);
    return DCP_OK;
}

/* One more holder of a chunk; or the same one once more. */
static dcp_status add_holder(intake *in, uint32_t *chunk)
{
    dcp__owner *o = in->o;
    dcp__owned_chunk *c = &o->chunks[*chunk];
    const dcp__owned_entry *e = &o->entries[c->entry];
    if (o->sets[c->set].rank != (uint32_t)in->rank) {
        return join(o, c->set, (uint32_t)in->rank, &c->set, in->err);
    }
    dcp__note(o, DCP__FAULT_CHUNKS, "item \"%s\": rank %d lists chunk %s twice", dcp__print(e->is.fqn).text, in->rank,
              dcp__text_of_box(e->is.ndim, dcp__chunk_offsets(o, c), dcp__chunk_sizes(o, c)).text);
    *chunk = DCP__NONE;
    return DCP_OK;
}

static dcp_status compare_content(intake *in, uint32_t chunk, bool is_new, const uint8_t *digest)
{
    dcp__owner *o = in->o;
    if (is_new) {
        void *array = o->content;
        if (!grow(o, &array, &o->cap_content, o->cap_chunks, sizeof *o->content)) {
            return dcp__nomem(in->err);
        }
        o->content = array;
        memcpy(o->content[chunk].bytes, digest, sizeof o->content[chunk].bytes);
        return DCP_OK;
    }
    const dcp__owned_chunk *c = &o->chunks[chunk];
    dcp__owned_entry *e = &o->entries[c->entry];
    if (!e->has_clash && memcmp(o->content[chunk].bytes, digest, sizeof o->content[chunk].bytes) != 0) {
        e->has_clash = true;
        dcp__note(o, DCP__FAULT_CLASH, "item \"%s\": ranks %u and %d hold different values", dcp__print(e->is.fqn).text,
                  dcp__chunk_first_rank(o, c), in->rank);
    }
    return DCP_OK;
}

/* Finds or adds the chunk whose numbers stand at the end of o->numbers. A tensor without elements has one chunk, the first. */
static dcp_status place_chunk(intake *in, uint32_t entry, size_t n_numbers, uint64_t weight, uint32_t *out, bool *is_new)
{
    dcp__owner *o = in->o;
    *is_new = false;
    *out = DCP__NONE;
    if (!o->entries[entry].has_elems && o->entries[entry].n_chunks) {
        return DCP_OK;
    }
    uint32_t chunk = find_chunk(o, entry, n_numbers);
    *is_new = chunk == DCP__NONE;
    dcp_status status = *is_new ? add_chunk(in, entry, n_numbers, weight, &chunk) : add_holder(in, &chunk);
    *out = chunk;
    return status;
}

static uint64_t weight_of(const dcp__wire_entry *e, const int64_t *sizes)
{
    int64_t elems;
    uint64_t weight;
    return dcp__elems(e->ndim, sizes, &elems) && dcp__mul_u64((uint64_t)elems, dcp_dtype_bytes(e->dtype), &weight) ? weight
                                                                                                                   : UINT64_MAX;
}

static bool has_room(dcp__owner *o, size_t n_numbers)
{
    void *items = o->items, *numbers = o->numbers;
    bool ok = grow(o, &items, &o->cap_items, o->n_items + 1, sizeof *o->items);
    o->items = items;
    ok = ok && grow(o, &numbers, &o->cap_numbers, o->n_numbers + n_numbers + 1, sizeof *o->numbers);
    o->numbers = numbers;
    return ok;
}

/* A chunk of a name; `entry` DCP__NONE: it counts for nothing, since its name clashes. */
static dcp_status take_chunk(intake *in, const dcp__wire_entry *said, uint32_t entry)
{
    dcp__owner *o = in->o;
    size_t ndim = (size_t)said->ndim;
    uint64_t weight = 0;
    uint32_t chunk = DCP__NONE;
    bool is_new = false;
    if (!has_room(o, 2 * ndim)) {
        return dcp__nomem(in->err);
    }
    int64_t *numbers = o->numbers + o->n_numbers;
    if (said->kind == DCP_ITEM_TENSOR) {
        dcp__get_box(&in->w, said->ndim, said->extents, numbers, numbers + ndim);
        weight = weight_of(said, numbers + ndim);
    } else {
        weight = dcp__get_varint(&in->w);
    }
    const uint8_t *digest = in->has_content ? dcp__get_bytes(&in->w, sizeof(dcp__digest)) : NULL;
    if (in->w.bad || o->n_numbers > o->ctx->limits.max_parse_bytes / sizeof *numbers) {
        return in->w.bad ? malformed(in) : dcp__fail(in->err, DCP_LIMIT, "plan of rank %d: too many chunks", in->rank);
    }
    dcp_status status = entry == DCP__NONE ? DCP_OK : place_chunk(in, entry, 2 * ndim, weight, &chunk, &is_new);
    if (status == DCP_OK && digest && chunk != DCP__NONE) {
        status = compare_content(in, chunk, is_new, digest);
    }
    o->items[o->n_items++] = chunk;
    return status;
}

/* ---- messages ---- */

/* The chunks of a name. A rank's own value gets an entry of its own. */
static dcp_status take_chunks(intake *in, const dcp__said *said)
{
    uint32_t entry = said->entry;
    uint64_t n = dcp__get_bounded(&in->w, dcp__wire_left(&in->w));
    dcp_status status = DCP_OK;
    if (in->w.bad || (n != 1 && said->is.kind == DCP_ITEM_OBJECT)) {
        return malformed(in);
    }
    if (said->is.per_rank) {
        dcp__wire_entry own = said->is;
        status = rename_for_rank(in, &own);
        status = status == DCP_OK ? settle(in, &own, said->ordinal, &entry) : status;
    }
    for (; n > 0 && status == DCP_OK; n--) {
        status = take_chunk(in, &said->is, entry);
    }
    return status;
}

static dcp_status take_leader(intake *in)
{
    dcp__owner *o = in->o;
    uint64_t ordinal = 0;
    dcp_status status = DCP_OK;
    o->first_said[in->rank] = o->n_said;
    while (dcp__wire_left(&in->w) && status == DCP_OK) {
        status = take_name(in, &ordinal);
        status = status == DCP_OK ? take_chunks(in, &o->said[o->n_said - 1]) : status;
    }
    o->end_said[in->rank] = o->n_said;
    return status;
}

static dcp_status take_follower(intake *in, int leader)
{
    const dcp__owner *o = in->o;
    dcp_status status = DCP_OK;
    for (size_t i = o->first_said[leader]; i < o->end_said[leader] && status == DCP_OK; i++) {
        status = take_chunks(in, &o->said[i]);
    }
    return status == DCP_OK && dcp__wire_left(&in->w) ? malformed(in) : status;
}

static dcp_status take_message(intake *in)
{
    unsigned head = *dcp__get_bytes(&in->w, 1);
    int leader = in->o->hellos->of[in->rank].leader;
    bool has_names = head & DCP__PLAN_HAS_NAMES;
    in->has_content = head & DCP__PLAN_HAS_CONTENT;
    if (head >> 4 != DCP__WIRE_VERSION || (head & 15 & ~(unsigned)(DCP__PLAN_HAS_NAMES | DCP__PLAN_HAS_CONTENT)) ||
        (in->o->n_chunks && in->has_content != (in->o->content != NULL)) || has_names != (leader == in->rank)) {
        return malformed(in);
    }
    return has_names ? take_leader(in) : take_follower(in, leader);
}

dcp_status dcp__owner_add(dcp__owner *o, int rank, const void *bytes, size_t len, dcp_error *err)
{
    if (rank != o->next_rank || rank >= o->local->opts.world) {
        return dcp__fail(err, DCP_STATE, "plan of rank %d comes out of order", rank);
    }
    intake in = {.o = o, .w = dcp__wire_of(bytes, len), .rank = rank, .err = err};
    dcp_status status = DCP_OK;
    int leader = o->hellos->of[rank].leader;
    if (len == 0 && leader != rank && o->first_said[leader] != o->end_said[leader]) {
        status = malformed(&in); /* it keeps from us what its leader has told */
    } else if (len) {
        dcp__wire_reader_init(&in.names, o->ctx);
        status = take_message(&in);
        dcp__wire_reader_reset(&in.names);
    }
    o->next_rank++;
    o->first_item[o->next_rank] = o->n_items;
    return status;
}

/* ---- making ---- */

dcp_status dcp__owner_create(const dcp__local *local, const dcp__hellos *hellos, dcp__owner **out, dcp_error *err)
{
    uint32_t root;
    dcp__owner *o = dcp__calloc(local->ctx, 1, sizeof *o);
    if (!o) {
        return dcp__nomem(err);
    }
    o->ctx = local->ctx;
    o->local = local;
    o->hellos = hellos;
    dcp__arena_init(&o->arena, o->ctx, o->ctx->limits.max_parse_bytes);
    dcp__strmap_init(&o->by_name, o->ctx);
    dcp__buf_init(&o->faults, o->ctx);
    size_t world = (size_t)local->opts.world;
    o->first_item = dcp__calloc(o->ctx, world + 1, sizeof *o->first_item);
    o->first_said = dcp__calloc(o->ctx, world, sizeof *o->first_said);
    o->end_said = dcp__calloc(o->ctx, world, sizeof *o->end_said);
    bool ok = o->first_item && o->first_said && o->end_said;
    dcp_status status = ok ? add_node(o, 0, DCP__NONE, &root, err) : dcp__nomem(err);
    if (status != DCP_OK) {
        dcp__owner_free(o);
        return status;
    }
    *out = o;
    return DCP_OK;
}

void dcp__owner_free(dcp__owner *o)
{
    if (o) {
        void *const blocks[] = {o->entries, o->said, o->first_said, o->end_said,   o->chunks, o->numbers, o->content,
                                o->slots,   o->sets, o->items,      o->first_item, o->groups, o->placed};
        for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
            dcp__free(o->ctx, blocks[i]);
        }
        dcp__strmap_reset(&o->by_name);
        dcp__buf_reset(&o->faults);
        dcp__arena_reset(&o->arena);
        dcp__free(o->ctx, o);
    }
}

dcp__owner_counts dcp__owner_count(const dcp__owner *o)
{
    dcp__owner_counts n = {.entries = o->n_entries, .items = o->n_items, .chunks = o->n_chunks, .faults = o->n_faults};
    for (size_t i = 0; i < o->n_chunks; i++) {
        n.replicated += o->sets[o->chunks[i].set].n > 1;
    }
    return n;
}
