/* A save's session: its options, its files, its beginning and its end. */
#include "engine/save/session.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/hash.h"
#include "format/transform.h"
#include "storage/storage.h"

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

/* Name of a file in the storage: in `fixed` if it fits, so that cleaning up works without memory. Freed with drop_name. */
static dcp_status full_name(const dcp_save_session *s, const char *relative, char fixed[512], char **out, dcp_error *err)
{
    size_t dir_len = strlen(s->dir), len = strlen(relative), bytes = dir_len + len + 2;
    size_t separator = dir_len && len ? 1 : 0;
    char *name = bytes <= 512 ? fixed : dcp__alloc(s->ctx, bytes);
    if (!name) {
        return dcp__nomem(err);
    }
    memcpy(name, s->dir, dir_len);
    memcpy(name + dir_len, "/", separator);
    memcpy(name + dir_len + separator, relative, len + 1);
    *out = name;
    return DCP_OK;
}

static void drop_name(const dcp_save_session *s, const char *fixed, char *name)
{
    if (name != fixed) {
        dcp__free(s->ctx, name);
    }
}

dcp_status dcp__session_open(dcp_save_session *s, const char *relative, unsigned flags, dcp_file **out, dcp_error *err)
{
    char fixed[512], *name = NULL;
    dcp_status status = full_name(s, relative, fixed, &name, err);
    if (status == DCP_OK) {
        status = s->storage->ops->open(s->storage, name, flags | DCP_OPEN_BENEATH, out, err);
        drop_name(s, fixed, name);
    }
    return status;
}

dcp_status dcp__session_remove(dcp_save_session *s, const char *relative, dcp_error *err)
{
    char fixed[512], *name = NULL;
    dcp_status status = full_name(s, relative, fixed, &name, err);
    if (status == DCP_OK) {
        status = s->storage->ops->remove(s->storage, name, err);
        drop_name(s, fixed, name);
    }
    return status;
}

dcp_status dcp__session_stat(dcp_save_session *s, const char *relative, dcp_stat *out, dcp_error *err)
{
    char fixed[512], *name = NULL;
    dcp_status status = full_name(s, relative, fixed, &name, err);
    if (status == DCP_OK) {
        status = s->storage->ops->stat(s->storage, name, out, err);
        drop_name(s, fixed, name);
    }
    return status;
}

dcp_status dcp__session_rename(dcp_save_session *s, const char *from, const char *to, dcp_error *err)
{
    char fixed_from[512], fixed_to[512], *full_from = NULL, *full_to = NULL;
    dcp_status status = full_name(s, from, fixed_from, &full_from, err);
    if (status != DCP_OK) {
        return status;
    }
    status = full_name(s, to, fixed_to, &full_to, err);
    if (status == DCP_OK) {
        status = s->storage->ops->rename(s->storage, full_from, full_to, err);
        drop_name(s, fixed_to, full_to);
    }
    drop_name(s, fixed_from, full_from);
    return status;
}

/* The name is noted first, so that a file that is made and then fails to open is removed as well. */
dcp_status dcp__session_create(dcp_save_session *s, const char *relative, dcp_file **out, dcp_error *err)
{
    dcp_status status = dcp__names_add(s->ctx, &s->created, relative, err);
    if (status != DCP_OK) {
        return status;
    }
    unsigned flags = DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_EXCLUSIVE | (s->opts.no_sync ? 0 : DCP_OPEN_WRITEBACK);
    status = dcp__session_open(s, relative, flags, out, err);
    if (status == DCP_EXISTS) { /* somebody else's */
        dcp__free(s->ctx, s->created.names[--s->created.n]);
    }
    return status;
}

/* A refusal is not an error: it is noted, and err stays as it was. */
static dcp_status take_sync(dcp_save_session *s, dcp_status status, const dcp_error *fault, dcp_error *err)
{
    s->report.degraded |= status == DCP_UNSUPPORTED ? DCP_DEGRADED_SYNC : 0;
    return dcp__synced(status, fault, err);
}

dcp_status dcp__session_sync(dcp_save_session *s, dcp_file *f, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    return s->opts.no_sync ? DCP_OK : take_sync(s, s->storage->ops->sync(f, &fault), &fault, err);
}

dcp_status dcp__session_sync_dir(dcp_save_session *s, dcp_error *err)
{
    const dcp_storage_ops *ops = s->storage->ops;
    dcp_error fault = DCP_ERROR_INIT;
    if (s->opts.no_sync || !ops->sync_dir) {
        return DCP_OK;
    }
    return take_sync(s, ops->sync_dir(s->storage, s->dir, &fault), &fault, err);
}

dcp_status dcp__session_advance(dcp_save_session *s, uint64_t bytes, dcp_error *err)
{
    if (!s->opts.progress) {
        return DCP_OK;
    }
    pthread_mutex_lock(&s->lock);
    s->done_bytes += bytes;
    bool goes_on = s->opts.progress(s->opts.user, s->done_bytes, s->payload_bytes);
    pthread_mutex_unlock(&s->lock);
    return goes_on ? DCP_OK : dcp__fail(err, DCP_CANCELED, "stopped by the caller");
}

static dcp_status goes_on(void *user, dcp_error *err)
{
    return dcp__session_advance(user, 0, err);
}

dcp_status dcp__session_write_at(dcp_save_session *s, dcp_file *f, const void *bytes, size_t n, uint64_t offset, dcp_error *err)
{
    return dcp__mover_write_at(s->mover, f, bytes, n, offset, &(dcp__mover_check){goes_on, s}, err);
}

/* ---- options ---- */

void dcp__random_bytes(void *out, size_t n)
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
    dcp__random_bytes(b, sizeof b);
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
    if (o->max_writers < 0) {
        return dcp__fail(err, DCP_ARG, "save options: %d writers at a time", o->max_writers);
    }
    if (o->target_release && (o->target_release < 201 || o->target_release > 299)) {
        return dcp__fail(err, DCP_ARG, "save options: target release %d, expected 201 (PyTorch 2.1) or later", o->target_release);
    }
    int world = o->comm ? o->comm->size : 1;
    if (o->coordinator < 0 || o->coordinator >= world) {
        return dcp__fail(err, DCP_ARG, "save options: coordinator %d of %d ranks", o->coordinator, world);
    }
    if (o->rank_local && (o->comm || o->rank < 0 || o->rank >= o->world)) {
        return dcp__fail(err, DCP_ARG, "save options: rank %d of %d without communication%s", o->rank, o->world,
                         o->comm ? ", and with a communicator" : "");
    }
    if (o->serialization != DCP_SERIALIZE_TORCH_SAVE && o->serialization != DCP_SERIALIZE_SAFETENSORS) {
        return dcp__fail(err, DCP_ARG, "save options: no serialization %d", (int)o->serialization);
    }
    if (o->serialization == DCP_SERIALIZE_SAFETENSORS && o->transform && o->transform[0]) {
        return dcp__fail(err, DCP_ARG, "save options: safetensors go without a transform");
    }
    dcp_status status = o->transform && o->transform[0] ? dcp__transform_check(dcp_str_of(o->transform), err) : DCP_OK;
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

dcp_status dcp__check_save_report(const dcp_save_report *report, dcp_error *err)
{
    if (report && report->struct_size != sizeof *report) {
        return dcp__fail(err, DCP_ARG, "save report: struct_size %zu, expected %zu", report->struct_size, sizeof *report);
    }
    return DCP_OK;
}

/* ---- begin ---- */

static dcp_status check_storage(const dcp_storage *st, dcp_error *err)
{
    dcp_status status = dcp__storage_check(st, err);
    if (status == DCP_OK && !(st->ops->caps & DCP_STORAGE_RANDOM_WRITE)) {
        status = dcp__fail(err, DCP_UNSUPPORTED, "storage %s cannot write at any place of a file", st->ops->name);
    }
    return status;
}

static dcp_status attach(dcp_save_session *s, const char *path, dcp_error *err)
{
    s->path = dcp__strndup(s->ctx, path, strlen(path));
    s->dir = dcp__strndup(s->ctx, s->opts.storage ? path : "", s->opts.storage ? strlen(path) : 0);
    if (!s->path || !s->dir) {
        return dcp__nomem(err);
    }
    if (s->opts.storage) {
        dcp_status status = check_storage(s->opts.storage, err);
        s->storage = status == DCP_OK ? s->opts.storage : NULL;
        return status;
    }
    dcp_status status = dcp_storage_posix(s->ctx, path, &s->storage, err);
    s->owns_storage = status == DCP_OK;
    return status;
}

/* Where nothing is to be overwritten, a checkpoint ends the save before anything is touched, also in a directory that is
 * read-only. The claim looks again, and for all forms. */
static dcp_status look_first(dcp_save_session *s, dcp_error *err)
{
    dcp_stat st;
    if (!s->opts.overwrite && dcp__session_stat(s, ".metadata", &st, NULL) == DCP_OK) {
        return dcp__fail(err, DCP_EXISTS, "a checkpoint is there already, and overwriting was not asked for");
    }
    return DCP_OK;
}

static dcp_status make_place(dcp_save_session *s, dcp_error *err)
{
    dcp_stat st;
    if (!s->storage->ops->make_dir) {
        return DCP_OK;
    }
    bool is_new = s->storage->ops->stat(s->storage, s->dir, &st, NULL) == DCP_NOT_FOUND;
    dcp_status status = s->storage->ops->make_dir(s->storage, s->dir, err);
    s->made_dir |= is_new && status == DCP_OK;
    return status;
}

/* The coordinator's part: the place is this save's from here on. A save that has failed may take the directory away, empty as it
 * was, between two steps of this one. */
static dcp_status claim_place(dcp_save_session *s, dcp_error *err)
{
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = look_first(s, &fault);
    for (int i = 0; i < 3 && (i == 0 || status == DCP_NOT_FOUND); i++) {
        status = status == DCP_OK || i ? make_place(s, &fault) : status;
        status = status == DCP_OK ? dcp__session_claim(s, &fault) : status;
    }
    if (status != DCP_OK && err) {
        *err = fault;
    }
    return status;
}

/* A storage cannot remove its own root: that is a matter of the directory above. */
static void remove_local_dir(dcp_context *ctx, char *path)
{
    dcp_storage *above;
    char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (slash) {
        *slash = 0;
    }
    if (*name && dcp_storage_posix(ctx, !slash ? "." : slash == path ? "/" : path, &above, NULL) == DCP_OK) {
        above->ops->remove(above, name, NULL);
        dcp_storage_free(above);
    }
}

/* Of a save that has failed: the directory that it made goes, unless something has come into it. */
static void drop_place(const dcp_save_session *s)
{
    const char *given = s->opts.storage ? s->dir : s->path;
    size_t len = strlen(given);
    while (len > 1 && given[len - 1] == '/') {
        len--;
    }
    char *path = dcp__strndup(s->ctx, given, len);
    if (path && s->opts.storage) {
        s->storage->ops->remove(s->storage, path, NULL);
    } else if (path) {
        remove_local_dir(s->ctx, path);
    }
    dcp__free(s->ctx, path);
}

static void end_session(dcp_save_session *s, bool keep_intent, bool no_place)
{
    dcp_context *ctx = s->ctx;
    dcp__session_drop_intent(s, keep_intent);
    if (no_place) {
        drop_place(s);
    }
    dcp__names_reset(ctx, &s->doomed);
    dcp__names_reset(ctx, &s->dead_intents);
    dcp__names_reset(ctx, &s->created);
    dcp__buf_reset(&s->metadata);
    dcp__group_plan_reset(&s->group);
    dcp__transfer_free(s->transfer);
    dcp__free(ctx, s->placed);
    dcp__free(ctx, s->digests);
    dcp__free(ctx, s->facts);
    if (s->owns_storage) {
        dcp_storage_free(s->storage);
    }
    pthread_mutex_destroy(&s->lock);
    dcp__free(ctx, (char *)s->opts.transform);
    dcp__free(ctx, (char *)s->opts.checkpoint_id);
    dcp__free(ctx, s->intent_name);
    dcp__free(ctx, s->dir);
    dcp__free(ctx, s->path);
    dcp__free(ctx, s);
}

void dcp__session_free(dcp_save_session *s, bool keep_intent)
{
    end_session(s, keep_intent, false);
}

/* What the others have to know of it. */
typedef struct claimed {
    char save_id[DCP__SAVE_ID_BYTES];
    char generation[DCP__GENERATION_BYTES];
} claimed;

static dcp_status share_claim(dcp_save_session *s, dcp__step *step, int coordinator, dcp_status mine, dcp_error *err)
{
    claimed c;
    dcp__buf io;
    dcp__buf_init(&io, step->ctx);
    if (mine == DCP_OK && s->is_coordinator) {
        memcpy(c.save_id, s->save_id, sizeof c.save_id);
        memcpy(c.generation, s->generation, sizeof c.generation);
        dcp__buf_put(&io, &c, sizeof c);
        mine = io.failed ? dcp__nomem(err) : DCP_OK;
    }
    dcp_status status = dcp__broadcast(step, mine, coordinator, &io, err);
    if (status == DCP_OK && io.len != sizeof c) {
        status = dcp__fail(err, DCP_INTERNAL, "the coordinator sent %zu bytes instead of %zu", io.len, sizeof c);
    }
    if (status == DCP_OK) {
        memcpy(&c, io.data, sizeof c);
        memcpy(s->save_id, c.save_id, sizeof c.save_id);
        memcpy(s->generation, c.generation, sizeof c.generation);
    }
    dcp__buf_reset(&io);
    return status;
}

static dcp_status make_session(dcp_context *ctx, const char *path, const dcp_save_opts *opts, const dcp__step *step,
                               dcp_save_session **out, dcp_error *err)
{
    dcp_save_session *s = dcp__calloc(ctx, 1, sizeof *s);
    if (!s) {
        return dcp__nomem(err);
    }
    s->ctx = ctx;
    s->step = *step;
    s->report = (dcp_save_report)DCP_SAVE_REPORT_INIT;
    dcp__buf_init(&s->metadata, ctx);
    pthread_mutex_init(&s->lock, NULL);
    *out = s; /* freed by the caller, whatever follows */
    dcp_status status = take_opts(s, opts, err);
    if (status != DCP_OK) {
        return status;
    }
    s->mover = s->opts.helper;
    s->rank = s->opts.rank_local ? s->opts.rank : dcp__step_rank(step);
    s->world = s->opts.rank_local ? s->opts.world : dcp__step_size(step);
    s->is_coordinator = s->opts.rank_local || s->rank == s->opts.coordinator;
    if (!s->opts.comm && !s->opts.rank_local && s->opts.world > 0) {
        s->is_foreign = true;
        s->world = s->opts.world;
    }
    return attach(s, path, err);
}

dcp_status dcp__session_detached(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_save_session **out,
                                 dcp_error *err)
{
    ctx = dcp__context(ctx);
    dcp__step step = {ctx, NULL, "write", NULL};
    return make_session(ctx, path, opts, &step, out, err);
}

dcp_status dcp__save_begin(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_status mine, dcp_save_session **out,
                           dcp_error *err)
{
    dcp_save_session *s = NULL;
    bool is_known = opts && opts->struct_size == sizeof *opts;
    dcp__step step = {ctx, is_known ? opts->comm : NULL, "plan", is_known ? opts->failures : NULL};
    if (mine == DCP_OK) {
        mine = make_session(ctx, path, opts, &step, &s, err);
    }
    if (mine == DCP_OK && s->is_coordinator) {
        mine = s->opts.rank_local ? dcp__session_claim_rank(s, err) : claim_place(s, err);
    }
    bool has_root = is_known && opts->coordinator >= 0 && opts->coordinator < dcp__step_size(&step);
    dcp_status status = share_claim(s, &step, has_root ? opts->coordinator : 0, mine, err);
    if (status != DCP_OK) {
        if (s) {
            end_session(s, false, s->made_dir);
        }
        return dcp__prefix(err, status, "%s: ", path);
    }
    snprintf(s->report.save_id, sizeof s->report.save_id, "%s", s->save_id);
    s->report.world = s->world;
    *out = s;
    return DCP_OK;
}

dcp_status dcp_save_begin(dcp_context *ctx, const char *path, const dcp_save_opts *opts, dcp_save_session **out, dcp_error *err)
{
    if (!path || !out) {
        return dcp__fail(err, DCP_ARG, "save: no %s", path ? "place for the session" : "path");
    }
    return dcp__save_begin(dcp__context(ctx), path, opts, DCP_OK, out, err);
}

/* ---- end ---- */

/* Removes the data files that this rank has made, durably: without the intent nobody would find what comes back after a crash. */
static bool remove_created(dcp_save_session *s)
{
    bool is_clean = true, has_some = s->created.n > 0 || s->is_foreign;
    for (size_t i = 0; i < s->created.n; i++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp_status status = dcp__session_remove(s, s->created.names[i], &err);
        if (status != DCP_OK && status != DCP_NOT_FOUND) {
            dcp__log(s->ctx, DCP_LOG_WARNING, "%s: left over: %s", s->path, err.message);
            is_clean = false;
        }
    }
    if (s->is_foreign && s->intent) {
        is_clean &= dcp__session_remove_family(s);
    }
    is_clean = is_clean && (!has_some || dcp__session_sync_dir(s, NULL) == DCP_OK);
    if (is_clean) {
        dcp__names_reset(s->ctx, &s->created);
    }
    return is_clean;
}

void dcp__session_take_back(dcp_save_session *s)
{
    bool is_clean = remove_created(s);
    dcp__step step = {s->ctx, s->step.comm, "abort", NULL};
    if (!step.comm || dcp_comm_is_broken(step.comm)) {
        return;
    }
    if (dcp__agree(&step, is_clean ? DCP_OK : DCP_IO, NULL) == DCP_OK) {
        s->others_may_have_files = false;
    }
}

void dcp_save_abort(dcp_save_session *s)
{
    if (s) {
        bool is_clean = remove_created(s) && !s->others_may_have_files;
        end_session(s, !is_clean, is_clean && s->made_dir);
    }
}
