/* verify: one defect in a copy of a golden checkpoint; the report names file, item and place. */
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

static char *copy_of(const char *which)
{
    char command[1024];
    char *dir = tool_make_dir();
    snprintf(command, sizeof command, "cp -r '" GOLDEN "%s/.' %s && chmod -R u+w %s", which, dir, dir);
    assert_int_equal(system(command), 0);
    return dir;
}

static const char *text(const json_t *json, const char *key)
{
    const char *value = json_string_value(json_object_get(json, key));
    return value ? value : "";
}

/* The report of a checkpoint that is not good. */
static json_t *bad_report(const char *arguments, const char *dir)
{
    tool_run r = tool("verify --json %s %s", arguments, dir);
    assert_int_equal(r.status, 1);
    json_t *report = json_loads(r.out, 0, NULL);
    assert_non_null(report);
    assert_true(json_is_false(json_object_get(report, "ok")));
    assert_true(json_array_size(json_object_get(report, "defects")) > 0);
    tool_free(&r);
    return report;
}

/* Where these bytes stand in a file; -1 if they do not. */
static long find_payload(const char *path, const char *payload, size_t len)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *bytes = malloc(1 << 20);
    size_t n = fread(bytes, 1, 1 << 20, f);
    const char *at = memmem(bytes, n, payload, len);
    long offset = at ? at - bytes : -1;
    free(bytes);
    fclose(f);
    return offset;
}

static void flip_byte(const char *path, long offset)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, offset, SEEK_SET), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, offset, SEEK_SET), 0);
    fputc(c ^ 1, f);
    assert_int_equal(fclose(f), 0);
}

static void verify__golden_checkpoints_are_good(void **state)
{
    (void)state;
    glob_t found;
    assert_int_equal(glob(GOLDEN "*/*/ckpt", 0, NULL, &found), 0);
    assert_int_equal(glob(GOLDEN "*/torch_save/file.pt", GLOB_APPEND, NULL, &found), 0);
    assert_true(found.gl_pathc >= 65);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        json_t *report = tool_json("verify --json '%s'", found.gl_pathv[i]);
        assert_true(json_is_true(json_object_get(report, "ok")));
        json_decref(report);
    }
    globfree(&found);
}

static void verify__a_flipped_bit_names_file_item_and_place(void **state)
{
    (void)state;
    char *dir = copy_of("2.13.0/sharded/ckpt");
    char path[512] = "";
    tool_run payload = tool("cat %s rows 0:3 -f raw", dir);
    long offset = -1;
    int rank;
    assert_int_equal(payload.out_len, 84);
    for (rank = 0; rank < 4; rank++) {
        snprintf(path, sizeof path, "%s/__%d_0.distcp", dir, rank);
        offset = find_payload(path, payload.out, payload.out_len);
        if (offset >= 0) {
            break;
        }
    }
    assert_true(offset >= 0);
    flip_byte(path, offset + 40);
    json_t *report = bad_report("", dir), *defects = json_object_get(report, "defects");
    json_t *defect = json_array_get(defects, 0);
    assert_int_equal(json_array_size(defects), 1);
    assert_string_equal(text(defect, "code"), "CHECKSUM");
    assert_string_equal(text(defect, "fqn"), "rows");
    assert_string_equal(text(defect, "file"), strrchr(path, '/') + 1);
    assert_true(json_is_integer(json_object_get(defect, "offset")));
    json_decref(report);

    tool_run r = tool("verify -q %s", dir);
    assert_int_equal(r.status, 1);
    assert_int_equal(r.err_len, 0);
    assert_non_null(strstr(r.out, ".distcp: rows: byte "));
    tool_free(&r);
    tool_fails(1, "cat %s rows", dir);
    r = tool("hash %s", dir);
    assert_int_equal(r.status, 1);
    assert_int_equal(r.out_len, 0);
    tool_free(&r);
    r = tool("verify --quick %s", dir); /* which reads no payload */
    assert_int_equal(r.status, 0);
    tool_free(&r);
    tool_free(&payload);
    tool_remove_dir(dir);
}

static void verify__a_missing_and_a_short_file_are_found_without_reading(void **state)
{
    (void)state;
    char *dir = copy_of("2.13.0/sharded/ckpt");
    char command[512];
    bool is_missing = false, is_short = false;
    snprintf(command, sizeof command, "cd %s && rm __1_0.distcp && truncate -s 100 __2_0.distcp", dir);
    assert_int_equal(system(command), 0);
    json_t *report = bad_report("--quick", dir), *defect;
    size_t i;
    json_array_foreach(json_object_get(report, "defects"), i, defect)
    {
        is_missing |= strcmp(text(defect, "file"), "__1_0.distcp") == 0 && strcmp(text(defect, "code"), "NOT_FOUND") == 0;
        is_short |= strcmp(text(defect, "file"), "__2_0.distcp") == 0 && strcmp(text(defect, "code"), "FORMAT") == 0;
    }
    assert_true(is_missing && is_short);
    json_decref(report);
    tool_remove_dir(dir);
}

static void verify__metadata_that_cannot_be_read_is_a_defect(void **state)
{
    (void)state;
    char *dir = copy_of("2.13.0/sharded/ckpt");
    char path[512];
    snprintf(path, sizeof path, "%s/.metadata", dir);
    assert_int_equal(truncate(path, 200), 0);
    json_t *report = bad_report("", dir);
    assert_string_equal(text(json_array_get(json_object_get(report, "defects"), 0), "code"), "FORMAT");
    json_decref(report);
    tool_remove_dir(dir);
}

/* One rank or shard that is not there keeps the rest from being opened; that too is a report. */
static void verify__a_missing_rank_or_shard_is_a_defect(void **state)
{
    (void)state;
    static const struct {
        const char *which, *command, *names;
    } cases[] = {
        {"2.13.0/rank_local/ckpt", "rm __0.metadata", "__0.metadata"},
        {"2.15.0/hf_sharded/ckpt", "rm shard-00002-*", "shard-00002"},
        {"2.13.0/hf/ckpt", "rm *-00001-of-*.safetensors", "-00001-of-"},
        {"2.13.0/sharded/ckpt", "rm .metadata", "no checkpoint"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char command[512];
        char *dir = copy_of(cases[i].which);
        snprintf(command, sizeof command, "cd %s && %s", dir, cases[i].command);
        assert_int_equal(system(command), 0);
        json_t *report = bad_report("", dir), *defects = json_object_get(report, "defects");
        assert_int_equal(json_array_size(defects), 1);
        assert_string_equal(text(json_array_get(defects, 0), "code"), "NOT_FOUND");
        if (!strstr(text(json_array_get(defects, 0), "message"), cases[i].names)) {
            fail_msg("%s: %s", cases[i].which, text(json_array_get(defects, 0), "message"));
        }
        json_decref(report);
        tool_run r = tool("verify %s", dir);
        assert_int_equal(r.status, 1);
        assert_non_null(strstr(r.out, cases[i].names));
        assert_non_null(strstr(r.err, "BAD: 1 defect in "));
        tool_free(&r);
        tool_remove_dir(dir);
    }
}

/* PyTorch writes no shard for a rank that has nothing to save. */
static void verify__shard_gaps_are_passed_over_on_request(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    const char *header = "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{\\\"saved_offsets\\\":[%d]}}\"},"
                         "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    char first[300], second[300];
    snprintf(first, sizeof first, header, 0);
    snprintf(second, sizeof second, header, 4);
    tool_write_safetensors(dir, "shard-00001-model-00001-of-00001.safetensors", first, 4);
    tool_write_safetensors(dir, "shard-00004-model-00001-of-00001.safetensors", second, 4);
    json_decref(bad_report("", dir));
    tool_fails(1, "ls %s", dir);
    json_t *report = tool_json("verify --json --shard-gaps %s", dir);
    assert_true(json_is_true(json_object_get(report, "ok")));
    json_decref(report);
    tool_run r = tool("cat --shard-gaps %s t -f raw", dir);
    assert_int_equal(r.out_len, 8);
    assert_memory_equal(r.out, "\0\1\2\3\0\1\2\3", 8);
    tool_free(&r);
    tool_remove_dir(dir);
}

/* The words of the summary follow their numbers. */
static void verify__one_is_not_plural(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_write_safetensors(dir, "one.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    tool_run r = tool("verify %s/one.safetensors", dir);
    assert_int_equal(r.status, 0);
    assert_non_null(strstr(r.err, "good: 0 defects in 1 record of 1 file, "));
    tool_free(&r);
    r = tool("ls %s/one.safetensors", dir);
    assert_non_null(strstr(r.out, "1 item: 1 tensor of 4 B, 0 objects\n"));
    tool_free(&r);
    tool_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(verify__golden_checkpoints_are_good),
        cmocka_unit_test(verify__a_flipped_bit_names_file_item_and_place),
        cmocka_unit_test(verify__a_missing_and_a_short_file_are_found_without_reading),
        cmocka_unit_test(verify__metadata_that_cannot_be_read_is_a_defect),
        cmocka_unit_test(verify__a_missing_rank_or_shard_is_a_defect),
        cmocka_unit_test(verify__shard_gaps_are_passed_over_on_request),
        cmocka_unit_test(verify__one_is_not_plural),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
