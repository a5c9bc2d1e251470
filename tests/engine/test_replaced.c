/* Loads whose checkpoint is replaced between the look at its metadata and the reading of its files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/ranks.h"

#define N 6
#define RANKS 3
#define TRIES 4 /* as docs/design/read.md says */

/* Replaces the checkpoint as often as it may, each time when a load has planned and not read yet. */
typedef struct rival {
    dcp_storage *st;
    int n_saves, n_planned;
    bool only_removes;
} rival;

static dcp_value *state_of(float *w)
{
    int64_t n = N;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, &n, w);
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "w", &t, NULL);
    dcp_dict_set_int(state, "step", (int64_t)w[0], NULL);
    return state;
}

static dcp_status save_filled(dcp_storage *st, float value, dcp_error *err)
{
    float w[N];
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    opts.overwrite = true;
    for (int i = 0; i < N; i++) {
        w[i] = value;
    }
    dcp_value *state = state_of(w);
    dcp_status status = dcp_save(NULL, "", state, &opts, NULL, err);
    dcp_value_free(state);
    return status;
}

static dcp_status interfere(void *user, dcp_str fqn, dcp_value *tensor, dcp_error *err)
{
    rival *r = user;
    (void)fqn;
    (void)tensor;
    r->n_planned++;
    if (r->n_saves == 0) {
        return DCP_OK;
    }
    r->n_saves--;
    return r->only_removes ? r->st->ops->remove(r->st, "__0_0.distcp", err) : save_filled(r->st, (float)(10 + r->n_planned), err);
}

static rival new_rival(int n_saves)
{
    rival r = {.n_saves = n_saves};
    assert_int_equal(dcp_storage_memory(NULL, &r.st, NULL), DCP_OK);
    assert_int_equal(save_filled(r.st, 1, NULL), DCP_OK);
    return r;
}

static dcp_status load(rival *r, dcp_comm *comm, float *w, int64_t *step, dcp_error *err)
{
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    opts.open.storage = r->st;
    opts.comm = comm;
    opts.target = !comm || comm->rank == 0 ? interfere : NULL;
    opts.user = r;
    dcp_value *state = state_of(w);
    dcp_status status = dcp_load(NULL, "", state, &opts, &report, err);
    dcp_value_int(dcp_dict_get_str(state, "step"), step);
    if (status == DCP_OK && report.n_tensors != 1) {
        status = DCP_INTERNAL; /* tries do not add up */
    }
    dcp_value_free(state);
    return status;
}

static void load__gets_the_new_checkpoint_where_the_old_one_is_replaced(void **unused)
{
    (void)unused;
    for (int n_saves = 1; n_saves < TRIES; n_saves++) {
        rival r = new_rival(n_saves);
        float w[N] = {0};
        int64_t step = 0;
        assert_int_equal(load(&r, NULL, w, &step, NULL), DCP_OK);
        assert_int_equal(r.n_planned, n_saves + 1);
        assert_true(w[0] == (float)(10 + n_saves) && w[N - 1] == w[0]);
        assert_int_equal(step, 10 + n_saves);
        dcp_storage_free(r.st);
    }
}

static void load__gives_up_where_it_is_replaced_again_and_again(void **unused)
{
    (void)unused;
    rival r = new_rival(100);
    float w[N] = {0};
    int64_t step = 0;
    assert_int_equal(load(&r, NULL, w, &step, NULL), DCP_NOT_FOUND);
    assert_int_equal(r.n_planned, TRIES);
    assert_int_equal(step, 0);
    dcp_storage_free(r.st);
}

static void load__a_file_that_is_gone_without_a_new_checkpoint_is_an_error_at_once(void **unused)
{
    (void)unused;
    rival r = new_rival(1);
    float w[N] = {0};
    int64_t step = 0;
    r.only_removes = true;
    assert_int_equal(load(&r, NULL, w, &step, NULL), DCP_NOT_FOUND);
    assert_int_equal(r.n_planned, 1);
    dcp_storage_free(r.st);
}

typedef struct group {
    rival r;
    float w[RANKS][N];
    int64_t steps[RANKS];
} group;

static dcp_status load_on_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group *g = user;
    return load(&g->r, comm, g->w[rank], &g->steps[rank], err);
}

static void load__a_group_gets_one_checkpoint(void **unused)
{
    (void)unused;
    for (int n_saves = 1; n_saves < TRIES; n_saves++) {
        group g = {.r = new_rival(n_saves)};
        rank_thread ranks[RANKS];
        run_ranks(RANKS, load_on_rank, &g, ranks);
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(ranks[i].status, DCP_OK);
            assert_true(g.w[i][0] == (float)(10 + n_saves) && g.w[i][N - 1] == g.w[i][0]);
            assert_int_equal(g.steps[i], 10 + n_saves);
        }
        dcp_storage_free(g.r.st);
    }
}

static void load__a_group_gives_up_alike(void **unused)
{
    (void)unused;
    for (int only_removes = 0; only_removes < 2; only_removes++) {
        group g = {.r = new_rival(only_removes ? 1 : 100)};
        rank_thread ranks[RANKS];
        g.r.only_removes = only_removes;
        run_ranks(RANKS, load_on_rank, &g, ranks);
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(ranks[i].status, DCP_PEER);
        }
        assert_int_equal(g.r.n_planned, only_removes ? 1 : TRIES);
        dcp_storage_free(g.r.st);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(load__gets_the_new_checkpoint_where_the_old_one_is_replaced),
        cmocka_unit_test(load__gives_up_where_it_is_replaced_again_and_again),
        cmocka_unit_test(load__a_file_that_is_gone_without_a_new_checkpoint_is_an_error_at_once),
        cmocka_unit_test(load__a_group_gets_one_checkpoint),
        cmocka_unit_test(load__a_group_gives_up_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
