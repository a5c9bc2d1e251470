/* What a pickle writer has put into the memo, so that it is fetched when it comes again. */
#ifndef DCP_FORMAT_WRITE_MEMO_H
#define DCP_FORMAT_WRITE_MEMO_H

#include "base/context.h"

/* One text (b.ptr NULL) or two, compared by content, or a pointer, compared as such. Texts are borrowed. */
typedef struct dcp__wmemo_key {
    dcp_str a, b;
    const void *identity; /* NULL: the texts count */
} dcp__wmemo_key;

typedef struct dcp__wmemo {
    dcp_context *ctx;
    struct dcp__wmemo_slot *slots;
    size_t n, n_slots; /* n_slots is 0 or a power of two */
} dcp__wmemo;

void dcp__wmemo_init(dcp__wmemo *m, dcp_context *ctx);
void dcp__wmemo_reset(dcp__wmemo *m);
bool dcp__wmemo_get(const dcp__wmemo *m, const dcp__wmemo_key *key, uint32_t *index);
/* The key must be new. False: out of memory. */
bool dcp__wmemo_put(dcp__wmemo *m, const dcp__wmemo_key *key, uint32_t index);

#endif
