/* Records and torch.save files: from bytes to "where the elements are" (formats.md 3.7, 3.8, 4). */
#ifndef DCP_FORMAT_RECORD_H
#define DCP_FORMAT_RECORD_H

#include "base/source.h"
#include "format/object.h"
#include "format/zip.h"

/* One storage of an archive. */
typedef struct dcp__storage_span {
    uint64_t offset;     /* of its bytes in the source */
    uint64_t bytes;      /* as stored */
    uint64_t full_bytes; /* = bytes unless deflated */
    uint32_t crc;
    bool has_crc;
    bool is_deflated;
} dcp__storage_span;

/* A parsed archive: zip or legacy. */
typedef struct dcp__archive {
    dcp_context *ctx;
    bool is_legacy;
    bool is_big_endian;
    dcp__zip zip;             /* zip form */
    dcp__object object;       /* the pickle's value, tensors lazy */
    dcp__storage_span *spans; /* one for each of object.storages */
} dcp__archive;

/* Opens a torch.save archive of either form that fills src. Errors: FORMAT, LIMIT, UNSUPPORTED, NOMEM, the source's. */
dcp_status dcp__archive_open(dcp_context *ctx, const dcp__source *src, dcp__archive *out, dcp_error *err);
void dcp__archive_reset(dcp__archive *a);

/* Where the elements of one tensor are. */
typedef struct dcp__payload {
    dcp_dtype dtype;
    int ndim;
    int64_t sizes[DCP_MAX_NDIM], strides[DCP_MAX_NDIM]; /* elements */
    uint64_t offset;                                    /* of element 0 of the view, in the source */
    uint64_t span_bytes;                                /* from there to the end of the last element */
    dcp__storage_span storage;                          /* the whole storage, for CRCs and deflated ones */
    bool is_big_endian, is_conj, is_neg;
} dcp__payload;

/* Payload of a lazy tensor of an opened archive; checks 3.8. v is a tensor value of a->object. */
dcp_status dcp__archive_payload(const dcp__archive *a, const dcp_value *v, dcp__payload *out, dcp_error *err);

/* Opens a tensor record and yields its only tensor. Reads the head and the end of src, not the payload. Fast path: records of
 * PyTorch's own form. Refuses everything but a plain tensor (wrappers of 3.7 are taken off). */
dcp_status dcp__record_payload(dcp_context *ctx, const dcp__source *src, dcp__payload *out, dcp_error *err);

typedef enum dcp__sniff { DCP__IS_ZIP = 1, DCP__IS_LEGACY, DCP__IS_ZSTD, DCP__IS_SAFETENSORS, DCP__IS_UNKNOWN } dcp__sniff;
/* What the first bytes (16 are enough; total is the size of the source) look like. */
dcp__sniff dcp__sniff_bytes(const void *bytes, size_t n, uint64_t total);

#endif
