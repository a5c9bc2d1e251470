/* The zip archives of torch.save (formats.md 3.1 to 3.4): directory reading only, zip64 included. */
#ifndef DCP_FORMAT_ZIP_H
#define DCP_FORMAT_ZIP_H

#include "base/source.h"
#include "base/strmap.h"

#define DCP__ZIP_STORED 0
#define DCP__ZIP_DEFLATED 8
#define DCP__ZIP_UNKNOWN UINT64_MAX /* `data` of a member that was not located yet */

typedef struct dcp__zip_member {
    dcp_str name;        /* without the archive's directory prefix */
    uint64_t header;     /* offset of its local header */
    uint64_t data;       /* offset of its bytes, taken from the local header */
    uint64_t bytes;      /* as stored */
    uint64_t full_bytes; /* after inflating */
    uint64_t next;       /* offset of what follows: the next local header, or the directory */
    uint32_t crc;        /* of the full bytes; 0 with data: not computed */
    uint16_t method;     /* DCP__ZIP_STORED or DCP__ZIP_DEFLATED */
    uint16_t prefix_len; /* bytes of the directory prefix, which stands right before name.ptr */
} dcp__zip_member;

typedef struct dcp__zip {
    dcp_context *ctx;
    dcp__zip_member *members; /* in the directory's order */
    size_t n_members;
    char *names;
    dcp__strmap by_name; /* archives of many members only */
    uint64_t directory;  /* offset of the central directory */
} dcp__zip;

/* Reads the directory at the end of src (up to 64 KiB of trailing bytes are allowed) and the local headers. Checks that members
 * lie before the directory and do not overlap, that names are unique, and that all have one directory prefix. When `lazy_headers`
 * is set, `data` is not known (DCP__ZIP_UNKNOWN) until dcp__zip_locate. Errors: FORMAT (offset), UNSUPPORTED (encryption, other
 * methods), NOMEM, the source's. */
dcp_status dcp__zip_open(dcp_context *ctx, const dcp__source *src, bool lazy_headers, dcp__zip *out, dcp_error *err);
/* Reads the local header: sets `data`, and checks that it agrees with the directory. */
dcp_status dcp__zip_locate(const dcp__source *src, dcp__zip_member *m, dcp_error *err);
void dcp__zip_reset(dcp__zip *z);
/* The member of exactly that name, NULL if absent. */
dcp__zip_member *dcp__zip_find(const dcp__zip *z, const char *name);
/* Reads (and inflates) a located member whole; at most max_bytes. *out is allocated with the context, NUL-terminated. Only data,
 * bytes, full_bytes, crc and method of m are used. Errors: LIMIT (longer), CHECKSUM (crc is not 0 and wrong), FORMAT, NOMEM,
 * the source's. */
dcp_status dcp__zip_read(dcp_context *ctx, const dcp__source *src, const dcp__zip_member *m, uint64_t max_bytes, uint8_t **out,
                         size_t *out_len, dcp_error *err);

#endif
