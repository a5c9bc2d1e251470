/* Sharded tensors to whole ones: each rank sends its chunks to those who want them, one tensor at a time. */
#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/hash.h"
#include "comm/collective.h"
#include "dcp/host.h"
#include "engine/stage/tensor_pairs.h"
#include "plan/coverage.h"
#include "state/children.h"
#include "state/strided.h"
#include "state/value.h"

#define NUMBER_BYTES ((size_t)8)
#define ALIGN_BYTES ((size_t)16) /* of each chunk's elements in a message */

/* A sharded tensor of the state, and what becomes of it. */
typedef struct whole {
    const dcp_value *sharded;
    dcp_value *tensor; /* NULL: not wanted here */
} whole;

typedef struct gathering {
    dcp_context *ctx;
    dcp__step step;
    void *stream;
    bool *wants; /* [rank] */
    whole *wholes;
    size_t n, cap;
    size_t next; /* of them, while the tree is being made */
    uint64_t visits_left;
} gathering;

static bool is_wanted_here(const gathering *g)
{
    return g->wants[dcp__step_rank(&g->step)];
}

/* ---- what there is ---- */

/* Sets and opaque values are left alone. */
static bool is_walked(const dcp_value *v)
{
    dcp_kind kind = dcp_value_kind(v);
    return kind == DCP_KIND_LIST || kind == DCP_KIND_TUPLE || dcp__has_keys(v);
}

static dcp_status collect(gathering *g, const dcp_value *v, uint32_t depth, dcp_error *err)
{
    if (depth > dcp__depth_limit(g->ctx) || g->visits_left-- == 0) {
        return dcp__fail(err, DCP_LIMIT, "the state is nested too deeply, or too often in itself");
    }
    dcp_status status = DCP_OK;
    for (size_t i = 0; is_walked(v) && i < dcp_value_count(v) && status == DCP_OK; i++) {
        status = collect(g, dcp_value_at(v, i), depth + 1, err);
    }
    if (dcp_value_kind(v) != DCP_KIND_SHARDED) {
        return status;
    }
    void *array = g->wholes;
    if (!dcp__grow(g->ctx, &array, &g->cap, g->n + 1, sizeof *g->wholes)) {
        return dcp__nomem(err);
    }
    g->wholes = array;
    g->wholes[g->n++] = (whole){v, NULL};
    return DCP_OK;
}

/* Of the dtypes and shapes of all sharded tensors, in order. */
static dcp_status sum_up(const gathering *g, uint64_t *out, dcp_error *err)
{
    dcp__buf all;
    dcp__buf_init(&all, g->ctx);
    for (size_t i = 0; i < g->n; i++) {
        int ndim = 0;
        const int64_t *extents = NULL;
        dcp_sharded_shape(g->wholes[i].sharded, &ndim, &extents);
        dcp__buf_printf(&all, "%d %d:", (int)dcp_value_dtype(g->wholes[i].sharded), ndim);
        for (int d = 0; d < ndim; d++) {
            dcp__buf_printf(&all, " %lld", (long long)extents[d]);
        }
        dcp__buf_put_byte(&all, '\n');
    }
    bool has_failed = all.failed;
    *out = dcp__xxh3_64(all.data, all.len);
    dcp__buf_reset(&all);
    return has_failed ? dcp__nomem(err) : DCP_OK;
}

/* All ranks name the same tensors, or all of them learn which do not. */
static dcp_status agree_on_tensors(gathering *g, dcp_status mine, dcp_error *err)
{
    int size = dcp__step_size(&g->step), rank = dcp__step_rank(&g->step);
    uint64_t sum = 0, *sums = mine == DCP_OK ? dcp__alloc(g->ctx, (size_t)size * sizeof *sums) : NULL;
    mine = mine == DCP_OK ? (sums ? sum_up(g, &sum, err) : dcp__nomem(err)) : mine;
    dcp_status status = dcp__agree_u64(&g->step, mine, sum, sums, err);
    if (status == DCP_OK && sums[rank] != sums[0]) {
        status = dcp__fail(err, DCP_MISMATCH, "gather: other sharded tensors than on rank 0 (%zu of them)", g->n);
    }
    dcp__free(g->ctx, sums);
    return status;
}

/* ---- messages: number of chunks; offsets and sizes of each; their elements ---- */

static size_t head_bytes(int ndim, size_t n_chunks)
{
    return (size_t)dcp__align_up(NUMBER_BYTES + n_chunks * 2 * (size_t)ndim * NUMBER_BYTES, ALIGN_BYTES);
}

static dcp_status bytes_of(dcp_dtype dtype, int ndim, const int64_t *sizes, size_t *out, dcp_error *err)
{
    int64_t elems;
    size_t bytes = 0;
    if (!dcp__elems(ndim, sizes, &elems) || !dcp__mul_size((size_t)elems, dcp_dtype_bytes(dtype), &bytes) ||
        bytes > SIZE_MAX / 4) {
        return dcp__fail(err, DCP_LIMIT, "a chunk of %s has too many elements", dcp__print_shape(ndim, sizes).text);
    }
    *out = (size_t)dcp__align_up(bytes, ALIGN_BYTES);
    return DCP_OK;
}

static dcp_status message_bytes(const dcp_value *v, int ndim, size_t *out, dcp_error *err)
{
    size_t n = dcp_value_count(v), bytes = 0, sum = head_bytes(ndim, n);
    for (size_t i = 0; i < n; i++) {
        dcp_tensor chunk;
        dcp_box box;
        dcp_sharded_chunk(v, i, &chunk, &box);
        dcp_status status = bytes_of(chunk.dtype, ndim, chunk.extents, &bytes, err);
        if (status != DCP_OK) {
            return status;
        }
        if (bytes && !chunk.data) {
            return dcp__fail(err, DCP_ARG, "chunk %zu of a sharded tensor has no memory", i);
        }
        if (!dcp__add_size(sum, bytes, &sum)) {
            return dcp__fail(err, DCP_LIMIT, "the chunks of a sharded tensor have too many bytes");
        }
    }
    *out = sum;
    return DCP_OK;
}

/* Fills in the head, and notes the copies of the elements. */
static dcp_status write_message(const dcp_value *v, int ndim, char *message, dcp__tensor_pairs *pairs, dcp_error *err)
{
    size_t n = dcp_value_count(v), bytes = 0;
    char *at = message + NUMBER_BYTES, *elements = message + head_bytes(ndim, n);
    dcp__store64(message, n);
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        dcp_tensor chunk;
        dcp_box box;
        dcp_sharded_chunk(v, i, &chunk, &box);
        for (int d = 0; d < ndim; d++, at += 2 * NUMBER_BYTES) {
            dcp__store64(at, (uint64_t)box.offsets[d]);
            dcp__store64(at + NUMBER_BYTES, (uint64_t)box.sizes[d]);
        }
        dcp_tensor to = dcp_tensor_make(chunk.dtype, ndim, chunk.extents, elements);
        status = dcp__tensor_pairs_add(pairs, &chunk, &to, err);
        status = status == DCP_OK ? bytes_of(chunk.dtype, ndim, chunk.extents, &bytes, err) : status;
        elements += status == DCP_OK ? bytes : 0;
    }
    return status;
}

static dcp_status make_message(const gathering *g, const dcp_value *v, char **out, size_t *out_bytes, dcp_error *err)
{
    int ndim = 0;
    const int64_t *extents;
    size_t bytes = 0;
    dcp_sharded_shape(v, &ndim, &extents);
    dcp_status status = message_bytes(v, ndim, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    char *message = dcp__calloc(g->ctx, 1, bytes);
    if (!message) {
        return dcp__nomem(err);
    }
    dcp__tensor_pairs pairs = {.ctx = g->ctx};
    status = write_message(v, ndim, message, &pairs, err);
    status = status == DCP_OK ? dcp__tensor_pairs_copy(&pairs, g->stream, err) : status;
    dcp__tensor_pairs_reset(&pairs);
    if (status != DCP_OK) {
        dcp__free(g->ctx, message);
        return status;
    }
    *out = message;
    *out_bytes = bytes;
    return DCP_OK;
}

/* ---- putting together ---- */

/* The chunks of all ranks. */
typedef struct pieces {
    dcp_context *ctx;
    dcp_dtype dtype;
    int ndim;
    dcp_box *boxes;           /* [piece] */
    const uint8_t **elements; /* [piece] */
    int64_t *numbers;         /* of boxes */
    size_t n;
} pieces;

static void pieces_reset(pieces *p)
{
    dcp__free(p->ctx, p->boxes);
    dcp__free(p->ctx, p->elements);
    dcp__free(p->ctx, p->numbers);
}

static dcp_status make_room(pieces *p, const dcp__parts *parts, dcp_error *err)
{
    size_t most = 0, bytes = 0;
    for (int r = 0; r < parts->n; r++) {
        const uint8_t *message = dcp__part(parts, r, &bytes);
        most += bytes ? (size_t)dcp__load64(message) : 0;
    }
    p->boxes = dcp__calloc(p->ctx, most + 1, sizeof *p->boxes);
    p->elements = dcp__calloc(p->ctx, most + 1, sizeof *p->elements);
    p->numbers = dcp__calloc(p->ctx, (most + 1) * 2 * (size_t)(p->ndim + 1), sizeof *p->numbers);
    return p->boxes && p->elements && p->numbers ? DCP_OK : dcp__nomem(err);
}

static bool is_known(const pieces *p, const int64_t *offsets, const int64_t *sizes)
{
    size_t bytes = (size_t)p->ndim * sizeof *offsets;
    bool is_there = false;
    for (size_t i = 0; i < p->n && !is_there && bytes; i++) {
        is_there = memcmp(p->boxes[i].offsets, offsets, bytes) == 0 && memcmp(p->boxes[i].sizes, sizes, bytes) == 0;
    }
    return is_there || (!bytes && p->n); /* without dimensions all are the same */
}

/* What several ranks hold counts once. */
static dcp_status take_pieces(pieces *p, const uint8_t *message, dcp_error *err)
{
    size_t n = (size_t)dcp__load64(message), bytes = 0;
    const uint8_t *at = message + NUMBER_BYTES, *elements = message + head_bytes(p->ndim, n);
    for (size_t i = 0; i < n; i++) {
        int64_t *offsets = p->numbers + p->n * 2 * (size_t)p->ndim, *sizes = offsets + p->ndim;
        for (int d = 0; d < p->ndim; d++, at += 2 * NUMBER_BYTES) {
            offsets[d] = (int64_t)dcp__load64(at);
            sizes[d] = (int64_t)dcp__load64(at + NUMBER_BYTES);
        }
        dcp_status status = bytes_of(p->dtype, p->ndim, sizes, &bytes, err);
        if (status != DCP_OK) {
            return status;
        }
        if (!is_known(p, offsets, sizes)) {
            p->boxes[p->n] = (dcp_box){offsets, sizes};
            p->elements[p->n++] = elements;
        }
        elements += bytes;
    }
    return DCP_OK;
}

static dcp_status check_pieces(const pieces *p, const int64_t *extents, dcp_error *err)
{
    dcp__tiling tiling;
    dcp_status status = dcp__check_tiling(p->ctx, p->ndim, extents, p->boxes, p->n, &tiling, err);
    if (status != DCP_OK || tiling.fault == DCP__TILING_OK) {
        return status;
    }
    if (tiling.fault == DCP__TILING_GAP) {
        return dcp__fail(err, DCP_MISMATCH, "%lld elements of a sharded tensor of %s are on no rank, the first at %s",
                         (long long)tiling.missing, dcp__print_shape(p->ndim, extents).text,
                         dcp__print_shape(p->ndim, tiling.at).text);
    }
    return dcp__fail(err, DCP_MISMATCH, "chunks at %s of a sharded tensor of %s %s",
                     dcp__print_shape(p->ndim, p->boxes[tiling.a].offsets).text, dcp__print_shape(p->ndim, extents).text,
                     tiling.fault == DCP__TILING_OVERLAP ? "overlap others" : "lie outside of it");
}

static dcp_status fill(const pieces *p, const int64_t *extents, dcp_value **out, dcp_error *err)
{
    int64_t strides[DCP_MAX_NDIM];
    dcp_value *made;
    dcp_status status = dcp_tensor_alloc(p->ctx, p->dtype, p->ndim, extents, &made, err);
    if (status != DCP_OK) {
        return status;
    }
    const dcp_tensor *t = dcp_value_tensor(made);
    size_t elem = dcp_dtype_bytes(p->dtype);
    dcp__tensor_pairs pairs = {.ctx = p->ctx};
    dcp__row_major(p->ndim, extents, strides);
    for (size_t i = 0; i < p->n && status == DCP_OK; i++) {
        dcp_tensor from = dcp_tensor_make(p->dtype, p->ndim, p->boxes[i].sizes, (void *)p->elements[i]), to = from;
        int64_t at = dcp__element_at(p->ndim, p->boxes[i].offsets, strides);
        to.data = t->data ? (char *)t->data + at * (int64_t)elem : NULL;
        to.strides = strides;
        status = dcp__tensor_pairs_add(&pairs, &from, &to, err);
    }
    status = status == DCP_OK ? dcp__tensor_pairs_copy(&pairs, NULL, err) : status;
    dcp__tensor_pairs_reset(&pairs);
    if (status != DCP_OK) {
        dcp_value_free(made);
        return status;
    }
    *out = made;
    return DCP_OK;
}

static dcp_status put_together(const gathering *g, const dcp__parts *parts, whole *w, dcp_error *err)
{
    const int64_t *extents = NULL;
    pieces p = {.ctx = g->ctx, .dtype = dcp_value_dtype(w->sharded)};
    size_t bytes = 0;
    dcp_sharded_shape(w->sharded, &p.ndim, &extents);
    dcp_status status = make_room(&p, parts, err);
    for (int r = 0; r < parts->n && status == DCP_OK; r++) {
        const uint8_t *message = dcp__part(parts, r, &bytes);
        status = bytes ? take_pieces(&p, message, err) : DCP_OK;
    }
    status = status == DCP_OK ? check_pieces(&p, extents, err) : status;
    status = status == DCP_OK ? fill(&p, extents, &w->tensor, err) : status;
    pieces_reset(&p);
    return status;
}

/* ---- the exchange ---- */

/* *mine is what became of this rank so far; what the communicator says is returned. */
static dcp_status gather_one(gathering *g, whole *w, dcp_status *mine, dcp_error *err)
{
    int size = dcp__step_size(&g->step);
    char *message = NULL;
    size_t bytes = 0;
    dcp__parts parts = {0};
    dcp_comm_send *send = *mine == DCP_OK ? dcp__calloc(g->ctx, (size_t)size, sizeof *send) : NULL;
    if (*mine == DCP_OK) {
        *mine = send ? make_message(g, w->sharded, &message, &bytes, err) : dcp__nomem(err);
    }
    for (int r = 0; r < size && *mine == DCP_OK; r++) {
        send[r] = g->wants[r] ? (dcp_comm_send){message, bytes} : (dcp_comm_send){NULL, 0};
    }
    dcp_status status = dcp__exchange(&g->step, *mine, send, &parts, err);
    if (status == DCP_OK && is_wanted_here(g)) {
        *mine = put_together(g, &parts, w, err);
    }
    dcp__parts_free(&parts);
    dcp__free(g->ctx, message);
    dcp__free(g->ctx, send);
    return status;
}

/* ---- the tree ---- */

static dcp_status build(void *user, dcp_value *v, dcp_value **out, dcp_error *err)
{
    gathering *g = user;
    if (is_walked(v)) {
        return dcp__map_children(g->ctx, v, build, g, out, err);
    }
    *out = dcp_value_retain(dcp_value_kind(v) == DCP_KIND_SHARDED ? g->wholes[g->next++].tensor : v);
    return DCP_OK;
}

static dcp_status gather_all(gathering *g, dcp_value *state, dcp_status mine, dcp_value **out, dcp_error *err)
{
    dcp_value *made = NULL;
    mine = mine == DCP_OK ? collect(g, state, 0, err) : mine;
    dcp_status status = agree_on_tensors(g, mine, err);
    /* A rank whose tensors are others than those of rank 0 has failed alone: the others have to hear of it. */
    mine = status == DCP_MISMATCH ? status : DCP_OK;
    status = status == DCP_OK || status == DCP_MISMATCH ? dcp__agree(&g->step, mine, err) : status;
    for (size_t i = 0; i < g->n && status == DCP_OK; i++) {
        status = gather_one(g, &g->wholes[i], &mine, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    if (mine == DCP_OK) {
        mine = is_wanted_here(g) ? build(g, state, &made, err) : dcp_dict_create(g->ctx, &made, err);
    }
    status = dcp__agree(&g->step, mine, err);
    if (status != DCP_OK) {
        dcp_value_free(made);
        return status;
    }
    *out = made;
    return DCP_OK;
}

static dcp_status note_ranks(gathering *g, const int *ranks, size_t n, dcp_error *err)
{
    int size = dcp__step_size(&g->step);
    g->wants = dcp__calloc(g->ctx, (size_t)size, sizeof *g->wants);
    if (!g->wants) {
        return dcp__nomem(err);
    }
    for (int r = 0; r < size; r++) {
        g->wants[r] = n == 0;
    }
    for (size_t i = 0; i < n; i++) {
        if (!ranks || ranks[i] < 0 || ranks[i] >= size) {
            return dcp__fail(err, DCP_ARG, "gather: no rank %d of %d", ranks ? ranks[i] : -1, size);
        }
        g->wants[ranks[i]] = true;
    }
    return DCP_OK;
}

static dcp_status check(const dcp_value *state, const dcp_host_opts *opts, dcp_value **out, dcp_error *err)
{
    if (!state || !out || (opts && opts->struct_size != sizeof *opts)) {
        return dcp__fail(err, DCP_ARG, "gather: no %s",
                         !state ? "state"
                         : !out ? "place for the result"
                                : "options of this version");
    }
    return DCP_OK;
}

dcp_status dcp_host_gather(dcp_context *ctx, dcp_value *state, dcp_comm *comm, const int *ranks, size_t n_ranks,
                           const dcp_host_opts *opts, dcp_value **out, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    ctx = dcp__context(ctx);
    gathering g = {.ctx = ctx, .step = {ctx, comm, "gather", NULL}, .visits_left = dcp__visit_limit(ctx)};
    dcp_status mine = check(state, opts, out, err);
    mine = mine == DCP_OK ? note_ranks(&g, ranks, n_ranks, err) : mine;
    g.stream = mine == DCP_OK && opts ? opts->stream : NULL;
    dcp_status status = gather_all(&g, state, mine, out, err);
    for (size_t i = 0; i < g.n; i++) {
        dcp_value_free(g.wholes[i].tensor);
    }
    dcp__free(ctx, g.wholes);
    dcp__free(ctx, g.wants);
    return status;
}
