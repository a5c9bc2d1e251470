/* What the storages share: checks of arguments, so that all of them refuse the same things in the same way. */
#ifndef DCP_STORAGE_STORAGE_H
#define DCP_STORAGE_STORAGE_H

#include "base/context.h"
#include "dcp/backend.h"

/* ARG for combinations of dcp_open_flags that make no sense, and for unknown bits. */
dcp_status dcp__open_flags_check(const char *name, unsigned flags, dcp_error *err);
/* ARG if n bytes at offset end beyond what a file can hold (INT64_MAX). */
dcp_status dcp__io_range_check(const char *name, size_t n, uint64_t offset, dcp_error *err);
/* ARG unless st is there and its table is complete and of our version. */
dcp_status dcp__storage_check(const dcp_storage *st, dcp_error *err);
/* False if the name is absolute, or a ".." in it would climb above the root whatever the directories are. */
bool dcp__name_is_beneath(const char *name);

/* What became of sync or sync_dir, which are called once: a second call may not tell of the failure again. A storage that cannot
 * do it is no failure; another one goes to err, which may be NULL. */
dcp_status dcp__synced(dcp_status status, const dcp_error *fault, dcp_error *err);

/* Opens a file, which is made if absent, and takes its lock, if the storage has locks: *out is open while it is held, and is NULL
 * if another holder has it. Whoever has it may rename or remove the file before it is closed. */
dcp_status dcp__open_locked(dcp_storage *st, const char *name, dcp_file **out, dcp_error *err);

/* Writes a whole file, over what is there, and makes it durable if that is wanted and the storage can. Removed if that fails. */
dcp_status dcp__write_file(dcp_storage *st, const char *name, const void *bytes, size_t n, bool is_durable, dcp_error *err);

/* The descriptor of an open file of dcp_storage_posix; -1 for files of others. */
int dcp__posix_descriptor(const dcp_file *f);

#endif
