/* Conversions that cannot come out right: each is refused, the message names what is wrong with it, and nothing is left of the
 * output. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/memory_store.h"
#include "support/temp_dir.h"

/* a and b.a have three numbers, of which two do not fit float16; c has one that does. */
static void save_source(const char *path)
{
    static float numbers[] = {1, 70000, -1e9F}, small[] = {2};
    int64_t three[] = {3}, one[] = {1};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, three, numbers), c = dcp_tensor_make(DCP_FLOAT32, 1, one, small);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_value *root, *b;
    dcp_dict_create(NULL, &root, NULL);
    dcp_dict_create(NULL, &b, NULL);
    dcp_dict_set_tensor(root, "a", &t, NULL);
    dcp_dict_set_tensor(b, "a", &t, NULL);
    dcp_dict_set(root, dcp_key_str("b"), b, NULL);
    dcp_dict_set_tensor(root, "c", &c, NULL);
    opts.storage = storage;
    opts.overwrite = true;
    assert_int_equal(dcp_save(NULL, path, root, &opts, NULL, NULL), DCP_OK);
    dcp_value_free(root);
}

static dcp_convert_opts options(dcp_convert_form to)
{
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    opts.to = to;
    opts.storage = opts.open.storage = storage;
    return opts;
}

static size_t count(const char *text, const char *word)
{
    size_t n = 0;
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word)) {
        n++;
    }
    return n;
}

/* The words stand in the message once each; there is no output. */
static void refused(dcp_context *ctx, dcp_status expected, const char *from, const dcp_convert_opts *opts,
                    const char *const words[2])
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_stat st;
    dcp_status status = dcp_convert(ctx, from, "out", opts, NULL, &err);
    if (status != expected) {
        fail_msg("form %d: %s: %s", opts->to, dcp_status_name(status), err.message);
    }
    for (size_t i = 0; i < 2; i++) {
        if (words[i] && count(err.message, words[i]) != 1) {
            fail_msg("form %d: %s is not in it once: %s", opts->to, words[i], err.message);
        }
    }
    assert_true(count(err.message, "out: ") <= 1);
    assert_int_equal(storage->ops->stat(storage, "out", &st, NULL), DCP_NOT_FOUND);
    assert_int_equal(storage->ops->stat(storage, "out.libdcp-part", &st, NULL), DCP_NOT_FOUND);
}

static void bad_input__names_that_clash(void **state)
{
    (void)state;
    static const char *const edits[] = {"s/b\\.//"}, *const words[] = {"\"a\"", "\"b.a\""};
    save_source("from");
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        dcp_error err = DCP_ERROR_INIT;
        opts.edits = edits;
        opts.n_edits = 1;
        assert_int_equal(dcp_convert(NULL, "from", "out", &opts, NULL, &err), DCP_MISMATCH);
        assert_true(strstr(err.message, words[0]) && strstr(err.message, words[1]));
    }
}

static void bad_input__casts_that_overflow_tell_how_many(void **state)
{
    (void)state;
    static const dcp_convert_cast cast[] = {{"b.*", DCP_FLOAT16}};
    static const char *const words[] = {"\"b.a\"", "2 of the 3"};
    dcp_stat st;
    save_source("from");
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        dcp_convert_report report = DCP_CONVERT_REPORT_INIT;
        char name[8];
        opts.casts = cast;
        opts.n_casts = 1;
        refused(NULL, DCP_MISMATCH, "from", &opts, words);
        opts.allow_overflow = true;
        snprintf(name, sizeof name, "lost%d", to);
        assert_int_equal(dcp_convert(NULL, "from", name, &opts, &report, NULL), DCP_OK);
        assert_int_equal(report.n_cast, 3);
        assert_int_equal(report.n_lost, 2);
        assert_int_equal(storage->ops->stat(storage, name, &st, NULL), DCP_OK);
    }
}

/* As large as the limit of the reader is, a file can be written; larger headers are refused by the writer. */
static void bad_input__headers_over_the_readers_limit(void **state)
{
    (void)state;
    static const char *const words[] = {"header", NULL};
    save_source("from");
    for (dcp_convert_form to = DCP_TO_SAFETENSORS; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        dcp_context_opts limits = DCP_CONTEXT_OPTS_INIT;
        dcp_context *ctx;
        limits.limits.max_header_bytes = 100;
        assert_int_equal(dcp_context_create(&limits, &ctx, NULL), DCP_OK);
        refused(ctx, DCP_LIMIT, "from", &opts, words);
        dcp_context_free(ctx);
    }
}

static void refused_mapping(const temp_dir *dir, const char *text, dcp_status expected, const char *word)
{
    char path[320];
    const char *const words[] = {word, NULL};
    dcp_convert_opts opts = options(DCP_TO_HF);
    snprintf(path, sizeof path, "%s/map.json", dir->path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
    opts.mapping = path;
    refused(NULL, expected, "from", &opts, words);
}

static void bad_input__mappings_that_do_not_fit(void **state)
{
    (void)state;
    temp_dir dir;
    save_source("from");
    assert_true(temp_dir_make(&dir));
    refused_mapping(&dir, "{\"a\": 1, \"b.a\": 1, \"c\": 2, \"gone\": 2}", DCP_MISMATCH, "'gone'");
    refused_mapping(&dir, "{\"weight_map\": {\"a\": \"x.safetensors\", \"c\": \"x.safetensors\"}}", DCP_MISMATCH, "'b.a'");
    refused_mapping(&dir, "{\"a\": 1, \"b.a\": \"../x.safetensors\", \"c\": 1}", DCP_FORMAT, "'b.a'");
    refused_mapping(&dir, "{\"a\": 0, \"b.a\": 1, \"c\": 1}", DCP_FORMAT, "'a'");
    refused_mapping(&dir, "{\"a\": 1", DCP_FORMAT, "mapping");
    temp_dir_remove(&dir);
}

/* Two names for the same elements, where the form has none for that and the caller wants no copies. */
static void bad_input__tensors_that_share_their_elements(void **state)
{
    (void)state;
    static const char *const words[] = {"\"a\"", "\"b.a\""};
    save_source("from");
    for (dcp_convert_form to = DCP_TO_SAFETENSORS; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        opts.alias = DCP_ALIAS_ERROR;
        refused(NULL, DCP_MISMATCH, "from", &opts, words);
    }
}

/* ---- damage ---- */

#define ROWS 3000
#define COLUMNS 4096 /* 12 MB: more than is read at once */
#define BLOCK 128
#define SCALE_ROWS ((ROWS + BLOCK - 1) / BLOCK)
#define SCALE_COLUMNS (COLUMNS / BLOCK)

static void save_quantized(const char *path)
{
    int64_t shape[] = {ROWS, COLUMNS}, scales_shape[] = {SCALE_ROWS, SCALE_COLUMNS};
    uint8_t *codes = malloc((size_t)ROWS * COLUMNS);
    static float scales[SCALE_ROWS * SCALE_COLUMNS];
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_value *root;
    for (size_t i = 0; i < (size_t)ROWS * COLUMNS; i++) {
        codes[i] = (uint8_t)(i % 100); /* all of them are numbers */
    }
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        scales[i] = (float)(i + 1);
    }
    dcp_tensor w = dcp_tensor_make(DCP_FLOAT8_E4M3FN, 2, shape, codes), s = dcp_tensor_make(DCP_FLOAT32, 2, scales_shape, scales);
    dcp_dict_create(NULL, &root, NULL);
    dcp_dict_set_tensor(root, "w.weight", &w, NULL);
    dcp_dict_set_tensor(root, "w.weight_scale_inv", &s, NULL);
    opts.storage = storage;
    assert_int_equal(dcp_save(NULL, path, root, &opts, NULL, NULL), DCP_OK);
    dcp_value_free(root);
    free(codes);
}

/* Flips a bit in the middle of a tensor's record: of its elements. */
static void flip(const char *path, const char *name)
{
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *ck;
    dcp_file *f;
    char file[96];
    uint8_t byte;
    size_t got;
    open.storage = storage;
    assert_int_equal(dcp_checkpoint_open(NULL, path, &open, &ck, NULL), DCP_OK);
    dcp_chunk_info chunk;
    assert_int_equal(dcp_item_chunk(ck, dcp_checkpoint_find(ck, dcp_str_of(name)), 0, &chunk, NULL), DCP_OK);
    snprintf(file, sizeof file, "%s/%s", path, chunk.file);
    uint64_t at = chunk.offset + chunk.length / 2;
    dcp_checkpoint_close(ck);
    assert_int_equal(storage->ops->open(storage, file, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    assert_int_equal(storage->ops->read_at(f, &byte, 1, at, &got, NULL), DCP_OK);
    byte ^= 1;
    assert_int_equal(storage->ops->write_at(f, &byte, 1, at, NULL), DCP_OK);
    storage->ops->close(f, NULL);
}

/* Its numbers are made box by box, and none of the boxes is a record: the CRC must be looked at all the same. */
static void bad_input__a_damaged_quantised_tensor(void **state)
{
    (void)state;
    static const char *const tensors[] = {"w.weight", "w.weight_scale_inv"};
    save_quantized("quantised");
    for (size_t i = 0; i < 2; i++) {
        const char *const words[] = {tensors[i], "crc"};
        flip("quantised", tensors[i]);
        for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
            dcp_convert_opts opts = options(to);
            opts.dequantize = DCP_FLOAT32;
            refused(NULL, DCP_CHECKSUM, "quantised", &opts, words);
        }
        dcp_convert_opts opts = options(DCP_TO_DCP);
        opts.dequantize = DCP_FLOAT32;
        opts.ranks = 2;
        refused(NULL, DCP_CHECKSUM, "quantised", &opts, words);
        flip("quantised", tensors[i]);
    }
    dcp_convert_opts opts = options(DCP_TO_DCP);
    opts.dequantize = DCP_FLOAT32;
    assert_int_equal(dcp_convert(NULL, "quantised", "dequantised", &opts, NULL, NULL), DCP_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_input__names_that_clash),
        cmocka_unit_test(bad_input__casts_that_overflow_tell_how_many),
        cmocka_unit_test(bad_input__headers_over_the_readers_limit),
        cmocka_unit_test(bad_input__mappings_that_do_not_fit),
        cmocka_unit_test(bad_input__tensors_that_share_their_elements),
        cmocka_unit_test(bad_input__a_damaged_quantised_tensor),
    };
    return cmocka_run_group_tests(tests, make_storage, free_storage);
}
