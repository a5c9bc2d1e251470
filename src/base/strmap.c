#include "base/strmap.h"

#include <string.h>

#include "base/hash.h"

struct dcp__strmap_slot {
    dcp_str key; /* ptr NULL: empty slot */
    uint64_t hash, value;
};

void dcp__strmap_init(dcp__strmap *m, dcp_context *ctx)
{
    *m = (dcp__strmap){.ctx = ctx};
}

void dcp__strmap_reset(dcp__strmap *m)
{
    dcp__free(m->ctx, m->slots);
    dcp__strmap_init(m, m->ctx);
}

/* The slot of key, or the empty one where it belongs. */
static struct dcp__strmap_slot *probe(struct dcp__strmap_slot *slots, size_t n_slots, dcp_str key, uint64_t hash)
{
    for (size_t i = hash & (n_slots - 1);; i = (i + 1) & (n_slots - 1)) {
        struct dcp__strmap_slot *s = &slots[i];
        if (!s->key.ptr ||
            (s->hash == hash && s->key.len == key.len && (key.len == 0 || memcmp(s->key.ptr, key.ptr, key.len) == 0))) {
            return s;
        }
    }
}

bool dcp__strmap_get(const dcp__strmap *m, dcp_str key, uint64_t *value)
{
    if (!m->n) {
        return false;
    }
    struct dcp__strmap_slot *s = probe(m->slots, m->n_slots, key, dcp__xxh3_64(key.ptr, key.len));
    if (!s->key.ptr) {
        return false;
    }
    *value = s->value;
    return true;
}

static bool rehash(dcp__strmap *m)
{
    size_t n_slots = m->n_slots ? m->n_slots * 2 : 16;
    struct dcp__strmap_slot *slots = dcp__calloc(m->ctx, n_slots, sizeof *slots);
    if (!slots) {
        return false;
    }
    for (size_t i = 0; i < m->n_slots; i++) {
        if (m->slots[i].key.ptr) {
            *probe(slots, n_slots, m->slots[i].key, m->slots[i].hash) = m->slots[i];
        }
    }
    dcp__free(m->ctx, m->slots);
    m->slots = slots;
    m->n_slots = n_slots;
    return true;
}

dcp_status dcp__strmap_add(dcp__strmap *m, dcp_str key, uint64_t value, uint64_t *existing, dcp_error *err)
{
    if (m->n + 1 > m->n_slots / 4 * 3 && !rehash(m)) {
        return dcp__nomem(err);
    }
    uint64_t hash = dcp__xxh3_64(key.ptr, key.len);
    struct dcp__strmap_slot *s = probe(m->slots, m->n_slots, key, hash);
    if (existing) {
        *existing = s->key.ptr ? s->value : UINT64_MAX;
    }
    if (!s->key.ptr) {
        *s = (struct dcp__strmap_slot){{key.ptr ? key.ptr : "", key.len}, hash, value};
        m->n++;
    }
    return DCP_OK;
}
