/* Copies between devices and host memory for one save or load: back ends, streams of our own, and rings of pinned memory. */
#ifndef DCP_DEVICE_TRANSFER_H
#define DCP_DEVICE_TRANSFER_H

#include "base/context.h"
#include "dcp/device.h"

#define DCP__LANE_MAX_SLOTS 16

typedef struct dcp__transfer dcp__transfer;

/* A stream and a ring of slots of pinned memory, used by one thread at a time. */
typedef struct dcp__lane {
    struct dcp__transfer_device *device;
    dcp_device_driver *driver;
    int index;
    void *stream;
    char *ring;
    bool is_pinned;
    size_t slot_bytes;
    int n_slots;
    void *events[DCP__LANE_MAX_SLOTS]; /* [slot]: recorded behind the copies that use it */
    bool is_busy[DCP__LANE_MAX_SLOTS]; /* [slot]: its event was recorded, and not waited for since */
    int slot;                          /* being filled by dcp__lane_reserve */
    size_t used;                       /* bytes of it */
    struct dcp__host_block *block;
    struct dcp__lane *next, *next_idle;
} dcp__lane;

typedef struct dcp__transfer_opts {
    void *stream; /* the caller's: copies wait for what is in it when a device is first used */
    size_t slot_bytes;
    int n_slots; /* of a ring, 1 to DCP__LANE_MAX_SLOTS */
} dcp__transfer_opts;

dcp_status dcp__transfer_create(dcp_context *ctx, const dcp__transfer_opts *opts, dcp__transfer **out, dcp_error *err);
/* Waits for all copies, whatever became of them. NULL is allowed. */
void dcp__transfer_free(dcp__transfer *t);
/* Opens the back end of a device, and notes what is in the caller's stream now. Later calls for the same device do nothing.
 * Errors: UNSUPPORTED, DEVICE, ARG, NOMEM. From any thread. */
dcp_status dcp__transfer_use(dcp__transfer *t, dcp_device device, dcp_error *err);
/* Memory of one lane. */
uint64_t dcp__transfer_ring_bytes(const dcp__transfer *t);
/* A lane to a device that is in use; one that is idle, or a new one. From any thread. */
dcp_status dcp__lane_acquire(dcp__transfer *t, dcp_device device, dcp__lane **out, dcp_error *err);
/* Copies of it may still be under way. NULL is allowed. */
void dcp__lane_release(dcp__transfer *t, dcp__lane *lane);
/* Returns when all copies of all lanes are done, with the first failure. */
dcp_status dcp__transfer_sync(dcp__transfer *t, dcp_error *err);

static inline char *dcp__lane_slot(const dcp__lane *l, int slot)
{
    return l->ring + (size_t)slot * l->slot_bytes;
}
/* Notes that a slot is in use by the copies issued so far. */
dcp_status dcp__lane_mark(dcp__lane *l, int slot, dcp_error *err);
/* Returns when the copies that use a slot are done. */
dcp_status dcp__lane_wait(dcp__lane *l, int slot, dcp_error *err);
/* n bytes (at most slot_bytes) of the ring that no copy uses; they are to be filled and copied to the device from. */
dcp_status dcp__lane_reserve(dcp__lane *l, size_t n, char **out, dcp_error *err);

/* Copies between devices are linear, tensors need not be. */

/* Fetches row-major bytes [offset, offset + n) of a view of device memory, multiples of the element's size: by spans as large as
 * the ring, whose gaps come along. Uses the whole ring, and returns when all is there. */
dcp_status dcp__lane_gather(dcp__lane *l, const dcp_tensor *t, uint64_t offset, size_t n, void *out, dcp_error *err);
/* Puts a box (sizes) of elements into device memory at dst with these strides in elements; they come row-major from the ring.
 * Nothing between them is touched: neighbours may belong to other copies under way. Does not wait. */
dcp_status dcp__lane_scatter(dcp__lane *l, char *dst, const int64_t *strides, int ndim, const int64_t *sizes, size_t elem_bytes,
                             const char *from, dcp_error *err);

#endif
