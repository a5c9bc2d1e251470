#include "engine/convert/hf_file.h"

#include <stdio.h>
#include <string.h>

#include "dcp/convert.h"
#include "engine/save/device_items.h"
#include "engine/save/write_records.h"
#include "plan/save_plan.h"
#include "storage/storage.h"

#define BLOCK_BYTES ((size_t)4 << 20)
#define WIDEST_BYTES 16

/* ---- layout ---- */

static dcp_status check_item(const dcp_write_item *item, dcp_error *err)
{
    if (item->kind == DCP_ITEM_OBJECT) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\" is no tensor, which this form cannot hold",
                         dcp__print(item->fqn).text);
    }
    return DCP_OK;
}

static void order_items(dcp__hf_output *f, const dcp_write_item *const *items, size_t n)
{
    for (size_t width = WIDEST_BYTES; width; width /= 2) {
        for (size_t i = 0; i < n; i++) {
            if (dcp_dtype_bytes(items[i]->dtype) == width) {
                f->items[f->n++] = items[i];
            }
        }
    }
}

static dcp_status make_header(dcp__hf_output *f, const dcp__st_opts *opts, dcp_error *err)
{
    static const int64_t nowhere = 0; /* offsets and extents of a scalar */
    dcp__st_entry *entries = dcp__calloc(f->ctx, f->n, sizeof *entries);
    if (!entries) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < f->n; i++) {
        const dcp_write_item *item = f->items[i];
        entries[i] = (dcp__st_entry){.name = item->fqn,
                                     .dtype = item->dtype,
                                     .ndim = item->ndim,
                                     .extents = item->box.sizes,
                                     .saved_offsets = item->ndim ? item->box.offsets : &nowhere,
                                     .global_extents = item->ndim ? item->global_extents : &nowhere};
    }
    dcp_status status = dcp__safetensors_header(&f->header, entries, f->n, opts, f->offsets, &f->bytes, err);
    dcp__free(f->ctx, entries);
    return status;
}

dcp_status dcp__hf_output_make(dcp_context *ctx, const dcp_write_item *const *items, size_t n, const dcp__st_opts *opts,
                               dcp__hf_output *f, dcp_error *err)
{
    *f = (dcp__hf_output){.ctx = ctx};
    dcp__buf_init(&f->header, ctx);
    for (size_t i = 0; i < n; i++) {
        dcp_status status = check_item(items[i], err);
        if (status != DCP_OK) {
            return status;
        }
    }
    f->items = dcp__calloc(ctx, n, sizeof *f->items);
    f->offsets = dcp__calloc(ctx, n, sizeof *f->offsets);
    if (!f->items || !f->offsets) {
        return dcp__nomem(err);
    }
    order_items(f, items, n);
    return make_header(f, opts, err);
}

void dcp__hf_output_reset(dcp__hf_output *f)
{
    if (f->ctx) {
        dcp__buf_reset(&f->header);
        dcp__free(f->ctx, f->items);
        dcp__free(f->ctx, f->offsets);
    }
    *f = (dcp__hf_output){0};
}

/* ---- writing ---- */

static dcp_status write_elements(dcp_storage *storage, dcp_file *file, const dcp_write_item *item, uint64_t at, uint8_t *buf,
                                 dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (uint64_t done = 0; done < item->bytes && status == DCP_OK;) {
        size_t n = item->bytes - done < BLOCK_BYTES ? (size_t)(item->bytes - done) : BLOCK_BYTES;
        const uint8_t *bytes;
        status = dcp__item_bytes(item, done, n, buf, &bytes, err);
        status = status == DCP_OK ? storage->ops->write_at(file, bytes, n, at + done, err) : status;
        done += n;
    }
    return status == DCP_OK ? status : dcp__prefix(err, status, "item \"%s\": ", dcp__print(item->fqn).text);
}

static dcp_status write_content(const dcp__hf_output *f, dcp_storage *storage, dcp_file *file, bool no_sync, dcp_error *err)
{
    uint8_t *buf = dcp__alloc_aligned(f->ctx, 4096, BLOCK_BYTES);
    dcp_status status = buf ? storage->ops->write_at(file, f->header.data, f->header.len, 0, err) : dcp__nomem(err);
    for (size_t i = 0; i < f->n && status == DCP_OK; i++) {
        status = write_elements(storage, file, f->items[i], f->offsets[i], buf, err);
    }
    dcp__free_aligned(f->ctx, buf);
    if (status == DCP_OK && !no_sync) {
        dcp_error fault = DCP_ERROR_INIT;
        status = dcp__synced(storage->ops->sync(file, &fault), &fault, err);
    }
    return status;
}

dcp_status dcp__hf_output_write(const dcp__hf_output *f, dcp_storage *storage, const char *name, bool no_sync, dcp_error *err)
{
    const dcp_storage_ops *ops = storage->ops;
    unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE | (no_sync ? 0 : DCP_OPEN_WRITEBACK);
    dcp_file *file;
    dcp_status status = ops->open(storage, name, flags, &file, err);
    if (status != DCP_OK) {
        return status;
    }
    status = write_content(f, storage, file, no_sync, err);
    dcp_status closed = ops->close(file, status == DCP_OK ? err : NULL);
    status = status == DCP_OK ? closed : status;
    if (status != DCP_OK && ops->remove) {
        ops->remove(storage, name, NULL);
    }
    return status;
}

/* ---- one file of a save that is planned by other means ---- */

/* Where each item of the plan is in the file. */
static void note_written(const dcp__hf_output *f, const dcp_write_item *items, dcp_written *out)
{
    for (size_t i = 0; i < f->n; i++) {
        out[f->items[i] - items] = (dcp_written){.offset = f->offsets[i], .length = f->items[i]->bytes};
    }
}

/* items: a copy of the plan's, which those of devices are turned into pulled ones in. */
static dcp_status write_items(dcp_context *ctx, dcp_storage *storage, const char *name, dcp_write_item *items, size_t n,
                              const dcp_save_opts *opts, dcp_written *out, dcp_error *err)
{
    dcp__hf_output f = {0};
    dcp__transfer *transfer = NULL;
    dcp__device_items devices = {.ctx = ctx};
    const dcp_write_item **order = dcp__calloc(ctx, n, sizeof *order);
    dcp_status status = order ? dcp__device_items_attach(ctx, opts, &transfer, items, n, &devices, err) : dcp__nomem(err);
    for (size_t i = 0; order && i < n; i++) {
        order[i] = &items[i];
    }
    status = status == DCP_OK ? dcp__hf_output_make(ctx, order, n, NULL, &f, err) : status;
    status = status == DCP_OK ? dcp__hf_output_write(&f, storage, name, opts->no_sync, err) : status;
    if (status == DCP_OK) {
        note_written(&f, items, out);
    }
    dcp__hf_output_reset(&f);
    dcp__device_items_reset(&devices);
    dcp__transfer_free(transfer);
    dcp__free(ctx, order);
    return status;
}

dcp_status dcp_hf_write_file(dcp_context *ctx, const char *path, const char *name, const dcp_save_plan *plan,
                             const dcp_save_opts *opts, dcp_written *out, dcp_error *err)
{
    static const dcp_save_opts none = DCP_SAVE_OPTS_INIT;
    if (!path || !name || !name[0] || !plan || (plan->n && !out) || (opts && opts->struct_size != sizeof *opts)) {
        return dcp__fail(err, DCP_ARG,
                         "hugging face: no path, name, plan or place for the result, or options of another version");
    }
    ctx = dcp__context(ctx);
    opts = opts ? opts : &none;
    dcp_storage *storage = opts->storage;
    const char *dir = storage ? path : "";
    size_t room = strlen(dir) + strlen(name) + 2;
    char *full = dcp__alloc(ctx, room);
    dcp_write_item *items = dcp__calloc(ctx, plan->n, sizeof *items);
    dcp_status status = full && items ? DCP_OK : dcp__nomem(err);
    status = status == DCP_OK && !storage ? dcp_storage_posix(ctx, path, &storage, err) : status;
    if (status == DCP_OK) {
        snprintf(full, room, "%s%s%s", dir, *dir ? "/" : "", name);
        if (plan->n) {
            memcpy(items, plan->items, plan->n * sizeof *items);
        }
        status = write_items(ctx, storage, full, items, plan->n, opts, out, err);
    }
    if (!opts->storage) {
        dcp_storage_free(storage);
    }
    dcp__free(ctx, items);
    dcp__free(ctx, full);
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", name);
}
