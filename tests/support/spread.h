/* A tensor given by hand as chunks on ranks, for saves and loads of several ranks. Element i of the whole is i + `first`. */
#ifndef TESTS_SUPPORT_SPREAD_H
#define TESTS_SUPPORT_SPREAD_H

#include <stdlib.h>
#include <string.h>

#include "support/ranks.h"

#define SPREAD_NDIM 3
#define SPREAD_CHUNKS 40

typedef struct spread_chunk {
    int64_t offsets[SPREAD_NDIM], sizes[SPREAD_NDIM];
    uint64_t ranks; /* that hold it, a bit each */
} spread_chunk;

typedef struct spread {
    const char *name;
    int ndim;
    int64_t extents[SPREAD_NDIM];
    size_t n;
    spread_chunk chunks[SPREAD_CHUNKS];
    float first;
} spread;

/* Rows of a matrix: as many on rank r as sizes[r] says, one after the other. */
static inline spread spread_rows(const char *name, int64_t cols, const int64_t *sizes, int ranks)
{
    spread s = {.name = name, .ndim = 2, .extents = {0, cols}, .n = (size_t)ranks};
    for (int r = 0; r < ranks; r++) {
        s.chunks[r] = (spread_chunk){{s.extents[0], 0}, {sizes[r], cols}, UINT64_C(1) << r};
        s.extents[0] += sizes[r];
    }
    return s;
}

/* As torch.chunk cuts them. */
static inline spread spread_evenly(const char *name, int64_t rows, int64_t cols, int ranks)
{
    int64_t sizes[SPREAD_CHUNKS], each = (rows + ranks - 1) / ranks;
    for (int r = 0; r < ranks; r++) {
        int64_t left = rows - each * r;
        sizes[r] = left < 0 ? 0 : left < each ? left : each;
    }
    return spread_rows(name, cols, sizes, ranks);
}

/* What one rank has in its memory. */
typedef struct spread_part {
    size_t n;
    float *data[SPREAD_CHUNKS];
    const spread_chunk *chunks[SPREAD_CHUNKS];
} spread_part;

static inline int64_t spread_elems(const spread *s, const spread_chunk *c)
{
    int64_t n = 1;
    for (int d = 0; d < s->ndim; d++) {
        n *= c->sizes[d];
    }
    return n;
}

static inline float spread_value(const spread *s, const spread_chunk *c, int64_t i)
{
    int64_t at = 0, stride = 1;
    for (int d = s->ndim - 1; d >= 0; d--) {
        at += (c->offsets[d] + i % c->sizes[d]) * stride;
        i /= c->sizes[d];
        stride *= s->extents[d];
    }
    return (float)at + s->first;
}

/* Puts a rank's chunks into a state, with their values or with -1 in them. */
static inline void spread_add(const spread *s, int rank, bool filled, spread_part *part, dcp_value *state)
{
    dcp_tensor tensors[SPREAD_CHUNKS];
    dcp_box boxes[SPREAD_CHUNKS];
    dcp_value *v;
    part->n = 0;
    for (size_t i = 0; i < s->n; i++) {
        const spread_chunk *c = &s->chunks[i];
        if (!(c->ranks >> rank & 1)) {
            continue;
        }
        int64_t n = spread_elems(s, c);
        float *data = calloc((size_t)n + 1, sizeof *data);
        for (int64_t k = 0; k < n; k++) {
            data[k] = filled ? spread_value(s, c, k) : -1;
        }
        tensors[part->n] = dcp_tensor_make(DCP_FLOAT32, s->ndim, c->sizes, data);
        boxes[part->n] = (dcp_box){c->offsets, c->sizes};
        part->data[part->n] = data;
        part->chunks[part->n++] = c;
    }
    if (dcp_sharded_create(NULL, DCP_FLOAT32, s->ndim, s->extents, part->n, tensors, boxes, &v, NULL) != DCP_OK ||
        dcp_dict_set(state, dcp_key_str(s->name), v, NULL) != DCP_OK) {
        abort();
    }
}

static inline bool spread_is_whole(const spread *s, const spread_part *part)
{
    bool same = true;
    for (size_t i = 0; i < part->n; i++) {
        for (int64_t k = 0, n = spread_elems(s, part->chunks[i]); k < n; k++) {
            same &= part->data[i][k] == spread_value(s, part->chunks[i], k);
        }
    }
    return same;
}

static inline void spread_free(spread_part *part)
{
    for (size_t i = 0; i < part->n; i++) {
        free(part->data[i]);
    }
}

/* ---- saved and loaded by ranks ---- */

typedef struct spread_job {
    const spread *tensors;
    size_t n; /* at most 4 */
    dcp_storage *storage;
    const char *path;
    dcp_save_opts save; /* storage and comm are filled in */
} spread_job;

static inline dcp_status spread_save_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const spread_job *j = user;
    spread_part parts[4];
    dcp_value *state;
    dcp_save_opts opts = j->save;
    opts.storage = j->storage;
    opts.comm = comm;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < j->n; i++) {
        spread_add(&j->tensors[i], rank, true, &parts[i], state);
    }
    dcp_status status = dcp_save(NULL, j->path, state, &opts, NULL, err);
    dcp_value_free(state);
    for (size_t i = 0; i < j->n; i++) {
        spread_free(&parts[i]);
    }
    return status;
}

static inline dcp_status spread_load_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    const spread_job *j = user;
    spread_part parts[4];
    dcp_value *state;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.open.storage = j->storage;
    opts.comm = comm;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < j->n; i++) {
        spread_add(&j->tensors[i], rank, false, &parts[i], state);
    }
    dcp_status status = dcp_load(NULL, j->path, state, &opts, NULL, err);
    for (size_t i = 0; i < j->n; i++) {
        status = status == DCP_OK && !spread_is_whole(&j->tensors[i], &parts[i]) ? DCP_INTERNAL : status;
        spread_free(&parts[i]);
    }
    dcp_value_free(state);
    return status;
}

static inline void spread_expect(const rank_thread *ranks, int n, dcp_status expected, const char *what)
{
    for (int r = 0; r < n; r++) {
        if (ranks[r].status != expected) {
            fail_msg("%s: rank %d of %d: %s: %s", what, r, n, dcp_status_name(ranks[r].status), ranks[r].err.message);
        }
    }
}

static inline void spread_save(dcp_storage *storage, const char *path, const spread *tensors, size_t n, int ranks,
                               dcp_status expected)
{
    rank_thread threads[TEST_MAX_RANKS];
    spread_job j = {tensors, n, storage, path, DCP_SAVE_OPTS_INIT};
    run_ranks(ranks, spread_save_rank, &j, threads);
    spread_expect(threads, ranks, expected, "save");
}

static inline void spread_load(dcp_storage *storage, const char *path, const spread *tensors, size_t n, int ranks)
{
    rank_thread threads[TEST_MAX_RANKS];
    spread_job j = {tensors, n, storage, path, DCP_SAVE_OPTS_INIT};
    run_ranks(ranks, spread_load_rank, &j, threads);
    spread_expect(threads, ranks, DCP_OK, "load");
}

#endif
