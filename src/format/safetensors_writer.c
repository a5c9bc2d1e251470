#include "format/safetensors_writer.h"

#include <utf8proc.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/strmap.h"
#include "format/safetensors.h"

/* What the reference reader takes at most, whatever our own limit is. */
#define REFERENCE_MAX_HEADER_BYTES 100000000
#define LENGTH_BYTES 8
/* Value of a name that the format keeps for itself. */
#define RESERVED (UINT64_MAX - 1)

typedef struct writer {
    dcp__buf *out;
    const dcp__st_entry *entries;
    size_t n;
    const dcp__st_opts *opts;
} writer;

/* ---- checks ---- */

/* jansson refuses NUL in names, and JSON has no lone surrogates. */
static bool is_plain_utf8(dcp_str s)
{
    utf8proc_int32_t c;
    for (size_t i = 0; i < s.len;) {
        size_t left = s.len - i;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)s.ptr + i, (utf8proc_ssize_t)(left < 4 ? left : 4), &c);
        if (used <= 0 || c == 0) {
            return false;
        }
        i += (size_t)used;
    }
    return true;
}

static dcp_status add_name(dcp__strmap *names, dcp_str name, size_t i, dcp_error *err)
{
    if (!is_plain_utf8(name)) {
        return dcp__fail(err, DCP_ARG, "name '%s' holds NUL or is not UTF-8: safetensors files cannot have it",
                         dcp__print(name).text);
    }
    uint64_t existing;
    dcp_status status = dcp__strmap_add(names, name, i, &existing, err);
    if (status == DCP_OK && existing != UINT64_MAX) {
        status = dcp__fail(err, DCP_ARG, "name '%s' %s", dcp__print(name).text, existing == RESERVED ? "is reserved" : "twice");
    }
    return status;
}

/* Adds reserved names first, so that add_name finds them. */
static dcp_status reserve(dcp__strmap *names, const char *const *reserved, size_t n, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < n; i++) {
        status = dcp__strmap_add(names, dcp_str_of(reserved[i]), RESERVED, NULL, err);
    }
    return status;
}

static dcp_status check_names(const writer *w, dcp_error *err)
{
    static const char *const reserved[] = {"__metadata__"};
    dcp__strmap names;
    dcp__strmap_init(&names, w->out->ctx);
    dcp_status status = reserve(&names, reserved, 1, err);
    for (size_t i = 0; status == DCP_OK && i < w->n; i++) {
        status = add_name(&names, w->entries[i].name, i, err);
    }
    dcp__strmap_reset(&names);
    return status;
}

static dcp_status check_extra(const writer *w, dcp_error *err)
{
    static const char *const reserved[] = {"format", "DCP_VERSION", "DCP_SHARDING_INFO", "libdcp"};
    dcp__strmap names;
    dcp__strmap_init(&names, w->out->ctx);
    dcp_status status = reserve(&names, reserved, 4, err);
    for (size_t i = 0; status == DCP_OK && i < w->opts->n_extra; i++) {
        status = add_name(&names, w->opts->extra_keys[i], i, err);
        if (status == DCP_OK && !is_plain_utf8(w->opts->extra_values[i])) {
            status = dcp__fail(err, DCP_ARG, "metadata '%s': value is not UTF-8", dcp__print(w->opts->extra_keys[i]).text);
        }
    }
    dcp__strmap_reset(&names);
    return status;
}

static bool is_float4(const dcp__st_entry *e)
{
    return e->dtype == DCP_FLOAT4_E2M1FN_X2;
}

static dcp_status check_dtype(const dcp__st_entry *e, dcp_error *err)
{
    if (!dcp__safetensors_dtype(e->dtype)) {
        return dcp__fail(err, DCP_UNSUPPORTED, "tensor '%s': safetensors has no dtype for %s", dcp__print(e->name).text,
                         dcp_dtype_name(e->dtype));
    }
    if (is_float4(e) && e->ndim == 0) {
        return dcp__fail(err, DCP_UNSUPPORTED, "tensor '%s': a scalar of two float4 values has no shape in safetensors",
                         dcp__print(e->name).text);
    }
    return DCP_OK;
}

/* A rank without tensors also says that it took part. */
static bool is_sharded(const writer *w)
{
    return w->n > 0 ? w->entries[0].saved_offsets != NULL : w->opts->world > 0;
}

static dcp_status check_position(const writer *w, const dcp__st_entry *e, dcp_error *err)
{
    if ((e->saved_offsets != NULL) != is_sharded(w) || (e->global_extents && !e->saved_offsets)) {
        return dcp__fail(err, DCP_ARG, "tensor '%s': saved offsets are for all tensors of a file or for none",
                         dcp__print(e->name).text);
    }
    for (int i = 0; e->saved_offsets && i < e->ndim; i++) {
        int64_t end;
        if (e->saved_offsets[i] < 0 || !dcp__add_i64(e->saved_offsets[i], e->extents[i], &end) ||
            (e->global_extents && end > e->global_extents[i])) {
            return dcp__fail(err, DCP_ARG, "tensor '%s': dimension %d from %lld of %lld does not fit the whole",
                             dcp__print(e->name).text, i, (long long)e->saved_offsets[i], (long long)e->extents[i]);
        }
    }
    return DCP_OK;
}

static dcp_status entry_bytes(const dcp__st_entry *e, uint64_t *out, dcp_error *err)
{
    if (e->ndim < 0 || e->ndim > DCP_MAX_NDIM) {
        return dcp__fail(err, DCP_ARG, "tensor '%s': %d dimensions", dcp__print(e->name).text, e->ndim);
    }
    uint64_t bytes = dcp_dtype_bytes(e->dtype);
    for (int i = 0; i < e->ndim; i++) {
        if (e->extents[i] < 0) {
            return dcp__fail(err, DCP_ARG, "tensor '%s': extent %lld", dcp__print(e->name).text, (long long)e->extents[i]);
        }
        if (!dcp__mul_u64(bytes, (uint64_t)e->extents[i], &bytes) || (is_float4(e) && e->extents[i] > INT64_MAX / 2)) {
            return dcp__fail(err, DCP_LIMIT, "tensor '%s': number of bytes overflows", dcp__print(e->name).text);
        }
    }
    *out = bytes;
    return DCP_OK;
}

/* Of an entry that was checked. */
static uint64_t checked_bytes(const dcp__st_entry *e)
{
    uint64_t bytes = 0;
    entry_bytes(e, &bytes, NULL);
    return bytes;
}

/* *data receives the bytes of all tensors. */
static dcp_status check_entries(const writer *w, uint64_t *data, dcp_error *err)
{
    uint64_t end = 0;
    for (size_t i = 0; i < w->n; i++) {
        const dcp__st_entry *e = &w->entries[i];
        uint64_t bytes;
        dcp_status status = check_dtype(e, err);
        if (status == DCP_OK) {
            status = entry_bytes(e, &bytes, err);
        }
        if (status == DCP_OK) {
            status = check_position(w, e, err);
        }
        if (status != DCP_OK) {
            return status;
        }
        if (!dcp__add_u64(end, bytes, &end) || end > INT64_MAX - 2 * (uint64_t)REFERENCE_MAX_HEADER_BYTES) {
            return dcp__fail(err, DCP_LIMIT, "tensor '%s': file exceeds 2^63 bytes", dcp__print(e->name).text);
        }
    }
    *data = end;
    return DCP_OK;
}

/* ---- text ---- */

static void put_text(dcp__buf *out, const char *text)
{
    dcp__buf_put(out, text, strlen(text));
}

/* The content of a JSON string; `level` 2 writes what stands in a JSON text that is itself a string. */
static void put_escaped(dcp__buf *out, dcp_str s, int level)
{
    for (size_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.ptr[i];
        if (c == '"' || c == '\\') {
            put_text(out, level == 2 ? "\\\\\\" : "\\");
            dcp__buf_put_byte(out, c);
        } else if (c < 0x20) {
            dcp__buf_printf(out, level == 2 ? "\\\\u%04x" : "\\u%04x", c);
        } else {
            dcp__buf_put_byte(out, c);
        }
    }
}

static void put_string(dcp__buf *out, dcp_str s, int level)
{
    const char *quote = level == 2 ? "\\\"" : "\"";
    put_text(out, quote);
    put_escaped(out, s, level);
    put_text(out, quote);
}

static void put_numbers(dcp__buf *out, int n, const int64_t *values)
{
    dcp__buf_put_byte(out, '[');
    for (int i = 0; i < n; i++) {
        dcp__buf_printf(out, "%s%lld", i ? "," : "", (long long)values[i]);
    }
    dcp__buf_put_byte(out, ']');
}

/* {"<name>":{"<key>":[..]},..}, inside a string, for the tensors that have the values. */
static void put_positions(const writer *w, const char *key, bool is_global)
{
    const char *separator = "";
    dcp__buf_put_byte(w->out, '{');
    for (size_t i = 0; i < w->n; i++) {
        const dcp__st_entry *e = &w->entries[i];
        const int64_t *values = is_global ? e->global_extents : e->saved_offsets;
        if (values) {
            put_text(w->out, separator);
            put_string(w->out, e->name, 2);
            dcp__buf_printf(w->out, ":{\\\"%s\\\":", key);
            put_numbers(w->out, e->ndim, values);
            dcp__buf_put_byte(w->out, '}');
            separator = ",";
        }
    }
    dcp__buf_put_byte(w->out, '}');
}

static void put_empty(const writer *w)
{
    for (size_t i = 0; i < w->opts->n_empty; i++) {
        dcp__buf_printf(w->out, i ? ",%u" : "\\\"empty_shards\\\":[%u", w->opts->empty[i]);
    }
    put_text(w->out, w->opts->n_empty ? "]," : "");
}

static void put_sharding(const writer *w)
{
    put_text(w->out, ",\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"");
    put_positions(w, "saved_offsets", false);
    put_text(w->out, "\",\"libdcp\":\"{\\\"schema\\\":1,\\\"writer\\\":\\\"libdcp " DCP_VERSION_STRING "\\\",");
    if (w->opts->world > 0) {
        dcp__buf_printf(w->out, "\\\"world\\\":%d,", w->opts->world);
    }
    put_empty(w);
    put_text(w->out, "\\\"tensors\\\":");
    put_positions(w, "shape", true);
    put_text(w->out, "}\"");
}

static void put_metadata(const writer *w)
{
    put_text(w->out, "\"__metadata__\":{\"format\":\"pt\"");
    if (is_sharded(w)) {
        put_sharding(w);
    }
    for (size_t i = 0; i < w->opts->n_extra; i++) {
        dcp__buf_put_byte(w->out, ',');
        put_string(w->out, w->opts->extra_keys[i], 1);
        dcp__buf_put_byte(w->out, ':');
        put_string(w->out, w->opts->extra_values[i], 1);
    }
    dcp__buf_put_byte(w->out, '}');
}

/* Returns where the tensor ends in the data. */
static uint64_t put_tensor(const writer *w, const dcp__st_entry *e, uint64_t begin)
{
    int64_t extents[DCP_MAX_NDIM];
    uint64_t end = begin + checked_bytes(e);
    for (int i = 0; i < e->ndim; i++) {
        extents[i] = is_float4(e) && i + 1 == e->ndim ? e->extents[i] * 2 : e->extents[i];
    }
    dcp__buf_put_byte(w->out, ',');
    put_string(w->out, e->name, 1);
    dcp__buf_printf(w->out, ":{\"dtype\":\"%s\",\"shape\":", dcp__safetensors_dtype(e->dtype));
    put_numbers(w->out, e->ndim, extents);
    dcp__buf_printf(w->out, ",\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin, (unsigned long long)end);
    return end;
}

/* ---- the whole ---- */

static void put_header(const writer *w)
{
    uint64_t end = 0;
    dcp__buf_put(w->out, "\0\0\0\0\0\0\0", LENGTH_BYTES); /* the length, later */
    dcp__buf_put_byte(w->out, '{');
    put_metadata(w);
    for (size_t i = 0; i < w->n; i++) {
        end = put_tensor(w, &w->entries[i], end);
    }
    dcp__buf_put_byte(w->out, '}');
}

/* Pads the header that begins at `start`, and fills in its length. */
static dcp_status close_header(dcp__buf *out, size_t start, dcp_error *err)
{
    while ((out->len - start) % 8 != 0 && !out->failed) {
        dcp__buf_put_byte(out, ' ');
    }
    if (out->failed) {
        return dcp__nomem(err);
    }
    uint64_t length = out->len - start - LENGTH_BYTES, limit = out->ctx->limits.max_header_bytes;
    limit = limit < REFERENCE_MAX_HEADER_BYTES ? limit : REFERENCE_MAX_HEADER_BYTES;
    if (length > limit) {
        return dcp__fail(err, DCP_LIMIT, "safetensors header of %llu bytes is over the limit of %llu", (unsigned long long)length,
                         (unsigned long long)limit);
    }
    dcp__store64(out->data + start, length);
    return DCP_OK;
}

dcp_status dcp__safetensors_header(dcp__buf *out, const dcp__st_entry *entries, size_t n, const dcp__st_opts *opts,
                                   uint64_t *offsets, uint64_t *total, dcp_error *err)
{
    static const dcp__st_opts none = {0};
    writer w = {out, entries, n, opts ? opts : &none};
    size_t start = out->len;
    uint64_t data;
    dcp_status status = check_names(&w, err);
    if (status == DCP_OK) {
        status = check_extra(&w, err);
    }
    if (status == DCP_OK) {
        status = check_entries(&w, &data, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    put_header(&w);
    status = close_header(out, start, err);
    if (status != DCP_OK) {
        out->len = start;
        return status;
    }
    uint64_t at = out->len - start;
    *total = at + data;
    for (size_t i = 0; i < n; i++) {
        offsets[i] = at;
        at += checked_bytes(&entries[i]);
    }
    return DCP_OK;
}
