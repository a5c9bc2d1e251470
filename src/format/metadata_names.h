/* The classes and fields of `.metadata` (formats.md 2.3, 2.4), told apart once for each node and then known by the node's client
 * word. */
#ifndef DCP_FORMAT_METADATA_NAMES_H
#define DCP_FORMAT_METADATA_NAMES_H

#include "dcp/state.h"
#include "format/pickle.h"

typedef enum dcp__mclass {
    DCP__MCLASS_OTHER = 1,
    DCP__MCLASS_METADATA,
    DCP__MCLASS_TENSOR, /* TensorStorageMetadata */
    DCP__MCLASS_OBJECT, /* BytesStorageMetadata */
    DCP__MCLASS_CHUNK,
    DCP__MCLASS_INDEX,
    DCP__MCLASS_INFO,           /* _StorageInfo */
    DCP__MCLASS_PROPERTIES,     /* from 2.3 on */
    DCP__MCLASS_OLD_PROPERTIES, /* 2.1 and 2.2 */
    DCP__MCLASS_MEMORY_FORMAT,  /* either enum */
    DCP__MCLASS_STORAGE_META,
    DCP__MCLASS_SIZE,
    DCP__MCLASS_LAYOUT, /* the function _get_layout */
    DCP__MCLASS_PATH,   /* of pathlib */
    DCP__MCLASS_ORDERED_DICT,
    DCP__MCLASS_OTHER_DTYPE, /* of torch, and not known here: what stands for a dtype is one, quantised or of a later release */
    DCP__MCLASS_DTYPE        /* plus a dcp_dtype: torch.float32 and so on */
} dcp__mclass;

dcp__mclass dcp__mclass_slow(dcp__pv global);
/* 0 if v is no global. */
static inline dcp__mclass dcp__mclass_of(dcp__pv v)
{
    if (!v || !dcp__pv_global(v)) {
        return (dcp__mclass)0;
    }
    uint64_t known = dcp__pv_node(v)->client;
    return known ? (dcp__mclass)known : dcp__mclass_slow(v);
}
/* Class of an object that NEWOBJ made of a global, 0 for other values. */
static inline dcp__mclass dcp__mclass_of_instance(dcp__pv v)
{
    const dcp__pobject *o = v ? dcp__pv_object(v) : NULL;
    return o && o->form == DCP__PFORM_NEWOBJ ? dcp__mclass_of(o->callable) : (dcp__mclass)0;
}

/* Fields of all classes in one list; those with one name are one. */
typedef enum dcp__mfield {
    DCP__MFIELD_OTHER = 0,
    DCP__MFIELD_PROPERTIES,
    DCP__MFIELD_SIZE,
    DCP__MFIELD_CHUNKS,
    DCP__MFIELD_OFFSETS,
    DCP__MFIELD_SIZES,
    DCP__MFIELD_FQN,
    DCP__MFIELD_INDEX,
    DCP__MFIELD_OFFSET,
    DCP__MFIELD_RELATIVE_PATH,
    DCP__MFIELD_LENGTH,
    DCP__MFIELD_TRANSFORM_DESCRIPTORS,
    DCP__MFIELD_ROWS, /* those before it are all that classes have of which there are many objects */
    DCP__MFIELD_STATE_DICT_METADATA = DCP__MFIELD_ROWS,
    DCP__MFIELD_PLANNER_DATA,
    DCP__MFIELD_STORAGE_DATA,
    DCP__MFIELD_STORAGE_META,
    DCP__MFIELD_VERSION,
    DCP__MFIELD_LIBDCP,
    DCP__MFIELD_CHECKPOINT_ID,
    DCP__MFIELD_SAVE_ID,
    DCP__MFIELD_MODULES,
    DCP__MFIELD_COUNT
} dcp__mfield;

/* The client word of a string: what field it names (8 bits), and its numbers among files and among names (28 bits each), each
 * plus one, 0 where that is not known yet. One string can be all three. */
#define DCP__MSTR_BITS 28
#define DCP__MSTR_MAX (((uint64_t)1 << DCP__MSTR_BITS) - 2)
#define DCP__MSTR_FILE_SHIFT 8
#define DCP__MSTR_NAME_SHIFT (8 + DCP__MSTR_BITS)

static inline bool dcp__mstr_get(dcp__pv str, unsigned shift, uint32_t *out)
{
    uint64_t kept = dcp__pv_node(str)->client >> shift & (((uint64_t)1 << DCP__MSTR_BITS) - 1);
    *out = (uint32_t)(kept - 1);
    return kept != 0;
}
static inline void dcp__mstr_set(dcp__pv str, unsigned shift, uint32_t number)
{
    if (number <= DCP__MSTR_MAX) {
        dcp__pv_node(str)->client |= ((uint64_t)number + 1) << shift;
    }
}

dcp__mfield dcp__mfield_slow(dcp__pv key);
/* The field that a key of a state dict names. */
static inline dcp__mfield dcp__mfield_of(dcp__pv key)
{
    if (!dcp__pv_is_str(key)) {
        return DCP__MFIELD_OTHER;
    }
    uint64_t known = dcp__pv_node(key)->client & 0xff;
    return known ? (dcp__mfield)(known - 1) : dcp__mfield_slow(key);
}

/* The values of a state, by field. fields has n_fields places, DCP__MFIELD_ROWS or DCP__MFIELD_COUNT, all 0; those of absent
 * fields stay so. The state of BUILD is a dict, or (dict or None, dict). False for others. *n_seen is how many keys and values
 * were looked at. */
bool dcp__mfields_of(const dcp__pstate *state, dcp__pv *fields, size_t n_fields, size_t *n_seen);
/* The same of a state that was read. */
bool dcp__mfields_read(dcp__pv state, dcp__pv *fields, size_t n_fields, size_t *n_seen);

/* What a value is, for messages: "torch.int1", "an object of module.Class", "tuple". */
typedef struct dcp__mdescription {
    char text[480];
} dcp__mdescription;
dcp__mdescription dcp__mdescribe(dcp__pv v);

#endif
