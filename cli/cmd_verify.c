/* cmd_verify.c - dcptool verify: everything that can be checked. */
#include "cli.h"
#include "escape.h"
#include "json_writer.h"
#include "progress.h"

#include <inttypes.h>

static const char doc[] =
    "Check a checkpoint: structure, bounds, overlaps, gaps, that files are there and long enough, checksums of every record, "
    "digests where there are.\n"
    "\v"
    "Prints one line for each defect: file, item, offset in the file, what is wrong. The exit status is 1 if there is any.\n"
    "\n"
    "Examples:\n"
    "  dcptool verify run/step-1000\n"
    "  dcptool verify --quick run/step-1000 && echo complete";

enum { KEY_QUICK = 0x200 };

static const struct argp_option option_list[] = {
    {"quick", KEY_QUICK, NULL, 0, "Leave out what needs to read the payload: checksums", 0},
    {0},
};

typedef struct verify_args {
    options opts;
    bool is_quick;
} verify_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    verify_args *args = state->input;
    if (key == KEY_QUICK) {
        args->is_quick = true;
        return 0;
    }
    return options_parse_path(key, arg, state, &args->opts);
}

/* Where defects go: as lines at once, or as elements of an open JSON array. */
typedef struct sink {
    bool is_json;
    json_writer json;
    progress progress;
    size_t n_defects;
} sink;

static void defect_json(json_writer *w, const dcp_defect *d)
{
    jw_begin(w, '{');
    jw_key_string(w, "code", dcp_status_name(d->code));
    if (d->file) {
        jw_key_string(w, "file", d->file);
    }
    if (d->fqn.ptr) {
        jw_key(w, dcp_str_of("fqn"));
        jw_string(w, d->fqn);
    }
    if (d->offset != DCP_NO_OFFSET) {
        jw_key_uint(w, "offset", d->offset);
    }
    jw_key_string(w, "message", d->message);
    jw_end(w, '}');
}

static void defect_line(const dcp_defect *d)
{
    if (d->file) {
        escape_print(stdout, dcp_str_of(d->file), ESCAPE_NAME);
        fputs(": ", stdout);
    }
    if (d->fqn.ptr) {
        escape_print(stdout, d->fqn, ESCAPE_NAME);
        fputs(": ", stdout);
    }
    if (d->offset != DCP_NO_OFFSET) {
        printf("byte %" PRIu64 ": ", d->offset);
    }
    escape_print(stdout, dcp_str_of(d->message), ESCAPE_TEXT);
    fputc('\n', stdout);
}

static void on_defect(void *user, const dcp_defect *d)
{
    sink *s = user;
    s->n_defects++;
    if (s->is_json) {
        defect_json(&s->json, d);
    } else {
        progress_clear(&s->progress);
        defect_line(d);
    }
}

static bool on_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    sink *s = user;
    progress_update(&s->progress, done_bytes, total_bytes);
    return !ferror(stdout);
}

static sink begin(const verify_args *args)
{
    sink s = {.is_json = args->opts.json, .json = JSON_WRITER(stdout)};
    progress_start(&s.progress, args->opts.quiet);
    if (s.is_json) {
        jw_begin(&s.json, '{');
        jw_key_begin(&s.json, "defects", '[');
    }
    return s;
}

static void end_json(json_writer *w, const dcp_verify_report *report)
{
    jw_end(w, ']');
    jw_key_bool(w, "ok", report->n_defects == 0);
    jw_key_uint(w, "files", report->n_files);
    jw_key_uint(w, "records", report->n_records);
    jw_key_uint(w, "unchecked_records", report->n_unchecked);
    jw_key_uint(w, "bytes", report->bytes);
    jw_key_bool(w, "digests", report->has_digests);
    jw_end(w, '}');
}

static void print_summary(const dcp_verify_report *report)
{
    char size[ESCAPE_SIZE_BYTES];
    fprintf(stderr, "%s: %zu defect%s in %zu record%s of %zu file%s, %s read", report->n_defects ? "BAD" : "good",
            report->n_defects, plural(report->n_defects), report->n_records, plural(report->n_records), report->n_files,
            plural(report->n_files), escape_size(report->bytes, size));
    if (report->n_unchecked) {
        fprintf(stderr, ", %zu record%s without a checksum", report->n_unchecked, plural(report->n_unchecked));
    }
    fputs(report->has_digests ? ", digests compared\n" : "\n", stderr);
}

static int end(sink *s, const options *opts, const dcp_verify_report *report)
{
    progress_clear(&s->progress);
    if (s->is_json) {
        end_json(&s->json, report);
    } else if (!opts->quiet) {
        print_summary(report);
    }
    return report->n_defects ? EXIT_PROBLEM : EXIT_GOOD;
}

/* An error that is a defect of the checkpoint, not of the machine. What is not there may be all of it, one rank or one shard. */
static bool is_defect(dcp_status code)
{
    return code == DCP_NOT_FOUND || code == DCP_FORMAT || code == DCP_CHECKSUM || code == DCP_LIMIT || code == DCP_UNSUPPORTED;
}

/* A checkpoint too broken to be opened has one defect that can be told. */
static int report_open_error(const verify_args *args, const dcp_error *err)
{
    if (!is_defect(err->code)) {
        complain_error(err);
        return EXIT_PROBLEM;
    }
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_defect defect = {.code = err->code, .offset = err->offset, .message = err->message};
    sink s = begin(args);
    on_defect(&s, &defect);
    report.n_defects = 1;
    return end(&s, &args->opts, &report);
}

static int verify(dcp_checkpoint *ck, const verify_args *args)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    sink s = begin(args);
    dcp_verify_opts verify_opts = DCP_VERIFY_OPTS_INIT;
    verify_opts.quick = args->is_quick;
    verify_opts.progress = on_progress;
    verify_opts.defect = on_defect;
    verify_opts.user = &s;
    if (dcp_verify(ck, &verify_opts, &report, &err) == DCP_OK) {
        return end(&s, &args->opts, &report);
    }
    progress_clear(&s.progress);
    if (!output_failed()) { /* else the cancellation is ours, and its cause has been told */
        complain_error(&err);
    }
    return EXIT_PROBLEM;
}

int cmd_verify(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "CKPT", doc, children, NULL, NULL};
    dcp_error err = DCP_ERROR_INIT;
    verify_args args = {0};
    options_parse(&argp, argc, argv, &args);
    dcp_checkpoint *ck = options_try_open(&args.opts, &err);
    int status = ck ? verify(ck, &args) : report_open_error(&args, &err);
    options_close(&args.opts, ck);
    return status;
}
