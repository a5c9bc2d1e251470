#include "engine/save/group_plan.h"

#include <string.h>

/* ---- messages ---- */

static dcp_comm_send *sends_of(dcp_context *ctx, const dcp__mail *mail, int world)
{
    dcp_comm_send *send = dcp__alloc(ctx, (size_t)world * sizeof *send);
    for (int r = 0; send && r < world; r++) {
        send[r] = (dcp_comm_send){mail->bytes.data + mail->start[r], mail->start[r + 1] - mail->start[r]};
    }
    return send;
}

dcp_status dcp__exchange_mail(const dcp__step *step, dcp_status mine, dcp__mail *mail, dcp__parts *out, dcp_error *err)
{
    dcp_comm_send *send = NULL;
    if (mine == DCP_OK && mail->start) { /* else there is nothing for anybody */
        send = sends_of(step->ctx, mail, dcp__step_size(step));
        mine = send ? DCP_OK : dcp__nomem(err);
    }
    dcp_status status = dcp__exchange(step, mine, send, out, err);
    dcp__free(step->ctx, send);
    if (mail->start) {
        dcp__mail_reset(mail);
    }
    return status;
}

/* The same bytes to everybody. */
static dcp_status share(dcp__group_plan *g, dcp_status mine, const dcp__buf *bytes, dcp__parts *out, dcp_error *err)
{
    dcp_comm_send *send = NULL;
    if (mine == DCP_OK) {
        send = dcp__alloc(g->step.ctx, (size_t)g->opts.world * sizeof *send);
        mine = send ? DCP_OK : dcp__nomem(err);
    }
    for (int r = 0; send && r < g->opts.world; r++) {
        send[r] = (dcp_comm_send){bytes->data, bytes->len};
    }
    dcp_status status = dcp__exchange(&g->step, mine, send, out, err);
    dcp__free(g->step.ctx, send);
    return status;
}

/* Pointers and lengths of all parts, in one block that the caller frees. */
static const void **pointers_of(dcp_context *ctx, const dcp__parts *parts, size_t **lens)
{
    size_t n = (size_t)parts->n;
    const void **out = dcp__alloc(ctx, n * (sizeof(void *) + sizeof(size_t)));
    *lens = (size_t *)(out + n);
    for (size_t r = 0; out && r < n; r++) {
        out[r] = dcp__part(parts, (int)r, &(*lens)[r]);
    }
    return out;
}

/* ---- the first word ---- */

static dcp_status all_hellos(dcp__group_plan *g, dcp_status mine, const dcp__plan_cache *cache, dcp_error *err)
{
    uint8_t own[DCP__HELLO_BYTES] = {0};
    size_t len = (size_t)g->opts.world * DCP__HELLO_BYTES;
    uint8_t *all = dcp__alloc(g->step.ctx, len);
    if (mine == DCP_OK && !all) {
        mine = dcp__nomem(err);
    }
    if (mine == DCP_OK) {
        dcp__hello_encode(g->local, cache, own);
    }
    dcp_status status = dcp__agree(&g->step, mine, err);
    if (status == DCP_OK) {
        if (g->step.comm) {
            status = dcp_comm_all_gather(g->step.comm, own, sizeof own, all, 0, err);
        } else {
            memcpy(all, own, sizeof own);
        }
    }
    if (status == DCP_OK) { /* a rank that lacks memory for them must not leave the others waiting */
        mine = dcp__hellos_decode(g->step.ctx, all, len, g->opts.world, &g->hellos, err);
        status = dcp__agree(&g->step, mine, err);
    }
    dcp__free(g->step.ctx, all);
    return status;
}

/* ---- planning anew ---- */

static dcp_status collect(dcp__group_plan *g, dcp__buf *offer, dcp_error *err)
{
    dcp_status status = dcp__owner_create(g->local, &g->hellos, &g->owner, err);
    for (int r = 0; r < g->opts.world && status == DCP_OK; r++) {
        size_t len;
        const uint8_t *message = dcp__part(&g->messages, r, &len);
        status = dcp__owner_add(g->owner, r, message, len, err);
    }
    status = status == DCP_OK ? dcp__owner_check(g->owner, err) : status;
    return status == DCP_OK ? dcp__owner_offer(g->owner, offer, err) : status;
}

static dcp_status assign(dcp__group_plan *g, const dcp__parts *offers, dcp__mail *verdicts, dcp_error *err)
{
    size_t *lens;
    const void **bytes = pointers_of(g->step.ctx, offers, &lens);
    if (!bytes) {
        return dcp__nomem(err);
    }
    dcp_status status = dcp__owner_assign(g->owner, bytes, lens, NULL, err);
    dcp__free(g->step.ctx, bytes);
    if ((status == DCP_MISMATCH || status == DCP_ARG) && dcp__step_rank(&g->step) != g->coordinator) {
        return DCP_OK; /* all ranks find the same faults: it is enough that one of them tells */
    }
    return status == DCP_OK ? dcp__owner_verdicts(g->owner, verdicts, err) : status;
}

static dcp_status accept_all(dcp__group_plan *g, const dcp__parts *verdicts, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < g->opts.world && status == DCP_OK; r++) {
        size_t len;
        const uint8_t *verdict = dcp__part(verdicts, r, &len);
        status = dcp__local_accept(g->local, r, verdict, len, err);
    }
    return status;
}

static dcp_status plan_anew(dcp__group_plan *g, dcp_status mine, const dcp__digest *content, dcp_error *err)
{
    dcp__mail mail = {0};
    dcp__parts offers = {0}, verdicts = {0};
    dcp__buf offer;
    dcp__buf_init(&offer, g->step.ctx);
    mine = mine == DCP_OK ? dcp__local_encode(g->local, &g->hellos, content, &mail, err) : mine;
    g->sent_bytes = mine == DCP_OK ? mail.bytes.len : 0;
    dcp_status status = dcp__exchange_mail(&g->step, mine, &mail, &g->messages, err);
    if (status == DCP_OK) {
        mine = collect(g, &offer, err);
        status = share(g, mine, &offer, &offers, err);
    }
    if (status == DCP_OK) {
        mine = assign(g, &offers, &mail, err);
        status = dcp__exchange_mail(&g->step, mine, &mail, &verdicts, err);
    }
    if (status == DCP_OK) {
        status = dcp__agree(&g->step, accept_all(g, &verdicts, err), err);
    }
    dcp__buf_reset(&offer);
    dcp__parts_free(&offers);
    dcp__parts_free(&verdicts);
    return status;
}

dcp_status dcp__group_plan_make(dcp__group_plan *g, const dcp_save_plan *plan, dcp_status mine, const dcp__digest *content,
                                const dcp__plan_cache *cache, dcp_error *err)
{
    g->opts.world = dcp__step_size(&g->step);
    g->opts.rank = dcp__step_rank(&g->step);
    mine = mine == DCP_OK ? dcp__local_make(plan, &g->opts, &g->local, err) : mine;
    dcp_status status = all_hellos(g, mine, cache, err);
    if (status == DCP_OK && cache && dcp__plan_cache_fits(&g->hellos)) {
        g->was_cached = true;
        return dcp__agree(&g->step, dcp__plan_cache_open(cache, g->local, &g->hellos, &g->owner, err), err);
    }
    return status == DCP_OK ? plan_anew(g, DCP_OK, content, err) : status;
}

/* ---- after the writing ---- */

static dcp_status take_results(dcp__group_plan *g, const dcp__parts *results, dcp__buf *fragment, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < g->opts.world && status == DCP_OK; r++) {
        size_t len;
        const uint8_t *bytes = dcp__part(results, r, &len);
        status = dcp__owner_take_results(g->owner, r, bytes, len, err);
    }
    return status == DCP_OK ? dcp__owner_fragment(g->owner, fragment, err) : status;
}

static dcp_status merge(dcp__group_plan *g, const dcp__parts *fragments, const dcp__parts *facts, dcp__merge_input in,
                        dcp__metadata **out, dcp_error *err)
{
    size_t *fragment_lens, *fact_lens;
    const void **fragment_bytes = pointers_of(g->step.ctx, fragments, &fragment_lens);
    const void **fact_bytes = pointers_of(g->step.ctx, facts, &fact_lens);
    dcp_status status = DCP_NOMEM;
    if (fragment_bytes && fact_bytes) {
        in.world = g->opts.world;
        in.fragments = fragment_bytes;
        in.fragment_lens = fragment_lens;
        in.facts = fact_bytes;
        in.fact_lens = fact_lens;
        status = dcp__merge_fragments(g->step.ctx, &in, out, err);
    } else {
        dcp__nomem(err);
    }
    dcp__free(g->step.ctx, fragment_bytes);
    dcp__free(g->step.ctx, fact_bytes);
    return status;
}

dcp_status dcp__group_results(dcp__group_plan *g, dcp_status mine, const dcp__placed *placed, const dcp__file_facts *files,
                              size_t n_files, dcp__merge_input in, dcp__metadata **out, dcp_error *err)
{
    dcp__mail mail = {0};
    dcp__parts results = {0}, fragments = {0}, facts = {0};
    dcp__buf fragment, own_facts;
    bool is_coordinator = dcp__step_rank(&g->step) == g->coordinator;
    dcp__metadata *m = NULL;
    dcp__buf_init(&fragment, g->step.ctx);
    dcp__buf_init(&own_facts, g->step.ctx);
    mine = mine == DCP_OK ? dcp__local_results(g->local, placed, &mail, err) : mine;
    dcp_status status = dcp__exchange_mail(&g->step, mine, &mail, &results, err);
    if (status == DCP_OK) {
        mine = take_results(g, &results, &fragment, err);
        mine = mine == DCP_OK ? dcp__facts_encode(g->local, &g->hellos, files, n_files, &own_facts, err) : mine;
        status = dcp__gather(&g->step, mine, g->coordinator, fragment.data, fragment.len, &fragments, err);
    }
    status =
        status == DCP_OK ? dcp__gather(&g->step, DCP_OK, g->coordinator, own_facts.data, own_facts.len, &facts, err) : status;
    if (status == DCP_OK) {
        mine = is_coordinator ? merge(g, &fragments, &facts, in, &m, err) : DCP_OK;
        status = dcp__agree(&g->step, mine, err);
    }
    if (status == DCP_OK) {
        *out = m;
    } else {
        dcp__metadata_free(m);
    }
    dcp__parts_free(&results);
    dcp__parts_free(&fragments);
    dcp__parts_free(&facts);
    dcp__buf_reset(&fragment);
    dcp__buf_reset(&own_facts);
    return status;
}

dcp_status dcp__group_plan_keep(const dcp__group_plan *g, dcp__plan_cache *out)
{
    size_t *lens;
    const void **messages = pointers_of(g->step.ctx, &g->messages, &lens);
    if (!messages) {
        return DCP_NOMEM;
    }
    dcp_status status = dcp__plan_cache_make(g->local, g->owner, &g->hellos, messages, lens, out, NULL);
    dcp__free(g->step.ctx, messages);
    return status;
}

void dcp__group_plan_reset(dcp__group_plan *g)
{
    dcp__owner_free(g->owner);
    dcp__local_free(g->local);
    dcp__hellos_reset(&g->hellos);
    dcp__parts_free(&g->messages);
    g->owner = NULL;
    g->local = NULL;
}
