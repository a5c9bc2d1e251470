/* A load from a torch.save file that one rank reads for all. */
#ifndef DCP_ENGINE_TORCHFILE_H
#define DCP_ENGINE_TORCHFILE_H

#include "engine/load/load.h"

/* dcp_load with opts->torchfile, which is not NULL. path NULL: the reader's. Collective. */
dcp_status dcp__load_torchfile(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts,
                               dcp_load_report *report, dcp_error *err);

#endif
