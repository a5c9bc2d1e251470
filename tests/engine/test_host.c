/* States in host memory: made, filled, compared, gathered from ranks that are threads. Devices: tests/device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/failing_alloc.h"
#include "support/ranks.h"

enum { ROWS = 300, COLUMNS = 200 };

typedef struct sample {
    float matrix[ROWS * COLUMNS];
    int64_t line[5];
    double scalar;
    uint8_t chunk[6];
    dcp_value *state;
} sample;

/* Tensors in containers, a transposed view, a scalar, one without elements, a sharded one, and other values. */
static sample *sample_make(int seed)
{
    static const int64_t square[] = {COLUMNS, ROWS}, turned[] = {1, COLUMNS}, five[] = {5}, none[] = {0, 8}, whole[] = {4, 3},
                         part[] = {2, 3}, at[] = {2, 0};
    sample *s = calloc(1, sizeof *s);
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        s->matrix[i] = (float)(i + seed);
    }
    for (int i = 0; i < 6; i++) {
        s->line[i % 5] = 100 * i + seed;
        s->chunk[i] = (uint8_t)(i + seed);
    }
    s->scalar = 0.5 + seed;
    dcp_value *list, *v;
    dcp_dict_create(NULL, &s->state, NULL);
    dcp_list_create(NULL, &list, NULL);
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, square, s->matrix);
    t.strides = turned;
    dcp_tensor_create(NULL, &t, &v, NULL);
    dcp_list_append(list, v, NULL);
    t = dcp_tensor_make(DCP_INT64, 1, five, s->line);
    dcp_tensor_create(NULL, &t, &v, NULL);
    dcp_list_append(list, v, NULL);
    dcp_dict_set(s->state, dcp_key_str("list"), list, NULL);
    t = dcp_tensor_make(DCP_FLOAT64, 0, NULL, &s->scalar);
    dcp_dict_set_tensor(s->state, "scalar", &t, NULL);
    t = dcp_tensor_make(DCP_FLOAT32, 2, none, s->matrix);
    dcp_dict_set_tensor(s->state, "none", &t, NULL);
    t = dcp_tensor_make(DCP_UINT8, 2, part, s->chunk);
    dcp_box box = {at, part};
    dcp_sharded_create(NULL, DCP_UINT8, 2, whole, 1, &t, &box, &v, NULL);
    dcp_dict_set(s->state, dcp_key_str("sharded"), v, NULL);
    dcp_dict_set_int(s->state, "step", seed, NULL);
    return s;
}

static void sample_free(sample *s)
{
    dcp_value_free(s->state);
    free(s);
}

static const dcp_tensor *tensor_at(const dcp_value *state, size_t i)
{
    return dcp_value_tensor(dcp_value_at(dcp_dict_get_str(state, "list"), i));
}

static const dcp_tensor *tensor_of(const dcp_value *state, const char *key)
{
    return dcp_value_tensor(dcp_dict_get_str(state, key));
}

/* R8.1, R8.2, R8.3, R8.6, R8.7 */
static void host__a_new_state_has_the_structure_and_memory_of_its_own(void **unused)
{
    (void)unused;
    sample *s = sample_make(3);
    dcp_host_state *h;
    assert_int_equal(dcp_host_create(NULL, s->state, NULL, &h, NULL), DCP_OK);
    dcp_value *v = dcp_host_value(h);
    assert_true(dcp_host_is_similar(s->state, v));
    const dcp_tensor *t = tensor_at(v, 0);
    assert_true(t->extents[0] == COLUMNS && t->extents[1] == ROWS && t->device.type == DCP_DEVICE_CPU);
    assert_ptr_not_equal(t->data, s->matrix);
    memset(t->data, 1, sizeof s->matrix);
    assert_true(s->matrix[1] == 4.0f);
    double zero = *(const double *)tensor_of(v, "scalar")->data;
    assert_true(zero == 0);
    assert_null(tensor_of(v, "none")->data);
    int64_t step;
    assert_true(dcp_value_int(dcp_dict_get_str(v, "step"), &step) && step == 3);
    dcp_host_memory where = DCP_HOST_MEMORY_INIT;
    assert_int_equal(dcp_host_where(h, t, &where, NULL), DCP_OK);
    assert_true(!where.is_shared && !where.is_pinned && where.fd == -1);
    assert_int_equal(dcp_host_where(h, tensor_of(v, "scalar"), &where, NULL), DCP_NOT_FOUND);
    assert_int_equal(dcp_host_where(h, tensor_at(s->state, 0), &where, NULL), DCP_NOT_FOUND);
    dcp_host_free(h);
    sample_free(s);
}

/* R8.4 */
static void host__another_process_sees_shared_memory(void **unused)
{
    (void)unused;
    sample *s = sample_make(9);
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    dcp_host_state *h;
    opts.is_shared = true;
    assert_int_equal(dcp_host_create(NULL, s->state, &opts, &h, NULL), DCP_OK);
    const dcp_tensor *t = tensor_at(dcp_host_value(h), 1);
    dcp_host_memory where = DCP_HOST_MEMORY_INIT;
    assert_int_equal(dcp_host_where(h, t, &where, NULL), DCP_OK);
    assert_true(where.is_shared && where.fd >= 0);
    pid_t child = fork();
    if (child == 0) { /* by the descriptor alone, as after exec */
        const int64_t value = 77;
        _exit(pwrite(where.fd, &value, sizeof value, (off_t)where.offset) == (ssize_t)sizeof value ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    assert_int_equal(*(const int64_t *)t->data, 77);
    dcp_host_free(h);
    sample_free(s);
}

/* R8.8 */
static void host__copies_fill_the_target_in_place(void **unused)
{
    (void)unused;
    sample *s = sample_make(1), *later = sample_make(50);
    dcp_host_state *h;
    dcp_value *both;
    assert_int_equal(dcp_host_create(NULL, s->state, NULL, &h, NULL), DCP_OK);
    dcp_value *v = dcp_host_value(h);
    const void *memory = tensor_at(v, 0)->data;
    assert_int_equal(dcp_host_copy(NULL, later->state, v, NULL, &both, NULL), DCP_OK);
    assert_true(dcp_value_equal(both, later->state));
    assert_ptr_equal(tensor_at(both, 0)->data, memory);
    assert_ptr_equal(dcp_dict_get_str(both, "sharded"), dcp_dict_get_str(v, "sharded"));
    assert_ptr_equal(dcp_dict_get_str(both, "step"), dcp_dict_get_str(later->state, "step"));
    for (int c = 0; c < COLUMNS; c++) { /* row-major of a transposed source, told by index */
        assert_true(((const float *)memory)[c * ROWS + 7] == (float)(7 * COLUMNS + c + 50));
    }
    dcp_value_free(both);
    /* And into a transposed target. */
    assert_int_equal(dcp_host_copy(NULL, v, s->state, NULL, NULL, NULL), DCP_OK);
    assert_memory_equal(s->matrix, later->matrix, sizeof s->matrix);
    assert_memory_equal(s->chunk, later->chunk, sizeof s->chunk);
    dcp_host_free(h);
    sample_free(s);
    sample_free(later);
}

/* A dict of one tensor, uint8 [n], in a list; and of what else there is. */
static dcp_value *one_tensor(uint8_t *memory, int64_t n, dcp_dtype dtype, const char *key, size_t list_len)
{
    dcp_value *state, *list, *v;
    dcp_tensor t = dcp_tensor_make(dtype, 1, &n, memory);
    dcp_dict_create(NULL, &state, NULL);
    dcp_list_create(NULL, &list, NULL);
    for (size_t i = 0; i < list_len; i++) {
        dcp_none_create(NULL, &v, NULL);
        dcp_list_append(list, v, NULL);
    }
    dcp_dict_set(state, dcp_key_str("a list"), list, NULL);
    t.extents = &n;
    dcp_dict_set_tensor(state, "first", &t, NULL);
    dcp_dict_set_tensor(state, key, &t, NULL);
    return state;
}

/* R8.9, R8.14: with what differs last, so that something could have been copied before. */
static void host__differences_are_found_before_anything_is_copied(void **unused)
{
    (void)unused;
    uint8_t source[176] = {1, 2, 3, 4, 5, 6, 7, 8}, target[176] = {0}, untouched[176] = {0};
    dcp_value *from = one_tensor(source, 8, DCP_UINT8, "last", 2);
    dcp_value *others[] = {one_tensor(target, 8, DCP_UINT8, "other", 2), one_tensor(target, 8, DCP_UINT8, "last", 3),
                           one_tensor(target, 1, DCP_UINT8, "last", 2),  one_tensor(target, 8, DCP_INT16, "last", 2),
                           one_tensor(target, 8, DCP_UINT8, "last", 2),  one_tensor(target, 8, DCP_UINT8, "last", 2)};
    dcp_dict_set_int(others[4], "last", 1, NULL);
    dcp_value *tuple;
    dcp_seq_create(NULL, DCP_KIND_TUPLE, &tuple, NULL);
    for (int i = 0; i < 2; i++) {
        dcp_value *v;
        dcp_none_create(NULL, &v, NULL);
        dcp_list_append(tuple, v, NULL);
    }
    dcp_dict_set(others[5], dcp_key_str("a list"), tuple, NULL);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp_host_copy(NULL, from, others[i], NULL, NULL, &err), DCP_MISMATCH);
        assert_memory_equal(target, untouched, sizeof target);
        assert_false(dcp_host_is_similar(from, others[i]));
        assert_false(dcp_host_is_similar(others[i], from));
    }
    dcp_host_copy_opts opts = DCP_HOST_COPY_OPTS_INIT;
    opts.allow_cast = true;
    assert_int_equal(dcp_host_copy(NULL, from, others[3], &opts, NULL, NULL), DCP_OK);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(((const int16_t *)(const void *)target)[i], i + 1);
    }
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        dcp_value_free(others[i]);
    }
    dcp_value_free(from);
}

/* R8.9: more elements than one thread converts at a time, from a transposed source. */
static void host__large_tensors_are_converted(void **unused)
{
    (void)unused;
    enum { N = 1300 };
    int64_t shape[] = {N, N}, turned[] = {1, N};
    float *source = malloc(sizeof(float) * N * N);
    double *target = malloc(sizeof(double) * N * N);
    for (int i = 0; i < N * N; i++) {
        source[i] = (float)i;
    }
    dcp_value *from, *to;
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, source);
    t.strides = turned;
    assert_int_equal(dcp_tensor_create(NULL, &t, &from, NULL), DCP_OK);
    t = dcp_tensor_make(DCP_FLOAT64, 2, shape, target);
    assert_int_equal(dcp_tensor_create(NULL, &t, &to, NULL), DCP_OK);
    dcp_host_copy_opts opts = DCP_HOST_COPY_OPTS_INIT;
    opts.allow_cast = true;
    assert_int_equal(dcp_host_copy(NULL, from, to, &opts, NULL, NULL), DCP_OK);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            if (target[i * N + k] != (double)(k * N + i)) {
                fail_msg("[%d, %d] is %g", i, k, target[i * N + k]);
            }
        }
    }
    dcp_value_free(from);
    dcp_value_free(to);
    free(source);
    free(target);
}

/* Tied tensors of a target: as with one copy after the other. */
static void host__of_copies_to_the_same_memory_the_last_counts(void **unused)
{
    (void)unused;
    uint8_t a[64], b[64], target[64];
    const int64_t n = sizeof a;
    dcp_value *from, *to;
    memset(a, 1, sizeof a);
    memset(b, 2, sizeof b);
    dcp_dict_create(NULL, &from, NULL);
    dcp_dict_create(NULL, &to, NULL);
    dcp_tensor t = dcp_tensor_make(DCP_UINT8, 1, &n, a), into = dcp_tensor_make(DCP_UINT8, 1, &n, target);
    dcp_dict_set_tensor(from, "a", &t, NULL);
    t.data = b;
    dcp_dict_set_tensor(from, "b", &t, NULL);
    dcp_dict_set_tensor(to, "b", &into, NULL);
    dcp_dict_set_tensor(to, "a", &into, NULL);
    assert_int_equal(dcp_host_copy(NULL, from, to, NULL, NULL, NULL), DCP_OK);
    assert_memory_equal(target, b, sizeof b);
    dcp_value_free(from);
    dcp_value_free(to);
}

/* R8.10 */
static void host__other_values_are_refused_by_kind_if_asked_for(void **unused)
{
    (void)unused;
    const dcp_kind kinds[] = {DCP_KIND_SET, DCP_KIND_FROZENSET};
    dcp_host_copy_opts opts = DCP_HOST_COPY_OPTS_INIT;
    opts.check_types = true;
    for (size_t i = 0; i < 4; i++) {
        dcp_value *a, *v, *out;
        dcp_dict_create(NULL, &a, NULL);
        if (i < 2) {
            dcp_seq_create(NULL, kinds[i], &v, NULL);
        } else if (i == 2) {
            dcp_dtype_create(NULL, DCP_FLOAT32, &v, NULL);
        } else {
            dcp_record_create(NULL, "x", 1, &v, NULL);
        }
        dcp_dict_set(a, dcp_key_str("v"), v, NULL);
        assert_int_equal(dcp_host_copy(NULL, a, a, &opts, &out, NULL), DCP_ARG);
        assert_int_equal(dcp_host_copy(NULL, a, a, NULL, &out, NULL), DCP_OK);
        assert_ptr_equal(dcp_dict_get_str(out, "v"), v);
        dcp_value_free(out);
        dcp_value_free(a);
    }
}

/* R8.12, R8.13 */
static void host__offloading_copies_as_asked_for(void **unused)
{
    (void)unused;
    sample *s = sample_make(2);
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    dcp_host_state *h;
    assert_int_equal(dcp_host_offload(NULL, s->state, NULL, NULL, 0, &opts, &h, NULL), DCP_OK);
    assert_ptr_equal(tensor_at(dcp_host_value(h), 0)->data, s->matrix);
    dcp_host_free(h);
    opts.copy = DCP_COPY_ALWAYS;
    assert_int_equal(dcp_host_offload(NULL, s->state, NULL, NULL, 0, &opts, &h, NULL), DCP_OK);
    assert_true(dcp_value_equal(dcp_host_value(h), s->state));
    s->matrix[0] = -1;
    s->scalar = -1;
    assert_false(dcp_value_equal(dcp_host_value(h), s->state));
    assert_true(*(const float *)tensor_at(dcp_host_value(h), 0)->data == 2.0f);
    assert_true(*(const double *)tensor_of(dcp_host_value(h), "scalar")->data == 2.5);
    dcp_host_free(h);
    const int other = 1;
    assert_int_equal(dcp_host_offload(NULL, s->state, NULL, &other, 1, &opts, &h, NULL), DCP_OK);
    assert_int_equal(dcp_value_kind(dcp_host_value(h)), DCP_KIND_DICT);
    assert_int_equal(dcp_value_count(dcp_host_value(h)), 0);
    dcp_host_free(h);
    sample_free(s);
}

static void host__wrong_arguments_are_refused(void **unused)
{
    (void)unused;
    sample *s = sample_make(0);
    dcp_host_state *h;
    dcp_value *out;
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    assert_int_equal(dcp_host_create(NULL, NULL, NULL, &h, NULL), DCP_ARG);
    assert_int_equal(dcp_host_create(NULL, s->state, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_host_offload(NULL, NULL, NULL, NULL, 0, NULL, &h, NULL), DCP_ARG);
    assert_int_equal(dcp_host_offload(NULL, s->state, NULL, NULL, 1, NULL, &h, NULL), DCP_ARG);
    assert_int_equal(dcp_host_copy(NULL, NULL, s->state, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_host_copy(NULL, s->state, NULL, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_host_gather(NULL, NULL, NULL, NULL, 0, NULL, &out, NULL), DCP_ARG);
    assert_int_equal(dcp_host_gather(NULL, s->state, NULL, NULL, 0, NULL, NULL, NULL), DCP_ARG);
    const int beyond = 1;
    assert_int_equal(dcp_host_gather(NULL, s->state, NULL, &beyond, 1, NULL, &out, NULL), DCP_ARG);
    assert_false(dcp_host_is_similar(NULL, s->state));
    opts.is_pinned = true; /* for no device */
    assert_int_equal(dcp_host_create(NULL, s->state, &opts, &h, NULL), DCP_ARG);
    opts.is_pinned = false;
    opts.copy = (dcp_copy_rule)2;
    assert_int_equal(dcp_host_create(NULL, s->state, &opts, &h, NULL), DCP_ARG);
    opts.struct_size--;
    assert_int_equal(dcp_host_create(NULL, s->state, &opts, &h, NULL), DCP_ARG);
    dcp_host_free(NULL);
    assert_null(dcp_host_value(NULL));
    sample_free(s);
}

/* ---- gathering ---- */

typedef struct world {
    int n_ranks;
    const int *ranks;
    size_t n_list;
    int bad_rank; /* its tensors are others; -1: none */
    bool has_gap, has_replica;
} world;

static void cut(const world *w, int rank, int64_t rows, int64_t *first, int64_t *n)
{
    /* Uneven: rank r has rows in proportion to r; the last one the rest. */
    int64_t begin = rows * rank * rank / (w->n_ranks * w->n_ranks),
            end = rows * (rank + 1) * (rank + 1) / (w->n_ranks * w->n_ranks);
    *first = begin;
    *n = end - begin - (w->has_gap && rank == w->n_ranks - 1);
    if (w->has_replica) {
        *first = 0;
        *n = rows;
    }
}

enum { GATHERED_ROWS = 37, GATHERED_COLUMNS = 3 };

/* A state of two sharded tensors, one cut by rows and one by columns, and a value of each rank. */
static dcp_value *state_of_rank(const world *w, int rank, float *rows_memory, int32_t *columns_memory)
{
    int64_t shape[] = {GATHERED_ROWS, GATHERED_COLUMNS}, turned[] = {GATHERED_COLUMNS, GATHERED_ROWS}, at[2] = {0}, sizes[2];
    dcp_value *state, *v, *list;
    if (rank == w->bad_rank) {
        shape[1]++;
    }
    dcp_dict_create(NULL, &state, NULL);
    dcp_list_create(NULL, &list, NULL);
    sizes[1] = shape[1];
    cut(w, rank, GATHERED_ROWS, &at[0], &sizes[0]);
    for (int64_t i = 0; i < sizes[0] * sizes[1]; i++) {
        rows_memory[i] = (float)(at[0] * sizes[1] + i);
    }
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, sizes, rows_memory);
    dcp_box box = {at, sizes};
    dcp_sharded_create(NULL, DCP_FLOAT32, 2, shape, 1, &t, &box, &v, NULL);
    dcp_list_append(list, v, NULL);
    int64_t column_at[] = {0, at[0]}, column_sizes[] = {GATHERED_COLUMNS, sizes[0]}, strides[] = {1, GATHERED_COLUMNS};
    for (int64_t c = 0; c < sizes[0]; c++) {
        for (int64_t r = 0; r < GATHERED_COLUMNS; r++) {
            columns_memory[c * GATHERED_COLUMNS + r] = (int32_t)(r * GATHERED_ROWS + at[0] + c);
        }
    }
    t = dcp_tensor_make(DCP_INT32, 2, column_sizes, columns_memory);
    t.strides = strides;
    dcp_box column_box = {column_at, column_sizes};
    dcp_sharded_create(NULL, DCP_INT32, 2, turned, 1, &t, &column_box, &v, NULL);
    dcp_list_append(list, v, NULL);
    dcp_dict_set(state, dcp_key_str("sharded"), list, NULL);
    dcp_dict_set_int(state, "rank", rank, NULL);
    return state;
}

static bool is_whole(const dcp_value *gathered, int rank)
{
    const dcp_value *list = dcp_dict_get_str(gathered, "sharded");
    const dcp_tensor *a = dcp_value_tensor(dcp_value_at(list, 0)), *b = dcp_value_tensor(dcp_value_at(list, 1));
    int64_t r;
    bool is_right = a && b && dcp_value_int(dcp_dict_get_str(gathered, "rank"), &r) && r == rank;
    for (int i = 0; is_right && i < GATHERED_ROWS * GATHERED_COLUMNS; i++) {
        is_right = ((const float *)a->data)[i] == (float)i && ((const int32_t *)b->data)[i] == i;
    }
    return is_right;
}

static dcp_status gather_on_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const world *w = user;
    float rows[GATHERED_ROWS * (GATHERED_COLUMNS + 1)];
    int32_t columns[GATHERED_ROWS * GATHERED_COLUMNS];
    dcp_value *state = state_of_rank(w, rank, rows, columns), *out;
    dcp_status status = dcp_host_gather(NULL, state, comm, w->ranks, w->n_list, NULL, &out, err);
    bool is_wanted = w->n_list == 0;
    for (size_t i = 0; i < w->n_list; i++) {
        is_wanted |= w->ranks[i] == rank;
    }
    if (status == DCP_OK) {
        bool is_right = is_wanted ? is_whole(out, rank) : dcp_value_count(out) == 0;
        status = is_right ? DCP_OK : dcp_error_set(err, DCP_INTERNAL, "rank %d has something else", rank);
        dcp_value_free(out);
    }
    dcp_value_free(state);
    return status;
}

/* R8.15 */
static void gather__uneven_shards_become_whole_where_wanted(void **unused)
{
    (void)unused;
    static const int last_and_first[] = {3, 0}, second[] = {1};
    const world worlds[] = {{.n_ranks = 2, .bad_rank = -1},
                            {.n_ranks = 4, .bad_rank = -1},
                            {.n_ranks = 4, .bad_rank = -1, .ranks = last_and_first, .n_list = 2},
                            {.n_ranks = 2, .bad_rank = -1, .ranks = second, .n_list = 1},
                            {.n_ranks = 4, .bad_rank = -1, .has_replica = true}};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        rank_thread ranks[4];
        world w = worlds[i];
        run_ranks(w.n_ranks, gather_on_rank, &w, ranks);
        for (int r = 0; r < w.n_ranks; r++) {
            if (ranks[r].status != DCP_OK) {
                fail_msg("case %zu, rank %d: %s", i, r, ranks[r].err.message);
            }
        }
    }
}

static void gather__all_ranks_fail_alike(void **unused)
{
    (void)unused;
    static const int first[] = {0}, beyond[] = {4};
    const world worlds[] = {{.n_ranks = 2, .bad_rank = 1},
                            {.n_ranks = 4, .bad_rank = 2},
                            {.n_ranks = 4, .bad_rank = -1, .has_gap = true},
                            {.n_ranks = 2, .bad_rank = -1, .has_gap = true, .ranks = first, .n_list = 1},
                            {.n_ranks = 4, .bad_rank = -1, .ranks = beyond, .n_list = 1}};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        rank_thread ranks[4];
        world w = worlds[i];
        run_ranks(w.n_ranks, gather_on_rank, &w, ranks);
        for (int r = 0; r < w.n_ranks; r++) {
            if (ranks[r].status != DCP_PEER) {
                fail_msg("case %zu, rank %d: %s", i, r, dcp_status_name(ranks[r].status));
            }
        }
    }
}

/* ---- memory ---- */

static dcp_status use_everything(dcp_context *ctx, void *user, dcp_error *err)
{
    const sample *s = user;
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    dcp_host_state *h;
    dcp_value *out;
    opts.copy = DCP_COPY_ALWAYS;
    dcp_status status = dcp_host_offload(ctx, s->state, NULL, NULL, 0, &opts, &h, err);
    if (status == DCP_OK) {
        status = dcp_host_copy(ctx, s->state, dcp_host_value(h), NULL, &out, err);
        if (status == DCP_OK) {
            dcp_value_free(out);
        }
        dcp_host_free(h);
    }
    return status;
}

static dcp_status gather_alone(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    world w = {.n_ranks = 1, .bad_rank = -1};
    float rows[GATHERED_ROWS * (GATHERED_COLUMNS + 1)];
    int32_t columns[GATHERED_ROWS * GATHERED_COLUMNS];
    dcp_value *state = state_of_rank(&w, 0, rows, columns), *out;
    dcp_status status = dcp_host_gather(ctx, state, NULL, NULL, 0, NULL, &out, err);
    if (status == DCP_OK) {
        assert_true(is_whole(out, 0));
        dcp_value_free(out);
    }
    dcp_value_free(state);
    return status;
}

static void host__every_failed_allocation_is_told(void **unused)
{
    (void)unused;
    sample *s = sample_make(4);
    assert_true(failing_alloc_walk(use_everything, s) > 0);
    assert_true(failing_alloc_walk(gather_alone, NULL) > 0);
    sample_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host__a_new_state_has_the_structure_and_memory_of_its_own),
        cmocka_unit_test(host__another_process_sees_shared_memory),
        cmocka_unit_test(host__copies_fill_the_target_in_place),
        cmocka_unit_test(host__differences_are_found_before_anything_is_copied),
        cmocka_unit_test(host__large_tensors_are_converted),
        cmocka_unit_test(host__of_copies_to_the_same_memory_the_last_counts),
        cmocka_unit_test(host__other_values_are_refused_by_kind_if_asked_for),
        cmocka_unit_test(host__offloading_copies_as_asked_for),
        cmocka_unit_test(host__wrong_arguments_are_refused),
        cmocka_unit_test(host__every_failed_allocation_is_told),
        cmocka_unit_test(gather__uneven_shards_become_whole_where_wanted),
        cmocka_unit_test(gather__all_ranks_fail_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
