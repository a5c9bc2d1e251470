/* A look-alike of libascendcl.so for tests: the documented rules of AscendCL (CANN 8.5; 8.1 with WITHOUT_V2), and no device. */
#include <string.h>
#include <unistd.h>

#include "devices/core.h"

#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* they are the vendor's */

enum {
    INVALID_PARAM = 100000,
    UNINITIALIZE = 100001,
    REPEAT_INITIALIZE = 100002,
    PARAM_INVALID = 107000,
    INVALID_DEVICE = 107001,
    CONTEXT_NULL = 107002,
    STREAM_CONTEXT = 107003,
    INVALID_HANDLE = 107017,
    NOT_SUPPORTED = 207000,
    MEMORY_ALLOCATION = 207001,
    DRIVER_INTERNAL = 507899,
    ALREADY_REGISTERED = 507910,
    NOT_REGISTERED = 507911
};

static bool is_initialised;
static _Thread_local int current = -1; /* device */
static char contexts[CORE_DEVICES];    /* addresses alone matter */

#define ENTER(name)                                                                                                              \
    do {                                                                                                                         \
        int injected = core_enter(name);                                                                                         \
        if (injected) {                                                                                                          \
            return injected;                                                                                                     \
        }                                                                                                                        \
        if (!__atomic_load_n(&is_initialised, __ATOMIC_ACQUIRE)) {                                                               \
            return UNINITIALIZE;                                                                                                 \
        }                                                                                                                        \
    } while (0)

#define NEED_CONTEXT()                                                                                                           \
    do {                                                                                                                         \
        if (current < 0) {                                                                                                       \
            return CONTEXT_NULL;                                                                                                 \
        }                                                                                                                        \
    } while (0)

static core_stream *stream_of(void *handle)
{
    return handle ? handle : core_default_stream(current);
}

static int check_stream(void *handle)
{
    if (handle && !core_stream_is(handle)) {
        return INVALID_HANDLE;
    }
    return core_stream_device(stream_of(handle)) == current ? 0 : STREAM_CONTEXT;
}

/* ---- initialisation and contexts ---- */

EXPORT int aclInit(const char *config)
{
    (void)config;
    int injected = core_enter("aclInit");
    return injected ? injected
                    : core_log(__atomic_exchange_n(&is_initialised, true, __ATOMIC_ACQ_REL) ? REPEAT_INITIALIZE : 0, "aclInit");
}

EXPORT int aclFinalize(void)
{
    ENTER("aclFinalize");
    core_log(0, "aclFinalize");
    __atomic_store_n(&is_initialised, false, __ATOMIC_RELEASE);
    return 0;
}

EXPORT int aclrtResetDevice(int32_t device)
{
    (void)device;
    ENTER("aclrtResetDevice");
    return 0;
}

EXPORT int aclrtSetDevice(int32_t device)
{
    ENTER("aclrtSetDevice");
    if (device < 0 || device >= CORE_DEVICES) {
        return INVALID_DEVICE;
    }
    current = device;
    return core_log(0, "aclrtSetDevice %d", device);
}

EXPORT int aclrtGetDevice(int32_t *device)
{
    ENTER("aclrtGetDevice");
    NEED_CONTEXT();
    *device = current;
    return 0;
}

EXPORT int aclrtGetDeviceCount(uint32_t *n)
{
    ENTER("aclrtGetDeviceCount");
    *n = CORE_DEVICES;
    return 0;
}

EXPORT int aclrtGetCurrentContext(void **context)
{
    ENTER("aclrtGetCurrentContext");
    NEED_CONTEXT();
    *context = &contexts[current];
    return 0;
}

EXPORT int aclrtSetCurrentContext(void *context)
{
    ENTER("aclrtSetCurrentContext");
    if (!context) {
        return PARAM_INVALID;
    }
    current = (int)((char *)context - contexts);
    return 0;
}

EXPORT const char *aclGetRecentErrMsg(void)
{
    return "a message of the runtime";
}

/* ---- memory ---- */

EXPORT int aclrtMalloc(void **ptr, size_t n, int policy)
{
    (void)policy;
    ENTER("aclrtMalloc");
    NEED_CONTEXT();
    *ptr = fake_alloc(current, n);
    return 0;
}

EXPORT int aclrtFree(void *ptr)
{
    ENTER("aclrtFree");
    fake_free(ptr);
    return 0;
}

static int check_copy(void *dst, size_t most, const void *src, size_t n, int kind)
{
    int device;
    bool to_device = core_is_device(dst, n, &device), from_device = core_is_device(src, n, &device);
    if (n > most || kind < 0 || kind > 4) {
        return PARAM_INVALID;
    }
    bool wants_to = kind == 1 || kind == 3, wants_from = kind == 2 || kind == 3;
    return kind == 4 || (to_device == wants_to && from_device == wants_from) ? 0 : PARAM_INVALID;
}

EXPORT int aclrtMemcpy(void *dst, size_t most, const void *src, size_t n, int kind)
{
    ENTER("aclrtMemcpy");
    NEED_CONTEXT();
    int code = check_copy(dst, most, src, n, kind);
    if (code == 0) {
        core_copy_now(dst, src, n);
    }
    return code;
}

/* With memory that is not registered the stream is drained and the copy made at once. An old driver does not look, and moves
 * whatever pages the addresses happen to name. */
EXPORT int aclrtMemcpyAsync(void *dst, size_t most, const void *src, size_t n, int kind, void *stream)
{
    ENTER("aclrtMemcpyAsync");
    NEED_CONTEXT();
    int device, code = check_stream(stream);
    code = code ? code : kind == 0 ? NOT_SUPPORTED : check_copy(dst, most, src, n, kind);
    if (code || n == 0) {
        return code;
    }
    void *host = core_is_device(dst, n, &device) ? (void *)src : dst;
    if (kind != 3 && !core_knows(host, n, current)) {
        core_note("asynchronous copy with pageable memory");
        if (core_is_old()) {
            core_note("memory destroyed");
            return 0;
        }
        core_stream_sync(stream_of(stream));
        core_copy_now(dst, src, n);
        return 0;
    }
    core_copy(stream_of(stream), dst, src, n);
    return 0;
}

/* ---- registration ---- */

static int do_register(void *ptr, uint64_t n)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (!ptr || n == 0) {
        return INVALID_PARAM;
    }
    if (current < 0) {
        return CONTEXT_NULL;
    }
    if ((uintptr_t)ptr % page || n % page) {
        return DRIVER_INTERNAL;
    }
    switch (core_register(ptr, n, current)) {
    case CORE_OVERLAP: return core_is_old() ? DRIVER_INTERNAL : ALREADY_REGISTERED;
    case CORE_TOO_LARGE: return MEMORY_ALLOCATION;
    default: return 0;
    }
}

EXPORT int aclrtHostRegister(void *ptr, uint64_t n, int type, void **device_ptr)
{
    ENTER("aclrtHostRegister");
    if (!device_ptr) {
        return INVALID_PARAM;
    }
    if (type != 0) {
        return NOT_SUPPORTED;
    }
    *device_ptr = ptr;
    return core_log(do_register(ptr, n), "aclrtHostRegister %p %llu %d on %d", ptr, (unsigned long long)n, type, current);
}

#ifndef WITHOUT_V2
EXPORT int aclrtHostRegisterV2(void *ptr, uint64_t n, uint32_t flag)
{
    ENTER("aclrtHostRegisterV2");
    if (flag == 0 || flag & ~UINT32_C(0x1000000e)) {
        return PARAM_INVALID;
    }
    if (flag == UINT32_C(0x10000000)) {
        core_note("pinned alone: nothing is registered");
        return 0;
    }
    core_note(flag & UINT32_C(0x10000000) ? "mapped and pinned" : "mapped");
    return do_register(ptr, n);
}
#endif

#ifndef WITHOUT_UNREGISTER
EXPORT int aclrtHostUnregister(void *ptr)
{
    ENTER("aclrtHostUnregister");
    NEED_CONTEXT();
    int code = core_unregister(ptr, current) == CORE_OK ? 0 : core_is_old() ? DRIVER_INTERNAL : NOT_REGISTERED;
    return core_log(code, "aclrtHostUnregister %p on %d", ptr, current);
}
#endif

typedef struct attributes {
    uint32_t id;
    int type;
    uint32_t page_bytes, reserved[4];
} attributes;

EXPORT int aclrtPointerGetAttributes(const void *ptr, attributes *out)
{
    ENTER("aclrtPointerGetAttributes");
    NEED_CONTEXT();
    int device = 0;
    bool is_device = core_is_device(ptr, 1, &device), is_known = core_knows(ptr, 1, current);
    if (!is_device && !is_known && core_is_old()) {
        return DRIVER_INTERNAL;
    }
    *out = (attributes){.id = (uint32_t)device, .type = is_device ? 1 : is_known ? 0 : 2};
    return 0;
}

/* ---- streams and events ---- */

EXPORT int aclrtCreateStream(void **stream)
{
    ENTER("aclrtCreateStream");
    NEED_CONTEXT();
    *stream = core_stream_create(current);
    return 0;
}

EXPORT int aclrtDestroyStream(void *stream)
{
    ENTER("aclrtDestroyStream");
    NEED_CONTEXT();
    int code = stream ? check_stream(stream) : PARAM_INVALID;
    if (code == 0) {
        core_stream_destroy(stream);
    }
    return code;
}

EXPORT int aclrtSynchronizeStream(void *stream)
{
    ENTER("aclrtSynchronizeStream");
    NEED_CONTEXT();
    int code = check_stream(stream);
    return code ? code : core_stream_sync(stream_of(stream));
}

EXPORT int aclrtCreateEventExWithFlag(void **event, uint32_t flag)
{
    ENTER("aclrtCreateEventExWithFlag");
    NEED_CONTEXT();
    *event = core_event_create(current, flag);
    return 0;
}

EXPORT int aclrtDestroyEvent(void *event)
{
    ENTER("aclrtDestroyEvent");
    NEED_CONTEXT();
    if (!core_event_is(event)) {
        return INVALID_HANDLE;
    }
    core_event_destroy(event);
    return 0;
}

EXPORT int aclrtRecordEvent(void *event, void *stream)
{
    ENTER("aclrtRecordEvent");
    NEED_CONTEXT();
    int code = core_event_is(event) ? check_stream(stream) : INVALID_HANDLE;
    if (code == 0) {
        core_event_record(event, stream_of(stream));
    }
    return code;
}

EXPORT int aclrtStreamWaitEvent(void *stream, void *event)
{
    ENTER("aclrtStreamWaitEvent");
    NEED_CONTEXT();
    int code = core_event_is(event) ? check_stream(stream) : INVALID_HANDLE;
    if (code == 0 && !(core_event_flags(event) & 1)) {
        code = PARAM_INVALID;
    }
    if (code == 0) {
        core_stream_wait(stream_of(stream), event);
    }
    return code;
}

EXPORT int aclrtSynchronizeEvent(void *event)
{
    ENTER("aclrtSynchronizeEvent");
    NEED_CONTEXT();
    if (!core_event_is(event)) {
        return INVALID_HANDLE;
    }
    return core_event_sync(event);
}
