/* torch.save archives: their bytes around the payload, from a template (formats.md 3.2 to 3.7). A DCP tensor record is an archive
 * with one storage, an object record usually one without. Everything but the CRCs of payloads is known before they are read, so
 * that the place of every byte is fixed early and one layout serves any number of equal records. */
#ifndef DCP_FORMAT_ARCHIVE_WRITER_H
#define DCP_FORMAT_ARCHIVE_WRITER_H

#include "base/context.h"

#define DCP__ARCHIVE_ALIGNMENT 64
#define DCP__ARCHIVE_MAX_ALIGNMENT 32768 /* the padding must fit a zip extra field */
#define DCP__ARCHIVE_MAX_PREFIX 255

typedef struct dcp__archive_opts {
    const char *prefix; /* directory inside the zip: "archive", or the base name of a torch.save file; 1 to 255 bytes */
    bool is_old_form;   /* as PyTorch up to 2.6: without .format_version and .storage_alignment */
    uint32_t alignment; /* of every member's data: 64, or a larger power of two up to 32768, as .storage_alignment then says */
} dcp__archive_opts;

typedef struct dcp__archive_layout dcp__archive_layout;

/* Lays out an archive: data.pkl's content (borrowed until freed) and n storages of storage_bytes[i]. One allocation of about 2
 * KiB for a tensor record. Errors: NOMEM, ARG (options), LIMIT (size overflows). */
dcp_status dcp__archive_layout_create(dcp_context *ctx, const dcp__archive_opts *opts, const void *pickle, size_t pickle_len,
                                      const uint64_t *storage_bytes, size_t n, dcp__archive_layout **out, dcp_error *err);
/* An archive that somebody else has finished: one piece, the bytes as they are (borrowed until freed). Errors: NOMEM. */
dcp_status dcp__archive_layout_finished(dcp_context *ctx, const void *bytes, size_t len, dcp__archive_layout **out,
                                        dcp_error *err);
void dcp__archive_layout_free(dcp__archive_layout *l); /* NULL is allowed */
uint64_t dcp__archive_length(const dcp__archive_layout *l);
/* Offset of storage i's bytes from the start of the archive. */
uint64_t dcp__archive_storage_offset(const dcp__archive_layout *l, size_t i);
/* Piece k is what stands before storage k (k = n: the end of the archive). It can be written once crcs[0 .. k-1] are known
 * (k = n: all of them); the CRC of an empty storage is 0. Any number of threads may take pieces of one layout. */
size_t dcp__archive_piece_bytes(const dcp__archive_layout *l, size_t k);
void dcp__archive_piece(const dcp__archive_layout *l, size_t k, const uint32_t *crcs, uint8_t *out);

#endif
