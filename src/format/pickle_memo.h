/* Which entries of a pickle's memo are ever fetched, and the values of those. A memo of millions of entries, nearly all of them
 * never fetched, is held as one bit each. */
#ifndef DCP_FORMAT_PICKLE_MEMO_H
#define DCP_FORMAT_PICKLE_MEMO_H

#include "base/context.h"
#include "base/source.h"

typedef struct dcp__pmemo {
    dcp_context *ctx;
    uint64_t n;     /* entries */
    uint64_t *bits; /* fetched ones */
    size_t n_words;
    uint32_t *ranks;  /* [word]: bits set before it */
    uint64_t *values; /* of the fetched ones, 0: not set yet */
    size_t n_values;
} dcp__pmemo;

void dcp__pmemo_init(dcp__pmemo *memo, dcp_context *ctx);
void dcp__pmemo_reset(dcp__pmemo *memo);

/* First pass: walks the opcodes of the pickle at `offset` of src and notes every fetch. Checks that all opcodes are known, and
 * that lengths lie within the source. *end is the position behind STOP. */
dcp_status dcp__pmemo_survey(dcp__pmemo *memo, const dcp__source *src, uint64_t offset, uint64_t *end, dcp_error *err);

/* Second pass. */
static inline bool dcp__pmemo_is_fetched(const dcp__pmemo *memo, uint64_t i)
{
    return i < memo->n && i / 64 < memo->n_words && (memo->bits[i / 64] >> (i % 64) & 1);
}
/* Where entry i, a fetched one, is kept. */
static inline uint64_t *dcp__pmemo_slot(const dcp__pmemo *memo, uint64_t i)
{
    uint64_t below = memo->bits[i / 64] & (((uint64_t)1 << (i % 64)) - 1);
    return &memo->values[memo->ranks[i / 64] + (uint32_t)__builtin_popcountll(below)];
}

#endif
