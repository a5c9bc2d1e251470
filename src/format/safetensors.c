#include "format/safetensors.h"

#include <limits.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "format/json_read.h"

#define LENGTH_BYTES 8

/* Names of the safetensors format; what is absent here cannot stand in such a file. */
static const struct {
    dcp_dtype dtype;
    const char *name;
} dtype_names[] = {
    {DCP_FLOAT64, "F64"},
    {DCP_FLOAT32, "F32"},
    {DCP_FLOAT16, "F16"},
    {DCP_BFLOAT16, "BF16"},
    {DCP_INT64, "I64"},
    {DCP_INT32, "I32"},
    {DCP_INT16, "I16"},
    {DCP_INT8, "I8"},
    {DCP_UINT8, "U8"},
    {DCP_BOOL, "BOOL"},
    {DCP_UINT16, "U16"},
    {DCP_UINT32, "U32"},
    {DCP_UINT64, "U64"},
    {DCP_COMPLEX64, "C64"},
    {DCP_FLOAT8_E4M3FN, "F8_E4M3"},
    {DCP_FLOAT8_E5M2, "F8_E5M2"},
    {DCP_FLOAT8_E4M3FNUZ, "F8_E4M3FNUZ"},
    {DCP_FLOAT8_E5M2FNUZ, "F8_E5M2FNUZ"},
    {DCP_FLOAT8_E8M0FNU, "F8_E8M0"},
    {DCP_FLOAT4_E2M1FN_X2, "F4"},
};
#define N_DTYPES (sizeof dtype_names / sizeof dtype_names[0])

const char *dcp__safetensors_dtype(dcp_dtype dtype)
{
    for (size_t i = 0; i < N_DTYPES; i++) {
        if (dtype_names[i].dtype == dtype) {
            return dtype_names[i].name;
        }
    }
    return NULL;
}

dcp_dtype dcp__dtype_from_safetensors(dcp_str name)
{
    for (size_t i = 0; i < N_DTYPES; i++) {
        if (strlen(dtype_names[i].name) == name.len && memcmp(dtype_names[i].name, name.ptr, name.len) == 0) {
            return dtype_names[i].dtype;
        }
    }
    return DCP_DTYPE_NONE;
}

/* What is taken from __metadata__ before the tensors that it speaks of are known. */
typedef struct texts {
    const json_t *sharding; /* strings of the header's tree; NULL: absent */
    const json_t *own;
} texts;

/* All faults of the header's content are reported at its first byte: jansson's tree keeps no positions. */
#define HEADER_FAULT(err, code, ...) dcp__fail_at(err, code, LENGTH_BYTES, __VA_ARGS__)

/* ---- length and text ---- */

static dcp_status not_safetensors(const uint8_t *head, uint64_t length, uint64_t size, dcp_error *err)
{
    if (memcmp(head, "PK\003\004", 4) == 0) {
        return dcp__fail_at(err, DCP_FORMAT, 0,
                            "starts with a zip record: objects of the state were written in front of the safetensors data, which "
                            "no reader understands");
    }
    if (memcmp(head, "version ", 8) == 0) {
        return dcp__fail_at(err, DCP_FORMAT, 0, "looks like a git-lfs pointer instead of the file that it stands for");
    }
    return dcp__fail_at(err, DCP_FORMAT, 0, "header of %llu bytes exceeds the end at %llu", (unsigned long long)length,
                        (unsigned long long)size);
}

static dcp_status read_length(const dcp_context *ctx, const dcp__source *src, size_t *out, dcp_error *err)
{
    uint8_t head[LENGTH_BYTES];
    if (src->size < sizeof head) {
        return dcp__fail_at(err, DCP_FORMAT, src->size, "%llu bytes are too few for a safetensors header",
                            (unsigned long long)src->size);
    }
    dcp_status status = dcp__source_read(src, 0, head, sizeof head, err);
    if (status != DCP_OK) {
        return status;
    }
    uint64_t length = dcp__load64(head);
    if (length > src->size - sizeof head) {
        return not_safetensors(head, length, src->size, err);
    }
    if (length > ctx->limits.max_header_bytes) {
        return dcp__fail_at(err, DCP_LIMIT, 0, "header of %llu bytes is over the limit of %llu", (unsigned long long)length,
                            (unsigned long long)ctx->limits.max_header_bytes);
    }
    *out = (size_t)length;
    return DCP_OK;
}

static dcp_status read_header(dcp_context *ctx, const dcp__source *src, json_t **out, uint64_t *header_bytes, dcp_error *err)
{
    size_t length = 0;
    dcp_status status = read_length(ctx, src, &length, err);
    if (status != DCP_OK) {
        return status;
    }
    char *text = dcp__alloc(ctx, length);
    if (!text) {
        return dcp__nomem(err);
    }
    status = dcp__source_read(src, LENGTH_BYTES, text, length, err);
    if (status == DCP_OK && (length == 0 || text[0] != '{')) {
        status = HEADER_FAULT(err, DCP_FORMAT, "header does not start with \"{\"");
    }
    if (status == DCP_OK) {
        status = dcp__json_parse(ctx, (dcp_str){text, length}, LENGTH_BYTES, "header", out, err);
    }
    *header_bytes = LENGTH_BYTES + (uint64_t)length;
    dcp__free(ctx, text);
    return status;
}

/* ---- one tensor ---- */

/* An array of integers >= 0 in the arena. `owner` and `what` name it in messages. */
static dcp_status read_extents(dcp__arena *a, const char *owner, const char *what, const json_t *array, int64_t **out, int *n,
                               dcp_error *err)
{
    if (!json_is_array(array)) {
        return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': %s is no array", dcp__print(dcp_str_of(owner)).text, what);
    }
    size_t count = json_array_size(array);
    if (count > DCP_MAX_NDIM) {
        return HEADER_FAULT(err, DCP_LIMIT, "tensor '%s': %s has %zu dimensions, at most %d can be read",
                            dcp__print(dcp_str_of(owner)).text, what, count, DCP_MAX_NDIM);
    }
    int64_t *values = dcp__arena_alloc(a, count * sizeof *values);
    if (!values) {
        return dcp__arena_fail(a, err);
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(array, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0) {
            return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': %s[%zu] is no integer from 0 to 2^63 - 1",
                                dcp__print(dcp_str_of(owner)).text, what, i);
        }
        values[i] = json_integer_value(item);
    }
    *out = values;
    *n = (int)count;
    return DCP_OK;
}

static dcp_status read_dtype(const char *name, const json_t *json, dcp_dtype *out, dcp_error *err)
{
    if (!json_is_string(json)) {
        return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': dtype is no string", dcp__print(dcp_str_of(name)).text);
    }
    dcp_str text = {json_string_value(json), json_string_length(json)};
    dcp_dtype dtype = dcp__dtype_from_safetensors(text);
    if (dtype == DCP_DTYPE_NONE) {
        return HEADER_FAULT(err, DCP_UNSUPPORTED, "tensor '%s': unknown dtype '%s'", dcp__print(dcp_str_of(name)).text,
                            dcp__print(text).text);
    }
    *out = dtype;
    return DCP_OK;
}

/* F4 counts 4-bit values, PyTorch's float4_e2m1fn_x2 pairs of them. */
static dcp_status halve_last_extent(const char *name, int ndim, int64_t *extents, dcp_error *err)
{
    if (ndim == 0 || extents[ndim - 1] % 2 != 0) {
        return HEADER_FAULT(err, DCP_UNSUPPORTED, "tensor '%s': F4 needs an even last dimension, as two values share a byte",
                            dcp__print(dcp_str_of(name)).text);
    }
    extents[ndim - 1] /= 2;
    return DCP_OK;
}

static bool tensor_bytes(const dcp__st_tensor *t, uint64_t *out)
{
    uint64_t bytes = dcp_dtype_bytes(t->dtype);
    for (int i = 0; i < t->ndim; i++) {
        if (!dcp__mul_u64(bytes, (uint64_t)t->extents[i], &bytes)) {
            return false;
        }
    }
    *out = bytes;
    return true;
}

static dcp_status read_range(dcp__safetensors *s, const char *name, const json_t *json, dcp__st_tensor *t, dcp_error *err)
{
    int64_t *range;
    int n;
    dcp_status status = read_extents(&s->arena, name, "data_offsets", json, &range, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    if (n != 2 || range[0] > range[1]) {
        return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': data_offsets are no begin and end", dcp__print(t->name).text);
    }
    t->offset = s->header_bytes + (uint64_t)range[0];
    t->bytes = (uint64_t)(range[1] - range[0]);
    uint64_t needed;
    if (!tensor_bytes(t, &needed)) {
        return dcp__fail_at(err, DCP_FORMAT, t->offset, "tensor '%s': number of bytes overflows", dcp__print(t->name).text);
    }
    if (needed != t->bytes) {
        return dcp__fail_at(err, DCP_FORMAT, t->offset, "tensor '%s': dtype and shape take %llu bytes, data_offsets give %llu",
                            dcp__print(t->name).text, (unsigned long long)needed, (unsigned long long)t->bytes);
    }
    return DCP_OK;
}

static dcp_status read_tensor(dcp__safetensors *s, const char *name, const json_t *json, dcp__st_tensor *t, dcp_error *err)
{
    if (!json_is_object(json)) {
        return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': description is no object", dcp__print(dcp_str_of(name)).text);
    }
    t->name = dcp__arena_str(&s->arena, dcp_str_of(name));
    if (!t->name.ptr) {
        return dcp__arena_fail(&s->arena, err);
    }
    int64_t *extents;
    dcp_status status = read_dtype(name, json_object_get(json, "dtype"), &t->dtype, err);
    if (status == DCP_OK) {
        status = read_extents(&s->arena, name, "shape", json_object_get(json, "shape"), &extents, &t->ndim, err);
    }
    if (status == DCP_OK && t->dtype == DCP_FLOAT4_E2M1FN_X2) {
        status = halve_last_extent(name, t->ndim, extents, err);
    }
    if (status == DCP_OK) {
        t->extents = extents;
    }
    return status != DCP_OK ? status : read_range(s, name, json_object_get(json, "data_offsets"), t, err);
}

/* ---- __metadata__ ---- */

static dcp_status copy_text(dcp__safetensors *s, dcp_str text, dcp_str *out, dcp_error *err)
{
    *out = dcp__arena_str(&s->arena, text);
    return out->ptr ? DCP_OK : dcp__arena_fail(&s->arena, err);
}

static dcp_str text_of(const json_t *json)
{
    return (dcp_str){json_string_value(json), json_string_length(json)};
}

static dcp_status keep_text(dcp__safetensors *s, const char *key, const json_t *json, texts *found, dcp_error *err)
{
    if (strcmp(key, "DCP_SHARDING_INFO") == 0) {
        found->sharding = json;
        return DCP_OK;
    }
    if (strcmp(key, "libdcp") == 0) {
        found->own = json;
        return DCP_OK;
    }
    if (strcmp(key, "format") == 0) {
        return copy_text(s, text_of(json), &s->format, err);
    }
    if (strcmp(key, "DCP_VERSION") == 0) {
        return copy_text(s, text_of(json), &s->dcp_version, err);
    }
    size_t i = s->n_metadata++;
    dcp_status status = copy_text(s, dcp_str_of(key), &s->metadata_keys[i], err);
    return status != DCP_OK ? status : copy_text(s, text_of(json), &s->metadata_values[i], err);
}

static dcp_status read_texts(dcp__safetensors *s, json_t *json, texts *found, dcp_error *err)
{
    if (!json_is_object(json)) {
        return HEADER_FAULT(err, DCP_FORMAT, "__metadata__ is no object of strings");
    }
    size_t n = json_object_size(json);
    s->metadata_keys = dcp__arena_alloc(&s->arena, n * sizeof *s->metadata_keys);
    s->metadata_values = dcp__arena_alloc(&s->arena, n * sizeof *s->metadata_values);
    if (!s->metadata_keys || !s->metadata_values) {
        return dcp__arena_fail(&s->arena, err);
    }
    const char *key;
    json_t *value;
    json_object_foreach(json, key, value)
    {
        if (!json_is_string(value)) {
            return HEADER_FAULT(err, DCP_FORMAT, "__metadata__: value of '%s' is no string", dcp__print(dcp_str_of(key)).text);
        }
        dcp_status status = keep_text(s, key, value, found, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

/* ---- JSON texts inside __metadata__ ---- */

/* The tensor that a text speaks of. */
static dcp_status find_tensor(dcp__safetensors *s, const char *name, const char *what, dcp__st_tensor **out, dcp_error *err)
{
    uint64_t i;
    if (!dcp__strmap_get(&s->by_name, dcp_str_of(name), &i)) {
        return HEADER_FAULT(err, DCP_FORMAT, "%s names '%s', which is not in the file", what, dcp__print(dcp_str_of(name)).text);
    }
    *out = &s->tensors[i];
    return DCP_OK;
}

/* One value for each dimension of t. */
static dcp_status read_position(dcp__safetensors *s, const dcp__st_tensor *t, const char *what, const json_t *json,
                                const int64_t **out, dcp_error *err)
{
    int64_t *values;
    int n;
    dcp_status status = read_extents(&s->arena, t->name.ptr, what, json_object_get(json, what), &values, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    if (n != t->ndim) {
        return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': %s has %d dimensions, its shape %d", dcp__print(t->name).text, what, n,
                            t->ndim);
    }
    *out = values;
    return DCP_OK;
}

static dcp_status read_saved_offsets(dcp__safetensors *s, json_t *root, dcp_error *err)
{
    const char *name;
    json_t *json;
    json_object_foreach(root, name, json)
    {
        dcp__st_tensor *t = NULL;
        dcp_status status = find_tensor(s, name, "DCP_SHARDING_INFO", &t, err);
        if (status == DCP_OK) {
            status = read_position(s, t, "saved_offsets", json, &t->saved_offsets, err);
        }
        if (status != DCP_OK) {
            return status;
        }
        for (int i = 0; i < t->ndim; i++) {
            if (t->saved_offsets[i] > INT64_MAX - t->extents[i]) {
                return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': saved_offsets[%d] overflows", dcp__print(t->name).text, i);
            }
        }
    }
    return DCP_OK;
}

static dcp_status read_sharding(dcp__safetensors *s, const json_t *text, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(s->ctx, text_of(text), DCP_NO_OFFSET, "DCP_SHARDING_INFO", &root, err);
    if (status != DCP_OK) {
        return status;
    }
    status = read_saved_offsets(s, root, err);
    json_decref(root);
    for (size_t i = 0; status == DCP_OK && i < s->n_tensors; i++) {
        if (!s->tensors[i].saved_offsets) {
            status = HEADER_FAULT(err, DCP_FORMAT, "DCP_SHARDING_INFO lacks tensor '%s'", dcp__print(s->tensors[i].name).text);
        }
    }
    s->has_sharding_info = true;
    return status;
}

static dcp_status read_global_shapes(dcp__safetensors *s, json_t *tensors, dcp_error *err)
{
    if (!json_is_object(tensors)) {
        return HEADER_FAULT(err, DCP_FORMAT, "libdcp: tensors is no object");
    }
    const char *name;
    json_t *json;
    json_object_foreach(tensors, name, json)
    {
        dcp__st_tensor *t = NULL;
        dcp_status status = find_tensor(s, name, "libdcp", &t, err);
        if (status == DCP_OK) {
            status = read_position(s, t, "shape", json, &t->global_extents, err);
        }
        if (status != DCP_OK) {
            return status;
        }
        for (int i = 0; i < t->ndim; i++) {
            int64_t offset = t->saved_offsets ? t->saved_offsets[i] : 0;
            if (offset + t->extents[i] > t->global_extents[i]) {
                return HEADER_FAULT(err, DCP_FORMAT, "tensor '%s': dimension %d reaches %lld, the global shape has %lld",
                                    dcp__print(t->name).text, i, (long long)(offset + t->extents[i]),
                                    (long long)t->global_extents[i]);
            }
        }
    }
    return DCP_OK;
}

static dcp_status take_own_facts(dcp__safetensors *s, json_t *root, dcp_error *err)
{
    const json_t *schema = json_object_get(root, "schema");
    if (!json_is_integer(schema) || json_integer_value(schema) != 1) {
        return DCP_OK; /* of a later release: its facts are extras, so the file reads without them */
    }
    s->has_own_facts = true;
    const json_t *world = json_object_get(root, "world"), *writer = json_object_get(root, "writer");
    if (world && (!json_is_integer(world) || json_integer_value(world) < 0 || json_integer_value(world) > INT_MAX)) {
        return HEADER_FAULT(err, DCP_FORMAT, "libdcp: world is no number of ranks");
    }
    s->own_world = (int)json_integer_value(world);
    if (json_is_string(writer)) {
        dcp_status status = copy_text(s, text_of(writer), &s->own_writer, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    json_t *tensors = json_object_get(root, "tensors");
    return tensors ? read_global_shapes(s, tensors, err) : DCP_OK;
}

static dcp_status read_own_facts(dcp__safetensors *s, const json_t *text, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(s->ctx, text_of(text), DCP_NO_OFFSET, "libdcp in __metadata__", &root, err);
    if (status == DCP_OK) {
        status = take_own_facts(s, root, err);
        json_decref(root);
    }
    return status;
}

/* ---- the whole ---- */

static int compare_strs(dcp_str a, dcp_str b)
{
    size_t shared = a.len < b.len ? a.len : b.len;
    int order = shared ? memcmp(a.ptr, b.ptr, shared) : 0;
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

static int by_place(const void *a, const void *b)
{
    const dcp__st_tensor *x = a, *y = b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    if (x->bytes != y->bytes) {
        return x->bytes < y->bytes ? -1 : 1;
    }
    return compare_strs(x->name, y->name);
}

static dcp_status read_entries(dcp__safetensors *s, json_t *root, texts *found, dcp_error *err)
{
    s->tensors = dcp__arena_alloc(&s->arena, json_object_size(root) * sizeof *s->tensors);
    if (!s->tensors) {
        return dcp__arena_fail(&s->arena, err);
    }
    const char *name;
    json_t *json;
    json_object_foreach(root, name, json)
    {
        bool is_metadata = strcmp(name, "__metadata__") == 0;
        dcp__st_tensor t = {0};
        dcp_status status = is_metadata ? read_texts(s, json, found, err) : read_tensor(s, name, json, &t, err);
        if (status != DCP_OK) {
            return status;
        }
        if (!is_metadata) {
            s->tensors[s->n_tensors++] = t;
        }
    }
    qsort(s->tensors, s->n_tensors, sizeof *s->tensors, by_place);
    return DCP_OK;
}

/* In order of offset each tensor starts where the one before ends. */
static dcp_status check_ranges(dcp__safetensors *s, uint64_t size, bool to_end, dcp_error *err)
{
    s->end = s->header_bytes;
    for (size_t i = 0; i < s->n_tensors; i++) {
        const dcp__st_tensor *t = &s->tensors[i];
        if (t->offset != s->end) {
            return dcp__fail_at(err, DCP_FORMAT, t->offset, "tensor '%s' starts at %llu, the data before it ends at %llu: %s",
                                dcp__print(t->name).text, (unsigned long long)t->offset, (unsigned long long)s->end,
                                t->offset < s->end ? "overlap" : "gap");
        }
        s->end = t->offset + t->bytes; /* both below 2^63 plus the header */
        if (s->end > size) {
            return dcp__fail_at(err, DCP_FORMAT, size, "tensor '%s' ends at %llu, behind the end at %llu",
                                dcp__print(t->name).text, (unsigned long long)s->end, (unsigned long long)size);
        }
    }
    if (to_end && s->end != size) {
        return dcp__fail_at(err, DCP_FORMAT, s->end, "%llu bytes follow the last tensor", (unsigned long long)(size - s->end));
    }
    return DCP_OK;
}

static dcp_status index_names(dcp__safetensors *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < s->n_tensors; i++) {
        status = dcp__strmap_add(&s->by_name, s->tensors[i].name, i, NULL, err); /* jansson has refused equal names */
    }
    return status;
}

static dcp_status build(dcp__safetensors *s, json_t *root, uint64_t size, bool to_end, dcp_error *err)
{
    texts found = {0};
    dcp_status status = read_entries(s, root, &found, err);
    if (status == DCP_OK) {
        status = check_ranges(s, size, to_end, err);
    }
    if (status == DCP_OK) {
        status = index_names(s, err);
    }
    if (status == DCP_OK && found.sharding) {
        status = read_sharding(s, found.sharding, err);
    }
    if (status == DCP_OK && found.own) {
        status = read_own_facts(s, found.own, err);
    }
    return status;
}

dcp_status dcp__safetensors_open(dcp_context *ctx, const dcp__source *src, bool to_end, dcp__safetensors *out, dcp_error *err)
{
    dcp__safetensors s = {.ctx = ctx};
    json_t *root;
    dcp_status status = read_header(ctx, src, &root, &s.header_bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__arena_init(&s.arena, ctx, ctx->limits.max_parse_bytes);
    dcp__strmap_init(&s.by_name, ctx);
    status = build(&s, root, src->size, to_end, err);
    json_decref(root);
    if (status != DCP_OK) {
        dcp__safetensors_reset(&s);
        return status;
    }
    *out = s;
    return DCP_OK;
}

void dcp__safetensors_reset(dcp__safetensors *s)
{
    dcp__strmap_reset(&s->by_name);
    dcp__arena_reset(&s->arena);
}
