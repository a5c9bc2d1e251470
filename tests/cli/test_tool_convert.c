/* convert: the options as the shell gives them, the exit status, and every golden checkpoint to every form and back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <glob.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/tool.h"

#define SHARDED GOLDEN "2.13.0/sharded/ckpt"

static void same(const char *a, const char *b)
{
    tool_run r = tool("diff -q %s %s", a, b);
    if (r.status != 0) {
        fail_msg("%s and %s differ: %s%s", a, b, r.out, r.err);
    }
    tool_free(&r);
}

/* Rank-local values get other names; PyTorch 2.1 stores whole dicts as objects, which a torch.save file opens up. */
static int has_other_names(const char *path)
{
    return strstr(path, "rank_local") || strstr(path, "2.1.2");
}

static void convert__golden_checkpoints_keep_their_values(void **state)
{
    (void)state;
    glob_t found;
    size_t n = 0;
    assert_int_equal(glob(GOLDEN "*/*/ckpt", 0, NULL, &found), 0);
    assert_int_equal(glob(GOLDEN "*/torch_save/file.pt", GLOB_APPEND, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        char *dir = tool_make_dir(), to[512];
        json_decref(tool_json("convert -q --json --no-sync --to torch %s %s/a.pt", found.gl_pathv[i], dir));
        json_decref(tool_json("convert -q --json --no-sync --to dcp --ranks 3 %s/a.pt %s/b", dir, dir));
        json_decref(tool_json("verify --json %s/b", dir));
        snprintf(to, sizeof to, "%s/b", dir);
        if (!has_other_names(found.gl_pathv[i])) {
            same(found.gl_pathv[i], to);
            n++;
        }
        tool_remove_dir(dir);
    }
    assert_true(n >= 50);
    globfree(&found);
}

static void convert__options_shape_the_result(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *report =
        tool_json("convert -q --json --no-sync --to hf --include 'd.*' --exclude '*complex128' --prefix strip:d. "
                  "--rename 's/^float(.*)/f\\1/' --cast 'd.int*=float64' --max-file-size 64B " GOLDEN "2.13.0/dtypes/ckpt %s/out",
                  dir);
    assert_int_equal(json_integer_value(json_object_get(report, "cast")), 4 * 15); /* int8 to int64 */
    assert_true(json_integer_value(json_object_get(report, "files")) > 5);
    json_decref(report);
    tool_run r = tool("ls %s/out", dir);
    assert_non_null(strstr(r.out, "\nf32 "));
    assert_non_null(strstr(r.out, "\nint8 "));
    assert_non_null(strstr(r.out, "\nuint8 "));
    assert_null(strstr(r.out, "complex128"));
    tool_free(&r);
    tool_remove_dir(dir);
}

static void convert__split_makes_several(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    json_t *json = tool_json("convert -q --json --no-sync --to torch --split 'opt=opt.*,rest=*' " SHARDED " %s/parts", dir);
    assert_int_equal(json_integer_value(json_object_get(json, "files")), 2);
    json_decref(json);
    json_decref(tool_json("ls --json %s/parts/opt.pt", dir));
    json_decref(tool_json("ls --json %s/parts/rest.pt", dir));
    tool_remove_dir(dir);
}

/* Files of a try that was cut off: one finished, one damaged, one missing. */
static void convert__resume_keeps_what_is_right(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    static const char to[] = "convert --json -q --no-sync --to hf --objects drop --max-file-size 200B";
    json_t *first = tool_json("%s " SHARDED " %s/out", to, dir);
    long files = (long)json_integer_value(json_object_get(first, "files"));
    assert_true(files >= 3);
    tool_run r = tool("--version >/dev/null; cp -r %s/out %s/whole; cd %s/out; rm model.safetensors.index.json "
                      "model-00001-of-*; f=$(ls model-00002-of-*); printf x | dd of=$f bs=1 seek=$(($(stat -c %%s $f) - 3)) "
                      "conv=notrunc status=none",
                      dir, dir, dir);
    assert_int_equal(r.status, 0);
    tool_free(&r);
    tool_fails(1, "%s " SHARDED " %s/out", to, dir);
    json_t *again = tool_json("%s --resume " SHARDED " %s/out", to, dir);
    assert_int_equal(json_integer_value(json_object_get(again, "files")), 2);
    assert_int_equal(json_integer_value(json_object_get(again, "kept_files")), files - 2);
    r = tool("--version >/dev/null; diff -r %s/out %s/whole", dir, dir);
    assert_int_equal(r.status, 0);
    tool_free(&r);
    json_decref(first);
    json_decref(again);
    tool_remove_dir(dir);
}

static void convert__mapping_says_which_file(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    static const char header[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                                 "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]}}";
    tool_write_safetensors(dir, "m.safetensors", header, 4);
    tool_run r =
        tool("--version >/dev/null; cd %s; echo '{\"weight_map\":{\"a\":\"y.safetensors\",\"b\":\"x.safetensors\"}}' >good; "
             "echo '{\"a\":1,\"b\":2,\"c\":2}' >absent; echo '{\"a\":1}' >missing; echo '{\"a\":1,\"b\":\"../x\"}' >outside",
             dir);
    tool_free(&r);
    json_decref(tool_json("convert --json -q --to hf --mapping %s/good %s/m.safetensors %s/out", dir, dir, dir));
    r = tool("--version >/dev/null; ls %s/out | tr '\\n' ' '", dir);
    assert_string_equal(r.out, "model.safetensors.index.json x.safetensors y.safetensors ");
    tool_free(&r);
    tool_fails(1, "convert -q --to hf --mapping %s/absent %s/m.safetensors %s/no", dir, dir, dir);
    tool_fails(1, "convert -q --to hf --mapping %s/missing %s/m.safetensors %s/no", dir, dir, dir);
    tool_fails(1, "convert -q --to hf --mapping %s/outside %s/m.safetensors %s/no", dir, dir, dir);
    tool_fails(1, "convert -q --to hf --mapping %s/nowhere %s/m.safetensors %s/no", dir, dir, dir);
    tool_remove_dir(dir);
}

/* A command that announces a conversion, writes nothing and says it is well has been seen elsewhere. */
static void convert__status_is_0_only_with_a_result(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_fails(1, "convert --to torch %s/nowhere %s/out.pt", dir, dir);
    tool_fails(1, "convert --to torch " SHARDED " /proc/none/out.pt");
    tool_fails(1, "convert --to hf " SHARDED " %s/out", dir); /* it has objects */
    tool_fails(1, "convert --to torch --include nothing " SHARDED " %s/out.pt", dir);
    tool_fails(1, "convert --to torch --rename 's/(/x/' " SHARDED " %s/out.pt", dir);
    tool_run r = tool("--version >/dev/null; ls -A %s | wc -l", dir);
    assert_string_equal(r.out, "0\n");
    tool_free(&r);
    tool_remove_dir(dir);
}

static void convert__wrong_usage(void **state)
{
    (void)state;
    tool_fails(2, "convert --to torch a");
    tool_fails(2, "convert a b");
    tool_fails(2, "convert --to zip a b");
    tool_fails(2, "convert --to hf --cast '*=half' a b");
    tool_fails(2, "convert --to hf --prefix model. a b");
    tool_fails(2, "convert --to hf --split model a b");
    tool_fails(2, "convert --to hf --alias keep a b");
    tool_fails(2, "convert --to hf --max-file-size x a b");
    tool_fails(2, "convert --to hf --force --resume a b");
    tool_fails(2, "convert --to hf --mapping m --max-file-size 1KiB a b");
}

/* What would do nothing is a mistake, and named; the order of the options does not matter. */
static void convert__options_of_other_forms_are_refused(void **state)
{
    (void)state;
    static const char *const forms[] = {"dcp", "torch", "safetensors", "hf"};
    static const struct {
        const char *option, *value, *known; /* known: a letter of each form that knows it */
    } cases[] = {
        {"--resume", "", "h"},         {"--max-file-size", "=1KiB", "h"},
        {"--mapping", "=m", "h"},      {"--alias", "=drop", "sh"},
        {"--ranks", "=2", "d"},        {"--files", "=2", "d"},
        {"--transform", "=zstd", "d"}, {"--objects", "=drop", "sh"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (size_t f = 0; f < 4; f++) {
            bool is_known = strchr(cases[i].known, forms[f][0]) != NULL;
            tool_run r = tool("convert %s%s --to %s /nowhere/a /nowhere/b", cases[i].option, cases[i].value, forms[f]);
            assert_int_equal(r.status, is_known ? 1 : 2); /* 1: there is no source */
            assert_true(is_known || strstr(r.err, cases[i].option));
            tool_free(&r);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(convert__golden_checkpoints_keep_their_values),
        cmocka_unit_test(convert__options_shape_the_result),
        cmocka_unit_test(convert__split_makes_several),
        cmocka_unit_test(convert__resume_keeps_what_is_right),
        cmocka_unit_test(convert__mapping_says_which_file),
        cmocka_unit_test(convert__status_is_0_only_with_a_result),
        cmocka_unit_test(convert__wrong_usage),
        cmocka_unit_test(convert__options_of_other_forms_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
