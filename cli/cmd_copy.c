/* cmd_copy.c - dcptool copy: reads any checkpoint and writes a clean one. */
#include "save_args.h"

static const char doc[] =
    "Copy a checkpoint of any form into a directory that PyTorch loads, without what no metadata names. Values, chunks and ties "
    "stay as they are; the checksum of everything read is checked. Values that single ranks have of their own become "
    "rank.<r>.<name>.\n"
    "\v"
    "DST is a directory, which is made if it is not there. Nothing is published before all of it is written: whatever stops a "
    "copy leaves the checkpoint that was there. With --force a checkpoint may be copied over itself.\n"
    "\n"
    "Examples:\n"
    "  dcptool copy run/step-1000 clean\n"
    "  dcptool copy --transform zstd --files 4 model.safetensors packed\n"
    "  dcptool copy --force --target 2.1 run/step-1000 run/step-1000";

int cmd_copy(int argc, char **argv)
{
    save_args args = SAVE_ARGS_INIT;
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    save_args_parse(&args, argc, argv, doc);
    if (!save_args_start(&args)) {
        return EXIT_PROBLEM;
    }
    dcp_status status = dcp_copy(args.opts.ctx, args.opts.path, &args.open, args.to, &args.save, &report, &err);
    return save_args_finish(&args, "copied", status, &report, &err);
}
