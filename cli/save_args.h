/* save_args.h - what copy, merge and reshard share: SRC and DST, options of the save, its report. */
#ifndef DCP_CLI_SAVE_ARGS_H
#define DCP_CLI_SAVE_ARGS_H

#include "cli.h"
#include "progress.h"

typedef struct save_args {
    options opts; /* opts.path is SRC */
    const char *to;
    dcp_open_opts open;
    dcp_save_opts save;
    progress progress;
} save_args;

#define SAVE_ARGS_INIT                                                                                                           \
    {                                                                                                                            \
        .open = DCP_OPEN_OPTS_INIT, .save = DCP_SAVE_OPTS_INIT                                                                   \
    }

/* To be listed as child of the argp of a command with options of its own, its input a struct save_args. Takes both arguments. */
extern const struct argp save_argp;
/* For commands without options of their own. */
void save_args_parse(save_args *args, int argc, char **argv, const char *doc);

/* After parsing: makes the context, and starts the progress line. False: the reason has been printed. */
bool save_args_start(save_args *args);
/* Prints the report of a save that went well, or the error, and frees the context. verb: "copied". Returns the exit status. */
int save_args_finish(save_args *args, const char *verb, dcp_status status, const dcp_save_report *report, const dcp_error *err);

#endif
