#include "format/transform.h"

#include <zstd.h>
#include <zstd_errors.h>

#include "base/bytes.h"

#define CHUNK_BYTES ((size_t)256 << 10)
#define MAX_STAGES 4
/* The largest window that a frame may ask for, 128 MiB: what bounds a decoder's memory. Level 3 uses 2 MiB. */
#define MAX_WINDOW_LOG 27
#define LEVEL 3

typedef struct stage stage;

/* One direction of a codec. feed is a dcp__sink_fn whose user is the stage, so that stages chain. */
typedef struct stage_ops {
    dcp_status (*open)(stage *st, dcp_error *err);
    dcp_status (*feed)(void *st, const void *bytes, size_t n, dcp_error *err);
    dcp_status (*finish)(stage *st, dcp_error *err);
    void (*close)(stage *st);
} stage_ops;

typedef struct codec {
    const char *name;
    const char *major; /* of the version */
    stage_ops decode, encode;
} codec;

struct stage {
    dcp__sink_fn sink;
    void *sink_user;
    uint8_t *out;  /* CHUNK_BYTES */
    bool is_first; /* reads the source itself, so that positions are offsets in it */
    ZSTD_CCtx *encoder;
    ZSTD_DCtx *decoder;
    uint64_t position; /* bytes that the decoder has taken */
    uint8_t magic[4];  /* of the next frame, as far as it was fed */
    size_t magic_len;
    bool in_frame, had_frame;
};

/* ---- zstd, decoding ---- */

static dcp_status zstd_open_decoder(stage *st, dcp_error *err)
{
    st->decoder = ZSTD_createDCtx();
    if (!st->decoder) {
        return dcp__nomem(err);
    }
    ZSTD_DCtx_setParameter(st->decoder, ZSTD_d_windowLogMax, MAX_WINDOW_LOG); /* in bounds on every build: cannot fail */
    return DCP_OK;
}

static void zstd_close_decoder(stage *st)
{
    ZSTD_freeDCtx(st->decoder);
}

static dcp_status code_of_zstd(size_t result)
{
    switch (ZSTD_getErrorCode(result)) {
    case ZSTD_error_memory_allocation: return DCP_NOMEM;
    case ZSTD_error_frameParameter_windowTooLarge: return DCP_LIMIT;
    case ZSTD_error_frameParameter_unsupported:
    case ZSTD_error_version_unsupported:
    case ZSTD_error_dictionary_wrong: return DCP_UNSUPPORTED;
    case ZSTD_error_checksum_wrong: return DCP_CHECKSUM;
    default: return DCP_FORMAT;
    }
}

static uint64_t place(const stage *st, uint64_t position)
{
    return st->is_first ? position : DCP_NO_OFFSET;
}

/* Decodes from the current frame until its end or the end of the input; *used receives the bytes taken. */
static dcp_status zstd_decode_frame(stage *st, const void *bytes, size_t n, size_t *used, dcp_error *err)
{
    ZSTD_inBuffer in = {bytes, n, 0};
    ZSTD_outBuffer out;
    do {
        out = (ZSTD_outBuffer){st->out, CHUNK_BYTES, 0};
        size_t result = ZSTD_decompressStream(st->decoder, &out, &in);
        if (ZSTD_isError(result)) {
            uint64_t at = st->position + in.pos;
            return dcp__fail_at(err, code_of_zstd(result), place(st, at), "zstd frame, near byte %llu: %s",
                                (unsigned long long)at, ZSTD_getErrorName(result));
        }
        dcp_status status = out.pos ? st->sink(st->sink_user, st->out, out.pos, err) : DCP_OK;
        if (status != DCP_OK) {
            return status;
        }
        st->in_frame = result != 0;
    } while (st->in_frame && (in.pos < in.size || out.pos == out.size));
    st->position += in.pos;
    *used = in.pos;
    return DCP_OK;
}

static bool is_zstd_magic(uint32_t magic)
{
    return magic == ZSTD_MAGICNUMBER || (magic & 0xfffffff0u) == 0x184d2a50u; /* a skippable frame */
}

/* Collects the magic number of the next frame and begins it. Checked here, because libzstd may have been built to take the forms
 * before 0.8 too, and because it tells trailing garbage only once it has buffered some. */
static dcp_status zstd_begin_frame(stage *st, const uint8_t *bytes, size_t n, size_t *used, dcp_error *err)
{
    size_t missing = sizeof st->magic - st->magic_len;
    *used = n < missing ? n : missing;
    memcpy(st->magic + st->magic_len, bytes, *used);
    st->magic_len += *used;
    if (st->magic_len < sizeof st->magic) {
        return DCP_OK;
    }
    if (!is_zstd_magic(dcp__load32(st->magic))) {
        return dcp__fail_at(err, DCP_FORMAT, place(st, st->position), "bytes at %llu are no zstd frame",
                            (unsigned long long)st->position);
    }
    st->in_frame = st->had_frame = true;
    st->magic_len = 0;
    size_t taken;
    return zstd_decode_frame(st, st->magic, sizeof st->magic, &taken, err);
}

static dcp_status zstd_feed_decoder(void *user, const void *bytes, size_t n, dcp_error *err)
{
    stage *st = user;
    const uint8_t *p = bytes;
    while (n > 0) {
        size_t used;
        dcp_status status = (st->in_frame ? zstd_decode_frame(st, p, n, &used, err) : zstd_begin_frame(st, p, n, &used, err));
        if (status != DCP_OK) {
            return status;
        }
        p += used;
        n -= used;
    }
    return DCP_OK;
}

static dcp_status zstd_finish_decoder(stage *st, dcp_error *err)
{
    uint64_t end = st->position + st->magic_len;
    if (st->in_frame || st->magic_len > 0) {
        return dcp__fail_at(err, DCP_FORMAT, place(st, end), "zstd frame is cut off at %llu", (unsigned long long)end);
    }
    if (!st->had_frame) {
        return dcp__fail_at(err, DCP_FORMAT, place(st, 0), "no zstd frame in 0 bytes");
    }
    return DCP_OK;
}

/* ---- zstd, encoding ---- */

static dcp_status zstd_open_encoder(stage *st, dcp_error *err)
{
    st->encoder = ZSTD_createCCtx();
    if (!st->encoder) {
        return dcp__nomem(err);
    }
    ZSTD_CCtx_setParameter(st->encoder, ZSTD_c_compressionLevel, LEVEL);
    ZSTD_CCtx_setParameter(st->encoder, ZSTD_c_contentSizeFlag, 0);
    return DCP_OK;
}

static void zstd_close_encoder(stage *st)
{
    ZSTD_freeCCtx(st->encoder);
}

static dcp_status zstd_encode(stage *st, const void *bytes, size_t n, ZSTD_EndDirective directive, dcp_error *err)
{
    ZSTD_inBuffer in = {bytes, n, 0};
    size_t left;
    do {
        ZSTD_outBuffer out = {st->out, CHUNK_BYTES, 0};
        left = ZSTD_compressStream2(st->encoder, &out, &in, directive);
        if (ZSTD_isError(left)) {
            dcp_status code = code_of_zstd(left) == DCP_NOMEM ? DCP_NOMEM : DCP_INTERNAL;
            return dcp__fail(err, code, "zstd: %s", ZSTD_getErrorName(left));
        }
        dcp_status status = out.pos ? st->sink(st->sink_user, st->out, out.pos, err) : DCP_OK;
        if (status != DCP_OK) {
            return status;
        }
    } while (in.pos < in.size || (directive == ZSTD_e_end && left > 0));
    return DCP_OK;
}

static dcp_status zstd_feed_encoder(void *user, const void *bytes, size_t n, dcp_error *err)
{
    return zstd_encode(user, bytes, n, ZSTD_e_continue, err);
}

static dcp_status zstd_finish_encoder(stage *st, dcp_error *err)
{
    return zstd_encode(st, NULL, 0, ZSTD_e_end, err);
}

/* ---- the registry ---- */

static const codec codecs[] = {
    {"stream.zstd",
     "1",
     {zstd_open_decoder, zstd_feed_decoder, zstd_finish_decoder, zstd_close_decoder},
     {zstd_open_encoder, zstd_feed_encoder, zstd_finish_encoder, zstd_close_encoder}},
};

static bool is_text(dcp_str a, const char *b)
{
    return a.len == strlen(b) && memcmp(a.ptr, b, a.len) == 0;
}

/* The text before the first c; *rest what stands behind it, ptr NULL if there is no c. */
static dcp_str split(dcp_str text, char c, dcp_str *rest)
{
    const char *at = text.len ? memchr(text.ptr, c, text.len) : NULL;
    if (!at) {
        *rest = (dcp_str){NULL, 0};
        return text;
    }
    size_t len = (size_t)(at - text.ptr);
    *rest = (dcp_str){at + 1, text.len - len - 1};
    return (dcp_str){text.ptr, len};
}

/* name/version, of which the part of the version before the first dot counts. */
static dcp_status find_codec(dcp_str descriptor, const codec **out, dcp_error *err)
{
    dcp_str version, minor;
    dcp_str name = split(descriptor, '/', &version);
    dcp_str major = split(version, '.', &minor);
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; i++) {
        if (is_text(name, codecs[i].name)) {
            if (!major.ptr || !is_text(major, codecs[i].major)) {
                return dcp__fail(err, DCP_UNSUPPORTED, "transform '%s': version is not %s", dcp__print(descriptor).text,
                                 codecs[i].major);
            }
            *out = &codecs[i];
            return DCP_OK;
        }
    }
    return dcp__fail(err, DCP_UNSUPPORTED, "unknown transform '%s'", dcp__print(descriptor).text);
}

/* The codec of the list and how many times it applies; 0 times for an empty list. In which order different ones apply cannot be
 * known: PyTorch's writer and reader disagree. */
static dcp_status parse(dcp_str list, const codec **out, size_t *times, dcp_error *err)
{
    *out = NULL;
    *times = 0;
    for (dcp_str rest = list; rest.ptr && list.len > 0;) {
        const codec *next = NULL;
        dcp_status status = find_codec(split(rest, ',', &rest), &next, err);
        if (status != DCP_OK) {
            return status;
        }
        if ((*out && next != *out) || *times == MAX_STAGES) {
            return dcp__fail(err, DCP_UNSUPPORTED, "transforms '%s': not one transform, applied up to %d times",
                             dcp__print(list).text, MAX_STAGES);
        }
        *out = next;
        ++*times;
    }
    return DCP_OK;
}

dcp_status dcp__transform_check(dcp_str descriptors, dcp_error *err)
{
    const codec *c;
    size_t n;
    return parse(descriptors, &c, &n, err);
}

/* ---- the pipeline ---- */

typedef struct pipeline {
    dcp_context *ctx;
    const stage_ops *ops;
    stage stages[MAX_STAGES];
    size_t n;    /* opened */
    uint8_t *in; /* CHUNK_BYTES */
} pipeline;

static dcp_status open_stages(pipeline *p, size_t n, dcp__sink_fn sink, void *user, dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        stage *st = &p->stages[i];
        bool is_last = i + 1 == n;
        *st = (stage){.sink = is_last ? sink : p->ops->feed, .sink_user = is_last ? user : st + 1, .is_first = i == 0};
        st->out = dcp__alloc(p->ctx, CHUNK_BYTES);
        if (!st->out) {
            return dcp__nomem(err);
        }
        dcp_status status = p->ops->open(st, err);
        if (status != DCP_OK) {
            dcp__free(p->ctx, st->out);
            return status;
        }
        p->n++;
    }
    return DCP_OK;
}

static dcp_status pump(pipeline *p, const dcp__source *src, dcp__sink_fn sink, void *user, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (uint64_t at = 0; status == DCP_OK && at < src->size;) {
        size_t n = src->size - at < CHUNK_BYTES ? (size_t)(src->size - at) : CHUNK_BYTES;
        status = dcp__source_read(src, at, p->in, n, err);
        if (status == DCP_OK) {
            status = sink(user, p->in, n, err);
        }
        at += n;
    }
    for (size_t i = 0; status == DCP_OK && i < p->n; i++) {
        status = p->ops->finish(&p->stages[i], err);
    }
    return status;
}

static dcp_status run(dcp_context *ctx, const stage_ops *ops, size_t n, const dcp__source *src, dcp__sink_fn sink, void *user,
                      dcp_error *err)
{
    pipeline p = {.ctx = ctx, .ops = ops, .in = dcp__alloc(ctx, CHUNK_BYTES)};
    if (!p.in) {
        return dcp__nomem(err);
    }
    dcp_status status = open_stages(&p, n, sink, user, err);
    if (status == DCP_OK) {
        status = n > 0 ? pump(&p, src, ops->feed, &p.stages[0], err) : pump(&p, src, sink, user, err);
    }
    while (p.n > 0) {
        stage *st = &p.stages[--p.n];
        ops->close(st);
        dcp__free(ctx, st->out);
    }
    dcp__free(ctx, p.in);
    return status;
}

dcp_status dcp__transform_decode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err)
{
    const codec *c;
    size_t n;
    dcp_status status = parse(descriptors, &c, &n, err);
    return status != DCP_OK ? status : run(ctx, c ? &c->decode : NULL, n, src, sink, user, err);
}

dcp_status dcp__transform_encode(dcp_context *ctx, dcp_str descriptors, const dcp__source *src, dcp__sink_fn sink, void *user,
                                 dcp_error *err)
{
    const codec *c;
    size_t n;
    dcp_status status = parse(descriptors, &c, &n, err);
    return status != DCP_OK ? status : run(ctx, c ? &c->encode : NULL, n, src, sink, user, err);
}
