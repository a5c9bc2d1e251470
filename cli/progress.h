/* progress.h - one line on a terminal: share done, rate, time left. Silent if stderr is no terminal. */
#ifndef DCP_CLI_PROGRESS_H
#define DCP_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    bool is_on, is_shown;
    int64_t start_ns, shown_ns;
} progress;

void progress_start(progress *p, bool quiet);
/* Redraws a few times a second at most. */
void progress_update(progress *p, uint64_t done_bytes, uint64_t total_bytes);
/* Wipes the line, so that something else can be printed; the next update draws it again. */
void progress_clear(progress *p);

#endif
