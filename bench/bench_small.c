/* Time of saving and loading many small tensors.
 *
 *     bench_small DIRECTORY [TENSORS [BYTES [RUNS]]]        100,000 tensors of 1,024 bytes, 5 runs
 */
#include "bench.h"

#include <stdio.h>

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_small DIRECTORY [TENSORS [BYTES [RUNS]]]\n");
        return 2;
    }
    size_t n = (size_t)bench_argument(argc, argv, 2, 100000), bytes = (size_t)bench_argument(argc, argv, 3, 1024);
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    bench_state s = bench_state_equal(n, bytes);
    bench_times saves = {.n = 0}, loads = {.n = 0}, saves_cpu = {.n = 0}, loads_cpu = {.n = 0};
    char path[4096], what[4200];
    opts.no_sync = true;
    for (uint64_t i = bench_argument(argc, argv, 4, 5); i > 0; i--) {
        bench_fresh(argv[1], path);
        double start = bench_now(), cpu = bench_cpu();
        bench_must(dcp_save(NULL, path, s.value, &opts, NULL, &err), &err);
        double saved = bench_now(), saved_cpu = bench_cpu();
        bench_must(dcp_load(NULL, path, s.value, NULL, NULL, &err), &err);
        bench_add(&loads, bench_now() - saved);
        bench_add(&saves, saved - start);
        bench_add(&saves_cpu, saved_cpu - cpu);
        bench_add(&loads_cpu, bench_cpu() - saved_cpu);
        bench_remove(path);
    }
    snprintf(what, sizeof what, "save %zu tensors of %zu bytes: %s", n, bytes, argv[1]);
    bench_row_seconds(what, &saves);
    bench_row_seconds("- in CPU time", &saves_cpu);
    snprintf(what, sizeof what, "load %zu tensors of %zu bytes: %s", n, bytes, argv[1]);
    bench_row_seconds(what, &loads);
    bench_row_seconds("- in CPU time", &loads_cpu);
    bench_state_free(&s);
    return 0;
}
