/* A program outside the tree whose ranks are processes: has all of them meet, prints the version of the library on rank 0. */
#include <dcp/dcp.h>
#include <dcp/mpi.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm;
    MPI_Init(&argc, &argv);
    if (dcp_comm_mpi(NULL, MPI_COMM_WORLD, 60000, &comm, &err) != DCP_OK || dcp_comm_barrier(comm, 0, &err) != DCP_OK) {
        fprintf(stderr, "%s: %s\n", dcp_status_name(err.code), err.message);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (dcp_comm_rank(comm) == 0) {
        printf("libdcp %s: %d ranks\n", dcp_version(), dcp_comm_size(comm));
    }
    dcp_comm_free(comm);
    MPI_Finalize();
    return 0;
}
