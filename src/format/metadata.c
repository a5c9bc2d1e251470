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

dcp_status dcp__metadata_reserve(dcp__metadata *m, size_t entries, size_t chunks, size_t storages, size_t files,
                                 size_t transforms, dcp_error *err)
{
    m->entries = dcp__calloc(m->ctx, entries, sizeof *m->entries);
    m->chunks = dcp__calloc(m->ctx, chunks, sizeof *m->chunks);
    m->storages = dcp__calloc(m->ctx, storages, sizeof *m->storages);
    m->files = dcp__calloc(m->ctx, files, sizeof *m->files);
    dcp_str *list = dcp__calloc(m->ctx, transforms + 1, sizeof *list);
    if (list) {
        list[0] = m->transforms[0];
        dcp__free(m->ctx, m->transforms);
        m->transforms = list;
    }
    return m->entries && m->chunks && m->storages && m->files && list ? DCP_OK : dcp__nomem(err);
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
