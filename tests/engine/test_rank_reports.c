/* What users have reported of saves and loads by several ranks, each in its smallest case. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/spread.h"

static dcp_storage *memory(void)
{
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    return st;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* ---- geometry ---- */

static void load_evenly_on(dcp_storage *st, const char *path, spread like, const int *ranks, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        spread target = spread_evenly(like.name, like.extents[0], like.extents[1], ranks[i]);
        target.first = like.first;
        spread_load(st, path, &target, 1, ranks[i]);
    }
}

/* Splits that leave ranks with less or nothing; a tensor without elements. */
static void reports__uneven_splits_round_trip(void **unused)
{
    (void)unused;
    static const struct {
        int64_t rows, cols;
        int ranks;
    } cases[] = {{6, 1, 4}, {1, 7, 2}, {3, 2, 8}, {0, 4, 2}, {5, 0, 3}};
    static const int readers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dcp_storage *st = memory();
        spread t = spread_evenly("t", cases[i].rows, cases[i].cols, cases[i].ranks);
        spread_save(st, "", &t, 1, cases[i].ranks, DCP_OK);
        load_evenly_on(st, "", t, readers, sizeof readers / sizeof readers[0]);
        dcp_storage_free(st);
    }
}

/* 512 elements over 30 ranks: 28 times 18, then 8, then none at an offset that a full one may have. */
static void reports__an_empty_shard_hides_no_real_one(void **unused)
{
    (void)unused;
    int64_t sizes[30];
    static const int readers[] = {1, 7, 30};
    for (int r = 0; r < 30; r++) {
        sizes[r] = r < 28 ? 18 : r == 28 ? 8 : 0;
    }
    for (int where = 0; where < 2; where++) {
        dcp_storage *st = memory();
        spread t = spread_rows("flat", 1, sizes, 30);
        t.chunks[29].offsets[0] = where ? 18 : t.extents[0];
        spread_save(st, "", &t, 1, 30, DCP_OK);
        load_evenly_on(st, "", t, readers, 3);
        dcp_storage_free(st);
    }
}

/* Row k and row k + 8 of 16 are on rank k, as the halves of a gated layer are. */
static void reports__interleaved_rows_load_in_order(void **unused)
{
    (void)unused;
    static const int readers[] = {1, 2, 4, 8, 3};
    dcp_storage *st = memory();
    spread t = {.name = "gate_up", .ndim = 2, .extents = {16, 4}, .n = 16};
    for (int k = 0; k < 16; k++) {
        t.chunks[k] = (spread_chunk){{k, 0}, {1, 4}, UINT64_C(1) << k % 8};
    }
    spread_save(st, "", &t, 1, 8, DCP_OK);
    load_evenly_on(st, "", t, readers, 5);
    dcp_storage_free(st);
}

/* Experts cut along two dimensions over a mesh that counts its ranks the other way round; one piece missing, or there twice. */
static void reports__experts_keep_their_places_and_holes_are_refused(void **unused)
{
    (void)unused;
    dcp_storage *st = memory();
    spread t = {.name = "experts", .ndim = 3, .extents = {4, 4, 4}, .n = 4, .first = 100};
    for (int i = 0; i < 4; i++) {
        t.chunks[i] = (spread_chunk){{i / 2 * 2, i % 2 * 2, 0}, {2, 2, 4}, UINT64_C(1) << (i % 2 * 2 + i / 2)};
    }
    spread_save(st, "good", &t, 1, 4, DCP_OK);
    spread_load(st, "good", &t, 1, 4);
    spread other = {.name = "experts", .ndim = 3, .extents = {4, 4, 4}, .n = 4, .first = 100};
    for (int i = 0; i < 4; i++) {
        other.chunks[i] = (spread_chunk){{i, 0, 0}, {1, 4, 4}, UINT64_C(1) << (3 - i)};
    }
    spread_load(st, "good", &other, 1, 4);
    spread hole = t, twice = t;
    hole.n = 3;
    spread_save(st, "hole", &hole, 1, 4, DCP_PEER);
    twice.chunks[3].offsets[1] = 1;
    spread_save(st, "twice", &twice, 1, 4, DCP_PEER);
    dcp_storage_free(st);
}

/* Rows over one dimension of a mesh of 2 x 2, the same over the other. */
static void reports__replicated_and_sharded_on_a_mesh(void **unused)
{
    (void)unused;
    static const int readers[] = {1, 3, 4};
    dcp_storage *st = memory();
    spread t = {.name = "w", .ndim = 2, .extents = {6, 5}, .n = 2, .first = 7};
    t.chunks[0] = (spread_chunk){{0, 0}, {3, 5}, 1 | 4};
    t.chunks[1] = (spread_chunk){{3, 0}, {3, 5}, 2 | 8};
    spread_save(st, "", &t, 1, 4, DCP_OK);
    spread_load(st, "", &t, 1, 4);
    load_evenly_on(st, "", t, readers, 3);
    dcp_storage_free(st);
}

static void reports__saved_by_eight_rewritten_offline_for_three(void **unused)
{
    (void)unused;
    static const int mesh = 3, readers[] = {1, 3, 8, 5};
    dcp_storage *st = memory();
    spread t = spread_evenly("w", 17, 3, 8);
    dcp_reshard_opts opts = DCP_RESHARD_OPTS_INIT;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    open.storage = save.storage = st;
    opts.n_mesh = 1;
    opts.mesh = &mesh;
    spread_save(st, "eight", &t, 1, 8, DCP_OK);
    assert_int_equal(dcp_reshard(NULL, "eight", &open, "three", &opts, &save, NULL, NULL), DCP_OK);
    load_evenly_on(st, "three", t, readers, 4);
    dcp_storage_free(st);
}

/* ---- no messages ---- */

static dcp_status save_alone(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    spread_job j = *(const spread_job *)user;
    j.save.rank_local = true;
    j.save.rank = rank;
    j.save.world = comm->size;
    j.save.save_id = "00000000-0000-4000-8000-000000000003";
    return spread_save_rank(&j, NULL, rank, err);
}

static void reports__four_writers_without_messages_three_readers(void **unused)
{
    (void)unused;
    static const int readers[] = {3, 4, 1};
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st = memory();
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    spread t = spread_evenly("w", 10, 3, 4);
    spread_job j = {&t, 1, st, "apart", DCP_SAVE_OPTS_INIT};
    open.storage = save.storage = st;
    run_ranks(4, save_alone, &j, ranks);
    spread_expect(ranks, 4, DCP_OK, "save");
    load_evenly_on(st, "apart", t, readers, 3);
    assert_int_equal(dcp_merge(NULL, "apart", &open, "merged", &save, NULL, NULL), DCP_OK);
    load_evenly_on(st, "merged", t, readers, 3);
    dcp_storage_free(st);
}

/* ---- the same again ---- */

typedef struct cached_job {
    dcp_storage *storage;
    const char *path;
    dcp_serialization serialization;
    dcp_plan_cache *caches[2];
    size_t text_bytes;
    bool was_planned_before[2];
} cached_job;

/* Rows, and an object whose size is another one each time. */
static dcp_status save_cached(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    cached_job *c = user;
    spread t = spread_evenly("w", 4, 3, 2);
    spread_part part;
    dcp_value *state, *text;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_context *ctx; /* of this save alone: a cache outlives it */
    char *letters = malloc(c->text_bytes);
    memset(letters, 'x', c->text_bytes);
    dcp_context_create(NULL, &ctx, NULL);
    dcp_dict_create(NULL, &state, NULL);
    spread_add(&t, rank, true, &part, state);
    dcp_string_create(NULL, (dcp_str){letters, c->text_bytes}, &text, NULL);
    dcp_dict_set(state, dcp_key_str("text"), text, NULL);
    opts.storage = c->storage;
    opts.comm = comm;
    opts.overwrite = true;
    opts.serialization = c->serialization;
    opts.cache = c->caches[rank];
    dcp_status status = dcp_save(ctx, c->path, state, &opts, &report, err);
    dcp_context_free(ctx);
    c->was_planned_before[rank] = report.was_planned_before;
    spread_free(&part);
    dcp_value_free(state);
    free(letters);
    return status;
}

static void expect_text(dcp_storage *st, const char *path, size_t bytes)
{
    dcp_checkpoint *ck;
    dcp_value *v;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &opts, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_read_object(ck, dcp_checkpoint_find(ck, dcp_str_of("text")), &v, NULL), DCP_OK);
    assert_int_equal(dcp_value_str(v).len, bytes);
    dcp_value_free(v);
    dcp_checkpoint_close(ck);
}

/* One cache for two places and two formats; objects that grow from 7 bytes to 7,000,000. */
static void reports__a_cached_plan_knows_no_format_and_no_length(void **unused)
{
    (void)unused;
    static const struct {
        const char *path;
        dcp_serialization serialization;
        size_t text_bytes;
    } saves[] = {{"a", DCP_SERIALIZE_TORCH_SAVE, 7},
                 {"b", DCP_SERIALIZE_SAFETENSORS, 7},
                 {"a", DCP_SERIALIZE_TORCH_SAVE, 7000000},
                 {"b", DCP_SERIALIZE_SAFETENSORS, 3}};
    rank_thread ranks[TEST_MAX_RANKS];
    spread t = spread_evenly("w", 4, 3, 2);
    cached_job c = {.storage = memory()};
    for (int r = 0; r < 2; r++) {
        assert_int_equal(dcp_plan_cache_create(NULL, &c.caches[r], NULL), DCP_OK);
    }
    for (size_t i = 0; i < sizeof saves / sizeof saves[0]; i++) {
        c.path = saves[i].path;
        c.serialization = saves[i].serialization;
        c.text_bytes = saves[i].text_bytes;
        run_ranks(2, save_cached, &c, ranks);
        spread_expect(ranks, 2, DCP_OK, "save");
        assert_int_equal(c.was_planned_before[0], i > 0);
        assert_int_equal(c.was_planned_before[1], i > 0);
        spread_load(c.storage, c.path, &t, 1, 2);
        expect_text(c.storage, c.path, c.text_bytes);
    }
    for (int r = 0; r < 2; r++) {
        dcp_plan_cache_free(c.caches[r]);
    }
    dcp_storage_free(c.storage);
}

static void expect_same_places(dcp_storage *st, const char *one, const char *other)
{
    dcp_checkpoint *a, *b;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(NULL, one, &opts, &a, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_open(NULL, other, &opts, &b, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_get_info(a, &info, NULL), DCP_OK);
    for (size_t i = 0; i < info.n_items; i++) {
        const dcp_item *x = dcp_checkpoint_item(a, i), *y = dcp_checkpoint_item(b, i);
        assert_int_equal(x->n_chunks, y->n_chunks);
        for (size_t k = 0; k < x->n_chunks; k++) {
            dcp_chunk_info p, q;
            assert_int_equal(dcp_item_chunk(a, x, k, &p, NULL), DCP_OK);
            assert_int_equal(dcp_item_chunk(b, y, k, &q, NULL), DCP_OK);
            assert_string_equal(p.file, q.file);
            assert_int_equal(p.offset, q.offset);
        }
    }
    dcp_checkpoint_close(a);
    dcp_checkpoint_close(b);
}

/* Who writes what follows from structure and layout alone. */
static void reports__two_launches_assign_alike(void **unused)
{
    (void)unused;
    static const char *const names[] = {"a", "b", "c", "d"};
    dcp_storage *st = memory();
    spread tensors[4];
    for (int i = 0; i < 4; i++) { /* replicated, of mixed sizes */
        tensors[i] = (spread){.name = names[i], .ndim = 2, .extents = {300 * (i + 1), 100}, .n = 1};
        tensors[i].chunks[0] = (spread_chunk){{0, 0}, {300 * (i + 1), 100}, 15};
    }
    spread_save(st, "first", tensors, 4, 4, DCP_OK);
    spread_save(st, "second", tensors, 4, 4, DCP_OK);
    expect_same_places(st, "first", "second");
    dcp_storage_free(st);
}

/* ---- replaced by fewer ranks ---- */

static dcp_status count_name(void *user, const char *name, dcp_entry_type type)
{
    (void)name;
    *(size_t *)user += type == DCP_ENTRY_FILE;
    return DCP_OK;
}

static void reports__two_ranks_over_four_leave_nothing_stale(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st = memory();
    size_t n_files = 0;
    spread four = spread_evenly("w", 8, 3, 4), two = spread_evenly("w", 8, 3, 2);
    spread_job j = {&two, 1, st, "", DCP_SAVE_OPTS_INIT};
    two.first = 1000;
    spread_save(st, "", &four, 1, 4, DCP_OK);
    spread_save(st, "", &two, 1, 2, DCP_PEER); /* not without being asked for */
    spread_load(st, "", &four, 1, 4);
    j.save.overwrite = true;
    run_ranks(2, spread_save_rank, &j, ranks);
    spread_expect(ranks, 2, DCP_OK, "overwrite");
    spread_load(st, "", &two, 1, 2);
    assert_int_equal(st->ops->list(st, "", count_name, &n_files, NULL), DCP_OK);
    assert_int_equal(n_files, 3); /* two of data, and the metadata */
    dcp_storage_free(st);
}

/* ---- a slow rank, a failing one ---- */

typedef struct paced {
    spread_job job; /* first */
    int slow_rank, failing_rank;
    dcp_storage_op op;
    double failed_at[4], finished_at[4]; /* [rank]; 0: not */
    int slowest[4];
    double slow_seconds;
} paced;

typedef struct pace {
    paced *p;
    int rank;
} pace;

static dcp_status keep_pace(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    const pace *at = user;
    (void)n;
    (void)offset;
    (void)err;
    if (op != at->p->op || strncmp(name, "__", 2) != 0) {
        return DCP_OK;
    }
    if (at->rank == at->p->slow_rank) {
        pause_ms(300);
    }
    return at->rank == at->p->failing_rank ? DCP_IO : DCP_OK;
}

static void note_time(void *user, dcp_log_level level, const char *line)
{
    const pace *at = user;
    (void)line;
    if (level == DCP_LOG_ERROR && at->p->failed_at[at->rank] == 0) {
        at->p->failed_at[at->rank] = seconds();
    }
}

static dcp_status load_paced(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    paced *p = user;
    pace at = {p, rank};
    dcp_context *ctx;
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    dcp_storage *st;
    spread_part part;
    dcp_value *state;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    copts.log = note_time;
    copts.log_user = &at;
    if (dcp_context_create(&copts, &ctx, err) != DCP_OK || dcp_storage_fault(NULL, p->job.storage, keep_pace, &at, &st, err)) {
        return DCP_INTERNAL;
    }
    opts.open.storage = st;
    opts.comm = comm;
    dcp_dict_create(NULL, &state, NULL);
    spread_add(p->job.tensors, rank, false, &part, state);
    dcp_status status = dcp_load(ctx, "", state, &opts, NULL, err);
    p->finished_at[rank] = seconds();
    dcp_value_free(state);
    spread_free(&part);
    dcp_storage_free(st);
    dcp_context_free(ctx);
    return status;
}

/* Rank 1 cannot read its part while rank 0 takes its time: rank 1 says so at once, and all get that cause. */
static void reports__a_read_error_is_told_at_once_and_to_all(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st = memory();
    spread t = spread_evenly("w", 2000, 200, 2);
    paced p = {{&t, 1, st, "", DCP_SAVE_OPTS_INIT}, 0, 1, DCP_OP_READ, {0}, {0}, {0}, 0};
    spread_save(st, "", &t, 1, 2, DCP_OK);
    run_ranks(2, load_paced, &p, ranks);
    spread_expect(ranks, 2, DCP_PEER, "load");
    assert_int_equal(ranks[0].err.rank, 1);
    assert_int_equal(ranks[1].err.rank, 1);
    assert_true(p.failed_at[1] > 0 && p.failed_at[0] == 0);
    assert_true(p.failed_at[1] < p.finished_at[0] - 0.15);
    dcp_storage_free(st);
}

static dcp_status save_paced(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    paced *p = user;
    pace at = {p, rank};
    dcp_storage *st;
    spread_part part;
    dcp_value *state;
    dcp_rank_report each[4];
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    if (dcp_storage_fault(NULL, p->job.storage, keep_pace, &at, &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    opts.storage = st;
    opts.comm = comm;
    report.ranks = each;
    report.n_ranks = 4;
    dcp_dict_create(NULL, &state, NULL);
    spread_add(p->job.tensors, rank, true, &part, state);
    dcp_status status = dcp_save(NULL, "", state, &opts, &report, err);
    p->slowest[rank] = report.slowest_rank;
    if (rank == 0 && status == DCP_OK) {
        p->slow_seconds = each[p->slow_rank].write_seconds;
    }
    dcp_value_free(state);
    spread_free(&part);
    dcp_storage_free(st);
    return status;
}

static void reports__the_slowest_rank_is_named(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_storage *st = memory();
    spread t = spread_evenly("w", 40, 3, 4);
    paced p = {{&t, 1, st, "", DCP_SAVE_OPTS_INIT}, 2, -1, DCP_OP_WRITE, {0}, {0}, {0}, 0};
    run_ranks(4, save_paced, &p, ranks);
    spread_expect(ranks, 4, DCP_OK, "save");
    for (int r = 0; r < 4; r++) {
        assert_int_equal(p.slowest[r], 2);
    }
    assert_true(p.slow_seconds >= 0.3);
    dcp_storage_free(st);
}

/* ---- what each rank has for itself ---- */

typedef struct own_values {
    dcp_storage *storage;
    dcp_failures *failures[4];
} own_values;

/* "dl" is a dict with a key of each rank's own; "seed" is each rank's own by declaration. */
static dcp_status save_own(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const mine[] = {"seed"};
    const own_values *o = user;
    dcp_value *state, *dl;
    char key[16];
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    snprintf(key, sizeof key, "r%d", rank);
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &dl, NULL);
    dcp_dict_set_int(dl, key, 10 + rank, NULL);
    dcp_dict_set(state, dcp_key_str("dl"), dl, NULL);
    dcp_dict_set_int(state, "seed", 100 + rank, NULL);
    opts.storage = o->storage;
    opts.comm = comm;
    opts.per_rank = mine;
    opts.n_per_rank = 1;
    dcp_status status = dcp_save(NULL, "", state, &opts, NULL, err);
    dcp_value_free(state);
    return status;
}

static dcp_status load_own(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const mine[] = {"seed"};
    own_values *o = user;
    dcp_value *state;
    int64_t seed = 0;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_int(state, "seed", 0, NULL);
    opts.open.storage = o->storage;
    opts.comm = comm;
    opts.per_rank = mine;
    opts.n_per_rank = 1;
    opts.failures = o->failures[rank];
    dcp_status status = dcp_load(NULL, "", state, &opts, NULL, err);
    dcp_value_int(dcp_dict_get_str(state, "seed"), &seed);
    dcp_value_free(state);
    return status == DCP_OK && seed != 100 + rank ? DCP_INTERNAL : status;
}

/* Two ranks saved; four ask for their own: it is said which two there are none for. */
static void reports__a_rank_without_a_value_of_its_own_is_named(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    own_values o = {.storage = memory()};
    for (int r = 0; r < 4; r++) {
        assert_int_equal(dcp_failures_create(NULL, &o.failures[r], NULL), DCP_OK);
    }
    run_ranks(2, save_own, &o, ranks);
    spread_expect(ranks, 2, DCP_OK, "save");
    run_ranks(2, load_own, &o, ranks);
    spread_expect(ranks, 2, DCP_OK, "load");
    run_ranks(4, load_own, &o, ranks);
    spread_expect(ranks, 4, DCP_PEER, "load on four");
    for (int r = 0; r < 4; r++) {
        assert_int_equal(dcp_failures_count(o.failures[r]), 2);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(dcp_failures_at(o.failures[r], (size_t)i)->rank, 2 + i);
            assert_int_equal(dcp_failures_at(o.failures[r], (size_t)i)->code, DCP_NOT_FOUND);
        }
        dcp_failures_free(o.failures[r]);
    }
    dcp_storage_free(o.storage);
}

/* Keys of one dict that differ from rank to rank are all there. */
static void reports__dicts_of_ranks_are_united_leaf_by_leaf(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    own_values o = {.storage = memory()};
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_value *tree;
    run_ranks(3, save_own, &o, ranks);
    spread_expect(ranks, 3, DCP_OK, "save");
    opts.storage = o.storage;
    assert_int_equal(dcp_checkpoint_open(NULL, "", &opts, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_read_tree(ck, true, &tree, NULL), DCP_OK);
    const dcp_value *dl = dcp_dict_get_str(tree, "dl");
    assert_int_equal(dcp_value_count(dl), 3);
    for (int r = 0; r < 3; r++) {
        char key[16];
        int64_t found = 0;
        snprintf(key, sizeof key, "r%d", r);
        assert_true(dcp_value_int(dcp_dict_get_str(dl, key), &found) && found == 10 + r);
    }
    dcp_value_free(tree);
    dcp_checkpoint_close(ck);
    dcp_storage_free(o.storage);
}

/* ---- many small replicas ---- */

typedef struct scalars {
    dcp_storage *storage;
    bool load;
    int opens[4];
} scalars;

static dcp_status count_opens(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)n;
    (void)offset;
    (void)err;
    *(int *)user += op == DCP_OP_OPEN && strncmp(name, "__", 2) == 0;
    return DCP_OK;
}

static dcp_status with_scalars(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    scalars *s = user;
    spread rows = spread_evenly("rows", 4000, 100, 4);
    spread_part part;
    dcp_value *state;
    dcp_storage *st;
    int opens = 0;
    float values[50];
    if (dcp_storage_fault(NULL, s->storage, count_opens, &opens, &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    dcp_dict_create(NULL, &state, NULL);
    spread_add(&rows, rank, !s->load, &part, state);
    for (int i = 0; i < 50; i++) {
        char name[16];
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 0, NULL, &values[i]);
        values[i] = s->load ? 0 : (float)i;
        snprintf(name, sizeof name, "s%d", i);
        dcp_dict_set_tensor(state, name, &t, NULL);
    }
    dcp_status status;
    if (s->load) {
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.open.storage = st;
        opts.comm = comm;
        status = dcp_load(NULL, "", state, &opts, NULL, err);
    } else {
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        opts.storage = st;
        opts.comm = comm;
        status = dcp_save(NULL, "", state, &opts, NULL, err);
    }
    for (int i = 0; i < 50; i++) {
        status = status == DCP_OK && values[i] != (float)i ? DCP_INTERNAL : status;
    }
    s->opens[rank] = opens;
    dcp_value_free(state);
    spread_free(&part);
    dcp_storage_free(st);
    return status;
}

/* Loaded by as many ranks as saved: each opens its own file and that with the scalars. */
static void reports__a_reload_opens_two_files_at_most(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    scalars s = {.storage = memory()};
    for (int load = 0; load < 2; load++) {
        s.load = load;
        run_ranks(4, with_scalars, &s, ranks);
        spread_expect(ranks, 4, DCP_OK, load ? "load" : "save");
    }
    for (int r = 0; r < 4; r++) {
        assert_in_range(s.opens[r], 1, 2);
    }
    dcp_storage_free(s.storage);
}

/* ---- too many writers ---- */

typedef struct crowd {
    spread_job job;
    int max_writers, failing_rank;
    atomic_int writing, most;
} crowd;

typedef struct one_of_them {
    crowd *crowd;
    int rank;
} one_of_them;

static dcp_status count_writers(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    one_of_them *me = user;
    crowd *c = me->crowd;
    (void)n, (void)offset, (void)err;
    if (!strstr(name, ".distcp") || (op != DCP_OP_OPEN && op != DCP_OP_WRITE && op != DCP_OP_CLOSE)) {
        return DCP_OK;
    }
    if (op == DCP_OP_OPEN) {
        int now = ++c->writing;
        int most = c->most;
        while (now > most && !atomic_compare_exchange_weak(&c->most, &most, now)) {
        }
        pause_ms(10);
    }
    c->writing -= op == DCP_OP_CLOSE;
    return op == DCP_OP_WRITE && me->rank == c->failing_rank ? DCP_IO : DCP_OK;
}

static dcp_status save_in_a_crowd(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    crowd *c = user;
    one_of_them me = {c, rank};
    dcp_storage *st;
    spread_part part;
    dcp_value *state;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    if (dcp_storage_fault(NULL, c->job.storage, count_writers, &me, &st, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    opts.storage = st;
    opts.comm = comm;
    opts.max_writers = c->max_writers;
    dcp_dict_create(NULL, &state, NULL);
    spread_add(c->job.tensors, rank, true, &part, state);
    dcp_status status = dcp_save(NULL, "", state, &opts, NULL, err);
    dcp_value_free(state);
    spread_free(&part);
    dcp_storage_free(st);
    return status;
}

/* 32 ranks, of whom four may write at a time. Without the cap there are more, so that the count is known to tell. */
static void reports__no_more_ranks_write_than_may(void **unused)
{
    (void)unused;
    static const int caps[] = {4, 1, 5, 31, 32, 100, 0};
    rank_thread ranks[TEST_MAX_RANKS];
    spread t = spread_evenly("w", 64, 50, 32);
    for (size_t i = 0; i < sizeof caps / sizeof caps[0]; i++) {
        dcp_storage *st = memory();
        crowd c = {.job = {&t, 1, st, "", DCP_SAVE_OPTS_INIT}, .max_writers = caps[i], .failing_rank = -1};
        run_ranks(32, save_in_a_crowd, &c, ranks);
        spread_expect(ranks, 32, DCP_OK, "save");
        assert_int_equal(c.writing, 0);
        assert_true(caps[i] == 0 ? c.most > 5 : c.most <= caps[i]);
        spread_load(st, "", &t, 1, 3);
        dcp_storage_free(st);
    }
}

/* A rank fails when it is its turn: ranks before have written, those behind have not, and nothing stays. */
static void reports__a_writer_that_fails_leaves_nothing(void **unused)
{
    (void)unused;
    rank_thread ranks[TEST_MAX_RANKS];
    spread t = spread_evenly("w", 64, 50, 8);
    for (int failing = 0; failing < 8; failing++) {
        dcp_storage *st = memory();
        dcp_stat stat;
        crowd c = {.job = {&t, 1, st, "", DCP_SAVE_OPTS_INIT}, .max_writers = 3, .failing_rank = failing};
        run_ranks(8, save_in_a_crowd, &c, ranks);
        spread_expect(ranks, 8, DCP_PEER, "save");
        for (int r = 0; r < 8; r++) {
            char name[32];
            snprintf(name, sizeof name, "__%d_0.distcp", r);
            assert_int_equal(ranks[r].err.rank, failing);
            assert_int_equal(st->ops->stat(st, name, &stat, NULL), DCP_NOT_FOUND);
        }
        dcp_storage_free(st);
    }
}

/* ---- one large shard ---- */

typedef struct hands {
    pthread_t threads[16]; /* that have moved bytes of a data file */
    size_t n;
    dcp_storage_op op;
} hands;

static dcp_status note_thread(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    hands *h = user;
    size_t i = 0;
    (void)n, (void)offset, (void)err;
    if (op != h->op || !strstr(name, ".distcp")) {
        return DCP_OK;
    }
    while (i < h->n && !pthread_equal(h->threads[i], pthread_self())) {
        i++;
    }
    if (i == h->n && h->n < sizeof h->threads / sizeof h->threads[0]) {
        h->threads[h->n++] = pthread_self();
    }
    pause_ms(2); /* so that the others get something to do */
    return DCP_OK;
}

/* Threads that write one file of so many tensors, and that read it. */
static void count_hands(int tensors, int64_t bytes, int threads, size_t *writing, size_t *reading)
{
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    dcp_storage *inner = memory(), *st;
    hands h = {.op = DCP_OP_WRITE};
    dcp_value *state;
    char *data = calloc((size_t)(tensors * bytes), 1);
    dcp_tensor t = dcp_tensor_make(DCP_UINT8, 1, &bytes, data);
    dcp_save_opts so = DCP_SAVE_OPTS_INIT;
    dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
    copts.threads = threads;
    assert_int_equal(dcp_context_create(&copts, &ctx, NULL), DCP_OK);
    assert_int_equal(dcp_storage_fault(ctx, inner, note_thread, &h, &st, NULL), DCP_OK);
    dcp_dict_create(NULL, &state, NULL);
    for (int i = 0; i < tensors; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        t.data = data + i * bytes;
        dcp_dict_set_tensor(state, name, &t, NULL);
    }
    so.storage = lo.open.storage = st;
    data[tensors * bytes - 1] = 5;
    assert_int_equal(dcp_save(ctx, "", state, &so, NULL, NULL), DCP_OK);
    *writing = h.n;
    h = (hands){.op = DCP_OP_READ};
    data[tensors * bytes - 1] = 0;
    assert_int_equal(dcp_load(ctx, "", state, &lo, NULL, NULL), DCP_OK);
    assert_int_equal(data[tensors * bytes - 1], 5);
    *reading = h.n;
    dcp_value_free(state);
    dcp_storage_free(st);
    dcp_storage_free(inner);
    dcp_context_free(ctx);
    free(data);
}

static void reports__one_large_shard_keeps_several_threads_busy(void **unused)
{
    (void)unused;
    size_t writing, reading;
    count_hands(8, (int64_t)12 << 20, 4, &writing, &reading);
    assert_true(writing > 1 && writing <= 4);
    assert_true(reading > 1 && reading <= 4);
    count_hands(1, (int64_t)96 << 20, 4, &writing, &reading); /* a record has one writer, which hashes it */
    assert_true(reading > 1 && reading <= 4);
    count_hands(8, (int64_t)12 << 20, 1, &writing, &reading);
    assert_int_equal(writing, 1);
    assert_int_equal(reading, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reports__uneven_splits_round_trip),
        cmocka_unit_test(reports__an_empty_shard_hides_no_real_one),
        cmocka_unit_test(reports__interleaved_rows_load_in_order),
        cmocka_unit_test(reports__experts_keep_their_places_and_holes_are_refused),
        cmocka_unit_test(reports__replicated_and_sharded_on_a_mesh),
        cmocka_unit_test(reports__saved_by_eight_rewritten_offline_for_three),
        cmocka_unit_test(reports__four_writers_without_messages_three_readers),
        cmocka_unit_test(reports__a_cached_plan_knows_no_format_and_no_length),
        cmocka_unit_test(reports__two_launches_assign_alike),
        cmocka_unit_test(reports__two_ranks_over_four_leave_nothing_stale),
        cmocka_unit_test(reports__a_read_error_is_told_at_once_and_to_all),
        cmocka_unit_test(reports__the_slowest_rank_is_named),
        cmocka_unit_test(reports__no_more_ranks_write_than_may),
        cmocka_unit_test(reports__a_writer_that_fails_leaves_nothing),
        cmocka_unit_test(reports__one_large_shard_keeps_several_threads_busy),
        cmocka_unit_test(reports__a_rank_without_a_value_of_its_own_is_named),
        cmocka_unit_test(reports__dicts_of_ranks_are_united_leaf_by_leaf),
        cmocka_unit_test(reports__a_reload_opens_two_files_at_most),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
