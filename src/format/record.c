#include "format/record.h"

#include "base/bytes.h"
#include "base/hash.h"
#include "format/object_builder.h"
#include "format/record_internal.h"
#include "state/strided.h"

#define MAX_VERSION 10

/* ---- what is it ---- */

dcp__sniff dcp__sniff_bytes(const void *bytes, size_t n, uint64_t total)
{
    const uint8_t *p = bytes;
    uint32_t first = n >= 4 ? dcp__load32(p) : 0;
    if (first == 0x04034b50) {
        return DCP__IS_ZIP;
    }
    if (first == 0xfd2fb528) {
        return DCP__IS_ZSTD;
    }
    if (dcp__is_legacy(p, n)) {
        return DCP__IS_LEGACY;
    }
    if (n > 8 && total > 8 && dcp__load64(p) >= 2 && dcp__load64(p) <= total - 8 && p[8] == '{') {
        return DCP__IS_SAFETENSORS;
    }
    return DCP__IS_UNKNOWN;
}

static dcp_status not_an_archive(dcp__sniff sniff, dcp_error *err)
{
    const char *what = sniff == DCP__IS_ZSTD          ? "zstd data, but no transform is named"
                       : sniff == DCP__IS_SAFETENSORS ? "a safetensors header"
                                                      : "neither a zip archive nor a legacy torch.save file";
    return dcp__fail_at(err, DCP_FORMAT, 0, "record begins with %s", what);
}

/* ---- the members of a zip archive that say how to read it ---- */

/* Reads a short member of at most `cap` bytes; *n is SIZE_MAX if there is none. */
static dcp_status read_short(dcp__archive *a, const dcp__source *src, const char *name, char *text, size_t cap, size_t *n,
                             dcp_error *err)
{
    *n = SIZE_MAX;
    dcp__zip_member *m = dcp__zip_find(&a->zip, name);
    dcp_status st = m ? dcp__zip_locate(src, m, err) : DCP_OK;
    if (!m || st) {
        return st;
    }
    if (m->full_bytes > cap) {
        return dcp__fail_at(err, DCP_FORMAT, m->data, "archive member %s has %llu bytes, at most %zu make sense", name,
                            (unsigned long long)m->full_bytes, cap);
    }
    if (m->method == DCP__ZIP_STORED) {
        *n = (size_t)m->bytes;
        return dcp__source_read(src, m->data, text, *n, err);
    }
    uint8_t *content;
    st = dcp__zip_read(a->ctx, src, m, cap, &content, n, err);
    if (!st) {
        memcpy(text, content, *n);
        dcp__free(a->ctx, content);
    }
    return st;
}

/* 1 to MAX_VERSION, then blanks only; 0 for anything else. */
static int parse_version(const char *text, size_t n)
{
    int version = 0;
    size_t i = 0;
    for (; i < n && text[i] >= '0' && text[i] <= '9' && version <= MAX_VERSION; i++) {
        version = version * 10 + (text[i] - '0');
    }
    for (; i < n; i++) {
        if (text[i] != '\n' && text[i] != '\r' && text[i] != ' ') {
            return 0;
        }
    }
    return version <= MAX_VERSION ? version : 0;
}

static dcp_status check_version(dcp__archive *a, const dcp__source *src, dcp_error *err)
{
    char text[16];
    size_t n;
    dcp_status st = read_short(a, src, ".data/version", text, sizeof text, &n, err);
    if (!st && n == SIZE_MAX) {
        st = read_short(a, src, "version", text, sizeof text, &n, err);
    }
    if (st) {
        return st;
    }
    if (n == SIZE_MAX) {
        return dcp__fail(err, DCP_FORMAT, "archive has no member version");
    }
    if (!parse_version(text, n)) {
        return dcp__fail(err, DCP_FORMAT, "archive version \"%s\" is not 1 to %d", dcp__print((dcp_str){text, n}).text,
                         MAX_VERSION);
    }
    return DCP_OK;
}

static dcp_status check_byte_order(dcp__archive *a, const dcp__source *src, dcp_error *err)
{
    char text[8];
    size_t n;
    dcp_status st = read_short(a, src, "byteorder", text, sizeof text, &n, err);
    if (st) {
        return st;
    }
    a->is_big_endian = n == 3 && memcmp(text, "big", 3) == 0;
    if (n != SIZE_MAX && !a->is_big_endian && (n != 6 || memcmp(text, "little", 6) != 0)) {
        return dcp__fail(err, DCP_FORMAT, "archive byte order \"%s\" is neither little nor big",
                         dcp__print((dcp_str){text, n}).text);
    }
    return DCP_OK;
}

static dcp_status open_zip(dcp__archive *a, const dcp__source *src, dcp_error *err)
{
    dcp_status st = dcp__zip_open(a->ctx, src, true, &a->zip, err);
    st = st ? st : check_version(a, src, err);
    return st ? st : check_byte_order(a, src, err);
}

static dcp_status find_pickle(dcp__archive *a, const dcp__source *src, dcp__zip_member **out, dcp_error *err)
{
    *out = dcp__zip_find(&a->zip, "data.pkl");
    return *out ? dcp__zip_locate(src, *out, err) : dcp__fail(err, DCP_FORMAT, "archive has no member data.pkl");
}

/* ---- storages ---- */

static dcp__storage_span span_of(const dcp__zip_member *m)
{
    return (dcp__storage_span){
        .offset = m->data,
        .bytes = m->bytes,
        .full_bytes = m->full_bytes,
        .crc = m->crc,
        .has_crc = m->crc != 0 || m->full_bytes == 0,
        .is_deflated = m->method == DCP__ZIP_DEFLATED,
    };
}

/* Member data/<key>, which must hold just the elements that the persistent id says. */
static dcp_status find_storage(dcp__archive *a, const dcp__source *src, dcp_str key, uint64_t elems, size_t elem_bytes,
                               dcp__storage_span *out, dcp_error *err)
{
    char name[128] = "data/";
    dcp__zip_member *m = NULL;
    if (key.len < sizeof name - 5 && !memchr(key.ptr, 0, key.len)) {
        memcpy(name + 5, key.ptr, key.len);
        m = dcp__zip_find(&a->zip, name);
    }
    if (!m) {
        return dcp__fail(err, DCP_FORMAT, "archive has no member data/%s", dcp__print(key).text);
    }
    dcp_status st = dcp__zip_locate(src, m, err);
    if (st) {
        return st;
    }
    uint64_t bytes;
    if (!dcp__mul_u64(elems, elem_bytes, &bytes) || bytes != m->full_bytes) {
        return dcp__fail_at(err, DCP_FORMAT, m->data, "storage %s: %llu elements of %zu bytes, but the member has %llu bytes",
                            dcp__print(key).text, (unsigned long long)elems, elem_bytes, (unsigned long long)m->full_bytes);
    }
    *out = span_of(m);
    return DCP_OK;
}

static dcp_status find_storages(dcp__archive *a, const dcp__source *src, dcp_error *err)
{
    a->spans = dcp__calloc(a->ctx, a->object.n_storages, sizeof *a->spans);
    if (!a->spans) {
        return dcp__nomem(err);
    }
    dcp_status st = DCP_OK;
    for (size_t i = 0; !st && i < a->object.n_storages; i++) {
        const dcp__storage_ref *ref = &a->object.storages[i];
        st = ref->view_of >= 0 ? dcp__fail(err, DCP_FORMAT, "storage %s: views are for legacy files", dcp__print(ref->key).text)
                               : find_storage(a, src, ref->key, ref->elems, ref->elem_bytes, &a->spans[i], err);
    }
    return st;
}

/* ---- archives ---- */

/* Positions in the pickle become positions in the archive. */
static void shift_offset(const dcp__zip_member *m, dcp_error *err)
{
    if (err && err->offset != DCP_NO_OFFSET) {
        err->offset = m->method == DCP__ZIP_STORED ? err->offset + m->data : m->data;
    }
}

static dcp_status read_object(dcp__archive *a, const dcp__source *src, dcp_error *err)
{
    dcp__zip_member *m;
    dcp_status st = find_pickle(a, src, &m, err);
    uint8_t *pickle;
    size_t n;
    st = st ? st : dcp__zip_read(a->ctx, src, m, a->ctx->limits.max_parse_bytes, &pickle, &n, err);
    if (st) {
        return st;
    }
    dcp__source memory = dcp__source_memory(pickle, n);
    st = dcp__object_read(a->ctx, &memory, 0, &a->object, err);
    if (st) {
        shift_offset(m, err);
    }
    dcp__free(a->ctx, pickle);
    return st ? st : find_storages(a, src, err);
}

dcp_status dcp__archive_open(dcp_context *ctx, const dcp__source *src, dcp__archive *out, dcp_error *err)
{
    uint8_t first[16] = {0};
    size_t n = src->size < sizeof first ? (size_t)src->size : sizeof first;
    dcp__archive a = {.ctx = ctx, .zip.ctx = ctx, .zip.by_name.ctx = ctx, .object.ctx = ctx};
    dcp_status st = dcp__source_read(src, 0, first, n, err);
    if (st) {
        return st;
    }
    dcp__sniff sniff = dcp__sniff_bytes(first, n, src->size);
    if (sniff == DCP__IS_ZIP) {
        st = open_zip(&a, src, err);
        st = st ? st : read_object(&a, src, err);
    } else {
        st = sniff == DCP__IS_LEGACY ? dcp__legacy_open(src, &a, err) : not_an_archive(sniff, err);
    }
    if (st) {
        dcp__archive_reset(&a);
        return st;
    }
    *out = a;
    return DCP_OK;
}

void dcp__archive_reset(dcp__archive *a)
{
    dcp__zip_reset(&a->zip);
    dcp__object_reset(&a->object);
    dcp__free(a->ctx, a->spans);
    a->spans = NULL;
}

/* ---- payloads ---- */

/* A view and the storage that it is of. */
typedef struct view {
    dcp_dtype dtype;
    bool is_untyped; /* the storage */
    int ndim;
    const int64_t *sizes, *strides;
    int64_t storage_offset;
} view;

static dcp_status fill_payload(const view *v, const dcp__storage_span *span, bool is_big_endian, dcp__payload *out,
                               dcp_error *err)
{
    uint64_t span_bytes, esz = dcp_dtype_bytes(v->dtype);
    dcp_status st =
        dcp__check_view(v->dtype, v->ndim, v->sizes, v->strides, v->storage_offset, span->full_bytes, &span_bytes, err);
    if (st) {
        return st;
    }
    /* Its writer knew no element size, so PyTorch does not swap it back: nobody can tell which order the elements have. */
    if (is_big_endian && v->is_untyped && esz > 1 && span_bytes > 0) {
        return dcp__fail(err, DCP_UNSUPPORTED, "tensor of %s in an untyped storage of a big-endian archive",
                         dcp_dtype_name(v->dtype));
    }
    out->dtype = v->dtype;
    out->ndim = v->ndim;
    memcpy(out->sizes, v->sizes, (size_t)v->ndim * sizeof *v->sizes);
    memcpy(out->strides, v->strides, (size_t)v->ndim * sizeof *v->strides);
    out->offset = span->offset + (span_bytes ? (uint64_t)v->storage_offset * esz : 0);
    out->span_bytes = span_bytes;
    out->storage = *span;
    out->is_big_endian = is_big_endian && esz > 1;
    out->is_conj = out->is_neg = false;
    return DCP_OK;
}

dcp_status dcp__archive_payload(const dcp__archive *a, const dcp_value *value, dcp__payload *out, dcp_error *err)
{
    const dcp__lazy *lazy = dcp__value_lazy(value);
    const dcp_tensor *t = dcp_value_tensor(value);
    if (!lazy || !t || (uint64_t)lazy->storage >= a->object.n_storages) {
        return dcp__fail(err, DCP_ARG, "payload: not a tensor of this archive");
    }
    view v = {
        .dtype = t->dtype,
        .is_untyped = a->object.storages[lazy->storage].is_untyped,
        .ndim = t->ndim,
        .sizes = t->extents,
        .strides = t->strides,
        .storage_offset = lazy->storage_offset,
    };
    dcp_status st = fill_payload(&v, &a->spans[lazy->storage], a->is_big_endian, out, err);
    if (!st) {
        out->is_conj = lazy->is_conj;
        out->is_neg = lazy->is_neg;
    }
    return st;
}

/* The pickle of a plain tensor, without the pickle machine. *is_match is false if it has another form. */
static dcp_status match_pickle(dcp__archive *a, const dcp__source *src, uint8_t *pickle, size_t cap, dcp__tensor_pickle *out,
                               bool *is_match, dcp_error *err)
{
    dcp__zip_member *m;
    *is_match = false;
    dcp_status st = find_pickle(a, src, &m, err);
    if (st || m->method != DCP__ZIP_STORED || m->bytes > cap) {
        return st;
    }
    size_t n = (size_t)m->bytes;
    st = dcp__source_read(src, m->data, pickle, n, err);
    /* A wrong CRC is reported on the other way. */
    *is_match = !st && (!m->crc || m->crc == dcp__crc32(0, pickle, n)) && dcp__tensor_pickle_match(pickle, n, out);
    return st;
}

static dcp_status plain_payload(dcp__archive *a, const dcp__source *src, const dcp__tensor_pickle *t, dcp__payload *out,
                                dcp_error *err)
{
    dcp__storage_span span;
    dcp_status st = find_storage(a, src, t->key, t->elems, t->elem_bytes, &span, err);
    view v = {
        .dtype = t->dtype,
        .is_untyped = t->is_untyped,
        .ndim = t->ndim,
        .sizes = t->sizes,
        .strides = t->strides,
        .storage_offset = t->storage_offset,
    };
    return st ? st : fill_payload(&v, &span, a->is_big_endian, out, err);
}

/* The only value of an archive must be a tensor. */
static dcp_status sole_payload(const dcp__archive *a, dcp__payload *out, dcp_error *err)
{
    const dcp__opaque *o = dcp__value_opaque(a->object.value);
    if (o) {
        return dcp__fail(err, DCP_UNSUPPORTED, "record holds %s, not a plain tensor", dcp__print(o->qualified).text);
    }
    if (dcp_value_kind(a->object.value) != DCP_KIND_TENSOR) {
        return dcp__fail(err, DCP_FORMAT, "record holds a value that is no tensor");
    }
    return dcp__archive_payload(a, a->object.value, out, err);
}

static dcp_status zip_payload(dcp_context *ctx, const dcp__source *src, dcp__payload *out, dcp_error *err)
{
    uint8_t pickle[1024];
    dcp__tensor_pickle t;
    bool is_match = false;
    dcp__archive a = {.ctx = ctx, .zip.ctx = ctx, .zip.by_name.ctx = ctx, .object.ctx = ctx};
    dcp_status st = open_zip(&a, src, err);
    st = st ? st : match_pickle(&a, src, pickle, sizeof pickle, &t, &is_match, err);
    if (!st && is_match) {
        st = plain_payload(&a, src, &t, out, err);
    } else if (!st) {
        st = read_object(&a, src, err);
        st = st ? st : sole_payload(&a, out, err);
    }
    dcp__archive_reset(&a);
    return st;
}

static dcp_status legacy_payload(dcp_context *ctx, const dcp__source *src, dcp__payload *out, dcp_error *err)
{
    dcp__archive a;
    dcp_status st = dcp__archive_open(ctx, src, &a, err);
    if (!st) {
        st = sole_payload(&a, out, err);
        dcp__archive_reset(&a);
    }
    return st;
}

/* A record holds at least as many elements as its tensor, whose strides may be anything: PyTorch writes expanded tensors out. So
 * a few bytes cannot stand for a tensor that fills the memory. */
static dcp_status check_density(const dcp__payload *p, dcp_error *err)
{
    int64_t elems;
    uint64_t bytes;
    if (!dcp__elems(p->ndim, p->sizes, &elems) || !dcp__mul_u64((uint64_t)elems, dcp_dtype_bytes(p->dtype), &bytes) ||
        bytes > p->storage.full_bytes) {
        return dcp__fail(err, DCP_FORMAT, "record holds %llu bytes of elements, fewer than its tensor has",
                         (unsigned long long)p->storage.full_bytes);
    }
    return DCP_OK;
}

static dcp_status any_payload(dcp_context *ctx, const dcp__source *src, dcp__payload *out, dcp_error *err)
{
    uint8_t first[16] = {0};
    size_t n = src->size < sizeof first ? (size_t)src->size : sizeof first;
    dcp_status st = dcp__source_read(src, 0, first, n, err);
    if (st) {
        return st;
    }
    dcp__sniff sniff = dcp__sniff_bytes(first, n, src->size);
    st = sniff == DCP__IS_ZIP      ? zip_payload(ctx, src, out, err)
         : sniff == DCP__IS_LEGACY ? legacy_payload(ctx, src, out, err)
                                   : not_an_archive(sniff, err);
    return st ? st : check_density(out, err);
}

/* ---- few reads ---- */

/* What stands before and after the payload in PyTorch's own records fits in these, whatever the payload's size. */
#define HEAD_BYTES 1024
#define TAIL_BYTES 1024

/* A source that knows its first and last bytes. */
typedef struct ends {
    const dcp__source *inner;
    uint64_t tail_at;
    uint8_t head[HEAD_BYTES], tail[TAIL_BYTES];
} ends;

static dcp_status read_ends(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const ends *e = self->user;
    if (offset < HEAD_BYTES && n <= HEAD_BYTES - offset) {
        memcpy(buf, e->head + offset, n);
        return DCP_OK;
    }
    if (offset >= e->tail_at) {
        memcpy(buf, e->tail + (offset - e->tail_at), n);
        return DCP_OK;
    }
    return dcp__source_read(e->inner, offset, buf, n, err);
}

dcp_status dcp__record_payload(dcp_context *ctx, const dcp__source *src, dcp__payload *out, dcp_error *err)
{
    if (src->base) {
        return any_payload(ctx, src, out, err);
    }
    if (src->size <= HEAD_BYTES + TAIL_BYTES) {
        uint8_t all[HEAD_BYTES + TAIL_BYTES] = {0};
        dcp_status st = dcp__source_read(src, 0, all, (size_t)src->size, err);
        dcp__source memory = dcp__source_memory(all, (size_t)src->size);
        return st ? st : any_payload(ctx, &memory, out, err);
    }
    ends e;
    e.inner = src;
    e.tail_at = src->size - TAIL_BYTES;
    dcp_status st = dcp__source_read(src, 0, e.head, sizeof e.head, err);
    st = st ? st : dcp__source_read(src, e.tail_at, e.tail, sizeof e.tail, err);
    dcp__source wrapped = {.read = read_ends, .size = src->size, .user = &e};
    return st ? st : any_payload(ctx, &wrapped, out, err);
}
