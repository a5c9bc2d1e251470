/* Running the library without the interpreter lock, with signals and progress looked after. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_LOG_BYTES ((size_t)64 << 10)
#define TELL_SECONDS 0.02 /* between two looks at signals, and two calls of progress */

double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- contexts ---- */

/* Warnings, one a line, until there is the interpreter lock again. */
typedef struct context {
    dcp_context *ctx;
    pthread_mutex_t lock; /* guards the fields below */
    char *log;
    size_t log_len;
} context;

static void note_log(void *user, dcp_log_level level, const char *line)
{
    context *c = user;
    size_t len = strlen(line);
    (void)level;
    pthread_mutex_lock(&c->lock);
    char *grown = c->log_len < MAX_LOG_BYTES ? realloc(c->log, c->log_len + len + 2) : NULL;
    if (grown) {
        memcpy(grown + c->log_len, line, len);
        memcpy(grown + c->log_len + len, "\n", 2);
        c->log = grown;
        c->log_len += len + 1;
    }
    pthread_mutex_unlock(&c->lock);
}

static void free_context(PyObject *capsule)
{
    context *c = PyCapsule_GetPointer(capsule, NULL);
    dcp_context_free(c->ctx);
    pthread_mutex_destroy(&c->lock);
    free(c->log);
    free(c);
}

PyObject *context_new(int threads, unsigned long long memory_bytes, dcp_context **out)
{
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    context *c = calloc(1, sizeof *c);
    if (!c) {
        return PyErr_NoMemory();
    }
    pthread_mutex_init(&c->lock, NULL);
    opts.log = note_log;
    opts.log_user = c;
    opts.threads = threads;
    opts.memory_bytes = memory_bytes;
    PyObject *capsule = NULL;
    if (dcp_context_create(&opts, &c->ctx, &err) != DCP_OK) {
        errors_raise(&err, NULL, NULL);
    } else {
        capsule = PyCapsule_New(c, NULL, free_context);
    }
    if (!capsule) {
        dcp_context_free(c->ctx);
        pthread_mutex_destroy(&c->lock);
        free(c);
        return NULL;
    }
    *out = c->ctx;
    return capsule;
}

/* After the work. */
static int emit_log(PyObject *capsule)
{
    const context *c = PyCapsule_GetPointer(capsule, NULL);
    if (!c->log_len) {
        return 0;
    }
    PyObject *text = PyUnicode_DecodeUTF8(c->log, (Py_ssize_t)c->log_len - 1, "replace");
    PyObject *module = text ? PyImport_ImportModule("logging") : NULL;
    PyObject *logger = module ? PyObject_CallMethod(module, "getLogger", "s", "libdcp") : NULL;
    PyObject *lines = logger ? PyUnicode_Splitlines(text, 0) : NULL;
    int result = lines ? 0 : -1;
    for (Py_ssize_t i = 0; lines && i < PyList_Size(lines) && result == 0; i++) {
        PyObject *done = PyObject_CallMethod(logger, "warning", "sO", "%s", PyList_GetItem(lines, i));
        result = done ? 0 : -1;
        Py_XDECREF(done);
    }
    Py_XDECREF(lines);
    Py_XDECREF(logger);
    Py_XDECREF(module);
    Py_XDECREF(text);
    return result;
}

/* ---- begin and end ---- */

int call_begin(core_call *c, int threads, unsigned long long memory_bytes, PyObject *progress)
{
    *c = (core_call){.err = DCP_ERROR_INIT, .is_main = gettid() == getpid(), .caller = pthread_self()};
    if (progress && progress != Py_None) {
        c->control = control_of(progress);
        c->progress = c->control ? NULL : progress;
        if (c->progress && !PyCallable_Check(progress)) {
            PyErr_SetString(PyExc_TypeError, "progress must be callable");
            return -1;
        }
    }
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->context = context_new(threads, memory_bytes, &c->ctx);
    if (!c->context || dcp_failures_create(NULL, &c->failures, &c->err) != DCP_OK) {
        return call_end(c, c->err.code), -1;
    }
    return 0;
}

int call_end(core_call *c, dcp_status status)
{
    int result = c->context ? emit_log(c->context) : 0;
    if (c->exception || status != DCP_OK) {
        PyErr_Clear();
        PyObject *cause = c->exception;
        errors_raise(&c->err, c->failures, cause);
        result = -1;
    }
    dcp_failures_free(c->failures);
    Py_XDECREF(c->context);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    return result;
}

/* ---- signals and progress ---- */

/* With the interpreter lock: looks after signals, and tells the caller where things are. False stops the call. */
static bool look_around(core_call *c, bool is_told, uint64_t done, uint64_t total)
{
    if (PyErr_CheckSignals() < 0) {
        errors_take(&c->exception, NULL);
        return false;
    }
    if (!c->progress || !is_told) {
        return true;
    }
    PyObject *answer = PyObject_CallFunction(c->progress, "KK", (unsigned long long)done, (unsigned long long)total);
    if (!answer) {
        errors_take(&c->exception, NULL);
        return false;
    }
    bool goes_on = answer != Py_False; /* None goes on */
    Py_DECREF(answer);
    return goes_on;
}

static bool is_due(core_call *c, bool is_last)
{
    double t = seconds_now();
    if (!is_last && t - c->last_told < TELL_SECONDS) {
        return false;
    }
    c->last_told = t;
    return true;
}

/* Has the waiting thread tell the caller, and waits for the answer: it can still stop the work. c->lock is held. */
static void hand_over(core_call *c, uint64_t done_bytes, uint64_t total_bytes)
{
    c->done_bytes = done_bytes;
    c->total_bytes = total_bytes;
    c->is_told = false;
    pthread_cond_broadcast(&c->changed);
    while (!c->is_told) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
}

/* From the library, on any thread but one at a time. Where the caller's thread does the work itself, it also looks around. */
bool call_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    core_call *c = user;
    bool is_last = done_bytes == total_bytes, is_own = !c->is_watched && pthread_equal(pthread_self(), c->caller);
    if (c->control && !control_note(c->control, done_bytes, total_bytes)) {
        return false;
    }
    pthread_mutex_lock(&c->lock);
    if (c->is_watched && c->progress && !c->is_stopped && is_due(c, is_last)) {
        hand_over(c, done_bytes, total_bytes);
    }
    bool goes_on = !c->is_stopped;
    pthread_mutex_unlock(&c->lock);
    if (goes_on && is_own && (c->is_main || c->progress) && is_due(c, is_last)) {
        PyGILState_STATE gil = PyGILState_Ensure();
        goes_on = look_around(c, true, done_bytes, total_bytes);
        PyGILState_Release(gil);
        pthread_mutex_lock(&c->lock);
        c->is_stopped |= !goes_on;
        pthread_mutex_unlock(&c->lock);
    }
    return goes_on;
}

/* ---- running ---- */

typedef struct job {
    core_call *call;
    core_work work;
    void *arg;
    dcp_status status;
} job;

static void *run_job(void *arg)
{
    job *j = arg;
    core_call *c = j->call;
    j->status = j->work(j->arg, &c->err);
    pthread_mutex_lock(&c->lock);
    c->is_finished = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Until the job has finished or handed over, or it is time to look after signals. */
static void wait_a_while(core_call *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)(TELL_SECONDS * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&c->lock);
    while (!c->is_finished && c->is_told && pthread_cond_timedwait(&c->changed, &c->lock, &until) == 0) {
    }
    pthread_mutex_unlock(&c->lock);
}

/* Returns true when the job has finished. */
static bool watch_once(core_call *c)
{
    Py_BEGIN_ALLOW_THREADS wait_a_while(c);
    Py_END_ALLOW_THREADS pthread_mutex_lock(&c->lock);
    bool is_finished = c->is_finished, is_told = c->is_told, is_stopped = c->is_stopped;
    uint64_t done = c->done_bytes, total = c->total_bytes;
    pthread_mutex_unlock(&c->lock);
    bool stops = !is_finished && !is_stopped && !look_around(c, !is_told, done, total);
    pthread_mutex_lock(&c->lock);
    c->is_stopped |= stops;
    c->is_told |= !is_told; /* not what was handed over in the meantime */
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return is_finished;
}

dcp_status call_run(core_call *c, core_work work, void *arg, bool may_move)
{
    job j = {c, work, arg, DCP_INTERNAL};
    pthread_t thread;
    if (may_move && (c->is_main || c->progress)) {
        c->is_watched = c->is_told = true;
        if (pthread_create(&thread, NULL, run_job, &j) == 0) {
            while (!watch_once(c)) {
            }
            Py_BEGIN_ALLOW_THREADS pthread_join(thread, NULL);
            Py_END_ALLOW_THREADS return j.status;
        }
        c->is_watched = false;
    }
    Py_BEGIN_ALLOW_THREADS j.status = work(arg, &c->err);
    Py_END_ALLOW_THREADS return j.status;
}

/* ---- small things ---- */

int put(PyObject *dict, const char *key, PyObject *value)
{
    int result = value ? PyDict_SetItemString(dict, key, value) : -1;
    Py_XDECREF(value);
    return result;
}

/* One block: the pointers, then the texts. */
int strings_from(PyObject *texts, const char ***out, size_t *n)
{
    *out = NULL;
    *n = 0;
    if (!texts || texts == Py_None) {
        return 0;
    }
    if (PyUnicode_Check(texts)) {
        PyErr_SetString(PyExc_TypeError, "a sequence of patterns is wanted, not one text");
        return -1;
    }
    PyObject *list = PySequence_List(texts);
    Py_ssize_t count = list ? PyList_Size(list) : 0, bytes = 0, len;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), &len)) {
            Py_CLEAR(list);
            break;
        }
        bytes += len + 1;
    }
    const char **array = list ? malloc((size_t)count * sizeof *array + (size_t)bytes + 1) : NULL;
    if (!array) {
        Py_XDECREF(list);
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    }
    char *at = (char *)(array + count);
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *text = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), &len);
        memcpy(at, text, (size_t)len + 1);
        array[i] = at;
        at += len + 1;
    }
    Py_DECREF(list);
    *out = array;
    *n = (size_t)count;
    return 0;
}

void strings_free(const char **texts)
{
    free((void *)texts);
}
