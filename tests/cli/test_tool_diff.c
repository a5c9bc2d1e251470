/* diff: two checkpoints of any forms, and what the exit status says about them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <stdio.h>

#include "cli/tool.h"

static void diff__equal_ones_of_other_forms(void **state)
{
    (void)state;
    tool_run r = tool("diff " GOLDEN "2.7.1/sharded/ckpt " GOLDEN "2.15.0/sharded/ckpt");
    assert_int_equal(r.status, 0);
    assert_int_equal(r.out_len, 0);
    assert_non_null(strstr(r.err, "0 differences"));
    tool_free(&r);
    r = tool("diff -q " GOLDEN "2.13.0/zstd/ckpt " GOLDEN "2.7.1/zstd/ckpt");
    assert_int_equal(r.status, 0);
    assert_int_equal(r.err_len, 0);
    tool_free(&r);
}

static void diff__differences_make_the_status_1(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    static const char head[] = "{\"same\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                               "\"t\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[4,8]}}";
    char header[256];
    snprintf(header, sizeof header, head, "U8", "4");
    tool_write_safetensors(dir, "a.safetensors", header, 8);
    snprintf(header, sizeof header, head, "I8", "4");
    tool_write_safetensors(dir, "b.safetensors", header, 8);
    snprintf(header, sizeof header, head, "U8", "2,2");
    tool_write_safetensors(dir, "c.safetensors", header, 8);
    tool_run r = tool("diff %s/a.safetensors %s/b.safetensors", dir, dir);
    assert_int_equal(r.status, 1);
    assert_string_equal(r.out, "t: uint8 and int8\n");
    tool_free(&r);
    r = tool("diff -q %s/a.safetensors %s/c.safetensors", dir, dir);
    assert_int_equal(r.status, 1);
    assert_string_equal(r.out, "t: shape [4] and [2, 2]\n");
    tool_free(&r);
    tool_remove_dir(dir);
}

static void diff__json_has_the_numbers(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_write_safetensors(dir, "a.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4);
    tool_write_safetensors(dir, "b.safetensors",
                           "{\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                           "\"t\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[1,5]}}",
                           5);
    tool_run r = tool("diff --json %s/a.safetensors %s/b.safetensors", dir, dir);
    assert_int_equal(r.status, 1);
    json_t *json = json_loadb(r.out, r.out_len, 0, NULL), *t, *first, *u;
    assert_non_null(json);
    assert_int_equal(json_integer_value(json_object_get(json, "added")), 1);
    assert_int_equal(json_integer_value(json_object_get(json, "value")), 1);
    t = json_array_get(json_object_get(json, "differences"), 0);
    u = json_array_get(json_object_get(json, "differences"), 1);
    first = json_object_get(t, "first");
    assert_string_equal(json_string_value(json_object_get(t, "name")), "t");
    assert_int_equal(json_integer_value(json_object_get(t, "n_different")), 4); /* 0 1 2 3 and 1 2 3 4 */
    assert_int_equal(json_array_size(first), 2);
    assert_true(json_number_value(json_object_get(t, "max_abs")) == 1);
    assert_string_equal(json_string_value(json_object_get(u, "kind")), "added");
    assert_true(json_is_null(json_object_get(u, "a")));
    json_decref(json);
    tool_free(&r);
    r = tool("diff --atol 1 %s/a.safetensors %s/b.safetensors", dir, dir);
    assert_string_equal(r.out, "u: only in the second\n");
    tool_free(&r);
    tool_remove_dir(dir);
}

static void diff__wrong_usage_and_absent_ones(void **state)
{
    (void)state;
    tool_fails(2, "diff " GOLDEN "2.13.0/sharded/ckpt");
    tool_fails(2, "diff a b c");
    tool_fails(2, "diff --rtol=-1 a b");
    tool_fails(2, "diff --atol=x a b");
    tool_fails(1, "diff " GOLDEN "2.13.0/sharded/ckpt /nowhere");
    tool_fails(1, "diff /nowhere " GOLDEN "2.13.0/sharded/ckpt");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(diff__equal_ones_of_other_forms),
        cmocka_unit_test(diff__differences_make_the_status_1),
        cmocka_unit_test(diff__json_has_the_numbers),
        cmocka_unit_test(diff__wrong_usage_and_absent_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
