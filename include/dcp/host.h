/*
 * dcp/host.h - states in host memory: made, filled, compared, moved from devices, gathered from ranks.
 *
 *     dcp_host_opts opts = DCP_HOST_OPTS_INIT;
 *     dcp_host_state *copy;
 *     dcp_host_create(NULL, state, &opts, &copy, &err);               // once
 *     dcp_host_copy(NULL, state, dcp_host_value(copy), NULL, NULL, &err); // at each step: the same memory again
 *     dcp_save(NULL, "run/step-1000", dcp_host_value(copy), NULL, NULL, &err);
 *     dcp_host_free(copy);
 *
 * Saves need none of this: dcp_save takes tensors where they are, and dcp_save_async takes a snapshot itself. These are for
 * programs that hand states on, to another process or another library.
 *
 * All calls but dcp_host_gather are local. All block: when they return, copies from devices are done.
 *
 * Threads: a state is filled by one call at a time, and not read meanwhile.
 */
#ifndef DCP_HOST_H
#define DCP_HOST_H

#include "backend.h"
#include "device.h"
#include "state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_copy_rule {
    DCP_COPY_NEEDED = 0, /* tensors that lie in host memory stay where they are, and are borrowed */
    DCP_COPY_ALWAYS = 1  /* all tensors are copied: the result is a snapshot */
} dcp_copy_rule;

typedef struct dcp_host_opts {
    size_t struct_size;
    bool is_shared;        /* memory that another process can be given: see dcp_host_where */
    bool is_pinned;        /* memory that is registered with pin_device, released again with the state */
    dcp_device pin_device; /* with is_pinned */
    void *stream;          /* copies from a device wait for what is in this stream of its driver; NULL: its default */
    dcp_copy_rule copy;    /* of dcp_host_offload alone */
} dcp_host_opts;

#define DCP_HOST_OPTS_INIT DCP_INIT(dcp_host_opts)

/* A tree of values whose tensors lie in memory of its own. */
typedef struct dcp_host_state dcp_host_state;

/* Makes a state of the structure of `state`: each tensor and each chunk of a sharded one is a new row-major tensor in host
 * memory, of the same shape and dtype, whose elements are zero. Tensors without dimensions lie in ordinary memory, whatever opts
 * say, and those without elements have none. Containers and opaque values are copied, other leaves never change and are shared.
 * opts may be NULL. Errors: ARG, NOMEM, LIMIT (depth), UNSUPPORTED (is_pinned without the device's library), DEVICE (registering
 * failed). */
DCP_API dcp_status dcp_host_create(dcp_context *ctx, dcp_value *state, const dcp_host_opts *opts, dcp_host_state **out,
                                   dcp_error *err);
/* The same with the elements of `state`, which may lie on devices. comm, ranks and n_ranks choose who gets them: a rank that is
 * not in the list gets an empty dict; n_ranks 0: all do. comm NULL is rank 0; it is asked for its rank only. The state must live
 * as long as the result with DCP_COPY_NEEDED. Errors: also those of dcp_host_copy. */
DCP_API dcp_status dcp_host_offload(dcp_context *ctx, dcp_value *state, const dcp_comm *comm, const int *ranks, size_t n_ranks,
                                    const dcp_host_opts *opts, dcp_host_state **out, dcp_error *err);
/* The tree; borrowed. Its tensors' memory ends with the state, also where the tree is retained. NULL for NULL. */
DCP_API dcp_value *dcp_host_value(const dcp_host_state *host);
/* Unregisters, unmaps and frees. NULL is allowed. */
DCP_API void dcp_host_free(dcp_host_state *host);

/* Where elements of a state lie. */
typedef struct dcp_host_memory {
    size_t struct_size;
    bool is_shared, is_pinned;
    int fd;          /* of shared memory, to be handed to another process and mapped there; owned by the state; else -1 */
    uint64_t offset; /* of the first element, in that memory */
} dcp_host_memory;

#define DCP_HOST_MEMORY_INIT DCP_INIT(dcp_host_memory)

/* Errors: ARG, NOT_FOUND (not in a block of this state: a tensor without dimensions, or a borrowed one). */
DCP_API dcp_status dcp_host_where(const dcp_host_state *host, const dcp_tensor *tensor, dcp_host_memory *out, dcp_error *err);

typedef struct dcp_host_copy_opts {
    size_t struct_size;
    bool allow_cast;  /* elements of another dtype are converted, as PyTorch's `to` does; otherwise MISMATCH */
    bool check_types; /* sets, opaque values, finished records, dtypes and devices are refused with ARG */
    void *stream;     /* as in dcp_host_opts */
} dcp_host_copy_opts;

#define DCP_HOST_COPY_OPTS_INIT DCP_INIT(dcp_host_copy_opts)

/* Copies the elements of `from` into those of `to`, which lies in host memory, in place. Containers must be of the same kinds,
 * keys and lengths, tensors of the same shapes, sharded ones of the same chunks; all of this is checked before anything is
 * copied. *out, which may be NULL, is a new tree of the tensors of `to` and the other values of `from`. Tensors inside opaque
 * values are part of these. Where two tensors of `to` are the same memory, the one that is last in `from` counts; they must not
 * overlap otherwise. opts may be NULL. Errors: MISMATCH (with the place), ARG, NOMEM, LIMIT (depth), UNSUPPORTED, DEVICE.
 */
DCP_API dcp_status dcp_host_copy(dcp_context *ctx, dcp_value *from, dcp_value *to, const dcp_host_copy_opts *opts,
                                 dcp_value **out, dcp_error *err);

/* True if dcp_host_copy would find nothing to refuse, dtypes included: same structure, shapes and dtypes. */
DCP_API bool dcp_host_is_similar(const dcp_value *a, const dcp_value *b);

/* Collective. Gathers sharded tensors to whole ones in host memory on the ranks of the list, or on all with n_ranks 0; the others
 * get an empty dict. All ranks pass the same list, and states with the same sharded tensors in the same order, each with its own
 * chunks, of any sizes; several ranks may hold the same chunk. Other values are shared with `state`, and are not moved. One
 * tensor at a time is under way, so a rank needs memory for the result and for one tensor more. comm NULL is a lone rank. opts:
 * stream alone is used; may be NULL. Errors, on all ranks alike: PEER, with the failing ranks named; their causes are MISMATCH
 * (other sharded tensors than on rank 0, chunks that do not cover the tensor), ARG, NOMEM, LIMIT, and those of copies; those of
 * communicators. */
DCP_API dcp_status dcp_host_gather(dcp_context *ctx, dcp_value *state, dcp_comm *comm, const int *ranks, size_t n_ranks,
                                   const dcp_host_opts *opts, dcp_value **out, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
