/* Claiming the place of a save, and giving it up.
 *
 * While a save runs, an intent file `.libdcp-intent-<save id>` stands in the directory and is locked. Its text says which files
 * may have been written, so that a later save can remove what a dead one left: a dead save's intent can be locked, a living one's
 * not. */
#include "engine/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/hash.h"
#include "engine/engine.h"
#include "format/transform.h"

#define INTENT_PREFIX ".libdcp-intent-"
#define INTENT_MAX_BYTES 256
#define CLAIM_TRIES 4

double dcp__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- lists of names ---- */

dcp_status dcp__names_add(dcp_context *ctx, dcp__names *list, const char *name, dcp_error *err)
{
    void *array = list->names;
    if (!dcp__grow(ctx, &array, &list->cap, list->n + 1, sizeof(char *))) {
        return dcp__nomem(err);
    }
    list->names = array;
    list->names[list->n] = dcp__strndup(ctx, name, strlen(name));
    if (!list->names[list->n]) {
        return dcp__nomem(err);
    }
    list->n++;
    return DCP_OK;
}

void dcp__names_reset(dcp_context *ctx, dcp__names *list)
{
    for (size_t i = 0; i < list->n; i++) {
        dcp__free(ctx, list->names[i]);
    }
    dcp__free(ctx, list->names);
    *list = (dcp__names){0};
}

/* ---- files ---- */

dcp_status dcp__session_name(const dcp_save_session *s, const char *relative, char **out, dcp_error *err)
{
    size_t dir_len = strlen(s->dir), len = strlen(relative);
    char *name = dcp__alloc(s->ctx, dir_len + len + 2);
    if (!name) {
        return dcp__nomem(err);
    }
    snprintf(name, dir_len + len + 2, "%s%s%s", s->dir, dir_len && len ? "/" : "", relative);
    *out = name;
    return DCP_OK;
}

dcp_status dcp__session_open(dcp_save_session *s, const char *relative, unsigned flags, dcp_file **out, dcp_error *err)
{
    char *name;
    dcp_status status = dcp__session_name(s, relative, &name, err);
    if (status == DCP_OK) {
        status = s->storage->ops->open(s->storage, name, flags, out, err);
        dcp__free(s->ctx, name);
    }
    return status;
}

dcp_status dcp__session_remove(dcp_save_session *s, const char *relative, dcp_error *err)
{
    char *name;
    dcp_status status = dcp__session_name(s, relative, &name, err);
    if (status == DCP_OK) {
        status = s->storage->ops->remove(s->storage, name, err);
        dcp__free(s->ctx, name);
    }
    return status;
}

/* The name is noted first: a file that is made and then fails to open is removed as well. */
dcp_status dcp__session_create(dcp_save_session *s, const char *relative, dcp_file **out, dcp_error *err)
{
    unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_TRUNCATE | DCP_OPEN_BENEATH;
    dcp_status status = dcp__names_add(s->ctx, &s->created, relative, err);
    return status == DCP_OK ? dcp__session_open(s, relative, flags | (s->opts.no_sync ? 0 : DCP_OPEN_WRITEBACK), out, err)
                            : status;
}

dcp_status dcp__session_sync(dcp_save_session *s, dcp_file *f, dcp_error *err)
{
    dcp_status status = s->opts.no_sync ? DCP_OK : s->storage->ops->sync(f, err);
    if (status == DCP_UNSUPPORTED) {
        s->report.degraded |= DCP_DEGRADED_SYNC;
        status = DCP_OK;
    }
    return status;
}

/* ---- options ---- */

static void random_bytes(void *out, size_t n)
{
    if (getrandom(out, n, 0) != (ssize_t)n) {
        struct timespec t; /* no random device: time and address are what is left */
        clock_gettime(CLOCK_REALTIME, &t);
        uint64_t seed[2] = {(uint64_t)t.tv_nsec ^ (uint64_t)t.tv_sec << 30, (uint64_t)(uintptr_t)out};
        dcp__digest d = dcp__xxh3_128(seed, sizeof seed);
        memcpy(out, d.bytes, n < sizeof d.bytes ? n : sizeof d.bytes);
    }
}

/* A UUID of version 4. */
static void new_save_id(char id[DCP__SAVE_ID_BYTES])
{
    uint8_t b[16];
    random_bytes(b, sizeof b);
    b[6] = (uint8_t)((b[6] & 0x0f) | 0x40);
    b[8] = (uint8_t)((b[8] & 0x3f) | 0x80);
    snprintf(id, DCP__SAVE_ID_BYTES, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static dcp_status check_save_id(const char *id, dcp_error *err)
{
    size_t len = strlen(id);
    if (len == 0 || len >= DCP__SAVE_ID_BYTES || strspn(id, "0123456789abcdefABCDEF-") != len) {
        return dcp__fail(err, DCP_ARG, "save id \"%s\" is no UUID", dcp__print(dcp_str_of(id)).text);
    }
    return DCP_OK;
}

static dcp_status check_opts(const dcp_save_opts *o, dcp_error *err)
{
    if (o->struct_size != sizeof *o) {
        return dcp__fail(err, DCP_ARG, "save options: struct_size %zu, expected %zu", o->struct_size, sizeof *o);
    }
    if (o->files < 0 || o->files > 1000) {
        return dcp__fail(err, DCP_ARG, "save options: %d files, 1 to 1000 are possible", o->files);
    }
    if (o->target_release && (o->target_release < 201 || o->target_release > 299)) {
        return dcp__fail(err, DCP_ARG, "save options: target release %d, expected 201 (PyTorch 2.1) or later", o->target_release);
    }
    if (o->serialization == DCP_SERIALIZE_SAFETENSORS && o->transform) {
        return dcp__fail(err, DCP_ARG, "save options: safetensors go without a transform");
    }
    dcp_status status = o->transform ? dcp__transform_check(dcp_str_of(o->transform), err) : DCP_OK;
    return status == DCP_OK && o->save_id ? check_save_id(o->save_id, err) : status;
}

static dcp_status copy_text(dcp_context *ctx, const char **text, dcp_error *err)
{
    if (*text) {
        *text = dcp__strndup(ctx, *text, strlen(*text));
        return *text ? DCP_OK : dcp__nomem(err);
    }
    return DCP_OK;
}

static dcp_status take_opts(dcp_save_session *s, const dcp_save_opts *given, dcp_error *err)
{
    dcp_save_opts o = DCP_SAVE_OPTS_INIT;
    dcp_status status = given ? check_opts(given, err) : DCP_OK;
    if (status != DCP_OK) {
        return status;
    }
    o = given ? *given : o;
    if (o.save_id) {
        snprintf(s->save_id, sizeof s->save_id, "%s", o.save_id);
    } else {
        new_save_id(s->save_id);
    }
    s->opts = o;
    s->opts.save_id = s->save_id;
    s->opts.transform = s->opts.checkpoint_id = NULL;
    const char *transform = o.transform && o.transform[0] ? o.transform : NULL, *id = o.checkpoint_id;
    status = copy_text(s->ctx, &transform, err);
    s->opts.transform = status == DCP_OK ? transform : NULL;
    status = status == DCP_OK ? copy_text(s->ctx, &id, err) : status;
    s->opts.checkpoint_id = status == DCP_OK ? id : NULL;
    return status;
}

/* ---- what is there already ---- */

static dcp_status note_old_files(dcp_save_session *s, dcp_checkpoint *old, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < old->meta->n_files && status == DCP_OK; i++) {
        status = dcp__names_add(s->ctx, &s->old_files, old->meta->files[i].ptr, err);
    }
    return status;
}

/* The files of the checkpoint that is to be replaced; one that cannot be read keeps its files. */
static dcp_status read_old(dcp_save_session *s, dcp_error *err)
{
    dcp_open_opts o = DCP_OPEN_OPTS_INIT;
    dcp_checkpoint *old;
    dcp_error ignored = DCP_ERROR_INIT;
    o.storage = s->storage;
    if (dcp_checkpoint_open(s->ctx, s->dir, &o, &old, &ignored) != DCP_OK) {
        dcp__log(s->ctx, DCP_LOG_WARNING, "%s: the old checkpoint cannot be read, its files stay: %s", s->path, ignored.message);
        return DCP_OK;
    }
    dcp_status status = note_old_files(s, old, err);
    dcp_checkpoint_close(old);
    return status;
}

typedef struct scan {
    dcp_save_session *session;
    dcp__names intents, rank_metadata;
    bool has_metadata;
    dcp_status status;
    dcp_error *err;
} scan;

static bool is_rank_metadata(const char *name)
{
    size_t digits = strncmp(name, "__", 2) == 0 ? strspn(name + 2, "0123456789") : 0;
    return digits && strcmp(name + 2 + digits, ".metadata") == 0;
}

static dcp_status see(void *user, const char *name, dcp_entry_type type)
{
    scan *c = user;
    (void)type;
    if (strcmp(name, ".metadata") == 0) {
        c->has_metadata = true;
    } else if (is_rank_metadata(name)) {
        c->status = dcp__names_add(c->session->ctx, &c->rank_metadata, name, c->err);
    } else if (strncmp(name, INTENT_PREFIX, strlen(INTENT_PREFIX)) == 0) {
        c->status = dcp__names_add(c->session->ctx, &c->intents, name, c->err);
    }
    return c->status;
}

/* The intent's generation, world and file names of a dead save are only believed in the form that we write. */
static dcp_status note_dead(dcp_save_session *s, const char *intent, dcp_file *f, dcp_error *err)
{
    char text[INTENT_MAX_BYTES + 1];
    size_t got = 0;
    dcp_status status = dcp__names_add(s->ctx, &s->dead_intents, intent, err);
    if (status == DCP_OK && f->storage->ops->read_at(f, text, INTENT_MAX_BYTES, 0, &got, NULL) == DCP_OK) {
        text[got] = 0;
        char generation[16] = "";
        if (sscanf(text, "libdcp intent 1\ngeneration %15[0-9a-f]\n", generation) == 1 || strstr(text, "\ngeneration -\n")) {
            status = dcp__names_add(s->ctx, &s->dead_generations, generation, err);
        }
    }
    return status;
}

/* Sorts the other intents into living saves, which end this one, and dead ones. */
static dcp_status look_at_intents(dcp_save_session *s, const dcp__names *intents, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (size_t i = 0; i < intents->n && status == DCP_OK; i++) {
        dcp_file *f;
        bool locked = true;
        if (s->intent_name && strcmp(intents->names[i], s->intent_name) == 0) {
            continue;
        }
        if (dcp__session_open(s, intents->names[i], DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_BENEATH, &f, NULL) != DCP_OK) {
            continue; /* gone in the meantime */
        }
        if (s->storage->ops->lock) {
            status = s->storage->ops->lock(f, &locked, err);
        }
        if (status == DCP_OK) {
            status = locked ? note_dead(s, intents->names[i], f, err)
                            : dcp__fail(err, DCP_EXISTS, "another save to this place is running (%s)", intents->names[i]);
        }
        s->storage->ops->close(f, NULL);
    }
    return status;
}

static dcp_status look_around(dcp_save_session *s, dcp_error *err)
{
    scan c = {.session = s, .err = err};
    dcp__names_reset(s->ctx, &s->old_files);
    dcp__names_reset(s->ctx, &s->dead_intents);
    dcp__names_reset(s->ctx, &s->dead_generations);
    dcp_status status = s->storage->ops->list(s->storage, s->dir, see, &c, err);
    status = c.status != DCP_OK ? c.status : status;
    status = status == DCP_OK ? look_at_intents(s, &c.intents, err) : status;
    bool is_there = c.has_metadata || c.rank_metadata.n;
    if (status == DCP_OK && is_there && !s->opts.overwrite) {
        status = dcp__fail(err, DCP_EXISTS, "a checkpoint is there already, and overwriting was not asked for");
    }
    if (status == DCP_OK && is_there) {
        status = read_old(s, err);
    }
    for (size_t i = 0; i < c.rank_metadata.n && status == DCP_OK; i++) {
        status = dcp__names_add(s->ctx, &s->old_files, c.rank_metadata.names[i], err);
    }
    s->replaces = is_there;
    dcp__names_reset(s->ctx, &c.intents);
    dcp__names_reset(s->ctx, &c.rank_metadata);
    return status;
}

/* ---- the intent ---- */

static dcp_status write_intent(dcp_save_session *s, dcp_error *err)
{
    char text[INTENT_MAX_BYTES];
    int len = snprintf(text, sizeof text, "libdcp intent 1\ngeneration %s\nworld 1\n", s->generation[0] ? s->generation : "-");
    dcp_status status = s->storage->ops->write_at(s->intent, text, (size_t)len, 0, err);
    status = status == DCP_OK ? dcp__session_sync(s, s->intent, err) : status;
    if (status == DCP_OK && s->storage->ops->sync_dir && !s->opts.no_sync) {
        status = s->storage->ops->sync_dir(s->storage, s->dir, err);
        status = status == DCP_UNSUPPORTED ? DCP_OK : status;
    }
    return status;
}

static void drop_intent(dcp_save_session *s)
{
    if (s->intent) {
        dcp__session_remove(s, s->intent_name, NULL); /* first, so that nobody takes it for a dead one */
        s->storage->ops->close(s->intent, NULL);
        s->intent = NULL;
    }
}

static dcp_status lock_intent(dcp_save_session *s, dcp_error *err)
{
    bool locked = false;
    dcp_status status = s->storage->ops->lock ? s->storage->ops->lock(s->intent, &locked, err) : DCP_UNSUPPORTED;
    if (status == DCP_UNSUPPORTED) {
        s->report.degraded |= DCP_DEGRADED_LOCK;
        return DCP_OK;
    }
    return status == DCP_OK && !locked ? dcp__fail(err, DCP_EXISTS, "another save has the same id %s", s->save_id) : status;
}

/* One try: own intent first, then a look at the others, so that of two saves at least one sees the other. */
static dcp_status claim_once(dcp_save_session *s, dcp_error *err)
{
    dcp_status status = dcp__session_open(s, s->intent_name,
                                          DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_EXCLUSIVE, &s->intent, err);
    if (status != DCP_OK) {
        return status;
    }
    status = lock_intent(s, err);
    status = status == DCP_OK ? look_around(s, err) : status;
    if (status == DCP_OK && s->replaces) {
        snprintf(s->generation, sizeof s->generation, "%012llx",
                 (unsigned long long)(dcp__xxh3_64(s->save_id, strlen(s->save_id)) & 0xffffffffffff));
    }
    status = status == DCP_OK ? write_intent(s, err) : status;
    if (status != DCP_OK) {
        drop_intent(s);
    }
    return status;
}

/* Two saves that begin at the same moment both give way; the pause lets one of them come first. */
static dcp_status claim(dcp_save_session *s, dcp_error *err)
{
    dcp_status status = DCP_OK;
    for (int i = 0; i < CLAIM_TRIES; i++) {
        uint8_t wait;
        status = claim_once(s, err);
        if (status != DCP_EXISTS || s->replaces) {
            break;
        }
        random_bytes(&wait, 1);
        struct timespec pause = {0, (1 + wait % 16) * 1000000L};
        nanosleep(&pause, NULL);
    }
    return status;
}

/* ---- begin and abort ---- */

static dcp_status attach(dcp_save_session *s, const char *path, dcp_error *err)
{
    s->path = dcp__strndup(s->ctx, path, strlen(path));
    s->dir = dcp__strndup(s->ctx, s->opts.storage ? path : "", s->opts.storage ? strlen(path) : 0);
    if (!s->path || !s->dir) {
        return dcp__nomem(err);
    }
    s->storage = s->opts.storage;
    if (!s->storage) {
        dcp_status status = dcp_storage_posix(s->ctx, path, &s->storage, err);
        if (status != DCP_OK) {
            return status;
        }
        s->owns_storage = true;
    }
    return s->storage->ops->make_dir ? s->storage->ops->make_dir(s->storage, s->dir, err) : DCP_OK;
}

static dcp_status begin(dcp_save_session *s, const char *path, const dcp_save_opts *opts, dcp_error *err)
{
    dcp_status status = take_opts(s, opts, err);
    status = status == DCP_OK ? attach(s, path, err) : status;
    if (status != DCP_OK) {
        return status;
    }
    size_t len = strlen(INTENT_PREFIX) + sizeof s->save_id;
    s->intent_name = dcp__alloc(s->ctx, len);
    if (!s->intent_name) {
        return dcp__nomem(err);
    }
    snprintf(s->intent_name, len, "%s%s", INTENT_PREFIX, s->save_id);
    return claim(s, err);
}

void dcp__session_free(dcp_save_session *s)
{
    dcp_context *ctx = s->ctx;
    drop_intent(s);
    dcp__names_reset(ctx, &s->old_files);
    dcp__names_reset(ctx, &s->dead_intents);
    dcp__names_reset(ctx, &s->dead_generations);
    dcp__names_reset(ctx, &s->created);
    dcp__buf_reset(&s->metadata);
    if (s->owns_storage) {
        dcp_storage_free(s->storage);
    }
    dcp__free(ctx, (char *)s->opts.transform);
    dcp__free(ctx, (char *)s->opts.checkpoint_id);
    dcp__free(ctx, s->intent_name);
    dcp__free(ctx, s->dir);
    dcp__free(ctx, s->path);
    dcp__free(ctx, s);
}

dcp_status dcp_save_begin(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_save_session **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    if (!path || !out) {
        return dcp__fail(err, DCP_ARG, "save: no %s", path ? "place for the session" : "path");
    }
    dcp_save_session *s = dcp__calloc(ctx, 1, sizeof *s);
    if (!s) {
        return dcp__nomem(err);
    }
    s->ctx = ctx;
    s->report = (dcp_save_report)DCP_SAVE_REPORT_INIT;
    dcp__buf_init(&s->metadata, ctx);
    dcp_status status = begin(s, path, opts, err);
    if (status != DCP_OK) {
        dcp__session_free(s);
        return dcp__prefix(err, status, "%s: ", path);
    }
    snprintf(s->report.save_id, sizeof s->report.save_id, "%s", s->save_id);
    *out = s;
    return DCP_OK;
}

void dcp_save_abort(dcp_save_session *s)
{
    if (!s) {
        return;
    }
    for (size_t i = 0; i < s->created.n; i++) {
        dcp__session_remove(s, s->created.names[i], NULL);
    }
    dcp__session_free(s);
}
