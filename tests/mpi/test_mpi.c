/*
 * The conformance suite of communicators with processes as ranks, and what concerns MPI alone. Run by mpiexec; each test runs on
 * the whole group, and on groups that are parts of it. Prints one line for each test, on rank 0.
 */
#include "dcp/mpi.h"
#include "support/comm_suite.h"

static int world_rank, world_size;

static dcp_comm *connect(MPI_Comm group)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = NULL;
    CHECK_OK(dcp_comm_mpi(NULL, group, LONG_MS, &comm, &err), &err);
    return comm;
}

static void run_suite(MPI_Comm group, uint64_t seed, const char *what)
{
    dcp_comm *comm = connect(group);
    suite_run run = {comm, dcp_comm_rank(comm), dcp_comm_size(comm), seed};
    for (size_t i = 0; i < SUITE_LENGTH; i++) {
        if (world_rank == 0) {
            printf("mpi_%s_%d__%s\n", what, run.size, suite_entries[i].name);
            fflush(stdout);
        }
        suite_entries[i].run(&run);
        CHECK(!dcp_comm_is_broken(comm));
    }
    dcp_comm_free(comm);
}

/* Processes 1 and 3 of 4 are ranks 0 and 1: that is how they call each other. */
static void sub_group_counts_its_own_ranks(uint64_t seed)
{
    MPI_Comm part;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, world_rank, &part);
    dcp_comm *comm = connect(part);
    CHECK(dcp_comm_rank(comm) == world_rank / 2 && dcp_comm_size(comm) == (world_size + 1 - world_rank % 2) / 2);
    dcp_comm_free(comm);
    run_suite(part, seed, "part");
    MPI_Comm_free(&part);
}

/* Wildcards of the caller never see our traffic, and ours never his. */
static void traffic_of_the_caller_stays_apart(void)
{
    dcp_comm *comm = connect(MPI_COMM_WORLD);
    dcp_error err = DCP_ERROR_INIT;
    int to = (world_rank + 1) % world_size, sent = world_rank, got = -1;
    MPI_Request request;
    MPI_Irecv(&got, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
    CHECK_OK(dcp_comm_barrier(comm, LONG_MS, &err), &err);
    MPI_Send(&sent, 1, MPI_INT, to, 1, MPI_COMM_WORLD);
    CHECK_OK(dcp_comm_barrier(comm, LONG_MS, &err), &err);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(got == (world_rank + world_size - 1) % world_size);
    dcp_comm_free(comm);
}

static void wrong_groups_are_refused(void)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = NULL;
    CHECK(dcp_comm_mpi(NULL, MPI_COMM_NULL, 0, &comm, &err) == DCP_ARG && !comm);
    if (world_size >= 2) {
        MPI_Comm part, inter;
        int is_odd = world_rank % 2;
        MPI_Comm_split(MPI_COMM_WORLD, is_odd, world_rank, &part);
        MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, is_odd ? 0 : 1, 1, &inter);
        CHECK(dcp_comm_mpi(NULL, inter, 0, &comm, &err) == DCP_ARG && !comm);
        MPI_Comm_free(&inter);
        MPI_Comm_free(&part);
    }
}

/* The last rank is the one without memory. Its handle alone cannot be done without. */
static void no_memory_on_one_rank_fails_on_all(void)
{
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    bool has_failed = true;
    for (size_t n = 1; has_failed; n++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_comm *comm = NULL;
        fa.calls = 0;
        fa.fail_at = world_rank == world_size - 1 ? n : SIZE_MAX;
        dcp_status status = dcp_comm_mpi(ctx, MPI_COMM_WORLD, LONG_MS, &comm, &err);
        has_failed = status != DCP_OK;
        CHECK(!has_failed || status == (world_rank == world_size - 1 ? DCP_NOMEM : DCP_PEER));
        CHECK(has_failed == !comm && (has_failed || n > 10));
        dcp_comm_free(comm);
    }
    CHECK(fa.live == 1);
    fa.fail_at = SIZE_MAX;
    dcp_comm *comm = NULL;
    CHECK(dcp_comm_mpi(ctx, MPI_COMM_WORLD, LONG_MS, &comm, NULL) == DCP_OK);
    has_failed = true;
    for (size_t n = 0; has_failed; n++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_comm *twin = NULL;
        fa.calls = 0;
        fa.fail_at = world_rank == world_size - 1 ? n : SIZE_MAX;
        dcp_status status = dcp_comm_duplicate(comm, LONG_MS, &twin, &err);
        has_failed = status != DCP_OK;
        CHECK(!has_failed || status == (world_rank == world_size - 1 ? DCP_NOMEM : DCP_PEER));
        CHECK(has_failed == !twin && !dcp_comm_is_broken(comm));
        dcp_comm_free(twin);
    }
    dcp_comm_free(comm);
    CHECK(fa.live == 1);
    dcp_context_free(ctx);
}

/* Much at once, to everybody, so that all windows are full in both directions. */
static void large_messages_cross(void)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = connect(MPI_COMM_WORLD);
    dcp_comm_send send[64];
    dcp_comm_recv recv[64];
    for (int r = 0; r < world_size; r++) {
        size_t out = 3000000 + (size_t)(world_rank * 100003 + r), in = 3000000 + (size_t)(r * 100003 + world_rank);
        uint8_t *bytes = suite_alloc(out);
        suite_fill(bytes, out, 1, world_rank, r);
        send[r] = (dcp_comm_send){bytes, out};
        recv[r] = (dcp_comm_recv){suite_alloc(in), in};
    }
    CHECK_OK(dcp_comm_alltoall(comm, send, recv, LONG_MS, &err), &err);
    for (int r = 0; r < world_size; r++) {
        suite_check(recv[r].ptr, recv[r].bytes, 1, r, world_rank);
        free(recv[r].ptr);
        free((void *)(uintptr_t)send[r].ptr);
    }
    dcp_comm_free(comm);
}

/* A rank that stops in the middle: it expects nothing, so it comes and goes while the other still sends. */
static void memory_is_free_after_a_failure(void)
{
    if (world_size < 2) {
        return;
    }
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *world = connect(MPI_COMM_WORLD), *comm = connect(MPI_COMM_WORLD);
    size_t n = 5000000;
    dcp_comm_send send[64] = {{NULL, 0}};
    dcp_comm_recv recv[64] = {{NULL, 0}};
    char *bytes = calloc(1, n);
    CHECK(bytes);
    if (world_rank == 0) {
        send[1] = (dcp_comm_send){bytes, n};
        CHECK(dcp_comm_alltoall(comm, send, recv, 300, &err) == DCP_TIMEOUT && err.rank == 1);
    }
    free(bytes);
    CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
    CHECK(world_rank == 0 || dcp_comm_alltoall(comm, send, recv, LONG_MS, &err) == DCP_STATE);
    dcp_comm_free(comm);
    dcp_comm_free(world);
}

static void announce(const char *name)
{
    if (world_rank == 0) {
        printf("mpi_%d__%s\n", world_size, name);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = NULL;
    int level;
    CHECK(dcp_comm_mpi(NULL, MPI_COMM_WORLD, 0, &comm, &err) == DCP_STATE);
    MPI_Init_thread(&argc, &argv, argc > 1 ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    uint64_t seed = world_rank == 0 ? test_random_seeded("mpi").state : 0;
    MPI_Bcast(&seed, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);

    comm = connect(MPI_COMM_WORLD);
    CHECK(((comm->caps & DCP_COMM_ANY_THREAD) != 0) == (level == MPI_THREAD_MULTIPLE));
    dcp_comm_free(comm);
    run_suite(MPI_COMM_WORLD, seed, "world");
    announce("sub_group_counts_its_own_ranks");
    sub_group_counts_its_own_ranks(seed);
    announce("traffic_of_the_caller_stays_apart");
    traffic_of_the_caller_stays_apart();
    announce("wrong_groups_are_refused");
    wrong_groups_are_refused();
    announce("no_memory_on_one_rank_fails_on_all");
    no_memory_on_one_rank_fails_on_all();
    announce("large_messages_cross");
    large_messages_cross();
    announce("memory_is_free_after_a_failure");
    memory_is_free_after_a_failure();
    MPI_Finalize();
    CHECK(dcp_comm_mpi(NULL, MPI_COMM_WORLD, 0, &comm, &err) == DCP_STATE);
    return 0;
}
