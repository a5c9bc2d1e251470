/* The error that names who did not come. Uses public calls only: libdcp_mpi includes it too. */
#ifndef DCP_COMM_MISSING_H
#define DCP_COMM_MISSING_H

#include <stdio.h>

#include "dcp/backend.h"

/* Room for the first ranks of a group, in words. */
#define DCP__RANKS_SHOWN 16

/* "rank 3" or "ranks 1, 3 and 5 more" for the entries that are false; returns the first of them, -1 if there is none. */
static inline int dcp__name_missing(const bool *is_here, int size, char *text, size_t room)
{
    int first = -1, n = 0;
    size_t len = 0;
    for (int r = 0; r < size; r++) {
        if (is_here[r]) {
            continue;
        }
        first = n == 0 ? r : first;
        if (n++ < DCP__RANKS_SHOWN) {
            len += (size_t)snprintf(text + len, room - len, n == 1 ? "%d" : ", %d", r);
        }
    }
    if (n > DCP__RANKS_SHOWN) {
        snprintf(text + len, room - len, " and %d more", n - DCP__RANKS_SHOWN);
    }
    return first;
}

/* TIMEOUT, naming the ranks whose entry is false. */
static inline dcp_status dcp__fail_missing(const bool *is_here, int size, uint32_t timeout_ms, dcp_error *err)
{
    char text[DCP__RANKS_SHOWN * 12 + 32] = "";
    int first = dcp__name_missing(is_here, size, text, sizeof text);
    dcp_error_set(err, DCP_TIMEOUT, "of %d ranks these did not arrive within %u ms: %s", size, timeout_ms, text);
    if (err) {
        err->rank = first;
    }
    return DCP_TIMEOUT;
}

#endif
