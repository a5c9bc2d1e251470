#include "corrupt/small.h"

static void put_text(dcp__buf *b, const char *text)
{
    pk_op(b, 'X');
    pk_u32(b, (uint32_t)strlen(text));
    dcp__buf_put(b, text, strlen(text));
}

void small_tensor_pickle(dcp__buf *b, const small_tensor *t)
{
    pk_raw(b, "\x80\x02");
    dcp__buf_printf(b, "c%s\n%s\n((", md_or(t->module, "torch._utils"), md_or(t->fn, "_rebuild_tensor_v2"));
    put_text(b, "storage");
    dcp__buf_printf(b, "ctorch\n%s\n", md_or(t->storage, "FloatStorage"));
    put_text(b, "0");
    put_text(b, "cpu");
    pk_int(b, t->elems);
    pk_raw(b, "tQ");
    pk_int(b, t->storage_offset);
    pk_tuple(b, t->sizes, 2);
    pk_tuple(b, t->strides, 2);
    pk_raw(b, "\x89"
              "ccollections\nOrderedDict\n)R");
    if (t->is_neg) {
        pk_op(b, '}');
        put_text(b, "neg");
        pk_raw(b, "\x88s");
    }
    pk_raw(b, "tR.");
}

zb_zip small_archive(const dcp__buf *pickle, const void *data, size_t data_bytes, size_t bytes)
{
    const zb_member members[] = {{"archive/data.pkl", pickle->data, pickle->len, 0},
                                 {"archive/version", "3\n", 2, 0},
                                 {"archive/data/0", data, data_bytes, 0}};
    zb_opts opts = {.with_zip64_end = 1};
    zb_zip z = zb_build(members, data ? 3 : 2, &opts);
    assert_true(z.len <= bytes);
    opts.trailing = bytes - z.len;
    free(z.bytes);
    z = zb_build(members, data ? 3 : 2, &opts);
    assert_int_equal(z.len, bytes);
    return z;
}

void small_patch(dcp_storage *st, const char *name, uint64_t offset, const void *bytes, size_t n)
{
    dcp_file *f;
    assert_int_equal(st->ops->open(st, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->write_at(f, bytes, n, offset, NULL), DCP_OK);
    assert_int_equal(st->ops->close(f, NULL), DCP_OK);
}

static void put_rows(dcp_storage *st, const char *name, uint64_t offset, float first)
{
    dcp__buf pickle;
    float rows[6];
    const small_tensor t = {.elems = 6, .sizes = {2, 3}, .strides = {3, 1}};
    for (int i = 0; i < 6; i++) {
        rows[i] = first + (float)i;
    }
    dcp__buf_init(&pickle, dcp__context(NULL));
    small_tensor_pickle(&pickle, &t);
    zb_zip z = small_archive(&pickle, rows, sizeof rows, 900);
    small_patch(st, name, offset, z.bytes, z.len);
    free(z.bytes);
    dcp__buf_reset(&pickle);
}

void small_put_step(dcp_storage *st, const dcp__buf *pickle)
{
    zb_zip z = small_archive(pickle, NULL, 0, SMALL_STEP_BYTES);
    small_patch(st, SMALL_FIRST, 2000, z.bytes, z.len);
    free(z.bytes);
}

void small_put_metadata(dcp_storage *st, const md_form *form)
{
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, form);
    assert_false(b.failed);
    set_file(st, ".metadata", b.data, b.len);
    dcp__buf_reset(&b);
}

void small_put(dcp_storage *st, const md_form *form)
{
    dcp__buf step;
    assert_int_equal(st->ops->make_dir(st, "sub", NULL), DCP_OK);
    put_rows(st, SMALL_FIRST, 0, 0);
    put_rows(st, SMALL_SECOND, 1000, 6);
    dcp__buf_init(&step, dcp__context(NULL));
    pk_raw(&step, "\x80\x02K\x07.");
    small_put_step(st, &step);
    dcp__buf_reset(&step);
    small_put_metadata(st, form);
}
