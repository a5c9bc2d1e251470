#include "engine/load/broadcast.h"

#include <pthread.h>

#include "engine/load/place.h"
#include "engine/read/tensor_slabs.h"
#include "plan/coverage.h"
#include "plan/wire.h"
#include "state/strided.h"

#define MOST_MESSAGE_BYTES ((uint64_t)8 << 20)
#define LEAST_MESSAGE_BYTES ((uint64_t)64 << 10)
#define MOST_PIECES 4096 /* in a message: what is known about each takes memory as well */
#define ALIGNMENT 16     /* of pieces in a message, enough for elements of any dtype */

/* ---- what is wanted ---- */

/* A box by its first indexes and those behind its last ones. */
typedef struct span {
    int64_t *from, *to; /* NULL: nothing is wanted */
} span;

/* What is wanted of each entry, by one rank or by all: the smallest box around it. */
typedef struct wants {
    const dcp__metadata *m;
    dcp__arena arena;
    span *of;              /* [entry] */
    uint64_t memory_bytes; /* the smallest budget of those who want it */
} wants;

static dcp_status wants_init(wants *w, dcp_context *ctx, const dcp__metadata *m, dcp_error *err)
{
    *w = (wants){.m = m, .memory_bytes = UINT64_MAX};
    dcp__arena_init(&w->arena, ctx, UINT64_MAX);
    w->of = dcp__calloc(ctx, m->n_entries, sizeof *w->of);
    return w->of ? DCP_OK : dcp__nomem(err);
}

static void wants_reset(wants *w, dcp_context *ctx)
{
    if (w->m) {
        dcp__free(ctx, w->of);
        dcp__arena_reset(&w->arena);
    }
}

static dcp_status want(wants *w, size_t entry, const int64_t *offsets, const int64_t *sizes, dcp_error *err)
{
    span *s = &w->of[entry];
    size_t ndim = (size_t)w->m->entries[entry].item.ndim;
    bool is_first = !s->from;
    if (dcp__box_is_empty((int)ndim, sizes)) {
        return DCP_OK;
    }
    if (is_first) {
        s->from = dcp__arena_alloc(&w->arena, 2 * ndim * sizeof *s->from);
        if (!s->from) {
            return dcp__arena_fail(&w->arena, err);
        }
        s->to = s->from + ndim;
    }
    for (size_t d = 0; d < ndim; d++) {
        int64_t end = offsets[d] + sizes[d];
        s->from[d] = is_first || offsets[d] < s->from[d] ? offsets[d] : s->from[d];
        s->to[d] = is_first || end > s->to[d] ? end : s->to[d];
    }
    return DCP_OK;
}

static dcp_status want_requests(wants *w, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    static const int64_t zeros[DCP_MAX_NDIM];
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        const dcp_read_request *r = &requests[i];
        bool is_whole = !r->box.offsets;
        status = want(w, (size_t)(dcp__entry_of(r->item) - w->m->entries), is_whole ? zeros : r->box.offsets,
                      is_whole ? r->item->extents : r->box.sizes, err);
    }
    return status;
}

/* The message: budget; for each entry that is wanted its distance from the one before, and the box. */
static void put_wants(const wants *w, dcp__buf *out)
{
    int64_t sizes[DCP_MAX_NDIM];
    size_t last = 0;
    dcp__put_varint(out, w->memory_bytes);
    for (size_t i = 0; i < w->m->n_entries; i++) {
        const dcp_item *item = &w->m->entries[i].item;
        if (w->of[i].from) {
            for (int d = 0; d < item->ndim; d++) {
                sizes[d] = w->of[i].to[d] - w->of[i].from[d];
            }
            dcp__put_varint(out, i - last);
            dcp__put_box(out, item->ndim, item->extents, w->of[i].from, sizes);
            last = i;
        }
    }
}

/* Adds what a rank's message wants. */
static dcp_status take_wants(wants *w, int rank, const void *bytes, size_t n, dcp_error *err)
{
    int64_t offsets[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    dcp__wire in = dcp__wire_of(bytes, n);
    uint64_t memory_bytes = dcp__get_varint(&in);
    dcp_status status = DCP_OK;
    size_t entry = 0;
    w->memory_bytes = memory_bytes < w->memory_bytes ? memory_bytes : w->memory_bytes;
    while (dcp__wire_left(&in) && status == DCP_OK) {
        entry += (size_t)dcp__get_bounded(&in, w->m->n_entries);
        const dcp_item *item = entry < w->m->n_entries ? &w->m->entries[entry].item : NULL;
        if (!item || item->kind != DCP_ITEM_TENSOR) {
            return dcp__wire_fail(&in, "wish", rank, err);
        }
        dcp__get_box(&in, item->ndim, item->extents, offsets, sizes);
        bool is_good = !in.bad && dcp__box_is_inside(item->ndim, item->extents, offsets, sizes);
        status = is_good ? want(w, entry, offsets, sizes, err) : dcp__wire_fail(&in, "wish", rank, err);
    }
    return in.bad ? dcp__wire_fail(&in, "wish", rank, err) : status;
}

static dcp_status take_all_wants(wants *w, const dcp__parts *messages, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int r = 0; r < messages->n && status == DCP_OK; r++) {
        size_t n;
        const uint8_t *bytes = dcp__part(messages, r, &n);
        status = take_wants(w, r, bytes, n, err);
    }
    return status;
}

static dcp_status as_message(const wants *w, dcp__buf *out, dcp_error *err)
{
    put_wants(w, out);
    return out->failed ? dcp__nomem(err) : DCP_OK;
}

/* Collective. What all ranks want, on every rank. */
static dcp_status agree_on_wants(const dcp__step *step, int root, const wants *own, dcp_status mine, wants *all, dcp_error *err)
{
    dcp__buf message;
    dcp__parts messages = {0};
    dcp__buf_init(&message, step->ctx);
    mine = mine == DCP_OK ? as_message(own, &message, err) : mine;
    dcp_status status = dcp__gather(step, mine, root, message.data, message.len, &messages, err);
    message.len = 0;
    if (status == DCP_OK) {
        bool is_root = dcp__step_rank(step) == root;
        mine = wants_init(all, step->ctx, own->m, err);
        mine = mine == DCP_OK && is_root ? take_all_wants(all, &messages, err) : mine;
        mine = mine == DCP_OK && is_root ? as_message(all, &message, err) : mine;
        status = dcp__broadcast(step, mine, root, &message, err);
        mine = status == DCP_OK && !is_root ? take_wants(all, root, message.data, message.len, err) : DCP_OK;
        status = status == DCP_OK ? dcp__agree(step, mine, err) : status;
    }
    dcp__parts_free(&messages);
    dcp__buf_reset(&message);
    return status;
}

/* ---- messages ---- */

/* Part of a tensor, row-major at a place of a message. */
typedef struct piece {
    const dcp__entry *entry;
    dcp_box box;
    size_t at;
} piece;

typedef struct message {
    dcp__arena arena; /* boxes of the pieces */
    piece pieces[MOST_PIECES];
    size_t n;
    size_t bytes;
    dcp__buf data;
} message;

/* Goes through the pieces of all that is wanted. All ranks come to the same messages. */
typedef struct walk {
    const wants *all;
    uint64_t message_bytes;
    size_t entry;
    dcp__slabs slabs;
    int64_t extents[DCP_MAX_NDIM]; /* of what is wanted of the entry, which slabs cut */
    bool is_in_entry, has_slab;
} walk;

static void begin_entry(walk *w)
{
    const dcp_item *item = &w->all->m->entries[w->entry].item;
    const span *s = &w->all->of[w->entry];
    for (int d = 0; d < item->ndim; d++) {
        w->extents[d] = s->to[d] - s->from[d];
    }
    dcp__slabs_init(&w->slabs, item->ndim, w->extents, (int64_t)(w->message_bytes / dcp_dtype_bytes(item->dtype)));
    w->is_in_entry = true;
}

/* Moves to the next slab, unless one is waiting for its message already. */
static bool find_slab(walk *w)
{
    while (!w->has_slab && w->entry < w->all->m->n_entries) {
        if (!w->is_in_entry && w->all->of[w->entry].from) {
            begin_entry(w);
        }
        w->has_slab = w->is_in_entry && dcp__slabs_next(&w->slabs);
        w->is_in_entry = w->has_slab;
        w->entry += !w->has_slab;
    }
    return w->has_slab;
}

static dcp_status add_piece(walk *w, message *m, size_t at, dcp_error *err)
{
    const dcp__entry *e = &w->all->m->entries[w->entry];
    size_t ndim = (size_t)e->item.ndim;
    int64_t *box = dcp__arena_alloc(&m->arena, 2 * ndim * sizeof *box);
    if (!box) {
        return dcp__arena_fail(&m->arena, err);
    }
    for (size_t d = 0; d < ndim; d++) {
        box[d] = w->all->of[w->entry].from[d] + w->slabs.offsets[d];
        box[ndim + d] = w->slabs.sizes[d];
    }
    m->pieces[m->n++] = (piece){e, {box, box + ndim}, at};
    m->bytes = at + (size_t)w->slabs.elems * dcp_dtype_bytes(e->item.dtype);
    w->has_slab = false;
    return DCP_OK;
}

/* The pieces of the next message; none at the end. */
static dcp_status next_message(walk *w, message *m, dcp_error *err)
{
    dcp_status status = DCP_OK;
    dcp__arena_reset(&m->arena);
    m->n = 0;
    m->bytes = 0;
    m->data.len = 0;
    while (status == DCP_OK && m->n < MOST_PIECES && find_slab(w)) {
        size_t at = (m->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        uint64_t bytes = (uint64_t)w->slabs.elems * dcp_dtype_bytes(w->all->m->entries[w->entry].item.dtype);
        if (m->n && at + bytes > w->message_bytes) {
            break;
        }
        status = add_piece(w, m, at, err);
    }
    return status;
}

/* Of the poorest rank: two messages, one being sent and one being read, and two copies of one where elements are cast. */
static uint64_t message_bytes(uint64_t memory_bytes)
{
    uint64_t bytes = memory_bytes / 8;
    return bytes > MOST_MESSAGE_BYTES ? MOST_MESSAGE_BYTES : bytes < LEAST_MESSAGE_BYTES ? LEAST_MESSAGE_BYTES : bytes;
}

/* ---- sending ---- */

typedef struct sending {
    const dcp__step *step;
    int root;
    dcp_checkpoint *ck;
    const dcp_read_opts *opts;
    uint64_t wanted_bytes, done_bytes; /* by this rank */
    dcp__placer placer;
    walk walk;
    message messages[2];
    dcp__share_bytes bytes;
} sending;

static bool is_root(const sending *s)
{
    return dcp__step_rank(s->step) == s->root;
}

static dcp_status read_message(sending *s, message *m, dcp_error *err)
{
    dcp_read_request *requests = dcp__calloc(s->ck->ctx, m->n, sizeof *requests);
    if (!requests || !dcp__buf_reserve(&m->data, m->bytes)) {
        dcp__free(s->ck->ctx, requests);
        return dcp__nomem(err);
    }
    memset(m->data.data, 0, m->bytes); /* what lies between the pieces is sent, too */
    for (size_t i = 0; i < m->n; i++) {
        const piece *p = &m->pieces[i];
        const dcp_item *item = &p->entry->item;
        dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, p->box.sizes, m->data.data + p->at);
        requests[i] = (dcp_read_request){item, p->box, dst};
    }
    dcp_status status = dcp_read_many(s->ck, requests, m->n, err);
    m->data.len = m->bytes;
    s->bytes.read += status == DCP_OK ? m->bytes : 0;
    dcp__free(s->ck->ctx, requests);
    return status;
}

/* A message that root reads on a thread of its own, while the one before it is sent. */
typedef struct ahead {
    sending *s;
    message *m;
    pthread_t thread;
    bool is_running;
    dcp_status status;
    dcp_error err;
} ahead;

static void *read_on_thread(void *arg)
{
    ahead *a = arg;
    a->status = read_message(a->s, a->m, &a->err);
    return NULL;
}

/* Makes the next message, and begins to read it. */
static void begin_next(ahead *a)
{
    a->status = next_message(&a->s->walk, a->m, &a->err);
    if (a->status == DCP_OK && a->m->n && is_root(a->s)) {
        a->is_running = pthread_create(&a->thread, NULL, read_on_thread, a) == 0;
        if (!a->is_running) {
            read_on_thread(a);
        }
    }
}

static dcp_status end_next(ahead *a, dcp_error *err)
{
    if (a->is_running) {
        pthread_join(a->thread, NULL);
    }
    return a->status == DCP_OK ? DCP_OK : dcp__fail_as(err, &a->err);
}

static dcp_status place_message(sending *s, const message *m, dcp_error *err)
{
    dcp_status status = m->data.len == m->bytes ? DCP_OK
                                                : dcp__fail(err, DCP_FORMAT, "rank %d sends %zu bytes instead of %zu", s->root,
                                                            m->data.len, m->bytes);
    for (size_t i = 0; i < m->n && status == DCP_OK; i++) {
        const piece *p = &m->pieces[i];
        status = dcp__place(&s->placer, p->entry, &p->box, m->data.data + p->at, &s->done_bytes, err);
    }
    if (status == DCP_OK && s->opts->progress && !s->opts->progress(s->opts->user, s->done_bytes, s->wanted_bytes)) {
        status = dcp__fail(err, DCP_CANCELED, "the caller has stopped the load");
    }
    return status;
}

/* Collective. Sends one message; *mine: of this rank so far, which the others learn of. */
static dcp_status send_message(sending *s, message *m, dcp_status *mine, dcp_error *err)
{
    dcp_status status = dcp__broadcast(s->step, *mine, s->root, &m->data, err);
    if (status == DCP_OK) {
        s->bytes.received += is_root(s) ? 0 : m->data.len;
        *mine = place_message(s, m, err);
    }
    return status;
}

/* Collective. A failure in placing or reading one message is told with the next one, or with the agreement behind the last: what
 * a broadcast begins with is an agreement, too, so that a rank that has failed need not know which of them it is. */
static dcp_status send_all(sending *s, dcp_error *err)
{
    ahead next = {.s = s, .m = &s->messages[0], .err = DCP_ERROR_INIT};
    begin_next(&next);
    dcp_status mine = end_next(&next, err), status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && (s->messages[i % 2].n || mine != DCP_OK); i++) {
        next = (ahead){.s = s, .m = &s->messages[(i + 1) % 2], .err = DCP_ERROR_INIT};
        if (mine == DCP_OK) {
            begin_next(&next);
        }
        status = send_message(s, &s->messages[i % 2], &mine, err);
        dcp_error unread = DCP_ERROR_INIT;
        bool is_first_failure = status == DCP_OK && mine == DCP_OK;
        dcp_status after = end_next(&next, is_first_failure ? err : &unread);
        mine = is_first_failure ? after : mine;
    }
    mine = mine == DCP_OK ? dcp__placer_sync(&s->placer, err) : mine;
    return status == DCP_OK ? dcp__agree(s->step, mine, err) : status;
}

static dcp_status prepare(sending *s, const dcp_read_request *requests, size_t n, wants *own, dcp_error *err)
{
    dcp_context *ctx = s->ck->ctx;
    for (int i = 0; i < 2; i++) {
        dcp__arena_init(&s->messages[i].arena, ctx, UINT64_MAX);
        dcp__buf_init(&s->messages[i].data, ctx);
    }
    s->wanted_bytes = dcp__bytes_of_requests(requests, n);
    dcp_status status = dcp__placer_init(&s->placer, ctx, requests, n, s->opts->stream, err);
    status = status == DCP_OK ? wants_init(own, ctx, s->ck->meta, err) : status;
    own->memory_bytes = ctx->memory_bytes;
    return status == DCP_OK ? want_requests(own, requests, n, err) : status;
}

static dcp_status send_wanted(sending *s, const dcp_read_request *requests, size_t n, dcp_error *err)
{
    wants own = {0}, all = {0};
    dcp_status mine = prepare(s, requests, n, &own, err);
    dcp_status status = agree_on_wants(s->step, s->root, &own, mine, &all, err);
    if (status == DCP_OK) {
        s->walk.all = &all;
        s->walk.message_bytes = message_bytes(all.memory_bytes);
        status = send_all(s, err);
    }
    wants_reset(&own, s->ck->ctx);
    wants_reset(&all, s->ck->ctx);
    return status;
}

dcp_status dcp__broadcast_tensors(const dcp__step *step, int root, dcp_checkpoint *ck, const dcp_read_request *requests, size_t n,
                                  const dcp_read_opts *opts, dcp__share_bytes *out, dcp_error *err)
{
    sending *s = dcp__calloc(ck->ctx, 1, sizeof *s);
    dcp_status status = dcp__agree(step, s ? DCP_OK : dcp__nomem(err), err);
    if (status == DCP_OK) {
        s->step = step;
        s->root = root;
        s->ck = ck;
        s->opts = opts;
        status = send_wanted(s, requests, n, err);
        *out = s->bytes;
        dcp__placer_reset(&s->placer);
        for (int i = 0; i < 2; i++) {
            dcp__arena_reset(&s->messages[i].arena);
            dcp__buf_reset(&s->messages[i].data);
        }
    }
    dcp__free(ck->ctx, s);
    return status;
}
