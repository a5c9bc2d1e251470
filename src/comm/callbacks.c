/* A communicator out of the functions of another runtime. */
#include "comm/comm.h"

typedef struct callback_comm {
    dcp_comm base;
    dcp_comm_ops ops; /* with the slots that the callbacks fill: they say what the communicator can */
    dcp_comm_callbacks cb;
    dcp_comm_send *send; /* for all_gather by alltoall: size entries each */
    dcp_comm_recv *recv;
} callback_comm;

static dcp_status callback_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                    dcp_error *err)
{
    const dcp_comm_callbacks *cb = &((callback_comm *)comm)->cb;
    return cb->alltoall(cb->user, send, recv, timeout_ms, err);
}

static dcp_status callback_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    callback_comm *c = (callback_comm *)comm;
    if (c->cb.all_gather) {
        return c->cb.all_gather(c->cb.user, mine, n, all, timeout_ms, err);
    }
    for (int r = 0; r < comm->size; r++) {
        c->send[r] = (dcp_comm_send){mine, n};
        c->recv[r] = (dcp_comm_recv){(char *)all + (size_t)r * n, n};
    }
    return c->cb.alltoall(c->cb.user, c->send, c->recv, timeout_ms, err);
}

static dcp_status callback_broadcast_device(dcp_comm *comm, void *device_ptr, size_t bytes, int root, void *stream,
                                            uint32_t timeout_ms, dcp_error *err)
{
    const dcp_comm_callbacks *cb = &((callback_comm *)comm)->cb;
    return cb->broadcast_device(cb->user, device_ptr, bytes, root, stream, timeout_ms, err);
}

/* The other ranks must learn of it if this one lacks memory: the handle is made first, then told of, then given its group. */
static dcp_status callback_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    dcp_comm_callbacks cb = ((callback_comm *)comm)->cb;
    const dcp__comm_reserve *r = comm->reserve;
    if (!cb.duplicate) {
        return dcp__fail(err, DCP_UNSUPPORTED, "communicator callbacks: cannot be duplicated");
    }
    dcp_comm *made = NULL;
    dcp_comm_callbacks idle = cb;
    idle.release = NULL;
    dcp__comm_word word = {.status = dcp_comm_from_callbacks(comm->ctx, &idle, &made, err)};
    dcp_status status = callback_all_gather(comm, &word, sizeof word, r->words, timeout_ms, err);
    for (int i = 0; status == DCP_OK && i < comm->size; i++) {
        if (r->words[i].status != DCP_OK && word.status == DCP_OK) {
            status = dcp__fail(err, DCP_PEER, "duplicate: rank %d is out of memory", i);
        }
    }
    status = status == DCP_OK ? (dcp_status)word.status : status;
    status = status == DCP_OK ? cb.duplicate(cb.user, timeout_ms, &cb.user, err) : status;
    if (status != DCP_OK) {
        dcp_comm_free(made);
        return status;
    }
    ((callback_comm *)made)->cb = cb;
    *out = made;
    return DCP_OK;
}

static void callback_free(dcp_comm *comm)
{
    callback_comm *c = (callback_comm *)comm;
    if (c->cb.release) {
        c->cb.release(c->cb.user);
    }
    dcp_context *ctx = comm->ctx;
    dcp_comm_reset(comm);
    dcp__free(ctx, c->send);
    dcp__free(ctx, c->recv);
    dcp__free(ctx, c);
}

static const dcp_comm_ops callback_ops = {
    .struct_size = sizeof(dcp_comm_ops),
    .abi_version = DCP_COMM_ABI,
    .name = "callbacks",
    .alltoall = callback_alltoall,
    .all_gather = callback_all_gather,
    .duplicate = callback_duplicate,
    .free = callback_free,
};

dcp_status dcp_comm_from_callbacks(dcp_context *ctx, const dcp_comm_callbacks *callbacks, dcp_comm **out, dcp_error *err)
{
    if (!out || !callbacks || callbacks->struct_size != sizeof *callbacks || !callbacks->alltoall) {
        return dcp__fail(err, DCP_ARG, "communicator: callbacks without alltoall, of another size, or no place for the result");
    }
    ctx = dcp__context(ctx);
    callback_comm *c = dcp__calloc(ctx, 1, sizeof *c);
    if (!c) {
        return dcp__nomem(err);
    }
    c->ops = callback_ops;
    c->ops.broadcast_device = callbacks->broadcast_device ? callback_broadcast_device : NULL;
    dcp_status status = dcp_comm_init(&c->base, ctx, &c->ops, callbacks->rank, callbacks->size, callbacks->caps, err);
    if (status != DCP_OK) {
        goto err_comm;
    }
    c->send = dcp__calloc(ctx, (size_t)callbacks->size, sizeof *c->send);
    c->recv = dcp__calloc(ctx, (size_t)callbacks->size, sizeof *c->recv);
    if (!c->send || !c->recv) {
        status = dcp__nomem(err);
        goto err_arrays;
    }
    c->cb = *callbacks;
    *out = &c->base;
    return DCP_OK;

err_arrays:
    dcp__free(ctx, c->send);
    dcp__free(ctx, c->recv);
    dcp_comm_reset(&c->base);
err_comm:
    dcp__free(ctx, c);
    return status;
}
