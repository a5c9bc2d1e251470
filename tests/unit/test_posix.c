/* What is particular to files of the operating system: links, special files, roots that come later. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "dcp/backend.h"
#include "storage/beneath.h"
#include "support/failing_alloc.h"
#include "support/temp_dir.h"

/* <dir>/root is the root of the storage, <dir>/outside.txt and <dir>/outside/ are out of it. */
typedef struct fixture {
    temp_dir dir;
    char root[300];
    int root_fd, dir_fd;
    dcp_storage *st;
} fixture;

static void put(int dir, const char *name, const char *text)
{
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static int set_up(void **state)
{
    fixture *x = calloc(1, sizeof *x);
    if (!x || !temp_dir_make(&x->dir)) {
        return -1;
    }
    snprintf(x->root, sizeof x->root, "%s/root", x->dir.path);
    x->dir_fd = open(x->dir.path, O_PATH | O_DIRECTORY);
    assert_int_equal(mkdirat(x->dir_fd, "root", 0777), 0);
    assert_int_equal(mkdirat(x->dir_fd, "root/d", 0777), 0);
    assert_int_equal(mkdirat(x->dir_fd, "outside", 0777), 0);
    put(x->dir_fd, "outside.txt", "outside");
    put(x->dir_fd, "outside/f", "outside");
    put(x->dir_fd, "root/f", "inside");
    put(x->dir_fd, "root/d/g", "inside");
    x->root_fd = open(x->root, O_PATH | O_DIRECTORY);
    assert_int_equal(dcp_storage_posix(NULL, x->root, &x->st, NULL), DCP_OK);
    *state = x;
    return 0;
}

static int tear_down(void **state)
{
    fixture *x = *state;
    dcp_storage_free(x->st);
    close(x->root_fd);
    close(x->dir_fd);
    temp_dir_remove(&x->dir);
    free(x);
    return 0;
}

static void link_to(const fixture *x, const char *target, const char *name)
{
    assert_int_equal(symlinkat(target, x->root_fd, name), 0);
}

/* ---- beneath: the kernel's way and ours must agree ---- */

typedef int (*opener)(int dir, const char *name, int flags, mode_t mode);
static const opener openers[] = {dcp__open_beneath, dcp__open_beneath_walk};

static void assert_opens(const fixture *x, const char *name, const char *text)
{
    for (size_t i = 0; i < 2; i++) {
        char bytes[32] = {0};
        int fd = openers[i](x->root_fd, name, O_RDONLY, 0);
        if (fd < 0) {
            fail_msg("opener %zu, %s: %s", i, name, strerror(errno));
        }
        assert_int_equal(read(fd, bytes, sizeof bytes - 1), strlen(text));
        assert_string_equal(bytes, text);
        close(fd);
    }
}

static void assert_refused(const fixture *x, const char *name, int flags, int sys_errno)
{
    for (size_t i = 0; i < 2; i++) {
        errno = 0;
        int fd = openers[i](x->root_fd, name, flags, 0666);
        if (fd >= 0 || errno != sys_errno) {
            fail_msg("opener %zu, %s: %d, %s", i, name, fd, strerror(errno));
        }
    }
}

static void beneath__plain_names_open(void **state)
{
    const fixture *x = *state;
    assert_opens(x, "f", "inside");
    assert_opens(x, "d/g", "inside");
    assert_opens(x, "d/../f", "inside");
    assert_opens(x, "./d//../d/./g", "inside");
    assert_refused(x, "absent", O_RDONLY, ENOENT);
    assert_refused(x, "absent/f", O_RDONLY, ENOENT);
    assert_refused(x, "f/g", O_RDONLY, ENOTDIR);
}

static void beneath__names_that_lead_out_are_refused(void **state)
{
    const fixture *x = *state;
    char absolute[400];
    snprintf(absolute, sizeof absolute, "%s/f", x->root);
    assert_refused(x, "../outside.txt", O_RDONLY, EXDEV);
    assert_refused(x, "d/../../outside.txt", O_RDONLY, EXDEV);
    assert_refused(x, "../root/f", O_RDONLY, EXDEV);
    assert_refused(x, absolute, O_RDONLY, EXDEV);
    assert_refused(x, "../new", O_WRONLY | O_CREAT, EXDEV);
    assert_int_equal(faccessat(x->dir_fd, "new", F_OK, 0), -1);
}

static void beneath__links_inside_are_followed(void **state)
{
    const fixture *x = *state;
    link_to(x, "d/g", "to_g");
    link_to(x, "to_g", "to_to_g");
    link_to(x, "../f", "d/to_f");
    link_to(x, "d", "to_d");
    link_to(x, "../d/../d", "d/round");
    assert_opens(x, "to_g", "inside");
    assert_opens(x, "to_to_g", "inside");
    assert_opens(x, "d/to_f", "inside");
    assert_opens(x, "to_d/g", "inside");
    assert_opens(x, "to_d/round/to_f", "inside");
}

static void beneath__links_that_lead_out_are_refused(void **state)
{
    const fixture *x = *state;
    char absolute[400];
    snprintf(absolute, sizeof absolute, "%s/f", x->root);
    link_to(x, "../outside.txt", "out");
    link_to(x, "out", "to_out");
    link_to(x, "../outside", "out_dir");
    link_to(x, "../../outside.txt", "d/out");
    link_to(x, "/etc/passwd", "passwd");
    link_to(x, absolute, "absolute"); /* leads back in, but by an absolute name */
    link_to(x, "d/../../root/f", "through");
    const char *const names[] = {"out", "to_out", "out_dir/f", "d/out", "passwd", "absolute", "through"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        assert_refused(x, names[i], O_RDONLY, EXDEV);
        assert_refused(x, names[i], O_WRONLY | O_CREAT, EXDEV);
    }
}

/* The error of the operating system alone, "invalid cross-device link", would tell nobody what to do. */
static void open__a_link_that_leads_out_says_what_to_do(void **state)
{
    fixture *x = *state;
    char absolute[400];
    snprintf(absolute, sizeof absolute, "%s/f", x->root);
    link_to(x, "../outside.txt", "out");
    link_to(x, absolute, "absolute");
    const char *const names[] = {"out", "absolute"};
    for (size_t i = 0; i < 2; i++) {
        dcp_file *f;
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(x->st->ops->open(x->st, names[i], DCP_OPEN_READ | DCP_OPEN_BENEATH, &f, &err), DCP_IO);
        assert_int_equal(err.sys_errno, EXDEV);
        assert_non_null(strstr(err.message, names[i]));
        assert_non_null(strstr(err.message, "symbolic link"));
        assert_non_null(strstr(err.message, "allow_outside"));
    }
    dcp_file *f;
    assert_int_equal(x->st->ops->open(x->st, "absolute", DCP_OPEN_READ, &f, NULL), DCP_OK);
    x->st->ops->close(f, NULL);
}

static void beneath__loops_end(void **state)
{
    const fixture *x = *state;
    link_to(x, "b", "a");
    link_to(x, "a", "b");
    link_to(x, "self/self", "self");
    assert_refused(x, "a", O_RDONLY, ELOOP);
    assert_refused(x, "self", O_RDONLY, ELOOP);
}

static void beneath__long_names_are_refused(void **state)
{
    const fixture *x = *state;
    char name[5000];
    memset(name, 'a', sizeof name);
    name[300] = 0;
    assert_refused(x, name, O_RDONLY, ENAMETOOLONG);
    name[300] = 'a';
    for (size_t i = 1; i < sizeof name; i += 2) {
        name[i] = '/';
    }
    name[sizeof name - 1] = 0;
    assert_refused(x, name, O_RDONLY, ENAMETOOLONG);
}

static void beneath__new_files_are_made(void **state)
{
    const fixture *x = *state;
    link_to(x, "d/made", "dangling");
    for (size_t i = 0; i < 2; i++) {
        const char *const names[] = {"new", "d/new", "dangling"};
        const char *const made[] = {"new", "d/new", "d/made"};
        for (size_t k = 0; k < 3; k++) {
            int fd = openers[i](x->root_fd, names[k], O_WRONLY | O_CREAT, 0666);
            assert_true(fd >= 0);
            close(fd);
            assert_int_equal(unlinkat(x->root_fd, made[k], 0), 0);
        }
    }
    assert_refused(x, "f", O_WRONLY | O_CREAT | O_EXCL, EEXIST);
    assert_refused(x, "dangling", O_WRONLY | O_CREAT | O_EXCL, EEXIST);
    assert_refused(x, "dangling", O_RDONLY, ENOENT);
}

static void beneath__links_of_proc_are_refused(void **state)
{
    const fixture *x = *state;
    int fds = open("/proc/self/fd", O_PATH | O_DIRECTORY), out = openat(x->dir_fd, "outside.txt", O_RDONLY);
    char name[16];
    snprintf(name, sizeof name, "%d", out);
    for (size_t i = 0; i < 2 && fds >= 0; i++) {
        assert_int_equal(openers[i](fds, name, O_RDONLY, 0), -1);
        assert_true(errno == ELOOP || errno == EXDEV);
    }
    close(out);
    close(fds);
}

static void beneath__descriptors_are_not_left_open(void **state)
{
    const fixture *x = *state;
    int before = dup(0);
    close(before);
    link_to(x, "../../outside.txt", "d/out");
    assert_refused(x, "d/../d/out", O_RDONLY, EXDEV);
    assert_refused(x, "d/absent", O_RDONLY, ENOENT);
    int after = dup(0);
    close(after);
    assert_int_equal(after, before);
}

/* ---- the storage ---- */

static dcp_status try_open(dcp_storage *st, const char *name, unsigned flags, dcp_error *err)
{
    dcp_file *f;
    *err = (dcp_error)DCP_ERROR_INIT;
    dcp_status status = st->ops->open(st, name, flags, &f, err);
    if (status == DCP_OK) {
        assert_int_equal(st->ops->close(f, NULL), DCP_OK);
    }
    return status;
}

static void open__link_that_leads_out_follows_the_flag(void **state)
{
    const fixture *x = *state;
    dcp_error err;
    link_to(x, "../outside.txt", "out");
    assert_int_equal(try_open(x->st, "out", DCP_OPEN_READ | DCP_OPEN_BENEATH, &err), DCP_IO);
    assert_int_equal(err.sys_errno, EXDEV);
    assert_int_equal(try_open(x->st, "out", DCP_OPEN_READ, &err), DCP_OK);
    assert_int_equal(try_open(x->st, "../outside.txt", DCP_OPEN_READ, &err), DCP_OK);
    char absolute[400];
    snprintf(absolute, sizeof absolute, "%s/outside.txt", x->dir.path);
    assert_int_equal(try_open(x->st, absolute, DCP_OPEN_READ, &err), DCP_OK);
}

/* A hang here is the failure. */
static void open__special_files_are_refused_without_waiting(void **state)
{
    const fixture *x = *state;
    dcp_error err;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int s = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/socket", x->root);
    assert_int_equal(bind(s, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(mkfifoat(x->root_fd, "fifo", 0666), 0);
    link_to(x, "/dev/zero", "zero");
    const char *const names[] = {"fifo", "socket", "zero"};
    const char *const types[] = {"FIFO", "socket", "character device"};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(try_open(x->st, names[i], DCP_OPEN_READ, &err), DCP_IO);
        assert_non_null(strstr(err.message, types[i]));
        assert_int_equal(try_open(x->st, names[i], DCP_OPEN_WRITE | DCP_OPEN_TRUNCATE, &err), DCP_IO);
        assert_non_null(strstr(err.message, types[i]));
        dcp_stat st;
        assert_int_equal(x->st->ops->stat(x->st, names[i], &st, NULL), DCP_OK);
        assert_int_equal(st.type, DCP_ENTRY_OTHER);
        assert_int_equal(st.bytes, 0);
    }
    close(s);
}

static dcp_status note_type(void *user, const char *name, dcp_entry_type type)
{
    dcp_entry_type *types = user;
    types[name[0] - 'a'] = type;
    return DCP_OK;
}

static void list__follows_links_for_the_type(void **state)
{
    const fixture *x = *state;
    dcp_entry_type types[26] = {0};
    link_to(x, "f", "a");
    link_to(x, "d", "b");
    link_to(x, "absent", "c");
    assert_int_equal(x->st->ops->list(x->st, "", note_type, types, NULL), DCP_OK);
    assert_int_equal(types['a' - 'a'], DCP_ENTRY_FILE);
    assert_int_equal(types['b' - 'a'], DCP_ENTRY_DIR);
    assert_int_equal(types['c' - 'a'], DCP_ENTRY_OTHER);
    assert_int_equal(types['d' - 'a'], DCP_ENTRY_DIR);
    assert_int_equal(types['f' - 'a'], DCP_ENTRY_FILE);
}

static void stat__tells_the_time(void **state)
{
    const fixture *x = *state;
    dcp_stat st;
    struct timespec times[2] = {{1000000000, 7}, {1600000000, 123456789}};
    assert_int_equal(utimensat(x->root_fd, "f", times, 0), 0);
    assert_int_equal(x->st->ops->stat(x->st, "f", &st, NULL), DCP_OK);
    assert_int_equal(st.mtime_ns, 1600000000123456789);
}

static void root__may_come_later(void **state)
{
    const fixture *x = *state;
    char path[400];
    dcp_storage *st;
    dcp_error err;
    dcp_stat s;
    snprintf(path, sizeof path, "%s/later/and/deeper", x->dir.path);
    assert_int_equal(dcp_storage_posix(NULL, path, &st, NULL), DCP_OK);
    assert_int_equal(try_open(st, "f", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &err), DCP_NOT_FOUND);
    assert_int_equal(st->ops->stat(st, "", &s, NULL), DCP_NOT_FOUND);
    assert_int_equal(st->ops->make_dir(st, "sub", NULL), DCP_OK);
    assert_int_equal(try_open(st, "sub/f", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &err), DCP_OK);
    dcp_storage_free(st);
}

static void root__that_is_a_file_has_nothing_below(void **state)
{
    const fixture *x = *state;
    char path[400];
    dcp_storage *st;
    dcp_error err;
    snprintf(path, sizeof path, "%s/outside.txt", x->dir.path);
    assert_int_equal(dcp_storage_posix(NULL, path, &st, NULL), DCP_OK);
    assert_int_equal(try_open(st, "f", DCP_OPEN_READ, &err), DCP_NOT_FOUND);
    assert_int_equal(try_open(st, "", DCP_OPEN_READ, &err), DCP_NOT_FOUND);
    assert_int_equal(st->ops->make_dir(st, "", NULL), DCP_EXISTS);
    assert_int_equal(st->ops->make_dir(st, "d", NULL), DCP_EXISTS);
    dcp_stat s;
    assert_int_equal(st->ops->stat(st, "", &s, NULL), DCP_OK); /* how callers tell a file from a directory */
    assert_int_equal(s.type, DCP_ENTRY_FILE);
    assert_int_equal(s.bytes, 7);
    dcp_storage_free(st);
    assert_int_equal(dcp_storage_posix(NULL, "", &st, NULL), DCP_ARG);
    assert_int_equal(dcp_storage_posix(NULL, NULL, &st, NULL), DCP_ARG);
}

static void root__stays_when_the_working_directory_changes(void **state)
{
    const fixture *x = *state;
    dcp_storage *st;
    dcp_error err;
    int here = open(".", O_PATH | O_DIRECTORY);
    assert_int_equal(fchdir(x->dir_fd), 0);
    assert_int_equal(dcp_storage_posix(NULL, "root", &st, NULL), DCP_OK);
    assert_int_equal(fchdir(here), 0);
    close(here);
    assert_int_equal(try_open(st, "d/g", DCP_OPEN_READ, &err), DCP_OK);
    dcp_storage_free(st);
}

/* The system takes the first 4096 bytes and refuses the rest: the loop must go on, and the error say where it stopped. */
static void write_at__reports_where_it_stopped(void **state)
{
    const fixture *x = *state;
    struct rlimit before, limit;
    dcp_error err = DCP_ERROR_INIT;
    dcp_file *f;
    char bytes[8192] = {0};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(x->st->ops->open(x->st, "big", DCP_OPEN_WRITE | DCP_OPEN_CREATE, &f, NULL), DCP_OK);
    signal(SIGXFSZ, SIG_IGN);
    limit = (struct rlimit){4096, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    dcp_status status = x->st->ops->write_at(f, bytes, sizeof bytes, 0, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, DCP_IO);
    assert_int_equal(err.sys_errno, EFBIG);
    assert_int_equal(err.offset, 4096);
    assert_int_equal(x->st->ops->close(f, NULL), DCP_OK);
}

static void lock__excludes_another_process(void **state)
{
    const fixture *x = *state;
    dcp_file *f;
    bool locked = false;
    assert_int_equal(x->st->ops->open(x->st, "f", DCP_OPEN_READ | DCP_OPEN_WRITE, &f, NULL), DCP_OK);
    assert_int_equal(x->st->ops->lock(f, &locked, NULL), DCP_OK);
    assert_true(locked);
    pid_t child = fork();
    if (child == 0) {
        dcp_file *own;
        bool got = true;
        bool ok = x->st->ops->open(x->st, "f", DCP_OPEN_READ | DCP_OPEN_WRITE, &own, NULL) == DCP_OK &&
                  x->st->ops->lock(own, &got, NULL) == DCP_OK;
        _exit(!ok ? 2 : got);
    }
    int exit_status = -1;
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    assert_true(WIFEXITED(exit_status));
    assert_int_equal(WEXITSTATUS(exit_status), 0);
    assert_int_equal(x->st->ops->close(f, NULL), DCP_OK);
}

static dcp_status make_open_list(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_storage *st;
    dcp_file *f;
    dcp_entry_type types[26];
    dcp_status status = dcp_storage_posix(ctx, user, &st, err);
    if (status != DCP_OK) {
        return status;
    }
    status = st->ops->make_dir(st, "x/y", err);
    status = status == DCP_OK ? st->ops->open(st, "f", DCP_OPEN_READ | DCP_OPEN_BENEATH, &f, err) : status;
    if (status == DCP_OK) {
        st->ops->close(f, NULL);
        status = st->ops->list(st, "", note_type, types, err);
    }
    dcp_storage_free(st);
    return status;
}

static void posix__survives_failing_allocations(void **state)
{
    assert_true(failing_alloc_walk(make_open_list, ((fixture *)*state)->root) >= 4);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(beneath__plain_names_open),
        TEST(beneath__names_that_lead_out_are_refused),
        TEST(beneath__links_inside_are_followed),
        TEST(beneath__links_that_lead_out_are_refused),
        TEST(open__a_link_that_leads_out_says_what_to_do),
        TEST(beneath__loops_end),
        TEST(beneath__long_names_are_refused),
        TEST(beneath__new_files_are_made),
        TEST(beneath__links_of_proc_are_refused),
        TEST(beneath__descriptors_are_not_left_open),
        TEST(open__link_that_leads_out_follows_the_flag),
        TEST(open__special_files_are_refused_without_waiting),
        TEST(list__follows_links_for_the_type),
        TEST(stat__tells_the_time),
        TEST(root__may_come_later),
        TEST(root__that_is_a_file_has_nothing_below),
        TEST(root__stays_when_the_working_directory_changes),
        TEST(write_at__reports_where_it_stopped),
        TEST(lock__excludes_another_process),
        TEST(posix__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
