/* Parts of the messages between ranks and owners that both sides know. */
#ifndef DCP_PLAN_PLAN_MAIL_H
#define DCP_PLAN_PLAN_MAIL_H

#include "plan/local_plan.h"

/* Flags below the version in the first byte of a plan message. */
enum { DCP__PLAN_HAS_NAMES = 1, DCP__PLAN_HAS_CONTENT = 2 };

/* An empty set of messages. */
dcp_status dcp__mail_init(dcp__mail *m, dcp_context *ctx, int world, dcp_error *err);
/* Hands it over; NOMEM, and nothing is left, if a part of it was lost. */
dcp_status dcp__mail_finish(dcp__mail *m, dcp__mail *out, dcp_error *err);

/* Where a chunk is; *end is the end of the one before. */
static inline void dcp__put_placed(dcp__buf *b, const dcp__placed *p, uint64_t *end)
{
    dcp__put_varint(b, (uint64_t)p->file << 1 | p->is_transformed);
    dcp__put_delta(b, p->offset, *end);
    dcp__put_varint(b, p->length);
    *end = p->offset + p->length;
}

static inline void dcp__get_placed(dcp__wire *w, dcp__placed *p, uint64_t *end)
{
    uint64_t head = dcp__get_bounded(w, (uint64_t)UINT32_MAX << 1 | 1);
    p->file = (uint32_t)(head >> 1);
    p->is_transformed = head & 1;
    p->offset = dcp__get_delta(w, *end);
    p->length = dcp__get_varint(w);
    if (p->offset > INT64_MAX || p->length > INT64_MAX) {
        dcp__wire_spoil(w);
    }
    *end = p->offset + p->length;
}

#endif
