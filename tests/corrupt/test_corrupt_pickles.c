/* Hostile pickles as metadata, as the record of an object and as a torch.save file: nothing runs, nothing grows, and what is no
 * data is told. */
#include "cli/tool.h"
#include "corrupt/damage.h"
#include "corrupt/small.h"

/* Made where the tests run if anything in a pickle is executed. */
#define TRACE "/tmp/dcp-test-executed"

typedef void (*build_fn)(dcp__buf *b);

static void repeat(dcp__buf *b, const char *ops, size_t n, int times)
{
    for (int i = 0; i < times; i++) {
        dcp__buf_put(b, ops, n);
    }
}
#define REPEAT(b, literal, times) repeat(b, literal, sizeof(literal) - 1, times)

/* ---- what they are ---- */

static void os_system(dcp__buf *b)
{
    static const char command[] = "touch " TRACE;
    pk_raw(b, "\x80\x02"
              "cposix\nsystem\nX");
    pk_u32(b, sizeof command - 1);
    dcp__buf_put(b, command, sizeof command - 1);
    pk_raw(b, "\x85R.");
}

/* getattr(__import__("os"), "system")("touch ...") */
static void nested_reduce(dcp__buf *b)
{
    static const char command[] = "touch " TRACE;
    pk_raw(b, "\x80\x04"
              "cbuiltins\ngetattr\ncbuiltins\n__import__\n\x8c\x02os\x85R\x8c\x06system\x86R\x8c");
    pk_op(b, (int)sizeof command - 1);
    dcp__buf_put(b, command, sizeof command - 1);
    pk_raw(b, "\x85R.");
}

static void build_attribute(dcp__buf *b)
{
    pk_raw(b, "\x80\x02"
              "cos\nenviron\n}X\x01\x00\x00\x00"
              "aK\x01s"
              "b.");
}

/* Each list holds the one before it twice: 2^40 ends. */
static void memo_bomb(dcp__buf *b)
{
    pk_raw(b, "\x80\x02]q\x00"
              "0");
    for (int i = 1; i <= 40; i++) {
        pk_raw(b, "](h");
        pk_op(b, i - 1);
        pk_op(b, 'h');
        pk_op(b, i - 1);
        pk_raw(b, "eq");
        pk_op(b, i);
        pk_op(b, '0');
    }
    pk_raw(b, "h\x28.");
}

static void tuple_bomb(dcp__buf *b)
{
    pk_raw(b, "\x80\x02)");
    REPEAT(b, "2\x86", 60); /* DUP, TUPLE2 */
    pk_op(b, '.');
}

static void deep_lists(dcp__buf *b)
{
    pk_raw(b, "\x80\x02");
    REPEAT(b, "]", 300);
    REPEAT(b, "a", 299);
    pk_op(b, '.');
}

static void deep_marks(dcp__buf *b)
{
    pk_raw(b, "\x80\x02");
    REPEAT(b, "(", 300);
    REPEAT(b, "t", 300);
    pk_op(b, '.');
}

static void deep_calls(dcp__buf *b)
{
    pk_raw(b, "\x80\x02"
              "ca\nb\n");
    REPEAT(b, ")R", 290);
    pk_op(b, '.');
}

static void own_list(dcp__buf *b)
{
    pk_raw(b, "\x80\x02]q\x00h\x00"
              "a.");
}

static void own_dict(dcp__buf *b)
{
    pk_raw(b, "\x80\x02}q\x00K\x01h\x00s.");
}

static void own_state(dcp__buf *b)
{
    pk_raw(b, "\x80\x02"
              "ca\nb\n)\x81q\x00}K\x01h\x00sb.");
}

static void huge_string(dcp__buf *b)
{
    pk_raw(b, "\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"
              "abc.");
}

static void huge_text(dcp__buf *b)
{
    pk_raw(b, "\x80\x02X\xff\xff\xff\xff"
              "abc.");
}

static void huge_bytes(dcp__buf *b)
{
    pk_raw(b, "\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x40"
              "abc.");
}

static void huge_integer(dcp__buf *b)
{
    pk_raw(b, "\x80\x02\x8b\xff\xff\xff\x7f"
              "abc.");
}

static void negative_integer_length(dcp__buf *b)
{
    pk_raw(b, "\x80\x02\x8b\xff\xff\xff\xff"
              "abc.");
}

static void huge_frame(dcp__buf *b)
{
    pk_raw(b, "\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff"
              "K\x07");
}

static void huge_memo_number(dcp__buf *b)
{
    pk_raw(b, "\x80\x02K\x07r\xff\xff\xff\xff");
}

static void unknown_memo_number(dcp__buf *b)
{
    pk_raw(b, "\x80\x02h\x09.");
}

static void empty_stack(dcp__buf *b)
{
    pk_raw(b, "\x80\x02"
              "a.");
}

static void no_mark(dcp__buf *b)
{
    pk_raw(b, "\x80\x02]K\x01"
              "e.");
}

static void no_stop(dcp__buf *b)
{
    pk_raw(b, "\x80\x02K\x07");
}

static void unknown_opcode(dcp__buf *b)
{
    pk_raw(b, "\x80\x02\xff.");
}

static void extension_opcode(dcp__buf *b)
{
    pk_raw(b, "\x80\x02\x82\x01.");
}

static void newer_protocol(dcp__buf *b)
{
    pk_raw(b, "\x80\x09K\x07.");
}

static void two_values(dcp__buf *b)
{
    pk_raw(b, "\x80\x02K\x07K\x08.");
}

static void bad_utf8(dcp__buf *b)
{
    pk_raw(b, "\x80\x02X\x02\x00\x00\x00\xc0\x80.");
}

static void odd_pairs(dcp__buf *b)
{
    pk_raw(b, "\x80\x02}(K\x01K\x02K\x03u.");
}

static void nothing(dcp__buf *b)
{
    (void)b;
}

static void noise(dcp__buf *b)
{
    uint32_t x = 2463534242u;
    for (int i = 0; i < 300; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        pk_op(b, (int)(x & 0xff));
    }
}

static void zeros(dcp__buf *b)
{
    REPEAT(b, "\0", 300);
}

typedef struct hostile {
    const char *name;
    build_fn build;
    dcp_status as_object;   /* DCP_OK: it is data, though of a class that nobody knows */
    dcp_status as_metadata; /* DCP_OK stands for FORMAT */
} hostile;

static const hostile pickles[] = {
    {"os.system", os_system, DCP_OK, DCP_OK},
    {"nested reduce", nested_reduce, DCP_OK, DCP_OK},
    {"a state for a global", build_attribute, DCP_FORMAT, DCP_OK},
    {"deep lists", deep_lists, DCP_LIMIT, DCP_LIMIT},
    {"deep tuples", deep_marks, DCP_LIMIT, DCP_LIMIT},
    {"deep calls", deep_calls, DCP_LIMIT, DCP_LIMIT},
    {"a list in itself", own_list, DCP_FORMAT, DCP_OK},
    {"a dict in itself", own_dict, DCP_FORMAT, DCP_OK},
    {"an object in its state", own_state, DCP_FORMAT, DCP_OK},
    {"a text of 2^63 bytes", huge_string, DCP_FORMAT, DCP_OK},
    {"a text of 4 GiB", huge_text, DCP_FORMAT, DCP_OK},
    {"2^62 bytes", huge_bytes, DCP_FORMAT, DCP_OK},
    {"an integer of 2 GiB", huge_integer, DCP_FORMAT, DCP_OK},
    {"an integer of negative length", negative_integer_length, DCP_FORMAT, DCP_OK},
    {"a frame of 2^64 bytes without end", huge_frame, DCP_FORMAT, DCP_OK},
    {"a memo number of 2^32", huge_memo_number, DCP_FORMAT, DCP_OK},
    {"a memo number that nothing has", unknown_memo_number, DCP_FORMAT, DCP_OK},
    {"an empty stack", empty_stack, DCP_FORMAT, DCP_OK},
    {"no mark", no_mark, DCP_FORMAT, DCP_OK},
    {"no end", no_stop, DCP_FORMAT, DCP_OK},
    {"an unknown opcode", unknown_opcode, DCP_FORMAT, DCP_OK},
    {"an extension", extension_opcode, DCP_FORMAT, DCP_OK},
    {"protocol 9", newer_protocol, DCP_FORMAT, DCP_OK},
    {"more than one value", two_values, DCP_FORMAT, DCP_OK},
    {"bad UTF-8", bad_utf8, DCP_FORMAT, DCP_OK},
    {"a pair without a value", odd_pairs, DCP_FORMAT, DCP_OK},
    {"no bytes at all", nothing, DCP_FORMAT, DCP_OK},
    {"noise", noise, DCP_FORMAT, DCP_OK},
    {"zeros", zeros, DCP_FORMAT, DCP_OK},
};
#define N_PICKLES (sizeof pickles / sizeof pickles[0])

static dcp__buf build(build_fn fn)
{
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    fn(&b);
    assert_false(b.failed);
    return b;
}

static void start(place *p, values *before)
{
    const md_form good = {.record_length = 900, .step_length = SMALL_STEP_BYTES};
    unlink(TRACE);
    place_make(p);
    small_put(p->st, &good);
    *before = values_of(NULL, p->dir.path);
}

static void finish(place *p, values *before)
{
    values_free(before);
    place_remove(p);
    assert_int_not_equal(access(TRACE, F_OK), 0);
    assert_no_failures();
}

static void hostile__as_metadata(void **state)
{
    (void)state;
    place p;
    values before;
    start(&p, &before);
    for (size_t i = 0; i < N_PICKLES; i++) {
        dcp__buf b = build(pickles[i].build);
        outcome want = {
            .open = pickles[i].as_metadata ? pickles[i].as_metadata : DCP_FORMAT, .file = ".metadata", .at = ANY_OFFSET};
        set_file(p.st, ".metadata", b.data, b.len);
        check_outcome(&p, "", &before, pickles[i].name, &want);
        dcp__buf_reset(&b);
    }
    finish(&p, &before);
}

static void hostile__as_the_record_of_an_object(void **state)
{
    (void)state;
    place p;
    values before;
    start(&p, &before);
    for (size_t i = 0; i < N_PICKLES; i++) {
        dcp__buf b = build(pickles[i].build);
        dcp_status status = pickles[i].as_object;
        outcome want = {
            .read = status, .verify = status, .file = SMALL_FIRST, .item = "step", .at = ANY_OFFSET, .read_at = ANY_OFFSET};
        small_put_step(p.st, &b);
        check_outcome(&p, "", &before, pickles[i].name, status ? &want : &(outcome){.item = "step"});
        dcp__buf_reset(&b);
    }
    finish(&p, &before);
}

static void put_torch_file(place *p, const dcp__buf *pickle)
{
    zb_zip z = small_archive(pickle, NULL, 0, pickle->len + 700);
    set_file(p->st, "file.pt", z.bytes, z.len);
    free(z.bytes);
}

static void hostile__as_a_torch_save_file(void **state)
{
    (void)state;
    place p;
    values before;
    start(&p, &before);
    for (size_t i = 0; i < N_PICKLES; i++) {
        dcp__buf b = build(pickles[i].build);
        outcome want = {.open = pickles[i].as_object, .file = "file.pt", .at = ANY_OFFSET};
        put_torch_file(&p, &b);
        check_outcome(&p, "file.pt", &before, pickles[i].name, &want);
        dcp__buf_reset(&b);
    }
    finish(&p, &before);
}

/* ---- bombs: data, but more of it than can be printed ---- */

static void check_bomb(const place *p, const char *path)
{
    meter m;
    char full[512];
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *v;
    snprintf(full, sizeof full, "%s/%s", p->dir.path, path);
    meter_start(&m);
    assert_int_equal(dcp_checkpoint_open(m.ctx, full, NULL, &ck, &err), DCP_OK);
    const dcp_item *item = dcp_checkpoint_item(ck, dcp_checkpoint_count(ck) - 1);
    assert_int_equal(dcp_read_object(ck, item, &v, &err), DCP_OK);
    assert_true(m.peak < 2 << 20);
    char *text;
    size_t n;
    assert_int_equal(dcp_value_repr(v, 100000, &text, &n, &err), DCP_LIMIT);
    assert_true(m.peak < 2 << 20);
    dcp_value_free(v);
    dcp_checkpoint_close(ck);
    meter_stop(&m);
}

static void check_tool_on_bomb(const place *p, const char *path, const char *fqn)
{
    static const char *const commands[] = {"hash", "hash --json", "cat", "cat --json"};
    for (size_t i = 0; i < 4; i++) {
        tool_run r =
            tool("%s '%s/%s' %s%s%s", commands[i], p->dir.path, path, i < 2 ? "" : "'", i < 2 ? "" : fqn, i < 2 ? "" : "'");
        assert_int_equal(r.status, 1);
        assert_int_equal(r.out_len, 0);
        assert_non_null(strstr(r.err, fqn));
        tool_free(&r);
    }
}

static void bombs__are_read_and_not_printed(void **state)
{
    (void)state;
    static const build_fn bombs[] = {memo_bomb, tuple_bomb};
    place p;
    values before;
    start(&p, &before);
    for (size_t i = 0; i < 2; i++) {
        dcp__buf b = build(bombs[i]);
        const outcome refused = {.open = DCP_FORMAT, .file = ".metadata", .at = ANY_OFFSET};
        small_put_step(p.st, &b);
        check_bomb(&p, "");
        check_tool_on_bomb(&p, "", "step");
        put_torch_file(&p, &b);
        check_bomb(&p, "file.pt");
        file_bytes good = get_file(p.st, ".metadata");
        set_file(p.st, ".metadata", b.data, b.len);
        check_outcome(&p, "", &before, "bomb", &refused);
        set_file(p.st, ".metadata", good.data, good.n);
        free(good.data);
        dcp__buf_reset(&b);
    }
    finish(&p, &before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hostile__as_metadata),
        cmocka_unit_test(hostile__as_the_record_of_an_object),
        cmocka_unit_test(hostile__as_a_torch_save_file),
        cmocka_unit_test(bombs__are_read_and_not_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
