#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <zlib.h>

#include "base/hash.h"

/* Check value of the CRC catalogue, and values that every CRC-32 calculator gives. */
static void crc32__published_values(void **state)
{
    (void)state;
    static const char zeros[32];
    assert_int_equal(dcp__crc32(0, "123456789", 9), 0xcbf43926);
    assert_int_equal(dcp__crc32(0, "", 0), 0);
    assert_int_equal(dcp__crc32(0, "a", 1), 0xe8b7be43);
    assert_int_equal(dcp__crc32(0, "The quick brown fox jumps over the lazy dog", 43), 0x414fa339);
    assert_int_equal(dcp__crc32(0, zeros, 32), 0x190a55ad);
}

/* The fast code takes other ways for other lengths and alignments; zlib's tables are the reference. */
static void crc32__agrees_with_zlib_at_any_length_and_alignment(void **state)
{
    (void)state;
    unsigned char bytes[4096 + 64];
    unsigned seed = 20240611;
    for (size_t i = 0; i < sizeof bytes; i++) {
        seed = seed * 1103515245 + 12345;
        bytes[i] = (unsigned char)(seed >> 16);
    }
    for (size_t len = 0; len <= 4096; len = len < 600 ? len + 1 : len + 97) {
        size_t at = len % 64;
        if (dcp__crc32(0, bytes + at, len) != crc32(0, bytes + at, (uInt)len)) {
            fail_msg("length %zu at %zu", len, at);
        }
    }
}

static void crc32__in_pieces_is_the_whole(void **state)
{
    (void)state;
    const char *text = "123456789";
    for (size_t cut = 0; cut <= 9; cut++) {
        uint32_t first = dcp__crc32(0, text, cut), second = dcp__crc32(0, text + cut, 9 - cut);
        assert_int_equal(dcp__crc32(first, text + cut, 9 - cut), 0xcbf43926);
        assert_int_equal(dcp__crc32_combine(first, second, 9 - cut), 0xcbf43926);
    }
}

/* 2^40 + 5 zero bytes by doubling, against 5 and then 2^40 by squaring the other way round. */
static void crc32__combine_of_long_runs(void **state)
{
    (void)state;
    static const char zeros[5];
    uint32_t run = dcp__crc32(0, zeros, 1), five = dcp__crc32(0, zeros, 5);
    for (int i = 0; i < 40; i++) {
        run = dcp__crc32_combine(run, run, (uint64_t)1 << i);
    }
    assert_int_equal(dcp__crc32_combine(run, five, 5), dcp__crc32_combine(five, run, (uint64_t)1 << 40));
    assert_int_equal(dcp__crc32_combine(run, five, 5), dcp__crc32(run, zeros, 5));
}

/* The buffer and the values of xxHash's own self test (xsum_sanity_check.c), seed 0. */
static void fill_as_xxhash(uint8_t *bytes, size_t n)
{
    uint64_t gen = 2654435761u;
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)(gen >> 56);
        gen *= 11400714785074694797u;
    }
}

static void xxh3_64__published_values(void **state)
{
    (void)state;
    static const struct {
        size_t len;
        uint64_t hash;
    } known[] = {{0, 0x2d06800538d394c2},  {1, 0xc44bdff4074eecdb},  {6, 0x27b56a84cd2d7325},  {12, 0xa713daf0dfbb77e7},
                 {24, 0xa3fe70bf9d3510eb}, {48, 0x397da259ecba1f11}, {80, 0xbcdefbbb2c47c90a}, {195, 0xcd94217ee362ec3a}};
    uint8_t bytes[256];
    fill_as_xxhash(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (dcp__xxh3_64(bytes, known[i].len) != known[i].hash) {
            fail_msg("length %zu", known[i].len);
        }
    }
}

static void assert_digest(dcp__digest d, const char *hex)
{
    char text[33];
    for (int i = 0; i < 16; i++) {
        snprintf(text + 2 * i, 3, "%02x", d.bytes[i]);
    }
    assert_string_equal(text, hex);
}

static void xxh3_128__published_values(void **state)
{
    (void)state;
    uint8_t bytes[256];
    fill_as_xxhash(bytes, sizeof bytes);
    assert_digest(dcp__xxh3_128(bytes, 0), "99aa06d3014798d86001c324468d497f");
    assert_digest(dcp__xxh3_128(bytes, 1), "a6cd5e9392000f6ac44bdff4074eecdb");
    assert_digest(dcp__xxh3_128(bytes, 6), "082afe0b8162d12a3e7039bdda43cfc6");
    assert_digest(dcp__xxh3_128(bytes, 12), "6e3efd8fc7802b18061a192713f69ad9");
}

static void xxh3_128__in_pieces_is_the_whole(void **state)
{
    (void)state;
    uint8_t bytes[5000];
    fill_as_xxhash(bytes, sizeof bytes);
    dcp__hasher *h = aligned_alloc(64, (dcp__hasher_bytes() + 63) / 64 * 64);
    assert_non_null(h);
    for (size_t step = 1; step <= sizeof bytes; step = step * 3 + 1) {
        dcp__hasher_init(h);
        for (size_t at = 0; at < sizeof bytes; at += step) {
            size_t left = sizeof bytes - at;
            dcp__hasher_update(h, bytes + at, step < left ? step : left);
        }
        dcp__digest whole = dcp__xxh3_128(bytes, sizeof bytes), pieces = dcp__hasher_digest(h);
        assert_memory_equal(whole.bytes, pieces.bytes, 16);
    }
    free(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc32__published_values),          cmocka_unit_test(crc32__agrees_with_zlib_at_any_length_and_alignment),
        cmocka_unit_test(crc32__in_pieces_is_the_whole),    cmocka_unit_test(crc32__combine_of_long_runs),
        cmocka_unit_test(xxh3_64__published_values),        cmocka_unit_test(xxh3_128__published_values),
        cmocka_unit_test(xxh3_128__in_pieces_is_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
