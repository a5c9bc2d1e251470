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

dcp__pv dcp__pmachine_below(const dcp__pmachine *m, size_t n)
{
    return n < m->top - m->floor ? m->stack[m->top - 1 - n] : 0;
}

dcp__pv dcp__pmachine_stacked(const dcp__pmachine *m, size_t n)
{
    return n < m->top ? m->stack[m->top - 1 - n] : 0;
}

dcp_status dcp__pmachine_restart(dcp__pmachine *m, dcp_error *err)
{
    m->must_restart = true;
    return dcp__fail_at(err, DCP_INTERNAL, m->position, "pickle: a value is needed that was given up");
}

static dcp_status run(dcp__pmachine *m, const dcp__source *src, uint64_t offset, dcp__pickle *out, dcp_error *err)
{
    const uint8_t *p;
    dcp__arena_init(&m->memo_arena, m->ctx, m->ctx->limits.max_parse_bytes);
    dcp_status status = dcp__pwindow_open(&m->window, m->ctx, src, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__pwindow_seek(&m->window, offset, &p, err);
    if (status == DCP_OK) {
        status = dcp__pmachine_run(m, p, &out->root, &out->end, err);
    }
    if (status != DCP_OK && !m->must_restart && m->hooks->failed) {
        m->hooks->failed(m->hooks->user, m, err);
    }
    out->protocol = m->protocol;
    dcp__pwindow_close(&m->window);
    dcp__arena_reset(&m->memo_arena);
    dcp__free(m->ctx, m->pieces);
    dcp__free(m->ctx, m->stack);
    dcp__free(m->ctx, m->starts);
    dcp__free(m->ctx, m->marks);
    return status;
}

/* One reading. *again: it has to be repeated, keeping all. */
static dcp_status read_once(dcp_context *ctx, const dcp__source *src, uint64_t offset, const dcp__pickle_hooks *hooks,
                            bool keeps_all, bool *again, dcp__pickle *out, dcp_error *err)
{
    dcp__pmachine m = {.ctx = ctx, .arena = &out->arena, .hooks = hooks, .keeps_all = keeps_all};
    dcp__arena_init(&out->arena, ctx, ctx->limits.max_parse_bytes);
    dcp_status status = run(&m, src, offset, out, err);
    if (status == DCP_OK) {
        status = dcp__pickle_check(ctx, out->root, ctx->limits.max_depth, offset, err);
    }
    if (status != DCP_OK) {
        dcp__arena_reset(&out->arena);
    }
    *again = m.must_restart;
    return status;
}

dcp_status dcp__pickle_read(dcp_context *ctx, const dcp__source *src, uint64_t offset, const dcp__pickle_hooks *hooks,
                            dcp__pickle *out, dcp_error *err)
{
    static const dcp__pickle_hooks none = {.user = NULL};
    dcp__pickle made = {.root = 0};
    bool again;
    if (offset > src->size) {
        return dcp__fail_at(err, DCP_FORMAT, offset, "pickle: begins behind the end at %llu", (unsigned long long)src->size);
    }
    hooks = hooks ? hooks : &none;
    dcp_status status = read_once(ctx, src, offset, hooks, false, &again, &made, err);
    if (again) {
        if (hooks->restart) {
            hooks->restart(hooks->user);
        }
        status = read_once(ctx, src, offset, hooks, true, &again, &made, err);
    }
    if (status == DCP_OK) {
        *out = made;
    }
    return status;
}

void dcp__pickle_reset(dcp__pickle *p)
{
    dcp__arena_reset(&p->arena);
}
