/* Records and files of a save. */
#include "plan/layout.h"

#include <stdlib.h>
#include <string.h>

#include "format/safetensors_writer.h"
#include "state/strided.h"

#define LARGE_PAYLOAD_BYTES ((uint64_t)1 << 20)
#define PAGE_BYTES 4096

/* What is looked up while records are made. */
typedef struct maker {
    dcp__layout *l;
    const dcp_save_plan *plan;
    const dcp__layout_opts *opts;
    dcp__strmap templates; /* dtype, alignment, shape -> index in archives */
    dcp__strmap ties;      /* dtype, shape, strides, address -> record */
    dcp__buf scratch;
} maker;

/* ---- archives ---- */

static dcp_status add_archive(maker *m, uint32_t alignment, const void *pickle, size_t pickle_len, const uint64_t *storage_bytes,
                              size_t n, size_t *index, dcp_error *err)
{
    dcp__layout *l = m->l;
    dcp__archive_opts opts = {.prefix = "archive", .alignment = alignment};
    void *array = l->archives;
    void *kept = dcp__arena_alloc(&l->arena, pickle_len);
    if (!kept || !dcp__grow(l->ctx, &array, &l->cap_archives, l->n_archives + 1, sizeof(dcp__archive_layout *))) {
        return dcp__nomem(err);
    }
    l->archives = array;
    memcpy(kept, pickle, pickle_len);
    dcp_status status =
        dcp__archive_layout_create(l->ctx, &opts, kept, pickle_len, storage_bytes, n, &l->archives[l->n_archives], err);
    if (status == DCP_OK) {
        *index = l->n_archives++;
    }
    return status;
}

/* Adds key -> value to a map; the key's bytes are kept. */
static dcp_status remember(maker *m, dcp__strmap *map, dcp_error *err, const dcp__buf *key, uint64_t value)
{
    dcp_str kept = dcp__arena_str(&m->l->arena, (dcp_str){(const char *)key->data, key->len});
    return kept.ptr ? dcp__strmap_add(map, kept, value, NULL, err) : dcp__nomem(err);
}

static void put_shape(dcp__buf *key, dcp_dtype dtype, uint32_t extra, int ndim, const int64_t *extents)
{
    key->len = 0;
    dcp__buf_put(key, &dtype, sizeof dtype);
    dcp__buf_put(key, &extra, sizeof extra);
    dcp__buf_put(key, extents, (size_t)ndim * sizeof *extents);
}

/* The archive of a tensor record; records of equal dtype and shape share one. */
static dcp_status tensor_archive(maker *m, const dcp_write_item *item, uint32_t alignment, size_t *index, dcp_error *err)
{
    uint64_t found;
    put_shape(&m->scratch, item->dtype, alignment, item->ndim, item->box.sizes);
    if (m->scratch.failed) {
        return dcp__nomem(err);
    }
    if (dcp__strmap_get(&m->templates, (dcp_str){(char *)m->scratch.data, m->scratch.len}, &found)) {
        *index = (size_t)found;
        return DCP_OK;
    }
    dcp__buf pickle;
    dcp__buf_init(&pickle, m->l->ctx);
    dcp_status status = dcp__pickle_tensor(&pickle, item->dtype, item->ndim, item->box.sizes, err);
    status = status == DCP_OK ? add_archive(m, alignment, pickle.data, pickle.len, &item->bytes, 1, index, err) : status;
    dcp__buf_reset(&pickle);
    return status == DCP_OK ? remember(m, &m->templates, err, &m->scratch, *index) : status;
}

/* ---- records ---- */

static dcp_status add_finished(maker *m, const dcp_write_item *item, dcp__record *r, dcp_error *err)
{
    dcp__layout *l = m->l;
    dcp_str bytes = dcp_value_str(item->object);
    void *array = l->archives;
    if (!dcp__grow(l->ctx, &array, &l->cap_archives, l->n_archives + 1, sizeof(dcp__archive_layout *))) {
        return dcp__nomem(err);
    }
    l->archives = array;
    dcp_status status = dcp__archive_layout_finished(l->ctx, bytes.ptr, bytes.len, &l->archives[l->n_archives], err);
    if (status == DCP_OK) {
        *r = (dcp__record){.item = item, .archive = l->archives[l->n_archives++]};
    }
    return status;
}

static dcp_status add_object(maker *m, const dcp_write_item *item, dcp__record *r, dcp_error *err)
{
    dcp__layout *l = m->l;
    dcp__buf pickle;
    dcp__write_storage *storages = NULL;
    size_t n = 0, index = 0;
    if (dcp_value_kind(item->object) == DCP_KIND_RECORD) {
        return add_finished(m, item, r, err);
    }
    dcp__buf_init(&pickle, l->ctx);
    dcp_status status = dcp__pickle_value(&pickle, item->object, &storages, &n, err);
    dcp__write_storage *kept = dcp__arena_alloc(&l->arena, n * sizeof *kept);
    uint64_t *bytes = dcp__arena_alloc(&l->arena, n * sizeof *bytes);
    if (status == DCP_OK && (!kept || !bytes)) {
        status = dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        kept[i] = storages[i];
        bytes[i] = storages[i].bytes;
        l->payload_bytes += bytes[i];
        if (bytes[i] && !dcp_value_tensor(storages[i].tensor)->data) {
            status = dcp__fail(err, DCP_STATE, "a tensor inside it has not been read");
        }
    }
    status = status == DCP_OK ? add_archive(m, 64, pickle.data, pickle.len, bytes, n, &index, err) : status;
    dcp__buf_reset(&pickle);
    dcp__free(l->ctx, storages);
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "item \"%s\": ", dcp__print(item->fqn).text);
    }
    *r = (dcp__record){.item = item, .archive = l->archives[index], .storages = kept, .n_storages = n};
    return DCP_OK;
}

static dcp_status add_tensor(maker *m, const dcp_write_item *item, dcp__record *r, dcp_error *err)
{
    *r = (dcp__record){.item = item, .n_storages = 1};
    m->l->payload_bytes += item->bytes;
    if (m->opts->is_safetensors) {
        return DCP_OK;
    }
    size_t index;
    uint32_t alignment = m->opts->align_payloads && item->bytes >= LARGE_PAYLOAD_BYTES ? PAGE_BYTES : 64;
    dcp_status status = tensor_archive(m, item, alignment, &index, err);
    if (status == DCP_OK) {
        r->archive = m->l->archives[index];
    }
    return status;
}

/* Puts what tells equal records apart into scratch; empty: nothing is equal to this item. Equal are views of the same memory,
 * and what the caller says is. Safetensors find tensors by name, so there are no ties. */
static void put_tie(maker *m, const dcp_write_item *item)
{
    const dcp_tensor *t = &item->tensor;
    m->scratch.len = 0;
    if (item->kind != DCP_ITEM_TENSOR || item->bytes == 0 || m->opts->is_safetensors || m->opts->file_per_item ||
        (!t->data && !item->tie)) {
        return;
    }
    bool is_strided = t->data && !dcp__is_row_major(t->ndim, t->extents, t->strides);
    put_shape(&m->scratch, item->dtype, is_strided, item->ndim, item->box.sizes);
    dcp__buf_put(&m->scratch, &t->data, sizeof t->data);
    dcp__buf_put(&m->scratch, &item->tie, sizeof item->tie);
    if (is_strided) {
        dcp__buf_put(&m->scratch, t->strides, (size_t)t->ndim * sizeof *t->strides);
    }
}

static dcp_status add_record(maker *m, size_t i, dcp_error *err)
{
    dcp__layout *l = m->l;
    const dcp_write_item *item = &m->plan->items[i];
    uint64_t tied;
    put_tie(m, item);
    if (m->scratch.failed) {
        return dcp__nomem(err);
    }
    if (m->scratch.len && dcp__strmap_get(&m->ties, (dcp_str){(char *)m->scratch.data, m->scratch.len}, &tied)) {
        l->record_of_item[i] = (uint32_t)tied;
        return DCP_OK;
    }
    dcp_status status = m->scratch.len ? remember(m, &m->ties, err, &m->scratch, l->n_records) : DCP_OK;
    dcp__record *r = &l->records[l->n_records];
    if (status == DCP_OK) {
        status = item->kind == DCP_ITEM_OBJECT ? add_object(m, item, r, err) : add_tensor(m, item, r, err);
    }
    if (status == DCP_OK) {
        l->record_of_item[i] = (uint32_t)l->n_records++;
    }
    return status;
}

/* ---- files ---- */

/* PyTorch's rule: objects in turn, tensors by size, the largest first, onto the file that has least so far. */
static int compare_sizes(const void *a, const void *b)
{
    const dcp__record *x = a, *y = b;
    bool x_object = x->item->kind == DCP_ITEM_OBJECT, y_object = y->item->kind == DCP_ITEM_OBJECT;
    if (x_object != y_object) {
        return x_object ? -1 : 1;
    }
    if (!x_object && x->item->bytes != y->item->bytes) {
        return x->item->bytes > y->item->bytes ? -1 : 1;
    }
    return (x->item > y->item) - (x->item < y->item);
}

static int compare_plan_order(const void *a, const void *b)
{
    const dcp__record *x = a, *y = b;
    bool x_object = x->item->kind == DCP_ITEM_OBJECT, y_object = y->item->kind == DCP_ITEM_OBJECT;
    return x_object != y_object ? (x_object ? -1 : 1) : (x->item > y->item) - (x->item < y->item);
}

static int compare_files(const void *a, const void *b)
{
    const dcp__record *x = a, *y = b;
    return x->file != y->file ? (x->file < y->file ? -1 : 1) : (x->offset > y->offset) - (x->offset < y->offset);
}

static uint32_t least_loaded(const dcp__layout *l)
{
    uint32_t best = 0;
    for (uint32_t f = 1; f < l->n_files; f++) {
        best = l->files[f].bytes < l->files[best].bytes ? f : best;
    }
    return best;
}

/* offset serves as the position within the file until the real one is known. */
static void deal_records(dcp__layout *l, const dcp__layout_opts *opts)
{
    size_t n_objects = 0;
    if (opts->file_per_item) {
        for (size_t i = 0; i < l->n_records; i++) {
            l->records[i].file = (uint32_t)i;
        }
        return;
    }
    qsort(l->records, l->n_records, sizeof *l->records, l->n_files > 1 ? compare_sizes : compare_plan_order);
    for (size_t i = 0; i < l->n_records; i++) {
        dcp__record *r = &l->records[i];
        bool is_object = r->item->kind == DCP_ITEM_OBJECT;
        r->file = is_object ? (uint32_t)(n_objects++ % l->n_files) : least_loaded(l);
        r->offset = i;
        l->files[r->file].bytes += is_object ? 0 : r->item->bytes;
    }
    qsort(l->records, l->n_records, sizeof *l->records, compare_files);
}

static dcp_status place_record(const dcp__layout_opts *opts, dcp__record *r, uint64_t *at, dcp_error *err)
{
    bool is_aligned = opts->align_payloads && r->item->kind == DCP_ITEM_TENSOR && r->item->bytes >= LARGE_PAYLOAD_BYTES;
    uint64_t start = is_aligned ? dcp__align_up(*at, PAGE_BYTES) : *at;
    r->offset = start;
    r->length = dcp__archive_length(r->archive);
    if (start < *at || !dcp__add_u64(start, r->length, at) || *at > INT64_MAX) {
        return dcp__fail(err, DCP_LIMIT, "item \"%s\": its file would be longer than a file can be",
                         dcp__print(r->item->fqn).text);
    }
    return DCP_OK;
}

/* ---- safetensors blobs ---- */

static dcp_status blob_header(dcp__layout *l, dcp__layout_file *f, dcp__record *tensors, size_t n, dcp__st_entry *entries,
                              uint64_t *offsets, dcp_error *err)
{
    dcp__buf header;
    uint64_t total;
    for (size_t i = 0; i < n; i++) {
        const dcp_write_item *item = tensors[i].item;
        entries[i] =
            (dcp__st_entry){item->fqn, item->dtype, item->ndim, item->box.sizes, item->box.offsets, item->global_extents};
    }
    dcp__buf_init(&header, l->ctx);
    dcp_status status = dcp__safetensors_header(&header, entries, n, NULL, offsets, &total, err);
    if (status == DCP_OK) {
        f->blob_header = dcp__arena_alloc(&l->arena, header.len);
        status = f->blob_header ? DCP_OK : dcp__nomem(err);
    }
    if (status == DCP_OK) {
        memcpy(f->blob_header, header.data, header.len);
        f->blob_header_bytes = header.len;
        f->blob_offset = f->bytes;
        for (size_t i = 0; i < n; i++) {
            tensors[i].offset = f->blob_offset + offsets[i];
            tensors[i].length = tensors[i].item->bytes;
        }
        if (!dcp__add_u64(f->bytes, total, &f->bytes) || f->bytes > INT64_MAX) {
            status = dcp__fail(err, DCP_LIMIT, "a file would be longer than a file can be");
        }
    }
    dcp__buf_reset(&header);
    return status;
}

static dcp_status place_blob(dcp__layout *l, dcp__layout_file *f, dcp__record *tensors, size_t n, dcp_error *err)
{
    dcp__st_entry *entries = dcp__alloc(l->ctx, n * sizeof *entries);
    uint64_t *offsets = dcp__alloc(l->ctx, n * sizeof *offsets);
    dcp_status status = entries && offsets ? blob_header(l, f, tensors, n, entries, offsets, err) : dcp__nomem(err);
    dcp__free(l->ctx, entries);
    dcp__free(l->ctx, offsets);
    return status;
}

/* ---- all ---- */

static dcp_status place_records(dcp__layout *l, const dcp__layout_opts *opts, dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t i = 0;
    for (size_t file = 0; file < l->n_files && status == DCP_OK; file++) {
        dcp__layout_file *f = &l->files[file];
        f->first = i;
        f->bytes = 0;
        while (i < l->n_records && l->records[i].file == file && l->records[i].archive && status == DCP_OK) {
            status = place_record(opts, &l->records[i++], &f->bytes, err);
        }
        size_t tensors = i;
        while (i < l->n_records && l->records[i].file == file && !l->records[i].archive) {
            i++;
        }
        if (opts->is_safetensors && status == DCP_OK) {
            status = place_blob(l, f, &l->records[tensors], i - tensors, err);
        }
        f->n = i - f->first;
    }
    return status;
}

/* Sorting has moved the records: brings record_of_item up to date. */
static dcp_status renumber(dcp__layout *l, const dcp_save_plan *plan, dcp_error *err)
{
    uint32_t *by_item = dcp__alloc(l->ctx, plan->n * sizeof *by_item); /* of the items that have a record of their own */
    if (!by_item) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < l->n_records; i++) {
        by_item[l->records[i].item - plan->items] = (uint32_t)i;
    }
    for (size_t i = 0; i < plan->n; i++) {
        l->record_of_item[i] = by_item[l->record_of_item[i]];
    }
    dcp__free(l->ctx, by_item);
    return DCP_OK;
}

static dcp_status make_records(maker *m, dcp_error *err)
{
    dcp__layout *l = m->l;
    size_t n = m->plan->n;
    l->records = dcp__alloc(l->ctx, n * sizeof *l->records);
    l->record_of_item = dcp__alloc(l->ctx, n * sizeof *l->record_of_item);
    dcp_status status = l->records && l->record_of_item ? DCP_OK : dcp__nomem(err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = add_record(m, i, err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        /* until renumber: the item whose record it is */
        l->record_of_item[i] = (uint32_t)(l->records[l->record_of_item[i]].item - m->plan->items);
    }
    return status;
}

dcp_status dcp__layout_make(const dcp_save_plan *plan, const dcp__layout_opts *opts, dcp__layout *l, dcp_error *err)
{
    *l = (dcp__layout){.ctx = plan->ctx};
    dcp__arena_init(&l->arena, plan->ctx, UINT64_MAX);
    if (plan->n >= UINT32_MAX) {
        return dcp__fail(err, DCP_LIMIT, "%zu items", plan->n);
    }
    maker m = {.l = l, .plan = plan, .opts = opts};
    dcp__strmap_init(&m.templates, plan->ctx);
    dcp__strmap_init(&m.ties, plan->ctx);
    dcp__buf_init(&m.scratch, plan->ctx);
    dcp_status status = make_records(&m, err);
    dcp__strmap_reset(&m.templates);
    dcp__strmap_reset(&m.ties);
    dcp__buf_reset(&m.scratch);
    if (status != DCP_OK) {
        return status;
    }
    l->n_files = opts->file_per_item ? l->n_records : (size_t)opts->files;
    l->files = dcp__calloc(l->ctx, l->n_files, sizeof *l->files);
    if (!l->files) {
        return dcp__nomem(err);
    }
    deal_records(l, opts);
    status = place_records(l, opts, err);
    return status == DCP_OK ? renumber(l, plan, err) : status;
}

void dcp__layout_reset(dcp__layout *l)
{
    if (!l->ctx) {
        return;
    }
    for (size_t i = 0; i < l->n_archives; i++) {
        dcp__archive_layout_free(l->archives[i]);
    }
    dcp__free(l->ctx, l->archives);
    dcp__free(l->ctx, l->records);
    dcp__free(l->ctx, l->record_of_item);
    dcp__free(l->ctx, l->files);
    dcp__arena_reset(&l->arena);
    *l = (dcp__layout){0};
}
