/* Values from pickles: every kind that formats.md 4 lists, by real files and by hand. */
#include "format/object.h"

#include <glob.h>
#include <jansson.h>
#include <stdio.h>

#include "format/record.h"
#include "state/value.h"
#include "support/failing_alloc.h"
#include "support/golden_records.h"

static dcp_context *ctx(void)
{
    return dcp__context(NULL);
}

static uint8_t *load(const char *name, const char *suffix, size_t *len)
{
    char path[512];
    snprintf(path, sizeof path, DCP_TEST_DIR "/data/objects/%s.%s", name, suffix);
    return golden_read_file(path, len);
}

/* An archive in memory, opened. */
typedef struct opened {
    uint8_t *bytes;
    dcp__archive archive;
    const dcp_value *value;
} opened;

static opened open_fixture(const char *name)
{
    opened o;
    size_t len;
    dcp_error err = DCP_ERROR_INIT;
    o.bytes = load(name, "pt", &len);
    dcp__source src = dcp__source_memory(o.bytes, len);
    if (dcp__archive_open(ctx(), &src, &o.archive, &err) != DCP_OK) {
        fail_msg("%s: %s", name, err.message);
    }
    o.value = o.archive.object.value;
    return o;
}

static void close_fixture(opened *o)
{
    dcp__archive_reset(&o->archive);
    free(o->bytes);
}

static const dcp__opaque *opaque_at(const dcp_value *list, size_t i, const char *module, const char *name)
{
    const dcp__opaque *o = dcp__value_opaque(dcp_value_at(list, i));
    assert_non_null(o);
    assert_string_equal(o->module.ptr, module);
    assert_string_equal(o->name.ptr, name);
    return o;
}

/* A pickle by hand: a string literal, whose final NUL does not count. */
#define READ(pickle, out, err) read_pickle(ctx(), pickle, sizeof(pickle) - 1, out, err)

static dcp_status read_pickle(dcp_context *c, const char *bytes, size_t len, dcp__object *out, dcp_error *err)
{
    uint8_t *exact = malloc(len ? len : 1);
    memcpy(exact, bytes, len);
    dcp__source src = dcp__source_memory(exact, len);
    dcp_status st = dcp__object_read(c, &src, 0, out, err);
    free(exact);
    return st;
}

static void expect_status(const char *bytes, size_t len, dcp_status want)
{
    dcp__object o;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status st = read_pickle(ctx(), bytes, len, &o, &err);
    if (st == DCP_OK) {
        dcp__object_reset(&o);
    }
    if (st != want) {
        fail_msg("%s (%s)", dcp_status_name(st), err.message);
    }
}
#define EXPECT(pickle, want) expect_status(pickle, sizeof(pickle) - 1, want)

/* ---- real files ---- */

/* "*" in the expectation stands for digits: the size of what is opaque. */
static bool matches(const char *want, const char *got)
{
    while (*want) {
        if (*want == '*' && strncmp(want, "* bytes>", 8) == 0) {
            size_t digits = strspn(got, "0123456789");
            if (!digits || (digits == 1 && *got == '0')) {
                return false;
            }
            got += digits;
            want++;
        } else if (*want++ != *got++) {
            return false;
        }
    }
    return !*got;
}

static void object__every_kind_has_pythons_repr(void **state)
{
    (void)state;
    glob_t files;
    assert_int_equal(glob(DCP_TEST_DIR "/data/objects/*.repr", 0, NULL, &files), 0);
    assert_true(files.gl_pathc >= 18);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        char name[128];
        const char *base = strrchr(files.gl_pathv[i], '/') + 1;
        snprintf(name, sizeof name, "%.*s", (int)(strlen(base) - 5), base);
        opened o = open_fixture(name);
        size_t len;
        char *want = (char *)load(name, "repr", &len), *got;
        want[len] = 0;
        assert_int_equal(dcp_value_repr(o.value, 0, &got, NULL, NULL), DCP_OK);
        if (!matches(want, got)) {
            fail_msg("%s:\nwant %s\n got %s", name, want, got);
        }
        dcp_text_free(ctx(), got);
        free(want);
        close_fixture(&o);
    }
    globfree(&files);
}

typedef struct golden_objects {
    json_t *want;
    size_t met;
} golden_objects;

static void check_object(const golden_archive *g, void *user)
{
    golden_objects *c = user;
    dcp__source src = dcp__source_memory(g->bytes, g->len);
    dcp__archive a;
    assert_int_equal(dcp__archive_open(ctx(), &src, &a, NULL), DCP_OK);
    if (dcp_value_kind(a.object.value) != DCP_KIND_TENSOR) {
        char *got;
        bool found = false;
        const char *fqn;
        json_t *want;
        assert_int_equal(dcp_value_repr(a.object.value, 0, &got, NULL, NULL), DCP_OK);
        json_object_foreach(c->want, fqn, want)
        {
            found = found || strcmp(json_string_value(want), got) == 0;
        }
        if (!found) {
            fail_msg("%s: not expected: %s", g->path, got);
        }
        dcp_text_free(ctx(), got);
        c->met++;
    }
    dcp__archive_reset(&a);
}

static void object__golden_objects_have_the_expected_repr(void **state)
{
    (void)state;
    glob_t cases;
    size_t met = 0;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/objects", 0, NULL, &cases), 0);
    assert_int_equal(cases.gl_pathc, 5);
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/expect.json", cases.gl_pathv[i]);
        json_t *root = json_load_file(path, 0, NULL);
        assert_non_null(root);
        golden_objects c = {.want = json_object_get(root, "objects")};
        snprintf(path, sizeof path, "%s/ckpt/*", cases.gl_pathv[i]);
        golden_each(path, check_object, &c);
        assert_int_equal(c.met, json_object_size(c.want));
        met += c.met;
        json_decref(root);
    }
    assert_true(met > 60);
    globfree(&cases);
}

/* ---- references ---- */

static void object__shared_references_are_one_value(void **state)
{
    (void)state;
    opened o = open_fixture("shared");
    dcp_value *first = dcp_value_at(o.value, 0);
    assert_ptr_equal(first, dcp_value_at(o.value, 1));
    assert_ptr_equal(first, dcp_dict_get_str(dcp_value_at(o.value, 2), "again"));
    close_fixture(&o);
}

/* Level n is a list of twice level n - 1: 2^120 leaves if it were expanded. */
static void object__shared_references_do_not_multiply(void **state)
{
    (void)state;
    char pickle[4096] = "\x80\2(]q\0";
    size_t n = 6;
    for (char i = 0; i < 120; i++) {
        const char level[] = {']', '(', 'h', i, 'h', i, 'e', 'q', (char)(i + 1)};
        memcpy(pickle + n, level, sizeof level);
        n += sizeof level;
    }
    pickle[n++] = 't';
    pickle[n++] = '.';
    failing_alloc fa;
    dcp_context *c = failing_alloc_context(&fa, 1);
    dcp__object o;
    dcp_error err = DCP_ERROR_INIT;
    if (read_pickle(c, pickle, n, &o, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(fa.calls < 2000);
    dcp__object_reset(&o);
    dcp_context_free(c);
    assert_int_equal(fa.live, 0);
}

/* Wrappers around something opaque are looked into first and are opaque then themselves. */
static void object__nested_wrappers_do_not_multiply(void **state)
{
    (void)state;
    static const char *const wrappers[][2] = {{"ctorch._utils\n_rebuild_parameter\n(", "\x89NtR"},
                                              {"cbuiltins\nbytearray\n(", "tR"}};
    for (size_t w = 0; w < 2; w++) {
        char pickle[8192] = "\x80\2";
        size_t n = 2, depth = 100;
        for (size_t i = 0; i < depth; i++) {
            n += (size_t)snprintf(pickle + n, sizeof pickle - n, "%s", wrappers[w][0]);
        }
        n += (size_t)snprintf(pickle + n, sizeof pickle - n, "cos\nsystem\n)R");
        for (size_t i = 0; i < depth; i++) {
            n += (size_t)snprintf(pickle + n, sizeof pickle - n, "%s", wrappers[w][1]);
        }
        pickle[n++] = '.';
        dcp__object o;
        dcp_error err = DCP_ERROR_INIT;
        if (read_pickle(ctx(), pickle, n, &o, &err) != DCP_OK) {
            fail_msg("%s", err.message);
        }
        assert_int_equal(dcp_value_kind(o.value), DCP_KIND_OPAQUE);
        dcp__object_reset(&o);
    }
}

static void object__recursive_structures_are_refused(void **state)
{
    (void)state;
    EXPECT("\x80\2]q\0h\0a.", DCP_FORMAT);
    EXPECT("\x80\2}q\0X\1\0\0\0kh\0s.", DCP_FORMAT);
    EXPECT("\x80\2"
           "cuser\nThing\n)\x81q\0}X\1\0\0\0kh\0sb.",
           DCP_FORMAT);
}

static void object__depth_is_limited(void **state)
{
    (void)state;
    char pickle[2048];
    for (size_t depth = 200; depth < 400; depth += 100) {
        size_t n = 0;
        memcpy(pickle, "\x80\2", 2);
        n = 2;
        memset(pickle + n, ']', depth);
        n += depth;
        memset(pickle + n, 'a', depth - 1);
        n += depth - 1;
        pickle[n++] = '.';
        expect_status(pickle, n, depth == 200 ? DCP_OK : DCP_LIMIT);
    }
}

/* Building recurses, so there is a bound that no option lifts: 1000. */
static void object__depth_is_bounded_whatever_the_limits(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.limits.max_depth = 50000;
    dcp_context *c;
    assert_int_equal(dcp_context_create(&opts, &c, NULL), DCP_OK);
    static char pickle[2 + 2000 * 10];
    /* An object whose argument is an object, and so on: two levels each, the object and its tuple. */
    for (size_t depth = 400; depth <= 2000; depth += 1600) {
        size_t n = 2;
        memcpy(pickle, "\x80\2", 2);
        for (size_t i = 0; i < depth; i++) {
            memcpy(pickle + n, "cu\nT\n", 5);
            n += 5;
        }
        pickle[n++] = 'N';
        for (size_t i = 0; i < depth; i++) {
            memcpy(pickle + n, "\x85R", 2);
            n += 2;
        }
        pickle[n++] = '.';
        dcp__object o;
        assert_int_equal(read_pickle(c, pickle, n, &o, NULL), depth == 400 ? DCP_OK : DCP_LIMIT);
        if (depth == 400) {
            dcp__object_reset(&o);
        }
    }
    dcp_context_free(c);
}

static void object__memory_is_limited(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.limits.max_parse_bytes = 300000;
    dcp_context *c;
    assert_int_equal(dcp_context_create(&opts, &c, NULL), DCP_OK);
    static char pickle[20004] = "\x80\2](";
    memset(pickle + 4, 'N', sizeof pickle - 6);
    memcpy(pickle + sizeof pickle - 2, "e.", 2);
    dcp__object o;
    assert_int_equal(read_pickle(c, pickle, sizeof pickle, &o, NULL), DCP_LIMIT);
    assert_int_equal(read_pickle(ctx(), pickle, sizeof pickle, &o, NULL), DCP_OK);
    assert_int_equal(dcp_value_count(o.value), sizeof pickle - 6);
    dcp__object_reset(&o);
    dcp_context_free(c);
}

static void object__end_is_behind_stop(void **state)
{
    (void)state;
    static const char bytes[] = "junk\x80\2K\7.more";
    dcp__source src = dcp__source_memory(bytes, sizeof bytes - 1);
    dcp__object o;
    int64_t seven;
    assert_int_equal(dcp__object_read(ctx(), &src, 4, &o, NULL), DCP_OK);
    assert_int_equal(o.end, 9);
    assert_true(dcp_value_int(o.value, &seven) && seven == 7);
    dcp__object_reset(&o);
}

/* ---- opaque values ---- */

static void opaque__parts_are_kept(void **state)
{
    (void)state;
    opened o = open_fixture("opaque");
    const dcp__opaque *thing = opaque_at(o.value, 0, "user_code", "Thing");
    assert_int_equal(thing->form, DCP__OPAQUE_NEWOBJ);
    assert_string_equal(dcp_opaque_class(dcp_value_at(o.value, 0)).ptr, "user_code.Thing");
    assert_int_equal(dcp_value_count(thing->args), 0);
    int64_t one;
    assert_true(dcp_value_int(dcp_dict_get_str(thing->state, "a"), &one) && one == 1);
    const dcp_value *t = dcp_dict_get_str(thing->state, "t");
    dcp__payload p;
    assert_int_equal(dcp__archive_payload(&o.archive, t, &p, NULL), DCP_OK);
    assert_memory_equal(o.bytes + p.offset, ((const float[]){1, 1}), 8);
    const dcp__opaque *red = opaque_at(o.value, 1, "user_code", "Color");
    assert_int_equal(red->form, DCP__OPAQUE_REDUCE);
    assert_int_equal(dcp_value_count(red->args), 1);
    const dcp__opaque *dd = opaque_at(o.value, 2, "collections", "defaultdict");
    assert_int_equal(dd->form, DCP__OPAQUE_REDUCE);
    assert_int_equal(dcp_value_count(dd->args), 1);
    assert_int_equal(dcp_value_count(dd->pairs), 2);
    assert_string_equal(dcp_value_str(dcp_value_at(dd->pairs, 0)).ptr, "a");
    assert_int_equal(dcp_value_kind(dcp_value_at(dd->pairs, 1)), DCP_KIND_LIST);
    const dcp__opaque *cls = opaque_at(o.value, 7, "user_code", "Thing");
    assert_int_equal(cls->form, DCP__OPAQUE_GLOBAL);
    assert_null(cls->args);
    close_fixture(&o);
}

static void opaque__span_is_that_of_its_opcodes(void **state)
{
    (void)state;
    dcp__object o;
    assert_int_equal(READ("\x80\2K\1cuser\nThing\n)\x81}X\1\0\0\0kK\5sb\x86.", &o, NULL), DCP_OK);
    const dcp_value *thing = dcp_value_at(o.value, 1);
    assert_int_equal(dcp_opaque_bytes(thing), 12 + 2 + 1 + 6 + 2 + 1 + 1);
    dcp__object_reset(&o);
}

static void opaque__nothing_hostile_is_more_than_data(void **state)
{
    (void)state;
    dcp__object o;
    assert_int_equal(READ("\x80\2"
                          "cos\nsystem\nX\6\0\0\0rm -rf\x85R.",
                          &o, NULL),
                     DCP_OK);
    const dcp__opaque *call = dcp__value_opaque(o.value);
    assert_non_null(call);
    assert_string_equal(call->qualified.ptr, "os.system");
    assert_int_equal(dcp_value_count(call->args), 1);
    dcp__object_reset(&o);
    /* A callable that is itself the result of a call. */
    assert_int_equal(READ("\x80\2"
                          "cbuiltins\ngetattr\ncos\npath\nX\1\0\0\0x\x86R)R.",
                          &o, NULL),
                     DCP_OK);
    const dcp__opaque *outer = dcp__value_opaque(o.value);
    assert_non_null(outer);
    assert_non_null(outer->callable);
    assert_string_equal(dcp__value_opaque(outer->callable)->qualified.ptr, "builtins.getattr");
    dcp__object_reset(&o);
}

static void opaque__known_calls_with_odd_arguments_stay_opaque(void **state)
{
    (void)state;
    static const struct {
        const char *pickle;
        size_t n;
        const char *name;
    } cases[] = {
#define CASE(pickle, name) {pickle, sizeof(pickle) - 1, name}
        CASE("\x80\2"
             "c_codecs\nencode\nX\2\0\0\0\xc4\x80X\6\0\0\0latin1\x86R.",
             "_codecs.encode"), /* U+0100 */
        CASE("\x80\2"
             "c_codecs\nencode\nX\1\0\0\0aX\4\0\0\0utf8\x86R.",
             "_codecs.encode"),
        CASE("\x80\2"
             "c_codecs\nencode\nK\1X\6\0\0\0latin1\x86R.",
             "_codecs.encode"),
        CASE("\x80\2"
             "c__builtin__\nbytes\nK\5\x85R.",
             "__builtin__.bytes"),
        CASE("\x80\2"
             "cbuiltins\nbytearray\nK\5\x85R.",
             "builtins.bytearray"),
        CASE("\x80\2"
             "cbuiltins\nset\nK\5\x85R.",
             "builtins.set"),
        CASE("\x80\2"
             "cbuiltins\nset\n](K\1K\2e]\x86R.",
             "builtins.set"),
        CASE("\x80\2"
             "cbuiltins\ncomplex\nK\5\x85R.",
             "builtins.complex"),
        CASE("\x80\2"
             "cbuiltins\ncomplex\nNN\x86R.",
             "builtins.complex"),
        CASE("\x80\2"
             "ctorch\nSize\nX\1\0\0\0a\x85\x85R.",
             "torch.Size"),
        CASE("\x80\2"
             "ctorch\nSize\nK\1\x85R.",
             "torch.Size"),
        CASE("\x80\2"
             "ctorch\ndevice\n)R.",
             "torch.device"),
        CASE("\x80\2"
             "ctorch\ndevice\nX\4\0\0\0cudaJ\xff\xff\xff\xff\x86R.",
             "torch.device"),
        CASE("\x80\2"
             "ctorch._utils\n_rebuild_qtensor\n)R.",
             "torch._utils._rebuild_qtensor"),
        CASE("\x80\2"
             "ctorch._utils\n_rebuild_tensor_v2\n)R.",
             "torch._utils._rebuild_tensor_v2"),
        CASE("\x80\2"
             "ctorch._tensor\n_rebuild_from_type_v2\n)R.",
             "torch._tensor._rebuild_from_type_v2"),
        CASE("\x80\2"
             "ccollections\nOrderedDict\n]\x85R.",
             "collections.OrderedDict"),
#undef CASE
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dcp__object o;
        dcp_error err = DCP_ERROR_INIT;
        if (read_pickle(ctx(), cases[i].pickle, cases[i].n, &o, &err) != DCP_OK) {
            fail_msg("case %zu: %s", i, err.message);
        }
        assert_int_equal(dcp_value_kind(o.value), DCP_KIND_OPAQUE);
        assert_string_equal(dcp_opaque_class(o.value).ptr, cases[i].name);
        dcp__object_reset(&o);
    }
}

static void opaque__dicts_with_other_keys_keep_all_pairs(void **state)
{
    (void)state;
    opened o = open_fixture("odd_keys");
    static const size_t counts[] = {4, 6, 2};
    for (size_t i = 0; i < 3; i++) {
        const dcp__opaque *dict = opaque_at(o.value, i, "builtins", "dict");
        assert_int_equal(dict->form, DCP__OPAQUE_REDUCE);
        assert_int_equal(dcp_value_count(dict->args), 0);
        assert_int_equal(dcp_value_count(dict->pairs), counts[i]);
    }
    assert_int_equal(dcp_value_kind(dcp_value_at(dcp__value_opaque(dcp_value_at(o.value, 0))->pairs, 0)), DCP_KIND_TUPLE);
    close_fixture(&o);
    dcp__object ordered;
    assert_int_equal(READ("\x80\2"
                          "ccollections\nOrderedDict\n)RNK\1s.",
                          &ordered, NULL),
                     DCP_OK);
    assert_string_equal(dcp_opaque_class(ordered.value).ptr, "collections.OrderedDict");
    assert_int_equal(dcp_value_count(dcp__value_opaque(ordered.value)->pairs), 2);
    dcp__object_reset(&ordered);
}

static void object__the_last_of_equal_keys_counts(void **state)
{
    (void)state;
    dcp__object o;
    int64_t v;
    assert_int_equal(READ("\x80\2}(X\1\0\0\0aK\1X\1\0\0\0bK\2X\1\0\0\0aK\3u.", &o, NULL), DCP_OK);
    assert_int_equal(dcp_value_count(o.value), 2);
    assert_true(dcp_value_int(dcp_value_at(o.value, 0), &v) && v == 3);
    dcp__object_reset(&o);
}

/* ---- tensors and storages ---- */

#define STORAGE(key, elems) "(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" key "X\3\0\0\0cpuK" elems "tQ"
#define TENSOR(key, elems, offset, sizes, strides)                                                                               \
    "ctorch._utils\n_rebuild_tensor_v2\n(" STORAGE(key, elems) "K" offset sizes strides "\x89"                                   \
                                                               "NtR"

static void object__tensors_name_their_storages(void **state)
{
    (void)state;
    opened o = open_fixture("tensors");
    const dcp__object *object = &o.archive.object;
    const dcp__lazy *w = dcp__value_lazy(dcp_dict_get_str(o.value, "w"));
    const dcp__lazy *view = dcp__value_lazy(dcp_dict_get_str(o.value, "view"));
    const dcp__lazy *t = dcp__value_lazy(dcp_dict_get_str(o.value, "t"));
    const dcp__lazy *u = dcp__value_lazy(dcp_dict_get_str(o.value, "u"));
    assert_true(w && view && t && u);
    assert_int_equal(w->storage, 0);
    assert_int_equal(view->storage, 0);
    assert_int_equal(view->storage_offset, 2);
    assert_int_equal(t->storage, 0);
    const dcp_tensor *view_tensor = dcp_value_tensor(dcp_dict_get_str(o.value, "view"));
    assert_int_equal(view_tensor->extents[0], 3);
    assert_int_equal(view_tensor->strides[0], 2);
    assert_null(view_tensor->data);
    assert_string_equal(object->storages[0].key.ptr, "0");
    assert_int_equal(object->storages[0].dtype, DCP_FLOAT32);
    assert_int_equal(object->storages[0].elems, 12);
    assert_int_equal(object->storages[0].view_of, -1);
    assert_true(object->storages[u->storage].is_untyped);
    assert_int_equal(object->storages[u->storage].elems, 6);
    assert_int_equal(object->n_storages, 5);
    dcp__payload p;
    assert_int_equal(dcp__archive_payload(&o.archive, dcp_dict_get_str(o.value, "p"), &p, NULL), DCP_OK);
    assert_memory_equal(o.bytes + p.offset, ((const float[]){1, 1}), 8);
    close_fixture(&o);
}

static void object__one_tensor_in_two_places_is_one_value(void **state)
{
    (void)state;
    dcp__object o;
    assert_int_equal(READ("\x80\2" TENSOR("0", "\2", "\0", "K\2\x85", "K\1\x85") "q\1h\1\x86.", &o, NULL), DCP_OK);
    assert_ptr_equal(dcp_value_at(o.value, 0), dcp_value_at(o.value, 1));
    assert_int_equal(o.n_storages, 1);
    dcp__object_reset(&o);
}

static void object__malformed_tensors_are_refused(void **state)
{
    (void)state;
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "K\2\x85", "K\1\x85") ".", DCP_OK);
    EXPECT("\x80\2" TENSOR("0", "\2", "\1", "K\2\x85", "K\1\x85") ".", DCP_FORMAT); /* beyond the storage */
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "K\2\x85", "K\2\x85") ".", DCP_FORMAT);
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "K\2\x85", ")") ".", DCP_FORMAT);   /* dimensions differ */
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "K\2", "K\1\x85") ".", DCP_FORMAT); /* no tuple */
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "N\x85", "K\1\x85") ".", DCP_FORMAT);
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "\x88\x85", "K\1\x85") ".", DCP_FORMAT); /* True is no size */
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "J\xff\xff\xff\xff\x85", "K\1\x85") ".", DCP_FORMAT);
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "K\2\x85", "J\xff\xff\xff\xff\x85") ".", DCP_FORMAT);
    EXPECT("\x80\2" TENSOR("0", "\2", "\0", "ctorch\nSize\nK\2\x85\x85R", "]K\1a") ".", DCP_OK);
}

static void object__storages_of_one_key_must_agree(void **state)
{
    (void)state;
    EXPECT("\x80\2" STORAGE("0", "\2") STORAGE("0", "\2") STORAGE("1", "\3") "\x87.", DCP_OK);
    EXPECT("\x80\2" STORAGE("0", "\2") STORAGE("0", "\3") "\x86.", DCP_FORMAT);
    EXPECT("\x80\2" STORAGE("0", "\2") "(X\7\0\0\0storagectorch\nIntStorage\nX\1\0\0\0"
                                       "0X\3\0\0\0cpuK\2tQ\x86.",
           DCP_FORMAT);
    EXPECT("\x80\2(X\7\0\0\0storagectorch\nFloatStorage\nK\1X\3\0\0\0cpuK\2tQ.", DCP_FORMAT);
    EXPECT("\x80\2(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0"
           "0X\3\0\0\0cpuNtQ.",
           DCP_FORMAT);
}

static void object__persistent_ids_alone_are_opaque(void **state)
{
    (void)state;
    dcp__object o;
    assert_int_equal(READ("\x80\2" STORAGE("0", "\2") ".", &o, NULL), DCP_OK);
    const dcp__opaque *id = dcp__value_opaque(o.value);
    assert_non_null(id);
    assert_int_equal(id->form, DCP__OPAQUE_PERSID);
    assert_string_equal(id->qualified.ptr, "torch.FloatStorage");
    assert_int_equal(dcp_value_count(id->args), 5);
    assert_int_equal(o.n_storages, 1);
    dcp__object_reset(&o);
    assert_int_equal(READ("\x80\2X\4\0\0\0"
                          "elseQ.",
                          &o, NULL),
                     DCP_OK);
    id = dcp__value_opaque(o.value);
    assert_non_null(id);
    assert_int_equal(id->form, DCP__OPAQUE_PERSID);
    assert_string_equal(dcp_value_str(id->args).ptr, "else");
    assert_int_equal(o.n_storages, 0);
    dcp__object_reset(&o);
}

/* ---- out of memory, mutations ---- */

typedef struct blob {
    uint8_t *bytes;
    size_t len;
} blob;

static dcp_status open_body(dcp_context *c, void *user, dcp_error *err)
{
    const blob *b = user;
    dcp__source src = dcp__source_memory(b->bytes, b->len);
    dcp__archive a;
    dcp_status st = dcp__archive_open(c, &src, &a, err);
    if (!st) {
        dcp__archive_reset(&a);
    }
    return st;
}

static void object__every_failing_allocation_is_reported(void **state)
{
    (void)state;
    static const char *const names[] = {"opaque", "tensors", "bytes",       "odd_keys",
                                        "shared", "sets",    "torch_types", "module_state"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        blob b;
        b.bytes = load(names[i], "pt", &b.len);
        assert_true(failing_alloc_walk(open_body, &b) > 5);
        free(b.bytes);
    }
}

static uint64_t next_random(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

static void object__random_changes_never_break_it(void **state)
{
    (void)state;
    uint64_t seed = 4711, s = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    static const char *const names[] = {"opaque", "tensors", "tensor_kinds", "bytes", "sets", "protocol_4", "module_state"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t len;
        uint8_t *whole = load(names[i], "pt", &len);
        golden_archive g = golden_parse(names[i], whole, len);
        for (int round = 0; round < 3000; round++) {
            uint8_t *bytes = malloc(g.pickle_len);
            memcpy(bytes, g.pickle, g.pickle_len);
            size_t changes = 1 + next_random(&s) % 3;
            for (size_t k = 0; k < changes; k++) {
                bytes[next_random(&s) % g.pickle_len] = (uint8_t)next_random(&s);
            }
            size_t n = g.pickle_len - (next_random(&s) % 8 == 0 ? next_random(&s) % g.pickle_len : 0);
            uint8_t *exact = malloc(n);
            memcpy(exact, bytes, n);
            dcp__source src = dcp__source_memory(exact, n);
            dcp__object o;
            if (dcp__object_read(ctx(), &src, 0, &o, NULL) == DCP_OK) {
                char *text = NULL;
                dcp_value_repr(o.value, 1 << 20, &text, NULL, NULL);
                dcp_text_free(ctx(), text);
                dcp__object_reset(&o);
            }
            free(exact);
            free(bytes);
        }
        free(whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(object__every_kind_has_pythons_repr),
        cmocka_unit_test(object__golden_objects_have_the_expected_repr),
        cmocka_unit_test(object__shared_references_are_one_value),
        cmocka_unit_test(object__shared_references_do_not_multiply),
        cmocka_unit_test(object__nested_wrappers_do_not_multiply),
        cmocka_unit_test(object__recursive_structures_are_refused),
        cmocka_unit_test(object__depth_is_limited),
        cmocka_unit_test(object__depth_is_bounded_whatever_the_limits),
        cmocka_unit_test(object__memory_is_limited),
        cmocka_unit_test(object__end_is_behind_stop),
        cmocka_unit_test(opaque__parts_are_kept),
        cmocka_unit_test(opaque__span_is_that_of_its_opcodes),
        cmocka_unit_test(opaque__nothing_hostile_is_more_than_data),
        cmocka_unit_test(opaque__known_calls_with_odd_arguments_stay_opaque),
        cmocka_unit_test(opaque__dicts_with_other_keys_keep_all_pairs),
        cmocka_unit_test(object__the_last_of_equal_keys_counts),
        cmocka_unit_test(object__tensors_name_their_storages),
        cmocka_unit_test(object__one_tensor_in_two_places_is_one_value),
        cmocka_unit_test(object__malformed_tensors_are_refused),
        cmocka_unit_test(object__storages_of_one_key_must_agree),
        cmocka_unit_test(object__persistent_ids_alone_are_opaque),
        cmocka_unit_test(object__every_failing_allocation_is_reported),
        cmocka_unit_test(object__random_changes_never_break_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
