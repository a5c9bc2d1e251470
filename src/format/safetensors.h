/* safetensors headers (formats.md 8.1, 8.2). */
#ifndef DCP_FORMAT_SAFETENSORS_H
#define DCP_FORMAT_SAFETENSORS_H

#include "base/arena.h"
#include "base/source.h"
#include "base/strmap.h"
#include "dcp/state.h"

typedef struct dcp__st_tensor {
    dcp_str name;
    dcp_dtype dtype;
    int ndim;
    const int64_t *extents;        /* as in PyTorch: the last extent of F4 is halved */
    uint64_t offset, bytes;        /* in the source */
    const int64_t *saved_offsets;  /* DCP_SHARDING_INFO; NULL if absent */
    const int64_t *global_extents; /* our own key; NULL if absent */
} dcp__st_tensor;

typedef struct dcp__safetensors {
    dcp_context *ctx;
    dcp__arena arena;
    dcp__st_tensor *tensors; /* by offset, then length, then name; a block of the heap */
    size_t n_tensors;
    dcp__strmap by_name;   /* -> index in tensors */
    uint64_t header_bytes; /* 8 + h */
    uint64_t end;          /* behind the last tensor */
    bool has_sharding_info;
    dcp_str format, dcp_version; /* of __metadata__; ptr NULL: absent */
    bool has_own_facts;          /* the key `libdcp`, of a schema that is known here */
    dcp_str own_writer;          /* "libdcp <version>"; ptr NULL: absent */
    int own_world;               /* ranks that took part in the save; 0: not stated */
    uint32_t *own_empty;         /* numbers of shards that no file was written for, ascending, from 1 to own_world */
    size_t n_own_empty;
    size_t n_metadata; /* other keys of __metadata__ */
    dcp_str *metadata_keys, *metadata_values;
} dcp__safetensors;

/* Reads the header at the start of src and nothing behind it. Checks: ranges sorted without hole or overlap and within src, sizes
 * right, names unique, strings where strings belong, DCP's sharding info and our own key about exactly these tensors. `to_end`:
 * the data must also end at the end of src. Errors: FORMAT (offset), LIMIT (header, dimensions), UNSUPPORTED (unknown dtype,
 * named; F4 with an odd last dimension), NOMEM, the source's. */
dcp_status dcp__safetensors_open(dcp_context *ctx, const dcp__source *src, bool to_end, dcp__safetensors *out, dcp_error *err);
void dcp__safetensors_reset(dcp__safetensors *s);

/* safetensors' name of a dtype ("BF16"), NULL if it has none; and back, DCP_DTYPE_NONE if unknown. */
const char *dcp__safetensors_dtype(dcp_dtype dtype);
dcp_dtype dcp__dtype_from_safetensors(dcp_str name);

#endif
