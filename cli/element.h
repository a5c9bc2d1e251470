/* element.h - elements of tensors as numbers and as text. Elements are little-endian and may be unaligned. */
#ifndef DCP_CLI_ELEMENT_H
#define DCP_CLI_ELEMENT_H

#include "json_writer.h"

#include <dcp/state.h>

typedef enum element_class {
    ELEMENT_BOOL,
    ELEMENT_INT,
    ELEMENT_UINT,
    ELEMENT_REAL,
    ELEMENT_COMPLEX, /* real and imaginary part */
    ELEMENT_PAIR     /* two numbers in one element: float4_e2m1fn_x2 */
} element_class;

element_class element_class_of(dcp_dtype dtype);
/* Numbers in one element: 2 for complex numbers and pairs, otherwise 1. */
size_t element_numbers(dcp_dtype dtype);
/* True if a float32 holds every number of the dtype, so that its digits are enough. */
bool element_is_single(dcp_dtype dtype);

/* Decodes n elements: ints of ELEMENT_BOOL and ELEMENT_INT, uints of ELEMENT_UINT, reals of the others, element_numbers
 * for each element. Every value is exact. */
void element_ints(dcp_dtype dtype, const void *elems, size_t n, int64_t *out);
void element_uints(dcp_dtype dtype, const void *elems, size_t n, uint64_t *out);
void element_reals(dcp_dtype dtype, const void *elems, size_t n, double *out);

/* One element as JSON: complex numbers and pairs are arrays of two. */
void element_json(json_writer *w, dcp_dtype dtype, const void *elem);

#define ELEMENT_TEXT_BYTES 96

/* One element as Python prints it: "True", "nan", "(1.0+2.0j)"; returns buf. */
const char *element_text(dcp_dtype dtype, const void *elem, char buf[ELEMENT_TEXT_BYTES]);
/* A number alone, as Python prints it; returns buf. */
const char *element_real_text(double value, bool is_single, char buf[JW_REAL_BYTES]);

#endif
