/* nested_json.h - elements of a tensor, in row-major order, as nested lists of JSON. */
#ifndef DCP_CLI_NESTED_JSON_H
#define DCP_CLI_NESTED_JSON_H

#include "element.h"

typedef struct nested_json {
    json_writer json;
    dcp_dtype dtype;
    int ndim;
    const int64_t *shape;
    int64_t index[DCP_MAX_NDIM]; /* of the next element */
} nested_json;

/* shape is borrowed. A tensor without elements is printed here already: "[[], []]". False, with nothing printed, if it has
 * more than a million empty lists. */
bool nested_json_begin(nested_json *n, FILE *out, dcp_dtype dtype, int ndim, const int64_t *shape);
/* The next count elements. The text is complete with the last element. */
void nested_json_add(nested_json *n, const void *elems, size_t count);

#endif
