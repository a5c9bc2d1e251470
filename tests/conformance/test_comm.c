/* What every communicator must do, on those whose ranks are threads of one process. To check another one, add it to `kinds`. */
#include "support/comm_suite.h"

#define MOST_RANKS 64

typedef struct kind {
    const char *name;
    void (*make)(int size, dcp_comm **out);
    int sizes[7];
} kind;

typedef struct case_of {
    const kind *kind;
    const struct suite_entry *entry;
    int size;
} case_of;

typedef struct rank_thread {
    pthread_t thread;
    suite_run run;
    const struct suite_entry *entry;
} rank_thread;

static uint64_t seed;

static void make_self(int size, dcp_comm **out)
{
    assert_int_equal(size, 1);
    assert_int_equal(dcp_comm_self(NULL, out, NULL), DCP_OK);
}

static void make_threads(int size, dcp_comm **out)
{
    assert_int_equal(dcp_comm_threads(NULL, size, out, NULL), DCP_OK);
}

/* ---- callbacks that pass everything on to ranks as threads ---- */

static dcp_status pass_alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                dcp_error *err)
{
    return dcp_comm_alltoall(user, send, recv, timeout_ms, err);
}

static dcp_status pass_all_gather(void *user, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    return dcp_comm_all_gather(user, mine, n, all, timeout_ms, err);
}

static dcp_status pass_duplicate(void *user, uint32_t timeout_ms, void **out, dcp_error *err)
{
    dcp_comm *twin;
    dcp_status status = dcp_comm_duplicate(user, timeout_ms, &twin, err);
    if (status == DCP_OK) {
        *out = twin;
    }
    return status;
}

static void pass_release(void *user)
{
    dcp_comm_free(user);
}

static dcp_comm_callbacks callbacks_over(dcp_comm *inner)
{
    dcp_comm_callbacks cb = DCP_COMM_CALLBACKS_INIT;
    cb.user = inner;
    cb.rank = dcp_comm_rank(inner);
    cb.size = dcp_comm_size(inner);
    cb.caps = DCP_COMM_ANY_THREAD;
    cb.alltoall = pass_alltoall;
    cb.all_gather = pass_all_gather;
    cb.duplicate = pass_duplicate;
    cb.release = pass_release;
    return cb;
}

static void make_callbacks(int size, dcp_comm **out)
{
    dcp_comm *inner[MOST_RANKS];
    make_threads(size, inner);
    for (int r = 0; r < size; r++) {
        dcp_comm_callbacks cb = callbacks_over(inner[r]);
        assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &out[r], NULL), DCP_OK);
    }
}

/* ---- the suite ---- */

static const kind kinds[] = {
    {"self", make_self, {1}},
    {"threads", make_threads, {1, 2, 3, 4, 8, 64}},
    {"callbacks", make_callbacks, {1, 3, 4}},
};

static void *run_rank(void *arg)
{
    rank_thread *t = arg;
    t->entry->run(&t->run);
    return NULL;
}

static void run_ranks(dcp_comm **comms, int size, const struct suite_entry *entry)
{
    rank_thread ranks[MOST_RANKS];
    for (int r = 0; r < size; r++) {
        ranks[r] = (rank_thread){.run = {comms[r], r, size, seed}, .entry = entry};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < size; r++) {
        assert_int_equal(pthread_join(ranks[r].thread, NULL), 0);
    }
}

static void comm__conforms(void **state)
{
    const case_of *c = *state;
    dcp_comm *comms[MOST_RANKS] = {NULL};
    c->kind->make(c->size, comms);
    for (int r = 0; r < c->size; r++) {
        assert_int_equal(dcp_comm_rank(comms[r]), r);
        assert_int_equal(dcp_comm_size(comms[r]), c->size);
    }
    run_ranks(comms, c->size, c->entry);
    for (int r = 0; r < c->size; r++) {
        assert_false(dcp_comm_is_broken(comms[r]));
        dcp_comm_free(comms[r]);
    }
}

int main(void)
{
    static case_of cases[16 * SUITE_LENGTH];
    static struct CMUnitTest tests[16 * SUITE_LENGTH];
    static char names[16 * SUITE_LENGTH][96];
    size_t n = 0;
    seed = test_random_seeded("comm").state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        for (const int *size = kinds[k].sizes; *size; size++) {
            for (size_t e = 0; e < SUITE_LENGTH; e++, n++) {
                cases[n] = (case_of){&kinds[k], &suite_entries[e], *size};
                snprintf(names[n], sizeof names[n], "%s_%d__%s", kinds[k].name, *size, suite_entries[e].name);
                tests[n] = (struct CMUnitTest){names[n], comm__conforms, NULL, NULL, &cases[n]};
            }
        }
    }
    return _cmocka_run_group_tests("comm", tests, n, NULL, NULL);
}
