/* Which items an output has, what they are called, and which of them are the same elements. */
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/convert/convert.h"
#include "engine/convert/dequantize.h"
#include "state/numbers.h"
#include "state/strided.h"
#include "state/value.h"

#define MAX_NAMED 8 /* names in one message */

/* ---- patterns ---- */

static bool fits(const char *pattern, dcp_str name)
{
    return fnmatch(pattern, name.ptr, 0) == 0;
}

static bool fits_any(const char *const *patterns, size_t n, dcp_str name)
{
    for (size_t i = 0; i < n; i++) {
        if (fits(patterns[i], name)) {
            return true;
        }
    }
    return false;
}

static bool is_selected(const dcp_convert_opts *o, dcp_str name)
{
    return (o->n_include == 0 || fits_any(o->include, o->n_include, name)) && !fits_any(o->exclude, o->n_exclude, name);
}

/* The first part that takes a name; n_parts if none does. */
static size_t part_of(const dcp_convert_opts *o, dcp_str name)
{
    size_t i = 0;
    while (i < o->n_parts && !fits(o->parts[i].names, name)) {
        i++;
    }
    return i;
}

static bool is_wanted(const dcp_convert_opts *o, dcp_str name, size_t part)
{
    return is_selected(o, name) && (part == SIZE_MAX || part_of(o, name) == part);
}

/* The name of an entry in patterns. */
static dcp_status source_name(dcp_save_plan *names, const dcp__entry *e, dcp_write_item *out, dcp_error *err)
{
    return dcp__save_plan_name(names, e->item.fqn, e->item.path, e->item.path_len, e->item.rank, out, err);
}

typedef struct pattern_check {
    const dcp__conversion *c;
    dcp_str *names; /* [entry] */
} pattern_check;

static dcp_status must_match(const pattern_check *p, const char *pattern, bool tensors_only, dcp_error *err)
{
    const dcp__metadata *m = p->c->ck->meta;
    for (size_t i = 0; i < m->n_entries; i++) {
        if ((!tensors_only || m->entries[i].item.kind == DCP_ITEM_TENSOR) && fits(pattern, p->names[i])) {
            return DCP_OK;
        }
    }
    return dcp__fail(err, DCP_NOT_FOUND, "%s: no %s is called \"%s\"", p->c->ck->path, tensors_only ? "tensor" : "item",
                     dcp__print(dcp_str_of(pattern)).text);
}

static dcp_status check_patterns(const pattern_check *p, dcp_error *err)
{
    const dcp_convert_opts *o = p->c->opts;
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < o->n_include && status == DCP_OK; i++) {
        status = must_match(p, o->include[i], false, err);
    }
    for (size_t i = 0; i < o->n_exclude && status == DCP_OK; i++) {
        status = must_match(p, o->exclude[i], false, err);
    }
    for (size_t i = 0; i < o->n_casts && status == DCP_OK; i++) {
        status = must_match(p, o->casts[i].names, true, err);
    }
    for (size_t i = 0; i < o->n_parts && status == DCP_OK; i++) {
        status = must_match(p, o->parts[i].names, false, err);
    }
    for (size_t i = 0; i < p->c->ck->meta->n_entries && o->n_parts && status == DCP_OK; i++) {
        if (is_selected(o, p->names[i]) && part_of(o, p->names[i]) == o->n_parts) {
            status = dcp__fail(err, DCP_NOT_FOUND, "no part takes \"%s\"", dcp__print(p->names[i]).text);
        }
    }
    return status;
}

dcp_status dcp__cv_check_patterns(const dcp__conversion *c, dcp_error *err)
{
    size_t n = c->ck->meta->n_entries;
    pattern_check p = {c, dcp__calloc(c->ctx, n, sizeof *p.names)};
    dcp_save_plan *names = NULL;
    dcp_status status = p.names ? dcp__save_plan_create(c->ctx, &names, err) : dcp__nomem(err);
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        dcp_write_item item;
        status = source_name(names, &c->ck->meta->entries[i], &item, err);
        p.names[i] = item.fqn;
    }
    status = status == DCP_OK ? check_patterns(&p, err) : status;
    dcp_save_plan_free(names);
    dcp__free(c->ctx, p.names);
    return status;
}

/* ---- items ---- */

static bool holds_tensors_alone(const dcp__conversion *c)
{
    return c->opts->to == DCP_TO_SAFETENSORS || c->opts->to == DCP_TO_HF;
}

static dcp_status set_name(dcp__selection *s, const dcp_write_item *from, dcp__cv_item *item, dcp_error *err)
{
    item->path = from->path;
    item->path_len = from->path_len;
    dcp_status status = dcp__edits_apply(&s->c->edits, from->fqn, &s->names->arena, &item->fqn, err);
    bool is_same = status != DCP_OK || item->fqn.ptr == from->fqn.ptr ||
                   (item->fqn.len == from->fqn.len && memcmp(item->fqn.ptr, from->fqn.ptr, from->fqn.len) == 0);
    return is_same
               ? status
               : dcp__renamed_path(&s->names->arena, from->path, from->path_len, item->fqn, &item->path, &item->path_len, err);
}

/* Shape and dtype without casts. */
static dcp_status set_quantized(const dcp__selection *s, dcp__cv_item *item, dcp_error *err)
{
    const dcp_item *from = &item->entry->item;
    dcp_quantized q;
    item->dtype = from->dtype;
    item->ndim = from->ndim;
    item->extents = from->extents;
    if (s->c->opts->dequantize == DCP_DTYPE_NONE || !dcp_quantized_find(s->c->ck, from, &q)) {
        return DCP_OK;
    }
    dcp_quantized *kept = dcp__arena_alloc(&s->names->arena, sizeof *kept);
    if (!kept) {
        return dcp__nomem(err);
    }
    *kept = q;
    item->quantized = kept;
    item->dtype = s->c->opts->dequantize;
    item->ndim = q.ndim;
    item->extents = kept->extents;
    s->c->report.n_dequantized++;
    return DCP_OK;
}

static dcp_status set_tensor(const dcp__selection *s, dcp_str source, dcp__cv_item *item, dcp_error *err)
{
    const dcp_convert_opts *o = s->c->opts;
    const dcp_item *from = &item->entry->item;
    int64_t elems;
    dcp_status status = dcp__check_dtype(s->c->ck, from, err);
    status = status == DCP_OK ? set_quantized(s, item, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < o->n_casts; i++) {
        if (fits(o->casts[i].names, source)) {
            item->dtype = o->casts[i].dtype;
            break;
        }
    }
    if (item->quantized ? dcp__number_class_of(item->dtype) != DCP__NUMBER_REAL : !dcp__can_cast(from->dtype, item->dtype)) {
        return dcp__fail(err, DCP_UNSUPPORTED, "item \"%s\": no cast from %s to %s", dcp__print(source).text,
                         dcp_dtype_name(from->dtype), dcp_dtype_name(item->dtype));
    }
    if (!dcp__elems(item->ndim, item->extents, &elems) ||
        !dcp__mul_u64((uint64_t)elems, dcp_dtype_bytes(item->dtype), &item->bytes)) {
        return dcp__fail(err, DCP_LIMIT, "item \"%s\": number of bytes overflows", dcp__print(source).text);
    }
    item->elems = (uint64_t)elems;
    return DCP_OK;
}

static dcp_status set_object(dcp__selection *s, dcp__cv_item *item, dcp_error *err)
{
    dcp_value *v;
    bool as_record = s->c->opts->to == DCP_TO_DCP; /* if need be */
    dcp_status status = as_record ? dcp__read_for_copy(s->c->ck, s->names, &item->entry->item, &v, err)
                                  : dcp_read_object(s->c->ck, &item->entry->item, &v, err);
    status = status == DCP_OK ? dcp__save_plan_hold(s->names, v, err) : status;
    item->object = status == DCP_OK ? v : NULL;
    return status;
}

static dcp_status add_entry(dcp__selection *s, size_t index, size_t part, dcp_error *err)
{
    dcp__conversion *c = s->c;
    const dcp__entry *e = &c->ck->meta->entries[index];
    dcp__cv_item item = {.entry = e, .kind = e->item.kind};
    dcp_write_item source;
    dcp_status status = source_name(s->names, e, &source, err);
    if (status != DCP_OK || !is_wanted(c->opts, source.fqn, part)) {
        return status;
    }
    if (c->opts->dequantize != DCP_DTYPE_NONE && dcp__is_scales(c->ck, &e->item)) {
        return DCP_OK;
    }
    if (item.kind == DCP_ITEM_OBJECT && holds_tensors_alone(c) && c->opts->objects == DCP_OBJECTS_DROP) {
        c->report.n_objects_dropped++;
        return DCP_OK;
    }
    status = set_name(s, &source, &item, err);
    if (status == DCP_OK) {
        status = item.kind == DCP_ITEM_TENSOR ? set_tensor(s, source.fqn, &item, err) : set_object(s, &item, err);
    }
    if (status == DCP_OK) {
        item.same_as = s->n;
        s->items[s->n++] = item;
    }
    return status;
}

/* ---- names ---- */

static dcp_status check_names(const dcp__selection *s, dcp_error *err)
{
    dcp__strmap names;
    dcp_status status = DCP_OK;
    dcp__strmap_init(&names, s->c->ctx);
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        uint64_t other;
        status = dcp__strmap_add(&names, s->items[i].fqn, i, &other, err);
        if (status == DCP_OK && other != UINT64_MAX) {
            status = dcp__fail(err, DCP_MISMATCH, "\"%s\" and \"%s\" are both called \"%s\"",
                               dcp__print(s->items[other].entry->item.fqn).text, dcp__print(s->items[i].entry->item.fqn).text,
                               dcp__print(s->items[i].fqn).text);
        }
    }
    dcp__strmap_reset(&names);
    return status;
}

static dcp_status check_objects(const dcp__selection *s, dcp_error *err)
{
    char named[400] = "";
    size_t n = 0, used = 0;
    if (!holds_tensors_alone(s->c) || s->c->opts->objects != DCP_OBJECTS_ERROR) {
        return DCP_OK;
    }
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].kind == DCP_ITEM_OBJECT && n++ < MAX_NAMED && used < sizeof named) {
            used += (size_t)snprintf(named + used, sizeof named - used, "%s\"%s\"", n > 1 ? ", " : "",
                                     dcp__print(s->items[i].fqn).text);
        }
    }
    return n == 0 ? DCP_OK
                  : dcp__fail(err, DCP_UNSUPPORTED, "%zu item%s no tensor%s, which this form cannot hold: %s%s", n,
                              n == 1 ? " is" : "s are", n == 1 ? "" : "s", named, n > MAX_NAMED ? ", .." : "");
}

/* ---- what is the same elements ---- */

/* Finds for each tensor the first one of equal tie, dtype and shape. */
static dcp_status find_same(dcp__selection *s, dcp_error *err)
{
    dcp__strmap seen;
    dcp_status status = DCP_OK;
    dcp__strmap_init(&seen, s->c->ctx);
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        dcp__cv_item *item = &s->items[i];
        const dcp_item *from = &item->entry->item;
        bool can_tie = item->kind == DCP_ITEM_TENSOR && !item->quantized;
        status = can_tie ? dcp__tie_of_entry(s->c->ck, item->entry, &item->tie, err) : DCP_OK;
        if (status != DCP_OK || item->tie == 0) {
            continue;
        }
        uint64_t first, shape = dcp__xxh3_64(from->extents, (size_t)from->ndim * sizeof *from->extents);
        uint64_t key[] = {item->tie, (uint64_t)item->dtype, (uint64_t)from->ndim, shape};
        dcp_str text = dcp__arena_str(&s->names->arena, (dcp_str){(const char *)key, sizeof key});
        status = text.ptr ? dcp__strmap_add(&seen, text, i, &first, err) : dcp__nomem(err);
        item->same_as = status == DCP_OK && first != UINT64_MAX ? (size_t)first : i;
    }
    dcp__strmap_reset(&seen);
    return status;
}

static dcp_status drop_aliases(dcp__selection *s)
{
    size_t kept = 0;
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].same_as != i) {
            s->c->report.n_aliases_dropped++;
            continue;
        }
        s->items[kept] = s->items[i];
        s->items[kept].same_as = kept;
        kept++;
    }
    s->n = kept;
    return DCP_OK;
}

static dcp_status fail_alias(const dcp__selection *s, size_t a, size_t b, const char *how, dcp_error *err)
{
    return dcp__fail(err, DCP_MISMATCH, "\"%s\" and \"%s\" %s", dcp__print(s->items[a].fqn).text,
                     dcp__print(s->items[b].fqn).text, how);
}

static dcp_status check_overlaps(const dcp__selection *s, dcp_error *err)
{
    dcp__cv_extent *list;
    size_t n;
    dcp_status status = dcp__cv_list_extents(s, &list, &n, err);
    for (size_t i = 1; i < n && status == DCP_OK; i++) {
        if (list[i].storage == list[i - 1].storage && list[i].begin < list[i - 1].end) {
            status = fail_alias(s, list[i - 1].item, list[i].item, "overlap in the source", err);
        }
    }
    dcp__free(s->c->ctx, list);
    return status;
}

static dcp_status refuse_aliases(const dcp__selection *s, dcp_error *err)
{
    for (size_t i = 0; i < s->n; i++) {
        if (s->items[i].same_as != i) {
            return fail_alias(s, s->items[i].same_as, i, "are the same elements in the source", err);
        }
    }
    return check_overlaps(s, err);
}

static dcp_status handle_aliases(dcp__selection *s, dcp_error *err)
{
    const dcp_convert_opts *o = s->c->opts;
    if (o->to == DCP_TO_DCP || (holds_tensors_alone(s->c) && o->alias == DCP_ALIAS_COPY)) {
        return DCP_OK; /* DCP finds ties by chunks */
    }
    dcp_status status = find_same(s, err);
    if (status != DCP_OK || !holds_tensors_alone(s->c)) {
        return status;
    }
    return o->alias == DCP_ALIAS_DROP ? drop_aliases(s) : refuse_aliases(s, err);
}

/* ---- containers ---- */

static bool is_empty_dict(const dcp__container *c)
{
    return c->path_len && c->kind.len == 4 && memcmp(c->kind.ptr, "dict", 4) == 0;
}

/* What flattening lost, at the places that the new names give it. */
static dcp_status take_containers(dcp__selection *s, size_t part, dcp_error *err)
{
    size_t n;
    const dcp__container *from = dcp__containers_of(s->c->ck, &n);
    dcp_status status = DCP_OK;
    s->containers = dcp__calloc(s->c->ctx, n, sizeof *s->containers);
    if (!s->containers) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        dcp__container out = from[i];
        dcp_str name = {NULL, 0};
        dcp_write_item source = {.path = out.path, .path_len = out.path_len};
        dcp__cv_item item = {0};
        status = dcp__path_name(&s->names->arena, out.path, out.path_len, &name, err);
        source.fqn = name;
        if (status != DCP_OK || (is_empty_dict(&out) && !is_wanted(s->c->opts, name, part))) {
            continue;
        }
        status = out.path_len ? set_name(s, &source, &item, err) : DCP_OK;
        if (out.path_len) {
            out.path = item.path;
            out.path_len = item.path_len;
        }
        s->containers[s->n_containers++] = out;
    }
    return status;
}

/* ---- all ---- */

dcp_status dcp__cv_select(dcp__conversion *c, size_t part, dcp__selection *out, dcp_error *err)
{
    dcp__selection s = {.c = c};
    size_t n = c->ck->meta->n_entries;
    dcp_status status = dcp__save_plan_create(c->ctx, &s.names, err);
    s.items = dcp__calloc(c->ctx, n, sizeof *s.items);
    s.crcs = dcp__calloc(c->ctx, c->ck->meta->n_chunks, sizeof *s.crcs);
    if (status == DCP_OK && (!s.items || !s.crcs)) {
        status = dcp__nomem(err);
    }
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        status = add_entry(&s, i, part, err);
    }
    status = status == DCP_OK ? check_names(&s, err) : status;
    status = status == DCP_OK ? check_objects(&s, err) : status;
    status = status == DCP_OK ? handle_aliases(&s, err) : status;
    status = status == DCP_OK ? take_containers(&s, part, err) : status;
    if (status != DCP_OK) {
        dcp__selection_reset(&s);
        return status;
    }
    *out = s;
    return DCP_OK;
}

void dcp__selection_reset(dcp__selection *s)
{
    if (s->c) {
        dcp__free(s->c->ctx, s->items);
        dcp__free(s->c->ctx, s->containers);
        dcp__free(s->c->ctx, s->crcs);
        dcp_save_plan_free(s->names);
    }
    *s = (dcp__selection){0};
}
