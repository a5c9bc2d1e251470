/* Random states to be saved: nested containers, scalars of all kinds, tensors of all dtypes. */
#ifndef TESTS_SUPPORT_RANDOM_STATE_H
#define TESTS_SUPPORT_RANDOM_STATE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>

#include <cmocka.h>

#include "dcp/state.h"
#include "support/random.h"

static inline void random_fill(test_random *rnd, void *data, size_t n)
{
    uint8_t *bytes = data;
    for (size_t i = 0; i < n; i++) {
        bytes[i] = (uint8_t)test_random_next(rnd);
    }
}

static inline dcp_value *random_tensor(test_random *rnd)
{
    int64_t extents[5];
    int ndim = (int)test_random_below(rnd, 6);
    dcp_value *v;
    for (int d = 0; d < ndim; d++) {
        extents[d] = test_random_below(rnd, 8);
    }
    if (ndim == 1 && test_random_below(rnd, 8) == 0) {
        extents[0] = 150000 + test_random_below(rnd, 300000);
    }
    dcp_dtype dtype = (dcp_dtype)(1 + test_random_below(rnd, DCP_DTYPE_COUNT - 1));
    assert_int_equal(dcp_tensor_alloc(NULL, dtype, ndim, extents, &v, NULL), DCP_OK);
    int64_t elems;
    dcp_tensor_elems(dcp_value_tensor(v), &elems, NULL);
    random_fill(rnd, dcp_value_tensor(v)->data, (size_t)elems * dcp_dtype_bytes(dtype));
    return v;
}

static inline dcp_value *random_value(test_random *rnd, int depth)
{
    dcp_value *v = NULL;
    char text[32];
    int64_t n = test_random_below(rnd, 4);
    switch (test_random_below(rnd, depth > 0 ? 10 : 6)) {
    case 0: dcp_int_create(NULL, (int64_t)test_random_next(rnd), &v, NULL); break;
    case 1: dcp_float_create(NULL, (double)test_random_below(rnd, 1000) / 7, &v, NULL); break;
    case 2:
        snprintf(text, sizeof text, "text %d \xc3\xa9", (int)n);
        dcp_string_create(NULL, dcp_str_of(text), &v, NULL);
        break;
    case 3: dcp_none_create(NULL, &v, NULL); break;
    case 4: dcp_bytes_create(NULL, DCP_KIND_BYTES, "\0\xff", 2, &v, NULL); break;
    case 5: return random_tensor(rnd);
    case 6:
    case 7:
        dcp_seq_create(NULL, test_random_below(rnd, 2) ? DCP_KIND_LIST : DCP_KIND_TUPLE, &v, NULL);
        for (int64_t i = 0; i < n; i++) {
            dcp_list_append(v, random_value(rnd, depth - 1), NULL);
        }
        break;
    default:
        if (test_random_below(rnd, 2)) {
            dcp_dict_create(NULL, &v, NULL);
        } else {
            dcp_ordered_dict_create(NULL, &v, NULL);
        }
        for (int64_t i = 0; i < n; i++) {
            snprintf(text, sizeof text, "k%d", (int)i);
            dcp_dict_set(v, test_random_below(rnd, 3) ? dcp_key_str(text) : dcp_key_int(i), random_value(rnd, depth - 1), NULL);
        }
    }
    return v;
}

static inline dcp_value *random_state(test_random *rnd)
{
    dcp_value *state;
    char key[16];
    dcp_dict_create(NULL, &state, NULL);
    for (int64_t i = test_random_below(rnd, 8); i >= 0; i--) {
        snprintf(key, sizeof key, "top%d", (int)i);
        dcp_dict_set(state, dcp_key_str(key), random_value(rnd, 3), NULL);
    }
    return state;
}

#endif
