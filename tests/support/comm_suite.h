/*
 * What every communicator must do, as programs that all ranks of a group run together: as threads (tests/conformance/test_comm.c)
 * or as processes (tests/mpi/test_mpi.c). They check with a macro of their own, because cmocka's assertions jump, and only one
 * thread may.
 */
#ifndef TESTS_SUPPORT_COMM_SUITE_H
#define TESTS_SUPPORT_COMM_SUITE_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/collective.h"
#include "support/failing_alloc.h"
#include "support/random.h"

#define CHECK(condition)                                                                                                         \
    do {                                                                                                                         \
        if (!(condition)) {                                                                                                      \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                              \
            abort();                                                                                                             \
        }                                                                                                                        \
    } while (0)

/* The status, and the rank that the error names. */
#define CHECK_FAILS(status, code_wanted, rank_wanted, err)                                                                       \
    do {                                                                                                                         \
        dcp_status check_fails = (status);                                                                                       \
        if (check_fails != (code_wanted) || (err)->code != check_fails || (err)->rank != (rank_wanted)) {                        \
            fprintf(stderr, "%s:%d: %s, rank %d: %s\n", __FILE__, __LINE__, dcp_status_name(check_fails), (err)->rank,           \
                    (err)->message);                                                                                             \
            abort();                                                                                                             \
        }                                                                                                                        \
    } while (0)

#define CHECK_OK(status, err)                                                                                                    \
    do {                                                                                                                         \
        dcp_status check_ok = (status);                                                                                          \
        if (check_ok != DCP_OK) {                                                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, dcp_status_name(check_ok), (err)->message);                   \
            abort();                                                                                                             \
        }                                                                                                                        \
    } while (0)

/* A deadline that is never reached. */
#define LONG_MS 60000

typedef struct suite_run {
    dcp_comm *comm; /* whole, and whole again afterwards */
    int rank, size;
    uint64_t seed; /* the same on all ranks */
} suite_run;

static inline uint64_t suite_mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    test_random r = {seed ^ (a << 48) ^ (b << 24) ^ c};
    test_random_next(&r);
    return test_random_next(&r);
}

static inline dcp_comm *suite_duplicate(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *twin = NULL;
    CHECK_OK(dcp_comm_duplicate(run->comm, LONG_MS, &twin, &err), &err);
    CHECK(dcp_comm_rank(twin) == run->rank && dcp_comm_size(twin) == run->size);
    return twin;
}

static inline dcp__step suite_step(dcp_comm *comm, const char *phase, dcp_failures *failures)
{
    return (dcp__step){dcp__context(NULL), comm, phase, failures};
}

/* ---- bytes ---- */

/* Often nothing or little, now and then much. Known to both sides. */
static inline size_t suite_size(const suite_run *run, uint64_t round, int from, int to)
{
    uint64_t h = suite_mix(run->seed, round, (uint64_t)from, (uint64_t)to);
    size_t most = run->size <= 4 ? 300000 : run->size <= 8 ? 50000 : 4000;
    switch (h % 8) {
    case 0:
    case 1: return 0;
    case 2:
    case 3: return (h >> 8) % 16;
    case 7: return (h >> 8) % most;
    default: return (h >> 8) % 3000;
    }
}

static inline void suite_fill(uint8_t *at, size_t n, uint64_t round, int from, int to)
{
    uint64_t h = suite_mix(7, round, (uint64_t)from, (uint64_t)to);
    for (size_t i = 0; i < n; i++) {
        at[i] = (uint8_t)(h + i * 131 + (i >> 8));
    }
}

static inline void suite_check(const uint8_t *at, size_t n, uint64_t round, int from, int to)
{
    uint64_t h = suite_mix(7, round, (uint64_t)from, (uint64_t)to);
    for (size_t i = 0; i < n; i++) {
        CHECK(at[i] == (uint8_t)(h + i * 131 + (i >> 8)));
    }
}

static inline void *suite_alloc(size_t n)
{
    void *p = malloc(n ? n : 1);
    CHECK(p);
    return p;
}

static inline dcp_comm_send *suite_sends(const suite_run *run, uint64_t round)
{
    dcp_comm_send *send = suite_alloc((size_t)run->size * sizeof *send);
    for (int r = 0; r < run->size; r++) {
        size_t n = suite_size(run, round, run->rank, r);
        uint8_t *bytes = n ? suite_alloc(n) : NULL;
        suite_fill(bytes, n, round, run->rank, r);
        send[r] = (dcp_comm_send){bytes, n};
    }
    return send;
}

static inline void suite_free_sends(const suite_run *run, dcp_comm_send *send)
{
    for (int r = 0; r < run->size; r++) {
        free((void *)(uintptr_t)send[r].ptr);
    }
    free(send);
}

static inline int suite_rounds(const suite_run *run)
{
    return run->size > 8 ? 3 : 8;
}

static inline void suite_alltoall(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    for (int round = 0; round < suite_rounds(run); round++) {
        dcp_comm_send *send = suite_sends(run, (uint64_t)round);
        dcp_comm_recv *recv = suite_alloc((size_t)run->size * sizeof *recv);
        for (int r = 0; r < run->size; r++) {
            size_t n = suite_size(run, (uint64_t)round, r, run->rank);
            recv[r] = (dcp_comm_recv){n ? suite_alloc(n) : NULL, n};
        }
        CHECK_OK(dcp_comm_alltoall(run->comm, send, recv, 0, &err), &err);
        for (int r = 0; r < run->size; r++) {
            suite_check(recv[r].ptr, recv[r].bytes, (uint64_t)round, r, run->rank);
            free(recv[r].ptr);
        }
        free(recv);
        suite_free_sends(run, send);
    }
}

static inline void suite_all_gather(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    const size_t sizes[] = {1, 8, 24, 777, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i];
        uint8_t *mine = suite_alloc(n), *all = suite_alloc(n * (size_t)run->size);
        suite_fill(mine, n, i, run->rank, 0);
        CHECK_OK(dcp_comm_all_gather(run->comm, mine, n, all, 0, &err), &err);
        for (int r = 0; r < run->size; r++) {
            suite_check(all + (size_t)r * n, n, i, r, 0);
        }
        free(mine);
        free(all);
    }
    uint8_t nothing = 0;
    CHECK(dcp_comm_all_gather(run->comm, &nothing, 0, &nothing, 0, &err) == DCP_ARG);
    CHECK(!dcp_comm_is_broken(run->comm));
}

static inline double suite_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Nobody leaves before the last has come; the clock is the same for all processes of a machine. */
static inline void suite_barrier(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    if (run->rank == run->size - 1) {
        nanosleep(&(struct timespec){0, 50000000}, NULL);
    }
    double came = suite_seconds(), all_came[64];
    CHECK_OK(dcp_comm_barrier(run->comm, 0, &err), &err);
    double left = suite_seconds();
    CHECK_OK(dcp_comm_all_gather(run->comm, &came, sizeof came, all_came, 0, &err), &err);
    for (int r = 0; r < run->size; r++) {
        CHECK(left >= all_came[r]);
    }
}

static inline void suite_exchange(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp__step step = suite_step(run->comm, "plan", NULL);
    for (int round = 0; round < suite_rounds(run); round++) {
        dcp_comm_send *send = suite_sends(run, (uint64_t)round);
        dcp__parts parts = {0};
        CHECK_OK(dcp__exchange(&step, DCP_OK, send, &parts, &err), &err);
        CHECK(parts.n == run->size);
        for (int r = 0; r < run->size; r++) {
            size_t n;
            const uint8_t *bytes = dcp__part(&parts, r, &n);
            CHECK(n == suite_size(run, (uint64_t)round, r, run->rank));
            suite_check(bytes, n, (uint64_t)round, r, run->rank);
        }
        dcp__parts_free(&parts);
        suite_free_sends(run, send);
    }
    dcp__parts nothing = {0};
    CHECK_OK(dcp__exchange(&step, DCP_OK, NULL, &nothing, &err), &err);
    CHECK(nothing.starts[run->size] == 0);
    dcp__parts_free(&nothing);
}

static inline void suite_gather(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp__step step = suite_step(run->comm, "plan", NULL);
    for (int root = 0; root<run->size; root += run->size> 8 ? 21 : 1) {
        size_t n = suite_size(run, 100, run->rank, root);
        uint8_t *mine = suite_alloc(n);
        dcp__parts parts = {0};
        suite_fill(mine, n, 100, run->rank, root);
        CHECK_OK(dcp__gather(&step, DCP_OK, root, mine, n, &parts, &err), &err);
        CHECK(parts.n == (run->rank == root ? run->size : 0));
        for (int r = 0; r < parts.n; r++) {
            const uint8_t *bytes = dcp__part(&parts, r, &n);
            CHECK(n == suite_size(run, 100, r, root));
            suite_check(bytes, n, 100, r, root);
        }
        dcp__parts_free(&parts);
        free(mine);
    }
}

/* Around the size from which on it goes in slices. */
static inline void suite_broadcast(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp__step step = suite_step(run->comm, "plan", NULL);
    const size_t sizes[] = {0, 1, 1000, 65535, 65536, 65537 + 64, 300001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int root = (int)(suite_mix(run->seed, i, 1, 2) % (uint64_t)run->size);
        dcp__buf io;
        dcp__buf_init(&io, dcp__context(NULL));
        if (run->rank == root && sizes[i]) {
            CHECK(dcp__buf_reserve(&io, sizes[i]));
            suite_fill(io.data, sizes[i], i, root, 0);
            io.len = sizes[i];
        }
        CHECK_OK(dcp__broadcast(&step, DCP_OK, root, &io, &err), &err);
        CHECK(io.len == sizes[i]);
        suite_check(io.data, io.len, i, root, 0);
        dcp__buf_reset(&io);
    }
}

/* ---- agreement ---- */

static const dcp_status suite_codes[] = {DCP_IO, DCP_NOSPACE, DCP_FORMAT, DCP_NOMEM, DCP_TIMEOUT};

static inline dcp_status suite_code(int rank)
{
    return suite_codes[(size_t)rank % (sizeof suite_codes / sizeof *suite_codes)];
}

/* Some messages are as long as can be. */
static inline void suite_message(int rank, char text[DCP_ERROR_MESSAGE_BYTES])
{
    int n = snprintf(text, DCP_ERROR_MESSAGE_BYTES, "cause of rank %d", rank);
    if (rank % 3 == 0) {
        memset(text + n, 'a' + rank % 26, (size_t)(DCP_ERROR_MESSAGE_BYTES - 1 - n));
        text[DCP_ERROR_MESSAGE_BYTES - 1] = 0;
    }
}

static inline dcp_status suite_fail(int rank, dcp_error *err)
{
    char text[DCP_ERROR_MESSAGE_BYTES];
    suite_message(rank, text);
    dcp__fail_at(err, suite_code(rank), 1000 + (uint64_t)rank, "%s", text);
    err->sys_errno = rank + 1;
    err->native_code = -(int64_t)rank;
    return err->code;
}

static inline void suite_check_failure(const dcp_failure *f, int rank)
{
    char text[DCP_ERROR_MESSAGE_BYTES];
    suite_message(rank, text);
    CHECK(f && f->rank == rank && f->code == suite_code(rank) && f->offset == 1000 + (uint64_t)rank);
    CHECK(f->sys_errno == rank + 1 && f->native_code == -(int64_t)rank && strcmp(f->message, text) == 0);
}

/* Every rank holds the same error, byte for byte. */
static inline void suite_check_same(dcp_comm *comm, const dcp_error *mine)
{
    dcp_error err = DCP_ERROR_INIT;
    int size = dcp_comm_size(comm);
    dcp_error *all = suite_alloc((size_t)size * sizeof *all);
    CHECK_OK(dcp_comm_all_gather(comm, mine, sizeof *mine, all, 0, &err), &err);
    for (int r = 0; r < size; r++) {
        CHECK(all[r].code == mine->code && all[r].rank == mine->rank && all[r].offset == mine->offset);
        CHECK(all[r].native_code == mine->native_code && strcmp(all[r].message, mine->message) == 0);
    }
    free(all);
}

/* Which ranks fail: bit 0 is rank 0, and so on up to 64. */
static inline void suite_agree_on(const suite_run *run, dcp_comm *comm, uint64_t failing)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_failures *failures;
    dcp_status mine = DCP_OK;
    CHECK_OK(dcp_failures_create(NULL, &failures, &err), &err);
    dcp__step step = suite_step(comm, "write", failures);
    if (failing >> run->rank & 1) {
        mine = suite_fail(run->rank, &err);
    }
    dcp_status status = dcp__agree(&step, mine, &err);
    CHECK(status == (failing ? DCP_PEER : DCP_OK) && err.code == status);
    size_t at = 0;
    for (int r = 0; r < run->size; r++) {
        if (failing >> r & 1) {
            suite_check_failure(dcp_failures_at(failures, at++), r);
        }
    }
    CHECK(dcp_failures_count(failures) == at && dcp_failures_lost(failures) == 0 && !dcp_failures_at(failures, at));
    suite_check_same(comm, &err);
    dcp_failures_free(failures);
}

static inline void suite_agreement(const suite_run *run)
{
    uint64_t all = run->size == 64 ? UINT64_MAX : ((uint64_t)1 << run->size) - 1;
    suite_agree_on(run, run->comm, 0);
    suite_agree_on(run, run->comm, all);
    if (run->size <= 4) {
        for (uint64_t failing = 1; failing < all; failing++) {
            suite_agree_on(run, run->comm, failing);
        }
    }
    for (uint64_t i = 0; i < 6; i++) {
        suite_agree_on(run, run->comm, suite_mix(run->seed, i, 5, 5) & all);
    }
}

/* A failing rank calls like the others, and no rank gets any bytes. */
static inline void suite_failing_rank_in_each_call(const suite_run *run)
{
    for (int failing = 0; failing<run->size; failing += run->size> 8 ? 17 : 1) {
        for (int call = 0; call < 4; call++) {
            dcp_error err = DCP_ERROR_INIT;
            dcp__step step = suite_step(run->comm, "read", NULL);
            dcp_status mine = run->rank == failing ? suite_fail(failing, &err) : DCP_OK, status = DCP_OK;
            dcp_comm_send *send = suite_sends(run, 3);
            dcp__parts parts = {0};
            dcp__buf io;
            uint64_t values[64] = {0};
            dcp__buf_init(&io, dcp__context(NULL));
            switch (call) {
            case 0: status = dcp__exchange(&step, mine, send, &parts, &err); break;
            case 1: status = dcp__gather(&step, mine, 0, "abc", 3, &parts, &err); break;
            case 2: status = dcp__broadcast(&step, mine, 0, &io, &err); break;
            default: status = dcp__agree_u64(&step, mine, 9, values, &err); break;
            }
            CHECK(status == DCP_PEER && err.rank == failing && err.offset == 1000 + (uint64_t)failing);
            CHECK(parts.n == 0 && !parts.data && io.len == 0 && values[0] == 0);
            suite_free_sends(run, send);
            dcp__buf_reset(&io);
        }
    }
}

static inline void suite_values(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    uint64_t values[64];
    dcp__step step = suite_step(run->comm, "plan", NULL);
    CHECK_OK(dcp__agree_u64(&step, DCP_OK, UINT64_MAX - (uint64_t)run->rank, values, &err), &err);
    for (int r = 0; r < run->size; r++) {
        CHECK(values[r] == UINT64_MAX - (uint64_t)r);
    }
}

/* A rank without memory for what it is to receive fails, all hear of it, and the communicator stays whole. */
static inline void suite_no_memory(const suite_run *run)
{
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    for (int call = 0; call < 3; call++) {
        bool has_failed = true;
        for (size_t n = 0; has_failed; n++) {
            dcp_error err = DCP_ERROR_INIT;
            dcp__step step = {ctx, run->comm, "plan", NULL};
            dcp_comm_send *send = suite_sends(run, 5);
            dcp__parts parts = {0};
            dcp__buf io;
            int root = call == 2 ? run->size - 1 : 0; /* rank 0 is the one without memory */
            dcp_status status = DCP_OK;
            dcp__buf_init(&io, ctx);
            if (run->rank == root) {
                dcp__buf_put(&io, "some bytes", 10);
            }
            fa.calls = 0;
            fa.fail_at = run->rank == 0 ? n : SIZE_MAX;
            switch (call) {
            case 0: status = dcp__exchange(&step, DCP_OK, send, &parts, &err); break;
            case 1: status = dcp__gather(&step, DCP_OK, root, "abc", 3, &parts, &err); break;
            default: status = dcp__broadcast(&step, DCP_OK, root, &io, &err); break;
            }
            fa.fail_at = SIZE_MAX;
            has_failed = status != DCP_OK;
            CHECK(!has_failed || (status == DCP_PEER && err.rank == 0));
            CHECK(has_failed || n > 0 || run->size == 1);
            dcp__parts_free(&parts);
            dcp__buf_reset(&io);
            suite_free_sends(run, send);
        }
    }
    CHECK(fa.live == 1);
    dcp_context_free(ctx);
}

/* Ranks that are at different places of the program. */
static inline void suite_phases_differ(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = suite_duplicate(run);
    dcp__step step = suite_step(comm, run->rank == run->size - 1 && run->size > 1 ? "write" : "plan", NULL);
    dcp_status status = dcp__agree(&step, DCP_OK, &err);
    CHECK(status == (run->size > 1 ? DCP_STATE : DCP_OK));
    CHECK(dcp_comm_is_broken(comm) == (run->size > 1));
    CHECK(run->size == 1 || err.rank == run->size - 1);
    dcp_comm_free(comm);
}

/* ---- duplicates, breaking ---- */

static inline void suite_duplicates(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *a = suite_duplicate(run), *b = suite_duplicate(&(suite_run){a, run->rank, run->size, run->seed});
    uint32_t timeout = a->timeout_ms;
    CHECK(timeout == run->comm->timeout_ms);
    dcp_comm_set_timeout(a, 12345);
    dcp_comm *c = suite_duplicate(&(suite_run){a, run->rank, run->size, run->seed});
    CHECK(c->timeout_ms == 12345 && b->timeout_ms == timeout);
    dcp_comm_free(a);
    suite_alltoall(&(suite_run){b, run->rank, run->size, run->seed});
    suite_alltoall(&(suite_run){c, run->rank, run->size, run->seed + 1});
    CHECK_OK(dcp_comm_barrier(b, 0, &err), &err);
    dcp_comm_free(b);
    CHECK_OK(dcp_comm_barrier(run->comm, 0, &err), &err);
    dcp_comm_free(c);
}

static inline void suite_check_broken(dcp_comm *comm)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *twin = NULL;
    double before = suite_seconds();
    dcp_failures *failures;
    CHECK_OK(dcp_failures_create(NULL, &failures, &err), &err);
    dcp__step step = suite_step(comm, "read", failures);
    CHECK(dcp_comm_is_broken(comm));
    CHECK(dcp_comm_barrier(comm, LONG_MS, &err) == DCP_STATE);
    CHECK(dcp_comm_duplicate(comm, LONG_MS, &twin, &err) == DCP_STATE && !twin);
    CHECK(dcp__agree(&step, DCP_OK, &err) == DCP_STATE);
    /* A rank's own failure is not hidden by it. */
    suite_fail(1, &err);
    CHECK(dcp__agree(&step, suite_code(1), &err) == suite_code(1) && err.offset == 1001);
    CHECK(suite_seconds() - before < 5);
    dcp_failures_free(failures);
}

/* One rank never comes: the others name it; when it comes after all it is refused. Which call it is depends on the size. */
static inline void suite_missing_rank(const suite_run *run)
{
    if (run->size == 1) {
        return;
    }
    int missing = (int)(suite_mix(run->seed, 1, 2, 3) % (uint64_t)run->size), call = run->size % 3;
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = suite_duplicate(run), *twin = NULL;
    dcp_comm_set_timeout(comm, run->size > 8 ? 1500 : 400);
    dcp__step step = suite_step(comm, "write", NULL);
    if (run->rank != missing) {
        double before = suite_seconds();
        dcp_status status = call == 0   ? dcp__agree(&step, DCP_OK, &err)
                            : call == 1 ? dcp_comm_barrier(comm, 0, &err)
                                        : dcp_comm_duplicate(comm, 0, &twin, &err);
        CHECK_FAILS(status, DCP_TIMEOUT, missing, &err);
        CHECK(!twin && suite_seconds() - before < 20);
        CHECK(call != 0 || strncmp(err.message, "write: ", 7) == 0);
    }
    CHECK_OK(dcp_comm_barrier(run->comm, LONG_MS, &err), &err);
    if (run->rank == missing) {
        CHECK(dcp_comm_barrier(comm, LONG_MS, &err) == DCP_STATE);
    }
    suite_check_broken(comm);
    dcp_comm_free(comm);
}

/* A rank whose message is not what the other expects. */
static inline void suite_sizes_differ(const suite_run *run)
{
    for (int large = 0; large < 2; large++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_comm *comm = suite_duplicate(run);
        size_t n = large ? 600000 : 7;
        int last = run->size - 1;
        char *from = calloc(1, n + 1), *to = calloc(1, n + 1);
        dcp_comm_send *send = calloc((size_t)run->size, sizeof *send);
        dcp_comm_recv *recv = calloc((size_t)run->size, sizeof *recv);
        CHECK(from && to && send && recv);
        if (run->rank == 0) {
            send[last] = (dcp_comm_send){from, n};
        }
        if (run->rank == last) {
            recv[0] = (dcp_comm_recv){to, n + 1};
        }
        dcp_status status = dcp_comm_alltoall(comm, send, recv, LONG_MS, &err);
        CHECK(run->rank != last || status == DCP_MISMATCH);
        /* All learn of it at the latest here. */
        CHECK(dcp_comm_barrier(comm, LONG_MS, &err) != DCP_OK);
        suite_check_broken(comm);
        CHECK_OK(dcp_comm_barrier(run->comm, LONG_MS, &err), &err);
        dcp_comm_free(comm);
        free(from);
        free(to);
        free(send);
        free(recv);
    }
}

/* Rank 0 calls another function than the rest. */
static inline void suite_calls_differ(const suite_run *run)
{
    if (run->size == 1) {
        return;
    }
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = suite_duplicate(run);
    uint64_t mine = 1, all[64];
    dcp_comm_send send[64];
    dcp_comm_recv recv[64];
    for (int r = 0; r < run->size; r++) {
        send[r] = (dcp_comm_send){&mine, sizeof mine};
        recv[r] = (dcp_comm_recv){&all[r], sizeof all[r]};
    }
    dcp_status status = run->rank == 0 ? dcp_comm_all_gather(comm, &mine, sizeof mine, all, LONG_MS, &err)
                                       : dcp_comm_alltoall(comm, send, recv, LONG_MS, &err);
    CHECK(status == DCP_STATE);
    CHECK_OK(dcp_comm_barrier(run->comm, LONG_MS, &err), &err);
    suite_check_broken(comm);
    dcp_comm_free(comm);
}

/* The last rank makes a call that the others do not, without any bytes in it, so that nobody need wait for anybody. */
static inline void suite_one_call_more(const suite_run *run)
{
    if (run->size == 1) {
        return;
    }
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm = suite_duplicate(run);
    uint64_t mine = 1, all[64];
    dcp_comm_send send[64], no_send[64] = {{NULL, 0}};
    dcp_comm_recv recv[64], no_recv[64] = {{NULL, 0}};
    for (int r = 0; r < run->size; r++) {
        send[r] = (dcp_comm_send){&mine, sizeof mine};
        recv[r] = (dcp_comm_recv){&all[r], sizeof all[r]};
    }
    dcp_status status = DCP_OK;
    if (run->rank == run->size - 1) {
        status = dcp_comm_alltoall(comm, no_send, no_recv, LONG_MS, &err);
    }
    if (status == DCP_OK) {
        status = dcp_comm_alltoall(comm, send, recv, LONG_MS, &err);
    }
    CHECK(status == DCP_STATE || status == DCP_MISMATCH);
    CHECK_OK(dcp_comm_barrier(run->comm, LONG_MS, &err), &err);
    suite_check_broken(comm);
    dcp_comm_free(comm);
}

/* ---- two threads at one handle ---- */

static inline void *suite_wait_in_barrier(void *comm)
{
    dcp_error err = DCP_ERROR_INIT;
    CHECK_OK(dcp_comm_barrier(comm, LONG_MS, &err), &err);
    return NULL;
}

/* While one thread of rank 0 waits for the others, a second one is refused, and nothing is broken by that. */
static inline void suite_concurrent_use(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    if (run->size == 1 || !(run->comm->caps & DCP_COMM_ANY_THREAD)) {
        return;
    }
    dcp_comm *comm = suite_duplicate(run), *twin = NULL;
    pthread_t first;
    if (run->rank == 0) {
        CHECK(pthread_create(&first, NULL, suite_wait_in_barrier, comm) == 0);
        while (!__atomic_load_n(&comm->state, __ATOMIC_ACQUIRE)) {
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        }
        dcp__step step = suite_step(comm, "read", NULL);
        CHECK(dcp_comm_barrier(comm, LONG_MS, &err) == DCP_STATE);
        CHECK(dcp_comm_duplicate(comm, LONG_MS, &twin, &err) == DCP_STATE);
        CHECK(dcp__agree(&step, DCP_OK, &err) == DCP_STATE);
        CHECK(!dcp_comm_is_broken(comm));
    }
    CHECK_OK(dcp_comm_barrier(run->comm, LONG_MS, &err), &err);
    if (run->rank == 0) {
        CHECK(pthread_join(first, NULL) == 0);
    } else {
        suite_wait_in_barrier(comm);
    }
    suite_alltoall(&(suite_run){comm, run->rank, run->size, run->seed});
    dcp_comm_free(comm);
}

static inline void suite_no_device_broadcast(const suite_run *run)
{
    dcp_error err = DCP_ERROR_INIT;
    if (!run->comm->ops->broadcast_device) {
        CHECK(dcp_comm_broadcast_device(run->comm, NULL, 0, 0, NULL, 0, &err) == DCP_UNSUPPORTED);
    }
    CHECK_OK(dcp_comm_barrier(run->comm, 0, &err), &err);
}

static const struct suite_entry {
    const char *name;
    void (*run)(const suite_run *run);
} suite_entries[] = {
    {"alltoall_moves_random_sizes", suite_alltoall},
    {"all_gather_brings_all_to_all", suite_all_gather},
    {"barrier_waits_for_the_last", suite_barrier},
    {"exchange_finds_the_sizes", suite_exchange},
    {"gather_to_each_root", suite_gather},
    {"broadcast_whole_and_sliced", suite_broadcast},
    {"agreement_names_every_failing_rank", suite_agreement},
    {"failing_rank_takes_part_in_each_call", suite_failing_rank_in_each_call},
    {"agreement_passes_values", suite_values},
    {"rank_without_memory_fails_for_all", suite_no_memory},
    {"phases_that_differ_are_an_error", suite_phases_differ},
    {"duplicates_are_separate", suite_duplicates},
    {"missing_rank_is_named", suite_missing_rank},
    {"sizes_that_differ_are_an_error", suite_sizes_differ},
    {"calls_that_differ_are_an_error", suite_calls_differ},
    {"one_call_more_on_a_rank_is_an_error", suite_one_call_more},
    {"second_thread_is_refused", suite_concurrent_use},
    {"device_broadcast_is_optional", suite_no_device_broadcast},
};

#define SUITE_LENGTH (sizeof suite_entries / sizeof *suite_entries)

#endif
