/* Crashes while the model in a Hugging Face directory is written or replaced: after every call on the storage, every directory
 * that a crash could leave holds the old model or the new one, whole, for our reader and for one that knows nothing of our mark;
 * where there was no model, the new one or a refusal. The next try succeeds and leaves nothing of the dead one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "dcp/dcp.h"
#include "support/crash_storage.h"
#include "support/temp_dir.h"

#define TENSORS 3
#define ELEMS 4
#define MAX_SEEN (1 << 16)
#define MAX_STARTS 24

enum { OLD = 1, NEW = 2, NEXT = 3, REFUSED = -1 };

static dcp_context *ctx;     /* one thread, so that calls come in one order */
static dcp_storage *sources; /* "1" to "3": all elements have that number */
static temp_dir dir;         /* of the mapping */
static char mapping[320];

/* How a model is written. */
typedef struct way {
    const char *name;
    uint64_t max_file_bytes;
    bool is_mapped; /* files have names of the caller's */
    bool is_shards; /* by dcp_hf_save */
    bool lacks_index;
    int parts;     /* shards */
    bool is_whole; /* by dcp_hf_save, but whole tensors */
} way;

static const way one = {.name = "one file"};
static const way many = {.name = "a file for each", .max_file_bytes = ELEMS * sizeof(float)};
static const way two = {.name = "two files", .max_file_bytes = 2 * ELEMS * sizeof(float)};
static const way mapped = {.name = "mapped", .is_mapped = true};
static const way no_index = {.name = "without an index", .max_file_bytes = ELEMS * sizeof(float), .lacks_index = true};
static const way shard = {.name = "one shard", .is_shards = true, .parts = 1};
static const way shards = {.name = "shards", .is_shards = true, .parts = 2};

static const way whole = {.name = "whole tensors", .is_shards = true, .parts = 1, .is_whole = true};

static char name_of_tensor(int i)
{
    return (char)('a' + i);
}

/* One tensor of several chunks needs as many files. */
static dcp_value *state_of(int number, int parts)
{
    static float numbers[NEXT + 1][ELEMS];
    float *elems = numbers[number];
    int64_t shape[] = {ELEMS}, offsets[ELEMS][1], sizes[ELEMS][1];
    dcp_tensor chunks[ELEMS];
    dcp_box boxes[ELEMS];
    dcp_value *root, *w;
    for (int i = 0; i < ELEMS; i++) {
        elems[i] = (float)number;
    }
    for (int p = 0; p < parts; p++) {
        offsets[p][0] = p * ELEMS / parts;
        sizes[p][0] = ELEMS / parts;
        chunks[p] = dcp_tensor_make(DCP_FLOAT32, 1, sizes[p], elems + offsets[p][0]);
        boxes[p] = (dcp_box){offsets[p], sizes[p]};
    }
    dcp_dict_create(NULL, &root, NULL);
    for (int i = 0; i < TENSORS; i++) {
        char name[] = {name_of_tensor(i), 0};
        dcp_sharded_create(NULL, DCP_FLOAT32, 1, shape, (size_t)parts, chunks, boxes, &w, NULL);
        dcp_dict_set(root, dcp_key_str(name), w, NULL);
    }
    return root;
}

static int set_up(void **state)
{
    (void)state;
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.threads = 1;
    if (dcp_context_create(&opts, &ctx, NULL) != DCP_OK || dcp_storage_memory(NULL, &sources, NULL) != DCP_OK ||
        !temp_dir_make(&dir)) {
        return -1;
    }
    for (int i = OLD; i <= NEXT; i++) {
        dcp_save_opts save = DCP_SAVE_OPTS_INIT;
        char name[] = {(char)('0' + i), 0};
        dcp_value *root = state_of(i, 1);
        save.storage = sources;
        assert_int_equal(dcp_save(ctx, name, root, &save, NULL, NULL), DCP_OK);
        dcp_value_free(root);
    }
    snprintf(mapping, sizeof mapping, "%s/map.json", dir.path);
    FILE *f = fopen(mapping, "w");
    fputs("{\"a\": \"first.safetensors\", \"b\": \"model.safetensors\", \"c\": \"first.safetensors\"}", f);
    return fclose(f);
}

static int tear_down(void **state)
{
    (void)state;
    dcp_context_free(ctx);
    dcp_storage_free(sources);
    temp_dir_remove(&dir);
    return 0;
}

static dcp_status write_shards(const way *how, dcp_storage *st, int number, bool overwrite, dcp_error *err)
{
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    static const dcp_hf_place places[TENSORS] = {{{"a", 1}, 1}, {{"b", 1}, 2}, {{"c", 1}, 2}};
    opts.storage = st;
    opts.overwrite = overwrite;
    opts.whole = how->is_whole;
    opts.places = how->is_whole ? places : NULL;
    opts.n_places = how->is_whole ? TENSORS : 0;
    dcp_value *root = state_of(number, how->parts);
    dcp_status status = dcp_hf_save(ctx, "", root, &opts, NULL, err);
    dcp_value_free(root);
    return status;
}

static void write_model(const way *how, dcp_storage *st, int number, bool overwrite, const char *when)
{
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    char from[] = {(char)('0' + number), 0};
    opts.to = DCP_TO_HF;
    opts.open.storage = sources;
    opts.storage = st;
    opts.overwrite = overwrite;
    opts.max_file_bytes = how->max_file_bytes;
    opts.mapping = how->is_mapped ? mapping : NULL;
    dcp_status status =
        how->is_shards ? write_shards(how, st, number, overwrite, &err) : dcp_convert(ctx, from, "", &opts, NULL, &err);
    if (status != DCP_OK) {
        fail_msg("%s: %s: %s", when, how->name, err.message);
    }
}

/* ---- what a reader finds ---- */

/* The number of which all elements are; fails if they are of two. */
static int read_number(dcp_checkpoint *ck, const char *when)
{
    int64_t shape[] = {ELEMS};
    int number = 0;
    assert_int_equal(dcp_checkpoint_count(ck), TENSORS);
    for (int i = 0; i < TENSORS; i++) {
        float found[ELEMS];
        char name[] = {name_of_tensor(i), 0};
        dcp_error err = DCP_ERROR_INIT;
        dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 1, shape, found);
        const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(name));
        if (!item || dcp_read(ck, item, NULL, &dst, &err) != DCP_OK) {
            fail_msg("%s: %s: %s", when, name, err.message);
        }
        for (int k = 0; k < ELEMS; k++) {
            number = number ? number : (int)found[k];
            if (found[k] != (float)number) {
                fail_msg("%s: a mixture of %d and %g in %s", when, number, (double)found[k], name);
            }
        }
    }
    return number;
}

static int number_at(dcp_storage *st, const char *when, dcp_error *err)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = st;
    dcp_status status = dcp_checkpoint_open(ctx, "", &opts, &ck, err);
    if (status != DCP_OK) {
        if (status != DCP_NOT_FOUND && status != DCP_FORMAT) {
            fail_msg("%s: %s: %s", when, dcp_status_name(status), err->message);
        }
        return REFUSED;
    }
    int number = read_number(ck, when);
    dcp_checkpoint_close(ck);
    return number;
}

static const file_bytes *file_of(const crash_image *image, const char *name)
{
    for (size_t i = 0; i < image->n; i++) {
        if (strcmp(image->names[i], name) == 0) {
            return &image->files[i];
        }
    }
    return NULL;
}

static void copy_file(const crash_image *image, const char *name, dcp_storage *to, const char *when)
{
    const file_bytes *f = file_of(image, name);
    if (!f) {
        fail_msg("%s: %s is not there", when, name);
    }
    set_file(to, name, f->data, f->n);
}

static void copy_indexed(const crash_image *image, const file_bytes *index, dcp_storage *to, const char *when)
{
    const char *tensor;
    json_t *file, *root = json_loadb((const char *)index->data, index->n, 0, NULL);
    assert_non_null(root);
    json_object_foreach(json_object_get(root, "weight_map"), tensor, file)
    {
        copy_file(image, json_string_value(file), to, when);
    }
    set_file(to, "model.safetensors.index.json", index->data, index->n);
    json_decref(root);
}

/* As transformers looks for it: model.safetensors, else what the index names; nothing else counts. */
static int plain_number(const crash_image *image, const char *when)
{
    const file_bytes *index = file_of(image, "model.safetensors.index.json");
    bool has_single = file_of(image, "model.safetensors") != NULL;
    dcp_storage *st;
    dcp_error err = DCP_ERROR_INIT;
    if (!has_single && !index) {
        return REFUSED;
    }
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    if (has_single) {
        copy_file(image, "model.safetensors", st, when);
    } else {
        copy_indexed(image, index, st, when);
    }
    int number = number_at(st, when, &err);
    if (number == REFUSED) {
        fail_msg("%s: plain reader: %s", when, err.message);
    }
    dcp_storage_free(st);
    return number;
}

/* ---- one state ---- */

typedef struct sweep {
    const way *old, *new;
    int before, after; /* numbers of the models, REFUSED if there was none */
    bool is_plain;     /* a plain reader finds either model */
    int plain_before;  /* what it found before: it may have switched earlier than ours */
    test_random rnd;
    uint64_t *seen;
    size_t n_states, n_before, n_after, n_refused;
    crash_image *starts; /* NULL: not wanted */
    size_t n_starts;
} sweep;

static bool has_seen(sweep *w, uint64_t hash)
{
    size_t i = hash % MAX_SEEN;
    hash = hash ? hash : 1;
    while (w->seen[i] && w->seen[i] != hash) {
        i = (i + 1) % MAX_SEEN;
    }
    bool seen = w->seen[i] == hash;
    w->seen[i] = hash;
    return seen;
}

typedef struct counting {
    size_t n_tensors, n_others;
    const char *when;
} counting;

static dcp_status count_entry(void *user, const char *name, dcp_entry_type type)
{
    counting *c = user;
    const char *dot = strrchr(name, '.');
    (void)type;
    if (strstr(name, ".libdcp-")) {
        fail_msg("%s: left over: %s", c->when, name);
    }
    *(dot && strcmp(dot, ".safetensors") == 0 ? &c->n_tensors : &c->n_others) += 1;
    return DCP_OK;
}

/* Only the files of the model, its index, and the one that is somebody's. */
static void assert_clean(dcp_storage *st, const way *how, const char *when)
{
    counting c = {.when = when};
    assert_int_equal(st->ops->list(st, "", count_entry, &c, NULL), DCP_OK);
    size_t files = how == &one || how == &shard ? 1 : how == &many ? TENSORS : 2;
    if (c.n_tensors != files) {
        fail_msg("%s: %zu tensor files", when, c.n_tensors);
    }
    assert_in_range(c.n_others, 1, 2);
}

static void try_again(const sweep *w, dcp_storage *st, const char *when)
{
    dcp_error err = DCP_ERROR_INIT;
    write_model(w->new, st, NEXT, true, when);
    if (number_at(st, when, &err) != NEXT) {
        fail_msg("%s: after the next try: %s", when, err.message);
    }
    assert_clean(st, w->new, when);
}

static void keep_start(sweep *w, const crash_image *image)
{
    if (!w->starts || w->n_starts == MAX_STARTS || w->n_states % 5 != 0) {
        return;
    }
    crash_image *copy = &w->starts[w->n_starts++];
    *copy = *image;
    for (size_t i = 0; i < image->n; i++) {
        copy->files[i].data = malloc(image->files[i].n + 1);
        memcpy(copy->files[i].data, image->files[i].data, image->files[i].n);
    }
}

static void check(void *user, const crash_image *image)
{
    sweep *w = user;
    dcp_storage *st;
    dcp_error err = DCP_ERROR_INIT;
    if (has_seen(w, crash_image_hash(image))) {
        return;
    }
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    crash_image_restore(image, st);
    int number = number_at(st, image->how, &err);
    if (number != w->after && number != w->before) {
        fail_msg("%s: %d is found: %s", image->how, number, err.message);
    }
    int plain = w->is_plain ? plain_number(image, image->how) : w->after;
    if (plain != w->after && plain != w->plain_before) {
        fail_msg("%s: a plain reader finds %d", image->how, plain);
    }
    w->n_states++;
    *(number == REFUSED ? &w->n_refused : number == w->after ? &w->n_after : &w->n_before) += 1;
    keep_start(w, image);
    try_again(w, st, image->how);
    dcp_storage_free(st);
}

static void after_call(void *user, crash_storage *cs)
{
    sweep *w = user;
    crash_storage_states(cs, &w->rnd, check, w);
}

/* ---- sweeps ---- */

static void run(sweep *w, crash_storage *cs, const char *what)
{
    w->seen = calloc(MAX_SEEN, sizeof *w->seen);
    w->rnd = test_random_seeded(what);
    crash_storage_settle(cs);
    cs->after = after_call;
    cs->user = w;
    write_model(w->new, &cs->base, w->after, w->before != REFUSED, what);
    cs->after = NULL;
    crash_storage_settle(cs);
    after_call(w, cs);
    assert_true(w->n_after > 0 && (w->before == REFUSED ? w->n_refused : w->n_before) > 0);
    free(w->seen);
    printf("%s: %zu states: %zu before, %zu after, %zu refused\n", what, w->n_states, w->n_before, w->n_after, w->n_refused);
}

static void set_bystander(crash_storage *cs)
{
    set_file(&cs->base, "config.json", "{}", 2);
}

static void write_old(const way *how, crash_storage *cs)
{
    set_bystander(cs);
    if (!how) {
        return;
    }
    write_model(how, &cs->base, OLD, false, "the old one");
    if (how->lacks_index) {
        assert_int_equal(cs->base.ops->remove(&cs->base, "model.safetensors.index.json", NULL), DCP_OK);
    }
}

static void sweep_over(const way *old, const way *new, bool is_plain)
{
    char what[96];
    int before = old ? OLD : REFUSED;
    sweep w = {.old = old, .new = new, .before = before, .after = NEW, .is_plain = is_plain, .plain_before = before};
    crash_storage *cs = crash_storage_make(true);
    snprintf(what, sizeof what, "%s, then %s", old ? old->name : "nothing", new->name);
    write_old(old, cs);
    run(&w, cs, what);
    dcp_storage_free(&cs->base);
}

static void hf_crash__a_new_model_is_whole_or_refused(void **state)
{
    (void)state;
    sweep_over(NULL, &one, true);
    sweep_over(NULL, &many, true);
    sweep_over(NULL, &whole, true);
    sweep_over(NULL, &mapped, false); /* a plain reader takes model.safetensors for the whole of it */
    sweep_over(NULL, &shards, false);
}

static void hf_crash__replacing_leaves_the_old_or_the_new(void **state)
{
    (void)state;
    sweep_over(&one, &one, true);
    sweep_over(&one, &many, true);
    sweep_over(&many, &one, true);
    sweep_over(&many, &many, true);
    sweep_over(&many, &two, true);
    sweep_over(&mapped, &mapped, false);
    sweep_over(&mapped, &many, false);
    sweep_over(&many, &mapped, false);
    sweep_over(&mapped, &one, false);
    sweep_over(&whole, &whole, true);
    sweep_over(&one, &whole, true);
    sweep_over(&whole, &shards, false);
}

/* Nothing but the mark says which of two sets of files counts. */
static void hf_crash__without_an_index_too(void **state)
{
    (void)state;
    sweep_over(&no_index, &many, false);
    sweep_over(&no_index, &one, false);
    sweep_over(&shard, &shard, false);
    sweep_over(&shard, &shards, false);
    sweep_over(&shards, &shard, false);
    sweep_over(&shards, &shards, false);
}

/* Begins in what a first crash has left of `new`, and writes `then`. */
static void sweep_again(const way *old, const way *new, const way *then, bool is_plain)
{
    sweep first = {.old = old, .new = new, .before = OLD, .after = NEW, .is_plain = is_plain, .plain_before = OLD};
    crash_storage *cs = crash_storage_make(true);
    first.starts = calloc(MAX_STARTS, sizeof *first.starts);
    write_old(old, cs);
    run(&first, cs, "first crash");
    dcp_storage_free(&cs->base);
    assert_true(first.n_starts > 3);
    for (size_t i = 0; i < first.n_starts; i++) {
        dcp_error err = DCP_ERROR_INIT;
        cs = crash_storage_make(true);
        crash_image_restore(&first.starts[i], &cs->base);
        sweep second = {.old = old, .new = then, .after = NEXT, .is_plain = is_plain};
        second.before = number_at(&cs->base, "a start", &err);
        second.plain_before = is_plain ? plain_number(&first.starts[i], "a start") : REFUSED;
        run(&second, cs, "second crash");
        dcp_storage_free(&cs->base);
        for (size_t k = 0; k < first.starts[i].n; k++) {
            free(first.starts[i].files[k].data);
        }
    }
    free(first.starts);
}

static void hf_crash__a_second_crash_after_the_first(void **state)
{
    (void)state;
    sweep_again(&many, &many, &many, true);
    sweep_again(&many, &one, &one, true);
    sweep_again(&shards, &shards, &shards, false);
    sweep_again(&many, &mapped, &many, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hf_crash__a_new_model_is_whole_or_refused),
        cmocka_unit_test(hf_crash__replacing_leaves_the_old_or_the_new),
        cmocka_unit_test(hf_crash__without_an_index_too),
        cmocka_unit_test(hf_crash__a_second_crash_after_the_first),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
