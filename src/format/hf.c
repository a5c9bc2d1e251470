#include "format/hf.h"

#include <limits.h>
#include <stdlib.h>

#include "format/json_read.h"

#define NONE SIZE_MAX

/* ---- file names ---- */

/* A name of the form <stem>-0000X-of-0000Y.safetensors, or shard-0000R-<stem>-0000X-of-0000Y.safetensors. */
typedef struct numbered {
    dcp_str stem;
    uint32_t rank;        /* R, 0 for the first form */
    uint32_t part, parts; /* X, Y */
} numbered;

static bool ends_with(dcp_str s, const char *end)
{
    size_t n = strlen(end);
    return s.len >= n && memcmp(s.ptr + s.len - n, end, n) == 0;
}

/* Takes a decimal number of at least 5 digits off the end. */
static bool take_number(dcp_str *s, uint32_t *out)
{
    uint64_t value = 0, weight = 1;
    size_t n = 0;
    for (; n < s->len && n < 9 && s->ptr[s->len - 1 - n] >= '0' && s->ptr[s->len - 1 - n] <= '9'; n++) {
        value += weight * (uint64_t)(s->ptr[s->len - 1 - n] - '0');
        weight *= 10;
    }
    *out = (uint32_t)value;
    s->len -= n;
    return n >= 5;
}

static bool take_text(dcp_str *s, const char *text)
{
    bool is_there = ends_with(*s, text);
    s->len -= is_there ? strlen(text) : 0;
    return is_there;
}

/* R of "shard-0000R-<rest>", which is taken off; 0 if the name has no such start. */
static uint32_t take_rank(dcp_str *s)
{
    static const char start[] = "shard-";
    size_t skip = sizeof start - 1, end = skip;
    if (s->len < skip || memcmp(s->ptr, start, skip) != 0) {
        return 0;
    }
    while (end < s->len && s->ptr[end] != '-') {
        end++;
    }
    dcp_str digits = {s->ptr + skip, end - skip};
    uint32_t rank;
    if (end == s->len || !take_number(&digits, &rank) || digits.len > 0) {
        return 0;
    }
    *s = (dcp_str){s->ptr + end + 1, s->len - end - 1};
    return rank;
}

static bool parse_name(dcp_str name, numbered *out)
{
    numbered x = {.stem = name};
    if (!take_text(&x.stem, ".safetensors") || !take_number(&x.stem, &x.parts) || !take_text(&x.stem, "-of-") ||
        !take_number(&x.stem, &x.part) || !take_text(&x.stem, "-")) {
        return false;
    }
    x.rank = take_rank(&x.stem);
    *out = x;
    return true;
}

size_t dcp__hf_stem_bytes(dcp_str name)
{
    numbered x;
    if (parse_name(name, &x)) {
        return (size_t)(x.stem.ptr - name.ptr) + x.stem.len;
    }
    take_text(&name, ".safetensors");
    return name.len;
}

static int compare_names(dcp_str a, dcp_str b)
{
    size_t shared = a.len < b.len ? a.len : b.len;
    int order = shared ? memcmp(a.ptr, b.ptr, shared) : 0;
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

#define COMPARE(a, b) (((a) > (b)) - ((a) < (b)))

static int by_number(const void *a, const void *b)
{
    const numbered *x = a, *y = b;
    int order = COMPARE(x->rank > 0, y->rank > 0);
    order = order ? order : compare_names(x->stem, y->stem);
    order = order ? order : COMPARE(x->parts, y->parts);
    order = order ? order : COMPARE(x->rank, y->rank);
    return order ? order : COMPARE(x->part, y->part);
}

/* ---- whole sequences ---- */

typedef struct builder {
    dcp_context *ctx;
    const dcp__hf_file *files;
    size_t n;
    bool allow_gaps;        /* between numbers of shards */
    dcp__strmap file_index; /* name -> file */
    size_t *first_file;     /* [entry]: where it was met first */
    dcp__metadata *m;
} builder;

static dcp_status missing_file(const numbered *like, uint32_t rank, uint32_t part, dcp_error *err)
{
    if (rank) {
        return dcp__fail(err, DCP_NOT_FOUND,
                         "shard %u is missing: no file shard-%05u-%s-*-of-%05u.safetensors (PyTorch writes none for a rank "
                         "without items: if that is the reason, open with allow_shard_gaps, dcptool --shard-gaps)",
                         rank, rank, dcp__print(like->stem).text, like->parts);
    }
    return dcp__fail(err, DCP_NOT_FOUND, "part %u of %u is missing: no file %s-%05u-of-%05u.safetensors", part, like->parts,
                     dcp__print(like->stem).text, part, like->parts);
}

/* Parts 1 to Y of one stem, sorted. */
static dcp_status check_parts(const numbered *group, size_t n, dcp_error *err)
{
    uint32_t next = 1;
    for (size_t i = 0; i < n; i++, next++) {
        if (group[i].part != next) {
            return missing_file(group, 0, next, err);
        }
    }
    return next <= group->parts ? missing_file(group, 0, next, err) : DCP_OK;
}

/* The shard behind `last` that has a file by our own key. */
static uint32_t next_shard(const dcp__safetensors *facts, uint32_t last)
{
    uint32_t next = last + 1;
    for (size_t i = 0; facts && i < facts->n_own_empty && facts->own_empty[i] <= next; i++) {
        next += facts->own_empty[i] == next;
    }
    return next;
}

/* Shards of all ranks that our own key tells of, or up to the largest there is if there is none; each may have several parts. */
static dcp_status check_shards(const numbered *group, size_t n, const dcp__safetensors *facts, bool allow_gaps, dcp_error *err)
{
    uint32_t last = 0, world = facts ? (uint32_t)facts->own_world : 0;
    for (size_t i = 0; i < n; i++) {
        if (group[i].rank > next_shard(facts, last) && !allow_gaps) {
            return missing_file(group, next_shard(facts, last), 0, err);
        }
        last = group[i].rank;
    }
    if (world && last > world) {
        return dcp__fail(err, DCP_FORMAT, "shard %u of a save by %u ranks", last, world);
    }
    uint32_t next = next_shard(facts, last);
    return next <= world && !allow_gaps ? missing_file(group, next, 0, err) : DCP_OK;
}

static bool same_group(const numbered *a, const numbered *b)
{
    return (a->rank > 0) == (b->rank > 0) && a->parts == b->parts && compare_names(a->stem, b->stem) == 0;
}

static dcp_status check_groups(const builder *b, const numbered *names, size_t n, bool has_index, const dcp__safetensors *facts,
                               dcp_error *err)
{
    const numbered *shards = NULL;
    for (size_t start = 0, end; start < n; start = end) {
        const numbered *group = &names[start];
        for (end = start + 1; end < n && same_group(group, &names[end]); end++) {
        }
        dcp_status status = DCP_OK;
        if (group->rank && shards) {
            status = dcp__fail(err, DCP_FORMAT, "shards of two saves: %s-*-of-%05u and %s-*-of-%05u",
                               dcp__print(shards->stem).text, shards->parts, dcp__print(group->stem).text, group->parts);
        } else if (group->rank) {
            shards = group;
            status = check_shards(group, end - start, facts, b->allow_gaps, err);
        } else if (!has_index) {
            status = check_parts(group, end - start, err);
        }
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

/* A file whose header tells by our own key how many ranks took part; NULL if none does. */
static dcp_status stated_world(const builder *b, const dcp__safetensors **out, dcp_error *err)
{
    size_t by = NONE;
    for (size_t i = 0; i < b->n; i++) {
        int world = b->files[i].header->own_world;
        if (world && by != NONE && world != b->files[by].header->own_world) {
            return dcp__fail(err, DCP_FORMAT, "files of two saves: %s by %d ranks, %s by %d", dcp__print(b->files[by].name).text,
                             b->files[by].header->own_world, dcp__print(b->files[i].name).text, world);
        }
        by = world ? i : by;
    }
    *out = by == NONE ? NULL : b->files[by].header;
    return DCP_OK;
}

static dcp_status check_sequence(builder *b, bool has_index, dcp_error *err)
{
    numbered *names = dcp__alloc(b->ctx, b->n * sizeof *names);
    const dcp__safetensors *facts = NULL;
    dcp_status status = names ? stated_world(b, &facts, err) : dcp__nomem(err);
    if (status == DCP_OK) {
        size_t n = 0;
        for (size_t i = 0; i < b->n; i++) {
            n += parse_name(b->files[i].name, &names[n]);
        }
        qsort(names, n, sizeof *names, by_number);
        status = check_groups(b, names, n, has_index, facts, err);
        b->m->own.world = facts ? facts->own_world : n > 0 ? (int)names[n - 1].rank : 0; /* shards sort last */
    }
    dcp__free(b->ctx, names);
    return status;
}

/* ---- index ---- */

static dcp_status index_files(builder *b, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; status == DCP_OK && i < b->n; i++) {
        status = dcp__strmap_add(&b->file_index, b->files[i].name, i, NULL, err);
    }
    return status;
}

static dcp_status check_mapping(const builder *b, const char *tensor, const json_t *file, dcp_error *err)
{
    if (!json_is_string(file)) {
        return dcp__fail(err, DCP_FORMAT, DCP__HF_INDEX ": file of tensor '%s' is no string",
                         dcp__print(dcp_str_of(tensor)).text);
    }
    dcp_str name = {json_string_value(file), json_string_length(file)};
    uint64_t i, at;
    if (!dcp__strmap_get(&b->file_index, name, &i)) {
        return dcp__fail(err, DCP_NOT_FOUND, DCP__HF_INDEX ": file %s of tensor '%s' is missing", dcp__print(name).text,
                         dcp__print(dcp_str_of(tensor)).text);
    }
    if (!dcp__strmap_get(&b->files[i].header->by_name, dcp_str_of(tensor), &at)) {
        return dcp__fail(err, DCP_FORMAT, DCP__HF_INDEX ": tensor '%s' is not in file %s", dcp__print(dcp_str_of(tensor)).text,
                         dcp__print(name).text);
    }
    return DCP_OK;
}

static dcp_status check_weight_map(const builder *b, json_t *map, dcp_error *err)
{
    if (!json_is_object(map)) {
        return dcp__fail(err, DCP_FORMAT, DCP__HF_INDEX ": no object weight_map");
    }
    for (size_t i = 0; i < b->n && json_object_size(map) == 0; i++) {
        if (b->files[i].header->n_tensors) {
            return dcp__fail(err, DCP_FORMAT, DCP__HF_INDEX ": weight_map is empty, and there are tensors in file %s",
                             dcp__print(b->files[i].name).text);
        }
    }
    const char *tensor;
    json_t *file;
    json_object_foreach(map, tensor, file)
    {
        dcp_status status = check_mapping(b, tensor, file, err);
        if (status != DCP_OK) {
            return status;
        }
    }
    return DCP_OK;
}

static dcp_status check_index(builder *b, dcp_str index, dcp_error *err)
{
    json_t *root;
    dcp_status status = dcp__json_parse(b->ctx, index, 0, DCP__HF_INDEX, &root, err);
    if (status == DCP_OK) {
        status = index_files(b, err);
        if (status == DCP_OK) {
            status = check_weight_map(b, json_object_get(root, "weight_map"), err);
        }
        json_decref(root);
    }
    return status;
}

bool dcp__hf_is_indexed(const json_t *index, const char *name)
{
    const char *tensor;
    json_t *file;
    json_object_foreach(json_object_get(index, "weight_map"), tensor, file)
    {
        if (json_is_string(file) && strcmp(json_string_value(file), name) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- the mark ---- */

static bool is_listed(const json_t *list, const char *name)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *one = json_string_value(json_array_get(list, i));
        if (one && strcmp(one, name) == 0) {
            return true;
        }
    }
    return false;
}

bool dcp__hf_is_current(const json_t *mark, const json_t *index, const char *name)
{
    return index ? dcp__hf_is_indexed(index, name) : !is_listed(json_object_get(mark, "ignored"), name);
}

bool dcp__hf_is_marked(const json_t *mark, const char *name)
{
    return is_listed(json_object_get(mark, "ignored"), name) || is_listed(json_object_get(mark, "model"), name);
}

/* ---- entries: one for each name ---- */

static dcp_status new_entry(builder *b, size_t file, const dcp__st_tensor *t, dcp_error *err)
{
    dcp_str name = dcp__arena_str(&b->m->arena, t->name);
    dcp_key *path = dcp__arena_alloc(&b->m->arena, sizeof *path);
    if (!name.ptr || !path) {
        return dcp__arena_fail(&b->m->arena, err);
    }
    size_t i = b->m->n_entries;
    dcp_status status = dcp__strmap_add(&b->m->by_fqn, name, i, NULL, err);
    if (status != DCP_OK) {
        return status;
    }
    *path = (dcp_key){.string = name};
    b->first_file[i] = file;
    b->m->entries[i] = (dcp__entry){.item = {.fqn = name,
                                             .kind = DCP_ITEM_TENSOR,
                                             .rank = -1,
                                             .dtype = t->dtype,
                                             .ndim = t->ndim,
                                             .n_chunks = 1,
                                             .path = path,
                                             .path_len = 1},
                                    .storage = DCP__NO_STORAGE};
    b->m->n_entries++;
    return DCP_OK;
}

/* A further part of an entry that `first` has begun. */
static dcp_status join_entry(builder *b, dcp__entry *e, size_t first, size_t file, const dcp__st_tensor *t, dcp_error *err)
{
    dcp_str a = b->files[first].name, c = b->files[file].name;
    if (!b->files[first].header->has_sharding_info || !t->saved_offsets) {
        return dcp__fail(err, DCP_FORMAT, "tensor '%s' is in two files, %s and %s, and nothing says which parts they are",
                         dcp__print(t->name).text, dcp__print(a).text, dcp__print(c).text);
    }
    if (e->item.dtype != t->dtype) {
        return dcp__fail(err, DCP_FORMAT, "tensor '%s': %s in file %s, %s in file %s", dcp__print(t->name).text,
                         dcp_dtype_name(e->item.dtype), dcp__print(a).text, dcp_dtype_name(t->dtype), dcp__print(c).text);
    }
    if (e->item.ndim != t->ndim) {
        return dcp__fail(err, DCP_FORMAT, "tensor '%s': %d dimensions in file %s, %d in file %s", dcp__print(t->name).text,
                         e->item.ndim, dcp__print(a).text, t->ndim, dcp__print(c).text);
    }
    e->item.n_chunks++;
    return DCP_OK;
}

static dcp_status collect_entries(builder *b, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t f = 0; f < b->n; f++) {
        const dcp__safetensors *header = b->files[f].header;
        for (size_t i = 0; status == DCP_OK && i < header->n_tensors; i++) {
            uint64_t entry;
            bool is_known = dcp__strmap_get(&b->m->by_fqn, header->tensors[i].name, &entry);
            status = is_known ? join_entry(b, &b->m->entries[entry], b->first_file[entry], f, &header->tensors[i], err)
                              : new_entry(b, f, &header->tensors[i], err);
        }
    }
    return status;
}

/* ---- chunks ---- */

static int64_t *copy_extents(dcp__arena *a, int ndim, const int64_t *extents)
{
    int64_t *copy = dcp__arena_alloc(a, (size_t)ndim * sizeof *copy);
    for (int i = 0; copy && i < ndim; i++) {
        copy[i] = extents ? extents[i] : 0;
    }
    return copy;
}

/* Fills the next free chunk of the entry; n_chunks counts the filled ones here. */
static dcp_status add_chunk(builder *b, dcp__entry *e, size_t file, const dcp__st_tensor *t, dcp_error *err)
{
    dcp__arena *a = &b->m->arena;
    const int64_t *offsets = copy_extents(a, t->ndim, t->saved_offsets), *sizes = copy_extents(a, t->ndim, t->extents);
    if (!offsets || !sizes) {
        return dcp__arena_fail(a, err);
    }
    size_t storage = b->m->n_storages++;
    b->m->storages[storage] =
        (dcp__storage){.offset = t->offset, .length = t->bytes, .file = (uint32_t)file, .form = DCP__FORM_RAW};
    b->m->chunks[e->first_chunk + e->item.n_chunks++] =
        (dcp__chunk){.offsets = offsets, .sizes = sizes, .storage = (uint32_t)storage};
    return DCP_OK;
}

static dcp_status fill_chunks(builder *b, dcp_error *err)
{
    size_t next = 0;
    for (size_t i = 0; i < b->m->n_entries; i++) {
        dcp__entry *e = &b->m->entries[i];
        e->first_chunk = next;
        next += e->item.n_chunks;
        e->item.n_chunks = 0;
    }
    dcp_status status = DCP_OK;
    for (size_t f = 0; f < b->n; f++) {
        const dcp__safetensors *header = b->files[f].header;
        for (size_t i = 0; status == DCP_OK && i < header->n_tensors; i++) {
            uint64_t entry = 0;
            dcp__strmap_get(&b->m->by_fqn, header->tensors[i].name, &entry); /* collect_entries has put it there */
            status = add_chunk(b, &b->m->entries[entry], f, &header->tensors[i], err);
        }
    }
    b->m->n_chunks = next;
    return status;
}

/* ---- global shapes ---- */

/* Our own key, which all files that have it must agree on. */
static dcp_status stated_shape(const builder *b, const dcp__entry *e, const int64_t **out, dcp_error *err)
{
    size_t by = NONE;
    *out = NULL;
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        size_t file = b->m->storages[b->m->chunks[e->first_chunk + i].storage].file;
        const dcp__safetensors *header = b->files[file].header;
        uint64_t at = 0;
        dcp__strmap_get(&header->by_name, e->item.fqn, &at);
        const int64_t *shape = header->tensors[at].global_extents;
        if (shape && by != NONE && memcmp(shape, *out, (size_t)e->item.ndim * sizeof *shape) != 0) {
            return dcp__fail(err, DCP_FORMAT, "tensor '%s': files %s and %s state different global shapes",
                             dcp__print(e->item.fqn).text, dcp__print(b->files[by].name).text,
                             dcp__print(b->files[file].name).text);
        }
        if (shape) {
            *out = shape;
            by = file;
        }
    }
    return DCP_OK;
}

/* Saved offset + extent was checked against overflow with the header. A stated shape is not grown: a chunk beyond it, from a file
 * that states none, contradicts it. */
static dcp_status fit_chunks(const builder *b, const dcp__entry *e, bool is_stated, int64_t *extents, dcp_error *err)
{
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const dcp__chunk *c = &b->m->chunks[e->first_chunk + i];
        for (int d = 0; d < e->item.ndim; d++) {
            int64_t end = c->offsets[d] + c->sizes[d];
            if (is_stated && end > extents[d]) {
                return dcp__fail(err, DCP_FORMAT,
                                 "tensor '%s': file %s reaches to %lld in dimension %d, the stated shape to %lld",
                                 dcp__print(e->item.fqn).text, b->m->files[b->m->storages[c->storage].file].ptr, (long long)end,
                                 d, (long long)extents[d]);
            }
            extents[d] = end > extents[d] ? end : extents[d];
        }
    }
    return DCP_OK;
}

static dcp_status find_shape(builder *b, dcp__entry *e, dcp_error *err)
{
    const int64_t *stated;
    dcp_status status = stated_shape(b, e, &stated, err);
    if (status != DCP_OK) {
        return status;
    }
    int64_t *extents = copy_extents(&b->m->arena, e->item.ndim, stated);
    if (!extents) {
        return dcp__arena_fail(&b->m->arena, err);
    }
    status = fit_chunks(b, e, stated != NULL, extents, err);
    if (status != DCP_OK) {
        return status;
    }
    uint64_t bytes = dcp_dtype_bytes(e->item.dtype);
    for (int d = 0; d < e->item.ndim; d++) {
        if (!dcp__mul_u64(bytes, (uint64_t)extents[d], &bytes)) {
            return dcp__fail(err, DCP_FORMAT, "tensor '%s': number of bytes overflows", dcp__print(e->item.fqn).text);
        }
    }
    e->item.extents = extents;
    e->item.bytes = bytes;
    return DCP_OK;
}

/* ---- the whole ---- */

static dcp_status allocate(builder *b, dcp_error *err)
{
    size_t tensors = 0;
    for (size_t i = 0; i < b->n; i++) {
        tensors += b->files[i].header->n_tensors;
    }
    if (tensors >= DCP__NO_STORAGE || b->n >= UINT32_MAX) {
        return dcp__fail(err, DCP_LIMIT, "%zu tensors in %zu files", tensors, b->n);
    }
    b->first_file = dcp__calloc(b->ctx, tensors, sizeof *b->first_file);
    return b->first_file ? dcp__metadata_reserve(b->m, tensors, tensors, tensors, b->n, 0, err) : dcp__nomem(err);
}

static dcp_status copy_file_names(builder *b, dcp_error *err)
{
    for (size_t i = 0; i < b->n; i++) {
        b->m->files[i] = dcp__arena_str(&b->m->arena, b->files[i].name);
        if (!b->m->files[i].ptr) {
            return dcp__arena_fail(&b->m->arena, err);
        }
        b->m->n_files++;
    }
    return DCP_OK;
}

/* What the headers tell about the writer. DCP's key came with PyTorch 2.8. */
static dcp_status describe_writer(builder *b, dcp_error *err)
{
    dcp__arena *a = &b->m->arena;
    for (size_t i = 0; i < b->n; i++) {
        const dcp__safetensors *header = b->files[i].header;
        b->m->release_from = header->dcp_version.ptr ? 208 : b->m->release_from;
        if (header->own_writer.ptr && !b->m->own.present) {
            b->m->own.present = true;
            b->m->own.writer = dcp__arena_str(a, header->own_writer);
            b->m->own.records = dcp__arena_alloc(a, b->n * sizeof *b->m->own.records);
            b->m->own.n_records = dcp__arena_alloc(a, b->n * sizeof *b->m->own.n_records);
            if (!b->m->own.writer.ptr || !b->m->own.records || !b->m->own.n_records) {
                return dcp__arena_fail(a, err);
            }
            memset(b->m->own.records, 0, b->n * sizeof *b->m->own.records);
            memset(b->m->own.n_records, 0, b->n * sizeof *b->m->own.n_records);
        }
    }
    return DCP_OK;
}

static dcp_status check_directory(builder *b, dcp_str index, dcp_error *err)
{
    dcp_status status = check_sequence(b, index.ptr != NULL, err);
    return status == DCP_OK && index.ptr ? check_index(b, index, err) : status;
}

static dcp_status build(builder *b, dcp_error *err)
{
    dcp_status status = allocate(b, err);
    if (status == DCP_OK) {
        status = copy_file_names(b, err);
    }
    if (status == DCP_OK) {
        status = collect_entries(b, err);
    }
    if (status == DCP_OK) {
        status = fill_chunks(b, err);
    }
    for (size_t i = 0; status == DCP_OK && i < b->m->n_entries; i++) {
        status = find_shape(b, &b->m->entries[i], err);
    }
    return status == DCP_OK ? describe_writer(b, err) : status;
}

/* index NULL: one file on its own. */
static dcp_status make(dcp_context *ctx, const dcp__hf_file *files, size_t n, const dcp_str *index, bool allow_gaps,
                       dcp__metadata **out, dcp_error *err)
{
    builder b = {.ctx = ctx, .files = files, .n = n, .allow_gaps = allow_gaps};
    dcp_status status = dcp__metadata_create(ctx, &b.m, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__strmap_init(&b.file_index, ctx);
    status = index ? check_directory(&b, *index, err) : DCP_OK;
    status = status == DCP_OK ? build(&b, err) : status;
    dcp__strmap_reset(&b.file_index);
    dcp__free(ctx, b.first_file);
    if (status != DCP_OK) {
        dcp__metadata_free(b.m);
        return status;
    }
    *out = b.m;
    return DCP_OK;
}

dcp_status dcp__hf_metadata(dcp_context *ctx, const dcp__hf_file *files, size_t n, dcp_str index, bool allow_gaps,
                            dcp__metadata **out, dcp_error *err)
{
    return make(ctx, files, n, &index, allow_gaps, out, err);
}

dcp_status dcp__safetensors_metadata(dcp_context *ctx, const dcp__hf_file *file, dcp__metadata **out, dcp_error *err)
{
    return make(ctx, file, 1, NULL, false, out, err);
}
