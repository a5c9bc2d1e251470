/* A safetensors file. */
#include <stdlib.h>

#include "format/safetensors.h"

static void check(const dcp__safetensors *s, size_t size)
{
    uint64_t end = s->header_bytes;
    for (size_t i = 0; i < s->n_tensors; i++) {
        const dcp__st_tensor *t = &s->tensors[i];
        uint64_t at = UINT64_MAX;
        if (t->offset != end || !dcp__strmap_get(&s->by_name, t->name, &at) || at != i) {
            abort();
        }
        end += t->bytes;
    }
    if (end != s->end || end > size) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp__source src = dcp__source_memory(data, size);
    for (int to_end = 0; to_end < 2; to_end++) {
        dcp__safetensors s;
        if (dcp__safetensors_open(dcp__context(NULL), &src, to_end, &s, NULL) == DCP_OK) {
            check(&s, size);
            dcp__safetensors_reset(&s);
        }
    }
    return 0;
}
