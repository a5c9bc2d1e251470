/* The snapshot of an asynchronous save, and the tensors that have no room in it. */
#include <string.h>

#include "base/strmap.h"
#include "engine/save/device_items.h"
#include "engine/save/write_records.h"
#include "engine/stage/async_op.h"

/* ---- heads ---- */

/* The lock is held, here and in finish_head. */
static void mark_staged(dcp_op *op)
{
    if (!op->is_staged && op->n_heads_left == 0 && !op->waits_for_all) {
        op->is_staged = true;
        pthread_cond_broadcast(&op->changed);
    }
}

static void finish_head(dcp_op *op, dcp__head *h)
{
    if (!h->is_done) {
        h->is_done = true;
        op->n_heads_left--;
    }
}

/* Of those with one tie, as the layout of a save has it (plan/layout.c): views of another shape have records of their own. */
static bool are_tied(const dcp_write_item *a, const dcp_write_item *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->box.sizes, b->box.sizes, (size_t)a->ndim * sizeof *a->box.sizes) == 0);
}

/* Equal tensors may share a record, and then only one of them is ever pulled. */
static void head_was_read(dcp__head *h)
{
    dcp_op *op = h->op;
    const dcp_save_opts *o = &op->opts.save;
    bool has_ties = !o->file_per_item && o->serialization != DCP_SERIALIZE_SAFETENSORS;
    pthread_mutex_lock(&op->lock);
    if (op->is_writing) {
        finish_head(op, h);
        for (dcp__head *other = h->next_tied; has_ties && other != h; other = other->next_tied) {
            if (are_tied(&other->item, &h->item)) {
                finish_head(op, other);
            }
        }
        mark_staged(op);
    }
    pthread_mutex_unlock(&op->lock);
}

static dcp_status read_head(dcp__head *h, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    const uint8_t *bytes;
    if (dcp__is_on_device(&h->item.tensor)) {
        return dcp__device_source_pull(&h->device, offset, buf, n, err);
    }
    dcp_status status = dcp__item_bytes(&h->item, offset, n, buf, &bytes, err);
    if (status == DCP_OK && bytes != buf) {
        memcpy(buf, bytes, n);
    }
    return status;
}

static dcp_status pull_head(void *user, const dcp_write_item *item, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    dcp__head *h = user;
    dcp_status status = read_head(h, offset, buf, n, err);
    if (status == DCP_OK && offset + n == item->bytes) {
        head_was_read(h);
    }
    return status;
}

static dcp_status refuse_unstaged(void *user, dcp_tensor *t, dcp_error *err)
{
    return dcp__snapshot_is_unstaged(user, t) ? dcp__fail(err, DCP_STATE, "not staged") : DCP_OK;
}

/* A clone walks over all tensors of an object. */
static dcp_status look_into_object(dcp_op *op, const dcp_value *object, dcp_error *err)
{
    dcp_value *copy = NULL;
    dcp_status status = dcp__value_clone(op->ctx, (dcp_value *)object, refuse_unstaged, &op->snapshot, &copy, err);
    dcp_value_free(copy);
    op->waits_for_all |= status == DCP_STATE;
    return status == DCP_STATE ? DCP_OK : status;
}

static void make_head(dcp_op *op, dcp_write_item *item)
{
    dcp__head *h = &op->heads[op->n_heads++];
    item->tie = dcp__device_tie(&item->tensor);
    *h = (dcp__head){.op = op, .item = *item, .device = dcp__device_source_of(op->transfer, &item->tensor, item->bytes)};
    item->tensor.data = NULL;
    item->pull = pull_head;
    item->pull_user = h;
}

static dcp_status tie_heads(dcp_op *op, dcp_error *err)
{
    dcp__strmap first;
    dcp_status status = DCP_OK;
    dcp__strmap_init(&first, op->ctx);
    for (size_t i = 0; i < op->n_heads && status == DCP_OK; i++) {
        dcp__head *h = &op->heads[i];
        dcp_str tie = {(const char *)&h->item.tie, sizeof h->item.tie};
        uint64_t at = i;
        h->next_tied = h;
        status = dcp__strmap_get(&first, tie, &at) ? DCP_OK : dcp__strmap_add(&first, tie, i, NULL, err);
        dcp__head *other = &op->heads[at];
        h->next_tied = other->next_tied;
        other->next_tied = h;
    }
    dcp__strmap_reset(&first);
    return status;
}

static dcp_status make_heads(dcp_op *op, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (!op->snapshot.is_partial) {
        return DCP_OK;
    }
    op->heads = dcp__calloc(op->ctx, op->plan->n, sizeof *op->heads);
    if (!op->heads) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < op->plan->n && status == DCP_OK; i++) {
        dcp_write_item *item = &op->plan->items[i];
        if (item->kind == DCP_ITEM_OBJECT) {
            status = look_into_object(op, item->object, err);
        } else if (item->bytes && dcp__snapshot_is_unstaged(&op->snapshot, &item->tensor)) {
            make_head(op, item);
        }
    }
    op->n_heads_left = op->n_heads;
    return status == DCP_OK ? tie_heads(op, err) : status;
}

/* ---- staging ---- */

static dcp_status use_device(void *user, dcp_device device, dcp_error *err)
{
    dcp_op *op = user;
    dcp_status status = op->transfer ? DCP_OK : dcp__device_transfer(op->ctx, &op->opts.save, &op->transfer, err);
    return status == DCP_OK ? dcp__transfer_use(op->transfer, device, err) : status;
}

dcp_status dcp__op_look(dcp_op *op, dcp_value *state, dcp_error *err)
{
    if (!state) {
        return dcp__fail(err, DCP_ARG, "save: no state");
    }
    op->original = dcp_value_retain(state);
    dcp_status status = dcp__snapshot_begin(op->ctx, state, op->stager->pool, &op->snapshot, err);
    op->snapshot.staged_bytes = &op->staged_bytes;
    __atomic_store_n(&op->total_bytes, op->snapshot.total_bytes, __ATOMIC_RELAXED);
    return status == DCP_OK ? dcp__snapshot_devices(&op->snapshot, use_device, op, err) : status;
}

dcp_status dcp__op_stage(dcp_op *op, dcp_error *err)
{
    dcp_status status = dcp__snapshot_take_blocks(&op->snapshot, err);
    status = status == DCP_OK ? dcp__snapshot_copy(&op->snapshot, op->transfer, err) : status;
    status = status == DCP_OK ? dcp__plan_save_of_rank(op->ctx, op->snapshot.state, &op->opts.save, &op->plan, err) : status;
    return status == DCP_OK ? make_heads(op, err) : status;
}

/* ---- following what is read ---- */

void dcp__op_begin_writing(dcp_op *op, const dcp_save_session *session)
{
    size_t next = 0;
    pthread_mutex_lock(&op->lock);
    op->is_writing = true;
    for (size_t i = 0; i < op->plan->n && next < op->n_heads; i++) {
        if (op->plan->items[i].pull_user == &op->heads[next]) {
            if (!dcp_save_writes(session, i)) {
                finish_head(op, &op->heads[next]);
            }
            next++;
        }
    }
    mark_staged(op);
    pthread_mutex_unlock(&op->lock);
}

void dcp__op_end_writing(dcp_op *op)
{
    pthread_mutex_lock(&op->lock);
    op->n_heads_left = 0;
    op->waits_for_all = false;
    mark_staged(op);
    pthread_mutex_unlock(&op->lock);
}

void dcp__op_unstage(dcp_op *op)
{
    dcp_save_plan_free(op->plan);
    op->plan = NULL;
    for (size_t i = 0; i < op->n_heads; i++) {
        dcp__device_source_reset(&op->heads[i].device);
    }
    dcp__free(op->ctx, op->heads);
    op->heads = NULL;
    op->n_heads = 0;
    dcp__transfer_free(op->transfer);
    op->transfer = NULL;
    dcp__snapshot_reset(&op->snapshot);
    dcp_value_free(op->original);
    op->original = NULL;
}
