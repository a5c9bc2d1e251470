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

static dcp__safetensors open_file(const st_file *f, bool to_end)
{
    dcp__safetensors s;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = st_source(f);
    if (dcp__safetensors_open(ctx, &src, to_end, &s, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    return s;
}

static dcp_error open_fails(dcp_context *with, const st_file *f, bool to_end)
{
    dcp__safetensors s;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = st_source(f);
    dcp_status status = dcp__safetensors_open(with, &src, to_end, &s, &err);
    assert_int_not_equal(status, DCP_OK);
    assert_int_equal(status, err.code);
    return err;
}

/* ---- real files ---- */

static size_t compare_with_expect(const char *path, json_t *tensors)
{
    st_file f = st_load(path);
    dcp__safetensors s = open_file(&f, true);
    for (size_t i = 0; i < s.n_tensors; i++) {
        const dcp__st_tensor *t = &s.tensors[i];
        st_expect(tensors, t->name, t->dtype, t->ndim, t->extents, f.bytes + t->offset, t->bytes);
        for (int d = 0; d < t->ndim; d++) {
            assert_int_equal(t->saved_offsets[d], 0);
        }
    }
    assert_true(s.has_sharding_info);
    assert_memory_equal(s.format.ptr, "pt", 3);
    assert_memory_equal(s.dcp_version.ptr, "1.0", 4);
    assert_int_equal(s.n_metadata, 0);
    size_t n = s.n_tensors;
    dcp__safetensors_reset(&s);
    free(f.bytes);
    return n;
}

static void compare_case(const char *dir, const char *pattern)
{
    char path[512];
    glob_t files;
    snprintf(path, sizeof path, "%s/expect.json", dir);
    json_t *expect = json_load_file(path, 0, NULL), *tensors = json_object_get(expect, "tensors");
    assert_non_null(tensors);
    snprintf(path, sizeof path, "%s/ckpt/%s", dir, pattern);
    assert_int_equal(glob(path, 0, NULL, &files), 0);
    size_t n = 0;
    for (size_t i = 0; i < files.gl_pathc; i++) {
        n += compare_with_expect(files.gl_pathv[i], tensors);
    }
    assert_int_equal(n, json_object_size(tensors));
    globfree(&files);
    json_decref(expect);
}

static void compare_release_cases(const char *name, const char *pattern)
{
    glob_t dirs;
    char path[512];
    snprintf(path, sizeof path, DCP_TEST_DIR "/golden/*/%s", name);
    assert_int_equal(glob(path, 0, NULL, &dirs), 0);
    for (size_t i = 0; i < dirs.gl_pathc; i++) {
        compare_case(dirs.gl_pathv[i], pattern);
    }
    globfree(&dirs);
}

static void safetensors__golden_files_read_as_expected(void **state)
{
    (void)state;
    compare_release_cases("hf", "*.safetensors");
}

static void safetensors__golden_records_read_as_expected(void **state)
{
    (void)state;
    compare_release_cases("safetensors_records", "*.distcp");
}

static void safetensors__golden_shards_tell_their_offsets(void **state)
{
    (void)state;
    st_file f = st_load(DCP_TEST_DIR "/golden/2.15.0/hf_sharded/ckpt/shard-00004-model-00001-of-00001.safetensors");
    dcp__safetensors s = open_file(&f, true);
    assert_int_equal(s.n_tensors, 2);
    const dcp__st_tensor *rows = st_find(&s, "rows"), *cols = st_find(&s, "cols");
    assert_int_equal(rows->dtype, DCP_FLOAT32);
    assert_int_equal(rows->saved_offsets[0], 9);
    assert_int_equal(rows->saved_offsets[1], 0);
    assert_null(rows->global_extents);
    assert_int_equal(cols->dtype, DCP_BFLOAT16);
    assert_int_equal(cols->extents[1], 0);
    assert_int_equal(cols->saved_offsets[1], 9);
    assert_int_equal(cols->bytes, 0);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

/* Written by the reference library, tests/data/safetensors/make.py. */
static void safetensors__every_dtype_of_the_reference_library_is_read(void **state)
{
    (void)state;
    st_file f = st_load(DCP_TEST_DIR "/data/safetensors/all_dtypes.safetensors");
    dcp__safetensors s = open_file(&f, true);
    size_t seen = 0;
    for (size_t i = 0; i < s.n_tensors; i++) {
        const dcp__st_tensor *t = &s.tensors[i];
        if (t->name.len < 2 || memcmp(t->name.ptr, "t.", 2) != 0) {
            continue;
        }
        assert_string_equal(t->name.ptr + 2, dcp_dtype_name(t->dtype));
        assert_int_equal(t->ndim, 2);
        assert_int_equal(t->extents[0], 2);
        assert_int_equal(t->extents[1], 3);
        for (size_t k = 0; k < t->bytes; k++) {
            assert_int_equal(f.bytes[t->offset + k], k & 1);
        }
        seen++;
    }
    assert_int_equal(seen, 20);
    assert_int_equal(st_find(&s, "scalar")->ndim, 0);
    assert_int_equal(st_find(&s, "empty")->ndim, 3);
    assert_int_equal(f.bytes[st_find(&s, "Gr\xc3\xb6\xc3\x9f"
                                         "e \"q\" \\ \t")
                                 ->offset],
                     7);
    assert_int_equal(f.bytes[st_find(&s, "")->offset], 9);
    assert_int_equal(s.n_metadata, 1);
    assert_string_equal(s.metadata_keys[0].ptr, "note");
    assert_string_equal(s.metadata_values[0].ptr, "line 1\nline 2");
    assert_null(s.dcp_version.ptr);
    assert_int_equal(s.end, f.len);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors__dtype_names_go_both_ways(void **state)
{
    (void)state;
    size_t named = 0;
    for (dcp_dtype d = DCP_DTYPE_NONE; d < DCP_DTYPE_COUNT; d++) {
        const char *name = dcp__safetensors_dtype(d);
        if (name) {
            assert_int_equal(dcp__dtype_from_safetensors(dcp_str_of(name)), d);
            named++;
        }
    }
    assert_int_equal(named, 20);
    assert_null(dcp__safetensors_dtype(DCP_COMPLEX128));
    assert_null(dcp__safetensors_dtype(DCP_COMPLEX32));
    assert_null(dcp__safetensors_dtype(DCP_BCOMPLEX32));
    assert_int_equal(dcp__dtype_from_safetensors(dcp_str_of("F32 ")), DCP_DTYPE_NONE);
    assert_int_equal(dcp__dtype_from_safetensors(dcp_str_of("")), DCP_DTYPE_NONE);
}

/* ---- forms that are right ---- */

static void safetensors__unpadded_and_padded_headers_are_read(void **state)
{
    (void)state;
    static const char *const forms[] = {
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}      ",
        "{ \"a\" : { \"shape\" : [ 2 ], \"data_offsets\" : [ 0, 2 ], \"dtype\" : \"U8\", \"more\" : { } } }\n",
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        st_file f = st_make(forms[i], 2);
        dcp__safetensors s = open_file(&f, true);
        assert_int_equal(s.n_tensors, 1);
        assert_int_equal(s.header_bytes, 8 + strlen(forms[i]));
        assert_int_equal(f.bytes[s.tensors[0].offset + 1], 1);
        assert_null(s.tensors[0].saved_offsets);
        assert_false(s.has_sharding_info);
        dcp__safetensors_reset(&s);
        free(f.bytes);
    }
}

static void safetensors__files_without_tensors_are_read(void **state)
{
    (void)state;
    static const char *const forms[] = {
        "{}",
        "{\"__metadata__\":{}}",
        "{\"__metadata__\":{\"a\":\"b\"}}",
        "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{}\"}}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        st_file f = st_make(forms[i], 0);
        dcp__safetensors s = open_file(&f, true);
        assert_int_equal(s.n_tensors, 0);
        assert_int_equal(s.end, f.len);
        dcp__safetensors_reset(&s);
        free(f.bytes);
    }
}

static void safetensors__tensors_are_sorted_by_place(void **state)
{
    (void)state;
    st_file f = st_make("{\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                        "\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[3,4]},"
                        "\"b\":{\"dtype\":\"F64\",\"shape\":[0],\"data_offsets\":[3,3]},"
                        "\"a\":{\"dtype\":\"I16\",\"shape\":[0],\"data_offsets\":[3,3]}}",
                        4);
    dcp__safetensors s = open_file(&f, true);
    static const char *const order[] = {"z", "a", "b", "c"};
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(s.tensors[i].name.ptr, order[i]);
    }
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors__data_behind_the_blob_is_allowed_on_request(void **state)
{
    (void)state;
    st_file f = st_make("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 5);
    dcp__safetensors s = open_file(&f, false);
    assert_int_equal(s.end, f.len - 3);
    dcp__safetensors_reset(&s);
    dcp_error err = open_fails(ctx, &f, true);
    assert_int_equal(err.code, DCP_FORMAT);
    assert_int_equal(err.offset, f.len - 3);
    free(f.bytes);
}

static void safetensors__own_facts_are_read(void **state)
{
    (void)state;
    st_file f =
        st_make("{\"a\":{\"dtype\":\"U8\",\"shape\":[2,1],\"data_offsets\":[0,2]},"
                "\"b\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[2,3]},\"__metadata__\":{"
                "\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[4,0]},\\\"b\\\":{\\\"saved_offsets\\\":[]}}\","
                "\"libdcp\":\"{\\\"schema\\\":1,\\\"writer\\\":\\\"libdcp 0.1.0\\\",\\\"world\\\":3,\\\"later\\\":[{}],"
                "\\\"tensors\\\":{\\\"a\\\":{\\\"shape\\\":[10,1]}}}\"}}",
                3);
    dcp__safetensors s = open_file(&f, true);
    assert_true(s.has_own_facts);
    assert_int_equal(s.own_world, 3);
    assert_string_equal(s.own_writer.ptr, "libdcp 0.1.0");
    assert_int_equal(st_find(&s, "a")->saved_offsets[0], 4);
    assert_int_equal(st_find(&s, "a")->global_extents[0], 10);
    assert_null(st_find(&s, "b")->global_extents);
    assert_non_null(st_find(&s, "b")->saved_offsets);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

static void safetensors__own_facts_of_another_schema_are_ignored(void **state)
{
    (void)state;
    static const char *const forms[] = {
        "{\"__metadata__\":{\"libdcp\":\"{\\\"schema\\\":2,\\\"world\\\":-4,\\\"tensors\\\":7}\"}}",
        "{\"__metadata__\":{\"libdcp\":\"{\\\"world\\\":3}\"}}",
        "{\"__metadata__\":{\"libdcp\":\"{\\\"schema\\\":\\\"1\\\",\\\"world\\\":3}\"}}",
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        st_file f = st_make(forms[i], 0);
        dcp__safetensors s = open_file(&f, true);
        assert_false(s.has_own_facts);
        assert_int_equal(s.own_world, 0);
        dcp__safetensors_reset(&s);
        free(f.bytes);
    }
}

/* A file of 1 TiB of which only the header exists. */
static dcp_status read_header_only(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const st_file *f = self->user;
    (void)err;
    assert_true(offset + n <= f->len);
    memcpy(buf, f->bytes + offset, n);
    return DCP_OK;
}

static void safetensors__only_the_header_is_read(void **state)
{
    (void)state;
    st_file f = st_make("{\"a\":{\"dtype\":\"U8\",\"shape\":[1099511627776],\"data_offsets\":[0,1099511627776]}}", 0);
    dcp__source src = {.read = read_header_only, .size = f.len + ((uint64_t)1 << 40), .user = &f};
    dcp__safetensors s;
    assert_int_equal(dcp__safetensors_open(ctx, &src, true, &s, NULL), DCP_OK);
    assert_int_equal(s.tensors[0].bytes, (uint64_t)1 << 40);
    dcp__safetensors_reset(&s);
    free(f.bytes);
}

/* ---- defects ---- */

#define AT_DATA(n) (SIZE_MAX - 1 - (n)) /* offset in the data instead of the file */
#define ANYWHERE (SIZE_MAX / 2)

typedef struct defect {
    const char *json;
    size_t data_len;
    dcp_status code;
    size_t offset;
} defect;

static const defect defects[] = {
    /* JSON */
    {"", 0, DCP_FORMAT, 8},
    {" {}", 0, DCP_FORMAT, 8},
    {"[]", 0, DCP_FORMAT, 8},
    {"{", 0, DCP_FORMAT, ANYWHERE},
    {"{} x", 0, DCP_FORMAT, 11},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]"
     "}}",
     1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, ANYWHERE},
    {"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, ANYWHERE},
    {"{\"\\ud800\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, ANYWHERE},
    {"{\"a\\u0000\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, ANYWHERE},
    /* tensors */
    {"{\"a\":7}", 0, DCP_FORMAT, 8},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]}}", 3, DCP_UNSUPPORTED, 8},
    {"{\"a\":{\"dtype\":\"u8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_UNSUPPORTED, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[\"1\"],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775808],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,0]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[-1,0]}}", 1, DCP_FORMAT, 8},
    {"{\"a\":{\"dtype\":\"U16\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2, DCP_FORMAT, AT_DATA(0)},
    {"{\"a\":{\"dtype\":\"U16\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, DCP_FORMAT, AT_DATA(0)},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[2,3],\"data_offsets\":[0,3]}}", 3, DCP_UNSUPPORTED, 8},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, DCP_UNSUPPORTED, 8},
    /* ranges */
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, DCP_FORMAT, AT_DATA(1)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[3,5]"
     "}}",
     5, DCP_FORMAT, AT_DATA(3)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]"
     "}}",
     3, DCP_FORMAT, AT_DATA(1)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]"
     "}}",
     2, DCP_FORMAT, AT_DATA(0)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 2, DCP_FORMAT, AT_DATA(2)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 4, DCP_FORMAT, AT_DATA(3)},
    {"{}", 1, DCP_FORMAT, AT_DATA(0)},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775807],\"data_offsets\":[0,9223372036854775807]}}", 1, DCP_FORMAT,
     AT_DATA(1)},
    /* __metadata__ */
    {"{\"__metadata__\":[]}", 0, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"step\":7}}", 0, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"x\"}}", 0, DCP_FORMAT, DCP_NO_OFFSET},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"[]\"}}", 0, DCP_FORMAT, DCP_NO_OFFSET},
    {"{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[]}}\"}}", 0, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"libdcp\":\"x\"}}", 0, DCP_FORMAT, DCP_NO_OFFSET},
    {"{\"__metadata__\":{\"libdcp\":\"{\\\"schema\\\":1,\\\"world\\\":-1}\"}}", 0, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"libdcp\":\"{\\\"schema\\\":1,\\\"tensors\\\":[]}\"}}", 0, DCP_FORMAT, 8},
    {"{\"__metadata__\":{\"libdcp\":\"{\\\"schema\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"shape\\\":[]}}}\"}}", 0, DCP_FORMAT, 8},
};

static size_t resolve(const defect *d)
{
    size_t header = 8 + strlen(d->json);
    return d->offset > SIZE_MAX - 64 && d->offset != DCP_NO_OFFSET ? header + (SIZE_MAX - 1 - d->offset) : d->offset;
}

static void safetensors__each_defect_is_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof defects / sizeof defects[0]; i++) {
        const defect *d = &defects[i];
        st_file f = st_make(d->json, d->data_len);
        dcp_error err = open_fails(ctx, &f, true);
        if (err.code != d->code || (d->offset != ANYWHERE && err.offset != resolve(d))) {
            fail_msg("defect %zu %s: %s at %lld: %s", i, d->json, dcp_status_name(err.code), (long long)err.offset, err.message);
        }
        if (d->offset == ANYWHERE) {
            assert_in_range(err.offset, 9, 8 + strlen(d->json));
        }
        free(f.bytes);
    }
}

/* Faults of the texts about one tensor "a" of shape [2, 3] at [0, 6]. */
static dcp_error text_fault(const char *key, const char *escaped)
{
    char json[512];
    snprintf(json, sizeof json,
             "{\"a\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[0,6]},\"__metadata__\":{\"%s\":\"%s\"}}", key, escaped);
    st_file f = st_make(json, 6);
    dcp_error err = open_fails(ctx, &f, true);
    free(f.bytes);
    return err;
}

static void safetensors__texts_must_fit_the_tensors(void **state)
{
    (void)state;
    static const char *const sharding[] = {
        "{}",
        "{\\\"a\\\":[0,0]}",
        "{\\\"a\\\":{}}",
        "{\\\"a\\\":{\\\"saved_offsets\\\":[0]}}",
        "{\\\"a\\\":{\\\"saved_offsets\\\":[0,0,0]}}",
        "{\\\"a\\\":{\\\"saved_offsets\\\":[0,-1]}}",
        "{\\\"a\\\":{\\\"saved_offsets\\\":[0,\\\"1\\\"]}}",
        "{\\\"a\\\":{\\\"saved_offsets\\\":[0,9223372036854775805]}}",
    };
    static const char *const own[] = {
        "{\\\"schema\\\":1,\\\"tensors\\\":{\\\"a\\\":{}}}",
        "{\\\"schema\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"shape\\\":[2]}}}",
        "{\\\"schema\\\":1,\\\"tensors\\\":{\\\"a\\\":{\\\"shape\\\":[2,2]}}}",
        "{\\\"schema\\\":1,\\\"world\\\":2147483648,\\\"tensors\\\":{}}",
    };
    for (size_t i = 0; i < sizeof sharding / sizeof sharding[0]; i++) {
        dcp_error err = text_fault("DCP_SHARDING_INFO", sharding[i]);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_int_equal(err.offset, 8);
    }
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        assert_int_equal(text_fault("libdcp", own[i]).code, DCP_FORMAT);
    }
}

static void safetensors__more_dimensions_than_tensors_have_are_refused(void **state)
{
    (void)state;
    char json[512] = "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1],\"shape\":[1";
    for (int i = 1; i < DCP_MAX_NDIM; i++) {
        strcat(json, ",1");
    }
    size_t len = strlen(json);
    strcat(json, "]}}");
    st_file f = st_make(json, 1);
    dcp__safetensors s = open_file(&f, true);
    assert_int_equal(s.tensors[0].ndim, DCP_MAX_NDIM);
    dcp__safetensors_reset(&s);
    free(f.bytes);
    json[len] = 0;
    strcat(json, ",1]}}");
    f = st_make(json, 1);
    assert_int_equal(open_fails(ctx, &f, true).code, DCP_LIMIT);
    free(f.bytes);
}

static void safetensors__what_is_no_safetensors_file_is_refused_at_its_start(void **state)
{
    (void)state;
    static const char *const starts[] = {
        "PK\003\004\0\0\b\b then a record",
        "version https://git-lfs.github.com/spec/v1",
        "\x80\x04\x95 a pickle, say, and more bytes",
    };
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        st_file f = {(uint8_t *)(uintptr_t)starts[i], 20};
        dcp_error err = open_fails(ctx, &f, true);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_int_equal(err.offset, 0);
    }
}

static void safetensors__every_truncation_is_refused(void **state)
{
    (void)state;
    st_file f = st_load(DCP_TEST_DIR "/golden/2.15.0/hf_sharded/ckpt/shard-00002-model-00001-of-00001.safetensors");
    for (size_t len = 0; len < f.len; len++) {
        st_file cut = {malloc(len + 1), len}; /* its own block, so that reading behind the end shows */
        memcpy(cut.bytes, f.bytes, len);
        dcp_error err = open_fails(ctx, &cut, true);
        assert_int_equal(err.code, DCP_FORMAT);
        assert_true(err.offset <= len);
        free(cut.bytes);
    }
    free(f.bytes);
}

/* ---- limits ---- */

static dcp_error fails_under(dcp_limits limits, const char *json)
{
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *limited;
    opts.limits = limits;
    assert_int_equal(dcp_context_create(&opts, &limited, NULL), DCP_OK);
    st_file f = st_make(json, 0);
    dcp_error err = open_fails(limited, &f, true);
    free(f.bytes);
    dcp_context_free(limited);
    return err;
}

static void safetensors__limits_hold(void **state)
{
    (void)state;
    dcp_limits header = DCP_LIMITS_INIT, depth = DCP_LIMITS_INIT, memory = DCP_LIMITS_INIT;
    header.max_header_bytes = 22;
    assert_int_equal(fails_under(header, "{\"__metadata__\":{}}    ").code, DCP_LIMIT);
    depth.max_depth = 4;
    dcp_error err = fails_under(depth, "{\"a\":[\"[[[[[[\",[[[]]]]}");
    assert_int_equal(err.code, DCP_LIMIT);
    assert_int_equal(err.offset, 8 + strlen("{\"a\":[\"[[[[[[\",[["));
    memory.max_parse_bytes = 150;
    assert_int_equal(fails_under(memory, "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
                                         "\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
                                         "\"c\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}")
                         .code,
                     DCP_LIMIT);
}

static void safetensors__nesting_within_the_limit_does_not_overflow_the_stack(void **state)
{
    (void)state;
    enum { DEPTH = 100000 };
    char *json = malloc(2 * DEPTH);
    memcpy(json, "{\"a\":", 5);
    memset(json + 5, '[', DEPTH);
    json[5 + DEPTH] = 0;
    dcp_limits limits = DCP_LIMITS_INIT;
    limits.max_depth = UINT32_MAX;
    assert_int_equal(fails_under(limits, json).code, DCP_LIMIT); /* the reader's own bound */
    free(json);
}

/* ---- failing memory and random changes ---- */

static dcp_status open_and_reset(dcp_context *with, void *user, dcp_error *err)
{
    const st_file *f = user;
    dcp__source src = st_source(f);
    dcp__safetensors s;
    dcp_status status = dcp__safetensors_open(with, &src, true, &s, err);
    if (status == DCP_OK) {
        dcp__safetensors_reset(&s);
    }
    return status;
}

static void safetensors__failing_allocations_leak_nothing(void **state)
{
    (void)state;
    st_file f = st_load(DCP_TEST_DIR "/golden/2.15.0/hf/ckpt/model-00001-of-00002.safetensors");
    assert_true(failing_alloc_walk(open_and_reset, &f) > 0);
    free(f.bytes);
}

static void check_whole(const dcp__safetensors *s, const st_file *f)
{
    uint64_t end = s->header_bytes;
    for (size_t i = 0; i < s->n_tensors; i++) {
        assert_int_equal(s->tensors[i].offset, end);
        end += s->tensors[i].bytes;
        assert_true(s->tensors[i].ndim <= DCP_MAX_NDIM);
        assert_true(dcp__safetensors_dtype(s->tensors[i].dtype) != NULL);
    }
    assert_int_equal(end, f->len);
}

static void safetensors__random_changes_never_yield_a_wrong_header(void **state)
{
    (void)state;
    uint64_t random = st_seed();
    st_file f = st_load(DCP_TEST_DIR "/golden/2.15.0/hf_sharded/ckpt/shard-00002-model-00001-of-00001.safetensors");
    size_t opened = 0;
    for (int round = 0; round < 20000; round++) {
        st_file changed = st_mutate(&f, &random);
        dcp__safetensors s;
        dcp_error err = DCP_ERROR_INIT;
        dcp__source src = st_source(&changed);
        dcp_status status = dcp__safetensors_open(ctx, &src, true, &s, &err);
        if (status == DCP_OK) {
            check_whole(&s, &changed);
            dcp__safetensors_reset(&s);
            opened++;
        } else {
            assert_true(status == DCP_FORMAT || status == DCP_UNSUPPORTED || status == DCP_LIMIT);
            assert_int_equal(status, err.code);
        }
        free(changed.bytes);
    }
    assert_true(opened > 0); /* changes of data alone do not matter */
    free(f.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors__golden_files_read_as_expected),
        cmocka_unit_test(safetensors__golden_records_read_as_expected),
        cmocka_unit_test(safetensors__golden_shards_tell_their_offsets),
        cmocka_unit_test(safetensors__every_dtype_of_the_reference_library_is_read),
        cmocka_unit_test(safetensors__dtype_names_go_both_ways),
        cmocka_unit_test(safetensors__unpadded_and_padded_headers_are_read),
        cmocka_unit_test(safetensors__files_without_tensors_are_read),
        cmocka_unit_test(safetensors__tensors_are_sorted_by_place),
        cmocka_unit_test(safetensors__data_behind_the_blob_is_allowed_on_request),
        cmocka_unit_test(safetensors__own_facts_are_read),
        cmocka_unit_test(safetensors__own_facts_of_another_schema_are_ignored),
        cmocka_unit_test(safetensors__only_the_header_is_read),
        cmocka_unit_test(safetensors__each_defect_is_refused),
        cmocka_unit_test(safetensors__texts_must_fit_the_tensors),
        cmocka_unit_test(safetensors__more_dimensions_than_tensors_have_are_refused),
        cmocka_unit_test(safetensors__what_is_no_safetensors_file_is_refused_at_its_start),
        cmocka_unit_test(safetensors__every_truncation_is_refused),
        cmocka_unit_test(safetensors__limits_hold),
        cmocka_unit_test(safetensors__nesting_within_the_limit_does_not_overflow_the_stack),
        cmocka_unit_test(safetensors__failing_allocations_leak_nothing),
        cmocka_unit_test(safetensors__random_changes_never_yield_a_wrong_header),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
