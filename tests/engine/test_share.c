/* Reading once what several ranks want: the same as reading directly, fewer bytes from the storage, and no failure lost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/load/share.h"
#include "plan/plan_mail.h"
#include "support/failing_alloc.h"
#include "support/rank_model.h"
#include "support/read_kinds.h"

/* ---- any layout ---- */

typedef struct small_load {
    const model *m;
    uint64_t memory_bytes;
    bool no_read_once, check_crc;
    dcp_storage *storage;
    atomic_ullong received, read;
} small_load;

/* A small budget makes small cells and many rounds. */
static dcp_status load_small(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    small_load *l = user;
    dcp_context *ctx;
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    copts.memory_bytes = l->memory_bytes;
    copts.threads = 2;
    if (dcp_context_create(&copts, &ctx, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    rank_state *s = make_state(l->m, rank, l->m->n_loading, true);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    opts.open.storage = l->storage;
    opts.open.check_crc = l->check_crc;
    opts.comm = comm;
    opts.no_read_once = l->no_read_once && rank == 0;
    dcp_status status = dcp_load(ctx, "", s->state, &opts, &report, err);
    status = status == DCP_OK && !is_as_saved(l->m, s) ? DCP_INTERNAL : status;
    if (status == DCP_OK && report.read_bytes + report.received_bytes < report.bytes) {
        status = DCP_INTERNAL;
    }
    l->received += report.received_bytes;
    l->read += report.read_bytes;
    free_state(s);
    dcp_context_free(ctx);
    return status;
}

static void share__any_layout_loads_as_it_does_directly(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("share");
    rank_thread ranks[TEST_MAX_RANKS];
    uint64_t received[READ_KINDS] = {0};
    for (int i = 0; i < 200; i++) {
        model m;
        const read_kind *kind = &read_kinds[i % READ_KINDS];
        random_model_of(&rnd, &m, 3, 55);
        m.n_loading = 2 + (int)test_random_below(&rnd, 8);
        m.save.transform = kind->transform;
        small_load l = {.m = &m, .memory_bytes = 1 << 20, .check_crc = kind->check_crc, .storage = m.storage};
        l.no_read_once = test_random_below(&rnd, 8) == 0;
        run_ranks(m.n_saving, save_rank, &m, ranks);
        expect_all(ranks, m.n_saving, DCP_OK, i);
        run_ranks(m.n_loading, load_small, &l, ranks);
        expect_all(ranks, m.n_loading, DCP_OK, i);
        assert_true(!l.no_read_once || l.received == 0);
        received[i % READ_KINDS] += l.received;
        free_model(&m);
    }
    for (int i = 0; i < READ_KINDS; i++) {
        printf("%s: %llu bytes from other ranks\n", read_kinds[i].name, (unsigned long long)received[i]);
        assert_true(received[i] > 1 << 17);
    }
}

/* More ranks than send in one round. */
static void share__more_ranks_than_send_at_a_time(void **unused)
{
    (void)unused;
    enum { RANKS = 70 };
    int64_t extents = 200000;
    dcp_comm *comms[RANKS];
    static rank_thread ranks[RANKS];
    model m = {.n_tensors = 1, .n_saving = 1, .n_loading = RANKS, .save = DCP_SAVE_OPTS_INIT};
    tensor *t = &m.tensors[0];
    *t = (tensor){.ndim = 1, .extents = {extents}, .elems = extents, .dense = malloc((size_t)extents * sizeof(uint32_t))};
    for (int64_t i = 0; i < extents; i++) {
        t->dense[i] = (uint32_t)i * 7;
    }
    t->saved = t->loaded = (layout){.parts = {1}, .cuts = {{0, extents}}, .n_chunks = 1, .copies = RANKS};
    assert_int_equal(dcp_storage_memory(NULL, &m.storage, NULL), DCP_OK);
    m.save.storage = m.storage;
    run_ranks(1, save_rank, &m, ranks);
    expect_all(ranks, 1, DCP_OK, 0);
    small_load l = {.m = &m, .memory_bytes = 1 << 20, .storage = m.storage};
    assert_int_equal(dcp_comm_threads(NULL, RANKS, comms, NULL), DCP_OK);
    for (int r = 0; r < RANKS; r++) {
        ranks[r] = (rank_thread){.fn = load_small, .user = &l, .comm = comms[r], .rank = r, .err = DCP_ERROR_INIT};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(ranks[r].thread, NULL);
    }
    expect_all(ranks, RANKS, DCP_OK, 0);
    assert_int_equal(l.read, (uint64_t)extents * 4);
    assert_int_equal(l.received, (uint64_t)extents * 4 * (RANKS - 1));
    free_model(&m);
}

/* ---- bytes from the storage ---- */

typedef struct counted {
    spread_job job;
    dcp_storage_counts counts[8];
    dcp_load_report reports[8];
    bool no_read_once, check_crc;
} counted;

static dcp_status load_counted(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    counted *c = user;
    spread_part parts[4];
    dcp_value *state;
    dcp_storage *st;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    if (dcp_storage_count(NULL, c->job.storage, &c->counts[rank], &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    opts.open.storage = st;
    opts.open.check_crc = c->check_crc;
    opts.comm = comm;
    opts.no_read_once = c->no_read_once;
    c->reports[rank] = (dcp_load_report)DCP_LOAD_REPORT_INIT;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < c->job.n; i++) {
        spread_add(&c->job.tensors[i], rank, false, &parts[i], state);
    }
    dcp_status status = dcp_load(NULL, "", state, &opts, &c->reports[rank], err);
    for (size_t i = 0; i < c->job.n; i++) {
        status = status == DCP_OK && !spread_is_whole(&c->job.tensors[i], &parts[i]) ? DCP_INTERNAL : status;
        spread_free(&parts[i]);
    }
    dcp_value_free(state);
    dcp_storage_free(st);
    return status;
}

/* A mesh of 2 x 4: rows over the four, the same on both halves; a vector on all eight. */
static void make_mesh(spread *tensors, int64_t rows)
{
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        tensors[i] = (spread){.name = names[i], .ndim = 2, .extents = {rows, 256}, .n = 4, .first = (float)i};
        for (int r = 0; r < 4; r++) {
            tensors[i].chunks[r] = (spread_chunk){{rows / 4 * r, 0}, {rows / 4, 256}, (UINT64_C(1) << r) * 17};
        }
    }
    tensors[3] = (spread){.name = "norm", .ndim = 2, .extents = {1000, 256}, .n = 1};
    tensors[3].chunks[0] = (spread_chunk){{0, 0}, {1000, 256}, 255};
}

static void read_mesh(const read_kind *kind, const spread *tensors, bool direct)
{
    rank_thread ranks[TEST_MAX_RANKS];
    static counted c;
    uint64_t read = 0, most = 0, sum = 0;
    dcp_storage *st = save_kind(kind, tensors, 4, 8);
    uint64_t all = bytes_of_checkpoint(st);
    c = (counted){.job = {tensors, 4, st, "", DCP_SAVE_OPTS_INIT}, .no_read_once = direct, .check_crc = kind->check_crc};
    run_ranks(8, load_counted, &c, ranks);
    expect_all(ranks, 8, DCP_OK, direct);
    for (int r = 0; r < 8; r++) {
        read += c.counts[r].bytes_read;
        most = c.reports[r].read_bytes > most ? c.reports[r].read_bytes : most;
        sum += c.reports[r].read_bytes;
    }
    printf("%s, %s: %.4f of the checkpoint read, busiest rank %.3f of the mean\n", kind->name, direct ? "directly" : "once",
           (double)read / (double)all, (double)most * 8 / (double)sum);
    assert_true(direct ? read > 2 * all : (double)read <= 1.02 * (double)all);
    /* Records that are read whole are not dealt out in parts: one of 4 MiB more than the mean, at most. */
    assert_true(kind->transform || kind->check_crc ? most <= sum / 8 + (4 << 20) : (double)most * 8 <= 1.25 * (double)sum);
    dcp_storage_free(st);
}

static void share__a_replicated_mesh_reads_the_checkpoint_once(void **unused)
{
    (void)unused;
    spread tensors[4];
    make_mesh(tensors, 16384);
    for (int i = 0; i < READ_KINDS; i++) {
        read_mesh(&read_kinds[i], tensors, false);
        read_mesh(&read_kinds[i], tensors, true);
    }
}

/* Rank 0 looks for the checkpoint; nobody else lists the directory or opens the metadata. */
static void share__one_rank_looks_for_all(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st;
    spread t = spread_evenly("w", 64, 8, 4);
    static counted c;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    spread_save(st, "", &t, 1, 4, DCP_OK);
    c = (counted){.job = {&t, 1, st, "", DCP_SAVE_OPTS_INIT}};
    run_ranks(4, load_counted, &c, ranks);
    expect_all(ranks, 4, DCP_OK, 0);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(c.counts[r].lists, r == 0);
        assert_int_equal(c.counts[r].opens, 1 + (r == 0)); /* its own file of data */
    }
    dcp_storage_free(st);
}

typedef struct busy {
    dcp_storage *storage;
    int rank; /* whose first listing is refused */
} busy;

static dcp_status refuse_list(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    int *left = user;
    (void)name;
    (void)n;
    (void)offset;
    (void)err;
    return op == DCP_OP_LIST && (*left)-- > 0 ? DCP_IO : DCP_OK;
}

static dcp_status load_busy(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const busy *b = user;
    spread t = spread_evenly("w", 64, 8, 4);
    int left = rank == b->rank;
    dcp_storage *st;
    if (dcp_storage_fault(NULL, b->storage, refuse_list, &left, &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    spread_job j = {&t, 1, st, "", DCP_SAVE_OPTS_INIT};
    dcp_status status = spread_load_rank(&j, comm, rank, err);
    dcp_storage_free(st);
    return status;
}

/* A storage that is busy is not an empty one. */
static void share__a_refused_listing_is_not_no_checkpoint(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    spread t = spread_evenly("w", 64, 8, 4);
    busy b = {NULL, 0};
    assert_int_equal(dcp_storage_memory(NULL, &b.storage, NULL), DCP_OK);
    spread_save(b.storage, "", &t, 1, 4, DCP_OK);
    for (b.rank = 0; b.rank < 4; b.rank++) {
        run_ranks(4, load_busy, &b, ranks);
        expect_all(ranks, 4, b.rank == 0 ? DCP_PEER : DCP_OK, b.rank);
        for (int r = 0; r < 4 && b.rank == 0; r++) {
            assert_int_equal(ranks[r].err.rank, 0);
            assert_null(strstr(ranks[r].err.message, "no checkpoint"));
        }
    }
    dcp_storage_free(b.storage);
}

/* Nobody wants what others want: each reads its own and nothing else. */
static void share__ranks_with_nothing_in_common_read_their_own(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st;
    spread t = spread_evenly("w", 8192, 128, 4);
    static counted c;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    spread_save(st, "", &t, 1, 4, DCP_OK);
    c = (counted){.job = {&t, 1, st, "", DCP_SAVE_OPTS_INIT}};
    run_ranks(4, load_counted, &c, ranks);
    expect_all(ranks, 4, DCP_OK, 0);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(c.reports[r].received_bytes, 0);
        assert_true((double)c.counts[r].bytes_read <= 1.1 * (double)c.reports[r].bytes);
    }
    dcp_storage_free(st);
}

/* ---- failures ---- */

typedef struct faulty_load {
    spread_job job;
    int rank; /* that fails */
    int nth;  /* read of data */
    atomic_int calls;
    atomic_bool hit;
    dcp_failures *failures[4];
    bool check_crc;
    int stop_at; /* call of progress at which the rank stops; 0: never */
    bool is_monotonic[4];
    uint64_t last[4], total[4];
} faulty_load;

typedef struct faulty_rank {
    faulty_load *f;
    int rank, n_progress;
} faulty_rank;

static dcp_status fail_read(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    faulty_rank *r = user;
    (void)n;
    (void)offset;
    (void)err;
    if (op != DCP_OP_READ || strncmp(name, "__", 2) != 0 || r->rank != r->f->rank || r->f->calls++ != r->f->nth) {
        return DCP_OK;
    }
    r->f->hit = true;
    return DCP_IO;
}

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    faulty_rank *r = user;
    r->f->is_monotonic[r->rank] &= done >= r->f->last[r->rank] && done <= total;
    r->f->last[r->rank] = done;
    r->f->total[r->rank] = total;
    return r->rank != r->f->rank || ++r->n_progress != r->f->stop_at;
}

static dcp_status load_faulty(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    faulty_load *f = user;
    faulty_rank own = {f, rank, 0};
    spread_part parts[4];
    dcp_value *state;
    dcp_storage *st;
    dcp_context *ctx;
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    copts.memory_bytes = 1 << 20;
    if (dcp_context_create(&copts, &ctx, err) != DCP_OK ||
        dcp_storage_fault(ctx, f->job.storage, fail_read, &own, &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    opts.open.storage = st;
    opts.open.check_crc = f->check_crc;
    opts.comm = comm;
    opts.failures = f->failures[rank];
    opts.progress = on_progress;
    opts.user = &own;
    f->is_monotonic[rank] = true;
    dcp_dict_create(ctx, &state, NULL);
    for (size_t i = 0; i < f->job.n; i++) {
        spread_add(&f->job.tensors[i], rank, false, &parts[i], state);
    }
    dcp_status status = dcp_load(ctx, "", state, &opts, NULL, err);
    for (size_t i = 0; i < f->job.n; i++) {
        spread_free(&parts[i]);
    }
    dcp_value_free(state);
    dcp_storage_free(st);
    dcp_context_free(ctx);
    return status;
}

/* Rows for each of two, on two of four ranks, and something for all: cells, rounds, and nothing alone. */
static void make_four(spread *tensors)
{
    tensors[0] = (spread){.name = "w", .ndim = 2, .extents = {2000, 100}, .n = 2};
    tensors[0].chunks[0] = (spread_chunk){{0, 0}, {1000, 100}, 5};
    tensors[0].chunks[1] = (spread_chunk){{1000, 0}, {1000, 100}, 10};
    tensors[1] = (spread){.name = "v", .ndim = 2, .extents = {700, 100}, .n = 1};
    tensors[1].chunks[0] = (spread_chunk){{0, 0}, {700, 100}, 15};
    tensors[2] = spread_evenly("own", 400, 100, 4);
}

/* Any read of a rank that fails. Returns how many reads it has. */
static int fail_reads(const read_kind *kind, const spread *tensors, dcp_storage *st, int rank)
{
    rank_thread ranks[TEST_MAX_RANKS];
    for (int nth = 0;; nth++) {
        faulty_load f = {.job = {tensors, 3, st, "", DCP_SAVE_OPTS_INIT}, .rank = rank, .nth = nth, .check_crc = kind->check_crc};
        for (int r = 0; r < 4; r++) {
            assert_int_equal(dcp_failures_create(NULL, &f.failures[r], NULL), DCP_OK);
        }
        run_ranks(4, load_faulty, &f, ranks);
        bool hit = f.hit;
        expect_all(ranks, 4, hit ? DCP_PEER : DCP_OK, nth);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(dcp_failures_count(f.failures[r]), hit);
            assert_true(!hit ||
                        (dcp_failures_at(f.failures[r], 0)->rank == rank && dcp_failures_at(f.failures[r], 0)->code == DCP_IO));
            assert_true(f.is_monotonic[r]);
            assert_true(hit || f.last[r] == f.total[r]);
            dcp_failures_free(f.failures[r]);
        }
        if (!hit) {
            return nth;
        }
    }
}

static void share__a_failing_read_ends_the_load_on_all_ranks(void **unused)
{
    (void)unused;
    spread tensors[3];
    make_four(tensors);
    for (int i = 0; i < READ_KINDS; i++) {
        dcp_storage *st = save_kind(&read_kinds[i], tensors, 3, 4);
        int n_hit = 0;
        for (int rank = 0; rank < 4; rank++) {
            n_hit += fail_reads(&read_kinds[i], tensors, st, rank);
        }
        printf("%s: %d reads\n", read_kinds[i].name, n_hit);
        assert_true(n_hit >= 7); /* as many as there are records */
        dcp_storage_free(st);
    }
}

static void share__one_rank_may_stop_the_load(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    spread tensors[3];
    make_four(tensors);
    for (int i = 0; i < 3 * READ_KINDS; i++) {
        const read_kind *kind = &read_kinds[i / 3];
        dcp_storage *st = save_kind(kind, tensors, 3, 4);
        faulty_load f = {.job = {tensors, 3, st, "", DCP_SAVE_OPTS_INIT}, .rank = 2, .nth = -1, .stop_at = 1 + i % 3};
        f.check_crc = kind->check_crc;
        for (int r = 0; r < 4; r++) {
            assert_int_equal(dcp_failures_create(NULL, &f.failures[r], NULL), DCP_OK);
        }
        run_ranks(4, load_faulty, &f, ranks);
        expect_all(ranks, 4, DCP_PEER, i);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(dcp_failures_count(f.failures[r]), 1);
            assert_int_equal(dcp_failures_at(f.failures[r], 0)->rank, 2);
            assert_int_equal(dcp_failures_at(f.failures[r], 0)->code, DCP_CANCELED);
            dcp_failures_free(f.failures[r]);
        }
        dcp_storage_free(st);
    }
}

/* Rank 1 of two lacks memory for its n-th allocation. */
typedef struct poor {
    spread_job job;
    bool check_crc;
    failing_alloc fa;
    dcp_context *ctx;
} poor;

static dcp_status load_poor(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    poor *p = user;
    spread_part parts[4];
    dcp_value *state;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = p->job.storage;
    opts.open.check_crc = p->check_crc;
    opts.comm = comm;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < p->job.n; i++) {
        spread_add(&p->job.tensors[i], rank, false, &parts[i], state);
    }
    dcp_status status = dcp_load(rank == 1 ? p->ctx : NULL, "", state, &opts, NULL, err);
    for (size_t i = 0; i < p->job.n; i++) {
        status = status == DCP_OK && !spread_is_whole(&p->job.tensors[i], &parts[i]) ? DCP_INTERNAL : status;
        spread_free(&parts[i]);
    }
    dcp_value_free(state);
    return status;
}

/* Any allocation that fails. Returns how many failed the load. */
static size_t fail_allocations(const read_kind *kind, const spread *tensors, dcp_storage *st)
{
    rank_thread ranks[TEST_MAX_RANKS];
    bool hit = true;
    size_t n_failed = 0;
    for (size_t n = 0; hit; n++) {
        poor p = {.job = {tensors, 2, st, "", DCP_SAVE_OPTS_INIT}, .check_crc = kind->check_crc};
        p.ctx = failing_alloc_context(&p.fa, 1);
        p.fa.calls = 0;
        p.fa.fail_at = n;
        run_ranks(2, load_poor, &p, ranks);
        hit = p.fa.failed > 0;
        n_failed += ranks[0].status != DCP_OK;
        if (ranks[0].status != ranks[1].status || (ranks[0].status != DCP_OK && ranks[0].status != DCP_PEER)) {
            fail_msg("%s, allocation %zu: %s, %s: %s", kind->name, n, dcp_status_name(ranks[0].status),
                     dcp_status_name(ranks[1].status), ranks[1].err.message);
        }
        assert_int_equal(p.fa.live, 1);
        dcp_context_free(p.ctx);
    }
    return n_failed;
}

static void share__a_rank_without_memory_fails_all(void **unused)
{
    (void)unused;
    spread tensors[2];
    tensors[0] = (spread){.name = "both", .ndim = 2, .extents = {300, 1000}, .n = 1};
    tensors[0].chunks[0] = (spread_chunk){{0, 0}, {300, 1000}, 3}; /* more than a cell */
    tensors[1] = spread_evenly("own", 40, 10, 2);
    for (int i = 0; i < READ_KINDS; i++) {
        dcp_storage *st = save_kind(&read_kinds[i], tensors, 2, 2);
        assert_true(fail_allocations(&read_kinds[i], tensors, st) > 30);
        dcp_storage_free(st);
    }
}

/* ---- messages ---- */

static void share__damaged_messages_are_errors(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("damaged wishes");
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    spread tensors[3];
    dcp_storage *st;
    int n_refused = 0;
    make_four(tensors);
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    spread_save(st, "", tensors, 3, 4, DCP_OK);
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(NULL, "", &opts, &ck, NULL), DCP_OK);
    for (int i = 0; i < 3000; i++) {
        uint8_t bytes[64];
        size_t starts[] = {0, 0, 0}, n = 1 + (size_t)test_random_below(&rnd, 63);
        for (size_t k = 0; k < n; k++) {
            bytes[k] = (uint8_t)(test_random_below(&rnd, test_random_below(&rnd, 3) ? 4 : 256));
        }
        starts[1] = n / 2;
        starts[2] = n;
        dcp__parts parts = {NULL, bytes, starts, 2};
        dcp__mail out = {0};
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = dcp__share_answer(ck->ctx, ck->meta, i % 2, &parts, &out, &err);
        assert_true(status == DCP_OK || status == DCP_FORMAT);
        if (status == DCP_OK) {
            dcp__mail_reset(&out);
        }
        n_refused += status != DCP_OK;
        dcp__rank_sets sets;
        dcp__cell cells[4] = {{.set = DCP__NOBODY}, {.set = DCP__NOBODY}, {.set = DCP__NOBODY}, {.set = DCP__NOBODY}};
        dcp__rank_sets_init(&sets, ck->ctx);
        status = dcp__share_accept(&sets, 4, 1, 0, bytes, n, cells, 4, &err);
        assert_true(status == DCP_OK || status == DCP_FORMAT);
        for (int k = 0; k < 4 && status == DCP_OK; k++) {
            assert_true(cells[k].set == DCP__NOBODY || (cells[k].set < sets.n && cells[k].reader < 4));
        }
        dcp__rank_sets_reset(&sets);
    }
    assert_true(n_refused > 1000);
    dcp_checkpoint_close(ck);
    dcp_storage_free(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(share__any_layout_loads_as_it_does_directly),
        cmocka_unit_test(share__more_ranks_than_send_at_a_time),
        cmocka_unit_test(share__a_replicated_mesh_reads_the_checkpoint_once),
        cmocka_unit_test(share__one_rank_looks_for_all),
        cmocka_unit_test(share__a_refused_listing_is_not_no_checkpoint),
        cmocka_unit_test(share__ranks_with_nothing_in_common_read_their_own),
        cmocka_unit_test(share__a_failing_read_ends_the_load_on_all_ranks),
        cmocka_unit_test(share__one_rank_may_stop_the_load),
        cmocka_unit_test(share__a_rank_without_memory_fails_all),
        cmocka_unit_test(share__damaged_messages_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
