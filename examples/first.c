/*
 * Lists a checkpoint, then reads two rows of one of its tensors, and only them.
 *
 *     first CHECKPOINT FQN FIRST_ROW          FQN: a float32 tensor of two dimensions
 */
#include <dcp/dcp.h>
#include <stdio.h>
#include <stdlib.h>

static void list_items(const dcp_checkpoint *ck)
{
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        printf("%s: %s in %zu chunk%s\n", item->fqn.ptr, item->kind == DCP_ITEM_TENSOR ? dcp_dtype_name(item->dtype) : "object",
               item->n_chunks, item->n_chunks == 1 ? "" : "s");
    }
}

static dcp_status print_two_rows(dcp_checkpoint *ck, const char *fqn, int64_t first_row, dcp_error *err)
{
    const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(fqn));
    if (item == NULL || item->dtype != DCP_FLOAT32 || item->ndim != 2) {
        fprintf(stderr, "%s is not a float32 tensor of two dimensions\n", fqn);
        return DCP_MISMATCH;
    }
    int64_t columns = item->extents[1];
    int64_t offsets[] = {first_row, 0}, sizes[] = {2, columns};
    dcp_box box = {offsets, sizes};
    float *rows = calloc((size_t)(2 * columns), sizeof(*rows));
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, sizes, rows);
    dcp_status status = rows == NULL ? DCP_NOMEM : dcp_read(ck, item, &box, &dst, err);
    for (int64_t i = 0; status == DCP_OK && i < 2 * columns; i++) {
        printf("%g%c", (double)rows[i], (i + 1) % columns == 0 ? '\n' : ' ');
    }
    free(rows);
    return status;
}

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    if (argc != 4) {
        fprintf(stderr, "usage: first CHECKPOINT FQN FIRST_ROW\n");
        return 2;
    }
    dcp_status status = dcp_checkpoint_open(NULL, argv[1], NULL, &ck, &err);
    if (status == DCP_OK) {
        list_items(ck);
        status = print_two_rows(ck, argv[2], strtoll(argv[3], NULL, 10), &err);
        dcp_checkpoint_close(ck);
    }
    if (err.code != DCP_OK) {
        fprintf(stderr, "%s: %s\n", dcp_status_name(err.code), err.message);
    }
    return status == DCP_OK ? 0 : 1;
}
