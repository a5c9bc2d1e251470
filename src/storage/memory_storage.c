/* Files in memory. Names are kept sorted, so that what stands below a directory is a run of them; a directory exists if it was
 * made or if a name goes through it. */
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/buf.h"
#include "storage/storage.h"

/* The bytes of a file. They outlive their name while the file is open. */
typedef struct blob {
    uint64_t refs;         /* of names and open files; guarded by the storage's lock */
    const void *locked_by; /* the open file with the lock; guarded by the storage's lock */
    int64_t mtime_ns;      /* atomic */
    pthread_rwlock_t lock; /* guards the fields below; writing within `bytes` is sharing, like reading */
    uint8_t *data;
    size_t bytes, cap;
} blob;

typedef struct entry {
    char *name;
    blob *blob; /* NULL: a directory */
} entry;

typedef struct memory_storage {
    dcp_storage base;
    dcp_context *ctx;
    pthread_mutex_t lock; /* guards the names and what blobs say */
    entry *entries;       /* sorted by name */
    size_t n, cap;
} memory_storage;

typedef struct memory_file {
    dcp_file base;
    blob *blob;
    bool is_readable, is_writable;
    char name[];
} memory_file;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- blobs ---- */

static blob *blob_create(dcp_context *ctx)
{
    blob *b = dcp__calloc(ctx, 1, sizeof *b);
    if (b) {
        b->mtime_ns = now_ns();
        pthread_rwlock_init(&b->lock, NULL);
    }
    return b;
}

static void blob_unref(dcp_context *ctx, blob *b)
{
    if (b && --b->refs == 0) {
        pthread_rwlock_destroy(&b->lock);
        dcp__free(ctx, b->data);
        dcp__free(ctx, b);
    }
}

static void blob_truncate(blob *b)
{
    pthread_rwlock_wrlock(&b->lock);
    b->bytes = 0;
    pthread_rwlock_unlock(&b->lock);
    __atomic_store_n(&b->mtime_ns, now_ns(), __ATOMIC_RELAXED);
}

/* Makes the file at least `end` bytes long; what was not written reads as zeros. */
static bool blob_extend(dcp_context *ctx, blob *b, size_t end)
{
    bool ok = true;
    pthread_rwlock_wrlock(&b->lock);
    if (end > b->bytes) {
        void *data = b->data;
        ok = dcp__grow(ctx, &data, &b->cap, end, 1);
        b->data = data;
    }
    if (ok && end > b->bytes) {
        memset(b->data + b->bytes, 0, end - b->bytes);
        b->bytes = end;
    }
    pthread_rwlock_unlock(&b->lock);
    return ok;
}

/* ---- names; the caller holds the storage's lock ---- */

/* How an entry sorts against the first len bytes of name followed by `next`: NUL for the name itself, "/" for what is below. */
static int compare(const entry *e, const char *name, size_t len, char next)
{
    int order = strncmp(e->name, name, len);
    return order ? order : (unsigned char)e->name[len] - (unsigned char)next;
}

/* Index of the first entry that does not sort before it. */
static size_t lower_bound(const memory_storage *ms, const char *name, size_t len, char next)
{
    size_t low = 0, high = ms->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (compare(&ms->entries[mid], name, len, next) < 0) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return low;
}

static entry *find_part(const memory_storage *ms, const char *name, size_t len)
{
    size_t i = lower_bound(ms, name, len, 0);
    return i < ms->n && compare(&ms->entries[i], name, len, 0) == 0 ? &ms->entries[i] : NULL;
}

static entry *find(const memory_storage *ms, const char *name)
{
    return find_part(ms, name, strlen(name));
}

/* The run of entries below a directory. */
static void find_below(const memory_storage *ms, const char *dir, size_t *first, size_t *end)
{
    size_t len = strlen(dir);
    *first = len ? lower_bound(ms, dir, len, '/') : 0;
    *end = len ? lower_bound(ms, dir, len, '/' + 1) : ms->n;
}

static bool is_directory(const memory_storage *ms, const char *name)
{
    const entry *e = find(ms, name);
    size_t first, end;
    find_below(ms, name, &first, &end);
    return !*name || (e ? !e->blob : first < end);
}

static bool insert(memory_storage *ms, const char *name, size_t len, blob *b)
{
    void *entries = ms->entries;
    char *copy = dcp__strndup(ms->ctx, name, len);
    bool ok = copy && dcp__grow(ms->ctx, &entries, &ms->cap, ms->n + 1, sizeof *ms->entries);
    ms->entries = entries;
    if (!ok) {
        dcp__free(ms->ctx, copy);
        return false;
    }
    size_t i = lower_bound(ms, copy, len, 0);
    memmove(ms->entries + i + 1, ms->entries + i, (ms->n - i) * sizeof *ms->entries);
    ms->entries[i] = (entry){copy, b};
    ms->n++;
    if (b) {
        b->refs++;
    }
    return true;
}

static void erase(memory_storage *ms, entry *e)
{
    size_t i = (size_t)(e - ms->entries);
    blob_unref(ms->ctx, e->blob);
    dcp__free(ms->ctx, e->name);
    ms->n--;
    memmove(e, e + 1, (ms->n - i) * sizeof *e);
}

static dcp_status fail_name(dcp_error *err, int sys_errno, const char *verb, const char *name)
{
    return dcp__fail_errno(err, sys_errno, "%s %s", verb, *name ? dcp__print(dcp_str_of(name)).text : "the root");
}

/* There are no links and nothing is outside, so only plain names make sense. "" is the root. */
static dcp_status check_name(const char *verb, const char *name, dcp_error *err)
{
    const char *p = name;
    while (*name) {
        size_t len = strcspn(p, "/");
        if (len == 0 || (p[0] == '.' && (len == 1 || (len == 2 && p[1] == '.')))) {
            return dcp__fail(err, DCP_ARG, "%s %s: not a plain name", verb, dcp__print(dcp_str_of(name)).text);
        }
        if (!p[len]) {
            break;
        }
        p += len + 1;
    }
    return DCP_OK;
}

/* ENOTDIR if a part before the last is a file, as in a file system. */
static dcp_status check_parents(const memory_storage *ms, const char *verb, const char *name, dcp_error *err)
{
    for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        const entry *e = find_part(ms, name, (size_t)(slash - name));
        if (e && e->blob) {
            return fail_name(err, ENOTDIR, verb, name);
        }
    }
    return DCP_OK;
}

/* ---- opening ---- */

/* Finds or makes the file behind a name; the lock is held. */
static dcp_status open_blob(memory_storage *ms, const char *name, unsigned flags, blob **out, dcp_error *err)
{
    dcp_status status = check_parents(ms, "open", name, err);
    if (status != DCP_OK) {
        return status;
    }
    const entry *e = find(ms, name);
    if (is_directory(ms, name)) {
        return fail_name(err, flags & DCP_OPEN_EXCLUSIVE ? EEXIST : EISDIR, "open", name);
    }
    if (e && (flags & DCP_OPEN_EXCLUSIVE)) {
        return fail_name(err, EEXIST, "open", name);
    }
    if (!e && !(flags & DCP_OPEN_CREATE)) {
        return fail_name(err, ENOENT, "open", name);
    }
    blob *b = e ? e->blob : blob_create(ms->ctx);
    if (!b || (!e && !insert(ms, name, strlen(name), b))) {
        if (b) {
            b->refs = 1;
            blob_unref(ms->ctx, b);
        }
        return dcp__nomem(err);
    }
    if (flags & DCP_OPEN_TRUNCATE) {
        blob_truncate(b);
    }
    b->refs++;
    *out = b;
    return DCP_OK;
}

static dcp_status memory_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = dcp__open_flags_check(name, flags, err);
    if (status != DCP_OK || (status = check_name("open", name, err)) != DCP_OK) {
        return status;
    }
    if (flags & DCP_OPEN_DIRECT) {
        return dcp__fail(err, DCP_UNSUPPORTED, "open %s: memory has no direct I/O", dcp__print(dcp_str_of(name)).text);
    }
    size_t name_bytes = strlen(name) + 1;
    memory_file *f = dcp__alloc(ms->ctx, sizeof *f + name_bytes);
    if (!f) {
        return dcp__nomem(err);
    }
    *f = (memory_file){.base = {st}, .is_readable = flags & DCP_OPEN_READ, .is_writable = flags & DCP_OPEN_WRITE};
    memcpy(f->name, name, name_bytes);
    pthread_mutex_lock(&ms->lock);
    status = open_blob(ms, name, flags, &f->blob, err);
    pthread_mutex_unlock(&ms->lock);
    if (status != DCP_OK) {
        dcp__free(ms->ctx, f);
        return status;
    }
    *out = &f->base;
    return DCP_OK;
}

/* ---- files ---- */

static dcp_status memory_read_at(dcp_file *file, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    memory_file *f = (memory_file *)file;
    dcp_status status = dcp__io_range_check(f->name, n, offset, err);
    if (status == DCP_OK && !f->is_readable) {
        status = fail_name(err, EBADF, "read", f->name);
    }
    if (status != DCP_OK) {
        return status;
    }
    blob *b = f->blob;
    pthread_rwlock_rdlock(&b->lock);
    size_t left = offset < b->bytes ? b->bytes - (size_t)offset : 0;
    size_t take = n < left ? n : left;
    if (take) {
        memcpy(buf, b->data + offset, take);
    }
    pthread_rwlock_unlock(&b->lock);
    *got = take;
    return DCP_OK;
}

static dcp_status memory_write_at(dcp_file *file, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    memory_file *f = (memory_file *)file;
    blob *b = f->blob;
    dcp_status status = dcp__io_range_check(f->name, n, offset, err);
    if (status == DCP_OK && !f->is_writable) {
        status = fail_name(err, EBADF, "write", f->name);
    }
    if (status != DCP_OK || n == 0) {
        return status;
    }
    size_t end = (size_t)offset + n;
    pthread_rwlock_rdlock(&b->lock);
    while (end > b->bytes) { /* again if somebody truncates in between */
        pthread_rwlock_unlock(&b->lock);
        if (!blob_extend(((memory_storage *)file->storage)->ctx, b, end)) {
            return dcp__nomem(err);
        }
        pthread_rwlock_rdlock(&b->lock);
    }
    memcpy(b->data + offset, buf, n);
    pthread_rwlock_unlock(&b->lock);
    __atomic_store_n(&b->mtime_ns, now_ns(), __ATOMIC_RELAXED);
    return DCP_OK;
}

static dcp_status memory_sync(dcp_file *file, dcp_error *err)
{
    return dcp__fail(err, DCP_UNSUPPORTED, "sync %s: memory is not durable",
                     dcp__print(dcp_str_of(((memory_file *)file)->name)).text);
}

static dcp_status memory_close(dcp_file *file, dcp_error *err)
{
    (void)err;
    memory_file *f = (memory_file *)file;
    memory_storage *ms = (memory_storage *)file->storage;
    pthread_mutex_lock(&ms->lock);
    if (f->blob->locked_by == f) {
        f->blob->locked_by = NULL;
    }
    blob_unref(ms->ctx, f->blob);
    pthread_mutex_unlock(&ms->lock);
    dcp__free(ms->ctx, f);
    return DCP_OK;
}

static dcp_status memory_lock(dcp_file *file, bool *locked, dcp_error *err)
{
    (void)err;
    memory_file *f = (memory_file *)file;
    memory_storage *ms = (memory_storage *)file->storage;
    pthread_mutex_lock(&ms->lock);
    const entry *named = find(ms, f->name);
    if (!f->blob->locked_by && named && named->blob == f->blob) {
        f->blob->locked_by = f;
    }
    *locked = f->blob->locked_by == f;
    pthread_mutex_unlock(&ms->lock);
    return DCP_OK;
}

/* ---- names ---- */

static dcp_status stat_locked(memory_storage *ms, const char *name, dcp_stat *out, dcp_error *err)
{
    const entry *e = find(ms, name);
    if (is_directory(ms, name)) {
        *out = (dcp_stat){.type = DCP_ENTRY_DIR};
        return DCP_OK;
    }
    if (!e) {
        return fail_name(err, ENOENT, "stat", name);
    }
    pthread_rwlock_rdlock(&e->blob->lock);
    uint64_t bytes = e->blob->bytes;
    pthread_rwlock_unlock(&e->blob->lock);
    *out = (dcp_stat){DCP_ENTRY_FILE, bytes, __atomic_load_n(&e->blob->mtime_ns, __ATOMIC_RELAXED)};
    return DCP_OK;
}

static dcp_status memory_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = check_name("stat", name, err);
    if (status == DCP_OK) {
        pthread_mutex_lock(&ms->lock);
        status = stat_locked(ms, name, out, err);
        pthread_mutex_unlock(&ms->lock);
    }
    return status;
}

/* Appends a byte for the type and the name of each entry directly in a directory, once each. */
static dcp_status collect(const memory_storage *ms, const char *dir, dcp__buf *names, dcp_error *err)
{
    const entry *e = find(ms, dir);
    size_t first, end, len = strlen(dir), skip = len ? len + 1 : 0;
    if (!is_directory(ms, dir)) {
        return fail_name(err, e ? ENOTDIR : ENOENT, "list", dir);
    }
    find_below(ms, dir, &first, &end);
    while (first < end) {
        const char *full = ms->entries[first].name, *name = full + skip;
        size_t part = strcspn(name, "/");
        bool is_own = !name[part]; /* not only gone through */
        if (is_own || !find_part(ms, full, skip + part)) {
            dcp__buf_put_byte(names, is_own && ms->entries[first].blob ? DCP_ENTRY_FILE : DCP_ENTRY_DIR);
            dcp__buf_put(names, name, part);
            dcp__buf_put_byte(names, 0);
        }
        /* What is below a directory need not follow it at once ("a", "a-b", "a/b"), but it is one run. */
        first = is_own ? first + 1 : lower_bound(ms, full, skip + part, '/' + 1);
    }
    return names->failed ? dcp__nomem(err) : DCP_OK;
}

static dcp_status memory_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = check_name("list", name, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__buf names;
    dcp__buf_init(&names, ms->ctx);
    pthread_mutex_lock(&ms->lock);
    status = collect(ms, name, &names, err);
    pthread_mutex_unlock(&ms->lock);
    for (size_t i = 0; i < names.len && status == DCP_OK;) {
        const char *found = (const char *)names.data + i + 1;
        status = fn(user, found, (dcp_entry_type)names.data[i]);
        i += strlen(found) + 2;
    }
    dcp__buf_reset(&names);
    return status;
}

/* Makes room for the new name before anything is changed, so that a failure leaves both as they were. */
static dcp_status rename_locked(memory_storage *ms, const char *from, const char *to, dcp_error *err)
{
    dcp_status status = check_parents(ms, "rename", to, err);
    const entry *source = find(ms, from);
    entry *target = find(ms, to);
    if (status != DCP_OK) {
        return status;
    }
    if (is_directory(ms, from) || is_directory(ms, to)) {
        return fail_name(err, EISDIR, "rename", from);
    }
    if (!source) {
        return fail_name(err, ENOENT, "rename", from);
    }
    if (source == target) {
        return DCP_OK;
    }
    blob *b = source->blob;
    if (target) {
        blob_unref(ms->ctx, target->blob);
        target->blob = b;
        b->refs++;
    } else if (!insert(ms, to, strlen(to), b)) {
        return dcp__nomem(err);
    }
    erase(ms, find(ms, from));
    return DCP_OK;
}

static dcp_status memory_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = check_name("rename", from, err);
    status = status == DCP_OK ? check_name("rename", to, err) : status;
    if (status == DCP_OK) {
        pthread_mutex_lock(&ms->lock);
        status = rename_locked(ms, from, to, err);
        pthread_mutex_unlock(&ms->lock);
    }
    return status;
}

static dcp_status remove_locked(memory_storage *ms, const char *name, dcp_error *err)
{
    entry *e = find(ms, name);
    size_t first, end;
    find_below(ms, name, &first, &end);
    if (first < end) {
        return fail_name(err, ENOTEMPTY, "remove", name);
    }
    if (!e) {
        return fail_name(err, ENOENT, "remove", name);
    }
    erase(ms, e);
    return DCP_OK;
}

static dcp_status memory_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = check_name("remove", name, err);
    if (status == DCP_OK && !*name) {
        status = dcp__fail(err, DCP_ARG, "remove: the root cannot be removed");
    }
    if (status == DCP_OK) {
        pthread_mutex_lock(&ms->lock);
        status = remove_locked(ms, name, err);
        pthread_mutex_unlock(&ms->lock);
    }
    return status;
}

static dcp_status make_dir_locked(memory_storage *ms, const char *name, dcp_error *err)
{
    for (const char *end = name; *end;) {
        end += *end == '/';
        end += strcspn(end, "/");
        const entry *e = find_part(ms, name, (size_t)(end - name));
        if (e && e->blob) {
            return fail_name(err, EEXIST, "make directory", name);
        }
        if (!e && !insert(ms, name, (size_t)(end - name), NULL)) {
            return dcp__nomem(err);
        }
    }
    return DCP_OK;
}

static dcp_status memory_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    memory_storage *ms = (memory_storage *)st;
    dcp_status status = check_name("make directory", name, err);
    if (status == DCP_OK) {
        pthread_mutex_lock(&ms->lock);
        status = make_dir_locked(ms, name, err);
        pthread_mutex_unlock(&ms->lock);
    }
    return status;
}

/* ---- the storage ---- */

static void memory_free(dcp_storage *st)
{
    memory_storage *ms = (memory_storage *)st;
    for (size_t i = 0; i < ms->n; i++) {
        blob_unref(ms->ctx, ms->entries[i].blob);
        dcp__free(ms->ctx, ms->entries[i].name);
    }
    pthread_mutex_destroy(&ms->lock);
    dcp__free(ms->ctx, ms->entries);
    dcp__free(ms->ctx, ms);
}

static const dcp_storage_ops memory_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .caps = DCP_STORAGE_RENAME | DCP_STORAGE_RANDOM_WRITE,
    .name = "memory",
    .open = memory_open,
    .read_at = memory_read_at,
    .write_at = memory_write_at,
    .sync = memory_sync,
    .close = memory_close,
    .stat = memory_stat,
    .list = memory_list,
    .rename = memory_rename,
    .remove = memory_remove,
    .make_dir = memory_make_dir,
    .lock = memory_lock,
    .free = memory_free,
};

dcp_status dcp_storage_memory(dcp_context *ctx, dcp_storage **out, dcp_error *err)
{
    ctx = dcp__context(ctx);
    if (!out) {
        return dcp__fail(err, DCP_ARG, "memory storage: no place for the result");
    }
    memory_storage *ms = dcp__calloc(ctx, 1, sizeof *ms);
    if (!ms) {
        return dcp__nomem(err);
    }
    ms->base.ops = &memory_ops;
    ms->ctx = ctx;
    pthread_mutex_init(&ms->lock, NULL);
    *out = &ms->base;
    return DCP_OK;
}
