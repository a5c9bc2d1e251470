#include "progress.h"

#include "cli.h"
#include "escape.h"

#include <inttypes.h>
#include <time.h>
#include <unistd.h>

#define REDRAW_NS 200000000

static int64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

void progress_start(progress *p, bool quiet)
{
    *p = (progress){.is_on = !quiet && isatty(STDERR_FILENO), .start_ns = now_ns()};
    p->shown_ns = p->start_ns;
}

static void draw(double seconds, uint64_t done, uint64_t total)
{
    char done_text[ESCAPE_SIZE_BYTES], total_text[ESCAPE_SIZE_BYTES], rate_text[ESCAPE_SIZE_BYTES];
    double rate = (double)done / seconds;
    fprintf(stderr, "\r%3.0f %%  %s of %s  %s/s", total ? 100 * (double)done / (double)total : 100, escape_size(done, done_text),
            escape_size(total, total_text), escape_size((uint64_t)rate, rate_text));
    if (rate > 0 && total >= done) {
        uint64_t left = (uint64_t)((double)(total - done) / rate);
        fprintf(stderr, "  %" PRIu64 ":%02" PRIu64 " left", left / 60, left % 60);
    }
    fputs("\033[K", stderr);
}

void progress_update(progress *p, uint64_t done_bytes, uint64_t total_bytes)
{
    int64_t now = p->is_on ? now_ns() : 0;
    if (!p->is_on || now - p->shown_ns < REDRAW_NS) {
        return;
    }
    p->shown_ns = now;
    p->is_shown = true;
    draw((double)(now - p->start_ns) * 1e-9, done_bytes, total_bytes);
}

void progress_clear(progress *p)
{
    if (p->is_shown) {
        fputs("\r\033[K", stderr);
        p->is_shown = false;
    }
}
