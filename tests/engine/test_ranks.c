/* Saves and loads of several ranks, which are threads here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/rank_model.h"

/* ---- failures ---- */

#define FAULT_RANKS 4

/* Fails call `nth` of kind `op` on the ranks of the mask. */
typedef struct faults {
    model *m;
    unsigned mask;
    dcp_storage_op op;
    int nth;
    int calls[FAULT_RANKS];
    atomic_bool hit[FAULT_RANKS]; /* another rank may still be closing when this one looks */
    bool load;
    size_t n_failures[FAULT_RANKS];
    bool right_ranks[FAULT_RANKS];
    dcp_on_failure on_failure;
    dcp_status reported[FAULT_RANKS];
} faults;

typedef struct rank_faults {
    faults *f;
    int rank;
} rank_faults;

static dcp_status decide(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    rank_faults *r = user;
    (void)name;
    (void)n;
    (void)offset;
    if (op != r->f->op || !(r->f->mask >> r->rank & 1) || r->f->calls[r->rank]++ != r->f->nth) {
        return DCP_OK;
    }
    r->f->hit[r->rank] = true;
    err->sys_errno = 5;
    return DCP_IO;
}

static dcp_status faulty_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    faults *f = user;
    rank_faults own = {f, rank};
    dcp_storage *st;
    dcp_failures *failures;
    dcp_status status = dcp_storage_fault(NULL, f->m->storage, decide, &own, &st, err);
    if (status != DCP_OK || dcp_failures_create(NULL, &failures, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    rank_state *s = make_state(f->m, rank, FAULT_RANKS, f->load);
    if (f->load) {
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.open.storage = st;
        opts.comm = comm;
        opts.failures = failures;
        status = dcp_load(NULL, "", s->state, &opts, NULL, err);
    } else {
        dcp_save_opts opts = f->m->save;
        dcp_save_report report = DCP_SAVE_REPORT_INIT;
        opts.storage = st;
        opts.comm = comm;
        opts.overwrite = true;
        opts.failures = failures;
        opts.on_failure = f->on_failure;
        status = dcp_save(NULL, "", s->state, &opts, &report, err);
        f->reported[rank] = report.status;
    }
    f->n_failures[rank] = dcp_failures_count(failures);
    unsigned listed = 0;
    for (size_t i = 0; i < dcp_failures_count(failures); i++) {
        listed |= 1u << dcp_failures_at(failures, i)->rank;
    }
    unsigned hit = 0;
    for (int r = 0; r < FAULT_RANKS; r++) {
        hit |= (unsigned)f->hit[r] << r;
    }
    f->right_ranks[rank] = (listed & ~hit) == 0; /* closing what was only read may fail without harm */
    dcp_failures_free(failures);
    free_state(s);
    dcp_storage_free(st);
    return status;
}

static void model_for_faults(test_random *rnd, model *m)
{
    random_model(rnd, m);
    m->n_saving = m->n_loading = FAULT_RANKS;
    m->save.files = 1;
}

static void ranks__a_failing_rank_in_any_call_is_heard_of_everywhere(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("failing ranks");
    rank_thread ranks[TEST_MAX_RANKS];
    int n_hit = 0;
    for (int op = DCP_OP_OPEN; op < DCP_OP_COUNT; op++) {
        for (int nth = 0; nth < 4; nth++) {
            for (int load = 0; load < 2; load++) {
                model m;
                model_for_faults(&rnd, &m);
                run_ranks(FAULT_RANKS, save_rank, &m, ranks);
                expect_all(ranks, FAULT_RANKS, DCP_OK, nth);
                faults f = {.m = &m,
                            .mask = 1 + (unsigned)test_random_below(&rnd, 15),
                            .op = (dcp_storage_op)op,
                            .nth = nth,
                            .load = load};
                run_ranks(FAULT_RANKS, faulty_rank, &f, ranks);
                bool failed = ranks[0].status != DCP_OK;
                n_hit += failed;
                for (int r = 0; r < FAULT_RANKS; r++) {
                    if ((ranks[r].status != DCP_OK) != failed || (failed && ranks[r].status != DCP_PEER)) {
                        fail_msg("op %d call %d mask %x: rank %d: %s: %s", op, nth, f.mask, r, dcp_status_name(ranks[r].status),
                                 ranks[r].err.message);
                    }
                    if (failed && (!f.right_ranks[r] || f.n_failures[r] == 0)) {
                        fail_msg("op %d call %d mask %x load %d: rank %d lists other ranks: %s", op, nth, f.mask, load, r,
                                 ranks[r].err.message);
                    }
                }
                check_whole(&m); /* the old checkpoint, or the new one, which holds the same */
                free_model(&m);
            }
        }
    }
    assert_true(n_hit > 10);
}

static void ranks__a_failed_save_can_be_a_warning(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("warnings");
    rank_thread ranks[TEST_MAX_RANKS];
    model m;
    model_for_faults(&rnd, &m);
    run_ranks(FAULT_RANKS, save_rank, &m, ranks);
    faults f = {.m = &m, .mask = 4, .op = DCP_OP_WRITE, .on_failure = DCP_FAILURE_WARN};
    run_ranks(FAULT_RANKS, faulty_rank, &f, ranks);
    expect_all(ranks, FAULT_RANKS, DCP_OK, 0);
    for (int r = 0; r < FAULT_RANKS; r++) {
        assert_int_equal(f.reported[r], f.hit[2] ? DCP_PEER : DCP_OK);
    }
    check_whole(&m);
    free_model(&m);
}

/* ---- what ranks disagree on ---- */

typedef struct plain {
    dcp_storage *storage;
    int ranks;
    bool same_value, check_content, per_rank;
    int coordinator;
    int64_t loaded[TEST_MAX_RANKS];
} plain;

/* Every rank has a tensor "w" and a number "seed" of its own under one name. */
static dcp_status save_plain(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const mine[] = {"seed", "w"};
    plain *p = user;
    dcp_value *state;
    int64_t two[] = {2};
    float w[2] = {1, p->same_value ? 2 : (float)rank};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, two, w);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "w", &t, NULL);
    dcp_dict_set_int(state, "seed", p->same_value ? 7 : 100 + rank, NULL);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = p->storage;
    opts.comm = comm;
    opts.coordinator = p->coordinator;
    opts.check_content = p->check_content;
    opts.per_rank = mine;
    opts.n_per_rank = p->per_rank ? 2 : 0;
    dcp_status status = dcp_save(NULL, "", state, &opts, NULL, err);
    dcp_value_free(state);
    return status;
}

static dcp_status load_plain(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const mine[] = {"seed"};
    plain *p = user;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_int(state, "seed", 0, NULL);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = p->storage;
    opts.comm = comm;
    opts.per_rank = mine;
    opts.n_per_rank = p->per_rank;
    dcp_status status = dcp_load(NULL, "", state, &opts, NULL, err);
    dcp_value_int(dcp_dict_get_str(state, "seed"), &p->loaded[rank]);
    dcp_value_free(state);
    return status;
}

static void ranks__values_of_each_rank_are_kept_or_their_clash_is_found(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    for (int i = 0; i < 8; i++) {
        plain p = {.ranks = 4, .same_value = i & 1, .check_content = i & 2, .per_rank = i & 4, .coordinator = i % 4};
        assert_int_equal(dcp_storage_memory(NULL, &p.storage, NULL), DCP_OK);
        run_ranks(p.ranks, save_plain, &p, ranks);
        bool clashes = !p.same_value && p.check_content && !p.per_rank;
        expect_all(ranks, p.ranks, clashes ? DCP_PEER : DCP_OK, i);
        if (!clashes) {
            run_ranks(p.ranks, load_plain, &p, ranks);
            expect_all(ranks, p.ranks, DCP_OK, i);
            for (int r = 0; r < p.ranks && p.per_rank; r++) {
                assert_int_equal(p.loaded[r], p.same_value ? 7 : 100 + r);
            }
        }
        dcp_storage_free(p.storage);
    }
}

/* ---- plan cache ---- */

typedef struct cached {
    model *m;
    dcp_plan_cache *caches[TEST_MAX_RANKS];
    bool was_planned[TEST_MAX_RANKS];
    uint64_t plan_bytes[TEST_MAX_RANKS];
} cached;

static dcp_status save_cached(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    cached *c = user;
    rank_state *s = make_state(c->m, rank, c->m->n_saving, false);
    dcp_save_opts opts = c->m->save;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    opts.comm = comm;
    opts.overwrite = true;
    opts.cache = c->caches[rank];
    dcp_status status = dcp_save(NULL, "", s->state, &opts, &report, err);
    c->was_planned[rank] = report.was_planned_before;
    c->plan_bytes[rank] = report.plan_bytes;
    free_state(s);
    return status;
}

/* A tensor that is not cut. */
static layout one_chunk(const tensor *t, int copies)
{
    layout l = {.n_chunks = 1, .copies = copies};
    for (int d = 0; d < t->ndim; d++) {
        l.parts[d] = 1;
        l.cuts[d][1] = t->extents[d];
    }
    return l;
}

static void ranks__an_unchanged_save_is_not_planned_again(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("plan cache");
    rank_thread ranks[TEST_MAX_RANKS];
    for (int i = 0; i < 20; i++) {
        model m;
        random_model(&rnd, &m);
        cached c = {.m = &m};
        for (int r = 0; r < m.n_saving; r++) {
            assert_int_equal(dcp_plan_cache_create(NULL, &c.caches[r], NULL), DCP_OK);
        }
        for (int round = 0; round < 4; round++) {
            if (round == 3) { /* another structure: planned anew, and right */
                m.tensors[0].saved = one_chunk(&m.tensors[0], m.tensors[0].saved.copies == 1 ? TEST_MAX_RANKS : 1);
            }
            run_ranks(m.n_saving, save_cached, &c, ranks);
            expect_all(ranks, m.n_saving, DCP_OK, i);
            for (int r = 0; r < m.n_saving; r++) {
                bool is_repeated = round == 1 || round == 2; /* round 3 may repeat what went before, too */
                assert_true(round == 3 || c.was_planned[r] == is_repeated);
                assert_true(!is_repeated || c.plan_bytes[r] == 0);
            }
            check_whole(&m);
        }
        for (int r = 0; r < m.n_saving; r++) {
            dcp_plan_cache_free(c.caches[r]);
        }
        free_model(&m);
    }
}

/* ---- without communication ---- */

static dcp_status save_alone(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const model *m = user;
    (void)comm;
    rank_state *s = make_state(m, rank, m->n_saving, false);
    dcp_save_opts opts = m->save;
    opts.rank_local = true;
    opts.rank = rank;
    opts.world = m->n_saving;
    opts.save_id = "00000000-0000-4000-8000-000000000001";
    dcp_status status = dcp_save(NULL, "", s->state, &opts, NULL, err);
    free_state(s);
    return status;
}

static void ranks__saves_without_communication_are_read_together(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("rank-local");
    rank_thread ranks[TEST_MAX_RANKS];
    for (int i = 0; i < 50; i++) {
        model m;
        random_model(&rnd, &m);
        for (int k = 0; k < m.n_tensors; k++) {
            m.tensors[k].saved.copies = 1; /* a whole tensor on several ranks is each rank's own */
        }
        run_ranks(m.n_saving, save_alone, &m, ranks);
        expect_all(ranks, m.n_saving, DCP_OK, i);
        check_whole(&m);
        run_ranks(m.n_saving, save_alone, &m, ranks);
        expect_all(ranks, m.n_saving, DCP_EXISTS, i);
        check_whole(&m);
        free_model(&m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks__a_failing_rank_in_any_call_is_heard_of_everywhere),
        cmocka_unit_test(ranks__a_failed_save_can_be_a_warning),
        cmocka_unit_test(ranks__values_of_each_rank_are_kept_or_their_clash_is_found),
        cmocka_unit_test(ranks__an_unchanged_save_is_not_planned_again),
        cmocka_unit_test(ranks__saves_without_communication_are_read_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
