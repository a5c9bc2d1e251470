#include "bench.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

double bench_now(void)
{
    return seconds(CLOCK_MONOTONIC);
}

double bench_cpu(void)
{
    return seconds(CLOCK_PROCESS_CPUTIME_ID);
}

void bench_must(dcp_status status, const dcp_error *err)
{
    if (status != DCP_OK) {
        fprintf(stderr, "%s: %s\n", dcp_status_name(status), err->message);
        exit(1);
    }
}

void *bench_alloc(size_t bytes)
{
    void *p = aligned_alloc(4096, (bytes + 4096) / 4096 * 4096);
    if (!p) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    return p;
}

uint64_t bench_argument(int argc, char **argv, int i, uint64_t otherwise)
{
    return i < argc ? strtoull(argv[i], NULL, 10) : otherwise;
}

/* ---- states ---- */

/* Content that no compression and no page sharing makes shorter. */
static void fill(uint64_t *words, size_t n)
{
    uint64_t x = 0x9e3779b97f4a7c15;
    for (size_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        words[i] = x;
    }
}

static bench_state start(size_t n, size_t bytes)
{
    dcp_error err = DCP_ERROR_INIT;
    bench_state s = {.memory = bench_alloc(bytes), .bytes = bytes, .n = n};
    fill((uint64_t *)(void *)s.memory, bytes / sizeof(uint64_t));
    bench_must(dcp_dict_create(NULL, &s.value, &err), &err);
    return s;
}

static void add(bench_state *s, const char *kind, size_t i, size_t offset, size_t bytes)
{
    dcp_error err = DCP_ERROR_INIT;
    char name[64];
    int64_t extent = (int64_t)(bytes / sizeof(float));
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, &extent, s->memory + offset);
    snprintf(name, sizeof name, "model.layers.%zu.%s.weight", i, kind);
    bench_must(dcp_dict_set_tensor(s->value, name, &t, &err), &err);
}

bench_state bench_state_mixed(uint64_t total_bytes)
{
    enum { N_LARGE = 24, N_SMALL = 2000 };
    size_t small = (size_t)total_bytes / 32 / N_SMALL / 64 * 64;
    size_t large = ((size_t)total_bytes - small * N_SMALL) / N_LARGE / 64 * 64;
    bench_state s = start(N_LARGE + N_SMALL, large * N_LARGE + small * N_SMALL);
    size_t offset = 0;
    for (size_t i = 0; i < N_SMALL; i++, offset += small) {
        add(&s, "norm", i, offset, small);
    }
    for (size_t i = 0; i < N_LARGE; i++, offset += large) {
        add(&s, "attention", i, offset, large);
    }
    return s;
}

bench_state bench_state_equal(size_t n, size_t bytes)
{
    bench_state s = start(n, n * bytes);
    for (size_t i = 0; i < n; i++) {
        add(&s, "bias", i, i * bytes, bytes);
    }
    return s;
}

void bench_state_free(bench_state *s)
{
    dcp_value_free(s->value);
    free(s->memory);
}

/* ---- results ---- */

void bench_add(bench_times *t, double seconds)
{
    if (t->n < BENCH_MAX_RUNS) {
        t->s[t->n++] = seconds;
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bench_times sorted(const bench_times *t)
{
    bench_times copy = *t;
    qsort(copy.s, copy.n, sizeof *copy.s, compare);
    return copy;
}

double bench_median(const bench_times *t)
{
    bench_times s = sorted(t);
    return s.n ? s.n % 2 ? s.s[s.n / 2] : (s.s[s.n / 2 - 1] + s.s[s.n / 2]) / 2 : 0;
}

void bench_row_seconds(const char *what, const bench_times *t)
{
    bench_times s = sorted(t);
    printf("| %s | %.3f s | %.3f to %.3f |\n", what, bench_median(t), s.s[0], s.s[s.n - 1]);
}

void bench_row_rate(const char *what, const bench_times *t, uint64_t bytes)
{
    bench_times s = sorted(t);
    double gib = (double)bytes / (double)(1 << 30);
    printf("| %s | %.2f GiB/s | %.2f to %.2f |\n", what, gib / bench_median(t), gib / s.s[s.n - 1], gib / s.s[0]);
}

void bench_row_number(const char *what, double number)
{
    printf("| %s | %.2f | |\n", what, number);
}

/* ---- files ---- */

void bench_fresh(const char *dir, char path[4096])
{
    snprintf(path, 4096, "%s/dcp-bench-XXXXXX", dir);
    if (!mkdtemp(path)) {
        perror(path);
        exit(1);
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st;
    (void)type;
    (void)at;
    return remove(path);
}

void bench_remove(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
