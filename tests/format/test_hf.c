#include "format/hf.h"

#include "format/safetensors_writer.h"
#include "support/failing_alloc.h"
#include "support/safetensors_files.h"

#define MAX_FILES 8

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

/* A directory in memory, without its listing's order mattering to the reader. */
typedef struct directory {
    char names[MAX_FILES][96];
    st_file data[MAX_FILES];
    dcp__safetensors headers[MAX_FILES];
    dcp__hf_file files[MAX_FILES];
    size_t n;
    st_file index; /* bytes NULL: none */
    bool allow_gaps;
} directory;

static void add_file(directory *d, const char *name, st_file data)
{
    size_t i = d->n++;
    assert_true(d->n <= MAX_FILES);
    snprintf(d->names[i], sizeof d->names[i], "%s", name);
    d->data[i] = data;
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = st_source(&d->data[i]);
    if (dcp__safetensors_open(ctx, &src, true, &d->headers[i], &err) != DCP_OK) {
        fail_msg("%s: %s: %s", name, dcp_status_name(err.code), err.message);
    }
    d->files[i] = (dcp__hf_file){dcp_str_of(d->names[i]), &d->headers[i]};
}

static void free_directory(directory *d)
{
    for (size_t i = 0; i < d->n; i++) {
        dcp__safetensors_reset(&d->headers[i]);
        free(d->data[i].bytes);
    }
    free(d->index.bytes);
    *d = (directory){0};
}

static void load_directory(directory *d, const char *path)
{
    char pattern[512];
    glob_t found;
    *d = (directory){0};
    snprintf(pattern, sizeof pattern, "%s/*.safetensors", path);
    assert_int_equal(glob(pattern, 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        add_file(d, strrchr(found.gl_pathv[i], '/') + 1, st_load(found.gl_pathv[i]));
    }
    globfree(&found);
    snprintf(pattern, sizeof pattern, "%s/model.safetensors.index.json", path);
    if (glob(pattern, 0, NULL, &found) == 0) {
        d->index = st_load(pattern);
        globfree(&found);
    }
}

/* Leaves file i out. */
static void drop_file(directory *d, size_t i)
{
    dcp__safetensors_reset(&d->headers[i]);
    free(d->data[i].bytes);
    d->n--;
    for (; i < d->n; i++) {
        memcpy(d->names[i], d->names[i + 1], sizeof d->names[i]);
        d->data[i] = d->data[i + 1];
        d->headers[i] = d->headers[i + 1];
    }
}

static dcp_str index_text(const directory *d)
{
    return (dcp_str){(const char *)d->index.bytes, d->index.len};
}

static dcp__metadata *read_directory(const directory *d)
{
    dcp__metadata *m;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp__hf_metadata(ctx, d->files, d->n, index_text(d), d->allow_gaps, &m, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    return m;
}

static dcp_error directory_fails(const directory *d)
{
    dcp__metadata *m;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp__hf_metadata(ctx, d->files, d->n, index_text(d), d->allow_gaps, &m, &err);
    assert_int_not_equal(status, DCP_OK);
    assert_int_equal(status, err.code);
    return err;
}

static const dcp__entry *find_entry(const dcp__metadata *m, const char *name)
{
    uint64_t i;
    assert_true(dcp__strmap_get(&m->by_fqn, dcp_str_of(name), &i));
    return &m->entries[i];
}

/* A file of one tensor "t" of bytes, with an extent and, unless they are -1, saved offset and global extent. */
static st_file one_tensor(const char *dtype, int64_t extent, int64_t offset, int64_t global)
{
    char json[512], own[128] = "";
    if (global >= 0) {
        snprintf(own, sizeof own, ",\"libdcp\":\"{\\\"schema\\\":1,\\\"tensors\\\":{\\\"t\\\":{\\\"shape\\\":[%lld]}}}\"",
                 (long long)global);
    }
    size_t n = (size_t)snprintf(json, sizeof json, "{\"t\":{\"dtype\":\"%s\",\"shape\":[%lld],\"data_offsets\":[0,%lld]}", dtype,
                                (long long)extent, (long long)extent);
    if (offset >= 0) {
        n += (size_t)snprintf(json + n, sizeof json - n,
                              ",\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{\\\"saved_offsets\\\":[%lld]}}\"%s}",
                              (long long)offset, own);
    }
    strcpy(json + n, "}");
    return st_make(json, (size_t)extent);
}

static st_file empty_file(void)
{
    return st_make("{}", 0);
}

/* ---- real directories ---- */

/* Element by element; the tensors are small. */
static void place_chunk(uint8_t *whole, const dcp__entry *e, const dcp__chunk *c, const uint8_t *bytes)
{
    size_t elem = dcp_dtype_bytes(e->item.dtype);
    int64_t n = 1, at[DCP_MAX_NDIM] = {0};
    for (int d = 0; d < e->item.ndim; d++) {
        n *= c->sizes[d];
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t place = 0, rest = i;
        for (int d = e->item.ndim - 1; d >= 0; d--) {
            at[d] = rest % c->sizes[d];
            rest /= c->sizes[d];
        }
        for (int d = 0; d < e->item.ndim; d++) {
            place = place * e->item.extents[d] + c->offsets[d] + at[d];
        }
        memcpy(whole + (size_t)place * elem, bytes + (size_t)i * elem, elem);
    }
}

static void compare_entry(const directory *d, const dcp__metadata *m, const dcp__entry *e, json_t *tensors)
{
    uint8_t *whole = calloc(e->item.bytes + 1, 1);
    for (size_t i = 0; i < e->item.n_chunks; i++) {
        const dcp__chunk *c = &m->chunks[e->first_chunk + i];
        const dcp__storage *s = &m->storages[c->storage];
        assert_int_equal(s->form, DCP__FORM_RAW);
        assert_int_equal(s->transforms, 0);
        assert_string_equal(m->files[s->file].ptr, d->names[s->file]);
        place_chunk(whole, e, c, d->data[s->file].bytes + s->offset);
    }
    st_expect(tensors, e->item.fqn, e->item.dtype, e->item.ndim, e->item.extents, whole, e->item.bytes);
    assert_int_equal(e->item.path_len, 1);
    assert_string_equal(e->item.path[0].string.ptr, e->item.fqn.ptr);
    assert_int_equal(e->item.rank, -1);
    free(whole);
}

static void compare_directory(const char *dir, bool use_index)
{
    char path[512];
    directory d;
    snprintf(path, sizeof path, "%s/expect.json", dir);
    json_t *expect = json_load_file(path, 0, NULL), *tensors = json_object_get(expect, "tensors");
    snprintf(path, sizeof path, "%s/ckpt", dir);
    load_directory(&d, path);
    if (!use_index) {
        free(d.index.bytes);
        d.index = (st_file){0};
    }
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(m->n_entries, json_object_size(tensors));
    assert_int_equal(m->n_files, d.n);
    for (size_t i = 0; i < m->n_entries; i++) {
        compare_entry(&d, m, &m->entries[i], tensors);
    }
    assert_int_equal(m->release_from, 208);
    assert_false(m->own.present);
    dcp__metadata_free(m);
    free_directory(&d);
    json_decref(expect);
}

static void hf__golden_directories_read_as_expected(void **state)
{
    (void)state;
    glob_t dirs;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/hf*", 0, NULL, &dirs), 0);
    assert_true(dirs.gl_pathc >= 4);
    for (size_t i = 0; i < dirs.gl_pathc; i++) {
        compare_directory(dirs.gl_pathv[i], true);
        compare_directory(dirs.gl_pathv[i], false);
    }
    globfree(&dirs);
}

static void load_golden_shards(directory *d)
{
    load_directory(d, DCP_TEST_DIR "/golden/2.15.0/hf_sharded/ckpt");
    assert_int_equal(d->n, 4);
}

static void hf__ranks_are_counted(void **state)
{
    (void)state;
    directory d;
    load_golden_shards(&d);
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(m->own.world, 4);
    dcp__metadata_free(m);
    free_directory(&d);
}

/* ---- missing files ---- */

static void hf__a_gap_between_shards_names_the_missing_one(void **state)
{
    (void)state;
    for (size_t missing = 0; missing < 3; missing++) {
        directory d;
        char number[16];
        load_golden_shards(&d);
        drop_file(&d, missing);
        dcp_error err = directory_fails(&d);
        assert_int_equal(err.code, DCP_NOT_FOUND);
        snprintf(number, sizeof number, "shard %zu ", missing + 1);
        assert_non_null(strstr(err.message, number));
        free_directory(&d);
    }
}

/* PyTorch's files do not tell how many there were: what a lost last one costs. */
static void hf__pytorchs_last_shard_is_not_missed(void **state)
{
    (void)state;
    directory d;
    load_golden_shards(&d);
    drop_file(&d, 3);
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(find_entry(m, "rows")->item.extents[0], 9); /* 10 with it */
    dcp__metadata_free(m);
    free_directory(&d);
}

/* Our own key states shape and ranks. */
static st_file own_shard(int64_t offset, int64_t extent, int64_t global, int world)
{
    dcp__st_entry e = {dcp_str_of("t"), DCP_UINT8, 1, &extent, &offset, &global};
    dcp__st_opts opts = {.world = world};
    dcp__buf out;
    uint64_t start, total;
    dcp__buf_init(&out, ctx);
    assert_int_equal(dcp__safetensors_header(&out, &e, 1, &opts, &start, &total, NULL), DCP_OK);
    st_file f = {calloc(total, 1), total};
    memcpy(f.bytes, out.data, out.len);
    dcp__buf_reset(&out);
    return f;
}

/* A rank of PyTorch's without items writes no file. What is lost otherwise shows as a gap where the tensor has one. */
static void hf__gaps_between_shards_may_be_allowed(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", one_tensor("U8", 4, 0, -1));
    add_file(&d, "shard-00005-model-00001-of-00001.safetensors", one_tensor("U8", 4, 4, -1));
    assert_int_equal(directory_fails(&d).code, DCP_NOT_FOUND);
    d.allow_gaps = true;
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(m->entries[0].item.extents[0], 8);
    assert_int_equal(m->entries[0].item.n_chunks, 2);
    assert_int_equal(m->own.world, 5);
    dcp__metadata_free(m);
    free_directory(&d);
    d = (directory){.allow_gaps = true};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", own_shard(0, 4, 8, 4));
    add_file(&d, "shard-00003-model-00001-of-00001.safetensors", own_shard(4, 4, 8, 4));
    m = read_directory(&d);
    assert_int_equal(m->own.world, 4);
    dcp__metadata_free(m);
    add_file(&d, "shard-00005-model-00001-of-00001.safetensors", own_shard(4, 4, 8, 4));
    assert_int_equal(directory_fails(&d).code, DCP_FORMAT); /* of a save by four */
    free_directory(&d);
}

static void hf__our_last_shard_is_missed(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", own_shard(0, 4, 10, 3));
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", own_shard(4, 4, 10, 3));
    dcp_error err = directory_fails(&d);
    assert_int_equal(err.code, DCP_NOT_FOUND);
    assert_non_null(strstr(err.message, "shard 3 "));
    add_file(&d, "shard-00003-model-00001-of-00001.safetensors", own_shard(8, 2, 10, 3));
    dcp__metadata *m = read_directory(&d);
    assert_true(m->own.present);
    assert_int_equal(m->own.world, 3);
    assert_string_equal(m->own.writer.ptr, "libdcp " DCP_VERSION_STRING);
    assert_null(m->own.records[2]);
    assert_int_equal(m->own.n_records[2], 0);
    dcp__metadata_free(m);
    free_directory(&d);
}

/* User report 96: global length 10, shards cover 0-4 and 4-8. */
static void hf__a_stated_global_shape_keeps_the_tail(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", one_tensor("U8", 4, 0, -1));
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", one_tensor("U8", 4, 4, 10));
    dcp__metadata *m = read_directory(&d);
    const dcp__entry *t = find_entry(m, "t");
    assert_int_equal(t->item.extents[0], 10);
    assert_int_equal(t->item.bytes, 10);
    assert_int_equal(t->item.n_chunks, 2);
    assert_int_equal(m->chunks[t->first_chunk + 1].offsets[0], 4);
    dcp__metadata_free(m);
    free_directory(&d);
}

static void hf__a_shard_beyond_the_stated_shape_is_refused(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", one_tensor("U8", 4, 0, 10));
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", one_tensor("U8", 4, 7, -1));
    assert_int_equal(directory_fails(&d).code, DCP_FORMAT);
    free_directory(&d);
}

static void hf__a_missing_part_is_named(void **state)
{
    (void)state;
    static const char *const sets[][3] = {
        {"model-00002-of-00002.safetensors"},
        {"model-00001-of-00002.safetensors"},
        {"x-00001-of-00003.safetensors", "x-00003-of-00003.safetensors"},
        {"x-00001-of-00001.safetensors", "y-00002-of-00002.safetensors"},
        {"x-000001-of-123456.safetensors"},
    };
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        directory d = {0};
        for (size_t k = 0; k < 3 && sets[i][k]; k++) {
            add_file(&d, sets[i][k], empty_file());
        }
        assert_int_equal(directory_fails(&d).code, DCP_NOT_FOUND);
        free_directory(&d);
    }
}

static void hf__other_names_are_taken_as_they_are(void **state)
{
    (void)state;
    static const char *const names[] = {"model.safetensors",
                                        "shard-1-model-1-of-2.safetensors",
                                        "-of-00002.safetensors",
                                        "shard-00003.safetensors",
                                        "shard-.safetensors",
                                        "a-00001-of-00001.safetensors",
                                        "shard-x0001-model-00001-of-00001.safetensors",
                                        ".safetensors"};
    directory d = {0};
    for (size_t i = 0; i < MAX_FILES; i++) {
        add_file(&d, names[i], i == 3 ? one_tensor("U8", 3, -1, -1) : empty_file());
    }
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(m->n_entries, 1);
    assert_int_equal(m->storages[0].file, 3);
    assert_int_equal(m->release_from, 0);
    dcp__metadata_free(m);
    free_directory(&d);
}

static void hf__no_files_are_no_tensors(void **state)
{
    (void)state;
    directory d = {0};
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(m->n_entries, 0);
    dcp__metadata_free(m);
}

static void hf__parts_of_shards_are_taken_together(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00002-model-00002-of-00002.safetensors", one_tensor("U8", 1, 4, -1));
    add_file(&d, "shard-00001-model-00002-of-00002.safetensors", one_tensor("U8", 4, 0, -1));
    add_file(&d, "shard-00001-model-00001-of-00002.safetensors", empty_file());
    dcp__metadata *m = read_directory(&d);
    assert_int_equal(find_entry(m, "t")->item.extents[0], 5);
    assert_int_equal(m->own.world, 2);
    dcp__metadata_free(m);
    free_directory(&d);
}

/* ---- disagreement ---- */

static void two_files_fail(st_file a, st_file b, dcp_status code)
{
    directory d = {0};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", a);
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", b);
    dcp_error err = directory_fails(&d);
    assert_int_equal(err.code, code);
    assert_non_null(strstr(err.message, "shard-00001")); /* both files are named */
    assert_non_null(strstr(err.message, "shard-00002"));
    free_directory(&d);
}

static void hf__shards_that_disagree_are_refused(void **state)
{
    (void)state;
    two_files_fail(one_tensor("U8", 4, -1, -1), one_tensor("U8", 4, -1, -1), DCP_FORMAT);
    two_files_fail(one_tensor("U8", 4, 0, -1), one_tensor("U8", 4, -1, -1), DCP_FORMAT);
    two_files_fail(one_tensor("U8", 4, -1, -1), one_tensor("U8", 4, 4, -1), DCP_FORMAT);
    two_files_fail(one_tensor("U8", 4, 0, -1), one_tensor("I8", 4, 4, -1), DCP_FORMAT);
    two_files_fail(one_tensor("U8", 4, 0, 10), one_tensor("U8", 4, 4, 11), DCP_FORMAT);
    two_files_fail(own_shard(0, 4, 8, 2), own_shard(4, 4, 8, 3), DCP_FORMAT);
    two_files_fail(one_tensor("U8", 4, 0, -1),
                   st_make("{\"t\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[0,4]},\"__metadata__\":{"
                           "\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{\\\"saved_offsets\\\":[0,0]}}\"}}",
                           4),
                   DCP_FORMAT);
}

static void hf__shards_of_two_saves_are_refused(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", empty_file());
    add_file(&d, "shard-00002-model-00001-of-00002.safetensors", empty_file());
    assert_int_equal(directory_fails(&d).code, DCP_FORMAT);
    free_directory(&d);
    add_file(&d, "shard-00001-model-00001-of-00001.safetensors", own_shard(0, 4, 8, 1));
    add_file(&d, "shard-00002-model-00001-of-00001.safetensors", one_tensor("U8", 4, 4, -1));
    assert_int_equal(directory_fails(&d).code, DCP_FORMAT);
    free_directory(&d);
}

static void hf__global_sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    directory d = {0};
    add_file(&d, "a.safetensors",
             st_make("{\"t\":{\"dtype\":\"F64\",\"shape\":[1,0],\"data_offsets\":[0,0]},\"__metadata__\":{"
                     "\"DCP_SHARDING_INFO\":\"{\\\"t\\\":{\\\"saved_offsets\\\":[4611686018427387904,4611686018427387904]}}\"}}",
                     0));
    assert_int_equal(directory_fails(&d).code, DCP_FORMAT);
    free_directory(&d);
}

/* ---- index ---- */

static dcp_status with_index(const char *index)
{
    directory d = {0};
    add_file(&d, "model-00001-of-00003.safetensors", one_tensor("U8", 4, -1, -1));
    add_file(&d, "model-00003-of-00003.safetensors", empty_file());
    dcp__metadata *m;
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp__hf_metadata(ctx, d.files, d.n, dcp_str_of(index), false, &m, &err);
    assert_int_equal(status, err.code);
    if (status == DCP_OK) {
        assert_int_equal(m->n_entries, 1);
        dcp__metadata_free(m);
    }
    free_directory(&d);
    return status;
}

static void hf__the_index_must_agree_with_the_files(void **state)
{
    (void)state;
    /* With an index, parts that it does not name need not exist. */
    assert_int_equal(with_index("{\"weight_map\":{\"t\":\"model-00001-of-00003.safetensors\"}}"), DCP_OK);
    assert_int_equal(with_index("{\"weight_map\":{}, \"metadata\":{\"total_size\":4}}"), DCP_FORMAT); /* there are tensors */
    assert_int_equal(with_index("{\"weight_map\":{\"t\":\"model-00002-of-00003.safetensors\"}}"), DCP_NOT_FOUND);
    assert_int_equal(with_index("{\"weight_map\":{\"t\":\"model-00003-of-00003.safetensors\"}}"), DCP_FORMAT);
    assert_int_equal(with_index("{\"weight_map\":{\"u\":\"model-00001-of-00003.safetensors\"}}"), DCP_FORMAT);
    assert_int_equal(with_index("{\"weight_map\":{\"t\":1}}"), DCP_FORMAT);
    assert_int_equal(with_index("{\"weight_map\":[]}"), DCP_FORMAT);
    assert_int_equal(with_index("{}"), DCP_FORMAT);
    assert_int_equal(with_index("[]"), DCP_FORMAT);
    assert_int_equal(with_index("{\"weight_map\":"), DCP_FORMAT);
    assert_int_equal(with_index(""), DCP_FORMAT);
}

/* A model without tensors has such an index. */
static void hf__an_empty_index_is_that_of_empty_files(void **state)
{
    (void)state;
    directory d = {0};
    dcp__metadata *m;
    add_file(&d, "model-00001-of-00001.safetensors", empty_file());
    assert_int_equal(dcp__hf_metadata(ctx, d.files, d.n, dcp_str_of("{\"weight_map\":{}}"), false, &m, NULL), DCP_OK);
    assert_int_equal(m->n_entries, 0);
    dcp__metadata_free(m);
    free_directory(&d);
}

/* ---- while a model is replaced ---- */

static void hf__a_mark_leaves_the_choice_to_the_index(void **state)
{
    (void)state;
    json_t *mark = json_loads("{\"model\":[\"old\"],\"ignored\":[\"new\",3]}", 0, NULL);
    json_t *index = json_loads("{\"weight_map\":{\"t\":\"new\"}}", 0, NULL), *other = json_loads("[]", 0, NULL);
    assert_true(dcp__hf_is_current(mark, NULL, "old") && dcp__hf_is_current(mark, NULL, "another"));
    assert_false(dcp__hf_is_current(mark, NULL, "new"));
    assert_true(dcp__hf_is_current(mark, index, "new"));
    assert_false(dcp__hf_is_current(mark, index, "old") || dcp__hf_is_current(mark, index, "another"));
    assert_true(dcp__hf_is_marked(mark, "old") && dcp__hf_is_marked(mark, "new"));
    assert_false(dcp__hf_is_marked(mark, "another") || dcp__hf_is_marked(other, "old"));
    assert_true(dcp__hf_is_current(other, NULL, "new"));
    assert_false(dcp__hf_is_current(mark, other, "new")); /* it sends nothing anywhere */
    json_decref(mark);
    json_decref(index);
    json_decref(other);
}

static void hf__stems_end_before_the_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *name, *stem;
    } cases[] = {
        {"model.safetensors", "model"},
        {"model-00001-of-00002.safetensors", "model"},
        {"model.1-00001-of-00002.safetensors", "model.1"},
        {"shard-00001-model-00001-of-00002.safetensors", "shard-00001-model"},
        {"model-1-of-2.safetensors", "model-1-of-2"},
        {"-00001-of-00002.safetensors", ""},
        {".safetensors", ""},
        {"other", "other"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(dcp__hf_stem_bytes(dcp_str_of(cases[i].name)), strlen(cases[i].stem));
    }
}

/* ---- failing memory and random changes ---- */

static dcp_status read_once(dcp_context *with, void *user, dcp_error *err)
{
    const directory *d = user;
    dcp__metadata *m;
    dcp_status status = dcp__hf_metadata(with, d->files, d->n, index_text(d), false, &m, err);
    if (status == DCP_OK) {
        dcp__metadata_free(m);
    }
    return status;
}

static void hf__failing_allocations_leak_nothing(void **state)
{
    (void)state;
    directory d;
    load_golden_shards(&d);
    assert_true(failing_alloc_walk(read_once, &d) > 0);
    free_directory(&d);
    load_directory(&d, DCP_TEST_DIR "/golden/2.15.0/hf/ckpt");
    assert_true(failing_alloc_walk(read_once, &d) > 0);
    free_directory(&d);
}

static void hf__random_changes_of_the_index_end_in_a_status(void **state)
{
    (void)state;
    uint64_t random = st_seed();
    directory d;
    size_t refused = 0;
    load_directory(&d, DCP_TEST_DIR "/golden/2.15.0/hf/ckpt");
    st_file whole = d.index;
    for (int round = 0; round < 2000; round++) {
        d.index = st_mutate(&whole, &random);
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = read_once(ctx, &d, &err);
        assert_true(status == DCP_OK || status == DCP_FORMAT || status == DCP_NOT_FOUND);
        refused += status != DCP_OK;
        free(d.index.bytes);
    }
    assert_true(refused > 0);
    d.index = whole;
    free_directory(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hf__golden_directories_read_as_expected),
        cmocka_unit_test(hf__ranks_are_counted),
        cmocka_unit_test(hf__a_gap_between_shards_names_the_missing_one),
        cmocka_unit_test(hf__gaps_between_shards_may_be_allowed),
        cmocka_unit_test(hf__pytorchs_last_shard_is_not_missed),
        cmocka_unit_test(hf__our_last_shard_is_missed),
        cmocka_unit_test(hf__a_stated_global_shape_keeps_the_tail),
        cmocka_unit_test(hf__a_shard_beyond_the_stated_shape_is_refused),
        cmocka_unit_test(hf__a_missing_part_is_named),
        cmocka_unit_test(hf__other_names_are_taken_as_they_are),
        cmocka_unit_test(hf__no_files_are_no_tensors),
        cmocka_unit_test(hf__parts_of_shards_are_taken_together),
        cmocka_unit_test(hf__shards_that_disagree_are_refused),
        cmocka_unit_test(hf__shards_of_two_saves_are_refused),
        cmocka_unit_test(hf__global_sizes_that_overflow_are_refused),
        cmocka_unit_test(hf__the_index_must_agree_with_the_files),
        cmocka_unit_test(hf__an_empty_index_is_that_of_empty_files),
        cmocka_unit_test(hf__a_mark_leaves_the_choice_to_the_index),
        cmocka_unit_test(hf__stems_end_before_the_numbers),
        cmocka_unit_test(hf__failing_allocations_leak_nothing),
        cmocka_unit_test(hf__random_changes_of_the_index_end_in_a_status),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
