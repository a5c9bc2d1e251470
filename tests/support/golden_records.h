/*
 * Walks over every torch.save archive in the golden checkpoints: the records of all .distcp files (compressed ones decompressed)
 * and the torch.save files. A reader of its own, as simple as can be, so that writers are not tested against our readers.
 */
#ifndef TESTS_SUPPORT_GOLDEN_RECORDS_H
#define TESTS_SUPPORT_GOLDEN_RECORDS_H

#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <zstd.h>

#include "base/bytes.h"

#define GOLDEN_MAX_STORAGES 32

typedef struct golden_archive {
    const char *path;
    const uint8_t *bytes; /* all of it */
    size_t len;
    char prefix[64];
    bool is_old_form;
    const uint8_t *pickle;
    size_t pickle_len;
    size_t n;
    const uint8_t *storages[GOLDEN_MAX_STORAGES];
    uint64_t storage_bytes[GOLDEN_MAX_STORAGES];
    uint32_t crcs[GOLDEN_MAX_STORAGES];
} golden_archive;

static inline uint8_t *golden_read_file(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long size = ftell(f);
    assert_true(size >= 0);
    rewind(f);
    uint8_t *bytes = malloc((size_t)size + 1);
    assert_non_null(bytes);
    *len = fread(bytes, 1, (size_t)size, f);
    assert_int_equal(*len, size);
    fclose(f);
    return bytes;
}

/* Several frames back to back give their contents back to back. */
static inline uint8_t *golden_decompress(uint8_t *bytes, size_t *len)
{
    size_t cap = 64u << 20;
    ZSTD_outBuffer out = {malloc(cap), cap, 0};
    ZSTD_inBuffer in = {bytes, *len, 0};
    ZSTD_DStream *z = ZSTD_createDStream();
    while (in.pos < in.size) {
        assert_false(ZSTD_isError(ZSTD_decompressStream(z, &out, &in)));
        assert_true(out.pos < out.size);
    }
    ZSTD_freeDStream(z);
    free(bytes);
    *len = out.pos;
    return out.dst;
}

/* Length of the archive at bytes: up to its end record, which must point back to its directory. */
static inline size_t golden_archive_length(const uint8_t *bytes, size_t len)
{
    for (size_t at = 76; at + 22 <= len; at++) {
        if (memcmp(bytes + at, "PK\5\6", 4) == 0 && memcmp(bytes + at - 20, "PK\6\7", 4) == 0 &&
            dcp__load64(bytes + at - 12) == at - 76 && memcmp(bytes + at - 76, "PK\6\6", 4) == 0) {
            return at + 22;
        }
    }
    fail_msg("no end record");
    return 0;
}

static inline void golden_member(golden_archive *a, const char *name, size_t name_len, const uint8_t *data, size_t size,
                                 uint32_t crc)
{
    if (name_len == 8 && memcmp(name, "data.pkl", 8) == 0) {
        a->pickle = data;
        a->pickle_len = size;
    } else if (name_len == 15 && memcmp(name, ".format_version", 15) == 0) {
        a->is_old_form = false;
    } else if (name_len > 5 && memcmp(name, "data/", 5) == 0) {
        size_t i = strtoul(name + 5, NULL, 10); /* the name ends where the next signature starts */
        assert_true(i < GOLDEN_MAX_STORAGES);
        a->storages[i] = data;
        a->storage_bytes[i] = size;
        a->crcs[i] = crc;
        a->n = i + 1 > a->n ? i + 1 : a->n;
    }
}

static inline golden_archive golden_parse(const char *path, const uint8_t *bytes, size_t len)
{
    golden_archive a = {.path = path, .bytes = bytes, .len = len, .is_old_form = true};
    size_t at = dcp__load32(bytes + len - 6), end = len - 98;
    while (at < end) {
        const char *name = (const char *)bytes + at + 46, *slash = memchr(name, '/', 60);
        size_t name_len = dcp__load16(bytes + at + 28), header = dcp__load32(bytes + at + 42);
        assert_non_null(slash);
        size_t prefix = (size_t)(slash - name);
        memcpy(a.prefix, name, prefix);
        size_t data = header + 30 + dcp__load16(bytes + header + 26) + dcp__load16(bytes + header + 28);
        golden_member(&a, slash + 1, name_len - prefix - 1, bytes + data, dcp__load32(bytes + at + 20),
                      dcp__load32(bytes + at + 16));
        at += 46 + name_len + dcp__load16(bytes + at + 30);
    }
    assert_non_null(a.pickle);
    return a;
}

typedef void (*golden_fn)(const golden_archive *a, void *user);

/* Calls fn for each archive of each file that matches; returns how many there were. */
static inline size_t golden_each(const char *pattern, golden_fn fn, void *user)
{
    size_t count = 0;
    glob_t files;
    assert_int_equal(glob(pattern, 0, NULL, &files), 0);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        size_t len, at = 0;
        uint8_t *bytes = golden_read_file(files.gl_pathv[i], &len);
        if (len >= 4 && memcmp(bytes, "\x28\xb5\x2f\xfd", 4) == 0) {
            bytes = golden_decompress(bytes, &len);
        }
        while (len - at >= 98 && memcmp(bytes + at, "PK\3\4", 4) == 0) {
            size_t record = golden_archive_length(bytes + at, len - at);
            golden_archive a = golden_parse(files.gl_pathv[i], bytes + at, record);
            fn(&a, user);
            at += record;
            count++;
        }
        free(bytes);
    }
    globfree(&files);
    return count;
}

#endif
