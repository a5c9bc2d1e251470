/* Runs every row that concerns a device on whatever library there is, and prints a report: on real hardware by
 * scripts/device-check.sh, on the look-alikes by the tests.
 *
 *     device_check npu|cuda [MIB]
 *
 * Exits with 0 if all rows are well, 1 if not, 77 if there is no device. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "dcp/dcp.h"

static dcp_device_type type;
static dcp_device_driver *driver;
static int n_failed;

/* ---- device memory, by the vendor's own calls ---- */

/* Puts the address of a function into *out. */
static void find(const char *name, void *out)
{
    void *handle = dlopen(type == DCP_DEVICE_CUDA ? "libcuda.so.1" : "libascendcl.so", RTLD_NOW);
    void *address = handle ? dlsym(handle, name) : NULL;
    if (!address) {
        fprintf(stderr, "no function %s: %s\n", name, dlerror());
        exit(1);
    }
    memcpy(out, &address, sizeof address);
}

static void must(int code, const char *call)
{
    if (code != 0) {
        fprintf(stderr, "%s: %d\n", call, code);
        exit(1);
    }
}

/* On device 0, which is the thread's from here on, as it is in a program that trains. */
static void *device_alloc(size_t bytes)
{
    void *ptr = NULL;
    if (type == DCP_DEVICE_NPU) {
        int (*set_device)(int32_t), (*alloc)(void **, size_t, int);
        find("aclrtSetDevice", &set_device);
        find("aclrtMalloc", &alloc);
        must(set_device(0), "aclrtSetDevice");
        must(alloc(&ptr, bytes, 0), "aclrtMalloc");
        return ptr;
    }
    static void *context;
    unsigned long long address;
    int (*retain)(void **, int), (*push)(void *), (*alloc)(unsigned long long *, size_t);
    find("cuDevicePrimaryCtxRetain", &retain);
    find("cuCtxPushCurrent_v2", &push);
    find("cuMemAlloc_v2", &alloc);
    if (!context) {
        must(retain(&context, 0), "cuDevicePrimaryCtxRetain");
        must(push(context), "cuCtxPushCurrent");
    }
    must(alloc(&address, bytes), "cuMemAlloc");
    return (void *)(uintptr_t)address;
}

/* ---- the report ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void row(const char *what, bool is_well, const char *detail)
{
    printf("| %s | %s | %s |\n", what, is_well ? "well" : "WRONG", detail);
    n_failed += !is_well;
}

static void row_of(const char *what, dcp_status status, dcp_status expected, const dcp_error *err)
{
    char detail[DCP_ERROR_MESSAGE_BYTES + 64] = "";
    if (status != DCP_OK) {
        snprintf(detail, sizeof detail, "%s %lld: %s", dcp_status_name(status), (long long)err->native_code, err->message);
    }
    row(what, status == expected, detail);
}

static void row_rate(const char *what, size_t bytes, double seconds)
{
    printf("| %s | %.2f GB/s | %.3f s |\n", what, (double)bytes / seconds / 1e9, seconds);
}

/* ---- states ---- */

enum { N = 5 };
static const int64_t square[] = {256, 256}, turned[] = {1, 256}, column[] = {256, 5}, wide[] = {256, 1}, none[] = {0, 3};
static int64_t line[1];
static size_t bytes; /* of all tensors, which overlap */

static dcp_value *state_of(char *memory, dcp_device device)
{
    const struct {
        const char *name;
        dcp_dtype dtype;
        int ndim;
        const int64_t *extents, *strides;
    } all[N] = {{"line", DCP_UINT8, 1, line, NULL},
                {"square", DCP_FLOAT32, 2, square, NULL},
                {"turned", DCP_BFLOAT16, 2, square, turned},
                {"column", DCP_FLOAT32, 2, column, wide},
                {"none", DCP_INT64, 2, none, NULL}};
    dcp_value *state;
    dcp_error err = DCP_ERROR_INIT;
    must(dcp_dict_create(NULL, &state, &err), err.message);
    for (int i = 0; i < N; i++) {
        dcp_tensor t = dcp_tensor_make(all[i].dtype, all[i].ndim, all[i].extents, memory);
        t.strides = all[i].strides;
        t.device = device;
        must(dcp_dict_set_tensor(state, all[i].name, &t, &err), err.message);
    }
    return state;
}

static dcp_value *read_all(dcp_storage *st)
{
    dcp_checkpoint *ck;
    dcp_value *tree;
    dcp_error err = DCP_ERROR_INIT;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = st;
    opts.check_crc = true;
    must(dcp_checkpoint_open(NULL, "", &opts, &ck, &err), err.message);
    must(dcp_read_tree(ck, true, &tree, &err), err.message);
    dcp_checkpoint_close(ck);
    return tree;
}

static bool holds(dcp_storage *st, dcp_value *expected)
{
    dcp_value *tree = read_all(st);
    bool is_same = dcp_value_equal(tree, expected);
    dcp_value_free(tree);
    return is_same;
}

static dcp_storage *new_place(void)
{
    dcp_storage *st;
    must(dcp_storage_memory(NULL, &st, NULL), "dcp_storage_memory");
    return st;
}

/* ---- rows ---- */

static void check_saves(dcp_value *host, dcp_value *device)
{
    for (uint64_t ahead = 0; ahead <= DCP_COPY_AHEAD_BYTES; ahead += DCP_COPY_AHEAD_BYTES) {
        dcp_storage *st = new_place();
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        dcp_error err = DCP_ERROR_INIT;
        opts.storage = st;
        opts.copy_ahead_bytes = ahead;
        double start = now();
        dcp_status status = dcp_save(NULL, "", device, &opts, NULL, &err);
        double took = now() - start;
        row_of(ahead ? "save, copying ahead" : "save, one block after the other", status, DCP_OK, &err);
        if (status == DCP_OK) {
            row("- stored as from host memory", holds(st, host), "");
            row_rate("- rate, into memory", bytes, took);
        }
        dcp_storage_free(st);
    }
}

static void check_background_save(dcp_value *host, dcp_value *device, dcp_pin_policy pin)
{
    dcp_storage *st = new_place();
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    dcp_stager_info info = DCP_STAGER_INFO_INIT;
    dcp_error err = DCP_ERROR_INIT;
    so.is_shared = true;
    so.pin = pin;
    so.pin_device = (dcp_device){type, 0};
    opts.save.storage = st;
    opts.save.overwrite = true;
    const char *what = pin == DCP_PIN_NEVER ? "background save, ordinary shared memory" : "background save, pinned shared memory";
    dcp_status status = dcp_stager_create(NULL, &so, &opts.stager, &err);
    double stall = 0;
    for (int i = 0; i < 3 && status == DCP_OK; i++) {
        dcp_op *op;
        dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
        status = dcp_save_async(NULL, "", device, &opts, &op, &err);
        if (status == DCP_OK) {
            status = dcp_op_wait(op, 0, NULL, &err);
            dcp_op_get_progress(op, &progress, NULL);
            stall = progress.stall_seconds;
            dcp_op_free(op);
        }
    }
    row_of(what, status, DCP_OK, &err);
    if (status == DCP_OK) {
        char detail[160];
        row("- stored as from host memory", holds(st, host), "");
        row_rate("- what the caller waits for, third save", bytes, stall);
        dcp_stager_get_info(opts.stager, &info, NULL);
        snprintf(detail, sizeof detail, "%llu of %llu bytes registered, code %lld", (unsigned long long)info.pinned_bytes,
                 (unsigned long long)info.mapped_bytes, (long long)info.native_code);
        row("- registered as asked for", pin == DCP_PIN_NEVER || info.pinned_bytes == info.mapped_bytes, detail);
    }
    dcp_stager_free(opts.stager);
    dcp_storage_free(st);
}

/* Only what does not overlap: the whole memory as one tensor. */
static void check_load(dcp_value *host)
{
    static const char *const only[] = {"line"};
    dcp_storage *st = new_place(), *again = new_place();
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts so = DCP_SAVE_OPTS_INIT;
    dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
    so.storage = st;
    must(dcp_save(NULL, "", host, &so, NULL, &err), err.message);
    char *fresh = device_alloc(bytes);
    dcp_value *target = state_of(fresh, (dcp_device){type, 0});
    lo.open.storage = st;
    lo.include = only;
    lo.n_include = 1;
    double start = now();
    dcp_status status = dcp_load(NULL, "", target, &lo, NULL, &err);
    double took = now() - start;
    row_of("load to the device", status, DCP_OK, &err);
    if (status == DCP_OK) {
        so.storage = again;
        must(dcp_save(NULL, "", target, &so, NULL, &err), err.message);
        row("- what comes back is what was loaded", holds(again, host), "");
        row_rate("- rate, from memory", bytes, took);
    }
    dcp_value_free(target);
    dcp_storage_free(st);
    dcp_storage_free(again);
}

/* Moved to host memory that is registered, and again into the same memory. */
static void check_host_state(dcp_value *host, dcp_value *device)
{
    dcp_host_opts opts = DCP_HOST_OPTS_INIT;
    dcp_host_memory where = DCP_HOST_MEMORY_INIT;
    dcp_host_state *h;
    dcp_error err = DCP_ERROR_INIT;
    opts.is_shared = opts.is_pinned = true;
    opts.pin_device.type = type;
    dcp_status status = dcp_host_offload(NULL, device, NULL, NULL, 0, &opts, &h, &err);
    row_of("state to pinned shared memory", status, DCP_OK, &err);
    if (status != DCP_OK) {
        return;
    }
    row("- as in host memory", dcp_value_equal(dcp_host_value(h), host), "");
    status = dcp_host_where(h, dcp_value_tensor(dcp_dict_get_str(dcp_host_value(h), "line")), &where, &err);
    row("- shared and pinned", status == DCP_OK && where.is_shared && where.is_pinned, "");
    double start = now();
    status = dcp_host_copy(NULL, device, dcp_host_value(h), NULL, NULL, &err);
    double took = now() - start;
    row_of("- once more, into the same memory", status, DCP_OK, &err);
    row_rate("- rate", bytes, took);
    dcp_host_free(h);
}

typedef struct receiver {
    dcp_comm *comm;
    void *memory; /* of the device */
    dcp_status status;
    dcp_error err;
} receiver;

static void *broadcast_part(void *user)
{
    receiver *r = user;
    r->status = dcp_device_broadcast(NULL, r->comm, (dcp_device){type, 0}, r->memory, bytes, 0, NULL, &r->err);
    return NULL;
}

/* Two ranks on one device. */
static void check_broadcast(dcp_value *host, void *device_memory)
{
    receiver both[2] = {{.memory = device_memory, .err = DCP_ERROR_INIT}, {.memory = device_alloc(bytes), .err = DCP_ERROR_INIT}};
    dcp_comm *comms[2];
    pthread_t thread;
    dcp_host_state *h;
    dcp_error err = DCP_ERROR_INIT;
    must(dcp_comm_threads(NULL, 2, comms, &err), err.message);
    for (int r = 0; r < 2; r++) {
        both[r].comm = comms[r];
    }
    must(pthread_create(&thread, NULL, broadcast_part, &both[1]), "pthread_create");
    broadcast_part(&both[0]);
    pthread_join(thread, NULL);
    row_of("broadcast of device memory, sent", both[0].status, DCP_OK, &both[0].err);
    row_of("- received", both[1].status, DCP_OK, &both[1].err);
    if (both[1].status == DCP_OK) {
        dcp_value *received = state_of(both[1].memory, (dcp_device){type, 0});
        must(dcp_host_offload(NULL, received, NULL, NULL, 0, NULL, &h, &err), err.message);
        row("- what was sent", dcp_value_equal(dcp_host_value(h), host), "");
        dcp_host_free(h);
        dcp_value_free(received);
    }
    dcp_comm_free(comms[0]);
    dcp_comm_free(comms[1]);
}

static void check_registration(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = 16 * page;
    char *memory = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    dcp_registration first, second;
    dcp_error err = DCP_ERROR_INIT;
    row_of("register shared memory", dcp_pin(driver, 0, memory, n, 0, &first, &err), DCP_OK, &err);
    dcp_status status = dcp_pin(driver, 0, memory, n, 0, &second, &err);
    char detail[96];
    snprintf(detail, sizeof detail, "%s, code %lld, foreign %d", dcp_status_name(status), (long long)second.native_code,
             second.is_foreign);
    row("register it again: foreign, or refused",
        (status == DCP_OK && second.is_foreign) || status == DCP_EXISTS || status == DCP_DEVICE, detail);
    row_of("unregister it", dcp_unpin(driver, &first, &err), DCP_OK, &err);
    row_of("register it after that", dcp_pin(driver, 0, memory, n, 4 * page, &first, &err), DCP_OK, &err);
    row_of("unregister it, in pieces", dcp_unpin(driver, &first, &err), DCP_OK, &err);
    row_of("not of whole pages: refused without a call", dcp_pin(driver, 0, memory + 1, page, 0, &first, &err), DCP_ARG, &err);
    munmap(memory, n);
    if (type == DCP_DEVICE_NPU) {
        int code = -1;
        memory = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        row_of("classic call", dcp_acl_host_register(memory, n, 1, &code, &err), DCP_OK, &err);
        snprintf(detail, sizeof detail, "code %d", code);
        row("- taken by the runtime", code == 0, detail);
        dcp_acl_host_unregister(memory, &code, &err);
        snprintf(detail, sizeof detail, "code %d", code);
        row("- given back", code == 0, detail);
        munmap(memory, n);
    }
}

static void check_absent_device(int n)
{
    dcp_error err = DCP_ERROR_INIT;
    void *stream;
    row_of("a device that is not there is refused", driver->ops->stream_create(driver, n, &stream, &err), DCP_ARG, &err);
}

int main(int argc, char **argv)
{
    bool is_npu = argc > 1 && strcmp(argv[1], "npu") == 0, is_cuda = argc > 1 && strcmp(argv[1], "cuda") == 0;
    if (!is_npu && !is_cuda) {
        fprintf(stderr, "usage: device_check npu|cuda [MIB]\n");
        return 2;
    }
    type = is_npu ? DCP_DEVICE_NPU : DCP_DEVICE_CUDA;
    bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 256) << 20;
    line[0] = (int64_t)bytes;
    dcp_error err = DCP_ERROR_INIT;
    int n = 0;
    dcp_status status = dcp_device_open(NULL, type, NULL, &driver, &err);
    if (status != DCP_OK || driver->ops->count(driver, &n, &err) != DCP_OK || n == 0) {
        printf("no %s device: %s\n", argv[1], status != DCP_OK ? err.message : "none is there");
        return 77;
    }
    printf("libdcp %s, %s, %d devices, pages of %ld bytes, %zu MiB\n\n| row | result | detail |\n|---|---|---|\n", dcp_version(),
           argv[1], n, sysconf(_SC_PAGESIZE), bytes >> 20);
    char *memory = malloc(bytes), *device_memory = device_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) {
        memory[i] = (char)(i * 2654435761u >> 13);
    }
    void *stream;
    must(driver->ops->stream_create(driver, 0, &stream, &err), err.message);
    must(driver->ops->to_device(driver, 0, device_memory, memory, bytes, false, stream, &err), err.message);
    must(driver->ops->stream_sync(driver, 0, stream, &err), err.message);
    driver->ops->stream_destroy(driver, 0, stream);
    dcp_value *host = state_of(memory, (dcp_device){DCP_DEVICE_CPU, 0}), *device = state_of(device_memory, (dcp_device){type, 0});
    check_saves(host, device);
    check_background_save(host, device, DCP_PIN_NEVER);
    check_background_save(host, device, DCP_PIN_REQUIRED);
    check_load(host);
    check_host_state(host, device);
    check_broadcast(host, device_memory);
    check_registration();
    check_absent_device(n);
    printf("\n%d rows are wrong\n", n_failed);
    dcp_value_free(host);
    dcp_value_free(device);
    free(memory);
    dcp_device_close(driver);
    return n_failed ? 1 : 0;
}
