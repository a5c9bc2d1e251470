#include "comm/comm.h"

#include "base/checked.h"

enum { IN_USE = 1, BROKEN = 2 };

static void free_reserve(dcp_context *ctx, dcp__comm_reserve *r)
{
    if (r) {
        dcp__free(ctx, r->words);
        dcp__free(ctx, r->send);
        dcp__free(ctx, r->recv);
        dcp__free(ctx, r->sizes);
        dcp__free(ctx, r);
    }
}

static dcp__comm_reserve *make_reserve(dcp_context *ctx, size_t size)
{
    dcp__comm_reserve *r = dcp__calloc(ctx, 1, sizeof *r);
    if (!r) {
        return NULL;
    }
    r->words = dcp__calloc(ctx, size, sizeof *r->words);
    r->send = dcp__calloc(ctx, size, sizeof *r->send);
    r->recv = dcp__calloc(ctx, size, sizeof *r->recv);
    r->sizes = dcp__calloc(ctx, size, 2 * sizeof *r->sizes);
    if (!r->words || !r->send || !r->recv || !r->sizes) {
        free_reserve(ctx, r);
        return NULL;
    }
    return r;
}

dcp_status dcp_comm_init(dcp_comm *comm, dcp_context *ctx, const dcp_comm_ops *ops, int rank, int size, unsigned caps,
                         dcp_error *err)
{
    if (!comm || !ops || ops->abi_version != DCP_COMM_ABI || ops->struct_size < sizeof *ops) {
        return dcp__fail(err, DCP_ARG, "communicator: no table of version %d", DCP_COMM_ABI);
    }
    if (rank < 0 || rank >= size) {
        return dcp__fail(err, DCP_ARG, "communicator: rank %d of %d", rank, size);
    }
    ctx = dcp__context(ctx);
    dcp__comm_reserve *reserve = make_reserve(ctx, (size_t)size);
    if (!reserve) {
        return dcp__nomem(err);
    }
    *comm = (dcp_comm){
        .ops = ops,
        .ctx = ctx,
        .rank = rank,
        .size = size,
        .caps = caps,
        .timeout_ms = DCP_COMM_TIMEOUT_MS,
        .reserve = reserve,
    };
    return DCP_OK;
}

void dcp_comm_reset(dcp_comm *comm)
{
    if (comm) {
        free_reserve(comm->ctx, comm->reserve);
        comm->reserve = NULL;
    }
}

void dcp_comm_free(dcp_comm *comm)
{
    if (comm) {
        comm->ops->free(comm);
    }
}

int dcp_comm_rank(const dcp_comm *comm)
{
    return comm->rank;
}

int dcp_comm_size(const dcp_comm *comm)
{
    return comm->size;
}

void dcp_comm_set_timeout(dcp_comm *comm, uint32_t timeout_ms)
{
    comm->timeout_ms = timeout_ms ? timeout_ms : DCP_COMM_TIMEOUT_MS;
}

bool dcp_comm_is_broken(const dcp_comm *comm)
{
    return (__atomic_load_n(&comm->state, __ATOMIC_ACQUIRE) & BROKEN) != 0;
}

dcp_status dcp__comm_enter(dcp_comm *comm, dcp_error *err)
{
    uint32_t seen = 0;
    if (__atomic_compare_exchange_n(&comm->state, &seen, IN_USE, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
        return DCP_OK;
    }
    if (seen & BROKEN) {
        const dcp__comm_reserve *r = comm->reserve;
        return dcp__fail(err, DCP_STATE, "communicator broken by an earlier failure (%s: %s)", dcp_status_name(r->broken_by.code),
                         r->broken_by.message);
    }
    return dcp__fail(err, DCP_STATE, "communicator in use by another thread");
}

dcp_status dcp__comm_leave(dcp_comm *comm, dcp_status status, const dcp_error *err)
{
    if (status != DCP_OK) {
        dcp__comm_reserve *r = comm->reserve;
        r->broken_by = *err;
        r->broken_by.code = status;
    }
    __atomic_store_n(&comm->state, status == DCP_OK ? 0 : BROKEN, __ATOMIC_RELEASE);
    return status;
}

dcp_status dcp_comm_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                             dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    dcp_status status = dcp__comm_enter(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    return dcp__comm_leave(comm, comm->ops->alltoall(comm, send, recv, dcp__comm_timeout(comm, timeout_ms), err), err);
}

dcp_status dcp_comm_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    size_t total;
    err = err ? err : &own;
    if (n == 0 || !dcp__mul_size(n, (size_t)comm->size, &total)) {
        return dcp__fail(err, DCP_ARG, "all-gather of %zu bytes on %d ranks", n, comm->size);
    }
    dcp_status status = dcp__comm_enter(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    return dcp__comm_leave(comm, comm->ops->all_gather(comm, mine, n, all, dcp__comm_timeout(comm, timeout_ms), err), err);
}

dcp_status dcp_comm_barrier(dcp_comm *comm, uint32_t timeout_ms, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    dcp_status status = dcp__comm_enter(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    const dcp__comm_reserve *r = comm->reserve;
    const dcp__comm_word nothing = {0};
    status = comm->ops->all_gather(comm, &nothing, sizeof nothing, r->words, dcp__comm_timeout(comm, timeout_ms), err);
    return dcp__comm_leave(comm, status, err);
}

dcp_status dcp_comm_broadcast_device(dcp_comm *comm, void *device_ptr, size_t bytes, int root, void *stream, uint32_t timeout_ms,
                                     dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    if (!comm->ops->broadcast_device) {
        return dcp__fail(err, DCP_UNSUPPORTED, "communicator %s: no broadcast between devices", comm->ops->name);
    }
    if (root < 0 || root >= comm->size) {
        return dcp__fail(err, DCP_ARG, "broadcast from rank %d of %d", root, comm->size);
    }
    dcp_status status = dcp__comm_enter(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    timeout_ms = dcp__comm_timeout(comm, timeout_ms);
    return dcp__comm_leave(comm, comm->ops->broadcast_device(comm, device_ptr, bytes, root, stream, timeout_ms, err), err);
}

dcp_status dcp_comm_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    dcp_comm *made;
    err = err ? err : &own;
    if (!comm->ops->duplicate) {
        return dcp__fail(err, DCP_UNSUPPORTED, "communicator %s: cannot be duplicated", comm->ops->name);
    }
    dcp_status status = dcp__comm_enter(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    status = comm->ops->duplicate(comm, dcp__comm_timeout(comm, timeout_ms), &made, err);
    if (status == DCP_OK) {
        made->timeout_ms = comm->timeout_ms;
        *out = made;
    }
    /* All ranks know of these, so that they are still in step. */
    bool is_whole = status == DCP_NOMEM || status == DCP_PEER || status == DCP_UNSUPPORTED;
    dcp__comm_leave(comm, is_whole ? DCP_OK : status, err);
    return status;
}
