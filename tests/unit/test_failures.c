#include "base/failures.h"

#include <stdio.h>
#include <string.h>

#include "support/failing_alloc.h"

static dcp_failure failure(int rank, const char *message)
{
    return (dcp_failure){rank, DCP_IO, 5, -7, 4096, message};
}

static void failures__sorted_by_rank_and_copied(void **state)
{
    (void)state;
    dcp_failures *f;
    char text[] = "first";
    assert_int_equal(dcp_failures_create(NULL, &f, NULL), DCP_OK);
    const int order[] = {5, 1, 9, 3, 0};
    for (int i = 0; i < 5; i++) {
        dcp_failure one = failure(order[i], text);
        dcp__failures_add(f, &one);
    }
    memset(text, 'x', sizeof text - 1);
    const int sorted[] = {0, 1, 3, 5, 9};
    assert_int_equal(dcp_failures_count(f), 5);
    for (size_t i = 0; i < 5; i++) {
        const dcp_failure *one = dcp_failures_at(f, i);
        assert_int_equal(one->rank, sorted[i]);
        assert_int_equal(one->code, DCP_IO);
        assert_int_equal(one->sys_errno, 5);
        assert_int_equal(one->native_code, -7);
        assert_int_equal(one->offset, 4096);
        assert_string_equal(one->message, "first");
    }
    assert_null(dcp_failures_at(f, 5));
    dcp_failures_free(f);
}

static void failures__rank_keeps_its_first_cause(void **state)
{
    (void)state;
    dcp_failures *f;
    assert_int_equal(dcp_failures_create(NULL, &f, NULL), DCP_OK);
    dcp_failure one = failure(2, "cause"), other = failure(2, "consequence");
    dcp__failures_add(f, &one);
    dcp__failures_add(f, &other);
    assert_int_equal(dcp_failures_count(f), 1);
    assert_string_equal(dcp_failures_at(f, 0)->message, "cause");
    dcp__failures_clear(f);
    assert_int_equal(dcp_failures_count(f), 0);
    dcp__failures_add(f, &other);
    assert_string_equal(dcp_failures_at(f, 0)->message, "consequence");
    dcp_failures_free(f);
}

static void failures__null_is_an_empty_list(void **state)
{
    (void)state;
    dcp_failure one = failure(0, "");
    dcp__failures_add(NULL, &one);
    dcp__failures_clear(NULL);
    assert_int_equal(dcp_failures_count(NULL), 0);
    assert_int_equal(dcp_failures_lost(NULL), 0);
    assert_null(dcp_failures_at(NULL, 0));
    dcp_failures_free(NULL);
    assert_int_equal(dcp_failures_create(NULL, NULL, NULL), DCP_ARG);
}

/* The list loses what it has no memory for and says how many. */
static void failures__without_memory_are_counted_as_lost(void **state)
{
    (void)state;
    failing_alloc fa;
    for (size_t n = 0; n < 50; n++) {
        dcp_context *ctx = failing_alloc_context(&fa, 1);
        dcp_failures *f;
        assert_int_equal(dcp_failures_create(ctx, &f, NULL), DCP_OK);
        fa.calls = 0;
        fa.fail_at = n;
        for (int r = 0; r < 20; r++) {
            dcp_failure one = failure(r, "no space left");
            dcp__failures_add(f, &one);
        }
        assert_int_equal(dcp_failures_lost(f), fa.failed);
        assert_int_equal(dcp_failures_count(f) + dcp_failures_lost(f), 20);
        dcp_failures_free(f);
        assert_int_equal(fa.live, 1);
        dcp_context_free(ctx);
    }
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    dcp_failures *f;
    fa.fail_at = fa.calls;
    assert_int_equal(dcp_failures_create(ctx, &f, NULL), DCP_NOMEM);
    dcp_context_free(ctx);
}

static void fail_peers__takes_numbers_of_the_first(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    const dcp_failure causes[] = {failure(3, "disk full"), failure(4, "crc wrong")};
    assert_int_equal(dcp__fail_peers(&err, "write", causes, 2, 8), DCP_PEER);
    assert_int_equal(err.code, DCP_PEER);
    assert_int_equal(err.rank, 3);
    assert_int_equal(err.sys_errno, 5);
    assert_int_equal(err.native_code, -7);
    assert_int_equal(err.offset, 4096);
    assert_string_equal(err.message, "write failed on 2 of 8 ranks: rank 3: disk full; rank 4: crc wrong");
    assert_int_equal(dcp__fail_peers(NULL, "write", causes, 2, 8), DCP_PEER);
}

/* Eight long causes: each is there with its beginning, cut between characters, and the number of the rest. */
static void fail_peers__long_causes_share_the_room(void **state)
{
    (void)state;
    static char text[DCP__CAUSES_SHOWN][DCP_ERROR_MESSAGE_BYTES];
    dcp_failure causes[DCP__CAUSES_SHOWN];
    for (int shift = 0; shift < 3; shift++) {
        for (int i = 0; i < DCP__CAUSES_SHOWN; i++) {
            int at = snprintf(text[i], sizeof text[i], "cause %d%.*s", i, shift, "ab");
            while (at + 3 < (int)sizeof text[i]) {
                at += snprintf(text[i] + at, sizeof text[i] - (size_t)at, "\xe2\x82\xac");
            }
            causes[i] = failure(2147483640 + i, text[i]);
        }
        dcp_error err = DCP_ERROR_INIT;
        dcp__fail_peers(&err, "write", causes, 2147483647, 2147483647);
        assert_non_null(memchr(err.message, 0, sizeof err.message));
        for (int i = 0; i < DCP__CAUSES_SHOWN; i++) {
            char want[64];
            snprintf(want, sizeof want, "rank %d: cause %d%.*s\xe2\x82\xac", 2147483640 + i, i, shift, "ab");
            assert_non_null(strstr(err.message, want));
        }
        assert_non_null(strstr(err.message, "and 2147483639 more"));
        for (const char *cut = strstr(err.message, "..."); cut; cut = strstr(cut + 3, "...")) {
            assert_memory_equal(cut - 3, "\xe2\x82\xac", 3);
        }
    }
}

/* What short causes do not need goes to a long one. */
static void fail_peers__short_causes_leave_room(void **state)
{
    (void)state;
    static char text[DCP_ERROR_MESSAGE_BYTES];
    memset(text, 'y', 600);
    dcp_error err = DCP_ERROR_INIT;
    const dcp_failure causes[] = {failure(0, "a"), failure(1, text), failure(2, "b")};
    dcp__fail_peers(&err, "read", causes, 3, 3);
    assert_non_null(strstr(err.message, text));
    assert_non_null(strstr(err.message, "rank 2: b"));
}

static void error_set__fills_as_the_library_does(void **state)
{
    (void)state;
    dcp_error err = {sizeof err, DCP_OK, 3, 4, 5, 6, "x"};
    assert_int_equal(dcp_error_set(&err, DCP_DEVICE, "code %d", 12), DCP_DEVICE);
    assert_int_equal(err.code, DCP_DEVICE);
    assert_int_equal(err.sys_errno, 0);
    assert_int_equal(err.native_code, 0);
    assert_true(err.offset == DCP_NO_OFFSET);
    assert_string_equal(err.message, "code 12");
    assert_int_equal(dcp_error_set(NULL, DCP_IO, "nobody listens"), DCP_IO);
}

static void context_resize__uses_the_allocator_of_the_context(void **state)
{
    (void)state;
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    char *block = dcp_context_resize(ctx, NULL, 10);
    assert_int_equal(fa.live, 2);
    memcpy(block, "123456789", 10);
    block = dcp_context_resize(ctx, block, 1000);
    assert_string_equal(block, "123456789");
    assert_null(dcp_context_resize(ctx, block, 0));
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
    block = dcp_context_resize(NULL, NULL, 1);
    assert_non_null(block);
    dcp_context_resize(NULL, block, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(failures__sorted_by_rank_and_copied),
        cmocka_unit_test(failures__rank_keeps_its_first_cause),
        cmocka_unit_test(failures__null_is_an_empty_list),
        cmocka_unit_test(failures__without_memory_are_counted_as_lost),
        cmocka_unit_test(fail_peers__takes_numbers_of_the_first),
        cmocka_unit_test(fail_peers__long_causes_share_the_room),
        cmocka_unit_test(fail_peers__short_causes_leave_room),
        cmocka_unit_test(error_set__fills_as_the_library_does),
        cmocka_unit_test(context_resize__uses_the_allocator_of_the_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
