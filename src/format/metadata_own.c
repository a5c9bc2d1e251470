/* What libdcp adds to metadata: its field and its trailer (formats.md 11). */
#include "format/metadata_build.h"
#include "format/metadata_extra.h"

#define TRAILER_BYTES 24
#define PIECE_BYTES ((size_t)256 << 10)

static const char magic[8] = {'l', 'i', 'b', 'd', 'c', 'p', 0, 1};

/* ---- trailer ---- */

static dcp_status digest_pieces(const dcp__source *src, uint64_t bytes, uint8_t *piece, dcp__hasher *h, dcp_error *err)
{
    for (uint64_t done = 0; done < bytes;) {
        size_t n = bytes - done < PIECE_BYTES ? (size_t)(bytes - done) : PIECE_BYTES;
        dcp_status status = dcp__source_read(src, done, piece, n, err);
        if (status != DCP_OK) {
            return status;
        }
        dcp__hasher_update(h, piece, n);
        done += n;
    }
    return DCP_OK;
}

/* Digest of the first `bytes` of src. */
static dcp_status digest_of(dcp_context *ctx, const dcp__source *src, uint64_t bytes, dcp__digest *out, dcp_error *err)
{
    if (src->base) {
        *out = dcp__xxh3_128(src->base, (size_t)bytes);
        return DCP_OK;
    }
    dcp__hasher *h = dcp__alloc_aligned(ctx, 64, dcp__hasher_bytes());
    uint8_t *piece = dcp__alloc(ctx, PIECE_BYTES);
    dcp_status status = h && piece ? DCP_OK : dcp__nomem(err);
    if (status == DCP_OK) {
        dcp__hasher_init(h);
        status = digest_pieces(src, bytes, piece, h, err);
    }
    if (status == DCP_OK) {
        *out = dcp__hasher_digest(h);
    }
    dcp__free(ctx, piece);
    dcp__free_aligned(ctx, h);
    return status;
}

dcp_status dcp__mtrailer_check(dcp_context *ctx, const dcp__source *src, bool *has_trailer, dcp_error *err)
{
    uint8_t trailer[TRAILER_BYTES];
    dcp__digest digest;
    *has_trailer = false;
    if (src->size < TRAILER_BYTES) {
        return DCP_OK;
    }
    uint64_t at = src->size - TRAILER_BYTES;
    dcp_status status = dcp__source_read(src, at, trailer, sizeof trailer, err);
    if (status != DCP_OK || memcmp(trailer, magic, sizeof magic) != 0) {
        return status;
    }
    status = digest_of(ctx, src, at, &digest, err);
    if (status != DCP_OK) {
        return status;
    }
    if (memcmp(trailer + sizeof magic, digest.bytes, sizeof digest.bytes) != 0) {
        return dcp__fail_at(err, DCP_CHECKSUM, at, "metadata: content does not have the digest of its trailer");
    }
    *has_trailer = true;
    return DCP_OK;
}

/* ---- the field ---- */

typedef struct own_fields {
    dcp__pv schema, writer, save_id, checkpoint_id, generation, world, rank, structure, digest, records, containers, modules;
} own_fields;

static const struct {
    const char *name;
    size_t at;
} known_keys[] = {
    {"schema", offsetof(own_fields, schema)},
    {"writer", offsetof(own_fields, writer)},
    {"save_id", offsetof(own_fields, save_id)},
    {"checkpoint_id", offsetof(own_fields, checkpoint_id)},
    {"generation", offsetof(own_fields, generation)},
    {"world", offsetof(own_fields, world)},
    {"rank", offsetof(own_fields, rank)},
    {"structure", offsetof(own_fields, structure)},
    {"digest", offsetof(own_fields, digest)},
    {"records", offsetof(own_fields, records)},
    {"containers", offsetof(own_fields, containers)},
    {"modules", offsetof(own_fields, modules)},
};
#define N_KNOWN (sizeof known_keys / sizeof known_keys[0])

/* Position among the known keys, N_KNOWN for others. */
static size_t find_key(dcp__pv key)
{
    dcp_str text = dcp__pv_is_str(key) ? dcp__pv_text(key) : (dcp_str){NULL, 0};
    size_t k = 0;
    while (k < N_KNOWN &&
           !(text.ptr && strlen(known_keys[k].name) == text.len && memcmp(known_keys[k].name, text.ptr, text.len) == 0)) {
        k++;
    }
    return k;
}

static bool is_known_key(dcp__pv key)
{
    return find_key(key) < N_KNOWN;
}

static own_fields split(dcp__pv dict)
{
    own_fields f = {.schema = 0};
    size_t n;
    const dcp__pv *items = dcp__pv_items(dict, &n);
    for (size_t i = 0; i + 1 < n; i += 2) {
        size_t k = find_key(items[i]);
        if (k < N_KNOWN) {
            memcpy((char *)&f + known_keys[k].at, &items[i + 1], sizeof items[i + 1]);
        }
    }
    return f;
}

/* A string, or None and absent: ptr NULL. */
static dcp_status take_text(dcp__pv v, const char *role, uint64_t at, dcp_str *out, dcp_error *err)
{
    if (v && v != DCP__PV_NONE && !dcp__pv_is_str(v)) {
        return dcp__mrefuse(at, role, v, err);
    }
    *out = v ? dcp__pv_text(v) : (dcp_str){NULL, 0};
    return DCP_OK;
}

/* A small number >= 0; `none` if it is None or absent. */
static dcp_status take_number(dcp__pv v, const char *role, uint64_t at, int none, int *out, dcp_error *err)
{
    int64_t i = none;
    if (v && v != DCP__PV_NONE && (!dcp__pv_int(v, &i) || i < 0 || i > INT32_MAX)) {
        return dcp__mrefuse(at, role, v, err);
    }
    *out = (int)i;
    return DCP_OK;
}

static bool is_bytes(dcp__pv v)
{
    return dcp__pv_kind(v) == DCP__P_BYTES;
}

static dcp_status take_structure(dcp__own_facts *own, dcp__pv v, uint64_t at, dcp_error *err)
{
    if (!v || v == DCP__PV_NONE) {
        return DCP_OK;
    }
    if (!is_bytes(v) || dcp__pv_text(v).len != sizeof own->structure) {
        return dcp__mrefuse(at, "libdcp's structure hash", v, err);
    }
    memcpy(own->structure, dcp__pv_text(v).ptr, sizeof own->structure);
    own->has_structure = true;
    return DCP_OK;
}

/* Digests of files, in the order of md->files. Files that nothing refers to are passed over. */
static dcp_status take_records(dcp__mbuild *b, dcp__own_facts *own, dcp__pv dict, uint64_t at, dcp_error *err)
{
    dcp__metadata *md = b->md;
    const dcp__pv *items;
    size_t n, n_files = md->n_files ? md->n_files : 1;
    if (!dict || dict == DCP__PV_NONE) {
        return DCP_OK;
    }
    dcp_status status = dcp__mdict_items(md, dict, "libdcp's records", at, &items, &n, err);
    if (status != DCP_OK) {
        return status;
    }
    own->records = dcp__arena_alloc(&md->arena, n_files * sizeof *own->records);
    own->n_records = dcp__arena_alloc(&md->arena, n_files * sizeof *own->n_records);
    if (!own->records || !own->n_records) {
        return dcp__arena_fail(&md->arena, err);
    }
    memset(own->records, 0, n_files * sizeof *own->records);
    memset(own->n_records, 0, n_files * sizeof *own->n_records);
    for (size_t i = 0; i < n; i += 2) {
        uint64_t file;
        dcp_str bytes = dcp__pv_text(items[i + 1]);
        if (!dcp__pv_is_str(items[i]) || !is_bytes(items[i + 1]) || bytes.len % sizeof(dcp__digest)) {
            return dcp__mrefuse(at, "digests of a file", items[i + 1], err);
        }
        if (dcp__strmap_get(&b->files.map, dcp__pv_text(items[i]), &file)) {
            own->records[file] = (const dcp__digest *)bytes.ptr;
            own->n_records[file] = bytes.len / sizeof(dcp__digest);
        }
    }
    return DCP_OK;
}

static dcp_status take_containers(dcp__mbuild *b, dcp__own_facts *own, dcp__pv list, uint64_t at, dcp_error *err)
{
    size_t n, n_pair;
    if (!list || list == DCP__PV_NONE) {
        return DCP_OK;
    }
    const dcp__pv *items = dcp__pv_items(list, &n);
    if (dcp__pv_kind(list) != DCP__P_LIST) {
        return dcp__mrefuse(at, "libdcp's list of containers", list, err);
    }
    dcp__container *made = dcp__arena_alloc(&b->md->arena, n * sizeof *made);
    if (!made) {
        return dcp__arena_fail(&b->md->arena, err);
    }
    for (size_t i = 0; i < n; i++) {
        const dcp__pv *pair = dcp__pv_items(items[i], &n_pair);
        int64_t before;
        if ((n_pair != 2 && n_pair != 3) || !dcp__pv_is_str(pair[1]) || dcp__pv_kind(pair[0]) != DCP__P_TUPLE) {
            return dcp__mrefuse(at, "a container of libdcp's list", items[i], err);
        }
        made[i] = (dcp__container){.kind = dcp__pv_text(pair[1]), .before = SIZE_MAX};
        if (n_pair == 3 && dcp__pv_int(pair[2], &before) && before >= 0) {
            made[i].before = (size_t)before;
        }
        dcp_status status = dcp__mpath(b, pair[0], at, &made[i].path, &made[i].path_len, err);
        if (status != DCP_OK) {
            return status;
        }
        if (made[i].path_len != dcp__pv_node(pair[0])->count) {
            return dcp__mrefuse(at, "path of a container", pair[0], err);
        }
    }
    own->containers = made;
    own->n_containers = n;
    return DCP_OK;
}

static dcp_status take_all(dcp__mbuild *b, const own_fields *f, uint64_t at, dcp__own_facts *own, dcp_error *err)
{
    dcp_status status = take_text(f->writer, "libdcp's writer", at, &own->writer, err);
    if (status == DCP_OK) {
        status = take_text(f->save_id, "libdcp's save id", at, &own->save_id, err);
    }
    if (status == DCP_OK) {
        status = take_text(f->checkpoint_id, "libdcp's checkpoint id", at, &own->checkpoint_id, err);
    }
    if (status == DCP_OK) {
        status = take_text(f->generation, "libdcp's generation", at, &own->generation, err);
    }
    if (status == DCP_OK) {
        status = take_number(f->world, "libdcp's number of ranks", at, 0, &own->world, err);
    }
    if (status == DCP_OK) {
        status = take_number(f->rank, "libdcp's rank", at, -1, &own->rank, err);
    }
    if (status == DCP_OK) {
        status = take_structure(own, f->structure, at, err);
    }
    bool has_digests = f->digest && dcp__pv_is_str(f->digest) && strcmp(dcp__pv_text(f->digest).ptr, "xxh3-128") == 0;
    if (status == DCP_OK && has_digests) {
        status = take_records(b, own, f->records, at, err);
    }
    if (status == DCP_OK) {
        status = take_containers(b, own, f->containers, at, err);
    }
    own->present = status == DCP_OK;
    return status;
}

dcp_status dcp__mown_read(dcp__mbuild *b, dcp__pv field, uint64_t at, dcp_error *err)
{
    dcp__own_facts own = {.rank = -1};
    bool is_dict = field && dcp__pv_kind(field) == DCP__P_DICT;
    own_fields f = split(is_dict ? field : 0);
    int64_t schema;
    if (!field || (is_dict && f.schema && dcp__pv_int(f.schema, &schema) && schema != 1)) {
        return DCP_OK; /* absent, or of a libdcp that is newer */
    }
    bool is_strict = b->md->has_trailer;
    dcp_status status = is_dict && f.schema && dcp__pv_int(f.schema, &schema)
                            ? take_all(b, &f, at, &own, is_strict ? err : NULL)
                            : dcp__mrefuse(at, "the field libdcp", field, is_strict ? err : NULL);
    if (status == DCP_OK && !b->only) {
        size_t n;
        const dcp__pv *items = dcp__pv_items(field, &n);
        status = dcp__mextras_take(&b->md->arena, items, n, is_known_key, b->source_bytes, &own.extras, err);
    }
    if (status == DCP_OK) {
        b->md->own = own;
    }
    return status == DCP_FORMAT && !is_strict ? DCP_OK : status;
}
