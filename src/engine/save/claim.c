/* Claiming the place of a save.
 *
 * While a save runs, an intent file `.libdcp-intent-<save id>` stands in the directory and is locked. A dead save's intent can be
 * locked, a living one's not. Its text is written once the place is claimed, and names what may be left over if the save dies:
 * its own files, by generation, and the files of the checkpoint that it replaces, by name.
 *
 *     libdcp intent 1
 *     generation 5d0c7a1f09be
 *     world 1
 *     replaces __0_0.distcp
 *
 * A save that begins first makes and locks its own intent and then looks at the others, so that of two at least one sees the
 * other. One that has claimed wins; of two that are both still looking, the one whose name sorts first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/read/checkpoint.h"
#include "engine/save/session.h"

#define INTENT_PREFIX ".libdcp-intent-"
#define INTENT_MAX_BYTES ((size_t)64 << 20)
#define MAX_WORLD 1000000
#define CLAIM_TRIES 8
#define WAIT_TRIES 64

/* Files `__<rank below world>_<generation>_<n>.distcp`; without the middle part for the empty generation. */
typedef struct family {
    char generation[DCP__GENERATION_BYTES];
    int world;
} family;

/* What a claim gathers. */
typedef struct claim {
    dcp_save_session *session;
    dcp_error *err;
    /* the directory */
    dcp__names intents, data, rank_metadata;
    bool has_metadata, has_own, metadata_is_file;
    dcp_status status;
    /* dead saves */
    family *dead;
    size_t n_dead, cap_dead;
    dcp__names replaced; /* files that they were about to remove */
} claim;

static void forget_directory(claim *c)
{
    dcp_context *ctx = c->session->ctx;
    dcp__names_reset(ctx, &c->intents);
    dcp__names_reset(ctx, &c->data);
    dcp__names_reset(ctx, &c->rank_metadata);
    c->has_metadata = c->has_own = c->metadata_is_file = false;
}

static void forget_dead(claim *c)
{
    dcp_context *ctx = c->session->ctx;
    dcp__names_reset(ctx, &c->session->dead_intents);
    dcp__names_reset(ctx, &c->replaced);
    c->n_dead = 0;
}

/* ---- names of files ---- */

static bool starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

static bool is_rank_metadata(const char *name)
{
    size_t digits = starts_with(name, "__") ? strspn(name + 2, "0123456789") : 0;
    return digits && strcmp(name + 2 + digits, ".metadata") == 0;
}

/* Only files directly in the directory and with PyTorch's suffix are ever removed on the word of a metadata or intent file: a
 * hostile one might name anything. */
static bool is_data_name(const char *name)
{
    size_t len = strlen(name);
    return len > 7 && strcmp(name + len - 7, ".distcp") == 0 && !strchr(name, '/');
}

static bool is_of_family(const char *name, const family *f)
{
    char *end;
    size_t len = strlen(f->generation), digits = starts_with(name, "__") ? strspn(name + 2, "0123456789") : 0;
    if (digits == 0 || digits > 9 || strtol(name + 2, &end, 10) >= f->world || *end++ != '_') {
        return false;
    }
    if (len) {
        if (!starts_with(end, f->generation) || end[len] != '_') {
            return false;
        }
        end += len + 1;
    }
    digits = strspn(end, "0123456789");
    return digits && strcmp(end + digits, ".distcp") == 0;
}

/* ---- the directory ---- */

static dcp_status see(void *user, const char *name, dcp_entry_type type)
{
    claim *c = user;
    dcp_context *ctx = c->session->ctx;
    if (strcmp(name, ".metadata") == 0) {
        c->has_metadata = true;
        c->metadata_is_file = type == DCP_ENTRY_FILE;
    } else if (is_rank_metadata(name)) {
        c->status = dcp__names_add(ctx, &c->rank_metadata, name, c->err);
    } else if (starts_with(name, INTENT_PREFIX)) {
        c->has_own |= strcmp(name, c->session->intent_name) == 0;
        c->status = dcp__names_add(ctx, &c->intents, name, c->err);
    } else if (is_data_name(name)) {
        c->status = dcp__names_add(ctx, &c->data, name, c->err);
    }
    return c->status;
}

static dcp_status list(claim *c, dcp_error *err)
{
    dcp_save_session *s = c->session;
    forget_directory(c);
    c->err = err;
    c->status = DCP_OK;
    dcp_status status = s->storage->ops->list(s->storage, s->dir, see, c, err);
    return c->status != DCP_OK ? c->status : status;
}

/* ---- intents of other saves ---- */

/* Appends the text of an intent that is open. */
static dcp_status read_intent(dcp_file *f, dcp__buf *text, dcp_error *err)
{
    size_t got = 1;
    dcp_status status = DCP_OK;
    while (status == DCP_OK && got && text->len < INTENT_MAX_BYTES) {
        if (!dcp__buf_reserve(text, 4096)) {
            return dcp__nomem(err);
        }
        status = f->storage->ops->read_at(f, text->data + text->len, 4096, text->len, &got, err);
        text->len += status == DCP_OK ? got : 0;
    }
    return status;
}

/* One line, NUL in place of its newline. What does not look as we write it is passed over. */
static dcp_status take_line(claim *c, const char *line, size_t len, dcp_error *err)
{
    family *last = c->n_dead ? &c->dead[c->n_dead - 1] : NULL;
    char generation[DCP__GENERATION_BYTES] = "";
    long world = starts_with(line, "world ") ? strtol(line + 6, NULL, 10) : 0;
    if (strlen(line) != len) {
        return DCP_OK;
    }
    if (starts_with(line, "replaces ") && (is_data_name(line + 9) || is_rank_metadata(line + 9))) {
        return dcp__names_add(c->session->ctx, &c->replaced, line + 9, err);
    }
    if (last && world > 0 && world <= MAX_WORLD) {
        last->world = (int)world;
    }
    if (strcmp(line, "generation -") != 0 && sscanf(line, "generation %15[0-9a-f]", generation) != 1) {
        return DCP_OK;
    }
    void *array = c->dead;
    if (!dcp__grow(c->session->ctx, &array, &c->cap_dead, c->n_dead + 1, sizeof *c->dead)) {
        return dcp__nomem(err);
    }
    c->dead = array;
    c->dead[c->n_dead] = (family){.world = 0};
    memcpy(c->dead[c->n_dead++].generation, generation, sizeof generation);
    return DCP_OK;
}

static dcp_status note_dead(claim *c, const char *name, dcp__buf *text, dcp_error *err)
{
    static const char first_line[] = "libdcp intent 1\n";
    dcp_status status = dcp__names_add(c->session->ctx, &c->session->dead_intents, name, err);
    char *at = (char *)text->data, *end = at + text->len, *newline;
    if (text->len < sizeof first_line - 1 || memcmp(at, first_line, sizeof first_line - 1) != 0) {
        return status; /* it died before it wrote anything */
    }
    while (status == DCP_OK && (newline = memchr(at, '\n', (size_t)(end - at))) != NULL) {
        *newline = 0;
        status = take_line(c, at, (size_t)(newline - at), err);
        at = newline + 1;
    }
    return status;
}

typedef enum verdict {
    FREE, /* dead, gone, or nobody can tell since there are no locks */
    WAIT, /* still looking, and will give way to us */
    GIVE_WAY
} verdict;

/* A save that has just ended took its intent along. */
static bool is_there(dcp_save_session *s, const char *name)
{
    dcp_stat st;
    return dcp__session_stat(s, name, &st, NULL) != DCP_NOT_FOUND;
}

static dcp_status judge_open(claim *c, const char *name, dcp_file *f, verdict *out, dcp_error *err)
{
    dcp__buf text;
    bool locked = false;
    dcp_error refused = DCP_ERROR_INIT;
    dcp_status status = f->storage->ops->lock(f, &locked, &refused);
    if (status == DCP_UNSUPPORTED) {
        return DCP_OK;
    }
    if (status != DCP_OK) {
        if (err) {
            *err = refused;
        }
        return status;
    }
    dcp__buf_init(&text, c->session->ctx);
    status = read_intent(f, &text, err);
    if (status == DCP_OK && locked) {
        status = note_dead(c, name, &text, err);
    } else if (status == DCP_OK && is_there(c->session, name)) {
        *out = text.len || strcmp(name, c->session->intent_name) < 0 ? GIVE_WAY : WAIT;
    }
    dcp__buf_reset(&text);
    return status;
}

static dcp_status judge(claim *c, const char *name, verdict *out, dcp_error *err)
{
    dcp_save_session *s = c->session;
    dcp_file *f;
    *out = FREE;
    if (!s->storage->ops->lock) {
        return DCP_OK;
    }
    /* For writing, since some network file systems lock nothing else; another user's file may refuse that. */
    dcp_status status = dcp__session_open(s, name, DCP_OPEN_READ | DCP_OPEN_WRITE, &f, err);
    if (status == DCP_IO) {
        status = dcp__session_open(s, name, DCP_OPEN_READ, &f, err);
    }
    if (status != DCP_OK) {
        return status == DCP_NOT_FOUND ? DCP_OK : status;
    }
    status = judge_open(c, name, f, out, err);
    s->storage->ops->close(f, NULL);
    return status;
}

static dcp_status judge_all(claim *c, verdict *worst, char busy[DCP_ERROR_MESSAGE_BYTES], dcp_error *err)
{
    dcp_save_session *s = c->session;
    dcp_status status = list(c, err);
    *worst = FREE;
    forget_dead(c);
    for (size_t i = 0; i < c->intents.n && status == DCP_OK; i++) {
        verdict v = FREE;
        if (strcmp(c->intents.names[i], s->intent_name) != 0) {
            status = judge(c, c->intents.names[i], &v, err);
        }
        if (v != FREE) {
            snprintf(busy, DCP_ERROR_MESSAGE_BYTES, "%s", c->intents.names[i]);
        }
        *worst = v > *worst ? v : *worst;
    }
    return status;
}

static void sleep_ms(int ms)
{
    struct timespec pause = {0, ms * 1000000L};
    nanosleep(&pause, NULL);
}

/* ---- what is there ---- */

static dcp_status condemn(claim *c, const char *name, dcp_error *err)
{
    return dcp__names_add(c->session->ctx, &c->session->doomed, name, err);
}

/* Sorts the data files: those of the checkpoint to be replaced and those that dead saves were to remove are doomed, others of
 * dead saves are leftovers, the rest is nobody's. `old` may be NULL. */
static dcp_status sort_data(claim *c, const dcp__strmap *old, const family *old_family, dcp__names *leftovers, dcp_error *err)
{
    dcp__strmap replaced;
    dcp_status status = DCP_OK;
    uint64_t unused;
    dcp__strmap_init(&replaced, c->session->ctx);
    for (size_t i = 0; i < c->replaced.n && status == DCP_OK; i++) {
        status = dcp__strmap_add(&replaced, dcp_str_of(c->replaced.names[i]), i, NULL, err);
    }
    for (size_t i = 0; i < c->data.n && status == DCP_OK; i++) {
        const char *name = c->data.names[i];
        bool is_leftover = false;
        for (size_t k = 0; k < c->n_dead && !is_leftover; k++) {
            is_leftover = is_of_family(name, &c->dead[k]);
        }
        if (dcp__strmap_get(old, dcp_str_of(name), &unused) || is_of_family(name, old_family) ||
            dcp__strmap_get(&replaced, dcp_str_of(name), &unused)) {
            status = condemn(c, name, err);
        } else if (is_leftover) {
            status = dcp__names_add(c->session->ctx, leftovers, name, err);
        }
    }
    dcp__strmap_reset(&replaced);
    return status;
}

/* ---- files of 0 bytes that PyTorch has written ----
 *
 * A rank of PyTorch's that has nothing to save leaves files of 0 bytes, and its metadata neither names them nor tells how many
 * ranks there were. They are told by what PyTorch does: every rank r below the number of ranks has a file `__r_0.distcp`, and
 * where it writes with n threads `__r_0` to `__r_<n - 1>`. So a file that follows its predecessors without a gap, and holds
 * nothing, is the old checkpoint's. What stands behind a gap is not, nor what holds bytes of which the metadata does not know. */

/* Whether the file is one of the old checkpoint's: named by its metadata, or empty, and then condemned here. */
static bool belongs(claim *c, const dcp__strmap *present, const dcp__strmap *named, const char *name, dcp_status *status,
                    dcp_error *err)
{
    dcp_stat st;
    uint64_t unused;
    if (!dcp__strmap_get(present, dcp_str_of(name), &unused)) {
        return false;
    }
    if (dcp__strmap_get(named, dcp_str_of(name), &unused)) {
        return true;
    }
    bool is_empty = dcp__session_stat(c->session, name, &st, NULL) == DCP_OK && st.type == DCP_ENTRY_FILE && st.bytes == 0;
    *status = is_empty ? condemn(c, name, err) : DCP_OK;
    return is_empty;
}

static dcp_status take_empty_files(claim *c, const dcp__strmap *named, dcp_error *err)
{
    dcp__strmap present;
    dcp_status status = DCP_OK;
    char name[64];
    dcp__strmap_init(&present, c->session->ctx);
    for (size_t i = 0; i < c->data.n && status == DCP_OK; i++) {
        status = dcp__strmap_add(&present, dcp_str_of(c->data.names[i]), i, NULL, err);
    }
    bool goes_on = status == DCP_OK;
    for (int rank = 0; goes_on && status == DCP_OK; rank++) {
        int n = 0;
        do {
            dcp__data_file_name(rank, "", (size_t)n, name);
        } while (belongs(c, &present, named, name, &status, err) && status == DCP_OK && ++n);
        goes_on = n > 0;
    }
    dcp__strmap_reset(&present);
    return status;
}

static dcp_status sort_with(claim *c, const dcp_checkpoint *old, dcp__names *leftovers, dcp_error *err)
{
    dcp__strmap names;
    family f = {.world = 0};
    dcp_status status = DCP_OK;
    dcp__strmap_init(&names, c->session->ctx);
    for (size_t i = 0; old && i < old->meta->n_files && status == DCP_OK; i++) {
        status = dcp__strmap_add(&names, old->meta->files[i], i, NULL, err);
    }
    /* Files that hold nothing are in no metadata; those of libdcp are known by their generation. */
    if (old && old->meta->own.present && old->meta->own.generation.len < sizeof f.generation) {
        snprintf(f.generation, sizeof f.generation, "%s", old->meta->own.generation.ptr ? old->meta->own.generation.ptr : "");
        f.world = old->meta->own.world;
    }
    status = status == DCP_OK ? sort_data(c, &names, &f, leftovers, err) : status;
    if (status == DCP_OK && old && old->layout == DCP_LAYOUT_DCP && !old->meta->own.present) {
        status = take_empty_files(c, &names, err);
    }
    dcp__strmap_reset(&names);
    return status;
}

/* Is the failure one of the content, so that it would fail for ever? */
static bool is_broken(const claim *c, dcp_status status)
{
    return status == DCP_FORMAT || status == DCP_CHECKSUM || status == DCP_LIMIT || status == DCP_UNSUPPORTED ||
           (status == DCP_NOT_FOUND && !c->has_metadata); /* some rank's metadata is missing */
}

static dcp_status open_old(claim *c, dcp_checkpoint **old, dcp_error *err)
{
    dcp_save_session *s = c->session;
    dcp_open_opts o = DCP_OPEN_OPTS_INIT;
    dcp_error fault = DCP_ERROR_INIT;
    o.storage = s->storage;
    dcp_status status = dcp_checkpoint_open(s->ctx, s->dir, &o, old, &fault);
    if (status == DCP_OK) {
        return (*old)->is_recovered ? dcp__session_repair(s, err) : DCP_OK;
    }
    if (is_broken(c, status)) {
        dcp__log(s->ctx, DCP_LOG_WARNING, "%s: the old checkpoint cannot be read, its files stay: %s", s->path, fault.message);
        return DCP_OK;
    }
    if (err) {
        *err = fault;
    }
    return dcp__prefix(err, status, "the old checkpoint: ");
}

/* Leftovers go at once: their room may be needed. The checkpoint that is in force does not name them, and that it is in force
 * is made durable before. What cannot be removed now is tried again at the end. */
static dcp_status remove_leftovers(claim *c, const dcp__names *leftovers, size_t *n_left, dcp_error *err)
{
    dcp_status status = leftovers->n ? dcp__session_sync_dir(c->session, err) : DCP_OK;
    for (size_t i = 0; i < leftovers->n && status == DCP_OK; i++) {
        if (dcp__session_remove(c->session, leftovers->names[i], NULL) != DCP_OK) {
            ++*n_left;
            status = condemn(c, leftovers->names[i], err);
        }
    }
    return status;
}

static void new_generation(dcp_save_session *s)
{
    uint8_t random[6];
    dcp__random_bytes(random, sizeof random);
    for (size_t i = 0; i < sizeof random; i++) {
        snprintf(s->generation + 2 * i, 3, "%02x", random[i]);
    }
}

static dcp_status look_at_data(claim *c, dcp_error *err)
{
    dcp_save_session *s = c->session;
    dcp_checkpoint *old = NULL;
    dcp__names leftovers = {0};
    dcp__names_reset(s->ctx, &s->doomed);
    dcp_status status = s->replaces ? open_old(c, &old, err) : DCP_OK;
    status = status == DCP_OK ? sort_with(c, old, &leftovers, err) : status;
    for (size_t i = 0; i < c->rank_metadata.n && status == DCP_OK; i++) {
        status = condemn(c, c->rank_metadata.names[i], err);
    }
    size_t n_left = c->data.n - leftovers.n;
    if (status == DCP_OK && s->replaces && !old) { /* a file may be the unreadable checkpoint's */
        n_left = c->data.n;
        for (size_t i = 0; i < leftovers.n && status == DCP_OK; i++) {
            status = condemn(c, leftovers.names[i], err);
        }
    } else if (status == DCP_OK) {
        status = remove_leftovers(c, &leftovers, &n_left, err);
    }
    if (status == DCP_OK && (s->replaces || n_left)) { /* new names, so that nothing there is touched */
        new_generation(s);
    }
    dcp__names_reset(s->ctx, &leftovers);
    dcp_checkpoint_close(old);
    return status;
}

/* What was listed while other saves were still judged may be out of date: one of them may have published since. */
static dcp_status look_around(claim *c, bool *is_busy, dcp_error *err)
{
    dcp_save_session *s = c->session;
    dcp_status status = list(c, err);
    if (status != DCP_OK) {
        return status;
    }
    if (!c->has_own) { /* a save that has just ended took it for a dead one's */
        *is_busy = true;
        return DCP_OK;
    }
    s->replaces = c->has_metadata || c->rank_metadata.n;
    if (c->has_metadata && !c->metadata_is_file) {
        return dcp__fail(err, DCP_EXISTS, "in the way: .metadata is not a file");
    }
    if (s->replaces && !s->opts.overwrite) {
        return dcp__fail(err, DCP_EXISTS, "a checkpoint is there already, and overwriting was not asked for");
    }
    return look_at_data(c, err);
}

/* ---- the own intent ---- */

/* The name with a number behind it if a save of the same id has left its own. */
static dcp_status make_intent(dcp_save_session *s, dcp_error *err)
{
    size_t len = strlen(INTENT_PREFIX) + sizeof s->save_id + 4;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = DCP_EXISTS;
    s->intent_name = s->intent_name ? s->intent_name : dcp__alloc(s->ctx, len);
    if (!s->intent_name) {
        return dcp__nomem(err);
    }
    for (int i = 0; i < 100 && status == DCP_EXISTS; i++) {
        snprintf(s->intent_name, len, i ? "%s%s.%d" : "%s%s", INTENT_PREFIX, s->save_id, i);
        status = dcp__session_open(s, s->intent_name, DCP_OPEN_READ | DCP_OPEN_WRITE | DCP_OPEN_CREATE | DCP_OPEN_EXCLUSIVE,
                                   &s->intent, &fault);
    }
    if (status != DCP_OK && err) {
        *err = fault;
    }
    return status;
}

static dcp_status lock_intent(dcp_save_session *s, bool *is_busy, dcp_error *err)
{
    bool locked = false;
    dcp_error refused = DCP_ERROR_INIT;
    dcp_status status = s->storage->ops->lock ? s->storage->ops->lock(s->intent, &locked, &refused) : DCP_UNSUPPORTED;
    if (status == DCP_UNSUPPORTED) {
        s->report.degraded |= DCP_DEGRADED_LOCK;
        return DCP_OK;
    }
    if (status != DCP_OK && err) {
        *err = refused;
    }
    *is_busy = !locked; /* another save is just looking at it */
    return status;
}

static dcp_status write_intent(dcp_save_session *s, dcp_error *err)
{
    dcp__buf text;
    dcp__buf_init(&text, s->ctx);
    dcp__buf_printf(&text, "libdcp intent 1\ngeneration %s\nworld %d\n", s->generation[0] ? s->generation : "-", s->world);
    for (size_t i = 0; i < s->doomed.n; i++) {
        dcp__buf_printf(&text, "replaces %s\n", s->doomed.names[i]);
    }
    dcp_status status = text.failed ? dcp__nomem(err) : DCP_OK;
    status = status == DCP_OK ? s->storage->ops->write_at(s->intent, text.data, text.len, 0, err) : status;
    status = status == DCP_OK ? dcp__session_sync(s, s->intent, err) : status;
    dcp__buf_reset(&text);
    return status == DCP_OK ? dcp__session_sync_dir(s, err) : status;
}

void dcp__session_drop_intent(dcp_save_session *s, bool keep)
{
    if (s->intent) {
        if (!keep) {
            dcp__session_remove(s, s->intent_name, NULL); /* first, so that nobody takes it for a dead one */
        }
        s->storage->ops->close(s->intent, NULL);
        s->intent = NULL;
    }
}

/* ---- the claim ---- */

/* One try; *is_busy: give way, for another save is there. */
static dcp_status claim_once(claim *c, bool *is_busy, char busy[DCP_ERROR_MESSAGE_BYTES], dcp_error *err)
{
    dcp_save_session *s = c->session;
    verdict v = WAIT;
    dcp_status status = make_intent(s, err);
    status = status == DCP_OK ? lock_intent(s, is_busy, err) : status;
    for (int i = 0; i < WAIT_TRIES && v == WAIT && status == DCP_OK && !*is_busy; i++) {
        if (i) {
            sleep_ms(2);
        }
        status = judge_all(c, &v, busy, err);
    }
    *is_busy |= v != FREE;
    status = status == DCP_OK && !*is_busy ? look_around(c, is_busy, err) : status;
    return status == DCP_OK && !*is_busy ? write_intent(s, err) : status;
}

dcp_status dcp__session_claim(dcp_save_session *s, dcp_error *err)
{
    claim c = {.session = s};
    char busy[DCP_ERROR_MESSAGE_BYTES] = "";
    bool is_busy = true;
    dcp_status status = DCP_OK;
    for (int i = 0; i < CLAIM_TRIES && is_busy && status == DCP_OK; i++) {
        uint8_t random;
        if (i) {
            dcp__random_bytes(&random, 1);
            sleep_ms(1 + random % 16);
        }
        is_busy = false;
        status = claim_once(&c, &is_busy, busy, err);
        if (status != DCP_OK || is_busy) {
            dcp__session_drop_intent(s, false);
        }
    }
    if (status == DCP_OK && is_busy) {
        status = dcp__fail(err, DCP_EXISTS, "another save to this place is running%s%s%s", busy[0] ? " (" : "", busy,
                           busy[0] ? ")" : "");
    }
    forget_directory(&c);
    dcp__names_reset(s->ctx, &c.replaced);
    dcp__free(s->ctx, c.dead);
    return status;
}

/* ---- what other ranks have written ---- */

bool dcp__session_remove_family(dcp_save_session *s)
{
    claim c = {.session = s};
    family own = {.world = s->world};
    bool is_clean = list(&c, NULL) == DCP_OK;
    memcpy(own.generation, s->generation, sizeof own.generation);
    for (size_t i = 0; i < c.data.n; i++) {
        if (is_of_family(c.data.names[i], &own)) {
            is_clean &= dcp__session_remove(s, c.data.names[i], NULL) == DCP_OK;
        }
    }
    forget_directory(&c);
    return is_clean;
}

/* ---- without communication ---- */

static dcp_status refuse_if_there(dcp_save_session *s, const char *name, dcp_error *err)
{
    dcp_stat st;
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status = dcp__session_stat(s, name, &st, &fault);
    if (status == DCP_NOT_FOUND) {
        return DCP_OK;
    }
    if (status == DCP_OK) {
        return dcp__fail(err, DCP_EXISTS, "%s is there already, and a save without communication replaces nothing", name);
    }
    if (err) {
        *err = fault;
    }
    return status;
}

dcp_status dcp__session_claim_rank(dcp_save_session *s, dcp_error *err)
{
    char name[64];
    dcp_stat st;
    dcp_status status = s->storage->ops->make_dir ? s->storage->ops->make_dir(s->storage, s->dir, err) : DCP_OK;
    status = status == DCP_OK ? refuse_if_there(s, ".metadata", err) : status;
    snprintf(name, sizeof name, "__%d.metadata", s->rank);
    status = status == DCP_OK ? refuse_if_there(s, name, err) : status;
    dcp__data_file_name(s->rank, "", 0, name);
    if (status == DCP_OK && dcp__session_stat(s, name, &st, NULL) == DCP_OK) {
        new_generation(s); /* a save that died left it: new names, so that nothing there is touched */
    }
    return status;
}
