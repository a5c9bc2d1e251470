/* Copies between strided views. Dimensions are sorted and merged, then one of three shapes is left: runs that are contiguous on
 * both sides, a transpose, or a plain strided loop. */
#include "state/strided.h"

#include <string.h>

/* A tile of a transpose goes through a buffer: both sides then touch each cache line once, however their rows alias in the
 * cache (rows of 2^n bytes all fall into one set). */
#define TILE_BYTES 16384
#define TILE_ELEMS 64 /* most elements of a side */

typedef struct dim {
    int64_t extent;
    int64_t dst, src; /* strides in bytes */
} dim;

typedef struct view {
    dim dims[DCP_MAX_NDIM]; /* outermost first */
    int ndim;
    size_t elem_bytes;
} view;

static void sort_by_dst_stride(view *v)
{
    for (int i = 1; i < v->ndim; i++) {
        dim d = v->dims[i];
        int j = i;
        for (; j > 0 && (v->dims[j - 1].dst < d.dst || (v->dims[j - 1].dst == d.dst && v->dims[j - 1].src < d.src)); j--) {
            v->dims[j] = v->dims[j - 1];
        }
        v->dims[j] = d;
    }
}

/* Joins neighbours that are one run on both sides. */
static void merge_dims(view *v)
{
    int n = 0;
    for (int i = 0; i < v->ndim; i++) {
        dim d = v->dims[i], *outer = n ? &v->dims[n - 1] : NULL;
        if (outer && outer->dst == d.dst * d.extent && outer->src == d.src * d.extent) {
            *outer = (dim){outer->extent * d.extent, d.dst, d.src};
        } else {
            v->dims[n++] = d;
        }
    }
    v->ndim = n;
}

/* Makes the innermost run part of the element if that gives an element of 2, 4, 8 or 16 bytes. */
static void widen_element(view *v)
{
    if (!v->ndim) {
        return;
    }
    const dim *d = &v->dims[v->ndim - 1];
    int64_t elem = (int64_t)v->elem_bytes, bytes = d->extent <= 16 ? d->extent * elem : 0;
    if (d->dst == elem && d->src == elem && (bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16)) {
        v->elem_bytes = (size_t)bytes;
        v->ndim--;
    }
}

/* False if there is nothing to copy. */
static bool make_view(view *v, const int64_t *dst_strides, const int64_t *src_strides, int ndim, const int64_t *extents,
                      size_t elem_bytes)
{
    int64_t dense[DCP_MAX_NDIM];
    dcp__row_major(ndim, extents, dense);
    dst_strides = dst_strides ? dst_strides : dense;
    src_strides = src_strides ? src_strides : dense;
    v->ndim = 0;
    v->elem_bytes = elem_bytes;
    for (int i = 0; i < ndim; i++) {
        if (extents[i] == 0) {
            return false;
        }
        if (extents[i] > 1) {
            int64_t elem = (int64_t)elem_bytes;
            v->dims[v->ndim++] = (dim){extents[i], dst_strides[i] * elem, src_strides[i] * elem};
        }
    }
    sort_by_dst_stride(v);
    merge_dims(v);
    widen_element(v);
    return true;
}

/* ---- kernels: two dimensions, or one with outer.extent 1 ---- */

static void copy_runs(char *dst, const char *src, const dim *outer, size_t run_bytes)
{
    for (int64_t i = 0; i < outer->extent; i++) {
        memcpy(dst + i * outer->dst, src + i * outer->src, run_bytes);
    }
}

/* For functions whose `bytes` must be a constant where they are used. */
#define CONSTANT_BYTES static inline __attribute__((always_inline))

/* A part of a transpose: n_dst rows of dst by n_src rows of src, both contiguous, at most TILE_BYTES. */
typedef struct tile {
    char *dst;
    const char *src;
    int64_t dst_step, src_step; /* bytes from row to row */
    size_t n_dst, n_src;
} tile;

/* Rows are too far apart for the hardware to guess the next one. The address may lie behind the last row: it is not used then. */
#define ROWS_AHEAD 8
static inline void prefetch_row(const char *row, int64_t step, size_t bytes, bool is_write)
{
    uintptr_t p = (uintptr_t)row + (uintptr_t)(step * ROWS_AHEAD);
    for (size_t i = 0; i < bytes; i += 64) {
        if (is_write) {
            __builtin_prefetch((const void *)(p + i), 1);
        } else {
            __builtin_prefetch((const void *)(p + i), 0);
        }
    }
}

/* Transposes 8 / bytes words of as many numbers each: exchanges blocks off the diagonal, ever smaller ones. */
CONSTANT_BYTES void transpose_words(uint64_t *w, size_t bytes)
{
    for (size_t half = 4 / bytes; half; half /= 2) {
        size_t width = half * bytes, shift = 8 * width;
        uint64_t mask = width == 4   ? UINT64_C(0x00000000FFFFFFFF)
                        : width == 2 ? UINT64_C(0x0000FFFF0000FFFF)
                                     : UINT64_C(0x00FF00FF00FF00FF);
        for (size_t i = 0; i < 8 / bytes; i++) {
            if (!(i & half)) {
                uint64_t t = ((w[i] >> shift) ^ w[i + half]) & mask;
                w[i + half] ^= t;
                w[i] ^= t << shift;
            }
        }
    }
}

/* Fills a buffer with the tile in dst's order: square blocks of whole words, and the elements beside them one by one. */
CONSTANT_BYTES void fill_tile(char *buffer, const tile *t, size_t bytes)
{
    size_t block = bytes < 8 ? 8 / bytes : 1, i_end = t->n_dst / block * block;
    size_t row_bytes = t->n_src * bytes;
    for (size_t j = 0; j < t->n_src; j += block) {
        const char *s = t->src + (int64_t)j * t->src_step;
        char *b = buffer + j * bytes;
        size_t n = t->n_src - j < block ? t->n_src - j : block, i = 0;
        for (size_t r = 0; r < n; r++) {
            prefetch_row(s + (int64_t)r * t->src_step, t->src_step, t->n_dst * bytes, false);
        }
        for (; bytes < 8 && n == block && i < i_end; i += block) {
            uint64_t w[8];
            for (size_t r = 0; r < block; r++) {
                memcpy(&w[r], s + (int64_t)r * t->src_step + i * bytes, 8);
            }
            transpose_words(w, bytes);
            for (size_t r = 0; r < block; r++) {
                memcpy(b + (i + r) * row_bytes, &w[r], 8);
            }
        }
        for (; i < t->n_dst; i++) {
            for (size_t r = 0; r < n; r++) {
                memcpy(b + i * row_bytes + r * bytes, s + (int64_t)r * t->src_step + i * bytes, bytes);
            }
        }
    }
}

CONSTANT_BYTES void copy_tile(const tile *t, size_t bytes)
{
    _Alignas(64) char buffer[TILE_BYTES];
    fill_tile(buffer, t, bytes);
    size_t row_bytes = t->n_src * bytes;
    for (size_t i = 0; i < t->n_dst; i++) {
        char *row = t->dst + (int64_t)i * t->dst_step;
        prefetch_row(row, t->dst_step, row_bytes, true);
        memcpy(row, buffer + i * row_bytes, row_bytes);
    }
}

/* Both kernels with the size of an element known to the compiler. */
#define KERNELS(bytes)                                                                                                           \
    static void copy_strided_##bytes(char *dst, const char *src, const dim *outer, const dim *inner)                             \
    {                                                                                                                            \
        for (int64_t i = 0; i < outer->extent; i++) {                                                                            \
            char *d = dst + i * outer->dst;                                                                                      \
            const char *s = src + i * outer->src;                                                                                \
            for (int64_t j = 0; j < inner->extent; j++, d += inner->dst, s += inner->src) {                                      \
                memcpy(d, s, bytes);                                                                                             \
            }                                                                                                                    \
        }                                                                                                                        \
    }                                                                                                                            \
    static void copy_tile_##bytes(const tile *t)                                                                                 \
    {                                                                                                                            \
        copy_tile(t, bytes);                                                                                                     \
    }

KERNELS(1)
KERNELS(2)
KERNELS(4)
KERNELS(8)
KERNELS(16)
#undef KERNELS

static void copy_strided_any(char *dst, const char *src, const dim *outer, const dim *inner, size_t elem_bytes)
{
    for (int64_t i = 0; i < outer->extent; i++) {
        for (int64_t j = 0; j < inner->extent; j++) {
            memcpy(dst + i * outer->dst + j * inner->dst, src + i * outer->src + j * inner->src, elem_bytes);
        }
    }
}

static void copy_elements(char *dst, const char *src, const dim *outer, const dim *inner, size_t elem_bytes)
{
    switch (elem_bytes) {
    case 1: copy_strided_1(dst, src, outer, inner); break;
    case 2: copy_strided_2(dst, src, outer, inner); break;
    case 4: copy_strided_4(dst, src, outer, inner); break;
    case 8: copy_strided_8(dst, src, outer, inner); break;
    case 16: copy_strided_16(dst, src, outer, inner); break;
    default: copy_strided_any(dst, src, outer, inner, elem_bytes); break;
    }
}

/* outer is contiguous in src, inner in dst. */
static void transpose(char *dst, const char *src, const dim *outer, const dim *inner, size_t elem_bytes)
{
    int64_t side = elem_bytes == 1 ? 2 * TILE_ELEMS : elem_bytes <= 4 ? TILE_ELEMS : TILE_ELEMS / 2;
    for (int64_t i = 0; i < outer->extent; i += side) {
        for (int64_t j = 0; j < inner->extent; j += side) {
            tile t = {
                .dst = dst + i * outer->dst + j * inner->dst,
                .src = src + i * outer->src + j * inner->src,
                .dst_step = outer->dst,
                .src_step = inner->src,
                .n_dst = (size_t)(outer->extent - i < side ? outer->extent - i : side),
                .n_src = (size_t)(inner->extent - j < side ? inner->extent - j : side),
            };
            switch (elem_bytes) {
            case 1: copy_tile_1(&t); break;
            case 2: copy_tile_2(&t); break;
            case 4: copy_tile_4(&t); break;
            case 8: copy_tile_8(&t); break;
            default: copy_tile_16(&t); break;
            }
        }
    }
}

/* ---- choice of the kernel, and the dimensions around it ---- */

typedef enum shape { RUNS, TRANSPOSE, STRIDED } shape;

static bool is_specialised(size_t elem_bytes)
{
    return elem_bytes <= 16 && (elem_bytes & (elem_bytes - 1)) == 0;
}

/* Puts the two dimensions of the kernel last. */
static shape choose(view *v)
{
    int64_t elem = (int64_t)v->elem_bytes;
    const dim *inner = &v->dims[v->ndim - 1];
    if (inner->dst == elem && inner->src == elem) {
        return RUNS;
    }
    for (int i = 0; i < v->ndim - 1; i++) {
        if (v->dims[i].src == elem && inner->dst == elem && v->dims[i].extent > 4 && inner->extent > 4 &&
            is_specialised((size_t)elem)) {
            dim d = v->dims[i];
            memmove(&v->dims[i], &v->dims[i + 1], (size_t)(v->ndim - 2 - i) * sizeof d);
            v->dims[v->ndim - 2] = d;
            return TRANSPOSE;
        }
    }
    return STRIDED;
}

static void run_kernel(shape s, char *dst, const char *src, const dim *outer, const dim *inner, size_t elem_bytes)
{
    if (s == RUNS) {
        copy_runs(dst, src, outer, (size_t)inner->extent * elem_bytes);
    } else if (s == TRANSPOSE) {
        transpose(dst, src, outer, inner, elem_bytes);
    } else {
        copy_elements(dst, src, outer, inner, elem_bytes);
    }
}

void dcp__copy_strided(void *dst, const int64_t *dst_strides, const void *src, const int64_t *src_strides, int ndim,
                       const int64_t *extents, size_t elem_bytes)
{
    static const dim once = {1, 0, 0};
    view v;
    if (!make_view(&v, dst_strides, src_strides, ndim, extents, elem_bytes)) {
        return;
    }
    if (!v.ndim) {
        memcpy(dst, src, v.elem_bytes);
        return;
    }
    shape s = choose(&v);
    const dim *inner = &v.dims[v.ndim - 1], *outer = v.ndim > 1 ? inner - 1 : &once;
    int around = v.ndim > 2 ? v.ndim - 2 : 0;
    int64_t index[DCP_MAX_NDIM] = {0};
    char *d = dst;
    const char *from = src;
    for (;;) {
        run_kernel(s, d, from, outer, inner, v.elem_bytes);
        int i = around - 1;
        for (; i >= 0; i--) {
            d += v.dims[i].dst;
            from += v.dims[i].src;
            if (++index[i] < v.dims[i].extent) {
                break;
            }
            d -= v.dims[i].dst * v.dims[i].extent;
            from -= v.dims[i].src * v.dims[i].extent;
            index[i] = 0;
        }
        if (i < 0) {
            return;
        }
    }
}
