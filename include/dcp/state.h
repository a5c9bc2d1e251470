/*
 * dcp/state.h - what a checkpoint holds: tensors and a tree of values.
 *
 *     dcp_value *state;
 *     dcp_dict_create(NULL, &state, &err);
 *     float w[4 * 8];
 *     int64_t shape[] = {4, 8};
 *     dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, w);
 *     dcp_dict_set_tensor(state, "model.weight", &t, &err);   // borrows w until the tree is freed
 *     dcp_dict_set_int(state, "step", 1000, &err);
 *     dcp_value_free(state);
 *
 * Values are counted references: a container owns one reference to each element, dcp_value_free drops one. A value may stand
 * in several places, but never below itself.
 *
 * Threads: reading one tree from several threads is safe; changing it is not. Reference counts are atomic.
 */
#ifndef DCP_STATE_H
#define DCP_STATE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- dtypes ---- */

/* Element types of PyTorch that can stand in a checkpoint. Values are stable and appended only. */
typedef enum dcp_dtype {
    DCP_DTYPE_NONE = 0,
    DCP_FLOAT32,
    DCP_FLOAT64,
    DCP_FLOAT16,
    DCP_BFLOAT16,
    DCP_INT8,
    DCP_UINT8,
    DCP_INT16,
    DCP_INT32,
    DCP_INT64,
    DCP_BOOL,
    DCP_COMPLEX64,
    DCP_COMPLEX128,
    DCP_FLOAT8_E4M3FN,
    DCP_FLOAT8_E5M2,
    DCP_FLOAT8_E4M3FNUZ,
    DCP_FLOAT8_E5M2FNUZ,
    DCP_COMPLEX32,
    DCP_UINT16,
    DCP_UINT32,
    DCP_UINT64,
    DCP_FLOAT8_E8M0FNU,
    DCP_FLOAT4_E2M1FN_X2, /* two 4-bit values a byte, low nibble first; extents count bytes */
    DCP_BCOMPLEX32,       /* two bfloat16 */
    DCP_DTYPE_COUNT
} dcp_dtype;

/* PyTorch's name, "float32"; "?" for values outside the list. */
DCP_API const char *dcp_dtype_name(dcp_dtype dtype);
/* Bytes of one element, 0 for values outside the list. */
DCP_API size_t dcp_dtype_bytes(dcp_dtype dtype);
/* The dtype of that name ("float32"); DCP_DTYPE_NONE if there is none. Aliases such as "half" are not known. */
DCP_API dcp_dtype dcp_dtype_from_name(dcp_str name);
/* First PyTorch release that can load it from a checkpoint, major * 100 + minor: 201 is 2.1, 214 is 2.14. */
DCP_API int dcp_dtype_release(dcp_dtype dtype);

/* ---- tensors ---- */

#define DCP_MAX_NDIM 64

typedef enum dcp_device_type { DCP_DEVICE_CPU = 0, DCP_DEVICE_CUDA = 1, DCP_DEVICE_NPU = 2 } dcp_device_type;

typedef struct dcp_device {
    dcp_device_type type;
    int index; /* 0 for CPU */
} dcp_device;

/* A strided view of memory that it does not own. Element (i0, i1, ..) is at
 * (char *)data + dcp_dtype_bytes(dtype) * (i0 * strides[0] + i1 * strides[1] + ..). */
typedef struct dcp_tensor {
    dcp_dtype dtype;
    int ndim;               /* 0 to DCP_MAX_NDIM */
    const int64_t *extents; /* ndim values >= 0; may be NULL if ndim is 0 */
    const int64_t *strides; /* ndim values in elements, >= 0; NULL: row-major */
    void *data;             /* may be NULL if there are no elements */
    dcp_device device;
} dcp_tensor;

/* A row-major tensor in host memory; extents and data are borrowed. */
DCP_API dcp_tensor dcp_tensor_make(dcp_dtype dtype, int ndim, const int64_t *extents, void *data);
/* Product of the extents; 1 for ndim 0. Errors: ARG (negative extent, ndim), LIMIT (overflow of int64). */
DCP_API dcp_status dcp_tensor_elems(const dcp_tensor *t, int64_t *out, dcp_error *err);

/* A part of a tensor: [offsets, offsets + sizes). */
typedef struct dcp_box {
    const int64_t *offsets;
    const int64_t *sizes;
} dcp_box;

/* ---- values ---- */

typedef enum dcp_kind {
    DCP_KIND_NONE = 0,
    DCP_KIND_BOOL,
    DCP_KIND_INT, /* any size */
    DCP_KIND_FLOAT,
    DCP_KIND_COMPLEX,
    DCP_KIND_STR,
    DCP_KIND_BYTES,
    DCP_KIND_BYTEARRAY,
    DCP_KIND_LIST,
    DCP_KIND_TUPLE,
    DCP_KIND_SIZE, /* torch.Size: a tuple of integers */
    DCP_KIND_SET,
    DCP_KIND_FROZENSET,
    DCP_KIND_DICT,
    DCP_KIND_ORDERED_DICT,
    DCP_KIND_DTYPE,  /* torch.float32 as a value */
    DCP_KIND_DEVICE, /* torch.device("cpu") */
    DCP_KIND_TENSOR,
    DCP_KIND_SHARDED, /* a global shape and the chunks that this process holds */
    DCP_KIND_OPAQUE,  /* an instance of a class that is not known here: kept, never executed */
    DCP_KIND_RECORD   /* the finished torch.save file of an object, to be saved as it is */
} dcp_kind;

typedef struct dcp_value dcp_value;

/* Keys of dicts are strings or 64-bit integers, as in Python two kinds: 1 and "1" differ. */
typedef struct dcp_key {
    bool is_int;
    int64_t integer; /* if is_int */
    dcp_str string;  /* otherwise */
} dcp_key;

DCP_API dcp_key dcp_key_str(const char *text);
DCP_API dcp_key dcp_key_int(int64_t integer);

/* Makers. Each sets *out to a new reference. Errors: NOMEM, ARG. ctx may be NULL. */
DCP_API dcp_status dcp_none_create(dcp_context *ctx, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_bool_create(dcp_context *ctx, bool b, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_int_create(dcp_context *ctx, int64_t i, dcp_value **out, dcp_error *err);
/* Two's complement, little-endian, any length >= 0; surplus sign bytes are dropped. Source: pickle's LONG1. */
DCP_API dcp_status dcp_bigint_create(dcp_context *ctx, const uint8_t *bytes, size_t len, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_float_create(dcp_context *ctx, double d, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_complex_create(dcp_context *ctx, double re, double im, dcp_value **out, dcp_error *err);
/* UTF-8, lone surrogates allowed (WTF-8); copied. Errors: also ARG if it is not. */
DCP_API dcp_status dcp_string_create(dcp_context *ctx, dcp_str text, dcp_value **out, dcp_error *err);
/* kind is DCP_KIND_BYTES or DCP_KIND_BYTEARRAY; copied. */
DCP_API dcp_status dcp_bytes_create(dcp_context *ctx, dcp_kind kind, const void *bytes, size_t len, dcp_value **out,
                                    dcp_error *err);
/* An empty DCP_KIND_LIST, DCP_KIND_TUPLE, DCP_KIND_SIZE, DCP_KIND_SET or DCP_KIND_FROZENSET. */
DCP_API dcp_status dcp_seq_create(dcp_context *ctx, dcp_kind kind, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_list_create(dcp_context *ctx, dcp_value **out, dcp_error *err);
/* An empty dict. */
DCP_API dcp_status dcp_dict_create(dcp_context *ctx, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_ordered_dict_create(dcp_context *ctx, dcp_value **out, dcp_error *err);
DCP_API dcp_status dcp_dtype_create(dcp_context *ctx, dcp_dtype dtype, dcp_value **out, dcp_error *err);
/* The text inside torch.device("..."), such as "cuda:0". */
DCP_API dcp_status dcp_device_name_create(dcp_context *ctx, dcp_str text, dcp_value **out, dcp_error *err);
/* Copies extents and strides, borrows data. */
DCP_API dcp_status dcp_tensor_create(dcp_context *ctx, const dcp_tensor *t, dcp_value **out, dcp_error *err);
/* A new row-major tensor in memory of its own (64-byte aligned, not initialised), freed with the value. */
DCP_API dcp_status dcp_tensor_alloc(dcp_context *ctx, dcp_dtype dtype, int ndim, const int64_t *extents, dcp_value **out,
                                    dcp_error *err);
/* A tensor of which this process holds n_chunks parts: chunks[i] has the extents boxes[i].sizes and belongs at
 * boxes[i].offsets. Shapes are copied, data borrowed. n_chunks may be 0. Errors: also MISMATCH, ARG (outside the tensor). */
DCP_API dcp_status dcp_sharded_create(dcp_context *ctx, dcp_dtype dtype, int ndim, const int64_t *global_extents, size_t n_chunks,
                                      const dcp_tensor *chunks, const dcp_box *boxes, dcp_value **out, dcp_error *err);

/* An object that its owner has serialised already: the bytes of a torch.save file (a zip), which are borrowed. It is saved
 * verbatim as the record of its leaf, and cannot be part of another object. Reading never makes one: see dcp_read_record. */
DCP_API dcp_status dcp_record_create(dcp_context *ctx, const void *bytes, size_t len, dcp_value **out, dcp_error *err);

/* One more reference to the same value; returns v. */
DCP_API dcp_value *dcp_value_retain(dcp_value *v);
/* Drops a reference; NULL is allowed. Never recurses deeper than a fixed bound. */
DCP_API void dcp_value_free(dcp_value *v);

/* ---- reading values. A wrong kind yields the stated neutral value. ---- */

DCP_API dcp_kind dcp_value_kind(const dcp_value *v);
DCP_API bool dcp_value_bool(const dcp_value *v); /* false */
/* True and *out set if v is an integer that fits; false otherwise. */
DCP_API bool dcp_value_int(const dcp_value *v, int64_t *out);
/* Minimal two's complement little-endian bytes of an integer; {NULL, 0} for zero. Valid as long as v. */
DCP_API dcp_str dcp_value_bigint(const dcp_value *v);
DCP_API double dcp_value_float(const dcp_value *v); /* real part of a complex; NaN */
DCP_API double dcp_value_imag(const dcp_value *v);  /* 0 */
/* Text of a string or device name, content of bytes, bytearray or a record; {NULL, 0}. Valid as long as v. */
DCP_API dcp_str dcp_value_str(const dcp_value *v);
DCP_API dcp_dtype dcp_value_dtype(const dcp_value *v); /* of a dtype, tensor or sharded tensor; DCP_DTYPE_NONE */
/* Number of elements of a sequence, set or dict, of chunks of a sharded tensor; 0. */
DCP_API size_t dcp_value_count(const dcp_value *v);
/* Element i of a sequence or set, value i of a dict in insertion order; borrowed; NULL. */
DCP_API dcp_value *dcp_value_at(const dcp_value *v, size_t i);
/* Key i of a dict; {false, 0, {NULL, 0}}. */
DCP_API dcp_key dcp_dict_key(const dcp_value *v, size_t i);
/* Value under a key, borrowed; NULL if absent. Constant time. */
DCP_API dcp_value *dcp_dict_get(const dcp_value *v, dcp_key key);
DCP_API dcp_value *dcp_dict_get_str(const dcp_value *v, const char *key);
/* The tensor; NULL. data is NULL in trees that were opened but not read. */
DCP_API const dcp_tensor *dcp_value_tensor(const dcp_value *v);
/* Chunk i of a sharded tensor and where it belongs; false if there is none. */
DCP_API bool dcp_sharded_chunk(const dcp_value *v, size_t i, dcp_tensor *chunk, dcp_box *box);
/* Global shape of a sharded tensor; false for other kinds. */
DCP_API bool dcp_sharded_shape(const dcp_value *v, int *ndim, const int64_t **extents);
/* "module.Class" of an opaque value; {NULL, 0}. */
DCP_API dcp_str dcp_opaque_class(const dcp_value *v);
/* Bytes that the opaque value takes in its pickle. */
DCP_API uint64_t dcp_opaque_bytes(const dcp_value *v);

/* ---- building containers. The container takes over the reference on success only. Errors: NOMEM, ARG. ---- */

DCP_API dcp_status dcp_list_append(dcp_value *list, dcp_value *element, dcp_error *err);
/* Replaces element i of a sequence and drops the reference to the old one. Errors: ARG (no such element). */
DCP_API dcp_status dcp_list_set(dcp_value *list, size_t i, dcp_value *element, dcp_error *err);
/* Replaces an existing value and keeps its position. */
DCP_API dcp_status dcp_dict_set(dcp_value *dict, dcp_key key, dcp_value *value, dcp_error *err);
DCP_API dcp_status dcp_dict_set_int(dcp_value *dict, const char *key, int64_t i, dcp_error *err);
DCP_API dcp_status dcp_dict_set_float(dcp_value *dict, const char *key, double d, dcp_error *err);
DCP_API dcp_status dcp_dict_set_bool(dcp_value *dict, const char *key, bool b, dcp_error *err);
DCP_API dcp_status dcp_dict_set_string(dcp_value *dict, const char *key, const char *text, dcp_error *err);
DCP_API dcp_status dcp_dict_set_tensor(dcp_value *dict, const char *key, const dcp_tensor *t, dcp_error *err);

/* ---- text ---- */

/* Python's repr of a value: "{'step': 7}". Tensors print as <tensor float32 [3, 5]>, opaque values as <module.Class, N
 * bytes>. *out is NUL-terminated, freed with dcp_text_free. max_bytes 0: 64 MiB. Errors: NOMEM, LIMIT (longer). */
DCP_API dcp_status dcp_value_repr(const dcp_value *v, size_t max_bytes, char **out, size_t *out_len, dcp_error *err);

/* True if both have the same kind, type and content, order of dicts included for ordered dicts only. Tensors compare by
 * dtype, shape and bytes of their elements; NaN equals itself. */
DCP_API bool dcp_value_equal(const dcp_value *a, const dcp_value *b);

/* ---- flattening (PyTorch's flatten_state_dict) ---- */

typedef enum dcp_flatten_rule {
    DCP_FLATTEN_2_4 = 0, /* PyTorch 2.4 and newer: dicts always, lists if anything below flattens */
    DCP_FLATTEN_2_1 = 1  /* PyTorch 2.1 to 2.3: containers only if a tensor is below */
} dcp_flatten_rule;

/* One leaf. path has the keys from the root; integers are list positions. */
typedef struct dcp_leaf {
    dcp_str fqn;
    const dcp_key *path;
    size_t path_len;
    dcp_value *value; /* borrowed */
} dcp_leaf;

typedef struct dcp_flat dcp_flat;

/* Flattens a dict into leaves in depth-first order. The result borrows the tree and must be freed before it.
 * Errors: ARG (root is no dict), MISMATCH (two paths give one FQN; both are named), LIMIT (depth), NOMEM. */
DCP_API dcp_status dcp_flatten(dcp_context *ctx, dcp_value *root, dcp_flatten_rule rule, dcp_flat **out, dcp_error *err);
DCP_API void dcp_flat_free(dcp_flat *flat);
DCP_API size_t dcp_flat_count(const dcp_flat *flat);
DCP_API const dcp_leaf *dcp_flat_leaf(const dcp_flat *flat, size_t i);
/* Position of an FQN; false if absent. */
DCP_API bool dcp_flat_find(const dcp_flat *flat, dcp_str fqn, size_t *out);

/* Rebuilds the tree of n leaves (values are retained): containers under an integer path item are lists, under a string
 * dicts; list gaps are None. Errors: MISMATCH (a container is of two kinds, a leaf is in the way), LIMIT (list index). */
DCP_API dcp_status dcp_unflatten(dcp_context *ctx, const dcp_leaf *leaves, size_t n, dcp_value **out, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
