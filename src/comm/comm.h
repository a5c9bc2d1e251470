/* What stands behind the base of a communicator: who is using it, why it broke, and memory to report a failure with. */
#ifndef DCP_COMM_COMM_H
#define DCP_COMM_COMM_H

#include "base/context.h"
#include "dcp/backend.h"

/* How one failing rank tells the others. All ranks run the same build, so it travels as it is. */
typedef struct dcp__comm_cause {
    int32_t sys_errno;
    int64_t native_code;
    uint64_t offset;
    char message[DCP_ERROR_MESSAGE_BYTES];
} dcp__comm_cause;

/* What each rank brings to an agreement. */
typedef struct dcp__comm_word {
    int32_t status;
    char phase[12]; /* cut, not terminated if full */
    uint64_t value;
} dcp__comm_word;

#define DCP__CAUSES_PER_ROUND 16

/* Taken when the communicator is made, so that an agreement never lacks memory. Used while the communicator is entered. */
typedef struct dcp__comm_reserve {
    dcp_error broken_by;   /* the first failure; written before the communicator is marked as broken */
    dcp__comm_word *words; /* size entries each */
    dcp_comm_send *send;
    dcp_comm_recv *recv;
    uint64_t *sizes; /* two times size entries: to send, received */
    dcp__comm_cause mine, causes[DCP__CAUSES_PER_ROUND];
} dcp__comm_reserve;

/* The deadline that 0 stands for. */
static inline uint32_t dcp__comm_timeout(const dcp_comm *comm, uint32_t timeout_ms)
{
    return timeout_ms ? timeout_ms : comm->timeout_ms;
}

/* Claims the communicator for one or several operations of the table. STATE if another thread has it or it is broken. */
dcp_status dcp__comm_enter(dcp_comm *comm, dcp_error *err);
/* Gives it back. `status` not OK breaks it, *err saying why. Returns status. */
dcp_status dcp__comm_leave(dcp_comm *comm, dcp_status status, const dcp_error *err);

#endif
