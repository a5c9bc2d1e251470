/* What is kept of a plan for the next save of the same structure.
 *
 * bytes: for each item sent a bit, whether this rank writes it; then for each rank the length of its plan message and the
 * message; then the writers of the chunks that several ranks hold, in the order of the offer. Taking the messages in again costs
 * an owner its share of the work, and leaves one way only in which its tables are made. */
#include "plan/owner.h"

#define MAGIC "libdcpPC"
#define HEAD_BYTES (8 + 1 + 16 + 8)

static void put_writes(const dcp__local *l, dcp__buf *b)
{
    size_t n = l->sent_start[l->opts.world];
    for (size_t i = 0; i < n; i += 8) {
        uint8_t bits = 0;
        for (size_t k = 0; k < 8 && i + k < n; k++) {
            bits = (uint8_t)(bits | l->writes[l->sent[i + k]] << k);
        }
        dcp__buf_put_byte(b, bits);
    }
}

dcp_status dcp__plan_cache_make(const dcp__local *l, const dcp__owner *o, const dcp__hellos *hellos, const void *const *messages,
                                const size_t *lens, dcp__plan_cache *out, dcp_error *err)
{
    dcp__plan_cache c = {.structure = l->structure, .key = hellos->key};
    dcp__buf_init(&c.bytes, l->ctx);
    put_writes(l, &c.bytes);
    for (int r = 0; r < l->opts.world; r++) {
        dcp__put_varint(&c.bytes, lens[r]);
        dcp__buf_put(&c.bytes, messages[r], lens[r]);
    }
    for (size_t i = 0; i < o->n_groups; i++) {
        dcp__put_varint(&c.bytes, o->chunks[o->groups[i]].writer);
    }
    if (c.bytes.failed) {
        dcp__plan_cache_reset(&c);
        return dcp__nomem(err);
    }
    *out = c;
    return DCP_OK;
}

void dcp__plan_cache_reset(dcp__plan_cache *c)
{
    c->key = 0;
    dcp__buf_reset(&c->bytes);
}

bool dcp__plan_cache_fits(const dcp__hellos *hellos)
{
    for (int r = 0; r < hellos->world; r++) {
        if (hellos->of[r].cache_key != hellos->key) {
            return false;
        }
    }
    return true;
}

/* ---- opening ---- */

static dcp_status damaged(const dcp__wire *w, const dcp__local *l, dcp_error *err)
{
    return dcp__wire_fail(w, "plan cache", l->opts.rank, err);
}

static dcp_status replay(dcp__owner *o, dcp__wire *w, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < o->local->opts.world && status == DCP_OK; r++) {
        uint64_t len = dcp__get_varint(w);
        const uint8_t *message = dcp__get_bytes(w, len);
        status = w->bad ? damaged(w, o->local, err) : dcp__owner_add(o, r, message, (size_t)len, err);
    }
    return status;
}

static bool is_holder(const dcp__owner *o, uint32_t set, uint32_t rank)
{
    while (o->sets[set].n && o->sets[set].rank > rank) {
        set = o->sets[set].parent;
    }
    return o->sets[set].n && o->sets[set].rank == rank;
}

static dcp_status get_writers(dcp__owner *o, dcp__wire *w, dcp_error *err)
{
    dcp_status status = dcp__owner_group(o, err);
    for (size_t i = 0; i < o->n_groups && status == DCP_OK; i++) {
        dcp__owned_chunk *c = &o->chunks[o->groups[i]];
        c->writer = (uint32_t)dcp__get_bounded(w, (uint64_t)o->local->opts.world - 1);
        if (w->bad || !is_holder(o, c->set, c->writer)) {
            return damaged(w, o->local, err);
        }
    }
    return status == DCP_OK && dcp__wire_left(w) ? damaged(w, o->local, err) : status;
}

static dcp_status get_writes(dcp__local *l, dcp__wire *w, dcp_error *err)
{
    size_t n = l->sent_start[l->opts.world];
    const uint8_t *bits = dcp__get_bytes(w, (n + 7) / 8);
    if (!bits) {
        return damaged(w, l, err);
    }
    for (size_t i = 0; i < n; i++) {
        l->writes[l->sent[i]] = bits[i / 8] >> i % 8 & 1;
    }
    return DCP_OK;
}

dcp_status dcp__plan_cache_open(const dcp__plan_cache *c, dcp__local *l, const dcp__hellos *hellos, dcp__owner **out,
                                dcp_error *err)
{
    dcp__wire w = dcp__wire_of(c->bytes.data, c->bytes.len);
    dcp__route route;
    dcp__owner *o = NULL;
    if (c->key != hellos->key || memcmp(&c->structure, &l->structure, sizeof l->structure) != 0) {
        return dcp__fail(err, DCP_STATE, "the plan cache is of another plan");
    }
    dcp_status status = dcp__local_route(l, hellos, &route, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__route_reset(l->ctx, &route);
    status = get_writes(l, &w, err);
    status = status == DCP_OK ? dcp__owner_create(l, hellos, &o, err) : status;
    status = status == DCP_OK ? replay(o, &w, err) : status;
    status = status == DCP_OK ? get_writers(o, &w, err) : status;
    if (status != DCP_OK) {
        dcp__owner_free(o);
        return status;
    }
    *out = o;
    return DCP_OK;
}

/* ---- the stored form: magic, version, structure, key, bytes, digest of all that ---- */

dcp_status dcp__plan_cache_encode(const dcp__plan_cache *c, dcp__buf *out, dcp_error *err)
{
    size_t start = out->len;
    dcp__buf_put(out, MAGIC, 8);
    dcp__buf_put_byte(out, DCP__WIRE_VERSION);
    dcp__buf_put(out, c->structure.bytes, sizeof c->structure.bytes);
    dcp__buf_put(out, &c->key, sizeof c->key);
    dcp__buf_put(out, c->bytes.data, c->bytes.len);
    if (!out->failed) {
        dcp__digest digest = dcp__xxh3_128(out->data + start, out->len - start);
        dcp__buf_put(out, digest.bytes, sizeof digest.bytes);
    }
    if (out->failed) {
        out->len = start;
        return dcp__nomem(err);
    }
    return DCP_OK;
}

dcp_status dcp__plan_cache_decode(dcp_context *ctx, const void *bytes, size_t len, dcp__plan_cache *out, dcp_error *err)
{
    const uint8_t *p = bytes;
    dcp__plan_cache c;
    if (len < HEAD_BYTES + sizeof(dcp__digest) || memcmp(p, MAGIC, 8) != 0 || p[8] != DCP__WIRE_VERSION) {
        return dcp__fail_at(err, DCP_FORMAT, 0, "this is no plan cache of version %d", DCP__WIRE_VERSION);
    }
    size_t end = len - sizeof(dcp__digest);
    dcp__digest digest = dcp__xxh3_128(p, end);
    if (memcmp(digest.bytes, p + end, sizeof digest.bytes) != 0) {
        return dcp__fail_at(err, DCP_CHECKSUM, end, "the plan cache is damaged: its digest does not match");
    }
    memcpy(c.structure.bytes, p + 9, sizeof c.structure.bytes);
    c.key = dcp__load64(p + 25);
    dcp__buf_init(&c.bytes, dcp__context(ctx));
    dcp__buf_put(&c.bytes, p + HEAD_BYTES, end - HEAD_BYTES);
    if (c.bytes.failed) {
        dcp__buf_reset(&c.bytes);
        return dcp__nomem(err);
    }
    *out = c;
    return DCP_OK;
}
