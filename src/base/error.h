/* Filling a dcp_error. Each returns the code, so that a fault is reported in one line: return dcp__fail(err, DCP_ARG, ...). */
#ifndef DCP_BASE_ERROR_H
#define DCP_BASE_ERROR_H

#include "dcp/base.h"

/* err may be NULL everywhere. */
dcp_status dcp__fail(dcp_error *err, dcp_status code, const char *fmt, ...) DCP_PRINTF(3, 4);
dcp_status dcp__fail_at(dcp_error *err, dcp_status code, uint64_t offset, const char *fmt, ...) DCP_PRINTF(4, 5);
/* Code from errno: ENOENT NOT_FOUND, EEXIST EXISTS, ENOSPC/EDQUOT NOSPACE, ENOMEM NOMEM, ENOTSUP/ENOSYS UNSUPPORTED, else IO.
 * The message ends in the text of the errno. */
dcp_status dcp__fail_errno(dcp_error *err, int sys_errno, const char *fmt, ...) DCP_PRINTF(3, 4);
dcp_status dcp__nomem(dcp_error *err);
/* Copies an error that somebody else has found; ARG if it says OK. */
dcp_status dcp__fail_as(dcp_error *err, const dcp_error *found);
/* Puts text in front of the message, as in "file __0_0.distcp: "; returns the error's code. */
dcp_status dcp__prefix(dcp_error *err, dcp_status code, const char *fmt, ...) DCP_PRINTF(3, 4);

/* A name from a file, fit to print: at most 200 bytes, control characters escaped. For "%s". */
typedef struct dcp__printable {
    char text[220];
} dcp__printable;
dcp__printable dcp__print(dcp_str s);

/* What a noun of which there are n ends in: "s" unless n is 1. */
static inline const char *dcp__plural(uint64_t n)
{
    return n == 1 ? "" : "s";
}

#endif
