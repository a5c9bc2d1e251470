/* Tensors and storages in pickles: torch._utils._rebuild_tensor_v2 and v3, the wrappers around them, persistent ids. */
#include "format/object_builder.h"
#include "state/strided.h"

/* ---- storages ---- */

bool dcp__storage_class_find(dcp_str module, dcp_str name, dcp__storage_class *out)
{
    static const struct {
        const char *name;
        dcp__storage_class cls;
    } classes[] = {
        {"FloatStorage", {DCP_FLOAT32, 4, false}},
        {"BFloat16Storage", {DCP_BFLOAT16, 2, false}},
        {"HalfStorage", {DCP_FLOAT16, 2, false}},
        {"UntypedStorage", {DCP_DTYPE_NONE, 1, true}},
        {"LongStorage", {DCP_INT64, 8, false}},
        {"IntStorage", {DCP_INT32, 4, false}},
        {"ShortStorage", {DCP_INT16, 2, false}},
        {"CharStorage", {DCP_INT8, 1, false}},
        {"ByteStorage", {DCP_UINT8, 1, false}},
        {"BoolStorage", {DCP_BOOL, 1, false}},
        {"DoubleStorage", {DCP_FLOAT64, 8, false}},
        {"ComplexFloatStorage", {DCP_COMPLEX64, 8, false}},
        {"ComplexDoubleStorage", {DCP_COMPLEX128, 16, false}},
        {"QUInt8Storage", {DCP_DTYPE_NONE, 1, false}},
        {"QInt8Storage", {DCP_DTYPE_NONE, 1, false}},
        {"QInt32Storage", {DCP_DTYPE_NONE, 4, false}},
        {"QUInt4x2Storage", {DCP_DTYPE_NONE, 1, false}},
        {"QUInt2x4Storage", {DCP_DTYPE_NONE, 1, false}},
    };
    if (!dcp__str_is(module, "torch") && !dcp__str_is(module, "torch.cuda") && !dcp__str_is(module, "torch.storage")) {
        return false;
    }
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        if (dcp__str_is(name, classes[i].name)) {
            *out = classes[i].cls;
            return true;
        }
    }
    return false;
}

static bool same_storage(const dcp__storage_ref *a, const dcp__storage_ref *b)
{
    return a->dtype == b->dtype && a->is_untyped == b->is_untyped && a->elems == b->elems && a->elem_bytes == b->elem_bytes &&
           a->view_of == b->view_of && a->view_start == b->view_start;
}

/* Adds a storage, or finds the one of that key, which must be the same. ref->key is borrowed. */
static dcp_status add_storage(dcp__builder *b, const dcp__storage_ref *ref, uint64_t start, size_t *index, dcp_error *err)
{
    dcp__object *o = b->object;
    uint64_t found;
    if (dcp__strmap_get(&b->by_key, ref->key, &found)) {
        *index = (size_t)found;
        if (!same_storage(&o->storages[found], ref)) {
            return dcp__fail_at(err, DCP_FORMAT, start, "storage %s is named with two classes or sizes",
                                dcp__print(ref->key).text);
        }
        return DCP_OK;
    }
    void *storages = o->storages;
    bool grown = dcp__grow(b->ctx, &storages, &b->storages_cap, o->n_storages + 1, sizeof *o->storages);
    o->storages = storages;
    char *key = grown ? dcp__strndup(b->ctx, ref->key.ptr, ref->key.len) : NULL;
    if (!key) {
        return dcp__nomem(err);
    }
    *index = o->n_storages++;
    o->storages[*index] = *ref;
    o->storages[*index].key.ptr = key;
    return dcp__strmap_add(&b->by_key, o->storages[*index].key, *index, NULL, err);
}

/* A count of elements whose bytes do not overflow. */
static bool elems_of(dcp__pv v, size_t elem_bytes, uint64_t *out)
{
    int64_t n;
    uint64_t bytes;
    if (!dcp__pv_int(v, &n) || n < 0 || !dcp__mul_u64((uint64_t)n, elem_bytes, &bytes)) {
        return false;
    }
    *out = (uint64_t)n;
    return true;
}

/* (view key, start, size): a part of the storage that has `root` as its index. Legacy files only. */
static dcp_status add_view(dcp__builder *b, dcp__pv view, dcp__storage_ref ref, size_t root, uint64_t start, size_t *index,
                           dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(view, &n);
    uint64_t root_elems = ref.elems, end;
    if (n != 3 || !dcp__pv_is_str(items[0]) || !elems_of(items[1], ref.elem_bytes, &ref.view_start) ||
        !elems_of(items[2], ref.elem_bytes, &ref.elems) || !dcp__add_u64(ref.view_start, ref.elems, &end) || end > root_elems) {
        return dcp__fail_at(err, DCP_FORMAT, start, "view of storage %s is malformed or exceeds it", dcp__print(ref.key).text);
    }
    ref.key = dcp__pv_text(items[0]);
    ref.view_of = (int64_t)root;
    return add_storage(b, &ref, start, index, err);
}

/* ("storage", class, key, location, elements[, view]) */
dcp_status dcp__builder_storage(dcp__builder *b, const dcp__pobject *id, size_t *index, dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(id->args, &n);
    const dcp__pglobal *cls = n >= 2 ? dcp__pv_global(items[1]) : NULL;
    dcp__storage_class kind;
    *index = SIZE_MAX;
    if (dcp__pv_kind(id->args) != DCP__P_TUPLE || n < 5 || n > 6 || !dcp__str_is(dcp__pv_text(items[0]), "storage") || !cls ||
        !dcp__storage_class_find(cls->module, cls->name, &kind)) {
        return DCP_OK;
    }
    dcp__storage_ref ref = {.dtype = kind.dtype, .is_untyped = kind.is_untyped, .elem_bytes = kind.elem_bytes, .view_of = -1};
    ref.key = dcp__pv_text(items[2]);
    if (!dcp__pv_is_str(items[2]) || !elems_of(items[4], kind.elem_bytes, &ref.elems)) {
        return dcp__fail_at(err, DCP_FORMAT, id->start, "persistent id of a storage is malformed");
    }
    size_t root;
    dcp_status st = add_storage(b, &ref, id->start, &root, err);
    if (!st && n == 6 && items[5] != DCP__PV_NONE) {
        st = add_view(b, items[5], ref, root, id->start, &root, err);
    }
    if (!st) {
        *index = root;
    }
    return st;
}

/* ---- tensors ---- */

dcp_status dcp__check_view(dcp_dtype dtype, int ndim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset,
                           uint64_t storage_bytes, uint64_t *span_bytes, dcp_error *err)
{
    int64_t elems, span, end;
    uint64_t esz = dcp_dtype_bytes(dtype), bytes;
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] < 0 || strides[i] < 0) {
            return dcp__fail(err, DCP_FORMAT, "tensor: size %lld or stride %lld of dimension %d is negative", (long long)sizes[i],
                             (long long)strides[i], i);
        }
    }
    if (storage_offset < 0 || !dcp__elems(ndim, sizes, &elems) || !dcp__mul_u64((uint64_t)elems, esz, &bytes) ||
        !dcp__span_elems(ndim, sizes, strides, &span) || !dcp__add_i64(span, storage_offset, &end)) {
        return dcp__fail(err, DCP_FORMAT, "tensor: sizes, strides or storage offset %lld overflow", (long long)storage_offset);
    }
    if (span > 0 && (uint64_t)end > storage_bytes / esz) {
        return dcp__fail(err, DCP_FORMAT, "tensor: elements up to %lld of %llu bytes exceed its storage of %llu bytes",
                         (long long)end, (unsigned long long)esz, (unsigned long long)storage_bytes);
    }
    *span_bytes = (uint64_t)span * esz;
    return DCP_OK;
}

/* torch.save keeps expanded tensors as they are: a few bytes that stand for many. What a view adds to its storage is bounded as
 * the memory of parsers is. */
static dcp_status check_spread(const dcp_context *ctx, dcp_dtype dtype, int ndim, const int64_t *sizes, uint64_t storage_bytes,
                               dcp_error *err)
{
    uint64_t bytes = dcp_dtype_bytes(dtype); /* times the sizes, which fits */
    for (int i = 0; i < ndim; i++) {
        bytes *= (uint64_t)sizes[i];
    }
    if (bytes > storage_bytes && bytes - storage_bytes > ctx->limits.max_parse_bytes) {
        return dcp__fail(err, DCP_LIMIT, "tensor: a view of %llu bytes of a storage of %llu", (unsigned long long)bytes,
                         (unsigned long long)storage_bytes);
    }
    return DCP_OK;
}

/* A tuple, a list or a torch.Size of integers; false if it is none or too long. */
static bool get_ints(dcp__pv v, int64_t *out, int *n)
{
    const dcp__pobject *o = dcp__pv_object(v);
    size_t count = 0;
    if (o) {
        const dcp__pv *args = dcp__pv_items(o->args, &count);
        if (!dcp__pv_is_global(o->callable, "torch", "Size") || count != 1) {
            return false;
        }
        v = args[0];
    }
    if (dcp__pv_kind(v) != DCP__P_TUPLE && dcp__pv_kind(v) != DCP__P_LIST) {
        return false;
    }
    const dcp__pv *items = dcp__pv_items(v, &count);
    if (count > DCP_MAX_NDIM) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if (!dcp__pv_int(items[i], &out[i])) {
            return false;
        }
    }
    *n = (int)count;
    return true;
}

/* {"conj": True, "neg": True}; false if there is anything else, whose meaning is not known. */
static bool get_bits(dcp__pv v, dcp__lazy *lazy)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(v, &n);
    if (v == DCP__PV_NONE) {
        return true;
    }
    if (dcp__pv_kind(v) != DCP__P_DICT) {
        return false;
    }
    for (size_t i = 0; i + 1 < n; i += 2) {
        bool is_set = items[i + 1] == DCP__PV_TRUE;
        bool is_conj = dcp__str_is(dcp__pv_text(items[i]), "conj"), is_neg = dcp__str_is(dcp__pv_text(items[i]), "neg");
        if ((!is_conj && !is_neg) || (!is_set && items[i + 1] != DCP__PV_FALSE)) {
            return false;
        }
        *(is_conj ? &lazy->is_conj : &lazy->is_neg) = is_set;
    }
    return true;
}

static bool is_complex(dcp_dtype dtype)
{
    return dtype == DCP_COMPLEX64 || dtype == DCP_COMPLEX128 || dtype == DCP_COMPLEX32 || dtype == DCP_BCOMPLEX32;
}

/* NONE: quantised, or no dtype that is known. */
static dcp_dtype dtype_of(const dcp__storage_ref *ref, bool is_v3, dcp__pv named)
{
    if (!is_v3) {
        /* As torch does for an untyped storage. */
        return ref->is_untyped ? DCP_UINT8 : ref->dtype;
    }
    const dcp__pglobal *g = dcp__pv_global(named);
    return g && dcp__str_is(g->module, "torch") ? dcp_dtype_from_name(g->name) : DCP_DTYPE_NONE;
}

/* (storage, storage offset, size, stride, requires_grad, hooks[, dtype][, metadata]) */
static dcp_status build_plain(dcp__builder *b, const dcp__call *c, bool is_v3, dcp_value **out, dcp_error *err)
{
    size_t n = is_v3 ? 7 : 6, index = SIZE_MAX;
    const dcp__pobject *id = c->n_args >= n ? dcp__pv_object(c->args[0]) : NULL;
    dcp_status st = id && id->form == DCP__PFORM_PERSID ? dcp__builder_storage(b, id, &index, err) : DCP_OK;
    if (st || index == SIZE_MAX) {
        return st;
    }
    const dcp__storage_ref *ref = &b->object->storages[index];
    dcp_dtype dtype = dtype_of(ref, is_v3, c->args[n - 1]);
    dcp__lazy lazy = {.storage = (int64_t)index};
    if (dtype == DCP_DTYPE_NONE || c->n_args > n + 1 || (c->n_args > n && !get_bits(c->args[n], &lazy))) {
        return DCP_OK;
    }
    int64_t sizes[DCP_MAX_NDIM], strides[DCP_MAX_NDIM];
    int ndim, n_strides;
    if (!dcp__pv_int(c->args[1], &lazy.storage_offset) || !get_ints(c->args[2], sizes, &ndim) ||
        !get_ints(c->args[3], strides, &n_strides) || ndim != n_strides || (lazy.is_conj && !is_complex(dtype)) ||
        (lazy.is_neg && dtype == DCP_BOOL)) {
        return dcp__fail_at(err, DCP_FORMAT, c->start, "tensor: offset, sizes, strides or bits are malformed");
    }
    uint64_t span_bytes;
    st = dcp__check_view(dtype, ndim, sizes, strides, lazy.storage_offset, ref->elems * ref->elem_bytes, &span_bytes, err);
    st = st ? st : check_spread(b->ctx, dtype, ndim, sizes, ref->elems * ref->elem_bytes, err);
    if (st) {
        if (err) {
            err->offset = c->start;
        }
        return st;
    }
    dcp_tensor t = {.dtype = dtype, .ndim = ndim, .extents = sizes, .strides = strides};
    return dcp__lazy_tensor_create(b->ctx, &t, &lazy, out, err);
}

/* _rebuild_parameter(tensor, requires_grad, hooks[, state]): the tensor. */
static dcp_status build_parameter(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    if (c->n_args < 1 || !dcp__pv_object(c->args[0])) {
        return DCP_OK;
    }
    dcp_value *inner;
    dcp_status st = dcp__build_once(b, c->args[0], depth + 1, &inner, err);
    if (!st && dcp_value_kind(inner) == DCP_KIND_TENSOR) {
        *out = inner;
    } else if (!st) {
        dcp_value_free(inner);
    }
    return st;
}

/* _rebuild_from_type_v2(function, type, args, state): what function(*args) is, unless type is a class of its own. */
static dcp_status build_typed(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    const dcp__pglobal *fn = c->n_args == 4 ? dcp__pv_global(c->args[0]) : NULL;
    if (!fn || dcp__pv_kind(c->args[2]) != DCP__P_TUPLE ||
        (!dcp__pv_is_global(c->args[1], "torch", "Tensor") &&
         !dcp__pv_is_global(c->args[1], "torch.nn.parameter", "Parameter")) ||
        dcp__str_is(fn->name, "_rebuild_from_type_v2")) {
        return DCP_OK;
    }
    dcp__call inner = {.callable = fn, .start = c->start};
    inner.args = dcp__pv_items(c->args[2], &inner.n_args);
    dcp_value *made = NULL;
    dcp_status st = dcp__build_tensor(b, &inner, depth + 1, &made, err);
    if (!st) {
        *out = made;
    }
    return st;
}

dcp_status dcp__build_tensor(dcp__builder *b, const dcp__call *call, unsigned depth, dcp_value **out, dcp_error *err)
{
    dcp_str module = call->callable->module, name = call->callable->name;
    bool in_utils = dcp__str_is(module, "torch._utils"), in_tensor = dcp__str_is(module, "torch._tensor");
    if (in_utils && (dcp__str_is(name, "_rebuild_tensor_v2") || dcp__str_is(name, "_rebuild_tensor_v3"))) {
        return build_plain(b, call, name.ptr[name.len - 1] == '3', out, err);
    }
    if (in_utils && (dcp__str_is(name, "_rebuild_parameter") || dcp__str_is(name, "_rebuild_parameter_with_state"))) {
        return build_parameter(b, call, depth, out, err);
    }
    return in_tensor && dcp__str_is(name, "_rebuild_from_type_v2") ? build_typed(b, call, depth, out, err) : DCP_OK;
}
