/* What a rank sends to the owners of its names: its plan, and later where it has written what; and what it hears back.
 *
 * A plan message is a byte with version and flags, then for each name that the receiver owns, in the order of the sender's plan:
 *   [number] names skipped since the last one
 *   [name]
 *   number   of chunks
 *   chunks   each: box, or for objects their weight; [digest of the content]
 * Names and their numbers are sent by one of the ranks that list the same names, the lowest one. Messages of the others are taken
 * in after its own and have the same names in the same order. */
#include "plan/plan_mail.h"

void dcp__mail_reset(dcp__mail *m)
{
    dcp__free(m->bytes.ctx, m->start);
    m->start = NULL;
    dcp__buf_reset(&m->bytes);
}

dcp_status dcp__mail_init(dcp__mail *m, dcp_context *ctx, int world, dcp_error *err)
{
    dcp__buf_init(&m->bytes, ctx);
    m->start = dcp__calloc(ctx, (size_t)world + 1, sizeof *m->start);
    return m->start ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp__mail_finish(dcp__mail *m, dcp__mail *out, dcp_error *err)
{
    if (m->bytes.failed) {
        dcp__mail_reset(m);
        return dcp__nomem(err);
    }
    *out = *m;
    return DCP_OK;
}

/* ---- who gets what ---- */

static void route_entries(dcp__local *l, const dcp__hellos *hellos, dcp__route *r)
{
    size_t world = (size_t)l->opts.world;
    size_t *next = r->start + 1; /* starts become ends while entries are filled in */
    for (size_t e = 0; e < l->n_entries; e++) {
        r->owners[e] = (uint32_t)dcp__owner_of(l, hellos, e);
        r->start[r->owners[e] + 2]++;
    }
    for (size_t o = 0; o < world; o++) {
        next[o + 1] += next[o];
    }
    for (size_t e = 0; e < l->n_entries; e++) {
        r->entries[next[r->owners[e]]++] = (uint32_t)e;
    }
}

static void route_items(dcp__local *l, const dcp__route *r)
{
    size_t n = 0;
    for (size_t o = 0; o < (size_t)l->opts.world; o++) {
        l->sent_start[o] = n;
        for (size_t i = r->start[o]; i < r->start[o + 1]; i++) {
            const dcp__local_entry *e = &l->entries[r->entries[i]];
            memcpy(l->sent + n, l->order + e->first, e->n * sizeof *l->sent);
            n += e->n;
        }
    }
    l->sent_start[l->opts.world] = n;
}

dcp_status dcp__local_route(dcp__local *l, const dcp__hellos *hellos, dcp__route *out, dcp_error *err)
{
    size_t world = (size_t)l->opts.world;
    dcp__route r = {.entries = dcp__calloc(l->ctx, l->n_entries, sizeof *r.entries),
                    .owners = dcp__calloc(l->ctx, l->n_entries, sizeof *r.owners),
                    .start = dcp__calloc(l->ctx, world + 2, sizeof *r.start)};
    if (!l->sent_start) {
        l->sent_start = dcp__calloc(l->ctx, world + 1, sizeof *l->sent_start);
    }
    if (!r.entries || !r.owners || !r.start || !l->sent_start) {
        dcp__route_reset(l->ctx, &r);
        return dcp__nomem(err);
    }
    route_entries(l, hellos, &r);
    route_items(l, &r);
    *out = r;
    return DCP_OK;
}

void dcp__route_reset(dcp_context *ctx, dcp__route *r)
{
    dcp__free(ctx, r->entries);
    dcp__free(ctx, r->owners);
    dcp__free(ctx, r->start);
}

/* ---- plans ---- */

typedef struct encoder {
    const dcp__local *l;
    const dcp__digest *content;
    dcp__buf *out;
    dcp__wire_writer names;
} encoder;

static void put_item(encoder *x, uint32_t i)
{
    const dcp_write_item *item = &x->l->plan->items[i];
    if (item->kind == DCP_ITEM_TENSOR) {
        dcp__put_box(x->out, item->ndim, item->global_extents, item->box.offsets, item->box.sizes);
    } else {
        dcp__put_varint(x->out, dcp__item_weight(item));
    }
    if (x->content) {
        dcp__buf_put(x->out, x->content[i].bytes, sizeof x->content[i].bytes);
    }
}

static void put_message(encoder *x, const uint32_t *entries, size_t n, bool with_names)
{
    uint32_t next = 0;
    unsigned flags = (with_names ? DCP__PLAN_HAS_NAMES : 0) | (x->content ? DCP__PLAN_HAS_CONTENT : 0);
    dcp__buf_put_byte(x->out, (uint8_t)(DCP__WIRE_VERSION << 4 | flags));
    dcp__wire_writer_restart(&x->names);
    for (size_t i = 0; i < n; i++) {
        const dcp__local_entry *e = &x->l->entries[entries[i]];
        if (with_names) {
            dcp__wire_entry entry = dcp__local_describe(x->l, entries[i]);
            dcp__put_varint(x->out, entries[i] - next);
            dcp__put_entry(&x->names, x->out, &entry);
            next = entries[i] + 1;
        }
        dcp__put_varint(x->out, e->n);
        for (size_t c = 0; c < e->n; c++) {
            put_item(x, x->l->order[e->first + c]);
        }
    }
}

dcp_status dcp__local_encode(dcp__local *l, const dcp__hellos *hellos, const dcp__digest *content, dcp__mail *out, dcp_error *err)
{
    dcp__route route;
    dcp__mail mail;
    dcp_status status = dcp__local_route(l, hellos, &route, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__mail_init(&mail, l->ctx, l->opts.world, err);
    if (status == DCP_OK) {
        encoder x = {.l = l, .content = content, .out = &mail.bytes};
        dcp__wire_writer_init(&x.names, l->ctx);
        for (int o = 0; o < l->opts.world; o++) {
            size_t first = route.start[o], n = route.start[o + 1] - first;
            mail.start[o] = mail.bytes.len;
            if (n) {
                put_message(&x, route.entries + first, n, hellos->of[l->opts.rank].leader == l->opts.rank);
            }
        }
        mail.start[l->opts.world] = mail.bytes.len;
        dcp__wire_writer_reset(&x.names);
        status = dcp__mail_finish(&mail, out, err);
    }
    dcp__route_reset(l->ctx, &route);
    return status;
}

/* ---- verdicts: a byte with the version, a bit for each item sent; or nothing, if all are to be written ---- */

dcp_status dcp__local_accept(dcp__local *l, int owner, const void *bytes, size_t len, dcp_error *err)
{
    const uint8_t *p = bytes;
    size_t first = l->sent_start[owner], n = l->sent_start[owner + 1] - first;
    if (len && (len != 1 + (n + 7) / 8 || p[0] != DCP__WIRE_VERSION)) {
        dcp__wire w = dcp__wire_of(bytes, len);
        return dcp__wire_fail(&w, "verdict", owner, err);
    }
    for (size_t i = 0; i < n; i++) {
        l->writes[l->sent[first + i]] = len == 0 || (p[1 + i / 8] >> i % 8 & 1);
    }
    return DCP_OK;
}

/* ---- results: for each item written its file * 2, and 1 if it is transformed; its distance from the end of the one before; its
 * length ---- */

dcp_status dcp__local_results(const dcp__local *l, const dcp__placed *placed, dcp__mail *out, dcp_error *err)
{
    dcp__mail mail;
    dcp_status status = dcp__mail_init(&mail, l->ctx, l->opts.world, err);
    if (status != DCP_OK) {
        return status;
    }
    for (int o = 0; o < l->opts.world; o++) {
        uint64_t end = 0;
        mail.start[o] = mail.bytes.len;
        for (size_t i = l->sent_start[o]; i < l->sent_start[o + 1]; i++) {
            const dcp__placed *p = &placed[l->sent[i]];
            if (!l->writes[l->sent[i]]) {
                continue;
            }
            if (mail.bytes.len == mail.start[o]) {
                dcp__buf_put_byte(&mail.bytes, DCP__WIRE_VERSION);
            }
            dcp__put_placed(&mail.bytes, p, &end);
        }
    }
    mail.start[l->opts.world] = mail.bytes.len;
    return dcp__mail_finish(&mail, out, err);
}
