/* Layouts other than one DCP directory, incomplete directories of every kind, and claims far larger than their files. */
#include <sys/stat.h>
#include <zstd.h>

#include "cli/tool.h"
#include "corrupt/damage.h"
#include "corrupt/small.h"

static const values nothing;

static void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *fmt, ...)
{
    char command[4096];
    va_list args;
    va_start(args, fmt);
    vsnprintf(command, sizeof command, fmt, args);
    va_end(args);
    assert_int_equal(system(command), 0);
}

/* ---- safetensors ---- */

typedef struct header {
    const char *name, *json;
    uint64_t length; /* that the file claims; 0: the true one */
    size_t data_bytes;
    outcome want;
} header;

static void put_header(const place *p, const header *h)
{
    uint8_t bytes[1024] = {0};
    size_t n = strlen(h->json);
    uint64_t length = h->length ? h->length : n;
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, h->json, n);
    set_file(p->st, "model.safetensors", bytes, 8 + n + h->data_bytes);
}

#define REFUSED_AT(offset)                                                                                                       \
    {                                                                                                                            \
        .open = DCP_FORMAT, .file = "model.safetensors", .at = offset                                                            \
    }
#define A_U8_2 "\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}"

static void safetensors__headers_that_lie_are_refused(void **state)
{
    (void)state;
    static const header list[] = {
        {"a good one", "{" A_U8_2 "}", 0, 2, {0}},
        {"metadata and no tensor", "{\"__metadata__\":{\"k\":\"v\"}}", 0, 0, {0}},
        {"nothing in it", "{}", 0, 0, {0}},
        {"a header longer than the file", "{" A_U8_2 "}", 5000, 2, REFUSED_AT(0)},
        {"a header of 2^63 bytes", "{" A_U8_2 "}", UINT64_C(1) << 63, 2, REFUSED_AT(0)},
        {"a header cut in its length", "{" A_U8_2 "}", 30, 2, REFUSED_AT(ANY_OFFSET)},
        {"a header of one byte", "{" A_U8_2 "}", 1, 2, REFUSED_AT(ANY_OFFSET)},
        {"no JSON", "{noise}", 0, 2, REFUSED_AT(ANY_OFFSET)},
        {"a name twice", "{" A_U8_2 "," A_U8_2 "}", 0, 2, REFUSED_AT(ANY_OFFSET)},
        {"data missing", "{" A_U8_2 "}", 0, 1, REFUSED_AT(ANY_OFFSET)},
        {"data too long", "{" A_U8_2 "}", 0, 3, REFUSED_AT(ANY_OFFSET)},
        {"data at a hole", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 0, 3, REFUSED_AT(ANY_OFFSET)},
        {"data of another length", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,2]}}", 0, 2,
         REFUSED_AT(ANY_OFFSET)},
        {"a shape of 2^64 bytes", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, 0,
         REFUSED_AT(ANY_OFFSET)},
        {"2^62 bytes", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4611686018427387904],\"data_offsets\":[0,4611686018427387904]}}", 0,
         2, REFUSED_AT(ANY_OFFSET)},
        {"a dtype nobody knows",
         "{\"a\":{\"dtype\":\"X8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
         0,
         2,
         {.open = DCP_UNSUPPORTED, .file = "model.safetensors", .at = ANY_OFFSET}},
        {"metadata that are no texts", "{\"__metadata__\":{\"step\":7}}", 0, 0, REFUSED_AT(ANY_OFFSET)},
        {"a tensor of the name __metadata__", "{\"__metadata__\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 0, 2,
         REFUSED_AT(ANY_OFFSET)},
        {"sharding of no tensor", "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[]}}\"}}", 0, 0,
         REFUSED_AT(ANY_OFFSET)},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        place p;
        place_make(&p);
        put_header(&p, &list[i]);
        check_outcome(&p, "model.safetensors", &nothing, list[i].name, &list[i].want);
        check_outcome(&p, "", &nothing, list[i].name, &list[i].want);
        place_remove(&p);
    }
    assert_no_failures();
}

static void safetensors__a_zip_in_front_is_no_safetensors_file(void **state)
{
    (void)state;
    place p;
    const outcome want = REFUSED_AT(ANY_OFFSET);
    place_make(&p);
    copy_directory(p.st, "", "golden/2.13.0/hf_sharded/ckpt");
    shell("cd '%s' && rm shard-0000[234]* && head -c 1261 '%s/golden/2.13.0/objects/ckpt/__0_0.distcp' > model.safetensors && "
          "cat shard-00001* >> model.safetensors && rm shard-*",
          p.dir.path, DCP_TEST_DIR);
    check_outcome(&p, "", &nothing, "an object before the header", &want);
    place_remove(&p);
    assert_no_failures();
}

static void safetensors__listing_reads_the_header_only(void **state)
{
    (void)state;
    place p;
    dcp_storage *counted;
    dcp_storage_counts counts = {0};
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    const header h = {"", "{\"a\":{\"dtype\":\"U8\",\"shape\":[5368709120],\"data_offsets\":[0,5368709120]}}", 0, 0, {0}};
    place_make(&p);
    put_header(&p, &h);
    shell("truncate -s +5368709120 '%s/model.safetensors'", p.dir.path);
    assert_int_equal(dcp_storage_count(NULL, p.st, &counts, &counted, NULL), DCP_OK);
    opts.storage = counted;
    if (dcp_checkpoint_open(NULL, "model.safetensors", &opts, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(dcp_checkpoint_item(ck, 0)->bytes, INT64_C(5368709120));
    assert_true(counts.bytes_read < 4096);
    dcp_checkpoint_close(ck);
    dcp_storage_free(counted);
    place_remove(&p);
}

/* ---- Hugging Face directories ---- */

typedef struct scripted {
    const char *name, *golden, *script, *path;
    outcome want;
} scripted;

static void check_scripts(const scripted *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        place p;
        place_make(&p);
        copy_directory(p.st, "", list[i].golden);
        values before = values_of(NULL, p.dir.path);
        shell("cd '%s' && { %s ; }", p.dir.path, list[i].script);
        check_outcome(&p, list[i].path, &before, list[i].name, &list[i].want);
        values_free(&before);
        place_remove(&p);
    }
    assert_no_failures();
}
#define CHECK_SCRIPTS(list) check_scripts(list, sizeof(list) / sizeof((list)[0]))

#define HF "golden/2.13.0/hf/ckpt"
#define HF_SHARDED "golden/2.13.0/hf_sharded/ckpt"
#define RANK_LOCAL "golden/2.13.0/rank_local/ckpt"
#define SHARDED "golden/2.13.0/sharded/ckpt"
#define SHARD_4 "shard-00004-model-00001-of-00001.safetensors"

static void hugging_face__incomplete_directories_are_named(void **state)
{
    (void)state;
    static const scripted list[] = {
        {"as it was", HF, "true", "", {0}},
        {"in a cache of links",
         HF,
         "mkdir -p blobs snapshots/abc; for f in model*; do mv $f blobs/sha-$f; ln -s ../../blobs/sha-$f snapshots/abc/$f; done",
         "snapshots/abc",
         {0}},
        {"one file in a cache of links",
         HF,
         "rm model-00002* *.json; mkdir -p blobs snapshots/abc; mv model-00001* blobs/sha; ln -s ../../blobs/sha "
         "snapshots/abc/model.safetensors",
         "snapshots/abc/model.safetensors",
         {0}},
        {"a cache whose blob is gone",
         HF,
         "mkdir -p blobs snapshots/abc; for f in model*; do mv $f blobs/sha-$f; ln -s ../../blobs/sha-$f snapshots/abc/$f; done; "
         "rm blobs/sha-model-00002*",
         "snapshots/abc",
         {.open = DCP_NOT_FOUND, .file = "model-00002-of-00002.safetensors", .at = DCP_NO_OFFSET}},
        {"a file that the index names is missing",
         HF,
         "rm model-00002-of-00002.safetensors",
         "",
         {.open = DCP_NOT_FOUND, .file = "model-00002-of-00002.safetensors", .at = DCP_NO_OFFSET}},
        {"a part missing, and no index",
         HF,
         "rm *.json model-00002-of-00002.safetensors",
         "",
         {.open = DCP_NOT_FOUND, .file = "00002", .at = DCP_NO_OFFSET}},
        {"an index that names a file outside",
         HF,
         "sed -i s,model-00002,../model-00002, *.json",
         "",
         {.open = DCP_NOT_FOUND, .file = "model.safetensors.index.json", .at = DCP_NO_OFFSET}},
        {"an index that names another tensor",
         HF,
         "sed -i s/channels_last/channels_list/ *.json",
         "",
         {.open = DCP_FORMAT, .file = "model.safetensors.index.json", .at = DCP_NO_OFFSET}},
        {"an index that is no JSON",
         HF,
         "echo noise > model.safetensors.index.json",
         "",
         {.open = DCP_FORMAT, .file = "model.safetensors.index.json", .at = ANY_OFFSET}},
        {"an empty index",
         HF,
         "truncate -s 0 model.safetensors.index.json",
         "",
         {.open = DCP_FORMAT, .file = "model.safetensors.index.json", .at = ANY_OFFSET}},
        {"only the index",
         HF,
         "rm model-*",
         "",
         {.open = DCP_NOT_FOUND, .file = "model.safetensors.index.json", .at = DCP_NO_OFFSET}},
        {"shards as they were", HF_SHARDED, "true", "", {0}},
        {"a shard missing",
         HF_SHARDED,
         "rm shard-00002*",
         "",
         {.open = DCP_NOT_FOUND, .file = "shard-00002", .at = DCP_NO_OFFSET}},
        {"the first shard missing",
         HF_SHARDED,
         "rm shard-00001*",
         "",
         {.open = DCP_NOT_FOUND, .file = "shard-00001", .at = DCP_NO_OFFSET}},
        {"a shard of 0 bytes", HF_SHARDED, "truncate -s 0 " SHARD_4, "", {.open = DCP_FORMAT, .file = SHARD_4, .at = 0}},
        {"a shard twice",
         HF_SHARDED,
         "cp " SHARD_4 " shard-00005-model-00001-of-00001.safetensors",
         "",
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .file = "shard-00005-model-00001-of-00001.safetensors",
          .item = "rows",
          .at = ANY_OFFSET,
          .is_quick = true}},
    };
    CHECK_SCRIPTS(list);
}

/* pt PR 189945: what the files cover is smaller than the tensor was. */
static void hugging_face__a_gap_between_shards_is_told(void **state)
{
    (void)state;
    place p;
    static const char first[] = "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[0]}}\"},"
                                "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";
    static const char second[] = "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"a\\\":{\\\"saved_offsets\\\":[5]}}\"},"
                                 "\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}";
    const outcome want = {.read = DCP_FORMAT,
                          .read_at = DCP_NO_OFFSET,
                          .is_shape = true,
                          .verify = DCP_FORMAT,
                          .item = "a",
                          .at = DCP_NO_OFFSET,
                          .is_quick = true};
    place_make(&p);
    tool_write_safetensors(p.dir.path, "shard-00001-model-00001-of-00001.safetensors", first, 4);
    tool_write_safetensors(p.dir.path, "shard-00002-model-00001-of-00001.safetensors", second, 3);
    check_outcome(&p, "", &nothing, "rows 0 to 3 and 5 to 7", &want);
    place_remove(&p);
    assert_no_failures();
}

/* ---- rank by rank, and mixtures ---- */

static void rank_local__missing_and_odd_ranks_are_named(void **state)
{
    (void)state;
    static const scripted list[] = {
        {"as it was", RANK_LOCAL, "true", "", {0}},
        {"a rank missing",
         RANK_LOCAL,
         "rm __2.metadata",
         "",
         {.open = DCP_NOT_FOUND, .file = "__2.metadata", .at = DCP_NO_OFFSET}},
        {"the first rank missing",
         RANK_LOCAL,
         "rm __0.metadata",
         "",
         {.open = DCP_NOT_FOUND, .file = "__0.metadata", .at = DCP_NO_OFFSET}},
        {"a rank's metadata cut",
         RANK_LOCAL,
         "truncate -s 500 __2.metadata",
         "",
         {.open = DCP_FORMAT, .file = "__2.metadata", .at = ANY_OFFSET}},
        {"a rank's metadata empty",
         RANK_LOCAL,
         "truncate -s 0 __2.metadata",
         "",
         {.open = DCP_FORMAT, .file = "__2.metadata", .at = ANY_OFFSET}},
        {"the largest rank there is", RANK_LOCAL, "cp __3.metadata __2147483647.metadata", "", {0}},
        {"the largest rank but one",
         RANK_LOCAL,
         "cp __3.metadata __2147483646.metadata",
         "",
         {.open = DCP_NOT_FOUND, .file = "__4.metadata", .at = DCP_NO_OFFSET}},
        {"a rank beyond all numbers", RANK_LOCAL, "cp __3.metadata __99999999999999999999.metadata", "", {0}},
        {"a rank with a zero in front", RANK_LOCAL, "cp __3.metadata __03.metadata", "", {0}},
        {"unfinished metadata beside it", RANK_LOCAL, "echo noise > __4.metadata.tmp", "", {0}},
        {"a rank's metadata twice",
         RANK_LOCAL,
         "cp __3.metadata __4.metadata",
         "",
         {.verify = DCP_OK}}, /* the same chunks again, and values of rank 4 */
        {"metadata of all ranks beside it", SHARDED, "echo noise > __0.metadata", "", {0}},
        {"safetensors beside it", SHARDED, "echo noise > model.safetensors; echo noise > file.pt", "", {0}},
    };
    CHECK_SCRIPTS(list);
}

static void rank_local__global_shapes_must_agree(void **state)
{
    (void)state;
    place p;
    const outcome want = {.open = DCP_FORMAT, .at = DCP_NO_OFFSET};
    place_make(&p);
    for (int r = 0; r < 2; r++) { /* one with 4 rows, one with 5: chunks of both, none is whole */
        const md_form form = {.record_length = 900, .first_dim = 4 + r};
        small_put_metadata(p.st, &form);
        shell("mv '%s/.metadata' '%s/__%d.metadata'", p.dir.path, p.dir.path, r);
    }
    check_outcome(&p, "", &nothing, "4 rows and 5 rows", &want);
    place_remove(&p);
    assert_no_failures();
}

/* Metadata of one rank with our own facts: of which save, and how many ranks it had. */
static void put_rank(const place *p, int rank, const char *save_id, int world)
{
    dcp__buf own;
    char path[64];
    snprintf(path, sizeof path, "__%d_0.distcp", rank);
    dcp__buf_init(&own, dcp__context(NULL));
    pk_raw(&own, "}(");
    pk_str(&own, "schema");
    pk_int(&own, 1);
    pk_str(&own, "writer");
    pk_str(&own, "libdcp 0.1.0");
    pk_str(&own, "save_id");
    pk_str(&own, save_id);
    pk_str(&own, "world");
    pk_int(&own, world);
    pk_str(&own, "rank");
    pk_int(&own, rank);
    pk_op(&own, 'u');
    const md_form form = {.record_length = 900, .own = &own};
    small_put_metadata(p->st, &form);
    shell("mv '%s/.metadata' '%s/__%d.metadata'", p->dir.path, p->dir.path, rank);
    dcp__buf_reset(&own);
}

static void rank_local__two_saves_and_missing_ranks_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name, *second_id;
        int world;
        outcome want;
    } list[] = {
        {"one save", "a", 2, {0}},
        {"two saves", "b", 2, {.open = DCP_FORMAT, .file = "__1.metadata", .at = DCP_NO_OFFSET}},
        {"the last rank missing", "a", 3, {.open = DCP_NOT_FOUND, .file = "__2.metadata", .at = DCP_NO_OFFSET}},
        {"more ranks than there were", "a", 1, {.open = DCP_FORMAT, .file = "__1.metadata", .at = DCP_NO_OFFSET}},
    };
    const md_form good = SMALL_FORM;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        place p;
        place_make(&p);
        small_put(p.st, &good);
        put_rank(&p, 0, "a", list[i].world);
        put_rank(&p, 1, list[i].second_id, list[i].world);
        check_outcome(&p, "", &nothing, list[i].name, &list[i].want);
        place_remove(&p);
    }
    assert_no_failures();
}

/* ---- directories that are no whole checkpoint (acc 3010, pt 99976, orbax 394) ---- */

static void directories__each_state_has_its_own_message(void **state)
{
    (void)state;
    static const struct {
        const char *script, *says;
    } list[] = {
        {"rm .metadata", ".metadata is missing"},
        {"truncate -s 500 .metadata", "byte"},
        {"truncate -s 0 .metadata", "byte 0"},
        {"rm .metadata *.distcp; echo x > rank_0.pt; echo x > rank_1.pt", "torch.save files"},
        {"rm .metadata *.distcp", "empty"},
        {"mv .metadata .metadata.tmp", "did not finish"},
        {"rm .metadata; rm *.distcp; mkdir sharded", "sharded"},
        {"rm .metadata *.distcp; echo x > notes", "none of"},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        place p;
        place_make(&p);
        copy_directory(p.st, "", SHARDED);
        shell("cd '%s' && { %s ; }", p.dir.path, list[i].script);
        tool_run r = tool("ls '%s'", p.dir.path);
        if (r.status != 1 || r.out_len || !strstr(r.err, list[i].says)) {
            fail_msg("%s: status %d, %s", list[i].script, r.status, r.err);
        }
        tool_free(&r);
        place_remove(&p);
    }
}

static void directories__a_copy_is_as_complete_as_the_original(void **state)
{
    (void)state;
    static const scripted list[] = {
        {"cp -r", SHARDED, "mkdir a; mv * .metadata a 2>/dev/null; cp -r a b; rm -r a", "b", {0}},
        {"a copy without times and rights", SHARDED, "chmod 444 *; touch -d 1971-01-01 * .metadata", "", {0}},
        {"without dot files",
         SHARDED,
         "mkdir b; cp *.distcp b",
         "b",
         {.open = DCP_NOT_FOUND, .file = ".metadata", .at = DCP_NO_OFFSET}},
        {"without the data",
         SHARDED,
         "mkdir b; cp .metadata b",
         "b",
         {.read = DCP_NOT_FOUND, .verify = DCP_NOT_FOUND, .read_at = DCP_NO_OFFSET, .at = DCP_NO_OFFSET, .is_quick = true}},
    };
    CHECK_SCRIPTS(list);
}

static void metadata__special_files_are_not_waited_for(void **state)
{
    (void)state;
    static const scripted list[] = {
        {"a pipe", SHARDED, "rm .metadata; mkfifo .metadata", "", {.open = DCP_IO, .file = ".metadata", .at = DCP_NO_OFFSET}},
        {"a link to nothing",
         SHARDED,
         "rm .metadata; ln -s nothing .metadata",
         "",
         {.open = DCP_NOT_FOUND, .file = ".metadata", .at = DCP_NO_OFFSET}},
        {"a link outside",
         SHARDED,
         "mv .metadata /tmp/dcp-test-md.$$; ln -s /tmp/dcp-test-md.$$ .metadata",
         "",
         {.open = DCP_IO, .file = ".metadata", .at = DCP_NO_OFFSET}},
        {"a link inside", SHARDED, "mv .metadata md; ln -s md .metadata", "", {0}},
        {"an endless device",
         SHARDED,
         "rm __1_0.distcp; ln -s /dev/zero __1_0.distcp",
         "",
         {.read = DCP_IO,
          .verify = DCP_IO,
          .file = "__1_0.distcp",
          .item = "rows,cols,few,grid,copy,rng.1.seed",
          .read_at = DCP_NO_OFFSET,
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
    };
    CHECK_SCRIPTS(list);
    shell("rm -f /tmp/dcp-test-md.*");
}

static void latest__passes_over_every_kind_of_damage(void **state)
{
    (void)state;
    static const char *const damage[] = {
        "rm step-9/.metadata",
        "rm step-9/__2_0.distcp",
        "truncate -s 13180 step-9/__3_0.distcp",
        "truncate -s 9 step-9/.metadata",
        "mv step-9/.metadata step-9/.metadata.tmp",
        "rm step-9/.metadata; mkfifo step-9/.metadata",
        "rm step-9/__1_0.distcp; mkfifo step-9/__1_0.distcp",
        "truncate -s 0 step-9/.metadata",
        "rm step-9/__1_0.distcp; ln -s ../step-8/__1_0.distcp step-9",
    };
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++) {
        place p;
        place_make(&p);
        shell("cd '%s' && cp -r '%s/" SHARDED "' step-8 && cp -r step-8 step-9 && { %s ; }", p.dir.path, DCP_TEST_DIR, damage[i]);
        tool_run r = tool("latest '%s'", p.dir.path);
        if (r.status != 0 || !strstr(r.out, "step-8") || strstr(r.out, "step-9") || !strstr(r.err, "step-9")) {
            fail_msg("%s: status %d, %s%s", damage[i], r.status, r.out, r.err);
        }
        tool_free(&r);
        place_remove(&p);
    }
}

/* ---- claims ---- */

static void put_second_record(place *p, const void *bytes, size_t n)
{
    cut_file(p->st, SMALL_SECOND, 1000);
    small_patch(p->st, SMALL_SECOND, 1000, bytes, n);
}

static void claims__a_compressed_bomb_is_not_blown_up(void **state)
{
    (void)state;
    place p;
    md_form form = SMALL_FORM;
    const size_t big = 256u << 20;
    char *zeros = calloc(1, big);
    size_t cap = ZSTD_compressBound(big);
    char *packed = malloc(cap);
    assert_true(zeros && packed);
    size_t n = ZSTD_compress(packed, cap, zeros, big, 3);
    assert_false(ZSTD_isError(n));
    free(zeros);
    const outcome want = {.read = DCP_LIMIT, .verify = DCP_LIMIT, .file = SMALL_SECOND, .item = "w", .read_at = 1000, .at = 1000};
    place_make(&p);
    small_put(p.st, &form);
    values before = values_of(NULL, p.dir.path);
    form.record_length = (int64_t)n;
    form.transform = "stream.zstd/1";
    form.is_transform_of_second = true;
    put_second_record(&p, packed, n);
    small_put_metadata(p.st, &form);
    check_outcome(&p, "", &before, "256 MiB of zeros", &want);
    free(packed);
    values_free(&before);
    place_remove(&p);
    assert_no_failures();
}

/* A view that repeats its few elements: torch.save keeps it so. */
static void claims__an_endless_view_is_refused(void **state)
{
    (void)state;
    static const struct {
        int64_t rows;
        dcp_status status;
    } list[] = {{1000, DCP_OK}, {INT64_C(1) << 40, DCP_LIMIT}, {INT64_C(1) << 61, DCP_LIMIT}, {INT64_MAX, DCP_FORMAT}};
    place p;
    place_make(&p);
    for (size_t i = 0; i < 4; i++) {
        dcp__buf pickle;
        const float data[] = {1, 2, 3};
        const small_tensor t = {.elems = 3, .sizes = {list[i].rows, 1}, .strides = {0, 1}};
        const outcome want = {.open = list[i].status, .file = "file.pt", .at = ANY_OFFSET};
        dcp__buf_init(&pickle, dcp__context(NULL));
        small_tensor_pickle(&pickle, &t);
        zb_zip z = small_archive(&pickle, data, sizeof data, 900);
        set_file(p.st, "file.pt", z.bytes, z.len);
        free(z.bytes);
        dcp__buf_reset(&pickle);
        check_outcome(&p, "file.pt", &nothing, "a repeated element", &want);
    }
    place_remove(&p);
    assert_no_failures();
}

/* Trees allocate tensors before they read them: not on the word of a metadata file. */
static void claims__a_tree_takes_no_memory_for_lies(void **state)
{
    (void)state;
    const md_form forms[] = {
        {.record_length = 900, .first_dim = INT64_C(1) << 36},
        {.record_length = 900, .first_dim = (INT64_C(1) << 36) + 2, .second_rows = INT64_C(1) << 36},
    };
    for (size_t i = 0; i < 2; i++) {
        place p;
        meter m;
        dcp_checkpoint *ck;
        dcp_value *root;
        dcp_error err = DCP_ERROR_INIT;
        place_make(&p);
        small_put(p.st, &forms[i]);
        meter_start(&m);
        assert_int_equal(dcp_checkpoint_open(m.ctx, p.dir.path, NULL, &ck, &err), DCP_OK);
        assert_int_equal(dcp_read_tree(ck, true, &root, &err), DCP_FORMAT);
        assert_non_null(strstr(err.message, "\"w\""));
        assert_true(m.peak < 1 << 20);
        dcp_checkpoint_close(ck);
        meter_stop(&m);
        place_remove(&p);
    }
}

/* ---- what is read in parts ---- */

static void large__a_flipped_bit_is_found_before_anything_is_printed(void **state)
{
    (void)state;
    place p;
    dcp_value *root;
    dcp_error err = DCP_ERROR_INIT;
    const int64_t extents[] = {40, 1 << 20};
    const size_t bytes = 40u << 20;
    char *data = calloc(1, bytes);
    assert_non_null(data);
    const dcp_tensor t = dcp_tensor_make(DCP_UINT8, 2, extents, data);
    assert_int_equal(dcp_dict_create(NULL, &root, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_tensor(root, "w", &t, NULL), DCP_OK);
    place_make(&p);
    if (dcp_save(NULL, p.dir.path, root, NULL, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
    free(data);
    small_patch(p.st, "__0_0.distcp", 30 << 20, "\1", 1);
    static const char *const commands[] = {
        "hash '%s'%s", "hash --json '%s'%s", "cat '%s'%s --format raw", "cat '%s'%s --format npy", "cat '%s'%s", "verify '%s'%s"};
    for (size_t i = 0; i < 6; i++) {
        char arguments[512];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(arguments, sizeof arguments, commands[i], p.dir.path, commands[i][0] == 'c' ? " w" : "");
#pragma GCC diagnostic pop
        tool_run r = tool("%s", arguments);
        if (r.status != 1 || (i < 5 && r.out_len) || !strstr(i < 5 ? r.err : r.out, "__0_0.distcp") ||
            !strstr(i < 5 ? r.err : r.out, "byte 704")) {
            fail_msg("%s: status %d, %.300s %s", arguments, r.status, r.out, r.err);
        }
        tool_free(&r);
    }
    place_remove(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors__headers_that_lie_are_refused),
        cmocka_unit_test(safetensors__a_zip_in_front_is_no_safetensors_file),
        cmocka_unit_test(safetensors__listing_reads_the_header_only),
        cmocka_unit_test(hugging_face__incomplete_directories_are_named),
        cmocka_unit_test(hugging_face__a_gap_between_shards_is_told),
        cmocka_unit_test(rank_local__missing_and_odd_ranks_are_named),
        cmocka_unit_test(rank_local__global_shapes_must_agree),
        cmocka_unit_test(rank_local__two_saves_and_missing_ranks_are_refused),
        cmocka_unit_test(directories__each_state_has_its_own_message),
        cmocka_unit_test(directories__a_copy_is_as_complete_as_the_original),
        cmocka_unit_test(metadata__special_files_are_not_waited_for),
        cmocka_unit_test(latest__passes_over_every_kind_of_damage),
        cmocka_unit_test(claims__a_compressed_bomb_is_not_blown_up),
        cmocka_unit_test(claims__an_endless_view_is_refused),
        cmocka_unit_test(claims__a_tree_takes_no_memory_for_lies),
        cmocka_unit_test(large__a_flipped_bit_is_found_before_anything_is_printed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
