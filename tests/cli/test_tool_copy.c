/* copy: what comes out equals what went in, stands alone, and replaces nothing unasked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <glob.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/tool.h"

#define PATH_ROOM 1024
#define SHARDED GOLDEN "2.13.0/sharded/ckpt"

/* "tensors" and "objects" of dcptool hash. */
static json_t *values(const char *path)
{
    json_t *json = tool_json("hash --json '%s'", path);
    json_object_del(json, "world");
    return json;
}

static void assert_same_values(const char *a, const char *b)
{
    json_t *x = values(a), *y = values(b);
    if (!json_equal(x, y)) {
        fail_msg("%s and %s have different values", a, b);
    }
    json_decref(x);
    json_decref(y);
}

static json_int_t number(const json_t *json, const char *key)
{
    assert_true(json_is_integer(json_object_get(json, key)));
    return json_integer_value(json_object_get(json, key));
}

static size_t count_files(const char *dir)
{
    char pattern[PATH_ROOM + 8];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/*", dir);
    int rc = glob(pattern, 0, NULL, &found);
    size_t n = rc == 0 ? found.gl_pathc : 0;
    globfree(&found);
    return n;
}

static bool exists(const char *dir, const char *name)
{
    char path[2 * PATH_ROOM];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

/* ---- values ---- */

static void copy__golden_checkpoints_keep_their_values(void **state)
{
    (void)state;
    glob_t found;
    assert_int_equal(glob(GOLDEN "*/*/ckpt", 0, NULL, &found), 0);
    assert_int_equal(glob(GOLDEN "*/torch_save/file.pt", GLOB_APPEND, NULL, &found), 0);
    size_t n = 0;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char *from = found.gl_pathv[i];
        char *dir = tool_make_dir();
        json_decref(tool_json("copy -q --json --no-sync '%s' %s/c", from, dir));
        json_decref(tool_json("verify --json %s/c", dir));
        if (!strstr(from, "rank_local")) {
            char to[PATH_ROOM];
            snprintf(to, sizeof to, "%s/c", dir);
            assert_same_values(from, to);
            n++;
        }
        tool_remove_dir(dir);
    }
    assert_true(n >= 60);
    globfree(&found);
}

static void copy__of_a_copy_is_the_same_bytes(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_decref(tool_json("copy -q --json " GOLDEN "2.13.0/objects/ckpt %s/a", dir));
    json_decref(tool_json("copy -q --json %s/a %s/b", dir, dir));
    tool_run r = tool("--version; cmp %s/a/__0_0.distcp %s/b/__0_0.distcp", dir, dir);
    assert_int_equal(r.status, 0);
    tool_free(&r);
    tool_remove_dir(dir);
}

static void copy__ranks_own_values_get_names_of_their_own(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *before = tool_json("hash --json " GOLDEN "2.13.0/rank_local/ckpt");
    json_decref(tool_json("copy -q --json " GOLDEN "2.13.0/rank_local/ckpt %s/c", dir));
    json_t *after = tool_json("hash --json %s/c", dir);
    json_t *expected = json_object_get(json_object_get(json_object_get(before, "per_rank"), "3"), "mine");
    json_t *found = json_object_get(json_object_get(after, "tensors"), "rank.3.mine");
    assert_non_null(expected);
    assert_true(json_equal(expected, found));
    assert_null(json_object_get(after, "per_rank"));
    json_decref(before);
    json_decref(after);
    tool_remove_dir(dir);
}

/* Number of chunks of a tensor. */
static json_int_t chunks(const json_t *listing, const char *fqn)
{
    json_t *item;
    size_t i;
    json_array_foreach(json_object_get(listing, "items"), i, item)
    {
        if (strcmp(json_string_value(json_object_get(item, "fqn")), fqn) == 0) {
            return number(item, "chunks");
        }
    }
    return -1;
}

static void copy__keeps_chunks_and_ties(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_decref(tool_json("copy -q --json " SHARDED " %s/s", dir));
    json_t *list = tool_json("ls --json %s/s", dir);
    assert_int_equal(chunks(list, "rows"), 4);
    assert_int_equal(chunks(list, "grid"), 4);
    assert_int_equal(chunks(list, "hsdp"), 2);
    assert_int_equal(chunks(list, "few"), 3); /* without the fourth rank's empty one */
    json_decref(list);
    json_t *report = tool_json("copy -q --json " GOLDEN "2.13.0/torch_save/file.pt %s/t", dir);
    assert_true(number(report, "tied") >= 1);
    json_decref(report);
    report = tool_json("copy -q --json %s/t %s/u", dir, dir);
    assert_true(number(report, "tied") >= 1);
    json_decref(report);
    tool_remove_dir(dir);
}

/* ---- options ---- */

static void copy__files_are_as_many_as_asked_for(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *report = tool_json("copy -q --json --files 3 " SHARDED " %s/three", dir);
    char path[PATH_ROOM];
    snprintf(path, sizeof path, "%s/three", dir);
    assert_int_equal(number(report, "files"), 3);
    assert_int_equal(count_files(path), 3);
    assert_same_values(SHARDED, path);
    json_decref(report);

    report = tool_json("copy -q --json --file-per-item " SHARDED " %s/each", dir);
    snprintf(path, sizeof path, "%s/each", dir);
    assert_int_equal(number(report, "files"), number(report, "records"));
    assert_int_equal(count_files(path), number(report, "records"));
    assert_same_values(SHARDED, path);
    json_decref(report);
    tool_remove_dir(dir);
}

static void copy__transform_and_target(void **state)
{
    (void)state;
    char *dir = tool_make_dir(), path[PATH_ROOM];
    json_t *report = tool_json("copy -q --json --transform zstd --target 2.13 " SHARDED " %s/z", dir);
    assert_string_equal(json_string_value(json_object_get(report, "target")), "2.13");
    json_decref(report);
    snprintf(path, sizeof path, "%s/z", dir);
    assert_same_values(SHARDED, path);
    tool_run magic = tool("--version >/dev/null; head -c 4 %s/z/__0_0.distcp", dir);
    assert_int_equal(magic.out_len, 4);
    assert_memory_equal(magic.out, "\x28\xb5\x2f\xfd", 4);
    tool_free(&magic);
    tool_fails(1, "copy --transform zstd --target 2.6 " SHARDED " %s/no", dir); /* 2.6 has no transforms */
    assert_false(exists(dir, "no/.metadata"));
    tool_fails(1, "copy --target 2.1 " GOLDEN "2.15.0/dtypes/ckpt %s/no", dir); /* nor 2.1 all dtypes */
    assert_false(exists(dir, "no/.metadata"));
    tool_remove_dir(dir);
}

static void copy__wrong_options_exit_2(void **state)
{
    (void)state;
    tool_fails(2, "copy a b --target 2");
    tool_fails(2, "copy a b --target 2.");
    tool_fails(2, "copy a b --target 2.0");
    tool_fails(2, "copy a b --target 1.13");
    tool_fails(2, "copy a b --target 2.7.1");
    tool_fails(2, "copy a b --target 2.-7");
    tool_fails(2, "copy a b --target two");
    tool_fails(2, "copy a b --files 0");
    tool_fails(2, "copy a b --files 1001");
    tool_fails(2, "copy a b --transform lz4");
    tool_fails(2, "copy a");
}

/* ---- places ---- */

static void copy__replaces_only_with_force(void **state)
{
    (void)state;
    char *dir = tool_make_dir(), path[PATH_ROOM];
    snprintf(path, sizeof path, "%s/c", dir);
    json_decref(tool_json("copy -q --json " GOLDEN "2.13.0/shapes/ckpt %s", path));
    tool_fails(1, "copy " SHARDED " %s", path);
    assert_same_values(GOLDEN "2.13.0/shapes/ckpt", path);
    json_decref(tool_json("copy -q --json --force " SHARDED " %s", path));
    assert_same_values(SHARDED, path);
    assert_int_equal(count_files(path), 1); /* nothing of the old one is left */
    tool_remove_dir(dir);
}

static void copy__over_itself_needs_force_and_cleans_up(void **state)
{
    (void)state;
    char *dir = tool_make_dir(), path[PATH_ROOM];
    snprintf(path, sizeof path, "%s/c", dir);
    tool_run r = tool("--version; cp -r " SHARDED " %s && chmod -R u+w %s && touch %s/__9_0.distcp", path, path, path);
    assert_int_equal(r.status, 0);
    tool_free(&r);
    tool_fails(1, "copy %s %s", path, path);
    assert_same_values(SHARDED, path);
    json_decref(tool_json("copy -q --json -f %s %s/.", path, path));
    assert_same_values(SHARDED, path);
    assert_false(exists(path, "__1_0.distcp"));
    tool_remove_dir(dir);
}

static void copy__hugging_face_is_not_copied_over_itself(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_run r = tool("--version; cp -r " GOLDEN "2.13.0/hf/ckpt %s/c && chmod -R u+w %s/c", dir, dir);
    tool_free(&r);
    tool_fails(1, "copy -f %s/c %s/c", dir, dir);
    assert_false(exists(dir, "c/.metadata"));
    tool_remove_dir(dir);
}

static void copy__a_failed_one_leaves_nothing(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_fails(1, "copy " GOLDEN "2.13.0/none %s/c", dir);
    assert_false(exists(dir, "c"));
    tool_run r = tool("--version; touch %s/file", dir);
    tool_free(&r);
    tool_fails(1, "copy " SHARDED " %s/file", dir);
    tool_fails(1, "copy " SHARDED " %s/file/c", dir);
    tool_remove_dir(dir);
}

/* ---- broken records ---- */

/* A safetensors file of one tensor of n bytes 0, 1, 2, ..: copied, it is a record of known content. */
static void make_record(const char *dir, size_t n)
{
    char header[128];
    snprintf(header, sizeof header, "{\"t\": {\"dtype\": \"U8\", \"shape\": [%zu], \"data_offsets\": [0, %zu]}}", n, n);
    tool_write_safetensors(dir, "t.safetensors", header, n);
    json_decref(tool_json("copy -q --json %s/t.safetensors %s/c", dir, dir));
}

/* A copy must not give a broken record a checksum that is right. Small and large records are read in different ways. */
static void copy__a_wrong_checksum_is_found(void **state)
{
    (void)state;
    static const size_t sizes[] = {1000, 5 << 20};
    for (size_t i = 0; i < 2; i++) {
        char *dir = tool_make_dir(), path[PATH_ROOM];
        make_record(dir, sizes[i]);
        snprintf(path, sizeof path, "%s/c/__0_0.distcp", dir);
        FILE *f = fopen(path, "r+b");
        assert_non_null(f);
        fseek(f, 1000, SEEK_SET); /* heads are shorter */
        int c = fgetc(f);
        fseek(f, 1000, SEEK_SET);
        fputc(c ^ 1, f);
        fclose(f);
        tool_fails(1, "copy %s/c %s/d", dir, dir);
        assert_false(exists(dir, "d/.metadata"));
        assert_false(exists(dir, "d/__0_0.distcp"));
        tool_remove_dir(dir);
    }
}

static void copy__a_large_record_comes_through_in_blocks(void **state)
{
    (void)state;
    char *dir = tool_make_dir(), a[PATH_ROOM], b[PATH_ROOM];
    make_record(dir, (5 << 20) + 17);
    snprintf(a, sizeof a, "%s/t.safetensors", dir);
    snprintf(b, sizeof b, "%s/z", dir);
    json_decref(tool_json("copy -q --json --transform zstd --align %s/c %s", dir, b));
    assert_same_values(a, b);
    json_decref(tool_json("copy -q --json --align %s/z %s/al", dir, dir));
    json_decref(tool_json("verify --json %s/al", dir));
    snprintf(b, sizeof b, "%s/al", dir);
    assert_same_values(a, b);
    tool_remove_dir(dir);
}

/* 2 GiB, most of it a hole in a sparse file, through an address space that it does not fit into. */
static void copy__memory_is_bounded(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* they take the address space for themselves */
#endif
    char *dir = tool_make_dir();
    const char *header = "{\"t\": {\"dtype\": \"U8\", \"shape\": [2147483648], \"data_offsets\": [0, 2147483648]}}";
    tool_write_safetensors(dir, "t.safetensors", header, 1000);
    tool_run r = tool("--version && truncate -s %zu %s/t.safetensors && ulimit -v 400000 && " DCPTOOL
                      " copy -q --no-sync --transform zstd --threads 2 %s/t.safetensors %s/c",
                      8 + strlen(header) + ((size_t)1 << 31), dir, dir, dir);
    assert_string_equal(r.err, "");
    assert_int_equal(r.status, 0);
    tool_free(&r);
    json_t *list = tool_json("ls --json %s/c", dir);
    assert_int_equal(number(json_array_get(json_object_get(list, "items"), 0), "bytes"), (json_int_t)1 << 31);
    json_decref(list);
    tool_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copy__golden_checkpoints_keep_their_values),
        cmocka_unit_test(copy__of_a_copy_is_the_same_bytes),
        cmocka_unit_test(copy__ranks_own_values_get_names_of_their_own),
        cmocka_unit_test(copy__keeps_chunks_and_ties),
        cmocka_unit_test(copy__files_are_as_many_as_asked_for),
        cmocka_unit_test(copy__transform_and_target),
        cmocka_unit_test(copy__wrong_options_exit_2),
        cmocka_unit_test(copy__replaces_only_with_force),
        cmocka_unit_test(copy__over_itself_needs_force_and_cleans_up),
        cmocka_unit_test(copy__hugging_face_is_not_copied_over_itself),
        cmocka_unit_test(copy__a_failed_one_leaves_nothing),
        cmocka_unit_test(copy__a_wrong_checksum_is_found),
        cmocka_unit_test(copy__a_large_record_comes_through_in_blocks),
        cmocka_unit_test(copy__memory_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
