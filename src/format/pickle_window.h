/* The part of a source that the pickle machine has before it. A source in memory is its own window; others are read into a
 * buffer that slides. */
#ifndef DCP_FORMAT_PICKLE_WINDOW_H
#define DCP_FORMAT_PICKLE_WINDOW_H

#include "base/context.h"
#include "base/source.h"

typedef struct dcp__pwindow {
    dcp_context *ctx;
    const dcp__source *src;
    uint8_t *buffer;         /* NULL: the source is memory */
    const uint8_t *start;    /* first byte of the window */
    const uint8_t *end;      /* behind its last */
    uint64_t start_position; /* of `start` in the source */
} dcp__pwindow;

dcp_status dcp__pwindow_open(dcp__pwindow *w, dcp_context *ctx, const dcp__source *src, dcp_error *err);
void dcp__pwindow_close(dcp__pwindow *w);

static inline uint64_t dcp__pwindow_position(const dcp__pwindow *w, const uint8_t *p)
{
    return w->start_position + (uint64_t)(p - w->start);
}

/* Moves the window so that it begins at position, which is within the source or at its end; *p is then w->start. */
dcp_status dcp__pwindow_seek(dcp__pwindow *w, uint64_t position, const uint8_t **p, dcp_error *err);

/* Makes sure that the opcode at *p is in the window with its fixed arguments; *p may move. FORMAT if the source ends before. */
dcp_status dcp__pwindow_opcode(dcp__pwindow *w, const uint8_t **p, dcp_error *err);

/* The lengths of the two lines of a GLOBAL that begin at *p; both lines are then in the window. */
dcp_status dcp__pwindow_lines(dcp__pwindow *w, const uint8_t **p, size_t *first, size_t *second, dcp_error *err);

/* Whether `bytes` at p end within the source: FORMAT otherwise, with what they were to be. */
dcp_status dcp__pwindow_claim(const dcp__pwindow *w, const uint8_t *p, uint64_t bytes, const char *what, dcp_error *err);

#endif
