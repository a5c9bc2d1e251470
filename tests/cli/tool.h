/* tool.h - runs dcptool as a user does: through a shell, with its two outputs and its exit status. */
#ifndef TESTS_CLI_TOOL_H
#define TESTS_CLI_TOOL_H

#include <jansson.h>
#include <stddef.h>

#define GOLDEN DCP_TEST_DIR "/golden/"

typedef struct tool_run {
    char *out, *err; /* NUL-terminated */
    size_t out_len, err_len;
    int status; /* exit status; -1 if it was killed */
} tool_run;

/* "dcptool <arguments>"; the arguments are shell text, also redirections. Freed with tool_free. */
tool_run tool(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void tool_free(tool_run *run);

/* Runs, asserts success and an empty stderr, parses stdout as JSON. Freed with json_decref. */
json_t *tool_json(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Runs, asserts exit status, that a failure says why on stderr, and (if 2) that stdout is empty. */
void tool_fails(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* An empty directory, removed with all in it by tool_remove_dir. */
char *tool_make_dir(void);
void tool_remove_dir(char *dir);

/* Writes dir/name: a safetensors file of this header and this many bytes 0, 1, 2, .. as data. */
void tool_write_safetensors(const char *dir, const char *name, const char *header, size_t data_bytes);

#endif
