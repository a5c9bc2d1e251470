/* A save under way: what begin, write and commit share. */
#ifndef DCP_ENGINE_SESSION_H
#define DCP_ENGINE_SESSION_H

#include "base/buf.h"
#include "dcp/save.h"
#include "format/metadata.h"

#define DCP__SAVE_ID_BYTES 40

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
    char generation[16]; /* part of the file names; "" where there is no checkpoint yet */
    dcp_file *intent;    /* locked; NULL if the storage has no locks */
    char *intent_name;
    dcp__names old_files;        /* that the checkpoint to be replaced names, its rank-local metadata included */
    dcp__names dead_intents;     /* of saves that are gone */
    dcp__names dead_generations; /* theirs: names of files that nobody needs */
    bool replaces;               /* there is a checkpoint to be replaced */
    dcp__names created;          /* data files of this save */
    dcp__buf metadata;           /* what will be .metadata; made by dcp_save_write */
    dcp_save_report report;
};

/* ---- session.c: begin, abort ---- */

dcp_status dcp__session_open(dcp_save_session *s, const char *relative, unsigned flags, dcp_file **out, dcp_error *err);
dcp_status dcp__session_remove(dcp_save_session *s, const char *relative, dcp_error *err);
/* Drops the intent and frees; files stay. */
void dcp__session_free(dcp_save_session *s);

/* Name of a file below the session's directory in the storage; allocated. */
dcp_status dcp__session_name(const dcp_save_session *s, const char *relative, char **out, dcp_error *err);
dcp_status dcp__names_add(dcp_context *ctx, dcp__names *list, const char *name, dcp_error *err);
void dcp__names_reset(dcp_context *ctx, dcp__names *list);
/* Makes (or empties) a data file of this save and remembers it for removal. */
dcp_status dcp__session_create(dcp_save_session *s, const char *relative, dcp_file **out, dcp_error *err);
/* Makes a file durable; a storage that refuses is noted in the report. */
dcp_status dcp__session_sync(dcp_save_session *s, dcp_file *f, dcp_error *err);
/* Seconds of a clock that only goes forward. */
double dcp__now(void);

#endif
