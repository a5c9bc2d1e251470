/* A pickle that is decoded and written again: what was written must read back as the same value, and be written as the same
 * bytes from then on. */
#include <stdlib.h>
#include <string.h>

#include "format/object.h"
#include "format/pickle_writer.h"

typedef struct generation {
    dcp__object object;
    dcp__buf bytes;
} generation;

/* Reads and writes; false if the value cannot be written. */
static bool take(generation *g, const uint8_t *data, size_t size, dcp_status *status)
{
    dcp_context *ctx = dcp__context(NULL);
    dcp__source src = dcp__source_memory(data, size);
    dcp__write_storage *storages = NULL;
    size_t n = 0;
    dcp__buf_init(&g->bytes, ctx);
    *status = dcp__object_read(ctx, &src, 0, &g->object, NULL);
    if (*status != DCP_OK) {
        return false;
    }
    *status = dcp__pickle_value(&g->bytes, g->object.value, &storages, &n, NULL);
    dcp__free(ctx, storages);
    if (*status != DCP_OK) {
        dcp__object_reset(&g->object);
        dcp__buf_reset(&g->bytes);
    }
    return *status == DCP_OK;
}

static void drop(generation *g)
{
    dcp__buf_reset(&g->bytes);
    dcp__object_reset(&g->object);
}

/* Neither tensors, whose views are given storages of their own, nor opaque values, whose names may need another spelling; and not
 * so much shared that *visits, counted in each place where a value stands, do not suffice. */
static bool is_plain(const dcp_value *v, int *visits)
{
    dcp_kind kind = dcp_value_kind(v);
    bool plain = --*visits > 0 && kind != DCP_KIND_TENSOR && kind != DCP_KIND_OPAQUE;
    for (size_t i = 0; plain && i < dcp_value_count(v); i++) {
        plain = is_plain(dcp_value_at(v, i), visits);
    }
    return plain;
}

/* What the writer made is decoded, unless the detours of the protocol (a set is a call with a list) nest it too deep. */
static bool take_written(generation *g, const dcp__buf *bytes)
{
    dcp_status status;
    bool ok = take(g, bytes->data, bytes->len, &status);
    if (!ok && status != DCP_LIMIT) {
        abort();
    }
    return ok;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    generation first, second, third;
    dcp_status status;
    int visits = 100000;
    if (size > 1 << 16 || !take(&first, data, size, &status)) {
        return 0;
    }
    if (take_written(&second, &first.bytes)) {
        if (size < 256 && is_plain(first.object.value, &visits) && !dcp_value_equal(first.object.value, second.object.value)) {
            abort();
        }
        if (take_written(&third, &second.bytes)) {
            if (second.bytes.len != third.bytes.len || memcmp(second.bytes.data, third.bytes.data, third.bytes.len) != 0) {
                abort();
            }
            drop(&third);
        }
        drop(&second);
    }
    drop(&first);
    return 0;
}
