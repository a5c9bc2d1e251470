/* Elements that lie in a buffer into the targets of a load: cast to the target's dtype, strided, on a device. */
#ifndef DCP_ENGINE_PLACE_H
#define DCP_ENGINE_PLACE_H

#include "base/buf.h"
#include "engine/read/device_target.h"

typedef struct dcp__placer {
    const dcp_read_request **requests; /* in the order of the checkpoint's items; borrowed */
    size_t n;
    dcp__transfer *transfer; /* NULL: no target is on a device */
    dcp__buf packed, cast;   /* elements for one target */
} dcp__placer;

/* The requests stay borrowed. Reset it in every case. */
dcp_status dcp__placer_init(dcp__placer *p, dcp_context *ctx, const dcp_read_request *requests, size_t n, void *stream,
                            dcp_error *err);
/* Waits for copies to devices that are under way. */
void dcp__placer_reset(dcp__placer *p);

/* Puts a box of an entry, row-major at `from` and aligned for its dtype, into all targets that want a part of it, and adds to
 * *bytes what that is in them. */
dcp_status dcp__place(dcp__placer *p, const dcp__entry *e, const dcp_box *box, const void *from, uint64_t *bytes, dcp_error *err);
/* Returns when all is where it belongs. */
dcp_status dcp__placer_sync(dcp__placer *p, dcp_error *err);

#endif
