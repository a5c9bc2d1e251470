/* Verification of good, damaged and contradictory checkpoints. Damage to files is done to copies in memory; contradictions are
 * made in the metadata after it was read. Positions are what PyTorch's own reader says about the files. */
#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

#include "base/bytes.h"
#include "engine/read/checkpoint.h"
#include "format/archive_writer.h"
#include "support/failing_alloc.h"
#include "support/memory_copy.h"

#define SHARDED "golden/2.13.0/sharded/ckpt"

typedef struct found {
    dcp_status code;
    char file[64], fqn[64];
    uint64_t offset;
} found;

typedef struct findings {
    size_t n;
    found list[64];
    dcp_verify_report report;
} findings;

static void note(void *user, const dcp_defect *d)
{
    findings *f = user;
    assert_true(d->message && *d->message && !strchr(d->message, '\n'));
    if (f->n < 64) {
        found *x = &f->list[f->n];
        x->code = d->code;
        snprintf(x->file, sizeof x->file, "%s", d->file ? d->file : "");
        snprintf(x->fqn, sizeof x->fqn, "%s", d->fqn.ptr ? d->fqn.ptr : "-");
        x->offset = d->offset;
    }
    f->n++;
}

static dcp_checkpoint *open_in(dcp_storage *st, const char *name)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck = NULL;
    opts.storage = st;
    if (dcp_checkpoint_open(NULL, name, &opts, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return ck;
}

static findings verify(dcp_checkpoint *ck, bool quick)
{
    findings f = {.report = DCP_VERIFY_REPORT_INIT};
    dcp_verify_opts opts = DCP_VERIFY_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.quick = quick;
    opts.defect = note;
    opts.user = &f;
    if (dcp_verify(ck, &opts, &f.report, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(f.report.n_defects, f.n);
    return f;
}

static void assert_found(const findings *f, dcp_status code, const char *file, const char *fqn, uint64_t offset)
{
    for (size_t i = 0; i < f->n; i++) {
        const found *x = &f->list[i];
        if (x->code == code && strcmp(x->file, file) == 0 && strcmp(x->fqn, fqn) == 0 && x->offset == offset) {
            return;
        }
    }
    for (size_t i = 0; i < f->n; i++) {
        const found *x = &f->list[i];
        print_message("found %s in %s, %s, at %llu\n", dcp_status_name(x->code), x->file, x->fqn, (unsigned long long)x->offset);
    }
    fail_msg("%s in %s, %s, at %llu was not found", dcp_status_name(code), file, fqn, (unsigned long long)offset);
}

static void assert_only(const findings *f, dcp_status code, const char *file, const char *fqn, uint64_t offset)
{
    assert_found(f, code, file, fqn, offset);
    assert_int_equal(f->n, 1);
}

/* A copy in memory of the checkpoint that four ranks wrote. */
typedef struct copy {
    dcp_storage *st;
    dcp_checkpoint *ck;
} copy;

static copy open_copy(const char *below_tests)
{
    copy c = {.st = memory_copy(below_tests)};
    c.ck = open_in(c.st, "");
    return c;
}

static void close_copy(copy *c)
{
    dcp_checkpoint_close(c->ck);
    dcp_storage_free(c->st);
}

static dcp__entry *entry(const copy *c, const char *fqn)
{
    const dcp_item *item = dcp_checkpoint_find(c->ck, dcp_str_of(fqn));
    assert_non_null(item);
    return &c->ck->meta->entries[dcp__entry_of(item) - c->ck->meta->entries];
}

static dcp__chunk *chunk(const copy *c, const char *fqn, size_t i)
{
    return &c->ck->meta->chunks[entry(c, fqn)->first_chunk + i];
}

static dcp__storage *storage(const copy *c, const char *fqn, size_t i)
{
    return &c->ck->meta->storages[chunk(c, fqn, i)->storage];
}

/* ---- good ones ---- */

static void verify_golden(const char *path, const char *name)
{
    struct stat st;
    char full[512];
    dcp_checkpoint *ck;
    dcp_error err = DCP_ERROR_INIT;
    snprintf(full, sizeof full, "%s/file.pt", path);
    if (stat(full, &st) != 0) {
        snprintf(full, sizeof full, "%s/ckpt", path);
    }
    if (dcp_checkpoint_open(NULL, full, NULL, &ck, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    bool is_empty = strcmp(name, "empty") == 0;
    bool is_safetensors = strncmp(name, "hf", 2) == 0 || strncmp(name, "safetensors", 11) == 0;
    for (int quick = 0; quick < 2; quick++) {
        findings f = verify(ck, quick);
        if (f.n) {
            fail_msg("%s: %s in %s, %s, at %llu", full, dcp_status_name(f.list[0].code), f.list[0].file, f.list[0].fqn,
                     (unsigned long long)f.list[0].offset);
        }
        assert_true((f.report.n_records > 0) == !is_empty);
        assert_true((f.report.bytes > 0) == (!quick && !is_empty));
        assert_int_equal(f.report.n_unchecked, is_safetensors && !quick ? f.report.n_records : 0);
        assert_false(f.report.has_digests);
    }
    dcp_checkpoint_close(ck);
}

static void verify__golden_checkpoints_are_good(void **state)
{
    (void)state;
    const char *const releases[] = {"2.1.2", "2.7.1", "2.9.1", "2.13.0", "2.15.0"};
    size_t n = 0;
    for (size_t r = 0; r < sizeof releases / sizeof releases[0]; r++) {
        char dir[256], path[512];
        snprintf(dir, sizeof dir, DCP_TEST_DIR "/golden/%s", releases[r]);
        DIR *list = opendir(dir);
        const struct dirent *e;
        assert_non_null(list);
        while ((e = readdir(list)) != NULL) {
            if (e->d_name[0] != '.') {
                snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
                verify_golden(path, e->d_name);
                n++;
            }
        }
        closedir(list);
    }
    assert_true(n > 50);
}

/* ---- damaged files ---- */

static void damage__payload_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    flip_byte(c.st, "__0_0.distcp", 1261 + 704 + 83); /* the last byte of data/0 */
    findings f = verify(c.ck, false);
    assert_only(&f, DCP_CHECKSUM, "__0_0.distcp", "rows", 1261 + 704);
    f = verify(c.ck, true);
    assert_int_equal(f.n, 0);
    close_copy(&c);
}

static void damage__pickles_are_found_once(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    flip_byte(c.st, "__1_0.distcp", 7633 + 64 + 20); /* in data.pkl, which starts at 64 */
    flip_byte(c.st, "__3_0.distcp", 1261 + 64 + 2);
    findings f = verify(c.ck, false);
    assert_found(&f, DCP_CHECKSUM, "__1_0.distcp", "copy", 7633 + 64);
    assert_found(&f, DCP_CHECKSUM, "__3_0.distcp", "opt.lr", 1261 + 64);
    assert_int_equal(f.n, 2);
    close_copy(&c);
}

static void damage__every_record_is_looked_at(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    const char *const fqns[] = {"rows", "cols", "few", "grid"};
    const uint64_t at[] = {1261, 2902, 4479, 6056};
    for (size_t i = 0; i < 4; i++) {
        flip_byte(c.st, "__0_0.distcp", at[i] + 704);
        flip_byte(c.st, "__2_0.distcp", at[i] + 704);
    }
    findings f = verify(c.ck, false);
    for (size_t i = 0; i < 4; i++) {
        assert_found(&f, DCP_CHECKSUM, "__0_0.distcp", fqns[i], at[i] + 704);
        assert_found(&f, DCP_CHECKSUM, "__2_0.distcp", fqns[i], at[i] + 704);
    }
    assert_int_equal(f.n, 8);
    close_copy(&c);
}

static void damage__record_without_directory_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    flip_byte(c.st, "__0_0.distcp", 4479 - 22); /* the end record of the record before */
    findings f = verify(c.ck, false);
    assert_int_equal(f.n, 1);
    assert_int_equal(f.list[0].code, DCP_FORMAT);
    assert_string_equal(f.list[0].fqn, "cols");
    assert_in_range(f.list[0].offset, 2902, 4479);
    close_copy(&c);
}

static void damage__missing_file_is_one_defect(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    assert_int_equal(c.st->ops->remove(c.st, "__2_0.distcp", NULL), DCP_OK);
    for (int quick = 0; quick < 2; quick++) {
        findings f = verify(c.ck, quick);
        assert_only(&f, DCP_NOT_FOUND, "__2_0.distcp", "rng.2.seed", DCP_NO_OFFSET);
    }
    close_copy(&c);
}

static void damage__short_file_names_each_record_that_it_cuts(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    cut_file(c.st, "__3_0.distcp", 11604 + 1576);
    cut_file(c.st, "__0_0.distcp", 4479 - 1);
    for (int quick = 0; quick < 2; quick++) {
        findings f = verify(c.ck, quick);
        assert_found(&f, DCP_FORMAT, "__3_0.distcp", "plain", 11604);
        assert_found(&f, DCP_FORMAT, "__0_0.distcp", "cols", 2902);
        assert_found(&f, DCP_FORMAT, "__0_0.distcp", "few", 4479);
        assert_found(&f, DCP_FORMAT, "__0_0.distcp", "grid", 6056);
        assert_int_equal(f.n, 4);
    }
    close_copy(&c);
}

static void damage__empty_file_is_not_a_missing_one(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    cut_file(c.st, "__1_0.distcp", 0);
    findings f = verify(c.ck, true);
    assert_int_equal(f.n, 6);
    assert_found(&f, DCP_FORMAT, "__1_0.distcp", "copy", 7633);
    close_copy(&c);
}

static void damage__compressed_record_is_found(void **state)
{
    (void)state;
    copy c = open_copy("golden/2.13.0/zstd/ckpt");
    const dcp__storage *s = storage(&c, "big", 0);
    flip_byte(c.st, "__0_0.distcp", s->offset + s->length / 2);
    findings f = verify(c.ck, false);
    assert_true(f.n >= 1);
    for (size_t i = 0; i < f.n; i++) {
        assert_string_equal(f.list[i].fqn, "big");
        assert_string_equal(f.list[i].file, "__0_0.distcp");
        assert_in_range(f.list[i].offset, s->offset, s->offset + s->length);
    }
    close_copy(&c);
}

static void damage__torch_save_file_names_the_item(void **state)
{
    (void)state;
    dcp_storage *st = memory_copy("golden/2.13.0/torch_save");
    dcp_checkpoint *ck = open_in(st, "file.pt");
    const dcp__metadata *m = ck->meta;
    const dcp__entry *e = NULL;
    for (size_t i = 0; i < m->n_entries; i++) {
        e = m->entries[i].item.bytes ? &m->entries[i] : e; /* some tensor with elements */
    }
    assert_non_null(e);
    uint64_t at = m->storages[m->chunks[e->first_chunk].storage].offset;
    flip_byte(st, "file.pt", at);
    findings f = verify(ck, false);
    assert_int_equal(f.n, 1);
    assert_int_equal(f.list[0].code, DCP_CHECKSUM);
    assert_int_equal(f.list[0].offset, at);
    assert_string_not_equal(f.list[0].fqn, "-");
    dcp_checkpoint_close(ck);
    dcp_storage_free(st);
}

static dcp_status refuse_reads_of_file_1(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset,
                                         dcp_error *err)
{
    (void)user, (void)n, (void)offset;
    if (op != DCP_OP_READ || strcmp(name, "__1_0.distcp") != 0) {
        return DCP_OK;
    }
    err->sys_errno = EIO;
    return DCP_IO;
}

static void damage__unreadable_file_does_not_stop_the_check(void **state)
{
    (void)state;
    dcp_storage *st = memory_copy(SHARDED), *fault;
    assert_int_equal(dcp_storage_fault(NULL, st, refuse_reads_of_file_1, NULL, &fault, NULL), DCP_OK);
    flip_byte(st, "__3_0.distcp", 11604 + 704);
    dcp_checkpoint *ck = open_in(fault, "");
    findings f = verify(ck, false);
    assert_found(&f, DCP_IO, "__1_0.distcp", "rows", 1261);
    assert_found(&f, DCP_CHECKSUM, "__3_0.distcp", "plain", 11604 + 704);
    assert_int_equal(f.n, 6 + 1);
    dcp_checkpoint_close(ck);
    dcp_storage_free(fault);
    dcp_storage_free(st);
}

/* ---- metadata that contradicts itself ---- */

static void shape__gap_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    static const int64_t sizes[] = {3, 6};
    chunk(&c, "rows", 1)->sizes = sizes;
    findings f = verify(c.ck, true);
    assert_only(&f, DCP_FORMAT, "", "rows", DCP_NO_OFFSET);
    close_copy(&c);
}

static void shape__overlap_names_the_second_chunk(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    static const int64_t offsets[] = {2, 5};
    chunk(&c, "grid", 3)->offsets = offsets; /* over chunk 1, which ends at row 3 */
    findings f = verify(c.ck, true);
    assert_int_equal(f.n, 1);
    assert_int_equal(f.list[0].code, DCP_FORMAT);
    assert_string_equal(f.list[0].fqn, "grid");
    assert_true((strcmp(f.list[0].file, "__3_0.distcp") == 0 && f.list[0].offset == 8386) ||
                (strcmp(f.list[0].file, "__1_0.distcp") == 0 && f.list[0].offset == 6056));
    close_copy(&c);
}

static void shape__chunk_outside_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    static const int64_t sizes[] = {2, 7}, negative[] = {-1, 0};
    chunk(&c, "rows", 3)->sizes = sizes; /* [9, 11) of 10 rows */
    chunk(&c, "grid", 2)->offsets = negative;
    findings f = verify(c.ck, true);
    assert_found(&f, DCP_FORMAT, "__3_0.distcp", "rows", 3783);
    assert_found(&f, DCP_FORMAT, "__2_0.distcp", "grid", 6056);
    assert_int_equal(f.n, 2);
    close_copy(&c);
}

static void shape__chunk_without_a_place_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    chunk(&c, "rows", 2)->storage = DCP__NO_STORAGE;
    chunk(&c, "cols", 3)->storage = DCP__NO_STORAGE; /* has no elements: may be left out */
    entry(&c, "opt.lr")->storage = DCP__NO_STORAGE;
    findings f = verify(c.ck, false);
    assert_found(&f, DCP_FORMAT, "", "rows", DCP_NO_OFFSET);
    assert_found(&f, DCP_FORMAT, "", "opt.lr", DCP_NO_OFFSET);
    assert_int_equal(f.n, 2);
    close_copy(&c);
}

static void form__record_of_another_dtype_or_shape_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    static const int64_t sizes[] = {7, 3}, extents[] = {3, 3, 1}, zeros[] = {0, 0, 0};
    entry(&c, "copy")->item.dtype = DCP_INT64;
    chunk(&c, "rows", 1)->sizes = sizes;
    entry(&c, "plain")->item.ndim = 3;
    entry(&c, "plain")->item.extents = extents;
    *chunk(&c, "plain", 0) = (dcp__chunk){zeros, extents, chunk(&c, "plain", 0)->storage};
    findings f = verify(c.ck, false);
    assert_found(&f, DCP_FORMAT, "__1_0.distcp", "copy", 7633);
    assert_found(&f, DCP_FORMAT, "__1_0.distcp", "rows", 1261);
    assert_found(&f, DCP_FORMAT, "__3_0.distcp", "plain", 11604);
    close_copy(&c);
}

static void form__safetensors_header_that_contradicts_is_found(void **state)
{
    (void)state;
    copy c = open_copy("golden/2.13.0/safetensors_records/ckpt");
    size_t tensors = 0;
    for (size_t i = 0; i < c.ck->meta->n_entries; i++) {
        dcp__entry *e = &c.ck->meta->entries[i];
        if (e->item.kind == DCP_ITEM_TENSOR) {
            e->item.dtype = e->item.dtype == DCP_INT8 ? DCP_UINT8 : DCP_INT8;
            tensors++;
        }
    }
    findings f = verify(c.ck, false);
    assert_true(tensors > 5);
    assert_int_equal(f.n, tensors);
    assert_int_equal(f.list[0].code, DCP_FORMAT);
    close_copy(&c);
}

static void ranges__partial_overlap_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    storage(&c, "cols", 0)->offset -= 100;
    findings f = verify(c.ck, true);
    assert_only(&f, DCP_FORMAT, "__0_0.distcp", "cols", 2802);
    close_copy(&c);
}

static void ranges__one_inside_another_is_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    storage(&c, "rows", 0)->length += 4000; /* holds cols and few, and reaches into grid */
    findings f = verify(c.ck, true);
    assert_found(&f, DCP_FORMAT, "__0_0.distcp", "cols", 2902);
    assert_found(&f, DCP_FORMAT, "__0_0.distcp", "few", 4479);
    assert_found(&f, DCP_FORMAT, "__0_0.distcp", "grid", 6056);
    assert_int_equal(f.n, 3);
    close_copy(&c);
}

static void ranges__identical_ones_are_ties(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    size_t records = c.ck->meta->n_storages;
    *storage(&c, "few", 1) = *storage(&c, "few", 0); /* equal shapes */
    findings f = verify(c.ck, false);
    assert_int_equal(f.n, 0);
    assert_int_equal(f.report.n_records, records - 1);
    close_copy(&c);
}

static void ranges__beyond_all_numbers_are_found(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    storage(&c, "rows", 0)->length = UINT64_MAX;
    storage(&c, "grid", 1)->offset = UINT64_MAX;
    findings f = verify(c.ck, false);
    assert_found(&f, DCP_FORMAT, "__0_0.distcp", "rows", 1261);
    assert_found(&f, DCP_FORMAT, "__1_0.distcp", "grid", UINT64_MAX);
    assert_int_equal(f.n, 2);
    close_copy(&c);
}

static void names__that_lead_out_are_defects(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    c.ck->meta->files[storage(&c, "hsdp", 0)->file] = dcp_str_of("../__2_0.distcp");
    findings f = verify(c.ck, true);
    assert_int_equal(f.n, 1);
    assert_int_equal(f.list[0].code, DCP_FORMAT);
    assert_string_equal(f.list[0].file, "../__2_0.distcp");
    close_copy(&c);
}

/* ---- what libdcp itself adds ---- */

enum { RECORDS_OF_FILE_0 = 5 };
static const uint64_t file_0[RECORDS_OF_FILE_0 + 1] = {0, 1261, 2902, 4479, 6056, 7633};

/* Facts as a save by libdcp would have left them, for file 0. */
typedef struct facts {
    dcp__digest digests[RECORDS_OF_FILE_0];
    const dcp__digest *records[4];
    size_t n_records[4];
} facts;

static void add_facts(copy *c, facts *x)
{
    dcp__own_facts *own = &c->ck->meta->own;
    file_bytes b = get_file(c->st, "__0_0.distcp");
    *x = (facts){.n_records = {0}};
    for (size_t i = 0; i < RECORDS_OF_FILE_0; i++) {
        x->digests[i] = dcp__xxh3_128(b.data + file_0[i], file_0[i + 1] - file_0[i]);
    }
    free(b.data);
    uint32_t file = storage(c, "rows", 0)->file;
    x->records[file] = x->digests;
    x->n_records[file] = RECORDS_OF_FILE_0;
    own->present = true;
    own->records = x->records;
    own->n_records = x->n_records;
}

static void digests__are_compared(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    facts x;
    add_facts(&c, &x);
    findings f = verify(c.ck, false);
    assert_int_equal(f.n, 0);
    assert_true(f.report.has_digests);
    flip_byte(c.st, "__0_0.distcp", 1261 + 50); /* padding: no CRC covers it */
    f = verify(c.ck, false);
    assert_only(&f, DCP_CHECKSUM, "__0_0.distcp", "rows", 1261);
    flip_byte(c.st, "__0_0.distcp", 2902 + 704);
    f = verify(c.ck, false);
    assert_found(&f, DCP_CHECKSUM, "__0_0.distcp", "cols", 2902);
    assert_found(&f, DCP_CHECKSUM, "__0_0.distcp", "cols", 2902 + 704);
    assert_int_equal(f.n, 3);
    close_copy(&c);
}

static void digests__of_another_number_are_a_defect(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    facts x;
    add_facts(&c, &x);
    x.n_records[storage(&c, "rows", 0)->file]--;
    findings f = verify(c.ck, true);
    assert_only(&f, DCP_FORMAT, "__0_0.distcp", "-", DCP_NO_OFFSET);
    close_copy(&c);
}

static void gaps__of_our_files_are_zero(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    file_bytes b = get_file(c.st, "__0_0.distcp");
    uint8_t *moved = calloc(1, b.n + 4096);
    memcpy(moved, b.data, 1261);
    memcpy(moved + 4096, b.data + 1261, b.n - 1261);
    set_file(c.st, "__0_0.distcp", moved, b.n - 1261 + 4096);
    for (size_t i = 0; i < c.ck->meta->n_storages; i++) {
        dcp__storage *s = &c.ck->meta->storages[i];
        s->offset += s->file == storage(&c, "rows", 0)->file && s->offset >= 1261 ? 4096 - 1261 : 0;
    }
    c.ck->meta->own.present = true;
    findings f = verify(c.ck, false);
    assert_int_equal(f.n, 0);
    flip_byte(c.st, "__0_0.distcp", 2000);
    f = verify(c.ck, false);
    assert_only(&f, DCP_FORMAT, "__0_0.distcp", "rows", 2000);
    c.ck->meta->own.present = false; /* others may leave there what they like */
    f = verify(c.ck, false);
    assert_int_equal(f.n, 0);
    free(b.data);
    free(moved);
    close_copy(&c);
}

/* ---- large ones, that all threads read ---- */

enum { LARGE_FLOATS = (70 << 20) / 4 + 3 };

/* torch.save of a float32 tensor with LARGE_FLOATS elements (formats.md 3.7), bytes i * 7 + i / 4096. *data: where they start. */
static file_bytes make_large(uint64_t *data)
{
    uint8_t pickle[] = "\x80\x02"
                       "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
                       "X\x01\0\0\0000X\x03\0\0\0cpuJ####tQK\0J####\x85K\x01\x85\x89"
                       "ccollections\nOrderedDict\n)RtR.";
    for (size_t i = 0; i + 4 < sizeof pickle; i++) {
        if (memcmp(pickle + i, "####", 4) == 0) {
            dcp__store32(pickle + i, LARGE_FLOATS);
        }
    }
    dcp__archive_opts opts = {"archive", false, 64};
    dcp__archive_layout *l;
    uint64_t bytes = (uint64_t)LARGE_FLOATS * 4;
    dcp_context *ctx = dcp__context(NULL);
    assert_int_equal(dcp__archive_layout_create(ctx, &opts, pickle, sizeof pickle - 1, &bytes, 1, &l, NULL), DCP_OK);
    file_bytes b = {malloc(dcp__archive_length(l)), dcp__archive_length(l)};
    *data = dcp__archive_storage_offset(l, 0);
    for (size_t i = 0; i < bytes; i++) {
        b.data[*data + i] = (uint8_t)(i * 7 + i / 4096);
    }
    uint32_t crc = dcp__crc32(0, b.data + *data, bytes);
    dcp__archive_piece(l, 0, &crc, b.data);
    dcp__archive_piece(l, 1, &crc, b.data + *data + bytes);
    dcp__archive_layout_free(l);
    return b;
}

static void large__torch_save_file(void **state)
{
    (void)state;
    uint64_t data;
    file_bytes b = make_large(&data);
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    set_file(st, "big.pt", b.data, b.n);
    dcp_checkpoint *ck = open_in(st, "big.pt");
    findings f = verify(ck, false);
    assert_int_equal(f.n, 0);
    assert_true(f.report.bytes >= (uint64_t)LARGE_FLOATS * 4);
    flip_byte(st, "big.pt", data + (uint64_t)LARGE_FLOATS * 4 - 1); /* in the last, short piece */
    f = verify(ck, false);
    assert_only(&f, DCP_CHECKSUM, "big.pt", "", data);
    dcp_checkpoint_close(ck);
    dcp_storage_free(st);
    free(b.data);
}

static void large__record_with_and_without_a_digest(void **state)
{
    (void)state;
    uint64_t data;
    static const int64_t sizes[] = {LARGE_FLOATS};
    file_bytes b = make_large(&data);
    copy c = open_copy("golden/2.13.0/shapes/ckpt");
    c.ck->meta->n_entries = 1; /* of the item "one" alone */
    c.ck->meta->entries[0] = *entry(&c, "one");
    dcp__entry *e = &c.ck->meta->entries[0];
    dcp__chunk *part = &c.ck->meta->chunks[e->first_chunk];
    e->item.dtype = DCP_FLOAT32;
    e->item.extents = sizes;
    part->sizes = sizes;
    c.ck->meta->storages[0] = (dcp__storage){.offset = 0, .length = b.n, .file = 0, .form = DCP__FORM_RECORD};
    c.ck->meta->n_storages = 1;
    part->storage = 0;
    set_file(c.st, "__0_0.distcp", b.data, b.n);
    dcp__digest digest = dcp__xxh3_128(b.data, b.n);
    const dcp__digest *records[] = {&digest};
    size_t n_records[] = {1};
    c.ck->meta->own.records = records;
    c.ck->meta->own.n_records = n_records;
    for (int own = 0; own < 2; own++) {
        c.ck->meta->own.present = own;
        findings f = verify(c.ck, false);
        assert_int_equal(f.n, 0);
        assert_int_equal(f.report.has_digests, own);
    }
    flip_byte(c.st, "__0_0.distcp", data + 5);
    for (int own = 0; own < 2; own++) {
        c.ck->meta->own.present = own;
        findings f = verify(c.ck, false);
        assert_found(&f, DCP_CHECKSUM, "__0_0.distcp", "one", data);
        assert_int_equal(f.n, 1 + own);
    }
    free(b.data);
    close_copy(&c);
}

/* ---- the call itself ---- */

typedef struct progress {
    uint64_t calls, last_done, last_total;
    bool answer;
} progress;

static bool see_progress(void *user, uint64_t done, uint64_t total)
{
    progress *p = user;
    p->calls++;
    assert_true(done >= p->last_done && done <= total);
    p->last_done = done;
    p->last_total = total;
    return p->answer;
}

static void progress__is_told_and_may_cancel(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    dcp_verify_opts opts = DCP_VERIFY_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_error err = DCP_ERROR_INIT;
    progress p = {.answer = true};
    opts.progress = see_progress;
    opts.user = &p;
    assert_int_equal(dcp_verify(c.ck, &opts, &report, &err), DCP_OK);
    assert_true(p.calls >= 1);
    assert_int_equal(p.last_done, report.bytes);
    assert_int_equal(p.last_total, report.bytes);
    p = (progress){.answer = false};
    assert_int_equal(dcp_verify(c.ck, &opts, &report, &err), DCP_CANCELED);
    assert_int_equal(err.code, DCP_CANCELED);
    close_copy(&c);
}

static void arguments__are_checked(void **state)
{
    (void)state;
    copy c = open_copy(SHARDED);
    dcp_verify_opts opts = DCP_VERIFY_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    assert_int_equal(dcp_verify(NULL, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_verify(c.ck, NULL, NULL, NULL), DCP_OK);
    opts.struct_size--;
    assert_int_equal(dcp_verify(c.ck, &opts, NULL, NULL), DCP_ARG);
    report.struct_size--;
    assert_int_equal(dcp_verify(c.ck, NULL, &report, NULL), DCP_ARG);
    close_copy(&c);
}

/* Out of memory is never taken for a defect. */
static dcp_status open_and_verify(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_verify_report report = DCP_VERIFY_REPORT_INIT;
    dcp_checkpoint *ck;
    opts.storage = user;
    dcp_status status = dcp_checkpoint_open(ctx, "", &opts, &ck, err);
    if (status == DCP_OK) {
        status = dcp_verify(ck, NULL, &report, err);
        assert_int_equal(report.n_defects, 0);
        dcp_checkpoint_close(ck);
    }
    return status;
}

static void verify__survives_failing_allocations(void **state)
{
    (void)state;
    const char *const dirs[] = {"golden/2.13.0/sharded/ckpt", "golden/2.13.0/objects/ckpt", "golden/2.13.0/zstd/ckpt"};
    for (size_t i = 0; i < sizeof dirs / sizeof dirs[0]; i++) {
        dcp_storage *st = memory_copy(dirs[i]);
        assert_true(failing_alloc_walk(open_and_verify, st) > 20);
        dcp_storage_free(st);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(verify__golden_checkpoints_are_good),
        cmocka_unit_test(damage__payload_is_found),
        cmocka_unit_test(damage__pickles_are_found_once),
        cmocka_unit_test(damage__every_record_is_looked_at),
        cmocka_unit_test(damage__record_without_directory_is_found),
        cmocka_unit_test(damage__missing_file_is_one_defect),
        cmocka_unit_test(damage__short_file_names_each_record_that_it_cuts),
        cmocka_unit_test(damage__empty_file_is_not_a_missing_one),
        cmocka_unit_test(damage__compressed_record_is_found),
        cmocka_unit_test(damage__torch_save_file_names_the_item),
        cmocka_unit_test(damage__unreadable_file_does_not_stop_the_check),
        cmocka_unit_test(shape__gap_is_found),
        cmocka_unit_test(shape__overlap_names_the_second_chunk),
        cmocka_unit_test(shape__chunk_outside_is_found),
        cmocka_unit_test(shape__chunk_without_a_place_is_found),
        cmocka_unit_test(form__record_of_another_dtype_or_shape_is_found),
        cmocka_unit_test(form__safetensors_header_that_contradicts_is_found),
        cmocka_unit_test(ranges__partial_overlap_is_found),
        cmocka_unit_test(ranges__one_inside_another_is_found),
        cmocka_unit_test(ranges__identical_ones_are_ties),
        cmocka_unit_test(ranges__beyond_all_numbers_are_found),
        cmocka_unit_test(names__that_lead_out_are_defects),
        cmocka_unit_test(digests__are_compared),
        cmocka_unit_test(digests__of_another_number_are_a_defect),
        cmocka_unit_test(gaps__of_our_files_are_zero),
        cmocka_unit_test(large__torch_save_file),
        cmocka_unit_test(large__record_with_and_without_a_digest),
        cmocka_unit_test(progress__is_told_and_may_cancel),
        cmocka_unit_test(arguments__are_checked),
        cmocka_unit_test(verify__survives_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
