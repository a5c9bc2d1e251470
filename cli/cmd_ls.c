/* cmd_ls.c - dcptool ls: what is in a checkpoint. */
#include "cli.h"
#include "escape.h"
#include "item_list.h"
#include "json_writer.h"
#include "table.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>

static const char doc[] =
    "List the items of a checkpoint, sorted by name: dtype, shape, bytes, number of chunks, file (or how many).\n"
    "\v"
    "PATTERN is a shell pattern that the whole name must match, as printed here: '*' also matches dots and slashes, a backslash "
    "stands for itself, '[*]' is a star. A value that single ranks have of their own shows its rank. Bytes of an object are "
    "those of its record.\n"
    "\n"
    "Examples:\n"
    "  dcptool ls run/step-1000\n"
    "  dcptool ls run/step-1000 'optim.*.exp_avg'\n"
    "  dcptool ls --tree model.safetensors\n"
    "  dcptool ls --json run/step-1000 | jq '.items[].fqn'";

enum { KEY_TREE = 't' };

static const struct argp_option option_list[] = {
    {"tree", KEY_TREE, NULL, 0, "Show the nesting instead of full names", 0},
    {0},
};

typedef struct ls_args {
    options opts;
    const char *pattern; /* NULL: everything */
    bool is_tree;
} ls_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    ls_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &args->opts; return 0;
    case KEY_TREE: args->is_tree = true; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num == 0) {
            args->opts.path = arg;
        } else if (state->arg_num == 1) {
            args->pattern = arg;
        } else {
            argp_error(state, "too many arguments");
        }
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "no checkpoint given"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* The items to be listed and sums over them. */
typedef struct listing {
    const dcp_checkpoint *ck;
    const dcp_item **items;
    size_t n, n_tensors;
    uint64_t tensor_bytes;
    bool has_ranks;
} listing;

static bool is_wanted(const dcp_item *item, const char *pattern)
{
    if (!pattern) {
        return true;
    }
    char *name = escape_text(item->fqn, ESCAPE_NAME);
    bool matches = fnmatch(pattern, item->fqn.len ? name : "", FNM_NOESCAPE) == 0;
    free(name);
    return matches;
}

static listing select_items(const dcp_checkpoint *ck, const ls_args *args)
{
    listing out = {.ck = ck};
    size_t n_all;
    out.items = args->is_tree ? item_list_by_path(ck, &n_all) : item_list_by_name(ck, &n_all);
    for (size_t i = 0; i < n_all; i++) {
        const dcp_item *item = out.items[i];
        if (is_wanted(item, args->pattern)) {
            bool is_tensor = item->kind == DCP_ITEM_TENSOR;
            out.items[out.n++] = item;
            out.n_tensors += is_tensor;
            out.tensor_bytes += is_tensor ? item->bytes : 0;
            out.has_ranks |= item->rank >= 0;
        }
    }
    return out;
}

/* ---- table ---- */

enum { COLUMN_NAME, COLUMN_DTYPE, COLUMN_SHAPE, COLUMN_BYTES, COLUMN_CHUNKS, COLUMN_FILES, COLUMN_RANK };

static table *create_table(const listing *l, bool is_tree)
{
    table *t = table_create();
    table_column(t, is_tree ? "NAME" : "FQN", is_tree ? TABLE_TREE : TABLE_LEFT);
    table_column(t, "DTYPE", TABLE_LEFT);
    table_column(t, "SHAPE", TABLE_LEFT);
    table_column(t, "BYTES", TABLE_RIGHT);
    table_column(t, "CHUNKS", TABLE_RIGHT);
    table_column(t, "FILES", TABLE_LEFT);
    if (l->has_ranks) {
        table_column(t, "RANK", TABLE_RIGHT);
    }
    return t;
}

static bool fill_files(table_row *row, const listing *l, const dcp_item *item, dcp_error *err)
{
    const char **files;
    size_t n;
    if (!item_files(l->ck, item, &files, &n, err)) {
        return false;
    }
    if (n == 1) {
        char *name = escape_text(dcp_str_of(files[0]), ESCAPE_NAME);
        table_cell(row, COLUMN_FILES, name);
        free(name);
    } else {
        table_cell_printf(row, COLUMN_FILES, "%zu file%s", n, plural(n));
    }
    free(files);
    return true;
}

static bool fill_row(table_row *row, const listing *l, const dcp_item *item, dcp_error *err)
{
    table_cell(row, COLUMN_DTYPE, item_type_name(item));
    if (item->kind == DCP_ITEM_TENSOR) {
        char *shape = escape_shape(item->ndim, item->extents);
        table_cell(row, COLUMN_SHAPE, shape);
        free(shape);
    }
    table_cell_printf(row, COLUMN_BYTES, "%" PRIu64, item->bytes);
    table_cell_printf(row, COLUMN_CHUNKS, "%zu", item->n_chunks);
    if (item->rank >= 0) {
        table_cell_printf(row, COLUMN_RANK, "%d", item->rank);
    }
    return fill_files(row, l, item, err);
}

static void name_row(table_row *row, dcp_str name)
{
    char *text = escape_text(name, ESCAPE_NAME);
    table_cell(row, COLUMN_NAME, text);
    free(text);
}

static bool fill_list(table *t, const listing *l, dcp_error *err)
{
    for (size_t i = 0; i < l->n; i++) {
        table_row *row = table_row_add(t, NULL);
        name_row(row, l->items[i]->fqn);
        if (!fill_row(row, l, l->items[i], err)) {
            return false;
        }
    }
    return true;
}

/* ---- tree ---- */

/* Rows from the root to the place of the last item. */
typedef struct branch {
    table_row **rows;
    size_t len, room;
} branch;

/* Inner nodes that item has in common with the one before it. */
static size_t shared_nodes(const dcp_item *before, const dcp_item *item)
{
    size_t n = 0, limit = item_path_len(before) < item_path_len(item) ? item_path_len(before) : item_path_len(item);
    while (n + 1 < limit && item_key_equal(item_path_key(before, n), item_path_key(item, n))) {
        n++;
    }
    return n;
}

static table_row *grow(branch *b, table *t, dcp_key key)
{
    if (b->len == b->room) {
        b->room = 2 * b->room + 8;
        b->rows = must_resize(b->rows, b->room, sizeof *b->rows);
    }
    table_row *row = table_row_add(t, b->len ? b->rows[b->len - 1] : NULL);
    b->rows[b->len++] = row;
    if (key.is_int) {
        table_cell_printf(row, COLUMN_NAME, "%" PRId64, key.integer);
    } else {
        name_row(row, key.string);
    }
    return row;
}

static bool fill_tree(table *t, const listing *l, dcp_error *err)
{
    branch b = {0};
    bool is_good = true;
    for (size_t i = 0; i < l->n && is_good; i++) {
        const dcp_item *item = l->items[i];
        table_row *row = NULL;
        b.len = i ? shared_nodes(l->items[i - 1], item) : 0;
        while (b.len < item_path_len(item)) {
            row = grow(&b, t, item_path_key(item, b.len));
        }
        is_good = fill_row(row, l, item, err);
    }
    free(b.rows);
    return is_good;
}

static bool print_table(const listing *l, bool is_tree, dcp_error *err)
{
    table *t = create_table(l, is_tree);
    if (!(is_tree ? fill_tree(t, l, err) : fill_list(t, l, err))) {
        table_free(t);
        return false;
    }
    char size[ESCAPE_SIZE_BYTES];
    table_print(t);
    size_t n_objects = l->n - l->n_tensors;
    printf("%zu item%s: %zu tensor%s of %s, %zu object%s\n", l->n, plural(l->n), l->n_tensors, plural(l->n_tensors),
           escape_size(l->tensor_bytes, size), n_objects, plural(n_objects));
    return true;
}

/* ---- JSON ---- */

static void path_json(json_writer *w, const dcp_item *item)
{
    jw_key(w, dcp_str_of("path"));
    jw_begin_inline(w, '[');
    for (size_t i = 0; i < item_path_len(item); i++) {
        dcp_key key = item_path_key(item, i);
        if (key.is_int) {
            jw_int(w, key.integer);
        } else {
            jw_string(w, key.string);
        }
    }
    jw_end(w, ']');
}

static bool files_json(json_writer *w, const listing *l, const dcp_item *item, dcp_error *err)
{
    const char **files;
    size_t n;
    if (!item_files(l->ck, item, &files, &n, err)) {
        return false;
    }
    jw_key(w, dcp_str_of("files"));
    jw_begin_inline(w, '[');
    for (size_t i = 0; i < n; i++) {
        jw_string(w, dcp_str_of(files[i]));
    }
    jw_end(w, ']');
    free(files);
    return true;
}

static bool item_json(json_writer *w, const listing *l, const dcp_item *item, dcp_error *err)
{
    jw_begin(w, '{');
    jw_key(w, dcp_str_of("fqn"));
    jw_string(w, item->fqn);
    path_json(w, item);
    if (item->rank >= 0) {
        jw_key_uint(w, "rank", (uint64_t)item->rank);
    }
    jw_key_string(w, "kind", item->kind == DCP_ITEM_TENSOR ? "tensor" : "object");
    if (item->kind == DCP_ITEM_TENSOR) {
        jw_key_string(w, "dtype", dcp_dtype_name(item->dtype));
        jw_key_shape(w, "shape", item->ndim, item->extents);
    }
    jw_key_uint(w, "bytes", item->bytes);
    jw_key_uint(w, "chunks", item->n_chunks);
    if (!files_json(w, l, item, err)) {
        return false;
    }
    jw_end(w, '}');
    return true;
}

/* Stops in the middle on an error, so that what was printed is no JSON. */
static bool print_json(const listing *l, dcp_error *err)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key_begin(&w, "items", '[');
    for (size_t i = 0; i < l->n; i++) {
        if (!item_json(&w, l, l->items[i], err)) {
            return false;
        }
    }
    jw_end(&w, ']');
    jw_key_begin(&w, "totals", '{');
    jw_key_uint(&w, "items", l->n);
    jw_key_uint(&w, "tensors", l->n_tensors);
    jw_key_uint(&w, "objects", l->n - l->n_tensors);
    jw_key_uint(&w, "tensor_bytes", l->tensor_bytes);
    jw_end(&w, '}');
    jw_end(&w, '}');
    return true;
}

static int list(const dcp_checkpoint *ck, const ls_args *args)
{
    dcp_error err = DCP_ERROR_INIT;
    listing l = select_items(ck, args);
    int status = EXIT_GOOD;
    if (l.n == 0 && args->pattern) {
        complain("no name matches '%s'", args->pattern);
        status = EXIT_PROBLEM;
    } else if (!(args->opts.json ? print_json(&l, &err) : print_table(&l, args->is_tree, &err))) {
        complain_error(&err);
        status = EXIT_PROBLEM;
    }
    free(l.items);
    return status;
}

int cmd_ls(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "CKPT [PATTERN]", doc, children, NULL, NULL};
    ls_args args = {0};
    options_parse(&argp, argc, argv, &args);
    dcp_checkpoint *ck = options_open(&args.opts);
    if (!ck) {
        return EXIT_PROBLEM;
    }
    int status = list(ck, &args);
    options_close(&args.opts, ck);
    return status;
}
