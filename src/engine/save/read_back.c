/* What a save has written, read back before it is published. */
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/pool.h"
#include "engine/read/checkpoint.h"
#include "engine/save/session.h"
#include "plan/save_plan.h"

#define BLOCK_BYTES ((size_t)4 << 20)

/* A record of this rank, in order of file and offset. */
typedef struct written {
    uint64_t offset, length;
    uint32_t file;
} written;

typedef struct reading_back {
    dcp_save_session *s;
    written *list;
    size_t n;
    size_t *firsts; /* [file]: its first record in the list */
} reading_back;

static int compare_written(const void *a, const void *b)
{
    const written *x = a, *y = b;
    if (x->file != y->file) {
        return x->file < y->file ? -1 : 1;
    }
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Items may share a record. */
static dcp_status list_records(reading_back *r, dcp_error *err)
{
    const dcp_save_session *s = r->s;
    size_t n = 0, kept = 0;
    r->list = dcp__calloc(s->ctx, s->plan->n, sizeof *r->list);
    r->firsts = dcp__calloc(s->ctx, s->n_files + 1, sizeof *r->firsts);
    if (!r->list || !r->firsts) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < s->plan->n; i++) {
        const dcp__placed *p = &s->placed[i];
        if (dcp_save_writes(s, i) && s->facts[p->file].records) {
            r->list[n++] = (written){p->offset, p->length, p->file};
        }
    }
    if (n) {
        qsort(r->list, n, sizeof *r->list, compare_written);
    }
    for (size_t i = 0; i < n; i++) {
        bool is_new = kept == 0 || compare_written(&r->list[kept - 1], &r->list[i]) != 0;
        if (is_new) {
            r->list[kept++] = r->list[i];
            r->firsts[r->list[i].file + 1] = kept;
        }
    }
    r->n = kept;
    return DCP_OK;
}

static dcp_status hash_range(dcp_file *f, const written *w, uint8_t *buf, dcp__hasher *hasher, dcp_error *err)
{
    dcp_status status = DCP_OK;
    dcp__hasher_init(hasher);
    for (uint64_t done = 0; done < w->length && status == DCP_OK;) {
        size_t n = w->length - done < BLOCK_BYTES ? (size_t)(w->length - done) : BLOCK_BYTES;
        status = dcp__read_exact(f, buf, n, w->offset + done, err);
        if (status == DCP_OK) {
            dcp__hasher_update(hasher, buf, n);
        }
        done += n;
    }
    return status;
}

static dcp_status check_record(const reading_back *r, size_t i, dcp_file *f, uint8_t *buf, dcp__hasher *hasher, dcp_error *err)
{
    const written *w = &r->list[i];
    const dcp__file_facts *facts = &r->s->facts[w->file];
    size_t position = i - (w->file ? r->firsts[w->file] : 0);
    dcp_status status = hash_range(f, w, buf, hasher, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__digest digest = dcp__hasher_digest(hasher);
    if (position >= facts->n_records || memcmp(&facts->records[position], &digest, sizeof digest) != 0) {
        return dcp__fail_at(err, DCP_CHECKSUM, w->offset, "the record at %llu is not what was written",
                            (unsigned long long)w->offset);
    }
    return DCP_OK;
}

static dcp_status check_one(void *arg, size_t i, int worker, dcp_error *err)
{
    const reading_back *r = arg;
    dcp_context *ctx = r->s->ctx;
    char name[64];
    dcp_file *f;
    (void)worker;
    dcp__data_file_name(r->s->rank, r->s->generation, r->list[i].file, name);
    uint8_t *buf = dcp__alloc_aligned(ctx, 4096, BLOCK_BYTES);
    dcp__hasher *hasher = dcp__alloc_aligned(ctx, 64, dcp__hasher_bytes());
    dcp_status status = buf && hasher ? dcp__session_open(r->s, name, DCP_OPEN_READ, &f, err) : dcp__nomem(err);
    if (status == DCP_OK) {
        status = check_record(r, i, f, buf, hasher, err);
        f->storage->ops->close(f, NULL);
    }
    dcp__free_aligned(ctx, buf);
    dcp__free_aligned(ctx, hasher);
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", name);
}

dcp_status dcp__session_read_back(dcp_save_session *s, dcp_error *err)
{
    reading_back r = {.s = s};
    dcp_status status = list_records(&r, err);
    for (size_t i = 1; status == DCP_OK && i <= s->n_files; i++) {
        r.firsts[i] = r.firsts[i] ? r.firsts[i] : r.firsts[i - 1]; /* a file without records */
    }
    if (status == DCP_OK) {
        status = dcp__parallel(r.n, dcp__affordable_threads(s->ctx, BLOCK_BYTES), check_one, &r, err);
    }
    dcp__free(s->ctx, r.list);
    dcp__free(s->ctx, r.firsts);
    s->step.phase = "check";
    status = dcp__agree(&s->step, status, err);
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", s->path);
}
