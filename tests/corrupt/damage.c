#include "corrupt/damage.h"

#include <sys/resource.h>

#include "cli/tool.h"

/* What a good and small checkpoint may take as well: buffers of one thread. */
#define OPEN_BYTES (1 << 20)
#define BUFFER_BYTES (48 << 20)
#define PER_FILE_BYTE 64
#define MAX_SECONDS 20

/* ---- memory ---- */

typedef struct block {
    size_t bytes;
    max_align_t data[];
} block;

static void *meter_resize(void *user, void *ptr, size_t bytes)
{
    meter *m = user;
    block *old = ptr ? (block *)((char *)ptr - offsetof(block, data)) : NULL;
    size_t old_bytes = old ? old->bytes : 0;
    if (bytes == 0) {
        free(old);
        __atomic_sub_fetch(&m->live, (int64_t)old_bytes, __ATOMIC_RELAXED);
        return NULL;
    }
    int64_t live = __atomic_add_fetch(&m->live, (int64_t)bytes - (int64_t)old_bytes, __ATOMIC_RELAXED);
    int64_t peak = __atomic_load_n(&m->peak, __ATOMIC_RELAXED);
    while (live > peak && !__atomic_compare_exchange_n(&m->peak, &peak, live, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    block *b = bytes < SIZE_MAX - sizeof *b ? realloc(old, sizeof *b + bytes) : NULL;
    if (!b) {
        __atomic_sub_fetch(&m->live, (int64_t)bytes - (int64_t)old_bytes, __ATOMIC_RELAXED);
        return NULL;
    }
    b->bytes = bytes;
    return b->data;
}

void meter_start(meter *m)
{
    dcp_allocator allocator = {meter_resize, m};
    dcp_context_opts opts = DCP_CONTEXT_OPTS_INIT;
    opts.allocator = &allocator;
    opts.threads = 1;
    *m = (meter){0};
    assert_int_equal(dcp_context_create(&opts, &m->ctx, NULL), DCP_OK);
}

void meter_stop(meter *m)
{
    dcp_context_free(m->ctx);
    assert_int_equal(m->live, 0);
}

/* ---- values ---- */

static dcp_status read_elements(dcp_checkpoint *ck, const dcp_item *item, value *out, dcp_error *err)
{
    if (item->bytes > (64 << 20)) { /* no golden tensor is so large: the file is lying, and must be found out in little memory */
        uint8_t digest[32];
        dcp_status status = dcp_item_sha256(ck, item, digest, err);
        assert_int_not_equal(status, DCP_OK);
        return status;
    }
    out->bytes = calloc(1, item->bytes + 1);
    assert_non_null(out->bytes);
    out->n = item->bytes;
    dcp_tensor dst = dcp_tensor_make(item->dtype, item->ndim, item->extents, out->bytes);
    return dcp_read(ck, item, NULL, &dst, err);
}

static dcp_status read_repr(dcp_context *ctx, dcp_checkpoint *ck, const dcp_item *item, value *out, dcp_error *err)
{
    dcp_value *v;
    char *text = NULL;
    dcp_status status = dcp_read_object(ck, item, &v, err);
    if (status == DCP_OK) {
        status = dcp_value_repr(v, 0, &text, &out->n, err);
        dcp_value_free(v);
    }
    if (status == DCP_OK) {
        out->bytes = malloc(out->n + 1);
        assert_non_null(out->bytes);
        memcpy(out->bytes, text, out->n + 1);
        dcp_text_free(ctx, text);
    }
    return status;
}

dcp_status value_read(dcp_context *ctx, dcp_checkpoint *ck, const dcp_item *item, value *out, dcp_error *err)
{
    *out = (value){.rank = item->rank, .ndim = item->ndim};
    bool is_tensor = item->kind == DCP_ITEM_TENSOR;
    dcp_status status = is_tensor ? read_elements(ck, item, out, err) : read_repr(ctx, ck, item, out, err);
    if (status != DCP_OK) {
        free(out->bytes);
        return status;
    }
    out->dtype = is_tensor ? item->dtype : (dcp_dtype)0;
    for (int d = 0; d < item->ndim; d++) {
        out->extents[d] = item->extents[d];
    }
    out->fqn = malloc(item->fqn.len + 1);
    assert_non_null(out->fqn);
    memcpy(out->fqn, item->fqn.ptr, item->fqn.len + 1);
    return DCP_OK;
}

void value_free(value *v)
{
    free(v->fqn);
    free(v->bytes);
}

bool value_equal(const value *a, const value *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim && a->n == b->n && memcmp(a->bytes, b->bytes, a->n) == 0 &&
           memcmp(a->extents, b->extents, (size_t)a->ndim * sizeof *a->extents) == 0;
}

values values_of(dcp_storage *st, const char *path)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    opts.storage = st;
    if (dcp_checkpoint_open(NULL, path, &opts, &ck, &err) != DCP_OK) {
        fail_msg("the good checkpoint: %s", err.message);
    }
    values v = {calloc(dcp_checkpoint_count(ck) + 1, sizeof(value)), dcp_checkpoint_count(ck)};
    assert_non_null(v.list);
    for (size_t i = 0; i < v.n; i++) {
        if (value_read(NULL, ck, dcp_checkpoint_item(ck, i), &v.list[i], &err) != DCP_OK) {
            fail_msg("the good checkpoint: %s", err.message);
        }
    }
    dcp_checkpoint_close(ck);
    return v;
}

void values_free(values *v)
{
    for (size_t i = 0; i < v->n; i++) {
        value_free(&v->list[i]);
    }
    free(v->list);
}

const value *values_find(const values *v, const char *fqn, int rank)
{
    for (size_t i = 0; i < v->n; i++) {
        if (strcmp(v->list[i].fqn, fqn) == 0 && v->list[i].rank == rank) {
            return &v->list[i];
        }
    }
    return NULL;
}

/* ---- places ---- */

void place_make(place *p)
{
    assert_true(temp_dir_make(&p->dir));
    assert_int_equal(dcp_storage_posix(NULL, p->dir.path, &p->st, NULL), DCP_OK);
}

void place_remove(place *p)
{
    dcp_storage_free(p->st);
    temp_dir_remove(&p->dir);
}

typedef struct walk {
    dcp_storage *st;
    const char *dir;
    uint64_t bytes;
} walk;

static dcp_status add_bytes(void *user, const char *name, dcp_entry_type type)
{
    walk *w = user;
    char path[1024];
    dcp_stat s;
    snprintf(path, sizeof path, "%s%s%s", w->dir, *w->dir ? "/" : "", name);
    if (type == DCP_ENTRY_DIR) {
        walk below = {w->st, path, 0};
        w->st->ops->list(w->st, path, add_bytes, &below, NULL);
        w->bytes += below.bytes;
    } else if (w->st->ops->stat(w->st, path, &s, NULL) == DCP_OK) {
        w->bytes += s.bytes;
    }
    return DCP_OK;
}

uint64_t place_bytes(const place *p)
{
    walk w = {p->st, "", 0};
    assert_int_equal(p->st->ops->list(p->st, "", add_bytes, &w, NULL), DCP_OK);
    return w.bytes;
}

/* ---- the library ---- */

typedef struct check {
    const place *p;
    const char *name, *path; /* of the defect; of the checkpoint */
    const values *before;
    const outcome *want;
    uint64_t bytes; /* of all files */
    meter m;
} check;

/* Failures are counted, so that one run tells all. */
static size_t failures;

static void complain(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void complain(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vprint_error(fmt, args);
    va_end(args);
    print_error("\n");
    failures++;
}

void assert_no_failures(void)
{
    size_t n = failures;
    failures = 0;
    assert_int_equal(n, 0);
}

static void complain_error(const check *c, const char *step, const dcp_error *err, const char *why)
{
    complain("%s: %s: %s; got %s at %llu: %s", c->name, step, why, dcp_status_name(err->code), (unsigned long long)err->offset,
             err->message);
}

/* Is name one of "a,b,c"? */
static bool is_listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, name, n) == 0 && (at[n] == ',' || !at[n])) {
            return true;
        }
    }
    return false;
}

/* Is one of "a,b,c" in the text? */
static bool names_one(const char *text, const char *list)
{
    char name[256];
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        snprintf(name, sizeof name, "%.*s", (int)strcspn(at, ","), at);
        if (strstr(text, name)) {
            return true;
        }
    }
    return false;
}

static void check_error(const check *c, const char *step, dcp_status status, dcp_status want, bool is_read, const dcp_error *err)
{
    const outcome *o = c->want;
    uint64_t at = is_read ? o->read_at : o->at;
    if (status != want || (want != DCP_OK && err->code != want)) {
        complain_error(c, step, err, dcp_status_name(want));
        return;
    }
    if (want == DCP_OK) {
        return;
    }
    if (strchr(err->message, '\n')) {
        complain_error(c, step, err, "more than one line");
    }
    if (o->file && !(is_read && o->is_shape) && !strstr(err->message, o->file)) {
        complain_error(c, step, err, "the file is not named");
    }
    if (is_read && !strstr(err->message, step)) {
        complain_error(c, step, err, "the item is not named");
    }
    if (at == ANY_OFFSET ? err->offset == DCP_NO_OFFSET : err->offset != at) {
        complain_error(c, step, err, "another offset");
    }
}

static void check_memory(const check *c, const char *step, int64_t fixed)
{
    if (c->m.peak > (int64_t)(PER_FILE_BYTE * c->bytes) + fixed) {
        complain("%s: %s: %lld bytes of memory for %llu of files", c->name, step, (long long)c->m.peak,
                 (unsigned long long)c->bytes);
    }
}

static bool is_concerned(const check *c, const dcp_item *item)
{
    return c->want->read != DCP_OK && (!c->want->item || is_listed(c->want->item, item->fqn.ptr));
}

static void check_items(const check *c, dcp_checkpoint *ck)
{
    size_t n_concerned = 0;
    for (size_t i = 0; i < dcp_checkpoint_count(ck); i++) {
        const dcp_item *item = dcp_checkpoint_item(ck, i);
        dcp_error err = DCP_ERROR_INIT;
        value v;
        dcp_status status = value_read(c->m.ctx, ck, item, &v, &err);
        bool concerned = is_concerned(c, item);
        n_concerned += concerned;
        check_error(c, item->fqn.ptr, status, concerned ? c->want->read : DCP_OK, true, &err);
        const value *old = values_find(c->before, item->fqn.ptr, item->rank);
        bool is_changed = c->want->item && is_listed(c->want->item, item->fqn.ptr);
        if (status == DCP_OK && old && !is_changed && !value_equal(&v, old)) {
            complain("%s: %s has another value", c->name, item->fqn.ptr);
        }
        if (status == DCP_OK) {
            value_free(&v);
        }
    }
    if (c->want->read != DCP_OK && n_concerned == 0) {
        complain("%s: no item %s", c->name, c->want->item);
    }
}

typedef struct finding {
    const outcome *want;
    size_t n, matching;
    char last[512];
} finding;

static void note(void *user, const dcp_defect *d)
{
    finding *f = user;
    const outcome *o = f->want;
    f->n++;
    bool is_file = o->file ? d->file && strcmp(d->file, o->file) == 0 : true;
    bool is_item = o->item ? d->fqn.ptr && is_listed(o->item, d->fqn.ptr) : true;
    bool is_at = o->at == ANY_OFFSET ? d->offset != DCP_NO_OFFSET : d->offset == o->at;
    f->matching += d->code == o->verify && is_file && is_item && is_at;
    snprintf(f->last, sizeof f->last, "%s, file %s, item %s, at %llu: %.300s", dcp_status_name(d->code), d->file ? d->file : "-",
             d->fqn.ptr ? d->fqn.ptr : "-", (unsigned long long)d->offset, d->message);
}

static void check_verify(const check *c, dcp_checkpoint *ck, bool quick)
{
    finding f = {.want = c->want};
    dcp_verify_opts opts = DCP_VERIFY_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.quick = quick;
    opts.defect = note;
    opts.user = &f;
    check_error(c, "verify", dcp_verify(ck, &opts, &report, &err), DCP_OK, false, &err);
    assert_int_equal(report.n_defects, f.n);
    bool is_expected = c->want->verify != DCP_OK && (!quick || c->want->is_quick);
    if (is_expected ? f.matching == 0 : f.n != 0) {
        complain("%s: %s: wanted %s in %s, %s, at %llu; %zu defects, the last %s", c->name, quick ? "verify --quick" : "verify",
                 is_expected ? dcp_status_name(c->want->verify) : "none", c->want->file ? c->want->file : "-",
                 c->want->item ? c->want->item : "-", (unsigned long long)c->want->at, f.n, f.n ? f.last : "-");
    }
}

static void check_library(check *c)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck = NULL;
    opts.check_crc = true;
    opts.allow_outside = c->want->allows_outside;
    meter_start(&c->m);
    dcp_status status = dcp_checkpoint_open(c->m.ctx, c->path, &opts, &ck, &err);
    check_error(c, "open", status, c->want->open, false, &err);
    check_memory(c, "open", OPEN_BYTES);
    if (status == DCP_OK) {
        check_items(c, ck);
        check_verify(c, ck, true);
        check_verify(c, ck, false);
        check_memory(c, "reading", BUFFER_BYTES);
        dcp_checkpoint_close(ck);
    }
    meter_stop(&c->m);
}

/* ---- the tool ---- */

/* Exit status, that a failure names file and item on either output, and that what must not look whole is empty. */
static void check_tool(const check *c, bool fails, bool is_verify, const char *arguments)
{
    const outcome *o = c->want;
    tool_run r = tool("%s%s", arguments, o->allows_outside ? " --allow-outside" : "");
    const char *told = is_verify && r.out_len ? r.out : r.err; /* what is not there at all is no defect but a failure */
    const char *why = NULL;
    if (r.status != fails) {
        why = "exit status";
    } else if (fails && o->file && (is_verify || !o->is_shape) && !strstr(told, o->file)) {
        why = "the file is not named";
    } else if (fails && o->open == DCP_OK && o->item && strncmp(arguments, "info", 4) != 0 && !names_one(told, o->item)) {
        why = "the item is not named";
    } else if (fails && !is_verify && r.out_len) {
        why = "something is on standard output";
    } else if (fails && !is_verify && !r.err_len) {
        why = "no reason is told";
    } else if (strstr(r.err, "Sanitizer") || strstr(r.err, "runtime error")) {
        why = "undefined behaviour";
    }
    if (why) {
        complain("%s: dcptool %s: %s; status %d, stdout %.600s, stderr %.1200s", c->name, arguments, why, r.status, r.out, r.err);
    }
    tool_free(&r);
}

/* Each command runs in one of its forms, and the next defect gets the other: a process costs most of the time here. */
static size_t turn;

static void check_commands(const check *c)
{
    static const struct {
        const char *forms[2];
        bool is_verify, is_quick, reads, looks_up_files;
    } commands[] = {
        {{"ls '%s'", "ls --json '%s'"}, false, false, false, false},
        {{"info '%s'", "info --json '%s'"}, false, false, false, true},
        {{"hash '%s'", "hash --json '%s'"}, false, false, true, false},
        {{"verify -q '%s'", "verify --json '%s'"}, true, false, false, false},
        {{"verify --quick '%s'", "verify --quick --json '%s'"}, true, true, false, false},
    };
    const outcome *o = c->want;
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        char arguments[1024];
        bool finds = o->verify != DCP_OK && (!commands[i].is_quick || o->is_quick);
        bool fails = o->open != DCP_OK || (commands[i].looks_up_files && o->breaks_info) ||
                     (commands[i].is_verify ? finds : commands[i].reads && o->read != DCP_OK);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(arguments, sizeof arguments, commands[i].forms[turn % 2], c->path);
#pragma GCC diagnostic pop
        check_tool(c, fails, commands[i].is_verify, arguments);
    }
}

static void check_cat(const check *c)
{
    static const char *const of_objects[] = {"", "--json"};
    static const char *const of_tensors[] = {"", "--format raw", "--json", "--format json"};
    const outcome *o = c->want;
    if (!o->item || strchr(o->item, ',') || o->open != DCP_OK) {
        return;
    }
    char arguments[1024];
    const value *v = values_find(c->before, o->item, -1);
    bool is_object = v && v->dtype == 0;
    snprintf(arguments, sizeof arguments, "cat '%s' '%s' %s", c->path, o->item,
             is_object ? of_objects[turn % 2] : of_tensors[turn % 4]);
    check_tool(c, o->read != DCP_OK, false, arguments);
    if (!is_object) { /* as somebody piping it to NumPy */
        snprintf(arguments, sizeof arguments, "cat '%s' '%s' --format npy --as-bits", c->path, o->item);
        check_tool(c, o->read != DCP_OK, false, arguments);
    }
}

/* Of this process and its children: other programs on the machine do not count. */
static double cpu_seconds(void)
{
    struct rusage self, children;
    getrusage(RUSAGE_SELF, &self);
    getrusage(RUSAGE_CHILDREN, &children);
    return (double)(self.ru_utime.tv_sec + self.ru_stime.tv_sec + children.ru_utime.tv_sec + children.ru_stime.tv_sec) +
           (double)(self.ru_utime.tv_usec + self.ru_stime.tv_usec + children.ru_utime.tv_usec + children.ru_stime.tv_usec) * 1e-6;
}

void check_outcome(const place *p, const char *path, const values *before, const char *name, const outcome *want)
{
    char full[1024];
    check c = {.p = p, .name = name, .path = p->dir.path, .before = before, .want = want, .bytes = place_bytes(p)};
    if (*path) {
        snprintf(full, sizeof full, "%s/%s", p->dir.path, path);
        c.path = full;
    }
    double start = cpu_seconds();
    size_t failed = failures;
    check_library(&c);
    if (failures == failed) { /* else the tool fails likewise, many times */
        check_commands(&c);
        check_cat(&c);
        turn++;
    }
    if (cpu_seconds() - start > MAX_SECONDS) {
        complain("%s: took %.1f seconds", name, cpu_seconds() - start);
    }
}
