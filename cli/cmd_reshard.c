/* cmd_reshard.c - dcptool reshard: rewrites a checkpoint as another number of ranks would have written it. */
#include "save_args.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const char doc[] =
    "Rewrite a checkpoint of any form as the ranks of a mesh would have written it: each gets its part of every tensor, in a "
    "file "
    "of its own, in bounded memory. A checkpoint need not be resharded to be loaded by another number of ranks; it is done to "
    "spread the files, or to make loading a matter of long reads.\n"
    "\v"
    "A placement is for the tensors that match GLOB, the first that does. It has one place for each dimension of the mesh: the "
    "axis of the tensor that it splits, or r where it replicates. Without one, the last dimension splits axis 0 and the others "
    "replicate. Splits are those of torch.chunk, so that the last ranks may have less, or nothing. Tensors without dimensions, "
    "and "
    "objects, are on all ranks; each is written once.\n"
    "\n"
    "DST is a directory, which is made if it is not there. SRC is verified first, and nothing is published before all of it is "
    "written.\n"
    "\n"
    "Examples:\n"
    "  dcptool reshard --ranks 8 run/step-1000 eight\n"
    "  dcptool reshard --mesh 2x4 --place '*.weight=0,1' run/step-1000 grid";

enum { KEY_RANKS = 0x300, KEY_MESH, KEY_PLACE, MAX_MESH_DIMS = 8, MAX_RANKS = 4096 };

static const struct argp_option option_list[] = {
    {"ranks", KEY_RANKS, "N", 0, "A mesh of one dimension with N ranks", 0},
    {"mesh", KEY_MESH, "NxM..", 0, "A mesh, such as 2x4", 0},
    {"place", KEY_PLACE, "GLOB=P,..", 0, "Place the tensors GLOB: an axis or r for each dimension of the mesh", 0},
    {0},
};

typedef struct reshard_args {
    save_args save;
    int mesh[MAX_MESH_DIMS];
    dcp_reshard_opts reshard;
    char **places; /* as given, until the mesh is known */
    dcp_placement *placements;
    size_t n_places;
} reshard_args;

static void set_mesh(struct argp_state *state, reshard_args *args)
{
    if (args->reshard.n_mesh) {
        argp_error(state, "--ranks or --mesh is to be given once");
    }
    args->reshard.mesh = args->mesh;
}

static void parse_mesh(struct argp_state *state, reshard_args *args, const char *text)
{
    set_mesh(state, args);
    for (const char *at = text;; at++) {
        char *end = NULL;
        long n = isdigit((unsigned char)*at) ? strtol(at, &end, 10) : 0;
        if (n < 1 || n > MAX_RANKS || args->reshard.n_mesh == MAX_MESH_DIMS || (*end && *end != 'x')) {
            argp_error(state, "'%s' is not a mesh such as 2x4", text);
        }
        args->mesh[args->reshard.n_mesh++] = (int)n;
        if (!*end) {
            return;
        }
        at = end;
    }
}

static void check_size(struct argp_state *state, const reshard_args *args)
{
    long ranks = 1;
    for (int i = 0; i < args->reshard.n_mesh && ranks <= MAX_RANKS; i++) {
        ranks *= args->mesh[i];
    }
    if (args->reshard.n_mesh == 0) {
        argp_error(state, "how many ranks? --ranks N or --mesh NxM");
    }
    if (ranks > MAX_RANKS) {
        argp_error(state, "the mesh has more than %d ranks", MAX_RANKS);
    }
}

static void add_place(reshard_args *args, char *text)
{
    args->places = must_resize(args->places, args->n_places + 1, sizeof *args->places);
    args->places[args->n_places++] = text;
}

/* "0,r" into n axes; false if it is something else. */
static bool parse_axes(const char *text, int *axes, int n)
{
    for (int i = 0; i < n; i++) {
        char *end = NULL;
        if (*text == 'r') {
            axes[i] = DCP_REPLICATE;
            end = (char *)text + 1;
        } else {
            long axis = isdigit((unsigned char)*text) ? strtol(text, &end, 10) : -1;
            if (axis < 0 || axis >= DCP_MAX_NDIM) {
                return false;
            }
            axes[i] = (int)axis;
        }
        if (*end != (i + 1 < n ? ',' : '\0')) {
            return false;
        }
        text = end + 1;
    }
    return true;
}

/* Names may hold "=", places may not. */
static void parse_place(struct argp_state *state, reshard_args *args, size_t i)
{
    char *equals = strrchr(args->places[i], '=');
    int *axes = must_alloc((size_t)args->reshard.n_mesh, sizeof *axes);
    if (!equals || !parse_axes(equals + 1, axes, args->reshard.n_mesh)) {
        argp_error(state, "'%s' is not a pattern, '=' and %d place%s, such as '*=%s'", args->places[i], args->reshard.n_mesh,
                   args->reshard.n_mesh == 1 ? "" : "s", args->reshard.n_mesh == 2 ? "r,0" : "0");
        return;
    }
    *equals = '\0';
    args->placements[i] = (dcp_placement){args->places[i], axes};
}

static void parse_places(struct argp_state *state, reshard_args *args)
{
    args->placements = must_alloc(args->n_places, sizeof *args->placements);
    for (size_t i = 0; i < args->n_places; i++) {
        parse_place(state, args, i);
    }
    args->reshard.placements = args->placements;
    args->reshard.n_placements = args->n_places;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    reshard_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT: state->child_inputs[0] = &args->save; return 0;
    case KEY_RANKS:
        set_mesh(state, args);
        args->mesh[args->reshard.n_mesh++] = (int)options_number(state, "--ranks", arg, 1, MAX_RANKS);
        return 0;
    case KEY_MESH: parse_mesh(state, args, arg); return 0;
    case KEY_PLACE: add_place(args, arg); return 0;
    case ARGP_KEY_END:
        check_size(state, args);
        parse_places(state, args);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void free_args(reshard_args *args)
{
    for (size_t i = 0; i < args->n_places; i++) {
        free((int *)args->placements[i].axes);
    }
    free(args->placements);
    free(args->places);
}

static int reshard(reshard_args *args)
{
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    save_args *s = &args->save;
    if (!save_args_start(s)) {
        return EXIT_PROBLEM;
    }
    dcp_status status = dcp_reshard(s->opts.ctx, s->opts.path, &s->open, s->to, &args->reshard, &s->save, &report, &err);
    return save_args_finish(s, "resharded", status, &report, &err);
}

int cmd_reshard(int argc, char **argv)
{
    const struct argp_child children[] = {{&save_argp, 0, NULL, 0}, {0}};
    const struct argp argp = {option_list, parse, "SRC DST", doc, children, NULL, NULL};
    reshard_args args = {.save = SAVE_ARGS_INIT, .reshard = DCP_RESHARD_OPTS_INIT};
    options_parse(&argp, argc, argv, &args);
    int status = reshard(&args);
    free_args(&args);
    return status;
}
