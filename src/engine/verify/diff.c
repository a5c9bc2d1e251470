/* Two checkpoints compared: names first, then the tensors that both have slab by slab, each on one thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "dcp/convert.h"
#include "engine/read/tensor_slabs.h"
#include "engine/verify/diff_values.h"
#include "state/strided.h"

#define SLAB_BYTES ((int64_t)4 << 20)
#define TEXT_BYTES 256 /* of an object's value in a message */

/* An item that is in one of them or in both. */
typedef struct pair {
    const dcp_item *a, *b;
    dcp_difference_kind kind; /* 0: none */
    dcp__value_diff values;
    char *text; /* objects: both values */
} pair;

typedef struct diff {
    dcp_context *ctx;
    dcp_checkpoint *a, *b;
    const dcp_diff_opts *opts;
    dcp__tolerance tolerance;
    pair *pairs;
    size_t n;
    uint8_t **bufs;       /* [worker]: a slab of each side */
    pthread_mutex_t lock; /* guards done_bytes and the caller's progress function */
    uint64_t done_bytes, total_bytes;
} diff;

/* ---- which belong together ---- */

static dcp_difference_kind compare_kinds(const dcp_item *a, const dcp_item *b)
{
    if (!a || !b) {
        return a ? DCP_DIFF_MISSING : DCP_DIFF_UNEXPECTED;
    }
    if (a->kind != b->kind) {
        return DCP_DIFF_KIND;
    }
    if (a->kind == DCP_ITEM_OBJECT) {
        return 0;
    }
    bool same_shape = a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->extents, b->extents, (size_t)a->ndim * 8) == 0);
    return !same_shape ? DCP_DIFF_SHAPE : a->dtype != b->dtype ? DCP_DIFF_DTYPE : 0;
}

/* The very item: not another rank's of that name. */
static const dcp_item *counterpart(const dcp_checkpoint *ck, const dcp_item *item)
{
    const dcp_item *found =
        item->rank < 0 ? dcp_checkpoint_find(ck, item->fqn) : dcp_checkpoint_find_rank(ck, item->fqn, item->rank);
    return found && found->rank == item->rank ? found : NULL;
}

static void add_pair(diff *d, const dcp_item *a, const dcp_item *b)
{
    pair *p = &d->pairs[d->n++];
    *p = (pair){.a = a, .b = b, .kind = compare_kinds(a, b)};
    d->total_bytes += a && b ? a->bytes : 0;
}

static dcp_status make_pairs(diff *d, dcp_error *err)
{
    size_t in_a = dcp_checkpoint_count(d->a), in_b = dcp_checkpoint_count(d->b);
    d->pairs = dcp__calloc(d->ctx, in_a + in_b, sizeof *d->pairs);
    if (!d->pairs) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < in_a; i++) {
        const dcp_item *item = dcp_checkpoint_item(d->a, i);
        add_pair(d, item, counterpart(d->b, item));
    }
    for (size_t i = 0; i < in_b; i++) {
        const dcp_item *item = dcp_checkpoint_item(d->b, i);
        if (!counterpart(d->a, item)) {
            add_pair(d, NULL, item);
        }
    }
    return DCP_OK;
}

/* ---- values ---- */

static dcp_status advance(diff *d, uint64_t bytes, dcp_error *err)
{
    pthread_mutex_lock(&d->lock);
    d->done_bytes += bytes;
    bool goes_on = !d->opts->progress || d->opts->progress(d->opts->user, d->done_bytes, d->total_bytes);
    pthread_mutex_unlock(&d->lock);
    return goes_on ? DCP_OK : dcp__fail(err, DCP_CANCELED, "diff: canceled by the caller");
}

static size_t widest(const pair *p)
{
    size_t a = dcp_dtype_bytes(p->a->dtype), b = dcp_dtype_bytes(p->b->dtype);
    return a > b ? a : b;
}

static dcp_status compare_tensors(diff *d, pair *p, uint8_t *buf, dcp_error *err)
{
    dcp__slabs s;
    uint64_t at = 0;
    size_t elem = dcp_dtype_bytes(p->a->dtype);
    uint8_t *other = buf + SLAB_BYTES;
    dcp_status status = dcp__check_dtype(d->a, p->a, err);
    status = status == DCP_OK ? dcp__check_dtype(d->b, p->b, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    dcp__slabs_init(&s, p->a->ndim, p->a->extents, SLAB_BYTES / (int64_t)widest(p));
    while (status == DCP_OK && dcp__slabs_next(&s)) {
        status = dcp__slabs_read(&s, d->a, p->a, buf, err);
        status = status == DCP_OK ? dcp__slabs_read(&s, d->b, p->b, other, err) : status;
        if (status == DCP_OK) {
            dcp__compare_values(p->a->dtype, buf, p->b->dtype, other, (size_t)s.elems, at, &d->tolerance, &p->values);
            at += (uint64_t)s.elems;
            status = advance(d, (uint64_t)s.elems * elem, err);
        }
    }
    if (status == DCP_OK && !p->kind && p->values.n) {
        p->kind = DCP_DIFF_VALUE;
    }
    return status;
}

/* The repr of a value, cut; "..." if it cannot be had. */
static void print_value(dcp_context *ctx, const dcp_value *v, char out[TEXT_BYTES])
{
    char *text = NULL;
    size_t len;
    if (dcp_value_repr(v, 0, &text, &len, NULL) == DCP_OK) {
        bool is_long = len >= TEXT_BYTES;
        snprintf(out, TEXT_BYTES, is_long ? "%.200s..." : "%s", text);
    } else {
        snprintf(out, TEXT_BYTES, "...");
    }
    dcp_text_free(ctx, text);
}

static dcp_status describe_objects(diff *d, pair *p, const dcp_value *a, const dcp_value *b, dcp_error *err)
{
    char of_a[TEXT_BYTES], of_b[TEXT_BYTES], both[2 * TEXT_BYTES + 8];
    print_value(d->ctx, a, of_a);
    print_value(d->ctx, b, of_b);
    int n = snprintf(both, sizeof both, "%s and %s", of_a, of_b);
    p->kind = DCP_DIFF_VALUE;
    p->text = dcp__strndup(d->ctx, both, (size_t)n);
    return p->text ? DCP_OK : dcp__nomem(err);
}

static dcp_status compare_objects(diff *d, pair *p, dcp_error *err)
{
    dcp_value *a = NULL, *b = NULL;
    dcp_status status = dcp_read_object(d->a, p->a, &a, err);
    status = status == DCP_OK ? dcp_read_object(d->b, p->b, &b, err) : status;
    if (status == DCP_OK && !dcp_value_equal(a, b)) {
        status = describe_objects(d, p, a, b, err);
    }
    dcp_value_free(a);
    dcp_value_free(b);
    return status == DCP_OK ? advance(d, p->a->bytes, err) : status;
}

static dcp_status compare_pair(void *arg, size_t i, int worker, dcp_error *err)
{
    diff *d = arg;
    pair *p = &d->pairs[i];
    bool has_numbers = p->kind == DCP_DIFF_DTYPE && dcp__can_compare(p->a->dtype, p->b->dtype);
    if (p->kind && !has_numbers) {
        return DCP_OK;
    }
    return p->a->kind == DCP_ITEM_OBJECT ? compare_objects(d, p, err) : compare_tensors(d, p, d->bufs[worker], err);
}

static dcp_status compare_all(diff *d, dcp_error *err)
{
    int n = dcp__affordable_threads(d->ctx, (uint64_t)2 * SLAB_BYTES);
    dcp_status status = DCP_OK;
    d->bufs = dcp__calloc(d->ctx, (size_t)n, sizeof *d->bufs);
    if (!d->bufs) {
        return dcp__nomem(err);
    }
    for (int i = 0; i < n && status == DCP_OK; i++) {
        d->bufs[i] = dcp__alloc_aligned(d->ctx, 64, (size_t)2 * SLAB_BYTES);
        status = d->bufs[i] ? DCP_OK : dcp__nomem(err);
    }
    status = status == DCP_OK ? dcp__parallel(d->n, n, compare_pair, d, err) : status;
    for (int i = 0; i < n; i++) {
        dcp__free_aligned(d->ctx, d->bufs[i]);
    }
    dcp__free(d->ctx, d->bufs);
    return status;
}

/* ---- telling ---- */

static const char *kind_name(const dcp_item *item)
{
    return item->kind == DCP_ITEM_TENSOR ? "a tensor" : "an object";
}

/* Position in row-major order to an index for each dimension. */
static void index_of(const dcp_item *item, uint64_t at, int64_t *out)
{
    for (int d = item->ndim - 1; d >= 0; d--) {
        out[d] = (int64_t)(at % (uint64_t)item->extents[d]);
        at /= (uint64_t)item->extents[d];
    }
}

static void describe_values(const pair *p, const int64_t *first, char *out, size_t room)
{
    int64_t elems = 0;
    dcp__elems(p->a->ndim, p->a->extents, &elems);
    snprintf(out, room, "%" PRIu64 " of %" PRId64 " elements differ, by at most %.6g (relative %.6g), the first at %s",
             p->values.n, elems, p->values.max_abs, p->values.max_rel, dcp__print_shape(p->a->ndim, first).text);
}

static void describe(const pair *p, const int64_t *first, char *out, size_t room)
{
    const dcp_item *a = p->a, *b = p->b;
    size_t used;
    switch (p->kind) {
    case DCP_DIFF_MISSING: snprintf(out, room, "only in the first"); break;
    case DCP_DIFF_UNEXPECTED: snprintf(out, room, "only in the second"); break;
    case DCP_DIFF_KIND: snprintf(out, room, "%s and %s", kind_name(a), kind_name(b)); break;
    case DCP_DIFF_SHAPE:
        snprintf(out, room, "shape %s and %s", dcp__print_shape(a->ndim, a->extents).text,
                 dcp__print_shape(b->ndim, b->extents).text);
        break;
    case DCP_DIFF_DTYPE:
        used = (size_t)snprintf(out, room, "%s and %s", dcp_dtype_name(a->dtype), dcp_dtype_name(b->dtype));
        if (p->values.n) {
            used += (size_t)snprintf(out + used, room - used, "; ");
            describe_values(p, first, out + used, room - used);
        }
        break;
    case DCP_DIFF_VALUE:
        if (p->text) {
            snprintf(out, room, "%s", p->text);
        } else {
            describe_values(p, first, out, room);
        }
        break;
    }
}

static void tell(const diff *d, const pair *p)
{
    char text[4 * TEXT_BYTES];
    int64_t first[DCP_MAX_NDIM] = {0};
    if (!p->kind || !d->opts->difference) {
        return;
    }
    if (p->values.n) {
        index_of(p->a, p->values.first, first);
    }
    describe(p, first, text, sizeof text);
    dcp_item_difference out = {.kind = p->kind,
                               .a = p->a,
                               .b = p->b,
                               .text = text,
                               .n_different = p->values.n,
                               .first = p->values.n ? first : NULL,
                               .max_abs = p->values.max_abs,
                               .max_rel = p->values.max_rel};
    d->opts->difference(d->opts->user, &out);
}

static void count(const pair *p, dcp_diff_report *r)
{
    r->n_items += p->a && p->b;
    r->n_differences += p->kind != 0;
    r->n_missing += p->kind == DCP_DIFF_MISSING;
    r->n_unexpected += p->kind == DCP_DIFF_UNEXPECTED;
    r->n_shape += p->kind == DCP_DIFF_SHAPE;
    r->n_dtype += p->kind == DCP_DIFF_DTYPE;
    r->n_kind += p->kind == DCP_DIFF_KIND;
    r->n_value += p->kind == DCP_DIFF_VALUE;
    r->max_abs = p->values.max_abs > r->max_abs ? p->values.max_abs : r->max_abs;
    r->max_rel = p->values.max_rel > r->max_rel ? p->values.max_rel : r->max_rel;
    r->bytes += p->a && p->b && p->a->kind == DCP_ITEM_TENSOR ? p->a->bytes : 0;
}

/* ---- all ---- */

static dcp_status check(dcp_checkpoint *a, dcp_checkpoint *b, const dcp_diff_opts *o, const dcp_diff_report *r, dcp_error *err)
{
    if (!a || !b) {
        return dcp__fail(err, DCP_ARG, "diff: no %s checkpoint", a ? "second" : "first");
    }
    if (o && o->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "diff options: struct_size %zu, expected %zu", o->struct_size, sizeof *o);
    }
    if (r && r->struct_size != sizeof *r) {
        return dcp__fail(err, DCP_ARG, "diff report: struct_size %zu, expected %zu", r->struct_size, sizeof *r);
    }
    if (o && !(o->atol >= 0 && o->rtol >= 0)) {
        return dcp__fail(err, DCP_ARG, "diff: tolerances %g and %g", o->atol, o->rtol);
    }
    return DCP_OK;
}

dcp_status dcp_diff(dcp_checkpoint *a, dcp_checkpoint *b, const dcp_diff_opts *opts, dcp_diff_report *report, dcp_error *err)
{
    static const dcp_diff_opts none = DCP_DIFF_OPTS_INIT;
    dcp_diff_report out = DCP_DIFF_REPORT_INIT;
    dcp_status status = check(a, b, opts, report, err);
    if (status != DCP_OK) {
        return status;
    }
    diff d = {.ctx = a->ctx, .a = a, .b = b, .opts = opts ? opts : &none};
    d.tolerance = (dcp__tolerance){d.opts->atol, d.opts->rtol};
    pthread_mutex_init(&d.lock, NULL);
    status = make_pairs(&d, err);
    status = status == DCP_OK ? compare_all(&d, err) : status;
    for (size_t i = 0; i < d.n; i++) {
        if (status == DCP_OK) {
            tell(&d, &d.pairs[i]);
            count(&d.pairs[i], &out);
        }
        dcp__free(d.ctx, d.pairs[i].text);
    }
    dcp__free(d.ctx, d.pairs);
    pthread_mutex_destroy(&d.lock);
    if (status == DCP_OK && report) {
        *report = out;
    }
    return status;
}
