/* Names to small integers. Keys are borrowed and must outlive the map. */
#ifndef DCP_BASE_STRMAP_H
#define DCP_BASE_STRMAP_H

#include "base/context.h"

typedef struct dcp__strmap {
    dcp_context *ctx;
    struct dcp__strmap_slot *slots;
    size_t n, n_slots; /* n_slots is 0 or a power of two */
} dcp__strmap;

void dcp__strmap_init(dcp__strmap *m, dcp_context *ctx);
void dcp__strmap_reset(dcp__strmap *m);
/* False if absent. */
bool dcp__strmap_get(const dcp__strmap *m, dcp_str key, uint64_t *value);
/* Adds key -> value. If it is present, nothing changes and *existing (may be NULL) receives its value, else UINT64_MAX.
 * Errors: NOMEM. */
dcp_status dcp__strmap_add(dcp__strmap *m, dcp_str key, uint64_t value, uint64_t *existing, dcp_error *err);

#endif
