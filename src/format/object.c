#include "format/object.h"

#include "format/object_builder.h"

/* Deeper values are refused whatever the limits say, because building recurses. */
#define MAX_DEPTH 1000
/* What a value takes besides its content, for the accounting. */
#define VALUE_BYTES 96

static dcp_str text_of(const char *text)
{
    return (dcp_str){text, strlen(text)};
}

/* ---- references ---- */

/* Hands the value of a node out once more. */
static bool reuse(dcp__builder *b, dcp__pv v, dcp_value **out)
{
    uint64_t kept = dcp__pv_is_node(v) ? dcp__pv_node(v)->client : 0;
    if (kept) {
        *out = dcp_value_retain(b->kept[kept - 1]);
    }
    return kept != 0;
}

/* The builder holds a reference of its own, since the tree may drop the value before the node is met again. */
static dcp_status keep(dcp__builder *b, dcp__pv v, dcp_value *value, dcp_error *err)
{
    void *kept = b->kept;
    bool grown = dcp__grow(b->ctx, &kept, &b->kept_cap, b->n_kept + 1, sizeof *b->kept);
    b->kept = kept;
    if (!grown) {
        return dcp__nomem(err);
    }
    b->kept[b->n_kept++] = dcp_value_retain(value);
    dcp__pv_node(v)->client = b->n_kept;
    return DCP_OK;
}

static dcp_status charge(dcp__builder *b, uint64_t bytes, dcp_error *err)
{
    if (bytes > b->left_bytes) {
        return dcp__fail(err, DCP_LIMIT, "values of a pickle take more than %llu bytes",
                         (unsigned long long)b->ctx->limits.max_parse_bytes);
    }
    b->left_bytes -= bytes;
    return DCP_OK;
}

/* ---- containers ---- */

/* Appends n values, those at items[0], items[step], ... */
static dcp_status append_all(dcp__builder *b, dcp_value *seq, const dcp__pv *items, size_t n, unsigned depth, dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        dcp_value *element = NULL;
        dcp_status st = dcp__build(b, items[i], depth + 1, &element, err);
        if (st) {
            return st;
        }
        st = dcp_list_append(seq, element, err);
        if (st) {
            dcp_value_free(element);
            return st;
        }
    }
    return DCP_OK;
}

static dcp_status build_seq(dcp__builder *b, dcp_kind kind, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(v, &n);
    dcp_value *seq;
    dcp_status st = charge(b, n * sizeof(void *), err);
    st = st ? st : dcp_seq_create(b->ctx, kind, &seq, err);
    if (st) {
        return st;
    }
    st = append_all(b, seq, items, n, depth, err);
    if (st) {
        dcp_value_free(seq);
        return st;
    }
    *out = seq;
    return DCP_OK;
}

static bool key_of(dcp__pv v, dcp_key *key)
{
    *key = (dcp_key){.string = dcp__pv_text(v)};
    key->is_int = dcp__pv_int(v, &key->integer);
    return key->is_int || dcp__pv_is_str(v);
}

/* Dicts of the tree have keys of str and int64 only. */
static bool keys_fit(const dcp__pv *pairs, size_t n)
{
    dcp_key key;
    for (size_t i = 0; i + 1 < n; i += 2) {
        if (!key_of(pairs[i], &key)) {
            return false;
        }
    }
    return true;
}

static dcp_status set_all(dcp__builder *b, dcp_value *dict, const dcp__pv *pairs, size_t n, unsigned depth, dcp_error *err)
{
    for (size_t i = 0; i + 1 < n; i += 2) {
        dcp_key key;
        key_of(pairs[i], &key);
        dcp_value *value;
        dcp_status st = dcp__build(b, pairs[i + 1], depth + 1, &value, err);
        if (st) {
            return st;
        }
        st = dcp_dict_set(dict, key, value, err);
        if (st) {
            dcp_value_free(value);
            return st;
        }
    }
    return DCP_OK;
}

/* A dict whose keys are of other kinds: as Python would make an empty one and set its entries. */
static dcp_status build_odd_dict(dcp__builder *b, dcp_kind kind, dcp__pv pairs, uint64_t bytes, unsigned depth, dcp_value **out,
                                 dcp_error *err)
{
    bool is_plain = kind == DCP_KIND_DICT;
    dcp__opaque o = {
        .form = DCP__OPAQUE_REDUCE,
        .module = text_of(is_plain ? "builtins" : "collections"),
        .name = text_of(is_plain ? "dict" : "OrderedDict"),
        .bytes = bytes,
    };
    dcp_status st = dcp_seq_create(b->ctx, DCP_KIND_TUPLE, &o.args, err);
    st = st ? st : build_seq(b, DCP_KIND_LIST, pairs, depth, &o.pairs, err);
    st = st ? st : dcp__opaque_create(b->ctx, &o, out, err);
    if (st) {
        dcp_value_free(o.args);
        dcp_value_free(o.pairs);
    }
    return st;
}

/* `bytes` is the span in the pickle, for odd dicts. */
static dcp_status build_dict(dcp__builder *b, dcp_kind kind, dcp__pv pairs, uint64_t bytes, unsigned depth, dcp_value **out,
                             dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(pairs, &n);
    if (!keys_fit(items, n)) {
        return build_odd_dict(b, kind, pairs, bytes, depth, out, err);
    }
    dcp_value *dict;
    dcp_status st = charge(b, n * sizeof(dcp_key), err);
    st = st ? st : kind == DCP_KIND_DICT ? dcp_dict_create(b->ctx, &dict, err) : dcp_ordered_dict_create(b->ctx, &dict, err);
    if (st) {
        return st;
    }
    st = set_all(b, dict, items, n, depth, err);
    if (st) {
        dcp_value_free(dict);
        return st;
    }
    *out = dict;
    return DCP_OK;
}

/* ---- opaque values ---- */

static void free_parts(dcp__opaque *o)
{
    dcp_value_free(o->callable);
    dcp_value_free(o->args);
    dcp_value_free(o->kwargs);
    dcp_value_free(o->state);
    dcp_value_free(o->items);
    dcp_value_free(o->pairs);
}

static dcp_status build_part(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err)
{
    return v ? dcp__build(b, v, depth + 1, out, err) : DCP_OK;
}

/* A callable that is no global is kept as a value; the whole goes by its class where it has one. */
static dcp_status build_callable(dcp__builder *b, dcp__pv callable, unsigned depth, dcp__opaque *o, dcp_error *err)
{
    const dcp__pglobal *g = dcp__pv_global(callable);
    if (g) {
        o->module = g->module;
        o->name = g->name;
        return DCP_OK;
    }
    dcp_status st = build_part(b, callable, depth, &o->callable, err);
    const dcp__opaque *inner = o->callable ? dcp__value_opaque(o->callable) : NULL;
    o->module = inner ? inner->module : text_of("builtins");
    o->name = inner ? inner->name : text_of("object");
    return st;
}

/* Persistent ids go by the class of the storage, others have no name. */
static void name_persistent_id(const dcp__pobject *p, dcp__opaque *o)
{
    size_t n;
    const dcp__pv *id = dcp__pv_items(p->args, &n);
    const dcp__pglobal *cls = n >= 2 ? dcp__pv_global(id[1]) : NULL;
    o->module = cls ? cls->module : text_of("pickle");
    o->name = cls ? cls->name : text_of("persistent_id");
}

static dcp_status build_opaque(dcp__builder *b, const dcp__pobject *p, unsigned depth, dcp_value **out, dcp_error *err)
{
    static const dcp__opaque_form forms[] = {
        [DCP__PFORM_REDUCE] = DCP__OPAQUE_REDUCE,
        [DCP__PFORM_NEWOBJ] = DCP__OPAQUE_NEWOBJ,
        [DCP__PFORM_NEWOBJ_EX] = DCP__OPAQUE_NEWOBJ_EX,
        [DCP__PFORM_PERSID] = DCP__OPAQUE_PERSID,
    };
    dcp__opaque o = {.form = forms[p->form], .bytes = p->end - p->start};
    dcp_status st = DCP_OK;
    if (p->form == DCP__PFORM_PERSID) {
        name_persistent_id(p, &o);
    } else {
        st = build_callable(b, p->callable, depth, &o, err);
    }
    /* The order of the stream: storages are numbered as they appear. */
    st = st ? st : build_part(b, p->args, depth, &o.args, err);
    st = st ? st : build_part(b, p->kwargs, depth, &o.kwargs, err);
    st = st ? st : build_part(b, p->items, depth, &o.items, err);
    st = st || !p->pairs ? st : build_seq(b, DCP_KIND_LIST, p->pairs, depth + 1, &o.pairs, err);
    st = st ? st : build_part(b, p->state, depth, &o.state, err);
    st = st ? st : dcp__opaque_create(b->ctx, &o, out, err);
    if (st) {
        free_parts(&o);
    }
    return st;
}

/* The class or function itself: a dtype, or opaque. */
static dcp_status build_global(dcp__builder *b, const dcp__pglobal *g, dcp_value **out, dcp_error *err)
{
    bool in_torch = g->module.len == 5 && memcmp(g->module.ptr, "torch", 5) == 0;
    dcp_dtype dtype = in_torch ? dcp_dtype_from_name(g->name) : DCP_DTYPE_NONE;
    if (dtype != DCP_DTYPE_NONE) {
        return dcp_dtype_create(b->ctx, dtype, out, err);
    }
    /* Protocol 2's opcode, two lines and a newline each. */
    dcp__opaque o = {
        .form = DCP__OPAQUE_GLOBAL,
        .module = g->module,
        .name = g->name,
        .bytes = g->module.len + g->name.len + 3,
    };
    return dcp__opaque_create(b->ctx, &o, out, err);
}

/* ---- objects ---- */

/* OrderedDict() and its entries. Attributes are dropped, as DCP does: torch hangs _metadata on the dict of a module. */
static dcp_status build_ordered_dict(dcp__builder *b, const dcp__pobject *p, unsigned depth, dcp_value **out, dcp_error *err)
{
    dcp_value *dropped = NULL;
    dcp_status st = build_dict(b, DCP_KIND_ORDERED_DICT, p->pairs, p->end - p->start, depth, out, err);
    if (st) {
        return st;
    }
    /* Built all the same, because a storage may be named there first. */
    st = build_part(b, p->state, depth, &dropped, err);
    dcp_value_free(dropped);
    if (st) {
        dcp_value_free(*out);
        *out = NULL;
    }
    return st;
}

static dcp_status check_form(const dcp__pobject *p, dcp_error *err)
{
    bool bad = p->form != DCP__PFORM_PERSID && dcp__pv_kind(p->args) != DCP__P_TUPLE;
    bad = bad || (p->form == DCP__PFORM_NEWOBJ_EX && dcp__pv_kind(p->kwargs) != DCP__P_DICT);
    return bad ? dcp__fail_at(err, DCP_FORMAT, p->start, "pickle: arguments of an object are no tuple") : DCP_OK;
}

static dcp_status build_object(dcp__builder *b, const dcp__pobject *p, unsigned depth, dcp_value **out, dcp_error *err)
{
    dcp_status st = check_form(p, err);
    if (st) {
        return st;
    }
    dcp_value *made = NULL;
    if (p->form == DCP__PFORM_PERSID) {
        size_t index;
        st = dcp__builder_storage(b, p, &index, err);
    } else if (p->form == DCP__PFORM_REDUCE) {
        dcp__call call = {.callable = dcp__pv_global(p->callable), .object = p, .start = p->start};
        call.args = dcp__pv_items(p->args, &call.n_args);
        bool is_plain = !p->state && !p->items && !p->pairs;
        if (dcp__pv_is_global(p->callable, "collections", "OrderedDict") && call.n_args == 0 && !p->items) {
            st = build_ordered_dict(b, p, depth, &made, err);
        } else if (call.callable && is_plain) {
            st = dcp__build_call(b, &call, depth, &made, err);
        }
    }
    if (!st && !made) {
        st = build_opaque(b, p, depth, &made, err);
    }
    if (!st) {
        *out = made;
    }
    return st;
}

static dcp_status build_int(dcp__builder *b, dcp__pv v, dcp_value **out, dcp_error *err)
{
    int64_t i;
    if (dcp__pv_int(v, &i)) {
        return dcp_int_create(b->ctx, i, out, err);
    }
    dcp_str bytes = dcp__pv_text(v);
    return dcp_bigint_create(b->ctx, (const uint8_t *)bytes.ptr, bytes.len, out, err);
}

static dcp_status build_kind(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err)
{
    dcp_str text = dcp__pv_text(v);
    switch (dcp__pv_kind(v)) {
    case DCP__P_NONE: return dcp_none_create(b->ctx, out, err);
    case DCP__P_BOOL: return dcp_bool_create(b->ctx, v == DCP__PV_TRUE, out, err);
    case DCP__P_INT: return build_int(b, v, out, err);
    case DCP__P_FLOAT: return dcp_float_create(b->ctx, dcp__pv_float(v), out, err);
    case DCP__P_STR: return dcp_string_create(b->ctx, text, out, err);
    case DCP__P_BYTES: return dcp_bytes_create(b->ctx, DCP_KIND_BYTES, text.ptr, text.len, out, err);
    case DCP__P_BYTEARRAY: return dcp_bytes_create(b->ctx, DCP_KIND_BYTEARRAY, text.ptr, text.len, out, err);
    case DCP__P_TUPLE: return build_seq(b, DCP_KIND_TUPLE, v, depth, out, err);
    case DCP__P_LIST: return build_seq(b, DCP_KIND_LIST, v, depth, out, err);
    case DCP__P_SET: return build_seq(b, DCP_KIND_SET, v, depth, out, err);
    case DCP__P_FROZENSET: return build_seq(b, DCP_KIND_FROZENSET, v, depth, out, err);
    case DCP__P_DICT: return build_dict(b, DCP_KIND_DICT, v, 0, depth, out, err);
    case DCP__P_GLOBAL: return build_global(b, dcp__pv_global(v), out, err);
    case DCP__P_OBJECT: return build_object(b, dcp__pv_object(v), depth, out, err);
    default: return dcp__fail(err, DCP_INTERNAL, "pickle: a node of kind %s in an object", dcp__pv_kind_name(v));
    }
}

static dcp_status build(dcp__builder *b, dcp__pv v, bool is_kept, unsigned depth, dcp_value **out, dcp_error *err)
{
    if (reuse(b, v, out)) {
        return DCP_OK;
    }
    if (depth > b->ctx->limits.max_depth || depth > MAX_DEPTH) {
        return dcp__fail(err, DCP_LIMIT, "pickle: values are nested more than %u deep", depth - 1);
    }
    dcp_value *value;
    dcp_status st = charge(b, VALUE_BYTES + dcp__pv_text(v).len, err);
    st = st ? st : build_kind(b, v, depth, &value, err);
    if (st) {
        return st;
    }
    st = is_kept && dcp__pv_is_node(v) ? keep(b, v, value, err) : DCP_OK;
    if (st) {
        dcp_value_free(value);
        return st;
    }
    *out = value;
    return DCP_OK;
}

dcp_status dcp__build(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err)
{
    return build(b, v, dcp__pv_is_shared(v), depth, out, err);
}

dcp_status dcp__build_once(dcp__builder *b, dcp__pv v, unsigned depth, dcp_value **out, dcp_error *err)
{
    return build(b, v, true, depth, out, err);
}

/* ---- entry points ---- */

static void builder_reset(dcp__builder *b)
{
    for (size_t i = 0; i < b->n_kept; i++) {
        dcp_value_free(b->kept[i]);
    }
    dcp__free(b->ctx, b->kept);
    dcp__strmap_reset(&b->by_key);
}

dcp_status dcp__object_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, dcp__object *out, dcp_error *err)
{
    dcp__pickle pickle;
    dcp_status st = dcp__pickle_read(ctx, src, offset, NULL, &pickle, err);
    if (st) {
        return st;
    }
    dcp__object object = {.ctx = ctx, .end = pickle.end};
    dcp__builder b = {.ctx = ctx, .object = &object, .left_bytes = ctx->limits.max_parse_bytes};
    dcp__strmap_init(&b.by_key, ctx);
    st = dcp__build(&b, pickle.root, 0, &object.value, err);
    builder_reset(&b);
    dcp__pickle_reset(&pickle);
    if (st) {
        dcp__object_reset(&object);
        return st;
    }
    *out = object;
    return DCP_OK;
}

void dcp__object_reset(dcp__object *o)
{
    dcp_value_free(o->value);
    for (size_t i = 0; i < o->n_storages; i++) {
        dcp__free(o->ctx, (char *)o->storages[i].key.ptr);
    }
    dcp__free(o->ctx, o->storages);
    *o = (dcp__object){.ctx = o->ctx};
}
