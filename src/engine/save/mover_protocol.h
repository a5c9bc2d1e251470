/* What a process and its dcp-writer say to each other, over a socket of packets on the writer's descriptor 0. Both are of one
 * build, on one machine. */
#ifndef DCP_ENGINE_MOVER_PROTOCOL_H
#define DCP_ENGINE_MOVER_PROTOCOL_H

#include <stdint.h>

#define DCP__MOVER_VERSION 1u

/* Comes with two descriptors: shared memory to read from, and the file to write to. */
typedef struct dcp__mover_request {
    uint32_t version;
    uint32_t unused;
    uint64_t memory_offset, file_offset, bytes;
} dcp__mover_request;

typedef struct dcp__mover_answer {
    int32_t sys_errno; /* 0: all bytes are written */
    uint32_t unused;
    uint64_t written;
} dcp__mover_answer;

#endif
