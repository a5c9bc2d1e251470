/* Metadata that real releases wrote. What it must say is in expect.json beside each checkpoint; where records must be is checked
 * against the files. */
#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "support/failing_alloc.h"

#include "base/bytes.h"
#include "base/checked.h"
#include "format/metadata.h"

#define GOLDEN DCP_TEST_DIR "/golden"

typedef struct blob {
    char *bytes;
    size_t len;
} blob;

static blob slurp(const char *path)
{
    blob b = {NULL, 0};
    FILE *f = fopen(path, "rb");
    if (f) {
        fseek(f, 0, SEEK_END);
        b.len = (size_t)ftell(f);
        rewind(f);
        b.bytes = malloc(b.len ? b.len : 1);
        assert_non_null(b.bytes);
        assert_int_equal(fread(b.bytes, 1, b.len, f), b.len);
        fclose(f);
    }
    return b;
}

static dcp__metadata *read_blob(const blob *b, const dcp_str *only, const char *name)
{
    dcp__source src = dcp__source_memory(b->bytes, b->len);
    dcp__metadata *md = NULL;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp__metadata_read(dcp__context(NULL), &src, only, &md, &err) != DCP_OK) {
        fail_msg("%s: %s at %llu", name, err.message, (unsigned long long)err.offset);
    }
    return md;
}

static void tensor_is(const dcp__entry *e, const json_t *expected)
{
    const json_t *shape = json_object_get(expected, "shape");
    uint64_t bytes = dcp_dtype_bytes(e->item.dtype);
    assert_int_equal(e->item.kind, DCP_ITEM_TENSOR);
    assert_string_equal(dcp_dtype_name(e->item.dtype), json_string_value(json_object_get(expected, "dtype")));
    assert_int_equal(e->item.ndim, json_array_size(shape));
    for (int i = 0; i < e->item.ndim; i++) {
        assert_int_equal(e->item.extents[i], json_integer_value(json_array_get(shape, (size_t)i)));
        bytes *= (uint64_t)e->item.extents[i];
    }
    assert_int_equal(e->item.bytes, bytes);
}

/* Every expected name is there and is what it should be; returns how many there are. */
static size_t has_all(const dcp__metadata *md, const json_t *tensors, const json_t *objects)
{
    const char *name;
    json_t *value;
    uint64_t i;
    json_object_foreach((json_t *)(uintptr_t)tensors, name, value)
    {
        assert_true(dcp__strmap_get(&md->by_fqn, dcp_str_of(name), &i));
        assert_string_equal(md->entries[i].item.fqn.ptr, name);
        tensor_is(&md->entries[i], value);
    }
    json_object_foreach((json_t *)(uintptr_t)objects, name, value)
    {
        assert_true(dcp__strmap_get(&md->by_fqn, dcp_str_of(name), &i));
        assert_int_equal(md->entries[i].item.kind, DCP_ITEM_OBJECT);
    }
    return json_object_size(tensors) + json_object_size(objects);
}

/* A record lies within its file and, unless the case stores them otherwise, begins as a zip archive. */
static void record_is_there(const dcp__metadata *md, uint32_t storage, const char *dir, bool is_zip)
{
    char path[512];
    struct stat st;
    uint8_t head[4] = {0};
    assert_true(storage < md->n_storages);
    const dcp__storage *s = &md->storages[storage];
    snprintf(path, sizeof path, "%s/%s", dir, md->files[s->file].ptr);
    assert_int_equal(stat(path, &st), 0);
    assert_true(dcp__range_fits(s->offset, s->length, (uint64_t)st.st_size));
    if (is_zip) {
        FILE *f = fopen(path, "rb");
        assert_non_null(f);
        assert_int_equal(fseek(f, (long)s->offset, SEEK_SET), 0);
        assert_int_equal(fread(head, 1, 4, f), 4);
        fclose(f);
        assert_memory_equal(head, "PK\x03\x04", 4);
    }
}

static void records_are_there(const dcp__metadata *md, const char *dir, bool is_zip, bool is_whole)
{
    for (size_t i = 0; i < md->n_entries; i++) {
        const dcp__entry *e = &md->entries[i];
        uint64_t bytes = 0;
        for (size_t k = 0; e->item.kind == DCP_ITEM_TENSOR && k < e->item.n_chunks; k++) {
            const dcp__chunk *c = &md->chunks[e->first_chunk + k];
            uint64_t volume = dcp_dtype_bytes(e->item.dtype);
            for (int d = 0; d < e->item.ndim; d++) {
                volume *= (uint64_t)c->sizes[d];
                assert_true(c->offsets[d] + c->sizes[d] <= e->item.extents[d]);
            }
            bytes += volume;
            record_is_there(md, c->storage, dir, is_zip);
            assert_true(!is_zip || md->storages[c->storage].length > volume);
        }
        if (e->item.kind == DCP_ITEM_OBJECT) {
            record_is_there(md, e->storage, dir, is_zip);
        } else if (is_whole) {
            assert_int_equal(bytes, e->item.bytes);
        }
    }
}

/* Looking an item up alone gives what reading all gives. */
static void each_alone(const blob *b, const dcp__metadata *md)
{
    for (size_t i = 0; i < md->n_entries; i++) {
        const dcp__entry *e = &md->entries[i];
        dcp__metadata *one = read_blob(b, &e->item.fqn, "one");
        assert_int_equal(one->n_entries, 1);
        const dcp__entry *o = &one->entries[0];
        assert_int_equal(o->item.path_len, e->item.path_len);
        assert_int_equal(o->item.bytes, e->item.bytes);
        assert_int_equal(one->n_chunks, e->item.kind == DCP_ITEM_TENSOR ? e->item.n_chunks : 0);
        for (size_t k = 0; k < one->n_chunks; k++) {
            const dcp__chunk *x = &one->chunks[k], *y = &md->chunks[e->first_chunk + k];
            const dcp__storage *s = &one->storages[x->storage], *t = &md->storages[y->storage];
            assert_int_equal(memcmp(x->offsets, y->offsets, (size_t)e->item.ndim * 8), 0);
            assert_int_equal(memcmp(x->sizes, y->sizes, (size_t)e->item.ndim * 8), 0);
            assert_int_equal(s->offset, t->offset);
            assert_int_equal(s->length, t->length);
            assert_string_equal(one->files[s->file].ptr, md->files[t->file].ptr);
        }
        dcp__metadata_free(one);
    }
}

static void release_is_guessed(const dcp__metadata *md, const char *release)
{
    int major = 0, minor = 0;
    assert_int_equal(sscanf(release, "%d.%d", &major, &minor), 2);
    assert_true(md->release_from <= major * 100 + minor && major * 100 + minor <= md->release_to);
}

static int check_case(const char *release, const char *name)
{
    char dir[400], path[512];
    json_error_t where;
    snprintf(path, sizeof path, GOLDEN "/%s/%s/expect.json", release, name);
    json_t *expect = json_load_file(path, 0, &where);
    snprintf(dir, sizeof dir, GOLDEN "/%s/%s/ckpt", release, name);
    int n_read = 0;
    for (int rank = -1; expect && rank < 4; rank++) {
        char file[32] = ".metadata", digit[2] = {(char)('0' + rank), 0};
        if (rank >= 0) {
            snprintf(file, sizeof file, "__%d.metadata", rank);
        }
        snprintf(path, sizeof path, "%s/%s", dir, file);
        blob b = slurp(path);
        if (!b.bytes) {
            continue;
        }
        dcp__metadata *md = read_blob(&b, NULL, path);
        size_t n = has_all(md, json_object_get(expect, "tensors"), json_object_get(expect, "objects"));
        if (rank >= 0) {
            n += has_all(md, json_object_get(json_object_get(expect, "per_rank"), digit), NULL);
        }
        assert_int_equal(md->n_entries, n);
        bool is_zip = strcmp(name, "zstd") != 0 && strcmp(name, "safetensors_records") != 0;
        records_are_there(md, dir, is_zip, rank < 0);
        release_is_guessed(md, release);
        assert_false(md->has_trailer);
        each_alone(&b, md);
        dcp__metadata_free(md);
        free(b.bytes);
        n_read++;
    }
    json_decref(expect);
    return n_read;
}

static void golden__every_release_and_case(void **state)
{
    (void)state;
    static const char *const releases[] = {"2.1.2", "2.7.1", "2.9.1", "2.13.0", "2.15.0"};
    int n_read = 0;
    for (size_t i = 0; i < 5; i++) {
        char path[400];
        snprintf(path, sizeof path, GOLDEN "/%s", releases[i]);
        DIR *d = opendir(path);
        assert_non_null(d);
        for (struct dirent *e = readdir(d); e; e = readdir(d)) {
            n_read += e->d_name[0] == '.' ? 0 : check_case(releases[i], e->d_name);
        }
        closedir(d);
    }
    assert_int_equal(n_read, 63);
}

/* One chunk record of a 2.15 file, worked out by hand with pickletools. */
static void golden__sharded_rows_of_2_15(void **state)
{
    (void)state;
    blob b = slurp(GOLDEN "/2.15.0/sharded/ckpt/.metadata");
    dcp__metadata *md = read_blob(&b, NULL, "sharded");
    uint64_t i;
    assert_string_equal(md->version.ptr, "1.0.0");
    assert_string_equal(md->save_id.ptr, "02b6cb29-9a14-484d-b33e-303ed36564f5");
    assert_string_equal(md->checkpoint_id.ptr, "golden/2.15.0/sharded/ckpt");
    assert_true(md->has_planner_data);
    assert_true(dcp__strmap_get(&md->by_fqn, dcp_str_of("rows"), &i));
    static const int64_t rows[][2] = {{0, 3}, {3, 3}, {6, 3}, {9, 1}};
    assert_int_equal(md->entries[i].item.n_chunks, 4);
    for (size_t k = 0; k < 4; k++) {
        const dcp__chunk *c = &md->chunks[md->entries[i].first_chunk + k];
        char file[32];
        snprintf(file, sizeof file, "__%zu_0.distcp", k);
        assert_int_equal(c->offsets[0], rows[k][0]);
        assert_int_equal(c->sizes[0], rows[k][1]);
        assert_string_equal(md->files[md->storages[c->storage].file].ptr, file);
    }
    assert_true(dcp__strmap_get(&md->by_fqn, dcp_str_of("rng.0.seed"), &i));
    const dcp_item *seed = &md->entries[i].item;
    assert_int_equal(seed->path_len, 2);
    assert_string_equal(seed->path[0].string.ptr, "rng.0");
    assert_string_equal(seed->path[1].string.ptr, "seed");
    assert_int_equal(md->storages[md->entries[i].storage].offset, 0);
    assert_int_equal(md->storages[md->entries[i].storage].length, 1261);
    dcp__metadata_free(md);
    free(b.bytes);
}

static void golden__truncated_anywhere_fails(void **state)
{
    (void)state;
    static const char *const files[] = {"/2.1.2/sharded", "/2.7.1/zstd", "/2.15.0/sharded"};
    for (size_t i = 0; i < 3; i++) {
        char path[400];
        snprintf(path, sizeof path, GOLDEN "%s/ckpt/.metadata", files[i]);
        blob b = slurp(path);
        assert_non_null(b.bytes);
        for (size_t n = 0; n < b.len; n++) {
            char *cut = malloc(n ? n : 1);
            assert_non_null(cut);
            memcpy(cut, b.bytes, n);
            dcp__source src = dcp__source_memory(cut, n);
            dcp__metadata *md;
            dcp_error err = DCP_ERROR_INIT;
            assert_int_equal(dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, &err), DCP_FORMAT);
            assert_true(err.offset <= n);
            free(cut);
        }
        free(b.bytes);
    }
}

static void golden__mutations_never_crash(void **state)
{
    (void)state;
    const char *given = getenv("DCP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20240607, x = seed | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    blob b = slurp(GOLDEN "/2.15.0/sharded/ckpt/.metadata");
    char *stream = malloc(b.len);
    assert_non_null(stream);
    for (int run = 0; run < 5000; run++) {
        memcpy(stream, b.bytes, b.len);
        for (int k = 0; k <= run % 5; k++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            stream[x % b.len] = (char)(x >> 40);
        }
        dcp__source src = dcp__source_memory(stream, b.len);
        dcp__metadata *md;
        dcp_error err = DCP_ERROR_INIT;
        dcp_str only = dcp_str_of("rows");
        dcp_status status = dcp__metadata_read(dcp__context(NULL), &src, run % 2 ? &only : NULL, &md, &err);
        if (status == DCP_OK) {
            dcp__metadata_free(md);
        } else if (status != DCP_FORMAT && status != DCP_LIMIT) {
            fail_msg("seed %llu run %d: %s: %s", (unsigned long long)seed, run, dcp_status_name(status), err.message);
        }
    }
    free(stream);
    free(b.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden__every_release_and_case),
        cmocka_unit_test(golden__sharded_rows_of_2_15),
        cmocka_unit_test(golden__truncated_anywhere_fails),
        cmocka_unit_test(golden__mutations_never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
