/* repr against what Python 3.11 printed: tests/data/make_repr.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state/value.h"
#include "support/failing_alloc.h"

/* ---- building values from the data file ---- */

static uint64_t hex64(const char *token)
{
    return strtoull(token, NULL, 16);
}

static double double_of(const char *token)
{
    uint64_t bits = hex64(token);
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

static size_t unhex(char *token)
{
    size_t n = strcmp(token, "-") == 0 ? 0 : strlen(token) / 2;
    for (size_t i = 0; i < n; i++) {
        char digits[3] = {token[2 * i], token[2 * i + 1], 0};
        token[i] = (char)strtoul(digits, NULL, 16);
    }
    return n;
}

static dcp_value *build(char **rest);

static char *next_token(char **rest)
{
    char *token = strsep(rest, " ");
    assert_non_null(token);
    return token;
}

static dcp_value *build_seq(dcp_kind kind, char **rest)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_seq_create(NULL, kind, &v, NULL), DCP_OK);
    for (long n = atol(next_token(rest)); n; n--) {
        assert_int_equal(dcp_list_append(v, build(rest), NULL), DCP_OK);
    }
    return v;
}

static dcp_value *build_dict(bool is_ordered, char **rest)
{
    dcp_value *v = NULL;
    assert_int_equal(is_ordered ? dcp_ordered_dict_create(NULL, &v, NULL) : dcp_dict_create(NULL, &v, NULL), DCP_OK);
    for (long n = atol(next_token(rest)); n; n--) {
        dcp_value *k = build(rest), *x = build(rest);
        dcp_key key = {.string = dcp_value_str(k)};
        key.is_int = dcp_value_int(k, &key.integer);
        assert_int_equal(dcp_dict_set(v, key, x, NULL), DCP_OK);
        dcp_value_free(k);
    }
    return v;
}

static dcp_value *build_dict_of_any_keys(char **rest)
{
    dcp_value *v = NULL, *pairs = NULL;
    assert_int_equal(dcp_list_create(NULL, &pairs, NULL), DCP_OK);
    for (long n = 2 * atol(next_token(rest)); n; n--) {
        assert_int_equal(dcp_list_append(pairs, build(rest), NULL), DCP_OK);
    }
    dcp__opaque parts = {
        .form = DCP__OPAQUE_REDUCE, .module = dcp_str_of("builtins"), .name = dcp_str_of("dict"), .pairs = pairs};
    assert_int_equal(dcp__opaque_create(NULL, &parts, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *build_text(char kind, char *token)
{
    size_t n = unhex(token);
    dcp_value *v = NULL;
    dcp_status status = kind == 'S'   ? dcp_string_create(NULL, (dcp_str){token, n}, &v, NULL)
                        : kind == 'V' ? dcp_device_name_create(NULL, (dcp_str){token, n}, &v, NULL)
                        : kind == 'B'
                            ? dcp_bigint_create(NULL, (uint8_t *)token, n, &v, NULL)
                            : dcp_bytes_create(NULL, kind == 'Y' ? DCP_KIND_BYTES : DCP_KIND_BYTEARRAY, token, n, &v, NULL);
    assert_int_equal(status, DCP_OK);
    return v;
}

static dcp_value *build(char **rest)
{
    char kind = next_token(rest)[0];
    dcp_value *v = NULL;
    switch (kind) {
    case 'N': dcp_none_create(NULL, &v, NULL); break;
    case 'T':
    case 'F': dcp_bool_create(NULL, kind == 'T', &v, NULL); break;
    case 'I': dcp_int_create(NULL, strtoll(next_token(rest), NULL, 10), &v, NULL); break;
    case 'D': dcp_float_create(NULL, double_of(next_token(rest)), &v, NULL); break;
    case 'C': {
        double re = double_of(next_token(rest));
        dcp_complex_create(NULL, re, double_of(next_token(rest)), &v, NULL);
        break;
    }
    case 'L': return build_seq(DCP_KIND_LIST, rest);
    case 'U': return build_seq(DCP_KIND_TUPLE, rest);
    case 'Z': return build_seq(DCP_KIND_SIZE, rest);
    case 'E': return build_seq(DCP_KIND_SET, rest);
    case 'X': return build_seq(DCP_KIND_FROZENSET, rest);
    case 'M':
    case 'O': return build_dict(kind == 'O', rest);
    case 'G': return build_dict_of_any_keys(rest);
    default: return build_text(kind, next_token(rest));
    }
    assert_non_null(v);
    return v;
}

static void assert_repr(const dcp_value *v, const char *expected)
{
    char *text = NULL;
    size_t len = 0;
    assert_int_equal(dcp_value_repr(v, 0, &text, &len, NULL), DCP_OK);
    assert_int_equal(strlen(text), len);
    assert_string_equal(text, expected);
    dcp_text_free(NULL, text);
}

/* Calls fn with each line, without its end. */
static size_t for_each_line(const char *name, void (*fn)(char *line))
{
    char path[512], *line = NULL;
    size_t cap = 0, n = 0;
    snprintf(path, sizeof path, "%s/data/%s", DCP_TEST_DIR, name);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    for (ssize_t len; (len = getline(&line, &cap, f)) > 0; n++) {
        line[len - 1] = 0;
        fn(line);
    }
    free(line);
    fclose(f);
    return n;
}

/* ---- against Python ---- */

static void check_value(char *line)
{
    char *rest = strsep(&line, "\t");
    dcp_value *v = build(&rest);
    assert_null(rest);
    assert_repr(v, line);
    dcp_value_free(v);
}

static void repr__values_print_as_in_python(void **state)
{
    (void)state;
    assert_true(for_each_line("repr_values.txt", check_value) > 1000);
}

static void check_float(char *line)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_float_create(NULL, double_of(strsep(&line, " ")), &v, NULL), DCP_OK);
    assert_repr(v, line);
    dcp_value_free(v);
}

static void repr__floats_print_as_in_python(void **state)
{
    (void)state;
    assert_true(for_each_line("repr_floats.txt", check_float) > 5000);
}

static void repr__floats_do_not_depend_on_the_locale(void **state)
{
    (void)state;
    const char *const commas[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8"};
    bool found = false;
    for (size_t i = 0; i < sizeof commas / sizeof commas[0] && !found; i++) {
        found = setlocale(LC_NUMERIC, commas[i]) != NULL;
    }
    if (!found) {
        skip(); /* no locale with a decimal comma is installed */
    }
    dcp_value *v = NULL;
    assert_int_equal(dcp_float_create(NULL, 0.1, &v, NULL), DCP_OK);
    assert_repr(v, "0.1");
    dcp_value_free(v);
    setlocale(LC_NUMERIC, "C");
}

enum { CODE_POINTS = 0x110000 };
static char escaped[CODE_POINTS]; /* 'E', 'U' from the file, 0 for what is printed as it is */

static void note_range(char *line)
{
    unsigned first, last;
    char kind;
    assert_int_equal(sscanf(line, "%x %x %c", &first, &last, &kind), 3);
    assert_true(first <= last && last < CODE_POINTS);
    memset(escaped + first, kind, last - first + 1);
}

static size_t encode(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6) {
        out[i] = (char)(0x80 | (c & 0x3F));
    }
    out[0] = (char)((n == 2 ? 0xC0 : n == 3 ? 0xE0 : 0xF0) | c);
    return n;
}

static void repr__escapes_what_is_not_printable(void **state)
{
    (void)state;
    assert_true(for_each_line("printable.txt", note_range) > 100);
    size_t newer = 0;
    for (uint32_t c = 0; c < CODE_POINTS; c++) {
        char raw[5] = {0}, *text = NULL;
        dcp_value *v = NULL;
        size_t n = encode(c, raw), len = 0;
        assert_int_equal(dcp_string_create(NULL, (dcp_str){raw, n}, &v, NULL), DCP_OK);
        assert_int_equal(dcp_value_repr(v, 0, &text, &len, NULL), DCP_OK);
        bool is_as_it_is = c == '\\' ? true : len == n + 2 && memcmp(text + 1, raw, n) == 0;
        if (escaped[c] == 'U' && is_as_it_is) {
            newer++; /* assigned by a later Unicode than that of the Python that wrote the file */
        } else {
            assert_int_equal(is_as_it_is, !escaped[c]);
        }
        dcp_text_free(NULL, text);
        dcp_value_free(v);
    }
    assert_true(newer < 40000);
}

/* ---- things that Python does not have ---- */

static void repr__tensors_and_opaque_values(void **state)
{
    (void)state;
    dcp_value *v = NULL;
    float data[15];
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, (int64_t[]){3, 5}, data);
    assert_int_equal(dcp_tensor_create(NULL, &t, &v, NULL), DCP_OK);
    assert_repr(v, "<tensor float32 [3, 5]>");
    dcp_value_free(v);
    t = dcp_tensor_make(DCP_BFLOAT16, 0, NULL, data);
    assert_int_equal(dcp_tensor_create(NULL, &t, &v, NULL), DCP_OK);
    assert_repr(v, "<tensor bfloat16 []>");
    dcp_value_free(v);
    dcp_tensor chunks[2] = {dcp_tensor_make(DCP_FLOAT32, 1, (int64_t[]){3}, data),
                            dcp_tensor_make(DCP_FLOAT32, 1, (int64_t[]){3}, data)};
    dcp_box boxes[2] = {{(int64_t[]){0}, (int64_t[]){3}}, {(int64_t[]){3}, (int64_t[]){3}}};
    assert_int_equal(dcp_sharded_create(NULL, DCP_FLOAT32, 1, (int64_t[]){8}, 2, chunks, boxes, &v, NULL), DCP_OK);
    assert_repr(v, "<sharded float32 [8], 2 chunks>");
    dcp_value_free(v);
    assert_int_equal(dcp_dtype_create(NULL, DCP_FLOAT8_E4M3FN, &v, NULL), DCP_OK);
    assert_repr(v, "torch.float8_e4m3fn");
    dcp_value_free(v);
    dcp__opaque parts = {.form = DCP__OPAQUE_GLOBAL, .module = dcp_str_of("a.b"), .name = dcp_str_of("C\n\xff"), .bytes = 12};
    assert_int_equal(dcp__opaque_create(NULL, &parts, &v, NULL), DCP_OK);
    assert_repr(v, "<a.b.C\\n\\xff, 12 bytes>");
    dcp_value_free(v);
}

/* ---- limits ---- */

static dcp_status try_repr(const dcp_value *v, size_t max_bytes)
{
    char *text = NULL;
    dcp_status status = dcp_value_repr(v, max_bytes, &text, NULL, NULL);
    assert_true((status == DCP_OK) == (text != NULL));
    dcp_text_free(NULL, text);
    return status;
}

static void repr__longer_than_allowed_is_a_limit(void **state)
{
    (void)state;
    dcp_value *v = NULL;
    assert_int_equal(dcp_string_create(NULL, dcp_str_of("abc\n"), &v, NULL), DCP_OK);
    assert_int_equal(try_repr(v, 7), DCP_OK);
    assert_int_equal(try_repr(v, 6), DCP_LIMIT);
    assert_int_equal(try_repr(v, 1), DCP_LIMIT);
    dcp_value_free(v);
    uint8_t big[100] = {[99] = 1}; /* 239 digits */
    assert_int_equal(dcp_bigint_create(NULL, big, sizeof big, &v, NULL), DCP_OK);
    assert_int_equal(try_repr(v, 239), DCP_OK);
    assert_int_equal(try_repr(v, 238), DCP_LIMIT);
    assert_int_equal(try_repr(v, 10), DCP_LIMIT);
    dcp_value_free(v);
    assert_int_equal(dcp_value_repr(NULL, 0, NULL, NULL, NULL), DCP_ARG);
}

static dcp_value *nested(size_t levels, size_t width)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_list_create(NULL, &v, NULL), DCP_OK);
    for (size_t i = 0; i < levels; i++) {
        dcp_value *outer = NULL;
        assert_int_equal(dcp_list_create(NULL, &outer, NULL), DCP_OK);
        for (size_t j = 0; j < width; j++) {
            assert_int_equal(dcp_list_append(outer, j ? dcp_value_retain(v) : v, NULL), DCP_OK);
        }
        v = outer;
    }
    return v;
}

static void repr__deep_and_shared_trees_are_limits(void **state)
{
    (void)state;
    dcp_value *v = nested(256, 1);
    assert_int_equal(try_repr(v, 0), DCP_OK);
    dcp_value_free(v);
    v = nested(257, 1);
    assert_int_equal(try_repr(v, 0), DCP_LIMIT);
    dcp_value_free(v);
    v = nested(200, 2); /* 2^200 empty lists if written out */
    assert_int_equal(try_repr(v, 1 << 20), DCP_LIMIT);
    dcp_value_free(v);
}

static void repr__huge_integers_end_soon(void **state)
{
    (void)state;
    size_t len = 41524; /* 100,000 digits */
    uint8_t *bytes = calloc(1, 4000000);
    bytes[len - 1] = 1;
    dcp_value *v = NULL;
    assert_int_equal(dcp_bigint_create(NULL, bytes, len, &v, NULL), DCP_OK);
    assert_int_equal(try_repr(v, 0), DCP_OK);
    dcp_value *list = NULL;
    assert_int_equal(dcp_list_create(NULL, &list, NULL), DCP_OK);
    for (int i = 0; i < 600; i++) {
        assert_int_equal(dcp_list_append(list, dcp_value_retain(v), NULL), DCP_OK);
    }
    assert_int_equal(try_repr(list, 0), DCP_LIMIT);
    dcp_value_free(list);
    dcp_value_free(v);
    bytes[3999999] = 1;
    assert_int_equal(dcp_bigint_create(NULL, bytes, 4000000, &v, NULL), DCP_OK);
    assert_int_equal(try_repr(v, 0), DCP_LIMIT);
    dcp_value_free(v);
    free(bytes);
}

static dcp_status repr_once(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp_value *list = NULL, *v = NULL;
    char *text = NULL;
    const uint8_t big[20] = {[19] = 0x80};
    dcp_status status = dcp_list_create(ctx, &list, err);
    for (int i = 0; status == DCP_OK && i < 20; i++) {
        status = i % 2 ? dcp_string_create(ctx, dcp_str_of("text"), &v, err) : dcp_bigint_create(ctx, big, sizeof big, &v, err);
        if (status == DCP_OK) {
            status = dcp_list_append(list, v, err);
            if (status != DCP_OK) {
                dcp_value_free(v);
            }
        }
    }
    status = status == DCP_OK ? dcp_value_repr(list, 0, &text, NULL, err) : status;
    dcp_text_free(ctx, text);
    dcp_value_free(list);
    return status;
}

static void repr__out_of_memory_leaks_nothing(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(repr_once, NULL) > 30);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(repr__values_print_as_in_python),          cmocka_unit_test(repr__floats_print_as_in_python),
        cmocka_unit_test(repr__floats_do_not_depend_on_the_locale), cmocka_unit_test(repr__escapes_what_is_not_printable),
        cmocka_unit_test(repr__tensors_and_opaque_values),          cmocka_unit_test(repr__longer_than_allowed_is_a_limit),
        cmocka_unit_test(repr__deep_and_shared_trees_are_limits),   cmocka_unit_test(repr__huge_integers_end_soon),
        cmocka_unit_test(repr__out_of_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
