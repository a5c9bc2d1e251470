/* Saves whose ranks plan and communicate by other means. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"

#define N_RANKS 2
#define ROWS 4 /* of each rank */
#define COLUMNS 3

typedef struct world {
    dcp_storage *st;
    float data[N_RANKS][ROWS * COLUMNS];
} world;

static world new_world(void)
{
    world w;
    assert_int_equal(dcp_storage_memory(NULL, &w.st, NULL), DCP_OK);
    for (int r = 0; r < N_RANKS; r++) {
        for (int i = 0; i < ROWS * COLUMNS; i++) {
            w.data[r][i] = (float)(r * ROWS * COLUMNS + i);
        }
    }
    return w;
}

static const int64_t global_extents[] = {N_RANKS * ROWS, COLUMNS}, chunk_sizes[] = {ROWS, COLUMNS};
static const int64_t offsets_of[N_RANKS][2] = {{0, 0}, {ROWS, 0}};

/* One rank's planner: its chunk of "w", and on rank 0 the object "step". */
static dcp_save_plan *plan_of(world *w, int rank, dcp_value *empty, dcp_value *step)
{
    dcp_save_plan *plan;
    dcp_key path = dcp_key_str("w"), step_path = dcp_key_str("step");
    assert_int_equal(dcp_plan_save(NULL, empty, &plan, NULL), DCP_OK);
    dcp_write_item item = {.fqn = dcp_str_of("w"),
                           .path = &path,
                           .path_len = 1,
                           .kind = DCP_ITEM_TENSOR,
                           .dtype = DCP_FLOAT32,
                           .ndim = 2,
                           .global_extents = global_extents,
                           .box = {offsets_of[rank], chunk_sizes},
                           .tensor = dcp_tensor_make(DCP_FLOAT32, 2, chunk_sizes, w->data[rank])};
    assert_int_equal(dcp_save_plan_add(plan, &item, NULL), DCP_OK);
    if (rank == 0) {
        dcp_write_item object = {
            .fqn = dcp_str_of("step"), .path = &step_path, .path_len = 1, .kind = DCP_ITEM_OBJECT, .object = step};
        assert_int_equal(dcp_save_plan_add(plan, &object, NULL), DCP_OK);
    }
    return plan;
}

static dcp_save_opts opts_in(const world *w)
{
    dcp_save_opts o = DCP_SAVE_OPTS_INIT;
    o.storage = w->st;
    return o;
}

static dcp_status write_rank(world *w, int rank, const char *generation, int64_t step, const char *transform, dcp_written out[2])
{
    char prefix[64];
    dcp_value *empty, *value;
    dcp_save_opts opts = opts_in(w);
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_dict_create(NULL, &empty, NULL);
    dcp_int_create(NULL, step, &value, NULL);
    snprintf(prefix, sizeof prefix, generation[0] ? "__%d_%s_" : "__%d_", rank, generation);
    opts.transform = transform;
    dcp_save_plan *plan = plan_of(w, rank, empty, value);
    dcp_status status = dcp_write_files(NULL, "", prefix, plan, &opts, out, &report, NULL);
    dcp_save_plan_free(plan);
    dcp_value_free(empty);
    dcp_value_free(value);
    if (status == DCP_OK) {
        assert_int_equal(report.n_items, rank == 0 ? 2 : 1);
    }
    return status;
}

static void describe(dcp_save_session *s, dcp_written written[N_RANKS][2], const char *transform, dcp_status expected)
{
    char files[N_RANKS][64];
    dcp_chunk_info chunks[N_RANKS], object;
    dcp_key w_path = dcp_key_str("w"), step_path = dcp_key_str("step");
    const char *generation = dcp_save_generation(s);
    for (int r = 0; r < N_RANKS; r++) {
        snprintf(files[r], sizeof files[r], generation[0] ? "__%d_%s_%u.distcp" : "__%d_%s%u.distcp", r, generation,
                 written[r][0].file);
        chunks[r] =
            (dcp_chunk_info){{offsets_of[r], chunk_sizes}, files[r], written[r][0].offset, written[r][0].length, transform};
    }
    object = (dcp_chunk_info){{NULL, NULL}, files[0], written[0][1].offset, written[0][1].length, transform};
    dcp_described rows[] = {
        {{.fqn = dcp_str_of("w"),
          .kind = DCP_ITEM_TENSOR,
          .dtype = DCP_FLOAT32,
          .ndim = 2,
          .extents = global_extents,
          .n_chunks = N_RANKS,
          .path = &w_path,
          .path_len = 1},
         chunks},
        {{.fqn = dcp_str_of("step"), .kind = DCP_ITEM_OBJECT, .n_chunks = 1, .path = &step_path, .path_len = 1}, &object}};
    assert_int_equal(dcp_save_describe(s, rows, 2, NULL), expected);
}

static dcp_save_session *claim(const world *w, bool overwrite)
{
    dcp_save_session *s;
    dcp_save_opts opts = opts_in(w);
    opts.world = N_RANKS;
    opts.overwrite = overwrite;
    assert_int_equal(dcp_save_begin(NULL, "", &opts, &s, NULL), DCP_OK);
    return s;
}

static void save(world *w, int64_t step, bool overwrite, const char *transform)
{
    dcp_written written[N_RANKS][2];
    dcp_save_session *s = claim(w, overwrite);
    for (int r = 0; r < N_RANKS; r++) {
        assert_int_equal(write_rank(w, r, dcp_save_generation(s), step, transform, written[r]), DCP_OK);
    }
    describe(s, written, transform, DCP_OK);
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    assert_int_equal(dcp_save_commit(s, &report, NULL), DCP_OK);
    assert_int_equal(report.world, N_RANKS);
}

static void check(const world *w, int64_t step)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    float whole[N_RANKS * ROWS * COLUMNS];
    dcp_value *value;
    int64_t got = 0;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, global_extents, whole);
    opts.storage = w->st;
    opts.check_crc = true;
    assert_int_equal(dcp_checkpoint_open(NULL, "", &opts, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), NULL, &dst, NULL), DCP_OK);
    for (int i = 0; i < N_RANKS * ROWS * COLUMNS; i++) {
        assert_true(whole[i] == (float)i);
    }
    assert_int_equal(dcp_read_object(ck, dcp_checkpoint_find(ck, dcp_str_of("step")), &value, NULL), DCP_OK);
    assert_true(dcp_value_int(value, &got));
    assert_int_equal(got, step);
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    dcp_value_free(value);
    dcp_checkpoint_close(ck);
}

static dcp_status count(void *user, const char *name, dcp_entry_type type)
{
    (void)name;
    (void)type;
    ++*(int *)user;
    return DCP_OK;
}

static int n_files(const world *w)
{
    int n = 0;
    assert_int_equal(w->st->ops->list(w->st, "", count, &n, NULL), DCP_OK);
    return n;
}

static void foreign__ranks_write_and_the_coordinator_publishes(void **unused)
{
    (void)unused;
    const char *const transforms[] = {"", "stream.zstd/1"};
    for (int i = 0; i < 2; i++) {
        world w = new_world();
        save(&w, 3, false, transforms[i]);
        check(&w, 3);
        assert_int_equal(n_files(&w), N_RANKS + 1);
        save(&w, 4, true, transforms[i]);
        check(&w, 4);
        assert_int_equal(n_files(&w), N_RANKS + 1); /* nothing of the old one is left */
        dcp_storage_free(w.st);
    }
}

static void foreign__a_checkpoint_in_the_way_is_refused(void **unused)
{
    (void)unused;
    world w = new_world();
    dcp_save_session *s;
    dcp_save_opts opts = opts_in(&w);
    save(&w, 3, false, "");
    opts.world = N_RANKS;
    assert_int_equal(dcp_save_begin(NULL, "", &opts, &s, NULL), DCP_EXISTS);
    check(&w, 3);
    dcp_storage_free(w.st);
}

static void foreign__giving_up_removes_what_all_ranks_wrote(void **unused)
{
    (void)unused;
    for (int is_first = 0; is_first < 2; is_first++) {
        world w = new_world();
        dcp_written written[2];
        if (!is_first) {
            save(&w, 3, false, "");
        }
        int before = n_files(&w);
        dcp_save_session *s = claim(&w, true);
        assert_int_equal(write_rank(&w, 1, dcp_save_generation(s), 9, "", written), DCP_OK);
        assert_int_equal(n_files(&w), before + 2); /* the intent */
        dcp_save_abort(s);
        assert_int_equal(n_files(&w), before);
        if (!is_first) {
            check(&w, 3);
        }
        dcp_storage_free(w.st);
    }
}

static void foreign__files_in_the_way_are_not_touched(void **unused)
{
    (void)unused;
    world w = new_world();
    dcp_written written[2];
    assert_int_equal(write_rank(&w, 1, "", 9, "", written), DCP_OK);
    assert_int_equal(write_rank(&w, 1, "", 9, "", written), DCP_EXISTS);
    assert_int_equal(n_files(&w), 1);
    dcp_storage_free(w.st);
}

static void foreign__order_of_calls(void **unused)
{
    (void)unused;
    world w = new_world();
    dcp_written written[N_RANKS][2];
    dcp_value *empty;
    dcp_save_plan *plan;
    dcp_save_session *s = claim(&w, false);
    dcp_dict_create(NULL, &empty, NULL);
    assert_int_equal(dcp_plan_save(NULL, empty, &plan, NULL), DCP_OK);
    assert_int_equal(dcp_save_write(s, plan, NULL), DCP_STATE); /* its ranks plan by other means */
    dcp_save_abort(s);
    s = claim(&w, false);
    assert_int_equal(dcp_save_commit(s, NULL, NULL), DCP_STATE); /* nothing was described */
    dcp_save_opts opts = opts_in(&w);
    assert_int_equal(dcp_save_begin(NULL, "", &opts, &s, NULL), DCP_OK);
    assert_int_equal(dcp_save_describe(s, NULL, 0, NULL), DCP_STATE); /* not such a session */
    dcp_save_abort(s);
    s = claim(&w, false);
    for (int r = 0; r < N_RANKS; r++) {
        assert_int_equal(write_rank(&w, r, dcp_save_generation(s), 3, "", written[r]), DCP_OK);
    }
    describe(s, written, "", DCP_OK);
    describe(s, written, "", DCP_STATE); /* once */
    assert_int_equal(dcp_save_commit(s, NULL, NULL), DCP_OK);
    check(&w, 3);
    dcp_save_plan_free(plan);
    dcp_value_free(empty);
    dcp_storage_free(w.st);
}

static void foreign__wrong_rows_are_refused(void **unused)
{
    (void)unused;
    world w = new_world();
    const int64_t beyond[] = {ROWS + 1, 0};
    dcp_chunk_info chunk = {{beyond, chunk_sizes}, "__0_0.distcp", 0, 10, ""};
    dcp_described row = {{.fqn = dcp_str_of("w"),
                          .kind = DCP_ITEM_TENSOR,
                          .dtype = DCP_FLOAT32,
                          .ndim = 2,
                          .extents = global_extents,
                          .n_chunks = 1},
                         &chunk};
    dcp_save_session *s = claim(&w, false);
    assert_int_equal(dcp_save_describe(s, &row, 1, NULL), DCP_ARG);
    chunk.box.offsets = offsets_of[0];
    chunk.file = NULL;
    assert_int_equal(dcp_save_describe(s, &row, 1, NULL), DCP_ARG);
    chunk.file = "__0_0.distcp";
    row.item.dtype = DCP_DTYPE_NONE;
    assert_int_equal(dcp_save_describe(s, &row, 1, NULL), DCP_ARG);
    row.item.dtype = DCP_FLOAT32;
    dcp_described twice[] = {row, row};
    assert_int_equal(dcp_save_describe(s, twice, 2, NULL), DCP_ARG);
    dcp_save_abort(s);
    dcp_written written[2];
    dcp_value *empty;
    dcp_save_plan *plan;
    dcp_save_opts opts = opts_in(&w);
    dcp_dict_create(NULL, &empty, NULL);
    assert_int_equal(dcp_plan_save(NULL, empty, &plan, NULL), DCP_OK);
    const char *const prefixes[] = {"", "../x", ".hidden"};
    for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        assert_int_equal(dcp_write_files(NULL, "", prefixes[i], plan, &opts, written, NULL, NULL), DCP_ARG);
    }
    dcp_save_plan_free(plan);
    dcp_value_free(empty);
    dcp_storage_free(w.st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(foreign__ranks_write_and_the_coordinator_publishes),
        cmocka_unit_test(foreign__a_checkpoint_in_the_way_is_refused),
        cmocka_unit_test(foreign__giving_up_removes_what_all_ranks_wrote),
        cmocka_unit_test(foreign__files_in_the_way_are_not_touched),
        cmocka_unit_test(foreign__order_of_calls),
        cmocka_unit_test(foreign__wrong_rows_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
