/* A directory that is gone with all its content when the test ends. */
#ifndef TESTS_SUPPORT_TEMP_DIR_H
#define TESTS_SUPPORT_TEMP_DIR_H

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct temp_dir {
    char path[256];
} temp_dir;

static inline bool temp_dir_make(temp_dir *d)
{
    const char *base = getenv("TMPDIR");
    snprintf(d->path, sizeof d->path, "%s/dcp-test-XXXXXX", base && *base ? base : "/tmp");
    return mkdtemp(d->path) != NULL;
}

static inline void temp_dir_empty(int dir)
{
    DIR *list = fdopendir(dir);
    const struct dirent *e;
    while (list && (e = readdir(list)) != NULL) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlinkat(dirfd(list), e->d_name, 0) != 0) {
            int below = openat(dirfd(list), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (below >= 0) {
                temp_dir_empty(below);
            }
            unlinkat(dirfd(list), e->d_name, AT_REMOVEDIR);
        }
    }
    if (list) {
        closedir(list);
    }
}

static inline void temp_dir_remove(const temp_dir *d)
{
    int fd = open(d->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        temp_dir_empty(fd);
    }
    rmdir(d->path);
}

#endif
