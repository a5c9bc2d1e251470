#include "format/safetensors.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "format/json_scan.h"
#include "format/safetensors_texts.h"

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

/* The header while it is read. */
typedef struct reader {
    dcp__safetensors *s;
    dcp__jscan scan;
    size_t tensors_cap;
    dcp_str *keys, *values; /* of __metadata__, s->n_metadata of them */
    size_t keys_cap, values_cap;
    dcp__strmap seen; /* keys of __metadata__ */
    bool has_metadata;
    dcp_str sharding, own; /* texts in __metadata__, read when the tensors that they speak of are known; ptr NULL: absent */
} reader;

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
    uint8_t head[DCP__ST_LENGTH_BYTES];
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

/* The text of the header, to be freed by the caller. */
static dcp_status load_header(dcp_context *ctx, const dcp__source *src, char **text, size_t *length, dcp_error *err)
{
    dcp_status status = read_length(ctx, src, length, err);
    if (status != DCP_OK) {
        return status;
    }
    *text = dcp__alloc(ctx, *length + !*length);
    if (!*text) {
        return dcp__nomem(err);
    }
    status = dcp__source_read(src, DCP__ST_LENGTH_BYTES, *text, *length, err);
    if (status == DCP_OK && (*length == 0 || (*text)[0] != '{')) {
        status = DCP__ST_FAULT(err, DCP_FORMAT, "header does not start with \"{\"");
    }
    if (status != DCP_OK) {
        dcp__free(ctx, *text);
    }
    return status;
}

/* ---- one tensor ---- */

/* The value is of another kind than it should be. Whether it is JSON at all comes first. */
static dcp_status wrong_kind(reader *r, dcp_str name, const char *why, dcp_error *err)
{
    dcp_status status = dcp__jscan_skip(&r->scan, err);
    return status == DCP_OK ? DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s", dcp__print(name).text, why) : status;
}

static dcp_status read_extent(reader *r, dcp_str name, const char *what, int i, int64_t *out, dcp_error *err)
{
    bool is_int = false;
    dcp_status status =
        dcp__jscan_peek(&r->scan) == '0' ? dcp__jscan_number(&r->scan, out, &is_int, err) : dcp__jscan_skip(&r->scan, err);
    if (status == DCP_OK && (!is_int || *out < 0)) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s[%d] is no integer from 0 to 2^63 - 1", dcp__print(name).text, what,
                             i);
    }
    return status;
}

/* An array of integers >= 0. */
static dcp_status scan_extents(reader *r, dcp_str name, const char *what, int64_t values[DCP_MAX_NDIM], int *n, dcp_error *err)
{
    bool is_first = true, more = true;
    *n = 0;
    if (dcp__jscan_peek(&r->scan) != '[') {
        return wrong_kind(r, name, strcmp(what, "shape") == 0 ? "shape is no array" : "data_offsets is no array", err);
    }
    dcp_status status = dcp__jscan_enter(&r->scan, err);
    while (status == DCP_OK) {
        status = dcp__jscan_more(&r->scan, ']', &is_first, &more, err);
        if (status != DCP_OK || !more) {
            break;
        }
        if (*n == DCP_MAX_NDIM) {
            return DCP__ST_FAULT(err, DCP_LIMIT, "tensor '%s': %s has more than the %d dimensions that can be read",
                                 dcp__print(name).text, what, DCP_MAX_NDIM);
        }
        status = read_extent(r, name, what, *n, &values[*n], err);
        ++*n;
    }
    return status;
}

static dcp_status read_dtype(reader *r, dcp_str name, dcp_dtype *out, dcp_error *err)
{
    dcp_str text;
    if (dcp__jscan_peek(&r->scan) != '"') {
        return wrong_kind(r, name, "dtype is no string", err);
    }
    dcp_status status = dcp__jscan_string(&r->scan, &text, err);
    if (status != DCP_OK) {
        return status;
    }
    *out = dcp__dtype_from_safetensors(text);
    return *out != DCP_DTYPE_NONE ? DCP_OK
                                  : DCP__ST_FAULT(err, DCP_UNSUPPORTED, "tensor '%s': unknown dtype '%s'", dcp__print(name).text,
                                                  dcp__print(text).text);
}

/* F4 counts 4-bit values, PyTorch's float4_e2m1fn_x2 pairs of them. */
static dcp_status halve_last_extent(dcp_str name, int ndim, int64_t *extents, dcp_error *err)
{
    if (ndim == 0 || extents[ndim - 1] % 2 != 0) {
        return DCP__ST_FAULT(err, DCP_UNSUPPORTED, "tensor '%s': F4 needs an even last dimension, as two values share a byte",
                             dcp__print(name).text);
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

static dcp_status place_tensor(const dcp__safetensors *s, dcp__st_tensor *t, const int64_t *range, int n, dcp_error *err)
{
    if (n != 2 || range[0] > range[1]) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': data_offsets are no begin and end", dcp__print(t->name).text);
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

/* What the description of a tensor says, in whatever order. n < 0: not said. */
typedef struct description {
    dcp_dtype dtype; /* NONE: not said */
    int64_t shape[DCP_MAX_NDIM], range[DCP_MAX_NDIM];
    int ndim, n_range;
} description;

static bool is_text(dcp_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.ptr, text, s.len) == 0;
}

static dcp_status read_part(reader *r, dcp_str name, description *d, dcp_error *err)
{
    dcp_str key;
    dcp_status status = dcp__jscan_name(&r->scan, &key, err);
    if (status != DCP_OK) {
        return status;
    }
    bool is_dtype = is_text(key, "dtype"), is_shape = is_text(key, "shape"), is_range = is_text(key, "data_offsets");
    if ((is_dtype && d->dtype != DCP_DTYPE_NONE) || (is_shape && d->ndim >= 0) || (is_range && d->n_range >= 0)) {
        return dcp__fail_at(err, DCP_FORMAT, DCP__ST_LENGTH_BYTES + (uint64_t)(r->scan.p - r->scan.start),
                            "tensor '%s': %s is said twice", dcp__print(name).text, dcp__print(key).text);
    }
    if (is_dtype) {
        return read_dtype(r, name, &d->dtype, err);
    }
    if (is_shape) {
        return scan_extents(r, name, "shape", d->shape, &d->ndim, err);
    }
    return is_range ? scan_extents(r, name, "data_offsets", d->range, &d->n_range, err) : dcp__jscan_skip(&r->scan, err);
}

static dcp_status read_description(reader *r, dcp_str name, description *d, dcp_error *err)
{
    bool is_first = true, more = true;
    *d = (description){.dtype = DCP_DTYPE_NONE, .ndim = -1, .n_range = -1};
    if (dcp__jscan_peek(&r->scan) != '{') {
        return wrong_kind(r, name, "description is no object", err);
    }
    dcp_status status = dcp__jscan_enter(&r->scan, err);
    while (status == DCP_OK) {
        status = dcp__jscan_more(&r->scan, '}', &is_first, &more, err);
        if (status != DCP_OK || !more) {
            break;
        }
        status = read_part(r, name, d, err);
    }
    bool is_whole = d->dtype != DCP_DTYPE_NONE && d->ndim >= 0 && d->n_range >= 0;
    return status == DCP_OK && !is_whole ? DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s is missing", dcp__print(name).text,
                                                         d->dtype == DCP_DTYPE_NONE ? "dtype"
                                                         : d->ndim < 0              ? "shape"
                                                                                    : "data_offsets")
                                         : status;
}

static dcp_status copy_text(dcp__safetensors *s, dcp_str text, dcp_str *out, dcp_error *err)
{
    *out = dcp__arena_str(&s->arena, text);
    return out->ptr ? DCP_OK : dcp__arena_fail(&s->arena, err);
}

static dcp_status fill_tensor(dcp__safetensors *s, dcp_str name, description *d, dcp__st_tensor *t, dcp_error *err)
{
    dcp_status status = copy_text(s, name, &t->name, err);
    if (status == DCP_OK && d->dtype == DCP_FLOAT4_E2M1FN_X2) {
        status = halve_last_extent(name, d->ndim, d->shape, err);
    }
    int64_t *extents = dcp__arena_alloc(&s->arena, (size_t)d->ndim * sizeof *extents);
    if (status != DCP_OK || !extents) {
        return status != DCP_OK ? status : dcp__arena_fail(&s->arena, err);
    }
    memcpy(extents, d->shape, (size_t)d->ndim * sizeof *extents);
    t->dtype = d->dtype;
    t->ndim = d->ndim;
    t->extents = extents;
    return place_tensor(s, t, d->range, d->n_range, err);
}

static dcp_status read_tensor(reader *r, dcp_str name, dcp_error *err)
{
    dcp__safetensors *s = r->s;
    description d;
    dcp__st_tensor t = {0};
    dcp_status status = read_description(r, name, &d, err);
    status = status == DCP_OK ? fill_tensor(s, name, &d, &t, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    void *tensors = s->tensors;
    if ((s->n_tensors + 1) * sizeof t > s->ctx->limits.max_parse_bytes) {
        return DCP__ST_FAULT(err, DCP_LIMIT, "more than %zu tensors", s->n_tensors);
    }
    if (!dcp__grow(s->ctx, &tensors, &r->tensors_cap, s->n_tensors + 1, sizeof t)) {
        return dcp__nomem(err);
    }
    s->tensors = tensors;
    s->tensors[s->n_tensors++] = t;
    return DCP_OK;
}

/* ---- __metadata__ ---- */

/* A key that is not known, and its text. */
static dcp_status keep_pair(reader *r, dcp_str key, dcp_str text, dcp_error *err)
{
    size_t n = r->s->n_metadata;
    void *keys = r->keys, *values = r->values;
    bool ok = dcp__grow(r->s->ctx, &keys, &r->keys_cap, n + 1, sizeof *r->keys) &&
              dcp__grow(r->s->ctx, &values, &r->values_cap, n + 1, sizeof *r->values);
    r->keys = keys;
    r->values = values;
    if (!ok) {
        return dcp__nomem(err);
    }
    r->keys[n] = key;
    r->values[n] = text;
    r->s->n_metadata++;
    return DCP_OK;
}

static dcp_status keep_text(reader *r, dcp_str key, dcp_str text, dcp_error *err)
{
    if (is_text(key, "DCP_SHARDING_INFO")) {
        r->sharding = text;
    } else if (is_text(key, "libdcp")) {
        r->own = text;
    } else if (is_text(key, "format")) {
        r->s->format = text;
    } else if (is_text(key, "DCP_VERSION")) {
        r->s->dcp_version = text;
    } else {
        return keep_pair(r, key, text, err);
    }
    return DCP_OK;
}

static dcp_status read_text(reader *r, dcp_error *err)
{
    dcp_str key, text;
    uint64_t existing;
    dcp_status status = dcp__jscan_name(&r->scan, &key, err);
    status = status == DCP_OK ? copy_text(r->s, key, &key, err) : status;
    status = status == DCP_OK ? dcp__strmap_add(&r->seen, key, 0, &existing, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    if (existing != UINT64_MAX) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "__metadata__: '%s' is said twice", dcp__print(key).text);
    }
    if (dcp__jscan_peek(&r->scan) != '"') {
        status = dcp__jscan_skip(&r->scan, err);
        return status == DCP_OK ? DCP__ST_FAULT(err, DCP_FORMAT, "__metadata__: value of '%s' is no string", dcp__print(key).text)
                                : status;
    }
    status = dcp__jscan_string(&r->scan, &text, err);
    status = status == DCP_OK ? copy_text(r->s, text, &text, err) : status;
    return status == DCP_OK ? keep_text(r, key, text, err) : status;
}

static dcp_status read_texts(reader *r, dcp_error *err)
{
    bool is_first = true, more = true;
    if (r->has_metadata || dcp__jscan_peek(&r->scan) != '{') {
        dcp_status status = dcp__jscan_skip(&r->scan, err);
        return status == DCP_OK
                   ? DCP__ST_FAULT(err, DCP_FORMAT, "__metadata__ is %s", r->has_metadata ? "said twice" : "no object of strings")
                   : status;
    }
    r->has_metadata = true;
    dcp_status status = dcp__jscan_enter(&r->scan, err);
    while (status == DCP_OK) {
        status = dcp__jscan_more(&r->scan, '}', &is_first, &more, err);
        if (status != DCP_OK || !more) {
            break;
        }
        status = read_text(r, err);
    }
    return status;
}

/* The pairs that were kept, into the arena. */
static dcp_status settle_pairs(reader *r, dcp_error *err)
{
    dcp__safetensors *s = r->s;
    size_t bytes = s->n_metadata * sizeof *r->keys;
    s->metadata_keys = dcp__arena_alloc(&s->arena, bytes);
    s->metadata_values = dcp__arena_alloc(&s->arena, bytes);
    if (!s->metadata_keys || !s->metadata_values) {
        return dcp__arena_fail(&s->arena, err);
    }
    if (bytes) {
        memcpy(s->metadata_keys, r->keys, bytes);
        memcpy(s->metadata_values, r->values, bytes);
    }
    return DCP_OK;
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

static dcp_status read_members(reader *r, dcp_error *err)
{
    bool is_first = true, more = true;
    dcp_str name;
    dcp_status status = dcp__jscan_enter(&r->scan, err);
    while (status == DCP_OK) {
        status = dcp__jscan_more(&r->scan, '}', &is_first, &more, err);
        if (status != DCP_OK || !more) {
            break;
        }
        status = dcp__jscan_name(&r->scan, &name, err);
        if (status == DCP_OK) {
            status = is_text(name, "__metadata__") ? read_texts(r, err) : read_tensor(r, name, err);
        }
    }
    return status == DCP_OK ? dcp__jscan_end(&r->scan, err) : status;
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
        uint64_t existing = 0;
        status = dcp__strmap_add(&s->by_name, s->tensors[i].name, i, &existing, err);
        if (status == DCP_OK && existing != UINT64_MAX) {
            status = DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s' is described twice", dcp__print(s->tensors[i].name).text);
        }
    }
    return status;
}

static dcp_status build(reader *r, uint64_t size, bool to_end, dcp_error *err)
{
    dcp__safetensors *s = r->s;
    dcp_status status = read_members(r, err);
    status = status == DCP_OK ? settle_pairs(r, err) : status;
    if (status == DCP_OK) {
        if (s->n_tensors) {
            qsort(s->tensors, s->n_tensors, sizeof *s->tensors, by_place);
        }
        status = index_names(s, err);
    }
    if (status == DCP_OK) {
        status = check_ranges(s, size, to_end, err);
    }
    if (status == DCP_OK && r->sharding.ptr) {
        status = dcp__st_read_sharding(s, r->sharding, err);
    }
    if (status == DCP_OK && r->own.ptr) {
        status = dcp__st_read_own_facts(s, r->own, err);
    }
    return status;
}

dcp_status dcp__safetensors_open(dcp_context *ctx, const dcp__source *src, bool to_end, dcp__safetensors *out, dcp_error *err)
{
    dcp__safetensors s = {.ctx = ctx};
    char *text = NULL;
    size_t length = 0;
    dcp_status status = load_header(ctx, src, &text, &length, err);
    if (status != DCP_OK) {
        return status;
    }
    s.header_bytes = DCP__ST_LENGTH_BYTES + (uint64_t)length;
    dcp__arena_init(&s.arena, ctx, ctx->limits.max_parse_bytes);
    dcp__strmap_init(&s.by_name, ctx);
    reader r = {.s = &s, .scan = {&s.arena, text, text, text + length, DCP__ST_LENGTH_BYTES, "header", 0}};
    dcp__strmap_init(&r.seen, ctx);
    status = build(&r, src->size, to_end, err);
    dcp__strmap_reset(&r.seen);
    dcp__free(ctx, r.keys);
    dcp__free(ctx, r.values);
    dcp__free(ctx, text);
    if (status != DCP_OK) {
        dcp__safetensors_reset(&s);
        return status;
    }
    *out = s;
    return DCP_OK;
}

void dcp__safetensors_reset(dcp__safetensors *s)
{
    dcp__free(s->ctx, s->tensors);
    dcp__strmap_reset(&s->by_name);
    dcp__arena_reset(&s->arena);
}
