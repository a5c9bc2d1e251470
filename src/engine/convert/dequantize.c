#include "engine/convert/dequantize.h"

#include <math.h>
#include <string.h>

#include "plan/coverage.h"
#include "state/numbers.h"
#include "state/strided.h"

#define BATCH 512

/* ---- pairs ---- */

typedef struct suffixes {
    const char *item, *scales;
} suffixes;

static const suffixes by_block = {".weight", ".weight_scale_inv"};
static const suffixes by_group = {"_blocks", "_scales"};

static bool ends_with(dcp_str name, const char *end)
{
    size_t len = strlen(end);
    return name.len >= len && memcmp(name.ptr + name.len - len, end, len) == 0;
}

/* The tensor of the same name with another end; NULL if there is none. */
static const dcp_item *partner(const dcp_checkpoint *ck, const dcp_item *item, const char *end, const char *other)
{
    size_t stem = item->fqn.len - strlen(end), len = strlen(other);
    char fixed[512], *name = stem + len < sizeof fixed ? fixed : dcp__alloc(ck->ctx, stem + len + 1);
    if (!name) {
        return NULL;
    }
    memcpy(name, item->fqn.ptr, stem);
    memcpy(name + stem, other, len + 1);
    dcp_str fqn = {name, stem + len};
    const dcp_item *found = item->rank < 0 ? dcp_checkpoint_find(ck, fqn) : dcp_checkpoint_find_rank(ck, fqn, item->rank);
    if (name != fixed) {
        dcp__free(ck->ctx, name);
    }
    return found && found->kind == DCP_ITEM_TENSOR ? found : NULL;
}

static bool is_by_group(const dcp_item *item)
{
    return ends_with(item->fqn, by_group.item);
}

/* Rows of bytes become rows of twice as many numbers; false if it has no shape for that. */
static bool set_shape(dcp_quantized *q)
{
    const dcp_item *item = q->item;
    q->ndim = item->ndim;
    if (item->ndim) {
        memcpy(q->extents, item->extents, (size_t)item->ndim * sizeof *q->extents);
    }
    if (is_by_group(item)) {
        int last = item->ndim - 2;
        q->ndim = item->ndim - 1;
        return item->ndim >= 2 && dcp__mul_i64(q->extents[last], q->extents[last + 1], &q->extents[last]) &&
               dcp__mul_i64(q->extents[last], 2, &q->extents[last]);
    }
    return item->ndim == 2;
}

bool dcp_quantized_find(const dcp_checkpoint *ck, const dcp_item *item, dcp_quantized *out)
{
    dcp_quantized q = {.item = item};
    if (!ck || !item || !out || item->kind != DCP_ITEM_TENSOR) {
        return false;
    }
    if (ends_with(item->fqn, by_block.item)) {
        q.scales = partner(ck, item, by_block.item, by_block.scales);
    } else if (is_by_group(item)) {
        q.scales = partner(ck, item, by_group.item, by_group.scales);
    }
    if (!q.scales || !set_shape(&q)) {
        return false;
    }
    *out = q;
    return true;
}

bool dcp__is_scales(const dcp_checkpoint *ck, const dcp_item *item)
{
    const suffixes *s = ends_with(item->fqn, by_block.scales)   ? &by_block
                        : ends_with(item->fqn, by_group.scales) ? &by_group
                                                                : NULL;
    const dcp_item *of = s && item->kind == DCP_ITEM_TENSOR ? partner(ck, item, s->scales, s->item) : NULL;
    dcp_quantized q;
    return of && dcp_quantized_find(ck, of, &q);
}

/* ---- what fits ---- */

static dcp_status mismatch(const dcp_quantized *q, const char *why, dcp_error *err)
{
    return dcp__fail(err, DCP_MISMATCH, "item \"%s\" of %s and its scales of %s: %s", dcp__print(q->item->fqn).text,
                     dcp__print_shape(q->item->ndim, q->item->extents).text,
                     dcp__print_shape(q->scales->ndim, q->scales->extents).text, why);
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static dcp_status check_blocks(const dcp_quantized *q, int64_t block, dcp_error *err)
{
    if (dcp__number_class_of(q->item->dtype) != DCP__NUMBER_REAL || dcp__number_class_of(q->scales->dtype) != DCP__NUMBER_REAL) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\": %s with scales of %s", dcp__print(q->item->fqn).text,
                         dcp_dtype_name(q->item->dtype), dcp_dtype_name(q->scales->dtype));
    }
    if (q->scales->ndim != 2 || q->scales->extents[0] != divide_up(q->extents[0], block) ||
        q->scales->extents[1] != divide_up(q->extents[1], block)) {
        return mismatch(q, "there is not one for each block", err);
    }
    return DCP_OK;
}

static dcp_status check_groups(const dcp_quantized *q, dcp_error *err)
{
    size_t shape = (size_t)q->ndim * sizeof *q->extents;
    bool are_bytes = dcp_dtype_bytes(q->item->dtype) == 1 && dcp_dtype_bytes(q->scales->dtype) == 1;
    if (!are_bytes) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\": %s with scales of %s", dcp__print(q->item->fqn).text,
                         dcp_dtype_name(q->item->dtype), dcp_dtype_name(q->scales->dtype));
    }
    return q->scales->ndim == q->ndim && memcmp(q->scales->extents, q->item->extents, shape) == 0
               ? DCP_OK
               : mismatch(q, "there is not one for each group", err);
}

/* ---- boxes ---- */

typedef struct reading {
    dcp_checkpoint *ck;
    const dcp_quantized *q;
    int64_t block;
    dcp_dtype dtype;
    const dcp_box *box; /* of the tensor that they stand for */
    uint8_t *out;       /* row-major */
    uint64_t lost;
} reading;

/* Reads a box of an item into new memory. */
static dcp_status read_new(dcp_checkpoint *ck, const dcp_item *item, const int64_t *offsets, const int64_t *sizes, void **out,
                           dcp_error *err)
{
    int64_t elems;
    dcp_box box = {offsets, sizes};
    if (!dcp__elems(item->ndim, sizes, &elems)) {
        return dcp__fail(err, DCP_LIMIT, "item \"%s\": number of elements overflows", dcp__print(item->fqn).text);
    }
    void *data = dcp__alloc_aligned(ck->ctx, 64, (size_t)elems * dcp_dtype_bytes(item->dtype));
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, sizes, data);
    dcp_status status = data ? dcp_read(ck, item, &box, &dst, err) : dcp__nomem(err);
    if (status != DCP_OK) {
        dcp__free_aligned(ck->ctx, data);
        return status;
    }
    *out = data;
    return DCP_OK;
}

/* Rounds a product in float32, as PyTorch computes it, to the dtype that is wanted. */
static void put(reading *r, const float *values, size_t n, uint64_t at)
{
    r->lost += dcp__cast(DCP_FLOAT32, values, r->dtype, r->out + at * dcp_dtype_bytes(r->dtype), n);
}

/* One row of elements with the scales of its blocks. */
static void scale_row(reading *r, const uint8_t *weights, const double *scales, uint64_t at)
{
    int64_t first = r->box->offsets[1], n = r->box->sizes[1], first_block = first / r->block;
    size_t elem = dcp_dtype_bytes(r->q->item->dtype);
    double numbers[BATCH];
    float products[BATCH];
    for (int64_t i = 0; i < n; i += BATCH) {
        size_t batch = n - i < BATCH ? (size_t)(n - i) : BATCH;
        dcp__decode_reals(r->q->item->dtype, weights + (size_t)i * elem, batch, numbers);
        for (size_t k = 0; k < batch; k++) {
            int64_t block = (first + i + (int64_t)k) / r->block - first_block;
            products[k] = (float)numbers[k] * (float)scales[block];
        }
        put(r, products, batch, at + (uint64_t)i);
    }
}

static dcp_status read_blocks(reading *r, dcp_error *err)
{
    const dcp_quantized *q = r->q;
    const int64_t *offsets = r->box->offsets, *sizes = r->box->sizes;
    int64_t from[2], counts[2];
    void *weights = NULL, *raw = NULL;
    for (int d = 0; d < 2; d++) {
        from[d] = offsets[d] / r->block;
        counts[d] = (offsets[d] + sizes[d] - 1) / r->block + 1 - from[d];
    }
    double *scales = dcp__alloc(r->ck->ctx, (size_t)(counts[0] * counts[1]) * sizeof *scales);
    dcp_status status = scales ? read_new(r->ck, q->item, offsets, sizes, &weights, err) : dcp__nomem(err);
    status = status == DCP_OK ? read_new(r->ck, q->scales, from, counts, &raw, err) : status;
    if (status == DCP_OK) {
        size_t elem = dcp_dtype_bytes(q->item->dtype);
        dcp__decode_reals(q->scales->dtype, raw, (size_t)(counts[0] * counts[1]), scales);
        for (int64_t row = 0; row < sizes[0]; row++) {
            const double *of_row = scales + ((offsets[0] + row) / r->block - from[0]) * counts[1];
            scale_row(r, (const uint8_t *)weights + (size_t)(row * sizes[1]) * elem, of_row, (uint64_t)(row * sizes[1]));
        }
    }
    dcp__free_aligned(r->ck->ctx, weights);
    dcp__free_aligned(r->ck->ctx, raw);
    dcp__free(r->ck->ctx, scales);
    return status;
}

/* The numbers of one row: `skip` of the first group's are left out. */
static void unpack_row(reading *r, const uint8_t *bytes, const uint8_t *scales, int64_t group_bytes, int64_t skip, int64_t n,
                       uint64_t at)
{
    double pairs[2 * BATCH];
    float products[2 * BATCH];
    int64_t done = 0;
    for (int64_t byte = skip / 2; done < n; byte += BATCH) {
        int64_t last = (skip + n - 1) / 2, batch = last + 1 - byte < BATCH ? last + 1 - byte : BATCH;
        dcp__decode_reals(DCP_FLOAT4_E2M1FN_X2, bytes + byte, (size_t)batch, pairs);
        for (int64_t k = 0; k < 2 * batch; k++) {
            products[k] = (float)ldexp(pairs[k], scales[(byte + k / 2) / group_bytes] - 127);
        }
        int64_t begin = 2 * byte < skip ? skip - 2 * byte : 0, end = 2 * batch;
        end = 2 * byte + end > skip + n ? skip + n - 2 * byte : end;
        put(r, products + begin, (size_t)(end - begin), at + (uint64_t)done);
        done += end - begin;
    }
}

static dcp_status read_groups(reading *r, dcp_error *err)
{
    const dcp_quantized *q = r->q;
    int last = q->ndim - 1;
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], rows = 1, group_bytes = q->item->extents[q->ndim];
    int64_t per_group = 2 * group_bytes, first = r->box->offsets[last], n = r->box->sizes[last];
    void *bytes = NULL, *scales = NULL;
    for (int d = 0; d < last; d++) {
        offsets[d] = r->box->offsets[d];
        sizes[d] = r->box->sizes[d];
        rows *= sizes[d];
    }
    offsets[last] = first / per_group;
    sizes[last] = divide_up(first + n, per_group) - offsets[last];
    offsets[last + 1] = 0;
    sizes[last + 1] = group_bytes;
    dcp_status status = read_new(r->ck, q->item, offsets, sizes, &bytes, err);
    status = status == DCP_OK ? read_new(r->ck, q->scales, offsets, sizes, &scales, err) : status;
    for (int64_t row = 0; row < rows && status == DCP_OK; row++) {
        unpack_row(r, (const uint8_t *)bytes + row * sizes[last] * group_bytes, (const uint8_t *)scales + row * sizes[last],
                   group_bytes, first - offsets[last] * per_group, n, (uint64_t)(row * n));
    }
    dcp__free_aligned(r->ck->ctx, bytes);
    dcp__free_aligned(r->ck->ctx, scales);
    return status;
}

static dcp_status read_box(reading *r, dcp_error *err)
{
    int64_t elems = 0;
    dcp_status status = is_by_group(r->q->item) ? check_groups(r->q, err) : check_blocks(r->q, r->block, err);
    dcp__elems(r->q->ndim, r->box->sizes, &elems); /* a part of the whole */
    if (status != DCP_OK || elems == 0) {
        return status;
    }
    return is_by_group(r->q->item) ? read_groups(r, err) : read_blocks(r, err);
}

dcp_status dcp__dequantize_elems(dcp_checkpoint *ck, const dcp_quantized *q, int64_t block, dcp_dtype dtype, uint64_t start,
                                 uint64_t n, void *out, uint64_t *lost, dcp_error *err)
{
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], at = (int64_t)start, left = (int64_t)n;
    reading r = {.ck = ck, .q = q, .block = block ? block : DCP_QUANTIZED_BLOCK, .dtype = dtype, .out = out};
    dcp_status status = DCP_OK;
    while (left > 0 && status == DCP_OK) {
        int64_t elems = dcp__box_at(q->ndim, q->extents, at, left, offsets, sizes);
        dcp_box box = {offsets, sizes};
        r.box = &box;
        status = read_box(&r, err);
        at += elems;
        left -= elems;
        r.out += (size_t)elems * dcp_dtype_bytes(dtype);
    }
    *lost = r.lost;
    return status;
}

/* ---- the public way in ---- */

static dcp_status check_box(const dcp_quantized *q, const dcp_box *box, const dcp_tensor *dst, dcp_error *err)
{
    if (!dcp__box_is_inside(q->ndim, q->extents, box->offsets, box->sizes)) {
        return dcp__fail(err, DCP_ARG, "item \"%s\": the box is outside of %s", dcp__print(q->item->fqn).text,
                         dcp__print_shape(q->ndim, q->extents).text);
    }
    if (dst->ndim != q->ndim || memcmp(dst->extents, box->sizes, (size_t)q->ndim * sizeof *box->sizes) != 0) {
        return dcp__fail(err, DCP_MISMATCH, "item \"%s\": the target's shape is not the box's", dcp__print(q->item->fqn).text);
    }
    if (dcp__number_class_of(dst->dtype) != DCP__NUMBER_REAL || dst->dtype == DCP_FLOAT8_E8M0FNU) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\": no target of %s", dcp__print(q->item->fqn).text,
                         dcp_dtype_name(dst->dtype));
    }
    return DCP_OK;
}

dcp_status dcp_read_dequantized(dcp_checkpoint *ck, const dcp_quantized *q, int64_t block, const dcp_box *box,
                                const dcp_tensor *dst, uint64_t *lost, dcp_error *err)
{
    static const int64_t zeros[DCP_MAX_NDIM];
    if (!ck || !q || !dst || block < 1 || q->ndim < 1 || q->ndim >= DCP_MAX_NDIM) {
        return dcp__fail(err, DCP_ARG, "dequantize: no checkpoint, item or target, or blocks of %lld", (long long)block);
    }
    dcp_box whole = {zeros, q->extents};
    reading r = {.ck = ck, .q = q, .block = block, .dtype = dst->dtype, .box = box ? box : &whole};
    int64_t elems = 0, row_major[DCP_MAX_NDIM];
    dcp_status status = check_box(q, r.box, dst, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__elems(q->ndim, r.box->sizes, &elems);
    bool in_place = dcp__is_row_major(dst->ndim, dst->extents, dst->strides);
    size_t elem = dcp_dtype_bytes(dst->dtype);
    uint8_t *buf = in_place ? dst->data : dcp__alloc_aligned(ck->ctx, 64, (size_t)elems * elem);
    r.out = buf;
    status = buf || elems == 0 ? read_box(&r, err) : dcp__nomem(err);
    if (status == DCP_OK && !in_place) {
        dcp__row_major(dst->ndim, dst->extents, row_major);
        dcp__copy_strided(dst->data, dst->strides, buf, row_major, dst->ndim, dst->extents, elem);
    }
    if (!in_place) {
        dcp__free_aligned(ck->ctx, buf);
    }
    if (status == DCP_OK && lost) {
        *lost = r.lost;
    }
    return status;
}
