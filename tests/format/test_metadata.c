/* Metadata in every form, put together here by the published grammar. */
#include <stdio.h>
#include <stdlib.h>

#include "support/failing_alloc.h"
#include "support/metadata_asm.h"

#include "format/metadata.h"

static dcp_status read_form(const md_form *f, const char *only, dcp__metadata **out, dcp_error *err)
{
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, f);
    dcp__source src = dcp__source_memory(b.data, b.len);
    dcp_str name = dcp_str_of(only);
    dcp_status status = dcp__metadata_read(dcp__context(NULL), &src, only ? &name : NULL, out, err);
    dcp__buf_reset(&b);
    return status;
}

static dcp__metadata *read_good(const md_form *f)
{
    dcp__metadata *md;
    dcp_error err = DCP_ERROR_INIT;
    if (read_form(f, NULL, &md, &err) != DCP_OK) {
        fail_msg("%s: %s at %llu", dcp_status_name(err.code), err.message, (unsigned long long)err.offset);
    }
    return md;
}

static void refuse(const md_form *f, dcp_status code)
{
    dcp__metadata *md;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(read_form(f, NULL, &md, &err), code);
    assert_int_equal(err.code, code);
    assert_true(err.offset != DCP_NO_OFFSET);
    if (f->dtype_name || f->top_name || f->props_name || f->chunk_name || f->index_name || f->info_name || f->tensor_name) {
        assert_non_null(strstr(err.message, "Odd")); /* a class in a wrong role is named */
    }
    if (!f->top_name && !f->top_module && !strstr(err.message, "item \"w\"")) { /* what is wrong in these forms belongs to w */
        fail_msg("the item is not named: %s", err.message);
    }
}

static void chunk_is(const dcp__metadata *md, size_t i, int64_t row, int64_t rows, const char *file, uint64_t offset,
                     uint64_t length)
{
    const dcp__chunk *c = &md->chunks[md->entries[0].first_chunk + i];
    assert_int_equal(c->offsets[0], row);
    assert_int_equal(c->offsets[1], 0);
    assert_int_equal(c->sizes[0], rows);
    assert_int_equal(c->sizes[1], 3);
    if (!file) {
        assert_int_equal(c->storage, DCP__NO_STORAGE);
        return;
    }
    assert_true(c->storage < md->n_storages);
    const dcp__storage *s = &md->storages[c->storage];
    assert_string_equal(md->files[s->file].ptr, file);
    assert_int_equal(s->offset, offset);
    assert_int_equal(s->length, length);
    assert_int_equal(s->form, DCP__FORM_RECORD);
}

/* What all forms have in common. */
static void is_as_saved(const dcp__metadata *md)
{
    assert_int_equal(md->n_entries, 2);
    const dcp__entry *w = &md->entries[0], *step = &md->entries[1];
    assert_string_equal(w->item.fqn.ptr, "w");
    assert_int_equal(w->item.kind, DCP_ITEM_TENSOR);
    assert_int_equal(w->item.rank, -1);
    assert_int_equal(w->item.dtype, DCP_FLOAT32);
    assert_int_equal(w->item.ndim, 2);
    assert_int_equal(w->item.extents[0], 4);
    assert_int_equal(w->item.extents[1], 3);
    assert_int_equal(w->item.bytes, 48);
    assert_int_equal(w->item.n_chunks, 2);
    assert_false(w->requires_grad);
    assert_true(w->pin_memory);
    chunk_is(md, 0, 0, 2, "__0_0.distcp", 0, 900);
    assert_string_equal(step->item.fqn.ptr, "step");
    assert_int_equal(step->item.kind, DCP_ITEM_OBJECT);
    assert_int_equal(step->item.n_chunks, 1);
    assert_int_equal(md->storages[step->storage].offset, 2000);
    assert_int_equal(md->storages[step->storage].length, 864);
    uint64_t i;
    assert_true(dcp__strmap_get(&md->by_fqn, dcp_str_of("step"), &i) && i == 1);
    assert_false(dcp__strmap_get(&md->by_fqn, dcp_str_of("ste"), &i));
}

static void forms__all_say_the_same(void **state)
{
    (void)state;
    const md_form forms[] = {
        {0},
        {.is_protocol_2 = true},
        {.is_new_class = true},
        {.is_new_class = true, .has_strides = true, .has_version = true},
        {.has_strides = true},
        {.has_plain_tuples = true},
        {.is_slots_state = true},
        {.has_bytes_state = true},
        {.hints = MD_HINTS_NONE},
        {.hints = MD_HINTS_WRONG},
        {.hints = MD_HINTS_HUGE},
        {.is_shared_offset = true},
        {.is_shared_offset = true, .has_plain_tuples = true},
        {.has_extra_record = true},
        {.has_storage_meta = true, .has_version = true, .is_new_class = true},
        {.planner = MD_PLANNER_ABSENT},
        {.planner = MD_PLANNER_NONE},
        {.planner = MD_PLANNER_OPAQUE},
        {.planner = MD_PLANNER_ORDERED},
        {.top_module = "my.framework", .top_name = "BetterMetadata"},
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        dcp__metadata *md = read_good(&forms[i]);
        is_as_saved(md);
        chunk_is(md, 1, 2, 2, "sub/__1_0.distcp", 1000, 500);
        assert_int_equal(md->n_storages, 3);
        assert_false(md->has_trailer);
        assert_false(md->own.present);
        dcp__metadata_free(md);
    }
}

static void forms__tell_the_release(void **state)
{
    (void)state;
    const struct {
        md_form form;
        int from, to;
    } cases[] = {
        {{0}, 201, 202},
        {{.is_new_class = true}, 203, 203},
        {{.is_new_class = true, .has_storage_meta = true}, 207, 208},
        {{.is_new_class = true, .has_storage_meta = true, .has_version = true}, 209, 214},
        {{.is_new_class = true, .has_storage_meta = true, .has_version = true, .has_strides = true}, 215, 215},
        {{.has_version = true}, 0, 0}, /* no release writes this */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dcp__metadata *md = read_good(&cases[i].form);
        assert_int_equal(md->release_from, cases[i].from);
        assert_int_equal(md->release_to, cases[i].to);
        dcp__metadata_free(md);
    }
}

static void storage_meta__path_in_three_forms(void **state)
{
    (void)state;
    const md_form forms[] = {
        {.has_storage_meta = true, .has_version = true},
        {.has_storage_meta = true, .is_path_of_parts = true},
        {.has_storage_meta = true, .is_path_of_python_3_13 = true, .is_protocol_2 = true},
    };
    for (size_t i = 0; i < 3; i++) {
        dcp__metadata *md = read_good(&forms[i]);
        assert_string_equal(md->checkpoint_id.ptr, "/runs/step 7");
        assert_string_equal(md->save_id.ptr, "abc-1");
        assert_true((md->version.ptr != NULL) == (i == 0));
        dcp__metadata_free(md);
    }
}

static void paths__from_planner_data_or_the_name(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.path_index = 1000000});
    const dcp_item *w = &md->entries[0].item;
    assert_true(md->has_planner_data);
    assert_int_equal(w->path_len, 3);
    assert_false(w->path[0].is_int);
    assert_string_equal(w->path[0].string.ptr, "model");
    assert_true(w->path[1].is_int && w->path[1].integer == 7);
    assert_true(w->path[2].is_int && w->path[2].integer == 1000000);
    dcp__metadata_free(md);
    md = read_good(&(md_form){.planner = MD_PLANNER_NONE});
    w = &md->entries[0].item;
    assert_false(md->has_planner_data);
    assert_int_equal(w->path_len, 1);
    assert_string_equal(w->path[0].string.ptr, "w");
    dcp__metadata_free(md);
}

static void paths__bad_list_indices_are_refused(void **state)
{
    (void)state;
    refuse(&(md_form){.path_index = -1}, DCP_FORMAT);
    refuse(&(md_form){.path_index = 1000001}, DCP_LIMIT);
    refuse(&(md_form){.path_index = INT64_MAX}, DCP_LIMIT);
}

static void records__large_offsets(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.record_offset = (int64_t)1 << 40, .record_length = ((int64_t)1 << 33) + 5});
    chunk_is(md, 1, 2, 2, "sub/__1_0.distcp", (uint64_t)1 << 40, ((uint64_t)1 << 33) + 5);
    dcp__metadata_free(md);
    md = read_good(&(md_form){.first_dim = (int64_t)1 << 50, .second_offset = (int64_t)1 << 49, .second_rows = (int64_t)1 << 48});
    assert_int_equal(md->entries[0].item.bytes, (uint64_t)12 << 50);
    chunk_is(md, 1, (int64_t)1 << 49, (int64_t)1 << 48, "sub/__1_0.distcp", 1000, 500);
    dcp__metadata_free(md);
}

static void records__later_one_of_a_key_counts(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.has_twice_record = true});
    is_as_saved(md);
    chunk_is(md, 1, 2, 2, "sub/__1_0.distcp", 4000, 500);
    assert_int_equal(md->n_storages, 3);
    dcp__metadata_free(md);
}

static void records__missing_one_is_marked(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.has_no_second_record = true});
    is_as_saved(md);
    chunk_is(md, 1, 2, 2, NULL, 0, 0);
    dcp__metadata_free(md);
}

static void records__transforms(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.transform = "stream.zstd/1", .transform_2 = "stream.zstd/1"});
    assert_int_equal(md->n_transforms, 2);
    assert_string_equal(md->transforms[0].ptr, "");
    assert_string_equal(md->transforms[1].ptr, "stream.zstd/1,stream.zstd/1");
    assert_int_equal(md->storages[md->chunks[0].storage].transforms, 1);
    dcp__metadata_free(md);
    refuse(&(md_form){.transform = "a,b"}, DCP_FORMAT);
}

static void roles__unknown_classes_are_named(void **state)
{
    (void)state;
    refuse(&(md_form){.dtype_module = "mylib", .dtype_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.props_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.chunk_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.index_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.info_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.tensor_name = "Odd"}, DCP_FORMAT);
    refuse(&(md_form){.dtype_module = "Odd", .dtype_name = "float32"}, DCP_FORMAT);
}

/* Quantised ones, and those of later releases. */
static void roles__a_dtype_that_is_not_known_is_kept_by_name(void **state)
{
    (void)state;
    dcp__metadata *md = read_good(&(md_form){.dtype_name = "Odd"});
    size_t n = 0;
    for (size_t i = 0; i < md->n_entries; i++) {
        const dcp__entry *e = &md->entries[i];
        if (e->item.kind == DCP_ITEM_TENSOR && e->item.dtype == DCP_DTYPE_NONE) {
            assert_string_equal(e->other_dtype.ptr, "Odd");
            n++;
        } else {
            assert_null(e->other_dtype.ptr);
        }
    }
    assert_true(n > 0);
    dcp__metadata_free(md);
}

static void roles__a_known_name_in_another_module_is_unknown(void **state)
{
    (void)state;
    refuse(&(md_form){.chunk_module = "my.module"}, DCP_FORMAT);
    refuse(&(md_form){.enum_name = "Other"}, DCP_FORMAT);
    refuse(&(md_form){.enum_value = 3}, DCP_FORMAT);
    refuse(&(md_form){.layout = "torch.sparse_coo"}, DCP_FORMAT);
}

/* Wherever the stream breaks off or goes wrong inside an item, the item is named. */
static void errors__name_the_item_that_is_being_read(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, &(md_form){.is_new_class = true});
    size_t n_named = 0, first = 0, last = 0;
    for (size_t n = 1; n < b.len; n++) {
        dcp__metadata *md;
        dcp_error err = DCP_ERROR_INIT;
        dcp__source src = dcp__source_memory(b.data, n);
        assert_int_equal(dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, &err), DCP_FORMAT);
        if (strstr(err.message, "item \"w\"")) {
            first = n_named++ ? first : n;
            last = n;
        }
    }
    const uint8_t *chunk = memmem(b.data, b.len, "offsets", 7), *size = memmem(b.data, b.len, "length", 6);
    assert_true(first < (size_t)(chunk - b.data)); /* from the properties on */
    assert_true(last > (size_t)(size - b.data));   /* to the records */
    assert_true(n_named > b.len / 4);
    dcp__buf_reset(&b);
}

static void shapes__bad_numbers_are_refused(void **state)
{
    (void)state;
    refuse(&(md_form){.n_offsets = 1}, DCP_FORMAT);
    refuse(&(md_form){.first_dim = -1}, DCP_FORMAT);
    refuse(&(md_form){.second_offset = -2}, DCP_FORMAT);
    refuse(&(md_form){.second_rows = -2}, DCP_FORMAT);
    refuse(&(md_form){.second_rows = INT64_MAX}, DCP_FORMAT);
    refuse(&(md_form){.first_dim = INT64_MAX}, DCP_FORMAT);
    refuse(&(md_form){.record_offset = -1}, DCP_FORMAT);
    refuse(&(md_form){.record_length = -1}, DCP_FORMAT);
    refuse(&(md_form){.record_length = INT64_MAX}, DCP_FORMAT);
    refuse(&(md_form){.has_str_length = true}, DCP_FORMAT);
}

static void only__keeps_one(void **state)
{
    (void)state;
    const md_form forms[] = {{0}, {.is_shared_offset = true}, {.has_twice_record = true}, {.hints = MD_HINTS_WRONG}};
    for (size_t i = 0; i < 4; i++) {
        dcp__metadata *md;
        assert_int_equal(read_form(&forms[i], "w", &md, NULL), DCP_OK);
        assert_int_equal(md->n_entries, 1);
        assert_int_equal(md->n_chunks, 2);
        assert_int_equal(md->n_storages, 2);
        assert_int_equal(md->entries[0].item.path_len, 3);
        chunk_is(md, 0, 0, 2, "__0_0.distcp", 0, 900);
        chunk_is(md, 1, 2, 2, "sub/__1_0.distcp", i == 2 ? 4000 : 1000, 500);
        dcp__metadata_free(md);
        assert_int_equal(read_form(&forms[i], "step", &md, NULL), DCP_OK);
        assert_int_equal(md->n_entries, 1);
        assert_int_equal(md->n_chunks, 0);
        assert_int_equal(md->n_storages, 1);
        assert_int_equal(md->storages[md->entries[0].storage].offset, 2000);
        dcp__metadata_free(md);
        assert_int_equal(read_form(&forms[i], "wx", &md, NULL), DCP_OK);
        assert_int_equal(md->n_entries, 0);
        dcp__metadata_free(md);
    }
}

/* ---- streams that share what real ones do not ---- */

static void put_header(dcp__buf *b)
{
    pk_raw(b, "\x80\x04");
    pk_object(b, MD_CHECKPOINT, "Metadata");
    pk_raw(b, "}(");
    pk_str(b, "state_dict_metadata");
}

static dcp_status read_buf(dcp__buf *b, const char *only, dcp__metadata **out, dcp_error *err)
{
    dcp__source src = dcp__source_memory(b->data, b->len);
    dcp_str name = dcp_str_of(only);
    dcp_status status = dcp__metadata_read(dcp__context(NULL), &src, only ? &name : NULL, out, err);
    dcp__buf_reset(b);
    return status;
}

/* {"a": T, "w": T}: one object under two names, with records of their own. */
static void shared_tensor(dcp__buf *b)
{
    const md_form f = {0};
    dcp__buf_init(b, dcp__context(NULL));
    put_header(b);
    pk_raw(b, "}(");
    pk_str(b, "a");
    md_tensor(b, &f);
    pk_raw(b, "\x94");
    pk_str(b, "w");
    pk_raw(b, "h\x00u");
    pk_str(b, "storage_data");
    pk_raw(b, "}(");
    md_record(b, &f, "a", 0, 0, 10, 1);
    md_record(b, &f, "a", 1, 2, 20, 1);
    md_record(b, &f, "w", 0, 0, 30, 1);
    md_record(b, &f, "w", 1, 2, 40, 1);
    pk_raw(b, "uub.");
}

static void sharing__one_tensor_object_under_two_names(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__metadata *md;
    shared_tensor(&b);
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    assert_int_equal(md->n_entries, 2);
    for (size_t i = 0; i < 4; i++) {
        const dcp__chunk *c = &md->chunks[md->entries[i / 2].first_chunk + i % 2];
        assert_int_equal(md->storages[c->storage].offset, 10 * (i + 1));
    }
    dcp__metadata_free(md);
    /* Looking for the second name: the first one's chunks were given up, and are needed after all. */
    shared_tensor(&b);
    assert_int_equal(read_buf(&b, "w", &md, NULL), DCP_OK);
    assert_int_equal(md->n_entries, 1);
    assert_int_equal(md->n_chunks, 2);
    assert_int_equal(md->storages[md->chunks[1].storage].offset, 40);
    dcp__metadata_free(md);
}

/* The record of an item that is not wanted is the record of one that is, too; and so is the offset. */
static void sharing__record_and_offset_of_an_unwanted_item(void **state)
{
    (void)state;
    dcp__buf b;
    const md_form f = {0};
    const char *wanted[] = {NULL, "w"};
    for (int i = 0; i < 2; i++) {
        dcp__metadata *md;
        dcp__buf_init(&b, dcp__context(NULL));
        put_header(&b);
        pk_raw(&b, "}(");
        pk_str(&b, "a");
        md_tensor(&b, &f);
        pk_str(&b, "w");
        md_tensor(&b, &f);
        pk_op(&b, 'u');
        pk_str(&b, "storage_data");
        pk_raw(&b, "}(");
        pk_object(&b, MD_CHECKPOINT, "MetadataIndex");
        pk_raw(&b, "}(");
        pk_str(&b, "fqn");
        pk_str(&b, "a");
        pk_str(&b, "offset");
        pk_size(&b, (const int64_t[]){2, 0}, 2);
        pk_raw(&b, "q\x00ub");
        pk_object(&b, MD_FILESYSTEM, "_StorageInfo");
        pk_raw(&b, "}(");
        pk_str(&b, "relative_path");
        pk_str(&b, "f");
        pk_str(&b, "offset");
        pk_int(&b, 11);
        pk_str(&b, "length");
        pk_int(&b, 12);
        pk_raw(&b, "ubq\x01");
        pk_object(&b, MD_CHECKPOINT, "MetadataIndex");
        pk_raw(&b, "}(");
        pk_str(&b, "fqn");
        pk_str(&b, "w");
        pk_str(&b, "offset");
        pk_raw(&b, "h\x00ubh\x01uub.");
        assert_int_equal(read_buf(&b, wanted[i], &md, NULL), DCP_OK);
        const dcp__entry *w = &md->entries[md->n_entries - 1];
        assert_string_equal(w->item.fqn.ptr, "w");
        assert_int_equal(md->chunks[w->first_chunk].storage, DCP__NO_STORAGE);
        assert_int_equal(md->storages[md->chunks[w->first_chunk + 1].storage].offset, 11);
        dcp__metadata_free(md);
    }
}

/* A list of chunks in another order than they were made in, one of them twice. */
static void sharing__chunks_in_any_order(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__metadata *md;
    const md_form f = {0};
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}");
    pk_str(&b, "w");
    pk_object(&b, MD_CHECKPOINT, "TensorStorageMetadata");
    pk_raw(&b, "}(");
    pk_str(&b, "properties");
    md_properties(&b, &f);
    pk_str(&b, "size");
    pk_size(&b, (const int64_t[]){6, 3}, 2);
    for (int64_t i = 0; i < 3; i++) { /* made and dropped, the memo keeps them */
        md_chunk(&b, &f, (const int64_t[]){i * 2, 0}, 2, (const int64_t[]){2, 3});
        pk_raw(&b, "\x94\x30");
    }
    pk_str(&b, "chunks");
    pk_raw(&b, "](h\x02h\x00h\x01h\x00\x65ubs");
    pk_str(&b, "storage_data");
    pk_raw(&b, "}(");
    for (int64_t i = 0; i < 3; i++) {
        md_record(&b, &f, "w", i, i * 2, 100 + i, 1);
    }
    pk_raw(&b, "uub.");
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    const int64_t expected[] = {2, 0, 1, 0};
    assert_int_equal(md->entries[0].item.n_chunks, 4);
    for (size_t i = 0; i < 4; i++) {
        const dcp__chunk *c = &md->chunks[md->entries[0].first_chunk + i];
        assert_int_equal(c->offsets[0], expected[i] * 2);
        assert_int_equal(md->storages[c->storage].offset, 100 + expected[i]);
    }
    dcp__metadata_free(md);
}

/* One list of 2000 chunks under 2000 tensors would be four million chunks from a file of 150 KB. */
static void sharing__a_chunk_bomb_is_refused(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__metadata *md;
    dcp_error err = DCP_ERROR_INIT;
    const md_form f = {0};
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}(N");
    md_chunk(&b, &f, (const int64_t[]){0, 0}, 2, (const int64_t[]){2, 3});
    pk_raw(&b, "q\x00\x30](");
    for (int i = 0; i < 2000; i++) {
        pk_raw(&b, "h\x00");
    }
    pk_raw(&b, "eq\x01");
    pk_raw(&b, "\x30");
    md_properties(&b, &f);
    pk_raw(&b, "q\x02\x30");
    pk_size(&b, (const int64_t[]){2, 3}, 2);
    pk_raw(&b, "q\x03\x30\x30");
    pk_global(&b, MD_CHECKPOINT, "TensorStorageMetadata");
    pk_raw(&b, "q\x04\x30");
    for (int i = 0; i < 2000; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        pk_str(&b, name);
        pk_raw(&b, "h\x04)\x81}(");
        pk_str(&b, "properties");
        pk_raw(&b, "h\x02");
        pk_str(&b, "size");
        pk_raw(&b, "h\x03");
        pk_str(&b, "chunks");
        pk_raw(&b, "h\x01ub");
    }
    pk_op(&b, 'u');
    pk_str(&b, "storage_data");
    pk_raw(&b, "}ub.");
    assert_int_equal(read_buf(&b, NULL, &md, &err), DCP_LIMIT);
}

static void top__must_be_metadata(void **state)
{
    (void)state;
    static const char *const streams[] = {"\x80\x04N.", "\x80\x04}.", "\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R."};
    for (size_t i = 0; i < 3; i++) {
        dcp__metadata *md;
        dcp__source src = dcp__source_memory(streams[i], strlen(streams[i]));
        assert_int_equal(dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, NULL), DCP_FORMAT);
    }
    dcp__metadata *md;
    dcp__buf b;
    dcp__buf_init(&b, dcp__context(NULL));
    pk_raw(&b, "\x80\x04");
    pk_object(&b, "my", "Other");
    pk_raw(&b, "}");
    pk_str(&b, "state_dict_metadata");
    pk_raw(&b, "}sb.");
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_FORMAT);
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}ub."); /* no storage_data */
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_FORMAT);
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}K\x05Ns"); /* a key that is no string */
    pk_str(&b, "storage_data");
    pk_raw(&b, "}ub.");
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_FORMAT);
}

/* An unknown class where a user's planner or a later release may put one is passed over. */
static void unknown_fields__are_passed_over(void **state)
{
    (void)state;
    dcp__buf b;
    dcp__metadata *md;
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}");
    pk_str(&b, "storage_data");
    pk_raw(&b, "}");
    pk_str(&b, "brand_new");
    pk_object(&b, "torch.future", "Thing");
    pk_raw(&b, "}K\x01K\x02sb");
    pk_str(&b, "storage_meta");
    pk_object(&b, "other", "Meta");
    pk_raw(&b, "ub.");
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    assert_int_equal(md->n_entries, 0);
    assert_null(md->save_id.ptr);
    dcp__metadata_free(md);
}

/* ---- many entries ---- */

static void many__groups_and_long_memo_numbers(void **state)
{
    (void)state;
    enum { N = 2500 };
    const md_form f = {0};
    dcp__buf b;
    dcp__metadata *md;
    dcp__buf_init(&b, dcp__context(NULL));
    put_header(&b);
    pk_raw(&b, "}");
    char name[16];
    for (int i = 0; i < N; i++) {
        if (i % 1000 == 0) {
            pk_raw(&b, "(");
        }
        snprintf(name, sizeof name, "o%d", i);
        pk_str(&b, name);
        pk_raw(&b, "\x94");
        pk_object(&b, MD_CHECKPOINT, "BytesStorageMetadata");
        if (i % 1000 == 999 || i == N - 1) {
            pk_raw(&b, "u");
        }
    }
    pk_str(&b, "storage_data");
    pk_raw(&b, "}(");
    for (int i = 0; i < N; i++) {
        md_object(&b, &f, MD_CHECKPOINT, "MetadataIndex");
        pk_raw(&b, "}");
        pk_str(&b, "fqn");
        pk_op(&b, 'j');
        pk_u32(&b, (uint32_t)(N - 1 - i));
        pk_raw(&b, "sb");
        md_object(&b, &f, MD_FILESYSTEM, "_StorageInfo");
        pk_raw(&b, "}(");
        pk_str(&b, "relative_path");
        snprintf(name, sizeof name, "f%d", i % 7);
        pk_str(&b, name);
        pk_str(&b, "offset");
        pk_int(&b, N - 1 - i);
        pk_str(&b, "length");
        pk_int(&b, 1);
        pk_raw(&b, "ub");
        if (i == 999 || i == 1999) {
            pk_raw(&b, "u(");
        }
    }
    pk_raw(&b, "uub.");
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    assert_int_equal(md->n_entries, N);
    assert_int_equal(md->n_files, 7);
    for (size_t i = 0; i < N; i++) {
        const dcp__storage *s = &md->storages[md->entries[i].storage];
        snprintf(name, sizeof name, "f%d", (N - 1 - (int)i) % 7);
        assert_int_equal(s->offset, i);
        assert_string_equal(md->files[s->file].ptr, name);
    }
    dcp__metadata_free(md);
}

/* ---- our own field and trailer ---- */

static void own_field(dcp__buf *b, int64_t schema)
{
    dcp__buf_init(b, dcp__context(NULL));
    pk_raw(b, "}(");
    pk_str(b, "schema");
    pk_int(b, schema);
    pk_str(b, "writer");
    pk_str(b, "libdcp 9.9");
    pk_str(b, "save_id");
    pk_str(b, "s-1");
    pk_str(b, "checkpoint_id");
    pk_raw(b, "N");
    pk_str(b, "modules");
    pk_raw(b, "]");
    pk_str(b, "world");
    pk_int(b, 4);
    pk_str(b, "rank");
    pk_raw(b, "N");
    pk_str(b, "generation");
    pk_str(b, "g7");
    pk_str(b, "structure");
    pk_raw(b, "C\x10"
              "0123456789abcdef");
    pk_str(b, "digest");
    pk_str(b, "xxh3-128");
    pk_str(b, "records");
    pk_raw(b, "}(");
    pk_str(b, "sub/__1_0.distcp");
    pk_raw(b, "C\x20"
              "0000000000000000"
              "1111111111111111");
    pk_str(b, "nobody.distcp");
    pk_raw(b, "C\x00u");
    pk_str(b, "from_the_future"); /* a key that is not known here */
    pk_raw(b, "]K\x01\x61");
    pk_str(b, "containers");
    pk_raw(b, "](");
    pk_str(b, "a");
    pk_raw(b, "K\x03\x86");
    pk_str(b, "dict");
    pk_raw(b, "\x86");
    pk_raw(b, ")");
    pk_str(b, "ordered_dict");
    pk_raw(b, "\x86\x65u");
}

static void add_trailer(dcp__buf *b)
{
    dcp__digest d = dcp__xxh3_128(b->data, b->len);
    dcp__buf_put(b, "libdcp\x00\x01", 8);
    dcp__buf_put(b, d.bytes, 16);
}

static void own__facts_are_read(void **state)
{
    (void)state;
    for (int with_trailer = 0; with_trailer < 2; with_trailer++) {
        dcp__buf own, b;
        dcp__metadata *md;
        own_field(&own, 1);
        dcp__buf_init(&b, dcp__context(NULL));
        md_make(&b, &(md_form){.own = &own});
        if (with_trailer) {
            add_trailer(&b);
        }
        assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
        is_as_saved(md);
        assert_int_equal(md->has_trailer, with_trailer);
        assert_true(md->own.present);
        assert_string_equal(md->own.writer.ptr, "libdcp 9.9");
        assert_string_equal(md->own.save_id.ptr, "s-1");
        assert_null(md->own.checkpoint_id.ptr);
        assert_string_equal(md->own.generation.ptr, "g7");
        assert_int_equal(md->own.world, 4);
        assert_int_equal(md->own.rank, -1);
        assert_true(md->own.has_structure);
        assert_memory_equal(md->own.structure, "0123456789abcdef", 16);
        for (size_t i = 0; i < md->n_files; i++) {
            bool has = strcmp(md->files[i].ptr, "sub/__1_0.distcp") == 0;
            assert_int_equal(md->own.n_records[i], has ? 2 : 0);
            if (has) {
                assert_memory_equal(md->own.records[i][1].bytes, "1111111111111111", 16);
            }
        }
        assert_int_equal(md->own.extras.n, 1);
        assert_string_equal(md->own.extras.list[0].name.ptr, "from_the_future");
        assert_int_equal(md->own.n_containers, 2);
        assert_int_equal(md->own.containers[0].path_len, 2);
        assert_int_equal(md->own.containers[0].path[1].integer, 3);
        assert_string_equal(md->own.containers[0].kind.ptr, "dict");
        assert_int_equal(md->own.containers[1].path_len, 0);
        assert_int_equal(md->release_from, 0);
        dcp__metadata_free(md);
        dcp__buf_reset(&own);
    }
}

/* Opcodes of values, and what they are kept as: without memo and shared parts. */
static void own__unknown_keys_are_kept_as_plain_data(void **state)
{
    (void)state;
#define BYTES(literal) literal, sizeof(literal) - 1
    static const struct {
        const char *value;
        size_t len;
        const char *kept;
        size_t kept_len;
    } cases[] = {
        {BYTES("N"), BYTES("N")},
        {BYTES("\x88"), BYTES("\x88")},
        {BYTES("J\x05\x00\x00\x00"), BYTES("K\x05")},
        {BYTES("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00"), BYTES("\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00")},
        {BYTES("G?\xb9\x99\x99\x99\x99\x99\x9a"), BYTES("G?\xb9\x99\x99\x99\x99\x99\x9a")},
        {BYTES("X\x01\x00\x00\x00x"), BYTES("\x8c\x01x")},
        {BYTES("C\x01y"), BYTES("C\x01y")},
        {BYTES("]K\x01\x61"), BYTES("](K\x01\x65")},
        {BYTES(")"), BYTES("(t")},
        {BYTES("K\x01K\x02\x86"), BYTES("(K\x01K\x02t")},
        {BYTES("}K\x01Ns"), BYTES("}(K\x01Nu")},
        {BYTES("\x8f(K\x01\x90"), BYTES("\x8f(K\x01\x90")},
        {BYTES("(K\x01\x91"), BYTES("(K\x01\x91")},
        {BYTES("]\x32\x86"), BYTES("(](\x65](\x65t")},
        {BYTES("\x8c\x02os\x8c\x06system\x93"), NULL, 0},                     /* a global */
        {BYTES("]\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R\x61"), NULL, 0}, /* a call, further down */
        {BYTES("\x96\x01\x00\x00\x00\x00\x00\x00\x00z"), NULL, 0},            /* a bytearray: of protocol 5 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dcp__buf own, b;
        dcp__metadata *md;
        dcp__buf_init(&own, dcp__context(NULL));
        pk_raw(&own, "}(");
        pk_str(&own, "schema");
        pk_int(&own, 1);
        pk_str(&own, "new");
        dcp__buf_put(&own, cases[i].value, cases[i].len);
        pk_raw(&own, "u");
        dcp__buf_init(&b, dcp__context(NULL));
        md_make(&b, &(md_form){.own = &own});
        assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
        assert_int_equal(md->own.extras.n, cases[i].kept != NULL);
        if (cases[i].kept) {
            const dcp__extra *extra = &md->own.extras.list[0];
            assert_string_equal(extra->name.ptr, "new");
            assert_int_equal(extra->opcodes.len, cases[i].kept_len);
            assert_memory_equal(extra->opcodes.ptr, cases[i].kept, cases[i].kept_len);
        }
        dcp__metadata_free(md);
        dcp__buf_reset(&own);
    }
#undef BYTES
}

/* Forty levels of pairs of the same thing are 80 bytes, and written out a terabyte. */
static void own__a_bomb_under_an_unknown_key_is_passed_over(void **state)
{
    (void)state;
    dcp__buf own, b;
    dcp__metadata *md;
    dcp__buf_init(&own, dcp__context(NULL));
    pk_raw(&own, "}(");
    pk_str(&own, "schema");
    pk_int(&own, 1);
    pk_str(&own, "bomb");
    pk_raw(&own, "N");
    for (int i = 0; i < 40; i++) {
        pk_raw(&own, "\x32\x86");
    }
    pk_str(&own, "kept");
    pk_raw(&own, "Nu");
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, &(md_form){.own = &own});
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    assert_int_equal(md->own.extras.n, 1);
    assert_string_equal(md->own.extras.list[0].name.ptr, "kept");
    dcp__metadata_free(md);
    dcp__buf_reset(&own);
}

static void own__other_schema_is_passed_over(void **state)
{
    (void)state;
    dcp__buf own, b;
    dcp__metadata *md;
    own_field(&own, 2);
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, &(md_form){.own = &own});
    add_trailer(&b);
    assert_int_equal(read_buf(&b, NULL, &md, NULL), DCP_OK);
    assert_false(md->own.present);
    assert_true(md->has_trailer);
    dcp__metadata_free(md);
    dcp__buf_reset(&own);
}

static void own__malformed_field_counts_only_under_a_trailer(void **state)
{
    (void)state;
    static const char bad[] = "}(\x8c\x06schemaK\x01\x8c\x05worldK\x04\x8c\x09structureC\x03xyzu";
    for (int with_trailer = 0; with_trailer < 2; with_trailer++) {
        dcp__buf own, b;
        dcp__metadata *md = NULL;
        dcp__buf_init(&own, dcp__context(NULL));
        dcp__buf_put(&own, bad, sizeof bad - 1);
        dcp__buf_init(&b, dcp__context(NULL));
        md_make(&b, &(md_form){.own = &own});
        if (with_trailer) {
            add_trailer(&b);
        }
        assert_int_equal(read_buf(&b, NULL, &md, NULL), with_trailer ? DCP_FORMAT : DCP_OK);
        if (!with_trailer) {
            assert_false(md->own.present);
            assert_int_equal(md->own.world, 0);
            dcp__metadata_free(md);
        }
        dcp__buf_reset(&own);
    }
}

static dcp_status read_copy(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    memcpy(buf, (const char *)self->user + offset, n);
    return DCP_OK;
}

static void trailer__any_changed_byte_is_noticed(void **state)
{
    (void)state;
    dcp__buf own, b;
    dcp__metadata *md;
    dcp_error err = DCP_ERROR_INIT;
    own_field(&own, 1);
    dcp__buf_init(&b, dcp__context(NULL));
    md_make(&b, &(md_form){.own = &own});
    add_trailer(&b);
    dcp__source src = {.read = read_copy, .size = b.len, .user = b.data};
    assert_int_equal(dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, NULL), DCP_OK);
    assert_true(md->has_trailer);
    dcp__metadata_free(md);
    for (size_t i = 0; i < b.len; i++) {
        bool in_magic = i >= b.len - 24 && i < b.len - 16; /* then there is no trailer to be seen */
        if (!in_magic) {
            b.data[i] ^= 0x20;
            assert_int_equal(dcp__metadata_read(dcp__context(NULL), &src, NULL, &md, &err), DCP_CHECKSUM);
            assert_int_equal(err.offset, b.len - 24);
            b.data[i] ^= 0x20;
        }
    }
    dcp__buf_reset(&b);
    dcp__buf_reset(&own);
}

/* ---- all at once ---- */

static dcp_status read_rich(dcp_context *ctx, void *user, dcp_error *err)
{
    const dcp__buf *b = user;
    dcp__source src = {.read = read_copy, .size = b->len, .user = b->data};
    dcp__metadata *md;
    dcp_status status = dcp__metadata_read(ctx, &src, NULL, &md, err);
    if (status == DCP_OK) {
        dcp__metadata_free(md);
    }
    return status;
}

static void rich(dcp__buf *b, dcp__buf *own)
{
    own_field(own, 1);
    dcp__buf_init(b, dcp__context(NULL));
    md_make(b, &(md_form){.own = own,
                          .has_storage_meta = true,
                          .is_path_of_parts = true,
                          .has_version = true,
                          .has_extra_record = true,
                          .hints = MD_HINTS_WRONG,
                          .transform = "stream.zstd/1",
                          .planner = MD_PLANNER_ORDERED});
    dcp__buf_reset(own);
}

static void out_of_memory__anywhere(void **state)
{
    (void)state;
    dcp__buf b, own;
    rich(&b, &own);
    add_trailer(&b);
    assert_true(failing_alloc_walk(read_rich, &b) > 10);
    dcp__buf_reset(&b);
}

static void mutations__never_crash(void **state)
{
    (void)state;
    const char *given = getenv("DCP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20240607, x = seed | 1;
    print_message("seed %llu\n", (unsigned long long)seed);
    dcp__buf b, own;
    rich(&b, &own);
    char *stream = malloc(b.len);
    assert_non_null(stream);
    for (int run = 0; run < 20000; run++) {
        memcpy(stream, b.data, b.len);
        for (int k = 0; k <= run % 3; k++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            stream[x % b.len] = (char)(x >> 40);
        }
        dcp__source src = dcp__source_memory(stream, b.len);
        dcp__metadata *md;
        dcp_error err = DCP_ERROR_INIT;
        dcp_str only = dcp_str_of("w");
        dcp_status status = dcp__metadata_read(dcp__context(NULL), &src, run % 2 ? &only : NULL, &md, &err);
        if (status == DCP_OK) {
            dcp__metadata_free(md);
        } else if (status != DCP_FORMAT && status != DCP_LIMIT) {
            fail_msg("seed %llu run %d: %s: %s", (unsigned long long)seed, run, dcp_status_name(status), err.message);
        }
    }
    free(stream);
    dcp__buf_reset(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms__all_say_the_same),
        cmocka_unit_test(forms__tell_the_release),
        cmocka_unit_test(storage_meta__path_in_three_forms),
        cmocka_unit_test(paths__from_planner_data_or_the_name),
        cmocka_unit_test(paths__bad_list_indices_are_refused),
        cmocka_unit_test(records__large_offsets),
        cmocka_unit_test(records__later_one_of_a_key_counts),
        cmocka_unit_test(records__missing_one_is_marked),
        cmocka_unit_test(records__transforms),
        cmocka_unit_test(roles__unknown_classes_are_named),
        cmocka_unit_test(roles__a_dtype_that_is_not_known_is_kept_by_name),
        cmocka_unit_test(roles__a_known_name_in_another_module_is_unknown),
        cmocka_unit_test(errors__name_the_item_that_is_being_read),
        cmocka_unit_test(shapes__bad_numbers_are_refused),
        cmocka_unit_test(only__keeps_one),
        cmocka_unit_test(sharing__one_tensor_object_under_two_names),
        cmocka_unit_test(sharing__record_and_offset_of_an_unwanted_item),
        cmocka_unit_test(sharing__chunks_in_any_order),
        cmocka_unit_test(sharing__a_chunk_bomb_is_refused),
        cmocka_unit_test(top__must_be_metadata),
        cmocka_unit_test(unknown_fields__are_passed_over),
        cmocka_unit_test(many__groups_and_long_memo_numbers),
        cmocka_unit_test(own__facts_are_read),
        cmocka_unit_test(own__unknown_keys_are_kept_as_plain_data),
        cmocka_unit_test(own__a_bomb_under_an_unknown_key_is_passed_over),
        cmocka_unit_test(own__other_schema_is_passed_over),
        cmocka_unit_test(own__malformed_field_counts_only_under_a_trailer),
        cmocka_unit_test(trailer__any_changed_byte_is_noticed),
        cmocka_unit_test(out_of_memory__anywhere),
        cmocka_unit_test(mutations__never_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
