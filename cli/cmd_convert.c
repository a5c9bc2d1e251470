/* cmd_convert.c - dcptool convert: turns a checkpoint of any form into one of another. */
#include "cli.h"
#include "escape.h"
#include "json_writer.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

static const char doc[] =
    "Turn a checkpoint of any form into a directory of torch.distributed.checkpoint (dcp), a torch.save file (torch), a "
    "safetensors file (safetensors) or a Hugging Face directory (hf), in bounded memory. Free space is looked at first; what is "
    "written is read back and compared before it gets its name.\n"
    "\v"
    "Patterns match names as 'dcptool ls' lists them in SRC. Renames are applied one after the other, in the order given; a "
    "pattern without a match is an error. Values that single ranks have of their own are called rank.<r>.<name>.\n"
    "\n"
    "A Hugging Face directory keeps the files of a source that has an index, unless --max-file-size or --mapping is given. A "
    "directory of shards is consolidated: each tensor becomes whole.\n"
    "\n"
    "Examples:\n"
    "  dcptool convert --to hf --include 'model.*' --prefix strip:model. --cast '*=bfloat16' run/step-1000 exported\n"
    "  dcptool convert --to torch run/step-1000 model.pt\n"
    "  dcptool convert --to dcp --ranks 8 --prefix add:model. weights.safetensors eight\n"
    "  dcptool convert --to safetensors --objects drop --split 'model=model.*,optim=optim.*' run/step-1000 parts";

enum {
    KEY_TO = 0x500,
    KEY_FORCE = 'f',
    KEY_RESUME = 0x501,
    KEY_INCLUDE,
    KEY_EXCLUDE,
    KEY_RENAME,
    KEY_PREFIX,
    KEY_CAST,
    KEY_DEQUANTIZE,
    KEY_ALLOW_OVERFLOW,
    KEY_SPLIT,
    KEY_ALIAS,
    KEY_OBJECTS,
    KEY_MAX_FILE_SIZE,
    KEY_MAPPING,
    KEY_RANKS,
    KEY_FILES,
    KEY_TRANSFORM,
    KEY_NO_SYNC,
    KEY_NO_CHECK
};

static const struct argp_option option_list[] = {
    {"to", KEY_TO, "FORM", 0, "dcp, torch, safetensors or hf", 0},
    {"force", KEY_FORCE, NULL, 0, "Replace what is in DST", 0},
    {"resume", KEY_RESUME, NULL, 0, "hf: keep the finished files of an earlier try, if they hold what they should", 0},
    {"include", KEY_INCLUDE, "GLOB", 0, "Only these names; may be given several times", 1},
    {"exclude", KEY_EXCLUDE, "GLOB", 0, "Not these names; may be given several times", 1},
    {"rename", KEY_RENAME, "s/RE/TEXT/", 0, "Change names as sed does (POSIX extended; flags g and i)", 1},
    {"prefix", KEY_PREFIX, "add:TEXT|strip:TEXT", 0, "Put a text before names, or take it off", 1},
    {"cast", KEY_CAST, "GLOB=DTYPE", 0, "Convert the numbers of these tensors", 1},
    {"dequantize", KEY_DEQUANTIZE, "DTYPE", OPTION_ARG_OPTIONAL,
     "Tensors stored with scales (weight_scale_inv, _scales) become plain ones (default float32)", 1},
    {"allow-overflow", KEY_ALLOW_OVERFLOW, NULL, 0, "Go on where numbers do not fit the dtype, and count them", 1},
    {"split", KEY_SPLIT, "NAME=GLOB,..", 0, "Several outputs below DST, each with the names that it is the first to match", 1},
    {"alias", KEY_ALIAS, "WHAT", 0, "Tensors under two names, for safetensors and hf: copy (default), drop, error", 2},
    {"objects", KEY_OBJECTS, "WHAT", 0, "What is no tensor, for safetensors and hf: error (default), drop, beside", 2},
    {"max-file-size", KEY_MAX_FILE_SIZE, "SIZE", 0, "hf: begin a new file where one would have more", 2},
    {"mapping", KEY_MAPPING, "FILE", 0, "hf: an index file that says which tensor goes where", 2},
    {"ranks", KEY_RANKS, "N", 0, "dcp: as N ranks would have written it, each its rows", 2},
    {"files", KEY_FILES, "N", 0, "dcp: data files of each rank (default 1)", 2},
    {"transform", KEY_TRANSFORM, "NAME", 0, "dcp: compress: 'zstd'", 2},
    {"no-sync", KEY_NO_SYNC, NULL, 0, "Do not wait until it is on the disk", 3},
    {"no-check", KEY_NO_CHECK, NULL, 0, "Do not read the result back", 3},
    {0},
};

typedef struct texts {
    const char **list;
    size_t n;
} texts;

#define FORM(form) (1U << (form))

/* Options that some forms know: given with others they would do nothing. */
static const struct {
    int key;
    const char *name;
    unsigned forms;
} only_for[] = {
    {KEY_RESUME, "--resume", FORM(DCP_TO_HF)},
    {KEY_ALIAS, "--alias", FORM(DCP_TO_SAFETENSORS) | FORM(DCP_TO_HF)},
    {KEY_OBJECTS, "--objects", FORM(DCP_TO_SAFETENSORS) | FORM(DCP_TO_HF)},
    {KEY_MAX_FILE_SIZE, "--max-file-size", FORM(DCP_TO_HF)},
    {KEY_MAPPING, "--mapping", FORM(DCP_TO_HF)},
    {KEY_RANKS, "--ranks", FORM(DCP_TO_DCP)},
    {KEY_FILES, "--files", FORM(DCP_TO_DCP)},
    {KEY_TRANSFORM, "--transform", FORM(DCP_TO_DCP)},
};

#define N_ONLY_FOR (sizeof only_for / sizeof only_for[0])

static const char *const forms[] = {"dcp", "torch", "safetensors", "hf"}; /* from DCP_TO_DCP on */

typedef struct convert_args {
    options opts; /* opts.path is SRC */
    const char *to;
    dcp_convert_opts convert;
    texts include, exclude, edits;
    dcp_convert_cast *casts;
    dcp_convert_part *parts;
    progress progress;
    bool has[N_ONLY_FOR]; /* which of those options were given */
} convert_args;

static void add_text(texts *t, const char *text)
{
    t->list = must_resize(t->list, t->n + 1, sizeof *t->list);
    t->list[t->n++] = text;
}

/* ---- parsing ---- */

/* Position of a word in a list of n; anything else is a usage error. */
static int choose(struct argp_state *state, const char *what, const char *text, const char *const *words, int n)
{
    for (int i = 0; i < n; i++) {
        if (strcmp(text, words[i]) == 0) {
            return i;
        }
    }
    argp_error(state, "%s: '%s' is none of those that there are", what, text);
    return 0;
}

static dcp_dtype parse_dtype(struct argp_state *state, const char *text)
{
    dcp_dtype dtype = dcp_dtype_from_name(dcp_str_of(text));
    if (dtype == DCP_DTYPE_NONE) {
        argp_error(state, "'%s' is not a dtype such as bfloat16", text);
    }
    return dtype;
}

/* Names may hold "=", dtypes may not. */
static void add_cast(struct argp_state *state, convert_args *args, char *text)
{
    char *equals = strrchr(text, '=');
    dcp_dtype dtype = equals ? dcp_dtype_from_name(dcp_str_of(equals + 1)) : DCP_DTYPE_NONE;
    if (!equals || dtype == DCP_DTYPE_NONE) {
        argp_error(state, "'%s' is not a pattern, '=' and a dtype, such as '*=bfloat16'", text);
        return;
    }
    *equals = '\0';
    args->casts = must_resize(args->casts, args->convert.n_casts + 1, sizeof *args->casts);
    args->casts[args->convert.n_casts++] = (dcp_convert_cast){text, dtype};
}

/* "model=model.*,optim=optim.*": patterns hold no commas. */
static void add_parts(struct argp_state *state, convert_args *args, char *text)
{
    char *rest = NULL;
    for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        char *equals = strchr(part, '=');
        if (!equals || equals == part || !equals[1]) {
            argp_error(state, "'%s' is not a name, '=' and a pattern, such as 'model=model.*'", part);
            return;
        }
        *equals = '\0';
        args->parts = must_resize(args->parts, args->convert.n_parts + 1, sizeof *args->parts);
        args->parts[args->convert.n_parts++] = (dcp_convert_part){part, equals + 1};
    }
}

static void add_prefix(struct argp_state *state, convert_args *args, const char *text)
{
    if ((strncmp(text, "add:", 4) != 0 || !text[4]) && (strncmp(text, "strip:", 6) != 0 || !text[6])) {
        argp_error(state, "--prefix: '%s' is neither add:TEXT nor strip:TEXT", text);
    }
    add_text(&args->edits, text);
}

static void note_given(convert_args *args, int key)
{
    for (size_t i = 0; i < N_ONLY_FOR; i++) {
        args->has[i] |= only_for[i].key == key;
    }
}

static void check_together(struct argp_state *state, const convert_args *args)
{
    const dcp_convert_opts *o = &args->convert;
    if (!o->to) {
        argp_error(state, "to which form? --to dcp, torch, safetensors or hf");
        return;
    }
    for (size_t i = 0; i < N_ONLY_FOR; i++) {
        if (args->has[i] && !(only_for[i].forms & FORM(o->to))) {
            argp_error(state, "%s has no meaning with --to %s", only_for[i].name, forms[o->to - DCP_TO_DCP]);
        }
    }
    if (o->mapping && o->max_file_bytes) {
        argp_error(state, "--mapping says which file has which tensor, and --max-file-size would have no meaning");
    }
    if (o->resume && o->overwrite) {
        argp_error(state, "--resume keeps what --force replaces");
    }
}

static error_t parse_arguments(int key, char *arg, struct argp_state *state)
{
    convert_args *args = state->input;
    error_t rc = options_parse_two_paths(key, arg, state, &args->opts, &args->to);
    if (key == ARGP_KEY_END) {
        check_together(state, args);
    }
    return rc;
}

static error_t parse_shape(int key, char *arg, struct argp_state *state)
{
    static const char *const aliases[] = {"copy", "drop", "error"}, *const objects[] = {"error", "drop", "beside"};
    convert_args *args = state->input;
    dcp_convert_opts *o = &args->convert;
    switch (key) {
    case KEY_ALIAS: o->alias = (dcp_alias)choose(state, "--alias", arg, aliases, 3); return 0;
    case KEY_OBJECTS: o->objects = (dcp_objects)choose(state, "--objects", arg, objects, 3); return 0;
    case KEY_MAX_FILE_SIZE: o->max_file_bytes = options_size(state, arg); return 0;
    case KEY_MAPPING: o->mapping = arg; return 0;
    case KEY_RANKS: o->ranks = (int)options_number(state, "--ranks", arg, 1, 4096); return 0;
    case KEY_FILES: o->files = (int)options_number(state, "--files", arg, 1, 1000); return 0;
    case KEY_TRANSFORM: o->transform = options_transform(state, arg); return 0;
    case KEY_NO_SYNC: o->no_sync = true; return 0;
    case KEY_NO_CHECK: o->no_check = true; return 0;
    default: return parse_arguments(key, arg, state);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    convert_args *args = state->input;
    dcp_convert_opts *o = &args->convert;
    note_given(args, key);
    switch (key) {
    case KEY_TO: o->to = (dcp_convert_form)(DCP_TO_DCP + choose(state, "--to", arg, forms, 4)); return 0;
    case KEY_FORCE: o->overwrite = true; return 0;
    case KEY_RESUME: o->resume = true; return 0;
    case KEY_INCLUDE: add_text(&args->include, arg); return 0;
    case KEY_EXCLUDE: add_text(&args->exclude, arg); return 0;
    case KEY_RENAME: add_text(&args->edits, arg); return 0;
    case KEY_PREFIX: add_prefix(state, args, arg); return 0;
    case KEY_CAST: add_cast(state, args, arg); return 0;
    case KEY_DEQUANTIZE: o->dequantize = parse_dtype(state, arg ? arg : "float32"); return 0;
    case KEY_ALLOW_OVERFLOW: o->allow_overflow = true; return 0;
    case KEY_SPLIT: add_parts(state, args, arg); return 0;
    default: return parse_shape(key, arg, state);
    }
}

/* ---- the report ---- */

static void print_json(const dcp_convert_report *r)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key_uint(&w, "tensors", r->n_tensors);
    jw_key_uint(&w, "objects", r->n_objects);
    jw_key_uint(&w, "files", r->n_files);
    jw_key_uint(&w, "kept_files", r->n_kept);
    jw_key_uint(&w, "bytes", r->bytes);
    jw_key_uint(&w, "shared", r->n_shared);
    jw_key_uint(&w, "aliases_dropped", r->n_aliases_dropped);
    jw_key_uint(&w, "objects_dropped", r->n_objects_dropped);
    jw_key_uint(&w, "dequantized", r->n_dequantized);
    jw_key_uint(&w, "cast", r->n_cast);
    jw_key_uint(&w, "lost", r->n_lost);
    jw_key(&w, dcp_str_of("write_seconds"));
    jw_real(&w, r->write_seconds, true);
    jw_key(&w, dcp_str_of("check_seconds"));
    jw_real(&w, r->check_seconds, true);
    jw_end(&w, '}');
}

static void print_summary(const dcp_convert_report *r)
{
    char size[ESCAPE_SIZE_BYTES];
    fprintf(stderr, "converted %zu tensor%s and %zu object%s, %s in %zu file%s", r->n_tensors, plural(r->n_tensors), r->n_objects,
            plural(r->n_objects), escape_size(r->bytes, size), r->n_files, plural(r->n_files));
    if (r->n_kept) {
        fprintf(stderr, ", %zu file%s kept", r->n_kept, plural(r->n_kept));
    }
    if (r->n_aliases_dropped) {
        fprintf(stderr, ", %zu alias%s left out", r->n_aliases_dropped, r->n_aliases_dropped == 1 ? "" : "es");
    }
    if (r->n_objects_dropped) {
        fprintf(stderr, ", %zu object%s left out", r->n_objects_dropped, plural(r->n_objects_dropped));
    }
    if (r->n_lost) {
        fprintf(stderr, ", %llu of %llu cast numbers did not fit", (unsigned long long)r->n_lost, (unsigned long long)r->n_cast);
    }
    fprintf(stderr, "; %.2f s, and %.2f s to check it\n", r->write_seconds, r->check_seconds);
}

/* ---- the command ---- */

static bool on_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    progress_update(user, done_bytes, total_bytes);
    return true;
}

static void set_opts(convert_args *args)
{
    dcp_convert_opts *o = &args->convert;
    o->open.allow_outside = args->opts.allow_outside;
    o->include = args->include.list;
    o->n_include = args->include.n;
    o->exclude = args->exclude.list;
    o->n_exclude = args->exclude.n;
    o->edits = args->edits.list;
    o->n_edits = args->edits.n;
    o->casts = args->casts;
    o->parts = args->parts;
    o->progress = on_progress;
    o->user = &args->progress;
}

static int convert(convert_args *args)
{
    dcp_convert_report report = DCP_CONVERT_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    if (!options_start(&args->opts)) {
        return EXIT_PROBLEM;
    }
    progress_start(&args->progress, args->opts.quiet);
    dcp_status status = dcp_convert(args->opts.ctx, args->opts.path, args->to, &args->convert, &report, &err);
    progress_clear(&args->progress);
    if (status != DCP_OK) {
        complain_error(&err);
    } else if (args->opts.json) {
        print_json(&report);
    } else if (!args->opts.quiet) {
        print_summary(&report);
    }
    options_close(&args->opts, NULL);
    return status == DCP_OK ? EXIT_GOOD : EXIT_PROBLEM;
}

int cmd_convert(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "SRC DST", doc, children, NULL, NULL};
    convert_args args = {.convert = DCP_CONVERT_OPTS_INIT};
    options_parse(&argp, argc, argv, &args);
    set_opts(&args);
    int status = convert(&args);
    free(args.include.list);
    free(args.exclude.list);
    free(args.edits.list);
    free(args.casts);
    free(args.parts);
    return status;
}
