/* A load by 8 ranks, threads here, of a mesh of 2 x 4 whose halves hold the same: what several ranks want read by one of them, or
 * by each; plain records, compressed ones, and with checksums compared.
 *
 *     bench_share DIRECTORY [MIB [RUNS]]     256 MiB unless told otherwise
 *
 * The file's bytes are in the page cache, so that times tell what the exchange costs, not what it saves. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"

enum { RANKS = 8, TENSORS = 8, ROW_BYTES = 4096 };

typedef struct kind {
    const char *name, *transform;
    bool check_crc;
} kind;

typedef struct job {
    const kind *kind;
    dcp_storage *storage; /* counts what is read */
    int64_t rows;         /* of a tensor */
    bool save, no_read_once;
} job;

typedef struct rank {
    pthread_t thread;
    job *job;
    dcp_comm *comm;
    float *memory;
} rank;

/* Rank r has the rows of r % 4 of each tensor. */
static dcp_value *state_of(const rank *k, int r)
{
    int64_t rows = k->job->rows, extents[] = {rows, ROW_BYTES / 4}, offsets[] = {rows / 4 * (r % 4), 0};
    int64_t sizes[] = {rows / 4, ROW_BYTES / 4};
    dcp_box box = {offsets, sizes};
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *state, *v;
    bench_must(dcp_dict_create(NULL, &state, &err), &err);
    for (int i = 0; i < TENSORS; i++) {
        char name[16];
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, sizes, k->memory + i * sizes[0] * sizes[1]);
        snprintf(name, sizeof name, "w%d", i);
        bench_must(dcp_sharded_create(NULL, DCP_FLOAT32, 2, extents, 1, &t, &box, &v, &err), &err);
        bench_must(dcp_dict_set(state, dcp_key_str(name), v, &err), &err);
    }
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
        opts.storage = k->job->storage;
        opts.transform = k->job->kind->transform;
        opts.no_sync = true;
        bench_must(dcp_save(NULL, "", state, &opts, NULL, &err), &err);
    } else {
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.comm = k->comm;
        opts.open.storage = k->job->storage;
        opts.open.check_crc = k->job->kind->check_crc;
        opts.no_read_once = k->job->no_read_once;
        bench_must(dcp_load(NULL, "", state, &opts, NULL, &err), &err);
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

static uint64_t bytes_of_files(dcp_storage *st)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    dcp_checkpoint *ck;
    opts.storage = st;
    bench_must(dcp_checkpoint_open(NULL, "", &opts, &ck, &err), &err);
    bench_must(dcp_checkpoint_get_info(ck, &info, &err), &err);
    uint64_t bytes = info.metadata_bytes;
    for (size_t i = 0; i < info.n_files; i++) {
        dcp_file_info f;
        bench_must(dcp_checkpoint_file(ck, i, &f, &err), &err);
        bytes += f.bytes;
    }
    dcp_checkpoint_close(ck);
    return bytes;
}

/* Loads in turns: read once, and by each. */
static void measure(job *j, rank *ranks, const dcp_storage_counts *counts, uint64_t state_bytes, size_t runs)
{
    char name[128];
    bench_times times[2] = {{.n = 0}, {.n = 0}};
    uint64_t read[2] = {0};
    double of_all = (double)runs * (double)bytes_of_files(j->storage);
    for (size_t i = 0; i < 2 * runs; i++) {
        uint64_t before = counts->bytes_read;
        j->no_read_once = i % 2;
        bench_add(&times[i % 2], run_all(j, ranks));
        read[i % 2] += counts->bytes_read - before;
    }
    snprintf(name, sizeof name, "%s: load of a mesh of 2 x 4, each byte read once", j->kind->name);
    bench_row_rate(name, &times[0], 2 * state_bytes);
    bench_row_rate("  the same, each rank reads its own", &times[1], 2 * state_bytes);
    bench_row_number("  bytes read once / of the checkpoint", (double)read[0] / of_all);
    bench_row_number("  bytes read by each / of the checkpoint", (double)read[1] / of_all);
}

static void run_kind(const char *dir, const kind *k, rank *ranks, uint64_t state_bytes, size_t runs)
{
    char path[4096];
    dcp_storage *posix;
    dcp_storage_counts counts = {0};
    dcp_error err = DCP_ERROR_INIT;
    job j = {.kind = k, .rows = (int64_t)(state_bytes / TENSORS / ROW_BYTES), .save = true};
    bench_fresh(dir, path);
    bench_must(dcp_storage_posix(NULL, path, &posix, &err), &err);
    bench_must(dcp_storage_count(NULL, posix, &counts, &j.storage, &err), &err);
    run_all(&j, ranks);
    j.save = false;
    measure(&j, ranks, &counts, state_bytes, runs);
    dcp_storage_free(j.storage);
    dcp_storage_free(posix);
    bench_remove(path);
}

/* As weights look to a compressor: random mantissas under few exponents. */
static void fill(float *memory, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memory[i] = (float)((double)(seed >> 40) / (1 << 24) - 0.5);
    }
}

int main(int argc, char **argv)
{
    static const kind kinds[] = {
        {"plain", NULL, false}, {"zstd", "stream.zstd/1", false}, {"CRC", NULL, true}, {"zstd and CRC", "stream.zstd/1", true}};
    rank ranks[RANKS];
    size_t runs = (size_t)bench_argument(argc, argv, 3, 5);
    uint64_t bytes = bench_argument(argc, argv, 2, 256) << 20;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_share DIRECTORY [MIB [RUNS]]\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        for (int r = 0; r < RANKS; r++) {
            ranks[r].memory = bench_alloc(bytes / 4);
            fill(ranks[r].memory, (size_t)(bytes / 16), (uint64_t)(r % 4));
        }
        run_kind(argv[1], &kinds[i], ranks, bytes, runs);
        for (int r = 0; r < RANKS; r++) {
            free(ranks[r].memory);
        }
    }
    return 0;
}
