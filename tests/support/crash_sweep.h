/*
 * Sweeps over the crashes of a save: after every call on the storage, every directory that a crash could leave must hold the old
 * checkpoint or the new one, and the next save must succeed and leave nothing of the dead one. Who saves is the test's affair.
 */
#ifndef TESTS_SUPPORT_CRASH_SWEEP_H
#define TESTS_SUPPORT_CRASH_SWEEP_H

#include "dcp/dcp.h"
#include "support/crash_storage.h"
#include "support/random_state.h"

#define SWEEP_MAX_SEEN (1 << 18)
#define SWEEP_MAX_STARTS 8

typedef struct sweep sweep;

/* How a sweep saves: opts has the storage. Returns when all ranks have. */
typedef dcp_status (*sweep_save_fn)(const sweep *w, const dcp_value *state, const dcp_save_opts *opts, dcp_error *err);

/* One sweep: what was there, what is saved, what has been seen. */
struct sweep {
    dcp_context *ctx; /* one thread, so that calls of one process come in one order */
    sweep_save_fn save;
    bool renames;
    dcp_value *old; /* NULL: there is nothing yet */
    dcp_value *new;
    dcp_value *next; /* saved into what the crash left */
    const char *const *bystanders;
    test_random rnd;
    uint64_t *seen; /* hashes of images, open addressing; 0: free */
    size_t n_states, n_old, n_new, n_nothing, n_recovered;
    /* images to begin another sweep from */
    crash_image *starts;
    size_t n_starts;
};

static inline dcp_value *sweep_state(int generation)
{
    dcp_value *state, *nested, *v;
    int64_t small[] = {300}, large[] = {2500}, blocks[] = {270000}, none[] = {0, 3};
    test_random rnd = {(uint64_t)generation};
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &nested, NULL);
    dcp_tensor_alloc(NULL, DCP_FLOAT32, 1, small, &v, NULL);
    random_fill(&rnd, dcp_value_tensor(v)->data, 300 * 4);
    dcp_dict_set(state, dcp_key_str("small"), v, NULL);
    dcp_tensor_alloc(NULL, DCP_INT64, 1, large, &v, NULL);
    random_fill(&rnd, dcp_value_tensor(v)->data, 2500 * 8);
    dcp_dict_set(nested, dcp_key_str("large"), v, NULL);
    dcp_tensor_alloc(NULL, DCP_INT8, 1, blocks, &v, NULL); /* too large to be packed with others: three writes */
    random_fill(&rnd, dcp_value_tensor(v)->data, 270000);
    dcp_dict_set(nested, dcp_key_str("blocks"), v, NULL);
    dcp_tensor_alloc(NULL, DCP_UINT8, 2, none, &v, NULL);
    dcp_dict_set(nested, dcp_key_str("none"), v, NULL);
    dcp_dict_set(state, dcp_key_str("nested"), nested, NULL);
    dcp_dict_set_int(state, "generation", generation, NULL);
    return state;
}

static inline bool sweep_has_seen(sweep *w, uint64_t hash)
{
    size_t i = hash % SWEEP_MAX_SEEN;
    hash = hash ? hash : 1;
    while (w->seen[i] && w->seen[i] != hash) {
        i = (i + 1) % SWEEP_MAX_SEEN;
    }
    bool seen = w->seen[i] == hash;
    w->seen[i] = hash;
    return seen;
}

/* ---- one state ---- */

static inline dcp_value *sweep_read(sweep *w, dcp_storage *st, const char *how, bool *recovered)
{
    dcp_checkpoint *ck;
    dcp_value *tree;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    opts.storage = st;
    dcp_status status = dcp_checkpoint_open(w->ctx, "", &opts, &ck, &err);
    if (status != DCP_OK) {
        if (w->old || !err.message[0] || (status != DCP_NOT_FOUND && status != DCP_FORMAT && status != DCP_CHECKSUM)) {
            fail_msg("%s: open: %s: %s", how, dcp_status_name(status), err.message);
        }
        return NULL;
    }
    if (dcp_read_tree(ck, true, &tree, &err) != DCP_OK || dcp_verify(ck, NULL, &verified, &err) != DCP_OK) {
        fail_msg("%s: %s", how, err.message);
    }
    dcp_checkpoint_close(ck);
    /* Only where nothing can be renamed, the metadata itself may be in pieces while its copy is whole. */
    *recovered = verified.n_defects > 0;
    if (verified.n_defects > (w->renames ? 0 : 1)) {
        fail_msg("%s: %zu defects", how, verified.n_defects);
    }
    return tree;
}

typedef struct sweep_expected {
    char names[CRASH_MAX_FILES][CRASH_NAME_BYTES];
    bool found[CRASH_MAX_FILES];
    size_t n;
    const char *how;
} sweep_expected;

static inline dcp_status sweep_tick_off(void *user, const char *name, dcp_entry_type type)
{
    sweep_expected *e = user;
    (void)type;
    for (size_t i = 0; i < e->n; i++) {
        if (strcmp(e->names[i], name) == 0) {
            e->found[i] = true;
            return DCP_OK;
        }
    }
    fail_msg("%s: left over after the next save: %s", e->how, name);
    return DCP_OK;
}

/* The files of the checkpoint, its metadata, and the bystanders are there, and nothing else. */
static inline void sweep_check_directory(sweep *w, dcp_storage *st, const char *how)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    static sweep_expected e;
    memset(&e, 0, sizeof e);
    e.how = how;
    opts.storage = st;
    assert_int_equal(dcp_checkpoint_open(w->ctx, "", &opts, &ck, NULL), DCP_OK);
    dcp_checkpoint_get_info(ck, &info, NULL);
    snprintf(e.names[e.n++], CRASH_NAME_BYTES, ".metadata");
    for (size_t i = 0; w->bystanders && w->bystanders[i]; i++) {
        snprintf(e.names[e.n++], CRASH_NAME_BYTES, "%s", w->bystanders[i]);
    }
    for (size_t i = 0; i < info.n_files; i++) {
        dcp_file_info f;
        assert_int_equal(dcp_checkpoint_file(ck, i, &f, NULL), DCP_OK);
        snprintf(e.names[e.n++], CRASH_NAME_BYTES, "%s", f.name);
    }
    dcp_checkpoint_close(ck);
    assert_int_equal(st->ops->list(st, "", sweep_tick_off, &e, NULL), DCP_OK);
    for (size_t i = 0; i < e.n; i++) {
        if (!e.found[i]) {
            fail_msg("%s: gone after the next save: %s", how, e.names[i]);
        }
    }
}

static inline void sweep_save_next(sweep *w, dcp_storage *st, const char *how)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    bool recovered = false;
    opts.storage = st;
    opts.overwrite = true;
    if (dcp_save(w->ctx, "", w->next, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s: the next save: %s", how, err.message);
    }
    dcp_value *tree = sweep_read(w, st, how, &recovered);
    if (!tree || recovered || !dcp_value_equal(tree, w->next)) {
        fail_msg("%s: the next save reads back different", how);
    }
    dcp_value_free(tree);
    sweep_check_directory(w, st, how);
}

static inline void sweep_keep_start(sweep *w, const crash_image *image)
{
    if (w->starts && w->n_starts < SWEEP_MAX_STARTS && w->n_states % 13 == 0) {
        crash_image *copy = &w->starts[w->n_starts++];
        *copy = *image;
        for (size_t i = 0; i < image->n; i++) {
            copy->files[i].data = malloc(image->files[i].n + 1);
            memcpy(copy->files[i].data, image->files[i].data, image->files[i].n);
        }
    }
}

static inline void sweep_check(void *user, const crash_image *image)
{
    sweep *w = user;
    bool recovered = false;
    dcp_storage *st;
    if (sweep_has_seen(w, crash_image_hash(image))) {
        return;
    }
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    crash_image_restore(image, st);
    dcp_value *tree = sweep_read(w, st, image->how, &recovered);
    w->n_states++;
    if (!tree) {
        w->n_nothing++;
    } else if (w->old && dcp_value_equal(tree, w->old)) {
        w->n_old++;
    } else if (dcp_value_equal(tree, w->new)) {
        w->n_new++;
    } else {
        char *text;
        dcp_value_repr(tree, 0, &text, NULL, NULL);
        fail_msg("%s: neither the old nor the new checkpoint: %.400s", image->how, text);
    }
    w->n_recovered += recovered;
    dcp_value_free(tree);
    sweep_keep_start(w, image);
    sweep_save_next(w, st, image->how);
    dcp_storage_free(st);
}

static inline void sweep_after_call(void *user, crash_storage *cs)
{
    sweep *w = user;
    crash_storage_states(cs, &w->rnd, sweep_check, w);
}

/* ---- sweeps ---- */

static inline dcp_status sweep_save_alone(const sweep *w, const dcp_value *state, const dcp_save_opts *opts, dcp_error *err)
{
    return dcp_save(w->ctx, "", (dcp_value *)state, opts, NULL, err);
}

static inline sweep sweep_make(const char *what, bool renames, sweep_save_fn save)
{
    sweep w = {.save = save, .renames = renames, .rnd = test_random_seeded(what)};
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.threads = 1;
    assert_int_equal(dcp_context_create(&opts, &w.ctx, NULL), DCP_OK);
    w.seen = calloc(SWEEP_MAX_SEEN, sizeof *w.seen);
    w.new = sweep_state(2);
    w.next = sweep_state(3);
    return w;
}

static inline void sweep_end(sweep *w, const char *what)
{
    printf("%s: %zu states: %zu old, %zu new, %zu nothing, %zu recovered\n", what, w->n_states, w->n_old, w->n_new, w->n_nothing,
           w->n_recovered);
    for (size_t i = 0; i < w->n_starts; i++) {
        for (size_t k = 0; k < w->starts[i].n; k++) {
            free(w->starts[i].files[k].data);
        }
    }
    free(w->starts);
    free(w->seen);
    dcp_value_free(w->old);
    dcp_value_free(w->new);
    dcp_value_free(w->next);
    dcp_context_free(w->ctx);
}

static inline void sweep_save_old(sweep *w, crash_storage *cs, dcp_save_opts opts)
{
    dcp_error err = DCP_ERROR_INIT;
    w->old = sweep_state(1);
    opts.storage = &cs->base;
    if (w->save(w, w->old, &opts, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    crash_storage_settle(cs);
}

/* Saves the new state and looks at every state after every call. */
static inline void sweep_save_new(sweep *w, crash_storage *cs, dcp_save_opts opts)
{
    dcp_error err = DCP_ERROR_INIT;
    cs->after = sweep_after_call;
    cs->user = w;
    opts.storage = &cs->base;
    opts.overwrite = true;
    if (w->save(w, w->new, &opts, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    cs->after = NULL;
    assert_true(w->n_new > 0 && (w->old ? w->n_old : w->n_nothing) > 0);
}

#endif
