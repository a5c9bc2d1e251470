/* CUDA through its driver interface: one copy of it in a process, stable names, and no pending error that a failed call would
 * leave to the next user (docs/design/device.md). */
#include <stddef.h>
#include <string.h>

#include "device/device.h"

/* Values of cuda.h. */
enum {
    CUDA_ALREADY_REGISTERED = 712,
    STREAM_NON_BLOCKING = 1,
    EVENT_BLOCKING_SYNC = 1,
    EVENT_DISABLE_TIMING = 2,
    REGISTER_PORTABLE = 1,
    POINTER_MEMORY_TYPE = 2,
    MEMORY_HOST = 1
};

typedef unsigned long long device_ptr;

typedef struct functions {
    int (*init)(unsigned);
    int (*device_count)(int *);
    int (*device_get)(int *, int);
    int (*primary_retain)(void **, int);
    int (*primary_release)(int);
    int (*push)(void *);
    int (*pop)(void **);
    int (*host_register)(void *, size_t, unsigned);
    int (*host_unregister)(void *);
    int (*to_host)(void *, device_ptr, size_t, void *);
    int (*to_device)(device_ptr, const void *, size_t, void *);
    int (*stream_create)(void **, unsigned);
    int (*stream_destroy)(void *);
    int (*stream_sync)(void *);
    int (*stream_wait)(void *, void *, unsigned);
    int (*event_create)(void **, unsigned);
    int (*event_record)(void *, void *);
    int (*event_sync)(void *);
    int (*event_destroy)(void *);
    int (*pointer_attribute)(void *, int, device_ptr);
    int (*error_name)(int, const char **);
    int (*error_string)(int, const char **);
} functions;

/* clang-format off */
static const dcp__symbol symbols[] = {
    {"cuInit", offsetof(functions, init), false},
    {"cuDeviceGetCount", offsetof(functions, device_count), false},
    {"cuDeviceGet", offsetof(functions, device_get), false},
    {"cuDevicePrimaryCtxRetain", offsetof(functions, primary_retain), false},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(functions, primary_release), false},
    {"cuCtxPushCurrent_v2", offsetof(functions, push), false},
    {"cuCtxPopCurrent_v2", offsetof(functions, pop), false},
    {"cuMemHostRegister_v2", offsetof(functions, host_register), false},
    {"cuMemHostUnregister", offsetof(functions, host_unregister), false},
    {"cuMemcpyDtoHAsync_v2", offsetof(functions, to_host), false},
    {"cuMemcpyHtoDAsync_v2", offsetof(functions, to_device), false},
    {"cuStreamCreate", offsetof(functions, stream_create), false},
    {"cuStreamDestroy_v2", offsetof(functions, stream_destroy), false},
    {"cuStreamSynchronize", offsetof(functions, stream_sync), false},
    {"cuStreamWaitEvent", offsetof(functions, stream_wait), false},
    {"cuEventCreate", offsetof(functions, event_create), false},
    {"cuEventRecord", offsetof(functions, event_record), false},
    {"cuEventSynchronize", offsetof(functions, event_sync), false},
    {"cuEventDestroy_v2", offsetof(functions, event_destroy), false},
    {"cuPointerGetAttribute", offsetof(functions, pointer_attribute), false},
    {"cuGetErrorName", offsetof(functions, error_name), false},
    {"cuGetErrorString", offsetof(functions, error_string), false},
};
/* clang-format on */

#define MAX_DEVICES 64

typedef struct cuda {
    dcp_device_driver base;
    functions fn;
    int n_devices;
    void *contexts[MAX_DEVICES]; /* primary ones, retained on first use; read and written by atomic operations */
} cuda;

static dcp_status fail(const cuda *c, int code, const char *call, dcp_error *err)
{
    const char *name = NULL, *text = NULL;
    c->fn.error_name(code, &name);
    c->fn.error_string(code, &text);
    dcp_status status = dcp__fail(err, DCP_DEVICE, "%s: %d %s: %s", call, code, name ? name : "?", text ? text : "?");
    if (err) {
        err->native_code = code;
    }
    return status;
}

/* ---- contexts: the primary one is made current for each call, so that the thread's own stays what it was ---- */

static dcp_status retain(cuda *c, int index, void **out, dcp_error *err)
{
    int device, code = c->fn.device_get(&device, index);
    void *context, *first = NULL;
    if (code != 0) {
        return fail(c, code, "cuDeviceGet", err);
    }
    code = c->fn.primary_retain(&context, device);
    if (code != 0) {
        return fail(c, code, "cuDevicePrimaryCtxRetain", err);
    }
    if (!__atomic_compare_exchange_n(&c->contexts[index], &first, context, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        c->fn.primary_release(device); /* another thread was first; it is the same one */
    }
    *out = context;
    return DCP_OK;
}

static dcp_status enter(cuda *c, int index, dcp_error *err)
{
    if (index < 0 || index >= c->n_devices || index >= MAX_DEVICES) {
        return dcp__fail(err, DCP_ARG, "cuda:%d is not there, of %d devices", index, c->n_devices);
    }
    void *context = __atomic_load_n(&c->contexts[index], __ATOMIC_ACQUIRE);
    dcp_status status = context ? DCP_OK : retain(c, index, &context, err);
    if (status == DCP_OK) {
        int code = c->fn.push(context);
        status = code == 0 ? DCP_OK : fail(c, code, "cuCtxPushCurrent", err);
    }
    return status;
}

static dcp_status leave(cuda *c, int code, const char *call, dcp_error *err)
{
    void *unused;
    c->fn.pop(&unused);
    return code == 0 ? DCP_OK : fail(c, code, call, err);
}

/* ---- the table ---- */

static dcp_status count(dcp_device_driver *d, int *out, dcp_error *err)
{
    (void)err;
    *out = ((cuda *)d)->n_devices;
    return DCP_OK;
}

static dcp_status stream_create(dcp_device_driver *d, int index, void **out, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.stream_create(out, STREAM_NON_BLOCKING), "cuStreamCreate", err) : status;
}

static void stream_destroy(dcp_device_driver *d, int index, void *stream)
{
    cuda *c = (cuda *)d;
    if (enter(c, index, NULL) == DCP_OK) {
        leave(c, c->fn.stream_destroy(stream), "cuStreamDestroy", NULL);
    }
}

static dcp_status stream_sync(dcp_device_driver *d, int index, void *stream, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.stream_sync(stream), "cuStreamSynchronize", err) : status;
}

static dcp_status stream_wait(dcp_device_driver *d, int index, void *stream, void *event, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.stream_wait(stream, event, 0), "cuStreamWaitEvent", err) : status;
}

static dcp_status event_create(dcp_device_driver *d, int index, void **out, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.event_create(out, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING), "cuEventCreate", err)
                            : status;
}

static void event_destroy(dcp_device_driver *d, int index, void *event)
{
    cuda *c = (cuda *)d;
    if (enter(c, index, NULL) == DCP_OK) {
        leave(c, c->fn.event_destroy(event), "cuEventDestroy", NULL);
    }
}

static dcp_status event_record(dcp_device_driver *d, int index, void *event, void *stream, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.event_record(event, stream), "cuEventRecord", err) : status;
}

static dcp_status event_sync(dcp_device_driver *d, int index, void *event, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.event_sync(event), "cuEventSynchronize", err) : status;
}

/* Copies with memory that is not registered are staged by the driver; they are right, and slower. */
static dcp_status to_host(dcp_device_driver *d, int index, void *host, const void *device, size_t n, bool is_pinned, void *stream,
                          dcp_error *err)
{
    (void)is_pinned;
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.to_host(host, (device_ptr)(uintptr_t)device, n, stream), "cuMemcpyDtoHAsync", err)
                            : status;
}

static dcp_status to_device(dcp_device_driver *d, int index, void *device, const void *host, size_t n, bool is_pinned,
                            void *stream, dcp_error *err)
{
    (void)is_pinned;
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.to_device((device_ptr)(uintptr_t)device, host, n, stream), "cuMemcpyHtoDAsync", err)
                            : status;
}

static dcp_status host_register(dcp_device_driver *d, int index, void *ptr, size_t bytes, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    if (status != DCP_OK) {
        return status;
    }
    int code = c->fn.host_register(ptr, bytes, REGISTER_PORTABLE);
    status = leave(c, code, "cuMemHostRegister", err);
    if (code == CUDA_ALREADY_REGISTERED && err) {
        err->code = DCP_EXISTS;
    }
    return code == CUDA_ALREADY_REGISTERED ? DCP_EXISTS : status;
}

static dcp_status host_unregister(dcp_device_driver *d, int index, void *ptr, dcp_error *err)
{
    cuda *c = (cuda *)d;
    dcp_status status = enter(c, index, err);
    return status == DCP_OK ? leave(c, c->fn.host_unregister(ptr), "cuMemHostUnregister", err) : status;
}

/* For host memory that is not registered the call fails. */
static bool is_registered(dcp_device_driver *d, int index, const void *ptr)
{
    cuda *c = (cuda *)d;
    unsigned type = 0;
    if (enter(c, index, NULL) != DCP_OK) {
        return false;
    }
    int code = c->fn.pointer_attribute(&type, POINTER_MEMORY_TYPE, (device_ptr)(uintptr_t)ptr);
    void *unused;
    c->fn.pop(&unused);
    return code == 0 && type == MEMORY_HOST;
}

static void free_driver(dcp_device_driver *d)
{
    cuda *c = (cuda *)d;
    for (int i = 0; i < MAX_DEVICES; i++) {
        int device;
        if (c->contexts[i] && c->fn.device_get(&device, i) == 0) {
            c->fn.primary_release(device);
        }
    }
    dcp__free(d->ctx, c);
}

static const dcp_device_ops cuda_ops = {
    .struct_size = sizeof cuda_ops,
    .abi_version = DCP_DEVICE_ABI,
    .type = DCP_DEVICE_CUDA,
    .name = "cuda",
    .count = count,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_sync = stream_sync,
    .stream_wait = stream_wait,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_sync = event_sync,
    .to_host = to_host,
    .to_device = to_device,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .is_registered = is_registered,
    .free = free_driver,
};

static dcp_status load(cuda *c, const char *library, dcp_error *err)
{
    dcp__library l = {0};
    const char *name = library ? library : "libcuda.so.1";
    dcp_status status = dcp__library_open(&l, "libcuda", &name, 1, err);
    status =
        status == DCP_OK ? dcp__library_bind(&l, "libcuda", symbols, sizeof symbols / sizeof symbols[0], &c->fn, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    int code = c->fn.init(0);
    if (code != 0) {
        return fail(c, code, "cuInit", err);
    }
    code = c->fn.device_count(&c->n_devices);
    return code == 0 ? DCP_OK : fail(c, code, "cuDeviceGetCount", err);
}

dcp_status dcp__cuda_open(dcp_context *ctx, const char *library, dcp_device_driver **out, dcp_error *err)
{
    cuda *c = dcp__calloc(ctx, 1, sizeof *c);
    if (!c) {
        return dcp__nomem(err);
    }
    c->base = (dcp_device_driver){&cuda_ops, ctx};
    dcp_status status = load(c, library, err);
    if (status != DCP_OK) {
        dcp__free(ctx, c);
        return status;
    }
    *out = &c->base;
    return DCP_OK;
}
