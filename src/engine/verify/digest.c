/* SHA-256 of a tensor's row-major bytes, in bounded memory. */
#include <openssl/evp.h>
#include <stdlib.h>

#include "engine/read/tensor_slabs.h"
#include "engine/save/copy.h"
#include "state/strided.h"

#define SLAB_BYTES ((int64_t)32 << 20)
/* Of a chunk that is read front to back: CRC and SHA-256 then find it in the cache. */
#define BLOCK_BYTES ((size_t)1 << 20)

static dcp_status update(EVP_MD_CTX *md, const void *bytes, size_t n, dcp_error *err)
{
    return EVP_DigestUpdate(md, bytes, n) == 1 ? DCP_OK : dcp__fail(err, DCP_INTERNAL, "sha-256 failed");
}

/* ---- chunks of whole rows: each is read once, and its CRC comes along ---- */

static int by_first_row(const void *a, const void *b)
{
    int64_t x = (*(const dcp__chunk *const *)a)->offsets[0], y = (*(const dcp__chunk *const *)b)->offsets[0];
    return (x > y) - (x < y);
}

/* The chunks with elements in order of rows, if each has whole rows and they follow one another without gap. False otherwise. */
static bool order_rows(const dcp_checkpoint *ck, const dcp_item *item, const dcp__chunk **list, size_t *n)
{
    const dcp__entry *e = dcp__entry_of(item);
    int64_t next = 0;
    *n = 0;
    for (size_t i = 0; i < item->n_chunks; i++) {
        const dcp__chunk *c = &ck->meta->chunks[e->first_chunk + i];
        int64_t elems;
        bool has_rows = c->storage != DCP__NO_STORAGE && dcp__elems(item->ndim, c->sizes, &elems);
        for (int d = 1; has_rows && d < item->ndim; d++) {
            has_rows = c->offsets[d] == 0 && c->sizes[d] == item->extents[d];
        }
        if (!has_rows) {
            return false;
        }
        if (elems) {
            list[(*n)++] = c;
        }
    }
    qsort(list, *n, sizeof *list, by_first_row);
    for (size_t i = 0; i < *n; next += list[i++]->sizes[0]) {
        if (list[i]->offsets[0] != next) {
            return false;
        }
    }
    return next == item->extents[0];
}

static dcp_status hash_chunk(dcp_checkpoint *ck, const dcp_item *item, const dcp__chunk *c, void *buf, size_t buf_bytes,
                             EVP_MD_CTX *md, dcp_error *err)
{
    dcp__origin from = {.ck = ck, .entry = dcp__entry_of(item), .chunk = c};
    dcp_write_item whole = {.kind = DCP_ITEM_TENSOR, .dtype = item->dtype, .ndim = item->ndim, .box = {c->offsets, c->sizes}};
    dcp_status status = DCP_OK;
    int64_t elems = 0;
    dcp__elems(item->ndim, c->sizes, &elems); /* order_rows has looked */
    whole.bytes = (uint64_t)elems * dcp_dtype_bytes(item->dtype);
    for (uint64_t done = 0; done < whole.bytes && status == DCP_OK;) {
        size_t n = whole.bytes - done < buf_bytes ? (size_t)(whole.bytes - done) : buf_bytes;
        status = dcp__origin_pull(&from, &whole, done, buf, n, err);
        status = status == DCP_OK ? update(md, buf, n, err) : status;
        done += n;
    }
    return status;
}

/* *done is false if the chunks are of another form. */
static dcp_status hash_rows(dcp_checkpoint *ck, const dcp_item *item, EVP_MD_CTX *md, bool *done, dcp_error *err)
{
    size_t n;
    const dcp__chunk **list = dcp__alloc(ck->ctx, item->n_chunks * sizeof *list);
    void *buf = dcp__alloc_aligned(ck->ctx, 64, BLOCK_BYTES);
    dcp_status status = list && buf ? DCP_OK : dcp__nomem(err);
    *done = status == DCP_OK && order_rows(ck, item, list, &n);
    for (size_t i = 0; *done && i < n && status == DCP_OK; i++) {
        status = hash_chunk(ck, item, list[i], buf, BLOCK_BYTES, md, err);
    }
    dcp__free_aligned(ck->ctx, buf);
    dcp__free(ck->ctx, list);
    return status;
}

/* ---- any other form: slabs of the tensor, after its CRCs ---- */

static dcp_status hash_slabs(dcp_checkpoint *ck, const dcp_item *item, dcp__slabs *s, EVP_MD_CTX *md, dcp_error *err)
{
    size_t elem = dcp_dtype_bytes(item->dtype);
    void *buf = dcp__alloc_aligned(ck->ctx, 64, (size_t)s->largest * elem);
    dcp_status status = buf ? DCP_OK : dcp__nomem(err);
    while (status == DCP_OK && dcp__slabs_next(s)) {
        status = dcp__slabs_read(s, ck, item, buf, err);
        status = status == DCP_OK ? update(md, buf, (size_t)s->elems * elem, err) : status;
    }
    dcp__free_aligned(ck->ctx, buf);
    return status;
}

/* A slab that is the whole tensor is checked when it is read. */
static dcp_status hash_elements(dcp_checkpoint *ck, const dcp_item *item, EVP_MD_CTX *md, dcp_error *err)
{
    dcp__slabs s;
    size_t elem = dcp_dtype_bytes(item->dtype);
    dcp_status status = DCP_OK;
    dcp__slabs_init(&s, item->ndim, item->extents, SLAB_BYTES / (int64_t)elem);
    if ((uint64_t)s.largest * elem < item->bytes && ck->check_crc) {
        bool done;
        status = hash_rows(ck, item, md, &done, err);
        if (status != DCP_OK || done) {
            return status;
        }
        status = dcp_item_check_crc(ck, item, err);
    }
    return status == DCP_OK ? hash_slabs(ck, item, &s, md, err) : status;
}

static dcp_status hash(dcp_checkpoint *ck, const dcp_item *item, EVP_MD_CTX *md, uint8_t digest[32], dcp_error *err)
{
    dcp_status status = EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 ? DCP_OK : dcp__fail(err, DCP_INTERNAL, "no sha-256");
    if (status == DCP_OK && item->bytes) {
        status = hash_elements(ck, item, md, err);
    }
    if (status == DCP_OK && EVP_DigestFinal_ex(md, digest, NULL) != 1) {
        status = dcp__fail(err, DCP_INTERNAL, "sha-256 failed");
    }
    return status;
}

dcp_status dcp_item_sha256(dcp_checkpoint *ck, const dcp_item *item, uint8_t digest[32], dcp_error *err)
{
    if (!ck || !item || !digest) {
        return dcp__fail(err, DCP_ARG, "hash: no %s", !ck ? "checkpoint" : !item ? "item" : "place for the digest");
    }
    if (item->kind != DCP_ITEM_TENSOR) {
        dcp__fail(err, DCP_MISMATCH, "it is an object, not a tensor");
        return dcp__in_item(ck, -1, item->fqn, DCP_MISMATCH, err);
    }
    dcp_status status = dcp__check_dtype(ck, item, err);
    if (status != DCP_OK) {
        return status;
    }
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    status = md ? hash(ck, item, md, digest, err) : dcp__nomem(err);
    EVP_MD_CTX_free(md);
    return status;
}
