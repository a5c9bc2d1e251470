/*
 * dcp/backend.h - storages and communicators: those of the library, and the tables that others implement.
 *
 * Storages
 *
 * A storage is a flat or nested name space of byte files below one root. Names are relative, parts separated by "/", never
 * with a leading "/" and never with "." or ".." parts: the library checks names that come from files before it asks. There is
 * one exception: a user who opens a checkpoint with allow_outside has names from files passed on as they are. A storage without
 * anything outside its root answers ARG to those.
 *
 * Threads: every function may be called from several threads at once, also on one file.
 *
 * Communicators
 *
 * A communicator connects the ranks of one group, each with a handle of its own. Ranks count from 0 within the group, whatever
 * the processes are called elsewhere: in a group made of processes 1 and 3 of a job, these are ranks 0 and 1.
 *
 *     dcp_comm *comm;
 *     if (dcp_comm_mpi(NULL, MPI_COMM_WORLD, 0, &comm, &err) != DCP_OK) { ... }    (dcp/mpi.h)
 *     ... saves and loads ...
 *     dcp_comm_free(comm);
 *
 * Collective: dcp_comm_alltoall, _all_gather, _barrier, _broadcast_device and _duplicate. All ranks of the group call the same
 * ones in the same order. All other calls are local.
 *
 * Deadlines: a collective call waits for the other ranks at most timeout_ms milliseconds, 0 meaning the communicator's default
 * (30 minutes if none was set). Then it returns TIMEOUT; the message names the ranks that did not arrive where the
 * communicator can know them.
 *
 * After a collective call failed, the communicator is broken: every later collective call on it returns STATE at once, with the
 * first failure in the message. Ranks that were not waiting learn of it when they come, or by their own deadline. Some failures
 * leave it whole: a refused concurrent call (below), and dcp_comm_duplicate returning NOMEM, PEER or UNSUPPORTED.
 *
 * Threads: one collective call at a time for each handle; a second one from another thread meanwhile is refused with STATE. Calls
 * may come from different threads one after the other, but see DCP_COMM_ANY_THREAD. Different handles are independent.
 */
#ifndef DCP_BACKEND_H
#define DCP_BACKEND_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DCP_STORAGE_ABI 1

typedef struct dcp_storage dcp_storage;
typedef struct dcp_storage_ops dcp_storage_ops;

/* An open file of a storage. Implementations embed it first. */
typedef struct dcp_file {
    dcp_storage *storage;
} dcp_file;

/* Implementations embed it first. */
struct dcp_storage {
    const dcp_storage_ops *ops;
};

typedef enum dcp_open_flags {
    DCP_OPEN_READ = 1,
    DCP_OPEN_WRITE = 2,
    DCP_OPEN_CREATE = 4,     /* with WRITE: make it if absent */
    DCP_OPEN_EXCLUSIVE = 8,  /* with CREATE: fail with EXISTS if present */
    DCP_OPEN_TRUNCATE = 16,  /* with WRITE: set the length to 0 */
    DCP_OPEN_BENEATH = 32,   /* nothing may lead out of the root: ARG if the name does, IO with EXDEV or ELOOP if a symbolic
                                link on its way does */
    DCP_OPEN_DIRECT = 64,    /* a wish: bypass the page cache; the caller keeps buffer, offset and size aligned to 4096.
                               UNSUPPORTED if the storage cannot. */
    DCP_OPEN_WRITEBACK = 128 /* a wish: a sync will follow, so begin to bring to the disk what is written while more comes.
                                Storages that cannot ignore it. */
} dcp_open_flags;

typedef enum dcp_entry_type { DCP_ENTRY_FILE = 1, DCP_ENTRY_DIR = 2, DCP_ENTRY_OTHER = 3 } dcp_entry_type;

typedef struct dcp_stat {
    dcp_entry_type type;
    uint64_t bytes;
    int64_t mtime_ns; /* since 1970; 0 if unknown */
} dcp_stat;

typedef enum dcp_storage_caps {
    DCP_STORAGE_RENAME = 1,       /* rename replaces an existing file atomically */
    DCP_STORAGE_RANDOM_WRITE = 2, /* write_at at any offset, from several threads */
    DCP_STORAGE_DURABLE = 4       /* sync means something */
} dcp_storage_caps;

/* Called once per entry, in any order; a non-zero result stops the listing and is returned, with err left alone. name is valid
 * for the call. It may call the storage. */
typedef dcp_status (*dcp_list_fn)(void *user, const char *name, dcp_entry_type type);

struct dcp_storage_ops {
    size_t struct_size;
    uint32_t abi_version; /* DCP_STORAGE_ABI */
    uint32_t caps;        /* dcp_storage_caps */
    const char *name;     /* "posix" */

    /* Opens a regular file. Does not make directories. Errors: NOT_FOUND, EXISTS, UNSUPPORTED, ARG (flags, name), NOSPACE, NOMEM,
     * IO; a directory is IO with EISDIR, other special files (FIFOs, devices) are IO without having been waited for or read. */
    dcp_status (*open)(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err);
    /* Reads up to n bytes at offset; *got < n only at the end of the file. Never a short read otherwise. ARG if offset + n is
     * beyond INT64_MAX, here and in write_at. */
    dcp_status (*read_at)(dcp_file *f, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err);
    /* Writes all n bytes at offset or fails. Ranges of concurrent calls are disjoint. Durable only after sync. */
    dcp_status (*write_at)(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err);
    /* Makes what was written durable. UNSUPPORTED if the storage refuses (EINVAL, ENOTSUP): the caller goes on and reports. */
    dcp_status (*sync)(dcp_file *f, dcp_error *err);
    /* Closes in every case; returns an error if data could be lost. */
    dcp_status (*close)(dcp_file *f, dcp_error *err);
    /* NOT_FOUND if absent. name "" is the root. Follows symbolic links. bytes is 0 for all but regular files. */
    dcp_status (*stat)(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err);
    dcp_status (*list)(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err);
    /* Renames a file. Atomic, replaces an existing file. NULL or UNSUPPORTED: the caller publishes by writing the final name
     * last. */
    dcp_status (*rename)(dcp_storage *st, const char *from, const char *to, dcp_error *err);
    /* Removes a file or an empty directory. NOT_FOUND if absent. */
    dcp_status (*remove)(dcp_storage *st, const char *name, dcp_error *err);
    /* Makes a directory and its parents, and their names durable; present ones are fine. name "" makes the root. NULL: nothing to
     * do. */
    dcp_status (*make_dir)(dcp_storage *st, const char *name, dcp_error *err);
    /* Makes names created, renamed or removed in a directory durable. NULL: nothing to do. */
    dcp_status (*sync_dir)(dcp_storage *st, const char *name, dcp_error *err);
    /* Takes an exclusive lock on an open file without waiting: *locked is false if another holder, in this process or
     * another, has it, or if the file is no longer the one of that name, since whoever finds the name then locks another file.
     * Held until close. NULL: no locks, the caller goes on and reports. */
    dcp_status (*lock)(dcp_file *f, bool *locked, dcp_error *err);
    void (*free)(dcp_storage *st);
    /* Bytes that may still be written below a directory, as far as is known now: other writers may be faster. NULL: unknown. */
    dcp_status (*space)(dcp_storage *st, const char *name, uint64_t *free_bytes, dcp_error *err);
};

/* Files below a directory of the local file system. root is copied; it need not exist. Errors: NOMEM, ARG. */
DCP_API dcp_status dcp_storage_posix(dcp_context *ctx, const char *root, dcp_storage **out, dcp_error *err);
/* Files in memory, empty at first; gone with dcp_storage_free. No links; a directory is there if it was made or if a file's name
 * goes through it. */
DCP_API dcp_status dcp_storage_memory(dcp_context *ctx, dcp_storage **out, dcp_error *err);

/* What went through a counting storage: calls, also those that failed (sync_dir counts as a sync), and bytes that arrived. */
typedef struct dcp_storage_counts {
    uint64_t opens, reads, writes, syncs, lists, stats, renames, removes;
    uint64_t bytes_read, bytes_written;
} dcp_storage_counts;

/* Passes everything on to inner (borrowed) and counts. counts is updated atomically and must outlive the storage. */
DCP_API dcp_status dcp_storage_count(dcp_context *ctx, dcp_storage *inner, dcp_storage_counts *counts, dcp_storage **out,
                                     dcp_error *err);

typedef enum dcp_storage_op {
    DCP_OP_OPEN,
    DCP_OP_READ,
    DCP_OP_WRITE,
    DCP_OP_SYNC,
    DCP_OP_CLOSE,
    DCP_OP_STAT,
    DCP_OP_LIST,
    DCP_OP_RENAME,
    DCP_OP_REMOVE,
    DCP_OP_MAKE_DIR,
    DCP_OP_SYNC_DIR,
    DCP_OP_LOCK,
    DCP_OP_COUNT
} dcp_storage_op;

/* Decides before each call on inner: DCP_OK lets it through, DCP_IO and others fail it with that status and sys_errno in err
 * if the function set it. For READ and WRITE n and offset are the request's. Called under a lock, one at a time. */
typedef dcp_status (*dcp_fault_fn)(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err);

/* Passes everything on to inner (borrowed) unless fn says otherwise. */
DCP_API dcp_status dcp_storage_fault(dcp_context *ctx, dcp_storage *inner, dcp_fault_fn fn, void *user, dcp_storage **out,
                                     dcp_error *err);

/* Frees a storage; all its files must be closed. NULL is allowed. */
DCP_API void dcp_storage_free(dcp_storage *st);

/* ---- communicators ---- */

#define DCP_COMM_ABI 1
#define DCP_COMM_TIMEOUT_MS 1800000u /* default deadline: 30 minutes */

typedef struct dcp_comm_ops dcp_comm_ops;

typedef enum dcp_comm_caps {
    DCP_COMM_ANY_THREAD = 1, /* works from a thread of its own while the caller communicates by other means on his; what an
                                asynchronous save needs */
} dcp_comm_caps;

/* Implementations embed it first and have dcp_comm_init fill it. */
typedef struct dcp_comm {
    const dcp_comm_ops *ops;
    dcp_context *ctx;
    int rank;            /* of this handle, 0 to size - 1 */
    int size;            /* of the group, 1 or more */
    unsigned caps;       /* dcp_comm_caps */
    uint32_t timeout_ms; /* default deadline, not 0 */
    uint32_t state;      /* of the library: in use, broken */
    void *reserve;       /* of the library: memory to tell of a failure when there is none left */
} dcp_comm;

/* What goes to one rank. */
typedef struct dcp_comm_send {
    const void *ptr;
    size_t bytes;
} dcp_comm_send;

/* What comes from one rank. */
typedef struct dcp_comm_recv {
    void *ptr;
    size_t bytes;
} dcp_comm_recv;

/* The library calls these only for one thread at a time, never after a failure, with a timeout_ms that is not 0 and an err that
 * is not NULL. A function that fails ends the group's work: it need not get the others out of it, but where it can, they learn of
 * it before their deadline. When a function returns, whatever its result, nothing reads or writes the caller's memory any more.
 */
struct dcp_comm_ops {
    size_t struct_size;
    uint32_t abi_version; /* DCP_COMM_ABI */
    const char *name;     /* "threads" */

    /* Sends send[r].bytes to each rank r and receives recv[r].bytes from it, also from itself. Both arrays have `size` entries;
     * the sizes were agreed on before, so that what one rank sends is what the other expects: where it is noticed that they
     * differ the call returns MISMATCH. An entry of 0 bytes costs nothing (ptr may be NULL), and nobody need wait for such a
     * rank. The memory of send and recv does not overlap. Errors: TIMEOUT, MISMATCH, STATE (ranks called different functions), IO
     * (the network; see native_code), or the failure of another rank. */
    dcp_status (*alltoall)(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                           dcp_error *err);
    /* Brings the n bytes (1 to some hundred, equal on all ranks) of every rank to every rank: size * n bytes at `all`, in the
     * order of ranks. No rank returns OK before all have called. Errors: as alltoall. */
    dcp_status (*all_gather)(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms, dcp_error *err);
    /* Copies device memory of `root` to the device memory of all others, in order with the work on `stream` (a handle of the
     * device's driver, NULL for its default). NULL: none, the data goes through host memory. */
    dcp_status (*broadcast_device)(dcp_comm *comm, void *device_ptr, size_t bytes, int root, void *stream, uint32_t timeout_ms,
                                   dcp_error *err);
    /* Makes a communicator of the same ranks whose traffic never meets that of this one. Either all ranks get one or none: NOMEM
     * on a rank without memory and PEER on the others leave this communicator whole. NULL: UNSUPPORTED. */
    dcp_status (*duplicate)(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err);
    /* Frees the handle, with dcp_comm_reset and without waiting for other ranks, also after a failure. */
    void (*free)(dcp_comm *comm);
};

/* A group of one. Errors: ARG, NOMEM. */
DCP_API dcp_status dcp_comm_self(dcp_context *ctx, dcp_comm **out, dcp_error *err);

/* Connects `size` ranks that are threads of this process: out[r] is the handle of rank r. The handles are freed one by one. ctx
 * is used from all of the threads. Errors: ARG (size < 1), NOMEM. */
DCP_API dcp_status dcp_comm_threads(dcp_context *ctx, int size, dcp_comm **out, dcp_error *err);

/* Functions of another runtime that connect its ranks. The rules are those of dcp_comm_ops, with `user` in place of the handle.
 * alltoall and all_gather may come from any thread, one at a time. */
typedef struct dcp_comm_callbacks {
    size_t struct_size;
    void *user;
    int rank, size;
    unsigned caps; /* dcp_comm_caps */
    dcp_status (*alltoall)(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms, dcp_error *err);
    dcp_status (*all_gather)(void *user, const void *mine, size_t n, void *all, uint32_t timeout_ms,
                             dcp_error *err); /* NULL: by alltoall */
    /* Gives the `user` of a separate group of the same ranks. NULL: UNSUPPORTED. */
    dcp_status (*duplicate)(void *user, uint32_t timeout_ms, void **out, dcp_error *err);
    void (*release)(void *user); /* when the communicator is freed, and not if making it failed; NULL: nothing to do */
    /* NULL: none. All ranks have one, or none has. */
    dcp_status (*broadcast_device)(void *user, void *device_ptr, size_t bytes, int root, void *stream, uint32_t timeout_ms,
                                   dcp_error *err);
} dcp_comm_callbacks;

#define DCP_COMM_CALLBACKS_INIT DCP_INIT(dcp_comm_callbacks)

/* A communicator out of functions; callbacks is copied. Errors: ARG (no alltoall, rank not in 0 to size - 1), NOMEM. */
DCP_API dcp_status dcp_comm_from_callbacks(dcp_context *ctx, const dcp_comm_callbacks *callbacks, dcp_comm **out, dcp_error *err);

DCP_API int dcp_comm_rank(const dcp_comm *comm);
DCP_API int dcp_comm_size(const dcp_comm *comm);
/* Sets the default deadline, which duplicates inherit; 0: 30 minutes. Ranks may differ. Local; not during a collective call. */
DCP_API void dcp_comm_set_timeout(dcp_comm *comm, uint32_t timeout_ms);
/* True after a collective call failed. */
DCP_API bool dcp_comm_is_broken(const dcp_comm *comm);

/* The functions of the table, with the rules above about use at the same time, deadlines and failures. Errors: those of the
 * table, and STATE. */
DCP_API dcp_status dcp_comm_alltoall(dcp_comm *comm, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                     dcp_error *err);
DCP_API dcp_status dcp_comm_all_gather(dcp_comm *comm, const void *mine, size_t n, void *all, uint32_t timeout_ms,
                                       dcp_error *err);
/* Returns when all ranks have called. */
DCP_API dcp_status dcp_comm_barrier(dcp_comm *comm, uint32_t timeout_ms, dcp_error *err);
/* UNSUPPORTED, without having broken the communicator, if the table has none; dcp_device_broadcast (device.h) has a way for these
 * too. */
DCP_API dcp_status dcp_comm_broadcast_device(dcp_comm *comm, void *device_ptr, size_t bytes, int root, void *stream,
                                             uint32_t timeout_ms, dcp_error *err);
DCP_API dcp_status dcp_comm_duplicate(dcp_comm *comm, uint32_t timeout_ms, dcp_comm **out, dcp_error *err);
/* Frees a handle that no call is using; NULL is allowed. Does not wait for other ranks; they free theirs. */
DCP_API void dcp_comm_free(dcp_comm *comm);

/* For authors: fills the base of a communicator; all memory that later calls need is taken here. Errors: ARG, NOMEM. */
DCP_API dcp_status dcp_comm_init(dcp_comm *comm, dcp_context *ctx, const dcp_comm_ops *ops, int rank, int size, unsigned caps,
                                 dcp_error *err);
/* For authors: frees what dcp_comm_init took. */
DCP_API void dcp_comm_reset(dcp_comm *comm);

#ifdef __cplusplus
}
#endif
#endif
