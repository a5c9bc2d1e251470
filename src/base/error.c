#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *dcp_version(void)
{
    return DCP_VERSION_STRING;
}

const char *dcp_status_name(dcp_status status)
{
    static const char *const names[] = {
        "OK",      "ARG",    "STATE",   "NOMEM",    "UNSUPPORTED", "INTERNAL", "NOT_FOUND", "EXISTS",   "IO",
        "NOSPACE", "DEVICE", "TIMEOUT", "CANCELED", "FORMAT",      "CHECKSUM", "LIMIT",     "MISMATCH", "PEER",
    };
    int i = -(int)status;
    return i >= 0 && i < (int)(sizeof names / sizeof names[0]) ? names[i] : "?";
}

dcp_str dcp_str_of(const char *text)
{
    return (dcp_str){text, text ? strlen(text) : 0};
}

static bool is_continuation(char c)
{
    return ((unsigned char)c & 0xc0) == 0x80;
}

/* Marks a message that did not fit, and does not leave half a character before the mark. */
static void mark_cut(dcp_error *err, int wanted)
{
    if (wanted < (int)sizeof err->message) {
        return;
    }
    size_t at = sizeof err->message - 4;
    for (int i = 0; i < 3 && is_continuation(err->message[at]); i++) {
        at--;
    }
    memcpy(err->message + at, "...", 4);
}

static void fill(dcp_error *err, dcp_status code, int sys_errno, uint64_t offset, const char *fmt, va_list args)
{
    err->code = code;
    err->sys_errno = sys_errno;
    err->native_code = 0;
    err->offset = offset;
    mark_cut(err, vsnprintf(err->message, sizeof err->message, fmt, args));
}

dcp_status dcp__fail(dcp_error *err, dcp_status code, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, code, 0, DCP_NO_OFFSET, fmt, args);
        va_end(args);
    }
    return code;
}

dcp_status dcp__fail_at(dcp_error *err, dcp_status code, uint64_t offset, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, code, 0, offset, fmt, args);
        va_end(args);
    }
    return code;
}

dcp_status dcp_error_set(dcp_error *err, dcp_status code, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, code, 0, DCP_NO_OFFSET, fmt, args);
        va_end(args);
    }
    return code;
}

static dcp_status status_of_errno(int sys_errno)
{
    switch (sys_errno) {
    case ENOENT:
    case ENOTDIR: return DCP_NOT_FOUND;
    case EEXIST: return DCP_EXISTS;
    case ENOSPC:
    case EDQUOT: return DCP_NOSPACE;
    case ENOMEM: return DCP_NOMEM;
    case ENOTSUP:
    case ENOSYS: return DCP_UNSUPPORTED;
    default: return DCP_IO;
    }
}

dcp_status dcp__fail_errno(dcp_error *err, int sys_errno, const char *fmt, ...)
{
    dcp_status code = status_of_errno(sys_errno);
    if (err) {
        va_list args;
        va_start(args, fmt);
        fill(err, code, sys_errno, DCP_NO_OFFSET, fmt, args);
        va_end(args);
        char text[128];
        /* The GNU form: may return a constant instead of using the buffer. */
        const char *reason = strerror_r(sys_errno, text, sizeof text);
        size_t len = strlen(err->message);
        mark_cut(err, (int)len + snprintf(err->message + len, sizeof err->message - len, ": %s", reason));
    }
    return code;
}

dcp_status dcp__nomem(dcp_error *err)
{
    return dcp__fail(err, DCP_NOMEM, "out of memory");
}

dcp_status dcp__fail_as(dcp_error *err, const dcp_error *found)
{
    if (found->code == DCP_OK) {
        return dcp__fail(err, DCP_ARG, "an error that says OK was given");
    }
    if (err) {
        *err = *found;
    }
    return found->code;
}

dcp_status dcp__prefix(dcp_error *err, dcp_status code, const char *fmt, ...)
{
    if (err) {
        char rest[DCP_ERROR_MESSAGE_BYTES];
        memcpy(rest, err->message, sizeof rest);
        va_list args;
        va_start(args, fmt);
        int len = vsnprintf(err->message, sizeof err->message, fmt, args);
        va_end(args);
        if (len >= 0 && len < (int)sizeof err->message) {
            len += snprintf(err->message + len, sizeof err->message - (size_t)len, "%s", rest);
        }
        mark_cut(err, len);
    }
    return code;
}

dcp__printable dcp__print(dcp_str s)
{
    dcp__printable out;
    size_t n = 0;
    for (size_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.ptr[i];
        if (n > 200 && (!is_continuation(s.ptr[i]) || n > 206)) {
            memcpy(out.text + n, "...", 4);
            return out;
        }
        if (c < 0x20 || c == 0x7f) {
            n += (size_t)snprintf(out.text + n, 5, "\\x%02x", c);
        } else {
            out.text[n++] = (char)c;
        }
    }
    out.text[n] = 0;
    return out;
}
