#include "engine/convert/convert_safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/safetensors_writer.h"

/* ---- layout ---- */

typedef struct ordered {
    size_t item;
    size_t elem_bytes, position;
} ordered;

static int compare_widths(const void *a, const void *b)
{
    const ordered *x = a, *y = b;
    if (x->elem_bytes != y->elem_bytes) {
        return x->elem_bytes > y->elem_bytes ? -1 : 1;
    }
    return (x->position > y->position) - (x->position < y->position);
}

/* With the widest elements first, and no gaps, each tensor is aligned to its elements. */
static dcp_status order_items(const dcp__selection *s, size_t *items, size_t n, dcp_error *err)
{
    ordered *list = dcp__calloc(s->c->ctx, n, sizeof *list);
    if (!list) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i++) {
        list[i] = (ordered){items[i], dcp_dtype_bytes(s->items[items[i]].dtype), i};
    }
    if (n) {
        qsort(list, n, sizeof *list, compare_widths);
    }
    for (size_t i = 0; i < n; i++) {
        items[i] = list[i].item;
    }
    dcp__free(s->c->ctx, list);
    return DCP_OK;
}

static dcp_status make_header(const dcp__selection *s, const size_t *items, size_t n, dcp__cv_tensors *t, dcp_error *err)
{
    dcp_context *ctx = s->c->ctx;
    const dcp__safetensors *from = s->c->ck->n_headers ? &s->c->ck->headers[0] : NULL;
    dcp__st_opts opts = {0};
    dcp__st_entry *entries = dcp__calloc(ctx, n, sizeof *entries);
    uint64_t *offsets = dcp__calloc(ctx, n, sizeof *offsets);
    t->places = dcp__calloc(ctx, n, sizeof *t->places);
    dcp_status status = entries && offsets && t->places ? DCP_OK : dcp__nomem(err);
    if (from) { /* what others have noted in the file goes along */
        opts =
            (dcp__st_opts){.extra_keys = from->metadata_keys, .extra_values = from->metadata_values, .n_extra = from->n_metadata};
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        const dcp__cv_item *item = &s->items[items[i]];
        entries[i] = (dcp__st_entry){.name = item->fqn, .dtype = item->dtype, .ndim = item->ndim, .extents = item->extents};
    }
    if (status == DCP_OK) {
        status = dcp__safetensors_header(&t->header, entries, n, &opts, offsets, &t->file.bytes, err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        t->places[i] = (dcp__cv_place){.item = items[i], .offset = offsets[i]};
    }
    dcp__free(ctx, entries);
    dcp__free(ctx, offsets);
    return status;
}

dcp_status dcp__cv_lay_out_tensors(const dcp__selection *s, const char *name, size_t *items, size_t n, dcp__cv_tensors *out,
                                   dcp_error *err)
{
    *out = (dcp__cv_tensors){.file = {.s = s, .name = name}};
    dcp__buf_init(&out->header, s->c->ctx);
    dcp_status status = order_items(s, items, n, err);
    status = status == DCP_OK ? make_header(s, items, n, out, err) : status;
    if (status != DCP_OK) {
        dcp__cv_tensors_reset(out, s->c->ctx);
        return dcp__cv_in_file(s->c, name, status, err);
    }
    out->file.places = out->places;
    out->file.n_places = n;
    out->file.header = &out->header;
    return DCP_OK;
}

void dcp__cv_tensors_reset(dcp__cv_tensors *t, dcp_context *ctx)
{
    dcp__buf_reset(&t->header);
    dcp__free(ctx, t->places);
    t->places = NULL;
}

/* ---- objects ---- */

dcp_status dcp__cv_put_objects(const dcp__selection *s, const char *name, dcp_error *err)
{
    dcp__selection objects = *s;
    objects.items = dcp__calloc(s->c->ctx, s->n, sizeof *objects.items);
    objects.n = 0;
    if (!objects.items) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].kind == DCP_ITEM_OBJECT) {
            objects.items[objects.n] = s->items[i];
            objects.items[objects.n].same_as = objects.n;
            objects.n++;
        }
    }
    dcp_status status = objects.n ? dcp__cv_to_torch(&objects, name, err) : DCP_OK;
    dcp__free(s->c->ctx, objects.items);
    return status;
}

/* ---- one file ---- */

/* model.safetensors has model.objects.pt beside it. */
static dcp_status put_objects_beside(const dcp__selection *s, const char *to, dcp_error *err)
{
    static const char extension[] = ".safetensors", other[] = ".objects.pt";
    size_t len = strlen(to), ext = sizeof extension - 1;
    len -= len > ext && strcmp(to + len - ext, extension) == 0 ? ext : 0;
    char *name = dcp__alloc(s->c->ctx, len + sizeof other);
    if (!name) {
        return dcp__nomem(err);
    }
    memcpy(name, to, len);
    memcpy(name + len, other, sizeof other);
    dcp_status status = dcp__cv_put_objects(s, name, err);
    dcp__free(s->c->ctx, name);
    return status;
}

static dcp_status write_one(dcp__selection *s, dcp__cv_tensors *t, dcp_error *err)
{
    bool was_kept = false;
    dcp_status status = dcp__cv_check_space(s->c, "", t->file.bytes, err);
    status = status == DCP_OK ? dcp__cv_write_file(&t->file, &was_kept, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    s->c->report.n_tensors += t->file.n_places;
    s->c->report.n_kept += was_kept;
    status = put_objects_beside(s, t->file.name, err);
    if (status != DCP_OK) {
        dcp__cv_discard_file(&t->file);
        return status;
    }
    return was_kept ? DCP_OK : dcp__cv_publish_file(&t->file, err);
}

dcp_status dcp__cv_to_safetensors(dcp__selection *s, const char *to, dcp_error *err)
{
    dcp__cv_tensors t;
    size_t n = 0, *items = dcp__calloc(s->c->ctx, s->n, sizeof *items);
    dcp_status status = items ? dcp__cv_check_absent(s->c, to, err) : dcp__nomem(err);
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        if (s->items[i].kind == DCP_ITEM_TENSOR) {
            items[n++] = i;
        }
    }
    if (status == DCP_OK) {
        status = dcp__cv_lay_out_tensors(s, to, items, n, &t, err);
        if (status == DCP_OK) {
            status = write_one(s, &t, err);
            dcp__cv_tensors_reset(&t, s->c->ctx);
        }
    }
    dcp__free(s->c->ctx, items);
    return status;
}
