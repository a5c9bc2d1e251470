/* States in host memory of their own. */
#include "dcp/host.h"

#include "base/checked.h"
#include "device/host_pool.h"
#include "engine/stage/tensor_pairs.h"
#include "state/clone.h"
#include "state/strided.h"

#define BLOCK_BYTES ((size_t)64 << 20) /* small tensors lie together in blocks of about this size */
#define ALIGN_BYTES ((size_t)64)
#define SCALAR_BYTES ((size_t)16) /* at least one element of any dtype */

/* A tensor that needs memory. */
typedef struct place {
    dcp_tensor *tensor; /* in the tree */
    size_t bytes;
} place;

struct dcp_host_state {
    dcp_context *ctx;
    dcp_host_opts opts;
    dcp_value *value;
    dcp_device_driver *driver; /* that blocks are registered with; NULL: none */
    dcp__host_pool *pool;
    char *scalars; /* of tensors without dimensions */
};

/* What is known while a state is being made. */
typedef struct making {
    dcp_host_state *host;
    bool keeps_host_memory; /* tensors that lie there already stay */
    place *places;
    size_t n, cap;
    size_t n_scalars;
    dcp__tensor_pairs pairs; /* originals and their copies */
} making;

static dcp_status check_opts(const dcp_host_opts *o, dcp_error *err)
{
    if (o->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "host options: struct_size %zu, expected %zu", o->struct_size, sizeof *o);
    }
    if (o->is_pinned && o->pin_device.type == DCP_DEVICE_CPU) {
        return dcp__fail(err, DCP_ARG, "host options: memory is pinned for a device, and there is none given");
    }
    if ((int)o->copy < DCP_COPY_NEEDED || o->copy > DCP_COPY_ALWAYS) {
        return dcp__fail(err, DCP_ARG, "host options: no rule of copying has the number %d", (int)o->copy);
    }
    return DCP_OK;
}

/* ---- what needs memory ---- */

static dcp_status note_tensor(void *user, dcp_tensor *t, dcp_error *err)
{
    making *m = user;
    int64_t elems;
    size_t bytes;
    if (m->keeps_host_memory && t->device.type == DCP_DEVICE_CPU) {
        return DCP_OK;
    }
    if (!dcp__elems(t->ndim, t->extents, &elems) || !dcp__mul_size((size_t)elems, dcp_dtype_bytes(t->dtype), &bytes) ||
        bytes > SIZE_MAX - ALIGN_BYTES) {
        return dcp__fail(err, DCP_LIMIT, "a tensor of %s has too many elements", dcp__print_shape(t->ndim, t->extents).text);
    }
    if (elems == 0) {
        t->data = NULL;
        t->strides = NULL;
        t->device = (dcp_device){DCP_DEVICE_CPU, 0};
        return DCP_OK;
    }
    void *array = m->places;
    if (!dcp__grow(m->host->ctx, &array, &m->cap, m->n + 1, sizeof *m->places)) {
        return dcp__nomem(err);
    }
    m->places = array;
    m->places[m->n++] = (place){t, (bytes + ALIGN_BYTES - 1) & ~(ALIGN_BYTES - 1)};
    m->n_scalars += t->ndim == 0;
    return DCP_OK;
}

/* ---- memory ---- */

/* The tensor turns to memory of the state; what it was is the source of a copy. */
static dcp_status settle(making *m, dcp_tensor *t, char *memory, dcp_error *err)
{
    dcp_tensor from = *t;
    t->data = memory;
    t->strides = NULL;
    t->device = (dcp_device){DCP_DEVICE_CPU, 0};
    return dcp__tensor_pairs_add(&m->pairs, &from, t, err);
}

static dcp_status settle_scalars(making *m, dcp_error *err)
{
    char *at = m->host->scalars = dcp__calloc(m->host->ctx, m->n_scalars + 1, SCALAR_BYTES);
    dcp_status status = at ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; i < m->n && status == DCP_OK; i++) {
        if (m->places[i].tensor->ndim == 0) {
            status = settle(m, m->places[i].tensor, at, err);
            at += SCALAR_BYTES;
            m->places[i].bytes = 0;
        }
    }
    return status;
}

/* Tensors [first, end), which lie in one block. */
static dcp_status settle_block(making *m, size_t first, size_t end, size_t bytes, dcp_error *err)
{
    dcp__host_block *block;
    dcp_status status = dcp__host_pool_acquire(m->host->pool, bytes, false, &block, err);
    char *at = status == DCP_OK ? block->ptr : NULL;
    for (size_t i = first; i < end && status == DCP_OK; i++) {
        if (m->places[i].bytes) {
            status = settle(m, m->places[i].tensor, at, err);
            at += m->places[i].bytes;
        }
    }
    return status;
}

static dcp_status settle_others(making *m, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t first = 0, end; first < m->n && status == DCP_OK; first = end) {
        size_t bytes = m->places[first].bytes;
        for (end = first + 1; end < m->n && bytes < BLOCK_BYTES && m->places[end].bytes < BLOCK_BYTES - bytes; end++) {
            bytes += m->places[end].bytes;
        }
        status = bytes ? settle_block(m, first, end, bytes, err) : DCP_OK;
    }
    return status;
}

static dcp_status make_pool(dcp_host_state *h, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (h->opts.is_pinned) {
        status = dcp_device_open(h->ctx, h->opts.pin_device.type, NULL, &h->driver, err);
    }
    dcp__host_pool_opts opts = {.is_shared = h->opts.is_shared,
                                .pin = h->opts.is_pinned ? DCP__PIN_REQUIRED : DCP__PIN_NEVER,
                                .driver = h->driver,
                                .index = h->opts.pin_device.index};
    return status == DCP_OK ? dcp__host_pool_create(h->ctx, &opts, &h->pool, err) : status;
}

/* ---- making ---- */

/* has_content: the elements are copied too. */
static dcp_status fill(making *m, dcp_value *state, bool has_content, dcp_error *err)
{
    dcp_host_state *h = m->host;
    dcp_status status = make_pool(h, err);
    status = status == DCP_OK ? dcp__value_clone(h->ctx, state, note_tensor, m, &h->value, err) : status;
    status = status == DCP_OK ? settle_scalars(m, err) : status;
    status = status == DCP_OK ? settle_others(m, err) : status;
    return status == DCP_OK && has_content ? dcp__tensor_pairs_copy(&m->pairs, h->opts.stream, err) : status;
}

static dcp_status make(dcp_context *ctx, dcp_value *state, const dcp_host_opts *given, bool has_content, dcp_host_state **out,
                       dcp_error *err)
{
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    if (!state || !out) {
        return dcp__fail(err, DCP_ARG, "host state: no %s", state ? "place for the result" : "state");
    }
    dcp_status status = given ? check_opts(given, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    ctx = dcp__context(ctx);
    dcp_host_state *h = dcp__calloc(ctx, 1, sizeof *h);
    if (!h) {
        return dcp__nomem(err);
    }
    h->ctx = ctx;
    h->opts = given ? *given : opts;
    making m = {.host = h, .pairs = {.ctx = ctx}};
    m.keeps_host_memory = has_content && h->opts.copy == DCP_COPY_NEEDED;
    status = fill(&m, state, has_content, err);
    dcp__tensor_pairs_reset(&m.pairs);
    dcp__free(ctx, m.places);
    if (status != DCP_OK) {
        dcp_host_free(h);
        return status;
    }
    *out = h;
    return DCP_OK;
}

dcp_status dcp_host_create(dcp_context *ctx, dcp_value *state, const dcp_host_opts *opts, dcp_host_state **out, dcp_error *err)
{
    return make(ctx, state, opts, false, out, err);
}

static bool is_listed(int rank, const int *ranks, size_t n)
{
    bool is_there = n == 0;
    for (size_t i = 0; i < n && !is_there; i++) {
        is_there = ranks[i] == rank;
    }
    return is_there;
}

dcp_status dcp_host_offload(dcp_context *ctx, dcp_value *state, const dcp_comm *comm, const int *ranks, size_t n_ranks,
                            const dcp_host_opts *opts, dcp_host_state **out, dcp_error *err)
{
    if (!state || (n_ranks && !ranks)) {
        return dcp__fail(err, DCP_ARG, "offload: no %s", state ? "list of ranks" : "state");
    }
    if (is_listed(comm ? comm->rank : 0, ranks, n_ranks)) {
        return make(ctx, state, opts, true, out, err);
    }
    dcp_value *nothing;
    dcp_status status = dcp_dict_create(ctx, &nothing, err);
    if (status == DCP_OK) {
        status = make(ctx, nothing, opts, true, out, err);
        dcp_value_free(nothing);
    }
    return status;
}

dcp_value *dcp_host_value(const dcp_host_state *h)
{
    return h ? h->value : NULL;
}

dcp_status dcp_host_where(const dcp_host_state *h, const dcp_tensor *t, dcp_host_memory *out, dcp_error *err)
{
    if (!h || !t || !out || out->struct_size != sizeof *out) {
        return dcp__fail(err, DCP_ARG, "host memory: no %s", !h ? "state" : !t ? "tensor" : "place for it of this version");
    }
    const dcp__host_block *b = t->data ? dcp__host_pool_find(h->pool, t->data, 1) : NULL;
    if (!b) {
        return dcp__fail(err, DCP_NOT_FOUND, "the tensor lies in no block of the state");
    }
    *out = (dcp_host_memory){.struct_size = sizeof *out,
                             .is_shared = b->fd >= 0,
                             .is_pinned = b->is_pinned,
                             .fd = b->fd,
                             .offset = (uint64_t)((const char *)t->data - b->ptr)};
    return DCP_OK;
}

void dcp_host_free(dcp_host_state *h)
{
    if (h) {
        dcp_value_free(h->value);
        dcp__host_pool_free(h->pool);
        dcp_device_close(h->driver);
        dcp__free(h->ctx, h->scalars);
        dcp__free(h->ctx, h);
    }
}
