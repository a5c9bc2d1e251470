/* cat: elements against the digests of expect.json, slices against a dense tensor cut here, summaries against PyTorch 2.13. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>

#include "cli/tool.h"

static void to_hex_digest(const void *bytes, size_t len, char out[65])
{
    unsigned char digest[32];
    assert_int_equal(EVP_Digest(bytes, len, digest, NULL, EVP_sha256(), NULL), 1);
    for (size_t i = 0; i < sizeof digest; i++) {
        sprintf(out + 2 * i, "%02x", digest[i]);
    }
}

static json_t *expectation(const char *which)
{
    char path[1024];
    snprintf(path, sizeof path, GOLDEN "%s/expect.json", which);
    json_t *json = json_load_file(path, 0, NULL);
    assert_non_null(json);
    return json;
}

/* ---- raw and npy ---- */

static void assert_raw_is_as_expected(const char *which, const char *arguments)
{
    json_t *expected = expectation(which), *tensor;
    const char *fqn;
    json_object_foreach(json_object_get(expected, "tensors"), fqn, tensor)
    {
        char hex[65];
        tool_run r = tool("cat " GOLDEN "%s/ckpt '%s' --format raw %s", which, fqn, arguments);
        assert_int_equal(r.status, 0);
        to_hex_digest(r.out, r.out_len, hex);
        assert_string_equal(hex, json_string_value(json_object_get(tensor, "sha256")));
        tool_free(&r);
    }
    json_decref(expected);
}

static void cat__raw_elements_have_the_expected_digest(void **state)
{
    (void)state;
    assert_raw_is_as_expected("2.13.0/dtypes", "");
    assert_raw_is_as_expected("2.13.0/shapes", "");
    assert_raw_is_as_expected("2.13.0/zstd", "");
    assert_raw_is_as_expected("2.1.2/sharded", "");
}

/* Small enough that every tensor is read in many pieces. */
static void cat__little_memory_gives_the_same_elements(void **state)
{
    (void)state;
    assert_raw_is_as_expected("2.13.0/sharded", "--memory 64B");
    assert_raw_is_as_expected("2.13.0/shapes", "--memory 8KiB");
}

static void cat__npy_is_a_header_and_the_elements(void **state)
{
    (void)state;
    static const char dict[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (10, 7), }";
    tool_run r = tool("cat " GOLDEN "2.13.0/sharded/ckpt rows --format npy");
    char hex[65];
    assert_int_equal(r.status, 0);
    assert_int_equal(r.out_len, 128 + 280);
    assert_memory_equal(r.out, "\x93NUMPY\x01\x00\x76\x00", 10); /* 0x76 + 10 = 128 */
    assert_memory_equal(r.out + 10, dict, sizeof dict - 1);
    assert_int_equal(r.out[127], '\n');
    to_hex_digest(r.out + 128, 280, hex);
    assert_string_equal(hex, "fee29bc5c67776bb8a59ff556c07e8b980d472e48e1832b63c9956c9fb083e79");
    tool_free(&r);
}

static void cat__npy_of_new_dtypes_needs_as_bits(void **state)
{
    (void)state;
    tool_fails(1, "cat " GOLDEN "2.13.0/dtypes/ckpt d.bfloat16 --format npy");
    tool_run r = tool("cat " GOLDEN "2.13.0/dtypes/ckpt d.bfloat16 --format npy --as-bits");
    assert_int_equal(r.status, 0);
    assert_non_null(memmem(r.out, r.out_len, "'<u2'", 5));
    tool_free(&r);
    r = tool("cat " GOLDEN "2.13.0/dtypes/ckpt d.float8_e5m2 --format npy --as-bits");
    assert_non_null(memmem(r.out, r.out_len, "'|u1'", 5));
    tool_free(&r);
    r = tool("cat " GOLDEN "2.13.0/dtypes/ckpt d.float16 --format npy --as-bits");
    assert_non_null(memmem(r.out, r.out_len, "'<f2'", 5));
    tool_free(&r);
}

/* ---- slices ---- */

typedef struct cut {
    const char *text;
    int start[2], step[2], count[2];
} cut;

/* [300, 257] elements; starts, steps and counts worked out by hand from NumPy's rules. */
static const cut cuts[] = {
    {"3", {3, 0}, {1, 1}, {1, 257}},
    {"-1", {299, 0}, {1, 1}, {1, 257}},
    {"-1:", {299, 0}, {1, 1}, {1, 257}},
    {"1:5", {1, 0}, {1, 1}, {4, 257}},
    {":,2:4", {0, 2}, {1, 1}, {300, 2}},
    {"::2", {0, 0}, {2, 1}, {150, 257}},
    {"1::7,3::100", {1, 3}, {7, 100}, {43, 3}},
    {"...,-1", {0, 256}, {1, 1}, {300, 1}},
    {"-3:,-5:-1:2", {297, 252}, {1, 2}, {3, 2}},
    {"290:1000,7", {290, 7}, {1, 1}, {10, 1}},
    {"[5,6]", {5, 6}, {1, 1}, {1, 1}},
    {"9:9", {9, 0}, {1, 1}, {0, 257}},
    {"...", {0, 0}, {1, 1}, {300, 257}},
};

static size_t cut_dense(const cut *c, const char *dense, char *out)
{
    size_t n = 0;
    for (int i = 0; i < c->count[0]; i++) {
        for (int j = 0; j < c->count[1]; j++) {
            int row = c->start[0] + i * c->step[0], column = c->start[1] + j * c->step[1];
            memcpy(out + 4 * n++, dense + 4 * (row * 257 + column), 4);
        }
    }
    return 4 * n;
}

static void assert_slices(const char *which, const char *fqn, const char *arguments)
{
    char *expected = malloc(300 * 257 * 4);
    tool_run dense = tool("cat %s %s --format raw", which, fqn);
    assert_int_equal(dense.out_len, 300 * 257 * 4);
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        size_t len = cut_dense(&cuts[i], dense.out, expected);
        tool_run r = tool("cat %s %s '%s' --format raw %s", which, fqn, cuts[i].text, arguments);
        assert_int_equal(r.status, 0);
        assert_int_equal(r.out_len, len);
        assert_memory_equal(r.out, expected, len);
        tool_free(&r);
    }
    tool_free(&dense);
    free(expected);
}

static void cat__slices_are_cut_from_the_whole(void **state)
{
    (void)state;
    assert_slices(GOLDEN "2.13.0/shapes/ckpt", "big", "");
    assert_slices(GOLDEN "2.13.0/zstd/ckpt", "big", "");
    assert_slices(GOLDEN "2.13.0/torch_save/file.pt", "model.big", "");
    assert_slices(GOLDEN "2.13.0/hf/ckpt", "big", "");
}

static void cat__slices_in_pieces_are_the_same(void **state)
{
    (void)state;
    assert_slices(GOLDEN "2.13.0/shapes/ckpt", "big", "--memory 20KiB");
    assert_slices(GOLDEN "2.13.0/shapes/ckpt", "big", "--memory 400B --threads 1");
}

static void cat__slices_that_do_not_fit_fail(void **state)
{
    (void)state;
    static const char *const bad[] = {"300", "-301", "0,0,0", "::-1", "x", "0,257"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tool_fails(1, "cat " GOLDEN "2.13.0/shapes/ckpt big '%s'", bad[i]);
    }
    tool_fails(1, "cat " GOLDEN "2.13.0/objects/ckpt step 0");
}

/* ---- JSON ---- */

static void assert_json(const char *arguments, const char *expected_text)
{
    json_t *expected = json_loads(expected_text, JSON_DECODE_ANY, NULL);
    assert_non_null(expected);
    json_t *got = tool_json("cat %s", arguments);
    if (!json_equal(got, expected)) {
        char *text = json_dumps(got, JSON_ENCODE_ANY);
        fail_msg("%s: got %s", arguments, text);
    }
    json_decref(got);
    json_decref(expected);
}

/* First elements as PyTorch 2.13 prints them with tolist(). */
static void cat__json_is_nested_lists(void **state)
{
    (void)state;
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.int8 0,:3 -f json", "[30, 94, 31]");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.uint64 ':1,0:1' -f json", "[[35]]");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.bool 0,:3 -f json", "[true, true, true]");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.bfloat16 0,:3 -f json", "[28.625, 16.0, 12.3125]");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.float8_e4m3fnuz 0,:3 -f json", "[20.0, 28.0, 16.0]");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.float8_e8m0fnu 0,2 -f json", "16.0");
    assert_json(GOLDEN "2.13.0/dtypes/ckpt d.complex64 0,0 -f json", "[37.0, 5.285714]");
    assert_json(GOLDEN "2.13.0/shapes/ckpt empty_mid -f json", "[[], [], []]");
    assert_json(GOLDEN "2.13.0/shapes/ckpt empty -f json", "[]");
}

typedef struct summary_case {
    const char *dtype;
    double min, max, mean;
    int zeros;
} summary_case;

/* torch: t.double().min(), .max(), .mean(), (t == 0).sum() */
static const summary_case summary_cases[] = {
    {"float32", 0.3333333432674408, 33, 18.39999989469846, 0},
    {"float64", 4.333333492279053, 30.33333396911621, 14.311111164093017, 0},
    {"float16", 0.333251953125, 33, 17.222347005208334, 0},
    {"bfloat16", 4.65625, 30.375, 19.277083333333334, 0},
    {"int8", 13, 96, 58.86666666666667, 0},
    {"uint8", 4, 92, 42.666666666666664, 0},
    {"int16", 3, 92, 47.666666666666664, 0},
    {"int32", 8, 92, 55.666666666666664, 0},
    {"int64", 11, 93, 43.53333333333333, 0},
    {"uint16", 3, 93, 56.46666666666667, 0},
    {"uint32", 6, 98, 48.266666666666666, 0},
    {"uint64", 4, 96, 50.86666666666667, 0},
    {"float8_e4m3fn", 1.375, 24, 12.375, 0},
    {"float8_e5m2", 1, 28, 14.4, 0},
    {"float8_e4m3fnuz", 2.75, 30, 12.866666666666667, 0},
    {"float8_e5m2fnuz", 2, 32, 13.466666666666667, 0},
    {"float8_e8m0fnu", 1, 32, 17.4, 0},
};

static double number(const json_t *json, const char *key)
{
    json_t *value = json_object_get(json, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

/* The sum's order differs from PyTorch's. Single floats are written with their own digits. */
static void assert_near(double got, double expected)
{
    assert_true(fabs(got - expected) <= 1e-7 * fabs(expected));
}

static void cat__summaries_agree_with_pytorch(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof summary_cases / sizeof *summary_cases; i++) {
        const summary_case *c = &summary_cases[i];
        json_t *s = tool_json("cat --json " GOLDEN "2.13.0/dtypes/ckpt d.%s --memory 16B", c->dtype);
        assert_string_equal(json_string_value(json_object_get(s, "dtype")), c->dtype);
        assert_near(number(s, "min"), c->min);
        assert_near(number(s, "max"), c->max);
        assert_near(number(s, "mean"), c->mean);
        assert_int_equal(number(s, "zeros"), c->zeros);
        assert_int_equal(number(s, "elements"), 15);
        assert_int_equal(json_array_size(json_object_get(s, "first")), 8);
        json_decref(s);
    }
}

static void cat__summary_for_people(void **state)
{
    (void)state;
    tool_run r = tool("cat " GOLDEN "2.13.0/dtypes/ckpt d.int8 0,:3");
    assert_int_equal(r.status, 0);
    assert_string_equal(r.out, "name      d.int8\nslice     0,:3\ndtype     int8\nshape     [3]\nelements  3\nbytes     3 B\n"
                               "min       30\nmax       94\nmean      51.6667\nzeros     0\nfirst     [30, 94, 31]\n");
    tool_free(&r);
}

/* ---- objects and names ---- */

static void cat__objects_are_python_literals(void **state)
{
    (void)state;
    json_t *expected = expectation("2.13.0/objects"), *repr;
    const char *fqn;
    json_object_foreach(json_object_get(expected, "objects"), fqn, repr)
    {
        tool_run r = tool("cat " GOLDEN "2.13.0/objects/ckpt '%s'", fqn);
        assert_int_equal(r.status, 0);
        assert_true(r.out_len > 0 && r.out[r.out_len - 1] == '\n');
        r.out[r.out_len - 1] = 0;
        assert_string_equal(r.out, json_string_value(repr));
        tool_free(&r);
    }
    json_decref(expected);
    assert_json(GOLDEN "2.13.0/objects/ckpt pair --json", "{\"fqn\": \"pair\", \"type\": \"tuple\", \"repr\": \"(1, 'two')\"}");
    assert_json(GOLDEN "2.13.0/objects/ckpt big_int -f json",
                "{\"fqn\": \"big_int\", \"type\": \"int\", \"repr\": \"1208925819614629174706176\"}");
}

static void cat__values_of_single_ranks_need_the_rank(void **state)
{
    (void)state;
    tool_fails(1, "cat " GOLDEN "2.13.0/rank_local/ckpt mine");
    tool_fails(1, "cat " GOLDEN "2.13.0/rank_local/ckpt mine --rank 4");
    tool_run r = tool("cat " GOLDEN "2.13.0/rank_local/ckpt mine --rank 3 -f raw");
    char hex[65];
    assert_int_equal(r.status, 0);
    to_hex_digest(r.out, r.out_len, hex);
    assert_string_equal(hex, "811aa019beb07ca73830fc7f23248aed5fc5c011eb90beacd3e23306692802af");
    tool_free(&r);
    r = tool("cat " GOLDEN "2.13.0/rank_local/ckpt rows --rank 3 -f raw"); /* common to all */
    assert_int_equal(r.out_len, 280);
    tool_free(&r);
}

static void cat__names_are_found_as_they_are_and_as_they_are_printed(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_write_safetensors(dir, "m.safetensors", "{\"a\\n\\u001b[2J\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
                           2);
    char arguments[256];
    snprintf(arguments, sizeof arguments, "%s/m.safetensors 'a\\n\\x1b[2J' -f json", dir);
    assert_json(arguments, "[0, 1]");
    snprintf(arguments, sizeof arguments, "%s/m.safetensors \"$(printf 'a\\n\\033[2J')\" -f json", dir);
    assert_json(arguments, "[0, 1]");
    tool_remove_dir(dir);
    json_t *unnamed = tool_json("cat --json " GOLDEN "2.13.0/objects/ckpt ''");
    assert_string_equal(json_string_value(json_object_get(unnamed, "fqn")), "");
    assert_int_equal(number(unnamed, "elements"), 2);
    json_decref(unnamed);
    tool_fails(1, "cat " GOLDEN "2.13.0/objects/ckpt nest");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cat__raw_elements_have_the_expected_digest),
        cmocka_unit_test(cat__little_memory_gives_the_same_elements),
        cmocka_unit_test(cat__npy_is_a_header_and_the_elements),
        cmocka_unit_test(cat__npy_of_new_dtypes_needs_as_bits),
        cmocka_unit_test(cat__slices_are_cut_from_the_whole),
        cmocka_unit_test(cat__slices_in_pieces_are_the_same),
        cmocka_unit_test(cat__slices_that_do_not_fit_fail),
        cmocka_unit_test(cat__json_is_nested_lists),
        cmocka_unit_test(cat__summaries_agree_with_pytorch),
        cmocka_unit_test(cat__summary_for_people),
        cmocka_unit_test(cat__objects_are_python_literals),
        cmocka_unit_test(cat__values_of_single_ranks_need_the_rank),
        cmocka_unit_test(cat__names_are_found_as_they_are_and_as_they_are_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
