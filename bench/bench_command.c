/* Time and peak memory of commands that take turns.
 *
 *     bench_command RUNS NAME 'COMMAND' [NAME 'COMMAND']...
 *
 * The commands are shell text; their output is thrown away. The last row of each but the first is its rate against the first. */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_COMMANDS = 8 };

static double of(struct timeval t)
{
    return (double)t.tv_sec + (double)t.tv_usec * 1e-6;
}

static double run(const char *command, long *peak_kib, double *cpu)
{
    double start = bench_now();
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stdout)) {
            _exit(127);
        }
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    int status;
    struct rusage usage;
    if (child < 0 || wait4(child, &status, 0, &usage) < 0 || status != 0) {
        fprintf(stderr, "failed: %s\n", command);
        exit(1);
    }
    *peak_kib = usage.ru_maxrss > *peak_kib ? usage.ru_maxrss : *peak_kib;
    *cpu = of(usage.ru_utime) + of(usage.ru_stime);
    return bench_now() - start;
}

int main(int argc, char **argv)
{
    int n = (argc - 2) / 2, runs = argc > 1 ? atoi(argv[1]) : 0;
    static bench_times times[MAX_COMMANDS], cpus[MAX_COMMANDS];
    long peaks[MAX_COMMANDS] = {0};
    if (n < 1 || n > MAX_COMMANDS || argc != 2 + 2 * n || runs < 1) {
        fprintf(stderr, "usage: bench_command RUNS NAME 'COMMAND' [NAME 'COMMAND']...\n");
        return 2;
    }
    for (int r = 0; r <= runs; r++) {
        for (int i = 0; i < n; i++) {
            int k = r % 2 ? n - 1 - i : i;
            double cpu, took = run(argv[3 + 2 * k], &peaks[k], &cpu);
            if (r) { /* the first round only warms */
                bench_add(&times[k], took);
                bench_add(&cpus[k], cpu);
            }
        }
    }
    for (int i = 0; i < n; i++) {
        char what[256];
        bench_row_seconds(argv[2 + 2 * i], &times[i]);
        bench_row_seconds("- in CPU time", &cpus[i]);
        bench_row_number("- peak memory, MiB", (double)peaks[i] / 1024);
        if (i) {
            snprintf(what, sizeof what, "- rate / %s", argv[2]);
            bench_row_number(what, bench_median(&times[0]) / bench_median(&times[i]));
        }
    }
    return 0;
}
