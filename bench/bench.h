/* What the measuring programs share: time, states to save, rows of the table that scripts/bench.sh puts together. */
#ifndef DCP_BENCH_H
#define DCP_BENCH_H

#include <dcp/dcp.h>

#define BENCH_MAX_RUNS 32

double bench_now(void); /* seconds */
double bench_cpu(void); /* seconds that all threads of the process computed: they say more where others use the machine too */
/* Ends the program with the message unless status is DCP_OK. */
void bench_must(dcp_status status, const dcp_error *err);
void *bench_alloc(size_t bytes); /* page-aligned, never NULL */
/* argv[i] as a number, or the default. */
uint64_t bench_argument(int argc, char **argv, int i, uint64_t otherwise);

/* ---- states ---- */

/* Tensors in one piece of memory, one after the other. */
typedef struct bench_state {
    dcp_value *value;
    char *memory;
    size_t bytes, n;
} bench_state;

/* 24 large and 2,000 small tensors of float32, total bytes together; the small ones take 1/32 of it. The memory is touched. */
bench_state bench_state_mixed(uint64_t total_bytes);
/* n tensors of `bytes` each. */
bench_state bench_state_equal(size_t n, size_t bytes);
void bench_state_free(bench_state *s);

/* ---- results ---- */

/* Times of one thing, in seconds. */
typedef struct bench_times {
    double s[BENCH_MAX_RUNS];
    size_t n;
} bench_times;

void bench_add(bench_times *t, double seconds);
double bench_median(const bench_times *t);
/* "| what | median | min to max |": seconds, or GiB/s of `bytes`. */
void bench_row_seconds(const char *what, const bench_times *t);
void bench_row_rate(const char *what, const bench_times *t, uint64_t bytes);
/* "| what | 0.93 | |" */
void bench_row_number(const char *what, double number);

/* ---- files ---- */

/* An existing directory `dir` gets a fresh one below it; the name is the caller's to remove with bench_remove. */
void bench_fresh(const char *dir, char path[4096]);
/* Removes a checkpoint's files and its directory. */
void bench_remove(const char *path);

#endif
