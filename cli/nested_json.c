#include "nested_json.h"

#define MAX_EMPTY_LISTS 1000000

/* Dimensions before the first empty one: these, and it, show as lists. */
static int first_empty(int ndim, const int64_t *shape)
{
    int i = 0;
    while (i < ndim && shape[i] != 0) {
        i++;
    }
    return i;
}

static bool is_printable(int n_outer, const int64_t *shape)
{
    int64_t lists = 1;
    for (int i = 0; i < n_outer; i++) {
        if (__builtin_mul_overflow(lists, shape[i], &lists) || lists > MAX_EMPTY_LISTS) {
            return false;
        }
    }
    return true;
}

static void open_lists(nested_json *n, int from, int to)
{
    for (int i = from; i < to; i++) {
        jw_begin_inline(&n->json, '[');
        n->index[i] = 0;
    }
}

/* Steps to the next position of the first n_dims dimensions; closes the lists that end there, and opens new ones. */
static void step(nested_json *n, int n_dims)
{
    int i = n_dims - 1;
    while (i >= 0 && ++n->index[i] == n->shape[i]) {
        jw_end(&n->json, ']');
        i--;
    }
    if (i >= 0) {
        open_lists(n, i + 1, n_dims);
    }
}

static void print_empty(nested_json *n, int n_outer)
{
    int64_t lists = 1;
    for (int i = 0; i < n_outer; i++) {
        lists *= n->shape[i];
    }
    open_lists(n, 0, n_outer);
    for (int64_t i = 0; i < lists; i++) {
        jw_begin_inline(&n->json, '[');
        jw_end(&n->json, ']');
        step(n, n_outer);
    }
}

bool nested_json_begin(nested_json *n, FILE *out, dcp_dtype dtype, int ndim, const int64_t *shape)
{
    int n_outer = first_empty(ndim, shape);
    *n = (nested_json){.json = JSON_WRITER(out), .dtype = dtype, .ndim = ndim, .shape = shape};
    if (n_outer == ndim) {
        open_lists(n, 0, ndim);
        return true;
    }
    if (!is_printable(n_outer, shape)) {
        return false;
    }
    print_empty(n, n_outer);
    return true;
}

void nested_json_add(nested_json *n, const void *elems, size_t count)
{
    const char *p = elems;
    size_t size = dcp_dtype_bytes(n->dtype);
    for (size_t i = 0; i < count; i++) {
        element_json(&n->json, n->dtype, p + i * size);
        step(n, n->ndim);
    }
    if (n->ndim == 0 && element_numbers(n->dtype) == 1) {
        fputc('\n', n->json.out); /* a number alone has no bracket that ends the line */
    }
}
