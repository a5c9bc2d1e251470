#include "format/metadata_writer.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "support/failing_alloc.h"

static dcp_context *ctx;

static int setup(void **state)
{
    (void)state;
    return dcp_context_create(NULL, &ctx, NULL);
}

static int teardown(void **state)
{
    (void)state;
    dcp_context_free(ctx);
    return 0;
}

static const dcp__metadata_write_opts for_all = {201, false}, with_own = {201, true};

/* Fails unless it is written. */
static dcp__buf written(const dcp__metadata *m, const dcp__metadata_write_opts *opts)
{
    dcp__buf out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__buf_init(&out, ctx);
    if (dcp__metadata_write(m, opts, &out, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return out;
}

static dcp__metadata *read_back(const void *bytes, size_t len)
{
    dcp__metadata *m;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = dcp__source_memory(bytes, len);
    if (dcp__metadata_read(ctx, &src, NULL, &m, &err) != DCP_OK) {
        fail_msg("%s at %llu", err.message, (unsigned long long)err.offset);
    }
    return m;
}

/* ---- comparison ---- */

static void same_text(dcp_str a, dcp_str b)
{
    assert_int_equal(a.len, b.len);
    if (a.len) {
        assert_memory_equal(a.ptr, b.ptr, a.len);
    }
}

static void same_path(const dcp_key *a, size_t n_a, const dcp_key *b, size_t n_b)
{
    assert_int_equal(n_a, n_b);
    for (size_t i = 0; i < n_a; i++) {
        assert_int_equal(a[i].is_int, b[i].is_int);
        if (a[i].is_int) {
            assert_int_equal(a[i].integer, b[i].integer);
        } else {
            same_text(a[i].string, b[i].string);
        }
    }
}

static void same_storage(const dcp__metadata *a, uint32_t of_a, const dcp__metadata *b, uint32_t of_b)
{
    assert_int_equal(of_a == DCP__NO_STORAGE, of_b == DCP__NO_STORAGE);
    if (of_a != DCP__NO_STORAGE) {
        const dcp__storage *sa = &a->storages[of_a], *sb = &b->storages[of_b];
        assert_int_equal(sa->offset, sb->offset);
        assert_int_equal(sa->length, sb->length);
        same_text(a->files[sa->file], b->files[sb->file]);
        same_text(a->transforms[sa->transforms], b->transforms[sb->transforms]);
    }
}

static void same_numbers(const int64_t *a, const int64_t *b, int n)
{
    for (int i = 0; i < n; i++) {
        assert_int_equal(a[i], b[i]);
    }
}

static void same_entry(const dcp__metadata *a, const dcp__entry *ea, const dcp__metadata *b, const dcp__entry *eb)
{
    const dcp_item *ia = &ea->item, *ib = &eb->item;
    same_text(ia->fqn, ib->fqn);
    assert_int_equal(ia->kind, ib->kind);
    same_path(ia->path, ia->path_len, ib->path, ib->path_len);
    if (ia->kind == DCP_ITEM_OBJECT) {
        same_storage(a, ea->storage, b, eb->storage);
        return;
    }
    assert_int_equal(ia->dtype, ib->dtype);
    assert_int_equal(ia->ndim, ib->ndim);
    same_numbers(ia->extents, ib->extents, ia->ndim);
    assert_int_equal(ia->n_chunks, ib->n_chunks);
    assert_int_equal(ea->requires_grad, eb->requires_grad);
    assert_int_equal(ea->pin_memory, eb->pin_memory);
    assert_int_equal(ea->memory_format, eb->memory_format);
    for (size_t i = 0; i < ia->n_chunks; i++) {
        const dcp__chunk *ca = &a->chunks[ea->first_chunk + i], *cb = &b->chunks[eb->first_chunk + i];
        same_numbers(ca->offsets, cb->offsets, ia->ndim);
        same_numbers(ca->sizes, cb->sizes, ia->ndim);
        same_storage(a, ca->storage, b, cb->storage);
    }
}

static void same_metadata(const dcp__metadata *a, const dcp__metadata *b)
{
    assert_int_equal(a->n_entries, b->n_entries);
    for (size_t i = 0; i < a->n_entries; i++) {
        same_entry(a, &a->entries[i], b, &b->entries[i]);
    }
    same_text(a->version, b->version);
}

/* ---- golden metadata ---- */

static void rewrite(const char *path)
{
    static const int targets[] = {201, 203, 204, 207, 215};
    static uint8_t bytes[1 << 20];
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t len = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    dcp__metadata *m = read_back(bytes, len);
    size_t n_written = 0;
    for (size_t i = 0; i < 2 * sizeof targets / sizeof *targets; i++) {
        dcp__metadata_write_opts opts = {targets[i / 2], i % 2};
        dcp_error err = DCP_ERROR_INIT;
        dcp__buf out;
        dcp__buf_init(&out, ctx);
        dcp_status status = dcp__metadata_write(m, &opts, &out, &err);
        if (status != DCP_UNSUPPORTED) {
            assert_int_equal(status, DCP_OK);
            dcp__metadata *again = read_back(out.data, out.len);
            same_metadata(m, again);
            assert_int_equal(again->has_trailer, opts.with_own);
            if (targets[i / 2] >= 204) {
                same_text(m->save_id, again->save_id);
                same_text(m->checkpoint_id, again->checkpoint_id);
            }
            dcp__metadata_free(again);
            n_written++;
        }
        dcp__buf_reset(&out);
    }
    assert_true(n_written >= 2); /* the newest target takes all */
    dcp__metadata_free(m);
}

static void metadata_writer__golden_metadata_reads_back_the_same(void **state)
{
    (void)state;
    static const char *const patterns[] = {"/golden/*/*/ckpt/.metadata", "/golden/*/*/ckpt/__*.metadata"};
    size_t count = 0;
    for (size_t p = 0; p < 2; p++) {
        char pattern[512];
        glob_t files;
        (void)snprintf(pattern, sizeof pattern, "%s%s", DCP_TEST_DIR, patterns[p]);
        assert_int_equal(glob(pattern, 0, NULL, &files), 0);
        for (size_t i = 0; i < files.gl_pathc; i++) {
            if (!strstr(files.gl_pathv[i], "safetensors_records")) { /* no records: not for PyTorch */
                rewrite(files.gl_pathv[i]);
                count++;
            }
        }
        globfree(&files);
    }
    assert_true(count >= 60);
}

/* ---- made by hand ---- */

/* A tensor of n rows of 3, each a chunk and a record of its own; an object; a tied tensor. */
typedef struct model {
    dcp__metadata m;
    dcp__entry entries[3];
    dcp__chunk *chunks;
    dcp__storage *storages;
    int64_t *numbers;
    dcp_str files[2], transforms[2];
    dcp_key path[20];
    int64_t extents[2], row[2], zero[2];
} model;

static void make_model(model *x, size_t n)
{
    memset(x, 0, sizeof *x);
    x->chunks = calloc(n + 1, sizeof *x->chunks);
    x->storages = calloc(n + 1, sizeof *x->storages);
    x->numbers = calloc(n, 2 * sizeof *x->numbers);
    x->files[0] = dcp_str_of("__0_0.distcp");
    x->files[1] = dcp_str_of("__1_0.distcp");
    x->transforms[0] = dcp_str_of("");
    x->transforms[1] = dcp_str_of("stream.zstd/1");
    x->extents[0] = (int64_t)n;
    x->row[0] = 1;
    x->extents[1] = x->row[1] = 3;
    for (size_t i = 0; i < n; i++) {
        x->numbers[2 * i] = (int64_t)i;
        x->chunks[i] = (dcp__chunk){x->numbers + 2 * i, x->row, (uint32_t)(n - 1 - i)};
        x->storages[n - 1 - i] = (dcp__storage){.offset = i << 20, .length = 1577, .file = (uint32_t)i % 2};
    }
    x->chunks[n] = (dcp__chunk){x->zero, x->row, (uint32_t)n - 1};
    x->storages[n] = (dcp__storage){.offset = 7, .length = 1261};
    x->entries[0] = (dcp__entry){
        .item = {
            .fqn = {"a.w", 3}, .kind = DCP_ITEM_TENSOR, .dtype = DCP_FLOAT32, .ndim = 2, .extents = x->extents, .n_chunks = n}};
    x->path[0] = dcp_key_str("a");
    x->path[1] = dcp_key_str("w");
    x->entries[0].item.path = x->path;
    x->entries[0].item.path_len = 2;
    x->entries[1] = (dcp__entry){.item = {.fqn = {"step", 4}, .kind = DCP_ITEM_OBJECT, .n_chunks = 1}, .storage = (uint32_t)n};
    x->entries[2] = (dcp__entry){
        .item = {.fqn = {"tied", 4}, .kind = DCP_ITEM_TENSOR, .dtype = DCP_FLOAT32, .ndim = 2, .extents = x->row, .n_chunks = 1},
        .first_chunk = n};
    x->m = (dcp__metadata){.ctx = ctx,
                           .entries = x->entries,
                           .n_entries = 3,
                           .chunks = x->chunks,
                           .n_chunks = n + 1,
                           .storages = x->storages,
                           .n_storages = n + 1,
                           .files = x->files,
                           .n_files = 2,
                           .transforms = x->transforms,
                           .n_transforms = 2,
                           .own = {.rank = -1}};
}

static void free_model(model *x)
{
    free(x->chunks);
    free(x->storages);
    free(x->numbers);
}

static void check_model(model *x, const dcp__metadata_write_opts *opts)
{
    static const dcp_key at_root[] = {{false, 0, {"step", 4}}, {false, 0, {"tied", 4}}};
    dcp__buf out = written(&x->m, opts);
    dcp__metadata *m = read_back(out.data, out.len);
    for (size_t i = 1; i < 3; i++) { /* no path was given: the reader finds the name */
        assert_int_equal(x->entries[i].item.path_len, 0);
        x->entries[i].item.path = &at_root[i - 1];
        x->entries[i].item.path_len = 1;
    }
    same_metadata(&x->m, m);
    dcp__metadata_free(m);
    dcp__buf_reset(&out);
}

static void metadata_writer__batches_of_any_number_read_back(void **state)
{
    (void)state;
    static const size_t counts[] = {1, 2, 998, 999, 1000, 1001, 2000, 2001, 70000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        model x;
        make_model(&x, counts[i]); /* the last has offsets beyond 2^32, and indices beyond 16 bits */
        check_model(&x, &for_all);
        free_model(&x);
    }
}

static void metadata_writer__storages_keep_their_order(void **state)
{
    (void)state;
    model x;
    make_model(&x, 5);
    dcp__buf out = written(&x.m, &for_all);
    dcp__metadata *m = read_back(out.data, out.len);
    uint32_t last = 0;
    for (size_t i = 0; i < 5; i++) { /* storages run against the chunks; the tied one comes behind its partner */
        const dcp__storage *s = &m->storages[m->chunks[m->entries[0].first_chunk + 4 - i].storage];
        uint32_t at = (uint32_t)(s - m->storages);
        assert_true(i == 0 || at > last);
        last = at;
    }
    assert_true(m->chunks[m->entries[2].first_chunk].storage >= m->chunks[m->entries[0].first_chunk].storage);
    dcp__metadata_free(m);
    dcp__buf_reset(&out);
    free_model(&x);
}

static void metadata_writer__deep_and_integer_paths_read_back(void **state)
{
    (void)state;
    model x;
    make_model(&x, 1);
    for (size_t i = 0; i < 20; i++) {
        x.path[i] = i % 3 == 2 ? dcp_key_int((int64_t)i * 1000) : dcp_key_str(i % 2 ? "" : "layers");
    }
    x.entries[0].item.path_len = 20;
    check_model(&x, &for_all);
    free_model(&x);
}

static void metadata_writer__own_facts_read_back(void **state)
{
    (void)state;
    model x;
    make_model(&x, 4);
    dcp__digest digests[3];
    const dcp__digest *records[2] = {NULL, digests};
    size_t n_records[2] = {0, 3};
    dcp__container containers[2] = {{x.path, 1, {"ordered_dict", 12}, 0}, {x.path, 2, {"dict", 4}, 3}};
    memset(digests, 0x5a, sizeof digests);
    x.m.own = (dcp__own_facts){.present = true,
                               .save_id = {"id-1", 4},
                               .checkpoint_id = {"/run/1", 6},
                               .generation = {"g1", 2},
                               .world = 8,
                               .rank = 3,
                               .has_structure = true,
                               .records = records,
                               .n_records = n_records,
                               .containers = containers,
                               .n_containers = 2};
    memset(x.m.own.structure, 0xa5, sizeof x.m.own.structure);
    dcp__buf out = written(&x.m, &with_own);
    dcp__metadata *m = read_back(out.data, out.len);
    assert_true(m->has_trailer);
    assert_true(m->own.present);
    same_text(m->own.writer, dcp_str_of("libdcp " DCP_VERSION_STRING));
    same_text(m->own.save_id, x.m.own.save_id);
    same_text(m->own.checkpoint_id, x.m.own.checkpoint_id);
    same_text(m->own.generation, x.m.own.generation);
    assert_int_equal(m->own.world, 8);
    assert_int_equal(m->own.rank, 3);
    assert_true(m->own.has_structure);
    assert_memory_equal(m->own.structure, x.m.own.structure, 16);
    for (size_t i = 0; i < m->n_files; i++) {
        bool is_second = m->files[i].ptr[2] == '1';
        assert_int_equal(m->own.n_records[i], is_second ? 3 : 0);
        if (is_second) {
            assert_memory_equal(m->own.records[i], digests, sizeof digests);
        }
    }
    assert_int_equal(m->own.n_containers, 2);
    same_path(m->own.containers[1].path, m->own.containers[1].path_len, x.path, 2);
    same_text(m->own.containers[0].kind, dcp_str_of("ordered_dict"));
    dcp__metadata_free(m);

    out.data[out.len / 2] ^= 1;
    dcp__source src = dcp__source_memory(out.data, out.len);
    assert_int_equal(dcp__metadata_read(ctx, &src, NULL, &m, NULL), DCP_CHECKSUM);
    dcp__buf_reset(&out);
    free_model(&x);
}

/* ---- the form ---- */

static bool contains(const dcp__buf *out, const char *text)
{
    return memmem(out->data, out->len, text, strlen(text)) != NULL;
}

static void metadata_writer__form_follows_the_target(void **state)
{
    (void)state;
    static const struct {
        int target;
        bool is_new_class, has_storage_meta;
    } forms[] = {{201, false, false}, {202, false, false}, {203, true, false}, {204, true, true}, {215, true, true}};
    model x;
    make_model(&x, 2);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        dcp__metadata_write_opts opts = {forms[i].target, false};
        dcp__buf out = written(&x.m, &opts);
        assert_int_equal(contains(&out, "torch.distributed._shard.sharded_tensor.metadata"), !forms[i].is_new_class);
        assert_int_equal(contains(&out, "\x13MEM_FORMAT_ENCODING"), !forms[i].is_new_class);
        assert_int_equal(contains(&out, "\x14_MEM_FORMAT_ENCODING"), forms[i].is_new_class);
        assert_int_equal(contains(&out, "\x0bStorageMeta"), forms[i].has_storage_meta);
        assert_false(contains(&out, "libdcp"));
        dcp__buf_reset(&out);
    }
    free_model(&x);
}

static void metadata_writer__one_frame_holds_all(void **state)
{
    (void)state;
    model x;
    make_model(&x, 3);
    dcp__buf out = written(&x.m, &for_all), more = written(&x.m, &with_own);
    assert_memory_equal(out.data, "\x80\4\x95", 3);
    assert_int_equal(dcp__load64(out.data + 3), out.len - 11);
    assert_int_equal(out.data[out.len - 1], '.');
    assert_int_equal(more.len, out.len + 24); /* own facts that are not present are not written */
    assert_memory_equal(more.data, out.data, out.len);
    assert_memory_equal(more.data + out.len, "libdcp\0\1", 8);
    dcp__buf_reset(&out);
    dcp__buf_reset(&more);
    free_model(&x);
}

static void metadata_writer__output_is_appended(void **state)
{
    (void)state;
    model x;
    make_model(&x, 3);
    dcp__buf out = written(&x.m, &with_own), again;
    dcp__buf_init(&again, ctx);
    dcp__buf_put(&again, "before", 6);
    assert_int_equal(dcp__metadata_write(&x.m, &with_own, &again, NULL), DCP_OK);
    assert_int_equal(again.len, out.len + 6);
    assert_memory_equal(again.data + 6, out.data, out.len);
    dcp__buf_reset(&out);
    dcp__buf_reset(&again);
    free_model(&x);
}

/* ---- refusals ---- */

static dcp_status try_write(const dcp__metadata *m, int target, dcp_error *err)
{
    dcp__metadata_write_opts opts = {target, true};
    dcp__buf out;
    dcp__buf_init(&out, ctx);
    dcp__buf_put(&out, "x", 1);
    dcp_status status = dcp__metadata_write(m, &opts, &out, err);
    assert_true(status == DCP_OK || out.len == 1);
    dcp__buf_reset(&out);
    return status;
}

static void metadata_writer__what_the_target_cannot_load_is_named(void **state)
{
    (void)state;
    model x;
    dcp_error err = DCP_ERROR_INIT;
    make_model(&x, 2);
    x.entries[0].item.dtype = DCP_FLOAT8_E8M0FNU; /* 2.7 */
    x.entries[2].item.dtype = DCP_UINT16;         /* 2.6 */
    assert_int_equal(try_write(&x.m, 205, &err), DCP_UNSUPPORTED);
    assert_non_null(strstr(err.message, "\"a.w\""));
    assert_non_null(strstr(err.message, "\"tied\""));
    assert_int_equal(try_write(&x.m, 206, &err), DCP_UNSUPPORTED);
    assert_null(strstr(err.message, "\"tied\""));
    assert_int_equal(try_write(&x.m, 207, NULL), DCP_OK);
    x.storages[2].transforms = 1; /* the object's */
    assert_int_equal(try_write(&x.m, 207, NULL), DCP_OK);
    x.entries[0].item.dtype = DCP_FLOAT32;
    assert_int_equal(try_write(&x.m, 206, &err), DCP_UNSUPPORTED);
    assert_non_null(strstr(err.message, "\"step\""));
    free_model(&x);
}

static void metadata_writer__without_a_target_all_is_written_in_the_oldest_form(void **state)
{
    (void)state;
    model x;
    make_model(&x, 2);
    dcp__metadata_write_opts none = {0, false};
    dcp__buf out = written(&x.m, &for_all), same = written(&x.m, &none);
    assert_int_equal(out.len, same.len);
    assert_memory_equal(out.data, same.data, out.len);
    x.entries[0].item.dtype = DCP_BCOMPLEX32; /* 2.14 */
    x.storages[2].transforms = 1;
    assert_int_equal(try_write(&x.m, 0, NULL), DCP_OK);
    dcp__buf_reset(&out);
    dcp__buf_reset(&same);
    free_model(&x);
}

static void metadata_writer__offenders_beyond_the_message_are_cut(void **state)
{
    (void)state;
    enum { N = 500 };
    static dcp__entry entries[N];
    static char names[N][16];
    dcp_error err = DCP_ERROR_INIT;
    for (size_t i = 0; i < N; i++) {
        (void)snprintf(names[i], sizeof names[i], "layer.%zu", i);
        entries[i] = (dcp__entry){.item = {.fqn = dcp_str_of(names[i]), .kind = DCP_ITEM_TENSOR, .dtype = DCP_UINT16}};
    }
    dcp__metadata m = {.ctx = ctx, .entries = entries, .n_entries = N};
    assert_int_equal(try_write(&m, 201, &err), DCP_UNSUPPORTED);
    assert_true(strlen(err.message) < DCP_ERROR_MESSAGE_BYTES);
    assert_non_null(strstr(err.message, "\"layer.0\""));
}

#define REFUSED(change)                                                                                                          \
    do {                                                                                                                         \
        model x;                                                                                                                 \
        make_model(&x, 2);                                                                                                       \
        change;                                                                                                                  \
        assert_int_equal(try_write(&x.m, 201, NULL), DCP_ARG);                                                                   \
        free_model(&x);                                                                                                          \
    } while (0)

static void metadata_writer__inconsistent_metadata_is_refused(void **state)
{
    (void)state;
    REFUSED(x.entries[0].item.dtype = DCP_DTYPE_NONE);
    REFUSED(x.entries[0].item.ndim = DCP_MAX_NDIM + 1);
    REFUSED(x.entries[0].item.n_chunks = 4);
    REFUSED(x.entries[2].first_chunk = 3);
    REFUSED(x.entries[2].item.n_chunks = SIZE_MAX);
    REFUSED(x.entries[0].memory_format = 3);
    REFUSED((x.entries[2].first_chunk = 0, x.entries[2].item.n_chunks = 3, x.m.n_entries = 3, x.entries[1] = x.entries[2]));
    REFUSED(x.chunks[0].storage = 3);
    REFUSED(x.storages[0].file = 2);
    REFUSED(x.storages[0].transforms = 2);
    REFUSED(x.storages[0].form = DCP__FORM_RAW);
    REFUSED(x.storages[0].offset = UINT64_MAX);
    model x;
    make_model(&x, 2);
    assert_int_equal(try_write(&x.m, 200, NULL), DCP_ARG);
    assert_int_equal(try_write(&x.m, -1, NULL), DCP_ARG);
    free_model(&x);
}

static void metadata_writer__two_entries_of_one_name_are_refused(void **state)
{
    (void)state;
    model x;
    make_model(&x, 2);
    dcp__strmap_init(&x.m.by_fqn, ctx);
    assert_int_equal(dcp__strmap_add(&x.m.by_fqn, x.entries[0].item.fqn, 0, NULL, NULL), DCP_OK);
    assert_int_equal(dcp__strmap_add(&x.m.by_fqn, x.entries[1].item.fqn, 1, NULL, NULL), DCP_OK);
    x.entries[2].item.fqn = x.entries[0].item.fqn;
    assert_int_equal(try_write(&x.m, 201, NULL), DCP_ARG);
    dcp__strmap_reset(&x.m.by_fqn);
    free_model(&x);
}

static void metadata_writer__chunks_without_a_place_are_not_listed(void **state)
{
    (void)state;
    model x;
    make_model(&x, 3);
    x.chunks[1].storage = DCP__NO_STORAGE;
    x.entries[1].storage = DCP__NO_STORAGE;
    check_model(&x, &with_own);
    free_model(&x);
}

static dcp_status write_in(dcp_context *failing, void *user, dcp_error *err)
{
    model *x = user;
    dcp__buf out;
    dcp__buf_init(&out, failing);
    x->m.ctx = failing;
    dcp_status status = dcp__metadata_write(&x->m, &with_own, &out, err);
    dcp__buf_reset(&out);
    return status;
}

static void metadata_writer__survives_failing_allocations(void **state)
{
    (void)state;
    model x;
    make_model(&x, 100);
    assert_true(failing_alloc_walk(write_in, &x) > 3);
    free_model(&x);
}

static dcp_status write_too_new(dcp_context *failing, void *user, dcp_error *err)
{
    model *x = user;
    dcp_error inner = DCP_ERROR_INIT;
    dcp__buf out;
    dcp__buf_init(&out, failing);
    x->m.ctx = failing;
    dcp_status status = dcp__metadata_write(&x->m, &for_all, &out, &inner);
    dcp__buf_reset(&out);
    *err = inner;
    return status == DCP_UNSUPPORTED ? DCP_OK : status;
}

static void metadata_writer__refusal_survives_failing_allocations(void **state)
{
    (void)state;
    model x;
    make_model(&x, 2);
    x.entries[0].item.dtype = DCP_UINT16;
    assert_true(failing_alloc_walk(write_too_new, &x) > 0);
    free_model(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(metadata_writer__golden_metadata_reads_back_the_same),
        cmocka_unit_test(metadata_writer__batches_of_any_number_read_back),
        cmocka_unit_test(metadata_writer__storages_keep_their_order),
        cmocka_unit_test(metadata_writer__deep_and_integer_paths_read_back),
        cmocka_unit_test(metadata_writer__own_facts_read_back),
        cmocka_unit_test(metadata_writer__form_follows_the_target),
        cmocka_unit_test(metadata_writer__one_frame_holds_all),
        cmocka_unit_test(metadata_writer__output_is_appended),
        cmocka_unit_test(metadata_writer__what_the_target_cannot_load_is_named),
        cmocka_unit_test(metadata_writer__without_a_target_all_is_written_in_the_oldest_form),
        cmocka_unit_test(metadata_writer__offenders_beyond_the_message_are_cut),
        cmocka_unit_test(metadata_writer__inconsistent_metadata_is_refused),
        cmocka_unit_test(metadata_writer__two_entries_of_one_name_are_refused),
        cmocka_unit_test(metadata_writer__chunks_without_a_place_are_not_listed),
        cmocka_unit_test(metadata_writer__survives_failing_allocations),
        cmocka_unit_test(metadata_writer__refusal_survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
