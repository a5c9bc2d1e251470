#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "escape.h"
#include "json_writer.h"
#include "npy.h"

#define STR(literal) ((dcp_str){(literal), sizeof(literal) - 1})

/* ---- escapes ---- */

static void assert_escaped(dcp_str text, escape_style style, const char *expected)
{
    char *out = escape_text(text, style);
    assert_string_equal(out, expected);
    free(out);
}

static void escape__control_characters_do_not_reach_the_terminal(void **state)
{
    (void)state;
    assert_escaped(STR("a\nb\tc\rd"), ESCAPE_NAME, "a\\nb\\tc\\rd");
    assert_escaped(STR("\x1b[2J"), ESCAPE_NAME, "\\x1b[2J");
    assert_escaped(STR("a\0b\x7f"), ESCAPE_NAME, "a\\x00b\\x7f");
    assert_escaped(STR("\xc2\x9b"), ESCAPE_NAME, "\\x9b");       /* C1: another CSI */
    assert_escaped(STR("\xe2\x80\xae"), ESCAPE_NAME, "\\u202e"); /* right-to-left override */
    assert_escaped(STR("\xe2\x80\xa8\xef\xbb\xbf"), ESCAPE_NAME, "\\u2028\\ufeff");
}

static void escape__text_of_other_scripts_stays(void **state)
{
    (void)state;
    assert_escaped(STR("模型-λ 🙂"), ESCAPE_NAME, "模型-λ 🙂");
}

static void escape__bytes_that_are_no_utf8_are_shown_as_bytes(void **state)
{
    (void)state;
    assert_escaped(STR("\xff\xc0\x80"), ESCAPE_TEXT, "\\xff\\xc0\\x80");
    assert_escaped(STR("\xe6\xa8"), ESCAPE_TEXT, "\\xe6\\xa8");                   /* cut */
    assert_escaped(STR("\xf4\x90\x80\x80"), ESCAPE_TEXT, "\\xf4\\x90\\x80\\x80"); /* beyond U+10FFFF */
    assert_escaped(STR("\xe0\x80\xaf"), ESCAPE_TEXT, "\\xe0\\x80\\xaf");          /* overlong */
    assert_escaped(STR("\xed\xa0\x80"), ESCAPE_TEXT, "\\ud800");                  /* lone surrogate */
}

static void escape__names_are_unambiguous(void **state)
{
    (void)state;
    assert_escaped(STR("a\\nb"), ESCAPE_NAME, "a\\\\nb");
    assert_escaped(STR(""), ESCAPE_NAME, "\"\"");
    assert_escaped(STR("a\\nb"), ESCAPE_TEXT, "a\\nb");
    assert_escaped(STR(""), ESCAPE_TEXT, "");
}

static void escape__sizes_and_shapes(void **state)
{
    (void)state;
    char buf[ESCAPE_SIZE_BYTES];
    int64_t extents[] = {3, INT64_MAX, 0};
    assert_string_equal(escape_size(0, buf), "0 B");
    assert_string_equal(escape_size(1023, buf), "1023 B");
    assert_string_equal(escape_size(1536, buf), "1.5 KiB");
    assert_string_equal(escape_size(UINT64_MAX, buf), "16.0 EiB");
    char *shape = escape_shape(3, extents);
    assert_string_equal(shape, "[3, 9223372036854775807, 0]");
    free(shape);
    shape = escape_shape(0, NULL);
    assert_string_equal(shape, "[]");
    free(shape);
}

/* ---- JSON ---- */

static char *text;
static size_t text_len;

static json_writer open_writer(void)
{
    return (json_writer)JSON_WRITER(open_memstream(&text, &text_len));
}

static void assert_written(json_writer *w, const char *expected)
{
    assert_int_equal(fclose(w->out), 0);
    assert_string_equal(text, expected);
    free(text);
}

static void json__containers_nest_and_close(void **state)
{
    (void)state;
    json_writer w = open_writer();
    int64_t shape[] = {2, 3};
    jw_begin(&w, '{');
    jw_key_begin(&w, "none", '{');
    jw_end(&w, '}');
    jw_key_shape(&w, "shape", 2, shape);
    jw_key_shape(&w, "scalar", 0, NULL);
    jw_key_begin(&w, "list", '[');
    jw_null(&w);
    jw_bool(&w, true);
    jw_end(&w, ']');
    jw_key_uint(&w, "u", UINT64_MAX);
    jw_end(&w, '}');
    assert_written(&w, "{\n \"none\": {},\n \"shape\": [2, 3],\n \"scalar\": [],\n \"list\": [\n  null,\n  true\n ],\n"
                       " \"u\": 18446744073709551615\n}\n");
}

static void json__strings_are_escaped(void **state)
{
    (void)state;
    json_writer w = open_writer();
    jw_begin_inline(&w, '[');
    jw_string(&w, STR("\"\\\n\0\x7f"));
    jw_string(&w, STR("λ🙂"));
    jw_string(&w, STR("\xed\xa0\x80"));
    jw_string(&w, STR("\xff"));
    jw_end(&w, ']');
    assert_written(&w, "[\"\\\"\\\\\\u000a\\u0000\\u007f\", \"λ🙂\", \"\\ud800\", \"\\udcff\"]\n");
}

/* Shortest forms as Python's repr has them (of numpy.float32 for single). */
static void json__reals_are_as_short_as_can_be(void **state)
{
    (void)state;
    char buf[JW_REAL_BYTES];
    assert_string_equal(jw_format_real(0.1, false, buf), "0.1");
    assert_string_equal(jw_format_real((double)0.1f, true, buf), "0.1");
    assert_string_equal(jw_format_real((double)0.1f, false, buf), "0.10000000149011612");
    assert_string_equal(jw_format_real(1, false, buf), "1.0");
    assert_string_equal(jw_format_real(-0.0, false, buf), "-0.0");
    assert_string_equal(jw_format_real(5e-324, false, buf), "5e-324");
    assert_string_equal(jw_format_real(1.7976931348623157e308, false, buf), "1.7976931348623157e+308");
    assert_string_equal(jw_format_real(1e22, false, buf), "1e+22");
    assert_string_equal(jw_format_real(NAN, false, buf), "\"NaN\"");
    assert_string_equal(jw_format_real(INFINITY, true, buf), "\"Infinity\"");
    assert_string_equal(jw_format_real(-INFINITY, true, buf), "\"-Infinity\"");
}

static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static void json__reals_read_back_as_the_same_bits(void **state)
{
    (void)state;
    uint64_t seed = (uint64_t)time(NULL) | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = next_random(&seed);
        uint32_t low = (uint32_t)bits;
        char buf[JW_REAL_BYTES];
        double d, d_back;
        float f, f_back;
        memcpy(&d, &bits, sizeof d);
        memcpy(&f, &low, sizeof f);
        if (isfinite(d)) {
            d_back = strtod(jw_format_real(d, false, buf), NULL);
            assert_memory_equal(&d, &d_back, sizeof d);
        }
        if (isfinite(f)) {
            f_back = strtof(jw_format_real((double)f, true, buf), NULL);
            assert_memory_equal(&f, &f_back, sizeof f);
        }
    }
}

/* ---- npy: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html ---- */

static void assert_npy(const char *descr, int ndim, const int64_t *shape, const char *dict)
{
    unsigned char header[NPY_HEADER_BYTES];
    size_t len = npy_header(descr, ndim, shape, (char *)header);
    assert_int_equal(len % 64, 0);
    assert_memory_equal(header, "\x93NUMPY\x01\x00", 8);
    assert_int_equal(header[8] | header[9] << 8, len - 10);
    assert_memory_equal(header + 10, dict, strlen(dict));
    for (size_t i = 10 + strlen(dict); i < len - 1; i++) {
        assert_int_equal(header[i], ' ');
    }
    assert_int_equal(header[len - 1], '\n');
}

static void npy__header_follows_the_rules_of_version_1(void **state)
{
    (void)state;
    int64_t shape[DCP_MAX_NDIM] = {3, 5};
    assert_npy("<f4", 0, shape, "{'descr': '<f4', 'fortran_order': False, 'shape': (), }");
    assert_npy("<f4", 1, shape, "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }");
    assert_npy("|b1", 2, shape, "{'descr': '|b1', 'fortran_order': False, 'shape': (3, 5), }");
    for (int i = 0; i < DCP_MAX_NDIM; i++) {
        shape[i] = INT64_MAX;
    }
    char dict[NPY_HEADER_BYTES] = "{'descr': '<c16', 'fortran_order': False, 'shape': (9223372036854775807";
    for (int i = 1; i < DCP_MAX_NDIM; i++) {
        strcat(dict, ", 9223372036854775807");
    }
    assert_npy("<c16", DCP_MAX_NDIM, shape, strcat(dict, "), }"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(escape__control_characters_do_not_reach_the_terminal),
        cmocka_unit_test(escape__text_of_other_scripts_stays),
        cmocka_unit_test(escape__bytes_that_are_no_utf8_are_shown_as_bytes),
        cmocka_unit_test(escape__names_are_unambiguous),
        cmocka_unit_test(escape__sizes_and_shapes),
        cmocka_unit_test(json__containers_nest_and_close),
        cmocka_unit_test(json__strings_are_escaped),
        cmocka_unit_test(json__reals_are_as_short_as_can_be),
        cmocka_unit_test(json__reals_read_back_as_the_same_bits),
        cmocka_unit_test(npy__header_follows_the_rules_of_version_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
