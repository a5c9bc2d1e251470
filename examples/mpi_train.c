/*
 * A training run that saves, and continues from what it has saved, on any number of ranks:
 *
 *     mpiexec -n 4 mpi_train run/checkpoint       begins, trains 10 steps, saves
 *     mpiexec -n 3 mpi_train run/checkpoint       continues at step 10, on another number of ranks
 *
 * The "model" is a matrix whose rows are spread over the ranks. Element i begins as i, and each step adds 1 to it.
 */
#include <dcp/dcp.h>
#include <dcp/mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROWS = 1000, COLUMNS = 64, STEPS = 10 };

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Rank 0 looks for a checkpoint, so that all ranks do the same. */
static int has_checkpoint(const char *path, int rank)
{
    char name[4096];
    snprintf(name, sizeof name, "%s/.metadata", path);
    int found = rank == 0 && access(name, F_OK) == 0;
    MPI_Bcast(&found, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return found;
}

/* This rank's rows, [first, first + rows) of the whole matrix, and the number of steps done. */
static dcp_value *make_state(float *weight, int64_t first, int64_t rows, int64_t step, dcp_error *err)
{
    int64_t whole[] = {ROWS, COLUMNS}, offsets[] = {first, 0}, sizes[] = {rows, COLUMNS};
    dcp_tensor tensor = dcp_tensor_make(DCP_FLOAT32, 2, sizes, weight);
    dcp_box box = {offsets, sizes};
    dcp_value *state, *sharded;
    if (dcp_dict_create(NULL, &state, err) != DCP_OK || dcp_dict_set_int(state, "step", step, err) != DCP_OK ||
        dcp_sharded_create(NULL, DCP_FLOAT32, 2, whole, 1, &tensor, &box, &sharded, err) != DCP_OK ||
        dcp_dict_set(state, dcp_key_str("weight"), sharded, err) != DCP_OK) {
        fail(err->message);
    }
    return state;
}

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm;
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 2 || dcp_comm_mpi(NULL, MPI_COMM_WORLD, 0, &comm, &err) != DCP_OK) {
        fail(argc != 2 ? "usage: mpi_train CHECKPOINT" : err.message);
    }

    int64_t first = (int64_t)ROWS * rank / ranks, rows = (int64_t)ROWS * (rank + 1) / ranks - first, step = 0;
    float *weight = malloc(sizeof(float) * (size_t)(rows * COLUMNS + 1));
    for (int64_t i = 0; weight && i < rows * COLUMNS; i++) {
        weight[i] = (float)(first * COLUMNS + i);
    }
    dcp_value *state = make_state(weight, first, rows, step, &err);
    if (has_checkpoint(argv[1], rank)) { /* fills weight, wherever its rows were saved, and replaces "step" */
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.comm = comm;
        if (dcp_load(NULL, argv[1], state, &opts, NULL, &err) != DCP_OK) {
            fail(err.message);
        }
        dcp_value_int(dcp_dict_get_str(state, "step"), &step);
    }
    for (int64_t i = 0; i < rows * COLUMNS; i++) {
        if (weight[i] != (float)(first * COLUMNS + i + step)) {
            fail("a value is not what it was when it was saved");
        }
    }

    for (int64_t end = step + STEPS; step < end; step++) {
        for (int64_t i = 0; i < rows * COLUMNS; i++) {
            weight[i] += 1;
        }
    }
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.comm = comm;
    opts.overwrite = true; /* the old checkpoint stays until the new one is whole */
    if (dcp_dict_set_int(state, "step", step, &err) != DCP_OK || dcp_save(NULL, argv[1], state, &opts, NULL, &err) != DCP_OK) {
        fail(err.message);
    }
    if (rank == 0) {
        printf("%d ranks: steps %d to %d\n", ranks, (int)(step - STEPS), (int)step);
    }
    dcp_value_free(state);
    dcp_comm_free(comm);
    free(weight);
    MPI_Finalize();
    return 0;
}
