/* Back ends behind dcp_device_open, and what they share. */
#ifndef DCP_DEVICE_DEVICE_H
#define DCP_DEVICE_DEVICE_H

#include "base/context.h"
#include "dcp/device.h"

dcp_status dcp__host_device_open(dcp_context *ctx, dcp_device_driver **out, dcp_error *err);
dcp_status dcp__cuda_open(dcp_context *ctx, const char *library, dcp_device_driver **out, dcp_error *err);
dcp_status dcp__acl_open(dcp_context *ctx, const char *library, dcp_device_driver **out, dcp_error *err);

/* A library to be tried: a name for the dynamic linker or a path. */
typedef struct dcp__library {
    void *handle;
    char message[256]; /* the linker's last one */
} dcp__library;

/* Opens the first of n names that can be; a copy that is loaded already comes first. It is never closed: the vendors' libraries
 * do not survive that. Errors: UNSUPPORTED. */
dcp_status dcp__library_open(dcp__library *l, const char *what, const char *const *names, size_t n, dcp_error *err);

/* A function to be looked up: where its address goes, and whether the library may lack it. */
typedef struct dcp__symbol {
    const char *name;
    size_t offset; /* in the table of functions */
    bool is_optional;
} dcp__symbol;

/* Fills a table of function pointers. Errors: UNSUPPORTED, naming what is missing. */
dcp_status dcp__library_bind(const dcp__library *l, const char *what, const dcp__symbol *symbols, size_t n, void *table,
                             dcp_error *err);

#endif
