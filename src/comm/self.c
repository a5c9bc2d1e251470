/* A group of one. */
#include <string.h>

#include "comm/comm.h"

static dcp_status self_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                dcp_error *err)
{
    (void)comm, (void)timeout_ms;
    if (send->bytes != recv->bytes) {
        return dcp__fail(err, DCP_MISMATCH, "rank 0 sends %zu bytes to itself and expects %zu", send->bytes, recv->bytes);
    }
    if (send->bytes) {
        memcpy(recv->ptr, send->ptr, send->bytes);
    }
    return DCP_OK;
}

static dcp_status self_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    (void)comm, (void)timeout_ms, (void)err;
    memcpy(all, mine, n);
    return DCP_OK;
}

static dcp_status self_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    (void)timeout_ms;
    return dcp_comm_self(comm->ctx, out, err);
}

static void self_free(dcp_comm *comm)
{
    dcp_comm_reset(comm);
    dcp__free(comm->ctx, comm);
}

static const dcp_comm_ops self_ops = {
    .struct_size = sizeof(dcp_comm_ops),
    .abi_version = DCP_COMM_ABI,
    .name = "self",
    .alltoall = self_alltoall,
    .all_gather = self_all_gather,
    .duplicate = self_duplicate,
    .free = self_free,
};

dcp_status dcp_comm_self(dcp_context *ctx, dcp_comm **out, dcp_error *err)
{
    if (!out) {
        return dcp__fail(err, DCP_ARG, "communicator: no place for the result");
    }
    ctx = dcp__context(ctx);
    dcp_comm *comm = dcp__alloc(ctx, sizeof *comm);
    if (!comm) {
        return dcp__nomem(err);
    }
    dcp_status status = dcp_comm_init(comm, ctx, &self_ops, 0, 1, DCP_COMM_ANY_THREAD, err);
    if (status != DCP_OK) {
        dcp__free(ctx, comm);
        return status;
    }
    *out = comm;
    return DCP_OK;
}
