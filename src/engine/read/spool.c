/* Decoded records. A record with a transform can only be read from its start, so it is decoded once: into memory, or, when it is
 * large, into a temporary file that has no name. The last ones are kept for the next slice. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "engine/read/checkpoint.h"
#include "format/transform.h"
#include "state/strided.h"

/* Around the elements in a record: a pickle, names, padding, more than any writer of records makes. */
#define RECORD_EXTRA_BYTES ((uint64_t)1 << 20)
#define INFLATE_CHUNK_BYTES ((size_t)256 << 10)

struct dcp__spool {
    dcp_context *ctx;
    struct dcp__spool *next; /* newest first; guarded by the checkpoint's lock */
    uint32_t storage;        /* DCP__NO_STORAGE: not to be kept */
    int users;               /* guarded by the checkpoint's lock */
    dcp__buf memory;
    uint64_t memory_limit, max_bytes;
    int fd; /* -1: all in memory */
    uint64_t bytes;
};

static dcp__spool *create(dcp_context *ctx, uint32_t storage, uint64_t max_bytes)
{
    dcp__spool *s = dcp__calloc(ctx, 1, sizeof *s);
    if (s) {
        *s = (dcp__spool){.ctx = ctx, .storage = storage, .users = 1, .fd = -1};
        s->max_bytes = max_bytes;
        s->memory_limit = ctx->memory_bytes / 4 / (uint64_t)ctx->threads;
        dcp__buf_init(&s->memory, ctx);
    }
    return s;
}

static void destroy(dcp__spool *s)
{
    if (s->fd >= 0) {
        close(s->fd);
    }
    dcp__buf_reset(&s->memory);
    dcp__free(s->ctx, s);
}

static int open_nameless(void)
{
    const char *dir = getenv("TMPDIR");
    dir = dir && dir[0] ? dir : "/tmp";
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
        char name[] = "/tmp/dcp-XXXXXX"; /* an old file system */
        fd = mkostemp(name, O_CLOEXEC);
        if (fd >= 0) {
            unlink(name);
        }
    }
    return fd;
}

static dcp_status append_to_file(dcp__spool *s, const uint8_t *bytes, size_t n, dcp_error *err)
{
    while (n) {
        ssize_t put = pwrite(s->fd, bytes, n, (off_t)s->bytes);
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return dcp__fail_errno(err, put < 0 ? errno : ENOSPC, "temporary file of a decoded record");
        }
        bytes += put;
        n -= (size_t)put;
        s->bytes += (uint64_t)put;
    }
    return DCP_OK;
}

static dcp_status move_to_file(dcp__spool *s, dcp_error *err)
{
    s->fd = open_nameless();
    if (s->fd < 0) {
        return dcp__fail_errno(err, errno, "temporary file for a decoded record");
    }
    s->bytes = 0;
    dcp_status status = append_to_file(s, s->memory.data, s->memory.len, err);
    dcp__buf_reset(&s->memory);
    return status;
}

static dcp_status append(void *user, const void *bytes, size_t n, dcp_error *err)
{
    dcp__spool *s = user;
    if (n > s->max_bytes - s->bytes) {
        return dcp__fail(err, DCP_LIMIT, "record is longer than %llu bytes when decoded", (unsigned long long)s->max_bytes);
    }
    if (s->fd < 0 && n > s->memory_limit - s->memory.len) {
        dcp_status status = move_to_file(s, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    if (s->fd >= 0) {
        return append_to_file(s, bytes, n, err);
    }
    dcp__buf_put(&s->memory, bytes, n);
    s->bytes = s->memory.len;
    return s->memory.failed ? dcp__nomem(err) : DCP_OK;
}

static dcp_status read_spooled_file(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const dcp__spool *s = self->user;
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(s->fd, (char *)buf + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return dcp__fail_errno(err, got < 0 ? errno : EIO, "temporary file of a decoded record");
        }
        done += (size_t)got;
    }
    return DCP_OK;
}

dcp__source dcp__spool_source(const dcp__spool *s)
{
    if (s->fd < 0) {
        return dcp__source_memory(s->memory.data, s->memory.len);
    }
    return (dcp__source){.read = read_spooled_file, .size = s->bytes, .user = (void *)s};
}

static dcp_status decode(dcp_checkpoint *ck, const dcp__storage *st, dcp__spool *s, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_status status = dcp__file_acquire(ck, st->file, &f, &bytes, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!dcp__range_fits(st->offset, st->length, bytes)) {
        status = dcp__fail_at(err, DCP_FORMAT, st->offset, "record of %llu bytes at %llu exceeds the file's %llu",
                              (unsigned long long)st->length, (unsigned long long)st->offset, (unsigned long long)bytes);
    } else {
        dcp__source src = dcp__source_file(f, st->offset, st->length);
        status = dcp__transform_decode(ck->ctx, ck->meta->transforms[st->transforms], &src, append, s, err);
        if (status != DCP_OK && err && err->offset != DCP_NO_OFFSET) {
            err->offset += st->offset;
        }
    }
    dcp__file_release(ck, st->file);
    return status;
}

/* A kept spool of this storage. */
static dcp__spool *take_kept(dcp_checkpoint *ck, uint32_t storage)
{
    pthread_mutex_lock(&ck->lock);
    dcp__spool *s = ck->spools;
    while (s && s->storage != storage) {
        s = s->next;
    }
    if (s) {
        s->users++;
    }
    pthread_mutex_unlock(&ck->lock);
    return s;
}

uint64_t dcp__spool_limit(const dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c)
{
    uint64_t bytes = ck->ctx->limits.max_parse_bytes;
    int64_t elems;
    if (c &&
        !(dcp__elems(e->item.ndim, c->sizes, &elems) && dcp__mul_u64((uint64_t)elems, dcp_dtype_bytes(e->item.dtype), &bytes))) {
        bytes = UINT64_MAX;
    }
    return bytes <= UINT64_MAX - RECORD_EXTRA_BYTES ? bytes + RECORD_EXTRA_BYTES : UINT64_MAX;
}

dcp_status dcp__spool_acquire(dcp_checkpoint *ck, uint32_t storage, uint64_t max_bytes, dcp__spool **out, dcp_error *err)
{
    dcp__spool *s = take_kept(ck, storage);
    if (!s) {
        s = create(ck->ctx, storage, max_bytes);
        if (!s) {
            return dcp__nomem(err);
        }
        dcp_status status = decode(ck, &ck->meta->storages[storage], s, err);
        if (status != DCP_OK) {
            destroy(s);
            return status;
        }
        pthread_mutex_lock(&ck->lock);
        s->next = ck->spools;
        ck->spools = s;
        pthread_mutex_unlock(&ck->lock);
    }
    *out = s;
    return DCP_OK;
}

/* The last idle one beyond what may be kept, taken out of the list; the lock is held. */
static dcp__spool *take_surplus(dcp_checkpoint *ck)
{
    dcp__spool **last = NULL;
    int n = 0;
    for (dcp__spool **at = &ck->spools; *at; at = &(*at)->next) {
        n++;
        last = (*at)->users == 0 ? at : last;
    }
    if (n <= ck->ctx->threads || !last) {
        return NULL;
    }
    dcp__spool *s = *last;
    *last = s->next;
    return s;
}

/* As many are kept as there are threads, so that each can go on with the record that it is reading. */
void dcp__spool_release(dcp_checkpoint *ck, dcp__spool *s)
{
    dcp__spool *gone = s;
    pthread_mutex_lock(&ck->lock);
    s->users--;
    if (s->storage != DCP__NO_STORAGE) {
        gone = take_surplus(ck);
    }
    pthread_mutex_unlock(&ck->lock);
    if (gone) {
        destroy(gone);
    }
}

void dcp__spool_drop(dcp_checkpoint *ck)
{
    while (ck->spools) {
        dcp__spool *next = ck->spools->next;
        destroy(ck->spools);
        ck->spools = next;
    }
}

/* ---- deflated members ---- */

static dcp_status inflate_all(z_stream *z, const dcp__source *src, const dcp__storage_span *span, dcp__spool *s, uint8_t *in,
                              uint8_t *out, dcp_error *err)
{
    uint64_t used = 0;
    int result = Z_OK;
    while (result != Z_STREAM_END) {
        if (z->avail_in == 0 && used < span->bytes) {
            size_t n = span->bytes - used < INFLATE_CHUNK_BYTES ? (size_t)(span->bytes - used) : INFLATE_CHUNK_BYTES;
            dcp_status status = dcp__source_read(src, span->offset + used, in, n, err);
            if (status != DCP_OK) {
                return status;
            }
            used += n;
            z->next_in = in;
            z->avail_in = (uInt)n;
        }
        z->next_out = out;
        z->avail_out = INFLATE_CHUNK_BYTES;
        result = inflate(z, Z_NO_FLUSH);
        size_t got = INFLATE_CHUNK_BYTES - z->avail_out;
        if ((result != Z_OK && result != Z_STREAM_END) || s->bytes + got > span->full_bytes) {
            return dcp__fail_at(err, DCP_FORMAT, span->offset, "deflated member: %s",
                                result == Z_OK || result == Z_STREAM_END ? "longer than its size says" : "broken data");
        }
        dcp_status status = append(s, out, got, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    if (s->bytes != span->full_bytes) {
        return dcp__fail_at(err, DCP_FORMAT, span->offset, "deflated member: %llu bytes, expected %llu",
                            (unsigned long long)s->bytes, (unsigned long long)span->full_bytes);
    }
    return DCP_OK;
}

dcp_status dcp__spool_inflate(dcp_checkpoint *ck, const dcp__source *src, const dcp__storage_span *span, dcp__spool **out,
                              dcp_error *err)
{
    z_stream z = {0};
    dcp_status status = DCP_OK;
    dcp__spool *s = create(ck->ctx, DCP__NO_STORAGE, span->full_bytes);
    uint8_t *buffers = dcp__alloc(ck->ctx, 2 * INFLATE_CHUNK_BYTES);
    if (!s || !buffers || inflateInit2(&z, -MAX_WBITS) != Z_OK) {
        status = dcp__nomem(err);
    } else {
        status = inflate_all(&z, src, span, s, buffers, buffers + INFLATE_CHUNK_BYTES, err);
        inflateEnd(&z);
    }
    dcp__free(ck->ctx, buffers);
    if (status != DCP_OK) {
        if (s) {
            destroy(s);
        }
        return status;
    }
    *out = s;
    return DCP_OK;
}
