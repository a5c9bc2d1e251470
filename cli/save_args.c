#include "save_args.h"

#include "escape.h"
#include "json_writer.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { KEY_FORCE = 'f', KEY_FILES = 0x200, KEY_FILE_PER_ITEM, KEY_ALIGN, KEY_TRANSFORM, KEY_TARGET, KEY_NO_SYNC };

static const struct argp_option save_options[] = {
    {"force", KEY_FORCE, NULL, 0, "Replace the checkpoint that is in DST", 0},
    {"files", KEY_FILES, "N", 0, "Spread the items over N data files (default 1)", 0},
    {"file-per-item", KEY_FILE_PER_ITEM, NULL, 0, "A data file for each item", 0},
    {"align", KEY_ALIGN, NULL, 0, "Start large tensors at multiples of 4096 bytes", 0},
    {"transform", KEY_TRANSFORM, "NAME", 0, "Compress: 'zstd', for PyTorch 2.7 and newer", 0},
    {"target", KEY_TARGET, "RELEASE", 0, "Oldest PyTorch that is to load it, such as 2.7 (default: as old as the dtypes allow)",
     0},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "Do not wait until it is on the disk", 0},
    {0},
};

/* "2.13" is 213. */
static int parse_release(struct argp_state *state, const char *text)
{
    char *end = NULL, *dot = strchr(text, '.');
    long major = strtol(text, &end, 10), minor = -1;
    if (dot && end == dot && dot[1] >= '0' && dot[1] <= '9') {
        minor = strtol(dot + 1, &end, 10);
    }
    if (major != 2 || minor < 1 || minor > 99 || *end) {
        argp_error(state, "'%s' is not a release of PyTorch from 2.1 on, such as 2.7", text);
    }
    return (int)(major * 100 + minor);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    save_args *args = state->input;
    dcp_save_opts *save = &args->save;
    switch (key) {
    case KEY_FORCE: save->overwrite = true; return 0;
    case KEY_FILES: save->files = (int)options_number(state, "--files", arg, 1, 1000); return 0;
    case KEY_FILE_PER_ITEM: save->file_per_item = true; return 0;
    case KEY_ALIGN: save->align_payloads = true; return 0;
    case KEY_TRANSFORM: save->transform = options_transform(state, arg); return 0;
    case KEY_TARGET: save->target_release = parse_release(state, arg); return 0;
    case KEY_NO_SYNC: save->no_sync = true; return 0;
    default: return options_parse_two_paths(key, arg, state, &args->opts, &args->to);
    }
}

static const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
const struct argp save_argp = {.options = save_options, .parser = parse, .children = children};

void save_args_parse(save_args *args, int argc, char **argv, const char *doc)
{
    const struct argp argp = {save_options, parse, "SRC DST", doc, children, NULL, NULL};
    options_parse(&argp, argc, argv, args);
}

static bool on_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    progress_update(user, done_bytes, total_bytes);
    return true;
}

/* ---- the report ---- */

static double seconds(const dcp_save_report *r)
{
    return r->plan_seconds + r->write_seconds + r->sync_seconds + r->commit_seconds;
}

static void degraded_json(json_writer *w, unsigned degraded)
{
    static const char *const names[] = {"sync", "rename", "lock"};
    jw_key_begin(w, "degraded", '[');
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        if (degraded & 1U << i) {
            jw_string(w, dcp_str_of(names[i]));
        }
    }
    jw_end(w, ']');
}

static void seconds_json(json_writer *w, const char *key, double value)
{
    jw_key(w, dcp_str_of(key));
    jw_real(w, value, true);
}

static void print_json(const dcp_save_report *r)
{
    char target[16];
    json_writer w = JSON_WRITER(stdout);
    snprintf(target, sizeof target, "%d.%d", r->target_release / 100, r->target_release % 100);
    jw_begin(&w, '{');
    jw_key_uint(&w, "items", r->n_items);
    jw_key_uint(&w, "records", r->n_records);
    jw_key_uint(&w, "tied", r->n_tied);
    jw_key_uint(&w, "files", r->n_files);
    jw_key_uint(&w, "bytes", r->bytes);
    jw_key_uint(&w, "payload_bytes", r->payload_bytes);
    jw_key_string(&w, "target", target);
    jw_key_string(&w, "save_id", r->save_id);
    degraded_json(&w, r->degraded);
    jw_key_uint(&w, "ranks", (uint64_t)r->world);
    seconds_json(&w, "plan_seconds", r->plan_seconds);
    seconds_json(&w, "write_seconds", r->write_seconds);
    seconds_json(&w, "sync_seconds", r->sync_seconds);
    seconds_json(&w, "commit_seconds", r->commit_seconds);
    jw_end(&w, '}');
}

static void print_summary(const char *verb, const dcp_save_report *r)
{
    char size[ESCAPE_SIZE_BYTES];
    fprintf(stderr, "%s: %zu item%s in %zu record%s of %zu file%s, %s in %.1f s; PyTorch %d.%d and newer load it\n", verb,
            r->n_items, plural(r->n_items), r->n_records, plural(r->n_records), r->n_files, plural(r->n_files),
            escape_size(r->bytes, size), seconds(r), r->target_release / 100, r->target_release % 100);
    if (r->degraded & DCP_DEGRADED_SYNC) {
        complain("the file system cannot make files durable");
    }
    if (r->degraded & DCP_DEGRADED_RENAME) {
        complain("the file system cannot rename: the metadata was written in place");
    }
    if (r->degraded & DCP_DEGRADED_LOCK) {
        complain("the file system has no locks: another save to the same place would not have been noticed");
    }
}

/* ---- around the save ---- */

/* A directory that holds a checkpoint of another form keeps its files, so the copy would stand among them. */
static bool is_among_others(const save_args *args)
{
    struct stat from, to;
    char name[4096];
    if (stat(args->opts.path, &from) != 0 || stat(args->to, &to) != 0 || from.st_dev != to.st_dev || from.st_ino != to.st_ino) {
        return false;
    }
    int n = snprintf(name, sizeof name, "%s/.metadata", args->to);
    return n > 0 && (size_t)n < sizeof name && stat(name, &to) != 0;
}

bool save_args_start(save_args *args)
{
    if (is_among_others(args)) {
        complain("%s: a checkpoint of this form cannot be replaced by what is made of it", args->to);
        return false;
    }
    if (!options_start(&args->opts)) {
        return false;
    }
    progress_start(&args->progress, args->opts.quiet);
    args->open.allow_outside = args->opts.allow_outside;
    args->open.allow_shard_gaps = args->opts.shard_gaps;
    args->save.progress = on_progress;
    args->save.user = &args->progress;
    return true;
}

int save_args_finish(save_args *args, const char *verb, dcp_status status, const dcp_save_report *report, const dcp_error *err)
{
    progress_clear(&args->progress);
    if (status != DCP_OK) {
        complain_error(err);
    } else if (args->opts.json) {
        print_json(report);
    } else if (!args->opts.quiet) {
        print_summary(verb, report);
    }
    options_close(&args->opts, NULL);
    return status == DCP_OK ? EXIT_GOOD : EXIT_PROBLEM;
}
