/* Rate of loading a checkpoint from the page cache into memory that was touched before, beside plain reads by two threads.
 *
 *     bench_load DIRECTORY [MIB [RUNS]]        1536 MiB in 24 large and 2,000 small tensors, 5 runs
 */
#include "bench.h"

#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES ((size_t)1 << 20)

typedef struct half {
    const char *file;
    char *memory;
    size_t from, to;
} half;

static void *read_half(void *arg)
{
    const half *h = arg;
    int fd = open(h->file, O_RDONLY | O_CLOEXEC);
    for (size_t at = h->from; fd >= 0 && at < h->to;) {
        size_t n = h->to - at < BLOCK_BYTES ? h->to - at : BLOCK_BYTES;
        ssize_t got = pread(fd, h->memory + at, n, (off_t)at);
        if (got <= 0) {
            perror(h->file);
            exit(1);
        }
        at += (size_t)got;
    }
    close(fd);
    return NULL;
}

/* The bytes of the data file, as many as the tensors have. */
static double read_plainly(const char *path, const bench_state *s, double *cpu)
{
    char name[4200];
    pthread_t other;
    snprintf(name, sizeof name, "%s/__0_0.distcp", path);
    half halves[] = {{name, s->memory, 0, s->bytes / 2}, {name, s->memory, s->bytes / 2, s->bytes}};
    double start = bench_now(), start_cpu = bench_cpu();
    if (pthread_create(&other, NULL, read_half, &halves[1]) != 0) {
        perror("thread");
        exit(1);
    }
    read_half(&halves[0]);
    pthread_join(other, NULL);
    *cpu = bench_cpu() - start_cpu;
    return bench_now() - start;
}

static double load(const char *path, const bench_state *s, double *cpu)
{
    dcp_error err = DCP_ERROR_INIT;
    double start = bench_now(), start_cpu = bench_cpu();
    bench_must(dcp_load(NULL, path, s->value, NULL, NULL, &err), &err);
    *cpu = bench_cpu() - start_cpu;
    return bench_now() - start;
}

typedef struct side {
    bench_times wall, cpu;
} side;

static void row(const char *what, const char *dir, const side *times, const bench_state *s)
{
    char text[4200];
    snprintf(text, sizeof text, "%s: %s", what, dir);
    bench_row_rate(text, &times->wall, s->bytes);
    bench_row_number("- CPU seconds per GiB", bench_median(&times->cpu) / ((double)s->bytes / (double)(1 << 30)));
}

static void measure(const char *path, const bench_state *s, double (*fn)(const char *, const bench_state *, double *),
                    side *times)
{
    double cpu;
    bench_add(&times->wall, fn(path, s, &cpu));
    bench_add(&times->cpu, cpu);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_load DIRECTORY [MIB [RUNS]]\n");
        return 2;
    }
    static side loads, plain;
    char path[4096];
    double unused;
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    bench_state s = bench_state_mixed(bench_argument(argc, argv, 2, 1536) << 20);
    uint64_t runs = bench_argument(argc, argv, 3, 5);
    bench_fresh(argv[1], path);
    opts.no_sync = true;
    bench_must(dcp_save(NULL, path, s.value, &opts, NULL, &err), &err);
    read_plainly(path, &s, &unused);
    for (uint64_t i = 0; i < runs; i++) {
        measure(path, &s, i % 2 ? read_plainly : load, i % 2 ? &plain : &loads);
        measure(path, &s, i % 2 ? load : read_plainly, i % 2 ? &loads : &plain);
    }
    row("load, warm, memory touched", argv[1], &loads, &s);
    row("plain reads by two threads", argv[1], &plain, &s);
    bench_row_number("ratio", bench_median(&plain.wall) / bench_median(&loads.wall));
    bench_remove(path);
    bench_state_free(&s);
    return 0;
}
