/* JSON front to back: what is accepted is what jansson accepts, and values are its values. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <jansson.h>

#include "format/json_scan.h"
#include "support/random.h"

static dcp__arena arena;

static dcp__jscan scan_of(const char *text, size_t len)
{
    return (dcp__jscan){&arena, text, text, text + len, 100, "text", 0};
}

static int set_up(void **state)
{
    (void)state;
    dcp__arena_init(&arena, dcp__context(NULL), UINT64_MAX);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    dcp__arena_reset(&arena);
    return 0;
}

static dcp_status skip_all(const char *text, size_t len, dcp_error *err)
{
    dcp__jscan s = scan_of(text, len);
    dcp_status status = dcp__jscan_skip(&s, err);
    return status == DCP_OK ? dcp__jscan_end(&s, err) : status;
}

/* ---- the same texts as jansson ---- */

static void agrees_with_jansson(const char *text, size_t len)
{
    json_error_t fault;
    dcp_error err = DCP_ERROR_INIT;
    json_t *json = json_loadb(text, len, JSON_DECODE_ANY | JSON_ALLOW_NUL, &fault);
    dcp_status status = skip_all(text, len, &err);
    bool is_number =
        !json && json_error_code(&fault) == json_error_numeric_overflow; /* which is a matter of who wants a number */
    if (!is_number && (json != NULL) != (status == DCP_OK)) {
        fail_msg("%.*s: jansson %s, here %s", (int)len, text, json ? "accepts it" : fault.text,
                 status ? err.message : "accepted");
    }
    if (status != DCP_OK) {
        assert_int_equal(status, DCP_FORMAT);
        assert_in_range(err.offset, 100, 100 + len);
    }
    json_decref(json);
}

static const char *const texts[] = {
    "{}",
    "[]",
    " [ 1 , -2.5e+3 , true,false , null ] ",
    "{\"a\":{\"b\":[{\"c\":\"d\"}]},\"e\":\"\\u00e4\\ud83d\\ude00\\n\"}",
    "\"gr\xc3\xbc\xc3\x9f\xf0\x9f\x98\x80\"",
    "0",
    "-0",
    "0.5",
    "1E5",
    "-1e-5",
    "123456789012345678",
    "[[[[[[]]]]]]",
    "{\"\":0,\" \":[\"\\\\\",\"\\\"\"]}",
    /* none of these */
    "",
    " ",
    "{",
    "[",
    "[1",
    "[1,",
    "[1,]",
    "[,1]",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\":1,}",
    "{a:1}",
    "{1:1}",
    "[1 2]",
    "01",
    "-",
    "1.",
    ".5",
    "1e",
    "+1",
    "0x1",
    "tru",
    "nul",
    "NaN",
    "'a'",
    "\"",
    "\"a",
    "\"\\\"",
    "\"\\x\"",
    "\"\\u12\"",
    "\"\\u12g4\"",
    "\"\\ud800\"",
    "\"\\ud800\\ud800\"",
    "\"\\udc00\"",
    "\"\\ud800x\"",
    "\"\xff\"",
    "\"\xc0\x80\"",
    "\"\xed\xa0\x80\"",
    "\"\xf4\x90\x80\x80\"",
    "\"\x01\"",
    "\"\t\"",
    "{\"a\\u0000\":1}",
    "[]]",
    "{}{}",
    "[}",
    "{]",
    "1 1",
    "\xef\xbb\xbf{}",
    "/**/1",
};

static void scan__accepts_what_jansson_accepts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        agrees_with_jansson(texts[i], strlen(texts[i]));
    }
    agrees_with_jansson("\"a\0b\"", 5);
    agrees_with_jansson("[1]\0", 4);
    agrees_with_jansson("\"\\u0000\"", 8);
}

static void scan__accepts_what_jansson_accepts_of_mutated_texts(void **state)
{
    (void)state;
    static const char bytes[] = "{}[]:,\"\\u0123dD8eE+-.aftn \xc3\xbc\xed\xa0";
    test_random rnd = test_random_seeded("mutations");
    for (int run = 0; run < 30000; run++) {
        char text[128];
        const char *from = texts[test_random_below(&rnd, sizeof texts / sizeof texts[0])];
        size_t len = strlen(from);
        memcpy(text, from, len);
        for (int64_t k = test_random_below(&rnd, 4); k >= 0 && len + 2 < sizeof text; k--) {
            size_t at = (size_t)test_random_below(&rnd, (int64_t)len + 1);
            char byte = bytes[test_random_below(&rnd, sizeof bytes - 1)];
            if (at < len && test_random_below(&rnd, 2)) {
                text[at] = byte;
            } else {
                memmove(text + at + 1, text + at, len++ - at);
                text[at] = byte;
            }
        }
        char *exact = malloc(len + !len); /* so that reading behind the end shows */
        memcpy(exact, text, len);
        agrees_with_jansson(exact, len);
        free(exact);
    }
}

/* ---- values ---- */

static void scan__strings_are_decoded(void **state)
{
    (void)state;
    static const char *const given[] = {"\"\"", "\"plain\"", "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
                                        "\"\\u00e4\\u20ac\\ud83d\\ude00!\"", " \"\xc3\xa4\\u0041\""};
    static const char *const expected[] = {"", "plain", "\"\\/\b\f\n\r\t", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80!", "\303\244A"};
    for (size_t i = 0; i < sizeof given / sizeof given[0]; i++) {
        dcp_str out;
        dcp__jscan s = scan_of(given[i], strlen(given[i]));
        assert_int_equal(dcp__jscan_peek(&s), '"');
        assert_int_equal(dcp__jscan_string(&s, &out, NULL), DCP_OK);
        assert_int_equal(out.len, strlen(expected[i]));
        assert_memory_equal(out.ptr, expected[i], out.len);
        assert_int_equal(dcp__jscan_end(&s, NULL), DCP_OK);
    }
}

static void scan__numbers_are_exact_or_none(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool is_int;
        int64_t value;
    } cases[] = {
        {"0", true, 0},
        {"-0", true, 0},
        {"-1", true, -1},
        {"9223372036854775807", true, INT64_MAX},
        {"-9223372036854775808", true, INT64_MIN},
        {"9223372036854775808", false, 0},
        {"-9223372036854775809", false, 0},
        {"99999999999999999999999", false, 0},
        {"1.0", false, 0},
        {"1e2", false, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t value = 0;
        bool is_int = !cases[i].is_int;
        dcp__jscan s = scan_of(cases[i].text, strlen(cases[i].text));
        assert_int_equal(dcp__jscan_peek(&s), '0');
        assert_int_equal(dcp__jscan_number(&s, &value, &is_int, NULL), DCP_OK);
        assert_int_equal(is_int, cases[i].is_int);
        assert_true(!is_int || value == cases[i].value);
        assert_int_equal(dcp__jscan_end(&s, NULL), DCP_OK);
    }
}

static void scan__depth_is_limited(void **state)
{
    (void)state;
    size_t depth = dcp__context(NULL)->limits.max_depth;
    char text[2002];
    dcp_error err = DCP_ERROR_INIT;
    assert_in_range(depth, 1, 1000);
    memset(text, '[', depth);
    memset(text + depth, ']', depth);
    assert_int_equal(skip_all(text, 2 * depth, &err), DCP_OK);
    memset(text, '[', depth + 1);
    memset(text + depth + 1, ']', depth + 1);
    assert_int_equal(skip_all(text, 2 * depth + 2, &err), DCP_LIMIT);
    assert_int_equal(err.offset, 100 + depth);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(scan__accepts_what_jansson_accepts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scan__accepts_what_jansson_accepts_of_mutated_texts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scan__strings_are_decoded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scan__numbers_are_exact_or_none, set_up, tear_down),
        cmocka_unit_test_setup_teardown(scan__depth_is_limited, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
