/* Python's repr of values (3.11). */
#include <stdio.h>
#include <utf8proc.h>

#include "base/buf.h"
#include "state/node.h"
#include "state/number_text.h"

#define DEFAULT_MAX_BYTES ((size_t)64 << 20)
/* Decimal digits take quadratic time: so many steps are a few seconds. */
#define MAX_DIGIT_STEPS (UINT64_C(1) << 30)

typedef struct printer {
    dcp__buf out;
    size_t max_bytes;
    uint32_t max_depth;
    uint64_t digit_steps; /* taken so far */
    dcp_error *err;
} printer;

static dcp_status print_value(printer *p, const dcp_value *v, uint32_t depth);

/* ---- output ---- */

static dcp_status put(printer *p, const char *text, size_t len)
{
    if (len > p->max_bytes - p->out.len) {
        return dcp__fail(p->err, DCP_LIMIT, "the text of the value exceeds %zu bytes", p->max_bytes);
    }
    dcp__buf_put(&p->out, text, len);
    return p->out.failed ? dcp__nomem(p->err) : DCP_OK;
}

static dcp_status put_text(printer *p, const char *text)
{
    return put(p, text, strlen(text));
}

static dcp_status put_u64(printer *p, uint64_t n)
{
    char text[24];
    return put(p, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)n));
}

/* ---- strings and bytes ---- */

static bool is_printable(uint32_t c)
{
    if (c < 0x7F) {
        return c >= 0x20;
    }
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
    }
}

/* Single quotes, unless only double ones need no escape. */
static char choose_quote(dcp_str s)
{
    return s.len && memchr(s.ptr, '\'', s.len) && !memchr(s.ptr, '"', s.len) ? '"' : '\'';
}

static dcp_status put_escape(printer *p, uint32_t c)
{
    char text[16];
    const char *form = c <= 0xFF ? "\\x%02x" : c <= 0xFFFF ? "\\u%04x" : "\\U%08x";
    switch (c) {
    case '\t': return put(p, "\\t", 2);
    case '\n': return put(p, "\\n", 2);
    case '\r': return put(p, "\\r", 2);
    default: return put(p, text, (size_t)snprintf(text, sizeof text, form, c));
    }
}

/* Text without its quotes; quote 0: none to escape. */
static dcp_status put_escaped_text(printer *p, dcp_str s, char quote)
{
    dcp_status status = DCP_OK;
    size_t plain = 0, i = 0; /* [plain, i) is to be copied as it is */
    while (status == DCP_OK && i < s.len) {
        size_t start = i;
        uint32_t c = dcp__wtf8_next(s, &i);
        bool is_quoted = c == '\\' || (quote && c == (unsigned char)quote);
        if (!is_quoted && is_printable(c)) {
            continue;
        }
        status = put(p, s.ptr + plain, start - plain);
        plain = i;
        if (status == DCP_OK) {
            status = is_quoted ? put(p, (char[]){'\\', (char)c}, 2) : put_escape(p, c);
        }
    }
    return status == DCP_OK ? put(p, s.ptr + plain, i - plain) : status;
}

static dcp_status print_text(printer *p, dcp_str s)
{
    char quote = choose_quote(s);
    dcp_status status = put(p, &quote, 1);
    status = status == DCP_OK ? put_escaped_text(p, s, quote) : status;
    return status == DCP_OK ? put(p, &quote, 1) : status;
}

static dcp_status print_bytes(printer *p, dcp_str s, bool is_array)
{
    char quote = choose_quote(s);
    dcp_status status = put(p, (char[]){'b', quote}, 2);
    for (size_t i = 0; status == DCP_OK && i < s.len; i++) {
        uint8_t c = (uint8_t)s.ptr[i];
        if (c == '\\' || c == (uint8_t)quote || (c == '\'' && is_array)) { /* in an array even between double quotes */
            status = put(p, (char[]){'\\', (char)c}, 2);
        } else {
            status = c >= 0x20 && c < 0x7F ? put(p, s.ptr + i, 1) : put_escape(p, c);
        }
    }
    return status == DCP_OK ? put(p, &quote, 1) : status;
}

static dcp_status print_bytearray(printer *p, dcp_str s)
{
    dcp_status status = put_text(p, "bytearray(");
    status = status == DCP_OK ? print_bytes(p, s, true) : status;
    return status == DCP_OK ? put(p, ")", 1) : status;
}

/* ---- numbers ---- */

static dcp_status print_float(printer *p, double d, int style)
{
    char text[DCP__FLOAT_TEXT_BYTES];
    return put(p, text, dcp__float_text(d, style, text));
}

/* A real part of +0 is left out. */
static dcp_status print_complex(printer *p, double re, double im)
{
    bool is_imaginary = re == 0 && !__builtin_signbit(re);
    if (is_imaginary) {
        dcp_status status = print_float(p, im, DCP__FLOAT_PLAIN);
        return status == DCP_OK ? put(p, "j", 1) : status;
    }
    dcp_status status = put(p, "(", 1);
    status = status == DCP_OK ? print_float(p, re, DCP__FLOAT_PLAIN) : status;
    status = status == DCP_OK ? print_float(p, im, DCP__FLOAT_SIGN) : status;
    return status == DCP_OK ? put(p, "j)", 2) : status;
}

static dcp_status print_int(printer *p, const dcp_value *v)
{
    int64_t i;
    if (dcp_value_int(v, &i)) {
        char text[24];
        return put(p, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)i));
    }
    dcp_str b = dcp_value_bigint(v);
    uint64_t steps = dcp__bigint_steps(b.len);
    /* A byte is more than two digits. */
    if (b.len > (p->max_bytes - p->out.len) / 2 || steps > MAX_DIGIT_STEPS - p->digit_steps) {
        return dcp__fail(p->err, DCP_LIMIT, "integer of %zu bytes is too large to be written in decimal", b.len);
    }
    p->digit_steps += steps;
    if (!dcp__bigint_text(&p->out, (const uint8_t *)b.ptr, b.len)) {
        return dcp__nomem(p->err);
    }
    return p->out.len > p->max_bytes ? dcp__fail(p->err, DCP_LIMIT, "the text of the value exceeds %zu bytes", p->max_bytes)
                                     : DCP_OK;
}

/* ---- things of PyTorch ---- */

static bool is_index(dcp_str s)
{
    for (size_t i = 0; i < s.len; i++) {
        if (s.ptr[i] < '0' || s.ptr[i] > '9') {
            return false;
        }
    }
    return s.len > 0;
}

/* "cuda:0" is device(type='cuda', index=0). */
static dcp_status print_device(printer *p, dcp_str s)
{
    const char *colon = s.len ? memchr(s.ptr, ':', s.len) : NULL;
    dcp_str type = s, index = {NULL, 0};
    if (colon) {
        index = (dcp_str){colon + 1, s.len - (size_t)(colon + 1 - s.ptr)};
        type = is_index(index) ? (dcp_str){s.ptr, (size_t)(colon - s.ptr)} : s;
    }
    dcp_status status = put_text(p, "device(type=");
    status = status == DCP_OK ? print_text(p, type) : status;
    if (status == DCP_OK && type.len < s.len) {
        status = put_text(p, ", index=");
        status = status == DCP_OK ? put(p, index.ptr, index.len) : status;
    }
    return status == DCP_OK ? put(p, ")", 1) : status;
}

static dcp_status print_shape(printer *p, const char *kind, dcp_dtype dtype, int ndim, const int64_t *extents)
{
    dcp_status status = put(p, "<", 1);
    status = status == DCP_OK ? put_text(p, kind) : status;
    status = status == DCP_OK ? put(p, " ", 1) : status;
    status = status == DCP_OK ? put_text(p, dcp_dtype_name(dtype)) : status;
    status = status == DCP_OK ? put(p, " [", 2) : status;
    for (int i = 0; status == DCP_OK && i < ndim; i++) {
        status = put(p, ", ", i ? 2 : 0);
        status = status == DCP_OK ? put_u64(p, (uint64_t)extents[i]) : status;
    }
    return status == DCP_OK ? put(p, "]", 1) : status;
}

static dcp_status print_tensor(printer *p, const dcp_tensor *t)
{
    dcp_status status = print_shape(p, "tensor", t->dtype, t->ndim, t->extents);
    return status == DCP_OK ? put(p, ">", 1) : status;
}

static dcp_status print_sharded(printer *p, const dcp_value *v)
{
    const dcp__sharded_node *n = (const dcp__sharded_node *)v;
    dcp_status status = print_shape(p, "sharded", n->dtype, n->ndim, n->extents);
    status = status == DCP_OK ? put(p, ", ", 2) : status;
    status = status == DCP_OK ? put_u64(p, n->n_chunks) : status;
    return status == DCP_OK ? put_text(p, n->n_chunks == 1 ? " chunk>" : " chunks>") : status;
}

/* ---- containers ---- */

typedef struct brackets {
    const char *open, *close, *empty;
} brackets;

static brackets brackets_of(dcp_kind kind)
{
    switch (kind) {
    case DCP_KIND_LIST: return (brackets){"[", "]", "[]"};
    case DCP_KIND_TUPLE: return (brackets){"(", ")", "()"};
    case DCP_KIND_SIZE: return (brackets){"torch.Size([", "])", "torch.Size([])"};
    case DCP_KIND_SET: return (brackets){"{", "}", "set()"};
    case DCP_KIND_FROZENSET: return (brackets){"frozenset({", "})", "frozenset()"};
    case DCP_KIND_ORDERED_DICT: return (brackets){"OrderedDict([", "])", "OrderedDict()"};
    default: return (brackets){"{", "}", "{}"};
    }
}

static dcp_status print_seq(printer *p, const dcp_value *v, uint32_t depth)
{
    size_t n = dcp_value_count(v);
    brackets b = brackets_of(dcp_value_kind(v));
    dcp_status status = put_text(p, n ? b.open : b.empty);
    for (size_t i = 0; status == DCP_OK && i < n; i++) {
        status = put(p, ", ", i ? 2 : 0);
        status = status == DCP_OK ? print_value(p, dcp_value_at(v, i), depth + 1) : status;
    }
    if (status == DCP_OK && n == 1 && v->kind == DCP_KIND_TUPLE) {
        status = put(p, ",", 1);
    }
    return status == DCP_OK && n ? put_text(p, b.close) : status;
}

static dcp_status print_key(printer *p, dcp_key key, const dcp_value *odd_key, uint32_t depth)
{
    if (odd_key) {
        return print_value(p, odd_key, depth);
    }
    if (!key.is_int) {
        return print_text(p, key.string);
    }
    char text[24];
    return put(p, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)key.integer));
}

static dcp_status print_mapping(printer *p, const dcp_value *v, bool is_ordered, uint32_t depth)
{
    size_t n = dcp__mapping_count(v);
    brackets b = brackets_of(is_ordered ? DCP_KIND_ORDERED_DICT : DCP_KIND_DICT);
    dcp_status status = put_text(p, n ? b.open : b.empty);
    for (size_t i = 0; status == DCP_OK && i < n; i++) {
        dcp_key key = {.is_int = false};
        const dcp_value *odd_key, *value = dcp__mapping_at(v, i, &key, &odd_key);
        status = put_text(p, i ? (is_ordered ? ", (" : ", ") : is_ordered ? "(" : "");
        status = status == DCP_OK ? print_key(p, key, odd_key, depth + 1) : status;
        status = status == DCP_OK ? put_text(p, is_ordered ? ", " : ": ") : status;
        status = status == DCP_OK ? print_value(p, value, depth + 1) : status;
        status = status == DCP_OK && is_ordered ? put(p, ")", 1) : status;
    }
    return status == DCP_OK && n ? put_text(p, b.close) : status;
}

/* Names come from files as they are; what is not text is written byte by byte. */
static dcp_status put_name(printer *p, dcp_str name)
{
    if (dcp__is_wtf8(name)) {
        return put_escaped_text(p, name, 0);
    }
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < name.len; i++) {
        uint8_t c = (uint8_t)name.ptr[i];
        status = c >= 0x20 && c < 0x7F ? put(p, name.ptr + i, 1) : put_escape(p, c);
    }
    return status;
}

static dcp_status print_opaque(printer *p, const dcp_value *v, uint32_t depth)
{
    bool is_ordered = dcp__is_opaque_named(v, "collections", "OrderedDict");
    if (dcp__is_mapping(v) && (is_ordered || dcp__is_opaque_named(v, "builtins", "dict"))) {
        return print_mapping(p, v, is_ordered, depth);
    }
    dcp_status status = put(p, "<", 1);
    status = status == DCP_OK ? put_name(p, dcp_opaque_class(v)) : status;
    status = status == DCP_OK ? put(p, ", ", 2) : status;
    status = status == DCP_OK ? put_u64(p, dcp_opaque_bytes(v)) : status;
    return status == DCP_OK ? put_text(p, " bytes>") : status;
}

static dcp_status print_record(printer *p, const dcp_value *v)
{
    dcp_status status = put_text(p, "<record, ");
    status = status == DCP_OK ? put_u64(p, dcp_value_str(v).len) : status;
    return status == DCP_OK ? put_text(p, " bytes>") : status;
}

/* ---- all kinds ---- */

static dcp_status print_dtype(printer *p, dcp_dtype dtype)
{
    dcp_status status = put_text(p, "torch.");
    return status == DCP_OK ? put_text(p, dcp_dtype_name(dtype)) : status;
}

static dcp_status print_value(printer *p, const dcp_value *v, uint32_t depth)
{
    if (depth > p->max_depth) {
        return dcp__fail(p->err, DCP_LIMIT, "values are nested deeper than %u", p->max_depth);
    }
    switch (dcp_value_kind(v)) {
    case DCP_KIND_NONE: return put_text(p, "None");
    case DCP_KIND_BOOL: return put_text(p, dcp_value_bool(v) ? "True" : "False");
    case DCP_KIND_INT: return print_int(p, v);
    case DCP_KIND_FLOAT: return print_float(p, dcp_value_float(v), DCP__FLOAT_POINT);
    case DCP_KIND_COMPLEX: return print_complex(p, dcp_value_float(v), dcp_value_imag(v));
    case DCP_KIND_STR: return print_text(p, dcp_value_str(v));
    case DCP_KIND_BYTES: return print_bytes(p, dcp_value_str(v), false);
    case DCP_KIND_BYTEARRAY: return print_bytearray(p, dcp_value_str(v));
    case DCP_KIND_LIST:
    case DCP_KIND_TUPLE:
    case DCP_KIND_SIZE:
    case DCP_KIND_SET:
    case DCP_KIND_FROZENSET: return print_seq(p, v, depth);
    case DCP_KIND_DICT: return print_mapping(p, v, false, depth);
    case DCP_KIND_ORDERED_DICT: return print_mapping(p, v, true, depth);
    case DCP_KIND_DTYPE: return print_dtype(p, dcp_value_dtype(v));
    case DCP_KIND_DEVICE: return print_device(p, dcp_value_str(v));
    case DCP_KIND_TENSOR: return print_tensor(p, dcp_value_tensor(v));
    case DCP_KIND_SHARDED: return print_sharded(p, v);
    case DCP_KIND_OPAQUE: return print_opaque(p, v, depth);
    case DCP_KIND_RECORD: return print_record(p, v);
    }
    return dcp__fail(p->err, DCP_INTERNAL, "no value is of kind %d", v->kind);
}

dcp_status dcp_value_repr(const dcp_value *v, size_t max_bytes, char **out, size_t *out_len, dcp_error *err)
{
    if (!v || !out) {
        return dcp__fail(err, DCP_ARG, "repr: no value, or no place for the text");
    }
    printer p = {.max_bytes = max_bytes ? max_bytes : DEFAULT_MAX_BYTES, .max_depth = dcp__depth_limit(v->ctx), .err = err};
    dcp__buf_init(&p.out, v->ctx);
    dcp_status status = print_value(&p, v, 0);
    if (status == DCP_OK) {
        dcp__buf_put_byte(&p.out, 0);
        status = p.out.failed ? dcp__nomem(err) : DCP_OK;
    }
    if (status != DCP_OK) {
        dcp__buf_reset(&p.out);
        return status;
    }
    *out = (char *)p.out.data;
    if (out_len) {
        *out_len = p.out.len - 1;
    }
    return DCP_OK;
}
