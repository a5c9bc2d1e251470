/* The plan of all ranks together: what each of them says about its own plan, who owns which name, who writes what several ranks
 * hold, and the metadata that comes out of it. Pure: bytes and arrays in, bytes and structs out; the engine moves the bytes.
 *
 *     every rank    dcp__local_make                     own plan -> list of names and chunks, hashes
 *     all-gather    dcp__hello_encode                   56 bytes each
 *                   dcp__plan_cache_fits                everybody has seen this before: go on at dcp__plan_cache_open
 *     all-to-all    dcp__local_encode                   plan messages: rank -> owner
 *     owner         dcp__owner_create, _add             for each rank in ascending order
 *                   dcp__owner_check                    clashes, bounds, overlaps, gaps
 *     all-gather    dcp__owner_offer                    what several ranks hold, and the faults found
 *     every rank    dcp__owner_assign                   the same decision everywhere; or the faults of all owners as an error
 *     all-to-all    dcp__owner_verdicts                 owner -> rank
 *     every rank    dcp__local_accept                   for each owner; then local->writes says what to write
 *     ... the records are written ...
 *     all-to-all    dcp__local_results                  rank -> owner: where each chunk is
 *     owner         dcp__owner_take_results             for each rank
 *     gather        dcp__owner_fragment, dcp__facts_encode
 *     coordinator   dcp__merge_fragments                metadata, ready for dcp__metadata_write
 *
 * Who owns a name: if all ranks list the same names in the same order, rank i * world / n owns name i of n; otherwise the rank
 * that the name's hash (XXH3-64) modulo world gives. Bytes from other ranks are treated like bytes of a file: FORMAT, never a
 * crash. Messages of length 0 are valid wherever a rank has nothing to tell. */
#ifndef DCP_PLAN_GLOBAL_PLAN_H
#define DCP_PLAN_GLOBAL_PLAN_H

#include "base/buf.h"
#include "plan/save_plan.h"

typedef struct dcp__global_opts {
    int world, rank;
    bool dedup_to_lowest; /* replicas are written by their lowest rank */
    bool allow_gaps;      /* chunks need not fill their tensors; always so if world is 1 */
    uint64_t small_bytes; /* replicated items below it are kept together; 0: 64 KiB */
    const void *options;  /* whatever else the checkpoint's form depends on; goes into the structure hash */
    size_t options_bytes;
} dcp__global_opts;

/* Messages to all ranks, one behind the other: that to rank r is data[start[r] .. start[r + 1]). */
typedef struct dcp__mail {
    dcp__buf bytes;
    size_t *start; /* world + 1 */
} dcp__mail;

void dcp__mail_reset(dcp__mail *m);

/* ---- the own plan ---- */

/* A name with its chunks on this rank, which may be none. Texts and numbers are those of the plan's items. */
typedef struct dcp__local_entry {
    const dcp_write_item *item; /* the first of that name: all but the box, data and bytes holds for the others, too */
    size_t first, n;            /* in `order` */
} dcp__local_entry;

typedef struct dcp__local {
    dcp_context *ctx;
    dcp__global_opts opts;
    const dcp_save_plan *plan; /* borrowed; must not change */
    dcp__local_entry *entries; /* in order of first appearance */
    size_t n_entries;
    uint32_t *order; /* items of the plan, entry by entry */
    uint64_t bytes;  /* weight of all items */
    dcp__digest structure, names;
    uint32_t *sent;     /* items in the order in which dcp__local_encode put them in messages */
    size_t *sent_start; /* [world + 1]: those to each owner; NULL before */
    bool *writes;       /* [item]: this rank writes it; all false before dcp__local_accept */
} dcp__local;

/* Errors: ARG (negative numbers in a box), MISMATCH (one name with two kinds, dtypes or shapes; an object twice), LIMIT, NOMEM.
 */
dcp_status dcp__local_make(const dcp_save_plan *plan, const dcp__global_opts *opts, dcp__local **out, dcp_error *err);
void dcp__local_free(dcp__local *l);

/* What an item weighs in the balance: its bytes; for objects without known size 1 KiB. */
uint64_t dcp__item_weight(const dcp_write_item *item);

/* ---- the first word ---- */

#define DCP__HELLO_BYTES 56

typedef struct dcp__hello {
    dcp__digest structure; /* names, kinds, dtypes, shapes, chunks, containers, rank, world, options; no sizes of objects */
    dcp__digest names;     /* names, paths, kinds, dtypes, global shapes, containers */
    uint64_t bytes;        /* weight of all items */
    uint64_t cache_key;    /* of the plan cache that this rank holds, 0: none */
    int leader;            /* the lowest rank that lists the same names; it alone sends them */
} dcp__hello;

/* Those of all ranks. */
typedef struct dcp__hellos {
    dcp_context *ctx;
    int world;
    dcp__hello *of;  /* [rank] */
    bool is_uniform; /* all ranks list the same names */
    uint64_t key;    /* of the structures of all ranks; never 0 */
} dcp__hellos;

struct dcp__plan_cache;

/* cache: what is kept of an earlier save, NULL if there is nothing or if contents are to be compared. */
void dcp__hello_encode(const dcp__local *l, const struct dcp__plan_cache *cache, uint8_t out[DCP__HELLO_BYTES]);
/* bytes: DCP__HELLO_BYTES for each rank, in order. Errors: FORMAT (a rank speaks another version of this, or knows another
 * number of ranks), NOMEM. */
dcp_status dcp__hellos_decode(dcp_context *ctx, const void *bytes, size_t len, int world, dcp__hellos *out, dcp_error *err);
void dcp__hellos_reset(dcp__hellos *h);

/* The owner of name i of the local plan. */
int dcp__owner_of(const dcp__local *l, const dcp__hellos *hellos, size_t entry);

/* ---- rank -> owner ---- */

/* Messages with the plan. content: digests of the items' contents, [item], to be compared among replicas; NULL: not compared.
 * Of ranks that list the same names, the lowest one sends them. Errors: NOMEM. */
dcp_status dcp__local_encode(dcp__local *l, const dcp__hellos *hellos, const dcp__digest *content, dcp__mail *out,
                             dcp_error *err);

/* ---- the owner ---- */

typedef struct dcp__owner dcp__owner;

/* The owner's part of this rank; local and hellos stay borrowed. */
dcp_status dcp__owner_create(const dcp__local *local, const dcp__hellos *hellos, dcp__owner **out, dcp_error *err);
void dcp__owner_free(dcp__owner *o);

/* A rank's plan message, in ascending order of ranks; bytes need not live on. Errors: FORMAT, LIMIT, NOMEM. Clashes are noted. */
dcp_status dcp__owner_add(dcp__owner *o, int rank, const void *bytes, size_t len, dcp_error *err);

typedef struct dcp__owner_counts {
    size_t entries, items, chunks, replicated, faults;
} dcp__owner_counts;
dcp__owner_counts dcp__owner_count(const dcp__owner *o);

/* Notes what is wrong with the chunks of all names together. Errors: NOMEM. */
dcp_status dcp__owner_check(dcp__owner *o, dcp_error *err);
/* What is held by several ranks, and the faults: to all ranks. */
dcp_status dcp__owner_offer(dcp__owner *o, dcp__buf *out, dcp_error *err);
/* Decides who writes what, from the offers of all owners, [rank]. If there are faults, MISMATCH (clashes between ranks) or ARG
 * (chunks that do not fit), the message listing them; faults, unless NULL, receives them all, one a line (bounded).
 * Errors: also FORMAT, NOMEM. */
dcp_status dcp__owner_assign(dcp__owner *o, const void *const *offers, const size_t *lens, dcp__buf *faults, dcp_error *err);
/* To each rank: which of the items it sent it is to write. Nothing to send where it is all of them. */
dcp_status dcp__owner_verdicts(const dcp__owner *o, dcp__mail *out, dcp_error *err);
/* An owner's verdict; marks local->writes. Errors: FORMAT. */
dcp_status dcp__local_accept(dcp__local *l, int owner, const void *bytes, size_t len, dcp_error *err);

/* ---- who writes what several ranks hold ---- */

typedef struct dcp__rank_set {
    const uint32_t *ranks; /* ascending */
    size_t n;              /* >= 1 */
} dcp__rank_set;

typedef struct dcp__replica {
    uint64_t bytes;
    uint32_t set;    /* who holds it */
    uint32_t writer; /* out */
} dcp__replica;

/* Largest first onto the least loaded holder, the lowest rank of equals; items below opts->small_bytes go in bunches of one
 * holder set. load[world]: what each rank writes anyway; on return with its part of the replicas. Deterministic. Errors: NOMEM.
 */
dcp_status dcp__balance(dcp_context *ctx, const dcp__global_opts *opts, const dcp__rank_set *sets, dcp__replica *replicas,
                        size_t n, uint64_t *load, dcp_error *err);

/* ---- after the writing ---- */

/* Where an item was written. */
typedef struct dcp__placed {
    uint64_t offset, length;
    uint32_t file; /* of this rank */
    bool is_transformed;
} dcp__placed;

/* Messages to the owners; placed[item] of all items that this rank writes. Errors: NOMEM. */
dcp_status dcp__local_results(const dcp__local *l, const dcp__placed *placed, dcp__mail *out, dcp_error *err);
/* Errors: FORMAT. */
dcp_status dcp__owner_take_results(dcp__owner *o, int rank, const void *bytes, size_t len, dcp_error *err);
/* The owner's part of the metadata, after the results of all ranks. Errors: STATE (results are missing), NOMEM. */
dcp_status dcp__owner_fragment(const dcp__owner *o, dcp__buf *out, dcp_error *err);

/* A rank's own facts, to the coordinator: digests of the records in each of its files in order of offset (n_records 0: none
 * known), and the plan's containers, unless rank 0 has the same. */
typedef struct dcp__file_facts {
    const dcp__digest *records;
    size_t n_records;
} dcp__file_facts;
dcp_status dcp__facts_encode(const dcp__local *l, const dcp__hellos *hellos, const dcp__file_facts *files, size_t n_files,
                             dcp__buf *out, dcp_error *err);

typedef struct dcp__merge_input {
    int world;
    const char *generation;                      /* of the file names */
    const char *transform;                       /* of those chunks that are transformed; NULL: none are */
    const void *const *fragments, *const *facts; /* [rank] */
    const size_t *fragment_lens, *fact_lens;
} dcp__merge_input;

/* The metadata of all: names in the order in which they are first seen, going through the ranks; chunks of a name by their lowest
 * holder; files of all ranks; of containers those of rank 0, then what others add. own has world, records and containers; the
 * engine fills in the rest (version, save id, ..). Errors: FORMAT, MISMATCH (a name twice), LIMIT, NOMEM. */
dcp_status dcp__merge_fragments(dcp_context *ctx, const dcp__merge_input *in, dcp__metadata **out, dcp_error *err);

/* "__<rank>_<n>.distcp", with a generation "__<rank>_<generation>_<n>.distcp". */
void dcp__data_file_name(int rank, const char *generation, size_t n, char name[64]);

/* ---- the next save ---- */

/* What a rank keeps of a plan that led to a checkpoint: the plan messages that it received as an owner, who writes the replicas,
 * and its own verdicts. It holds no file name and no length that a later save would trust. It may be stored and read again. */
typedef struct dcp__plan_cache {
    dcp__digest structure; /* of this rank's plan */
    uint64_t key;          /* dcp__hellos.key of that save */
    dcp__buf bytes;
} dcp__plan_cache;

/* The messages that dcp__owner_add was given, [rank]. To be called when the save has succeeded. Errors: NOMEM. */
dcp_status dcp__plan_cache_make(const dcp__local *l, const dcp__owner *o, const dcp__hellos *hellos, const void *const *messages,
                                const size_t *lens, dcp__plan_cache *out, dcp_error *err);
void dcp__plan_cache_reset(dcp__plan_cache *c);
/* Whether all ranks hold the plan of exactly these structures: the same answer on each. */
bool dcp__plan_cache_fits(const dcp__hellos *hellos);
/* In place of all from dcp__local_encode to dcp__local_accept. Errors: FORMAT (damaged; no rank may go on), NOMEM. */
dcp_status dcp__plan_cache_open(const dcp__plan_cache *c, dcp__local *l, const dcp__hellos *hellos, dcp__owner **out,
                                dcp_error *err);
/* The stored form, versioned and with a digest. Errors of decode: FORMAT, CHECKSUM, NOMEM. */
dcp_status dcp__plan_cache_encode(const dcp__plan_cache *c, dcp__buf *out, dcp_error *err);
dcp_status dcp__plan_cache_decode(dcp_context *ctx, const void *bytes, size_t len, dcp__plan_cache *out, dcp_error *err);

#endif
