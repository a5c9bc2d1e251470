/* Saves to the file system: full, read-only and vanishing directories, things in the way, and several saves to one place at once,
 * by threads and by processes. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/memory_copy.h"
#include "support/random_state.h"
#include "support/temp_dir.h"

static dcp_value *state_of(int generation, int64_t bytes)
{
    dcp_value *state, *v;
    test_random rnd = {(uint64_t)generation};
    dcp_dict_create(NULL, &state, NULL);
    dcp_tensor_alloc(NULL, DCP_UINT8, 1, &bytes, &v, NULL);
    random_fill(&rnd, dcp_value_tensor(v)->data, (size_t)bytes);
    dcp_dict_set(state, dcp_key_str("w"), v, NULL);
    dcp_dict_set_int(state, "generation", generation, NULL);
    return state;
}

static dcp_value *read_all(const char *path)
{
    dcp_checkpoint *ck;
    dcp_value *tree;
    dcp_verify_report verified = DCP_VERIFY_REPORT_INIT;
    if (dcp_checkpoint_open(NULL, path, NULL, &ck, NULL) != DCP_OK) {
        return NULL;
    }
    assert_int_equal(dcp_read_tree(ck, true, &tree, NULL), DCP_OK);
    assert_int_equal(dcp_verify(ck, NULL, &verified, NULL), DCP_OK);
    assert_int_equal(verified.n_defects, 0);
    dcp_checkpoint_close(ck);
    return tree;
}

static bool holds(const char *path, const dcp_value *state)
{
    dcp_value *tree = read_all(path);
    bool same = tree && dcp_value_equal(tree, state);
    dcp_value_free(tree);
    return same;
}

static dcp_status save(const char *path, dcp_value *state, bool overwrite, dcp_error *err)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.overwrite = overwrite;
    return dcp_save(NULL, path, state, &opts, NULL, err);
}

static void save_ok(const char *path, dcp_value *state, bool overwrite)
{
    dcp_error err = DCP_ERROR_INIT;
    if (save(path, state, overwrite, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
}

static size_t count_files(const char *path)
{
    size_t n = 0;
    DIR *d = opendir(path);
    const struct dirent *e;
    assert_non_null(d);
    while ((e = readdir(d)) != NULL) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(d);
    return n;
}

static void put_file(const char *dir, const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static bool file_is(const char *dir, const char *name, const char *text)
{
    char path[512], got[256] = "";
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "r");
    if (!f) {
        return false;
    }
    size_t n = fread(got, 1, sizeof got - 1, f);
    fclose(f);
    return n == strlen(text) && strcmp(got, text) == 0;
}

static temp_dir make_dir(void)
{
    temp_dir d;
    assert_true(temp_dir_make(&d));
    return d;
}

/* ---- no room ---- */

static void check_no_room(const char *path, dcp_status expected)
{
    dcp_value *old = state_of(1, 100000), *new = state_of(2, 3000000);
    dcp_error err = DCP_ERROR_INIT;
    char checkpoint[300];
    snprintf(checkpoint, sizeof checkpoint, "%s/ckpt", path);
    assert_int_equal(save(checkpoint, new, false, &err), expected);
    assert_non_null(strstr(err.message, "\"w\""));     /* names the item */
    assert_int_not_equal(access(checkpoint, F_OK), 0); /* it was made for this save */
    save_ok(checkpoint, old, false);
    assert_int_equal(save(checkpoint, new, true, &err), expected);
    assert_true(holds(checkpoint, old));
    assert_int_equal(count_files(checkpoint), 2);
    dcp_value_free(old);
    dcp_value_free(new);
}

static void system__full_disk_keeps_the_old_checkpoint_and_leaves_nothing(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    if (mount("tmpfs", d.path, "tmpfs", 0, "size=1m") != 0) {
        temp_dir_remove(&d);
        print_message("skipped: no file system of one MiB can be mounted: %s\n", strerror(errno));
        skip();
    }
    check_no_room(d.path, DCP_NOSPACE);
    umount2(d.path, MNT_DETACH);
    temp_dir_remove(&d);
}

static void system__file_size_limit_keeps_the_old_checkpoint_and_leaves_nothing(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    struct rlimit before, limit;
    getrlimit(RLIMIT_FSIZE, &before);
    limit = before;
    limit.rlim_cur = 1000000;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    check_no_room(d.path, DCP_IO);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    temp_dir_remove(&d);
}

/* ---- directories ---- */

static void system__read_only_directory_is_an_error_and_an_existing_checkpoint_is_named(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *old = state_of(1, 1000), *new = state_of(2, 1000);
    dcp_error err = DCP_ERROR_INIT;
    save_ok(d.path, old, false);
    if (mount(d.path, d.path, NULL, MS_BIND, NULL) != 0 ||
        mount(NULL, d.path, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) != 0) {
        umount2(d.path, MNT_DETACH);
        temp_dir_remove(&d);
        dcp_value_free(old);
        dcp_value_free(new);
        print_message("skipped: nothing can be mounted read-only: %s\n", strerror(errno));
        skip();
    }
    assert_int_equal(save(d.path, new, false, &err), DCP_EXISTS);
    assert_int_equal(save(d.path, new, true, &err), DCP_IO);
    assert_int_equal(err.sys_errno, EROFS);
    char below[300];
    snprintf(below, sizeof below, "%s/below", d.path);
    assert_int_equal(save(below, new, false, &err), DCP_IO);
    assert_int_equal(err.sys_errno, EROFS);
    assert_true(holds(d.path, old));
    umount2(d.path, MNT_DETACH);
    assert_int_equal(count_files(d.path), 2);
    temp_dir_remove(&d);
    dcp_value_free(old);
    dcp_value_free(new);
}

static bool remove_directory(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    temp_dir_remove(user);
    return true;
}

/* Ranks of PyTorch's without items leave files of 0 bytes that no metadata names. They go with the checkpoint that they belong
 * to; what only looks like them stays. */
static void system__empty_files_of_pytorch_go_with_its_checkpoint(void **unused)
{
    (void)unused;
    static const char *const belong[] = {"__4_0.distcp", "__5_0.distcp", "__1_1.distcp", "__1_2.distcp", "__5_1.distcp"};
    static const char *const stay[] = {"__7_0.distcp",   "__1_4.distcp", "__07_0.distcp", "__0_.distcp",
                                       "other_0.distcp", "__6.distcp",   "__x_0.distcp",  "__3_0"};
    temp_dir d = make_dir();
    dcp_value *state = state_of(1, 1000);
    char command[600];
    snprintf(command, sizeof command, "cp '%s'/golden/2.13.0/sharded/ckpt/* '%s'/golden/2.13.0/sharded/ckpt/.metadata %s",
             DCP_TEST_DIR, DCP_TEST_DIR, d.path);
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof belong / sizeof belong[0]; i++) {
        put_file(d.path, belong[i], "");
    }
    for (size_t i = 0; i < sizeof stay / sizeof stay[0]; i++) {
        put_file(d.path, stay[i], "");
    }
    put_file(d.path, "__2_1.distcp", "content"); /* nobody's: it holds something */
    put_file(d.path, "__2_2.distcp", "");        /* and so its successor is nobody's either */
    save_ok(d.path, state, true);
    assert_true(holds(d.path, state));
    for (size_t i = 0; i < sizeof stay / sizeof stay[0]; i++) {
        assert_true(file_is(d.path, stay[i], ""));
    }
    assert_true(file_is(d.path, "__2_1.distcp", "content"));
    assert_true(file_is(d.path, "__2_2.distcp", ""));
    assert_int_equal(count_files(d.path), 2 + sizeof stay / sizeof stay[0] + 2); /* .metadata and one data file of this save */

    /* Of a checkpoint of our own, none but its own go. */
    put_file(d.path, "__0_0.distcp", "");
    put_file(d.path, "__1_0.distcp", "");
    save_ok(d.path, state, true);
    assert_true(file_is(d.path, "__0_0.distcp", "") && file_is(d.path, "__1_0.distcp", ""));
    dcp_value_free(state);
    temp_dir_remove(&d);
}

static bool cancel(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    (void)done;
    (void)total;
    return false;
}

static void system__directory_that_vanishes_is_an_error(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *state = state_of(1, 3000000);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.progress = remove_directory;
    opts.user = &d;
    assert_int_equal(dcp_save(NULL, d.path, state, &opts, NULL, &err), DCP_NOT_FOUND);
    assert_non_null(strstr(err.message, d.path));
    assert_int_not_equal(access(d.path, F_OK), 0);
    dcp_value_free(state);
}

/* A save that comes to nothing takes the directory that it made away again, but none that was there. */
static void system__a_failed_save_leaves_no_directory(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    char old_dir[300];
    dcp_value *state = state_of(1, 10);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    const char *const names[] = {"new", "new/", "new//", "a/b/new"};
    dcp_dict_set_int(state, "o.k", 1, NULL);
    dcp_value *inner;
    dcp_dict_create(NULL, &inner, NULL);
    dcp_dict_set_int(inner, "k", 2, NULL);
    dcp_dict_set(state, dcp_key_str("o"), inner, NULL); /* one name for two: found when the plan is made */
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", d.path, names[i]);
        assert_int_not_equal(dcp_save(NULL, path, state, NULL, NULL, NULL), DCP_OK);
        assert_int_not_equal(access(path, F_OK), 0);
    }
    dcp_value_free(state);

    /* when it is under way */
    state = state_of(1, 3000000);
    opts.progress = cancel;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", d.path, names[i]);
        assert_int_equal(dcp_save(NULL, path, state, &opts, NULL, NULL), DCP_CANCELED);
        assert_int_not_equal(access(path, F_OK), 0);
    }
    snprintf(old_dir, sizeof old_dir, "%s/old", d.path);
    assert_int_equal(mkdir(old_dir, 0777), 0);
    assert_int_equal(dcp_save(NULL, old_dir, state, &opts, NULL, NULL), DCP_CANCELED);
    assert_int_equal(count_files(old_dir), 0);
    put_file(old_dir, "mine", "text");
    assert_int_equal(dcp_save(NULL, old_dir, state, &opts, NULL, NULL), DCP_CANCELED);
    assert_int_equal(count_files(old_dir), 1);

    /* by a name without a directory */
    char *here = getcwd(NULL, 0);
    assert_int_equal(chdir(d.path), 0);
    assert_int_equal(dcp_save(NULL, "alone", state, &opts, NULL, NULL), DCP_CANCELED);
    assert_int_not_equal(access("alone", F_OK), 0);
    assert_int_equal(chdir(here), 0);
    free(here);
    dcp_value_free(state);
    temp_dir_remove(&d);
}

static void system__what_is_in_the_way_stays(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    char path[300];
    dcp_value *state = state_of(1, 1000);
    dcp_error err = DCP_ERROR_INIT;
    /* a file where the directory should be, or above it */
    put_file(d.path, "file", "mine");
    snprintf(path, sizeof path, "%s/file", d.path);
    assert_int_equal(save(path, state, true, &err), DCP_EXISTS);
    snprintf(path, sizeof path, "%s/file/below", d.path);
    assert_int_not_equal(save(path, state, true, &err), DCP_OK);
    assert_true(file_is(d.path, "file", "mine"));
    /* a directory in place of the metadata */
    snprintf(path, sizeof path, "%s/odd/.metadata", d.path);
    dcp_storage *st;
    assert_int_equal(dcp_storage_posix(NULL, path, &st, NULL), DCP_OK);
    assert_int_equal(st->ops->make_dir(st, "", NULL), DCP_OK);
    dcp_storage_free(st);
    snprintf(path, sizeof path, "%s/odd", d.path);
    assert_int_equal(save(path, state, true, &err), DCP_EXISTS);
    assert_int_equal(count_files(path), 1);
    temp_dir_remove(&d);
    dcp_value_free(state);
}

/* Somebody's data without its metadata, which may only be elsewhere, is not written over. */
static void system__data_files_that_nobody_names_are_not_touched(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
    put_file(d.path, "__0_0.distcp", "mine");
    save_ok(d.path, one, false);
    save_ok(d.path, two, true);
    assert_true(holds(d.path, two));
    assert_true(file_is(d.path, "__0_0.distcp", "mine"));
    assert_int_equal(count_files(d.path), 3);
    temp_dir_remove(&d);
    dcp_value_free(one);
    dcp_value_free(two);
}

/* An intent may be forged: only data files in the directory are removed on its word. */
static void system__an_intent_cannot_have_other_files_removed(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    char path[300];
    dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
    snprintf(path, sizeof path, "%s/ckpt", d.path);
    save_ok(path, one, false);
    put_file(d.path, "outside.distcp", "mine");
    put_file(path, "notes.txt", "mine");
    put_file(path, "__1_0.distcp", "another rank's");
    put_file(path, ".libdcp-intent-x",
             "libdcp intent 1\ngeneration -\nworld 1\nreplaces ../outside.distcp\nreplaces notes.txt\nreplaces .metadata\n"
             "replaces ./.metadata\nreplaces __0_9.dist");
    put_file(path, "__0_9.distcp", "of the dead save");
    save_ok(path, two, true);
    assert_true(holds(path, two));
    assert_true(file_is(d.path, "outside.distcp", "mine"));
    assert_true(file_is(path, "notes.txt", "mine"));
    assert_true(file_is(path, "__1_0.distcp", "another rank's"));
    assert_int_equal(count_files(path), 4);
    temp_dir_remove(&d);
    dcp_value_free(one);
    dcp_value_free(two);
}

static void system__missing_parents_are_made(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    char path[300];
    dcp_value *state = state_of(1, 1000);
    snprintf(path, sizeof path, "%s/a/b/c", d.path);
    save_ok(path, state, false);
    assert_true(holds(path, state));
    assert_true(count_files(path) == 2);
    temp_dir_remove(&d);
    dcp_value_free(state);
}

/* ---- several saves ---- */

static dcp_save_session *begin(const char *path, bool overwrite)
{
    dcp_save_session *s;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.overwrite = overwrite;
    if (dcp_save_begin(NULL, path, &opts, &s, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return s;
}

/* The plan, to be freed when the session has ended. */
static dcp_save_plan *write_session(dcp_save_session *s, dcp_value *state)
{
    dcp_save_plan *plan;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_plan_save(NULL, state, &plan, NULL), DCP_OK);
    if (dcp_save_write(s, plan, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return plan;
}

static dcp_status save_in_child(const char *path, dcp_value *state, bool overwrite)
{
    int how;
    pid_t child = fork();
    if (child == 0) {
        _exit(-save(path, state, overwrite, NULL));
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    return -WEXITSTATUS(how);
}

static void system__a_second_save_to_the_same_place_is_refused(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
    dcp_error err = DCP_ERROR_INIT;
    for (int round = 0; round < 2; round++) { /* the first save, and one that overwrites */
        dcp_save_session *s = begin(d.path, round > 0);
        assert_int_equal(save(d.path, two, true, &err), DCP_EXISTS);
        assert_non_null(strstr(err.message, "another save"));
        assert_int_equal(save_in_child(d.path, two, true), DCP_EXISTS);
        dcp_save_plan *plan = write_session(s, one);
        assert_int_equal(save(d.path, two, true, &err), DCP_EXISTS);
        assert_int_equal(dcp_save_commit(s, NULL, &err), DCP_OK);
        dcp_save_plan_free(plan);
        assert_true(holds(d.path, one));
        assert_int_equal(count_files(d.path), 2);
    }
    assert_int_equal(save_in_child(d.path, two, true), DCP_OK);
    assert_true(holds(d.path, two));
    temp_dir_remove(&d);
    dcp_value_free(one);
    dcp_value_free(two);
}

static void system__a_session_is_written_once_and_can_be_given_up(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
    dcp_save_plan *plan;
    dcp_save_report wrong = DCP_SAVE_REPORT_INIT;
    save_ok(d.path, one, false);
    assert_int_equal(dcp_plan_save(NULL, two, &plan, NULL), DCP_OK);
    dcp_save_session *s = begin(d.path, true);
    assert_int_equal(dcp_save_write(s, plan, NULL), DCP_OK);
    assert_int_equal(dcp_save_write(s, plan, NULL), DCP_STATE);
    dcp_save_abort(s);
    assert_int_equal(dcp_save_commit(begin(d.path, true), NULL, NULL), DCP_STATE); /* nothing written */
    wrong.struct_size--;
    s = begin(d.path, true);
    assert_int_equal(dcp_save_write(s, plan, NULL), DCP_OK);
    assert_int_equal(dcp_save_commit(s, &wrong, NULL), DCP_ARG);
    assert_int_equal(dcp_save(NULL, d.path, two, NULL, &wrong, NULL), DCP_ARG);
    dcp_save_abort(NULL);
    assert_true(holds(d.path, one));
    assert_int_equal(count_files(d.path), 2);
    dcp_save_plan_free(plan);
    temp_dir_remove(&d);
    dcp_value_free(one);
    dcp_value_free(two);
}

static void system__the_same_save_id_again_after_a_dead_save(void **unused)
{
    (void)unused;
    temp_dir d = make_dir();
    dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.save_id = "0000-01";
    opts.overwrite = true;
    save_ok(d.path, one, false);
    for (int i = 0; i < 2; i++) {
        put_file(d.path, i ? ".libdcp-intent-0000-01.1" : ".libdcp-intent-0000-01", "libdcp intent 1\n");
    }
    assert_int_equal(dcp_save(NULL, d.path, two, &opts, NULL, NULL), DCP_OK);
    assert_int_equal(dcp_save(NULL, d.path, one, &opts, NULL, NULL), DCP_OK);
    assert_true(holds(d.path, one));
    assert_int_equal(count_files(d.path), 2);
    temp_dir_remove(&d);
    dcp_value_free(one);
    dcp_value_free(two);
}

/* A process that is killed: the next save takes its place and removes what it left, before it needs the room itself. */
static void system__what_a_killed_process_left_is_removed(void **unused)
{
    (void)unused;
    for (int round = 0; round < 2; round++) {
        temp_dir d = make_dir();
        int how, ready[2];
        char byte;
        dcp_value *one = state_of(1, 1000), *two = state_of(2, 1000);
        if (round) {
            save_ok(d.path, one, false);
        }
        assert_int_equal(pipe(ready), 0);
        pid_t child = fork();
        if (child == 0) {
            dcp_save_session *s = begin(d.path, true);
            write_session(s, two);
            assert_int_equal(write(ready[1], "x", 1), 1);
            for (;;) {
                pause();
            }
        }
        assert_int_equal(read(ready[0], &byte, 1), 1);
        assert_int_equal(save(d.path, two, true, NULL), DCP_EXISTS); /* it lives */
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_int_equal(count_files(d.path), round ? 4 : 2);
        dcp_save_session *s = begin(d.path, true);
        assert_int_equal(count_files(d.path), round ? 4 : 2); /* the data is gone, our intent has come */
        dcp_save_abort(s);
        save_ok(d.path, two, true);
        assert_true(holds(d.path, two));
        assert_int_equal(count_files(d.path), 2);
        close(ready[0]);
        close(ready[1]);
        temp_dir_remove(&d);
        dcp_value_free(one);
        dcp_value_free(two);
    }
}

typedef struct racer {
    const char *path;
    dcp_value *state;
    dcp_status status;
    bool overwrite;
    pthread_barrier_t *start;
    pthread_t thread;
    dcp_error err;
} racer;

static void *race(void *arg)
{
    racer *r = arg;
    r->err = (dcp_error)DCP_ERROR_INIT;
    pthread_barrier_wait(r->start);
    r->status = save(r->path, r->state, r->overwrite, &r->err);
    return NULL;
}

static void system__threads_that_save_at_once_exclude_each_other(void **unused)
{
    (void)unused;
    enum { N = 5, ROUNDS = 12 };
    racer racers[N];
    pthread_barrier_t start;
    size_t n_won = 0;
    pthread_barrier_init(&start, NULL, N);
    for (int round = 0; round < ROUNDS; round++) {
        temp_dir d = make_dir();
        bool overwrite = round % 2;
        for (int i = 0; i < N; i++) {
            racers[i] = (racer){.path = d.path, .state = state_of(i + 1, 2000), .overwrite = overwrite, .start = &start};
        }
        if (overwrite) {
            save_ok(d.path, racers[0].state, false);
        }
        for (int i = 0; i < N; i++) {
            assert_int_equal(pthread_create(&racers[i].thread, NULL, race, &racers[i]), 0);
        }
        size_t n_ok = 0;
        bool is_winner = false;
        for (int i = 0; i < N; i++) {
            pthread_join(racers[i].thread, NULL);
            if (racers[i].status != DCP_OK && racers[i].status != DCP_EXISTS) {
                fail_msg("%s: %s", dcp_status_name(racers[i].status), racers[i].err.message);
            }
            n_ok += racers[i].status == DCP_OK;
        }
        for (int i = 0; i < N; i++) {
            is_winner |= racers[i].status == DCP_OK && holds(d.path, racers[i].state);
            dcp_value_free(racers[i].state);
        }
        assert_true(is_winner);
        assert_true(overwrite || n_ok == 1);
        assert_int_equal(count_files(d.path), 2);
        n_won += n_ok;
        temp_dir_remove(&d);
    }
    assert_true(n_won >= ROUNDS);
    pthread_barrier_destroy(&start);
}

static void system__processes_that_save_at_once_exclude_each_other(void **unused)
{
    (void)unused;
    enum { N = 4, ROUNDS = 6 };
    for (int round = 0; round < ROUNDS; round++) {
        temp_dir d = make_dir();
        dcp_value *states[N];
        pid_t children[N];
        int n_ok = 0, go[2];
        bool is_winner = false, overwrite = round % 2;
        assert_int_equal(pipe(go), 0);
        for (int i = 0; i < N; i++) {
            states[i] = state_of(i + 1, 2000);
        }
        for (int i = 0; i < N; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                char byte;
                close(go[1]);
                _exit(read(go[0], &byte, 1) == 0 ? -save(d.path, states[i], overwrite, NULL) : 100);
            }
        }
        close(go[1]); /* the start for all */
        for (int i = 0; i < N; i++) {
            int how;
            assert_int_equal(waitpid(children[i], &how, 0), children[i]);
            assert_true(WIFEXITED(how) && (WEXITSTATUS(how) == 0 || WEXITSTATUS(how) == -DCP_EXISTS));
            n_ok += WEXITSTATUS(how) == 0;
        }
        assert_true(n_ok >= 1 && (overwrite || n_ok == 1));
        for (int i = 0; i < N; i++) {
            is_winner |= holds(d.path, states[i]);
            dcp_value_free(states[i]);
        }
        assert_true(is_winner);
        assert_int_equal(count_files(d.path), 2);
        close(go[0]);
        temp_dir_remove(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(system__full_disk_keeps_the_old_checkpoint_and_leaves_nothing),
        cmocka_unit_test(system__file_size_limit_keeps_the_old_checkpoint_and_leaves_nothing),
        cmocka_unit_test(system__read_only_directory_is_an_error_and_an_existing_checkpoint_is_named),
        cmocka_unit_test(system__directory_that_vanishes_is_an_error),
        cmocka_unit_test(system__empty_files_of_pytorch_go_with_its_checkpoint),
        cmocka_unit_test(system__a_failed_save_leaves_no_directory),
        cmocka_unit_test(system__what_is_in_the_way_stays),
        cmocka_unit_test(system__data_files_that_nobody_names_are_not_touched),
        cmocka_unit_test(system__an_intent_cannot_have_other_files_removed),
        cmocka_unit_test(system__missing_parents_are_made),
        cmocka_unit_test(system__a_second_save_to_the_same_place_is_refused),
        cmocka_unit_test(system__a_session_is_written_once_and_can_be_given_up),
        cmocka_unit_test(system__the_same_save_id_again_after_a_dead_save),
        cmocka_unit_test(system__what_a_killed_process_left_is_removed),
        cmocka_unit_test(system__threads_that_save_at_once_exclude_each_other),
        cmocka_unit_test(system__processes_that_save_at_once_exclude_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
