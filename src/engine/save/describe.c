/* The metadata of a save whose ranks planned and communicated by other means: made of what its coordinator was told. */
#include <string.h>

#include "engine/read/checkpoint.h"
#include "engine/save/session.h"
#include "format/metadata_writer.h"

typedef struct describer {
    dcp__metadata *m; /* texts and shapes stay the caller's until it has been written */
    dcp__strmap files, transforms;
} describer;

/* Number of a text in a table, which has room. */
static dcp_status number_of(dcp__strmap *map, dcp_str *table, size_t *n, dcp_str text, uint64_t *out, dcp_error *err)
{
    dcp_status status = dcp__strmap_add(map, text, *n, out, err);
    if (status == DCP_OK && *out == UINT64_MAX) {
        *out = *n;
        table[(*n)++] = text;
    }
    return status;
}

static dcp_status add_storage(describer *d, const dcp_chunk_info *c, uint32_t *out, dcp_error *err)
{
    uint64_t file, transform = 0;
    dcp__metadata *m = d->m;
    if (!c->file || !c->file[0]) {
        return dcp__fail(err, DCP_ARG, "no file is given");
    }
    dcp_status status = number_of(&d->files, m->files, &m->n_files, dcp_str_of(c->file), &file, err);
    if (status == DCP_OK && c->transforms && c->transforms[0]) {
        status = number_of(&d->transforms, m->transforms, &m->n_transforms, dcp_str_of(c->transforms), &transform, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    *out = (uint32_t)m->n_storages;
    m->storages[m->n_storages++] =
        (dcp__storage){.offset = c->offset, .length = c->length, .file = (uint32_t)file, .transforms = (uint16_t)transform};
    return DCP_OK;
}

static dcp_status check_place(const dcp_item *item, const dcp_box *box, dcp_error *err)
{
    return item->ndim && (!box->offsets || !box->sizes) ? dcp__fail(err, DCP_ARG, "a chunk without a place in the tensor")
                                                        : dcp__check_box(item, box, err);
}

static dcp_status add_chunks(describer *d, const dcp_described *row, dcp_error *err)
{
    dcp__metadata *m = d->m;
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < row->item.n_chunks && status == DCP_OK; i++) {
        const dcp_chunk_info *c = &row->chunks[i];
        dcp__chunk chunk = {c->box.offsets, c->box.sizes, DCP__NO_STORAGE};
        status = check_place(&row->item, &c->box, err);
        status = status == DCP_OK ? add_storage(d, c, &chunk.storage, err) : status;
        m->chunks[m->n_chunks++] = chunk;
    }
    return status;
}

/* What is wrong with a row, NULL: nothing. */
static const char *fault_of(const dcp_described *row)
{
    const dcp_item *item = &row->item;
    if (!item->fqn.ptr || (item->path_len && !item->path) || (item->n_chunks && !row->chunks)) {
        return "no name, path or chunks";
    }
    if (item->kind == DCP_ITEM_OBJECT) {
        return item->n_chunks == 1 ? NULL : "an object has one place";
    }
    if (item->kind != DCP_ITEM_TENSOR || dcp_dtype_bytes(item->dtype) == 0) {
        return item->kind == DCP_ITEM_TENSOR ? "no such dtype" : "no such kind";
    }
    if (item->ndim < 0 || item->ndim > DCP_MAX_NDIM || (item->ndim && !item->extents)) {
        return "no shape";
    }
    for (int k = 0; k < item->ndim; k++) {
        if (item->extents[k] < 0) {
            return "negative extent";
        }
    }
    return NULL;
}

static dcp_status check_row(describer *d, const dcp_described *row, dcp_error *err)
{
    uint64_t existing;
    const char *fault = fault_of(row);
    if (fault) {
        return dcp__fail(err, DCP_ARG, "%s", fault);
    }
    dcp_status status = dcp__strmap_add(&d->m->by_fqn, row->item.fqn, d->m->n_entries, &existing, err);
    return status == DCP_OK && existing != UINT64_MAX ? dcp__fail(err, DCP_ARG, "it is described twice") : status;
}

static dcp_status add_row(describer *d, const dcp_described *row, dcp_error *err)
{
    dcp__metadata *m = d->m;
    dcp__entry e = {.item = row->item, .first_chunk = m->n_chunks, .storage = DCP__NO_STORAGE};
    dcp_status status = check_row(d, row, err);
    if (status == DCP_OK) {
        status = row->item.kind == DCP_ITEM_OBJECT ? add_storage(d, row->chunks, &e.storage, err) : add_chunks(d, row, err);
    }
    if (status != DCP_OK) {
        dcp_str name = row->item.fqn.ptr ? row->item.fqn : dcp_str_of("");
        return dcp__prefix(err, status, "item \"%s\": ", dcp__print(name).text);
    }
    e.item.rank = -1;
    m->entries[m->n_entries++] = e;
    return DCP_OK;
}

static dcp_status fill(describer *d, const dcp_described *rows, size_t n, dcp_error *err)
{
    size_t n_places = 0, n_chunks = 0;
    for (size_t i = 0; i < n; i++) {
        n_places += rows[i].item.n_chunks;
        n_chunks += rows[i].item.kind == DCP_ITEM_TENSOR ? rows[i].item.n_chunks : 0;
    }
    dcp_status status = n_places < UINT32_MAX ? dcp__metadata_reserve(d->m, n, n_chunks, n_places, n_places, n_places, err)
                                              : dcp__fail(err, DCP_LIMIT, "%zu places are too many", n_places);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = add_row(d, &rows[i], err);
    }
    return status == DCP_OK && d->m->n_transforms > UINT16_MAX ? dcp__fail(err, DCP_LIMIT, "too many transforms") : status;
}

static dcp_status describe(dcp_save_session *s, const dcp_described *rows, size_t n, dcp_error *err)
{
    describer d = {0};
    dcp_status status = dcp__metadata_create(s->ctx, &d.m, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__strmap_init(&d.files, s->ctx);
    dcp__strmap_init(&d.transforms, s->ctx);
    status = fill(&d, rows, n, err);
    if (status == DCP_OK && s->opts.target_release) {
        status = dcp__metadata_check_target(d.m, s->opts.target_release, err);
    }
    status = status == DCP_OK ? dcp__session_encode(s, d.m, err) : status;
    dcp__strmap_reset(&d.files);
    dcp__strmap_reset(&d.transforms);
    dcp__metadata_free(d.m);
    return status;
}

dcp_status dcp_save_describe(dcp_save_session *s, const dcp_described *rows, size_t n, dcp_error *err)
{
    if (!s || (n && !rows)) {
        return dcp__fail(err, DCP_ARG, "save: no %s", s ? "rows" : "session");
    }
    if (!s->is_foreign || s->is_written) {
        return dcp__fail(err, DCP_STATE, "%s: %s", s->path,
                         s->is_foreign ? "this session has been written already" : "its ranks communicate by the library");
    }
    dcp_status status = describe(s, rows, n, err);
    s->is_written = status == DCP_OK;
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", s->path);
}

const char *dcp_save_generation(const dcp_save_session *s)
{
    return s ? s->generation : "";
}

const char *dcp_save_id(const dcp_save_session *s)
{
    return s ? s->save_id : "";
}
