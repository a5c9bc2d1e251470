/* Makes zip archives for tests, with the knobs that formats.md 3.11 names, and remembers where everything is. */
#ifndef TESTS_SUPPORT_ZIP_BUILDER_H
#define TESTS_SUPPORT_ZIP_BUILDER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <zlib.h>

#include "base/bytes.h"

#define ZB_MAX_MEMBERS 40

typedef struct zb_member {
    const char *name; /* with the prefix */
    const void *data;
    size_t len;
    int is_deflated;
} zb_member;

typedef struct zb_opts {
    int with_zip64_end;   /* and locator, as PyTorch does */
    int with_local_sizes; /* else zeros and a descriptor */
    int without_crc;
    size_t trailing; /* bytes behind the end */
} zb_opts;

typedef struct zb_zip {
    uint8_t *bytes;
    size_t len, cap;
    size_t header[ZB_MAX_MEMBERS], data[ZB_MAX_MEMBERS], entry[ZB_MAX_MEMBERS];
    size_t directory, end64, locator, end;
} zb_zip;

static inline void zb_put(zb_zip *z, const void *bytes, size_t n)
{
    if (z->len + n > z->cap) {
        z->cap = (z->len + n) * 2;
        z->bytes = realloc(z->bytes, z->cap);
        assert_non_null(z->bytes);
    }
    if (n) {
        memcpy(z->bytes + z->len, bytes, n);
        z->len += n;
    }
}

static inline void zb_put_int(zb_zip *z, uint64_t v, size_t n)
{
    zb_put(z, &v, n);
}

static inline size_t zb_deflate(const void *data, size_t len, uint8_t *out, size_t cap)
{
    z_stream s = {0};
    assert_int_equal(deflateInit2(&s, 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY), Z_OK);
    s.next_in = (Bytef *)(uintptr_t)data;
    s.avail_in = (uInt)len;
    s.next_out = out;
    s.avail_out = (uInt)cap;
    assert_int_equal(deflate(&s, Z_FINISH), Z_STREAM_END);
    deflateEnd(&s);
    return s.total_out;
}

static inline zb_zip zb_build(const zb_member *members, size_t n, const zb_opts *opts)
{
    zb_zip z = {0};
    size_t stored[ZB_MAX_MEMBERS];
    uint32_t crcs[ZB_MAX_MEMBERS];
    assert_true(n <= ZB_MAX_MEMBERS);
    for (size_t i = 0; i < n; i++) {
        const zb_member *m = &members[i];
        uint8_t *packed = m->is_deflated ? malloc(m->len + 1024) : NULL;
        const void *data = packed ? packed : m->data;
        stored[i] = packed ? zb_deflate(m->data, m->len, packed, m->len + 1024) : m->len;
        crcs[i] = opts->without_crc || !m->len ? 0 : (uint32_t)crc32(0, m->data, (uInt)m->len);
        size_t name_len = strlen(m->name);
        int with_descriptor = !opts->with_local_sizes && m->len;
        z.header[i] = z.len;
        zb_put_int(&z, 0x04034b50, 4);
        zb_put_int(&z, 0, 2);
        zb_put_int(&z, with_descriptor ? 0x0808 : 0x0800, 2);
        zb_put_int(&z, m->is_deflated ? 8 : 0, 2);
        zb_put_int(&z, 0, 4);
        zb_put_int(&z, opts->with_local_sizes ? crcs[i] : 0, 4);
        zb_put_int(&z, opts->with_local_sizes ? stored[i] : 0, 4);
        zb_put_int(&z, opts->with_local_sizes ? m->len : 0, 4);
        zb_put_int(&z, name_len, 2);
        zb_put_int(&z, 5, 2); /* an extra field that the directory does not have */
        zb_put(&z, m->name, name_len);
        zb_put(&z, "FB\1\0Z", 5);
        z.data[i] = z.len;
        zb_put(&z, data, stored[i]);
        free(packed);
        if (with_descriptor) {
            zb_put_int(&z, 0x08074b50, 4);
            zb_put_int(&z, crcs[i], 4);
            zb_put_int(&z, stored[i], 4);
            zb_put_int(&z, m->len, 4);
        }
    }
    z.directory = z.len;
    for (size_t i = 0; i < n; i++) {
        const zb_member *m = &members[i];
        z.entry[i] = z.len;
        zb_put_int(&z, 0x02014b50, 4);
        zb_put_int(&z, 0, 4);
        zb_put_int(&z, 0x0800, 2);
        zb_put_int(&z, m->is_deflated ? 8 : 0, 2);
        zb_put_int(&z, 0, 4);
        zb_put_int(&z, crcs[i], 4);
        zb_put_int(&z, stored[i], 4);
        zb_put_int(&z, m->len, 4);
        zb_put_int(&z, strlen(m->name), 2);
        zb_put_int(&z, 0, 8);
        zb_put_int(&z, 0, 4);
        zb_put_int(&z, z.header[i], 4);
        zb_put(&z, m->name, strlen(m->name));
    }
    size_t directory_bytes = z.len - z.directory;
    if (opts->with_zip64_end) {
        z.end64 = z.len;
        zb_put_int(&z, 0x06064b50, 4);
        zb_put_int(&z, 44, 8);
        zb_put_int(&z, 0x002d031e, 4);
        zb_put_int(&z, 0, 8);
        zb_put_int(&z, n, 8);
        zb_put_int(&z, n, 8);
        zb_put_int(&z, directory_bytes, 8);
        zb_put_int(&z, z.directory, 8);
        z.locator = z.len;
        zb_put_int(&z, 0x07064b50, 4);
        zb_put_int(&z, 0, 4);
        zb_put_int(&z, z.end64, 8);
        zb_put_int(&z, 1, 4);
    }
    z.end = z.len;
    zb_put_int(&z, 0x06054b50, 4);
    zb_put_int(&z, 0, 4);
    zb_put_int(&z, n, 2);
    zb_put_int(&z, n, 2);
    zb_put_int(&z, directory_bytes, 4);
    zb_put_int(&z, z.directory, 4);
    zb_put_int(&z, 0, 2);
    for (size_t i = 0; i < opts->trailing; i++) {
        zb_put(&z, "T", 1);
    }
    return z;
}

#endif
