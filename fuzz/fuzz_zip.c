/* Zip archives: directory, local headers, every member. */
#include "format/zip.h"

#define MAX_MEMBER_BYTES 65536

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp_context *ctx = dcp__context(NULL);
    dcp__source src = dcp__source_memory(data, size);
    dcp__zip z;
    if (dcp__zip_open(ctx, &src, true, &z, NULL)) {
        return 0;
    }
    for (size_t i = 0; i < z.n_members; i++) {
        uint8_t *bytes;
        size_t n;
        if (dcp__zip_find(&z, z.members[i].name.ptr) == NULL && strlen(z.members[i].name.ptr) == z.members[i].name.len) {
            __builtin_trap();
        }
        if (!dcp__zip_locate(&src, &z.members[i], NULL) &&
            !dcp__zip_read(ctx, &src, &z.members[i], MAX_MEMBER_BYTES, &bytes, &n, NULL)) {
            dcp__free(ctx, bytes);
        }
    }
    dcp__zip_reset(&z);
    return 0;
}
