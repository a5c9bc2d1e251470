/* A rank-local checkpoint becomes an ordinary one. */
#include <string.h>

#include "dcp/save.h"
#include "engine/save/copy.h"

/* ---- are the values of several ranks the same? ---- */

static bool has_same_form(const dcp_item *a, const dcp_item *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->extents, b->extents, (size_t)a->ndim * sizeof *a->extents) == 0);
}

/* What the first rank has, to be compared with what the others have. */
typedef struct reference {
    const dcp_item *item;
    uint8_t digest[32];
    dcp_value *value;
} reference;

static dcp_status take_reference(dcp_checkpoint *ck, const dcp_item *item, reference *out, dcp_error *err)
{
    *out = (reference){.item = item};
    return item->kind == DCP_ITEM_TENSOR ? dcp_item_sha256(ck, item, out->digest, err)
                                         : dcp_read_object(ck, item, &out->value, err);
}

static dcp_status compare(dcp_checkpoint *ck, const reference *ref, const dcp_item *item, bool *is_same, dcp_error *err)
{
    reference other;
    *is_same = false;
    if (!has_same_form(ref->item, item)) {
        return DCP_OK;
    }
    dcp_status status = take_reference(ck, item, &other, err);
    if (status == DCP_OK) {
        *is_same = item->kind == DCP_ITEM_TENSOR ? memcmp(ref->digest, other.digest, sizeof other.digest) == 0
                                                 : dcp_value_equal(ref->value, other.value);
        dcp_value_free(other.value);
    }
    return status;
}

static dcp_status are_all_same(dcp_checkpoint *ck, size_t first, size_t n, bool *out, dcp_error *err)
{
    reference ref;
    dcp_status status = take_reference(ck, &ck->meta->entries[first].item, &ref, err);
    *out = true;
    for (size_t i = 1; i < n && *out && status == DCP_OK; i++) {
        status = compare(ck, &ref, &ck->meta->entries[first + i].item, out, err);
    }
    dcp_value_free(ref.value);
    return status;
}

/* ---- the plan ---- */

/* Number of entries from `first` on that are the same name of several ranks; they stand together. */
static size_t count_ranks(const dcp__metadata *m, size_t first)
{
    const dcp_item *a = &m->entries[first].item;
    size_t n = 1;
    while (a->rank >= 0 && first + n < m->n_entries) {
        const dcp_item *b = &m->entries[first + n].item;
        if (b->rank <= a->rank || b->fqn.len != a->fqn.len || memcmp(a->fqn.ptr, b->fqn.ptr, a->fqn.len) != 0) {
            break;
        }
        n++;
    }
    return n;
}

static dcp_status add_name(dcp_checkpoint *ck, dcp_save_plan *p, size_t first, size_t n, dcp_error *err)
{
    bool is_one = true;
    dcp_status status = n > 1 ? are_all_same(ck, first, n, &is_one, err) : DCP_OK;
    for (size_t i = 0; i < (is_one ? 1 : n) && status == DCP_OK; i++) {
        status = dcp__plan_add_entry(ck, p, first + i, is_one ? -1 : ck->meta->entries[first + i].item.rank, err);
    }
    return status;
}

static dcp_status make_plan(dcp_checkpoint *ck, dcp_save_plan **out, dcp_error *err)
{
    dcp_save_plan *p;
    dcp_status status = dcp__save_plan_create(ck->ctx, &p, err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0, n; i < ck->meta->n_entries && status == DCP_OK; i += n) {
        n = count_ranks(ck->meta, i);
        status = add_name(ck, p, i, n, err);
    }
    status = status == DCP_OK ? dcp__plan_add_own_facts(ck, p, err) : status;
    if (status != DCP_OK) {
        dcp_save_plan_free(p);
        return status;
    }
    *out = p;
    return DCP_OK;
}

static dcp_status check_layout(const dcp_checkpoint *ck, dcp_error *err)
{
    if (ck->layout == DCP_LAYOUT_RANK_LOCAL && ck->parts) {
        return DCP_OK;
    }
    return dcp__fail(err, DCP_MISMATCH, "%s: there are no metadata of several ranks to be merged: it is %s", ck->path,
                     ck->layout == DCP_LAYOUT_RANK_LOCAL ? "opened for one rank" : dcp_layout_name(ck->layout));
}

dcp_status dcp_merge(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to, const dcp_save_opts *opts,
                     dcp_save_report *report, dcp_error *err)
{
    dcp_checkpoint *ck;
    dcp_save_plan *plan = NULL;
    if (!from || !to) {
        return dcp__fail(err, DCP_ARG, "merge: no path");
    }
    ctx = dcp__context(ctx);
    dcp_status status = dcp__open_origin(ctx, from, open, &ck, err);
    if (status != DCP_OK) {
        return status;
    }
    status = check_layout(ck, err);
    status = status == DCP_OK ? make_plan(ck, &plan, err) : status;
    status = status == DCP_OK ? dcp__save_planned(ctx, to, opts, DCP_OK, plan, NULL, report, err) : status;
    dcp_save_plan_free(plan);
    dcp_checkpoint_close(ck);
    return status;
}
