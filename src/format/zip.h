/* The zip archives of torch.save (formats.md 3.1 to 3.4): directory reading only, zip64 included. */
#ifndef DCP_FORMAT_ZIP_H
#define DCP_FORMAT_ZIP_H

#include "base/source.h"

typedef struct dcp__zip_member {
    dcp_str name;         /* without the archive's directory prefix */
    uint64_t header;      /* offset of its local header */
    uint64_t data;        /* offset of its bytes, taken from the local header */
    uint64_t bytes;       /* as stored */
    uint64_t full_bytes;  /* after inflating */
    uint32_t crc;         /* of the full bytes; 0 with data: not computed */
    uint16_t method;      /* 0 stored, 8 deflated */
} dcp__zip_member;

typedef struct dcp__zip {
    dcp_context *ctx;
    dcp__zip_member *members; /* in the directory's order */
    size_t n_members;
    char *names;
    uint64_t directory;       /* offset of the central directory */
} dcp__zip;

/* Reads the directory at the end of src (up to 64 KiB of trailing bytes are allowed) and the local headers. Checks that members
 * lie before the directory and do not overlap, that names are unique, and that all have one directory prefix. When `lazy_headers`
 * is set, `data` is not known (UINT64_MAX) until dcp__zip_locate. Errors: FORMAT (offset), LIMIT, NOMEM, the source's. */
dcp_status dcp__zip_open(dcp_context *ctx, const dcp__source *src, bool lazy_headers, dcp__zip *out, dcp_error *err);
dcp_status dcp__zip_locate(const dcp__source *src, dcp__zip_member *m, dcp_error *err);
void dcp__zip_reset(dcp__zip *z);
/* The member of exactly that name, NULL if absent. */
dcp__zip_member *dcp__zip_find(const dcp__zip *z, const char *name);
/* Reads (and inflates) a member whole; at most max_bytes. *out is allocated with the context, NUL-terminated. */
dcp_status dcp__zip_read(dcp_context *ctx, const dcp__source *src, const dcp__zip_member *m, uint64_t max_bytes, uint8_t **out,
                         size_t *out_len, dcp_error *err);

#endif
