#include "format/metadata_names.h"

#include <stdio.h>

#define CHECKPOINT "torch.distributed.checkpoint.metadata"
#define SHARD "torch.distributed._shard.sharded_tensor.metadata"

static const struct known_class {
    const char *module, *name;
    dcp__mclass is;
} known_classes[] = {
    {CHECKPOINT, "Metadata", DCP__MCLASS_METADATA},
    {CHECKPOINT, "TensorStorageMetadata", DCP__MCLASS_TENSOR},
    {CHECKPOINT, "BytesStorageMetadata", DCP__MCLASS_OBJECT},
    {CHECKPOINT, "ChunkStorageMetadata", DCP__MCLASS_CHUNK},
    {CHECKPOINT, "MetadataIndex", DCP__MCLASS_INDEX},
    {CHECKPOINT, "TensorProperties", DCP__MCLASS_PROPERTIES},
    {CHECKPOINT, "_MEM_FORMAT_ENCODING", DCP__MCLASS_MEMORY_FORMAT},
    {CHECKPOINT, "StorageMeta", DCP__MCLASS_STORAGE_META},
    {SHARD, "TensorProperties", DCP__MCLASS_OLD_PROPERTIES},
    {SHARD, "MEM_FORMAT_ENCODING", DCP__MCLASS_MEMORY_FORMAT},
    {"torch.distributed.checkpoint.filesystem", "_StorageInfo", DCP__MCLASS_INFO},
    {"torch", "Size", DCP__MCLASS_SIZE},
    {"torch.serialization", "_get_layout", DCP__MCLASS_LAYOUT},
    {"collections", "OrderedDict", DCP__MCLASS_ORDERED_DICT},
};

static const char *const path_classes[] = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path"};

static bool equals(dcp_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.ptr, text, s.len) == 0;
}

static dcp__mclass classify(const dcp__pglobal *g)
{
    for (size_t i = 0; i < sizeof known_classes / sizeof known_classes[0]; i++) {
        if (equals(g->name, known_classes[i].name) && equals(g->module, known_classes[i].module)) {
            return known_classes[i].is;
        }
    }
    if (equals(g->module, "torch")) {
        dcp_dtype dtype = dcp_dtype_from_name(g->name);
        return dtype == DCP_DTYPE_NONE ? DCP__MCLASS_OTHER_DTYPE : (dcp__mclass)(DCP__MCLASS_DTYPE + (int)dtype);
    }
    if (equals(g->module, "pathlib") || equals(g->module, "pathlib._local")) {
        for (size_t i = 0; i < sizeof path_classes / sizeof path_classes[0]; i++) {
            if (equals(g->name, path_classes[i])) {
                return DCP__MCLASS_PATH;
            }
        }
    }
    return DCP__MCLASS_OTHER;
}

dcp__mclass dcp__mclass_slow(dcp__pv global)
{
    dcp__mclass is = classify(dcp__pv_global(global));
    dcp__pv_node(global)->client = (uint64_t)is;
    return is;
}

static const char *const field_names[DCP__MFIELD_COUNT] = {
    [DCP__MFIELD_STATE_DICT_METADATA] = "state_dict_metadata",
    [DCP__MFIELD_PLANNER_DATA] = "planner_data",
    [DCP__MFIELD_STORAGE_DATA] = "storage_data",
    [DCP__MFIELD_STORAGE_META] = "storage_meta",
    [DCP__MFIELD_VERSION] = "version",
    [DCP__MFIELD_LIBDCP] = "libdcp",
    [DCP__MFIELD_PROPERTIES] = "properties",
    [DCP__MFIELD_SIZE] = "size",
    [DCP__MFIELD_CHUNKS] = "chunks",
    [DCP__MFIELD_OFFSETS] = "offsets",
    [DCP__MFIELD_SIZES] = "sizes",
    [DCP__MFIELD_FQN] = "fqn",
    [DCP__MFIELD_INDEX] = "index",
    [DCP__MFIELD_OFFSET] = "offset",
    [DCP__MFIELD_RELATIVE_PATH] = "relative_path",
    [DCP__MFIELD_LENGTH] = "length",
    [DCP__MFIELD_TRANSFORM_DESCRIPTORS] = "transform_descriptors",
    [DCP__MFIELD_CHECKPOINT_ID] = "checkpoint_id",
    [DCP__MFIELD_SAVE_ID] = "save_id",
    [DCP__MFIELD_MODULES] = "modules",
};

dcp__mfield dcp__mfield_slow(dcp__pv key)
{
    dcp_str text = dcp__pv_text(key);
    int found = DCP__MFIELD_OTHER;
    for (int i = 1; i < DCP__MFIELD_COUNT && !found; i++) {
        found = equals(text, field_names[i]) ? i : 0;
    }
    dcp__pv_node(key)->client |= (uint64_t)found + 1;
    return (dcp__mfield)found;
}

static void take_fields(const dcp__pv *pairs, size_t n, dcp__pv *fields, size_t n_fields)
{
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t field = (size_t)dcp__mfield_of(pairs[i]);
        fields[field < n_fields ? field : DCP__MFIELD_OTHER] = pairs[i + 1];
    }
    fields[DCP__MFIELD_OTHER] = 0;
}

static size_t take_dict(dcp__pv dict, dcp__pv *fields, size_t n_fields)
{
    size_t n;
    const dcp__pv *pairs = dcp__pv_items(dict, &n);
    take_fields(pairs, n, fields, n_fields);
    return n;
}

/* (dict or None, dict) */
static bool take_two(dcp__pv state, dcp__pv *fields, size_t n_fields, size_t *n_seen)
{
    size_t n = 0;
    const dcp__pv *parts = state && dcp__pv_kind(state) == DCP__P_TUPLE ? dcp__pv_items(state, &n) : NULL;
    if (n != 2 || dcp__pv_kind(parts[1]) != DCP__P_DICT || (parts[0] != DCP__PV_NONE && dcp__pv_kind(parts[0]) != DCP__P_DICT)) {
        return false;
    }
    *n_seen = parts[0] == DCP__PV_NONE ? 0 : take_dict(parts[0], fields, n_fields);
    *n_seen += take_dict(parts[1], fields, n_fields);
    return true;
}

bool dcp__mfields_of(const dcp__pstate *state, dcp__pv *fields, size_t n_fields, size_t *n_seen)
{
    if (dcp__pv_kind(state->value) != DCP__P_DICT) {
        return take_two(state->value, fields, n_fields, n_seen);
    }
    take_fields(state->pairs, state->n, fields, n_fields);
    *n_seen = state->n;
    return true;
}

bool dcp__mfields_read(dcp__pv state, dcp__pv *fields, size_t n_fields, size_t *n_seen)
{
    if (!state || dcp__pv_kind(state) != DCP__P_DICT) {
        return take_two(state, fields, n_fields, n_seen);
    }
    *n_seen = take_dict(state, fields, n_fields);
    return true;
}

dcp__mdescription dcp__mdescribe(dcp__pv v)
{
    dcp__mdescription out;
    const dcp__pobject *o = v ? dcp__pv_object(v) : NULL;
    const dcp__pglobal *g = !v ? NULL : o && o->callable ? dcp__pv_global(o->callable) : dcp__pv_global(v);
    if (g) {
        snprintf(out.text, sizeof out.text, "%s%s.%s", o ? "an object of " : "", dcp__print(g->module).text,
                 dcp__print(g->name).text);
    } else {
        snprintf(out.text, sizeof out.text, "%s", dcp__pv_kind_name(v));
    }
    return out;
}
