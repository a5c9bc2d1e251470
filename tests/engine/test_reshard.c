/* Resharding: what N ranks would have written, against boxes that are found out another way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/random.h"

#define MAX_TENSORS 4
#define MAX_NDIM 4
#define MAX_RANKS 16

typedef struct tensor {
    char name[16];
    int ndim;
    int64_t extents[MAX_NDIM], elems;
    uint32_t *dense;
    int axes[3];
    bool is_placed; /* else as by default */
} tensor;

typedef struct model {
    tensor tensors[MAX_TENSORS];
    int n_tensors, n_mesh, mesh[3], world;
    dcp_storage *storage;
} model;

/* ---- a checkpoint of random tensors in random chunks ---- */

static void random_tensor(test_random *rnd, const model *m, tensor *t, int number)
{
    snprintf(t->name, sizeof t->name, "t%d", number);
    t->ndim = (int)test_random_below(rnd, MAX_NDIM + 1);
    t->elems = 1;
    for (int d = 0; d < t->ndim; d++) {
        t->extents[d] = test_random_below(rnd, 12) == 0 ? 0 : 1 + test_random_below(rnd, 8);
        t->elems *= t->extents[d];
    }
    t->dense = malloc((size_t)(t->elems + 1) * sizeof *t->dense);
    for (int64_t i = 0; i < t->elems; i++) {
        t->dense[i] = (uint32_t)i * 2654435761u + (uint32_t)number;
    }
    t->is_placed = test_random_below(rnd, 4) > 0;
    for (int i = 0; i < m->n_mesh; i++) {
        t->axes[i] = t->ndim ? (int)test_random_below(rnd, t->ndim + 1) - 1 : DCP_REPLICATE;
        if (!t->is_placed) {
            t->axes[i] = t->ndim && i + 1 == m->n_mesh ? 0 : DCP_REPLICATE;
        }
    }
}

/* As two chunks along axis 0 where there is more than one row; the second is a view into the dense one. */
static dcp_value *chunked(const tensor *t, int64_t at)
{
    int64_t sizes[2][MAX_NDIM], offsets[2][MAX_NDIM] = {{0}}, row = t->ndim ? t->elems / (t->extents[0] ? t->extents[0] : 1) : 0;
    dcp_tensor chunks[2];
    dcp_box boxes[2];
    dcp_value *v;
    for (int c = 0; c < 2; c++) {
        memcpy(sizes[c], t->extents, sizeof sizes[c]);
        if (t->ndim) {
            sizes[c][0] = c ? t->extents[0] - at : at;
            offsets[c][0] = c ? at : 0;
        }
        chunks[c] = dcp_tensor_make(DCP_UINT32, t->ndim, sizes[c], t->dense + (c ? at * row : 0));
        boxes[c] = (dcp_box){offsets[c], sizes[c]};
    }
    bool two = t->ndim && at > 0;
    assert_int_equal(dcp_sharded_create(NULL, DCP_UINT32, t->ndim, t->extents, two ? 2 : 1, two ? chunks : &chunks[1],
                                        two ? boxes : &boxes[1], &v, NULL),
                     DCP_OK);
    return v;
}

static void save_source(test_random *rnd, const model *m)
{
    dcp_value *state;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = m->storage;
    dcp_dict_create(NULL, &state, NULL);
    for (int i = 0; i < m->n_tensors; i++) {
        const tensor *t = &m->tensors[i];
        int64_t at = t->ndim && t->extents[0] > 1 && t->elems ? test_random_below(rnd, t->extents[0]) : 0;
        assert_int_equal(dcp_dict_set(state, dcp_key_str(t->name), chunked(t, at), NULL), DCP_OK);
    }
    dcp_dict_set_int(state, "step", 7, NULL);
    if (dcp_save(NULL, "from", state, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(state);
}

static void random_model(test_random *rnd, model *m)
{
    *m = (model){.n_mesh = (int)test_random_below(rnd, 4), .n_tensors = 1 + (int)test_random_below(rnd, MAX_TENSORS), .world = 1};
    for (int i = 0; i < m->n_mesh; i++) {
        m->mesh[i] = 1 + (int)test_random_below(rnd, i ? 3 : 4);
        m->world *= m->mesh[i];
        if (m->world > 9) {
            m->world /= m->mesh[i];
            m->mesh[i] = 1;
        }
    }
    for (int i = 0; i < m->n_tensors; i++) {
        random_tensor(rnd, m, &m->tensors[i], i);
    }
    assert_int_equal(dcp_storage_memory(NULL, &m->storage, NULL), DCP_OK);
    save_source(rnd, m);
}

static void free_model(model *m)
{
    for (int i = 0; i < m->n_tensors; i++) {
        free(m->tensors[i].dense);
    }
    dcp_storage_free(m->storage);
}

static dcp_status reshard(dcp_context *ctx, const model *m, const char *to, dcp_save_report *report, dcp_error *err)
{
    dcp_placement placements[MAX_TENSORS];
    dcp_reshard_opts opts = DCP_RESHARD_OPTS_INIT;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    open.storage = save.storage = m->storage;
    save.overwrite = true;
    opts.n_mesh = m->n_mesh;
    opts.mesh = m->mesh;
    opts.placements = placements;
    for (int i = 0; i < m->n_tensors; i++) {
        if (m->tensors[i].is_placed) {
            placements[opts.n_placements++] = (dcp_placement){m->tensors[i].name, m->tensors[i].axes};
        }
    }
    return dcp_reshard(ctx, "from", &open, to, &opts, &save, report, err);
}

/* ---- what is expected ---- */

/* Which indexes of an axis a rank has, by cutting the list of them as torch.chunk cuts a list: pieces of ceil(n / parts) from the
 * front until nothing is left. Coordinates are counted up, rank by rank. */
static void owned(const model *m, const tensor *t, int rank, int axis, bool *has)
{
    int64_t list[16], n = t->extents[axis];
    int at[3] = {0};
    for (int r = 0; r < rank; r++) {
        for (int i = m->n_mesh - 1; i >= 0 && ++at[i] == m->mesh[i]; i--) {
            at[i] = 0;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        list[i] = i;
    }
    for (int i = 0; i < m->n_mesh; i++) {
        if (t->axes[i] != axis) {
            continue;
        }
        int64_t piece = 0;
        while (piece * m->mesh[i] < n) {
            piece++;
        }
        int64_t taken = 0, kept[16];
        for (int64_t k = 0; k < n; k++) {
            if (piece && k / piece == at[i]) {
                kept[taken++] = list[k];
            }
        }
        memcpy(list, kept, (size_t)taken * sizeof *list);
        n = taken;
    }
    memset(has, 0, 16 * sizeof *has);
    for (int64_t i = 0; i < n; i++) {
        has[list[i]] = true;
    }
}

/* Does the box hold exactly the elements that the rank owns? */
static bool is_ranks_box(const model *m, const tensor *t, int rank, const dcp_box *box)
{
    for (int d = 0; d < t->ndim; d++) {
        bool has[16];
        owned(m, t, rank, d, has);
        for (int64_t i = 0; i < t->extents[d]; i++) {
            if (has[i] != (i >= box->offsets[d] && i < box->offsets[d] + box->sizes[d])) {
                return false;
            }
        }
    }
    return true;
}

static bool owns_something(const model *m, const tensor *t, int rank)
{
    bool any = true;
    for (int d = 0; d < t->ndim; d++) {
        bool has[16], some = false;
        owned(m, t, rank, d, has);
        for (int64_t i = 0; i < t->extents[d]; i++) {
            some |= has[i];
        }
        any &= some;
    }
    return any;
}

/* Every chunk is the box of the rank whose file it is in, and every rank finds its box among them. */
static void check_chunks(const model *m, const dcp_checkpoint *ck, const tensor *t, const dcp_item *item)
{
    bool is_found[MAX_RANKS] = {false};
    assert_true(item->n_chunks >= 1);
    for (size_t i = 0; i < item->n_chunks; i++) {
        dcp_chunk_info chunk;
        int writer;
        assert_int_equal(dcp_item_chunk(ck, item, i, &chunk, NULL), DCP_OK);
        assert_int_equal(sscanf(chunk.file, "__%d_", &writer), 1);
        assert_true(writer >= 0 && writer < m->world);
        if (t->elems && !is_ranks_box(m, t, writer, &chunk.box)) {
            fail_msg("%s: chunk %zu in %s is another rank's", t->name, i, chunk.file);
        }
        for (int r = 0; r < m->world; r++) {
            if (is_ranks_box(m, t, r, &chunk.box)) {
                assert_false(is_found[r] && t->elems); /* one box of a rank, written once */
                is_found[r] = true;
            }
        }
    }
    for (int r = 0; r < m->world && t->elems; r++) {
        assert_int_equal(is_found[r], owns_something(m, t, r));
    }
    if (t->elems == 0) {
        assert_int_equal(item->n_chunks, 1);
    }
}

static void check_values(dcp_checkpoint *ck, const tensor *t, const dcp_item *item)
{
    uint32_t *whole = calloc((size_t)t->elems + 1, sizeof *whole);
    dcp_tensor dst = dcp_tensor_make(DCP_UINT32, t->ndim, t->extents, whole);
    assert_int_equal(dcp_read(ck, item, NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(whole, t->dense, (size_t)t->elems * sizeof *whole);
    free(whole);
}

static void check(const model *m, const char *path)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    opts.storage = m->storage;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &opts, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_get_info(ck, &info, NULL), DCP_OK);
    assert_int_equal(info.world, m->world);
    assert_int_equal(info.n_items, (size_t)m->n_tensors + 1);
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    for (int i = 0; i < m->n_tensors; i++) {
        const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(m->tensors[i].name));
        assert_non_null(item);
        check_chunks(m, ck, &m->tensors[i], item);
        check_values(ck, &m->tensors[i], item);
    }
    dcp_checkpoint_close(ck);
}

static void reshard__random_meshes_get_their_boxes_and_values_stay(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("reshard");
    for (int i = 0; i < 400; i++) {
        model m;
        dcp_error err = DCP_ERROR_INIT;
        random_model(&rnd, &m);
        if (reshard(NULL, &m, "to", NULL, &err) != DCP_OK) {
            fail_msg("round %d: %s", i, err.message);
        }
        check(&m, "to");
        free_model(&m);
    }
}

/* ---- a model that is known ---- */

/* 10 rows of 6, chunks of 3 and 7 rows. */
static void fixed_model(model *m, int n_mesh, const int *mesh)
{
    test_random rnd = {1};
    *m = (model){.n_mesh = n_mesh, .n_tensors = 1, .world = 1};
    for (int i = 0; i < n_mesh; i++) {
        m->mesh[i] = mesh[i];
        m->world *= mesh[i];
    }
    tensor *t = &m->tensors[0];
    *t = (tensor){.name = "t0", .ndim = 2, .extents = {10, 6}, .elems = 60, .dense = malloc(60 * sizeof(uint32_t))};
    for (int i = 0; i < 60; i++) {
        t->dense[i] = (uint32_t)i;
    }
    assert_int_equal(dcp_storage_memory(NULL, &m->storage, NULL), DCP_OK);
    save_source(&rnd, m);
}

static size_t count_chunks(const model *m, const char *path)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    opts.storage = m->storage;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &opts, &ck, NULL), DCP_OK);
    size_t n = dcp_checkpoint_find(ck, dcp_str_of("t0"))->n_chunks;
    dcp_checkpoint_close(ck);
    return n;
}

/* torch.arange(10).chunk(4) has pieces of 3, 3, 3 and 1; .chunk(6) only five, of 2. */
static void reshard__the_last_ranks_have_less_or_nothing(void **unused)
{
    (void)unused;
    static const int four = 4, six = 6;
    model m;
    fixed_model(&m, 1, &four);
    assert_int_equal(reshard(NULL, &m, "to", NULL, NULL), DCP_OK);
    assert_int_equal(count_chunks(&m, "to"), 4);
    free_model(&m);
    fixed_model(&m, 1, &six);
    assert_int_equal(reshard(NULL, &m, "to", NULL, NULL), DCP_OK);
    assert_int_equal(count_chunks(&m, "to"), 5);
    free_model(&m);
}

static void reshard__reports_all_ranks(void **unused)
{
    (void)unused;
    static const int mesh[] = {2, 2};
    model m;
    dcp_rank_report ranks[4];
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    report.ranks = ranks;
    report.n_ranks = 4;
    fixed_model(&m, 2, mesh);
    assert_int_equal(reshard(NULL, &m, "to", &report, NULL), DCP_OK);
    assert_int_equal(report.world, 4);
    assert_int_equal(report.n_items, 3); /* two halves and the object, each once */
    assert_int_equal(report.payload_bytes, 240);
    uint64_t bytes = 0;
    for (int r = 0; r < 4; r++) {
        bytes += ranks[r].bytes;
    }
    assert_int_equal(bytes, report.bytes);
    free_model(&m);
}

static void reshard__over_itself_replaces_it(void **unused)
{
    (void)unused;
    static const int mesh[] = {2, 3};
    model m;
    fixed_model(&m, 2, mesh);
    m.tensors[0].is_placed = true;
    m.tensors[0].axes[1] = 1;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(reshard(NULL, &m, "from", NULL, NULL), DCP_OK);
        assert_int_equal(count_chunks(&m, "from"), 6);
    }
    free_model(&m);
}

static dcp_status reshard_as(const model *m, const dcp_reshard_opts *opts, const dcp_save_opts *given)
{
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    save = given ? *given : save;
    open.storage = save.storage = m->storage;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp_reshard(NULL, "from", &open, "to", opts, &save, NULL, &err);
    dcp_stat st;
    assert_int_equal(err.code, status);
    if (status != DCP_OK) { /* nothing was begun */
        assert_int_equal(m->storage->ops->stat(m->storage, "to/.metadata", &st, NULL), DCP_NOT_FOUND);
    }
    return status;
}

static void reshard__wrong_arguments_are_named(void **unused)
{
    (void)unused;
    static const int mesh[] = {2, 2}, none[] = {2, 0}, many[] = {64, 65};
    static const int axis_2[] = {0, 2}, rows[] = {0, DCP_REPLICATE};
    dcp_placement bad = {"t0", axis_2}, unknown = {"t9", rows}, object = {"step", rows}, good = {"t*", rows},
                  no_axes = {"t0", NULL};
    dcp_reshard_opts opts = {sizeof opts, 2, mesh, NULL, 0};
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    model m;
    fixed_model(&m, 2, mesh);
    opts.n_placements = 1;
    opts.placements = &bad;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_ARG);
    opts.placements = &no_axes;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_ARG);
    opts.placements = &unknown;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_NOT_FOUND);
    opts.placements = &object;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_NOT_FOUND);
    opts.placements = &good;
    opts.mesh = none;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_ARG);
    opts.mesh = many;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_ARG);
    opts.mesh = mesh;
    opts.struct_size--;
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_ARG);
    opts.struct_size++;
    save.rank_local = true;
    assert_int_equal(reshard_as(&m, &opts, &save), DCP_ARG);
    assert_int_equal(reshard_as(&m, NULL, NULL), DCP_ARG);
    assert_int_equal(reshard_as(&m, &opts, NULL), DCP_OK);
    free_model(&m);
}

static void flip_byte(const model *m, const char *name, uint64_t offset)
{
    dcp_file *f;
    uint8_t byte;
    size_t got;
    assert_int_equal(m->storage->ops->open(m->storage, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    assert_int_equal(m->storage->ops->read_at(f, &byte, 1, offset, &got, NULL), DCP_OK);
    byte ^= 1;
    assert_int_equal(m->storage->ops->write_at(f, &byte, 1, offset, NULL), DCP_OK);
    assert_int_equal(m->storage->ops->close(f, NULL), DCP_OK);
}

/* Wherever it is: each rank reads only parts of the record. */
static void reshard__a_broken_record_is_not_written_again(void **unused)
{
    (void)unused;
    static const int four = 4;
    model m;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_chunk_info chunk;
    dcp_stat st;
    fixed_model(&m, 1, &four);
    open.storage = m.storage;
    assert_int_equal(dcp_checkpoint_open(NULL, "from", &open, &ck, NULL), DCP_OK);
    const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of("t0"));
    assert_int_equal(dcp_item_chunk(ck, item, item->n_chunks - 1, &chunk, NULL), DCP_OK);
    uint64_t middle = chunk.offset + chunk.length / 2;
    dcp_checkpoint_close(ck);
    flip_byte(&m, "from/__0_0.distcp", middle);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_not_equal(reshard(NULL, &m, "to", NULL, &err), DCP_OK);
    assert_true(err.code == DCP_CHECKSUM || err.code == DCP_FORMAT);
    assert_int_equal(m.storage->ops->stat(m.storage, "to/.metadata", &st, NULL), DCP_NOT_FOUND);
    free_model(&m);
}

/* ---- sources ---- */

static void reshard__values_of_single_ranks_keep_names_of_their_own(void **unused)
{
    (void)unused;
    static const int three = 3;
    dcp_reshard_opts opts = DCP_RESHARD_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    opts.n_mesh = 1;
    opts.mesh = &three;
    assert_int_equal(dcp_storage_memory(NULL, &save.storage, NULL), DCP_OK);
    assert_int_equal(dcp_reshard(NULL, DCP_TEST_DIR "/golden/2.13.0/rank_local/ckpt", NULL, "to", &opts, &save, NULL, NULL),
                     DCP_OK);
    open.storage = save.storage;
    assert_int_equal(dcp_checkpoint_open(NULL, "to", &open, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_count(ck), 5);
    assert_non_null(dcp_checkpoint_find(ck, dcp_str_of("rank.3.mine")));
    assert_int_equal(dcp_checkpoint_find(ck, dcp_str_of("rows"))->n_chunks, 3); /* 10 rows: 4, 4, 2 */
    dcp_checkpoint_close(ck);
    dcp_storage_free(save.storage);
}

/* ---- failures ---- */

static dcp_status reshard_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    return reshard(ctx, user, "to", NULL, err);
}

static void reshard__out_of_memory_anywhere(void **unused)
{
    (void)unused;
    static const int one = 1;
    model m;
    fixed_model(&m, 1, &one);
    size_t n = 0;
    while (failing_alloc_try(reshard_for_walk, &m, n, false)) {
        failing_alloc_try(reshard_for_walk, &m, n, true);
        n += 1 + n / 16; /* there are thousands, alike in long runs */
    }
    assert_true(n > 100);
    check(&m, "to");
    free_model(&m);
}

/* Which allocation of which rank comes n-th varies; every one of them must end well on all ranks. */
static void reshard__out_of_memory_on_some_rank_fails_all(void **unused)
{
    (void)unused;
    static const int three = 3;
    model m;
    fixed_model(&m, 1, &three);
    bool hit = true;
    size_t n_failed = 0;
    for (size_t n = 0; hit; n += 1 + n / 16) {
        failing_alloc fa;
        dcp_context *ctx = failing_alloc_context(&fa, 2);
        fa.calls = 0;
        fa.fail_at = n;
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = reshard(ctx, &m, "to", NULL, &err);
        hit = fa.failed > 0;
        n_failed += status != DCP_OK;
        if (status != DCP_OK && (!hit || (status != DCP_NOMEM && status != DCP_PEER))) {
            fail_msg("allocation %zu: %s: %s", n, dcp_status_name(status), err.message);
        }
        assert_int_equal(fa.live, 1);
        dcp_context_free(ctx);
    }
    assert_true(n_failed > 30);
    check(&m, "to");
    free_model(&m);
}

typedef struct stopper {
    uint64_t last, total;
    bool is_monotonic;
    int calls, stop_at;
} stopper;

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    stopper *s = user;
    s->is_monotonic &= done >= s->last && done <= total;
    s->last = done;
    s->total = total;
    return ++s->calls != s->stop_at;
}

static void reshard__progress_counts_up_and_stops(void **unused)
{
    (void)unused;
    static const int three = 3;
    model m;
    dcp_reshard_opts opts = {sizeof opts, 1, &three, NULL, 0};
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    stopper s = {.is_monotonic = true};
    fixed_model(&m, 1, &three);
    save.progress = on_progress;
    save.user = &s;
    save.overwrite = true;
    assert_int_equal(reshard_as(&m, &opts, &save), DCP_OK);
    assert_true(s.is_monotonic && s.calls > 0 && s.last > 0);
    dcp_stat st;
    for (int at = 1; at <= s.calls; at++) {
        stopper again = {.is_monotonic = true, .stop_at = at};
        save.user = &again;
        dcp_open_opts open = DCP_OPEN_OPTS_INIT;
        open.storage = save.storage = m.storage;
        dcp_status status = dcp_reshard(NULL, "from", &open, "stopped", &opts, &save, NULL, NULL);
        assert_true(status == DCP_CANCELED || status == DCP_PEER);
        assert_int_equal(m.storage->ops->stat(m.storage, "stopped/.metadata", &st, NULL), DCP_NOT_FOUND);
    }
    free_model(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reshard__random_meshes_get_their_boxes_and_values_stay),
        cmocka_unit_test(reshard__the_last_ranks_have_less_or_nothing),
        cmocka_unit_test(reshard__reports_all_ranks),
        cmocka_unit_test(reshard__over_itself_replaces_it),
        cmocka_unit_test(reshard__wrong_arguments_are_named),
        cmocka_unit_test(reshard__a_broken_record_is_not_written_again),
        cmocka_unit_test(reshard__values_of_single_ranks_keep_names_of_their_own),
        cmocka_unit_test(reshard__out_of_memory_anywhere),
        cmocka_unit_test(reshard__out_of_memory_on_some_rank_fails_all),
        cmocka_unit_test(reshard__progress_counts_up_and_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
