/* Copies between host memory that Python objects own: by several threads, without the interpreter lock. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core.h"

/* What one thread copies at a time. Large enough for memcpy to go past the caches. */
#define PIECE_BYTES ((size_t)32 << 20)
#define PART_BYTES ((size_t)4 << 20) /* of a piece: what the kernel is asked to give at a time */
#define MAX_THREADS 16

typedef struct piece {
    char *target;
    const char *source;
    size_t bytes;
} piece;

typedef struct copy_job {
    piece *pieces;
    size_t n, capacity;
    size_t bytes;
    atomic_size_t next;
} copy_job;

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Has the kernel give the whole pages of a target at once, if the first of them was never touched: one by one, as they are
 * written to, takes half as long again. Where it cannot, the copy does. */
static void expect_pages(char *target, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), head = (page - (uintptr_t)target % page) % page;
    unsigned char is_there;
    if (bytes >= head + page && mincore(target + head, page, &is_there) == 0 && !(is_there & 1)) {
        madvise(target + head, (bytes - head) & ~(page - 1), MADV_POPULATE_WRITE);
    }
}

static void copy_piece(const piece *p)
{
    for (size_t at = 0; at < p->bytes; at += PART_BYTES) {
        size_t bytes = p->bytes - at < PART_BYTES ? p->bytes - at : PART_BYTES;
        expect_pages(p->target + at, bytes);
        memcpy(p->target + at, p->source + at, bytes);
    }
}

static void *copy_pieces(void *arg)
{
    copy_job *job = arg;
    size_t i;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->n) {
        copy_piece(&job->pieces[i]);
    }
    return NULL;
}

/* The caller copies, too, so that a thread that does not start is only a loss of time. */
static void copy_by_threads(copy_job *job, size_t n_threads)
{
    pthread_t threads[MAX_THREADS];
    size_t n_started = 0;
    while (n_started + 1 < n_threads && n_started + 1 < job->n && n_started < MAX_THREADS &&
           pthread_create(&threads[n_started], NULL, copy_pieces, job) == 0) {
        n_started++;
    }
    copy_pieces(job);
    for (size_t i = 0; i < n_started; i++) {
        pthread_join(threads[i], NULL);
    }
}

static int add_piece(copy_job *job, char *target, const char *source, size_t bytes)
{
    if (job->n == job->capacity) {
        size_t capacity = job->capacity ? 2 * job->capacity : 64;
        piece *pieces = realloc(job->pieces, capacity * sizeof *pieces);
        if (!pieces) {
            PyErr_NoMemory();
            return -1;
        }
        job->pieces = pieces;
        job->capacity = capacity;
    }
    job->pieces[job->n++] = (piece){target, source, bytes};
    return 0;
}

static int add_copy(copy_job *job, PyObject *copy)
{
    unsigned long long target, source;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(copy, "KKn:copy_many", &target, &source, &bytes)) {
        return -1;
    }
    if (bytes < 0 || (bytes > 0 && (!target || !source))) {
        PyErr_SetString(PyExc_ValueError, "copy_many takes (target address, source address, bytes)");
        return -1;
    }
    size_t left = (size_t)bytes;
    job->bytes += left;
    for (size_t done = 0; left > 0;) {
        size_t piece_bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
        if (add_piece(job, (char *)(uintptr_t)target + done, (const char *)(uintptr_t)source + done, piece_bytes) < 0) {
            return -1;
        }
        done += piece_bytes;
        left -= piece_bytes;
    }
    return 0;
}

static int add_copies(copy_job *job, PyObject *copies)
{
    PyObject *iterator = PyObject_GetIter(copies), *copy;
    if (!iterator) {
        return -1;
    }
    int result = 0;
    while (result == 0 && (copy = PyIter_Next(iterator))) {
        result = PyTuple_Check(copy) ? add_copy(job, copy) : -1;
        if (!PyTuple_Check(copy)) {
            PyErr_SetString(PyExc_TypeError, "copy_many takes tuples");
        }
        Py_DECREF(copy);
    }
    Py_DECREF(iterator);
    return result == 0 && PyErr_Occurred() ? -1 : result;
}

PyObject *core_copy_many(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *keywords[] = {"copies", "threads", NULL};
    PyObject *copies;
    int n_threads = 2;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|i:copy_many", keywords, &copies, &n_threads)) {
        return NULL;
    }
    copy_job job = {0};
    int result = add_copies(&job, copies);
    if (result == 0) {
        Py_BEGIN_ALLOW_THREADS
            /* Starting a thread takes as long as copying some hundred KiB. */
            copy_by_threads(&job, job.bytes < PIECE_BYTES / 16 || n_threads < 1 ? 1 : (size_t)n_threads);
        Py_END_ALLOW_THREADS
    }
    free(job.pieces);
    return result == 0 ? PyLong_FromSize_t(job.bytes) : NULL;
}
