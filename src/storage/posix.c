/* Files below a directory. All names are looked up from a descriptor of the root, so that a storage stays where it was made when
 * the process changes its working directory or somebody renames the root. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "storage/beneath.h"
#include "storage/storage.h"

/* O_DIRECT transfers whole sectors; a read that stops inside one has met the end of the file. */
#define SECTOR_BYTES 512

typedef struct posix_storage {
    dcp_storage base;
    dcp_context *ctx;
    char *root;
    pthread_mutex_t lock; /* guards root_fd while it is opened */
    int root_fd;          /* -1 as long as the root does not exist */
} posix_storage;

typedef struct posix_file {
    dcp_file base;
    int fd;
    bool is_direct, is_writable, writes_back;
    char name[];
} posix_file;

/* "" names the root. */
static const char *or_dot(const char *name)
{
    return *name ? name : ".";
}

static dcp_status fail_errno(dcp_error *err, const char *verb, const char *name)
{
    int code = errno;
    return dcp__fail_errno(err, code, "%s %s", verb, *name ? dcp__print(dcp_str_of(name)).text : "the root");
}

/* The same, where a refusal means that the file system cannot do it. */
static dcp_status fail_unless_refused(dcp_error *err, const char *verb, const char *name)
{
    int code = errno;
    dcp_status status = fail_errno(err, verb, name);
    if (code == EINVAL || code == ENOTSUP || code == ENOSYS || code == ENOLCK) {
        status = DCP_UNSUPPORTED;
        if (err) {
            err->code = status;
        }
    }
    return status;
}

/* Sets *fd to the root's descriptor, opening it if it has come into being since. */
static dcp_status find_root(posix_storage *ps, int *fd, dcp_error *err)
{
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&ps->lock);
    if (ps->root_fd < 0) {
        ps->root_fd = open(ps->root, O_PATH | O_CLOEXEC); /* may be a file: stat tells, all else finds nothing below it */
    }
    if (ps->root_fd < 0) {
        status = fail_errno(err, "open", ps->root);
    }
    *fd = ps->root_fd;
    pthread_mutex_unlock(&ps->lock);
    return status;
}

/* ---- opening ---- */

static int os_flags(unsigned flags)
{
    /* Not to hang on a FIFO nor to take a terminal before the type is known; regular files do not care. */
    int out = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    out |= !(flags & DCP_OPEN_WRITE) ? O_RDONLY : flags & DCP_OPEN_READ ? O_RDWR : O_WRONLY;
    out |= flags & DCP_OPEN_CREATE ? O_CREAT : 0;
    out |= flags & DCP_OPEN_EXCLUSIVE ? O_EXCL : 0;
    out |= flags & DCP_OPEN_TRUNCATE ? O_TRUNC : 0;
    out |= flags & DCP_OPEN_DIRECT ? O_DIRECT : 0;
    return out;
}

static dcp_status refuse_type(mode_t mode, const char *name, dcp_error *err)
{
    if (S_ISDIR(mode)) {
        errno = EISDIR;
        return fail_errno(err, "open", name);
    }
    const char *type = S_ISFIFO(mode)   ? "a FIFO"
                       : S_ISSOCK(mode) ? "a socket"
                       : S_ISCHR(mode)  ? "a character device"
                       : S_ISBLK(mode)  ? "a block device"
                                        : "of an unknown type";
    return dcp__fail(err, DCP_IO, "open %s: it is %s, not a regular file", dcp__print(dcp_str_of(name)).text, type);
}

static dcp_status open_failed(int root, const char *name, unsigned flags, dcp_error *err)
{
    int code = errno;
    struct stat st;
    if (code == ENXIO && fstatat(root, name, &st, 0) == 0 && !S_ISREG(st.st_mode)) {
        return refuse_type(st.st_mode, name, err);
    }
    if (code == EXDEV && (flags & DCP_OPEN_BENEATH)) {
        dcp_status status =
            dcp__fail(err, DCP_IO,
                      "open %s: a symbolic link on the way is absolute or leads out of the directory, which is only "
                      "followed on request (allow_outside, dcptool --allow-outside)",
                      dcp__print(dcp_str_of(name)).text);
        if (err) {
            err->sys_errno = EXDEV;
        }
        return status;
    }
    if (code == EINVAL && (flags & DCP_OPEN_DIRECT)) {
        if (flags & DCP_OPEN_EXCLUSIVE) {
            unlinkat(root, name, 0); /* Linux makes the file first and refuses then; nobody else's can be there */
        }
        return dcp__fail(err, DCP_UNSUPPORTED, "open %s: the file system has no direct I/O", dcp__print(dcp_str_of(name)).text);
    }
    errno = code;
    return fail_errno(err, "open", name);
}

/* Opens and makes sure that it is a regular file. */
static dcp_status open_regular(int root, const char *name, unsigned flags, int *out, dcp_error *err)
{
    int fd = flags & DCP_OPEN_BENEATH ? dcp__open_beneath(root, or_dot(name), os_flags(flags), 0666)
                                      : openat(root, or_dot(name), os_flags(flags), 0666);
    if (fd < 0) {
        return open_failed(root, name, flags, err);
    }
    struct stat st;
    if (fstat(fd, &st) != 0) {
        dcp_status status = fail_errno(err, "stat", name);
        close(fd);
        return status;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return refuse_type(st.st_mode, name, err);
    }
    *out = fd;
    return DCP_OK;
}

static dcp_status posix_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    posix_storage *ps = (posix_storage *)st;
    int root, fd = -1;
    dcp_status status = dcp__open_flags_check(name, flags, err);
    if (status != DCP_OK || (status = find_root(ps, &root, err)) != DCP_OK) {
        return status;
    }
    if ((flags & DCP_OPEN_BENEATH) && !dcp__name_is_beneath(name)) {
        return dcp__fail(err, DCP_ARG, "open %s: the name leads out of the directory", dcp__print(dcp_str_of(name)).text);
    }
    size_t name_bytes = strlen(name) + 1;
    posix_file *f = dcp__alloc(ps->ctx, sizeof *f + name_bytes);
    if (!f) {
        return dcp__nomem(err);
    }
    if ((status = open_regular(root, name, flags, &fd, err)) != DCP_OK) {
        dcp__free(ps->ctx, f);
        return status;
    }
    *f = (posix_file){{st}, fd, (flags & DCP_OPEN_DIRECT) != 0, (flags & DCP_OPEN_WRITE) != 0, (flags & DCP_OPEN_WRITEBACK) != 0};
    memcpy(f->name, name, name_bytes);
    *out = &f->base;
    return DCP_OK;
}

/* ---- files ---- */

static dcp_status posix_read_at(dcp_file *file, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    posix_file *f = (posix_file *)file;
    dcp_status status = dcp__io_range_check(f->name, n, offset, err);
    if (status != DCP_OK) {
        return status;
    }
    size_t done = 0;
    while (done < n) {
        ssize_t r = pread(f->fd, (char *)buf + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r < 0) {
            status = fail_errno(err, "read", f->name);
            if (err) {
                err->offset = offset + done;
            }
            return status;
        }
        done += (size_t)r;
        if (r == 0 || (f->is_direct && r % SECTOR_BYTES != 0)) {
            break;
        }
    }
    *got = done;
    return DCP_OK;
}

/* Small writes are not worth the call; the sync takes them along. */
#define WRITEBACK_BYTES ((size_t)1 << 20)

/* Starts the write-back of a range without waiting for it. What goes wrong shows at the sync. */
static void begin_writeback(const posix_file *f, uint64_t offset, size_t n)
{
    if (f->writes_back && n >= WRITEBACK_BYTES) {
        (void)sync_file_range(f->fd, (off_t)offset, (off_t)n, SYNC_FILE_RANGE_WRITE);
    }
}

static dcp_status posix_write_at(dcp_file *file, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    posix_file *f = (posix_file *)file;
    dcp_status status = dcp__io_range_check(f->name, n, offset, err);
    size_t done = 0;
    while (status == DCP_OK && done < n) {
        ssize_t w = pwrite(f->fd, (const char *)buf + done, n - done, (off_t)(offset + done));
        if (w > 0) {
            done += (size_t)w;
        } else if (w == 0) {
            status = dcp__fail(err, DCP_IO, "write %s: the system took none of %zu bytes", dcp__print(dcp_str_of(f->name)).text,
                               n - done);
        } else if (errno != EINTR) {
            status = fail_errno(err, "write", f->name);
        }
    }
    if (status == DCP_OK) {
        begin_writeback(f, offset, n);
    } else if (err) {
        err->offset = offset + done;
    }
    return status;
}

static dcp_status sync_fd(int fd, const char *name, dcp_error *err)
{
    int r;
    do {
        r = fsync(fd);
    } while (r != 0 && errno == EINTR);
    return r == 0 ? DCP_OK : fail_unless_refused(err, "sync", name);
}

static dcp_status posix_sync(dcp_file *file, dcp_error *err)
{
    posix_file *f = (posix_file *)file;
    return sync_fd(f->fd, f->name, err);
}

static dcp_status posix_close(dcp_file *file, dcp_error *err)
{
    posix_file *f = (posix_file *)file;
    dcp_status status = DCP_OK;
    /* Network file systems report here what they could not write. The descriptor is gone in every case. */
    if (close(f->fd) != 0 && f->is_writable) {
        status = fail_errno(err, "close", f->name);
    }
    dcp__free(((posix_storage *)file->storage)->ctx, f);
    return status;
}

/* Is the open file still the one that is found by its name? */
static dcp_status has_its_name(const posix_file *f, bool *out, dcp_error *err)
{
    int root;
    struct stat open_one, named;
    dcp_status status = find_root((posix_storage *)f->base.storage, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    bool is_there = fstatat(root, f->name, &named, 0) == 0;
    if ((!is_there && errno != ENOENT) || fstat(f->fd, &open_one) != 0) {
        return fail_errno(err, "stat", f->name);
    }
    *out = is_there && named.st_ino == open_one.st_ino && named.st_dev == open_one.st_dev;
    return DCP_OK;
}

/* Locks of flock() belong to the open file, not to the process, so that two saves in one process exclude each other as well. */
static dcp_status posix_lock(dcp_file *file, bool *locked, dcp_error *err)
{
    posix_file *f = (posix_file *)file;
    bool is_named = true;
    int r;
    do {
        r = flock(f->fd, LOCK_EX | LOCK_NB);
    } while (r != 0 && errno == EINTR);
    if (r != 0 && errno != EWOULDBLOCK) {
        return fail_unless_refused(err, "lock", f->name);
    }
    dcp_status status = r == 0 ? has_its_name(f, &is_named, err) : DCP_OK;
    if (r == 0 && (status != DCP_OK || !is_named)) {
        (void)flock(f->fd, LOCK_UN);
    }
    if (status == DCP_OK) {
        *locked = r == 0 && is_named;
    }
    return status;
}

/* ---- names ---- */

static dcp_entry_type type_of_mode(mode_t mode)
{
    return S_ISREG(mode) ? DCP_ENTRY_FILE : S_ISDIR(mode) ? DCP_ENTRY_DIR : DCP_ENTRY_OTHER;
}

static dcp_status posix_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    int root;
    struct stat s;
    dcp_status status = find_root((posix_storage *)st, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    if (fstatat(root, name, &s, *name ? 0 : AT_EMPTY_PATH) != 0) {
        return fail_errno(err, "stat", name);
    }
    *out = (dcp_stat){
        .type = type_of_mode(s.st_mode),
        .bytes = S_ISREG(s.st_mode) ? (uint64_t)s.st_size : 0,
        .mtime_ns = (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec,
    };
    return DCP_OK;
}

static dcp_entry_type type_of_entry(int dir, const struct dirent *e)
{
    struct stat s;
    switch (e->d_type) {
    case DT_REG: return DCP_ENTRY_FILE;
    case DT_DIR: return DCP_ENTRY_DIR;
    case DT_LNK:
    case DT_UNKNOWN: return fstatat(dir, e->d_name, &s, 0) == 0 ? type_of_mode(s.st_mode) : DCP_ENTRY_OTHER;
    default: return DCP_ENTRY_OTHER;
    }
}

static dcp_status list_entries(DIR *dir, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    for (;;) {
        errno = 0;
        const struct dirent *e = readdir(dir);
        if (!e) {
            return errno ? fail_errno(err, "list", name) : DCP_OK;
        }
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        dcp_status status = fn(user, e->d_name, type_of_entry(dirfd(dir), e));
        if (status != DCP_OK) {
            return status;
        }
    }
}

static dcp_status open_directory(dcp_storage *st, const char *verb, const char *name, int *fd, dcp_error *err)
{
    int root;
    dcp_status status = find_root((posix_storage *)st, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    *fd = openat(root, or_dot(name), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return *fd < 0 ? fail_errno(err, verb, name) : DCP_OK;
}

static dcp_status posix_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    int fd;
    dcp_status status = open_directory(st, "list", name, &fd, err);
    if (status != DCP_OK) {
        return status;
    }
    DIR *dir = fdopendir(fd);
    if (!dir) {
        status = fail_errno(err, "list", name);
        close(fd);
        return status;
    }
    status = list_entries(dir, name, fn, user, err);
    closedir(dir);
    return status;
}

static dcp_status posix_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    int root;
    dcp_status status = find_root((posix_storage *)st, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    if (renameat(root, from, root, to) != 0) {
        int code = errno;
        return dcp__fail_errno(err, code, "rename %s to %s", dcp__print(dcp_str_of(from)).text, dcp__print(dcp_str_of(to)).text);
    }
    return DCP_OK;
}

static dcp_status posix_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    int root;
    dcp_status status = find_root((posix_storage *)st, &root, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!*name) {
        return dcp__fail(err, DCP_ARG, "remove: the root cannot be removed");
    }
    if (unlinkat(root, name, 0) != 0 && (errno != EISDIR || unlinkat(root, name, AT_REMOVEDIR) != 0)) {
        return fail_errno(err, "remove", name);
    }
    return DCP_OK;
}

/* ---- directories ---- */

static bool is_directory(int dir, const char *name)
{
    int saved = errno;
    struct stat s;
    bool is = fstatat(dir, name, &s, 0) == 0 && S_ISDIR(s.st_mode);
    errno = saved;
    return is;
}

/* Makes the name of a new directory durable: sync_dir of the directory itself does not reach its parent. What cannot be synced
 * stays as it is. */
static void sync_parent(dcp_context *ctx, int dir, const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t len = !slash ? 0 : slash == path ? 1 : (size_t)(slash - path);
    char *parent = dcp__strndup(ctx, len ? path : ".", len ? len : 1);
    int fd = parent ? openat(dir, parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        sync_fd(fd, parent, NULL);
        close(fd);
    }
    dcp__free(ctx, parent);
}

/* Makes path and what is missing above it. */
static dcp_status make_path(dcp_context *ctx, int dir, const char *path, dcp_error *err)
{
    dcp_status status = DCP_OK;
    char *copy = dcp__strndup(ctx, path, strlen(path));
    if (!copy) {
        return dcp__nomem(err);
    }
    for (char *p = copy; *p && status == DCP_OK;) {
        p += strspn(p, "/");
        p += strcspn(p, "/");
        char saved = *p;
        *p = 0;
        /* Whatever mkdir says, EROFS or EACCES too: a directory that is there is fine. */
        if (mkdirat(dir, copy, 0777) == 0) {
            sync_parent(ctx, dir, copy);
        } else if (!is_directory(dir, copy)) {
            status = fail_errno(err, "make directory", copy);
        }
        *p = saved;
    }
    dcp__free(ctx, copy);
    return status;
}

static dcp_status posix_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    posix_storage *ps = (posix_storage *)st;
    int root;
    dcp_status status = find_root(ps, &root, NULL);
    if (status != DCP_OK) {
        status = make_path(ps->ctx, AT_FDCWD, ps->root, err);
        status = status == DCP_OK ? find_root(ps, &root, err) : status;
    }
    if (status == DCP_OK && !is_directory(root, ".")) {
        return dcp__fail_errno(err, EEXIST, "make directory %s", dcp__print(dcp_str_of(ps->root)).text);
    }
    return status == DCP_OK && *name ? make_path(ps->ctx, root, name, err) : status;
}

static dcp_status posix_sync_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    int fd;
    dcp_status status = open_directory(st, "sync", name, &fd, err);
    if (status == DCP_OK) {
        status = sync_fd(fd, name, err);
        close(fd);
    }
    return status;
}

static dcp_status posix_space(dcp_storage *st, const char *name, uint64_t *free_bytes, dcp_error *err)
{
    int fd;
    struct statvfs fs;
    dcp_status status = open_directory(st, "look at", name, &fd, err);
    if (status != DCP_OK) {
        return status;
    }
    int rc = fstatvfs(fd, &fs), sys_errno = errno;
    close(fd);
    if (rc != 0) {
        return dcp__fail_errno(err, sys_errno, "free space of %s", dcp__print(dcp_str_of(name)).text);
    }
    *free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return DCP_OK;
}

/* ---- the storage ---- */

static void posix_free(dcp_storage *st)
{
    posix_storage *ps = (posix_storage *)st;
    if (ps->root_fd >= 0) {
        close(ps->root_fd);
    }
    pthread_mutex_destroy(&ps->lock);
    dcp__free(ps->ctx, ps->root);
    dcp__free(ps->ctx, ps);
}

static const dcp_storage_ops posix_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .caps = DCP_STORAGE_RENAME | DCP_STORAGE_RANDOM_WRITE | DCP_STORAGE_DURABLE,
    .name = "posix",
    .open = posix_open,
    .read_at = posix_read_at,
    .write_at = posix_write_at,
    .sync = posix_sync,
    .close = posix_close,
    .stat = posix_stat,
    .list = posix_list,
    .rename = posix_rename,
    .remove = posix_remove,
    .make_dir = posix_make_dir,
    .sync_dir = posix_sync_dir,
    .lock = posix_lock,
    .free = posix_free,
    .space = posix_space,
};

int dcp__posix_descriptor(const dcp_file *f)
{
    return f->storage->ops == &posix_ops ? ((const posix_file *)f)->fd : -1;
}

dcp_status dcp_storage_posix(dcp_context *ctx, const char *root, dcp_storage **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    if (!root || !*root || !out) {
        return dcp__fail(err, DCP_ARG, "posix storage: no root directory, or no place for the result");
    }
    posix_storage *ps = dcp__calloc(ctx, 1, sizeof *ps);
    char *copy = ps ? dcp__strndup(ctx, root, strlen(root)) : NULL;
    if (!copy) {
        dcp__free(ctx, ps);
        return dcp__nomem(err);
    }
    *ps = (posix_storage){.base = {&posix_ops}, .ctx = ctx, .root = copy, .root_fd = -1};
    pthread_mutex_init(&ps->lock, NULL);
    int ignored;
    find_root(ps, &ignored, NULL); /* it may come later */
    *out = &ps->base;
    return DCP_OK;
}
