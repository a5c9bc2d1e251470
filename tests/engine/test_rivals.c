/* Processes that convert to one place at the same time, round after round: without overwriting exactly one of them makes the
 * output and the others are told that it is there; whoever has made it, it is whole, and nothing else is left. */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/temp_dir.h"

#define RIVALS 4
#define ELEMS 3000
#define SECONDS 0.25 /* for each form */

/* Between the test and its processes. */
typedef struct arena {
    pthread_barrier_t gate; /* before and after each round */
    bool is_over;
    dcp_convert_form form;
    bool overwrite;
    unsigned round;
    dcp_status results[RIVALS];
} arena;

static temp_dir dir;
static arena *shared;
static pid_t rivals[RIVALS];

static const char *path_of(char out[320], const char *name, unsigned number)
{
    snprintf(out, 320, "%s/%s%u", dir.path, name, number);
    return out;
}

static const char *output_of_round(char out[320])
{
    return path_of(out, shared->overwrite ? "same" : "once", shared->overwrite ? (unsigned)shared->form : shared->round);
}

/* Two tensors, in two files if there can be two, that have the rival's number everywhere. */
static void save_source(unsigned rival)
{
    static float elems[ELEMS];
    int64_t shape[] = {ELEMS};
    char path[320];
    dcp_value *root;
    dcp_error err = DCP_ERROR_INIT;
    for (int i = 0; i < ELEMS; i++) {
        elems[i] = (float)rival;
    }
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 1, shape, elems);
    assert_int_equal(dcp_dict_create(NULL, &root, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_tensor(root, "a", &t, NULL), DCP_OK);
    assert_int_equal(dcp_dict_set_tensor(root, "b", &t, NULL), DCP_OK);
    if (dcp_save(NULL, path_of(path, "from", rival), root, NULL, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_value_free(root);
}

static dcp_status convert_once(unsigned rival)
{
    char from[320], to[320];
    dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
    opts.to = shared->form;
    opts.overwrite = shared->overwrite;
    opts.no_sync = true;
    opts.max_file_bytes = shared->form == DCP_TO_HF ? ELEMS * sizeof(float) : 0;
    return dcp_convert(NULL, path_of(from, "from", rival), output_of_round(to), &opts, NULL, NULL);
}

static void run_rival(unsigned rival)
{
    for (;;) {
        pthread_barrier_wait(&shared->gate);
        if (shared->is_over) {
            _exit(0);
        }
        shared->results[rival] = convert_once(rival);
        pthread_barrier_wait(&shared->gate);
    }
}

static int start(void **state)
{
    pthread_barrierattr_t attr;
    (void)state;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || !temp_dir_make(&dir)) {
        return -1;
    }
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->gate, &attr, RIVALS + 1);
    pthread_barrierattr_destroy(&attr);
    for (unsigned r = 0; r < RIVALS; r++) {
        rivals[r] = fork();
        if (rivals[r] == 0) {
            run_rival(r);
        }
        if (rivals[r] < 0) {
            return -1;
        }
    }
    for (unsigned r = 0; r < RIVALS; r++) { /* after the fork: a child has no threads of its parent's */
        save_source(r);
    }
    return 0;
}

static int stop(void **state)
{
    (void)state;
    shared->is_over = true;
    pthread_barrier_wait(&shared->gate);
    int result = 0;
    for (unsigned r = 0; r < RIVALS; r++) {
        int status = 0;
        result |= waitpid(rivals[r], &status, 0) != rivals[r] || status != 0;
    }
    temp_dir_remove(&dir);
    return result;
}

/* ---- what is there ---- */

static float read_value(dcp_checkpoint *ck, const char *name)
{
    static float found[ELEMS];
    int64_t shape[] = {ELEMS};
    dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 1, shape, found);
    const dcp_item *item = dcp_checkpoint_find(ck, dcp_str_of(name));
    assert_non_null(item);
    assert_int_equal(dcp_read(ck, item, NULL, &dst, NULL), DCP_OK);
    for (int i = 1; i < ELEMS; i++) {
        assert_true(found[i] == found[0]);
    }
    return found[0];
}

static unsigned who_made(const char *path)
{
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_checkpoint_open(NULL, path, NULL, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(dcp_checkpoint_count(ck), 2);
    float a = read_value(ck, "a"), b = read_value(ck, "b");
    assert_true(a == b && a >= 0 && a < RIVALS);
    dcp_checkpoint_close(ck);
    return (unsigned)a;
}

static void assert_no_leftovers(const char *path)
{
    DIR *list = opendir(path);
    const struct dirent *e;
    while (list && (e = readdir(list)) != NULL) {
        if (strstr(e->d_name, "libdcp")) {
            fail_msg("%s/%s", path, e->d_name);
        }
    }
    if (list) {
        closedir(list);
    }
}

/* ---- rounds ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void run_round(void)
{
    char path[320];
    unsigned n_ok = 0;
    shared->round++;
    pthread_barrier_wait(&shared->gate);
    pthread_barrier_wait(&shared->gate);
    for (unsigned r = 0; r < RIVALS; r++) {
        n_ok += shared->results[r] == DCP_OK;
        if (shared->results[r] != DCP_OK && shared->results[r] != DCP_EXISTS) {
            fail_msg("round %u: %s", shared->round, dcp_status_name(shared->results[r]));
        }
    }
    assert_true(shared->overwrite ? n_ok >= 1 : n_ok == 1);
    unsigned winner = who_made(output_of_round(path));
    assert_int_equal(shared->results[winner], DCP_OK);
    assert_no_leftovers(path);
    assert_no_leftovers(dir.path);
}

static void run_rounds(bool overwrite)
{
    static const dcp_convert_form forms[] = {DCP_TO_TORCH, DCP_TO_SAFETENSORS, DCP_TO_HF};
    shared->overwrite = overwrite;
    for (size_t i = 0; i < 3; i++) {
        unsigned first = shared->round;
        shared->form = forms[i];
        for (double end = now() + SECONDS; now() < end;) {
            run_round();
        }
        printf("form %d: %u rounds\n", forms[i], shared->round - first);
    }
}

static void rivals__one_makes_what_is_not_there(void **state)
{
    (void)state;
    run_rounds(false);
}

static void rivals__replace_it_one_after_the_other(void **state)
{
    (void)state;
    run_rounds(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rivals__one_makes_what_is_not_there),
        cmocka_unit_test(rivals__replace_it_one_after_the_other),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
