/* Handles of communicators over MPI: made, duplicated, freed. */
#include <string.h>

#include "comm/mpi/mpi_transfer.h"

static void *take(dcp_context *ctx, size_t count, size_t bytes)
{
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) {
        return NULL;
    }
    void *ptr = dcp_context_resize(ctx, NULL, total);
    if (ptr) {
        memset(ptr, 0, total);
    }
    return ptr;
}

static void give(dcp_context *ctx, void *ptr)
{
    if (ptr) {
        dcp_context_resize(ctx, ptr, 0);
    }
}

static bool is_mpi_running(void)
{
    int is_initialized = 0, is_finalized = 0;
    MPI_Initialized(&is_initialized);
    MPI_Finalized(&is_finalized);
    return is_initialized && !is_finalized;
}

/* ---- the table ---- */

static dcp_status mpi_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                               dcp_error *err)
{
    return dcp__mpi_transfer((mpi_comm *)comm, CALL_ALLTOALL, send, recv, timeout_ms, err);
}

/* Messages from rank to rank and not MPI_Iallgather, which cannot say who is missing. */
static dcp_status gather_all(mpi_comm *c, mpi_call call, const void *mine, size_t n, void *all, uint32_t timeout_ms,
                             dcp_error *err)
{
    for (int r = 0; r < c->base.size; r++) {
        c->send[r] = (dcp_comm_send){mine, n};
        c->recv[r] = (dcp_comm_recv){(char *)all + (size_t)r * n, n};
    }
    return dcp__mpi_transfer(c, call, c->send, c->recv, timeout_ms, err);
}

static dcp_status mpi_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err)
{
    return gather_all((mpi_comm *)comm, CALL_ALL_GATHER, mine, n, all, timeout_ms, err);
}

static void free_arrays(mpi_comm *c)
{
    dcp_context *ctx = c->ctx;
    give(ctx, c->heads);
    give(ctx, c->pieces);
    give(ctx, c->requests);
    give(ctx, c->statuses);
    give(ctx, c->done);
    give(ctx, c->is_here);
    give(ctx, c->is_well);
    give(ctx, c->farewells);
    give(ctx, c->send);
    give(ctx, c->recv);
    dcp_comm_reset(&c->base);
}

/* After a failure the MPI communicator is not given back: messages that nobody took may lie in it, and an MPI that used it again
 * for another group would deliver them there. If MPI cannot let go of the handle's memory either, that stays too: a leak after a
 * failure, and no write into what is another's. */
static void mpi_free(dcp_comm *comm)
{
    mpi_comm *c = (mpi_comm *)comm;
    if (is_mpi_running()) {
        if (!dcp_comm_is_broken(comm) && !dcp__mpi_has_farewell(c)) {
            MPI_Comm_free(&c->comm);
        } else if (!dcp__mpi_settle(c)) {
            return;
        }
    }
    free_arrays(c);
    give(c->ctx, c);
}

static dcp_status mpi_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err);

static const dcp_comm_ops mpi_ops = {
    .struct_size = sizeof(dcp_comm_ops),
    .abi_version = DCP_COMM_ABI,
    .name = "mpi",
    .alltoall = mpi_alltoall,
    .all_gather = mpi_all_gather,
    .duplicate = mpi_duplicate,
    .free = mpi_free,
};

/* ---- making ---- */

static bool take_arrays(mpi_comm *c, size_t size)
{
    dcp_context *ctx = c->ctx;
    c->heads = take(ctx, 2 * size, HEAD_BYTES);
    c->pieces = take(ctx, 2 * WINDOW, PIECE_BYTES);
    c->requests = take(ctx, 2 * size + 2 * WINDOW, sizeof(MPI_Request));
    c->statuses = take(ctx, 2 * size + 2 * WINDOW, sizeof *c->statuses);
    c->done = take(ctx, 2 * size + 2 * WINDOW, sizeof *c->done);
    c->is_here = take(ctx, size, sizeof *c->is_here);
    c->is_well = take(ctx, size, sizeof *c->is_well);
    c->farewells = take(ctx, size, sizeof(MPI_Request));
    c->send = take(ctx, size, sizeof *c->send);
    c->recv = take(ctx, size, sizeof *c->recv);
    return c->heads && c->pieces && c->requests && c->statuses && c->done && c->is_here && c->is_well && c->farewells &&
           c->send && c->recv;
}

static dcp_status make_arrays(mpi_comm *c, int rank, int size, dcp_error *err)
{
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    unsigned caps = level == MPI_THREAD_MULTIPLE ? DCP_COMM_ANY_THREAD : 0;
    if (!take_arrays(c, (size_t)size)) {
        return dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    for (int i = 0; i < 2 * size + 2 * WINDOW; i++) {
        c->requests[i] = MPI_REQUEST_NULL;
    }
    for (int r = 0; r < size; r++) {
        c->farewells[r] = MPI_REQUEST_NULL;
    }
    return dcp_comm_init(&c->base, c->ctx, &mpi_ops, rank, size, caps, err);
}

static dcp_status wait_connected(mpi_comm *c, uint64_t deadline, const char *what, dcp_error *err)
{
    int is_done = 0;
    for (unsigned idle = 0;; idle++) {
        int rc = MPI_Test(&c->connecting, &is_done, MPI_STATUS_IGNORE);
        if (rc != MPI_SUCCESS) {
            return dcp__mpi_fail(err, rc, what);
        }
        if (is_done) {
            return DCP_OK;
        }
        if (dcp__mpi_now_ns() > deadline) {
            return dcp_error_set(err, DCP_TIMEOUT, "%s: not all ranks of the group arrived", what);
        }
        dcp__mpi_idle(idle);
    }
}

static dcp_status duplicate_group(mpi_comm *c, MPI_Comm parent, uint64_t deadline, dcp_error *err)
{
    int rc = MPI_Comm_idup(parent, &c->comm, &c->connecting);
    dcp_status status =
        rc == MPI_SUCCESS ? wait_connected(c, deadline, "MPI_Comm_idup", err) : dcp__mpi_fail(err, rc, "MPI_Comm_idup");
    if (status == DCP_OK) {
        MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
    }
    return status;
}

/* The rank's own cause, PEER if only others lack memory. TIMEOUT and others: the ranks do not know of each other. */
static dcp_status agree_on_memory(mpi_comm *c, dcp_status mine, uint64_t deadline, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    c->mine = mine == DCP_OK;
    int rc = MPI_Iallreduce(&c->mine, &c->all, 1, MPI_INT, MPI_MIN, c->comm, &c->connecting);
    dcp_status status =
        rc == MPI_SUCCESS ? wait_connected(c, deadline, "MPI_Iallreduce", &own) : dcp__mpi_fail(&own, rc, "MPI_Iallreduce");
    if (status != DCP_OK) {
        *err = own;
        return status;
    }
    return mine != DCP_OK ? mine : c->all ? DCP_OK : dcp_error_set(err, DCP_PEER, "another rank is out of memory");
}

/* Gives an empty handle its group and its memory, or frees it. What MPI has not finished with when the deadline passes, it may
 * still write to: then the handle stays. */
static dcp_status connect(mpi_comm *c, MPI_Comm parent, uint32_t timeout_ms, dcp_error *err)
{
    const uint64_t deadline = dcp__mpi_deadline(timeout_ms);
    int rank = 0, size = 0;
    dcp_status status = duplicate_group(c, parent, deadline, err);
    if (status != DCP_OK) {
        return status;
    }
    MPI_Comm_rank(c->comm, &rank);
    MPI_Comm_size(c->comm, &size);
    status = agree_on_memory(c, make_arrays(c, rank, size, err), deadline, err);
    if (status == DCP_OK) {
        return DCP_OK;
    }
    free_arrays(c);
    if (status == DCP_NOMEM || status == DCP_PEER) {
        MPI_Comm_free(&c->comm);
        give(c->ctx, c);
    }
    return status;
}

static mpi_comm *make_handle(dcp_context *ctx)
{
    mpi_comm *c = take(ctx, 1, sizeof *c);
    if (c) {
        c->ctx = ctx;
        c->comm = MPI_COMM_NULL;
    }
    return c;
}

/* All ranks learn whether each has a handle before they connect them. */
static dcp_status mpi_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    mpi_comm *c = (mpi_comm *)comm, *made = make_handle(c->ctx);
    bool is_well = made != NULL;
    dcp_status status = gather_all(c, CALL_DUPLICATE, &is_well, sizeof is_well, c->is_well, timeout_ms, err);
    for (int r = 0; status == DCP_OK && r < comm->size; r++) {
        if (!c->is_well[r] && is_well) {
            status = dcp_error_set(err, DCP_PEER, "duplicate: rank %d is out of memory", r);
            err->rank = r;
        }
    }
    if (status == DCP_OK && !is_well) {
        status = dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    if (status != DCP_OK) {
        give(c->ctx, made);
        return status;
    }
    status = connect(made, c->comm, timeout_ms, err);
    if (status == DCP_OK) {
        *out = &made->base;
    }
    return status;
}

static dcp_status check_group(MPI_Comm comm, dcp_error *err)
{
    int is_inter = 0;
    if (!is_mpi_running()) {
        return dcp_error_set(err, DCP_STATE, "MPI is not initialised, or finalised already");
    }
    if (comm == MPI_COMM_NULL) {
        return dcp_error_set(err, DCP_ARG, "communicator: MPI_COMM_NULL");
    }
    MPI_Comm_test_inter(comm, &is_inter);
    return is_inter ? dcp_error_set(err, DCP_ARG, "communicator: an intercommunicator") : DCP_OK;
}

dcp_status dcp_comm_mpi(dcp_context *ctx, MPI_Comm comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err)
{
    dcp_error own = DCP_ERROR_INIT;
    err = err ? err : &own;
    if (!out) {
        return dcp_error_set(err, DCP_ARG, "communicator: no place for the result");
    }
    dcp_status status = check_group(comm, err);
    if (status != DCP_OK) {
        return status;
    }
    mpi_comm *c = make_handle(ctx);
    if (!c) {
        return dcp_error_set(err, DCP_NOMEM, "out of memory");
    }
    status = connect(c, comm, timeout_ms ? timeout_ms : DCP_COMM_TIMEOUT_MS, err);
    if (status == DCP_OK) {
        dcp_comm_set_timeout(&c->base, timeout_ms);
        *out = &c->base;
    }
    return status;
}
