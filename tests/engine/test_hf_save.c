/* Hugging Face directories written by ranks that are threads: what each writes, and that it reads as one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/memory_copy.h"
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
    rank_fn fn; /* what each rank does; NULL: save_rank */
    bool overlap;
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
    run_ranks(3, g->fn ? g->fn : save_rank, g, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_PEER);
        assert_non_null(strstr(out[r].err.message, word));
    }
}

static void save_ok(group_run *g)
{
    rank_thread out[3];
    run_ranks(3, g->fn ? g->fn : save_rank, g, out);
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

/* ---- ranks that have nothing ---- */

/* Rank 1 has nothing, 0 the first 4 rows of w and 2 the rest. */
static dcp_value *uneven_state(int rank, int64_t first, int64_t rows)
{
    int64_t shape[] = {ROWS, COLUMNS}, offsets[] = {first, 0}, sizes[] = {rows, COLUMNS};
    dcp_box box = {offsets, sizes};
    dcp_tensor part = dcp_tensor_make(DCP_FLOAT32, 2, sizes, whole + first * COLUMNS);
    dcp_value *root = NULL, *w = NULL;
    dcp_dict_create(NULL, &root, NULL);
    if (rank != 1) {
        dcp_sharded_create(NULL, DCP_FLOAT32, 2, shape, 1, &part, &box, &w, NULL);
        dcp_dict_set(root, dcp_key_str("w"), w, NULL);
    }
    return root;
}

/* Takes the state. */
static dcp_status save_mine(group_run *g, dcp_comm *comm, int rank, dcp_value *state, dcp_error *err)
{
    dcp_hf_save_opts opts = g->opts;
    opts.storage = storage;
    opts.comm = comm;
    g->reports[rank] = (dcp_hf_save_report)DCP_HF_SAVE_REPORT_INIT;
    dcp_status status = dcp_hf_save(NULL, g->path, state, &opts, &g->reports[rank], err);
    dcp_value_free(state);
    return status;
}

static dcp_status save_uneven(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_run *g = user;
    dcp_value *state = uneven_state(rank, rank == 2 ? 4 : 0, rank == 2 ? 3 : g->overlap ? 5 : 4);
    return save_mine(g, comm, rank, state, err);
}

static void assert_w(const char *path)
{
    dcp_checkpoint *ck = reopen(path);
    float found[ROWS * COLUMNS];
    int64_t shape[] = {ROWS, COLUMNS};
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, shape, found);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(found, whole, sizeof whole);
    dcp_checkpoint_close(ck);
}

/* R9.10. That one is missing is still told apart from one that there never was. */
static void hf_save__a_rank_without_items_writes_no_file(void **state)
{
    (void)state;
    group_run g = {.path = "uneven", .opts = DCP_HF_SAVE_OPTS_INIT, .fn = save_uneven};
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    save_ok(&g);
    assert_true(is_there("uneven/shard-00001-model-00001-of-00001.safetensors"));
    assert_false(is_there("uneven/shard-00002-model-00001-of-00001.safetensors"));
    assert_true(is_there("uneven/shard-00003-model-00001-of-00001.safetensors"));
    assert_int_equal(g.reports[1].n_files, 0);
    assert_w("uneven");
    opts.storage = storage;
    storage->ops->remove(storage, "uneven/shard-00001-model-00001-of-00001.safetensors", NULL);
    assert_int_equal(dcp_checkpoint_open(NULL, "uneven", &opts, &ck, &err), DCP_NOT_FOUND);
    assert_non_null(strstr(err.message, "shard 1 is missing"));
}

static void hf_save__chunks_that_overlap_are_refused(void **state)
{
    (void)state;
    group_run g = {.path = "overlap", .opts = DCP_HF_SAVE_OPTS_INIT, .fn = save_uneven, .overlap = true};
    save_fails(&g, "overlap");
    assert_false(is_there("overlap/shard-00001-model-00001-of-00001.safetensors"));
}

/* ---- mappings ---- */

#define PLACE(name, number)                                                                                                      \
    {                                                                                                                            \
        {name, sizeof name - 1}, number                                                                                          \
    }

static const dcp_hf_place places[] = {PLACE("w", 3), PLACE("plain", 1), PLACE("scalar", 1), PLACE("elsewhere", 4)};

static dcp_hf_save_opts mapped(const dcp_hf_place *list, size_t n)
{
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    opts.places = list;
    opts.n_places = n;
    return opts;
}

/* The highest number of the mapping counts, whether a tensor has it or not; second parts come behind all of the first ones. */
static void hf_save__shards_go_where_the_mapping_says(void **state)
{
    (void)state;
    group_run g = {.path = "mapped", .opts = mapped(places, 4)};
    g.opts.dedup_to_lowest = true;
    save_ok(&g);
    assert_true(is_there("mapped/shard-00001-model-00001-of-00008.safetensors")); /* plain and scalar */
    assert_true(is_there("mapped/shard-00001-model-00003-of-00008.safetensors"));
    assert_true(is_there("mapped/shard-00001-model-00007-of-00008.safetensors")); /* the second chunk of w */
    assert_true(is_there("mapped/shard-00003-model-00003-of-00008.safetensors"));
    assert_int_equal(g.reports[0].n_files, 3);
    assert_int_equal(g.reports[1].n_files, 0);
    assert_int_equal(g.reports[2].n_files, 1);
    assert_reads("mapped");
}

static void hf_save__mistakes_in_a_mapping_are_named(void **state)
{
    (void)state;
    static const dcp_hf_place zero[] = {PLACE("w", 1), PLACE("plain", 0)}, twice[] = {PLACE("w", 1), PLACE("w", 2)};
    group_run g = {.path = "mistakes", .opts = mapped(places, 2)};
    save_fails(&g, "\"scalar\"");
    g.opts = mapped(zero, 2);
    save_fails(&g, "\"plain\" is to go to file 0");
    g.opts = mapped(twice, 2);
    save_fails(&g, "\"w\" is to go to file 1 and to file 2");
    assert_false(is_there("mistakes"));
}

static dcp_status save_by_own_mapping(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    group_run *g = user;
    dcp_hf_save_opts opts = mapped(places, rank == 1 ? 3 : 4);
    dcp_value *state = state_of(rank, false);
    opts.storage = storage;
    opts.comm = comm;
    dcp_status status = dcp_hf_save(NULL, g->path, state, &opts, NULL, err);
    dcp_value_free(state);
    return status;
}

static void hf_save__ranks_with_other_mappings_are_told(void **state)
{
    (void)state;
    group_run g = {.path = "other", .fn = save_by_own_mapping};
    save_fails(&g, "different mappings");
}

/* ---- whole tensors ---- */

static const char *const letters[] = {"a", "b", "c", "d"};

/* Four tensors, a to d, the same on all ranks; rank 1 has a fifth. */
static dcp_value *letters_state(int rank)
{
    dcp_value *root = NULL;
    int64_t four[] = {4};
    dcp_dict_create(NULL, &root, NULL);
    for (int i = 0; i < 4; i++) {
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, four, whole + 4 * (ptrdiff_t)i);
        dcp_dict_set_tensor(root, letters[i], &t, NULL);
    }
    if (rank == 1) {
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, four, plain);
        dcp_dict_set_tensor(root, "own", &t, NULL);
    }
    return root;
}

static dcp_status save_letters(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    return save_mine(user, comm, rank, letters_state(rank), err);
}

static void assert_letters(const char *path)
{
    dcp_checkpoint *ck = reopen(path);
    float found[4];
    int64_t four[] = {4};
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 1, four, found);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of(letters[i])), NULL, &dst, NULL), DCP_OK);
        assert_memory_equal(found, whole + 4 * (ptrdiff_t)i, sizeof found);
    }
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("own")), NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(found, plain, sizeof plain);
    dcp_checkpoint_close(ck);
}

static void assert_text(const char *name, const char *expected)
{
    file_bytes found = get_file(storage, name);
    assert_int_equal(found.n, strlen(expected));
    assert_memory_equal(found.data, expected, found.n);
    free(found.data);
}

static void hf_save__whole_tensors_have_an_index(void **state)
{
    (void)state;
    static const dcp_hf_place list[] = {PLACE("a", 2), PLACE("b", 1), PLACE("c", 2), PLACE("d", 1), PLACE("own", 3)};
    group_run g = {.path = "whole", .opts = mapped(list, 5), .fn = save_letters};
    g.opts.whole = g.opts.dedup_to_lowest = true;
    save_ok(&g);
    assert_text("whole/model.safetensors.index.json", "{\n"
                                                      "  \"metadata\": {\n"
                                                      "    \"total_size\": 80\n"
                                                      "  },\n"
                                                      "  \"weight_map\": {\n"
                                                      "    \"b\": \"model-00001-of-00003.safetensors\",\n"
                                                      "    \"d\": \"model-00001-of-00003.safetensors\",\n"
                                                      "    \"a\": \"model-00002-of-00003.safetensors\",\n"
                                                      "    \"c\": \"model-00002-of-00003.safetensors\",\n"
                                                      "    \"own\": \"model-00003-of-00003.safetensors\"\n"
                                                      "  }\n"
                                                      "}");
    assert_int_equal(g.reports[2].n_files, 0);
    assert_letters("whole");
}

static void hf_save__ranks_with_whole_tensors_make_a_file_each(void **state)
{
    (void)state;
    group_run g = {.path = "each", .opts = DCP_HF_SAVE_OPTS_INIT, .fn = save_letters};
    g.opts.whole = g.opts.dedup_to_lowest = true;
    save_ok(&g);
    assert_true(is_there("each/model-00001-of-00002.safetensors"));
    assert_true(is_there("each/model-00002-of-00002.safetensors"));
    assert_letters("each");
}

static void hf_save__a_file_of_two_ranks_is_refused(void **state)
{
    (void)state;
    static const dcp_hf_place list[] = {PLACE("a", 1), PLACE("b", 1), PLACE("c", 1), PLACE("d", 1), PLACE("own", 1)};
    group_run g = {.path = "shared", .opts = mapped(list, 5), .fn = save_letters};
    g.opts.whole = g.opts.dedup_to_lowest = true;
    save_fails(&g, "ranks 0 and 1 both have tensors of model-00001-of-00001.safetensors");
    assert_false(is_there("shared/model-00001-of-00001.safetensors"));
}

static void hf_save__parts_are_no_whole_tensors(void **state)
{
    (void)state;
    group_run g = {.path = "cut", .opts = DCP_HF_SAVE_OPTS_INIT};
    g.opts.whole = true;
    save_fails(&g, "\"w\": this rank has [1, 3] of [7, 3]");
}

/* Either form replaces the other; what a save that was killed has left is the matter of test_hf_crash.c. */
static void hf_save__the_other_form_is_replaced(void **state)
{
    (void)state;
    group_run shards = {.path = "turn", .opts = DCP_HF_SAVE_OPTS_INIT}, g = shards;
    save_ok(&shards);
    g.fn = save_letters;
    g.opts.whole = g.opts.dedup_to_lowest = true;
    save_fails(&g, "is there");
    g.opts.overwrite = shards.opts.overwrite = true;
    save_ok(&g);
    assert_letters("turn");
    assert_false(is_there("turn/shard-00001-model-00001-of-00002.safetensors"));
    save_ok(&shards);
    assert_reads("turn");
    assert_false(is_there("turn/model.safetensors.index.json"));
    set_file(storage, "turn/adapter.safetensors", "x", 1);
    save_fails(&shards, "adapter.safetensors is there");
}

/* ---- one file ---- */

static dcp_save_plan *plan_of(dcp_value *state)
{
    dcp_save_plan *plan = NULL;
    assert_int_equal(dcp_plan_save(NULL, state, &plan, NULL), DCP_OK);
    return plan;
}

/* Wide elements come first, and the file is that of a save by one rank. */
static void hf_write_file__makes_one_file_of_a_plan(void **state)
{
    (void)state;
    dcp_value *root = letters_state(0);
    uint8_t bytes[3] = {7, 8, 9};
    int64_t three[] = {3};
    dcp_tensor t = dcp_tensor_make(DCP_UINT8, 1, three, bytes);
    dcp_dict_set_tensor(root, "B", &t, NULL);
    dcp_tensor x = dcp_tensor_make(DCP_FLOAT32, 1, (int64_t[]){1}, &scalar);
    dcp_dict_set_tensor(root, "x", &x, NULL);
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.whole = true;
    assert_int_equal(dcp_hf_save(NULL, "single", root, &opts, NULL, NULL), DCP_OK);
    dcp_save_plan *plan = plan_of(root);
    dcp_save_opts one = DCP_SAVE_OPTS_INIT;
    dcp_written out[6];
    one.storage = storage;
    assert_int_equal(dcp_hf_write_file(NULL, "single", "again", plan, &one, out, NULL), DCP_OK);
    file_bytes a = get_file(storage, "single/model-00001-of-00001.safetensors"), b = get_file(storage, "single/again");
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.data, b.data, a.n);
    assert_memory_equal(b.data + out[4].offset, bytes, out[4].length); /* B, behind x, which comes after it in the state */
    assert_int_equal(out[4].offset + 3, b.n);
    assert_memory_equal(b.data + out[5].offset, &scalar, 4);
    assert_int_equal(out[5].offset + 4, out[4].offset);
    free(a.data);
    free(b.data);
    dcp_save_plan_free(plan);
    dcp_value_free(root);
}

static dcp_status fail_at_100(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)user;
    (void)n;
    return op == DCP_OP_WRITE && offset > 100 ? dcp_error_set(err, DCP_NOSPACE, "%s: full", name) : DCP_OK;
}

static void hf_write_file__leaves_nothing_after_an_error(void **state)
{
    (void)state;
    dcp_value *root = letters_state(0);
    dcp_save_plan *plan = plan_of(root);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_written out[4];
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_storage_fault(NULL, storage, fail_at_100, NULL, &opts.storage, NULL), DCP_OK);
    assert_int_equal(dcp_hf_write_file(NULL, "", "full", plan, &opts, out, &err), DCP_NOSPACE);
    assert_non_null(strstr(err.message, "item \"a\""));
    assert_false(is_there("full"));
    dcp_storage_free(opts.storage);
    opts.storage = storage;
    dcp_dict_set_int(root, "step", 1, NULL);
    dcp_save_plan_free(plan);
    plan = plan_of(root);
    assert_int_equal(dcp_hf_write_file(NULL, "", "full", plan, &opts, out, NULL), DCP_UNSUPPORTED);
    dcp_save_plan_free(plan);
    dcp_value_free(root);
}

typedef struct walk {
    dcp_value *parts, *whole;
} walk;

static dcp_status save_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    const walk *w = user;
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    opts.places = places;
    opts.n_places = 4;
    dcp_status status = dcp_hf_save(ctx, "walk", w->parts, &opts, NULL, err);
    opts.places = NULL;
    opts.whole = true;
    return status == DCP_OK ? dcp_hf_save(ctx, "walk", w->whole, &opts, NULL, err) : status;
}

static void hf_save__every_failed_allocation_is_survived(void **state)
{
    (void)state;
    walk w = {state_of(0, false), letters_state(1)};
    assert_true(failing_alloc_walk(save_for_walk, &w) > 0);
    dcp_value_free(w.parts);
    dcp_value_free(w.whole);
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
        cmocka_unit_test(hf_save__a_rank_without_items_writes_no_file),
        cmocka_unit_test(hf_save__chunks_that_overlap_are_refused),
        cmocka_unit_test(hf_save__shards_go_where_the_mapping_says),
        cmocka_unit_test(hf_save__mistakes_in_a_mapping_are_named),
        cmocka_unit_test(hf_save__ranks_with_other_mappings_are_told),
        cmocka_unit_test(hf_save__whole_tensors_have_an_index),
        cmocka_unit_test(hf_save__ranks_with_whole_tensors_make_a_file_each),
        cmocka_unit_test(hf_save__a_file_of_two_ranks_is_refused),
        cmocka_unit_test(hf_save__parts_are_no_whole_tensors),
        cmocka_unit_test(hf_save__the_other_form_is_replaced),
        cmocka_unit_test(hf_write_file__makes_one_file_of_a_plan),
        cmocka_unit_test(hf_write_file__leaves_nothing_after_an_error),
        cmocka_unit_test(hf_save__every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
