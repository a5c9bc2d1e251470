/* Storages in memory and around others: what the conformance suite cannot see from outside. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "dcp/backend.h"
#include "support/failing_alloc.h"

static dcp_storage *memory(void)
{
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    return st;
}

/* ---- count ---- */

static dcp_status ignore(void *user, const char *name, dcp_entry_type type)
{
    (void)user, (void)name, (void)type;
    return DCP_OK;
}

static void count__counts_calls_and_bytes(void **state)
{
    (void)state;
    dcp_storage *inner = memory(), *st;
    dcp_storage_counts counts = {0};
    dcp_file *f;
    dcp_stat s;
    char bytes[64];
    size_t got;
    assert_int_equal(dcp_storage_count(NULL, inner, &counts, &st, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "f", DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "absent", DCP_OPEN_READ, &f, NULL), DCP_NOT_FOUND);
    st->ops->write_at(f, "0123456789", 10, 0, NULL);
    st->ops->write_at(f, "01234", 5, 10, NULL);
    st->ops->read_at(f, bytes, 4, 0, &got, NULL);
    st->ops->read_at(f, bytes, 64, 12, &got, NULL); /* 3 bytes are there */
    st->ops->sync(f, NULL);
    st->ops->close(f, NULL);
    st->ops->stat(st, "f", &s, NULL);
    st->ops->list(st, "", ignore, NULL, NULL);
    st->ops->rename(st, "f", "g", NULL);
    st->ops->remove(st, "g", NULL);
    st->ops->remove(st, "g", NULL);
    const dcp_storage_counts expected = {.opens = 2,
                                         .reads = 2,
                                         .writes = 2,
                                         .syncs = 1,
                                         .lists = 1,
                                         .stats = 1,
                                         .renames = 1,
                                         .removes = 2,
                                         .bytes_read = 7,
                                         .bytes_written = 15};
    assert_memory_equal(&counts, &expected, sizeof counts);
    dcp_storage_free(st);
    dcp_storage_free(inner);
}

/* ---- fault ---- */

/* Refuses the operation `op` and notes what it was asked. */
typedef struct rule {
    dcp_storage_op op;
    dcp_status code;
    int sys_errno;
    size_t asked, n;
    uint64_t offset;
    char name[32];
} rule;

static dcp_status refuse(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    rule *r = user;
    if (op != r->op) {
        return DCP_OK;
    }
    r->asked++;
    r->n = n;
    r->offset = offset;
    snprintf(r->name, sizeof r->name, "%s", name);
    err->sys_errno = r->sys_errno;
    return r->code;
}

static dcp_status call(dcp_storage *st, dcp_storage_op op, dcp_file *f, dcp_error *err)
{
    char bytes[8] = {0};
    size_t got = 0;
    bool locked;
    dcp_stat s;
    dcp_file *other;
    switch (op) {
    case DCP_OP_OPEN: return st->ops->open(st, "f", DCP_OPEN_READ, &other, err);
    case DCP_OP_READ: return st->ops->read_at(f, bytes, 8, 3, &got, err);
    case DCP_OP_WRITE: return st->ops->write_at(f, bytes, 8, 3, err);
    case DCP_OP_SYNC: return st->ops->sync(f, err);
    case DCP_OP_STAT: return st->ops->stat(st, "f", &s, err);
    case DCP_OP_LIST: return st->ops->list(st, "f", ignore, NULL, err);
    case DCP_OP_RENAME: return st->ops->rename(st, "f", "g", err);
    case DCP_OP_REMOVE: return st->ops->remove(st, "f", err);
    case DCP_OP_MAKE_DIR: return st->ops->make_dir(st, "f", err);
    case DCP_OP_LOCK: return st->ops->lock(f, &locked, err);
    default: fail(); return DCP_OK;
    }
}

static void fault__fails_what_it_is_told_to(void **state)
{
    (void)state;
    const dcp_storage_op ops[] = {DCP_OP_OPEN, DCP_OP_READ,   DCP_OP_WRITE,  DCP_OP_SYNC,     DCP_OP_STAT,
                                  DCP_OP_LIST, DCP_OP_RENAME, DCP_OP_REMOVE, DCP_OP_MAKE_DIR, DCP_OP_LOCK};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        dcp_storage *inner = memory(), *st;
        rule r = {.op = DCP_OP_COUNT, .code = DCP_NOSPACE, .sys_errno = ENOSPC};
        dcp_error err = DCP_ERROR_INIT;
        dcp_file *f;
        dcp_stat s;
        assert_int_equal(dcp_storage_fault(NULL, inner, refuse, &r, &st, NULL), DCP_OK);
        assert_int_equal(st->ops->open(st, "f", DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
        r.op = ops[i];
        assert_int_equal(call(st, ops[i], f, &err), DCP_NOSPACE);
        assert_int_equal(err.code, DCP_NOSPACE);
        assert_int_equal(err.sys_errno, ENOSPC);
        assert_non_null(strstr(err.message, "f"));
        assert_int_equal(r.asked, 1);
        assert_string_equal(r.name, "f");
        bool has_range = ops[i] == DCP_OP_READ || ops[i] == DCP_OP_WRITE;
        assert_int_equal(r.n, has_range ? 8 : 0);
        assert_int_equal(r.offset, has_range ? 3 : 0);
        /* Nothing got through. */
        r.op = DCP_OP_COUNT;
        assert_int_equal(st->ops->stat(st, "f", &s, NULL), DCP_OK);
        assert_int_equal(s.bytes, 0);
        assert_int_equal(st->ops->close(f, NULL), DCP_OK);
        dcp_storage_free(st);
        dcp_storage_free(inner);
    }
}

static void fault__of_close_closes_all_the_same(void **state)
{
    (void)state;
    failing_alloc fa;
    dcp_context *ctx = failing_alloc_context(&fa, 1);
    dcp_storage *inner, *st;
    rule r = {.op = DCP_OP_CLOSE, .code = DCP_IO, .sys_errno = EIO};
    dcp_file *f;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_storage_memory(ctx, &inner, NULL), DCP_OK);
    assert_int_equal(dcp_storage_fault(ctx, inner, refuse, &r, &st, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "f", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->close(f, &err), DCP_IO);
    assert_int_equal(err.sys_errno, EIO);
    dcp_storage_free(st);
    dcp_storage_free(inner);
    assert_int_equal(fa.live, 1);
    dcp_context_free(ctx);
}

/* ---- what a shim may not hide ---- */

static void shim__has_what_the_inner_storage_has(void **state)
{
    (void)state;
    dcp_storage *inner = memory(), *st;
    dcp_storage_ops bare = *inner->ops;
    dcp_storage_counts counts = {0};
    const dcp_storage_ops *full = inner->ops;
    bare.rename = NULL;
    bare.make_dir = NULL;
    bare.sync_dir = NULL;
    bare.lock = NULL;
    bare.caps = 0;
    inner->ops = &bare;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(i ? dcp_storage_count(NULL, inner, &counts, &st, NULL)
                           : dcp_storage_fault(NULL, inner, refuse, &counts, &st, NULL),
                         DCP_OK);
        assert_int_equal(st->ops->caps, 0);
        assert_true(!st->ops->rename && !st->ops->make_dir && !st->ops->sync_dir && !st->ops->lock);
        dcp_storage_free(st);
    }
    inner->ops = full;
    dcp_storage_free(inner);
}

static void shim__of_a_broken_table_is_refused(void **state)
{
    (void)state;
    dcp_storage *inner = memory(), *st = NULL;
    dcp_storage_ops broken = *inner->ops;
    dcp_storage_counts counts = {0};
    dcp_storage bad = {&broken};
    broken.abi_version++;
    assert_int_equal(dcp_storage_count(NULL, &bad, &counts, &st, NULL), DCP_ARG);
    broken = *inner->ops;
    broken.struct_size--;
    assert_int_equal(dcp_storage_count(NULL, &bad, &counts, &st, NULL), DCP_ARG);
    broken = *inner->ops;
    broken.read_at = NULL;
    assert_int_equal(dcp_storage_count(NULL, &bad, &counts, &st, NULL), DCP_ARG);
    assert_int_equal(dcp_storage_fault(NULL, NULL, refuse, NULL, &st, NULL), DCP_ARG);
    assert_int_equal(dcp_storage_fault(NULL, inner, NULL, NULL, &st, NULL), DCP_ARG);
    assert_null(st);
    dcp_storage_free(inner);
}

/* ---- memory ---- */

static void memory__implied_directories_come_and_go(void **state)
{
    (void)state;
    dcp_storage *st = memory();
    dcp_file *f;
    dcp_stat s;
    assert_int_equal(st->ops->open(st, "a/b/c", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->close(f, NULL), DCP_OK);
    assert_int_equal(st->ops->stat(st, "a/b", &s, NULL), DCP_OK);
    assert_int_equal(s.type, DCP_ENTRY_DIR);
    assert_int_equal(st->ops->stat(st, "a/bb", &s, NULL), DCP_NOT_FOUND);
    assert_int_equal(st->ops->remove(st, "a/b/c", NULL), DCP_OK);
    assert_int_equal(st->ops->stat(st, "a", &s, NULL), DCP_NOT_FOUND);
    dcp_storage_free(st);
}

static void memory__odd_names_are_refused(void **state)
{
    (void)state;
    dcp_storage *st = memory();
    dcp_stat s;
    const char *const names[] = {"/a", "a/", "a//b", ".", "a/.", "..", "a/../b"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_int_equal(st->ops->stat(st, names[i], &s, NULL), DCP_ARG);
        assert_int_equal(st->ops->make_dir(st, names[i], NULL), DCP_ARG);
        assert_int_equal(st->ops->rename(st, "x", names[i], NULL), DCP_ARG);
        assert_int_equal(st->ops->remove(st, names[i], NULL), DCP_ARG);
    }
    dcp_storage_free(st);
}

static void memory__removed_file_lives_while_open(void **state)
{
    (void)state;
    dcp_storage *st = memory();
    dcp_file *f, *other;
    bool locked;
    char bytes[3];
    size_t got;
    const unsigned flags = DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE;
    assert_int_equal(st->ops->open(st, "f", flags, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->write_at(f, "abc", 3, 0, NULL), DCP_OK);
    assert_int_equal(st->ops->lock(f, &locked, NULL), DCP_OK);
    assert_int_equal(st->ops->remove(st, "f", NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "f", flags, &other, NULL), DCP_OK); /* another file of that name */
    assert_int_equal(st->ops->lock(other, &locked, NULL), DCP_OK);
    assert_true(locked);
    assert_int_equal(st->ops->read_at(f, bytes, 3, 0, &got, NULL), DCP_OK);
    assert_int_equal(got, 3);
    assert_memory_equal(bytes, "abc", 3);
    st->ops->close(f, NULL);
    st->ops->close(other, NULL);
    dcp_storage_free(st);
}

/* ---- out of memory ---- */

static dcp_status use(dcp_storage *st, dcp_error *err)
{
    dcp_file *f;
    dcp_status status = st->ops->make_dir(st, "d/e", err);
    for (int i = 0; i < 20 && status == DCP_OK; i++) {
        char name[16];
        snprintf(name, sizeof name, "d/%d", i);
        status = st->ops->open(st, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, err);
        if (status == DCP_OK) {
            status = st->ops->write_at(f, "0123456789", 10, (uint64_t)i * 100, err);
            st->ops->close(f, NULL);
        }
    }
    status = status == DCP_OK ? st->ops->rename(st, "d/1", "d/x", err) : status;
    return status == DCP_OK ? st->ops->list(st, "d", ignore, NULL, err) : status;
}

static dcp_status use_all(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_storage *inner = NULL, *count = NULL, *fault = NULL;
    dcp_storage_counts counts = {0};
    dcp_status status = dcp_storage_memory(ctx, &inner, err);
    status = status == DCP_OK ? dcp_storage_count(ctx, inner, &counts, &count, err) : status;
    status = status == DCP_OK ? dcp_storage_fault(ctx, count, refuse, user, &fault, err) : status;
    status = status == DCP_OK ? use(fault, err) : status;
    dcp_storage_free(fault);
    dcp_storage_free(count);
    dcp_storage_free(inner);
    return status;
}

static void memory_and_shims__survive_failing_allocations(void **state)
{
    (void)state;
    rule r = {.op = DCP_OP_COUNT};
    assert_true(failing_alloc_walk(use_all, &r) > 60);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(count__counts_calls_and_bytes),
        cmocka_unit_test(fault__fails_what_it_is_told_to),
        cmocka_unit_test(fault__of_close_closes_all_the_same),
        cmocka_unit_test(shim__has_what_the_inner_storage_has),
        cmocka_unit_test(shim__of_a_broken_table_is_refused),
        cmocka_unit_test(memory__implied_directories_come_and_go),
        cmocka_unit_test(memory__odd_names_are_refused),
        cmocka_unit_test(memory__removed_file_lives_while_open),
        cmocka_unit_test(memory_and_shims__survive_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
