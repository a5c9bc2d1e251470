/* The JSON texts that stand as strings in a safetensors file's __metadata__: DCP's sharding info and libdcp's own facts. Shared
 * by the files of the safetensors reader. */
#ifndef DCP_FORMAT_SAFETENSORS_TEXTS_H
#define DCP_FORMAT_SAFETENSORS_TEXTS_H

#include "format/safetensors.h"

#define DCP__ST_LENGTH_BYTES 8 /* in front of the header */
/* Faults of what the header says are reported at its first byte, those of its syntax where they are. */
#define DCP__ST_FAULT(err, code, ...) dcp__fail_at(err, code, DCP__ST_LENGTH_BYTES, __VA_ARGS__)

/* Both need the tensors and by_name. Errors: FORMAT, LIMIT, NOMEM. */
dcp_status dcp__st_read_sharding(dcp__safetensors *s, dcp_str text, dcp_error *err);
dcp_status dcp__st_read_own_facts(dcp__safetensors *s, dcp_str text, dcp_error *err);

#endif
