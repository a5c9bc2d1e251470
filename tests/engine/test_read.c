/* Reading whole items and slices of every golden checkpoint: a slice is what the whole item has there. */
#include <dirent.h>
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/checkpoint.h"
#include "support/random.h"

#define SLICES_PER_ITEM 12

static int64_t elems_of(int ndim, const int64_t *extents)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        n *= extents[d];
    }
    return n;
}

/* Element `index` of a box, found without the code under test: element by element through strides. */
static int64_t offset_of(int ndim, const int64_t *sizes, const int64_t *strides, int64_t index)
{
    int64_t at = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        at += index % sizes[d] * strides[d];
        index /= sizes[d];
    }
    return at;
}

static void row_major(int ndim, const int64_t *extents, int64_t *strides)
{
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        strides[d] = stride;
        stride *= extents[d];
    }
}

/* A random box, read into memory with random strides: dimensions in any order, with gaps. */
static void check_random_slice(dcp_checkpoint *ck, const dcp_item *item, const char *whole, test_random *rnd)
{
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM], strides[DCP_MAX_NDIM], from[DCP_MAX_NDIM], order[DCP_MAX_NDIM];
    size_t elem = dcp_dtype_bytes(item->dtype);
    dcp_error err = DCP_ERROR_INIT;
    for (int d = 0; d < item->ndim; d++) {
        offsets[d] = test_random_below(rnd, item->extents[d] + 1);
        sizes[d] = test_random_below(rnd, item->extents[d] - offsets[d] + 1);
        order[d] = d;
    }
    for (int d = item->ndim - 1; d > 0; d--) {
        int64_t other = test_random_below(rnd, d + 1), swap = order[d];
        order[d] = order[other];
        order[other] = swap;
    }
    int64_t stride = 1 + test_random_below(rnd, 2);
    for (int d = 0; d < item->ndim; d++) {
        strides[order[d]] = stride;
        stride = stride * (sizes[order[d]] ? sizes[order[d]] : 1) + test_random_below(rnd, 2);
    }
    size_t bytes = (size_t)(stride + 1) * elem;
    char *memory = malloc(bytes);
    memset(memory, 0xa5, bytes);
    dcp_box box = {offsets, sizes};
    dcp_tensor dst = {item->dtype, item->ndim, sizes, strides, memory, {DCP_DEVICE_CPU, 0}};
    if (dcp_read(ck, item, &box, &dst, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    row_major(item->ndim, item->extents, from);
    int64_t first = 0;
    for (int d = 0; d < item->ndim; d++) {
        first += offsets[d] * from[d];
    }
    for (int64_t i = 0; i < elems_of(item->ndim, sizes); i++) {
        const char *expected = whole + (size_t)(first + offset_of(item->ndim, sizes, from, i)) * elem;
        assert_memory_equal(memory + (size_t)offset_of(item->ndim, sizes, strides, i) * elem, expected, elem);
    }
    free(memory);
}

static void check_item(dcp_checkpoint *ck, const dcp_item *item, test_random *rnd)
{
    dcp_error err = DCP_ERROR_INIT;
    char *whole = malloc(item->bytes + 1);
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, item->extents, whole);
    if (dcp_read(ck, item, NULL, &dst, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    for (int i = 0; i < SLICES_PER_ITEM; i++) {
        check_random_slice(ck, item, whole, rnd);
    }
    free(whole);
}

static size_t check_checkpoint(const char *path, test_random *rnd)
{
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_checkpoint_open(NULL, path, NULL, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    size_t n = dcp_checkpoint_count(ck);
    for (size_t i = 0; i < n; i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        if (item->kind == DCP_ITEM_TENSOR) {
            check_item(ck, item, rnd);
        }
    }
    dcp_checkpoint_close(ck);
    return n;
}

static void read__any_slice_of_any_golden_item_equals_the_whole(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("read slices");
    glob_t found;
    size_t items = 0;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/*/ckpt", 0, NULL, &found), 0);
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/*/file.pt", GLOB_APPEND, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        items += check_checkpoint(found.gl_pathv[i], &rnd);
    }
    assert_true(found.gl_pathc > 50 && items > 500);
    globfree(&found);
}

static void open_golden(const char *name, dcp_checkpoint **ck)
{
    char path[512];
    dcp_error err = DCP_ERROR_INIT;
    snprintf(path, sizeof path, "%s/golden/%s", DCP_TEST_DIR, name);
    if (dcp_checkpoint_open(NULL, path, NULL, ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
}

static void read__targets_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    dcp_checkpoint *ck;
    open_golden("2.13.0/sharded/ckpt", &ck);
    const dcp_item *rows = dcp_checkpoint_find(ck, dcp_str_of("rows")); /* float32 [10, 7] */
    float memory[70];
    int64_t right[] = {10, 7}, wrong[] = {7, 10}, flat[] = {70};
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT64, 2, right, memory);
    assert_int_equal(dcp_read(ck, rows, NULL, &dst, NULL), DCP_MISMATCH);
    dst = dcp_tensor_make(DCP_FLOAT32, 2, wrong, memory);
    assert_int_equal(dcp_read(ck, rows, NULL, &dst, NULL), DCP_MISMATCH);
    dst = dcp_tensor_make(DCP_FLOAT32, 1, flat, memory);
    assert_int_equal(dcp_read(ck, rows, NULL, &dst, NULL), DCP_MISMATCH);
    dst = dcp_tensor_make(DCP_FLOAT32, 2, right, NULL);
    assert_int_equal(dcp_read(ck, rows, NULL, &dst, NULL), DCP_ARG);
    dst = dcp_tensor_make(DCP_FLOAT32, 2, right, memory);
    dst.device.type = (dcp_device_type)99; /* on every machine there is no such device */
    assert_int_equal(dcp_read(ck, rows, NULL, &dst, NULL), DCP_ARG);
    int64_t offsets[] = {9, 0}, sizes[] = {2, 7}, huge[] = {INT64_MAX, 0};
    dcp_box box = {offsets, sizes};
    dst = dcp_tensor_make(DCP_FLOAT32, 2, sizes, memory);
    assert_int_equal(dcp_read(ck, rows, &box, &dst, NULL), DCP_ARG);
    box.offsets = huge;
    assert_int_equal(dcp_read(ck, rows, &box, &dst, NULL), DCP_ARG);
    dcp_value *object;
    assert_int_equal(dcp_read_object(ck, rows, &object, NULL), DCP_MISMATCH);
    dcp_checkpoint_close(ck);
}

static void find__names_of_single_ranks_need_a_rank(void **state)
{
    (void)state;
    dcp_checkpoint *ck;
    open_golden("2.13.0/rank_local/ckpt", &ck);
    assert_null(dcp_checkpoint_find(ck, dcp_str_of("mine")));
    assert_non_null(dcp_checkpoint_find(ck, dcp_str_of("rows")));
    for (int r = 0; r < 4; r++) {
        const dcp_item *item = dcp_checkpoint_find_rank(ck, dcp_str_of("mine"), r);
        assert_non_null(item);
        assert_int_equal(item->rank, r);
    }
    assert_null(dcp_checkpoint_find_rank(ck, dcp_str_of("mine"), 4));
    dcp_checkpoint_close(ck);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(read__any_slice_of_any_golden_item_equals_the_whole),
        cmocka_unit_test(read__targets_that_do_not_fit_are_refused),
        cmocka_unit_test(find__names_of_single_ranks_need_a_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
