/* A safetensors file to be made, alone or one of a directory. */
#ifndef DCP_ENGINE_CONVERT_SAFETENSORS_H
#define DCP_ENGINE_CONVERT_SAFETENSORS_H

#include "engine/convert/convert.h"

typedef struct dcp__cv_tensors {
    dcp__cv_file file;
    dcp__buf header;
    dcp__cv_place *places;
} dcp__cv_tensors;

/* Lays out a file with these items of the selection, n of them (borrowed: reordered so that wide elements come first and all are
 * aligned). name is borrowed. Errors: those of dcp__safetensors_header, with the file's name. */
dcp_status dcp__cv_lay_out_tensors(const dcp__selection *s, const char *name, size_t *items, size_t n, dcp__cv_tensors *out,
                                   dcp_error *err);
void dcp__cv_tensors_reset(dcp__cv_tensors *t, dcp_context *ctx);

/* What is no tensor, in a torch.save file of that name; nothing if there is none. */
dcp_status dcp__cv_put_objects(const dcp__selection *s, const char *name, dcp_error *err);

#endif
