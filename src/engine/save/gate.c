#include "engine/save/gate.h"

#include <stddef.h>

void dcp__gate_init(dcp__gate *g, int room)
{
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->left, NULL);
    g->room = room;
}

void dcp__gate_reset(dcp__gate *g)
{
    pthread_cond_destroy(&g->left);
    pthread_mutex_destroy(&g->lock);
}

void dcp__gate_enter(dcp__gate *g)
{
    if (g) {
        pthread_mutex_lock(&g->lock);
        while (g->room == 0) {
            pthread_cond_wait(&g->left, &g->lock);
        }
        g->room--;
        pthread_mutex_unlock(&g->lock);
    }
}

void dcp__gate_leave(dcp__gate *g)
{
    if (g) {
        pthread_mutex_lock(&g->lock);
        g->room++;
        pthread_cond_signal(&g->left);
        pthread_mutex_unlock(&g->lock);
    }
}
