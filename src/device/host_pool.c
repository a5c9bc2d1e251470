#include "device/host_pool.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pages.h"

struct dcp__host_pool {
    dcp_context *ctx;
    dcp__host_pool_opts opts;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t released;
    dcp__host_block *blocks;
    dcp__host_pool_stats stats;
    bool has_warned;
};

dcp_status dcp__host_pool_create(dcp_context *ctx, const dcp__host_pool_opts *opts, dcp__host_pool **out, dcp_error *err)
{
    dcp__host_pool *p = dcp__calloc(ctx, 1, sizeof *p);
    if (!p) {
        return dcp__nomem(err);
    }
    p->ctx = ctx;
    p->opts = *opts;
    p->opts.pin = opts->driver ? opts->pin : DCP__PIN_NEVER;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->released, NULL);
    *out = p;
    return DCP_OK;
}

/* ---- mapping ---- */

static dcp_status map_shared(dcp__host_block *b, dcp_error *err)
{
    b->fd = memfd_create("libdcp-staging", MFD_CLOEXEC);
    if (b->fd < 0) {
        return dcp__fail_errno(err, errno, "staging: cannot make shared memory");
    }
    if (ftruncate(b->fd, (off_t)b->bytes) != 0) {
        dcp_status status = dcp__fail_errno(err, errno, "staging: cannot make %zu bytes of shared memory", b->bytes);
        close(b->fd);
        return status;
    }
    void *ptr = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
    if (ptr == MAP_FAILED) {
        dcp_status status = dcp__fail_errno(err, errno, "staging: cannot map %zu bytes", b->bytes);
        close(b->fd);
        return status;
    }
    b->ptr = ptr;
    return DCP_OK;
}

static dcp_status map_anonymous(dcp__host_block *b, dcp_error *err)
{
    void *ptr = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED) {
        return dcp__fail_errno(err, errno, "staging: cannot map %zu bytes", b->bytes);
    }
    b->ptr = ptr;
    b->fd = -1;
    return DCP_OK;
}

static void unmap(dcp__host_block *b)
{
    munmap(b->ptr, b->bytes);
    if (b->fd >= 0) {
        close(b->fd);
    }
}

/* ---- registering ---- */

/* Told once for each pool: every further block would fail the same way. The lock is held. */
static void warn_unpinned(dcp__host_pool *p, const dcp_error *fault)
{
    if (!p->has_warned) {
        p->has_warned = true;
        p->stats.native_code = fault->native_code;
        dcp__log(p->ctx, DCP_LOG_WARNING, "staging goes on with memory that is not registered, code %lld: %s",
                 (long long)fault->native_code, fault->message);
    }
}

static dcp_status pin(dcp__host_pool *p, dcp__host_block *b, dcp_error *err)
{
    if (p->opts.pin == DCP__PIN_NEVER) {
        return DCP_OK;
    }
    dcp_error fault = DCP_ERROR_INIT;
    dcp_status status =
        dcp_pin(p->opts.driver, p->opts.index, b->ptr, b->bytes, p->opts.max_register_bytes, &b->registration, &fault);
    if (status == DCP_OK) {
        b->is_pinned = b->registration.is_registered;
        p->stats.n_registered += b->is_pinned;
        p->stats.pinned_bytes += b->is_pinned ? b->bytes : 0;
        return DCP_OK;
    }
    if (p->opts.pin == DCP__PIN_REQUIRED) {
        if (err) {
            *err = fault;
        }
        return status;
    }
    warn_unpinned(p, &fault);
    return DCP_OK;
}

/* False if the device keeps it: then it must stay mapped. */
static bool unpin(dcp__host_pool *p, dcp__host_block *b)
{
    dcp_error fault = DCP_ERROR_INIT;
    if (!b->is_pinned) {
        return true;
    }
    if (dcp_unpin(p->opts.driver, &b->registration, &fault) != DCP_OK) {
        p->stats.n_failed_unregister++;
        dcp__log(p->ctx, DCP_LOG_WARNING, "%zu bytes at %p stay registered, and mapped: %s", b->bytes, (void *)b->ptr,
                 fault.message);
        return false;
    }
    p->stats.n_unregistered++;
    p->stats.pinned_bytes -= b->bytes;
    return true;
}

/* ---- blocks; the lock is held ---- */

static dcp_status add_block(dcp__host_pool *p, size_t bytes, dcp__host_block **out, dcp_error *err)
{
    dcp__host_block *b = dcp__calloc(p->ctx, 1, sizeof *b);
    if (!b) {
        return dcp__nomem(err);
    }
    b->bytes = bytes;
    dcp_status status = p->opts.is_shared ? map_shared(b, err) : map_anonymous(b, err);
    if (status != DCP_OK) {
        dcp__free(p->ctx, b);
        return status;
    }
    status = pin(p, b, err);
    if (status != DCP_OK) {
        unmap(b);
        dcp__free(p->ctx, b);
        return status;
    }
    b->next = p->blocks;
    p->blocks = b;
    p->stats.n_blocks++;
    p->stats.mapped_bytes += bytes;
    p->stats.peak_bytes = p->stats.mapped_bytes > p->stats.peak_bytes ? p->stats.mapped_bytes : p->stats.peak_bytes;
    *out = b;
    return DCP_OK;
}

static void drop_block(dcp__host_pool *p, dcp__host_block **at)
{
    dcp__host_block *b = *at;
    *at = b->next;
    p->stats.n_blocks--;
    p->stats.mapped_bytes -= b->bytes;
    if (unpin(p, b)) {
        unmap(b);
    }
    dcp__free(p->ctx, b);
}

static dcp__host_block *best_free(const dcp__host_pool *p, size_t bytes)
{
    dcp__host_block *best = NULL;
    for (dcp__host_block *b = p->blocks; b; b = b->next) {
        if (!b->is_used && b->bytes >= bytes && (!best || b->bytes < best->bytes)) {
            best = b;
        }
    }
    return best;
}

static void trim(dcp__host_pool *p, uint64_t keep_bytes)
{
    while (p->stats.mapped_bytes > keep_bytes) {
        dcp__host_block **largest = NULL;
        for (dcp__host_block **at = &p->blocks; *at; at = &(*at)->next) {
            if (!(*at)->is_used && (!largest || (*at)->bytes > (*largest)->bytes)) {
                largest = at;
            }
        }
        if (!largest) {
            return;
        }
        drop_block(p, largest);
    }
}

static uint64_t cap_of(const dcp__host_pool *p)
{
    return p->opts.cap_bytes ? p->opts.cap_bytes : UINT64_MAX;
}

/* Gives *out a block, or leaves it NULL: there is no room now. */
static dcp_status try_acquire(dcp__host_pool *p, size_t bytes, dcp__host_block **out, dcp_error *err)
{
    uint64_t cap = cap_of(p);
    *out = best_free(p, bytes);
    if (*out) {
        return DCP_OK;
    }
    if (p->stats.used_bytes > cap - bytes) {
        return DCP_OK;
    }
    trim(p, cap - bytes);
    return add_block(p, bytes, out, err);
}

/* ---- calls ---- */

dcp_status dcp__host_pool_acquire(dcp__host_pool *p, size_t bytes, bool wait, dcp__host_block **out, dcp_error *err)
{
    dcp__host_block *b = NULL;
    size_t whole;
    if (bytes == 0 || !dcp__whole_pages(bytes, &whole) || whole > cap_of(p)) {
        return dcp__fail(err, bytes ? DCP_LIMIT : DCP_ARG, "staging: %zu bytes, at most %llu are allowed", bytes,
                         (unsigned long long)cap_of(p));
    }
    pthread_mutex_lock(&p->lock);
    dcp_status status = try_acquire(p, whole, &b, err);
    while (status == DCP_OK && !b && wait) {
        pthread_cond_wait(&p->released, &p->lock);
        status = try_acquire(p, whole, &b, err);
    }
    if (status == DCP_OK && !b) {
        status = dcp__fail(err, DCP_LIMIT, "staging: %zu bytes wanted, %llu of at most %llu are in use", whole,
                           (unsigned long long)p->stats.used_bytes, (unsigned long long)p->opts.cap_bytes);
    }
    if (status == DCP_OK) {
        b->is_used = true;
        p->stats.used_bytes += b->bytes;
        *out = b;
    }
    pthread_mutex_unlock(&p->lock);
    return status;
}

void dcp__host_pool_release(dcp__host_pool *p, dcp__host_block *b)
{
    if (b) {
        pthread_mutex_lock(&p->lock);
        b->is_used = false;
        p->stats.used_bytes -= b->bytes;
        pthread_cond_broadcast(&p->released);
        pthread_mutex_unlock(&p->lock);
    }
}

const dcp__host_block *dcp__host_pool_find(dcp__host_pool *p, const void *ptr, size_t n)
{
    uintptr_t at = (uintptr_t)ptr;
    pthread_mutex_lock(&p->lock);
    const dcp__host_block *b = p->blocks;
    while (b && !(b->is_used && at >= (uintptr_t)b->ptr && n <= b->bytes && at - (uintptr_t)b->ptr <= b->bytes - n)) {
        b = b->next;
    }
    pthread_mutex_unlock(&p->lock);
    return b;
}

uint64_t dcp__host_pool_room(dcp__host_pool *p)
{
    pthread_mutex_lock(&p->lock);
    uint64_t room = p->opts.cap_bytes ? p->opts.cap_bytes - p->stats.used_bytes : UINT64_MAX;
    pthread_mutex_unlock(&p->lock);
    return room;
}

void dcp__host_pool_trim(dcp__host_pool *p, uint64_t keep_bytes)
{
    pthread_mutex_lock(&p->lock);
    trim(p, keep_bytes);
    pthread_mutex_unlock(&p->lock);
}

dcp__host_pool_stats dcp__host_pool_get_stats(dcp__host_pool *p)
{
    pthread_mutex_lock(&p->lock);
    dcp__host_pool_stats stats = p->stats;
    pthread_mutex_unlock(&p->lock);
    return stats;
}

void dcp__host_pool_free(dcp__host_pool *p)
{
    if (p) {
        for (dcp__host_block *b = p->blocks; b; b = b->next) {
            b->is_used = false;
        }
        trim(p, 0);
        pthread_cond_destroy(&p->released);
        pthread_mutex_destroy(&p->lock);
        dcp__free(p->ctx, p);
    }
}
