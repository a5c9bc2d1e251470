#include "comm/collective.h"

#include "base/checked.h"
#include "base/failures.h"
#include "comm/comm.h"

/* A broadcast of this many bytes to more than a few ranks goes in slices: root sends each byte once, not once for each rank. */
#define SLICED_BYTES 65536
#define SLICED_RANKS 4

/* One collective call on its way. The arrays are the communicator's reserve, or `lone` without one. */
typedef struct call {
    const dcp__step *step;
    dcp_comm *comm;
    int rank, size;
    dcp_status mine; /* of this rank so far */
    dcp_error own;   /* why it is not OK */
    dcp_error err;   /* of the whole call */
    bool is_agreed;  /* the call failed on all ranks alike, the communicator is well */
    dcp__comm_word *words;
    dcp_comm_send *send;
    dcp_comm_recv *recv;
    uint64_t *sizes;
    struct {
        dcp__comm_word word;
        dcp_comm_send send;
        dcp_comm_recv recv;
        uint64_t sizes[2];
    } lone;
} call;

int dcp__step_rank(const dcp__step *step)
{
    return step->comm ? step->comm->rank : 0;
}

int dcp__step_size(const dcp__step *step)
{
    return step->comm ? step->comm->size : 1;
}

/* ---- begin and end ---- */

/* A rank that fails says so at once: the others may be far from the agreement, or never reach it. */
static void keep_own_cause(call *c, dcp_status mine, const dcp_error *err)
{
    c->own = c->err = (dcp_error)DCP_ERROR_INIT;
    c->mine = mine;
    if (mine == DCP_OK) {
        return;
    }
    if (err && err->code == mine) {
        c->own = *err;
    } else {
        dcp__fail(&c->own, mine, "%s", dcp_status_name(mine));
    }
    if (c->comm) {
        dcp__log(c->step->ctx, DCP_LOG_ERROR, "%s: rank %d: %s", c->step->phase, c->rank, c->own.message);
    }
}

static void use_reserve(call *c)
{
    if (c->comm) {
        dcp__comm_reserve *r = c->comm->reserve;
        c->words = r->words;
        c->send = r->send;
        c->recv = r->recv;
        c->sizes = r->sizes;
    } else {
        c->words = &c->lone.word;
        c->send = &c->lone.send;
        c->recv = &c->lone.recv;
        c->sizes = c->lone.sizes;
    }
}

static dcp_status call_begin(call *c, const dcp__step *step, dcp_status mine, const dcp_error *err)
{
    c->step = step;
    c->comm = step->comm;
    c->rank = dcp__step_rank(step);
    c->size = dcp__step_size(step);
    c->is_agreed = false;
    keep_own_cause(c, mine, err);
    dcp__failures_clear(step->failures);
    dcp_status status = c->comm ? dcp__comm_enter(c->comm, &c->err) : DCP_OK;
    if (status == DCP_OK) {
        use_reserve(c);
    }
    return status;
}

static dcp_status report(const dcp_error *from, dcp_error *err)
{
    if (err) {
        size_t struct_size = err->struct_size;
        *err = *from;
        err->struct_size = struct_size;
    }
    return from->code;
}

/* What the caller is told. A failure of the communicator does not hide what had happened to this rank before. */
static dcp_status call_result(call *c, dcp_status status, dcp_error *err)
{
    if (status == DCP_OK || c->is_agreed) {
        return status == DCP_OK ? DCP_OK : report(&c->err, err);
    }
    if (c->mine != DCP_OK) {
        return report(&c->own, err);
    }
    dcp__prefix(&c->err, status, "%s: ", c->step->phase);
    return report(&c->err, err);
}

/* `status` not OK after call_begin has claimed the communicator. */
static dcp_status call_end(call *c, dcp_status status, dcp_error *err)
{
    if (c->comm) {
        dcp__comm_leave(c->comm, c->is_agreed ? DCP_OK : status, &c->err);
    }
    return call_result(c, status, err);
}

/* ---- the functions of the table ---- */

static dcp_status move(call *c, const dcp_comm_send *send, const dcp_comm_recv *recv)
{
    if (c->comm) {
        return c->comm->ops->alltoall(c->comm, send, recv, c->comm->timeout_ms, &c->err);
    }
    if (recv->bytes) {
        memcpy(recv->ptr, send->ptr, recv->bytes);
    }
    return DCP_OK;
}

static dcp_status collect_words(call *c, const dcp__comm_word *mine)
{
    if (c->comm) {
        return c->comm->ops->all_gather(c->comm, mine, sizeof *mine, c->words, c->comm->timeout_ms, &c->err);
    }
    c->words[0] = *mine;
    return DCP_OK;
}

static void nothing_to_move(call *c)
{
    for (int r = 0; r < c->size; r++) {
        c->send[r] = (dcp_comm_send){NULL, 0};
        c->recv[r] = (dcp_comm_recv){NULL, 0};
    }
}

/* ---- agreement ---- */

static dcp__comm_word word_of(const call *c, uint64_t value)
{
    dcp__comm_word word = {.status = (int32_t)c->mine, .value = value};
    memcpy(word.phase, c->step->phase, strnlen(c->step->phase, sizeof word.phase));
    return word;
}

static dcp_status check_phases(call *c)
{
    for (int r = 1; r < c->size; r++) {
        const char *first = c->words[0].phase, *other = c->words[r].phase;
        int room = (int)sizeof c->words[r].phase;
        if (memcmp(first, other, (size_t)room) != 0) {
            c->err.rank = r;
            return dcp__fail(&c->err, DCP_STATE, "rank 0 is in \"%.*s\", rank %d in \"%.*s\"", room, first, r, room, other);
        }
    }
    return DCP_OK;
}

static dcp__comm_cause cause_of(const dcp_error *err)
{
    dcp__comm_cause cause;
    memset(&cause, 0, sizeof cause);
    cause.sys_errno = err->sys_errno;
    cause.native_code = err->native_code;
    cause.offset = err->offset;
    memcpy(cause.message, err->message, strnlen(err->message, sizeof cause.message - 1));
    return cause;
}

static dcp_failure failure_of(const call *c, int rank, dcp__comm_cause *cause)
{
    cause->message[sizeof cause->message - 1] = 0;
    return (dcp_failure){
        .rank = rank,
        .code = (dcp_status)c->words[rank].status,
        .sys_errno = cause->sys_errno,
        .native_code = cause->native_code,
        .offset = cause->offset,
        .message = cause->message,
    };
}

/* The causes of up to DCP__CAUSES_PER_ROUND failing ranks, from rank `first` on, come to all. Returns where the next round
 * begins. */
static dcp_status tell_round(call *c, int first, int ranks[DCP__CAUSES_PER_ROUND], int *n_ranks, int *next)
{
    dcp__comm_reserve *r = c->comm->reserve;
    int n = 0, at = first;
    nothing_to_move(c);
    for (; at < c->size && n < DCP__CAUSES_PER_ROUND; at++) {
        if (c->words[at].status != DCP_OK) {
            c->recv[at] = (dcp_comm_recv){&r->causes[n], sizeof r->causes[n]};
            ranks[n++] = at;
        }
    }
    if (c->recv[c->rank].bytes) {
        for (int to = 0; to < c->size; to++) {
            c->send[to] = (dcp_comm_send){&r->mine, sizeof r->mine};
        }
    }
    *n_ranks = n;
    *next = at;
    return move(c, c->send, c->recv);
}

static dcp_status tell_causes(call *c, size_t total)
{
    dcp__comm_reserve *r = c->comm->reserve;
    dcp_failure told[DCP__CAUSES_PER_ROUND];
    int ranks[DCP__CAUSES_PER_ROUND], n;
    size_t done = 0;
    r->mine = cause_of(&c->own);
    for (int at = 0; done < total; done += (size_t)n) {
        dcp_status status = tell_round(c, at, ranks, &n, &at);
        if (status != DCP_OK) {
            return status;
        }
        for (int i = 0; i < n; i++) {
            told[i] = failure_of(c, ranks[i], &r->causes[i]);
            dcp__failures_add(c->step->failures, &told[i]);
        }
        if (done == 0) {
            dcp__fail_peers(&c->err, c->step->phase, told, total, c->size);
        }
    }
    c->is_agreed = true;
    return DCP_PEER;
}

static dcp_status fail_alone(call *c)
{
    dcp__comm_cause cause = cause_of(&c->own);
    dcp_failure failure = failure_of(c, 0, &cause);
    dcp__failures_add(c->step->failures, &failure);
    c->err = c->own;
    c->is_agreed = true;
    return c->mine;
}

/* OK if all ranks are well; then every rank's value is in c->words. */
static dcp_status agree(call *c, uint64_t value)
{
    const dcp__comm_word word = word_of(c, value);
    dcp_status status = collect_words(c, &word);
    if (status == DCP_OK) {
        status = check_phases(c);
    }
    if (status != DCP_OK) {
        return status;
    }
    size_t failing = 0;
    for (int r = 0; r < c->size; r++) {
        failing += c->words[r].status != DCP_OK;
    }
    if (failing == 0) {
        return DCP_OK;
    }
    return c->comm ? tell_causes(c, failing) : fail_alone(c);
}

dcp_status dcp__agree_u64(const dcp__step *step, dcp_status mine, uint64_t value, uint64_t *values, dcp_error *err)
{
    call c;
    dcp_status status = call_begin(&c, step, mine, err);
    if (status != DCP_OK) {
        return call_result(&c, status, err);
    }
    status = agree(&c, value);
    for (int r = 0; values && status == DCP_OK && r < c.size; r++) {
        values[r] = c.words[r].value;
    }
    return call_end(&c, status, err);
}

dcp_status dcp__agree(const dcp__step *step, dcp_status mine, dcp_error *err)
{
    return dcp__agree_u64(step, mine, 0, NULL, err);
}

/* ---- bytes of several ranks ---- */

void dcp__parts_free(dcp__parts *parts)
{
    if (parts->ctx) {
        dcp__free(parts->ctx, parts->data);
        dcp__free(parts->ctx, parts->starts);
    }
    *parts = (dcp__parts){0};
}

/* Room for sizes[r * stride] bytes from each rank r. Without it this rank fails in the next agreement. */
static void make_parts(call *c, dcp__parts *parts)
{
    *parts = (dcp__parts){.ctx = c->step->ctx, .n = c->size};
    const uint64_t *sizes = c->sizes + c->size;
    size_t total = 0;
    bool fits = true;
    parts->starts = dcp__calloc(parts->ctx, (size_t)c->size + 1, sizeof *parts->starts);
    for (int r = 0; parts->starts && fits && r < c->size; r++) {
        fits = dcp__add_size(total, (size_t)sizes[r], &total);
        parts->starts[r + 1] = total;
    }
    parts->data = parts->starts && fits ? dcp__alloc(parts->ctx, total) : NULL;
    if (!parts->data && c->mine == DCP_OK) {
        c->mine = dcp__fail(&c->own, DCP_NOMEM, "no memory for %zu bytes from %d ranks", total, c->size);
    }
}

/* Where the parts go to. */
static void receive_parts(call *c, const dcp__parts *parts)
{
    for (int r = 0; r < c->size; r++) {
        size_t bytes = parts->starts[r + 1] - parts->starts[r];
        c->recv[r] = (dcp_comm_recv){bytes ? parts->data + parts->starts[r] : NULL, bytes};
    }
}

/* Hands over what was received, or drops it. */
static dcp_status end_with_parts(call *c, dcp_status status, dcp__parts *parts, dcp__parts *out, dcp_error *err)
{
    status = call_end(c, status, err);
    if (status != DCP_OK) {
        dcp__parts_free(parts);
    } else {
        *out = *parts;
    }
    return status;
}

dcp_status dcp__gather(const dcp__step *step, dcp_status mine, int root, const void *bytes, size_t n, dcp__parts *out,
                       dcp_error *err)
{
    call c;
    dcp__parts parts = {0};
    dcp_status status = call_begin(&c, step, mine, err);
    if (status != DCP_OK) {
        return call_result(&c, status, err);
    }
    status = agree(&c, n);
    if (status != DCP_OK) {
        goto out;
    }
    if (c.rank == root) {
        for (int r = 0; r < c.size; r++) {
            c.sizes[c.size + r] = c.words[r].value;
        }
        make_parts(&c, &parts);
    }
    status = agree(&c, 0);
    if (status != DCP_OK) {
        goto out;
    }
    nothing_to_move(&c);
    if (c.rank == root) {
        receive_parts(&c, &parts);
    }
    c.send[root] = (dcp_comm_send){bytes, n};
    status = move(&c, c.send, c.recv);
out:
    return end_with_parts(&c, status, &parts, out, err);
}

/* Every rank tells each other one how many bytes it will get. */
static dcp_status exchange_sizes(call *c, const dcp_comm_send *send)
{
    uint64_t *to = c->sizes, *from = c->sizes + c->size;
    for (int r = 0; r < c->size; r++) {
        to[r] = send ? send[r].bytes : 0;
        c->send[r] = (dcp_comm_send){&to[r], sizeof to[r]};
        c->recv[r] = (dcp_comm_recv){&from[r], sizeof from[r]};
    }
    return move(c, c->send, c->recv);
}

dcp_status dcp__exchange(const dcp__step *step, dcp_status mine, const dcp_comm_send *send, dcp__parts *out, dcp_error *err)
{
    call c;
    dcp__parts parts = {0};
    send = mine == DCP_OK ? send : NULL;
    dcp_status status = call_begin(&c, step, mine, err);
    if (status != DCP_OK) {
        return call_result(&c, status, err);
    }
    status = exchange_sizes(&c, send);
    if (status == DCP_OK) {
        make_parts(&c, &parts);
        status = agree(&c, 0);
    }
    if (status == DCP_OK) {
        nothing_to_move(&c);
        receive_parts(&c, &parts);
        status = move(&c, send ? send : c.send, c.recv);
    }
    return end_with_parts(&c, status, &parts, out, err);
}

/* ---- broadcast ---- */

/* First byte of slice i when n bytes are cut into one slice for each rank. */
static size_t slice_start(const call *c, size_t n, int i)
{
    size_t each = n / (size_t)c->size, longer = n % (size_t)c->size;
    return each * (size_t)i + ((size_t)i < longer ? (size_t)i : longer);
}

static dcp_comm_recv slice_of(const call *c, uint8_t *data, size_t n, int i)
{
    size_t start = slice_start(c, n, i);
    return (dcp_comm_recv){data + start, slice_start(c, n, i + 1) - start};
}

static dcp_status broadcast_whole(call *c, int root, uint8_t *data, size_t n)
{
    nothing_to_move(c);
    for (int r = 0; c->rank == root && r < c->size; r++) {
        c->send[r] = r == root ? (dcp_comm_send){NULL, 0} : (dcp_comm_send){data, n};
    }
    if (c->rank != root) {
        c->recv[root] = (dcp_comm_recv){data, n};
    }
    return move(c, c->send, c->recv);
}

/* Each rank gets its slice from root and passes it on to the others. */
static dcp_status broadcast_sliced(call *c, int root, uint8_t *data, size_t n)
{
    dcp_comm_recv mine = slice_of(c, data, n, c->rank);
    nothing_to_move(c);
    for (int r = 0; c->rank == root && r < c->size; r++) {
        dcp_comm_recv part = slice_of(c, data, n, r);
        c->send[r] = r == root ? (dcp_comm_send){NULL, 0} : (dcp_comm_send){part.ptr, part.bytes};
    }
    if (c->rank != root) {
        c->recv[root] = mine;
    }
    dcp_status status = move(c, c->send, c->recv);
    if (status != DCP_OK) {
        return status;
    }
    nothing_to_move(c);
    for (int r = 0; r < c->size; r++) {
        if (r != c->rank && r != root) {
            c->send[r] = (dcp_comm_send){mine.ptr, mine.bytes};
        }
        if (r != c->rank && c->rank != root) {
            c->recv[r] = slice_of(c, data, n, r);
        }
    }
    return move(c, c->send, c->recv);
}

static void make_room(call *c, dcp__buf *io, size_t n)
{
    if (!dcp__buf_reserve(io, n)) {
        c->mine = dcp__fail(&c->own, DCP_NOMEM, "no memory for %zu bytes", n);
    }
}

dcp_status dcp__broadcast(const dcp__step *step, dcp_status mine, int root, dcp__buf *io, dcp_error *err)
{
    call c;
    dcp_status status = call_begin(&c, step, mine, err);
    if (status != DCP_OK) {
        return call_result(&c, status, err);
    }
    status = agree(&c, c.rank == root ? io->len : 0);
    size_t n = status == DCP_OK ? (size_t)c.words[root].value : 0;
    if (status != DCP_OK || n == 0 || !c.comm) {
        return call_end(&c, status, err);
    }
    if (c.rank != root) {
        make_room(&c, io, n);
    }
    status = agree(&c, 0);
    if (status == DCP_OK) {
        bool is_sliced = n >= SLICED_BYTES && c.size > SLICED_RANKS;
        status = (is_sliced ? broadcast_sliced : broadcast_whole)(&c, root, io->data, n);
    }
    if (status == DCP_OK) {
        io->len = n;
    }
    return call_end(&c, status, err);
}
