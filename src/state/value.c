/* Values: references, scalars, texts, sequences, and reading them. */
#include "state/node.h"

#include <math.h>
#include <string.h>

#include "base/bytes.h"

/* A count that gets here stays: such a value leaks, where an overflow would free it under its users. */
#define REFS_STUCK UINT32_C(0x80000000)

void *dcp__node_alloc(dcp_context *ctx, dcp_kind kind, size_t bytes)
{
    dcp_value *v = dcp__alloc(ctx, bytes);
    if (v) {
        *v = (dcp_value){.ctx = ctx, .refs = 1, .kind = (uint8_t)kind};
    }
    return v;
}

uint32_t dcp__depth_limit(const dcp_context *ctx)
{
    return ctx->limits.max_depth < 4096 ? ctx->limits.max_depth : 4096;
}

uint64_t dcp__visit_limit(const dcp_context *ctx)
{
    const uint64_t bytes_of_visit = 64; /* about what a leaf takes */
    return ctx->limits.max_parse_bytes / bytes_of_visit;
}

/* ---- references ---- */

dcp_value *dcp_value_retain(dcp_value *v)
{
    if (__atomic_load_n(&v->refs, __ATOMIC_RELAXED) < REFS_STUCK) {
        __atomic_fetch_add(&v->refs, 1, __ATOMIC_RELAXED);
    }
    return v;
}

/* Drops a reference, true if it was the last. */
static bool drop_last(dcp_value *v)
{
    uint32_t refs = __atomic_load_n(&v->refs, __ATOMIC_ACQUIRE);
    if (refs == 1) {
        return true; /* nobody else has it: no need to write */
    }
    return refs < REFS_STUCK && __atomic_fetch_sub(&v->refs, 1, __ATOMIC_ACQ_REL) == 1;
}

static bool is_composite(const dcp_value *v)
{
    return dcp__is_seq(v) || dcp__is_dict(v) || v->kind == DCP_KIND_OPAQUE;
}

/* Drops a reference. A leaf without one is freed at once, a composite is put on the list of the dead. */
static void drop(dcp_value *v, dcp_value **dead)
{
    if (!v || !drop_last(v)) {
        return;
    }
    if (is_composite(v)) {
        ((dcp__composite *)v)->link.next_dead = *dead;
        *dead = v;
        return;
    }
    if (v->kind == DCP_KIND_TENSOR) {
        dcp__free_aligned(v->ctx, ((dcp__tensor_node *)v)->owned);
    }
    dcp__free(v->ctx, v);
}

static void bury_seq(dcp__seq *s, dcp_value **dead)
{
    for (size_t i = 0; i < s->count; i++) {
        drop(s->items[i], dead);
    }
    dcp__free(s->base.head.ctx, s->items);
}

static void bury_dict(dcp__dict *d, dcp_value **dead)
{
    for (size_t i = 0; i < d->count; i++) {
        drop(d->entries[i].value, dead);
    }
    dcp__dict_release(d);
}

static void bury_opaque(dcp__opaque_node *o, dcp_value **dead)
{
    dcp__opaque *p = &o->parts;
    dcp_value *const parts[] = {p->callable, p->args, p->kwargs, p->state, p->items, p->pairs};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        drop(parts[i], dead);
    }
    dcp__free(o->base.head.ctx, (void *)p->qualified.ptr); /* module and name lie in the same block */
}

/* Depth costs no stack: nodes wait in a list that runs through themselves. */
void dcp_value_free(dcp_value *v)
{
    dcp_value *dead = NULL;
    drop(v, &dead);
    while (dead) {
        dcp_value *node = dead;
        dead = ((dcp__composite *)node)->link.next_dead;
        if (dcp__is_seq(node)) {
            bury_seq((dcp__seq *)node, &dead);
        } else if (dcp__is_dict(node)) {
            bury_dict((dcp__dict *)node, &dead);
        } else {
            bury_opaque((dcp__opaque_node *)node, &dead);
        }
        dcp__free(node->ctx, node);
    }
}

/* ---- scalars ---- */

static dcp_status scalar_create(dcp_context *ctx, dcp_kind kind, dcp__scalar **out, dcp_error *err)
{
    *out = dcp__node_alloc(dcp__context(ctx), kind, sizeof **out);
    return *out ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp_none_create(dcp_context *ctx, dcp_value **out, dcp_error *err)
{
    dcp__scalar *s;
    dcp_status status = scalar_create(ctx, DCP_KIND_NONE, &s, err);
    if (status == DCP_OK) {
        *out = &s->head;
    }
    return status;
}

dcp_status dcp_bool_create(dcp_context *ctx, bool b, dcp_value **out, dcp_error *err)
{
    dcp__scalar *s;
    dcp_status status = scalar_create(ctx, DCP_KIND_BOOL, &s, err);
    if (status == DCP_OK) {
        s->as.boolean = b;
        *out = &s->head;
    }
    return status;
}

dcp_status dcp_int_create(dcp_context *ctx, int64_t i, dcp_value **out, dcp_error *err)
{
    dcp__scalar *s;
    dcp_status status = scalar_create(ctx, DCP_KIND_INT, &s, err);
    if (status == DCP_OK) {
        s->as.integer = i;
        *out = &s->head;
    }
    return status;
}

dcp_status dcp_float_create(dcp_context *ctx, double d, dcp_value **out, dcp_error *err)
{
    dcp__scalar *s;
    dcp_status status = scalar_create(ctx, DCP_KIND_FLOAT, &s, err);
    if (status == DCP_OK) {
        s->as.real = d;
        *out = &s->head;
    }
    return status;
}

dcp_status dcp_dtype_create(dcp_context *ctx, dcp_dtype dtype, dcp_value **out, dcp_error *err)
{
    if (!dcp_dtype_bytes(dtype)) {
        return dcp__fail(err, DCP_ARG, "no dtype has the number %d", (int)dtype);
    }
    dcp__scalar *s;
    dcp_status status = scalar_create(ctx, DCP_KIND_DTYPE, &s, err);
    if (status == DCP_OK) {
        s->as.dtype = dtype;
        *out = &s->head;
    }
    return status;
}

dcp_status dcp_complex_create(dcp_context *ctx, double re, double im, dcp_value **out, dcp_error *err)
{
    dcp__complex *c = dcp__node_alloc(dcp__context(ctx), DCP_KIND_COMPLEX, sizeof *c);
    if (!c) {
        return dcp__nomem(err);
    }
    c->re = re;
    c->im = im;
    *out = &c->head;
    return DCP_OK;
}

/* Length without surplus sign bytes. */
static size_t minimal_len(const uint8_t *bytes, size_t len)
{
    while (len > 1 && bytes[len - 1] == (bytes[len - 2] & 0x80 ? 0xFF : 0)) {
        len--;
    }
    return len == 1 && bytes[0] == 0 ? 0 : len;
}

dcp_status dcp_bigint_create(dcp_context *ctx, const uint8_t *bytes, size_t len, dcp_value **out, dcp_error *err)
{
    if (!bytes && len) {
        return dcp__fail(err, DCP_ARG, "integer of %zu bytes at no address", len);
    }
    len = minimal_len(bytes, len);
    if (len > 8) {
        dcp_status status = dcp__text_create(ctx, DCP_KIND_INT, bytes, len, out, err);
        if (status == DCP_OK) {
            (*out)->is_big = true;
        }
        return status;
    }
    int64_t i = len && bytes[len - 1] & 0x80 ? -1 : 0;
    if (len) {
        memcpy(&i, bytes, len);
    }
    return dcp_int_create(ctx, i, out, err);
}

/* ---- texts ---- */

dcp_status dcp__text_create(dcp_context *ctx, dcp_kind kind, const void *bytes, size_t len, dcp_value **out, dcp_error *err)
{
    if (!bytes && len) {
        return dcp__fail(err, DCP_ARG, "%zu bytes at no address", len);
    }
    dcp__text *t = len < SIZE_MAX - sizeof *t ? dcp__node_alloc(dcp__context(ctx), kind, sizeof *t + len + 1) : NULL;
    if (!t) {
        return dcp__nomem(err);
    }
    t->len = len;
    if (len) {
        memcpy(t->bytes, bytes, len);
    }
    t->bytes[len] = 0;
    *out = &t->head;
    return DCP_OK;
}

static dcp_status checked_text_create(dcp_context *ctx, dcp_kind kind, dcp_str text, dcp_value **out, dcp_error *err)
{
    if (text.ptr && !dcp__is_wtf8(text)) {
        return dcp__fail(err, DCP_ARG, "text of %zu bytes is not UTF-8", text.len);
    }
    return dcp__text_create(ctx, kind, text.ptr, text.len, out, err);
}

dcp_status dcp_string_create(dcp_context *ctx, dcp_str text, dcp_value **out, dcp_error *err)
{
    return checked_text_create(ctx, DCP_KIND_STR, text, out, err);
}

dcp_status dcp_device_name_create(dcp_context *ctx, dcp_str text, dcp_value **out, dcp_error *err)
{
    return checked_text_create(ctx, DCP_KIND_DEVICE, text, out, err);
}

dcp_status dcp_bytes_create(dcp_context *ctx, dcp_kind kind, const void *bytes, size_t len, dcp_value **out, dcp_error *err)
{
    if (kind != DCP_KIND_BYTES && kind != DCP_KIND_BYTEARRAY) {
        return dcp__fail(err, DCP_ARG, "kind %d is neither bytes nor bytearray", (int)kind);
    }
    return dcp__text_create(ctx, kind, bytes, len, out, err);
}

/* ---- sequences ---- */

dcp_status dcp_seq_create(dcp_context *ctx, dcp_kind kind, dcp_value **out, dcp_error *err)
{
    if (kind < DCP_KIND_LIST || kind > DCP_KIND_FROZENSET) {
        return dcp__fail(err, DCP_ARG, "kind %d is no sequence or set", (int)kind);
    }
    dcp__seq *s = dcp__node_alloc(dcp__context(ctx), kind, sizeof *s);
    if (!s) {
        return dcp__nomem(err);
    }
    s->base.link.cap = 0;
    s->count = 0;
    s->items = NULL;
    *out = &s->base.head;
    return DCP_OK;
}

dcp_status dcp_list_create(dcp_context *ctx, dcp_value **out, dcp_error *err)
{
    return dcp_seq_create(ctx, DCP_KIND_LIST, out, err);
}

dcp_status dcp_list_append(dcp_value *list, dcp_value *element, dcp_error *err)
{
    if (!dcp__is_seq(list) || !element || list == element) {
        return dcp__fail(err, DCP_ARG, "append: %s",
                         dcp__is_seq(list) ? "no element, or the list itself" : "not a sequence or set");
    }
    if (list->kind == DCP_KIND_SIZE && element->kind != DCP_KIND_INT) {
        return dcp__fail(err, DCP_ARG, "append: an element of torch.Size must be an integer, not kind %d", element->kind);
    }
    dcp__seq *s = (dcp__seq *)list;
    void *items = s->items;
    if (s->count == s->base.link.cap && !dcp__grow(list->ctx, &items, &s->base.link.cap, s->count + 1, sizeof *s->items)) {
        return dcp__nomem(err);
    }
    s->items = items;
    s->items[s->count++] = element;
    return DCP_OK;
}

dcp_status dcp_list_set(dcp_value *list, size_t i, dcp_value *element, dcp_error *err)
{
    if (!dcp__is_seq(list) || !element || list == element || i >= ((dcp__seq *)list)->count) {
        return dcp__fail(err, DCP_ARG, "set: no element %zu of a sequence, or nothing to put there", i);
    }
    if (list->kind == DCP_KIND_SIZE && element->kind != DCP_KIND_INT) {
        return dcp__fail(err, DCP_ARG, "set: an element of torch.Size must be an integer, not kind %d", element->kind);
    }
    dcp__seq *s = (dcp__seq *)list;
    dcp_value_free(s->items[i]);
    s->items[i] = element;
    return DCP_OK;
}

/* ---- reading ---- */

dcp_kind dcp_value_kind(const dcp_value *v)
{
    return v ? (dcp_kind)v->kind : DCP_KIND_NONE;
}

bool dcp_value_bool(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_BOOL) && ((const dcp__scalar *)v)->as.boolean;
}

bool dcp_value_int(const dcp_value *v, int64_t *out)
{
    if (!dcp__is_kind(v, DCP_KIND_INT) || v->is_big) {
        return false;
    }
    *out = ((const dcp__scalar *)v)->as.integer;
    return true;
}

dcp_str dcp_value_bigint(const dcp_value *v)
{
    if (!dcp__is_kind(v, DCP_KIND_INT)) {
        return (dcp_str){NULL, 0};
    }
    if (v->is_big) {
        const dcp__text *t = (const dcp__text *)v;
        return (dcp_str){t->bytes, t->len};
    }
    const int64_t *i = &((const dcp__scalar *)v)->as.integer;
    size_t len = minimal_len((const uint8_t *)i, sizeof *i); /* machines are little-endian (base/bytes.h) */
    return (dcp_str){len ? (const char *)i : NULL, len};
}

double dcp_value_float(const dcp_value *v)
{
    if (dcp__is_kind(v, DCP_KIND_COMPLEX)) {
        return ((const dcp__complex *)v)->re;
    }
    return dcp__is_kind(v, DCP_KIND_FLOAT) ? ((const dcp__scalar *)v)->as.real : NAN;
}

double dcp_value_imag(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_COMPLEX) ? ((const dcp__complex *)v)->im : 0;
}

dcp_str dcp_value_str(const dcp_value *v)
{
    switch (dcp_value_kind(v)) {
    case DCP_KIND_STR:
    case DCP_KIND_BYTES:
    case DCP_KIND_BYTEARRAY:
    case DCP_KIND_DEVICE: return (dcp_str){((const dcp__text *)v)->bytes, ((const dcp__text *)v)->len};
    case DCP_KIND_RECORD: return ((const dcp__record_node *)v)->bytes;
    default: return (dcp_str){NULL, 0};
    }
}

dcp_dtype dcp_value_dtype(const dcp_value *v)
{
    switch (dcp_value_kind(v)) {
    case DCP_KIND_DTYPE: return ((const dcp__scalar *)v)->as.dtype;
    case DCP_KIND_TENSOR: return ((const dcp__tensor_node *)v)->tensor.dtype;
    case DCP_KIND_SHARDED: return ((const dcp__sharded_node *)v)->dtype;
    default: return DCP_DTYPE_NONE;
    }
}

size_t dcp_value_count(const dcp_value *v)
{
    if (dcp__is_seq(v)) {
        return ((const dcp__seq *)v)->count;
    }
    if (dcp__is_dict(v)) {
        return ((const dcp__dict *)v)->count;
    }
    return dcp__is_kind(v, DCP_KIND_SHARDED) ? ((const dcp__sharded_node *)v)->n_chunks : 0;
}

dcp_value *dcp_value_at(const dcp_value *v, size_t i)
{
    if (dcp__is_seq(v)) {
        const dcp__seq *s = (const dcp__seq *)v;
        return i < s->count ? s->items[i] : NULL;
    }
    if (dcp__is_dict(v)) {
        const dcp__dict *d = (const dcp__dict *)v;
        return i < d->count ? d->entries[i].value : NULL;
    }
    return NULL;
}
