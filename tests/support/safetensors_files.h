/* Safetensors files in memory for tests, and the values that golden checkpoints must have. */
#ifndef TESTS_SUPPORT_SAFETENSORS_FILES_H
#define TESTS_SUPPORT_SAFETENSORS_FILES_H

#include <jansson.h>
#include <openssl/evp.h>
#include <time.h>

#include "format/safetensors.h"
#include "support/golden_records.h"

typedef struct st_file {
    uint8_t *bytes;
    size_t len;
} st_file;

/* Length, header text as it stands, and data_len bytes 0, 1, 2, .. of data. */
static inline st_file st_make(const char *json, size_t data_len)
{
    size_t h = strlen(json);
    st_file f = {malloc(8 + h + data_len + 1), 8 + h + data_len};
    assert_non_null(f.bytes);
    dcp__store64(f.bytes, h);
    memcpy(f.bytes + 8, json, h);
    for (size_t i = 0; i < data_len; i++) {
        f.bytes[8 + h + i] = (uint8_t)i;
    }
    return f;
}

static inline st_file st_load(const char *path)
{
    st_file f;
    f.bytes = golden_read_file(path, &f.len);
    return f;
}

static inline dcp__source st_source(const st_file *f)
{
    return dcp__source_memory(f->bytes, f->len);
}

static inline const dcp__st_tensor *st_find(const dcp__safetensors *s, const char *name)
{
    uint64_t i;
    return dcp__strmap_get(&s->by_name, dcp_str_of(name), &i) ? &s->tensors[i] : NULL;
}

static inline void st_sha256(const void *bytes, size_t n, char hex[65])
{
    uint8_t digest[32];
    assert_int_equal(EVP_Digest(bytes, n, digest, NULL, EVP_sha256(), NULL), 1);
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}

/* One tensor against its entry in the "tensors" of an expect.json. */
static inline void st_expect(json_t *tensors, dcp_str name, dcp_dtype dtype, int ndim, const int64_t *extents, const void *bytes,
                             size_t n)
{
    char hex[65];
    json_t *want = json_object_get(tensors, name.ptr);
    assert_non_null(want);
    assert_string_equal(dcp_dtype_name(dtype), json_string_value(json_object_get(want, "dtype")));
    json_t *shape = json_object_get(want, "shape");
    assert_int_equal(ndim, json_array_size(shape));
    for (int i = 0; i < ndim; i++) {
        assert_int_equal(extents[i], json_integer_value(json_array_get(shape, (size_t)i)));
    }
    st_sha256(bytes, n, hex);
    assert_string_equal(hex, json_string_value(json_object_get(want, "sha256")));
}

/* xorshift64*; the seed is printed, and DCP_TEST_SEED repeats a run. */
static inline uint64_t st_seed(void)
{
    const char *text = getenv("DCP_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) | 1;
    print_message("DCP_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

static inline uint64_t st_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dULL;
}

/* One to four bytes changed, and now and then the end cut off. */
static inline st_file st_mutate(const st_file *f, uint64_t *random)
{
    st_file out = {malloc(f->len + 1), f->len};
    assert_non_null(out.bytes);
    memcpy(out.bytes, f->bytes, f->len);
    for (uint64_t n = 1 + st_random(random) % 4; n > 0; n--) {
        static const char alphabet[] = "\"{}[],:0123456789-\\eE. \0\xff";
        uint64_t r = st_random(random);
        size_t at = (size_t)(r >> 16) % f->len;
        uint8_t flipped = (uint8_t)(out.bytes[at] ^ (1u << (r & 7)));
        out.bytes[at] = r & 8 ? (uint8_t)alphabet[(r >> 4) % (sizeof alphabet - 1)] : flipped;
    }
    if (st_random(random) % 8 == 0) {
        out.len = (size_t)(st_random(random) % f->len);
    }
    return out;
}

#endif
