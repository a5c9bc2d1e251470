/* Registering host memory: dcp_pin, pools, the classic calls, and loading the libraries, on look-alikes that enforce the rules.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/pages.h"
#include "dcp/dcp.h"
#include "device/host_pool.h"
#include "support/look_alike.h"

static look_alike both[2];
static size_t page;

static dcp_device_driver *open_driver(const look_alike *l)
{
    dcp_device_driver *d;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_device_open(NULL, l->type, l->library, &d, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return d;
}

static char *map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

/* ---- libraries ---- */

/* R8.24, R11.9: without the library the back end says so, with the linker's message. */
static void library__absent_ones_are_unsupported(void **unused)
{
    (void)unused;
    dcp_device_driver *d = NULL;
    for (int k = 0; k < 2; k++) {
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp_device_open(NULL, both[k].type, "libno-such-device.so", &d, &err), DCP_UNSUPPORTED);
        assert_non_null(strstr(err.message, "libno-such-device.so"));
    }
    assert_null(d);
    assert_int_equal(dcp_device_open(NULL, (dcp_device_type)9, NULL, &d, NULL), DCP_ARG);
    assert_int_equal(dcp_device_open(NULL, DCP_DEVICE_CUDA, NULL, NULL, NULL), DCP_ARG);
    dcp_device_close(NULL);
}

/* R8.25: a library that lacks a function is not taken for one, and the message names the function. */
static void library__missing_functions_are_named(void **unused)
{
    (void)unused;
    dcp_device_driver *d;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_device_open(NULL, DCP_DEVICE_NPU, DCP_LOOK_ALIKES "/acl_broken/libascendcl.so", &d, &err),
                     DCP_UNSUPPORTED);
    assert_non_null(strstr(err.message, "aclrtHostUnregister"));
}

/* R8.36: a runtime that somebody has initialised is used as it is, and left as it is. */
static void library__a_shared_runtime_is_left_alone(void **unused)
{
    (void)unused;
    for (int i = 0; i < 3; i++) {
        both[1].reset();
        if (i == 2) {
            look_alike_stream(&both[1], 0); /* this thread has a context now */
            both[1].reset();
        }
        dcp_device_close(open_driver(&both[1]));
        assert_int_equal(both[1].count("aclInit"), i == 2 ? 0 : 1); /* "repeated" is no failure */
        assert_int_equal(both[1].count("aclFinalize") + both[1].count("aclrtResetDevice"), 0);
    }
    both[0].fail_call("cuInit", 1, 999);
    dcp_device_driver *d;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_device_open(NULL, DCP_DEVICE_CUDA, NULL, &d, &err), DCP_DEVICE);
    assert_int_equal(err.native_code, 999);
    assert_non_null(strstr(err.message, "cuInit"));
    both[1].fail_call("aclrtGetDeviceCount", 1, 507000);
    assert_int_equal(dcp_device_open(NULL, DCP_DEVICE_NPU, NULL, &d, NULL), DCP_DEVICE);
}

static void library__the_host_has_a_table_too(void **unused)
{
    (void)unused;
    dcp_device_driver *d;
    dcp_registration r;
    int n;
    void *handle;
    char a[] = "from", b[sizeof a] = "";
    assert_int_equal(dcp_device_open(NULL, DCP_DEVICE_CPU, NULL, &d, NULL), DCP_OK);
    assert_int_equal(d->ops->count(d, &n, NULL), DCP_OK);
    assert_int_equal(n, 1);
    assert_int_equal(d->ops->stream_create(d, 0, &handle, NULL), DCP_OK);
    assert_int_equal(d->ops->to_device(d, 0, b, a, sizeof a, true, handle, NULL), DCP_OK);
    assert_int_equal(d->ops->stream_sync(d, 0, handle, NULL), DCP_OK);
    assert_string_equal(a, b);
    char *memory = map(page);
    assert_int_equal(dcp_pin(d, 0, memory, page, 0, &r, NULL), DCP_UNSUPPORTED);
    assert_false(r.is_registered);
    munmap(memory, page);
    dcp_device_close(d);
}

/* ---- dcp_pin ---- */

/* R8.28 to R8.33, reports 30, 32 and 117. */
static void pin__only_what_the_runtime_took_counts_as_registered(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        dcp_device_driver *d = open_driver(l);
        dcp_registration r;
        char *memory = map(4 * page);
        l->reset();
        assert_int_equal(dcp_pin(d, 0, memory, 0, 0, &r, NULL), DCP_OK);
        assert_false(r.is_registered);
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        assert_int_equal(dcp_pin(d, 0, NULL, page, 0, &r, NULL), DCP_ARG);
        assert_int_equal(dcp_pin(d, 0, memory + 1, page, 0, &r, NULL), DCP_ARG);
        assert_int_equal(dcp_pin(d, 0, memory, page + 1, 0, &r, NULL), DCP_ARG);
        assert_int_equal(dcp_pin(NULL, 0, memory, page, 0, &r, NULL), DCP_ARG);
        assert_int_equal(dcp_pin(d, 0, memory, page, 0, NULL, NULL), DCP_ARG);
        assert_int_equal(l->count(l->register_call), 0);
        assert_int_equal(dcp_pin(d, 7, memory, page, 0, &r, NULL), DCP_ARG); /* no such device */

        assert_int_equal(dcp_pin(d, 1, memory, 4 * page, 0, &r, NULL), DCP_OK);
        assert_true(r.is_registered && !r.is_foreign);
        assert_true(l->is_registered(memory, 4 * page));
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK); /* once is enough */
        assert_int_equal(l->count(l->unregister_call), 1);
        assert_int_equal(l->registrations(), 0);

        static const int codes[] = {107001, 507899, 304};
        for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
            dcp_error err = DCP_ERROR_INIT;
            char address[32], bytes[32];
            l->fail_call(l->register_call, 1, codes[i]);
            assert_int_equal(dcp_pin(d, 0, memory, 4 * page, 0, &r, &err), DCP_DEVICE);
            assert_int_equal(err.native_code, codes[i]);
            assert_int_equal(r.native_code, codes[i]);
            assert_false(r.is_registered);
            snprintf(address, sizeof address, "%p", (void *)memory);
            snprintf(bytes, sizeof bytes, "%zu bytes", 4 * page);
            assert_non_null(strstr(err.message, address));
            assert_non_null(strstr(err.message, bytes));
        }
        assert_int_equal(l->registrations(), 0);
        munmap(memory, 4 * page);
        dcp_device_close(d);
    }
}

/* R8.40, reports 30 and 31: what others have registered as a whole is usable and stays theirs; a part of it is an error. */
static void pin__foreign_registrations_stay_the_others(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        dcp_device_driver *d = open_driver(l);
        dcp_registration theirs, ours;
        char *memory = map(4 * page);
        l->reset();
        assert_int_equal(dcp_pin(d, 0, memory, 3 * page, 0, &theirs, NULL), DCP_OK);
        assert_int_equal(dcp_pin(d, 0, memory, 3 * page, 0, &ours, NULL), DCP_OK);
        assert_true(ours.is_registered && ours.is_foreign);
        assert_int_equal(ours.native_code, l->exists_code);
        assert_int_equal(dcp_unpin(d, &ours, NULL), DCP_OK);
        assert_int_equal(l->registrations(), 1);
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp_pin(d, 0, memory + page, 3 * page, 0, &ours, &err), DCP_EXISTS);
        assert_int_equal(err.native_code, l->exists_code);
        assert_false(ours.is_registered || ours.is_foreign);
        assert_int_equal(dcp_unpin(d, &theirs, NULL), DCP_OK);
        assert_int_equal(l->registrations(), 0);
        munmap(memory, 4 * page);
        dcp_device_close(d);
    }
}

/* R8.34, reports 33 and 118: large ranges go in pieces; when one fails, those before it are taken back. */
static void pin__large_ranges_go_in_pieces_or_not_at_all(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        dcp_device_driver *d = open_driver(l);
        dcp_registration r;
        char *memory = map(10 * page);
        l->reset();
        l->limit_registration(4 * page);
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp_pin(d, 0, memory, 10 * page, 0, &r, &err), DCP_DEVICE);
        assert_int_equal(dcp_pin(d, 0, memory, 10 * page, 4 * page + 5, &r, NULL), DCP_OK);
        assert_int_equal(l->registrations(), 3);
        assert_true(l->is_registered(memory, 10 * page));
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        assert_int_equal(l->registrations(), 0);
        l->fail_call(l->register_call, 3, 507899);
        assert_int_equal(dcp_pin(d, 0, memory, 10 * page, 4 * page, &r, &err), DCP_DEVICE);
        assert_int_equal(err.native_code, 507899);
        assert_int_equal(l->registrations(), 0);
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        munmap(memory, 10 * page);
        dcp_device_close(d);
    }
}

/* R8.35: per device, in any thread. */
static void pin__each_device_has_its_own(void **unused)
{
    (void)unused;
    const look_alike *l = &both[1];
    dcp_device_driver *d = open_driver(l);
    dcp_registration r[2];
    char *memory = map(page);
    l->reset();
    assert_int_equal(dcp_pin(d, 0, memory, page, 0, &r[0], NULL), DCP_OK);
    assert_int_equal(dcp_pin(d, 1, memory, page, 0, &r[1], NULL), DCP_OK);
    assert_int_equal(l->registrations(), 2);
    assert_int_equal(dcp_unpin(d, &r[0], NULL), DCP_OK);
    assert_int_equal(dcp_unpin(d, &r[1], NULL), DCP_OK);
    assert_int_equal(l->registrations(), 0);
    munmap(memory, page);
    dcp_device_close(d);
}

/* R8.39: memory of the parent is no business of a child's. */
static void pin__a_forked_child_unregisters_nothing(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        dcp_device_driver *d = open_driver(l);
        dcp_registration r;
        char *memory = map(page);
        int status;
        l->reset();
        assert_int_equal(dcp_pin(d, 0, memory, page, 0, &r, NULL), DCP_OK);
        pid_t child = fork();
        if (child == 0) {
            _exit(dcp_unpin(d, &r, NULL) == DCP_OK && l->count(l->unregister_call) == 0 ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        assert_int_equal(l->registrations(), 0);
        munmap(memory, page);
        dcp_device_close(d);
    }
}

typedef struct pinner {
    dcp_device_driver *driver;
    int index;
    bool is_well;
} pinner;

static void *pin_many(void *arg)
{
    pinner *p = arg;
    p->is_well = true;
    for (int i = 0; i < 50; i++) {
        dcp_registration r;
        void *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        p->is_well &= dcp_pin(p->driver, p->index, memory, 2 * page, page, &r, NULL) == DCP_OK && !r.is_foreign;
        p->is_well &= dcp_unpin(p->driver, &r, NULL) == DCP_OK;
        munmap(memory, 2 * page);
    }
    return NULL;
}

/* R8.42 */
static void pin__several_threads_may_do_so(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        dcp_device_driver *d = open_driver(&both[k]);
        pthread_t threads[4];
        pinner pinners[4];
        for (int i = 0; i < 4; i++) {
            pinners[i] = (pinner){d, i % 2, false};
            assert_int_equal(pthread_create(&threads[i], NULL, pin_many, &pinners[i]), 0);
        }
        for (int i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
            assert_true(pinners[i].is_well);
        }
        assert_int_equal(both[k].registrations(), 0);
        dcp_device_close(d);
    }
}

/* ---- forms of AscendCL's registration ---- */

/* R8.27: mapped and pinned, then mapped, then the classic call; never pinned alone. */
static void acl__the_best_form_that_works_is_taken(void **unused)
{
    (void)unused;
    const look_alike *l = &both[1];
    dcp_device_driver *d = open_driver(l);
    dcp_registration r;
    char *memory = map(page);
    for (int refused = 0; refused < 3; refused++) {
        l->reset();
        for (int i = 0; i < refused; i++) { /* each form in turn is one that the runtime does not know */
            l->fail_call("aclrtHostRegisterV2", 1, 207000);
        }
        if (refused == 2) {
            l->fail_call("aclrtHostRegisterV2", 1, 107000);
        }
        assert_int_equal(dcp_pin(d, 0, memory, page, 0, &r, NULL), DCP_OK);
        assert_int_equal(l->count("aclrtHostRegisterV2"), refused ? 2 : 1);
        assert_int_equal(l->count("mapped and pinned"), refused ? 0 : 1);
        assert_int_equal(l->count("mapped"), refused ? 1 : 0);
        assert_int_equal(l->count("pinned alone: nothing is registered"), 0);
        assert_int_equal(l->registrations(), 1);
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
    }
    munmap(memory, page);
    dcp_device_close(d);
}

/* CANN 8.1 has only the classic call, and no codes of its own for what is registered already. */
static void acl__an_older_runtime_works_with_what_it_has(void **unused)
{
    (void)unused;
    look_alike old = look_alike_open(DCP_DEVICE_NPU, DCP_LOOK_ALIKES "/acl_8_1/libascendcl.so");
    dcp_device_driver *d = open_driver(&old);
    dcp_registration r, again;
    char *memory = map(2 * page);
    dcp_error err = DCP_ERROR_INIT;
    old.be_old(true);
    assert_int_equal(dcp_pin(d, 0, memory, 2 * page, 0, &r, NULL), DCP_OK);
    assert_int_equal(old.count("aclrtHostRegister"), 1);
    assert_int_equal(dcp_pin(d, 0, memory, 2 * page, 0, &again, &err), DCP_DEVICE);
    assert_int_equal(err.native_code, 507899);
    assert_false(again.is_registered);
    assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
    assert_int_equal(old.registrations(), 0);
    munmap(memory, 2 * page);
    dcp_device_close(d);
}

/* Report 119: with memory that cannot be registered an old driver would destroy what is copied asynchronously. */
static void acl__memory_that_is_not_registered_is_copied_on_the_safe_path(void **unused)
{
    (void)unused;
    const look_alike *l = &both[1];
    dcp_device_driver *d = open_driver(l);
    void *stream;
    char *device = l->alloc(0, page), host[64] = "", back[64] = "through the device";
    l->reset();
    l->be_old(true);
    assert_int_equal(d->ops->stream_create(d, 0, &stream, NULL), DCP_OK);
    assert_int_equal(d->ops->to_device(d, 0, device, back, sizeof back, false, stream, NULL), DCP_OK);
    l->kernel(stream, device, 1, 'T', 30); /* what is in the stream comes first */
    assert_int_equal(d->ops->to_host(d, 0, host, device, sizeof host, false, stream, NULL), DCP_OK);
    assert_int_equal(d->ops->stream_sync(d, 0, stream, NULL), DCP_OK);
    assert_string_equal(host, "Through the device");
    assert_int_equal(l->count("memory destroyed"), 0);
    d->ops->stream_destroy(d, 0, stream);
    l->free(device);
    dcp_device_close(d);
}

/* R8.26, R8.28, R8.32: the classic calls pass on what the runtime says, whatever the flag. */
static void classic__codes_are_passed_on(void **unused)
{
    (void)unused;
    const look_alike *l = &both[1];
    static const int codes[] = {107000, 207000, 507899};
    char *memory = map(2 * page);
    int code = 5;
    look_alike_stream(l, 0);
    l->reset();
    for (uint32_t flag = 0; flag < 3; flag++) {
        assert_int_equal(dcp_acl_host_register(memory, 2 * page, flag, &code, NULL), DCP_OK);
        assert_int_equal(code, 0);
        assert_int_equal(l->registrations(), 1);
        assert_int_equal(dcp_acl_host_register(memory, page, flag, &code, NULL), DCP_OK);
        assert_int_equal(code, 507910);
        assert_int_equal(dcp_acl_host_unregister(memory + page, &code, NULL), DCP_OK);
        assert_int_equal(code, 507911);
        assert_int_equal(dcp_acl_host_unregister(memory, &code, NULL), DCP_OK);
        assert_int_equal(code, 0);
        l->fail_call("aclrtHostRegister", 1, codes[flag]);
        assert_int_equal(dcp_acl_host_register(memory, page, flag, &code, NULL), DCP_OK);
        assert_int_equal(code, codes[flag]);
    }
    assert_int_equal(dcp_acl_host_register(memory + 1, page, 0, &code, NULL), DCP_OK);
    assert_int_equal(code, 507899);
    int calls = l->count("aclrtHostRegister");
    assert_int_equal(l->count("aclrtHostRegisterV2"), 0);
    assert_int_equal(dcp_acl_host_register(NULL, page, 0, &code, NULL), DCP_ARG);
    assert_int_equal(dcp_acl_host_register(memory, 0, 0, &code, NULL), DCP_ARG);
    assert_int_equal(dcp_acl_host_register(memory, page, 0, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_acl_host_unregister(NULL, &code, NULL), DCP_ARG);
    assert_int_equal(l->count("aclrtHostRegister"), calls);
    assert_int_equal(l->registrations(), 0);
    munmap(memory, 2 * page);
}

/* ---- pools ---- */

typedef struct warnings {
    int n;
    char last[DCP_ERROR_MESSAGE_BYTES];
} warnings;

static void keep_line(void *user, dcp_log_level level, const char *line)
{
    warnings *w = user;
    if (level == DCP_LOG_WARNING) {
        w->n++;
        snprintf(w->last, sizeof w->last, "%s", line);
    }
}

static dcp_context *logging_context(warnings *w)
{
    dcp_context *ctx;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    *w = (warnings){0};
    opts.log = keep_line;
    opts.log_user = w;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    return ctx;
}

/* Report 39: never more than the cap; what is free is used again, or unmapped where a larger block is wanted. */
static void pool__keeps_to_its_cap(void **unused)
{
    (void)unused;
    warnings w;
    dcp_context *ctx = logging_context(&w);
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        dcp__host_pool *p;
        dcp__host_block *a, *b, *c;
        dcp__host_pool_opts opts = {.cap_bytes = 10 * page, .is_shared = is_shared};
        assert_int_equal(dcp__host_pool_create(ctx, &opts, &p, NULL), DCP_OK);
        assert_int_equal(dcp__host_pool_acquire(p, 0, false, &a, NULL), DCP_ARG);
        assert_int_equal(dcp__host_pool_acquire(p, 11 * page, true, &a, NULL), DCP_LIMIT);
        assert_int_equal(dcp__host_pool_acquire(p, SIZE_MAX, true, &a, NULL), DCP_LIMIT);
        assert_int_equal(dcp__host_pool_acquire(p, 6 * page - 5, false, &a, NULL), DCP_OK);
        assert_int_equal(a->bytes, 6 * page);
        assert_int_equal((uintptr_t)a->ptr % page, 0);
        assert_int_equal(a->fd >= 0, is_shared);
        assert_int_equal(dcp__host_pool_acquire(p, 5 * page, false, &b, NULL), DCP_LIMIT);
        assert_int_equal(dcp__host_pool_acquire(p, 4 * page, false, &b, NULL), DCP_OK);
        assert_int_equal(dcp__host_pool_room(p), 0);
        memset(a->ptr, 1, a->bytes);
        memset(b->ptr, 2, b->bytes);
        dcp__host_pool_release(p, a);
        assert_int_equal(dcp__host_pool_acquire(p, page, false, &c, NULL), DCP_OK); /* the one that there is */
        assert_ptr_equal(c, a);
        dcp__host_pool_release(p, c);
        dcp__host_pool_release(p, b);
        assert_int_equal(dcp__host_pool_acquire(p, page, false, &c, NULL), DCP_OK); /* the smaller one */
        assert_ptr_equal(c, b);
        dcp__host_pool_release(p, c);
        assert_int_equal(dcp__host_pool_acquire(p, 9 * page, false, &c, NULL), DCP_OK); /* both are given up for it */
        dcp__host_pool_stats s = dcp__host_pool_get_stats(p);
        assert_int_equal(s.mapped_bytes, 9 * page);
        assert_int_equal(s.peak_bytes, 10 * page);
        assert_int_equal(s.n_blocks, 1);
        dcp__host_pool_release(p, c);
        dcp__host_pool_trim(p, 0);
        assert_int_equal(dcp__host_pool_get_stats(p).mapped_bytes, 0);
        dcp__host_pool_free(p);
    }
    assert_int_equal(w.n, 0);
    dcp_context_free(ctx);
}

typedef struct giver {
    dcp__host_pool *pool;
    dcp__host_block *block;
} giver;

static void *give_back(void *arg)
{
    giver *g = arg;
    usleep(20000);
    dcp__host_pool_release(g->pool, g->block);
    return NULL;
}

static void pool__waits_for_a_block_if_it_is_to(void **unused)
{
    (void)unused;
    warnings w;
    dcp_context *ctx = logging_context(&w);
    dcp__host_pool *p;
    dcp__host_block *second;
    dcp__host_pool_opts opts = {.cap_bytes = 4 * page};
    pthread_t thread;
    giver g;
    assert_int_equal(dcp__host_pool_create(ctx, &opts, &p, NULL), DCP_OK);
    g.pool = p;
    assert_int_equal(dcp__host_pool_acquire(p, 3 * page, false, &g.block, NULL), DCP_OK);
    assert_int_equal(pthread_create(&thread, NULL, give_back, &g), 0);
    assert_int_equal(dcp__host_pool_acquire(p, 2 * page, true, &second, NULL), DCP_OK);
    pthread_join(thread, NULL);
    dcp__host_pool_release(p, second);
    dcp__host_pool_free(p);
    dcp_context_free(ctx);
}

/* R8.37, R8.41, report 116: preferred goes on with one warning that carries the code, required does not. */
static void pool__pins_as_its_policy_says(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        warnings w;
        dcp_context *ctx = logging_context(&w);
        dcp_device_driver *d = open_driver(l);
        dcp__host_pool *p;
        dcp__host_block *a, *b;
        dcp__host_pool_opts opts = {.pin = DCP__PIN_PREFERRED, .driver = d, .max_register_bytes = 2 * page};
        l->reset();
        assert_int_equal(dcp__host_pool_create(ctx, &opts, &p, NULL), DCP_OK);
        assert_int_equal(dcp__host_pool_acquire(p, 5 * page, false, &a, NULL), DCP_OK);
        assert_true(a->is_pinned);
        assert_int_equal(l->registrations(), 3);
        l->limit_registration(page);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(dcp__host_pool_acquire(p, 6 * page, false, &b, NULL), DCP_OK);
            assert_false(b->is_pinned);
        }
        int code = k ? 207001 : 2;
        char text[16];
        snprintf(text, sizeof text, "code %d", code);
        assert_int_equal(w.n, 1);
        assert_non_null(strstr(w.last, text));
        dcp__host_pool_stats s = dcp__host_pool_get_stats(p);
        assert_int_equal(s.native_code, code);
        assert_int_equal(s.pinned_bytes, 5 * page);
        assert_int_equal(s.n_registered, 1);
        dcp__host_pool_release(p, a);
        dcp__host_pool_free(p); /* with blocks in use, as after a failure */
        assert_int_equal(l->registrations(), 0);
        opts.pin = DCP__PIN_REQUIRED;
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp__host_pool_create(ctx, &opts, &p, NULL), DCP_OK);
        assert_int_equal(dcp__host_pool_acquire(p, 5 * page, false, &a, &err), DCP_DEVICE);
        assert_int_equal(err.native_code, code);
        assert_int_equal(dcp__host_pool_get_stats(p).mapped_bytes, 0);
        dcp__host_pool_free(p);
        assert_int_equal(l->registrations(), 0);
        assert_int_equal(l->count("unmapped before it was unregistered"), 0);
        dcp_device_close(d);
        dcp_context_free(ctx);
    }
}

/* R8.38: what the device keeps stays mapped, and one line tells. */
static void pool__a_failing_unregister_keeps_the_memory(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        warnings w;
        dcp_context *ctx = logging_context(&w);
        dcp_device_driver *d = open_driver(l);
        dcp__host_pool *p;
        dcp__host_block *a;
        dcp__host_pool_opts opts = {.pin = DCP__PIN_REQUIRED, .driver = d};
        unsigned char resident;
        l->reset();
        assert_int_equal(dcp__host_pool_create(ctx, &opts, &p, NULL), DCP_OK);
        assert_int_equal(dcp__host_pool_acquire(p, page, false, &a, NULL), DCP_OK);
        char *memory = a->ptr;
        dcp__host_pool_release(p, a);
        l->fail_call(l->unregister_call, 1, 507899);
        dcp__host_pool_trim(p, 0);
        assert_int_equal(dcp__host_pool_get_stats(p).n_failed_unregister, 1);
        assert_int_equal(w.n, 1);
        assert_int_equal(mincore(memory, page, &resident), 0);
        dcp__host_pool_free(p);
        assert_int_equal(l->registrations(), 1); /* as the runtime sees it */
        dcp_registration r = {.ptr = memory, .bytes = page, .is_registered = true, .piece_bytes = page, .process = getpid()};
        assert_int_equal(dcp_unpin(d, &r, NULL), DCP_OK);
        munmap(memory, page);
        dcp_device_close(d);
        dcp_context_free(ctx);
    }
}

/* A stager whose device refuses to register memory saves all the same, and says once that it went without. */
static void stager__without_registration_goes_on_with_one_warning(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        warnings w;
        dcp_context *ctx = logging_context(&w);
        dcp_value *state, *v;
        int64_t extents[] = {1 << 20};
        dcp_dict_create(NULL, &state, NULL);
        dcp_tensor_alloc(NULL, DCP_UINT8, 1, extents, &v, NULL);
        memset(dcp_value_tensor(v)->data, 3, 1 << 20);
        dcp_dict_set(state, dcp_key_str("x"), v, NULL);
        l->reset();
        l->limit_registration(1);
        for (int required = 0; required < 2; required++) {
            dcp_storage *st;
            dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
            dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
            dcp_op *op;
            assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
            so.pin = required ? DCP_PIN_REQUIRED : DCP_PIN_PREFERRED;
            so.pin_device = (dcp_device){l->type, 0};
            opts.save.storage = st;
            opts.save.overwrite = true;
            assert_int_equal(dcp_stager_create(ctx, &so, &opts.stager, NULL), DCP_OK);
            for (int i = 0; i < 3; i++) {
                assert_int_equal(dcp_save_async(ctx, "", state, &opts, &op, NULL), DCP_OK);
                assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), required ? DCP_DEVICE : DCP_OK);
                dcp_op_free(op);
            }
            dcp_stager_info info = DCP_STAGER_INFO_INIT;
            dcp_stager_get_info(opts.stager, &info, NULL);
            assert_int_equal(info.pinned_bytes, 0);
            assert_int_equal(info.native_code != 0, !required);
            dcp_stager_free(opts.stager);
            dcp_storage_free(st);
        }
        assert_int_equal(w.n, 1);
        dcp_value_free(state);
        dcp_context_free(ctx);
    }
}

static int open_both(void **unused)
{
    (void)unused;
    page = dcp__page_bytes();
    both[0] = look_alike_open(DCP_DEVICE_CUDA, "libcuda.so.1");
    both[1] = look_alike_open(DCP_DEVICE_NPU, "libascendcl.so");
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(library__absent_ones_are_unsupported),
        cmocka_unit_test(library__missing_functions_are_named),
        cmocka_unit_test(library__a_shared_runtime_is_left_alone),
        cmocka_unit_test(library__the_host_has_a_table_too),
        cmocka_unit_test(pin__only_what_the_runtime_took_counts_as_registered),
        cmocka_unit_test(pin__foreign_registrations_stay_the_others),
        cmocka_unit_test(pin__large_ranges_go_in_pieces_or_not_at_all),
        cmocka_unit_test(pin__each_device_has_its_own),
        cmocka_unit_test(pin__a_forked_child_unregisters_nothing),
        cmocka_unit_test(pin__several_threads_may_do_so),
        cmocka_unit_test(acl__the_best_form_that_works_is_taken),
        cmocka_unit_test(acl__an_older_runtime_works_with_what_it_has),
        cmocka_unit_test(acl__memory_that_is_not_registered_is_copied_on_the_safe_path),
        cmocka_unit_test(classic__codes_are_passed_on),
        cmocka_unit_test(pool__keeps_to_its_cap),
        cmocka_unit_test(pool__waits_for_a_block_if_it_is_to),
        cmocka_unit_test(pool__pins_as_its_policy_says),
        cmocka_unit_test(pool__a_failing_unregister_keeps_the_memory),
        cmocka_unit_test(stager__without_registration_goes_on_with_one_warning),
    };
    return cmocka_run_group_tests(tests, open_both, NULL);
}
