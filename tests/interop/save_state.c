/* Saves a state of everything that the library can write, for PyTorch to load. test_library.py makes the same state in Python.
 *
 *     save_state PATH RELEASE [FORM]
 *
 * RELEASE: dtypes that it does not know are left out; 213 is PyTorch 2.13. FORM: plain (default), files, items, align,
 * zstd; hf, hf-whole: a Hugging Face directory. */
#include <dcp/dcp.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dcp_error err = DCP_ERROR_INIT;

static void must(dcp_status status)
{
    if (status != DCP_OK) {
        fprintf(stderr, "save_state: %s: %s\n", dcp_status_name(status), err.message);
        exit(1);
    }
}

/* ---- makers ---- */

static dcp_value *dict(void)
{
    dcp_value *v;
    must(dcp_dict_create(NULL, &v, &err));
    return v;
}

static void put(dcp_value *to, const char *key, dcp_value *v)
{
    must(dcp_dict_set(to, dcp_key_str(key), v, &err));
}

static dcp_value *integer(int64_t i)
{
    dcp_value *v;
    must(dcp_int_create(NULL, i, &v, &err));
    return v;
}

static dcp_value *real(double d)
{
    dcp_value *v;
    must(dcp_float_create(NULL, d, &v, &err));
    return v;
}

static dcp_value *text(const char *s)
{
    dcp_value *v;
    must(dcp_string_create(NULL, dcp_str_of(s), &v, &err));
    return v;
}

static dcp_value *bytes(dcp_kind kind, const char *s, size_t n)
{
    dcp_value *v;
    must(dcp_bytes_create(NULL, kind, s, n, &v, &err));
    return v;
}

static dcp_value *none(void)
{
    dcp_value *v;
    must(dcp_none_create(NULL, &v, &err));
    return v;
}

static dcp_value *truth(bool b)
{
    dcp_value *v;
    must(dcp_bool_create(NULL, b, &v, &err));
    return v;
}

/* Takes over the elements, up to a NULL. */
static dcp_value *sequence(dcp_kind kind, dcp_value **elements)
{
    dcp_value *v;
    must(dcp_seq_create(NULL, kind, &v, &err));
    for (; *elements; elements++) {
        must(dcp_list_append(v, *elements, &err));
    }
    return v;
}

#define SEQUENCE(kind, ...) sequence(kind, (dcp_value *[]){__VA_ARGS__, NULL})

/* ---- tensors ---- */

/* Memory of n bytes that nothing frees: it has to live until the end. Bytes are 0 and 1 for bools, else anything. */
static void *fill(dcp_dtype dtype, size_t n, unsigned seed)
{
    uint8_t *p = malloc(n + !n);
    for (size_t i = 0; p && i < n; i++) {
        unsigned byte = (unsigned)(i * 31 + seed * 7 + (i >> 8)) & 0xff;
        p[i] = (uint8_t)(dtype == DCP_BOOL ? byte & 1 : byte);
    }
    if (!p) {
        exit(1);
    }
    return p;
}

static dcp_value *view(dcp_dtype dtype, int ndim, const int64_t *extents, const int64_t *strides, void *data)
{
    dcp_value *v;
    dcp_tensor t = dcp_tensor_make(dtype, ndim, extents, data);
    t.strides = strides;
    must(dcp_tensor_create(NULL, &t, &v, &err));
    return v;
}

#define SHAPE(...)                                                                                                               \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                                                       \
    {                                                                                                                            \
        __VA_ARGS__                                                                                                              \
    }

static void add_dtypes(dcp_value *state, int release)
{
    dcp_value *d = dict();
    for (int k = 1; k < DCP_DTYPE_COUNT; k++) {
        dcp_dtype dtype = (dcp_dtype)k;
        if (dcp_dtype_release(dtype) <= release) {
            put(d, dcp_dtype_name(dtype), view(dtype, SHAPE(3, 5), NULL, fill(dtype, 15 * dcp_dtype_bytes(dtype), (unsigned)k)));
        }
    }
    put(state, "dtypes", d);
}

static void add_shapes(dcp_value *state)
{
    dcp_value *d = dict();
    float *m = fill(DCP_FLOAT32, 24 * sizeof *m, 100);
    put(d, "scalar", view(DCP_FLOAT32, 0, NULL, NULL, m + 3));
    put(d, "empty", view(DCP_INT64, SHAPE(0), NULL, NULL));
    put(d, "empty3", view(DCP_FLOAT16, SHAPE(3, 0, 2), NULL, NULL));
    put(d, "ones", view(DCP_FLOAT32, SHAPE(1, 1, 1, 1), NULL, m + 5));
    put(d, "transposed", view(DCP_FLOAT32, SHAPE(6, 4), (int64_t[]){1, 6}, m));
    put(d, "every_second", view(DCP_FLOAT32, SHAPE(4, 3), (int64_t[]){6, 2}, m));
    put(d, "expanded", view(DCP_FLOAT32, SHAPE(5, 6), (int64_t[]){0, 1}, m));
    put(d, "channels_last", view(DCP_FLOAT32, SHAPE(2, 3, 2, 2), (int64_t[]){12, 1, 6, 3}, m));
    put(d, "tied", view(DCP_FLOAT32, SHAPE(4, 6), NULL, m));
    put(d, "tied_too", view(DCP_FLOAT32, SHAPE(4, 6), NULL, m));
    put(d, "part", view(DCP_FLOAT32, SHAPE(2, 6), NULL, m + 6));
    put(d, "large", view(DCP_BFLOAT16, SHAPE(1031, 1543), NULL, fill(DCP_BFLOAT16, 1031 * 1543 * 2, 101)));
    put(d, "large_transposed", view(DCP_INT16, SHAPE(1543, 1031), (int64_t[]){1, 1543}, fill(DCP_INT16, 1031 * 1543 * 2, 102)));
    put(state, "shapes", d);
}

/* A tensor of [7, 9] in four uneven chunks. */
static void add_sharded(dcp_value *state)
{
    static const int64_t offsets[4][2] = {{0, 0}, {0, 4}, {5, 0}, {5, 4}}, sizes[4][2] = {{5, 4}, {5, 5}, {2, 4}, {2, 5}};
    static const int64_t extents[] = {7, 9}, strides[] = {9, 1};
    int32_t *all = fill(DCP_INT32, 63 * sizeof *all, 103);
    dcp_tensor chunks[4];
    dcp_box boxes[4];
    dcp_value *v;
    for (int i = 0; i < 4; i++) {
        chunks[i] = dcp_tensor_make(DCP_INT32, 2, sizes[i], all + offsets[i][0] * 9 + offsets[i][1]);
        chunks[i].strides = strides;
        boxes[i] = (dcp_box){offsets[i], sizes[i]};
    }
    must(dcp_sharded_create(NULL, DCP_INT32, 2, extents, 4, chunks, boxes, &v, &err));
    put(state, "sharded", v);
}

/* ---- objects ---- */

static dcp_value *big(void)
{
    dcp_value *v;
    uint8_t b[13] = {[12] = 1}; /* 2 ** 96 */
    must(dcp_bigint_create(NULL, b, sizeof b, &v, &err));
    return v;
}

static void add_numbers(dcp_value *o)
{
    dcp_value *v;
    put(o, "int", integer(-7));
    put(o, "int64", integer(INT64_MIN));
    put(o, "big", big());
    put(o, "float", real(0.1));
    put(o, "inf", real((double)INFINITY));
    put(o, "minus_zero", real(-0.0));
    put(o, "true", truth(true));
    put(o, "false", truth(false));
    put(o, "none", none());
    must(dcp_complex_create(NULL, 1.5, -2, &v, &err));
    put(o, "complex", v);
    must(dcp_dtype_create(NULL, DCP_BFLOAT16, &v, &err));
    put(o, "dtype", v);
    must(dcp_device_name_create(NULL, dcp_str_of("cpu"), &v, &err));
    put(o, "device", v);
}

static void add_containers(dcp_value *o)
{
    dcp_value *ordered, *inner = dict(), *by_number = dict();
    must(dcp_ordered_dict_create(NULL, &ordered, &err));
    put(ordered, "b", integer(1));
    put(ordered, "a", integer(2));
    put(inner, "k", SEQUENCE(DCP_KIND_LIST, integer(1), text("x"), none()));
    must(dcp_dict_set(by_number, dcp_key_int(3), text("three"), &err));
    put(o, "list", SEQUENCE(DCP_KIND_LIST, integer(1), real(2.5), text("three"), truth(false), none(), big()));
    put(o, "tuple", SEQUENCE(DCP_KIND_TUPLE, integer(1), SEQUENCE(DCP_KIND_TUPLE, text("in"), inner), by_number, ordered));
    put(o, "size", SEQUENCE(DCP_KIND_SIZE, integer(2), integer(3)));
    put(o, "set", SEQUENCE(DCP_KIND_SET, integer(5)));
    put(o, "frozenset", SEQUENCE(DCP_KIND_FROZENSET, text("f")));
    put(o, "empty_list", sequence(DCP_KIND_LIST, (dcp_value *[]){NULL}));
    put(o, "empty_tuple", sequence(DCP_KIND_TUPLE, (dcp_value *[]){NULL}));
    float *m = fill(DCP_FLOAT32, 6 * sizeof *m, 104);
    put(o, "with_tensors",
        SEQUENCE(DCP_KIND_TUPLE, view(DCP_FLOAT32, SHAPE(2, 3), NULL, m), view(DCP_FLOAT32, SHAPE(3, 2), (int64_t[]){1, 3}, m),
                 text("and text")));
}

static void add_objects(dcp_value *state)
{
    dcp_value *o = dict(), *list;
    add_numbers(o);
    add_containers(o);
    put(o, "text", text("gr\xc3\xbc\xc3\x9f dich \xf0\x9f\x91\x8b\n'\""));
    put(o, "empty_text", text(""));
    put(o, "bytes", bytes(DCP_KIND_BYTES, "\x00\xff'x", 4));
    put(o, "bytearray", bytes(DCP_KIND_BYTEARRAY, "ab", 2));
    put(state, "objects", o);
    list = SEQUENCE(DCP_KIND_LIST, view(DCP_UINT8, SHAPE(4), NULL, fill(DCP_UINT8, 4, 105)), integer(9));
    put(state, "list", list);
}

static void add_names(dcp_value *state)
{
    static const char *const names[] = {"dot.ted", "gr\xc3\xb6\303\237e",     "sp ace", "tab\t", "", "a/b",
                                        "..",      "\xe6\xbc\xa2\xe5\xad\x97"};
    dcp_value *d = dict();
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        put(d, names[i], view(DCP_UINT8, SHAPE(2), NULL, fill(DCP_UINT8, 2, 110 + i)));
    }
    put(state, "names", d);
    put(state, "top.level", integer(1));
    put(state, "", integer(2));
}

/* A Hugging Face directory: shards of the tensors that PyTorch's reader can put together, or whole tensors in two files. */
static int save_hf(const char *path, bool whole)
{
    static const dcp_hf_place places[] = {{{"plain", 5}, 2}, {{"scalar", 6}, 1}};
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    dcp_value *state = dict();
    opts.no_sync = true;
    opts.whole = whole;
    if (whole) {
        opts.places = places;
        opts.n_places = 2;
    } else {
        add_sharded(state);
    }
    put(state, "plain", view(DCP_UINT8, SHAPE(4), NULL, fill(DCP_UINT8, 4, 105)));
    put(state, "scalar", view(DCP_FLOAT32, 0, NULL, NULL, fill(DCP_FLOAT32, 4, 106)));
    must(dcp_hf_save(NULL, path, state, &opts, NULL, &err));
    dcp_value_free(state);
    return 0;
}

int main(int argc, char **argv)
{
    const char *form = argc > 3 ? argv[3] : "plain";
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    if (argc < 3) {
        return 2;
    }
    if (strncmp(form, "hf", 2) == 0) {
        return save_hf(argv[1], strcmp(form, "hf-whole") == 0);
    }
    dcp_value *state = dict();
    add_dtypes(state, atoi(argv[2]));
    add_shapes(state);
    add_sharded(state);
    add_objects(state);
    add_names(state);
    opts.no_sync = true;
    opts.files = strcmp(form, "files") == 0 ? 3 : 0;
    opts.file_per_item = strcmp(form, "items") == 0;
    opts.align_payloads = strcmp(form, "align") == 0;
    opts.transform = strcmp(form, "zstd") == 0 ? "stream.zstd/1" : NULL;
    must(dcp_save(NULL, argv[1], state, &opts, NULL, &err));
    dcp_value_free(state);
    return 0;
}
