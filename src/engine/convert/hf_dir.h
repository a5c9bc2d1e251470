/* A Hugging Face directory as a place to write to: who may, what is there, and how a new model takes the place of an old one so
 * that whoever reads, and whenever the writer dies, finds one of them whole (docs/design/convert.md).
 *
 *     dcp__hf_enter(&d)                      locks the directory, and looks
 *     k = dcp__hf_generation(&d, ..)         what the new files have to be called
 *     dcp__hf_begin(&d, ..)                  from here on they are ignored
 *     ..                                     each is written as <name>.libdcp-part and then renamed, by whoever wrote it
 *     dcp__hf_commit(&d, ..)                 they are the model, and the old ones are removed
 *     dcp__hf_leave(&d)
 *
 * One process does this; others may write. */
#ifndef DCP_ENGINE_HF_DIR_H
#define DCP_ENGINE_HF_DIR_H

#include "engine/save/session.h"
#include "format/hf.h"

#define DCP__HF_EXTENSION ".safetensors"
#define DCP__HF_SINGLE "model" DCP__HF_EXTENSION
#define DCP__HF_OBJECTS "objects.pt"

typedef struct dcp__hf_dir {
    dcp_context *ctx;
    dcp_storage *storage;
    const char *path; /* in the storage, "" its root */
    bool no_sync;
    dcp_file *lock;   /* NULL: not entered */
    dcp__names live;  /* tensor files that readers take for the model */
    dcp__names dead;  /* what a writer that was killed left */
    bool has_index;   /* of the model that is there */
    json_t *index;    /* NULL: there is none that can be read */
    json_t *mark;     /* NULL: there was none */
    bool is_made;     /* by us */
    bool is_marking;  /* there is one of ours */
    bool is_switched; /* the new model may be the one that readers find */
} dcp__hf_dir;

/* The files of a new model: names within the directory, and whether an index will say where tensors are. */
typedef struct dcp__hf_model {
    const dcp__names *files;
    bool has_index;
} dcp__hf_model;

/* Makes the directory if need be and locks it until dcp__hf_leave, which also frees. Errors: EXISTS (somebody else writes to it,
 * a checkpoint of another form is there), and those of the storage. */
dcp_status dcp__hf_enter(dcp__hf_dir *d, dcp_error *err);
void dcp__hf_leave(dcp__hf_dir *d);

/* Which generation of names no file of the model that is there has: 0 are the names as they are. */
dcp_status dcp__hf_generation(const dcp__hf_dir *d, const dcp__hf_model *m, uint64_t *out, dcp_error *err);
/* For who resumes: which generation of names files of the model that is there have, 0 if none has. */
dcp_status dcp__hf_found_generation(const dcp__hf_dir *d, const dcp__hf_model *m, uint64_t *out, dcp_error *err);
/* The name of that generation: "model-00001-of-00002.safetensors" becomes "model.1-00001-of-00002.safetensors". Allocated. */
char *dcp__hf_name(dcp_context *ctx, const char *name, uint64_t generation);

/* Durable before it returns: the model's files are ignored until it is committed. */
dcp_status dcp__hf_begin(dcp__hf_dir *d, const dcp__hf_model *m, dcp_error *err);
/* All files have their names, durably. index: its text, if there is one. */
dcp_status dcp__hf_commit(dcp__hf_dir *d, const dcp__hf_model *m, const char *index, dcp_error *err);
/* After an error. keeps: files that have their names stay, and stay ignored, for another try. */
void dcp__hf_take_back(dcp__hf_dir *d, const dcp__hf_model *m, bool keeps);

/* Is it called as the files of a model are, whichever generation? */
bool dcp__hf_is_usual_name(const char *name);
/* The name of a file of the directory in the storage. Allocated; NULL without memory. */
char *dcp__hf_join(const dcp__hf_dir *d, const char *name);

#endif
