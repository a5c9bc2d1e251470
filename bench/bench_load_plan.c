/* Time to plan a load: which records a rank reads that wants one chunk of each tensor.
 *
 *     bench_load_plan CHECKPOINT [RUNS]      metadata alone is enough: bench/gen_metadata.py writes it
 *
 * The wanted chunk of a tensor is one of those that were saved, or (second row) as large and half a chunk further. Reading the
 * metadata is not counted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "engine/read/read_plan.h"

typedef struct targets {
    dcp_value *state;
    int64_t *numbers;
} targets;

static targets make_targets(const dcp_checkpoint *ck, size_t n_items, bool shifted)
{
    static char memory[1]; /* nothing is read */
    targets t = {.numbers = bench_alloc(n_items * 2 * DCP_MAX_NDIM * sizeof(int64_t))};
    dcp_error err = DCP_ERROR_INIT;
    bench_must(dcp_dict_create(NULL, &t.state, &err), &err);
    for (size_t i = 0; i < n_items; i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        int64_t *offsets = t.numbers + i * 2 * DCP_MAX_NDIM, *sizes = offsets + DCP_MAX_NDIM;
        dcp_chunk_info chunk;
        dcp_value *v;
        bench_must(dcp_item_chunk(ck, item, (i * 37) % (item->n_chunks - 1), &chunk, &err), &err);
        memcpy(offsets, chunk.box.offsets, (size_t)item->ndim * sizeof *offsets);
        memcpy(sizes, chunk.box.sizes, (size_t)item->ndim * sizeof *sizes);
        offsets[0] += shifted ? sizes[0] / 2 : 0;
        dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, sizes, memory);
        dcp_box box = {offsets, sizes};
        bench_must(dcp_sharded_create(NULL, item->dtype, item->ndim, item->extents, 1, &dst, &box, &v, &err), &err);
        bench_must(dcp_dict_set(t.state, dcp_key_str(item->fqn.ptr), v, &err), &err);
    }
    return t;
}

static double plan_once(dcp_checkpoint *ck, dcp_value *state)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_load_plan *plan;
    dcp__read_plan reads;
    size_t n;
    double start = bench_now();
    bench_must(dcp_plan_load(ck, state, NULL, &plan, NULL, &err), &err);
    dcp_read_request *requests = dcp_load_plan_requests(plan, &n);
    bench_must(dcp__plan_read(ck, requests, n, &reads, &err), &err);
    double took = bench_now() - start;
    dcp__read_plan_reset(&reads);
    dcp_load_plan_free(plan);
    return took;
}

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    size_t runs = (size_t)bench_argument(argc, argv, 2, 5);
    if (argc < 2) {
        fprintf(stderr, "usage: bench_load_plan CHECKPOINT [RUNS]\n");
        return 2;
    }
    bench_must(dcp_checkpoint_open(NULL, argv[1], NULL, &ck, &err), &err);
    bench_must(dcp_checkpoint_get_info(ck, &info, &err), &err);
    for (int shifted = 0; shifted < 2; shifted++) {
        targets t = make_targets(ck, info.n_items, shifted);
        bench_times times = {.n = 0};
        char what[96];
        for (size_t i = 0; i < runs; i++) {
            bench_add(&times, plan_once(ck, t.state));
        }
        snprintf(what, sizeof what, "load plan, %zu tensors, %zu chunks, one wanted of each%s", info.n_items, info.n_chunks,
                 shifted ? ", from two" : "");
        bench_row_seconds(what, &times);
        dcp_value_free(t.state);
        free(t.numbers);
    }
    dcp_checkpoint_close(ck);
    return 0;
}
