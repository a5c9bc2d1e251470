/* Opening back ends, and registering host memory in pieces. */
#include "device/device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/pages.h"

const char *dcp_device_type_name(dcp_device_type type)
{
    switch (type) {
    case DCP_DEVICE_CPU: return "cpu";
    case DCP_DEVICE_CUDA: return "cuda";
    case DCP_DEVICE_NPU: return "npu";
    default: return "?";
    }
}

dcp_status dcp_device_open(dcp_context *ctx, dcp_device_type type, const char *library, dcp_device_driver **out, dcp_error *err)
{
    if (!out) {
        return dcp__fail(err, DCP_ARG, "device: no place for the driver");
    }
    ctx = dcp__context(ctx);
    switch (type) {
    case DCP_DEVICE_CPU: return dcp__host_device_open(ctx, out, err);
    case DCP_DEVICE_CUDA: return dcp__cuda_open(ctx, library, out, err);
    case DCP_DEVICE_NPU: return dcp__acl_open(ctx, library, out, err);
    default: return dcp__fail(err, DCP_ARG, "device: no type has the number %d", (int)type);
    }
}

void dcp_device_close(dcp_device_driver *d)
{
    if (d) {
        d->ops->free(d);
    }
}

/* ---- libraries ---- */

static void *open_first(const char *const *names, size_t n, int flags, char *message, size_t message_bytes)
{
    for (size_t i = 0; i < n; i++) {
        void *handle = dlopen(names[i], flags);
        if (handle) {
            return handle;
        }
        const char *text = dlerror();
        snprintf(message, message_bytes, "%s", text ? text : "");
    }
    return NULL;
}

dcp_status dcp__library_open(dcp__library *l, const char *what, const char *const *names, size_t n, dcp_error *err)
{
    char unused[4];
    l->handle = open_first(names, n, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | RTLD_NOLOAD, unused, sizeof unused);
    if (!l->handle) {
        l->handle = open_first(names, n, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE, l->message, sizeof l->message);
    }
    return l->handle ? DCP_OK : dcp__fail(err, DCP_UNSUPPORTED, "%s cannot be loaded: %s", what, l->message);
}

dcp_status dcp__library_bind(const dcp__library *l, const char *what, const dcp__symbol *symbols, size_t n, void *table,
                             dcp_error *err)
{
    for (size_t i = 0; i < n; i++) {
        void *address = dlsym(l->handle, symbols[i].name);
        if (!address && !symbols[i].is_optional) {
            return dcp__fail(err, DCP_UNSUPPORTED, "%s has no function %s", what, symbols[i].name);
        }
        memcpy((char *)table + symbols[i].offset, &address, sizeof address);
    }
    return DCP_OK;
}

/* ---- registering ---- */

static size_t piece_of(const dcp_registration *r, size_t at)
{
    return r->bytes - at < r->piece_bytes ? r->bytes - at : r->piece_bytes;
}

/* Unregisters the pieces before `end`, the last one first; goes on after a failure. */
static dcp_status unregister_pieces(dcp_device_driver *d, dcp_registration *r, size_t end, dcp_error *err)
{
    dcp_status status = DCP_OK;
    while (end > 0) {
        end -= end % r->piece_bytes ? end % r->piece_bytes : r->piece_bytes;
        dcp_error fault = DCP_ERROR_INIT;
        dcp_status one = d->ops->host_unregister(d, r->device.index, (char *)r->ptr + end, &fault);
        if (one != DCP_OK && status == DCP_OK) {
            status = one;
            r->native_code = fault.native_code;
            if (err) {
                *err = fault;
            }
        }
    }
    return status;
}

/* A driver says "registered already" for any overlap, also with memory that was unmapped without having been unregistered. Only
 * where it knows both ends is the range usable. */
static bool is_whole_known(dcp_device_driver *d, const dcp_registration *r)
{
    return d->ops->is_registered && d->ops->is_registered(d, r->device.index, r->ptr) &&
           d->ops->is_registered(d, r->device.index, (const char *)r->ptr + r->bytes - 1);
}

static dcp_status register_pieces(dcp_device_driver *d, dcp_registration *r, dcp_error *err)
{
    for (size_t at = 0; at < r->bytes; at += piece_of(r, at)) {
        dcp_error fault = DCP_ERROR_INIT;
        dcp_status status = d->ops->host_register(d, r->device.index, (char *)r->ptr + at, piece_of(r, at), &fault);
        if (status == DCP_OK) {
            continue;
        }
        r->native_code = fault.native_code;
        if (status == DCP_EXISTS && at == 0 && is_whole_known(d, r)) {
            r->is_foreign = true;
            break;
        }
        unregister_pieces(d, r, at, NULL);
        r->native_code = fault.native_code;
        if (err) {
            *err = fault;
        }
        return dcp__prefix(err, status, "%zu bytes at %p: ", piece_of(r, at), (void *)((char *)r->ptr + at));
    }
    r->is_registered = true;
    return DCP_OK;
}

dcp_status dcp_pin(dcp_device_driver *d, int index, void *ptr, size_t bytes, size_t max_bytes, dcp_registration *out,
                   dcp_error *err)
{
    size_t page = dcp__page_bytes();
    if (!d || !out || (!ptr && bytes)) {
        return dcp__fail(err, DCP_ARG, "pin: no %s", !d ? "driver" : !out ? "place for the registration" : "address");
    }
    *out = (dcp_registration){.ptr = ptr, .bytes = bytes, .device = {d->ops->type, index}, .process = getpid()};
    if (bytes == 0) {
        return DCP_OK;
    }
    if ((uintptr_t)ptr % page || bytes % page) {
        return dcp__fail(err, DCP_ARG, "pin: %zu bytes at %p are not whole pages of %zu bytes", bytes, ptr, page);
    }
    max_bytes = max_bytes ? max_bytes : DCP_MAX_REGISTER_BYTES;
    out->piece_bytes = max_bytes < page ? page : max_bytes - max_bytes % page;
    return register_pieces(d, out, err);
}

dcp_status dcp_unpin(dcp_device_driver *d, dcp_registration *r, dcp_error *err)
{
    if (!d || !r) {
        return dcp__fail(err, DCP_ARG, "unpin: no %s", d ? "registration" : "driver");
    }
    bool is_ours = r->is_registered && !r->is_foreign && r->process == getpid();
    r->is_registered = false;
    r->native_code = 0;
    return is_ours ? unregister_pieces(d, r, r->bytes, err) : DCP_OK;
}
