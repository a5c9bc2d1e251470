/* Ascend NPUs through AscendCL. Its contexts belong to threads, its registration calls differ from release to release, and its
 * asynchronous copies are only right with memory that is registered (docs/design/device.md). */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/device.h"

/* Values of acl_base_rt.h and acl_rt.h. */
enum {
    ACL_REPEAT_INITIALIZE = 100002,
    ACL_RT_PARAM_INVALID = 107000,
    ACL_RT_FEATURE_NOT_SUPPORT = 207000,
    ACL_RT_HOST_MEMORY_ALREADY_REGISTERED = 507910,
    COPY_HOST_TO_DEVICE = 1,
    COPY_DEVICE_TO_HOST = 2,
    REGISTER_MAPPED = 0, /* of the classic call */
    REGISTER_V2_MAPPED = 0x2,
    REGISTER_V2_PINNED = 0x10000000,
    EVENT_SYNC = 1,
    LOCATION_HOST = 0
};

typedef struct pointer_attributes {
    struct {
        uint32_t id;
        int type;
    } location;
    uint32_t page_size;
    uint32_t reserved[64]; /* 4 in the releases that are known; room for those to come */
} pointer_attributes;

typedef struct functions {
    int (*init)(const char *);
    int (*set_device)(int32_t);
    int (*get_device)(int32_t *);
    int (*device_count)(uint32_t *);
    int (*get_context)(void **);
    int (*set_context)(void *);
    int (*host_register)(void *, uint64_t, int, void **);
    int (*host_register_v2)(void *, uint64_t, uint32_t); /* from CANN 8.5 on */
    int (*host_unregister)(void *);
    int (*memcpy_now)(void *, size_t, const void *, size_t, int);
    int (*memcpy_async)(void *, size_t, const void *, size_t, int, void *);
    int (*stream_create)(void **);
    int (*stream_destroy)(void *);
    int (*stream_sync)(void *);
    int (*stream_wait)(void *, void *);
    int (*event_create)(void **, uint32_t);
    int (*event_destroy)(void *);
    int (*event_record)(void *, void *);
    int (*event_sync)(void *);
    int (*pointer_attributes)(const void *, pointer_attributes *);
    const char *(*recent_message)(void);
} functions;

/* clang-format off */
static const dcp__symbol symbols[] = {
    {"aclInit", offsetof(functions, init), false},
    {"aclrtSetDevice", offsetof(functions, set_device), false},
    {"aclrtGetDevice", offsetof(functions, get_device), false},
    {"aclrtGetDeviceCount", offsetof(functions, device_count), false},
    {"aclrtGetCurrentContext", offsetof(functions, get_context), false},
    {"aclrtSetCurrentContext", offsetof(functions, set_context), false},
    {"aclrtHostRegister", offsetof(functions, host_register), false},
    {"aclrtHostRegisterV2", offsetof(functions, host_register_v2), true},
    {"aclrtHostUnregister", offsetof(functions, host_unregister), false},
    {"aclrtMemcpy", offsetof(functions, memcpy_now), false},
    {"aclrtMemcpyAsync", offsetof(functions, memcpy_async), false},
    {"aclrtCreateStream", offsetof(functions, stream_create), false},
    {"aclrtDestroyStream", offsetof(functions, stream_destroy), false},
    {"aclrtSynchronizeStream", offsetof(functions, stream_sync), false},
    {"aclrtStreamWaitEvent", offsetof(functions, stream_wait), false},
    {"aclrtCreateEventExWithFlag", offsetof(functions, event_create), false},
    {"aclrtDestroyEvent", offsetof(functions, event_destroy), false},
    {"aclrtRecordEvent", offsetof(functions, event_record), false},
    {"aclrtSynchronizeEvent", offsetof(functions, event_sync), false},
    {"aclrtPointerGetAttributes", offsetof(functions, pointer_attributes), true},
    {"aclGetRecentErrMsg", offsetof(functions, recent_message), true},
};
/* clang-format on */

typedef struct acl {
    dcp_device_driver base;
    functions fn;
    int n_devices;
} acl;

/* ---- errors ---- */

static const char *name_of(int code)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {
        {100000, "ACL_ERROR_INVALID_PARAM"},
        {100001, "ACL_ERROR_UNINITIALIZE"},
        {107000, "ACL_ERROR_RT_PARAM_INVALID"},
        {107001, "ACL_ERROR_RT_INVALID_DEVICEID"},
        {107002, "ACL_ERROR_RT_CONTEXT_NULL"},
        {107003, "ACL_ERROR_RT_STREAM_CONTEXT"},
        {207000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT"},
        {207001, "ACL_ERROR_RT_MEMORY_ALLOCATION"},
        {507899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR"},
        {507910, "ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED"},
        {507911, "ACL_ERROR_RT_HOST_MEMORY_NOT_REGISTERED"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (names[i].code == code) {
            return names[i].name;
        }
    }
    return "";
}

static dcp_status fail(const acl *a, int code, const char *call, dcp_error *err)
{
    const char *text = a->fn.recent_message ? a->fn.recent_message() : NULL;
    dcp_status status =
        dcp__fail(err, DCP_DEVICE, "%s: %d %s%s%s", call, code, name_of(code), text ? ": " : "", text ? text : "");
    if (err) {
        err->native_code = code;
    }
    return status;
}

/* ---- contexts ---- */

/* Makes a device current for a call. A thread that has it already keeps its context, which its streams belong to. */
static dcp_status enter(acl *a, int index, void **old, dcp_error *err)
{
    int32_t current;
    *old = NULL;
    if (index < 0 || index >= a->n_devices) {
        return dcp__fail(err, DCP_ARG, "npu:%d is not there, of %d devices", index, a->n_devices);
    }
    if (a->fn.get_device(&current) == 0) {
        if (current == index) {
            return DCP_OK;
        }
        if (a->fn.get_context(old) != 0) {
            *old = NULL;
        }
    }
    int code = a->fn.set_device(index);
    return code == 0 ? DCP_OK : fail(a, code, "aclrtSetDevice", err);
}

static dcp_status leave(acl *a, void *old, int code, const char *call, dcp_error *err)
{
    dcp_status status = code == 0 ? DCP_OK : fail(a, code, call, err);
    if (old) {
        a->fn.set_context(old);
    }
    return status;
}

/* ---- the table ---- */

static dcp_status count(dcp_device_driver *d, int *out, dcp_error *err)
{
    (void)err;
    *out = ((acl *)d)->n_devices;
    return DCP_OK;
}

static dcp_status stream_create(dcp_device_driver *d, int index, void **out, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.stream_create(out), "aclrtCreateStream", err) : status;
}

static void stream_destroy(dcp_device_driver *d, int index, void *stream)
{
    acl *a = (acl *)d;
    void *old;
    if (enter(a, index, &old, NULL) == DCP_OK) {
        leave(a, old, a->fn.stream_destroy(stream), "aclrtDestroyStream", NULL);
    }
}

static dcp_status stream_sync(dcp_device_driver *d, int index, void *stream, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.stream_sync(stream), "aclrtSynchronizeStream", err) : status;
}

static dcp_status stream_wait(dcp_device_driver *d, int index, void *stream, void *event, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.stream_wait(stream, event), "aclrtStreamWaitEvent", err) : status;
}

/* Of the kind that can be recorded again and that streams can wait for. Events of aclrtCreateEvent come from a small store of the
 * hardware. */
static dcp_status event_create(dcp_device_driver *d, int index, void **out, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.event_create(out, EVENT_SYNC), "aclrtCreateEventExWithFlag", err) : status;
}

static void event_destroy(dcp_device_driver *d, int index, void *event)
{
    acl *a = (acl *)d;
    void *old;
    if (enter(a, index, &old, NULL) == DCP_OK) {
        leave(a, old, a->fn.event_destroy(event), "aclrtDestroyEvent", NULL);
    }
}

static dcp_status event_record(dcp_device_driver *d, int index, void *event, void *stream, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.event_record(event, stream), "aclrtRecordEvent", err) : status;
}

static dcp_status event_sync(dcp_device_driver *d, int index, void *event, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.event_sync(event), "aclrtSynchronizeEvent", err) : status;
}

/* A runtime that can tell memory that is not registered drains the stream and copies at once; an older one would give it to the
 * asynchronous engine. So that is done here, for all of them. */
static dcp_status copy(acl *a, int index, void *dst, const void *src, size_t n, int kind, bool is_pinned, void *stream,
                       dcp_error *err)
{
    void *old;
    dcp_status status = enter(a, index, &old, err);
    if (status != DCP_OK) {
        return status;
    }
    if (is_pinned) {
        return leave(a, old, a->fn.memcpy_async(dst, n, src, n, kind, stream), "aclrtMemcpyAsync", err);
    }
    int code = a->fn.stream_sync(stream);
    if (code != 0) {
        return leave(a, old, code, "aclrtSynchronizeStream", err);
    }
    return leave(a, old, a->fn.memcpy_now(dst, n, src, n, kind), "aclrtMemcpy", err);
}

static dcp_status to_host(dcp_device_driver *d, int index, void *host, const void *device, size_t n, bool is_pinned, void *stream,
                          dcp_error *err)
{
    return copy((acl *)d, index, host, device, n, COPY_DEVICE_TO_HOST, is_pinned, stream, err);
}

static dcp_status to_device(dcp_device_driver *d, int index, void *device, const void *host, size_t n, bool is_pinned,
                            void *stream, dcp_error *err)
{
    return copy((acl *)d, index, device, host, n, COPY_HOST_TO_DEVICE, is_pinned, stream, err);
}

/* ---- registration ---- */

/* A form that the runtime does not have. */
static bool is_unknown_form(int code)
{
    return code == ACL_RT_FEATURE_NOT_SUPPORT || code == ACL_RT_PARAM_INVALID;
}

/* The newer call comes first. PINNED alone is never asked for: without support in the driver it registers nothing, and succeeds.
 */
static int register_best(const acl *a, void *ptr, size_t bytes, const char **call)
{
    void *scratch;
    *call = "aclrtHostRegisterV2";
    if (a->fn.host_register_v2) {
        int code = a->fn.host_register_v2(ptr, bytes, REGISTER_V2_MAPPED | REGISTER_V2_PINNED);
        code = is_unknown_form(code) ? a->fn.host_register_v2(ptr, bytes, REGISTER_V2_MAPPED) : code;
        if (!is_unknown_form(code)) {
            return code;
        }
    }
    *call = "aclrtHostRegister";
    return a->fn.host_register(ptr, bytes, REGISTER_MAPPED, &scratch);
}

static dcp_status host_register(dcp_device_driver *d, int index, void *ptr, size_t bytes, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    const char *call;
    dcp_status status = enter(a, index, &old, err);
    if (status != DCP_OK) {
        return status;
    }
    int code = register_best(a, ptr, bytes, &call);
    status = leave(a, old, code, call, err);
    if (code == ACL_RT_HOST_MEMORY_ALREADY_REGISTERED) {
        status = DCP_EXISTS;
        if (err) {
            err->code = status;
        }
    }
    return status;
}

static dcp_status host_unregister(dcp_device_driver *d, int index, void *ptr, dcp_error *err)
{
    acl *a = (acl *)d;
    void *old;
    dcp_status status = enter(a, index, &old, err);
    return status == DCP_OK ? leave(a, old, a->fn.host_unregister(ptr), "aclrtHostUnregister", err) : status;
}

/* Older runtimes fail for memory that they do not know. */
static bool is_registered(dcp_device_driver *d, int index, const void *ptr)
{
    acl *a = (acl *)d;
    pointer_attributes attributes;
    void *old;
    if (!a->fn.pointer_attributes || enter(a, index, &old, NULL) != DCP_OK) {
        return false;
    }
    memset(&attributes, 0xff, sizeof attributes);
    int code = a->fn.pointer_attributes(ptr, &attributes);
    if (old) {
        a->fn.set_context(old);
    }
    return code == 0 && attributes.location.type == LOCATION_HOST;
}

/* The runtime is shared with the framework: it is neither finalised nor are devices reset. */
static void free_driver(dcp_device_driver *d)
{
    dcp__free(d->ctx, d);
}

static const dcp_device_ops acl_ops = {
    .struct_size = sizeof acl_ops,
    .abi_version = DCP_DEVICE_ABI,
    .type = DCP_DEVICE_NPU,
    .name = "acl",
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

/* ---- loading ---- */

static dcp_status open_library(const char *library, dcp__library *l, dcp_error *err)
{
    char in_toolkit[512];
    const char *home = getenv("ASCEND_HOME_PATH");
    const char *names[] = {"libascendcl.so", "libacl.so", in_toolkit};
    if (library) {
        return dcp__library_open(l, "AscendCL", &library, 1, err);
    }
    snprintf(in_toolkit, sizeof in_toolkit, "%s/lib64/libascendcl.so", home ? home : "/usr/local/Ascend/ascend-toolkit/latest");
    return dcp__library_open(l, "AscendCL", names, sizeof names / sizeof names[0], err);
}

/* A context tells that the framework has initialised the runtime already. */
static dcp_status initialise(acl *a, dcp_error *err)
{
    int32_t device;
    uint32_t n = 0;
    if (a->fn.get_device(&device) != 0) {
        int code = a->fn.init(NULL);
        if (code != 0 && code != ACL_REPEAT_INITIALIZE) {
            return fail(a, code, "aclInit", err);
        }
    }
    int code = a->fn.device_count(&n);
    a->n_devices = (int)n;
    return code == 0 ? DCP_OK : fail(a, code, "aclrtGetDeviceCount", err);
}

dcp_status dcp__acl_open(dcp_context *ctx, const char *library, dcp_device_driver **out, dcp_error *err)
{
    dcp__library l = {0};
    acl *a = dcp__calloc(ctx, 1, sizeof *a);
    if (!a) {
        return dcp__nomem(err);
    }
    a->base = (dcp_device_driver){&acl_ops, ctx};
    dcp_status status = open_library(library, &l, err);
    status =
        status == DCP_OK ? dcp__library_bind(&l, "AscendCL", symbols, sizeof symbols / sizeof symbols[0], &a->fn, err) : status;
    status = status == DCP_OK ? initialise(a, err) : status;
    if (status != DCP_OK) {
        dcp__free(ctx, a);
        return status;
    }
    *out = &a->base;
    return DCP_OK;
}

/* ---- the classic calls alone ---- */

typedef struct classic {
    int (*host_register)(void *, uint64_t, int, void **);
    int (*host_unregister)(void *);
} classic;

static dcp_status open_classic(classic *c, dcp_error *err)
{
    static const dcp__symbol both[] = {
        {"aclrtHostRegister", offsetof(classic, host_register), false},
        {"aclrtHostUnregister", offsetof(classic, host_unregister), false},
    };
    dcp__library l = {0};
    dcp_status status = open_library(NULL, &l, err);
    return status == DCP_OK ? dcp__library_bind(&l, "AscendCL", both, 2, c, err) : status;
}

dcp_status dcp_acl_host_register(void *ptr, uint64_t bytes, uint32_t flag, int *code, dcp_error *err)
{
    (void)flag;
    classic c;
    void *scratch;
    if (!ptr || !bytes || !code) {
        return dcp__fail(err, DCP_ARG, "register: no %s", !ptr ? "address" : !bytes ? "bytes" : "place for the code");
    }
    dcp_status status = open_classic(&c, err);
    if (status == DCP_OK) {
        *code = c.host_register(ptr, bytes, REGISTER_MAPPED, &scratch);
    }
    return status;
}

dcp_status dcp_acl_host_unregister(void *ptr, int *code, dcp_error *err)
{
    classic c;
    if (!ptr || !code) {
        return dcp__fail(err, DCP_ARG, "unregister: no %s", ptr ? "place for the code" : "address");
    }
    dcp_status status = open_classic(&c, err);
    if (status == DCP_OK) {
        *code = c.host_unregister(ptr);
    }
    return status;
}
