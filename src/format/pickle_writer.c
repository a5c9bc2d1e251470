#include "format/pickle_writer.h"

#include <stdio.h>

#include "base/checked.h"
#include "base/hash.h"
#include "format/pickle_emit.h"
#include "format/pickle_ops.h"
#include "format/write_memo.h"
#include "state/strided.h"
#include "state/value.h"

#define BATCH 1000 /* elements of one APPENDS or SETITEMS */

typedef struct writer {
    dcp__buf *out;
    dcp__wmemo memo;
    bool has_memo; /* false: nothing comes twice, the memo is only counted */
    uint32_t n_memo;
    uint32_t depth, max_depth;
    dcp__write_storage *storages;
    uint32_t *keys; /* memo index of each storage's key, NOT_YET before it is written */
    size_t n_storages, cap_storages, cap_keys;
    dcp__wmemo memory; /* hash of a tensor's memory and shape -> storage */
    dcp_error *err;
} writer;

#define NOT_YET UINT32_MAX

static dcp_status write_value(writer *w, const dcp_value *v);

static dcp_str str_of(const char *text)
{
    return (dcp_str){text, strlen(text)};
}

/* ---- memo ---- */

static bool fetch(writer *w, const dcp__wmemo_key *key)
{
    uint32_t index;
    if (!w->has_memo || !dcp__wmemo_get(&w->memo, key, &index)) {
        return false;
    }
    dcp__emit_binget(w->out, index);
    return true;
}

/* BINPUT of what was just written, which nothing will ask for again. */
static void put_anonymous(writer *w)
{
    dcp__emit_binput(w->out, w->n_memo++);
}

static void put(writer *w, const dcp__wmemo_key *key)
{
    if (w->has_memo && !dcp__wmemo_put(&w->memo, key, w->n_memo)) {
        w->out->failed = true;
    }
    put_anonymous(w);
}

static void put_value(writer *w, const dcp_value *v)
{
    put(w, &(dcp__wmemo_key){.identity = v});
}

/* ---- pieces ---- */

static void op(writer *w, uint8_t opcode)
{
    dcp__buf_put_byte(w->out, opcode);
}

static void reduce(writer *w, const dcp_value *v)
{
    op(w, OP_REDUCE);
    put_value(w, v);
}

static dcp_status write_fresh_text(writer *w, dcp_str text)
{
    if (text.len > UINT32_MAX) {
        return dcp__fail(w->err, DCP_LIMIT, "text of %zu bytes in a pickle", text.len);
    }
    dcp__emit_op(w->out, OP_BINUNICODE, text.len, 4);
    dcp__buf_put(w->out, text.ptr, text.len);
    return DCP_OK;
}

/* Python fetches a string if it is the same object. Equal ones nearly always are: literals, keys and single characters are
 * interned. Fetching all equal ones is as right, and matches best. */
static dcp_status write_text(writer *w, dcp_str text)
{
    dcp__wmemo_key key = {.a = text};
    if (fetch(w, &key)) {
        return DCP_OK;
    }
    dcp_status status = write_fresh_text(w, text);
    if (status == DCP_OK) {
        put(w, &key);
    }
    return status;
}

static void write_word(writer *w, const char *word)
{
    (void)write_text(w, str_of(word)); /* short: cannot fail */
}

static void write_global(writer *w, dcp_str module, dcp_str name)
{
    dcp__wmemo_key key = {.a = module, .b = name};
    if (!fetch(w, &key)) {
        op(w, OP_GLOBAL);
        dcp__buf_put(w->out, module.ptr, module.len);
        op(w, '\n');
        dcp__buf_put(w->out, name.ptr, name.len);
        op(w, '\n');
        put(w, &key);
    }
}

static void write_known(writer *w, const char *module, const char *name)
{
    write_global(w, str_of(module), str_of(name));
}

static void write_float(writer *w, double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    dcp__emit_op(w->out, OP_BINFLOAT, __builtin_bswap64(bits), 8);
}

/* A tuple that no value stands for. */
static void write_ints(writer *w, int n, const int64_t *ints)
{
    static const uint8_t ops[] = {0, OP_TUPLE1, OP_TUPLE2, OP_TUPLE3};
    if (n == 0) {
        op(w, OP_EMPTY_TUPLE);
        return;
    }
    if (n > 3) {
        op(w, OP_MARK);
    }
    for (int i = 0; i < n; i++) {
        dcp__emit_int(w->out, ints[i]);
    }
    op(w, n > 3 ? OP_TUPLE : ops[n]);
    put_anonymous(w);
}

/* ---- tensors ---- */

/* Typed storage of the dtypes that had one before PyTorch 2.1; newer ones have none and are rebuilt by _rebuild_tensor_v3. */
static const char *storage_class(dcp_dtype dtype)
{
    switch (dtype) {
    case DCP_FLOAT32: return "FloatStorage";
    case DCP_FLOAT64: return "DoubleStorage";
    case DCP_FLOAT16: return "HalfStorage";
    case DCP_BFLOAT16: return "BFloat16Storage";
    case DCP_INT8: return "CharStorage";
    case DCP_UINT8: return "ByteStorage";
    case DCP_INT16: return "ShortStorage";
    case DCP_INT32: return "IntStorage";
    case DCP_INT64: return "LongStorage";
    case DCP_BOOL: return "BoolStorage";
    case DCP_COMPLEX64: return "ComplexFloatStorage";
    case DCP_COMPLEX128: return "ComplexDoubleStorage";
    default: return NULL;
    }
}

/* Storage i's key. Python keeps single characters as one object each, so these are words; longer ones belong to the storage. */
static void write_key(writer *w, size_t i)
{
    static const char digits[] = "0\0001\0002\0003\0004\0005\0006\0007\0008\0009";
    if (i < 10) {
        write_word(w, digits + 2 * i);
    } else if (w->keys[i] != NOT_YET) {
        dcp__emit_binget(w->out, w->keys[i]);
    } else {
        char text[24];
        (void)write_fresh_text(w, (dcp_str){text, (size_t)snprintf(text, sizeof text, "%zu", i)});
        w->keys[i] = w->n_memo;
        put_anonymous(w);
    }
}

static void write_storage(writer *w, dcp_dtype dtype, uint64_t bytes, size_t i)
{
    const char *typed = storage_class(dtype);
    op(w, OP_MARK);
    write_word(w, "storage");
    write_known(w, typed ? "torch" : "torch.storage", typed ? typed : "UntypedStorage");
    write_key(w, i);
    write_word(w, "cpu");
    dcp__emit_int(w->out, (int64_t)(typed ? bytes / dcp_dtype_bytes(dtype) : bytes));
    op(w, OP_TUPLE);
    put_anonymous(w);
    op(w, OP_BINPERSID);
}

/* A storage as it is written. */
typedef struct written_storage {
    uint64_t bytes;
    size_t index;
} written_storage;

/* Up to and with REDUCE. strides NULL: row-major. */
static void write_tensor(writer *w, dcp_dtype dtype, int ndim, const int64_t *extents, const int64_t *strides, int64_t offset,
                         written_storage storage)
{
    int64_t row_major[DCP_MAX_NDIM];
    bool is_typed = storage_class(dtype) != NULL;
    dcp__row_major(ndim, extents, row_major);
    write_known(w, "torch._utils", is_typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    op(w, OP_MARK);
    write_storage(w, dtype, storage.bytes, storage.index);
    dcp__emit_int(w->out, offset);
    write_ints(w, ndim, extents);
    write_ints(w, ndim, strides ? strides : row_major);
    op(w, OP_NEWFALSE);
    write_known(w, "collections", "OrderedDict");
    op(w, OP_EMPTY_TUPLE);
    op(w, OP_REDUCE);
    put_anonymous(w);
    if (!is_typed) {
        write_known(w, "torch", dcp_dtype_name(dtype));
    }
    op(w, OP_TUPLE);
    put_anonymous(w);
    op(w, OP_REDUCE);
}

static dcp_status tensor_bytes(dcp_dtype dtype, int ndim, const int64_t *extents, uint64_t *out, dcp_error *err)
{
    size_t each = dcp_dtype_bytes(dtype);
    int64_t elems, bytes;
    if (!each || ndim < 0 || ndim > DCP_MAX_NDIM) {
        return dcp__fail(err, DCP_ARG, "tensor of dtype %d and %d dimensions", (int)dtype, ndim);
    }
    for (int i = 0; i < ndim; i++) {
        if (extents[i] < 0) {
            return dcp__fail(err, DCP_ARG, "extent %lld of dimension %d", (long long)extents[i], i);
        }
    }
    if (!dcp__elems(ndim, extents, &elems) || !dcp__mul_i64(elems, (int64_t)each, &bytes)) {
        return dcp__fail(err, DCP_LIMIT, "tensor exceeds %lld bytes", (long long)INT64_MAX);
    }
    *out = (uint64_t)bytes;
    return DCP_OK;
}

dcp_status dcp__pickle_tensor(dcp__buf *out, dcp_dtype dtype, int ndim, const int64_t *extents, dcp_error *err)
{
    uint64_t bytes = 0;
    size_t start = out->len;
    dcp_status status = tensor_bytes(dtype, ndim, extents, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    writer w = {.out = out, .err = err};
    dcp__emit_op(out, OP_PROTO, 2, 1);
    write_tensor(&w, dtype, ndim, extents, NULL, 0, (written_storage){bytes, 0});
    put_anonymous(&w);
    op(&w, OP_STOP);
    if (out->failed) {
        out->len = start;
        return dcp__nomem(err);
    }
    return DCP_OK;
}

#define MAX_TRAITS (6 + 2 * DCP_MAX_NDIM)

/* What makes two tensors share a storage when it is equal. Returns how many numbers there are; 0 if none is equal to it. */
static size_t memory_traits(const dcp_value *v, int64_t out[MAX_TRAITS])
{
    const dcp_tensor *t = dcp_value_tensor(v);
    const dcp__lazy *lazy = dcp__value_lazy(v);
    int64_t *strides = out + 6 + t->ndim;
    int64_t elems = 0;
    if (!dcp__elems(t->ndim, t->extents, &elems) || elems == 0) {
        return 0;
    }
    out[0] = (int64_t)t->dtype;
    out[1] = t->ndim;
    out[2] = lazy ? lazy->storage : -1;
    out[3] = lazy ? lazy->storage_offset : 0;
    out[4] = lazy ? lazy->is_conj + 2 * lazy->is_neg : 0;
    out[5] = lazy ? 0 : (int64_t)(intptr_t)t->data;
    dcp__row_major(t->ndim, t->extents, strides);
    for (int i = 0; i < t->ndim; i++) {
        out[6 + i] = t->extents[i];
        strides[i] = t->strides ? t->strides[i] : strides[i];
    }
    return 6 + 2 * (size_t)t->ndim;
}

static bool share_memory(const dcp_value *a, const dcp_value *b)
{
    int64_t of_a[MAX_TRAITS], of_b[MAX_TRAITS];
    size_t n = memory_traits(a, of_a);
    return n && n == memory_traits(b, of_b) && memcmp(of_a, of_b, n * sizeof *of_a) == 0;
}

static bool add_storage(writer *w, const dcp_value *v, uint64_t bytes)
{
    void *storages = w->storages, *keys = w->keys;
    bool ok = dcp__grow(w->out->ctx, &storages, &w->cap_storages, w->n_storages + 1, sizeof *w->storages);
    w->storages = storages;
    ok = ok && dcp__grow(w->out->ctx, &keys, &w->cap_keys, w->n_storages + 1, sizeof *w->keys);
    w->keys = keys;
    if (ok) {
        w->keys[w->n_storages] = NOT_YET;
        w->storages[w->n_storages++] = (dcp__write_storage){v, bytes};
    }
    return ok;
}

/* The storage of v: an earlier tensor's, or a new one. A hash that two different ones have in common only costs the sharing. */
static bool storage_of(writer *w, const dcp_value *v, uint64_t bytes, size_t *out)
{
    int64_t traits[MAX_TRAITS];
    size_t n = memory_traits(v, traits);
    uintptr_t hash = n ? (uintptr_t)(dcp__xxh3_64(traits, n * sizeof *traits) | 1) : 1;
    dcp__wmemo_key key = {.identity = (const void *)hash};
    uint32_t found = 0;
    bool is_known = n && dcp__wmemo_get(&w->memory, &key, &found);
    if (is_known && share_memory(w->storages[found].tensor, v)) {
        *out = found;
        return true;
    }
    *out = w->n_storages;
    return add_storage(w, v, bytes) && (!n || is_known || dcp__wmemo_put(&w->memory, &key, (uint32_t)*out));
}

static dcp_status write_tensor_value(writer *w, const dcp_value *v)
{
    const dcp__lazy *lazy = dcp__value_lazy(v);
    const dcp_value *owner = lazy && lazy->base ? lazy->base : v;
    const dcp_tensor *t = dcp_value_tensor(v), *of = dcp_value_tensor(owner);
    written_storage storage = {0};
    dcp_status status = tensor_bytes(of->dtype, of->ndim, of->extents, &storage.bytes, w->err);
    if (status != DCP_OK) {
        return status;
    }
    if (!storage_of(w, owner, storage.bytes, &storage.index)) {
        return dcp__nomem(w->err);
    }
    bool is_view = owner != v;
    write_tensor(w, t->dtype, t->ndim, t->extents, is_view ? t->strides : NULL, is_view ? lazy->storage_offset : 0, storage);
    put_value(w, v);
    return DCP_OK;
}

/* ---- scalars ---- */

static dcp_status write_int(writer *w, const dcp_value *v)
{
    int64_t i;
    if (dcp_value_int(v, &i)) {
        dcp__emit_int(w->out, i);
        return DCP_OK;
    }
    dcp_str bytes = dcp_value_bigint(v);
    if (bytes.len > INT32_MAX) {
        return dcp__fail(w->err, DCP_LIMIT, "integer of %zu bytes in a pickle", bytes.len);
    }
    dcp__emit_op(w->out, bytes.len <= UINT8_MAX ? OP_LONG1 : OP_LONG4, bytes.len, bytes.len <= UINT8_MAX ? 1 : 4);
    dcp__buf_put(w->out, bytes.ptr, bytes.len);
    return DCP_OK;
}

static void write_complex(writer *w, const dcp_value *v)
{
    write_known(w, "__builtin__", "complex");
    write_float(w, dcp_value_float(v));
    write_float(w, dcp_value_imag(v));
    op(w, OP_TUPLE2);
    put_anonymous(w);
    reduce(w, v);
}

/* Protocol 2 has no bytes: they travel as the characters of the same numbers. */
static dcp_status write_latin1(writer *w, dcp_str bytes)
{
    size_t high = 0;
    for (size_t i = 0; i < bytes.len; i++) {
        high += (uint8_t)bytes.ptr[i] >> 7;
    }
    if (bytes.len > UINT32_MAX - high) {
        return dcp__fail(w->err, DCP_LIMIT, "%zu bytes in a pickle", bytes.len);
    }
    dcp__emit_op(w->out, OP_BINUNICODE, bytes.len + high, 4);
    if (!dcp__buf_reserve(w->out, bytes.len + high)) {
        return dcp__nomem(w->err);
    }
    uint8_t *p = w->out->data + w->out->len;
    for (size_t i = 0; i < bytes.len; i++) {
        uint8_t c = (uint8_t)bytes.ptr[i];
        if (c >= 0x80) {
            *p++ = (uint8_t)(0xc0 | c >> 6);
            c = (uint8_t)(0x80 | (c & 0x3f));
        }
        *p++ = c;
    }
    w->out->len += bytes.len + high;
    put_anonymous(w);
    return DCP_OK;
}

/* Up to and with REDUCE. */
static dcp_status write_bytes(writer *w, dcp_str bytes)
{
    if (bytes.len == 0) {
        write_known(w, "__builtin__", "bytes");
        op(w, OP_EMPTY_TUPLE);
        op(w, OP_REDUCE);
        return DCP_OK;
    }
    write_known(w, "_codecs", "encode");
    dcp_status status = write_latin1(w, bytes);
    if (status == DCP_OK) {
        write_word(w, "latin1");
        op(w, OP_TUPLE2);
        put_anonymous(w);
        op(w, OP_REDUCE);
    }
    return status;
}

static dcp_status write_bytearray(writer *w, const dcp_value *v)
{
    dcp_str bytes = dcp_value_str(v);
    write_known(w, "__builtin__", "bytearray");
    if (bytes.len) {
        dcp_status status = write_bytes(w, bytes);
        if (status != DCP_OK) {
            return status;
        }
        put_anonymous(w);
        op(w, OP_TUPLE1);
        put_anonymous(w);
    } else {
        op(w, OP_EMPTY_TUPLE);
    }
    reduce(w, v);
    return DCP_OK;
}

/* torch.device("cuda", 1) for the text "cuda:1". */
static dcp_status write_device(writer *w, const dcp_value *v)
{
    dcp_str text = dcp_value_str(v);
    const char *colon = text.len ? memchr(text.ptr, ':', text.len) : NULL;
    size_t type_len = colon ? (size_t)(colon - text.ptr) : text.len;
    int64_t index = 0;
    for (size_t i = type_len + 1; i < text.len && index < INT32_MAX; i++) {
        char c = text.ptr[i];
        if (c < '0' || c > '9') {
            return dcp__fail(w->err, DCP_ARG, "device name \"%s\"", dcp__print(text).text);
        }
        index = index * 10 + (c - '0');
    }
    write_known(w, "torch", "device");
    dcp_status status = write_fresh_text(w, (dcp_str){text.ptr, type_len});
    if (status != DCP_OK) {
        return status;
    }
    put_anonymous(w);
    if (colon) {
        dcp__emit_int(w->out, index);
    }
    op(w, colon ? OP_TUPLE2 : OP_TUPLE1);
    put_anonymous(w);
    reduce(w, v);
    return DCP_OK;
}

/* ---- containers ---- */

/* Where the batches of a container end: MARK at the start of each, the opcode at its end. A lone element has an opcode of its
 * own; Python's exact lists and dicts use it only if there is no other element, iterators also for a last one alone. */
typedef struct batches {
    size_t n, i;
    bool is_exact;
    uint8_t many, one;
} batches;

static bool is_single(const batches *b)
{
    return b->n == 1 || (!b->is_exact && b->n - b->i == 1 && b->i % BATCH == 0);
}

static void before_element(writer *w, const batches *b)
{
    if (b->i % BATCH == 0 && !is_single(b)) {
        op(w, OP_MARK);
    }
}

static void after_element(writer *w, batches *b)
{
    if (b->i % BATCH == 0 && is_single(b)) {
        op(w, b->one);
    } else if ((b->i + 1) % BATCH == 0 || b->i + 1 == b->n) {
        op(w, b->many);
    }
    b->i++;
}

static dcp_status write_elements(writer *w, const dcp_value *v, bool is_exact)
{
    batches b = {dcp_value_count(v), 0, is_exact, OP_APPENDS, OP_APPEND};
    dcp_status status = DCP_OK;
    while (status == DCP_OK && b.i < b.n) {
        before_element(w, &b);
        status = write_value(w, dcp_value_at(v, b.i));
        after_element(w, &b);
    }
    return status;
}

static dcp_status write_entries(writer *w, const dcp_value *v, bool is_exact)
{
    batches b = {dcp_value_count(v), 0, is_exact, OP_SETITEMS, OP_SETITEM};
    dcp_status status = DCP_OK;
    while (status == DCP_OK && b.i < b.n) {
        dcp_key key = dcp_dict_key(v, b.i);
        before_element(w, &b);
        if (key.is_int) {
            dcp__emit_int(w->out, key.integer);
        } else {
            status = write_text(w, key.string);
        }
        if (status == DCP_OK) {
            status = write_value(w, dcp_value_at(v, b.i));
        }
        after_element(w, &b);
    }
    return status;
}

/* Keys and values of any kind in turn. */
static dcp_status write_pairs(writer *w, const dcp_value *v)
{
    batches b = {dcp_value_count(v) / 2, 0, false, OP_SETITEMS, OP_SETITEM};
    dcp_status status = DCP_OK;
    while (status == DCP_OK && b.i < b.n) {
        before_element(w, &b);
        status = write_value(w, dcp_value_at(v, 2 * b.i));
        if (status == DCP_OK) {
            status = write_value(w, dcp_value_at(v, 2 * b.i + 1));
        }
        after_element(w, &b);
    }
    return status;
}

/* A tuple up to its opcode, without BINPUT. */
static dcp_status write_tuple_items(writer *w, const dcp_value *v)
{
    static const uint8_t ops[] = {OP_EMPTY_TUPLE, OP_TUPLE1, OP_TUPLE2, OP_TUPLE3};
    size_t n = dcp_value_count(v);
    dcp_status status = DCP_OK;
    if (n > 3) {
        op(w, OP_MARK);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = write_value(w, dcp_value_at(v, i));
    }
    op(w, n > 3 ? OP_TUPLE : ops[n]);
    return status;
}

static dcp_status write_tuple(writer *w, const dcp_value *v)
{
    dcp_status status = write_tuple_items(w, v);
    if (dcp_value_count(v)) {
        put_value(w, v);
    }
    return status;
}

/* A class called with one new tuple or list. */
static dcp_status write_call(writer *w, const dcp_value *v, const char *module, const char *name, bool with_list)
{
    dcp_status status;
    write_known(w, module, name);
    if (with_list) {
        op(w, OP_EMPTY_LIST);
        put_anonymous(w);
        status = write_elements(w, v, true);
    } else {
        status = write_tuple_items(w, v);
        if (dcp_value_count(v)) {
            put_anonymous(w);
        }
    }
    op(w, OP_TUPLE1);
    put_anonymous(w);
    reduce(w, v);
    return status;
}

static dcp_status write_ordered_dict(writer *w, const dcp_value *v)
{
    write_known(w, "collections", "OrderedDict");
    op(w, OP_EMPTY_TUPLE);
    reduce(w, v);
    return write_entries(w, v, false);
}

/* ---- opaque values ---- */

/* A class inside a class is not within reach of GLOBAL: getattr(outer, "inner"). */
static dcp_status write_named(writer *w, dcp_str module, dcp_str name)
{
    size_t dot = name.len;
    if (memchr(module.ptr, '\n', module.len) || memchr(name.ptr, '\n', name.len)) {
        return dcp__fail(w->err, DCP_UNSUPPORTED, "global \"%s\" has a line break in its name", dcp__print(name).text);
    }
    while (dot && name.ptr[dot - 1] != '.') {
        dot--;
    }
    if (dot < 2 || dot == name.len) {
        write_global(w, module, name);
        return DCP_OK;
    }
    if (w->depth++ >= w->max_depth) {
        return dcp__fail(w->err, DCP_LIMIT, "pickle nested deeper than %u", w->max_depth);
    }
    write_known(w, "__builtin__", "getattr");
    dcp_status status = write_named(w, module, (dcp_str){name.ptr, dot - 1});
    if (status == DCP_OK) {
        status = write_text(w, (dcp_str){name.ptr + dot, name.len - dot});
    }
    op(w, OP_TUPLE2);
    put_anonymous(w);
    op(w, OP_REDUCE);
    w->depth--;
    return status;
}

static dcp_status write_args(writer *w, const dcp_value *args)
{
    if (!args) {
        op(w, OP_EMPTY_TUPLE);
        return DCP_OK;
    }
    return write_value(w, args);
}

/* Callable, arguments and the opcode that puts them together. */
static dcp_status write_construction(writer *w, const dcp__opaque *o)
{
    dcp_status status = o->callable ? write_value(w, o->callable) : write_named(w, o->module, o->name);
    if (status == DCP_OK) {
        status = write_args(w, o->args);
    }
    if (status == DCP_OK && o->form == DCP__OPAQUE_NEWOBJ_EX) {
        if (o->kwargs) {
            status = write_value(w, o->kwargs);
        } else {
            op(w, OP_EMPTY_DICT);
        }
    }
    op(w, o->form == DCP__OPAQUE_REDUCE ? OP_REDUCE : o->form == DCP__OPAQUE_NEWOBJ ? OP_NEWOBJ : OP_NEWOBJ_EX);
    return status;
}

static dcp_status write_opaque(writer *w, const dcp_value *v)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    dcp_status status;
    if (o->form == DCP__OPAQUE_GLOBAL) {
        return write_named(w, o->module, o->name);
    }
    if (o->form == DCP__OPAQUE_PERSID) { /* its key is a member's name in an archive that is not this one */
        return dcp__fail(w->err, DCP_UNSUPPORTED, "a value that refers to a storage outside of tensors");
    }
    status = write_construction(w, o);
    put_value(w, v);
    if (status == DCP_OK && o->items) {
        status = write_elements(w, o->items, false);
    }
    if (status == DCP_OK && o->pairs) {
        status = write_pairs(w, o->pairs);
    }
    if (status == DCP_OK && o->state) {
        status = write_value(w, o->state);
        op(w, OP_BUILD);
    }
    return status;
}

/* ---- any value ---- */

static dcp_status write_new_value(writer *w, const dcp_value *v)
{
    dcp_status status = DCP_OK;
    switch (dcp_value_kind(v)) {
    case DCP_KIND_NONE: op(w, OP_NONE); return DCP_OK;
    case DCP_KIND_BOOL: op(w, dcp_value_bool(v) ? OP_NEWTRUE : OP_NEWFALSE); return DCP_OK;
    case DCP_KIND_INT: return write_int(w, v);
    case DCP_KIND_FLOAT: write_float(w, dcp_value_float(v)); return DCP_OK;
    case DCP_KIND_COMPLEX: write_complex(w, v); return DCP_OK;
    case DCP_KIND_STR: return write_text(w, dcp_value_str(v));
    case DCP_KIND_BYTES:
        status = write_bytes(w, dcp_value_str(v));
        put_value(w, v);
        return status;
    case DCP_KIND_BYTEARRAY: return write_bytearray(w, v);
    case DCP_KIND_LIST:
        op(w, OP_EMPTY_LIST);
        put_value(w, v);
        return write_elements(w, v, true);
    case DCP_KIND_TUPLE: return write_tuple(w, v);
    case DCP_KIND_SIZE: return write_call(w, v, "torch", "Size", false);
    case DCP_KIND_SET: return write_call(w, v, "__builtin__", "set", true);
    case DCP_KIND_FROZENSET: return write_call(w, v, "__builtin__", "frozenset", true);
    case DCP_KIND_DICT:
        op(w, OP_EMPTY_DICT);
        put_value(w, v);
        return write_entries(w, v, true);
    case DCP_KIND_ORDERED_DICT: return write_ordered_dict(w, v);
    case DCP_KIND_DTYPE: write_known(w, "torch", dcp_dtype_name(dcp_value_dtype(v))); return DCP_OK;
    case DCP_KIND_DEVICE: return write_device(w, v);
    case DCP_KIND_TENSOR: return write_tensor_value(w, v);
    case DCP_KIND_OPAQUE: return write_opaque(w, v);
    case DCP_KIND_RECORD:
    case DCP_KIND_SHARDED: break;
    }
    return dcp__fail(w->err, DCP_ARG, "a %s inside a value that is stored as a whole",
                     dcp_value_kind(v) == DCP_KIND_RECORD ? "finished record" : "sharded tensor");
}

static dcp_status write_value(writer *w, const dcp_value *v)
{
    if (fetch(w, &(dcp__wmemo_key){.identity = v})) {
        return DCP_OK;
    }
    if (w->depth >= w->max_depth) {
        return dcp__fail(w->err, DCP_LIMIT, "pickle nested deeper than %u", w->max_depth);
    }
    w->depth++;
    dcp_status status = write_new_value(w, v);
    w->depth--;
    return status == DCP_OK && w->out->failed ? dcp__nomem(w->err) : status;
}

dcp_status dcp__pickle_value(dcp__buf *out, const dcp_value *v, dcp__write_storage **storages, size_t *n, dcp_error *err)
{
    dcp_context *ctx = out->ctx;
    size_t start = out->len;
    writer w = {.out = out, .has_memo = true, .max_depth = ctx->limits.max_depth, .err = err};
    dcp__wmemo_init(&w.memo, ctx);
    dcp__wmemo_init(&w.memory, ctx);
    dcp__emit_op(out, OP_PROTO, 2, 1);
    dcp_status status = write_value(&w, v);
    op(&w, OP_STOP);
    if (status == DCP_OK && out->failed) {
        status = dcp__nomem(err);
    }
    dcp__wmemo_reset(&w.memo);
    dcp__wmemo_reset(&w.memory);
    dcp__free(ctx, w.keys);
    if (status != DCP_OK) {
        dcp__free(ctx, w.storages);
        out->len = start;
        return status;
    }
    *storages = w.storages;
    *n = w.n_storages;
    return DCP_OK;
}
