/* Values from pickles. */
#include "base/context.h"
#include "format/object.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp__source src = dcp__source_memory(data, size);
    dcp__object o;
    if (dcp__object_read(dcp__context(NULL), &src, 0, &o, NULL) == DCP_OK) {
        if (o.end > size || !o.value) {
            __builtin_trap();
        }
        dcp__object_reset(&o);
    }
    return 0;
}
