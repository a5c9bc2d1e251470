/* Fields that this release does not know are kept for those who do: a copy has them again. Their values are written out when they
 * are read, as opcodes that need no memo, so that they depend on nothing else. */
#ifndef DCP_FORMAT_METADATA_EXTRA_H
#define DCP_FORMAT_METADATA_EXTRA_H

#include "base/arena.h"
#include "format/metadata.h"
#include "format/pickle.h"

/* Takes of n keys and values in turn those whose key is a string of which is_known does not know. Only plain data is kept: None,
 * bool, int, float, str, bytes, tuple, list, set, frozenset and dict of such; a field with anything else is passed over, and so
 * is one that shares its parts so often that it would be larger than max_bytes. Errors: NOMEM, LIMIT. */
dcp_status dcp__mextras_take(dcp__arena *arena, const dcp__pv *pairs, size_t n, bool (*is_known)(dcp__pv key), uint64_t max_bytes,
                             dcp__extras *out, dcp_error *err);

#endif
