/* Boxes of a payload into strided memory, in few and ascending reads.
 *
 * A box is cut into tiles along the dimensions in the order in which they lie in the file, the largest stride first, until a tile
 * is either one run on both sides, which is read straight into its place, or dense enough to be read as a whole into a buffer and
 * spread from there. So the gaps that are read along are never longer than MAX_GAP_BYTES. */
#include "engine/read/checkpoint.h"
#include "state/strided.h"

#define MAX_GAP_BYTES 4096
#define BUFFER_BYTES ((size_t)4 << 20)
#define DIRECT_BYTES ((uint64_t)64 << 20)

/* A box being read; dimensions are in order of the source, outermost first. */
typedef struct box {
    const dcp__source *src;
    const dcp__payload *payload;
    int ndim;
    int64_t sizes[DCP_MAX_NDIM];
    uint64_t steps[DCP_MAX_NDIM]; /* source strides in bytes */
    int64_t src_strides[DCP_MAX_NDIM], dst_strides[DCP_MAX_NDIM];
    size_t elem;
    bool is_plain; /* bytes are used as they are */
    dcp__tile_buf *buf;
} box;

void dcp__tile_buf_reset(dcp__tile_buf *buf)
{
    dcp__free_aligned(buf->ctx, buf->data);
    buf->data = NULL;
    buf->bytes = 0;
}

static dcp_status need_buffer(dcp__tile_buf *buf, size_t bytes, dcp_error *err)
{
    if (bytes <= buf->bytes) {
        return DCP_OK;
    }
    dcp__tile_buf_reset(buf);
    size_t want = bytes < BUFFER_BYTES ? BUFFER_BYTES : bytes;
    buf->data = dcp__alloc_aligned(buf->ctx, 4096, want);
    if (!buf->data) {
        return dcp__nomem(err);
    }
    buf->bytes = want;
    return DCP_OK;
}

/* Bytes from the first to behind the last element of the dimensions from d on. */
static uint64_t span_from(const box *b, const int64_t *sizes, int d)
{
    uint64_t span = b->elem;
    for (; d < b->ndim; d++) {
        span += (uint64_t)(sizes[d] - 1) * b->steps[d];
    }
    return span;
}

/* True if no gap between neighbours is longer than what is worth a read of its own. */
static bool is_dense(const box *b, const int64_t *sizes)
{
    for (int d = 0; d < b->ndim; d++) {
        uint64_t inner = span_from(b, sizes, d + 1);
        if (sizes[d] > 1 && b->steps[d] > inner + MAX_GAP_BYTES) {
            return false;
        }
    }
    return true;
}

/* True if the tile is one run of bytes on both sides. */
static bool is_run(const box *b, const int64_t *sizes)
{
    int64_t expected = 1;
    for (int d = b->ndim - 1; d >= 0; d--) {
        if (sizes[d] == 1) {
            continue;
        }
        if (b->src_strides[d] != expected || b->dst_strides[d] != expected) {
            return false;
        }
        expected *= sizes[d];
    }
    return true;
}

static dcp_status read_through_buffer(const box *b, const int64_t *sizes, uint64_t at, uint64_t span, char *dst, dcp_error *err)
{
    dcp_status status = need_buffer(b->buf, span, err);
    if (status == DCP_OK) {
        status = dcp__source_read(b->src, at, b->buf->data, span, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    size_t n = span / b->elem;
    if (b->payload->is_big_endian) {
        dcp__swap_elements(b->buf->data, n, b->payload->dtype);
    }
    if (b->payload->is_conj) {
        dcp__conjugate(b->buf->data, n, b->payload->dtype);
    }
    if (b->payload->is_neg) {
        dcp__negate(b->buf->data, n, b->payload->dtype);
    }
    dcp__copy_strided(dst, b->dst_strides, b->buf->data, b->src_strides, b->ndim, sizes, b->elem);
    return DCP_OK;
}

/* The dimension to cut and into how many indexes at a time. */
static int choose_cut(const box *b, const int64_t *sizes, int64_t *step)
{
    int d = 0;
    while (d < b->ndim - 1 && sizes[d] == 1) {
        d++;
    }
    uint64_t inner = span_from(b, sizes, d + 1);
    bool is_gapped = b->steps[d] > inner + MAX_GAP_BYTES;
    uint64_t fit = b->steps[d] ? (inner < BUFFER_BYTES ? (BUFFER_BYTES - inner) / b->steps[d] + 1 : 1) : (uint64_t)sizes[d];
    *step = is_gapped || fit < 1 ? 1 : fit < (uint64_t)sizes[d] ? (int64_t)fit : (sizes[d] + 1) / 2;
    return d;
}

/* sizes is changed and restored. Each level makes the tile at most half as long in one dimension, or ends it: the depth is within
 * 64 + ndim. */
static dcp_status read_tile(const box *b, int64_t *sizes, uint64_t at, char *dst, dcp_error *err)
{
    uint64_t span = span_from(b, sizes, 0);
    if (b->is_plain && span <= DIRECT_BYTES && is_run(b, sizes)) {
        return dcp__source_read(b->src, at, dst, span, err);
    }
    if (span <= BUFFER_BYTES && is_dense(b, sizes)) {
        return read_through_buffer(b, sizes, at, span, dst, err);
    }
    int64_t step;
    int d = choose_cut(b, sizes, &step);
    int64_t whole = sizes[d];
    dcp_status status = DCP_OK;
    for (int64_t i = 0; i < whole && status == DCP_OK; i += step) {
        sizes[d] = whole - i < step ? whole - i : step;
        status = read_tile(b, sizes, at + (uint64_t)i * b->steps[d], dst + i * b->dst_strides[d] * (int64_t)b->elem, err);
    }
    sizes[d] = whole;
    return status;
}

/* Orders the dimensions by descending stride in the source, so that tiles ascend in the file. */
static void order_dimensions(box *b, const int64_t *sizes, const int64_t *dst_strides)
{
    const dcp__payload *p = b->payload;
    for (int d = 0; d < p->ndim; d++) {
        int at = d;
        while (at > 0 && b->src_strides[at - 1] < p->strides[d]) {
            b->src_strides[at] = b->src_strides[at - 1];
            b->dst_strides[at] = b->dst_strides[at - 1];
            b->sizes[at] = b->sizes[at - 1];
            at--;
        }
        b->src_strides[at] = p->strides[d];
        b->dst_strides[at] = dst_strides[d];
        b->sizes[at] = sizes[d];
    }
    b->ndim = p->ndim;
    for (int d = 0; d < b->ndim; d++) {
        b->steps[d] = (uint64_t)b->src_strides[d] * b->elem;
    }
}

dcp_status dcp__read_box(const dcp__source *src, const dcp__payload *p, const int64_t *start, const int64_t *sizes, void *dst,
                         const int64_t *dst_strides, dcp__tile_buf *buf, dcp_error *err)
{
    box b = {.src = src, .payload = p, .elem = dcp_dtype_bytes(p->dtype), .buf = buf};
    b.is_plain = !p->is_big_endian && !p->is_conj && !p->is_neg;
    uint64_t at = p->offset;
    for (int d = 0; d < p->ndim; d++) {
        if (sizes[d] == 0) {
            return DCP_OK;
        }
        at += (uint64_t)start[d] * (uint64_t)p->strides[d] * b.elem;
    }
    order_dimensions(&b, sizes, dst_strides);
    int64_t tile[DCP_MAX_NDIM];
    for (int d = 0; d < b.ndim; d++) {
        tile[d] = b.sizes[d];
    }
    return read_tile(&b, tile, at, dst, err);
}
