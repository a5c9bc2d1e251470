/* A directory of the file system copied into a storage in memory, where tests may damage it, and files in it as blocks of bytes.
 */
#ifndef TESTS_SUPPORT_MEMORY_COPY_H
#define TESTS_SUPPORT_MEMORY_COPY_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/backend.h"

typedef struct file_bytes {
    uint8_t *data;
    size_t n;
} file_bytes;

/* The whole of a file; free(data). */
static inline file_bytes get_file(dcp_storage *st, const char *name)
{
    dcp_stat s;
    dcp_file *f;
    file_bytes out;
    assert_int_equal(st->ops->stat(st, name, &s, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, name, DCP_OPEN_READ, &f, NULL), DCP_OK);
    out.data = malloc(s.bytes + 1);
    assert_non_null(out.data);
    assert_int_equal(st->ops->read_at(f, out.data, s.bytes, 0, &out.n, NULL), DCP_OK);
    assert_int_equal(out.n, s.bytes);
    assert_int_equal(st->ops->close(f, NULL), DCP_OK);
    return out;
}

/* Makes the file hold just these bytes. */
static inline void set_file(dcp_storage *st, const char *name, const void *data, size_t n)
{
    dcp_file *f;
    const unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE;
    assert_int_equal(st->ops->open(st, name, flags, &f, NULL), DCP_OK);
    assert_int_equal(st->ops->write_at(f, data, n, 0, NULL), DCP_OK);
    assert_int_equal(st->ops->close(f, NULL), DCP_OK);
}

static inline void flip_byte(dcp_storage *st, const char *name, uint64_t offset)
{
    file_bytes b = get_file(st, name);
    assert_true(offset < b.n);
    b.data[offset] ^= 0x5a;
    set_file(st, name, b.data, b.n);
    free(b.data);
}

static inline void cut_file(dcp_storage *st, const char *name, uint64_t bytes)
{
    file_bytes b = get_file(st, name);
    assert_true(bytes <= b.n);
    set_file(st, name, b.data, bytes);
    free(b.data);
}

typedef struct copy_target {
    dcp_storage *from, *to;
    const char *dir;
} copy_target;

static inline dcp_status copy_entry(void *user, const char *name, dcp_entry_type type)
{
    copy_target *t = (copy_target *)user;
    char path[512];
    if (type == DCP_ENTRY_FILE) {
        file_bytes b = get_file(t->from, name);
        snprintf(path, sizeof path, "%s%s%s", t->dir, *t->dir ? "/" : "", name);
        set_file(t->to, path, b.data, b.n);
        free(b.data);
    }
    return DCP_OK;
}

/* Copies the files of a directory below tests/ ("golden/2.13.0/sharded/ckpt") to dir of the storage. */
static inline void copy_directory(dcp_storage *to, const char *dir, const char *below_tests)
{
    char path[512];
    copy_target t = {NULL, to, dir};
    snprintf(path, sizeof path, "%s/%s", DCP_TEST_DIR, below_tests);
    assert_int_equal(dcp_storage_posix(NULL, path, &t.from, NULL), DCP_OK);
    assert_int_equal(t.from->ops->list(t.from, "", copy_entry, &t, NULL), DCP_OK);
    dcp_storage_free(t.from);
}

/* A new storage in memory with that copy in its root. */
static inline dcp_storage *memory_copy(const char *below_tests)
{
    dcp_storage *st = NULL;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    copy_directory(st, "", below_tests);
    return st;
}

#endif
