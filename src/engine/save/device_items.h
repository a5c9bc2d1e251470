/* What a save has to write that lies on devices, turned into what its writers know. */
#ifndef DCP_ENGINE_DEVICE_ITEMS_H
#define DCP_ENGINE_DEVICE_ITEMS_H

#include "engine/save/device_source.h"
#include "plan/layout.h"

typedef struct dcp__device_items {
    dcp_context *ctx;
    const dcp_save_opts *opts;   /* of these count stream and copy_ahead_bytes */
    dcp__transfer **transfer;    /* made when the first tensor on a device is met; else NULL */
    dcp__device_source *sources; /* of items */
    size_t n_sources;
    dcp_value **copies; /* of tensors inside objects */
    size_t n_copies, cap_copies;
} dcp__device_items;

/* Items of tensors on devices become items that are pulled. Nothing is done, and no library loaded, if there are none. opts and
 * transfer are borrowed. Free in every case. */
dcp_status dcp__device_items_attach(dcp_context *ctx, const dcp_save_opts *opts, dcp__transfer **transfer, dcp_write_item *items,
                                    size_t n, dcp__device_items *out, dcp_error *err);
/* Tensors inside objects are small and needed as a whole: they are fetched. */
dcp_status dcp__device_items_fetch(dcp__layout *l, dcp__device_items *d, dcp_error *err);
void dcp__device_items_reset(dcp__device_items *d);

/* Tells views of device memory apart: equal for equal ones, not 0. */
uint64_t dcp__device_tie(const dcp_tensor *t);
dcp_status dcp__device_pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err);

#endif
