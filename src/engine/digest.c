/* SHA-256 of a tensor's row-major bytes, slab by slab. */
#include <openssl/evp.h>
#include <string.h>

#include "engine/engine.h"
#include "state/strided.h"

#define SLAB_BYTES ((int64_t)32 << 20)

/* The tensor cut into slabs: single indexes of the dimensions before `dim`, `step` indexes of it, all of those behind. */
typedef struct slabs {
    int dim;
    int64_t step, bytes;
} slabs;

static slabs cut(const dcp_item *item)
{
    int64_t inner = (int64_t)dcp_dtype_bytes(item->dtype);
    int d = item->ndim - 1;
    while (d > 0 && inner * item->extents[d] <= SLAB_BYTES) {
        inner *= item->extents[d--];
    }
    if (d < 0) {
        return (slabs){-1, 1, inner};
    }
    int64_t step = SLAB_BYTES / inner;
    step = step < 1 ? 1 : step > item->extents[d] ? item->extents[d] : step;
    return (slabs){d, step, step * inner};
}

/* Moves to the next slab; false at the end. */
static bool advance(const dcp_item *item, const slabs *s, int64_t *offsets)
{
    for (int d = s->dim; d >= 0; d--) {
        offsets[d] += d == s->dim ? s->step : 1;
        if (offsets[d] < item->extents[d]) {
            return true;
        }
        offsets[d] = 0;
    }
    return false;
}

static dcp_status hash_slab(dcp_checkpoint *ck, const dcp_item *item, const slabs *s, const int64_t *offsets, void *buf,
                            EVP_MD_CTX *md, dcp_error *err)
{
    int64_t sizes[DCP_MAX_NDIM], elems;
    for (int d = 0; d < item->ndim; d++) {
        int64_t left = item->extents[d] - offsets[d];
        sizes[d] = d < s->dim ? 1 : d > s->dim ? item->extents[d] : left < s->step ? left : s->step;
    }
    dcp_box box = {offsets, sizes};
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, sizes, buf);
    dcp_status status = dcp_read(ck, item, &box, &dst, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__elems(item->ndim, sizes, &elems);
    return EVP_DigestUpdate(md, buf, (size_t)elems * dcp_dtype_bytes(item->dtype)) == 1
               ? DCP_OK
               : dcp__fail(err, DCP_INTERNAL, "sha-256 failed");
}

static dcp_status hash_slabs(dcp_checkpoint *ck, const dcp_item *item, EVP_MD_CTX *md, uint8_t digest[32], dcp_error *err)
{
    int64_t offsets[DCP_MAX_NDIM] = {0};
    slabs s = item->bytes ? cut(item) : (slabs){0};
    bool in_parts = (uint64_t)s.bytes < item->bytes;
    dcp_status status = in_parts && ck->check_crc ? dcp_item_check_crc(ck, item, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    status = EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1 ? DCP_OK : dcp__fail(err, DCP_INTERNAL, "no sha-256");
    if (status == DCP_OK && item->bytes) {
        void *buf = dcp__alloc_aligned(ck->ctx, 64, (size_t)s.bytes);
        status = buf ? DCP_OK : dcp__nomem(err);
        do {
            status = status == DCP_OK ? hash_slab(ck, item, &s, offsets, buf, md, err) : status;
        } while (status == DCP_OK && advance(item, &s, offsets));
        dcp__free_aligned(ck->ctx, buf);
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
    EVP_MD_CTX *md = EVP_MD_CTX_new();
    dcp_status status = md ? hash_slabs(ck, item, md, digest, err) : dcp__nomem(err);
    EVP_MD_CTX_free(md);
    return status;
}
