/* The writing step of a save: layout, files, records, and the metadata that tells of them. */
#include <stdio.h>
#include <string.h>

#include "engine/write_records.h"
#include "format/metadata_writer.h"
#include "plan/coverage.h"

/* ---- files ---- */

static void file_name(const dcp_save_session *s, size_t i, char name[64])
{
    if (s->generation[0]) {
        snprintf(name, 64, "__0_%s_%zu.distcp", s->generation, i);
    } else {
        snprintf(name, 64, "__0_%zu.distcp", i);
    }
}

static dcp_status create_files(dcp_save_session *s, size_t n, dcp_file **files, size_t *n_open, dcp_error *err)
{
    dcp_status status = DCP_OK;
    char name[64];
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        file_name(s, i, name);
        status = dcp__session_create(s, name, &files[i], err);
        *n_open += status == DCP_OK;
    }
    return status;
}

/* Closes in every case; the first error counts. */
static dcp_status close_files(dcp_save_session *s, dcp_file **files, size_t n, bool sync, dcp_error *err)
{
    dcp_status status = DCP_OK;
    double start = dcp__now();
    for (size_t i = 0; i < n; i++) {
        dcp_error *first = status == DCP_OK ? err : NULL;
        dcp_status synced = sync && status == DCP_OK ? dcp__session_sync(s, files[i], first) : DCP_OK;
        dcp_status closed = s->storage->ops->close(files[i], synced == DCP_OK ? first : NULL);
        status = status != DCP_OK ? status : synced != DCP_OK ? synced : closed;
    }
    s->report.sync_seconds += dcp__now() - start;
    return status;
}

/* ---- metadata ---- */

typedef struct builder {
    dcp_save_session *session;
    const dcp_save_plan *plan;
    const dcp__layout *layout;
    dcp__digest *digests;
    dcp__metadata *m;
} builder;

static dcp_status allocate(builder *b, dcp_error *err)
{
    dcp__metadata *m = b->m;
    size_t n_files = b->layout->n_files;
    dcp_status status = dcp__metadata_reserve(m, b->plan->n, b->plan->n, b->layout->n_records, n_files, 1, err);
    m->own.records = dcp__arena_alloc(&m->arena, n_files * sizeof *m->own.records);
    m->own.n_records = dcp__arena_alloc(&m->arena, n_files * sizeof *m->own.n_records);
    return status != DCP_OK ? status : m->own.records && m->own.n_records ? DCP_OK : dcp__nomem(err);
}

static dcp_status add_files(builder *b, dcp_error *err)
{
    dcp__metadata *m = b->m;
    const char *transform = b->session->opts.transform;
    char name[64];
    m->transforms[1] = dcp_str_of(transform ? transform : "");
    m->n_transforms = transform ? 2 : 1;
    for (size_t i = 0; i < b->layout->n_files; i++) {
        const dcp__layout_file *f = &b->layout->files[i];
        file_name(b->session, i, name);
        m->files[i] = dcp__arena_str(&m->arena, dcp_str_of(name));
        if (!m->files[i].ptr) {
            return dcp__nomem(err);
        }
        bool has_digests = f->n && f->blob_header_bytes == 0;
        m->own.records[i] = has_digests ? &b->digests[f->first] : NULL;
        m->own.n_records[i] = has_digests ? f->n : 0;
    }
    m->n_files = b->layout->n_files;
    return DCP_OK;
}

static void add_storages(builder *b)
{
    dcp__metadata *m = b->m;
    for (size_t i = 0; i < b->layout->n_records; i++) {
        const dcp__record *r = &b->layout->records[i];
        /* In a blob all tensors have its start as offset, as PyTorch writes it (formats.md 8.5). */
        uint64_t offset = r->archive ? r->offset : b->layout->files[r->file].blob_offset;
        m->storages[i] =
            (dcp__storage){offset, r->length, r->file, r->archive && b->session->opts.transform ? 1 : 0, DCP__FORM_RECORD};
    }
    m->n_storages = b->layout->n_records;
}

/* Items of one name follow each other in the plan: chunks of one tensor. */
static dcp_status add_items(builder *b, dcp_error *err)
{
    dcp__metadata *m = b->m;
    for (size_t i = 0; i < b->plan->n; i++) {
        const dcp_write_item *item = &b->plan->items[i];
        uint32_t storage = b->layout->record_of_item[i];
        uint64_t existing;
        dcp_status status = dcp__strmap_add(&m->by_fqn, item->fqn, m->n_entries, &existing, err);
        if (status != DCP_OK) {
            return status;
        }
        dcp__entry *e = existing == UINT64_MAX ? &m->entries[m->n_entries] : &m->entries[existing];
        if (existing == UINT64_MAX) {
            *e = (dcp__entry){.item = {.fqn = item->fqn,
                                       .kind = item->kind,
                                       .rank = -1,
                                       .dtype = item->dtype,
                                       .ndim = item->ndim,
                                       .extents = item->global_extents,
                                       .n_chunks = item->kind == DCP_ITEM_OBJECT,
                                       .path = item->path,
                                       .path_len = item->path_len},
                              .first_chunk = m->n_chunks,
                              .storage = item->kind == DCP_ITEM_OBJECT ? storage : DCP__NO_STORAGE};
            m->n_entries++;
        } else if (existing != m->n_entries - 1 || item->kind != DCP_ITEM_TENSOR || e->item.kind != DCP_ITEM_TENSOR) {
            return dcp__fail(err, DCP_MISMATCH, "item \"%s\" is in the plan twice", dcp__print(item->fqn).text);
        }
        if (item->kind == DCP_ITEM_TENSOR) {
            m->chunks[m->n_chunks++] = (dcp__chunk){item->box.offsets, item->box.sizes, storage};
            e->item.n_chunks++;
        }
    }
    return DCP_OK;
}

static void add_own(builder *b)
{
    dcp__own_facts *own = &b->m->own;
    dcp_save_session *s = b->session;
    own->present = true;
    own->writer = dcp_str_of("libdcp " DCP_VERSION_STRING);
    own->save_id = dcp_str_of(s->save_id);
    own->checkpoint_id = dcp_str_of(s->opts.checkpoint_id ? s->opts.checkpoint_id : s->path);
    own->generation = dcp_str_of(s->generation);
    own->world = 1;
    own->rank = -1;
    own->containers = b->plan->containers;
    own->n_containers = b->plan->n_containers;
}

/* A caller may have changed the plan: chunks that share elements, or leave their tensor, make a checkpoint whose content depends
 * on who reads it. Gaps are allowed, as in PyTorch: another process may hold the rest. */
static dcp_status check_chunks(const builder *b, const dcp__entry *e, dcp_error *err)
{
    const dcp__chunk *chunks = &b->m->chunks[e->first_chunk];
    dcp_context *ctx = b->session->ctx;
    dcp__tiling t = {.fault = DCP__TILING_OK};
    dcp_box *boxes = dcp__alloc(ctx, e->item.n_chunks * sizeof *boxes);
    if (!boxes) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        boxes[i] = (dcp_box){chunks[i].offsets, chunks[i].sizes};
    }
    dcp_status status = dcp__check_tiling(ctx, e->item.ndim, e->item.extents, boxes, e->item.n_chunks, &t, err);
    dcp__free(ctx, boxes);
    if (status == DCP_OK && t.fault == DCP__TILING_OUTSIDE) {
        return dcp__fail(err, DCP_ARG, "item \"%s\": chunk %zu is not within the tensor", dcp__print(e->item.fqn).text, t.a);
    }
    if (status == DCP_OK && t.fault == DCP__TILING_OVERLAP) {
        return dcp__fail(err, DCP_ARG, "item \"%s\": its chunks %zu and %zu overlap", dcp__print(e->item.fqn).text, t.a, t.b);
    }
    return status;
}

static dcp_status check_all_chunks(const builder *b, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < b->m->n_entries && status == DCP_OK; i++) {
        const dcp__entry *e = &b->m->entries[i];
        bool is_whole = e->item.n_chunks == 1 && b->m->chunks[e->first_chunk].sizes == e->item.extents;
        status = e->item.kind == DCP_ITEM_TENSOR && !is_whole ? check_chunks(b, e, err) : DCP_OK;
    }
    return status;
}

/* The metadata borrows from plan, layout and digests; it is turned into bytes before they go. */
static dcp_status build_metadata(builder *b, dcp_error *err)
{
    dcp_status status = dcp__metadata_create(b->session->ctx, &b->m, err);
    if (status != DCP_OK) {
        return status;
    }
    status = allocate(b, err);
    if (status != DCP_OK) {
        return status;
    }
    b->m->version = dcp_str_of("1.0.0");
    add_storages(b);
    add_own(b);
    status = add_files(b, err);
    status = status == DCP_OK ? add_items(b, err) : status;
    return status == DCP_OK ? check_all_chunks(b, err) : status;
}

/* The oldest release that knows all dtypes and the transform. */
static int oldest_release(const dcp_save_session *s, const dcp_save_plan *plan)
{
    int release = s->opts.transform ? 207 : 201;
    for (size_t i = 0; i < plan->n; i++) {
        int needed = plan->items[i].kind == DCP_ITEM_TENSOR ? dcp_dtype_release(plan->items[i].dtype) : 0;
        release = needed > release ? needed : release;
    }
    return release;
}

/* Before anything is written: does the target know all dtypes and the transform? */
static dcp_status check_target(const builder *b, dcp_error *err)
{
    dcp_save_session *s = b->session;
    int oldest = oldest_release(s, b->plan);
    s->report.target_release = s->opts.target_release > oldest ? s->opts.target_release : oldest;
    return dcp__metadata_check_target(b->m, s->opts.target_release, err);
}

static dcp_status encode_metadata(builder *b, dcp_error *err)
{
    dcp__metadata_write_opts opts = {.target_release = b->session->opts.target_release, .with_own = true};
    add_storages(b); /* once more: transforms have changed their lengths */
    return dcp__metadata_write(b->m, &opts, &b->session->metadata, err);
}

/* ---- the step ---- */

static dcp_status write_to_files(dcp_save_session *s, dcp__layout *l, dcp__digest *digests, dcp_error *err)
{
    size_t n_open = 0;
    dcp_file **files = dcp__calloc(s->ctx, l->n_files, sizeof(dcp_file *));
    if (!files) {
        return dcp__nomem(err);
    }
    dcp_status status = create_files(s, l->n_files, files, &n_open, err);
    if (status == DCP_OK) {
        status =
            s->opts.transform ? dcp__write_transformed(s, l, files, digests, err) : dcp__write_records(s, l, files, digests, err);
    }
    dcp_status closed = close_files(s, files, n_open, status == DCP_OK && !s->opts.no_sync, status == DCP_OK ? err : NULL);
    dcp__free(s->ctx, files);
    return status == DCP_OK ? closed : status;
}

static void report_layout(dcp_save_session *s, const dcp_save_plan *plan, const dcp__layout *l)
{
    s->report.n_items = plan->n;
    s->report.n_records = l->n_records;
    s->report.n_tied = plan->n - l->n_records;
    s->report.n_files = l->n_files;
    s->report.payload_bytes = l->payload_bytes;
    for (size_t i = 0; i < l->n_records; i++) {
        s->report.bytes += l->records[i].length;
    }
    for (size_t i = 0; i < l->n_files; i++) {
        s->report.bytes += l->files[i].blob_header_bytes;
    }
}

/* Files, records, and the metadata that tells of them, once the layout is known. */
static dcp_status write_layout(dcp_save_session *s, const dcp_save_plan *plan, dcp__layout *l, dcp_error *err)
{
    double start = dcp__now();
    builder b = {.session = s, .plan = plan, .layout = l};
    b.digests = dcp__calloc(s->ctx, l->n_records, sizeof *b.digests);
    dcp_status status = b.digests ? build_metadata(&b, err) : dcp__nomem(err);
    status = status == DCP_OK ? check_target(&b, err) : status;
    s->report.plan_seconds += dcp__now() - start;
    start = dcp__now();
    status = status == DCP_OK ? write_to_files(s, l, b.digests, err) : status;
    s->report.write_seconds = dcp__now() - start - s->report.sync_seconds;
    status = status == DCP_OK ? encode_metadata(&b, err) : status;
    if (status == DCP_OK) {
        report_layout(s, plan, l);
    }
    dcp__metadata_free(b.m);
    dcp__free(s->ctx, b.digests);
    return status;
}

dcp_status dcp_save_write(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    if (!s || !plan) {
        return dcp__fail(err, DCP_ARG, "save: no %s", s ? "plan" : "session");
    }
    if (s->is_written) {
        return dcp__fail(err, DCP_STATE, "%s: this session has been written already", s->path);
    }
    s->is_written = true;
    double start = dcp__now();
    dcp__layout layout;
    dcp__layout_opts opts = {.files = s->opts.files ? s->opts.files : 1,
                             .file_per_item = s->opts.file_per_item,
                             .align_payloads = s->opts.align_payloads,
                             .is_safetensors = s->opts.serialization == DCP_SERIALIZE_SAFETENSORS};
    dcp_status status = dcp__layout_make(plan, &opts, &layout, err);
    s->report.plan_seconds += dcp__now() - start;
    status = status == DCP_OK ? write_layout(s, plan, &layout, err) : status;
    dcp__layout_reset(&layout);
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", s->path);
}
