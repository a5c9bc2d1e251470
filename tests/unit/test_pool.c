#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

#include <cmocka.h>

#include "base/pool.h"

enum { MAX_TASKS = 1000 };

typedef struct record {
    int runs[MAX_TASKS]; /* how often each task ran */
    int worker_busy[64]; /* a worker runs one task at a time */
    int busy, most_busy;
    int clashes;
    pthread_t caller;
    int by_caller;
    size_t first_bad, step;  /* tasks first_bad, first_bad + step, .. fail */
    pthread_barrier_t *meet; /* all of the first tasks wait for each other here */
    size_t n_meet;
} record;

static dcp_status note(void *arg, size_t i, int worker, dcp_error *err)
{
    record *r = arg;
    int was_busy = __atomic_fetch_add(&r->worker_busy[worker], 1, __ATOMIC_ACQ_REL);
    __atomic_fetch_add(&r->clashes, was_busy != 0, __ATOMIC_RELAXED);
    __atomic_fetch_add(&r->runs[i], 1, __ATOMIC_RELAXED);
    if (pthread_equal(pthread_self(), r->caller)) {
        __atomic_fetch_add(&r->by_caller, 1, __ATOMIC_RELAXED);
    }
    if (r->meet && i < r->n_meet) {
        pthread_barrier_wait(r->meet);
    }
    __atomic_fetch_sub(&r->worker_busy[worker], 1, __ATOMIC_ACQ_REL);
    if (r->step && i >= r->first_bad && (i - r->first_bad) % r->step == 0) {
        return dcp__fail_at(err, DCP_FORMAT, i, "task %zu", i);
    }
    return DCP_OK;
}

static void parallel__every_task_runs_once(void **state)
{
    (void)state;
    const size_t tasks[] = {0, 1, 2, 7, MAX_TASKS};
    const int threads[] = {-1, 0, 1, 2, 7, 64, 1000};
    for (size_t t = 0; t < sizeof tasks / sizeof tasks[0]; t++) {
        for (size_t w = 0; w < sizeof threads / sizeof threads[0]; w++) {
            record *r = calloc(1, sizeof *r);
            assert_non_null(r);
            r->caller = pthread_self();
            assert_int_equal(dcp__parallel(tasks[t], threads[w], note, r, NULL), DCP_OK);
            for (size_t i = 0; i < MAX_TASKS; i++) {
                assert_int_equal(r->runs[i], i < tasks[t]);
            }
            assert_int_equal(r->clashes, 0);
            if (threads[w] <= 1) {
                assert_int_equal(r->by_caller, tasks[t]);
            }
            free(r);
        }
    }
}

/* Five tasks that wait for each other end only if five threads run them: a hang is the failure. */
static void parallel__has_as_many_threads_as_asked_for(void **state)
{
    (void)state;
    record *r = calloc(1, sizeof *r);
    pthread_barrier_t barrier;
    assert_non_null(r);
    pthread_barrier_init(&barrier, NULL, 5);
    r->caller = pthread_self();
    r->meet = &barrier;
    r->n_meet = 5;
    assert_int_equal(dcp__parallel(5, 5, note, r, NULL), DCP_OK);
    assert_int_equal(r->by_caller, 1);
    pthread_barrier_destroy(&barrier);
    free(r);
}

static void parallel__reports_the_lowest_failure(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 8; threads++) {
        record *r = calloc(1, sizeof *r);
        dcp_error err = DCP_ERROR_INIT;
        assert_non_null(r);
        r->caller = pthread_self();
        r->first_bad = 5;
        r->step = 1;
        assert_int_equal(dcp__parallel(MAX_TASKS, threads, note, r, &err), DCP_FORMAT);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_int_equal(err.offset, 5);
        int runs = 0;
        for (size_t i = 0; i < MAX_TASKS; i++) {
            assert_true(r->runs[i] == (i <= 5) || (i > 5 && r->runs[i] <= 1));
            runs += r->runs[i];
        }
        assert_true(runs <= 6 + threads); /* no task starts after a failure but those that are about to */
        free(r);
    }
}

/* The task with the lowest number fails last; it is still the one that is reported. */
static dcp_status fail_in_reverse(void *arg, size_t i, int worker, dcp_error *err)
{
    int *higher_failed = arg;
    (void)worker;
    if (i == 0) {
        while (!__atomic_load_n(higher_failed, __ATOMIC_ACQUIRE)) {
            sched_yield();
        }
    } else {
        __atomic_store_n(higher_failed, 1, __ATOMIC_RELEASE);
    }
    return dcp__fail_at(err, i == 0 ? DCP_IO : DCP_FORMAT, i, "task %zu", i);
}

static void parallel__lowest_failure_wins_even_if_it_comes_last(void **state)
{
    (void)state;
    int higher_failed = 0;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp__parallel(2, 2, fail_in_reverse, &higher_failed, &err), DCP_IO);
    assert_int_equal(err.offset, 0);
}

static dcp_status ask_context(void *arg, size_t i, int worker, dcp_error *err)
{
    (void)arg, (void)i, (void)worker, (void)err;
    dcp_context *ctx = dcp__context(NULL);
    return ctx->threads >= 1 && ctx->limits.max_depth == 256 ? DCP_OK : DCP_INTERNAL;
}

/* For the thread sanitizer: many threads meet the built-in context first. */
static void context__built_in_from_many_threads(void **state)
{
    (void)state;
    assert_int_equal(dcp__parallel(64, 8, ask_context, NULL, NULL), DCP_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(context__built_in_from_many_threads),
        cmocka_unit_test(parallel__every_task_runs_once),
        cmocka_unit_test(parallel__has_as_many_threads_as_asked_for),
        cmocka_unit_test(parallel__reports_the_lowest_failure),
        cmocka_unit_test(parallel__lowest_failure_wins_even_if_it_comes_last),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
