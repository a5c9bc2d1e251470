/* Data files and the records in them with one defect each. Positions are those of formats.md 3.10: a small record of PyTorch 2.13
 * has data.pkl at 64, its first payload at 704, its directory at 1016. */
#include <sys/stat.h>

#include "base/bytes.h"
#include "corrupt/damage.h"
#include "corrupt/small.h"

#define SHARDED "golden/2.13.0/sharded/ckpt"
#define PLAIN 11604 /* record of "plain" in the file of rank 3, 1577 bytes, payload of 36 at 704 */
#define RANK_3 "__3_0.distcp"
#define RANK_1 "__1_0.distcp"
#define IN_RANK_1 "rows,cols,few,grid,copy,rng.1.seed"

/* ---- bytes changed ---- */

typedef struct edit {
    uint64_t offset;
    const char *bytes;
    size_t n;
} edit;
#define EDIT(offset, literal)                                                                                                    \
    {                                                                                                                            \
        (offset), literal, sizeof(literal) - 1                                                                                   \
    }

typedef struct edited {
    const char *name;
    edit edits[3];
    outcome want;
} edited;

static void check_edits(const edited *list, size_t n)
{
    place p;
    place_make(&p);
    copy_directory(p.st, "", SHARDED);
    values before = values_of(NULL, p.dir.path);
    file_bytes good = get_file(p.st, RANK_3);
    for (size_t i = 0; i < n; i++) {
        for (const edit *e = list[i].edits; e->n; e++) {
            small_patch(p.st, RANK_3, PLAIN + e->offset, e->bytes, e->n);
        }
        check_outcome(&p, "", &before, list[i].name, &list[i].want);
        set_file(p.st, RANK_3, good.data, good.n);
    }
    free(good.data);
    values_free(&before);
    place_remove(&p);
    assert_no_failures();
}
#define CHECK_EDITS(list) check_edits(list, sizeof(list) / sizeof((list)[0]))

/* Reading and verifying find the same. */
#define BOTH(status, read_offset, offset)                                                                                        \
    {                                                                                                                            \
        .read = status, .verify = status, .file = RANK_3, .item = "plain", .read_at = read_offset, .at = offset                  \
    }
#define FORMAT_SOMEWHERE BOTH(DCP_FORMAT, ANY_OFFSET, ANY_OFFSET)

#define DATA_0 1282 /* directory entry of data/0 */

static void record__payload_and_pickle_are_checked(void **state)
{
    (void)state;
    static const edited list[] = {
        {"a flipped payload bit", {EDIT(704 + 35, "\x77")}, BOTH(DCP_CHECKSUM, PLAIN + 704, PLAIN + 704)},
        {"a wrong crc", {EDIT(DATA_0 + 16, "abcd")}, BOTH(DCP_CHECKSUM, PLAIN + 704, PLAIN + 704)},
        {"a crc of zero: none was computed", {EDIT(DATA_0 + 16, "\0\0\0\0")}, {0}},
        {"another dtype in the pickle", {EDIT(64 + 54, "Int")}, BOTH(DCP_CHECKSUM, ANY_OFFSET, PLAIN + 64)},
        {"the crc of the pickle", {EDIT(1016 + 16, "abcd")}, BOTH(DCP_CHECKSUM, ANY_OFFSET, PLAIN + 64)},
        {"bytes that nobody uses", {EDIT(10, "\1\2\3\4"), EDIT(52, "YY"), EDIT(1016 + 12, "\1\2\3\4")}, {0}},
    };
    CHECK_EDITS(list);
}

static void record__directory_that_lies_is_refused(void **state)
{
    (void)state;
    static const edited list[] = {
        {"stored size larger", {EDIT(DATA_0 + 20, "\x28\0\0\0\x28\0\0\0")}, FORMAT_SOMEWHERE},
        {"stored size smaller", {EDIT(DATA_0 + 20, "\x20\0\0\0\x20\0\0\0")}, FORMAT_SOMEWHERE},
        {"the two sizes differ", {EDIT(DATA_0 + 24, "\x28\0\0\0")}, FORMAT_SOMEWHERE},
        {"sizes of 4 GiB", {EDIT(DATA_0 + 20, "\xf0\xff\xff\xff\xf0\xff\xff\xff")}, FORMAT_SOMEWHERE},
        {"zip64 sizes that are not there", {EDIT(DATA_0 + 20, "\xff\xff\xff\xff\xff\xff\xff\xff")}, FORMAT_SOMEWHERE},
        {"the place of another member", {EDIT(DATA_0 + 42, "\0\0\0\0")}, FORMAT_SOMEWHERE},
        {"a place behind the end", {EDIT(DATA_0 + 42, "\0\0\xff\x7f")}, FORMAT_SOMEWHERE},
        {"another name", {EDIT(DATA_0 + 46 + 13, "1")}, BOTH(DCP_FORMAT, ANY_OFFSET, ANY_OFFSET)},
        {"another prefix", {EDIT(DATA_0 + 46, "b")}, FORMAT_SOMEWHERE},
        {"deflated, it says", {EDIT(DATA_0 + 10, "\x08")}, FORMAT_SOMEWHERE},
        {"an unknown method", {EDIT(DATA_0 + 10, "\x63")}, BOTH(DCP_UNSUPPORTED, ANY_OFFSET, ANY_OFFSET)},
        {"encrypted", {EDIT(DATA_0 + 8, "\x09")}, BOTH(DCP_UNSUPPORTED, ANY_OFFSET, ANY_OFFSET)},
        {"no entry signature", {EDIT(DATA_0, "XX")}, FORMAT_SOMEWHERE},
        {"one entry fewer", {EDIT(1479 + 24, "\6\0\0\0\0\0\0\0\6"), EDIT(1555 + 8, "\6\0\6")}, FORMAT_SOMEWHERE},
        {"2^60 entries",
         {EDIT(1479 + 24, "\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x10"), EDIT(1555 + 8, "\xff\xff\xff\xff")},
         FORMAT_SOMEWHERE},
        {"the two ends disagree", {EDIT(1555 + 8, "\6\0\6")}, FORMAT_SOMEWHERE},
        {"a directory elsewhere", {EDIT(1479 + 48, "\0")}, FORMAT_SOMEWHERE},
        {"no end", {EDIT(1555, "XX")}, FORMAT_SOMEWHERE},
    };
    CHECK_EDITS(list);
}

static void record__local_headers_that_lie_are_refused(void **state)
{
    (void)state;
    static const edited list[] = {
        {"no local signature", {EDIT(598, "XX")}, FORMAT_SOMEWHERE},
        {"an extra field that reaches into the next member", {EDIT(598 + 28, "\xff\xff")}, FORMAT_SOMEWHERE},
        {"an extra field of another length", {EDIT(598 + 28, "\x3f")}, BOTH(DCP_CHECKSUM, PLAIN + 705, PLAIN + 705)},
    };
    CHECK_EDITS(list);
}

static void record__what_it_is_must_be_known(void **state)
{
    (void)state;
    static const edited list[] = {
        {"version 11", {EDIT(832, "11")}, BOTH(DCP_FORMAT, ANY_OFFSET, ANY_OFFSET)},
        {"another byte order", {EDIT(576, "middle")}, BOTH(DCP_FORMAT, ANY_OFFSET, ANY_OFFSET)},
        {"zstd without a transform", {EDIT(0, "\x28\xb5\x2f\xfd")}, FORMAT_SOMEWHERE},
        {"noise", {EDIT(0, "noise")}, FORMAT_SOMEWHERE},
        {"a safetensors header that is none", {EDIT(0, "\x10\0\0\0\0\0\0\0{noise")}, FORMAT_SOMEWHERE},
        {"a safetensors header of another tensor", /* with 8 bytes of data behind it */
         {EDIT(0, "\x3a\0\0\0\0\0\0\0{\"x\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ")},
         FORMAT_SOMEWHERE},
    };
    CHECK_EDITS(list);
}

/* ---- files changed ---- */

typedef void (*file_fn)(const place *p);

static void remove_file(const place *p)
{
    assert_int_equal(p->st->ops->remove(p->st, RANK_1, NULL), DCP_OK);
}

static void empty_file(const place *p)
{
    cut_file(p->st, RANK_1, 0);
}

static void directory_instead(const place *p)
{
    remove_file(p);
    assert_int_equal(p->st->ops->make_dir(p->st, RANK_1, NULL), DCP_OK);
}

static void fifo_instead(const place *p)
{
    char path[512];
    remove_file(p);
    snprintf(path, sizeof path, "%s/" RANK_1, p->dir.path);
    assert_int_equal(mkfifo(path, 0600), 0);
}

static void cut_last_kilobyte(const place *p)
{
    cut_file(p->st, RANK_3, 13181 - 1024);
}

static void zero_page(const place *p)
{
    static const char zeros[4096];
    small_patch(p->st, RANK_3, 4096, zeros, sizeof zeros);
}

static void add_junk(const place *p)
{
    small_patch(p->st, RANK_3, 20000, "junk", 4);
    set_file(p->st, "__4_0.distcp", "stale", 5);
    set_file(p->st, "__0_1.distcp", "", 0);
    set_file(p->st, ".metadata.tmp", "\x80\x02noise", 7);
    set_file(p->st, "__0.metadata", "noise", 5);
    set_file(p->st, "model.safetensors", "noise", 5);
}

typedef struct filed {
    const char *name;
    file_fn damage;
    outcome want;
} filed;

static void check_files(const filed *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        place p;
        place_make(&p);
        copy_directory(p.st, "", SHARDED);
        values before = values_of(NULL, p.dir.path);
        list[i].damage(&p);
        check_outcome(&p, "", &before, list[i].name, &list[i].want);
        values_free(&before);
        place_remove(&p);
    }
    assert_no_failures();
}
#define CHECK_FILES(list) check_files(list, sizeof(list) / sizeof((list)[0]))

static void files__missing_short_and_odd_ones_are_named(void **state)
{
    (void)state;
    static const filed list[] = {
        {"a missing file",
         remove_file,
         {.read = DCP_NOT_FOUND,
          .verify = DCP_NOT_FOUND,
          .file = RANK_1,
          .item = IN_RANK_1,
          .read_at = DCP_NO_OFFSET,
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
        {"an empty file",
         empty_file,
         {.read = DCP_FORMAT,
          .verify = DCP_FORMAT,
          .file = RANK_1,
          .item = IN_RANK_1,
          .read_at = ANY_OFFSET,
          .at = 1261,
          .is_quick = true}},
        {"a directory",
         directory_instead,
         {.read = DCP_IO,
          .verify = DCP_IO,
          .file = RANK_1,
          .item = IN_RANK_1,
          .read_at = DCP_NO_OFFSET,
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
        {"a pipe",
         fifo_instead,
         {.read = DCP_IO,
          .verify = DCP_IO,
          .file = RANK_1,
          .item = IN_RANK_1,
          .read_at = DCP_NO_OFFSET,
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
        {"the last kilobyte cut off",
         cut_last_kilobyte,
         {.read = DCP_FORMAT,
          .verify = DCP_FORMAT,
          .file = RANK_3,
          .item = "plain",
          .read_at = ANY_OFFSET,
          .at = PLAIN,
          .is_quick = true}},
        {"a page of zeros",
         zero_page, /* the other records that it hits hold no elements */
         {.read = DCP_FORMAT, .verify = DCP_FORMAT, .file = RANK_3, .item = "rows", .read_at = ANY_OFFSET, .at = ANY_OFFSET}},
        {"what the metadata does not name", add_junk, {0}},
    };
    CHECK_FILES(list);
}

/* ---- records that the small checkpoint is made of ---- */

static void start_small(place *p, values *before)
{
    const md_form good = SMALL_FORM;
    place_make(p);
    small_put(p->st, &good);
    *before = values_of(NULL, p->dir.path);
}

static void finish(place *p, values *before)
{
    values_free(before);
    place_remove(p);
    assert_no_failures();
}

static void records__partial_overlap_is_a_defect(void **state)
{
    (void)state;
    place p;
    values before;
    const md_form form = {.record_length = 900, .first_length = 2001}; /* one byte of the next record */
    const outcome want = {.verify = DCP_FORMAT, .file = SMALL_FIRST, .item = "step", .at = 2000, .is_quick = true};
    start_small(&p, &before);
    small_put_metadata(p.st, &form);
    check_outcome(&p, "", &before, "overlap", &want);
    finish(&p, &before);
}

static void put_second(place *p, const dcp__buf *pickle, const char *const names[4], size_t data_bytes)
{
    static const char data[64];
    const zb_member members[] = {{names[0], pickle->data, pickle->len, 0},
                                 {names[1], data, data_bytes, 0},
                                 {names[2], "3\n", 2, 0},
                                 {names[3], data, data_bytes, 0}};
    zb_opts opts = {0};
    zb_zip z = zb_build(members, names[3] ? 4 : 3, &opts);
    assert_true(z.len <= 900);
    opts.trailing = 900 - z.len;
    free(z.bytes);
    z = zb_build(members, names[3] ? 4 : 3, &opts);
    small_patch(p->st, SMALL_SECOND, 1000, z.bytes, z.len);
    free(z.bytes);
}

typedef struct built {
    const char *name;
    small_tensor tensor;
    const char *names[4];
    size_t data_bytes;
    dcp_status status;
} built;

static void records__of_another_form_are_refused_or_read(void **state)
{
    (void)state;
#define NAMES                                                                                                                    \
    {                                                                                                                            \
        "archive/data.pkl", "archive/data/0", "archive/version"                                                                  \
    }
#define ROWS .sizes = {2, 3}, .strides = {3, 1}
    static const built list[] = {
        {"as it should be", {.elems = 6, ROWS}, NAMES, 24, DCP_OK},
        {"other order of members and another prefix",
         {.elems = 6, ROWS},
         {"x/data.pkl", "x/data/0", "x/.data/version"},
         24,
         DCP_OK},
        {"permuted strides", {.elems = 6, .sizes = {2, 3}, .strides = {1, 2}}, NAMES, 24, DCP_OK},
        {"a storage offset", {.elems = 8, .storage_offset = 2, ROWS}, NAMES, 32, DCP_OK},
        {"two members of one name", {.elems = 6, ROWS}, {"a/data.pkl", "a/data/0", "a/version", "a/data/0"}, 24, DCP_FORMAT},
        {"two prefixes", {.elems = 6, ROWS}, {"a/data.pkl", "b/data/0", "a/version"}, 24, DCP_FORMAT},
        {"no prefix", {.elems = 6, ROWS}, {"data.pkl", "data/0", "version"}, 24, DCP_FORMAT},
        {"a name that leads out", {.elems = 6, ROWS}, {"a/data.pkl", "a/data/0", "a/version", "a/../x"}, 24, DCP_OK},
        {"no version", {.elems = 6, ROWS}, {"a/data.pkl", "a/data/0", "a/versiom"}, 24, DCP_FORMAT},
        {"no payload", {.elems = 6, ROWS}, {"a/data.pkl", "a/data/1", "a/version"}, 24, DCP_FORMAT},
        {"more elements than bytes", {.elems = 6, ROWS}, NAMES, 20, DCP_FORMAT},
        {"fewer elements than bytes", {.elems = 6, ROWS}, NAMES, 28, DCP_FORMAT},
        {"2^61 elements", {.elems = INT64_C(1) << 61, ROWS}, NAMES, 24, DCP_FORMAT},
        {"2^62 elements, of which 24 bytes remain", {.elems = (INT64_C(1) << 62) + 6, ROWS}, NAMES, 24, DCP_FORMAT},
        {"a negative number of elements", {.elems = -6, ROWS}, NAMES, 24, DCP_FORMAT},
        {"another shape", {.elems = 6, .sizes = {3, 2}, .strides = {2, 1}}, NAMES, 24, DCP_FORMAT},
        {"a larger shape", {.elems = 9, .sizes = {3, 3}, .strides = {3, 1}}, NAMES, 36, DCP_FORMAT},
        {"strides that lead out", {.elems = 6, .sizes = {2, 3}, .strides = {4, 1}}, NAMES, 24, DCP_FORMAT},
        {"negative strides", {.elems = 6, .sizes = {2, 3}, .strides = {-3, 1}}, NAMES, 24, DCP_FORMAT},
        {"strides that overflow", {.elems = 6, .sizes = {2, 3}, .strides = {INT64_MAX, 1}}, NAMES, 24, DCP_FORMAT},
        {"a storage offset that leads out", {.elems = 6, .storage_offset = 1, ROWS}, NAMES, 24, DCP_FORMAT},
        {"a negative storage offset", {.elems = 6, .storage_offset = -1, ROWS}, NAMES, 24, DCP_FORMAT},
        {"another dtype", {.elems = 6, .storage = "IntStorage", ROWS}, NAMES, 24, DCP_FORMAT},
        {"a quantised storage", {.elems = 6, .storage = "QUInt8Storage", ROWS}, NAMES, 24, DCP_FORMAT},
        {"an unknown storage", {.elems = 6, .storage = "Storage", ROWS}, NAMES, 24, DCP_UNSUPPORTED},
        {"a sparse tensor", {.fn = "_rebuild_sparse_tensor", .elems = 6, ROWS}, NAMES, 24, DCP_UNSUPPORTED},
        {"a call of something else", {.module = "os", .fn = "system", .elems = 6, ROWS}, NAMES, 24, DCP_UNSUPPORTED},
        {"fewer elements stored than the tensor has", {.elems = 1, .sizes = {2, 3}, .strides = {0, 0}}, NAMES, 4, DCP_FORMAT},
    };
    place p;
    values before;
    start_small(&p, &before);
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        dcp__buf pickle;
        const outcome want = {.read = list[i].status,
                              .verify = list[i].status,
                              .file = SMALL_SECOND,
                              .item = "w",
                              .read_at = ANY_OFFSET,
                              .at = ANY_OFFSET};
        dcp__buf_init(&pickle, dcp__context(NULL));
        small_tensor_pickle(&pickle, &list[i].tensor);
        put_second(&p, &pickle, list[i].names, list[i].data_bytes);
        check_outcome(&p, "", &before, list[i].name, list[i].status ? &want : &(outcome){.item = "w"});
        dcp__buf_reset(&pickle);
    }
    finish(&p, &before);
}

/* The bytes are 6 to 11, and the bit says that -6 to -11 are meant. */
static void records__a_neg_bit_is_applied(void **state)
{
    (void)state;
    place p;
    values before;
    dcp__buf pickle;
    const small_tensor t = {.is_neg = true, .elems = 6, .sizes = {2, 3}, .strides = {3, 1}};
    float rows[6];
    start_small(&p, &before);
    const float *old = (const float *)(const void *)values_find(&before, "w", -1)->bytes;
    for (int i = 0; i < 6; i++) {
        rows[i] = old[6 + i];
    }
    dcp__buf_init(&pickle, dcp__context(NULL));
    small_tensor_pickle(&pickle, &t);
    zb_zip z = small_archive(&pickle, rows, sizeof rows, 900);
    small_patch(p.st, SMALL_SECOND, 1000, z.bytes, z.len);
    free(z.bytes);
    dcp__buf_reset(&pickle);
    values after = values_of(NULL, p.dir.path);
    const float *new = (const float *)(const void *)values_find(&after, "w", -1)->bytes;
    for (int i = 0; i < 12; i++) {
        assert_true(new[i] == (i < 6 ? old[i] : -(float)i));
    }
    values_free(&after);
    finish(&p, &before);
}

/* ---- names of files ---- */

typedef struct named {
    const char *name, *path;
    dcp_status status;
    bool allows_outside;
} named;

static void paths__stay_in_the_directory(void **state)
{
    (void)state;
    char outside[300], up[400];
    place p;
    values before;
    start_small(&p, &before);
    file_bytes second = get_file(p.st, SMALL_SECOND);
    snprintf(outside, sizeof outside, "%s.outside", p.dir.path);
    FILE *f = fopen(outside, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(second.data, 1, second.n, f), second.n);
    fclose(f);
    snprintf(up, sizeof up, "sub/../../%s", strrchr(outside, '/') + 1);
    const named list[] = {
        {"an absolute path", outside, DCP_FORMAT, false},
        {"a path that leads out", up, DCP_FORMAT, false},
        {"a path with .. that stays", "sub/../sub/__1_0.distcp", DCP_FORMAT, false},
        {"only ..", "..", DCP_FORMAT, false},
        {"no name", "", DCP_FORMAT, false},
        {"the directory itself", ".", DCP_IO, false},
        {"a name with .", "./sub/./__1_0.distcp", DCP_OK, false},
        {"two slashes", "sub//__1_0.distcp", DCP_OK, false},
        {"an absolute path, allowed", outside, DCP_OK, true},
        {"a path that leads out, allowed", up, DCP_OK, true},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const md_form form = {.record_length = 900, .second_path = list[i].path};
        const outcome want = {.read = list[i].status,
                              .verify = list[i].status,
                              .item = "w",
                              .read_at = DCP_NO_OFFSET,
                              .at = DCP_NO_OFFSET,
                              .allows_outside = list[i].allows_outside,
                              .breaks_info = list[i].status == DCP_FORMAT,
                              .is_quick = true};
        small_put_metadata(p.st, &form);
        check_outcome(&p, "", &before, list[i].name, &want);
    }
    free(second.data);
    unlink(outside);
    finish(&p, &before);
}

static void links__must_not_lead_out(void **state)
{
    (void)state;
    place p, other;
    values before;
    char from[512], to[512];
    start_small(&p, &before);
    place_make(&other);
    file_bytes second = get_file(p.st, SMALL_SECOND);
    set_file(other.st, "__1_0.distcp", second.data, second.n);
    const outcome refused = {.read = DCP_IO,
                             .verify = DCP_IO,
                             .file = SMALL_SECOND,
                             .item = "w",
                             .read_at = DCP_NO_OFFSET,
                             .at = DCP_NO_OFFSET,
                             .is_quick = true};
    outcome looped = refused;
    looped.breaks_info = true;
    const outcome allowed = {.allows_outside = true}, good = {0};

    snprintf(from, sizeof from, "%s/" SMALL_SECOND, p.dir.path);
    snprintf(to, sizeof to, "%s/__1_0.distcp", other.dir.path);
    unlink(from);
    assert_int_equal(symlink(to, from), 0);
    check_outcome(&p, "", &before, "a file that is a link outside", &refused);
    check_outcome(&p, "", &before, "a file that is a link outside, allowed", &allowed);
    unlink(from);
    set_file(p.st, "kept.distcp", second.data, second.n);
    assert_int_equal(symlink("../kept.distcp", from), 0);
    check_outcome(&p, "", &before, "a link inside", &good);
    unlink(from);
    assert_int_equal(symlink("__1_0.distcp", from), 0);
    check_outcome(&p, "", &before, "a link to itself", &looped);
    unlink(from);
    snprintf(from, sizeof from, "%s/sub", p.dir.path);
    assert_int_equal(rmdir(from), 0);
    assert_int_equal(symlink(other.dir.path, from), 0);
    check_outcome(&p, "", &before, "a folder that is a link outside", &refused);
    check_outcome(&p, "", &before, "a folder that is a link outside, allowed", &allowed);
    free(second.data);
    place_remove(&other);
    finish(&p, &before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(record__payload_and_pickle_are_checked),
        cmocka_unit_test(record__directory_that_lies_is_refused),
        cmocka_unit_test(record__local_headers_that_lie_are_refused),
        cmocka_unit_test(record__what_it_is_must_be_known),
        cmocka_unit_test(files__missing_short_and_odd_ones_are_named),
        cmocka_unit_test(records__partial_overlap_is_a_defect),
        cmocka_unit_test(records__of_another_form_are_refused_or_read),
        cmocka_unit_test(records__a_neg_bit_is_applied),
        cmocka_unit_test(paths__stay_in_the_directory),
        cmocka_unit_test(links__must_not_lead_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
