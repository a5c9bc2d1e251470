/* ls, info and latest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stdio.h>

#include "cli/tool.h"

static json_int_t integer(const json_t *json, const char *key)
{
    json_t *value = json_object_get(json, key);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

static const char *text(const json_t *json, const char *key)
{
    const char *value = json_string_value(json_object_get(json, key));
    assert_non_null(value);
    return value;
}

/* ---- ls ---- */

static void ls__lists_every_item_sorted_by_name(void **state)
{
    (void)state;
    json_t *expected = json_load_file(GOLDEN "2.13.0/sharded/expect.json", 0, NULL);
    json_t *tensors = json_object_get(expected, "tensors"), *objects = json_object_get(expected, "objects");
    json_t *got = tool_json("ls --json " GOLDEN "2.13.0/sharded/ckpt"), *items = json_object_get(got, "items"), *item;
    const char *before = "";
    size_t i;
    assert_int_equal(json_array_size(items), json_object_size(tensors) + json_object_size(objects));
    json_array_foreach(items, i, item)
    {
        const char *fqn = text(item, "fqn");
        json_t *tensor = json_object_get(tensors, fqn);
        assert_true(strcmp(before, fqn) < 0);
        before = fqn;
        assert_string_equal(text(item, "kind"), tensor ? "tensor" : "object");
        assert_true(tensor || json_object_get(objects, fqn));
        if (tensor) {
            assert_string_equal(text(item, "dtype"), text(tensor, "dtype"));
            assert_true(json_equal(json_object_get(item, "shape"), json_object_get(tensor, "shape")));
        }
    }
    assert_int_equal(integer(json_object_get(got, "totals"), "tensors"), json_object_size(tensors));
    json_decref(got);
    json_decref(expected);
}

/* "rows" is [10, 7] over 4 ranks: chunks of 3, 3, 3 and 1 rows, one a file. */
static void ls__tells_chunks_and_files(void **state)
{
    (void)state;
    json_t *got = tool_json("ls --json " GOLDEN "2.13.0/sharded/ckpt rows");
    json_t *item = json_array_get(json_object_get(got, "items"), 0);
    json_t *files = json_loads("[\"__0_0.distcp\", \"__1_0.distcp\", \"__2_0.distcp\", \"__3_0.distcp\"]", 0, NULL);
    assert_int_equal(integer(item, "bytes"), 280);
    assert_int_equal(integer(item, "chunks"), 4);
    assert_true(json_equal(json_object_get(item, "files"), files));
    json_decref(files);
    json_decref(got);
}

static void assert_names(const char *pattern, const char *expected)
{
    tool_run r = tool("ls --json " GOLDEN "2.13.0/sharded/ckpt '%s' | grep '\"fqn\"' | tr -d ' \\n'", pattern);
    assert_string_equal(r.out, expected);
    tool_free(&r);
}

static void ls__pattern_matches_the_whole_name(void **state)
{
    (void)state;
    assert_names("opt.*", "\"fqn\":\"opt.lr\",\"fqn\":\"opt.step\",");
    assert_names("r*s", "\"fqn\":\"rows\",");
    assert_names("*.seed", "\"fqn\":\"rng.0.seed\",\"fqn\":\"rng.1.seed\",\"fqn\":\"rng.2.seed\",\"fqn\":\"rng.3.seed\",");
    assert_names("rng.[12].seed", "\"fqn\":\"rng.1.seed\",\"fqn\":\"rng.2.seed\",");
    tool_fails(1, "ls " GOLDEN "2.13.0/sharded/ckpt ro");
}

static void ls__table_has_a_line_for_each_item_and_totals(void **state)
{
    (void)state;
    tool_run r = tool("ls " GOLDEN "2.13.0/sharded/ckpt");
    assert_int_equal(r.status, 0);
    assert_memory_equal(r.out, "FQN ", 4);
    assert_non_null(strstr(r.out, "[10, 7]"));
    assert_non_null(strstr(r.out, "4 files"));
    assert_non_null(strstr(r.out, "\n13 items: 7 tensors of "));
    tool_free(&r);
}

/* nest.a.b.c and nest.a.b.3 of the golden objects stand below three nodes. */
static void ls__tree_shows_the_nesting(void **state)
{
    (void)state;
    tool_run r = tool("ls --tree " GOLDEN "2.13.0/objects/ckpt 'nest*'");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(r.out, "nest"));
    assert_non_null(strstr(r.out, "└─a"));
    assert_non_null(strstr(r.out, "└─b"));
    assert_non_null(strstr(r.out, "├─3"));
    assert_non_null(strstr(r.out, "└─c"));
    assert_null(strstr(r.out, "nest.a"));
    tool_free(&r);
}

static void ls__values_of_single_ranks_show_the_rank(void **state)
{
    (void)state;
    json_t *got = tool_json("ls --json " GOLDEN "2.13.0/rank_local/ckpt mine"), *item;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(got, "items")), 4);
    json_array_foreach(json_object_get(got, "items"), i, item)
    {
        assert_int_equal(integer(item, "rank"), i);
    }
    json_decref(got);
}

static void ls__control_characters_are_escaped(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_write_safetensors(dir, "m.safetensors",
                           "{\"a\\n\\u001b]0;x\\u0007\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2);
    static const char *const commands[] = {"ls",     "ls --tree", "info",        "hash",
                                           "verify", "ls --json", "info --json", "hash --json"};
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        tool_run r = tool("%s %s/m.safetensors 2>&1", commands[i], dir);
        assert_int_equal(r.status, 0);
        assert_null(memchr(r.out, 0x1b, r.out_len));
        assert_null(memchr(r.out, 7, r.out_len));
        tool_free(&r);
    }
    tool_run r = tool("ls %s/m.safetensors", dir);
    assert_non_null(strstr(r.out, "\na\\n\\x1b]0;x\\x07 "));
    tool_free(&r);
    tool_remove_dir(dir);
}

/* ---- info ---- */

static void info__tells_layout_ranks_and_files(void **state)
{
    (void)state;
    json_t *got = tool_json("info --json " GOLDEN "2.13.0/sharded/ckpt"), *files = json_object_get(got, "files"), *file;
    size_t i;
    assert_int_equal(integer(got, "world"), 4);
    assert_int_equal(integer(got, "tensors"), 7);
    assert_int_equal(integer(got, "objects"), 6);
    assert_int_equal(json_array_size(files), 4);
    json_array_foreach(files, i, file)
    {
        assert_int_equal(integer(file, "rank"), i);
        assert_true(json_is_true(json_object_get(file, "present")));
        assert_true(integer(file, "referenced_bytes") > 0);
        assert_true(integer(file, "referenced_bytes") <= integer(file, "bytes"));
    }
    /* float32: 10 x 7, 3 x 2, 9 x 4, 3 x 3 */
    json_t *floats = json_object_get(json_object_get(got, "dtypes"), "float32");
    assert_int_equal(integer(floats, "tensors"), 4);
    assert_int_equal(integer(floats, "bytes"), 4 * (70 + 6 + 36 + 9));
    json_t *biggest = json_object_get(got, "biggest");
    for (i = 1; i < json_array_size(biggest); i++) {
        assert_true(integer(json_array_get(biggest, i - 1), "bytes") >= integer(json_array_get(biggest, i), "bytes"));
    }
    assert_int_equal(json_array_size(biggest), 10);
    assert_int_equal(json_array_size(json_object_get(got, "unreferenced")), 0);
    json_decref(got);
}

static void info__names_missing_and_foreign_files(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    char command[1024];
    snprintf(command, sizeof command,
             "cp -r '" GOLDEN "2.13.0/sharded/ckpt/.' %s && chmod -R u+w %s && rm %s/__2_0.distcp && mkdir %s/sub && "
             "printf abc >%s/sub/left-over",
             dir, dir, dir, dir, dir);
    assert_int_equal(system(command), 0);
    json_t *got = tool_json("info --json %s", dir), *files = json_object_get(got, "files");
    assert_true(json_is_true(json_object_get(json_array_get(files, 1), "present")));
    assert_true(json_is_false(json_object_get(json_array_get(files, 2), "present")));
    json_t *strays = json_object_get(got, "unreferenced");
    assert_int_equal(json_array_size(strays), 1);
    assert_string_equal(text(json_array_get(strays, 0), "name"), "sub/left-over");
    assert_int_equal(integer(json_array_get(strays, 0), "bytes"), 3);
    json_decref(got);
    tool_run r = tool("info %s", dir);
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(r.out, "1 missing"));
    assert_non_null(strstr(r.out, "sub/left-over"));
    tool_free(&r);
    tool_remove_dir(dir);
}

static void info__every_layout_is_described(void **state)
{
    (void)state;
    static const char *const paths[] = {"2.13.0/sharded/ckpt",
                                        "2.13.0/rank_local/ckpt",
                                        "2.13.0/hf/ckpt",
                                        "2.13.0/hf_sharded/ckpt",
                                        "2.13.0/torch_save/file.pt",
                                        "2.1.2/empty/ckpt",
                                        "2.13.0/hf/ckpt/model-00001-of-00002.safetensors"};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        tool_run r = tool("info " GOLDEN "%s", paths[i]);
        assert_int_equal(r.status, 0);
        assert_memory_equal(r.out, "layout ", 7);
        /* That release left an empty file behind that the metadata does not name. */
        assert_int_equal(strstr(r.out, "NOT PART OF IT") != NULL, strstr(paths[i], "empty") != NULL);
        tool_free(&r);
    }
}

/* ---- latest ---- */

static void latest__passes_over_what_is_not_complete(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    char command[1024], expected[512];
    snprintf(command, sizeof command,
             "cd %s && for s in 2 10 30; do cp -r '" GOLDEN
             "2.13.0/sharded/ckpt' step-$s; done && chmod -R u+w . && rm step-30/__1_0.distcp",
             dir);
    assert_int_equal(system(command), 0);
    tool_run r = tool("latest %s", dir);
    snprintf(expected, sizeof expected, "%s/step-10\n", dir);
    assert_int_equal(r.status, 0);
    assert_string_equal(r.out, expected);
    assert_non_null(strstr(r.err, "step-30"));
    tool_free(&r);
    json_t *got = tool_json("latest --json -q %s/", dir);
    expected[strlen(expected) - 1] = 0;
    assert_string_equal(text(got, "path"), expected);
    assert_non_null(strstr(text(json_array_get(json_object_get(got, "skipped"), 0), "path"), "step-30"));
    json_decref(got);
    tool_remove_dir(dir);
}

static void latest__nothing_there_fails(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_fails(1, "latest %s", dir);
    tool_fails(1, "latest %s/none", dir);
    tool_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ls__lists_every_item_sorted_by_name),
        cmocka_unit_test(ls__tells_chunks_and_files),
        cmocka_unit_test(ls__pattern_matches_the_whole_name),
        cmocka_unit_test(ls__table_has_a_line_for_each_item_and_totals),
        cmocka_unit_test(ls__tree_shows_the_nesting),
        cmocka_unit_test(ls__values_of_single_ranks_show_the_rank),
        cmocka_unit_test(ls__control_characters_are_escaped),
        cmocka_unit_test(info__tells_layout_ranks_and_files),
        cmocka_unit_test(info__names_missing_and_foreign_files),
        cmocka_unit_test(info__every_layout_is_described),
        cmocka_unit_test(latest__passes_over_what_is_not_complete),
        cmocka_unit_test(latest__nothing_there_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
