/* small.h - a checkpoint of three records, made here byte by byte: the tensor "w" of 4 x 3 in two chunks of rows, one of them in
 * a file below a folder, and the object "step", 7. The metadata is that of support/metadata_asm.h. */
#ifndef TESTS_CORRUPT_SMALL_H
#define TESTS_CORRUPT_SMALL_H

#include "support/memory_copy.h"
#include "support/metadata_asm.h"
#include "support/zip_builder.h"

#define SMALL_FIRST "__0_0.distcp"      /* w's first chunk at 0, 900 bytes; "step" at 2000 */
#define SMALL_SECOND "sub/__1_0.distcp" /* w's second chunk at 1000, 900 bytes */

/* The pickle of a plain tensor of rank 2. */
typedef struct small_tensor {
    const char *module, *fn, *storage; /* NULL: torch._utils, _rebuild_tensor_v2, FloatStorage */
    bool is_neg;
    int64_t elems, storage_offset, sizes[2], strides[2];
} small_tensor;

void small_tensor_pickle(dcp__buf *b, const small_tensor *t);
/* A zip archive of data.pkl, data/0 (data NULL: none) and version, filled up behind its end. */
zb_zip small_archive(const dcp__buf *pickle, const void *data, size_t data_bytes, size_t bytes);

/* The good records and the metadata of that form; its record_length must be 900. */
void small_put(dcp_storage *st, const md_form *form);
void small_put_metadata(dcp_storage *st, const md_form *form);
/* Another pickle as the record of "step". Its good one has the usual 864 bytes of metadata_asm.h; with SMALL_STEP_BYTES as
 * step_length there is more room. */
void small_put_step(dcp_storage *st, const dcp__buf *pickle);
/* Writes bytes at an offset of a file; it grows if need be. */
void small_patch(dcp_storage *st, const char *name, uint64_t offset, const void *bytes, size_t n);

#define SMALL_STEP_BYTES 3000
#define SMALL_FORM                                                                                                               \
    {                                                                                                                            \
        .record_length = 900                                                                                                     \
    }

#endif
