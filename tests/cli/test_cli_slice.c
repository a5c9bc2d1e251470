/* Slices against NumPy 2.4.6: for each, the shape of np.arange(n).reshape(shape)[slice] and its first and last element. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "slice.h"

typedef struct numpy_case {
    int ndim;
    int64_t shape[4];
    const char *text;
    int result_ndim;
    int64_t result_shape[4];
    int64_t first, last; /* -1: no elements */
} numpy_case;

static const numpy_case numpy_cases[] = {
    {2, {10, 7}, "3", 1, {7}, 21, 27},
    {2, {10, 7}, "-1", 1, {7}, 63, 69},
    {2, {10, 7}, "1:5", 2, {4, 7}, 7, 34},
    {2, {10, 7}, "::2", 2, {5, 7}, 0, 62},
    {2, {10, 7}, "1::3", 2, {3, 7}, 7, 55},
    {2, {10, 7}, ":,2:4", 2, {10, 2}, 2, 66},
    {2, {10, 7}, "...,-1", 1, {10}, 6, 69},
    {2, {10, 7}, "...", 2, {10, 7}, 0, 69},
    {2, {10, 7}, "2,3", 0, {0}, 17, 17},
    {2, {10, 7}, "-3:", 2, {3, 7}, 49, 69},
    {2, {10, 7}, "5:100", 2, {5, 7}, 35, 69},
    {2, {10, 7}, "-100:2", 2, {2, 7}, 0, 13},
    {2, {10, 7}, "7:3", 2, {0, 7}, -1, -1},
    {2, {10, 7}, "0:0", 2, {0, 7}, -1, -1},
    {2, {10, 7}, ":,:", 2, {10, 7}, 0, 69},
    {2, {10, 7}, " 1 : 5 , 2 ", 1, {4}, 9, 30},
    {2, {10, 7}, "+2", 1, {7}, 14, 20},
    {2, {10, 7}, "::99999999999999999999", 2, {1, 7}, 0, 6},
    {2, {10, 7}, "-99999999999999999999:99999999999999999999", 2, {10, 7}, 0, 69},
    {2, {10, 7}, "9:", 2, {1, 7}, 63, 69},
    {2, {10, 7}, "10:", 2, {0, 7}, -1, -1},
    {2, {10, 7}, "-10", 1, {7}, 0, 6},
    {2, {10, 7}, "1,...,2", 0, {0}, 9, 9},
    {2, {10, 7}, "...,1,2", 0, {0}, 9, 9},
    {2, {10, 7}, "1,2,...", 0, {0}, 9, 9},
    {4, {2, 3, 4, 5}, "1,...,2", 2, {3, 4}, 62, 117},
    {4, {2, 3, 4, 5}, "...,::2", 4, {2, 3, 4, 3}, 0, 119},
    {4, {2, 3, 4, 5}, "0,...", 3, {3, 4, 5}, 0, 59},
    {4, {2, 3, 4, 5}, "...,2,1:3", 3, {2, 3, 2}, 11, 112},
    {4, {2, 3, 4, 5}, "1,2,3,4", 0, {0}, 119, 119},
    {4, {2, 3, 4, 5}, "-1,:,1::2", 3, {3, 2, 5}, 65, 119},
    {0, {0}, "...", 0, {0}, 0, 0},
    {2, {0, 8}, "0:3", 2, {0, 8}, -1, -1},
    {2, {0, 8}, ":,1::2", 2, {0, 4}, -1, -1},
    {1, {5}, "[1:3]", 1, {2}, 1, 2},
    {1, {5}, "4:1:2", 1, {0}, -1, -1},
    {1, {5}, "1:4:2", 1, {2}, 1, 3},
    {1, {5}, "1:5:2", 1, {2}, 1, 3},
    {1, {5}, "1:4:3", 1, {1}, 1, 1},
};

static int64_t element_at(const numpy_case *c, const slice *s, bool is_last)
{
    int64_t at = 0;
    for (int i = 0; i < s->ndim; i++) {
        const slice_dim *d = &s->dims[i];
        if (d->count == 0) {
            return -1;
        }
        at = at * c->shape[i] + d->start + (is_last ? (d->count - 1) * d->step : 0);
    }
    return at;
}

static void slice__selects_what_numpy_selects(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof numpy_cases / sizeof *numpy_cases; i++) {
        const numpy_case *c = &numpy_cases[i];
        char message[SLICE_MESSAGE_BYTES];
        int64_t shape[DCP_MAX_NDIM];
        slice s;
        if (!slice_parse(c->text, c->ndim, c->shape, &s, message)) {
            fail_msg("%s: %s", c->text, message);
        }
        assert_int_equal(slice_shape(&s, shape), c->result_ndim);
        for (int d = 0; d < c->result_ndim; d++) {
            assert_int_equal(shape[d], c->result_shape[d]);
        }
        assert_int_equal(element_at(c, &s, false), c->first);
        assert_int_equal(element_at(c, &s, true), c->last);
    }
}

static void slice__absent_selects_everything(void **state)
{
    (void)state;
    const int64_t extents[] = {3, 0, 5};
    int64_t shape[DCP_MAX_NDIM];
    slice s;
    assert_true(slice_parse(NULL, 3, extents, &s, NULL));
    assert_int_equal(slice_shape(&s, shape), 3);
    assert_memory_equal(shape, extents, sizeof extents);
}

/* NumPy raises IndexError, ValueError or SyntaxError for these, or they need what is not supported. */
static void slice__what_is_no_slice_of_the_tensor_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "10",
        "-11",
        "1,2,3",
        "...,...",
        "::-1",
        "::0",
        "a",
        "1.5",
        "1:2:3:4",
        "1,,2",
        ",",
        "1,",
        "[1",
        "1]",
        "--1",
        "- 1",
        "0,7",
        "0,-8",
        "None",
        "1 2",
        "(1,2)",
        "1:b",
        "....",
        "99999999999999999999",
        "-99999999999999999999",
        "True",
    };
    const int64_t extents[] = {10, 7};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char message[SLICE_MESSAGE_BYTES] = "";
        slice s;
        if (slice_parse(bad[i], 2, extents, &s, message)) {
            fail_msg("'%s' was accepted", bad[i]);
        }
        assert_true(strlen(message) > 0 && strlen(message) < sizeof message);
    }
}

static void slice__more_parts_than_any_tensor_has_are_refused(void **state)
{
    (void)state;
    char text[2 * DCP_MAX_NDIM + 8] = "0", message[SLICE_MESSAGE_BYTES];
    int64_t extents[DCP_MAX_NDIM];
    slice s;
    for (int i = 0; i < DCP_MAX_NDIM; i++) {
        extents[i] = 1;
        strcat(text, ",0");
    }
    assert_false(slice_parse(text, DCP_MAX_NDIM, extents, &s, message));
    strcat(text, ",0");
    assert_false(slice_parse(text, DCP_MAX_NDIM, extents, &s, message));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slice__selects_what_numpy_selects),
        cmocka_unit_test(slice__absent_selects_everything),
        cmocka_unit_test(slice__what_is_no_slice_of_the_tensor_is_refused),
        cmocka_unit_test(slice__more_parts_than_any_tensor_has_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
