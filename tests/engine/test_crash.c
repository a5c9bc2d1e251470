/* Crashes during a save: after every call on the storage, every directory that a crash could leave must hold the old checkpoint
 * or the new one, and the next save must succeed and leave nothing of the dead one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/crash_sweep.h"

static const dcp_save_opts plain = DCP_SAVE_OPTS_INIT;

static void sweep_first(const char *what, bool renames, dcp_save_opts opts)
{
    sweep w = sweep_make(what, renames, sweep_save_alone);
    crash_storage *cs = crash_storage_make(renames);
    sweep_save_new(&w, cs, opts);
    dcp_storage_free(&cs->base);
    sweep_end(&w, what);
}

static void sweep_overwrite(const char *what, bool renames, dcp_save_opts before, dcp_save_opts opts)
{
    static const char *const bystanders[] = {"notes.txt", "__7_3.distcp", "other.distcp", NULL};
    sweep w = sweep_make(what, renames, sweep_save_alone);
    crash_storage *cs = crash_storage_make(renames);
    sweep_save_old(&w, cs, before);
    for (size_t i = 0; bystanders[i]; i++) {
        set_file(&cs->base, bystanders[i], "mine", 4);
    }
    w.bystanders = bystanders;
    crash_storage_settle(cs);
    sweep_save_new(&w, cs, opts);
    dcp_storage_free(&cs->base);
    sweep_end(&w, what);
}

static dcp_save_opts with(int files, bool per_item, const char *transform)
{
    dcp_save_opts o = DCP_SAVE_OPTS_INIT;
    o.files = files;
    o.file_per_item = per_item;
    o.transform = transform;
    return o;
}

static void crash__first_save_is_nothing_or_whole(void **unused)
{
    (void)unused;
    sweep_first("first", true, plain);
    sweep_first("first, three files", true, with(3, false, NULL));
    sweep_first("first, a file per item", true, with(0, true, NULL));
    sweep_first("first, zstd", true, with(2, false, "stream.zstd/1"));
}

static void crash__first_save_without_rename_is_nothing_or_whole(void **unused)
{
    (void)unused;
    sweep_first("first, no rename", false, plain);
}

static void crash__overwriting_keeps_the_old_or_has_the_new(void **unused)
{
    (void)unused;
    sweep_overwrite("overwrite", true, plain, plain);
    sweep_overwrite("overwrite, several files", true, with(3, false, NULL), with(2, false, NULL));
    sweep_overwrite("overwrite, a file per item", true, with(2, false, NULL), with(0, true, NULL));
    sweep_overwrite("overwrite, zstd", true, with(0, false, "stream.zstd/1"), with(2, false, "stream.zstd/1"));
}

static void crash__overwriting_without_rename_keeps_the_old_or_has_the_new(void **unused)
{
    (void)unused;
    sweep_overwrite("overwrite, no rename", false, plain, plain);
    sweep_overwrite("overwrite, no rename, several files", false, with(2, false, NULL), with(3, false, NULL));
}

/* What PyTorch wrote is replaced by us. */
static void sweep_golden(const char *what, const char *golden, bool renames)
{
    sweep w = sweep_make(what, renames, sweep_save_alone);
    crash_storage *cs = crash_storage_make(renames);
    bool unused;
    char path[128];
    snprintf(path, sizeof path, "golden/%s/ckpt", golden);
    copy_directory(&cs->base, "", path);
    crash_storage_settle(cs);
    w.old = sweep_read(&w, &cs->base, "golden", &unused);
    sweep_save_new(&w, cs, plain);
    dcp_storage_free(&cs->base);
    sweep_end(&w, what);
}

static void crash__replacing_what_pytorch_wrote(void **unused)
{
    (void)unused;
    sweep_golden("PyTorch's", "2.13.0/two_threads", true);
    sweep_golden("PyTorch's, rank-local", "2.13.0/rank_local", true);
    sweep_golden("PyTorch's, rank-local, no rename", "2.13.0/rank_local", false);
    sweep_golden("PyTorch's, no rename", "2.13.0/two_threads", false);
}

/* A save that begins in what a crash left may crash as well. */
static void sweep_twice(const char *what, bool renames)
{
    sweep first = sweep_make(what, renames, sweep_save_alone);
    crash_storage *cs = crash_storage_make(renames);
    first.starts = calloc(SWEEP_MAX_STARTS, sizeof *first.starts);
    sweep_save_old(&first, cs, with(2, false, NULL));
    sweep_save_new(&first, cs, with(2, false, NULL));
    dcp_storage_free(&cs->base);
    size_t n_states = 0;
    for (size_t i = 0; i < first.n_starts; i++) {
        sweep second = sweep_make(what, renames, sweep_save_alone);
        bool recovered;
        dcp_value_free(second.new);
        second.new = sweep_state(4);
        cs = crash_storage_make(renames);
        crash_image_restore(&first.starts[i], &cs->base);
        crash_storage_settle(cs);
        second.old = sweep_read(&first, &cs->base, "after the first crash", &recovered);
        sweep_save_new(&second, cs, plain);
        n_states += second.n_states;
        dcp_storage_free(&cs->base);
        free(second.seen);
        dcp_value_free(second.old);
        dcp_value_free(second.new);
        dcp_value_free(second.next);
        dcp_context_free(second.ctx);
    }
    assert_true(first.n_starts > 3);
    printf("%s: %zu starts, %zu states\n", what, first.n_starts, n_states);
    sweep_end(&first, what);
}

static void crash__a_second_crash_after_the_first(void **unused)
{
    (void)unused;
    sweep_twice("twice", true);
    sweep_twice("twice, no rename", false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crash__first_save_is_nothing_or_whole),
        cmocka_unit_test(crash__first_save_without_rename_is_nothing_or_whole),
        cmocka_unit_test(crash__overwriting_keeps_the_old_or_has_the_new),
        cmocka_unit_test(crash__overwriting_without_rename_keeps_the_old_or_has_the_new),
        cmocka_unit_test(crash__replacing_what_pytorch_wrote),
        cmocka_unit_test(crash__a_second_crash_after_the_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
