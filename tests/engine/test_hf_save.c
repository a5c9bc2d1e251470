/* Hugging Face shards written by ranks that are threads: what each writes, and that it reads as one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/memory_store.h"
#include "support/ranks.h"

#define ROWS 7
#define COLUMNS 3

static float whole[ROWS * COLUMNS], plain[4] = {1, 2, 3, 4}, scalar = 5;

static void fill(void)
{
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        whole[i] = (float)i;
    }
}

/* Rows of w: rank 0 has the first two as two chunks, rank 1 nothing, rank 2 the rest. All have plain and scalar. */
static dcp_value *state_of(int rank, bool with_object)
{
    static const int first[] = {0, 2, 2}, last[] = {2, 2, ROWS};
    int64_t shape[] = {ROWS, COLUMNS}, offsets[2][2], sizes[2][2], four[] = {4};
    dcp_tensor chunks[2];
    dcp_box boxes[2];
    size_t n = rank == 0 ? 2 : rank == 2;
    for (size_t i = 0; i < n; i++) {
        int from = first[rank] + (int)i, to = rank == 0 ? from + 1 : last[rank];
        memcpy(offsets[i], (int64_t[]){from, 0}, sizeof offsets[i]);
        memcpy(sizes[i], (int64_t[]){to - from, COLUMNS}, sizeof sizes[i]);
        boxes[i] = (dcp_box){offsets[i], sizes[i]};
        chunks[i] = dcp_tensor_make(DCP_FLOAT32, 2, sizes[i], whole + (ptrdiff_t)from * COLUMNS);
    }
    dcp_tensor p = dcp_tensor_make(DCP_FLOAT32, 1, four, plain), s = dcp_tensor_make(DCP_FLOAT32, 0, NULL, &scalar);
    dcp_value *root = NULL, *w = NULL;
    dcp_dict_create(NULL, &root, NULL);
    dcp_sharded_create(NULL, DCP_FLOAT32, 2, shape, n, chunks, boxes, &w, NULL);
    dcp_dict_set(root, dcp_key_str("w"), w, NULL);
    dcp_dict_set_tensor(root, "plain", &p, NULL);
    dcp_dict_set_tensor(root, "scalar", &s, NULL);
    if (with_object) {
        dcp_dict_set_int(root, "step", 1, NULL);
    }
    return root;
}

typedef struct group_run {
    const char *path;
    dcp_hf_save_opts opts;
    bool with_object;
    dcp_hf_save_report reports[3];
} group_run;

static dcp_status save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_run *g = user;
    dcp_hf_save_opts opts = g->opts;
    dcp_value *state = state_of(rank, g->with_object && rank == 1);
    opts.storage = storage;
    opts.comm = comm;
    g->reports[rank] = (dcp_hf_save_report)DCP_HF_SAVE_REPORT_INIT;
    dcp_status status = dcp_hf_save(NULL, g->path, state, &opts, &g->reports[rank], err);
    dcp_value_free(state);
    return status;
}

static void save_fails(group_run *g, const char *word)
{
    rank_thread out[3];
    run_ranks(3, save_rank, g, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_PEER);
        assert_non_null(strstr(out[r].err.message, word));
    }
}

static void save_ok(group_run *g)
{
    rank_thread out[3];
    run_ranks(3, save_rank, g, out);
    for (int r = 0; r < 3; r++) {
        if (out[r].status != DCP_OK) {
            fail_msg("rank %d: %s", r, out[r].err.message);
        }
    }
}

static bool is_there(const char *name)
{
    dcp_stat st;
    return storage->ops->stat(storage, name, &st, NULL) == DCP_OK;
}

static void assert_reads(const char *path)
{
    dcp_checkpoint *ck = reopen(path);
    float found[ROWS * COLUMNS];
    int64_t shape[] = {ROWS, COLUMNS}, four[] = {4};
    assert_int_equal(dcp_checkpoint_count(ck), 3);
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, shape, found);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(found, whole, sizeof whole);
    dst = dcp_tensor_make(DCP_FLOAT32, 1, four, found);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("plain")), NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(found, plain, sizeof plain);
    dst = dcp_tensor_make(DCP_FLOAT32, 0, NULL, found);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("scalar")), NULL, &dst, NULL), DCP_OK);
    assert_true(found[0] == 5);
    dcp_checkpoint_close(ck);
}

static void hf_save__each_rank_writes_its_own(void **state)
{
    (void)state;
    group_run g = {.path = "shards", .opts = DCP_HF_SAVE_OPTS_INIT};
    save_ok(&g);
    assert_true(is_there("shards/shard-00001-model-00001-of-00002.safetensors"));
    assert_true(is_there("shards/shard-00001-model-00002-of-00002.safetensors")); /* the second chunk of w */
    assert_true(is_there("shards/shard-00002-model-00001-of-00002.safetensors"));
    assert_true(is_there("shards/shard-00003-model-00001-of-00002.safetensors"));
    assert_false(is_there("shards/model.safetensors.index.json"));
    size_t tensors = g.reports[0].n_tensors + g.reports[1].n_tensors + g.reports[2].n_tensors;
    assert_int_equal(tensors, 3 + 2); /* three chunks, and plain and scalar once each */
    assert_int_equal(g.reports[0].n_files + g.reports[1].n_files + g.reports[2].n_files, 4);
    assert_reads("shards");
}

/* PyTorch's shards leave the size to be guessed; ours state it, so that a lost one is noticed. */
static void hf_save__a_lost_file_is_noticed(void **state)
{
    (void)state;
    group_run g = {.path = "lost", .opts = DCP_HF_SAVE_OPTS_INIT};
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    save_ok(&g);
    opts.storage = storage;
    assert_int_equal(storage->ops->remove(storage, "lost/shard-00003-model-00001-of-00002.safetensors", NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_open(NULL, "lost", &opts, &ck, NULL), DCP_NOT_FOUND);
}

static void hf_save__is_made_whole_by_a_conversion(void **state)
{
    (void)state;
    group_run g = {.path = "parts", .opts = DCP_HF_SAVE_OPTS_INIT};
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    save_ok(&g);
    opts.to = DCP_TO_HF;
    opts.storage = opts.open.storage = storage;
    assert_int_equal(dcp_convert(NULL, "parts", "parts.whole", &opts, NULL, NULL), DCP_OK);
    assert_reads("parts.whole");
}

static void hf_save__replaces_nothing_unasked(void **state)
{
    (void)state;
    group_run g = {.path = "again", .opts = DCP_HF_SAVE_OPTS_INIT};
    dcp_value *alone = state_of(2, false);
    save_ok(&g);
    save_fails(&g, "is there");
    g.opts.overwrite = true;
    save_ok(&g);
    assert_reads("again");
    /* one rank over three: nothing of theirs is left. It has no whole w, which a lone rank may save all the same. */
    g.opts.storage = storage;
    assert_int_equal(dcp_hf_save(NULL, "again", alone, &g.opts, NULL, NULL), DCP_OK);
    assert_true(is_there("again/shard-00001-model-00001-of-00001.safetensors"));
    assert_false(is_there("again/shard-00003-model-00001-of-00002.safetensors"));
    assert_false(is_there("again/shard-00001-model-00002-of-00002.safetensors"));
    dcp_value_free(alone);
}

static void hf_save__objects_are_refused_by_name(void **state)
{
    (void)state;
    group_run g = {.path = "objects", .opts = DCP_HF_SAVE_OPTS_INIT, .with_object = true};
    save_fails(&g, "\"step\"");
    assert_false(is_there("objects/shard-00001-model-00001-of-00002.safetensors"));
    g.opts.drop_objects = true;
    save_ok(&g);
    assert_reads("objects");
}

static dcp_status fail_writes(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)user;
    (void)n;
    (void)offset;
    bool is_hit = op == DCP_OP_WRITE && strstr(name, "shard-00003");
    return is_hit ? dcp_error_set(err, DCP_IO, "%s: made to fail", name) : DCP_OK;
}

static void hf_save__a_rank_that_fails_leaves_nothing_of_any(void **state)
{
    (void)state;
    group_run g = {.path = "failed", .opts = DCP_HF_SAVE_OPTS_INIT};
    dcp_storage *real = storage, *faulty;
    assert_int_equal(dcp_storage_fault(NULL, real, fail_writes, NULL, &faulty, NULL), DCP_OK);
    storage = faulty;
    save_fails(&g, "made to fail");
    storage = real;
    dcp_storage_free(faulty);
    for (int r = 1; r <= 3; r++) {
        char name[96];
        snprintf(name, sizeof name, "failed/shard-%05d-model-00001-of-00002.safetensors", r);
        assert_false(is_there(name));
        snprintf(name, sizeof name, "failed/shard-%05d-model-00001-of-00002.safetensors.libdcp-part", r);
        assert_false(is_there(name));
    }
}

static dcp_status save_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    return dcp_hf_save(ctx, "walk", user, &opts, NULL, err);
}

static void hf_save__every_failed_allocation_is_survived(void **state)
{
    (void)state;
    dcp_value *root = state_of(0, false);
    assert_true(failing_alloc_walk(save_for_walk, root) > 0);
    dcp_value_free(root);
}

int main(void)
{
    fill();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hf_save__each_rank_writes_its_own),
        cmocka_unit_test(hf_save__a_lost_file_is_noticed),
        cmocka_unit_test(hf_save__is_made_whole_by_a_conversion),
        cmocka_unit_test(hf_save__replaces_nothing_unasked),
        cmocka_unit_test(hf_save__objects_are_refused_by_name),
        cmocka_unit_test(hf_save__a_rank_that_fails_leaves_nothing_of_any),
        cmocka_unit_test(hf_save__every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
