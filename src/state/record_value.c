/* Finished records: what another program has serialised, kept to be saved as it is. */
#include "state/node.h"

dcp_status dcp_record_create(dcp_context *ctx, const void *bytes, size_t len, dcp_value **out, dcp_error *err)
{
    if (!bytes && len) {
        return dcp__fail(err, DCP_ARG, "record: %zu bytes at no address", len);
    }
    dcp__record_node *n = dcp__node_alloc(dcp__context(ctx), DCP_KIND_RECORD, sizeof *n);
    if (!n) {
        return dcp__nomem(err);
    }
    n->bytes = (dcp_str){bytes, len};
    *out = &n->head;
    return DCP_OK;
}
