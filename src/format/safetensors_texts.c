#include "format/safetensors_texts.h"

#include <limits.h>

#include "format/json_read.h"

static dcp_str text_of(const json_t *json)
{
    return (dcp_str){json_string_value(json), json_string_length(json)};
}

/* An array of integers >= 0 in the arena. `owner` and `what` name it in messages. */
static dcp_status read_extents(dcp__arena *a, const char *owner, const char *what, const json_t *array, int64_t **out, int *n,
                               dcp_error *err)
{
    if (!json_is_array(array)) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s is no array", dcp__print(dcp_str_of(owner)).text, what);
    }
    size_t count = json_array_size(array);
    if (count > DCP_MAX_NDIM) {
        return DCP__ST_FAULT(err, DCP_LIMIT, "tensor '%s': %s has %zu dimensions, at most %d can be read",
                             dcp__print(dcp_str_of(owner)).text, what, count, DCP_MAX_NDIM);
    }
    int64_t *values = dcp__arena_alloc(a, count * sizeof *values);
    if (!values) {
        return dcp__arena_fail(a, err);
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(array, i);
        if (!json_is_integer(item) || json_integer_value(item) < 0) {
            return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s[%zu] is no integer from 0 to 2^63 - 1",
                                 dcp__print(dcp_str_of(owner)).text, what, i);
        }
        values[i] = json_integer_value(item);
    }
    *out = values;
    *n = (int)count;
    return DCP_OK;
}

/* The tensor that a text speaks of. */
static dcp_status find_tensor(dcp__safetensors *s, const char *name, const char *what, dcp__st_tensor **out, dcp_error *err)
{
    uint64_t i;
    if (!dcp__strmap_get(&s->by_name, dcp_str_of(name), &i)) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "%s names '%s', which is not in the file", what, dcp__print(dcp_str_of(name)).text);
    }
    *out = &s->tensors[i];
    return DCP_OK;
}

/* One value for each dimension of t. */
static dcp_status read_position(dcp__safetensors *s, const dcp__st_tensor *t, const char *what, const json_t *json,
                                const int64_t **out, dcp_error *err)
{
    int64_t *values = NULL;
    int n = 0;
    dcp_status status = read_extents(&s->arena, t->name.ptr, what, json_object_get(json, what), &values, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    if (n != t->ndim) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': %s has %d dimensions, its shape %d", dcp__print(t->name).text, what,
                             n, t->ndim);
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
                return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': saved_offsets[%d] overflows", dcp__print(t->name).text, i);
            }
        }
    }
    return DCP_OK;
}

dcp_status dcp__st_read_sharding(dcp__safetensors *s, dcp_str text, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(s->ctx, text, DCP_NO_OFFSET, "DCP_SHARDING_INFO", &root, err);
    if (status != DCP_OK) {
        return status;
    }
    status = read_saved_offsets(s, root, err);
    json_decref(root);
    for (size_t i = 0; status == DCP_OK && i < s->n_tensors; i++) {
        if (!s->tensors[i].saved_offsets) {
            status = DCP__ST_FAULT(err, DCP_FORMAT, "DCP_SHARDING_INFO lacks tensor '%s'", dcp__print(s->tensors[i].name).text);
        }
    }
    s->has_sharding_info = true;
    return status;
}

static dcp_status read_global_shapes(dcp__safetensors *s, json_t *tensors, dcp_error *err)
{
    if (!json_is_object(tensors)) {
        return DCP__ST_FAULT(err, DCP_FORMAT, "libdcp: tensors is no object");
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
                return DCP__ST_FAULT(err, DCP_FORMAT, "tensor '%s': dimension %d reaches %lld, the global shape has %lld",
                                     dcp__print(t->name).text, i, (long long)(offset + t->extents[i]),
                                     (long long)t->global_extents[i]);
            }
        }
    }
    return DCP_OK;
}

static dcp_status read_empty_shards(dcp__safetensors *s, const json_t *list, dcp_error *err)
{
    size_t n = json_array_size(list);
    s->own_empty = n ? dcp__arena_alloc(&s->arena, n * sizeof *s->own_empty) : NULL;
    if (n && !s->own_empty) {
        return dcp__arena_fail(&s->arena, err);
    }
    for (size_t i = 0; i < n; i++) {
        json_int_t shard = json_integer_value(json_array_get(list, i)); /* 0 for what is no integer */
        if (shard <= (i ? (json_int_t)s->own_empty[i - 1] : 0) || shard > s->own_world) {
            return DCP__ST_FAULT(err, DCP_FORMAT, "libdcp: empty_shards[%zu] is no number of a shard, or out of order", i);
        }
        s->own_empty[s->n_own_empty++] = (uint32_t)shard;
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
        return DCP__ST_FAULT(err, DCP_FORMAT, "libdcp: world is no number of ranks");
    }
    s->own_world = (int)json_integer_value(world);
    if (json_is_string(writer)) {
        s->own_writer = dcp__arena_str(&s->arena, text_of(writer));
        if (!s->own_writer.ptr) {
            return dcp__arena_fail(&s->arena, err);
        }
    }
    dcp_status status = read_empty_shards(s, json_object_get(root, "empty_shards"), err);
    if (status != DCP_OK) {
        return status;
    }
    json_t *tensors = json_object_get(root, "tensors");
    return tensors ? read_global_shapes(s, tensors, err) : DCP_OK;
}

dcp_status dcp__st_read_own_facts(dcp__safetensors *s, dcp_str text, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(s->ctx, text, DCP_NO_OFFSET, "libdcp in __metadata__", &root, err);
    if (status == DCP_OK) {
        status = take_own_facts(s, root, err);
        json_decref(root);
    }
    return status;
}
