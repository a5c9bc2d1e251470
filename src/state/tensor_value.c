/* Tensors and sharded tensors as values. */
#include <string.h>

#include "base/checked.h"
#include "state/node.h"
#include "state/strided.h"

#define DATA_ALIGN 64

/* Size in bytes of a tensor's elements, after checking all that the struct says. */
static dcp_status check_tensor(const dcp_tensor *t, int64_t *bytes, dcp_error *err)
{
    int64_t elems, span;
    dcp_status status = dcp_tensor_elems(t, &elems, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!dcp_dtype_bytes(t->dtype)) {
        return dcp__fail(err, DCP_ARG, "tensor: no dtype has the number %d", (int)t->dtype);
    }
    for (int i = 0; t->strides && i < t->ndim; i++) {
        if (t->strides[i] < 0) {
            return dcp__fail(err, DCP_ARG, "tensor: stride %lld of dimension %d is negative", (long long)t->strides[i], i);
        }
    }
    int64_t elem_bytes = (int64_t)dcp_dtype_bytes(t->dtype), span_bytes;
    if (!dcp__span_elems(t->ndim, t->extents, t->strides, &span) || !dcp__mul_i64(span, elem_bytes, &span_bytes) ||
        !dcp__mul_i64(elems, elem_bytes, bytes)) {
        return dcp__fail(err, DCP_LIMIT, "tensor: its memory exceeds 63 bits");
    }
    return DCP_OK;
}

static bool has_elements(const dcp_tensor *t)
{
    int64_t elems;
    return dcp__elems(t->ndim, t->extents, &elems) && elems > 0;
}

static void copy_numbers(int64_t *dst, const int64_t *src, int n)
{
    if (n) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
    }
}

/* A node with a copy of the shape. */
static dcp__tensor_node *node_of(dcp_context *ctx, const dcp_tensor *t)
{
    size_t numbers = (size_t)t->ndim * (t->strides ? 2 : 1);
    dcp__tensor_node *n = dcp__node_alloc(ctx, DCP_KIND_TENSOR, sizeof *n + numbers * sizeof n->shape[0]);
    if (!n) {
        return NULL;
    }
    n->tensor = *t;
    n->lazy = (dcp__lazy){.storage = -1};
    n->owned = NULL;
    n->tensor.extents = n->shape;
    copy_numbers(n->shape, t->extents, t->ndim);
    if (t->strides) {
        n->tensor.strides = n->shape + t->ndim;
        copy_numbers(n->shape + t->ndim, t->strides, t->ndim);
    }
    return n;
}

dcp_status dcp_tensor_create(dcp_context *ctx, const dcp_tensor *t, dcp_value **out, dcp_error *err)
{
    int64_t bytes;
    dcp_status status = check_tensor(t, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    if (bytes && !t->data) {
        return dcp__fail(err, DCP_ARG, "tensor: %lld bytes at no address", (long long)bytes);
    }
    dcp__tensor_node *n = node_of(dcp__context(ctx), t);
    if (!n) {
        return dcp__nomem(err);
    }
    *out = &n->head;
    return DCP_OK;
}

/* Gives the node row-major memory of its own. */
static dcp_status own_memory(dcp__tensor_node *n, int64_t bytes, dcp_error *err)
{
    void *data = dcp__alloc_aligned(n->head.ctx, DATA_ALIGN, (size_t)bytes);
    if (!data) {
        return dcp__fail(err, DCP_NOMEM, "out of memory for a tensor of %lld bytes", (long long)bytes);
    }
    n->owned = data;
    n->tensor.data = data;
    n->tensor.strides = NULL;
    n->tensor.device = (dcp_device){DCP_DEVICE_CPU, 0};
    n->lazy = (dcp__lazy){.storage = -1};
    return DCP_OK;
}

dcp_status dcp_tensor_alloc(dcp_context *ctx, dcp_dtype dtype, int ndim, const int64_t *extents, dcp_value **out, dcp_error *err)
{
    dcp_tensor t = dcp_tensor_make(dtype, ndim, extents, NULL);
    int64_t bytes;
    dcp_status status = check_tensor(&t, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__tensor_node *n = node_of(dcp__context(ctx), &t);
    if (!n) {
        return dcp__nomem(err);
    }
    status = own_memory(n, bytes, err);
    if (status != DCP_OK) {
        dcp_value_free(&n->head);
        return status;
    }
    *out = &n->head;
    return DCP_OK;
}

const dcp_tensor *dcp_value_tensor(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_TENSOR) ? &((const dcp__tensor_node *)v)->tensor : NULL;
}

/* ---- tensors that are not read ---- */

dcp_status dcp__lazy_tensor_create(dcp_context *ctx, const dcp_tensor *t, const dcp__lazy *lazy, dcp_value **out, dcp_error *err)
{
    int64_t bytes;
    dcp_status status = check_tensor(t, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__tensor_node *n = node_of(dcp__context(ctx), t);
    if (!n) {
        return dcp__nomem(err);
    }
    n->tensor.data = NULL;
    n->lazy = *lazy;
    *out = &n->head;
    return DCP_OK;
}

const dcp__lazy *dcp__value_lazy(const dcp_value *v)
{
    if (!dcp__is_kind(v, DCP_KIND_TENSOR)) {
        return NULL;
    }
    const dcp__lazy *lazy = &((const dcp__tensor_node *)v)->lazy;
    return lazy->storage >= 0 ? lazy : NULL;
}

dcp_status dcp__lazy_tensor_materialize(dcp_value *v, dcp_error *err)
{
    if (!dcp__value_lazy(v)) {
        return dcp__fail(err, DCP_STATE, "materialize: not a lazy tensor");
    }
    dcp__tensor_node *n = (dcp__tensor_node *)v;
    dcp_tensor dense = dcp_tensor_make(n->tensor.dtype, n->tensor.ndim, n->tensor.extents, NULL);
    int64_t bytes;
    dcp_status status = check_tensor(&dense, &bytes, err); /* a stride of 0 may have hidden how large it is */
    return status == DCP_OK ? own_memory(n, bytes, err) : status;
}

/* ---- sharded tensors ---- */

static dcp_status check_chunk(const dcp_tensor *whole, size_t i, const dcp_tensor *chunk, const dcp_box *box, dcp_error *err)
{
    int64_t bytes;
    if (chunk->dtype != whole->dtype || chunk->ndim != whole->ndim) {
        return dcp__fail(err, DCP_MISMATCH, "chunk %zu: %s with %d dimensions in a tensor of %s with %d", i,
                         dcp_dtype_name(chunk->dtype), chunk->ndim, dcp_dtype_name(whole->dtype), whole->ndim);
    }
    dcp_status status = check_tensor(chunk, &bytes, err);
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "chunk %zu: ", i);
    }
    if (whole->ndim && (!box->offsets || !box->sizes)) {
        return dcp__fail(err, DCP_ARG, "chunk %zu: no offsets or sizes", i);
    }
    for (int d = 0; d < whole->ndim; d++) {
        int64_t offset = box->offsets[d], size = box->sizes[d];
        if (size != chunk->extents[d]) {
            return dcp__fail(err, DCP_MISMATCH, "chunk %zu: extent %lld of dimension %d, but its box has %lld", i,
                             (long long)chunk->extents[d], d, (long long)size);
        }
        if (offset < 0 || offset > whole->extents[d] || size > whole->extents[d] - offset) {
            return dcp__fail(err, DCP_ARG, "chunk %zu: offset %lld and size %lld in dimension %d exceed extent %lld", i,
                             (long long)offset, (long long)size, d, (long long)whole->extents[d]);
        }
    }
    if (!chunk->data && has_elements(chunk)) {
        return dcp__fail(err, DCP_ARG, "chunk %zu: %lld bytes at no address", i, (long long)bytes);
    }
    return DCP_OK;
}

/* One block: the node, its numbers (global extents; offsets; extents and strides of each chunk), the chunks. */
static dcp__sharded_node *sharded_alloc(dcp_context *ctx, int ndim, size_t n_chunks)
{
    size_t per_chunk = 3 * (size_t)ndim * sizeof(int64_t) + sizeof(dcp_tensor), bytes;
    if (!dcp__mul_size(n_chunks, per_chunk, &bytes) ||
        !dcp__add_size(bytes, sizeof(dcp__sharded_node) + (size_t)ndim * sizeof(int64_t), &bytes)) {
        return NULL;
    }
    return dcp__node_alloc(ctx, DCP_KIND_SHARDED, bytes);
}

static void fill_sharded(dcp__sharded_node *n, const dcp_tensor *whole, size_t n_chunks, const dcp_tensor *chunks,
                         const dcp_box *boxes)
{
    size_t ndim = (size_t)whole->ndim;
    int64_t *extents = n->numbers, *offsets = extents + ndim, *shapes = offsets + n_chunks * ndim;
    dcp_tensor *copies = (dcp_tensor *)(void *)(shapes + 2 * n_chunks * ndim);
    n->dtype = whole->dtype;
    n->ndim = whole->ndim;
    n->n_chunks = n_chunks;
    n->extents = extents;
    n->offsets = offsets;
    n->chunks = copies;
    copy_numbers(extents, whole->extents, whole->ndim);
    for (size_t i = 0; i < n_chunks; i++, shapes += 2 * ndim) {
        copy_numbers(offsets + i * ndim, boxes[i].offsets, whole->ndim);
        copy_numbers(shapes, chunks[i].extents, whole->ndim);
        copies[i] = chunks[i];
        copies[i].extents = shapes;
        if (chunks[i].strides) {
            copy_numbers(shapes + ndim, chunks[i].strides, whole->ndim);
            copies[i].strides = shapes + ndim;
        }
    }
}

dcp_status dcp_sharded_create(dcp_context *ctx, dcp_dtype dtype, int ndim, const int64_t *global_extents, size_t n_chunks,
                              const dcp_tensor *chunks, const dcp_box *boxes, dcp_value **out, dcp_error *err)
{
    dcp_tensor whole = dcp_tensor_make(dtype, ndim, global_extents, NULL);
    int64_t bytes;
    dcp_status status = check_tensor(&whole, &bytes, err);
    if (status == DCP_OK && n_chunks && (!chunks || !boxes)) {
        status = dcp__fail(err, DCP_ARG, "sharded tensor: %zu chunks at no address", n_chunks);
    }
    for (size_t i = 0; status == DCP_OK && i < n_chunks; i++) {
        status = check_chunk(&whole, i, &chunks[i], &boxes[i], err);
    }
    if (status != DCP_OK) {
        return status;
    }
    dcp__sharded_node *n = sharded_alloc(dcp__context(ctx), ndim, n_chunks);
    if (!n) {
        return dcp__nomem(err);
    }
    fill_sharded(n, &whole, n_chunks, chunks, boxes);
    *out = &n->head;
    return DCP_OK;
}

bool dcp_sharded_chunk(const dcp_value *v, size_t i, dcp_tensor *chunk, dcp_box *box)
{
    const dcp__sharded_node *n = (const dcp__sharded_node *)v;
    if (!dcp__is_kind(v, DCP_KIND_SHARDED) || i >= n->n_chunks) {
        return false;
    }
    *chunk = n->chunks[i];
    *box = (dcp_box){n->offsets + i * (size_t)n->ndim, n->chunks[i].extents};
    return true;
}

bool dcp_sharded_shape(const dcp_value *v, int *ndim, const int64_t **extents)
{
    if (!dcp__is_kind(v, DCP_KIND_SHARDED)) {
        return false;
    }
    *ndim = ((const dcp__sharded_node *)v)->ndim;
    *extents = ((const dcp__sharded_node *)v)->extents;
    return true;
}
