#include "engine/save/device_items.h"

#include "base/hash.h"
#include "state/strided.h"
#include "state/value.h"

static dcp_status use_device(const dcp__device_items *d, dcp_device device, dcp_error *err)
{
    dcp_status status = *d->transfer ? DCP_OK : dcp__device_transfer(d->ctx, d->opts, d->transfer, err);
    return status == DCP_OK ? dcp__transfer_use(*d->transfer, device, err) : status;
}

/* ---- tensors ---- */

uint64_t dcp__device_tie(const dcp_tensor *t)
{
    uint64_t parts[] = {(uint64_t)t->device.type, (uint64_t)t->device.index, (uint64_t)(uintptr_t)t->data, 0};
    if (!dcp__is_row_major(t->ndim, t->extents, t->strides)) {
        parts[3] = dcp__xxh3_64(t->strides, (size_t)t->ndim * sizeof *t->strides);
    }
    return dcp__xxh3_64(parts, sizeof parts) | 1;
}

dcp_status dcp__device_pull(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)item;
    return dcp__device_source_pull(user, offset, buf, n, err);
}

static size_t count(const dcp_write_item *items, size_t n)
{
    size_t on_device = 0;
    for (size_t i = 0; i < n; i++) {
        on_device += items[i].kind == DCP_ITEM_TENSOR && dcp__is_on_device(&items[i].tensor);
    }
    return on_device;
}

dcp_status dcp__device_items_attach(dcp_context *ctx, const dcp_save_opts *opts, dcp__transfer **transfer, dcp_write_item *items,
                                    size_t n, dcp__device_items *d, dcp_error *err)
{
    *d = (dcp__device_items){.ctx = ctx, .opts = opts, .transfer = transfer};
    size_t on_device = count(items, n);
    if (on_device == 0) {
        return DCP_OK;
    }
    d->sources = dcp__calloc(ctx, on_device, sizeof *d->sources);
    if (!d->sources) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        dcp_write_item *item = &items[i];
        if (item->kind != DCP_ITEM_TENSOR || !dcp__is_on_device(&item->tensor)) {
            continue;
        }
        dcp_status status = use_device(d, item->tensor.device, err);
        if (status != DCP_OK) {
            return dcp__prefix(err, status, "item \"%s\": ", dcp__print(item->fqn).text);
        }
        dcp__device_source *source = &d->sources[d->n_sources++];
        *source = dcp__device_source_of(*transfer, &item->tensor, item->bytes);
        item->tie = dcp__device_tie(&item->tensor);
        item->tensor.data = NULL;
        item->pull = dcp__device_pull;
        item->pull_user = source;
    }
    return DCP_OK;
}

/* ---- tensors inside objects ---- */

static dcp_status fetch(const dcp__device_items *d, const dcp_tensor *t, uint64_t bytes, dcp_value **out, dcp_error *err)
{
    dcp_value *copy;
    dcp_status status = use_device(d, t->device, err);
    status = status == DCP_OK ? dcp_tensor_alloc(d->ctx, t->dtype, t->ndim, t->extents, &copy, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    dcp__device_source source = dcp__device_source_of(*d->transfer, t, bytes);
    status = dcp__device_source_pull(&source, 0, dcp_value_tensor(copy)->data, (size_t)bytes, err);
    if (status != DCP_OK) {
        dcp_value_free(copy);
        return status;
    }
    *out = copy;
    return DCP_OK;
}

static dcp_status replace(dcp__device_items *d, dcp__write_storage *storage, dcp_error *err)
{
    void *array = d->copies;
    if (!dcp__grow(d->ctx, &array, &d->cap_copies, d->n_copies + 1, sizeof(dcp_value *))) {
        return dcp__nomem(err);
    }
    d->copies = array;
    dcp_status status = fetch(d, dcp_value_tensor(storage->tensor), storage->bytes, &d->copies[d->n_copies], err);
    if (status == DCP_OK) {
        storage->tensor = d->copies[d->n_copies++];
    }
    return status;
}

dcp_status dcp__device_items_fetch(dcp__layout *l, dcp__device_items *d, dcp_error *err)
{
    for (size_t i = 0; i < l->n_records; i++) {
        const dcp__record *r = &l->records[i];
        for (size_t k = 0; r->storages && k < r->n_storages; k++) {
            const dcp_tensor *t = dcp_value_tensor(r->storages[k].tensor);
            dcp_status status = r->storages[k].bytes && dcp__is_on_device(t) ? replace(d, &r->storages[k], err) : DCP_OK;
            if (status != DCP_OK) {
                return dcp__prefix(err, status, "item \"%s\": ", dcp__print(r->item->fqn).text);
            }
        }
    }
    return DCP_OK;
}

void dcp__device_items_reset(dcp__device_items *d)
{
    for (size_t i = 0; i < d->n_sources; i++) {
        dcp__device_source_reset(&d->sources[i]);
    }
    for (size_t i = 0; i < d->n_copies; i++) {
        dcp_value_free(d->copies[i]);
    }
    dcp__free(d->ctx, d->sources);
    dcp__free(d->ctx, d->copies);
    *d = (dcp__device_items){0};
}
