/* Equality of values. Needs no memory, so that it cannot fail: shared parts are remembered in a small table that forgets, sets of
 * another order are compared pair by pair. */
#include <math.h>
#include <string.h>

#include "base/hash.h"
#include "state/node.h"
#include "state/strided.h"

/* Deeper trees are not equal to anything but themselves; no parser makes them. */
#define MAX_DEPTH 4096

#define N_REMEMBERED 256

typedef struct pair {
    const dcp_value *a, *b;
} pair;

typedef struct comparison {
    pair equal[N_REMEMBERED]; /* of containers with several references, by a hash of their addresses */
} comparison;

static bool equal(comparison *c, const dcp_value *a, const dcp_value *b, int depth);

/* ---- leaves ---- */

static bool same_str(dcp_str a, dcp_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

/* 0.0 and -0.0 differ; all NaN are one. */
static bool same_double(double a, double b)
{
    return (a != a && b != b) || (a == b && !signbit(a) == !signbit(b));
}

static bool same_numbers(const int64_t *a, const int64_t *b, int n)
{
    return n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* ---- tensors ---- */

typedef struct view {
    const char *data;
    int64_t strides[DCP_MAX_NDIM];
} view;

static view view_of(const dcp_tensor *t)
{
    view v = {.data = t->data};
    if (t->strides) {
        memcpy(v.strides, t->strides, (size_t)t->ndim * sizeof *t->strides);
    } else {
        dcp__row_major(t->ndim, t->extents, v.strides);
    }
    return v;
}

/* Bytes of each innermost run that is contiguous on both sides, and the number of dimensions around it. */
static int outer_dims(const dcp_tensor *shape, const view *a, const view *b, size_t *run_bytes)
{
    int ndim = shape->ndim;
    int64_t run = 1;
    while (ndim && (shape->extents[ndim - 1] == 1 || (a->strides[ndim - 1] == run && b->strides[ndim - 1] == run))) {
        run *= shape->extents[--ndim];
    }
    *run_bytes = (size_t)run * dcp_dtype_bytes(shape->dtype);
    return ndim;
}

static bool same_elements(const dcp_tensor *x, const dcp_tensor *y)
{
    view a = view_of(x), b = view_of(y);
    int64_t index[DCP_MAX_NDIM] = {0}, elem = (int64_t)dcp_dtype_bytes(x->dtype);
    size_t run_bytes;
    int around = outer_dims(x, &a, &b, &run_bytes);
    for (;;) {
        if (memcmp(a.data, b.data, run_bytes) != 0) {
            return false;
        }
        int i = around - 1;
        for (; i >= 0; i--) {
            a.data += a.strides[i] * elem;
            b.data += b.strides[i] * elem;
            if (++index[i] < x->extents[i]) {
                break;
            }
            a.data -= a.strides[i] * elem * x->extents[i];
            b.data -= b.strides[i] * elem * x->extents[i];
            index[i] = 0;
        }
        if (i < 0) {
            return true;
        }
    }
}

/* Elements that cannot be looked at here, because they were not read or lie on a device, are the same if their place is. */
static bool same_tensor(const dcp_tensor *a, const dcp_tensor *b)
{
    int64_t elems = 0;
    if (a->dtype != b->dtype || a->ndim != b->ndim || !same_numbers(a->extents, b->extents, a->ndim)) {
        return false;
    }
    if (!dcp__elems(a->ndim, a->extents, &elems) || elems == 0) {
        return elems == 0;
    }
    if (a->data && b->data && a->device.type == DCP_DEVICE_CPU && b->device.type == DCP_DEVICE_CPU) {
        return same_elements(a, b);
    }
    return a->data && a->data == b->data && a->device.type == b->device.type && a->device.index == b->device.index &&
           dcp__is_row_major(a->ndim, a->extents, a->strides) && dcp__is_row_major(b->ndim, b->extents, b->strides);
}

static bool same_sharded(const dcp_value *a, const dcp_value *b)
{
    const dcp__sharded_node *x = (const dcp__sharded_node *)a, *y = (const dcp__sharded_node *)b;
    if (x->dtype != y->dtype || x->ndim != y->ndim || x->n_chunks != y->n_chunks ||
        !same_numbers(x->extents, y->extents, x->ndim)) {
        return false;
    }
    for (size_t i = 0; i < x->n_chunks; i++) {
        size_t at = i * (size_t)x->ndim;
        if (!same_numbers(x->offsets + at, y->offsets + at, x->ndim) || !same_tensor(&x->chunks[i], &y->chunks[i])) {
            return false;
        }
    }
    return true;
}

/* ---- containers ---- */

static bool same_in_order(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    for (size_t i = 0; i < dcp_value_count(a); i++) {
        if (!equal(c, dcp_value_at(a, i), dcp_value_at(b, i), depth)) {
            return false;
        }
    }
    return true;
}

static bool contains(comparison *c, const dcp_value *set, const dcp_value *v, int depth)
{
    for (size_t i = 0; i < dcp_value_count(set); i++) {
        if (equal(c, dcp_value_at(set, i), v, depth)) {
            return true;
        }
    }
    return false;
}

/* Elements of a set differ, so one direction would do; a reader of hostile files may have let equal ones in. */
static bool same_set(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    if (same_in_order(c, a, b, depth)) {
        return true;
    }
    for (size_t i = 0; i < dcp_value_count(a); i++) {
        if (!contains(c, b, dcp_value_at(a, i), depth) || !contains(c, a, dcp_value_at(b, i), depth)) {
            return false;
        }
    }
    return true;
}

static bool same_key(dcp_key a, dcp_key b)
{
    return a.is_int == b.is_int && (a.is_int ? a.integer == b.integer : same_str(a.string, b.string));
}

static bool same_dict(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    for (size_t i = 0; i < dcp_value_count(a); i++) {
        dcp_key key = dcp_dict_key(a, i);
        if (a->kind == DCP_KIND_ORDERED_DICT && !same_key(key, dcp_dict_key(b, i))) {
            return false;
        }
        const dcp_value *other = dcp_dict_get(b, key);
        if (!other || !equal(c, dcp_value_at(a, i), other, depth)) {
            return false;
        }
    }
    return true;
}

static bool same_opaque(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    const dcp__opaque *x = dcp__value_opaque(a), *y = dcp__value_opaque(b);
    if (x->form != y->form || !same_str(x->module, y->module) || !same_str(x->name, y->name)) {
        return false;
    }
    const dcp_value *const parts[][2] = {{x->callable, y->callable}, {x->args, y->args},   {x->kwargs, y->kwargs},
                                         {x->state, y->state},       {x->items, y->items}, {x->pairs, y->pairs}};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const dcp_value *p = parts[i][0], *q = parts[i][1];
        if (p != q && (!p || !q || !equal(c, p, q, depth))) {
            return false;
        }
    }
    return true;
}

/* ---- all kinds ---- */

static pair *remembered(comparison *c, const dcp_value *a, const dcp_value *b)
{
    const dcp_value *key[2] = {a, b};
    return &c->equal[dcp__xxh3_64(key, sizeof key) % N_REMEMBERED];
}

static bool is_shared(const dcp_value *v)
{
    return __atomic_load_n(&v->refs, __ATOMIC_RELAXED) > 1;
}

static bool same_container(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    if (dcp_value_count(a) != dcp_value_count(b)) {
        return false;
    }
    switch (dcp_value_kind(a)) {
    case DCP_KIND_SET:
    case DCP_KIND_FROZENSET: return same_set(c, a, b, depth);
    case DCP_KIND_DICT:
    case DCP_KIND_ORDERED_DICT: return same_dict(c, a, b, depth);
    case DCP_KIND_OPAQUE: return same_opaque(c, a, b, depth);
    default: return same_in_order(c, a, b, depth);
    }
}

static bool equal(comparison *c, const dcp_value *a, const dcp_value *b, int depth)
{
    if (a == b) {
        return true;
    }
    if (!a || !b || a->kind != b->kind) {
        return false;
    }
    switch (dcp_value_kind(a)) {
    case DCP_KIND_NONE: return true;
    case DCP_KIND_BOOL: return dcp_value_bool(a) == dcp_value_bool(b);
    case DCP_KIND_INT: return same_str(dcp_value_bigint(a), dcp_value_bigint(b));
    case DCP_KIND_FLOAT:
    case DCP_KIND_COMPLEX:
        return same_double(dcp_value_float(a), dcp_value_float(b)) && same_double(dcp_value_imag(a), dcp_value_imag(b));
    case DCP_KIND_STR:
    case DCP_KIND_BYTES:
    case DCP_KIND_BYTEARRAY:
    case DCP_KIND_RECORD:
    case DCP_KIND_DEVICE: return same_str(dcp_value_str(a), dcp_value_str(b));
    case DCP_KIND_DTYPE: return dcp_value_dtype(a) == dcp_value_dtype(b);
    case DCP_KIND_TENSOR: return same_tensor(dcp_value_tensor(a), dcp_value_tensor(b));
    case DCP_KIND_SHARDED: return same_sharded(a, b);
    default: break;
    }
    bool is_worth_remembering = is_shared(a) && is_shared(b);
    pair *known = is_worth_remembering ? remembered(c, a, b) : NULL;
    if (known && known->a == a && known->b == b) {
        return true;
    }
    if (depth >= MAX_DEPTH || !same_container(c, a, b, depth + 1)) {
        return false;
    }
    if (known) {
        *known = (pair){a, b};
    }
    return true;
}

bool dcp_value_equal(const dcp_value *a, const dcp_value *b)
{
    comparison c = {0};
    return equal(&c, a, b, 0);
}
