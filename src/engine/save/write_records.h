/* Writing laid-out records. */
#ifndef DCP_ENGINE_WRITE_RECORDS_H
#define DCP_ENGINE_WRITE_RECORDS_H

#include "engine/save/session.h"
#include "plan/layout.h"

/* Writes all records of a layout to its open files and computes their digests: digests[record index], of the whole record as
 * stored. Checksums are taken of cache-sized blocks right before they are written; contiguous host memory is written in place.
 * Errors name the item. */
dcp_status dcp__write_records(dcp_save_session *s, const dcp__layout *l, dcp_file *const *files, dcp__digest *digests,
                              dcp_error *err);
/* The same through a stream transform: records follow each other, offsets and lengths of the layout are filled in. */
dcp_status dcp__write_transformed(dcp_save_session *s, dcp__layout *l, dcp_file *const *files, dcp__digest *digests,
                                  dcp_error *err);

/* Bytes of an item's row-major elements from `offset` on: a view of memory where they lie so, else through buf (n bytes). */
dcp_status dcp__item_bytes(const dcp_write_item *item, uint64_t offset, size_t n, void *buf, const uint8_t **out, dcp_error *err);
/* The same for who takes the CRC-32 of all of them, front to back, and hands it to dcp__item_compare after the last: what comes
 * from another checkpoint is not summed twice. */
dcp_status dcp__item_bytes_summed(const dcp_write_item *item, uint64_t offset, size_t n, void *buf, const uint8_t **out,
                                  dcp_error *err);
/* CHECKSUM if the item comes from a record that says another one. */
dcp_status dcp__item_compare(const dcp_write_item *item, uint32_t crc, dcp_error *err);

#endif
