/* Ranks as threads: runs one function on every rank of a group and collects what each returned. */
#ifndef TESTS_SUPPORT_RANKS_H
#define TESTS_SUPPORT_RANKS_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "dcp/dcp.h"

#define TEST_MAX_RANKS 64

/* What one rank does; cmocka's asserts must not be used in it, since they leave the thread. */
typedef dcp_status (*rank_fn)(void *user, dcp_comm *comm, int rank, dcp_error *err);

typedef struct rank_thread {
    pthread_t thread;
    rank_fn fn;
    void *user;
    dcp_comm *comm;
    int rank;
    dcp_status status;
    dcp_error err;
} rank_thread;

static inline void *rank_main(void *arg)
{
    rank_thread *t = (rank_thread *)arg;
    t->status = t->fn(t->user, t->comm, t->rank, &t->err);
    dcp_comm_free(t->comm);
    return NULL;
}

/* Results are in out[0 .. n - 1]. */
static inline void run_ranks(int n, rank_fn fn, void *user, rank_thread *out)
{
    dcp_comm *comms[TEST_MAX_RANKS];
    assert_int_equal(dcp_comm_threads(NULL, n, comms, NULL), DCP_OK);
    for (int r = 0; r < n; r++) {
        out[r] = (rank_thread){.fn = fn, .user = user, .comm = comms[r], .rank = r, .err = DCP_ERROR_INIT};
        assert_int_equal(pthread_create(&out[r].thread, NULL, rank_main, &out[r]), 0);
    }
    for (int r = 0; r < n; r++) {
        pthread_join(out[r].thread, NULL);
    }
}

#endif
