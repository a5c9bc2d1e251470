/* Tensors with scales: any box of the tensor that they stand for, against a plain loop over all elements. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "dcp/dcp.h"
#include "support/memory_store.h"
#include "support/random.h"

static void add(dcp_value *root, const char *name, dcp_dtype dtype, int ndim, const int64_t *extents, void *data)
{
    dcp_tensor t = dcp_tensor_make(dtype, ndim, extents, data);
    assert_int_equal(dcp_dict_set_tensor(root, name, &t, NULL), DCP_OK);
}

static void save(dcp_value *root)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = storage;
    opts.overwrite = true;
    if (dcp_save(NULL, "q", root, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
}

static dcp_quantized find(const dcp_checkpoint *ck, const char *name)
{
    dcp_quantized q;
    assert_true(dcp_quantized_find(ck, dcp_checkpoint_find(ck, dcp_str_of(name)), &q));
    return q;
}

/* Reads random boxes, now and then into transposed memory, and compares with the whole. */
static void check_boxes(test_random *rnd, dcp_checkpoint *ck, const dcp_quantized *q, int64_t block, const float *whole)
{
    for (int round = 0; round < 60; round++) {
        int64_t offsets[3], sizes[3], strides[3], elems = 1;
        for (int d = 0; d < q->ndim; d++) {
            offsets[d] = test_random_below(rnd, q->extents[d]);
            sizes[d] = 1 + test_random_below(rnd, q->extents[d] - offsets[d]);
            strides[d] = elems; /* first dimension innermost */
            elems *= sizes[d];
        }
        float *found = malloc((size_t)elems * sizeof *found);
        dcp_box box = {offsets, sizes};
        dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, q->ndim, sizes, found);
        bool is_transposed = round % 2;
        dst.strides = is_transposed ? strides : NULL;
        dcp_error err = DCP_ERROR_INIT;
        if (dcp_read_dequantized(ck, q, block, &box, &dst, NULL, &err) != DCP_OK) {
            fail_msg("%s", err.message);
        }
        for (int64_t i = 0; i < elems; i++) {
            int64_t rest = i, at = 0, to = 0, index[3];
            for (int d = q->ndim - 1; d >= 0; d--) {
                index[d] = rest % sizes[d];
                rest /= sizes[d];
            }
            for (int d = 0; d < q->ndim; d++) {
                at = at * q->extents[d] + offsets[d] + index[d];
                to += index[d] * strides[d];
            }
            assert_memory_equal(&found[is_transposed ? to : i], &whole[at], sizeof *whole);
        }
        free(found);
    }
}

static void dequantize__any_box_of_blocks(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("blocks");
    enum { ROWS = 37, COLUMNS = 26, BLOCK = 8 };
    int64_t shape[] = {ROWS, COLUMNS}, blocks[] = {5, 4};
    static float weights[ROWS * COLUMNS], scales[5 * 4], whole[ROWS * COLUMNS];
    for (int i = 0; i < 20; i++) {
        scales[i] = (float)(1 + test_random_below(&rnd, 1000)) / 64;
    }
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        weights[i] = (float)(test_random_below(&rnd, 2000) - 1000);
        whole[i] = weights[i] * scales[i / COLUMNS / BLOCK * 4 + i % COLUMNS / BLOCK];
    }
    dcp_value *root;
    dcp_dict_create(NULL, &root, NULL);
    add(root, "w.weight", DCP_FLOAT32, 2, shape, weights);
    add(root, "w.weight_scale_inv", DCP_FLOAT32, 2, blocks, scales);
    add(root, "v.weight", DCP_FLOAT32, 2, shape, weights);
    save(root);
    dcp_checkpoint *ck = reopen("q");
    dcp_quantized q = find(ck, "w.weight"), none;
    assert_false(dcp_quantized_find(ck, dcp_checkpoint_find(ck, dcp_str_of("v.weight")), &none));
    assert_false(dcp_quantized_find(ck, dcp_checkpoint_find(ck, dcp_str_of("w.weight_scale_inv")), &none));
    check_boxes(&rnd, ck, &q, BLOCK, whole);
    dcp_checkpoint_close(ck);
}

static void dequantize__any_box_of_groups(void **state)
{
    (void)state;
    test_random rnd = test_random_seeded("groups");
    enum { A = 3, B = 4, GROUPS = 5, BYTES = 6, WIDTH = GROUPS * BYTES * 2 };
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    int64_t shape[] = {A, B, GROUPS, BYTES}, groups[] = {A, B, GROUPS};
    static uint8_t bytes[A * B * GROUPS * BYTES], scales[A * B * GROUPS];
    static float whole[A * B * WIDTH];
    for (size_t i = 0; i < sizeof scales; i++) {
        scales[i] = (uint8_t)(110 + test_random_below(&rnd, 40));
    }
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)test_random_below(&rnd, 256);
        whole[2 * i] = ldexpf(values[bytes[i] & 15], scales[i / BYTES] - 127);
        whole[2 * i + 1] = ldexpf(values[bytes[i] >> 4], scales[i / BYTES] - 127);
    }
    dcp_value *root;
    dcp_dict_create(NULL, &root, NULL);
    add(root, "e_blocks", DCP_UINT8, 4, shape, bytes);
    add(root, "e_scales", DCP_UINT8, 3, groups, scales);
    save(root);
    dcp_checkpoint *ck = reopen("q");
    dcp_quantized q = find(ck, "e_blocks");
    assert_true(q.ndim == 3 && q.extents[2] == WIDTH);
    check_boxes(&rnd, ck, &q, DCP_QUANTIZED_BLOCK, whole);
    dcp_checkpoint_close(ck);
}

static void dequantize__what_does_not_fit_is_told(void **state)
{
    (void)state;
    float w[6] = {1, 2, 3, 4, 5, 60000}, scales[1] = {2}, out[6];
    uint16_t half[6];
    int64_t shape[] = {2, 3}, one[] = {1, 1}, flat[] = {1};
    uint64_t lost = 7;
    dcp_value *root;
    dcp_dict_create(NULL, &root, NULL);
    add(root, "w.weight", DCP_FLOAT32, 2, shape, w);
    add(root, "w.weight_scale_inv", DCP_FLOAT32, 2, one, scales);
    add(root, "x.weight", DCP_FLOAT32, 2, shape, w);
    add(root, "x.weight_scale_inv", DCP_FLOAT32, 1, flat, scales);
    save(root);
    dcp_checkpoint *ck = reopen("q");
    dcp_quantized q = find(ck, "w.weight"), x = find(ck, "x.weight");
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, shape, out), small = dcp_tensor_make(DCP_FLOAT16, 2, shape, half);
    dcp_tensor ints = dcp_tensor_make(DCP_INT32, 2, shape, out), other = dcp_tensor_make(DCP_FLOAT32, 2, one, out);
    assert_int_equal(dcp_read_dequantized(ck, &q, 128, NULL, &dst, &lost, NULL), DCP_OK);
    assert_true(lost == 0 && out[5] == 120000);
    assert_int_equal(dcp_read_dequantized(ck, &q, 128, NULL, &small, &lost, NULL), DCP_OK);
    assert_true(lost == 1 && half[5] == 0x7c00);
    assert_int_equal(dcp_read_dequantized(ck, &q, 2, NULL, &dst, NULL, NULL), DCP_MISMATCH); /* 2 blocks, 1 scale */
    assert_int_equal(dcp_read_dequantized(ck, &x, 128, NULL, &dst, NULL, NULL), DCP_MISMATCH);
    assert_int_equal(dcp_read_dequantized(ck, &q, 128, NULL, &ints, NULL, NULL), DCP_UNSUPPORTED);
    assert_int_equal(dcp_read_dequantized(ck, &q, 128, NULL, &other, NULL, NULL), DCP_MISMATCH);
    assert_int_equal(dcp_read_dequantized(ck, &q, 0, NULL, &dst, NULL, NULL), DCP_ARG);
    dcp_checkpoint_close(ck);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dequantize__any_box_of_blocks),
        cmocka_unit_test(dequantize__any_box_of_groups),
        cmocka_unit_test(dequantize__what_does_not_fit_is_told),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
