/* Where AscendCL is looked for: each place alone, in a process that has nothing else. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/temp_dir.h"

static const char *self;

/* ---- the process ---- */

static bool is_mapped(const char *path)
{
    char line[4400];
    bool is_there = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !is_there && fgets(line, sizeof line, maps)) {
        is_there = strstr(line, path) != NULL;
    }
    if (maps) {
        fclose(maps);
    }
    return is_there;
}

/* Exits with 0 if the library that was opened is that of `expected`. loaded: what the program has opened before; "" for nothing.
 */
static int open_in_child(const char *loaded, const char *expected)
{
    dcp_device_driver *d;
    dcp_error err = DCP_ERROR_INIT;
    if (*loaded && !dlopen(loaded, RTLD_NOW | RTLD_LOCAL)) {
        return 2;
    }
    if (dcp_device_open(NULL, DCP_DEVICE_NPU, NULL, &d, &err) != DCP_OK) {
        return err.code == DCP_UNSUPPORTED && strstr(err.message, ".so") ? 3 : 4;
    }
    dcp_device_close(d);
    return is_mapped(expected) ? 0 : 5;
}

static int run_child(const char *search, const char *home, const char *loaded, const char *expected)
{
    pid_t child = fork();
    if (child == 0) {
        setenv("LD_LIBRARY_PATH", search, 1);
        setenv("ASCEND_HOME_PATH", home, 1);
        execl(self, self, loaded, expected, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* ---- cases ---- */

static void copy_library(const char *folder, const char *name, char path[4200])
{
    char block[65536];
    size_t n;
    assert_true(snprintf(path, 4200, "%s/%s", folder, name) < 4200);
    FILE *from = fopen(DCP_LOOK_ALIKES "/acl/libascendcl.so", "rb"), *to = fopen(path, "wb");
    assert_true(from && to);
    while ((n = fread(block, 1, sizeof block, from)) > 0) {
        assert_int_equal(fwrite(block, 1, n, to), n);
    }
    fclose(from);
    assert_int_equal(fclose(to), 0);
}

static void make_folder(const char *parent, const char *name, char path[4150])
{
    assert_true(snprintf(path, 4150, "%s/%s", parent, name) < 4150);
    assert_int_equal(mkdir(path, 0700), 0);
}

/* R8.23, R8.24 */
static void search__each_place_is_found_alone(void **unused)
{
    (void)unused;
    temp_dir dir;
    char by_name[4150], by_short_name[4150], toolkit[4150], lib64[4150], elsewhere[4150];
    char name[4200], short_name[4200], in_toolkit[4200], loaded[4200];
    assert_true(temp_dir_make(&dir));
    make_folder(dir.path, "name", by_name);
    make_folder(dir.path, "short", by_short_name);
    make_folder(dir.path, "toolkit", toolkit);
    make_folder(toolkit, "lib64", lib64);
    make_folder(dir.path, "elsewhere", elsewhere);
    copy_library(by_name, "libascendcl.so", name);
    copy_library(by_short_name, "libacl.so", short_name);
    copy_library(lib64, "libascendcl.so", in_toolkit);
    copy_library(elsewhere, "libascendcl.so", loaded);
    assert_int_equal(run_child(by_name, "/nowhere", "", name), 0);
    assert_int_equal(run_child(by_short_name, "/nowhere", "", short_name), 0);
    assert_int_equal(run_child("", toolkit, "", in_toolkit), 0);
    assert_int_equal(run_child("", "/nowhere", loaded, loaded), 0);
    assert_int_equal(run_child("", "/nowhere", "", "none"), 3);
    /* Of several the first one is taken, and no other is opened. */
    char both[8400];
    snprintf(both, sizeof both, "%s:%s", by_short_name, by_name);
    assert_int_equal(run_child(both, toolkit, "", name), 0);
    assert_int_equal(run_child(both, toolkit, "", short_name), 5);
    assert_int_equal(run_child(both, toolkit, loaded, loaded), 0);
    assert_int_equal(run_child(both, toolkit, loaded, name), 5);
    assert_int_equal(run_child(by_short_name, toolkit, "", in_toolkit), 5);
    temp_dir_remove(&dir);
}

int main(int argc, char **argv)
{
    if (argc == 3) {
        return open_in_child(argv[1], argv[2]);
    }
    self = argv[0];
    const struct CMUnitTest tests[] = {cmocka_unit_test(search__each_place_is_found_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
