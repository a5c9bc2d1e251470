/* Time and bytes of the global plan.
 *
 *     bench_plan [RANKS [TENSORS]]       256 and 1000 unless given otherwise; every rank as an owner
 *     bench_plan --share RANKS TENSORS   the busiest owner alone: 4096 and 1000 in the bars
 *     bench_plan --tiling CHUNKS         one tensor in so many chunks, valid, overlapping, with a gap
 *
 * Tensors are float32, two-dimensional, cut in rows over all ranks, their names of about 40 bytes. All runs in one process on one
 * core. "named": every rank lists the names in
 * another order, so that all of them send names, whose hashes choose the owners. Times are of the processor. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "plan/coverage.h"
#include "plan_world.h"

static double milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void *need(void *p)
{
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

static void must(dcp_status status, const dcp_error *err)
{
    if (status != DCP_OK) {
        fprintf(stderr, "%s: %s\n", dcp_status_name(status), err->message);
        exit(1);
    }
}

/* ---- plans ---- */

typedef struct model {
    size_t n;
    char (*names)[64];
    dcp_key (*paths)[2];
    int64_t extents[2];
} model;

static model make_model(size_t n, int ranks)
{
    static const char *const parts[] = {"self_attn.q_proj.weight", "self_attn.k_proj.weight",        "self_attn.v_proj.weight",
                                        "self_attn.o_proj.weight", "mlp.gate_proj.weight",           "mlp.up_proj.weight",
                                        "mlp.down_proj.weight",    "post_attention_layernorm.weight"};
    model m = {n, need(calloc(n, sizeof *m.names)), need(calloc(n, sizeof *m.paths)), {ranks * 16, 4096}};
    for (size_t i = 0; i < n; i++) {
        snprintf(m.names[i], sizeof m.names[i], "model.layers.%zu.%s", i / 8, parts[i % 8]);
        m.paths[i][0] = dcp_key_str("model");
        m.paths[i][1] = dcp_key_str(m.names[i] + 6);
    }
    return m;
}

static dcp_save_plan *make_plan(const model *m, int rank, size_t first)
{
    static uint8_t memory;
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_plan *p = NULL;
    int64_t *numbers = need(calloc(4, sizeof *numbers)); /* kept until the end */
    numbers[0] = rank * 16;
    numbers[2] = 16;
    numbers[3] = m->extents[1];
    must(dcp__save_plan_create(dcp__context(NULL), &p, &err), &err);
    for (size_t i = 0; i < m->n; i++) {
        size_t t = (i + first) % m->n;
        dcp_write_item item = {.fqn = dcp_str_of(m->names[t]),
                               .path = m->paths[t],
                               .path_len = 2,
                               .kind = DCP_ITEM_TENSOR,
                               .dtype = DCP_FLOAT32,
                               .ndim = 2,
                               .global_extents = m->extents,
                               .box = {numbers, numbers + 2}};
        item.tensor = dcp_tensor_make(DCP_FLOAT32, 2, numbers + 2, &memory);
        must(dcp_save_plan_add(p, &item, &err), &err);
    }
    return p;
}

/* ---- all ranks ---- */

static double told(const char *what, double since)
{
    double now = milliseconds();
    printf("  %-28s %8.1f ms\n", what, now - since);
    return milliseconds();
}

static void run_all(const model *m, int ranks, bool with_names)
{
    dcp_error err = DCP_ERROR_INIT;
    plan_world w;
    dcp_save_plan **plans = need(calloc((size_t)ranks, sizeof(dcp_save_plan *)));
    for (int r = 0; r < ranks; r++) {
        plans[r] = make_plan(m, r, with_names ? (size_t)r : 0);
    }
    must(pw_init(&w, NULL, ranks, (const dcp_save_plan *const *)plans), &err);
    pw_restart(&w);
    printf("%d ranks x %zu tensors%s\n", ranks, m->n, with_names ? ", named" : "");
    double start = milliseconds(), t = start;
    must(pw_hello(&w, &err), &err);
    t = told("own plans, hashes", t);
    must(pw_encode(&w, &err), &err);
    t = told("encode", t);
    for (int o = 0; o < ranks; o++) {
        must(pw_own(&w, o, &err), &err);
    }
    t = told("decode, duplicates, check", t);
    must(pw_assign(&w, &err), &err);
    t = told("balance, verdicts", t);
    double until_written = milliseconds() - start;
    must(pw_write(&w, &err), &err);
    t = told("results", t);
    must(pw_fragments(&w, &err), &err);
    t = told("fragments", t);
    printf("  %-28s %8.1f ms, %.1f ms before the writing\n", "plan in all", milliseconds() - start, until_written);
    must(pw_facts(&w, &err), &err);
    must(pw_merge(&w, &err), &err);
    t = told("facts, merge (coordinator)", t);
    double items = (double)ranks * (double)m->n;
    printf("  bytes an item: plan %.1f, result %.1f; offers %zu, verdicts %zu in all\n", (double)w.plan_bytes / items,
           (double)w.result_bytes / (double)w.n_written, w.offer_bytes, w.verdict_bytes);
    pw_free(&w);
    for (int r = 0; r < ranks; r++) {
        dcp_save_plan_free(plans[r]);
    }
    free(plans);
}

/* ---- one owner of many ranks ---- */

/* Ranks make their messages one after the other; what the busiest owner gets is kept. */
static void run_share(const model *m, int ranks, bool with_names)
{
    dcp_error err = DCP_ERROR_INIT;
    size_t world = (size_t)ranks, *got = need(calloc(world, sizeof *got)), total = 0, busiest = 0;
    uint8_t *words = need(calloc(world, DCP__HELLO_BYTES));
    dcp__buf *kept = need(calloc(world, sizeof *kept));
    dcp__hellos hellos;
    for (int pass = 0; pass < 3; pass++) { /* hellos, then sizes, then the messages themselves */
        for (int r = 0; r < ranks; r++) {
            dcp__global_opts opts = {.world = ranks, .rank = r};
            dcp_save_plan *p = make_plan(m, r, with_names ? (size_t)r : 0);
            dcp__local *l;
            dcp__mail mail;
            must(dcp__local_make(p, &opts, &l, &err), &err);
            if (pass == 0) {
                dcp__hello_encode(l, NULL, words + (size_t)r * DCP__HELLO_BYTES);
            } else {
                must(dcp__local_encode(l, &hellos, NULL, &mail, &err), &err);
                for (int o = 0; o < ranks && pass == 1; o++) {
                    got[o] += mail.start[o + 1] - mail.start[o];
                }
                if (pass == 2) {
                    dcp__buf_init(&kept[r], dcp__context(NULL));
                    dcp__buf_put(&kept[r], mail.bytes.data + mail.start[busiest], mail.start[busiest + 1] - mail.start[busiest]);
                }
                dcp__mail_reset(&mail);
            }
            dcp__local_free(l);
            dcp_save_plan_free(p);
        }
        if (pass == 0) {
            must(dcp__hellos_decode(NULL, words, world * DCP__HELLO_BYTES, ranks, &hellos, &err), &err);
        }
        for (size_t o = 0; o < world && pass == 1; o++) {
            total += got[o];
            busiest = got[o] > got[busiest] ? o : busiest;
        }
    }
    dcp_save_plan *p = make_plan(m, (int)busiest, with_names ? busiest : 0);
    dcp__global_opts opts = {.world = ranks, .rank = (int)busiest};
    dcp__local *l;
    dcp__owner *o;
    dcp__buf offer;
    dcp__mail verdicts;
    dcp__buf_init(&offer, dcp__context(NULL));
    double start = milliseconds();
    must(dcp__local_make(p, &opts, &l, &err), &err);
    must(dcp__owner_create(l, &hellos, &o, &err), &err);
    for (int r = 0; r < ranks; r++) {
        must(dcp__owner_add(o, r, kept[r].data, kept[r].len, &err), &err);
    }
    must(dcp__owner_check(o, &err), &err);
    must(dcp__owner_offer(o, &offer, &err), &err);
    must(dcp__owner_verdicts(o, &verdicts, &err), &err);
    double took = milliseconds() - start;
    dcp__owner_counts n = dcp__owner_count(o);
    printf("%d ranks x %zu tensors%s: busiest owner has %zu names, %zu items, 1/%.0f of %.1f MB, %.1f ms\n", ranks, m->n,
           with_names ? ", named" : "", n.entries, n.items, (double)total / (double)got[busiest], (double)total * 1e-6, took);
    dcp__mail_reset(&verdicts);
    dcp__owner_free(o);
    dcp__local_free(l);
    dcp_save_plan_free(p);
    for (int r = 0; r < ranks; r++) {
        dcp__buf_reset(&kept[r]);
    }
    dcp__buf_reset(&offer);
    dcp__hellos_reset(&hellos);
    free(kept);
    free(words);
    free(got);
}

/* ---- tiling ---- */

static void time_tiling(const char *what, size_t n, int64_t wrong_size, dcp__tiling_fault expected)
{
    int64_t *numbers = need(calloc(n, 4 * sizeof *numbers)), extents[2] = {(int64_t)n * 4, 64};
    dcp_box *boxes = need(calloc(n, sizeof *boxes));
    dcp__tiling tiling;
    dcp_error err = DCP_ERROR_INIT;
    for (size_t i = 0; i < n; i++) {
        int64_t *c = numbers + 4 * i;
        c[0] = (int64_t)(i * 7919 % n) * 4; /* out of order */
        c[2] = i == n / 2 ? wrong_size : 4;
        c[3] = 64;
        boxes[i] = (dcp_box){c, c + 2};
    }
    double start = milliseconds();
    must(dcp__check_tiling(NULL, 2, extents, boxes, n, &tiling, &err), &err);
    printf("%zu chunks, %-12s %6.2f ms%s\n", n, what, milliseconds() - start,
           tiling.fault == expected ? "" : ": a wrong verdict");
    free(boxes);
    free(numbers);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 && argv[1][0] == '-' ? argv[1] : "";
    int at = *mode ? 2 : 1, share = strcmp(mode, "--share") == 0;
    if (strcmp(mode, "--tiling") == 0) {
        size_t n = argc > 2 ? strtoul(argv[2], NULL, 10) : 16384;
        time_tiling("valid", n, 4, DCP__TILING_OK);
        time_tiling("overlapping", n, 5, DCP__TILING_OVERLAP);
        time_tiling("gapped", n, 3, DCP__TILING_GAP);
        return 0;
    }
    int ranks = argc > at ? atoi(argv[at]) : share ? 4096 : 256;
    size_t n = argc > at + 1 ? strtoul(argv[at + 1], NULL, 10) : 1000;
    model m = make_model(n, ranks);
    for (int named = 0; named < 2; named++) {
        if (share) {
            run_share(&m, ranks, named);
        } else {
            run_all(&m, ranks, named);
        }
    }
    free(m.names);
    free(m.paths);
    return 0;
}
