/* Conversions: names, what is refused, what is read and how often, and that nothing half-made is ever published. That PyTorch and
 * the safetensors package read the results is shown in tests/interop. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "engine/convert/convert_names.h"
#include "support/failing_alloc.h"
#include "support/memory_store.h"
#include "support/random.h"

/* ---- names ---- */

static void assert_edited(const char *edit, const char *name, const char *expected)
{
    dcp__edits edits;
    dcp__arena arena;
    dcp_str out;
    dcp_error err = DCP_ERROR_INIT;
    dcp__arena_init(&arena, dcp__context(NULL), UINT64_MAX);
    if (dcp__edits_compile(dcp__context(NULL), &edit, 1, &edits, &err) != DCP_OK) {
        fail_msg("%s: %s", edit, err.message);
    }
    assert_int_equal(dcp__edits_apply(&edits, dcp_str_of(name), &arena, &out, &err), DCP_OK);
    assert_string_equal(out.ptr, expected);
    dcp__edits_reset(&edits);
    dcp__arena_reset(&arena);
}

static void rename__does_what_sed_does(void **state)
{
    (void)state;
    assert_edited("s/layer/block/", "layer.0.layer", "block.0.layer");
    assert_edited("s/layer/block/g", "layer.0.layer", "block.0.block");
    assert_edited("s/^model\\.//", "model.w", "w");
    assert_edited("s/^model\\.//", "amodel.w", "amodel.w");
    assert_edited("s/layers\\.([0-9]+)\\.(.*)/h.\\1.x.\\2/", "layers.12.w", "h.12.x.w");
    assert_edited("s|a/b|c|", "x.a/b", "x.c");
    assert_edited("s/a\\/b/c/", "x.a/b", "x.c");
    assert_edited("s/w/<&>\\&/", "w", "<w>&");
    assert_edited("s/W/v/i", "w", "v");
    assert_edited("s/x*/-/g", "abc", "-a-b-c-"); /* as sed, and so is the next */
    assert_edited("s/a*/x/g", "baaac", "xbxcx");
    assert_edited("s/^/p./", "w", "p.w");
    assert_edited("s/$/.q/", "w", "w.q");
    assert_edited("add:model.", "w", "model.w");
    assert_edited("strip:model.", "model.w", "w");
    assert_edited("strip:model.", "other.w", "other.w");
}

static void rename__bad_ones_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"s/a/b", "s/a", "s", "s/(/x/", "s/a/\\1/", "s/a/b/x", "add:", "strip:", "y/a/b/", ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        dcp__edits edits;
        assert_int_equal(dcp__edits_compile(dcp__context(NULL), &bad[i], 1, &edits, NULL), DCP_ARG);
    }
}

/* "a|b.c" is the path of two keys. */
static void assert_path(const char *before, const char *name, const char *expected)
{
    dcp_key keys[8];
    size_t n = 0;
    char copy[64], found[128] = "", *rest = NULL;
    const dcp_key *path;
    dcp__arena arena;
    dcp__arena_init(&arena, dcp__context(NULL), UINT64_MAX);
    snprintf(copy, sizeof copy, "%s", before);
    for (char *part = strtok_r(copy, "|", &rest); part; part = strtok_r(NULL, "|", &rest)) {
        keys[n++] = *part == '#' ? dcp_key_int(atoi(part + 1)) : dcp_key_str(part);
    }
    assert_int_equal(dcp__renamed_path(&arena, keys, n, dcp_str_of(name), &path, &n, NULL), DCP_OK);
    for (size_t i = 0; i < n; i++) {
        size_t used = strlen(found);
        if (path[i].is_int) {
            snprintf(found + used, sizeof found - used, "%s#%lld", i ? "|" : "", (long long)path[i].integer);
        } else {
            snprintf(found + used, sizeof found - used, "%s%s", i ? "|" : "", path[i].string.ptr);
        }
    }
    assert_string_equal(found, expected);
    dcp__arena_reset(&arena);
}

static void rename__keys_that_stay_are_not_cut_at_dots(void **state)
{
    (void)state;
    assert_path("w", "model.w", "model|w");
    assert_path("layers.0.w", "model.layers.0.w", "model|layers.0.w");
    assert_path("model|layers.0.w", "layers.0.w", "layers.0.w");
    assert_path("model|layers.0.w", "model.h.0.w", "model|h.0.w");
    assert_path("model|a|w", "model.b.c.w", "model|b.c|w");
    assert_path("w", "a.b.w", "a|b|w");
    assert_path("optim|#0|lr", "o.0.lr", "o|#0|lr");
    assert_path("w", "v", "v");
}

/* ---- a source ---- */

static dcp_storage_ops patched; /* the storage's own table with changes */
static const dcp_storage_ops *whole;

static int make_patched(void **state)
{
    if (make_storage(state) != 0) {
        return -1;
    }
    whole = storage->ops;
    patched = *whole;
    return 0;
}

static int free_patched(void **state)
{
    storage->ops = whole;
    return free_storage(state);
}

#define ROWS 6
#define COLUMNS 5

/* Two halves of w, by columns; b, which is also called tied; an object. */
static void save_source(const char *path)
{
    static float left[ROWS * 2], right[ROWS * 3], b[3] = {1, 2, 3};
    int64_t shape[] = {ROWS, COLUMNS}, sizes[2][2] = {{ROWS, 2}, {ROWS, 3}}, offsets[2][2] = {{0, 0}, {0, 2}}, three[] = {3};
    dcp_tensor chunks[] = {dcp_tensor_make(DCP_FLOAT32, 2, sizes[0], left), dcp_tensor_make(DCP_FLOAT32, 2, sizes[1], right)};
    dcp_box boxes[] = {{offsets[0], sizes[0]}, {offsets[1], sizes[1]}};
    dcp_tensor tb = dcp_tensor_make(DCP_FLOAT32, 1, three, b);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_value *root, *model, *w;
    dcp_error err = DCP_ERROR_INIT;
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            *(c < 2 ? &left[r * 2 + c] : &right[r * 3 + c - 2]) = (float)(r * COLUMNS + c);
        }
    }
    dcp_dict_create(NULL, &root, NULL);
    dcp_dict_create(NULL, &model, NULL);
    dcp_sharded_create(NULL, DCP_FLOAT32, 2, shape, 2, chunks, boxes, &w, NULL);
    dcp_dict_set(model, dcp_key_str("w"), w, NULL);
    dcp_dict_set_tensor(model, "b", &tb, NULL);
    dcp_dict_set_tensor(model, "tied", &tb, NULL);
    dcp_dict_set(root, dcp_key_str("model"), model, NULL);
    dcp_dict_set_int(root, "step", 7, NULL);
    opts.storage = storage;
    opts.overwrite = true;
    if (dcp_save(NULL, path, root, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
}

static dcp_convert_opts options(dcp_convert_form to)
{
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    opts.to = to;
    opts.storage = opts.open.storage = storage;
    return opts;
}

static dcp_convert_report convert_ok(const char *from, const char *to, const dcp_convert_opts *opts)
{
    dcp_convert_report report = DCP_CONVERT_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_convert(NULL, from, to, opts, &report, &err) != DCP_OK) {
        fail_msg("%s: %s", to, err.message);
    }
    return report;
}

static void convert_fails(dcp_status expected, const char *from, const char *to, const dcp_convert_opts *opts, const char *word)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_status status = dcp_convert(NULL, from, to, opts, NULL, &err);
    if (status != expected || !strstr(err.message, word)) {
        fail_msg("%s: %s: %s", to, dcp_status_name(status), err.message);
    }
}

static bool is_there(const char *name)
{
    dcp_stat st;
    return storage->ops->stat(storage, name, &st, NULL) == DCP_OK;
}

/* w counts from 0. */
static void assert_w(const char *path, const char *name)
{
    float found[ROWS * COLUMNS];
    int64_t shape[] = {ROWS, COLUMNS};
    dcp_checkpoint *ck = reopen(path);
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, shape, found);
    const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(name));
    assert_non_null(item);
    assert_int_equal(dcp_read(ck, item, NULL, &dst, NULL), DCP_OK);
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        assert_true(found[i] == (float)i);
    }
    dcp_checkpoint_close(ck);
}

static bool has_item(const char *path, const char *name)
{
    dcp_checkpoint *ck = reopen(path);
    bool found = dcp_checkpoint_find(ck, dcp_str_of(name)) != NULL;
    dcp_checkpoint_close(ck);
    return found;
}

/* ---- between all forms ---- */

static void convert__between_all_forms(void **state)
{
    (void)state;
    static const char *const names[] = {"", "c.dcp", "c.pt", "c.safetensors", "c.hf"};
    save_source("from");
    for (dcp_convert_form a = DCP_TO_DCP; a <= DCP_TO_HF; a++) {
        dcp_convert_opts opts = options(a);
        opts.objects = DCP_OBJECTS_DROP;
        opts.overwrite = true;
        convert_ok("from", names[a], &opts);
        assert_w(names[a], "model.w");
        for (dcp_convert_form b = DCP_TO_DCP; b <= DCP_TO_HF; b++) {
            char to[32];
            snprintf(to, sizeof to, "to%d%d", a, b);
            opts.to = b;
            dcp_convert_report r = convert_ok(names[a], to, &opts);
            assert_int_equal(r.n_tensors, 3);
            assert_int_equal(r.n_files, 1);
            assert_w(to, "model.w");
            assert_true(has_item(to, "model.tied"));
            bool keeps_objects = a <= DCP_TO_TORCH && b <= DCP_TO_TORCH;
            assert_true(has_item(to, "step") == keeps_objects);
        }
    }
}

static void convert__selects_renames_and_splits(void **state)
{
    (void)state;
    static const char *const include[] = {"model.*"}, *const exclude[] = {"*.tied"};
    static const char *const edits[] = {"strip:model.", "s/^w$/weight/", "add:net."};
    static const dcp_convert_part parts[] = {{"a", "model.w"}, {"b", "*"}};
    dcp_convert_opts opts = options(DCP_TO_TORCH);
    save_source("from");
    opts.include = include;
    opts.exclude = exclude;
    opts.edits = edits;
    opts.n_include = opts.n_exclude = 1;
    opts.n_edits = 3;
    convert_ok("from", "shaped.pt", &opts);
    assert_w("shaped.pt", "net.weight");
    assert_true(has_item("shaped.pt", "net.b"));
    assert_false(has_item("shaped.pt", "net.tied") || has_item("shaped.pt", "step"));
    opts = options(DCP_TO_SAFETENSORS);
    opts.parts = parts;
    opts.n_parts = 2;
    opts.objects = DCP_OBJECTS_BESIDE;
    convert_ok("from", "parts", &opts);
    assert_w("parts/a.safetensors", "model.w");
    assert_true(has_item("parts/b.safetensors", "model.b"));
    assert_false(has_item("parts/b.safetensors", "model.w"));
    assert_true(has_item("parts/b.objects.pt", "step"));
    assert_false(is_there("parts/a.objects.pt"));
}

static void convert__aliases_are_copied_dropped_or_refused(void **state)
{
    (void)state;
    dcp_convert_opts opts = options(DCP_TO_SAFETENSORS);
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    opts.overwrite = true;
    dcp_convert_report r = convert_ok("from", "alias", &opts);
    assert_true(has_item("alias", "model.b") && has_item("alias", "model.tied"));
    opts.alias = DCP_ALIAS_DROP;
    r = convert_ok("from", "alias", &opts);
    assert_int_equal(r.n_aliases_dropped, 1);
    assert_true(has_item("alias", "model.b") && !has_item("alias", "model.tied"));
    opts.alias = DCP_ALIAS_ERROR;
    convert_fails(DCP_MISMATCH, "from", "alias", &opts, "model.tied");
    opts = options(DCP_TO_TORCH);
    r = convert_ok("from", "alias.pt", &opts);
    assert_int_equal(r.n_shared, 1);
}

/* ---- what is refused ---- */

static void convert__mistakes_are_named(void **state)
{
    (void)state;
    static const char *const nothing[] = {"*.absent"}, *const clash[] = {"s/\\.(b|tied)$/.x/"};
    static const dcp_convert_cast cast[] = {{"*.w", DCP_COMPLEX64}};
    static const dcp_convert_part parts[] = {{"a", "model.w"}};
    save_source("from");
    dcp_convert_opts opts = options(DCP_TO_HF);
    convert_fails(DCP_UNSUPPORTED, "from", "out", &opts, "\"step\"");
    opts = options(DCP_TO_TORCH);
    opts.include = nothing;
    opts.n_include = 1;
    convert_fails(DCP_NOT_FOUND, "from", "out", &opts, "*.absent");
    opts = options(DCP_TO_TORCH);
    opts.edits = clash;
    opts.n_edits = 1;
    convert_fails(DCP_MISMATCH, "from", "out", &opts, "\"model.x\"");
    opts = options(DCP_TO_TORCH);
    opts.casts = cast;
    opts.n_casts = 1;
    convert_fails(DCP_UNSUPPORTED, "from", "out", &opts, "complex64");
    opts = options(DCP_TO_TORCH);
    opts.parts = parts;
    opts.n_parts = 1;
    convert_fails(DCP_NOT_FOUND, "from", "out", &opts, "model.b");
    opts = options(DCP_TO_SAFETENSORS);
    static const char *const b_alone[] = {"model.b"}, *const reserved[] = {"s/.*/__metadata__/"};
    opts.include = b_alone;
    opts.n_include = 1;
    opts.edits = reserved;
    opts.n_edits = 1;
    convert_fails(DCP_ARG, "from", "out", &opts, "__metadata__");
    opts = options(DCP_TO_SAFETENSORS);
    opts.resume = true;
    convert_fails(DCP_ARG, "from", "out", &opts, "resuming");
    opts = options(DCP_TO_SAFETENSORS);
    opts.align_payloads = true;
    convert_fails(DCP_ARG, "from", "out", &opts, "alignment");
    opts = options(DCP_TO_HF);
    opts.mapping = "map.json";
    opts.max_file_bytes = 16;
    convert_fails(DCP_ARG, "from", "out", &opts, "mapping");
    opts = options(DCP_TO_TORCH);
    convert_fails(DCP_NOT_FOUND, "nowhere", "out", &opts, "nowhere");
    assert_false(is_there("out"));
}

static void convert__replaces_nothing_unasked(void **state)
{
    (void)state;
    dcp_convert_opts opts = options(DCP_TO_HF);
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        opts.to = to;
        opts.overwrite = false;
        char name[16];
        snprintf(name, sizeof name, "once%d", to);
        convert_ok("from", name, &opts);
        convert_fails(DCP_EXISTS, "from", name, &opts, "");
        opts.overwrite = true;
        convert_ok("from", name, &opts);
        assert_w(name, "model.w");
    }
    opts.to = DCP_TO_HF;
    convert_fails(DCP_EXISTS, "from", "once1", &opts, "another form");
}

typedef struct rival {
    const char *to;
    dcp_convert_opts opts;
    dcp_status last; /* of its tries */
} rival;

static bool try_the_same_place(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    rival *r = user;
    (void)done_bytes;
    (void)total_bytes;
    r->last = dcp_convert(NULL, "from", r->to, &r->opts, NULL, NULL);
    (void)done_bytes;
    return r->last == DCP_OK || r->last == DCP_EXISTS;
}

/* From the first byte until all files have their names, also while finished ones wait for the others: a second conversion to the
 * place is refused, and takes nothing from the first. */
static void convert__a_rival_is_refused_and_does_no_harm(void **state)
{
    (void)state;
    static const char *const without_w[] = {"model.w"};
    save_source("from");
    for (dcp_convert_form to = DCP_TO_TORCH; to <= DCP_TO_HF; to++) {
        char name[16];
        snprintf(name, sizeof name, "contested%d", to);
        rival r = {name, options(to), DCP_OK};
        r.opts.objects = DCP_OBJECTS_DROP;
        r.opts.overwrite = true;
        r.opts.max_file_bytes = to == DCP_TO_HF ? 16 : 0;
        dcp_convert_opts opts = r.opts;
        convert_ok("from", name, &opts);
        r.opts.exclude = without_w;
        r.opts.n_exclude = 1;
        opts.progress = try_the_same_place;
        opts.user = &r;
        convert_ok("from", name, &opts);
        assert_int_equal(r.last, DCP_EXISTS);
        assert_w(name, "model.w");
        r.last = dcp_convert(NULL, "from", name, &r.opts, NULL, NULL); /* nothing stays locked */
        assert_int_equal(r.last, DCP_OK);
        assert_false(has_item(name, "model.w"));
    }
}

static void make_empty(const char *name)
{
    dcp_file *f;
    assert_int_equal(storage->ops->open(storage, name, DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    assert_int_equal(storage->ops->close(f, NULL), DCP_OK);
}

/* Files of an old model, and of a conversion that did not live to the end, are gone once the new one stands; what others have put
 * there is not touched. */
static void convert__an_old_model_is_replaced_whole(void **state)
{
    (void)state;
    dcp_convert_opts opts = options(DCP_TO_HF);
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    opts.max_file_bytes = 16;
    convert_ok("from", "old", &opts);
    assert_true(is_there("old/model-00003-of-00003.safetensors") && is_there("old/model.safetensors.index.json"));
    opts.max_file_bytes = 0;
    opts.overwrite = true;
    static const char *const remnants[] = {"old/model-00002-of-00004.safetensors.libdcp-part",
                                           "old/model.safetensors.libdcp-part"};
    static const char *const others[] = {"old/other.safetensors.libdcp-part", "old/model-00002-of-00004.safetensors.part"};
    for (size_t i = 0; i < 2; i++) {
        make_empty(remnants[i]);
        make_empty(others[i]);
    }
    convert_ok("from", "old", &opts);
    for (size_t i = 0; i < 2; i++) {
        assert_false(is_there(remnants[i]));
        assert_true(is_there(others[i]));
    }
    assert_true(is_there("old/model.safetensors"));
    assert_false(is_there("old/model-00003-of-00003.safetensors") || is_there("old/model.safetensors.index.json"));
    opts.to = DCP_TO_SAFETENSORS;
    convert_ok("from", "old/other.safetensors", &opts);
    opts.to = DCP_TO_HF;
    convert_fails(DCP_EXISTS, "from", "old", &opts, "other.safetensors");
    assert_true(is_there("old/other.safetensors"));
}

/* Readers do not guess which files count; who overwrites puts it right. */
static void convert__a_mark_in_pieces_is_told_and_replaced(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "{", "{\"ignored\": ["};
    dcp_convert_opts opts = options(DCP_TO_HF);
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    open.storage = storage;
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    opts.max_file_bytes = 16;
    convert_ok("from", "torn", &opts);
    opts.overwrite = true;
    for (size_t i = 0; i < 3; i++) {
        dcp_file *f;
        dcp_checkpoint *ck;
        dcp_error err = DCP_ERROR_INIT;
        make_empty("torn/.libdcp-replacing");
        assert_int_equal(storage->ops->open(storage, "torn/.libdcp-replacing", DCP_OPEN_WRITE, &f, NULL), DCP_OK);
        assert_int_equal(storage->ops->write_at(f, texts[i], strlen(texts[i]), 0, NULL), DCP_OK);
        assert_int_equal(storage->ops->close(f, NULL), DCP_OK);
        assert_int_equal(dcp_checkpoint_open(NULL, "torn", &open, &ck, &err), DCP_FORMAT);
        assert_non_null(strstr(err.message, ".libdcp-replacing"));
        convert_ok("from", "torn", &opts);
        assert_w("torn", "model.w");
        assert_false(is_there("torn/.libdcp-replacing"));
    }
}

/* Resuming never writes into a model that is complete: half of it would be another one's. */
static void convert__resuming_does_not_change_a_complete_model(void **state)
{
    (void)state;
    static const char *const first[] = {"s/tied/x/"};
    static const dcp_convert_cast cast[] = {{"*", DCP_FLOAT16}};
    dcp_convert_opts opts = options(DCP_TO_HF);
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    opts.max_file_bytes = 16;
    convert_ok("from", "whole", &opts);
    opts.resume = true;
    assert_int_equal(convert_ok("from", "whole", &opts).n_kept, 3);
    opts.casts = cast;
    opts.n_casts = 1;
    opts.max_file_bytes = 8;
    convert_fails(DCP_EXISTS, "from", "whole", &opts, "only overwriting");
    opts.n_casts = 0;
    opts.max_file_bytes = 16;
    opts.edits = first;
    opts.n_edits = 1;
    convert_fails(DCP_EXISTS, "from", "whole", &opts, "only overwriting");
    assert_w("whole", "model.w");
    assert_true(has_item("whole", "model.tied") && !is_there("whole/.libdcp-replacing"));
    opts.resume = false;
    opts.overwrite = true;
    convert_ok("from", "whole", &opts);
    assert_true(has_item("whole", "model.x") && is_there("whole/model.1-00001-of-00003.safetensors"));
    assert_false(is_there("whole/model-00001-of-00003.safetensors"));
    opts.overwrite = false;
    opts.resume = true;
    assert_int_equal(convert_ok("from", "whole", &opts).n_kept, 3); /* whatever its names */
    assert_false(is_there("whole/model-00001-of-00003.safetensors"));
    opts.edits = NULL;
    opts.n_edits = 0;
    convert_fails(DCP_EXISTS, "from", "whole", &opts, "only overwriting");
    opts.resume = false;
    opts.overwrite = true;
    convert_ok("from", "whole", &opts); /* and back to the usual names */
    assert_true(is_there("whole/model-00001-of-00003.safetensors"));
}

/* ---- damage ---- */

static dcp_status write_wrongly(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    uint8_t *copy = malloc(n + 1);
    memcpy(copy, buf, n);
    if (n == sizeof(float) * ROWS * COLUMNS) {
        copy[n / 2] ^= 1; /* in w */
    }
    dcp_status status = whole->write_at(f, copy, n, offset, err);
    free(copy);
    return status;
}

static void convert__what_is_read_back_wrong_is_not_published(void **state)
{
    (void)state;
    save_source("from");
    for (dcp_convert_form to = DCP_TO_TORCH; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        opts.objects = DCP_OBJECTS_DROP;
        patched.write_at = write_wrongly;
        storage->ops = &patched;
        convert_fails(DCP_CHECKSUM, "from", "wrong", &opts, "model.w");
        storage->ops = whole;
        assert_false(is_there("wrong") && to != DCP_TO_HF);
        assert_false(is_there("wrong/model.safetensors") || is_there("wrong.libdcp-part"));
        assert_false(is_there("wrong/model.safetensors.libdcp-part"));
    }
}

static dcp_status write_large_wrongly(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    uint8_t *copy = malloc(n + 1);
    memcpy(copy, buf, n);
    copy[n / 2] ^= n > 1000;
    dcp_status status = whole->write_at(f, copy, n, offset, err);
    free(copy);
    return status;
}

static void convert__a_dcp_directory_is_read_back_too(void **state)
{
    (void)state;
    dcp_convert_opts opts = options(DCP_TO_DCP);
    save_source("from");
    patched.write_at = write_large_wrongly;
    storage->ops = &patched;
    convert_fails(DCP_CHECKSUM, "from", "wrong.dcp", &opts, "record");
    opts.ranks = 3;
    convert_fails(DCP_PEER, "from", "wrong.dcp", &opts, "record");
    storage->ops = whole;
    assert_false(is_there("wrong.dcp/.metadata"));
    convert_ok("from", "wrong.dcp", &opts);
    assert_w("wrong.dcp", "model.w");
}

/* A broken record must not come out as a good one. */
static void convert__the_sources_checksums_are_compared(void **state)
{
    (void)state;
    save_source("from");
    dcp_checkpoint *ck = reopen("from");
    dcp_chunk_info chunk;
    dcp_file *f;
    char name[64];
    dcp_convert_opts opts;
    assert_int_equal(dcp_item_chunk(ck, dcp_checkpoint_find(ck, dcp_str_of("model.b")), 0, &chunk, NULL), DCP_OK);
    snprintf(name, sizeof name, "from/%s", chunk.file);
    uint64_t offset = chunk.offset, length = chunk.length;
    dcp_checkpoint_close(ck);
    uint8_t *record = malloc(length);
    size_t got;
    assert_int_equal(whole->open(storage, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    whole->read_at(f, record, length, offset, &got, NULL);
    static const float b[3] = {1, 2, 3};
    uint8_t *payload = memmem(record, length, b, sizeof b);
    assert_non_null(payload);
    payload[1] ^= 4;
    whole->write_at(f, record, length, offset, NULL);
    whole->close(f, NULL);
    free(record);
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        opts = options(to);
        opts.objects = DCP_OBJECTS_DROP;
        snprintf(name, sizeof name, "damaged%d", to);
        convert_fails(DCP_CHECKSUM, "from", name, &opts, "model.b");
        opts.ranks = to == DCP_TO_DCP ? 2 : 0;
        convert_fails(DCP_CHECKSUM, "from", name, &opts, "model.b");
    }
}

/* ---- torch.save files: one look at each byte ---- */

#define LARGE_ROWS 700 /* so that w takes three blocks of the writer */
#define LARGE_COLUMNS 1024

/* w, three blocks long, and a small one, b. */
static void save_torch_file(const char *name)
{
    dcp_convert_opts opts = options(DCP_TO_TORCH);
    dcp_save_opts save_opts = DCP_SAVE_OPTS_INIT;
    static float w[LARGE_ROWS * LARGE_COLUMNS], b[300];
    int64_t shape[] = {LARGE_ROWS, LARGE_COLUMNS}, three_hundred[] = {300};
    dcp_tensor tw = dcp_tensor_make(DCP_FLOAT32, 2, shape, w), tb = dcp_tensor_make(DCP_FLOAT32, 1, three_hundred, b);
    dcp_value *root;
    for (int i = 0; i < LARGE_ROWS * LARGE_COLUMNS; i++) {
        w[i] = (float)i;
    }
    for (int i = 0; i < 300; i++) {
        b[i] = (float)-i;
    }
    dcp_dict_create(NULL, &root, NULL);
    dcp_dict_set_tensor(root, "w", &tw, NULL);
    dcp_dict_set_tensor(root, "b", &tb, NULL);
    save_opts.storage = storage;
    save_opts.overwrite = opts.overwrite = true;
    assert_int_equal(dcp_save(NULL, "large", root, &save_opts, NULL, NULL), DCP_OK);
    dcp_value_free(root);
    convert_ok("large", name, &opts);
}

/* Changes one bit of the file, where these bytes are. */
static void damage(const char *name, const void *bytes, size_t n, size_t at)
{
    dcp_stat st;
    dcp_file *f;
    size_t got;
    assert_int_equal(whole->stat(storage, name, &st, NULL), DCP_OK);
    uint8_t *all = malloc(st.bytes);
    assert_int_equal(whole->open(storage, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    whole->read_at(f, all, st.bytes, 0, &got, NULL);
    uint8_t *found = memmem(all, st.bytes, bytes, n);
    assert_non_null(found);
    found[at] ^= 1;
    whole->write_at(f, all, st.bytes, 0, NULL);
    whole->close(f, NULL);
    free(all);
}

static void convert__a_broken_byte_of_a_torch_file_is_found_while_it_is_copied(void **state)
{
    (void)state;
    static const float in_w[] = {699 * 1024 + 1, 699 * 1024 + 2, 699 * 1024 + 3}, in_b[] = {-7, -8, -9};
    static const char *const only_b[] = {"b"};
    for (int small = 0; small < 2; small++) {
        const char *name = small ? "small.pt" : "large.pt", *item = small ? "\"b\"" : "\"w\"";
        dcp_convert_opts opts = options(DCP_TO_DCP);
        dcp_save_opts copy = DCP_SAVE_OPTS_INIT;
        save_torch_file(name);
        damage(name, small ? in_b : in_w, sizeof in_b, 5);
        convert_fails(DCP_CHECKSUM, name, "out", &opts, item);
        assert_false(is_there("out/.metadata"));
        opts.transform = "stream.zstd/1";
        convert_fails(DCP_CHECKSUM, name, "out", &opts, item);
        opts.transform = NULL;
        opts.ranks = 3;
        convert_fails(DCP_CHECKSUM, name, "out", &opts, item);
        opts.ranks = 0;
        opts.casts = &(dcp_convert_cast){"*", DCP_FLOAT64};
        opts.n_casts = 1;
        convert_fails(DCP_CHECKSUM, name, "out", &opts, item);
        opts = options(DCP_TO_HF);
        convert_fails(DCP_CHECKSUM, name, "out", &opts, item);
        copy.storage = storage;
        assert_int_equal(dcp_copy(NULL, name, &opts.open, "out", &copy, NULL, NULL), DCP_CHECKSUM);
        assert_false(is_there("out/.metadata"));
        opts = options(DCP_TO_DCP); /* what is not taken is not looked at */
        opts.include = only_b;
        opts.n_include = 1;
        if (!small) {
            convert_ok(name, "part", &opts);
        }
    }
}

/* The file's own parts are looked at as well, which is little beside the tensors. */
static void convert__a_torch_file_is_read_once(void **state)
{
    (void)state;
    dcp_storage_counts counts = {0};
    dcp_storage *counted;
    dcp_stat st;
    save_torch_file("counted.pt");
    assert_int_equal(whole->stat(storage, "counted.pt", &st, NULL), DCP_OK);
    assert_int_equal(dcp_storage_count(NULL, storage, &counts, &counted, NULL), DCP_OK);
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        char name[16];
        snprintf(name, sizeof name, "counted%d", to);
        dcp_convert_opts opts = options(to);
        opts.open.storage = counted;
        opts.no_check = true;
        counts = (dcp_storage_counts){0};
        convert_ok("counted.pt", name, &opts);
        assert_in_range(counts.bytes_read, st.bytes * 99 / 100, st.bytes * 102 / 100);
    }
    dcp_storage_free(counted);
}

static dcp_status little_space(dcp_storage *st, const char *name, uint64_t *free_bytes, dcp_error *err)
{
    (void)st;
    (void)name;
    (void)err;
    *free_bytes = 100;
    return DCP_OK;
}

static dcp_status no_write(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    (void)f;
    (void)buf;
    (void)n;
    (void)offset;
    (void)err;
    fail_msg("written in spite of the lack of space");
    return DCP_IO;
}

static void convert__space_is_looked_at_before_anything_is_written(void **state)
{
    (void)state;
    save_source("from");
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        opts.objects = DCP_OBJECTS_DROP;
        patched.write_at = no_write;
        patched.space = little_space;
        storage->ops = &patched;
        convert_fails(DCP_NOSPACE, "from", "full", &opts, "100 are free");
        storage->ops = whole;
        patched = *whole;
    }
}

/* ---- faults ---- */

static size_t ops_left;

static dcp_status fail_later(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)user;
    (void)n;
    (void)offset;
    bool counts = op == DCP_OP_WRITE || op == DCP_OP_SYNC || op == DCP_OP_RENAME || op == DCP_OP_READ || op == DCP_OP_OPEN;
    if (!counts || ops_left == 0 || --ops_left > 0) {
        return DCP_OK;
    }
    return dcp_error_set(err, DCP_IO, "%s: made to fail", name);
}

/* Each operation fails once: the call fails or does without, and what was there before is whole. */
static void convert__every_failed_operation_leaves_the_old_output(void **state)
{
    (void)state;
    save_source("from");
    for (dcp_convert_form to = DCP_TO_TORCH; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        opts.objects = DCP_OBJECTS_DROP;
        opts.overwrite = true;
        convert_ok("from", "kept", &opts);
        dcp_storage *faulty;
        assert_int_equal(dcp_storage_fault(NULL, storage, fail_later, NULL, &faulty, NULL), DCP_OK);
        opts.storage = opts.open.storage = faulty;
        size_t n_failed = 0;
        for (size_t n = 1; n < 200; n++) {
            ops_left = n;
            n_failed += dcp_convert(NULL, "from", "kept", &opts, NULL, NULL) != DCP_OK;
            bool was_hit = ops_left == 0;
            ops_left = 0;
            assert_w("kept", "model.w");
            assert_false(is_there("kept.libdcp-part") || is_there("kept/model.safetensors.libdcp-part"));
            if (!was_hit) {
                break;
            }
        }
        assert_true(n_failed > 5);
        dcp_storage_free(faulty);
        if (to != DCP_TO_HF) {
            assert_int_equal(whole->remove(storage, "kept", NULL), DCP_OK);
        }
    }
}

/* The same where several files take the place of several. What cannot be removed stays ignored, and goes the next time. */
static void convert__every_failed_operation_leaves_a_whole_model(void **state)
{
    (void)state;
    static const char *const names[] = {"model.w", "model.b", "model.tied"};
    dcp_convert_opts opts = options(DCP_TO_HF), good;
    dcp_storage *faulty;
    bool was_hit = true;
    save_source("from");
    opts.objects = DCP_OBJECTS_DROP;
    opts.max_file_bytes = 16;
    convert_ok("from", "several", &opts);
    opts.overwrite = true;
    good = opts;
    assert_int_equal(dcp_storage_fault(NULL, storage, fail_later, NULL, &faulty, NULL), DCP_OK);
    opts.storage = opts.open.storage = faulty;
    size_t n_failed = 0;
    for (size_t n = 1; was_hit; n++) {
        ops_left = n;
        n_failed += dcp_convert(NULL, "from", "several", &opts, NULL, NULL) != DCP_OK;
        was_hit = ops_left == 0;
        ops_left = 0;
        assert_w("several", "model.w");
        assert_true(has_item("several", names[1]) && has_item("several", names[2]));
        convert_ok("from", "several", &good);
        assert_false(is_there("several/.libdcp-replacing") || is_there("several/.libdcp-convert"));
    }
    assert_true(n_failed > 30);
    dcp_storage_free(faulty);
}

static dcp_status fail_sync(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)user, (void)n, (void)offset;
    if (op != DCP_OP_SYNC || ops_left == 0 || --ops_left > 0) {
        return DCP_OK;
    }
    return dcp_error_set(err, DCP_IO, "%s: not on the disk", name);
}

/* A failure is told once, by the call that meets it: it is neither passed over nor asked for again. */
static void convert__what_does_not_reach_the_disk_is_no_result(void **state)
{
    (void)state;
    static const char *const places[] = {
        [DCP_TO_TORCH] = "sync.pt", [DCP_TO_SAFETENSORS] = "sync.safetensors", [DCP_TO_HF] = "sync.hf"};
    dcp_storage *faulty;
    save_source("from");
    assert_int_equal(dcp_storage_fault(NULL, storage, fail_sync, NULL, &faulty, NULL), DCP_OK);
    for (dcp_convert_form to = DCP_TO_TORCH; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        opts.objects = DCP_OBJECTS_BESIDE;
        opts.max_file_bytes = to == DCP_TO_HF ? 64 : 0; /* several files, so that there is an index */
        opts.overwrite = true;
        opts.storage = opts.open.storage = faulty;
        size_t n_failed = 0;
        dcp_status status = DCP_IO;
        while (status != DCP_OK) {
            dcp_error err = DCP_ERROR_INIT;
            ops_left = n_failed + 1;
            status = dcp_convert(NULL, "from", places[to], &opts, NULL, &err);
            if (status != DCP_OK) {
                assert_int_equal(ops_left, 0);
                assert_non_null(strstr(err.message, "not on the disk"));
                n_failed++;
            }
        }
        assert_int_equal(ops_left, 1); /* each sync that there is has failed once */
        ops_left = 0;
        assert_true(n_failed >= (to == DCP_TO_HF ? 4 : 1));
    }
    dcp_storage_free(faulty);
}

static const char *walk_to;

static dcp_status convert_for_walk(dcp_context *ctx, void *user, dcp_error *err)
{
    return dcp_convert(ctx, "from", walk_to, user, NULL, err);
}

static void convert__every_failed_allocation_is_survived(void **state)
{
    (void)state;
    static const char *const edits[] = {"s/w$/weight/", "add:x."};
    static const dcp_convert_cast casts[] = {{"*.b", DCP_BFLOAT16}};
    static const char *const places[] = {"", "walk.dcp", "walk.pt", "walk.safetensors", "walk.hf"};
    save_source("from");
    for (dcp_convert_form to = DCP_TO_DCP; to <= DCP_TO_HF; to++) {
        dcp_convert_opts opts = options(to);
        walk_to = places[to];
        opts.objects = to == DCP_TO_HF ? DCP_OBJECTS_BESIDE : DCP_OBJECTS_DROP;
        opts.overwrite = true;
        opts.edits = edits;
        opts.n_edits = 2;
        opts.casts = casts;
        opts.n_casts = 1;
        opts.max_file_bytes = to == DCP_TO_HF ? 16 : 0;
        size_t n = 0;
        while (failing_alloc_try(convert_for_walk, &opts, n, false)) {
            n += 1 + n / 24;
        }
        assert_true(n > 50);
        assert_w(walk_to, "x.model.weight");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rename__does_what_sed_does),
        cmocka_unit_test(rename__bad_ones_are_refused),
        cmocka_unit_test(rename__keys_that_stay_are_not_cut_at_dots),
        cmocka_unit_test(convert__between_all_forms),
        cmocka_unit_test(convert__selects_renames_and_splits),
        cmocka_unit_test(convert__aliases_are_copied_dropped_or_refused),
        cmocka_unit_test(convert__mistakes_are_named),
        cmocka_unit_test(convert__replaces_nothing_unasked),
        cmocka_unit_test(convert__a_rival_is_refused_and_does_no_harm),
        cmocka_unit_test(convert__an_old_model_is_replaced_whole),
        cmocka_unit_test(convert__a_mark_in_pieces_is_told_and_replaced),
        cmocka_unit_test(convert__resuming_does_not_change_a_complete_model),
        cmocka_unit_test(convert__what_is_read_back_wrong_is_not_published),
        cmocka_unit_test(convert__a_dcp_directory_is_read_back_too),
        cmocka_unit_test(convert__the_sources_checksums_are_compared),
        cmocka_unit_test(convert__a_broken_byte_of_a_torch_file_is_found_while_it_is_copied),
        cmocka_unit_test(convert__a_torch_file_is_read_once),
        cmocka_unit_test(convert__space_is_looked_at_before_anything_is_written),
        cmocka_unit_test(convert__every_failed_operation_leaves_the_old_output),
        cmocka_unit_test(convert__every_failed_operation_leaves_a_whole_model),
        cmocka_unit_test(convert__what_does_not_reach_the_disk_is_no_result),
        cmocka_unit_test(convert__every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, make_patched, free_patched);
}
