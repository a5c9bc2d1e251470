/* Memory that a caller lends to a save and wants back as soon as it has been read. */
#ifndef DCP_ENGINE_LENDING_H
#define DCP_ENGINE_LENDING_H

#include "dcp/save.h"
#include "plan/layout.h"

/* Empty (all zero) where nothing is lent. */
typedef struct dcp__lent {
    const dcp_lending *lending; /* the caller's */
    bool *items;                /* [item that this rank writes]: its tensor is lent */
    bool *records;              /* [record]: something in it is lent */
    size_t n_left;              /* lent records that are not written yet; changed by atomic operations */
} dcp__lent;

/* Asks for the items' tensors; before those on devices are turned into something that is pulled. lending NULL: nothing is lent.
 */
dcp_status dcp__lent_ask(dcp_context *ctx, const dcp_lending *lending, const dcp_write_item *items, size_t n, dcp__lent *out,
                         dcp_error *err);
/* Asks for tensors inside objects, and finds the records; all is returned at once if there are none. */
dcp_status dcp__lent_find(dcp__lent *lent, const dcp__layout *l, size_t n_items, dcp_error *err);
bool dcp__lent_has(const dcp__lent *lent, size_t record);
/* The record has been written. From any thread. */
void dcp__lent_wrote(dcp__lent *lent, size_t record);
void dcp__lent_reset(dcp_context *ctx, dcp__lent *lent);

#endif
