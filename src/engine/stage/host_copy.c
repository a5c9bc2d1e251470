/* Two states of one structure: comparing it, and copying the elements of one into the other. */
#include "dcp/host.h"

#include <string.h>

#include "engine/stage/tensor_pairs.h"
#include "state/children.h"
#include "state/numbers.h"
#include "state/strided.h"
#include "state/value.h"

/* A walk over two trees side by side. */
typedef struct walk {
    dcp_host_copy_opts opts;
    dcp__tensor_pairs *pairs; /* what is to be copied; NULL: only shapes and dtypes are of interest */
    uint32_t max_depth;
    uint64_t visits_left;
} walk;

static walk walk_of(const dcp_context *ctx, const dcp_host_copy_opts *opts, dcp__tensor_pairs *pairs)
{
    return (walk){*opts, pairs, dcp__depth_limit(ctx), dcp__visit_limit(ctx)};
}

static dcp_status compare(walk *w, const dcp_value *a, const dcp_value *b, uint32_t depth, dcp_error *err);

/* ---- tensors ---- */

static bool is_same_shape(int ndim_a, const int64_t *a, int ndim_b, const int64_t *b)
{
    return ndim_a == ndim_b && (ndim_a == 0 || memcmp(a, b, (size_t)ndim_a * sizeof *a) == 0);
}

static dcp_status compare_dtypes(const walk *w, dcp_dtype a, dcp_dtype b, dcp_error *err)
{
    if (a == b || (w->opts.allow_cast && dcp__can_cast(a, b))) {
        return DCP_OK;
    }
    return dcp__fail(err, DCP_MISMATCH, "%s against %s%s", dcp_dtype_name(a), dcp_dtype_name(b),
                     w->opts.allow_cast ? ", for which there is no cast" : "");
}

static dcp_status note_pair(const walk *w, const dcp_tensor *from, const dcp_tensor *to, dcp_error *err)
{
    int64_t elems;
    if (!w->pairs || (dcp__elems(from->ndim, from->extents, &elems) && elems == 0)) {
        return DCP_OK;
    }
    if (!from->data || !to->data) {
        return dcp__fail(err, DCP_ARG, "the tensor of the %s has no memory", from->data ? "target" : "source");
    }
    if (to->device.type != DCP_DEVICE_CPU) {
        return dcp__fail(err, DCP_UNSUPPORTED, "the target lies on %s:%d instead of in host memory",
                         dcp_device_type_name(to->device.type), to->device.index);
    }
    return dcp__tensor_pairs_add(w->pairs, from, to, err);
}

static dcp_status compare_tensors(const walk *w, const dcp_tensor *a, const dcp_tensor *b, dcp_error *err)
{
    if (!is_same_shape(a->ndim, a->extents, b->ndim, b->extents)) {
        return dcp__fail(err, DCP_MISMATCH, "a tensor of %s against one of %s", dcp__print_shape(a->ndim, a->extents).text,
                         dcp__print_shape(b->ndim, b->extents).text);
    }
    dcp_status status = compare_dtypes(w, a->dtype, b->dtype, err);
    return status == DCP_OK ? note_pair(w, a, b, err) : status;
}

static dcp_status compare_chunk(const walk *w, const dcp_value *a, const dcp_value *b, size_t i, dcp_error *err)
{
    dcp_tensor x, y;
    dcp_box at_x, at_y;
    if (!dcp_sharded_chunk(a, i, &x, &at_x) || !dcp_sharded_chunk(b, i, &y, &at_y) ||
        !is_same_shape(x.ndim, at_x.offsets, y.ndim, at_y.offsets)) {
        return dcp__fail(err, DCP_MISMATCH, "chunk %zu lies elsewhere", i);
    }
    return compare_tensors(w, &x, &y, err);
}

static dcp_status compare_sharded(const walk *w, const dcp_value *a, const dcp_value *b, dcp_error *err)
{
    int ndim_a = 0, ndim_b = 0;
    const int64_t *x = NULL, *y = NULL;
    dcp_sharded_shape(a, &ndim_a, &x);
    dcp_sharded_shape(b, &ndim_b, &y);
    if (!is_same_shape(ndim_a, x, ndim_b, y) || dcp_value_count(a) != dcp_value_count(b)) {
        return dcp__fail(err, DCP_MISMATCH, "a sharded tensor of %s in %zu chunks against one of %s in %zu",
                         dcp__print_shape(ndim_a, x).text, dcp_value_count(a), dcp__print_shape(ndim_b, y).text,
                         dcp_value_count(b));
    }
    dcp_status status = compare_dtypes(w, dcp_value_dtype(a), dcp_value_dtype(b), err);
    for (size_t i = 0; i < dcp_value_count(a) && status == DCP_OK; i++) {
        status = compare_chunk(w, a, b, i, err);
    }
    return status;
}

/* ---- containers ---- */

/* Sets have no order by which their elements could be told: they are values. */
static bool is_sequence(const dcp_value *v)
{
    dcp_kind kind = dcp_value_kind(v);
    return kind == DCP_KIND_LIST || kind == DCP_KIND_TUPLE || kind == DCP_KIND_SIZE;
}

static dcp_value *companion_of(const dcp_value *a, size_t i, const dcp_value *b)
{
    return dcp__has_keys(a) ? dcp_dict_get(b, dcp_dict_key(a, i)) : dcp_value_at(b, i);
}

static dcp_status in_place(const dcp_value *a, size_t i, dcp_status status, dcp_error *err)
{
    dcp_key key = dcp__has_keys(a) ? dcp_dict_key(a, i) : dcp_key_int((int64_t)i);
    return key.is_int ? dcp__prefix(err, status, "in %lld: ", (long long)key.integer)
                      : dcp__prefix(err, status, "in \"%s\": ", dcp__print(key.string).text);
}

static dcp_status compare_containers(walk *w, const dcp_value *a, const dcp_value *b, uint32_t depth, dcp_error *err)
{
    if (dcp_value_count(a) != dcp_value_count(b)) {
        return dcp__fail(err, DCP_MISMATCH, "%zu elements against %zu", dcp_value_count(a), dcp_value_count(b));
    }
    for (size_t i = 0; i < dcp_value_count(a); i++) {
        const dcp_value *other = companion_of(a, i, b);
        dcp_status status = other ? compare(w, dcp_value_at(a, i), other, depth + 1, err)
                                  : dcp__fail(err, DCP_MISMATCH, "there is nothing of that name in the target");
        if (status != DCP_OK) {
            return in_place(a, i, status, err);
        }
    }
    return DCP_OK;
}

/* ---- all ---- */

static bool is_plain(const dcp_value *v)
{
    switch (dcp_value_kind(v)) {
    case DCP_KIND_OPAQUE:
    case DCP_KIND_RECORD:
    case DCP_KIND_SET:
    case DCP_KIND_FROZENSET:
    case DCP_KIND_DTYPE:
    case DCP_KIND_DEVICE: return false;
    default: return true;
    }
}

/* Values of these kinds have counterparts. */
static bool is_structure(const dcp_value *v)
{
    return dcp__has_keys(v) || is_sequence(v) || dcp_value_kind(v) == DCP_KIND_TENSOR || dcp_value_kind(v) == DCP_KIND_SHARDED;
}

static dcp_status compare(walk *w, const dcp_value *a, const dcp_value *b, uint32_t depth, dcp_error *err)
{
    if (depth > w->max_depth || w->visits_left-- == 0) {
        return dcp__fail(err, DCP_LIMIT, "the state is nested too deeply, or too often in itself");
    }
    if (w->opts.check_types && !is_plain(a)) {
        return dcp__fail(err, DCP_ARG, "a value that is no tensor, number, text, bytes, none or container");
    }
    if ((is_structure(a) || is_structure(b)) && dcp_value_kind(a) != dcp_value_kind(b)) {
        return dcp__fail(err, DCP_MISMATCH, "the values are of different kinds");
    }
    if (dcp_value_kind(a) == DCP_KIND_TENSOR) {
        return compare_tensors(w, dcp_value_tensor(a), dcp_value_tensor(b), err);
    }
    if (dcp_value_kind(a) == DCP_KIND_SHARDED) {
        return compare_sharded(w, a, b, err);
    }
    return is_structure(a) ? compare_containers(w, a, b, depth, err) : DCP_OK;
}

bool dcp_host_is_similar(const dcp_value *a, const dcp_value *b)
{
    const dcp_host_copy_opts opts = DCP_HOST_COPY_OPTS_INIT;
    walk w = walk_of(dcp__context(NULL), &opts, NULL);
    return a && b && compare(&w, a, b, 0, NULL) == DCP_OK;
}

/* ---- the tree of both ---- */

/* Children of `from` in order, and what stands for them. */
typedef struct merging {
    dcp_context *ctx;
    const dcp_value *from, *to;
    size_t next;
} merging;

static dcp_status merge(dcp_context *ctx, dcp_value *from, dcp_value *to, dcp_value **out, dcp_error *err);

static dcp_status merge_child(void *user, dcp_value *child, dcp_value **out, dcp_error *err)
{
    merging *m = user;
    return merge(m->ctx, child, companion_of(m->from, m->next++, m->to), out, err);
}

/* They have been compared: depth and number of visits are known to be within bounds. */
static dcp_status merge(dcp_context *ctx, dcp_value *from, dcp_value *to, dcp_value **out, dcp_error *err)
{
    if (dcp__has_keys(from) || is_sequence(from)) {
        return dcp__map_children(ctx, from, merge_child, &(merging){ctx, from, to, 0}, out, err);
    }
    *out = dcp_value_retain(is_structure(from) ? to : from);
    return DCP_OK;
}

dcp_status dcp_host_copy(dcp_context *ctx, dcp_value *from, dcp_value *to, const dcp_host_copy_opts *given, dcp_value **out,
                         dcp_error *err)
{
    dcp_host_copy_opts opts = DCP_HOST_COPY_OPTS_INIT;
    if (!from || !to || (given && given->struct_size != sizeof *given)) {
        return dcp__fail(err, DCP_ARG, "copy: no %s", !from ? "source" : !to ? "target" : "options of this version");
    }
    ctx = dcp__context(ctx);
    opts = given ? *given : opts;
    dcp__tensor_pairs pairs = {.ctx = ctx};
    dcp_value *merged = NULL;
    walk w = walk_of(ctx, &opts, &pairs);
    dcp_status status = compare(&w, from, to, 0, err);
    status = status == DCP_OK && out ? merge(ctx, from, to, &merged, err) : status;
    status = status == DCP_OK ? dcp__tensor_pairs_copy(&pairs, opts.stream, err) : status;
    dcp__tensor_pairs_reset(&pairs);
    if (status != DCP_OK) {
        dcp_value_free(merged);
        return status;
    }
    if (out) {
        *out = merged;
    }
    return DCP_OK;
}
