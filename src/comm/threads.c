/*
 * Ranks that are threads of one process. Each collective call is a round: everybody arrives and posts what he has, then copies
 * what he wants out of the others' memory, then leaves, and nobody returns before all have left. The deadline is for arriving;
 * once all are there only copying remains, which always ends.
 */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "comm/comm.h"
#include "comm/missing.h"

typedef enum round_op { ROUND_ALLTOALL, ROUND_ALL_GATHER, ROUND_DUPLICATE } round_op;

typedef struct thread_comm thread_comm;

/* What a rank brings to a round. */
typedef struct post {
    round_op op;
    const dcp_comm_send *send; /* alltoall: an array */
    const void *mine;          /* all_gather */
    size_t n;
    thread_comm *made; /* duplicate: a handle without a group, NULL if there was no memory */
} post;

typedef struct thread_group {
    dcp_context *ctx;
    int size;
    pthread_mutex_t lock; /* guards all below; posts are also read without it between arriving and leaving */
    pthread_cond_t wake;
    int handles;      /* not yet freed */
    int arrived;      /* in the round that gathers */
    int still_inside; /* have arrived, all of them, and not left */
    uint64_t begun, ended;
    bool *is_here;
    post *posts;
    dcp_error verdict; /* of the round under way */
    dcp_error why;     /* what broke the group, code OK: nothing did */
} thread_group;

struct thread_comm {
    dcp_comm base;
    thread_group *group;
};

static const char *const op_names[] = {"alltoall", "all_gather", "duplicate"};

static void group_free(thread_group *g)
{
    pthread_cond_destroy(&g->wake);
    pthread_mutex_destroy(&g->lock);
    dcp__free(g->ctx, g->is_here);
    dcp__free(g->ctx, g->posts);
    dcp__free(g->ctx, g);
}

static void init_locks(thread_group *g)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&g->lock, NULL);
}

static thread_group *group_create(dcp_context *ctx, int size)
{
    thread_group *g = dcp__calloc(ctx, 1, sizeof *g);
    if (!g) {
        return NULL;
    }
    g->ctx = ctx;
    g->size = g->handles = size;
    g->is_here = dcp__calloc(ctx, (size_t)size, sizeof *g->is_here);
    g->posts = dcp__calloc(ctx, (size_t)size, sizeof *g->posts);
    if (!g->is_here || !g->posts) {
        dcp__free(ctx, g->is_here);
        dcp__free(ctx, g->posts);
        dcp__free(ctx, g);
        return NULL;
    }
    g->verdict = g->why = (dcp_error)DCP_ERROR_INIT;
    init_locks(g);
    return g;
}

/* ---- rounds; all with the lock held ---- */

static bool is_broken(const thread_group *g)
{
    return g->why.code != DCP_OK;
}

static void break_group(thread_group *g, const dcp_error *why)
{
    g->why = *why;
    pthread_cond_broadcast(&g->wake);
}

/* Ranks that call different things are out of step for good. */
static dcp_status check_posts(const thread_group *g, dcp_error *err)
{
    const post *first = &g->posts[0];
    for (int r = 1; r < g->size; r++) {
        const post *p = &g->posts[r];
        err->rank = r;
        if (p->op != first->op) {
            return dcp__fail(err, DCP_STATE, "rank 0 called %s, rank %d %s", op_names[first->op], r, op_names[p->op]);
        }
        if (p->n != first->n) {
            return dcp__fail(err, DCP_MISMATCH, "all_gather of %zu bytes on rank 0, of %zu on rank %d", first->n, p->n, r);
        }
    }
    return DCP_OK;
}

/* The ranks that are here have their new handles connected, if all could make one. */
static dcp_status connect_made(thread_group *g, dcp_error *err)
{
    for (int r = 0; r < g->size; r++) {
        if (!g->posts[r].made) {
            dcp__fail(err, DCP_PEER, "duplicate: rank %d is out of memory", r);
            err->rank = r;
            return DCP_PEER;
        }
    }
    thread_group *twin = group_create(g->ctx, g->size);
    if (!twin) {
        return dcp__nomem(err);
    }
    for (int r = 0; r < g->size; r++) {
        g->posts[r].made->group = twin;
    }
    return DCP_OK;
}

/* The last to arrive opens the round. */
static void begin_round(thread_group *g)
{
    dcp_error why = DCP_ERROR_INIT;
    if (check_posts(g, &why) != DCP_OK) {
        break_group(g, &why);
        return;
    }
    g->verdict = (dcp_error)DCP_ERROR_INIT;
    if (g->posts[0].op == ROUND_DUPLICATE) {
        connect_made(g, &g->verdict);
    }
    g->arrived = 0;
    g->still_inside = g->size;
    g->begun++;
    pthread_cond_broadcast(&g->wake);
}

static struct timespec deadline_in(uint32_t timeout_ms)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += timeout_ms / 1000;
    t.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

static void wait_for_others(thread_group *g, uint32_t timeout_ms)
{
    const uint64_t before = g->begun;
    const struct timespec deadline = deadline_in(timeout_ms);
    while (g->begun == before && !is_broken(g)) {
        int rc = pthread_cond_timedwait(&g->wake, &g->lock, &deadline);
        if (rc == ETIMEDOUT && g->begun == before && !is_broken(g)) {
            dcp_error why = DCP_ERROR_INIT;
            dcp__fail_missing(g->is_here, g->size, timeout_ms, &why);
            break_group(g, &why);
        }
    }
}

static dcp_status fail_with(const dcp_error *why, dcp_error *err)
{
    size_t struct_size = err->struct_size;
    *err = *why;
    err->struct_size = struct_size;
    return why->code;
}

/* A rank that has freed its handle will never come. */
static void check_presence(thread_group *g)
{
    if (g->handles < g->size && !is_broken(g)) {
        dcp_error why = DCP_ERROR_INIT;
        dcp__fail(&why, DCP_STATE, "%d of %d ranks have freed their communicator", g->size - g->handles, g->size);
        break_group(g, &why);
    }
}

/* ---- calls ---- */

/* Returns OK when all ranks are there; then the caller must leave. */
static dcp_status arrive(thread_comm *c, const post *mine, uint32_t timeout_ms, dcp_error *err)
{
    thread_group *g = c->group;
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&g->lock);
    check_presence(g);
    if (is_broken(g)) {
        status = dcp__fail(err, DCP_STATE, "communicator broken by another rank's failure (%s: %s)", dcp_status_name(g->why.code),
                           g->why.message);
        err->rank = g->why.rank;
        goto out;
    }
    g->posts[c->base.rank] = *mine;
    g->is_here[c->base.rank] = true;
    const uint64_t before = g->begun;
    if (++g->arrived == g->size) {
        begin_round(g);
    } else {
        wait_for_others(g, timeout_ms);
    }
    status = g->begun == before ? fail_with(&g->why, err) : DCP_OK;
out:
    pthread_mutex_unlock(&g->lock);
    return status;
}

/* Waits until nobody reads this rank's memory any more, and returns what became of the round. */
static dcp_status leave(thread_comm *c, dcp_status mine, const dcp_error *my_err, dcp_error *err)
{
    thread_group *g = c->group;
    pthread_mutex_lock(&g->lock);
    if (mine != DCP_OK && !is_broken(g)) {
        g->verdict = *my_err;
        break_group(g, my_err);
    }
    const uint64_t before = g->ended;
    if (--g->still_inside == 0) {
        memset(g->is_here, 0, (size_t)g->size * sizeof *g->is_here);
        g->ended++;
        pthread_cond_broadcast(&g->wake);
    }
    while (g->ended == before) {
        pthread_cond_wait(&g->wake, &g->lock);
    }
    dcp_status status = g->verdict.code == DCP_OK ? DCP_OK : fail_with(&g->verdict, err);
    pthread_mutex_unlock(&g->lock);
    return status;
}

static void take_part(char *to, const void *from, size_t bytes)
{
    if (bytes) {
        memcpy(to, from, bytes);
    }
}

static dcp_status copy_parts(const thread_comm *c, const dcp_comm_recv *recv, dcp_error *err)
{
    const thread_group *g = c->group;
    int me = c->base.rank;
    for (int i = 0; i < g->size; i++) {
        int r = (me + i) % g->size; /* not all at the same rank's memory */
        const dcp_comm_send *from = &g->posts[r].send[me];
        if (from->bytes != recv[r].bytes) {
            err->rank = r;
            return dcp__fail(err, DCP_MISMATCH, "rank %d sends %zu bytes, rank %d expects %zu", r, from->bytes, me,
                             recv[r].bytes);
        }
        take_part(recv[r].ptr, from->ptr, from->bytes);
    }
    return DCP_OK;
}

static dcp_status thread_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                  dcp_error *err)
{
    thread_comm *c = (thread_comm *)comm;
    dcp_error mine = DCP_ERROR_INIT;
    dcp_status status = arrive(c, &(post){.op = ROUND_ALLTOALL, .send = send}, timeout_ms, err);
    if (status != DCP_OK) {
        return status;
    }
    status = copy_parts(c, recv, &mine);
    return leave(c, status, &mine, err);
}

static dcp_status thread_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    thread_comm *c = (thread_comm *)comm;
    dcp_status status = arrive(c, &(post){.op = ROUND_ALL_GATHER, .mine = mine, .n = n}, timeout_ms, err);
    if (status != DCP_OK) {
        return status;
    }
    for (int r = 0; r < comm->size; r++) {
        take_part((char *)all + (size_t)r * n, c->group->posts[r].mine, n);
    }
    return leave(c, DCP_OK, NULL, err);
}

static void thread_free(dcp_comm *comm)
{
    thread_comm *c = (thread_comm *)comm;
    thread_group *g = c->group;
    if (g) {
        pthread_mutex_lock(&g->lock);
        bool is_last = --g->handles == 0;
        if (g->arrived > 0) {
            check_presence(g);
        }
        pthread_mutex_unlock(&g->lock);
        if (is_last) {
            group_free(g);
        }
    }
    dcp_context *ctx = comm->ctx;
    dcp_comm_reset(comm);
    dcp__free(ctx, c);
}

static dcp_status thread_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err);

static const dcp_comm_ops thread_ops = {
    .struct_size = sizeof(dcp_comm_ops),
    .abi_version = DCP_COMM_ABI,
    .name = "threads",
    .alltoall = thread_alltoall,
    .all_gather = thread_all_gather,
    .duplicate = thread_duplicate,
    .free = thread_free,
};

static thread_comm *handle_create(dcp_context *ctx, int rank, int size)
{
    thread_comm *c = dcp__calloc(ctx, 1, sizeof *c);
    if (c && dcp_comm_init(&c->base, ctx, &thread_ops, rank, size, DCP_COMM_ANY_THREAD, NULL) != DCP_OK) {
        dcp__free(ctx, c);
        return NULL;
    }
    return c;
}

static void free_handle(thread_comm *c)
{
    if (c) {
        thread_free(&c->base);
    }
}

/* A rank without memory takes part, so that all hear of it. */
static dcp_status thread_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    thread_comm *c = (thread_comm *)comm;
    thread_comm *made = handle_create(comm->ctx, comm->rank, comm->size);
    dcp_status status = arrive(c, &(post){.op = ROUND_DUPLICATE, .made = made}, timeout_ms, err);
    if (status == DCP_OK) {
        status = leave(c, DCP_OK, NULL, err);
        status = status != DCP_OK && !made ? dcp__nomem(err) : status;
    }
    if (status != DCP_OK) {
        free_handle(made);
        return status;
    }
    *out = &made->base;
    return DCP_OK;
}

dcp_status dcp_comm_threads(dcp_context *ctx, int size, dcp_comm **out, dcp_error *err)
{
    if (!out || size < 1) {
        return dcp__fail(err, DCP_ARG, "communicator: %d threads, or no place for the result", size);
    }
    ctx = dcp__context(ctx);
    thread_comm **made = dcp__calloc(ctx, (size_t)size, sizeof(thread_comm *));
    thread_group *g = group_create(ctx, size);
    bool is_whole = made && g;
    for (int r = 0; is_whole && r < size; r++) {
        made[r] = handle_create(ctx, r, size);
        is_whole = made[r] != NULL;
    }
    for (int r = 0; made && r < size; r++) {
        if (is_whole) {
            made[r]->group = g;
            out[r] = &made[r]->base;
        } else {
            free_handle(made[r]);
        }
    }
    if (!is_whole && g) {
        group_free(g);
    }
    dcp__free(ctx, made);
    return is_whole ? DCP_OK : dcp__nomem(err);
}
