#include "engine/save/mover.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/save/mover_protocol.h"
#include "storage/storage.h"

/* One write of a large payload, as the engine has it. */
#define BOUNCE_BYTES ((size_t)1 << 20)

#define CHECK_MS 50    /* between two questions whether to go on waiting */
#define ENDING_MS 2000 /* to end by itself when it is told to, which takes it a millisecond unless it hangs */
#define KILLED_MS 1000 /* to end when it is killed, which it does at once unless the system holds it in a write */

struct dcp_helper {
    dcp_context *ctx;
    dcp__host_pool *pool; /* borrowed; NULL: none */
    char *executable;
    pthread_mutex_t lock; /* guards the fields below: one request at a time */
    pid_t process;        /* 0: none is running */
    pid_t parent;         /* that started it; a fork of that process has no part in it */
    int socket;
    pthread_mutex_t bounce_lock; /* guards the fields below, and the block's content */
    dcp__host_pool *own;         /* made when memory that is not shared is first written */
    dcp__host_block *bounce;     /* of it */
};

/* ---- waiting ---- */

static dcp_status ask_whether(const dcp__mover_check *check, dcp_error *err)
{
    return check ? check->goes_on(check->user, err) : DCP_OK;
}

/* The lock may be held by somebody whose request is not answered. */
static dcp_status take(pthread_mutex_t *lock, const dcp__mover_check *check, dcp_error *err)
{
    dcp_status status = DCP_OK;
    while (status == DCP_OK) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += CHECK_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        if (pthread_mutex_timedlock(lock, &until) == 0) {
            return DCP_OK;
        }
        status = ask_whether(check, err);
    }
    return status;
}

/* ---- where it is ---- */

static bool is_executable(const char *path)
{
    return access(path, X_OK) == 0;
}

/* Beside the library, or where the library is linked into a program beside that. */
static bool beside_library(char path[4096])
{
    static const char *const places[] = {"libdcp/dcp-writer", "dcp-writer"};
    Dl_info info;
    void *here;
    dcp_status (*const self)(dcp_context *, dcp__host_pool *, const char *, dcp__mover **, dcp_error *) = dcp__mover_create;
    memcpy(&here, &self, sizeof here);
    if (dladdr(here, &info) == 0 || !info.dli_fname) {
        return false;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    int dir = slash ? (int)(slash - info.dli_fname) + 1 : 0;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(path, 4096, "%.*s%s", dir, info.dli_fname, places[i]);
        if (is_executable(path)) {
            return true;
        }
    }
    return false;
}

static dcp_status find_executable(dcp__mover *m, const char *given, dcp_error *err)
{
    char path[4096];
    const char *named = given ? given : getenv("DCP_WRITER");
    if (named && *named) {
        snprintf(path, sizeof path, "%s", named);
    } else if (!beside_library(path)) {
        return dcp__fail(err, DCP_UNSUPPORTED, "no dcp-writer beside the library, and none named by DCP_WRITER");
    }
    if (!is_executable(path)) {
        return dcp__fail(err, DCP_UNSUPPORTED, "%s cannot be executed: %s", path, strerror(errno));
    }
    m->executable = dcp__strndup(m->ctx, path, strlen(path));
    return m->executable ? DCP_OK : dcp__nomem(err);
}

dcp_status dcp__mover_create(dcp_context *ctx, dcp__host_pool *pool, const char *executable, dcp__mover **out, dcp_error *err)
{
    dcp__mover *m = dcp__calloc(ctx, 1, sizeof *m);
    if (!m) {
        return dcp__nomem(err);
    }
    m->ctx = ctx;
    m->pool = pool;
    pthread_mutex_init(&m->lock, NULL);
    pthread_mutex_init(&m->bounce_lock, NULL);
    dcp_status status = find_executable(m, executable, err);
    if (status != DCP_OK) {
        dcp__mover_free(m);
        return status;
    }
    *out = m;
    return DCP_OK;
}

/* ---- the process; the lock is held ---- */

/* Only the socket goes along. */
static int spawn(dcp__mover *m, int its_end)
{
    posix_spawn_file_actions_t actions;
    char *argv[] = {m->executable, NULL};
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, its_end, STDIN_FILENO);
    posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
    int code = posix_spawn(&m->process, m->executable, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return code;
}

static dcp_status start(dcp__mover *m, dcp_error *err)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return dcp__fail_errno(err, errno, "%s: no socket for it", m->executable);
    }
    int code = spawn(m, ends[1]);
    close(ends[1]);
    if (code != 0) {
        close(ends[0]);
        m->process = 0;
        return dcp__fail_errno(err, code, "%s cannot be started", m->executable);
    }
    m->socket = ends[0];
    m->parent = getpid();
    return DCP_OK;
}

/* A forked child has a copy of the socket, which is the parent's business. */
static void forget_parents(dcp__mover *m)
{
    if (m->process && m->parent != getpid()) {
        close(m->socket);
        m->process = 0;
    }
}

/* Waits for its end for so long at most. What waitpid says of it: 0: it goes on. */
static pid_t await_end(const dcp__mover *m, int most_ms, int *status)
{
    pid_t ended = waitpid(m->process, status, WNOHANG);
    for (int ms = 0; ms < most_ms && (ended == 0 || (ended < 0 && errno == EINTR)); ms++) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        ended = waitpid(m->process, status, WNOHANG);
    }
    return ended;
}

/* Ends it, if it has not ended: it reads the end of the socket, also if a forked child keeps a copy open, or is killed. Returns
 * whether its status is known: a program that ignores SIGCHLD, or waits for all children, takes it away. One that even then hangs
 * in the system ends some day, with what it was writing, which belongs to a save that has failed. */
static bool end(dcp__mover *m, int *status)
{
    shutdown(m->socket, SHUT_RDWR);
    close(m->socket);
    pid_t ended = await_end(m, ENDING_MS, status);
    if (ended == 0) {
        kill(m->process, SIGKILL);
        ended = await_end(m, KILLED_MS, status);
    }
    m->process = 0;
    return ended > 0;
}

static dcp_status tell_end(dcp__mover *m, dcp_error *err)
{
    int status;
    if (!end(m, &status)) {
        return dcp__fail(err, DCP_IO,
                         "the writing process has ended; how is not known, as this program has taken its exit status");
    }
    if (WIFSIGNALED(status)) {
        return dcp__fail(err, DCP_IO, "the writing process was ended by signal %d", WTERMSIG(status));
    }
    return dcp__fail(err, DCP_IO, "the writing process has ended with code %d", WEXITSTATUS(status));
}

static bool send_request(dcp__mover *m, const dcp__mover_request *r, int memory, int file)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)r, sizeof *r};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    const int descriptors[] = {memory, file};
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof descriptors);
    memcpy(CMSG_DATA(c), descriptors, sizeof descriptors);
    ssize_t n;
    do {
        n = sendmsg(m->socket, &message, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *r;
}

static bool receive_answer(dcp__mover *m, dcp__mover_answer *answer)
{
    ssize_t n;
    do {
        n = recv(m->socket, answer, sizeof *answer, 0);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *answer;
}

/* Until it has answered or ended. One that does not answer while the save is to end is killed: it may be stopped, or hang in a
 * write to a storage that is gone. */
static dcp_status await_answer(dcp__mover *m, const dcp__mover_check *check, dcp_error *err)
{
    struct pollfd answers = {m->socket, POLLIN, 0};
    while (poll(&answers, 1, CHECK_MS) <= 0) {
        dcp_status status = ask_whether(check, err);
        if (status != DCP_OK) {
            int unused;
            kill(m->process, SIGKILL);
            end(m, &unused);
            return dcp__prefix(err, status, "the writing process did not answer, and was ended: ");
        }
    }
    return DCP_OK;
}

static dcp_status ask(dcp__mover *m, const dcp__mover_request *r, int memory, int file, const dcp__mover_check *check,
                      dcp__mover_answer *answer, dcp_error *err)
{
    dcp_status status = take(&m->lock, check, err);
    if (status != DCP_OK) {
        return status;
    }
    forget_parents(m);
    if (!m->process) {
        status = ask_whether(check, err);
        status = status == DCP_OK ? start(m, err) : status;
    }
    bool is_sent = status == DCP_OK && send_request(m, r, memory, file);
    status = is_sent ? await_answer(m, check, err) : status;
    if (status == DCP_OK && !(is_sent && receive_answer(m, answer))) {
        status = tell_end(m, err);
    }
    pthread_mutex_unlock(&m->lock);
    return status;
}

/* ---- calls ---- */

/* From a shared block. */
static dcp_status move(dcp__mover *m, const dcp__host_block *b, const void *bytes, size_t n, int file, uint64_t offset,
                       const dcp__mover_check *check, dcp_error *err)
{
    dcp__mover_request request = {DCP__MOVER_VERSION, 0, (uint64_t)((const char *)bytes - b->ptr), offset, n};
    dcp__mover_answer answer = {0};
    dcp_status status = ask(m, &request, b->fd, file, check, &answer, err);
    if (status == DCP_OK && answer.sys_errno) {
        status = dcp__fail_errno(err, answer.sys_errno, "the writing process cannot write %zu bytes at %llu", n,
                                 (unsigned long long)offset);
        if (err) {
            err->offset = offset + answer.written;
        }
    }
    return status;
}

static dcp_status make_bounce(dcp__mover *m, dcp_error *err)
{
    dcp__host_pool_opts opts = {.is_shared = true};
    dcp_status status = m->own ? DCP_OK : dcp__host_pool_create(m->ctx, &opts, &m->own, err);
    return status == DCP_OK && !m->bounce ? dcp__host_pool_acquire(m->own, BOUNCE_BYTES, false, &m->bounce, err) : status;
}

/* From anywhere, piece by piece. The copy costs little: the checksum has just brought these bytes into the cache. */
static dcp_status copy_and_move(dcp__mover *m, const char *bytes, size_t n, int file, uint64_t offset,
                                const dcp__mover_check *check, dcp_error *err)
{
    dcp_status status = take(&m->bounce_lock, check, err);
    if (status != DCP_OK) {
        return status;
    }
    status = make_bounce(m, err);
    for (size_t done = 0; done < n && status == DCP_OK; done += BOUNCE_BYTES) {
        size_t part = n - done < BOUNCE_BYTES ? n - done : BOUNCE_BYTES;
        memcpy(m->bounce->ptr, bytes + done, part);
        status = move(m, m->bounce, m->bounce->ptr, part, file, offset + done, check, err);
    }
    pthread_mutex_unlock(&m->bounce_lock);
    return status;
}

dcp_status dcp__mover_write_at(dcp__mover *m, dcp_file *f, const void *bytes, size_t n, uint64_t offset,
                               const dcp__mover_check *check, dcp_error *err)
{
    int file = dcp__posix_descriptor(f);
    if (!m || file < 0 || n == 0) {
        return f->storage->ops->write_at(f, bytes, n, offset, err);
    }
    const dcp__host_block *b = m->pool ? dcp__host_pool_find(m->pool, bytes, n) : NULL;
    return b && b->fd >= 0 ? move(m, b, bytes, n, file, offset, check, err)
                           : copy_and_move(m, bytes, n, file, offset, check, err);
}

void dcp__mover_free(dcp__mover *m)
{
    if (m) {
        int unused;
        forget_parents(m);
        if (m->process) {
            end(m, &unused);
        }
        dcp__host_pool_free(m->own);
        pthread_mutex_destroy(&m->bounce_lock);
        pthread_mutex_destroy(&m->lock);
        dcp__free(m->ctx, m->executable);
        dcp__free(m->ctx, m);
    }
}

/* ---- for saves without a stager ---- */

dcp_status dcp_helper_create(dcp_context *ctx, const char *path, dcp_helper **out, dcp_error *err)
{
    return out ? dcp__mover_create(dcp__context(ctx), NULL, path, out, err) : dcp__fail(err, DCP_ARG, "helper: no place for it");
}

void dcp_helper_free(dcp_helper *helper)
{
    dcp__mover_free(helper);
}
