/* Records to files: small ones are put together in a buffer, large ones go out in blocks. */
#include "engine/save/write_records.h"

#include <string.h>

#include "base/hash.h"
#include "base/pool.h"
#include "engine/save/copy.h"
#include "state/strided.h"
#include "state/value.h"

#define SMALL_BYTES ((uint64_t)256 << 10) /* records up to this size are packed together */
#define MAX_SMALL_STORAGES 8
#define PACK_BYTES ((size_t)4 << 20)
#define BLOCK_BYTES ((size_t)1 << 20)   /* one write of a large payload */
#define CACHE_BYTES ((size_t)128 << 10) /* one step of the checksums */

/* What one worker writes at a time: neighbouring small records, or one large one. */
typedef struct task {
    size_t first, n;
} task;

typedef struct worker {
    uint8_t *buf; /* the run's buf_bytes */
    dcp__hasher *hasher;
} worker;

typedef struct run {
    dcp_save_session *session;
    const dcp__layout *layout;
    dcp_file *const *files;
    dcp__digest *digests;
    task *tasks;
    size_t n_tasks;
    size_t buf_bytes; /* of each worker: PACK_BYTES, or less if that is enough */
    worker *workers;
    int n_workers;
} run;

/* ---- elements ---- */

/* Row-major bytes [offset, offset + n) of a strided view, n and offset multiples of the element's size. */
static void gather(const dcp_tensor *t, uint64_t offset, size_t n, uint8_t *out)
{
    size_t elem = dcp_dtype_bytes(t->dtype);
    int64_t start = (int64_t)(offset / elem), left = (int64_t)(n / elem);
    int64_t row_major[DCP_MAX_NDIM], offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    dcp__row_major(t->ndim, t->extents, row_major);
    while (left > 0) {
        int64_t done = dcp__box_at(t->ndim, t->extents, start, left, offsets, sizes);
        int64_t at = dcp__element_at(t->ndim, offsets, t->strides);
        dcp__copy_strided(out, row_major, (const char *)t->data + at * (int64_t)elem, t->strides, t->ndim, sizes, elem);
        start += done;
        left -= done;
        out += (size_t)done * elem;
    }
}

static dcp_status tensor_bytes(const dcp_tensor *t, uint64_t offset, size_t n, void *buf, const uint8_t **out)
{
    if (dcp__is_row_major(t->ndim, t->extents, t->strides)) {
        *out = (const uint8_t *)t->data + offset;
    } else {
        gather(t, offset, n, buf);
        *out = buf;
    }
    return DCP_OK;
}

dcp_status dcp__item_bytes(const dcp_write_item *item, uint64_t offset, size_t n, void *buf, const uint8_t **out, dcp_error *err)
{
    if (item->tensor.data) {
        return tensor_bytes(&item->tensor, offset, n, buf, out);
    }
    *out = buf;
    return item->pull(item->pull_user, item, offset, buf, n, err);
}

/* What an item is read from if it is a chunk of another checkpoint. */
static dcp__origin *origin_of(const dcp_write_item *item)
{
    return !item->tensor.data && item->pull == dcp__origin_pull ? item->pull_user : NULL;
}

dcp_status dcp__item_bytes_summed(const dcp_write_item *item, uint64_t offset, size_t n, void *buf, const uint8_t **out,
                                  dcp_error *err)
{
    dcp__origin *origin = origin_of(item);
    if (!origin) {
        return dcp__item_bytes(item, offset, n, buf, out, err);
    }
    *out = buf;
    return dcp__origin_read(origin, item, offset, buf, n, err);
}

dcp_status dcp__item_compare(const dcp_write_item *item, uint32_t crc, dcp_error *err)
{
    const dcp__origin *origin = origin_of(item);
    return origin ? dcp__origin_compare(origin, crc, err) : DCP_OK;
}

/* Storage k of a record. */
static uint64_t storage_bytes(const dcp__record *r, size_t k)
{
    return r->storages ? r->storages[k].bytes : r->item->bytes;
}

static dcp_status storage_part(const dcp__record *r, size_t k, uint64_t offset, size_t n, void *buf, const uint8_t **out,
                               dcp_error *err)
{
    return r->storages ? tensor_bytes(dcp_value_tensor(r->storages[k].tensor), offset, n, buf, out)
                       : dcp__item_bytes_summed(r->item, offset, n, buf, out, err);
}

/* After the last part. Storages of objects are memory. */
static dcp_status compare_storage(const dcp__record *r, uint32_t crc, dcp_error *err)
{
    return r->storages ? DCP_OK : dcp__item_compare(r->item, crc, err);
}

/* ---- small records ---- */

static dcp_status pack_record(const dcp__record *r, uint8_t *out, dcp_error *err)
{
    uint32_t crcs[MAX_SMALL_STORAGES];
    uint8_t *at = out;
    dcp_status status = DCP_OK;
    if (!r->archive) {
        const uint8_t *bytes;
        status = dcp__item_bytes(r->item, 0, (size_t)r->length, out, &bytes, err);
        if (status == DCP_OK && bytes != out && r->length) {
            memcpy(out, bytes, (size_t)r->length);
        }
        return status;
    }
    for (size_t k = 0; k <= r->n_storages && status == DCP_OK; k++) {
        dcp__archive_piece(r->archive, k, crcs, at);
        at += dcp__archive_piece_bytes(r->archive, k);
        if (k == r->n_storages) {
            break;
        }
        size_t n = (size_t)storage_bytes(r, k);
        const uint8_t *bytes = at;
        status = n ? storage_part(r, k, 0, n, at, &bytes, err) : DCP_OK;
        if (n && status == DCP_OK && bytes != at) {
            memcpy(at, bytes, n);
        }
        crcs[k] = n && status == DCP_OK ? dcp__crc32(0, at, n) : 0;
        status = n && status == DCP_OK ? compare_storage(r, crcs[k], err) : status;
        at += n;
    }
    return status;
}

static dcp_status name_item(const dcp__record *r, dcp_status status, dcp_error *err)
{
    return status == DCP_OK ? status : dcp__prefix(err, status, "item \"%s\": ", dcp__print(r->item->fqn).text);
}

static dcp_status write_pack(run *r, const task *t, worker *w, dcp_error *err)
{
    const dcp__record *records = &r->layout->records[t->first];
    uint64_t start = records[0].offset, end = start, payload = 0;
    for (size_t i = 0; i < t->n; i++) {
        const dcp__record *rec = &records[i];
        uint8_t *out = w->buf + (rec->offset - start);
        dcp_status status = name_item(rec, pack_record(rec, out, err), err);
        if (status != DCP_OK) {
            return status;
        }
        r->digests[t->first + i] = dcp__xxh3_128(out, (size_t)rec->length);
        end = rec->offset + rec->length;
        for (size_t k = 0; k < rec->n_storages; k++) {
            payload += storage_bytes(rec, k);
        }
    }
    dcp_file *f = r->files[records[0].file];
    dcp_status status = f->storage->ops->write_at(f, w->buf, (size_t)(end - start), start, err);
    status = name_item(&records[0], status, err);
    for (size_t i = 0; i < t->n && status == DCP_OK; i++) {
        dcp__lent_wrote(&r->session->lent, t->first + i);
    }
    return status == DCP_OK ? dcp__session_advance(r->session, payload, err) : status;
}

/* ---- large records ---- */

/* One storage: block after block, each checksummed while it is in the cache. */
static dcp_status write_payload(run *r, const dcp__record *rec, size_t k, uint64_t at, worker *w, uint32_t *crc, dcp_error *err)
{
    dcp_file *f = r->files[rec->file];
    uint64_t bytes = storage_bytes(rec, k);
    dcp_status status = DCP_OK;
    *crc = 0;
    for (uint64_t done = 0; done < bytes && status == DCP_OK;) {
        size_t n = bytes - done < BLOCK_BYTES ? (size_t)(bytes - done) : BLOCK_BYTES;
        const uint8_t *block;
        status = storage_part(rec, k, done, n, w->buf, &block, err);
        for (size_t i = 0; i < n && status == DCP_OK; i += CACHE_BYTES) {
            size_t part = n - i < CACHE_BYTES ? n - i : CACHE_BYTES;
            *crc = dcp__crc32(*crc, block + i, part);
            dcp__hasher_update(w->hasher, block + i, part);
        }
        status = status == DCP_OK ? dcp__session_write_at(r->session, f, block, n, at + done, err) : status;
        status = status == DCP_OK ? dcp__session_advance(r->session, n, err) : status;
        done += n;
    }
    return status == DCP_OK && bytes ? compare_storage(rec, *crc, err) : status;
}

static dcp_status write_piece(run *r, const dcp__record *rec, size_t k, const uint32_t *crcs, uint64_t *at, worker *w,
                              dcp_error *err)
{
    dcp_file *f = r->files[rec->file];
    size_t n = dcp__archive_piece_bytes(rec->archive, k);
    uint8_t *piece = n <= r->buf_bytes ? w->buf : dcp__alloc(r->session->ctx, n); /* the pickle of a large object is in it */
    if (!piece) {
        return dcp__nomem(err);
    }
    dcp__archive_piece(rec->archive, k, crcs, piece);
    dcp__hasher_update(w->hasher, piece, n);
    dcp_status status = n >= DCP__MOVED_BYTES ? dcp__session_write_at(r->session, f, piece, n, *at, err)
                                              : f->storage->ops->write_at(f, piece, n, *at, err);
    *at += n;
    if (piece != w->buf) {
        dcp__free(r->session->ctx, piece);
    }
    return status;
}

static dcp_status write_large(run *r, size_t index, worker *w, dcp_error *err)
{
    const dcp__record *rec = &r->layout->records[index];
    uint64_t at = rec->offset;
    dcp_status status = DCP_OK;
    uint32_t one, *crcs = &one;
    if (rec->n_storages > 1) {
        crcs = dcp__alloc(r->session->ctx, rec->n_storages * sizeof *crcs);
        if (!crcs) {
            return dcp__nomem(err);
        }
    }
    dcp__hasher_init(w->hasher);
    for (size_t k = 0; k <= rec->n_storages && status == DCP_OK; k++) {
        status = rec->archive ? write_piece(r, rec, k, crcs, &at, w, err) : DCP_OK;
        if (status == DCP_OK && k < rec->n_storages) {
            status = write_payload(r, rec, k, at, w, &crcs[k], err);
            at += storage_bytes(rec, k);
        }
    }
    r->digests[index] = dcp__hasher_digest(w->hasher);
    if (crcs != &one) {
        dcp__free(r->session->ctx, crcs);
    }
    if (status == DCP_OK) {
        dcp__lent_wrote(&r->session->lent, index);
    }
    return name_item(rec, status, err);
}

/* ---- tasks ---- */

static bool is_small(const dcp__record *r)
{
    return r->length <= SMALL_BYTES && r->n_storages <= MAX_SMALL_STORAGES;
}

/* Does a record go out together with those of a task before it? Not over a gap: a safetensors header may stand in it. */
static bool joins(const dcp__layout *l, const task *t, const dcp__record *rec)
{
    const dcp__record *first = &l->records[t->first], *last = &l->records[t->first + t->n - 1];
    return is_small(rec) && is_small(first) && first->file == rec->file && last->offset + last->length == rec->offset &&
           rec->offset + rec->length - first->offset <= PACK_BYTES;
}

static size_t buffer_bytes(const dcp__layout *l, const task *t)
{
    const dcp__record *first = &l->records[t->first], *last = &l->records[t->first + t->n - 1];
    return is_small(first) ? (size_t)(last->offset + last->length - first->offset) : BLOCK_BYTES;
}

static dcp_status make_tasks(run *r, dcp_error *err)
{
    const dcp__layout *l = r->layout;
    r->tasks = dcp__alloc(r->session->ctx, l->n_records * sizeof *r->tasks);
    if (!r->tasks) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < l->n_records; i++) {
        const dcp__record *rec = &l->records[i];
        task *last = r->n_tasks ? &r->tasks[r->n_tasks - 1] : NULL;
        if (last && joins(l, last, rec)) {
            last->n++;
        } else {
            r->tasks[r->n_tasks++] = (task){i, 1};
        }
        size_t needed = buffer_bytes(l, &r->tasks[r->n_tasks - 1]);
        r->buf_bytes = needed > r->buf_bytes ? needed : r->buf_bytes;
    }
    return DCP_OK;
}

static bool is_lent(const run *r, const task *t)
{
    bool is_any = false;
    for (size_t i = 0; i < t->n; i++) {
        is_any |= dcp__lent_has(&r->session->lent, t->first + i);
    }
    return is_any;
}

/* What the caller waits for comes first; else tasks keep their order. */
static dcp_status lent_first(run *r, dcp_error *err)
{
    size_t n = 0;
    if (r->session->lent.n_left == 0) {
        return DCP_OK;
    }
    task *sorted = dcp__alloc(r->session->ctx, r->n_tasks * sizeof *sorted);
    if (!sorted) {
        return dcp__nomem(err);
    }
    for (int rest = 0; rest < 2; rest++) {
        for (size_t i = 0; i < r->n_tasks; i++) {
            if (is_lent(r, &r->tasks[i]) == !rest) {
                sorted[n++] = r->tasks[i];
            }
        }
    }
    dcp__free(r->session->ctx, r->tasks);
    r->tasks = sorted;
    return DCP_OK;
}

static dcp_status do_task(void *arg, size_t i, int w, dcp_error *err)
{
    run *r = arg;
    const task *t = &r->tasks[i];
    return is_small(&r->layout->records[t->first]) ? write_pack(r, t, &r->workers[w], err)
                                                   : write_large(r, t->first, &r->workers[w], err);
}

/* What each thread takes besides its buffer where tensors lie on devices. */
static uint64_t ring_bytes(const dcp_save_session *s)
{
    return s->transfer ? dcp__transfer_ring_bytes(s->transfer) : 0;
}

static dcp_status make_workers(run *r, dcp_error *err)
{
    dcp_context *ctx = r->session->ctx;
    r->n_workers = dcp__affordable_threads(ctx, r->buf_bytes + ring_bytes(r->session));
    r->n_workers = r->n_tasks < (size_t)r->n_workers ? (int)r->n_tasks : r->n_workers;
    r->workers = dcp__calloc(ctx, (size_t)r->n_workers, sizeof *r->workers);
    for (int i = 0; r->workers && i < r->n_workers; i++) {
        r->workers[i].buf = dcp__alloc_aligned(ctx, 4096, r->buf_bytes);
        r->workers[i].hasher = dcp__alloc_aligned(ctx, 64, dcp__hasher_bytes());
        if (!r->workers[i].buf || !r->workers[i].hasher) {
            return dcp__nomem(err);
        }
    }
    return r->workers ? DCP_OK : dcp__nomem(err);
}

static void free_workers(run *r)
{
    for (int i = 0; r->workers && i < r->n_workers; i++) {
        dcp__free_aligned(r->session->ctx, r->workers[i].buf);
        dcp__free_aligned(r->session->ctx, r->workers[i].hasher);
    }
    dcp__free(r->session->ctx, r->workers);
}

static dcp_status write_blob_headers(run *r, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < r->layout->n_files && status == DCP_OK; i++) {
        const dcp__layout_file *f = &r->layout->files[i];
        if (f->blob_header_bytes) {
            dcp_file *file = r->files[i];
            status = file->storage->ops->write_at(file, f->blob_header, f->blob_header_bytes, f->blob_offset, err);
        }
    }
    return status;
}

dcp_status dcp__write_records(dcp_save_session *s, const dcp__layout *l, dcp_file *const *files, dcp__digest *digests,
                              dcp_error *err)
{
    run r = {.session = s, .layout = l, .files = files, .digests = digests, .buf_bytes = 1};
    dcp_status status = make_tasks(&r, err);
    status = status == DCP_OK ? lent_first(&r, err) : status;
    status = status == DCP_OK ? make_workers(&r, err) : status;
    status = status == DCP_OK ? write_blob_headers(&r, err) : status;
    status = status == DCP_OK ? dcp__parallel(r.n_tasks, r.n_workers, do_task, &r, err) : status;
    free_workers(&r);
    dcp__free(s->ctx, r.tasks);
    return status;
}
