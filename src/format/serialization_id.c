#include "format/serialization_id.h"

#include <stdio.h>
#include <string.h>

#include "base/bytes.h"

/* PyTorch keeps the names that it has written in a std::unordered_set and combines their hashes in the order of iteration. That
 * order is a matter of libstdc++: what follows is its hash table reduced to the order of its nodes. */

#define N_KNOWN 4

static const uint64_t known_new[N_KNOWN] = {2908468677762923104u, 15728199511854643026u, 5611085236196705294u,
                                            8494888479650487350u};
static const uint64_t known_old[N_KNOWN] = {6364577379464010513u, 5768588573859962782u, 13263068698938530805u,
                                            7212665974886926586u};

/* Sizes that the table takes as it grows. */
static const uint32_t bucket_counts[] = {13,       29,        59,        127,       257,       541,       1109,
                                         2357,     5087,      10273,     20753,     42043,     85229,     172933,
                                         351061,   712697,    1447153,   2938679,   5967347,   12117689,  24607243,
                                         49969847, 101473717, 206062531, 418451333, 849749479, 1725587117};
#define N_BUCKET_COUNTS (sizeof bucket_counts / sizeof *bucket_counts)

typedef struct name_set {
    uint64_t *hashes;
    uint32_t *next;   /* position in the list + 1, 0 ends it; [capacity] is the head */
    uint32_t *before; /* of each bucket: position + 1 of the node before its first, 0 if it is empty */
    uint32_t head, n, n_buckets;
} name_set;

static uint64_t mix(uint64_t v)
{
    return v ^ (v >> 47);
}

/* std::hash of a string: 64-bit Murmur. */
static uint64_t string_hash(const char *text, size_t len)
{
    const uint64_t mul = 0xc6a4a7935bd1e995u;
    uint64_t hash = 0xc70f6907u ^ (len * mul);
    for (; len >= 8; text += 8, len -= 8) {
        hash = (hash ^ (mix(dcp__load64(text) * mul) * mul)) * mul;
    }
    if (len) {
        uint64_t last = 0;
        memcpy(&last, text, len);
        hash = (hash ^ last) * mul;
    }
    return mix(mix(hash) * mul);
}

static uint32_t bucket_of(const name_set *s, uint32_t node)
{
    return (uint32_t)(s->hashes[node] % s->n_buckets);
}

/* Nodes of one bucket stand together; a new one goes to the front of its bucket, a new bucket to the front of the list. */
static void link_node(name_set *s, uint32_t node, uint32_t *front_bucket)
{
    uint32_t bucket = bucket_of(s, node);
    if (s->before[bucket]) {
        uint32_t before = s->before[bucket] - 1;
        s->next[node] = s->next[before];
        s->next[before] = node + 1;
        return;
    }
    s->next[node] = s->next[s->head];
    s->next[s->head] = node + 1;
    s->before[bucket] = s->head + 1;
    if (s->next[node]) {
        s->before[*front_bucket] = node + 1;
    }
    *front_bucket = bucket;
}

static void rehash(name_set *s, uint32_t n_buckets, uint32_t *front_bucket)
{
    s->n_buckets = n_buckets;
    memset(s->before, 0, n_buckets * sizeof *s->before);
    uint32_t node = s->next[s->head];
    s->next[s->head] = 0;
    while (node) {
        uint32_t following = s->next[node - 1];
        link_node(s, node - 1, front_bucket);
        node = following;
    }
}

/* Hashes of all names in the order of writing. */
static uint32_t hash_names(size_t n, bool is_old_form, uint64_t *hashes)
{
    static const char *const names[] = {"data.pkl", ".format_version", ".storage_alignment", "byteorder"};
    uint32_t at = 0;
    for (size_t i = 0; i < 4; i++) {
        if (!is_old_form || i == 0 || i == 3) {
            hashes[at++] = string_hash(names[i], strlen(names[i]));
        }
    }
    for (size_t i = 0; i < n; i++) {
        char name[32];
        int len = snprintf(name, sizeof name, "data/%zu", i);
        hashes[at++] = string_hash(name, (size_t)len);
    }
    hashes[at++] = string_hash("version", 7);
    return at;
}

static uint64_t combine_in_order(name_set *s, uint32_t total)
{
    size_t grown = 0;
    uint32_t front_bucket = 0;
    for (s->n = 0; s->n < total; s->n++) {
        if (s->n == s->n_buckets) {
            rehash(s, bucket_counts[grown++], &front_bucket);
        }
        link_node(s, s->n, &front_bucket);
    }
    uint64_t hash = 0;
    for (uint32_t node = s->next[s->head]; node; node = s->next[node - 1]) {
        hash = dcp__hash_combine(hash, s->hashes[node - 1]);
    }
    return hash;
}

dcp_status dcp__name_hash(dcp_context *ctx, size_t n, bool is_old_form, uint64_t *out, dcp_error *err)
{
    if (n < N_KNOWN) {
        *out = is_old_form ? known_old[n] : known_new[n];
        return DCP_OK;
    }
    size_t total = n + 5, grown = 0;
    while (grown < N_BUCKET_COUNTS && bucket_counts[grown] < total) {
        grown++;
    }
    if (n > bucket_counts[N_BUCKET_COUNTS - 1] || grown == N_BUCKET_COUNTS) {
        return dcp__fail(err, DCP_LIMIT, "archive of %zu storages", n);
    }
    size_t n_buckets = bucket_counts[grown];
    uint64_t *hashes = dcp__calloc(ctx, 1, total * sizeof(uint64_t) + (total + 1 + n_buckets) * sizeof(uint32_t));
    if (!hashes) {
        return dcp__nomem(err);
    }
    uint32_t *next = (uint32_t *)(hashes + total);
    name_set s = {.hashes = hashes, .next = next, .before = next + total + 1, .head = (uint32_t)total};
    *out = combine_in_order(&s, hash_names(n, is_old_form, hashes));
    dcp__free(ctx, hashes);
    return DCP_OK;
}

static void put_decimal20(uint64_t v, uint8_t *out)
{
    for (int i = 18; i >= 0; i -= 2) {
        unsigned pair = (unsigned)(v % 100);
        out[i] = (uint8_t)('0' + pair / 10);
        out[i + 1] = (uint8_t)('0' + pair % 10);
        v /= 100;
    }
}

void dcp__serialization_id(uint64_t name_hash, uint64_t data_hash, uint8_t out[DCP__SERIALIZATION_ID_BYTES])
{
    put_decimal20(name_hash, out);
    put_decimal20(data_hash, out + 20);
}
