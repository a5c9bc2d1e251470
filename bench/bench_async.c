/* How long a caller waits for a save in the background, beside a plain copy of the same bytes by two threads.
 *
 *     bench_async DIRECTORY [MIB [RUNS]]
 *
 * MIB is 1536 and RUNS 5 unless given otherwise. The saves go to files, which are not made durable. Copy and save take turns. */
#include "bench.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct half {
    char *to;
    const char *from;
    size_t n;
} half;

static void *copy_half(void *arg)
{
    const half *h = arg;
    memcpy(h->to, h->from, h->n);
    return NULL;
}

/* Into memory that has been touched. */
static double copy_with_two_threads(char *to, const bench_state *state)
{
    double start = bench_now();
    size_t n = state->bytes / 2;
    half first = {to, state->memory, n}, second = {to + n, state->memory + n, state->bytes - n};
    pthread_t thread;
    if (pthread_create(&thread, NULL, copy_half, &second) != 0) {
        abort();
    }
    copy_half(&first);
    pthread_join(thread, NULL);
    return bench_now() - start;
}

/* What the caller waits for; the rest of the save is not measured. */
static double stall_of_save(const bench_state *state, const char *dir, dcp_stager *stager)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_op *op;
    char path[4096];
    opts.stager = stager;
    opts.save.no_sync = true;
    bench_fresh(dir, path);
    double start = bench_now();
    bench_must(dcp_save_async(NULL, path, state->value, &opts, &op, &err), &err);
    double stall = bench_now() - start;
    bench_must(dcp_op_wait(op, 0, NULL, &err), &err);
    dcp_op_free(op);
    bench_remove(path);
    return stall;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_async DIRECTORY [MIB [RUNS]]\n");
        return 2;
    }
    uint64_t bytes = bench_argument(argc, argv, 2, 1536) << 20, runs = bench_argument(argc, argv, 3, 5);
    bench_state state = bench_state_mixed(bytes);
    bench_times copies = {0}, stalls = {0}, firsts = {0};
    dcp_error err = DCP_ERROR_INIT;
    dcp_stager *stager;
    bench_must(dcp_stager_create(NULL, NULL, &stager, &err), &err);
    bench_add(&firsts, stall_of_save(&state, argv[1], stager));
    char *to = bench_alloc(state.bytes);
    memset(to, 1, state.bytes);
    for (uint64_t i = 0; i < runs && i < BENCH_MAX_RUNS; i++) {
        bench_add(&copies, copy_with_two_threads(to, &state));
        bench_add(&stalls, stall_of_save(&state, argv[1], stager));
    }
    bench_row_seconds("stall, first save", &firsts);
    bench_row_seconds("stall, buffers warm", &stalls);
    bench_row_seconds("copy by two threads", &copies);
    bench_row_number("stall / copy", bench_median(&stalls) / bench_median(&copies));
    free(to);
    dcp_stager_free(stager);
    bench_state_free(&state);
    return 0;
}
