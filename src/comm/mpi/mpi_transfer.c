#include "comm/mpi/mpi_transfer.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "comm/missing.h"

enum { TAG_DATA = 1, TAG_FAREWELL = 2 };

#define HEAD_PAYLOAD (HEAD_BYTES - sizeof(head))
#define SETTLE_MS 100

typedef struct piece {
    int rank;
    size_t offset, bytes;
} piece;

/* Ranks are gone through in the order of their distance, upwards for sending and downwards for receiving: the piece that is next
 * for one rank is next for its partner, so the windows cannot block each other. */
typedef struct cursor {
    int distance;
    size_t offset;
} cursor;

typedef struct transfer {
    mpi_comm *c;
    mpi_call call;
    const dcp_comm_send *send;
    const dcp_comm_recv *recv;
    dcp_error *err;
    int active; /* requests under way */
    cursor next_in, next_out;
    piece in[WINDOW], out[WINDOW];
} transfer;

uint64_t dcp__mpi_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

void dcp__mpi_idle(unsigned count)
{
    if (count < 32) {
        return;
    }
    if (count < 64) {
        sched_yield();
        return;
    }
    unsigned doublings = (count - 64) / 16;
    long ns = 20000L << (doublings < 6 ? doublings : 6);
    nanosleep(&(struct timespec){0, ns < 1000000 ? ns : 1000000}, NULL);
}

dcp_status dcp__mpi_fail(dcp_error *err, int code, const char *function)
{
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int len = 0, class = MPI_SUCCESS;
    MPI_Error_string(code, text, &len);
    MPI_Error_class(code, &class);
    dcp_status status = class == MPI_ERR_TRUNCATE ? DCP_MISMATCH : DCP_IO;
    dcp_error_set(err, status, "%s: %.*s", function, len, text);
    if (err) {
        err->native_code = code;
    }
    return status;
}

/* ---- posting ---- */

static char *head_in(const mpi_comm *c, int rank)
{
    return c->heads + (size_t)rank * HEAD_BYTES;
}

static char *head_out(const mpi_comm *c, int rank)
{
    return c->heads + (size_t)(c->base.size + rank) * HEAD_BYTES;
}

static size_t in_head(size_t total)
{
    return total < HEAD_PAYLOAD ? total : HEAD_PAYLOAD;
}

static dcp_status post_head_in(transfer *t, int rank)
{
    mpi_comm *c = t->c;
    int rc = MPI_Irecv(head_in(c, rank), HEAD_BYTES, MPI_BYTE, rank, TAG_DATA, c->comm, &c->requests[rank]);
    t->active++;
    return rc == MPI_SUCCESS ? DCP_OK : dcp__mpi_fail(t->err, rc, "MPI_Irecv");
}

static dcp_status post_head_out(transfer *t, int rank)
{
    mpi_comm *c = t->c;
    size_t total = t->send[rank].bytes, n = in_head(total);
    head h = {.total = total, .number = c->number, .call = (uint32_t)t->call};
    memcpy(head_out(c, rank), &h, sizeof h);
    memcpy(head_out(c, rank) + sizeof h, t->send[rank].ptr, n);
    int rc =
        MPI_Isend(head_out(c, rank), (int)(sizeof h + n), MPI_BYTE, rank, TAG_DATA, c->comm, &c->requests[c->base.size + rank]);
    t->active++;
    return rc == MPI_SUCCESS ? DCP_OK : dcp__mpi_fail(t->err, rc, "MPI_Isend");
}

/* The next piece beyond the heads; 0 bytes: there is none. */
static piece next_piece(const transfer *t, cursor *at, bool is_out)
{
    int size = t->c->base.size, me = t->c->base.rank;
    for (; at->distance < size; at->distance++, at->offset = HEAD_PAYLOAD) {
        int rank = (me + (is_out ? at->distance : size - at->distance)) % size;
        size_t total = is_out ? t->send[rank].bytes : t->recv[rank].bytes;
        if (at->offset < total) {
            size_t left = total - at->offset;
            piece p = {rank, at->offset, left < PIECE_BYTES ? left : PIECE_BYTES};
            at->offset += p.bytes;
            return p;
        }
    }
    return (piece){0};
}

static dcp_status post_piece_in(transfer *t, int slot)
{
    mpi_comm *c = t->c;
    piece p = next_piece(t, &t->next_in, false);
    t->in[slot] = p;
    if (p.bytes == 0) {
        return DCP_OK;
    }
    int rc = MPI_Irecv(c->pieces + (size_t)slot * PIECE_BYTES, PIECE_BYTES, MPI_BYTE, p.rank, TAG_DATA, c->comm,
                       &c->requests[2 * c->base.size + slot]);
    t->active++;
    return rc == MPI_SUCCESS ? DCP_OK : dcp__mpi_fail(t->err, rc, "MPI_Irecv");
}

static dcp_status post_piece_out(transfer *t, int slot)
{
    mpi_comm *c = t->c;
    piece p = next_piece(t, &t->next_out, true);
    t->out[slot] = p;
    if (p.bytes == 0) {
        return DCP_OK;
    }
    char *from = c->pieces + (size_t)(WINDOW + slot) * PIECE_BYTES;
    memcpy(from, (const char *)t->send[p.rank].ptr + p.offset, p.bytes);
    int rc = MPI_Isend(from, (int)p.bytes, MPI_BYTE, p.rank, TAG_DATA, c->comm, &c->requests[2 * c->base.size + WINDOW + slot]);
    t->active++;
    return rc == MPI_SUCCESS ? DCP_OK : dcp__mpi_fail(t->err, rc, "MPI_Isend");
}

static dcp_status move_own(transfer *t)
{
    int me = t->c->base.rank;
    if (t->send[me].bytes != t->recv[me].bytes) {
        return dcp_error_set(t->err, DCP_MISMATCH, "rank %d sends %zu bytes to itself and expects %zu", me, t->send[me].bytes,
                             t->recv[me].bytes);
    }
    if (t->send[me].bytes) {
        memcpy(t->recv[me].ptr, t->send[me].ptr, t->send[me].bytes);
    }
    return DCP_OK;
}

/* Heads first, so that those of different ranks need not wait for anybody's pieces. */
static dcp_status post_all(transfer *t)
{
    int me = t->c->base.rank, size = t->c->base.size;
    dcp_status status = move_own(t);
    for (int i = 1; status == DCP_OK && i < size; i++) {
        int from = (me + size - i) % size;
        t->c->is_here[from] = t->recv[from].bytes == 0;
        status = t->recv[from].bytes ? post_head_in(t, from) : DCP_OK;
    }
    for (int i = 1; status == DCP_OK && i < size; i++) {
        int to = (me + i) % size;
        status = t->send[to].bytes ? post_head_out(t, to) : DCP_OK;
    }
    for (int slot = 0; status == DCP_OK && slot < WINDOW; slot++) {
        status = post_piece_in(t, slot);
        status = status == DCP_OK ? post_piece_out(t, slot) : status;
    }
    return status;
}

/* ---- completion ---- */

static dcp_status fail_size(transfer *t, int rank, uint64_t got, size_t expected)
{
    dcp_error_set(t->err, DCP_MISMATCH, "rank %d sends %llu bytes, rank %d expects %zu", rank, (unsigned long long)got,
                  t->c->base.rank, expected);
    t->err->rank = rank;
    return DCP_MISMATCH;
}

static dcp_status take_head(transfer *t, int rank, int got)
{
    head h = {0};
    size_t expected = t->recv[rank].bytes, n = in_head(expected);
    if ((size_t)got >= sizeof h) {
        memcpy(&h, head_in(t->c, rank), sizeof h);
    }
    if (h.number != t->c->number || h.call != (uint32_t)t->call) {
        dcp_error_set(t->err, DCP_STATE, "rank %d made another collective call than rank %d", rank, t->c->base.rank);
        t->err->rank = rank;
        return DCP_STATE;
    }
    if (h.total != expected || (size_t)got != sizeof h + n) {
        return fail_size(t, rank, h.total, expected);
    }
    memcpy(t->recv[rank].ptr, head_in(t->c, rank) + sizeof h, n);
    t->c->is_here[rank] = true;
    return DCP_OK;
}

static dcp_status take_piece(transfer *t, int slot, int got)
{
    piece p = t->in[slot];
    if ((size_t)got != p.bytes) {
        return fail_size(t, p.rank, (uint64_t)got, p.bytes);
    }
    memcpy((char *)t->recv[p.rank].ptr + p.offset, t->c->pieces + (size_t)slot * PIECE_BYTES, p.bytes);
    return post_piece_in(t, slot);
}

/* What to do when a request is done depends on where it stands. */
static dcp_status complete(transfer *t, int index, MPI_Status *st)
{
    int size = t->c->base.size, got = 0;
    t->active--;
    if (index < size) {
        MPI_Get_count(st, MPI_BYTE, &got);
        return take_head(t, index, got);
    }
    if (index < 2 * size) {
        return DCP_OK;
    }
    int slot = index - 2 * size;
    if (slot >= WINDOW) {
        return post_piece_out(t, slot - WINDOW);
    }
    MPI_Get_count(st, MPI_BYTE, &got);
    return take_piece(t, slot, got);
}

static dcp_status progress(transfer *t, int *n_done)
{
    mpi_comm *c = t->c;
    int class = MPI_SUCCESS;
    int rc = MPI_Testsome(n_requests(c), c->requests, n_done, c->done, c->statuses);
    *n_done = *n_done == MPI_UNDEFINED ? 0 : *n_done;
    MPI_Error_class(rc, &class);
    if (class != MPI_SUCCESS && class != MPI_ERR_IN_STATUS) {
        return dcp__mpi_fail(t->err, rc, "MPI_Testsome");
    }
    dcp_status status = DCP_OK;
    for (int i = 0; status == DCP_OK && i < *n_done; i++) {
        bool has_failed = class == MPI_ERR_IN_STATUS && c->statuses[i].MPI_ERROR != MPI_SUCCESS;
        status = has_failed ? dcp__mpi_fail(t->err, c->statuses[i].MPI_ERROR, "MPI_Testsome")
                            : complete(t, c->done[i], &c->statuses[i]);
    }
    return status;
}

/* ---- failure ---- */

bool dcp__mpi_has_farewell(mpi_comm *c)
{
    int is_there = 0;
    return MPI_Iprobe(MPI_ANY_SOURCE, TAG_FAREWELL, c->comm, &is_there, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_there;
}

/* True, with err filled, if another rank has given up. */
static bool was_told(mpi_comm *c, dcp_status *status, dcp_error *err)
{
    farewell from;
    if (!dcp__mpi_has_farewell(c) ||
        MPI_Recv(&from, sizeof from, MPI_BYTE, MPI_ANY_SOURCE, TAG_FAREWELL, c->comm, MPI_STATUS_IGNORE) != MPI_SUCCESS) {
        return false;
    }
    *status = (dcp_status)from.status;
    dcp_error_set(err, *status, "%.*s", (int)sizeof from.message, from.message);
    err->rank = from.rank;
    err->native_code = from.native_code;
    return true;
}

static void tell_others(mpi_comm *c, dcp_status status, const dcp_error *err)
{
    c->told = (farewell){.status = (int32_t)status, .rank = err->rank, .native_code = err->native_code};
    memcpy(c->told.message, err->message, strnlen(err->message, sizeof c->told.message - 1));
    for (int r = 0; r < c->base.size; r++) {
        if (r != c->base.rank) {
            MPI_Isend(&c->told, sizeof c->told, MPI_BYTE, r, TAG_FAREWELL, c->comm, &c->farewells[r]);
        }
    }
}

/* Receives can be withdrawn, sends cannot: what nobody takes stays in the handle. */
static void withdraw(mpi_comm *c)
{
    int size = c->base.size;
    for (int i = 0; i < n_requests(c); i++) {
        bool is_receive = i < size || (i >= 2 * size && i < 2 * size + WINDOW);
        if (is_receive && c->requests[i] != MPI_REQUEST_NULL) {
            MPI_Cancel(&c->requests[i]);
        }
    }
    dcp__mpi_settle(c);
}

bool dcp__mpi_settle(mpi_comm *c)
{
    const uint64_t deadline = dcp__mpi_deadline(SETTLE_MS);
    int is_done = 0, are_told = 0;
    for (unsigned idle = 0;; idle++) {
        int rc = MPI_Testall(n_requests(c), c->requests, &is_done, c->statuses);
        int rc_told = MPI_Testall(c->base.size, c->farewells, &are_told, c->statuses);
        if (rc != MPI_SUCCESS || rc_told != MPI_SUCCESS) {
            return false;
        }
        if ((is_done && are_told) || dcp__mpi_now_ns() > deadline) {
            return is_done && are_told;
        }
        dcp__mpi_idle(idle);
    }
}

static bool are_all_here(const mpi_comm *c)
{
    for (int r = 0; r < c->base.size; r++) {
        if (!c->is_here[r]) {
            return false;
        }
    }
    return true;
}

static void mark_late(mpi_comm *c, const piece pieces[WINDOW])
{
    for (int slot = 0; slot < WINDOW; slot++) {
        if (pieces[slot].bytes) {
            c->is_here[pieces[slot].rank] = false;
        }
    }
}

/* Names those of whom nothing came, else those whose pieces are awaited, else those who do not take ours. */
static dcp_status fail_timeout(transfer *t, uint32_t timeout_ms)
{
    mpi_comm *c = t->c;
    c->is_here[c->base.rank] = true;
    if (are_all_here(c)) {
        mark_late(c, t->in);
    }
    if (are_all_here(c)) {
        mark_late(c, t->out);
        for (int r = 0; r < c->base.size; r++) {
            c->is_here[r] = c->is_here[r] && c->requests[c->base.size + r] == MPI_REQUEST_NULL;
        }
    }
    return dcp__fail_missing(c->is_here, c->base.size, timeout_ms, t->err);
}

/* ---- the call ---- */

static dcp_status run(transfer *t, uint32_t timeout_ms, bool *is_told)
{
    const uint64_t deadline = dcp__mpi_deadline(timeout_ms);
    dcp_status status = post_all(t);
    for (unsigned idle = 0; status == DCP_OK && t->active > 0; idle++) {
        int n_done;
        status = progress(t, &n_done);
        if (n_done > 0 || status != DCP_OK) {
            idle = 0;
        } else if (was_told(t->c, &status, t->err)) {
            *is_told = true;
        } else if (dcp__mpi_now_ns() > deadline) {
            status = fail_timeout(t, timeout_ms);
        } else {
            dcp__mpi_idle(idle);
        }
    }
    return status;
}

dcp_status dcp__mpi_transfer(mpi_comm *c, mpi_call call, const dcp_comm_send *send, const dcp_comm_recv *recv,
                             uint32_t timeout_ms, dcp_error *err)
{
    transfer t = {
        .c = c,
        .call = call,
        .send = send,
        .recv = recv,
        .err = err,
        .next_in = {1, HEAD_PAYLOAD},
        .next_out = {1, HEAD_PAYLOAD},
    };
    dcp_status status;
    bool is_told = false;
    c->number++;
    if (was_told(c, &status, err)) {
        return DCP_STATE;
    }
    status = run(&t, timeout_ms, &is_told);
    if (status != DCP_OK) {
        if (!is_told) {
            tell_others(c, status, err);
        }
        withdraw(c);
    }
    return status;
}
