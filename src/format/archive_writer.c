#include "format/archive_writer.h"

#include <string.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/hash.h"
#include "format/serialization_id.h"

/* From here on a number does not fit the 32-bit fields of a zip (formats.md 3.4). */
#define ZIP64_FROM 0xFFFFFFFFu

#define LOCAL_BYTES 30
#define CENTRAL_BYTES 46
#define CENTRAL_CRC 16 /* in a directory entry */
#define DESCRIPTOR_MAX 24
#define ZIP64_FIELD_MAX 28
#define END_BYTES (56 + 20 + 22)
#define NAME_MAX_BYTES 32    /* behind the prefix */
#define N_FIXED_MAX 6        /* members that are no storages */
#define FIXED_CONTENT_MAX 64 /* bytes of their content, data.pkl's aside */

/* A storage: what is needed to find and to patch it. Entry n stands for the end of the archive. */
typedef struct storage_place {
    uint64_t offset;    /* of its bytes in the archive */
    size_t piece;       /* where the piece before it starts in the text */
    size_t central_crc; /* where its CRC stands in the directory's entry, in the text */
    bool has_data;
} storage_place;

struct dcp__archive_layout {
    dcp_context *ctx;
    bool is_finished; /* all of it is in `pickle` */
    const void *pickle;
    size_t pickle_len;
    size_t pickle_at; /* in the text: data.pkl's content goes in here */
    size_t n;
    uint64_t length;
    uint64_t name_hash;
    uint64_t data_hash; /* of the members before the storages */
    uint32_t version_crc;
    size_t id_at; /* in the text: serialization_id, its descriptor's and its directory entry's CRC */
    size_t id_descriptor_crc, id_central_crc;
    storage_place *places; /* n + 1 */
    uint8_t *text;         /* all pieces, CRCs of storages zero, without payloads */
    size_t text_bytes;
};

typedef struct member {
    uint64_t header; /* offset of its local header */
    uint64_t bytes;
    uint32_t crc;
} member;

typedef struct builder {
    dcp__archive_layout *l;
    const dcp__archive_opts *opts;
    size_t prefix_len;
    uint64_t at; /* in the archive */
    uint8_t *p;  /* in the text */
    member *members;
    size_t n_members;
} builder;

static void put16(builder *b, uint16_t v)
{
    dcp__store16(b->p, v);
    b->p += 2;
}

static void put32(builder *b, uint32_t v)
{
    dcp__store32(b->p, v);
    b->p += 4;
}

static void put64(builder *b, uint64_t v)
{
    dcp__store64(b->p, v);
    b->p += 8;
}

static void put_bytes(builder *b, const void *bytes, size_t n)
{
    memcpy(b->p, bytes, n);
    b->p += n;
}

static void put_zeros(builder *b, size_t n)
{
    memset(b->p, 0, n);
    b->p += n;
}

/* `archive/data/7`: storages are named by number, the others by text. */
static size_t member_name(char out[NAME_MAX_BYTES], const char *text, size_t number)
{
    size_t len = (size_t)(stpcpy(out, text) - out);
    if (number == SIZE_MAX) {
        return len;
    }
    char digits[24];
    size_t n = 0;
    do {
        digits[n++] = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    while (n) {
        out[len++] = digits[--n];
    }
    return len;
}

static void put_name(builder *b, const char *name, size_t len)
{
    put_bytes(b, b->opts->prefix, b->prefix_len);
    put_bytes(b, "/", 1);
    put_bytes(b, name, len);
}

static bool is_large(const member *m)
{
    return m->bytes >= ZIP64_FROM;
}

static bool is_far(const member *m)
{
    return m->header >= ZIP64_FROM;
}

static size_t zip64_bytes(const member *m)
{
    return is_large(m) || is_far(m) ? 4u + (is_large(m) ? 16 : 0) + (is_far(m) ? 8 : 0) : 0;
}

/* In local headers the compressed size is left 0, as PyTorch does. */
static void put_zip64(builder *b, const member *m, bool is_local)
{
    size_t bytes = zip64_bytes(m);
    if (!bytes) {
        return;
    }
    put16(b, 1);
    put16(b, (uint16_t)(bytes - 4));
    if (is_large(m)) {
        put64(b, m->bytes);
        put64(b, is_local ? 0 : m->bytes);
    }
    if (is_far(m)) {
        put64(b, m->header);
    }
}

/* Local header and padding: the member's data follows at a multiple of the alignment. */
static void put_local(builder *b, const member *m, const char *name, size_t len)
{
    size_t name_len = b->prefix_len + 1 + len, zip64 = zip64_bytes(m);
    uint64_t unpadded = m->header + LOCAL_BYTES + name_len + zip64 + 4;
    uint16_t padding = (uint16_t)(dcp__align_up(unpadded, b->opts->alignment) - unpadded);
    put_bytes(b, "PK\3\4\0\0", 6);
    put16(b, m->bytes ? 0x0808 : 0x0800);
    put_zeros(b, 18);
    put16(b, (uint16_t)name_len);
    put16(b, (uint16_t)(zip64 + 4 + padding));
    put_name(b, name, len);
    put_zip64(b, m, true);
    put_bytes(b, "FB", 2);
    put16(b, padding);
    memset(b->p, 'Z', padding);
    b->p += padding;
    b->at = unpadded + padding;
}

static void put_descriptor(builder *b, const member *m)
{
    const uint8_t *start = b->p;
    if (!m->bytes) {
        return;
    }
    put_bytes(b, "PK\7\10", 4);
    put32(b, m->crc);
    if (zip64_bytes(m)) {
        put64(b, m->bytes);
        put64(b, m->bytes);
    } else {
        put32(b, (uint32_t)m->bytes);
        put32(b, (uint32_t)m->bytes);
    }
    b->at += (uint64_t)(b->p - start);
}

static member *begin_member(builder *b, const char *text, size_t number, uint64_t bytes, uint32_t crc)
{
    char name[NAME_MAX_BYTES];
    size_t len = member_name(name, text, number);
    member *m = &b->members[b->n_members++];
    *m = (member){.header = b->at, .bytes = bytes, .crc = crc};
    put_local(b, m, name, len);
    return m;
}

/* A member whose content is known; returns its CRC. */
static uint32_t put_small(builder *b, const char *name, const char *content)
{
    size_t len = strlen(content);
    uint32_t crc = dcp__crc32(0, content, len);
    const member *m = begin_member(b, name, SIZE_MAX, len, crc);
    put_bytes(b, content, len);
    b->at += len;
    put_descriptor(b, m);
    return crc;
}

static void hash_member(builder *b, uint32_t crc)
{
    b->l->data_hash = dcp__hash_combine(b->l->data_hash, crc);
}

static void put_pickle(builder *b)
{
    dcp__archive_layout *l = b->l;
    uint32_t crc = dcp__crc32(0, l->pickle, l->pickle_len);
    const member *m = begin_member(b, "data.pkl", SIZE_MAX, l->pickle_len, crc);
    l->pickle_at = (size_t)(b->p - l->text);
    b->at += l->pickle_len;
    put_descriptor(b, m);
    if (l->pickle_len) {
        hash_member(b, crc);
    }
}

static void put_head(builder *b)
{
    put_pickle(b);
    if (!b->opts->is_old_form) {
        char digits[NAME_MAX_BYTES];
        digits[member_name(digits, "", b->opts->alignment)] = 0;
        hash_member(b, put_small(b, ".format_version", "1"));
        hash_member(b, put_small(b, ".storage_alignment", digits));
    }
    hash_member(b, put_small(b, "byteorder", "little"));
}

static bool put_storages(builder *b, const uint64_t *storage_bytes)
{
    dcp__archive_layout *l = b->l;
    for (size_t i = 0; i < l->n; i++) {
        storage_place *place = &l->places[i];
        const member *m = begin_member(b, "data/", i, storage_bytes[i], 0);
        *place = (storage_place){.offset = b->at, .piece = place->piece, .has_data = storage_bytes[i] > 0};
        if (!dcp__add_u64(b->at, storage_bytes[i], &b->at) || b->at > INT64_MAX) {
            return false;
        }
        l->places[i + 1].piece = (size_t)(b->p - l->text);
        put_descriptor(b, m);
    }
    return true;
}

static void put_id(builder *b)
{
    dcp__archive_layout *l = b->l;
    const member *m = begin_member(b, ".data/serialization_id", SIZE_MAX, DCP__SERIALIZATION_ID_BYTES, 0);
    l->id_at = (size_t)(b->p - l->text);
    put_zeros(b, DCP__SERIALIZATION_ID_BYTES);
    b->at += DCP__SERIALIZATION_ID_BYTES;
    l->id_descriptor_crc = (size_t)(b->p - l->text) + 4;
    put_descriptor(b, m);
}

static void put_central(builder *b, const member *m, const char *text, size_t number)
{
    char name[NAME_MAX_BYTES];
    size_t len = member_name(name, text, number);
    uint32_t bytes = is_large(m) ? ZIP64_FROM : (uint32_t)m->bytes;
    put_bytes(b, "PK\1\2\0\0\0\0", 8);
    put16(b, m->bytes ? 0x0808 : 0x0800);
    put_zeros(b, 6);
    put32(b, m->crc);
    put32(b, bytes);
    put32(b, bytes);
    put16(b, (uint16_t)(b->prefix_len + 1 + len));
    put16(b, (uint16_t)zip64_bytes(m));
    put_zeros(b, 10);
    put32(b, is_far(m) ? ZIP64_FROM : (uint32_t)m->header);
    put_name(b, name, len);
    put_zip64(b, m, false);
}

/* The directory, in the order of the members. */
static void put_directory(builder *b)
{
    dcp__archive_layout *l = b->l;
    const member *m = b->members;
    put_central(b, m++, "data.pkl", SIZE_MAX);
    if (!b->opts->is_old_form) {
        put_central(b, m++, ".format_version", SIZE_MAX);
        put_central(b, m++, ".storage_alignment", SIZE_MAX);
    }
    put_central(b, m++, "byteorder", SIZE_MAX);
    for (size_t i = 0; i < l->n; i++) {
        l->places[i].central_crc = (size_t)(b->p - l->text) + CENTRAL_CRC;
        put_central(b, m++, "data/", i);
    }
    put_central(b, m++, "version", SIZE_MAX);
    l->id_central_crc = (size_t)(b->p - l->text) + CENTRAL_CRC;
    put_central(b, m++, ".data/serialization_id", SIZE_MAX);
}

/* The zip64 end and its locator are there however small the archive is. */
static void put_end(builder *b)
{
    uint64_t directory = b->at, n = b->n_members;
    const uint8_t *start = b->p;
    put_directory(b);
    uint64_t bytes = (uint64_t)(b->p - start), end = directory + bytes;
    put_bytes(b, "PK\6\6", 4);
    put64(b, 44);
    put16(b, 0x031e);
    put16(b, 0x002d);
    put_zeros(b, 8);
    put64(b, n);
    put64(b, n);
    put64(b, bytes);
    put64(b, directory);
    put_bytes(b, "PK\6\7\0\0\0\0", 8);
    put64(b, end);
    put32(b, 1);
    put_bytes(b, "PK\5\6\0\0\0\0", 8);
    put16(b, n > UINT16_MAX ? UINT16_MAX : (uint16_t)n);
    put16(b, n > UINT16_MAX ? UINT16_MAX : (uint16_t)n);
    put32(b, bytes > ZIP64_FROM ? ZIP64_FROM : (uint32_t)bytes);
    put32(b, directory > ZIP64_FROM ? ZIP64_FROM : (uint32_t)directory);
    put_zeros(b, 2);
    b->at = end + END_BYTES;
}

/* Bytes that the text of n storages takes at most. */
static bool text_bound(size_t n, size_t prefix_len, uint32_t alignment, size_t *out)
{
    size_t fixed = LOCAL_BYTES + CENTRAL_BYTES + (size_t)2 * ZIP64_FIELD_MAX + 4 + DESCRIPTOR_MAX;
    size_t names = 2 * (prefix_len + 1 + NAME_MAX_BYTES);
    size_t each = fixed + names + alignment;
    size_t members, bytes;
    return dcp__add_size(n, N_FIXED_MAX, &members) && dcp__mul_size(members, each, &bytes) &&
           dcp__add_size(bytes, FIXED_CONTENT_MAX + END_BYTES, out);
}

static dcp_status check_opts(const dcp__archive_opts *opts, dcp_error *err)
{
    uint32_t a = opts->alignment;
    size_t len = opts->prefix ? strlen(opts->prefix) : 0;
    if (len == 0 || len > DCP__ARCHIVE_MAX_PREFIX || strchr(opts->prefix, '/')) {
        return dcp__fail(err, DCP_ARG, "archive prefix of %zu bytes, or with a slash", len);
    }
    if (a < DCP__ARCHIVE_ALIGNMENT || a > DCP__ARCHIVE_MAX_ALIGNMENT || (a & (a - 1))) {
        return dcp__fail(err, DCP_ARG, "archive alignment %u", a);
    }
    return DCP_OK;
}

/* One block: the layout, places, members (of use while building only), text. */
static dcp__archive_layout *allocate(dcp_context *ctx, size_t n, size_t text_bytes, member **members)
{
    size_t each = sizeof(storage_place) + sizeof(member), bytes;
    size_t fixed = sizeof(dcp__archive_layout) + sizeof(storage_place) + N_FIXED_MAX * sizeof(member);
    if (!dcp__mul_size(n, each, &bytes) || !dcp__add_size(bytes, fixed, &bytes) || !dcp__add_size(bytes, text_bytes, &bytes)) {
        return NULL;
    }
    dcp__archive_layout *l = dcp__alloc(ctx, bytes);
    if (l) {
        *l = (dcp__archive_layout){.ctx = ctx, .n = n};
        l->places = (storage_place *)(l + 1);
        *members = (member *)(l->places + n + 1);
        l->text = (uint8_t *)(*members + n + N_FIXED_MAX);
    }
    return l;
}

static bool build(builder *b, const uint64_t *storage_bytes)
{
    dcp__archive_layout *l = b->l;
    l->places[0].piece = 0;
    put_head(b);
    if (!put_storages(b, storage_bytes)) {
        return false;
    }
    l->places[l->n].offset = b->at;
    l->version_crc = put_small(b, "version", "3\n");
    put_id(b);
    put_end(b);
    l->text_bytes = (size_t)(b->p - l->text);
    l->length = b->at;
    return true;
}

dcp_status dcp__archive_layout_create(dcp_context *ctx, const dcp__archive_opts *opts, const void *pickle, size_t pickle_len,
                                      const uint64_t *storage_bytes, size_t n, dcp__archive_layout **out, dcp_error *err)
{
    size_t bound;
    uint64_t name_hash;
    member *members;
    dcp_status status = check_opts(opts, err);
    if (status == DCP_OK) {
        status = dcp__name_hash(ctx, n, opts->is_old_form, &name_hash, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    if (!text_bound(n, strlen(opts->prefix), opts->alignment, &bound) || pickle_len > INT64_MAX) {
        return dcp__fail(err, DCP_LIMIT, "archive of %zu storages and a pickle of %zu bytes", n, pickle_len);
    }
    dcp__archive_layout *l = allocate(ctx, n, bound, &members);
    if (!l) {
        return dcp__nomem(err);
    }
    l->pickle = pickle;
    l->pickle_len = pickle_len;
    l->name_hash = name_hash;
    builder b = {.l = l, .opts = opts, .prefix_len = strlen(opts->prefix), .p = l->text, .members = members};
    if (!build(&b, storage_bytes)) {
        dcp__archive_layout_free(l);
        return dcp__fail(err, DCP_LIMIT, "archive of %zu storages exceeds %lld bytes", n, (long long)INT64_MAX);
    }
    *out = l;
    return DCP_OK;
}

dcp_status dcp__archive_layout_finished(dcp_context *ctx, const void *bytes, size_t len, dcp__archive_layout **out,
                                        dcp_error *err)
{
    ctx = dcp__context(ctx);
    dcp__archive_layout *l = dcp__calloc(ctx, 1, sizeof *l + sizeof *l->places);
    if (!l) {
        return dcp__nomem(err);
    }
    l->ctx = ctx;
    l->is_finished = true;
    l->pickle = bytes;
    l->pickle_len = len;
    l->length = len;
    l->places = (storage_place *)(l + 1);
    *out = l;
    return DCP_OK;
}

void dcp__archive_layout_free(dcp__archive_layout *l)
{
    if (l) {
        dcp__free(l->ctx, l);
    }
}

uint64_t dcp__archive_length(const dcp__archive_layout *l)
{
    return l->length;
}

uint64_t dcp__archive_storage_offset(const dcp__archive_layout *l, size_t i)
{
    return l->places[i].offset;
}

static size_t piece_end(const dcp__archive_layout *l, size_t k)
{
    return k == l->n ? l->text_bytes : l->places[k + 1].piece;
}

size_t dcp__archive_piece_bytes(const dcp__archive_layout *l, size_t k)
{
    return piece_end(l, k) - l->places[k].piece + (k == 0 ? l->pickle_len : 0);
}

/* Fills in what depends on the CRCs of storages; out holds the text from `origin` on. */
static void patch_end(const dcp__archive_layout *l, const uint32_t *crcs, uint8_t *out, size_t origin)
{
    uint64_t hash = l->data_hash;
    for (size_t i = 0; i < l->n; i++) {
        if (l->places[i].has_data) {
            hash = dcp__hash_combine(hash, crcs[i]);
            dcp__store32(out + (l->places[i].central_crc - origin), crcs[i]);
        }
    }
    uint8_t *id = out + (l->id_at - origin);
    dcp__serialization_id(l->name_hash, dcp__hash_combine(hash, l->version_crc), id);
    uint32_t crc = dcp__crc32(0, id, DCP__SERIALIZATION_ID_BYTES);
    dcp__store32(out + (l->id_descriptor_crc - origin), crc);
    dcp__store32(out + (l->id_central_crc - origin), crc);
}

void dcp__archive_piece(const dcp__archive_layout *l, size_t k, const uint32_t *crcs, uint8_t *out)
{
    size_t start = l->places[k].piece, end = piece_end(l, k);
    if (l->is_finished) {
        memcpy(out, l->pickle, l->pickle_len);
        return;
    }
    if (k == 0) {
        memcpy(out, l->text, l->pickle_at);
        if (l->pickle_len) {
            memcpy(out + l->pickle_at, l->pickle, l->pickle_len);
        }
        out += l->pickle_at + l->pickle_len;
        start = l->pickle_at;
    }
    memcpy(out, l->text + start, end - start);
    if (k > 0 && l->places[k - 1].has_data) {
        dcp__store32(out + 4, crcs[k - 1]); /* its descriptor */
    }
    if (k == l->n) {
        patch_end(l, crcs, out, start);
    }
}
