/* Verification: the way through it, and how defects are reported. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/verify/verify.h"

/* Progress is told after so many bytes. */
#define TELL_BYTES ((uint64_t)16 << 20)

/* ---- reporting ---- */

static void report(dcp__verify *v, int64_t file, dcp_str fqn, dcp_status code, uint64_t offset, const char *message)
{
    dcp_defect d = {.code = code, .fqn = fqn, .offset = offset, .message = message};
    d.file = file >= 0 ? v->ck->meta->files[file].ptr : NULL;
    pthread_mutex_lock(&v->lock);
    v->report.n_defects++;
    if (v->opts.defect) {
        v->opts.defect(v->opts.user, &d);
    }
    pthread_mutex_unlock(&v->lock);
}

void dcp__verify_defect(dcp__verify *v, int64_t file, dcp_str fqn, dcp_status code, uint64_t offset, const char *fmt, ...)
{
    char message[DCP_ERROR_MESSAGE_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    report(v, file, fqn, code, offset, message);
}

static dcp_status defect_code(dcp_status code)
{
    switch (code) {
    case DCP_CHECKSUM:
    case DCP_NOT_FOUND:
    case DCP_IO:
    case DCP_LIMIT:
    case DCP_UNSUPPORTED: return code;
    case DCP_NOSPACE: return DCP_IO; /* of a temporary file */
    default: return DCP_FORMAT;
    }
}

dcp_status dcp__verify_note(dcp__verify *v, int64_t file, dcp_str fqn, uint64_t base, const dcp_error *fault, dcp_error *err)
{
    if (fault->code == DCP_NOMEM || fault->code == DCP_CANCELED) {
        if (err) {
            *err = *fault;
        }
        return fault->code;
    }
    uint64_t offset = fault->offset == DCP_NO_OFFSET ? base : base == DCP_NO_OFFSET ? fault->offset : base + fault->offset;
    report(v, file, fqn, defect_code(fault->code), offset, fault->message);
    return DCP_OK;
}

dcp_status dcp__verify_advance(dcp__verify *v, uint64_t bytes, dcp_error *err)
{
    pthread_mutex_lock(&v->lock);
    v->done += bytes;
    if (v->opts.progress && !v->is_canceled && (v->done - v->told >= TELL_BYTES || v->done >= v->total)) {
        v->told = v->done;
        v->is_canceled = !v->opts.progress(v->opts.user, v->done, v->total > v->done ? v->total : v->done);
    }
    bool is_canceled = v->is_canceled;
    pthread_mutex_unlock(&v->lock);
    return is_canceled ? dcp__fail(err, DCP_CANCELED, "stopped by the caller") : DCP_OK;
}

dcp_str dcp__verify_fqn(const dcp__verify *v, const dcp__verify_record *r)
{
    for (size_t i = r->first; i < r->end; i++) {
        uint32_t s = v->ranges->order[i];
        if (v->first_use[s] < v->first_use[s + 1]) {
            return v->ck->meta->entries[v->uses[v->first_use[s]].entry].item.fqn;
        }
    }
    return (dcp_str){NULL, 0};
}

/* ---- who reads what ---- */

typedef void (*use_fn)(dcp__verify *v, uint32_t storage, dcp__use use);

static void count_use(dcp__verify *v, uint32_t storage, dcp__use use)
{
    (void)use;
    v->first_use[storage + 1]++;
}

static void place_use(dcp__verify *v, uint32_t storage, dcp__use use)
{
    v->uses[v->first_use[storage]++] = use;
}

static void each_use(dcp__verify *v, use_fn fn)
{
    const dcp__metadata *m = v->ck->meta;
    for (uint32_t i = 0; i < m->n_entries; i++) {
        const dcp__entry *e = &m->entries[i];
        if (e->item.kind == DCP_ITEM_OBJECT && e->storage != DCP__NO_STORAGE) {
            fn(v, e->storage, (dcp__use){i, DCP__NO_STORAGE});
        }
        for (size_t c = e->first_chunk; e->item.kind == DCP_ITEM_TENSOR && c < e->first_chunk + e->item.n_chunks; c++) {
            if (m->chunks[c].storage != DCP__NO_STORAGE) {
                fn(v, m->chunks[c].storage, (dcp__use){i, (uint32_t)c});
            }
        }
    }
}

static dcp_status collect_uses(dcp__verify *v, dcp_error *err)
{
    const dcp__metadata *m = v->ck->meta;
    v->first_use = dcp__calloc(v->ck->ctx, m->n_storages + 1, sizeof *v->first_use);
    if (!v->first_use) {
        return dcp__nomem(err);
    }
    each_use(v, count_use);
    for (size_t s = 0; s < m->n_storages; s++) {
        v->first_use[s + 1] += v->first_use[s];
    }
    v->uses = dcp__calloc(v->ck->ctx, v->first_use[m->n_storages], sizeof *v->uses);
    if (!v->uses) {
        return dcp__nomem(err);
    }
    each_use(v, place_use); /* moves each start to the next one's */
    memmove(v->first_use + 1, v->first_use, m->n_storages * sizeof *v->first_use);
    v->first_use[0] = 0;
    return DCP_OK;
}

/* ---- the way through ---- */

static dcp_status verify_all(dcp__verify *v, dcp_error *err)
{
    if (v->ck->is_recovered) {
        dcp__verify_defect(v, -1, (dcp_str){NULL, 0}, DCP_FORMAT, DCP_NO_OFFSET,
                           ".metadata is in pieces, .metadata.tmp is used instead");
    }
    dcp_status status = dcp__get_ranges(v->ck, &v->ranges, err);
    status = status == DCP_OK ? collect_uses(v, err) : status;
    status = status == DCP_OK ? dcp__verify_entries(v, err) : status;
    status = status == DCP_OK ? dcp__verify_files(v, err) : status;
    if (status == DCP_OK && !v->opts.quick) {
        status = dcp__verify_payload(v, err);
    }
    return status;
}

static dcp_status check_args(const dcp_checkpoint *ck, const dcp_verify_opts *opts, const dcp_verify_report *report_out,
                             dcp_error *err)
{
    if (!ck) {
        return dcp__fail(err, DCP_ARG, "verify: no checkpoint");
    }
    if (opts && opts->struct_size != sizeof *opts) {
        return dcp__fail(err, DCP_ARG, "verify options: struct_size %zu, expected %zu", opts->struct_size, sizeof *opts);
    }
    if (report_out && report_out->struct_size != sizeof *report_out) {
        return dcp__fail(err, DCP_ARG, "verify report: struct_size %zu, expected %zu", report_out->struct_size,
                         sizeof *report_out);
    }
    return DCP_OK;
}

dcp_status dcp_verify(dcp_checkpoint *ck, const dcp_verify_opts *opts, dcp_verify_report *report_out, dcp_error *err)
{
    dcp_status status = check_args(ck, opts, report_out, err);
    if (status != DCP_OK) {
        return status;
    }
    dcp__verify v = {.ck = ck, .opts = DCP_VERIFY_OPTS_INIT, .report = DCP_VERIFY_REPORT_INIT};
    v.opts = opts ? *opts : v.opts;
    v.report.n_files = ck->meta->n_files;
    pthread_mutex_init(&v.lock, NULL);
    status = verify_all(&v, err);
    v.report.bytes = v.done;
    pthread_mutex_destroy(&v.lock);
    dcp__free(ck->ctx, v.first_use);
    dcp__free(ck->ctx, v.uses);
    dcp__free(ck->ctx, v.records);
    if (status != DCP_OK) {
        return dcp__prefix(err, status, "%s: ", ck->path);
    }
    if (report_out) {
        *report_out = v.report;
    }
    return DCP_OK;
}
