/* References, scalars, texts, sequences, dicts, opaque values, dtypes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "state/value.h"
#include "support/failing_alloc.h"

static dcp_value *new_int(int64_t i)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_int_create(NULL, i, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *new_list(void)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_list_create(NULL, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *new_dict(void)
{
    dcp_value *v = NULL;
    assert_int_equal(dcp_dict_create(NULL, &v, NULL), DCP_OK);
    return v;
}

/* ---- dtypes: formats.md 3.9 ---- */

static void dtype__table_has_published_sizes_and_releases(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        size_t bytes;
        int release;
    } published[] = {
        {"float32", 4, 201},
        {"float64", 8, 201},
        {"float16", 2, 201},
        {"bfloat16", 2, 201},
        {"int8", 1, 201},
        {"uint8", 1, 201},
        {"int16", 2, 201},
        {"int32", 4, 201},
        {"int64", 8, 201},
        {"bool", 1, 201},
        {"complex64", 8, 201},
        {"complex128", 16, 201},
        {"float8_e4m3fn", 1, 202},
        {"float8_e5m2", 1, 202},
        {"float8_e4m3fnuz", 1, 203},
        {"float8_e5m2fnuz", 1, 203},
        {"complex32", 4, 203},
        {"uint16", 2, 206},
        {"uint32", 4, 206},
        {"uint64", 8, 206},
        {"float8_e8m0fnu", 1, 207},
        {"float4_e2m1fn_x2", 1, 210}, /* known since 2.8, which cannot copy it */
        {"bcomplex32", 4, 214},
    };
    size_t n = sizeof published / sizeof published[0];
    assert_int_equal(n, DCP_DTYPE_COUNT - 1);
    for (size_t i = 0; i < n; i++) {
        dcp_dtype d = dcp_dtype_from_name(dcp_str_of(published[i].name));
        assert_int_not_equal(d, DCP_DTYPE_NONE);
        assert_string_equal(dcp_dtype_name(d), published[i].name);
        assert_int_equal(dcp_dtype_bytes(d), published[i].bytes);
        assert_int_equal(dcp_dtype_release(d), published[i].release);
    }
}

static void dtype__unknown_names_and_numbers_are_neutral(void **state)
{
    (void)state;
    const char *const unknown[] = {"", "half", "float", "float3", "float322", "FLOAT32", "?"};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        assert_int_equal(dcp_dtype_from_name(dcp_str_of(unknown[i])), DCP_DTYPE_NONE);
    }
    const int outside[] = {DCP_DTYPE_NONE, DCP_DTYPE_COUNT, -1, 1000000};
    for (size_t i = 0; i < sizeof outside / sizeof outside[0]; i++) {
        assert_string_equal(dcp_dtype_name((dcp_dtype)outside[i]), "?");
        assert_int_equal(dcp_dtype_bytes((dcp_dtype)outside[i]), 0);
        assert_int_equal(dcp_dtype_release((dcp_dtype)outside[i]), 0);
    }
}

/* ---- scalars ---- */

static void scalars__read_back(void **state)
{
    (void)state;
    dcp_value *v;
    int64_t i = 0;
    assert_int_equal(dcp_none_create(NULL, &v, NULL), DCP_OK);
    assert_int_equal(dcp_value_kind(v), DCP_KIND_NONE);
    dcp_value_free(v);
    assert_int_equal(dcp_bool_create(NULL, true, &v, NULL), DCP_OK);
    assert_true(dcp_value_bool(v));
    assert_false(dcp_value_int(v, &i)); /* a bool is no int here */
    dcp_value_free(v);
    v = new_int(INT64_MIN);
    assert_true(dcp_value_int(v, &i));
    assert_true(i == INT64_MIN);
    assert_false(dcp_value_bool(v));
    dcp_value_free(v);
    assert_int_equal(dcp_float_create(NULL, 0.1, &v, NULL), DCP_OK);
    assert_true(dcp_value_float(v) == 0.1);
    assert_true(dcp_value_imag(v) == 0);
    dcp_value_free(v);
    assert_int_equal(dcp_complex_create(NULL, 1.5, -2.5, &v, NULL), DCP_OK);
    assert_true(dcp_value_float(v) == 1.5 && dcp_value_imag(v) == -2.5);
    dcp_value_free(v);
    assert_int_equal(dcp_dtype_create(NULL, DCP_BFLOAT16, &v, NULL), DCP_OK);
    assert_int_equal(dcp_value_dtype(v), DCP_BFLOAT16);
    dcp_value_free(v);
    assert_int_equal(dcp_dtype_create(NULL, DCP_DTYPE_COUNT, &v, NULL), DCP_ARG);
}

static void readers__wrong_kind_yields_the_neutral_value(void **state)
{
    (void)state;
    dcp_value *list = new_list();
    int64_t i = 77;
    const dcp_value *const cases[] = {list, NULL};
    for (size_t c = 0; c < 2; c++) {
        const dcp_value *v = cases[c];
        assert_false(dcp_value_bool(v));
        assert_false(dcp_value_int(v, &i));
        assert_int_equal(i, 77);
        assert_null(dcp_value_bigint(v).ptr);
        assert_true(isnan(dcp_value_float(v)));
        assert_true(dcp_value_imag(v) == 0);
        assert_null(dcp_value_str(v).ptr);
        assert_int_equal(dcp_value_dtype(v), DCP_DTYPE_NONE);
        assert_int_equal(dcp_value_count(v), 0);
        assert_null(dcp_value_at(v, 0));
        assert_null(dcp_dict_key(v, 0).string.ptr);
        assert_null(dcp_dict_get_str(v, "a"));
        assert_null(dcp_value_tensor(v));
        assert_null(dcp_opaque_class(v).ptr);
        assert_int_equal(dcp_opaque_bytes(v), 0);
        assert_false(dcp_sharded_chunk(v, 0, NULL, NULL));
        assert_false(dcp_sharded_shape(v, NULL, NULL));
        assert_null(dcp__value_lazy(v));
        assert_null(dcp__value_opaque(v));
    }
    dcp_value_free(list);
    dcp_value_free(NULL);
}

/* Encodings by pickle's rule for LONG1: two's complement, little-endian, as short as possible. */
static void integers__have_minimal_bytes(void **state)
{
    (void)state;
    static const struct {
        int64_t value;
        size_t len;
        uint8_t bytes[8];
    } cases[] = {
        {0, 0, {0}},
        {1, 1, {1}},
        {-1, 1, {0xff}},
        {127, 1, {0x7f}},
        {128, 2, {0x80, 0}},
        {-128, 1, {0x80}},
        {-129, 2, {0x7f, 0xff}},
        {255, 2, {0xff, 0}},
        {INT64_MAX, 8, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}},
        {INT64_MIN, 8, {0, 0, 0, 0, 0, 0, 0, 0x80}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dcp_value *v = new_int(cases[i].value), *again = NULL;
        dcp_str b = dcp_value_bigint(v);
        assert_int_equal(b.len, cases[i].len);
        assert_true(b.len == 0 ? b.ptr == NULL : memcmp(b.ptr, cases[i].bytes, b.len) == 0);
        assert_int_equal(dcp_bigint_create(NULL, cases[i].bytes, cases[i].len, &again, NULL), DCP_OK);
        int64_t back;
        assert_true(dcp_value_int(again, &back));
        assert_true(back == cases[i].value);
        dcp_value_free(v);
        dcp_value_free(again);
    }
}

static void bigint__surplus_sign_bytes_are_dropped(void **state)
{
    (void)state;
    const uint8_t small[12] = {5}, minus_one[9] = {255, 255, 255, 255, 255, 255, 255, 255, 255};
    const uint8_t two_64[12] = {0, 0, 0, 0, 0, 0, 0, 0, 1}; /* 2^64 with three bytes too many */
    dcp_value *v;
    int64_t i;
    assert_int_equal(dcp_bigint_create(NULL, small, sizeof small, &v, NULL), DCP_OK);
    assert_true(dcp_value_int(v, &i) && i == 5);
    dcp_value_free(v);
    assert_int_equal(dcp_bigint_create(NULL, minus_one, sizeof minus_one, &v, NULL), DCP_OK);
    assert_true(dcp_value_int(v, &i) && i == -1);
    dcp_value_free(v);
    assert_int_equal(dcp_bigint_create(NULL, two_64, sizeof two_64, &v, NULL), DCP_OK);
    assert_false(dcp_value_int(v, &i));
    assert_int_equal(dcp_value_kind(v), DCP_KIND_INT);
    assert_int_equal(dcp_value_bigint(v).len, 9);
    dcp_value_free(v);
    assert_int_equal(dcp_bigint_create(NULL, NULL, 0, &v, NULL), DCP_OK);
    assert_true(dcp_value_int(v, &i) && i == 0);
    dcp_value_free(v);
    assert_int_equal(dcp_bigint_create(NULL, NULL, 1, &v, NULL), DCP_ARG);
}

/* ---- texts ---- */

static void string__utf8_and_lone_surrogates_are_accepted(void **state)
{
    (void)state;
    static const dcp_str good[] = {
        {"", 0},
        {NULL, 0},
        {"a\0b", 3},
        {"0123456789abcdef", 16},
        {"\xc2\x80", 2},
        {"\xe0\xa0\x80", 3},
        {"\xed\xb2\x80", 3} /* U+DC80 */,
        {"\xed\xa0\x80\xed\xb0\x80", 6},
        {"\xf0\x90\x80\x80", 4},
        {"\xf4\x8f\xbf\xbf", 4},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        dcp_value *v = NULL;
        assert_int_equal(dcp_string_create(NULL, good[i], &v, NULL), DCP_OK);
        dcp_str s = dcp_value_str(v);
        assert_int_equal(s.len, good[i].len);
        assert_non_null(s.ptr);
        assert_int_equal(s.ptr[s.len], 0);
        assert_true(s.len == 0 || memcmp(s.ptr, good[i].ptr, s.len) == 0);
        dcp_value_free(v);
    }
}

static void string__malformed_utf8_is_refused(void **state)
{
    (void)state;
    static const dcp_str bad[] = {
        {"\x80", 1},
        {"\xc0\x80", 2},
        {"\xc1\xbf", 2},
        {"\xc2", 1},
        {"\xc2\x41", 2},
        {"\xe0\x9f\xbf", 3},
        {"\xe1\x80", 2},
        {"\xf0\x8f\xbf\xbf", 4},
        {"\xf4\x90\x80\x80", 4},
        {"\xf5\x80\x80\x80", 4},
        {"\xff", 1},
        {"01234567\xbf", 9},
    };
    dcp_value *dict = new_dict();
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        dcp_value *v = NULL, *one = new_int(1);
        dcp_key key = {.string = bad[i]};
        assert_int_equal(dcp_string_create(NULL, bad[i], &v, NULL), DCP_ARG);
        assert_null(v);
        assert_int_equal(dcp_dict_set(dict, key, one, NULL), DCP_ARG);
        dcp_value_free(one);
    }
    assert_int_equal(dcp_value_count(dict), 0);
    dcp_value_free(dict);
}

static void bytes__hold_anything(void **state)
{
    (void)state;
    dcp_value *v = NULL;
    assert_int_equal(dcp_bytes_create(NULL, DCP_KIND_BYTEARRAY, "\xff\0\x80", 3, &v, NULL), DCP_OK);
    assert_int_equal(dcp_value_kind(v), DCP_KIND_BYTEARRAY);
    assert_memory_equal(dcp_value_str(v).ptr, "\xff\0\x80", 4);
    dcp_value_free(v);
    assert_int_equal(dcp_bytes_create(NULL, DCP_KIND_STR, "", 0, &v, NULL), DCP_ARG);
    assert_int_equal(dcp_bytes_create(NULL, DCP_KIND_BYTES, NULL, 1, &v, NULL), DCP_ARG);
}

/* ---- sequences ---- */

static void seq__keeps_order_and_refuses_what_it_cannot_hold(void **state)
{
    (void)state;
    dcp_value *list = new_list(), *size = NULL, *text = NULL, *one = new_int(1);
    for (int64_t i = 0; i < 100; i++) {
        assert_int_equal(dcp_list_append(list, new_int(i), NULL), DCP_OK);
    }
    int64_t last = 0;
    assert_int_equal(dcp_value_count(list), 100);
    assert_true(dcp_value_int(dcp_value_at(list, 99), &last) && last == 99);
    assert_null(dcp_value_at(list, 100));
    assert_int_equal(dcp_list_append(list, list, NULL), DCP_ARG);
    assert_int_equal(dcp_list_append(list, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_list_append(one, list, NULL), DCP_ARG);
    assert_int_equal(dcp_seq_create(NULL, DCP_KIND_SIZE, &size, NULL), DCP_OK);
    assert_int_equal(dcp_string_create(NULL, dcp_str_of("x"), &text, NULL), DCP_OK);
    assert_int_equal(dcp_list_append(size, text, NULL), DCP_ARG);
    assert_int_equal(dcp_list_append(size, one, NULL), DCP_OK);
    assert_int_equal(dcp_seq_create(NULL, DCP_KIND_DICT, &list, NULL), DCP_ARG);
    dcp_value_free(text);
    dcp_value_free(size);
    dcp_value_free(list);
}

/* ---- dicts ---- */

static void dict__keys_of_two_kinds_differ_and_keep_their_order(void **state)
{
    (void)state;
    dcp_value *d = new_dict();
    assert_int_equal(dcp_dict_set_string(d, "1", "text", NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(d, dcp_key_int(1), new_int(10), NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_bool(d, "", true, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_float(d, "f", 0.5, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_int(d, "1", 11, NULL), DCP_OK); /* replaces, keeps its place */
    assert_int_equal(dcp_value_count(d), 4);
    int64_t i = 0;
    assert_true(dcp_value_int(dcp_dict_get_str(d, "1"), &i) && i == 11);
    assert_true(dcp_value_int(dcp_dict_get(d, dcp_key_int(1)), &i) && i == 10);
    assert_true(dcp_value_at(d, 0) == dcp_dict_get_str(d, "1"));
    assert_string_equal(dcp_dict_key(d, 0).string.ptr, "1");
    assert_true(dcp_dict_key(d, 1).is_int && dcp_dict_key(d, 1).integer == 1);
    assert_true(dcp_value_bool(dcp_dict_get_str(d, "")));
    assert_null(dcp_dict_get_str(d, "absent"));
    assert_null(dcp_dict_get(d, dcp_key_int(2)));
    assert_null(dcp_dict_key(d, 4).string.ptr);
    assert_int_equal(dcp_dict_set_int(NULL, "a", 1, NULL), DCP_ARG);
    assert_int_equal(dcp_dict_set_int(d, NULL, 1, NULL), DCP_ARG);
    assert_int_equal(dcp_dict_set_string(d, "a", NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_dict_set(d, dcp_key_int(3), d, NULL), DCP_ARG);
    dcp_value_free(d);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void dict__many_keys_are_found(void **state)
{
    (void)state;
    enum { N = 100000 };
    dcp_value *d = new_dict();
    char name[32];
    double start = seconds();
    for (int64_t i = 0; i < N; i++) {
        snprintf(name, sizeof name, "layer.%lld", (long long)i);
        assert_int_equal(dcp_dict_set_int(d, name, i, NULL), DCP_OK);
        assert_int_equal(dcp_dict_set(d, dcp_key_int(i << 40), new_int(-i), NULL), DCP_OK);
    }
    print_message("%.0f ns for each entry, made and set\n", (seconds() - start) / (2.0 * N) * 1e9);
    assert_int_equal(dcp_value_count(d), 2 * N);
    for (int64_t i = 0; i < N; i++) {
        int64_t got = 0;
        snprintf(name, sizeof name, "layer.%lld", (long long)i);
        assert_true(dcp_value_int(dcp_dict_get_str(d, name), &got) && got == i);
        assert_true(dcp_value_int(dcp_dict_get(d, dcp_key_int(i << 40)), &got) && got == -i);
        assert_string_equal(dcp_dict_key(d, (size_t)(2 * i)).string.ptr, name);
    }
    assert_null(dcp_dict_get_str(d, "layer.100000"));
    dcp_value_free(d);
}

/* ---- references ---- */

static void free__very_deep_trees_take_no_stack(void **state)
{
    (void)state;
    dcp_value *top = new_int(0);
    for (int i = 0; i < 3000000; i++) {
        dcp_value *outer = i % 2 ? new_list() : new_dict();
        dcp_status status = i % 2 ? dcp_list_append(outer, top, NULL) : dcp_dict_set(outer, dcp_key_int(0), top, NULL);
        assert_int_equal(status, DCP_OK);
        top = outer;
    }
    dcp_value_free(top);
}

static void free__shared_values_live_until_the_last_reference(void **state)
{
    (void)state;
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    dcp_value *shared, *list, *outer;
    assert_int_equal(dcp_list_create(ctx, &shared, NULL), DCP_OK);
    assert_int_equal(dcp_list_create(ctx, &list, NULL), DCP_OK);
    assert_int_equal(dcp_dict_create(ctx, &outer, NULL), DCP_OK);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(dcp_list_append(list, dcp_value_retain(shared), NULL), DCP_OK);
    }
    assert_int_equal(dcp_dict_set(outer, dcp_key_str("a"), dcp_value_retain(list), NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(outer, dcp_key_str("b"), list, NULL), DCP_OK);
    dcp_value_free(outer);
    assert_int_equal(dcp_value_kind(shared), DCP_KIND_LIST);
    assert_int_equal(fa.live, 2); /* the context, and shared without items */
    dcp_value_free(shared);
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
}

static void *retain_and_free(void *arg)
{
    dcp_value *v = arg;
    for (int i = 0; i < 100000; i++) {
        dcp_value_free(dcp_value_retain(v));
    }
    dcp_value_free(v);
    return NULL;
}

static void free__counts_are_atomic(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    dcp_value *v, *one;
    assert_int_equal(dcp_list_create(ctx, &v, NULL), DCP_OK);
    assert_int_equal(dcp_int_create(ctx, 1, &one, NULL), DCP_OK);
    assert_int_equal(dcp_list_append(v, one, NULL), DCP_OK);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, retain_and_free, dcp_value_retain(v)), 0);
    }
    dcp_value_free(v);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
}

/* ---- opaque ---- */

static void opaque__keeps_names_parts_and_size(void **state)
{
    (void)state;
    char module[] = "pkg.mod", name[] = "Class";
    dcp_value *args = NULL, *v = NULL;
    assert_int_equal(dcp_seq_create(NULL, DCP_KIND_TUPLE, &args, NULL), DCP_OK);
    dcp__opaque parts = {
        .form = DCP__OPAQUE_NEWOBJ, .module = dcp_str_of(module), .name = dcp_str_of(name), .bytes = 42, .args = args};
    assert_int_equal(dcp__opaque_create(NULL, &parts, &v, NULL), DCP_OK);
    memset(module, 'x', 7);
    memset(name, 'x', 5);
    assert_string_equal(dcp_opaque_class(v).ptr, "pkg.mod.Class");
    assert_int_equal(dcp_opaque_class(v).len, 13);
    assert_int_equal(dcp_opaque_bytes(v), 42);
    const dcp__opaque *o = dcp__value_opaque(v);
    assert_string_equal(o->module.ptr, "pkg.mod");
    assert_string_equal(o->name.ptr, "Class");
    assert_ptr_equal(o->args, args);
    dcp_value_free(v);
}

/* ---- allocation failure ---- */

static dcp_status make_leaves(dcp_context *ctx, dcp_value *list, dcp_error *err)
{
    dcp_value *v[8];
    size_t n = 0;
    const uint8_t big[10] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    dcp_status s = dcp_none_create(ctx, &v[n], err);
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_bool_create(ctx, true, &v[n], err) : s;
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_complex_create(ctx, 1, 2, &v[n], err) : s;
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_bigint_create(ctx, big, sizeof big, &v[n], err) : s;
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_string_create(ctx, dcp_str_of("text"), &v[n], err) : s;
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_bytes_create(ctx, DCP_KIND_BYTES, "b", 1, &v[n], err) : s;
    n += s == DCP_OK;
    s = s == DCP_OK ? dcp_dtype_create(ctx, DCP_INT8, &v[n], err) : s;
    n += s == DCP_OK;
    for (size_t i = 0; i < n; i++) {
        dcp_status appended = s == DCP_OK ? dcp_list_append(list, v[i], err) : s;
        if (appended != DCP_OK) {
            dcp_value_free(v[i]);
            s = appended;
        }
    }
    return s;
}

static dcp_status make_tree(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp_value *root = NULL, *list = NULL, *opaque = NULL;
    dcp_status s = dcp_dict_create(ctx, &root, err);
    char key[16];
    for (int i = 0; s == DCP_OK && i < 40; i++) {
        snprintf(key, sizeof key, "k%d", i);
        s = dcp_dict_set_int(root, key, i, err);
    }
    s = s == DCP_OK ? dcp_list_create(ctx, &list, err) : s;
    s = s == DCP_OK ? make_leaves(ctx, list, err) : s;
    if (s == DCP_OK) {
        dcp__opaque parts = {.form = DCP__OPAQUE_REDUCE, .module = dcp_str_of("m"), .name = dcp_str_of("n"), .args = list};
        s = dcp__opaque_create(ctx, &parts, &opaque, err);
        list = s == DCP_OK ? NULL : list;
    }
    if (s == DCP_OK) {
        s = dcp_dict_set(root, dcp_key_str("opaque"), opaque, err);
        opaque = s == DCP_OK ? NULL : opaque;
    }
    dcp_value_free(opaque);
    dcp_value_free(list);
    dcp_value_free(root);
    return s;
}

static void makers__out_of_memory_leaks_nothing(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(make_tree, NULL) > 90);
}

static void makers__leaf_creation_is_cheap(void **state)
{
    (void)state;
    enum { N = 1000000 };
    dcp_value *list = new_list();
    double start = seconds();
    for (int i = 0; i < N; i++) {
        dcp_value *v;
        dcp_int_create(NULL, i, &v, NULL);
        dcp_list_append(list, v, NULL);
    }
    print_message("%.0f ns for each integer in a list\n", (seconds() - start) / N * 1e9);
    assert_int_equal(dcp_value_count(list), N);
    dcp_value_free(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtype__table_has_published_sizes_and_releases),
        cmocka_unit_test(dtype__unknown_names_and_numbers_are_neutral),
        cmocka_unit_test(scalars__read_back),
        cmocka_unit_test(readers__wrong_kind_yields_the_neutral_value),
        cmocka_unit_test(integers__have_minimal_bytes),
        cmocka_unit_test(bigint__surplus_sign_bytes_are_dropped),
        cmocka_unit_test(string__utf8_and_lone_surrogates_are_accepted),
        cmocka_unit_test(string__malformed_utf8_is_refused),
        cmocka_unit_test(bytes__hold_anything),
        cmocka_unit_test(seq__keeps_order_and_refuses_what_it_cannot_hold),
        cmocka_unit_test(dict__keys_of_two_kinds_differ_and_keep_their_order),
        cmocka_unit_test(dict__many_keys_are_found),
        cmocka_unit_test(free__very_deep_trees_take_no_stack),
        cmocka_unit_test(free__shared_values_live_until_the_last_reference),
        cmocka_unit_test(free__counts_are_atomic),
        cmocka_unit_test(opaque__keeps_names_parts_and_size),
        cmocka_unit_test(makers__out_of_memory_leaks_nothing),
        cmocka_unit_test(makers__leaf_creation_is_cheap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
