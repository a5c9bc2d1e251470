/* What the files of the extension share. Functions follow Python's rule: NULL or -1 with an exception set; those that return a
 * dcp_status run without the interpreter lock unless they say otherwise. */
#ifndef DCP_PYTHON_CORE_H
#define DCP_PYTHON_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <pthread.h>

#include <dcp/dcp.h>

/* Attribute names and other objects that are needed often; made once, kept to the end of the process. */
typedef struct core_names {
    PyObject *data_ptr, *dtype, *is_conj, *is_contiguous, *is_cpu, *is_neg, *layout, *nbytes, *shape, *storage_offset, *stride,
        *untyped_storage;
    PyObject *items, *release, *from_bytes;
    PyTypeObject *ordered_dict;
} core_names;
extern core_names names;

/* An object of one of the module's types, all zeros behind its head; NULL with an exception. */
void *object_new(PyTypeObject *type);
/* At the end of a type's tp_dealloc. */
void object_free(PyObject *self);

/* ---- py_errors.c ---- */

int errors_init(PyObject *module);
/* Raises what err says, as the class for its code; returns NULL. failures may be NULL. cause (may be NULL, stolen): the exception
 * of this process that the error stems from. With it and without failures, or if it is no Exception but a
 * KeyboardInterrupt or the like, that very exception is raised. */
PyObject *errors_raise(const dcp_error *err, const dcp_failures *failures, PyObject *cause);
/* Raises a dcp_status of this extension's own making. */
PyObject *errors_raise_text(dcp_status code, const char *fmt, ...);
/* Takes the exception that is set: its status and text go to err, the object to *kept, unless there is one already. With the
 * interpreter lock. */
dcp_status errors_take(PyObject **kept, dcp_error *err);
/* The exception that is set, taken; a new reference. */
PyObject *errors_fetch(void);

/* ---- py_call.c: running the library's functions ---- */

/* One call of the library: what its hooks need. First member of what is given to them as `user`. */
typedef struct core_call {
    PyObject *progress;           /* borrowed; NULL: none */
    struct core_control *control; /* borrowed; NULL: none */
    PyObject *exception;          /* raised by a callback */
    bool is_main;                 /* made by the thread that handles signals */
    bool is_watched;              /* that thread waits and looks around while another one works */
    pthread_t caller;
    double last_told;  /* of whoever has the hook */
    PyObject *context; /* capsule that owns ctx */
    dcp_context *ctx;
    dcp_failures *failures;
    dcp_error err;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t changed;
    uint64_t done_bytes, total_bytes;
    bool is_told; /* there is nothing that the waiting thread should tell the caller */
    bool is_stopped, is_finished;
} core_call;

/* Of the monotonic clock. */
double seconds_now(void);

/* A context that lives as long as the capsule, for values that outlive what they were read from. threads and memory_bytes: 0 for
 * the default. */
PyObject *context_new(int threads, unsigned long long memory_bytes, dcp_context **out);

typedef dcp_status (*core_work)(void *arg, dcp_error *err);

/* progress: a callable, a Control, None or NULL. */
int call_begin(core_call *c, int threads, unsigned long long memory_bytes, PyObject *progress);
/* Runs work(arg) without the interpreter lock. With may_move it runs in a thread of its own while this one looks after signals
 * and progress; without it, for communicators that stay on the caller's thread, both are done between its steps. Returns its
 * status. */
dcp_status call_run(core_call *c, core_work work, void *arg, bool may_move);
/* The progress hook of the library's options; `user` is the call. */
bool call_progress(void *user, uint64_t done_bytes, uint64_t total_bytes);
/* Raises what went wrong, if status or a callback says so, and frees. 0, or -1 with an exception. */
int call_end(core_call *c, dcp_status status);

/* A list of texts as an array; NULL for none. Free with strings_free. */
int strings_from(PyObject *texts, const char ***out, size_t *n);
void strings_free(const char **texts);

/* ---- py_descriptor.c: tensors of other packages ---- */

/* Memory that is borrowed from Python objects until it is reset. */
typedef struct core_keep {
    PyObject *objects; /* list */
    Py_buffer **buffers;
    size_t n_buffers, cap_buffers;
} core_keep;

int keep_init(core_keep *k);
void keep_reset(core_keep *k);
int keep_object(core_keep *k, PyObject *object);
/* The bytes of an object with the buffer protocol. */
int keep_bytes(core_keep *k, PyObject *object, const void **bytes, size_t *len);

/* A dtype by PyTorch's name; DCP_DTYPE_NONE with an exception if there is none. */
dcp_dtype dtype_from(PyObject *name);
/* Fast ways for exact types. 1: *out is the tensor; 0: describe() has to say; -1: exception. */
int tensor_from_torch(core_keep *keep, PyObject *object, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM]);
int tensor_from_buffer(core_keep *keep, PyObject *object, bool is_target, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM]);
int tensor_from_dlpack(core_keep *keep, PyObject *capsule, bool is_target, dcp_tensor *out, int64_t numbers[2 * DCP_MAX_NDIM]);
/* -1 with a ValueError for a tensor that reaches beyond the `bytes` that there are from its first element on. A storage that was
 * shrunk (`untyped_storage().resize_()`, as FSDP does it) leaves its tensors as they were. */
int refuse_beyond(const dcp_tensor *t, long long bytes);
/* Whether all elements of a target along a dimension are one, so that it cannot be filled. */
bool is_overlapping(const dcp_tensor *target);
#define ONE_PLACE "elements of the tensor to be filled lie at one place in memory; clone() it before"
/* A value of a ("t", ...), ("s", ...), ("b", ...) or ("d", ...) descriptor. */
dcp_value *value_from_descriptor(core_keep *keep, PyObject *descriptor, bool is_target);
/* The tensor of a descriptor that is no sharded one; extents and strides go to numbers. */
int tensor_from_descriptor(core_keep *keep, PyObject *descriptor, bool is_target, dcp_tensor *out,
                           int64_t numbers[2 * DCP_MAX_NDIM]);
char descriptor_kind(PyObject *descriptor);
/* n integers of a sequence. */
int integers_from(PyObject *sequence, Py_ssize_t n, int64_t *out, const char *what);
/* A tuple of n integers. */
PyObject *integers_to(const int64_t *numbers, size_t n);

/* ---- py_scalars.c ---- */

/* A value of None, bool, int, float, complex, str, bytes or bytearray; *is_known is false for other types. */
int scalar_from_python(PyObject *object, bool *is_known, dcp_value **out);
/* The text of a str, UTF-8 or WTF-8. *holder (a new reference, or NULL) owns it where the str does not. */
int str_from_python(PyObject *text, dcp_str *out, PyObject **holder);
/* For "O&": a str as bytes object (PyObject **, owned; text_of for its text), UTF-8 or WTF-8; NULL for None. */
int text_converter(PyObject *text, void *out);
const char *text_of(PyObject *bytes);

/* ---- py_tree_in.c ---- */

typedef struct core_leaf {
    const dcp_value *value;
    PyObject *object;  /* borrowed from keep */
    bool is_described; /* by the caller; others are filled where they lie */
} core_leaf;

typedef struct core_tree {
    PyObject *describe, *pickle; /* borrowed; pickle NULL: objects of unknown classes are refused */
    PyObject *tensor_types;      /* tuple */
    bool is_target;              /* to be loaded into: objects are only places */
    core_keep keep;
    core_leaf *leaves; /* tensors */
    size_t n_leaves, cap_leaves;
    size_t next_leaf; /* behind the one that was looked up last */
    dcp_value *root;
    struct tree_memo *memo;
    size_t n_memo, memo_slots;
    struct tree_step *path;
    size_t path_len, path_cap;
    PyObject *stream;    /* of the caller's devices, or a function that tells when all tensors have been described */
    void *stream_handle; /* what came of it */
} core_tree;

/* Checks what callers give. pickle and tensor_types may be NULL. */
int tree_begin(core_tree *t, PyObject *describe, PyObject *pickle, PyObject *tensor_types);
/* Makes t->root and t->stream_handle; in a group a failure goes to *failed and the call instead, for the other ranks to learn of
 * it. */
int tree_make(core_tree *t, PyObject *root, bool in_group, core_call *c, dcp_error *failed);
/* Makes t->root of a dict. Reset in every case. */
int tree_from_python(core_tree *t, PyObject *root);
void tree_reset(core_tree *t);
/* The leaf of a tensor of the tree; NULL if there is none. Fast for leaves that are asked for in their order. */
const core_leaf *tree_leaf_of(core_tree *t, const dcp_value *v);

/* ---- py_tree_out.c ---- */

/* Python's objects for a value. tensor: called with (dtype, shape, memory or None) for tensors; opaque: with (kind, text) for
 * what Python's own types do not hold. Where one of them is NULL such a value is refused: NULL without an exception. owner: kept
 * alive by the memory of tensors. */
PyObject *value_to_python(dcp_value *v, PyObject *tensor, PyObject *opaque, PyObject *owner);
PyObject *str_to_python(dcp_str s);
PyObject *path_to_python(const dcp_key *path, size_t n);
int memory_init(PyObject *module);

/* ---- py_group.c ---- */

int group_init(PyObject *module);
/* The communicator of a Group or None; *comm is NULL for None. */
int group_use(PyObject *group, dcp_comm **comm);
/* After the call: takes over what one of the group's functions raised, if *exception is NULL. */
void group_done(PyObject *group, PyObject **exception);

/* ---- py_background.c ---- */

typedef struct core_control core_control;

int background_init(PyObject *module);
/* The handle of a Helper or None; *out is NULL for None. */
int helper_use(PyObject *object, dcp_helper **out);
/* NULL if the object is none. */
core_control *control_of(PyObject *object);
/* How far the work is; waits if it is too fast. False: it is to end. From one thread at a time, without the interpreter lock. */
bool control_note(core_control *c, uint64_t done_bytes, uint64_t total_bytes);
PyObject *core_lower_priority(PyObject *module, PyObject *unused);

/* ---- py_save.c, py_load.c, py_checkpoint.c, py_writer.c, py_convert.c ---- */

PyObject *core_save(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_load(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_open(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_latest(PyObject *module, PyObject *path);
PyObject *core_convert(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_claim(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_write_items(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_write_safetensors(PyObject *module, PyObject *args, PyObject *kwargs);
int plan_cache_init(PyObject *module);
int claim_init(PyObject *module);
int serialization_from(const char *text, dcp_serialization *out);
int checkpoint_init(PyObject *module);
/* The open checkpoint of a Checkpoint object; NULL with an exception if it is none, or closed. */
dcp_checkpoint *checkpoint_of(PyObject *object);
bool is_checkpoint(PyObject *object);
PyObject *checkpoint_context(PyObject *object); /* capsule; borrowed */
/* Around the use of an open checkpoint without the interpreter lock: it cannot be closed then. Others than checkpoints are passed
 * over. */
void checkpoint_enter(PyObject *object);
void checkpoint_leave(PyObject *object);

PyObject *save_report_to_python(const dcp_save_report *r);
/* ---- py_copy.c ---- */

PyObject *core_copy_many(PyObject *module, PyObject *args, PyObject *kwargs);

/* ---- py_device.c ---- */

/* "cpu", "cuda:0", "npu:1"; without a number the first. NULL: the host. */
int device_from(PyObject *name, dcp_device *out);
/* The handle of a device's stream, an int; None or NULL: the default one. */
int stream_from(PyObject *number, void **out);
/* The same, or what a function without arguments returns. */
int stream_asked(PyObject *stream, void **out);
PyObject *core_open_device(PyObject *module, PyObject *name);

/* ---- py_lending.c ---- */

typedef struct core_range {
    const char *start;
    size_t bytes;
} core_range;

typedef struct core_lending {
    dcp_lending table;
    PyObject *returned; /* borrowed */
    core_range *ranges; /* by address; none overlap */
    size_t n;
} core_lending;

/* lent: a function that gives [(address, bytes), ...] or None; it, or what it gives, may be missing: then *out is left alone, or
 * NULL. told: a function. -1 with an exception. Call lending_reset in every case. */
int lending_ask(core_lending *l, PyObject *lent, PyObject *told, const dcp_lending **out);
void lending_reset(core_lending *l);

/* Dicts of reports: each sets dict[key] and returns -1 on failure. */
int put(PyObject *dict, const char *key, PyObject *value); /* steals value, which may be NULL with an exception */

#endif
