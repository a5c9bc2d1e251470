/*
 * dcp/save.h - write checkpoints.
 *
 *     dcp_save_report report = DCP_SAVE_REPORT_INIT;
 *     if (dcp_save(NULL, "run/step-1000", state, NULL, &report, &err) != DCP_OK) { ... }
 *
 * What is written is a PyTorch Distributed Checkpoint, loaded by every PyTorch from 2.1 on that knows its dtypes. An existing
 * checkpoint is only replaced if that is asked for, and then as a whole: at every moment the directory holds the old checkpoint
 * or the new one, whatever crashes (docs/design/save.md).
 *
 * dcp_save is made of the steps below it, which may be called one by one to change the plan on the way.
 *
 * Threads: one save or plan belongs to one call at a time; several saves to several places may run at once. All calls block.
 */
#ifndef DCP_SAVE_H
#define DCP_SAVE_H

#include "backend.h"
#include "checkpoint.h"
#include "state.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dcp_serialization {
    DCP_SERIALIZE_TORCH_SAVE = 0, /* torch.save records: what PyTorch reads */
    DCP_SERIALIZE_SAFETENSORS = 1 /* a safetensors blob in each file: PyTorch writes this form too, but only libdcp reads it */
} dcp_serialization;

/* What a save does when it has failed and nothing of it is left. */
typedef enum dcp_on_failure {
    DCP_FAILURE_RETURN = 0, /* returns the error */
    DCP_FAILURE_WARN = 1    /* logs a warning and returns OK, with the error's status in the report: for jobs that would rather go
                               on; wrong arguments are returned all the same */
} dcp_on_failure;

/* A plan to be used again by the next save of the same structure. One for each sequence of saves. */
typedef struct dcp_plan_cache dcp_plan_cache;
DCP_API dcp_status dcp_plan_cache_create(dcp_context *ctx, dcp_plan_cache **out, dcp_error *err);
DCP_API void dcp_plan_cache_free(dcp_plan_cache *cache); /* NULL is allowed */

/* A process of its own, dcp-writer, for programs whose own threads must not wait for storage: it moves the bytes of large
 * payloads to local files and does nothing else. It is started when the first save needs it, serves all saves with the handle,
 * one request at a time, is replaced when it has died, and ends with the handle or with this process. */
typedef struct dcp_helper dcp_helper;

/* path: of dcp-writer; NULL: as the environment's DCP_WRITER says, else beside the library. Nothing is started yet. Errors:
 * UNSUPPORTED (there is none), ARG, NOMEM. Local. */
DCP_API dcp_status dcp_helper_create(dcp_context *ctx, const char *path, dcp_helper **out, dcp_error *err);
/* Ends the process. No save may be using it. NULL is allowed. */
DCP_API void dcp_helper_free(dcp_helper *helper);

/* Memory that is the caller's again before the save has ended. */
typedef struct dcp_lending {
    /* Whether the caller wants that of a tensor back early; asked of those that this rank writes, from one thread. */
    bool (*is_lent)(void *user, const dcp_tensor *t);
    /* Called once, when the last of them has been written, which the save does first where no transform is applied; at once if
     * this rank writes none of them. Not called by a save that fails before. From any thread of the save; must not block. */
    void (*returned)(void *user);
    void *user;
} dcp_lending;

typedef struct dcp_save_opts {
    size_t struct_size;
    dcp_storage *storage; /* where path is a directory's name ("" the root); NULL: the local file system. Borrowed. */
    bool overwrite;       /* replace an existing checkpoint; otherwise EXISTS */
    bool no_sync;         /* do not make anything durable before publishing it */
    int files;            /* data files of this rank, 1 to 1000; 0: 1 */
    bool file_per_item;   /* one file for each record instead */
    bool align_payloads;  /* start payloads of 1 MiB and more at multiples of 4096 in the file */
    dcp_serialization serialization;
    const char *transform;     /* of every record: "stream.zstd/1"; NULL: none */
    int target_release;        /* oldest PyTorch to serve, major * 100 + minor; 0: the oldest that knows all dtypes */
    const char *save_id;       /* NULL: a new UUID */
    const char *checkpoint_id; /* noted in the metadata; NULL: path */
    /* Called now and then, from one thread at a time, with payload bytes written and in all; false cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    void *user;
    /* Several ranks. These options are equal on all of them, as are those above but for files, progress and user. */
    dcp_comm *comm;       /* the group that saves together; NULL: this process alone. Borrowed, and used for nothing else. */
    int coordinator;      /* rank of the group that claims the place and publishes */
    bool dedup_to_lowest; /* what several ranks hold is written by the lowest of them instead of the one with least to do */
    bool check_content;   /* compare what several ranks hold under one name: MISMATCH if it differs */
    const char *const *per_rank; /* glob patterns of names that each rank has for itself: saved as "rank.<r>.<name>" */
    size_t n_per_rank;
    dcp_plan_cache *cache;  /* kept from save to save: an unchanged plan is not made again; NULL: none. Changed on success. */
    dcp_failures *failures; /* out: the ranks that failed, and why; NULL: not wanted */
    dcp_on_failure on_failure;
    /* Without communication: each rank writes `__<rank>.metadata` of its own; comm is NULL. Never overwrites. */
    bool rank_local;
    int rank, world;         /* of this process; world alone: the session's ranks communicate by other means, see the end */
    const dcp_error *failed; /* why this rank cannot take part: the others learn of it; NULL: it can. The state is not used. */
    /* Tensors on devices. What is saved is what the work in `stream` leaves: the handle of the vendor's stream that the tensors
     * are computed in, fetched right before the call; NULL: the device's default stream. */
    void *stream;
    uint64_t copy_ahead_bytes; /* each thread copies so much to the host while it writes what came before; 0: nothing */
    dcp_helper *helper; /* large payloads are written by its process; NULL: by this one. Borrowed. While it does not answer,
                           progress is asked; false ends the process with the save. */
    int max_writers; /* with comm: so many ranks write at the same time at most, equal on all of them; the others wait for their
                        turn. For storages that many writers slow down. 0: all. */
    const dcp_lending *lending; /* NULL: all memory of the state is lent until the save has ended. Borrowed. Not for saves in the
                                   background, which tell by themselves. */
} dcp_save_opts;

#define DCP_COPY_AHEAD_BYTES 3145728u
#define DCP_SAVE_OPTS_INIT DCP_INIT_WITH(dcp_save_opts, copy_ahead_bytes, DCP_COPY_AHEAD_BYTES)

/* What a storage could not do, so that the save went on without. */
typedef enum dcp_degraded {
    DCP_DEGRADED_SYNC = 1,   /* the storage refuses to make files durable */
    DCP_DEGRADED_RENAME = 2, /* no atomic rename: the metadata was written under its final name, last */
    DCP_DEGRADED_LOCK = 4    /* no locks: another save to the same place would not have been noticed */
} dcp_degraded;

/* What one rank did. */
typedef struct dcp_rank_report {
    double plan_seconds, write_seconds, sync_seconds;
    uint64_t bytes; /* written to data files */
} dcp_rank_report;

typedef struct dcp_save_report {
    size_t struct_size;
    double plan_seconds, write_seconds, sync_seconds, commit_seconds;
    uint64_t bytes;         /* written to data files */
    uint64_t payload_bytes; /* of them, tensor elements */
    size_t n_items, n_records, n_files;
    size_t n_tied;      /* items that share the record of another one */
    unsigned degraded;  /* dcp_degraded */
    int target_release; /* oldest PyTorch that reads it */
    char save_id[40];
    dcp_status status;       /* with DCP_FAILURE_WARN: why there is no checkpoint; else OK */
    bool was_planned_before; /* the plan came from the cache */
    uint64_t plan_bytes;     /* that this rank sent to make the plan */
    int world;
    int slowest_rank;       /* of plan, write and sync together */
    dcp_rank_report *ranks; /* in: room for n_ranks entries, or NULL; out: filled in, in order of ranks */
    size_t n_ranks;
} dcp_save_report;

#define DCP_SAVE_REPORT_INIT DCP_INIT(dcp_save_report)

/* Saves a dict as a checkpoint below path; with opts->comm collective: every rank brings its part, and all get the same result.
 * opts and report may be NULL; report is filled on success. Errors: EXISTS (a checkpoint is there, something is in the way, or
 * another save to the same place is running), MISMATCH (two names collide), UNSUPPORTED (dtype or option against target_release;
 * a tensor on a device whose library is absent; a storage without random writes), DEVICE, ARG, LIMIT, NOSPACE, IO, NOT_FOUND (the
 * directory has vanished), CANCELED, NOMEM; with opts->comm all of these as PEER, on every rank, with the causes of all that
 * failed. After an error the previous checkpoint is whole and nothing of this save is left behind but directories that it made.
 * Where removing fails as well, the next save removes it. One exception: if the storage fails while the finished checkpoint is
 * made visible or durable, the message says so, the files of both stay, and the one that holds is whole. */
DCP_API dcp_status dcp_save(dcp_context *ctx, const char *path, dcp_value *state, const dcp_save_opts *opts,
                            dcp_save_report *report, dcp_error *err);

/* ---- the steps of dcp_save ---- */

struct dcp_write_item;

/* Gives n bytes of an item's row-major elements, from byte `offset` on. Called in ascending order for one item, from several
 * threads for several items. */
typedef dcp_status (*dcp_pull_fn)(void *user, const struct dcp_write_item *item, uint64_t offset, void *buf, size_t n,
                                  dcp_error *err);

/* One thing to write: a chunk of a tensor, or an object. Owned by the plan, which borrows the state. */
typedef struct dcp_write_item {
    dcp_str fqn;
    const dcp_key *path;
    size_t path_len;
    dcp_item_kind kind;
    dcp_dtype dtype; /* tensors */
    int ndim;
    const int64_t *global_extents; /* of the whole tensor */
    dcp_box box;                   /* the part that this item holds */
    dcp_tensor tensor;             /* its elements; data NULL: they come from pull */
    dcp_pull_fn pull;
    void *pull_user;
    uint64_t pull_index;     /* for pull to know the item by */
    uint64_t tie;            /* with pull: items of equal tie, dtype and shape are one record; 0: none */
    const dcp_value *object; /* objects */
    uint64_t bytes;          /* elements times size; 0 for objects, whose size is known when they are written */
    bool per_rank;           /* each of several ranks has its own: rank r's is saved as "rank.<r>.<fqn>" */
} dcp_write_item;

typedef struct dcp_save_plan dcp_save_plan;

/* Flattens the state and lists what there is to write. Chunks without elements of tensors that have some are left out.
 * Errors: as dcp_flatten; ARG (a sharded tensor's chunks overlap). */
DCP_API dcp_status dcp_plan_save(dcp_context *ctx, dcp_value *state, dcp_save_plan **out, dcp_error *err);
DCP_API void dcp_save_plan_free(dcp_save_plan *plan);
DCP_API size_t dcp_save_plan_count(const dcp_save_plan *plan);
DCP_API const dcp_write_item *dcp_save_plan_item(const dcp_save_plan *plan, size_t i);
/* Adds an item at the end. Names, paths, shapes and data are borrowed until the plan is freed; bytes is computed. Chunks of one
 * tensor follow each other. Errors: ARG (a part outside the tensor, memory of another shape or dtype, something missing), LIMIT,
 * UNSUPPORTED, NOMEM. */
DCP_API dcp_status dcp_save_plan_add(dcp_save_plan *plan, const dcp_write_item *item, dcp_error *err);
/* Takes item i out of the plan; later items move up. */
DCP_API void dcp_save_plan_remove(dcp_save_plan *plan, size_t i);

/* Lists everything in an open checkpoint, to be read while it is written: memory stays bounded. Chunks and ties stay as they are;
 * values of single ranks become "rank.<r>.<name>". The checkpoint is borrowed until the plan is freed; what is read of it is
 * checked as it was opened to be (check_crc).
 * Errors: those of dcp_read_object. */
DCP_API dcp_status dcp_plan_copy(dcp_checkpoint *ck, dcp_save_plan **out, dcp_error *err);

/* Reads any checkpoint and writes a clean one, in bounded memory. The CRC-32 of every record that has one is checked, so that a
 * broken record is never written again with a checksum that is right. A checkpoint can be copied over itself with overwrite: it
 * holds until its copy does. Errors: as dcp_checkpoint_open, dcp_read_many and dcp_save. */
DCP_API dcp_status dcp_copy(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to,
                            const dcp_save_opts *opts, dcp_save_report *report, dcp_error *err);

/* Makes an ordinary checkpoint of what the ranks of a save without communication have left. A name that several ranks hold with
 * different values becomes "rank.<r>.<name>" for each of them; where their values are equal, there is one. Parts of sharded
 * tensors are united. Otherwise as dcp_copy. Errors: also MISMATCH (the checkpoint is no rank-local one). */
DCP_API dcp_status dcp_merge(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to,
                             const dcp_save_opts *opts, dcp_save_report *report, dcp_error *err);

#define DCP_REPLICATE (-1)

/* How tensors lie on a mesh of ranks. */
typedef struct dcp_placement {
    const char *names; /* glob pattern of the names that it is for */
    const int *axes;   /* for each dimension of the mesh the axis of the tensor that it splits, or DCP_REPLICATE. Dimensions that
                          split the same axis do so one after the other, each as torch.chunk does: the last parts may be smaller, or
                          empty. */
} dcp_placement;

typedef struct dcp_reshard_opts {
    size_t struct_size;
    int n_mesh;                      /* dimensions of the mesh; 0: one rank */
    const int *mesh;                 /* ranks along each of them, 4096 in all at most; the last dimension counts fastest */
    const dcp_placement *placements; /* the first that fits a name counts; without one the last dimension splits axis 0 and the
                                        others replicate */
    size_t n_placements;
} dcp_reshard_opts;

#define DCP_RESHARD_OPTS_INIT DCP_INIT(dcp_reshard_opts)

/* Reads any checkpoint and writes what the ranks of a mesh would have written together, in bounded memory: the ranks are threads
 * of this call. Tensors without dimensions and objects are replicated. The source is verified first, so that nothing broken gets
 * a checksum that is right. The report is of all ranks together. save->comm, rank_local, cache and per_rank are not set. Errors:
 * as dcp_checkpoint_open, dcp_verify and dcp_save; ARG (no such mesh, or no such axis in a tensor), NOT_FOUND (also: names that
 * no tensor has), the code of the first defect of the source. */
DCP_API dcp_status dcp_reshard(dcp_context *ctx, const char *from, const dcp_open_opts *open, const char *to,
                               const dcp_reshard_opts *opts, const dcp_save_opts *save, dcp_save_report *report, dcp_error *err);

/* A save under way: the place is claimed, nothing is published. */
typedef struct dcp_save_session dcp_save_session;

/* Collective. Claims the place: checks what is there, chooses file names that touch nothing old, removes what dead saves have
 * left, and excludes other saves until the session ends. Errors: EXISTS, ARG, UNSUPPORTED, IO, NOMEM. */
DCP_API dcp_status dcp_save_begin(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_save_session **out,
                                  dcp_error *err);
/* Collective. Decides who writes what several ranks hold, and checks that all plans together make whole tensors. Once for each
 * session; the plan is not changed after it. dcp_save_write does it where it was not done. Errors: ARG (chunks outside their
 * tensor, overlapping, or leaving gaps), MISMATCH (ranks disagree on a name, an object is in the plan twice). */
DCP_API dcp_status dcp_plan_save_global(dcp_save_session *session, const dcp_save_plan *plan, dcp_error *err);
/* True if this rank is to write item i. */
DCP_API bool dcp_save_writes(const dcp_save_session *session, size_t i);
/* Collective. Writes this rank's records of a plan and makes them durable. Once for each session (STATE). The plan is borrowed
 * until the session ends, since the metadata is made of it. After an error the session can only be given up. Errors: as
 * dcp_save. */
DCP_API dcp_status dcp_save_write(dcp_save_session *session, const dcp_save_plan *plan, dcp_error *err);
/* Collective. Publishes the metadata and removes what the old checkpoint alone used. Frees the session in every case; on failure
 * the session's files are removed. report may be NULL. */
DCP_API dcp_status dcp_save_commit(dcp_save_session *session, dcp_save_report *report, dcp_error *err);
/* Local. Gives up: removes this rank's files and frees the session. Of several ranks, given up after the writing, the note by
 * which the next save finds what others may have left stays until then. NULL is allowed. */
DCP_API void dcp_save_abort(dcp_save_session *session);

/* ---- saves whose ranks plan and communicate by other means ----
 *
 * One rank, the coordinator, claims the place with opts->world and tells the others the generation. Every rank plans, and writes
 * by dcp_write_files; the coordinator is told what is where, describes and commits it, or aborts. Nothing here is collective. */

/* Part of the file names that touch nothing old: "" where none is needed. Names of data files are to be "__<rank>_<n>.distcp", or
 * "__<rank>_<generation>_<n>.distcp", so that what a save that dies leaves can be told. Valid as long as the session. */
DCP_API const char *dcp_save_generation(const dcp_save_session *session);
/* The save id. */
DCP_API const char *dcp_save_id(const dcp_save_session *session);

/* Where an item was written: file i is "<prefix><i>.distcp". */
typedef struct dcp_written {
    uint32_t file;
    bool is_transformed;
    uint64_t offset, length;
} dcp_written;

/* Writes all items of a plan to files of that prefix, which must not be there yet, and makes them durable: out[i] is the place of
 * item i. Of opts count storage, no_sync, files, file_per_item, align_payloads, serialization, transform, progress and helper.
 * After an error none of the files is left. report may be NULL. Errors: as dcp_save; EXISTS (a file of that name). */
DCP_API dcp_status dcp_write_files(dcp_context *ctx, const char *path, const char *prefix, const dcp_save_plan *plan,
                                   const dcp_save_opts *opts, dcp_written *out, dcp_save_report *report, dcp_error *err);

/* An item of a checkpoint and where its parts are; objects have one, without a box. Of the item count fqn, kind, dtype, ndim,
 * extents, n_chunks and path. */
typedef struct dcp_described {
    dcp_item item;
    const dcp_chunk_info *chunks;
} dcp_described;

/* What dcp_save_commit is to publish, instead of dcp_save_write, in a session with opts->world. Once for each session (STATE).
 * Boxes are checked to be within their tensors; whether they cover them is the planner's matter. Errors: ARG, LIMIT, UNSUPPORTED
 * (against target_release), STATE, NOMEM. */
DCP_API dcp_status dcp_save_describe(dcp_save_session *session, const dcp_described *rows, size_t n, dcp_error *err);

#ifdef __cplusplus
}
#endif
#endif
