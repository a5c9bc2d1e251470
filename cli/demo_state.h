/*
 * demo_state.h - the made-up training state of dcptool demo.
 *
 * Some layers with weights, biases and an optimizer's moments, all sharded; norms and counters, replicated; a random state that
 * each rank has for itself; a few objects. Every element is a function of its tensor and its place in it, so that each rank can
 * check what it has loaded, whoever saved it.
 */
#ifndef DCP_CLI_DEMO_STATE_H
#define DCP_CLI_DEMO_STATE_H

#include <dcp/dcp.h>

/* The name that each rank has for itself. */
#define DEMO_PER_RANK "rng"

typedef struct demo_model {
    int64_t width;
} demo_model;

/* A model whose state takes about that many bytes, at least some 100 KiB. */
demo_model demo_model_of_size(uint64_t bytes);

typedef struct demo_state demo_state;

/* The part of one rank: every sharded tensor is cut along `axis`, or along its only one. filled false: memory for loading, with
 * nothing in it. has_own: with the rank's random state. NULL: the reason is in err. */
demo_state *demo_state_create(demo_model model, int rank, int ranks, int axis, bool filled, bool has_own, dcp_error *err);
dcp_value *demo_state_value(const demo_state *s);
/* Compares every value with what it should be. Returns the number of wrong ones, *checked that of all, *name one that is wrong.
 */
uint64_t demo_state_check(const demo_state *s, uint64_t *checked, const char **name);
void demo_state_free(demo_state *s); /* NULL is allowed */

#endif
