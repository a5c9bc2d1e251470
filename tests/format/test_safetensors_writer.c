#include "format/safetensors_writer.h"

#include "format/safetensors.h"
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

#define STR(text) ((dcp_str){text, sizeof(text) - 1})

static const int64_t shape_2_3[] = {2, 3}, shape_0_8[] = {0, 8}, at_4_0[] = {4, 0}, at_0_0[] = {0, 0}, whole_10_3[] = {10, 3},
                     whole_0_8[] = {0, 8};

/* Header and then zeros up to the end. */
static st_file write_file(const dcp__st_entry *entries, size_t n, const dcp__st_opts *opts, uint64_t *offsets)
{
    dcp__buf out;
    uint64_t total;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    if (dcp__safetensors_header(&out, entries, n, opts, offsets, &total, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    assert_int_equal(out.len % 8, 0);
    assert_int_equal(dcp__load64(out.data), out.len - 8);
    st_file f = {calloc(total + 1, 1), total};
    memcpy(f.bytes, out.data, out.len);
    dcp__buf_reset(&out);
    return f;
}

static dcp__safetensors open_file(const st_file *f)
{
    dcp__safetensors s;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = st_source(f);
    if (dcp__safetensors_open(ctx, &src, true, &s, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    return s;
}

static dcp_status write_fails(dcp_context *with, const dcp__st_entry *entries, size_t n, const dcp__st_opts *opts)
{
    dcp__buf out;
    uint64_t offsets[8] = {77, 77, 77, 77, 77, 77, 77, 77}, total = 77;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, with);
    dcp__buf_put(&out, "before", 6);
    dcp_status status = dcp__safetensors_header(&out, entries, n, opts, offsets, &total, &err);
    assert_int_not_equal(status, DCP_OK);
    assert_int_equal(status, err.code);
    assert_int_equal(out.len, 6);
    assert_memory_equal(out.data, "before", 6);
    assert_int_equal(total, 77);
    assert_int_equal(offsets[0], 77);
    dcp__buf_reset(&out);
    return status;
}

/* ---- what is written ---- */

static void safetensors_writer__all_dtypes_come_back(void **state)
{
    (void)state;
    dcp__st_entry entries[DCP_DTYPE_COUNT];
    uint64_t offsets[DCP_DTYPE_COUNT];
    size_t n = 0;
    for (dcp_dtype d = DCP_DTYPE_NONE; d < DCP_DTYPE_COUNT; d++) {
        if (dcp__safetensors_dtype(d)) {
            entries[n++] = (dcp__st_entry){dcp_str_of(dcp_dtype_name(d)), d, 2, shape_2_3, NULL, NULL};
        }
    }
    st_file f = write_file(entries, n, NULL, offsets);
    dcp__safetensors s = open_file(&f);
    assert_int_equal(s.n_tensors, n);
    assert_false(s.has_sharding_info);
    assert_false(s.has_own_facts);
    assert_string_equal(s.format.ptr, "pt");
    for (size_t i = 0; i < n; i++) {
        const dcp__st_tensor *t = st_find(&s, entries[i].name.ptr);
        assert_int_equal(t->dtype, entries[i].dtype);
        assert_int_equal(t->extents[0], 2);
        assert_int_equal(t->extents[1], 3);
        assert_int_equal(t->offset, offsets[i]);
    }
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors_writer__shards_and_own_facts_come_back(void **state)
{
    (void)state;
    dcp__st_entry entries[] = {
        {STR("rows"), DCP_FLOAT32, 2, shape_2_3, at_4_0, whole_10_3},
        {STR("none"), DCP_BFLOAT16, 2, shape_0_8, at_0_0, whole_0_8},
        {STR("scalar"), DCP_INT64, 0, NULL, at_0_0, NULL},
    };
    dcp_str key = STR("note"), value = STR("\"quoted\"\n\xe2\x82\xac");
    dcp__st_opts opts = {.world = 4, .extra_keys = &key, .extra_values = &value, .n_extra = 1};
    uint64_t offsets[3];
    st_file f = write_file(entries, 3, &opts, offsets);
    dcp__safetensors s = open_file(&f);
    assert_true(s.has_own_facts);
    assert_int_equal(s.own_world, 4);
    assert_string_equal(s.own_writer.ptr, "libdcp " DCP_VERSION_STRING);
    assert_string_equal(s.dcp_version.ptr, "1.0");
    const dcp__st_tensor *rows = st_find(&s, "rows"), *none = st_find(&s, "none"), *scalar = st_find(&s, "scalar");
    assert_int_equal(rows->saved_offsets[0], 4);
    assert_int_equal(rows->global_extents[0], 10);
    assert_int_equal(none->global_extents[1], 8);
    assert_int_equal(none->bytes, 0);
    assert_non_null(scalar->saved_offsets);
    assert_null(scalar->global_extents);
    assert_int_equal(offsets[1], offsets[0] + 24);
    assert_int_equal(offsets[2], offsets[1]);
    assert_int_equal(s.n_metadata, 1);
    assert_string_equal(s.metadata_values[0].ptr, value.ptr);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors_writer__names_keep_their_bytes(void **state)
{
    (void)state;
    const dcp_str names[] = {STR(""), STR("a\"b\\c/d"), STR("\x01\x1f\x7f\n\t"), STR("\xf0\x9f\x98\x80 \xc3\xa9"), STR("libdcp")};
    dcp__st_entry entries[5];
    uint64_t offsets[5];
    for (size_t i = 0; i < 5; i++) {
        entries[i] = (dcp__st_entry){names[i], DCP_UINT8, 0, NULL, at_0_0, at_0_0};
    }
    st_file f = write_file(entries, 5, NULL, offsets);
    dcp__safetensors s = open_file(&f);
    for (size_t i = 0; i < 5; i++) {
        const dcp__st_tensor *t = st_find(&s, names[i].ptr);
        assert_non_null(t);
        assert_int_equal(t->offset, offsets[i]);
        assert_non_null(t->global_extents);
    }
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

/* What the reference library was given and accepted: tests/data/safetensors/make.py check. */
static void safetensors_writer__bytes_are_those_that_the_reference_library_took(void **state)
{
    (void)state;
    dcp__st_entry entries[] = {
        {STR("w \"1\""), DCP_FLOAT4_E2M1FN_X2, 2, shape_2_3, at_4_0, whole_10_3},
        {STR("b\n"), DCP_COMPLEX64, 2, shape_2_3, at_0_0, NULL},
        {STR("none"), DCP_BFLOAT16, 2, shape_0_8, at_0_0, whole_0_8},
        {STR("scalar"), DCP_UINT16, 0, NULL, at_0_0, NULL},
    };
    dcp__st_opts opts = {.world = 4};
    uint64_t offsets[4];
    st_file f = write_file(entries, 4, &opts, offsets);
    st_file golden = st_load(DCP_TEST_DIR "/data/safetensors/written.safetensors");
    char *writer = memmem(golden.bytes, golden.len, "libdcp 0.1.0", 12);
    assert_non_null(writer);
    memcpy(writer, "libdcp " DCP_VERSION_STRING, 12); /* of another length: make the file again */
    assert_int_equal(f.len, golden.len);
    assert_memory_equal(f.bytes, golden.bytes, f.len);
    free(golden.bytes);
    free(f.bytes);
}

static void safetensors_writer__shards_without_a_file_are_told(void **state)
{
    (void)state;
    dcp__st_entry entry = {STR("w"), DCP_UINT8, 2, shape_2_3, at_0_0, whole_10_3};
    static const uint32_t empty[] = {2, 4};
    dcp__st_opts opts = {.world = 4, .empty = empty, .n_empty = 2};
    uint64_t offset;
    st_file f = write_file(&entry, 1, &opts, &offset);
    dcp__safetensors s = open_file(&f);
    assert_int_equal(s.n_own_empty, 2);
    assert_memory_equal(s.own_empty, empty, sizeof empty);
    dcp__safetensors_reset(&s);
    /* neither ascending nor a number of a shard */
    static const char *const wrong[] = {"[4,2]", "[2,2]", "[0,4]", "[2,5]"};
    char *at = memmem(f.bytes, f.len, "[2,4]", 5);
    assert_non_null(at);
    for (int i = 0; i < 4; i++) {
        memcpy(at, wrong[i], 5);
        dcp__source src = st_source(&f);
        assert_int_equal(dcp__safetensors_open(ctx, &src, true, &s, NULL), DCP_FORMAT);
    }
    free(f.bytes);
}

static void safetensors_writer__a_rank_without_tensors_says_that_it_took_part(void **state)
{
    (void)state;
    dcp__st_opts opts = {.world = 4};
    st_file f = write_file(NULL, 0, &opts, NULL);
    dcp__safetensors s = open_file(&f);
    assert_int_equal(s.own_world, 4);
    assert_true(s.has_sharding_info);
    dcp__safetensors_reset(&s);
    free(f.bytes);
    f = write_file(NULL, 0, NULL, NULL);
    s = open_file(&f);
    assert_false(s.has_own_facts);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors_writer__text_is_appended(void **state)
{
    (void)state;
    dcp__st_entry e = {STR("a"), DCP_UINT8, 2, shape_2_3, NULL, NULL};
    uint64_t offset, total;
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    dcp__buf_put(&out, "abc", 3);
    assert_int_equal(dcp__safetensors_header(&out, &e, 1, NULL, &offset, &total, NULL), DCP_OK);
    assert_memory_equal(out.data, "abc", 3);
    assert_int_equal(offset, out.len - 3);
    assert_int_equal(total, offset + 6);
    dcp__buf_reset(&out);
}

/* ---- what is refused ---- */

static void safetensors_writer__dtypes_without_a_name_are_unsupported(void **state)
{
    (void)state;
    static const dcp_dtype dtypes[] = {DCP_COMPLEX128, DCP_COMPLEX32, DCP_BCOMPLEX32, DCP_DTYPE_NONE, DCP_DTYPE_COUNT};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        dcp__st_entry e = {STR("a"), dtypes[i], 2, shape_2_3, NULL, NULL};
        assert_int_equal(write_fails(ctx, &e, 1, NULL), DCP_UNSUPPORTED);
    }
    dcp__st_entry scalar = {STR("a"), DCP_FLOAT4_E2M1FN_X2, 0, NULL, NULL, NULL};
    assert_int_equal(write_fails(ctx, &scalar, 1, NULL), DCP_UNSUPPORTED);
}

static void safetensors_writer__names_that_readers_refuse_are_refused(void **state)
{
    (void)state;
    const dcp_str names[] = {STR("__metadata__"), STR("first"), STR("a\0b"),    STR("\xed\xa0\x80"),
                             STR("\xff"),         STR("\xc3"),  STR("\xc0\x80")};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        dcp__st_entry entries[] = {{STR("first"), DCP_UINT8, 0, NULL, NULL, NULL}, {names[i], DCP_UINT8, 0, NULL, NULL, NULL}};
        assert_int_equal(write_fails(ctx, entries, 2, NULL), DCP_ARG);
    }
    const dcp_str keys[] = {STR("format"), STR("DCP_VERSION"), STR("DCP_SHARDING_INFO"), STR("libdcp"), STR("\xff"), STR("mine")};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        dcp_str pair[] = {STR("mine"), keys[i]}, values[] = {STR("x"), STR("y")};
        dcp__st_opts opts = {.extra_keys = pair, .extra_values = values, .n_extra = 2};
        assert_int_equal(write_fails(ctx, NULL, 0, &opts), DCP_ARG);
    }
    dcp_str key = STR("k"), value = STR("\xed\xa0\x80");
    dcp__st_opts opts = {.extra_keys = &key, .extra_values = &value, .n_extra = 1};
    assert_int_equal(write_fails(ctx, NULL, 0, &opts), DCP_ARG);
}

static void safetensors_writer__positions_must_fit(void **state)
{
    (void)state;
    static const int64_t negative[] = {-1, 0}, last[] = {INT64_MAX, 0}, small[] = {5, 3}, minus[] = {2, -3};
    const dcp__st_entry bad[] = {
        {STR("a"), DCP_UINT8, 2, shape_2_3, negative, NULL},
        {STR("a"), DCP_UINT8, 2, shape_2_3, last, NULL},
        {STR("a"), DCP_UINT8, 2, shape_2_3, at_4_0, small},
        {STR("a"), DCP_UINT8, 2, shape_2_3, NULL, whole_10_3},
        {STR("a"), DCP_UINT8, 2, minus, NULL, NULL},
        {STR("a"), DCP_UINT8, -1, shape_2_3, NULL, NULL},
        {STR("a"), DCP_UINT8, DCP_MAX_NDIM + 1, NULL, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(write_fails(ctx, &bad[i], 1, NULL), DCP_ARG);
    }
    dcp__st_entry mixed[] = {{STR("a"), DCP_UINT8, 2, shape_2_3, at_4_0, NULL}, {STR("b"), DCP_UINT8, 2, shape_2_3, NULL, NULL}};
    assert_int_equal(write_fails(ctx, mixed, 2, NULL), DCP_ARG);
}

static void safetensors_writer__sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    static const int64_t huge[] = {INT64_MAX, 2}, large[] = {INT64_MAX / 2}, odd[] = {0, INT64_MAX};
    dcp__st_entry entries[] = {{STR("a"), DCP_UINT8, 1, large, NULL, NULL},
                               {STR("b"), DCP_UINT8, 1, large, NULL, NULL},
                               {STR("c"), DCP_FLOAT64, 2, huge, NULL, NULL},
                               {STR("d"), DCP_FLOAT4_E2M1FN_X2, 2, odd, NULL, NULL}};
    assert_int_equal(write_fails(ctx, entries, 2, NULL), DCP_LIMIT);
    assert_int_equal(write_fails(ctx, &entries[2], 1, NULL), DCP_LIMIT);
    assert_int_equal(write_fails(ctx, &entries[3], 1, NULL), DCP_LIMIT);
}

/* The reader with the same limit takes what is written at the limit, and the writer refuses one step more. */
static void safetensors_writer__headers_over_the_limit_are_refused(void **state)
{
    (void)state;
    dcp__st_entry e = {STR("a"), DCP_UINT8, 2, shape_2_3, NULL, NULL};
    uint64_t offset;
    st_file f = write_file(&e, 1, NULL, &offset);
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *limited;
    opts.limits.max_header_bytes = offset - 8;
    assert_int_equal(dcp_context_create(&opts, &limited, NULL), DCP_OK);
    dcp__safetensors s;
    dcp__source src = st_source(&f);
    assert_int_equal(dcp__safetensors_open(limited, &src, true, &s, NULL), DCP_OK);
    dcp__safetensors_reset(&s);
    dcp_context_free(limited);
    opts.limits.max_header_bytes--;
    assert_int_equal(dcp_context_create(&opts, &limited, NULL), DCP_OK);
    assert_int_equal(write_fails(limited, &e, 1, NULL), DCP_LIMIT);
    dcp_context_free(limited);
    free(f.bytes);
}

/* A larger limit of ours does not lead to files that others cannot read. */
static void safetensors_writer__headers_over_100_mb_are_refused(void **state)
{
    (void)state;
    size_t len = 100000000;
    char *text = malloc(len + 1);
    memset(text, 'x', len);
    text[len] = 0;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *lenient;
    opts.limits.max_header_bytes = (uint64_t)1 << 30;
    assert_int_equal(dcp_context_create(&opts, &lenient, NULL), DCP_OK);
    dcp_str key = STR("k"), value = {text, len};
    dcp__st_opts extra = {.extra_keys = &key, .extra_values = &value, .n_extra = 1};
    assert_int_equal(write_fails(lenient, NULL, 0, &extra), DCP_LIMIT);
    dcp_context_free(lenient);
    free(text);
}

static dcp_status write_once(dcp_context *with, void *user, dcp_error *err)
{
    dcp__buf out;
    uint64_t offsets[40], total;
    dcp__buf_init(&out, with);
    dcp_status status = dcp__safetensors_header(&out, user, 40, NULL, offsets, &total, err);
    dcp__buf_reset(&out);
    return status;
}

static void safetensors_writer__failing_allocations_leak_nothing(void **state)
{
    (void)state;
    dcp__st_entry entries[40];
    char names[40][16];
    for (int i = 0; i < 40; i++) {
        snprintf(names[i], sizeof names[i], "t%d", i);
        entries[i] = (dcp__st_entry){dcp_str_of(names[i]), DCP_INT8, 2, shape_2_3, at_4_0, whole_10_3};
    }
    assert_true(failing_alloc_walk(write_once, entries) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_writer__all_dtypes_come_back),
        cmocka_unit_test(safetensors_writer__shards_and_own_facts_come_back),
        cmocka_unit_test(safetensors_writer__names_keep_their_bytes),
        cmocka_unit_test(safetensors_writer__bytes_are_those_that_the_reference_library_took),
        cmocka_unit_test(safetensors_writer__shards_without_a_file_are_told),
        cmocka_unit_test(safetensors_writer__a_rank_without_tensors_says_that_it_took_part),
        cmocka_unit_test(safetensors_writer__text_is_appended),
        cmocka_unit_test(safetensors_writer__dtypes_without_a_name_are_unsupported),
        cmocka_unit_test(safetensors_writer__names_that_readers_refuse_are_refused),
        cmocka_unit_test(safetensors_writer__positions_must_fit),
        cmocka_unit_test(safetensors_writer__sizes_that_overflow_are_refused),
        cmocka_unit_test(safetensors_writer__headers_over_the_limit_are_refused),
        cmocka_unit_test(safetensors_writer__headers_over_100_mb_are_refused),
        cmocka_unit_test(safetensors_writer__failing_allocations_leak_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
