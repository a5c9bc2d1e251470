/* Tiling checks against a dense reference that counts how often each element is covered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plan/coverage.h"
#include "support/failing_alloc.h"

enum { MOST_DIMS = 5, MOST_CHUNKS = 80 };

static uint64_t seed;

static int64_t below(int64_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (int64_t)(seed % (uint64_t)n);
}

typedef struct tiling {
    int ndim;
    int64_t extents[MOST_DIMS];
    size_t n;
    int64_t offsets[MOST_CHUNKS][MOST_DIMS], sizes[MOST_CHUNKS][MOST_DIMS];
} tiling;

static int64_t elems_of(int ndim, const int64_t *sizes)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        n *= sizes[d];
    }
    return n;
}

/* Cuts each dimension at random places; the chunks are the cells of the grid, in random order. */
static void random_mesh(tiling *t)
{
    static const int64_t most[] = {1, 60, 14, 8, 6, 4};
    int64_t cuts[MOST_DIMS][5];
    int parts[MOST_DIMS];
    t->ndim = (int)below(MOST_DIMS + 1);
    t->n = 1;
    for (int d = 0; d < t->ndim; d++) {
        t->extents[d] = below(25) == 0 ? 0 : 1 + below(most[t->ndim]);
        parts[d] = t->n * 4 <= MOST_CHUNKS / 2 ? 1 + (int)below(4) : 1;
        t->n *= (size_t)parts[d];
        cuts[d][0] = 0;
        for (int i = 1; i < parts[d]; i++) {
            int64_t cut = below(t->extents[d] + 1);
            int j = i;
            for (; j > 1 && cuts[d][j - 1] > cut; j--) {
                cuts[d][j] = cuts[d][j - 1];
            }
            cuts[d][j] = cut;
        }
        cuts[d][parts[d]] = t->extents[d];
    }
    for (size_t c = 0; c < t->n; c++) {
        size_t rest = c;
        for (int d = 0; d < t->ndim; d++) {
            size_t i = rest % (size_t)parts[d];
            rest /= (size_t)parts[d];
            t->offsets[c][d] = cuts[d][i];
            t->sizes[c][d] = cuts[d][i + 1] - cuts[d][i];
        }
    }
}

static void copy_chunk(tiling *t, size_t to, const tiling *from, size_t chunk)
{
    memcpy(t->offsets[to], from->offsets[chunk], sizeof t->offsets[to]);
    memcpy(t->sizes[to], from->sizes[chunk], sizeof t->sizes[to]);
}

/* Halves a chunk along a random dimension: makes tilings that are no grids. */
static void cut_chunk(tiling *t)
{
    if (!t->ndim || t->n == 0 || t->n == MOST_CHUNKS) {
        return;
    }
    size_t c = (size_t)below((int64_t)t->n);
    int d = (int)below(t->ndim);
    int64_t left = below(t->sizes[c][d] + 1);
    copy_chunk(t, t->n, t, c);
    t->offsets[t->n][d] += left;
    t->sizes[t->n][d] -= left;
    t->sizes[c][d] = left;
    t->n++;
}

/* The five chunks of a pinwheel, which no plane divides. */
static void pinwheel(tiling *t)
{
    int64_t a = 1 + below(3), b = a + 1 + below(3), n = b + 1 + below(3);
    const int64_t boxes[5][4] = {{0, 0, a, b}, {0, b, b, n - b}, {b, a, n - b, n - a}, {a, 0, n - a, a}, {a, a, b - a, b - a}};
    int third = (int)below(4); /* where a third dimension goes, if there is one */
    int64_t depth = 1 + below(3);
    t->ndim = third < 3 ? 3 : 2;
    t->n = 5;
    for (int d = 0, from = 0; d < t->ndim; d++) {
        bool is_third = d == third;
        t->extents[d] = is_third ? depth : n;
        for (size_t c = 0; c < 5; c++) {
            t->offsets[c][d] = is_third ? 0 : boxes[c][from];
            t->sizes[c][d] = is_third ? depth : boxes[c][from + 2];
        }
        from += !is_third;
    }
}

static void perturb(tiling *t)
{
    size_t c = t->n ? (size_t)below((int64_t)t->n) : 0;
    int d = t->ndim ? (int)below(t->ndim) : 0;
    switch (t->n ? below(8) : 0) {
    case 0: break;
    case 1: /* removed */ copy_chunk(t, c, t, --t->n); break;
    case 2: /* grown, shrunk */ t->sizes[c][d] += t->ndim ? below(3) - 1 : 0; break;
    case 3: /* shifted */ t->offsets[c][d] += t->ndim ? below(3) - 1 : 0; break;
    case 4: /* twice */
        if (t->n < MOST_CHUNKS) {
            copy_chunk(t, t->n++, t, c);
        }
        break;
    case 5: /* an empty one somewhere */
        if (t->n < MOST_CHUNKS && t->ndim) {
            for (int i = 0; i < t->ndim; i++) {
                t->offsets[t->n][i] = below(t->extents[i] + 1);
                t->sizes[t->n][i] = t->extents[i] - t->offsets[t->n][i];
            }
            t->sizes[t->n++][d] = 0;
        }
        break;
    case 6: /* moved to where another begins */
        memcpy(t->offsets[c], t->offsets[below((int64_t)t->n)], sizeof t->offsets[c]);
        break;
    default: /* random */
        for (int i = 0; i < t->ndim; i++) {
            t->offsets[c][i] = below(t->extents[i] + 1);
            t->sizes[c][i] = below(t->extents[i] - t->offsets[c][i] + 1);
        }
    }
}

static void shuffle(tiling *t)
{
    tiling copy = *t;
    for (size_t i = 0; i < t->n; i++) {
        size_t j = i + (size_t)below((int64_t)(t->n - i));
        copy_chunk(t, i, &copy, j);
        copy_chunk(&copy, j, &copy, i);
    }
}

static bool is_within(const tiling *t, size_t c)
{
    for (int d = 0; d < t->ndim; d++) {
        if (t->offsets[c][d] < 0 || t->sizes[c][d] < 0 || t->offsets[c][d] + t->sizes[c][d] > t->extents[d]) {
            return false;
        }
    }
    return true;
}

static bool contains(const tiling *t, size_t c, int64_t element)
{
    for (int d = t->ndim - 1; d >= 0; d--) {
        int64_t at = element % t->extents[d];
        element /= t->extents[d];
        if (at < t->offsets[c][d] || at >= t->offsets[c][d] + t->sizes[c][d]) {
            return false;
        }
    }
    return true;
}

static int64_t flat_index(const tiling *t, const int64_t *at)
{
    int64_t index = 0;
    for (int d = 0; d < t->ndim; d++) {
        index = index * t->extents[d] + at[d];
    }
    return index;
}

static void assert_agrees(const tiling *t, const dcp__tiling *got)
{
    for (size_t c = 0; c < t->n; c++) {
        if (!is_within(t, c)) {
            assert_int_equal(got->fault, DCP__TILING_OUTSIDE);
            assert_false(is_within(t, got->a));
            return;
        }
    }
    int64_t elems = elems_of(t->ndim, t->extents), missing = 0, first = -1, doubled = 0, common = 0;
    for (int64_t e = 0; e < elems; e++) {
        int covered = 0;
        for (size_t c = 0; c < t->n; c++) {
            covered += contains(t, c, e);
        }
        missing += covered == 0;
        doubled += covered > 1;
        first = covered == 0 && first < 0 ? e : first;
        common += got->fault == DCP__TILING_OVERLAP && contains(t, got->a, e) && contains(t, got->b, e);
    }
    if (doubled) {
        assert_int_equal(got->fault, DCP__TILING_OVERLAP);
        assert_true(got->a < got->b && common > 0);
    } else if (missing) {
        assert_int_equal(got->fault, DCP__TILING_GAP);
        assert_int_equal(got->missing, missing);
        assert_int_equal(flat_index(t, got->at), first);
    } else {
        assert_int_equal(got->fault, DCP__TILING_OK);
    }
}

static dcp__tiling check(const tiling *t)
{
    dcp_box boxes[MOST_CHUNKS];
    dcp__tiling got;
    for (size_t c = 0; c < t->n; c++) {
        boxes[c] = (dcp_box){t->offsets[c], t->sizes[c]};
    }
    assert_int_equal(dcp__check_tiling(NULL, t->ndim, t->extents, boxes, t->n, &got, NULL), DCP_OK);
    return got;
}

static void check_tiling__agrees_with_a_dense_count(void **state)
{
    (void)state;
    size_t verdicts[4] = {0};
    for (int i = 0; i < 40000; i++) {
        tiling t = {0};
        if (below(8)) {
            random_mesh(&t);
        } else {
            pinwheel(&t);
        }
        for (int64_t cuts = below(6); cuts; cuts--) {
            cut_chunk(&t);
        }
        for (int64_t faults = below(3); faults; faults--) {
            perturb(&t);
        }
        shuffle(&t);
        dcp__tiling got = check(&t);
        assert_agrees(&t, &got);
        verdicts[got.fault]++;
    }
    print_message("ok %zu, outside %zu, overlap %zu, gap %zu\n", verdicts[0], verdicts[1], verdicts[2], verdicts[3]);
    for (int v = 0; v < 4; v++) {
        assert_true(verdicts[v] > 1000);
    }
}

static void check_tiling__scalar_needs_exactly_one_chunk(void **state)
{
    (void)state;
    dcp_box boxes[2] = {{NULL, NULL}, {NULL, NULL}};
    dcp__tiling got;
    assert_int_equal(dcp__check_tiling(NULL, 0, NULL, boxes, 1, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_OK);
    assert_int_equal(dcp__check_tiling(NULL, 0, NULL, boxes, 2, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_OVERLAP);
    assert_true(got.a == 0 && got.b == 1);
    assert_int_equal(dcp__check_tiling(NULL, 0, NULL, NULL, 0, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_GAP);
    assert_int_equal(got.missing, 1);
}

static void check_tiling__huge_numbers_do_not_overflow(void **state)
{
    (void)state;
    const int64_t big = INT64_C(1) << 40;
    dcp_box box = {(int64_t[]){1, INT64_MAX}, (int64_t[]){INT64_MAX, 1}};
    dcp__tiling got;
    assert_int_equal(dcp__check_tiling(NULL, 2, (int64_t[]){big, 4}, &box, 1, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_OUTSIDE);
    box = (dcp_box){(int64_t[]){0, 0}, (int64_t[]){big, big}};
    assert_int_equal(dcp__check_tiling(NULL, 2, (int64_t[]){big, big}, &box, 1, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_GAP); /* no storage has 2^80 elements */
    box = (dcp_box){(int64_t[]){0, 0}, (int64_t[]){big, 3}};
    assert_int_equal(dcp__check_tiling(NULL, 2, (int64_t[]){big, 4}, &box, 1, &got, NULL), DCP_OK);
    assert_int_equal(got.fault, DCP__TILING_GAP);
    assert_true(got.missing == big && got.at[0] == 0 && got.at[1] == 3);
}

/* ---- large sets ---- */

typedef struct large {
    dcp_box *boxes;
    int64_t *numbers;
    size_t n;
} large;

static large new_large(size_t n)
{
    large l = {calloc(n, sizeof(dcp_box)), calloc(4 * n, sizeof(int64_t)), n};
    for (size_t i = 0; i < n; i++) {
        l.boxes[i] = (dcp_box){l.numbers + 4 * i, l.numbers + 4 * i + 2};
    }
    return l;
}

static void set_box(large *l, size_t i, int64_t row, int64_t col, int64_t rows, int64_t cols)
{
    int64_t *p = l->numbers + 4 * i;
    p[0] = row;
    p[1] = col;
    p[2] = rows;
    p[3] = cols;
}

static void free_large(large *l)
{
    free(l->boxes);
    free(l->numbers);
}

static dcp__tiling timed_check(const char *what, const large *l, int64_t rows, int64_t cols)
{
    struct timespec a, b;
    dcp__tiling got;
    clock_gettime(CLOCK_MONOTONIC, &a);
    assert_int_equal(dcp__check_tiling(NULL, 2, (int64_t[]){rows, cols}, l->boxes, l->n, &got, NULL), DCP_OK);
    clock_gettime(CLOCK_MONOTONIC, &b);
    double ms = 1e3 * (double)(b.tv_sec - a.tv_sec) + 1e-6 * (double)(b.tv_nsec - a.tv_nsec);
    print_message("%s, %zu chunks: %.2f ms\n", what, l->n, ms);
    return got;
}

enum { ROWS = 16384, SIDE = 128 };

static large row_chunks(void)
{
    large l = new_large(ROWS);
    for (size_t i = 0; i < ROWS; i++) {
        set_box(&l, i, 4 * (int64_t)((i * 7919) % ROWS), 0, 4, 10); /* in scrambled order */
    }
    return l;
}

static large grid_chunks(void)
{
    large l = new_large(SIDE * SIDE);
    for (int64_t i = 0; i < SIDE * SIDE; i++) {
        set_box(&l, (size_t)((i * 7919) % (SIDE * SIDE)), i / SIDE * 3, i % SIDE * 5, 3, 5);
    }
    return l;
}

static void check_tiling__many_row_chunks(void **state)
{
    (void)state;
    large l = row_chunks();
    assert_int_equal(timed_check("rows", &l, 4 * ROWS, 10).fault, DCP__TILING_OK);
    set_box(&l, 5000, l.numbers[4 * 5000], 3, 5, 1); /* one row into the next chunk */
    dcp__tiling got = timed_check("rows, one overlap", &l, 4 * ROWS, 10);
    assert_int_equal(got.fault, DCP__TILING_OVERLAP);
    size_t next = got.a == 5000 ? got.b : got.a;
    assert_true(got.a == 5000 || got.b == 5000);
    assert_int_equal(l.numbers[4 * next], l.numbers[4 * 5000] + 4);
    set_box(&l, 5000, l.numbers[4 * 5000], 0, 4, 9);
    got = timed_check("rows, one gap", &l, 4 * ROWS, 10);
    assert_int_equal(got.fault, DCP__TILING_GAP);
    assert_true(got.missing == 4 && got.at[0] == l.numbers[4 * 5000] && got.at[1] == 9);
    free_large(&l);
}

static void check_tiling__many_grid_chunks(void **state)
{
    (void)state;
    large l = grid_chunks();
    assert_int_equal(timed_check("grid", &l, 3 * SIDE, 5 * SIDE).fault, DCP__TILING_OK);
    set_box(&l, 77, l.numbers[4 * 77], l.numbers[4 * 77 + 1], 2, 5);
    dcp__tiling got = timed_check("grid, one gap", &l, 3 * SIDE, 5 * SIDE);
    assert_int_equal(got.fault, DCP__TILING_GAP);
    assert_true(got.missing == 5 && got.at[0] == l.numbers[4 * 77] + 2 && got.at[1] == l.numbers[4 * 77 + 1]);
    set_box(&l, 77, l.numbers[4 * 77] + 1, l.numbers[4 * 77 + 1], 3, 5);
    got = timed_check("grid, one overlap", &l, 3 * SIDE, 5 * SIDE);
    assert_int_equal(got.fault, DCP__TILING_OVERLAP);
    assert_true(got.a == 77 || got.b == 77);
    free_large(&l);
}

/* Shapes made to hurt: a spiral, from which each plane cuts but one chunk, and a pinwheel of thin strips. */
static void check_tiling__hostile_shapes_end_soon(void **state)
{
    (void)state;
    enum { N = 262144 };
    large l = new_large(N);
    int64_t top = 0, left = 0, bottom = N, right = N;
    for (size_t i = 0; i < N - 1; i++) {
        switch (i % 4) {
        case 0: set_box(&l, i, top++, left, 1, right - left); break;
        case 1: set_box(&l, i, top, --right, bottom - top, 1); break;
        case 2: set_box(&l, i, --bottom, left, 1, right - left); break;
        default: set_box(&l, i, top, left++, bottom - top, 1); break;
        }
    }
    set_box(&l, N - 1, top, left, bottom - top, right - left);
    assert_int_equal(timed_check("spiral", &l, N, N).fault, DCP__TILING_OK);
    free_large(&l);
    enum { ARM = 65536 };
    l = new_large(4 * ARM + 1);
    for (int64_t i = 0; i < ARM; i++) {
        set_box(&l, (size_t)i, i, 0, 1, ARM + 1);
        set_box(&l, (size_t)(ARM + i), 0, ARM + 1 + i, ARM + 1, 1);
        set_box(&l, (size_t)(2 * ARM + i), ARM + 1 + i, ARM, 1, ARM + 1);
        set_box(&l, (size_t)(3 * ARM + i), ARM, i, ARM + 1, 1);
    }
    set_box(&l, 4 * ARM, ARM, ARM, 1, 1);
    assert_int_equal(timed_check("pinwheel", &l, 2 * ARM + 1, 2 * ARM + 1).fault, DCP__TILING_OK);
    free_large(&l);
}

static dcp_status check_once(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_box *boxes = user;
    dcp__tiling got = {.fault = DCP__TILING_GAP};
    dcp_status status = dcp__check_tiling(ctx, 1, (int64_t[]){4}, boxes, 2, &got, err);
    assert_true(got.fault == (status == DCP_OK ? DCP__TILING_OK : DCP__TILING_GAP)); /* output on success only */
    return status;
}

static void check_tiling__out_of_memory_leaks_nothing(void **state)
{
    (void)state;
    dcp_box boxes[2] = {{(int64_t[]){0}, (int64_t[]){2}}, {(int64_t[]){2}, (int64_t[]){2}}};
    assert_true(failing_alloc_walk(check_once, boxes) > 0);
}

/* ---- boxes ---- */

static void box_overlap__agrees_with_a_dense_count(void **state)
{
    (void)state;
    for (int i = 0; i < 20000; i++) {
        tiling t = {.ndim = (int)below(4), .n = 2};
        for (int d = 0; d < t.ndim; d++) {
            t.extents[d] = 8;
            for (size_t c = 0; c < 2; c++) {
                t.offsets[c][d] = below(8);
                t.sizes[c][d] = below(9 - t.offsets[c][d]);
            }
        }
        dcp_box a = {t.offsets[0], t.sizes[0]}, b = {t.offsets[1], t.sizes[1]};
        int64_t in_a[MOST_DIMS], in_b[MOST_DIMS], sizes[MOST_DIMS], common = 0, first = -1;
        for (int64_t e = 0; e < elems_of(t.ndim, t.extents); e++) {
            bool in_both = contains(&t, 0, e) && contains(&t, 1, e);
            common += in_both;
            first = in_both && first < 0 ? e : first;
        }
        bool got = dcp__box_overlap(t.ndim, &a, &b, in_a, in_b, sizes);
        assert_int_equal(got, common > 0);
        if (got) {
            assert_int_equal(elems_of(t.ndim, sizes), common);
            int64_t at_a[MOST_DIMS], at_b[MOST_DIMS];
            for (int d = 0; d < t.ndim; d++) {
                at_a[d] = in_a[d] + t.offsets[0][d];
                at_b[d] = in_b[d] + t.offsets[1][d];
            }
            assert_int_equal(flat_index(&t, at_a), first);
            assert_int_equal(flat_index(&t, at_b), first);
        }
    }
}

int main(int argc, char **argv)
{
    seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL) | 1;
    printf("seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_tiling__agrees_with_a_dense_count),
        cmocka_unit_test(check_tiling__scalar_needs_exactly_one_chunk),
        cmocka_unit_test(check_tiling__huge_numbers_do_not_overflow),
        cmocka_unit_test(check_tiling__many_row_chunks),
        cmocka_unit_test(check_tiling__many_grid_chunks),
        cmocka_unit_test(check_tiling__hostile_shapes_end_soon),
        cmocka_unit_test(check_tiling__out_of_memory_leaks_nothing),
        cmocka_unit_test(box_overlap__agrees_with_a_dense_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
