/* What the metadata of a checkpoint says, as plain arrays; the common form of all layouts. */
#ifndef DCP_FORMAT_METADATA_H
#define DCP_FORMAT_METADATA_H

#include "base/arena.h"
#include "base/hash.h"
#include "base/source.h"
#include "base/strmap.h"
#include "dcp/checkpoint.h"
#include "state/containers.h"

#define DCP__NO_STORAGE UINT32_MAX

typedef enum dcp__storage_form {
    DCP__FORM_RECORD = 0, /* a torch.save archive; or a safetensors blob, which only its bytes tell */
    DCP__FORM_RAW = 1     /* the row-major little-endian elements themselves (safetensors) */
} dcp__storage_form;

/* A byte range of a file. */
typedef struct dcp__storage {
    uint64_t offset, length;
    uint32_t file;       /* index in files */
    uint16_t transforms; /* index in transforms, 0 is none */
    uint16_t form;       /* dcp__storage_form */
} dcp__storage;

/* A part of a tensor. Offsets and sizes have the entry's ndim. */
typedef struct dcp__chunk {
    const int64_t *offsets, *sizes;
    uint32_t storage; /* index in storages, DCP__NO_STORAGE if the metadata names none */
} dcp__chunk;

typedef struct dcp__entry {
    dcp_item item;      /* what the public sees; item.bytes of objects is filled in by the engine */
    size_t first_chunk; /* tensors: n_chunks from here */
    uint32_t storage;   /* objects */
    bool requires_grad, pin_memory;
    uint8_t memory_format;
    dcp_str other_dtype; /* tensors of DCP_DTYPE_NONE: what torch calls theirs */
} dcp__entry;

/* A field that this release does not know: its name, and its value as opcodes that stand for themselves. */
typedef struct dcp__extra {
    dcp_str name, opcodes;
} dcp__extra;
typedef struct dcp__extras {
    dcp__extra *list;
    size_t n;
} dcp__extras;

/* Facts that libdcp adds (formats.md 11). */
typedef struct dcp__own_facts {
    bool present;
    dcp_str writer, save_id, checkpoint_id, generation;
    int world, rank; /* rank -1: none */
    bool has_structure;
    uint8_t structure[16];
    const dcp__digest **records; /* [file index]: digests in order of offset; NULL if the file has none */
    size_t *n_records;           /* [file index] */
    const dcp__container *containers;
    size_t n_containers;
    dcp__extras extras; /* other keys, of plain data; written again */
} dcp__own_facts;

typedef struct dcp__metadata {
    dcp_context *ctx;
    dcp__arena arena; /* owns names, paths, shapes, own facts; the tables below are blocks of the heap each */
    dcp__entry *entries;
    size_t n_entries;
    dcp__chunk *chunks;
    size_t n_chunks;
    dcp__storage *storages;
    size_t n_storages;
    dcp_str *files;
    size_t n_files;
    dcp_str *transforms; /* "stream.zstd/1", several joined by ","; [0] is "" */
    size_t n_transforms;
    dcp__strmap by_fqn;                      /* fqn -> first entry of that name */
    dcp_str version, save_id, checkpoint_id; /* ptr NULL: absent */
    bool has_planner_data;
    bool has_trailer; /* ours, and its digest was right */
    /* What the form tells about the writer: releases are major * 100 + minor, 0 unknown. */
    int release_from, release_to;
    dcp__own_facts own;
    dcp__extras extras; /* other fields of the top object, of plain data; written again. None if one item was asked for. */
} dcp__metadata;

/* Reads the pickle of `.metadata` or `__<rank>.metadata`, and our trailer. rank becomes item.rank's origin only in the engine.
 * `only`, if not NULL, keeps that FQN alone: what else is in the file is checked for form, but not built.
 * Errors: FORMAT (with offset), CHECKSUM (trailer), LIMIT, NOMEM, and what the source returns. */
dcp_status dcp__metadata_read(dcp_context *ctx, const dcp__source *src, const dcp_str *only, dcp__metadata **out, dcp_error *err);
/* An empty one, for layouts that are put together from elsewhere. */
dcp_status dcp__metadata_create(dcp_context *ctx, dcp__metadata **out, dcp_error *err);
/* Room in the tables of an empty one; `transforms` without the first, "". Errors: NOMEM. */
dcp_status dcp__metadata_reserve(dcp__metadata *m, size_t entries, size_t chunks, size_t storages, size_t files,
                                 size_t transforms, dcp_error *err);
void dcp__metadata_free(dcp__metadata *m);

#endif
