/* Merging what ranks have saved each for itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <glob.h>
#include <stdio.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"

#define RANKS 3
#define SAVE_ID "6f1d0c1e-0000-4000-8000-000000000001"

/* ---- a save without communication ---- */

static void set_tensor(dcp_value *state, const char *name, const float *data, int64_t n)
{
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, &n, (void *)data);
    assert_int_equal(dcp_dict_set_tensor(state, name, &t, NULL), DCP_OK);
}

/* 7 rows of 2: ranks have 3, 3 and 1 of them. Element i is i. */
static void set_rows(dcp_value *state, int rank, float *rows)
{
    int64_t whole[] = {7, 2}, offsets[] = {3 * rank, 0}, sizes[] = {rank < 2 ? 3 : 1, 2};
    for (int i = 0; i < 6; i++) {
        rows[i] = (float)(6 * rank + i);
    }
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, sizes, rows);
    dcp_box box = {offsets, sizes};
    dcp_value *v;
    assert_int_equal(dcp_sharded_create(NULL, DCP_FLOAT32, 2, whole, 1, &t, &box, &v, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(state, dcp_key_str("rows"), v, NULL), DCP_OK);
}

static void save_rank(dcp_storage *storage, int rank)
{
    static const float same[] = {1, 2, 3};
    float rows[6], different[] = {1, 2, (float)(rank == 2)}, longer[4] = {0};
    dcp_value *state;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.rank_local = true;
    opts.rank = rank;
    opts.world = RANKS;
    opts.save_id = SAVE_ID;
    dcp_dict_create(NULL, &state, NULL);
    set_rows(state, rank, rows);
    set_tensor(state, "same", same, 3);
    set_tensor(state, "different", different, 3);
    set_tensor(state, "lengths", longer, 1 + rank);
    dcp_dict_set_int(state, "step", 1000, NULL);
    dcp_dict_set_int(state, "seed", rank, NULL);
    if (rank == 0) {
        dcp_dict_set_int(state, "kinds", 1, NULL);
    } else {
        set_tensor(state, "kinds", same, 3);
    }
    if (rank == 1) {
        dcp_dict_set_string(state, "lonely", "rank 1", NULL);
    }
    assert_int_equal(dcp_save(NULL, "local", state, &opts, NULL, NULL), DCP_OK);
    dcp_value_free(state);
}

static dcp_storage *saved(void)
{
    dcp_storage *storage;
    assert_int_equal(dcp_storage_memory(NULL, &storage, NULL), DCP_OK);
    for (int r = 0; r < RANKS; r++) {
        save_rank(storage, r);
    }
    return storage;
}

static dcp_status merge(dcp_context *ctx, dcp_storage *storage, const char *from, dcp_error *err)
{
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    open.storage = save.storage = storage;
    save.overwrite = true;
    return dcp_merge(ctx, from, &open, "merged", &save, NULL, err);
}

static dcp_checkpoint *open_merged(dcp_storage *storage)
{
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    open.storage = storage;
    assert_int_equal(dcp_checkpoint_open(NULL, "merged", &open, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_checkpoint_get_info(ck, &info, NULL), DCP_OK);
    assert_int_equal(info.layout, DCP_LAYOUT_DCP);
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    return ck;
}

static const dcp_item *find(const dcp_checkpoint *ck, const char *name)
{
    return dcp_checkpoint_find(ck, dcp_str_of(name));
}

static void expect_floats(dcp_checkpoint *ck, const char *name, const float *expected, size_t n)
{
    float got[16];
    const dcp_item *item = find(ck, name);
    assert_non_null(item);
    assert_int_equal(item->bytes, n * sizeof *got);
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, item->ndim, item->extents, got);
    assert_int_equal(dcp_read(ck, item, NULL, &dst, NULL), DCP_OK);
    assert_memory_equal(got, expected, n * sizeof *got);
}

static void expect_int(dcp_checkpoint *ck, const char *name, int64_t expected)
{
    dcp_value *v;
    int64_t got;
    const dcp_item *item = find(ck, name);
    assert_non_null(item);
    assert_int_equal(dcp_read_object(ck, item, &v, NULL), DCP_OK);
    assert_true(dcp_value_int(v, &got) && got == expected);
    dcp_value_free(v);
}

/* ---- what becomes of what ---- */

static void merge__equal_values_become_one_and_others_keep_their_rank(void **unused)
{
    (void)unused;
    static const float same[] = {1, 2, 3}, zero[] = {1, 2, 0}, one[] = {1, 2, 1};
    float rows[14];
    dcp_storage *storage = saved();
    assert_int_equal(merge(NULL, storage, "local", NULL), DCP_OK);
    dcp_checkpoint *ck = open_merged(storage);
    for (int i = 0; i < 14; i++) {
        rows[i] = (float)i;
    }
    expect_floats(ck, "rows", rows, 14);
    assert_int_equal(find(ck, "rows")->n_chunks, 3);
    expect_floats(ck, "same", same, 3);
    expect_int(ck, "step", 1000);
    assert_null(find(ck, "rank.0.same"));
    assert_null(find(ck, "rank.0.step"));
    assert_null(find(ck, "different"));
    expect_floats(ck, "rank.0.different", zero, 3); /* also where only one rank differs */
    expect_floats(ck, "rank.1.different", zero, 3);
    expect_floats(ck, "rank.2.different", one, 3);
    for (int r = 0; r < RANKS; r++) {
        char name[24];
        snprintf(name, sizeof name, "rank.%d.seed", r);
        expect_int(ck, name, r);
        snprintf(name, sizeof name, "rank.%d.lengths", r);
        assert_int_equal(find(ck, name)->bytes, 4 * (size_t)(r + 1));
    }
    expect_int(ck, "rank.0.kinds", 1);
    expect_floats(ck, "rank.2.kinds", same, 3);
    assert_non_null(find(ck, "lonely"));
    assert_int_equal(dcp_checkpoint_count(ck), 4 + 4 * RANKS);
    dcp_checkpoint_close(ck);
    dcp_storage_free(storage);
}

static void merge__a_missing_rank_or_another_layout_is_refused(void **unused)
{
    (void)unused;
    dcp_stat st;
    dcp_storage *storage = saved();
    assert_int_equal(merge(NULL, storage, "local", NULL), DCP_OK);
    assert_int_equal(merge(NULL, storage, "merged", NULL), DCP_MISMATCH); /* it is whole already */
    assert_int_equal(storage->ops->remove(storage, "merged/.metadata", NULL), DCP_OK);
    assert_int_equal(storage->ops->remove(storage, "local/__1.metadata", NULL), DCP_OK);
    assert_int_equal(merge(NULL, storage, "local", NULL), DCP_NOT_FOUND);
    assert_int_equal(storage->ops->stat(storage, "merged/.metadata", &st, NULL), DCP_NOT_FOUND);
    dcp_storage_free(storage);
}

/* One rank's metadata alone are no checkpoint to be merged. */
static void merge__of_one_rank_is_refused(void **unused)
{
    (void)unused;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    dcp_storage *storage = saved();
    open.storage = save.storage = storage;
    open.rank = 1;
    assert_int_equal(dcp_merge(NULL, "local", &open, "merged", &save, NULL, NULL), DCP_MISMATCH);
    assert_int_equal(dcp_merge(NULL, NULL, &open, "merged", &save, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_merge(NULL, "local", &open, NULL, &save, NULL, NULL), DCP_ARG);
    dcp_storage_free(storage);
}

/* Each rank of these has another "mine", of two elements, and a part of the 10 x 7 "rows". */
static void merge__golden_checkpoints(void **unused)
{
    (void)unused;
    glob_t found;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/rank_local/ckpt", 0, NULL, &found), 0);
    assert_true(found.gl_pathc >= 2);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        dcp_save_opts save = DCP_SAVE_OPTS_INIT;
        dcp_checkpoint *from;
        assert_int_equal(dcp_storage_memory(NULL, &save.storage, NULL), DCP_OK);
        assert_int_equal(dcp_merge(NULL, found.gl_pathv[i], NULL, "merged", &save, NULL, NULL), DCP_OK);
        assert_int_equal(dcp_checkpoint_open(NULL, found.gl_pathv[i], NULL, &from, NULL), DCP_OK);
        dcp_checkpoint *ck = open_merged(save.storage);
        assert_int_equal(dcp_checkpoint_count(ck), 5);
        for (size_t k = 0; k < dcp_checkpoint_count(from); k++) {
            const dcp_item *item = dcp_checkpoint_item(from, k);
            uint8_t a[32], b[32];
            char name[64];
            if (item->rank < 0) {
                snprintf(name, sizeof name, "%s", item->fqn.ptr);
            } else {
                snprintf(name, sizeof name, "rank.%d.%s", item->rank, item->fqn.ptr);
            }
            assert_non_null(find(ck, name));
            assert_int_equal(dcp_item_sha256(from, item, a, NULL), DCP_OK);
            assert_int_equal(dcp_item_sha256(ck, find(ck, name), b, NULL), DCP_OK);
            assert_memory_equal(a, b, sizeof a);
        }
        dcp_checkpoint_close(ck);
        dcp_checkpoint_close(from);
        dcp_storage_free(save.storage);
    }
    globfree(&found);
}

/* ---- failures ---- */

static dcp_status merge_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    return merge(ctx, user, "local", err);
}

static void merge__out_of_memory_anywhere(void **unused)
{
    (void)unused;
    dcp_storage *storage = saved();
    size_t n = 0;
    while (failing_alloc_try(merge_for_walk, storage, n, false)) {
        failing_alloc_try(merge_for_walk, storage, n, true);
        n += 1 + n / 16; /* there are thousands, alike in long runs */
    }
    assert_true(n > 100);
    dcp_checkpoint_close(open_merged(storage));
    dcp_storage_free(storage);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge__equal_values_become_one_and_others_keep_their_rank),
        cmocka_unit_test(merge__a_missing_rank_or_another_layout_is_refused),
        cmocka_unit_test(merge__of_one_rank_is_refused),
        cmocka_unit_test(merge__golden_checkpoints),
        cmocka_unit_test(merge__out_of_memory_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
