/* What every storage must do. Each test runs on each implementation and shim; to check another one, add it to `subjects`. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/pool.h"
#include "dcp/backend.h"
#include "support/temp_dir.h"

dcp_status template_storage_create(dcp_storage *inner, dcp_storage **out, dcp_error *err);

#define READ DCP_OPEN_READ
#define WRITE DCP_OPEN_WRITE
#define MAKE (DCP_OPEN_WRITE | DCP_OPEN_CREATE)
#define LENGTH(a) (sizeof(a) / sizeof(a)[0])

/* A storage under test with an empty root. */
typedef struct subject {
    temp_dir dir;
    bool has_dir;
    dcp_storage *inner; /* below a shim */
    dcp_storage_counts counts;
    dcp_storage *st;
} subject;

static void make_posix(subject *s)
{
    s->has_dir = temp_dir_make(&s->dir);
    assert_true(s->has_dir);
    assert_int_equal(dcp_storage_posix(NULL, s->dir.path, &s->st, NULL), DCP_OK);
}

static void make_memory(subject *s)
{
    assert_int_equal(dcp_storage_memory(NULL, &s->st, NULL), DCP_OK);
}

static void make_count(subject *s)
{
    make_posix(s);
    s->inner = s->st;
    assert_int_equal(dcp_storage_count(NULL, s->inner, &s->counts, &s->st, NULL), DCP_OK);
}

static dcp_status never(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)user, (void)op, (void)name, (void)n, (void)offset, (void)err;
    return DCP_OK;
}

static void make_fault_over_memory(subject *s)
{
    make_memory(s);
    s->inner = s->st;
    assert_int_equal(dcp_storage_fault(NULL, s->inner, never, NULL, &s->st, NULL), DCP_OK);
}

static void make_template(subject *s)
{
    make_posix(s);
    s->inner = s->st;
    assert_int_equal(template_storage_create(s->inner, &s->st, NULL), DCP_OK);
}

static const struct {
    const char *name;
    void (*make)(subject *s);
} subjects[] = {
    {"posix", make_posix},       {"memory", make_memory}, {"count", make_count}, {"fault", make_fault_over_memory},
    {"template", make_template},
};

static int set_up(void **state)
{
    subject *s = calloc(1, sizeof *s);
    assert_non_null(s);
    subjects[(uintptr_t)*state].make(s);
    *state = s;
    return 0;
}

static int tear_down(void **state)
{
    subject *s = *state;
    dcp_storage_free(s->st);
    dcp_storage_free(s->inner);
    if (s->has_dir) {
        temp_dir_remove(&s->dir);
    }
    free(s);
    return 0;
}

static dcp_storage *storage_of(void **state)
{
    return ((subject *)*state)->st;
}

/* ---- helpers: each asserts success ---- */

static dcp_file *open_ok(dcp_storage *st, const char *name, unsigned flags)
{
    dcp_file *f = NULL;
    dcp_error err = DCP_ERROR_INIT;
    if (st->ops->open(st, name, flags, &f, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_ptr_equal(f->storage, st);
    return f;
}

static void close_ok(dcp_file *f)
{
    assert_int_equal(f->storage->ops->close(f, NULL), DCP_OK);
}

static void write_ok(dcp_file *f, const void *bytes, size_t n, uint64_t offset)
{
    assert_int_equal(f->storage->ops->write_at(f, bytes, n, offset, NULL), DCP_OK);
}

static size_t read_ok(dcp_file *f, void *bytes, size_t n, uint64_t offset)
{
    size_t got = SIZE_MAX;
    assert_int_equal(f->storage->ops->read_at(f, bytes, n, offset, &got, NULL), DCP_OK);
    assert_true(got <= n);
    return got;
}

static void put_file(dcp_storage *st, const char *name, const char *text)
{
    dcp_file *f = open_ok(st, name, MAKE | DCP_OPEN_TRUNCATE);
    write_ok(f, text, strlen(text), 0);
    close_ok(f);
}

static void assert_file(dcp_storage *st, const char *name, const char *text)
{
    char bytes[256] = {0};
    dcp_file *f = open_ok(st, name, READ);
    assert_int_equal(read_ok(f, bytes, sizeof bytes - 1, 0), strlen(text));
    assert_string_equal(bytes, text);
    close_ok(f);
}

/* Fails with that code, says so in err, names the file, and leaves *out alone. */
static void assert_open_fails(dcp_storage *st, const char *name, unsigned flags, dcp_status code, int sys_errno)
{
    dcp_file *untouched = (dcp_file *)(void *)st, *f = untouched;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(st->ops->open(st, name, flags, &f, &err), code);
    assert_int_equal(err.code, code);
    assert_int_equal(err.sys_errno, sys_errno);
    assert_non_null(strstr(err.message, *name ? name : "root"));
    assert_ptr_equal(f, untouched);
    assert_int_equal(st->ops->open(st, name, flags, &f, NULL), code); /* err may be NULL */
}

static void make_dir_ok(dcp_storage *st, const char *name)
{
    if (st->ops->make_dir) {
        assert_int_equal(st->ops->make_dir(st, name, NULL), DCP_OK);
    }
}

static dcp_status stat_of(dcp_storage *st, const char *name, dcp_stat *out)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = st->ops->stat(st, name, out, &err);
    assert_int_equal(err.code, status);
    return status;
}

typedef struct listing {
    size_t n;
    char names[64][64];
    dcp_entry_type types[64];
    size_t stop_at;
} listing;

static dcp_status note(void *user, const char *name, dcp_entry_type type)
{
    listing *l = user;
    assert_true(l->n < LENGTH(l->names));
    snprintf(l->names[l->n], sizeof l->names[0], "%s", name);
    l->types[l->n++] = type;
    return l->stop_at && l->n == l->stop_at ? DCP_CANCELED : DCP_OK;
}

static size_t listed(const listing *l, const char *name, dcp_entry_type type)
{
    size_t found = 0;
    for (size_t i = 0; i < l->n; i++) {
        found += strcmp(l->names[i], name) == 0 && l->types[i] == type;
    }
    return found;
}

/* ---- the table itself ---- */

static void table__is_complete_and_of_this_version(void **state)
{
    const dcp_storage_ops *ops = storage_of(state)->ops;
    assert_true(ops->struct_size >= sizeof *ops);
    assert_int_equal(ops->abi_version, DCP_STORAGE_ABI);
    assert_true(ops->name && *ops->name);
    assert_true(ops->open && ops->read_at && ops->write_at && ops->sync && ops->close && ops->stat && ops->list && ops->remove &&
                ops->free);
    assert_true(!(ops->caps & DCP_STORAGE_RENAME) || ops->rename);
}

/* ---- reading and writing ---- */

static void read_at__gives_what_was_written(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "a file", "hello");
    assert_file(st, "a file", "hello");
}

static void read_at__is_short_only_at_the_end(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "0123456789");
    dcp_file *f = open_ok(st, "f", READ);
    char bytes[16] = {0};
    assert_int_equal(read_ok(f, bytes, 4, 3), 4);
    assert_memory_equal(bytes, "3456", 4);
    assert_int_equal(read_ok(f, bytes, 16, 8), 2);
    assert_memory_equal(bytes, "89", 2);
    assert_int_equal(read_ok(f, bytes, 16, 10), 0);
    assert_int_equal(read_ok(f, bytes, 16, (uint64_t)1 << 40), 0);
    assert_int_equal(read_ok(f, bytes, 0, 3), 0);
    close_ok(f);
}

static void io__beyond_any_file_is_refused(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_file *f = open_ok(st, "f", MAKE | READ);
    char byte = 1;
    size_t got = 77;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(st->ops->read_at(f, &byte, 1, UINT64_MAX, &got, &err), DCP_ARG);
    assert_int_equal(got, 77);
    assert_int_equal(st->ops->write_at(f, &byte, 1, INT64_MAX, &err), DCP_ARG);
    close_ok(f);
    assert_file(st, "f", "");
}

static void write_at__leaves_zeros_in_holes(void **state)
{
    dcp_storage *st = storage_of(state);
    if (!(st->ops->caps & DCP_STORAGE_RANDOM_WRITE)) {
        skip();
    }
    dcp_file *f = open_ok(st, "f", MAKE | READ);
    char bytes[8];
    write_ok(f, "zz", 2, 6);
    write_ok(f, "a", 1, 0);
    write_ok(f, "", 0, 100); /* nothing written, nothing longer */
    assert_int_equal(read_ok(f, bytes, sizeof bytes, 0), 8);
    assert_memory_equal(bytes, "a\0\0\0\0\0zz", 8);
    close_ok(f);
}

static void write_at__overwrites_in_place(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "abcdef");
    dcp_file *f = open_ok(st, "f", WRITE);
    write_ok(f, "XY", 2, 2);
    close_ok(f);
    assert_file(st, "f", "abXYef");
}

/* The byte at position i of the big file. */
static uint8_t big_byte(size_t i)
{
    return (uint8_t)(i * 2654435761u >> 13);
}

enum { BIG_PART = 65536 + 17, BIG_PARTS = 24 };

static dcp_status write_part(void *arg, size_t i, int worker, dcp_error *err)
{
    dcp_file *f = arg;
    uint8_t *part = malloc(BIG_PART);
    (void)worker;
    for (size_t k = 0; k < BIG_PART; k++) {
        part[k] = big_byte(i * BIG_PART + k);
    }
    dcp_status status = f->storage->ops->write_at(f, part, BIG_PART, i * BIG_PART, err);
    free(part);
    return status;
}

static dcp_status read_part(void *arg, size_t i, int worker, dcp_error *err)
{
    dcp_file *f = arg;
    uint8_t *part = malloc(BIG_PART);
    size_t got = 0, wrong = 0;
    (void)worker;
    dcp_status status = f->storage->ops->read_at(f, part, BIG_PART, i * BIG_PART, &got, err);
    for (size_t k = 0; k < got; k++) {
        wrong += part[k] != big_byte(i * BIG_PART + k);
    }
    free(part);
    return status == DCP_OK && (wrong || got != BIG_PART) ? DCP_INTERNAL : status;
}

static void io__of_disjoint_ranges_from_many_threads(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_file *f = open_ok(st, "big", MAKE | READ);
    assert_int_equal(dcp__parallel(BIG_PARTS, 4, write_part, f, NULL), DCP_OK);
    assert_int_equal(dcp__parallel(BIG_PARTS, 4, read_part, f, NULL), DCP_OK);
    close_ok(f);
    dcp_stat s;
    assert_int_equal(stat_of(st, "big", &s), DCP_OK);
    assert_int_equal(s.bytes, (size_t)BIG_PART * BIG_PARTS);
}

static void io__against_the_way_it_was_opened_fails(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "abc");
    char byte = 'x';
    size_t got = 77;
    dcp_error err = DCP_ERROR_INIT;
    dcp_file *f = open_ok(st, "f", READ);
    assert_int_equal(st->ops->write_at(f, &byte, 1, 0, &err), DCP_IO);
    assert_int_equal(err.code, DCP_IO);
    close_ok(f);
    f = open_ok(st, "f", WRITE);
    assert_int_equal(st->ops->read_at(f, &byte, 1, 0, &got, &err), DCP_IO);
    assert_int_equal(got, 77);
    close_ok(f);
    assert_file(st, "f", "abc");
}

static void sync__succeeds_or_says_unsupported(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_file *f = open_ok(st, "f", MAKE);
    write_ok(f, "x", 1, 0);
    dcp_status expected = st->ops->caps & DCP_STORAGE_DURABLE ? DCP_OK : DCP_UNSUPPORTED;
    assert_int_equal(st->ops->sync(f, NULL), expected);
    close_ok(f);
    if (st->ops->sync_dir) {
        assert_int_equal(st->ops->sync_dir(st, "", NULL), expected);
        assert_int_equal(st->ops->sync_dir(st, "absent", NULL), DCP_NOT_FOUND);
    }
}

static void space__is_told_for_directories(void **state)
{
    dcp_storage *st = storage_of(state);
    uint64_t bytes = 0;
    if (!st->ops->space) {
        return;
    }
    assert_int_equal(st->ops->space(st, "", &bytes, NULL), DCP_OK);
    assert_true(bytes > 0);
    assert_int_equal(st->ops->space(st, "absent", &bytes, NULL), DCP_NOT_FOUND);
}

/* ---- opening ---- */

static void open__absent_file_is_not_found(void **state)
{
    assert_open_fails(storage_of(state), "absent", READ, DCP_NOT_FOUND, ENOENT);
    assert_open_fails(storage_of(state), "absent", WRITE, DCP_NOT_FOUND, ENOENT);
}

static void open__create_keeps_what_is_there(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "abc");
    close_ok(open_ok(st, "f", MAKE));
    assert_file(st, "f", "abc");
}

static void open__truncate_empties(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "abc");
    close_ok(open_ok(st, "f", WRITE | DCP_OPEN_TRUNCATE));
    assert_file(st, "f", "");
}

static void open__exclusive_refuses_what_is_there(void **state)
{
    dcp_storage *st = storage_of(state);
    close_ok(open_ok(st, "f", MAKE | DCP_OPEN_EXCLUSIVE));
    assert_open_fails(st, "f", MAKE | DCP_OPEN_EXCLUSIVE, DCP_EXISTS, EEXIST);
}

static void open__directory_is_refused(void **state)
{
    dcp_storage *st = storage_of(state);
    make_dir_ok(st, "d");
    put_file(st, "d/f", "x");
    const unsigned flags[] = {READ, WRITE, READ | WRITE, MAKE, READ | DCP_OPEN_BENEATH};
    for (size_t i = 0; i < LENGTH(flags); i++) {
        assert_open_fails(st, "d", flags[i], DCP_IO, EISDIR);
        assert_open_fails(st, "", flags[i], DCP_IO, EISDIR);
    }
}

static void open__below_a_file_is_not_found(void **state)
{
    dcp_storage *st = storage_of(state);
    put_file(st, "f", "x");
    assert_open_fails(st, "f/g", READ, DCP_NOT_FOUND, ENOTDIR);
    assert_open_fails(st, "f/g", MAKE, DCP_NOT_FOUND, ENOTDIR);
}

static void open__senseless_flags_are_refused(void **state)
{
    dcp_storage *st = storage_of(state);
    const unsigned flags[] = {
        0, DCP_OPEN_CREATE, READ | DCP_OPEN_CREATE, READ | DCP_OPEN_TRUNCATE, WRITE | DCP_OPEN_EXCLUSIVE, READ | 0x8000};
    put_file(st, "f", "abc");
    for (size_t i = 0; i < LENGTH(flags); i++) {
        assert_open_fails(st, "f", flags[i], DCP_ARG, 0);
    }
    assert_file(st, "f", "abc");
}

static void open__beneath_refuses_names_that_lead_out(void **state)
{
    dcp_storage *st = storage_of(state);
    make_dir_ok(st, "d");
    const char *const names[] = {"../x", "..", "/etc/passwd", "d/../../x", "./../x"};
    for (size_t i = 0; i < LENGTH(names); i++) {
        assert_open_fails(st, names[i], READ | DCP_OPEN_BENEATH, DCP_ARG, 0);
        assert_open_fails(st, names[i], MAKE | DCP_OPEN_BENEATH, DCP_ARG, 0);
    }
    put_file(st, "d/..f", "dots in a name are fine");
    dcp_file *f = open_ok(st, "d/..f", READ | DCP_OPEN_BENEATH);
    close_ok(f);
}

static void open__direct_reads_the_same_or_is_unsupported(void **state)
{
    dcp_storage *st = storage_of(state);
    enum { BYTES = 3 * 4096 + 100 };
    uint8_t *bytes = aligned_alloc(4096, 4 * 4096);
    assert_non_null(bytes);
    dcp_file *f = open_ok(st, "f", MAKE);
    for (size_t i = 0; i < BYTES; i++) {
        bytes[i] = big_byte(i);
    }
    write_ok(f, bytes, BYTES, 0);
    close_ok(f);
    dcp_status status = st->ops->open(st, "f", READ | DCP_OPEN_DIRECT, &f, NULL);
    if (status == DCP_OK) {
        memset(bytes, 0, 4 * 4096);
        assert_int_equal(read_ok(f, bytes, 4 * 4096, 0), BYTES);
        for (size_t i = 0; i < BYTES; i++) {
            assert_int_equal(bytes[i], big_byte(i));
        }
        close_ok(f);
    } else {
        assert_int_equal(status, DCP_UNSUPPORTED);
        /* A refused wish leaves nothing behind that would make the second try fail. */
        assert_open_fails(st, "g", MAKE | DCP_OPEN_EXCLUSIVE | DCP_OPEN_DIRECT, DCP_UNSUPPORTED, 0);
        close_ok(open_ok(st, "g", MAKE | DCP_OPEN_EXCLUSIVE));
    }
    free(bytes);
}

/* ---- names ---- */

static void stat__tells_type_and_size(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_stat s;
    make_dir_ok(st, "d");
    put_file(st, "d/f", "12345");
    assert_int_equal(stat_of(st, "d/f", &s), DCP_OK);
    assert_int_equal(s.type, DCP_ENTRY_FILE);
    assert_int_equal(s.bytes, 5);
    assert_int_equal(stat_of(st, "d", &s), DCP_OK);
    assert_int_equal(s.type, DCP_ENTRY_DIR);
    assert_int_equal(stat_of(st, "", &s), DCP_OK);
    assert_int_equal(s.type, DCP_ENTRY_DIR);
    s.bytes = 99;
    assert_int_equal(stat_of(st, "d/g", &s), DCP_NOT_FOUND);
    assert_int_equal(stat_of(st, "d/f/g", &s), DCP_NOT_FOUND);
    assert_int_equal(s.bytes, 99);
}

static void list__gives_each_entry_once(void **state)
{
    dcp_storage *st = storage_of(state);
    listing l = {0};
    make_dir_ok(st, "d/e");
    make_dir_ok(st, "d/empty");
    put_file(st, "a", "");
    put_file(st, "d-f", ""); /* sorts between d and d/e */
    put_file(st, "d/f", "");
    put_file(st, "d/e/f", "");
    put_file(st, "d/e/g", "");
    assert_int_equal(st->ops->list(st, "", note, &l, NULL), DCP_OK);
    assert_int_equal(l.n, 3);
    assert_int_equal(listed(&l, "a", DCP_ENTRY_FILE), 1);
    assert_int_equal(listed(&l, "d-f", DCP_ENTRY_FILE), 1);
    assert_int_equal(listed(&l, "d", DCP_ENTRY_DIR), 1);
    l = (listing){0};
    assert_int_equal(st->ops->list(st, "d", note, &l, NULL), DCP_OK);
    assert_int_equal(l.n, st->ops->make_dir ? 3 : 2);
    assert_int_equal(listed(&l, "f", DCP_ENTRY_FILE), 1);
    assert_int_equal(listed(&l, "e", DCP_ENTRY_DIR), 1);
}

static void list__stops_when_told(void **state)
{
    dcp_storage *st = storage_of(state);
    listing l = {.stop_at = 2};
    put_file(st, "a", "");
    put_file(st, "b", "");
    put_file(st, "c", "");
    assert_int_equal(st->ops->list(st, "", note, &l, NULL), DCP_CANCELED);
    assert_int_equal(l.n, 2);
}

static dcp_status remove_it(void *user, const char *name, dcp_entry_type type)
{
    dcp_storage *st = user;
    (void)type;
    return st->ops->remove(st, name, NULL);
}

static void list__may_call_the_storage(void **state)
{
    dcp_storage *st = storage_of(state);
    listing l = {0};
    put_file(st, "a", "");
    put_file(st, "b", "");
    assert_int_equal(st->ops->list(st, "", remove_it, st, NULL), DCP_OK);
    assert_int_equal(st->ops->list(st, "", note, &l, NULL), DCP_OK);
    assert_int_equal(l.n, 0);
}

static void list__of_what_is_no_directory_is_not_found(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_error err = DCP_ERROR_INIT;
    put_file(st, "f", "");
    assert_int_equal(st->ops->list(st, "absent", note, NULL, &err), DCP_NOT_FOUND);
    assert_int_equal(err.code, DCP_NOT_FOUND);
    assert_int_equal(st->ops->list(st, "f", note, NULL, NULL), DCP_NOT_FOUND);
}

static void rename__replaces(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_stat s;
    if (!(st->ops->caps & DCP_STORAGE_RENAME)) {
        skip();
    }
    put_file(st, "new", "new");
    put_file(st, "old", "old");
    dcp_file *f = open_ok(st, "old", READ);
    assert_int_equal(st->ops->rename(st, "new", "old", NULL), DCP_OK);
    assert_file(st, "old", "new");
    assert_int_equal(stat_of(st, "new", &s), DCP_NOT_FOUND);
    char bytes[3];
    assert_int_equal(read_ok(f, bytes, 3, 0), 3); /* who had it open keeps the old one */
    assert_memory_equal(bytes, "old", 3);
    close_ok(f);
    assert_int_equal(st->ops->rename(st, "old", "third", NULL), DCP_OK);
    assert_file(st, "third", "new");
}

static void rename__of_an_absent_file_is_not_found(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_error err = DCP_ERROR_INIT;
    if (!(st->ops->caps & DCP_STORAGE_RENAME)) {
        skip();
    }
    put_file(st, "f", "kept");
    assert_int_equal(st->ops->rename(st, "absent", "f", &err), DCP_NOT_FOUND);
    assert_int_equal(err.code, DCP_NOT_FOUND);
    assert_file(st, "f", "kept");
}

static void rename__onto_a_directory_fails(void **state)
{
    dcp_storage *st = storage_of(state);
    if (!(st->ops->caps & DCP_STORAGE_RENAME)) {
        skip();
    }
    make_dir_ok(st, "d");
    put_file(st, "d/f", "x");
    put_file(st, "f", "kept");
    assert_int_equal(st->ops->rename(st, "f", "d", NULL), DCP_IO);
    assert_file(st, "f", "kept");
}

static void remove__takes_files_and_empty_directories(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_stat s;
    make_dir_ok(st, "d");
    put_file(st, "d/f", "x");
    assert_int_equal(st->ops->remove(st, "d", NULL), DCP_IO);
    assert_file(st, "d/f", "x");
    assert_int_equal(st->ops->remove(st, "d/f", NULL), DCP_OK);
    assert_int_equal(stat_of(st, "d/f", &s), DCP_NOT_FOUND);
    if (st->ops->make_dir) {
        assert_int_equal(st->ops->remove(st, "d", NULL), DCP_OK);
    }
    assert_int_equal(stat_of(st, "d", &s), DCP_NOT_FOUND);
}

static void remove__of_an_absent_file_is_not_found(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(st->ops->remove(st, "absent", &err), DCP_NOT_FOUND);
    assert_int_equal(err.code, DCP_NOT_FOUND);
}

static void remove__of_the_root_is_refused(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_stat s;
    assert_int_equal(st->ops->remove(st, "", NULL), DCP_ARG);
    assert_int_equal(stat_of(st, "", &s), DCP_OK);
}

static void make_dir__makes_parents_and_may_be_repeated(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_stat s;
    if (!st->ops->make_dir) {
        skip();
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(st->ops->make_dir(st, "a/b/c", NULL), DCP_OK);
        assert_int_equal(st->ops->make_dir(st, "", NULL), DCP_OK);
        assert_int_equal(stat_of(st, "a/b/c", &s), DCP_OK);
        assert_int_equal(s.type, DCP_ENTRY_DIR);
        assert_int_equal(stat_of(st, "a", &s), DCP_OK);
        assert_int_equal(s.type, DCP_ENTRY_DIR);
    }
}

static void make_dir__where_a_file_is_fails(void **state)
{
    dcp_storage *st = storage_of(state);
    dcp_error err = DCP_ERROR_INIT;
    if (!st->ops->make_dir) {
        skip();
    }
    put_file(st, "f", "kept");
    assert_int_equal(st->ops->make_dir(st, "f", &err), DCP_EXISTS);
    assert_int_equal(err.code, DCP_EXISTS);
    assert_int_equal(st->ops->make_dir(st, "f/g", NULL), DCP_EXISTS);
    assert_file(st, "f", "kept");
}

/* ---- locks ---- */

static void lock__excludes_a_second_holder_until_close(void **state)
{
    dcp_storage *st = storage_of(state);
    bool locked = false;
    if (!st->ops->lock) {
        skip();
    }
    put_file(st, "f", "x");
    dcp_file *first = open_ok(st, "f", READ | WRITE), *second = open_ok(st, "f", READ | WRITE);
    assert_int_equal(st->ops->lock(first, &locked, NULL), DCP_OK);
    assert_true(locked);
    assert_int_equal(st->ops->lock(second, &locked, NULL), DCP_OK);
    assert_false(locked);
    assert_int_equal(st->ops->lock(first, &locked, NULL), DCP_OK); /* its own lock does not exclude it */
    assert_true(locked);
    close_ok(first);
    assert_int_equal(st->ops->lock(second, &locked, NULL), DCP_OK);
    assert_true(locked);
    close_ok(second);
}

/* Whoever opens the name next has another file, or makes one: two would hold "the" lock. */
static void lock__of_a_file_without_its_name_is_refused(void **state)
{
    dcp_storage *st = storage_of(state);
    bool locked = true;
    if (!st->ops->lock) {
        skip();
    }
    put_file(st, "renamed", "x");
    dcp_file *f = open_ok(st, "renamed", READ | WRITE);
    assert_int_equal(st->ops->rename(st, "renamed", "other", NULL), DCP_OK);
    assert_int_equal(st->ops->lock(f, &locked, NULL), DCP_OK);
    assert_false(locked);
    put_file(st, "renamed", "y");
    locked = true;
    assert_int_equal(st->ops->lock(f, &locked, NULL), DCP_OK);
    assert_false(locked);
    dcp_file *named = open_ok(st, "renamed", READ | WRITE), *again = open_ok(st, "other", READ | WRITE);
    assert_int_equal(st->ops->lock(named, &locked, NULL), DCP_OK);
    assert_true(locked);
    assert_int_equal(st->ops->remove(st, "renamed", NULL), DCP_OK);
    assert_int_equal(st->ops->lock(again, &locked, NULL), DCP_OK); /* the refused one holds nothing */
    assert_true(locked);
    close_ok(f);
    close_ok(named);
    close_ok(again);
}

static void lock__of_one_file_leaves_others_free(void **state)
{
    dcp_storage *st = storage_of(state);
    bool locked = false;
    if (!st->ops->lock) {
        skip();
    }
    dcp_file *first = open_ok(st, "f", MAKE), *second = open_ok(st, "g", MAKE);
    assert_int_equal(st->ops->lock(first, &locked, NULL), DCP_OK);
    assert_true(locked);
    locked = false;
    assert_int_equal(st->ops->lock(second, &locked, NULL), DCP_OK);
    assert_true(locked);
    close_ok(first);
    close_ok(second);
}

/* ---- the run ---- */

#define CASE(function)                                                                                                           \
    {                                                                                                                            \
#function, function                                                                                                      \
    }

static const struct {
    const char *name;
    CMUnitTestFunction run;
} cases[] = {
    CASE(table__is_complete_and_of_this_version),
    CASE(read_at__gives_what_was_written),
    CASE(read_at__is_short_only_at_the_end),
    CASE(io__beyond_any_file_is_refused),
    CASE(write_at__leaves_zeros_in_holes),
    CASE(write_at__overwrites_in_place),
    CASE(io__of_disjoint_ranges_from_many_threads),
    CASE(io__against_the_way_it_was_opened_fails),
    CASE(sync__succeeds_or_says_unsupported),
    CASE(space__is_told_for_directories),
    CASE(open__absent_file_is_not_found),
    CASE(open__create_keeps_what_is_there),
    CASE(open__truncate_empties),
    CASE(open__exclusive_refuses_what_is_there),
    CASE(open__directory_is_refused),
    CASE(open__below_a_file_is_not_found),
    CASE(open__senseless_flags_are_refused),
    CASE(open__beneath_refuses_names_that_lead_out),
    CASE(open__direct_reads_the_same_or_is_unsupported),
    CASE(stat__tells_type_and_size),
    CASE(list__gives_each_entry_once),
    CASE(list__stops_when_told),
    CASE(list__may_call_the_storage),
    CASE(list__of_what_is_no_directory_is_not_found),
    CASE(rename__replaces),
    CASE(rename__of_an_absent_file_is_not_found),
    CASE(rename__onto_a_directory_fails),
    CASE(remove__takes_files_and_empty_directories),
    CASE(remove__of_an_absent_file_is_not_found),
    CASE(remove__of_the_root_is_refused),
    CASE(make_dir__makes_parents_and_may_be_repeated),
    CASE(make_dir__where_a_file_is_fails),
    CASE(lock__excludes_a_second_holder_until_close),
    CASE(lock__of_a_file_without_its_name_is_refused),
    CASE(lock__of_one_file_leaves_others_free),
};

int main(void)
{
    static struct CMUnitTest tests[LENGTH(subjects) * LENGTH(cases)];
    static char names[LENGTH(tests)][96];
    for (size_t i = 0; i < LENGTH(tests); i++) {
        size_t s = i / LENGTH(cases), c = i % LENGTH(cases);
        snprintf(names[i], sizeof names[i], "%s: %s", subjects[s].name, cases[c].name);
        tests[i] = (struct CMUnitTest){names[i], cases[c].run, set_up, tear_down, (void *)(uintptr_t)s};
    }
    return cmocka_run_group_tests_name("storage", tests, NULL, NULL);
}
