/*
 * A device that is none, for tests: what the look-alikes of the vendors' libraries share.
 *
 * Device memory is mapped twice: its "device address" cannot be accessed, so that a host access faults, and what streams do goes
 * through the other mapping. Streams are threads; each piece of work may be delayed, so that whoever does not wait sees old
 * bytes. Calls are counted and can be made to fail.
 *
 * Each library has a copy of this of its own, and exports the functions that begin with fake_ to the tests.
 */
#ifndef TESTS_DEVICES_CORE_H
#define TESTS_DEVICES_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define CORE_DEVICES 2
#define CORE_MAX 4096 /* allocations, registrations, events: of each */

/* ---- for the tests ---- */

/* Forgets failures, counts and delays; memory and registrations stay. */
EXPORT void fake_reset(void);
/* Calls of a function since fake_reset, or all that were noted under such a name by the library itself. */
EXPORT int fake_count(const char *call);
/* The n-th call from now on (1: the next) of that name returns code, once. */
EXPORT void fake_fail(const char *call, int n, int code);
/* The n-th piece of work from now on that any stream does fails: whoever waits for the stream gets code. */
EXPORT void fake_fail_work(int n, int code);
/* For programs that cannot call these: FAKE_FAIL="name=code" in the environment makes each call of that name return code, with
 * "@3" behind it the third. FAKE_LOG names a file to which calls that set devices or register memory append "<pid> <call> =
 * <result>". */

/* Each piece of work takes so long. */
EXPORT void fake_delay_us(int us);
/* Registrations that there are. */
EXPORT int fake_registrations(void);
EXPORT bool fake_is_registered(const void *ptr, size_t bytes);
/* Largest range that may be registered; 0: any. */
EXPORT void fake_limit_registration(size_t bytes);
/* Behave as drivers did some releases ago. */
EXPORT void fake_be_old(bool is_old);
/* Memory of the device, as the device sees it. */
EXPORT void *fake_peek(const void *device_ptr);
/* Puts work into a stream: sleeps, then fills. */
EXPORT void fake_kernel(void *stream, void *device_ptr, size_t n, int value, int ms);
EXPORT int fake_await(void *stream); /* waits for all work in it */
EXPORT void *fake_alloc(int device, size_t n);
EXPORT void fake_free(void *device_ptr);

/* ---- for the look-alikes ---- */

typedef struct core_stream core_stream;
typedef struct core_event core_event;

/* Counts a call; the code that it is to fail with, 0: none. */
int core_enter(const char *call);
void core_note(const char *what);
/* Appends to the log, if there is one. Returns result. */
int core_log(int result, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

bool core_is_device(const void *ptr, size_t n, int *device);

core_stream *core_stream_create(int device);
void core_stream_destroy(core_stream *s);
bool core_stream_is(const core_stream *s); /* a stream that is alive */
int core_stream_device(const core_stream *s);
int core_stream_sync(core_stream *s); /* 0, or the code of work that failed */
core_stream *core_default_stream(int device);
void core_copy(core_stream *s, void *dst, const void *src, size_t n);
void core_copy_now(void *dst, const void *src, size_t n);

core_event *core_event_create(int device, uint32_t flags);
uint32_t core_event_flags(const core_event *e);
void core_event_destroy(core_event *e);
bool core_event_is(const core_event *e);
int core_event_device(const core_event *e);
void core_event_record(core_event *e, core_stream *s);
int core_event_sync(core_event *e); /* 0, or the code of work before it that failed */
void core_stream_wait(core_stream *s, core_event *e);

typedef enum core_registered { CORE_OK, CORE_OVERLAP, CORE_UNKNOWN, CORE_TOO_LARGE } core_registered;
core_registered core_register(void *ptr, size_t n, int device);
core_registered core_unregister(void *ptr, int device);
bool core_knows(const void *ptr, size_t n, int device); /* device -1: any */
bool core_is_old(void);

#endif
