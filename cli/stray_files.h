/* stray_files.h - files in a checkpoint's directory that the checkpoint does not name: left over, or put there. */
#ifndef DCP_CLI_STRAY_FILES_H
#define DCP_CLI_STRAY_FILES_H

#include <dcp/dcp.h>

typedef struct stray_file {
    char *name; /* relative to the directory */
    uint64_t bytes;
} stray_file;

/* Zero-initialise before use. */
typedef struct stray_files {
    stray_file *files; /* sorted by name */
    size_t n;
} stray_files;

/* Looks through the directory and a few levels below it. Metadata files are no strays. None if the layout is a single file. */
bool stray_files_find(dcp_context *ctx, const char *dir, dcp_layout layout, const dcp_file_info *known, size_t n_known,
                      stray_files *out, dcp_error *err);
void stray_files_free(stray_files *s);

#endif
