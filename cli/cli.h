/*
 * cli.h - what the commands of dcptool share: exit codes, options, messages.
 *
 * A command is one file, cmd_<name>.c, with one entry point here. It parses its arguments with argp, opens the checkpoint
 * with options_open, prints data to stdout and everything else to stderr.
 */
#ifndef DCP_CLI_H
#define DCP_CLI_H

#include <argp.h>
#include <dcp/dcp.h>
#include <stdarg.h>
#include <stdio.h>

enum { EXIT_GOOD = 0, EXIT_PROBLEM = 1, EXIT_USAGE = 2 };

/* ---- commands: argv[0] is the name to show in usage messages; the result is the exit status. ---- */

int cmd_ls(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_cat(int argc, char **argv);
int cmd_hash(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_latest(int argc, char **argv);
int cmd_copy(int argc, char **argv);
int cmd_merge(int argc, char **argv);
int cmd_reshard(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_diff(int argc, char **argv);
int cmd_demo(int argc, char **argv);

/* ---- options that every command takes (options.c) ---- */

typedef struct options {
    bool json, quiet, allow_outside, shard_gaps, check_crc;
    int threads;           /* 0: the library's choice */
    uint64_t memory_bytes; /* 0: the library's choice */
    const char *path;      /* first argument: checkpoint or directory */
    const char *only;      /* the one item that the command is about; NULL: all */
    dcp_context *ctx;
} options;

/* To be listed as child of each command's argp, its input a struct options. */
extern const struct argp options_argp;

/* A parser for commands whose only argument is opts->path: they pass on what they do not know themselves. */
error_t options_parse_path(int key, char *arg, struct argp_state *state, options *opts);
/* The same for commands whose arguments are two paths; both must be given. */
error_t options_parse_two_paths(int key, char *arg, struct argp_state *state, options *opts, const char **second);
/* Parses with the command's argp; errors end the process with EXIT_USAGE. input begins with a struct options. */
void options_parse(const struct argp *argp, int argc, char **argv, void *input);
/* A decimal number within [min, max]; anything else is a usage error that names what. */
int64_t options_number(struct argp_state *state, const char *what, const char *text, int64_t min, int64_t max);
/* A size such as 64MiB; anything else is a usage error. */
uint64_t options_size(struct argp_state *state, const char *text);
/* The library's name of the transform that is called `text` on the command line. */
const char *options_transform(struct argp_state *state, const char *text);
/* Makes the context, which options_close frees. False: the reason has been printed. */
bool options_start(options *opts);
/* Makes the context and opens opts->path. NULL: the reason has been printed. */
dcp_checkpoint *options_open(options *opts);
/* The same, but leaves the message to the caller. */
dcp_checkpoint *options_try_open(options *opts, dcp_error *err);
/* Closes a checkpoint (NULL is allowed) and frees the context. */
void options_close(options *opts, dcp_checkpoint *ck);

/* ---- messages (output.c) ---- */

/* One line on stderr after "dcptool: ", control characters escaped. */
void complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void complain_error(const dcp_error *err);
/* Reports a failed write to stdout once and returns true; false while all is well. */
bool output_failed(void);
/* Closes stdout; false if a byte was lost, which has been reported. */
bool output_close(void);

/* ---- memory that must be there (memory.c): the process ends with EXIT_PROBLEM if it is not ---- */

void *must_alloc(size_t n, size_t size);
void *must_resize(void *p, size_t n, size_t size);

#endif
