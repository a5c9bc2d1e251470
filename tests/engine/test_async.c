/* Saves in the background: snapshots, stagers, waiting, failing, canceling. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "engine/stage/stager.h"
#include "support/failing_alloc.h"
#include "support/random_state.h"
#include "support/ranks.h"
#include "support/temp_dir.h"

#define MIB ((uint64_t)1 << 20)

/* Sanitizers keep freed memory, and copies of the stacks of threads. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEMORY_IS_OURS false
#else
#define MEMORY_IS_OURS true
#endif

/* ---- a storage that holds up what is written to data files until it is let go, and that fails on demand ---- */

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_open;
    int n_waiting;
    dcp_status fail_writes;
    int nice_of_writer, policy_of_writer;
} gate;

static dcp_status pass(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    (void)n;
    (void)offset;
    gate *g = user;
    if (op != DCP_OP_WRITE || !strstr(name, "__")) {
        return DCP_OK;
    }
    pthread_mutex_lock(&g->lock);
    g->n_waiting++;
    g->nice_of_writer = getpriority(PRIO_PROCESS, 0);
    g->policy_of_writer = sched_getscheduler(0);
    pthread_cond_broadcast(&g->changed);
    while (!g->is_open) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    g->n_waiting--;
    dcp_status status = g->fail_writes;
    pthread_mutex_unlock(&g->lock);
    return status == DCP_OK ? status : dcp_error_set(err, status, "injected");
}

static void gate_open(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->is_open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void gate_await_writer(gate *g)
{
    pthread_mutex_lock(&g->lock);
    while (g->n_waiting == 0) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    pthread_mutex_unlock(&g->lock);
}

typedef struct place {
    dcp_storage *memory, *gated;
    gate gate;
} place;

static void place_make(place *p, bool is_open)
{
    *p = (place){.gate = {.is_open = is_open}};
    pthread_mutex_init(&p->gate.lock, NULL);
    pthread_cond_init(&p->gate.changed, NULL);
    assert_int_equal(dcp_storage_memory(NULL, &p->memory, NULL), DCP_OK);
    assert_int_equal(dcp_storage_fault(NULL, p->memory, pass, &p->gate, &p->gated, NULL), DCP_OK);
}

static void place_free(place *p)
{
    dcp_storage_free(p->gated);
    dcp_storage_free(p->memory);
    pthread_cond_destroy(&p->gate.changed);
    pthread_mutex_destroy(&p->gate.lock);
}

static dcp_value *read_all(dcp_storage *st, const char *path)
{
    dcp_checkpoint *ck;
    dcp_value *tree = NULL;
    dcp_open_opts opts = DCP_OPEN_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    opts.check_crc = true;
    if (dcp_checkpoint_open(NULL, path, &opts, &ck, &err) != DCP_OK || dcp_read_tree(ck, true, &tree, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    dcp_checkpoint_close(ck);
    return tree;
}

static void assert_stored(dcp_storage *st, const char *path, const dcp_value *expected)
{
    dcp_value *loaded = read_all(st, path);
    assert_true(dcp_value_equal(expected, loaded));
    dcp_value_free(loaded);
}

static dcp_op *submit(place *p, const char *path, dcp_value *state, dcp_async_opts opts)
{
    dcp_op *op;
    dcp_error err = DCP_ERROR_INIT;
    opts.save.storage = p->gated;
    if (dcp_save_async(NULL, path, state, &opts, &op, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    return op;
}

static void finish(dcp_op *op)
{
    dcp_error err = DCP_ERROR_INIT;
    if (dcp_op_wait(op, 0, NULL, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
    dcp_op_free(op);
}

static dcp_stager *make_stager(dcp_stager_opts opts)
{
    dcp_stager *s;
    assert_int_equal(dcp_stager_create(NULL, &opts, &s, NULL), DCP_OK);
    return s;
}

static dcp_stager_info info_of(dcp_stager *s)
{
    dcp_stager_info info = DCP_STAGER_INFO_INIT;
    assert_int_equal(dcp_stager_get_info(s, &info, NULL), DCP_OK);
    return info;
}

/* A state of n tensors of some MiB each, with values that tell where they are from. */
static dcp_value *large_state(int n, int64_t mib_each, unsigned char first)
{
    dcp_value *state, *v;
    char key[32];
    int64_t extents[] = {mib_each, (int64_t)MIB};
    dcp_dict_create(NULL, &state, NULL);
    for (int i = 0; i < n; i++) {
        assert_int_equal(dcp_tensor_alloc(NULL, DCP_UINT8, 2, extents, &v, NULL), DCP_OK);
        memset(dcp_value_tensor(v)->data, first + i, (size_t)mib_each * MIB);
        snprintf(key, sizeof key, "t%d", i);
        dcp_dict_set(state, dcp_key_str(key), v, NULL);
    }
    return state;
}

static void scribble(dcp_value *v)
{
    const dcp_tensor *t = dcp_value_tensor(v);
    int64_t elems;
    if (t) {
        dcp_tensor_elems(t, &elems, NULL);
        memset(t->data, 0xEE, (size_t)elems * dcp_dtype_bytes(t->dtype));
    }
    for (size_t i = 0; !t && i < dcp_value_count(v); i++) {
        if (dcp_value_at(v, i)) {
            scribble(dcp_value_at(v, i));
        }
    }
}

/* ---- snapshots ---- */

/* Reports 18, 19 and 20: what was in memory at submit is what is stored, whatever becomes of the memory and of the containers. */
static void async__snapshot_is_taken_at_submit(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("async snapshot");
    dcp_stager *stager = make_stager((dcp_stager_opts)DCP_STAGER_OPTS_INIT);
    for (int i = 0; i < 60; i++) {
        place p;
        place_make(&p, false);
        test_random twin = rnd;
        dcp_value *state = random_state(&rnd), *expected = random_state(&twin);
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        opts.stager = i % 3 ? stager : NULL;
        opts.save.files = i % 4;
        dcp_op *op = submit(&p, "", state, opts);
        scribble(state);
        dcp_dict_set_int(state, "added later", 1, NULL);
        gate_open(&p.gate);
        finish(op);
        assert_stored(p.memory, "", expected);
        dcp_value_free(expected);
        dcp_value_free(state);
        place_free(&p);
    }
    dcp_stager_free(stager);
}

static void async__containers_are_part_of_the_snapshot(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    dcp_value *state, *list, *loaded;
    dcp_dict_create(NULL, &state, NULL);
    dcp_list_create(NULL, &list, NULL);
    dcp_value *one;
    dcp_int_create(NULL, 1, &one, NULL);
    dcp_list_append(list, one, NULL);
    dcp_dict_set(state, dcp_key_str("list"), list, NULL);
    dcp_op *op = submit(&p, "", state, (dcp_async_opts)DCP_ASYNC_OPTS_INIT);
    dcp_int_create(NULL, 2, &one, NULL);
    dcp_list_set(list, 0, one, NULL);
    dcp_dict_set_int(state, "more", 3, NULL);
    gate_open(&p.gate);
    finish(op);
    loaded = read_all(p.memory, "");
    int64_t i;
    assert_int_equal(dcp_value_count(loaded), 1);
    assert_true(dcp_value_int(dcp_value_at(dcp_dict_get_str(loaded, "list"), 0), &i));
    assert_int_equal(i, 1);
    dcp_value_free(loaded);
    dcp_value_free(state);
    place_free(&p);
}

/* Finished records borrow their bytes. */
static void async__records_are_part_of_the_snapshot(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    char text[] = "a record that another program has made", stored[sizeof text] = {0};
    dcp_value *state, *record;
    size_t got = 0;
    dcp_file *f;
    dcp_dict_create(NULL, &state, NULL);
    assert_int_equal(dcp_record_create(NULL, text, sizeof text, &record, NULL), DCP_OK);
    dcp_dict_set(state, dcp_key_str("object"), record, NULL);
    dcp_op *op = submit(&p, "", state, (dcp_async_opts)DCP_ASYNC_OPTS_INIT);
    memset(text, 'x', sizeof text);
    dcp_value_free(state);
    gate_open(&p.gate);
    finish(op);
    assert_int_equal(p.memory->ops->open(p.memory, "__0_0.distcp", DCP_OPEN_READ, &f, NULL), DCP_OK);
    assert_int_equal(p.memory->ops->read_at(f, stored, sizeof stored, 0, &got, NULL), DCP_OK);
    p.memory->ops->close(f, NULL);
    assert_string_equal(stored, "a record that another program has made");
    place_free(&p);
}

/* Report 21. */
static void async__shapes_without_dimensions_and_without_elements_come_back(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    float number = 2.5f, one[1] = {3.5f};
    int64_t single[] = {1, 1}, empty[] = {0, 8};
    dcp_tensor scalar = dcp_tensor_make(DCP_FLOAT32, 0, NULL, &number), t1 = dcp_tensor_make(DCP_FLOAT32, 1, single, one);
    dcp_tensor t11 = dcp_tensor_make(DCP_FLOAT32, 2, single, one), t0 = dcp_tensor_make(DCP_FLOAT32, 2, empty, NULL);
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_set_tensor(state, "scalar", &scalar, NULL);
    dcp_dict_set_tensor(state, "one", &t1, NULL);
    dcp_dict_set_tensor(state, "one by one", &t11, NULL);
    dcp_dict_set_tensor(state, "empty", &t0, NULL);
    finish(submit(&p, "", state, (dcp_async_opts)DCP_ASYNC_OPTS_INIT));
    assert_stored(p.memory, "", state);
    dcp_value_free(state);
    place_free(&p);
}

/* Report 25: overlapping views are copied once, equal ones stay one record, and gaps do not cost memory. */
static void async__views_share_memory_in_the_snapshot(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    enum { ROWS = 1024, COLUMNS = 1024 };
    float *memory = malloc(sizeof(float) * ROWS * COLUMNS), *wide = malloc(sizeof(float) * ROWS * COLUMNS);
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        memory[i] = (float)i;
        wide[i] = (float)-i;
    }
    int64_t whole[] = {ROWS, COLUMNS}, half[] = {ROWS / 2, COLUMNS}, column[] = {ROWS, 1}, strides[] = {COLUMNS, 1},
            turned[] = {1, COLUMNS};
    dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, whole, memory), top = dcp_tensor_make(DCP_FLOAT32, 2, half, memory);
    dcp_tensor bottom = dcp_tensor_make(DCP_FLOAT32, 2, half, memory + ROWS / 2 * COLUMNS), transposed = t;
    dcp_tensor inner = dcp_tensor_make(DCP_FLOAT32, 2, column, memory + 7),
               lone = dcp_tensor_make(DCP_FLOAT32, 2, column, wide + 3);
    transposed.strides = turned;
    inner.strides = lone.strides = strides;
    const struct {
        const char *name;
        const dcp_tensor *t;
    } all[] = {{"top", &top},     {"bottom", &bottom}, {"whole", &t},        {"again", &t}, {"transposed", &transposed},
               {"inner", &inner}, {"lone", &lone},     {"lone again", &lone}};
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        dcp_dict_set_tensor(state, all[i].name, all[i].t, NULL);
    }
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager((dcp_stager_opts)DCP_STAGER_OPTS_INIT);
    dcp_op *op = submit(&p, "", state, opts);
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    assert_int_equal(dcp_op_wait(op, 0, &report, NULL), DCP_OK);
    assert_int_equal(report.n_tied, 2);
    dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
    assert_int_equal(dcp_op_get_progress(op, &progress, NULL), DCP_OK);
    assert_int_equal(progress.staged_bytes, sizeof(float) * (ROWS * COLUMNS + ROWS));
    assert_int_equal(info_of(opts.stager).mapped_bytes, sizeof(float) * (ROWS * COLUMNS + ROWS));
    dcp_op_free(op);
    assert_stored(p.memory, "", state);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    free(memory);
    free(wide);
    place_free(&p);
}

static void async__staging_may_be_done_later(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    dcp_value *state = large_state(4, 3, 10), *expected = large_state(4, 3, 10);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stage_later = true;
    dcp_op *op = submit(&p, "", state, opts);
    assert_int_equal(dcp_op_wait_staged(op, 0, NULL), DCP_OK);
    assert_false(dcp_op_poll(op));
    scribble(state);
    gate_open(&p.gate);
    finish(op);
    assert_stored(p.memory, "", expected);
    dcp_value_free(expected);
    dcp_value_free(state);
    place_free(&p);
}

/* ---- the cap ---- */

/* Reports 38 and 39: the state is larger than the stager may be, one tensor alone is, and all is saved within the cap. */
static void async__a_state_beyond_the_cap_is_saved_within_it(void **unused)
{
    (void)unused;
    static const struct {
        int n;
        int64_t mib_each;
        uint64_t cap;
        const char *transform;
        bool check, file_per_item;
    } cases[] = {{24, 2, 16 * MIB, NULL, false, false},   {1, 24, 8 * MIB, NULL, false, false},
                 {9, 3, 10 * MIB, "stream.zstd/1", 0, 0}, {9, 3, 10 * MIB, NULL, true, false},
                 {9, 3, 10 * MIB, NULL, false, true},     {5, 1, 4096, NULL, false, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        place p;
        place_make(&p, true);
        dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
        so.cap_bytes = cases[i].cap;
        dcp_value *state = large_state(cases[i].n, cases[i].mib_each, 1),
                  *expected = large_state(cases[i].n, cases[i].mib_each, 1);
        for (int k = 0; k < 2; k++) { /* an equal tensor under a second name, for ties that are written once */
            dcp_dict_set_tensor(k ? expected : state, "tied", dcp_value_tensor(dcp_value_at(k ? expected : state, 0)), NULL);
        }
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        opts.stager = make_stager(so);
        opts.save.overwrite = true;
        opts.save.transform = cases[i].transform;
        opts.save.check_content = cases[i].check;
        opts.save.file_per_item = cases[i].file_per_item;
        for (int k = 0; k < 2; k++) {
            dcp_value *s = k ? expected : state;
            dcp_op *op = submit(&p, "", s, opts);
            if (k == 0) {
                scribble(state);
            }
            finish(op);
            if (k == 0) {
                assert_stored(p.memory, "", expected);
            }
        }
        assert_true(info_of(opts.stager).peak_bytes <= cases[i].cap);
        dcp_value_free(expected);
        dcp_value_free(state);
        dcp_stager_free(opts.stager);
        place_free(&p);
    }
}

/* Views that differ in nothing but their shape have records of their own: one that is written says nothing of the others. They
 * are more than the threads that write. */
static void async__reshaped_views_beyond_the_cap_are_each_waited_for(void **unused)
{
    (void)unused;
    enum { VIEWS = 12 };
    place p;
    place_make(&p, true);
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.cap_bytes = 4096;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager(so);
    opts.max_bytes_per_second = 64 * MIB;
    unsigned char *memory = malloc(2 * MIB), *kept = malloc(2 * MIB);
    dcp_value *state, *expected;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &expected, NULL);
    memset(memory, 5, 2 * MIB);
    memset(kept, 5, 2 * MIB);
    for (int i = 0; i < VIEWS; i++) {
        int64_t extents[] = {(int64_t)1 << i, (int64_t)(2 * MIB) >> i};
        dcp_tensor view = dcp_tensor_make(DCP_UINT8, 2, extents, memory), same = dcp_tensor_make(DCP_UINT8, 2, extents, kept);
        char key[8];
        snprintf(key, sizeof key, "t%d", i);
        assert_int_equal(dcp_dict_set_tensor(state, key, &view, NULL), DCP_OK);
        assert_int_equal(dcp_dict_set_tensor(expected, key, &same, NULL), DCP_OK);
    }
    dcp_op *op = submit(&p, "", state, opts);
    memset(memory, 0xEE, 2 * MIB);
    finish(op);
    assert_stored(p.memory, "", expected);
    dcp_value_free(expected);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    free(kept);
    free(memory);
    place_free(&p);
}

/* While what has no room is not written, the caller waits, and he goes on before the rest is. */
static void async__the_caller_waits_for_what_has_no_room_only(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.cap_bytes = 32 * MIB;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager(so);
    opts.max_bytes_per_second = 16 * MIB;
    dcp_value *state = large_state(20, 2, 1);
    dcp_op *op = submit(&p, "", state, opts);
    dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
    dcp_op_get_progress(op, &progress, NULL);
    assert_int_equal(progress.phase, DCP_PHASE_WRITING);
    assert_true(progress.written_bytes >= 4 * MIB);
    assert_true(progress.written_bytes < 30 * MIB);
    assert_true(progress.staged_bytes >= 24 * MIB);
    dcp_op_cancel(op);
    assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_CANCELED);
    dcp_op_free(op);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

/* A tensor inside an object is not an item of its own. */
static void async__objects_with_tensors_beyond_the_cap_are_saved(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.cap_bytes = 4096;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager(so);
    dcp_value *state, *set, *tensor, *expected;
    for (int k = 0; k < 2; k++) {
        int64_t extents[] = {3, (int64_t)MIB};
        dcp_dict_create(NULL, k ? &expected : &state, NULL);
        dcp_seq_create(NULL, DCP_KIND_FROZENSET, &set, NULL);
        dcp_tensor_alloc(NULL, DCP_UINT8, 2, extents, &tensor, NULL);
        memset(dcp_value_tensor(tensor)->data, 5, 3 * MIB);
        assert_int_equal(dcp_list_append(set, tensor, NULL), DCP_OK);
        dcp_dict_set(k ? expected : state, dcp_key_str("set"), set, NULL);
    }
    dcp_op *op = submit(&p, "", state, opts);
    scribble(state);
    finish(op);
    assert_stored(p.memory, "", expected);
    dcp_value_free(expected);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

/* ---- stagers ---- */

static uint64_t resident_bytes(void)
{
    unsigned long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_int_equal(fscanf(f, "%lu %lu", &pages, &resident), 2);
    fclose(f);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int open_descriptors(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d)) {
        n++;
    }
    closedir(d);
    return n;
}

/* Report 22: one stager, many saves, and memory and descriptors stay what they are after the second. */
static void async__many_saves_need_no_more_memory_than_two(void **unused)
{
    (void)unused;
    temp_dir dir;
    char path[300];
    assert_true(temp_dir_make(&dir));
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        dcp_value *state = large_state(8, 8, 1);
        dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
        so.is_shared = is_shared;
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        opts.stager = make_stager(so);
        opts.save.overwrite = opts.save.no_sync = true;
        snprintf(path, sizeof path, "%s/ck%d", dir.path, is_shared);
        uint64_t flat = 0;
        int descriptors = 0;
        for (int i = 0; i < (MEMORY_IS_OURS ? 50 : 6); i++) {
            dcp_op *op;
            assert_int_equal(dcp_save_async(NULL, path, state, &opts, &op, NULL), DCP_OK);
            finish(op);
            uint64_t now = resident_bytes();
            if (i == 1) {
                flat = now;
                descriptors = open_descriptors();
            }
            if (MEMORY_IS_OURS && i > 1 && (now > flat + 2 * MIB || now + 2 * MIB < flat)) {
                fail_msg("save %d: %llu bytes resident, %llu after the second", i, (unsigned long long)now,
                         (unsigned long long)flat);
            }
            assert_true(i <= 1 || open_descriptors() == descriptors);
        }
        dcp_stager_free(opts.stager);
        dcp_value_free(state);
    }
    temp_dir_remove(&dir);
}

static void async__reserved_memory_is_what_the_save_takes(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *state = large_state(10, 2, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager((dcp_stager_opts)DCP_STAGER_OPTS_INIT);
    uint64_t before = resident_bytes();
    assert_int_equal(dcp_stager_reserve(opts.stager, state, NULL), DCP_OK);
    dcp_stager_info reserved = info_of(opts.stager);
    assert_int_equal(reserved.mapped_bytes, 20 * MIB);
    assert_int_equal(reserved.used_bytes, 0);
    assert_true(!MEMORY_IS_OURS || resident_bytes() - before >= 19 * MIB);
    finish(submit(&p, "", state, opts));
    assert_int_equal(info_of(opts.stager).mapped_bytes, reserved.mapped_bytes);
    assert_int_equal(info_of(opts.stager).n_blocks, reserved.n_blocks);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

static void async__a_closed_stager_holds_nothing_and_refuses(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    dcp_value *state = large_state(2, 2, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.is_shared = true;
    int descriptors = open_descriptors();
    opts.stager = make_stager(so);
    dcp_op *op = submit(&p, "", state, opts), *refused;
    assert_true(open_descriptors() > descriptors);
    gate_open(&p.gate);
    dcp_stager_close(opts.stager); /* waits for the save */
    assert_true(dcp_op_poll(op) || dcp_op_wait(op, 0, NULL, NULL) == DCP_OK);
    dcp_stager_close(opts.stager);
    assert_int_equal(info_of(opts.stager).mapped_bytes, 0);
    assert_int_equal(open_descriptors(), descriptors);
    assert_int_equal(dcp_save_async(NULL, "x", state, &opts, &refused, NULL), DCP_STATE);
    assert_int_equal(dcp_stager_reserve(opts.stager, state, NULL), DCP_STATE);
    finish(op);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

/* Descriptors go by blocks, not by tensors. */
static void async__thousands_of_tensors_are_staged_to_shared_memory_with_few_descriptors(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    struct rlimit old, low;
    static float numbers[3000][4];
    int64_t extents[] = {4}, none[] = {0};
    char key[16];
    dcp_value *state;
    dcp_dict_create(NULL, &state, NULL);
    for (int i = 0; i < 3000; i++) {
        for (int k = 0; k < 4; k++) {
            numbers[i][k] = (float)(4 * i + k);
        }
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, i % 10 != 0, i % 17 ? extents : none, numbers[i]);
        snprintf(key, sizeof key, "t%d", i);
        dcp_dict_set_tensor(state, key, &t, NULL);
    }
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.is_shared = true;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager(so);
    getrlimit(RLIMIT_NOFILE, &old);
    low = (struct rlimit){64, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    finish(submit(&p, "", state, opts));
    setrlimit(RLIMIT_NOFILE, &old);
    assert_int_equal(info_of(opts.stager).n_blocks, 1);
    assert_stored(p.memory, "", state);
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

static void async__a_busy_stager_refuses_if_it_is_to(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    dcp_value *state = large_state(1, 1, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    so.refuse_busy = true;
    opts.stager = make_stager(so);
    dcp_op *op = submit(&p, "one", state, opts), *refused;
    opts.save.storage = p.gated;
    assert_int_equal(dcp_save_async(NULL, "two", state, &opts, &refused, NULL), DCP_STATE);
    gate_open(&p.gate);
    finish(op);
    finish(submit(&p, "two", state, opts));
    dcp_value_free(state);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

typedef struct saver {
    place *place;
    dcp_stager *stager;
    int number;
    bool is_well;
} saver;

static void *save_some(void *arg)
{
    saver *s = arg;
    char path[32];
    s->is_well = true;
    dcp_value *state = large_state(3, 1, (unsigned char)(10 * s->number));
    for (int i = 0; i < 5; i++) {
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        dcp_op *op;
        opts.stager = s->stager;
        opts.save.storage = s->place->gated;
        snprintf(path, sizeof path, "%d-%d", s->number, i);
        s->is_well &= dcp_save_async(NULL, path, state, &opts, &op, NULL) == DCP_OK && dcp_op_wait(op, 0, NULL, NULL) == DCP_OK;
        dcp_op_free(op);
    }
    dcp_value_free(state);
    return NULL;
}

static void async__one_stager_serves_several_threads(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    pthread_t threads[3];
    saver savers[3];
    dcp_stager *stager = make_stager((dcp_stager_opts)DCP_STAGER_OPTS_INIT);
    for (int i = 0; i < 3; i++) {
        savers[i] = (saver){&p, stager, i + 1, false};
        assert_int_equal(pthread_create(&threads[i], NULL, save_some, &savers[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_true(savers[i].is_well);
    }
    assert_true(info_of(stager).peak_bytes <= 4 * MIB); /* one save at a time */
    dcp_value *expected = large_state(3, 1, 30);
    assert_stored(p.memory, "3-4", expected);
    dcp_value_free(expected);
    dcp_stager_free(stager);
    place_free(&p);
}

/* ---- failures ---- */

/* R3.18, reports 27 and 37: kept until somebody asks, told as often as asked, of no matter to the next save. */
static void async__a_failure_is_kept_and_does_no_harm_to_the_next_save(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *state = large_state(2, 1, 1), *changed = large_state(2, 1, 7);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.stager = make_stager((dcp_stager_opts)DCP_STAGER_OPTS_INIT);
    opts.save.overwrite = true;
    finish(submit(&p, "", state, opts));
    p.gate.fail_writes = DCP_NOSPACE;
    dcp_op *op = submit(&p, "", changed, opts);
    for (int i = 0; i < 3; i++) {
        dcp_error err = DCP_ERROR_INIT;
        assert_int_equal(dcp_op_wait(op, 0, NULL, &err), DCP_NOSPACE);
        assert_int_equal(err.code, DCP_NOSPACE);
        assert_non_null(strstr(err.message, "injected"));
    }
    assert_int_equal(dcp_op_wait_staged(op, 0, NULL), DCP_OK);
    assert_stored(p.memory, "", state);
    p.gate.fail_writes = DCP_OK;
    finish(submit(&p, "", changed, opts)); /* before the failed one is freed */
    assert_stored(p.memory, "", changed);
    dcp_op_free(op);
    dcp_value_free(state);
    dcp_value_free(changed);
    dcp_stager_free(opts.stager);
    place_free(&p);
}

static void count_lines(void *user, dcp_log_level level, const char *line)
{
    (void)line;
    __atomic_fetch_add((int *)user, level == DCP_LOG_WARNING, __ATOMIC_RELAXED);
}

static void async__a_failure_that_nobody_asked_for_is_logged(void **unused)
{
    (void)unused;
    int warnings = 0;
    dcp_context_opts co = DCP_CONTEXT_OPTS_INIT;
    co.log = count_lines;
    co.log_user = &warnings;
    dcp_context *ctx;
    assert_int_equal(dcp_context_create(&co, &ctx, NULL), DCP_OK);
    dcp_value *state = large_state(1, 1, 1);
    dcp_op *op;
    assert_int_equal(dcp_save_async(ctx, "/dev/null/nowhere", state, NULL, &op, NULL), DCP_OK);
    dcp_op_free(op);
    assert_int_equal(warnings, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.save.on_failure = DCP_FAILURE_WARN;
    assert_int_equal(dcp_save_async(ctx, "/dev/null/nowhere", state, &opts, &op, NULL), DCP_OK);
    dcp_save_report report = DCP_SAVE_REPORT_INIT;
    assert_int_equal(dcp_op_wait(op, 0, &report, NULL), DCP_OK);
    assert_int_not_equal(report.status, DCP_OK);
    dcp_op_free(op);
    dcp_value_free(state);
    dcp_context_free(ctx);
}

/* A rank that could not even make its state. */
static void async__a_failure_before_the_call_is_kept_too(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_error failed = DCP_ERROR_INIT;
    dcp_error_set(&failed, DCP_DEVICE, "no such luck");
    opts.save.failed = &failed;
    dcp_op *op = submit(&p, "", NULL, opts);
    memset(&failed, 0, sizeof failed);
    dcp_error err = DCP_ERROR_INIT;
    assert_int_equal(dcp_op_wait_staged(op, 0, NULL), DCP_DEVICE);
    assert_int_equal(dcp_op_wait(op, 0, NULL, &err), DCP_DEVICE);
    assert_non_null(strstr(err.message, "no such luck"));
    dcp_op_free(op);
    place_free(&p);
}

/* What is wrong with the state is found while staging, and told by both waits. */
static void async__staging_failures_come_from_both_waits(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *state, *inner;
    dcp_dict_create(NULL, &state, NULL);
    dcp_dict_create(NULL, &inner, NULL);
    dcp_dict_set_int(inner, "b", 1, NULL);
    dcp_dict_set_int(state, "a.b", 2, NULL);
    dcp_dict_set(state, dcp_key_str("a"), inner, NULL);
    for (int later = 0; later < 2; later++) {
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        opts.stage_later = later;
        dcp_op *op = submit(&p, "", state, opts);
        assert_int_equal(dcp_op_wait_staged(op, 0, NULL), DCP_MISMATCH);
        assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_MISMATCH);
        dcp_op_free(op);
    }
    dcp_value_free(state);
    place_free(&p);
}

static void async__wrong_arguments_are_refused(void **unused)
{
    (void)unused;
    dcp_value *state = large_state(1, 1, 1);
    dcp_op *op = NULL;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_stager *stager;
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
    dcp_stager_info info = DCP_STAGER_INFO_INIT;
    assert_int_equal(dcp_save_async(NULL, NULL, state, NULL, &op, NULL), DCP_ARG);
    assert_int_equal(dcp_save_async(NULL, "x", state, NULL, NULL, NULL), DCP_ARG);
    opts.struct_size--;
    assert_int_equal(dcp_save_async(NULL, "x", state, &opts, &op, NULL), DCP_ARG);
    opts.struct_size++;
    opts.save.struct_size--;
    assert_int_equal(dcp_save_async(NULL, "x", state, &opts, &op, NULL), DCP_ARG);
    assert_null(op);
    assert_int_equal(dcp_save_async(NULL, "x", NULL, NULL, &op, NULL), DCP_OK);
    assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_ARG);
    progress.struct_size = 1;
    assert_int_equal(dcp_op_get_progress(op, &progress, NULL), DCP_ARG);
    dcp_op_free(op);
    assert_int_equal(dcp_op_wait(NULL, 0, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_op_wait_staged(NULL, 0, NULL), DCP_ARG);
    assert_false(dcp_op_poll(NULL));
    dcp_op_cancel(NULL);
    dcp_op_free(NULL);
    so.struct_size--;
    assert_int_equal(dcp_stager_create(NULL, &so, &stager, NULL), DCP_ARG);
    so.struct_size++;
    so.pin = DCP_PIN_REQUIRED;
    assert_int_equal(dcp_stager_create(NULL, &so, &stager, NULL), DCP_ARG); /* for no device */
    so.pin = (dcp_pin_policy)9;
    assert_int_equal(dcp_stager_create(NULL, &so, &stager, NULL), DCP_ARG);
    assert_int_equal(dcp_stager_create(NULL, NULL, NULL, NULL), DCP_ARG);
    assert_int_equal(dcp_stager_reserve(NULL, state, NULL), DCP_ARG);
    assert_int_equal(dcp_stager_get_info(NULL, &info, NULL), DCP_ARG);
    dcp_stager_close(NULL);
    dcp_stager_free(NULL);
    dcp_value_free(state);
}

static dcp_status save_in_background(dcp_context *ctx, void *user, dcp_error *err)
{
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
    dcp_storage *st;
    dcp_op *op;
    so.cap_bytes = 3 * MIB;
    dcp_status status = dcp_storage_memory(ctx, &st, err);
    if (status != DCP_OK) {
        return status;
    }
    status = dcp_stager_create(ctx, &so, &opts.stager, err);
    if (status == DCP_OK) {
        opts.save.storage = st;
        opts.save.transform = "";
        opts.save.checkpoint_id = "an id";
        status = dcp_save_async(ctx, "", user, &opts, &op, err);
        if (status == DCP_OK) {
            status = dcp_op_wait(op, 0, NULL, err);
            dcp_op_free(op);
        }
        dcp_stager_free(opts.stager);
    }
    dcp_storage_free(st);
    return status;
}

static void async__every_failed_allocation_is_told(void **unused)
{
    (void)unused;
    dcp_value *state = large_state(5, 1, 1), *set, *tensor;
    int64_t extents[] = {2};
    dcp_seq_create(NULL, DCP_KIND_FROZENSET, &set, NULL);
    dcp_tensor_alloc(NULL, DCP_UINT8, 1, extents, &tensor, NULL);
    memset(dcp_value_tensor(tensor)->data, 1, 2);
    dcp_list_append(set, tensor, NULL);
    dcp_dict_set(state, dcp_key_str("set"), set, NULL);
    assert_true(failing_alloc_walk(save_in_background, state) > 0);
    dcp_value_free(state);
}

/* Report 35: where no thread can be started, as with a limit on processes, the save is done by the caller's. */
static int n_refused_threads;

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    void *address = dlsym(RTLD_NEXT, "pthread_create");
    memcpy(&real, &address, sizeof real);
    if (__atomic_load_n(&n_refused_threads, __ATOMIC_RELAXED) > 0) {
        __atomic_fetch_add(&n_refused_threads, 1, __ATOMIC_RELAXED);
        return EAGAIN;
    }
    return real(thread, attr, fn, arg);
}

static void async__without_threads_the_save_is_made_all_the_same(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *state = large_state(8, 1, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.save.files = 8;
    n_refused_threads = 1;
    dcp_op *op = submit(&p, "", state, opts);
    assert_true(dcp_op_poll(op));
    assert_true(n_refused_threads > 1);
    n_refused_threads = 0;
    finish(op);
    assert_stored(p.memory, "", state);
    dcp_value_free(state);
    place_free(&p);
}

/* ---- progress ---- */

/* Report 36. */
static void async__progress_tells_where_a_save_hangs(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, false);
    dcp_value *state = large_state(4, 1, 1);
    dcp_op *op = submit(&p, "", state, (dcp_async_opts)DCP_ASYNC_OPTS_INIT);
    dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
    gate_await_writer(&p.gate);
    assert_int_equal(dcp_op_wait(op, 20, NULL, NULL), DCP_TIMEOUT);
    assert_false(dcp_op_poll(op));
    assert_int_equal(dcp_op_get_progress(op, &progress, NULL), DCP_OK);
    assert_int_equal(progress.phase, DCP_PHASE_WRITING);
    assert_int_equal(progress.total_bytes, 4 * MIB);
    assert_int_equal(progress.staged_bytes, 4 * MIB);
    assert_int_equal(progress.written_bytes, 0);
    assert_true(progress.seconds_left < 0);
    gate_open(&p.gate);
    assert_int_equal(dcp_op_wait(op, 60000, NULL, NULL), DCP_OK);
    assert_int_equal(dcp_op_get_progress(op, &progress, NULL), DCP_OK);
    assert_int_equal(progress.phase, DCP_PHASE_DONE);
    assert_int_equal(progress.written_bytes, 4 * MIB);
    assert_true(progress.bytes_per_second > 0 && progress.seconds_left == 0 && progress.seconds >= progress.stall_seconds);
    dcp_op_free(op);
    dcp_value_free(state);
    place_free(&p);
}

static void async__a_canceled_save_leaves_the_old_checkpoint(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *old = large_state(2, 1, 1), *state = large_state(6, 2, 5);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.save.overwrite = true;
    finish(submit(&p, "", old, opts));
    p.gate.is_open = false;
    dcp_op *op = submit(&p, "", state, opts);
    gate_await_writer(&p.gate);
    dcp_op_cancel(op);
    gate_open(&p.gate);
    assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_CANCELED);
    dcp_op_free(op);
    opts.max_bytes_per_second = 1; /* would take for ever */
    op = submit(&p, "", state, opts);
    dcp_op_cancel(op);
    assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_CANCELED);
    dcp_op_free(op);
    assert_stored(p.memory, "", old);
    dcp_value_free(old);
    dcp_value_free(state);
    place_free(&p);
}

static void async__bandwidth_and_priority_are_kept(void **unused)
{
    (void)unused;
    place p;
    place_make(&p, true);
    dcp_value *state = large_state(8, 1, 1);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    opts.low_priority = true;
    opts.max_bytes_per_second = 20 * MIB;
    dcp_op *op = submit(&p, "", state, opts);
    dcp_op_progress progress = DCP_OP_PROGRESS_INIT;
    assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_OK);
    dcp_op_get_progress(op, &progress, NULL);
    assert_true(progress.seconds >= 8.0 / 20);
    assert_true(progress.bytes_per_second <= 20.5 * (double)MIB);
    assert_int_equal(p.gate.nice_of_writer, 19);
    assert_int_equal(p.gate.policy_of_writer, SCHED_BATCH);
    assert_int_not_equal(getpriority(PRIO_PROCESS, 0), 19); /* of this thread */
    dcp_op_free(op);
    dcp_value_free(state);
    place_free(&p);
}

/* ---- ranks ---- */

typedef struct together {
    place place;
    int bad_rank; /* has no state; -1: all are well */
    bool has_stager;
} together;

/* Two saves, with the caller's own traffic on the same communicator meanwhile. */
static dcp_status save_twice(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    together *t = user;
    dcp_status status = DCP_OK;
    dcp_value *state = large_state(3, 1, (unsigned char)(10 * rank));
    dcp_stager *stager = NULL;
    if (t->has_stager) {
        status = dcp_stager_create(NULL, NULL, &stager, err);
    }
    for (int i = 0; i < 2 && status == DCP_OK; i++) {
        static const char *const own[] = {"*"};
        dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
        dcp_op *op;
        opts.stager = stager;
        opts.save.storage = t->place.gated;
        opts.save.comm = comm;
        opts.save.per_rank = own;
        opts.save.n_per_rank = 1;
        status = dcp_save_async(NULL, i ? "second" : "first", rank == t->bad_rank ? NULL : state, &opts, &op, err);
        for (int k = 0; k < 20 && status == DCP_OK; k++) {
            int all[16];
            status = dcp_comm_all_gather(comm, &rank, sizeof rank, all, 0, err);
            status = status == DCP_OK && all[dcp_comm_size(comm) - 1] != dcp_comm_size(comm) - 1 ? DCP_INTERNAL : status;
        }
        if (status == DCP_OK) {
            status = dcp_op_wait(op, 0, NULL, err);
            dcp_op_free(op);
        }
    }
    dcp_value_free(state);
    dcp_stager_free(stager);
    return status;
}

static void async__ranks_save_on_a_communicator_of_their_own(void **unused)
{
    (void)unused;
    for (int has_stager = 0; has_stager < 2; has_stager++) {
        rank_thread ranks[4];
        together t = {.bad_rank = -1, .has_stager = has_stager};
        place_make(&t.place, true);
        run_ranks(4, save_twice, &t, ranks);
        for (int r = 0; r < 4; r++) {
            if (ranks[r].status != DCP_OK) {
                fail_msg("rank %d: %s", r, ranks[r].err.message);
            }
        }
        dcp_value *loaded = read_all(t.place.memory, "second");
        const dcp_value *rank3 = dcp_dict_get_str(dcp_dict_get_str(loaded, "rank"), "3");
        const dcp_tensor *tensor = dcp_value_tensor(dcp_dict_get_str(rank3, "t2"));
        assert_int_equal(((const uint8_t *)tensor->data)[0], 32);
        dcp_value_free(loaded);
        place_free(&t.place);
    }
}

static void async__a_rank_that_cannot_stage_fails_all(void **unused)
{
    (void)unused;
    rank_thread ranks[3];
    together t = {.bad_rank = 1, .has_stager = true};
    place_make(&t.place, true);
    run_ranks(3, save_twice, &t, ranks);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(ranks[r].status, DCP_PEER);
    }
    dcp_stat st;
    assert_int_equal(t.place.memory->ops->stat(t.place.memory, "first/.metadata", &st, NULL), DCP_NOT_FOUND);
    place_free(&t.place);
}

typedef enum not_ready { STAGER_CLOSED, STAGER_BUSY, PLACE_MISSING, N_NOT_READY } not_ready;

typedef struct stopped {
    place place;
    not_ready why;
    int bad_rank;
} stopped;

/* A save with or without what it takes, and what all are told. */
static dcp_status save_once(stopped *t, dcp_comm *comm, dcp_stager *stager, bool has_place, dcp_failures *failures,
                            dcp_error *err)
{
    dcp_value *state = large_state(3, 1, 5);
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_op *op;
    opts.stager = stager;
    opts.save.storage = t->place.gated;
    opts.save.comm = comm;
    opts.save.overwrite = true;
    opts.save.failures = failures;
    dcp_status status = dcp_save_async(NULL, "x", state, &opts, has_place ? &op : NULL, err);
    if (status == DCP_OK) {
        status = dcp_op_wait(op, 0, NULL, err);
        dcp_op_free(op);
    }
    dcp_value_free(state);
    return status;
}

static dcp_status fault(dcp_error *err, const char *what)
{
    return dcp_error_set(err, DCP_INTERNAL, "%s", what);
}

/* A good save, one that a rank cannot begin, and a good one again, with another stager on that rank. */
static dcp_status save_but_once(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    stopped *t = user;
    bool is_bad = rank == t->bad_rank;
    dcp_stager_opts opts = DCP_STAGER_OPTS_INIT;
    dcp_stager *stager, *fresh;
    dcp_failures *failures;
    opts.refuse_busy = true;
    dcp_comm_set_timeout(comm, 60000);
    dcp_stager_create(NULL, &opts, &stager, NULL);
    dcp_stager_create(NULL, NULL, &fresh, NULL);
    dcp_failures_create(NULL, &failures, NULL);
    dcp_status status = save_once(t, comm, stager, true, NULL, err);
    if (is_bad && t->why == STAGER_CLOSED) {
        dcp_stager_close(stager);
    } else if (is_bad && t->why == STAGER_BUSY) {
        dcp__stager_enter(stager, NULL);
    }
    if (status == DCP_OK) {
        dcp_status stopped_as = save_once(t, comm, stager, !(is_bad && t->why == PLACE_MISSING), failures, err);
        const dcp_failure *cause = dcp_failures_count(failures) == 1 ? dcp_failures_at(failures, 0) : NULL;
        status = stopped_as != DCP_PEER                                           ? fault(err, "not PEER")
                 : !cause || cause->rank != t->bad_rank                           ? fault(err, "the rank is not named")
                 : cause->code != (t->why == PLACE_MISSING ? DCP_ARG : DCP_STATE) ? fault(err, "another cause")
                                                                                  : DCP_OK;
    }
    status = status == DCP_OK ? save_once(t, comm, is_bad ? fresh : stager, true, NULL, err) : status;
    if (is_bad && t->why == STAGER_BUSY) {
        dcp__stager_leave(stager);
    }
    dcp_failures_free(failures);
    dcp_stager_free(stager);
    dcp_stager_free(fresh);
    return status;
}

static void async__a_rank_that_cannot_begin_stops_all_at_once(void **unused)
{
    (void)unused;
    const int sizes[] = {2, 4};
    for (int i = 0; i < 2 * N_NOT_READY; i++) {
        rank_thread ranks[4];
        int size = sizes[i % 2];
        stopped t = {.why = (not_ready)(i / 2), .bad_rank = size - 1};
        place_make(&t.place, true);
        time_t start = time(NULL);
        run_ranks(size, save_but_once, &t, ranks);
        assert_true(time(NULL) - start < 55); /* nobody has waited for the deadline */
        for (int r = 0; r < size; r++) {
            if (ranks[r].status != DCP_OK) {
                fail_msg("case %d, rank %d: %s", i, r, ranks[r].err.message);
            }
        }
        place_free(&t.place);
    }
}

static dcp_status no_alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                              dcp_error *err)
{
    (void)user;
    (void)send;
    (void)recv;
    (void)timeout_ms;
    return dcp_error_set(err, DCP_INTERNAL, "must not be called");
}

/* R3.25: found at once, and without any message. */
static void async__a_communicator_for_one_thread_is_refused(void **unused)
{
    (void)unused;
    dcp_comm_callbacks callbacks = DCP_COMM_CALLBACKS_INIT;
    dcp_comm *comm;
    dcp_op *op;
    dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
    dcp_value *state = large_state(1, 1, 1);
    callbacks.size = 2;
    callbacks.alltoall = no_alltoall;
    assert_int_equal(dcp_comm_from_callbacks(NULL, &callbacks, &comm, NULL), DCP_OK);
    opts.save.comm = comm;
    assert_int_equal(dcp_save_async(NULL, "x", state, &opts, &op, NULL), DCP_UNSUPPORTED);
    assert_false(dcp_comm_is_broken(comm));
    dcp_comm_free(comm);
    dcp_value_free(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(async__snapshot_is_taken_at_submit),
        cmocka_unit_test(async__containers_are_part_of_the_snapshot),
        cmocka_unit_test(async__records_are_part_of_the_snapshot),
        cmocka_unit_test(async__shapes_without_dimensions_and_without_elements_come_back),
        cmocka_unit_test(async__views_share_memory_in_the_snapshot),
        cmocka_unit_test(async__staging_may_be_done_later),
        cmocka_unit_test(async__a_state_beyond_the_cap_is_saved_within_it),
        cmocka_unit_test(async__reshaped_views_beyond_the_cap_are_each_waited_for),
        cmocka_unit_test(async__the_caller_waits_for_what_has_no_room_only),
        cmocka_unit_test(async__objects_with_tensors_beyond_the_cap_are_saved),
        cmocka_unit_test(async__many_saves_need_no_more_memory_than_two),
        cmocka_unit_test(async__reserved_memory_is_what_the_save_takes),
        cmocka_unit_test(async__a_closed_stager_holds_nothing_and_refuses),
        cmocka_unit_test(async__thousands_of_tensors_are_staged_to_shared_memory_with_few_descriptors),
        cmocka_unit_test(async__a_busy_stager_refuses_if_it_is_to),
        cmocka_unit_test(async__one_stager_serves_several_threads),
        cmocka_unit_test(async__a_failure_is_kept_and_does_no_harm_to_the_next_save),
        cmocka_unit_test(async__a_failure_that_nobody_asked_for_is_logged),
        cmocka_unit_test(async__a_failure_before_the_call_is_kept_too),
        cmocka_unit_test(async__staging_failures_come_from_both_waits),
        cmocka_unit_test(async__wrong_arguments_are_refused),
        cmocka_unit_test(async__every_failed_allocation_is_told),
        cmocka_unit_test(async__without_threads_the_save_is_made_all_the_same),
        cmocka_unit_test(async__progress_tells_where_a_save_hangs),
        cmocka_unit_test(async__a_canceled_save_leaves_the_old_checkpoint),
        cmocka_unit_test(async__bandwidth_and_priority_are_kept),
        cmocka_unit_test(async__ranks_save_on_a_communicator_of_their_own),
        cmocka_unit_test(async__a_rank_that_cannot_stage_fails_all),
        cmocka_unit_test(async__a_rank_that_cannot_begin_stops_all_at_once),
        cmocka_unit_test(async__a_communicator_for_one_thread_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
