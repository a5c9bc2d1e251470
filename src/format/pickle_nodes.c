/* Nodes: how they are made, given back and looked at. */
#include "format/pickle_machine.h"

#define SMALL_CAP 16 /* elements; emptied lists keep arrays up to this size */

/* Bytes of a node that dcp__pnode_alloc made. */
static size_t node_bytes(const dcp__pnode *node)
{
    switch ((dcp__pkind)node->kind) {
    case DCP__P_TUPLE:
    case DCP__P_INTS: return sizeof *node + (size_t)node->count * 8;
    case DCP__P_FLOAT: return sizeof(dcp__pfloat);
    case DCP__P_GLOBAL: return sizeof(dcp__pglobal);
    case DCP__P_OBJECT: return sizeof(dcp__pobject);
    case DCP__P_LIST:
    case DCP__P_SET:
    case DCP__P_FROZENSET:
    case DCP__P_DICT: return sizeof(dcp__plist);
    default: return sizeof *node + (size_t)node->count + 1;
    }
}

static bool is_list(const dcp__pnode *node)
{
    return node->kind >= DCP__P_LIST && node->kind <= DCP__P_DICT;
}

/* Arrays have a power of two of elements. */
static unsigned array_class(size_t cap)
{
    return (unsigned)__builtin_ctzll(cap);
}

static void free_array(dcp__pmachine *m, dcp__pv *items, size_t cap)
{
    if (cap) {
        void **link = &m->free_arrays[array_class(cap)];
        memcpy(items, link, sizeof *link);
        *link = items;
    }
}

static dcp__pv *alloc_array(dcp__pmachine *m, size_t cap)
{
    void **link = &m->free_arrays[array_class(cap)];
    if (*link) {
        dcp__pv *items = *link;
        memcpy(link, items, sizeof *link);
        return items;
    }
    return dcp__arena_alloc(m->arena, cap * sizeof(dcp__pv));
}

/* Puts the node where the next one of its size is taken from. */
static void free_node(dcp__pmachine *m, dcp__pnode *node)
{
    if (is_list(node)) {
        dcp__plist *list = (dcp__plist *)node;
        if (list->cap > 0 && list->cap <= SMALL_CAP) {
            list->node.client = dcp__pv_of_node(m->free_lists);
            m->free_lists = list;
            return;
        }
        free_array(m, list->items, list->cap);
    }
    size_t words = (node_bytes(node) + 7) / 8;
    if (words < DCP__P_CLASSES) {
        void **link = &m->free_nodes[words];
        memcpy(node, link, sizeof *link);
        *link = node;
    }
}

void dcp__pmachine_replace(dcp__pmachine *m, dcp__pv v, dcp__pv with)
{
    if (!v || !dcp__pv_is_node(v) || (dcp__pv_node(v)->flags & DCP__P_SHARED) || m->keeps_all) {
        return;
    }
    dcp__pnode *node = dcp__pv_node(v);
    if (node->memo) {
        *dcp__pmachine_memo(m, node->memo - 1) = with;
    }
    free_node(m, node);
}

void dcp__pmachine_recycle(dcp__pmachine *m, dcp__pv v)
{
    dcp__pmachine_replace(m, v, DCP__PV_GONE);
}

dcp__plist *dcp__plist_alloc(dcp__pmachine *m, dcp__pkind kind)
{
    dcp__plist *list = m->free_lists;
    if (list) {
        m->free_lists = (dcp__plist *)dcp__pv_node(list->node.client);
        list->node = (dcp__pnode){.kind = (uint8_t)kind};
        return list;
    }
    list = dcp__pnode_alloc(m, sizeof *list, kind, 0);
    if (list) {
        list->items = NULL;
        list->cap = 0;
    }
    return list;
}

static dcp_status grow_list(dcp__pmachine *m, dcp__plist *list, size_t need, dcp_error *err)
{
    size_t cap = list->cap ? list->cap : 4;
    while (cap < need) {
        cap *= 2;
    }
    dcp__pv *items = alloc_array(m, cap);
    if (!items) {
        return dcp__arena_fail(m->arena, err);
    }
    if (list->node.count) {
        memcpy(items, list->items, list->node.count * sizeof *items);
    }
    free_array(m, list->items, list->cap);
    list->items = items;
    list->cap = cap;
    return DCP_OK;
}

dcp_status dcp__plist_append(dcp__pmachine *m, dcp__plist *list, const dcp__pv *items, size_t n, dcp_error *err)
{
    size_t need = list->node.count + n;
    if (need > UINT32_MAX) {
        return dcp__fail_at(err, DCP_LIMIT, m->position, "pickle: container of %zu elements", need);
    }
    if (need > list->cap) {
        dcp_status status = grow_list(m, list, need, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    for (size_t i = 0; i < n; i++) {
        list->items[list->node.count + i] = items[i];
    }
    list->node.count = (uint32_t)need;
    return DCP_OK;
}

dcp_status dcp__pmachine_ints(dcp__pmachine *m, dcp__pv seq, dcp__pv *out, dcp_error *err)
{
    dcp__pkind kind = dcp__pv_kind(seq);
    size_t n;
    const dcp__pv *items = dcp__pv_items(seq, &n);
    if (kind == DCP__P_INTS) {
        *out = seq;
        return DCP_OK;
    }
    if (kind != DCP__P_TUPLE && kind != DCP__P_LIST) {
        return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: %s where a tuple of integers belongs", dcp__pv_kind_name(seq));
    }
    bool in_place = kind == DCP__P_TUPLE && !dcp__pv_is_shared(seq);
    dcp__pints *ints = in_place ? (dcp__pints *)dcp__pv_node(seq) : dcp__pnode_alloc(m, sizeof *ints + n * 8, DCP__P_INTS, n);
    if (!ints) {
        return dcp__arena_fail(m->arena, err);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t value;
        if (!dcp__pv_int(items[i], &value)) {
            return dcp__fail_at(err, DCP_FORMAT, m->position, "pickle: %s where an integer of 64 bits belongs",
                                dcp__pv_kind_name(items[i]));
        }
        memcpy(&ints->values[i], &value, sizeof value);
    }
    ints->node.kind = DCP__P_INTS;
    *out = dcp__pv_of_node(ints);
    return DCP_OK;
}

const char *dcp__pv_kind_name(dcp__pv v)
{
    static const char *const names[] = {"nothing", "None",      "bool",      "int",     "float",    "str",
                                        "bytes",   "bytearray", "tuple",     "list",    "set",      "frozenset",
                                        "dict",    "a global",  "an object", "a tuple", "an object"};
    return v ? names[dcp__pv_kind(v)] : names[0];
}

bool dcp__pv_int_node(dcp__pv v, int64_t *out)
{
    if (dcp__pv_kind(v) != DCP__P_INT || dcp__pv_node(v)->count > 8) {
        return false;
    }
    const dcp__ptext *t = (const dcp__ptext *)dcp__pv_node(v);
    int64_t value = t->node.count && (t->text[t->node.count - 1] & 0x80) ? -1 : 0;
    memcpy(&value, t->text, t->node.count);
    *out = value;
    return true;
}

bool dcp__pv_is_global(dcp__pv v, const char *module, const char *name)
{
    const dcp__pglobal *g = v ? dcp__pv_global(v) : NULL;
    return g && strlen(module) == g->module.len && strlen(name) == g->name.len &&
           memcmp(g->module.ptr, module, g->module.len) == 0 && memcmp(g->name.ptr, name, g->name.len) == 0;
}
