#include "cli.h"
#include "escape.h"

#include <errno.h>
#include <string.h>

void complain(const char *fmt, ...)
{
    char line[2 * DCP_ERROR_MESSAGE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    fputs("dcptool: ", stderr);
    escape_print(stderr, dcp_str_of(line), ESCAPE_TEXT);
    fputc('\n', stderr);
}

void complain_error(const dcp_error *err)
{
    if (err->offset == DCP_NO_OFFSET) {
        complain("%s", err->message);
    } else {
        complain("%s (at byte %llu)", err->message, (unsigned long long)err->offset);
    }
}

/* A full disk may first show when the buffer is written out, long after the call that filled it. */
static bool reported;

static void report_write_error(void)
{
    if (!reported) {
        complain("cannot write to standard output: %s", errno ? strerror(errno) : "write error");
        reported = true;
    }
}

bool output_failed(void)
{
    if (!ferror(stdout)) {
        return false;
    }
    report_write_error();
    return true;
}

bool output_close(void)
{
    if (output_failed()) {
        return false;
    }
    errno = 0;
    if (fclose(stdout) != 0) {
        report_write_error();
        return false;
    }
    return true;
}
