/* The plan of a save over all its ranks: plan/global_plan.h carried out with the communicator. One rank is a group like any
 * other. */
#ifndef DCP_ENGINE_GROUP_PLAN_H
#define DCP_ENGINE_GROUP_PLAN_H

#include "comm/collective.h"
#include "plan/global_plan.h"

typedef struct dcp__group_plan {
    dcp__step step;
    int coordinator;
    dcp__global_opts opts;
    dcp__local *local; /* local->writes tells what this rank is to write */
    dcp__hellos hellos;
    dcp__owner *owner;
    dcp__parts messages; /* plans of the ranks for the names that this rank owns; kept for the cache */
    bool was_cached;
    uint64_t sent_bytes; /* plan messages of this rank */
} dcp__group_plan;

/* Collective. Sends a mail, whatever became of it on this rank, and drops it. */
dcp_status dcp__exchange_mail(const dcp__step *step, dcp_status mine, dcp__mail *mail, dcp__parts *out, dcp_error *err);

/* Collective. Decides who writes what: each rank brings its plan, or in `mine` and *err why it has none. content: digests to
 * compare replicas by, one for each item, NULL: none. cache may be NULL. Reset in every case. Errors: PEER, and ARG or MISMATCH
 * inside it for faults of the plans. */
dcp_status dcp__group_plan_make(dcp__group_plan *g, const dcp_save_plan *plan, dcp_status mine, const dcp__digest *content,
                                const dcp__plan_cache *cache, dcp_error *err);
/* Collective. After the writing: brings together where everything is. On the coordinator *out is the metadata of all, NULL on
 * others. in: generation and transform, the rest is filled in. */
dcp_status dcp__group_results(dcp__group_plan *g, dcp_status mine, const dcp__placed *placed, const dcp__file_facts *files,
                              size_t n_files, dcp__merge_input in, dcp__metadata **out, dcp_error *err);
/* Keeps the plan for the next save, once this one has succeeded. Errors: NOMEM. */
dcp_status dcp__group_plan_keep(const dcp__group_plan *g, dcp__plan_cache *out);
void dcp__group_plan_reset(dcp__group_plan *g);

#endif
