#include "engine/convert/rank_threads.h"

#include <pthread.h>

#include "base/context.h"

typedef enum signal_to_go { WAIT, GO, GIVE_UP } signal_to_go;

typedef struct group {
    dcp__rank_fn fn;
    void *user;
    pthread_mutex_t lock; /* guards signal */
    pthread_cond_t changed;
    signal_to_go signal;
} group;

typedef struct member {
    group *group;
    pthread_t thread;
    dcp_comm *comm;
    int rank;
    dcp_status status;
    dcp_error err;
} member;

static signal_to_go wait_for_signal(group *g)
{
    pthread_mutex_lock(&g->lock);
    while (g->signal == WAIT) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    signal_to_go signal = g->signal;
    pthread_mutex_unlock(&g->lock);
    return signal;
}

static void send_signal(group *g, signal_to_go signal)
{
    pthread_mutex_lock(&g->lock);
    g->signal = signal;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void *be_rank(void *arg)
{
    member *m = arg;
    if (wait_for_signal(m->group) == GO) {
        m->status = m->group->fn(m->group->user, m->comm, m->rank, &m->err);
    }
    return NULL;
}

/* A rank whose thread is missing would be waited for by all others. */
static dcp_status run_members(group *g, member *members, int n, dcp_error *err)
{
    int n_started = 0;
    while (n_started < n && pthread_create(&members[n_started].thread, NULL, be_rank, &members[n_started]) == 0) {
        n_started++;
    }
    send_signal(g, n_started == n ? GO : GIVE_UP);
    dcp_status status = DCP_OK;
    for (int r = 0; r < n_started; r++) {
        pthread_join(members[r].thread, NULL);
        if (status == DCP_OK && members[r].status != DCP_OK) {
            status = members[r].status;
            if (err) {
                *err = members[r].err;
            }
        }
    }
    return n_started == n ? status : dcp__fail(err, DCP_LIMIT, "no thread for rank %d of %d", n_started, n);
}

dcp_status dcp__run_ranks(dcp_context *ctx, int n, dcp__rank_fn fn, void *user, dcp_error *err)
{
    if (n == 1) {
        return fn(user, NULL, 0, err);
    }
    group g = {.fn = fn, .user = user, .signal = WAIT};
    dcp_comm **comms = dcp__calloc(ctx, (size_t)n, sizeof(dcp_comm *));
    member *members = dcp__calloc(ctx, (size_t)n, sizeof *members);
    dcp_status status = comms && members ? dcp_comm_threads(ctx, n, comms, err) : dcp__nomem(err);
    pthread_mutex_init(&g.lock, NULL);
    pthread_cond_init(&g.changed, NULL);
    for (int r = 0; r < n && status == DCP_OK; r++) {
        members[r] = (member){.group = &g, .comm = comms[r], .rank = r, .err = DCP_ERROR_INIT};
    }
    status = status == DCP_OK ? run_members(&g, members, n, err) : status;
    for (int r = 0; comms && r < n; r++) {
        dcp_comm_free(comms[r]);
    }
    pthread_cond_destroy(&g.changed);
    pthread_mutex_destroy(&g.lock);
    dcp__free(ctx, members);
    dcp__free(ctx, comms);
    return status;
}
