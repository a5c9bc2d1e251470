#include "format/record_cache.h"

#include <string.h>

#include "base/buf.h"
#include "format/pickle_writer.h"
#include "support/failing_alloc.h"

static const dcp__archive_opts opts = {"archive", false, 64};

/* The layout that the cache gives has the bytes of one that is made anew. */
static void check_layout(dcp_context *ctx, dcp__record_cache *c, dcp_dtype dtype, int ndim, const int64_t *extents,
                         uint64_t bytes)
{
    const dcp__archive_layout *cached;
    dcp__archive_layout *fresh;
    dcp__buf pickle;
    uint32_t crc = 0xabcdef01;
    dcp__buf_init(&pickle, ctx);
    assert_int_equal(dcp__record_cache_get(c, dtype, ndim, extents, &cached, NULL), DCP_OK);
    assert_int_equal(dcp__pickle_tensor(&pickle, dtype, ndim, extents, NULL), DCP_OK);
    assert_int_equal(dcp__archive_layout_create(ctx, &opts, pickle.data, pickle.len, &bytes, 1, &fresh, NULL), DCP_OK);
    assert_int_equal(dcp__archive_length(cached), dcp__archive_length(fresh));
    for (size_t k = 0; k < 2; k++) {
        uint8_t a[4096], b[4096];
        size_t n = dcp__archive_piece_bytes(fresh, k);
        assert_int_equal(dcp__archive_piece_bytes(cached, k), n);
        assert_true(n <= sizeof a);
        dcp__archive_piece(cached, k, &crc, a);
        dcp__archive_piece(fresh, k, &crc, b);
        assert_memory_equal(a, b, n);
    }
    dcp__archive_layout_free(fresh);
    dcp__buf_reset(&pickle);
}

static void check_shapes(size_t n_slots)
{
    dcp_context *ctx;
    dcp__record_cache *c;
    assert_int_equal(dcp_context_create(NULL, &ctx, NULL), DCP_OK);
    assert_int_equal(dcp__record_cache_create(ctx, &opts, n_slots, &c, NULL), DCP_OK);
    for (int round = 0; round < 2; round++) {
        for (int64_t i = 0; i < 10; i++) {
            int64_t extents[] = {i, 3};
            check_layout(ctx, c, DCP_FLOAT32, 2, extents, (uint64_t)i * 12);
            check_layout(ctx, c, DCP_BFLOAT16, 2, extents, (uint64_t)i * 6);
            check_layout(ctx, c, DCP_FLOAT64, 0, NULL, 8);
        }
    }
    dcp__record_cache_free(c);
    dcp_context_free(ctx);
}

static void record_cache__layouts_are_those_made_anew(void **state)
{
    (void)state;
    check_shapes(256);
}

static void record_cache__one_slot_is_enough(void **state)
{
    (void)state;
    check_shapes(1);
    check_shapes(0);
}

static void record_cache__equal_shapes_share_a_layout(void **state)
{
    (void)state;
    dcp_context *ctx;
    dcp__record_cache *c;
    const dcp__archive_layout *first, *second;
    int64_t a[] = {4, 5}, b[] = {4, 5};
    assert_int_equal(dcp_context_create(NULL, &ctx, NULL), DCP_OK);
    assert_int_equal(dcp__record_cache_create(ctx, &opts, 16, &c, NULL), DCP_OK);
    assert_int_equal(dcp__record_cache_get(c, DCP_INT64, 2, a, &first, NULL), DCP_OK);
    assert_int_equal(dcp__record_cache_get(c, DCP_INT64, 2, b, &second, NULL), DCP_OK);
    assert_ptr_equal(first, second);
    b[0] = -1;
    assert_int_equal(dcp__record_cache_get(c, DCP_INT64, 2, b, &second, NULL), DCP_ARG);
    dcp__record_cache_free(c);
    dcp_context_free(ctx);
}

static dcp_status use(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp__record_cache *c;
    const dcp__archive_layout *l;
    (void)user;
    dcp_status status = dcp__record_cache_create(ctx, &opts, 2, &c, err);
    if (status != DCP_OK) {
        return status;
    }
    for (int64_t i = 0; i < 4 && status == DCP_OK; i++) {
        status = dcp__record_cache_get(c, DCP_UINT8, 1, &i, &l, err);
    }
    dcp__record_cache_free(c);
    return status;
}

static void record_cache__survives_failing_allocations(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(use, NULL) > 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(record_cache__layouts_are_those_made_anew),
        cmocka_unit_test(record_cache__one_slot_is_enough),
        cmocka_unit_test(record_cache__equal_shapes_share_a_layout),
        cmocka_unit_test(record_cache__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
