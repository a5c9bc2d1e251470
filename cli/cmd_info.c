/* cmd_info.c - dcptool info: facts about a checkpoint as a whole. */
#include "cli.h"
#include "escape.h"
#include "item_list.h"
#include "json_writer.h"
#include "stray_files.h"
#include "table.h"

#include <inttypes.h>
#include <stdlib.h>

static const char doc[] =
    "Print the layout of a checkpoint, who wrote it as far as the files tell, ranks, bytes by dtype, the biggest items, and its "
    "files: missing ones, and ones in the directory that it does not name.\n"
    "\v"
    "Example:\n"
    "  dcptool info run/step-1000\n"
    "  dcptool info --json run/step-1000 | jq '.dtypes'";

#define N_BIGGEST 10

static error_t parse(int key, char *arg, struct argp_state *state)
{
    return options_parse_path(key, arg, state, state->input);
}

typedef struct dtype_sum {
    size_t n_tensors;
    uint64_t bytes;
} dtype_sum;

/* All that is printed. */
typedef struct facts {
    dcp_checkpoint_info info;
    dtype_sum dtypes[DCP_DTYPE_COUNT];
    const dcp_item **biggest; /* of all items, the largest first */
    size_t n_biggest;
    dcp_file_info *files;
    size_t n_files, n_missing;
    stray_files strays;
} facts;

static void sum_dtypes(const dcp_checkpoint *ck, dtype_sum sums[DCP_DTYPE_COUNT])
{
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        if (item->kind == DCP_ITEM_TENSOR && item->dtype < DCP_DTYPE_COUNT) {
            sums[item->dtype].n_tensors++;
            sums[item->dtype].bytes += item->bytes;
        }
    }
}

static int compare_bytes(const void *a, const void *b)
{
    const dcp_item *x = *(const dcp_item *const *)a, *y = *(const dcp_item *const *)b;
    return x->bytes == y->bytes ? item_compare(x, y) : x->bytes > y->bytes ? -1 : 1;
}

static void find_biggest(const dcp_checkpoint *ck, facts *f)
{
    size_t n;
    f->biggest = item_list_by_name(ck, &n);
    qsort(f->biggest, n, sizeof *f->biggest, compare_bytes);
    f->n_biggest = n < N_BIGGEST ? n : N_BIGGEST;
}

static bool look_up_files(const dcp_checkpoint *ck, facts *f, dcp_error *err)
{
    f->n_files = f->info.n_files;
    f->files = must_alloc(f->n_files, sizeof *f->files);
    for (size_t i = 0; i < f->n_files; i++) {
        if (dcp_checkpoint_file(ck, i, &f->files[i], err) != DCP_OK) {
            return false;
        }
        f->n_missing += !f->files[i].present;
    }
    return true;
}

static void free_facts(facts *f)
{
    stray_files_free(&f->strays);
    free(f->files);
    free(f->biggest);
}

/* After a failure the facts are to be freed as well. */
static bool collect(const dcp_checkpoint *ck, const options *opts, facts *f, dcp_error *err)
{
    *f = (facts){.info = DCP_CHECKPOINT_INFO_INIT};
    if (dcp_checkpoint_get_info(ck, &f->info, err) != DCP_OK) {
        return false;
    }
    sum_dtypes(ck, f->dtypes);
    find_biggest(ck, f);
    return look_up_files(ck, f, err) &&
           stray_files_find(opts->ctx, opts->path, f->info.layout, f->files, f->n_files, &f->strays, err);
}

/* ---- text ---- */

static void print_text(const char *title, const char *value)
{
    if (*value) {
        printf("%-15s ", title);
        escape_print(stdout, dcp_str_of(value), ESCAPE_TEXT);
        fputc('\n', stdout);
    }
}

static void print_head(const facts *f)
{
    char size[ESCAPE_SIZE_BYTES];
    const dcp_checkpoint_info *info = &f->info;
    print_text("layout", dcp_layout_name(info->layout));
    print_text("writer", info->writer);
    print_text("format version", info->version);
    print_text("save id", info->save_id);
    print_text("checkpoint id", info->checkpoint_id);
    if (info->world > 0) {
        printf("%-15s %d\n", "ranks", info->world);
    }
    printf("%-15s %zu (%zu tensor%s, %zu object%s)\n", "items", info->n_items, info->n_tensors, plural(info->n_tensors),
           info->n_objects, plural(info->n_objects));
    printf("%-15s %zu\n", "chunks", info->n_chunks);
    printf("%-15s %s\n", "tensor bytes", escape_size(info->tensor_bytes, size));
    printf("%-15s %s\n", "metadata bytes", escape_size(info->metadata_bytes, size));
    printf("%-15s %zu", "files", info->n_files);
    printf(f->n_missing ? ", %zu missing\n" : "\n", f->n_missing);
}

static void print_dtypes(const facts *f)
{
    char size[ESCAPE_SIZE_BYTES];
    table *t = table_create();
    table_column(t, "DTYPE", TABLE_LEFT);
    table_column(t, "TENSORS", TABLE_RIGHT);
    table_column(t, "BYTES", TABLE_RIGHT);
    for (int i = 0; i < DCP_DTYPE_COUNT; i++) {
        if (f->dtypes[i].n_tensors) {
            table_row *row = table_row_add(t, NULL);
            table_cell(row, 0, dcp_dtype_name((dcp_dtype)i));
            table_cell_printf(row, 1, "%zu", f->dtypes[i].n_tensors);
            table_cell(row, 2, escape_size(f->dtypes[i].bytes, size));
        }
    }
    fputc('\n', stdout);
    table_print(t);
}

static void print_biggest(const facts *f)
{
    char size[ESCAPE_SIZE_BYTES];
    table *t = table_create();
    table_column(t, "BIGGEST ITEMS", TABLE_LEFT);
    table_column(t, "DTYPE", TABLE_LEFT);
    table_column(t, "SHAPE", TABLE_LEFT);
    table_column(t, "BYTES", TABLE_RIGHT);
    for (size_t i = 0; i < f->n_biggest; i++) {
        const dcp_item *item = f->biggest[i];
        table_row *row = table_row_add(t, NULL);
        char *name = escape_text(item->fqn, ESCAPE_NAME), *shape = escape_shape(item->ndim, item->extents);
        table_cell(row, 0, name);
        table_cell(row, 1, item_type_name(item));
        table_cell(row, 2, item->kind == DCP_ITEM_TENSOR ? shape : "");
        table_cell(row, 3, escape_size(item->bytes, size));
        free(shape);
        free(name);
    }
    fputc('\n', stdout);
    table_print(t);
}

static void fill_file_row(table_row *row, const dcp_file_info *file)
{
    char *name = escape_text(dcp_str_of(file->name), ESCAPE_NAME);
    table_cell(row, 0, name);
    free(name);
    if (file->rank >= 0) {
        table_cell_printf(row, 1, "%d", file->rank);
    }
    if (file->present) {
        table_cell_printf(row, 2, "%" PRIu64, file->bytes);
    } else {
        table_cell(row, 2, "missing");
    }
    table_cell_printf(row, 3, "%" PRIu64, file->referenced);
    table_cell_printf(row, 4, "%zu", file->n_records);
}

static void print_files(const facts *f)
{
    table *t = table_create();
    table_column(t, "FILE", TABLE_LEFT);
    table_column(t, "RANK", TABLE_RIGHT);
    table_column(t, "BYTES", TABLE_RIGHT);
    table_column(t, "IN USE", TABLE_RIGHT);
    table_column(t, "RECORDS", TABLE_RIGHT);
    for (size_t i = 0; i < f->n_files; i++) {
        fill_file_row(table_row_add(t, NULL), &f->files[i]);
    }
    fputc('\n', stdout);
    table_print(t);
}

static void print_strays(const facts *f)
{
    table *t = table_create();
    table_column(t, "NOT PART OF IT", TABLE_LEFT);
    table_column(t, "BYTES", TABLE_RIGHT);
    for (size_t i = 0; i < f->strays.n; i++) {
        table_row *row = table_row_add(t, NULL);
        char *name = escape_text(dcp_str_of(f->strays.files[i].name), ESCAPE_NAME);
        table_cell(row, 0, name);
        table_cell_printf(row, 1, "%" PRIu64, f->strays.files[i].bytes);
        free(name);
    }
    fputc('\n', stdout);
    table_print(t);
}

static void print_facts(const facts *f)
{
    print_head(f);
    if (f->info.n_tensors) {
        print_dtypes(f);
    }
    if (f->n_biggest) {
        print_biggest(f);
    }
    if (f->n_files) {
        print_files(f);
    }
    if (f->strays.n) {
        print_strays(f);
    }
}

/* ---- JSON ---- */

static void head_json(json_writer *w, const dcp_checkpoint_info *info)
{
    jw_key_string(w, "layout", dcp_layout_name(info->layout));
    jw_key_string(w, "writer", info->writer);
    jw_key_string(w, "version", info->version);
    jw_key_string(w, "save_id", info->save_id);
    jw_key_string(w, "checkpoint_id", info->checkpoint_id);
    jw_key_uint(w, "world", (uint64_t)info->world);
    jw_key_uint(w, "items", info->n_items);
    jw_key_uint(w, "tensors", info->n_tensors);
    jw_key_uint(w, "objects", info->n_objects);
    jw_key_uint(w, "chunks", info->n_chunks);
    jw_key_uint(w, "tensor_bytes", info->tensor_bytes);
    jw_key_uint(w, "metadata_bytes", info->metadata_bytes);
}

static void dtypes_json(json_writer *w, const facts *f)
{
    jw_key_begin(w, "dtypes", '{');
    for (int i = 0; i < DCP_DTYPE_COUNT; i++) {
        if (f->dtypes[i].n_tensors) {
            jw_key_begin(w, dcp_dtype_name((dcp_dtype)i), '{');
            jw_key_uint(w, "tensors", f->dtypes[i].n_tensors);
            jw_key_uint(w, "bytes", f->dtypes[i].bytes);
            jw_end(w, '}');
        }
    }
    jw_end(w, '}');
}

static void biggest_json(json_writer *w, const facts *f)
{
    jw_key_begin(w, "biggest", '[');
    for (size_t i = 0; i < f->n_biggest; i++) {
        jw_begin(w, '{');
        jw_key(w, dcp_str_of("fqn"));
        jw_string(w, f->biggest[i]->fqn);
        jw_key_uint(w, "bytes", f->biggest[i]->bytes);
        jw_end(w, '}');
    }
    jw_end(w, ']');
}

static void file_json(json_writer *w, const dcp_file_info *file)
{
    jw_begin(w, '{');
    jw_key_string(w, "name", file->name);
    if (file->rank >= 0) {
        jw_key_uint(w, "rank", (uint64_t)file->rank);
    }
    jw_key_bool(w, "present", file->present);
    jw_key_uint(w, "bytes", file->bytes);
    jw_key_uint(w, "referenced_bytes", file->referenced);
    jw_key_uint(w, "records", file->n_records);
    jw_end(w, '}');
}

static void files_json(json_writer *w, const facts *f)
{
    jw_key_begin(w, "files", '[');
    for (size_t i = 0; i < f->n_files; i++) {
        file_json(w, &f->files[i]);
    }
    jw_end(w, ']');
    jw_key_begin(w, "unreferenced", '[');
    for (size_t i = 0; i < f->strays.n; i++) {
        jw_begin(w, '{');
        jw_key_string(w, "name", f->strays.files[i].name);
        jw_key_uint(w, "bytes", f->strays.files[i].bytes);
        jw_end(w, '}');
    }
    jw_end(w, ']');
}

static void print_json(const facts *f)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    head_json(&w, &f->info);
    dtypes_json(&w, f);
    biggest_json(&w, f);
    files_json(&w, f);
    jw_end(&w, '}');
}

static int describe(const dcp_checkpoint *ck, const options *opts)
{
    dcp_error err = DCP_ERROR_INIT;
    facts f;
    int status = EXIT_GOOD;
    if (!collect(ck, opts, &f, &err)) {
        complain_error(&err);
        status = EXIT_PROBLEM;
    } else if (opts->json) {
        print_json(&f);
    } else {
        print_facts(&f);
    }
    free_facts(&f);
    return status;
}

int cmd_info(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {NULL, parse, "CKPT", doc, children, NULL, NULL};
    options opts = {0};
    options_parse(&argp, argc, argv, &opts);
    dcp_checkpoint *ck = options_open(&opts);
    if (!ck) {
        return EXIT_PROBLEM;
    }
    int status = describe(ck, &opts);
    options_close(&opts, ck);
    return status;
}
