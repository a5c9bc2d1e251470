/* torch.save files without a zip: five pickles and the storages (formats.md 4, end). */
#include "base/bytes.h"
#include "base/strmap.h"
#include "format/record_internal.h"

#define PROTOCOL 1001

/* LONG1 of ten bytes, as it stands in the first pickle. */
static const uint8_t magic[] = {0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};

bool dcp__is_legacy(const uint8_t *bytes, size_t n)
{
    if (n < 8 || bytes[0] != 0x80) {
        return false;
    }
    /* Protocol 4 and newer may put a FRAME in front. */
    size_t at = bytes[2] == 0x95 ? 11 : 2, len = n < at ? 0 : n - at < sizeof magic ? n - at : sizeof magic;
    return len >= 5 && memcmp(bytes + at, magic, len) == 0;
}

/* Reads a pickle of plain data at *pos and steps over it. */
static dcp_status read_value(dcp_context *ctx, const dcp__source *src, uint64_t *pos, dcp__object *out, dcp_error *err)
{
    dcp_status st = dcp__object_read(ctx, src, *pos, out, err);
    if (!st) {
        *pos = out->end;
    }
    return st;
}

static dcp_status read_magic(dcp_context *ctx, const dcp__source *src, uint64_t *pos, dcp_error *err)
{
    dcp__object o;
    uint64_t start = *pos;
    dcp_status st = read_value(ctx, src, pos, &o, err);
    if (st) {
        return st;
    }
    dcp_str number = dcp_value_bigint(o.value);
    if (number.len != 10 || memcmp(number.ptr, magic + 2, 10) != 0) {
        st = dcp__fail_at(err, DCP_FORMAT, start, "legacy torch.save file: wrong magic number");
    }
    dcp__object_reset(&o);
    return st;
}

static dcp_status read_protocol(dcp_context *ctx, const dcp__source *src, uint64_t *pos, dcp_error *err)
{
    dcp__object o;
    uint64_t start = *pos;
    dcp_status st = read_value(ctx, src, pos, &o, err);
    if (st) {
        return st;
    }
    int64_t protocol = -1;
    if (!dcp_value_int(o.value, &protocol) || protocol != PROTOCOL) {
        st = dcp__fail_at(err, DCP_FORMAT, start, "legacy torch.save file: protocol %lld, expected %d", (long long)protocol,
                          PROTOCOL);
    }
    dcp__object_reset(&o);
    return st;
}

static dcp_status read_system(const dcp__source *src, uint64_t *pos, dcp__archive *a, dcp_error *err)
{
    dcp__object o;
    uint64_t start = *pos;
    dcp_status st = read_value(a->ctx, src, pos, &o, err);
    if (st) {
        return st;
    }
    dcp_value *little = dcp_dict_get_str(o.value, "little_endian");
    if (little && dcp_value_kind(little) == DCP_KIND_BOOL) {
        a->is_big_endian = !dcp_value_bool(little);
    } else {
        st = dcp__fail_at(err, DCP_FORMAT, start, "legacy torch.save file: no byte order");
    }
    dcp__object_reset(&o);
    return st;
}

/* The element count and the elements of one storage at *pos. */
static dcp_status read_storage(const dcp__source *src, uint64_t *pos, const dcp__storage_ref *ref, dcp__storage_span *span,
                               dcp_error *err)
{
    uint8_t count[8];
    uint64_t start = *pos, bytes = ref->elems * ref->elem_bytes;
    dcp_status st = dcp__source_read(src, start, count, sizeof count, err);
    if (st) {
        return st;
    }
    if (dcp__load64(count) != ref->elems) {
        return dcp__fail_at(err, DCP_FORMAT, start, "storage %s: %llu elements, its tensors say %llu", dcp__print(ref->key).text,
                            (unsigned long long)dcp__load64(count), (unsigned long long)ref->elems);
    }
    if (!dcp__range_fits(start + sizeof count, bytes, src->size)) {
        return dcp__fail_at(err, DCP_FORMAT, start, "storage %s: %llu bytes exceed the end at %llu", dcp__print(ref->key).text,
                            (unsigned long long)bytes, (unsigned long long)src->size);
    }
    *span = (dcp__storage_span){.offset = start + sizeof count, .bytes = bytes, .full_bytes = bytes};
    *pos = span->offset + bytes;
    return DCP_OK;
}

static dcp_status map_storages(const dcp__object *o, dcp__strmap *map, dcp_error *err)
{
    dcp_status st = DCP_OK;
    for (size_t i = 0; !st && i < o->n_storages; i++) {
        st = o->storages[i].view_of < 0 ? dcp__strmap_add(map, o->storages[i].key, i, NULL, err) : DCP_OK;
    }
    return st;
}

/* The storages in the order of the list of keys. A span without an offset is one that was not met yet. */
static dcp_status read_storages(const dcp__source *src, uint64_t pos, dcp__archive *a, const dcp_value *keys,
                                const dcp__strmap *map, dcp_error *err)
{
    for (size_t i = 0; i < dcp_value_count(keys); i++) {
        dcp_str key = dcp_value_str(dcp_value_at(keys, i));
        uint64_t index;
        if (!dcp__strmap_get(map, key, &index)) {
            return dcp__fail_at(err, DCP_FORMAT, pos, "storage %s: no tensor tells its size", dcp__print(key).text);
        }
        if (a->spans[index].offset) {
            return dcp__fail_at(err, DCP_FORMAT, pos, "storage %s stands in the file twice", dcp__print(key).text);
        }
        dcp_status st = read_storage(src, &pos, &a->object.storages[index], &a->spans[index], err);
        if (st) {
            return st;
        }
    }
    return DCP_OK;
}

/* Views are parts of what was read; every other storage must have been read. */
static dcp_status settle_views(dcp__archive *a, dcp_error *err)
{
    for (size_t i = 0; i < a->object.n_storages; i++) {
        const dcp__storage_ref *ref = &a->object.storages[i];
        if (ref->view_of >= 0) {
            uint64_t bytes = ref->elems * ref->elem_bytes;
            a->spans[i] = (dcp__storage_span){.bytes = bytes, .full_bytes = bytes};
            a->spans[i].offset = a->spans[ref->view_of].offset + ref->view_start * ref->elem_bytes;
        }
        if (!a->spans[i].offset) {
            return dcp__fail(err, DCP_FORMAT, "storage %s is not in the file", dcp__print(ref->key).text);
        }
    }
    return DCP_OK;
}

static dcp_status locate_storages(const dcp__source *src, uint64_t pos, dcp__archive *a, const dcp_value *keys, dcp_error *err)
{
    if (dcp_value_kind(keys) != DCP_KIND_LIST) {
        return dcp__fail_at(err, DCP_FORMAT, pos, "legacy torch.save file: no list of storages");
    }
    dcp__strmap map;
    dcp__strmap_init(&map, a->ctx);
    a->spans = dcp__calloc(a->ctx, a->object.n_storages, sizeof *a->spans);
    dcp_status st = a->spans ? map_storages(&a->object, &map, err) : dcp__nomem(err);
    st = st ? st : read_storages(src, pos, a, keys, &map, err);
    st = st ? st : settle_views(a, err);
    dcp__strmap_reset(&map);
    return st;
}

dcp_status dcp__legacy_open(const dcp__source *src, dcp__archive *a, dcp_error *err)
{
    uint64_t pos = 0;
    a->is_legacy = true;
    dcp_status st = read_magic(a->ctx, src, &pos, err);
    st = st ? st : read_protocol(a->ctx, src, &pos, err);
    st = st ? st : read_system(src, &pos, a, err);
    st = st ? st : read_value(a->ctx, src, &pos, &a->object, err);
    if (st) {
        return st;
    }
    dcp__object keys;
    st = read_value(a->ctx, src, &pos, &keys, err);
    if (!st) {
        st = locate_storages(src, pos, a, keys.value, err);
        dcp__object_reset(&keys);
    }
    return st;
}
