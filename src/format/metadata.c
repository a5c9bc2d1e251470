#include "format/metadata.h"

dcp_status dcp__metadata_create(dcp_context *ctx, dcp__metadata **out, dcp_error *err)
{
    dcp__metadata *m = dcp__calloc(ctx, 1, sizeof *m);
    if (!m) {
        return dcp__nomem(err);
    }
    m->ctx = ctx;
    m->own.rank = -1;
    dcp__arena_init(&m->arena, ctx, ctx->limits.max_parse_bytes);
    dcp__strmap_init(&m->by_fqn, ctx);
    m->transforms = dcp__alloc(ctx, sizeof *m->transforms);
    if (!m->transforms) {
        dcp__free(ctx, m);
        return dcp__nomem(err);
    }
    m->transforms[0] = (dcp_str){"", 0};
    m->n_transforms = 1;
    *out = m;
    return DCP_OK;
}

void dcp__metadata_free(dcp__metadata *m)
{
    if (!m) {
        return;
    }
    dcp_context *ctx = m->ctx;
    dcp__free(ctx, m->entries);
    dcp__free(ctx, m->chunks);
    dcp__free(ctx, m->storages);
    dcp__free(ctx, m->files);
    dcp__free(ctx, m->transforms);
    dcp__strmap_reset(&m->by_fqn);
    dcp__arena_reset(&m->arena);
    dcp__free(ctx, m);
}
