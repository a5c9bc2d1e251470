#include "format/archive_writer.h"

#include "base/hash.h"
#include "format/serialization_id.h"
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

static const dcp__archive_opts defaults = {"archive", false, 64};

static dcp__archive_layout *lay_out(const dcp__archive_opts *opts, const void *pickle, size_t pickle_len,
                                    const uint64_t *storage_bytes, size_t n)
{
    dcp__archive_layout *l;
    assert_int_equal(dcp__archive_layout_create(ctx, opts, pickle, pickle_len, storage_bytes, n, &l, NULL), DCP_OK);
    return l;
}

/* The whole archive, storages copied in. */
static uint8_t *assemble(const dcp__archive_layout *l, const uint8_t *const *storages, const uint64_t *storage_bytes,
                         const uint32_t *crcs, size_t n)
{
    uint8_t *out = malloc(dcp__archive_length(l)), *p = out;
    for (size_t k = 0; k <= n; k++) {
        dcp__archive_piece(l, k, crcs, p);
        p += dcp__archive_piece_bytes(l, k);
        if (k < n) {
            assert_int_equal(p - out, dcp__archive_storage_offset(l, k));
            if (storage_bytes[k]) {
                memcpy(p, storages[k], storage_bytes[k]);
            }
            p += storage_bytes[k];
        }
    }
    assert_int_equal(p - out, dcp__archive_length(l));
    return out;
}

static void rebuild(const golden_archive *a, void *user)
{
    (void)user;
    dcp__archive_opts opts = {a->prefix, a->is_old_form, 64};
    uint32_t crcs[GOLDEN_MAX_STORAGES];
    for (size_t i = 0; i < a->n; i++) {
        crcs[i] = dcp__crc32(0, a->storages[i], a->storage_bytes[i]);
    }
    dcp__archive_layout *l = lay_out(&opts, a->pickle, a->pickle_len, a->storage_bytes, a->n);
    if (dcp__archive_length(l) != a->len) {
        fail_msg("%s: %llu bytes, not %zu", a->path, (unsigned long long)dcp__archive_length(l), a->len);
    }
    uint8_t *bytes = assemble(l, a->storages, a->storage_bytes, crcs, a->n);
    for (size_t i = 0; i < a->len; i++) {
        if (bytes[i] != a->bytes[i]) {
            fail_msg("%s: byte %zu differs", a->path, i);
        }
    }
    free(bytes);
    dcp__archive_layout_free(l);
}

static void archive_writer__golden_records_are_rebuilt_byte_for_byte(void **state)
{
    (void)state;
    assert_int_equal(golden_each(DCP_TEST_DIR "/golden/*/*/ckpt/*.distcp", rebuild, NULL), 811);
}

/* Nine storages, some shared: their names' hash follows the table of libstdc++. */
static void archive_writer__golden_torch_save_files_are_rebuilt_byte_for_byte(void **state)
{
    (void)state;
    assert_int_equal(golden_each(DCP_TEST_DIR "/golden/*/torch_save/file.pt", rebuild, NULL), 5);
}

static uint64_t align64(uint64_t x)
{
    return (x + 63) / 64 * 64;
}

/* The closed forms of formats.md 3.5. */
static void archive_writer__lengths_follow_the_closed_forms(void **state)
{
    (void)state;
    static const uint64_t pickles[] = {2, 5, 118, 119, 120, 142, 183, 247, 1000, 1u << 20};
    static const uint64_t payloads[] = {0, 1, 4, 15, 16, 17, 63, 64, 65, 4096, 123456789, 0xF0000000u};
    uint8_t *pickle = calloc(1, 1u << 20);
    for (size_t i = 0; i < sizeof pickles / sizeof *pickles; i++) {
        for (size_t j = 0; j < 2 * sizeof payloads / sizeof *payloads; j++) {
            bool is_old = j % 2;
            uint64_t p = pickles[i], n = payloads[j / 2];
            dcp__archive_opts opts = {"archive", is_old, 64};
            uint64_t x = is_old ? align64(p + 131) : align64(p + 137), d = x + (is_old ? 128 : 384);
            uint64_t v = align64(d + n + (n ? 16 : 0) + 49);
            dcp__archive_layout *l = lay_out(&opts, pickle, p, &n, 1);
            assert_int_equal(dcp__archive_storage_offset(l, 0), d);
            assert_int_equal(dcp__archive_length(l), v + (is_old ? 604 : 745));
            dcp__archive_layout_free(l);
            l = lay_out(&opts, pickle, p, NULL, 0);
            assert_int_equal(dcp__archive_length(l), x + (is_old ? 672 : 1069));
            dcp__archive_layout_free(l);
        }
    }
    free(pickle);
}

/* One storage of `bytes` after a pickle of 142: all around it must stand where formats.md 3.2 to 3.4 says. */
static void check_zip64(uint64_t bytes)
{
    static const uint8_t pickle[142] = {0x80, 2};
    static const char *const tail_names[] = {"archive/version", "archive/.data/serialization_id"};
    bool is_large = bytes >= 0xFFFFFFFFu;
    uint32_t crc = 0x12345678;
    dcp__archive_layout *l = lay_out(&defaults, pickle, sizeof pickle, &bytes, 1);
    assert_int_equal(dcp__archive_storage_offset(l, 0), 704);

    uint8_t head[704], *tail = malloc(dcp__archive_piece_bytes(l, 1)), *p = tail;
    assert_int_equal(dcp__archive_piece_bytes(l, 0), sizeof head);
    dcp__archive_piece(l, 0, NULL, head);
    dcp__archive_piece(l, 1, &crc, tail);
    assert_int_equal(dcp__load16(head + 598 + 28), 62); /* 4 + 58, or 20 + 4 + 38 */
    if (is_large) {
        assert_memory_equal(head + 598 + 44, "\1\0\20\0", 4);
        assert_int_equal(dcp__load64(head + 598 + 48), bytes);
        assert_int_equal(dcp__load64(head + 598 + 56), 0);
    }
    assert_memory_equal(head + 598 + 44 + (is_large ? 20 : 0), is_large ? "FB\46\0Z" : "FB\72\0Z", 5);
    assert_int_equal(dcp__load32(head + 598 + 14), 0);
    assert_int_equal(dcp__load64(head + 598 + 18), 0);

    assert_memory_equal(p, "PK\7\10\x78\x56\x34\x12", 8);
    assert_int_equal(is_large ? dcp__load64(p + 8) : dcp__load32(p + 8), bytes);
    assert_int_equal(is_large ? dcp__load64(p + 16) : dcp__load32(p + 12), bytes);
    p += is_large ? 24 : 16;
    uint64_t at = 704 + bytes + (is_large ? 24 : 16), headers[2];
    for (size_t i = 0; i < 2; i++) {
        size_t name = strlen(tail_names[i]), zip64 = at >= 0xFFFFFFFFu ? 12 : 0, size = i ? 40 : 2;
        uint64_t padding = (64 - (at + 30 + name + 4 + zip64) % 64) % 64;
        headers[i] = at;
        assert_memory_equal(p, "PK\3\4\0\0\10\10\0\0", 10);
        assert_int_equal(dcp__load16(p + 26), name);
        assert_int_equal(dcp__load16(p + 28), zip64 + 4 + padding);
        assert_memory_equal(p + 30, tail_names[i], name);
        if (zip64) {
            assert_memory_equal(p + 30 + name, "\1\0\10\0", 4);
            assert_int_equal(dcp__load64(p + 34 + name), at);
        }
        size_t data = 30 + name + zip64 + 4 + padding;
        assert_int_equal((at + data) % 64, 0);
        assert_int_equal(dcp__load32(p + data + size + 4), dcp__crc32(0, p + data, size));
        assert_int_equal(zip64 ? dcp__load64(p + data + size + 16) : dcp__load32(p + data + size + 12), size);
        at += data + size + (zip64 ? 24 : 16);
        p += data + size + (zip64 ? 24 : 16);
    }

    uint64_t directory = at;
    const uint8_t *start = p;
    for (size_t i = 0; i < 7; i++) { /* data/0 is the fifth, the two behind it the last */
        size_t name = dcp__load16(p + 28), extra = dcp__load16(p + 30);
        bool large = i == 4 && is_large, far = i > 4 && headers[i - 5] >= 0xFFFFFFFFu;
        assert_memory_equal(p, "PK\1\2\0\0\0\0", 8);
        assert_int_equal(extra, large ? 20 : far ? 12 : 0);
        if (i == 4) {
            assert_int_equal(dcp__load32(p + 16), crc);
            assert_int_equal(dcp__load32(p + 20), large ? 0xFFFFFFFFu : bytes);
            assert_int_equal(dcp__load32(p + 24), large ? 0xFFFFFFFFu : bytes);
            assert_int_equal(dcp__load32(p + 42), 598);
        }
        if (i > 4) {
            assert_int_equal(dcp__load32(p + 42), far ? 0xFFFFFFFFu : headers[i - 5]);
        }
        if (large) {
            assert_memory_equal(p + 46 + name, "\1\0\20\0", 4);
            assert_int_equal(dcp__load64(p + 46 + name + 4), bytes);
            assert_int_equal(dcp__load64(p + 46 + name + 12), bytes);
        }
        if (far) {
            assert_memory_equal(p + 46 + name, "\1\0\10\0", 4);
            assert_int_equal(dcp__load64(p + 46 + name + 4), headers[i - 5]);
        }
        p += 46 + name + extra;
    }
    uint64_t directory_bytes = (uint64_t)(p - start);
    assert_memory_equal(p, "PK\6\6", 4);
    assert_int_equal(dcp__load64(p + 24), 7);
    assert_int_equal(dcp__load64(p + 32), 7);
    assert_int_equal(dcp__load64(p + 40), directory_bytes);
    assert_int_equal(dcp__load64(p + 48), directory);
    assert_int_equal(dcp__load64(p + 56 + 8), directory + directory_bytes);
    assert_int_equal(dcp__load16(p + 76 + 8), 7);
    assert_int_equal(dcp__load32(p + 76 + 12), directory_bytes);
    assert_int_equal(dcp__load32(p + 76 + 16), directory >= 0xFFFFFFFFu ? 0xFFFFFFFFu : directory);
    assert_int_equal(dcp__archive_length(l), directory + directory_bytes + 98);
    assert_int_equal(p + 98 - tail, dcp__archive_piece_bytes(l, 1));
    free(tail);
    dcp__archive_layout_free(l);
}

static void archive_writer__zip64_fields_appear_where_numbers_do_not_fit(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {0xFFFFF000u,                  /* all 32-bit */
                                     0xFFFFFFFFu - 704 - 16 - 1,   /* `version` starts at 0xFFFFFFFE */
                                     0xFFFFFFFFu - 704 - 16,       /* ... at 0xFFFFFFFF */
                                     0xFFFFFFFFu - 704 - 16 - 100, /* only the id is far */
                                     0xFFFFFFFFu - 704 - 16 - 300, /* only the directory is */
                                     0xFFFFFFFEu,
                                     0xFFFFFFFFu,
                                     0x100000064u,
                                     1ull << 40};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_zip64(sizes[i]);
    }
}

static void archive_writer__larger_alignment_holds_for_all_members(void **state)
{
    (void)state;
    dcp__archive_opts opts = {"archive", false, 4096};
    static const uint8_t pickle[142];
    uint64_t bytes = 1u << 20;
    uint32_t crc = 1;
    dcp__archive_layout *l = lay_out(&opts, pickle, sizeof pickle, &bytes, 1);
    assert_int_equal(dcp__archive_storage_offset(l, 0) % 4096, 0);
    size_t head_bytes = dcp__archive_piece_bytes(l, 0);
    uint8_t *head = malloc(head_bytes), *tail = malloc(dcp__archive_piece_bytes(l, 1));
    dcp__archive_piece(l, 0, &crc, head);
    dcp__archive_piece(l, 1, &crc, tail);
    assert_int_equal(head_bytes, 5 * 4096);
    assert_memory_equal(head + 2 * 4096, "1PK\7\10", 5);
    assert_memory_equal(head + 3 * 4096, "4096PK\7\10", 8);
    assert_memory_equal(head + 4 * 4096, "littlePK\7\10", 10);
    assert_memory_equal(tail + 4096, "3\nPK\7\10", 6);
    free(head);
    free(tail);
    dcp__archive_layout_free(l);
}

static void archive_writer__bad_options_are_refused(void **state)
{
    (void)state;
    static const dcp__archive_opts bad[] = {{NULL, false, 64},        {"", false, 64},        {"a/b", false, 64},
                                            {"archive", false, 0},    {"archive", false, 32}, {"archive", false, 96},
                                            {"archive", false, 65536}};
    dcp__archive_layout *l = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp__archive_layout_create(ctx, &bad[i], "N.", 2, NULL, 0, &l, &err), DCP_ARG);
        assert_int_equal(err.code, DCP_ARG);
    }
    assert_null(l);
}

static void archive_writer__sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    static const uint64_t bytes[] = {1ull << 62, 1ull << 62, UINT64_MAX};
    dcp__archive_layout *l = NULL;
    assert_int_equal(dcp__archive_layout_create(ctx, &defaults, "N.", 2, bytes, 2, &l, NULL), DCP_LIMIT);
    assert_int_equal(dcp__archive_layout_create(ctx, &defaults, "N.", 2, bytes + 2, 1, &l, NULL), DCP_LIMIT);
    assert_int_equal(dcp__archive_layout_create(ctx, &defaults, "N.", 2, bytes, SIZE_MAX / 64, &l, NULL), DCP_LIMIT);
    assert_null(l);
}

/* Digits that torch.save of PyTorch 2.13 wrote for lists of that many tensors of one byte. */
static void archive_writer__serialization_id_of_many_storages(void **state)
{
    (void)state;
    static const struct {
        size_t n;
        const char *digits;
    } seen[] = {{4, "10778627297998541625"},    {8, "08268647735604577700"},     {9, "01977860353369201443"},
                {24, "12647775507600111753"},   {25, "14750728607576356699"},    {60, "00137648793660415785"},
                {1000, "02450224207034579348"}, {20000, "00627650807873188221"}, {70000, "10764531831167710242"}};
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++) {
        uint64_t hash;
        uint8_t digits[DCP__SERIALIZATION_ID_BYTES];
        assert_int_equal(dcp__name_hash(ctx, seen[i].n, false, &hash, NULL), DCP_OK);
        dcp__serialization_id(hash, 0, digits);
        assert_memory_equal(digits, seen[i].digits, 20);
    }
}

static dcp_status create_and_free(dcp_context *failing, void *user, dcp_error *err)
{
    (void)user;
    static const uint64_t bytes[5] = {1, 0, 2, 3, 4};
    dcp__archive_layout *l;
    dcp_status status = dcp__archive_layout_create(failing, &defaults, "N.", 2, bytes, 5, &l, err);
    if (status == DCP_OK) {
        dcp__archive_layout_free(l);
    }
    return status;
}

static void archive_writer__survives_failing_allocations(void **state)
{
    (void)state;
    assert_int_equal(failing_alloc_walk(create_and_free, NULL), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(archive_writer__golden_records_are_rebuilt_byte_for_byte),
        cmocka_unit_test(archive_writer__golden_torch_save_files_are_rebuilt_byte_for_byte),
        cmocka_unit_test(archive_writer__lengths_follow_the_closed_forms),
        cmocka_unit_test(archive_writer__zip64_fields_appear_where_numbers_do_not_fit),
        cmocka_unit_test(archive_writer__larger_alignment_holds_for_all_members),
        cmocka_unit_test(archive_writer__bad_options_are_refused),
        cmocka_unit_test(archive_writer__sizes_that_overflow_are_refused),
        cmocka_unit_test(archive_writer__serialization_id_of_many_storages),
        cmocka_unit_test(archive_writer__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
