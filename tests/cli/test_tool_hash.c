/* Every golden checkpoint reads as PyTorch read it: "dcptool hash --json" equals expect.json. */
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

#include "cli/tool.h"

/* The checkpoint beside an expect.json: a directory, or the one torch.save file. */
static void checkpoint_of(const char *expect_path, char out[1024])
{
    int dir_len = (int)(strrchr(expect_path, '/') - expect_path);
    bool is_file = strstr(expect_path, "/torch_save/") != NULL;
    snprintf(out, 1024, "%.*s/%s", dir_len, expect_path, is_file ? "file.pt" : "ckpt");
}

static bool is_as_expected(const char *expect_path, const char *more_arguments)
{
    char path[1024];
    json_error_t error;
    checkpoint_of(expect_path, path);
    json_t *expected = json_load_file(expect_path, 0, &error);
    assert_non_null(expected);
    json_t *got = tool_json("hash --json %s '%s'", more_arguments, path);
    bool is_equal = json_equal(got, expected);
    if (!is_equal) {
        char *text = json_dumps(got, JSON_SORT_KEYS | JSON_INDENT(1));
        print_error("%s: got %s\n", path, text);
        free(text);
    }
    json_decref(got);
    json_decref(expected);
    return is_equal;
}

static void hash__every_golden_checkpoint_is_as_expected(void **state)
{
    (void)state;
    glob_t found;
    size_t n_bad = 0;
    assert_int_equal(glob(GOLDEN "*/*/expect.json", 0, NULL, &found), 0);
    assert_true(found.gl_pathc >= 65);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        n_bad += !is_as_expected(found.gl_pathv[i], "");
    }
    globfree(&found);
    assert_int_equal(n_bad, 0);
}

static void hash__one_thread_and_little_memory_give_the_same(void **state)
{
    (void)state;
    static const char *const cases[] = {"dtypes", "shapes", "sharded", "sharded_two_threads", "zstd", "hf_sharded", "rank_local"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[1024];
        snprintf(path, sizeof path, GOLDEN "2.13.0/%s/expect.json", cases[i]);
        assert_true(is_as_expected(path, "--threads 1 --memory 1MiB"));
    }
}

/* The same values, saved by 4 ranks with another number of files: the same lines. */
static void hash__lines_do_not_depend_on_the_files(void **state)
{
    (void)state;
    tool_run a = tool("hash " GOLDEN "2.13.0/sharded/ckpt"), b = tool("hash " GOLDEN "2.13.0/sharded_many_files/ckpt");
    assert_int_equal(a.status, 0);
    assert_string_equal(a.out, b.out);
    assert_non_null(strstr(a.out, "fee29bc5c67776bb8a59ff556c07e8b980d472e48e1832b63c9956c9fb083e79  rows\n"));
    /* printf 0.5 | sha256sum */
    assert_non_null(strstr(a.out, "d2cbad71ff333de67d07ec676e352ab7f38248eb69c942950157220607c55e84  opt.lr\n"));
    tool_free(&a);
    tool_free(&b);
}

static void hash__values_of_single_ranks_name_the_rank(void **state)
{
    (void)state;
    tool_run r = tool("hash " GOLDEN "2.13.0/rank_local/ckpt");
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(r.out, "811aa019beb07ca73830fc7f23248aed5fc5c011eb90beacd3e23306692802af  mine  rank 3\n"));
    tool_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hash__every_golden_checkpoint_is_as_expected),
        cmocka_unit_test(hash__one_thread_and_little_memory_give_the_same),
        cmocka_unit_test(hash__lines_do_not_depend_on_the_files),
        cmocka_unit_test(hash__values_of_single_ranks_name_the_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
