/* A torch.save file that one rank reads for all: each gets its part, nobody else needs the file, and failures reach everybody. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/memory_copy.h"
#include "support/rank_model.h"

#define GOLDEN DCP_TEST_DIR "/golden/2.13.0/torch_save/file.pt"

/* ---- any layout ---- */

/* A load by ranks of whom the coordinator alone has the file; the storage of the others is empty. */
typedef struct load_job {
    const model *m;
    int coordinator;
    uint64_t memory_bytes;
    bool check_crc;
    atomic_ullong read, received;
    int n_failed[TEST_MAX_RANKS], failed[TEST_MAX_RANKS]; /* on each rank: how many have failed, and the first of them */
    dcp_status cause[TEST_MAX_RANKS];
} load_job;

static dcp_status load_part(load_job *j, dcp_context *ctx, dcp_storage *storage, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const objects[] = {"step"};
    dcp_torchfile_reader *reader;
    dcp_status status = dcp_torchfile_reader_open(ctx, "file.pt", j->coordinator, &reader, err);
    if (status != DCP_OK) {
        return status;
    }
    rank_state *s = make_state(j->m, rank, j->m->n_loading, true);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    dcp_failures *failures = NULL;
    dcp_failures_create(NULL, &failures, NULL);
    opts.open.storage = storage;
    opts.open.check_crc = j->check_crc;
    opts.comm = comm;
    opts.torchfile = reader;
    opts.exclude = objects;
    opts.n_exclude = 1;
    opts.failures = failures;
    status = dcp_load(ctx, NULL, s->state, &opts, &report, err);
    const dcp_failure *first = dcp_failures_at(failures, 0);
    j->n_failed[rank] = (int)dcp_failures_count(failures);
    j->failed[rank] = first ? first->rank : -1;
    j->cause[rank] = first ? first->code : DCP_OK;
    j->read += report.read_bytes;
    j->received += report.received_bytes;
    dcp_dict_set_int(s->state, "step", 42, NULL);
    status = status == DCP_OK && !is_as_saved(j->m, s) ? DCP_INTERNAL : status;
    dcp_failures_free(failures);
    free_state(s);
    dcp_torchfile_reader_close(reader);
    return status;
}

static dcp_status load_rank_by_broadcast(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    load_job *j = user;
    dcp_context *ctx;
    dcp_context_opts copts = DCP_CONTEXT_OPTS_INIT;
    dcp_storage *none;
    copts.memory_bytes = j->memory_bytes;
    copts.threads = 2;
    if (dcp_context_create(&copts, &ctx, err) != DCP_OK || dcp_storage_memory(ctx, &none, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    dcp_status status = load_part(j, ctx, rank == j->coordinator ? j->m->storage : none, comm, rank, err);
    dcp_storage_free(none);
    dcp_context_free(ctx);
    return status;
}

/* The model as file.pt in its storage. */
static void make_file(const model *m)
{
    rank_thread ranks[TEST_MAX_RANKS];
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.to = DCP_TO_TORCH;
    opts.open.storage = opts.storage = m->storage;
    run_ranks(m->n_saving, save_rank, (void *)m, ranks);
    expect_all(ranks, m->n_saving, DCP_OK, 0);
    if (dcp_convert(NULL, "", "file.pt", &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
}

/* R2.17, R2.19: whole tensors and parts, rows, columns and blocks, even and uneven, of one to nine ranks. */
static void torchfile__each_rank_gets_its_part(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile");
    rank_thread ranks[TEST_MAX_RANKS];
    uint64_t received = 0;
    for (int i = 0; i < 120; i++) {
        model m;
        random_model_of(&rnd, &m, 3, 55);
        m.n_saving = 1;
        make_file(&m);
        load_job j = {.m = &m, .coordinator = (int)test_random_below(&rnd, m.n_loading), .memory_bytes = 1 << 20};
        run_ranks(m.n_loading, load_rank_by_broadcast, &j, ranks);
        expect_all(ranks, m.n_loading, DCP_OK, i);
        assert_true(j.received == j.read * (uint64_t)(m.n_loading - 1));
        received += j.received;
        free_model(&m);
    }
    printf("%llu bytes from the coordinators\n", (unsigned long long)received);
    assert_true(received > 1 << 20);
}

/* Of rows that nobody wants nothing is read. */
static void torchfile__only_what_is_wanted_is_read(void **unused)
{
    (void)unused;
    rank_thread ranks[2];
    enum { ROWS = 1000, COLUMNS = 64 };
    model m = {.n_tensors = 1, .n_saving = 1, .n_loading = 2, .save = DCP_SAVE_OPTS_INIT};
    tensor *t = &m.tensors[0];
    *t = (tensor){.ndim = 2, .extents = {ROWS, COLUMNS}, .elems = ROWS * COLUMNS};
    t->dense = malloc((size_t)t->elems * sizeof *t->dense);
    for (int64_t i = 0; i < t->elems; i++) {
        t->dense[i] = (uint32_t)i * 7;
    }
    t->saved = (layout){.parts = {1, 1}, .cuts = {{0, ROWS}, {0, COLUMNS}}, .n_chunks = 1, .copies = 1};
    t->loaded = (layout){.parts = {2, 1}, .cuts = {{100, 150, 200}, {0, COLUMNS}}, .n_chunks = 2, .copies = 1};
    assert_int_equal(dcp_storage_memory(NULL, &m.storage, NULL), DCP_OK);
    m.save.storage = m.storage;
    make_file(&m);
    load_job j = {.m = &m, .memory_bytes = 192 << 20};
    run_ranks(2, load_rank_by_broadcast, &j, ranks);
    expect_all(ranks, 2, DCP_OK, 0);
    assert_int_equal(j.read, 100 * COLUMNS * sizeof(uint32_t));
    free_model(&m);
}

/* ---- failures ---- */

static void expect_failure(const load_job *j, const rank_thread *ranks, int n, dcp_status cause, const char *what)
{
    for (int r = 0; r < n; r++) {
        if (ranks[r].status != DCP_PEER || j->n_failed[r] != 1 || j->failed[r] != j->coordinator ||
            (cause != DCP_OK && j->cause[r] != cause)) {
            fail_msg("%s, rank %d: %s, %d failed, rank %d by %s: %s", what, r, dcp_status_name(ranks[r].status), j->n_failed[r],
                     j->failed[r], dcp_status_name(j->cause[r]), ranks[r].err.message);
        }
    }
}

static model broken_model(test_random *rnd)
{
    model m;
    do {
        random_model_of(rnd, &m, 3, 20);
        if (m.tensors[0].elems > 100) {
            break;
        }
        free_model(&m);
    } while (true);
    m.n_saving = 1;
    m.n_loading = 3;
    make_file(&m);
    return m;
}

/* R2.20 */
static void torchfile__a_broken_file_is_told_to_all(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile broken");
    model m = broken_model(&rnd);
    rank_thread ranks[3];
    file_bytes good = get_file(m.storage, "file.pt");
    for (int i = 0; i < 40; i++) {
        char what[40];
        load_job j = {.m = &m, .coordinator = 1, .memory_bytes = 1 << 20};
        uint64_t bytes = (uint64_t)test_random_below(&rnd, (int64_t)good.n);
        snprintf(what, sizeof what, "cut to %llu", (unsigned long long)bytes);
        set_file(m.storage, "file.pt", good.data, (size_t)bytes);
        run_ranks(3, load_rank_by_broadcast, &j, ranks);
        expect_failure(&j, ranks, 3, DCP_OK, what);
    }
    load_job j = {.m = &m, .coordinator = 1, .memory_bytes = 1 << 20};
    set_file(m.storage, "file.pt", good.data, good.n);
    m.storage->ops->remove(m.storage, "file.pt", NULL);
    run_ranks(3, load_rank_by_broadcast, &j, ranks);
    expect_failure(&j, ranks, 3, DCP_NOT_FOUND, "absent");
    free(good.data);
    free_model(&m);
}

/* A tensor whose bytes have changed, where that is looked for. */
static void torchfile__a_wrong_checksum_is_told_to_all(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile crc");
    for (int i = 0; i < 10; i++) {
        model m = broken_model(&rnd);
        m.tensors[0].loaded.copies = TEST_MAX_RANKS; /* all of it is wanted, so all of it is looked at */
        rank_thread ranks[3];
        dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
        dcp_checkpoint *ck;
        dcp_chunk_info place;
        opts.storage = m.storage;
        assert_int_equal(dcp_checkpoint_open(NULL, "file.pt", &opts, &ck, NULL), DCP_OK);
        assert_int_equal(dcp_item_chunk(ck, dcp_checkpoint_find(ck, dcp_str_of("t0")), 0, &place, NULL), DCP_OK);
        dcp_checkpoint_close(ck);
        flip_byte(m.storage, "file.pt", place.offset + (uint64_t)test_random_below(&rnd, (int64_t)place.length));
        load_job j = {.m = &m, .coordinator = 2, .memory_bytes = 192 << 20, .check_crc = true};
        run_ranks(3, load_rank_by_broadcast, &j, ranks);
        expect_failure(&j, ranks, 3, DCP_CHECKSUM, "a byte of t0");
        free_model(&m);
    }
}

typedef struct read_fault {
    int reads, fail_at;
} read_fault;

static dcp_status fail_a_read(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    read_fault *f = user;
    (void)name, (void)n, (void)offset, (void)err;
    return op == DCP_OP_READ && f->reads++ == f->fail_at ? DCP_IO : DCP_OK;
}

/* Reading fails at any moment of the load. */
static void torchfile__a_failing_read_is_told_to_all(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile fault");
    model m = broken_model(&rnd);
    dcp_storage *whole = m.storage;
    int n = 0;
    for (bool is_hit = true; is_hit; n++) {
        rank_thread ranks[3];
        read_fault f = {.fail_at = n};
        load_job j = {.m = &m, .coordinator = 0, .memory_bytes = 1 << 20};
        assert_int_equal(dcp_storage_fault(NULL, whole, fail_a_read, &f, &m.storage, NULL), DCP_OK);
        run_ranks(3, load_rank_by_broadcast, &j, ranks);
        dcp_storage_free(m.storage);
        is_hit = f.reads > n;
        if (is_hit) {
            expect_failure(&j, ranks, 3, DCP_IO, "a failing read");
        } else {
            expect_all(ranks, 3, DCP_OK, n);
        }
    }
    assert_true(n > 4);
    m.storage = whole;
    free_model(&m);
}

/* ---- a file of PyTorch ---- */

/* What one rank wants of the golden file: `wanted` as a tensor of shape [300, 257] or, for another dtype, as that. */
typedef struct golden_job {
    const char *group, *name;
    dcp_dtype dtype;
    bool with_object, is_partial, no_path;
    int coordinators[2];
    const char *path;
    dcp_status cause[2];
    double first[2], last[2];
    size_t n_missing[2];
} golden_job;

static double number(dcp_dtype dtype, const void *at)
{
    return dtype == DCP_FLOAT32 ? *(const float *)at : dtype == DCP_FLOAT64 ? *(const double *)at : (double)*(const int64_t *)at;
}

static dcp_status load_golden(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    golden_job *j = user;
    int64_t shape[] = {300, 257};
    size_t n = 300 * 257, each = dcp_dtype_bytes(j->dtype);
    char *data = calloc(n, each);
    dcp_tensor t = dcp_tensor_make(j->dtype, 2, shape, data);
    dcp_value *state, *group;
    dcp_torchfile_reader *reader;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &group, NULL);
    dcp_dict_set_tensor(group, j->name, &t, NULL);
    if (j->with_object && rank == 0) {
        dcp_dict_set_int(group, "step", 0, NULL);
    }
    dcp_dict_set(state, dcp_key_str(j->group), group, NULL);
    dcp_torchfile_reader_open(NULL,
                              j->no_path                      ? NULL
                              : rank == j->coordinators[rank] ? j->path
                                                              : "/nowhere",
                              j->coordinators[rank], &reader, NULL);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    dcp_failures *failures = NULL;
    dcp_failures_create(NULL, &failures, NULL);
    opts.comm = comm;
    opts.partial = j->is_partial;
    opts.torchfile = reader;
    opts.failures = failures;
    dcp_status status = dcp_load(NULL, NULL, state, &opts, &report, err);
    j->cause[rank] = dcp_failures_count(failures) ? dcp_failures_at(failures, 0)->code : status;
    j->first[rank] = number(j->dtype, data);
    j->last[rank] = number(j->dtype, data + (n - 1) * each);
    j->n_missing[rank] = report.n_missing;
    dcp_failures_free(failures);
    dcp_torchfile_reader_close(reader);
    dcp_value_free(state);
    free(data);
    return status;
}

/* Two ranks; both come to the same. */
static void run_golden(golden_job *j, dcp_status status, dcp_status cause)
{
    rank_thread ranks[2];
    run_ranks(2, load_golden, j, ranks);
    for (int r = 0; r < 2; r++) {
        if (ranks[r].status != status || j->cause[r] != cause) {
            fail_msg("rank %d: %s by %s: %s", r, dcp_status_name(ranks[r].status), dcp_status_name(j->cause[r]),
                     ranks[r].err.message);
        }
    }
}

static golden_job golden(dcp_dtype dtype)
{
    return (golden_job){.group = "model", .name = "big", .dtype = dtype, .path = GOLDEN};
}

/* R2.17, R2.18: a nested file of PyTorch, whose tensor reads the same directly; cast to what the target is. */
static void torchfile__nested_targets_match_a_nested_file(void **unused)
{
    (void)unused;
    int64_t shape[] = {300, 257};
    static float direct[300 * 257];
    dcp_checkpoint *ck;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, direct);
    assert_int_equal(dcp_checkpoint_open(NULL, GOLDEN, NULL, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("model.big")), NULL, &t, NULL), DCP_OK);
    dcp_checkpoint_close(ck);
    const double first = direct[0], last = direct[300 * 257 - 1];
    static const dcp_dtype dtypes[] = {DCP_FLOAT32, DCP_FLOAT64, DCP_INT64};
    for (size_t i = 0; i < 3; i++) {
        golden_job j = golden(dtypes[i]);
        run_golden(&j, DCP_OK, DCP_OK);
        for (int r = 0; r < 2; r++) {
            assert_true(j.first[r] == (i == 2 ? (double)(int64_t)first : first));
            assert_true(j.last[r] == (i == 2 ? (double)(int64_t)last : last));
        }
    }
    assert_true(first != 0 || last != 0);
}

/* R2.16, R2.20, R2.22: what cannot be loaded is a failure on all ranks, and nothing is changed. */
static void torchfile__what_does_not_fit_is_told_to_all(void **unused)
{
    (void)unused;
    golden_job complex = golden(DCP_COMPLEX64), absent = golden(DCP_FLOAT32), object = golden(DCP_FLOAT32),
               step = golden(DCP_FLOAT32), partial = golden(DCP_FLOAT32), shape = golden(DCP_FLOAT32);
    run_golden(&complex, DCP_PEER, DCP_MISMATCH);
    absent.name = "nobody";
    run_golden(&absent, DCP_PEER, DCP_NOT_FOUND);
    assert_int_equal(absent.n_missing[0], 1);
    object.with_object = true; /* the state has what is no tensor */
    run_golden(&object, DCP_PEER, DCP_UNSUPPORTED);
    assert_true(object.first[1] == 0 && object.last[1] == 0);
    step.group = "meta"; /* the file has */
    step.name = "step";
    run_golden(&step, DCP_PEER, DCP_MISMATCH);
    partial.name = "nobody";
    partial.is_partial = true;
    run_golden(&partial, DCP_OK, DCP_OK);
    assert_true(partial.first[0] == 0 && partial.n_missing[1] == 1);
    shape.name = "five_d";
    run_golden(&shape, DCP_PEER, DCP_MISMATCH);
}

/* R2.15: before anything is opened. */
static void torchfile__ranks_agree_on_the_coordinator(void **unused)
{
    (void)unused;
    golden_job other = golden(DCP_FLOAT32), outside = golden(DCP_FLOAT32), none = golden(DCP_FLOAT32), dir = golden(DCP_FLOAT32);
    other.coordinators[1] = 1;
    run_golden(&other, DCP_STATE, DCP_STATE);
    outside.coordinators[0] = outside.coordinators[1] = 2;
    run_golden(&outside, DCP_PEER, DCP_ARG);
    none.no_path = true;
    run_golden(&none, DCP_PEER, DCP_STATE);
    dir.path = DCP_TEST_DIR "/golden/2.13.0/sharded/ckpt";
    run_golden(&dir, DCP_PEER, DCP_FORMAT);
}

/* ---- one process ---- */

/* R2.11, R2.13, R2.14 */
static void torchfile__reader_keeps_what_it_is_given(void **unused)
{
    (void)unused;
    dcp_torchfile_reader *r;
    assert_int_equal(dcp_torchfile_reader_open(NULL, NULL, -1, &r, NULL), DCP_ARG);
    assert_int_equal(dcp_torchfile_reader_open(NULL, NULL, 0, &r, NULL), DCP_OK);
    assert_null(dcp_torchfile_reader_path(r));
    assert_int_equal(dcp_torchfile_reader_reset(r, "/no/such file", NULL), DCP_OK);
    assert_string_equal(dcp_torchfile_reader_path(r), "/no/such file");
    assert_int_equal(dcp_torchfile_reader_reset(r, NULL, NULL), DCP_OK);
    assert_null(dcp_torchfile_reader_path(r));
    dcp_torchfile_reader_close(r);
    dcp_torchfile_reader_close(NULL);
    assert_true(dcp_torchfile_validate_id(GOLDEN));
    assert_false(dcp_torchfile_validate_id(DCP_TEST_DIR));
    assert_false(dcp_torchfile_validate_id(GOLDEN ".absent"));
    assert_false(dcp_torchfile_validate_id(NULL));
}

static dcp_status load_alone(dcp_context *ctx, void *user, dcp_error *err)
{
    const model *m = user;
    load_job j = {.m = m};
    return load_part(&j, ctx, m->storage, NULL, 0, err);
}

/* R2.21, without a communicator; and each allocation fails once. */
static void torchfile__one_process_needs_no_group(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile alone");
    for (int i = 0; i < 3; i++) {
        model m = broken_model(&rnd);
        m.n_loading = 1;
        assert_true(failing_alloc_walk(load_alone, &m) > 10);
        free_model(&m);
    }
}

/* One rank of a group runs out of memory at any moment. */
typedef struct starving_job {
    load_job job;
    int rank;
    failing_alloc alloc;
    dcp_context *ctx;
} starving_job;

static dcp_status load_starving(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    starving_job *j = user;
    dcp_storage *none;
    if (dcp_storage_memory(NULL, &none, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    dcp_storage *storage = rank == j->job.coordinator ? j->job.m->storage : none;
    dcp_status status = load_part(&j->job, rank == j->rank ? j->ctx : NULL, storage, comm, rank, err);
    dcp_storage_free(none);
    return status;
}

static void torchfile__a_rank_without_memory_fails_all(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("torchfile memory");
    for (int starving = 0; starving < 2; starving++) {
        model m = broken_model(&rnd);
        m.n_loading = 2;
        size_t n = 1; /* the reader's own memory is taken before the load */
        for (bool is_hit = true; is_hit; n++) {
            rank_thread ranks[2];
            starving_job j = {.job = {.m = &m}, .rank = starving};
            j.ctx = failing_alloc_context(&j.alloc, 1);
            j.alloc.calls = 0;
            j.alloc.fail_at = n + 1;
            run_ranks(2, load_starving, &j, ranks);
            is_hit = j.alloc.failed > 0;
            assert_int_equal(j.alloc.live, 1);
            expect_all(ranks, 2, is_hit && ranks[starving].status != DCP_OK ? DCP_PEER : DCP_OK, (int)n);
            dcp_context_free(j.ctx);
        }
        assert_true(n > 10);
        free_model(&m);
    }
}

/* dcp_load's path replaces the reader's for the call; an open checkpoint cannot be loaded through it. */
static void torchfile__path_of_the_load(void **unused)
{
    (void)unused;
    float x[300 * 257] = {0};
    int64_t shape[] = {300, 257};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, x);
    dcp_value *state;
    dcp_torchfile_reader *r;
    dcp_checkpoint *ck;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "big", &t, NULL);
    assert_int_equal(dcp_torchfile_reader_open(NULL, "/nowhere", 0, &r, NULL), DCP_OK);
    opts.torchfile = r;
    opts.prefix = "model.";
    assert_int_equal(dcp_load(NULL, NULL, state, &opts, NULL, NULL), DCP_NOT_FOUND);
    assert_int_equal(dcp_load(NULL, GOLDEN, state, &opts, NULL, NULL), DCP_OK);
    assert_string_equal(dcp_torchfile_reader_path(r), "/nowhere");
    assert_int_equal(dcp_checkpoint_open(NULL, GOLDEN, NULL, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_load_from(ck, state, &opts, NULL, NULL), DCP_ARG);
    dcp_checkpoint_close(ck);
    dcp_torchfile_reader_close(r);
    dcp_value_free(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(torchfile__each_rank_gets_its_part),
        cmocka_unit_test(torchfile__only_what_is_wanted_is_read),
        cmocka_unit_test(torchfile__a_broken_file_is_told_to_all),
        cmocka_unit_test(torchfile__a_wrong_checksum_is_told_to_all),
        cmocka_unit_test(torchfile__a_failing_read_is_told_to_all),
        cmocka_unit_test(torchfile__nested_targets_match_a_nested_file),
        cmocka_unit_test(torchfile__what_does_not_fit_is_told_to_all),
        cmocka_unit_test(torchfile__ranks_agree_on_the_coordinator),
        cmocka_unit_test(torchfile__reader_keeps_what_it_is_given),
        cmocka_unit_test(torchfile__one_process_needs_no_group),
        cmocka_unit_test(torchfile__a_rank_without_memory_fails_all),
        cmocka_unit_test(torchfile__path_of_the_load),
    };
    return cmocka_run_group_tests_name("torchfile", tests, NULL, NULL);
}
