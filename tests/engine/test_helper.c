/* The helper process: what it writes, how it dies, and what it leaves behind. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "engine/save/mover.h"
#include "support/temp_dir.h"

#define MIB ((size_t)1 << 20)

static temp_dir dir;

/* The helper of this process; 0: there is none. *n: how many. */
static pid_t find_helper(int *n)
{
    pid_t found = 0;
    const struct dirent *e;
    DIR *list = opendir("/proc");
    *n = 0;
    while ((e = readdir(list)) != NULL) {
        char path[300], name[32];
        int pid, parent;
        snprintf(path, sizeof path, "/proc/%s/stat", e->d_name);
        FILE *f = e->d_name[0] >= '0' && e->d_name[0] <= '9' ? fopen(path, "r") : NULL;
        if (f) {
            char state;
            if (fscanf(f, "%d (%31[^)]) %c %d", &pid, name, &state, &parent) == 4 && parent == getpid() &&
                strcmp(name, "dcp-writer") == 0 && state != 'Z') {
                found = pid;
                ++*n;
            }
            fclose(f);
        }
    }
    closedir(list);
    return found;
}

static int shared_memory_files(void)
{
    int n = 0;
    DIR *list = opendir("/dev/shm");
    while (list && readdir(list)) {
        n++;
    }
    if (list) {
        closedir(list);
    }
    return n;
}

static dcp_value *state_of(int n, size_t bytes, int first)
{
    dcp_value *state, *v;
    char key[16];
    int64_t extents[] = {(int64_t)bytes};
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_int(state, "step", first, NULL);
    for (int i = 0; i < n; i++) {
        assert_int_equal(dcp_tensor_alloc(NULL, DCP_UINT8, 1, extents, &v, NULL), DCP_OK);
        for (size_t k = 0; k < bytes; k++) {
            ((uint8_t *)dcp_value_tensor(v)->data)[k] = (uint8_t)(k * 31 + (size_t)(first + i));
        }
        snprintf(key, sizeof key, "t%d", i);
        dcp_dict_set(state, dcp_key_str(key), v, NULL);
    }
    return state;
}

static dcp_stager *helped_stager(const char *path)
{
    dcp_stager *s;
    dcp_error err = DCP_ERROR_INIT;
    dcp_stager_opts opts = DCP_STAGER_OPTS_INIT;
    opts.is_shared = opts.helper = true;
    opts.helper_path = path;
    if (dcp_stager_create(NULL, &opts, &s, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return s;
}

static char *path_of(const char *name)
{
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", dir.path, name);
    return path;
}

static dcp_status save(const char *path, dcp_value *state, dcp_stager *stager, dcp_error *err)
{
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_op *op;
    opts.stager = stager;
    opts.save.overwrite = true;
    opts.save.no_sync = true;
    dcp_status status = dcp_save_async(NULL, path, state, &opts, &op, err);
    if (status == DCP_OK) {
        status = dcp_op_wait(op, 0, NULL, err);
        dcp_op_free(op);
    }
    return status;
}

static dcp_status save_with(const char *path, dcp_value *state, dcp_helper *helper, dcp_error *err)
{
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.overwrite = opts.no_sync = true;
    opts.helper = helper;
    return dcp_save(NULL, path, state, &opts, NULL, err);
}

static void assert_holds(const char *path, const dcp_value *state)
{
    dcp_checkpoint *ck;
    dcp_value *tree = NULL;
    dcp_error err = DCP_ERROR_INIT;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.check_crc = true;
    if (dcp_checkpoint_open(NULL, path, &opts, &ck, &err) != DCP_OK || dcp_read_tree(ck, true, &tree, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_true(dcp_value_equal(tree, state));
    dcp_value_free(tree);
    dcp_checkpoint_close(ck);
}

/* R7.16: started by the first save, the same for the next ones, gone with its stager. */
static void helper__one_serves_all_saves_of_a_stager(void **unused)
{
    (void)unused;
    int n, before = shared_memory_files();
    dcp_stager *stager = helped_stager(NULL);
    assert_int_equal(find_helper(&n), 0);
    pid_t first = 0;
    for (int i = 0; i < 3; i++) {
        dcp_value *state = state_of(4, 3 * MIB + 5, i);
        assert_int_equal(save(path_of("some"), state, stager, NULL), DCP_OK);
        pid_t now = find_helper(&n);
        assert_int_equal(n, 1);
        assert_true(i == 0 || now == first);
        first = now;
        assert_holds(path_of("some"), state);
        dcp_value_free(state);
    }
    assert_true(shared_memory_files() <= before);
    dcp_stager_free(stager);
    assert_int_equal(find_helper(&n), 0);
}

/* R7.17: killed in the middle of a save: the save tells how, the old checkpoint is whole, and the next save has another helper.
 */
static void helper__a_killed_one_is_told_and_replaced(void **unused)
{
    (void)unused;
    int n, before = shared_memory_files();
    dcp_stager *stager = helped_stager(NULL);
    dcp_value *old = state_of(3, 2 * MIB, 1), *state = state_of(6, 4 * MIB, 50);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(save(path_of("killed"), old, stager, NULL), DCP_OK);
    for (int round = 0; round < 3; round++) {
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        dcp_op *op;
        opts.stager = stager;
        opts.save.overwrite = true;
        pid_t helper = find_helper(&n);
        assert_int_equal(n, 1);
        kill(helper, SIGSTOP); /* so that the save is in the middle for sure */
        assert_int_equal(dcp_save_async(NULL, path_of("killed"), state, &opts, &op, NULL), DCP_OK);
        assert_int_equal(dcp_op_wait(op, 100, NULL, NULL), DCP_TIMEOUT);
        kill(helper, SIGKILL);
        assert_int_equal(dcp_op_wait(op, 0, NULL, &err), DCP_IO);
        assert_non_null(strstr(err.message, "signal 9"));
        dcp_op_free(op);
        assert_holds(path_of("killed"), old);
        assert_int_equal(save(path_of("other"), old, stager, NULL), DCP_OK);
        assert_int_not_equal(find_helper(&n), helper);
    }
    assert_int_equal(save(path_of("killed"), state, stager, NULL), DCP_OK);
    assert_holds(path_of("killed"), state);
    dcp_stager_free(stager);
    assert_true(shared_memory_files() <= before);
    dcp_value_free(old);
    dcp_value_free(state);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* R7.17: one that hangs keeps nobody: a save that waits for it can be canceled, which ends it, and the next save has another. */
static void helper__a_hung_one_is_canceled_and_replaced(void **unused)
{
    (void)unused;
    int n, before = shared_memory_files();
    dcp_stager *stager = helped_stager(NULL);
    dcp_value *old = state_of(3, 2 * MIB, 1), *state = state_of(6, 4 * MIB, 50);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(save(path_of("hung"), old, stager, NULL), DCP_OK);
    for (int round = 0; round < 2; round++) {
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        dcp_op *op;
        opts.stager = stager;
        opts.save.overwrite = true;
        opts.save.file_per_item = round == 1;
        pid_t helper = find_helper(&n);
        assert_int_equal(n, 1);
        kill(helper, SIGSTOP);
        assert_int_equal(dcp_save_async(NULL, path_of("hung"), state, &opts, &op, NULL), DCP_OK);
        assert_int_equal(dcp_op_wait(op, 300, NULL, NULL), DCP_TIMEOUT);
        double start = seconds_now();
        dcp_op_cancel(op);
        assert_int_equal(dcp_op_wait(op, 0, NULL, &err), DCP_CANCELED);
        assert_true(seconds_now() - start < 5); /* the machine may be busy; by itself it would never end */
        dcp_op_free(op);
        find_helper(&n);
        assert_int_equal(n, 0);
        assert_int_equal(kill(helper, 0), -1); /* no zombie */
        assert_holds(path_of("hung"), old);
        assert_int_equal(save(path_of("other"), old, stager, NULL), DCP_OK);
        assert_int_not_equal(find_helper(&n), helper);
    }
    assert_int_equal(save(path_of("hung"), state, stager, NULL), DCP_OK);
    assert_holds(path_of("hung"), state);
    dcp_stager_free(stager);
    assert_true(shared_memory_files() <= before);
    dcp_value_free(old);
    dcp_value_free(state);
}

typedef struct waiting {
    dcp_helper *helper;
    dcp_value *state;
    const char *path;
    bool is_canceled; /* atomic */
    dcp_status status;
    dcp_error err;
} waiting;

static bool until_canceled(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    return !__atomic_load_n(&((waiting *)user)->is_canceled, __ATOMIC_RELAXED);
}

static void *save_in_thread(void *arg)
{
    waiting *w = arg;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    w->err = (dcp_error)DCP_ERROR_INIT;
    opts.helper = w->helper;
    opts.progress = until_canceled;
    opts.user = w;
    w->status = dcp_save(NULL, w->path, w->state, &opts, NULL, &w->err);
    return NULL;
}

/* Two saves share one that hangs: each can be canceled, also the one whose turn has not come. What is freed ends though it hangs.
 */
static void helper__a_hung_one_that_is_shared(void **unused)
{
    (void)unused;
    int n;
    dcp_helper *helper;
    pthread_t threads[2];
    char paths[2][400];
    dcp_value *state = state_of(2, 3 * MIB + 5, 7);
    assert_int_equal(dcp_helper_create(NULL, NULL, &helper, NULL), DCP_OK);
    assert_int_equal(save_with(path_of("before"), state, helper, NULL), DCP_OK);
    pid_t hung = find_helper(&n);
    kill(hung, SIGSTOP);
    waiting saves[2];
    for (int i = 0; i < 2; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/shared %d", dir.path, i);
        saves[i] = (waiting){.helper = helper, .state = state, .path = paths[i]};
        assert_int_equal(pthread_create(&threads[i], NULL, save_in_thread, &saves[i]), 0);
    }
    usleep(300000);
    __atomic_store_n(&saves[0].is_canceled, true, __ATOMIC_RELAXED);
    pthread_join(threads[0], NULL);
    assert_int_equal(saves[0].status, DCP_CANCELED);
    __atomic_store_n(&saves[1].is_canceled, true, __ATOMIC_RELAXED);
    pthread_join(threads[1], NULL);
    assert_true(saves[1].status == DCP_CANCELED || saves[1].status == DCP_OK); /* the first may have ended the process */
    assert_int_equal(save_with(path_of("after"), state, helper, NULL), DCP_OK);
    kill(find_helper(&n), SIGSTOP);
    assert_int_equal(n, 1);
    double start = seconds_now();
    dcp_helper_free(helper);
    assert_true(seconds_now() - start < 20);
    find_helper(&n);
    assert_int_equal(n, 0);
    dcp_value_free(state);
}

/* R7.17: how it has ended is not known where the program takes the status of all its children; that is not told as an exit. */
static void helper__an_end_that_nobody_saw_is_no_exit(void **unused)
{
    (void)unused;
    int n;
    dcp_stager *stager = helped_stager(NULL);
    dcp_value *state = state_of(3, 2 * MIB, 1);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(save(path_of("unseen"), state, stager, NULL), DCP_OK);
    pid_t helper = find_helper(&n);
    void (*before)(int) = signal(SIGCHLD, SIG_IGN);
    kill(helper, SIGKILL);
    assert_int_equal(save(path_of("unseen"), state, stager, &err), DCP_IO);
    assert_null(strstr(err.message, "with code"));
    signal(SIGCHLD, before);
    assert_int_equal(save(path_of("unseen"), state, stager, NULL), DCP_OK);
    assert_holds(path_of("unseen"), state);
    dcp_stager_free(stager);
    dcp_value_free(state);
}

/* Report 27: a failed save leaves it as it is. */
static void helper__survives_a_failed_save(void **unused)
{
    (void)unused;
    int n;
    dcp_stager *stager = helped_stager(NULL);
    dcp_value *state = state_of(2, 2 * MIB, 1);
    assert_int_equal(save(path_of("first"), state, stager, NULL), DCP_OK);
    pid_t helper = find_helper(&n);
    assert_int_not_equal(save("/dev/null/nowhere", state, stager, NULL), DCP_OK);
    assert_int_equal(save(path_of("second"), state, stager, NULL), DCP_OK);
    assert_int_equal(find_helper(&n), helper);
    assert_holds(path_of("second"), state);
    dcp_value_free(state);
    dcp_stager_free(stager);
}

/* What it cannot write it says, with the system's words, and goes on; what is no shared memory reaches it by way of a block. */
static void helper__tells_what_it_cannot_write(void **unused)
{
    (void)unused;
    dcp_context *ctx;
    dcp__host_pool *pool;
    dcp__host_block *b;
    dcp__mover *m;
    dcp_storage *st;
    dcp_file *for_reading, *for_writing;
    dcp_error err = DCP_ERROR_INIT;
    int n;
    char own[100] = "own memory", back[12] = "";
    char *large = malloc(3 * MIB + 7), *large_back = malloc(3 * MIB + 7);
    size_t got;
    dcp__host_pool_opts opts = {.is_shared = true};
    assert_int_equal(dcp_context_create(NULL, &ctx, NULL), DCP_OK);
    assert_int_equal(dcp__host_pool_create(ctx, &opts, &pool, NULL), DCP_OK);
    assert_int_equal(dcp__host_pool_acquire(pool, MIB, false, &b, NULL), DCP_OK);
    assert_int_equal(dcp__mover_create(ctx, pool, NULL, &m, NULL), DCP_OK);
    assert_int_equal(dcp_storage_posix(ctx, dir.path, &st, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "file", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &for_writing, NULL), DCP_OK);
    assert_int_equal(st->ops->open(st, "file", DCP_OPEN_READ, &for_reading, NULL), DCP_OK);
    memcpy(b->ptr + 4099, "shared memory", 13);
    assert_int_equal(dcp__mover_write_at(m, for_writing, own, 10, 0, NULL, NULL), DCP_OK);
    pid_t first = find_helper(&n);
    assert_int_equal(n, 1);
    assert_int_equal(dcp__mover_write_at(m, for_reading, own, 10, 1000, NULL, &err), DCP_IO);
    assert_int_equal(err.offset, 1000);
    assert_int_equal(dcp__mover_write_at(m, for_reading, b->ptr + 4099, 13, 5, NULL, &err), DCP_IO);
    assert_int_equal(err.offset, 5);
    assert_int_equal(dcp__mover_write_at(m, for_writing, b->ptr + 4099, 6, 4, NULL, NULL), DCP_OK);
    assert_int_equal(st->ops->read_at(for_reading, back, 11, 0, &got, NULL), DCP_OK);
    assert_string_equal(back, "own shared");
    for (size_t i = 0; i < 3 * MIB + 7; i++) {
        large[i] = (char)(i * 131 >> 7);
    }
    assert_int_equal(dcp__mover_write_at(m, for_writing, large, 3 * MIB + 7, 11, NULL, NULL), DCP_OK);
    assert_int_equal(st->ops->read_at(for_reading, large_back, 3 * MIB + 7, 11, &got, NULL), DCP_OK);
    assert_memory_equal(large_back, large, 3 * MIB + 7);
    assert_int_equal(find_helper(&n), first);
    free(large);
    free(large_back);
    st->ops->close(for_reading, NULL);
    st->ops->close(for_writing, NULL);
    dcp_storage_free(st);
    dcp__mover_free(m);
    dcp__host_pool_free(pool);
    dcp_context_free(ctx);
}

/* R7.16, R7.17: for saves of any kind, from memory of any kind, and across forks: a child has one of its own. */
static void helper__serves_saves_without_a_stager(void **unused)
{
    (void)unused;
    int n, ended;
    dcp_helper *helper;
    dcp_error err = DCP_ERROR_INIT;
    dcp_value *state = state_of(3, 3 * MIB + 5, 7);
    assert_int_equal(dcp_helper_create(NULL, "/nowhere/dcp-writer", &helper, NULL), DCP_UNSUPPORTED);
    assert_int_equal(dcp_helper_create(NULL, NULL, &helper, NULL), DCP_OK);
    assert_int_equal(save_with(path_of("plain"), state, helper, NULL), DCP_OK);
    pid_t first = find_helper(&n);
    assert_int_equal(n, 1);
    assert_holds(path_of("plain"), state);
    dcp_save_opts packed = DCP_SAVE_OPTS_INIT;
    packed.helper = helper;
    packed.transform = "stream.zstd/1";
    assert_int_equal(dcp_save(NULL, path_of("packed"), state, &packed, NULL, NULL), DCP_OK);
    assert_holds(path_of("packed"), state);
    pid_t child = fork();
    if (child == 0) {
        dcp_status status = save_with(path_of("of a child"), state, helper, NULL);
        bool has_own = find_helper(&n) != 0;
        dcp_helper_free(helper);
        _exit(status == DCP_OK && has_own && find_helper(&n) == 0 ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    assert_holds(path_of("of a child"), state);
    assert_int_equal(find_helper(&n), first);
    kill(first, SIGKILL);
    assert_int_equal(save_with(path_of("plain"), state, helper, &err), DCP_IO);
    assert_non_null(strstr(err.message, "signal 9"));
    assert_holds(path_of("plain"), state);
    assert_int_equal(save_with(path_of("plain"), state, helper, NULL), DCP_OK);
    assert_int_not_equal(find_helper(&n), first);
    dcp_helper_free(helper);
    assert_int_equal(find_helper(&n), 0);
    dcp_value_free(state);
}

/* A child that the program has forked keeps its end of the socket open; that keeps nobody waiting. */
static void helper__ends_although_a_fork_holds_the_socket(void **unused)
{
    (void)unused;
    int n, ended;
    dcp_helper *helper;
    dcp_value *state = state_of(1, MIB, 7);
    assert_int_equal(dcp_helper_create(NULL, NULL, &helper, NULL), DCP_OK);
    assert_int_equal(save_with(path_of("held"), state, helper, NULL), DCP_OK);
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    dcp_helper_free(helper);
    assert_int_equal(find_helper(&n), 0);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &ended, 0), child);
    dcp_value_free(state);
}

static void helper__absent_or_wrong_ones_are_told(void **unused)
{
    (void)unused;
    dcp_stager *stager;
    dcp_error err = DCP_ERROR_INIT;
    dcp_stager_opts opts = DCP_STAGER_OPTS_INIT;
    opts.helper = true;
    assert_int_equal(dcp_stager_create(NULL, &opts, &stager, NULL), DCP_ARG); /* without shared memory */
    opts.is_shared = true;
    opts.helper_path = "/nowhere/dcp-writer";
    assert_int_equal(dcp_stager_create(NULL, &opts, &stager, &err), DCP_UNSUPPORTED);
    assert_non_null(strstr(err.message, "/nowhere/dcp-writer"));
    dcp_value *state = state_of(1, MIB, 1);
    stager = helped_stager("/bin/true"); /* ends at once */
    assert_int_equal(save(path_of("wrong"), state, stager, &err), DCP_IO);
    assert_non_null(strstr(err.message, "code 0"));
    dcp_stager_free(stager);
    dcp_value_free(state);
}

static int make_dir(void **unused)
{
    (void)unused;
    return temp_dir_make(&dir) ? 0 : -1;
}

static int remove_dir(void **unused)
{
    (void)unused;
    temp_dir_remove(&dir);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(helper__one_serves_all_saves_of_a_stager),
        cmocka_unit_test(helper__a_killed_one_is_told_and_replaced),
        cmocka_unit_test(helper__a_hung_one_is_canceled_and_replaced),
        cmocka_unit_test(helper__a_hung_one_that_is_shared),
        cmocka_unit_test(helper__an_end_that_nobody_saw_is_no_exit),
        cmocka_unit_test(helper__survives_a_failed_save),
        cmocka_unit_test(helper__tells_what_it_cannot_write),
        cmocka_unit_test(helper__absent_or_wrong_ones_are_told),
        cmocka_unit_test(helper__serves_saves_without_a_stager),
        cmocka_unit_test(helper__ends_although_a_fork_holds_the_socket),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
