#include "format/pickle.h"

#include "format/pickle_machine.h"

uint64_t dcp__pmachine_position(const dcp__pmachine *m)
{
    return m->position;
}

dcp__arena *dcp__pmachine_arena(dcp__pmachine *m)
{
    return m->arena;
}

/* Second pass, with what the first one found in m->memo. */
static dcp_status build(dcp__pmachine *m, const dcp__source *src, uint64_t offset, dcp__pickle *out, dcp_error *err)
{
    const uint8_t *p;
    dcp_status status = dcp__pwindow_open(&m->window, m->ctx, src, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__pwindow_seek(&m->window, offset, &p, err);
    if (status == DCP_OK) {
        status = dcp__pmachine_run(m, p, &out->root, &out->end, err);
    }
    out->protocol = m->protocol;
    dcp__pwindow_close(&m->window);
    dcp__free(m->ctx, m->stack);
    dcp__free(m->ctx, m->starts);
    dcp__free(m->ctx, m->marks);
    return status;
}

dcp_status dcp__pickle_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, const dcp__pickle_hooks *hooks,
                            dcp__pickle *out, dcp_error *err)
{
    static const dcp__pickle_hooks none = {NULL, NULL, NULL};
    dcp__pickle made = {.root = 0};
    dcp__pmachine m = {.ctx = ctx, .arena = &made.arena, .hooks = hooks ? hooks : &none};
    if (offset > src->size) {
        return dcp__fail_at(err, DCP_FORMAT, offset, "pickle: begins behind the end at %llu", (unsigned long long)src->size);
    }
    dcp__arena_init(&made.arena, ctx, ctx->limits.max_parse_bytes);
    dcp__pmemo_init(&m.memo, ctx);
    uint64_t end;
    dcp_status status = dcp__pmemo_survey(&m.memo, src, offset, &end, err);
    if (status == DCP_OK) {
        status = build(&m, src, offset, &made, err);
    }
    if (status == DCP_OK) {
        status = dcp__pickle_check(ctx, made.root, ctx->limits.max_depth, offset, err);
    }
    dcp__pmemo_reset(&m.memo);
    if (status != DCP_OK) {
        dcp__arena_reset(&made.arena);
        return status;
    }
    *out = made;
    return DCP_OK;
}

void dcp__pickle_reset(dcp__pickle *p)
{
    dcp__arena_reset(&p->arena);
}
