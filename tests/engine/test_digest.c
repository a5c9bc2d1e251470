/* SHA-256 of tensors: what libcrypto makes of the row-major bytes, whatever the chunks; read once where that is possible, and
 * never of bytes whose CRC is wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <openssl/evp.h>

#include "dcp/dcp.h"
#include "support/random.h"

enum { ROWS = 40, COLUMNS = 1 << 20, BYTES = ROWS * COLUMNS }; /* more than is read at once */

typedef struct fixture {
    char *data;
    uint8_t sha256[32];
    dcp_storage *st;
} fixture;

static int set_up(void **state)
{
    fixture *x = calloc(1, sizeof *x);
    test_random rnd = {7};
    x->data = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i += sizeof(uint64_t)) {
        uint64_t word = test_random_next(&rnd);
        memcpy(x->data + i, &word, sizeof word);
    }
    assert_int_equal(EVP_Digest(x->data, BYTES, x->sha256, NULL, EVP_sha256(), NULL), 1);
    assert_int_equal(dcp_storage_memory(NULL, &x->st, NULL), DCP_OK);
    *state = x;
    return 0;
}

static int tear_down(void **state)
{
    fixture *x = *state;
    dcp_storage_free(x->st);
    free(x->data);
    free(x);
    return 0;
}

/* Saves the tensor in the given chunks. */
static void save(fixture *x, const char *path, size_t n, int64_t (*offsets)[2], int64_t (*sizes)[2], const char *transform)
{
    const int64_t extents[] = {ROWS, COLUMNS}, strides[] = {COLUMNS, 1};
    dcp_tensor chunks[8];
    dcp_box boxes[8];
    dcp_value *root, *w;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    for (size_t i = 0; i < n; i++) {
        chunks[i] = dcp_tensor_make(DCP_UINT8, 2, sizes[i], x->data + offsets[i][0] * COLUMNS + offsets[i][1]);
        chunks[i].strides = strides;
        boxes[i] = (dcp_box){offsets[i], sizes[i]};
    }
    assert_int_equal(dcp_sharded_create(NULL, DCP_UINT8, 2, extents, n, chunks, boxes, &w, NULL), DCP_OK);
    assert_int_equal(dcp_dict_create(NULL, &root, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(root, dcp_key_str("w"), w, NULL), DCP_OK);
    opts.storage = x->st;
    opts.transform = transform;
    if (dcp_save(NULL, path, root, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
}

static dcp_status hash(fixture *x, const char *path, bool check_crc, uint8_t digest[32], uint64_t *bytes_read, dcp_error *err)
{
    dcp_storage_counts counts = {0};
    dcp_storage *counting;
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    assert_int_equal(dcp_storage_count(NULL, x->st, &counts, &counting, NULL), DCP_OK);
    opts.storage = counting;
    opts.check_crc = check_crc;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &opts, &ck, NULL), DCP_OK);
    dcp_status status = dcp_item_sha256(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), digest, err);
    *bytes_read = counts.bytes_read;
    dcp_checkpoint_close(ck);
    dcp_storage_free(counting);
    return status;
}

static void flip(fixture *x, const char *name, uint64_t at)
{
    dcp_file *f;
    size_t got;
    char byte;
    assert_int_equal(x->st->ops->open(x->st, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    assert_int_equal(x->st->ops->read_at(f, &byte, 1, at, &got, NULL), DCP_OK);
    byte ^= 1;
    assert_int_equal(x->st->ops->write_at(f, &byte, 1, at, NULL), DCP_OK);
    x->st->ops->close(f, NULL);
}

static void sha256__any_chunks_give_the_digest_of_the_elements(void **state)
{
    fixture *x = *state;
    struct {
        const char *path, *transform;
        size_t n;
        int64_t offsets[4][2], sizes[4][2];
        bool is_read_once;
    } cases[] = {
        {"whole", NULL, 1, {{0, 0}}, {{ROWS, COLUMNS}}, true},
        {"rows", NULL, 3, {{7, 0}, {0, 0}, {9, 0}}, {{2, COLUMNS}, {7, COLUMNS}, {ROWS - 9, COLUMNS}}, true},
        {"columns", NULL, 2, {{0, 0}, {0, 1000}}, {{ROWS, 1000}, {ROWS, COLUMNS - 1000}}, false},
        {"tiles", NULL, 3, {{0, 0}, {0, 1000}, {3, 0}}, {{3, 1000}, {3, COLUMNS - 1000}, {ROWS - 3, COLUMNS}}, false},
        {"compressed", "stream.zstd/1", 2, {{0, 0}, {9, 0}}, {{9, COLUMNS}, {ROWS - 9, COLUMNS}}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t digest[32];
        uint64_t bytes_read;
        dcp_error err = DCP_ERROR_INIT;
        save(x, cases[i].path, cases[i].n, cases[i].offsets, cases[i].sizes, cases[i].transform);
        for (int check_crc = 0; check_crc < 2; check_crc++) {
            memset(digest, 0, sizeof digest);
            if (hash(x, cases[i].path, check_crc, digest, &bytes_read, &err) != DCP_OK) {
                fail_msg("%s: %s", cases[i].path, err.message);
            }
            assert_memory_equal(digest, x->sha256, sizeof digest);
            if (cases[i].is_read_once && bytes_read > BYTES + BYTES / 100) {
                fail_msg("%s: %llu bytes read", cases[i].path, (unsigned long long)bytes_read);
            }
        }
    }
}

static void sha256__a_flipped_bit_is_found_in_any_chunk(void **state)
{
    fixture *x = *state;
    int64_t offsets[3][2] = {{7, 0}, {0, 0}, {8, 0}}, sizes[3][2] = {{1, COLUMNS}, {7, COLUMNS}, {ROWS - 8, COLUMNS}};
    int64_t columns[2][2] = {{0, 0}, {0, 1000}}, widths[2][2] = {{ROWS, 1000}, {ROWS, COLUMNS - 1000}};
    const uint64_t at[] = {5000, (1 << 20) + 5000, 12 << 20, BYTES - 5000};
    save(x, "rows", 3, offsets, sizes, NULL);
    save(x, "columns", 2, columns, widths, NULL);
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        const char *const paths[] = {"rows", "columns"}, *const files[] = {"rows/__0_0.distcp", "columns/__0_0.distcp"};
        for (size_t k = 0; k < 2; k++) {
            uint8_t digest[32];
            uint64_t bytes_read;
            dcp_error err = DCP_ERROR_INIT;
            flip(x, files[k], at[i]);
            assert_int_equal(hash(x, paths[k], true, digest, &bytes_read, &err), DCP_CHECKSUM);
            assert_non_null(strstr(err.message, "__0_0.distcp"));
            assert_true(err.offset != DCP_NO_OFFSET && err.offset <= at[i]); /* where the elements of the record begin */
            flip(x, files[k], at[i]);
            assert_int_equal(hash(x, paths[k], true, digest, &bytes_read, &err), DCP_OK);
        }
    }
}

static void sha256__a_gap_is_an_error(void **state)
{
    fixture *x = *state;
    const int64_t extents[] = {ROWS, COLUMNS};
    int64_t offsets[] = {0, 0}, sizes[] = {ROWS - 1, COLUMNS};
    dcp_tensor chunk = dcp_tensor_make(DCP_UINT8, 2, sizes, x->data);
    dcp_box box = {offsets, sizes};
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_value *root, *w;
    uint8_t digest[32];
    uint64_t bytes_read;
    assert_int_equal(dcp_sharded_create(NULL, DCP_UINT8, 2, extents, 1, &chunk, &box, &w, NULL), DCP_OK);
    assert_int_equal(dcp_dict_create(NULL, &root, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(root, dcp_key_str("w"), w, NULL), DCP_OK);
    opts.storage = x->st;
    opts.rank_local = true;
    opts.world = 1;
    assert_int_equal(dcp_save(NULL, "gap", root, &opts, NULL, NULL), DCP_OK);
    dcp_value_free(root);
    assert_int_equal(hash(x, "gap", true, digest, &bytes_read, NULL), DCP_FORMAT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sha256__any_chunks_give_the_digest_of_the_elements, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sha256__a_flipped_bit_is_found_in_any_chunk, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sha256__a_gap_is_an_error, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
