/* Records that must be read whole, compressed or for their checksum, read once for several ranks: any size, what is damaged, and
 * how much memory it takes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/peak_alloc.h"
#include "support/random.h"
#include "support/read_kinds.h"

enum { MIB = 1 << 20, MOST_RANKS = 8 };

/* A load by several ranks. */
typedef struct group_load {
    const spread *tensors;
    size_t n;
    const read_kind *kind;
    dcp_storage *storage;
    uint64_t memory_bytes; /* 0: the default */
    dcp_storage_counts counts[MOST_RANKS];
    dcp_load_report reports[MOST_RANKS];
    dcp_failures *failures[MOST_RANKS]; /* or NULL */
    peak_alloc memory[MOST_RANKS];
    bool is_damaged; /* so that a record without a checksum may have other elements */
} group_load;

static dcp_status load_tensors(group_load *g, dcp_context *ctx, dcp_storage *st, dcp_comm *comm, int rank, dcp_error *err)
{
    spread_part parts[4];
    dcp_value *state;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = st;
    opts.open.check_crc = g->kind->check_crc;
    opts.comm = comm;
    opts.failures = g->failures[rank];
    g->reports[rank] = (dcp_load_report)DCP_LOAD_REPORT_INIT;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < g->n; i++) {
        spread_add(&g->tensors[i], rank, false, &parts[i], state);
    }
    dcp_status status = dcp_load(ctx, "", state, &opts, &g->reports[rank], err);
    for (size_t i = 0; i < g->n; i++) {
        bool is_as_saved = status != DCP_OK || g->is_damaged || spread_is_whole(&g->tensors[i], &parts[i]);
        status = is_as_saved ? status : DCP_INTERNAL;
        spread_free(&parts[i]);
    }
    dcp_value_free(state);
    return status;
}

static dcp_status load_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_load *g = user;
    dcp_allocator allocator = {peak_alloc_resize, &g->memory[rank]};
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    dcp_storage *st;
    copts.allocator = &allocator;
    copts.memory_bytes = g->memory_bytes;
    copts.threads = 2;
    if (dcp_context_create(&copts, &ctx, err) != DCP_OK ||
        dcp_storage_count(ctx, g->storage, &g->counts[rank], &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    dcp_status status = load_tensors(g, ctx, st, comm, rank, err);
    dcp_storage_free(st);
    dcp_context_free(ctx);
    return status;
}

static uint64_t bytes_read(const group_load *g, int ranks)
{
    uint64_t bytes = 0;
    for (int r = 0; r < ranks; r++) {
        bytes += g->counts[r].bytes_read;
    }
    return bytes;
}

/* A vector that the ranks of a mask hold. */
static spread make_vector(const char *name, int64_t elems, uint64_t ranks)
{
    spread s = {.name = name, .ndim = 1, .extents = {elems}, .n = 1};
    s.chunks[0] = (spread_chunk){{0}, {elems}, ranks};
    return s;
}

/* ---- sizes ---- */

/* As share_plan.c has it, out of the budget: what is sent in a round, and the cells of that. */
static uint64_t bundle_of(uint64_t memory_bytes, int ranks)
{
    uint64_t bytes = memory_bytes / 4 / (uint64_t)(ranks + 2);
    return bytes > 8 * MIB ? 8 * MIB : bytes < 65536 ? 65536 : bytes;
}

/* Just below, at or just above some cells or bundles. */
static int64_t odd_elems(test_random *rnd, uint64_t memory_bytes, int ranks)
{
    uint64_t bundle = bundle_of(memory_bytes, ranks), cell = bundle < MIB ? bundle : MIB;
    uint64_t unit = test_random_below(rnd, 2) ? bundle : cell;
    int64_t elems = (int64_t)(unit / 4) * (1 + test_random_below(rnd, 3)) + test_random_below(rnd, 3) - 1;
    return elems;
}

static void records__of_any_size_are_read_once(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("records");
    rank_thread ranks[TEST_MAX_RANKS];
    static group_load g;
    for (int i = 0; i < 60; i++) {
        static const char *const names[] = {"a", "b", "c"};
        static const uint64_t budgets[] = {MIB, 3 * MIB, 40 * MIB};
        spread tensors[3];
        int world = 2 + (int)test_random_below(&rnd, 4);
        const read_kind *kind = &read_kinds[1 + i % (READ_KINDS - 1)];
        g = (group_load){.tensors = tensors, .n = 3, .kind = kind, .memory_bytes = budgets[test_random_below(&rnd, 3)]};
        for (int t = 0; t < 3; t++) {
            tensors[t] = make_vector(names[t], odd_elems(&rnd, g.memory_bytes, world), (UINT64_C(1) << world) - 1);
        }
        g.storage = save_kind(kind, tensors, 3, world);
        uint64_t all = bytes_of_checkpoint(g.storage), read = 0;
        run_ranks(world, load_rank, &g, ranks);
        spread_expect(ranks, world, DCP_OK, kind->name);
        for (int r = 0; r < world; r++) {
            read += g.reports[r].read_bytes;
            assert_int_equal(g.reports[r].read_bytes + g.reports[r].received_bytes, g.reports[r].bytes);
        }
        assert_int_equal(read, g.reports[0].bytes);
        assert_true((double)bytes_read(&g, world) <= 1.02 * (double)all);
        dcp_storage_free(g.storage);
    }
}

/* One chunk of which each rank wants some rows, one of them in two places. It is decoded by one. */
static void records__wanted_in_parts_are_read_once(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    spread saved = {.name = "w", .ndim = 2, .extents = {3000, 400}, .n = 1}, wanted = saved;
    saved.chunks[0] = (spread_chunk){{0, 0}, {3000, 400}, 1};
    wanted.n = 5;
    for (int r = 0; r < 4; r++) {
        wanted.chunks[r] = (spread_chunk){{500 * r, 0}, {500, 400}, UINT64_C(1) << r};
    }
    wanted.chunks[4] = (spread_chunk){{2100, 30}, {850, 333}, 2};
    for (int i = 0; i < READ_KINDS; i++) {
        static group_load g;
        g = (group_load){.tensors = &wanted, .n = 1, .kind = &read_kinds[i], .memory_bytes = 4 * MIB};
        g.storage = save_kind(g.kind, &saved, 1, 1);
        run_ranks(4, load_rank, &g, ranks);
        spread_expect(ranks, 4, DCP_OK, g.kind->name);
        assert_true((double)bytes_read(&g, 4) <= 1.02 * (double)bytes_of_checkpoint(g.storage));
        dcp_storage_free(g.storage);
    }
}

/* ---- damage ---- */

static void flip(dcp_storage *st, const char *name, uint64_t at)
{
    dcp_file *f;
    size_t got;
    uint8_t byte;
    assert_int_equal(st->ops->open(st, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->read_at(f, &byte, 1, at, &got, NULL), DCP_OK);
    byte ^= 16;
    assert_int_equal(st->ops->write_at(f, &byte, 1, at, NULL), DCP_OK);
    st->ops->close(f, NULL);
}

/* Loads with one byte of rank 0's file changed. True if that is noticed, by all ranks, with one cause: the one that a process
 * which reads alone is told. */
static bool load_damaged(group_load *g, uint64_t at)
{
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_error alone = DCP_ERROR_INIT;
    flip(g->storage, "__0_0.distcp", at);
    dcp_status expected = load_rank(g, NULL, 0, &alone);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(dcp_failures_create(NULL, &g->failures[r], NULL), DCP_OK);
    }
    run_ranks(4, load_rank, g, ranks);
    flip(g->storage, "__0_0.distcp", at);
    spread_expect(ranks, 4, expected == DCP_OK ? DCP_OK : DCP_PEER, g->kind->name);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(dcp_failures_count(g->failures[r]), expected != DCP_OK);
        if (expected != DCP_OK) {
            const dcp_failure *f = dcp_failures_at(g->failures[r], 0);
            assert_int_equal(f->code, expected);
            assert_int_equal(f->offset, alone.offset);
            assert_non_null(strstr(f->message, "__0_0.distcp"));
            assert_non_null(strstr(f->message, "\"w\""));
        }
        dcp_failures_free(g->failures[r]);
        g->failures[r] = NULL;
    }
    return expected != DCP_OK;
}

static void records__that_are_damaged_are_told_to_all_ranks(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("damage");
    static const int64_t elems[] = {3000, 50000, 700000}; /* in a window; read in one part; in many, over several rounds */
    for (int i = 0; i < 3 * (READ_KINDS - 1); i++) {
        static group_load g;
        int n_noticed = 0;
        spread t = make_vector("w", elems[i / (READ_KINDS - 1)], 15);
        g = (group_load){.tensors = &t, .n = 1, .memory_bytes = 2 * MIB, .is_damaged = true};
        g.kind = &read_kinds[1 + i % (READ_KINDS - 1)];
        g.storage = save_kind(g.kind, &t, 1, 1);
        uint64_t bytes = bytes_of_checkpoint(g.storage);
        for (int k = 0; k < 12; k++) {
            n_noticed += load_damaged(&g, k ? bytes * (uint64_t)k / 20 + (uint64_t)test_random_below(&rnd, 50) : 1);
        }
        printf("%s, %lld elements: %d of 12 noticed\n", g.kind->name, (long long)t.extents[0], n_noticed);
        assert_true(n_noticed >= (g.kind->check_crc ? 7 : 1)); /* its magic number at least */
        dcp_storage_free(g.storage);
    }
}

/* ---- memory ---- */

/* The budget holds however large the records: what is sent and comes in, and a record that is decoded in between. */
static void records__take_no_more_memory_than_the_budget(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    spread t = make_vector("w", 10 * MIB, 15);
    for (int i = 0; i < READ_KINDS; i++) {
        static group_load g;
        size_t most = 0;
        g = (group_load){.tensors = &t, .n = 1, .kind = &read_kinds[i], .memory_bytes = 16 * MIB};
        g.storage = save_kind(g.kind, &t, 1, 1);
        run_ranks(4, load_rank, &g, ranks);
        spread_expect(ranks, 4, DCP_OK, g.kind->name);
        for (int r = 0; r < 4; r++) {
            most = g.memory[r].most > most ? g.memory[r].most : most;
        }
        printf("%s: at most %.1f MiB for 40 MiB\n", g.kind->name, (double)most / MIB);
        assert_true(most <= g.memory_bytes);
        dcp_storage_free(g.storage);
    }
}

/* Records that are just small enough to be decoded in memory, a rank alone. */
static void records__decoded_in_memory_are_few_at_a_time(void **unused)
{
    (void)unused;
    dcp_error err = DCP_ERROR_INIT;
    spread t = spread_rows("w", 1,
                           (const int64_t[]){450000, 450000, 450000, 450000, 450000, 450000, 450000, 450000, 450000, 450000,
                                             450000, 450000, 450000, 450000, 450000, 450000},
                           16);
    static group_load g;
    g = (group_load){.tensors = &t, .n = 1, .kind = &read_kinds[1], .memory_bytes = 16 * MIB};
    g.storage = save_kind(g.kind, &t, 1, 16);
    for (size_t i = 0; i < t.n; i++) {
        t.chunks[i].ranks = 1;
    }
    assert_int_equal(load_rank(&g, NULL, 0, &err), DCP_OK);
    printf("at most %.1f MiB for 16 records of 1.7 MiB\n", (double)g.memory[0].most / MIB);
    assert_true(g.memory[0].most <= g.memory_bytes);
    dcp_storage_free(g.storage);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records__of_any_size_are_read_once),
        cmocka_unit_test(records__wanted_in_parts_are_read_once),
        cmocka_unit_test(records__that_are_damaged_are_told_to_all_ranks),
        cmocka_unit_test(records__take_no_more_memory_than_the_budget),
        cmocka_unit_test(records__decoded_in_memory_are_few_at_a_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
