#include "format/metadata_writer.h"

#include <string.h>

#include "base/checked.h"
#include "base/hash.h"
#include "format/metadata_words.h"
#include "format/pickle_emit.h"

#define BATCH 1000     /* elements of one APPENDS or SETITEMS, as Python has it */
#define KNOWN_DEPTH 16 /* path elements that are compared with the path before */
#define NOT_YET UINT32_MAX
#define RELEASE_NEW_PROPERTIES 203
#define RELEASE_STORAGE_META 204
#define RELEASE_TRANSFORMS 207

/* Who a storage belongs to: an object, or chunk `chunk` (of its entry) of a tensor. */
typedef struct owner {
    uint32_t entry, chunk;
} owner;

typedef struct writer {
    const dcp__metadata *m;
    dcp__buf *out;
    uint32_t n_memo;
    uint32_t dtypes[DCP_DTYPE_COUNT]; /* memo index, or NOT_YET; so are all below */
    uint32_t zeros[DCP_MAX_NDIM + 1]; /* a Size of zeros of that many dimensions */
    uint32_t *fqns;                   /* [entry] */
    uint32_t *offsets;                /* [chunk] */
    uint32_t *files;                  /* [file] */
    uint32_t *transforms;             /* [transforms] */
    struct {
        dcp_str text;
        uint32_t index;
    } path[KNOWN_DEPTH]; /* of the path before */
} writer;

static void op(writer *w, uint8_t opcode)
{
    dcp__buf_put_byte(w->out, opcode);
}

static void get(writer *w, uint32_t index)
{
    dcp__emit_binget(w->out, index);
}

static uint32_t memoize(writer *w)
{
    op(w, OP_MEMOIZE);
    return w->n_memo++;
}

/* Fetches what `*index` remembers, or returns true: to be written now, and memoised. */
static bool is_new(writer *w, const uint32_t *index)
{
    if (*index != NOT_YET) {
        get(w, *index);
    }
    return *index == NOT_YET;
}

static void put_word(writer *w, const char *text)
{
    dcp__put_text(w->out, (dcp_str){text, strlen(text)});
}

static void put_text_or_none(writer *w, dcp_str text)
{
    if (text.ptr) {
        dcp__put_text(w->out, text);
    } else {
        op(w, OP_NONE);
    }
}

/* cls.__new__(cls), then an empty dict for its state. */
static void begin_object(writer *w, dcp__word class)
{
    get(w, class);
    dcp__buf_put(w->out, (const uint8_t[]){OP_EMPTY_TUPLE, OP_NEWOBJ, OP_EMPTY_DICT, OP_MARK}, 4);
}

static void end_object(writer *w)
{
    dcp__buf_put(w->out, (const uint8_t[]){OP_SETITEMS, OP_BUILD}, 2);
}

/* Opens and closes batches around element i of n. */
static void before_element(writer *w, size_t i)
{
    if (i % BATCH == 0) {
        op(w, OP_MARK);
    }
}

static void after_element(writer *w, size_t i, size_t n, uint8_t opcode)
{
    if ((i + 1) % BATCH == 0 || i + 1 == n) {
        op(w, opcode);
    }
}

static void begin_tuple(writer *w, size_t n)
{
    if (n > 3) {
        op(w, OP_MARK);
    }
}

static void end_tuple(writer *w, size_t n)
{
    static const uint8_t ops[] = {OP_EMPTY_TUPLE, OP_TUPLE1, OP_TUPLE2, OP_TUPLE3};
    op(w, n > 3 ? OP_TUPLE : ops[n]);
}

/* ---- tensors ---- */

static void put_size(writer *w, int ndim, const int64_t *v)
{
    get(w, DCP__W_SIZE);
    begin_tuple(w, (size_t)ndim);
    for (int i = 0; i < ndim; i++) {
        dcp__emit_int(w->out, v[i]);
    }
    end_tuple(w, (size_t)ndim);
    dcp__buf_put(w->out, (const uint8_t[]){OP_TUPLE1, OP_REDUCE}, 2);
}

static bool is_zero(int ndim, const int64_t *v)
{
    int64_t any = 0;
    for (int i = 0; i < ndim; i++) {
        any |= v[i];
    }
    return any == 0;
}

/* Offsets come twice, here and in the key of the record; zeros come all the time. */
static uint32_t put_offsets(writer *w, int ndim, const int64_t *offsets)
{
    uint32_t *zeros = &w->zeros[ndim], index;
    bool all_zero = is_zero(ndim, offsets);
    if (all_zero && !is_new(w, zeros)) {
        return *zeros;
    }
    put_size(w, ndim, offsets);
    index = memoize(w);
    if (all_zero) {
        *zeros = index;
    }
    return index;
}

static void put_properties(writer *w, const dcp__entry *e)
{
    uint32_t *dtype = &w->dtypes[e->item.dtype];
    get(w, DCP__W_PROPERTIES);
    dcp__buf_put(w->out, (const uint8_t[]){OP_EMPTY_TUPLE, OP_NEWOBJ, OP_MARK}, 3);
    if (is_new(w, dtype)) {
        dcp__put_global(w->out, "torch", dcp_dtype_name(e->item.dtype));
        *dtype = memoize(w);
    }
    get(w, DCP__W_STRIDED);
    op(w, e->requires_grad ? OP_NEWTRUE : OP_NEWFALSE);
    get(w, DCP__W_FORMATS + e->memory_format);
    op(w, e->pin_memory ? OP_NEWTRUE : OP_NEWFALSE);
    dcp__buf_put(w->out, (const uint8_t[]){OP_TUPLE, OP_BUILD}, 2);
}

/* Most chunks of a tensor have one shape, which is then fetched. */
static void put_chunks(writer *w, const dcp__entry *e)
{
    const dcp__chunk *chunks = w->m->chunks + e->first_chunk;
    int ndim = e->item.ndim;
    const int64_t *last = NULL;
    uint32_t last_index = NOT_YET;
    op(w, OP_EMPTY_LIST);
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        before_element(w, i);
        begin_object(w, DCP__W_CHUNK);
        get(w, DCP__W_KEY_OFFSETS);
        w->offsets[e->first_chunk + i] = put_offsets(w, ndim, chunks[i].offsets);
        get(w, DCP__W_KEY_SIZES);
        if (last && (ndim == 0 || memcmp(last, chunks[i].sizes, (size_t)ndim * sizeof *last) == 0)) {
            get(w, last_index);
        } else {
            put_size(w, ndim, chunks[i].sizes);
            last = chunks[i].sizes;
            last_index = memoize(w);
        }
        end_object(w);
        after_element(w, i, e->item.n_chunks, OP_APPENDS);
    }
}

static void put_tensor(writer *w, const dcp__entry *e)
{
    begin_object(w, DCP__W_TENSOR_STORAGE);
    get(w, DCP__W_KEY_PROPERTIES);
    put_properties(w, e);
    get(w, DCP__W_KEY_SIZE);
    put_size(w, e->item.ndim, e->item.extents);
    get(w, DCP__W_KEY_CHUNKS);
    put_chunks(w, e);
    end_object(w);
}

static void put_state_dict(writer *w)
{
    op(w, OP_EMPTY_DICT);
    for (size_t i = 0; i < w->m->n_entries; i++) {
        const dcp__entry *e = &w->m->entries[i];
        before_element(w, i);
        dcp__put_text(w->out, e->item.fqn);
        w->fqns[i] = memoize(w);
        if (e->item.kind == DCP_ITEM_TENSOR) {
            put_tensor(w, e);
        } else {
            get(w, DCP__W_BYTES_STORAGE);
            dcp__buf_put(w->out, (const uint8_t[]){OP_EMPTY_TUPLE, OP_NEWOBJ}, 2);
        }
        after_element(w, i, w->m->n_entries, OP_SETITEMS);
    }
}

/* ---- paths ---- */

static bool same(dcp_str a, dcp_str b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}

/* Neighbours mostly stand below the same containers. */
static void put_path_text(writer *w, size_t depth, dcp_str text)
{
    if (depth >= KNOWN_DEPTH) {
        dcp__put_text(w->out, text);
    } else if (w->path[depth].text.ptr && same(w->path[depth].text, text)) {
        get(w, w->path[depth].index);
    } else {
        dcp__put_text(w->out, text);
        w->path[depth].text = text;
        w->path[depth].index = memoize(w);
    }
}

static void put_path(writer *w, const dcp_key *path, size_t len)
{
    begin_tuple(w, len);
    for (size_t i = 0; i < len; i++) {
        if (path[i].is_int) {
            dcp__emit_int(w->out, path[i].integer);
        } else {
            put_path_text(w, i, path[i].string);
        }
    }
    end_tuple(w, len);
}

static void put_planner_data(writer *w)
{
    op(w, OP_EMPTY_DICT);
    for (size_t i = 0; i < w->m->n_entries; i++) {
        const dcp_item *item = &w->m->entries[i].item;
        bool at_root =
            item->path_len == 0 || (item->path_len == 1 && !item->path[0].is_int && same(item->path[0].string, item->fqn));
        before_element(w, i);
        get(w, w->fqns[i]);
        if (at_root) {
            get(w, w->fqns[i]);
            op(w, OP_TUPLE1);
        } else {
            put_path(w, item->path, item->path_len);
        }
        after_element(w, i, w->m->n_entries, OP_SETITEMS);
    }
}

/* ---- storages ---- */

static void put_index(writer *w, const owner *o)
{
    const dcp__entry *e = &w->m->entries[o->entry];
    begin_object(w, DCP__W_INDEX);
    get(w, DCP__W_KEY_FQN);
    get(w, w->fqns[o->entry]);
    get(w, DCP__W_KEY_INDEX);
    if (e->item.kind == DCP_ITEM_TENSOR) {
        dcp__emit_int(w->out, o->chunk);
        get(w, DCP__W_KEY_OFFSET);
        get(w, w->offsets[e->first_chunk + o->chunk]);
    } else {
        op(w, OP_NONE);
    }
    end_object(w);
}

/* "a/1,b/1" -> ["a/1", "b/1"] */
static void put_transforms(writer *w, uint32_t i)
{
    uint32_t *index = &w->transforms[i];
    dcp_str rest = w->m->transforms[i];
    if (!is_new(w, index)) {
        return;
    }
    op(w, OP_EMPTY_LIST);
    op(w, OP_MARK);
    while (rest.len) {
        const char *comma = memchr(rest.ptr, ',', rest.len);
        size_t len = comma ? (size_t)(comma - rest.ptr) : rest.len;
        dcp__put_text(w->out, (dcp_str){rest.ptr, len});
        len += comma != NULL;
        rest = (dcp_str){rest.ptr + len, rest.len - len};
    }
    op(w, OP_APPENDS);
    *index = memoize(w);
}

static void put_storage(writer *w, const dcp__storage *s)
{
    uint32_t *file = &w->files[s->file];
    begin_object(w, DCP__W_STORAGE_INFO);
    get(w, DCP__W_KEY_PATH);
    if (is_new(w, file)) {
        dcp__put_text(w->out, w->m->files[s->file]);
        *file = memoize(w);
    }
    get(w, DCP__W_KEY_OFFSET);
    dcp__emit_int(w->out, (int64_t)s->offset);
    get(w, DCP__W_KEY_LENGTH);
    dcp__emit_int(w->out, (int64_t)s->length);
    if (s->transforms) {
        get(w, DCP__W_KEY_TRANSFORMS);
        put_transforms(w, s->transforms);
    }
    end_object(w);
}

/* Owners by storage: those of storage s are owners[first[s]] to owners[first[s + 1] - 1]. Tied tensors share one. */
typedef struct owners {
    uint32_t *first;
    owner *list;
} owners;

static void put_storage_data(writer *w, const owners *by_storage)
{
    size_t n = by_storage->first[w->m->n_storages], i = 0;
    op(w, OP_EMPTY_DICT);
    for (size_t s = 0; s < w->m->n_storages; s++) {
        for (; i < by_storage->first[s + 1]; i++) {
            before_element(w, i);
            put_index(w, &by_storage->list[i]);
            put_storage(w, &w->m->storages[s]);
            after_element(w, i, n, OP_SETITEMS);
        }
    }
}

static size_t parts_of(const dcp__entry *e)
{
    return e->item.kind == DCP_ITEM_TENSOR ? e->item.n_chunks : 1;
}

static uint32_t storage_of(const dcp__metadata *m, const dcp__entry *e, size_t part)
{
    return e->item.kind == DCP_ITEM_TENSOR ? m->chunks[e->first_chunk + part].storage : e->storage;
}

/* A counting sort: first[s + 1] counts, then says where storage s's owners end, and is moved back while they are filled in. */
static void sort_owners(const dcp__metadata *m, owners *o)
{
    for (size_t i = 0; i < m->n_entries; i++) {
        for (size_t part = 0; part < parts_of(&m->entries[i]); part++) {
            uint32_t s = storage_of(m, &m->entries[i], part);
            o->first[s + 1] += s != DCP__NO_STORAGE; /* [0] takes what has none */
        }
    }
    for (size_t s = 0; s < m->n_storages; s++) {
        o->first[s + 1] += o->first[s];
    }
    o->first[m->n_storages + 1] = o->first[m->n_storages];
    for (size_t i = m->n_entries; i-- > 0;) {
        for (size_t part = parts_of(&m->entries[i]); part-- > 0;) {
            uint32_t s = storage_of(m, &m->entries[i], part);
            if (s != DCP__NO_STORAGE) {
                o->list[--o->first[s + 1]] = (owner){(uint32_t)i, (uint32_t)part};
            }
        }
    }
    memmove(o->first, o->first + 1, (m->n_storages + 1) * sizeof *o->first); /* ends have become starts */
}

/* ---- our own field ---- */

static void put_bytes(writer *w, const void *bytes, size_t len)
{
    if (len <= UINT8_MAX) {
        dcp__emit_op(w->out, OP_SHORT_BINBYTES, len, 1);
    } else if (len <= UINT32_MAX) {
        dcp__emit_op(w->out, OP_BINBYTES, len, 4);
    } else {
        dcp__emit_op(w->out, OP_BINBYTES8, len, 8);
    }
    dcp__buf_put(w->out, bytes, len);
}

static void put_records(writer *w)
{
    const dcp__own_facts *own = &w->m->own;
    bool is_open = false;
    op(w, OP_EMPTY_DICT);
    for (size_t i = 0; own->records && i < w->m->n_files; i++) {
        if (own->n_records[i]) {
            if (!is_open) {
                op(w, OP_MARK);
                is_open = true;
            }
            dcp__put_text(w->out, w->m->files[i]);
            put_bytes(w, own->records[i], own->n_records[i] * sizeof *own->records[i]);
        }
    }
    if (is_open) {
        op(w, OP_SETITEMS);
    }
}

static void put_containers(writer *w)
{
    const dcp__own_facts *own = &w->m->own;
    op(w, OP_EMPTY_LIST);
    for (size_t i = 0; i < own->n_containers; i++) {
        const dcp__container *c = &own->containers[i];
        before_element(w, i);
        op(w, OP_EMPTY_LIST);
        op(w, OP_MARK);
        put_path(w, c->path, c->path_len);
        dcp__put_text(w->out, c->kind);
        if (c->before <= INT64_MAX) {
            dcp__emit_int(w->out, (int64_t)c->before);
        }
        op(w, OP_APPENDS);
        after_element(w, i, own->n_containers, OP_APPENDS);
    }
}

/* Names and values of what was read, but not known, between others. */
static void put_extras(writer *w, const dcp__extras *extras)
{
    for (size_t i = 0; i < extras->n; i++) {
        dcp__put_text(w->out, extras->list[i].name);
        dcp__buf_put(w->out, extras->list[i].opcodes.ptr, extras->list[i].opcodes.len);
    }
}

static void put_own(writer *w)
{
    const dcp__own_facts *own = &w->m->own;
    op(w, OP_EMPTY_DICT);
    op(w, OP_MARK);
    put_word(w, "schema");
    dcp__emit_int(w->out, 1);
    put_word(w, "writer");
    put_word(w, "libdcp " DCP_VERSION_STRING);
    if (own->save_id.ptr) {
        put_word(w, "save_id");
        dcp__put_text(w->out, own->save_id);
    }
    put_word(w, "checkpoint_id");
    put_text_or_none(w, own->checkpoint_id);
    put_word(w, "modules");
    op(w, OP_EMPTY_LIST);
    put_word(w, "world");
    dcp__emit_int(w->out, own->world);
    put_word(w, "rank");
    if (own->rank >= 0) {
        dcp__emit_int(w->out, own->rank);
    } else {
        op(w, OP_NONE);
    }
    put_word(w, "generation");
    dcp__put_text(w->out, own->generation);
    if (own->has_structure) {
        put_word(w, "structure");
        put_bytes(w, own->structure, sizeof own->structure);
    }
    put_word(w, "digest");
    put_word(w, "xxh3-128");
    put_word(w, "records");
    put_records(w);
    put_word(w, "containers");
    put_containers(w);
    put_extras(w, &own->extras);
    op(w, OP_SETITEMS);
}

/* ---- the whole ---- */

static void put_storage_meta(writer *w)
{
    const dcp__metadata *m = w->m;
    dcp__put_global(w->out, "torch.distributed.checkpoint.metadata", "StorageMeta");
    dcp__buf_put(w->out, (const uint8_t[]){OP_EMPTY_TUPLE, OP_NEWOBJ, OP_EMPTY_DICT, OP_MARK}, 4);
    put_word(w, "checkpoint_id");
    put_text_or_none(w, m->own.checkpoint_id.ptr ? m->own.checkpoint_id : m->checkpoint_id);
    put_word(w, "save_id");
    put_text_or_none(w, m->own.save_id.ptr ? m->own.save_id : m->save_id);
    put_word(w, "load_id");
    op(w, OP_NONE);
    put_word(w, "modules");
    op(w, OP_EMPTY_LIST);
    end_object(w);
}

static void put_metadata(writer *w, const dcp__metadata_write_opts *opts, const owners *by_storage)
{
    begin_object(w, DCP__W_METADATA);
    put_word(w, "state_dict_metadata");
    put_state_dict(w);
    put_word(w, "planner_data");
    put_planner_data(w);
    put_word(w, "storage_data");
    put_storage_data(w, by_storage);
    if (opts->target_release >= RELEASE_STORAGE_META) {
        put_word(w, "storage_meta");
        put_storage_meta(w);
    }
    if (w->m->version.ptr) {
        put_word(w, "version");
        dcp__put_text(w->out, w->m->version);
    }
    if (opts->with_own && w->m->own.present) {
        put_word(w, "libdcp");
        put_own(w);
    }
    if (opts->with_own) {
        put_extras(w, &w->m->extras);
    }
    end_object(w);
}

/* One frame around everything: Python then takes the file in with one read. */
static void put_file(writer *w, const dcp__metadata_write_opts *opts, const owners *by_storage)
{
    dcp__buf *out = w->out;
    size_t start = out->len, body = start + 2 + 9;
    dcp__emit_op(out, OP_PROTO, 4, 1);
    dcp__emit_op(out, OP_FRAME, 0, 8);
    dcp__put_words(out, opts->target_release >= RELEASE_NEW_PROPERTIES);
    w->n_memo = DCP__N_WORDS;
    put_metadata(w, opts, by_storage);
    op(w, OP_STOP);
    if (out->failed) {
        return;
    }
    dcp__store64(out->data + body - 8, out->len - body);
    if (opts->with_own) {
        dcp__digest digest = dcp__xxh3_128(out->data + start, out->len - start);
        dcp__buf_put(out, "libdcp\0\1", 8);
        dcp__buf_put(out, digest.bytes, sizeof digest.bytes);
    }
}

/* ---- checks ---- */

static dcp_status check_storage(const dcp__metadata *m, const dcp__entry *e, size_t part, dcp_error *err)
{
    uint32_t s = storage_of(m, e, part);
    if (s == DCP__NO_STORAGE) {
        return DCP_OK;
    }
    if (s >= m->n_storages || m->storages[s].file >= m->n_files ||
        (m->storages[s].transforms && m->storages[s].transforms >= m->n_transforms)) {
        return dcp__fail(err, DCP_ARG, "\"%s\": no such storage, file or transform", dcp__print(e->item.fqn).text);
    }
    if (m->storages[s].form != DCP__FORM_RECORD || m->storages[s].offset > INT64_MAX || m->storages[s].length > INT64_MAX) {
        return dcp__fail(err, DCP_ARG, "\"%s\": its storage is no record", dcp__print(e->item.fqn).text);
    }
    return DCP_OK;
}

static dcp_status check_entry(const dcp__metadata *m, const dcp__entry *e, dcp_error *err)
{
    const dcp_item *item = &e->item;
    bool is_tensor = item->kind == DCP_ITEM_TENSOR;
    if (is_tensor && (!dcp_dtype_bytes(item->dtype) || item->ndim < 0 || item->ndim > DCP_MAX_NDIM || e->memory_format > 2 ||
                      !dcp__range_fits(e->first_chunk, item->n_chunks, m->n_chunks))) {
        return dcp__fail(err, DCP_ARG, "\"%s\": dtype, dimensions or chunks out of range", dcp__print(item->fqn).text);
    }
    dcp_status status = DCP_OK;
    for (size_t part = 0; part < parts_of(e) && status == DCP_OK; part++) {
        status = check_storage(m, e, part, err);
    }
    return status;
}

static dcp_status check(const dcp__metadata *m, const dcp__metadata_write_opts *opts, dcp_error *err)
{
    dcp_status status = DCP_OK;
    size_t parts = 0;
    if (opts->target_release && opts->target_release < 201) {
        return dcp__fail(err, DCP_ARG, "target release %d", opts->target_release);
    }
    if (m->n_entries >= NOT_YET || m->n_chunks >= NOT_YET || m->n_storages >= NOT_YET || m->n_files >= NOT_YET) {
        return dcp__fail(err, DCP_LIMIT, "metadata of %zu entries and %zu chunks", m->n_entries, m->n_chunks);
    }
    for (size_t i = 0; i < m->n_entries && status == DCP_OK; i++) {
        status = check_entry(m, &m->entries[i], err);
        parts += parts_of(&m->entries[i]);
        if (status == DCP_OK && parts > m->n_chunks + m->n_entries) {
            status = dcp__fail(err, DCP_ARG, "\"%s\": its chunks belong to another entry as well",
                               dcp__print(m->entries[i].item.fqn).text);
        }
    }
    if (status == DCP_OK && m->by_fqn.n && m->by_fqn.n < m->n_entries) {
        return dcp__fail(err, DCP_ARG, "%zu entries have %zu names only", m->n_entries, m->by_fqn.n);
    }
    return status;
}

/* Appends to text why the entry cannot be served. */
static void note_offence(const dcp__metadata *m, const dcp__entry *e, int target, dcp__buf *text)
{
    const char *separator = text->len ? ", " : "";
    int release = e->item.kind == DCP_ITEM_TENSOR ? dcp_dtype_release(e->item.dtype) : 0;
    if (release > target) {
        dcp__buf_printf(text, "%s\"%s\" is %s (%d.%d)", separator, dcp__print(e->item.fqn).text, dcp_dtype_name(e->item.dtype),
                        release / 100, release % 100);
        separator = ", ";
    }
    for (size_t part = 0; part < parts_of(e) && target < RELEASE_TRANSFORMS; part++) {
        uint32_t s = storage_of(m, e, part);
        uint32_t transforms = s == DCP__NO_STORAGE ? 0 : m->storages[s].transforms;
        if (transforms) {
            dcp__buf_printf(text, "%s\"%s\" has %s (2.7)", separator, dcp__print(e->item.fqn).text,
                            dcp__print(m->transforms[transforms]).text);
            return;
        }
    }
}

dcp_status dcp__metadata_check_target(const dcp__metadata *m, int target, dcp_error *err)
{
    dcp_status status = DCP_OK;
    dcp__buf text;
    dcp__buf_init(&text, m->ctx);
    for (size_t i = 0; target && i < m->n_entries && text.len < DCP_ERROR_MESSAGE_BYTES; i++) {
        note_offence(m, &m->entries[i], target, &text);
    }
    if (text.failed) {
        status = dcp__nomem(err);
    } else if (text.len) {
        status = dcp__fail(err, DCP_UNSUPPORTED, "PyTorch %d.%d cannot load: %.*s", target / 100, target % 100, (int)text.len,
                           (const char *)text.data);
    }
    dcp__buf_reset(&text);
    return status;
}

/* All tables in one block of uint32_t, each NOT_YET at first. */
static uint32_t *allocate_tables(writer *w, owners *o)
{
    const dcp__metadata *m = w->m;
    size_t parts = m->n_chunks + m->n_entries, kept = parts + m->n_files + m->n_transforms;
    size_t count = kept + m->n_storages + 2, bytes;
    if (!dcp__mul_size(count, sizeof(uint32_t), &bytes)) {
        return NULL;
    }
    uint32_t *tables = dcp__alloc(m->ctx, bytes);
    if (tables) {
        memset(tables, 0xff, kept * sizeof *tables);
        w->fqns = tables;
        w->offsets = w->fqns + m->n_entries;
        w->files = w->offsets + m->n_chunks;
        w->transforms = w->files + m->n_files;
        o->first = w->transforms + m->n_transforms;
        memset(o->first, 0, (m->n_storages + 2) * sizeof *o->first);
    }
    return tables;
}

static dcp_status write_checked(const dcp__metadata *m, const dcp__metadata_write_opts *opts, dcp__buf *out, dcp_error *err)
{
    writer w = {.m = m, .out = out};
    owners o = {0};
    memset(w.dtypes, 0xff, sizeof w.dtypes);
    memset(w.zeros, 0xff, sizeof w.zeros);
    uint32_t *tables = allocate_tables(&w, &o);
    o.list = tables ? dcp__calloc(m->ctx, m->n_chunks + m->n_entries, sizeof *o.list) : NULL;
    if (o.list) {
        sort_owners(m, &o);
        put_file(&w, opts, &o);
    }
    bool ok = o.list && !out->failed;
    dcp__free(m->ctx, o.list);
    dcp__free(m->ctx, tables);
    return ok ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp__metadata_write(const dcp__metadata *m, const dcp__metadata_write_opts *opts, dcp__buf *out, dcp_error *err)
{
    size_t start = out->len;
    dcp_status status = check(m, opts, err);
    if (status == DCP_OK) {
        status = dcp__metadata_check_target(m, opts->target_release, err);
    }
    if (status == DCP_OK) {
        status = write_checked(m, opts, out, err);
    }
    if (status != DCP_OK) {
        out->len = start;
    }
    return status;
}
