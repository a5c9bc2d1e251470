/* The ranks of a save as arrays in one process: their plans go through all steps of global_plan.h. */
#ifndef TESTS_SUPPORT_PLAN_WORLD_H
#define TESTS_SUPPORT_PLAN_WORLD_H

#include <stdlib.h>

#include "plan/global_plan.h"

typedef struct plan_world {
    dcp_context *ctx;
    int n;
    dcp__global_opts opts;             /* world and rank are filled in */
    const dcp_save_plan *const *plans; /* [rank], the caller's */
    const dcp__digest *const *content; /* [rank]; NULL: not compared */
    bool use_cache;                    /* if it fits */
    dcp__plan_cache *caches;           /* [rank]; kept from save to save */
    dcp__local **locals;
    dcp__hellos hellos;
    dcp__owner **owners;
    dcp__mail *plan_mail, *verdicts, *results; /* [rank] */
    dcp__buf *offers, *fragments, *facts;
    dcp__buf faults;
    dcp__metadata *m;
    bool used_cache;
    size_t plan_bytes, verdict_bytes, result_bytes, offer_bytes, n_written;
} plan_world;

#define PW_RECORD_BYTES 4096 /* each item is written to so much space, at the place of its number */

static inline dcp_status pw_init(plan_world *w, dcp_context *ctx, int n, const dcp_save_plan *const *plans)
{
    size_t world = (size_t)n;
    *w = (plan_world){.ctx = dcp__context(ctx), .n = n, .plans = plans};
    w->caches = calloc(world, sizeof *w->caches);
    w->locals = calloc(world, sizeof(dcp__local *));
    w->owners = calloc(world, sizeof(dcp__owner *));
    w->plan_mail = calloc(world, sizeof *w->plan_mail);
    w->verdicts = calloc(world, sizeof *w->verdicts);
    w->results = calloc(world, sizeof *w->results);
    w->offers = calloc(world, sizeof *w->offers);
    w->fragments = calloc(world, sizeof *w->fragments);
    w->facts = calloc(world, sizeof *w->facts);
    for (size_t r = 0; r < world; r++) {
        dcp__buf_init(&w->caches[r].bytes, w->ctx);
    }
    return DCP_OK;
}

/* Forgets a save, but not the caches. */
static inline void pw_restart(plan_world *w)
{
    for (int r = 0; r < w->n; r++) {
        dcp__owner_free(w->owners[r]);
        dcp__local_free(w->locals[r]);
        w->owners[r] = NULL;
        w->locals[r] = NULL;
        dcp__mail *mail[] = {&w->plan_mail[r], &w->verdicts[r], &w->results[r]};
        dcp__buf *bufs[] = {&w->offers[r], &w->fragments[r], &w->facts[r]};
        for (int i = 0; i < 3; i++) {
            if (mail[i]->bytes.ctx) {
                dcp__mail_reset(mail[i]);
            }
            if (bufs[i]->ctx) {
                dcp__buf_reset(bufs[i]);
            }
            dcp__buf_init(bufs[i], w->ctx);
        }
    }
    if (w->hellos.ctx) {
        dcp__hellos_reset(&w->hellos);
    }
    if (w->faults.ctx) {
        dcp__buf_reset(&w->faults);
    }
    dcp__buf_init(&w->faults, w->ctx);
    dcp__metadata_free(w->m);
    w->m = NULL;
    w->plan_bytes = w->verdict_bytes = w->result_bytes = w->offer_bytes = w->n_written = 0;
}

static inline void pw_free(plan_world *w)
{
    pw_restart(w);
    for (int r = 0; r < w->n; r++) {
        dcp__plan_cache_reset(&w->caches[r]);
    }
    void *const blocks[] = {w->caches,  w->locals, w->owners,    w->plan_mail, w->verdicts,
                            w->results, w->offers, w->fragments, w->facts};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        free(blocks[i]);
    }
}

/* The message of one rank to another. */
static inline const void *pw_message(const dcp__mail *m, int to, size_t *len)
{
    *len = m->start[to + 1] - m->start[to];
    return *len ? m->bytes.data + m->start[to] : NULL;
}

static inline dcp_status pw_hello(plan_world *w, dcp_error *err)
{
    uint8_t *bytes = malloc((size_t)w->n * DCP__HELLO_BYTES);
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        dcp__global_opts opts = w->opts;
        opts.world = w->n;
        opts.rank = r;
        status = dcp__local_make(w->plans[r], &opts, &w->locals[r], err);
        if (status == DCP_OK) {
            dcp__hello_encode(w->locals[r], w->caches[r].key ? &w->caches[r] : NULL, bytes + (size_t)r * DCP__HELLO_BYTES);
        }
    }
    if (status == DCP_OK) {
        status = dcp__hellos_decode(w->ctx, bytes, (size_t)w->n * DCP__HELLO_BYTES, w->n, &w->hellos, err);
    }
    free(bytes);
    return status;
}

static inline dcp_status pw_encode(plan_world *w, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        status = dcp__local_encode(w->locals[r], &w->hellos, w->content ? w->content[r] : NULL, &w->plan_mail[r], err);
        w->plan_bytes += status == DCP_OK ? w->plan_mail[r].bytes.len : 0;
    }
    return status;
}

static inline dcp_status pw_own(plan_world *w, int owner, dcp_error *err)
{
    dcp_status status = dcp__owner_create(w->locals[owner], &w->hellos, &w->owners[owner], err);
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        size_t len;
        const void *message = pw_message(&w->plan_mail[r], owner, &len);
        status = dcp__owner_add(w->owners[owner], r, message, len, err);
    }
    status = status == DCP_OK ? dcp__owner_check(w->owners[owner], err) : status;
    status = status == DCP_OK ? dcp__owner_offer(w->owners[owner], &w->offers[owner], err) : status;
    w->offer_bytes += w->offers[owner].len;
    return status;
}

static inline dcp_status pw_assign(plan_world *w, dcp_error *err)
{
    const void **offers = calloc((size_t)w->n, sizeof(void *));
    size_t *lens = calloc((size_t)w->n, sizeof *lens);
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n; r++) {
        offers[r] = w->offers[r].data;
        lens[r] = w->offers[r].len;
    }
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        status = dcp__owner_assign(w->owners[r], offers, lens, r ? NULL : &w->faults, err);
        status = status == DCP_OK ? dcp__owner_verdicts(w->owners[r], &w->verdicts[r], err) : status;
    }
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        w->verdict_bytes += w->verdicts[r].bytes.len;
        for (int o = 0; o < w->n && status == DCP_OK; o++) {
            size_t len;
            const void *message = pw_message(&w->verdicts[o], r, &len);
            status = dcp__local_accept(w->locals[r], o, message, len, err);
        }
    }
    free(offers);
    free(lens);
    return status;
}

static inline dcp_status pw_open_caches(plan_world *w, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        status = dcp__plan_cache_open(&w->caches[r], w->locals[r], &w->hellos, &w->owners[r], err);
    }
    return status;
}

static inline dcp_status pw_keep_caches(plan_world *w, dcp_error *err)
{
    const void **messages = calloc((size_t)w->n, sizeof(void *));
    size_t *lens = calloc((size_t)w->n, sizeof *lens);
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        dcp__plan_cache made;
        for (int from = 0; from < w->n; from++) {
            messages[from] = pw_message(&w->plan_mail[from], r, &lens[from]);
        }
        status = dcp__plan_cache_make(w->locals[r], w->owners[r], &w->hellos, messages, lens, &made, err);
        if (status == DCP_OK) {
            dcp__plan_cache_reset(&w->caches[r]);
            w->caches[r] = made;
        }
    }
    free(messages);
    free(lens);
    return status;
}

/* Item i of a rank goes to file i % 2. */
static inline dcp_status pw_write(plan_world *w, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        size_t n = w->plans[r]->n;
        dcp__placed *placed = calloc(n + 1, sizeof *placed);
        for (size_t i = 0; i < n; i++) {
            placed[i] = (dcp__placed){i * PW_RECORD_BYTES, 100 + i, (uint32_t)i % 2, i % 3 == 0};
            w->n_written += w->locals[r]->writes[i];
        }
        status = dcp__local_results(w->locals[r], placed, &w->results[r], err);
        w->result_bytes += status == DCP_OK ? w->results[r].bytes.len : 0;
        free(placed);
    }
    return status;
}

static inline dcp_status pw_fragments(plan_world *w, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int o = 0; o < w->n && status == DCP_OK; o++) {
        for (int r = 0; r < w->n && status == DCP_OK; r++) {
            size_t len;
            const void *message = pw_message(&w->results[r], o, &len);
            status = dcp__owner_take_results(w->owners[o], r, message, len, err);
        }
        status = status == DCP_OK ? dcp__owner_fragment(w->owners[o], &w->fragments[o], err) : status;
    }
    return status;
}

static inline dcp_status pw_facts(plan_world *w, dcp_error *err)
{
    const dcp__digest digest = {{1, 2, 3}};
    dcp__file_facts files[2] = {{&digest, 1}, {NULL, 0}};
    dcp_status status = DCP_OK;
    for (int r = 0; r < w->n && status == DCP_OK; r++) {
        status = dcp__facts_encode(w->locals[r], &w->hellos, files, 2, &w->facts[r], err);
    }
    return status;
}

static inline dcp_status pw_merge(plan_world *w, dcp_error *err)
{
    size_t n = (size_t)w->n;
    const void **bytes = calloc(2 * n, sizeof(void *));
    size_t *lens = calloc(2 * n, sizeof *lens);
    for (size_t r = 0; r < n; r++) {
        bytes[r] = w->fragments[r].data;
        lens[r] = w->fragments[r].len;
        bytes[n + r] = w->facts[r].data;
        lens[n + r] = w->facts[r].len;
    }
    dcp__merge_input in = {w->n, "", "stream.zstd/1", bytes, bytes + n, lens, lens + n};
    dcp_status status = dcp__merge_fragments(w->ctx, &in, &w->m, err);
    free(bytes);
    free(lens);
    return status;
}

/* All steps. On success the caches are those of this save. */
static inline dcp_status pw_save(plan_world *w, dcp_error *err)
{
    pw_restart(w);
    dcp_status status = pw_hello(w, err);
    w->used_cache = status == DCP_OK && w->use_cache && dcp__plan_cache_fits(&w->hellos);
    if (w->used_cache) {
        status = pw_open_caches(w, err);
    } else {
        status = status == DCP_OK ? pw_encode(w, err) : status;
        for (int r = 0; r < w->n && status == DCP_OK; r++) {
            status = pw_own(w, r, err);
        }
        status = status == DCP_OK ? pw_assign(w, err) : status;
    }
    status = status == DCP_OK ? pw_write(w, err) : status;
    status = status == DCP_OK ? pw_fragments(w, err) : status;
    status = status == DCP_OK ? pw_facts(w, err) : status;
    status = status == DCP_OK ? pw_merge(w, err) : status;
    return status == DCP_OK && !w->used_cache ? pw_keep_caches(w, err) : status;
}

#endif
