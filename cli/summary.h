/* summary.h - what a tensor's numbers are like, in one pass. */
#ifndef DCP_CLI_SUMMARY_H
#define DCP_CLI_SUMMARY_H

#include "element.h"

#define SUMMARY_FIRST 8
#define SUMMARY_ELEM_BYTES 16 /* of the widest dtype */

typedef struct summary {
    dcp_dtype dtype;
    uint64_t n_elems;
    uint64_t n_zeros, n_nans, n_infs; /* of elements; of numbers for pairs. A complex number is NaN if a part of it is. */
    /* Smallest and largest number; NaN does not count. In the field of the dtype's class. None for complex numbers. */
    bool has_range;
    int64_t min_int, max_int;
    uint64_t min_uint, max_uint;
    double min_real, max_real;
    /* Of finite numbers. */
    uint64_t n_summed;
    long double sum, sum_imag;
    unsigned char first[SUMMARY_FIRST * SUMMARY_ELEM_BYTES];
    size_t n_first;
} summary;

void summary_init(summary *s, dcp_dtype dtype);
void summary_add(summary *s, const void *elems, size_t n);

/* Print what was found: rows "name value" and, as keys of an open object, JSON. */
void summary_print(const summary *s, FILE *out);
void summary_json(const summary *s, json_writer *w);

#endif
