#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/strmap.h"
#include "support/failing_alloc.h"

enum { N_KEYS = 3000 };

/* Keys of random bytes, NUL among them, of length 0 to 5 over a small alphabet, so that many come twice. */
typedef struct keys {
    char bytes[N_KEYS][5];
    dcp_str key[N_KEYS];
} keys;

static void make_keys(keys *k, unsigned seed)
{
    for (size_t i = 0; i < N_KEYS; i++) {
        k->key[i] = (dcp_str){k->bytes[i], (size_t)rand_r(&seed) % 6};
        for (size_t b = 0; b < 5; b++) {
            k->bytes[i][b] = (char)(rand_r(&seed) % 6);
        }
    }
}

static bool same(dcp_str a, dcp_str b)
{
    return a.len == b.len && memcmp(a.ptr, b.ptr, a.len) == 0;
}

/* The first key before i that is equal, or i. */
static size_t first_equal(const keys *k, size_t i)
{
    size_t j = 0;
    while (!same(k->key[j], k->key[i])) {
        j++;
    }
    return j;
}

static void strmap__agrees_with_a_list(void **state)
{
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    static keys k;
    make_keys(&k, seed);
    dcp__strmap m;
    dcp__strmap_init(&m, dcp__context(NULL));
    size_t distinct = 0;
    for (size_t i = 0; i < N_KEYS; i++) {
        uint64_t value = 77, existing = 77;
        size_t first = first_equal(&k, i);
        assert_int_equal(dcp__strmap_get(&m, k.key[i], &value), first < i);
        assert_int_equal(value, first < i ? first : 77);
        assert_int_equal(dcp__strmap_add(&m, k.key[i], i, &existing, NULL), DCP_OK);
        assert_true(existing == (first < i ? first : UINT64_MAX));
        distinct += first == i;
        assert_int_equal(m.n, distinct);
    }
    for (size_t i = 0; i < N_KEYS; i++) {
        uint64_t value = 77;
        assert_true(dcp__strmap_get(&m, k.key[i], &value));
        assert_int_equal(value, first_equal(&k, i));
    }
    dcp__strmap_reset(&m);
    uint64_t value = 77;
    assert_false(dcp__strmap_get(&m, k.key[0], &value));
}

static void strmap__empty_key_without_bytes(void **state)
{
    (void)state;
    dcp__strmap m;
    uint64_t value = 77, existing;
    dcp__strmap_init(&m, dcp__context(NULL));
    assert_int_equal(dcp__strmap_add(&m, (dcp_str){NULL, 0}, 5, NULL, NULL), DCP_OK);
    assert_true(dcp__strmap_get(&m, dcp_str_of(""), &value));
    assert_int_equal(value, 5);
    assert_int_equal(dcp__strmap_add(&m, dcp_str_of(""), 6, &existing, NULL), DCP_OK);
    assert_int_equal(existing, 5);
    dcp__strmap_reset(&m);
}

static dcp_status add_many(dcp_context *ctx, void *user, dcp_error *err)
{
    const keys *k = user;
    dcp__strmap m;
    dcp_status status = DCP_OK;
    uint64_t value;
    dcp__strmap_init(&m, ctx);
    size_t added = 0;
    while (added < N_KEYS && status == DCP_OK) {
        status = dcp__strmap_add(&m, k->key[added], added, NULL, err);
        added += status == DCP_OK;
    }
    for (size_t i = 0; i < added; i++) {
        assert_true(dcp__strmap_get(&m, k->key[i], &value)); /* a failure loses nothing */
    }
    dcp__strmap_reset(&m);
    return status;
}

static void strmap__survives_failing_allocations(void **state)
{
    (void)state;
    static keys k;
    make_keys(&k, 1);
    assert_true(failing_alloc_walk(add_many, &k) >= 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strmap__agrees_with_a_list),
        cmocka_unit_test(strmap__empty_key_without_bytes),
        cmocka_unit_test(strmap__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
