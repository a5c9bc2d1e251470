/* Many tensors that are views of one storage of a torch.save file: its checksum is compared once in a read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "dcp/dcp.h"
#include "format/archive_writer.h"
#include "support/pickle_asm.h"

enum { ELEMS = 500000, VIEWS = 60, VIEW_ELEMS = 1000 };

static const uint64_t storage_bytes = (uint64_t)ELEMS * 4;

/* View i has the elements from i * VIEW_ELEMS on. */
static void put_view(dcp__buf *b, int i)
{
    pk_raw(b, "ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpu");
    pk_int(b, ELEMS);
    pk_raw(b, "tQ");
    pk_int(b, i * VIEW_ELEMS);
    pk_int(b, VIEW_ELEMS);
    pk_raw(b, "\x85K\1\x85\x89NtR");
}

/* {"tuple": (view 0, view 1, ...), "v0": view 0, "v1": view 1, ...} */
static void put_pickle(dcp__buf *b)
{
    pk_raw(b, "\x80\2}(X\5\0\0\0tuple(");
    for (int i = 0; i < VIEWS; i++) {
        put_view(b, i);
    }
    pk_raw(b, "t");
    for (int i = 0; i < VIEWS; i++) {
        char name[16];
        uint32_t n = (uint32_t)snprintf(name, sizeof name, "v%d", i);
        pk_op(b, 'X');
        pk_u32(b, n);
        dcp__buf_put(b, name, n);
        put_view(b, i);
    }
    pk_raw(b, "u.");
}

static float element(int64_t i)
{
    return (float)i * 0.5F;
}

/* The file's bytes; *storage_at: where the storage's begin. */
static uint8_t *make_file(uint64_t *storage_at, size_t *n)
{
    dcp_context *ctx = dcp__context(NULL);
    dcp__archive_opts opts = {"archive", false, 64};
    dcp__archive_layout *l;
    dcp__buf pickle;
    dcp__buf_init(&pickle, ctx);
    put_pickle(&pickle);
    assert_int_equal(dcp__archive_layout_create(ctx, &opts, pickle.data, pickle.len, &storage_bytes, 1, &l, NULL), DCP_OK);
    uint8_t *bytes = malloc(*n = dcp__archive_length(l));
    float *elems = (float *)(void *)(bytes + (*storage_at = dcp__archive_storage_offset(l, 0)));
    for (int64_t i = 0; i < ELEMS; i++) {
        elems[i] = element(i);
    }
    uint32_t crc = dcp__crc32(0, elems, storage_bytes);
    dcp__archive_piece(l, 0, &crc, bytes);
    dcp__archive_piece(l, 1, &crc, bytes + *storage_at + storage_bytes);
    dcp__archive_layout_free(l);
    dcp__buf_reset(&pickle);
    return bytes;
}

typedef struct fixture {
    dcp_storage *memory, *counting;
    dcp_storage_counts counts;
    uint64_t storage_at;
    dcp_checkpoint *ck;
} fixture;

static void open_views(fixture *x, bool is_damaged)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_file *f;
    size_t n;
    *x = (fixture){0};
    uint8_t *bytes = make_file(&x->storage_at, &n);
    bytes[x->storage_at + storage_bytes - 1] ^= is_damaged; /* which is in none of the views */
    assert_int_equal(dcp_storage_memory(NULL, &x->memory, NULL), DCP_OK);
    assert_int_equal(x->memory->ops->open(x->memory, "views.pt", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(x->memory->ops->write_at(f, bytes, n, 0, NULL), DCP_OK);
    x->memory->ops->close(f, NULL);
    free(bytes);
    assert_int_equal(dcp_storage_count(NULL, x->memory, &x->counts, &x->counting, NULL), DCP_OK);
    opts.storage = x->counting;
    opts.check_crc = true;
    assert_int_equal(dcp_checkpoint_open(NULL, "views.pt", &opts, &x->ck, NULL), DCP_OK);
    x->counts = (dcp_storage_counts){0};
}

static void close_views(fixture *x)
{
    dcp_checkpoint_close(x->ck);
    dcp_storage_free(x->counting);
    dcp_storage_free(x->memory);
}

/* The whole storage once, and of each view its own bytes. */
static void expect_one_comparison(const fixture *x)
{
    uint64_t views = (uint64_t)VIEWS * VIEW_ELEMS * 4;
    assert_true(x->counts.bytes_read >= storage_bytes);
    assert_true(x->counts.bytes_read <= storage_bytes + views + 4096);
}

static void views__in_an_object_are_compared_once(void **unused)
{
    (void)unused;
    fixture x;
    dcp_value *v;
    dcp_error err = DCP_ERROR_INIT;
    open_views(&x, false);
    const dcp_item *item = dcp_checkpoint_find(x.ck, dcp_str_of("tuple"));
    assert_non_null(item);
    assert_int_equal(dcp_read_object(x.ck, item, &v, &err), DCP_OK);
    assert_int_equal(dcp_value_count(v), VIEWS);
    for (int i = 0; i < VIEWS; i++) {
        const float *data = dcp_value_tensor(dcp_value_at(v, (size_t)i))->data;
        assert_true(data[0] == element(i * VIEW_ELEMS) && data[VIEW_ELEMS - 1] == element((i + 1) * VIEW_ELEMS - 1));
    }
    expect_one_comparison(&x);
    dcp_value_free(v);
    close_views(&x);
    open_views(&x, true);
    assert_int_equal(dcp_read_object(x.ck, dcp_checkpoint_find(x.ck, dcp_str_of("tuple")), &v, &err), DCP_CHECKSUM);
    assert_int_equal(err.offset, x.storage_at);
    close_views(&x);
}

static dcp_status read_views(const fixture *x, float *to, dcp_error *err)
{
    dcp_read_request requests[VIEWS] = {{0}};
    for (int i = 0; i < VIEWS; i++) {
        char name[16];
        snprintf(name, sizeof name, "v%d", i);
        const dcp_item *item = dcp_checkpoint_find(x->ck, dcp_str_of(name));
        assert_non_null(item);
        requests[i] = (dcp_read_request){item, {NULL, NULL}, dcp_tensor_make(item->dtype, 1, item->extents, to + i * VIEW_ELEMS)};
    }
    return dcp_read_many(x->ck, requests, VIEWS, err);
}

static void views__in_one_read_are_compared_once(void **unused)
{
    (void)unused;
    fixture x;
    dcp_error err = DCP_ERROR_INIT;
    float *to = calloc((size_t)VIEWS * VIEW_ELEMS, sizeof *to);
    open_views(&x, false);
    assert_int_equal(read_views(&x, to, &err), DCP_OK);
    for (int i = 0; i < VIEWS * VIEW_ELEMS; i++) {
        assert_true(to[i] == element(i));
    }
    expect_one_comparison(&x);
    assert_int_equal(read_views(&x, to, &err), DCP_OK); /* and again in the next one */
    assert_true(x.counts.bytes_read >= 2 * storage_bytes);
    close_views(&x);
    open_views(&x, true);
    assert_int_equal(read_views(&x, to, &err), DCP_CHECKSUM);
    assert_int_equal(err.offset, x.storage_at);
    close_views(&x);
    free(to);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(views__in_an_object_are_compared_once),
        cmocka_unit_test(views__in_one_read_are_compared_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
