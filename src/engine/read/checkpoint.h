/* An open checkpoint, and what the files of this layer share. */
#ifndef DCP_ENGINE_CHECKPOINT_H
#define DCP_ENGINE_CHECKPOINT_H

#include <pthread.h>

#include "base/buf.h"
#include "dcp/checkpoint.h"
#include "format/metadata.h"
#include "format/record.h"
#include "format/safetensors.h"

/* A data file that the metadata names, opened when first needed. */
typedef struct dcp__data_file {
    dcp_file *file; /* NULL: closed */
    uint64_t bytes; /* valid while it is open */
    int users;
} dcp__data_file;

/* A safetensors blob inside a .distcp file (formats.md 8.5). */
typedef struct dcp__blob {
    uint32_t file;
    uint64_t offset;
    dcp__safetensors header;
    struct dcp__blob *next;
} dcp__blob;

/* The storages of the metadata by file, offset and length. */
typedef struct dcp__ranges {
    uint32_t *order; /* indexes in meta->storages */
    size_t *first;   /* [file index]: where its storages begin in order; n_files + 1 values */
} dcp__ranges;

struct dcp_checkpoint {
    dcp_context *ctx;
    dcp_storage *storage;
    bool owns_storage;
    char *dir;  /* name of the checkpoint's directory in the storage; "" is the root */
    char *path; /* as the caller gave it, for messages */
    dcp_layout layout;
    bool allow_outside, check_crc, allow_shard_gaps;
    bool is_recovered;     /* .metadata is in pieces, meta is from .metadata.tmp */
    dcp__buf *kept;        /* while opening for a group: what `.metadata` holds, for the others; NULL: not wanted */
    const dcp__buf *given; /* while opening in a group: what another rank has found in `.metadata`; NULL: look for it */
    dcp__metadata *meta;
    uint64_t metadata_bytes;
    int world;             /* 0: unknown */
    char writer[80];       /* "PyTorch 2.9 to 2.14", "" if unknown */
    dcp__metadata **parts; /* rank-local: one for each rank, meta borrows from them */
    size_t n_parts;
    dcp__safetensors *headers; /* safetensors, HF: [file index] */
    size_t n_headers;
    dcp__archive archive; /* torch.save files */
    dcp_value **values;   /* torch.save files: [entry index], borrowed from archive */
    dcp_flat *flat;       /* torch.save files */

    pthread_mutex_t lock;  /* guards the fields below */
    dcp__data_file *files; /* [file index] */
    size_t n_open;
    dcp__blob *blobs;
    dcp__ranges ranges;        /* order NULL: not made yet */
    struct dcp__spool *spools; /* decoded records, kept for the next slice of them */
    bool *compared; /* torch.save files that are copied: [storage]: see dcp__mark_compared; NULL: every read compares CRCs */
};

/* ---- open.c and one file for each kind of layout: fill ck->meta ---- */
/* dcp_checkpoint_open for a group: one rank opens and keeps the bytes of `.metadata`, none if that is not what tells all about
 * the checkpoint; the others are given them and look at nothing. Both may be NULL. */
dcp_status dcp__checkpoint_open(dcp_context *ctx, const char *path, const dcp_open_opts *opts, dcp__buf *kept,
                                const dcp__buf *given, dcp_checkpoint **out, dcp_error *err);
/* only NULL: all items. */
dcp_status dcp__read_metadata_file(dcp_checkpoint *ck, const char *name, const dcp_str *only, dcp__metadata **out,
                                   dcp_error *err);
dcp_status dcp__open_rank_local(dcp_checkpoint *ck, const int *ranks, size_t n, int only_rank, dcp_error *err);
/* Of a directory with DCP__HF_MARK: puts the files of the model first; *n says how many they are. Errors: NOT_FOUND (the mark or
 * the index is gone), FORMAT. */
dcp_status dcp__select_tensor_files(dcp_checkpoint *ck, char **names, size_t *n, bool has_index, dcp_error *err);
dcp_status dcp__open_safetensors(dcp_checkpoint *ck, const char **names, size_t n, bool has_index, dcp_error *err);
dcp_status dcp__open_torch(dcp_checkpoint *ck, const char *name, dcp_error *err);

/* Fills in ck->writer. */
void dcp__describe_writer(dcp_checkpoint *ck);
/* A copy of a value of an archive with the tensors below read from src; parts without tensors are shared. */
dcp_status dcp__read_value(dcp_checkpoint *ck, const dcp__archive *a, const dcp__source *src, dcp_value *v, dcp_value **out,
                           dcp_error *err);

/* The sorted ranges; made when first asked for. */
dcp_status dcp__get_ranges(const dcp_checkpoint *ck, const dcp__ranges **out, dcp_error *err);

/* The value that all items below a name form, tensors read: "optim" is {"lr": ...} where the items are "optim.lr" and so on. */
dcp_status dcp__read_subtree(dcp_checkpoint *ck, dcp_str name, dcp_value **out, dcp_error *err);

/* ---- files.c ---- */

/* Name of a file of the checkpoint in the storage; NUL-terminated, allocated. Refuses names that lead out (FORMAT) unless
 * allowed. */
dcp_status dcp__file_name(const dcp_checkpoint *ck, dcp_str relative, char **out, dcp_error *err);
/* Opens a file of the checkpoint for reading, with the rules of the layout. The caller closes. */
dcp_status dcp__open_relative(const dcp_checkpoint *ck, dcp_str relative, dcp_file **out, uint64_t *bytes, dcp_error *err);
/* Reads a file of the checkpoint whole, at most max_bytes. */
dcp_status dcp__read_file(const dcp_checkpoint *ck, const char *relative, uint64_t max_bytes, dcp__buf *out, dcp_error *err);
/* A data file for reading: open from acquire to release, and mostly longer. Errors name the file. */
dcp_status dcp__file_acquire(dcp_checkpoint *ck, uint32_t file, dcp_file **out, uint64_t *bytes, dcp_error *err);
void dcp__file_release(dcp_checkpoint *ck, uint32_t file);
/* Reads exactly n bytes; a short file is FORMAT with the offset. Does not name the file. */
dcp_status dcp__read_exact(dcp_file *f, void *buf, size_t n, uint64_t offset, dcp_error *err);
/* A range of an open file as a source. */
dcp__source dcp__source_file(dcp_file *f, uint64_t start, uint64_t bytes);
void dcp__close_files(dcp_checkpoint *ck);

/* ---- spool.c: decoded records ---- */

typedef struct dcp__spool dcp__spool;
/* The decoded bytes of a record with transforms, in memory or, if they are many, in a temporary file that has no name. More than
 * max_bytes of them are LIMIT. */
dcp_status dcp__spool_acquire(dcp_checkpoint *ck, uint32_t storage, uint64_t max_bytes, dcp__spool **out, dcp_error *err);
/* How many the record of a chunk, or of an object (NULL), may have: its elements and what stands around them. */
uint64_t dcp__spool_limit(const dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c);
void dcp__spool_release(dcp_checkpoint *ck, dcp__spool *s);
void dcp__spool_drop(dcp_checkpoint *ck); /* the kept ones */
dcp__source dcp__spool_source(const dcp__spool *s);
/* Bytes of a deflated member, inflated. Released the same way. */
dcp_status dcp__spool_inflate(dcp_checkpoint *ck, const dcp__source *src, const dcp__storage_span *span, dcp__spool **out,
                              dcp_error *err);

/* ---- resolve.c: where the elements of a chunk are ---- */

/* A payload and the source that its offsets count in. */
typedef struct dcp__located {
    dcp__payload payload;
    dcp__source source;   /* bytes of the record, as decoded */
    uint64_t file_offset; /* of source byte 0 in the file, for messages; DCP_NO_OFFSET if decoded */
    uint32_t file;
    bool holds_file;
    dcp__spool *spool, *inflated;
} dcp__located;

/* Locates chunk `c` of a tensor entry: opens its record and checks dtype and shape against the metadata. Errors name neither file
 * nor item. Release with dcp__located_release. */
dcp_status dcp__locate_chunk(dcp_checkpoint *ck, const dcp__entry *e, const dcp__chunk *c, dcp__located *out, dcp_error *err);
void dcp__located_release(dcp_checkpoint *ck, dcp__located *l);
/* What the bytes of a storage begin with; *offset is its start, or behind the empty zstd frames there (formats.md 8.5). */
dcp_status dcp__sniff_storage(dcp_file *f, uint64_t bytes, const dcp__storage *s, uint64_t *offset, dcp__sniff *out,
                              dcp_error *err);
/* Makes an error's offset, relative to l's source, one of the file; drops it if the source is decoded. */
void dcp__to_file_offset(const dcp__located *l, dcp_error *err);
/* Gives an error about what is in a record, if it has no offset, the one where the record starts. */
void dcp__to_record_offset(const dcp__storage *s, dcp_status code, dcp_error *err);
/* ARG for a box that is not within the tensor; the message names no item. */
dcp_status dcp__check_box(const dcp_item *item, const dcp_box *box, dcp_error *err);
/* Dtype and shape of a payload against the metadata: MISMATCH becomes FORMAT, since the checkpoint contradicts itself. */
dcp_status dcp__check_payload(const dcp__entry *e, const dcp__chunk *c, const dcp__payload *p, dcp_error *err);
/* UNSUPPORTED, with the name of its dtype: a tensor whose dtype is not known here, a quantised one or one of a later release, is
 * listed and cannot be read. */
dcp_status dcp__refuse_dtype(const dcp_item *item, dcp_error *err);
/* The same for a tensor of such a dtype, with checkpoint and item; OK for all others. */
dcp_status dcp__check_dtype(const dcp_checkpoint *ck, const dcp_item *item, dcp_error *err);
/* Entry behind a public item of this checkpoint. */
const dcp__entry *dcp__entry_of(const dcp_item *item);

/* Can all of a tensor be read: is it covered, and do its large records hold what the metadata says? Asked before memory is taken
 * for it that only a lie may need. */
dcp_status dcp__check_readable(dcp_checkpoint *ck, const dcp_item *item, dcp_error *err);

/* ---- tile.c: boxes of a payload into strided memory ---- */

/* Buffer of one reading thread. */
typedef struct dcp__tile_buf {
    dcp_context *ctx;
    uint8_t *data; /* NULL until needed */
    size_t bytes;
} dcp__tile_buf;

/* Reads the box [start, start + sizes) of a payload to dst (host memory, strides in elements, the box's first element). */
dcp_status dcp__read_box(const dcp__source *src, const dcp__payload *p, const int64_t *start, const int64_t *sizes, void *dst,
                         const int64_t *dst_strides, dcp__tile_buf *buf, dcp_error *err);
void dcp__tile_buf_reset(dcp__tile_buf *buf);

/* What is said of a storage whose CRC-32 is not the one that the record says. */
dcp_status dcp__compare_storage_crc(const dcp__storage_span *storage, uint32_t crc, dcp_error *err);
/* Reads a storage that is not deflated, and compares its CRC-32. */
dcp_status dcp__check_storage_crc(dcp_context *ctx, const dcp__source *src, const dcp__storage_span *storage, dcp_error *err);

/* ---- errors ---- */

/* Puts `file "x", item "y": ` in front of the message. Each may be absent: file < 0, fqn.ptr NULL. */
dcp_status dcp__in_item(const dcp_checkpoint *ck, int64_t file, dcp_str fqn, dcp_status code, dcp_error *err);

#endif
