/* Errors, contexts, arenas, buffers, sources, checked arithmetic. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "base/source.h"
#include "support/failing_alloc.h"

/* ---- errors ---- */

static void status_name__of_every_value(void **state)
{
    (void)state;
    assert_string_equal(dcp_status_name(DCP_OK), "OK");
    assert_string_equal(dcp_status_name(DCP_NOT_FOUND), "NOT_FOUND");
    assert_string_equal(dcp_status_name(DCP_FORMAT), "FORMAT");
    assert_string_equal(dcp_status_name(DCP_PEER), "PEER");
    assert_string_equal(dcp_status_name((dcp_status)-18), "?");
    assert_string_equal(dcp_status_name((dcp_status)1), "?");
}

static void fail__fills_every_field(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    err.native_code = 5;
    assert_int_equal(dcp__fail_at(&err, DCP_FORMAT, 12, "entry %d", 3), DCP_FORMAT);
    assert_int_equal(err.code, DCP_FORMAT);
    assert_int_equal(err.offset, 12);
    assert_int_equal(err.native_code, 0);
    assert_string_equal(err.message, "entry 3");
    assert_int_equal(dcp__fail(&err, DCP_ARG, "x"), DCP_ARG);
    assert_true(err.offset == DCP_NO_OFFSET);
    assert_int_equal(dcp__fail(NULL, DCP_ARG, "x"), DCP_ARG);
    assert_int_equal(dcp__fail_errno(NULL, ENOENT, "x"), DCP_NOT_FOUND);
    assert_int_equal(dcp__prefix(NULL, DCP_IO, "x"), DCP_IO);
}

static void fail_errno__chooses_the_code(void **state)
{
    (void)state;
    static const struct {
        int sys_errno;
        dcp_status code;
    } known[] = {{ENOENT, DCP_NOT_FOUND}, {ENOTDIR, DCP_NOT_FOUND}, {EEXIST, DCP_EXISTS},      {ENOSPC, DCP_NOSPACE},
                 {EDQUOT, DCP_NOSPACE},   {ENOMEM, DCP_NOMEM},      {ENOSYS, DCP_UNSUPPORTED}, {ENOTSUP, DCP_UNSUPPORTED},
                 {EIO, DCP_IO},           {EACCES, DCP_IO}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp__fail_errno(&err, known[i].sys_errno, "open %s", "f"), known[i].code);
        assert_int_equal(err.sys_errno, known[i].sys_errno);
        char expected[128];
        snprintf(expected, sizeof expected, "open f: %s", strerror(known[i].sys_errno));
        assert_string_equal(err.message, expected);
    }
}

static void fail__long_messages_are_cut_and_marked(void **state)
{
    (void)state;
    static char text[3000];
    dcp_error err = DCP_ERROR_INIT;
    memset(text, 'a', sizeof text - 1);
    dcp__fail(&err, DCP_ARG, "%s", text);
    assert_int_equal(strlen(err.message), sizeof err.message - 1);
    assert_string_equal(err.message + sizeof err.message - 5, "a...");
    text[sizeof err.message - 1] = 0; /* fits exactly */
    dcp__fail(&err, DCP_ARG, "%s", text);
    assert_string_equal(err.message, text);
    dcp__fail_errno(&err, EIO, "%s", text);
    assert_string_equal(err.message + sizeof err.message - 4, "...");
    dcp__fail(&err, DCP_ARG, "%s", text);
    dcp__prefix(&err, DCP_ARG, "b: ");
    assert_memory_equal(err.message, "b: aaa", 6);
    assert_string_equal(err.message + sizeof err.message - 5, "a...");
}

/* Number of bytes of text that are whole characters of UTF-8. */
static size_t whole_utf8(const char *text)
{
    size_t i = 0;
    while (text[i]) {
        unsigned char c = (unsigned char)text[i];
        size_t len = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4, k = 1;
        while (k < len && ((unsigned char)text[i + k] & 0xc0) == 0x80) {
            k++;
        }
        if (k < len || (c & 0xc0) == 0x80) {
            break;
        }
        i += len;
    }
    return i;
}

static void fail__cuts_between_characters(void **state)
{
    (void)state;
    static char text[3000];
    for (size_t shift = 0; shift < 4; shift++) {
        dcp_error err = DCP_ERROR_INIT;
        memset(text, 'a', shift);
        for (size_t i = shift; i + 4 < sizeof text; i += 4) {
            memcpy(text + i, "\xf0\x9f\x8c\x8d", 5);
        }
        dcp__fail(&err, DCP_ARG, "%s", text);
        assert_int_equal(whole_utf8(err.message), strlen(err.message));
        assert_true(strlen(err.message) >= sizeof err.message - 4);
        dcp__printable p = dcp__print(dcp_str_of(text));
        assert_int_equal(whole_utf8(p.text), strlen(p.text));
    }
}

static void prefix__keeps_the_rest(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    dcp__fail_at(&err, DCP_FORMAT, 7, "bad");
    assert_int_equal(dcp__prefix(&err, DCP_FORMAT, "file \"%s\": ", "x"), DCP_FORMAT);
    assert_string_equal(err.message, "file \"x\": bad");
    assert_int_equal(err.offset, 7);
}

static void print__escapes_and_cuts(void **state)
{
    (void)state;
    static char text[1000];
    assert_string_equal(dcp__print((dcp_str){"a\0b\n\x7f", 5}).text, "a\\x00b\\x0a\\x7f");
    assert_string_equal(dcp__print((dcp_str){NULL, 0}).text, "");
    memset(text, 1, sizeof text);
    dcp__printable p = dcp__print((dcp_str){text, sizeof text});
    assert_true(strlen(p.text) < sizeof p.text);
    assert_string_equal(p.text + strlen(p.text) - 3, "...");
    memset(text, '\xbf', sizeof text); /* no text at all */
    p = dcp__print((dcp_str){text, sizeof text});
    assert_true(strlen(p.text) < sizeof p.text);
}

/* ---- contexts ---- */

static void context__zero_means_the_documented_default(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.limits.max_depth = 3;
    dcp_context *ctx;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    assert_int_equal(ctx->limits.max_depth, 3);
    assert_int_equal(ctx->limits.max_parse_bytes, (uint64_t)4 << 30);
    assert_int_equal(ctx->limits.max_string_bytes, (uint64_t)1 << 30);
    assert_int_equal(ctx->limits.max_header_bytes, 100000000);
    assert_int_equal(ctx->limits.max_list_index, 1000000);
    assert_int_equal(ctx->memory_bytes, (uint64_t)192 << 20);
    assert_in_range(ctx->threads, 1, 8);
    dcp_context_free(ctx);
    dcp_context_free(NULL);
    const dcp_context *builtin = dcp__context(NULL);
    assert_int_equal(builtin->limits.max_depth, 256);
    assert_int_equal(builtin->memory_bytes, (uint64_t)192 << 20);
    assert_ptr_equal(dcp__context(ctx), ctx);
}

static void context__other_struct_size_is_refused(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx = NULL;
    opts.struct_size--;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_ARG);
    assert_int_equal(dcp_context_create(NULL, NULL, NULL), DCP_ARG);
    assert_null(ctx);
}

static dcp_status make_context(dcp_context *outer, void *user, dcp_error *err)
{
    (void)user;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    opts.allocator = &outer->allocator;
    dcp_status status = dcp_context_create(&opts, &ctx, err);
    if (status == DCP_OK) {
        dcp_context_free(ctx);
    }
    return status;
}

static void context__survives_failing_allocations(void **state)
{
    (void)state;
    assert_int_equal(failing_alloc_walk(make_context, NULL), 1);
}

typedef struct log_lines {
    int n;
    dcp_log_level level;
    char line[2000];
} log_lines;

static void keep_line(void *user, dcp_log_level level, const char *line)
{
    log_lines *l = user;
    l->n++;
    l->level = level;
    snprintf(l->line, sizeof l->line, "%s", line);
}

static void log__passes_what_is_important_enough(void **state)
{
    (void)state;
    log_lines l = {0};
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    opts.log = keep_line;
    opts.log_user = &l;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    dcp__log(ctx, DCP_LOG_INFO, "no");
    assert_int_equal(l.n, 0);
    dcp__log(ctx, DCP_LOG_WARNING, "%d of %d", 1, 2);
    assert_int_equal(l.n, 1);
    assert_int_equal(l.level, DCP_LOG_WARNING);
    assert_string_equal(l.line, "1 of 2");
    dcp_context_free(ctx);
}

static void alloc__impossible_sizes_are_refused(void **state)
{
    (void)state;
    dcp_context *ctx = dcp__context(NULL);
    void *array = NULL;
    size_t cap = 0;
    assert_null(dcp__calloc(ctx, SIZE_MAX / 2, 3));
    assert_null(dcp__alloc(ctx, SIZE_MAX));
    assert_null(dcp__alloc_aligned(ctx, 4096, SIZE_MAX - 100));
    assert_false(dcp__grow(ctx, &array, &cap, SIZE_MAX / 4, 16));
    assert_null(array);
    assert_int_equal(cap, 0);
}

static void alloc_aligned__is_aligned(void **state)
{
    (void)state;
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    for (size_t align = 8; align <= 2 << 20; align *= 2) {
        char *p = dcp__alloc_aligned(ctx, align, 100);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % align, 0);
        memset(p, 1, 100);
        dcp__free_aligned(ctx, p);
    }
    dcp__free_aligned(ctx, NULL);
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
}

/* ---- arenas ---- */

static void arena__blocks_do_not_overlap(void **state)
{
    (void)state;
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    dcp__arena a;
    unsigned seed = 1;
    uint8_t *blocks[500];
    size_t sizes[500];
    dcp__arena_init(&a, ctx, UINT64_MAX - 1);
    for (size_t i = 0; i < 500; i++) {
        sizes[i] = (size_t)rand_r(&seed) % 5000 + (i % 100 == 99 ? 3 << 20 : 0);
        blocks[i] = dcp__arena_alloc(&a, sizes[i]);
        assert_non_null(blocks[i]);
        assert_int_equal((uintptr_t)blocks[i] % 8, 0);
        memset(blocks[i], (int)(i % 251), sizes[i]);
    }
    for (size_t i = 0; i < 500; i++) {
        for (size_t k = 0; k < sizes[i]; k++) {
            if (blocks[i][k] != i % 251) {
                fail_msg("block %zu, byte %zu", i, k);
            }
        }
    }
    dcp__arena_reset(&a);
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
}

static void arena__limit_is_kept_and_told_from_out_of_memory(void **state)
{
    (void)state;
    dcp_context *ctx = dcp__context(NULL);
    dcp__arena a;
    dcp__arena_init(&a, ctx, 1000);
    size_t taken = 0;
    while (dcp__arena_alloc(&a, 40)) {
        taken += 40;
    }
    assert_in_range(taken, 960, 1000);
    assert_int_equal(dcp__arena_fail(&a, NULL), DCP_LIMIT);
    dcp__arena_reset(&a);
    assert_non_null(dcp__arena_alloc(&a, 1000));
    assert_null(dcp__arena_alloc(&a, 1));
    dcp__arena_reset(&a);
    assert_null(dcp__arena_alloc(&a, SIZE_MAX));
    assert_null(dcp__arena_alloc(&a, SIZE_MAX - 7));
    assert_null(dcp__arena_str(&a, (dcp_str){"", SIZE_MAX}).ptr);
    assert_int_equal(dcp__arena_fail(&a, NULL), DCP_LIMIT);
    dcp__arena_reset(&a);
}

static dcp_status fill_arena(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp__arena a;
    dcp_status status = DCP_OK;
    dcp__arena_init(&a, ctx, (uint64_t)1 << 30);
    for (int i = 0; i < 100 && status == DCP_OK; i++) {
        dcp_str s = dcp__arena_str(&a, (dcp_str){"abc\0def", 7});
        if (!s.ptr || !dcp__arena_alloc(&a, 10000)) {
            status = dcp__arena_fail(&a, err);
        } else {
            assert_memory_equal(s.ptr, "abc\0def\0", 8);
        }
    }
    dcp__arena_reset(&a);
    return status;
}

static void arena__survives_failing_allocations(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(fill_arena, NULL) >= 3);
}

/* ---- buffers and sources ---- */

static dcp_status fill_buf(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp__buf b;
    char expected[4000];
    size_t len = 0;
    dcp__buf_init(&b, ctx);
    for (int i = 0; i < 300; i++) {
        dcp__buf_put(&b, "ab", 2);
        dcp__buf_put_byte(&b, 0);
        dcp__buf_printf(&b, "%d", i);
        memcpy(expected + len, "ab", 3);
        len += 3;
        len += (size_t)snprintf(expected + len, sizeof expected - len, "%d", i);
    }
    dcp_status status = b.failed ? dcp__nomem(err) : DCP_OK;
    if (!b.failed) {
        assert_int_equal(b.len, len);
        assert_memory_equal(b.data, expected, len);
    }
    dcp__buf_reset(&b);
    return status;
}

static void buf__holds_what_was_put_and_survives_failing_allocations(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(fill_buf, NULL) >= 5);
}

static void buf__impossible_sizes_fail(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    dcp__buf_put(&b, "x", 1);
    assert_false(dcp__buf_reserve(&b, SIZE_MAX));
    assert_true(b.failed);
    dcp__buf_put(&b, "y", 1); /* ignored from now on */
    assert_int_equal(b.len, 1);
    dcp__buf_reset(&b);
    assert_false(b.failed);
}

static void source__reads_within_and_refuses_beyond(void **state)
{
    (void)state;
    dcp__source s = dcp__source_memory("0123456789", 10);
    char bytes[10] = {0};
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp__source_read(&s, 2, bytes, 3, NULL), DCP_OK);
    assert_memory_equal(bytes, "234", 3);
    assert_int_equal(dcp__source_read(&s, 10, bytes, 0, NULL), DCP_OK);
    assert_int_equal(dcp__source_read(&s, 8, bytes, 3, &err), DCP_FORMAT);
    assert_int_equal(err.offset, 8);
    assert_int_equal(dcp__source_read(&s, UINT64_MAX, bytes, 1, NULL), DCP_FORMAT);
    assert_int_equal(dcp__source_read(&s, 1, bytes, SIZE_MAX, NULL), DCP_FORMAT);
}

/* ---- arithmetic ---- */

static void checked__overflow_is_seen_and_leaves_the_result(void **state)
{
    (void)state;
    size_t s = 7;
    uint64_t u = 7;
    int64_t i = 7;
    assert_true(!dcp__add_size(SIZE_MAX, 1, &s) && s == 7);
    assert_true(!dcp__mul_size(SIZE_MAX / 2 + 1, 2, &s) && s == 7);
    assert_true(!dcp__add_u64(UINT64_MAX - 1, 2, &u) && u == 7);
    assert_true(!dcp__mul_u64((uint64_t)1 << 32, (uint64_t)1 << 32, &u) && u == 7);
    assert_true(!dcp__add_i64(INT64_MIN, -1, &i) && i == 7);
    assert_true(!dcp__mul_i64(INT64_MIN, -1, &i) && i == 7);
    assert_true(dcp__add_size(SIZE_MAX - 1, 1, &s) && s == SIZE_MAX);
    assert_true(dcp__mul_u64(UINT64_MAX / 5, 5, &u) && u == UINT64_MAX);
    assert_true(dcp__mul_i64(INT64_MIN, 1, &i) && i == INT64_MIN);
}

static void checked__ranges(void **state)
{
    (void)state;
    assert_true(dcp__range_fits(0, 0, 0));
    assert_true(dcp__range_fits(3, 7, 10));
    assert_false(dcp__range_fits(3, 8, 10));
    assert_false(dcp__range_fits(11, 0, 10));
    assert_false(dcp__range_fits(UINT64_MAX, 2, 10));
    assert_false(dcp__range_fits(2, UINT64_MAX, 10));
    assert_int_equal(dcp__align_up(0, 64), 0);
    assert_int_equal(dcp__align_up(1, 64), 64);
    assert_int_equal(dcp__align_up(64, 64), 64);
}

static void bytes__are_little_endian_at_any_address(void **state)
{
    (void)state;
    uint8_t b[9] = {0, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08};
    assert_int_equal(dcp__load16(b + 1), 0x0201);
    assert_int_equal(dcp__load32(b + 1), 0x04030201);
    assert_int_equal(dcp__load64(b + 1), 0x0807060504030201);
    dcp__store64(b + 1, 0x1122334455667788);
    assert_int_equal(b[1], 0x88);
    assert_int_equal(b[8], 0x11);
    dcp__store32(b + 1, 0xaabbccdd);
    dcp__store16(b + 5, 0xeeff);
    const uint8_t expected[] = {0, 0xdd, 0xcc, 0xbb, 0xaa, 0xff, 0xee, 0x22, 0x11};
    assert_memory_equal(b, expected, 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_name__of_every_value),
        cmocka_unit_test(fail__fills_every_field),
        cmocka_unit_test(fail_errno__chooses_the_code),
        cmocka_unit_test(fail__long_messages_are_cut_and_marked),
        cmocka_unit_test(fail__cuts_between_characters),
        cmocka_unit_test(prefix__keeps_the_rest),
        cmocka_unit_test(print__escapes_and_cuts),
        cmocka_unit_test(context__zero_means_the_documented_default),
        cmocka_unit_test(context__other_struct_size_is_refused),
        cmocka_unit_test(context__survives_failing_allocations),
        cmocka_unit_test(log__passes_what_is_important_enough),
        cmocka_unit_test(alloc__impossible_sizes_are_refused),
        cmocka_unit_test(alloc_aligned__is_aligned),
        cmocka_unit_test(arena__blocks_do_not_overlap),
        cmocka_unit_test(arena__limit_is_kept_and_told_from_out_of_memory),
        cmocka_unit_test(arena__survives_failing_allocations),
        cmocka_unit_test(buf__holds_what_was_put_and_survives_failing_allocations),
        cmocka_unit_test(buf__impossible_sizes_fail),
        cmocka_unit_test(source__reads_within_and_refuses_beyond),
        cmocka_unit_test(checked__overflow_is_seen_and_leaves_the_result),
        cmocka_unit_test(checked__ranges),
        cmocka_unit_test(bytes__are_little_endian_at_any_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
