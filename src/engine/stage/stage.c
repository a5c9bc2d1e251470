#include "engine/stage/stage.h"

#include <stdlib.h>
#include <string.h>

#include "base/pages.h"
#include "base/pool.h"
#include "base/stream_copy.h"
#include "engine/save/device_source.h"
#include "engine/save/write_records.h"
#include "state/strided.h"

#define CHUNK_BYTES ((size_t)64 << 20) /* small regions lie together in blocks of about this size */
#define ALIGN_BYTES ((size_t)64)
#define PIECE_BYTES ((size_t)4 << 20) /* one copy of one thread */

/* One tensor of the state. */
typedef struct dcp__stage_slot {
    dcp_tensor *tensor; /* in the clone */
    const char *from;   /* where its first element is, in the caller's memory */
    size_t bytes;       /* from the first to the last of its elements */
    bool has_gaps;
    size_t region;
    size_t order; /* in the tree */
} slot;

/* Neighbouring regions that lie in one block. */
typedef struct dcp__stage_chunk {
    size_t first, n;
    size_t bytes;
    dcp__host_block *block; /* NULL: no room */
} chunk;

/* ---- what there is ---- */

static dcp_status note_tensor(void *user, dcp_tensor *t, dcp_error *err)
{
    dcp__snapshot *s = user;
    int64_t elems, span;
    if (!dcp__elems(t->ndim, t->extents, &elems) || !dcp__span_elems(t->ndim, t->extents, t->strides, &span) || elems == 0) {
        return DCP_OK;
    }
    void *array = s->slots;
    if (!dcp__grow(s->ctx, &array, &s->cap_slots, s->n_slots + 1, sizeof *s->slots)) {
        return dcp__nomem(err);
    }
    s->slots = array;
    s->slots[s->n_slots] = (slot){.tensor = t,
                                  .from = t->data,
                                  .bytes = (size_t)span * dcp_dtype_bytes(t->dtype),
                                  .has_gaps = span > elems,
                                  .order = s->n_slots};
    s->n_slots++;
    return DCP_OK;
}

static int compare_devices(dcp_device a, dcp_device b)
{
    return a.type != b.type ? (a.type < b.type ? -1 : 1) : (a.index > b.index) - (a.index < b.index);
}

static int compare_geometry(const dcp_tensor *a, const dcp_tensor *b)
{
    if (a->dtype != b->dtype || a->ndim != b->ndim) {
        return a->dtype != b->dtype ? (a->dtype < b->dtype ? -1 : 1) : (a->ndim < b->ndim ? -1 : 1);
    }
    size_t bytes = (size_t)a->ndim * sizeof(int64_t);
    int order = bytes ? memcmp(a->extents, b->extents, bytes) : 0;
    return order || !bytes ? order : memcmp(a->strides, b->strides, bytes); /* views with gaps have strides */
}

/* By device; tensors without gaps, by address; then views with gaps, equal ones beside each other. */
static int compare_slots(const void *a, const void *b)
{
    const slot *x = a, *y = b;
    int order = compare_devices(x->tensor->device, y->tensor->device);
    if (order || x->has_gaps != y->has_gaps) {
        return order ? order : x->has_gaps - y->has_gaps;
    }
    if (x->from != y->from) {
        return (uintptr_t)x->from < (uintptr_t)y->from ? -1 : 1;
    }
    order = x->has_gaps ? compare_geometry(x->tensor, y->tensor) : 0;
    return order ? order : (x->order > y->order) - (x->order < y->order);
}

static int compare_order(const void *a, const void *b)
{
    const slot *x = a, *y = b;
    return (x->order > y->order) - (x->order < y->order);
}

static bool lies_in(const slot *s, const dcp__region *r)
{
    return compare_devices(s->tensor->device, r->device) == 0 && (uintptr_t)s->from >= (uintptr_t)r->from &&
           (uintptr_t)s->from + s->bytes <= (uintptr_t)r->from + r->bytes;
}

static void add_solid(dcp__snapshot *s, slot *t)
{
    dcp__region *last = s->n_regions ? &s->regions[s->n_regions - 1] : NULL;
    if (last && compare_devices(last->device, t->tensor->device) == 0 && t->from < last->from + last->bytes) {
        size_t end = (size_t)(t->from - last->from) + t->bytes;
        last->bytes = end > last->bytes ? end : last->bytes;
    } else {
        s->regions[s->n_regions++] = (dcp__region){.from = t->from, .bytes = t->bytes, .device = t->tensor->device};
    }
    t->region = s->n_regions - 1;
}

/* The regions [low, end) are those of a device without gaps, sorted by address, and apart. */
static dcp__region *region_around(dcp__snapshot *s, const slot *t, size_t low, size_t end)
{
    size_t high = end;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if ((uintptr_t)s->regions[mid].from + s->regions[mid].bytes <= (uintptr_t)t->from) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low < end && lies_in(t, &s->regions[low]) ? &s->regions[low] : NULL;
}

static void add_gathered(dcp__snapshot *s, const slot *before, slot *t)
{
    if (before && before->has_gaps && before->from == t->from &&
        compare_devices(before->tensor->device, t->tensor->device) == 0 && compare_geometry(before->tensor, t->tensor) == 0) {
        t->region = before->region;
        return;
    }
    int64_t elems = 0;
    dcp__elems(t->tensor->ndim, t->tensor->extents, &elems);
    s->regions[s->n_regions] = (dcp__region){.from = t->from,
                                             .bytes = (size_t)elems * dcp_dtype_bytes(t->tensor->dtype),
                                             .device = t->tensor->device,
                                             .gathered = *t->tensor};
    t->region = s->n_regions++;
}

/* Slots are sorted. Of each device the regions without gaps come first. */
static void make_regions(dcp__snapshot *s)
{
    size_t first = 0, solid_end = 0;
    for (size_t i = 0; i < s->n_slots; i++) {
        slot *t = &s->slots[i];
        if (i && compare_devices(t->tensor->device, s->slots[i - 1].tensor->device) != 0) {
            first = solid_end = s->n_regions;
        }
        if (!t->has_gaps) {
            add_solid(s, t);
            solid_end = s->n_regions;
            continue;
        }
        dcp__region *around = region_around(s, t, first, solid_end);
        if (around) {
            t->region = (size_t)(around - s->regions);
        } else {
            add_gathered(s, i ? &s->slots[i - 1] : NULL, t);
        }
    }
}

/* Puts regions into the order in which the tree first names them, which is about that of writing. */
static dcp_status order_regions(dcp__snapshot *s, dcp_error *err)
{
    size_t *place = dcp__alloc(s->ctx, s->n_regions * sizeof *place), n = 0;
    dcp__region *sorted = dcp__alloc(s->ctx, s->n_regions * sizeof *sorted);
    if (!place || !sorted) {
        dcp__free(s->ctx, place);
        dcp__free(s->ctx, sorted);
        return dcp__nomem(err);
    }
    memset(place, 0xff, s->n_regions * sizeof *place);
    qsort(s->slots, s->n_slots, sizeof *s->slots, compare_order);
    for (size_t i = 0; i < s->n_slots; i++) {
        size_t *at = &place[s->slots[i].region];
        if (*at == SIZE_MAX) {
            sorted[n] = s->regions[s->slots[i].region];
            *at = n++;
        }
        s->slots[i].region = *at;
    }
    dcp__free(s->ctx, s->regions);
    dcp__free(s->ctx, place);
    s->regions = sorted;
    return DCP_OK;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN_BYTES - 1) & ~(ALIGN_BYTES - 1);
}

/* A capped pool takes smaller blocks, so that what is left of it is of use. */
static dcp_status make_chunks(dcp__snapshot *s, dcp_error *err)
{
    uint64_t room = dcp__host_pool_room(s->pool);
    size_t most = room / 8 < CHUNK_BYTES ? (size_t)(room / 8) : CHUNK_BYTES;
    s->chunks = dcp__alloc(s->ctx, s->n_regions * sizeof *s->chunks);
    if (!s->chunks) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->n_regions; i++) {
        chunk *last = s->n_chunks ? &s->chunks[s->n_chunks - 1] : NULL;
        size_t bytes = aligned(s->regions[i].bytes);
        if (last && bytes < most && last->bytes <= most - bytes) {
            last->bytes += bytes;
            last->n++;
        } else {
            s->chunks[s->n_chunks++] = (chunk){.first = i, .n = 1, .bytes = bytes};
        }
        s->total_bytes += s->regions[i].bytes;
    }
    return DCP_OK;
}

dcp_status dcp__snapshot_begin(dcp_context *ctx, dcp_value *state, dcp__host_pool *pool, dcp__snapshot *out, dcp_error *err)
{
    dcp__snapshot *s = out;
    *s = (dcp__snapshot){.ctx = ctx, .pool = pool};
    dcp_status status = dcp__value_clone(ctx, state, note_tensor, s, &s->state, err);
    if (status != DCP_OK || s->n_slots == 0) {
        return status;
    }
    s->regions = dcp__calloc(ctx, s->n_slots, sizeof *s->regions);
    if (!s->regions) {
        return dcp__nomem(err);
    }
    qsort(s->slots, s->n_slots, sizeof *s->slots, compare_slots);
    make_regions(s);
    status = order_regions(s, err);
    return status == DCP_OK ? make_chunks(s, err) : status;
}

dcp_status dcp__snapshot_devices(const dcp__snapshot *s, dcp_status (*fn)(void *user, dcp_device device, dcp_error *err),
                                 void *user, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < s->n_regions && status == DCP_OK; i++) {
        status = s->regions[i].device.type != DCP_DEVICE_CPU ? fn(user, s->regions[i].device, err) : DCP_OK;
    }
    return status;
}

/* ---- blocks ---- */

static void place_regions(dcp__snapshot *s, const chunk *c)
{
    char *at = c->block->ptr;
    for (size_t i = c->first; i < c->first + c->n; i++) {
        s->regions[i].to = at;
        at += aligned(s->regions[i].bytes);
    }
}

/* What finds no room is not an error but stays unstaged; the pool is this save's alone, so nothing would be gained by waiting. */
dcp_status dcp__snapshot_take_blocks(dcp__snapshot *s, dcp_error *err)
{
    for (size_t i = s->n_chunks; i-- > 0;) {
        chunk *c = &s->chunks[i];
        dcp_error fault = DCP_ERROR_INIT;
        dcp_status status = dcp__host_pool_acquire(s->pool, c->bytes, false, &c->block, &fault);
        if (status == DCP_OK) {
            place_regions(s, c);
        } else if (status == DCP_LIMIT) {
            s->is_partial = true;
        } else {
            if (err) {
                *err = fault;
            }
            return status;
        }
    }
    return DCP_OK;
}

static dcp_status touch_chunk(void *arg, size_t i, int worker, dcp_error *err)
{
    (void)worker;
    (void)err;
    const dcp__snapshot *s = arg;
    if (s->chunks[i].block) {
        dcp__pages_touch(s->chunks[i].block->ptr, s->chunks[i].block->bytes);
    }
    return DCP_OK;
}

dcp_status dcp__snapshot_touch(dcp__snapshot *s, dcp_error *err)
{
    return dcp__parallel(s->n_chunks, s->ctx->threads, touch_chunk, s, err);
}

/* ---- copying ---- */

/* A part of a region for one thread. */
typedef struct piece {
    dcp__region *region;
    size_t offset, bytes;
} piece;

typedef struct copying {
    dcp__snapshot *snapshot;
    dcp__transfer *transfer;
    piece *pieces;
    size_t n;
} copying;

static dcp_status gather_from_device(const copying *c, const piece *p, dcp_error *err)
{
    dcp__lane *lane;
    dcp_status status = dcp__lane_acquire(c->transfer, p->region->device, &lane, err);
    if (status == DCP_OK) {
        status = dcp__lane_gather(lane, &p->region->gathered, p->offset, p->bytes, p->region->to + p->offset, err);
        dcp__lane_release(c->transfer, lane);
    }
    return status;
}

static dcp_status gather_from_host(const piece *p, dcp_error *err)
{
    dcp_write_item item = {.tensor = p->region->gathered};
    char *to = p->region->to + p->offset;
    const uint8_t *bytes;
    dcp_status status = dcp__item_bytes(&item, p->offset, p->bytes, to, &bytes, err);
    if (status == DCP_OK && (const char *)bytes != to) {
        memcpy(to, bytes, p->bytes);
    }
    return status;
}

static dcp_status copy_piece(void *arg, size_t i, int worker, dcp_error *err)
{
    (void)worker;
    copying *c = arg;
    const piece *p = &c->pieces[i];
    bool is_on_device = p->region->device.type != DCP_DEVICE_CPU;
    dcp_status status = DCP_OK;
    dcp__pages_expect(p->region->to + p->offset, p->bytes); /* a first save would else spend most of its time on them */
    if (p->region->gathered.data) {
        status = is_on_device ? gather_from_device(c, p, err) : gather_from_host(p, err);
    } else {
        dcp__stream_copy(p->region->to + p->offset, p->region->from + p->offset, p->bytes);
    }
    __atomic_fetch_add(c->snapshot->staged_bytes, p->bytes, __ATOMIC_RELAXED);
    return status;
}

/* Regions without gaps that lie on a device are left out: their copies run by themselves meanwhile. */
static bool is_copied_by_thread(const dcp__region *r)
{
    return r->to && (r->gathered.data || r->device.type == DCP_DEVICE_CPU);
}

static dcp_status cut_pieces(copying *c, dcp_error *err)
{
    dcp__snapshot *s = c->snapshot;
    size_t most = 0;
    for (size_t i = 0; i < s->n_regions; i++) {
        most += is_copied_by_thread(&s->regions[i]) ? s->regions[i].bytes / PIECE_BYTES + 1 : 0;
    }
    c->pieces = dcp__alloc(s->ctx, most * sizeof *c->pieces);
    if (!c->pieces) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->n_regions; i++) {
        dcp__region *r = &s->regions[i];
        for (size_t at = 0; is_copied_by_thread(r) && at < r->bytes; at += PIECE_BYTES) {
            c->pieces[c->n++] = (piece){r, at, r->bytes - at < PIECE_BYTES ? r->bytes - at : PIECE_BYTES};
        }
    }
    return DCP_OK;
}

/* Every NVIDIA device knows what one of them knows. */
static bool is_known_to(const dcp__host_block *b, dcp_device d)
{
    return b->is_pinned && b->registration.device.type == d.type &&
           (d.type == DCP_DEVICE_CUDA || b->registration.device.index == d.index);
}

static dcp_status start_device_copy(copying *c, const dcp__region *r, const dcp__host_block *in, dcp_error *err)
{
    dcp__lane *l;
    dcp_status status = dcp__lane_acquire(c->transfer, r->device, &l, err);
    if (status == DCP_OK) {
        status =
            l->driver->ops->to_host(l->driver, l->index, r->to, r->from, r->bytes, is_known_to(in, r->device), l->stream, err);
        dcp__lane_release(c->transfer, l);
    }
    __atomic_fetch_add(c->snapshot->staged_bytes, r->bytes, __ATOMIC_RELAXED);
    return status;
}

/* All copies of a device go into the stream of one lane; they are waited for by dcp__transfer_sync. */
static dcp_status start_device_copies(copying *c, dcp_error *err)
{
    const dcp__snapshot *s = c->snapshot;
    dcp_status status = DCP_OK;
    for (size_t k = 0; k < s->n_chunks && status == DCP_OK; k++) {
        const chunk *in = &s->chunks[k];
        for (size_t i = in->first; in->block && i < in->first + in->n && status == DCP_OK; i++) {
            const dcp__region *r = &s->regions[i];
            status = is_copied_by_thread(r) ? DCP_OK : start_device_copy(c, r, in->block, err);
        }
    }
    return status;
}

/* From here on the state's tensors are in host memory. */
static void point_to_copies(dcp__snapshot *s)
{
    for (size_t i = 0; i < s->n_slots; i++) {
        const slot *t = &s->slots[i];
        const dcp__region *r = &s->regions[t->region];
        if (!r->to) {
            continue;
        }
        t->tensor->data = r->gathered.data ? r->to : r->to + (t->from - r->from);
        t->tensor->strides = r->gathered.data ? NULL : t->tensor->strides;
        t->tensor->device = (dcp_device){DCP_DEVICE_CPU, 0};
    }
}

dcp_status dcp__snapshot_copy(dcp__snapshot *s, dcp__transfer *transfer, dcp_error *err)
{
    copying c = {.snapshot = s, .transfer = transfer};
    dcp_status status = cut_pieces(&c, err);
    status = status == DCP_OK ? start_device_copies(&c, err) : status;
    status = status == DCP_OK ? dcp__parallel(c.n, s->ctx->threads, copy_piece, &c, err) : status;
    if (transfer) { /* also after a failure: the copies write into blocks that go back to the pool */
        dcp_status synced = dcp__transfer_sync(transfer, status == DCP_OK ? err : NULL);
        status = status == DCP_OK ? synced : status;
    }
    dcp__free(s->ctx, c.pieces);
    if (status == DCP_OK) {
        point_to_copies(s);
    }
    return status;
}

/* ---- what was left ---- */

bool dcp__snapshot_is_unstaged(const dcp__snapshot *s, const dcp_tensor *t)
{
    if (!s->is_partial || !t->data || t->device.type != DCP_DEVICE_CPU) {
        return s->is_partial && t->data;
    }
    for (size_t i = 0; i < s->n_chunks; i++) { /* few: a capped pool has eight blocks, and some for large tensors */
        const dcp__host_block *b = s->chunks[i].block;
        if (b && (uintptr_t)t->data >= (uintptr_t)b->ptr && (uintptr_t)t->data < (uintptr_t)b->ptr + b->bytes) {
            return false;
        }
    }
    return true;
}

size_t dcp__snapshot_count_unstaged(const dcp__snapshot *s)
{
    size_t n = 0;
    for (size_t i = 0; s->is_partial && i < s->n_slots; i++) {
        n += !s->regions[s->slots[i].region].to;
    }
    return n;
}

void dcp__snapshot_reset(dcp__snapshot *s)
{
    dcp_value_free(s->state);
    for (size_t i = 0; i < s->n_chunks; i++) {
        dcp__host_pool_release(s->pool, s->chunks[i].block);
    }
    dcp__free(s->ctx, s->slots);
    dcp__free(s->ctx, s->regions);
    dcp__free(s->ctx, s->chunks);
    *s = (dcp__snapshot){0};
}
