/* A record that several ranks want, read once from its beginning to its end: its parts follow each other through the bundles of
 * the rank that reads it. So a compressed one is decoded once, and the checksum comes along with the last part. */
#ifndef DCP_ENGINE_SHARE_RECORD_H
#define DCP_ENGINE_SHARE_RECORD_H

#include "engine/load/share_cells.h"

typedef struct dcp__record_reader {
    dcp_checkpoint *ck;
    const dcp__chunk *chunk; /* NULL: no record is open */
    dcp__located located;
    bool takes_crc; /* of what is read; otherwise there is nothing to compare, or it has been done */
    uint32_t crc;
    uint64_t left; /* bytes */
} dcp__record_reader;

/* Reads the next n parts of a record, all of one, to `to`, one behind the other. The first part opens the record, the last one
 * compares its CRC, if the checkpoint's are to be compared, and closes it. Errors are those of a read. */
dcp_status dcp__record_read(dcp__record_reader *r, dcp__cell *const *parts, size_t n, uint8_t *to, dcp_error *err);
/* Closes a record that has not come to its end. */
void dcp__record_reader_reset(dcp__record_reader *r);

#endif
