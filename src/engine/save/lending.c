#include "engine/save/lending.h"

#include "base/context.h"
#include "base/error.h"

dcp_status dcp__lent_ask(dcp_context *ctx, const dcp_lending *lending, const dcp_write_item *items, size_t n, dcp__lent *out,
                         dcp_error *err)
{
    *out = (dcp__lent){.lending = lending};
    if (!lending) {
        return DCP_OK;
    }
    out->items = dcp__calloc(ctx, n, sizeof *out->items);
    if (!out->items) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        bool has_memory = items[i].kind == DCP_ITEM_TENSOR && items[i].bytes && items[i].tensor.data;
        out->items[i] = has_memory && lending->is_lent(lending->user, &items[i].tensor);
    }
    return DCP_OK;
}

static bool is_any_lent(const dcp_lending *lending, const dcp__record *r)
{
    bool is_any = false;
    for (size_t k = 0; r->storages && k < r->n_storages; k++) {
        is_any |= r->storages[k].bytes && lending->is_lent(lending->user, dcp_value_tensor(r->storages[k].tensor));
    }
    return is_any;
}

dcp_status dcp__lent_find(dcp__lent *lent, const dcp__layout *l, size_t n_items, dcp_error *err)
{
    if (!lent->lending) {
        return DCP_OK;
    }
    lent->records = dcp__calloc(l->ctx, l->n_records, sizeof *lent->records);
    if (!lent->records) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < l->n_records; i++) {
        lent->records[i] = is_any_lent(lent->lending, &l->records[i]);
    }
    for (size_t i = 0; i < n_items; i++) {
        lent->records[l->record_of_item[i]] |= lent->items[i];
    }
    for (size_t i = 0; i < l->n_records; i++) {
        lent->n_left += lent->records[i];
    }
    if (lent->n_left == 0) {
        lent->lending->returned(lent->lending->user);
    }
    return DCP_OK;
}

bool dcp__lent_has(const dcp__lent *lent, size_t record)
{
    return lent->records && lent->records[record];
}

void dcp__lent_wrote(dcp__lent *lent, size_t record)
{
    if (dcp__lent_has(lent, record) && __atomic_sub_fetch(&lent->n_left, 1, __ATOMIC_ACQ_REL) == 0) {
        lent->lending->returned(lent->lending->user);
    }
}

void dcp__lent_reset(dcp_context *ctx, dcp__lent *lent)
{
    dcp__free(ctx, lent->items);
    dcp__free(ctx, lent->records);
    *lent = (dcp__lent){0};
}
