/* Making and freeing communicators, and steps without one; what all communicators do is in tests/conformance/test_comm.c. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/collective.h"
#include "support/failing_alloc.h"

/* ---- arguments ---- */

static dcp_status never_alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                 dcp_error *err)
{
    (void)user, (void)send, (void)recv, (void)timeout_ms;
    return dcp_error_set(err, DCP_IO, "cable cut");
}

static dcp_comm_callbacks lone_callbacks(void)
{
    dcp_comm_callbacks cb = DCP_COMM_CALLBACKS_INIT;
    cb.size = 2;
    cb.alltoall = never_alltoall;
    return cb;
}

static void comm__wrong_arguments_are_refused(void **state)
{
    (void)state;
    dcp_comm *comm = NULL;
    dcp_comm_callbacks cb = lone_callbacks();
    assert_int_equal(dcp_comm_self(NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_comm_threads(NULL, 0, &comm, NULL), DCP_ARG);
    assert_int_equal(dcp_comm_threads(NULL, 2, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_comm_from_callbacks(NULL, NULL, &comm, NULL), DCP_ARG);
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, NULL, NULL), DCP_ARG);
    cb.rank = 2;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_ARG);
    cb.rank = -1;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_ARG);
    cb = lone_callbacks();
    cb.alltoall = NULL;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_ARG);
    cb = lone_callbacks();
    cb.struct_size--;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_ARG);
    assert_null(comm);
    dcp_comm_free(NULL);
}

static void comm_init__refuses_another_table(void **state)
{
    (void)state;
    dcp_comm *self, copy;
    assert_int_equal(dcp_comm_self(NULL, &self, NULL), DCP_OK);
    dcp_comm_ops ops = *self->ops;
    assert_int_equal(dcp_comm_init(&copy, NULL, NULL, 0, 1, 0, NULL), DCP_ARG);
    ops.abi_version++;
    assert_int_equal(dcp_comm_init(&copy, NULL, &ops, 0, 1, 0, NULL), DCP_ARG);
    ops = *self->ops;
    ops.struct_size--;
    assert_int_equal(dcp_comm_init(&copy, NULL, &ops, 0, 1, 0, NULL), DCP_ARG);
    assert_int_equal(dcp_comm_init(&copy, NULL, self->ops, 1, 1, 0, NULL), DCP_ARG);
    dcp_comm_free(self);
}

/* ---- callbacks ---- */

static void callbacks__failure_breaks_and_is_quoted(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    dcp_comm *comm, *twin = NULL;
    dcp_comm_callbacks cb = lone_callbacks();
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_OK);
    assert_int_equal(dcp_comm_duplicate(comm, 0, &twin, &err), DCP_UNSUPPORTED);
    assert_false(dcp_comm_is_broken(comm));
    assert_int_equal(dcp_comm_barrier(comm, 0, NULL), DCP_IO);
    assert_true(dcp_comm_is_broken(comm));
    assert_int_equal(dcp_comm_barrier(comm, 0, &err), DCP_STATE);
    assert_non_null(strstr(err.message, "cable cut"));
    dcp_comm_free(comm);
}

static dcp_status note_timeout(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                               dcp_error *err)
{
    (void)err;
    *(uint32_t *)user = timeout_ms;
    memcpy(recv->ptr, send->ptr, send->bytes);
    return DCP_OK;
}

static void comm__zero_means_the_default_deadline(void **state)
{
    (void)state;
    uint32_t seen = 0;
    dcp_comm *comm;
    dcp_comm_callbacks cb = DCP_COMM_CALLBACKS_INIT;
    cb.user = &seen;
    cb.size = 1;
    cb.alltoall = note_timeout;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &cb, &comm, NULL), DCP_OK);
    assert_int_equal(dcp_comm_barrier(comm, 0, NULL), DCP_OK);
    assert_int_equal(seen, 30 * 60 * 1000);
    dcp_comm_set_timeout(comm, 77);
    assert_int_equal(dcp_comm_barrier(comm, 0, NULL), DCP_OK);
    assert_int_equal(seen, 77);
    assert_int_equal(dcp_comm_barrier(comm, 5, NULL), DCP_OK);
    assert_int_equal(seen, 5);
    dcp_comm_set_timeout(comm, 0);
    dcp__step step = {dcp__context(NULL), comm, "plan", NULL};
    assert_int_equal(dcp__agree(&step, DCP_OK, NULL), DCP_OK);
    assert_int_equal(seen, 30 * 60 * 1000);
    dcp_comm_free(comm);
}

/* ---- threads ---- */

static void *wait_for_rank_1(void *comm)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp_comm_barrier(comm, 60000, &err);
    return status == DCP_STATE ? comm : NULL;
}

/* Who waits for a rank that has freed its handle is told, and does not wait for the deadline. */
static void threads__freed_handle_ends_the_wait(void **state)
{
    (void)state;
    dcp_comm *comms[3];
    pthread_t waiting;
    void *result;
    assert_int_equal(dcp_comm_threads(NULL, 3, comms, NULL), DCP_OK);
    assert_int_equal(pthread_create(&waiting, NULL, wait_for_rank_1, comms[0]), 0);
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    dcp_comm_free(comms[1]);
    assert_int_equal(pthread_join(waiting, &result), 0);
    assert_ptr_equal(result, comms[0]);
    assert_int_equal(dcp_comm_barrier(comms[2], 60000, NULL), DCP_STATE);
    dcp_comm_free(comms[0]);
    dcp_comm_free(comms[2]);
}

/* ---- allocation failures ---- */

static dcp_status make_and_free_self(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp_comm *comm, *twin;
    dcp_status status = dcp_comm_self(ctx, &comm, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_comm_duplicate(comm, 0, &twin, err);
    if (status == DCP_OK) {
        dcp_comm_free(twin);
    }
    assert_false(dcp_comm_is_broken(comm));
    dcp_comm_free(comm);
    return status;
}

typedef struct twin_of {
    dcp_comm *comm, *twin;
    dcp_status status;
    dcp_error err;
} twin_of;

static void *duplicate_one(void *arg)
{
    twin_of *t = arg;
    t->err = (dcp_error)DCP_ERROR_INIT;
    t->status = dcp_comm_duplicate(t->comm, 60000, &t->twin, &t->err);
    return NULL;
}

/* All ranks get one or none, and at least one of them says that memory is short. */
static dcp_status duplicate_all(dcp_comm **comms, int n, dcp_error *err)
{
    pthread_t threads[3];
    twin_of twins[3];
    dcp_status status = DCP_OK;
    int n_made = 0;
    for (int r = 0; r < n; r++) {
        twins[r] = (twin_of){.comm = comms[r]};
        assert_int_equal(pthread_create(&threads[r], NULL, duplicate_one, &twins[r]), 0);
    }
    for (int r = 0; r < n; r++) {
        assert_int_equal(pthread_join(threads[r], NULL), 0);
        assert_true(twins[r].status == DCP_OK || twins[r].status == DCP_NOMEM || twins[r].status == DCP_PEER);
        assert_false(dcp_comm_is_broken(comms[r]));
        n_made += twins[r].twin != NULL;
        if (twins[r].status == DCP_NOMEM) {
            *err = twins[r].err;
            status = DCP_NOMEM;
        }
        dcp_comm_free(twins[r].twin);
    }
    assert_int_equal(n_made, status == DCP_OK ? n : 0);
    return status;
}

static dcp_status make_and_free_threads(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp_comm *comms[3] = {NULL};
    dcp_status status = dcp_comm_threads(ctx, 3, comms, err);
    if (status != DCP_OK) {
        assert_null(comms[0]);
        return status;
    }
    status = duplicate_all(comms, 3, err);
    for (int r = 0; r < 3; r++) {
        dcp_comm_free(comms[r]);
    }
    return status;
}

static dcp_status pass_alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                dcp_error *err)
{
    return dcp_comm_alltoall(user, send, recv, timeout_ms, err);
}

static dcp_status pass_duplicate(void *user, uint32_t timeout_ms, void **out, dcp_error *err)
{
    dcp_comm *twin;
    dcp_status status = dcp_comm_duplicate(user, timeout_ms, &twin, err);
    if (status == DCP_OK) {
        *out = twin;
    }
    return status;
}

static void pass_release(void *user)
{
    dcp_comm_free(user);
}

static dcp_status make_and_free_callbacks(dcp_context *ctx, void *user, dcp_error *err)
{
    (void)user;
    dcp_comm *inner[2] = {NULL}, *comms[2] = {NULL};
    dcp_status status = dcp_comm_threads(ctx, 2, inner, err);
    for (int r = 0; status == DCP_OK && r < 2; r++) {
        dcp_comm_callbacks cb = {sizeof cb, inner[r], r, 2, 0, pass_alltoall, NULL, pass_duplicate, pass_release, NULL};
        status = dcp_comm_from_callbacks(ctx, &cb, &comms[r], err);
        inner[r] = status == DCP_OK ? NULL : inner[r];
    }
    if (status == DCP_OK) {
        status = duplicate_all(comms, 2, err);
    }
    for (int r = 0; r < 2; r++) {
        dcp_comm_free(comms[r]);
        dcp_comm_free(inner[r]);
    }
    return status;
}

static void comm__survives_every_failing_allocation(void **state)
{
    (void)state;
    assert_true(failing_alloc_walk(make_and_free_self, NULL) > 0);
    assert_true(failing_alloc_walk(make_and_free_threads, NULL) > 0);
    assert_true(failing_alloc_walk(make_and_free_callbacks, NULL) > 0);
}

/* ---- steps without a communicator ---- */

static void lone_step__failure_comes_back_as_it_is(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    dcp_failures *failures;
    assert_int_equal(dcp_failures_create(NULL, &failures, NULL), DCP_OK);
    dcp__step step = {dcp__context(NULL), NULL, "write", failures};
    assert_int_equal(dcp__step_rank(&step), 0);
    assert_int_equal(dcp__step_size(&step), 1);
    dcp__fail_at(&err, DCP_FORMAT, 99, "odd bytes");
    assert_int_equal(dcp__agree(&step, DCP_FORMAT, &err), DCP_FORMAT);
    assert_int_equal(err.code, DCP_FORMAT);
    assert_int_equal(err.offset, 99);
    assert_string_equal(err.message, "odd bytes");
    assert_int_equal(dcp_failures_count(failures), 1);
    assert_int_equal(dcp_failures_at(failures, 0)->rank, 0);
    assert_int_equal(dcp_failures_at(failures, 0)->offset, 99);
    assert_int_equal(dcp__agree(&step, DCP_OK, &err), DCP_OK);
    assert_int_equal(dcp_failures_count(failures), 0);
    dcp_failures_free(failures);
}

static void lone_step__moves_bytes_to_itself(void **state)
{
    (void)state;
    dcp_error err = DCP_ERROR_INIT;
    dcp__step step = {dcp__context(NULL), NULL, "plan", NULL};
    dcp_comm_send send = {"hello", 5};
    dcp__parts parts = {0};
    uint64_t value = 0;
    size_t n;
    assert_int_equal(dcp__exchange(&step, DCP_OK, &send, &parts, &err), DCP_OK);
    assert_memory_equal(dcp__part(&parts, 0, &n), "hello", 5);
    assert_int_equal(n, 5);
    dcp__parts_free(&parts);
    assert_int_equal(dcp__gather(&step, DCP_OK, 0, "abc", 3, &parts, &err), DCP_OK);
    assert_memory_equal(dcp__part(&parts, 0, &n), "abc", 3);
    assert_int_equal(n, 3);
    dcp__parts_free(&parts);
    dcp__parts_free(&parts);
    assert_int_equal(dcp__agree_u64(&step, DCP_OK, 42, &value, &err), DCP_OK);
    assert_int_equal(value, 42);
    dcp__buf io;
    dcp__buf_init(&io, dcp__context(NULL));
    dcp__buf_put(&io, "xyz", 3);
    assert_int_equal(dcp__broadcast(&step, DCP_OK, 0, &io, &err), DCP_OK);
    assert_int_equal(io.len, 3);
    dcp__buf_reset(&io);
}

/* ---- what is logged ---- */

static void count_line(void *user, dcp_log_level level, const char *line)
{
    assert_int_equal(level, DCP_LOG_ERROR);
    assert_non_null(strstr(line, "rank 0: disk on fire"));
    ++*(int *)user;
}

/* A rank that fails logs its cause before it waits for anybody: here the agreement never comes about. */
static void agree__failing_rank_logs_at_once(void **state)
{
    (void)state;
    int lines = 0;
    dcp_error err = DCP_ERROR_INIT;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    dcp_comm *comms[2];
    opts.log = count_line;
    opts.log_user = &lines;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    assert_int_equal(dcp_comm_threads(NULL, 2, comms, NULL), DCP_OK);
    dcp_comm_set_timeout(comms[0], 50);
    dcp__step step = {ctx, comms[0], "write", NULL};
    dcp__fail(&err, DCP_IO, "disk on fire");
    assert_int_equal(dcp__agree(&step, DCP_IO, &err), DCP_IO);
    assert_string_equal(err.message, "disk on fire");
    assert_int_equal(lines, 1);
    dcp_comm_free(comms[0]);
    dcp_comm_free(comms[1]);
    dcp_context_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(comm__wrong_arguments_are_refused),       cmocka_unit_test(comm_init__refuses_another_table),
        cmocka_unit_test(callbacks__failure_breaks_and_is_quoted), cmocka_unit_test(comm__zero_means_the_default_deadline),
        cmocka_unit_test(threads__freed_handle_ends_the_wait),     cmocka_unit_test(comm__survives_every_failing_allocation),
        cmocka_unit_test(lone_step__failure_comes_back_as_it_is),  cmocka_unit_test(lone_step__moves_bytes_to_itself),
        cmocka_unit_test(agree__failing_rank_logs_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
