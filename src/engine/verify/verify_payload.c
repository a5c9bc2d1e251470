/* Content of the records: their form against the metadata, checksums of all members, digests. Each byte is read once, in blocks
 * that stay in the processor's cache between the copy and the checksum. Small records go to the threads one by one; a large one
 * is read by all threads, and the checksums of its pieces are combined. */
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "engine/verify/verify.h"

#define BLOCK_BYTES ((size_t)1 << 20)
#define PIECE_BYTES ((uint64_t)4 << 20)
#define LARGE_BYTES ((uint64_t)64 << 20)

/* What one thread works with. */
typedef struct worker {
    uint8_t *block;
    dcp__hasher *hasher; /* NULL until needed */
} worker;

typedef struct crew {
    dcp__verify *v;
    worker *workers;
    int n_workers;
} crew;

/* One record, or a torch.save file, while it is checked. */
typedef struct subject {
    crew *crew;
    dcp__verify *v;
    worker *w;
    const dcp__verify_record *r; /* NULL: the whole file */
    uint32_t file;
    dcp__source src; /* its bytes, decoded */
    uint64_t base;   /* position of source byte 0 in the file; of the record if it is decoded */
    bool is_decoded;
    bool is_counted; /* its bytes are in the progress already */
    dcp__zip zip;
    dcp__zip_member **sorted;      /* by position */
    size_t n_checked, n_unchecked; /* members with bytes that have a CRC, and that have none */
} subject;

static dcp_str fqn_of(const subject *s)
{
    return s->r ? dcp__verify_fqn(s->v, s->r) : (dcp_str){NULL, 0};
}

static dcp_status note(const subject *s, dcp_str fqn, const dcp_error *fault, dcp_error *err)
{
    dcp_error placed = *fault;
    if (s->is_decoded) {
        placed.offset = DCP_NO_OFFSET; /* a position in decoded bytes says nothing */
    }
    return dcp__verify_note(s->v, s->file, fqn, s->base, &placed, err);
}

/* ---- reading ---- */

typedef void (*sink_fn)(void *arg, const uint8_t *bytes, size_t n);

/* Passes [from, from + n) of the source to the sink, block by block. */
static dcp_status stream(const subject *s, uint64_t from, uint64_t n, uint8_t *block, sink_fn sink, void *arg, dcp_error *err)
{
    while (n) {
        size_t take = n < BLOCK_BYTES ? (size_t)n : BLOCK_BYTES;
        const uint8_t *bytes = block;
        dcp_status status = DCP_OK;
        if (s->src.base) {
            bytes = (const uint8_t *)s->src.base + from;
        } else {
            status = dcp__source_read(&s->src, from, block, take, err);
        }
        if (status == DCP_OK && !s->is_counted) {
            status = dcp__verify_advance(s->v, take, err);
        }
        if (status != DCP_OK) {
            return status;
        }
        sink(arg, bytes, take);
        from += take;
        n -= take;
    }
    return DCP_OK;
}

static void add_crc(void *arg, const uint8_t *bytes, size_t n)
{
    uint32_t *crc = arg;
    *crc = dcp__crc32(*crc, bytes, n);
}

static void ignore(void *arg, const uint8_t *bytes, size_t n)
{
    (void)arg, (void)bytes, (void)n;
}

/* A range that all threads read together. */
typedef struct split {
    const subject *s;
    uint64_t from, bytes;
    uint32_t *crcs; /* of the pieces; NULL: only read */
} split;

static uint64_t piece_bytes(const split *p, size_t i)
{
    uint64_t left = p->bytes - i * PIECE_BYTES;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

static dcp_status read_piece(void *arg, size_t i, int worker_index, dcp_error *err)
{
    const split *p = arg;
    uint32_t crc = 0;
    uint8_t *block = p->s->crew->workers[worker_index].block;
    dcp_status status = stream(p->s, p->from + i * PIECE_BYTES, piece_bytes(p, i), block, p->crcs ? add_crc : ignore, &crc, err);
    if (p->crcs) {
        p->crcs[i] = crc;
    }
    return status;
}

/* CRC of a range by all threads; crc NULL: only reads it. */
static dcp_status read_together(const subject *s, uint64_t from, uint64_t bytes, uint32_t *crc, dcp_error *err)
{
    size_t n = (size_t)((bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    split p = {s, from, bytes, crc ? dcp__calloc(s->v->ck->ctx, n, sizeof *p.crcs) : NULL};
    if (crc && !p.crcs) {
        return dcp__nomem(err);
    }
    dcp_status status = dcp__parallel(n, s->crew->n_workers, read_piece, &p, err);
    for (size_t i = 0; crc && i < n && status == DCP_OK; i++) {
        *crc = i ? dcp__crc32_combine(*crc, p.crcs[i], piece_bytes(&p, i)) : p.crcs[0];
    }
    dcp__free(s->v->ck->ctx, p.crcs);
    return status;
}

/* ---- members ---- */

/* Item that a member belongs to: in a torch.save file the first that reads its bytes. Records are in order of offset. */
static dcp_str member_fqn(const subject *s, const dcp__zip_member *m)
{
    const dcp__verify *v = s->v;
    if (s->r) {
        return fqn_of(s);
    }
    size_t low = 0, high = v->n_records;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (v->records[mid].offset < m->data) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low < v->n_records && v->records[low].offset == m->data ? dcp__verify_fqn(v, &v->records[low]) : fqn_of(s);
}

static void judge_member(subject *s, const dcp__zip_member *m, uint32_t crc)
{
    if (m->full_bytes == 0) {
        return;
    }
    __atomic_fetch_add(m->crc ? &s->n_checked : &s->n_unchecked, 1, __ATOMIC_RELAXED);
    if (m->crc && m->crc != crc) {
        dcp__verify_defect(s->v, s->file, member_fqn(s, m), DCP_CHECKSUM, s->is_decoded ? s->base : s->base + m->data,
                           "member %s: its %llu bytes have CRC-32 %08x, the directory says %08x", dcp__print(m->name).text,
                           (unsigned long long)m->full_bytes, crc, m->crc);
    }
}

static dcp_status crc_of_deflated(const subject *s, const dcp__zip_member *m, uint8_t *block, uint32_t *crc, dcp_error *err)
{
    dcp__spool *inflated;
    dcp__storage_span span = {.offset = m->data, .bytes = m->bytes, .full_bytes = m->full_bytes, .crc = m->crc};
    dcp_status status = dcp__spool_inflate(s->v->ck, &s->src, &span, &inflated, err);
    if (status != DCP_OK) {
        return status;
    }
    subject decoded = *s;
    decoded.src = dcp__spool_source(inflated);
    decoded.is_counted = true;
    status = stream(&decoded, 0, decoded.src.size, block, add_crc, crc, err);
    dcp__spool_release(s->v->ck, inflated);
    return status == DCP_OK && !s->is_counted ? dcp__verify_advance(s->v, m->bytes, err) : status;
}

static dcp_status check_member(subject *s, const dcp__zip_member *m, uint8_t *block, bool is_alone, dcp_error *err)
{
    uint32_t crc = 0;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status;
    if (m->method != 0) {
        status = crc_of_deflated(s, m, block, &crc, &fault);
    } else if (is_alone && m->bytes > LARGE_BYTES && !s->src.base) {
        status = read_together(s, m->data, m->bytes, &crc, &fault);
    } else {
        status = stream(s, m->data, m->bytes, block, add_crc, &crc, &fault);
    }
    if (status != DCP_OK) {
        return note(s, member_fqn(s, m), &fault, err);
    }
    judge_member(s, m, crc);
    return DCP_OK;
}

static int compare_members(const void *a, const void *b)
{
    const dcp__zip_member *x = *(dcp__zip_member *const *)a, *y = *(dcp__zip_member *const *)b;
    return (x->data > y->data) - (x->data < y->data);
}

/* Opens the archive's directory; its members are in s->sorted afterwards. */
static dcp_status open_zip(subject *s, dcp_error *err)
{
    dcp_context *ctx = s->v->ck->ctx;
    dcp_status status = dcp__zip_open(ctx, &s->src, false, &s->zip, err);
    if (status != DCP_OK) {
        return status;
    }
    s->sorted = dcp__calloc(ctx, s->zip.n_members, sizeof(dcp__zip_member *));
    if (!s->sorted) {
        dcp__zip_reset(&s->zip);
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->zip.n_members; i++) {
        s->sorted[i] = &s->zip.members[i];
    }
    qsort(s->sorted, s->zip.n_members, sizeof(dcp__zip_member *), compare_members);
    return DCP_OK;
}

static void close_zip(subject *s)
{
    dcp__free(s->v->ck->ctx, s->sorted);
    dcp__zip_reset(&s->zip);
    s->sorted = NULL;
}

/* ---- one pass for digest and members ---- */

typedef struct pass {
    subject *s;
    uint64_t pos;
    size_t next; /* member that is met next or being read */
    uint32_t crc;
} pass;

/* The part of the next member that lies in [pos, pos + n); true if that ends it. */
static bool take_member(pass *p, const uint8_t *bytes, size_t n)
{
    const dcp__zip_member *m = p->s->sorted[p->next];
    uint64_t from = m->data > p->pos ? m->data : p->pos, end = m->data + m->bytes;
    uint64_t to = end < p->pos + n ? end : p->pos + n;
    if (from < to && m->method == 0) {
        p->crc = dcp__crc32(p->crc, bytes + (from - p->pos), (size_t)(to - from));
    }
    return end <= p->pos + n;
}

static void add_all(void *arg, const uint8_t *bytes, size_t n)
{
    pass *p = arg;
    dcp__hasher_update(p->s->w->hasher, bytes, n);
    while (p->s->sorted && p->next < p->s->zip.n_members && take_member(p, bytes, n)) {
        const dcp__zip_member *m = p->s->sorted[p->next++];
        if (m->method == 0) {
            judge_member(p->s, m, p->crc);
        }
        p->crc = 0;
    }
    p->pos += n;
}

static bool have_hasher(subject *s)
{
    if (!s->w->hasher) {
        s->w->hasher = dcp__alloc_aligned(s->v->ck->ctx, 64, dcp__hasher_bytes());
    }
    return s->w->hasher != NULL;
}

/* Reads the stored bytes once: digest, and CRCs of the members of s->sorted if there are any. */
static dcp_status check_digest(subject *s, dcp_error *err)
{
    pass p = {.s = s};
    dcp_error fault = DCP_ERROR_INIT;
    if (!have_hasher(s)) {
        return dcp__nomem(err);
    }
    dcp__hasher_init(s->w->hasher);
    dcp_status status = stream(s, 0, s->src.size, s->w->block, add_all, &p, &fault);
    if (status != DCP_OK) {
        return note(s, fqn_of(s), &fault, err);
    }
    dcp__digest found = dcp__hasher_digest(s->w->hasher);
    if (memcmp(found.bytes, s->r->digest->bytes, sizeof found.bytes) != 0) {
        dcp__verify_defect(s->v, s->file, fqn_of(s), DCP_CHECKSUM, s->base,
                           "the digest of its record of %llu bytes differs from the metadata's", (unsigned long long)s->src.size);
    }
    return DCP_OK;
}

/* CRCs of all members of an opened archive, and the digest if it is of these bytes. */
static dcp_status check_members(subject *s, bool with_digest, bool is_alone, dcp_error *err)
{
    dcp_status status = with_digest ? check_digest(s, err) : DCP_OK;
    for (size_t i = 0; i < s->zip.n_members && status == DCP_OK; i++) {
        const dcp__zip_member *m = s->sorted[i];
        if (!with_digest || m->method != 0) {
            bool was_counted = s->is_counted;
            s->is_counted |= with_digest;
            status = check_member(s, m, s->w->block, is_alone, err);
            s->is_counted = was_counted;
        }
    }
    return status;
}

/* ---- form against metadata ---- */

/* A record that holds a tensor for each chunk that names it. */
static dcp_status check_tensors(subject *s, bool *is_good, dcp_error *err)
{
    const dcp__metadata *m = s->v->ck->meta;
    dcp__payload payload;
    dcp_error fault = DCP_ERROR_INIT;
    bool is_open = false;
    for (size_t i = s->r->first; i < s->r->end; i++) {
        uint32_t storage = s->v->ranges->order[i];
        for (size_t u = s->v->first_use[storage]; u < s->v->first_use[storage + 1]; u++) {
            dcp__use use = s->v->uses[u];
            const dcp__entry *e = &m->entries[use.entry];
            if (use.chunk == DCP__NO_STORAGE) {
                continue;
            }
            dcp_status status =
                is_open ? DCP_OK : dcp__record_payload(s->v->ck->ctx, &s->src, &payload, &fault); /* the same for all */
            is_open = status == DCP_OK;
            status = is_open ? dcp__check_payload(e, &m->chunks[use.chunk], &payload, &fault) : status;
            if (status != DCP_OK && fault.code == DCP_CHECKSUM) {
                return DCP_OK; /* the members tell which and where */
            }
            if (status != DCP_OK) {
                *is_good = false;
                status = note(s, e->item.fqn, &fault, err);
            }
            if (status != DCP_OK || !is_open) {
                return status;
            }
        }
    }
    return DCP_OK;
}

/* A record that holds an object: it can be decoded. */
static dcp_status check_objects(subject *s, bool *is_good, dcp_error *err)
{
    for (size_t i = s->r->first; i < s->r->end; i++) {
        uint32_t storage = s->v->ranges->order[i];
        for (size_t u = s->v->first_use[storage]; u < s->v->first_use[storage + 1]; u++) {
            if (s->v->uses[u].chunk != DCP__NO_STORAGE) {
                continue;
            }
            dcp__archive a;
            dcp_error fault = DCP_ERROR_INIT;
            if (dcp__archive_open(s->v->ck->ctx, &s->src, &a, &fault) == DCP_OK) {
                dcp__archive_reset(&a);
                return DCP_OK;
            }
            if (fault.code == DCP_CHECKSUM) {
                return DCP_OK;
            }
            *is_good = false;
            return note(s, s->v->ck->meta->entries[s->v->uses[u].entry].item.fqn, &fault, err);
        }
    }
    return DCP_OK;
}

/* ---- records ---- */

static void count_unchecked(dcp__verify *v, size_t n)
{
    pthread_mutex_lock(&v->lock);
    v->report.n_unchecked += n;
    pthread_mutex_unlock(&v->lock);
}

/* Reads what has no checksum of its own: it may have a digest, and it may be unreadable. */
static dcp_status check_plain(subject *s, uint64_t from, uint64_t bytes, bool is_alone, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (s->r && s->r->digest && !s->is_decoded) {
        return check_digest(s, err);
    }
    dcp_status status = is_alone && bytes > LARGE_BYTES ? read_together(s, from, bytes, NULL, &fault)
                                                        : stream(s, from, bytes, s->w->block, ignore, NULL, &fault);
    return status == DCP_OK ? status : note(s, fqn_of(s), &fault, err);
}

/* A torch.save archive, decoded. with_digest: a digest is known of these very bytes. */
static dcp_status check_archive(subject *s, bool with_digest, bool is_alone, dcp_error *err)
{
    bool is_good = true;
    dcp_error fault = DCP_ERROR_INIT;
    uint8_t head[16];
    size_t n = s->src.size < sizeof head ? (size_t)s->src.size : sizeof head;
    dcp_status status = check_tensors(s, &is_good, err);
    status = status == DCP_OK ? check_objects(s, &is_good, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__source_read(&s->src, 0, head, n, &fault);
    if (status == DCP_OK && dcp__sniff_bytes(head, n, s->src.size) == DCP__IS_LEGACY) {
        status = check_plain(s, 0, s->src.size, is_alone, err);
        count_unchecked(s->v, !s->r->digest);
        return status;
    }
    status = status == DCP_OK ? open_zip(s, &fault) : status;
    if (status != DCP_OK) {
        /* The reason is mostly the one that was told for the item. Its bytes are read all the same. */
        status = is_good || fault.code == DCP_NOMEM ? note(s, fqn_of(s), &fault, err) : DCP_OK;
        return status == DCP_OK ? check_plain(s, 0, s->src.size, is_alone, err) : status;
    }
    status = check_members(s, with_digest, is_alone, err);
    count_unchecked(s->v, s->n_unchecked && !s->n_checked && !s->r->digest);
    close_zip(s);
    return status;
}

/* The most that any of the items that name the record allows it to have when decoded. */
static uint64_t decoded_limit(const subject *s)
{
    const dcp__metadata *m = s->v->ck->meta;
    uint64_t most = 0;
    for (size_t i = s->r->first; i < s->r->end; i++) {
        uint32_t storage = s->v->ranges->order[i];
        for (size_t u = s->v->first_use[storage]; u < s->v->first_use[storage + 1]; u++) {
            dcp__use use = s->v->uses[u];
            const dcp__chunk *c = use.chunk == DCP__NO_STORAGE ? NULL : &m->chunks[use.chunk];
            uint64_t limit = dcp__spool_limit(s->v->ck, &m->entries[use.entry], c);
            most = limit > most ? limit : most;
        }
    }
    return most ? most : dcp__spool_limit(s->v->ck, NULL, NULL);
}

/* A record with transforms: the digest is of the stored bytes, all else of the decoded ones. */
static dcp_status check_transformed(subject *s, dcp_error *err)
{
    dcp__spool *spool;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = s->r->digest ? check_digest(s, err) : dcp__verify_advance(s->v, s->r->length, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp__spool_acquire(s->v->ck, s->r->storage, decoded_limit(s), &spool, &fault);
    if (status != DCP_OK) {
        return dcp__verify_note(s->v, s->file, fqn_of(s), fault.offset == DCP_NO_OFFSET ? s->base : 0, &fault, err);
    }
    s->src = dcp__spool_source(spool);
    s->is_decoded = true;
    s->is_counted = true;
    status = check_archive(s, false, false, err);
    dcp__spool_release(s->v->ck, spool);
    return status;
}

/* A tensor in a safetensors blob: its header must agree with the metadata. */
static dcp_status check_in_blob(subject *s, dcp_error *err)
{
    const dcp__metadata *m = s->v->ck->meta;
    dcp_status status = DCP_OK;
    for (size_t i = s->r->first; i < s->r->end; i++) {
        uint32_t storage = s->v->ranges->order[i];
        for (size_t u = s->v->first_use[storage]; u < s->v->first_use[storage + 1] && status == DCP_OK; u++) {
            dcp__use use = s->v->uses[u];
            const dcp__entry *e = &m->entries[use.entry];
            dcp__located located;
            dcp_error fault = DCP_ERROR_INIT;
            if (use.chunk == DCP__NO_STORAGE) {
                dcp__fail(&fault, DCP_FORMAT, "the record of an object is a safetensors header");
                status = note(s, e->item.fqn, &fault, err);
                continue;
            }
            if (dcp__locate_chunk(s->v->ck, e, &m->chunks[use.chunk], &located, &fault) != DCP_OK) {
                status = dcp__verify_note(s->v, s->file, e->item.fqn, fault.offset == DCP_NO_OFFSET ? s->base : 0, &fault, err);
                continue;
            }
            subject t = *s;
            t.src = located.source;
            t.base = located.file_offset;
            t.r = NULL;
            status = check_plain(&t, located.payload.offset, located.payload.span_bytes, false, err);
            dcp__located_release(s->v->ck, &located);
        }
    }
    count_unchecked(s->v, 1);
    return status;
}

static void find_nonzero(void *arg, const uint8_t *bytes, size_t n)
{
    uint64_t *zeros = arg; /* how many there are before the first other byte; the top bit marks that it was found */
    const uint64_t found = (uint64_t)1 << 63;
    for (size_t i = 0; i < n && !(*zeros & found); i++) {
        *zeros += bytes[i] == 0;
        *zeros |= bytes[i] ? found : 0;
    }
}

/* libdcp leaves zeros before an aligned record (formats.md 11). */
static dcp_status check_gap(const subject *s, dcp_error *err)
{
    uint64_t bytes = s->r->offset - s->r->gap, zeros = 0;
    dcp_error fault = DCP_ERROR_INIT;
    subject gap = *s;
    gap.is_counted = true;
    gap.src = dcp__source_file(s->src.user, s->r->gap, bytes);
    gap.base = s->r->gap;
    dcp_status status = stream(&gap, 0, bytes, s->w->block, find_nonzero, &zeros, &fault);
    if (status != DCP_OK) {
        return note(&gap, fqn_of(s), &fault, err);
    }
    if (zeros >> 63) {
        dcp__verify_defect(s->v, s->file, fqn_of(s), DCP_FORMAT, s->r->gap + (zeros << 1 >> 1),
                           "the gap of %llu bytes before its record is not zero", (unsigned long long)bytes);
    }
    return DCP_OK;
}

/* A small record is read whole and checked in memory. */
static dcp_status load_small(subject *s, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = dcp__source_read(&s->src, 0, s->w->block, (size_t)s->r->length, &fault);
    if (status != DCP_OK) {
        return note(s, fqn_of(s), &fault, err);
    }
    s->src = dcp__source_memory(s->w->block, (size_t)s->r->length);
    s->is_counted = true;
    return dcp__verify_advance(s->v, s->r->length, err);
}

static dcp_status check_opened(subject *s, dcp_file *f, uint64_t bytes, bool is_alone, dcp_error *err)
{
    const dcp__storage *storage = &s->v->ck->meta->storages[s->r->storage];
    dcp__sniff sniff = DCP__IS_UNKNOWN;
    uint64_t ignored;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = DCP_OK;
    s->src = dcp__source_file(f, s->r->offset, s->r->length);
    if (s->v->ck->meta->own.present && s->r->gap < s->r->offset) {
        status = check_gap(s, err);
    }
    if (status == DCP_OK && storage->form == DCP__FORM_RAW) {
        count_unchecked(s->v, !s->r->digest);
        return check_plain(s, 0, s->r->length, is_alone, err);
    }
    if (status == DCP_OK && dcp__sniff_storage(f, bytes, storage, &ignored, &sniff, &fault) != DCP_OK) {
        return note(s, fqn_of(s), &fault, err);
    }
    if (status != DCP_OK) {
        return status;
    }
    if (sniff == DCP__IS_SAFETENSORS) {
        return check_in_blob(s, err);
    }
    if (storage->transforms) {
        return check_transformed(s, err);
    }
    if (s->r->length <= BLOCK_BYTES) {
        status = load_small(s, err);
        if (status != DCP_OK || !s->is_counted) {
            return status;
        }
    }
    return check_archive(s, s->r->digest != NULL, is_alone, err);
}

static dcp_status check_record(crew *c, const dcp__verify_record *r, int worker_index, bool is_alone, dcp_error *err)
{
    subject s = {.crew = c, .v = c->v, .w = &c->workers[worker_index], .r = r, .file = r->file, .base = r->offset};
    dcp_file *f;
    uint64_t bytes;
    dcp_error fault = DCP_ERROR_INIT;
    if (dcp__file_acquire(c->v->ck, r->file, &f, &bytes, &fault) != DCP_OK) {
        return note(&s, fqn_of(&s), &fault, err);
    }
    dcp_status status = check_opened(&s, f, bytes, is_alone, err);
    dcp__file_release(c->v->ck, r->file);
    return status;
}

/* ---- batches ---- */

/* Tasks in ascending order: runs of small ones are shared out, each large one gets all threads for itself. */
typedef struct batch {
    crew *crew;
    bool (*is_large)(const struct batch *b, size_t i);
    dcp_status (*check)(struct batch *b, size_t i, int worker_index, bool is_alone, dcp_error *err);
    subject *archive; /* torch.save: tasks are its members */
    size_t first;
} batch;

static dcp_status check_task(void *arg, size_t i, int worker_index, dcp_error *err)
{
    batch *b = arg;
    return b->check(b, b->first + i, worker_index, false, err);
}

static dcp_status run_batches(batch *b, size_t n, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < n && status == DCP_OK;) {
        size_t end = i;
        while (end < n && !b->is_large(b, end)) {
            end++;
        }
        b->first = i;
        status = end > i ? dcp__parallel(end - i, b->crew->n_workers, check_task, b, err) : b->check(b, end++, 0, true, err);
        i = end;
    }
    return status;
}

/* A digest is computed from the first byte to the last, so such records are shared out whole. */
static bool is_large_record(const batch *b, size_t i)
{
    const dcp__verify_record *r = &b->crew->v->records[i];
    return r->length > LARGE_BYTES && !r->digest && !b->crew->v->ck->meta->storages[r->storage].transforms;
}

static dcp_status check_record_task(batch *b, size_t i, int worker_index, bool is_alone, dcp_error *err)
{
    return check_record(b->crew, &b->crew->v->records[i], worker_index, is_alone, err);
}

/* ---- torch.save files ---- */

static bool is_large_member(const batch *b, size_t i)
{
    return b->archive->sorted[i]->bytes > LARGE_BYTES;
}

static dcp_status check_member_task(batch *b, size_t i, int worker_index, bool is_alone, dcp_error *err)
{
    return check_member(b->archive, b->archive->sorted[i], b->crew->workers[worker_index].block, is_alone, err);
}

static dcp_status check_torch_zip(subject *s, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (open_zip(s, &fault) != DCP_OK) {
        return note(s, (dcp_str){NULL, 0}, &fault, err);
    }
    batch b = {.crew = s->crew, .is_large = is_large_member, .check = check_member_task, .archive = s};
    dcp_status status = run_batches(&b, s->zip.n_members, err);
    close_zip(s);
    return status;
}

static dcp_status check_torch_file(crew *c, dcp_error *err)
{
    dcp_checkpoint *ck = c->v->ck;
    subject s = {.crew = c, .v = c->v, .w = &c->workers[0]};
    dcp_file *f;
    uint64_t bytes;
    if (dcp__file_acquire(ck, 0, &f, &bytes, NULL) != DCP_OK) {
        return DCP_OK; /* was reported as missing */
    }
    c->v->total = bytes;
    s.src = dcp__source_file(f, 0, bytes);
    for (size_t i = 0; i < ck->meta->n_storages; i++) {
        c->v->report.n_unchecked += !ck->archive.spans[i].has_crc;
    }
    dcp_status status = ck->archive.is_legacy ? check_plain(&s, 0, bytes, true, err) : check_torch_zip(&s, err);
    dcp__file_release(ck, 0);
    return status;
}

/* ---- all ---- */

static dcp_status gather_crew(crew *c, dcp_error *err)
{
    dcp_context *ctx = c->v->ck->ctx;
    c->n_workers = dcp__affordable_threads(ctx, 2 * BLOCK_BYTES);
    c->n_workers = c->n_workers > 64 ? 64 : c->n_workers;
    c->workers = dcp__calloc(ctx, (size_t)c->n_workers, sizeof *c->workers);
    for (int i = 0; c->workers && i < c->n_workers; i++) {
        c->workers[i].block = dcp__alloc_aligned(ctx, 4096, BLOCK_BYTES);
        if (!c->workers[i].block) {
            return dcp__nomem(err);
        }
    }
    return c->workers ? DCP_OK : dcp__nomem(err);
}

static void dismiss_crew(crew *c)
{
    for (int i = 0; c->workers && i < c->n_workers; i++) {
        dcp__free_aligned(c->v->ck->ctx, c->workers[i].block);
        dcp__free_aligned(c->v->ck->ctx, c->workers[i].hasher);
    }
    dcp__free(c->v->ck->ctx, c->workers);
}

dcp_status dcp__verify_payload(dcp__verify *v, dcp_error *err)
{
    crew c = {.v = v};
    dcp_status status = gather_crew(&c, err);
    if (status == DCP_OK && v->ck->values) {
        status = check_torch_file(&c, err);
    } else if (status == DCP_OK) {
        batch b = {.crew = &c, .is_large = is_large_record, .check = check_record_task};
        status = run_batches(&b, v->n_records, err);
    }
    dismiss_crew(&c);
    return status;
}
