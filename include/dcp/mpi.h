/*
 * dcp/mpi.h - communicators over MPI. In a library of its own, libdcp_mpi, which is built for one MPI.
 *
 *     MPI_Init(&argc, &argv);
 *     dcp_comm *comm;
 *     if (dcp_comm_mpi(NULL, MPI_COMM_WORLD, 0, &comm, &err) != DCP_OK) {
 *         fprintf(stderr, "%s\n", err.message);
 *         MPI_Abort(MPI_COMM_WORLD, 1);
 *     }
 *     ... saves and loads with comm ...
 *     dcp_comm_free(comm);
 *     MPI_Finalize();
 *
 * Threads: as MPI was initialised. With MPI_THREAD_SINGLE or FUNNELED all calls come from the main thread, with SERIALIZED none
 * comes while another thread is in MPI; with MULTIPLE there are no limits, and the communicator has DCP_COMM_ANY_THREAD.
 */
#ifndef DCP_MPI_H
#define DCP_MPI_H

#include <mpi.h>

#include "backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Connects the processes of a group: any intracommunicator, such as a part made by MPI_Comm_split. Ranks are those in comm. A
 * private duplicate is used, so that nothing meets the caller's own traffic, and errors of MPI come back as IO with native_code
 * instead of going to an error handler. Collective over comm; waits at most timeout_ms (0: 30 minutes), which becomes the
 * default deadline too.
 * The caller frees it before MPI_Finalize. Errors: STATE (MPI is not running), ARG (MPI_COMM_NULL, an intercommunicator),
 * TIMEOUT, IO, NOMEM (on one rank, PEER on the others; a rank that lacks memory for the handle itself does not come: TIMEOUT). */
DCP_API dcp_status dcp_comm_mpi(dcp_context *ctx, MPI_Comm comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
