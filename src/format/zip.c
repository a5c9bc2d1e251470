#include "format/zip.h"

#include <stdlib.h>
#include <zlib.h>

#include "base/bytes.h"
#include "base/hash.h"

#define LOCAL_SIG 0x04034b50u
#define ENTRY_SIG 0x02014b50u
#define END_SIG 0x06054b50u
#define LOCATOR_SIG 0x07064b50u
#define END64_SIG 0x06064b50u
#define LOCAL_BYTES 30
#define ENTRY_BYTES 46
#define END_BYTES 22
#define LOCATOR_BYTES 20
#define END64_BYTES 56
#define MARK32 0xffffffffu
#define MARK16 0xffffu
#define ENCRYPTED 1
#define MAX_TRAILING 65536
/* Archives with more members look names up in a map. */
#define FEW_MEMBERS 16
/* An entry's fixed part and the longest name and extra field. */
#define MAX_ENTRY_BYTES (ENTRY_BYTES + 2 * 65535)

/* ---- where the directory is ---- */

typedef struct directory {
    uint64_t offset, bytes, entries;
} directory;

/* Steps back over trailing bytes in windows that overlap by the signature's length less one. */
static dcp_status search_end(const dcp__source *src, uint64_t *pos, dcp_error *err)
{
    uint8_t window[4096];
    uint64_t lowest = src->size > MAX_TRAILING + END_BYTES ? src->size - MAX_TRAILING - END_BYTES : 0;
    uint64_t high = src->size - END_BYTES + 4;
    for (;;) {
        uint64_t low = high - lowest > sizeof window ? high - sizeof window : lowest;
        size_t n = (size_t)(high - low);
        dcp_status st = dcp__source_read(src, low, window, n, err);
        if (st) {
            return st;
        }
        for (size_t i = n - 4 + 1; i-- > 0;) {
            if (dcp__load32(window + i) == END_SIG) {
                *pos = low + i;
                return DCP_OK;
            }
        }
        if (low == lowest) {
            return dcp__fail_at(err, DCP_FORMAT, src->size, "zip archive of %llu bytes has no end record",
                                (unsigned long long)src->size);
        }
        high = low + 3;
    }
}

static dcp_status read_end(const dcp__source *src, uint8_t end[END_BYTES], uint64_t *pos, dcp_error *err)
{
    if (src->size < END_BYTES) {
        return dcp__fail_at(err, DCP_FORMAT, 0, "%llu bytes are too few for a zip archive", (unsigned long long)src->size);
    }
    *pos = src->size - END_BYTES;
    dcp_status st = dcp__source_read(src, *pos, end, END_BYTES, err);
    if (st || dcp__load32(end) == END_SIG) {
        return st;
    }
    st = search_end(src, pos, err);
    return st ? st : dcp__source_read(src, *pos, end, END_BYTES, err);
}

/* A narrow field either repeats the wide one or says that only the wide one counts. */
static bool agrees(uint64_t wide, uint32_t narrow, uint32_t mark)
{
    return narrow == mark || narrow == wide;
}

/* The zip64 end record at `pos`, which must agree with the classic one. */
static dcp_status read_end64(const dcp__source *src, uint64_t pos, const uint8_t *end, directory *d, dcp_error *err)
{
    uint8_t b[END64_BYTES];
    dcp_status st = dcp__source_read(src, pos, b, sizeof b, err);
    if (st) {
        return st;
    }
    if (dcp__load32(b) != END64_SIG || dcp__load64(b + 4) < END64_BYTES - 12) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "no zip64 end record where its locator says");
    }
    *d = (directory){.offset = dcp__load64(b + 48), .bytes = dcp__load64(b + 40), .entries = dcp__load64(b + 32)};
    if (dcp__load32(b + 16) || dcp__load32(b + 20) || dcp__load64(b + 24) != d->entries) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "zip archive is split over several disks");
    }
    if (!agrees(d->entries, dcp__load16(end + 10), MARK16) || !agrees(d->bytes, dcp__load32(end + 12), MARK32) ||
        !agrees(d->offset, dcp__load32(end + 16), MARK32)) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "the two end records of the zip archive differ");
    }
    return DCP_OK;
}

/* *limit receives where the end records begin. */
static dcp_status directory_of(const dcp__source *src, const uint8_t *end, uint64_t pos, directory *d, uint64_t *limit,
                               dcp_error *err)
{
    uint8_t b[LOCATOR_BYTES] = {0};
    dcp_status st = pos < sizeof b ? DCP_OK : dcp__source_read(src, pos - sizeof b, b, sizeof b, err);
    if (st) {
        return st;
    }
    if (dcp__load32(b) == LOCATOR_SIG) {
        *limit = dcp__load64(b + 8);
        if (!dcp__range_fits(*limit, END64_BYTES, pos - sizeof b)) {
            return dcp__fail_at(err, DCP_FORMAT, pos - sizeof b, "zip64 end record at %llu is outside the archive",
                                (unsigned long long)*limit);
        }
        return read_end64(src, *limit, end, d, err);
    }
    *limit = pos;
    *d = (directory){.offset = dcp__load32(end + 16), .bytes = dcp__load32(end + 12), .entries = dcp__load16(end + 10)};
    if (dcp__load16(end + 4) || dcp__load16(end + 6) || dcp__load16(end + 8) != d->entries) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "zip archive is split over several disks");
    }
    return DCP_OK;
}

static dcp_status find_directory(const dcp__source *src, directory *d, dcp_error *err)
{
    uint8_t end[END_BYTES];
    uint64_t pos = 0, limit = 0;
    dcp_status st = read_end(src, end, &pos, err);
    st = st ? st : directory_of(src, end, pos, d, &limit, err);
    if (st) {
        return st;
    }
    if (!dcp__range_fits(d->offset, d->bytes, limit)) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "zip directory of %llu bytes at %llu exceeds its end at %llu",
                            (unsigned long long)d->bytes, (unsigned long long)d->offset, (unsigned long long)limit);
    }
    if (d->entries > d->bytes / ENTRY_BYTES) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "zip directory of %llu bytes cannot hold %llu entries",
                            (unsigned long long)d->bytes, (unsigned long long)d->entries);
    }
    return DCP_OK;
}

/* ---- reading the directory ---- */

/* Walks over the directory through a window, so that no allocation follows from its claimed size. */
typedef struct walker {
    const dcp__source *src;
    uint64_t pos, end;
    uint8_t *window; /* NULL for sources in memory */
    uint64_t window_pos;
    size_t window_cap, window_len;
} walker;

/* *out points at the next n bytes; n <= MAX_ENTRY_BYTES. */
static dcp_status peek(walker *w, size_t n, const uint8_t **out, dcp_error *err)
{
    if (n > w->end - w->pos) {
        return dcp__fail_at(err, DCP_FORMAT, w->pos, "zip directory entry exceeds the directory's end at %llu",
                            (unsigned long long)w->end);
    }
    if (!w->window) {
        *out = (const uint8_t *)w->src->base + w->pos;
        return DCP_OK;
    }
    if (w->pos + n > w->window_pos + w->window_len) {
        uint64_t left = w->end - w->pos;
        size_t len = left < w->window_cap ? (size_t)left : w->window_cap;
        dcp_status st = dcp__source_read(w->src, w->pos, w->window, len, err);
        if (st) {
            return st;
        }
        w->window_pos = w->pos;
        w->window_len = len;
    }
    *out = w->window + (w->pos - w->window_pos);
    return DCP_OK;
}

/* Takes the next 8 bytes of a zip64 field where the narrow value is only a mark. */
static bool widen(uint64_t *value, const uint8_t **field, size_t *left)
{
    if (*value != MARK32) {
        return true;
    }
    if (*left < 8) {
        return false;
    }
    *value = dcp__load64(*field);
    *field += 8;
    *left -= 8;
    return true;
}

/* False if a value is marked as wide and the extra field lacks it. */
static bool apply_zip64(dcp__zip_member *m, const uint8_t *extra, size_t len)
{
    const uint8_t *field = extra;
    size_t n = 0;
    for (size_t i = 0; i + 4 <= len && dcp__load16(extra + i + 2) <= len - i - 4; i += 4u + dcp__load16(extra + i + 2)) {
        if (dcp__load16(extra + i) == 1) {
            field = extra + i + 4;
            n = dcp__load16(extra + i + 2);
            break;
        }
    }
    return widen(&m->full_bytes, &field, &n) && widen(&m->bytes, &field, &n) && widen(&m->header, &field, &n);
}

static dcp_status check_entry(const dcp__zip *z, const dcp__zip_member *m, const uint8_t *e, uint64_t at, dcp_error *err)
{
    uint64_t head = LOCAL_BYTES + (uint64_t)dcp__load16(e + 28);
    if (dcp__load16(e + 8) & ENCRYPTED || (m->method != DCP__ZIP_STORED && m->method != DCP__ZIP_DEFLATED)) {
        return dcp__fail_at(err, DCP_UNSUPPORTED, at, "zip member %s: flags %#x, method %u", dcp__print(m->name).text,
                            dcp__load16(e + 8), m->method);
    }
    if (m->method == DCP__ZIP_STORED && m->bytes != m->full_bytes) {
        return dcp__fail_at(err, DCP_FORMAT, at, "zip member %s: stored, but its sizes %llu and %llu differ",
                            dcp__print(m->name).text, (unsigned long long)m->bytes, (unsigned long long)m->full_bytes);
    }
    if (!dcp__range_fits(m->header, head, z->directory) || m->bytes > z->directory - m->header - head) {
        return dcp__fail_at(err, DCP_FORMAT, at, "zip member %s: %llu bytes at %llu exceed the directory's start at %llu",
                            dcp__print(m->name).text, (unsigned long long)m->bytes, (unsigned long long)m->header,
                            (unsigned long long)z->directory);
    }
    return DCP_OK;
}

/* Names are kept in one growing buffer; until it stands still a member's name holds its length only. */
typedef struct name_list {
    char *text;
    size_t len, cap;
    size_t prefix_len; /* of the first entry: all must share it */
} name_list;

static dcp_status add_name(dcp__zip *z, name_list *names, const char *name, size_t len, uint64_t at, dcp_error *err)
{
    if (names->len == 0) {
        const char *slash = len ? memchr(name, '/', len) : NULL;
        names->prefix_len = slash ? (size_t)(slash - name) + 1 : 0;
    }
    if (names->prefix_len == 0 || len < names->prefix_len || (names->len && memcmp(names->text, name, names->prefix_len) != 0)) {
        return dcp__fail_at(err, DCP_FORMAT, at, "zip member %s is not in the archive's directory",
                            dcp__print((dcp_str){name, len}).text);
    }
    void *text = names->text;
    bool grown = dcp__grow(z->ctx, &text, &names->cap, names->len + len + 1, 1);
    names->text = text;
    if (!grown) {
        return dcp__nomem(err);
    }
    memcpy(names->text + names->len, name, len);
    names->text[names->len + len] = 0;
    names->len += len + 1;
    return DCP_OK;
}

/* What the entry at e says; its name and extra field follow it in memory. */
static dcp_status parse_entry(const dcp__zip *z, const uint8_t *e, uint64_t at, dcp__zip_member *m, dcp_error *err)
{
    size_t name_len = dcp__load16(e + 28), extra_len = dcp__load16(e + 30);
    *m = (dcp__zip_member){
        .name = {(const char *)e + ENTRY_BYTES, name_len},
        .header = dcp__load32(e + 42),
        .data = DCP__ZIP_UNKNOWN,
        .bytes = dcp__load32(e + 20),
        .full_bytes = dcp__load32(e + 24),
        .crc = dcp__load32(e + 16),
        .method = dcp__load16(e + 10),
    };
    if (!apply_zip64(m, e + ENTRY_BYTES + name_len, extra_len)) {
        return dcp__fail_at(err, DCP_FORMAT, at, "zip member %s: no zip64 sizes", dcp__print(m->name).text);
    }
    return check_entry(z, m, e, at, err);
}

/* Reads the entry at w->pos and steps over it. */
static dcp_status read_entry(dcp__zip *z, walker *w, name_list *names, dcp__zip_member *m, dcp_error *err)
{
    const uint8_t *e;
    dcp_status st = peek(w, ENTRY_BYTES, &e, err);
    if (st) {
        return st;
    }
    if (dcp__load32(e) != ENTRY_SIG) {
        return dcp__fail_at(err, DCP_FORMAT, w->pos, "no zip directory entry here");
    }
    size_t len = ENTRY_BYTES + (size_t)dcp__load16(e + 28) + dcp__load16(e + 30), comment_len = dcp__load16(e + 32);
    st = peek(w, len, &e, err);
    st = st ? st : parse_entry(z, e, w->pos, m, err);
    st = st ? st : add_name(z, names, m->name.ptr, m->name.len, w->pos, err);
    if (!st && comment_len > w->end - w->pos - len) {
        st = dcp__fail_at(err, DCP_FORMAT, w->pos, "zip directory entry exceeds the directory's end at %llu",
                          (unsigned long long)w->end);
    }
    w->pos += len + comment_len;
    return st;
}

/* Points the names into the buffer, now that it does not move any more. */
static void settle_names(dcp__zip *z, const name_list *names)
{
    char *next = names->text;
    for (size_t i = 0; i < z->n_members; i++) {
        dcp__zip_member *m = &z->members[i];
        size_t len = m->name.len;
        m->prefix_len = (uint16_t)names->prefix_len;
        m->name = (dcp_str){next + names->prefix_len, len - names->prefix_len};
        next += len + 1;
    }
}

static dcp_status read_entries(dcp__zip *z, walker *w, const directory *d, dcp_error *err)
{
    name_list names = {0};
    size_t cap = 0;
    dcp_status st = DCP_OK;
    while (!st && z->n_members < d->entries) {
        void *members = z->members;
        bool grown = dcp__grow(z->ctx, &members, &cap, z->n_members + 1, sizeof *z->members);
        z->members = members;
        st = grown ? read_entry(z, w, &names, &z->members[z->n_members], err) : dcp__nomem(err);
        z->n_members += !st;
    }
    z->names = names.text;
    if (!st && w->pos != w->end) {
        st =
            dcp__fail_at(err, DCP_FORMAT, w->pos, "zip directory goes on after its %llu entries", (unsigned long long)d->entries);
    }
    if (!st) {
        settle_names(z, &names);
    }
    return st;
}

static dcp_status read_directory(dcp__zip *z, const dcp__source *src, dcp_error *err)
{
    directory d = {0};
    dcp_status st = find_directory(src, &d, err);
    if (st) {
        return st;
    }
    z->directory = d.offset;
    walker w = {.src = src, .pos = d.offset, .end = d.offset + d.bytes};
    if (!src->base) {
        w.window_cap = d.bytes < MAX_ENTRY_BYTES ? (size_t)d.bytes : MAX_ENTRY_BYTES;
        w.window = dcp__alloc(z->ctx, w.window_cap);
        if (!w.window) {
            return dcp__nomem(err);
        }
    }
    st = read_entries(z, &w, &d, err);
    dcp__free(z->ctx, w.window);
    return st;
}

/* ---- what must hold between members ---- */

static dcp_status duplicate(const dcp__zip_member *m, dcp_error *err)
{
    return dcp__fail_at(err, DCP_FORMAT, m->header, "two zip members are named %s", dcp__print(m->name).text);
}

static bool same_name(dcp_str a, dcp_str b)
{
    return a.len == b.len && memcmp(a.ptr, b.ptr, a.len) == 0;
}

static dcp_status check_names(dcp__zip *z, dcp_error *err)
{
    bool few = z->n_members <= FEW_MEMBERS;
    for (size_t i = 0; i < z->n_members; i++) {
        uint64_t existing = UINT64_MAX;
        dcp_status st = few ? DCP_OK : dcp__strmap_add(&z->by_name, z->members[i].name, i, &existing, err);
        for (size_t k = 0; few && k < i; k++) {
            existing = same_name(z->members[k].name, z->members[i].name) ? k : existing;
        }
        if (st || existing != UINT64_MAX) {
            return st ? st : duplicate(&z->members[i], err);
        }
    }
    return DCP_OK;
}

/* The extra field of the local header is not known here: dcp__zip_locate compares again. */
static dcp_status set_next(dcp__zip_member *m, uint64_t next, dcp_error *err)
{
    m->next = next;
    uint64_t end = m->header + LOCAL_BYTES + m->prefix_len + m->name.len + m->bytes;
    if (end > next) {
        return dcp__fail_at(err, DCP_FORMAT, m->header, "zip member %s: its %llu bytes overlap the member at %llu",
                            dcp__print(m->name).text, (unsigned long long)m->bytes, (unsigned long long)next);
    }
    return DCP_OK;
}

static int by_header(const void *a, const void *b)
{
    const dcp__zip_member *const *x = a, *const *y = b;
    return ((*x)->header > (*y)->header) - ((*x)->header < (*y)->header);
}

static dcp_status check_unsorted(dcp__zip *z, dcp_error *err)
{
    dcp__zip_member **sorted = dcp__calloc(z->ctx, z->n_members, sizeof *sorted);
    if (!sorted) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < z->n_members; i++) {
        sorted[i] = &z->members[i];
    }
    qsort(sorted, z->n_members, sizeof *sorted, by_header);
    dcp_status st = DCP_OK;
    for (size_t i = 0; !st && i < z->n_members; i++) {
        st = set_next(sorted[i], i + 1 < z->n_members ? sorted[i + 1]->header : z->directory, err);
    }
    dcp__free(z->ctx, sorted);
    return st;
}

static dcp_status check_overlap(dcp__zip *z, dcp_error *err)
{
    dcp_status st = DCP_OK;
    for (size_t i = 0; !st && i < z->n_members; i++) {
        uint64_t next = i + 1 < z->n_members ? z->members[i + 1].header : z->directory;
        if (next <= z->members[i].header) {
            return check_unsorted(z, err);
        }
        st = set_next(&z->members[i], next, err);
    }
    return st;
}

/* ---- local headers ---- */

/* Local sizes and checksum are 0 in PyTorch's files; where they are not, they must be right. */
static bool local_agrees(uint32_t local, uint64_t value)
{
    return local == 0 || local == MARK32 || local == value;
}

dcp_status dcp__zip_locate(const dcp__source *src, dcp__zip_member *m, dcp_error *err)
{
    if (m->data != DCP__ZIP_UNKNOWN) {
        return DCP_OK;
    }
    uint8_t h[LOCAL_BYTES];
    dcp_status st = dcp__source_read(src, m->header, h, sizeof h, err);
    if (st) {
        return st;
    }
    uint64_t name_len = dcp__load16(h + 26), data = m->header + LOCAL_BYTES + name_len + dcp__load16(h + 28);
    if (dcp__load32(h) != LOCAL_SIG || name_len != m->prefix_len + m->name.len || dcp__load16(h + 8) != m->method ||
        (dcp__load32(h + 14) && dcp__load32(h + 14) != m->crc) || !local_agrees(dcp__load32(h + 18), m->bytes) ||
        !local_agrees(dcp__load32(h + 22), m->full_bytes)) {
        return dcp__fail_at(err, DCP_FORMAT, m->header, "zip member %s: local header differs from the directory",
                            dcp__print(m->name).text);
    }
    if (!dcp__range_fits(data, m->bytes, m->next)) {
        return dcp__fail_at(err, DCP_FORMAT, m->header, "zip member %s: %llu bytes at %llu exceed what follows at %llu",
                            dcp__print(m->name).text, (unsigned long long)m->bytes, (unsigned long long)data,
                            (unsigned long long)m->next);
    }
    m->data = data;
    return DCP_OK;
}

dcp_status dcp__zip_open(dcp_context *ctx, const dcp__source *src, bool lazy_headers, dcp__zip *out, dcp_error *err)
{
    dcp__zip z = {.ctx = ctx};
    dcp__strmap_init(&z.by_name, ctx);
    dcp_status st = read_directory(&z, src, err);
    st = st ? st : check_names(&z, err);
    st = st ? st : check_overlap(&z, err);
    for (size_t i = 0; !st && !lazy_headers && i < z.n_members; i++) {
        st = dcp__zip_locate(src, &z.members[i], err);
    }
    if (st) {
        dcp__zip_reset(&z);
        return st;
    }
    *out = z;
    return DCP_OK;
}

void dcp__zip_reset(dcp__zip *z)
{
    dcp__strmap_reset(&z->by_name);
    dcp__free(z->ctx, z->members);
    dcp__free(z->ctx, z->names);
    *z = (dcp__zip){.ctx = z->ctx, .by_name.ctx = z->ctx};
}

dcp__zip_member *dcp__zip_find(const dcp__zip *z, const char *name)
{
    dcp_str key = {name, strlen(name)};
    uint64_t found;
    if (z->by_name.n) {
        return dcp__strmap_get(&z->by_name, key, &found) ? &z->members[found] : NULL;
    }
    for (size_t i = 0; i < z->n_members; i++) {
        if (same_name(z->members[i].name, key)) {
            return &z->members[i];
        }
    }
    return NULL;
}

/* ---- reading a member ---- */

static void *zlib_alloc(void *ctx, unsigned count, unsigned bytes)
{
    return dcp__calloc(ctx, count, bytes);
}

static void zlib_free(void *ctx, void *ptr)
{
    dcp__free(ctx, ptr);
}

/* A member on its way through the decoder. */
typedef struct unpacking {
    dcp_context *ctx;
    const dcp__source *src;
    const dcp__zip_member *m;
    z_stream zs;
    uint64_t fed; /* stored bytes given to the decoder so far */
    uint8_t *buf; /* what came out */
    size_t len, cap;
    uint8_t in[8192];
} unpacking;

static dcp_status feed(unpacking *u, dcp_error *err)
{
    uint64_t left = u->m->bytes - u->fed;
    if (u->zs.avail_in || !left) {
        return DCP_OK;
    }
    size_t n = left < sizeof u->in ? (size_t)left : sizeof u->in;
    dcp_status st = dcp__source_read(u->src, u->m->data + u->fed, u->in, n, err);
    if (!st) {
        u->zs.next_in = u->in;
        u->zs.avail_in = (unsigned)n;
        u->fed += n;
    }
    return st;
}

/* The buffer grows with what comes out, whatever the directory claims. One byte is left for the final NUL. */
static dcp_status make_room(unpacking *u, dcp_error *err)
{
    void *buf = u->buf;
    bool grown = u->cap - u->len >= 2 || dcp__grow(u->ctx, &buf, &u->cap, u->len + 1024, 1);
    u->buf = buf;
    if (!grown) {
        return dcp__nomem(err);
    }
    uint64_t room = u->m->full_bytes - u->len, space = u->cap - u->len - 1;
    space = space < room ? space : room;
    u->zs.next_out = u->buf + u->len;
    u->zs.avail_out = space < UINT32_MAX ? (unsigned)space : UINT32_MAX;
    return DCP_OK;
}

static dcp_status unpack(unpacking *u, dcp_error *err)
{
    for (int rc = Z_OK; rc != Z_STREAM_END;) {
        dcp_status st = feed(u, err);
        st = st ? st : make_room(u, err);
        if (st) {
            return st;
        }
        unsigned avail_in = u->zs.avail_in, avail_out = u->zs.avail_out;
        rc = inflate(&u->zs, Z_NO_FLUSH);
        u->len += avail_out - u->zs.avail_out;
        bool is_stuck = avail_in == u->zs.avail_in && avail_out == u->zs.avail_out && rc != Z_STREAM_END;
        if (rc == Z_MEM_ERROR) {
            return dcp__nomem(err);
        }
        if (is_stuck || (rc != Z_OK && rc != Z_STREAM_END && rc != Z_BUF_ERROR)) {
            return dcp__fail_at(err, DCP_FORMAT, u->m->data, "zip member: deflated data is corrupt or longer than %llu bytes",
                                (unsigned long long)u->m->full_bytes);
        }
    }
    if (u->len != u->m->full_bytes) {
        return dcp__fail_at(err, DCP_FORMAT, u->m->data, "zip member: deflated data gives %zu of %llu bytes", u->len,
                            (unsigned long long)u->m->full_bytes);
    }
    return DCP_OK;
}

/* *buf may be set on failure, too. */
static dcp_status read_deflated(dcp_context *ctx, const dcp__source *src, const dcp__zip_member *m, uint8_t **buf, dcp_error *err)
{
    unpacking u;
    u.ctx = ctx;
    u.src = src;
    u.m = m;
    u.zs = (z_stream){.zalloc = zlib_alloc, .zfree = zlib_free, .opaque = ctx};
    u.fed = 0;
    u.buf = NULL;
    u.len = u.cap = 0;
    if (inflateInit2(&u.zs, -MAX_WBITS) != Z_OK) {
        return dcp__nomem(err);
    }
    dcp_status st = unpack(&u, err);
    inflateEnd(&u.zs);
    *buf = u.buf;
    return st;
}

static dcp_status read_stored(dcp_context *ctx, const dcp__source *src, const dcp__zip_member *m, uint8_t **buf, dcp_error *err)
{
    if (!dcp__range_fits(m->data, m->bytes, src->size)) {
        return dcp__fail_at(err, DCP_FORMAT, m->data, "zip member of %llu bytes exceeds the archive",
                            (unsigned long long)m->bytes);
    }
    *buf = dcp__alloc(ctx, (size_t)m->bytes + 1);
    return *buf ? dcp__source_read(src, m->data, *buf, (size_t)m->bytes, err) : dcp__nomem(err);
}

dcp_status dcp__zip_read(dcp_context *ctx, const dcp__source *src, const dcp__zip_member *m, uint64_t max_bytes, uint8_t **out,
                         size_t *out_len, dcp_error *err)
{
    if (m->full_bytes > max_bytes || m->full_bytes >= SIZE_MAX) {
        return dcp__fail_at(err, DCP_LIMIT, m->data, "zip member of %llu bytes exceeds the limit of %llu",
                            (unsigned long long)m->full_bytes, (unsigned long long)max_bytes);
    }
    uint8_t *buf = NULL;
    dcp_status st = m->method == DCP__ZIP_STORED ? read_stored(ctx, src, m, &buf, err) : read_deflated(ctx, src, m, &buf, err);
    size_t n = (size_t)m->full_bytes;
    uint32_t crc = !st && m->crc ? dcp__crc32(0, buf, n) : 0;
    if (!st && crc != m->crc) {
        st = dcp__fail_at(err, DCP_CHECKSUM, m->data, "zip member of %zu bytes has CRC %08x, the directory says %08x", n, crc,
                          m->crc);
    }
    if (st) {
        dcp__free(ctx, buf);
        return st;
    }
    buf[n] = 0;
    *out = buf;
    *out_len = n;
    return DCP_OK;
}
