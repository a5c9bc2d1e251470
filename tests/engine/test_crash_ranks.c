/* Crashes during a save of several ranks: of all of them at once, as when the machine or the job dies, and of one of them while
 * the others go on. Ranks are threads over one storage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/crash_sweep.h"
#include "support/ranks.h"

#define RANKS 4

/* ---- a rank's part of a state ---- */

/* A row of four chunks, the last one shorter. */
static dcp_value *part_of(const dcp_tensor *whole, int rank)
{
    dcp_value *v;
    int64_t n = whole->extents[0], each = (n + RANKS - 1) / RANKS, from = each * rank < n ? each * rank : n;
    int64_t size = n - from < each ? n - from : each;
    dcp_tensor chunk = *whole;
    dcp_box box = {&from, &size};
    chunk.extents = &size;
    chunk.data = (char *)whole->data + from * (int64_t)dcp_dtype_bytes(whole->dtype);
    if (dcp_sharded_create(NULL, whole->dtype, 1, whole->extents, 1, &chunk, &box, &v, NULL) != DCP_OK) {
        abort();
    }
    return v;
}

static void add_part(dcp_value *to, const char *name, const dcp_value *whole, int rank)
{
    const dcp_tensor *t = dcp_value_tensor(whole);
    if (t->ndim == 1 && t->extents[0] > 1000) {
        dcp_dict_set(to, dcp_key_str(name), part_of(t, rank), NULL);
    } else {
        dcp_dict_set_tensor(to, name, t, NULL);
    }
}

/* Of the state of a sweep: large tensors in chunks, small ones and objects on every rank. Borrows the elements. */
static dcp_value *rank_state(const dcp_value *whole, int rank)
{
    dcp_value *state, *nested;
    const dcp_value *from = dcp_dict_get_str(whole, "nested");
    int64_t generation = 0;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &nested, NULL);
    add_part(state, "small", dcp_dict_get_str(whole, "small"), rank);
    add_part(nested, "large", dcp_dict_get_str(from, "large"), rank);
    add_part(nested, "blocks", dcp_dict_get_str(from, "blocks"), rank);
    add_part(nested, "none", dcp_dict_get_str(from, "none"), rank);
    dcp_dict_set(state, dcp_key_str("nested"), nested, NULL);
    dcp_value_int(dcp_dict_get_str(whole, "generation"), &generation);
    dcp_dict_set_int(state, "generation", generation, NULL);
    return state;
}

/* ---- saving together ---- */

typedef struct group {
    const dcp_value *whole;
    const dcp_save_opts *opts;
    int coordinator;
} group;

static dcp_status save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const group *g = user;
    dcp_value *state = rank_state(g->whole, rank);
    dcp_save_opts opts = *g->opts;
    opts.comm = comm;
    opts.coordinator = g->coordinator;
    dcp_status status = dcp_save(NULL, "", state, &opts, NULL, err);
    dcp_value_free(state);
    return status;
}

static dcp_status save_with(const dcp_value *state, const dcp_save_opts *opts, int coordinator, dcp_error *err)
{
    rank_thread ranks[RANKS];
    group g = {state, opts, coordinator};
    run_ranks(RANKS, save_rank, &g, ranks);
    *err = ranks[0].err;
    return ranks[0].status;
}

static dcp_status save_together(const sweep *w, const dcp_value *state, const dcp_save_opts *opts, dcp_error *err)
{
    (void)w;
    return save_with(state, opts, 0, err);
}

static dcp_status save_with_last_as_coordinator(const sweep *w, const dcp_value *state, const dcp_save_opts *opts, dcp_error *err)
{
    (void)w;
    return save_with(state, opts, RANKS - 1, err);
}

/* ---- all ranks die ---- */

static const dcp_save_opts plain = DCP_SAVE_OPTS_INIT;

/* Ranks do not take turns, so each run meets another order of their calls. */
static void sweep_group(const char *what, bool renames, bool overwrite, dcp_save_opts opts, sweep_save_fn save)
{
    sweep w = sweep_make(what, renames, save);
    crash_storage *cs = crash_storage_make(renames);
    if (overwrite) {
        sweep_save_old(&w, cs, opts);
    }
    sweep_save_new(&w, cs, opts);
    dcp_storage_free(&cs->base);
    sweep_end(&w, what);
}

static void crash__first_save_of_four_ranks_is_nothing_or_whole(void **unused)
{
    (void)unused;
    sweep_group("first", true, false, plain, save_together);
    sweep_group("first, no rename", false, false, plain, save_together);
}

static void crash__four_ranks_overwriting_keep_the_old_or_have_the_new(void **unused)
{
    (void)unused;
    dcp_save_opts two_files = plain, compressed = plain;
    two_files.files = 2;
    compressed.transform = "stream.zstd/1";
    for (int i = 0; i < 2; i++) {
        sweep_group("overwrite", true, true, plain, save_together);
    }
    sweep_group("overwrite, last rank coordinates", true, true, plain, save_with_last_as_coordinator);
    sweep_group("overwrite, two files each", true, true, two_files, save_together);
    sweep_group("overwrite, zstd", true, true, compressed, save_together);
    sweep_group("overwrite, no rename", false, true, plain, save_together);
}

/* ---- one rank dies ---- */

/* A rank that stops before a call on the storage, for good as far as anybody can see. Once the others have returned, it wakes up
 * and has every call refused, so that its memory is freed. */
typedef struct victim {
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t wake;
    size_t calls, at;
    bool is_dead, is_over;
} victim;

static dcp_status live_or_die(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    victim *v = user;
    (void)op;
    (void)name;
    (void)n;
    (void)offset;
    (void)err;
    pthread_mutex_lock(&v->lock);
    v->is_dead |= v->calls++ == v->at;
    while (v->is_dead && !v->is_over) {
        pthread_cond_wait(&v->wake, &v->lock);
    }
    dcp_status status = v->is_dead ? DCP_IO : DCP_OK;
    pthread_mutex_unlock(&v->lock);
    return status;
}

static void bury(victim *v)
{
    pthread_mutex_lock(&v->lock);
    v->is_over = true;
    pthread_cond_broadcast(&v->wake);
    pthread_mutex_unlock(&v->lock);
}

typedef struct mortal {
    group group; /* first: what save_rank takes */
    dcp_save_opts opts;
    dcp_storage *storage;
    int rank;
    victim *victim;
    uint32_t timeout_ms;
} mortal;

static dcp_status save_mortal_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const mortal *m = user;
    group own = m->group;
    dcp_save_opts opts = m->opts;
    dcp_storage *shim = NULL;
    own.opts = &opts;
    opts.storage = m->storage;
    dcp_comm_set_timeout(comm, m->timeout_ms);
    if (rank == m->rank) {
        if (dcp_storage_fault(NULL, m->storage, live_or_die, m->victim, &shim, err) != DCP_OK) {
            return DCP_INTERNAL;
        }
        opts.storage = shim;
    }
    dcp_status status = save_rank(&own, comm, rank, err);
    dcp_storage_free(shim);
    return status;
}

/* Runs the ranks until all but the victim have returned, looks at what is there, and lets the victim go. True if it has died. */
static bool run_with_victim(sweep *w, crash_storage *cs, mortal *m, rank_thread *ranks)
{
    dcp_comm *comms[RANKS];
    char how[64];
    assert_int_equal(dcp_comm_threads(NULL, RANKS, comms, NULL), DCP_OK);
    for (int r = 0; r < RANKS; r++) {
        ranks[r] = (rank_thread){.fn = save_mortal_rank, .user = m, .comm = comms[r], .rank = r, .err = DCP_ERROR_INIT};
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, rank_main, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) {
        if (r != m->rank) {
            pthread_join(ranks[r].thread, NULL);
        }
    }
    snprintf(how, sizeof how, "rank %d dies before its call %zu", m->rank, m->victim->at);
    pthread_mutex_lock(&cs->lock);
    crash_emit(cs, ((uint64_t)1 << cs->n_pending) - 1, CRASH_KEPT, NULL, false, 0, how, sweep_check, w);
    pthread_mutex_unlock(&cs->lock);
    bury(m->victim);
    pthread_join(ranks[m->rank].thread, NULL);
    return m->victim->is_dead;
}

static crash_storage *storage_with_old(sweep *w)
{
    crash_storage *cs = crash_storage_make(true);
    dcp_value_free(w->old);
    sweep_save_old(w, cs, plain);
    return cs;
}

/* Returns false when the rank has fewer calls than that. */
static bool kill_at(sweep *w, int rank, int coordinator, size_t at, uint32_t timeout_ms)
{
    rank_thread ranks[RANKS];
    crash_storage *cs = storage_with_old(w);
    victim v = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .at = at};
    mortal m = {{w->new, NULL, coordinator}, plain, &cs->base, rank, &v, timeout_ms};
    m.opts.overwrite = true;
    bool has_died = run_with_victim(w, cs, &m, ranks);
    bool all_well = true;
    for (int r = 0; r < RANKS; r++) {
        all_well &= ranks[r].status == DCP_OK;
        if (has_died && r != rank && ranks[r].status != DCP_OK && !ranks[r].err.message[0]) {
            fail_msg("rank %d dies before its call %zu: rank %d says nothing", rank, at, r);
        }
    }
    dcp_storage_free(&cs->base);
    if (!has_died && !all_well) { /* a slow machine: somebody living has missed the deadline */
        return timeout_ms < 60000 ? kill_at(w, rank, coordinator, at, 10 * timeout_ms) : false;
    }
    assert_true(has_died || all_well);
    return has_died;
}

static void crash__one_rank_dying_leaves_the_old_or_the_new(void **unused)
{
    (void)unused;
    static const char what[] = "one rank dies";
    sweep w = sweep_make(what, true, save_together);
    size_t n_deaths = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        for (size_t at = 0; kill_at(&w, rank, 1, at, 100); at++) {
            n_deaths++;
        }
    }
    printf("%zu deaths\n", n_deaths);
    assert_true(n_deaths > 20 && w.n_old > 10 && w.n_new > 0);
    sweep_end(&w, what);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crash__first_save_of_four_ranks_is_nothing_or_whole),
        cmocka_unit_test(crash__four_ranks_overwriting_keep_the_old_or_have_the_new),
        cmocka_unit_test(crash__one_rank_dying_leaves_the_old_or_the_new),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
