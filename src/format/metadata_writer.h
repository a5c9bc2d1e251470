/* The metadata pickle in the form that every release from 2.1 on reads, or newer ones on request (formats.md 2.7, 11). */
#ifndef DCP_FORMAT_METADATA_WRITER_H
#define DCP_FORMAT_METADATA_WRITER_H

#include "base/buf.h"
#include "format/metadata.h"

typedef struct dcp__metadata_write_opts {
    int target_release; /* oldest PyTorch to serve, major * 100 + minor: 203 and later get the newer class of TensorProperties,
                           204 and later StorageMeta from own.save_id and own.checkpoint_id, or the metadata's. 0: the form that
                           all releases read, and whatever dtypes and transforms there are. */
    bool with_own;      /* our own field (m->own, if present) and the trailer */
} dcp__metadata_write_opts;

/* Appends the whole file to out. Chunk hints are positions among the entry's chunks; transforms, paths, shapes, version as in m;
 * an entry without a path stands at the root under its name. Dicts have the order of m's entries and storages. On an error, out's
 * length is unchanged. Errors: ARG (also: two entries of one name, raw storages), NOMEM, LIMIT, UNSUPPORTED (a dtype or transform
 * is newer than the target; all are named as far as the message holds them). */
dcp_status dcp__metadata_write(const dcp__metadata *m, const dcp__metadata_write_opts *opts, dcp__buf *out, dcp_error *err);

/* The check alone. */
dcp_status dcp__metadata_check_target(const dcp__metadata *m, int target_release, dcp_error *err);

#endif
