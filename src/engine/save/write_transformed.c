/* Records through a stream transform: their stored lengths are only known once they are written, so each file is written in
 * order. */
#include <string.h>

#include "base/pool.h"
#include "engine/save/write_records.h"
#include "format/transform.h"
#include "state/value.h"

/* A record as a source that is read once, from front to back: piece, payload, piece, ... */
typedef struct stream {
    dcp_save_session *session;
    const dcp__record *record;
    uint32_t *crcs;
    size_t k; /* piece k, or payload k */
    bool in_payload;
    uint64_t done;     /* bytes of it */
    uint64_t position; /* in the record */
    uint8_t *piece;    /* the current one; allocated for the longest */
} stream;

typedef struct sink {
    dcp_save_session *session;
    dcp_file *file;
    uint64_t offset;
    dcp__hasher *hasher;
} sink;

typedef struct run {
    dcp_save_session *session;
    dcp__layout *layout;
    dcp_file *const *files;
    dcp__digest *digests;
} run;

static uint64_t payload_bytes(const dcp__record *r, size_t k)
{
    return r->storages ? r->storages[k].bytes : r->item->bytes;
}

static dcp_status take_payload(stream *s, uint8_t *out, size_t n, dcp_error *err)
{
    const dcp__record *r = s->record;
    const uint8_t *bytes;
    dcp_write_item inner;
    const dcp_write_item *item = r->item;
    if (r->storages) {
        inner = (dcp_write_item){.tensor = *dcp_value_tensor(r->storages[s->k].tensor)};
        item = &inner;
    }
    dcp_status status = dcp__item_bytes_summed(item, s->done, n, out, &bytes, err);
    if (status == DCP_OK && bytes != out) {
        memcpy(out, bytes, n);
    }
    s->crcs[s->k] = status == DCP_OK ? dcp__crc32(s->crcs[s->k], out, n) : 0;
    if (status == DCP_OK && s->done + n == payload_bytes(r, s->k)) {
        status = dcp__item_compare(item, s->crcs[s->k], err);
    }
    return status == DCP_OK ? dcp__session_advance(s->session, n, err) : status;
}

/* Bytes of the current piece or payload that are left; moves on to the next one at its end. */
static uint64_t left(stream *s)
{
    for (;;) {
        uint64_t whole = s->in_payload ? payload_bytes(s->record, s->k) : dcp__archive_piece_bytes(s->record->archive, s->k);
        if (!s->in_payload && s->done == 0) {
            dcp__archive_piece(s->record->archive, s->k, s->crcs, s->piece);
        }
        if (s->done < whole || (!s->in_payload && s->k == s->record->n_storages)) {
            return whole - s->done;
        }
        s->k += s->in_payload;
        s->in_payload = !s->in_payload;
        s->done = 0;
    }
}

static dcp_status read_stream(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    stream *s = self->user;
    uint8_t *out = buf;
    dcp_status status = DCP_OK;
    if (offset != s->position) {
        return dcp__fail(err, DCP_INTERNAL, "a record was read at %llu instead of %llu", (unsigned long long)offset,
                         (unsigned long long)s->position);
    }
    s->position += n;
    while (n && status == DCP_OK) {
        uint64_t available = left(s);
        size_t take = n < available ? n : (size_t)available;
        /* Payloads and requests begin at multiples of 64, so that elements stay whole. */
        if (s->in_payload) {
            status = take_payload(s, out, take, err);
        } else {
            memcpy(out, s->piece + s->done, take);
        }
        s->done += take;
        out += take;
        n -= take;
    }
    return status;
}

static dcp_status put(void *user, const void *bytes, size_t n, dcp_error *err)
{
    sink *k = user;
    dcp__hasher_update(k->hasher, bytes, n);
    dcp_status status = n >= DCP__MOVED_BYTES ? dcp__session_write_at(k->session, k->file, bytes, n, k->offset, err)
                                              : k->file->storage->ops->write_at(k->file, bytes, n, k->offset, err);
    k->offset += n;
    return status;
}

static size_t longest_piece(const dcp__record *r)
{
    size_t longest = 0;
    for (size_t k = 0; k <= r->n_storages; k++) {
        size_t n = dcp__archive_piece_bytes(r->archive, k);
        longest = n > longest ? n : longest;
    }
    return longest;
}

static dcp_status write_record(run *r, dcp__record *rec, dcp__digest *digest, sink *k, dcp_error *err)
{
    dcp_context *ctx = r->session->ctx;
    stream st = {.session = r->session, .record = rec};
    st.crcs = dcp__calloc(ctx, rec->n_storages, sizeof *st.crcs);
    st.piece = dcp__alloc(ctx, longest_piece(rec));
    dcp_status status = st.crcs && st.piece ? DCP_OK : dcp__nomem(err);
    if (status == DCP_OK) {
        dcp__source src = {.read = read_stream, .size = dcp__archive_length(rec->archive), .user = &st};
        rec->offset = k->offset;
        dcp__hasher_init(k->hasher);
        status = dcp__transform_encode(ctx, dcp_str_of(r->session->opts.transform), &src, put, k, err);
        rec->length = k->offset - rec->offset;
        *digest = dcp__hasher_digest(k->hasher);
    }
    dcp__free(ctx, st.crcs);
    dcp__free(ctx, st.piece);
    return status == DCP_OK ? status : dcp__prefix(err, status, "item \"%s\": ", dcp__print(rec->item->fqn).text);
}

static dcp_status write_file(void *arg, size_t i, int w, dcp_error *err)
{
    (void)w;
    run *r = arg;
    const dcp__layout_file *f = &r->layout->files[i];
    sink k = {.session = r->session, .file = r->files[i]};
    k.hasher = dcp__alloc_aligned(r->session->ctx, 64, dcp__hasher_bytes());
    dcp_status status = k.hasher ? DCP_OK : dcp__nomem(err);
    for (size_t n = 0; n < f->n && status == DCP_OK; n++) {
        status = write_record(r, &r->layout->records[f->first + n], &r->digests[f->first + n], &k, err);
        if (status == DCP_OK) {
            dcp__lent_wrote(&r->session->lent, f->first + n);
        }
    }
    dcp__free_aligned(r->session->ctx, k.hasher);
    return status;
}

dcp_status dcp__write_transformed(dcp_save_session *s, dcp__layout *l, dcp_file *const *files, dcp__digest *digests,
                                  dcp_error *err)
{
    run r = {s, l, files, digests};
    return dcp__parallel(l->n_files, s->ctx->threads, write_file, &r, err);
}
