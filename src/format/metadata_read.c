/* From the top object of the metadata pickle to entries, paths and facts about the whole. */
#include "format/metadata_build.h"
#include "format/metadata_extra.h"

#include <stdio.h>

#include "state/strided.h"

/* ---- dicts ---- */

/* Pairs of an OrderedDict with an argument: those of the argument, a dict or a list of pairs, then its own. */
static dcp_status ordered_items(dcp__metadata *md, const dcp__pobject *o, const char *role, uint64_t at, const dcp__pv **items,
                                size_t *n, dcp_error *err)
{
    size_t n_arg, n_own, n_pair;
    const dcp__pv *args = dcp__pv_items(o->args, &n_arg), *own = dcp__pv_items(o->pairs, &n_own);
    dcp__pv arg = n_arg == 1 ? args[0] : 0;
    const dcp__pv *first = dcp__pv_items(arg, &n_arg);
    bool is_dict = arg && dcp__pv_kind(arg) == DCP__P_DICT;
    dcp__pv *made = dcp__arena_alloc(&md->arena, (2 * n_arg + n_own) * sizeof *made);
    if (!made) {
        return dcp__arena_fail(&md->arena, err);
    }
    *n = 0;
    for (size_t i = 0; i < n_arg; i++) {
        const dcp__pv *pair = is_dict ? NULL : dcp__pv_items(first[i], &n_pair);
        if (!is_dict && n_pair != 2) {
            return dcp__mrefuse(at, role, first[i], err);
        }
        made[(*n)++] = is_dict ? first[i] : pair[0];
        if (!is_dict) {
            made[(*n)++] = pair[1];
        }
    }
    if (n_own) {
        memcpy(made + *n, own, n_own * sizeof *own);
    }
    *n += n_own;
    *items = made;
    return DCP_OK;
}

dcp_status dcp__mdict_items(dcp__metadata *md, dcp__pv v, const char *role, uint64_t at, const dcp__pv **items, size_t *n,
                            dcp_error *err)
{
    const dcp__pobject *o = v ? dcp__pv_object(v) : NULL;
    if (v && dcp__pv_kind(v) == DCP__P_DICT) {
        *items = dcp__pv_items(v, n);
        return DCP_OK;
    }
    if (!o || o->form != DCP__PFORM_REDUCE || dcp__mclass_of(o->callable) != DCP__MCLASS_ORDERED_DICT) {
        return dcp__mrefuse(at, role, v, err);
    }
    return ordered_items(md, o, role, at, items, n, err);
}

/* ---- entries ---- */

static dcp_status fill_tensor(dcp__mbuild *b, dcp__mtensor *t, uint64_t at, dcp__entry *e, dcp_error *err)
{
    int64_t elems;
    size_t first = t->first_chunk;
    uint32_t ndim = t->size->node.count;
    if (!dcp__elems((int)ndim, t->size->values, &elems) ||
        !dcp__mul_u64((uint64_t)elems, dcp_dtype_bytes(t->props.dtype), &e->item.bytes)) {
        return dcp__fail_at(err, DCP_FORMAT, at, "item \"%s\": metadata: a tensor of more bytes than 64 bits can count",
                            dcp__print(e->item.fqn).text);
    }
    if (t->is_used) { /* one object under two names: their records differ */
        dcp_status status = dcp__mcopy_chunks(b, &first, t->n_chunks, at, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    t->is_used = true;
    e->item.kind = DCP_ITEM_TENSOR;
    e->item.dtype = t->props.dtype;
    e->other_dtype = t->props.dtype == DCP_DTYPE_NONE ? b->dtypes.texts[t->props.other_dtype] : (dcp_str){NULL, 0};
    e->item.ndim = (int)ndim;
    e->item.extents = t->size->values;
    e->item.n_chunks = t->n_chunks;
    e->first_chunk = first;
    e->requires_grad = t->props.requires_grad;
    e->pin_memory = t->props.pin_memory;
    e->memory_format = t->props.memory_format;
    return DCP_OK;
}

/* The entry of one pair of state_dict_metadata. */
static dcp_status fill_entry(dcp__mbuild *b, dcp_str fqn, dcp__pv value, uint64_t at, dcp__entry *e, dcp_error *err)
{
    uint64_t row;
    *e = (dcp__entry){.item = {.fqn = fqn, .rank = -1}, .storage = DCP__NO_STORAGE};
    if (dcp__mrow_of(value, &row) == DCP__MROW_TENSOR) {
        if (row == DCP__MROW_UNWANTED) {
            b->must_repeat = true;
            return dcp__fail_at(err, DCP_INTERNAL, at, "metadata: a tensor is needed that was given up");
        }
        return fill_tensor(b, &b->tensors[row], at, e, err);
    }
    if (dcp__mclass_of_instance(value) != DCP__MCLASS_OBJECT) {
        dcp_status status = dcp__mrefuse(at, "an item", value, err);
        return dcp__prefix(err, status, "item \"%s\": ", dcp__print(fqn).text);
    }
    e->item.kind = DCP_ITEM_OBJECT;
    e->item.n_chunks = 1;
    return DCP_OK;
}

static dcp_status read_entries(dcp__mbuild *b, dcp__pv dict, uint64_t at, dcp_error *err)
{
    dcp__metadata *md = b->md;
    const dcp__pv *items;
    size_t n;
    dcp_status status = dcp__mdict_items(md, dict, "state_dict_metadata", at, &items, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    md->entries = dcp__alloc(b->ctx, (b->only ? 1 : n / 2) * sizeof *md->entries);
    if (!md->entries) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < n; i += 2) {
        if (!dcp__pv_is_str(items[i])) {
            return dcp__mrefuse(at, "a key of state_dict_metadata", items[i], err);
        }
        dcp__entry made;
        uint64_t existing;
        dcp_str fqn = dcp__pv_text(items[i]);
        if (!dcp__mis_wanted(b, fqn)) {
            continue;
        }
        status = fill_entry(b, fqn, items[i + 1], at, &made, err);
        if (status == DCP_OK) {
            status = dcp__strmap_add(&md->by_fqn, fqn, md->n_entries, &existing, err);
        }
        if (status != DCP_OK) {
            return status;
        }
        /* The later value of a key counts, at the place of the first. */
        md->entries[existing == UINT64_MAX ? md->n_entries++ : existing] = made;
    }
    return DCP_OK;
}

/* ---- paths ---- */

static dcp_status path_key(dcp__mbuild *b, dcp__pv v, uint64_t at, dcp_key *key, dcp_error *err)
{
    *key = (dcp_key){.string = dcp__pv_text(v)};
    if (dcp__pv_is_str(v)) {
        return DCP_OK;
    }
    int64_t i;
    if (!dcp__pv_int(v, &i) || i < 0) {
        return dcp__fail_at(err, DCP_FORMAT, at, "metadata: list index of a path is negative or too large");
    }
    if ((uint64_t)i > b->ctx->limits.max_list_index) {
        return dcp__fail_at(err, DCP_LIMIT, at, "metadata: list index %lld of a path, %llu is allowed", (long long)i,
                            (unsigned long long)b->ctx->limits.max_list_index);
    }
    *key = (dcp_key){.is_int = true, .integer = i};
    return DCP_OK;
}

/* A tuple of strings and integers: what the stock planners write. */
static bool is_path(dcp__pv v)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(v, &n);
    dcp__pkind kind = dcp__pv_kind(v);
    if (n == 0 || (kind != DCP__P_TUPLE && kind != DCP__P_LIST)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (!dcp__pv_is_str(items[i]) && dcp__pv_kind(items[i]) != DCP__P_INT) {
            return false;
        }
    }
    return true;
}

dcp_status dcp__mpath(dcp__mbuild *b, dcp__pv v, uint64_t at, const dcp_key **out, size_t *out_len, dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(v, &n);
    dcp__pnode *node = dcp__pv_is_node(v) ? dcp__pv_node(v) : NULL;
    *out_len = node && node->client ? n : 0;
    if (*out_len) { /* a tuple that is shared is looked at once */
        *out = (const dcp_key *)(uintptr_t)node->client;
        return DCP_OK;
    }
    if (!is_path(v)) {
        return DCP_OK;
    }
    if (n > b->md->ctx->limits.max_depth) { /* trees are built, walked and shown level by level */
        return dcp__fail_at(err, DCP_LIMIT, at, "metadata: a path of %zu keys, at most %u are followed", n,
                            b->md->ctx->limits.max_depth);
    }
    dcp_key *path = dcp__arena_alloc(&b->md->arena, n * sizeof *path);
    if (!path) {
        return dcp__arena_fail(&b->md->arena, err);
    }
    for (size_t i = 0; i < n; i++) {
        dcp_status status = path_key(b, items[i], at, &path[i], err);
        if (status != DCP_OK) {
            return status;
        }
    }
    node->client = (uint64_t)(uintptr_t)path;
    *out = path;
    *out_len = n;
    return DCP_OK;
}

/* Every entry whose path is not known yet is a key of the root. */
static dcp_status default_paths(dcp__mbuild *b, dcp_error *err)
{
    for (size_t i = 0; i < b->md->n_entries; i++) {
        dcp_item *item = &b->md->entries[i].item;
        if (!item->path_len) {
            dcp_key *path = dcp__arena_alloc(&b->md->arena, sizeof *path);
            if (!path) {
                return dcp__arena_fail(&b->md->arena, err);
            }
            *path = (dcp_key){.string = item->fqn};
            item->path = path;
            item->path_len = 1;
        }
    }
    return DCP_OK;
}

/* planner_data is the planner's own: what is not of the stock planners' form is passed over. */
static dcp_status read_paths(dcp__mbuild *b, dcp__pv dict, uint64_t at, dcp_error *err)
{
    const dcp__pv *items = NULL;
    size_t n = 0;
    dcp_status found = dcp__mdict_items(b->md, dict, "planner_data", at, &items, &n, err);
    if (found != DCP_OK) {
        return found == DCP_FORMAT ? default_paths(b, err) : found;
    }
    b->md->has_planner_data = true;
    for (size_t i = 0; i < n; i += 2) {
        uint64_t entry;
        if (!dcp__pv_is_str(items[i]) || !dcp__strmap_get(&b->md->by_fqn, dcp__pv_text(items[i]), &entry)) {
            continue;
        }
        dcp_item *item = &b->md->entries[entry].item;
        dcp_status status = dcp__mpath(b, items[i + 1], at, &item->path, &item->path_len, err);
        if (status != DCP_OK) {
            return dcp__prefix(err, status, "item \"%s\": ", dcp__print(item->fqn).text);
        }
    }
    return default_paths(b, err);
}

/* ---- facts about the whole ---- */

/* A string, or a path of pathlib: its parts joined. ptr NULL for anything else. */
static dcp_status text_or_path(dcp__metadata *md, dcp__pv v, dcp_str *out, dcp_error *err)
{
    const dcp__pobject *o = v ? dcp__pv_object(v) : NULL;
    size_t n, len = 0;
    *out = v && dcp__pv_is_str(v) ? dcp__pv_text(v) : (dcp_str){NULL, 0};
    if (!o || o->form != DCP__PFORM_REDUCE || dcp__mclass_of(o->callable) != DCP__MCLASS_PATH) {
        return DCP_OK;
    }
    const dcp__pv *parts = dcp__pv_items(o->args, &n);
    for (size_t i = 0; i < n; i++) {
        if (!dcp__pv_is_str(parts[i])) {
            return DCP_OK;
        }
        len += dcp__pv_text(parts[i]).len + 1;
    }
    char *text = dcp__arena_alloc(&md->arena, len + 1), *end = text;
    if (!text) {
        return dcp__arena_fail(&md->arena, err);
    }
    for (size_t i = 0; i < n; i++) {
        dcp_str part = dcp__pv_text(parts[i]);
        if (end != text && end[-1] != '/') {
            *end++ = '/';
        }
        memcpy(end, part.ptr, part.len);
        end += part.len;
    }
    *end = 0;
    *out = (dcp_str){text, (size_t)(end - text)};
    return DCP_OK;
}

static dcp_status read_storage_meta(dcp__mbuild *b, dcp__pv v, dcp_error *err)
{
    dcp__pv fields[DCP__MFIELD_COUNT] = {0};
    size_t n;
    if (dcp__mclass_of_instance(v) != DCP__MCLASS_STORAGE_META ||
        !dcp__mfields_read(dcp__pv_object(v)->state, fields, DCP__MFIELD_COUNT, &n)) {
        return DCP_OK;
    }
    b->has_storage_meta = true;
    b->has_modules = fields[DCP__MFIELD_MODULES] != 0;
    dcp__pv id = fields[DCP__MFIELD_SAVE_ID];
    b->md->save_id = id && dcp__pv_is_str(id) ? dcp__pv_text(id) : (dcp_str){NULL, 0};
    return text_or_path(b->md, fields[DCP__MFIELD_CHECKPOINT_ID], &b->md->checkpoint_id, err);
}

typedef struct releases {
    int from, to;
} releases;

/* Which releases of PyTorch write this form (formats.md 10). */
static releases guess_releases(const dcp__mbuild *b)
{
    const dcp__metadata *md = b->md;
    bool has_version = md->version.ptr != NULL, has_tensors = b->has_old_properties || b->has_new_properties;
    bool is_mixed = b->has_old_properties && (b->has_new_properties || has_version || b->has_storage_meta || b->has_strides);
    if (md->own.present || is_mixed) {
        return (releases){0, 0};
    }
    if (b->has_strides) {
        return has_version ? (releases){215, 215} : (releases){0, 0};
    }
    if (has_version) {
        return (releases){209, has_tensors ? 214 : 215};
    }
    if (b->has_modules || b->has_descriptors) {
        return (releases){207, 208};
    }
    if (b->has_storage_meta) {
        return (releases){204, 206};
    }
    return (releases){b->has_new_properties ? 203 : 201, b->has_old_properties ? 202 : 203};
}

/* ---- the whole ---- */

/* The state of the top object: of class Metadata, or of a subclass of a framework's own. */
static dcp_status top_fields(dcp__pv root, uint64_t at, dcp__pv fields[DCP__MFIELD_COUNT], dcp_error *err)
{
    const dcp__pobject *o = dcp__pv_object(root);
    dcp__mclass is = dcp__mclass_of_instance(root);
    size_t n;
    if ((is != DCP__MCLASS_METADATA && is != DCP__MCLASS_OTHER) || !dcp__mfields_read(o->state, fields, DCP__MFIELD_COUNT, &n)) {
        return dcp__mrefuse(at, "the top object", root, err);
    }
    bool is_known = is == DCP__MCLASS_METADATA;
    if (!is_known && (!fields[DCP__MFIELD_STATE_DICT_METADATA] || !fields[DCP__MFIELD_STORAGE_DATA])) {
        return dcp__mrefuse(at, "the top object", root, err);
    }
    return DCP_OK;
}

/* The table of chunks down to those of the one entry that is wanted. */
static void keep_only_chunks(dcp__metadata *md)
{
    size_t n = md->n_entries ? md->entries[0].item.n_chunks : 0;
    bool is_tensor = n && md->entries[0].item.kind == DCP_ITEM_TENSOR;
    if (is_tensor) {
        memmove(md->chunks, md->chunks + md->entries[0].first_chunk, n * sizeof *md->chunks);
        md->entries[0].first_chunk = 0;
    }
    md->n_chunks = is_tensor ? n : 0;
}

static bool is_known_field(dcp__pv key)
{
    dcp__mfield field = dcp__mfield_of(key);
    return field >= DCP__MFIELD_STATE_DICT_METADATA && field <= DCP__MFIELD_LIBDCP;
}

static dcp_status read_extras(dcp__mbuild *b, dcp__pv state, dcp_error *err)
{
    size_t n;
    const dcp__pv *items = dcp__pv_items(state, &n);
    if (dcp__pv_kind(state) != DCP__P_DICT) { /* (dict or None, dict) */
        items = dcp__pv_items(items[1], &n);
    }
    return dcp__mextras_take(&b->md->arena, items, n, is_known_field, b->source_bytes, &b->md->extras, err);
}

static dcp_status read_top(dcp__mbuild *b, const dcp__pickle *p, dcp_error *err)
{
    dcp__pv fields[DCP__MFIELD_COUNT] = {0};
    const dcp__pobject *top = dcp__pv_object(p->root);
    uint64_t at = top ? top->start : 0;
    dcp__metadata *md = b->md;
    dcp_status status = top_fields(p->root, at, fields, err);
    if (status == DCP_OK) {
        status = read_entries(b, fields[DCP__MFIELD_STATE_DICT_METADATA], at, err);
    }
    if (status == DCP_OK && b->only) {
        keep_only_chunks(md);
    }
    if (status == DCP_OK) {
        status = read_paths(b, fields[DCP__MFIELD_PLANNER_DATA], at, err);
    }
    if (status == DCP_OK) {
        status = dcp__mjoin(b, fields[DCP__MFIELD_STORAGE_DATA], at, err);
    }
    if (status == DCP_OK) {
        status = read_storage_meta(b, fields[DCP__MFIELD_STORAGE_META], err);
    }
    if (status != DCP_OK) {
        return status;
    }
    dcp__pv version = fields[DCP__MFIELD_VERSION];
    md->version = version && dcp__pv_is_str(version) ? dcp__pv_text(version) : (dcp_str){NULL, 0};
    md->files = b->files.texts;
    md->n_files = b->files.n;
    b->files.texts = NULL;
    status = dcp__mown_read(b, fields[DCP__MFIELD_LIBDCP], at, err);
    if (status == DCP_OK && !b->only) {
        status = read_extras(b, top->state, err);
    }
    releases made = guess_releases(b);
    md->release_from = made.from;
    md->release_to = made.to;
    return status;
}

static dcp_status read_once(dcp__mbuild *b, const dcp__source *src, dcp_error *err)
{
    dcp__pickle pickle;
    dcp__pickle_hooks hooks = dcp__mhooks(b);
    dcp_status status = dcp__pickle_read(b->ctx, src, 0, &hooks, &pickle, err);
    if (status != DCP_OK) {
        return status;
    }
    b->md->arena = pickle.arena; /* names, shapes and paths stay where the machine put them */
    return read_top(b, &pickle, err);
}

/* Back to the start, after guesses about what is wanted were wrong. */
static void forget(dcp__mbuild *b)
{
    dcp__mbuild_reset(b);
    b->is_careful = true;
    dcp__free(b->ctx, b->md->entries);
    b->md->entries = NULL;
    b->md->n_entries = 0;
    b->md->has_planner_data = false;
    dcp__strmap_reset(&b->md->by_fqn);
    dcp__arena_reset(&b->md->arena);
}

static dcp_status read_all(dcp__mbuild *b, const dcp__source *src, dcp_error *err)
{
    dcp_status status = dcp__mtrailer_check(b->ctx, src, &b->md->has_trailer, err);
    if (status != DCP_OK) {
        return status;
    }
    status = read_once(b, src, err);
    if (b->must_repeat) {
        b->must_repeat = false;
        forget(b);
        status = read_once(b, src, err);
    }
    return status;
}

dcp_status dcp__metadata_read(dcp_context *ctx, const dcp__source *src, const dcp_str *only, dcp__metadata **out, dcp_error *err)
{
    dcp__mbuild b = {.ctx = ctx, .only = only, .source_bytes = src->size, .work_left = src->size, .transforms_cap = 1};
    dcp_status status = dcp__metadata_create(ctx, &b.md, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__strmap_init(&b.names.map, ctx);
    dcp__strmap_init(&b.files.map, ctx);
    dcp__strmap_init(&b.dtypes.map, ctx);
    status = read_all(&b, src, err);
    dcp__strmap_reset(&b.names.map);
    dcp__strmap_reset(&b.files.map);
    dcp__strmap_reset(&b.dtypes.map);
    dcp__free(ctx, b.names.texts);
    dcp__free(ctx, b.files.texts);
    dcp__free(ctx, b.dtypes.texts);
    dcp__free(ctx, b.tensors);
    dcp__free(ctx, b.indexes);
    if (status != DCP_OK) {
        dcp__metadata_free(b.md);
        return status;
    }
    *out = b.md;
    return DCP_OK;
}
