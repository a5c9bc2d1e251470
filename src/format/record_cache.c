#include "format/record_cache.h"

#include <string.h>

#include "base/buf.h"
#include "base/hash.h"
#include "format/pickle_writer.h"

#define PICKLE_BYTES 256 /* enough for up to 8 dimensions or so: one allocation */

/* data.pkl says dtype and shape, and nothing else: it is the key as well as the content. */
typedef struct slot {
    dcp__archive_layout *layout; /* NULL: free. Borrows the pickle. */
    uint8_t *pickle;
    size_t pickle_len;
} slot;

struct dcp__record_cache {
    dcp_context *ctx;
    dcp__archive_opts opts;
    dcp__buf pickle; /* of the present call */
    size_t n_slots;
    slot slots[];
};

dcp_status dcp__record_cache_create(dcp_context *ctx, const dcp__archive_opts *opts, size_t n_slots, dcp__record_cache **out,
                                    dcp_error *err)
{
    size_t n = n_slots ? n_slots : 1;
    bool fits = n <= (SIZE_MAX - sizeof(dcp__record_cache)) / sizeof(slot);
    dcp__record_cache *c = fits ? dcp__calloc(ctx, 1, sizeof *c + n * sizeof(slot)) : NULL;
    if (!c) {
        return dcp__nomem(err);
    }
    c->ctx = ctx;
    c->opts = *opts;
    c->n_slots = n;
    dcp__buf_init(&c->pickle, ctx);
    *out = c;
    return DCP_OK;
}

static void empty_slot(dcp__record_cache *c, slot *s)
{
    dcp__archive_layout_free(s->layout);
    dcp__free(c->ctx, s->pickle);
    *s = (slot){NULL, NULL, 0};
}

void dcp__record_cache_free(dcp__record_cache *c)
{
    if (c) {
        for (size_t i = 0; i < c->n_slots; i++) {
            empty_slot(c, &c->slots[i]);
        }
        dcp__buf_reset(&c->pickle);
        dcp__free(c->ctx, c);
    }
}

/* Takes over the pickle's buffer on success. */
static dcp_status fill_slot(dcp__record_cache *c, slot *s, uint64_t bytes, dcp_error *err)
{
    dcp__archive_layout *layout;
    dcp_status status = dcp__archive_layout_create(c->ctx, &c->opts, c->pickle.data, c->pickle.len, &bytes, 1, &layout, err);
    if (status == DCP_OK) {
        empty_slot(c, s);
        *s = (slot){layout, c->pickle.data, c->pickle.len};
        dcp__buf_init(&c->pickle, c->ctx);
    }
    return status;
}

static uint64_t payload_bytes(dcp_dtype dtype, int ndim, const int64_t *extents)
{
    uint64_t bytes = dcp_dtype_bytes(dtype);
    for (int i = 0; i < ndim; i++) {
        bytes *= (uint64_t)extents[i]; /* does not overflow: the pickle was made */
    }
    return bytes;
}

dcp_status dcp__record_cache_get(dcp__record_cache *c, dcp_dtype dtype, int ndim, const int64_t *extents,
                                 const dcp__archive_layout **out, dcp_error *err)
{
    c->pickle.len = 0;
    c->pickle.failed = false;
    (void)dcp__buf_reserve(&c->pickle, PICKLE_BYTES); /* a failure shows below */
    dcp_status status = dcp__pickle_tensor(&c->pickle, dtype, ndim, extents, err);
    if (status != DCP_OK) {
        return status;
    }
    slot *s = &c->slots[dcp__xxh3_64(c->pickle.data, c->pickle.len) % c->n_slots];
    bool is_hit = s->layout && s->pickle_len == c->pickle.len && memcmp(s->pickle, c->pickle.data, s->pickle_len) == 0;
    if (!is_hit) {
        status = fill_slot(c, s, payload_bytes(dtype, ndim, extents), err);
    }
    if (status == DCP_OK) {
        *out = s->layout;
    }
    return status;
}
