/* Comparing a state with a checkpoint. All differences are found before anything is read. */
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/load/load.h"
#include "state/numbers.h"
#include "state/strided.h"
#include "state/value.h"

#define NAMED_DIFFERENCES 8

typedef struct matcher {
    dcp_checkpoint *ck;
    const dcp_load_opts *opts;
    dcp_load_plan *plan;
    dcp_load_report *report;
    bool *used;    /* [entry index] */
    dcp__buf text; /* the first differences, for the error */
    size_t n_errors;
    size_t n_no_tensors; /* of the state, where it may have tensors alone */
    bool is_dynamic;     /* tensors alone, cast to the dtype of the state's */
    bool out_of_memory;
    dcp_error refusal; /* of the caller, who was told what would be filled */
} matcher;

/* ---- differences ---- */

static size_t *counter(dcp_load_report *r, dcp_difference_kind kind)
{
    switch (kind) {
    case DCP_DIFF_MISSING: return &r->n_missing;
    case DCP_DIFF_UNEXPECTED: return &r->n_unexpected;
    case DCP_DIFF_SHAPE: return &r->n_shape;
    case DCP_DIFF_DTYPE: return &r->n_dtype;
    default: return &r->n_kind;
    }
}

static DCP_PRINTF(5, 6) void differ(matcher *m, dcp_difference_kind kind, bool is_error, dcp_str fqn, const char *fmt, ...)
{
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    ++*counter(m->report, kind);
    if (m->report->difference) {
        m->report->difference(m->report->user, kind, fqn, text);
    }
    if (is_error && m->n_errors++ < NAMED_DIFFERENCES) {
        dcp__buf_printf(&m->text, "%s\"%s\": %s", m->n_errors > 1 ? "; " : "", dcp__print(fqn).text, text);
    }
}

/* ---- names ---- */

static bool matches_any(const char *const *patterns, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (fnmatch(patterns[i], name, 0) == 0) {
            return true;
        }
    }
    return false;
}

static bool is_selected(const dcp_load_opts *o, dcp_str fqn)
{
    return (o->n_include == 0 || matches_any(o->include, o->n_include, fqn.ptr)) &&
           !matches_any(o->exclude, o->n_exclude, fqn.ptr);
}

static dcp_str join(matcher *m, const char *prefix, dcp_str name)
{
    size_t len = strlen(prefix);
    char *text = dcp__arena_alloc(&m->plan->arena, len + name.len + 1);
    if (!text) {
        m->out_of_memory = true;
        return (dcp_str){NULL, 0};
    }
    memcpy(text, prefix, len);
    memcpy(text + len, name.ptr, name.len + 1);
    return (dcp_str){text, len + name.len};
}

/* The checkpoint's name of a leaf; ptr NULL: left out, or out of memory. */
static dcp_str name_in_checkpoint(matcher *m, dcp_str fqn)
{
    const dcp_load_opts *o = m->opts;
    dcp_str name = o->prefix ? join(m, o->prefix, fqn) : fqn;
    if (o->rename && name.ptr) {
        char *renamed = o->rename(o->user, name);
        name = renamed ? join(m, "", dcp_str_of(renamed)) : (dcp_str){NULL, 0};
        free(renamed);
    }
    if (o->comm && name.ptr && matches_any(o->per_rank, o->n_per_rank, fqn.ptr)) {
        char prefix[24];
        snprintf(prefix, sizeof prefix, "rank.%d.", o->comm->rank);
        name = join(m, prefix, name);
    }
    return name;
}

/* ---- one leaf ---- */

static void add_request(matcher *m, const dcp_item *item, const dcp_box *box, const dcp_tensor *dst)
{
    dcp_load_plan *p = m->plan;
    void *array = p->requests;
    m->out_of_memory |= !dcp__grow(p->ctx, &array, &p->cap_requests, p->n_requests + 1, sizeof *p->requests);
    p->requests = array;
    if (!m->out_of_memory) {
        p->requests[p->n_requests++] = (dcp_read_request){item, box ? *box : (dcp_box){NULL, NULL}, *dst};
    }
}

static void add_object(matcher *m, const dcp_leaf *leaf, const dcp_item *item, dcp_str name)
{
    dcp_load_plan *p = m->plan;
    void *array = p->objects;
    m->out_of_memory |= !dcp__grow(p->ctx, &array, &p->cap_objects, p->n_objects + 1, sizeof *p->objects);
    p->objects = array;
    if (!m->out_of_memory) {
        p->objects[p->n_objects++] = (dcp__object_target){leaf, item, name};
    }
}

/* The tensor to be filled for a leaf: its own, or, where the dtype differs, the one that the caller will convert. */
static dcp_value *target_of(matcher *m, const dcp_leaf *leaf, const dcp_item *item)
{
    dcp_load_plan *p = m->plan;
    void *array = p->converted;
    if (item->dtype == dcp_value_dtype(leaf->value) || item->dtype == DCP_DTYPE_NONE || !m->opts->convert) {
        return leaf->value;
    }
    m->out_of_memory |= !dcp__grow(p->ctx, &array, &p->cap_converted, p->n_converted + 1, sizeof(dcp_value *));
    p->converted = array;
    dcp_value *other = m->out_of_memory ? NULL : m->opts->convert(m->opts->user, leaf->fqn, leaf->value, item->dtype);
    if (other) {
        p->converted[p->n_converted++] = other;
    }
    return other ? other : leaf->value;
}

static bool same_form(matcher *m, const dcp_leaf *leaf, const dcp_value *target, const dcp_item *item, int ndim,
                      const int64_t *extents)
{
    dcp_dtype dtype = dcp_value_dtype(target);
    bool is_same = true;
    if (item->ndim != ndim || (ndim && memcmp(item->extents, extents, (size_t)ndim * sizeof *extents) != 0)) {
        differ(m, DCP_DIFF_SHAPE, true, leaf->fqn, "shape %s in the checkpoint, %s in the state",
               dcp__print_shape(item->ndim, item->extents).text, dcp__print_shape(ndim, extents).text);
        is_same = false;
    }
    if (item->dtype != dtype && !(m->is_dynamic && dcp__can_cast(item->dtype, dtype))) {
        differ(m, DCP_DIFF_DTYPE, true, leaf->fqn, "%s in the checkpoint, %s in the state", dcp_dtype_name(item->dtype),
               dcp_dtype_name(dtype));
        is_same = false;
    }
    return is_same;
}

/* Whether a target, sharded or not, has the form of the item. */
static bool fits(matcher *m, const dcp_leaf *leaf, const dcp_value *target, const dcp_item *item)
{
    const dcp_tensor *t = dcp_value_tensor(target);
    int ndim;
    const int64_t *extents;
    if (t) {
        return same_form(m, leaf, target, item, t->ndim, t->extents);
    }
    return dcp_sharded_shape(target, &ndim, &extents) && same_form(m, leaf, target, item, ndim, extents);
}

static void tell_of_target(matcher *m, const dcp_leaf *leaf)
{
    if (m->opts->target && m->refusal.code == DCP_OK) {
        m->refusal.code = m->opts->target(m->opts->user, leaf->fqn, leaf->value, &m->refusal);
    }
}

static void match_tensor(matcher *m, const dcp_leaf *leaf, const dcp_item *item)
{
    dcp_value *target = target_of(m, leaf, item);
    if (!fits(m, leaf, target, item)) {
        return;
    }
    tell_of_target(m, leaf);
    const dcp_tensor *t = dcp_value_tensor(target);
    if (t) {
        add_request(m, item, NULL, t);
        return;
    }
    for (size_t i = 0; i < dcp_value_count(target); i++) {
        dcp_tensor chunk;
        dcp_box box;
        dcp_sharded_chunk(target, i, &chunk, &box);
        add_request(m, item, &box, &chunk);
    }
}

static bool is_tensor(const dcp_value *v)
{
    return dcp_value_kind(v) == DCP_KIND_TENSOR || dcp_value_kind(v) == DCP_KIND_SHARDED;
}

static void match_item(matcher *m, const dcp_leaf *leaf, const dcp_item *item, dcp_str name)
{
    dcp_kind kind = dcp_value_kind(leaf->value);
    bool wants_tensor = is_tensor(leaf->value);
    if (item->kind == DCP_ITEM_TENSOR && wants_tensor) {
        match_tensor(m, leaf, item);
    } else if (item->kind == DCP_ITEM_OBJECT && (!wants_tensor || (m->opts->object && m->opts->objects_for_tensors))) {
        add_object(m, leaf, item, name);
    } else if (item->kind == DCP_ITEM_TENSOR && kind == DCP_KIND_NONE) {
        add_object(m, leaf, item, name); /* nothing there yet: the tensor is allocated */
    } else {
        differ(m, DCP_DIFF_KIND, true, leaf->fqn, "%s in the checkpoint, %s in the state",
               item->kind == DCP_ITEM_TENSOR ? "a tensor" : "an object", wants_tensor ? "a tensor" : "an object");
    }
}

/* A container that was empty, or not there, when the state was made: the checkpoint has names below its own. */
static bool match_below(matcher *m, const dcp_leaf *leaf, dcp_str name)
{
    dcp_kind kind = dcp_value_kind(leaf->value);
    bool found = false;
    if (kind != DCP_KIND_NONE && !(kind == DCP_KIND_LIST && dcp_value_count(leaf->value) == 0)) {
        return false;
    }
    for (size_t i = 0; i < m->ck->meta->n_entries; i++) {
        dcp_str fqn = m->ck->meta->entries[i].item.fqn;
        if (fqn.len > name.len && fqn.ptr[name.len] == '.' && memcmp(fqn.ptr, name.ptr, name.len) == 0) {
            m->used[i] = true;
            found = true;
        }
    }
    if (found) {
        add_object(m, leaf, NULL, name);
    }
    return found;
}

static void match_leaf(matcher *m, const dcp_leaf *leaf)
{
    if (!is_selected(m->opts, leaf->fqn)) {
        return;
    }
    if (m->is_dynamic && !is_tensor(leaf->value)) {
        m->n_no_tensors++;
        differ(m, DCP_DIFF_KIND, true, leaf->fqn, "no tensor in the state, and nothing else can be loaded here");
        return;
    }
    dcp_str name = name_in_checkpoint(m, leaf->fqn);
    if (!name.ptr) {
        return;
    }
    const dcp_item *item = dcp_checkpoint_find(m->ck, name);
    if (item) {
        m->used[dcp__entry_of(item) - m->ck->meta->entries] = true;
        match_item(m, leaf, item, name);
    } else if (dcp_checkpoint_find_rank(m->ck, name, -1) || !match_below(m, leaf, name)) {
        differ(m, DCP_DIFF_MISSING, !m->opts->partial, leaf->fqn, "not in the checkpoint%s%s%s",
               name.len == leaf->fqn.len ? "" : " as \"", name.len == leaf->fqn.len ? "" : dcp__print(name).text,
               name.len == leaf->fqn.len ? "" : "\"");
    }
}

/* ---- all ---- */

/* Checkpoints of 2.1 to 2.3 have whole dicts where later ones have their elements. PyTorch 2.5 and newer take the old names for
 * the whole load if any of them is in the checkpoint and not among the new ones; so do we. */
static dcp_status flatten_alike(matcher *m, dcp_error *err)
{
    dcp_flat *old;
    size_t unused;
    dcp_load_plan *p = m->plan;
    dcp_status status = dcp_flatten(p->ctx, p->state, DCP_FLATTEN_2_4, &p->flat, err);
    if (status != DCP_OK || dcp_flatten(p->ctx, p->state, DCP_FLATTEN_2_1, &old, NULL) != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < dcp_flat_count(old); i++) {
        dcp_str fqn = dcp_flat_leaf(old, i)->fqn;
        if (!dcp_flat_find(p->flat, fqn, &unused) && dcp_checkpoint_find(m->ck, fqn)) {
            dcp_flat_free(p->flat);
            p->flat = old;
            return DCP_OK;
        }
    }
    dcp_flat_free(old);
    return DCP_OK;
}

static void find_unexpected(matcher *m)
{
    bool is_whole = m->opts->n_include == 0 && m->opts->n_exclude == 0;
    for (size_t i = 0; i < m->ck->meta->n_entries; i++) {
        const dcp_item *item = &m->ck->meta->entries[i].item;
        if (!m->used[i] && (item->rank < 0 || is_whole)) {
            differ(m, DCP_DIFF_UNEXPECTED, m->opts->exact, item->fqn, "not in the state%s",
                   item->rank < 0 ? "" : ", one rank's own");
        }
    }
}

static dcp_status match_all(matcher *m, dcp_error *err)
{
    dcp_status status = flatten_alike(m, err);
    m->used = dcp__calloc(m->ck->ctx, m->ck->meta->n_entries, sizeof *m->used);
    if (status != DCP_OK || !m->used) {
        return status != DCP_OK ? status : dcp__nomem(err);
    }
    for (size_t i = 0; i < dcp_flat_count(m->plan->flat); i++) {
        match_leaf(m, dcp_flat_leaf(m->plan->flat, i));
    }
    find_unexpected(m);
    if (m->out_of_memory) {
        return dcp__nomem(err);
    }
    if (m->refusal.code != DCP_OK) {
        return dcp__fail_as(err, &m->refusal);
    }
    if (m->n_errors == 0) {
        return DCP_OK;
    }
    bool only_missing =
        m->report->n_shape + m->report->n_dtype + m->report->n_kind == 0 && !(m->opts->exact && m->report->n_unexpected);
    dcp_status code = m->n_no_tensors ? DCP_UNSUPPORTED : only_missing ? DCP_NOT_FOUND : DCP_MISMATCH;
    return dcp__fail(err, code, "%s: state and checkpoint differ in %zu place%s: %.*s%s", m->ck->path, m->n_errors,
                     m->n_errors == 1 ? "" : "s", (int)m->text.len, m->text.data ? (char *)m->text.data : "",
                     m->n_errors > NAMED_DIFFERENCES ? "; ..." : "");
}

dcp_status dcp__check_load_opts(const dcp_load_opts *opts, dcp_error *err)
{
    return opts->struct_size == sizeof *opts
               ? DCP_OK
               : dcp__fail(err, DCP_ARG, "load options: struct_size %zu, expected %zu", opts->struct_size, sizeof *opts);
}

static dcp_status check_args(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, const dcp_load_report *report,
                             dcp_error *err)
{
    if (!ck || !dcp__has_keys(state)) {
        return dcp__fail(err, DCP_ARG, "load: %s", ck ? "the state is no dict" : "no checkpoint");
    }
    if (opts && dcp__check_load_opts(opts, err) != DCP_OK) {
        return DCP_ARG;
    }
    if (report && report->struct_size != sizeof *report) {
        return dcp__fail(err, DCP_ARG, "load report: struct_size %zu, expected %zu", report->struct_size, sizeof *report);
    }
    return DCP_OK;
}

dcp_status dcp_plan_load(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, dcp_load_plan **out,
                         dcp_load_report *report, dcp_error *err)
{
    return dcp__plan_load(ck, state, opts, false, out, report, err);
}

dcp_status dcp__plan_load(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, bool is_dynamic, dcp_load_plan **out,
                          dcp_load_report *report, dcp_error *err)
{
    static const dcp_load_opts defaults = DCP_LOAD_OPTS_INIT;
    dcp_load_report unseen = DCP_LOAD_REPORT_INIT;
    dcp_status status = out ? check_args(ck, state, opts, report, err) : dcp__fail(err, DCP_ARG, "load: no place for the plan");
    if (status != DCP_OK) {
        return status;
    }
    dcp_load_plan *plan = dcp__calloc(ck->ctx, 1, sizeof *plan);
    if (!plan) {
        return dcp__nomem(err);
    }
    plan->ctx = ck->ctx;
    plan->state = state;
    plan->object = opts ? opts->object : NULL;
    plan->progress = opts ? opts->progress : NULL;
    plan->stream = opts ? opts->stream : NULL;
    plan->user = opts ? opts->user : NULL;
    dcp__arena_init(&plan->arena, ck->ctx, UINT64_MAX);
    matcher m = {
        .ck = ck, .opts = opts ? opts : &defaults, .plan = plan, .report = report ? report : &unseen, .is_dynamic = is_dynamic};
    m.refusal = (dcp_error)DCP_ERROR_INIT;
    dcp__buf_init(&m.text, ck->ctx);
    status = match_all(&m, err);
    dcp__free(ck->ctx, m.used);
    dcp__buf_reset(&m.text);
    if (status != DCP_OK) {
        dcp_load_plan_free(plan);
        return status;
    }
    *out = plan;
    return DCP_OK;
}

dcp_read_request *dcp_load_plan_requests(dcp_load_plan *plan, size_t *n)
{
    *n = plan->n_requests;
    return plan->requests;
}

void dcp_load_plan_free(dcp_load_plan *plan)
{
    if (plan) {
        dcp_flat_free(plan->flat);
        for (size_t i = 0; i < plan->n_converted; i++) {
            dcp_value_free(plan->converted[i]);
        }
        dcp__free(plan->ctx, plan->converted);
        dcp__free(plan->ctx, plan->requests);
        dcp__free(plan->ctx, plan->objects);
        dcp__arena_reset(&plan->arena);
        dcp__free(plan->ctx, plan);
    }
}
