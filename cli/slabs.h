/* slabs.h - a slice of a tensor, piece by piece in bounded memory. */
#ifndef DCP_CLI_SLABS_H
#define DCP_CLI_SLABS_H

#include "slice.h"

#include <dcp/checkpoint.h>

/* Receives the next n elements of the slice in row-major order. False stops the reading. */
typedef bool (*slab_fn)(void *user, const void *elems, size_t n);

/* Reads the slice in pieces of at most budget_bytes (one element at least). Errors: as dcp_read; CANCELED if fn says so. */
dcp_status slabs_read(dcp_checkpoint *ck, const dcp_item *item, const slice *s, uint64_t budget_bytes, slab_fn fn, void *user,
                      dcp_error *err);

#endif
