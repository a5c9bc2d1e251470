/* How plans look on the wire: numbers, boxes, names with paths, types and shapes. Each part leans on the one before it. */
#ifndef DCP_PLAN_WIRE_H
#define DCP_PLAN_WIRE_H

#include "base/arena.h"
#include "base/buf.h"
#include "dcp/save.h"

#define DCP__WIRE_VERSION 1

/* ---- numbers: seven bits a byte, low ones first ---- */

static inline void dcp__put_varint(dcp__buf *b, uint64_t v)
{
    uint8_t bytes[10];
    size_t n = 0;
    for (; v >= 0x80; v >>= 7) {
        bytes[n++] = (uint8_t)(v | 0x80);
    }
    bytes[n++] = (uint8_t)v;
    dcp__buf_put(b, bytes, n);
}

/* Differences of unsigned numbers, small ones of either sign short. */
static inline void dcp__put_delta(dcp__buf *b, uint64_t v, uint64_t from)
{
    uint64_t d = v - from;
    dcp__put_varint(b, d >> 63 ? ~d << 1 | 1 : d << 1);
}

/* A message being read. Whatever does not fit sets bad; then everything reads as 0. */
typedef struct dcp__wire {
    const uint8_t *start, *p, *end;
    bool bad;
} dcp__wire;

static inline dcp__wire dcp__wire_of(const void *bytes, size_t len)
{
    const uint8_t *p = bytes;
    return (dcp__wire){p, p, p ? p + len : p, false};
}

static inline size_t dcp__wire_left(const dcp__wire *w)
{
    return (size_t)(w->end - w->p);
}

static inline void dcp__wire_spoil(dcp__wire *w)
{
    w->bad = true;
    w->end = w->p;
}

uint64_t dcp__get_long_varint(dcp__wire *w);

static inline uint64_t dcp__get_varint(dcp__wire *w)
{
    return w->p < w->end && *w->p < 0x80 ? *w->p++ : dcp__get_long_varint(w);
}

static inline uint64_t dcp__get_delta(dcp__wire *w, uint64_t from)
{
    uint64_t v = dcp__get_varint(w);
    return from + (v & 1 ? ~(v >> 1) : v >> 1);
}

/* A number of at most `max`. */
static inline uint64_t dcp__get_bounded(dcp__wire *w, uint64_t max)
{
    uint64_t v = dcp__get_varint(w);
    if (v > max) {
        dcp__wire_spoil(w);
        return 0;
    }
    return v;
}

/* n bytes in place; NULL if there are not so many. */
static inline const uint8_t *dcp__get_bytes(dcp__wire *w, uint64_t n)
{
    if (n > dcp__wire_left(w)) {
        dcp__wire_spoil(w);
        return NULL;
    }
    w->p += n;
    return w->p - n;
}

/* FORMAT, at the place that has been reached. */
dcp_status dcp__wire_fail(const dcp__wire *w, const char *what, int rank, dcp_error *err);

/* ---- boxes ---- */

/* The numbers are not negative. */
void dcp__put_box(dcp__buf *b, int ndim, const int64_t *extents, const int64_t *offsets, const int64_t *sizes);
void dcp__get_box(dcp__wire *w, int ndim, const int64_t *extents, int64_t *offsets, int64_t *sizes);

/* ---- names ---- */

/* What is said about a name. */
typedef struct dcp__wire_entry {
    dcp_str fqn;
    const dcp_key *path;
    size_t path_len;
    dcp_item_kind kind;
    dcp_dtype dtype;
    int ndim;
    const int64_t *extents;
    bool per_rank;
} dcp__wire_entry;

/* The last name of a message. All zero at its start, but for ctx. */
typedef struct dcp__wire_writer {
    dcp_context *ctx;
    dcp_str name;
    dcp_dtype dtype;
    int ndim;
    const int64_t *extents;
    dcp__buf cuts, new_cuts;
} dcp__wire_writer;

void dcp__wire_writer_init(dcp__wire_writer *s, dcp_context *ctx);
/* Forgets the last name, for another message. */
void dcp__wire_writer_restart(dcp__wire_writer *s);
void dcp__wire_writer_reset(dcp__wire_writer *s);
/* The entry's texts and extents must live until the next one. */
void dcp__put_entry(dcp__wire_writer *s, dcp__buf *b, const dcp__wire_entry *e);

typedef struct dcp__wire_reader {
    dcp__buf name;
    dcp_dtype dtype;
    int ndim;
    int64_t extents[DCP_MAX_NDIM];
    bool has_shape;
    int path_form;
    const uint8_t *cuts, *path; /* in the message */
    size_t cuts_len, path_bytes;
} dcp__wire_reader;

void dcp__wire_reader_init(dcp__wire_reader *s, dcp_context *ctx);
void dcp__wire_reader_restart(dcp__wire_reader *s);
void dcp__wire_reader_reset(dcp__wire_reader *s);
/* e's texts and extents are those of s, and change with the next call; e->path is NULL. Errors: NOMEM; FORMAT is told by w. */
dcp_status dcp__get_entry(dcp__wire_reader *s, dcp__wire *w, dcp__wire_entry *e, dcp_error *err);
/* The path of the entry read last: keys are parts of fqn, which has its name, or copies. Errors: FORMAT, NOMEM, LIMIT. */
dcp_status dcp__get_entry_path(const dcp__wire_reader *s, dcp__arena *arena, dcp_str fqn, const dcp_key **path, size_t *len,
                               dcp_error *err);

/* Keys written out. */
void dcp__put_path(dcp__buf *b, const dcp_key *path, size_t len);
dcp_status dcp__get_path(dcp__wire *w, dcp__arena *arena, const dcp_key **path, size_t *len, dcp_error *err);

#endif
