/* A load by 8 ranks, threads here, of a mesh of 2 x 4 whose halves hold the same: what several ranks want read by one of them, or
 * by each.
 *
 *     bench_share DIRECTORY [MIB [RUNS]]     256 MiB unless told otherwise
 *
 * The file's bytes are in the page cache, so that times tell what the exchange costs, not what it saves. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

enum { RANKS = 8, ROW_BYTES = 4096 };

typedef struct job {
    const char *path;
    int64_t rows;
    bool save, no_read_once;
    uint64_t read_bytes[RANKS];
} job;

typedef struct rank {
    pthread_t thread;
    job *job;
    dcp_comm *comm;
    float *memory;
} rank;

/* Rank r has the rows of r % 4. */
static dcp_value *state_of(const rank *k, int r)
{
    int64_t extents[] = {k->job->rows, ROW_BYTES / 4}, offsets[] = {k->job->rows / 4 * (r % 4), 0};
    int64_t sizes[] = {k->job->rows / 4, ROW_BYTES / 4};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, sizes, k->memory);
    dcp_box box = {offsets, sizes};
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *state, *v;
    bench_must(dcp_dict_create(NULL, &state, &err), &err);
    bench_must(dcp_sharded_create(NULL, DCP_FLOAT32, 2, extents, 1, &t, &box, &v, &err), &err);
    bench_must(dcp_dict_set(state, dcp_key_str("w"), v, &err), &err);
    return state;
}

static void *run_rank(void *arg)
{
    rank *k = arg;
    int r = dcp_comm_rank(k->comm);
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *state = state_of(k, r);
    if (k->job->save) {
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        opts.comm = k->comm;
        opts.no_sync = true;
        bench_must(dcp_save(NULL, k->job->path, state, &opts, NULL, &err), &err);
    } else {
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        dcp_load_report report = DCP_LOAD_REPORT_INIT;
        opts.comm = k->comm;
        opts.no_read_once = k->job->no_read_once;
        bench_must(dcp_load(NULL, k->job->path, state, &opts, &report, &err), &err);
        k->job->read_bytes[r] = report.read_bytes;
    }
    dcp_value_free(state);
    dcp_comm_free(k->comm);
    return NULL;
}

static double run_all(job *j, rank *ranks)
{
    dcp_comm *comms[RANKS];
    dcp_error err = DCP_ERROR_INIT;
    bench_must(dcp_comm_threads(NULL, RANKS, comms, &err), &err);
    double start = bench_now();
    for (int r = 0; r < RANKS; r++) {
        ranks[r].job = j;
        ranks[r].comm = comms[r];
        if (pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]) != 0) {
            exit(1);
        }
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(ranks[r].thread, NULL);
    }
    return bench_now() - start;
}

int main(int argc, char **argv)
{
    char path[4096];
    rank ranks[RANKS];
    size_t runs = (size_t)bench_argument(argc, argv, 3, 5);
    uint64_t bytes = bench_argument(argc, argv, 2, 256) << 20;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_share DIRECTORY [MIB [RUNS]]\n");
        return 2;
    }
    bench_fresh(argv[1], path);
    job j = {.path = path, .rows = (int64_t)(bytes / ROW_BYTES), .save = true};
    for (int r = 0; r < RANKS; r++) {
        ranks[r].memory = bench_alloc(bytes / 4);
    }
    run_all(&j, ranks);
    j.save = false;
    bench_times times[2] = {{.n = 0}, {.n = 0}};
    uint64_t read[2] = {0};
    for (size_t i = 0; i < 2 * runs; i++) {
        j.no_read_once = i % 2;
        bench_add(&times[i % 2], run_all(&j, ranks));
        for (int r = 0; r < RANKS; r++) {
            read[i % 2] += j.read_bytes[r];
        }
    }
    bench_row_rate("load of a mesh of 2 x 4, each byte read once", &times[0], 2 * bytes);
    bench_row_rate("the same, each rank reads its own", &times[1], 2 * bytes);
    bench_row_number("bytes read once / of the checkpoint", (double)read[0] / (double)runs / (double)bytes);
    bench_row_number("bytes read by each / of the checkpoint", (double)read[1] / (double)runs / (double)bytes);
    for (int r = 0; r < RANKS; r++) {
        free(ranks[r].memory);
    }
    bench_remove(path);
    return 0;
}
