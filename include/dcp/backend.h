/*
 * dcp/backend.h - the table that a storage implements. For authors of storages; users of the library need only checkpoint.h.
 *
 * A storage is a flat or nested name space of byte files below one root. Names are relative, parts separated by "/", never
 * with a leading "/" and never with "." or ".." parts: the library checks names that come from files before it asks. There is
 * one exception: a user who opens a checkpoint with allow_outside has names from files passed on as they are. A storage without
 * anything outside its root answers ARG to those.
 *
 * Threads: every function may be called from several threads at once, also on one file.
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
    /* Makes a directory and its parents; present ones are fine. name "" makes the root. NULL: nothing to do. */
    dcp_status (*make_dir)(dcp_storage *st, const char *name, dcp_error *err);
    /* Makes names created, renamed or removed in a directory durable. NULL: nothing to do. */
    dcp_status (*sync_dir)(dcp_storage *st, const char *name, dcp_error *err);
    /* Takes an exclusive lock on an open file without waiting: *locked is false if another holder, in this process or
     * another, has it. Held until close. NULL: no locks, the caller goes on and reports. */
    dcp_status (*lock)(dcp_file *f, bool *locked, dcp_error *err);
    void (*free)(dcp_storage *st);
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

#ifdef __cplusplus
}
#endif
#endif
