#include "summary.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Elements are decoded into buffers of this many. Sums of one buffer are doubles, sums of buffers long doubles. */
#define BLOCK 1024

void summary_init(summary *s, dcp_dtype dtype)
{
    memset(s, 0, sizeof *s);
    s->dtype = dtype;
    s->min_int = INT64_MAX;
    s->max_int = INT64_MIN;
    s->min_uint = UINT64_MAX;
    s->min_real = INFINITY;
    s->max_real = -INFINITY;
}

static void add_ints(summary *s, const void *elems, size_t n)
{
    int64_t values[BLOCK];
    double sum = 0;
    element_ints(s->dtype, elems, n, values);
    for (size_t i = 0; i < n; i++) {
        s->min_int = values[i] < s->min_int ? values[i] : s->min_int;
        s->max_int = values[i] > s->max_int ? values[i] : s->max_int;
        s->n_zeros += values[i] == 0;
        sum += (double)values[i];
    }
    s->sum += sum;
    s->n_summed += n;
    s->has_range |= n > 0;
}

static void add_uints(summary *s, const void *elems, size_t n)
{
    uint64_t values[BLOCK];
    double sum = 0;
    element_uints(s->dtype, elems, n, values);
    for (size_t i = 0; i < n; i++) {
        s->min_uint = values[i] < s->min_uint ? values[i] : s->min_uint;
        s->max_uint = values[i] > s->max_uint ? values[i] : s->max_uint;
        s->n_zeros += values[i] == 0;
        sum += (double)values[i];
    }
    s->sum += sum;
    s->n_summed += n;
    s->has_range |= n > 0;
}

static void count_special(summary *s, double value)
{
    if (isnan(value)) {
        s->n_nans++;
        return;
    }
    s->n_infs++;
    s->min_real = fmin(s->min_real, value);
    s->max_real = fmax(s->max_real, value);
    s->has_range = true;
}

/* Also the two numbers of each pair. */
static void add_reals(summary *s, const void *elems, size_t n)
{
    double values[2 * BLOCK], sum = 0, min = INFINITY, max = -INFINITY;
    uint64_t n_zeros = 0, n_finite = 0;
    element_reals(s->dtype, elems, n, values);
    n *= element_numbers(s->dtype);
    for (size_t i = 0; i < n; i++) {
        double value = values[i];
        if (!isfinite(value)) {
            count_special(s, value);
            continue;
        }
        min = value < min ? value : min;
        max = value > max ? value : max;
        sum += value;
        n_zeros += value == 0;
        n_finite++;
    }
    s->min_real = fmin(s->min_real, min);
    s->max_real = fmax(s->max_real, max);
    s->has_range |= n_finite > 0;
    s->n_zeros += n_zeros;
    s->n_summed += n_finite;
    s->sum += sum;
}

static void add_complex(summary *s, const void *elems, size_t n)
{
    double values[2 * BLOCK];
    element_reals(s->dtype, elems, n, values);
    for (size_t i = 0; i < n; i++) {
        double re = values[2 * i], im = values[2 * i + 1];
        if (isnan(re) || isnan(im)) {
            s->n_nans++;
        } else if (isinf(re) || isinf(im)) {
            s->n_infs++;
        } else {
            s->n_zeros += re == 0 && im == 0;
            s->n_summed++;
            s->sum += re;
            s->sum_imag += im;
        }
    }
}

static void keep_first(summary *s, const void *elems, size_t n)
{
    size_t size = dcp_dtype_bytes(s->dtype), room = SUMMARY_FIRST - s->n_first;
    size_t kept = n < room ? n : room;
    memcpy(s->first + s->n_first * size, elems, kept * size);
    s->n_first += kept;
}

static void add_block(summary *s, const void *elems, size_t n)
{
    switch (element_class_of(s->dtype)) {
    case ELEMENT_BOOL:
    case ELEMENT_INT: add_ints(s, elems, n); break;
    case ELEMENT_UINT: add_uints(s, elems, n); break;
    case ELEMENT_COMPLEX: add_complex(s, elems, n); break;
    case ELEMENT_REAL:
    case ELEMENT_PAIR: add_reals(s, elems, n); break;
    }
}

void summary_add(summary *s, const void *elems, size_t n)
{
    const char *p = elems;
    size_t size = dcp_dtype_bytes(s->dtype);
    keep_first(s, elems, n);
    s->n_elems += n;
    for (size_t done = 0; done < n; done += BLOCK) {
        add_block(s, p + done * size, n - done < BLOCK ? n - done : BLOCK);
    }
}

/* ---- printing ---- */

static bool has_nans(const summary *s)
{
    return element_class_of(s->dtype) >= ELEMENT_REAL;
}

static void print_range(const summary *s, FILE *out)
{
    char a[JW_REAL_BYTES], b[JW_REAL_BYTES];
    bool is_single = element_is_single(s->dtype);
    switch (element_class_of(s->dtype)) {
    case ELEMENT_BOOL:
        fprintf(out, "min       %s\nmax       %s\n", s->min_int ? "True" : "False", s->max_int ? "True" : "False");
        break;
    case ELEMENT_INT: fprintf(out, "min       %" PRId64 "\nmax       %" PRId64 "\n", s->min_int, s->max_int); break;
    case ELEMENT_UINT: fprintf(out, "min       %" PRIu64 "\nmax       %" PRIu64 "\n", s->min_uint, s->max_uint); break;
    default:
        fprintf(out, "min       %s\nmax       %s\n", element_real_text(s->min_real, is_single, a),
                element_real_text(s->max_real, is_single, b));
        break;
    }
}

static double mean_of(long double sum, uint64_t n)
{
    return (double)(sum / (long double)n);
}

static void print_mean(const summary *s, FILE *out)
{
    if (element_class_of(s->dtype) == ELEMENT_COMPLEX) {
        fprintf(out, "mean      (%.6g%+.6gj)\n", mean_of(s->sum, s->n_summed), mean_of(s->sum_imag, s->n_summed));
    } else {
        fprintf(out, "mean      %.6g\n", mean_of(s->sum, s->n_summed));
    }
}

static void print_first(const summary *s, FILE *out)
{
    char text[ELEMENT_TEXT_BYTES];
    size_t size = dcp_dtype_bytes(s->dtype);
    fputs("first     [", out);
    for (size_t i = 0; i < s->n_first; i++) {
        fprintf(out, "%s%s", i ? ", " : "", element_text(s->dtype, s->first + i * size, text));
    }
    fprintf(out, "%s]\n", s->n_elems > s->n_first ? ", ..." : "");
}

void summary_print(const summary *s, FILE *out)
{
    if (s->has_range) {
        print_range(s, out);
    }
    if (s->n_summed) {
        print_mean(s, out);
    }
    fprintf(out, "zeros     %" PRIu64 "\n", s->n_zeros);
    if (has_nans(s)) {
        fprintf(out, "nans      %" PRIu64 "\ninfs      %" PRIu64 "\n", s->n_nans, s->n_infs);
    }
    print_first(s, out);
}

static void json_range(const summary *s, json_writer *w, bool is_max)
{
    bool is_single = element_is_single(s->dtype);
    jw_key(w, dcp_str_of(is_max ? "max" : "min"));
    if (!s->has_range) {
        jw_null(w);
        return;
    }
    switch (element_class_of(s->dtype)) {
    case ELEMENT_BOOL: jw_bool(w, (is_max ? s->max_int : s->min_int) != 0); break;
    case ELEMENT_INT: jw_int(w, is_max ? s->max_int : s->min_int); break;
    case ELEMENT_UINT: jw_uint(w, is_max ? s->max_uint : s->min_uint); break;
    default: jw_real(w, is_max ? s->max_real : s->min_real, is_single); break;
    }
}

static void json_mean(const summary *s, json_writer *w)
{
    jw_key(w, dcp_str_of("mean"));
    if (!s->n_summed) {
        jw_null(w);
    } else if (element_class_of(s->dtype) == ELEMENT_COMPLEX) {
        jw_begin_inline(w, '[');
        jw_real(w, mean_of(s->sum, s->n_summed), false);
        jw_real(w, mean_of(s->sum_imag, s->n_summed), false);
        jw_end(w, ']');
    } else {
        jw_real(w, mean_of(s->sum, s->n_summed), false);
    }
}

void summary_json(const summary *s, json_writer *w)
{
    size_t size = dcp_dtype_bytes(s->dtype);
    jw_key_uint(w, "elements", s->n_elems);
    json_range(s, w, false);
    json_range(s, w, true);
    json_mean(s, w);
    jw_key_uint(w, "zeros", s->n_zeros);
    jw_key_uint(w, "nans", s->n_nans);
    jw_key_uint(w, "infs", s->n_infs);
    jw_key(w, dcp_str_of("first"));
    jw_begin_inline(w, '[');
    for (size_t i = 0; i < s->n_first; i++) {
        element_json(w, s->dtype, s->first + i * size);
    }
    jw_end(w, ']');
}
