/* merge, reshard and demo: what several ranks would have written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/tool.h"

#define SHARDED GOLDEN "2.13.0/sharded/ckpt"
#define RANK_LOCAL GOLDEN "2.13.0/rank_local/ckpt"

static json_int_t number(const json_t *json, const char *key)
{
    assert_true(json_is_integer(json_object_get(json, key)));
    return json_integer_value(json_object_get(json, key));
}

static json_t *values(const char *path)
{
    json_t *json = tool_json("hash --json '%s'", path);
    json_object_del(json, "world");
    return json;
}

static void assert_same_values(const char *a, const char *b)
{
    json_t *x = values(a), *y = values(b);
    assert_true(json_equal(x, y));
    json_decref(x);
    json_decref(y);
}

/* Number of chunks of a tensor. */
static json_int_t chunks(const char *path, const char *fqn)
{
    json_t *listing = tool_json("ls --json '%s'", path), *item;
    json_int_t n = -1;
    size_t i;
    json_array_foreach(json_object_get(listing, "items"), i, item)
    {
        if (strcmp(json_string_value(json_object_get(item, "fqn")), fqn) == 0) {
            n = number(item, "chunks");
        }
    }
    json_decref(listing);
    return n;
}

static bool exists(const char *dir, const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

/* ---- merge ---- */

static void merge__unites_what_ranks_have_saved(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *before = tool_json("hash --json " RANK_LOCAL);
    json_t *report = tool_json("merge -q --json " RANK_LOCAL " %s/m", dir);
    assert_int_equal(number(report, "items"), 8); /* four parts, four values of single ranks */
    json_t *after = tool_json("hash --json %s/m", dir);
    json_t *expected = json_object_get(json_object_get(json_object_get(before, "per_rank"), "2"), "mine");
    assert_non_null(expected);
    assert_true(json_equal(expected, json_object_get(json_object_get(after, "tensors"), "rank.2.mine")));
    json_decref(before);
    json_decref(report);
    json_decref(after);
    tool_remove_dir(dir);
}

static void merge__refuses_other_forms_and_replaces_only_with_force(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_fails(1, "merge " SHARDED " %s/m", dir);
    assert_false(exists(dir, "m"));
    json_decref(tool_json("merge -q --json " RANK_LOCAL " %s/m", dir));
    tool_fails(1, "merge " RANK_LOCAL " %s/m", dir);
    json_decref(tool_json("merge -q --json --force --files 2 " RANK_LOCAL " %s/m", dir));
    tool_fails(2, "merge " RANK_LOCAL);
    tool_remove_dir(dir);
}

/* ---- reshard ---- */

static void reshard__splits_as_it_is_told(void **state)
{
    (void)state;
    char *dir = tool_make_dir(), path[1024];
    json_t *report =
        tool_json("reshard -q --json --mesh 2x3 --place 'grid=1,0' --place 'r*s=r,1' --place 'rows=0,0' " SHARDED " %s/c", dir);
    snprintf(path, sizeof path, "%s/c", dir);
    assert_int_equal(number(report, "ranks"), 6);
    assert_same_values(SHARDED, path);
    assert_int_equal(chunks(path, "grid"), 6); /* 6 x 10 */
    assert_int_equal(chunks(path, "rows"), 3); /* the first pattern counts: 7 columns over 3 */
    assert_int_equal(chunks(path, "cols"), 3); /* by default: 5 rows over 3 */
    json_decref(tool_json("verify --json %s/c", dir));
    json_decref(report);
    tool_remove_dir(dir);
}

static void reshard__each_rank_has_a_file(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *report = tool_json("reshard -q --json --ranks 3 " SHARDED " %s/c", dir);
    assert_int_equal(number(report, "files"), 3);
    assert_true(exists(dir, "c/__0_0.distcp") && exists(dir, "c/__1_0.distcp") && exists(dir, "c/__2_0.distcp"));
    assert_false(exists(dir, "c/__3_0.distcp"));
    json_decref(report);
    tool_remove_dir(dir);
}

static void reshard__wrong_usage_exits_2(void **state)
{
    (void)state;
    tool_fails(2, "reshard a b");
    tool_fails(2, "reshard --ranks 2 a");
    tool_fails(2, "reshard --ranks 0 a b");
    tool_fails(2, "reshard --ranks 4097 a b");
    tool_fails(2, "reshard --ranks 2 --mesh 2x2 a b");
    tool_fails(2, "reshard --mesh 2x a b");
    tool_fails(2, "reshard --mesh x2 a b");
    tool_fails(2, "reshard --mesh 2x0 a b");
    tool_fails(2, "reshard --mesh 64x65 a b");
    tool_fails(2, "reshard --mesh 1x1x1x1x1x1x1x1x1 a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0' a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0,1,2' a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0,s' a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0,' a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0,-1' a b");
    tool_fails(2, "reshard --mesh 2x2 --place '*=0,64' a b");
    tool_fails(2, "reshard --mesh 2x2 --place nothing a b");
}

static void reshard__axes_and_names_that_are_not_there_are_errors(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_fails(1, "reshard --ranks 2 --place 'rows=2' " SHARDED " %s/c", dir);
    tool_fails(1, "reshard --ranks 2 --place 'rowz=0' " SHARDED " %s/c", dir);
    tool_fails(1, "reshard --ranks 2 " GOLDEN "none %s/c", dir);
    assert_false(exists(dir, "c"));
    tool_remove_dir(dir);
}

/* ---- demo ---- */

static void demo__checks_all_values_and_tells_who_wrote_what(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *report = tool_json("demo --json --size 1MiB --ranks 3 --reload-ranks 5 %s/d", dir);
    assert_int_equal(number(report, "wrong_values"), 0);
    assert_true(number(report, "checked_values") > 200000);
    json_t *written = json_object_get(report, "written");
    json_t *weight = json_object_get(written, "model.layers.0.weight"), *rng = json_object_get(written, "rank.1.rng");
    assert_int_equal(json_array_size(weight), 3);
    for (size_t r = 0; r < 3; r++) {
        assert_true(json_integer_value(json_array_get(weight, r)) > 0);
        assert_int_equal(json_integer_value(json_array_get(rng, r)) > 0, r == 1);
    }
    json_decref(report);
    json_decref(tool_json("verify --json %s/d", dir));
    tool_fails(1, "demo --size 1MiB %s/d", dir);
    json_decref(tool_json("demo --json --force --size 1MiB --ranks 1 --reload-ranks 2 %s/d", dir));
    tool_remove_dir(dir);
}

static void demo__leaves_nothing_without_a_directory(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    setenv("TMPDIR", dir, 1);
    tool_run r = tool("demo --size 1MiB --ranks 12");
    unsetenv("TMPDIR");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(r.out, "############\n")); /* with many ranks a column is one character */
    assert_non_null(strstr(r.out, "all as they were saved"));
    tool_free(&r);
    assert_int_equal(rmdir(dir), 0);
    free(dir);
}

static void demo__wrong_usage_exits_2(void **state)
{
    (void)state;
    tool_fails(2, "demo --ranks 0");
    tool_fails(2, "demo --ranks 65");
    tool_fails(2, "demo --reload-ranks x");
    tool_fails(2, "demo --size much");
    tool_fails(2, "demo a b");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge__unites_what_ranks_have_saved),
        cmocka_unit_test(merge__refuses_other_forms_and_replaces_only_with_force),
        cmocka_unit_test(reshard__splits_as_it_is_told),
        cmocka_unit_test(reshard__each_rank_has_a_file),
        cmocka_unit_test(reshard__wrong_usage_exits_2),
        cmocka_unit_test(reshard__axes_and_names_that_are_not_there_are_errors),
        cmocka_unit_test(demo__checks_all_values_and_tells_who_wrote_what),
        cmocka_unit_test(demo__leaves_nothing_without_a_directory),
        cmocka_unit_test(demo__wrong_usage_exits_2),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
