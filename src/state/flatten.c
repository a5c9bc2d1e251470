/* Flattening by PyTorch's rules (formats.md 5).
 *
 * Trees from files may be graphs with shared parts, which small files can make exponentially large; so whether a container
 * flattens is remembered, and the number of visits is bounded. */
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/hash.h"
#include "base/strmap.h"
#include "state/containers.h"
#include "state/node.h"

typedef struct verdict {
    const dcp_value *container; /* NULL: empty slot */
    bool flattens;
} verdict;

struct dcp_flat {
    dcp_context *ctx;
    dcp__arena arena; /* names, paths, keys that are not in the tree */
    dcp_leaf *leaves;
    size_t n, cap;
    dcp__container *containers;
    size_t n_containers, cap_containers;
    dcp__strmap by_name;
};

/* A leaf with the name of an earlier one. */
typedef struct homonym {
    size_t leaf, first;
} homonym;

typedef struct flattener {
    dcp_flat *flat;
    dcp_flatten_rule rule;
    dcp_key *path;
    size_t path_len, path_cap;
    dcp__buf name;
    verdict *verdicts; /* open addressing */
    size_t n_verdicts, n_slots;
    uint64_t visits_left;
    bool renames; /* leaves whose name is taken get another one at the end */
    homonym *homonyms;
    size_t n_homonyms, cap_homonyms;
    dcp_error *err;
} flattener;

/* ---- which containers flatten ---- */

static bool is_tensor(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_TENSOR) || dcp__is_kind(v, DCP_KIND_SHARDED);
}

static verdict *slot_of(verdict *slots, size_t n_slots, const dcp_value *v)
{
    size_t i = (size_t)dcp__xxh3_64(&v, sizeof v) & (n_slots - 1);
    while (slots[i].container && slots[i].container != v) {
        i = (i + 1) & (n_slots - 1);
    }
    return &slots[i];
}

static dcp_status remember(flattener *f, const dcp_value *v, bool flattens)
{
    if (f->n_verdicts + 1 > f->n_slots / 2) {
        size_t n_slots = f->n_slots ? f->n_slots * 2 : 64;
        verdict *slots = dcp__calloc(f->flat->ctx, n_slots, sizeof *slots);
        if (!slots) {
            return dcp__nomem(f->err);
        }
        for (size_t i = 0; i < f->n_slots; i++) {
            if (f->verdicts[i].container) {
                *slot_of(slots, n_slots, f->verdicts[i].container) = f->verdicts[i];
            }
        }
        dcp__free(f->flat->ctx, f->verdicts);
        f->verdicts = slots;
        f->n_slots = n_slots;
    }
    *slot_of(f->verdicts, f->n_slots, v) = (verdict){v, flattens};
    f->n_verdicts++;
    return DCP_OK;
}

static dcp_value *element(const dcp_value *container, size_t i)
{
    dcp_key key;
    const dcp_value *odd_key;
    return dcp__is_mapping(container) ? dcp__mapping_at(container, i, &key, &odd_key) : dcp_value_at(container, i);
}

static size_t count(const dcp_value *container)
{
    return dcp__is_mapping(container) ? dcp__mapping_count(container) : dcp_value_count(container);
}

static dcp_status too_deep(flattener *f)
{
    return dcp__fail(f->err, DCP_LIMIT, "values are nested deeper than %u", dcp__depth_limit(f->flat->ctx));
}

/* Whether a value gives more than one leaf, or none. */
static dcp_status flattens(flattener *f, const dcp_value *v, uint32_t depth, bool *out)
{
    bool is_mapping = dcp__is_mapping(v);
    *out = is_mapping && f->rule == DCP_FLATTEN_2_4;
    if (*out || (!is_mapping && !dcp__is_kind(v, DCP_KIND_LIST))) {
        return DCP_OK;
    }
    const verdict *known = f->n_slots ? slot_of(f->verdicts, f->n_slots, v) : NULL;
    if (known && known->container) {
        *out = known->flattens;
        return DCP_OK;
    }
    if (depth > dcp__depth_limit(f->flat->ctx)) {
        return too_deep(f);
    }
    bool found = false;
    for (size_t i = 0; i < count(v) && !found; i++) {
        const dcp_value *e = element(v, i);
        found = is_tensor(e);
        dcp_status status = found ? DCP_OK : flattens(f, e, depth + 1, &found);
        if (status != DCP_OK) {
            return status;
        }
    }
    *out = found;
    return remember(f, v, found);
}

/* ---- leaves ---- */

typedef struct path_text {
    char text[400];
} path_text;

/* ('a', 0, 'b'), for messages; cut if it is long. */
static path_text print_path(const dcp_key *path, size_t n)
{
    path_text out;
    size_t len = (size_t)snprintf(out.text, sizeof out.text, "(");
    for (size_t i = 0; i < n && len < sizeof out.text - 80; i++) {
        const char *comma = i ? ", " : "";
        int added = path[i].is_int ? snprintf(out.text + len, 60, "%s%lld", comma, (long long)path[i].integer)
                                   : snprintf(out.text + len, 60, "%s'%s'", comma, dcp__print(path[i].string).text);
        len += added < 60 ? (size_t)added : 59;
    }
    snprintf(out.text + len, sizeof out.text - len, ")");
    return out;
}

/* Keys are texts here: 0 and "0" are not told apart by how paths look. */
static const char *explain_equal(const path_text *a, const path_text *b)
{
    return strcmp(a->text, b->text) == 0 ? " (a key is an integer in one of them, its digits in the other)" : "";
}

/* The leaf that comes next has the name of the one with number `first`. */
static dcp_status meet_name(flattener *f, size_t first, const dcp_leaf *next)
{
    const dcp_leaf *other = &f->flat->leaves[first];
    if (!f->renames) {
        path_text a = print_path(other->path, other->path_len), b = print_path(next->path, next->path_len);
        return dcp__fail(f->err, DCP_MISMATCH, "paths %s and %s have one name: %s%s", a.text, b.text, dcp__print(next->fqn).text,
                         explain_equal(&a, &b));
    }
    void *homonyms = f->homonyms;
    bool ok = dcp__grow(f->flat->ctx, &homonyms, &f->cap_homonyms, f->n_homonyms + 1, sizeof *f->homonyms);
    f->homonyms = homonyms;
    if (!ok) {
        return dcp__nomem(f->err);
    }
    f->homonyms[f->n_homonyms++] = (homonym){f->flat->n, first};
    return DCP_OK;
}

/* Gives a leaf the name with a number behind it, the first from *number on that nobody has, and the path of a key of the root
 * that is this name: PyTorch cannot hold a tree in which two paths have one name. */
static dcp_status rename_leaf(flattener *f, size_t i, uint32_t *number)
{
    dcp_leaf *leaf = &f->flat->leaves[i];
    dcp_str name = leaf->fqn;
    uint64_t existing;
    do {
        char text[16];
        f->name.len = 0;
        dcp__buf_put(&f->name, name.ptr, name.len);
        dcp__buf_put(&f->name, text, (size_t)snprintf(text, sizeof text, "#%u", (*number)++));
        if (f->name.failed) {
            return dcp__nomem(f->err);
        }
    } while (dcp__strmap_get(&f->flat->by_name, (dcp_str){(const char *)f->name.data, f->name.len}, &existing));
    dcp_str fqn = dcp__arena_str(&f->flat->arena, (dcp_str){(const char *)f->name.data, f->name.len});
    dcp_key *path = dcp__arena_alloc(&f->flat->arena, sizeof *path);
    if (!fqn.ptr || !path) {
        return dcp__arena_fail(&f->flat->arena, f->err);
    }
    *path = (dcp_key){.string = fqn};
    *leaf = (dcp_leaf){fqn, path, 1, leaf->value};
    return dcp__strmap_add(&f->flat->by_name, fqn, i, NULL, f->err);
}

/* Told once: the tree that is built again of such leaves is another one. */
static void tell_of_homonyms(const flattener *f, const path_text *before)
{
    const dcp_leaf *other = &f->flat->leaves[f->homonyms[0].first], *leaf = &f->flat->leaves[f->homonyms[0].leaf];
    path_text first = print_path(other->path, other->path_len);
    dcp__log(f->flat->ctx, DCP_LOG_WARNING, "paths %s and %s have one name, %s%s: the second is called %s, by itself%s",
             first.text, before->text, dcp__print(other->fqn).text, explain_equal(&first, before), dcp__print(leaf->fqn).text,
             f->n_homonyms > 1 ? "; there are others" : "");
}

/* After the walk, so that nobody's own name is taken for another. */
static dcp_status rename_homonyms(flattener *f)
{
    if (!f->n_homonyms) {
        return DCP_OK;
    }
    const dcp_leaf *leaf = &f->flat->leaves[f->homonyms[0].leaf];
    path_text before = print_path(leaf->path, leaf->path_len);
    uint32_t *next = dcp__calloc(f->flat->ctx, f->flat->n, sizeof *next); /* number for the next leaf with this one's name */
    dcp_status status = next ? DCP_OK : dcp__nomem(f->err);
    for (size_t i = 0; status == DCP_OK && i < f->n_homonyms; i++) {
        uint32_t *number = &next[f->homonyms[i].first];
        *number += *number ? 0 : 2;
        status = rename_leaf(f, f->homonyms[i].leaf, number);
    }
    dcp__free(f->flat->ctx, next);
    if (status == DCP_OK) {
        tell_of_homonyms(f, &before);
    }
    return status;
}

static dcp_status add_leaf(flattener *f, dcp_value *v)
{
    dcp_flat *flat = f->flat;
    void *leaves = flat->leaves;
    bool ok = dcp__grow(flat->ctx, &leaves, &flat->cap, flat->n + 1, sizeof *flat->leaves);
    flat->leaves = leaves;
    if (!ok || f->name.failed) {
        return dcp__nomem(f->err);
    }
    dcp_str fqn = dcp__arena_str(&flat->arena, (dcp_str){(const char *)f->name.data, f->name.len});
    dcp_key *path = dcp__arena_alloc(&flat->arena, f->path_len * sizeof *path);
    if (!fqn.ptr || !path) {
        return dcp__arena_fail(&flat->arena, f->err);
    }
    memcpy(path, f->path, f->path_len * sizeof *path);
    uint64_t existing;
    dcp_status status = dcp__strmap_add(&flat->by_name, fqn, flat->n, &existing, f->err);
    if (status != DCP_OK) {
        return status;
    }
    dcp_leaf leaf = {fqn, path, f->path_len, v};
    status = existing == UINT64_MAX ? DCP_OK : meet_name(f, (size_t)existing, &leaf);
    if (status == DCP_OK) {
        flat->leaves[flat->n++] = leaf;
    }
    return status;
}

/* Notes what the leaves will not tell of the current path. */
static dcp_status add_container(flattener *f, const char *kind)
{
    dcp_flat *flat = f->flat;
    void *containers = flat->containers;
    bool ok = dcp__grow(flat->ctx, &containers, &flat->cap_containers, flat->n_containers + 1, sizeof *flat->containers);
    flat->containers = containers;
    if (!ok) {
        return dcp__nomem(f->err);
    }
    dcp_key *path = dcp__arena_alloc(&flat->arena, f->path_len * sizeof *path);
    if (!path) {
        return dcp__arena_fail(&flat->arena, f->err);
    }
    if (f->path_len) {
        memcpy(path, f->path, f->path_len * sizeof *path);
    }
    flat->containers[flat->n_containers++] = (dcp__container){path, f->path_len, dcp_str_of(kind), flat->n};
    return DCP_OK;
}

/* ---- keys ---- */

static dcp_status push(flattener *f, dcp_key key)
{
    void *path = f->path;
    bool ok = dcp__grow(f->flat->ctx, &path, &f->path_cap, f->path_len + 1, sizeof *f->path);
    f->path = path;
    if (!ok) {
        return dcp__nomem(f->err);
    }
    if (f->path_len) {
        dcp__buf_put_byte(&f->name, '.');
    }
    if (key.is_int) {
        char text[24];
        dcp__buf_put(&f->name, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)key.integer));
    } else {
        dcp__buf_put(&f->name, key.string.ptr, key.string.len);
    }
    f->path[f->path_len++] = key;
    return f->name.failed ? dcp__nomem(f->err) : DCP_OK;
}

static dcp_status text_key(flattener *f, dcp_str text, dcp_key *out)
{
    dcp_str copy = dcp__arena_str(&f->flat->arena, text);
    if (!copy.ptr) {
        return dcp__arena_fail(&f->flat->arena, f->err);
    }
    *out = (dcp_key){.string = copy};
    return DCP_OK;
}

/* Python's str() of a key. */
static dcp_status key_to_text(flattener *f, dcp_key key, const dcp_value *odd_key, dcp_key *out)
{
    if (odd_key) {
        char *text;
        size_t len;
        dcp_status status = dcp_value_repr(odd_key, 0, &text, &len, f->err);
        if (status == DCP_OK) {
            status = text_key(f, (dcp_str){text, len}, out);
            dcp_text_free(odd_key->ctx, text);
        }
        return status;
    }
    if (key.is_int) {
        char text[24];
        int len = snprintf(text, sizeof text, "%lld", (long long)key.integer);
        return text_key(f, (dcp_str){text, (size_t)len}, out);
    }
    *out = key;
    return DCP_OK;
}

/* ---- the walk ---- */

static dcp_status visit(flattener *f, dcp_value *v, uint32_t depth);

/* was_int: the dict has an integer where the path has its text. */
static dcp_status visit_below(flattener *f, dcp_key key, bool was_int, dcp_value *v, uint32_t depth)
{
    size_t name_len = f->name.len, path_len = f->path_len;
    dcp_status status = push(f, key);
    status = status == DCP_OK && was_int ? add_container(f, "int_key") : status;
    status = status == DCP_OK ? visit(f, v, depth + 1) : status;
    f->name.len = name_len;
    f->path_len = path_len;
    return status;
}

static dcp_status note_dict(flattener *f, const dcp_value *v)
{
    dcp_status status = count(v) == 0 && f->path_len ? add_container(f, "dict") : DCP_OK;
    return status == DCP_OK && dcp__is_kind(v, DCP_KIND_ORDERED_DICT) ? add_container(f, "ordered_dict") : status;
}

static dcp_status visit_elements(flattener *f, const dcp_value *v, uint32_t depth)
{
    bool is_mapping = dcp__is_mapping(v);
    dcp_status status = is_mapping ? note_dict(f, v) : DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < count(v); i++) {
        dcp_key key = dcp_key_int((int64_t)i);
        dcp_value *e = dcp_value_at(v, i);
        bool was_int = false;
        if (is_mapping) {
            const dcp_value *odd_key;
            e = dcp__mapping_at(v, i, &key, &odd_key);
            was_int = !odd_key && key.is_int;
            status = key_to_text(f, key, odd_key, &key);
        }
        status = status == DCP_OK ? visit_below(f, key, was_int, e, depth) : status;
    }
    return status;
}

static dcp_status visit(flattener *f, dcp_value *v, uint32_t depth)
{
    if (f->visits_left-- == 0) {
        return dcp__fail(f->err, DCP_LIMIT, "flattening gives too many values");
    }
    if (depth > dcp__depth_limit(f->flat->ctx)) {
        return too_deep(f);
    }
    bool is_inner;
    dcp_status status = flattens(f, v, depth, &is_inner);
    if (status != DCP_OK) {
        return status;
    }
    return is_inner ? visit_elements(f, v, depth) : add_leaf(f, v);
}

static dcp_flat *new_flat(dcp_context *ctx)
{
    dcp_flat *flat = dcp__calloc(ctx, 1, sizeof *flat);
    if (flat) {
        flat->ctx = ctx;
        dcp__arena_init(&flat->arena, ctx, ctx->limits.max_parse_bytes);
        dcp__strmap_init(&flat->by_name, ctx);
    }
    return flat;
}

static dcp_status flatten(dcp_context *ctx, dcp_value *root, dcp_flatten_rule rule, bool renames, dcp_flat **out, dcp_error *err)
{
    if (!dcp__is_mapping(root) || (rule != DCP_FLATTEN_2_4 && rule != DCP_FLATTEN_2_1)) {
        return dcp__fail(err, DCP_ARG,
                         dcp__is_mapping(root) ? "flatten: no rule has this number" : "flatten: the root is no dict");
    }
    ctx = dcp__context(ctx);
    dcp_flat *flat = new_flat(ctx);
    if (!flat) {
        return dcp__nomem(err);
    }
    flattener f = {.flat = flat, .rule = rule, .visits_left = dcp__visit_limit(ctx), .renames = renames, .err = err};
    dcp__buf_init(&f.name, ctx);
    dcp_status status = visit_elements(&f, root, 0);
    status = status == DCP_OK ? rename_homonyms(&f) : status;
    dcp__buf_reset(&f.name);
    dcp__free(ctx, f.homonyms);
    dcp__free(ctx, f.path);
    dcp__free(ctx, f.verdicts);
    if (status != DCP_OK) {
        dcp_flat_free(flat);
        return status;
    }
    *out = flat;
    return DCP_OK;
}

dcp_status dcp_flatten(dcp_context *ctx, dcp_value *root, dcp_flatten_rule rule, dcp_flat **out, dcp_error *err)
{
    return flatten(ctx, root, rule, false, out, err);
}

dcp_status dcp__flatten_any(dcp_context *ctx, dcp_value *root, dcp_flatten_rule rule, dcp_flat **out, dcp_error *err)
{
    return flatten(ctx, root, rule, true, out, err);
}

void dcp_flat_free(dcp_flat *flat)
{
    if (flat) {
        dcp__strmap_reset(&flat->by_name);
        dcp__free(flat->ctx, flat->leaves);
        dcp__free(flat->ctx, flat->containers);
        dcp__arena_reset(&flat->arena);
        dcp__free(flat->ctx, flat);
    }
}

size_t dcp_flat_count(const dcp_flat *flat)
{
    return flat->n;
}

const dcp_leaf *dcp_flat_leaf(const dcp_flat *flat, size_t i)
{
    return i < flat->n ? &flat->leaves[i] : NULL;
}

bool dcp_flat_find(const dcp_flat *flat, dcp_str fqn, size_t *out)
{
    uint64_t i;
    if (!dcp__strmap_get(&flat->by_name, fqn, &i)) {
        return false;
    }
    *out = (size_t)i;
    return true;
}

const dcp__container *dcp__flat_containers(const dcp_flat *flat, size_t *n)
{
    *n = flat->n_containers;
    return flat->containers;
}
