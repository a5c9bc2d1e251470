#include "format/transform.h"

#include <zstd.h>

#include "base/buf.h"
#include "support/failing_alloc.h"
#include "support/safetensors_files.h"

static dcp_context *ctx;

static int setup(void **state)
{
    (void)state;
    return dcp_context_create(NULL, &ctx, NULL);
}

static int teardown(void **state)
{
    (void)state;
    dcp_context_free(ctx);
    return 0;
}

static const char one[] = "stream.zstd/1", two[] = "stream.zstd/1,stream.zstd/1";

static dcp_status collect(void *user, const void *bytes, size_t n, dcp_error *err)
{
    dcp__buf *b = user;
    assert_true(n > 0);
    dcp__buf_put(b, bytes, n);
    return b->failed ? dcp__nomem(err) : DCP_OK;
}

typedef dcp_status (*direction)(dcp_context *, dcp_str, const dcp__source *, dcp__sink_fn, void *, dcp_error *);

static dcp__buf apply(direction fn, const char *descriptors, const void *bytes, size_t n)
{
    dcp__buf out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    dcp__source src = dcp__source_memory(bytes, n);
    if (fn(ctx, dcp_str_of(descriptors), &src, collect, &out, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    return out;
}

static dcp_error decode_fails(const char *descriptors, const void *bytes, size_t n)
{
    dcp__buf out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    dcp__source src = dcp__source_memory(bytes, n);
    dcp_status status = dcp__transform_decode(ctx, dcp_str_of(descriptors), &src, collect, &out, &err);
    assert_int_not_equal(status, DCP_OK);
    assert_int_equal(status, err.code);
    dcp__buf_reset(&out);
    return err;
}

static void expect_bytes(dcp__buf *b, const void *bytes, size_t n)
{
    assert_int_equal(b->len, n);
    assert_true(n == 0 || memcmp(b->data, bytes, n) == 0);
    dcp__buf_reset(b);
}

/* Text that compresses, but not to nothing. */
static uint8_t *sample(size_t n)
{
    uint8_t *p = malloc(n + 1);
    uint64_t random = 42;
    for (size_t i = 0; i < n; i++) {
        p[i] = (uint8_t)('a' + st_random(&random) % 7);
    }
    return p;
}

static void append_frame(dcp__buf *b, const void *bytes, size_t n)
{
    size_t bound = ZSTD_compressBound(n);
    assert_true(dcp__buf_reserve(b, bound));
    size_t len = ZSTD_compress(b->data + b->len, bound, bytes, n, 1);
    assert_false(ZSTD_isError(len));
    b->len += len;
}

/* ---- descriptors ---- */

static void transform__known_descriptors_pass(void **state)
{
    (void)state;
    static const char *const good[] = {"", "stream.zstd/1", "stream.zstd/1.5", "stream.zstd/1.0.3",
                                       "stream.zstd/1,stream.zstd/1.2"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_int_equal(dcp__transform_check(dcp_str_of(good[i]), NULL), DCP_OK);
    }
    assert_int_equal(dcp__transform_check((dcp_str){NULL, 0}, NULL), DCP_OK);
}

static void transform__other_descriptors_are_unsupported(void **state)
{
    (void)state;
    static const char *const bad[] = {"stream.zstd",
                                      "stream.zstd/",
                                      "stream.zstd/2",
                                      "stream.zstd/11",
                                      "stream.zstd/.1",
                                      "stream.zstd@here/1",
                                      "stream.lz4/1",
                                      "STREAM.ZSTD/1",
                                      "/1",
                                      ",",
                                      "stream.zstd/1,",
                                      ",stream.zstd/1",
                                      "stream.zstd/1,stream.lz4/1",
                                      "stream.zstd/1,stream.zstd/1,stream.zstd/1,stream.zstd/1,stream.zstd/1",
                                      " stream.zstd/1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(dcp__transform_check(dcp_str_of(bad[i]), NULL), DCP_UNSUPPORTED);
        dcp__source src = dcp__source_memory("", 0);
        assert_int_equal(dcp__transform_decode(ctx, dcp_str_of(bad[i]), &src, collect, NULL, NULL), DCP_UNSUPPORTED);
        assert_int_equal(dcp__transform_encode(ctx, dcp_str_of(bad[i]), &src, collect, NULL, NULL), DCP_UNSUPPORTED);
    }
}

/* ---- decoding ---- */

/* The shapes case holds the same state in all releases; its record of `big` is one stored zip member. */
static void transform__golden_records_decode(void **state)
{
    (void)state;
    glob_t files;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/zstd/ckpt/__0_0.distcp", 0, NULL, &files), 0);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        st_file f = st_load(files.gl_pathv[i]);
        dcp__buf out = apply(dcp__transform_decode, one, f.bytes, f.len); /* all records, frame behind frame */
        assert_true(out.len > 300 * 257 * 4);
        assert_memory_equal(out.data, "PK\003\004", 4);
        assert_non_null(memmem(out.data + out.len - 22, 22, "PK\005\006", 4));
        dcp__buf_reset(&out);
        free(f.bytes);
    }
    assert_true(files.gl_pathc >= 2);
    globfree(&files);
}

static void transform__concatenated_and_empty_frames_decode(void **state)
{
    (void)state;
    static const uint8_t empty[] = {0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0}; /* as formats.md 7 has it */
    static const uint8_t skippable[] = {0x53, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'x', 'y', 'z'};
    dcp__buf in;
    dcp__buf_init(&in, ctx);
    dcp__buf_put(&in, empty, sizeof empty);
    append_frame(&in, "hello ", 6);
    dcp__buf_put(&in, empty, sizeof empty);
    dcp__buf_put(&in, skippable, sizeof skippable);
    append_frame(&in, "world", 5);
    dcp__buf_put(&in, empty, sizeof empty);
    dcp__buf out = apply(dcp__transform_decode, one, in.data, in.len);
    expect_bytes(&out, "hello world", 11);
    dcp__buf_reset(&in);
}

static void transform__no_descriptor_copies(void **state)
{
    (void)state;
    uint8_t *bytes = sample(700001);
    dcp__buf out = apply(dcp__transform_decode, "", bytes, 700001);
    expect_bytes(&out, bytes, 700001);
    out = apply(dcp__transform_encode, "", bytes, 700001);
    expect_bytes(&out, bytes, 700001);
    free(bytes);
}

static void transform__two_descriptors_decode_twice(void **state)
{
    (void)state;
    size_t n = 3000000;
    uint8_t *bytes = sample(n);
    dcp__buf inner, outer;
    dcp__buf_init(&inner, ctx);
    dcp__buf_init(&outer, ctx);
    append_frame(&inner, bytes, n);
    append_frame(&outer, inner.data, inner.len);
    dcp__buf out = apply(dcp__transform_decode, two, outer.data, outer.len);
    expect_bytes(&out, bytes, n);
    out = apply(dcp__transform_decode, one, outer.data, outer.len);
    expect_bytes(&out, inner.data, inner.len);
    dcp__buf_reset(&inner);
    dcp__buf_reset(&outer);
    free(bytes);
}

static void transform__every_truncation_is_refused_at_the_end(void **state)
{
    (void)state;
    dcp__buf in;
    dcp__buf_init(&in, ctx);
    append_frame(&in, "first frame", 11);
    size_t first = in.len;
    append_frame(&in, "second frame", 12);
    for (size_t len = 0; len < in.len; len++) {
        if (len == first) {
            continue; /* one whole frame */
        }
        dcp_error err = decode_fails(one, in.data, len);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_int_equal(err.offset, len);
    }
    dcp__buf_reset(&in);
}

static void transform__garbage_behind_a_frame_is_refused_where_it_starts(void **state)
{
    (void)state;
    static const char *const garbage[] = {"garbage", "\x27\xb5\x2f\xfd more", "PK\003\004"};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        dcp__buf in;
        dcp__buf_init(&in, ctx);
        append_frame(&in, "frame", 5);
        size_t end = in.len;
        dcp__buf_put(&in, garbage[i], strlen(garbage[i]));
        dcp_error err = decode_fails(one, in.data, in.len);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_int_equal(err.offset, end);
        dcp__buf_reset(&in);
    }
}

static void transform__faults_of_a_later_stage_have_no_offset(void **state)
{
    (void)state;
    dcp__buf in;
    dcp__buf_init(&in, ctx);
    append_frame(&in, "no frame", 8);
    dcp_error err = decode_fails(two, in.data, in.len);
    assert_int_equal(err.code, DCP_FORMAT);
    assert_true(err.offset == DCP_NO_OFFSET);
    dcp__buf_reset(&in);
}

static void transform__damaged_frames_are_refused(void **state)
{
    (void)state;
    /* reserved block type */
    static const uint8_t bad_block[] = {0x28, 0xb5, 0x2f, 0xfd, 0x20, 5, 7, 0, 0, 1, 2, 3};
    /* frame header that wants a dictionary of number 7 */
    static const uint8_t dictionary[] = {0x28, 0xb5, 0x2f, 0xfd, 0x21, 7, 0, 1, 0, 0};
    /* a window of 2^28: exponent 18 over 2^10 */
    static const uint8_t window[] = {0x28, 0xb5, 0x2f, 0xfd, 0x00, 18 << 3, 1, 0, 0};
    assert_int_equal(decode_fails(one, bad_block, sizeof bad_block).code, DCP_FORMAT);
    assert_int_equal(decode_fails(one, dictionary, sizeof dictionary).code, DCP_UNSUPPORTED);
    assert_int_equal(decode_fails(one, window, sizeof window).code, DCP_LIMIT);
}

static void transform__wrong_frame_checksums_are_told(void **state)
{
    (void)state;
    uint8_t frame[64];
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
    size_t n = ZSTD_compress2(c, frame, sizeof frame, "checked", 7);
    ZSTD_freeCCtx(c);
    dcp__buf out = apply(dcp__transform_decode, one, frame, n);
    expect_bytes(&out, "checked", 7);
    frame[n - 1] ^= 1;
    assert_int_equal(decode_fails(one, frame, n).code, DCP_CHECKSUM);
}

/* ---- pieces ---- */

typedef struct slow_source {
    const uint8_t *bytes;
    size_t largest;
    dcp_status fail_with;
} slow_source;

static dcp_status read_slowly(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    slow_source *s = self->user;
    if (s->fail_with && offset > 0) {
        return dcp__fail(err, s->fail_with, "as ordered");
    }
    s->largest = n > s->largest ? n : s->largest;
    memcpy(buf, s->bytes + offset, n);
    return DCP_OK;
}

static dcp_status refuse(void *user, const void *bytes, size_t n, dcp_error *err)
{
    (void)user;
    (void)bytes;
    (void)n;
    return dcp__fail(err, DCP_CANCELED, "enough");
}

/* 64 MiB of zeros: neither side may be held whole. */
static dcp_status count_bounded(void *user, const void *bytes, size_t n, dcp_error *err)
{
    uint64_t *total = user;
    (void)bytes;
    (void)err;
    assert_true(n <= (size_t)1 << 20);
    *total += n;
    return DCP_OK;
}

static void transform__large_records_pass_in_pieces(void **state)
{
    (void)state;
    size_t n = (size_t)64 << 20;
    uint8_t *zeros = calloc(n, 1);
    slow_source slow = {zeros, 0, DCP_OK};
    dcp__source src = {.read = read_slowly, .size = n, .user = &slow};
    dcp__buf packed;
    dcp__buf_init(&packed, ctx);
    assert_int_equal(dcp__transform_encode(ctx, dcp_str_of(one), &src, collect, &packed, NULL), DCP_OK);
    assert_true(slow.largest <= (size_t)1 << 20);
    uint64_t total = 0;
    dcp__source again = dcp__source_memory(packed.data, packed.len);
    assert_int_equal(dcp__transform_decode(ctx, dcp_str_of(one), &again, count_bounded, &total, NULL), DCP_OK);
    assert_int_equal(total, n);
    dcp__buf_reset(&packed);
    free(zeros);
}

static void transform__failures_of_source_and_sink_pass_through(void **state)
{
    (void)state;
    size_t n = 2000000;
    uint8_t *bytes = sample(n);
    dcp__buf packed = apply(dcp__transform_encode, one, bytes, n);
    slow_source slow = {bytes, 0, DCP_IO};
    dcp__source failing = {.read = read_slowly, .size = n, .user = &slow};
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    assert_int_equal(dcp__transform_encode(ctx, dcp_str_of(one), &failing, collect, &out, NULL), DCP_IO);
    slow.bytes = packed.data;
    failing.size = packed.len;
    assert_int_equal(dcp__transform_decode(ctx, dcp_str_of(two), &failing, collect, &out, NULL), DCP_FORMAT);
    assert_int_equal(dcp__transform_decode(ctx, dcp_str_of(one), &failing, collect, &out, NULL), DCP_IO);
    dcp__source src = dcp__source_memory(packed.data, packed.len);
    assert_int_equal(dcp__transform_decode(ctx, dcp_str_of(one), &src, refuse, NULL, NULL), DCP_CANCELED);
    src = dcp__source_memory(bytes, n);
    assert_int_equal(dcp__transform_encode(ctx, dcp_str_of(two), &src, refuse, NULL, NULL), DCP_CANCELED);
    dcp__buf_reset(&packed);
    dcp__buf_reset(&out);
    free(bytes);
}

/* ---- encoding ---- */

static void transform__frames_have_the_head_of_pytorchs(void **state)
{
    (void)state;
    st_file golden = st_load(DCP_TEST_DIR "/golden/2.15.0/zstd/ckpt/__0_0.distcp");
    static const size_t sizes[] = {1, 1577, 262144, 1000000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        uint8_t *bytes = sample(sizes[i]);
        dcp__buf packed = apply(dcp__transform_encode, one, bytes, sizes[i]);
        assert_memory_equal(packed.data, golden.bytes, 6);
        assert_int_equal(ZSTD_findFrameCompressedSize(packed.data, packed.len), packed.len); /* one frame */
        uint8_t *plain = malloc(sizes[i] + 1);
        assert_int_equal(ZSTD_decompress(plain, sizes[i], packed.data, packed.len), sizes[i]);
        assert_memory_equal(plain, bytes, sizes[i]);
        free(plain);
        dcp__buf_reset(&packed);
        free(bytes);
    }
    free(golden.bytes);
}

static void transform__nothing_encodes_to_an_empty_frame(void **state)
{
    (void)state;
    dcp__buf packed = apply(dcp__transform_encode, one, NULL, 0);
    assert_int_equal(packed.len, 9);
    dcp__buf out = apply(dcp__transform_decode, one, packed.data, packed.len);
    expect_bytes(&out, NULL, 0);
    dcp__buf_reset(&packed);
}

static void transform__encoding_twice_decodes_twice(void **state)
{
    (void)state;
    uint8_t *bytes = sample(600000);
    dcp__buf packed = apply(dcp__transform_encode, two, bytes, 600000);
    dcp__buf out = apply(dcp__transform_decode, two, packed.data, packed.len);
    expect_bytes(&out, bytes, 600000);
    dcp__buf_reset(&packed);
    free(bytes);
}

/* ---- failing memory and random changes ---- */

static dcp_status ignore(void *user, const void *bytes, size_t n, dcp_error *err)
{
    (void)user;
    (void)bytes;
    (void)n;
    (void)err;
    return DCP_OK;
}

static dcp_status decode_once(dcp_context *with, void *user, dcp_error *err)
{
    return dcp__transform_decode(with, dcp_str_of(two), user, ignore, NULL, err);
}

static dcp_status encode_once(dcp_context *with, void *user, dcp_error *err)
{
    return dcp__transform_encode(with, dcp_str_of(two), user, ignore, NULL, err);
}

static void transform__failing_allocations_leak_nothing(void **state)
{
    (void)state;
    dcp__buf packed = apply(dcp__transform_encode, two, "some text", 9);
    dcp__source src = dcp__source_memory(packed.data, packed.len);
    assert_true(failing_alloc_walk(decode_once, &src) > 0);
    assert_true(failing_alloc_walk(encode_once, &src) > 0);
    dcp__buf_reset(&packed);
}

static void transform__random_changes_end_in_a_status(void **state)
{
    (void)state;
    uint64_t random = st_seed();
    uint8_t *bytes = sample(2000);
    dcp__buf packed = apply(dcp__transform_encode, one, bytes, 2000);
    st_file f = {packed.data, packed.len};
    size_t refused = 0;
    for (int round = 0; round < 1000; round++) {
        st_file changed = st_mutate(&f, &random);
        dcp__source src = dcp__source_memory(changed.bytes, changed.len);
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = dcp__transform_decode(ctx, dcp_str_of(one), &src, ignore, NULL, &err);
        assert_int_equal(status, err.code);
        assert_true(status == DCP_OK || err.offset <= changed.len);
        refused += status != DCP_OK;
        free(changed.bytes);
    }
    assert_true(refused > 0);
    dcp__buf_reset(&packed);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(transform__known_descriptors_pass),
        cmocka_unit_test(transform__other_descriptors_are_unsupported),
        cmocka_unit_test(transform__golden_records_decode),
        cmocka_unit_test(transform__concatenated_and_empty_frames_decode),
        cmocka_unit_test(transform__no_descriptor_copies),
        cmocka_unit_test(transform__two_descriptors_decode_twice),
        cmocka_unit_test(transform__every_truncation_is_refused_at_the_end),
        cmocka_unit_test(transform__garbage_behind_a_frame_is_refused_where_it_starts),
        cmocka_unit_test(transform__faults_of_a_later_stage_have_no_offset),
        cmocka_unit_test(transform__damaged_frames_are_refused),
        cmocka_unit_test(transform__wrong_frame_checksums_are_told),
        cmocka_unit_test(transform__large_records_pass_in_pieces),
        cmocka_unit_test(transform__failures_of_source_and_sink_pass_through),
        cmocka_unit_test(transform__frames_have_the_head_of_pytorchs),
        cmocka_unit_test(transform__nothing_encodes_to_an_empty_frame),
        cmocka_unit_test(transform__encoding_twice_decodes_twice),
        cmocka_unit_test(transform__failing_allocations_leak_nothing),
        cmocka_unit_test(transform__random_changes_end_in_a_status),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
