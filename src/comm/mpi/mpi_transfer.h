/*
 * Moving bytes between the ranks of an MPI communicator, with a deadline. Shared by the files of libdcp_mpi, which uses nothing
 * of libdcp but what is public.
 */
#ifndef DCP_COMM_MPI_TRANSFER_H
#define DCP_COMM_MPI_TRANSFER_H

#include "dcp/mpi.h"

/* The first bytes of each message travel in its head, one for each pair of ranks that have something for each other, and the rest
 * in pieces, of which few are under way at a time. Heads are small enough for MPI to deliver them without the receiver's help. */
#define HEAD_BYTES 1024
#define PIECE_BYTES 262144
#define WINDOW 4

typedef enum mpi_call { CALL_ALLTOALL = 1, CALL_ALL_GATHER, CALL_DUPLICATE } mpi_call;

/* In front of a head's bytes. */
typedef struct head {
    uint64_t total;  /* bytes of the whole message */
    uint32_t number; /* of the collective call, from 1 */
    uint32_t call;   /* mpi_call */
} head;

/* What a rank that gives up tells the others. */
typedef struct farewell {
    int32_t status, rank;
    int64_t native_code;
    char message[1000];
} farewell;

/* MPI reads and writes only memory that belongs to the handle, never the caller's: when a call has failed, MPI may have to go on
 * with what could not be withdrawn, and the caller's memory is his again. */
typedef struct mpi_comm {
    dcp_comm base;
    dcp_context *ctx;
    MPI_Comm comm;
    uint32_t number; /* collective calls so far */
    MPI_Request connecting;
    int mine, all;         /* operands of the agreement while connecting */
    char *heads;           /* size received, then size to send */
    char *pieces;          /* WINDOW received, then WINDOW to send */
    MPI_Request *requests; /* in the same order: heads, pieces */
    MPI_Status *statuses;
    int *done;
    bool *is_here;
    bool *is_well;       /* answers of all ranks, for a duplicate */
    dcp_comm_send *send; /* for an all_gather */
    dcp_comm_recv *recv;
    MPI_Request *farewells; /* one for each rank */
    farewell told;
} mpi_comm;

/* A number of requests as MPI counts them. */
static inline int n_requests(const mpi_comm *c)
{
    return 2 * c->base.size + 2 * WINDOW;
}

uint64_t dcp__mpi_now_ns(void);
static inline uint64_t dcp__mpi_deadline(uint32_t timeout_ms)
{
    return dcp__mpi_now_ns() + (uint64_t)timeout_ms * 1000000;
}

/* Lets others run, longer and longer: count how often nothing had happened. */
void dcp__mpi_idle(unsigned count);

/* IO, with MPI's text and code. */
dcp_status dcp__mpi_fail(dcp_error *err, int code, const char *function);

/* One collective call of the table: dcp_comm_ops says the rules. After a failure the others are told, and what is under way stays
 * with the handle. */
dcp_status dcp__mpi_transfer(mpi_comm *c, mpi_call call, const dcp_comm_send *send, const dcp_comm_recv *recv,
                             uint32_t timeout_ms, dcp_error *err);

/* True if another rank has given up. */
bool dcp__mpi_has_farewell(mpi_comm *c);

/* Waits a moment for what a failed call left under way. False: MPI still uses the handle's memory. */
bool dcp__mpi_settle(mpi_comm *c);

#endif
