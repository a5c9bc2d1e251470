/* cmd_diff.c - dcptool diff: what two checkpoints do not have in common. */
#include "cli.h"
#include "escape.h"
#include "json_writer.h"
#include "progress.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char doc[] =
    "Compare two checkpoints, each of any form, item by item. Prints one line for each difference: names that only one of them "
    "has, other shapes or dtypes, other values, with the largest error and the index of the first element that differs. Exit "
    "status 1 if there is any.\n"
    "\v"
    "Elements are equal if |a - b| <= atol + rtol * |b|, or both are NaN. Without tolerances every bit counts. Where only the "
    "dtypes differ, the numbers are compared all the same.\n"
    "\n"
    "Examples:\n"
    "  dcptool diff run/step-1000 copy\n"
    "  dcptool diff --rtol 0.01 run/step-1000 model-bf16.safetensors";

enum { KEY_ATOL = 0x400, KEY_RTOL };

static const struct argp_option option_list[] = {
    {"atol", KEY_ATOL, "X", 0, "Absolute tolerance (default 0)", 0},
    {"rtol", KEY_RTOL, "X", 0, "Tolerance relative to the second value (default 0)", 0},
    {0},
};

/* A difference, to be printed at the end. */
typedef struct line {
    char *name, *text;
    dcp_difference_kind kind;
    const dcp_item *a, *b;
    uint64_t n_different;
    int64_t *first;
    double max_abs, max_rel;
} line;

typedef struct diff_args {
    options opts; /* opts.path is the first checkpoint */
    const char *other;
    dcp_diff_opts diff;
    progress progress;
    line *lines;
    size_t n;
} diff_args;

static double parse_tolerance(struct argp_state *state, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= 0) || isinf(value)) {
        argp_error(state, "'%s' is not a tolerance such as 1e-6", text);
    }
    return value;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    diff_args *args = state->input;
    switch (key) {
    case KEY_ATOL: args->diff.atol = parse_tolerance(state, arg); return 0;
    case KEY_RTOL: args->diff.rtol = parse_tolerance(state, arg); return 0;
    default: return options_parse_two_paths(key, arg, state, &args->opts, &args->other);
    }
}

/* ---- collecting ---- */

static void *duplicate(const void *bytes, size_t n)
{
    return memcpy(must_alloc(n ? n : 1, 1), bytes, n);
}

static void keep(void *user, const dcp_item_difference *d)
{
    diff_args *args = user;
    const dcp_item *item = d->a ? d->a : d->b;
    args->lines = must_resize(args->lines, args->n + 1, sizeof *args->lines);
    args->lines[args->n++] = (line){
        .name = escape_text(item->fqn, ESCAPE_NAME),
        .text = duplicate(d->text, strlen(d->text) + 1),
        .kind = d->kind,
        .a = d->a,
        .b = d->b,
        .n_different = d->n_different,
        .first = d->first ? duplicate(d->first, (size_t)item->ndim * sizeof *d->first) : NULL,
        .max_abs = d->max_abs,
        .max_rel = d->max_rel,
    };
}

static bool on_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    progress_update(&((diff_args *)user)->progress, done_bytes, total_bytes);
    return true;
}

static void free_lines(diff_args *args)
{
    for (size_t i = 0; i < args->n; i++) {
        free(args->lines[i].name);
        free(args->lines[i].text);
        free(args->lines[i].first);
    }
    free(args->lines);
}

/* ---- printing ---- */

static void print_lines(const diff_args *args)
{
    for (size_t i = 0; i < args->n; i++) {
        const line *l = &args->lines[i];
        const dcp_item *item = l->a ? l->a : l->b;
        printf("%s: ", l->name);
        if (item->rank >= 0) {
            printf("rank %d: ", item->rank);
        }
        escape_print(stdout, dcp_str_of(l->text), ESCAPE_TEXT);
        putchar('\n');
    }
}

static void print_summary(const diff_args *args, const dcp_diff_report *r)
{
    if (!args->opts.quiet) {
        fprintf(stderr, "%zu name%s compared, %zu difference%s\n", r->n_items, r->n_items == 1 ? "" : "s", r->n_differences,
                r->n_differences == 1 ? "" : "s");
    }
}

static const char *kind_name(dcp_difference_kind kind)
{
    static const char *const names[] = {
        [DCP_DIFF_MISSING] = "missing", [DCP_DIFF_UNEXPECTED] = "added", [DCP_DIFF_SHAPE] = "shape",
        [DCP_DIFF_DTYPE] = "dtype",     [DCP_DIFF_KIND] = "kind",        [DCP_DIFF_VALUE] = "value",
    };
    return names[kind];
}

static void side_json(json_writer *w, const char *key, const dcp_item *item)
{
    if (!item) {
        jw_key(w, dcp_str_of(key));
        jw_null(w);
        return;
    }
    jw_key(w, dcp_str_of(key));
    jw_begin_inline(w, '{');
    jw_key_string(w, "kind", item->kind == DCP_ITEM_TENSOR ? "tensor" : "object");
    if (item->kind == DCP_ITEM_TENSOR) {
        jw_key_string(w, "dtype", dcp_dtype_name(item->dtype));
        jw_key_shape(w, "shape", item->ndim, item->extents);
    }
    jw_end(w, '}');
}

static void real_json(json_writer *w, const char *key, double value)
{
    jw_key(w, dcp_str_of(key));
    jw_real(w, value, false);
}

static void line_json(json_writer *w, const line *l)
{
    const dcp_item *item = l->a ? l->a : l->b;
    jw_begin(w, '{');
    jw_key(w, dcp_str_of("name"));
    jw_string(w, item->fqn);
    if (item->rank >= 0) {
        jw_key_uint(w, "rank", (uint64_t)item->rank);
    }
    jw_key_string(w, "kind", kind_name(l->kind));
    jw_key(w, dcp_str_of("text"));
    jw_string(w, dcp_str_of(l->text));
    side_json(w, "a", l->a);
    side_json(w, "b", l->b);
    if (l->first) {
        jw_key_uint(w, "n_different", l->n_different);
        jw_key_shape(w, "first", item->ndim, l->first);
        real_json(w, "max_abs", l->max_abs);
        real_json(w, "max_rel", l->max_rel);
    }
    jw_end(w, '}');
}

static void print_json(const diff_args *args, const dcp_diff_report *r)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key_uint(&w, "items", r->n_items);
    jw_key_uint(&w, "bytes", r->bytes);
    jw_key_uint(&w, "missing", r->n_missing);
    jw_key_uint(&w, "added", r->n_unexpected);
    jw_key_uint(&w, "shape", r->n_shape);
    jw_key_uint(&w, "dtype", r->n_dtype);
    jw_key_uint(&w, "kind", r->n_kind);
    jw_key_uint(&w, "value", r->n_value);
    real_json(&w, "max_abs", r->max_abs);
    real_json(&w, "max_rel", r->max_rel);
    jw_key_begin(&w, "differences", '[');
    for (size_t i = 0; i < args->n; i++) {
        line_json(&w, &args->lines[i]);
    }
    jw_end(&w, ']');
    jw_end(&w, '}');
}

/* ---- the command ---- */

static int compare(diff_args *args, dcp_checkpoint *a, dcp_checkpoint *b)
{
    dcp_diff_report report = DCP_DIFF_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    args->diff.difference = keep;
    args->diff.progress = on_progress;
    args->diff.user = args;
    progress_start(&args->progress, args->opts.quiet);
    dcp_status status = dcp_diff(a, b, &args->diff, &report, &err);
    progress_clear(&args->progress);
    if (status != DCP_OK) {
        complain_error(&err);
        return EXIT_PROBLEM;
    }
    if (args->opts.json) {
        print_json(args, &report);
    } else {
        print_lines(args);
        print_summary(args, &report);
    }
    return report.n_differences ? EXIT_PROBLEM : EXIT_GOOD;
}

int cmd_diff(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "A B", doc, children, NULL, NULL};
    diff_args args = {.diff = DCP_DIFF_OPTS_INIT};
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *b = NULL;
    int status = EXIT_PROBLEM;
    options_parse(&argp, argc, argv, &args);
    dcp_checkpoint *a = options_open(&args.opts);
    if (!a) {
        return EXIT_PROBLEM;
    }
    open.allow_outside = args.opts.allow_outside;
    if (dcp_checkpoint_open(args.opts.ctx, args.other, &open, &b, &err) == DCP_OK) {
        status = compare(&args, a, b);
    } else {
        complain_error(&err);
    }
    free_lines(&args);
    dcp_checkpoint_close(b);
    options_close(&args.opts, a);
    return status;
}
