/* What an owner knows of its names. Tables of numbers; texts and paths are in an arena. */
#ifndef DCP_PLAN_OWNER_H
#define DCP_PLAN_OWNER_H

#include "plan/plan_mail.h"
#include "state/strided.h"

#define DCP__NONE UINT32_MAX

typedef struct dcp__owned_entry {
    dcp__wire_entry is;           /* owned texts */
    uint32_t first_rank, ordinal; /* where it is first seen */
    uint32_t first_chunk, last_chunk, n_chunks;
    bool has_elems, has_clash;
} dcp__owned_entry;

typedef struct dcp__owned_chunk {
    uint32_t entry, next; /* next chunk of the entry, in order of arrival */
    uint32_t set;         /* who holds it: a node of the tree of sets */
    uint32_t writer;      /* DCP__NONE: not decided */
    size_t numbers;       /* where offsets and then sizes are; objects have none */
    uint64_t weight;
} dcp__owned_chunk;

/* Sets of ranks as a tree: a node stands for its parent's set and one more rank, higher than all of them. Since messages come in
 * ascending order of ranks, so do the children of a node: the set that a rank joins is its newest child, or is not there yet. */
typedef struct dcp__set_node {
    uint32_t parent, rank, n, newest_child;
} dcp__set_node;

/* A name as a leader has sent it: what all ranks with the same names say. */
typedef struct dcp__said {
    dcp__wire_entry is; /* owned texts */
    uint32_t ordinal;
    uint32_t entry; /* DCP__NONE: it clashes with what others say, or each rank has an entry of its own */
} dcp__said;

struct dcp__owner {
    dcp_context *ctx;
    const dcp__local *local;
    const dcp__hellos *hellos;
    dcp__arena arena;
    dcp__owned_entry *entries;
    size_t n_entries, cap_entries;
    dcp__strmap by_name;
    size_t last_entry; /* that was looked up */
    dcp__said *said;   /* by all leaders */
    size_t n_said, cap_said;
    size_t *first_said; /* [rank]: of leaders; the end is in */
    size_t *end_said;
    dcp__owned_chunk *chunks;
    size_t n_chunks, cap_chunks;
    int64_t *numbers;
    size_t n_numbers, cap_numbers;
    dcp__digest *content; /* [chunk], if ranks send them */
    size_t cap_content;
    uint32_t *slots; /* chunks by entry and box: number + 1, 0 empty; a power of two */
    size_t n_slots;
    dcp__set_node *sets; /* [0]: nobody */
    size_t n_sets, cap_sets;
    uint32_t *items; /* chunk of each item received, DCP__NONE if it counts for nothing */
    size_t n_items, cap_items;
    size_t *first_item; /* [world + 1] */
    int next_rank;      /* whose message is awaited */
    uint32_t *groups;   /* chunks that several ranks hold, by set, as they stand in the offer */
    size_t n_groups;
    dcp__placed *placed; /* [chunk] */
    size_t n_placed;
    int next_result;
    dcp__buf faults; /* lines, bounded */
    size_t n_faults, n_clashes;
};

static inline const int64_t *dcp__chunk_offsets(const dcp__owner *o, const dcp__owned_chunk *c)
{
    return o->numbers + c->numbers;
}
static inline const int64_t *dcp__chunk_sizes(const dcp__owner *o, const dcp__owned_chunk *c)
{
    return o->numbers + c->numbers + o->entries[c->entry].is.ndim;
}
/* The lowest rank that holds a chunk. */
uint32_t dcp__chunk_first_rank(const dcp__owner *o, const dcp__owned_chunk *c);

/* ---- faults ---- */

typedef enum dcp__fault_kind { DCP__FAULT_CLASH, DCP__FAULT_CHUNKS } dcp__fault_kind;

void dcp__note(dcp__owner *o, dcp__fault_kind kind, const char *fmt, ...) DCP_PRINTF(3, 4);
dcp__printable dcp__text_of_box(int ndim, const int64_t *offsets, const int64_t *sizes);

/* Finds the groups, in the order of the offer. Errors: NOMEM. */
dcp_status dcp__owner_group(dcp__owner *o, dcp_error *err);

#endif
