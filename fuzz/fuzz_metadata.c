/* Metadata: whatever is accepted is consistent, and looking one item up gives what reading all gives. */
#include <string.h>

#include "base/buf.h"
#include "format/metadata.h"
#include "format/pickle.h"

static void check(bool holds)
{
    if (!holds) {
        __builtin_trap();
    }
}

static void check_storage(const dcp__metadata *md, uint32_t storage)
{
    check(storage == DCP__NO_STORAGE || storage < md->n_storages);
    if (storage != DCP__NO_STORAGE) {
        check(md->storages[storage].file < md->n_files && md->storages[storage].transforms < md->n_transforms);
    }
}

static void check_entry(const dcp__metadata *md, const dcp__entry *e)
{
    check(e->item.path_len > 0 && e->item.fqn.ptr[e->item.fqn.len] == 0);
    if (e->item.kind == DCP_ITEM_OBJECT) {
        check_storage(md, e->storage);
        return;
    }
    check(e->first_chunk <= md->n_chunks && e->item.n_chunks <= md->n_chunks - e->first_chunk);
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const dcp__chunk *c = &md->chunks[e->first_chunk + i];
        for (int d = 0; d < e->item.ndim; d++) {
            check(c->offsets[d] >= 0 && c->sizes[d] >= 0);
        }
        check_storage(md, c->storage);
    }
}

/* The same range of the same file, or none in both. */
static void check_same_place(const dcp__metadata *a, uint32_t x, const dcp__metadata *b, uint32_t y)
{
    check((x == DCP__NO_STORAGE) == (y == DCP__NO_STORAGE));
    if (x != DCP__NO_STORAGE) {
        const dcp__storage *s = &a->storages[x], *t = &b->storages[y];
        check(s->offset == t->offset && s->length == t->length && strcmp(a->files[s->file].ptr, b->files[t->file].ptr) == 0);
    }
}

static void check_alone(const dcp__source *src, const dcp__metadata *md, const dcp__entry *e)
{
    dcp__metadata *one;
    check(dcp__metadata_read(md->ctx, src, &e->item.fqn, &one, NULL) == DCP_OK);
    check(one->n_entries == 1 && one->entries[0].item.n_chunks == e->item.n_chunks &&
          one->entries[0].item.bytes == e->item.bytes);
    check(one->entries[0].item.path_len == e->item.path_len);
    if (e->item.kind == DCP_ITEM_OBJECT) {
        check_same_place(one, one->entries[0].storage, md, e->storage);
    }
    for (size_t i = 0; e->item.kind == DCP_ITEM_TENSOR && i < e->item.n_chunks; i++) {
        const dcp__chunk *a = &one->chunks[i], *b = &md->chunks[e->first_chunk + i];
        check(memcmp(a->offsets, b->offsets, (size_t)e->item.ndim * 8) == 0);
        check(memcmp(a->sizes, b->sizes, (size_t)e->item.ndim * 8) == 0);
        check_same_place(one, a->storage, md, b->storage);
    }
    dcp__metadata_free(one);
}

/* What is kept for others stands for itself: it reads alone, and as what it was. */
static void check_extras(const dcp__extras *extras)
{
    for (size_t i = 0; i < extras->n; i++) {
        dcp__buf b;
        dcp__pickle p;
        dcp__buf_init(&b, dcp__context(NULL));
        dcp__buf_put(&b, extras->list[i].opcodes.ptr, extras->list[i].opcodes.len);
        dcp__buf_put_byte(&b, '.');
        dcp__source src = dcp__source_memory(b.data, b.len);
        check(dcp__pickle_read(dcp__context(NULL), &src, 0, NULL, &p, NULL) == DCP_OK);
        dcp__pickle_reset(&p);
        dcp__buf_reset(&b);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    dcp__source src = dcp__source_memory(data, size);
    dcp__metadata *md;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, &err);
    check(status != DCP_INTERNAL);
    if (status == DCP_OK) {
        for (size_t i = 0; i < md->n_entries; i++) {
            check_entry(md, &md->entries[i]);
        }
        for (size_t i = 0; i < md->n_entries && i < 8; i++) {
            check_alone(&src, md, &md->entries[i]);
        }
        check_extras(&md->extras);
        check_extras(&md->own.extras);
        dcp__metadata_free(md);
    }
    return 0;
}
