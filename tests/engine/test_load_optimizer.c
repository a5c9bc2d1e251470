/* The state of an optimizer, loaded by ranks that have none: what each of them gets, against the saved tensors. */
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

#define ROWS 10
#define COLUMNS 6

static float average[ROWS * COLUMNS], square[3] = {7, 8, 9}, step = 12;

static dcp_value *new_dict(void)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_dict_create(NULL, &v, NULL), DCP_OK);
    return v;
}

static void put(dcp_value *dict, const char *key, dcp_value *v)
{
    assert_int_equal(dcp_dict_set(dict, dcp_key_str(key), v, NULL), DCP_OK);
}

/* {"model": {..}, "optim": {"state": {"layer.weight": {..}, "layer.bias": {..}, 3: {..}}, "param_groups": [{..}]}} */
static void save_all(void)
{
    int64_t shape[] = {ROWS, COLUMNS}, three[] = {3};
    dcp_value *root = new_dict(), *model = new_dict(), *optim = new_dict(), *states = new_dict(), *weight = new_dict();
    dcp_value *bias = new_dict(), *numbered = new_dict(), *group = new_dict(), *groups = NULL;
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        average[i] = (float)i;
    }
    dcp_tensor a = dcp_tensor_make(DCP_FLOAT32, 2, shape, average), s = dcp_tensor_make(DCP_FLOAT32, 1, three, square);
    dcp_tensor n = dcp_tensor_make(DCP_FLOAT32, 0, NULL, &step);
    dcp_list_create(NULL, &groups, NULL);
    dcp_dict_set_tensor(model, "layer.weight", &a, NULL);
    dcp_dict_set_tensor(weight, "exp_avg", &a, NULL);
    dcp_dict_set_tensor(weight, "step", &n, NULL);
    dcp_dict_set_tensor(bias, "exp_avg", &s, NULL);
    dcp_dict_set_tensor(numbered, "exp_avg", &s, NULL);
    dcp_dict_set_float(group, "lr", 0.1, NULL);
    dcp_list_append(groups, group, NULL);
    put(states, "layer.weight", weight);
    put(states, "layer.bias", bias);
    assert_int_equal(dcp_dict_set(states, dcp_key_int(3), numbered, NULL), DCP_OK);
    put(optim, "state", states);
    put(optim, "param_groups", groups);
    put(root, "model", model);
    put(root, "optim", optim);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    assert_int_equal(dcp_save(NULL, "ck", root, &opts, NULL, NULL), DCP_OK);
    dcp_value_free(root);
}

static dcp_optimizer_opts options(int rank, int world)
{
    dcp_optimizer_opts opts = DCP_OPTIMIZER_OPTS_INIT;
    opts.open.storage = storage;
    opts.rank = rank;
    opts.world = world;
    return opts;
}

static dcp_optimizer *load(const dcp_optimizer_opts *opts)
{
    dcp_optimizer *o = NULL;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_load_optimizer(NULL, "ck", "optim", opts, &o, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return o;
}

static dcp_value *state_of(const dcp_optimizer *o, const char *parameter)
{
    dcp_value *states = dcp_dict_get_str(dcp_dict_get_str(dcp_optimizer_state(o), "optim"), "state");
    assert_non_null(states);
    return parameter ? dcp_dict_get_str(states, parameter) : dcp_dict_get(states, dcp_key_int(3));
}

/* Rows [from, to) of columns [left, left + width) of the averages. */
static void assert_rows(const dcp_value *v, int64_t rows, int64_t from, int64_t to, int64_t top, int64_t left, int64_t width)
{
    int ndim;
    const int64_t *extents;
    dcp_tensor chunk;
    dcp_box box;
    assert_true(dcp_sharded_shape(v, &ndim, &extents));
    assert_true(ndim == 2 && extents[0] == rows && extents[1] == width);
    assert_int_equal(dcp_value_count(v), from < to);
    if (from == to) {
        return;
    }
    assert_true(dcp_sharded_chunk(v, 0, &chunk, &box));
    assert_true(box.offsets[0] == from && box.offsets[1] == 0 && box.sizes[0] == to - from && box.sizes[1] == width);
    for (int64_t i = 0; i < (to - from) * width; i++) {
        assert_true(((float *)chunk.data)[i] == average[(top + from + i / width) * COLUMNS + left + i % width]);
    }
}

static void optimizer__rows_are_cut_as_chunks(void **state)
{
    (void)state;
    save_all();
    for (int world = 1; world <= 12; world++) {
        int64_t each = (ROWS + world - 1) / world;
        for (int rank = 0; rank < world; rank++) {
            dcp_optimizer_opts opts = options(rank, world);
            dcp_optimizer *o = load(&opts);
            int64_t from = rank * each < ROWS ? rank * each : ROWS, to = from + each < ROWS ? from + each : ROWS;
            dcp_value *weight = state_of(o, "layer.weight"), *root = dcp_optimizer_state(o);
            assert_rows(dcp_dict_get_str(weight, "exp_avg"), ROWS, from, to, 0, 0, COLUMNS);
            const dcp_tensor *n = dcp_value_tensor(dcp_dict_get_str(weight, "step"));
            assert_true(n && n->ndim == 0 && *(float *)n->data == 12); /* one element: whole everywhere */
            assert_non_null(state_of(o, NULL));                        /* a key that is a number stays one */
            dcp_value *group = dcp_value_at(dcp_dict_get_str(dcp_dict_get_str(root, "optim"), "param_groups"), 0);
            assert_true(dcp_value_float(dcp_dict_get_str(group, "lr")) == 0.1);
            assert_null(dcp_dict_get_str(root, "model"));
            dcp_optimizer_free(o);
        }
    }
}

/* The model is cut by columns among two, the rows of each part among three. */
static void optimizer__rows_are_those_of_the_models_shard(void **state)
{
    (void)state;
    save_all();
    int64_t offsets[] = {2, 3}, sizes[] = {8, 3};
    dcp_model_shard shard = {"layer.weight", 2, {offsets, sizes}};
    for (int rank = 0; rank < 3; rank++) {
        dcp_optimizer_opts opts = options(rank, 3);
        opts.shards = &shard;
        opts.n_shards = 1;
        dcp_optimizer *o = load(&opts);
        int64_t from = rank * 3, to = rank == 2 ? 8 : from + 3;
        assert_rows(dcp_dict_get_str(state_of(o, "layer.weight"), "exp_avg"), 8, from, to, 2, 3, 3);
        dcp_optimizer_free(o);
    }
}

static void optimizer__only_the_ranks_own_bytes_are_read(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    dcp_storage_counts counts = {0};
    dcp_storage *counting;
    int64_t shape[] = {N};
    float *elems = calloc(N, sizeof *elems);
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, shape, elems);
    dcp_value *root = new_dict(), *optim = new_dict();
    dcp_dict_set_tensor(optim, "m", &t, NULL);
    put(root, "optim", optim);
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    save.storage = storage;
    save.overwrite = true;
    assert_int_equal(dcp_save(NULL, "ck", root, &save, NULL, NULL), DCP_OK);
    assert_int_equal(dcp_storage_count(NULL, storage, &counts, &counting, NULL), DCP_OK);
    dcp_optimizer_opts opts = options(1, 4);
    opts.open.storage = counting;
    dcp_optimizer *o = load(&opts);
    assert_true(counts.bytes_read < N + N / 10); /* a quarter of 4 N, and the metadata */
    dcp_optimizer_free(o);
    dcp_storage_free(counting);
    dcp_value_free(root);
    free(elems);
}

static void optimizer__an_absent_key_gives_an_empty_dict(void **state)
{
    (void)state;
    dcp_optimizer_opts opts = options(0, 1);
    dcp_optimizer *o;
    save_all();
    assert_int_equal(dcp_load_optimizer(NULL, "ck", "nothing", &opts, &o, NULL), DCP_OK);
    assert_int_equal(dcp_value_kind(dcp_optimizer_state(o)), DCP_KIND_DICT);
    assert_int_equal(dcp_value_count(dcp_optimizer_state(o)), 0);
    dcp_optimizer_free(o);
}

static void optimizer__mistakes_are_named(void **state)
{
    (void)state;
    dcp_optimizer *o;
    dcp_error err = DCP_ERROR_INIT;
    int64_t offsets[] = {5, 0}, sizes[] = {8, 3};
    dcp_model_shard shard = {"layer.weight", 2, {offsets, sizes}};
    dcp_optimizer_opts opts = options(0, 1);
    save_all();
    opts.shards = &shard;
    opts.n_shards = 1;
    assert_int_equal(dcp_load_optimizer(NULL, "ck", "optim", &opts, &o, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "layer.weight"));
    opts = options(4, 4);
    assert_int_equal(dcp_load_optimizer(NULL, "ck", "optim", &opts, &o, NULL), DCP_ARG);
    opts = options(0, 1);
    assert_int_equal(dcp_load_optimizer(NULL, "nowhere", "optim", &opts, &o, NULL), DCP_NOT_FOUND);
}

static dcp_status load_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    dcp_optimizer_opts opts = options(rank, dcp_comm_size(comm));
    dcp_optimizer *o = NULL;
    opts.comm = comm;
    dcp_status status = dcp_load_optimizer(NULL, rank == 2 ? user : "ck", "optim", &opts, &o, err);
    dcp_optimizer_free(o);
    return status;
}

static void optimizer__a_rank_that_fails_fails_all(void **state)
{
    (void)state;
    rank_thread out[3];
    char good[] = "ck", bad[] = "nowhere";
    save_all();
    run_ranks(3, load_rank, good, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_OK);
    }
    run_ranks(3, load_rank, bad, out);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(out[r].status, DCP_PEER);
        assert_non_null(strstr(out[r].err.message, "nowhere"));
    }
}

static dcp_status load_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_optimizer_opts opts = options(0, 2);
    dcp_optimizer *o = NULL;
    (void)user;
    dcp_status status = dcp_load_optimizer(ctx, "ck", "optim", &opts, &o, err);
    if (status == DCP_OK) {
        dcp_optimizer_free(o);
    }
    return status;
}

static void optimizer__every_failed_allocation_is_survived(void **state)
{
    (void)state;
    save_all();
    assert_true(failing_alloc_walk(load_for_walk, NULL) > 0);
}

/* ---- reports of users ---- */

static void save_as(const char *path, dcp_value *root)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    assert_int_equal(dcp_save(NULL, path, root, &opts, NULL, NULL), DCP_OK);
}

/* {"optim": {"state": states, "param_groups": [group]}}; takes both. */
static dcp_value *optim_of(dcp_value *states, dcp_value *group)
{
    dcp_value *root = new_dict(), *optim = new_dict(), *groups = NULL;
    dcp_list_create(NULL, &groups, NULL);
    dcp_list_append(groups, group, NULL);
    put(optim, "state", states);
    put(optim, "param_groups", groups);
    put(root, "optim", optim);
    return root;
}

static dcp_value *new_group(void)
{
    dcp_value *group = new_dict();
    dcp_dict_set_float(group, "lr", 0.1, NULL);
    return group;
}

static const dcp_value *at(const dcp_value *v, const char *first, const char *second)
{
    v = dcp_dict_get_str(v, first);
    return v ? dcp_dict_get_str(v, second) : NULL;
}

/* SGD without momentum: nothing is made of nothing. */
static void optimizer__one_without_state_comes_back_without(void **state)
{
    (void)state;
    dcp_value *root = optim_of(new_dict(), new_group()), *tree;
    dcp_optimizer_opts opts = options(0, 2);
    dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
    dcp_optimizer *o;
    dcp_checkpoint *ck;
    save_as("sgd", root);
    assert_int_equal(dcp_load_optimizer(NULL, "sgd", "optim", &opts, &o, NULL), DCP_OK);
    const dcp_value *states = at(dcp_optimizer_state(o), "optim", "state");
    assert_true(!states || dcp_value_count(states) == 0);
    assert_int_equal(dcp_value_count(at(dcp_optimizer_state(o), "optim", "param_groups")), 1);
    dcp_optimizer_free(o);
    lo.open.storage = storage;
    assert_int_equal(dcp_load(NULL, "sgd", root, &lo, NULL, NULL), DCP_OK);
    assert_int_equal(dcp_value_kind(at(root, "optim", "state")), DCP_KIND_DICT);
    assert_int_equal(dcp_value_count(at(root, "optim", "state")), 0);
    assert_int_equal(dcp_checkpoint_open(NULL, "sgd", &lo.open, &ck, NULL), DCP_OK);
    assert_int_equal(dcp_read_tree(ck, true, &tree, NULL), DCP_OK);
    assert_true(dcp_value_equal(tree, root));
    dcp_value_free(tree);
    dcp_checkpoint_close(ck);
    dcp_value_free(root);
}

/* Adam, where the checkpoint lacks what belongs to one parameter: the same is told for names that are keys already. */
static void optimizer__a_missing_state_is_told_alike_in_both_forms(void **state)
{
    (void)state;
    int64_t three[] = {3};
    float moment[3] = {0};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, three, moment);
    dcp_value *saved = new_dict(), *weight = new_dict(), *nested = new_dict(), *bias = new_dict(), *flat = new_dict();
    dcp_error errors[2] = {DCP_ERROR_INIT, DCP_ERROR_INIT};
    dcp_dict_set_tensor(weight, "exp_avg", &t, NULL);
    put(saved, "weight", weight);
    dcp_value *root = optim_of(saved, new_group());
    save_as("adam", root);
    dcp_dict_set_tensor(bias, "exp_avg", &t, NULL);
    dcp_dict_set_tensor(bias, "exp_avg_sq", &t, NULL);
    put(nested, "bias", bias);
    dcp_dict_set_tensor(flat, "optim.state.bias.exp_avg", &t, NULL);
    dcp_dict_set_tensor(flat, "optim.state.bias.exp_avg_sq", &t, NULL);
    dcp_value *forms[] = {optim_of(nested, new_group()), flat};
    for (int i = 0; i < 2; i++) {
        dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
        dcp_load_report report = DCP_LOAD_REPORT_INIT;
        lo.open.storage = storage;
        assert_int_equal(dcp_load(NULL, "adam", forms[i], &lo, &report, &errors[i]), DCP_NOT_FOUND);
        assert_int_equal(report.n_missing, 2);
        dcp_value_free(forms[i]);
    }
    assert_string_equal(errors[0].message, errors[1].message);
    assert_non_null(strstr(errors[0].message, "optim.state.bias.exp_avg_sq"));
    dcp_value_free(root);
}

static void count_notices(void *user, dcp_difference_kind kind, dcp_str fqn, const char *text)
{
    bool is_it = kind == DCP_DIFF_MISSING && strcmp(fqn.ptr, "optim.param_groups.0.decoupled") == 0;
    (void)text;
    *(int *)user += kind == DCP_DIFF_UNEXPECTED ? 0 : is_it ? 1 : 100;
}

/* A hyper-parameter that is newer than the file: an error, or, if that is asked for, the state's own value and a notice. */
static void optimizer__a_hyper_parameter_that_the_file_lacks(void **state)
{
    (void)state;
    dcp_value *old = optim_of(new_dict(), new_group()), *group = new_dict(), *value;
    dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
    dcp_load_report report = DCP_LOAD_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    int notices = 0;
    save_as("old", old);
    dcp_dict_set_float(group, "lr", 0.5, NULL);
    dcp_dict_set_int(group, "decoupled", 3, NULL);
    dcp_value *root = optim_of(new_dict(), group);
    lo.open.storage = storage;
    report.difference = count_notices;
    report.user = &notices;
    assert_int_equal(dcp_load(NULL, "old", root, &lo, &report, &err), DCP_NOT_FOUND);
    assert_non_null(strstr(err.message, "decoupled"));
    notices = 0;
    report = (dcp_load_report){.struct_size = sizeof report, .difference = count_notices, .user = &notices};
    lo.partial = true;
    assert_int_equal(dcp_load(NULL, "old", root, &lo, &report, &err), DCP_OK);
    assert_int_equal(notices, 1);
    value = dcp_value_at(dcp_dict_get_str(dcp_dict_get_str(root, "optim"), "param_groups"), 0);
    int64_t kept = 0;
    assert_true(dcp_value_int(dcp_dict_get_str(value, "decoupled"), &kept) && kept == 3);
    assert_true(dcp_value_float(dcp_dict_get_str(value, "lr")) == 0.1);
    dcp_value_free(old);
    dcp_value_free(root);
}

static void device_for_rank__counts_within_the_machine(void **state)
{
    (void)state;
    assert_int_equal(dcp_device_for_rank(DCP_DEVICE_CUDA, 11, 8).index, 3);
    assert_int_equal(dcp_device_for_rank(DCP_DEVICE_NPU, 7, 8).index, 7);
    assert_int_equal(dcp_device_for_rank(DCP_DEVICE_CPU, 5, 8).index, 0);
    assert_int_equal(dcp_device_for_rank(DCP_DEVICE_NPU, 7, 8).type, DCP_DEVICE_NPU);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(optimizer__rows_are_cut_as_chunks),
        cmocka_unit_test(optimizer__rows_are_those_of_the_models_shard),
        cmocka_unit_test(optimizer__only_the_ranks_own_bytes_are_read),
        cmocka_unit_test(optimizer__an_absent_key_gives_an_empty_dict),
        cmocka_unit_test(optimizer__mistakes_are_named),
        cmocka_unit_test(optimizer__a_rank_that_fails_fails_all),
        cmocka_unit_test(optimizer__every_failed_allocation_is_survived),
        cmocka_unit_test(optimizer__one_without_state_comes_back_without),
        cmocka_unit_test(optimizer__a_missing_state_is_told_alike_in_both_forms),
        cmocka_unit_test(optimizer__a_hyper_parameter_that_the_file_lacks),
        cmocka_unit_test(device_for_rank__counts_within_the_machine),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
