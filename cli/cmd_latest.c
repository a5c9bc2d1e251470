/* cmd_latest.c - dcptool latest: the newest complete checkpoint below a directory. */
#include "cli.h"
#include "escape.h"
#include "json_writer.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char doc[] =
    "Print the path of the newest complete checkpoint directly below a directory, or the directory itself.\n"
    "\v"
    "Newest is the one with the largest number at the end of its name, else the one with the newest metadata. Complete: it "
    "opens, and all its files are there and long enough. Incomplete ones are named on standard error.\n"
    "\n"
    "Examples:\n"
    "  dcptool latest run\n"
    "  dcptool info \"$(dcptool latest run)\"";

static error_t parse(int key, char *arg, struct argp_state *state)
{
    return options_parse_path(key, arg, state, state->input);
}

/* What was passed over. */
typedef struct skipped_list {
    bool is_quiet;
    struct skipped {
        char *path, *why;
    } * entries;
    size_t n;
} skipped_list;

static char *copy(const char *text)
{
    size_t bytes = strlen(text) + 1;
    return memcpy(must_alloc(bytes, 1), text, bytes);
}

static void note_skipped(void *user, const char *path, const char *why)
{
    skipped_list *list = user;
    list->entries = must_resize(list->entries, list->n + 1, sizeof *list->entries);
    list->entries[list->n++] = (struct skipped){copy(path), copy(why)};
    if (!list->is_quiet) {
        complain("%s is not complete: %s", path, why);
    }
}

static void free_skipped(skipped_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free(list->entries[i].path);
        free(list->entries[i].why);
    }
    free(list->entries);
}

/* dir/name; dir itself if there is no name. */
static char *join(const char *dir, const char *name)
{
    size_t dir_len = strlen(dir);
    bool needs_slash = *name && dir_len && dir[dir_len - 1] != '/';
    char *out = must_alloc(dir_len + strlen(name) + 2, 1);
    sprintf(out, "%s%s%s", dir, needs_slash ? "/" : "", name);
    return out;
}

/* A path is for other programs: escaped on a terminal only. */
static void print_path(const char *path)
{
    if (isatty(STDOUT_FILENO)) {
        escape_print(stdout, dcp_str_of(path), ESCAPE_TEXT);
    } else {
        fputs(path, stdout);
    }
    fputc('\n', stdout);
}

static void print_json(const char *path, const skipped_list *list)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key_string(&w, "path", path);
    jw_key_begin(&w, "skipped", '[');
    for (size_t i = 0; i < list->n; i++) {
        jw_begin(&w, '{');
        jw_key_string(&w, "path", list->entries[i].path);
        jw_key_string(&w, "why", list->entries[i].why);
        jw_end(&w, '}');
    }
    jw_end(&w, ']');
    jw_end(&w, '}');
}

static int find_latest(const options *opts)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_open_opts open_opts = DCP_OPEN_OPTS_INIT;
    skipped_list skipped = {.is_quiet = opts->quiet};
    char *name;
    int status = EXIT_PROBLEM;
    open_opts.allow_outside = opts->allow_outside;
    open_opts.allow_shard_gaps = opts->shard_gaps;
    if (dcp_latest(opts->ctx, opts->path, &open_opts, note_skipped, &skipped, &name, &err) != DCP_OK) {
        complain_error(&err);
        goto out;
    }
    char *path = join(opts->path, name);
    if (opts->json) {
        print_json(path, &skipped);
    } else {
        print_path(path);
    }
    free(path);
    dcp_text_free(opts->ctx, name);
    status = EXIT_GOOD;
out:
    free_skipped(&skipped);
    return status;
}

int cmd_latest(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {NULL, parse, "DIR", doc, children, NULL, NULL};
    options opts = {0};
    options_parse(&argp, argc, argv, &opts);
    if (!options_start(&opts)) {
        return EXIT_PROBLEM;
    }
    int status = find_latest(&opts);
    options_close(&opts, NULL);
    return status;
}
