/*
 * A storage that knows what a crash would leave of it.
 *
 * It keeps, beside the present content, what is durable: bytes of files as of their last sync, names as of the last sync_dir, and
 * the list of what came after. crash_storage_states() builds directories that a crash at this moment could leave: unsynced writes
 * kept, lost, or torn into blocks, lengths with and without their content, and any choice of the names that were made, renamed or
 * removed since, in any order. One flat directory.
 */
#ifndef TESTS_SUPPORT_CRASH_STORAGE_H
#define TESTS_SUPPORT_CRASH_STORAGE_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "base/hash.h"
#include "dcp/backend.h"
#include "support/memory_copy.h"
#include "support/random.h"

#define CRASH_MAX_FILES 128
#define CRASH_MAX_PENDING 1024
#define CRASH_NAME_BYTES 96

/* What happened to a file after its last sync. */
typedef struct crash_write {
    bool truncates;
    uint64_t offset;
    size_t n;
    uint8_t *data;
} crash_write;

typedef struct crash_inode {
    file_bytes synced, now;
    crash_write pending[CRASH_MAX_PENDING];
    size_t n_pending;
    const void *locked_by;
} crash_inode;

typedef struct crash_name {
    char name[CRASH_NAME_BYTES];
    crash_inode *inode;
} crash_name;

typedef struct crash_dir {
    crash_name names[CRASH_MAX_FILES];
    size_t n;
} crash_dir;

/* A change of names: `gone` goes, `made` is there. Either may be empty. */
typedef struct crash_change {
    char gone[CRASH_NAME_BYTES], made[CRASH_NAME_BYTES];
    crash_inode *inode;
} crash_change;

typedef struct crash_storage {
    dcp_storage base;
    dcp_storage_ops ops;
    pthread_mutex_t lock;
    crash_dir synced, now;
    crash_change pending[64];
    size_t n_pending;
    crash_inode *inodes[512];
    size_t n_inodes;
    size_t n_calls;                                        /* that changed something */
    void (*after)(void *user, struct crash_storage *self); /* called after each of them; NULL: none */
    void *user;
} crash_storage;

typedef struct crash_file {
    dcp_file base;
    crash_inode *inode;
    unsigned flags;
} crash_file;

/* ---- names ---- */

static inline crash_name *crash_find(crash_dir *d, const char *name)
{
    for (size_t i = 0; i < d->n; i++) {
        if (strcmp(d->names[i].name, name) == 0) {
            return &d->names[i];
        }
    }
    return NULL;
}

static inline void crash_copy_name(char to[CRASH_NAME_BYTES], const char *name)
{
    size_t bytes = strlen(name) + 1;
    assert_true(bytes <= CRASH_NAME_BYTES);
    memcpy(to, name, bytes);
}

static inline void crash_apply(crash_dir *d, const crash_change *c)
{
    crash_name *gone = c->gone[0] ? crash_find(d, c->gone) : NULL;
    if (gone) {
        *gone = d->names[--d->n];
    }
    if (c->made[0]) {
        crash_name *made = crash_find(d, c->made);
        if (!made) {
            assert_true(d->n < CRASH_MAX_FILES);
            made = &d->names[d->n++];
            crash_copy_name(made->name, c->made);
        }
        made->inode = c->inode;
    }
}

static inline void crash_changed(crash_storage *cs)
{
    cs->n_calls++;
    if (cs->after) {
        cs->after(cs->user, cs);
    }
}

static inline void crash_change_names(crash_storage *cs, const char *gone, const char *made, crash_inode *inode)
{
    assert_true(cs->n_pending < 63);
    crash_change *c = &cs->pending[cs->n_pending++];
    crash_copy_name(c->gone, gone);
    crash_copy_name(c->made, made);
    c->inode = inode;
    crash_apply(&cs->now, c);
    crash_changed(cs);
}

static inline crash_inode *crash_inode_make(crash_storage *cs)
{
    assert_true(cs->n_inodes < 512);
    crash_inode *inode = (crash_inode *)calloc(1, sizeof *inode);
    cs->inodes[cs->n_inodes++] = inode;
    return inode;
}

/* ---- files ---- */

static inline void crash_put(file_bytes *f, uint64_t offset, const uint8_t *data, size_t n)
{
    if (n == 0) {
        return;
    }
    if (offset + n > f->n) {
        f->data = (uint8_t *)realloc(f->data, offset + n);
        memset(f->data + f->n, 0, offset + n - f->n);
        f->n = offset + n;
    }
    memcpy(f->data + offset, data, n);
}

static inline crash_write *crash_note(crash_inode *inode)
{
    assert_true(inode->n_pending < CRASH_MAX_PENDING);
    return &inode->pending[inode->n_pending++];
}

static inline dcp_status crash_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    crash_storage *cs = (crash_storage *)st;
    pthread_mutex_lock(&cs->lock);
    crash_name *found = crash_find(&cs->now, name);
    dcp_status status = DCP_OK;
    if (found && (flags & DCP_OPEN_EXCLUSIVE)) {
        status = dcp__fail_errno(err, EEXIST, "open %s", name);
    } else if (!found && !(flags & DCP_OPEN_CREATE)) {
        status = dcp__fail_errno(err, ENOENT, "open %s", name);
    } else {
        crash_file *f = (crash_file *)calloc(1, sizeof *f);
        *f = (crash_file){{st}, found ? found->inode : crash_inode_make(cs), flags};
        if (!found) {
            crash_change_names(cs, "", name, f->inode);
        } else if ((flags & DCP_OPEN_TRUNCATE) && f->inode->now.n) {
            crash_note(f->inode)->truncates = true;
            f->inode->now.n = 0;
            crash_changed(cs);
        }
        *out = &f->base;
    }
    pthread_mutex_unlock(&cs->lock);
    return status;
}

static inline dcp_status crash_read_at(dcp_file *file, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    (void)err;
    crash_storage *cs = (crash_storage *)file->storage;
    pthread_mutex_lock(&cs->lock);
    const file_bytes *now = &((crash_file *)file)->inode->now;
    *got = offset >= now->n ? 0 : n < now->n - offset ? n : now->n - (size_t)offset;
    if (*got) {
        memcpy(buf, now->data + offset, *got);
    }
    pthread_mutex_unlock(&cs->lock);
    return DCP_OK;
}

static inline dcp_status crash_write_at(dcp_file *file, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    (void)err;
    crash_storage *cs = (crash_storage *)file->storage;
    crash_inode *inode = ((crash_file *)file)->inode;
    pthread_mutex_lock(&cs->lock);
    crash_write *w = crash_note(inode);
    w->offset = offset;
    w->n = n;
    w->data = (uint8_t *)malloc(n + 1);
    memcpy(w->data, buf, n);
    crash_put(&inode->now, offset, w->data, n);
    crash_changed(cs);
    pthread_mutex_unlock(&cs->lock);
    return DCP_OK;
}

static inline void crash_make_durable(crash_inode *inode)
{
    for (size_t i = 0; i < inode->n_pending; i++) {
        free(inode->pending[i].data);
    }
    memset(inode->pending, 0, inode->n_pending * sizeof *inode->pending);
    inode->n_pending = 0;
    inode->synced.n = 0;
    crash_put(&inode->synced, 0, inode->now.data, inode->now.n);
}

static inline dcp_status crash_sync(dcp_file *file, dcp_error *err)
{
    (void)err;
    crash_storage *cs = (crash_storage *)file->storage;
    pthread_mutex_lock(&cs->lock);
    crash_make_durable(((crash_file *)file)->inode);
    crash_changed(cs);
    pthread_mutex_unlock(&cs->lock);
    return DCP_OK;
}

static inline dcp_status crash_close(dcp_file *file, dcp_error *err)
{
    (void)err;
    crash_storage *cs = (crash_storage *)file->storage;
    crash_file *f = (crash_file *)file;
    pthread_mutex_lock(&cs->lock);
    f->inode->locked_by = f->inode->locked_by == f ? NULL : f->inode->locked_by;
    pthread_mutex_unlock(&cs->lock);
    free(f);
    return DCP_OK;
}

static inline dcp_status crash_lock(dcp_file *file, bool *locked, dcp_error *err)
{
    (void)err;
    crash_storage *cs = (crash_storage *)file->storage;
    crash_file *f = (crash_file *)file;
    pthread_mutex_lock(&cs->lock);
    f->inode->locked_by = f->inode->locked_by ? f->inode->locked_by : f;
    *locked = f->inode->locked_by == f; /* names are not looked at: one process at a time */
    pthread_mutex_unlock(&cs->lock);
    return DCP_OK;
}

/* ---- the directory ---- */

static inline dcp_status crash_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    crash_storage *cs = (crash_storage *)st;
    pthread_mutex_lock(&cs->lock);
    const crash_name *found = crash_find(&cs->now, name);
    *out = *name ? (dcp_stat){DCP_ENTRY_FILE, found ? found->inode->now.n : 0, 0} : (dcp_stat){DCP_ENTRY_DIR, 0, 0};
    dcp_status status = !*name || found ? DCP_OK : dcp__fail_errno(err, ENOENT, "stat %s", name);
    pthread_mutex_unlock(&cs->lock);
    return status;
}

static inline dcp_status crash_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    (void)name;
    (void)err;
    crash_storage *cs = (crash_storage *)st;
    dcp_status status = DCP_OK;
    pthread_mutex_lock(&cs->lock);
    crash_dir copy = cs->now;
    pthread_mutex_unlock(&cs->lock);
    for (size_t i = 0; i < copy.n && status == DCP_OK; i++) {
        status = fn(user, copy.names[i].name, DCP_ENTRY_FILE);
    }
    return status;
}

static inline dcp_status crash_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    crash_storage *cs = (crash_storage *)st;
    pthread_mutex_lock(&cs->lock);
    const crash_name *found = crash_find(&cs->now, from);
    dcp_status status = found ? DCP_OK : dcp__fail_errno(err, ENOENT, "rename %s", from);
    if (found) {
        crash_change_names(cs, from, to, found->inode);
    }
    pthread_mutex_unlock(&cs->lock);
    return status;
}

static inline dcp_status crash_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    crash_storage *cs = (crash_storage *)st;
    pthread_mutex_lock(&cs->lock);
    dcp_status status = crash_find(&cs->now, name) ? DCP_OK : dcp__fail_errno(err, ENOENT, "remove %s", name);
    if (status == DCP_OK) {
        crash_change_names(cs, name, "", NULL);
    }
    pthread_mutex_unlock(&cs->lock);
    return status;
}

static inline dcp_status crash_sync_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    (void)name;
    (void)err;
    crash_storage *cs = (crash_storage *)st;
    pthread_mutex_lock(&cs->lock);
    cs->synced = cs->now;
    cs->n_pending = 0;
    crash_changed(cs);
    pthread_mutex_unlock(&cs->lock);
    return DCP_OK;
}

static inline void crash_free(dcp_storage *st)
{
    crash_storage *cs = (crash_storage *)st;
    for (size_t i = 0; i < cs->n_inodes; i++) {
        crash_make_durable(cs->inodes[i]);
        free(cs->inodes[i]->synced.data);
        free(cs->inodes[i]->now.data);
        free(cs->inodes[i]);
    }
    pthread_mutex_destroy(&cs->lock);
    free(cs);
}

/* An empty storage; freed with dcp_storage_free. */
static inline crash_storage *crash_storage_make(bool renames)
{
    crash_storage *cs = (crash_storage *)calloc(1, sizeof *cs);
    cs->ops = (dcp_storage_ops){
        .struct_size = sizeof(dcp_storage_ops),
        .abi_version = DCP_STORAGE_ABI,
        .caps = DCP_STORAGE_RANDOM_WRITE | DCP_STORAGE_DURABLE | (renames ? DCP_STORAGE_RENAME : 0),
        .name = "crash",
        .open = crash_open,
        .read_at = crash_read_at,
        .write_at = crash_write_at,
        .sync = crash_sync,
        .close = crash_close,
        .stat = crash_stat,
        .list = crash_list,
        .rename = renames ? crash_rename : NULL,
        .remove = crash_remove,
        .sync_dir = crash_sync_dir,
        .lock = crash_lock,
        .free = crash_free,
    };
    cs->base.ops = &cs->ops;
    pthread_mutex_init(&cs->lock, NULL);
    return cs;
}

/* Makes what is there now durable, as if much time had passed. */
static inline void crash_storage_settle(crash_storage *cs)
{
    cs->synced = cs->now;
    cs->n_pending = 0;
    for (size_t i = 0; i < cs->n_inodes; i++) {
        crash_make_durable(cs->inodes[i]);
    }
}

/* ---- states ---- */

/* A directory that a crash leaves. */
typedef struct crash_image {
    char names[CRASH_MAX_FILES][CRASH_NAME_BYTES];
    file_bytes files[CRASH_MAX_FILES];
    size_t n;
    const char *how; /* in words */
} crash_image;

typedef void (*crash_image_fn)(void *user, const crash_image *image);

/* What becomes of unsynced writes. */
typedef enum crash_tear {
    CRASH_KEPT,
    CRASH_LOST,
    CRASH_SHORT,      /* content, but the length of the last sync */
    CRASH_ZEROS,      /* length, but no content */
    CRASH_EVEN_512,   /* of blocks of 512 bytes the even ones */
    CRASH_ODD_512,    /* .. the odd ones */
    CRASH_EVEN_4096,  /* of blocks of 4 KiB the even ones */
    CRASH_HALF,       /* half the length */
    CRASH_NO_TAIL,    /* the last 512 bytes are zeros */
    CRASH_RANDOM_512, /* random blocks */
    CRASH_FIRST_KEPT, /* writes before the last */
    CRASH_LAST_KEPT,  /* the last write alone */
    CRASH_TEARS
} crash_tear;

static inline bool crash_keeps(crash_tear tear, uint64_t at, uint64_t length, uint64_t salt)
{
    test_random block = {salt ^ at / 512};
    switch (tear) {
    case CRASH_LOST:
    case CRASH_ZEROS: return false;
    case CRASH_EVEN_512: return at / 512 % 2 == 0;
    case CRASH_ODD_512: return at / 512 % 2 == 1;
    case CRASH_EVEN_4096: return at / 4096 % 2 == 0;
    case CRASH_NO_TAIL: return at / 512 != (length - 1) / 512;
    case CRASH_RANDOM_512: return test_random_next(&block) % 2 == 0;
    default: return true;
    }
}

/* Copies n bytes (NULL: zeros) to a file that has room for them. */
static inline void crash_fill(file_bytes *f, uint64_t offset, const uint8_t *data, size_t n)
{
    if (offset > f->n) {
        memset(f->data + f->n, 0, (size_t)offset - f->n);
    }
    if (data) {
        memcpy(f->data + offset, data, n);
    } else {
        memset(f->data + offset, 0, n);
    }
    f->n = offset + n > f->n ? (size_t)offset + n : f->n;
}

/* One write, block by block. Blocks that are lost leave what was there, or zeros where the file was shorter. */
static inline void crash_tear_write(file_bytes *out, const crash_write *w, crash_tear tear, uint64_t length, uint64_t salt)
{
    for (size_t k = 0, step; k < w->n; k += step) {
        uint64_t at = w->offset + k;
        step = 512 - at % 512 < w->n - k ? 512 - (size_t)(at % 512) : w->n - k;
        if (crash_keeps(tear, at, length, salt)) {
            crash_fill(out, at, w->data + k, step);
        } else if (at + step > out->n) {
            size_t old = at < out->n ? out->n - (size_t)at : 0;
            crash_fill(out, at + old, NULL, step - old);
        }
    }
}

static inline file_bytes crash_content(const crash_inode *inode, crash_tear tear, uint64_t salt)
{
    uint64_t room = inode->synced.n + 1;
    for (size_t i = 0; i < inode->n_pending; i++) {
        uint64_t end = inode->pending[i].offset + inode->pending[i].n;
        room = end > room ? end : room;
    }
    file_bytes out = {(uint8_t *)malloc(room), 0};
    if (inode->synced.n) {
        crash_fill(&out, 0, inode->synced.data, inode->synced.n);
    }
    for (size_t i = 0; i < inode->n_pending && tear != CRASH_LOST; i++) {
        const crash_write *w = &inode->pending[i];
        bool is_last = i + 1 == inode->n_pending;
        if ((tear == CRASH_FIRST_KEPT && is_last) || (tear == CRASH_LAST_KEPT && !is_last)) {
            continue;
        }
        out.n = w->truncates ? 0 : out.n;
        crash_tear_write(&out, w, tear, inode->now.n, salt);
    }
    if (inode->n_pending && tear == CRASH_SHORT && out.n > inode->synced.n) {
        out.n = inode->synced.n;
    }
    if (inode->n_pending && tear == CRASH_HALF) {
        out.n /= 2;
    }
    return out;
}

/* `only`: the tear concerns this file (others are kept) or, negated, all but this file; NULL: all. */
static inline void crash_emit(const crash_storage *cs, uint64_t mask, crash_tear tear, const crash_inode *only, bool others,
                              uint64_t salt, const char *how, crash_image_fn fn, void *user)
{
    crash_dir dir = cs->synced;
    static crash_image image;
    for (size_t i = 0; i < cs->n_pending; i++) {
        if (mask >> i & 1) {
            crash_apply(&dir, &cs->pending[i]);
        }
    }
    image.n = dir.n;
    image.how = how;
    for (size_t i = 0; i < dir.n; i++) {
        const crash_inode *inode = dir.names[i].inode;
        bool torn = !only || (inode == only) != others;
        memcpy(image.names[i], dir.names[i].name, CRASH_NAME_BYTES);
        image.files[i] = crash_content(inode, torn ? tear : CRASH_KEPT, salt);
    }
    fn(user, &image);
    for (size_t i = 0; i < dir.n; i++) {
        free(image.files[i].data);
    }
}

static inline void crash_tears(const crash_storage *cs, uint64_t mask, test_random *rnd, crash_image_fn fn, void *user)
{
    char how[96];
    size_t n_unsynced = 0;
    for (size_t i = 0; i < cs->n_inodes; i++) {
        n_unsynced += cs->inodes[i]->n_pending > 0;
    }
    bool is_some = mask && mask != ((uint64_t)1 << cs->n_pending) - 1; /* of the names: then a few tears are enough */
    for (int tear = 0; tear < (n_unsynced ? CRASH_TEARS : 1); tear++) {
        if (is_some && tear > CRASH_LOST && tear != CRASH_RANDOM_512) {
            continue;
        }
        snprintf(how, sizeof how, "call %zu, names %llx of %zu, tear %d", cs->n_calls, (unsigned long long)mask, cs->n_pending,
                 tear);
        crash_emit(cs, mask, (crash_tear)tear, NULL, false, test_random_next(rnd), how, fn, user);
    }
    for (size_t i = 0; i < cs->n_inodes && n_unsynced > 1; i++) {
        if (cs->inodes[i]->n_pending) {
            snprintf(how, sizeof how, "call %zu, names %llx, file %zu alone lost or kept", cs->n_calls, (unsigned long long)mask,
                     i);
            crash_emit(cs, mask, CRASH_LOST, cs->inodes[i], false, 0, how, fn, user);
            crash_emit(cs, mask, CRASH_LOST, cs->inodes[i], true, 0, how, fn, user);
        }
    }
}

/* Calls fn with each state that a crash now could leave: for names all, none, each one lost, each one alone, each prefix, some at
 * random; for all and none all tears. States repeat. */
static inline void crash_storage_states(const crash_storage *cs, test_random *rnd, crash_image_fn fn, void *user)
{
    uint64_t all = ((uint64_t)1 << cs->n_pending) - 1;
    crash_tears(cs, all, rnd, fn, user);
    if (all == 0) {
        return;
    }
    crash_tears(cs, 0, rnd, fn, user);
    if (cs->n_pending <= 4) {
        for (uint64_t mask = 1; mask < all; mask++) {
            crash_tears(cs, mask, rnd, fn, user);
        }
        return;
    }
    for (size_t i = 0; i < cs->n_pending; i++) {
        crash_tears(cs, all & ~((uint64_t)1 << i), rnd, fn, user);
        crash_tears(cs, (uint64_t)1 << i, rnd, fn, user);
        crash_tears(cs, ((uint64_t)1 << i) - 1, rnd, fn, user);
        crash_tears(cs, test_random_next(rnd) & all, rnd, fn, user);
    }
}

/* The same for equal images, whatever the order of their files. */
static inline uint64_t crash_image_hash(const crash_image *image)
{
    uint64_t sum = image->n;
    for (size_t i = 0; i < image->n; i++) {
        uint64_t parts[2] = {dcp__xxh3_64(image->names[i], strlen(image->names[i])),
                             dcp__xxh3_64(image->files[i].data, image->files[i].n)};
        sum += dcp__xxh3_64(parts, sizeof parts);
    }
    return sum;
}

/* Puts an image into a storage that is empty. */
static inline void crash_image_restore(const crash_image *image, dcp_storage *st)
{
    for (size_t i = 0; i < image->n; i++) {
        set_file(st, image->names[i], image->files[i].data, image->files[i].n);
    }
}

#endif
