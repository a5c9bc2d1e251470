/* Dicts: insertion-ordered entries, found by a scan while they are few and through a hash index once they are many. */
#include "state/node.h"

#include <string.h>

#include "base/hash.h"

#define MOST_SCANNED 8

typedef struct dcp__dict_slot {
    uint32_t tag;      /* upper half of the hash */
    uint32_t position; /* of the entry plus one; 0: empty */
} dcp__dict_slot;

__extension__ typedef unsigned __int128 u128;

dcp_key dcp_key_str(const char *text)
{
    return (dcp_key){.string = dcp_str_of(text)};
}

dcp_key dcp_key_int(int64_t integer)
{
    return (dcp_key){.is_int = true, .integer = integer};
}

static dcp_status create(dcp_context *ctx, dcp_kind kind, dcp_value **out, dcp_error *err)
{
    dcp__dict *d = dcp__node_alloc(dcp__context(ctx), kind, sizeof *d);
    if (!d) {
        return dcp__nomem(err);
    }
    d->base.link.cap = 0;
    d->count = 0;
    d->entries = NULL;
    d->slots = NULL;
    d->n_slots = 0;
    *out = &d->base.head;
    return DCP_OK;
}

dcp_status dcp_dict_create(dcp_context *ctx, dcp_value **out, dcp_error *err)
{
    return create(ctx, DCP_KIND_DICT, out, err);
}

dcp_status dcp_ordered_dict_create(dcp_context *ctx, dcp_value **out, dcp_error *err)
{
    return create(ctx, DCP_KIND_ORDERED_DICT, out, err);
}

void dcp__dict_release(dcp__dict *d)
{
    dcp_context *ctx = d->base.head.ctx;
    for (size_t i = 0; i < d->count; i++) {
        dcp__free(ctx, d->entries[i].text);
    }
    dcp__free(ctx, d->entries);
    dcp__free(ctx, d->slots);
}

static dcp_key key_of(const dcp__dict_entry *e)
{
    return e->text ? (dcp_key){.string = {e->text, e->key.len}} : dcp_key_int(e->key.integer);
}

static bool has_key(const dcp__dict_entry *e, const dcp_key *key)
{
    if (key->is_int) {
        return !e->text && e->key.integer == key->integer;
    }
    return e->text && e->key.len == key->string.len && (e->key.len == 0 || memcmp(e->text, key->string.ptr, e->key.len) == 0);
}

/* The dict's own address takes part, so that nobody can put keys of one slot into a file. */
static uint64_t hash_of(const dcp__dict *d, const dcp_key *key)
{
    uint64_t h = key->is_int       ? dcp__xxh3_64(&key->integer, sizeof key->integer)
                 : key->string.len ? dcp__xxh3_64(key->string.ptr, key->string.len)
                                   : 0;
    uint64_t seed = (uint64_t)(uintptr_t)d * UINT64_C(0x9E3779B97F4A7C15);
    u128 product = (u128)(h ^ seed) * (seed ^ UINT64_C(0xD6E8FEB86659FD93));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static dcp__dict_entry *find(const dcp__dict *d, const dcp_key *key)
{
    if (!d->slots) {
        for (size_t i = 0; i < d->count; i++) {
            if (has_key(&d->entries[i], key)) {
                return &d->entries[i];
            }
        }
        return NULL;
    }
    uint64_t hash = hash_of(d, key);
    for (size_t i = hash & (d->n_slots - 1);; i = (i + 1) & (d->n_slots - 1)) {
        const dcp__dict_slot *s = &d->slots[i];
        if (!s->position) {
            return NULL;
        }
        if (s->tag == (uint32_t)(hash >> 32) && has_key(&d->entries[s->position - 1], key)) {
            return &d->entries[s->position - 1];
        }
    }
}

static void index_entry(dcp__dict *d, size_t position)
{
    dcp_key key = key_of(&d->entries[position]);
    uint64_t hash = hash_of(d, &key);
    size_t i = hash & (d->n_slots - 1);
    while (d->slots[i].position) {
        i = (i + 1) & (d->n_slots - 1);
    }
    d->slots[i] = (dcp__dict_slot){(uint32_t)(hash >> 32), (uint32_t)position + 1};
}

/* Room for one more entry in the index. Small dicts have none. */
static bool reserve_slot(dcp__dict *d)
{
    if (d->count < MOST_SCANNED || d->count + 1 <= d->n_slots / 4 * 3) {
        return true;
    }
    size_t n_slots = d->n_slots ? d->n_slots * 2 : 4 * MOST_SCANNED;
    dcp__dict_slot *slots = dcp__calloc(d->base.head.ctx, n_slots, sizeof *slots);
    if (!slots) {
        return false;
    }
    dcp__free(d->base.head.ctx, d->slots);
    d->slots = slots;
    d->n_slots = n_slots;
    for (size_t i = 0; i < d->count; i++) {
        index_entry(d, i);
    }
    return true;
}

static bool reserve_entry(dcp__dict *d)
{
    void *entries = d->entries;
    bool ok = dcp__grow(d->base.head.ctx, &entries, &d->base.link.cap, d->count + 1, sizeof *d->entries);
    d->entries = entries;
    return ok;
}

static dcp_status add(dcp__dict *d, const dcp_key *key, dcp_value *value, dcp_error *err)
{
    if (d->count >= UINT32_MAX - 1) {
        return dcp__fail(err, DCP_LIMIT, "a dict cannot hold more than %zu entries", d->count);
    }
    if (!reserve_slot(d) || !reserve_entry(d)) {
        return dcp__nomem(err);
    }
    dcp__dict_entry *e = &d->entries[d->count];
    *e = (dcp__dict_entry){.key.integer = key->integer, .value = value};
    if (!key->is_int) {
        e->key.len = key->string.len;
        e->text = dcp__strndup(d->base.head.ctx, key->string.ptr, key->string.len);
        if (!e->text) {
            return dcp__nomem(err);
        }
    }
    d->count++;
    if (d->slots) {
        index_entry(d, d->count - 1);
    }
    return DCP_OK;
}

dcp_status dcp_dict_set(dcp_value *dict, dcp_key key, dcp_value *value, dcp_error *err)
{
    if (!dcp__is_dict(dict) || !value || dict == value) {
        return dcp__fail(err, DCP_ARG, "set: %s", dcp__is_dict(dict) ? "no value, or the dict itself" : "not a dict");
    }
    if (!key.is_int && ((!key.string.ptr && key.string.len) || !dcp__is_wtf8(key.string))) {
        return dcp__fail(err, DCP_ARG, "set: key of %zu bytes is not UTF-8", key.string.len);
    }
    dcp__dict_entry *e = find((dcp__dict *)dict, &key);
    if (!e) {
        return add((dcp__dict *)dict, &key, value, err);
    }
    dcp_value *old = e->value;
    e->value = value;
    dcp_value_free(old);
    return DCP_OK;
}

dcp_status dcp__dict_rename(dcp_value *dict, dcp_key from, dcp_key to, dcp_error *err)
{
    dcp__dict *d = (dcp__dict *)dict;
    dcp__dict_entry *e = find(d, &from);
    if (!e || find(d, &to)) {
        return DCP_OK;
    }
    dcp__dict_slot *slots = d->slots ? dcp__calloc(dict->ctx, d->n_slots, sizeof *slots) : NULL;
    if (d->slots && !slots) {
        return dcp__nomem(err);
    }
    dcp__free(dict->ctx, e->text);
    e->text = NULL;
    e->key.integer = to.integer;
    dcp__free(dict->ctx, d->slots);
    d->slots = slots;
    for (size_t i = 0; slots && i < d->count; i++) {
        index_entry(d, i);
    }
    return DCP_OK;
}

/* Sets a value that was just made, or frees it. */
static dcp_status set_new(dcp_value *dict, const char *key, dcp_status made, dcp_value *value, dcp_error *err)
{
    if (made != DCP_OK) {
        return made;
    }
    dcp_status status = key ? dcp_dict_set(dict, dcp_key_str(key), value, err) : dcp__fail(err, DCP_ARG, "set: no key");
    if (status != DCP_OK) {
        dcp_value_free(value);
    }
    return status;
}

static dcp_context *context_of(const dcp_value *v)
{
    return v ? v->ctx : NULL;
}

dcp_status dcp_dict_set_int(dcp_value *dict, const char *key, int64_t i, dcp_error *err)
{
    dcp_value *v = NULL;
    dcp_status made = dcp_int_create(context_of(dict), i, &v, err);
    return set_new(dict, key, made, v, err);
}

dcp_status dcp_dict_set_float(dcp_value *dict, const char *key, double d, dcp_error *err)
{
    dcp_value *v = NULL;
    dcp_status made = dcp_float_create(context_of(dict), d, &v, err);
    return set_new(dict, key, made, v, err);
}

dcp_status dcp_dict_set_bool(dcp_value *dict, const char *key, bool b, dcp_error *err)
{
    dcp_value *v = NULL;
    dcp_status made = dcp_bool_create(context_of(dict), b, &v, err);
    return set_new(dict, key, made, v, err);
}

dcp_status dcp_dict_set_string(dcp_value *dict, const char *key, const char *text, dcp_error *err)
{
    dcp_value *v = NULL;
    dcp_status made =
        text ? dcp_string_create(context_of(dict), dcp_str_of(text), &v, err) : dcp__fail(err, DCP_ARG, "set: no text");
    return set_new(dict, key, made, v, err);
}

dcp_status dcp_dict_set_tensor(dcp_value *dict, const char *key, const dcp_tensor *t, dcp_error *err)
{
    dcp_value *v = NULL;
    dcp_status made = dcp_tensor_create(context_of(dict), t, &v, err);
    return set_new(dict, key, made, v, err);
}

dcp_key dcp_dict_key(const dcp_value *v, size_t i)
{
    if (!dcp__is_dict(v) || i >= ((const dcp__dict *)v)->count) {
        return (dcp_key){false, 0, {NULL, 0}};
    }
    return key_of(&((const dcp__dict *)v)->entries[i]);
}

dcp_value *dcp_dict_get(const dcp_value *v, dcp_key key)
{
    dcp__dict_entry *e = dcp__is_dict(v) ? find((const dcp__dict *)v, &key) : NULL;
    return e ? e->value : NULL;
}

dcp_value *dcp_dict_get_str(const dcp_value *v, const char *key)
{
    return key ? dcp_dict_get(v, dcp_key_str(key)) : NULL;
}
