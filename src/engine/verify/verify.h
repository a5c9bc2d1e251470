/* What the files of the verification share. */
#ifndef DCP_ENGINE_VERIFY_H
#define DCP_ENGINE_VERIFY_H

#include "engine/read/checkpoint.h"

/* Who reads a storage: a chunk of a tensor entry, or an object entry. */
typedef struct dcp__use {
    uint32_t entry;
    uint32_t chunk; /* index in meta->chunks, DCP__NO_STORAGE for objects */
} dcp__use;

/* One distinct byte range of a file that is there and long enough. */
typedef struct dcp__verify_record {
    uint32_t file;
    uint32_t storage;  /* one of those that name the range */
    size_t first, end; /* the storages that name it: ranges.order[first .. end) */
    uint64_t offset, length;
    uint64_t gap;              /* where the range before it ends */
    const dcp__digest *digest; /* NULL: none */
} dcp__verify_record;

typedef struct dcp__verify {
    dcp_checkpoint *ck;
    dcp_verify_opts opts;
    const dcp__ranges *ranges;
    size_t *first_use; /* [storage]: n_storages + 1 values */
    dcp__use *uses;    /* in order of storages */
    dcp__verify_record *records;
    size_t n_records;

    pthread_mutex_t lock; /* guards the fields below and calls of the caller's functions */
    dcp_verify_report report;
    uint64_t done, total, told; /* bytes; told: when progress was last reported */
    bool is_canceled;
} dcp__verify;

/* Reports one defect. file < 0 and fqn.ptr NULL: none. */
void dcp__verify_defect(dcp__verify *v, int64_t file, dcp_str fqn, dcp_status code, uint64_t offset, const char *fmt, ...)
    DCP_PRINTF(6, 7);
/* Turns a failure into a defect and returns DCP_OK, unless it is none of the checkpoint's: NOMEM and CANCELED are passed on in
 * err. `base` is added to the failure's offset; one without gets `base`. */
dcp_status dcp__verify_note(dcp__verify *v, int64_t file, dcp_str fqn, uint64_t base, const dcp_error *fault, dcp_error *err);
/* Counts bytes that were read; CANCELED if the caller wants no more. */
dcp_status dcp__verify_advance(dcp__verify *v, uint64_t bytes, dcp_error *err);
/* Name of the first item that reads a record; ptr NULL if none does. */
dcp_str dcp__verify_fqn(const dcp__verify *v, const dcp__verify_record *r);

/* verify_shape.c: what the metadata says about tensors, without looking at files. */
dcp_status dcp__verify_entries(dcp__verify *v, dcp_error *err);
/* verify_files.c: presence and length of files, overlaps of ranges; fills in v->records. */
dcp_status dcp__verify_files(dcp__verify *v, dcp_error *err);
/* verify_payload.c: content of the records. */
dcp_status dcp__verify_payload(dcp__verify *v, dcp_error *err);

#endif
