/* The callables of formats.md 4 that stand for plain data: what they would return is built, nothing is called. */
#include <stdio.h>

#include "format/object_builder.h"

typedef dcp_status (*build_fn)(dcp__builder *b, const dcp__call *call, unsigned depth, dcp_value **out, dcp_error *err);

static bool is_latin1(dcp_str name)
{
    return dcp__str_is(name, "latin1") || dcp__str_is(name, "latin-1");
}

/* UTF-8 of code points below 256 back to bytes; false if there is another one. out has room for text.len bytes. */
static bool encode_latin1(dcp_str text, uint8_t *out, size_t *n)
{
    const uint8_t *p = (const uint8_t *)text.ptr;
    *n = 0;
    for (size_t i = 0; i < text.len; i++) {
        if (p[i] < 0x80) {
            out[(*n)++] = p[i];
        } else if ((p[i] == 0xc2 || p[i] == 0xc3) && i + 1 < text.len) {
            out[(*n)++] = (uint8_t)(p[i] << 6 | (p[i + 1] & 0x3f));
            i++;
        } else {
            return false;
        }
    }
    return true;
}

static dcp_status build_latin1(dcp__builder *b, dcp_kind kind, dcp_str text, dcp_value **out, dcp_error *err)
{
    uint8_t *bytes = dcp__alloc(b->ctx, text.len);
    if (!bytes) {
        return dcp__nomem(err);
    }
    size_t n;
    bool fits = encode_latin1(text, bytes, &n);
    dcp_status st = fits ? dcp_bytes_create(b->ctx, kind, bytes, n, out, err) : DCP_OK;
    dcp__free(b->ctx, bytes);
    return st;
}

/* (str, "latin1") */
static bool is_latin1_pair(const dcp__call *c)
{
    return c->n_args == 2 && dcp__pv_is_str(c->args[0]) && dcp__pv_is_str(c->args[1]) && is_latin1(dcp__pv_text(c->args[1]));
}

static dcp_status build_encode(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    (void)depth;
    return is_latin1_pair(c) ? build_latin1(b, DCP_KIND_BYTES, dcp__pv_text(c->args[0]), out, err) : DCP_OK;
}

static dcp_status build_bytes(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    (void)depth;
    return c->n_args == 0 ? dcp_bytes_create(b->ctx, DCP_KIND_BYTES, NULL, 0, out, err) : DCP_OK;
}

/* (), (bytes) or, as the type's own reduction has it, (str, "latin-1"). The bytes may be a call of their own. */
static dcp_status build_bytearray(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    if (c->n_args == 0) {
        return dcp_bytes_create(b->ctx, DCP_KIND_BYTEARRAY, NULL, 0, out, err);
    }
    if (is_latin1_pair(c)) {
        return build_latin1(b, DCP_KIND_BYTEARRAY, dcp__pv_text(c->args[0]), out, err);
    }
    dcp__pkind kind = dcp__pv_kind(c->args[0]);
    if (c->n_args != 1 || (kind != DCP__P_BYTES && kind != DCP__P_OBJECT)) {
        return DCP_OK;
    }
    dcp_value *bytes;
    dcp_status st = dcp__build_once(b, c->args[0], depth + 1, &bytes, err);
    if (st) {
        return st;
    }
    dcp_str content = dcp_value_str(bytes);
    if (dcp_value_kind(bytes) == DCP_KIND_BYTES) {
        st = dcp_bytes_create(b->ctx, DCP_KIND_BYTEARRAY, content.ptr, content.len, out, err);
    }
    dcp_value_free(bytes);
    return st;
}

/* set() or set([..]); a torch.Size is made of a sequence alike. */
static dcp_status build_from_items(dcp__builder *b, dcp_kind kind, const dcp__call *c, unsigned depth, dcp_value **out,
                                   dcp_error *err)
{
    size_t n = 0;
    const dcp__pv *items = NULL;
    if (c->n_args > 0) {
        dcp__pkind from = dcp__pv_kind(c->args[0]);
        if (c->n_args > 1 || from < DCP__P_TUPLE || from > DCP__P_FROZENSET) {
            return DCP_OK;
        }
        items = dcp__pv_items(c->args[0], &n);
    }
    dcp_value *seq;
    dcp_status st = dcp_seq_create(b->ctx, kind, &seq, err);
    for (size_t i = 0; !st && i < n; i++) {
        dcp_value *element = NULL;
        st = dcp__build(b, items[i], depth + 1, &element, err);
        st = st ? st : dcp_list_append(seq, element, err);
        if (st) {
            dcp_value_free(element);
            dcp_value_free(seq);
        }
    }
    if (!st) {
        *out = seq;
    }
    return st;
}

static dcp_status build_set(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    return build_from_items(b, DCP_KIND_SET, c, depth, out, err);
}

static dcp_status build_frozenset(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    return build_from_items(b, DCP_KIND_FROZENSET, c, depth, out, err);
}

static dcp_status build_size(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    size_t n = 0;
    const dcp__pv *items = c->n_args == 1 ? dcp__pv_items(c->args[0], &n) : NULL;
    for (size_t i = 0; i < n; i++) {
        if (dcp__pv_kind(items[i]) != DCP__P_INT) {
            return DCP_OK;
        }
    }
    return build_from_items(b, DCP_KIND_SIZE, c, depth, out, err);
}

static bool real_number(dcp__pv v, double *out)
{
    int64_t i;
    if (dcp__pv_int(v, &i)) {
        *out = (double)i;
        return true;
    }
    if (dcp__pv_kind(v) != DCP__P_FLOAT) {
        return false;
    }
    *out = dcp__pv_float(v);
    return true;
}

static dcp_status build_complex(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    (void)depth;
    double re, im;
    if (c->n_args != 2 || !real_number(c->args[0], &re) || !real_number(c->args[1], &im)) {
        return DCP_OK;
    }
    return dcp_complex_create(b->ctx, re, im, out, err);
}

/* ("cuda", 1) becomes "cuda:1". */
static dcp_status build_device(dcp__builder *b, const dcp__call *c, unsigned depth, dcp_value **out, dcp_error *err)
{
    (void)depth;
    int64_t index = -1;
    dcp_str type = c->n_args ? dcp__pv_text(c->args[0]) : (dcp_str){NULL, 0};
    char name[64];
    if (c->n_args < 1 || c->n_args > 2 || !dcp__pv_is_str(c->args[0]) || type.len > 32 ||
        (c->n_args == 2 && (!dcp__pv_int(c->args[1], &index) || index < 0))) {
        return DCP_OK;
    }
    int len = index < 0 ? snprintf(name, sizeof name, "%.*s", (int)type.len, type.ptr)
                        : snprintf(name, sizeof name, "%.*s:%lld", (int)type.len, type.ptr, (long long)index);
    return dcp_device_name_create(b->ctx, (dcp_str){name, (size_t)len}, out, err);
}

dcp_status dcp__build_call(dcp__builder *b, const dcp__call *call, unsigned depth, dcp_value **out, dcp_error *err)
{
    static const struct {
        const char *module, *name; /* name NULL: any, the function looks itself */
        build_fn build;
    } known[] = {
        {"_codecs", "encode", build_encode},
        {"builtins", "bytes", build_bytes},
        {"builtins", "bytearray", build_bytearray},
        {"builtins", "set", build_set},
        {"builtins", "frozenset", build_frozenset},
        {"builtins", "complex", build_complex},
        {"torch", "Size", build_size},
        {"torch", "device", build_device},
        {"torch._utils", NULL, dcp__build_tensor},
        {"torch._tensor", NULL, dcp__build_tensor},
    };
    /* Protocol 2 writes the name that Python 2 knew. */
    dcp_str module = dcp__str_is(call->callable->module, "__builtin__") ? (dcp_str){"builtins", 8} : call->callable->module;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (dcp__str_is(module, known[i].module) && (!known[i].name || dcp__str_is(call->callable->name, known[i].name))) {
            return known[i].build(b, call, depth, out, err);
        }
    }
    return DCP_OK;
}
