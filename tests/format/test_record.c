/* Records and torch.save files: where the elements of tensors are, and what is refused. */
#include "format/record.h"

#include <glob.h>
#include <jansson.h>
#include <openssl/evp.h>
#include <stdio.h>

#include "base/hash.h"
#include "format/record_internal.h"
#include "state/strided.h"
#include "state/value.h"
#include "support/failing_alloc.h"
#include "support/golden_records.h"
#include "support/zip_builder.h"

static dcp_context *ctx(void)
{
    return dcp__context(NULL);
}

/* ---- elements of a payload, in the plainest way ---- */

/* Row-major little-endian elements; NULL without any. */
static uint8_t *elements(const uint8_t *bytes, const dcp__payload *p, size_t *len)
{
    size_t esz = dcp_dtype_bytes(p->dtype), n = 1;
    for (int d = 0; d < p->ndim; d++) {
        n *= (size_t)p->sizes[d];
    }
    uint8_t *out = malloc(n * esz + 1);
    for (size_t i = 0; i < n; i++) {
        size_t rest = i, at = 0;
        for (int d = p->ndim; d-- > 0;) {
            at += rest % (size_t)p->sizes[d] * (size_t)p->strides[d];
            rest /= (size_t)p->sizes[d];
        }
        assert_true((at + 1) * esz <= p->span_bytes);
        memcpy(out + i * esz, bytes + p->offset + at * esz, esz);
    }
    if (p->is_big_endian) {
        dcp__swap_elements(out, n, p->dtype);
    }
    if (p->is_conj) {
        dcp__conjugate(out, n, p->dtype);
    }
    if (p->is_neg) {
        dcp__negate(out, n, p->dtype);
    }
    *len = n * esz;
    return out;
}

static void sha256_hex(const void *bytes, size_t len, char hex[65])
{
    unsigned char digest[32];
    unsigned n;
    assert_int_equal(EVP_Digest(bytes, len, digest, &n, EVP_sha256(), NULL), 1);
    for (unsigned i = 0; i < n; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
}

/* "float32 [3, 5] <sha256>" */
static void describe(const uint8_t *bytes, const dcp__payload *p, char *out, size_t cap)
{
    size_t len, at;
    char hex[65];
    uint8_t *data = elements(bytes, p, &len);
    sha256_hex(data, len, hex);
    free(data);
    at = (size_t)snprintf(out, cap, "%s [", dcp_dtype_name(p->dtype));
    for (int d = 0; d < p->ndim; d++) {
        at += (size_t)snprintf(out + at, cap - at, d ? ", %lld" : "%lld", (long long)p->sizes[d]);
    }
    snprintf(out + at, cap - at, "] %s", hex);
}

static void describe_expected(const json_t *t, char *out, size_t cap)
{
    size_t i, at = (size_t)snprintf(out, cap, "%s [", json_string_value(json_object_get(t, "dtype")));
    json_t *size;
    json_array_foreach(json_object_get(t, "shape"), i, size)
    {
        at += (size_t)snprintf(out + at, cap - at, i ? ", %lld" : "%lld", (long long)json_integer_value(size));
    }
    snprintf(out + at, cap - at, "] %s", json_string_value(json_object_get(t, "sha256")));
}

/* ---- golden records ---- */

typedef struct expected {
    char text[256];
    size_t met;
} expected;

typedef struct golden_case {
    expected tensors[64];
    size_t n_tensors, records, objects;
    bool check; /* chunks of sharded tensors have other hashes than the whole */
} golden_case;

static json_t *load_expected(const char *case_dir)
{
    char path[512];
    snprintf(path, sizeof path, "%s/expect.json", case_dir);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

static void meet(golden_case *g, const char *text)
{
    for (size_t i = 0; i < g->n_tensors; i++) {
        if (strcmp(g->tensors[i].text, text) == 0) {
            g->tensors[i].met++;
            return;
        }
    }
    if (g->check) {
        fail_msg("not expected: %s", text);
    }
}

static bool is_tensor_pickle(const golden_archive *a)
{
    static const char head[] = "\x80\2ctorch._utils\n_rebuild_tensor_v";
    return a->pickle_len > sizeof head && memcmp(a->pickle, head, sizeof head - 1) == 0;
}

/* The generic way must say the same as the fast one. */
static void expect_same_as_archive(const dcp__source *src, const dcp__payload *p)
{
    dcp__archive a;
    dcp__payload q;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp__archive_open(ctx(), src, &a, &err), DCP_OK);
    assert_int_equal(dcp__archive_payload(&a, a.object.value, &q, &err), DCP_OK);
    assert_int_equal(p->dtype, q.dtype);
    assert_int_equal(p->ndim, q.ndim);
    assert_memory_equal(p->sizes, q.sizes, (size_t)p->ndim * 8);
    assert_memory_equal(p->strides, q.strides, (size_t)p->ndim * 8);
    assert_int_equal(p->offset, q.offset);
    assert_int_equal(p->span_bytes, q.span_bytes);
    assert_int_equal(p->storage.offset, q.storage.offset);
    assert_int_equal(p->storage.bytes, q.storage.bytes);
    assert_int_equal(p->storage.crc, q.storage.crc);
    dcp__archive_reset(&a);
}

static void check_record(const golden_archive *g, void *user)
{
    golden_case *c = user;
    dcp__source src = dcp__source_memory(g->bytes, g->len);
    dcp_error err = DCP_ERROR_INIT;
    dcp__payload p;
    dcp__tensor_pickle fast;
    c->records++;
    if (!is_tensor_pickle(g)) {
        dcp__archive a;
        assert_int_equal(dcp__archive_open(ctx(), &src, &a, &err), DCP_OK);
        dcp__archive_reset(&a);
        dcp_status st = dcp__record_payload(ctx(), &src, &p, &err);
        assert_int_equal(st, DCP_FORMAT);
        c->objects++;
        return;
    }
    assert_true(dcp__tensor_pickle_match(g->pickle, g->pickle_len, &fast));
    if (dcp__record_payload(ctx(), &src, &p, &err) != DCP_OK) {
        fail_msg("%s: %s", g->path, err.message);
    }
    assert_int_equal(p.storage.offset, g->storages[0] - g->bytes);
    assert_int_equal(p.storage.bytes, g->storage_bytes[0]);
    assert_true(p.storage.has_crc);
    assert_int_equal(p.storage.crc, dcp__crc32(0, g->storages[0], g->storage_bytes[0]));
    expect_same_as_archive(&src, &p);
    char text[256];
    describe(g->bytes, &p, text, sizeof text);
    meet(c, text);
}

static void record_payload__golden_tensors_have_the_expected_bytes(void **state)
{
    (void)state;
    glob_t cases;
    size_t records = 0;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/*", GLOB_ONLYDIR, NULL, &cases), 0);
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        const char *dir = cases.gl_pathv[i], *name = strrchr(dir, '/');
        char pattern[512];
        /* Not torch.save archives in the end. */
        if (strstr(name, "/hf") || strstr(name, "safetensors_records") || strstr(name, "torch_save")) {
            continue;
        }
        golden_case c = {.check = !strstr(name, "/sharded") && !strstr(name, "rank_local")};
        json_t *root = load_expected(dir), *t;
        const char *fqn;
        json_object_foreach(json_object_get(root, "tensors"), fqn, t)
        {
            assert_true(c.n_tensors < 64);
            describe_expected(t, c.tensors[c.n_tensors++].text, sizeof c.tensors[0].text);
        }
        snprintf(pattern, sizeof pattern, "%s/ckpt/*", dir);
        golden_each(pattern, check_record, &c);
        for (size_t k = 0; c.check && k < c.n_tensors; k++) {
            if (!c.tensors[k].met) {
                fail_msg("%s: no record is %s", dir, c.tensors[k].text);
            }
        }
        records += c.records;
        json_decref(root);
    }
    globfree(&cases);
    /* As many as formats.md 3 says it was written from, less those in safetensors directories. */
    assert_true(records > 600);
}

/* The value below v under a path that is joined by dots; keys may hold dots themselves. */
static const dcp_value *at_fqn(const dcp_value *v, const char *fqn)
{
    if (!*fqn) {
        return v;
    }
    for (size_t i = 0; i < dcp_value_count(v); i++) {
        char name[64];
        dcp_key key = dcp_dict_key(v, i);
        if (dcp_value_kind(v) == DCP_KIND_LIST || key.is_int) {
            snprintf(name, sizeof name, "%lld", key.is_int ? (long long)key.integer : (long long)i);
        } else {
            snprintf(name, sizeof name, "%s", key.string.ptr ? key.string.ptr : "");
        }
        size_t n = strlen(name);
        if (strncmp(fqn, name, n) == 0 && (fqn[n] == '.' || !fqn[n])) {
            const dcp_value *found = at_fqn(dcp_value_at(v, i), fqn + n + (fqn[n] == '.'));
            if (found) {
                return found;
            }
        }
    }
    return NULL;
}

static void archive__golden_torch_save_files_have_the_expected_tensors(void **state)
{
    (void)state;
    glob_t cases;
    assert_int_equal(glob(DCP_TEST_DIR "/golden/*/torch_save", 0, NULL, &cases), 0);
    assert_int_equal(cases.gl_pathc, 5);
    for (size_t i = 0; i < cases.gl_pathc; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/file.pt", cases.gl_pathv[i]);
        size_t len, met = 0;
        uint8_t *bytes = golden_read_file(path, &len);
        dcp__source src = dcp__source_memory(bytes, len);
        dcp_error err = DCP_ERROR_INIT;
        dcp__archive a;
        assert_int_equal(dcp__archive_open(ctx(), &src, &a, &err), DCP_OK);
        json_t *root = load_expected(cases.gl_pathv[i]), *t;
        const char *fqn;
        json_object_foreach(json_object_get(root, "tensors"), fqn, t)
        {
            dcp__payload p;
            char text[256], want[256];
            const dcp_value *v = at_fqn(a.object.value, fqn);
            assert_non_null(v);
            assert_int_equal(dcp__archive_payload(&a, v, &p, &err), DCP_OK);
            describe(bytes, &p, text, sizeof text);
            describe_expected(t, want, sizeof want);
            assert_string_equal(text, want);
            met++;
        }
        assert_true(met >= 2);
        json_decref(root);
        dcp__archive_reset(&a);
        free(bytes);
    }
    globfree(&cases);
}

/* ---- the annotated record of formats.md 3.10 ---- */

/* "504b0304 41" and so on; blanks do not count. */
static void put_hex(zb_zip *z, const char *hex)
{
    for (; *hex; hex++) {
        unsigned byte;
        if (*hex != ' ') {
            assert_int_equal(sscanf(hex, "%2x", &byte), 1);
            zb_put_int(z, byte, 1);
            hex++;
        }
    }
}

static void put_text(zb_zip *z, const char *text)
{
    zb_put(z, text, strlen(text));
}

static void put_fill(zb_zip *z, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        zb_put(z, "Z", 1);
    }
}

typedef struct annotated_member {
    const char *name;
    uint32_t header;
    uint32_t data;
    const char *content; /* NULL: the pickle */
    const char *crc;     /* as bytes */
} annotated_member;

static const char annotated_pickle[] =
    "8002 63 746f7263682e5f7574696c73 0a 5f72656275696c645f74656e736f725f7632 0a 7100 28 28"
    "58 07000000 73746f72616765 7101  63 746f726368 0a 466c6f617453746f72616765 0a 7102"
    "58 01000000 30 7103  58 03000000 637075 7104  4b01 74 7105 51  4b00 29 29 89"
    "63 636f6c6c656374696f6e73 0a 4f72646572656444696374 0a 7106 29 52 7107  74 7108 52 7109 2e";

static const annotated_member annotated[] = {
    {"archive/data.pkl", 0, 64, NULL, "0010c095"},
    {"archive/.format_version", 222, 320, "1", "b7efdc83"},
    {"archive/.storage_alignment", 337, 448, "64", "3f7771e9"},
    {"archive/byteorder", 466, 576, "little", "853de319"},
    {"archive/data/0", 598, 704, "\0\0pA", "ecd7a00f"},
    {"archive/version", 724, 832, "3\n", "d19e6755"},
    {"archive/.data/serialization_id", 850, 960, "1572819951185464302605771973395991381486", "55143f72"},
};

static zb_zip annotated_record(void)
{
    zb_zip z = {0};
    uint32_t sizes[] = {142, 1, 2, 6, 4, 2, 40};
    for (size_t i = 0; i < 7; i++) {
        const annotated_member *m = &annotated[i];
        assert_int_equal(z.len, m->header);
        put_hex(&z, "504b0304 0000 0808 0000 0000 0000 00000000 00000000 00000000");
        size_t extra = m->data - m->header - 30 - strlen(m->name);
        zb_put_int(&z, strlen(m->name), 2);
        zb_put_int(&z, extra, 2);
        put_text(&z, m->name);
        put_hex(&z, "4642");
        zb_put_int(&z, extra - 4, 2);
        put_fill(&z, extra - 4);
        assert_int_equal(z.len, m->data);
        m->content ? zb_put(&z, m->content, sizes[i]) : put_hex(&z, annotated_pickle);
        put_hex(&z, "504b0708");
        put_hex(&z, m->crc);
        zb_put_int(&z, sizes[i], 4);
        zb_put_int(&z, sizes[i], 4);
    }
    for (size_t i = 0; i < 7; i++) {
        put_hex(&z, "504b0102 0000 0000 0808 0000 0000 0000");
        put_hex(&z, annotated[i].crc);
        zb_put_int(&z, sizes[i], 4);
        zb_put_int(&z, sizes[i], 4);
        zb_put_int(&z, strlen(annotated[i].name), 2);
        put_hex(&z, "0000 0000 0000 0000 00000000");
        zb_put_int(&z, annotated[i].header, 4);
        put_text(&z, annotated[i].name);
    }
    put_hex(&z, "504b0606 2c00000000000000 1e03 2d00 00000000 00000000 0700000000000000 0700000000000000"
                "cf01000000000000 f803000000000000");
    put_hex(&z, "504b0607 00000000 c705000000000000 01000000");
    put_hex(&z, "504b0506 0000 0000 0700 0700 cf010000 f8030000 0000");
    assert_int_equal(z.len, 1577);
    return z;
}

static void record_payload__annotated_record_is_read(void **state)
{
    (void)state;
    zb_zip z = annotated_record();
    dcp__source src = dcp__source_memory(z.bytes, z.len);
    dcp__payload p;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp__record_payload(ctx(), &src, &p, &err), DCP_OK);
    assert_int_equal(p.dtype, DCP_FLOAT32);
    assert_int_equal(p.ndim, 0);
    assert_int_equal(p.offset, 704);
    assert_int_equal(p.span_bytes, 4);
    assert_int_equal(p.storage.crc, 0x0fa0d7ec);
    assert_int_equal(p.storage.offset, 704);
    assert_true(p.storage.has_crc);
    assert_false(p.storage.is_deflated || p.is_big_endian || p.is_conj || p.is_neg);
    float value;
    memcpy(&value, z.bytes + p.offset, 4);
    assert_true(value == 15.0f);
    free(z.bytes);
}

static void record_payload__truncated_anywhere_fails(void **state)
{
    (void)state;
    zb_zip z = annotated_record();
    for (size_t n = 0; n < z.len; n++) {
        uint8_t *cut = malloc(n ? n : 1);
        memcpy(cut, z.bytes, n);
        dcp__source src = dcp__source_memory(cut, n);
        dcp__payload p;
        assert_int_equal(dcp__record_payload(ctx(), &src, &p, NULL), DCP_FORMAT);
        free(cut);
    }
    free(z.bytes);
}

/* ---- records as other settings of torch.save make them ---- */

typedef struct fixture {
    uint8_t *bytes;
    size_t len;
    dcp__source src;
} fixture;

static fixture load(const char *folder, const char *name)
{
    char path[512];
    fixture f;
    snprintf(path, sizeof path, DCP_TEST_DIR "/data/%s/%s.pt", folder, name);
    f.bytes = golden_read_file(path, &f.len);
    f.src = dcp__source_memory(f.bytes, f.len);
    return f;
}

/* Values of a float32 (or complex64: pairs) tensor in row-major order. */
static void expect_floats(const char *name, const float *want, size_t n)
{
    fixture f = load("records", name);
    dcp_error err = DCP_ERROR_INIT;
    dcp__payload p;
    if (dcp__record_payload(ctx(), &f.src, &p, &err) != DCP_OK) {
        fail_msg("%s: %s", name, err.message);
    }
    size_t len;
    uint8_t *got = elements(f.bytes, &p, &len);
    assert_int_equal(len, n * 4);
    assert_memory_equal(got, want, len);
    free(got);
    free(f.bytes);
}

static void record_payload__every_form_of_a_plain_tensor_is_read(void **state)
{
    (void)state;
    static const float z[] = {0, 1, 2, 3, 4, 5};
    static const char *const same[] = {"plain",        "parameter",    "requires_grad", "no_crc",         "big_endian",
                                       "other_writer", "other_prefix", "reversed",      "fewest_members", "protocol_4"};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        expect_floats(same[i], z, 6);
    }
    expect_floats("transposed", (const float[]){0, 3, 1, 4, 2, 5}, 6);
    expect_floats("offset_view", (const float[]){4, 5}, 2);
}

/* z = 0..5, c = z - zi, conj(c) = z + zi. */
static void record_payload__conj_and_neg_bits_are_reported(void **state)
{
    (void)state;
    expect_floats("conj", (const float[]){0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5}, 12);
    expect_floats("neg", (const float[]){-0.0f, -1, -2, -3, -4, -5}, 6);
    expect_floats("imag_of_conj", (const float[]){0, 1, 2, 3, 4, 5}, 6);
    fixture f = load("records", "conj");
    dcp__payload p;
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_true(p.is_conj && !p.is_neg);
    free(f.bytes);
    f = load("records", "neg");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_true(!p.is_conj && p.is_neg);
    free(f.bytes);
}

static void record_payload__facts_of_the_storage_are_reported(void **state)
{
    (void)state;
    dcp__payload p;
    fixture f = load("records", "no_crc");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_false(p.storage.has_crc);
    free(f.bytes);
    f = load("records", "big_endian");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_true(p.is_big_endian);
    free(f.bytes);
    f = load("records", "float8");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_int_equal(p.dtype, DCP_FLOAT8_E4M3FN);
    free(f.bytes);
    f = load("records", "deflated");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_true(p.storage.is_deflated);
    assert_int_equal(p.storage.full_bytes, 24);
    dcp__zip_member m = {
        .data = p.storage.offset,
        .bytes = p.storage.bytes,
        .full_bytes = p.storage.full_bytes,
        .crc = p.storage.crc,
        .method = DCP__ZIP_DEFLATED,
    };
    uint8_t *out;
    size_t n;
    assert_int_equal(dcp__zip_read(ctx(), &f.src, &m, 100, &out, &n, NULL), DCP_OK);
    assert_memory_equal(out, ((const float[]){0, 1, 2, 3, 4, 5}), 24);
    dcp__free(ctx(), out);
    free(f.bytes);
}

static void record_payload__what_is_no_plain_tensor_is_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"quantised", "sparse", "meta", "subclass", "big_endian_uint16"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        fixture f = load("records", names[i]);
        dcp__payload p;
        assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_UNSUPPORTED);
        free(f.bytes);
    }
    fixture f = load("objects", "scalars");
    dcp__payload p;
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_FORMAT);
    free(f.bytes);
}

/* ---- members: formats.md 3.11 ---- */

typedef struct opcodes {
    uint8_t bytes[2048];
    size_t len;
} opcodes;

static void op(opcodes *o, const void *bytes, size_t n)
{
    assert_true(o->len + n <= sizeof o->bytes);
    memcpy(o->bytes + o->len, bytes, n);
    o->len += n;
}
#define OP(o, literal) op(o, literal, sizeof(literal) - 1)

static void op_int(opcodes *o, int64_t v)
{
    OP(o, "\x8a\x08");
    op(o, &v, 8);
}

static void op_ints(opcodes *o, const int64_t *v, size_t n)
{
    OP(o, "(");
    for (size_t i = 0; i < n; i++) {
        op_int(o, v[i]);
    }
    OP(o, "t");
}

typedef struct recipe {
    const char *fn;      /* "_rebuild_tensor_v2" */
    const char *storage; /* "torch\nFloatStorage" */
    int64_t elems, storage_offset;
    size_t ndim, n_strides;
    int64_t sizes[70], strides[70];
    const char *dtype; /* "torch\nfloat32" for v3 */
    bool is_mappable;  /* as the fast way takes it; else a NOP-like difference sends it the other way */
} recipe;

static opcodes cook(const recipe *r)
{
    opcodes o = {.len = 0};
    OP(&o, "\x80\2ctorch._utils\n");
    op(&o, r->fn, strlen(r->fn));
    OP(&o, "\n((X\7\0\0\0storagec");
    op(&o, r->storage, strlen(r->storage));
    OP(&o, "\nX\1\0\0\0"
           "0X\3\0\0\0cpu");
    op_int(&o, r->elems);
    OP(&o, "tQ");
    op_int(&o, r->storage_offset);
    op_ints(&o, r->sizes, r->ndim);
    op_ints(&o, r->strides, r->n_strides);
    if (r->is_mappable) {
        OP(&o, "\x89"
               "ccollections\nOrderedDict\n)R");
    } else {
        OP(&o, "\x89"
               "N");
    }
    if (r->dtype) {
        OP(&o, "c");
        op(&o, r->dtype, strlen(r->dtype));
        OP(&o, "\n");
    }
    OP(&o, "tR.");
    return o;
}

static const recipe good_recipe = {
    .fn = "_rebuild_tensor_v2",
    .storage = "torch\nFloatStorage",
    .elems = 6,
    .ndim = 2,
    .n_strides = 2,
    .sizes = {2, 3},
    .strides = {3, 1},
};

/* A record with that pickle and a data/0 of `bytes` zeros. */
static dcp_status open_record(const opcodes *o, size_t bytes, dcp__payload *p, dcp_error *err)
{
    static const uint8_t zeros[4096];
    assert_true(bytes <= sizeof zeros);
    zb_member members[] = {
        {"archive/data.pkl", o->bytes, o->len, 0}, {"archive/data/0", zeros, bytes, 0}, {"archive/version", "3\n", 2, 0}};
    zb_zip z = zb_build(members, 3, &(zb_opts){.with_zip64_end = 1});
    uint8_t *exact = malloc(z.len);
    memcpy(exact, z.bytes, z.len);
    dcp__source src = dcp__source_memory(exact, z.len);
    dcp_status st = dcp__record_payload(ctx(), &src, p, err);
    free(exact);
    free(z.bytes);
    return st;
}

/* Both ways give the same answer. */
static void expect_recipe(recipe r, size_t bytes, dcp_status status)
{
    for (int way = 0; way < 2; way++) {
        r.is_mappable = way == 0;
        opcodes o = cook(&r);
        dcp__payload p;
        dcp__tensor_pickle fast;
        assert_true(dcp__tensor_pickle_match(o.bytes, o.len, &fast) ==
                    (way == 0 && r.ndim <= DCP_MAX_NDIM && r.ndim == r.n_strides && r.elems >= 0));
        dcp_error err = DCP_ERROR_INIT;
        dcp_status st = open_record(&o, bytes, &p, &err);
        if (st != status) {
            fail_msg("way %d: %s (%s)", way, dcp_status_name(st), err.message);
        }
        if (!st) {
            assert_true(p.storage.full_bytes == bytes && p.span_bytes <= bytes);
        }
    }
}

static void record_payload__views_must_stay_in_their_storage(void **state)
{
    (void)state;
    recipe r = good_recipe;
    expect_recipe(r, 24, DCP_OK);
    expect_recipe(r, 20, DCP_FORMAT);
    expect_recipe(r, 28, DCP_FORMAT);
    r.elems = 7;
    expect_recipe(r, 28, DCP_OK);
    expect_recipe(r, 24, DCP_FORMAT);
    r = good_recipe;
    r.elems = 5;
    expect_recipe(r, 20, DCP_FORMAT);
    r.elems = -1;
    expect_recipe(r, 24, DCP_FORMAT);
    r.elems = INT64_MAX;
    expect_recipe(r, 24, DCP_FORMAT);
    r = good_recipe;
    r.storage_offset = 1;
    expect_recipe(r, 24, DCP_FORMAT);
    r.storage_offset = -1;
    expect_recipe(r, 24, DCP_FORMAT);
    r.storage_offset = INT64_MAX;
    expect_recipe(r, 24, DCP_FORMAT);
    r = good_recipe;
    r.strides[0] = 4;
    expect_recipe(r, 24, DCP_FORMAT);
    r.strides[0] = -3;
    expect_recipe(r, 24, DCP_FORMAT);
    r.strides[0] = INT64_MAX;
    expect_recipe(r, 24, DCP_FORMAT);
    r.strides[0] = 0;
    expect_recipe(r, 24, DCP_OK); /* as as_strided makes it */
    r = good_recipe;
    r.sizes[0] = -2;
    expect_recipe(r, 24, DCP_FORMAT);
    r.sizes[0] = INT64_MAX;
    expect_recipe(r, 24, DCP_FORMAT);
    r.strides[0] = r.strides[1] = 0;
    expect_recipe(r, 24, DCP_FORMAT);
    r.sizes[0] = 0;
    expect_recipe(r, 24, DCP_OK);
    r = good_recipe;
    r.n_strides = 1;
    expect_recipe(r, 24, DCP_FORMAT);
    r.ndim = r.n_strides = 65;
    for (size_t i = 0; i < 65; i++) {
        r.sizes[i] = r.strides[i] = 1;
    }
    expect_recipe(r, 24, DCP_FORMAT);
    r.ndim = r.n_strides = 64;
    expect_recipe(r, 24, DCP_OK);
}

static void expect_dtype(const char *fn, const char *storage, const char *dtype, size_t esz, dcp_dtype want)
{
    recipe r = good_recipe;
    r.fn = fn;
    r.storage = storage;
    r.dtype = dtype;
    r.elems = strstr(storage, "Untyped") ? (int64_t)(6 * esz) : 6;
    for (int way = 0; way < 2; way++) {
        r.is_mappable = way == 0;
        opcodes o = cook(&r);
        dcp__payload p;
        assert_int_equal(open_record(&o, 6 * esz, &p, NULL), want ? DCP_OK : DCP_UNSUPPORTED);
        if (want) {
            assert_int_equal(p.dtype, want);
            assert_int_equal(p.span_bytes, 6 * esz);
        }
    }
}

static void record_payload__dtypes_come_from_class_or_argument(void **state)
{
    (void)state;
    expect_dtype("_rebuild_tensor_v2", "torch.cuda\nHalfStorage", NULL, 2, DCP_FLOAT16);
    expect_dtype("_rebuild_tensor_v2", "torch\nComplexDoubleStorage", NULL, 16, DCP_COMPLEX128);
    expect_dtype("_rebuild_tensor_v2", "torch.storage\nUntypedStorage", NULL, 1, DCP_UINT8);
    expect_dtype("_rebuild_tensor_v2", "torch\nQInt32Storage", NULL, 4, DCP_DTYPE_NONE);
    expect_dtype("_rebuild_tensor_v2", "torch\nStringStorage", NULL, 4, DCP_DTYPE_NONE);
    expect_dtype("_rebuild_tensor_v2", "os\nFloatStorage", NULL, 4, DCP_DTYPE_NONE);
    expect_dtype("_rebuild_tensor_v3", "torch.storage\nUntypedStorage", "torch\nuint64", 8, DCP_UINT64);
    expect_dtype("_rebuild_tensor_v3", "torch.storage\nUntypedStorage", "torch\nbcomplex32", 4, DCP_BCOMPLEX32);
    expect_dtype("_rebuild_tensor_v3", "torch.storage\nUntypedStorage", "torch\nquint8", 1, DCP_DTYPE_NONE);
    expect_dtype("_rebuild_tensor_v3", "torch.storage\nUntypedStorage", "numpy\nfloat32", 4, DCP_DTYPE_NONE);
}

/* The plain record with members left out, added or changed. */
static void expect_members(const zb_member *extra, size_t n_extra, dcp_status status)
{
    recipe r = good_recipe;
    r.is_mappable = true;
    opcodes o = cook(&r);
    static const uint8_t zeros[24];
    zb_member members[8] = {{"archive/data.pkl", o.bytes, o.len, 0}, {"archive/data/0", zeros, 24, 0}};
    for (size_t i = 0; i < n_extra; i++) {
        members[2 + i] = extra[i];
    }
    for (int with_zip64 = 0; with_zip64 < 2; with_zip64++) {
        zb_zip z = zb_build(members, 2 + n_extra, &(zb_opts){.with_zip64_end = with_zip64});
        dcp__source src = dcp__source_memory(z.bytes, z.len);
        dcp__payload p;
        assert_int_equal(dcp__record_payload(ctx(), &src, &p, NULL), status);
        free(z.bytes);
    }
}

static void record_payload__version_must_be_1_to_10(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        dcp_status status;
    } versions[] = {
        {"3\n", DCP_OK},  {"1", DCP_OK},     {"10", DCP_OK},     {"0", DCP_FORMAT},   {"11", DCP_FORMAT},
        {"", DCP_FORMAT}, {"x", DCP_FORMAT}, {"-1", DCP_FORMAT}, {"3 x", DCP_FORMAT}, {"99999999999999999999", DCP_FORMAT}};
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        zb_member m = {"archive/version", versions[i].text, strlen(versions[i].text), 0};
        expect_members(&m, 1, versions[i].status);
        m.name = "archive/.data/version";
        expect_members(&m, 1, versions[i].status);
        m.is_deflated = 1;
        expect_members(&m, 1, versions[i].status ? versions[i].status : DCP_OK);
    }
    expect_members(NULL, 0, DCP_FORMAT);
}

static void record_payload__byte_order_must_be_little_or_big(void **state)
{
    (void)state;
    static const char *const texts[] = {"little", "big", "", "Little", "littl", "little ", "bigger", "little endian"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        zb_member m[] = {{"archive/version", "3", 1, 0}, {"archive/byteorder", texts[i], strlen(texts[i]), 0}};
        expect_members(m, 2, i < 2 ? DCP_OK : DCP_FORMAT);
    }
}

static void record_payload__missing_pickle_or_storage_is_named(void **state)
{
    (void)state;
    zb_member members[] = {{"archive/version", "3", 1, 0}, {"archive/data/1", "xxxx", 4, 0}};
    zb_zip z = zb_build(members, 2, &(zb_opts){0});
    dcp__source src = dcp__source_memory(z.bytes, z.len);
    dcp__payload p;
    assert_int_equal(dcp__record_payload(ctx(), &src, &p, NULL), DCP_FORMAT);
    free(z.bytes);
    recipe r = good_recipe;
    r.is_mappable = true;
    opcodes o = cook(&r);
    zb_member without[] = {
        {"archive/version", "3", 1, 0}, {"archive/data/1", "xxxx", 4, 0}, {"archive/data.pkl", o.bytes, o.len, 0}};
    z = zb_build(without, 3, &(zb_opts){0});
    src = dcp__source_memory(z.bytes, z.len);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp__record_payload(ctx(), &src, &p, &err), DCP_FORMAT);
    assert_non_null(strstr(err.message, "data/0"));
    free(z.bytes);
}

static void record_payload__wrong_crc_of_the_pickle_fails(void **state)
{
    (void)state;
    fixture f = load("records", "plain");
    dcp__payload p;
    f.bytes[64 + 60] ^= 1;
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_CHECKSUM);
    free(f.bytes);
}

/* ---- how much is read ---- */

/* A record of any size: everything but its ends is zero. */
typedef struct counted {
    const uint8_t *front, *back;
    size_t front_len, back_len;
    uint64_t back_at;
    size_t reads;
    uint64_t bytes;
} counted;

static dcp_status read_counted(const dcp__source *self, uint64_t offset, void *buf, size_t n, dcp_error *err)
{
    (void)err;
    counted *c = self->user;
    c->reads++;
    c->bytes += n;
    for (size_t i = 0; i < n; i++) {
        uint64_t at = offset + i;
        ((uint8_t *)buf)[i] = at < c->front_len ? c->front[at] : at >= c->back_at ? c->back[at - c->back_at] : 0;
    }
    return DCP_OK;
}

static void record_payload__reads_both_ends_only(void **state)
{
    (void)state;
    /* 3.5: V = A(D + N + 16 + 49), length V + 745. The fixture has N = 24. Longer by a multiple of 64, so only offsets move. */
    static const uint64_t more[] = {0, 1u << 20, (uint64_t)3 << 30};
    for (size_t i = 0; i < 3; i++) {
        fixture f = load("records", "plain");
        zb_zip z = {.bytes = f.bytes, .len = f.len};
        size_t data = 704, split = data + 24;
        assert_memory_equal(f.bytes + data + 4, ((const float[]){1}), 4);
        uint64_t grow = more[i] / 64 * 64, n = (24 + grow) / 4;
        size_t directory = dcp__load32(z.bytes + z.len - 6);
        for (size_t e = directory; dcp__load32(z.bytes + e) == 0x02014b50; e += 46u + dcp__load16(z.bytes + e + 28)) {
            uint32_t header = dcp__load32(z.bytes + e + 42);
            if (header > data) {
                dcp__store32(z.bytes + e + 42, (uint32_t)(header + grow));
            } else if (dcp__load32(z.bytes + e + 20) == 24 && dcp__load16(z.bytes + e + 28) == 14) {
                dcp__store32(z.bytes + e + 20, (uint32_t)(24 + grow));
                dcp__store32(z.bytes + e + 24, (uint32_t)(24 + grow));
            } else if (header == 0) {
                dcp__store32(z.bytes + e + 16, 0); /* the pickle changes */
            }
        }
        dcp__store64(z.bytes + z.len - 98 + 48, directory + grow);
        dcp__store64(z.bytes + z.len - 42 + 8, z.len - 98 + grow);
        dcp__store32(z.bytes + z.len - 6, (uint32_t)(directory + grow));
        /* One row of as many elements as the storage has: BININT1 6 cannot hold it, so the pickle is written anew. */
        recipe r = good_recipe;
        r.is_mappable = true;
        r.elems = (int64_t)n;
        r.ndim = r.n_strides = 1;
        r.sizes[0] = (int64_t)n;
        r.strides[0] = 1;
        opcodes o = cook(&r);
        size_t e0 = directory;
        while (dcp__load32(z.bytes + e0 + 42) != 0) {
            e0 += 46u + dcp__load16(z.bytes + e0 + 28);
        }
        assert_true(64 + o.len < 320);
        memcpy(z.bytes + 64, o.bytes, o.len);
        dcp__store32(z.bytes + e0 + 20, (uint32_t)o.len);
        dcp__store32(z.bytes + e0 + 24, (uint32_t)o.len);
        counted c = {z.bytes, z.bytes + split, split, z.len - split, split + grow, 0, 0};
        dcp__source src = {.read = read_counted, .size = z.len + grow, .user = &c};
        dcp__payload p;
        dcp_error err = DCP_ERROR_INIT;
        if (dcp__record_payload(ctx(), &src, &p, &err) != DCP_OK) {
            fail_msg("%s", err.message);
        }
        assert_int_equal(p.offset, data);
        assert_int_equal(p.span_bytes, 24 + grow);
        assert_true(c.reads <= 2);
        assert_true(c.bytes <= 2048);
        free(f.bytes);
    }
}

/* ---- legacy files ---- */

static const dcp_value *item(const dcp__archive *a, const char *key)
{
    const dcp_value *v = dcp_dict_get_str(a->object.value, key);
    assert_non_null(v);
    return v;
}

static void expect_item(const fixture *f, const dcp__archive *a, const dcp_value *v, const void *want, size_t want_len)
{
    dcp__payload p;
    dcp_error err = DCP_ERROR_INIT;
    if (dcp__archive_payload(a, v, &p, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    size_t len;
    uint8_t *got = elements(f->bytes, &p, &len);
    assert_int_equal(len, want_len);
    assert_memory_equal(got, want, len);
    assert_false(p.storage.has_crc);
    free(got);
}

static void legacy__tensors_and_objects_are_read(void **state)
{
    (void)state;
    float base[12];
    for (int i = 0; i < 12; i++) {
        base[i] = (float)i;
    }
    fixture f = load("legacy", "tensor");
    dcp__payload p;
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_int_equal(p.ndim, 2);
    assert_memory_equal(f.bytes + p.offset, base, sizeof base);
    free(f.bytes);
    f = load("legacy", "object");
    dcp__archive a;
    int64_t step;
    assert_int_equal(dcp__archive_open(ctx(), &f.src, &a, NULL), DCP_OK);
    assert_true(a.is_legacy && !a.is_big_endian);
    assert_true(dcp_value_int(item(&a, "step"), &step) && step == 7);
    dcp__archive_reset(&a);
    free(f.bytes);
    f = load("legacy", "shared");
    assert_int_equal(dcp__archive_open(ctx(), &f.src, &a, NULL), DCP_OK);
    expect_item(&f, &a, item(&a, "w"), base, sizeof base);
    expect_item(&f, &a, item(&a, "row"), base + 4, 16);
    expect_item(&f, &a, item(&a, "col"), ((const float[]){2, 6, 10}), 12);
    expect_item(&f, &a, item(&a, "i"), ((const int64_t[]){0, 1, 2}), 24);
    expect_item(&f, &a, item(&a, "e"), "", 0);
    assert_int_equal(dcp__value_lazy(item(&a, "w"))->storage, dcp__value_lazy(item(&a, "col"))->storage);
    dcp__archive_reset(&a);
    free(f.bytes);
    f = load("legacy", "uint16");
    assert_int_equal(dcp__record_payload(ctx(), &f.src, &p, NULL), DCP_OK);
    assert_int_equal(p.dtype, DCP_UINT16);
    assert_memory_equal(f.bytes + p.offset, ((const uint16_t[]){0, 1, 2, 3, 4}), 10);
    free(f.bytes);
}

static void legacy__views_are_parts_of_their_storage(void **state)
{
    (void)state;
    static const char *const names[] = {"views", "big_endian"};
    for (size_t i = 0; i < 2; i++) {
        fixture f = load("legacy", names[i]);
        dcp__archive a;
        dcp_error err = DCP_ERROR_INIT;
        if (dcp__archive_open(ctx(), &f.src, &a, &err) != DCP_OK) {
            fail_msg("%s", err.message);
        }
        assert_true(a.is_big_endian == (i == 1));
        expect_item(&f, &a, item(&a, "all"), ((const int16_t[]){0, 1, 2, 3, 4, 5, 6, 7}), 16);
        expect_item(&f, &a, item(&a, "part"), ((const int16_t[]){2, 3, 4, 5}), 8);
        dcp__archive_reset(&a);
        free(f.bytes);
    }
}

static void legacy__truncated_anywhere_fails(void **state)
{
    (void)state;
    fixture f = load("legacy", "shared");
    for (size_t n = 0; n < f.len; n++) {
        uint8_t *cut = malloc(n ? n : 1);
        memcpy(cut, f.bytes, n);
        dcp__source src = dcp__source_memory(cut, n);
        dcp__archive a;
        assert_int_equal(dcp__archive_open(ctx(), &src, &a, NULL), DCP_FORMAT);
        free(cut);
    }
    free(f.bytes);
}

/* Finds bytes that stand in the file once. */
static size_t find(const fixture *f, const char *bytes, size_t n)
{
    const uint8_t *at = memmem(f->bytes, f->len, bytes, n);
    assert_non_null(at);
    return (size_t)(at - f->bytes);
}

static void legacy__each_lying_field_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *find;
        size_t n, at;
        uint8_t value;
    } changes[] = {
        {"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 10, 9, 0x18}, /* magic */
        {"\x80\2M\xe9\3.", 6, 3, 0xe8},                            /* 1001 */
        {"little_endian", 13, 0, 'L'},                             /* its key */
        {"\x08\0\0\0\0\0\0\0", 8, 0, 7},                           /* elements of the storage */
        {"\x08\0\0\0\0\0\0\0", 8, 7, 0x80},
        {"K\2K\4\x87", 5, 1, 5}, /* the view's start */
        {"K\2K\4\x87", 5, 3, 3}, /* the view's size */
        {"]q\0X\4\0\0\0"
         "7001",
         12, 11, '2'}, /* the list of keys */
    };
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        fixture f = load("legacy", "views");
        f.bytes[find(&f, changes[i].find, changes[i].n) + changes[i].at] = changes[i].value;
        dcp__archive a;
        assert_int_equal(dcp__archive_open(ctx(), &f.src, &a, NULL), DCP_FORMAT);
        free(f.bytes);
    }
}

/* ---- sniffing ---- */

static void sniff__first_bytes_tell_the_form(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        uint64_t total;
        dcp__sniff want;
    } cases[] = {
        {"PK\3\4............", 16, 1000, DCP__IS_ZIP},
        {"PK\5\6............", 16, 1000, DCP__IS_UNKNOWN},
        {"\x28\xb5\x2f\xfd............", 16, 9, DCP__IS_ZSTD},
        {"\x80\2\x8a\n\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80", 16, 100, DCP__IS_LEGACY},
        {"\x80\4\x95\x0d\0\0\0\0\0\0\0\x8a\n\x6c\xfc\x9c", 16, 100, DCP__IS_LEGACY},
        {"\x80\2}q\0.............", 16, 100, DCP__IS_UNKNOWN},
        {"\x10\0\0\0\0\0\0\0{\"a\":1}", 15, 24, DCP__IS_SAFETENSORS},
        {"\x10\0\0\0\0\0\0\0{\"a\":1}", 15, 23, DCP__IS_UNKNOWN},
        {"\x10\0\0\0\0\0\0\0[\"a\":1}", 15, 24, DCP__IS_UNKNOWN},
        {"", 0, 0, DCP__IS_UNKNOWN},
        {"PK\3", 3, 3, DCP__IS_UNKNOWN},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(dcp__sniff_bytes(cases[i].bytes, cases[i].n, cases[i].total), cases[i].want);
    }
    fixture f = load("legacy", "tensor");
    assert_int_equal(dcp__sniff_bytes(f.bytes, 16, f.len), DCP__IS_LEGACY);
    free(f.bytes);
    dcp__payload p;
    dcp__source zstd = dcp__source_memory("\x28\xb5\x2f\xfd............", 16);
    assert_int_equal(dcp__record_payload(ctx(), &zstd, &p, NULL), DCP_FORMAT);
}

/* ---- out of memory, mutations ---- */

static dcp_status payload_body(dcp_context *c, void *user, dcp_error *err)
{
    dcp__payload p;
    return dcp__record_payload(c, &((fixture *)user)->src, &p, err);
}

static dcp_status archive_body(dcp_context *c, void *user, dcp_error *err)
{
    dcp__archive a;
    dcp_status st = dcp__archive_open(c, &((fixture *)user)->src, &a, err);
    if (!st) {
        dcp__archive_reset(&a);
    }
    return st;
}

static void record_payload__every_failing_allocation_is_reported(void **state)
{
    (void)state;
    static const char *const names[] = {"plain", "conj", "deflated", "parameter"};
    for (size_t i = 0; i < 4; i++) {
        fixture f = load("records", names[i]);
        assert_true(failing_alloc_walk(payload_body, &f) > 0);
        assert_true(failing_alloc_walk(archive_body, &f) > 0);
        free(f.bytes);
    }
    fixture f = load("legacy", "views");
    assert_true(failing_alloc_walk(archive_body, &f) > 0);
    free(f.bytes);
}

static uint64_t next_random(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

/* A payload that is accepted lies within the file. */
static void check_accepted(const fixture *f)
{
    dcp__payload p;
    if (dcp__record_payload(ctx(), &f->src, &p, NULL) == DCP_OK && !p.storage.is_deflated) {
        size_t len;
        assert_true(dcp__range_fits(p.offset, p.span_bytes, f->len));
        if (p.span_bytes < 4096) {
            uint64_t n = 1;
            for (int d = 0; d < p.ndim; d++) {
                n = n > 4096 ? n : n * (uint64_t)p.sizes[d];
            }
            if (n <= 4096) {
                free(elements(f->bytes, &p, &len));
            }
        }
    }
    dcp__archive a;
    if (dcp__archive_open(ctx(), &f->src, &a, NULL) == DCP_OK) {
        dcp__archive_reset(&a);
    }
}

static void record_payload__random_changes_never_break_it(void **state)
{
    (void)state;
    uint64_t seed = 777, s = seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    static const char *const names[][2] = {{"records", "plain"},  {"records", "conj"},     {"records", "parameter"},
                                           {"records", "uint16"}, {"records", "deflated"}, {"records", "fewest_members"},
                                           {"legacy", "views"},   {"legacy", "shared"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        fixture whole = load(names[i][0], names[i][1]);
        for (int round = 0; round < 3000; round++) {
            fixture f = {.bytes = malloc(whole.len), .len = whole.len};
            memcpy(f.bytes, whole.bytes, whole.len);
            f.src = dcp__source_memory(f.bytes, f.len);
            /* Without the CRC of the pickle, so that a change in it reaches the parser. */
            uint8_t *entry = memmem(f.bytes, f.len, "PK\1\2", 4);
            if (entry) {
                memset(entry + 16, 0, 4);
            }
            size_t changes = 1 + next_random(&s) % 3;
            for (size_t k = 0; k < changes; k++) {
                f.bytes[next_random(&s) % f.len] = (uint8_t)next_random(&s);
            }
            check_accepted(&f);
            free(f.bytes);
        }
        free(whole.bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(record_payload__golden_tensors_have_the_expected_bytes),
        cmocka_unit_test(archive__golden_torch_save_files_have_the_expected_tensors),
        cmocka_unit_test(record_payload__annotated_record_is_read),
        cmocka_unit_test(record_payload__truncated_anywhere_fails),
        cmocka_unit_test(record_payload__every_form_of_a_plain_tensor_is_read),
        cmocka_unit_test(record_payload__conj_and_neg_bits_are_reported),
        cmocka_unit_test(record_payload__facts_of_the_storage_are_reported),
        cmocka_unit_test(record_payload__what_is_no_plain_tensor_is_refused),
        cmocka_unit_test(record_payload__views_must_stay_in_their_storage),
        cmocka_unit_test(record_payload__dtypes_come_from_class_or_argument),
        cmocka_unit_test(record_payload__version_must_be_1_to_10),
        cmocka_unit_test(record_payload__byte_order_must_be_little_or_big),
        cmocka_unit_test(record_payload__missing_pickle_or_storage_is_named),
        cmocka_unit_test(record_payload__wrong_crc_of_the_pickle_fails),
        cmocka_unit_test(record_payload__reads_both_ends_only),
        cmocka_unit_test(legacy__tensors_and_objects_are_read),
        cmocka_unit_test(legacy__views_are_parts_of_their_storage),
        cmocka_unit_test(legacy__truncated_anywhere_fails),
        cmocka_unit_test(legacy__each_lying_field_is_refused),
        cmocka_unit_test(sniff__first_bytes_tell_the_form),
        cmocka_unit_test(record_payload__every_failing_allocation_is_reported),
        cmocka_unit_test(record_payload__random_changes_never_break_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
