/* Opaque values: what a pickle would have made by calling code, kept as data. */
#include <string.h>

#include "base/checked.h"
#include "state/node.h"

/* One block: "module.name", "module", "name", each NUL-terminated. */
static dcp_status copy_names(dcp_context *ctx, dcp__opaque *parts, dcp_error *err)
{
    dcp_str module = parts->module, name = parts->name;
    size_t sum, bytes;
    if (!dcp__add_size(module.len, name.len, &sum) || !dcp__mul_size(sum, 2, &bytes) || !dcp__add_size(bytes, 4, &bytes)) {
        return dcp__nomem(err);
    }
    char *p = dcp__alloc(ctx, bytes);
    if (!p) {
        return dcp__nomem(err);
    }
    memset(p, 0, bytes);
    char *module_copy = p + sum + 2, *name_copy = module_copy + module.len + 1;
    if (module.len) {
        memcpy(p, module.ptr, module.len);
        memcpy(module_copy, module.ptr, module.len);
    }
    p[module.len] = '.';
    if (name.len) {
        memcpy(p + module.len + 1, name.ptr, name.len);
        memcpy(name_copy, name.ptr, name.len);
    }
    parts->qualified = (dcp_str){p, sum + 1};
    parts->module = (dcp_str){module_copy, module.len};
    parts->name = (dcp_str){name_copy, name.len};
    return DCP_OK;
}

dcp_status dcp__opaque_create(dcp_context *ctx, const dcp__opaque *parts, dcp_value **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    dcp__opaque copy = *parts;
    dcp_status status = copy_names(ctx, &copy, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__opaque_node *n = dcp__node_alloc(ctx, DCP_KIND_OPAQUE, sizeof *n);
    if (!n) {
        dcp__free(ctx, (void *)copy.qualified.ptr);
        return dcp__nomem(err);
    }
    n->base.link.cap = 0;
    n->parts = copy;
    *out = &n->base.head;
    return DCP_OK;
}

const dcp__opaque *dcp__value_opaque(const dcp_value *v)
{
    return dcp__is_kind(v, DCP_KIND_OPAQUE) ? &((const dcp__opaque_node *)v)->parts : NULL;
}

dcp_str dcp_opaque_class(const dcp_value *v)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    return o ? o->qualified : (dcp_str){NULL, 0};
}

uint64_t dcp_opaque_bytes(const dcp_value *v)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    return o ? o->bytes : 0;
}

static bool is_text(dcp_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.ptr, text, s.len) == 0;
}

bool dcp__is_opaque_named(const dcp_value *v, const char *module, const char *name)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    if (!o || o->callable || !is_text(o->name, name)) {
        return false;
    }
    return is_text(o->module, module) || (strcmp(module, "builtins") == 0 && is_text(o->module, "__builtin__"));
}

/* What gets SETITEMS is a dict of some class; without, only the names tell. */
bool dcp__is_mapping(const dcp_value *v)
{
    if (dcp__is_dict(v)) {
        return true;
    }
    const dcp__opaque *o = dcp__value_opaque(v);
    if (!o || o->form == DCP__OPAQUE_GLOBAL) {
        return false;
    }
    return o->pairs || dcp__is_opaque_named(v, "builtins", "dict") || dcp__is_opaque_named(v, "collections", "OrderedDict") ||
           dcp__is_opaque_named(v, "collections", "defaultdict");
}

size_t dcp__mapping_count(const dcp_value *v)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    return o ? dcp_value_count(o->pairs) / 2 : dcp_value_count(v);
}

dcp_value *dcp__mapping_at(const dcp_value *v, size_t i, dcp_key *key, const dcp_value **odd_key)
{
    const dcp__opaque *o = dcp__value_opaque(v);
    *odd_key = NULL;
    if (!o) {
        *key = dcp_dict_key(v, i);
        return dcp_value_at(v, i);
    }
    const dcp_value *k = dcp_value_at(o->pairs, 2 * i);
    int64_t integer;
    if (dcp__is_kind(k, DCP_KIND_STR)) {
        *key = (dcp_key){.string = dcp_value_str(k)};
    } else if (dcp_value_int(k, &integer)) {
        *key = dcp_key_int(integer);
    } else {
        *odd_key = k;
    }
    return dcp_value_at(o->pairs, 2 * i + 1);
}
