/* Saves on a storage that fails, that cannot do everything, or without memory; saves that the caller stops. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/crash_storage.h"
#include "support/failing_alloc.h"
#include "support/random_state.h"

static dcp_value *state_of(int generation)
{
    dcp_value *state, *v;
    int64_t small[] = {300}, large[] = {270000};
    test_random rnd = {(uint64_t)generation};
    dcp_dict_create(NULL, &state, NULL);
    dcp_tensor_alloc(NULL, DCP_FLOAT32, 1, small, &v, NULL);
    random_fill(&rnd, dcp_value_tensor(v)->data, 300 * 4);
    dcp_dict_set(state, dcp_key_str("small"), v, NULL);
    dcp_tensor_alloc(NULL, DCP_INT8, 1, large, &v, NULL);
    random_fill(&rnd, dcp_value_tensor(v)->data, 270000);
    dcp_dict_set(state, dcp_key_str("large"), v, NULL);
    dcp_dict_set_int(state, "generation", generation, NULL);
    return state;
}

/* The whole checkpoint in a storage, NULL if there is none. It must be without defects, save that of a metadata file that could
 * not be put in place and is read from its copy. */
static dcp_value *read_all(dcp_storage *st)
{
    dcp_checkpoint *ck;
    dcp_value *tree;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    dcp_stat copy;
    bool has_copy = st->ops->stat(st, ".metadata.tmp", &copy, NULL) == DCP_OK;
    opts.storage = st;
    if (dcp_checkpoint_open(NULL, "", &opts, &ck, NULL) != DCP_OK) {
        return NULL;
    }
    assert_int_equal(dcp_read_tree(ck, true, &tree, NULL), DCP_OK);
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_in_range(verified.n_defects, 0, has_copy);
    dcp_checkpoint_close(ck);
    return tree;
}

static bool holds(dcp_storage *st, const dcp_value *state)
{
    dcp_value *tree = read_all(st);
    bool same = tree ? dcp_value_equal(tree, state) : !state;
    dcp_value_free(tree);
    return same;
}

/* ---- every call fails once ---- */

typedef struct fault {
    size_t calls, at; /* the call of this number fails */
    bool all_later;
    dcp_status status;
    bool hit;
    dcp_storage_op op; /* that failed */
    char name[CRASH_NAME_BYTES];
} fault;

static dcp_status fail_one(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    fault *f = user;
    (void)n;
    (void)offset;
    (void)err;
    size_t call = f->calls++;
    if (call != f->at && !(f->all_later && call > f->at)) {
        return DCP_OK;
    }
    if (call == f->at) {
        f->hit = true;
        f->op = op;
        snprintf(f->name, sizeof f->name, "%s", name);
    }
    return op == DCP_OP_REMOVE && f->status == DCP_NOT_FOUND ? DCP_OK : f->status; /* to remove what is gone is no failure */
}

typedef struct scenario {
    const char *what;
    bool renames;
    const crash_storage *start; /* what is there before; NULL: nothing */
    const dcp_value *old;       /* the checkpoint in it; NULL: none */
    dcp_save_opts opts;
} scenario;

/* A storage of its own with the same files, as if the machine had been started anew: nothing is locked. */
static crash_storage *copy_of(const crash_storage *from, bool renames)
{
    crash_storage *cs = crash_storage_make(renames);
    for (size_t i = 0; from && i < from->now.n; i++) {
        const file_bytes *f = &from->now.names[i].inode->now;
        set_file(&cs->base, from->now.names[i].name, f->n ? f->data : (const uint8_t *)"", f->n);
    }
    crash_storage_settle(cs);
    return cs;
}

static bool same_names(const crash_storage *a, crash_storage *b)
{
    size_t n = a ? a->now.n : 0;
    for (size_t i = 0; i < n; i++) {
        if (!crash_find(&b->now, a->now.names[i].name)) {
            return false;
        }
    }
    return n == b->now.n;
}

/* Names are those of the checkpoint in it, and no others: what a good save leaves. */
static void check_no_leftover(crash_storage *cs, const char *what, size_t at)
{
    dcp_checkpoint *ck;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint_info info = DCP_CHECKPOINT_INFO_INIT;
    opts.storage = &cs->base;
    assert_int_equal(dcp_checkpoint_open(NULL, "", &opts, &ck, NULL), DCP_OK);
    dcp_checkpoint_get_info(ck, &info, NULL);
    if (cs->now.n != info.n_files + 1) {
        for (size_t i = 0; i < cs->now.n; i++) {
            printf("  %s\n", cs->now.names[i].name);
        }
        fail_msg("%s, call %zu: %zu files instead of %zu", what, at, cs->now.n, info.n_files + 1);
    }
    dcp_checkpoint_close(ck);
}

static void check_failure(const scenario *sc, crash_storage *cs, const fault *f, dcp_status status, const dcp_error *err,
                          const dcp_value *new)
{
    bool is_uncertain = strstr(err->message, "the files of") != NULL;
    if (status != f->status && !(f->status == DCP_NOT_FOUND && status == DCP_EXISTS)) {
        fail_msg("%s, call %zu (%d %s): %s: %s", sc->what, f->at, f->op, f->name, dcp_status_name(status), err->message);
    }
    if (!f->all_later && status == f->status && f->name[0] && !strstr(err->message, f->name)) {
        fail_msg("%s, call %zu: \"%s\" does not name %s", sc->what, f->at, err->message, f->name);
    }
    if (is_uncertain) { /* only where publishing itself failed half-way */
        assert_true(f->op == DCP_OP_SYNC_DIR || f->all_later);
        assert_true(holds(&cs->base, new) || holds(&cs->base, sc->old));
        return;
    }
    if (!holds(&cs->base, sc->old)) {
        fail_msg("%s, call %zu (%d %s)%s: the old checkpoint is not whole: %s", sc->what, f->at, f->op, f->name,
                 f->all_later ? " and all later" : "", err->message);
    }
    /* The leftovers of a dead save may have been removed. */
    if (!f->all_later && sc->start && crash_find((crash_dir *)&sc->start->now, ".libdcp-intent-dead")) {
        return;
    }
    if (!f->all_later && !same_names(sc->start, cs)) {
        for (size_t i = 0; i < cs->now.n; i++) {
            printf("  %s\n", cs->now.names[i].name);
        }
        fail_msg("%s, call %zu (%d %s): left something behind", sc->what, f->at, f->op, f->name);
    }
}

/* One save with one fault. False if the save made fewer calls. */
static bool try_fault(const scenario *sc, dcp_context *ctx, size_t at, dcp_status fault_status, bool all_later)
{
    fault f = {.at = at, .status = fault_status, .all_later = all_later};
    crash_storage *cs = copy_of(sc->start, sc->renames);
    dcp_storage *faulty;
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *new = state_of(2);
    dcp_save_opts opts = sc->opts;
    assert_int_equal(dcp_storage_fault(NULL, &cs->base, fail_one, &f, &faulty, NULL), DCP_OK);
    opts.storage = faulty;
    opts.overwrite = true;
    dcp_status status = dcp_save(ctx, "", new, &opts, NULL, &err);
    if (status != DCP_OK) {
        assert_true(f.hit);
        check_failure(sc, cs, &f, status, &err, new);
    } else if (!holds(&cs->base, new)) {
        fail_msg("%s, call %zu (%d %s): saved, but not there", sc->what, at, f.op, f.name);
    }
    /* The next save finds nothing in its way and leaves nothing behind, not even what this one may have left. */
    opts.storage = &cs->base;
    err = (dcp_error)DCP_ERROR_INIT;
    if (dcp_save(ctx, "", new, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s, after call %zu (%d %s): %s", sc->what, at, f.op, f.name, err.message);
    }
    assert_true(holds(&cs->base, new));
    check_no_leftover(cs, sc->what, at);
    dcp_value_free(new);
    dcp_storage_free(faulty);
    dcp_storage_free(&cs->base);
    return f.hit;
}

static void try_all_faults(const scenario *sc)
{
    static const dcp_status codes[] = {DCP_IO, DCP_NOSPACE, DCP_NOT_FOUND};
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_context *ctx;
    opts.threads = 1;
    assert_int_equal(dcp_context_create(&opts, &ctx, NULL), DCP_OK);
    size_t at = 0;
    for (bool hit = true; hit; at++) {
        hit = false;
        for (size_t k = 0; k < 3; k++) {
            hit |= try_fault(sc, ctx, at, codes[k], false);
            if (codes[k] != DCP_NOT_FOUND) { /* a directory that has gone has no content to be checked */
                hit |= try_fault(sc, ctx, at, codes[k], true);
            }
        }
    }
    assert_true(at > 15);
    dcp_context_free(ctx);
}

static crash_storage *with_checkpoint(const dcp_value *state, bool renames, dcp_save_opts opts)
{
    crash_storage *cs = crash_storage_make(renames);
    opts.storage = &cs->base;
    assert_int_equal(dcp_save(NULL, "", (dcp_value *)state, &opts, NULL, NULL), DCP_OK);
    crash_storage_settle(cs);
    return cs;
}

static void faults__each_call_in_a_first_save(void **unused)
{
    (void)unused;
    scenario sc = {"first", true, NULL, NULL, DCP_SAVE_OPTS_INIT};
    try_all_faults(&sc);
    sc = (scenario){"first, no rename", false, NULL, NULL, DCP_SAVE_OPTS_INIT};
    try_all_faults(&sc);
    sc = (scenario){"first, zstd", true, NULL, NULL, DCP_SAVE_OPTS_INIT};
    sc.opts.transform = "stream.zstd/1";
    sc.opts.files = 2;
    try_all_faults(&sc);
}

static void faults__each_call_while_overwriting(void **unused)
{
    (void)unused;
    dcp_value *old = state_of(1);
    dcp_save_opts two = DCP_SAVE_OPTS_INIT;
    two.files = 2;
    crash_storage *start = with_checkpoint(old, true, two);
    scenario sc = {"overwrite", true, start, old, DCP_SAVE_OPTS_INIT};
    try_all_faults(&sc);
    sc = (scenario){"overwrite, a file per item", true, start, old, DCP_SAVE_OPTS_INIT};
    sc.opts.file_per_item = true;
    try_all_faults(&sc);
    sc = (scenario){"overwrite, no rename", false, start, old, DCP_SAVE_OPTS_INIT};
    try_all_faults(&sc);
    dcp_storage_free(&start->base);
    dcp_value_free(old);
}

static void faults__each_call_after_a_dead_save(void **unused)
{
    (void)unused;
    dcp_value *old = state_of(1);
    crash_storage *start = with_checkpoint(old, true, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    static const char intent[] = "libdcp intent 1\ngeneration 0123456789ab\nworld 1\nreplaces __0_9.distcp\n";
    set_file(&start->base, ".libdcp-intent-dead", intent, sizeof intent - 1);
    set_file(&start->base, "__0_0123456789ab_0.distcp", "half", 4);
    set_file(&start->base, "__0_9.distcp", "old", 3);
    crash_storage_settle(start);
    scenario sc = {"after a dead save", true, start, old, DCP_SAVE_OPTS_INIT};
    try_all_faults(&sc);
    dcp_storage_free(&start->base);
    dcp_value_free(old);
}

/* ---- what a storage cannot do ---- */

typedef struct refusal {
    dcp_storage_op op, also;
} refusal;

static dcp_status refuse(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    refusal *r = user;
    (void)name;
    (void)n;
    (void)offset;
    (void)err;
    return op == r->op || op == r->also ? DCP_UNSUPPORTED : DCP_OK;
}

static void check_degraded(dcp_storage_op op, dcp_storage_op also, unsigned degraded)
{
    dcp_value *old = state_of(1), *new = state_of(2);
    crash_storage *cs = with_checkpoint(old, true, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    refusal r = {op, also};
    dcp_storage *st;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_storage_fault(NULL, &cs->base, refuse, &r, &st, NULL), DCP_OK);
    opts.storage = st;
    opts.overwrite = true;
    if (dcp_save(NULL, "", new, &opts, &report, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(err.code, DCP_OK);
    assert_int_equal(report.degraded, degraded);
    assert_true(holds(&cs->base, new));
    check_no_leftover(cs, "degraded", 0);
    dcp_storage_free(st);
    dcp_storage_free(&cs->base);
    dcp_value_free(old);
    dcp_value_free(new);
}

static void faults__what_a_storage_refuses_is_reported(void **unused)
{
    (void)unused;
    check_degraded(DCP_OP_SYNC, DCP_OP_SYNC, DCP_DEGRADED_SYNC);
    check_degraded(DCP_OP_SYNC_DIR, DCP_OP_SYNC_DIR, DCP_DEGRADED_SYNC);
    check_degraded(DCP_OP_RENAME, DCP_OP_RENAME, DCP_DEGRADED_RENAME);
    check_degraded(DCP_OP_LOCK, DCP_OP_LOCK, DCP_DEGRADED_LOCK);
    check_degraded(DCP_OP_LOCK, DCP_OP_RENAME, DCP_DEGRADED_LOCK | DCP_DEGRADED_RENAME);
    check_degraded(DCP_OP_COUNT, DCP_OP_COUNT, 0);
}

/* The answer to a rename is lost: it happened, and the caller is told that it did not. */
static dcp_status (*rename_for_real)(dcp_storage *, const char *, const char *, dcp_error *);

static dcp_status rename_and_fail(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    assert_int_equal(rename_for_real(st, from, to, NULL), DCP_OK);
    return dcp__fail_errno(err, EIO, "rename %s", from);
}

static void faults__a_rename_that_happened_in_spite_of_its_error_loses_nothing(void **unused)
{
    (void)unused;
    dcp_value *old = state_of(1), *new = state_of(2);
    crash_storage *cs = with_checkpoint(old, true, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = &cs->base;
    opts.overwrite = true;
    rename_for_real = cs->ops.rename;
    cs->ops.rename = rename_and_fail;
    assert_int_equal(dcp_save(NULL, "", new, &opts, NULL, NULL), DCP_IO);
    assert_true(holds(&cs->base, new));
    cs->ops.rename = rename_for_real;
    assert_int_equal(dcp_save(NULL, "", old, &opts, NULL, NULL), DCP_OK);
    assert_true(holds(&cs->base, old));
    check_no_leftover(cs, "lost answer", 0);
    dcp_storage_free(&cs->base);
    dcp_value_free(old);
    dcp_value_free(new);
}

/* Without locks nobody can tell a dead save from a living one, so the files of both stay. */
static void faults__without_locks_intents_of_others_are_left_alone(void **unused)
{
    (void)unused;
    dcp_value *old = state_of(1), *new = state_of(2);
    crash_storage *cs = with_checkpoint(old, true, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    static const char intent[] = "libdcp intent 1\ngeneration 0123456789ab\nworld 1\n";
    set_file(&cs->base, ".libdcp-intent-other", intent, sizeof intent - 1);
    set_file(&cs->base, "__0_0123456789ab_0.distcp", "half", 4);
    cs->ops.lock = NULL;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    opts.storage = &cs->base;
    opts.overwrite = true;
    assert_int_equal(dcp_save(NULL, "", new, &opts, &report, NULL), DCP_OK);
    assert_int_equal(report.degraded, DCP_DEGRADED_LOCK);
    assert_true(holds(&cs->base, new));
    assert_non_null(crash_find(&cs->now, ".libdcp-intent-other"));
    assert_non_null(crash_find(&cs->now, "__0_0123456789ab_0.distcp"));
    dcp_storage_free(&cs->base);
    dcp_value_free(old);
    dcp_value_free(new);
}

/* ---- stopping ---- */

typedef struct watcher {
    size_t calls, stop_at;
    uint64_t done, total;
} watcher;

static bool watch(void *user, uint64_t done, uint64_t total)
{
    watcher *w = user;
    assert_true(done >= w->done && done <= total);
    w->done = done;
    w->total = total;
    return w->calls++ < w->stop_at;
}

static void check_progress(const char *transform)
{
    dcp_value *old = state_of(1), *new = state_of(2);
    crash_storage *cs = with_checkpoint(old, true, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
    crash_storage *before = copy_of(cs, true);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    watcher w = {.stop_at = 0};
    opts.storage = &cs->base;
    opts.overwrite = true;
    opts.transform = transform;
    opts.progress = watch;
    opts.user = &w;
    assert_int_equal(dcp_save(NULL, "", new, &opts, NULL, NULL), DCP_CANCELED);
    assert_true(holds(&cs->base, old));
    assert_true(same_names(before, cs));
    w = (watcher){.stop_at = SIZE_MAX};
    assert_int_equal(dcp_save(NULL, "", new, &opts, NULL, NULL), DCP_OK);
    assert_int_equal(w.total, 300 * 4 + 270000);
    assert_int_equal(w.done, w.total);
    dcp_storage_free(&before->base);
    dcp_storage_free(&cs->base);
    dcp_value_free(old);
    dcp_value_free(new);
}

static void faults__progress_reaches_the_total_and_can_stop_the_save(void **unused)
{
    (void)unused;
    check_progress(NULL);
    check_progress("stream.zstd/1");
}

/* ---- no memory ---- */

typedef struct memory_case {
    const crash_storage *start;
    dcp_value *old, *new;
    dcp_save_opts opts;
    bool copies, loads;
} memory_case;

static dcp_status save_without_memory(dcp_context *ctx, void *user, dcp_error *err)
{
    memory_case *c = user;
    crash_storage *cs = copy_of(c->start, true);
    dcp_save_opts opts = c->opts;
    opts.storage = &cs->base;
    opts.overwrite = true;
    dcp_status status = dcp_save(ctx, "", c->new, &opts, NULL, err);
    assert_true(holds(&cs->base, status == DCP_OK ? c->new : c->old));
    if (status != DCP_OK && !same_names(c->start, cs)) {
        fail_msg("out of memory: something was left behind");
    }
    dcp_storage_free(&cs->base);
    return status;
}

static dcp_status copy_without_memory(dcp_context *ctx, void *user, dcp_error *err)
{
    memory_case *c = user;
    crash_storage *to = crash_storage_make(true);
    dcp_open_opts open = DCP_OPEN_OPTS_INIT;
    dcp_save_opts opts = c->opts;
    open.storage = (dcp_storage *)&c->start->base;
    opts.storage = &to->base;
    dcp_status status = dcp_copy(ctx, "", &open, "", &opts, NULL, err);
    assert_true(holds(&to->base, status == DCP_OK ? c->old : NULL));
    assert_true(status == DCP_OK || to->now.n == 0);
    dcp_storage_free(&to->base);
    return status;
}

static dcp_status load_without_memory(dcp_context *ctx, void *user, dcp_error *err)
{
    memory_case *c = user;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    dcp_value *into = state_of(5);
    opts.open.storage = (dcp_storage *)&c->start->base;
    dcp_status status = dcp_load(ctx, "", into, &opts, NULL, err);
    assert_true(status != DCP_OK || dcp_value_equal(into, c->old));
    dcp_value_free(into);
    return status;
}

static void faults__out_of_memory_publishes_nothing_and_leaks_nothing(void **unused)
{
    (void)unused;
    memory_case c = {.old = state_of(1), .new = state_of(2), .opts = DCP_SAVE_OPTS_INIT};
    c.opts.files = 2;
    crash_storage *start = with_checkpoint(c.old, true, c.opts);
    crash_storage_settle(start);
    c.start = start;
    assert_true(failing_alloc_walk(save_without_memory, &c) > 30);
    assert_true(failing_alloc_walk(copy_without_memory, &c) > 30);
    assert_true(failing_alloc_walk(load_without_memory, &c) > 30);
    c.opts.transform = "stream.zstd/1";
    assert_true(failing_alloc_walk(save_without_memory, &c) > 30);
    c.opts.transform = NULL;
    c.opts.serialization = DCP_SERIALIZE_SAFETENSORS;
    assert_true(failing_alloc_walk(save_without_memory, &c) > 30);
    dcp_storage_free(&start->base);
    dcp_value_free(c.old);
    dcp_value_free(c.new);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faults__each_call_in_a_first_save),
        cmocka_unit_test(faults__each_call_while_overwriting),
        cmocka_unit_test(faults__each_call_after_a_dead_save),
        cmocka_unit_test(faults__what_a_storage_refuses_is_reported),
        cmocka_unit_test(faults__a_rename_that_happened_in_spite_of_its_error_loses_nothing),
        cmocka_unit_test(faults__without_locks_intents_of_others_are_left_alone),
        cmocka_unit_test(faults__progress_reaches_the_total_and_can_stop_the_save),
        cmocka_unit_test(faults__out_of_memory_publishes_nothing_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
