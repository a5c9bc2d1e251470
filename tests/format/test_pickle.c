/* The pickle machine. Streams are given as bytes; what they mean is the published description of Python's pickletools. */
#include <stdio.h>
#include <stdlib.h>

#include "support/failing_alloc.h"
#include "support/pickle_asm.h"

#include "format/pickle.h"

static dcp_status read_n(const void *bytes, size_t n, dcp__pickle *p, dcp_error *err)
{
    dcp__source src = dcp__source_memory(bytes, n);
    return dcp__pickle_read(dcp__context(NULL), &src, 0, NULL, p, err);
}
#define read_literal(literal, p, err) read_n(literal, sizeof(literal) - 1, p, err)

/* Reads through copies, as from a file: the window slides. */
static dcp_status read_copy(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    memcpy(buf, (const char *)self->user + offset, n);
    return DCP_OK;
}
static dcp__source copying_source(const void *bytes, size_t n)
{
    return (dcp__source){.read = read_copy, .size = n, .user = (void *)(uintptr_t)bytes};
}

static void refuse_n(const void *bytes, size_t n, dcp_status code, uint64_t offset)
{
    dcp__pickle p;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source both[] = {dcp__source_memory(bytes, n), copying_source(bytes, n)};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &both[i], 0, NULL, &p, &err), code);
        assert_int_equal(err.code, code);
        assert_int_equal(err.offset, offset);
    }
}
#define refuse(literal, code, offset) refuse_n(literal, sizeof(literal) - 1, code, offset)

static void int_is(const char *bytes, size_t n, int64_t expected)
{
    dcp__pickle p;
    int64_t value = 0;
    assert_int_equal(read_n(bytes, n, &p, NULL), DCP_OK);
    assert_int_equal(dcp__pv_kind(p.root), DCP__P_INT);
    assert_true(dcp__pv_int(p.root, &value));
    assert_int_equal(value, expected);
    dcp__pickle_reset(&p);
}
#define INT_IS(literal, expected) int_is(literal, sizeof(literal) - 1, expected)

static void integers__all_widths(void **state)
{
    (void)state;
    INT_IS("\x80\x02K\xff.", 255);
    INT_IS("\x80\x02M\xff\xff.", 65535);
    INT_IS("\x80\x02J\xfd\xff\xff\xff.", -3);
    INT_IS("\x80\x04\x8a\x00.", 0);
    INT_IS("\x80\x04\x8a\x05\x05\x00\x00\x80\x00.", 0x80000005);
    INT_IS("\x80\x04\x8a\x01\xff.", -1);
    INT_IS("\x80\x04\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f.", INT64_MAX);
    INT_IS("\x80\x04\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", INT64_MIN);
    INT_IS("\x80\x04\x8a\x0a\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00.", 5);
    INT_IS("\x80\x04\x8b\x02\x00\x00\x00\x34\x12.", 0x1234);
}

static void integer_of_80_bits__keeps_its_bytes(void **state)
{
    (void)state;
    dcp__pickle p;
    int64_t value;
    assert_int_equal(read_literal("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", &p, NULL), DCP_OK);
    assert_int_equal(dcp__pv_kind(p.root), DCP__P_INT);
    assert_false(dcp__pv_int(p.root, &value));
    dcp_str bytes = dcp__pv_text(p.root);
    assert_int_equal(bytes.len, 10);
    assert_memory_equal(bytes.ptr, "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10);
    dcp__pickle_reset(&p);
}

static void scalars__each_kind(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    assert_int_equal(read_literal("\x80\x04(NI01\n.", &p, NULL), DCP_FORMAT); /* protocol 0 */
    assert_int_equal(
        read_literal("\x80\x04(N\x88\x89G?\xb9\x99\x99\x99\x99\x99\x9a"
                     "C\x02\x00\xff\x8e\x01\x00\x00\x00\x00\x00\x00\x00zB\x01\x00\x00\x00y\x96\x01\x00\x00\x00\x00\x00\x00"
                     "\x00xU\x02hit.",
                     &p, NULL),
        DCP_OK);
    const dcp__pv *items = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 9);
    assert_int_equal(items[0], DCP__PV_NONE);
    assert_int_equal(items[1], DCP__PV_TRUE);
    assert_int_equal(items[2], DCP__PV_FALSE);
    assert_true(dcp__pv_float(items[3]) == 0.1);
    assert_int_equal(dcp__pv_kind(items[4]), DCP__P_BYTES);
    assert_memory_equal(dcp__pv_text(items[4]).ptr, "\x00\xff", 3);
    assert_int_equal(dcp__pv_kind(items[5]), DCP__P_BYTES);
    assert_int_equal(dcp__pv_kind(items[6]), DCP__P_BYTES);
    assert_int_equal(dcp__pv_kind(items[7]), DCP__P_BYTEARRAY);
    assert_string_equal(dcp__pv_text(items[8]).ptr, "hi");
    dcp__pickle_reset(&p);
}

static void containers__single_and_grouped_additions(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    /* [ {1: 2, 3: 4}, [5, 6, 7], {8}, frozenset({9}) ] */
    assert_int_equal(
        read_literal("\x80\x04](}K\x01K\x02s(K\x03K\x04u]K\x05\x61(K\x06K\x07\x65\x8f(K\x08\x90(K\x09\x91\x65.", &p, NULL),
        DCP_OK);
    const dcp__pv *top = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 4);
    dcp__pv_items(top[0], &n);
    assert_int_equal(n, 4);
    assert_int_equal(dcp__pv_kind(top[0]), DCP__P_DICT);
    dcp__pv_items(top[1], &n);
    assert_int_equal(n, 3);
    assert_int_equal(dcp__pv_kind(top[2]), DCP__P_SET);
    assert_int_equal(dcp__pv_kind(top[3]), DCP__P_FROZENSET);
    dcp__pickle_reset(&p);
}

static void tuples__of_every_length(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    assert_int_equal(read_literal("\x80\x04()K\x01\x85K\x01K\x02\x86K\x01K\x02K\x03\x87(K\x01K\x02K\x03K\x04t(tt.", &p, NULL),
                     DCP_OK);
    const dcp__pv *top = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 6);
    for (size_t i = 0; i < 5; i++) {
        const dcp__pv *inner = dcp__pv_items(top[i], &n);
        assert_int_equal(n, i);
        for (size_t k = 0; k < n; k++) {
            int64_t value;
            assert_true(dcp__pv_int(inner[k], &value));
            assert_int_equal(value, k + 1);
        }
    }
    dcp__pv_items(top[5], &n);
    assert_int_equal(n, 0);
    dcp__pickle_reset(&p);
}

static void memo__all_forms_give_the_same_node(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    /* MEMOIZE 0 and 1, BINGET, LONG_BINGET; then BINPUT over entry 0 */
    assert_int_equal(read_literal("\x80\x04(]\x94\x8c\x01z\x94h\x00j\x01\x00\x00\x00K\x07q\x00h\x00t.", &p, NULL), DCP_OK);
    const dcp__pv *top = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 6);
    assert_int_equal(top[0], top[2]);
    assert_int_equal(top[1], top[3]);
    assert_int_equal(top[4], top[5]);
    assert_true(dcp__pv_is_shared(top[0]));
    dcp__pickle_reset(&p);
}

static void memo__gaps_and_long_binput(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    assert_int_equal(read_literal("\x80\x02(]K\x01K\x02K\x03]r\x05\x00\x00\x00j\x05\x00\x00\x00t.", &p, NULL), DCP_OK);
    const dcp__pv *top = dcp__pv_items(p.root, &n);
    assert_int_equal(top[4], top[5]);
    assert_false(dcp__pv_is_shared(top[0]));
    dcp__pickle_reset(&p);
    refuse("\x80\x02(]K\x01K\x02K\x03]r\x05\x00\x00\x00h\x02t.", DCP_FORMAT, 16);
}

static void memo__bad_numbers_are_refused(void **state)
{
    (void)state;
    refuse("\x80\x04h\x00.", DCP_FORMAT, 2);
    refuse("\x80\x04Kz\x94j\x01\x00\x00\x00.", DCP_FORMAT, 5);
    refuse("\x80\x02]r\xff\xff\xff\xff.", DCP_FORMAT, 3);
    refuse("\x80\x04\x94.", DCP_FORMAT, 2);
    refuse("\x80\x04](\x94.", DCP_FORMAT, 4); /* nothing above the mark */
    refuse("\x80\x04(]K\x01K\x02K\x03]q\x02\x94t.", DCP_FORMAT, 13);
}

static void stack__pop_dup_and_marks(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    assert_int_equal(read_literal("\x80\x04(K\x01\x30K\x02\x32(K\x03K\x04\x31((0t.", &p, NULL), DCP_FORMAT); /* a mark is left */
    assert_int_equal(read_literal("\x80\x04(K\x01\x30K\x02\x32(K\x03K\x04\x31(0t.", &p, NULL), DCP_OK);
    dcp__pv_items(p.root, &n);
    assert_int_equal(n, 2);
    dcp__pickle_reset(&p);
    refuse("\x80\x04\x30.", DCP_FORMAT, 2);
    refuse("\x80\x04\x31.", DCP_FORMAT, 2);
    refuse("\x80\x04t.", DCP_FORMAT, 2);
    refuse("\x80\x04.", DCP_FORMAT, 2);
    refuse("\x80\x04NN.", DCP_FORMAT, 4);
    refuse("\x80\x04(K\x01(\x86t.", DCP_FORMAT, 6); /* operands on the far side of a mark */
    refuse("\x80\x04}(K\x01u.", DCP_FORMAT, 6);     /* key without value */
    refuse("\x80\x04](K\x01K\x02u.", DCP_FORMAT, 8);
    refuse("\x80\x04K\x01K\x02\x61.", DCP_FORMAT, 6);
}

static void objects__keep_how_python_would_make_them(void **state)
{
    (void)state;
    dcp__pickle p;
    /* os.system("x") is kept as what it is */
    static const char stream[] = "\x80\x02N0cos\nsystem\nq\x00X\x01\x00\x00\x00xq\x01\x85R.";
    assert_int_equal(read_literal(stream, &p, NULL), DCP_OK);
    const dcp__pobject *o = dcp__pv_object(p.root);
    assert_non_null(o);
    assert_int_equal(o->form, DCP__PFORM_REDUCE);
    assert_true(dcp__pv_is_global(o->callable, "os", "system"));
    assert_int_equal(dcp__pv_kind(o->args), DCP__P_TUPLE);
    assert_int_equal(o->start, 4);
    assert_int_equal(o->end, sizeof(stream) - 2);
    assert_int_equal(p.end, sizeof(stream) - 1);
    assert_int_equal(p.protocol, 2);
    dcp__pickle_reset(&p);
}

static void objects__state_items_and_pairs(void **state)
{
    (void)state;
    dcp__pickle p;
    size_t n;
    assert_int_equal(read_literal("\x80\x04\x8c\x01m\x8c\x01n\x93)\x81N\x62(K\x01K\x02\x65K\x03\x61K\x04K\x05s}b.", &p, NULL),
                     DCP_OK);
    const dcp__pobject *o = dcp__pv_object(p.root);
    assert_int_equal(o->form, DCP__PFORM_NEWOBJ);
    assert_int_equal(dcp__pv_kind(o->state), DCP__P_DICT); /* of the later BUILD */
    dcp__pv_items(o->items, &n);
    assert_int_equal(n, 3);
    dcp__pv_items(o->pairs, &n);
    assert_int_equal(n, 2);
    dcp__pickle_reset(&p);
    assert_int_equal(read_literal("\x80\x04\x8c\x01m\x8c\x01n\x93)}\x92.", &p, NULL), DCP_OK);
    assert_int_equal(dcp__pv_object(p.root)->form, DCP__PFORM_NEWOBJ_EX);
    dcp__pickle_reset(&p);
    assert_int_equal(read_literal("\x80\x02X\x01\x00\x00\x00zQ.", &p, NULL), DCP_OK);
    assert_int_equal(dcp__pv_object(p.root)->form, DCP__PFORM_PERSID);
    assert_string_equal(dcp__pv_text(dcp__pv_object(p.root)->args).ptr, "z");
    dcp__pickle_reset(&p);
}

static void objects__wrong_operands_are_refused(void **state)
{
    (void)state;
    refuse("\x80\x04NNR.", DCP_FORMAT, 4);
    refuse("\x80\x04NN\x81.", DCP_FORMAT, 4);
    refuse("\x80\x04N)N\x92.", DCP_FORMAT, 5);
    refuse("\x80\x04NN\x62.", DCP_FORMAT, 4);
    refuse("\x80\x04NN\x93.", DCP_FORMAT, 4);
    refuse("\x80\x02"
           "cabc\nde",
           DCP_FORMAT, 3);
}

static void opcodes__others_are_refused_with_their_position(void **state)
{
    (void)state;
    static const char accepted[] =
        "()."
        "012BCGJKMNQRTUX]abcehjqrstu}\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93"
        "\x94\x95\x96";
    for (int op = 0; op < 256; op++) {
        if (!memchr(accepted, op, sizeof accepted - 1)) {
            char stream[16] = {(char)0x80, 4, 'N', (char)op, 'N', '.'};
            refuse_n(stream, sizeof stream, DCP_FORMAT, 3);
        }
    }
    refuse("\x80\x01N.", DCP_FORMAT, 0);
    refuse("\x80\x06N.", DCP_FORMAT, 0);
    refuse("", DCP_FORMAT, 0);
}

static void strings__utf8_is_checked(void **state)
{
    (void)state;
    dcp__pickle p;
    assert_int_equal(read_literal("\x80\x04\x8c\x03\xed\xa0\x80.", &p, NULL), DCP_OK); /* a lone surrogate */
    assert_int_equal(dcp__pv_text(p.root).len, 3);
    dcp__pickle_reset(&p);
    refuse("\x80\x04\x8c\x02\xc0\x80.", DCP_FORMAT, 2);
    refuse("\x80\x04NX\x01\x00\x00\x00\xff.", DCP_FORMAT, 3);
}

static void lengths__beyond_the_end_are_refused_before_memory_is_taken(void **state)
{
    (void)state;
    refuse("\x80\x04\x8c\x09"
           "abc",
           DCP_FORMAT, 4);
    refuse("\x80\x04X\xff\xff\xff\x7f"
           "abc",
           DCP_FORMAT, 7);
    refuse("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff"
           "abc",
           DCP_FORMAT, 11);
    refuse("\x80\x04\x8b\xff\xff\xff\xff"
           "abc",
           DCP_FORMAT, 7);
    refuse("\x80\x04J\x00\x00", DCP_FORMAT, 2);
}

static void text__longer_than_the_window(void **state)
{
    (void)state;
    enum { LONG = 700000 };
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    pk_raw(&b, "\x80\x04(");
    for (int i = 0; i < 40000; i++) {
        pk_int(&b, i * 7); /* so that the windows end within opcodes */
    }
    char *text = malloc(LONG);
    assert_non_null(text);
    for (int i = 0; i < LONG; i++) {
        text[i] = (char)('a' + i % 26);
    }
    pk_str_n(&b, text, LONG);
    pk_raw(&b, "K\x05t.");
    dcp__source src = copying_source(b.data, b.len);
    dcp__pickle p;
    size_t n;
    assert_int_equal(dcp__pickle_read(dcp__context(NULL), &src, 0, NULL, &p, NULL), DCP_OK);
    const dcp__pv *items = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 40002);
    for (int i = 0; i < 40000; i++) {
        int64_t value;
        assert_true(dcp__pv_int(items[i], &value) && value == i * 7);
    }
    assert_int_equal(dcp__pv_text(items[40000]).len, LONG);
    assert_memory_equal(dcp__pv_text(items[40000]).ptr, text, LONG);
    dcp__pickle_reset(&p);
    free(text);
    dcp__buf_reset(&b);
}

static void string__longer_than_the_limit(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    dcp_error err = DCP_ERROR_INIT;
    dcp__pickle p;
    opts.limits.max_string_bytes = 3;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    dcp__source src = dcp__source_memory("\x80\x04N\x8c\x04"
                                         "abcd0.",
                                         11);
    assert_int_equal(dcp__pickle_read(ctx, &src, 0, NULL, &p, &err), DCP_LIMIT);
    assert_int_equal(err.offset, 3);
    dcp_context_free(ctx);
}

static void memory__stays_within_its_limit(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    dcp__pickle p;
    dcp__buf b;
    opts.limits.max_parse_bytes = 1 << 20;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    static const char *const floods[] = {"N", "(", "}", ")\x85\x94"};
    for (size_t i = 0; i < 4; i++) {
        dcp__buf_init(&b, dcp__context(NULL));
        pk_raw(&b, "\x80\x04(");
        for (int k = 0; k < 300000; k++) {
            dcp__buf_put(&b, floods[i], strlen(floods[i]));
        }
        pk_raw(&b, "t.");
        dcp__source src = dcp__source_memory(b.data, b.len);
        assert_int_equal(dcp__pickle_read(ctx, &src, 0, NULL, &p, NULL), DCP_LIMIT);
        dcp__buf_reset(&b);
    }
    dcp_context_free(ctx);
}

static void nest(dcp__buf *b, const char *open, const char *close, int depth)
{
    dcp__buf_init(b, dcp__context(NULL));
    pk_raw(b, "\x80\x04");
    for (int i = 0; i < depth; i++) {
        dcp__buf_put(b, open, strlen(open));
    }
    pk_op(b, 'N');
    for (int i = 0; i < depth; i++) {
        dcp__buf_put(b, close, strlen(close));
    }
    pk_op(b, '.');
}

static void depth__exactly_the_limit_is_allowed(void **state)
{
    (void)state;
    static const struct {
        const char *open, *close;
    } forms[] = {{"", "\x85"}, {"]", "a"}, {"]N0(", "e"}, {"}N", "s"}};
    for (size_t i = 0; i < 4; i++) {
        dcp__pickle p;
        dcp__buf b;
        nest(&b, forms[i].open, forms[i].close, 256);
        assert_int_equal(read_n(b.data, b.len, &p, NULL), DCP_OK);
        dcp__pickle_reset(&p);
        dcp__buf_reset(&b);
        nest(&b, forms[i].open, forms[i].close, 257);
        refuse_n(b.data, b.len, DCP_LIMIT, 0);
        dcp__buf_reset(&b);
        nest(&b, forms[i].open, forms[i].close, 100000);
        refuse_n(b.data, b.len, DCP_LIMIT, 0);
        dcp__buf_reset(&b);
    }
}

/* The deep part hangs below a node that was looked at from a shallow place first. */
static void depth__through_a_shared_node(void **state)
{
    (void)state;
    dcp__pickle p;
    dcp__buf b;
    for (int extra = 0; extra < 2; extra++) {
        dcp__buf_init(&b, dcp__context(NULL));
        pk_raw(&b, "\x80\x04(N");
        for (int i = 0; i < 200; i++) {
            pk_op(&b, 0x85);
        }
        pk_raw(&b, "\x94h\x00");
        for (int i = 0; i < 55 + extra; i++) {
            pk_op(&b, 0x85);
        }
        pk_raw(&b, "t.");
        assert_int_equal(read_n(b.data, b.len, &p, NULL), extra ? DCP_LIMIT : DCP_OK);
        if (!extra) {
            dcp__pickle_reset(&p);
        }
        dcp__buf_reset(&b);
    }
}

static void recursion__is_refused(void **state)
{
    (void)state;
    refuse("\x80\x04]\x94h\x00\x61.", DCP_FORMAT, 0);                           /* l = []; l.append(l) */
    refuse("\x80\x04}\x94K\x01h\x00s.", DCP_FORMAT, 0);                         /* d[1] = d */
    refuse("\x80\x04]\x94h\x00\x85\x61.", DCP_FORMAT, 0);                       /* l.append((l,)) */
    refuse("\x80\x04]\x94K\x01\x61}\x94K\x02h\x00s\x61.", DCP_FORMAT, 0);       /* l.append({2: l}) */
    refuse("\x80\x04\x8c\x01m\x8c\x01n\x93)\x81\x94h\x00\x62.", DCP_FORMAT, 0); /* o.__dict__ = o */
}

/* 2 to the power of 60 leaves, in 60 lists. */
static void memo_bomb__costs_its_length(void **state)
{
    (void)state;
    dcp__pickle p;
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    pk_raw(&b, "\x80\x04]\x94");
    for (int i = 0; i < 60; i++) {
        pk_raw(&b, "h");
        pk_op(&b, i);
        pk_raw(&b, "\x86\x94");
    }
    pk_op(&b, '.');
    assert_int_equal(read_n(b.data, b.len, &p, NULL), DCP_OK);
    assert_true(p.arena.used_bytes < 100000);
    size_t depth = 0, n;
    for (dcp__pv v = p.root; dcp__pv_kind(v) == DCP__P_TUPLE; depth++) {
        const dcp__pv *items = dcp__pv_items(v, &n);
        assert_int_equal(items[0], items[1]);
        assert_true(dcp__pv_is_shared(items[0]));
        v = items[0];
    }
    assert_int_equal(depth, 60);
    dcp__pickle_reset(&p);
    dcp__buf_reset(&b);
}

static void pickle__in_the_middle_of_a_source(void **state)
{
    (void)state;
    static const char bytes[] = "xyz\x80\x02K\x05.\x80\x02K\x06.";
    dcp__source both[] = {dcp__source_memory(bytes, sizeof bytes - 1), copying_source(bytes, sizeof bytes - 1)};
    for (int i = 0; i < 2; i++) {
        dcp__pickle p;
        int64_t value;
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &both[i], 3, NULL, &p, NULL), DCP_OK);
        assert_int_equal(p.end, 8);
        dcp__pickle_reset(&p);
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &both[i], 8, NULL, &p, NULL), DCP_OK);
        assert_true(dcp__pv_int(p.root, &value) && value == 6);
        dcp__pickle_reset(&p);
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &both[i], 13, NULL, &p, &err), DCP_FORMAT);
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &both[i], 14, NULL, &p, &err), DCP_FORMAT);
    }
}

/* ---- hooks ---- */

typedef struct counter {
    int n_built, n_restarts;
} counter;

/* Replaces what is built by a number. */
static dcp_status replace_built(void *user, dcp__pmachine *m, dcp__pv object, const dcp__pstate *state, dcp__pv *out,
                                dcp_error *err)
{
    (void)m;
    (void)state;
    (void)err;
    counter *c = user;
    if (!dcp__pv_is_shared(object)) {
        *out = dcp__pv_of_client((uint64_t)c->n_built);
    }
    c->n_built++;
    return DCP_OK;
}
static void count_restart(void *user)
{
    counter *c = user;
    c->n_restarts++;
    c->n_built = 0;
}

static const char built_twice[] = "\x80\x04(\x8c\x01m\x8c\x01n\x93\x94)\x81\x94}\x94(K\x01K\x02u\x62"
                                  "h\x00)\x81\x94}\x94(K\x01K\x02u\x62h\x01";

static void hooks__replaced_objects_are_replaced_in_the_memo(void **state)
{
    (void)state;
    char stream[sizeof built_twice + 2];
    memcpy(stream, built_twice, sizeof built_twice - 1);
    memcpy(stream + sizeof built_twice - 1, "t.", 3);
    counter c = {0, 0};
    dcp__pickle_hooks hooks = {.user = &c, .build = replace_built, .restart = count_restart};
    dcp__source src = dcp__source_memory(stream, sizeof built_twice + 1);
    dcp__pickle p;
    size_t n;
    assert_int_equal(dcp__pickle_read(dcp__context(NULL), &src, 0, &hooks, &p, NULL), DCP_OK);
    const dcp__pv *items = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 3);
    assert_int_equal(items[0], dcp__pv_of_client(0));
    assert_int_equal(items[1], dcp__pv_of_client(1));
    assert_int_equal(items[2], dcp__pv_of_client(0));
    assert_int_equal(c.n_restarts, 0);
    dcp__pickle_reset(&p);
}

static void hooks__fetching_what_was_given_back_reads_again(void **state)
{
    (void)state;
    char stream[sizeof built_twice + 4];
    memcpy(stream, built_twice, sizeof built_twice - 1);
    memcpy(stream + sizeof built_twice - 1, "h\x02t.", 5); /* the dict that was the first one's state */
    counter c = {0, 0};
    dcp__pickle_hooks hooks = {.user = &c, .build = replace_built, .restart = count_restart};
    dcp__source src = dcp__source_memory(stream, sizeof built_twice + 3);
    dcp__pickle p;
    size_t n;
    assert_int_equal(dcp__pickle_read(dcp__context(NULL), &src, 0, &hooks, &p, NULL), DCP_OK);
    const dcp__pv *items = dcp__pv_items(p.root, &n);
    assert_int_equal(n, 4);
    assert_int_equal(items[1], dcp__pv_of_client(1));
    assert_int_equal(dcp__pv_kind(items[3]), DCP__P_DICT);
    dcp__pv_items(items[3], &n);
    assert_int_equal(n, 2);
    assert_int_equal(c.n_restarts, 1);
    assert_int_equal(c.n_built, 2);
    dcp__pickle_reset(&p);
}

static dcp_status reduce_to_ints(void *user, dcp__pmachine *m, dcp__pv callable, const dcp__pv *args, size_t n, dcp__pv *out,
                                 dcp_error *err)
{
    (void)user;
    (void)callable;
    return n == 1 ? dcp__pmachine_ints(m, args[0], out, err) : DCP_OK;
}

static void hooks__ints(void **state)
{
    (void)state;
    dcp__pickle_hooks hooks = {.reduce = reduce_to_ints};
    dcp__pickle p;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source good = dcp__source_memory("\x80\x04N(K\x01J\xff\xff\xff\xff\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ft\x85R.", 26);
    assert_int_equal(dcp__pickle_read(dcp__context(NULL), &good, 0, &hooks, &p, NULL), DCP_OK);
    assert_int_equal(dcp__pv_kind(p.root), DCP__P_INTS);
    const dcp__pints *ints = (const dcp__pints *)dcp__pv_node(p.root);
    assert_int_equal(ints->node.count, 3);
    assert_int_equal(ints->values[0], 1);
    assert_int_equal(ints->values[1], -1);
    assert_int_equal(ints->values[2], INT64_MAX);
    dcp__pickle_reset(&p);
    dcp__source bad = dcp__source_memory("\x80\x04NK\x01N\x86\x85R.", 10);
    assert_int_equal(dcp__pickle_read(dcp__context(NULL), &bad, 0, &hooks, &p, &err), DCP_FORMAT);
    assert_int_equal(err.offset, 8);
}

/* ---- opcodes that are taken together ---- */

/* The kinds of hooks: none, such that leave all to the machine, such that take everything. */
static dcp_status decline_reduce(void *user, dcp__pmachine *m, dcp__pv callable, const dcp__pv *args, size_t n, dcp__pv *out,
                                 dcp_error *err)
{
    (void)user, (void)m, (void)callable, (void)args, (void)n, (void)out, (void)err;
    return DCP_OK;
}
static dcp_status take_reduce(void *user, dcp__pmachine *m, dcp__pv callable, const dcp__pv *args, size_t n, dcp__pv *out,
                              dcp_error *err)
{
    (void)user, (void)m, (void)callable, (void)err;
    *out = n ? args[0] : DCP__PV_NONE;
    return DCP_OK;
}
static dcp_status decline_build(void *user, dcp__pmachine *m, dcp__pv object, const dcp__pstate *state, dcp__pv *out,
                                dcp_error *err)
{
    (void)user, (void)m, (void)object, (void)state, (void)out, (void)err;
    return DCP_OK;
}
/* The last value of the state takes the object's place. */
static dcp_status take_build(void *user, dcp__pmachine *m, dcp__pv object, const dcp__pstate *state, dcp__pv *out, dcp_error *err)
{
    (void)user, (void)m, (void)err;
    if (!dcp__pv_is_shared(object) && state->n) {
        *out = state->pairs[state->n - 1];
    }
    return DCP_OK;
}
static const dcp__pickle_hooks all_hooks[] = {
    {.user = NULL},
    {.reduce = decline_reduce, .build = decline_build},
    {.reduce = take_reduce, .build = take_build},
};

/* Whether two graphs are equal. Where objects begin and end is a matter of the stream. */
static void assert_same(dcp__pv a, dcp__pv b)
{
    size_t n_a, n_b;
    assert_int_equal(dcp__pv_kind(a), dcp__pv_kind(b));
    if (!dcp__pv_is_node(a)) {
        assert_int_equal(a, b);
        return;
    }
    const dcp__pobject *o = dcp__pv_object(a), *p = dcp__pv_object(b);
    if (o) {
        const dcp__pv parts[][2] = {{o->callable, p->callable}, {o->args, p->args},   {o->kwargs, p->kwargs},
                                    {o->state, p->state},       {o->items, p->items}, {o->pairs, p->pairs}};
        assert_int_equal(o->form, p->form);
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            assert_int_equal(parts[i][0] != 0, parts[i][1] != 0);
            if (parts[i][0]) {
                assert_same(parts[i][0], parts[i][1]);
            }
        }
        return;
    }
    assert_int_equal(dcp__pv_text(a).len, dcp__pv_text(b).len);
    const dcp__pv *x = dcp__pv_items(a, &n_a), *y = dcp__pv_items(b, &n_b);
    assert_int_equal(n_a, n_b);
    for (size_t i = 0; i < n_a; i++) {
        assert_same(x[i], y[i]);
    }
}

/* Both streams mean the same for every kind of hooks, from memory and through a sliding window. */
static void means_the_same(const char *a, size_t n_a, const char *b, size_t n_b)
{
    for (size_t i = 0; i < sizeof all_hooks / sizeof all_hooks[0]; i++) {
        for (int copied = 0; copied < 2; copied++) {
            dcp__pickle p, q;
            dcp__source one = copied ? copying_source(a, n_a) : dcp__source_memory(a, n_a);
            dcp__source other = copied ? copying_source(b, n_b) : dcp__source_memory(b, n_b);
            assert_int_equal(dcp__pickle_read(dcp__context(NULL), &one, 0, &all_hooks[i], &p, NULL), DCP_OK);
            assert_int_equal(dcp__pickle_read(dcp__context(NULL), &other, 0, &all_hooks[i], &q, NULL), DCP_OK);
            assert_same(p.root, q.root);
            dcp__pickle_reset(&p);
            dcp__pickle_reset(&q);
        }
    }
}
#define MEANS_THE_SAME(a, b) means_the_same(a, sizeof(a) - 1, b, sizeof(b) - 1)

#define GLOBAL "\x8c\x01m\x8c\x01n\x93"

/* "N0" pushes None and takes it off again: it changes nothing but that opcodes are not neighbours. */
static void neighbours__mean_what_each_means_alone(void **state)
{
    (void)state;
    /* torch.Size((1, 2)), with and without entries in the memo that are fetched afterwards */
    MEANS_THE_SAME("\x80\x04" GLOBAL "K\x01K\x02\x86\x94\x85\x94R\x94.",
                   "\x80\x04" GLOBAL "K\x01K\x02\x86\x94\x85N0\x94N0R\x94.");
    MEANS_THE_SAME("\x80\x04(" GLOBAL "K\x01K\x02\x86\x94\x85\x94R\x94h\x00h\x01h\x02t.",
                   "\x80\x04(" GLOBAL "K\x01K\x02\x86\x94\x85N0\x94N0R\x94h\x00h\x01h\x02t.");
    MEANS_THE_SAME("\x80\x04(" GLOBAL "K\x01\x85\x94R\x94h\x01t.", "\x80\x04(" GLOBAL "K\x01\x85N0\x94R\x94h\x01t.");
    /* an object with a state; also one that is fetched, whose state is fetched, that is shared, that is empty */
    MEANS_THE_SAME("\x80\x04" GLOBAL ")\x81\x94}\x94(K\x01K\x02K\x03K\x04ub.",
                   "\x80\x04" GLOBAL ")N0\x81\x94}\x94(K\x01K\x02K\x03K\x04uN0b.");
    MEANS_THE_SAME("\x80\x04(" GLOBAL ")\x81\x94}\x94(K\x01K\x02ubh\x00h\x01h\x00t.",
                   "\x80\x04(" GLOBAL ")N0\x81\x94}\x94(K\x01K\x02uN0bh\x00h\x01h\x00t.");
    MEANS_THE_SAME("\x80\x04(" GLOBAL ")\x81\x94}\x94\x30h\x01(K\x01K\x02ubh\x01t.",
                   "\x80\x04(" GLOBAL ")N0\x81\x94}\x94\x30h\x01(K\x01K\x02uN0bh\x01t.");
    MEANS_THE_SAME("\x80\x04" GLOBAL ")\x81}(ub.", "\x80\x04" GLOBAL ")\x81}(uN0b.");
    MEANS_THE_SAME("\x80\x04" GLOBAL ")\x81}(K\x01K\x02u(K\x03K\x04ub.",
                   "\x80\x04" GLOBAL ")\x81}(K\x01K\x02uN0(K\x03K\x04uN0b.");
    /* the pairs of an object, and its state */
    MEANS_THE_SAME("\x80\x04" GLOBAL ")\x81(K\x01K\x02u}(K\x03K\x04ub.",
                   "\x80\x04" GLOBAL ")\x81(K\x01K\x02uN0}(K\x03K\x04uN0b.");
}

static void refuse_hooked(const char *bytes, size_t n, uint64_t offset)
{
    for (size_t i = 0; i < sizeof all_hooks / sizeof all_hooks[0]; i++) {
        dcp__pickle p;
        dcp_error err = DCP_ERROR_INIT;
        dcp__source src = dcp__source_memory(bytes, n);
        assert_int_equal(dcp__pickle_read(dcp__context(NULL), &src, 0, &all_hooks[i], &p, &err), DCP_FORMAT);
        assert_int_equal(err.offset, offset);
    }
}
#define REFUSE_HOOKED(literal, offset) refuse_hooked(literal, sizeof(literal) - 1, offset)

static void neighbours__errors_name_the_opcode_at_fault(void **state)
{
    (void)state;
    REFUSE_HOOKED("\x80\x04)\x81.", 3);                   /* NEWOBJ without a class */
    REFUSE_HOOKED("\x80\x04(" GLOBAL ")\x81", 12);        /* cut behind NEWOBJ */
    REFUSE_HOOKED("\x80\x04}(K\x01ub.", 6);               /* a key without a value */
    REFUSE_HOOKED("\x80\x04}(K\x01K\x02ub.", 9);          /* BUILD without an object */
    REFUSE_HOOKED("\x80\x04N(}(K\x01K\x02ub.", 11);       /* the object lies below a mark */
    REFUSE_HOOKED("\x80\x04(K\x01K\x02ub.", 7);           /* pairs without a dict */
    REFUSE_HOOKED("\x80\x04K\x01\x85\x94R.", 6);          /* REDUCE without a callable */
    REFUSE_HOOKED("\x80\x04N(K\x01\x85\x94R.", 8);        /* the callable lies below a mark */
    REFUSE_HOOKED("\x80\x04" GLOBAL "K\x01\x85\x94", 13); /* cut before REDUCE */
}

/* ---- all at once ---- */

static const char everything[] = "\x80\x05\x95\x00\x01\x00\x00\x00\x00\x00\x00("
                                 "N\x88\x89K\x01M\x02\x03J\x04\x05\x06\x07\x8a\x09\x01\x02\x03\x04\x05\x06\x07\x08\x09"
                                 "G?\xb9\x99\x99\x99\x99\x99\x9a\x8c\x02hi\x94h\x00X\x01\x00\x00\x00y\x94]\x94(K\x01K\x02\x65}"
                                 "\x94(K\x01K\x02u\x8f\x94(K\x01\x90"
                                 "(K\x01K\x02\x91)K\x01\x85\x94K\x01K\x02\x86K\x01K\x02K\x03\x87"
                                 "cmod\nname\nq\x06)R}b\x8c\x01m\x8c\x01n\x93)\x81h\x01Qt.";

static dcp_status read_everything(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp__source src = copying_source(everything, sizeof everything - 1);
    dcp__pickle p;
    dcp_status status = dcp__pickle_read(ctx, &src, 0, NULL, &p, err);
    if (status == DCP_OK) {
        dcp__pickle_reset(&p);
    }
    return status;
}

static void out_of_memory__anywhere(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(read_everything, NULL) > 5);
}

static void truncated_anywhere__fails(void **state)
{
    (void)state;
    for (size_t n = 0; n < sizeof everything - 1; n++) {
        dcp__pickle p;
        char *cut = malloc(n ? n : 1); /* of exactly that size, for the address sanitizer */
        assert_non_null(cut);
        memcpy(cut, everything, n);
        assert_int_equal(read_n(cut, n, &p, NULL), DCP_FORMAT);
        free(cut);
    }
}

static void mutations__never_crash(void **state)
{
    (void)state;
    const char *given = getenv("DCP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20240607, x = seed | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    for (int run = 0; run < 20000; run++) {
        char stream[sizeof everything];
        memcpy(stream, everything, sizeof stream);
        for (int k = 0; k <= run % 4; k++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            stream[x % (sizeof stream - 1)] = (char)(x >> 40);
        }
        dcp__pickle p;
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = read_n(stream, sizeof stream - 1, &p, &err);
        if (status == DCP_OK) {
            dcp__pickle_reset(&p);
        } else if (status != DCP_FORMAT && status != DCP_LIMIT) {
            fail_msg("seed %llu run %d: %s: %s", (unsigned long long)seed, run, dcp_status_name(status), err.message);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers__all_widths),
        cmocka_unit_test(integer_of_80_bits__keeps_its_bytes),
        cmocka_unit_test(scalars__each_kind),
        cmocka_unit_test(containers__single_and_grouped_additions),
        cmocka_unit_test(tuples__of_every_length),
        cmocka_unit_test(memo__all_forms_give_the_same_node),
        cmocka_unit_test(memo__gaps_and_long_binput),
        cmocka_unit_test(memo__bad_numbers_are_refused),
        cmocka_unit_test(stack__pop_dup_and_marks),
        cmocka_unit_test(objects__keep_how_python_would_make_them),
        cmocka_unit_test(objects__state_items_and_pairs),
        cmocka_unit_test(objects__wrong_operands_are_refused),
        cmocka_unit_test(opcodes__others_are_refused_with_their_position),
        cmocka_unit_test(strings__utf8_is_checked),
        cmocka_unit_test(lengths__beyond_the_end_are_refused_before_memory_is_taken),
        cmocka_unit_test(text__longer_than_the_window),
        cmocka_unit_test(string__longer_than_the_limit),
        cmocka_unit_test(memory__stays_within_its_limit),
        cmocka_unit_test(depth__exactly_the_limit_is_allowed),
        cmocka_unit_test(depth__through_a_shared_node),
        cmocka_unit_test(recursion__is_refused),
        cmocka_unit_test(memo_bomb__costs_its_length),
        cmocka_unit_test(pickle__in_the_middle_of_a_source),
        cmocka_unit_test(hooks__replaced_objects_are_replaced_in_the_memo),
        cmocka_unit_test(hooks__fetching_what_was_given_back_reads_again),
        cmocka_unit_test(hooks__ints),
        cmocka_unit_test(neighbours__mean_what_each_means_alone),
        cmocka_unit_test(neighbours__errors_name_the_opcode_at_fault),
        cmocka_unit_test(out_of_memory__anywhere),
        cmocka_unit_test(truncated_anywhere__fails),
        cmocka_unit_test(mutations__never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
