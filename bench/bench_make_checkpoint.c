/* Writes a checkpoint of N tensors of 64 MiB each, for the commands to read.
 *
 *     bench_make_checkpoint PATH N
 */
#include "bench.h"

#include <stdio.h>

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: bench_make_checkpoint PATH N\n");
        return 2;
    }
    enum { TENSOR_BYTES = 64 << 20, SHIFT_BYTES = 4096 };
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    size_t n = (size_t)bench_argument(argc, argv, 2, 1);
    bench_state s = bench_state_equal(1, TENSOR_BYTES + n * SHIFT_BYTES); /* tensors overlap in memory, none in the files */
    dcp_value *state;
    bench_must(dcp_dict_create(NULL, &state, &err), &err);
    for (size_t i = 0; i < n; i++) {
        char name[32];
        int64_t extents[] = {TENSOR_BYTES / 4096, 1024};
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, s.memory + i * SHIFT_BYTES);
        snprintf(name, sizeof name, "layer.%zu", i);
        bench_must(dcp_dict_set_tensor(state, name, &t, &err), &err);
    }
    opts.no_sync = true;
    opts.files = 4;
    bench_must(dcp_save(NULL, argv[1], state, &opts, NULL, &err), &err);
    dcp_value_free(state);
    bench_state_free(&s);
    return 0;
}
