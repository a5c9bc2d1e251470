#include "base/failures.h"

#include <stdio.h>
#include <string.h>

struct dcp_failures {
    dcp_context *ctx;
    dcp_failure *entries; /* by rank; messages are owned */
    size_t count, cap, lost;
};

dcp_status dcp_failures_create(dcp_context *ctx, dcp_failures **out, dcp_error *err)
{
    if (!out) {
        return dcp__fail(err, DCP_ARG, "failures: no place for the result");
    }
    ctx = dcp__context(ctx);
    dcp_failures *f = dcp__calloc(ctx, 1, sizeof *f);
    if (!f) {
        return dcp__nomem(err);
    }
    f->ctx = ctx;
    *out = f;
    return DCP_OK;
}

void dcp_failures_free(dcp_failures *failures)
{
    if (failures) {
        dcp__failures_clear(failures);
        dcp__free(failures->ctx, failures->entries);
        dcp__free(failures->ctx, failures);
    }
}

size_t dcp_failures_count(const dcp_failures *failures)
{
    return failures ? failures->count : 0;
}

const dcp_failure *dcp_failures_at(const dcp_failures *failures, size_t i)
{
    return failures && i < failures->count ? &failures->entries[i] : NULL;
}

size_t dcp_failures_lost(const dcp_failures *failures)
{
    return failures ? failures->lost : 0;
}

void dcp__failures_clear(dcp_failures *failures)
{
    if (failures) {
        for (size_t i = 0; i < failures->count; i++) {
            dcp__free(failures->ctx, (void *)(uintptr_t)failures->entries[i].message);
        }
        failures->count = failures->lost = 0;
    }
}

/* Where the rank stands or belongs. They nearly always come in order. */
static size_t place_of(const dcp_failures *f, int rank)
{
    size_t at = f->count;
    while (at > 0 && f->entries[at - 1].rank >= rank) {
        at--;
    }
    return at;
}

void dcp__failures_add(dcp_failures *failures, const dcp_failure *failure)
{
    if (!failures) {
        return;
    }
    dcp_failures *f = failures;
    size_t at = place_of(f, failure->rank);
    if (at < f->count && f->entries[at].rank == failure->rank) {
        return;
    }
    char *message = dcp__strndup(f->ctx, failure->message, strlen(failure->message));
    if (!message || !dcp__grow(f->ctx, (void **)&f->entries, &f->cap, f->count + 1, sizeof *f->entries)) {
        dcp__free(f->ctx, message);
        f->lost++;
        return;
    }
    memmove(&f->entries[at + 1], &f->entries[at], (f->count - at) * sizeof *f->entries);
    f->entries[at] = *failure;
    f->entries[at].message = message;
    f->count++;
}

/* Bytes that each message may take so that all together stay within room: what short ones leave goes to the long ones. */
static size_t fair_share(const dcp_failure *causes, size_t n, size_t room)
{
    size_t share = room / n;
    for (size_t round = 0; round < n; round++) {
        size_t taken = 0, n_long = 0;
        for (size_t i = 0; i < n; i++) {
            size_t len = strlen(causes[i].message);
            taken += len <= share ? len : 0;
            n_long += len > share;
        }
        share = n_long ? (room - taken) / n_long : share;
    }
    return share;
}

/* Length of the text's beginning that fits into room and does not end inside a character. */
static size_t fitting(const char *text, size_t room)
{
    size_t len = strnlen(text, room + 1);
    if (len <= room) {
        return len;
    }
    len = room;
    while (len > 0 && ((unsigned char)text[len] & 0xc0) == 0x80) {
        len--;
    }
    return len;
}

dcp_status dcp__fail_peers(dcp_error *err, const char *phase, const dcp_failure *causes, size_t total, int size)
{
    if (!err) {
        return DCP_PEER;
    }
    size_t n = total < DCP__CAUSES_SHOWN ? total : DCP__CAUSES_SHOWN;
    dcp__fail(err, DCP_PEER, "%.40s failed on %zu of %d ranks", phase, total, size);
    err->rank = causes[0].rank;
    err->sys_errno = causes[0].sys_errno;
    err->native_code = causes[0].native_code;
    err->offset = causes[0].offset;
    /* For each "; rank 2147483647: " and "...", at the end "; and 2147483647 more". */
    size_t len = strlen(err->message), words = n * 24 + 24;
    size_t share = fair_share(causes, n, sizeof err->message - len - words);
    for (size_t i = 0; i < n; i++) {
        const char *text = causes[i].message;
        size_t shown = fitting(text, share);
        len += (size_t)snprintf(err->message + len, sizeof err->message - len, "%srank %d: %.*s%s", i ? "; " : ": ",
                                causes[i].rank, (int)shown, text, text[shown] ? "..." : "");
    }
    if (total > n) {
        snprintf(err->message + len, sizeof err->message - len, "; and %zu more", total - n);
    }
    return DCP_PEER;
}
