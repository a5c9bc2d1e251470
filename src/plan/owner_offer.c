/* From what all owners know of replicas to the decision who writes them, the same on every rank.
 *
 * An offer is the version, the number of faults, of clashes among them, and their text; then for each set of ranks that hold
 * something together: the set, and the number and weights of what they hold. No names: owner and place in the offer say which
 * chunk it is. */
#include "plan/owner.h"

#define MOST_FAULT_BYTES_SENT 2048

/* ---- groups ---- */

/* Replicated chunks, sorted by the node of their set: node numbers are few, so they are counted. */
dcp_status dcp__owner_group(dcp__owner *o, dcp_error *err)
{
    size_t n = 0;
    uint32_t *at = dcp__calloc(o->ctx, o->n_sets + 1, sizeof *at);
    for (size_t c = 0; c < o->n_chunks && at; c++) {
        bool is_replicated = o->sets[o->chunks[c].set].n > 1;
        at[o->chunks[c].set + 1] += is_replicated;
        n += is_replicated;
    }
    dcp__free(o->ctx, o->groups);
    o->groups = dcp__calloc(o->ctx, n, sizeof *o->groups);
    o->n_groups = n;
    if (!at || !o->groups) {
        dcp__free(o->ctx, at);
        return dcp__nomem(err);
    }
    for (size_t s = 0; s < o->n_sets; s++) {
        at[s + 1] += at[s];
    }
    for (size_t c = 0; c < o->n_chunks; c++) {
        dcp__owned_chunk *chunk = &o->chunks[c];
        if (o->sets[chunk->set].n > 1) {
            o->groups[at[chunk->set]++] = (uint32_t)c;
        } else {
            chunk->writer = o->sets[chunk->set].rank;
        }
    }
    dcp__free(o->ctx, at);
    return DCP_OK;
}

/* ---- sets: number of ranks; then runs of ranks at equal distances: start, number, distance ---- */

static void put_set(dcp__buf *b, const uint32_t *ranks, size_t n)
{
    uint32_t next = 0;
    dcp__put_varint(b, n);
    for (size_t i = 0, run; i < n; i += run) {
        uint32_t step = i + 1 < n ? ranks[i + 1] - ranks[i] : 0;
        for (run = 1; i + run < n && ranks[i + run] - ranks[i + run - 1] == step; run++) {
        }
        dcp__put_varint(b, ranks[i] - next);
        dcp__put_varint(b, run);
        if (run > 1) {
            dcp__put_varint(b, step);
        }
        next = ranks[i + run - 1] + 1;
    }
}

static bool get_set(dcp__wire *w, uint32_t *ranks, size_t n, uint32_t world)
{
    uint64_t next = 0;
    for (size_t i = 0; i < n && !w->bad;) {
        uint64_t rank = next + dcp__get_bounded(w, world), run = dcp__get_bounded(w, n - i);
        uint64_t step = run > 1 ? dcp__get_bounded(w, world) : 1;
        if (run == 0 || step == 0) {
            return false;
        }
        for (; run > 0; run--, rank += step) {
            if (rank >= world) {
                return false;
            }
            ranks[i++] = (uint32_t)rank;
            next = rank + 1;
        }
    }
    return !w->bad;
}

/* The ranks of a node, ascending, into `ranks`. */
static size_t ranks_of(const dcp__owner *o, uint32_t node, uint32_t *ranks)
{
    size_t n = o->sets[node].n;
    for (size_t i = n; i > 0; i--) {
        ranks[i - 1] = o->sets[node].rank;
        node = o->sets[node].parent;
    }
    return n;
}

/* ---- offering ---- */

static uint64_t weight_of(const dcp__owner *o, size_t group)
{
    uint64_t weight = o->chunks[o->groups[group]].weight;
    return weight < INT64_MAX ? weight : INT64_MAX;
}

static void put_weights(const dcp__owner *o, dcp__buf *b, size_t first, size_t end)
{
    uint64_t last = 0;
    for (size_t i = first; i < end; i++) {
        dcp__put_delta(b, weight_of(o, i), last);
        last = weight_of(o, i);
    }
}

static size_t whole_lines(const dcp__buf *faults)
{
    size_t n = faults->len < MOST_FAULT_BYTES_SENT ? faults->len : MOST_FAULT_BYTES_SENT;
    while (n > 0 && faults->data[n - 1] != '\n') {
        n--;
    }
    return n;
}

static size_t end_of_set(const dcp__owner *o, size_t first)
{
    size_t end = first;
    while (end < o->n_groups && o->chunks[o->groups[end]].set == o->chunks[o->groups[first]].set) {
        end++;
    }
    return end;
}

dcp_status dcp__owner_offer(dcp__owner *o, dcp__buf *out, dcp_error *err)
{
    dcp_status status = dcp__owner_group(o, err);
    uint32_t *ranks = dcp__calloc(o->ctx, (size_t)o->local->opts.world, sizeof *ranks);
    if (status != DCP_OK || !ranks) {
        dcp__free(o->ctx, ranks);
        return status == DCP_OK ? dcp__nomem(err) : status;
    }
    size_t text = whole_lines(&o->faults), start = out->len;
    dcp__buf_put_byte(out, DCP__WIRE_VERSION);
    dcp__put_varint(out, o->n_faults);
    dcp__put_varint(out, o->n_clashes);
    dcp__put_varint(out, text);
    dcp__buf_put(out, o->faults.data, text);
    for (size_t i = 0, end; i < o->n_groups; i = end) {
        end = end_of_set(o, i);
        put_set(out, ranks, ranks_of(o, o->chunks[o->groups[i]].set, ranks));
        dcp__put_varint(out, end - i);
        put_weights(o, out, i, end);
    }
    dcp__free(o->ctx, ranks);
    if (out->failed) {
        out->len = start;
        return dcp__nomem(err);
    }
    return DCP_OK;
}

/* ---- taking all offers together ---- */

typedef struct market {
    dcp_context *ctx;
    uint32_t world;
    dcp__arena arena; /* ranks of sets */
    dcp__rank_set *sets;
    size_t n_sets, cap_sets;
    dcp__strmap by_bytes; /* sets, as they stand in the offers */
    dcp__replica *replicas;
    size_t n, cap;
    uint64_t n_faults, n_clashes;
    dcp__buf text;
} market;

static dcp_status take_set(market *m, dcp__wire *w, uint32_t *out, dcp_error *err)
{
    const uint8_t *start = w->p;
    size_t n = (size_t)dcp__get_bounded(w, m->world);
    uint32_t *ranks = dcp__arena_alloc(&m->arena, n * sizeof *ranks);
    void *sets = m->sets;
    uint64_t existing;
    if (!ranks || !dcp__grow(m->ctx, &sets, &m->cap_sets, m->n_sets + 1, sizeof *m->sets)) {
        return ranks ? dcp__nomem(err) : dcp__arena_fail(&m->arena, err);
    }
    m->sets = sets;
    if (n < 2 || !get_set(w, ranks, n, m->world)) {
        dcp__wire_spoil(w);
        return DCP_OK;
    }
    dcp_str bytes = {(const char *)start, (size_t)(w->p - start)};
    dcp_status status = dcp__strmap_add(&m->by_bytes, bytes, m->n_sets, &existing, err);
    if (status == DCP_OK && existing == UINT64_MAX) {
        m->sets[m->n_sets] = (dcp__rank_set){ranks, n};
        existing = m->n_sets++;
    }
    *out = (uint32_t)existing;
    return status;
}

static dcp_status take_weights(market *m, dcp__wire *w, uint32_t set, dcp_error *err)
{
    size_t n = (size_t)dcp__get_bounded(w, dcp__wire_left(w));
    void *array = m->replicas;
    if (m->n + n >= UINT32_MAX) {
        return dcp__fail(err, DCP_LIMIT, "more than 2^32 chunks are held by several ranks");
    }
    if (!dcp__grow(m->ctx, &array, &m->cap, m->n + n, sizeof *m->replicas)) {
        return dcp__nomem(err);
    }
    m->replicas = array;
    for (uint64_t weight = 0; n > 0 && !w->bad; n--) {
        weight = dcp__get_delta(w, weight);
        m->replicas[m->n++] = (dcp__replica){weight, set, DCP__NONE};
    }
    return DCP_OK;
}

static dcp_status take_offer(market *m, int rank, const void *bytes, size_t len, dcp_error *err)
{
    dcp__wire w = dcp__wire_of(bytes, len);
    uint32_t set = 0;
    dcp_status status = DCP_OK;
    if (dcp__get_varint(&w) != DCP__WIRE_VERSION) {
        return dcp__wire_fail(&w, "offer", rank, err);
    }
    uint64_t n_faults = dcp__get_bounded(&w, INT32_MAX);
    m->n_faults += n_faults;
    m->n_clashes += dcp__get_bounded(&w, n_faults);
    uint64_t n_text = dcp__get_bounded(&w, MOST_FAULT_BYTES_SENT);
    const uint8_t *text = dcp__get_bytes(&w, n_text);
    dcp__buf_put(&m->text, text, text ? (size_t)n_text : 0);
    while (dcp__wire_left(&w) && status == DCP_OK) {
        status = take_set(m, &w, &set, err);
        if (status == DCP_OK && !w.bad) {
            status = take_weights(m, &w, set, err);
        }
    }
    return status != DCP_OK ? status : w.bad ? dcp__wire_fail(&w, "offer", rank, err) : DCP_OK;
}

/* ---- deciding ---- */

static void take_off(uint64_t *load, uint64_t bytes)
{
    *load -= *load < bytes ? *load : bytes;
}

/* What each rank writes anyway: all that it has, but for the replicas. */
static void set_loads(const market *m, const dcp__hellos *hellos, const uint64_t *of_set, uint64_t *load)
{
    for (uint32_t r = 0; r < m->world; r++) {
        load[r] = hellos->of[r].bytes;
    }
    for (size_t s = 0; s < m->n_sets; s++) {
        for (size_t i = 0; i < m->sets[s].n; i++) {
            take_off(&load[m->sets[s].ranks[i]], of_set[s]);
        }
    }
}

static dcp_status decide(const market *m, dcp__owner *o, dcp_error *err)
{
    uint64_t *load = dcp__calloc(m->ctx, m->world, sizeof *load);
    uint64_t *of_set = dcp__calloc(m->ctx, m->n_sets, sizeof *of_set);
    dcp_status status = load && of_set ? DCP_OK : dcp__nomem(err);
    if (status == DCP_OK) {
        for (size_t i = 0; i < m->n; i++) {
            of_set[m->replicas[i].set] += m->replicas[i].bytes;
        }
        set_loads(m, o->hellos, of_set, load);
        status = dcp__balance(m->ctx, &o->local->opts, m->sets, m->replicas, m->n, load, err);
    }
    dcp__free(m->ctx, load);
    dcp__free(m->ctx, of_set);
    return status;
}

/* All lines in one. */
static dcp_status fail_with_faults(const market *m, dcp__buf *faults, dcp_error *err)
{
    dcp_status status = m->n_clashes ? DCP_MISMATCH : DCP_ARG;
    char line[DCP_ERROR_MESSAGE_BYTES];
    size_t n = m->text.len < sizeof line ? m->text.len : sizeof line;
    for (size_t i = 0; i < n; i++) {
        line[i] = (char)(m->text.data[i] == '\n' ? ';' : m->text.data[i]);
    }
    if (faults) {
        dcp__buf_put(faults, m->text.data, m->text.len);
    }
    bool is_whole = n == m->text.len && n > 0;
    return dcp__fail(err, status, "the ranks' plans do not fit together (%llu fault%s): %.*s%s", (unsigned long long)m->n_faults,
                     m->n_faults == 1 ? "" : "s", (int)(is_whole ? n - 1 : n), line, is_whole ? "" : "...");
}

static dcp_status assign(market *m, dcp__owner *o, const void *const *offers, const size_t *lens, dcp__buf *faults,
                         dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t own = 0;
    for (uint32_t r = 0; r < m->world && status == DCP_OK; r++) {
        own = r == (uint32_t)o->local->opts.rank ? m->n : own;
        status = take_offer(m, (int)r, offers[r], lens[r], err);
    }
    status = status == DCP_OK && m->text.failed ? dcp__nomem(err) : status;
    if (status != DCP_OK) {
        return status;
    }
    if (m->n_faults) {
        return fail_with_faults(m, faults, err);
    }
    if (m->n - own < o->n_groups) {
        return dcp__fail(err, DCP_FORMAT, "the offer of this rank has lost %zu of its %zu items", o->n_groups - (m->n - own),
                         o->n_groups);
    }
    status = decide(m, o, err);
    for (size_t i = 0; i < o->n_groups && status == DCP_OK; i++) {
        o->chunks[o->groups[i]].writer = m->replicas[own + i].writer;
    }
    return status;
}

dcp_status dcp__owner_assign(dcp__owner *o, const void *const *offers, const size_t *lens, dcp__buf *faults, dcp_error *err)
{
    market m = {.ctx = o->ctx, .world = (uint32_t)o->local->opts.world};
    dcp__arena_init(&m.arena, o->ctx, o->ctx->limits.max_parse_bytes);
    dcp__strmap_init(&m.by_bytes, o->ctx);
    dcp__buf_init(&m.text, o->ctx);
    dcp_status status = assign(&m, o, offers, lens, faults, err);
    dcp__free(o->ctx, m.sets);
    dcp__free(o->ctx, m.replicas);
    dcp__strmap_reset(&m.by_bytes);
    dcp__arena_reset(&m.arena);
    dcp__buf_reset(&m.text);
    return status;
}

/* ---- verdicts ---- */

static bool is_writer(const dcp__owner *o, size_t item, uint32_t rank)
{
    return o->items[item] != DCP__NONE && o->chunks[o->items[item]].writer == rank;
}

static void put_verdict(const dcp__owner *o, int rank, dcp__buf *b)
{
    size_t first = o->first_item[rank], n = o->first_item[rank + 1] - first, written = 0;
    for (size_t i = 0; i < n; i++) {
        written += is_writer(o, first + i, (uint32_t)rank);
    }
    if (written == n) {
        return;
    }
    dcp__buf_put_byte(b, DCP__WIRE_VERSION);
    for (size_t i = 0; i < n; i += 8) {
        uint8_t bits = 0;
        for (size_t k = 0; k < 8 && i + k < n; k++) {
            bits = (uint8_t)(bits | is_writer(o, first + i + k, (uint32_t)rank) << k);
        }
        dcp__buf_put_byte(b, bits);
    }
}

dcp_status dcp__owner_verdicts(const dcp__owner *o, dcp__mail *out, dcp_error *err)
{
    dcp__mail mail;
    dcp_status status = dcp__mail_init(&mail, o->ctx, o->local->opts.world, err);
    if (status != DCP_OK) {
        return status;
    }
    for (int r = 0; r < o->local->opts.world; r++) {
        mail.start[r] = mail.bytes.len;
        put_verdict(o, r, &mail.bytes);
    }
    mail.start[o->local->opts.world] = mail.bytes.len;
    return dcp__mail_finish(&mail, out, err);
}
