/* Bytes read for a part of a tensor.
 *
 *     bench_slice        1/16 of the rows of 64 MiB, in a row-major record that is not compressed
 */
#include "bench.h"

#include <stdio.h>

enum { ROWS = 16384, COLUMNS = 1024, WANTED = ROWS / 16 };

int main(void)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_storage *memory, *counting;
    dcp_storage_counts counts = {0};
    dcp_value *state;
    dcp_checkpoint *ck;
    dcp_save_opts save = DCP_SAVE_OPTS_INIT;
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    int64_t extents[] = {ROWS, COLUMNS}, offsets[] = {5000, 0}, sizes[] = {WANTED, COLUMNS};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, extents, bench_alloc((size_t)ROWS * COLUMNS * 4));
    dcp_tensor part = dcp_tensor_make(DCP_FLOAT32, 2, sizes, bench_alloc((size_t)WANTED * COLUMNS * 4));
    dcp_box box = {offsets, sizes};
    bench_must(dcp_storage_memory(NULL, &memory, &err), &err);
    bench_must(dcp_storage_count(NULL, memory, &counts, &counting, &err), &err);
    bench_must(dcp_dict_create(NULL, &state, &err), &err);
    bench_must(dcp_dict_set_tensor(state, "w", &t, &err), &err);
    save.storage = memory;
    open.storage = counting;
    bench_must(dcp_save(NULL, "c", state, &save, NULL, &err), &err);
    bench_must(dcp_checkpoint_open(NULL, "c", &open, &ck, &err), &err);
    uint64_t before = counts.bytes_read;
    bench_must(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("w")), &box, &part, &err), &err);
    bench_row_number("1/16 of the rows of 64 MiB: bytes read / bytes wanted",
                     (double)(counts.bytes_read - before) / (double)((size_t)WANTED * COLUMNS * 4));
    dcp_checkpoint_close(ck);
    dcp_storage_free(counting);
    dcp_storage_free(memory);
    return 0;
}
