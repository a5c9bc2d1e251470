/* The pickle machine: the same result from memory and through a sliding window, and a graph that can be walked. */
#include "base/context.h"
#include "format/pickle.h"

static dcp_status read_copy(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    memcpy(buf, (const char *)self->user + offset, n);
    return DCP_OK;
}

/* Depth of what stands below v; stops where nodes are shared, since a graph of n nodes can be a tree of 2^n. */
static unsigned walk(dcp__pv v)
{
    unsigned deepest = 0;
    size_t n;
    const dcp__pv *items = dcp__pv_items(v, &n);
    const dcp__pobject *o = v ? dcp__pv_object(v) : NULL;
    dcp__pv parts[6] = {0};
    if (o) {
        memcpy(parts, (const dcp__pv[]){o->callable, o->args, o->kwargs, o->state, o->items, o->pairs}, sizeof parts);
        items = parts;
        n = 6;
    }
    for (size_t i = 0; i < n; i++) {
        if (items[i] && !dcp__pv_is_shared(items[i])) {
            unsigned depth = walk(items[i]);
            deepest = depth > deepest ? depth : deepest;
        }
    }
    dcp_str text = v ? dcp__pv_text(v) : (dcp_str){NULL, 0};
    if (text.ptr && text.ptr[text.len] != 0) {
        __builtin_trap();
    }
    return deepest + 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp__source memory = dcp__source_memory(data, size);
    dcp__source copies = {.read = read_copy, .size = size, .user = (void *)(uintptr_t)data};
    dcp__pickle a, b;
    dcp_error ea = DCP_ERROR_INIT, eb = DCP_ERROR_INIT;
    dcp_status first = dcp__pickle_read(dcp__context(NULL), &memory, 0, NULL, &a, &ea);
    dcp_status second = dcp__pickle_read(dcp__context(NULL), &copies, 0, NULL, &b, &eb);
    if (first != second || ea.offset != eb.offset || first == DCP_INTERNAL) {
        __builtin_trap();
    }
    if (first == DCP_OK) {
        if (a.end != b.end || a.end > size || walk(a.root) > 256 + 1) {
            __builtin_trap();
        }
        dcp__pickle_reset(&a);
        dcp__pickle_reset(&b);
    }
    return 0;
}
