/*
 * Random models for tests of several ranks: tensors of any shape, each cut and spread over the ranks in one way for saving and in
 * another for loading. What is expected is computed element by element.
 */
#ifndef TESTS_SUPPORT_RANK_MODEL_H
#define TESTS_SUPPORT_RANK_MODEL_H

#include <stdlib.h>
#include <string.h>

#include "support/random.h"
#include "support/ranks.h"

#define MODEL_NDIM 5
#define MODEL_TENSORS 4
#define MODEL_PARTS 4   /* of one dimension */
#define MODEL_CHUNKS 64 /* of one tensor */

/* ---- layouts ---- */

/* How a tensor lies on the ranks. It is cut along each of its dimensions; chunk c is on the `copies` ranks from c % ranks on, so
 * that a rank's chunks need not be neighbours. */
typedef struct layout {
    int64_t parts[MODEL_NDIM];
    int64_t cuts[MODEL_NDIM][MODEL_PARTS + 1]; /* where they begin, and the end */
    int64_t n_chunks;
    int copies;         /* as many as there are ranks, or more: replicated */
    bool is_transposed; /* chunks lie in memory with their dimensions in reverse */
} layout;

typedef struct tensor {
    int ndim;
    int64_t extents[MODEL_NDIM], elems;
    uint32_t *dense; /* element i is i * 2654435761 + the tensor's number */
    layout saved, loaded;
} tensor;

typedef struct model {
    tensor tensors[MODEL_TENSORS];
    int n_tensors, n_saving, n_loading;
    dcp_storage *storage;
    dcp_save_opts save;
} model;

static inline int compare_cuts(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* As torch.chunk cuts, the last parts smaller or empty; or anywhere. */
static inline void cut_dimension(test_random *rnd, layout *l, int d, int64_t extent)
{
    int64_t each = (extent + l->parts[d] - 1) / l->parts[d];
    bool anywhere = test_random_below(rnd, 2);
    for (int64_t i = 0; i <= l->parts[d]; i++) {
        int64_t at = anywhere && i > 0 ? test_random_below(rnd, extent + 1) : each * i;
        l->cuts[d][i] = at > extent || i == l->parts[d] ? extent : at;
    }
    qsort(l->cuts[d], (size_t)l->parts[d], sizeof l->cuts[d][0], compare_cuts);
}

static inline layout random_layout(test_random *rnd, const tensor *t)
{
    layout l = {.n_chunks = 1, .copies = 1, .is_transposed = test_random_below(rnd, 4) == 0};
    switch (test_random_below(rnd, 4)) {
    case 0: l.copies = TEST_MAX_RANKS; break;
    case 1: l.copies = 1 + (int)test_random_below(rnd, 4); break;
    default: break;
    }
    for (int d = 0; d < t->ndim; d++) {
        l.parts[d] = l.n_chunks < 8 ? 1 + test_random_below(rnd, MODEL_PARTS) : 1;
        l.n_chunks *= l.parts[d];
        cut_dimension(rnd, &l, d, t->extents[d]);
    }
    return l;
}

static inline void random_tensor(test_random *rnd, tensor *t, uint32_t number, int most_dims, int64_t most)
{
    t->ndim = (int)test_random_below(rnd, most_dims + 1);
    t->elems = 1;
    for (int d = 0; d < t->ndim; d++) {
        t->extents[d] = test_random_below(rnd, 10) == 0 ? 0 : 1 + test_random_below(rnd, most);
        t->elems *= t->extents[d];
    }
    t->dense = malloc((size_t)(t->elems + 1) * sizeof *t->dense);
    for (int64_t i = 0; i < t->elems; i++) {
        t->dense[i] = (uint32_t)i * 2654435761u + number;
    }
    t->saved = random_layout(rnd, t);
    t->loaded = random_layout(rnd, t);
}

/* Tensors of at most so many dimensions, each of at most `most`. */
static inline void random_model_of(test_random *rnd, model *m, int most_dims, int64_t most)
{
    *m = (model){.n_tensors = 1 + (int)test_random_below(rnd, MODEL_TENSORS),
                 .n_saving = 1 + (int)test_random_below(rnd, 9),
                 .n_loading = 1 + (int)test_random_below(rnd, 9),
                 .save = DCP_SAVE_OPTS_INIT};
    for (int i = 0; i < m->n_tensors; i++) {
        random_tensor(rnd, &m->tensors[i], (uint32_t)i, most_dims, most);
    }
    assert_int_equal(dcp_storage_memory(NULL, &m->storage, NULL), DCP_OK);
    m->save.storage = m->storage;
    m->save.files = (int)test_random_below(rnd, 3);
    m->save.dedup_to_lowest = test_random_below(rnd, 2);
}

static inline void random_model(test_random *rnd, model *m)
{
    random_model_of(rnd, m, MODEL_NDIM, 7);
}

static inline void free_model(model *m)
{
    for (int i = 0; i < m->n_tensors; i++) {
        free(m->tensors[i].dense);
    }
    dcp_storage_free(m->storage);
}

/* ---- a rank's state ---- */

typedef struct chunk {
    int64_t offsets[MODEL_NDIM], sizes[MODEL_NDIM], strides[MODEL_NDIM];
    uint32_t *data;
} chunk;

typedef struct rank_state {
    dcp_value *state;
    chunk chunks[MODEL_TENSORS][MODEL_CHUNKS];
    int n_chunks[MODEL_TENSORS];
} rank_state;

static inline bool is_on_rank(const layout *l, int64_t index, int rank, int ranks)
{
    int64_t behind = (rank - index) % ranks;
    return (behind < 0 ? behind + ranks : behind) < l->copies;
}

static inline void place_chunk(const tensor *t, const layout *l, int64_t index, chunk *c)
{
    for (int d = t->ndim - 1; d >= 0; d--) {
        int64_t i = index % l->parts[d];
        index /= l->parts[d];
        c->offsets[d] = l->cuts[d][i];
        c->sizes[d] = l->cuts[d][i + 1] - l->cuts[d][i];
    }
    int64_t stride = 1;
    for (int i = 0; i < t->ndim; i++) {
        int d = l->is_transposed ? i : t->ndim - 1 - i;
        c->strides[d] = stride;
        stride *= c->sizes[d] ? c->sizes[d] : 1;
    }
}

static inline int64_t chunk_elems(const tensor *t, const chunk *c)
{
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) {
        n *= c->sizes[d];
    }
    return n;
}

/* Where element i of a chunk, in row-major order, lies in its memory, and where in the dense tensor. */
static inline void find_element(const tensor *t, const chunk *c, int64_t i, int64_t *in_memory, int64_t *in_dense)
{
    int64_t stride = 1;
    *in_memory = *in_dense = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        int64_t at = i % c->sizes[d];
        i /= c->sizes[d];
        *in_memory += at * c->strides[d];
        *in_dense += (c->offsets[d] + at) * stride;
        stride *= t->extents[d];
    }
}

static inline void fill_chunk(const tensor *t, const chunk *c)
{
    for (int64_t i = 0, n = chunk_elems(t, c), to, from; i < n; i++) {
        find_element(t, c, i, &to, &from);
        c->data[to] = t->dense[from];
    }
}

static inline bool holds_its_part(const tensor *t, const chunk *c)
{
    bool same = true;
    for (int64_t i = 0, n = chunk_elems(t, c), at, from; i < n; i++) {
        find_element(t, c, i, &at, &from);
        same &= c->data[at] == t->dense[from];
    }
    return same;
}

static inline dcp_status add_tensor(rank_state *s, const tensor *t, const layout *l, int number, int rank, int ranks, bool fill)
{
    dcp_tensor tensors[MODEL_CHUNKS];
    dcp_box boxes[MODEL_CHUNKS];
    char name[16];
    int n = 0;
    for (int64_t i = 0; i < l->n_chunks; i++) {
        if (!is_on_rank(l, i, rank, ranks)) {
            continue;
        }
        chunk *c = &s->chunks[number][n];
        place_chunk(t, l, i, c);
        c->data = calloc((size_t)chunk_elems(t, c) + 1, sizeof *c->data);
        if (fill) {
            fill_chunk(t, c);
        }
        tensors[n] = dcp_tensor_make(DCP_UINT32, t->ndim, c->sizes, c->data);
        tensors[n].strides = l->is_transposed ? c->strides : NULL;
        boxes[n] = (dcp_box){c->offsets, c->sizes};
        n++;
    }
    s->n_chunks[number] = n;
    dcp_value *v;
    snprintf(name, sizeof name, "t%d", number);
    dcp_status status = dcp_sharded_create(NULL, DCP_UINT32, t->ndim, t->extents, (size_t)n, tensors, boxes, &v, NULL);
    return status == DCP_OK ? dcp_dict_set(s->state, dcp_key_str(name), v, NULL) : status;
}

static inline rank_state *make_state(const model *m, int rank, int ranks, bool loading)
{
    rank_state *s = calloc(1, sizeof *s);
    dcp_dict_create(NULL, &s->state, NULL);
    for (int i = 0; i < m->n_tensors; i++) {
        const tensor *t = &m->tensors[i];
        if (add_tensor(s, t, loading ? &t->loaded : &t->saved, i, rank, ranks, !loading) != DCP_OK) {
            abort();
        }
    }
    dcp_dict_set_int(s->state, "step", loading ? 0 : 42, NULL);
    return s;
}

static inline void free_state(rank_state *s)
{
    dcp_value_free(s->state);
    for (int i = 0; i < MODEL_TENSORS; i++) {
        for (int k = 0; k < s->n_chunks[i]; k++) {
            free(s->chunks[i][k].data);
        }
    }
    free(s);
}

static inline bool is_as_saved(const model *m, const rank_state *s)
{
    int64_t step = 0;
    bool same = dcp_value_int(dcp_dict_get_str(s->state, "step"), &step) && step == 42;
    for (int i = 0; i < m->n_tensors; i++) {
        for (int k = 0; k < s->n_chunks[i]; k++) {
            same &= holds_its_part(&m->tensors[i], &s->chunks[i][k]);
        }
    }
    return same;
}

/* ---- save on N, load on M ---- */

static inline dcp_status save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const model *m = user;
    rank_state *s = make_state(m, rank, m->n_saving, false);
    dcp_save_opts opts = m->save;
    opts.comm = comm;
    dcp_status status = dcp_save(NULL, "", s->state, &opts, NULL, err);
    free_state(s);
    return status;
}

static inline dcp_status load_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const model *m = user;
    rank_state *s = make_state(m, rank, m->n_loading, true);
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = m->storage;
    opts.comm = comm;
    dcp_status status = dcp_load(NULL, "", s->state, &opts, NULL, err);
    status = status == DCP_OK && !is_as_saved(m, s) ? DCP_INTERNAL : status;
    free_state(s);
    return status;
}

static inline void expect_all(const rank_thread *ranks, int n, dcp_status expected, int round)
{
    for (int r = 0; r < n; r++) {
        if (ranks[r].status != expected) {
            fail_msg("round %d, rank %d of %d: %s instead of %s: %s", round, r, n, dcp_status_name(ranks[r].status),
                     dcp_status_name(expected), ranks[r].err.message);
        }
    }
}

/* One process reads all of it, and finds nothing wrong. */
static inline void check_whole(const model *m)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    opts.storage = m->storage;
    if (dcp_checkpoint_open(NULL, "", &opts, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(dcp_verify(ck, NULL, &verified, &err), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    for (int i = 0; i < m->n_tensors; i++) {
        const tensor *t = &m->tensors[i];
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(name));
        assert_non_null(item);
        uint32_t *whole = malloc((size_t)(t->elems + 1) * sizeof *whole);
        dcp_tensor dst = dcp_tensor_make(DCP_UINT32, t->ndim, t->extents, whole);
        assert_int_equal(dcp_read(ck, item, NULL, &dst, &err), DCP_OK);
        assert_memory_equal(whole, t->dense, (size_t)t->elems * sizeof *whole);
        free(whole);
    }
    dcp_checkpoint_close(ck);
}

#endif
