/* The writing step of a save: what is this rank's, its layout, files and records. */
#include <stdio.h>
#include <string.h>

#include "engine/save/device_items.h"
#include "engine/save/write_records.h"

/* ---- files ---- */

static dcp_status create_files(dcp_save_session *s, size_t n, dcp_file **files, size_t *n_open, dcp_error *err)
{
    dcp_status status = DCP_OK;
    char name[256]; /* a prefix has at most 200 bytes */
    for (size_t i = 0; i < n && status == DCP_OK; i++) {
        if (s->prefix) {
            snprintf(name, sizeof name, "%s%zu.distcp", s->prefix, i);
        } else {
            dcp__data_file_name(s->rank, s->generation, i, name);
        }
        status = dcp__session_create(s, name, &files[i], err);
        *n_open += status == DCP_OK;
    }
    return status;
}

/* Closes in every case; the first error counts. */
static dcp_status close_files(dcp_save_session *s, dcp_file **files, size_t n, bool sync, dcp_error *err)
{
    dcp_status status = DCP_OK;
    double start = dcp__now();
    for (size_t i = 0; i < n; i++) {
        dcp_error *first = status == DCP_OK ? err : NULL;
        dcp_status synced = sync && status == DCP_OK ? dcp__session_sync(s, files[i], first) : DCP_OK;
        dcp_status closed = s->storage->ops->close(files[i], synced == DCP_OK ? first : NULL);
        status = status != DCP_OK ? status : synced != DCP_OK ? synced : closed;
    }
    s->report.sync_seconds += dcp__now() - start;
    return status;
}

static dcp_status write_to_files(dcp_save_session *s, dcp__layout *l, dcp_error *err)
{
    size_t n_open = 0;
    dcp_file **files = dcp__calloc(s->ctx, l->n_files, sizeof(dcp_file *));
    if (!files) {
        return dcp__nomem(err);
    }
    dcp_status status = create_files(s, l->n_files, files, &n_open, err);
    if (status == DCP_OK) {
        status = s->opts.transform ? dcp__write_transformed(s, l, files, s->digests, err)
                                   : dcp__write_records(s, l, files, s->digests, err);
    }
    dcp_status closed = close_files(s, files, n_open, status == DCP_OK && !s->opts.no_sync, status == DCP_OK ? err : NULL);
    dcp__free(s->ctx, files);
    return status == DCP_OK ? closed : status;
}

/* ---- what this rank writes ---- */

/* The items that this rank is to write, as a plan of their own; from[i] is the position of item i in the whole plan. */
typedef struct share {
    dcp_save_plan plan; /* borrows all but the array of items */
    uint32_t *from;
    dcp__device_items devices;
} share;

/* writes: of each item; NULL: all. */
static dcp_status take_share(dcp_save_session *s, const dcp_save_plan *plan, const bool *writes, share *out, dcp_error *err)
{
    *out = (share){.plan = {.ctx = s->ctx}};
    out->plan.items = dcp__alloc(s->ctx, plan->n * sizeof *out->plan.items);
    out->from = dcp__alloc(s->ctx, plan->n * sizeof *out->from);
    if (!out->plan.items || !out->from) {
        return dcp__nomem(err);
    }
    for (size_t i = 0; i < plan->n; i++) {
        if (!writes || writes[i]) {
            out->from[out->plan.n] = (uint32_t)i;
            out->plan.items[out->plan.n++] = plan->items[i];
        }
    }
    dcp_status status = dcp__lent_ask(s->ctx, s->opts.lending, out->plan.items, out->plan.n, &s->lent, err);
    return status == DCP_OK
               ? dcp__device_items_attach(s->ctx, &s->opts, &s->transfer, out->plan.items, out->plan.n, &out->devices, err)
               : status;
}

static void share_reset(dcp_save_session *s, share *part)
{
    dcp__free(s->ctx, part->plan.items);
    dcp__free(s->ctx, part->from);
    dcp__lent_reset(s->ctx, &s->lent);
    dcp__device_items_reset(&part->devices);
}

/* ---- what became of it ---- */

static void note_places(dcp_save_session *s, const share *part, const dcp__layout *l)
{
    for (size_t i = 0; i < part->plan.n; i++) {
        const dcp__record *r = &l->records[l->record_of_item[i]];
        /* In a blob all tensors have its start as offset, as PyTorch writes it (formats.md 8.5). */
        s->placed[part->from[i]] = (dcp__placed){.offset = r->archive ? r->offset : l->files[r->file].blob_offset,
                                                 .length = r->length,
                                                 .file = r->file,
                                                 .is_transformed = r->archive && s->opts.transform};
    }
    for (size_t i = 0; i < l->n_files; i++) {
        const dcp__layout_file *f = &l->files[i];
        bool has_digests = f->n && f->blob_header_bytes == 0;
        s->facts[i] = has_digests ? (dcp__file_facts){&s->digests[f->first], f->n} : (dcp__file_facts){NULL, 0};
    }
    s->n_files = l->n_files;
}

static void report_layout(dcp_save_session *s, const share *part, const dcp__layout *l)
{
    s->report.n_items = part->plan.n;
    s->report.n_records = l->n_records;
    s->report.n_tied = part->plan.n - l->n_records;
    s->report.n_files = l->n_files;
    s->report.payload_bytes = l->payload_bytes;
    for (size_t i = 0; i < l->n_records; i++) {
        s->report.bytes += l->records[i].length;
    }
    for (size_t i = 0; i < l->n_files; i++) {
        s->report.bytes += l->files[i].blob_header_bytes;
    }
}

static dcp_status write_share(dcp_save_session *s, share *part, size_t n_items, dcp_error *err)
{
    double start = dcp__now();
    dcp__layout l;
    dcp__layout_opts opts = {.files = s->opts.files ? s->opts.files : 1,
                             .file_per_item = s->opts.file_per_item,
                             .align_payloads = s->opts.align_payloads,
                             .is_safetensors = s->opts.serialization == DCP_SERIALIZE_SAFETENSORS};
    dcp_status status = dcp__layout_make(&part->plan, &opts, &l, err);
    if (status == DCP_OK) {
        s->payload_bytes = l.payload_bytes;
        s->placed = dcp__calloc(s->ctx, n_items, sizeof *s->placed);
        s->digests = dcp__calloc(s->ctx, l.n_records, sizeof *s->digests);
        s->facts = dcp__calloc(s->ctx, l.n_files, sizeof *s->facts);
        status = s->placed && s->digests && s->facts ? DCP_OK : dcp__nomem(err);
        status = status == DCP_OK ? dcp__lent_find(&s->lent, &l, part->plan.n, err) : status;
        status = status == DCP_OK ? dcp__device_items_fetch(&l, &part->devices, err) : status;
    }
    s->report.plan_seconds += dcp__now() - start;
    dcp__gate_enter(s->gate);
    start = dcp__now();
    status = status == DCP_OK ? write_to_files(s, &l, err) : status;
    s->report.write_seconds = dcp__now() - start - s->report.sync_seconds;
    dcp__gate_leave(s->gate);
    if (status == DCP_OK) {
        note_places(s, part, &l);
        report_layout(s, part, &l);
    }
    dcp__layout_reset(&l);
    return status;
}

static dcp_status write_items(dcp_save_session *s, const dcp_save_plan *plan, const bool *writes, dcp_error *err)
{
    share part;
    dcp_status status = take_share(s, plan, writes, &part, err);
    status = status == DCP_OK ? write_share(s, &part, plan->n, err) : status;
    share_reset(s, &part);
    return status;
}

dcp_status dcp__write_whole_plan(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    return write_items(s, plan, NULL, err);
}

/* ---- the steps ---- */

bool dcp_save_writes(const dcp_save_session *s, size_t i)
{
    return s && s->group.local && i < s->plan->n && s->group.local->writes[i];
}

dcp_status dcp_plan_save_global(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    if (!s || !plan) {
        return dcp__fail(err, DCP_ARG, "save: no %s", s ? "plan" : "session");
    }
    if (s->plan || s->is_foreign) {
        return dcp__fail(err, DCP_STATE, "%s: this session %s", s->path,
                         s->plan ? "has a plan already" : "is for ranks that plan by other means");
    }
    double start = dcp__now();
    s->plan = plan;
    dcp_status status = dcp__session_plan(s, err);
    s->report.plan_seconds += dcp__now() - start;
    return status == DCP_OK ? status : dcp__prefix(err, status, "%s: ", s->path);
}

/* Collective. max_writers of the options: ranks whose turn it is not wait in the agreement that ends each turn. Neighbours, which
 * share a machine more often than not, have different turns. A rank that fails ends the save for those whose turn has not come.
 */
static dcp_status write_in_turns(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    int most = s->opts.max_writers, ranks = dcp__step_size(&s->step);
    int turns = most > 0 ? (ranks - 1) / most + 1 : 1;
    dcp_status status = DCP_OK;
    for (int turn = 0; turn < turns && status == DCP_OK; turn++) {
        bool is_mine = dcp__step_rank(&s->step) % turns == turn;
        status = dcp__agree(&s->step, is_mine ? write_items(s, plan, s->group.local->writes, err) : DCP_OK, err);
    }
    return status;
}

dcp_status dcp_save_write(dcp_save_session *s, const dcp_save_plan *plan, dcp_error *err)
{
    if (!s || !plan) {
        return dcp__fail(err, DCP_ARG, "save: no %s", s ? "plan" : "session");
    }
    if (s->is_written || (s->plan && s->plan != plan)) {
        return dcp__fail(err, DCP_STATE, "%s: this session has %s already", s->path, s->is_written ? "been written" : "a plan");
    }
    s->is_written = true;
    dcp_status status = s->plan ? DCP_OK : dcp_plan_save_global(s, plan, err);
    bool has_others = s->step.comm && s->world > 1;
    if (status != DCP_OK) { /* the others know of it too, and write nothing, unless the connection is lost */
        s->others_may_have_files = has_others && dcp_comm_is_broken(s->step.comm);
        return status;
    }
    s->others_may_have_files = has_others;
    s->step.phase = "write";
    status = write_in_turns(s, plan, err);
    if (status == DCP_OK) {
        return DCP_OK;
    }
    dcp__session_take_back(s);
    return dcp__prefix(err, status, "%s: ", s->path);
}
