/* cmd_cat.c - dcptool cat: one value, whole or in part. */
#include "cli.h"
#include "escape.h"
#include "item_list.h"
#include "json_writer.h"
#include "nested_json.h"
#include "npy.h"
#include "slabs.h"
#include "slice.h"
#include "summary.h"

#include <ctype.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char doc[] =
    "Show or extract one value. A tensor is summed up: smallest and largest number, mean, zeros, NaNs, first elements. An object "
    "is printed as a Python literal.\n"
    "\v"
    "FQN is a name as it is, or as ls prints it. SLICE is NumPy's notation: '3', '1:5', ':,2:4', '...,-1', '::2'; only what it "
    "needs is read. Slices are clipped to the tensor, integers outside it are errors, steps are positive.\n"
    "\n"
    "Formats of a tensor:\n"
    "  summary  the default; --json prints it as JSON. min, max and mean leave out NaN, the mean also infinities; complex "
    "numbers have no min and max\n"
    "  npy      a NumPy file. NumPy has no bfloat16, 8-bit floats and other new dtypes: --as-bits writes those as unsigned "
    "integers "
    "of the same width\n"
    "  raw      the elements alone, row-major, little-endian\n"
    "  json     nested lists; complex numbers are [real, imaginary], a float4_e2m1fn_x2 is the list of its two numbers, NaN and "
    "infinities are the strings \"NaN\", \"Infinity\", \"-Infinity\"\n"
    "An object as JSON is {\"fqn\", \"type\", \"repr\"}.\n"
    "\n"
    "After a failure what is on standard output is not whole: the exit status is 1.\n"
    "\n"
    "Examples:\n"
    "  dcptool cat run/step-1000 model.weight\n"
    "  dcptool cat run/step-1000 model.weight '3,:10' --format json\n"
    "  dcptool cat run/step-1000 model.weight --format npy > weight.npy\n"
    "  dcptool cat run/step-1000 rng_state --rank 2";

enum { KEY_FORMAT = 'f', KEY_RANK = 'r', KEY_AS_BITS = 0x200 };

static const struct argp_option option_list[] = {
    {"format", KEY_FORMAT, "FORMAT", 0, "summary, npy, raw or json", 0},
    {"as-bits", KEY_AS_BITS, NULL, 0, "npy: write dtypes that NumPy lacks as unsigned integers", 0},
    {"rank", KEY_RANK, "R", 0, "Where ranks have their own value: that of rank R", 0},
    {0},
};

typedef enum cat_format { FORMAT_SUMMARY, FORMAT_NPY, FORMAT_RAW, FORMAT_JSON } cat_format;

typedef struct cat_args {
    options opts;
    const char *fqn, *slice; /* slice NULL: everything */
    cat_format format;
    bool as_bits;
    int rank; /* -1: common or the only one */
} cat_args;

static cat_format parse_format(struct argp_state *state, const char *text)
{
    static const char *const names[] = {"summary", "npy", "raw", "json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], text) == 0) {
            return (cat_format)i;
        }
    }
    argp_error(state, "unknown format '%s': summary, npy, raw or json", text);
    return FORMAT_SUMMARY;
}

static error_t parse_argument(char *arg, struct argp_state *state)
{
    cat_args *args = state->input;
    switch (state->arg_num) {
    case 0: args->opts.path = arg; break;
    case 1: args->fqn = arg; break;
    case 2: args->slice = arg; break;
    default: argp_error(state, "too many arguments"); break;
    }
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    cat_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &args->opts; return 0;
    case KEY_FORMAT: args->format = parse_format(state, arg); return 0;
    case KEY_AS_BITS: args->as_bits = true; return 0;
    case KEY_RANK: args->rank = (int)options_number(state, "--rank", arg, 0, INT_MAX); return 0;
    case ARGP_KEY_ARG: return parse_argument(arg, state);
    case ARGP_KEY_END:
        if (state->arg_num < 2) {
            argp_error(state, state->arg_num ? "no name given" : "no checkpoint given");
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* A slice such as -1 looks like an option. Arguments of that form go to the end, behind a "--"; there can be one. */
static char **protect_negative_slice(int *argc, char **argv)
{
    char **out = must_alloc((size_t)*argc + 2, sizeof *out);
    char *slice_arg = NULL;
    int n = 0, i = 0;
    for (; i < *argc && strcmp(argv[i], "--") != 0; i++) {
        if (!slice_arg && i > 2 && argv[i][0] == '-' && isdigit((unsigned char)argv[i][1])) {
            slice_arg = argv[i];
        } else {
            out[n++] = argv[i];
        }
    }
    if (slice_arg) {
        static char end_of_options[] = "--";
        i += i < *argc; /* a "--" of the user's: ours stands for it */
        out[n++] = end_of_options;
    }
    while (i < *argc) {
        out[n++] = argv[i++];
    }
    if (slice_arg) {
        out[n++] = slice_arg;
    }
    out[n] = NULL;
    *argc = n;
    return out;
}

/* ---- tensors ---- */

/* What is printed of a tensor: the elements of slice, in the shape that it gives. */
typedef struct selection {
    dcp_checkpoint *ck;
    const dcp_item *item;
    slice slice;
    int ndim;
    int64_t shape[DCP_MAX_NDIM];
    uint64_t budget_bytes;
} selection;

#define DEFAULT_BUDGET_BYTES ((uint64_t)32 << 20)

static bool read_slabs(const selection *sel, slab_fn fn, void *user)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status rc = slabs_read(sel->ck, sel->item, &sel->slice, sel->budget_bytes, fn, user, &err);
    if (rc != DCP_OK && !output_failed()) {
        complain_error(&err);
    }
    return rc == DCP_OK;
}

static bool add_to_summary(void *user, const void *elems, size_t n)
{
    summary_add(user, elems, n);
    return true;
}

static void print_summary(const cat_args *args, const selection *sel, const summary *s)
{
    char size[ESCAPE_SIZE_BYTES];
    char *shape = escape_shape(sel->ndim, sel->shape);
    fputs("name      ", stdout);
    escape_print(stdout, sel->item->fqn, ESCAPE_NAME);
    if (args->slice) {
        printf("\nslice     %s", args->slice);
    }
    printf("\ndtype     %s\nshape     %s\nelements  %" PRIu64 "\nbytes     %s\n", dcp_dtype_name(s->dtype), shape, s->n_elems,
           escape_size(s->n_elems * dcp_dtype_bytes(s->dtype), size));
    summary_print(s, stdout);
    free(shape);
}

static void print_summary_json(const cat_args *args, const selection *sel, const summary *s)
{
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key(&w, dcp_str_of("fqn"));
    jw_string(&w, sel->item->fqn);
    if (args->slice) {
        jw_key_string(&w, "slice", args->slice);
    }
    jw_key_string(&w, "dtype", dcp_dtype_name(s->dtype));
    jw_key_shape(&w, "shape", sel->ndim, sel->shape);
    summary_json(s, &w);
    jw_end(&w, '}');
}

static bool cat_summary(const cat_args *args, const selection *sel)
{
    summary s;
    summary_init(&s, sel->item->dtype);
    if (!read_slabs(sel, add_to_summary, &s)) {
        return false;
    }
    if (args->opts.json) {
        print_summary_json(args, sel, &s);
    } else {
        print_summary(args, sel, &s);
    }
    return true;
}

/* What comes first is held back until the first elements have been read, so that a failure before them prints nothing. */
typedef struct elem_output {
    const selection *sel;
    char head[NPY_HEADER_BYTES];
    size_t head_bytes; /* not yet written */
} elem_output;

static bool write_head(elem_output *out)
{
    size_t n = out->head_bytes;
    out->head_bytes = 0;
    return fwrite(out->head, 1, n, stdout) == n;
}

static bool write_elems(void *user, const void *elems, size_t n)
{
    elem_output *out = user;
    return write_head(out) && fwrite(elems, dcp_dtype_bytes(out->sel->item->dtype), n, stdout) == n;
}

/* Bytes would garble a terminal, and nobody could read them. */
static bool refuse_terminal(void)
{
    if (!isatty(STDOUT_FILENO)) {
        return false;
    }
    complain("not writing binary data to a terminal: redirect it to a file");
    return true;
}

static bool cat_raw(const selection *sel)
{
    elem_output out = {.sel = sel};
    return !refuse_terminal() && read_slabs(sel, write_elems, &out);
}

static bool cat_npy(const cat_args *args, const selection *sel)
{
    elem_output out = {.sel = sel};
    const char *descr = npy_descr(sel->item->dtype);
    if (!descr && args->as_bits) {
        descr = npy_descr_bits(sel->item->dtype);
    }
    if (!descr) {
        complain("NumPy has no dtype %s: --as-bits writes unsigned integers, --format raw the bytes",
                 dcp_dtype_name(sel->item->dtype));
        return false;
    }
    if (refuse_terminal()) {
        return false;
    }
    out.head_bytes = npy_header(descr, sel->ndim, sel->shape, out.head);
    return read_slabs(sel, write_elems, &out) && write_head(&out);
}

/* Lists are opened with the first elements, as above. */
typedef struct json_output {
    const selection *sel;
    nested_json nested;
    bool is_begun;
} json_output;

static bool begin_json(json_output *out)
{
    const selection *sel = out->sel;
    if (out->is_begun) {
        return true;
    }
    out->is_begun = nested_json_begin(&out->nested, stdout, sel->item->dtype, sel->ndim, sel->shape);
    if (!out->is_begun) {
        complain("too many empty lists to print");
    }
    return out->is_begun;
}

static bool add_to_json(void *user, const void *elems, size_t n)
{
    json_output *out = user;
    if (!begin_json(out)) {
        return false;
    }
    nested_json_add(&out->nested, elems, n);
    return !ferror(stdout);
}

static bool cat_json(const selection *sel)
{
    json_output out = {.sel = sel};
    return read_slabs(sel, add_to_json, &out) && begin_json(&out);
}

/* What is read in parts has no checksum of its own, so all of it is checked before any is printed. A slice reads what it needs.
 */
static bool check_whole(const cat_args *args, const selection *sel)
{
    dcp_error err = DCP_ERROR_INIT;
    if (args->slice || sel->item->bytes <= sel->budget_bytes || dcp_item_check_crc(sel->ck, sel->item, &err) == DCP_OK) {
        return true;
    }
    complain_error(&err);
    return false;
}

static bool cat_tensor(const cat_args *args, selection *sel)
{
    char message[SLICE_MESSAGE_BYTES];
    if (!slice_parse(args->slice, sel->item->ndim, sel->item->extents, &sel->slice, message)) {
        complain("%s", message);
        return false;
    }
    sel->ndim = slice_shape(&sel->slice, sel->shape);
    if (!check_whole(args, sel)) {
        return false;
    }
    switch (args->format) {
    case FORMAT_NPY: return cat_npy(args, sel);
    case FORMAT_RAW: return cat_raw(sel);
    case FORMAT_JSON: return cat_json(sel);
    default: return cat_summary(args, sel);
    }
}

/* ---- objects ---- */

/* Python's name of the type. */
static dcp_str type_name(const dcp_value *v)
{
    static const char *const names[] = {
        [DCP_KIND_NONE] = "NoneType",
        [DCP_KIND_BOOL] = "bool",
        [DCP_KIND_INT] = "int",
        [DCP_KIND_FLOAT] = "float",
        [DCP_KIND_COMPLEX] = "complex",
        [DCP_KIND_STR] = "str",
        [DCP_KIND_BYTES] = "bytes",
        [DCP_KIND_BYTEARRAY] = "bytearray",
        [DCP_KIND_LIST] = "list",
        [DCP_KIND_TUPLE] = "tuple",
        [DCP_KIND_SIZE] = "torch.Size",
        [DCP_KIND_SET] = "set",
        [DCP_KIND_FROZENSET] = "frozenset",
        [DCP_KIND_DICT] = "dict",
        [DCP_KIND_DTYPE] = "torch.dtype",
        [DCP_KIND_ORDERED_DICT] = "collections.OrderedDict",
        [DCP_KIND_DEVICE] = "torch.device",
        [DCP_KIND_TENSOR] = "torch.Tensor",
        [DCP_KIND_SHARDED] = "torch.Tensor",
        [DCP_KIND_OPAQUE] = "",
        [DCP_KIND_RECORD] = "",
    };
    dcp_kind kind = dcp_value_kind(v);
    return kind == DCP_KIND_OPAQUE ? dcp_opaque_class(v) : dcp_str_of(names[kind]);
}

static void print_object(const cat_args *args, const dcp_item *item, dcp_str type, dcp_str repr)
{
    if (!args->opts.json && args->format != FORMAT_JSON) {
        escape_print(stdout, repr, ESCAPE_TEXT);
        fputc('\n', stdout);
        return;
    }
    json_writer w = JSON_WRITER(stdout);
    jw_begin(&w, '{');
    jw_key(&w, dcp_str_of("fqn"));
    jw_string(&w, item->fqn);
    jw_key(&w, dcp_str_of("type"));
    jw_string(&w, type);
    jw_key(&w, dcp_str_of("repr"));
    jw_string(&w, repr);
    jw_end(&w, '}');
}

static bool cat_object(const cat_args *args, dcp_checkpoint *ck, const dcp_item *item)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *value;
    dcp_str repr;
    char *text;
    if (args->slice || args->format == FORMAT_NPY || args->format == FORMAT_RAW) {
        complain("'%s' is an object: slices and the formats npy and raw are for tensors", args->fqn);
        return false;
    }
    if (dcp_read_object(ck, item, &value, &err) != DCP_OK) {
        complain_error(&err);
        return false;
    }
    bool is_good = item_repr(item, value, &text, &repr.len, &err) == DCP_OK;
    if (is_good) {
        repr.ptr = text;
        print_object(args, item, type_name(value), repr);
        dcp_text_free(args->opts.ctx, text);
    } else {
        complain_error(&err);
    }
    dcp_value_free(value);
    return is_good;
}

static int cat(dcp_checkpoint *ck, const cat_args *args)
{
    const dcp_item *item = item_list_find(ck, args->fqn, args->rank);
    if (!item) {
        return EXIT_PROBLEM;
    }
    if (item->kind == DCP_ITEM_OBJECT) {
        return cat_object(args, ck, item) ? EXIT_GOOD : EXIT_PROBLEM;
    }
    uint64_t memory_bytes = args->opts.memory_bytes;
    selection sel = {.ck = ck, .item = item, .budget_bytes = memory_bytes ? memory_bytes / 4 : DEFAULT_BUDGET_BYTES};
    return cat_tensor(args, &sel) ? EXIT_GOOD : EXIT_PROBLEM;
}

/* Opens the checkpoint for the one item; if it is not there, for all of them, so that the message can tell what is. */
static dcp_checkpoint *open_item(cat_args *args)
{
    args->opts.only = args->fqn;
    dcp_checkpoint *ck = options_open(&args->opts);
    if (ck && dcp_checkpoint_count(ck) == 0) {
        options_close(&args->opts, ck);
        args->opts.only = NULL;
        ck = options_open(&args->opts);
    }
    return ck;
}

int cmd_cat(int argc, char **argv)
{
    const struct argp_child children[] = {{&options_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "CKPT FQN [SLICE]", doc, children, NULL, NULL};
    cat_args args = {.opts.check_crc = true, .rank = -1};
    char **safe_argv = protect_negative_slice(&argc, argv);
    options_parse(&argp, argc, safe_argv, &args);
    dcp_checkpoint *ck = open_item(&args);
    int status = ck ? cat(ck, &args) : EXIT_PROBLEM;
    if (ck) {
        options_close(&args.opts, ck);
    }
    free(safe_argv);
    return status;
}
