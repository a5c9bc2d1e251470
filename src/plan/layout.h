/* Where every byte of a save goes: records, their files and offsets, before the first byte is written. Pure. */
#ifndef DCP_PLAN_LAYOUT_H
#define DCP_PLAN_LAYOUT_H

#include "format/archive_writer.h"
#include "format/pickle_writer.h"
#include "plan/save_plan.h"

/* One record. A tensor record has its item's tensor as its only storage, an object record the tensors inside the object. */
typedef struct dcp__record {
    const dcp_write_item *item;         /* the first that it is for; tied items share it */
    const dcp__archive_layout *archive; /* NULL: in a safetensors blob */
    dcp__write_storage *storages;       /* objects */
    size_t n_storages;                  /* tensors: 1 */
    uint64_t offset, length;            /* in the file; with transforms not known before writing */
    uint32_t file;
} dcp__record;

typedef struct dcp__layout_file {
    size_t first, n;      /* records, in order of offset */
    uint64_t bytes;       /* of the file; with transforms not known */
    uint8_t *blob_header; /* safetensors: what stands before the tensors */
    size_t blob_header_bytes;
    uint64_t blob_offset;
} dcp__layout_file;

typedef struct dcp__layout_opts {
    int files; /* >= 1 */
    bool file_per_item;
    bool align_payloads;
    bool is_safetensors;
} dcp__layout_opts;

typedef struct dcp__layout {
    dcp_context *ctx;
    dcp__arena arena; /* pickles, storages, blob headers */
    dcp__record *records;
    size_t n_records;
    uint32_t *record_of_item; /* [item index in the plan] */
    dcp__layout_file *files;
    size_t n_files;
    dcp__archive_layout **archives; /* all templates, to be freed */
    size_t n_archives, cap_archives;
    uint64_t payload_bytes;
} dcp__layout;

/* Lays out a plan, which stays borrowed. Free in every case. Errors: ARG, LIMIT, UNSUPPORTED, NOMEM. */
dcp_status dcp__layout_make(const dcp_save_plan *plan, const dcp__layout_opts *opts, dcp__layout *out, dcp_error *err);
void dcp__layout_reset(dcp__layout *l);

#endif
