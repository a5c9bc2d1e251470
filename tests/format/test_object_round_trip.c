/* What the writers write, the readers read back. */
#include <time.h>

#include "base/hash.h"
#include "format/archive_writer.h"
#include "format/pickle_writer.h"
#include "format/record.h"
#include "state/strided.h"
#include "state/value.h"
#include "support/failing_alloc.h"
#include "support/golden_records.h"

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

static dcp__buf pickle(const dcp_value *v, dcp__write_storage **storages, size_t *n)
{
    dcp__buf out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    if (dcp__pickle_value(&out, v, storages, n, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return out;
}

static dcp__object unpickle(const void *bytes, size_t len)
{
    dcp__object object;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = dcp__source_memory(bytes, len);
    if (dcp__object_read(ctx, &src, 0, &object, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(object.end, len);
    return object;
}

/* ---- golden records ---- */

static bool is_written_as_it_was(const dcp_value *v)
{
    const dcp_tensor *t = dcp_value_tensor(v);
    int64_t strides[DCP_MAX_NDIM];
    if (!t) {
        return true;
    }
    dcp__row_major(t->ndim, t->extents, strides);
    return !t->strides || memcmp(t->strides, strides, (size_t)t->ndim * sizeof *strides) == 0;
}

static void rewrite(const golden_archive *a, void *user)
{
    size_t *n_compared = user, n;
    dcp__write_storage *storages;
    dcp__object object = unpickle(a->pickle, a->pickle_len);
    dcp__buf out = pickle(object.value, &storages, &n);
    assert_int_equal(n, a->n);
    if (is_written_as_it_was(object.value)) {
        assert_int_equal(out.len, a->pickle_len);
        assert_memory_equal(out.data, a->pickle, out.len);
        ++*n_compared;
    }
    dcp__free(ctx, storages);
    dcp__buf_reset(&out);
    dcp__object_reset(&object);
}

static void round_trip__golden_records_are_decoded_and_written_byte_for_byte(void **state)
{
    (void)state;
    size_t n_compared = 0;
    assert_int_equal(golden_each(DCP_TEST_DIR "/golden/*/*/ckpt/*.distcp", rewrite, &n_compared), 811);
    assert_int_equal(n_compared, 811 - 36 - 15);
}

/* ---- torch.save files: views become tensors of their own, everything else stays ---- */

static uint8_t *dense(const dcp__archive *a, const uint8_t *file, const dcp_value *v, uint64_t *bytes)
{
    dcp__payload p;
    int64_t strides[DCP_MAX_NDIM], elems;
    size_t each = dcp_dtype_bytes(dcp_value_dtype(v));
    assert_int_equal(dcp__archive_payload(a, v, &p, NULL), DCP_OK);
    assert_true(dcp__elems(p.ndim, p.sizes, &elems));
    dcp__row_major(p.ndim, p.sizes, strides);
    uint8_t *out = malloc((size_t)elems * each + 1);
    dcp__copy_strided(out, strides, file + p.offset, p.strides, p.ndim, p.sizes, each);
    *bytes = (uint64_t)elems * each;
    return out;
}

static uint8_t *write_archive(const dcp__archive *a, const uint8_t *file, const char *prefix, size_t *len)
{
    dcp__write_storage *storages;
    size_t n;
    dcp__buf text = pickle(a->object.value, &storages, &n);
    uint64_t sizes[GOLDEN_MAX_STORAGES];
    uint32_t crcs[GOLDEN_MAX_STORAGES];
    dcp__archive_opts opts = {prefix, false, 64};
    dcp__archive_layout *l;
    assert_true(n <= GOLDEN_MAX_STORAGES);
    for (size_t i = 0; i < n; i++) {
        sizes[i] = storages[i].bytes;
    }
    assert_int_equal(dcp__archive_layout_create(ctx, &opts, text.data, text.len, sizes, n, &l, NULL), DCP_OK);
    *len = dcp__archive_length(l);
    uint8_t *out = malloc(*len), *p = out;
    for (size_t k = 0; k <= n; k++) {
        dcp__archive_piece(l, k, crcs, p);
        p += dcp__archive_piece_bytes(l, k);
        if (k < n) {
            uint64_t bytes;
            uint8_t *data = dense(a, file, storages[k].tensor, &bytes);
            assert_int_equal(bytes, sizes[k]);
            memcpy(p, data, bytes);
            crcs[k] = dcp__crc32(0, data, bytes);
            p += bytes;
            free(data);
        }
    }
    dcp__archive_layout_free(l);
    dcp__free(ctx, storages);
    dcp__buf_reset(&text);
    return out;
}

static void compare(const dcp__archive *a, const uint8_t *file_a, const dcp_value *va, const dcp__archive *b,
                    const uint8_t *file_b, const dcp_value *vb)
{
    assert_int_equal(dcp_value_kind(va), dcp_value_kind(vb));
    assert_int_equal(dcp_value_count(va), dcp_value_count(vb));
    if (dcp_value_kind(va) == DCP_KIND_TENSOR) {
        uint64_t bytes_a, bytes_b;
        uint8_t *data_a = dense(a, file_a, va, &bytes_a), *data_b = dense(b, file_b, vb, &bytes_b);
        const dcp_tensor *ta = dcp_value_tensor(va), *tb = dcp_value_tensor(vb);
        assert_int_equal(ta->dtype, tb->dtype);
        assert_int_equal(ta->ndim, tb->ndim);
        for (int i = 0; i < ta->ndim; i++) {
            assert_int_equal(ta->extents[i], tb->extents[i]);
        }
        assert_int_equal(bytes_a, bytes_b);
        assert_memory_equal(data_a, data_b, bytes_a);
        free(data_a);
        free(data_b);
    } else if (dcp_value_count(va) == 0) {
        assert_true(dcp_value_equal(va, vb));
    }
    for (size_t i = 0; i < dcp_value_count(va); i++) {
        compare(a, file_a, dcp_value_at(va, i), b, file_b, dcp_value_at(vb, i));
    }
}

static void rewrite_file(const golden_archive *a, void *user)
{
    (void)user;
    dcp__archive read, again;
    size_t len;
    dcp__source src = dcp__source_memory(a->bytes, a->len);
    assert_int_equal(dcp__archive_open(ctx, &src, &read, NULL), DCP_OK);
    uint8_t *file = write_archive(&read, a->bytes, a->prefix, &len);
    src = dcp__source_memory(file, len);
    assert_int_equal(dcp__archive_open(ctx, &src, &again, NULL), DCP_OK);
    compare(&read, a->bytes, read.object.value, &again, file, again.object.value);
    dcp__archive_reset(&again);
    dcp__archive_reset(&read);
    free(file);
}

static void round_trip__golden_torch_save_files_keep_their_values(void **state)
{
    (void)state;
    assert_int_equal(golden_each(DCP_TEST_DIR "/golden/*/torch_save/file.pt", rewrite_file, NULL), 5);
}

/* ---- random values ---- */

static uint64_t seed;

static size_t below(size_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (size_t)((seed >> 11) % n);
}

#define OK(call) assert_int_equal(call, DCP_OK)

static dcp_value *random_scalar(void)
{
    static const char *const words[] = {"", "lr", "模型", "step", "0", "\xed\xa0\x80 lone surrogate", "cpu", "storage"};
    uint8_t bytes[300];
    size_t len = below(20) ? below(20) : below(300);
    dcp_value *v;
    for (size_t i = 0; i < len; i++) {
        bytes[i] = (uint8_t)below(256);
    }
    switch (below(10)) {
    case 0: OK(dcp_none_create(ctx, &v, NULL)); break;
    case 1: OK(dcp_bool_create(ctx, below(2), &v, NULL)); break;
    case 2: OK(dcp_int_create(ctx, (int64_t)(seed >> below(64)), &v, NULL)); break;
    case 3: OK(dcp_bigint_create(ctx, bytes, len, &v, NULL)); break;
    case 4: OK(dcp_float_create(ctx, (double)below(1000) / 7, &v, NULL)); break;
    case 5: OK(dcp_complex_create(ctx, (double)below(9), -1.5, &v, NULL)); break;
    case 6: OK(dcp_bytes_create(ctx, below(2) ? DCP_KIND_BYTES : DCP_KIND_BYTEARRAY, bytes, len, &v, NULL)); break;
    case 7: OK(dcp_dtype_create(ctx, (dcp_dtype)(1 + below(DCP_DTYPE_COUNT - 1)), &v, NULL)); break;
    case 8: OK(dcp_device_name_create(ctx, dcp_str_of(below(2) ? "cuda:12" : "cpu"), &v, NULL)); break;
    default: OK(dcp_string_create(ctx, dcp_str_of(words[below(8)]), &v, NULL)); break;
    }
    return v;
}

static dcp_value *pool[64]; /* values to come again */

static dcp_value *random_value(size_t depth);

static size_t random_count(void)
{
    return below(50) ? below(6) : 990 + below(1020);
}

static dcp_value *random_sequence(dcp_kind kind, size_t depth)
{
    dcp_value *v, *element;
    OK(dcp_seq_create(ctx, kind, &v, NULL));
    for (size_t i = random_count(); i > 0; i--) {
        if (kind == DCP_KIND_LIST || kind == DCP_KIND_TUPLE) {
            element = random_value(i > 10 ? 0 : depth);
        } else { /* elements of sets differ */
            OK(dcp_int_create(ctx, (int64_t)i * 77, &element, NULL));
        }
        OK(dcp_list_append(v, element, NULL));
    }
    return v;
}

static dcp_value *random_dict(size_t depth)
{
    dcp_value *v;
    OK((below(2) ? dcp_dict_create : dcp_ordered_dict_create)(ctx, &v, NULL));
    for (size_t i = random_count(); i > 0; i--) {
        char name[24];
        (void)snprintf(name, sizeof name, "k%zu", i % 700);
        OK(dcp_dict_set(v, below(3) ? dcp_key_str(name) : dcp_key_int((int64_t)i - 3), random_value(i > 10 ? 0 : depth), NULL));
    }
    return v;
}

static dcp_value *random_opaque(size_t depth)
{
    static const dcp__opaque_form forms[] = {DCP__OPAQUE_GLOBAL, DCP__OPAQUE_REDUCE, DCP__OPAQUE_NEWOBJ, DCP__OPAQUE_NEWOBJ_EX};
    dcp__opaque parts = {.form = forms[below(4)], .module = {"some.module", 11}, .name = {"Class", 5}};
    dcp_value *v;
    if (parts.form != DCP__OPAQUE_GLOBAL) {
        parts.args = random_sequence(DCP_KIND_TUPLE, depth);
        parts.state = below(2) ? random_dict(depth) : NULL;
        parts.items = below(2) ? random_sequence(DCP_KIND_LIST, depth) : NULL;
        if (parts.items && dcp_value_count(parts.items) == 0) {
            dcp_value_free(parts.items);
            parts.items = NULL;
        }
    }
    if (parts.form == DCP__OPAQUE_NEWOBJ_EX) {
        OK(dcp_dict_create(ctx, &parts.kwargs, NULL));
    }
    OK(dcp__opaque_create(ctx, &parts, &v, NULL));
    return v;
}

static dcp_value *random_value(size_t depth)
{
    dcp_value **place = &pool[below(64)], *v;
    if (*place && below(4) == 0) {
        return dcp_value_retain(*place);
    }
    switch (depth ? below(10) : 9) {
    case 0:
    case 1: v = random_sequence(DCP_KIND_LIST, depth - 1); break;
    case 2: v = random_sequence(DCP_KIND_TUPLE, depth - 1); break;
    case 3: v = random_sequence(below(2) ? DCP_KIND_SET : DCP_KIND_FROZENSET, 0); break;
    case 4: v = random_sequence(DCP_KIND_SIZE, 0); break;
    case 5:
    case 6: v = random_dict(depth - 1); break;
    case 7: v = random_opaque(depth - 1); break;
    default: v = random_scalar(); break;
    }
    dcp_value_free(*place);
    *place = dcp_value_retain(v);
    return v;
}

static void empty_pool(void)
{
    for (size_t i = 0; i < 64; i++) {
        dcp_value_free(pool[i]);
        pool[i] = NULL;
    }
}

static void round_trip__random_values_come_back_equal(void **state)
{
    (void)state;
    seed = (uint64_t)time(NULL) * 2 + 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int i = 0; i < 300; i++) {
        dcp_value *v = random_value(5);
        dcp__write_storage *storages;
        size_t n;
        dcp__buf text = pickle(v, &storages, &n);
        assert_int_equal(n, 0);
        dcp__object object = unpickle(text.data, text.len);
        assert_true(dcp_value_equal(v, object.value));
        dcp__buf again = pickle(object.value, &storages, &n);
        assert_int_equal(again.len, text.len);
        assert_memory_equal(again.data, text.data, text.len);
        dcp__buf_reset(&again);
        dcp__buf_reset(&text);
        dcp__object_reset(&object);
        dcp_value_free(v);
        empty_pool();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip__golden_records_are_decoded_and_written_byte_for_byte),
        cmocka_unit_test(round_trip__golden_torch_save_files_keep_their_values),
        cmocka_unit_test(round_trip__random_values_come_back_equal),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
