/* What a save is to write: items in plan order, and what flattening loses. */
#ifndef DCP_PLAN_SAVE_PLAN_H
#define DCP_PLAN_SAVE_PLAN_H

#include "base/arena.h"
#include "dcp/save.h"
#include "format/metadata.h"

struct dcp_save_plan {
    dcp_context *ctx;
    dcp__arena arena; /* shapes, paths, containers */
    dcp_flat *flat;
    dcp_write_item *items;
    size_t n, cap;
    dcp__container *containers;
    size_t n_containers, cap_containers;
};

#endif
