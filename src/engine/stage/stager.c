#include "engine/stage/stager.h"

#include "engine/stage/stage.h"

/* ---- making ---- */

static dcp_status check_opts(const dcp_stager_opts *o, dcp_error *err)
{
    if (o->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "stager options: struct_size %zu, expected %zu", o->struct_size, sizeof *o);
    }
    if ((int)o->pin < DCP_PIN_NEVER || o->pin > DCP_PIN_REQUIRED) {
        return dcp__fail(err, DCP_ARG, "stager options: no pinning has the number %d", (int)o->pin);
    }
    if (o->helper && !o->is_shared) {
        return dcp__fail(err, DCP_ARG, "stager options: a helper process needs shared memory");
    }
    if (o->pin != DCP_PIN_NEVER && o->pin_device.type == DCP_DEVICE_CPU) {
        return dcp__fail(err, DCP_ARG, "stager options: memory is pinned for a device, and there is none given");
    }
    return DCP_OK;
}

/* A driver that is absent is an error only if pinning is required. */
static dcp_status open_driver(dcp_stager *s, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (s->opts.pin == DCP_PIN_NEVER) {
        return DCP_OK;
    }
    dcp_status status = dcp_device_open(s->ctx, s->opts.pin_device.type, NULL, &s->driver, &fault);
    if (status == DCP_OK) {
        return status;
    }
    s->driver = NULL;
    if (s->opts.pin == DCP_PIN_REQUIRED || status == DCP_NOMEM) {
        if (err) {
            *err = fault;
        }
        return status;
    }
    dcp__log(s->ctx, DCP_LOG_WARNING, "staging goes on with memory that is not registered, code %lld: %s",
             (long long)fault.native_code, fault.message);
    return DCP_OK;
}

static dcp_status make_pool(dcp_stager *s, dcp_error *err)
{
    static const dcp__pin_policy policies[] = {
        [DCP_PIN_NEVER] = DCP__PIN_NEVER, [DCP_PIN_PREFERRED] = DCP__PIN_PREFERRED, [DCP_PIN_REQUIRED] = DCP__PIN_REQUIRED};
    dcp__host_pool_opts opts = {.cap_bytes = s->opts.cap_bytes,
                                .is_shared = s->opts.is_shared,
                                .pin = policies[s->opts.pin],
                                .driver = s->driver,
                                .index = s->opts.pin_device.index,
                                .max_register_bytes = s->opts.max_register_bytes};
    return dcp__host_pool_create(s->ctx, &opts, &s->pool, err);
}

dcp_status dcp_stager_create(dcp_context *ctx, const dcp_stager_opts *given, dcp_stager **out, dcp_error *err)
{
    dcp_stager_opts opts = DCP_STAGER_OPTS_INIT;
    if (!out) {
        return dcp__fail(err, DCP_ARG, "stager: no place for the result");
    }
    dcp_status status = given ? check_opts(given, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    ctx = dcp__context(ctx);
    dcp_stager *s = dcp__calloc(ctx, 1, sizeof *s);
    if (!s) {
        return dcp__nomem(err);
    }
    s->ctx = ctx;
    s->opts = given ? *given : opts;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    status = open_driver(s, err);
    status = status == DCP_OK ? make_pool(s, err) : status;
    if (status == DCP_OK && s->opts.helper) {
        status = dcp__mover_create(ctx, s->pool, s->opts.helper_path, &s->mover, err);
        s->opts.helper_path = NULL; /* borrowed until here */
    }
    if (status != DCP_OK) {
        dcp_stager_free(s);
        return status;
    }
    *out = s;
    return DCP_OK;
}

/* ---- turns ---- */

dcp_status dcp__stager_enter(dcp_stager *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&s->lock);
    while (s->is_busy && !s->is_closed && !s->opts.refuse_busy) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    if (s->is_closed || s->is_busy) {
        status = dcp__fail(err, DCP_STATE, "the stager %s", s->is_closed ? "is closed" : "is busy with another save");
    } else {
        s->is_busy = true;
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

void dcp__stager_leave(dcp_stager *s)
{
    pthread_mutex_lock(&s->lock);
    s->is_busy = false;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

dcp_status dcp__stager_duplicate(dcp_stager *s, dcp_comm *comm, bool all_have_one, dcp_comm **out, dcp_error *err)
{
    if (!all_have_one) {
        dcp_comm *duplicate;
        dcp_status status = dcp_comm_duplicate(comm, 0, &duplicate, err);
        if (status != DCP_OK) {
            return status;
        }
        dcp_comm_free(s->comm_duplicate);
        s->comm = comm;
        s->comm_duplicate = duplicate;
    }
    *out = s->comm_duplicate;
    return DCP_OK;
}

/* ---- calls ---- */

dcp_status dcp_stager_reserve(dcp_stager *s, dcp_value *state, dcp_error *err)
{
    dcp__snapshot snapshot;
    if (!s || !state) {
        return dcp__fail(err, DCP_ARG, "reserve: no %s", s ? "state" : "stager");
    }
    dcp_status status = dcp__stager_enter(s, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__snapshot_begin(s->ctx, state, s->pool, &snapshot, err);
    status = status == DCP_OK ? dcp__snapshot_take_blocks(&snapshot, err) : status;
    status = status == DCP_OK ? dcp__snapshot_touch(&snapshot, err) : status;
    dcp__snapshot_reset(&snapshot);
    dcp__stager_leave(s);
    return status;
}

dcp_status dcp_stager_get_info(dcp_stager *s, dcp_stager_info *info, dcp_error *err)
{
    if (!s || !info || info->struct_size != sizeof *info) {
        return dcp__fail(err, DCP_ARG, "stager info: no %s", !s ? "stager" : "place for it of this version");
    }
    dcp__host_pool_stats stats = {0};
    pthread_mutex_lock(&s->lock);
    if (s->pool) {
        stats = dcp__host_pool_get_stats(s->pool);
    }
    pthread_mutex_unlock(&s->lock);
    *info = (dcp_stager_info){.struct_size = sizeof *info,
                              .mapped_bytes = stats.mapped_bytes,
                              .used_bytes = stats.used_bytes,
                              .pinned_bytes = stats.pinned_bytes,
                              .peak_bytes = stats.peak_bytes,
                              .n_blocks = stats.n_blocks,
                              .n_registered = stats.n_registered,
                              .n_unregistered = stats.n_unregistered,
                              .n_failed_unregister = stats.n_failed_unregister,
                              .native_code = stats.native_code};
    return DCP_OK;
}

void dcp_stager_close(dcp_stager *s)
{
    if (!s) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    s->is_closed = true;
    pthread_cond_broadcast(&s->changed); /* those that wait for their turn are refused */
    while (s->is_busy) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    dcp__host_pool *pool = s->pool;
    dcp__mover *mover = s->mover;
    dcp_comm *duplicate = s->comm_duplicate;
    s->mover = NULL;
    s->pool = NULL;
    s->comm = s->comm_duplicate = NULL;
    pthread_mutex_unlock(&s->lock);
    dcp__mover_free(mover);
    dcp__host_pool_free(pool);
    dcp_comm_free(duplicate);
}

void dcp_stager_free(dcp_stager *s)
{
    if (s) {
        dcp_stager_close(s);
        dcp_device_close(s->driver);
        pthread_cond_destroy(&s->changed);
        pthread_mutex_destroy(&s->lock);
        dcp__free(s->ctx, s);
    }
}
