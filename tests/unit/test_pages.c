#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "base/pages.h"

enum { N_PAGES = 40 };

static char *map(void)
{
    char *ptr = mmap(NULL, N_PAGES * dcp__page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(ptr != MAP_FAILED);
    return ptr;
}

/* Of all pages, as the kernel tells. */
static size_t count_present(char *ptr)
{
    unsigned char is_there[N_PAGES];
    size_t n = 0;
    assert_int_equal(mincore(ptr, N_PAGES * dcp__page_bytes(), is_there), 0);
    for (size_t i = 0; i < N_PAGES; i++) {
        n += is_there[i] & 1;
    }
    return n;
}

static void pages__touching_gives_whole_pages_of_the_range(void **unused)
{
    (void)unused;
    size_t page = dcp__page_bytes();
    char *ptr = map();
    dcp__pages_touch(ptr + 1, page);
    assert_int_equal(count_present(ptr), 0);
    dcp__pages_touch(ptr + page - 1, 3 * page + 2);
    assert_int_equal(count_present(ptr), 3);
    dcp__pages_touch(ptr, N_PAGES * page);
    assert_int_equal(count_present(ptr), N_PAGES);
    munmap(ptr, N_PAGES * page);
}

static void pages__content_stays(void **unused)
{
    (void)unused;
    size_t page = dcp__page_bytes();
    char *ptr = map();
    memset(ptr + page, 7, 2 * page);
    dcp__pages_expect(ptr, N_PAGES * page);
    dcp__pages_touch(ptr, N_PAGES * page);
    for (size_t i = 0; i < N_PAGES * page; i++) {
        assert_int_equal(ptr[i], i / page == 1 || i / page == 2 ? 7 : 0);
    }
    munmap(ptr, N_PAGES * page);
}

/* A range whose first page is there is taken for one that is there as a whole. */
static void pages__only_fresh_ranges_are_expected(void **unused)
{
    (void)unused;
    size_t page = dcp__page_bytes();
    char *ptr = map();
    ptr[0] = 1;
    dcp__pages_expect(ptr, N_PAGES * page);
    assert_int_equal(count_present(ptr), 1);
    dcp__pages_expect(ptr + page, 4 * page);
    size_t n = count_present(ptr);
    assert_true(n == 5 || n == 1); /* 1: a kernel before Linux 5.14 */
    dcp__pages_expect(ptr + 10 * page + 1, page);
    assert_int_equal(count_present(ptr), n);
    munmap(ptr, N_PAGES * page);
}

static void pages__sizes_are_rounded_up(void **unused)
{
    (void)unused;
    size_t page = dcp__page_bytes(), out;
    const size_t sizes[][2] = {{0, 0}, {1, page}, {page, page}, {page + 1, 2 * page}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        assert_true(dcp__whole_pages(sizes[i][0], &out));
        assert_int_equal(out, sizes[i][1]);
    }
    assert_false(dcp__whole_pages(SIZE_MAX - 1, &out));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages__touching_gives_whole_pages_of_the_range),
        cmocka_unit_test(pages__content_stays),
        cmocka_unit_test(pages__only_fresh_ranges_are_expected),
        cmocka_unit_test(pages__sizes_are_rounded_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
