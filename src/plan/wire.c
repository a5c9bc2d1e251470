/* Names, types and boxes as bytes. */
#include "plan/wire.h"

#include <stdio.h>

#include "base/checked.h"
#include "state/strided.h"

enum { IS_OBJECT = 1, SAME_SHAPE = 2, PER_RANK = 4, PATH_SHIFT = 3, KNOWN_BITS = 31 };

/* A path is the name as its only key; or the name cut at dots, at the same places as the name before or at other ones; or it has
 * keys of its own. */
enum { PATH_WHOLE, PATH_SAME_CUTS, PATH_CUTS, PATH_KEYS };

/* ---- numbers ---- */

uint64_t dcp__get_long_varint(dcp__wire *w)
{
    uint64_t v = 0;
    for (int shift = 0; shift < 70 && w->p < w->end; shift += 7) {
        uint8_t byte = *w->p++;
        if (shift == 63 && byte > 1) {
            break;
        }
        v |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return v;
        }
    }
    dcp__wire_spoil(w);
    return 0;
}

dcp_status dcp__wire_fail(const dcp__wire *w, const char *what, int rank, dcp_error *err)
{
    size_t at = (size_t)(w->p - w->start);
    dcp_status status = dcp__fail_at(err, DCP_FORMAT, at, "%s of rank %d is malformed at byte %zu", what, rank, at);
    if (err) {
        err->rank = rank;
    }
    return status;
}

/* ---- boxes ---- */

/* A bit for each dimension that the box does not fill. For those the size, and the offset: as a multiple of the size, which it
 * is if a tensor has been cut evenly, or as it stands. */
void dcp__put_box(dcp__buf *b, int ndim, const int64_t *extents, const int64_t *offsets, const int64_t *sizes)
{
    uint64_t mask = 0;
    for (int d = 0; d < ndim; d++) {
        mask |= (uint64_t)(offsets[d] != 0 || sizes[d] != extents[d]) << d;
    }
    dcp__put_varint(b, mask);
    for (int d = 0; d < ndim; d++) {
        if (mask >> d & 1) {
            uint64_t offset = (uint64_t)offsets[d], size = (uint64_t)sizes[d];
            dcp__put_varint(b, size);
            dcp__put_varint(b, size && offset % size == 0 ? offset / size << 1 : offset << 1 | 1);
        }
    }
}

static int64_t get_offset(dcp__wire *w, int64_t size)
{
    uint64_t v = dcp__get_varint(w);
    int64_t offset = (int64_t)(v >> 1);
    if (!(v & 1) && !dcp__mul_i64(offset, size, &offset)) {
        dcp__wire_spoil(w);
        return 0;
    }
    return offset;
}

void dcp__get_box(dcp__wire *w, int ndim, const int64_t *extents, int64_t *offsets, int64_t *sizes)
{
    uint64_t mask = dcp__get_varint(w);
    if (ndim < 64 && mask >> ndim) {
        dcp__wire_spoil(w);
    }
    for (int d = 0; d < ndim; d++) {
        bool is_full = !(mask >> d & 1);
        sizes[d] = is_full ? extents[d] : (int64_t)dcp__get_bounded(w, INT64_MAX);
        offsets[d] = is_full ? 0 : get_offset(w, sizes[d]);
    }
}

/* ---- paths ---- */

void dcp__put_path(dcp__buf *b, const dcp_key *path, size_t len)
{
    dcp__put_varint(b, len);
    for (size_t i = 0; i < len; i++) {
        if (path[i].is_int) {
            dcp__put_varint(b, 1);
            dcp__put_delta(b, (uint64_t)path[i].integer, 0);
        } else {
            dcp__put_varint(b, (uint64_t)path[i].string.len << 1);
            dcp__buf_put(b, path[i].string.ptr, path[i].string.len);
        }
    }
}

static void skip_path(dcp__wire *w)
{
    for (uint64_t n = dcp__get_bounded(w, dcp__wire_left(w)); n > 0 && !w->bad; n--) {
        uint64_t head = dcp__get_varint(w);
        if (head & 1) {
            dcp__get_varint(w);
        } else {
            dcp__get_bytes(w, head >> 1);
        }
    }
}

dcp_status dcp__get_path(dcp__wire *w, dcp__arena *arena, const dcp_key **path, size_t *len, dcp_error *err)
{
    size_t n = (size_t)dcp__get_bounded(w, dcp__wire_left(w));
    dcp_key *keys = dcp__arena_alloc(arena, n * sizeof *keys);
    if (!keys) {
        return dcp__arena_fail(arena, err);
    }
    for (size_t i = 0; i < n && !w->bad; i++) {
        uint64_t head = dcp__get_varint(w);
        if (head & 1) {
            keys[i] = (dcp_key){.is_int = true, .integer = (int64_t)dcp__get_delta(w, 0)};
            continue;
        }
        const char *text = (const char *)dcp__get_bytes(w, head >> 1);
        keys[i] = (dcp_key){.string = dcp__arena_str(arena, (dcp_str){text ? text : "", text ? (size_t)(head >> 1) : 0})};
        if (!keys[i].string.ptr) {
            return dcp__arena_fail(arena, err);
        }
    }
    *path = keys;
    *len = n;
    return DCP_OK;
}

/* Length of a key's text at the start of name, followed by a dot or, the last one, by the end; SIZE_MAX if it is not there. */
static size_t match_key(const dcp_key *key, bool is_last, dcp_str name)
{
    char digits[24];
    dcp_str text = key->string;
    if (key->is_int) {
        text = (dcp_str){digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)key->integer)};
    }
    bool fits = is_last ? text.len == name.len : text.len < name.len && name.ptr[text.len] == '.';
    return fits && (text.len == 0 || memcmp(text.ptr, name.ptr, text.len) == 0) ? text.len : SIZE_MAX;
}

/* For each key its length, 0 for the last one, and whether it is an integer. False if the path is not the name cut at dots. */
static bool put_cuts(dcp__buf *b, const dcp__wire_entry *e)
{
    dcp_str rest = e->fqn;
    b->len = 0;
    dcp__put_varint(b, e->path_len);
    for (size_t i = 0; i < e->path_len; i++) {
        bool is_last = i + 1 == e->path_len;
        size_t n = match_key(&e->path[i], is_last, rest);
        if (n == SIZE_MAX) {
            return false;
        }
        dcp__put_varint(b, (uint64_t)(is_last ? 0 : n) << 1 | e->path[i].is_int);
        rest = is_last ? (dcp_str){NULL, 0} : (dcp_str){rest.ptr + n + 1, rest.len - n - 1};
    }
    return e->path_len > 0;
}

static int path_form(dcp__wire_writer *s, const dcp__wire_entry *e)
{
    if (e->path_len == 1 && !e->path[0].is_int && match_key(&e->path[0], true, e->fqn) != SIZE_MAX) {
        return PATH_WHOLE;
    }
    if (!put_cuts(&s->new_cuts, e)) {
        return PATH_KEYS;
    }
    bool is_same = s->cuts.len == s->new_cuts.len && s->cuts.len && memcmp(s->cuts.data, s->new_cuts.data, s->cuts.len) == 0;
    return is_same ? PATH_SAME_CUTS : PATH_CUTS;
}

/* An integer as it is printed. */
static bool read_integer(dcp_str text, int64_t *out)
{
    bool is_negative = text.len && text.ptr[0] == '-';
    int64_t v = 0;
    for (size_t i = is_negative; i < text.len; i++) {
        int digit = text.ptr[i] - '0';
        if (digit < 0 || digit > 9 || !dcp__mul_i64(v, 10, &v) || !dcp__add_i64(v, is_negative ? -digit : digit, &v)) {
            return false;
        }
    }
    *out = v;
    return text.len > is_negative;
}

static bool cut_key(dcp__wire *cuts, bool is_last, dcp_str *rest, dcp_key *out)
{
    uint64_t head = dcp__get_varint(cuts), n = is_last ? rest->len : head >> 1;
    if (cuts->bad || n > rest->len || (!is_last && (n == rest->len || rest->ptr[n] != '.'))) {
        return false;
    }
    dcp_str text = {rest->ptr, (size_t)n};
    *rest = is_last ? (dcp_str){NULL, 0} : (dcp_str){rest->ptr + n + 1, rest->len - (size_t)n - 1};
    *out = (dcp_key){.is_int = head & 1};
    if (out->is_int) {
        return read_integer(text, &out->integer);
    }
    out->string = text;
    return true;
}

/* Keys are copied, so that they end in NUL; the last one ends with the name. */
static dcp_status cut_path(const dcp__wire_reader *s, dcp__arena *arena, dcp_str fqn, const dcp_key **path, size_t *len,
                           dcp_error *err)
{
    dcp__wire cuts = dcp__wire_of(s->cuts, s->cuts_len);
    size_t n = (size_t)dcp__get_bounded(&cuts, s->cuts_len);
    dcp_key *keys = dcp__arena_alloc(arena, n * sizeof *keys);
    if (!keys) {
        return dcp__arena_fail(arena, err);
    }
    dcp_str rest = fqn;
    for (size_t i = 0; i < n; i++) {
        if (!cut_key(&cuts, i + 1 == n, &rest, &keys[i])) {
            return dcp__fail(err, DCP_FORMAT, "the path of \"%s\" is malformed", dcp__print(fqn).text);
        }
        if (!keys[i].is_int && i + 1 < n) {
            keys[i].string = dcp__arena_str(arena, keys[i].string);
            if (!keys[i].string.ptr) {
                return dcp__arena_fail(arena, err);
            }
        }
    }
    *path = keys;
    *len = n;
    return DCP_OK;
}

dcp_status dcp__get_entry_path(const dcp__wire_reader *s, dcp__arena *arena, dcp_str fqn, const dcp_key **path, size_t *len,
                               dcp_error *err)
{
    if (s->path_form == PATH_SAME_CUTS || s->path_form == PATH_CUTS) {
        return cut_path(s, arena, fqn, path, len, err);
    }
    if (s->path_form == PATH_KEYS) {
        dcp__wire w = dcp__wire_of(s->path, s->path_bytes);
        return dcp__get_path(&w, arena, path, len, err);
    }
    dcp_key *key = dcp__arena_alloc(arena, sizeof *key);
    if (!key) {
        return dcp__arena_fail(arena, err);
    }
    *key = (dcp_key){.string = fqn};
    *path = key;
    *len = 1;
    return DCP_OK;
}

/* ---- names: writing ---- */

void dcp__wire_writer_init(dcp__wire_writer *s, dcp_context *ctx)
{
    *s = (dcp__wire_writer){.ctx = ctx};
    dcp__buf_init(&s->cuts, ctx);
    dcp__buf_init(&s->new_cuts, ctx);
}

void dcp__wire_writer_restart(dcp__wire_writer *s)
{
    s->name = (dcp_str){NULL, 0};
    s->extents = NULL;
    s->dtype = DCP_DTYPE_NONE;
    s->cuts.len = 0;
}

void dcp__wire_writer_reset(dcp__wire_writer *s)
{
    dcp__buf_reset(&s->cuts);
    dcp__buf_reset(&s->new_cuts);
}

static size_t common_prefix(dcp_str a, dcp_str b)
{
    size_t n = a.len < b.len ? a.len : b.len, i = 0;
    while (i < n && a.ptr[i] == b.ptr[i]) {
        i++;
    }
    return i;
}

static bool is_same_shape(const dcp__wire_writer *s, const dcp__wire_entry *e)
{
    return s->dtype != DCP_DTYPE_NONE && e->dtype == s->dtype && e->ndim == s->ndim &&
           (e->ndim == 0 || memcmp(e->extents, s->extents, (size_t)e->ndim * sizeof *e->extents) == 0);
}

static void put_shape(dcp__wire_writer *s, dcp__buf *b, const dcp__wire_entry *e)
{
    dcp__buf_put_byte(b, (uint8_t)e->dtype);
    dcp__buf_put_byte(b, (uint8_t)e->ndim);
    for (int d = 0; d < e->ndim; d++) {
        dcp__put_varint(b, (uint64_t)e->extents[d]);
    }
    s->dtype = e->dtype;
    s->ndim = e->ndim;
    s->extents = e->extents;
}

void dcp__put_entry(dcp__wire_writer *s, dcp__buf *b, const dcp__wire_entry *e)
{
    bool is_object = e->kind == DCP_ITEM_OBJECT, is_same = !is_object && is_same_shape(s, e);
    int form = path_form(s, e);
    size_t shared = common_prefix(s->name, e->fqn);
    dcp__buf_put_byte(b, (uint8_t)((is_object ? IS_OBJECT : 0) | (is_same ? SAME_SHAPE : 0) | (e->per_rank ? PER_RANK : 0) |
                                   form << PATH_SHIFT));
    dcp__put_varint(b, shared);
    dcp__put_varint(b, e->fqn.len - shared);
    dcp__buf_put(b, e->fqn.ptr + shared, e->fqn.len - shared);
    if (!is_object && !is_same) {
        put_shape(s, b, e);
    }
    if (form == PATH_CUTS) {
        dcp__buf t = s->cuts;
        s->cuts = s->new_cuts;
        s->new_cuts = t;
        dcp__buf_put(b, s->cuts.data, s->cuts.len);
    } else if (form == PATH_KEYS) {
        dcp__put_path(b, e->path, e->path_len);
    }
    b->failed |= s->new_cuts.failed | s->cuts.failed;
    s->name = e->fqn;
}

/* ---- names: reading ---- */

void dcp__wire_reader_init(dcp__wire_reader *s, dcp_context *ctx)
{
    memset(s, 0, sizeof *s);
    dcp__buf_init(&s->name, ctx);
}

void dcp__wire_reader_restart(dcp__wire_reader *s)
{
    s->name.len = 0;
    s->has_shape = false;
    s->cuts_len = 0;
}

void dcp__wire_reader_reset(dcp__wire_reader *s)
{
    dcp__buf_reset(&s->name);
}

static void get_name(dcp__wire_reader *s, dcp__wire *w)
{
    size_t shared = (size_t)dcp__get_bounded(w, s->name.len);
    uint64_t n = dcp__get_varint(w);
    const uint8_t *rest = dcp__get_bytes(w, n);
    s->name.len = shared;
    dcp__buf_put(&s->name, rest, rest ? (size_t)n : 0);
}

static void get_shape(dcp__wire_reader *s, dcp__wire *w)
{
    uint64_t dtype = dcp__get_bounded(w, DCP_DTYPE_COUNT - 1), ndim = dcp__get_bounded(w, DCP_MAX_NDIM);
    if (dtype == DCP_DTYPE_NONE) {
        dcp__wire_spoil(w);
    }
    s->dtype = (dcp_dtype)dtype;
    s->ndim = (int)ndim;
    for (int d = 0; d < s->ndim; d++) {
        s->extents[d] = (int64_t)dcp__get_bounded(w, INT64_MAX);
    }
    s->has_shape = true;
}

static void get_path_bytes(dcp__wire_reader *s, dcp__wire *w, int form)
{
    const uint8_t *start = w->p;
    s->path_form = form;
    if (form == PATH_CUTS) {
        for (uint64_t n = dcp__get_bounded(w, dcp__wire_left(w)); n > 0 && !w->bad; n--) {
            dcp__get_varint(w);
        }
        s->cuts = start;
        s->cuts_len = (size_t)(w->p - start);
    } else if (form == PATH_KEYS) {
        skip_path(w);
        s->path = start;
        s->path_bytes = (size_t)(w->p - start);
    } else if (form == PATH_SAME_CUTS && s->cuts_len == 0) {
        dcp__wire_spoil(w);
    }
}

dcp_status dcp__get_entry(dcp__wire_reader *s, dcp__wire *w, dcp__wire_entry *e, dcp_error *err)
{
    uint64_t head = dcp__get_bounded(w, KNOWN_BITS);
    bool is_object = head & IS_OBJECT;
    get_name(s, w);
    if (!is_object && !(head & SAME_SHAPE)) {
        get_shape(s, w);
    } else if (head & SAME_SHAPE && (is_object || !s->has_shape)) {
        dcp__wire_spoil(w);
    }
    get_path_bytes(s, w, (int)(head >> PATH_SHIFT));
    if (s->name.failed) {
        return dcp__nomem(err);
    }
    *e = (dcp__wire_entry){.fqn = {s->name.data ? (const char *)s->name.data : "", s->name.len},
                           .kind = is_object ? DCP_ITEM_OBJECT : DCP_ITEM_TENSOR,
                           .per_rank = head & PER_RANK};
    if (!is_object) {
        e->dtype = s->dtype;
        e->ndim = s->ndim;
        e->extents = s->extents;
    }
    return DCP_OK;
}
