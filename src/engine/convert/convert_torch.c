/* A torch.save file: the tree that the names form, with the elements of its tensors still in the source. */
#include <string.h>

#include "engine/convert/convert.h"
#include "format/archive_writer.h"
#include "format/pickle_writer.h"
#include "state/containers.h"
#include "state/value.h"

typedef struct torch_file {
    dcp__selection *s;
    dcp_context *ctx;
    dcp__cv_view *views; /* [item] */
    dcp_value **bases;   /* [item]: of items that others are views of; else NULL */
    dcp_leaf *leaves;
    size_t n_leaves, next_container;
    dcp_value *root;
    dcp__buf pickle;
    dcp__write_storage *storages;
    size_t n_storages;
    uint64_t *storage_bytes;
    dcp__cv_place *places;
    dcp__cv_file file;
} torch_file;

/* ---- the tree ---- */

/* A tensor to be: its place is the item that it has its elements from, so that those of one item share a storage. */
static dcp_status whole_value(const torch_file *t, const dcp__cv_item *item, dcp_value **out, dcp_error *err)
{
    dcp__lazy lazy = {.storage = (int64_t)item->same_as};
    dcp_tensor shape = dcp_tensor_make(item->dtype, item->ndim, item->extents, NULL);
    return dcp__lazy_tensor_create(t->ctx, &shape, &lazy, out, err);
}

/* Views of a tensor lie in its storage, with the strides that they have in the source. */
static dcp_status tensor_value(const torch_file *t, const dcp__cv_item *item, dcp_value **out, dcp_error *err)
{
    const dcp__cv_view *view = &t->views[item - t->s->items];
    if (view->base == item->same_as) {
        return whole_value(t, item, out, err);
    }
    dcp_value **base = &t->bases[view->base];
    dcp_status status = *base ? DCP_OK : whole_value(t, &t->s->items[view->base], base, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__lazy lazy = {.storage = (int64_t)view->base, .storage_offset = view->offset, .base = *base};
    dcp_tensor shape = dcp_tensor_make(item->dtype, item->ndim, item->extents, NULL);
    shape.strides = dcp__cv_strides(t->s, item->same_as);
    return dcp__lazy_tensor_create(t->ctx, &shape, &lazy, out, err);
}

static dcp_status add_leaf(torch_file *t, const dcp__cv_item *item, dcp_error *err)
{
    dcp_leaf leaf = {.fqn = item->fqn, .path = item->path, .path_len = item->path_len};
    dcp_status status = DCP_OK;
    if (item->kind == DCP_ITEM_TENSOR) {
        status = tensor_value(t, item, &leaf.value, err);
    } else {
        leaf.value = dcp_value_retain(item->object);
    }
    if (status == DCP_OK) {
        t->leaves[t->n_leaves++] = leaf;
    }
    return status;
}

/* The empty dicts that stood before entry `before` of the source. */
static dcp_status add_empty_dicts(torch_file *t, size_t before, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (; t->next_container < t->s->n_containers && status == DCP_OK; t->next_container++) {
        const dcp__container *c = &t->s->containers[t->next_container];
        dcp_leaf leaf = {.path = c->path, .path_len = c->path_len};
        if (c->before > before) {
            break;
        }
        if (c->path_len && c->kind.len == 4 && memcmp(c->kind.ptr, "dict", 4) == 0) {
            status = dcp_dict_create(t->ctx, &leaf.value, err);
            t->n_leaves += status == DCP_OK;
            t->leaves[t->n_leaves - (status == DCP_OK)] = leaf;
        }
    }
    return status;
}

static dcp_status build_tree(torch_file *t, dcp_error *err)
{
    const dcp__selection *s = t->s;
    dcp_status status = DCP_OK;
    t->leaves = dcp__calloc(t->ctx, s->n + s->n_containers + 1, sizeof *t->leaves);
    t->views = dcp__calloc(t->ctx, s->n, sizeof *t->views);
    t->bases = dcp__calloc(t->ctx, s->n, sizeof *t->bases);
    status = t->leaves && t->views && t->bases ? dcp__cv_find_views(s, t->views, err) : dcp__nomem(err);
    if (status != DCP_OK) {
        return status;
    }
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        status = add_empty_dicts(t, (size_t)(s->items[i].entry - s->c->ck->meta->entries), err);
        status = status == DCP_OK ? add_leaf(t, &s->items[i], err) : status;
    }
    status = status == DCP_OK ? add_empty_dicts(t, SIZE_MAX, err) : status;
    if (status == DCP_OK && t->n_leaves == 1 && t->leaves[0].path_len == 0) {
        t->root = dcp_value_retain(t->leaves[0].value); /* a file whose value is no dict */
        return DCP_OK;
    }
    status = status == DCP_OK ? dcp_unflatten(t->ctx, t->leaves, t->n_leaves, &t->root, err) : status;
    return status == DCP_OK ? dcp__restore_containers(t->root, s->containers, s->n_containers, err) : status;
}

/* ---- the archive ---- */

/* As torch.save calls the directory in its zip: the file's name without what is behind the last dot. */
static void prefix_of(const char *to, char out[DCP__ARCHIVE_MAX_PREFIX + 1])
{
    const char *slash = strrchr(to, '/'), *name = slash ? slash + 1 : to, *dot = strrchr(name, '.');
    size_t len = dot && dot > name ? (size_t)(dot - name) : strlen(name);
    if (len == 0 || len > DCP__ARCHIVE_MAX_PREFIX) {
        name = "archive";
        len = 7;
    }
    memcpy(out, name, len);
    out[len] = 0;
}

static dcp_status lay_out(torch_file *t, const char *to, dcp_error *err)
{
    char prefix[DCP__ARCHIVE_MAX_PREFIX + 1];
    dcp__archive_opts opts = {.prefix = prefix, .alignment = DCP__ARCHIVE_ALIGNMENT};
    prefix_of(to, prefix);
    dcp_status status = dcp__pickle_value(&t->pickle, t->root, &t->storages, &t->n_storages, err);
    if (status != DCP_OK) {
        return status;
    }
    t->storage_bytes = dcp__calloc(t->ctx, t->n_storages, sizeof *t->storage_bytes);
    t->places = dcp__calloc(t->ctx, t->n_storages, sizeof *t->places);
    if (!t->storage_bytes || !t->places) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < t->n_storages; i++) {
        t->storage_bytes[i] = t->storages[i].bytes;
    }
    return dcp__archive_layout_create(t->ctx, &opts, t->pickle.data, t->pickle.len, t->storage_bytes, t->n_storages,
                                      &t->file.archive, err);
}

/* Storages of tensors in objects have their elements in memory. */
static bool is_in_source(const dcp__write_storage *storage)
{
    const dcp__lazy *lazy = dcp__value_lazy(storage->tensor);
    return storage->bytes && lazy && lazy->storage >= 0 && !dcp_value_tensor(storage->tensor)->data;
}

static void place_tensors(torch_file *t, const char *to)
{
    dcp__cv_file *f = &t->file;
    f->s = t->s;
    f->name = to;
    f->places = t->places;
    f->storages = t->storages;
    f->n_storages = t->n_storages;
    f->bytes = dcp__archive_length(f->archive);
    for (size_t i = 0; i < t->n_storages; i++) {
        if (is_in_source(&t->storages[i])) {
            t->places[f->n_places++] = (dcp__cv_place){.item = (size_t)dcp__value_lazy(t->storages[i].tensor)->storage,
                                                       .offset = dcp__archive_storage_offset(f->archive, i),
                                                       .storage = i};
        }
    }
}

static void count(const dcp__selection *s, size_t n_places)
{
    size_t n_full = 0;
    for (size_t i = 0; i < s->n; i++) {
        bool is_tensor = s->items[i].kind == DCP_ITEM_TENSOR;
        s->c->report.n_tensors += is_tensor;
        s->c->report.n_objects += !is_tensor;
        n_full += is_tensor && s->items[i].bytes;
    }
    s->c->report.n_shared += n_full - n_places;
}

/* ---- all ---- */

static void reset(torch_file *t)
{
    for (size_t i = 0; t->leaves && i < t->n_leaves; i++) {
        dcp_value_free(t->leaves[i].value);
    }
    for (size_t i = 0; t->bases && i < t->s->n; i++) {
        dcp_value_free(t->bases[i]);
    }
    dcp_value_free(t->root);
    dcp__free(t->ctx, t->views);
    dcp__free(t->ctx, t->bases);
    dcp__free(t->ctx, t->leaves);
    dcp__buf_reset(&t->pickle);
    dcp__free(t->ctx, t->storages);
    dcp__free(t->ctx, t->storage_bytes);
    dcp__free(t->ctx, t->places);
    dcp__archive_layout_free(t->file.archive);
}

dcp_status dcp__cv_to_torch(dcp__selection *s, const char *to, dcp_error *err)
{
    torch_file t = {.s = s, .ctx = s->c->ctx};
    bool was_kept = false;
    dcp__buf_init(&t.pickle, t.ctx);
    dcp_status status = dcp__cv_check_absent(s->c, to, err);
    status = status == DCP_OK ? build_tree(&t, err) : status;
    status = status == DCP_OK ? lay_out(&t, to, err) : status;
    if (status == DCP_OK) {
        place_tensors(&t, to);
        status = dcp__cv_check_space(s->c, "", t.file.bytes, err);
    }
    status = status == DCP_OK ? dcp__cv_write_file(&t.file, &was_kept, err) : status;
    if (status == DCP_OK && !was_kept) {
        status = dcp__cv_publish_file(&t.file, err);
    }
    if (status == DCP_OK) {
        s->c->report.n_kept += was_kept;
        count(s, t.file.n_places);
    }
    reset(&t);
    return status;
}
