/* The plan of all ranks before the writing, and the metadata of all after it. */
#include <string.h>

#include "base/hash.h"
#include "engine/save/device_items.h"
#include "engine/save/session.h"
#include "engine/save/write_records.h"
#include "format/metadata_writer.h"
#include "state/value.h"

/* ---- before ---- */

/* The oldest release that knows the transform and this rank's dtypes. */
static int oldest_release(const dcp_save_session *s)
{
    int release = s->opts.transform ? 207 : 201;
    for (size_t i = 0; i < s->plan->n; i++) {
        const dcp_write_item *item = &s->plan->items[i];
        int needed = item->kind == DCP_ITEM_TENSOR ? dcp_dtype_release(item->dtype) : 0;
        release = needed > release ? needed : release;
    }
    return release;
}

/* Before anything is written: does the target know all dtypes and the transform? */
static dcp_status check_target(const dcp_save_session *s, dcp_error *err)
{
    dcp__metadata *m;
    if (s->opts.target_release == 0 || s->opts.target_release >= oldest_release(s)) {
        return DCP_OK;
    }
    dcp_status status = dcp__metadata_create(s->ctx, &m, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__metadata_reserve(m, s->plan->n, 0, 1, 0, 1, err);
    for (size_t i = 0; i < s->plan->n && status == DCP_OK; i++) {
        const dcp_write_item *item = &s->plan->items[i];
        /* As far as this check looks; all in one storage, for the transform. */
        m->entries[m->n_entries++] =
            (dcp__entry){.item = {.fqn = item->fqn, .kind = item->kind, .dtype = item->dtype}, .storage = 0};
    }
    if (status == DCP_OK && s->opts.transform) {
        m->storages[0].transforms = 1;
        m->transforms[1] = dcp_str_of(s->opts.transform);
        m->n_transforms = 2;
    }
    m->n_storages = status == DCP_OK;
    status = status == DCP_OK ? dcp__metadata_check_target(m, s->opts.target_release, err) : status;
    dcp__metadata_free(m);
    return status;
}

/* Content of tensors that several ranks may hold, to compare them by. Objects by their pickles. */
static dcp_status digest_item(dcp_context *ctx, const dcp_write_item *item, dcp__hasher *hasher, uint8_t *block,
                              size_t block_bytes, dcp_error *err)
{
    dcp_status status = DCP_OK;
    if (item->kind == DCP_ITEM_OBJECT && dcp_value_kind(item->object) == DCP_KIND_RECORD) {
        dcp_str bytes = dcp_value_str(item->object);
        dcp__hasher_update(hasher, bytes.ptr, bytes.len);
    } else if (item->kind == DCP_ITEM_OBJECT) {
        dcp__buf pickle;
        dcp__write_storage *storages = NULL;
        size_t n = 0;
        dcp__buf_init(&pickle, ctx);
        status = dcp__pickle_value(&pickle, item->object, &storages, &n, err);
        if (status == DCP_OK) {
            dcp__hasher_update(hasher, pickle.data, pickle.len);
        }
        dcp__free(ctx, storages);
        dcp__buf_reset(&pickle);
    }
    for (uint64_t done = 0; done < item->bytes && status == DCP_OK;) {
        const uint8_t *bytes;
        size_t n = item->bytes - done < block_bytes ? (size_t)(item->bytes - done) : block_bytes;
        status = dcp__item_bytes(item, done, n, block, &bytes, err);
        if (status == DCP_OK) {
            dcp__hasher_update(hasher, bytes, n);
        }
        done += n;
    }
    return status;
}

/* Tensors on devices are pulled. */
static dcp_status digest_any(dcp_save_session *s, const dcp_write_item *item, dcp__hasher *hasher, uint8_t *block,
                             size_t block_bytes, dcp_error *err)
{
    dcp_write_item pulled = *item;
    dcp__device_items devices;
    dcp_status status = dcp__device_items_attach(s->ctx, &s->opts, &s->transfer, &pulled, 1, &devices, err);
    status = status == DCP_OK ? digest_item(s->ctx, &pulled, hasher, block, block_bytes, err) : status;
    dcp__device_items_reset(&devices);
    return status;
}

static dcp_status digest_items(dcp_save_session *s, dcp__digest **out, dcp_error *err)
{
    const size_t block_bytes = (size_t)1 << 20;
    dcp_status status = DCP_OK;
    dcp__digest *digests = dcp__alloc(s->ctx, s->plan->n * sizeof *digests);
    uint8_t *block = dcp__alloc_aligned(s->ctx, 64, block_bytes);
    dcp__hasher *hasher = dcp__alloc_aligned(s->ctx, 64, dcp__hasher_bytes());
    if (!digests || !block || !hasher) {
        status = dcp__nomem(err);
    }
    for (size_t i = 0; i < s->plan->n && status == DCP_OK; i++) {
        dcp__hasher_init(hasher);
        status = digest_any(s, &s->plan->items[i], hasher, block, block_bytes, err);
        digests[i] = dcp__hasher_digest(hasher);
    }
    dcp__free_aligned(s->ctx, block);
    dcp__free_aligned(s->ctx, hasher);
    if (status != DCP_OK) {
        dcp__free(s->ctx, digests);
        return status;
    }
    *out = digests;
    return DCP_OK;
}

dcp_status dcp__session_plan(dcp_save_session *s, dcp_error *err)
{
    dcp__digest *content = NULL;
    s->step.phase = "plan";
    s->group = (dcp__group_plan){.step = s->step, .coordinator = s->opts.comm ? s->opts.coordinator : 0};
    s->group.opts.dedup_to_lowest = s->opts.dedup_to_lowest;
    s->group.opts.allow_gaps = s->opts.rank_local;
    int oldest = oldest_release(s);
    s->report.target_release = s->opts.target_release > oldest ? s->opts.target_release : oldest;
    dcp_status mine = check_target(s, err);
    if (mine == DCP_OK && s->opts.check_content) {
        mine = digest_items(s, &content, err);
    }
    const dcp__plan_cache *cache =
        s->opts.cache && s->opts.cache->is_filled && !s->opts.check_content ? &s->opts.cache->cache : NULL;
    dcp_status status = dcp__group_plan_make(&s->group, s->plan, mine, content, cache, err);
    s->report.was_planned_before = s->group.was_cached;
    s->report.plan_bytes = s->group.sent_bytes;
    dcp__free(s->ctx, content);
    return status;
}

/* ---- after ---- */

/* The files of a rank-local save carry its rank, although it is alone. */
static dcp_status name_files(const dcp_save_session *s, dcp__metadata *m, dcp_error *err)
{
    for (size_t i = 0; i < m->n_files; i++) {
        char name[64];
        dcp__data_file_name(s->rank, s->generation, i, name);
        m->files[i] = dcp__arena_str(&m->arena, dcp_str_of(name));
        if (!m->files[i].ptr) {
            return dcp__arena_fail(&m->arena, err);
        }
    }
    return DCP_OK;
}

dcp_status dcp__session_encode(dcp_save_session *s, dcp__metadata *m, dcp_error *err)
{
    dcp__metadata_write_opts opts = {.target_release = s->opts.target_release, .with_own = true};
    dcp__own_facts *own = &m->own;
    dcp_status status = s->opts.rank_local ? name_files(s, m, err) : DCP_OK;
    m->version = dcp_str_of("1.0.0");
    own->present = true;
    own->writer = dcp_str_of("libdcp " DCP_VERSION_STRING);
    own->save_id = dcp_str_of(s->save_id);
    dcp_str id = dcp_str_of(s->opts.checkpoint_id ? s->opts.checkpoint_id : s->path);
    own->checkpoint_id = dcp__is_wtf8(id) ? id : (dcp_str){NULL, 0}; /* a path may be any bytes, a text in a pickle not */
    own->generation = dcp_str_of(s->generation);
    own->world = s->world;
    own->rank = s->opts.rank_local ? s->rank : -1;
    if (s->plan) { /* none where ranks plan by other means */
        own->extras = s->plan->own_extras;
        m->extras = s->plan->extras;
    }
    return status == DCP_OK ? dcp__metadata_write(m, &opts, &s->metadata, err) : status;
}

dcp_status dcp__session_collect(dcp_save_session *s, dcp_error *err)
{
    dcp__metadata *m = NULL;
    dcp__merge_input in = {.generation = s->generation, .transform = s->opts.transform};
    s->step.phase = "commit";
    s->group.step = s->step;
    dcp_status status = dcp__group_results(&s->group, DCP_OK, s->placed, s->facts, s->n_files, in, &m, err);
    if (status == DCP_OK) {
        dcp_status mine = m ? dcp__session_encode(s, m, err) : DCP_OK;
        status = dcp__agree(&s->step, mine, err);
    }
    dcp__metadata_free(m);
    return status;
}
