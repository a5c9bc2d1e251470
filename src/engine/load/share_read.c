/* The rounds in which shared cells are read, sent and put in their places, while what this rank wants alone is read beside them.
 */
#include <pthread.h>
#include <string.h>

#include "engine/load/share.h"
#include "engine/load/share_record.h"
#include "plan/coverage.h"
#include "state/strided.h"

#define BUFFERS 2

/* Cells that go to one set of ranks in one round. */
typedef struct bundle {
    size_t first, n; /* in share.outgoing */
    uint64_t bytes;
    uint32_t set;
} bundle;

typedef struct rounds {
    const dcp__step *step;
    dcp__share *s;
    const dcp_read_opts *opts;
    bundle *bundles;
    size_t n_bundles, n_rounds;
    int lanes;             /* every lanes-th rank sends in a round */
    size_t *next_incoming; /* [world] */
    uint8_t *buffers[BUFFERS];
    dcp_comm_send *send;  /* [world] */
    pthread_mutex_t lock; /* guards all below, and the caller's progress function */
    pthread_cond_t wake;
    size_t n_read, n_sent; /* bundles */
    bool stop;
    dcp_status status; /* of this rank: its first failure */
    dcp_error err;
    uint64_t done_bytes, alone_bytes;
    dcp__share_bytes bytes;
    dcp__record_reader record; /* of the thread that reads bundles */
} rounds;

/* ---- what the threads tell each other ---- */

static void note_failure(rounds *x, dcp_status status, const dcp_error *err)
{
    pthread_mutex_lock(&x->lock);
    if (status != DCP_OK && x->status == DCP_OK) {
        x->status = status;
        x->err = *err;
    }
    pthread_cond_broadcast(&x->wake);
    pthread_mutex_unlock(&x->lock);
}

static dcp_status own_status(rounds *x, dcp_error *err)
{
    pthread_mutex_lock(&x->lock);
    dcp_status status = x->status == DCP_OK ? DCP_OK : dcp__fail_as(err, &x->err);
    pthread_mutex_unlock(&x->lock);
    return status;
}

/* False: the caller wants no more, or another thread has failed. With the lock held. */
static bool goes_on(const rounds *x)
{
    return !x->stop && x->status == DCP_OK;
}

static void advance(rounds *x, uint64_t bytes)
{
    x->done_bytes += bytes;
    if (x->opts->progress && bytes && goes_on(x) && !x->opts->progress(x->opts->user, x->done_bytes, x->s->reads.bytes)) {
        x->status = dcp__fail(&x->err, DCP_CANCELED, "the caller has stopped the load");
        pthread_cond_broadcast(&x->wake);
    }
}

/* ---- reading ---- */

/* Cells that are read in any order, to `at`, one behind the other. */
static dcp_status read_cells(rounds *x, dcp__cell *const *cells, size_t n, uint8_t *at, dcp_error *err)
{
    static const int64_t zeros[DCP_MAX_NDIM];
    static const dcp_read_opts quiet = DCP_READ_OPTS_INIT;
    dcp_context *ctx = x->s->ck->ctx;
    dcp__piece *pieces = dcp__calloc(ctx, n, sizeof *pieces);
    dcp_read_request *requests = dcp__calloc(ctx, n, sizeof *requests);
    for (size_t k = 0; pieces && requests && k < n; k++) {
        const dcp__piece *p = &cells[k]->piece;
        const dcp_item *item = &p->entry->item;
        requests[k] = (dcp_read_request){item, {NULL, NULL}, dcp_tensor_make(item->dtype, item->ndim, p->sizes, at)};
        pieces[k] = *p;
        pieces[k].request = &requests[k];
        pieces[k].in_wanted = zeros;
        at += p->bytes;
    }
    dcp_status status = pieces && requests ? dcp__read_pieces(x->s->ck, pieces, n, &quiet, err) : dcp__nomem(err);
    dcp__free(ctx, pieces);
    dcp__free(ctx, requests);
    return status;
}

/* How many of the cells are read together: parts of one record, or cells that are no parts. */
static size_t count_run(dcp__cell *const *cells, size_t n)
{
    size_t i = 1;
    while (i < n && cells[i]->is_part == cells[0]->is_part &&
           (!cells[0]->is_part || cells[i]->piece.chunk == cells[0]->piece.chunk)) {
        i++;
    }
    return i;
}

static dcp_status read_bundle(rounds *x, size_t i, dcp_error *err)
{
    const bundle *b = &x->bundles[i];
    uint8_t *at = x->buffers[i % BUFFERS];
    dcp__cell *const *cells = x->s->outgoing + b->first;
    dcp_status status = DCP_OK;
    for (size_t k = 0, n; k < b->n && status == DCP_OK; k += n) {
        n = count_run(cells + k, b->n - k);
        status = cells[k]->is_part ? dcp__record_read(&x->record, cells + k, n, at, err) : read_cells(x, cells + k, n, at, err);
        for (size_t c = k; c < k + n; c++) {
            at += cells[c]->piece.bytes;
        }
    }
    return status;
}

static bool wait_for_buffer(rounds *x, size_t i)
{
    pthread_mutex_lock(&x->lock);
    while (goes_on(x) && i >= x->n_sent + BUFFERS) {
        pthread_cond_wait(&x->wake, &x->lock);
    }
    bool is_free = goes_on(x);
    pthread_mutex_unlock(&x->lock);
    return is_free;
}

static void *read_bundles(void *arg)
{
    rounds *x = arg;
    for (size_t i = 0; i < x->n_bundles && wait_for_buffer(x, i); i++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = read_bundle(x, i, &err);
        pthread_mutex_lock(&x->lock);
        x->n_read += status == DCP_OK;
        x->bytes.read += status == DCP_OK ? x->bundles[i].bytes : 0;
        pthread_mutex_unlock(&x->lock);
        note_failure(x, status, &err);
    }
    dcp__record_reader_reset(&x->record);
    return NULL;
}

/* Progress of what is read alone, which counts up to a total of its own. */
static bool note_alone(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    rounds *x = user;
    (void)total_bytes;
    pthread_mutex_lock(&x->lock);
    uint64_t more = done_bytes - x->alone_bytes;
    x->alone_bytes = done_bytes;
    advance(x, more);
    bool more_wanted = goes_on(x);
    pthread_mutex_unlock(&x->lock);
    return more_wanted;
}

static void *read_alone(void *arg)
{
    rounds *x = arg;
    dcp_error err = DCP_ERROR_INIT;
    const dcp_read_opts opts = {sizeof opts, note_alone, x, x->opts->stream};
    uint64_t bytes = 0;
    for (size_t i = 0; i < x->s->n_alone; i++) {
        bytes += x->s->alone[i].bytes;
    }
    dcp_status status = dcp__read_pieces(x->s->ck, x->s->alone, x->s->n_alone, &opts, &err);
    pthread_mutex_lock(&x->lock);
    x->bytes.read += status == DCP_OK ? bytes : 0;
    pthread_mutex_unlock(&x->lock);
    note_failure(x, status == DCP_CANCELED ? DCP_OK : status, &err); /* whoever has stopped it has noted why */
    return NULL;
}

/* ---- putting in place ---- */

/* Puts what a cell and a piece have in common into the piece's place. Returns its bytes. */
static uint64_t put_piece(const dcp__piece *p, const dcp__cell *c, const uint8_t *from)
{
    const dcp_tensor *dst = &p->request->dst;
    int64_t in_piece[DCP_MAX_NDIM], in_cell[DCP_MAX_NDIM], sizes[DCP_MAX_NDIM];
    int64_t row_major[DCP_MAX_NDIM], from_strides[DCP_MAX_NDIM];
    const dcp_box of_piece = {p->in_chunk, p->sizes}, of_cell = {c->piece.in_chunk, c->piece.sizes};
    if (!dcp__box_overlap(dst->ndim, &of_piece, &of_cell, in_piece, in_cell, sizes)) {
        return 0;
    }
    dcp__row_major(dst->ndim, dst->extents, row_major);
    dcp__row_major(dst->ndim, c->piece.sizes, from_strides);
    const int64_t *to_strides = dst->strides ? dst->strides : row_major;
    int64_t to_at = dcp__element_at(dst->ndim, p->in_wanted, to_strides) + dcp__element_at(dst->ndim, in_piece, to_strides);
    int64_t from_at = dcp__element_at(dst->ndim, in_cell, from_strides);
    size_t elem = dcp_dtype_bytes(dst->dtype);
    uint64_t bytes = elem;
    for (int d = 0; d < dst->ndim; d++) {
        bytes *= (uint64_t)sizes[d];
    }
    dcp__copy_strided((char *)dst->data + to_at * (int64_t)elem, to_strides, from + from_at * (int64_t)elem, from_strides,
                      dst->ndim, sizes, elem);
    return bytes;
}

static uint64_t put_cell(const rounds *x, const dcp__cell *c, const uint8_t *from)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->n; i++) {
        bytes += put_piece(&x->s->reads.pieces[c->first + i], c, from);
    }
    return bytes;
}

static uint64_t put_own(rounds *x, size_t i)
{
    const bundle *b = &x->bundles[i];
    const uint8_t *at = x->buffers[i % BUFFERS];
    uint64_t bytes = 0;
    for (size_t k = 0; k < b->n; k++) {
        bytes += put_cell(x, x->s->outgoing[b->first + k], at);
        at += x->s->outgoing[b->first + k]->piece.bytes;
    }
    return bytes;
}

/* The next cells of a sender: as many as fill what it has sent. Adds to *put what of them is wanted. */
static dcp_status put_received(rounds *x, int sender, const uint8_t *bytes, size_t n, uint64_t *put, dcp_error *err)
{
    size_t *next = &x->next_incoming[sender], end = x->s->first_incoming[sender + 1], left = n;
    while (left > 0 && *next < end && x->s->incoming[*next]->piece.bytes <= left) {
        const dcp__cell *c = x->s->incoming[(*next)++];
        *put += put_cell(x, c, bytes);
        bytes += c->piece.bytes;
        left -= (size_t)c->piece.bytes;
    }
    return left == 0 ? DCP_OK
                     : dcp__fail(err, DCP_FORMAT, "rank %d sends %zu bytes, of which %zu are not expected", sender, n, left);
}

/* ---- rounds ---- */

/* The bundle that this rank sends in a round; n_bundles: none. */
static size_t bundle_of(const rounds *x, size_t round)
{
    size_t i = round / (size_t)x->lanes;
    bool is_my_turn = round % (size_t)x->lanes == (size_t)(x->s->rank % x->lanes);
    return is_my_turn && i < x->n_bundles ? i : x->n_bundles;
}

static dcp_status wait_for_bundle(rounds *x, size_t i, dcp_error *err)
{
    pthread_mutex_lock(&x->lock);
    while (x->status == DCP_OK && x->n_read <= i) {
        pthread_cond_wait(&x->wake, &x->lock);
    }
    pthread_mutex_unlock(&x->lock);
    return own_status(x, err);
}

static void address(rounds *x, size_t i)
{
    memset(x->send, 0, (size_t)x->s->world * sizeof *x->send);
    if (i < x->n_bundles) {
        const dcp__rank_set *set = &x->s->sets.sets[x->bundles[i].set];
        for (size_t k = 0; k < set->n; k++) {
            if (set->ranks[k] != (uint32_t)x->s->rank) {
                x->send[set->ranks[k]] = (dcp_comm_send){x->buffers[i % BUFFERS], (size_t)x->bundles[i].bytes};
            }
        }
    }
}

static void take_round(rounds *x, size_t i, const dcp__parts *parts)
{
    uint64_t done = i < x->n_bundles ? put_own(x, i) : 0;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = DCP_OK;
    for (int r = 0; r < x->s->world && status == DCP_OK; r++) {
        size_t n;
        const uint8_t *bytes = dcp__part(parts, r, &n);
        status = put_received(x, r, bytes, n, &done, &err);
        x->bytes.received += n;
    }
    pthread_mutex_lock(&x->lock);
    x->n_sent += i < x->n_bundles;
    advance(x, done);
    pthread_cond_broadcast(&x->wake);
    pthread_mutex_unlock(&x->lock);
    note_failure(x, status, &err);
}

static dcp_status run_round(rounds *x, size_t round, dcp_error *err)
{
    size_t i = bundle_of(x, round);
    dcp__parts parts = {0};
    dcp_status mine = i < x->n_bundles ? wait_for_bundle(x, i, err) : own_status(x, err);
    address(x, i);
    dcp_status status = dcp__exchange(x->step, mine, x->send, &parts, err);
    if (status == DCP_OK) {
        take_round(x, i, &parts);
    }
    dcp__parts_free(&parts);
    return status;
}

/* ---- all ---- */

static dcp_status make_bundles(rounds *x, dcp_error *err)
{
    const dcp__share *s = x->s;
    uint64_t largest = 1;
    x->bundles = dcp__calloc(s->ck->ctx, s->n_outgoing, sizeof *x->bundles);
    if (!x->bundles) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->n_outgoing; i++) {
        const dcp__cell *c = s->outgoing[i];
        bundle *last = x->n_bundles ? &x->bundles[x->n_bundles - 1] : NULL;
        if (!last || last->set != c->set || last->bytes + c->piece.bytes > s->bundle_bytes) {
            last = &x->bundles[x->n_bundles++];
            *last = (bundle){.first = i, .set = c->set};
        }
        last->n++;
        last->bytes += c->piece.bytes;
        largest = last->bytes > largest ? last->bytes : largest;
    }
    for (size_t i = 0; i < BUFFERS && i < x->n_bundles; i++) {
        x->buffers[i] = dcp__alloc_aligned(s->ck->ctx, 64, (size_t)largest);
        if (!x->buffers[i]) {
            return dcp__nomem(err);
        }
    }
    return DCP_OK;
}

static dcp_status prepare(rounds *x, dcp_error *err)
{
    size_t world = (size_t)x->s->world;
    x->lanes = (x->s->world + DCP__MOST_SENDERS - 1) / DCP__MOST_SENDERS;
    x->send = dcp__calloc(x->s->ck->ctx, world, sizeof *x->send);
    x->next_incoming = dcp__calloc(x->s->ck->ctx, world, sizeof *x->next_incoming);
    if (!x->send || !x->next_incoming) {
        return dcp__nomem(err);
    }
    memcpy(x->next_incoming, x->s->first_incoming, world * sizeof *x->next_incoming);
    return make_bundles(x, err);
}

/* Collective. As many as the rank with the most bundles needs. */
static dcp_status count_rounds(rounds *x, dcp_status mine, dcp_error *err)
{
    uint64_t *of = dcp__alloc(x->s->ck->ctx, (size_t)x->s->world * sizeof *of);
    mine = mine == DCP_OK && !of ? dcp__nomem(err) : mine;
    dcp_status status = dcp__agree_u64(x->step, mine, x->n_bundles, of, err);
    for (int r = 0; r < x->s->world && status == DCP_OK; r++) {
        size_t needed = (size_t)of[r] * (size_t)x->lanes;
        x->n_rounds = needed > x->n_rounds ? needed : x->n_rounds;
    }
    dcp__free(x->s->ck->ctx, of);
    return status;
}

static dcp_status start(rounds *x, pthread_t *thread, void *(*fn)(void *), bool *is_running, dcp_error *err)
{
    *is_running = pthread_create(thread, NULL, fn, x) == 0;
    return *is_running ? DCP_OK : dcp__fail(err, DCP_NOMEM, "no thread could be started");
}

static dcp_status run_rounds(rounds *x, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t round = 0; round < x->n_rounds && status == DCP_OK; round++) {
        status = run_round(x, round, err);
    }
    return status;
}

static dcp_status check_all_received(rounds *x, dcp_error *err)
{
    for (int r = 0; r < x->s->world; r++) {
        size_t missing = x->s->first_incoming[r + 1] - x->next_incoming[r];
        if (missing) {
            return dcp__fail(err, DCP_FORMAT, "rank %d has not sent %zu of its parts", r, missing);
        }
    }
    return DCP_OK;
}

static void end(rounds *x)
{
    dcp_context *ctx = x->s->ck->ctx;
    for (int i = 0; i < BUFFERS; i++) {
        dcp__free_aligned(ctx, x->buffers[i]);
    }
    dcp__free(ctx, x->bundles);
    dcp__free(ctx, x->send);
    dcp__free(ctx, x->next_incoming);
    pthread_cond_destroy(&x->wake);
    pthread_mutex_destroy(&x->lock);
}

static void stop_reading(rounds *x)
{
    pthread_mutex_lock(&x->lock);
    x->stop = true;
    pthread_cond_broadcast(&x->wake);
    pthread_mutex_unlock(&x->lock);
}

/* Reads beside the rounds; returns what became of these. */
static dcp_status read_beside(rounds *x, dcp_error *err)
{
    pthread_t bundles, alone;
    bool reads_bundles = false, reads_alone = false;
    dcp_error own = DCP_ERROR_INIT;
    dcp_status mine = start(x, &bundles, read_bundles, &reads_bundles, &own);
    mine = mine == DCP_OK ? start(x, &alone, read_alone, &reads_alone, &own) : mine;
    note_failure(x, mine, &own);
    dcp_status status = run_rounds(x, err);
    if (status != DCP_OK) {
        stop_reading(x);
    }
    if (reads_bundles) {
        pthread_join(bundles, NULL);
    }
    if (reads_alone) {
        pthread_join(alone, NULL);
    }
    return status;
}

/* Ranks that have failed while a round ended the reading for others are to be told as well. */
static dcp_status conclude(rounds *x, dcp_status status, dcp_error *err)
{
    if (status != DCP_OK && (status != DCP_PEER || dcp_comm_is_broken(x->step->comm))) {
        return status;
    }
    dcp_error own = DCP_ERROR_INIT, *told = status == DCP_OK ? err : &own;
    dcp_status mine = own_status(x, told);
    mine = mine == DCP_OK && status == DCP_OK ? check_all_received(x, told) : mine;
    dcp_status all = dcp__agree(x->step, mine, told);
    if (status != DCP_OK && all != DCP_OK) {
        dcp__fail_as(err, &own);
    }
    return all != DCP_OK ? all : status;
}

dcp_status dcp__share_read(const dcp__step *step, dcp__share *s, const dcp_read_opts *opts, dcp__share_bytes *out, dcp_error *err)
{
    rounds x = {.step = step, .s = s, .opts = opts, .err = DCP_ERROR_INIT, .record = {.ck = s->ck}};
    pthread_mutex_init(&x.lock, NULL);
    pthread_cond_init(&x.wake, NULL);
    dcp_status status = count_rounds(&x, prepare(&x, err), err);
    if (status == DCP_OK) {
        status = conclude(&x, read_beside(&x, err), err);
    }
    *out = x.bytes;
    end(&x);
    return status;
}
