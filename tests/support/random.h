/* Random numbers for property tests. The seed is printed; DCP_TEST_SEED repeats a run. */
#ifndef TESTS_SUPPORT_RANDOM_H
#define TESTS_SUPPORT_RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct test_random {
    uint64_t state;
} test_random;

/* splitmix64 (Steele, Lea, Flood 2014) */
static inline uint64_t test_random_next(test_random *r)
{
    uint64_t z = (r->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* 0 to n - 1; 0 for n <= 1. */
static inline int64_t test_random_below(test_random *r, int64_t n)
{
    return n > 1 ? (int64_t)(test_random_next(r) % (uint64_t)n) : 0;
}

static inline test_random test_random_seeded(const char *what)
{
    const char *given = getenv("DCP_TEST_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)now.tv_sec * 1000003 + (uint64_t)now.tv_nsec;
    printf("%s: DCP_TEST_SEED=%llu\n", what, (unsigned long long)seed);
    return (test_random){seed};
}

#endif
