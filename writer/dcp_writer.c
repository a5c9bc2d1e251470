/* dcp-writer: moves ranges of shared memory to files for a process that saves, and does nothing else. It is started by the
 * library, is told what to move over its standard input, and ends when that is closed: with its parent. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/save/mover_protocol.h"

#define PARENT_CHECK_MS 5000

typedef struct job {
    dcp__mover_request request;
    int memory, file;
} job;

/* False when the parent is gone: children that it has forked may hold its end of the socket open. */
static bool wait_for_request(pid_t parent)
{
    struct pollfd requests = {STDIN_FILENO, POLLIN, 0};
    int n;
    while ((n = poll(&requests, 1, PARENT_CHECK_MS)) <= 0) {
        if (getppid() != parent || (n < 0 && errno != EINTR)) {
            return false;
        }
    }
    return true;
}

/* False at the end of the work. */
static bool receive(job *j)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec part = {&j->request, sizeof j->request};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    ssize_t n;
    do {
        n = recvmsg(STDIN_FILENO, &message, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    const struct cmsghdr *c = n == (ssize_t)sizeof j->request ? CMSG_FIRSTHDR(&message) : NULL;
    if (!c || c->cmsg_type != SCM_RIGHTS || c->cmsg_len != CMSG_LEN(2 * sizeof(int))) {
        return false;
    }
    int descriptors[2];
    memcpy(descriptors, CMSG_DATA(c), sizeof descriptors);
    j->memory = descriptors[0];
    j->file = descriptors[1];
    return true;
}

static int put(int file, const char *bytes, uint64_t n, uint64_t offset, uint64_t *written)
{
    while (*written < n) {
        ssize_t put = pwrite(file, bytes + *written, n - *written, (off_t)(offset + *written));
        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return put < 0 ? errno : ENOSPC;
        }
        *written += (uint64_t)put;
    }
    return 0;
}

/* The range is mapped for this job alone, so that no memory of the parent outlives its descriptor. */
static dcp__mover_answer move(const job *j)
{
    const dcp__mover_request *r = &j->request;
    dcp__mover_answer answer = {0};
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), skip = r->memory_offset % page;
    if (r->version != DCP__MOVER_VERSION) {
        answer.sys_errno = EPROTO;
        return answer;
    }
    char *mapped = mmap(NULL, r->bytes + skip, PROT_READ, MAP_SHARED, j->memory, (off_t)(r->memory_offset - skip));
    if (mapped == MAP_FAILED) {
        answer.sys_errno = errno;
        return answer;
    }
    answer.sys_errno = put(j->file, mapped + skip, r->bytes, r->file_offset, &answer.written);
    munmap(mapped, r->bytes + skip);
    return answer;
}

int main(void)
{
    job j;
    pid_t parent = getppid();
    signal(SIGINT, SIG_IGN); /* of a terminal: the parent decides what becomes of its save */
    signal(SIGPIPE, SIG_IGN);
    while (wait_for_request(parent) && receive(&j)) {
        dcp__mover_answer answer = move(&j);
        close(j.memory);
        close(j.file);
        if (send(STDIN_FILENO, &answer, sizeof answer, 0) != (ssize_t)sizeof answer) {
            return 1;
        }
    }
    return 0;
}
