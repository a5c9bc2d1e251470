/* The newest complete checkpoint of a directory of checkpoints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/read/checkpoint.h"

/* A directory that looks like a checkpoint. */
typedef struct candidate {
    char *name;         /* below the directory; "" is itself */
    const char *digits; /* the number at the end of name without leading zeros; NULL: none */
    int64_t mtime_ns;   /* of its metadata */
} candidate;

typedef struct search {
    dcp_context *ctx;
    dcp_storage *storage;
    const char *dir, *shown_dir; /* in the storage; as the caller named it */
    const dcp_open_opts *opts;
    candidate *list;
    size_t n, cap;
    bool failed; /* out of memory */
} search;

/* ---- finding them ---- */

static char *join(dcp_context *ctx, const char *dir, const char *name)
{
    size_t dir_len = strlen(dir), name_len = strlen(name);
    bool has_slash = dir_len && name_len && dir[dir_len - 1] != '/';
    char *out = dcp__alloc(ctx, dir_len + name_len + 2);
    if (out) {
        snprintf(out, dir_len + name_len + 2, "%s%s%s", dir, has_slash ? "/" : "", name);
    }
    return out;
}

static bool ends_with(const char *name, const char *end)
{
    size_t len = strlen(name), end_len = strlen(end);
    return len >= end_len && strcmp(name + len - end_len, end) == 0;
}

/* What is in a directory: the names that only checkpoints have. */
typedef struct look {
    const search *s;
    const char *dir;
    bool is_checkpoint, failed;
    int64_t metadata_ns, other_ns; /* newest of .metadata, and of the rest */
} look;

static dcp_status see_file(void *user, const char *name, dcp_entry_type type)
{
    look *l = user;
    bool is_main = strcmp(name, ".metadata") == 0;
    if (type == DCP_ENTRY_DIR || (!ends_with(name, ".metadata") && !ends_with(name, ".metadata.tmp") &&
                                  !ends_with(name, ".distcp") && !ends_with(name, ".safetensors"))) {
        return DCP_OK;
    }
    l->is_checkpoint = true;
    dcp_stat st;
    char *path = join(l->s->ctx, l->dir, name);
    if (!path) {
        l->failed = true;
        return DCP_NOMEM;
    }
    if (l->s->storage->ops->stat(l->s->storage, path, &st, NULL) == DCP_OK) {
        int64_t *newest = is_main ? &l->metadata_ns : &l->other_ns;
        *newest = st.mtime_ns > *newest ? st.mtime_ns : *newest;
    }
    dcp__free(l->s->ctx, path);
    return DCP_OK;
}

static const char *number_at_end(const char *name)
{
    const char *end = name + strlen(name), *p = end;
    while (p > name && p[-1] >= '0' && p[-1] <= '9') {
        p--;
    }
    if (p == end) {
        return NULL;
    }
    while (p + 1 < end && *p == '0') {
        p++;
    }
    return p;
}

/* Adds the directory of that name if it looks like a checkpoint. */
static void consider(search *s, const char *name)
{
    char *path = join(s->ctx, s->dir, name), *copy = dcp__strndup(s->ctx, name, strlen(name));
    void *list = s->list;
    s->failed |= !path || !copy || !dcp__grow(s->ctx, &list, &s->cap, s->n + 1, sizeof *s->list);
    s->list = list;
    if (!s->failed) {
        look l = {.s = s, .dir = path};
        dcp_error ignored = DCP_ERROR_INIT; /* what cannot be listed is none */
        s->storage->ops->list(s->storage, path, see_file, &l, &ignored);
        s->failed = l.failed || ignored.code == DCP_NOMEM;
        if (!s->failed && l.is_checkpoint) {
            s->list[s->n++] = (candidate){copy, number_at_end(copy), l.metadata_ns ? l.metadata_ns : l.other_ns};
            copy = NULL;
        }
    }
    dcp__free(s->ctx, path);
    dcp__free(s->ctx, copy);
}

static dcp_status see_directory(void *user, const char *name, dcp_entry_type type)
{
    search *s = user;
    if (type == DCP_ENTRY_DIR) {
        consider(s, name);
    }
    return s->failed ? DCP_NOMEM : DCP_OK;
}

/* Newest first: by number where the names have one, those before the others; the others by time. */
static int compare(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (!x->digits != !y->digits) {
        return x->digits ? -1 : 1;
    }
    if (x->digits) {
        size_t n = strlen(x->digits), m = strlen(y->digits);
        int order = n != m ? (n < m ? 1 : -1) : strcmp(y->digits, x->digits);
        if (order) {
            return order;
        }
    }
    return x->mtime_ns != y->mtime_ns ? (x->mtime_ns < y->mtime_ns ? 1 : -1) : strcmp(x->name, y->name);
}

/* ---- judging them ---- */

/* All files there, and none shorter than its last record. */
static dcp_status check_files(dcp_checkpoint *ck, dcp_error *err)
{
    const dcp__ranges *ranges;
    dcp_status status = dcp__get_ranges(ck, &ranges, err);
    for (uint32_t file = 0; status == DCP_OK && file < ck->meta->n_files; file++) {
        dcp_file *f;
        uint64_t bytes;
        dcp__printable name = dcp__print(ck->meta->files[file]);
        status = dcp__file_acquire(ck, file, &f, &bytes, err);
        if (status != DCP_OK) {
            return status == DCP_NOT_FOUND ? dcp__fail(err, status, "file \"%s\" is missing", name.text) : status;
        }
        dcp__file_release(ck, file);
        for (size_t i = ranges->first[file]; status == DCP_OK && i < ranges->first[file + 1]; i++) {
            const dcp__storage *s = &ck->meta->storages[ranges->order[i]];
            if (!dcp__range_fits(s->offset, s->length, bytes)) {
                status = dcp__fail_at(err, DCP_FORMAT, s->offset,
                                      "file \"%s\" of %llu bytes is too short: a record of %llu bytes is at %llu", name.text,
                                      (unsigned long long)bytes, (unsigned long long)s->length, (unsigned long long)s->offset);
            }
        }
    }
    return status;
}

static dcp_status judge(const search *s, const candidate *c, char **shown, dcp_error *err)
{
    dcp_checkpoint *ck;
    *shown = join(s->ctx, s->shown_dir, c->name);
    if (!*shown) {
        return dcp__nomem(err);
    }
    dcp_status status = dcp_checkpoint_open(s->ctx, *shown, s->opts, &ck, err);
    if (status == DCP_OK) {
        status = check_files(ck, err);
        dcp_checkpoint_close(ck);
    }
    return status;
}

static dcp_status find_complete(search *s, void (*skipped)(void *, const char *, const char *), void *user, char **out,
                                dcp_error *err)
{
    for (size_t i = 0; i < s->n; i++) {
        char *shown;
        dcp_error why = DCP_ERROR_INIT;
        dcp_status status = judge(s, &s->list[i], &shown, &why);
        if (status != DCP_OK && status != DCP_NOMEM && skipped) {
            skipped(user, shown, why.message);
        }
        dcp__free(s->ctx, shown);
        if (status == DCP_NOMEM) {
            return dcp__nomem(err);
        }
        if (status == DCP_OK) {
            *out = s->list[i].name;
            s->list[i].name = NULL;
            return DCP_OK;
        }
    }
    return s->n ? dcp__fail(err, DCP_NOT_FOUND, "%s: none of %zu checkpoints is complete", s->shown_dir, s->n)
                : dcp__fail(err, DCP_NOT_FOUND, "%s: no checkpoint there or directly below", s->shown_dir);
}

static dcp_status search_all(search *s, void (*skipped)(void *, const char *, const char *), void *user, char **out,
                             dcp_error *err)
{
    consider(s, "");
    dcp_status status = s->failed ? DCP_NOMEM : s->storage->ops->list(s->storage, s->dir, see_directory, s, err);
    if (s->failed || status == DCP_NOMEM) {
        status = dcp__nomem(err);
    } else if (status != DCP_OK) {
        dcp__prefix(err, status, "%s: ", s->shown_dir);
    } else {
        qsort(s->list, s->n, sizeof *s->list, compare);
        status = find_complete(s, skipped, user, out, err);
    }
    for (size_t i = 0; i < s->n; i++) {
        dcp__free(s->ctx, s->list[i].name);
    }
    dcp__free(s->ctx, s->list);
    return status;
}

dcp_status dcp_latest(dcp_context *ctx, const char *dir, const dcp_open_opts *opts,
                      void (*skipped)(void *user, const char *path, const char *why), void *user, char **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    if (!dir || !out || (opts && opts->struct_size != sizeof *opts)) {
        return dcp__fail(err, DCP_ARG, "latest: no directory, no place for the result, or options of another size");
    }
    search s = {.ctx = ctx, .storage = opts ? opts->storage : NULL, .dir = dir, .shown_dir = dir, .opts = opts};
    if (s.storage) {
        return search_all(&s, skipped, user, out, err);
    }
    dcp_status status = dcp_storage_posix(ctx, dir, &s.storage, err);
    if (status == DCP_OK) {
        s.dir = "";
        status = search_all(&s, skipped, user, out, err);
        dcp_storage_free(s.storage);
    }
    return status;
}
