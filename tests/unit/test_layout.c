/* Where the bytes of a save go. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plan/layout.h"
#include "support/failing_alloc.h"
#include "support/random_state.h"

#define MIB ((int64_t)1 << 20)

static void add_tensor(dcp_value *state, const char *key, int64_t bytes)
{
    dcp_value *v;
    assert_int_equal(dcp_tensor_alloc(NULL, DCP_UINT8, 1, &bytes, &v, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set(state, dcp_key_str(key), v, NULL), DCP_OK);
}

static dcp_save_plan *plan_of(dcp_value *state)
{
    dcp_save_plan *plan;
    assert_int_equal(dcp_plan_save(NULL, state, &plan, NULL), DCP_OK);
    return plan;
}

static dcp__layout layout_of(const dcp_save_plan *plan, dcp__layout_opts opts)
{
    dcp__layout l;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp__layout_make(plan, &opts, &l, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return l;
}

static const dcp__record *record_of(const dcp__layout *l, const dcp_save_plan *plan, const char *name)
{
    for (size_t i = 0; i < plan->n; i++) {
        if (strcmp(plan->items[i].fqn.ptr, name) == 0) {
            return &l->records[l->record_of_item[i]];
        }
    }
    fail_msg("no item %s", name);
    return NULL;
}

/* PyTorch's rule (R1.16): objects in turn; tensors by size, the largest first, each into the file with the fewest bytes. */
static void layout__objects_in_turn_and_tensors_to_the_least_loaded_file(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "a", 1000);
    add_tensor(state, "b", 2000);
    add_tensor(state, "c", 3000);
    add_tensor(state, "d", 4000);
    dcp_dict_set_int(state, "object", 7, NULL);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 3});
    assert_int_equal(l.n_files, 3);
    assert_int_equal(record_of(&l, plan, "d")->file, 0);
    assert_int_equal(record_of(&l, plan, "object")->file, 0);
    assert_int_equal(record_of(&l, plan, "c")->file, 1);
    assert_int_equal(record_of(&l, plan, "b")->file, 2);
    assert_int_equal(record_of(&l, plan, "a")->file, 2);
    /* inside a file objects come first, then tensors, the larger before the smaller */
    assert_int_equal(record_of(&l, plan, "object")->offset, 0);
    assert_true(record_of(&l, plan, "d")->offset > 0);
    assert_int_equal(record_of(&l, plan, "b")->offset, 0);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__equal_sizes_go_round_and_files_may_stay_empty(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "a", 10);
    add_tensor(state, "b", 10);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 4});
    assert_int_equal(l.n_files, 4);
    assert_int_equal(record_of(&l, plan, "a")->file, 0);
    assert_int_equal(record_of(&l, plan, "b")->file, 1);
    assert_int_equal(l.files[2].n + l.files[3].n, 0);
    assert_int_equal(l.files[2].bytes + l.files[3].bytes, 0);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__one_file_has_objects_first_and_then_the_order_of_the_plan(void **unused)
{
    (void)unused;
    static const char *const order[] = {"x", "y", "small", "large", "middle"};
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "small", 10);
    dcp_dict_set_int(state, "x", 1, NULL);
    add_tensor(state, "large", 5000);
    dcp_dict_set_int(state, "y", 2, NULL);
    add_tensor(state, "middle", 500);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 1});
    uint64_t end = 0;
    for (size_t i = 0; i < 5; i++) {
        const dcp__record *r = record_of(&l, plan, order[i]);
        assert_int_equal(r->offset, end);
        end += r->length;
    }
    assert_int_equal(l.files[0].bytes, end);
    assert_int_equal(l.payload_bytes, 5510);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__a_file_per_item_follows_the_plan(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "a", 10);
    dcp_dict_set_int(state, "b", 1, NULL);
    add_tensor(state, "c", 5000);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 2, .file_per_item = true});
    assert_int_equal(l.n_files, 3);
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(l.records[l.record_of_item[i]].file, i);
        assert_int_equal(l.records[l.record_of_item[i]].offset, 0);
        assert_int_equal(l.files[i].n, 1);
    }
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__large_payloads_start_at_pages_and_small_ones_at_64(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "small", 100);
    add_tensor(state, "almost", MIB - 1);
    add_tensor(state, "large", MIB);
    add_tensor(state, "tail", 3);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 1, .align_payloads = true});
    for (size_t i = 0; i < l.n_records; i++) {
        const dcp__record *r = &l.records[i];
        size_t in_record = dcp__archive_piece_bytes(r->archive, 0); /* what stands before the payload */
        bool is_large = r->item->bytes >= (uint64_t)MIB;
        assert_int_equal(in_record % (is_large ? 4096 : 64), 0);
        assert_int_equal(r->offset % (is_large ? 4096 : 1), 0);
    }
    /* behind the large one there is no gap */
    const dcp__record *large = record_of(&l, plan, "large"), *tail = record_of(&l, plan, "tail");
    assert_int_equal(tail->offset, large->offset + large->length);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__views_of_equal_memory_share_a_record(void **unused)
{
    (void)unused;
    float data[12] = {0};
    int64_t shape[] = {3, 4}, row_major[] = {4, 1}, column_major[] = {1, 3}, flat[] = {12};
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, shape, data);
    dcp_dict_set_tensor(state, "a", &t, NULL);
    t.strides = row_major;
    dcp_dict_set_tensor(state, "tied", &t, NULL);
    t.strides = column_major;
    dcp_dict_set_tensor(state, "transposed", &t, NULL);
    t = dcp_tensor_make(DCP_INT32, 2, shape, data);
    dcp_dict_set_tensor(state, "dtype", &t, NULL);
    t = dcp_tensor_make(DCP_FLOAT32, 1, flat, data);
    dcp_dict_set_tensor(state, "flat", &t, NULL);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 1});
    assert_int_equal(l.n_records, 4);
    assert_ptr_equal(record_of(&l, plan, "a"), record_of(&l, plan, "tied"));
    assert_int_equal(l.payload_bytes, 4 * sizeof data);
    dcp__layout_reset(&l);
    l = layout_of(plan, (dcp__layout_opts){.files = 1, .file_per_item = true}); /* each has its file */
    assert_int_equal(l.n_records, 5);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

/* Records of a file follow each other; only before one with an aligned payload there may be less than a page. */
static void check_ranges(const dcp__layout *l)
{
    size_t n = 0;
    for (size_t f = 0; f < l->n_files; f++) {
        uint64_t end = 0;
        bool in_blob = false;
        assert_int_equal(l->files[f].first, n);
        for (size_t i = 0; i < l->files[f].n; i++, n++) {
            const dcp__record *r = &l->records[n];
            assert_int_equal(r->file, f);
            if (!r->archive && !in_blob) {
                in_blob = true;
                assert_int_equal(l->files[f].blob_offset, end);
                end += l->files[f].blob_header_bytes;
            }
            assert_true(r->offset >= end);
            assert_true(r->offset == end || (r->item->bytes >= (uint64_t)MIB && r->offset - end < 4096));
            end = r->offset + r->length;
        }
        end += in_blob ? 0 : l->files[f].blob_header_bytes;
        assert_int_equal(l->files[f].bytes, end);
    }
    assert_int_equal(n, l->n_records);
}

static void layout__ranges_are_disjoint_and_every_item_has_its_record(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("layout");
    for (int round = 0; round < 100; round++) {
        dcp_value *state = random_state(&rnd);
        if (test_random_below(&rnd, 2)) {
            add_tensor(state, "large", MIB + test_random_below(&rnd, 10000));
            add_tensor(state, "larger", 2 * MIB);
        }
        dcp_save_plan *plan = plan_of(state);
        dcp__layout_opts opts = {.files = 1 + (int)test_random_below(&rnd, 5),
                                 .file_per_item = test_random_below(&rnd, 4) == 0,
                                 .align_payloads = test_random_below(&rnd, 2)};
        dcp__layout l = layout_of(plan, opts);
        check_ranges(&l);
        for (size_t i = 0; i < plan->n; i++) {
            const dcp_write_item *owner = l.records[l.record_of_item[i]].item;
            assert_true(owner == &plan->items[i] || (owner->tensor.data == plan->items[i].tensor.data && owner->tensor.data));
        }
        dcp__layout_reset(&l);
        dcp_save_plan_free(plan);
        dcp_value_free(state);
    }
}

static void layout__a_safetensors_blob_follows_the_objects(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "a", 10);
    add_tensor(state, "b", 2000);
    dcp_dict_set_int(state, "object", 7, NULL);
    dcp_save_plan *plan = plan_of(state);
    for (int files = 1; files < 5; files++) {
        dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = files, .is_safetensors = true});
        check_ranges(&l);
        for (int f = 0; f < files; f++) { /* also where there are no tensors (formats.md 8.5) */
            assert_true(l.files[f].blob_header_bytes > 8);
        }
        dcp__layout_reset(&l);
    }
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static void layout__nothing_to_save_is_one_empty_file(void **unused)
{
    (void)unused;
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_save_plan *plan = plan_of(state);
    dcp__layout l = layout_of(plan, (dcp__layout_opts){.files = 1});
    assert_int_equal(l.n_files, 1);
    assert_int_equal(l.n_records, 0);
    assert_int_equal(l.files[0].bytes, 0);
    dcp__layout_reset(&l);
    dcp_save_plan_free(plan);
    dcp_value_free(state);
}

static dcp_status plan_and_lay_out(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_save_plan *plan;
    dcp__layout l;
    const dcp__layout_opts *opts = user;
    dcp_value *state;
    test_random rnd = {5};
    dcp_dict_create(NULL, &state, NULL);
    add_tensor(state, "a", 10);
    add_tensor(state, "b", 20);
    dcp_dict_set_int(state, "object", 7, NULL);
    if (!opts->is_safetensors) {
        dcp_value *tuple;
        dcp_seq_create(NULL, DCP_KIND_TUPLE, &tuple, NULL);
        dcp_list_append(tuple, random_tensor(&rnd), NULL);
        dcp_dict_set(state, dcp_key_str("tuple"), tuple, NULL);
    }
    dcp_status status = dcp_plan_save(ctx, state, &plan, err);
    if (status == DCP_OK) {
        status = dcp__layout_make(plan, opts, &l, err);
        dcp__layout_reset(&l);
        dcp_save_plan_free(plan);
    }
    dcp_value_free(state);
    return status;
}

static void layout__out_of_memory_leaks_nothing(void **unused)
{
    (void)unused;
    dcp__layout_opts opts = {.files = 2};
    assert_true(failing_alloc_walk(plan_and_lay_out, &opts) > 10);
    opts.is_safetensors = true;
    assert_true(failing_alloc_walk(plan_and_lay_out, &opts) > 10);
    opts = (dcp__layout_opts){.files = 1, .file_per_item = true, .align_payloads = true};
    assert_true(failing_alloc_walk(plan_and_lay_out, &opts) > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout__objects_in_turn_and_tensors_to_the_least_loaded_file),
        cmocka_unit_test(layout__equal_sizes_go_round_and_files_may_stay_empty),
        cmocka_unit_test(layout__one_file_has_objects_first_and_then_the_order_of_the_plan),
        cmocka_unit_test(layout__a_file_per_item_follows_the_plan),
        cmocka_unit_test(layout__large_payloads_start_at_pages_and_small_ones_at_64),
        cmocka_unit_test(layout__views_of_equal_memory_share_a_record),
        cmocka_unit_test(layout__ranges_are_disjoint_and_every_item_has_its_record),
        cmocka_unit_test(layout__a_safetensors_blob_follows_the_objects),
        cmocka_unit_test(layout__nothing_to_save_is_one_empty_file),
        cmocka_unit_test(layout__out_of_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
