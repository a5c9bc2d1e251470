/* Which checkpoint of a directory is the newest complete one. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dcp/checkpoint.h"
#include "support/failing_alloc.h"
#include "support/memory_copy.h"
#include "support/temp_dir.h"

#define SHARDED "golden/2.13.0/sharded/ckpt"

typedef struct fixture {
    temp_dir dir;
    dcp_storage *st; /* of the directory */
} fixture;

static int set_up(void **state)
{
    fixture *x = calloc(1, sizeof *x);
    if (!x || !temp_dir_make(&x->dir) || dcp_storage_posix(NULL, x->dir.path, &x->st, NULL) != DCP_OK) {
        return -1;
    }
    *state = x;
    return 0;
}

static int tear_down(void **state)
{
    fixture *x = *state;
    dcp_storage_free(x->st);
    temp_dir_remove(&x->dir);
    free(x);
    return 0;
}

/* A complete checkpoint whose metadata is `age` seconds old. */
static void add(const fixture *x, const char *name, int age)
{
    char path[600];
    struct timespec t[2] = {{1700000000 - age, 0}, {1700000000 - age, 0}};
    assert_int_equal(x->st->ops->make_dir(x->st, name, NULL), DCP_OK);
    copy_directory(x->st, name, SHARDED);
    snprintf(path, sizeof path, "%s/%s/.metadata", x->dir.path, name);
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
}

static void remove_from(const fixture *x, const char *name)
{
    assert_int_equal(x->st->ops->remove(x->st, name, NULL), DCP_OK);
}

typedef struct skips {
    size_t n;
    char paths[8][512];
} skips;

static void note_skip(void *user, const char *path, const char *why)
{
    skips *s = user;
    assert_true(s->n < 8 && *why);
    snprintf(s->paths[s->n++], sizeof s->paths[0], "%s", path);
}

static void assert_latest(const fixture *x, const char *expected, skips *s)
{
    char *out = NULL;
    skips ignored = {0};
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_latest(NULL, x->dir.path, NULL, note_skip, s ? s : &ignored, &out, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_string_equal(out, expected);
    dcp_text_free(NULL, out);
}

static void assert_skipped(const fixture *x, const skips *s, size_t i, const char *name)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", x->dir.path, name);
    assert_true(i < s->n);
    assert_string_equal(s->paths[i], path);
}

static void latest__largest_number_wins_over_time(void **state)
{
    const fixture *x = *state;
    add(x, "step-9", 0);
    add(x, "step-1000", 50);
    add(x, "step-0200", 10);
    add(x, "final", 1);
    assert_latest(x, "step-1000", NULL);
}

static void latest__numbers_may_be_longer_than_any_integer(void **state)
{
    const fixture *x = *state;
    add(x, "step-99999999999999999998", 0);
    add(x, "step-99999999999999999999", 9);
    add(x, "step-00000000000000000000000000001", 5);
    assert_latest(x, "step-99999999999999999999", NULL);
}

static void latest__names_without_a_number_go_by_time(void **state)
{
    const fixture *x = *state;
    add(x, "alpha", 30);
    add(x, "beta", 10);
    add(x, "gamma", 20);
    assert_latest(x, "beta", NULL);
}

static void latest__incomplete_ones_are_skipped_and_told(void **state)
{
    const fixture *x = *state;
    skips s = {0};
    for (int i = 1; i <= 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "step-%d", i);
        add(x, name, 0);
    }
    remove_from(x, "step-5/.metadata");            /* a save that did not finish */
    remove_from(x, "step-4/__2_0.distcp");         /* a file is missing */
    cut_file(x->st, "step-3/__3_0.distcp", 13180); /* one byte short */
    remove_from(x, "step-1/__0_0.distcp");         /* older than the answer */
    assert_latest(x, "step-2", &s);
    assert_int_equal(s.n, 3);
    assert_skipped(x, &s, 0, "step-5");
    assert_skipped(x, &s, 1, "step-4");
    assert_skipped(x, &s, 2, "step-3");
}

static void latest__other_directories_are_no_checkpoints(void **state)
{
    const fixture *x = *state;
    skips s = {0};
    add(x, "step-1", 0);
    assert_int_equal(x->st->ops->make_dir(x->st, "logs-7", NULL), DCP_OK);
    set_file(x->st, "logs-7/train.txt", "x", 1);
    set_file(x->st, "notes-8", "x", 1);
    assert_latest(x, "step-1", &s);
    assert_int_equal(s.n, 0);
}

static void latest__directory_itself(void **state)
{
    const fixture *x = *state;
    copy_directory(x->st, "", SHARDED);
    assert_latest(x, "", NULL);
}

static void latest__none_is_not_found(void **state)
{
    const fixture *x = *state;
    char *out = NULL, path[600];
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_latest(NULL, x->dir.path, NULL, NULL, NULL, &out, &err), DCP_NOT_FOUND);
    add(x, "step-1", 0);
    remove_from(x, "step-1/__0_0.distcp");
    assert_int_equal(dcp_latest(NULL, x->dir.path, NULL, NULL, NULL, &out, &err), DCP_NOT_FOUND);
    assert_int_equal(err.code, DCP_NOT_FOUND);
    snprintf(path, sizeof path, "%s/absent", x->dir.path);
    assert_int_equal(dcp_latest(NULL, path, NULL, NULL, NULL, &out, &err), DCP_NOT_FOUND);
    assert_int_equal(dcp_latest(NULL, NULL, NULL, NULL, NULL, &out, &err), DCP_ARG);
    assert_null(out);
}

static void latest__in_another_storage(void **state)
{
    (void)state;
    dcp_storage *st;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    char *out;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    copy_directory(st, "run/step-1", SHARDED);
    copy_directory(st, "run/step-2", SHARDED);
    opts.storage = st;
    if (dcp_latest(NULL, "run", &opts, NULL, NULL, &out, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_string_equal(out, "step-2");
    dcp_text_free(NULL, out);
    dcp_storage_free(st);
}

static dcp_status find(dcp_context *ctx, void *user, dcp_error *err)
{
    char *out;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    opts.storage = user;
    dcp_status status = dcp_latest(ctx, "run", &opts, NULL, NULL, &out, err);
    if (status == DCP_OK) {
        assert_string_equal(out, "step-2"); /* never an older one for want of memory */
        dcp_text_free(ctx, out);
    }
    return status;
}

static void latest__survives_failing_allocations(void **state)
{
    (void)state;
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    copy_directory(st, "run/step-1", SHARDED);
    copy_directory(st, "run/step-2", SHARDED);
    copy_directory(st, "run/step-3", SHARDED);
    assert_int_equal(st->ops->remove(st, "run/step-3/__0_0.distcp", NULL), DCP_OK);
    assert_true(failing_alloc_walk(find, st) > 20);
    dcp_storage_free(st);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(latest__largest_number_wins_over_time),
        TEST(latest__numbers_may_be_longer_than_any_integer),
        TEST(latest__names_without_a_number_go_by_time),
        TEST(latest__incomplete_ones_are_skipped_and_told),
        TEST(latest__other_directories_are_no_checkpoints),
        TEST(latest__directory_itself),
        TEST(latest__none_is_not_found),
        cmocka_unit_test(latest__in_another_storage),
        cmocka_unit_test(latest__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
