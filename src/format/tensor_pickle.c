/* The fast way through the pickle of a plain tensor: 100 ns instead of microseconds for the pickle machine, which is what the
 * loading of many small tensors would otherwise consist of. */
#include "base/bytes.h"
#include "format/object_builder.h"
#include "format/record_internal.h"

typedef struct cursor {
    const uint8_t *p, *end;
    uint32_t n_puts;
} cursor;

static size_t left(const cursor *c)
{
    return (size_t)(c->end - c->p);
}

static bool take(cursor *c, const void *bytes, size_t n)
{
    if (left(c) < n || memcmp(c->p, bytes, n) != 0) {
        return false;
    }
    c->p += n;
    return true;
}
#define TAKE(c, literal) take(c, literal, sizeof(literal) - 1)

static bool take_op(cursor *c, uint8_t op)
{
    if (c->p == c->end || *c->p != op) {
        return false;
    }
    c->p++;
    return true;
}

/* BINPUT or LONG_BINPUT, or nothing: without BINGET nobody asks for the entry. The indices count up from 0. False if they do
 * not, or cut off. */
static bool skip_put(cursor *c)
{
    size_t n = left(c) && *c->p == 0x71 ? 2 : left(c) && *c->p == 0x72 ? 5 : 0;
    if (left(c) < n || (n == 2 && c->p[1] != c->n_puts) || (n == 5 && dcp__load32(c->p + 1) != c->n_puts)) {
        return false;
    }
    c->n_puts += n > 0;
    c->p += n;
    return true;
}

static bool is_ascii(dcp_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        if ((uint8_t)s.ptr[i] & 0x80) {
            return false;
        }
    }
    return true;
}

/* BINUNICODE and what stores it. Whether other text is valid is for the pickle machine. */
static bool take_text(cursor *c, dcp_str *out)
{
    if (left(c) < 5 || *c->p != 0x58 || dcp__load32(c->p + 1) > left(c) - 5) {
        return false;
    }
    *out = (dcp_str){(const char *)c->p + 5, dcp__load32(c->p + 1)};
    c->p += 5 + out->len;
    return is_ascii(*out) && skip_put(c);
}

static bool take_line(cursor *c, dcp_str *out)
{
    const uint8_t *newline = memchr(c->p, '\n', left(c));
    if (!newline) {
        return false;
    }
    *out = (dcp_str){(const char *)c->p, (size_t)(newline - c->p)};
    c->p = newline + 1;
    return true;
}

/* GLOBAL and what stores it. */
static bool take_global(cursor *c, dcp_str *module, dcp_str *name)
{
    return take_op(c, 0x63) && take_line(c, module) && take_line(c, name) && skip_put(c);
}

/* LONG1 of up to 8 bytes. */
static bool take_long(cursor *c, int64_t *out)
{
    size_t n = left(c) >= 2 ? c->p[1] : 255;
    if (n < 1 || n > 8 || left(c) < 2 + n) {
        return false;
    }
    uint64_t v = c->p[1 + n] & 0x80 ? UINT64_MAX : 0;
    for (size_t i = n; i-- > 0;) {
        v = v << 8 | c->p[2 + i];
    }
    c->p += 2 + n;
    *out = (int64_t)v;
    return true;
}

static bool take_int(cursor *c, int64_t *out)
{
    if (left(c) >= 2 && *c->p == 0x4b) {
        *out = c->p[1];
        c->p += 2;
    } else if (left(c) >= 3 && *c->p == 0x4d) {
        *out = dcp__load16(c->p + 1);
        c->p += 3;
    } else if (left(c) >= 5 && *c->p == 0x4a) {
        *out = (int32_t)dcp__load32(c->p + 1);
        c->p += 5;
    } else {
        return left(c) && *c->p == 0x8a && take_long(c, out);
    }
    return true;
}

/* A tuple of integers and what stores it. Up to three items the opcode behind them says how many there are. */
static bool take_ints(cursor *c, int64_t *out, int *n)
{
    *n = 0;
    if (take_op(c, 0x29)) {
        return skip_put(c);
    }
    bool is_marked = take_op(c, 0x28);
    while (*n < DCP_MAX_NDIM && take_int(c, &out[*n])) {
        (*n)++;
    }
    return take_op(c, is_marked ? 0x74 : (uint8_t)(0x84 + *n)) && (is_marked || (*n >= 1 && *n <= 3)) && skip_put(c);
}

/* ("storage", class, key, location, elements) BINPERSID */
static bool take_storage(cursor *c, dcp__tensor_pickle *out)
{
    dcp_str tag, module, name, location;
    dcp__storage_class cls;
    int64_t elems;
    if (!take_op(c, 0x28) || !take_text(c, &tag) || !dcp__str_is(tag, "storage") || !take_global(c, &module, &name) ||
        !dcp__storage_class_find(module, name, &cls) || !take_text(c, &out->key) || !take_text(c, &location) ||
        !take_int(c, &elems) || elems < 0 || !take_op(c, 0x74) || !skip_put(c) || !take_op(c, 0x51)) {
        return false;
    }
    out->dtype = cls.dtype;
    out->is_untyped = cls.is_untyped;
    out->elem_bytes = cls.elem_bytes;
    out->elems = (uint64_t)elems;
    return true;
}

/* collections.OrderedDict() */
static bool take_hooks(cursor *c)
{
    return TAKE(c, "ccollections\nOrderedDict\n") && skip_put(c) && take_op(c, 0x29) && take_op(c, 0x52) && skip_put(c);
}

/* torch.<dtype>, in version 3 only; version 2 has the class of its storage. */
static bool take_dtype(cursor *c, bool is_v3, dcp__tensor_pickle *out)
{
    dcp_str module, name;
    if (is_v3) {
        if (!take_global(c, &module, &name) || !dcp__str_is(module, "torch")) {
            return false;
        }
        out->dtype = dcp_dtype_from_name(name);
    }
    return out->dtype != DCP_DTYPE_NONE;
}

bool dcp__tensor_pickle_match(const uint8_t *pickle, size_t n, dcp__tensor_pickle *out)
{
    cursor c = {pickle, pickle + n, 0};
    int n_strides;
    if (!TAKE(&c, "\x80\x02"
                  "ctorch._utils\n_rebuild_tensor_v")) {
        return false;
    }
    bool is_v3 = left(&c) && *c.p == '3';
    return (TAKE(&c, "2\n") || TAKE(&c, "3\n")) && skip_put(&c) && take_op(&c, 0x28) && take_storage(&c, out) &&
           take_int(&c, &out->storage_offset) && take_ints(&c, out->sizes, &out->ndim) &&
           take_ints(&c, out->strides, &n_strides) && out->ndim == n_strides && (take_op(&c, 0x89) || take_op(&c, 0x88)) &&
           take_hooks(&c) && take_dtype(&c, is_v3, out) && take_op(&c, 0x74) && skip_put(&c) && take_op(&c, 0x52) &&
           skip_put(&c) && take_op(&c, 0x2e);
}
