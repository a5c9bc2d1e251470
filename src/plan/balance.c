/* Who writes what several ranks hold. */
#include <stdlib.h>

#include "plan/global_plan.h"

#define SMALL_BYTES 65536
#define BUNCH_OF_SMALL 16 /* a bunch has at most so many times the size below which items go in bunches */

/* What goes to one rank as a whole: a large item, or a bunch of small ones of the same holders. */
typedef struct unit {
    uint64_t bytes;
    uint32_t set, first, last; /* chain of replicas */
} unit;

typedef struct balancer {
    const dcp__rank_set *sets;
    dcp__replica *replicas;
    unit *units;
    size_t n_units;
    uint32_t *next; /* [replica]: in its chain, UINT32_MAX at the end */
    uint32_t *open; /* [set]: unit that small items go to, UINT32_MAX: none yet */
} balancer;

static uint64_t add(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

static void make_units(balancer *b, size_t n, uint64_t small)
{
    uint64_t most = small > UINT64_MAX / BUNCH_OF_SMALL ? UINT64_MAX : small * BUNCH_OF_SMALL;
    for (size_t i = 0; i < n; i++) {
        const dcp__replica *r = &b->replicas[i];
        bool is_small = r->bytes < small;
        uint32_t u = is_small ? b->open[r->set] : UINT32_MAX;
        b->next[i] = UINT32_MAX;
        if (u != UINT32_MAX && b->units[u].bytes <= most - r->bytes) {
            b->next[b->units[u].last] = (uint32_t)i;
            b->units[u].last = (uint32_t)i;
            b->units[u].bytes += r->bytes;
            continue;
        }
        b->units[b->n_units] = (unit){r->bytes, r->set, (uint32_t)i, (uint32_t)i};
        if (is_small) {
            b->open[r->set] = (uint32_t)b->n_units;
        }
        b->n_units++;
    }
}

static int compare_units(const void *a, const void *b)
{
    const unit *x = a, *y = b;
    if (x->bytes != y->bytes) {
        return x->bytes > y->bytes ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static uint32_t least_loaded(const dcp__rank_set *set, const uint64_t *load)
{
    uint32_t best = set->ranks[0];
    for (size_t i = 1; i < set->n; i++) {
        best = load[set->ranks[i]] < load[best] ? set->ranks[i] : best;
    }
    return best;
}

static void assign_units(balancer *b, bool to_lowest, uint64_t *load)
{
    for (size_t u = 0; u < b->n_units; u++) {
        const dcp__rank_set *set = &b->sets[b->units[u].set];
        uint32_t writer = to_lowest ? set->ranks[0] : least_loaded(set, load);
        load[writer] = add(load[writer], b->units[u].bytes);
        for (uint32_t i = b->units[u].first; i != UINT32_MAX; i = b->next[i]) {
            b->replicas[i].writer = writer;
        }
    }
}

dcp_status dcp__balance(dcp_context *ctx, const dcp__global_opts *opts, const dcp__rank_set *sets, dcp__replica *replicas,
                        size_t n, uint64_t *load, dcp_error *err)
{
    ctx = dcp__context(ctx);
    uint32_t n_sets = 0;
    for (size_t i = 0; i < n; i++) {
        n_sets = replicas[i].set >= n_sets ? replicas[i].set + 1 : n_sets;
    }
    balancer b = {.sets = sets,
                  .replicas = replicas,
                  .units = dcp__calloc(ctx, n, sizeof *b.units),
                  .next = dcp__calloc(ctx, n, sizeof *b.next),
                  .open = dcp__calloc(ctx, n_sets, sizeof *b.open)};
    dcp_status status = b.units && b.next && b.open ? DCP_OK : dcp__nomem(err);
    if (status == DCP_OK) {
        for (uint32_t s = 0; s < n_sets; s++) {
            b.open[s] = UINT32_MAX;
        }
        make_units(&b, n, opts->small_bytes ? opts->small_bytes : SMALL_BYTES);
        qsort(b.units, b.n_units, sizeof *b.units, compare_units);
        assign_units(&b, opts->dedup_to_lowest, load);
    }
    dcp__free(ctx, b.units);
    dcp__free(ctx, b.next);
    dcp__free(ctx, b.open);
    return status;
}
