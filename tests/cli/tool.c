#include "tool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char *read_rest(FILE *f, size_t *len)
{
    char *text = NULL;
    size_t room = 0;
    *len = 0;
    do {
        room = 2 * room + 4096;
        text = realloc(text, room);
        assert_non_null(text);
        *len += fread(text + *len, 1, room - 1 - *len, f);
    } while (*len == room - 1);
    text[*len] = 0;
    return text;
}

static tool_run run(const char *arguments)
{
    tool_run r;
    char command[8192], err_path[] = "/tmp/dcptool-err-XXXXXX";
    int err_fd = mkstemp(err_path);
    assert_true(err_fd >= 0);
    int n = snprintf(command, sizeof command, "{ %s %s ; } 2>%s", DCPTOOL, arguments, err_path);
    assert_true(n > 0 && n < (int)sizeof command);
    FILE *p = popen(command, "r");
    assert_non_null(p);
    r.out = read_rest(p, &r.out_len);
    int status = pclose(p);
    FILE *err = fdopen(err_fd, "r");
    r.err = read_rest(err, &r.err_len);
    fclose(err);
    unlink(err_path);
    r.status = WIFEXITED(status) && WEXITSTATUS(status) < 126 ? WEXITSTATUS(status) : -1;
    return r;
}

static char *format(const char *fmt, va_list args)
{
    char *text;
    assert_true(vasprintf(&text, fmt, args) >= 0);
    return text;
}

tool_run tool(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    char *arguments = format(fmt, args);
    va_end(args);
    tool_run r = run(arguments);
    free(arguments);
    return r;
}

void tool_free(tool_run *r)
{
    free(r->out);
    free(r->err);
}

json_t *tool_json(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    char *arguments = format(fmt, args);
    va_end(args);
    tool_run r = run(arguments);
    json_error_t error;
    json_t *json = json_loadb(r.out, r.out_len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (r.status != 0 || r.err_len || !json) {
        fail_msg("dcptool %s: status %d, %s%s", arguments, r.status, r.err, json ? "" : error.text);
    }
    free(arguments);
    tool_free(&r);
    return json;
}

void tool_fails(int status, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    char *arguments = format(fmt, args);
    va_end(args);
    tool_run r = run(arguments);
    if (r.status != status || r.err_len == 0 || (status == 2 && r.out_len)) {
        fail_msg("dcptool %s: status %d, stdout '%s', stderr '%s'", arguments, r.status, r.out, r.err);
    }
    free(arguments);
    tool_free(&r);
}

char *tool_make_dir(void)
{
    char path[] = "/tmp/dcptool-test-XXXXXX";
    assert_non_null(mkdtemp(path));
    return strdup(path);
}

void tool_remove_dir(char *dir)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
    free(dir);
}

void tool_write_safetensors(const char *dir, const char *name, const char *header, size_t data_bytes)
{
    char path[512];
    uint64_t len = strlen(header);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++) {
        fputc((int)(len >> 8 * i & 0xff), f);
    }
    fputs(header, f);
    for (size_t i = 0; i < data_bytes; i++) {
        fputc((int)(i & 0xff), f);
    }
    assert_int_equal(fclose(f), 0);
}
