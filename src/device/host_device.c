/* The table over plain memory: what a device does, at once and without a device. */
#include <string.h>

#include "device/device.h"

static dcp_status count(dcp_device_driver *d, int *out, dcp_error *err)
{
    (void)d;
    (void)err;
    *out = 1;
    return DCP_OK;
}

/* Streams and events need no state: all is done when a call returns. */
static dcp_status create(dcp_device_driver *d, int index, void **out, dcp_error *err)
{
    (void)index;
    (void)err;
    *out = d;
    return DCP_OK;
}

static void destroy(dcp_device_driver *d, int index, void *handle)
{
    (void)d;
    (void)index;
    (void)handle;
}

static dcp_status nothing(dcp_device_driver *d, int index, void *handle, dcp_error *err)
{
    (void)d;
    (void)index;
    (void)handle;
    (void)err;
    return DCP_OK;
}

static dcp_status nothing_of_two(dcp_device_driver *d, int index, void *a, void *b, dcp_error *err)
{
    (void)b;
    return nothing(d, index, a, err);
}

static dcp_status copy(dcp_device_driver *d, int index, void *dst, const void *src, size_t n, bool is_pinned, void *stream,
                       dcp_error *err)
{
    (void)is_pinned;
    (void)d;
    (void)index;
    (void)stream;
    (void)err;
    memcpy(dst, src, n);
    return DCP_OK;
}

static dcp_status host_register(dcp_device_driver *d, int index, void *ptr, size_t bytes, dcp_error *err)
{
    (void)d;
    (void)index;
    (void)ptr;
    (void)bytes;
    return dcp__fail(err, DCP_UNSUPPORTED, "there is no device to register memory with");
}

static dcp_status host_unregister(dcp_device_driver *d, int index, void *ptr, dcp_error *err)
{
    return host_register(d, index, ptr, 0, err);
}

static void free_driver(dcp_device_driver *d)
{
    dcp__free(d->ctx, d);
}

static const dcp_device_ops host_ops = {
    .struct_size = sizeof host_ops,
    .abi_version = DCP_DEVICE_ABI,
    .type = DCP_DEVICE_CPU,
    .name = "host",
    .count = count,
    .stream_create = create,
    .stream_destroy = destroy,
    .stream_sync = nothing,
    .stream_wait = nothing_of_two,
    .event_create = create,
    .event_destroy = destroy,
    .event_record = nothing_of_two,
    .event_sync = nothing,
    .to_host = copy,
    .to_device = copy,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .free = free_driver,
};

dcp_status dcp__host_device_open(dcp_context *ctx, dcp_device_driver **out, dcp_error *err)
{
    dcp_device_driver *d = dcp__alloc(ctx, sizeof *d);
    if (!d) {
        return dcp__nomem(err);
    }
    *d = (dcp_device_driver){&host_ops, ctx};
    *out = d;
    return DCP_OK;
}
