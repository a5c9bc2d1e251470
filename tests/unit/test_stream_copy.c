#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/stream_copy.h"
#include "support/random.h"

enum { MOST = 1 << 20, MARGIN = 256 };

/* Every length and alignment is what memcpy makes of it, and nothing beside it is touched. */
static void stream_copy__copies_what_memcpy_copies(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("stream copy");
    unsigned char *from = malloc(MOST + MARGIN), *to = malloc(MOST + MARGIN), *expected = malloc(MOST + MARGIN);
    for (int i = 0; i < MOST + MARGIN; i++) {
        from[i] = (unsigned char)test_random_next(&rnd);
    }
    for (int i = 0; i < 200; i++) {
        size_t n = (size_t)test_random_below(&rnd, i % 2 ? MOST : 600000), at = (size_t)test_random_below(&rnd, 128);
        size_t source = (size_t)test_random_below(&rnd, 128);
        memset(to, i, MOST + MARGIN);
        memset(expected, i, MOST + MARGIN);
        memcpy(expected + at, from + source, n);
        dcp__stream_copy(to + at, from + source, n);
        if (memcmp(to, expected, MOST + MARGIN) != 0) {
            fail_msg("%zu bytes from %zu to %zu", n, source, at);
        }
    }
    free(from);
    free(to);
    free(expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stream_copy__copies_what_memcpy_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
