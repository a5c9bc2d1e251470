/* A look-alike of libcuda.so.1 for tests: the documented rules of CUDA's driver interface, and no device. */
#include <string.h>

#include "devices/core.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* they are the vendor's */

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    DEEPEST = 16
};

typedef unsigned long long device_ptr;

static bool is_initialised;
static char contexts[CORE_DEVICES]; /* the primary ones; addresses alone matter */
static int n_retained[CORE_DEVICES];
static _Thread_local int stack[DEEPEST], depth; /* devices of the contexts */

#define ENTER(name)                                                                                                              \
    do {                                                                                                                         \
        int injected = core_enter(name);                                                                                         \
        if (injected) {                                                                                                          \
            return injected;                                                                                                     \
        }                                                                                                                        \
        if (!__atomic_load_n(&is_initialised, __ATOMIC_ACQUIRE)) {                                                               \
            return NOT_INITIALIZED;                                                                                              \
        }                                                                                                                        \
    } while (0)

#define NEED_CONTEXT()                                                                                                           \
    do {                                                                                                                         \
        if (depth == 0) {                                                                                                        \
            return INVALID_CONTEXT;                                                                                              \
        }                                                                                                                        \
    } while (0)

static int current(void)
{
    return stack[depth - 1];
}

static core_stream *stream_of(void *handle)
{
    return handle ? handle : core_default_stream(current());
}

/* A stream is used in its own context, but for waiting. */
static int check_stream(void *handle)
{
    if (handle && !core_stream_is(handle)) {
        return INVALID_HANDLE;
    }
    return core_stream_device(stream_of(handle)) == current() ? 0 : INVALID_HANDLE;
}

/* ---- initialisation and contexts ---- */

EXPORT int cuInit(unsigned flags)
{
    int injected = core_enter("cuInit");
    if (injected) {
        return injected;
    }
    __atomic_store_n(&is_initialised, true, __ATOMIC_RELEASE);
    return flags ? INVALID_VALUE : 0;
}

EXPORT int cuDeviceGetCount(int *n)
{
    ENTER("cuDeviceGetCount");
    *n = CORE_DEVICES;
    return 0;
}

EXPORT int cuDeviceGet(int *device, int index)
{
    ENTER("cuDeviceGet");
    *device = index;
    return index >= 0 && index < CORE_DEVICES ? 0 : INVALID_DEVICE;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    ENTER("cuDevicePrimaryCtxRetain");
    *context = &contexts[device];
    __atomic_fetch_add(&n_retained[device], 1, __ATOMIC_RELAXED);
    return 0;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    ENTER("cuDevicePrimaryCtxRelease");
    return __atomic_fetch_sub(&n_retained[device], 1, __ATOMIC_RELAXED) > 0 ? 0 : INVALID_CONTEXT;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    ENTER("cuCtxPushCurrent");
    if (!context || depth == DEEPEST) {
        return INVALID_CONTEXT;
    }
    stack[depth++] = (int)((char *)context - contexts);
    return 0;
}

EXPORT int cuCtxPopCurrent_v2(void **context)
{
    ENTER("cuCtxPopCurrent");
    NEED_CONTEXT();
    *context = &contexts[stack[--depth]];
    return 0;
}

EXPORT int cuCtxGetCurrent(void **context)
{
    ENTER("cuCtxGetCurrent");
    *context = depth ? &contexts[current()] : NULL;
    return 0;
}

/* ---- memory ---- */

EXPORT int cuMemAlloc_v2(device_ptr *ptr, size_t n)
{
    ENTER("cuMemAlloc");
    NEED_CONTEXT();
    *ptr = (uintptr_t)fake_alloc(current(), n);
    return n ? 0 : INVALID_VALUE;
}

EXPORT int cuMemFree_v2(device_ptr ptr)
{
    ENTER("cuMemFree");
    NEED_CONTEXT();
    fake_free((void *)(uintptr_t)ptr);
    return 0;
}

/* With memory that is not registered the driver stages the copy, and is done when the call returns. */
static int copy(void *dst, const void *src, size_t n, const void *host, void *stream)
{
    int device, code = check_stream(stream);
    const void *other = host == dst ? src : dst;
    if (code == 0 && (core_is_device(host, n, &device) || !core_is_device(other, n, &device))) {
        code = INVALID_VALUE;
    }
    if (code) {
        return code;
    }
    if (core_knows(host, n, -1)) {
        core_copy(stream_of(stream), dst, src, n);
        return 0;
    }
    core_note("asynchronous copy with pageable memory");
    code = core_stream_sync(stream_of(stream));
    core_copy_now(dst, src, n);
    return code;
}

EXPORT int cuMemcpyDtoHAsync_v2(void *dst, device_ptr src, size_t n, void *stream)
{
    ENTER("cuMemcpyDtoHAsync");
    NEED_CONTEXT();
    return copy(dst, (const void *)(uintptr_t)src, n, dst, stream);
}

EXPORT int cuMemcpyHtoDAsync_v2(device_ptr dst, const void *src, size_t n, void *stream)
{
    ENTER("cuMemcpyHtoDAsync");
    NEED_CONTEXT();
    return copy((void *)(uintptr_t)dst, src, n, src, stream);
}

/* ---- registration ---- */

EXPORT int cuMemHostRegister_v2(void *ptr, size_t n, unsigned flags)
{
    ENTER("cuMemHostRegister");
    NEED_CONTEXT();
    if (!ptr || n == 0 || flags & ~15u) {
        return INVALID_VALUE;
    }
    core_note(flags & 1 ? "portable" : "not portable");
    switch (core_register(ptr, n, 0)) { /* one table for all devices */
    case CORE_OVERLAP: return ALREADY_REGISTERED;
    case CORE_TOO_LARGE: return OUT_OF_MEMORY;
    default: return 0;
    }
}

EXPORT int cuMemHostUnregister(void *ptr)
{
    ENTER("cuMemHostUnregister");
    NEED_CONTEXT();
    return core_unregister(ptr, 0) == CORE_OK ? 0 : NOT_REGISTERED;
}

EXPORT int cuPointerGetAttribute(void *out, int attribute, device_ptr ptr)
{
    ENTER("cuPointerGetAttribute");
    NEED_CONTEXT();
    int device;
    const void *p = (const void *)(uintptr_t)ptr;
    unsigned type = core_is_device(p, 1, &device) ? 2 : core_knows(p, 1, -1) ? 1 : 0;
    if (attribute != 2 || type == 0) {
        return INVALID_VALUE;
    }
    memcpy(out, &type, sizeof type);
    return 0;
}

/* ---- streams and events ---- */

EXPORT int cuStreamCreate(void **stream, unsigned flags)
{
    ENTER("cuStreamCreate");
    NEED_CONTEXT();
    core_note(flags == 1 ? "non-blocking stream" : "blocking stream");
    *stream = core_stream_create(current());
    return 0;
}

EXPORT int cuStreamDestroy_v2(void *stream)
{
    ENTER("cuStreamDestroy");
    NEED_CONTEXT();
    int code = stream ? check_stream(stream) : INVALID_HANDLE;
    if (code == 0) {
        core_stream_destroy(stream);
    }
    return code;
}

EXPORT int cuStreamSynchronize(void *stream)
{
    ENTER("cuStreamSynchronize");
    NEED_CONTEXT();
    int code = check_stream(stream);
    return code ? code : core_stream_sync(stream_of(stream));
}

EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER("cuStreamWaitEvent");
    NEED_CONTEXT();
    int code = flags ? INVALID_VALUE : core_event_is(event) ? check_stream(stream) : INVALID_HANDLE;
    if (code == 0) {
        core_stream_wait(stream_of(stream), event);
    }
    return code;
}

EXPORT int cuEventCreate(void **event, unsigned flags)
{
    ENTER("cuEventCreate");
    NEED_CONTEXT();
    *event = core_event_create(current(), flags);
    return 0;
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    ENTER("cuEventRecord");
    NEED_CONTEXT();
    int code = core_event_is(event) && core_event_device(event) == current() ? check_stream(stream) : INVALID_HANDLE;
    if (code == 0) {
        core_event_record(event, stream_of(stream));
    }
    return code;
}

EXPORT int cuEventSynchronize(void *event)
{
    ENTER("cuEventSynchronize");
    NEED_CONTEXT();
    return core_event_is(event) ? core_event_sync(event) : INVALID_HANDLE;
}

EXPORT int cuEventDestroy_v2(void *event)
{
    ENTER("cuEventDestroy");
    NEED_CONTEXT();
    if (!core_event_is(event)) {
        return INVALID_HANDLE;
    }
    core_event_destroy(event);
    return 0;
}

EXPORT int cuGetErrorName(int code, const char **name)
{
    *name = code == ALREADY_REGISTERED ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" : "CUDA_ERROR_OF_SOME_KIND";
    return 0;
}

EXPORT int cuGetErrorString(int code, const char **text)
{
    (void)code;
    *text = "what it means";
    return 0;
}
