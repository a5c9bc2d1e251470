#include "format/pickle_writer.h"

#include "state/strided.h"
#include "state/value.h"
#include "support/failing_alloc.h"
#include "support/golden_records.h"

#include <math.h>

static dcp_context *ctx;

static int setup(void **state)
{
    (void)state;
    return dcp_context_create(NULL, &ctx, NULL);
}

static int teardown(void **state)
{
    (void)state;
    dcp_context_free(ctx);
    return 0;
}

/* ---- tensor records ---- */

/* What data.pkl of a golden tensor record says; read by position, as formats.md 3.7 lays it out. */
typedef struct plain_tensor {
    dcp_dtype dtype;
    int ndim;
    int64_t extents[8], strides[8];
} plain_tensor;

static int64_t take_int(const uint8_t **p)
{
    const uint8_t *at = *p;
    switch (*at) {
    case 'K': *p += 2; return at[1];
    case 'M': *p += 3; return dcp__load16(at + 1);
    case 'J': *p += 5; return (int32_t)dcp__load32(at + 1);
    default: fail_msg("opcode %02x is no small integer", *at); return 0;
    }
}

static int take_tuple(const uint8_t **p, int64_t *out)
{
    int n = 0;
    if (**p == ')') {
        *p += 1;
        return 0;
    }
    *p += **p == '(';
    while (**p == 'K' || **p == 'M' || **p == 'J') {
        assert_true(n < 8);
        out[n++] = take_int(p);
    }
    *p += 3; /* TUPLE.., BINPUT */
    return n;
}

static bool take_line(const uint8_t **p, const char *module, char *name)
{
    size_t len = strlen(module);
    if (**p != 'c' || memcmp(*p + 1, module, len) != 0 || (*p)[1 + len] != '\n') {
        return false;
    }
    const uint8_t *start = *p + len + 2, *end = memchr(start, '\n', 40);
    memcpy(name, start, (size_t)(end - start));
    name[end - start] = 0;
    *p = end + 3; /* BINPUT */
    return true;
}

static dcp_dtype dtype_of_storage(const char *name)
{
    static const struct {
        const char *name;
        dcp_dtype dtype;
    } classes[] = {{"FloatStorage", DCP_FLOAT32},
                   {"DoubleStorage", DCP_FLOAT64},
                   {"HalfStorage", DCP_FLOAT16},
                   {"BFloat16Storage", DCP_BFLOAT16},
                   {"CharStorage", DCP_INT8},
                   {"ByteStorage", DCP_UINT8},
                   {"ShortStorage", DCP_INT16},
                   {"IntStorage", DCP_INT32},
                   {"LongStorage", DCP_INT64},
                   {"BoolStorage", DCP_BOOL},
                   {"ComplexFloatStorage", DCP_COMPLEX64},
                   {"ComplexDoubleStorage", DCP_COMPLEX128}};
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        if (strcmp(name, classes[i].name) == 0) {
            return classes[i].dtype;
        }
    }
    fail_msg("storage class %s", name);
    return DCP_DTYPE_NONE;
}

/* False if the record is no tensor record. */
static bool parse_tensor(const golden_archive *a, plain_tensor *out)
{
    char name[64];
    const uint8_t *p = a->pickle + 2;
    if (*p != 'c' || !take_line(&p, "torch._utils", name) || strncmp(name, "_rebuild_tensor_v", 17) != 0) {
        return false;
    }
    p += 2 + 5 + 7 + 2; /* marks, "storage" */
    bool is_typed = take_line(&p, "torch", name);
    assert_true(is_typed || take_line(&p, "torch.storage", name));
    p += 6 + 2 + 8 + 2; /* "0", "cpu" */
    (void)take_int(&p);
    p += 4;
    assert_int_equal(take_int(&p), 0);
    out->ndim = take_tuple(&p, out->extents);
    assert_int_equal(take_tuple(&p, out->strides), out->ndim);
    out->dtype = is_typed ? dtype_of_storage(name) : DCP_DTYPE_NONE;
    p += 1;
    assert_true(take_line(&p, "collections", name));
    p += 4;
    if (!is_typed) {
        assert_true(take_line(&p, "torch", name));
        out->dtype = dcp_dtype_from_name(dcp_str_of(name));
        assert_int_not_equal(out->dtype, DCP_DTYPE_NONE);
    }
    return true;
}

typedef struct tally {
    size_t tensors, permuted, views;
    bool dtypes[DCP_DTYPE_COUNT];
} tally;

static void rewrite_tensor(const golden_archive *a, void *user)
{
    tally *t = user;
    plain_tensor tensor;
    if (!parse_tensor(a, &tensor)) {
        return;
    }
    t->tensors++;
    int64_t strides[8];
    dcp__row_major(tensor.ndim, tensor.extents, strides);
    if (memcmp(strides, tensor.strides, (size_t)tensor.ndim * sizeof *strides) != 0) {
        bool is_row_major = dcp__is_row_major(tensor.ndim, tensor.extents, tensor.strides);
        t->permuted += !is_row_major;
        t->views += is_row_major;
        if (is_row_major) { /* an empty column shard, which keeps the strides of the whole */
            assert_int_equal(tensor.extents[1], 0);
        }
        return;
    }
    t->dtypes[tensor.dtype] = true;
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    assert_int_equal(dcp__pickle_tensor(&out, tensor.dtype, tensor.ndim, tensor.extents, NULL), DCP_OK);
    assert_int_equal(out.len, a->pickle_len);
    assert_memory_equal(out.data, a->pickle, out.len);
    dcp__buf_reset(&out);
}

static void pickle_writer__golden_tensor_records_are_rewritten_byte_for_byte(void **state)
{
    (void)state;
    tally t = {0};
    golden_each(DCP_TEST_DIR "/golden/*/*/ckpt/*.distcp", rewrite_tensor, &t);
    assert_int_equal(t.tensors, 650);
    assert_int_equal(t.permuted, 36);
    assert_int_equal(t.views, 15);
    for (int d = DCP_FLOAT32; d <= DCP_FLOAT8_E5M2FNUZ; d++) {
        assert_true(t.dtypes[d]);
    }
    assert_true(t.dtypes[DCP_UINT16] && t.dtypes[DCP_UINT32] && t.dtypes[DCP_UINT64] && t.dtypes[DCP_FLOAT8_E8M0FNU]);
}

static void pickle_writer__bad_tensors_are_refused(void **state)
{
    (void)state;
    static const int64_t negative[] = {2, -1}, huge[] = {1ll << 40, 1ll << 30}, almost[] = {1ll << 61};
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_FLOAT32, 2, negative, NULL), DCP_ARG);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_DTYPE_NONE, 0, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_FLOAT32, -1, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_FLOAT32, DCP_MAX_NDIM + 1, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_FLOAT32, 2, huge, NULL), DCP_LIMIT);
    assert_int_equal(dcp__pickle_tensor(&out, DCP_FLOAT32, 1, almost, NULL), DCP_LIMIT);
    assert_int_equal(out.len, 0);
    dcp__buf_reset(&out);
}

/* ---- values, compared with what PyTorch wrote ---- */

#define OK(call) assert_int_equal(call, DCP_OK)

static dcp_value *none(void)
{
    dcp_value *v;
    OK(dcp_none_create(ctx, &v, NULL));
    return v;
}

static dcp_value *boolean(bool b)
{
    dcp_value *v;
    OK(dcp_bool_create(ctx, b, &v, NULL));
    return v;
}

static dcp_value *integer(int64_t i)
{
    dcp_value *v;
    OK(dcp_int_create(ctx, i, &v, NULL));
    return v;
}

/* sign * 2^bit */
static dcp_value *power(unsigned bit, bool is_negative)
{
    uint8_t bytes[300] = {0};
    dcp_value *v;
    size_t len = bit / 8 + 2;
    bytes[bit / 8] = (uint8_t)(1u << bit % 8);
    if (is_negative) {
        bytes[bit / 8] = (uint8_t)(0u - bytes[bit / 8]);
        memset(bytes + bit / 8 + 1, 0xff, 1);
    }
    OK(dcp_bigint_create(ctx, bytes, len, &v, NULL));
    return v;
}

static dcp_value *real(double d)
{
    dcp_value *v;
    OK(dcp_float_create(ctx, d, &v, NULL));
    return v;
}

static dcp_value *text(const char *s)
{
    dcp_value *v;
    OK(dcp_string_create(ctx, dcp_str_of(s), &v, NULL));
    return v;
}

static dcp_value *bytes(dcp_kind kind, const char *s, size_t len)
{
    dcp_value *v;
    OK(dcp_bytes_create(ctx, kind, s, len, &v, NULL));
    return v;
}

static dcp_value *dtype(dcp_dtype d)
{
    dcp_value *v;
    OK(dcp_dtype_create(ctx, d, &v, NULL));
    return v;
}

static dcp_value *device(const char *name)
{
    dcp_value *v;
    OK(dcp_device_name_create(ctx, dcp_str_of(name), &v, NULL));
    return v;
}

static dcp_value *seq(dcp_kind kind, size_t n, dcp_value **items)
{
    dcp_value *v;
    OK(dcp_seq_create(ctx, kind, &v, NULL));
    for (size_t i = 0; i < n; i++) {
        OK(dcp_list_append(v, items[i], NULL));
    }
    return v;
}

#define SEQ(kind, ...)                                                                                                           \
    seq(DCP_KIND_##kind, sizeof((dcp_value *[]){__VA_ARGS__}) / sizeof(dcp_value *), (dcp_value *[]){__VA_ARGS__})
#define LIST(...) SEQ(LIST, __VA_ARGS__)
#define TUPLE(...) SEQ(TUPLE, __VA_ARGS__)

static dcp_value *empty(dcp_kind kind)
{
    return seq(kind, 0, NULL);
}

static dcp_value *sevens(size_t n)
{
    dcp_value *v = empty(DCP_KIND_LIST);
    for (size_t i = 0; i < n; i++) {
        OK(dcp_list_append(v, integer(7), NULL));
    }
    return v;
}

static dcp_value *dict(bool is_ordered)
{
    dcp_value *v;
    OK((is_ordered ? dcp_ordered_dict_create : dcp_dict_create)(ctx, &v, NULL));
    return v;
}

static dcp_value *set(dcp_value *d, const char *key, dcp_value *value)
{
    OK(dcp_dict_set(d, dcp_key_str(key), value, NULL));
    return d;
}

static dcp_value *set_int(dcp_value *d, int64_t key, dcp_value *value)
{
    OK(dcp_dict_set(d, dcp_key_int(key), value, NULL));
    return d;
}

static dcp_value *numbered(bool is_ordered, size_t n)
{
    dcp_value *d = dict(is_ordered);
    for (size_t i = 0; i < n; i++) {
        set_int(d, (int64_t)i, integer(7));
    }
    return d;
}

static dcp_value *tensor(dcp_dtype type, int ndim, int64_t a, int64_t b, void *data)
{
    int64_t extents[] = {a, b};
    dcp_tensor t = dcp_tensor_make(type, ndim, extents, data);
    dcp_value *v;
    OK(dcp_tensor_create(ctx, &t, &v, NULL));
    return v;
}

static dcp_value *opaque(dcp__opaque_form form, const char *module, const char *name, dcp_value *args, dcp_value *items,
                         dcp_value *pairs, dcp_value *state)
{
    dcp__opaque parts = {.form = form,
                         .module = dcp_str_of(module),
                         .name = dcp_str_of(name),
                         .args = args,
                         .items = items,
                         .pairs = pairs,
                         .state = state};
    dcp_value *v;
    OK(dcp__opaque_create(ctx, &parts, &v, NULL));
    return v;
}

static float memory[64];

static dcp_value *ints(void)
{
    return LIST(integer(0), integer(255), integer(256), integer(65535), integer(65536), integer(INT32_MAX),
                integer(1ll + INT32_MAX), integer(-1), integer(INT32_MIN), integer(-1ll + INT32_MIN), integer(INT64_MAX),
                integer(INT64_MIN), power(63, false), power(80, false), power(80, true));
}

static dcp_value *shared_lists(void)
{
    dcp_value *l = LIST(integer(1), integer(2));
    dcp_value *d = set(set(dict(false), "a", l), "b", dcp_value_retain(l));
    return set(d, "a2", LIST(dcp_value_retain(l)));
}

static dcp_value *texts(void)
{
    return LIST(text("lr"), set(dict(false), "lr", integer(1)), TUPLE(text("lr"), text("x")), set(dict(false), "x", text("lr")));
}

static dcp_value *many_memos(void)
{
    dcp_value *v = empty(DCP_KIND_LIST), *l = LIST(integer(1), integer(2));
    for (int64_t i = 0; i < 300; i++) {
        OK(dcp_list_append(v, TUPLE(integer(i)), NULL));
    }
    OK(dcp_list_append(v, l, NULL));
    OK(dcp_list_append(v, dcp_value_retain(l), NULL));
    return v;
}

static dcp_value *twelve_tensors(void)
{
    dcp_value *v = empty(DCP_KIND_LIST);
    for (size_t i = 0; i < 12; i++) {
        OK(dcp_list_append(v, tensor(DCP_FLOAT32, 1, 1, 0, memory + 20 + i), NULL));
    }
    OK(dcp_list_append(v, tensor(DCP_FLOAT32, 1, 12, 0, memory), NULL));
    OK(dcp_list_append(v, tensor(DCP_FLOAT32, 1, 12, 0, memory), NULL));
    return v;
}

static dcp_value *size4(void)
{
    return SEQ(SIZE, integer(1), integer(2), integer(3), integer(70000));
}

static dcp_value *complex_number(void)
{
    dcp_value *v;
    OK(dcp_complex_create(ctx, 1.5, -2, &v, NULL));
    return v;
}

static dcp_value *shared_tensor(void)
{
    dcp_value *t = tensor(DCP_FLOAT32, 2, 2, 3, memory);
    return LIST(t, dcp_value_retain(t));
}

static dcp_value *defaultdict(void)
{
    dcp_value *args = TUPLE(opaque(DCP__OPAQUE_GLOBAL, "__builtin__", "list", NULL, NULL, NULL, NULL));
    return opaque(DCP__OPAQUE_REDUCE, "collections", "defaultdict", args, NULL,
                  LIST(text("a"), integer(1), text("b"), integer(2)), NULL);
}

/* The value of that name in tests/data/make_pickle_fixtures.py. */
static dcp_value *fixture(const char *name)
{
#define VALUE(n, value)                                                                                                          \
    if (strcmp(name, n) == 0) {                                                                                                  \
        return value;                                                                                                            \
    }
    VALUE("none", none())
    VALUE("true", boolean(true))
    VALUE("false", boolean(false))
    VALUE("ints", ints())
    VALUE("int_2_2039", power(2039, false))
    VALUE("int_2_2040", power(2040, false))
    VALUE("floats", TUPLE(real(0.1), real((double)INFINITY), real(-0.0)))
    VALUE("complex", complex_number())
    VALUE("text", text("模型-λ"))
    VALUE("empty_text", text(""))
    VALUE("bytes", bytes(DCP_KIND_BYTES, "\0\x80\xff", 3))
    VALUE("empty_bytes", bytes(DCP_KIND_BYTES, "", 0))
    VALUE("bytearray", bytes(DCP_KIND_BYTEARRAY, "a\xff", 2))
    VALUE("empty_bytearray", bytes(DCP_KIND_BYTEARRAY, "", 0))
    VALUE("two_bytes", LIST(bytes(DCP_KIND_BYTES, "a", 1), bytes(DCP_KIND_BYTES, "b", 1)))
    VALUE("empty_list", empty(DCP_KIND_LIST))
    VALUE("list_1", LIST(integer(1)))
    VALUE("list_2", LIST(integer(1), integer(2)))
    VALUE("list_1000", sevens(1000))
    VALUE("list_1001", sevens(1001))
    VALUE("list_2002", sevens(2002))
    VALUE("empty_tuple", empty(DCP_KIND_TUPLE))
    VALUE("tuple_1", TUPLE(integer(1)))
    VALUE("tuple_3", TUPLE(integer(1), integer(2), integer(3)))
    VALUE("tuple_4", TUPLE(integer(1), integer(2), integer(3), integer(4)))
    VALUE("empty_dict", dict(false))
    VALUE("dict_1", set(dict(false), "a", integer(1)))
    VALUE("dict_2", set_int(set(dict(false), "a", integer(1)), -7, text("b")))
    VALUE("dict_1001", numbered(false, 1001))
    VALUE("ordered_empty", dict(true))
    VALUE("ordered_1", set(dict(true), "a", integer(1)))
    VALUE("ordered_1000", numbered(true, 1000))
    VALUE("ordered_1001", numbered(true, 1001))
    VALUE("ordered_1002", numbered(true, 1002))
    VALUE("set_1", SEQ(SET, integer(1)))
    VALUE("set_empty", empty(DCP_KIND_SET))
    VALUE("frozenset_1", SEQ(FROZENSET, text("x")))
    VALUE("dtype", dtype(DCP_FLOAT32))
    VALUE("two_dtypes", LIST(dtype(DCP_FLOAT32), dtype(DCP_BFLOAT16), dtype(DCP_FLOAT32)))
    VALUE("device", device("cpu"))
    VALUE("device_index", device("cuda:3"))
    VALUE("size", SEQ(SIZE, integer(2)))
    VALUE("size_empty", empty(DCP_KIND_SIZE))
    VALUE("size_4", size4())
    VALUE("shared_list", shared_lists())
    VALUE("texts", texts())
    VALUE("many_memos", many_memos())
    VALUE("tensors", TUPLE(tensor(DCP_FLOAT32, 2, 2, 3, memory), tensor(DCP_FLOAT8_E4M3FN, 1, 4, 0, memory),
                           tensor(DCP_FLOAT32, 2, 0, 8, NULL)))
    VALUE("shared_tensor", shared_tensor())
    VALUE("two_views", LIST(tensor(DCP_FLOAT32, 2, 3, 4, memory), tensor(DCP_FLOAT32, 2, 3, 4, memory)))
    VALUE("twelve_tensors", twelve_tensors())
    VALUE("datetime",
          opaque(DCP__OPAQUE_REDUCE, "datetime", "timedelta", TUPLE(integer(1), integer(2), integer(3)), NULL, NULL, NULL))
    VALUE("defaultdict", defaultdict())
    VALUE("deque", opaque(DCP__OPAQUE_REDUCE, "collections", "deque", TUPLE(empty(DCP_KIND_TUPLE), integer(5)),
                          LIST(integer(1), integer(2)), NULL, NULL))
#undef VALUE
    fail_msg("no value %s", name);
    return NULL;
}

static uint8_t nibble(char c)
{
    return (uint8_t)(c <= '9' ? c - '0' : c - 'a' + 10);
}

static size_t unhex(const char *hex, uint8_t *out)
{
    size_t n = strlen(hex) / 2;
    for (size_t i = 0; i < n; i++) {
        out[i] = (uint8_t)(nibble(hex[2 * i]) << 4 | nibble(hex[2 * i + 1]));
    }
    return n;
}

static void pickle_writer__values_are_written_as_pytorch_does(void **state)
{
    (void)state;
    static char name[64], hex[1 << 16];
    static uint8_t expected[1 << 15];
    size_t count = 0;
    FILE *f = fopen(DCP_TEST_DIR "/data/pickle_fixtures.txt", "r");
    assert_non_null(f);
    while (fscanf(f, "%63s %65535s", name, hex) == 2) {
        dcp_value *v = fixture(name);
        dcp__write_storage *storages;
        dcp__buf out;
        size_t n, len = unhex(hex, expected);
        dcp__buf_init(&out, ctx);
        OK(dcp__pickle_value(&out, v, &storages, &n, NULL));
        if (out.len != len || memcmp(out.data, expected, len) != 0) {
            fail_msg("%s: %zu bytes, not the %zu expected", name, out.len, len);
        }
        dcp__free(ctx, storages);
        dcp__buf_reset(&out);
        dcp_value_free(v);
        count++;
    }
    fclose(f);
    assert_int_equal(count, 54);
}

/* Writes v and compares with `expected`, without PROTO and STOP. */
static void check_body(dcp_value *v, const void *expected, size_t len)
{
    dcp__write_storage *storages;
    dcp__buf out;
    size_t n;
    dcp__buf_init(&out, ctx);
    OK(dcp__pickle_value(&out, v, &storages, &n, NULL));
    assert_int_equal(out.len, len + 3);
    assert_memory_equal(out.data + 2, expected, len);
    dcp__free(ctx, storages);
    dcp__buf_reset(&out);
    dcp_value_free(v);
}

#define CHECK_BODY(v, literal) check_body(v, literal, sizeof literal - 1)

static void pickle_writer__opaque_values_are_written_from_their_parts(void **state)
{
    (void)state;
    CHECK_BODY(opaque(DCP__OPAQUE_GLOBAL, "m", "C", NULL, NULL, NULL, NULL), "cm\nC\nq\0");
    CHECK_BODY(opaque(DCP__OPAQUE_NEWOBJ, "m", "C", NULL, NULL, NULL, set(dict(false), "a", integer(1))),
               "cm\nC\nq\0)\x81q\1}q\2X\1\0\0\0aq\3K\1sb");
    /* as Python reaches a class inside a class */
    CHECK_BODY(opaque(DCP__OPAQUE_GLOBAL, "m", "A.B", NULL, NULL, NULL, NULL),
               "c__builtin__\ngetattr\nq\0cm\nA\nq\1X\1\0\0\0Bq\2\x86q\3R");
    dcp_value *kwargs = set(dict(false), "k", none());
    dcp__opaque parts = {.form = DCP__OPAQUE_NEWOBJ_EX, .module = {"m", 1}, .name = {"C", 1}, .kwargs = kwargs};
    dcp_value *v;
    parts.args = empty(DCP_KIND_TUPLE);
    OK(dcp__opaque_create(ctx, &parts, &v, NULL));
    CHECK_BODY(v, "cm\nC\nq\0)}q\1X\1\0\0\0kq\2Ns\x92q\3");
    dcp_value *method = opaque(DCP__OPAQUE_REDUCE, "m", "maker", NULL, NULL, NULL, NULL);
    parts = (dcp__opaque){.form = DCP__OPAQUE_REDUCE, .callable = method, .args = TUPLE(integer(1))};
    OK(dcp__opaque_create(ctx, &parts, &v, NULL));
    CHECK_BODY(v, "cm\nmaker\nq\0)Rq\1K\1\x85q\2Rq\3");
}

/* A text and a global of the same words are two things. */
static void pickle_writer__names_do_not_mix_with_texts(void **state)
{
    (void)state;
    CHECK_BODY(LIST(text("m"), opaque(DCP__OPAQUE_GLOBAL, "m", "", NULL, NULL, NULL, NULL), text("m")),
               "]q\0(X\1\0\0\0mq\1cm\n\nq\2h\1e");
}

static dcp_status try_value(dcp_value *v)
{
    dcp__write_storage *storages = NULL;
    size_t n = 99;
    dcp__buf out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    dcp__buf_put_byte(&out, 'x');
    dcp_status status = dcp__pickle_value(&out, v, &storages, &n, &err);
    assert_int_equal(err.code, status);
    if (status != DCP_OK) {
        assert_int_equal(out.len, 1);
        assert_int_equal(n, 99);
    }
    dcp__free(ctx, storages);
    dcp__buf_reset(&out);
    dcp_value_free(v);
    return status;
}

static dcp_value *nested(size_t depth)
{
    dcp_value *v = empty(DCP_KIND_LIST);
    for (size_t i = 1; i < depth; i++) {
        v = LIST(v);
    }
    return v;
}

static void pickle_writer__what_cannot_be_written_is_refused(void **state)
{
    (void)state;
    int64_t extents[] = {4};
    dcp_value *sharded;
    assert_int_equal(try_value(nested(256)), DCP_OK);
    assert_int_equal(try_value(nested(257)), DCP_LIMIT);
    OK(dcp_sharded_create(ctx, DCP_FLOAT32, 1, extents, 0, NULL, NULL, &sharded, NULL));
    assert_int_equal(try_value(LIST(tensor(DCP_FLOAT32, 1, 2, 0, memory), sharded)), DCP_ARG);
    assert_int_equal(try_value(opaque(DCP__OPAQUE_GLOBAL, "m", "a\nb", NULL, NULL, NULL, NULL)), DCP_UNSUPPORTED);
    assert_int_equal(try_value(opaque(DCP__OPAQUE_GLOBAL, "m\n", "a", NULL, NULL, NULL, NULL)), DCP_UNSUPPORTED);
    dcp_value *id =
        TUPLE(text("storage"), opaque(DCP__OPAQUE_GLOBAL, "torch", "QInt8Storage", NULL, NULL, NULL, NULL), text("0"));
    dcp_value *quantised = TUPLE(opaque(DCP__OPAQUE_PERSID, "", "", id, NULL, NULL, NULL));
    assert_int_equal(try_value(opaque(DCP__OPAQUE_REDUCE, "torch._utils", "_rebuild_qtensor", quantised, NULL, NULL, NULL)),
                     DCP_UNSUPPORTED);
    char dots[1024];
    memset(dots, '.', sizeof dots - 1);
    for (size_t i = 0; i < sizeof dots - 1; i += 2) {
        dots[i] = 'a';
    }
    dots[sizeof dots - 1] = 0;
    dots[sizeof dots - 2] = 'a';
    assert_int_equal(try_value(opaque(DCP__OPAQUE_GLOBAL, "m", dots, NULL, NULL, NULL, NULL)), DCP_LIMIT);
}

static void pickle_writer__storages_are_the_distinct_memory_of_tensors(void **state)
{
    (void)state;
    int64_t extents[] = {3, 4}, transposed[] = {1, 3};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, memory);
    dcp_value *permuted;
    t.strides = transposed;
    OK(dcp_tensor_create(ctx, &t, &permuted, NULL));
    dcp_value *first = tensor(DCP_FLOAT32, 2, 3, 4, memory), *other = tensor(DCP_INT32, 2, 3, 4, memory);
    dcp_value *v = LIST(first, tensor(DCP_FLOAT32, 2, 3, 4, memory), permuted, other, tensor(DCP_FLOAT32, 2, 0, 4, NULL),
                        tensor(DCP_FLOAT32, 2, 0, 4, NULL));
    dcp__write_storage *storages;
    size_t n;
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    OK(dcp__pickle_value(&out, v, &storages, &n, NULL));
    assert_int_equal(n, 5);
    assert_ptr_equal(storages[0].tensor, first);
    assert_ptr_equal(storages[1].tensor, permuted);
    assert_ptr_equal(storages[2].tensor, other);
    assert_int_equal(storages[0].bytes, 48);
    assert_int_equal(storages[3].bytes, 0);
    dcp__free(ctx, storages);
    dcp__buf_reset(&out);
    dcp_value_free(v);
}

static dcp_status write_in(dcp_context *failing, void *user, dcp_error *err)
{
    dcp__write_storage *storages;
    size_t n;
    dcp__buf out;
    dcp__buf_init(&out, failing);
    dcp_status status = dcp__pickle_value(&out, user, &storages, &n, err);
    if (status == DCP_OK) {
        dcp__free(failing, storages);
    }
    dcp__buf_reset(&out);
    return status;
}

static void pickle_writer__survives_failing_allocations(void **state)
{
    (void)state;
    dcp_value *v = TUPLE(twelve_tensors(), many_memos(), bytes(DCP_KIND_BYTES, "\xff", 1), size4(), defaultdict());
    assert_true(failing_alloc_walk(write_in, v) > 8);
    dcp_value_free(v);
}

static dcp_status write_tensor_in(dcp_context *failing, void *user, dcp_error *err)
{
    int64_t extents[] = {3, 4};
    dcp__buf out;
    (void)user;
    dcp__buf_init(&out, failing);
    dcp_status status = dcp__pickle_tensor(&out, DCP_FLOAT32, 2, extents, err);
    dcp__buf_reset(&out);
    return status;
}

static void pickle_writer__tensors_survive_failing_allocations(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(write_tensor_in, NULL) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pickle_writer__golden_tensor_records_are_rewritten_byte_for_byte),
        cmocka_unit_test(pickle_writer__bad_tensors_are_refused),
        cmocka_unit_test(pickle_writer__values_are_written_as_pytorch_does),
        cmocka_unit_test(pickle_writer__opaque_values_are_written_from_their_parts),
        cmocka_unit_test(pickle_writer__names_do_not_mix_with_texts),
        cmocka_unit_test(pickle_writer__what_cannot_be_written_is_refused),
        cmocka_unit_test(pickle_writer__storages_are_the_distinct_memory_of_tensors),
        cmocka_unit_test(pickle_writer__survives_failing_allocations),
        cmocka_unit_test(pickle_writer__tensors_survive_failing_allocations),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
