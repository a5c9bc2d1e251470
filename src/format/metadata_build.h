/* Metadata under construction: the hooks that turn objects of the pickle into rows of its tables while the pickle is read
 * (metadata_rows.c), and the steps that follow (metadata_read.c, metadata_join.c, metadata_own.c). */
#ifndef DCP_FORMAT_METADATA_BUILD_H
#define DCP_FORMAT_METADATA_BUILD_H

#include "format/metadata.h"
#include "format/metadata_names.h"

/* What a hook leaves on the stack instead of an object: the kind of row in the low four bits, above them its number, or for
 * properties what they say. */
typedef enum dcp__mrow {
    DCP__MROW_NONE = 0,
    DCP__MROW_CHUNK,
    DCP__MROW_TENSOR,
    DCP__MROW_INDEX,
    DCP__MROW_INFO, /* number of a storage */
    DCP__MROW_PROPERTIES,
    DCP__MROW_LAYOUT,        /* torch.strided */
    DCP__MROW_MEMORY_FORMAT, /* its value */
    DCP__MROW_GIVEN_UP       /* the offset of an index that is not wanted */
} dcp__mrow;

/* Number of a row that was not made, since what it belongs to does not seem to be wanted. */
#define DCP__MROW_UNWANTED ((uint64_t)UINT32_MAX)

typedef struct dcp__mprops {
    dcp_dtype dtype;
    uint32_t other_dtype; /* of DCP_DTYPE_NONE: its number among those that are not known */
    uint8_t memory_format;
    bool requires_grad, pin_memory, is_old_class, has_strides;
} dcp__mprops;

typedef struct dcp__mtensor {
    dcp__mprops props;
    const dcp__pints *size;
    size_t first_chunk, n_chunks;
    bool is_used; /* its rows belong to an entry */
} dcp__mtensor;

typedef struct dcp__mindex {
    uint32_t name;            /* in names, DCP__NO_NAME: of an item that is not wanted */
    int32_t hint;             /* -1: none */
    const dcp__pints *offset; /* NULL: absent */
} dcp__mindex;

#define DCP__NO_NAME UINT32_MAX

/* A set of strings with numbers. Lookups try the last number and the next one first, since real streams go on that way. */
typedef struct dcp__mstrings {
    dcp_str *texts;
    size_t n, cap;
    size_t last;
    dcp__strmap map;
} dcp__mstrings;

#define DCP__MUNWANTED 2048

typedef struct dcp__mbuild {
    dcp_context *ctx;
    const dcp_str *only;
    bool is_careful;  /* makes all rows: what seemed not to be wanted was */
    bool must_repeat; /* why the reading failed: is_careful was needed */
    uint64_t source_bytes;
    uint64_t work_left; /* elements that may still be looked at; a stream that shares big lists wants more than its length */
    dcp__metadata *md;  /* its chunks, storages and transforms grow here */
    size_t chunks_cap, storages_cap, transforms_cap;
    /* Chunks of tensors that are not wanted are dropped again. Numbers of chunk rows count on: those below the floor are void. */
    uint64_t n_dropped, chunk_floor;
    /* Names of unwanted indexes, by hash, so that one node serves for all that are equal. */
    dcp__pv unwanted[DCP__MUNWANTED];
    dcp__mtensor *tensors;
    size_t n_tensors, tensors_cap;
    dcp__mindex *indexes;
    size_t n_indexes, indexes_cap;
    dcp__mstrings names; /* of indexes */
    dcp__mstrings files;
    dcp__mstrings dtypes; /* that are not known */
    bool has_old_properties, has_new_properties, has_strides, has_descriptors;
    bool has_storage_meta, has_modules;
} dcp__mbuild;

static inline dcp__pv dcp__mrow_make(dcp__mrow kind, uint64_t number)
{
    return dcp__pv_of_client(number << 4 | kind);
}
/* The row of a value that a hook replaced, or would have if the object had been nobody else's. */
static inline dcp__mrow dcp__mrow_of(dcp__pv v, uint64_t *number)
{
    if (v && dcp__pv_kind(v) == DCP__P_OBJECT) {
        v = dcp__pv_node(v)->client;
    }
    if (!v || dcp__pv_kind(v) != DCP__P_CLIENT) {
        return DCP__MROW_NONE;
    }
    *number = dcp__pv_client(v) >> 4;
    return (dcp__mrow)(dcp__pv_client(v) & 15);
}

dcp__pickle_hooks dcp__mhooks(dcp__mbuild *b);

/* Forgets all rows. */
void dcp__mbuild_reset(dcp__mbuild *b);

static inline bool dcp__mis_wanted(const dcp__mbuild *b, dcp_str fqn)
{
    return !b->only || (fqn.len == b->only->len && (fqn.len == 0 || memcmp(fqn.ptr, b->only->ptr, fqn.len) == 0));
}

/* "metadata: <role> is <what v is>" */
dcp_status dcp__mrefuse(uint64_t at, const char *role, dcp__pv v, dcp_error *err);

/* Takes n elements off the work that is left: LIMIT if it was less. */
dcp_status dcp__mspend(dcp__mbuild *b, size_t n, uint64_t at, dcp_error *err);

/* A run of chunk rows again at the end of the table. */
dcp_status dcp__mcopy_chunks(dcp__mbuild *b, size_t *first, size_t n, uint64_t at, dcp_error *err);

/* Number of a text; the text must live as long as the metadata. *is_new: it was not known. */
dcp_status dcp__mstrings_add(dcp_context *ctx, dcp__mstrings *s, dcp_str text, uint32_t *number, bool *is_new, dcp_error *err);

/* The keys and values of a dict or OrderedDict; NULL with *n 0 for an empty one. FORMAT (with role) for other values. */
dcp_status dcp__mdict_items(dcp__metadata *md, dcp__pv v, const char *role, uint64_t at, const dcp__pv **items, size_t *n,
                            dcp_error *err);

/* The path that a tuple of strings and integers is; *out_len is 0 if v is none. FORMAT or LIMIT for bad list indices. */
dcp_status dcp__mpath(dcp__mbuild *b, dcp__pv v, uint64_t at, const dcp_key **out, size_t *out_len, dcp_error *err);

/* Finds the place of each chunk and object, by (fqn, offset). at: offset for messages. */
dcp_status dcp__mjoin(dcp__mbuild *b, dcp__pv storage_data, uint64_t at, dcp_error *err);

/* Whether src ends in our own trailer. CHECKSUM if its digest is wrong. */
dcp_status dcp__mtrailer_check(dcp_context *ctx, const dcp__source *src, bool *has_trailer, dcp_error *err);
/* Our own field: fills md->own. What is malformed is FORMAT if md->has_trailer, else the field is ignored. */
dcp_status dcp__mown_read(dcp__mbuild *b, dcp__pv field, uint64_t at, dcp_error *err);

#endif
