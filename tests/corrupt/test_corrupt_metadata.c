/* Metadata with one defect each, and the odd but valid forms beside them. */
#include "corrupt/damage.h"
#include "corrupt/small.h"

/* ---- forms of the whole ---- */

typedef struct formed {
    const char *name;
    md_form form;
    outcome want;
} formed;

static void check_forms(const formed *list, size_t n)
{
    place p;
    const md_form good = SMALL_FORM;
    place_make(&p);
    small_put(p.st, &good);
    values before = values_of(NULL, p.dir.path);
    for (size_t i = 0; i < n; i++) {
        small_put_metadata(p.st, &list[i].form);
        check_outcome(&p, "", &before, list[i].name, &list[i].want);
    }
    values_free(&before);
    place_remove(&p);
    assert_no_failures();
}
#define CHECK_FORMS(list) check_forms(list, sizeof(list) / sizeof((list)[0]))

static void good_metadata__every_form_reads_the_same(void **state)
{
    (void)state;
    static const formed list[] = {
        {"as in 2.1", {.record_length = 900}, {0}},
        {"protocol 2", {.record_length = 900, .is_protocol_2 = true}, {0}},
        {"properties of 2.3", {.record_length = 900, .is_new_class = true}, {0}},
        {"strides of 2.15", {.record_length = 900, .is_new_class = true, .has_strides = true}, {0}},
        {"strides with the old class", {.record_length = 900, .has_strides = true}, {0}},
        {"plain tuples", {.record_length = 900, .has_plain_tuples = true}, {0}},
        {"state with slots", {.record_length = 900, .is_slots_state = true}, {0}},
        {"storage meta", {.record_length = 900, .has_storage_meta = true, .has_version = true}, {0}},
        {"path of parts", {.record_length = 900, .has_storage_meta = true, .is_path_of_parts = true}, {0}},
        {"path of Python 3.13", {.record_length = 900, .has_storage_meta = true, .is_path_of_python_3_13 = true}, {0}},
        {"objects with state", {.record_length = 900, .has_bytes_state = true}, {0}},
        {"records that no item has", {.record_length = 900, .has_extra_record = true}, {.verify = DCP_OK}},
        {"an item twice", {.record_length = 900, .has_twice_item = true}, {0}},
        {"a record twice, the last one counts",
         {.record_length = 900, .record_offset = 1, .has_twice_record = true, .second_again = 1000},
         {0}},
        {"no hints", {.record_length = 900, .hints = MD_HINTS_NONE}, {0}},
        {"wrong hints", {.record_length = 900, .hints = MD_HINTS_WRONG}, {0}},
        {"huge hints", {.record_length = 900, .hints = MD_HINTS_HUGE}, {0}},
        {"no planner data", {.record_length = 900, .planner = MD_PLANNER_ABSENT}, {0}},
        {"planner data None", {.record_length = 900, .planner = MD_PLANNER_NONE}, {0}},
        {"planner data of a class", {.record_length = 900, .planner = MD_PLANNER_OPAQUE}, {0}},
        {"planner data ordered", {.record_length = 900, .planner = MD_PLANNER_ORDERED}, {0}},
        {"a subclass of Metadata", {.record_length = 900, .top_module = "my.checkpoint", .top_name = "MyMetadata"}, {0}},
    };
    CHECK_FORMS(list);
}

/* Our own field as someone else may have left it: without a trailer it is a hint, and what it lacks or has wrong does no harm. */
static void own_field__whatever_is_in_it_harms_nothing(void **state)
{
    (void)state;
#define OWN(name, ops)                                                                                                           \
    {                                                                                                                            \
        name, ops, sizeof(ops) - 1                                                                                               \
    }
    static const struct {
        const char *name, *ops;
        size_t n;
    } fields[] = {
        OWN("None", "N"),
        OWN("a number", "K\x01"),
        OWN("nothing in it", "}"),
        OWN("a schema alone", "}\x8c\x06schemaK\x01s"),
        OWN("an unknown schema", "}\x8c\x06schemaK\x02s"),
        OWN("a writer that is no text", "}(\x8c\x06schemaK\x01\x8c\x06writerK\x01u"),
        OWN("a negative world", "}(\x8c\x06schemaK\x01\x8c\x05worldJ\xff\xff\xff\xffu"),
        OWN("records that are no dict", "}(\x8c\x06schemaK\x01\x8c\x07records]u"),
        OWN("digests cut", "}(\x8c\x06schemaK\x01\x8c\x07records}\x8c\x0c__0_0.distcpC\x03"
                           "abcsu"),
        OWN("containers that are no pairs", "}(\x8c\x06schemaK\x01\x8c\x0a"
                                            "containers](K\x01K\x02"
                                            "eu"),
        OWN("an object", "ca\nb\n)R"),
    };
    place p;
    const md_form good = SMALL_FORM;
    place_make(&p);
    small_put(p.st, &good);
    values before = values_of(NULL, p.dir.path);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        dcp__buf own;
        dcp__buf_init(&own, dcp__context(NULL));
        dcp__buf_put(&own, fields[i].ops, fields[i].n);
        const md_form form = {.record_length = 900, .own = &own};
        small_put_metadata(p.st, &form);
        check_outcome(&p, "", &before, fields[i].name, &(outcome){0});
        for (int r = 0; r < 2; r++) { /* and joined from two ranks */
            char name[32];
            file_bytes md = get_file(p.st, ".metadata");
            snprintf(name, sizeof name, "__%d.metadata", r);
            set_file(p.st, name, md.data, md.n);
            free(md.data);
        }
        assert_int_equal(p.st->ops->remove(p.st, ".metadata", NULL), DCP_OK);
        check_outcome(&p, "", &before, fields[i].name, &(outcome){0});
        dcp__buf_reset(&own);
    }
    values_free(&before);
    place_remove(&p);
    assert_no_failures();
}

static void geometry__contradictions_are_found(void **state)
{
    (void)state;
    static const formed list[] = {
        {"chunk outside the tensor",
         {.record_length = 900, .second_offset = 3},
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .file = SMALL_SECOND,
          .item = "w",
          .at = 1000,
          .is_quick = true}},
        {"overlap",
         {.record_length = 900, .second_offset = 1},
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .file = SMALL_SECOND,
          .item = "w",
          .at = 1000,
          .is_quick = true}},
        {"gap",
         {.record_length = 900, .first_dim = 5},
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .item = "w",
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
        {"a tensor of 12 EiB",
         {.record_length = 900, .first_dim = INT64_C(1) << 59},
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .item = "w",
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
        {"a chunk of 12 TiB", /* that covers what it should */
         {.record_length = 900, .first_dim = (INT64_C(1) << 40) + 2, .second_rows = INT64_C(1) << 40},
         {.read = DCP_FORMAT, .read_at = 1000, .verify = DCP_FORMAT, .file = SMALL_SECOND, .item = "w", .at = 1000}},
        {"a chunk's record missing",
         {.record_length = 900, .has_no_second_record = true},
         {.read = DCP_FORMAT,
          .read_at = DCP_NO_OFFSET,
          .is_shape = true,
          .verify = DCP_FORMAT,
          .item = "w",
          .at = DCP_NO_OFFSET,
          .is_quick = true}},
    };
    CHECK_FORMS(list);
}

static void numbers__bad_ones_are_refused(void **state)
{
    (void)state;
    static const outcome refused = {.open = DCP_FORMAT, .file = ".metadata", .at = ANY_OFFSET};
    const formed list[] = {
        {"offsets of one dimension, sizes of two", {.record_length = 900, .n_offsets = 1}, refused},
        {"a negative offset", {.record_length = 900, .second_offset = -2}, refused},
        {"an end behind all numbers", {.record_length = 900, .second_offset = INT64_MAX - 1}, refused},
        {"a negative size", {.record_length = 900, .second_rows = -2}, refused},
        {"a negative dimension", {.record_length = 900, .first_dim = -4}, refused},
        {"more elements than numbers", {.record_length = 900, .first_dim = INT64_MAX}, refused},
        {"a negative record offset", {.record_length = 900, .record_offset = -1}, refused},
        {"a negative record length", {.record_length = -900}, refused},
        {"a record that ends behind all numbers", {.record_length = INT64_MAX, .record_offset = INT64_MAX - 5}, refused},
        {"a length that is a text", {.record_length = 900, .has_str_length = true}, refused},
        {"an enum value of 3", {.record_length = 900, .enum_value = 3}, refused},
        {"a sparse layout", {.record_length = 900, .layout = "torch.sparse_coo"}, refused},
    };
    CHECK_FORMS(list);
}

static void records__ranges_that_do_not_fit_are_found(void **state)
{
    (void)state;
    static const formed list[] = {
        {"a record behind the end of its file",
         {.record_length = 900, .record_offset = 1000000},
         {.read = DCP_FORMAT,
          .read_at = ANY_OFFSET,
          .verify = DCP_FORMAT,
          .file = SMALL_SECOND,
          .item = "w",
          .at = 1000000,
          .is_quick = true}},
        {"a file shorter than its record",
         {.record_length = 901},
         {.read = DCP_FORMAT,
          .read_at = ANY_OFFSET,
          .verify = DCP_FORMAT,
          .file = SMALL_SECOND,
          .item = "w",
          .at = 1000,
          .is_quick = true}},
        {"a record too short for its archive",
         {.record_length = 400},
         {.read = DCP_FORMAT, .read_at = ANY_OFFSET, .verify = DCP_FORMAT, .file = SMALL_SECOND, .item = "w", .at = ANY_OFFSET}},
        {"a record without bytes", /* the helper takes 0 as "the usual" */
         {.record_length = 1},
         {.read = DCP_FORMAT, .read_at = ANY_OFFSET, .verify = DCP_FORMAT, .file = SMALL_SECOND, .item = "w", .at = ANY_OFFSET}},
        {"a record that starts within the archive",
         {.record_length = 899, .record_offset = 1001},
         {.read = DCP_FORMAT, .read_at = 1001, .verify = DCP_FORMAT, .file = SMALL_SECOND, .item = "w", .at = 1001}},
    };
    CHECK_FORMS(list);
}

static void paths__of_endless_length_are_refused(void **state)
{
    (void)state;
    static const outcome limit = {.open = DCP_LIMIT, .file = ".metadata", .at = ANY_OFFSET};
    const formed list[] = {
        {"256 keys", {.record_length = 900, .path_parts = 253}, {0}},
        {"257 keys", {.record_length = 900, .path_parts = 254}, limit},
        {"a million keys", {.record_length = 900, .path_parts = 1000000}, limit},
        {"a list index of 2^40", {.record_length = 900, .path_index = INT64_C(1) << 40}, limit},
        {"a negative list index",
         {.record_length = 900, .path_index = -1},
         {.open = DCP_FORMAT, .file = ".metadata", .at = ANY_OFFSET}},
    };
    CHECK_FORMS(list);
}

/* It is listed, and all else is read. */
static void dtypes__that_are_not_known_concern_their_tensor_alone(void **state)
{
    (void)state;
    static const outcome unread = {.read = DCP_UNSUPPORTED,
                                   .read_at = DCP_NO_OFFSET,
                                   .verify = DCP_FORMAT,
                                   .file = SMALL_SECOND,
                                   .item = "w",
                                   .at = ANY_OFFSET,
                                   .is_shape = true};
    const formed list[] = {
        {"a dtype of a later release", {.record_length = 900, .dtype_name = "float33"}, unread},
        {"a quantised dtype", {.record_length = 900, .dtype_name = "qint8"}, unread},
    };
    CHECK_FORMS(list);
}

static void classes__unknown_ones_in_known_roles_are_refused(void **state)
{
    (void)state;
    static const outcome refused = {.open = DCP_FORMAT, .file = ".metadata", .at = ANY_OFFSET};
    const formed list[] = {
        {"a dtype of another module", {.record_length = 900, .dtype_module = "os", .dtype_name = "system"}, refused},
        {"properties", {.record_length = 900, .props_name = "Properties"}, refused},
        {"a chunk", {.record_length = 900, .chunk_name = "Chunk"}, refused},
        {"a chunk of that name elsewhere", {.record_length = 900, .chunk_module = "my.module"}, refused},
        {"a key", {.record_length = 900, .index_name = "Index"}, refused},
        {"a record", {.record_length = 900, .info_name = "Info"}, refused},
        {"an item", {.record_length = 900, .tensor_name = "Tensor"}, refused},
        {"a memory format", {.record_length = 900, .enum_name = "Format"}, refused},
    };
    CHECK_FORMS(list);
}

static void transforms__unknown_ones_are_unsupported(void **state)
{
    (void)state;
    static const outcome unsupported = {
        .read = DCP_UNSUPPORTED, .read_at = 1000, .verify = DCP_UNSUPPORTED, .file = SMALL_SECOND, .item = "w", .at = 1000};
#define SECOND .record_length = 900, .is_transform_of_second = true
    const formed list[] = {
        {"an unknown transform", {SECOND, .transform = "stream.lz4/1"}, unsupported},
        {"a newer transform", {SECOND, .transform = "stream.zstd/2"}, unsupported},
        {"no version", {SECOND, .transform = "stream.zstd"}, unsupported},
        {"two transforms", {SECOND, .transform = "stream.zstd/1", .transform_2 = "stream.gzip/1"}, unsupported},
    };
    CHECK_FORMS(list);
}

static void dtypes__the_record_must_agree(void **state)
{
    (void)state;
    static const formed list[] = {
        {"another dtype of the same size",
         {.record_length = 900, .dtype_name = "int32"},
         {.read = DCP_FORMAT, .read_at = 0, .verify = DCP_FORMAT, .file = SMALL_FIRST, .item = "w", .at = 0}},
        {"another dtype of another size",
         {.record_length = 900, .dtype_name = "float64"},
         {.read = DCP_FORMAT, .read_at = 0, .verify = DCP_FORMAT, .file = SMALL_FIRST, .item = "w", .at = 0}},
    };
    CHECK_FORMS(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_metadata__every_form_reads_the_same),
        cmocka_unit_test(own_field__whatever_is_in_it_harms_nothing),
        cmocka_unit_test(geometry__contradictions_are_found),
        cmocka_unit_test(numbers__bad_ones_are_refused),
        cmocka_unit_test(records__ranges_that_do_not_fit_are_found),
        cmocka_unit_test(paths__of_endless_length_are_refused),
        cmocka_unit_test(dtypes__that_are_not_known_concern_their_tensor_alone),
        cmocka_unit_test(classes__unknown_ones_in_known_roles_are_refused),
        cmocka_unit_test(transforms__unknown_ones_are_unsupported),
        cmocka_unit_test(dtypes__the_record_must_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
