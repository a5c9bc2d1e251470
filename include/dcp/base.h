/*
 * dcp/base.h - status codes, errors, contexts.
 *
 * Every fallible function of the library returns a dcp_status and fills an optional, caller-owned dcp_error:
 *
 *     dcp_error err = DCP_ERROR_INIT;
 *     dcp_checkpoint *ck;
 *     if (dcp_checkpoint_open(NULL, "run/step-1000", NULL, &ck, &err) != DCP_OK) {
 *         fprintf(stderr, "%s: %s\n", dcp_status_name(err.code), err.message);
 *         return 1;
 *     }
 *
 * Outputs are written only on success. Nothing is kept per thread or per process.
 *
 * Threads: a dcp_context may be used by any number of threads at once; a dcp_error belongs to one call at a time.
 */
#ifndef DCP_BASE_H
#define DCP_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(DCP_STATIC) || !defined(__GNUC__)
#define DCP_API
#else
#define DCP_API __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define DCP_PRINTF(fmt_arg, first_arg) __attribute__((format(printf, fmt_arg, first_arg)))
#else
#define DCP_PRINTF(fmt_arg, first_arg)
#endif

/* What the _INIT macros of structs are made of: struct_size is set, and all else is zero, but for one member in DCP_INIT_WITH.
 * They are good C and good C++ (which has no designated initialisers before C++20), and need no change when a struct grows. */
#ifdef __cplusplus
template <typename type> inline type dcp_sized()
{
    type made = type();
    made.struct_size = sizeof(type);
    return made;
}
template <typename type, typename part, typename given> inline type dcp_sized_with(part type::*member, given value)
{
    type made = dcp_sized<type>();
    made.*member = value;
    return made;
}
#define DCP_INIT(type) dcp_sized<type>()
#define DCP_INIT_WITH(type, member, ...) dcp_sized_with(&type::member, __VA_ARGS__)
#else
/* clang-format off */
#define DCP_INIT(type) {.struct_size = sizeof(type)}
#define DCP_INIT_WITH(type, member, ...) {.struct_size = sizeof(type), .member = __VA_ARGS__}
/* clang-format on */
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define DCP_VERSION_MAJOR 0
#define DCP_VERSION_MINOR 1
#define DCP_VERSION_PATCH 0
#define DCP_VERSION_STRING "0.1.0"

/* Version of the library that is linked, "major.minor.patch". */
DCP_API const char *dcp_version(void);

/* Result of a call. Values are stable; new ones are only appended. */
typedef enum dcp_status {
    DCP_OK = 0,
    DCP_ARG = -1,         /* an argument is wrong in itself */
    DCP_STATE = -2,       /* call out of order, or a precondition does not hold */
    DCP_NOMEM = -3,       /* the allocator returned NULL */
    DCP_UNSUPPORTED = -4, /* a feature, library or device is absent */
    DCP_INTERNAL = -5,    /* a fault of this library */
    DCP_NOT_FOUND = -6,   /* no such item, file or checkpoint */
    DCP_EXISTS = -7,      /* something is in the way and may not be replaced */
    DCP_IO = -8,          /* the storage failed; see sys_errno */
    DCP_NOSPACE = -9,     /* the storage is full */
    DCP_DEVICE = -10,     /* a device or its driver refused; see native_code */
    DCP_TIMEOUT = -11,    /* a deadline passed */
    DCP_CANCELED = -12,   /* stopped by the caller */
    DCP_FORMAT = -13,     /* the content of a file is not acceptable */
    DCP_CHECKSUM = -14,   /* stored and computed checksums differ */
    DCP_LIMIT = -15,      /* a limit of dcp_limits was exceeded */
    DCP_MISMATCH = -16,   /* shape, dtype, kind or structure differs from what was asked for */
    DCP_PEER = -17        /* one or more ranks failed; see dcp_failures */
} dcp_status;

/* Name of a status without the prefix, "FORMAT" for DCP_FORMAT; "?" for unknown values. Never NULL. */
DCP_API const char *dcp_status_name(dcp_status status);

#define DCP_NO_OFFSET UINT64_MAX
#define DCP_ERROR_MESSAGE_BYTES 1024

/* What went wrong. Initialise with DCP_ERROR_INIT; a successful call leaves it alone. */
typedef struct dcp_error {
    size_t struct_size;
    dcp_status code;
    int sys_errno;                         /* errno of the failed system call, 0 if none */
    int64_t native_code;                   /* code of a device driver or MPI, 0 if none */
    int rank;                              /* rank where it happened, -1 if not a matter of ranks */
    uint64_t offset;                       /* byte position in the file that the message names, DCP_NO_OFFSET if none */
    char message[DCP_ERROR_MESSAGE_BYTES]; /* one line, UTF-8, lower case, no final dot; cut with "..." */
} dcp_error;

/* clang-format off */
#define DCP_ERROR_INIT {sizeof(dcp_error), DCP_OK, 0, 0, -1, DCP_NO_OFFSET, {0}}
/* clang-format on */

/* A string of known length. Names in checkpoints may be empty, hold NUL bytes or lone surrogates (WTF-8). Strings that the
 * library hands out are also NUL-terminated. */
typedef struct dcp_str {
    const char *ptr;
    size_t len;
} dcp_str;

/* View of a NUL-terminated string. */
DCP_API dcp_str dcp_str_of(const char *text);

/* Memory comes from one function: ptr NULL allocates, bytes 0 frees (and returns NULL), otherwise the block is resized.
 * Alignment as malloc's. Called from several threads at once. */
typedef struct dcp_allocator {
    void *(*resize)(void *user, void *ptr, size_t bytes);
    void *user;
} dcp_allocator;

typedef enum dcp_log_level { DCP_LOG_ERROR = 0, DCP_LOG_WARNING = 1, DCP_LOG_INFO = 2, DCP_LOG_DEBUG = 3 } dcp_log_level;

/* Receives one line without a newline. Called from any thread, possibly from several at once. */
typedef void (*dcp_log_fn)(void *user, dcp_log_level level, const char *line);

/* Bounds for everything that is taken from a file. 0 in a field means the default named here. */
typedef struct dcp_limits {
    size_t struct_size;
    uint32_t max_depth;        /* nesting of containers in a pickle: 256 */
    uint64_t max_parse_bytes;  /* memory that one parser may take beyond its input's size: 4 GiB */
    uint64_t max_string_bytes; /* one name or text in a pickle: 1 GiB */
    uint64_t max_header_bytes; /* JSON header of a safetensors file: 100 MB, as the reference reader's */
    uint64_t max_list_index;   /* list index in a flattened path: 1,000,000 */
} dcp_limits;

#define DCP_LIMITS_INIT DCP_INIT(dcp_limits)

typedef struct dcp_context_opts {
    size_t struct_size;
    const dcp_allocator *allocator; /* copied; NULL: malloc */
    dcp_log_fn log;                 /* NULL: silence */
    void *log_user;
    dcp_log_level log_level; /* messages above it are not formatted */
    int threads;             /* workers for I/O and hashing; 0: as many as the process may use, at most 8 */
    uint64_t memory_bytes;   /* budget for buffers of one operation; 0: 192 MiB */
    dcp_limits limits;
} dcp_context_opts;

/* clang-format off */
#define DCP_CONTEXT_OPTS_INIT {sizeof(dcp_context_opts), NULL, NULL, NULL, DCP_LOG_WARNING, 0, 0, DCP_LIMITS_INIT}
/* clang-format on */

/* What calls share: allocator, log, limits, number of threads. Wherever a dcp_context is asked for, NULL means a built-in
 * one with all defaults. A context must outlive all that was made with it. */
typedef struct dcp_context dcp_context;

/* Makes a context. opts may be NULL. Errors: ARG, NOMEM. Local. */
DCP_API dcp_status dcp_context_create(const dcp_context_opts *opts, dcp_context **out, dcp_error *err);

/* Frees a context; NULL is allowed. */
DCP_API void dcp_context_free(dcp_context *ctx);

/* Frees a text that the library allocated for the context ctx; NULL is allowed. */
DCP_API void dcp_text_free(dcp_context *ctx, char *text);

/* ---- failures of several ranks ---- */

/* Why one rank failed. */
typedef struct dcp_failure {
    int rank; /* in the group of the communicator that was used, not among all processes */
    dcp_status code;
    int sys_errno; /* as in dcp_error, and so are the next two */
    int64_t native_code;
    uint64_t offset;
    const char *message; /* never NULL */
} dcp_failure;

/* Which ranks failed in a collective call that returned DCP_PEER, sorted by rank: each rank once, and none that did not fail.
 * Calls that take a list empty it first. One thread at a time. */
typedef struct dcp_failures dcp_failures;

/* Makes an empty list. Errors: ARG, NOMEM. Local. */
DCP_API dcp_status dcp_failures_create(dcp_context *ctx, dcp_failures **out, dcp_error *err);
/* NULL is allowed. */
DCP_API void dcp_failures_free(dcp_failures *failures);
/* Number of failures; 0 for NULL. */
DCP_API size_t dcp_failures_count(const dcp_failures *failures);
/* The i-th failure, valid until the list is used in another call; NULL if there is none. */
DCP_API const dcp_failure *dcp_failures_at(const dcp_failures *failures, size_t i);
/* How many more there were that did not find room for want of memory; 0 for NULL. */
DCP_API size_t dcp_failures_lost(const dcp_failures *failures);

/* ---- for authors of storages and communicators ---- */

/* Fills err (may be NULL) as printf does, with sys_errno and native_code 0 and no offset, and returns code. */
DCP_API dcp_status dcp_error_set(dcp_error *err, dcp_status code, const char *fmt, ...) DCP_PRINTF(3, 4);
/* Memory from the context's allocator, by the rules of dcp_allocator. ctx may be NULL. */
DCP_API void *dcp_context_resize(dcp_context *ctx, void *ptr, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
