/* Flattening by both rules and back: the table of formats.md 5. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state/containers.h"
#include "state/value.h"
#include "support/failing_alloc.h"

/* ---- values from a short notation: digits, t tensor, [..] list, (..) tuple, {k:..} dict, <k:..> ordered dict, #3 integer key
 * --- */

static float data[1];

static dcp_value *parse(dcp_context *ctx, const char **s);

static dcp_key parse_key(const char **s, char *buffer)
{
    if (**s == '#') {
        return dcp_key_int(strtoll(*s + 1, (char **)(uintptr_t)s, 10));
    }
    size_t n = strcspn(*s, ":");
    memcpy(buffer, *s, n);
    buffer[n] = 0;
    *s += n;
    return dcp_key_str(buffer);
}

static dcp_value *parse_container(dcp_context *ctx, const char **s)
{
    dcp_value *v = NULL;
    char open = *(*s)++, key_text[64];
    dcp_status status = open == '{'   ? dcp_dict_create(ctx, &v, NULL)
                        : open == '<' ? dcp_ordered_dict_create(ctx, &v, NULL)
                                      : dcp_seq_create(ctx, open == '[' ? DCP_KIND_LIST : DCP_KIND_TUPLE, &v, NULL);
    while (status == DCP_OK && !strchr("]})>", **s)) {
        if (open == '{' || open == '<') {
            dcp_key key = parse_key(s, key_text);
            ++*s;
            status = dcp_dict_set(v, key, parse(ctx, s), NULL);
        } else {
            status = dcp_list_append(v, parse(ctx, s), NULL);
        }
        *s += **s == ',';
    }
    assert_int_equal(status, DCP_OK);
    ++*s;
    return v;
}

static dcp_value *parse(dcp_context *ctx, const char **s)
{
    dcp_value *v = NULL;
    if (strchr("[({<", **s)) {
        return parse_container(ctx, s);
    }
    if (**s == 't') {
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, (int64_t[]){1}, data);
        ++*s;
        assert_int_equal(dcp_tensor_create(ctx, &t, &v, NULL), DCP_OK);
        return v;
    }
    char *end;
    int64_t i = strtoll(*s, &end, 10);
    assert_true(end != *s);
    *s = end;
    assert_int_equal(dcp_int_create(ctx, i, &v, NULL), DCP_OK);
    return v;
}

static dcp_value *value(const char *s)
{
    return parse(NULL, &s);
}

/* "k.a k.b.0": the names of the leaves in order. */
static void assert_names(const char *tree, dcp_flatten_rule rule, const char *expected)
{
    dcp_value *root = value(tree);
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_flatten(NULL, root, rule, &flat, NULL), DCP_OK);
    char names[512] = "";
    for (size_t i = 0; i < dcp_flat_count(flat); i++) {
        const dcp_leaf *leaf = dcp_flat_leaf(flat, i);
        size_t found;
        assert_true(dcp_flat_find(flat, leaf->fqn, &found) && found == i);
        strcat(names, i ? " " : "");
        strcat(names, leaf->fqn.ptr);
    }
    assert_string_equal(names, expected);
    assert_null(dcp_flat_leaf(flat, dcp_flat_count(flat)));
    dcp_flat_free(flat);
    dcp_value_free(root);
}

static void flatten__follows_the_published_table(void **state)
{
    (void)state;
    static const struct {
        const char *tree, *to_2_3, *from_2_4;
    } table[] = {
        {"{k:{a:{b:1}}}", "k", "k.a.b"},
        {"{k:{t:t,u:5}}", "k.t k.u", "k.t k.u"},
        {"{k:{p:{q:1},r:{s:t}}}", "k.p k.r.s", "k.p.q k.r.s"},
        {"{k:{}}", "k", ""},
        {"{k:[]}", "k", "k"},
        {"{k:[1,2]}", "k", "k"},
        {"{k:[[1],[2]]}", "k", "k"},
        {"{k:[1,t]}", "k.0 k.1", "k.0 k.1"},
        {"{k:[[t],5]}", "k.0.0 k.1", "k.0.0 k.1"},
        {"{k:[{x:1}]}", "k", "k.0.x"},
        {"{k:[{}]}", "k", ""},
        {"{k:[[],{}]}", "k", "k.0"},
        {"{k:[(t)]}", "k", "k"},
        {"{k:(t,2)}", "k", "k"},
        {"{k:({q:1})}", "k", "k"},
        {"{k:<a:1>}", "k", "k.a"},
        {"{k:{#3:1}}", "k", "k.3"},
        {"{}", "", ""},
        {"{#7:1,:2,d.o.t:t}", "7  d.o.t", "7  d.o.t"},
        {"{k:[1,[2],[{a:1}]]}", "k", "k.0 k.1 k.2.0.a"},
        {"{k:[{a:1},{b:[t]}]}", "k.0 k.1.b.0", "k.0.a k.1.b.0"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        assert_names(table[i].tree, DCP_FLATTEN_2_1, table[i].to_2_3);
        assert_names(table[i].tree, DCP_FLATTEN_2_4, table[i].from_2_4);
    }
}

static void flatten__paths_keep_list_positions_and_turn_keys_into_text(void **state)
{
    (void)state;
    dcp_value *root = value("{a.b:{#-3:[5,t]}}");
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_flatten(NULL, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
    assert_int_equal(dcp_flat_count(flat), 2);
    const dcp_leaf *leaf = dcp_flat_leaf(flat, 1);
    assert_string_equal(leaf->fqn.ptr, "a.b.-3.1");
    assert_int_equal(leaf->path_len, 3);
    assert_false(leaf->path[0].is_int);
    assert_string_equal(leaf->path[0].string.ptr, "a.b");
    assert_false(leaf->path[1].is_int);
    assert_string_equal(leaf->path[1].string.ptr, "-3");
    assert_true(leaf->path[2].is_int && leaf->path[2].integer == 1);
    assert_int_equal(dcp_value_kind(leaf->value), DCP_KIND_TENSOR);
    size_t at;
    assert_false(dcp_flat_find(flat, dcp_str_of("a.b"), &at));
    dcp_flat_free(flat);
    dcp_value_free(root);
}

static dcp_value *new_opaque_mapping(const char *module, const char *name)
{
    dcp_value *pairs = NULL, *v = NULL;
    assert_int_equal(dcp_list_create(NULL, &pairs, NULL), DCP_OK);
    dcp_value *odd = NULL, *text = NULL;
    assert_int_equal(dcp_none_create(NULL, &odd, NULL), DCP_OK);
    assert_int_equal(dcp_string_create(NULL, dcp_str_of("s"), &text, NULL), DCP_OK);
    dcp_value *const all[] = {odd, value("1"), value("(1,2)"), value("t"), text, value("2"), value("4"), value("3")};
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(dcp_list_append(pairs, all[i], NULL), DCP_OK);
    }
    dcp__opaque parts = {.form = DCP__OPAQUE_REDUCE, .module = dcp_str_of(module), .name = dcp_str_of(name), .pairs = pairs};
    assert_int_equal(dcp__opaque_create(NULL, &parts, &v, NULL), DCP_OK);
    return v;
}

static void flatten__mappings_of_other_classes_flatten_too(void **state)
{
    (void)state;
    dcp_value *root = value("{}");
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_dict_set(root, dcp_key_str("k"), new_opaque_mapping("collections", "defaultdict"), NULL), DCP_OK);
    for (int rule = 0; rule < 2; rule++) {
        assert_int_equal(dcp_flatten(NULL, root, (dcp_flatten_rule)rule, &flat, NULL), DCP_OK);
        assert_int_equal(dcp_flat_count(flat), 4);
        assert_string_equal(dcp_flat_leaf(flat, 0)->fqn.ptr, "k.None");
        assert_string_equal(dcp_flat_leaf(flat, 1)->fqn.ptr, "k.(1, 2)");
        assert_string_equal(dcp_flat_leaf(flat, 2)->fqn.ptr, "k.s");
        assert_string_equal(dcp_flat_leaf(flat, 3)->fqn.ptr, "k.4");
        dcp_flat_free(flat);
    }
    dcp_value_free(root);
}

static dcp_status try_flatten(dcp_value *root, dcp_flatten_rule rule)
{
    dcp_flat *flat = NULL;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp_flatten(NULL, root, rule, &flat, &err);
    assert_int_equal(status, err.code);
    assert_true((status == DCP_OK) == (flat != NULL));
    dcp_flat_free(flat);
    return status;
}

static void flatten__one_name_for_two_paths_is_a_mismatch(void **state)
{
    (void)state;
    const char *const trees[] = {"{a.b:1,a:{b:t}}", "{k:{#1:1,1:t}}", "{a:{b.c:t},a.b:{c:t}}", "{a:[t],a.0:1}"};
    for (size_t i = 0; i < sizeof trees / sizeof trees[0]; i++) {
        dcp_value *root = value(trees[i]);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_1), DCP_MISMATCH);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_4), DCP_MISMATCH);
        dcp_value_free(root);
    }
    dcp_value *root = value("{a.b:1,a:{b:t}}");
    dcp_flat *flat;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_flatten(NULL, root, DCP_FLATTEN_2_4, &flat, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "('a.b')"));
    assert_non_null(strstr(err.message, "('a', 'b')"));
    dcp_value_free(root);
}

static void flatten__root_must_be_a_dict(void **state)
{
    (void)state;
    dcp_value *list = value("[t]"), *dict = value("{}");
    assert_int_equal(try_flatten(list, DCP_FLATTEN_2_4), DCP_ARG);
    assert_int_equal(try_flatten(NULL, DCP_FLATTEN_2_4), DCP_ARG);
    assert_int_equal(try_flatten(dict, (dcp_flatten_rule)2), DCP_ARG);
    dcp_value_free(list);
    dcp_value_free(dict);
}

/* levels containers around v, each holding the one below `width` times. */
static dcp_value *wrapped(dcp_value *v, int levels, int width, bool in_lists)
{
    for (int i = 0; i < levels; i++) {
        dcp_value *outer = value(in_lists ? "[]" : "{}");
        for (int j = 0; j < width; j++) {
            dcp_value *below = j ? dcp_value_retain(v) : v;
            dcp_status status = in_lists ? dcp_list_append(outer, below, NULL) : dcp_dict_set(outer, dcp_key_int(j), below, NULL);
            assert_int_equal(status, DCP_OK);
        }
        v = outer;
    }
    return v;
}

static void flatten__deep_trees_are_a_limit(void **state)
{
    (void)state;
    for (int in_lists = 0; in_lists < 2; in_lists++) {
        dcp_value *root = wrapped(wrapped(value("t"), 255, 1, in_lists), 1, 1, false);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_4), DCP_OK);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_1), DCP_OK);
        dcp_value_free(root);
        root = wrapped(wrapped(value("t"), 300, 1, in_lists), 1, 1, false);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_4), DCP_LIMIT);
        assert_int_equal(try_flatten(root, DCP_FLATTEN_2_1), DCP_LIMIT);
        dcp_value_free(root);
    }
}

static void flatten__shared_parts_do_not_explode(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.limits.max_parse_bytes = 1 << 20;
    dcp_context *ctx = NULL;
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    /* 2^100 integers in lists: one leaf, found without looking at all of them */
    dcp_value *root = wrapped(wrapped(value("1"), 100, 2, true), 1, 1, false);
    assert_int_equal(dcp_flatten(ctx, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
    assert_int_equal(dcp_flat_count(flat), 1);
    dcp_flat_free(flat);
    dcp_value_free(root);
    /* 2^100 empty dicts: no leaf at all, so that memory is no bound */
    root = wrapped(value("{}"), 100, 2, false);
    assert_int_equal(dcp_flatten(ctx, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_LIMIT);
    assert_int_equal(dcp_flatten(ctx, root, DCP_FLATTEN_2_1, &flat, NULL), DCP_OK);
    assert_int_equal(dcp_flat_count(flat), 2);
    dcp_flat_free(flat);
    dcp_value_free(root);
    root = wrapped(value("t"), 100, 2, false);
    assert_int_equal(dcp_flatten(ctx, root, DCP_FLATTEN_2_1, &flat, NULL), DCP_LIMIT);
    dcp_value_free(root);
    dcp_context_free(ctx);
}

/* ---- unflatten ---- */

/* The tree that comes back, if it is what flattening kept. */
static void assert_rebuilt(const char *tree, const char *expected)
{
    dcp_value *root = value(tree), *want = value(expected), *got = NULL;
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_flatten(NULL, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
    size_t n = dcp_flat_count(flat);
    dcp_leaf *leaves = calloc(n + 1, sizeof *leaves);
    for (size_t i = 0; i < n; i++) {
        leaves[i] = *dcp_flat_leaf(flat, i);
    }
    assert_int_equal(dcp_unflatten(NULL, leaves, n, &got, NULL), DCP_OK);
    assert_true(dcp_value_equal(got, want));
    dcp_value_free(got);
    for (size_t i = 0; i < n / 2; i++) { /* planner_data of sharded saves has another order */
        dcp_leaf t = leaves[i];
        leaves[i] = leaves[n - 1 - i];
        leaves[n - 1 - i] = t;
    }
    assert_int_equal(dcp_unflatten(NULL, leaves, n, &got, NULL), DCP_OK);
    assert_true(dcp_value_equal(got, want));
    dcp_value_free(got);
    free(leaves);
    dcp_flat_free(flat);
    dcp_value_free(root);
    dcp_value_free(want);
}

static void unflatten__rebuilds_what_flattening_kept(void **state)
{
    (void)state;
    assert_rebuilt("{}", "{}");
    assert_rebuilt("{a:{b:{c:t,d:5}},e:[t,6,{f:7}]}", "{a:{b:{c:t,d:5}},e:[t,6,{f:7}]}");
    assert_rebuilt("{k:<a:1>}", "{k:{a:1}}");  /* the type is lost */
    assert_rebuilt("{k:{#3:1}}", "{k:{3:1}}"); /* the key became a text */
    assert_rebuilt("{k:{},l:1}", "{l:1}");     /* empty dicts are lost */
    assert_rebuilt("{a:[[t,[t]],(1,2),[]]}", "{a:[[t,[t]],(1,2),[]]}");
    assert_rebuilt("{d.o.t:{:1}}", "{d.o.t:{:1}}");
}

static dcp_status rebuild(size_t n, const dcp_key *const *paths, const size_t *lens, dcp_value **out)
{
    dcp_leaf leaves[8];
    dcp_value *v = value("1");
    for (size_t i = 0; i < n; i++) {
        leaves[i] = (dcp_leaf){dcp_str_of("name"), paths[i], lens[i], v};
    }
    *out = NULL;
    dcp_status status = dcp_unflatten(NULL, leaves, n, out, NULL);
    assert_true((status == DCP_OK) == (*out != NULL));
    dcp_value_free(v);
    return status;
}

#define K(text)                                                                                                                  \
    {                                                                                                                            \
        false, 0,                                                                                                                \
        {                                                                                                                        \
            text, sizeof text - 1                                                                                                \
        }                                                                                                                        \
    }
#define I(index)                                                                                                                 \
    {                                                                                                                            \
        true, index,                                                                                                             \
        {                                                                                                                        \
            NULL, 0                                                                                                              \
        }                                                                                                                        \
    }

static void unflatten__gaps_in_lists_are_none(void **state)
{
    (void)state;
    const dcp_key a[] = {K("k"), I(3)}, b[] = {K("k"), I(1)};
    dcp_value *got;
    assert_int_equal(rebuild(2, (const dcp_key *const[]){a, b}, (size_t[]){2, 2}, &got), DCP_OK);
    const dcp_value *list = dcp_dict_get_str(got, "k");
    assert_int_equal(dcp_value_count(list), 4);
    const dcp_kind kinds[] = {DCP_KIND_NONE, DCP_KIND_INT, DCP_KIND_NONE, DCP_KIND_INT};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(dcp_value_kind(dcp_value_at(list, i)), kinds[i]);
        assert_non_null(dcp_value_at(list, i));
    }
    dcp_value_free(got);
}

static void unflatten__contradicting_paths_are_a_mismatch(void **state)
{
    (void)state;
    const dcp_key leaf[] = {K("k")}, below[] = {K("k"), K("a")}, in_list[] = {K("k"), I(0)}, deeper[] = {K("k"), I(0), I(0)};
    const dcp_key *const cases[][2] = {{leaf, below}, {below, leaf},     {below, in_list},  {in_list, below},
                                       {leaf, leaf},  {in_list, deeper}, {deeper, in_list}, {in_list, in_list}};
    const size_t lens[][2] = {{1, 2}, {2, 1}, {2, 2}, {2, 2}, {1, 1}, {2, 3}, {3, 2}, {2, 2}};
    for (size_t i = 0; i < 8; i++) {
        dcp_value *got;
        assert_int_equal(rebuild(2, cases[i], lens[i], &got), DCP_MISMATCH);
    }
}

static void unflatten__a_container_value_is_not_built_into(void **state)
{
    (void)state;
    const dcp_key k[] = {K("k")}, below[] = {K("k"), K("a")};
    dcp_value *dict = value("{}"), *got = NULL;
    dcp_leaf leaves[2] = {{dcp_str_of("k"), k, 1, dict}, {dcp_str_of("k.a"), below, 2, dict}};
    assert_int_equal(dcp_unflatten(NULL, leaves, 2, &got, NULL), DCP_MISMATCH);
    assert_int_equal(dcp_value_count(dict), 0);
    dcp_value_free(dict);
}

static void unflatten__hostile_indices_are_limits(void **state)
{
    (void)state;
    dcp_value *got;
    const int64_t bad[] = {-1, INT64_MIN, 1000001, INT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        const dcp_key path[] = {K("k"), I(bad[i])};
        assert_int_equal(rebuild(1, (const dcp_key *const[]){path}, (size_t[]){2}, &got), DCP_LIMIT);
    }
    const dcp_key most[] = {K("k"), I(1000000)}, more[] = {K("l"), I(1000000)};
    assert_int_equal(rebuild(1, (const dcp_key *const[]){most}, (size_t[]){2}, &got), DCP_OK);
    dcp_value_free(got);
    /* many lists, each with a gap that is allowed alone */
    assert_int_equal(rebuild(2, (const dcp_key *const[]){most, more}, (size_t[]){2, 2}, &got), DCP_LIMIT);
    dcp_key deep[300];
    for (size_t i = 0; i < 300; i++) {
        deep[i] = dcp_key_str("d");
    }
    assert_int_equal(rebuild(1, (const dcp_key *const[]){deep}, (size_t[]){256}, &got), DCP_OK);
    dcp_value_free(got);
    assert_int_equal(rebuild(1, (const dcp_key *const[]){deep}, (size_t[]){257}, &got), DCP_LIMIT);
    assert_int_equal(rebuild(1, (const dcp_key *const[]){deep}, (size_t[]){0}, &got), DCP_ARG);
}

/* ---- allocation failure ---- */

static dcp_status flatten_and_back(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_flat *flat = NULL;
    dcp_value *got = NULL;
    dcp_status status = dcp_flatten(ctx, user, DCP_FLATTEN_2_4, &flat, err);
    if (status == DCP_OK) {
        dcp_leaf leaves[64];
        size_t n = dcp_flat_count(flat);
        for (size_t i = 0; i < n; i++) {
            leaves[i] = *dcp_flat_leaf(flat, i);
        }
        status = dcp_unflatten(ctx, leaves, n, &got, err);
    }
    dcp_value_free(got);
    dcp_flat_free(flat);
    return status;
}

static void flatten__out_of_memory_leaks_nothing(void **state)
{
    (void)state;
    dcp_value *root = value("{a:{b:{c:t,d:5,#4:1}},e:[t,6,{f:7},[],{}],g:{h:1,i:2,j:3,k:4,l:5,m:6,n:7,o:8,p:9,q:10}}");
    assert_int_equal(dcp_dict_set(root, dcp_key_str("z"), new_opaque_mapping("builtins", "dict"), NULL), DCP_OK);
    assert_true(failing_alloc_walk(flatten_and_back, root) > 30);
    dcp_value_free(root);
}

static void flatten__many_keys(void **state)
{
    (void)state;
    enum { N = 100000 };
    dcp_value *root = value("{}");
    char name[32];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "layer.%d.weight", i);
        assert_int_equal(dcp_dict_set_int(root, name, i, NULL), DCP_OK);
    }
    dcp_flat *flat = NULL;
    assert_int_equal(dcp_flatten(NULL, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
    assert_int_equal(dcp_flat_count(flat), N);
    size_t at = 0;
    assert_true(dcp_flat_find(flat, dcp_str_of("layer.77777.weight"), &at));
    assert_int_equal(at, 77777);
    dcp_flat_free(flat);
    dcp_value_free(root);
}

/* Names by the rule stay; later leaves of one name are numbered, past names that are somebody's own. */
static void flatten_any__leaves_of_one_name_are_numbered(void **state)
{
    (void)state;
    static const struct {
        const char *tree, *names[6];
    } cases[] = {
        {"{a.b:1,a:{b:2}}", {"a.b", "a.b#2"}},
        {"{a:{b:1},a.b:2,a.b#2:3}", {"a.b", "a.b#3", "a.b#2"}},
        {"{a.b.c:1,a:{b.c:2,b:{c:3}},a.b:{c:4}}", {"a.b.c", "a.b.c#2", "a.b.c#3", "a.b.c#4"}},
        {"{a.b:1,c.d:t,a:{b:2},c:{d:3}}", {"a.b", "c.d", "a.b#2", "c.d#2"}},
        {"{1:5,#1:6}", {"1", "1#2"}},
        {"{a#2:1,a:2}", {"a#2", "a"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *text = cases[i].tree;
        dcp_value *root = parse(NULL, &text), *rebuilt;
        dcp_flat *flat;
        assert_int_equal(dcp__flatten_any(NULL, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
        size_t n = 0;
        for (; n < 6 && cases[i].names[n]; n++) {
            size_t found = SIZE_MAX;
            assert_string_equal(dcp_flat_leaf(flat, n)->fqn.ptr, cases[i].names[n]);
            assert_true(dcp_flat_find(flat, dcp_str_of(cases[i].names[n]), &found));
            assert_int_equal(found, n);
        }
        assert_int_equal(dcp_flat_count(flat), n);
        /* what has another name stands at the root: no two paths have one name any more */
        dcp_flat *again;
        assert_int_equal(dcp_unflatten(NULL, dcp_flat_leaf(flat, 0), n, &rebuilt, NULL), DCP_OK);
        assert_int_equal(dcp_flatten(NULL, rebuilt, DCP_FLATTEN_2_4, &again, NULL), DCP_OK);
        assert_int_equal(dcp_flat_count(again), n);
        for (size_t k = 0; k < n; k++) {
            size_t found = SIZE_MAX;
            assert_true(dcp_flat_find(again, dcp_str_of(cases[i].names[k]), &found));
            assert_ptr_equal(dcp_flat_leaf(again, found)->value, dcp_flat_leaf(flat, k)->value);
        }
        dcp_flat_free(again);
        dcp_value_free(rebuilt);
        dcp_flat_free(flat);
        dcp_value_free(root);
    }
}

static dcp_status flatten_homonyms(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    const char *text = "{a.b:1,a:{b:2}}";
    dcp_value *root = parse(NULL, &text);
    dcp_flat *flat;
    dcp_status status = dcp__flatten_any(ctx, root, DCP_FLATTEN_2_4, &flat, err);
    if (status == DCP_OK) {
        dcp_flat_free(flat);
    }
    dcp_value_free(root);
    return status;
}

static void keep_line(void *user, dcp_log_level level, const char *line)
{
    char *kept = user;
    assert_int_equal(level, DCP_LOG_WARNING);
    assert_int_equal(kept[0], 0); /* told once, however many there are */
    snprintf(kept, 400, "%s", line);
}

/* Nothing is lost, but the tree that is built of such leaves is another one. */
static void flatten_any__tells_who_gets_another_name(void **state)
{
    (void)state;
    static const struct {
        const char *tree, *words[4];
    } cases[] = {
        {"{a.b:1,a:{b:2}}", {"('a.b')", "('a', 'b')", "a.b#2", "second"}},
        {"{1:5,#1:6}", {"('1')", "1#2", "integer", "digits"}},
        {"{a.b:1,c.d:t,a:{b:2},c:{d:3}}", {"('a.b')", "('a', 'b')", "a.b#2", "others"}},
        {"{a:1,b:{c:2}}", {NULL}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *text = cases[i].tree;
        char line[400] = "";
        dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
        dcp_context *ctx;
        dcp_flat *flat;
        opts.log = keep_line;
        opts.log_user = line;
        assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
        dcp_value *root = parse(ctx, &text);
        assert_int_equal(dcp__flatten_any(ctx, root, DCP_FLATTEN_2_4, &flat, NULL), DCP_OK);
        assert_int_equal(line[0] != 0, cases[i].words[0] != NULL);
        for (size_t k = 0; k < 4 && cases[i].words[k]; k++) {
            assert_non_null(strstr(line, cases[i].words[k]));
        }
        dcp_flat_free(flat);
        dcp_value_free(root);
        dcp_context_free(ctx);
    }
}

static void flatten_any__out_of_memory(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(flatten_homonyms, NULL) > 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flatten__follows_the_published_table),
        cmocka_unit_test(flatten__paths_keep_list_positions_and_turn_keys_into_text),
        cmocka_unit_test(flatten__mappings_of_other_classes_flatten_too),
        cmocka_unit_test(flatten__one_name_for_two_paths_is_a_mismatch),
        cmocka_unit_test(flatten__root_must_be_a_dict),
        cmocka_unit_test(flatten__deep_trees_are_a_limit),
        cmocka_unit_test(flatten__shared_parts_do_not_explode),
        cmocka_unit_test(unflatten__rebuilds_what_flattening_kept),
        cmocka_unit_test(unflatten__gaps_in_lists_are_none),
        cmocka_unit_test(unflatten__contradicting_paths_are_a_mismatch),
        cmocka_unit_test(unflatten__a_container_value_is_not_built_into),
        cmocka_unit_test(unflatten__hostile_indices_are_limits),
        cmocka_unit_test(flatten__out_of_memory_leaks_nothing),
        cmocka_unit_test(flatten_any__leaves_of_one_name_are_numbered),
        cmocka_unit_test(flatten_any__tells_who_gets_another_name),
        cmocka_unit_test(flatten_any__out_of_memory),
        cmocka_unit_test(flatten__many_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
