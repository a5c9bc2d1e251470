#include "slice.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One part between commas, before the tensor's shape is known. */
typedef struct part {
    enum { PART_INTEGER, PART_SLICE, PART_ELLIPSIS } kind;
    int64_t start, stop, step; /* of an integer: start */
    bool has_start, has_stop;
} part;

typedef struct parser {
    const char *text, *at;
    char *message;
} parser;

static bool fail(const parser *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static bool fail(const parser *p, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = snprintf(p->message, SLICE_MESSAGE_BYTES, "slice '%.64s': ", p->text);
    vsnprintf(p->message + n, SLICE_MESSAGE_BYTES - (size_t)n, fmt, args);
    va_end(args);
    return false;
}

static bool fail_syntax(const parser *p)
{
    return fail(p, "expected integers, start:stop:step and '...', separated by commas");
}

static void skip_space(parser *p)
{
    p->at += strspn(p->at, " \t");
}

static bool skip_char(parser *p, char c)
{
    skip_space(p);
    if (*p->at != c) {
        return false;
    }
    p->at++;
    return true;
}

/* Numbers beyond int64 are clipped, which is what slices do to them anyway. */
static bool take_integer(parser *p, int64_t *out)
{
    skip_space(p);
    const char *digits = p->at + (*p->at == '-' || *p->at == '+');
    if (!isdigit((unsigned char)*digits)) {
        return false;
    }
    char *end;
    *out = strtoll(p->at, &end, 10);
    p->at = end;
    return true;
}

static bool take_step(parser *p, part *out)
{
    if (skip_char(p, ':') && take_integer(p, &out->step) && out->step < 1) {
        return fail(p, "steps must be positive, not %" PRId64, out->step);
    }
    return true;
}

static bool take_part(parser *p, part *out)
{
    *out = (part){.kind = PART_SLICE, .step = 1};
    skip_space(p);
    if (strncmp(p->at, "...", 3) == 0) {
        p->at += 3;
        out->kind = PART_ELLIPSIS;
        return true;
    }
    out->has_start = take_integer(p, &out->start);
    if (!skip_char(p, ':')) {
        out->kind = PART_INTEGER;
        return out->has_start || fail_syntax(p);
    }
    out->has_stop = take_integer(p, &out->stop);
    return take_step(p, out);
}

static bool take_parts(parser *p, part parts[DCP_MAX_NDIM + 1], int *n)
{
    bool is_bracketed = skip_char(p, '[');
    *n = 0;
    do {
        if (*n == DCP_MAX_NDIM + 1) {
            return fail(p, "more than %d dimensions", DCP_MAX_NDIM);
        }
        if (!take_part(p, &parts[(*n)++])) {
            return false;
        }
    } while (skip_char(p, ','));
    if (is_bracketed && !skip_char(p, ']')) {
        return fail_syntax(p);
    }
    skip_space(p);
    return *p->at == 0 || fail_syntax(p);
}

/* A bound of a slice within [0, extent], counted from the end if negative. */
static int64_t clip(int64_t i, int64_t extent)
{
    if (i < 0) {
        i += extent;
    }
    return i < 0 ? 0 : i > extent ? extent : i;
}

static slice_dim resolve_slice(const part *in, int64_t extent)
{
    slice_dim out = {.step = in->step};
    int64_t stop = in->has_stop ? clip(in->stop, extent) : extent;
    out.start = in->has_start ? clip(in->start, extent) : 0;
    out.count = out.start < stop ? (stop - out.start - 1) / out.step + 1 : 0;
    return out;
}

static bool resolve(const parser *p, const part *in, int dim, int64_t extent, slice_dim *out)
{
    if (in->kind == PART_SLICE) {
        *out = resolve_slice(in, extent);
        return true;
    }
    int64_t i = in->start < 0 ? in->start + extent : in->start;
    if (i < 0 || i >= extent) {
        return fail(p, "index %" PRId64 " is out of bounds for dimension %d with %" PRId64 " elements", in->start, dim, extent);
    }
    *out = (slice_dim){.start = i, .step = 1, .count = 1, .is_dropped = true};
    return true;
}

static void select_all(const int64_t *extents, int from, int to, slice *out)
{
    for (int i = from; i < to; i++) {
        out->dims[i] = (slice_dim){.start = 0, .step = 1, .count = extents[i]};
    }
}

/* Position of the ellipsis; n if there is none, as if it stood at the end; -1 if there are two. */
static int find_ellipsis(const part *parts, int n)
{
    int found = n;
    for (int i = 0; i < n; i++) {
        if (parts[i].kind == PART_ELLIPSIS) {
            if (found < n) {
                return -1;
            }
            found = i;
        }
    }
    return found;
}

static bool apply(const parser *p, const part *parts, int n, const int64_t *extents, slice *out)
{
    int ellipsis = find_ellipsis(parts, n);
    int n_given = ellipsis < n ? n - 1 : n;
    if (ellipsis < 0) {
        return fail(p, "only one '...' is possible");
    }
    if (n_given > out->ndim) {
        return fail(p, "%d indices for a tensor of %d dimensions", n_given, out->ndim);
    }
    int n_skipped = out->ndim - n_given;
    select_all(extents, ellipsis, ellipsis + n_skipped, out);
    for (int i = 0; i < n; i++) {
        int dim = i < ellipsis ? i : i - 1 + n_skipped;
        if (i != ellipsis && !resolve(p, &parts[i], dim, extents[dim], &out->dims[dim])) {
            return false;
        }
    }
    return true;
}

bool slice_parse(const char *text, int ndim, const int64_t *extents, slice *out, char message[SLICE_MESSAGE_BYTES])
{
    parser p = {text, text, message};
    part parts[DCP_MAX_NDIM + 1];
    int n;
    out->ndim = ndim;
    if (!text) {
        select_all(extents, 0, ndim, out);
        return true;
    }
    return take_parts(&p, parts, &n) && apply(&p, parts, n, extents, out);
}

int slice_shape(const slice *s, int64_t shape[DCP_MAX_NDIM])
{
    int n = 0;
    for (int i = 0; i < s->ndim; i++) {
        if (!s->dims[i].is_dropped) {
            shape[n++] = s->dims[i].count;
        }
    }
    return n;
}
