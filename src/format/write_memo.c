#include "format/write_memo.h"

#include <string.h>

#include "base/hash.h"

#define FIRST_SLOTS 64

struct dcp__wmemo_slot {
    dcp__wmemo_key key;
    uint64_t hash;
    uint32_t index;
    bool is_used;
};

void dcp__wmemo_init(dcp__wmemo *m, dcp_context *ctx)
{
    *m = (dcp__wmemo){.ctx = ctx};
}

void dcp__wmemo_reset(dcp__wmemo *m)
{
    dcp__free(m->ctx, m->slots);
    dcp__wmemo_init(m, m->ctx);
}

static uint64_t hash_key(const dcp__wmemo_key *key)
{
    if (key->identity) {
        uint64_t h = (uint64_t)(uintptr_t)key->identity * 0x9e3779b97f4a7c15u;
        return h ^ (h >> 32);
    }
    uint64_t a = dcp__xxh3_64(key->a.ptr, key->a.len);
    return key->b.len ? a ^ (dcp__xxh3_64(key->b.ptr, key->b.len) * 3) : a;
}

static bool same_text(dcp_str a, dcp_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

static bool same_key(const dcp__wmemo_key *a, const dcp__wmemo_key *b)
{
    if (a->identity || b->identity) {
        return a->identity == b->identity;
    }
    if (!a->b.ptr || !b->b.ptr) {
        return !a->b.ptr && !b->b.ptr && same_text(a->a, b->a);
    }
    return same_text(a->a, b->a) && same_text(a->b, b->b);
}

/* The key's slot, or the free one where it would go. */
static struct dcp__wmemo_slot *find(const dcp__wmemo *m, const dcp__wmemo_key *key, uint64_t hash)
{
    size_t mask = m->n_slots - 1, i = hash & mask;
    while (m->slots[i].is_used && !(m->slots[i].hash == hash && same_key(&m->slots[i].key, key))) {
        i = (i + 1) & mask;
    }
    return &m->slots[i];
}

bool dcp__wmemo_get(const dcp__wmemo *m, const dcp__wmemo_key *key, uint32_t *index)
{
    const struct dcp__wmemo_slot *slot = m->n ? find(m, key, hash_key(key)) : NULL;
    if (!slot || !slot->is_used) {
        return false;
    }
    *index = slot->index;
    return true;
}

static bool double_slots(dcp__wmemo *m)
{
    dcp__wmemo larger = {.ctx = m->ctx, .n = m->n, .n_slots = m->n_slots ? 2 * m->n_slots : FIRST_SLOTS};
    larger.slots = dcp__calloc(m->ctx, larger.n_slots, sizeof *larger.slots);
    if (!larger.slots) {
        return false;
    }
    for (size_t i = 0; i < m->n_slots; i++) {
        if (m->slots[i].is_used) {
            *find(&larger, &m->slots[i].key, m->slots[i].hash) = m->slots[i];
        }
    }
    dcp__free(m->ctx, m->slots);
    *m = larger;
    return true;
}

bool dcp__wmemo_put(dcp__wmemo *m, const dcp__wmemo_key *key, uint32_t index)
{
    if (2 * (m->n + 1) > m->n_slots && !double_slots(m)) {
        return false;
    }
    uint64_t hash = hash_key(key);
    *find(m, key, hash) = (struct dcp__wmemo_slot){*key, hash, index, true};
    m->n++;
    return true;
}
