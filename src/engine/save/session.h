/* A save under way: what begin, write and commit share. */
#ifndef DCP_ENGINE_SESSION_H
#define DCP_ENGINE_SESSION_H

#include <pthread.h>

#include "base/buf.h"
#include "dcp/save.h"
#include "device/transfer.h"
#include "engine/save/gate.h"
#include "engine/save/group_plan.h"
#include "engine/save/lending.h"
#include "engine/save/mover.h"
#include "format/metadata.h"

#define DCP__SAVE_ID_BYTES 40
#define DCP__GENERATION_BYTES 16

/* A growing list of names, owned. */
typedef struct dcp__names {
    char **names;
    size_t n, cap;
} dcp__names;

struct dcp_save_session {
    dcp_context *ctx;
    dcp_storage *storage;
    bool owns_storage;
    char *dir;          /* in the storage, "" its root */
    char *path;         /* as the caller gave it, for messages */
    dcp_save_opts opts; /* texts are owned copies */
    char save_id[DCP__SAVE_ID_BYTES];
    char generation[DCP__GENERATION_BYTES]; /* part of the file names; "" where no data file is in the way */
    char *intent_name;
    dcp_file *intent;           /* open, and locked if the storage has locks; NULL: none */
    bool made_dir;              /* the directory is this save's own */
    bool replaces;              /* there is a checkpoint to be replaced */
    dcp__names doomed;          /* files that nobody names once the new checkpoint stands */
    dcp__names dead_intents;    /* of saves that are gone */
    dcp__names created;         /* data files of this save */
    dcp__step step;             /* comm NULL: one rank */
    int rank, world;            /* of the group, or of the options of a rank-local save */
    bool is_foreign;            /* its ranks communicate by other means */
    const char *prefix;         /* of data files, instead of rank and generation; borrowed; NULL: none */
    bool is_coordinator;        /* this rank has the intent and publishes */
    dcp__group_plan group;      /* made by dcp_plan_save_global */
    const dcp_save_plan *plan;  /* that it was made of */
    dcp__gate *gate;            /* passed while records are written; NULL: none. Borrowed. */
    bool is_written;            /* dcp_save_write has been called */
    bool others_may_have_files; /* as far as this rank knows: then the intent must outlive it */
    dcp__placed *placed;        /* [item]: where it was written */
    dcp__digest *digests;       /* [record] */
    dcp__file_facts *facts;     /* [file] */
    size_t n_files;
    dcp__buf metadata; /* what will be .metadata; made by dcp_save_commit on the coordinator */
    dcp_save_report report;
    dcp__mover *mover;       /* moves large payloads to files; NULL: this process does. Borrowed. */
    dcp__transfer *transfer; /* made when the first tensor on a device is met; else NULL */
    dcp__lent lent;          /* while records are written */
    uint64_t payload_bytes;  /* that this rank writes; set before the writing */
    pthread_mutex_t lock;    /* guards done_bytes and the caller's progress function */
    uint64_t done_bytes;
};

/* ---- session.c: begin, abort, files ---- */

/* As dcp_save_begin, for a rank that may have failed already: `mine` and *err. */
dcp_status dcp__save_begin(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_status mine, dcp_save_session **out,
                           dcp_error *err);

/* What a save returns that ended with `status`, by opts->on_failure. */
dcp_status dcp__settle_save(dcp_context *ctx, const dcp_save_opts *opts, dcp_status status, const dcp_error *fault,
                            dcp_save_report *report);

dcp_status dcp__session_open(dcp_save_session *s, const char *relative, unsigned flags, dcp_file **out, dcp_error *err);
dcp_status dcp__session_remove(dcp_save_session *s, const char *relative, dcp_error *err);
dcp_status dcp__session_rename(dcp_save_session *s, const char *from, const char *to, dcp_error *err);
dcp_status dcp__session_stat(dcp_save_session *s, const char *relative, dcp_stat *out, dcp_error *err);
/* Makes a data file of this save and remembers it for removal. EXISTS if there is one. */
dcp_status dcp__session_create(dcp_save_session *s, const char *relative, dcp_file **out, dcp_error *err);
/* Make a file, or the names in the directory, durable; a storage that refuses is noted in the report. */
dcp_status dcp__session_sync(dcp_save_session *s, dcp_file *f, dcp_error *err);
dcp_status dcp__session_sync_dir(dcp_save_session *s, dcp_error *err);
/* Counts payload bytes as written; CANCELED if the caller wants no more. From any thread. */
dcp_status dcp__session_advance(dcp_save_session *s, uint64_t bytes, dcp_error *err);
/* Writes by the helper process, if there is one. The caller can cancel it also while that does not answer. From any thread. */
dcp_status dcp__session_write_at(dcp_save_session *s, dcp_file *f, const void *bytes, size_t n, uint64_t offset, dcp_error *err);
/* Collective, if the communicator still works, after a failure that all ranks know of: each removes its data files, and all learn
 * whether everybody could. A rank that has died meanwhile leaves the intent to the next save, which then looks for its files. */
void dcp__session_take_back(dcp_save_session *s);
/* Closes the intent and frees. The intent's name stays if `keep_intent`: the next save finds it and removes what is left over.
 * Other files stay. */
void dcp__session_free(dcp_save_session *s, bool keep_intent);

dcp_status dcp__names_add(dcp_context *ctx, dcp__names *list, const char *name, dcp_error *err);
void dcp__names_reset(dcp_context *ctx, dcp__names *list);
void dcp__random_bytes(void *out, size_t n);
/* Seconds of a clock that only goes forward. */
double dcp__now(void);
/* ARG unless report is NULL or of this version. */
dcp_status dcp__check_save_report(const dcp_save_report *report, dcp_error *err);

/* A session that claims nothing and has no fellows, to write files in. */
dcp_status dcp__session_detached(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_save_session **out,
                                 dcp_error *err);
/* Writes all of a plan; fills in placed, digests, facts and the report. */
dcp_status dcp__write_whole_plan(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err);
/* Fills s->metadata. Texts of m->own are borrowed from the session. */
dcp_status dcp__session_encode(dcp_save_session *s, dcp__metadata *m, dcp_error *err);

/* ---- claim.c ---- */

/* Makes the intent and finds out what is there: sets generation, replaces, doomed, dead_intents. */
dcp_status dcp__session_claim(dcp_save_session *s, dcp_error *err);
/* The same for one rank of a save without communication: no intent, since its fellows are no rivals, and nothing is replaced. */
dcp_status dcp__session_claim_rank(dcp_save_session *s, dcp_error *err);
/* Removes what other ranks of a foreign session may have written: there was nothing of these names when it began. True if nothing
 * is left. */
bool dcp__session_remove_family(dcp_save_session *s);
/* Closes the intent, if any, and removes it unless it is to be kept. */
void dcp__session_drop_intent(dcp_save_session *s, bool keep);

/* ---- save_metadata.c ---- */

/* Collective. Makes the plan of all ranks of s->plan. */
dcp_status dcp__session_plan(dcp_save_session *s, dcp_error *err);
/* Collective. Fills s->metadata on the coordinator. */
dcp_status dcp__session_collect(dcp_save_session *s, dcp_error *err);

struct dcp_plan_cache {
    dcp_context *ctx;
    bool is_filled;
    dcp__plan_cache cache;
};

/* ---- read_back.c ---- */

/* Collective, after dcp_save_write: reads every record of this rank and compares it with its digest. Errors: CHECKSUM, IO, NOMEM.
 */
dcp_status dcp__session_read_back(dcp_save_session *s, dcp_error *err);

/* ---- commit.c ---- */

/* A crash on a storage without rename has left .metadata in pieces and the whole of it in .metadata.tmp: puts it in place. */
dcp_status dcp__session_repair(dcp_save_session *s, dcp_error *err);

#endif
