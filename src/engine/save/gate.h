/* Lets a bounded number of threads through at once: ranks of one process that write, so that their buffers stay bounded. */
#ifndef DCP_ENGINE_GATE_H
#define DCP_ENGINE_GATE_H

#include <pthread.h>

typedef struct dcp__gate {
    pthread_mutex_t lock; /* guards room */
    pthread_cond_t left;
    int room;
} dcp__gate;

void dcp__gate_init(dcp__gate *g, int room);
void dcp__gate_reset(dcp__gate *g);
/* Waits for room. NULL: there is no gate. */
void dcp__gate_enter(dcp__gate *g);
void dcp__gate_leave(dcp__gate *g);

#endif
