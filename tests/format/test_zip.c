/* The zip reader: what PyTorch's loaders accept is read, every inconsistency is refused. */
#include "format/zip.h"

#include <stdio.h>

#include "base/hash.h"
#include "support/failing_alloc.h"
#include "support/zip_builder.h"

static const char text[] = "some text that repeats itself, some text that repeats itself, some text";

static const zb_member plain[] = {
    {"archive/data.pkl", text, sizeof text - 1, 0},
    {"archive/data/0", "0123456789", 10, 0},
    {"archive/empty", "", 0, 0},
    {"archive/version", "3\n", 2, 0},
};
#define N_PLAIN 4

static dcp_context *ctx(void)
{
    return dcp__context(NULL);
}

/* Opens; on success checks that nothing is inside out and closes. */
static dcp_status try_open(const uint8_t *bytes, size_t len, dcp_error *err)
{
    dcp__source src = dcp__source_memory(bytes, len);
    dcp__zip z;
    dcp_status st = dcp__zip_open(ctx(), &src, false, &z, err);
    if (!st) {
        for (size_t i = 0; i < z.n_members; i++) {
            assert_true(dcp__range_fits(z.members[i].data, z.members[i].bytes, z.directory));
        }
        dcp__zip_reset(&z);
    }
    return st;
}

static void expect_content(const uint8_t *bytes, size_t len, const char *name, const void *content, size_t content_len)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp__source src = dcp__source_memory(bytes, len);
    dcp__zip z;
    assert_int_equal(dcp__zip_open(ctx(), &src, true, &z, &err), DCP_OK);
    dcp__zip_member *m = dcp__zip_find(&z, name);
    assert_non_null(m);
    assert_int_equal(m->data, DCP__ZIP_UNKNOWN);
    assert_int_equal(dcp__zip_locate(&src, m, &err), DCP_OK);
    uint8_t *out;
    size_t n;
    assert_int_equal(dcp__zip_read(ctx(), &src, m, 1 << 20, &out, &n, &err), DCP_OK);
    assert_int_equal(n, content_len);
    assert_memory_equal(out, content, n);
    assert_int_equal(out[n], 0);
    dcp__free(ctx(), out);
    dcp__zip_reset(&z);
}

static void zip_reader__every_writers_form_is_read(void **state)
{
    (void)state;
    for (int form = 0; form < 32; form++) {
        zb_opts opts = {form & 1, (form >> 1) & 1, (form >> 2) & 1, form & 8 ? 10 : form & 16 ? 65000 : 0};
        zb_zip z = zb_build(plain, N_PLAIN, &opts);
        for (size_t i = 0; i < N_PLAIN; i++) {
            expect_content(z.bytes, z.len, plain[i].name + 8, plain[i].data, plain[i].len);
        }
        free(z.bytes);
    }
}

static void zip_reader__data_position_comes_from_the_local_header(void **state)
{
    (void)state;
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){.with_zip64_end = 1});
    dcp__source src = dcp__source_memory(z.bytes, z.len);
    dcp__zip zip;
    assert_int_equal(dcp__zip_open(ctx(), &src, false, &zip, NULL), DCP_OK);
    assert_int_equal(zip.n_members, N_PLAIN);
    for (size_t i = 0; i < N_PLAIN; i++) {
        assert_int_equal(zip.members[i].header, z.header[i]);
        assert_int_equal(zip.members[i].data, z.data[i]);
    }
    assert_int_equal(zip.directory, z.directory);
    assert_null(dcp__zip_find(&zip, "data"));
    assert_null(dcp__zip_find(&zip, "archive/data.pkl"));
    dcp__zip_reset(&zip);
    free(z.bytes);
}

static void zip_reader__deflated_members_are_inflated(void **state)
{
    (void)state;
    uint8_t *big = malloc(300000);
    for (size_t i = 0; i < 300000; i++) {
        big[i] = (uint8_t)(i * i >> 7);
    }
    zb_member members[] = {{"a/data.pkl", text, sizeof text - 1, 1}, {"a/data/0", big, 300000, 1}, {"a/e", "", 0, 1}};
    zb_zip z = zb_build(members, 3, &(zb_opts){.with_zip64_end = 1});
    expect_content(z.bytes, z.len, "data.pkl", text, sizeof text - 1);
    expect_content(z.bytes, z.len, "data/0", big, 300000);
    expect_content(z.bytes, z.len, "e", "", 0);
    free(z.bytes);
    free(big);
}

static dcp_status read_first(const zb_zip *z, uint64_t max_bytes, dcp_error *err)
{
    dcp__source src = dcp__source_memory(z->bytes, z->len);
    dcp__zip zip;
    assert_int_equal(dcp__zip_open(ctx(), &src, false, &zip, NULL), DCP_OK);
    uint8_t *out = NULL;
    size_t n;
    dcp_status st = dcp__zip_read(ctx(), &src, &zip.members[0], max_bytes, &out, &n, err);
    dcp__free(ctx(), out);
    dcp__zip_reset(&zip);
    return st;
}

static void zip_reader__inflated_size_must_be_the_directorys(void **state)
{
    (void)state;
    zb_member member = {"a/data.pkl", text, sizeof text - 1, 1};
    uint32_t sizes[] = {0, sizeof text - 2, sizeof text, 1u << 30};
    for (size_t i = 0; i < 4; i++) {
        zb_zip z = zb_build(&member, 1, &(zb_opts){0});
        dcp__store32(z.bytes + z.entry[0] + 24, sizes[i]);
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(read_first(&z, UINT32_MAX, &err), DCP_FORMAT);
        assert_int_equal(err.offset, z.data[0]);
        free(z.bytes);
    }
}

static void zip_reader__broken_deflate_data_fails(void **state)
{
    (void)state;
    zb_member member = {"a/data.pkl", text, sizeof text - 1, 1};
    zb_zip z = zb_build(&member, 1, &(zb_opts){.without_crc = 1});
    size_t stored = dcp__load32(z.bytes + z.entry[0] + 20);
    z.bytes[z.data[0]] = 0xff;
    assert_int_equal(read_first(&z, 1000, NULL), DCP_FORMAT);
    free(z.bytes);
    for (size_t keep = 0; keep < stored; keep++) {
        z = zb_build(&member, 1, &(zb_opts){.without_crc = 1});
        dcp__store32(z.bytes + z.entry[0] + 20, (uint32_t)keep);
        assert_int_equal(read_first(&z, 1000, NULL), DCP_FORMAT);
        free(z.bytes);
    }
}

static void zip_reader__wrong_crc_is_a_checksum_error(void **state)
{
    (void)state;
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){0});
    z.bytes[z.data[0] + 3] ^= 4;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(read_first(&z, 1000, &err), DCP_CHECKSUM);
    assert_int_equal(err.offset, z.data[0]);
    dcp__store32(z.bytes + z.entry[0] + 16, 0);
    assert_int_equal(read_first(&z, 1000, NULL), DCP_OK);
    assert_int_equal(read_first(&z, sizeof text - 2, NULL), DCP_LIMIT);
    free(z.bytes);
}

static void zip_reader__truncated_anywhere_fails(void **state)
{
    (void)state;
    for (int form = 0; form < 2; form++) {
        zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){.with_zip64_end = form});
        for (size_t n = 0; n < z.len; n++) {
            /* In memory of just that size, so that the sanitizer sees a read too far. */
            uint8_t *cut = malloc(n ? n : 1);
            memcpy(cut, z.bytes, n);
            assert_int_equal(try_open(cut, n, NULL), DCP_FORMAT);
            free(cut);
        }
        free(z.bytes);
    }
}

/* One field of an otherwise good archive is set to a wrong value. */
static void expect_refused(size_t at, size_t width, uint64_t value, dcp_status status)
{
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){.with_zip64_end = 1, .with_local_sizes = 1});
    assert_int_equal(try_open(z.bytes, z.len, NULL), DCP_OK);
    memcpy(z.bytes + at, &value, width);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(try_open(z.bytes, z.len, &err), status);
    assert_true(err.offset < z.len);
    free(z.bytes);
}

static void zip_reader__each_lying_field_is_refused(void **state)
{
    (void)state;
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){.with_zip64_end = 1, .with_local_sizes = 1});
    free(z.bytes);
    static const uint64_t wide[] = {1, 1000, UINT32_MAX, (uint64_t)1 << 32, INT64_MAX, UINT64_MAX};
    for (size_t i = 0; i < sizeof wide / sizeof wide[0]; i++) {
        expect_refused(z.end64 + 24, 8, wide[i], DCP_FORMAT);  /* entries on this disk */
        expect_refused(z.end64 + 32, 8, wide[i], DCP_FORMAT);  /* entries */
        expect_refused(z.end64 + 40, 8, wide[i], DCP_FORMAT);  /* bytes */
        expect_refused(z.end64 + 48, 8, wide[i], DCP_FORMAT);  /* offset */
        expect_refused(z.locator + 8, 8, wide[i], DCP_FORMAT); /* where the zip64 end is */
    }
    for (size_t k = 0; k < 2; k++) {
        size_t e = z.entry[k], h = z.header[k];
        expect_refused(e + 0, 4, 0x02014b51, DCP_FORMAT);
        expect_refused(e + 8, 2, 0x0801, DCP_UNSUPPORTED); /* encrypted */
        expect_refused(e + 10, 2, 12, DCP_UNSUPPORTED);    /* bzip2 */
        expect_refused(e + 10, 2, 8, DCP_FORMAT);          /* the local header says stored */
        expect_refused(e + 20, 4, 3, DCP_FORMAT);          /* stored, and sizes differ */
        expect_refused(e + 24, 4, 3, DCP_FORMAT);
        expect_refused(e + 28, 2, 3, DCP_FORMAT); /* name length */
        expect_refused(e + 28, 2, 65535, DCP_FORMAT);
        expect_refused(e + 30, 2, 65535, DCP_FORMAT); /* extra length */
        expect_refused(e + 30, 2, 1, DCP_FORMAT);
        expect_refused(e + 32, 2, 65535, DCP_FORMAT); /* comment length */
        expect_refused(e + 42, 4, z.header[k] + 1, DCP_FORMAT);
        expect_refused(e + 42, 4, z.directory, DCP_FORMAT);
        expect_refused(e + 42, 4, UINT32_MAX, DCP_FORMAT); /* wide, and no field that has it */
        expect_refused(h + 0, 4, 0x04034b51, DCP_FORMAT);
        expect_refused(h + 8, 2, 8, DCP_FORMAT);
        expect_refused(h + 14, 4, 12345, DCP_FORMAT); /* local CRC */
        expect_refused(h + 18, 4, 9, DCP_FORMAT);     /* local sizes */
        expect_refused(h + 22, 4, 9, DCP_FORMAT);
        expect_refused(h + 26, 2, 2, DCP_FORMAT);     /* local name length */
        expect_refused(h + 28, 2, 65535, DCP_FORMAT); /* local extra length */
        expect_refused(h + 28, 2, 30, DCP_FORMAT);
    }
    expect_refused(z.end + 10, 2, 3, DCP_FORMAT);
    expect_refused(z.end + 12, 4, 3, DCP_FORMAT);
    expect_refused(z.end + 16, 4, 3, DCP_FORMAT);
    expect_refused(z.end64 + 4, 8, 43, DCP_FORMAT);
    expect_refused(z.end64 + 16, 4, 1, DCP_FORMAT); /* disks */
    expect_refused(z.end64 + 20, 4, 1, DCP_FORMAT);
}

static void zip_reader__classic_end_record_is_checked_too(void **state)
{
    (void)state;
    static const struct {
        size_t at, width;
        uint64_t value;
    } fields[] = {{4, 2, 1},  {6, 2, 1},           {8, 2, 3},           {10, 2, 3}, {10, 2, 5},
                  {12, 4, 3}, {12, 4, UINT32_MAX}, {16, 4, UINT32_MAX}, {16, 4, 0}, {12, 4, 1u << 20}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){0});
        memcpy(z.bytes + z.end + fields[i].at, &fields[i].value, fields[i].width);
        assert_int_equal(try_open(z.bytes, z.len, NULL), DCP_FORMAT);
        free(z.bytes);
    }
}

/* Counts beyond what the directory can hold must not decide how much is allocated. */
static void zip_reader__huge_entry_count_allocates_nothing(void **state)
{
    (void)state;
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){.with_zip64_end = 1});
    dcp__store64(z.bytes + z.end64 + 24, (uint64_t)1 << 40);
    dcp__store64(z.bytes + z.end64 + 32, (uint64_t)1 << 40);
    dcp__store16(z.bytes + z.end + 10, 0xffff);
    failing_alloc fa;
    dcp_context *counted = failing_alloc_context(&fa, 1);
    fa.calls = 0;
    dcp__source src = dcp__source_memory(z.bytes, z.len);
    dcp__zip zip;
    assert_int_equal(dcp__zip_open(counted, &src, false, &zip, NULL), DCP_FORMAT);
    assert_int_equal(fa.calls, 0);
    dcp_context_free(counted);
    free(z.bytes);
}

static void zip_reader__duplicate_names_are_refused(void **state)
{
    (void)state;
    char names[ZB_MAX_MEMBERS][24];
    zb_member members[ZB_MAX_MEMBERS];
    /* Few members are compared one by one, many by a map. */
    static const size_t counts[] = {2, 16, 17, ZB_MAX_MEMBERS};
    for (size_t c = 0; c < 4; c++) {
        size_t n = counts[c];
        for (size_t i = 0; i < n; i++) {
            snprintf(names[i], sizeof names[i], "a/m%zu", i);
            members[i] = (zb_member){names[i], "x", 1, 0};
        }
        zb_zip z = zb_build(members, n, &(zb_opts){0});
        expect_content(z.bytes, z.len, names[n - 1] + 2, "x", 1);
        expect_content(z.bytes, z.len, names[0] + 2, "x", 1);
        free(z.bytes);
        members[n - 1].name = names[0];
        z = zb_build(members, n, &(zb_opts){0});
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(try_open(z.bytes, z.len, &err), DCP_FORMAT);
        assert_int_equal(err.offset, z.header[n - 1]);
        free(z.bytes);
    }
}

static void zip_reader__members_in_any_order_are_read(void **state)
{
    (void)state;
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){0});
    /* The directory lists the first two the other way round: their entries are of different length. */
    size_t len0 = z.entry[1] - z.entry[0], len1 = z.entry[2] - z.entry[1];
    uint8_t first[128];
    memcpy(first, z.bytes + z.entry[0], len0);
    memmove(z.bytes + z.entry[0], z.bytes + z.entry[1], len1);
    memcpy(z.bytes + z.entry[0] + len1, first, len0);
    for (size_t i = 0; i < N_PLAIN; i++) {
        expect_content(z.bytes, z.len, plain[i].name + 8, plain[i].data, plain[i].len);
    }
    free(z.bytes);
}

static void zip_reader__overlapping_members_are_refused(void **state)
{
    (void)state;
    /* Member 0 claims the bytes of member 1 as well: in order, and with the directory out of order. */
    zb_zip z = zb_build(plain, N_PLAIN, &(zb_opts){0});
    uint32_t all = (uint32_t)(z.header[2] - z.data[0]);
    dcp__store32(z.bytes + z.entry[0] + 20, all);
    dcp__store32(z.bytes + z.entry[0] + 24, all);
    assert_int_equal(try_open(z.bytes, z.len, NULL), DCP_FORMAT);
    free(z.bytes);
    /* Two members with one header. */
    z = zb_build(plain, N_PLAIN, &(zb_opts){0});
    dcp__store32(z.bytes + z.entry[1] + 42, (uint32_t)z.header[0]);
    assert_int_equal(try_open(z.bytes, z.len, NULL), DCP_FORMAT);
    free(z.bytes);
}

static void zip_reader__names_outside_the_directory_are_refused(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"data.pkl", "data/0"}, {"a/data.pkl", "b/data/0"}, {"a/data.pkl", "version"}, {"a/x", ""}};
    for (size_t i = 0; i < 4; i++) {
        zb_member members[] = {{pairs[i][0], "x", 1, 0}, {pairs[i][1], "y", 1, 0}};
        zb_zip z = zb_build(members, 2, &(zb_opts){0});
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(try_open(z.bytes, z.len, &err), DCP_FORMAT);
        assert_int_equal(err.offset, z.entry[i ? 1 : 0]);
        free(z.bytes);
    }
}

/* ---- 4 GiB and more, without storing it ---- */

/* An archive of formats.md 3.4: data/0 of 4 GiB + 100 bytes, so that the members behind it have wide offsets. */
typedef struct sparse {
    uint8_t front[512], back[2048];
    size_t front_len, back_len;
    uint64_t back_at; /* bytes between are zero */
    uint64_t bytes_read, version_data, payload;
} sparse;

#define HUGE_BYTES (((uint64_t)4 << 30) + 100)

static dcp_status read_sparse(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    sparse *s = self->user;
    s->bytes_read += n;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = offset + i;
        ((uint8_t *)buf)[i] = at < s->front_len ? s->front[at] : at >= s->back_at ? s->back[at - s->back_at] : 0;
    }
    return DCP_OK;
}

static void local_header(zb_zip *z, const char *name, uint64_t at, uint64_t size)
{
    int wide = size >= UINT32_MAX, far = at >= UINT32_MAX;
    size_t field = wide || far ? 4 + (wide ? 16u : 0) + (far ? 8u : 0) : 0;
    size_t pad = (size_t)((0 - (at + 30 + strlen(name) + 4 + field)) & 63);
    zb_put_int(z, 0x04034b50, 4);
    zb_put_int(z, 0x08080000, 4);
    zb_put_int(z, 0, 8);
    zb_put_int(z, 0, 8);
    zb_put_int(z, 0, 2);
    zb_put_int(z, strlen(name), 2);
    zb_put_int(z, field + 4 + pad, 2);
    zb_put(z, name, strlen(name));
    if (field) {
        zb_put_int(z, 1, 2);
        zb_put_int(z, field - 4, 2);
        if (wide) {
            zb_put_int(z, size, 8);
            zb_put_int(z, 0, 8);
        }
        if (far) {
            zb_put_int(z, at, 8);
        }
    }
    zb_put(z, "FB", 2);
    zb_put_int(z, pad, 2);
    for (size_t i = 0; i < pad; i++) {
        zb_put(z, "Z", 1);
    }
}

static void entry(zb_zip *z, const char *name, uint64_t at, uint64_t size)
{
    int wide = size >= UINT32_MAX, far = at >= UINT32_MAX;
    size_t field = wide || far ? 4 + (wide ? 16u : 0) + (far ? 8u : 0) : 0;
    zb_put_int(z, 0x02014b50, 4);
    zb_put_int(z, 0, 4);
    zb_put_int(z, 0x0808, 2);
    zb_put_int(z, 0, 6);
    zb_put_int(z, 0, 4); /* CRC not computed */
    zb_put_int(z, wide ? UINT32_MAX : size, 4);
    zb_put_int(z, wide ? UINT32_MAX : size, 4);
    zb_put_int(z, strlen(name), 2);
    zb_put_int(z, field, 2);
    zb_put_int(z, 0, 8);
    zb_put_int(z, 0, 2);
    zb_put_int(z, far ? UINT32_MAX : at, 4);
    zb_put(z, name, strlen(name));
    if (field) {
        zb_put_int(z, 1, 2);
        zb_put_int(z, field - 4, 2);
        if (wide) {
            zb_put_int(z, size, 8);
            zb_put_int(z, size, 8);
        }
        if (far) {
            zb_put_int(z, at, 8);
        }
    }
}

static sparse make_sparse(void)
{
    sparse s = {0};
    zb_zip front = {0}, back = {0};
    local_header(&front, "archive/data/0", 0, HUGE_BYTES);
    s.payload = front.len;
    s.back_at = front.len + HUGE_BYTES;
    zb_put_int(&back, 0x08074b50, 4);
    zb_put_int(&back, 0, 4);
    zb_put_int(&back, HUGE_BYTES, 8);
    zb_put_int(&back, HUGE_BYTES, 8);
    uint64_t version_at = s.back_at + back.len;
    local_header(&back, "archive/version", version_at, 2);
    s.version_data = s.back_at + back.len;
    zb_put(&back, "3\n", 2);
    uint64_t directory = s.back_at + back.len;
    entry(&back, "archive/data/0", 0, HUGE_BYTES);
    entry(&back, "archive/version", version_at, 2);
    uint64_t end64 = s.back_at + back.len;
    zb_put_int(&back, 0x06064b50, 4);
    zb_put_int(&back, 44, 8);
    zb_put_int(&back, 0x002d031e, 4);
    zb_put_int(&back, 0, 8);
    zb_put_int(&back, 2, 8);
    zb_put_int(&back, 2, 8);
    zb_put_int(&back, end64 - directory, 8);
    zb_put_int(&back, directory, 8);
    zb_put_int(&back, 0x07064b50, 4);
    zb_put_int(&back, 0, 4);
    zb_put_int(&back, end64, 8);
    zb_put_int(&back, 1, 4);
    zb_put_int(&back, 0x06054b50, 4);
    zb_put_int(&back, 0, 4);
    zb_put_int(&back, 2, 2);
    zb_put_int(&back, 2, 2);
    zb_put_int(&back, end64 - directory, 4);
    zb_put_int(&back, UINT32_MAX, 4);
    zb_put_int(&back, 0, 2);
    memcpy(s.front, front.bytes, s.front_len = front.len);
    memcpy(s.back, back.bytes, s.back_len = back.len);
    free(front.bytes);
    free(back.bytes);
    return s;
}

static void zip_reader__zip64_sizes_and_offsets_are_read(void **state)
{
    (void)state;
    sparse s = make_sparse();
    assert_int_equal(s.payload % 64, 0);
    assert_int_equal(s.version_data % 64, 0);
    dcp__source src = {.read = read_sparse, .size = s.back_at + s.back_len, .user = &s};
    dcp_error err = DCP_ERROR_INIT;
    dcp__zip z;
    assert_int_equal(dcp__zip_open(ctx(), &src, false, &z, &err), DCP_OK);
    dcp__zip_member *m = dcp__zip_find(&z, "data/0");
    assert_non_null(m);
    assert_int_equal(m->data, s.payload);
    assert_int_equal(m->bytes, HUGE_BYTES);
    assert_int_equal(m->full_bytes, HUGE_BYTES);
    m = dcp__zip_find(&z, "version");
    assert_non_null(m);
    assert_int_equal(m->data, s.version_data);
    assert_int_equal(m->bytes, 2);
    assert_true(s.bytes_read < 4096);
    dcp__zip_reset(&z);
    /* The wide offset is one byte off. */
    uint8_t *offset = s.back + s.back_len - 98 - 8;
    dcp__store64(offset, dcp__load64(offset) + 1);
    assert_int_equal(dcp__zip_open(ctx(), &src, false, &z, &err), DCP_FORMAT);
}

/* ---- out of memory, mutations ---- */

static dcp_status open_and_read_all(dcp_context *c, void *user, dcp_error *err)
{
    const zb_zip *bytes = user;
    dcp__source src = dcp__source_memory(bytes->bytes, bytes->len);
    dcp__zip z;
    dcp_status st = dcp__zip_open(c, &src, false, &z, err);
    if (st) {
        return st;
    }
    for (size_t i = 0; !st && i < z.n_members; i++) {
        uint8_t *out;
        size_t n;
        st = dcp__zip_read(c, &src, &z.members[i], 1 << 20, &out, &n, err);
        if (!st) {
            dcp__free(c, out);
        }
    }
    dcp__zip_reset(&z);
    return st;
}

static void zip_reader__every_failing_allocation_is_reported(void **state)
{
    (void)state;
    char names[20][16];
    zb_member members[20];
    for (size_t i = 0; i < 20; i++) {
        snprintf(names[i], sizeof names[i], "a/m%zu", i);
        members[i] = (zb_member){names[i], text, sizeof text - 1, i % 4 == 0};
    }
    zb_zip z = zb_build(members, 20, &(zb_opts){0});
    /* A directory out of order needs memory to sort. */
    uint32_t h0 = dcp__load32(z.bytes + z.entry[1] + 42), h1 = dcp__load32(z.bytes + z.entry[2] + 42);
    dcp__store32(z.bytes + z.entry[1] + 42, h1);
    dcp__store32(z.bytes + z.entry[2] + 42, h0);
    assert_true(failing_alloc_walk(open_and_read_all, &z) > 20);
    free(z.bytes);
}

static uint64_t next_random(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

static void zip_reader__random_changes_never_break_it(void **state)
{
    (void)state;
    uint64_t seed = 20240917, s = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    zb_member members[] = {plain[0], plain[1], {"archive/z", text, sizeof text - 1, 1}, plain[3]};
    for (int round = 0; round < 20000; round++) {
        zb_zip z = zb_build(members, 4, &(zb_opts){.with_zip64_end = round & 1, .without_crc = 1});
        size_t changes = 1 + next_random(&s) % 3;
        for (size_t i = 0; i < changes; i++) {
            /* Most of them behind the payloads. */
            size_t low = next_random(&s) % 4 ? z.directory : 0;
            z.bytes[low + next_random(&s) % (z.len - low)] = (uint8_t)next_random(&s);
        }
        uint8_t *exact = malloc(z.len);
        memcpy(exact, z.bytes, z.len);
        zb_zip copy = {.bytes = exact, .len = z.len};
        open_and_read_all(ctx(), &copy, NULL);
        free(exact);
        free(z.bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(zip_reader__every_writers_form_is_read),
        cmocka_unit_test(zip_reader__data_position_comes_from_the_local_header),
        cmocka_unit_test(zip_reader__deflated_members_are_inflated),
        cmocka_unit_test(zip_reader__inflated_size_must_be_the_directorys),
        cmocka_unit_test(zip_reader__broken_deflate_data_fails),
        cmocka_unit_test(zip_reader__wrong_crc_is_a_checksum_error),
        cmocka_unit_test(zip_reader__truncated_anywhere_fails),
        cmocka_unit_test(zip_reader__each_lying_field_is_refused),
        cmocka_unit_test(zip_reader__classic_end_record_is_checked_too),
        cmocka_unit_test(zip_reader__huge_entry_count_allocates_nothing),
        cmocka_unit_test(zip_reader__duplicate_names_are_refused),
        cmocka_unit_test(zip_reader__members_in_any_order_are_read),
        cmocka_unit_test(zip_reader__overlapping_members_are_refused),
        cmocka_unit_test(zip_reader__names_outside_the_directory_are_refused),
        cmocka_unit_test(zip_reader__zip64_sizes_and_offsets_are_read),
        cmocka_unit_test(zip_reader__every_failing_allocation_is_reported),
        cmocka_unit_test(zip_reader__random_changes_never_break_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
