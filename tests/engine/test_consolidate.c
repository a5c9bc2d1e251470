/* Hugging Face directories of shards made whole: what is read, by whom, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/memory_store.h"
#include "support/peak_alloc.h"
#include "support/random.h"
#include "support/ranks.h"

/* ---- shards, as PyTorch's HuggingFaceStorageWriter names and describes them ---- */

typedef struct tensor {
    const char *name;
    int64_t rows, columns;
    int axis; /* that the shards split */
} tensor;

/* Element (r, c) of tensor number t, as two bytes. */
static uint16_t element(size_t t, int64_t r, int64_t c)
{
    return (uint16_t)((uint64_t)r * 40503u + (uint64_t)c * 2654435761u + t * 7919u);
}

static void shard_box(const tensor *t, int rank, int world, int64_t *row, int64_t *column, int64_t *rows, int64_t *columns)
{
    int64_t extent = t->axis ? t->columns : t->rows, each = (extent + world - 1) / world;
    int64_t first = rank * each < extent ? rank * each : extent, n = first + each < extent ? each : extent - first;
    *row = t->axis ? 0 : first;
    *column = t->axis ? first : 0;
    *rows = t->axis ? t->rows : n;
    *columns = t->axis ? n : t->columns;
}

static void write_shard(const char *dir, const tensor *tensors, size_t n, int rank, int world)
{
    char info[2048] = "", list[2048] = "", name[128];
    uint64_t end = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t row, column, rows, columns;
        shard_box(&tensors[i], rank, world, &row, &column, &rows, &columns);
        uint64_t bytes = (uint64_t)(rows * columns) * 2;
        snprintf(info + strlen(info), sizeof info - strlen(info), "%s\\\"%s\\\":{\\\"saved_offsets\\\":[%lld,%lld]}",
                 i ? "," : "", tensors[i].name, (long long)row, (long long)column);
        snprintf(list + strlen(list), sizeof list - strlen(list),
                 ",\"%s\":{\"dtype\":\"I16\",\"shape\":[%lld,%lld],\"data_offsets\":[%llu,%llu]}", tensors[i].name,
                 (long long)rows, (long long)columns, (unsigned long long)end, (unsigned long long)(end + bytes));
        end += bytes;
    }
    size_t room = strlen(info) + strlen(list) + 256;
    uint8_t *file = malloc(room + end);
    uint64_t h = (uint64_t)snprintf(
        (char *)file + 8, room - 8,
        "{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{%s}\"}%s}", info, list);
    memcpy(file, &h, 8);
    uint16_t *out = (uint16_t *)(file + 8 + h);
    for (size_t i = 0; i < n; i++) {
        int64_t row, column, rows, columns;
        shard_box(&tensors[i], rank, world, &row, &column, &rows, &columns);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t c = 0; c < columns; c++, out++) {
                uint16_t v = element(i, row + r, column + c);
                memcpy(out, &v, sizeof v);
            }
        }
    }
    snprintf(name, sizeof name, "%s/shard-%05d-model-00001-of-00001.safetensors", dir, rank + 1);
    dcp_file *f;
    assert_int_equal(storage->ops->open(storage, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE, &f, NULL), DCP_OK);
    assert_int_equal(storage->ops->write_at(f, file, 8 + h + end, 0, NULL), DCP_OK);
    storage->ops->close(f, NULL);
    free(file);
}

static void write_shards(const char *dir, const tensor *tensors, size_t n, int world)
{
    for (int r = 0; r < world; r++) {
        write_shard(dir, tensors, n, r, world);
    }
}

static void assert_whole(const char *path, const tensor *tensors, size_t n)
{
    dcp_checkpoint *ck = reopen(path);
    assert_int_equal(dcp_checkpoint_count(ck), n);
    for (size_t i = 0; i < n; i++) {
        const tensor *t = &tensors[i];
        const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(t->name));
        assert_true(item && item->n_chunks == 1 && item->ndim == 2 && item->extents[0] == t->rows &&
                    item->extents[1] == t->columns);
        uint16_t *elems = malloc((size_t)(t->rows * t->columns) * 2 + 1);
        dcp_tensor dst = dcp_tensor_make(DCP_INT16, 2, item->extents, elems);
        assert_int_equal(dcp_read(ck, item, NULL, &dst, NULL), DCP_OK);
        for (int64_t k = 0; k < t->rows * t->columns; k++) {
            if (elems[k] != element(i, k / t->columns, k % t->columns)) {
                fail_msg("%s: element %lld", t->name, (long long)k);
            }
        }
        free(elems);
    }
    dcp_checkpoint_close(ck);
}

static dcp_convert_opts options(void)
{
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    opts.to = DCP_TO_HF;
    opts.storage = opts.open.storage = storage;
    return opts;
}

/* ---- tests ---- */

/* Column shards are the hard case: rows of the whole come from all files. */
static void consolidate__reads_each_byte_once_and_in_large_requests(void **state)
{
    (void)state;
    static const tensor tensors[] = {{"wide", 1500, 8200, 1}, {"tall", 9000, 500, 0}};
    dcp_storage_counts counts = {0};
    dcp_storage *counting;
    dcp_convert_opts opts = options();
    dcp_convert_report report = DCP_CONVERT_REPORT_INIT;
    uint64_t payload = 2 * (1500 * 8200 + 9000 * 500);
    write_shards("columns", tensors, 2, 4);
    assert_int_equal(dcp_storage_count(NULL, storage, &counts, &counting, NULL), DCP_OK);
    opts.open.storage = counting;
    opts.no_check = true;
    assert_int_equal(dcp_convert(NULL, "columns", "columns.hf", &opts, &report, NULL), DCP_OK);
    assert_whole("columns.hf", tensors, 2);
    assert_true(counts.bytes_read >= payload && counts.bytes_read < payload + 64 * 1024);
    assert_true(counts.reads < 4 * (payload / (1 << 20)) + 64); /* a quarter of a MiB each and more, of four files */
    assert_int_equal(report.n_files, 1);
    dcp_storage_free(counting);
}

static void consolidate__memory_does_not_grow_with_the_tensors(void **state)
{
    (void)state;
    static const tensor large[] = {{"w", 2600, 12000, 1}};
    write_shards("large", large, 1, 3);
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        peak_alloc p = {0};
        dcp_allocator allocator = {peak_alloc_resize, &p};
        dcp_context_opts ctx_opts = DCP_CONTEXT_OPTS_INIT;
        dcp_convert_opts opts = options();
        dcp_context *ctx;
        char name[16];
        ctx_opts.allocator = &allocator;
        ctx_opts.threads = 2;
        assert_int_equal(dcp_context_create(&ctx_opts, &ctx, NULL), DCP_OK);
        snprintf(name, sizeof name, "large%d", to);
        opts.to = to;
        assert_int_equal(dcp_convert(ctx, "large", name, &opts, NULL, NULL), DCP_OK);
        assert_true(p.most < (size_t)40 << 20); /* of 60 MiB; two threads have a segment and a window each */
        dcp_context_free(ctx);
    }
}

static void consolidate__random_shards_become_whole(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("consolidate");
    for (int round = 0; round < 40; round++) {
        static const char *const names[] = {"a", "b", "c", "d"};
        tensor tensors[4];
        char from[16], to[16];
        size_t n = 1 + (size_t)test_random_below(&rnd, 4);
        int world = 1 + (int)test_random_below(&rnd, 6);
        for (size_t i = 0; i < n; i++) {
            tensors[i] = (tensor){names[i], 1 + test_random_below(&rnd, 30), 1 + test_random_below(&rnd, 30),
                                  (int)test_random_below(&rnd, 2)};
        }
        snprintf(from, sizeof from, "r%d", round);
        snprintf(to, sizeof to, "r%d.hf", round);
        write_shards(from, tensors, n, world);
        dcp_convert_opts opts = options();
        opts.max_file_bytes = test_random_below(&rnd, 2) ? 400 : 0;
        assert_int_equal(dcp_convert(NULL, from, to, &opts, NULL, NULL), DCP_OK);
        assert_whole(to, tensors, n);
    }
}

typedef struct group_run {
    const char *to;
    dcp_convert_report reports[8];
    bool fail_last;
    bool sees_lock[8];
} group_run;

static const tensor five[] = {{"a", 8, 6, 0}, {"b", 8, 6, 1}, {"c", 3, 9, 1}, {"d", 8, 6, 0}, {"e", 2, 2, 1}};

static dcp_status convert_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_run *g = user;
    dcp_convert_opts opts = options();
    opts.comm = comm;
    opts.max_file_bytes = 100;
    g->reports[rank] = (dcp_convert_report)DCP_CONVERT_REPORT_INIT;
    bool is_lost = g->fail_last && rank + 1 == dcp_comm_size(comm);
    dcp_stat st;
    dcp_status status = dcp_convert(NULL, is_lost ? "nowhere" : "group", g->to, &opts, &g->reports[rank], err);
    g->sees_lock[rank] = storage->ops->stat(storage, "group.hf/.libdcp-convert", &st, NULL) == DCP_OK;
    return status;
}

static void consolidate__files_are_dealt_over_the_ranks(void **state)
{
    (void)state;
    rank_thread out[3];
    group_run g = {.to = "group.hf"};
    dcp_stat st;
    write_shards("group", five, 5, 4);
    run_ranks(3, convert_rank, &g, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_OK);
        assert_true(g.reports[r].n_files >= 1); /* of five: 2, 2, 1 */
        assert_false(g.sees_lock[r]);           /* whoever is back may use the directory */
    }
    assert_int_equal(g.reports[0].n_files + g.reports[1].n_files + g.reports[2].n_files, 5);
    assert_int_equal(storage->ops->stat(storage, "group.hf/model.safetensors.index.json", &st, NULL), DCP_OK);
    assert_whole("group.hf", five, 5);
}

static void consolidate__a_rank_that_fails_fails_all(void **state)
{
    (void)state;
    rank_thread out[3];
    group_run g = {.to = "failed.hf", .fail_last = true};
    dcp_stat st;
    write_shards("group", five, 5, 4);
    run_ranks(3, convert_rank, &g, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_PEER);
        assert_non_null(strstr(out[r].err.message, "nowhere"));
    }
    assert_int_equal(storage->ops->stat(storage, "failed.hf/model.safetensors.index.json", &st, NULL), DCP_NOT_FOUND);
}

/* The middle columns are in no file. */
static void consolidate__shards_that_leave_a_gap_are_refused(void **state)
{
    (void)state;
    static const tensor before[] = {{"w", 4, 9, 1}}, after[] = {{"w", 4, 12, 1}};
    dcp_convert_opts opts = options();
    dcp_error err = DCP_ERROR_INIT;
    dcp_stat st;
    write_shard("gap", before, 1, 0, 3); /* columns 0 to 3 */
    write_shard("gap", after, 1, 1, 2);  /* 6 to 12 */
    assert_int_equal(dcp_convert(NULL, "gap", "gap.hf", &opts, NULL, &err), DCP_FORMAT);
    assert_non_null(strstr(err.message, "\"w\""));
    assert_int_equal(storage->ops->stat(storage, "gap.hf/model.safetensors", &st, NULL), DCP_NOT_FOUND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(consolidate__reads_each_byte_once_and_in_large_requests),
        cmocka_unit_test(consolidate__memory_does_not_grow_with_the_tensors),
        cmocka_unit_test(consolidate__random_shards_become_whole),
        cmocka_unit_test(consolidate__files_are_dealt_over_the_ranks),
        cmocka_unit_test(consolidate__a_rank_that_fails_fails_all),
        cmocka_unit_test(consolidate__shards_that_leave_a_gap_are_refused),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
