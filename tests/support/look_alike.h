/* The tests' side of a look-alike of a vendor's library: its controls, and the few calls that a program on a device makes. */
#ifndef TESTS_SUPPORT_LOOK_ALIKE_H
#define TESTS_SUPPORT_LOOK_ALIKE_H

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"

typedef struct look_alike {
    dcp_device_type type;
    const char *library; /* by which the product finds it */
    /* Names of the vendor's calls, for counts and failures. */
    const char *register_call, *unregister_call, *to_host_call, *to_device_call, *stream_call, *event_call;
    int exists_code;
    void (*reset)(void);
    int (*count)(const char *call);
    void (*fail_call)(const char *call, int n, int code);
    void (*fail_work)(int n, int code);
    void (*delay_us)(int us);
    int (*registrations)(void);
    bool (*is_registered)(const void *ptr, size_t bytes);
    void (*limit_registration)(size_t bytes);
    void (*be_old)(bool is_old);
    void *(*peek)(const void *device_ptr);
    void (*kernel)(void *stream, void *device_ptr, size_t n, int value, int ms);
    void *(*alloc)(int device, size_t n);
    void (*free)(void *device_ptr);
    int (*await)(void *stream); /* all that is in it is done */
    void *handle;
} look_alike;

static inline void look_alike_find(const look_alike *l, const char *name, void *out)
{
    void *address = dlsym(l->handle, name);
    if (!address) {
        fail_msg("%s has no %s", l->library, name);
    }
    memcpy(out, &address, sizeof address);
}

/* library: as the linker is to find it. */
static inline look_alike look_alike_open(dcp_device_type type, const char *library)
{
    bool is_cuda = type == DCP_DEVICE_CUDA;
    look_alike l = {.type = type,
                    .library = library,
                    .register_call = is_cuda ? "cuMemHostRegister" : "aclrtHostRegisterV2",
                    .unregister_call = is_cuda ? "cuMemHostUnregister" : "aclrtHostUnregister",
                    .to_host_call = is_cuda ? "cuMemcpyDtoHAsync" : "aclrtMemcpyAsync",
                    .to_device_call = is_cuda ? "cuMemcpyHtoDAsync" : "aclrtMemcpyAsync",
                    .stream_call = is_cuda ? "cuStreamCreate" : "aclrtCreateStream",
                    .event_call = is_cuda ? "cuEventCreate" : "aclrtCreateEventExWithFlag",
                    .exists_code = is_cuda ? 712 : 507910};
    l.handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!l.handle) {
        fail_msg("%s", dlerror());
    }
    look_alike_find(&l, "fake_reset", &l.reset);
    look_alike_find(&l, "fake_count", &l.count);
    look_alike_find(&l, "fake_fail", &l.fail_call);
    look_alike_find(&l, "fake_fail_work", &l.fail_work);
    look_alike_find(&l, "fake_delay_us", &l.delay_us);
    look_alike_find(&l, "fake_registrations", &l.registrations);
    look_alike_find(&l, "fake_is_registered", &l.is_registered);
    look_alike_find(&l, "fake_limit_registration", &l.limit_registration);
    look_alike_find(&l, "fake_be_old", &l.be_old);
    look_alike_find(&l, "fake_peek", &l.peek);
    look_alike_find(&l, "fake_kernel", &l.kernel);
    look_alike_find(&l, "fake_alloc", &l.alloc);
    look_alike_find(&l, "fake_free", &l.free);
    look_alike_find(&l, "fake_await", &l.await);
    l.reset();
    return l;
}

/* What a framework does first: initialises the runtime, makes a device the thread's, and makes a stream. */
static inline void *look_alike_stream(const look_alike *l, int device)
{
    void *stream, *context;
    if (l->type == DCP_DEVICE_NPU) {
        int (*init)(const char *), (*set_device)(int32_t), (*create)(void **);
        look_alike_find(l, "aclInit", &init);
        look_alike_find(l, "aclrtSetDevice", &set_device);
        look_alike_find(l, "aclrtCreateStream", &create);
        init(NULL);
        assert_int_equal(set_device(device), 0);
        assert_int_equal(create(&stream), 0);
        return stream;
    }
    int (*init)(unsigned), (*retain)(void **, int), (*push)(void *), (*create)(void **, unsigned), (*pop)(void **);
    look_alike_find(l, "cuInit", &init);
    look_alike_find(l, "cuDevicePrimaryCtxRetain", &retain);
    look_alike_find(l, "cuCtxPushCurrent_v2", &push);
    look_alike_find(l, "cuCtxPopCurrent_v2", &pop);
    look_alike_find(l, "cuStreamCreate", &create);
    assert_int_equal(init(0), 0);
    assert_int_equal(retain(&context, device), 0);
    assert_int_equal(push(context), 0);
    assert_int_equal(create(&stream, 0), 0);
    assert_int_equal(pop(&context), 0);
    return stream;
}

#endif
