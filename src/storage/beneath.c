#include "storage/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef SYS_openat2
#include <linux/openat2.h>
#endif

#define MAX_LINKS 40 /* as the kernel's */
#define MAX_DEPTH 128
#define GO_ON (-2)

/* A walk keeps every directory from the root to where it is, so that ".." goes back to the one that it came through even if
 * somebody moves directories meanwhile. */
typedef struct walk {
    int dirs[MAX_DEPTH]; /* dirs[0] is the caller's */
    int depth;
    int links;
    const char *rest; /* what is still to be walked, in path */
    char path[PATH_MAX];
} walk;

static int fail(int code)
{
    errno = code;
    return -1;
}

static int close_and_fail(int fd, int code)
{
    close(fd);
    return fail(code);
}

/* Takes the next part off w->rest. False if there is none, or it is too long: then errno is set. */
static bool next_part(walk *w, char part[NAME_MAX + 1])
{
    w->rest += strspn(w->rest, "/");
    size_t len = strcspn(w->rest, "/");
    errno = len > NAME_MAX ? ENAMETOOLONG : 0;
    if (len == 0 || len > NAME_MAX) {
        return false;
    }
    memcpy(part, w->rest, len);
    part[len] = 0;
    w->rest += len;
    w->rest += strspn(w->rest, "/");
    return true;
}

/* Puts the target of a link in front of what is left. */
static int follow_link(walk *w, int link_fd)
{
    char path[PATH_MAX];
    ssize_t len = readlinkat(link_fd, "", path, sizeof path);
    if (len < 0) {
        return close_and_fail(link_fd, errno);
    }
    close(link_fd);
    size_t rest = strlen(w->rest);
    if (++w->links > MAX_LINKS) {
        return fail(ELOOP);
    }
    if (len == 0 || path[0] == '/') {
        return fail(len == 0 ? ENOENT : EXDEV);
    }
    if ((size_t)len + 1 + rest >= sizeof path) {
        return fail(ENAMETOOLONG);
    }
    path[len] = '/';
    memcpy(path + len + 1, w->rest, rest + 1);
    memcpy(w->path, path, (size_t)len + 1 + rest + 1);
    w->rest = w->path;
    return GO_ON;
}

static int enter_directory(walk *w, int fd, mode_t type)
{
    if (type != S_IFDIR) {
        return close_and_fail(fd, ENOTDIR);
    }
    if (w->depth == MAX_DEPTH) {
        return close_and_fail(fd, ENAMETOOLONG);
    }
    w->dirs[w->depth++] = fd;
    return GO_ON;
}

static int climb(walk *w)
{
    if (w->depth == 1) {
        return fail(EXDEV);
    }
    close(w->dirs[--w->depth]);
    return GO_ON;
}

/* Walks one part. Returns GO_ON, the descriptor at the end of the name, or -1. */
static int take_step(walk *w, int flags, mode_t mode)
{
    char part[NAME_MAX + 1];
    int dir = w->dirs[w->depth - 1];
    if (!next_part(w, part)) {
        return errno ? -1 : openat(dir, ".", flags, mode);
    }
    bool is_last = *w->rest == 0;
    if (strcmp(part, ".") == 0) {
        return GO_ON;
    }
    if (strcmp(part, "..") == 0) {
        return climb(w);
    }
    if (is_last && (flags & O_EXCL)) {
        return openat(dir, part, flags | O_NOFOLLOW, mode);
    }
    int fd = openat(dir, part, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        bool is_new = errno == ENOENT && is_last && (flags & O_CREAT);
        return is_new ? openat(dir, part, flags | O_NOFOLLOW, mode) : -1;
    }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return close_and_fail(fd, errno);
    }
    if (S_ISLNK(st.st_mode)) {
        return follow_link(w, fd);
    }
    if (!is_last) {
        return enter_directory(w, fd, st.st_mode & S_IFMT);
    }
    close(fd);
    return openat(dir, part, flags | O_NOFOLLOW, mode); /* became a link since: ELOOP */
}

int dcp__open_beneath_walk(int dir, const char *name, int flags, mode_t mode)
{
    walk w = {.dirs = {dir}, .depth = 1, .links = 0};
    if (name[0] == '/' || strlen(name) >= sizeof w.path) {
        return fail(name[0] == '/' ? EXDEV : ENAMETOOLONG);
    }
    memcpy(w.path, name, strlen(name) + 1);
    w.rest = w.path;
    int fd = GO_ON;
    while (fd == GO_ON) {
        fd = take_step(&w, flags, mode);
    }
    int saved = errno;
    while (w.depth > 1) {
        close(w.dirs[--w.depth]);
    }
    errno = saved;
    return fd;
}

int dcp__open_beneath(int dir, const char *name, int flags, mode_t mode)
{
#ifdef SYS_openat2
    struct open_how how = {
        .flags = (unsigned)flags,
        .mode = flags & O_CREAT ? mode : 0,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    long fd = syscall(SYS_openat2, dir, name, &how, sizeof how);
    /* EAGAIN: a rename somewhere in the system while ".." was walked. The walk does not mind. */
    if (fd >= 0 || (errno != ENOSYS && errno != EPERM && errno != EAGAIN)) {
        return (int)fd;
    }
#endif
    return dcp__open_beneath_walk(dir, name, flags, mode);
}
