/* What holds for every command: usage errors, help, failing outputs, inputs that are no checkpoints. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dcp/base.h>
#include <stdio.h>

#include "cli/tool.h"

static const char *const commands[] = {"ls", "info", "cat", "hash", "verify", "latest", "copy"};

#define N_COMMANDS (sizeof commands / sizeof *commands)

/* Arguments with which each command prints something; copy takes the directory that %s stands for. */
static const char *const good[N_COMMANDS] = {
    "ls " GOLDEN "2.13.0/sharded/ckpt",
    "info " GOLDEN "2.13.0/sharded/ckpt",
    "cat " GOLDEN "2.13.0/sharded/ckpt rows",
    "hash " GOLDEN "2.13.0/sharded/ckpt",
    "copy -q --json --force " GOLDEN "2.13.0/sharded/ckpt %s",
    "verify --json " GOLDEN "2.13.0/sharded/ckpt",
    "latest " GOLDEN "2.13.0/sharded/ckpt",
};

/* What a command wants after the checkpoint. */
static const char *second_argument(size_t i, const char *dir, char text[512])
{
    snprintf(text, 512, "%s/copy", dir);
    return strcmp(commands[i], "cat") == 0 ? "rows" : strcmp(commands[i], "copy") == 0 ? text : "";
}

static void usage__wrong_arguments_exit_2(void **state)
{
    (void)state;
    tool_fails(2, " ");
    tool_fails(2, "frobnicate");
    tool_fails(2, "--frobnicate");
    for (size_t i = 0; i < N_COMMANDS; i++) {
        tool_fails(2, "%s", commands[i]);
        tool_fails(2, "%s --frobnicate x", commands[i]);
        tool_fails(2, "%s a b c d", commands[i]);
        tool_fails(2, "%s --memory 12XB a b", commands[i]);
        tool_fails(2, "%s --memory 0 a b", commands[i]);
        tool_fails(2, "%s --memory 99999999999GiB a b", commands[i]);
        tool_fails(2, "%s --threads 0 a b", commands[i]);
        tool_fails(2, "%s --threads 1x a b", commands[i]);
    }
    tool_fails(2, "cat x");
    tool_fails(2, "cat x y --format yaml");
    tool_fails(2, "cat x y --rank -1");
}

static void usage__help_has_an_example(void **state)
{
    (void)state;
    for (size_t i = 0; i <= N_COMMANDS; i++) {
        const char *command = i < N_COMMANDS ? commands[i] : "";
        char example[64];
        tool_run r = tool("%s --help", command);
        snprintf(example, sizeof example, "\n  dcptool %s", command);
        assert_int_equal(r.status, 0);
        assert_int_equal(r.err_len, 0);
        assert_non_null(strstr(r.out, example));
        tool_free(&r);
    }
}

static void usage__version_is_the_librarys(void **state)
{
    (void)state;
    tool_run r = tool("--version");
    assert_int_equal(r.status, 0);
    assert_string_equal(r.out, "dcptool " DCP_VERSION_STRING "\n");
    tool_free(&r);
}

static void output__a_full_disk_exits_1(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    for (size_t i = 0; i < N_COMMANDS; i++) {
        char arguments[1024];
        snprintf(arguments, sizeof arguments, good[i], dir); /* one of them has a place for it */
        tool_fails(1, "%s >/dev/full", arguments);
        tool_fails(1, "%s --help >/dev/full", commands[i]);
    }
    tool_remove_dir(dir);
    tool_fails(1, "--version >/dev/full");
    tool_fails(1, "cat " GOLDEN "2.13.0/shapes/ckpt big -f raw >/dev/full");
    tool_fails(1, "cat " GOLDEN "2.13.0/shapes/ckpt big -f npy >/dev/full");
    tool_fails(1, "cat " GOLDEN "2.13.0/shapes/ckpt big -f json >/dev/full");
}

static void output__a_closed_pipe_exits_1(void **state)
{
    (void)state;
    /* Far more than a pipe holds, so that a write meets the closed end whatever the timing. The first part of the pipe
     * writes down how the tool ended. */
    char *dir = tool_make_dir();
    tool_run r = tool("cat " GOLDEN "2.13.0/shapes/ckpt big -f json 2>%s/err; echo status $? >>%s/err; } | { true", dir, dir);
    tool_free(&r);
    r = tool("--version >/dev/null; cat %s/err", dir);
    assert_non_null(strstr(r.out, "dcptool: "));
    assert_non_null(strstr(r.out, "status 1\n"));
    tool_free(&r);
    tool_remove_dir(dir);
}

static void input__no_checkpoint_exits_1(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    for (size_t i = 0; i < N_COMMANDS; i++) {
        char text[512];
        const char *second = second_argument(i, dir, text);
        tool_fails(1, "%s %s %s", commands[i], dir, second);
        tool_fails(1, "%s %s/none %s", commands[i], dir, second);
    }
    tool_remove_dir(dir);
}

static void input__is_not_touched(void **state)
{
    (void)state;
    char *dir = tool_make_dir();
    tool_run before =
        tool("--version >/dev/null; cp -r " GOLDEN "2.13.0/sharded/ckpt %s/c; ls -lA --time-style=full-iso %s/c", dir, dir);
    for (size_t i = 0; i < N_COMMANDS; i++) {
        char text[512];
        tool_run r = tool("%s %s/c %s", commands[i], dir, second_argument(i, dir, text));
        assert_int_equal(r.status, 0);
        tool_free(&r);
    }
    tool_run after = tool("--version >/dev/null; ls -lA --time-style=full-iso %s/c", dir);
    assert_string_equal(before.out, after.out);
    tool_free(&before);
    tool_free(&after);
    tool_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(usage__wrong_arguments_exit_2),  cmocka_unit_test(usage__help_has_an_example),
        cmocka_unit_test(usage__version_is_the_librarys), cmocka_unit_test(output__a_full_disk_exits_1),
        cmocka_unit_test(output__a_closed_pipe_exits_1),  cmocka_unit_test(input__no_checkpoint_exits_1),
        cmocka_unit_test(input__is_not_touched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
