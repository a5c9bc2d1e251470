#include "devices/core.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all tables below */

/* ---- calls ---- */

typedef struct call {
    char name[48];
    int n, fail_in, code;
} call;

static call calls[128];
static int delay_us, work_fails_in, work_code;

static call *call_of(const char *name)
{
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        if (!calls[i].name[0]) {
            snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        }
        if (strcmp(calls[i].name, name) == 0) {
            return &calls[i];
        }
    }
    abort();
}

static int failure_of_environment(const char *name, int n)
{
    const char *fail = getenv("FAKE_FAIL");
    size_t len = strlen(name);
    if (!fail || strncmp(fail, name, len) != 0 || fail[len] != '=') {
        return 0;
    }
    const char *nth = strchr(fail, '@');
    return !nth || atoi(nth + 1) == n ? atoi(fail + len + 1) : 0;
}

int core_enter(const char *name)
{
    pthread_mutex_lock(&lock);
    call *c = call_of(name);
    c->n++;
    int code = c->fail_in > 0 && --c->fail_in == 0 ? c->code : failure_of_environment(name, c->n);
    pthread_mutex_unlock(&lock);
    return code;
}

int core_log(int result, const char *fmt, ...)
{
    const char *path = getenv("FAKE_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd < 0) {
        return result;
    }
    char text[160], line[200];
    va_list arguments;
    va_start(arguments, fmt);
    vsnprintf(text, sizeof text, fmt, arguments);
    va_end(arguments);
    int n = snprintf(line, sizeof line, "%d %s = %d\n", (int)getpid(), text, result);
    if (write(fd, line, (size_t)n) != n) {
        abort();
    }
    close(fd);
    return result;
}

void core_note(const char *what)
{
    core_enter(what);
    core_log(0, "note %s", what);
}

int fake_count(const char *name)
{
    pthread_mutex_lock(&lock);
    int n = call_of(name)->n;
    pthread_mutex_unlock(&lock);
    return n;
}

void fake_fail(const char *name, int n, int code)
{
    pthread_mutex_lock(&lock);
    call *c = call_of(name);
    c->fail_in = n;
    c->code = code;
    pthread_mutex_unlock(&lock);
}

void fake_fail_work(int n, int code)
{
    pthread_mutex_lock(&lock);
    work_fails_in = n;
    work_code = code;
    pthread_mutex_unlock(&lock);
}

void fake_delay_us(int us)
{
    __atomic_store_n(&delay_us, us, __ATOMIC_RELAXED);
}

/* ---- device memory ---- */

typedef struct allocation {
    char *address, *alias;
    size_t bytes;
    int device;
} allocation;

static allocation allocations[CORE_MAX];

static size_t whole_pages(size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return n ? (n + page - 1) / page * page : page;
}

void *fake_alloc(int device, size_t n)
{
    size_t bytes = whole_pages(n);
    int fd = memfd_create("device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0) {
        abort();
    }
    allocation a = {.bytes = bytes, .device = device};
    a.address = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    a.alias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (allocations[i].address) {
        i++;
    }
    allocations[i] = a;
    pthread_mutex_unlock(&lock);
    return a.address;
}

void fake_free(void *ptr)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CORE_MAX; i++) {
        if (ptr && allocations[i].address == ptr) {
            munmap(allocations[i].address, allocations[i].bytes);
            munmap(allocations[i].alias, allocations[i].bytes);
            allocations[i] = (allocation){0};
        }
    }
    pthread_mutex_unlock(&lock);
}

/* Where the device finds what a pointer of either side names; NULL: on no device. */
static char *alias_of(const void *ptr, size_t n, int *device)
{
    const char *p = ptr;
    char *alias = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CORE_MAX && !alias; i++) {
        const allocation *a = &allocations[i];
        if (a->address && p >= a->address && p + n <= a->address + a->bytes) {
            alias = a->alias + (p - a->address);
            *device = a->device;
        }
    }
    pthread_mutex_unlock(&lock);
    return alias;
}

bool core_is_device(const void *ptr, size_t n, int *device)
{
    return alias_of(ptr, n, device) != NULL;
}

void *fake_peek(const void *ptr)
{
    int device;
    return alias_of(ptr, 1, &device);
}

void core_copy_now(void *dst, const void *src, size_t n)
{
    int device;
    char *to = alias_of(dst, n, &device), *from = alias_of(src, n, &device);
    memcpy(to ? to : dst, from ? from : src, n);
}

/* ---- events ---- */

struct core_event {
    bool is_alive;
    int device, failed;
    uint32_t flags;
    uint64_t recorded, happened;
};

static core_event events[CORE_MAX];
static pthread_cond_t event_happened = PTHREAD_COND_INITIALIZER;

core_event *core_event_create(int device, uint32_t flags)
{
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (events[i].is_alive) {
        i++;
    }
    events[i] = (core_event){.is_alive = true, .device = device, .flags = flags};
    pthread_mutex_unlock(&lock);
    return &events[i];
}

void core_event_destroy(core_event *e)
{
    pthread_mutex_lock(&lock);
    e->is_alive = false;
    pthread_cond_broadcast(&event_happened);
    pthread_mutex_unlock(&lock);
}

bool core_event_is(const core_event *e)
{
    pthread_mutex_lock(&lock);
    bool is_one = e >= events && e < events + CORE_MAX && e->is_alive;
    pthread_mutex_unlock(&lock);
    return is_one;
}

int core_event_device(const core_event *e)
{
    return e->device;
}

uint32_t core_event_flags(const core_event *e)
{
    return e->flags;
}

static void await_event(const core_event *e, uint64_t record)
{
    pthread_mutex_lock(&lock);
    while (e->is_alive && e->happened < record) {
        pthread_cond_wait(&event_happened, &lock);
    }
    pthread_mutex_unlock(&lock);
}

static uint64_t last_record(const core_event *e)
{
    pthread_mutex_lock(&lock);
    uint64_t record = e->recorded;
    pthread_mutex_unlock(&lock);
    return record;
}

int core_event_sync(core_event *e)
{
    await_event(e, last_record(e));
    pthread_mutex_lock(&lock);
    int code = e->failed;
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- streams ---- */

typedef enum work_kind { WORK_COPY, WORK_RECORD, WORK_WAIT, WORK_FILL } work_kind;

typedef struct work {
    work_kind kind;
    void *dst;
    const void *src;
    size_t n;
    core_event *event;
    uint64_t record;
    int value, ms;
    struct work *next;
} work;

struct core_stream {
    int device;
    pthread_t thread;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    work *first, *last;
    bool is_ending, is_working;
    int failed; /* code of work, until somebody waits */
    core_stream *next;
};

static core_stream *streams; /* guarded by the tables' lock */
static core_stream *default_streams[CORE_DEVICES];

static void sleep_us(int us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000L};
    nanosleep(&t, NULL);
}

static int work_failure(void)
{
    pthread_mutex_lock(&lock);
    int code = work_fails_in > 0 && --work_fails_in == 0 ? work_code : 0;
    pthread_mutex_unlock(&lock);
    return code;
}

static void happen(core_event *e, uint64_t record, int failed)
{
    pthread_mutex_lock(&lock);
    e->failed = failed;
    e->happened = record > e->happened ? record : e->happened;
    pthread_cond_broadcast(&event_happened);
    pthread_mutex_unlock(&lock);
}

/* failed: the code of earlier work of the stream. */
static int do_work(const work *w, int failed)
{
    int device, code = w->kind == WORK_COPY || w->kind == WORK_FILL ? work_failure() : 0;
    sleep_us(__atomic_load_n(&delay_us, __ATOMIC_RELAXED) + w->ms * 1000);
    switch (w->kind) {
    case WORK_COPY:
        if (!code) {
            core_copy_now(w->dst, w->src, w->n);
        }
        break;
    case WORK_FILL: memset(alias_of(w->dst, w->n, &device), w->value, w->n); break;
    case WORK_RECORD: happen(w->event, w->record, failed); break;
    case WORK_WAIT: await_event(w->event, w->record); break;
    }
    return code;
}

static void *run_stream(void *arg)
{
    core_stream *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->is_ending || s->first) {
        work *w = s->first;
        if (!w) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        s->first = w->next;
        s->is_working = true;
        int failed = s->failed;
        pthread_mutex_unlock(&s->lock);
        int code = do_work(w, failed);
        free(w);
        pthread_mutex_lock(&s->lock);
        s->failed = s->failed ? s->failed : code;
        s->is_working = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void put(core_stream *s, work w)
{
    work *kept = malloc(sizeof *kept);
    *kept = w;
    kept->next = NULL;
    pthread_mutex_lock(&s->lock);
    if (s->first) {
        s->last->next = kept;
    } else {
        s->first = kept;
    }
    s->last = kept;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

core_stream *core_stream_create(int device)
{
    core_stream *s = calloc(1, sizeof *s);
    s->device = device;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, run_stream, s) != 0) {
        abort();
    }
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    return s;
}

void core_stream_destroy(core_stream *s)
{
    pthread_mutex_lock(&lock);
    core_stream **at = &streams;
    while (*at != s) {
        at = &(*at)->next;
    }
    *at = s->next;
    pthread_mutex_unlock(&lock);
    pthread_mutex_lock(&s->lock);
    s->is_ending = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

bool core_stream_is(const core_stream *s)
{
    pthread_mutex_lock(&lock);
    const core_stream *at = streams;
    while (at && at != s) {
        at = at->next;
    }
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

int core_stream_device(const core_stream *s)
{
    return s->device;
}

int core_stream_sync(core_stream *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->first || s->is_working) {
        pthread_cond_wait(&s->changed, &s->lock);
    }
    int code = s->failed;
    s->failed = 0;
    pthread_mutex_unlock(&s->lock);
    return code;
}

int fake_await(void *stream)
{
    return core_stream_sync(stream);
}

/* Lives as long as the process. */
core_stream *core_default_stream(int device)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!default_streams[device]) {
        default_streams[device] = core_stream_create(device);
    }
    pthread_mutex_unlock(&once);
    return default_streams[device];
}

void core_copy(core_stream *s, void *dst, const void *src, size_t n)
{
    put(s, (work){.kind = WORK_COPY, .dst = dst, .src = src, .n = n});
}

void core_event_record(core_event *e, core_stream *s)
{
    pthread_mutex_lock(&lock);
    uint64_t record = ++e->recorded;
    pthread_mutex_unlock(&lock);
    put(s, (work){.kind = WORK_RECORD, .event = e, .record = record});
}

void core_stream_wait(core_stream *s, core_event *e)
{
    put(s, (work){.kind = WORK_WAIT, .event = e, .record = last_record(e)});
}

void fake_kernel(void *stream, void *ptr, size_t n, int value, int ms)
{
    put(stream, (work){.kind = WORK_FILL, .dst = ptr, .n = n, .value = value, .ms = ms});
}

/* ---- registrations ---- */

typedef struct registration {
    char *ptr;
    size_t bytes;
    int device;
} registration;

static registration registrations[CORE_MAX];
static size_t most_bytes;
static bool is_old;

core_registered core_register(void *ptr, size_t n, int device)
{
    char *p = ptr;
    core_registered result = CORE_OK;
    size_t empty = CORE_MAX;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CORE_MAX; i++) {
        const registration *r = &registrations[i];
        if (!r->ptr) {
            empty = empty == CORE_MAX ? i : empty;
        } else if (r->device == device && p < r->ptr + r->bytes && r->ptr < p + n) {
            result = CORE_OVERLAP;
        }
    }
    if (result == CORE_OK && most_bytes && n > most_bytes) {
        result = CORE_TOO_LARGE;
    }
    if (result == CORE_OK) {
        registrations[empty] = (registration){p, n, device};
    }
    pthread_mutex_unlock(&lock);
    return result;
}

core_registered core_unregister(void *ptr, int device)
{
    core_registered result = CORE_UNKNOWN;
    unsigned char resident;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CORE_MAX && ptr; i++) {
        if (registrations[i].ptr == ptr && registrations[i].device == device) {
            registrations[i] = (registration){0};
            result = CORE_OK;
        }
    }
    pthread_mutex_unlock(&lock);
    if (result == CORE_OK && mincore(ptr, 1, &resident) != 0) {
        core_note("unmapped before it was unregistered");
    }
    return result;
}

bool core_knows(const void *ptr, size_t n, int device)
{
    const char *p = ptr, *end = p + n;
    pthread_mutex_lock(&lock);
    for (bool moved = true; moved && p < end;) { /* a range may lie in several that touch */
        moved = false;
        for (size_t i = 0; i < CORE_MAX; i++) {
            const registration *r = &registrations[i];
            if (r->ptr && (device < 0 || r->device == device) && p >= r->ptr && p < r->ptr + r->bytes) {
                p = r->ptr + r->bytes;
                moved = true;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return p >= end;
}

bool core_is_old(void)
{
    return __atomic_load_n(&is_old, __ATOMIC_RELAXED);
}

void fake_be_old(bool old)
{
    __atomic_store_n(&is_old, old, __ATOMIC_RELAXED);
}

int fake_registrations(void)
{
    int n = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < CORE_MAX; i++) {
        n += registrations[i].ptr != NULL;
    }
    pthread_mutex_unlock(&lock);
    return n;
}

bool fake_is_registered(const void *ptr, size_t bytes)
{
    return core_knows(ptr, bytes, -1);
}

void fake_limit_registration(size_t bytes)
{
    pthread_mutex_lock(&lock);
    most_bytes = bytes;
    pthread_mutex_unlock(&lock);
}

void fake_reset(void)
{
    pthread_mutex_lock(&lock);
    memset(calls, 0, sizeof calls);
    work_fails_in = 0;
    most_bytes = 0;
    pthread_mutex_unlock(&lock);
    fake_delay_us(0);
    fake_be_old(false);
}
