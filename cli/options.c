#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { KEY_JSON = 'j', KEY_QUIET = 'q', KEY_ALLOW_OUTSIDE = 0x100, KEY_SHARD_GAPS, KEY_MEMORY, KEY_THREADS };

static const struct argp_option options_list[] = {
    {"json", KEY_JSON, NULL, 0, "Print JSON", 10},
    {"quiet", KEY_QUIET, NULL, 0, "Only errors on standard error", 10},
    {"allow-outside", KEY_ALLOW_OUTSIDE, NULL, 0, "Follow names and links that lead out of the checkpoint", 10},
    {"shard-gaps", KEY_SHARD_GAPS, NULL, 0, "Read Hugging Face shards of which numbers are missing", 10},
    {"memory", KEY_MEMORY, "SIZE", 0, "For buffers, such as 64MiB (default 192MiB)", 10},
    {"threads", KEY_THREADS, "N", 0, "That read and hash (default: one a CPU, at most 8)", 10},
    {0},
};

int64_t options_number(struct argp_state *state, const char *what, const char *text, int64_t min, int64_t max)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < min || value > max) {
        argp_error(state, "%s: '%s' is not a number from %lld to %lld", what, text, (long long)min, (long long)max);
    }
    return value;
}

/* Shift of a unit: "" and "B" are bytes, "KiB" is 10; -1 if unknown. */
static int unit_shift(const char *unit)
{
    static const struct {
        const char *name;
        int shift;
    } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcmp(unit, units[i].name) == 0) {
            return units[i].shift;
        }
    }
    return -1;
}

uint64_t options_size(struct argp_state *state, const char *text)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    int shift = unit_shift(end);
    if (end == text || text[0] == '-' || errno || shift < 0 || value == 0 || value > (UINT64_MAX >> 1 >> shift)) {
        argp_error(state, "'%s' is not a size such as 64MiB", text);
    }
    return (uint64_t)value << shift;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    options *opts = state->input;
    switch (key) {
    case KEY_JSON: opts->json = true; return 0;
    case KEY_QUIET: opts->quiet = true; return 0;
    case KEY_ALLOW_OUTSIDE: opts->allow_outside = true; return 0;
    case KEY_SHARD_GAPS: opts->shard_gaps = true; return 0;
    case KEY_MEMORY: opts->memory_bytes = options_size(state, arg); return 0;
    case KEY_THREADS: opts->threads = (int)options_number(state, "--threads", arg, 1, 1024); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

const struct argp options_argp = {.options = options_list, .parser = parse};

error_t options_parse_path(int key, char *arg, struct argp_state *state, options *opts)
{
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = opts; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0) {
            argp_error(state, "too many arguments");
        }
        opts->path = arg;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "an argument is missing"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

error_t options_parse_two_paths(int key, char *arg, struct argp_state *state, options *opts, const char **second)
{
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = opts; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num > 1) {
            argp_error(state, "too many arguments");
        }
        *(state->arg_num == 0 ? &opts->path : second) = arg;
        return 0;
    case ARGP_KEY_END:
        if (!*second) {
            argp_error(state, "an argument is missing");
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

const char *options_transform(struct argp_state *state, const char *text)
{
    if (strcmp(text, "zstd") != 0) {
        argp_error(state, "unknown transform '%s': there is 'zstd'", text);
    }
    return "stream.zstd/1";
}

void options_parse(const struct argp *argp, int argc, char **argv, void *input)
{
    error_t rc = argp_parse(argp, argc, argv, 0, NULL, input);
    if (rc != 0) {
        complain("%s", strerror(rc));
        exit(EXIT_PROBLEM);
    }
}

static void print_log(void *user, dcp_log_level level, const char *line)
{
    (void)user;
    (void)level;
    complain("%s", line);
}

static dcp_status create_context(options *opts, dcp_error *err)
{
    dcp_context_opts ctx_opts = DCP_CONTEXT_OPTS_INIT;
    ctx_opts.log = opts->quiet ? NULL : print_log;
    ctx_opts.threads = opts->threads;
    ctx_opts.memory_bytes = opts->memory_bytes;
    return dcp_context_create(&ctx_opts, &opts->ctx, err);
}

bool options_start(options *opts)
{
    dcp_error err = DCP_ERROR_INIT;
    if (create_context(opts, &err) != DCP_OK) {
        complain_error(&err);
        return false;
    }
    return true;
}

dcp_checkpoint *options_try_open(options *opts, dcp_error *err)
{
    dcp_open_opts open_opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck = NULL;
    open_opts.allow_outside = opts->allow_outside;
    open_opts.allow_shard_gaps = opts->shard_gaps;
    open_opts.check_crc = opts->check_crc;
    open_opts.only = dcp_str_of(opts->only);
    if (create_context(opts, err) == DCP_OK) {
        (void)dcp_checkpoint_open(opts->ctx, opts->path, &open_opts, &ck, err);
    }
    return ck;
}

dcp_checkpoint *options_open(options *opts)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck = options_try_open(opts, &err);
    if (!ck) {
        complain_error(&err);
        options_close(opts, NULL);
    }
    return ck;
}

void options_close(options *opts, dcp_checkpoint *ck)
{
    dcp_checkpoint_close(ck);
    dcp_context_free(opts->ctx);
    opts->ctx = NULL;
}
