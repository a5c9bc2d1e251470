/* What a save is to write: items in plan order, and what flattening loses. */
#ifndef DCP_PLAN_SAVE_PLAN_H
#define DCP_PLAN_SAVE_PLAN_H

#include "base/arena.h"
#include "dcp/save.h"
#include "format/metadata.h"

/* A tensor that this rank knows, but holds no element of. */
typedef struct dcp__absent {
    dcp_write_item item; /* all but the box */
    size_t before;       /* items of the plan in front of it */
} dcp__absent;

struct dcp_save_plan {
    dcp_context *ctx;
    dcp__arena arena; /* shapes, paths, containers */
    dcp_flat *flat;
    dcp_write_item *items;
    size_t n, cap;
    dcp__absent *absent;
    size_t n_absent, cap_absent;
    dcp__container *containers;
    size_t n_containers, cap_containers;
    dcp__extras extras,
        own_extras;     /* for the top object of the metadata, and for libdcp's field; the coordinator's count. Borrowed. */
    dcp_value **values; /* objects that the plan itself holds */
    size_t n_values, cap_values;
};

/* As dcp_plan_save, with the names that match opts->per_rank under "rank.<r>."; opts may be NULL. */
dcp_status dcp__plan_save_of_rank(dcp_context *ctx, dcp_value *state, const dcp_save_opts *opts, dcp_save_plan **out,
                                  dcp_error *err);
/* Names an item: as given, or with rank >= 0 under "rank.<rank>.". Texts of its own are the plan's. */
dcp_status dcp__save_plan_name(dcp_save_plan *p, dcp_str fqn, const dcp_key *path, size_t path_len, int rank,
                               dcp_write_item *item, dcp_error *err);
/* An empty plan. */
dcp_status dcp__save_plan_create(dcp_context *ctx, dcp_save_plan **out, dcp_error *err);
/* Hands a reference over to the plan, to be dropped with it. On failure it is dropped at once. */
dcp_status dcp__save_plan_hold(dcp_save_plan *p, dcp_value *v, dcp_error *err);

/* Notes a tensor that this rank holds no element of, so that all ranks list the same names; the item's box is not used. */
dcp_status dcp__save_plan_add_absent(dcp_save_plan *p, const dcp_write_item *item, dcp_error *err);
/* Takes over facts from another checkpoint; their texts stay borrowed. */
dcp_status dcp__save_plan_add_containers(dcp_save_plan *p, const dcp__container *containers, size_t n, dcp_error *err);

#endif
