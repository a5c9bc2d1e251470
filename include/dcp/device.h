/*
 * dcp/device.h - accelerators: NVIDIA GPUs and Ascend NPUs.
 *
 * Saves and loads take tensors on devices as they take those in host memory; there is nothing to be opened for that:
 *
 *     dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, device_pointer);
 *     t.device = (dcp_device){DCP_DEVICE_NPU, 0};
 *     dcp_dict_set_tensor(state, "model.weight", &t, &err);
 *     opts.stream = stream;                              // whose work the copies wait for
 *     dcp_save(NULL, "run/step-1000", state, &opts, NULL, &err);
 *
 * The vendors' libraries (libcuda, libascendcl) are loaded when the first such tensor is met, by the dynamic linker's ordinary
 * rules. Where there is none, the call returns UNSUPPORTED with what the linker said.
 *
 * Below that are the tables that the copies go through, for authors of other back ends, and the registration of host memory.
 *
 * Threads: a driver may be used by any number of threads. No call changes the thread's current device, except that a thread which
 * has no current NPU has one afterwards: AscendCL has no way back.
 */
#ifndef DCP_DEVICE_H
#define DCP_DEVICE_H

#include "backend.h"
#include "base.h"
#include "state.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DCP_DEVICE_ABI 1

typedef struct dcp_device_ops dcp_device_ops;

/* A loaded back end. Implementations embed it first. */
typedef struct dcp_device_driver {
    const dcp_device_ops *ops;
    dcp_context *ctx;
} dcp_device_driver;

/* Streams and events are the vendor's own handles. `index` is the number of the device that they belong to. Errors of all:
 * DEVICE, with the vendor's number in native_code and its name, where it has one, in the message; ARG for an index that is not
 * there. */
struct dcp_device_ops {
    size_t struct_size;
    uint32_t abi_version; /* DCP_DEVICE_ABI */
    dcp_device_type type;
    const char *name; /* "cuda" */

    /* Number of devices. */
    dcp_status (*count)(dcp_device_driver *d, int *out, dcp_error *err);
    /* A stream that waits for no other. */
    dcp_status (*stream_create)(dcp_device_driver *d, int index, void **out, dcp_error *err);
    void (*stream_destroy)(dcp_device_driver *d, int index, void *stream);
    /* Returns when all that was put into the stream is done, with the first failure of it. */
    dcp_status (*stream_sync)(dcp_device_driver *d, int index, void *stream, dcp_error *err);
    /* What is put into the stream from now on waits for the event. */
    dcp_status (*stream_wait)(dcp_device_driver *d, int index, void *stream, void *event, dcp_error *err);
    dcp_status (*event_create)(dcp_device_driver *d, int index, void **out, dcp_error *err);
    void (*event_destroy)(dcp_device_driver *d, int index, void *event);
    /* The event happens when all that is in the stream now is done. stream NULL: the device's default stream. */
    dcp_status (*event_record)(dcp_device_driver *d, int index, void *event, void *stream, dcp_error *err);
    /* Returns when the event has happened; at once if it was never recorded. */
    dcp_status (*event_sync)(dcp_device_driver *d, int index, void *event, dcp_error *err);
    /* Put a copy of n > 0 bytes into a stream; it counts as done after stream_sync. is_pinned: the host memory is registered, so
     * that they return at once. With other memory they may return only when the copy is done, and must choose a way on which it
     * is right with memory that the system may move. */
    dcp_status (*to_host)(dcp_device_driver *d, int index, void *host, const void *device, size_t n, bool is_pinned, void *stream,
                          dcp_error *err);
    dcp_status (*to_device)(dcp_device_driver *d, int index, void *device, const void *host, size_t n, bool is_pinned,
                            void *stream, dcp_error *err);
    /* Locks whole pages of host memory and makes them known to the device. EXISTS: some of it is known already. */
    dcp_status (*host_register)(dcp_device_driver *d, int index, void *ptr, size_t bytes, dcp_error *err);
    /* ptr is what was registered. */
    dcp_status (*host_unregister)(dcp_device_driver *d, int index, void *ptr, dcp_error *err);
    /* Is the page at ptr known to the device? False where the driver cannot say. */
    bool (*is_registered)(dcp_device_driver *d, int index, const void *ptr);
    void (*free)(dcp_device_driver *d);
};

/* Loads the back end of a type of device. library is the file to load; NULL: a copy that the process has loaded already, else
 * what the dynamic linker finds, for Ascend also below $ASCEND_HOME_PATH. The library stays loaded for good. DCP_DEVICE_CPU
 * gives a table over plain memory. Errors: UNSUPPORTED (no library, or a function of it is missing; with the linker's message),
 * DEVICE (it cannot be initialised), ARG, NOMEM. Local. */
DCP_API dcp_status dcp_device_open(dcp_context *ctx, dcp_device_type type, const char *library, dcp_device_driver **out,
                                   dcp_error *err);
/* Frees the handle; NULL is allowed. */
DCP_API void dcp_device_close(dcp_device_driver *driver);

/* "cpu", "cuda", "npu"; "?" for values outside the list. */
DCP_API const char *dcp_device_type_name(dcp_device_type type);

/* Brings bytes of device memory of `root` into that of all other ranks; collective. Where the communicator has broadcasts between
 * devices they are used; else the bytes go through host memory, some MiB at a time. Waits for what is in `stream` (of the
 * device's driver; NULL: its default) and returns when all is there. Root and the number of bytes are the same on all ranks, the
 * devices need not be. Errors, on all ranks alike where the bytes go through host memory: PEER, with the failing ranks and their
 * causes (ARG, UNSUPPORTED, DEVICE, NOMEM); else those of the communicator. ctx may be NULL. */
DCP_API dcp_status dcp_device_broadcast(dcp_context *ctx, dcp_comm *comm, dcp_device device, void *device_ptr, uint64_t bytes,
                                        int root, void *stream, dcp_error *err);

/* ---- registered host memory ---- */

/* Host memory that a device knows. Filled by dcp_pin, ended by dcp_unpin, and not to be copied in between. */
typedef struct dcp_registration {
    void *ptr;
    size_t bytes;
    dcp_device device;
    bool is_registered;  /* the device knows it */
    bool is_foreign;     /* somebody else has registered it, and is to unregister it */
    int64_t native_code; /* of the last call, 0 if it succeeded */
    size_t piece_bytes;  /* it was registered in pieces of this size */
    int64_t process;     /* that registered it */
} dcp_registration;

#define DCP_MAX_REGISTER_BYTES ((size_t)64 << 30)

/* Registers host memory with a device, whole or not at all: ranges beyond max_bytes (0: 64 GiB; rounded down to pages) go in
 * pieces, since drivers have bounds. Zero bytes are no registration, and succeed. Memory that is registered already as a whole is
 * usable and stays its owner's: is_foreign. Errors: ARG (no address, or not of whole pages), EXISTS (a part of it is registered),
 * DEVICE; *out tells the code also after a failure. */
DCP_API dcp_status dcp_pin(dcp_device_driver *driver, int index, void *ptr, size_t bytes, size_t max_bytes, dcp_registration *out,
                           dcp_error *err);
/* Unregisters what dcp_pin has registered; before the memory is unmapped. Does nothing for foreign and empty ones, in a forked
 * child, and the second time. Errors: DEVICE: a part stays registered, and must stay mapped. */
DCP_API dcp_status dcp_unpin(dcp_device_driver *driver, dcp_registration *registration, dcp_error *err);

/* The classic calls of AscendCL, for callers that speak in its codes: each loads the library on first use, calls
 * aclrtHostRegister(ptr, bytes, MAPPED, &scratch) or aclrtHostUnregister(ptr), and puts the runtime's own result into *code; flag
 * is that of cudaHostRegister and has no counterpart. Returns OK if the call was made, whatever its result. Errors: UNSUPPORTED
 * (no library or symbol), ARG (ptr NULL, no bytes, no code). */
DCP_API dcp_status dcp_acl_host_register(void *ptr, uint64_t bytes, uint32_t flag, int *code, dcp_error *err);
DCP_API dcp_status dcp_acl_host_unregister(void *ptr, int *code, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
