/*
 * dcp/checkpoint.h - open, list and read checkpoints.
 *
 *     dcp_checkpoint *ck;
 *     dcp_checkpoint_open(NULL, "run/step-1000", NULL, &ck, &err);
 *     const dcp_item *w = dcp_checkpoint_find(ck, dcp_str_of("model.weight"));
 *     float row[8];
 *     int64_t offsets[] = {3, 0}, sizes[] = {1, 8};
 *     dcp_box box = {offsets, sizes};
 *     dcp_tensor dst = dcp_tensor_make(DCP_FLOAT32, 2, sizes, row);
 *     dcp_read(ck, w, &box, &dst, &err);                  // reads row 3, not the rest
 *     dcp_checkpoint_close(ck);
 *
 * Every layout that PyTorch writes opens the same way: a DCP directory (also rank-local), a torch.save file, a safetensors
 * file, a Hugging Face directory.
 *
 * Threads: an open checkpoint may be used by several threads at once; every call is local and blocks.
 */
#ifndef DCP_CHECKPOINT_H
#define DCP_CHECKPOINT_H

#include "backend.h"
#include "state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dcp_checkpoint dcp_checkpoint;

typedef enum dcp_layout {
    DCP_LAYOUT_DCP = 1,         /* directory with .metadata */
    DCP_LAYOUT_RANK_LOCAL = 2,  /* directory with __<rank>.metadata and no .metadata */
    DCP_LAYOUT_HF = 3,          /* directory of safetensors files (Hugging Face), consolidated or sharded */
    DCP_LAYOUT_SAFETENSORS = 4, /* one safetensors file */
    DCP_LAYOUT_TORCH_ZIP = 5,   /* one torch.save file */
    DCP_LAYOUT_TORCH_LEGACY = 6 /* one torch.save file of the form before 1.6 */
} dcp_layout;

DCP_API const char *dcp_layout_name(dcp_layout layout);

typedef struct dcp_open_opts {
    size_t struct_size;
    dcp_storage *storage;  /* where path is a name in it ("" its root); NULL: the local file system. Borrowed. */
    int rank;              /* rank-local checkpoints: see this rank's metadata alone; -1: join all ranks */
    bool allow_outside;    /* follow "..", absolute names and links that lead out of the directory, as PyTorch does */
    bool check_crc;        /* check the CRC-32 of every record that is read whole */
    dcp_str only;          /* the one item that is wanted: others may be missing, which saves time and memory where there are very
                              many; ptr NULL: all */
    bool allow_shard_gaps; /* Hugging Face shards: numbers may be missing, since a rank of PyTorch's that has nothing to save
                              writes no file; a lost file then only shows where it leaves a gap in a tensor */
} dcp_open_opts;

#define DCP_OPEN_OPTS_INIT DCP_INIT_WITH(dcp_open_opts, rank, -1)

/* Opens a checkpoint and reads its metadata, no payload. path is a directory or a file. opts may be NULL.
 * Errors: NOT_FOUND (nothing there, or no checkpoint: the message says what the directory looks like), FORMAT (with offset),
 * CHECKSUM (our trailer), LIMIT, IO, UNSUPPORTED, NOMEM. */
DCP_API dcp_status dcp_checkpoint_open(dcp_context *ctx, const char *path, const dcp_open_opts *opts, dcp_checkpoint **out,
                                       dcp_error *err);
/* Closes and frees; NULL is allowed. Items, names and boxes obtained from it become invalid. */
DCP_API void dcp_checkpoint_close(dcp_checkpoint *ck);

/* ---- what is in it ---- */

typedef enum dcp_item_kind { DCP_ITEM_TENSOR = 1, DCP_ITEM_OBJECT = 2 } dcp_item_kind;

/* One entry of a checkpoint. Owned by the checkpoint. */
typedef struct dcp_item {
    dcp_str fqn;
    dcp_item_kind kind;
    int rank;        /* rank-local checkpoints: the rank that holds this value; -1: common to all */
    dcp_dtype dtype; /* tensors */
    int ndim;
    const int64_t *extents; /* global shape, ndim values */
    uint64_t bytes;         /* tensors: elements times size; objects: bytes of the record on disk, 0 if part of a file */
    size_t n_chunks;        /* tensors: parts that it is stored in; objects: 1 */
    const dcp_key *path;    /* keys from the root of the tree */
    size_t path_len;
} dcp_item;

/* Items in the order of the metadata. */
DCP_API size_t dcp_checkpoint_count(const dcp_checkpoint *ck);
/* NULL if i is out of range. */
DCP_API const dcp_item *dcp_checkpoint_item(const dcp_checkpoint *ck, size_t i);
/* The item of that name, common or the only rank's; NULL if there is none, or several ranks have their own. */
DCP_API const dcp_item *dcp_checkpoint_find(const dcp_checkpoint *ck, dcp_str fqn);
/* The same for one rank's own value, or a common one. */
DCP_API const dcp_item *dcp_checkpoint_find_rank(const dcp_checkpoint *ck, dcp_str fqn, int rank);

/* Where chunk i of an item is. Names and boxes are owned by the checkpoint. */
typedef struct dcp_chunk_info {
    dcp_box box;             /* where it belongs in the tensor; offsets and sizes NULL for objects */
    const char *file;        /* relative to the checkpoint; NULL if the metadata names no place for it */
    uint64_t offset, length; /* bytes of the record in that file */
    const char *transforms;  /* "stream.zstd/1", or "" */
} dcp_chunk_info;

/* Errors: ARG (i out of range). */
DCP_API dcp_status dcp_item_chunk(const dcp_checkpoint *ck, const dcp_item *item, size_t i, dcp_chunk_info *out, dcp_error *err);

/* Facts about the whole. Strings are owned by the checkpoint, "" if unknown. */
typedef struct dcp_checkpoint_info {
    size_t struct_size;
    dcp_layout layout;
    int world;           /* ranks that wrote it, as far as the files tell; at least 1 */
    const char *writer;  /* "libdcp 0.1.0", or what the form of the files tells: "PyTorch 2.9 to 2.14" */
    const char *version; /* DCP format version, "1.0.0" */
    const char *save_id;
    const char *checkpoint_id;
    size_t n_items, n_tensors, n_objects, n_chunks, n_files;
    uint64_t tensor_bytes;   /* of all tensors, tied ones counted each */
    uint64_t metadata_bytes; /* size of the metadata files */
} dcp_checkpoint_info;

#define DCP_CHECKPOINT_INFO_INIT DCP_INIT(dcp_checkpoint_info)

DCP_API dcp_status dcp_checkpoint_get_info(const dcp_checkpoint *ck, dcp_checkpoint_info *out, dcp_error *err);

/* Files that the metadata names, n_files of them. referenced counts the bytes of distinct records. present is false if the
 * file is not there; then bytes is 0. Looks the file up in the storage. Errors: ARG, IO. */
typedef struct dcp_file_info {
    const char *name;
    int rank; /* that wrote it by its name, -1 if the name does not tell */
    bool present;
    uint64_t bytes, referenced;
    size_t n_records;
} dcp_file_info;

DCP_API dcp_status dcp_checkpoint_file(const dcp_checkpoint *ck, size_t i, dcp_file_info *out, dcp_error *err);

/* ---- reading ---- */

/* Reads a box of a tensor (NULL: all of it) into dst, whose dtype is the item's and whose extents are the box's sizes; any
 * strides, in host memory or on a device. Only the bytes that the box needs are read, in ascending order, nearby ones together.
 * Errors: MISMATCH (dtype or shape), ARG (box outside), FORMAT (also: chunks do not cover the box), CHECKSUM, NOT_FOUND (file),
 * IO, UNSUPPORTED (unknown transform; a device without its library), DEVICE, NOMEM. On an error the content of dst is undefined.
 */
DCP_API dcp_status dcp_read(dcp_checkpoint *ck, const dcp_item *item, const dcp_box *box, const dcp_tensor *dst, dcp_error *err);

/* One request of several. */
typedef struct dcp_read_request {
    const dcp_item *item;
    dcp_box box; /* offsets NULL: all of it */
    dcp_tensor dst;
} dcp_read_request;

/* Reads n requests as one plan: sorted, merged, in parallel. The error names the item that failed first. */
DCP_API dcp_status dcp_read_many(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, dcp_error *err);

typedef struct dcp_read_opts {
    size_t struct_size;
    /* Called now and then, from one thread at a time, with bytes of tensors read and in all; false cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
    void *stream; /* of the targets' device: the read waits for what is in it, and is over when the call returns. NULL: the
                     default stream. */
} dcp_read_opts;

#define DCP_READ_OPTS_INIT DCP_INIT(dcp_read_opts)

/* The same with options, which may be NULL. Errors: also CANCELED. */
DCP_API dcp_status dcp_read_many_with(dcp_checkpoint *ck, const dcp_read_request *requests, size_t n, const dcp_read_opts *opts,
                                      dcp_error *err);

/* Reads and decodes an object; tensors inside it are read as well. *out is a new reference.
 * Errors: MISMATCH (item is a tensor), FORMAT, LIMIT, IO, NOMEM. Nothing in the file is executed. */
DCP_API dcp_status dcp_read_object(dcp_checkpoint *ck, const dcp_item *item, dcp_value **out, dcp_error *err);

/* The bytes of an object's record as its saver made them (a torch.save file), transforms undone, for another reader of pickles.
 * *out is freed with dcp_text_free. Errors: those of dcp_read_object; UNSUPPORTED (a torch.save file, whose objects have no
 * records of their own). */
DCP_API dcp_status dcp_read_record(dcp_checkpoint *ck, const dcp_item *item, char **out, size_t *out_len, dcp_error *err);

/* The tree of the whole checkpoint: nested as it was saved, objects decoded, tensors allocated and read if with_data,
 * else with data NULL. Values of single ranks stand under "rank.<r>.<name>". */
DCP_API dcp_status dcp_read_tree(dcp_checkpoint *ck, bool with_data, dcp_value **out, dcp_error *err);

/* Compares the CRC-32 of every record of a tensor that has one with the record's elements, in bounded memory: for those who read
 * it in parts. Errors: those of dcp_read. */
DCP_API dcp_status dcp_item_check_crc(dcp_checkpoint *ck, const dcp_item *item, dcp_error *err);

/* SHA-256 of the row-major little-endian bytes of a tensor, in bounded memory. With check_crc its records are checked as well. */
DCP_API dcp_status dcp_item_sha256(dcp_checkpoint *ck, const dcp_item *item, uint8_t digest[32], dcp_error *err);

/* ---- checking ---- */

/* One defect. file is NULL if it concerns the metadata as a whole, fqn.ptr NULL if no item. Valid for the call. */
typedef struct dcp_defect {
    dcp_status code; /* FORMAT, CHECKSUM, NOT_FOUND, IO, LIMIT, UNSUPPORTED */
    const char *file;
    dcp_str fqn;
    uint64_t offset; /* in file; DCP_NO_OFFSET if it has none */
    const char *message;
} dcp_defect;

typedef void (*dcp_defect_fn)(void *user, const dcp_defect *defect);

typedef struct dcp_verify_opts {
    size_t struct_size;
    bool quick; /* structure, bounds, coverage, presence and length of files; no payload */
    /* Called now and then, from one thread at a time, with bytes done and in all; a false result cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    dcp_defect_fn defect; /* one thread at a time; NULL: defects are only counted */
    void *user;
} dcp_verify_opts;

#define DCP_VERIFY_OPTS_INIT DCP_INIT(dcp_verify_opts)

typedef struct dcp_verify_report {
    size_t struct_size;
    size_t n_defects, n_records, n_files;
    size_t n_unchecked; /* records without any checksum */
    uint64_t bytes;     /* read */
    bool has_digests;   /* records were compared with digests as well */
} dcp_verify_report;

#define DCP_VERIFY_REPORT_INIT DCP_INIT(dcp_verify_report)

/* Checks everything that can be checked. DCP_OK means that the check ran to its end: look at report->n_defects.
 * Errors: IO only if the storage as a whole fails, CANCELED, NOMEM. */
DCP_API dcp_status dcp_verify(dcp_checkpoint *ck, const dcp_verify_opts *opts, dcp_verify_report *report, dcp_error *err);

/* The newest complete checkpoint directly below dir (or dir itself): opens, and all files are there and long enough.
 * Newest: by the largest number at the end of the name where names have one, else by time of the metadata.
 * skipped is called for each that looks like a checkpoint and is not complete; may be NULL.
 * *out: path below dir, freed with dcp_text_free. Errors: NOT_FOUND (none), IO. */
DCP_API dcp_status dcp_latest(dcp_context *ctx, const char *dir, const dcp_open_opts *opts,
                              void (*skipped)(void *user, const char *path, const char *why), void *user, char **out,
                              dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
