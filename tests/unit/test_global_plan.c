/* The plan of all ranks against a reference that walks lists and counts elements one by one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "format/metadata_writer.h"
#include "support/failing_alloc.h"
#include "support/plan_world.h"
#include "support/random.h"

enum { MOST_DIMS = 5, MOST_BOXES = 16, MOST_RANKS = 9, MOST_NAMES = 8, MOST_ELEMS = 4096 };

static uint8_t memory[MOST_ELEMS * 16]; /* what all tensors borrow */

/* ---- a state of several ranks, written down plainly ---- */

typedef struct box {
    int64_t offsets[MOST_DIMS], sizes[MOST_DIMS];
} box;

typedef struct part {
    bool is_known; /* the rank has the name */
    size_t n;
    box boxes[MOST_BOXES];
} part;

typedef struct thing {
    char name[40];
    bool is_object, is_plain, per_rank;
    int ndim;
    int64_t extents[MOST_DIMS];
    dcp_dtype dtype;
    part parts[MOST_RANKS];
} thing;

typedef struct state {
    int world;
    size_t n;
    thing things[MOST_NAMES];
    size_t order[MOST_RANKS][MOST_NAMES]; /* in which a rank lists them */
} state;

static int64_t elems_of(int ndim, const int64_t *sizes)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        n *= sizes[d];
    }
    return n;
}

/* ---- random states: meshes, placements, interleaved shards ---- */

typedef struct span {
    int64_t start, len;
} span;

/* Piece `index` of `n` of a range, as torch.chunk cuts it. */
static span chunk_of(span s, int64_t n, int64_t index)
{
    int64_t each = (s.len + n - 1) / n, start = each * index < s.len ? each * index : s.len;
    int64_t len = start + each < s.len ? each : s.len - start;
    return (span){s.start + start, len};
}

static void random_mesh(test_random *r, int world, int64_t mesh[3])
{
    mesh[0] = mesh[1] = mesh[2] = 1;
    for (int f = 2, left = world; left > 1; f++) {
        for (; left % f == 0; left /= f) {
            mesh[test_random_below(r, 3)] *= f;
        }
    }
}

/* Cuts each box of a rank along dim in n pieces and keeps piece `index`; interleaved: in 2 n pieces, of which two are kept. */
static void shard(part *p, int dim, int64_t n, int64_t index, bool is_interleaved)
{
    size_t n_boxes = p->n;
    for (size_t i = 0; i < n_boxes; i++) {
        box *b = &p->boxes[i], second = *b;
        span all = {b->offsets[dim], b->sizes[dim]};
        span kept = is_interleaved ? chunk_of(all, 2 * n, index) : chunk_of(all, n, index);
        b->offsets[dim] = kept.start;
        b->sizes[dim] = kept.len;
        if (is_interleaved && p->n < MOST_BOXES) {
            kept = chunk_of(all, 2 * n, n + index);
            second.offsets[dim] = kept.start;
            second.sizes[dim] = kept.len;
            p->boxes[p->n++] = second;
        }
    }
}

static void place(test_random *r, state *s, thing *t)
{
    int64_t mesh[3];
    int dims[3];
    bool interleaved[3];
    random_mesh(r, s->world, mesh);
    for (int m = 0; m < 3; m++) {
        dims[m] = t->ndim && test_random_below(r, 3) ? (int)test_random_below(r, t->ndim) : -1; /* -1: replicated */
        interleaved[m] = test_random_below(r, 4) == 0;
    }
    for (int rank = 0; rank < s->world; rank++) {
        int64_t at[3] = {rank / (mesh[1] * mesh[2]), rank / mesh[2] % mesh[1], rank % mesh[2]};
        part *p = &t->parts[rank];
        p->is_known = true;
        p->n = 1;
        memset(&p->boxes[0], 0, sizeof p->boxes[0]);
        memcpy(p->boxes[0].sizes, t->extents, sizeof t->extents);
        for (int m = 0; m < 3; m++) {
            if (dims[m] >= 0) {
                shard(p, dims[m], mesh[m], at[m], interleaved[m]);
            }
        }
    }
}

static void random_thing(test_random *r, state *s, size_t i)
{
    static const char *const forms[] = {"model.layers.%zu.weight", "w%zu", "optim.state.%zu.exp_avg", "\xc3\xa4.%zu..b"};
    static const dcp_dtype dtypes[] = {DCP_FLOAT32, DCP_BFLOAT16, DCP_INT8, DCP_COMPLEX128};
    thing *t = &s->things[i];
    memset(t, 0, sizeof *t);
    snprintf(t->name, sizeof t->name, forms[test_random_below(r, 4)], i);
    int64_t kind = test_random_below(r, 10);
    t->is_object = kind == 0;
    t->is_plain = kind < 3;
    t->per_rank = t->is_plain && test_random_below(r, 3) == 0;
    t->dtype = dtypes[test_random_below(r, 4)];
    t->ndim = t->is_object ? 0 : (int)test_random_below(r, MOST_DIMS + 1);
    for (int d = 0; d < t->ndim; d++) {
        int64_t extent = test_random_below(r, 7);
        t->extents[d] = extent == 0 && test_random_below(r, 4) ? 1 : extent;
        t->extents[d] = t->extents[d] > 5 && t->ndim == 1 ? 13 : t->extents[d];
    }
    if (!t->is_plain) {
        place(r, s, t);
        return;
    }
    for (int rank = 0; rank < s->world; rank++) {
        t->parts[rank].is_known = test_random_below(r, 4) > 0;
        t->parts[rank].n = t->parts[rank].is_known;
        memset(&t->parts[rank].boxes[0], 0, sizeof t->parts[rank].boxes[0]);
        memcpy(t->parts[rank].boxes[0].sizes, t->extents, sizeof t->extents);
    }
}

static void random_state(test_random *r, state *s, int world)
{
    s->world = world;
    s->n = (size_t)test_random_below(r, MOST_NAMES) + 1;
    for (size_t i = 0; i < s->n; i++) {
        random_thing(r, s, i);
    }
    bool is_shuffled = test_random_below(r, 3) == 0;
    for (int rank = 0; rank < world; rank++) {
        for (size_t i = 0; i < s->n; i++) {
            size_t other = is_shuffled ? (size_t)test_random_below(r, (int64_t)i + 1) : i;
            s->order[rank][i] = s->order[rank][other];
            s->order[rank][other] = i;
        }
    }
}

/* ---- from the description to plans ---- */

static dcp_status add_thing(dcp_context *ctx, dcp_value *dict, const thing *t, const part *p, dcp_error *err)
{
    dcp_tensor tensors[MOST_BOXES];
    dcp_box boxes[MOST_BOXES];
    dcp_value *v;
    if (t->is_object) {
        return dcp_dict_set_int(dict, t->name, 7, err);
    }
    if (t->is_plain) {
        dcp_tensor whole = dcp_tensor_make(t->dtype, t->ndim, t->extents, memory);
        return dcp_dict_set_tensor(dict, t->name, &whole, err);
    }
    for (size_t i = 0; i < p->n; i++) {
        boxes[i] = (dcp_box){p->boxes[i].offsets, p->boxes[i].sizes};
        tensors[i] = dcp_tensor_make(t->dtype, t->ndim, p->boxes[i].sizes, memory);
    }
    dcp_status status = dcp_sharded_create(ctx, t->dtype, t->ndim, t->extents, p->n, tensors, boxes, &v, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_dict_set(dict, dcp_key_str(t->name), v, err);
    if (status != DCP_OK) {
        dcp_value_free(v);
    }
    return status;
}

/* The items of a plan that a description says are a rank's own. */
static void mark_per_rank(const state *s, dcp_save_plan *plan)
{
    for (size_t i = 0; i < plan->n; i++) {
        for (size_t k = 0; k < s->n; k++) {
            plan->items[i].per_rank |= s->things[k].per_rank && strcmp(s->things[k].name, plan->items[i].fqn.ptr) == 0;
        }
    }
}

static dcp_status make_plan(dcp_context *ctx, const state *s, int rank, dcp_value **dict, dcp_save_plan **plan, dcp_error *err)
{
    dcp_status status = dcp_dict_create(ctx, dict, err);
    for (size_t i = 0; i < s->n && status == DCP_OK; i++) {
        const thing *t = &s->things[s->order[rank][i]];
        status = t->parts[rank].is_known ? add_thing(ctx, *dict, t, &t->parts[rank], err) : DCP_OK;
    }
    status = status == DCP_OK ? dcp_plan_save(ctx, *dict, plan, err) : status;
    if (status == DCP_OK) {
        mark_per_rank(s, *plan);
    }
    return status;
}

typedef struct ranks {
    dcp_value *dicts[MOST_RANKS];
    dcp_save_plan *plans[MOST_RANKS];
    plan_world w;
} ranks;

static dcp_status ranks_make(dcp_context *ctx, const state *s, ranks *x, dcp_error *err)
{
    memset(x, 0, sizeof *x);
    dcp_status status = DCP_OK;
    for (int r = 0; r < s->world && status == DCP_OK; r++) {
        status = make_plan(ctx, s, r, &x->dicts[r], &x->plans[r], err);
    }
    pw_init(&x->w, ctx, s->world, (const dcp_save_plan *const *)x->plans);
    return status;
}

static void ranks_free(ranks *x)
{
    pw_free(&x->w);
    for (int r = 0; r < MOST_RANKS; r++) {
        dcp_save_plan_free(x->plans[r]);
        dcp_value_free(x->dicts[r]);
    }
}

/* ---- the reference ---- */

typedef struct expected_chunk {
    box where;
    uint32_t holders; /* a bit for each rank */
} expected_chunk;

typedef struct expected {
    char name[60];
    const thing *t;
    size_t n;
    expected_chunk chunks[MOST_RANKS * MOST_BOXES];
} expected;

static bool is_same_box(int ndim, const box *a, const int64_t *offsets, const int64_t *sizes)
{
    for (int d = 0; d < ndim; d++) {
        if (a->offsets[d] != offsets[d] || a->sizes[d] != sizes[d]) {
            return false;
        }
    }
    return true;
}

static void expect_chunk(expected *e, const box *b, int rank)
{
    bool has_elems = elems_of(e->t->ndim, e->t->extents) > 0;
    if (has_elems && elems_of(e->t->ndim, b->sizes) == 0) {
        return;
    }
    for (size_t i = 0; i < e->n; i++) {
        if (is_same_box(e->t->ndim, &e->chunks[i].where, b->offsets, b->sizes)) {
            e->chunks[i].holders |= 1u << rank;
            return;
        }
    }
    if (has_elems || e->n == 0) {
        e->chunks[e->n++] = (expected_chunk){*b, 1u << rank};
    }
}

/* All names and chunks in the order in which they are first seen, going through the ranks. */
static size_t expect(const state *s, expected *out)
{
    size_t n = 0;
    for (int r = 0; r < s->world; r++) {
        for (size_t i = 0; i < s->n; i++) {
            const thing *t = &s->things[s->order[r][i]];
            char name[60];
            size_t at = 0;
            if (!t->parts[r].is_known) {
                continue;
            }
            if (t->per_rank) {
                snprintf(name, sizeof name, "rank.%d.%s", r, t->name);
            } else {
                snprintf(name, sizeof name, "%s", t->name);
            }
            while (at < n && strcmp(out[at].name, name) != 0) {
                at++;
            }
            if (at == n) {
                memset(&out[n], 0, sizeof out[n]);
                strcpy(out[n].name, name);
                out[n++].t = t;
            }
            if (!t->is_object && elems_of(t->ndim, t->extents) == 0) { /* one chunk, at 0, that all ranks hold */
                box whole = {{0}, {0}};
                memcpy(whole.sizes, t->extents, (size_t)t->ndim * sizeof *whole.sizes);
                expect_chunk(&out[at], &whole, r);
                continue;
            }
            for (size_t b = 0; b < t->parts[r].n; b++) {
                expect_chunk(&out[at], &t->parts[r].boxes[b], r);
            }
        }
    }
    return n;
}

/* Whether every element of every tensor is in one chunk: counted. */
static bool is_dense(const expected *all, size_t n)
{
    static uint8_t count[MOST_ELEMS * 8];
    for (size_t i = 0; i < n; i++) {
        const thing *t = all[i].t;
        int64_t elems = elems_of(t->ndim, t->extents);
        assert_true((size_t)elems < sizeof count);
        memset(count, 0, (size_t)elems);
        for (size_t c = 0; c < all[i].n; c++) {
            const box *b = &all[i].chunks[c].where;
            int64_t inner = elems_of(t->ndim, b->sizes);
            for (int64_t e = 0; e < inner; e++) {
                int64_t left = e, at = 0, stride = 1;
                for (int d = t->ndim - 1; d >= 0; d--) {
                    at += (b->offsets[d] + left % b->sizes[d]) * stride;
                    left /= b->sizes[d];
                    stride *= t->extents[d];
                }
                count[at]++;
            }
        }
        for (int64_t e = 0; e < elems; e++) {
            if (count[e] != 1) {
                return false;
            }
        }
    }
    return true;
}

/* The record of a chunk is that of an item of one of its holders: of the same name and box. */
static void check_storage(const ranks *x, const expected *e, size_t chunk, const dcp__metadata *m, uint32_t storage,
                          bool seen[MOST_RANKS][256])
{
    const dcp__storage *st = &m->storages[storage];
    int rank = -1;
    unsigned file = 0;
    assert_int_equal(sscanf(m->files[st->file].ptr, "__%d_%u.distcp", &rank, &file), 2);
    size_t i = (size_t)(st->offset / PW_RECORD_BYTES);
    assert_true(e->chunks[chunk].holders >> rank & 1);
    assert_true(i < x->plans[rank]->n);
    const dcp_write_item *item = &x->plans[rank]->items[i];
    assert_string_equal(item->fqn.ptr, e->t->name);
    assert_int_equal(st->length, 100 + i);
    assert_int_equal(file, i % 2);
    assert_int_equal(st->transforms, i % 3 == 0);
    assert_true(x->w.locals[rank]->writes[i]);
    if (item->kind == DCP_ITEM_TENSOR) {
        assert_true(is_same_box(e->t->ndim, &e->chunks[chunk].where, item->box.offsets, item->box.sizes));
    }
    assert_false(seen[rank][i]);
    seen[rank][i] = true;
}

static void check_entry(const ranks *x, const expected *e, const dcp__metadata *m, const dcp__entry *entry,
                        bool seen[MOST_RANKS][256])
{
    const dcp_item *item = &entry->item;
    assert_string_equal(item->fqn.ptr, e->name);
    assert_int_equal(item->kind, e->t->is_object ? DCP_ITEM_OBJECT : DCP_ITEM_TENSOR);
    assert_int_equal(item->n_chunks, e->n);
    size_t own = e->t->per_rank ? 2 : 0; /* the name is one key below ("rank", "3") */
    assert_int_equal(item->path_len, own + 1);
    assert_int_equal(item->path[own].string.len, strlen(e->t->name));
    assert_memory_equal(item->path[own].string.ptr, e->t->name, strlen(e->t->name));
    if (e->t->is_object) {
        check_storage(x, e, 0, m, entry->storage, seen);
        return;
    }
    assert_int_equal(item->dtype, e->t->dtype);
    assert_int_equal(item->ndim, e->t->ndim);
    assert_memory_equal(item->extents, e->t->extents, (size_t)e->t->ndim * sizeof(int64_t));
    for (size_t c = 0; c < e->n; c++) {
        const dcp__chunk *chunk = &m->chunks[entry->first_chunk + c];
        assert_true(is_same_box(e->t->ndim, &e->chunks[c].where, chunk->offsets, chunk->sizes));
        check_storage(x, e, c, m, chunk->storage, seen);
    }
}

static void check_metadata(const ranks *x, const state *s)
{
    static expected all[MOST_NAMES * MOST_RANKS];
    bool seen[MOST_RANKS][256] = {{false}};
    size_t n = expect(s, all), n_seen = 0;
    assert_true(is_dense(all, n));
    assert_int_equal(x->w.m->n_entries, n);
    for (size_t i = 0; i < n; i++) {
        check_entry(x, &all[i], x->w.m, &x->w.m->entries[i], seen);
    }
    for (size_t i = 0; i < MOST_RANKS * 256; i++) {
        n_seen += seen[i / 256][i % 256];
    }
    assert_int_equal(n_seen, x->w.n_written); /* nothing is written that is not listed */
    assert_int_equal(x->w.m->n_files, 2 * s->world);
    assert_int_equal(x->w.m->own.world, s->world);
}

static void fail_with(const dcp_error *err)
{
    fail_msg("%s: %s", dcp_status_name(err->code), err->message);
}

static void global_plan__lists_the_union_of_all_ranks(void **unused)
{
    (void)unused;
    test_random r = test_random_seeded("global plan");
    static state s;
    static ranks x;
    for (int i = 0; i < 10000; i++) {
        dcp_error err = DCP_ERROR_INIT;
        random_state(&r, &s, (int)test_random_below(&r, MOST_RANKS) + 1);
        if (ranks_make(NULL, &s, &x, &err) != DCP_OK) {
            fail_with(&err);
        }
        x.w.opts.dedup_to_lowest = test_random_below(&r, 2);
        if (pw_save(&x.w, &err) != DCP_OK) {
            fail_with(&err);
        }
        check_metadata(&x, &s);
        x.w.use_cache = true; /* the same once more, from the cache */
        if (pw_save(&x.w, &err) != DCP_OK) {
            fail_with(&err);
        }
        assert_true(x.w.used_cache);
        assert_int_equal(x.w.plan_bytes, 0);
        check_metadata(&x, &s);
        ranks_free(&x);
    }
}

/* ---- corrupted plans ---- */

/* Changes one box of one rank; true if something has changed. */
static bool spoil_box(test_random *r, thing *t, part *p)
{
    size_t i = (size_t)test_random_below(r, (int64_t)p->n);
    int d = (int)test_random_below(r, t->ndim);
    box *b = &p->boxes[i];
    if (elems_of(t->ndim, b->sizes) == 0) {
        return false;
    }
    switch (test_random_below(r, 3)) {
    case 0: b->sizes[d]--; return true;
    case 1: b->offsets[d]--; return b->offsets[d] >= 0;
    default: b->offsets[d]++; return b->offsets[d] + b->sizes[d] <= t->extents[d];
    }
}

static bool overlaps_within_a_rank(const thing *t)
{
    for (int r = 0; r < MOST_RANKS; r++) {
        const part *p = &t->parts[r];
        for (size_t a = 0; a < p->n; a++) {
            for (size_t b = a + 1; b < p->n; b++) {
                bool apart = false;
                for (int d = 0; d < t->ndim; d++) {
                    const box *x = &p->boxes[a], *y = &p->boxes[b];
                    apart |= x->offsets[d] >= y->offsets[d] + y->sizes[d] || y->offsets[d] >= x->offsets[d] + x->sizes[d];
                }
                if (!apart) {
                    return true;
                }
            }
        }
    }
    return false;
}

static void global_plan__chunks_that_do_not_fit_are_reported(void **unused)
{
    (void)unused;
    test_random r = test_random_seeded("corrupted plans");
    static state s;
    static ranks x;
    static expected all[MOST_NAMES * MOST_RANKS];
    int n_bad = 0, n_good = 0;
    for (int i = 0; i < 6000; i++) {
        dcp_error err = DCP_ERROR_INIT;
        random_state(&r, &s, (int)test_random_below(&r, MOST_RANKS - 1) + 2);
        thing *t = &s.things[test_random_below(&r, (int64_t)s.n)];
        int rank = (int)test_random_below(&r, s.world);
        if (t->is_plain || t->ndim == 0 || t->parts[rank].n == 0 || !spoil_box(&r, t, &t->parts[rank]) ||
            overlaps_within_a_rank(t)) {
            continue;
        }
        if (ranks_make(NULL, &s, &x, &err) != DCP_OK) {
            fail_with(&err);
        }
        bool is_good = is_dense(all, expect(&s, all));
        dcp_status status = pw_save(&x.w, &err);
        if (status != (is_good ? DCP_OK : DCP_ARG)) {
            fail_msg("a %s plan gives %s: %s", is_good ? "good" : "bad", dcp_status_name(status), err.message);
        }
        if (!is_good) {
            assert_non_null(strstr(err.message, t->name));
        }
        n_bad += !is_good;
        n_good += is_good;
        ranks_free(&x);
    }
    printf("%d bad, %d good\n", n_bad, n_good);
    assert_true(n_bad > 500);
}

/* ---- clashes, faults by hand ---- */

static thing plain(const char *name, dcp_dtype dtype, int64_t rows)
{
    thing t = {.is_plain = true, .ndim = 2, .extents = {rows, 4}, .dtype = dtype};
    snprintf(t.name, sizeof t.name, "%s", name);
    for (int r = 0; r < MOST_RANKS; r++) {
        t.parts[r] = (part){true, 1, {{{0, 0}, {rows, 4}}}};
    }
    return t;
}

/* Rows in equal parts of the ranks. */
static thing rows(const char *name, int64_t n, int world)
{
    thing t = plain(name, DCP_FLOAT32, n);
    t.is_plain = false;
    for (int r = 0; r < world; r++) {
        span s = chunk_of((span){0, n}, world, r);
        t.parts[r] = (part){true, 1, {{{s.start, 0}, {s.len, 4}}}};
    }
    return t;
}

static void add(state *s, thing t)
{
    for (int r = 0; r < MOST_RANKS; r++) {
        s->order[r][s->n] = s->n;
    }
    s->things[s->n++] = t;
}

static void expect_fault(state *s, dcp_status code, const char *const *words)
{
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(ranks_make(NULL, s, &x, &err), DCP_OK);
    dcp_status status = pw_save(&x.w, &err);
    if (status != code) {
        fail_msg("%s: %s", dcp_status_name(status), err.message);
    }
    assert_int_equal(err.code, code);
    dcp__buf_put_byte(&x.w.faults, 0);
    for (; *words; words++) {
        if (!strstr((const char *)x.w.faults.data, *words)) {
            fail_msg("no \"%s\" in %s", *words, (const char *)x.w.faults.data);
        }
    }
    ranks_free(&x);
}

/* Plans of which one rank is another one: made from two states. */
static dcp_status save_mixed(const state *s, const state *odd, int odd_rank, dcp_error *err)
{
    static ranks x, y;
    assert_int_equal(ranks_make(NULL, s, &x, err), DCP_OK);
    assert_int_equal(ranks_make(NULL, odd, &y, err), DCP_OK);
    dcp_save_plan *own = x.plans[odd_rank];
    x.plans[odd_rank] = y.plans[odd_rank];
    dcp_status status = pw_save(&x.w, err);
    x.plans[odd_rank] = own;
    ranks_free(&x);
    ranks_free(&y);
    return status;
}

static void global_plan__a_name_with_two_dtypes_or_shapes_is_a_mismatch(void **unused)
{
    (void)unused;
    static state s, odd;
    s = (state){.world = 4};
    odd = (state){.world = 4};
    add(&s, plain("w", DCP_FLOAT32, 3));
    add(&odd, plain("w", DCP_FLOAT16, 3));
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(save_mixed(&s, &odd, 2, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "\"w\""));
    assert_non_null(strstr(err.message, "rank 0 has float32 [3, 4]"));
    assert_non_null(strstr(err.message, "rank 2 has float16 [3, 4]"));
    odd.n = 0;
    add(&odd, plain("w", DCP_FLOAT32, 5));
    assert_int_equal(save_mixed(&s, &odd, 0, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "rank 0 has float32 [5, 4]"));
    odd.n = 0;
    add(&odd, plain("w", DCP_FLOAT32, 3));
    odd.things[0].is_object = true;
    assert_int_equal(save_mixed(&s, &odd, 3, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "rank 3 has an object"));
}

static void global_plan__different_contents_are_a_mismatch_if_compared(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    s = (state){.world = 3};
    add(&s, plain("w", DCP_FLOAT32, 3));
    add(&s, rows("sharded", 6, 3));
    dcp_error err = DCP_ERROR_INIT;
    dcp__digest digests[3][2] = {{{{1}}, {{2}}}, {{{1}}, {{3}}}, {{{1}}, {{4}}}};
    const dcp__digest *content[3] = {digests[0], digests[1], digests[2]};
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    x.w.content = content;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    digests[2][0].bytes[15] = 9;
    assert_int_equal(pw_save(&x.w, &err), DCP_MISMATCH);
    assert_non_null(strstr(err.message, "\"w\": ranks 0 and 2"));
    x.w.content = NULL;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    ranks_free(&x);
}

static void global_plan__all_faults_are_listed(void **unused)
{
    (void)unused;
    static state s;
    s = (state){.world = 4};
    add(&s, rows("a.overlap", 8, 4));
    add(&s, rows("b.gap", 8, 4));
    add(&s, rows("c.good", 8, 4));
    add(&s, rows("d.missing", 8, 4));
    s.things[0].parts[3].boxes[0].offsets[0] = 5;
    s.things[1].parts[1].boxes[0].sizes[0] = 1;
    for (int r = 0; r < 4; r++) {
        s.things[3].parts[r].n = 0;
    }
    const char *const words[] = {"\"a.overlap\"", "[4:6, 0:4] of rank 2", "[5:7, 0:4] of rank 3", "in [5:6, 0:4]", "\"b.gap\"",
                                 "4 elements",    "first at [3, 0]",      "\"d.missing\"",        "32 elements",   NULL};
    expect_fault(&s, DCP_ARG, words);
}

static void global_plan__a_chunk_outside_is_reported(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    static const int64_t offsets[] = {6, 0};
    s = (state){.world = 2};
    add(&s, rows("w", 8, 2));
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    x.plans[1]->items[0].box.offsets = offsets; /* a plan that its maker has changed */
    assert_int_equal(pw_save(&x.w, &err), DCP_ARG);
    assert_non_null(strstr(err.message, "[6:10, 0:4] of rank 1 is not within [8, 4]"));
    static const int64_t below[] = {-1, 0};
    x.plans[1]->items[0].box.offsets = below;
    assert_int_equal(pw_save(&x.w, &err), DCP_ARG);
    ranks_free(&x);
}

static void global_plan__gaps_are_allowed_to_one_rank_or_on_request(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 1};
    add(&s, rows("w", 8, 2)); /* the first of two parts */
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    ranks_free(&x);
    s.world = 2;
    s.things[0].parts[1].is_known = false;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_ARG);
    x.w.opts.allow_gaps = true;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    ranks_free(&x);
}

/* An offset at the end, as uneven splits give it, or one equal to a real chunk's. */
static void global_plan__empty_shards_hide_no_real_one(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 8};
    add(&s, rows("w", 3, 8));
    s.things[0].parts[7].boxes[0].offsets[0] = 1;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_int_equal(x.w.m->n_chunks, 3);
    assert_int_equal(x.w.n_written, 3);
    assert_true(x.w.hellos.is_uniform); /* who has nothing of a tensor lists it all the same */
    ranks_free(&x);
}

static void global_plan__each_rank_may_have_its_own_value(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 4};
    add(&s, plain("seed", DCP_INT64, 1));
    s.things[0].per_rank = true;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_int_equal(x.w.m->n_entries, 4);
    assert_int_equal(x.w.n_written, 4);
    assert_string_equal(x.w.m->entries[3].item.fqn.ptr, "rank.3.seed");
    assert_int_equal(x.w.m->entries[3].item.path_len, 3);
    assert_string_equal(x.w.m->entries[3].item.path[0].string.ptr, "rank");
    assert_string_equal(x.w.m->entries[3].item.path[1].string.ptr, "3");
    check_metadata(&x, &s);
    ranks_free(&x);
}

/* Up to where the writing would begin. */
static dcp_status plan_only(plan_world *w, dcp_error *err)
{
    pw_restart(w);
    dcp_status status = pw_hello(w, err);
    status = status == DCP_OK ? pw_encode(w, err) : status;
    for (int o = 0; o < w->n && status == DCP_OK; o++) {
        status = pw_own(w, o, err);
    }
    return status == DCP_OK ? pw_assign(w, err) : status;
}

/* "rank.<r>.<name>" as a name of its own, on some ranks or on all, beside a value that each of some ranks has for itself. */
static void global_plan__a_name_of_a_ranks_own_value_is_a_clash(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    test_random r = test_random_seeded("names of own values");
    int n_clashes = 0, n_uniform = 0;
    for (int i = 0; i < 400; i++) {
        dcp_error err = DCP_ERROR_INIT;
        int world = 1 + (int)test_random_below(&r, 8), of = (int)test_random_below(&r, world + 1);
        unsigned lists_it = i % 3 ? 1u << test_random_below(&r, world) : (1u << world) - 1;
        unsigned has_own = i % 2 ? (unsigned)test_random_next(&r) : (1u << world) - 1;
        char name[48];
        snprintf(name, sizeof name, i % 5 ? "rank.%d.seed" : "rank.%d.rank.1.seed", of);
        const dcp_key path = dcp_key_str(name);
        s = (state){.world = world};
        add(&s, plain("w", DCP_FLOAT32, 2));
        add(&s, plain(i % 5 ? "seed" : "rank.1.seed", DCP_INT64, 1));
        s.things[1].per_rank = true;
        assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
        for (int rank = 0; rank < world; rank++) {
            dcp_write_item item = x.plans[rank]->items[1];
            if (!(has_own >> rank & 1)) {
                dcp_save_plan_remove(x.plans[rank], 1);
            }
            item.fqn = dcp_str_of(name);
            item.path = &path;
            item.path_len = 1;
            item.per_rank = false;
            if (lists_it >> rank & 1) {
                assert_int_equal(dcp_save_plan_add(x.plans[rank], &item, &err), DCP_OK);
            }
        }
        bool clashes = of < world && has_own >> of & 1;
        dcp_status status = plan_only(&x.w, &err);
        if (status != (clashes ? DCP_MISMATCH : DCP_OK)) {
            fail_msg("round %d, %s on %x of %d ranks, own on %x: %s: %s", i, name, lists_it, world, has_own,
                     dcp_status_name(status), err.message);
        }
        n_clashes += clashes;
        n_uniform += clashes && lists_it == (1u << world) - 1;
        ranks_free(&x);
    }
    assert_true(n_clashes > 50 && n_uniform > 10 && n_clashes < 390);
}

static void global_plan__a_plan_with_a_name_twice_is_refused(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 1};
    add(&s, plain("w", DCP_FLOAT32, 2));
    add(&s, plain("o", DCP_FLOAT32, 2));
    s.things[1].is_object = true;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(dcp_save_plan_add(x.plans[0], &x.plans[0]->items[1], &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_MISMATCH);
    dcp_save_plan_remove(x.plans[0], 2);
    assert_int_equal(dcp_save_plan_add(x.plans[0], &x.plans[0]->items[0], &err), DCP_OK);
    x.plans[0]->items[2].per_rank = true; /* one of them is this rank's own, the other is not */
    assert_int_equal(pw_save(&x.w, &err), DCP_MISMATCH);
    dcp_save_plan_remove(x.plans[0], 2);
    assert_int_equal(dcp_save_plan_add(x.plans[0], &x.plans[0]->items[0], &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_ARG); /* the same chunk twice */
    ranks_free(&x);
}

static void global_plan__containers_of_rank_0_come_first(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 3};
    add(&s, plain("w", DCP_FLOAT32, 2));
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    const dcp_key a = dcp_key_str("a"), b[] = {dcp_key_str("b"), dcp_key_int(1)};
    const dcp__container at_a = {&a, 1, dcp_str_of("dict"), 0}, at_b = {b, 2, dcp_str_of("ordered_dict"), 1};
    assert_int_equal(dcp__save_plan_add_containers(x.plans[0], &at_b, 1, &err), DCP_OK);
    assert_int_equal(dcp__save_plan_add_containers(x.plans[1], &at_a, 1, &err), DCP_OK);
    assert_int_equal(dcp__save_plan_add_containers(x.plans[1], &at_b, 1, &err), DCP_OK);
    assert_int_equal(dcp__save_plan_add_containers(x.plans[2], &at_a, 1, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    const dcp__own_facts *own = &x.w.m->own;
    assert_int_equal(own->n_containers, 2);
    assert_string_equal(own->containers[0].kind.ptr, "ordered_dict");
    assert_int_equal(own->containers[0].before, 1);
    assert_int_equal(own->containers[0].path_len, 2);
    assert_int_equal(own->containers[0].path[1].integer, 1);
    assert_string_equal(own->containers[1].kind.ptr, "dict");
    assert_true(own->containers[1].before == SIZE_MAX);
    ranks_free(&x);
}

/* What is merged is written as a metadata file and read again. */
static void global_plan__gives_metadata_that_can_be_written(void **unused)
{
    (void)unused;
    test_random r = test_random_seeded("written metadata");
    static state s;
    static ranks x;
    for (int i = 0; i < 100; i++) {
        dcp_error err = DCP_ERROR_INIT;
        dcp__buf file;
        dcp__metadata *merged, *read = NULL;
        const dcp__metadata_write_opts opts = {.with_own = true};
        random_state(&r, &s, (int)test_random_below(&r, MOST_RANKS) + 1);
        assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
        assert_int_equal(pw_save(&x.w, &err), DCP_OK);
        dcp__buf_init(&file, x.w.ctx);
        merged = x.w.m;
        if (dcp__metadata_write(merged, &opts, &file, &err) != DCP_OK) {
            fail_with(&err);
        }
        dcp__source src = dcp__source_memory(file.data, file.len);
        if (dcp__metadata_read(x.w.ctx, &src, NULL, &read, &err) != DCP_OK) {
            fail_with(&err);
        }
        assert_int_equal(read->n_entries, merged->n_entries);
        assert_int_equal(read->own.world, s.world);
        for (size_t e = 0; e < read->n_entries; e++) {
            assert_string_equal(read->entries[e].item.fqn.ptr, merged->entries[e].item.fqn.ptr);
            assert_int_equal(read->entries[e].item.n_chunks, merged->entries[e].item.n_chunks);
        }
        dcp__metadata_free(read);
        dcp__buf_reset(&file);
        ranks_free(&x);
    }
}

/* ---- ownership, traffic ---- */

enum { MANY_RANKS = 128, MANY_NAMES = 1024 };

/* Rank r has row r of each tensor. */
static dcp_save_plan *one_row_of_each(int rank, char (*names)[32], dcp_key *paths, int64_t *numbers)
{
    static const int64_t extents[] = {MANY_RANKS, 4096};
    static float nothing;
    dcp_save_plan *plan;
    numbers[0] = rank;
    numbers[1] = 0;
    numbers[2] = 1;
    numbers[3] = 4096;
    assert_int_equal(dcp__save_plan_create(dcp__context(NULL), &plan, NULL), DCP_OK);
    for (int i = 0; i < MANY_NAMES; i++) {
        dcp_write_item item = {.fqn = dcp_str_of(names[i]),
                               .path = &paths[i],
                               .path_len = 1,
                               .kind = DCP_ITEM_TENSOR,
                               .dtype = DCP_FLOAT32,
                               .ndim = 2,
                               .global_extents = extents,
                               .box = {numbers, numbers + 2}};
        item.tensor = dcp_tensor_make(DCP_FLOAT32, 2, numbers + 2, &nothing);
        assert_int_equal(dcp_save_plan_add(plan, &item, NULL), DCP_OK);
    }
    return plan;
}

/* No rank receives much more than its share of what all say about their plans, and no item takes many bytes. */
static void global_plan__nothing_concentrates_on_one_rank(void **unused)
{
    (void)unused;
    static char names[MANY_NAMES][32];
    static dcp_key paths[MANY_NAMES];
    static int64_t boxes[MANY_RANKS][4];
    dcp_save_plan *plans[MANY_RANKS];
    plan_world w;
    size_t received[MANY_RANKS] = {0}, total = 0;
    dcp_error err = DCP_ERROR_INIT;
    for (int i = 0; i < MANY_NAMES; i++) {
        snprintf(names[i], sizeof names[i], "model.layers.%d.weight", i);
        paths[i] = dcp_key_str(names[i]);
    }
    for (int r = 0; r < MANY_RANKS; r++) {
        plans[r] = one_row_of_each(r, names, paths, boxes[r]);
    }
    assert_int_equal(pw_init(&w, NULL, MANY_RANKS, (const dcp_save_plan *const *)plans), DCP_OK);
    pw_restart(&w);
    assert_int_equal(pw_hello(&w, &err), DCP_OK);
    assert_int_equal(pw_encode(&w, &err), DCP_OK);
    for (int r = 0; r < MANY_RANKS; r++) {
        for (int o = 0; o < MANY_RANKS; o++) {
            received[o] += w.plan_mail[r].start[o + 1] - w.plan_mail[r].start[o];
        }
    }
    for (int o = 0; o < MANY_RANKS; o++) {
        total += received[o];
    }
    for (int o = 0; o < MANY_RANKS; o++) {
        assert_in_range(received[o], 1, total / MANY_RANKS * 5 / 4);
    }
    assert_in_range(total, 1, (size_t)24 * MANY_RANKS * MANY_NAMES);
    pw_free(&w);
    for (int r = 0; r < MANY_RANKS; r++) {
        dcp_save_plan_free(plans[r]);
    }
}

static void global_plan__owners_follow_the_rule(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 4};
    for (int i = 0; i < MOST_NAMES; i++) {
        char name[20];
        snprintf(name, sizeof name, "n%d", i);
        add(&s, rows(name, 8, 4));
    }
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    for (size_t i = 0; i < MOST_NAMES; i++) {
        assert_int_equal(dcp__owner_of(x.w.locals[3], &x.w.hellos, i), i * 4 / MOST_NAMES);
    }
    size_t bytes = x.w.plan_bytes;
    ranks_free(&x);
    s.order[2][0] = 1; /* one rank lists the names in another order: hashes decide, and it sends names, too */
    s.order[2][1] = 0;
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    for (size_t i = 0; i < MOST_NAMES; i++) {
        const char *name = x.w.locals[0]->entries[i].item->fqn.ptr;
        assert_int_equal(dcp__owner_of(x.w.locals[0], &x.w.hellos, i), dcp__xxh3_64(name, strlen(name)) % 4);
    }
    assert_true(x.w.plan_bytes > bytes);
    check_metadata(&x, &s);
    ranks_free(&x);
}

static void plan_cache__another_structure_is_planned_anew(void **unused)
{
    (void)unused;
    static state s;
    static ranks x, y;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 4};
    add(&s, rows("w", 8, 4));
    add(&s, plain("p", DCP_FLOAT32, 3));
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    x.w.use_cache = true;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_false(x.w.used_cache);
    size_t first = x.w.plan_bytes;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_true(x.w.used_cache);
    assert_int_equal(x.w.plan_bytes + x.w.verdict_bytes + x.w.offer_bytes, 0);
    assert_true(DCP__HELLO_BYTES <= 64 && first > 0);
    assert_true(x.w.result_bytes <= 24 * x.w.n_written);
    s.things[0] = rows("w", 12, 4); /* the third save has another shape on all ranks */
    assert_int_equal(ranks_make(NULL, &s, &y, &err), DCP_OK);
    x.w.plans = (const dcp_save_plan *const *)y.plans;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_false(x.w.used_cache);
    assert_int_equal(x.w.m->chunks[3].offsets[0], 9);
    x.w.opts.dedup_to_lowest = true; /* other options */
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_false(x.w.used_cache);
    dcp__plan_cache_reset(&x.w.caches[2]); /* one rank has lost its own */
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_false(x.w.used_cache);
    ranks_free(&x);
    ranks_free(&y);
}

static void plan_cache__is_stored_and_read_again(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    s = (state){.world = 3};
    add(&s, rows("w", 7, 3));
    add(&s, plain("p", DCP_FLOAT32, 3));
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    for (int r = 0; r < 3; r++) {
        dcp__buf b;
        dcp__plan_cache read;
        dcp__buf_init(&b, x.w.ctx);
        assert_int_equal(dcp__plan_cache_encode(&x.w.caches[r], &b, &err), DCP_OK);
        for (size_t i = 0; i < b.len; i++) {
            b.data[i] ^= 1;
            dcp_status status = dcp__plan_cache_decode(NULL, b.data, b.len, &read, &err);
            assert_int_equal(status, i < 9 ? DCP_FORMAT : DCP_CHECKSUM);
            b.data[i] ^= 1;
        }
        assert_int_equal(dcp__plan_cache_decode(NULL, b.data, 20, &read, &err), DCP_FORMAT);
        assert_int_equal(dcp__plan_cache_decode(NULL, b.data, b.len, &read, &err), DCP_OK);
        dcp__plan_cache_reset(&x.w.caches[r]);
        x.w.caches[r] = read;
        dcp__buf_reset(&b);
    }
    x.w.use_cache = true;
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    assert_true(x.w.used_cache);
    check_metadata(&x, &s);
    ranks_free(&x);
}

/* ---- balance ---- */

static void balance__mixed_sizes_come_out_even(void **unused)
{
    (void)unused;
    test_random r = test_random_seeded("balance");
    const uint32_t numbers[] = {0, 1, 2, 3, 4, 5, 6, 7};
    const dcp__rank_set everybody = {numbers, 8};
    const dcp__global_opts opts = {.world = 8};
    int n_even = 0;
    for (int run = 0; run < 200; run++) {
        dcp__replica replicas[100];
        uint64_t load[8] = {0}, written[8] = {0}, total = 0, most = 0;
        for (int i = 0; i < 100; i++) {
            double u = (double)(test_random_next(&r) >> 11) / 9007199254740992.0;
            replicas[i] = (dcp__replica){(uint64_t)(1048576.0 * pow(16, u)), 0, 0};
            total += replicas[i].bytes;
        }
        assert_int_equal(dcp__balance(NULL, &opts, &everybody, replicas, 100, load, NULL), DCP_OK);
        for (int i = 0; i < 100; i++) {
            written[replicas[i].writer] += replicas[i].bytes;
        }
        for (int k = 0; k < 8; k++) {
            assert_int_equal(load[k], written[k]);
            most = written[k] > most ? written[k] : most;
        }
        n_even += (double)most * 8 <= 1.05 * (double)total;
    }
    printf("%d of 200 runs within 1.05\n", n_even);
    assert_true(n_even >= 190);
}

static void balance__makes_up_for_what_ranks_write_anyway(void **unused)
{
    (void)unused;
    const uint32_t all[] = {0, 1, 2}, two[] = {1, 2};
    const dcp__rank_set sets[] = {{all, 3}, {two, 2}};
    dcp__global_opts opts = {.world = 3};
    const uint64_t MiB = 1048576;
    dcp__replica replicas[] = {{4 * MiB, 0, 9}, {2 * MiB, 1, 9}, {6 * MiB, 0, 9}, {2 * MiB, 1, 9}};
    uint64_t load[] = {0, 8 * MiB, 5 * MiB};
    assert_int_equal(dcp__balance(NULL, &opts, sets, replicas, 4, load, NULL), DCP_OK);
    /* 6 to rank 0 (0), 4 to rank 2 (5 against 6 and 8), 2 to rank 1 (8 against 9), 2 to rank 2 (9 against 10) */
    assert_int_equal(replicas[2].writer, 0);
    assert_int_equal(replicas[0].writer, 2);
    assert_int_equal(replicas[1].writer, 1);
    assert_int_equal(replicas[3].writer, 2);
    opts.dedup_to_lowest = true;
    assert_int_equal(dcp__balance(NULL, &opts, sets, replicas, 4, load, NULL), DCP_OK);
    assert_int_equal(replicas[0].writer, 0);
    assert_int_equal(replicas[3].writer, 1);
}

/* A same-size reload: each rank opens its own file and those of what is replicated. */
static void balance__small_items_stay_in_one_file(void **unused)
{
    (void)unused;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    memset(&x, 0, sizeof x);
    for (int r = 0; r < 4; r++) {
        dcp_value *sharded;
        int64_t extents[] = {4096, 64}, offsets[] = {1024 * r, 0}, sizes[] = {64, 64};
        sizes[0] = 1024;
        dcp_box where = {offsets, sizes};
        dcp_tensor piece = dcp_tensor_make(DCP_INT8, 2, sizes, memory);
        assert_int_equal(dcp_dict_create(NULL, &x.dicts[r], &err), DCP_OK);
        assert_int_equal(dcp_sharded_create(NULL, DCP_INT8, 2, extents, 1, &piece, &where, &sharded, &err), DCP_OK);
        assert_int_equal(dcp_dict_set(x.dicts[r], dcp_key_str("w"), sharded, &err), DCP_OK);
        for (int i = 0; i < 50; i++) {
            char name[20];
            dcp_tensor scalar = dcp_tensor_make(DCP_FLOAT32, 0, NULL, memory);
            snprintf(name, sizeof name, "scalar.%d", i);
            assert_int_equal(dcp_dict_set_tensor(x.dicts[r], name, &scalar, &err), DCP_OK);
        }
        assert_int_equal(dcp_plan_save(NULL, x.dicts[r], &x.plans[r], &err), DCP_OK);
    }
    pw_init(&x.w, NULL, 4, (const dcp_save_plan *const *)x.plans);
    assert_int_equal(pw_save(&x.w, &err), DCP_OK);
    uint32_t writers = 0;
    for (size_t e = 0; e < x.w.m->n_entries; e++) {
        const dcp__entry *entry = &x.w.m->entries[e];
        if (entry->item.ndim == 0) {
            writers |= 1u << x.w.m->storages[x.w.m->chunks[entry->first_chunk].storage].file / 2;
        }
    }
    assert_int_equal(writers & (writers - 1), 0); /* one rank wrote all scalars */
    ranks_free(&x);
}

/* ---- hostile messages, no memory ---- */

static void messages__any_damage_is_an_error_or_another_plan(void **unused)
{
    (void)unused;
    test_random r = test_random_seeded("damaged messages");
    static state s;
    static ranks x;
    for (int i = 0; i < 3000; i++) {
        dcp_error err = DCP_ERROR_INIT;
        random_state(&r, &s, (int)test_random_below(&r, 4) + 1);
        assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
        pw_restart(&x.w);
        dcp_status status = pw_hello(&x.w, &err);
        status = status == DCP_OK ? pw_encode(&x.w, &err) : status;
        assert_int_equal(status, DCP_OK);
        dcp__mail *m = &x.w.plan_mail[test_random_below(&r, s.world)];
        if (m->bytes.len) {
            m->bytes.data[test_random_below(&r, (int64_t)m->bytes.len)] = (uint8_t)test_random_next(&r);
        }
        for (int o = 0; o < s.world && status == DCP_OK; o++) {
            status = pw_own(&x.w, o, &err);
        }
        status = status == DCP_OK ? pw_assign(&x.w, &err) : status;
        assert_true(status == DCP_OK || status == DCP_FORMAT || status == DCP_ARG || status == DCP_MISMATCH ||
                    status == DCP_LIMIT);
        if (status == DCP_FORMAT) {
            assert_true(err.offset != DCP_NO_OFFSET || err.message[0]);
        }
        ranks_free(&x);
    }
}

static void messages__other_worlds_and_versions_are_refused(void **unused)
{
    (void)unused;
    static state s;
    static ranks x;
    dcp_error err = DCP_ERROR_INIT;
    uint8_t bytes[2 * DCP__HELLO_BYTES];
    dcp__hellos hellos;
    s = (state){.world = 2};
    add(&s, plain("w", DCP_FLOAT32, 2));
    assert_int_equal(ranks_make(NULL, &s, &x, &err), DCP_OK);
    pw_restart(&x.w);
    assert_int_equal(pw_hello(&x.w, &err), DCP_OK);
    dcp__hello_encode(x.w.locals[0], NULL, bytes);
    dcp__hello_encode(x.w.locals[1], NULL, bytes + DCP__HELLO_BYTES);
    assert_int_equal(dcp__hellos_decode(NULL, bytes, sizeof bytes - 1, 2, &hellos, &err), DCP_FORMAT);
    bytes[DCP__HELLO_BYTES]++;
    assert_int_equal(dcp__hellos_decode(NULL, bytes, sizeof bytes, 2, &hellos, &err), DCP_FORMAT);
    assert_int_equal(err.rank, 1);
    bytes[DCP__HELLO_BYTES]--;
    bytes[DCP__HELLO_BYTES + 4]++;
    assert_int_equal(dcp__hellos_decode(NULL, bytes, sizeof bytes, 2, &hellos, &err), DCP_FORMAT);
    ranks_free(&x);
}

static dcp_status save_with(dcp_context *ctx, void *user, dcp_error *err)
{
    static ranks x;
    dcp_status status = ranks_make(ctx, user, &x, err);
    x.w.use_cache = true;
    status = status == DCP_OK ? pw_save(&x.w, err) : status;
    status = status == DCP_OK ? pw_save(&x.w, err) : status;
    dcp__buf b;
    dcp__plan_cache read;
    dcp__buf_init(&b, ctx);
    status = status == DCP_OK ? dcp__plan_cache_encode(&x.w.caches[0], &b, err) : status;
    status = status == DCP_OK ? dcp__plan_cache_decode(ctx, b.data, b.len, &read, err) : status;
    if (status == DCP_OK) {
        dcp__plan_cache_reset(&read);
    }
    dcp__buf_reset(&b);
    ranks_free(&x);
    return status;
}

static void global_plan__survives_lack_of_memory(void **unused)
{
    (void)unused;
    static state s;
    s = (state){.world = 3};
    add(&s, rows("model.w", 7, 3));
    add(&s, plain("p", DCP_FLOAT32, 3));
    add(&s, plain("seed", DCP_INT64, 1));
    add(&s, plain("o", DCP_INT64, 1));
    s.things[2].per_rank = true;
    s.things[3].is_object = true;
    assert_true(failing_alloc_walk(save_with, &s) > 100);
    s.order[1][0] = 1; /* with names */
    s.order[1][1] = 0;
    assert_true(failing_alloc_walk(save_with, &s) > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(global_plan__lists_the_union_of_all_ranks),
        cmocka_unit_test(global_plan__chunks_that_do_not_fit_are_reported),
        cmocka_unit_test(global_plan__a_name_with_two_dtypes_or_shapes_is_a_mismatch),
        cmocka_unit_test(global_plan__different_contents_are_a_mismatch_if_compared),
        cmocka_unit_test(global_plan__all_faults_are_listed),
        cmocka_unit_test(global_plan__a_chunk_outside_is_reported),
        cmocka_unit_test(global_plan__gaps_are_allowed_to_one_rank_or_on_request),
        cmocka_unit_test(global_plan__empty_shards_hide_no_real_one),
        cmocka_unit_test(global_plan__each_rank_may_have_its_own_value),
        cmocka_unit_test(global_plan__a_name_of_a_ranks_own_value_is_a_clash),
        cmocka_unit_test(global_plan__a_plan_with_a_name_twice_is_refused),
        cmocka_unit_test(global_plan__containers_of_rank_0_come_first),
        cmocka_unit_test(global_plan__gives_metadata_that_can_be_written),
        cmocka_unit_test(global_plan__nothing_concentrates_on_one_rank),
        cmocka_unit_test(global_plan__owners_follow_the_rule),
        cmocka_unit_test(plan_cache__another_structure_is_planned_anew),
        cmocka_unit_test(plan_cache__is_stored_and_read_again),
        cmocka_unit_test(balance__mixed_sizes_come_out_even),
        cmocka_unit_test(balance__makes_up_for_what_ranks_write_anyway),
        cmocka_unit_test(balance__small_items_stay_in_one_file),
        cmocka_unit_test(messages__any_damage_is_an_error_or_another_plan),
        cmocka_unit_test(messages__other_worlds_and_versions_are_refused),
        cmocka_unit_test(global_plan__survives_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
