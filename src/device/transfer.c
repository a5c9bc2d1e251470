#include "device/transfer.h"

#include <pthread.h>

#include "device/host_pool.h"

#define SLOT_ALIGN ((size_t)64) /* of what lanes hand out; slots are whole pages */

typedef struct dcp__transfer_device {
    dcp_device device;
    dcp_device_driver *driver;
    void *ready;           /* event in the caller's stream */
    dcp__host_pool *rings; /* registered with this device */
    dcp__lane *idle;
    struct dcp__transfer_device *next;
} transfer_device;

struct dcp__transfer {
    dcp_context *ctx;
    dcp__transfer_opts opts;
    pthread_mutex_t lock; /* guards the lists */
    transfer_device *devices;
    dcp__lane *lanes;
};

dcp_status dcp__transfer_create(dcp_context *ctx, const dcp__transfer_opts *opts, dcp__transfer **out, dcp_error *err)
{
    dcp__transfer *t = dcp__calloc(ctx, 1, sizeof *t);
    if (!t) {
        return dcp__nomem(err);
    }
    t->ctx = ctx;
    t->opts = *opts;
    pthread_mutex_init(&t->lock, NULL);
    *out = t;
    return DCP_OK;
}

/* ---- devices ---- */

static void close_device(dcp__transfer *t, transfer_device *d)
{
    dcp__host_pool_free(d->rings);
    if (d->ready) {
        d->driver->ops->event_destroy(d->driver, d->device.index, d->ready);
    }
    dcp_device_close(d->driver);
    dcp__free(t->ctx, d);
}

static dcp_status open_device(dcp__transfer *t, transfer_device *d, dcp_error *err)
{
    int index = d->device.index;
    dcp_status status = dcp_device_open(t->ctx, d->device.type, NULL, &d->driver, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__host_pool_opts opts = {.pin = DCP__PIN_PREFERRED, .driver = d->driver, .index = index};
    void *ready = NULL;
    status = dcp__host_pool_create(t->ctx, &opts, &d->rings, err);
    status = status == DCP_OK ? d->driver->ops->event_create(d->driver, index, &ready, err) : status;
    d->ready = status == DCP_OK ? ready : NULL;
    return status == DCP_OK ? d->driver->ops->event_record(d->driver, index, ready, t->opts.stream, err) : status;
}

/* The lock is held. */
static transfer_device *find_device(const dcp__transfer *t, dcp_device device)
{
    transfer_device *d = t->devices;
    while (d && (d->device.type != device.type || d->device.index != device.index)) {
        d = d->next;
    }
    return d;
}

static dcp_status add_device(dcp__transfer *t, dcp_device device, dcp_error *err)
{
    transfer_device *d = dcp__calloc(t->ctx, 1, sizeof *d);
    if (!d) {
        return dcp__nomem(err);
    }
    d->device = device;
    dcp_status status = open_device(t, d, err);
    if (status != DCP_OK) {
        close_device(t, d);
        return status;
    }
    d->next = t->devices;
    t->devices = d;
    return DCP_OK;
}

dcp_status dcp__transfer_use(dcp__transfer *t, dcp_device device, dcp_error *err)
{
    pthread_mutex_lock(&t->lock);
    dcp_status status = find_device(t, device) ? DCP_OK : add_device(t, device, err);
    pthread_mutex_unlock(&t->lock);
    return status;
}

/* ---- lanes ---- */

uint64_t dcp__transfer_ring_bytes(const dcp__transfer *t)
{
    return (uint64_t)t->opts.slot_bytes * (unsigned)t->opts.n_slots;
}

static void free_lane(dcp__transfer *t, dcp__lane *l)
{
    for (int i = 0; i < l->n_slots; i++) {
        if (l->events[i]) {
            l->driver->ops->event_destroy(l->driver, l->index, l->events[i]);
        }
    }
    if (l->stream) {
        l->driver->ops->stream_destroy(l->driver, l->index, l->stream);
    }
    dcp__host_pool_release(l->device->rings, l->block);
    dcp__free(t->ctx, l);
}

static dcp_status set_up_lane(dcp__lane *l, dcp_error *err)
{
    const dcp_device_ops *ops = l->driver->ops;
    void *handle = NULL;
    dcp_status status = dcp__host_pool_acquire(l->device->rings, l->slot_bytes * (size_t)l->n_slots, false, &l->block, err);
    if (status != DCP_OK) {
        return status;
    }
    l->ring = l->block->ptr;
    l->is_pinned = l->block->is_pinned;
    status = ops->stream_create(l->driver, l->index, &handle, err);
    l->stream = status == DCP_OK ? handle : NULL;
    status = status == DCP_OK ? ops->stream_wait(l->driver, l->index, l->stream, l->device->ready, err) : status;
    for (int i = 0; i < l->n_slots && status == DCP_OK; i++) {
        status = ops->event_create(l->driver, l->index, &handle, err);
        l->events[i] = status == DCP_OK ? handle : NULL;
    }
    return status;
}

static dcp_status add_lane(dcp__transfer *t, transfer_device *d, dcp__lane **out, dcp_error *err)
{
    dcp__lane *l = dcp__calloc(t->ctx, 1, sizeof *l);
    if (!l) {
        return dcp__nomem(err);
    }
    l->device = d;
    l->driver = d->driver;
    l->index = d->device.index;
    l->slot_bytes = t->opts.slot_bytes;
    l->n_slots = t->opts.n_slots;
    dcp_status status = set_up_lane(l, err);
    if (status != DCP_OK) {
        free_lane(t, l);
        return status;
    }
    l->next = t->lanes;
    t->lanes = l;
    *out = l;
    return DCP_OK;
}

dcp_status dcp__lane_acquire(dcp__transfer *t, dcp_device device, dcp__lane **out, dcp_error *err)
{
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&t->lock);
    transfer_device *d = find_device(t, device);
    if (!d) {
        status = dcp__fail(err, DCP_INTERNAL, "device %s:%d is not in use", dcp_device_type_name(device.type), device.index);
    } else if (d->idle) {
        *out = d->idle;
        d->idle = d->idle->next_idle;
    } else {
        status = add_lane(t, d, out, err);
    }
    pthread_mutex_unlock(&t->lock);
    return status;
}

void dcp__lane_release(dcp__transfer *t, dcp__lane *l)
{
    if (l) {
        pthread_mutex_lock(&t->lock);
        l->next_idle = l->device->idle;
        l->device->idle = l;
        pthread_mutex_unlock(&t->lock);
    }
}

dcp_status dcp__lane_mark(dcp__lane *l, int slot, dcp_error *err)
{
    dcp_status status = l->driver->ops->event_record(l->driver, l->index, l->events[slot], l->stream, err);
    l->is_busy[slot] = status == DCP_OK;
    return status;
}

dcp_status dcp__lane_wait(dcp__lane *l, int slot, dcp_error *err)
{
    if (!l->is_busy[slot]) {
        return DCP_OK;
    }
    l->is_busy[slot] = false;
    return l->driver->ops->event_sync(l->driver, l->index, l->events[slot], err);
}

dcp_status dcp__lane_reserve(dcp__lane *l, size_t n, char **out, dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t rounded = (n + SLOT_ALIGN - 1) & ~(SLOT_ALIGN - 1);
    if (rounded > l->slot_bytes - l->used) {
        status = dcp__lane_mark(l, l->slot, err);
        l->slot = (l->slot + 1) % l->n_slots;
        l->used = 0;
        status = status == DCP_OK ? dcp__lane_wait(l, l->slot, err) : status;
    }
    if (status == DCP_OK) {
        *out = dcp__lane_slot(l, l->slot) + l->used;
        l->used += rounded;
    }
    return status;
}

dcp_status dcp__transfer_sync(dcp__transfer *t, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (dcp__lane *l = t->lanes; l; l = l->next) {
        dcp_status one = l->driver->ops->stream_sync(l->driver, l->index, l->stream, status == DCP_OK ? err : NULL);
        status = status == DCP_OK ? one : status;
    }
    return status;
}

void dcp__transfer_free(dcp__transfer *t)
{
    if (!t) {
        return;
    }
    dcp__transfer_sync(t, NULL);
    while (t->lanes) {
        dcp__lane *next = t->lanes->next;
        free_lane(t, t->lanes);
        t->lanes = next;
    }
    while (t->devices) {
        transfer_device *next = t->devices->next;
        close_device(t, t->devices);
        t->devices = next;
    }
    pthread_mutex_destroy(&t->lock);
    dcp__free(t->ctx, t);
}
