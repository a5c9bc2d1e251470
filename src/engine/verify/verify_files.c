/* Are the files there and long enough, and do the ranges that the metadata names leave each other alone? */
#include "engine/verify/verify.h"

static const dcp__storage *storage_at(const dcp__verify *v, size_t i)
{
    return &v->ck->meta->storages[v->ranges->order[i]];
}

/* The end of the run of storages that name the same range as number i. */
static size_t end_of_range(const dcp__verify *v, size_t i, size_t end)
{
    const dcp__storage *s = storage_at(v, i);
    size_t next = i + 1;
    while (next < end && storage_at(v, next)->offset == s->offset && storage_at(v, next)->length == s->length) {
        next++;
    }
    return next;
}

static dcp_status fail_file(dcp__verify *v, uint32_t file, const dcp_error *fault, dcp_error *err)
{
    size_t first = v->ranges->first[file], end = v->ranges->first[file + 1];
    dcp__verify_record r = {.first = first, .end = end};
    if (fault->code == DCP_NOT_FOUND) {
        dcp__verify_defect(v, file, dcp__verify_fqn(v, &r), DCP_NOT_FOUND, DCP_NO_OFFSET, "the file with %zu record%s is missing",
                           end - first, dcp__plural(end - first));
        return DCP_OK;
    }
    return dcp__verify_note(v, file, dcp__verify_fqn(v, &r), DCP_NO_OFFSET, fault, err);
}

/* Digests count as given only if there is one for each range. */
static const dcp__digest *digests_of(dcp__verify *v, uint32_t file, size_t n_ranges)
{
    const dcp__own_facts *own = &v->ck->meta->own;
    if (!own->present || !own->records || !own->records[file]) {
        return NULL;
    }
    if (own->n_records[file] != n_ranges) {
        dcp__verify_defect(v, file, (dcp_str){NULL, 0}, DCP_FORMAT, DCP_NO_OFFSET, "%zu digests for %zu records",
                           own->n_records[file], n_ranges);
        return NULL;
    }
    v->report.has_digests = true;
    return own->records[file];
}

static size_t count_ranges(const dcp__verify *v, uint32_t file)
{
    size_t n = 0, end = v->ranges->first[file + 1];
    for (size_t i = v->ranges->first[file]; i < end; i = end_of_range(v, i, end)) {
        n++;
    }
    return n;
}

/* The tensors of a safetensors blob all name its start, so their ranges meet without harm. */
static dcp_status is_blob(dcp__verify *v, const dcp__verify_record *r, bool *out, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes, offset;
    dcp__sniff sniff;
    dcp_status status = dcp__file_acquire(v->ck, r->file, &f, &bytes, err);
    if (status == DCP_OK) {
        status = dcp__sniff_storage(f, bytes, &v->ck->meta->storages[r->storage], &offset, &sniff, err);
        dcp__file_release(v->ck, r->file);
        *out = status == DCP_OK && sniff == DCP__IS_SAFETENSORS;
    }
    return status == DCP_NOMEM ? status : DCP_OK; /* what cannot be read is found again with the payload */
}

static dcp_status check_overlap(dcp__verify *v, const dcp__verify_record *before, const dcp__verify_record *r, dcp_error *err)
{
    bool blob = false;
    dcp_status status = is_blob(v, before, &blob, err);
    status = status == DCP_OK && !blob ? is_blob(v, r, &blob, err) : status;
    if (status == DCP_OK && !blob) {
        dcp__printable other = dcp__print(dcp__verify_fqn(v, before));
        dcp__verify_defect(v, r->file, dcp__verify_fqn(v, r), DCP_FORMAT, r->offset,
                           "its record of %llu bytes overlaps the one of item \"%s\", %llu bytes at %llu",
                           (unsigned long long)r->length, other.text, (unsigned long long)before->length,
                           (unsigned long long)before->offset);
    }
    return status;
}

/* Ranges that overlap without end would have the file read without end. They are told; only the first few are looked into. */
#define MAX_TIMES_READ 8

/* Adds the ranges of one file that lie within it to v->records. */
static dcp_status check_ranges(dcp__verify *v, uint32_t file, uint64_t bytes, dcp_error *err)
{
    const dcp__digest *digests = digests_of(v, file, count_ranges(v, file));
    dcp__verify_record reach = {0}; /* the range that ends last so far */
    dcp_status status = DCP_OK;
    uint64_t to_read = 0;
    size_t end = v->ranges->first[file + 1], number = 0;
    for (size_t i = v->ranges->first[file]; i < end && status == DCP_OK; i = end_of_range(v, i, end), number++) {
        const dcp__storage *s = storage_at(v, i);
        dcp__verify_record r = {file,
                                v->ranges->order[i],
                                i,
                                end_of_range(v, i, end),
                                s->offset,
                                s->length,
                                reach.offset + reach.length,
                                digests ? &digests[number] : NULL};
        if (!dcp__range_fits(r.offset, r.length, bytes)) {
            dcp__verify_defect(v, file, dcp__verify_fqn(v, &r), DCP_FORMAT, r.offset,
                               "its record of %llu bytes at %llu exceeds the file's %llu bytes", (unsigned long long)r.length,
                               (unsigned long long)r.offset, (unsigned long long)bytes);
            continue;
        }
        if (r.length && r.gap > r.offset && !v->ck->values) { /* storages of one archive may be views of each other */
            status = check_overlap(v, &reach, &r, err);
        }
        reach = r.length && r.offset + r.length > r.gap ? r : reach;
        if (to_read / MAX_TIMES_READ <= bytes) {
            to_read += r.length;
            v->total += r.length;
            v->records[v->n_records++] = r;
        }
    }
    return status;
}

static dcp_status check_file(dcp__verify *v, uint32_t file, dcp_error *err)
{
    dcp_file *f;
    uint64_t bytes;
    dcp_error fault = DCP_ERROR_INIT;
    if (dcp__file_acquire(v->ck, file, &f, &bytes, &fault) != DCP_OK) {
        return fail_file(v, file, &fault, err);
    }
    dcp_status status = check_ranges(v, file, bytes, err);
    dcp__file_release(v->ck, file);
    return status;
}

dcp_status dcp__verify_files(dcp__verify *v, dcp_error *err)
{
    const dcp__metadata *m = v->ck->meta;
    v->records = dcp__calloc(v->ck->ctx, m->n_storages, sizeof *v->records);
    if (!v->records) {
        return dcp__nomem(err);
    }
    dcp_status status = DCP_OK;
    for (uint32_t file = 0; file < m->n_files && status == DCP_OK; file++) {
        v->report.n_records += count_ranges(v, file);
        status = check_file(v, file, err);
    }
    return status;
}
