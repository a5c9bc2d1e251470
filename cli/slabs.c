#include "slabs.h"

#include "cli.h"

#include <stdlib.h>
#include <string.h>

/*
 * A slab is one index in each dimension before `split`, a run of indices in `split`, and everything after it, so that slabs
 * follow one another in row-major order. Where the slice has steps, the box around them is read and then thinned out.
 */
typedef struct slab {
    const slice *s;
    size_t elem_bytes;
    int split;
    int64_t run;                   /* indices along split in a full slab */
    int64_t at[DCP_MAX_NDIM];      /* position in the slice, up to split */
    int64_t counts[DCP_MAX_NDIM];  /* elements of the slice in this slab, by dimension */
    int64_t offsets[DCP_MAX_NDIM]; /* the box in the tensor */
    int64_t sizes[DCP_MAX_NDIM];
} slab;

/* Indices that count steps of this dimension span. */
static int64_t span(const slice_dim *d, int64_t count)
{
    return count ? (count - 1) * d->step + 1 : 0;
}

/* Largest split whose dimensions below fit the budget; saturates on overflow, which then does not fit. */
static void choose_split(slab *b, uint64_t budget)
{
    uint64_t below = b->elem_bytes;
    b->split = b->s->ndim - 1;
    for (int i = b->s->ndim - 1; i > 0; i--) {
        uint64_t next;
        if (__builtin_mul_overflow(below, (uint64_t)span(&b->s->dims[i], b->s->dims[i].count), &next) || next > budget) {
            break;
        }
        below = next;
        b->split = i - 1;
    }
    const slice_dim *d = &b->s->dims[b->split];
    uint64_t indices = budget / below;
    b->run = indices ? (int64_t)((indices - 1) / (uint64_t)d->step) + 1 : 1;
}

/* Sets counts and box for the position. */
static void set_box(slab *b)
{
    for (int i = 0; i < b->s->ndim; i++) {
        const slice_dim *d = &b->s->dims[i];
        int64_t left = d->count - b->at[i];
        b->counts[i] = i < b->split ? 1 : i == b->split && left > b->run ? b->run : left;
        b->offsets[i] = d->start + b->at[i] * d->step;
        b->sizes[i] = span(d, b->counts[i]);
    }
}

/* Moves to the next slab; false after the last. */
static bool advance(slab *b)
{
    for (int i = b->split; i >= 0; i--) {
        b->at[i] += i == b->split ? b->run : 1;
        if (b->at[i] < b->s->dims[i].count) {
            return true;
        }
        b->at[i] = 0;
    }
    return false;
}

static size_t product(const int64_t *values, int n)
{
    size_t out = 1;
    for (int i = 0; i < n; i++) {
        out *= (size_t)values[i];
    }
    return out;
}

static bool has_steps(const slab *b)
{
    return product(b->counts, b->s->ndim) != product(b->sizes, b->s->ndim);
}

/* Thins out one row (last dimension) from src to dst; dst is at or before src, so moving forward is safe. */
static void pack_row(char *dst, const char *src, int64_t count, size_t step_bytes, size_t elem_bytes)
{
    for (int64_t i = 0; i < count; i++) {
        memmove(dst, src, elem_bytes);
        dst += elem_bytes;
        src += step_bytes;
    }
}

/* Moves the elements of the slice to the front of the buffer that holds the box. */
static void pack(const slab *b, char *buf)
{
    int last = b->s->ndim - 1;
    int64_t index[DCP_MAX_NDIM] = {0};
    size_t row_bytes = (size_t)b->counts[last] * b->elem_bytes;
    for (char *dst = buf;; dst += row_bytes) {
        size_t src = 0;
        for (int i = 0; i <= last; i++) {
            src = src * (size_t)b->sizes[i] + (size_t)(index[i] * b->s->dims[i].step);
        }
        pack_row(dst, buf + src * b->elem_bytes, b->counts[last], (size_t)b->s->dims[last].step * b->elem_bytes, b->elem_bytes);
        int i = last - 1;
        while (i >= 0 && ++index[i] == b->counts[i]) {
            index[i--] = 0;
        }
        if (i < 0) {
            return;
        }
    }
}

static bool is_empty(const slice *s)
{
    for (int i = 0; i < s->ndim; i++) {
        if (s->dims[i].count == 0) {
            return true;
        }
    }
    return false;
}

/* The first slab is the largest: its run is full and all later ones are as long or shorter. */
static void *alloc_buffer(slab *b)
{
    set_box(b);
    return must_alloc(product(b->sizes, b->s->ndim), b->elem_bytes);
}

static dcp_status read_slab(dcp_checkpoint *ck, const dcp_item *item, slab *b, void *buf, slab_fn fn, void *user, dcp_error *err)
{
    set_box(b);
    dcp_box box = {b->offsets, b->sizes};
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, b->sizes, buf);
    dcp_status rc = dcp_read(ck, item, &box, &dst, err);
    if (rc != DCP_OK) {
        return rc;
    }
    if (has_steps(b)) {
        pack(b, buf);
    }
    return fn(user, buf, product(b->counts, item->ndim)) ? DCP_OK : DCP_CANCELED;
}

dcp_status slabs_read(dcp_checkpoint *ck, const dcp_item *item, const slice *s, uint64_t budget_bytes, slab_fn fn, void *user,
                      dcp_error *err)
{
    slab b = {.s = s, .elem_bytes = dcp_dtype_bytes(item->dtype)};
    if (b.elem_bytes == 0) {
        return dcp_read(ck, item, NULL, &(dcp_tensor){.dtype = item->dtype, .ndim = item->ndim, .extents = item->extents},
                        err); /* which tells why not */
    }
    if (is_empty(s)) {
        return DCP_OK;
    }
    if (s->ndim > 0) {
        choose_split(&b, budget_bytes);
    }
    void *buf = alloc_buffer(&b);
    dcp_status rc;
    do {
        rc = read_slab(ck, item, &b, buf, fn, user, err);
    } while (rc == DCP_OK && s->ndim > 0 && advance(&b));
    free(buf);
    return rc;
}
