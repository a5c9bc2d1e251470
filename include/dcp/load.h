/*
 * dcp/load.h - load a checkpoint into a state.
 *
 *     dcp_load_report report = DCP_LOAD_REPORT_INIT;
 *     dcp_load(NULL, "run/step-1000", state, NULL, &report, &err);   // tensors are filled in place
 *
 * The state is a dict of the same form as was saved: its tensors (any strides, views, chunks of sharded tensors) are filled where
 * they are, other leaves are replaced by the saved values. To get everything without a state, see dcp_read_tree.
 *
 * Threads: the state belongs to the call. All calls block.
 */
#ifndef DCP_LOAD_H
#define DCP_LOAD_H

#include "checkpoint.h"
#include "state.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Changes a name of the state into the checkpoint's name for it: return a new text made with malloc, or NULL to leave it out of
 * the load. */
typedef char *(*dcp_rename_fn)(void *user, dcp_str fqn);

/* An object of the state that is being loaded. */
typedef struct dcp_load_object {
    dcp_str fqn;         /* in the state */
    const dcp_key *path; /* in the state */
    size_t path_len;
    dcp_checkpoint *ck;   /* that it is loaded from; reading of it is allowed */
    const dcp_item *item; /* what it is there; NULL: several items below `name`, as one value */
    dcp_str name;         /* in the checkpoint */
} dcp_load_object;

/* Takes an object over instead of having it put into the state: the function may read it by dcp_read_object, dcp_read_record, or,
 * where item is NULL or a tensor, by dcp_read_load_object. Called on the thread that loads, after all tensors. A failure fails
 * the load. */
typedef dcp_status (*dcp_object_fn)(void *user, const dcp_load_object *object, dcp_error *err);

/* Asked for a tensor of the state whose dtype is not the checkpoint's: gives a tensor (or sharded tensor with the same parts) of
 * the checkpoint's dtype that is filled instead, for the caller to convert afterwards; NULL leaves it a difference. The result is
 * a new reference. */
typedef dcp_value *(*dcp_convert_fn)(void *user, dcp_str fqn, dcp_value *tensor, dcp_dtype saved);

/* A torch.save file that one rank reads for all; see below. */
typedef struct dcp_torchfile_reader dcp_torchfile_reader;

/* Told of a tensor (or sharded tensor) of the state that the load is going to fill, before anything is read; not of those that it
 * leaves alone. A failure fails the load. */
typedef dcp_status (*dcp_target_fn)(void *user, dcp_str fqn, dcp_value *tensor, dcp_error *err);

typedef struct dcp_load_opts {
    size_t struct_size;
    dcp_open_opts open;
    bool partial;               /* names of the state that the checkpoint lacks are left as they are instead of an error */
    bool exact;                 /* names of the checkpoint that the state lacks are an error */
    const char *const *include; /* glob patterns of names of the state to load; n_include 0: all */
    size_t n_include;
    const char *const *exclude; /* glob patterns of names to leave alone */
    size_t n_exclude;
    const char *prefix;   /* put before each name of the state to get the checkpoint's; NULL: "" */
    dcp_rename_fn rename; /* after the prefix; NULL: none */
    void *user;
    dcp_comm *comm;              /* the group that loads together: all get the same result; NULL: this process alone. Borrowed. */
    const char *const *per_rank; /* as in dcp_save_opts: names that this rank takes from "rank.<r>.<name>" */
    size_t n_per_rank;
    dcp_failures *failures;   /* out: the ranks that failed, and why; NULL: not wanted */
    dcp_object_fn object;     /* NULL: objects are put into the state */
    bool objects_for_tensors; /* with object: where the state has a tensor and the checkpoint an object, that is handed over, too,
                                 instead of being a difference */
    dcp_convert_fn convert;   /* NULL: other dtypes are differences */
    /* Called now and then, from one thread at a time, with bytes of tensors read and in all; false cancels. NULL: none. */
    bool (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
    const dcp_error *failed; /* why this rank cannot take part: the others learn of it; NULL: it can. The state is not used. */
    void *stream;            /* as in dcp_read_opts */
    /* With comm: what several ranks want is read by one of them, which sends it to the others, unless this is set on any rank.
     * For storages that are faster than the connection between the ranks. */
    bool no_read_once;
    const dcp_torchfile_reader *torchfile; /* dcp_load: load by this reader. NULL: every rank reaches the checkpoint. Borrowed. */
    dcp_target_fn target;                  /* NULL: not wanted */
} dcp_load_opts;

#define DCP_LOAD_OPTS_INIT DCP_INIT_WITH(dcp_load_opts, open, DCP_OPEN_OPTS_INIT)

typedef enum dcp_difference_kind {
    DCP_DIFF_MISSING = 1, /* in the state, not in the checkpoint */
    DCP_DIFF_UNEXPECTED,  /* in the checkpoint, not in the state */
    DCP_DIFF_SHAPE,
    DCP_DIFF_DTYPE,
    DCP_DIFF_KIND, /* tensor on one side, object on the other */
    DCP_DIFF_VALUE /* dcp_diff alone */
} dcp_difference_kind;

/* Called once for each difference before anything is read; text valid for the call. */
typedef void (*dcp_difference_fn)(void *user, dcp_difference_kind kind, dcp_str fqn, const char *text);

typedef struct dcp_load_report {
    size_t struct_size;
    dcp_difference_fn difference; /* in: may be NULL */
    void *user;                   /* in */
    size_t n_missing, n_unexpected, n_shape, n_dtype, n_kind;
    size_t n_tensors, n_objects; /* loaded */
    uint64_t bytes;              /* of the tensors loaded */
    double plan_seconds, read_seconds;
    uint64_t read_bytes;     /* of the tensors loaded, what this rank has read from the storage, for itself or for others too */
    uint64_t received_bytes; /* .. and what it has got from other ranks */
} dcp_load_report;

#define DCP_LOAD_REPORT_INIT DCP_INIT(dcp_load_report)

/* Loads path into state; where a save replaces the checkpoint meanwhile, the new one, in four tries at most. With opts->comm
 * collective: each rank brings a state of its own, with other chunks of the same tensors or other names altogether. Shapes,
 * dtypes and kinds must agree; all differences are found before anything is changed, and the error names the first eight. With
 * opts->torchfile path may be NULL, and is that of the reader then. Parts of tensors that several ranks want are read by one of
 * them and sent to the others (docs/design/ranks.md). report may be NULL and is filled also after MISMATCH and NOT_FOUND. Errors:
 * NOT_FOUND (missing names, or no checkpoint), MISMATCH, and those of dcp_checkpoint_open and dcp_read_many; with opts->comm all
 * of these as PEER, on every rank, and STATE if the ranks found different checkpoints. With opts->torchfile also UNSUPPORTED
 * (what is no tensor in the state), FORMAT (another form of checkpoint) and STATE (no path, or ranks that name different
 * coordinators). */
DCP_API dcp_status dcp_load(dcp_context *ctx, const char *path, dcp_value *state, const dcp_load_opts *opts,
                            dcp_load_report *report, dcp_error *err);

/* The same from an open checkpoint; opts->open is not used. */
DCP_API dcp_status dcp_load_from(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, dcp_load_report *report,
                                 dcp_error *err);

/* ---- the steps of dcp_load_from ---- */

typedef struct dcp_load_plan dcp_load_plan;

/* Compares the state with the checkpoint and lists what to read; an error as above. */
DCP_API dcp_status dcp_plan_load(dcp_checkpoint *ck, dcp_value *state, const dcp_load_opts *opts, dcp_load_plan **out,
                                 dcp_load_report *report, dcp_error *err);
/* The tensor reads of the plan, to be looked at or changed; n of them. */
DCP_API dcp_read_request *dcp_load_plan_requests(dcp_load_plan *plan, size_t *n);
/* Reads a load's object, whatever it is in the checkpoint; *out is a new reference. Errors: as dcp_read_object. */
DCP_API dcp_status dcp_read_load_object(const dcp_load_object *object, dcp_value **out, dcp_error *err);
/* Reads what the plan lists and puts objects into the state. */
DCP_API dcp_status dcp_load_read(dcp_checkpoint *ck, dcp_load_plan *plan, dcp_load_report *report, dcp_error *err);
DCP_API void dcp_load_plan_free(dcp_load_plan *plan);

/* ---- a torch.save file that one rank reads for all ----
 *
 *     dcp_torchfile_reader *reader;
 *     dcp_torchfile_reader_open(NULL, "pretrained.pt", 0, &reader, &err);    // every rank
 *     opts.torchfile = reader;
 *     opts.comm = comm;
 *     dcp_load(NULL, NULL, state, &opts, NULL, &err);
 *
 * Only the coordinator opens the file. The others learn from it what is in there, and what any rank wants goes to all of them in
 * messages of at most 8 MiB; each puts its part into its tensors, whole or sharded, in host memory or on a device. What is loaded
 * follows from the state: it may hold nothing but tensors, shapes must be those of the file, and elements are cast to the state's
 * dtypes as PyTorch's copy_ casts them. Source: PyTorch's BroadcastingTorchSaveReader with DynamicMetaLoadPlanner. */

/* path may be NULL until the load, and is copied. coordinator: a rank of the group that will load, equal on all of them. Errors:
 * ARG, NOMEM. Local; no file is opened. */
DCP_API dcp_status dcp_torchfile_reader_open(dcp_context *ctx, const char *path, int coordinator, dcp_torchfile_reader **out,
                                             dcp_error *err);
/* Another path, or none: NULL. Errors: NOMEM, after which the old one stands. */
DCP_API dcp_status dcp_torchfile_reader_reset(dcp_torchfile_reader *reader, const char *path, dcp_error *err);
/* NULL if it has none. */
DCP_API const char *dcp_torchfile_reader_path(const dcp_torchfile_reader *reader);
/* True for an existing regular file. */
DCP_API bool dcp_torchfile_validate_id(const char *path);
/* NULL is allowed. */
DCP_API void dcp_torchfile_reader_close(dcp_torchfile_reader *reader);

/* ---- the state of an optimizer that has none yet ---- */

/* What this rank holds of a parameter of a model that is itself cut among ranks (tensor parallelism). */
typedef struct dcp_model_shard {
    const char *name; /* of the parameter: the third key of the paths of its state */
    int ndim;
    dcp_box box; /* in the whole parameter */
} dcp_model_shard;

typedef struct dcp_optimizer_opts {
    size_t struct_size;
    dcp_open_opts open;
    int rank, world;               /* of the ranks that split rows among them; world 0: one */
    const dcp_model_shard *shards; /* NULL: parameters are whole but for that */
    size_t n_shards;
    dcp_comm
        *comm; /* the ranks that load at the same time, so that all get the same result; NULL: this process alone. Borrowed. */
    dcp_failures *failures; /* out: the ranks that failed, and why; NULL: not wanted */
} dcp_optimizer_opts;

#define DCP_OPTIMIZER_OPTS_INIT DCP_INIT_WITH(dcp_optimizer_opts, open, DCP_OPEN_OPTS_INIT)

/* A loaded state and the memory of its tensors. */
typedef struct dcp_optimizer dcp_optimizer;

/* Loads what is stored below the top-level key `key` ("optim"), without a state to be filled: what there is, and its shapes, come
 * from the checkpoint. Tensors of one element are whole; of larger ones this rank gets its rows, as torch.chunk cuts them (the
 * last ranks may have none), of the tensor or of the model's shard of it, whose shape is then that of the sharded tensor; the
 * rest are objects. Only the bytes that this rank gets are read. With opts->comm collective. Source: PyTorch's
 * load_sharded_optimizer_state_dict. Errors: ARG, MISMATCH (a shard outside of its tensor), those of dcp_checkpoint_open,
 * dcp_read_many and dcp_read_object; with opts->comm all of these as PEER. */
DCP_API dcp_status dcp_load_optimizer(dcp_context *ctx, const char *path, const char *key, const dcp_optimizer_opts *opts,
                                      dcp_optimizer **out, dcp_error *err);
/* The tree, with `key` at its top; an empty dict if nothing is stored below it. Borrowed; its tensors are valid as long as the
 * optimizer is. NULL for NULL. */
DCP_API dcp_value *dcp_optimizer_state(const dcp_optimizer *optimizer);
/* NULL is allowed. */
DCP_API void dcp_optimizer_free(dcp_optimizer *optimizer);

/* The device of a rank on a machine with n_local of that type: rank modulo n_local; 0 for CPU. */
DCP_API dcp_device dcp_device_for_rank(dcp_device_type type, int rank, int n_local);

#ifdef __cplusplus
}
#endif
#endif
