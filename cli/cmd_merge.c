/* cmd_merge.c - dcptool merge: one checkpoint of what the ranks of a save without communication have left. */
#include "save_args.h"

static const char doc[] =
    "Merge what each rank has saved for itself, without communication, into a checkpoint that PyTorch loads on any number of "
    "ranks. Parts of sharded tensors are united. A name that several ranks hold with different values becomes rank.<r>.<name>; "
    "where the values are equal, there is one.\n"
    "\v"
    "SRC has a __<r>.metadata of each rank; a missing rank, or one of another save, is an error. DST is a directory, which is "
    "made "
    "if it is not there. Nothing is published before all of it is written.\n"
    "\n"
    "Example:\n"
    "  dcptool merge run/local-1000 run/step-1000";

int cmd_merge(int argc, char **argv)
{
    save_args args = SAVE_ARGS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    save_args_parse(&args, argc, argv, doc);
    if (!save_args_start(&args)) {
        return EXIT_PROBLEM;
    }
    dcp_status status = dcp_merge(args.opts.ctx, args.opts.path, &args.open, args.to, &args.save, &report, &err);
    return save_args_finish(&args, "merged", status, &report, &err);
}
