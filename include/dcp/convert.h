/*
 * dcp/convert.h - compare checkpoints and turn one form into another.
 *
 *     dcp_diff_report report = DCP_DIFF_REPORT_INIT;
 *     dcp_diff(a, b, NULL, &report, &err);                       // two open checkpoints of any forms
 *     if (report.n_differences) { ... }
 *
 *     dcp_convert_opts opts = DCP_CONVERT_OPTS_INIT;
 *     opts.to = DCP_TO_HF;
 *     dcp_convert(NULL, "run/step-1000", "model", &opts, NULL, &err);
 *
 * Threads: the calls block, and use the threads of the context. The checkpoints may be used elsewhere at the same time.
 */
#ifndef DCP_CONVERT_H
#define DCP_CONVERT_H

#include "checkpoint.h"
#include "load.h"
#include "save.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- comparing ---- */

/* One difference. Valid for the call. */
typedef struct dcp_item_difference {
    dcp_difference_kind kind; /* MISSING: in a alone; UNEXPECTED: in b alone */
    const dcp_item *a, *b;    /* NULL where there is none */
    const char *text;         /* one line: "3 of 12 elements differ, by 0.5 at most, ..." */
    /* VALUE of tensors; DTYPE as well where both sides are numbers, which are compared all the same. */
    uint64_t n_different;    /* elements beyond the tolerances; 0: none, or not compared */
    const int64_t *first;    /* index of the first of them; NULL if there is none */
    double max_abs, max_rel; /* of them: |a - b| and |a - b| / |b|; infinite where NaN stands on one side, or |b| is 0 */
} dcp_item_difference;

typedef struct dcp_diff_opts {
    size_t struct_size;
    /* Elements are equal if |a - b| <= atol + rtol * |b|, or if both are NaN. With both 0 bits are compared: -0.0 and 0.0 differ.
     */
    double atol, rtol;
    void (*difference)(void *user, const dcp_item_difference *difference); /* in the order of a's items, then b's; may be NULL */
    /* Called now and then, from one thread at a time, with bytes done and in all; a false result cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
} dcp_diff_opts;

#define DCP_DIFF_OPTS_INIT DCP_INIT(dcp_diff_opts)

typedef struct dcp_diff_report {
    size_t struct_size;
    size_t n_items;       /* names that both have */
    size_t n_differences; /* in all, and of each kind: */
    size_t n_missing, n_unexpected, n_shape, n_dtype, n_kind, n_value;
    double max_abs, max_rel; /* over all tensors */
    uint64_t bytes;          /* of the tensors compared, in a */
} dcp_diff_report;

#define DCP_DIFF_REPORT_INIT DCP_INIT(dcp_diff_report)

/* Compares two open checkpoints of any forms, item by item, in bounded memory. Items belong together by name and rank. DCP_OK
 * means that the comparison ran to its end: look at report->n_differences. opts may be NULL. Errors: ARG, CANCELED, those of
 * dcp_read and dcp_read_object. Local. */
DCP_API dcp_status dcp_diff(dcp_checkpoint *a, dcp_checkpoint *b, const dcp_diff_opts *opts, dcp_diff_report *report,
                            dcp_error *err);

/* ---- Hugging Face directories ---- */

/* Which file a tensor goes to, by number. */
typedef struct dcp_hf_place {
    dcp_str fqn;
    uint32_t file; /* from 1 on */
} dcp_hf_place;

typedef struct dcp_hf_save_opts {
    size_t struct_size;
    dcp_storage *storage;   /* where path is a name; NULL: the local file system. Borrowed. */
    bool overwrite;         /* replace the shards of an older save; otherwise EXISTS */
    bool no_sync;           /* do not make anything durable before publishing it */
    bool drop_objects;      /* leave out what is no tensor; otherwise UNSUPPORTED, which names one */
    dcp_comm *comm;         /* the group that saves together; NULL: this process alone. Borrowed. */
    dcp_failures *failures; /* out: the ranks that failed, and why; NULL: not wanted */
    bool whole;             /* files of whole tensors, with an index; otherwise shards */
    /* Every tensor must be named; names without a tensor count for the number of files alone, as in PyTorch. The same on all
     * ranks. NULL: one file for each rank. */
    const dcp_hf_place *places;
    size_t n_places;
    bool dedup_to_lowest;      /* as in dcp_save_opts; then replicas can be mapped to any file of whole tensors */
    void *stream;              /* as in dcp_save_opts */
    uint64_t copy_ahead_bytes; /* as in dcp_save_opts */
} dcp_hf_save_opts;

#define DCP_HF_SAVE_OPTS_INIT DCP_INIT_WITH(dcp_hf_save_opts, copy_ahead_bytes, DCP_COPY_AHEAD_BYTES)

/* What this rank did. */
typedef struct dcp_hf_save_report {
    size_t struct_size;
    size_t n_tensors, n_files; /* written */
    uint64_t bytes;            /* in files */
} dcp_hf_save_report;

#define DCP_HF_SAVE_REPORT_INIT DCP_INIT(dcp_hf_save_report)

/* Saves the tensors of a state as PyTorch's HuggingFaceStorageWriter does, with their offsets, and with the global shapes.
 *
 * Shards: each rank its own chunks, in files shard-<rank + 1>-model-<number>-of-<files>.safetensors. A file has each name once,
 * so a rank with several chunks of one tensor has more files of them. dcp_convert makes whole tensors of the directory. Whole
 * tensors: files model-<number>-of-<files>.safetensors and model.safetensors.index.json, which tells what is where. No rank may
 * have a part of a tensor. Without opts->places each rank that writes something makes one file; with them a file has tensors of
 * one rank only (ARG).
 *
 * A rank that has nothing to write makes no file. What several ranks hold is written by one. With opts->comm collective. When it
 * replaces an older save, dcp_checkpoint_open finds that one or the new one, whole, at any time; the new files then have other
 * names (shard-00001-model.1-.., model.1-..) where the usual ones are taken. opts and report may be NULL. Errors: EXISTS (also:
 * another save or conversion to the place is running), ARG (chunks that overlap or leave gaps, a tensor without a place, a number
 * out of range), MISMATCH (ranks with different places), UNSUPPORTED (an object, a dtype, a device whose library is absent),
 * DEVICE, LIMIT, IO, NOSPACE, NOMEM; with opts->comm all of these as PEER. */
DCP_API dcp_status dcp_hf_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_hf_save_opts *opts,
                               dcp_hf_save_report *report, dcp_error *err);

/* For saves whose ranks plan and communicate by other means: writes all tensors of a plan into one file `name` in the directory
 * `path`, which is there, front to back, and makes it durable. A file of that name is replaced; after an error there is none. Of
 * opts count storage (which need not write at any place of a file), no_sync, stream and copy_ahead_bytes. out[i]: offset and
 * length of item i. opts may be NULL. Errors: as dcp_hf_save. Local. */
DCP_API dcp_status dcp_hf_write_file(dcp_context *ctx, const char *path, const char *name, const dcp_save_plan *plan,
                                     const dcp_save_opts *opts, dcp_written *out, dcp_error *err);

/* ---- tensors that are stored as small numbers and scales ---- */

/* Two forms are known, by the names of two tensors of one checkpoint:
 *   X.weight with X.weight_scale_inv: two dimensions, a scale for each block of so many rows and columns, the last ones smaller;
 *   X_blocks with X_scales: bytes [.., G, B] of two float4_e2m1fn each, low nibble first, times 2^(scale - 127) with scales
 *   [.., G] of bytes; they stand for a tensor [.., G * B * 2].
 * Source: PyTorch's QuantizedHuggingFaceStorageReader. */
typedef struct dcp_quantized {
    const dcp_item *item, *scales; /* the checkpoint's */
    int ndim;                      /* of the tensor that they stand for, and its shape */
    int64_t extents[DCP_MAX_NDIM];
} dcp_quantized;

#define DCP_QUANTIZED_BLOCK 128 /* rows and columns of a block in what is published */

/* True if the item is the first of such a pair. The shapes are looked at when it is read. */
DCP_API bool dcp_quantized_find(const dcp_checkpoint *ck, const dcp_item *item, dcp_quantized *out);

/* Reads a box (NULL: all) of the tensor that a pair stands for: only the bytes and scales that it needs. dst has the box's shape,
 * any strides, host memory and a floating point dtype, to which the float32 product is rounded; what does not fit becomes
 * infinite or NaN, and is counted in *lost (may be NULL). block: rows and columns of a block. Errors: as dcp_read; MISMATCH (the
 * scales do not fit the tensor), UNSUPPORTED (dtypes). */
DCP_API dcp_status dcp_read_dequantized(dcp_checkpoint *ck, const dcp_quantized *q, int64_t block, const dcp_box *box,
                                        const dcp_tensor *dst, uint64_t *lost, dcp_error *err);

/* ---- converting ---- */

typedef enum dcp_convert_form {
    DCP_TO_DCP = 1,     /* a directory that torch.distributed.checkpoint loads */
    DCP_TO_TORCH,       /* one torch.save file, nested as the state was */
    DCP_TO_SAFETENSORS, /* one safetensors file */
    DCP_TO_HF           /* a Hugging Face directory: safetensors files and, if there are several, model.safetensors.index.json */
} dcp_convert_form;

/* Names that share their elements, in a form that knows no sharing. DCP and torch.save keep it. */
typedef enum dcp_alias {
    DCP_ALIAS_COPY = 0, /* each name has elements of its own */
    DCP_ALIAS_DROP,     /* the first name stays, the others are left out */
    DCP_ALIAS_ERROR     /* MISMATCH, which names two of them; tensors that overlap in a torch.save file count too */
} dcp_alias;

/* What is no tensor, in a form that holds tensors alone. */
typedef enum dcp_objects {
    DCP_OBJECTS_ERROR = 0, /* UNSUPPORTED, which names them */
    DCP_OBJECTS_DROP,
    DCP_OBJECTS_BESIDE /* into a torch.save file beside: objects.pt in a directory, else <name>.objects.pt */
} dcp_objects;

/* Patterns are those of fnmatch, for names as they are in the source: "rank.<r>.<name>" for values of single ranks. */
typedef struct dcp_convert_cast {
    const char *names;
    dcp_dtype dtype;
} dcp_convert_cast;

typedef struct dcp_convert_part {
    const char *name; /* of the part: to/<name> for directories, else to/<name>.pt or to/<name>.safetensors */
    const char *names;
} dcp_convert_part;

typedef struct dcp_convert_opts {
    size_t struct_size;
    dcp_convert_form to;
    dcp_open_opts open;   /* of the source */
    dcp_storage *storage; /* where `to` is a name; NULL: the local file system. Borrowed. */
    bool overwrite;       /* replace what is there; otherwise EXISTS. HF: new files have other names (model.1-00001-of-..) where
                             the old model has the usual ones, so that one or the other is whole at any time. */
    bool resume;          /* HF: keep finished files of an earlier try that hold what they should, and go on */
    bool no_sync;         /* do not make anything durable before publishing it */
    bool no_check;        /* do not read the result back before publishing it */
    const char *const *include; /* n_include 0: all. A pattern without a match is NOT_FOUND. */
    size_t n_include;
    const char *const *exclude;
    size_t n_exclude;
    const char *const *edits; /* of names, one after the other: "s/regex/text/g" (POSIX extended), "add:model.", "strip:model." */
    size_t n_edits;
    const dcp_convert_cast *casts; /* the first that fits a name counts. Numbers that do not fit are MISMATCH, with how many. */
    size_t n_casts;
    dcp_dtype dequantize; /* tensors stored with scales become tensors of this dtype, and the scales are left out; NONE: all stays
                             as it is. A cast of theirs counts instead. */
    int64_t dequantize_block; /* rows and columns of a block; 0: DCP_QUANTIZED_BLOCK */
    bool allow_overflow;      /* they become infinite, NaN or the nearest integer, and are counted in the report */
    const dcp_convert_part
        *parts; /* several outputs: each name goes to the first part that fits it, to exactly one (NOT_FOUND) */
    size_t n_parts;
    dcp_alias alias;
    dcp_objects objects;
    uint64_t max_file_bytes; /* HF: of the tensors of one file, unless one alone has more; 0: one file */
    const char *mapping;     /* HF: an index file, whose weight_map says which tensor goes to which file; it names exactly the
                                tensors of the output. NULL: that of a source that has one, unless max_file_bytes is given. */
    int ranks; /* DCP: written as by so many ranks, each with its rows of every tensor; 0: one, chunks as they are */
    int files; /* DCP: as in dcp_save_opts, and so are the next four */
    bool file_per_item, align_payloads;
    const char *transform;
    int target_release;
    dcp_comm *comm; /* HF: the ranks that convert together, each its share of the files. NULL: this process alone. Borrowed. */
    /* Called now and then, from one thread at a time, with bytes read, and read back, of those in all; false cancels. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
} dcp_convert_opts;

#define DCP_CONVERT_OPTS_INIT DCP_INIT_WITH(dcp_convert_opts, open, DCP_OPEN_OPTS_INIT)

typedef struct dcp_convert_report {
    size_t struct_size;
    size_t n_tensors, n_objects; /* written */
    size_t n_files;              /* made by this call */
    size_t n_kept;               /* finished files of an earlier try */
    size_t n_shared;             /* names that share the elements of another one in the output */
    size_t n_aliases_dropped, n_objects_dropped;
    size_t n_dequantized;    /* tensors */
    uint64_t bytes;          /* of the files made by this call */
    uint64_t n_cast, n_lost; /* elements that were cast, and those of them that did not fit */
    double write_seconds,
        check_seconds; /* together with what made it durable; reading back. Files made at the same time add up. */
} dcp_convert_report;

#define DCP_CONVERT_REPORT_INIT DCP_INIT(dcp_convert_report)

/* Turns any checkpoint into one of the form opts->to, in bounded memory. Each byte of a tensor is read once, in large requests,
 * and checked by the source's CRCs where it has them. The free space is looked at first; what is written is read back and
 * compared by digest before it gets its name. With opts->comm collective: all ranks have the same source, target and options, and
 * get the same result, but for the report, which tells what this rank did. Errors: those of dcp_checkpoint_open and dcp_read;
 * EXISTS; ARG (options, a rename); NOT_FOUND (a pattern without a match); MISMATCH (two tensors of one name, numbers that do not
 * fit, aliases, a mapping that does not fit the tensors); UNSUPPORTED (a dtype or an object that the form cannot hold, a cast
 * that there is not); LIMIT (a header that readers refuse); NOSPACE; CHECKSUM (what is read back differs); CANCELED; with
 * opts->comm all of these as PEER. After an error what was there before is whole. */
DCP_API dcp_status dcp_convert(dcp_context *ctx, const char *from, const char *to, const dcp_convert_opts *opts,
                               dcp_convert_report *report, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
