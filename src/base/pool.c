#include "base/pool.h"

#include <pthread.h>

#define MAX_WORKERS 64

typedef struct run {
    size_t n;
    dcp__task_fn fn;
    void *arg;
    pthread_mutex_t lock; /* guards the fields below */
    size_t next;
    size_t failed; /* lowest failed task, n if none */
    dcp_status status;
    dcp_error err;
} run;

typedef struct worker {
    run *run;
    int index;
    pthread_t thread;
} worker;

static void record_failure(run *r, size_t task, dcp_status status, const dcp_error *err)
{
    pthread_mutex_lock(&r->lock);
    if (task < r->failed) {
        r->failed = task;
        r->status = status;
        r->err = *err;
    }
    pthread_mutex_unlock(&r->lock);
}

static void *work(void *arg)
{
    worker *w = arg;
    run *r = w->run;
    for (;;) {
        pthread_mutex_lock(&r->lock);
        size_t task = r->failed < r->n ? r->n : r->next;
        r->next += task < r->n;
        pthread_mutex_unlock(&r->lock);
        if (task >= r->n) {
            return NULL;
        }
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = r->fn(r->arg, task, w->index, &err);
        if (status != DCP_OK) {
            record_failure(r, task, status, &err);
        }
    }
}

dcp_status dcp__parallel(size_t n, int n_workers, dcp__task_fn fn, void *arg, dcp_error *err)
{
    run r = {.n = n, .fn = fn, .arg = arg, .failed = n, .err = DCP_ERROR_INIT};
    worker workers[MAX_WORKERS];
    size_t want = n_workers < 1 ? 1 : n_workers > MAX_WORKERS ? MAX_WORKERS : (size_t)n_workers;
    want = want > n ? n : want;
    pthread_mutex_init(&r.lock, NULL);
    size_t started = 1;
    workers[0] = (worker){.run = &r, .index = 0};
    while (started < want) {
        workers[started] = (worker){.run = &r, .index = (int)started};
        if (pthread_create(&workers[started].thread, NULL, work, &workers[started]) != 0) {
            break;
        }
        started++;
    }
    work(&workers[0]);
    for (size_t i = 1; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    pthread_mutex_destroy(&r.lock);
    if (r.status != DCP_OK && err) {
        *err = r.err;
    }
    return r.status;
}
