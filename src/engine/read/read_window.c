/* Windows: many small records, read as one and taken apart in memory. */
#include <string.h>

#include "engine/read/read_plan.h"

/* A payload inside the window's buffer; false if the bytes are of a form that has to be located in the file. */
static bool locate_in_window(const dcp__read_plan *r, const dcp__read_step *s, const dcp__unit *u, const uint8_t *data,
                             dcp__located *out, dcp_status *status, dcp_error *err)
{
    const dcp_checkpoint *ck = r->ck;
    const dcp__piece *p = &r->pieces[u->first];
    const uint8_t *bytes = data + (u->storage->offset - s->lo);
    *out = (dcp__located){.file = u->storage->file, .file_offset = u->storage->offset};
    out->source = dcp__source_memory(bytes, u->storage->length);
    if (ck->values || u->storage->form == DCP__FORM_RAW) {
        return false;
    }
    dcp__sniff form = dcp__sniff_bytes(bytes, u->storage->length, u->storage->length);
    if (form != DCP__IS_ZIP && form != DCP__IS_LEGACY) {
        return false;
    }
    *status = dcp__record_payload(ck->ctx, &out->source, &out->payload, err);
    if (*status == DCP_OK) {
        *status = dcp__check_payload(p->entry, p->chunk, &out->payload, err);
    }
    return *status != DCP_OK || !out->payload.storage.is_deflated;
}

/* A payload that was located in the file, read from the window instead where it lies in it. */
static void aim_at_window(const dcp__read_step *s, const uint8_t *data, dcp__located *l)
{
    const dcp__payload *p = &l->payload;
    if (l->file_offset == 0 && p->offset >= s->lo && p->span_bytes <= s->hi - s->lo &&
        p->offset - s->lo <= s->hi - s->lo - p->span_bytes && p->storage.offset >= s->lo) {
        l->source = dcp__source_memory(data, s->hi - s->lo);
        l->payload.offset -= s->lo;
        l->payload.storage.offset -= s->lo;
        l->file_offset = s->lo;
    }
}

static dcp_status read_unit_of_window(const dcp__read_plan *r, const dcp__read_step *s, const dcp__unit *u, const uint8_t *data,
                                      dcp__tile_buf *buf, dcp_error *err)
{
    dcp__located l;
    dcp_status status = DCP_OK;
    const dcp__piece *first = &r->pieces[u->first];
    if (!locate_in_window(r, s, u, data, &l, &status, err)) {
        status = dcp__locate_chunk(r->ck, first->entry, first->chunk, &l, err);
        if (status == DCP_OK) {
            aim_at_window(s, data, &l);
        }
    }
    status = status == DCP_OK ? dcp__check_unit_crc(r, u, &l.source, &l.payload, err) : status;
    for (size_t i = 0; i < u->n && status == DCP_OK; i++) {
        status = dcp__read_piece(r, first + i, &l.source, &l.payload, -1, 0, 0, buf, err);
    }
    if (status != DCP_OK) {
        dcp__to_file_offset(&l, err);
        dcp__to_record_offset(u->storage, status, err);
    }
    dcp__located_release(r->ck, &l);
    return status == DCP_OK ? status : dcp__in_item(r->ck, u->storage->file, first->entry->item.fqn, status, err);
}

/* Reads what there is of a window; a file that ends early is left to the units that it concerns. */
static dcp_status fill_window(const dcp__read_plan *r, const dcp__read_step *s, dcp__tile_buf *buf, dcp_error *err)
{
    uint32_t index = r->units[s->first].storage->file;
    size_t n = (size_t)(s->hi - s->lo);
    dcp_file *f;
    uint64_t bytes;
    if (buf->bytes < n) {
        dcp__tile_buf_reset(buf);
        buf->data = dcp__alloc_aligned(buf->ctx, 4096, n < DCP__WINDOW_BYTES ? DCP__WINDOW_BYTES : n);
        if (!buf->data) {
            return dcp__nomem(err);
        }
        buf->bytes = n < DCP__WINDOW_BYTES ? DCP__WINDOW_BYTES : n;
    }
    dcp_status status = dcp__file_acquire(r->ck, index, &f, &bytes, err);
    if (status == DCP_OK) {
        status = dcp__read_exact(f, buf->data, n, s->lo, err);
        dcp__file_release(r->ck, index);
    }
    return status;
}

/* Names the item whose record the end of the file cuts, rather than the window. */
static dcp_status blame_unit(const dcp__read_plan *r, const dcp__read_step *s, dcp_status status, dcp_error *err)
{
    const dcp__unit *u = &r->units[s->first];
    for (size_t i = 0; err && err->offset != DCP_NO_OFFSET && i < s->n; i++) {
        const dcp__storage *st = r->units[s->first + i].storage;
        if (st->offset + st->length > err->offset) {
            u = &r->units[s->first + i];
            break;
        }
    }
    return dcp__in_item(r->ck, u->storage->file, r->pieces[u->first].entry->item.fqn, status, err);
}

dcp_status dcp__read_window(const dcp__read_plan *r, const dcp__read_step *s, dcp__tile_buf *window, dcp__tile_buf *tile,
                            dcp_error *err)
{
    dcp_status status = fill_window(r, s, window, err);
    if (status != DCP_OK) {
        return blame_unit(r, s, status, err);
    }
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        status = read_unit_of_window(r, s, &r->units[s->first + i], window->data, tile, err);
    }
    return status;
}
