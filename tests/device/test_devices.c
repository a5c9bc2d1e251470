/* Saving from and loading to devices, on look-alikes of both vendors' libraries, which enforce their documented rules. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "dcp/dcp.h"
#include "support/look_alike.h"
#include "support/memory_copy.h"
#include "support/random.h"
#include "support/ranks.h"

#define MIB ((size_t)1 << 20)

static look_alike both[2];

static dcp_storage *memory_storage(void)
{
    dcp_storage *st;
    assert_int_equal(dcp_storage_memory(NULL, &st, NULL), DCP_OK);
    return st;
}

/* ---- states that exist twice: on a device and in host memory ---- */

typedef struct twins {
    const look_alike *on;
    dcp_value *host, *device;
    char *host_memory, *device_memory; /* of all tensors */
    size_t bytes;
} twins;

static void fill(test_random *rnd, char *to, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = (char)test_random_next(rnd);
    }
}

/* Tensors of every dtype and of many forms in one block of memory, some of them views of others, some inside objects. */
static twins twins_make(const look_alike *on, int index, test_random *rnd)
{
    static const int64_t square[] = {300, 300}, turned[] = {1, 300}, column[] = {300, 7}, wide[] = {300, 1}, cube[] = {5, 6, 7},
                         mixed[] = {1, 35, 5}, line[] = {700000}, spread[] = {3}, none[] = {0, 4};
    const struct {
        const char *name;
        dcp_dtype dtype;
        int ndim;
        const int64_t *extents, *strides;
        size_t offset;
    } all[] = {{"square", DCP_FLOAT32, 2, square, NULL, 0},      {"turned", DCP_FLOAT32, 2, square, turned, 0},
               {"column", DCP_FLOAT32, 2, column, wide, 44},     {"again", DCP_FLOAT32, 2, column, wide, 44},
               {"cube", DCP_BFLOAT16, 3, cube, mixed, 2048},     {"line", DCP_FLOAT64, 1, line, NULL, 4096},
               {"spread", DCP_INT8, 1, cube, spread, 17},        {"scalar", DCP_COMPLEX64, 0, NULL, NULL, 160},
               {"bool", DCP_BOOL, 1, cube, NULL, 500},           {"none", DCP_INT64, 2, none, NULL, 0},
               {"f8", DCP_FLOAT8_E4M3FN, 2, square, turned, 999}};
    twins t = {.on = on, .bytes = 6 * MIB};
    t.host_memory = malloc(t.bytes);
    fill(rnd, t.host_memory, t.bytes);
    t.device_memory = on->alloc(index, t.bytes);
    memcpy(on->peek(t.device_memory), t.host_memory, t.bytes);
    for (int side = 0; side < 2; side++) {
        dcp_value *state, *set, *inner;
        dcp_dict_create(NULL, &state, NULL);
        for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
            dcp_tensor x = dcp_tensor_make(all[i].dtype, all[i].ndim, all[i].extents,
                                           (side ? t.device_memory : t.host_memory) + all[i].offset);
            x.strides = all[i].strides;
            x.device = side ? (dcp_device){on->type, index} : (dcp_device){DCP_DEVICE_CPU, 0};
            assert_int_equal(dcp_dict_set_tensor(state, all[i].name, &x, NULL), DCP_OK);
        }
        dcp_seq_create(NULL, DCP_KIND_FROZENSET, &set, NULL);
        assert_int_equal(dcp_tensor_create(NULL, dcp_value_tensor(dcp_dict_get_str(state, "column")), &inner, NULL), DCP_OK);
        dcp_list_append(set, inner, NULL);
        dcp_dict_set(state, dcp_key_str("object"), set, NULL);
        dcp_dict_set_int(state, "step", 7, NULL);
        *(side ? &t.device : &t.host) = state;
    }
    return t;
}

static void twins_free(twins *t)
{
    dcp_value_free(t->host);
    dcp_value_free(t->device);
    free(t->host_memory);
    t->on->free(t->device_memory);
}

static const char *const names[] = {"__0_0.distcp", "__0_1.distcp", ".metadata"};

static void assert_same_files(dcp_storage *a, dcp_storage *b, int files)
{
    for (int i = 3 - files - 1; i < 3; i++) {
        const char *name = i == 2 ? names[2] : names[files == 2 ? i : 0];
        file_bytes x = get_file(a, name), y = get_file(b, name);
        assert_int_equal(x.n, y.n);
        assert_memory_equal(x.data, y.data, x.n);
        free(x.data);
        free(y.data);
    }
}

static void save_to(dcp_storage *st, dcp_value *state, dcp_save_opts opts)
{
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    opts.save_id = "00000000-0000-4000-8000-000000000000";
    opts.checkpoint_id = "x";
    if (dcp_save(NULL, "", state, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s: %s", dcp_status_name(err.code), err.message);
    }
}

/* No registration is left, none of memory that was unmapped before, and the runtime was treated as a shared one. */
static void assert_clean(const look_alike *l)
{
    assert_int_equal(l->registrations(), 0);
    assert_int_equal(l->count("unmapped before it was unregistered"), 0);
    assert_int_equal(l->count("memory destroyed"), 0);
    assert_int_equal(l->count("pinned alone: nothing is registered"), 0);
    assert_int_equal(l->count("aclFinalize") + l->count("aclrtResetDevice"), 0);
}

/* ---- saving ---- */

/* R1.26, R11.6, R11.8, R11.12: what is stored does not depend on the device, on the order of copies, or on how slow they are. */
static void devices__files_are_those_of_a_save_from_host_memory(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices save");
    for (int k = 0; k < 2; k++) {
        static const uint64_t ahead[] = {0, 10000000, 3 << 20};
        for (int i = 0; i < 6; i++) {
            both[k].reset();
            both[k].delay_us(i == 3 ? 2000 : 0);
            twins t = twins_make(&both[k], i % 2, &rnd);
            dcp_storage *host = memory_storage(), *device = memory_storage();
            dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
            opts.files = i % 3 == 2 ? 2 : 1;
            opts.transform = i == 4 ? "stream.zstd/1" : NULL;
            opts.serialization = i == 5 ? DCP_SERIALIZE_SAFETENSORS : DCP_SERIALIZE_TORCH_SAVE;
            opts.copy_ahead_bytes = ahead[i % 3];
            save_to(host, t.host, opts);
            save_to(device, t.device, opts);
            assert_same_files(host, device, opts.files);
            assert_clean(&both[k]);
            dcp_storage_free(host);
            dcp_storage_free(device);
            twins_free(&t);
        }
    }
}

static file_bytes hf_file_of(dcp_storage *st, dcp_value *state, uint64_t copy_ahead_bytes)
{
    dcp_hf_save_opts opts = DCP_HF_SAVE_OPTS_INIT;
    dcp_error err = DCP_ERROR_INIT;
    opts.storage = st;
    opts.whole = opts.drop_objects = true;
    opts.copy_ahead_bytes = copy_ahead_bytes;
    if (dcp_hf_save(NULL, "", state, &opts, NULL, &err) != DCP_OK) {
        fail_msg("%s", err.message);
    }
    return get_file(st, "model-00001-of-00001.safetensors");
}

static void devices__hugging_face_files_are_those_of_host_memory(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices hugging face");
    for (int k = 0; k < 2; k++) {
        for (uint64_t ahead = 0; ahead <= 3 * MIB; ahead += 3 * MIB) {
            both[k].reset();
            twins t = twins_make(&both[k], 0, &rnd);
            dcp_storage *host = memory_storage(), *device = memory_storage();
            file_bytes a = hf_file_of(host, t.host, ahead), b = hf_file_of(device, t.device, ahead);
            assert_int_equal(a.n, b.n);
            assert_memory_equal(a.data, b.data, a.n);
            assert_clean(&both[k]);
            free(a.data);
            free(b.data);
            dcp_storage_free(host);
            dcp_storage_free(device);
            twins_free(&t);
        }
    }
}

/* R7.24, R11.11: the caller's stream is waited for, and only it. */
static void devices__the_callers_stream_is_waited_for(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        l->reset();
        void *stream = look_alike_stream(l, 0), *other = look_alike_stream(l, 0);
        char *memory = l->alloc(0, MIB);
        int64_t extents[] = {(int64_t)MIB};
        dcp_tensor x = dcp_tensor_make(DCP_UINT8, 1, extents, memory);
        x.device = (dcp_device){l->type, 0};
        for (int how = 0; how < 3; how++) {
            dcp_value *state, *loaded;
            dcp_dict_create(NULL, &state, NULL);
            dcp_dict_set_tensor(state, "x", &x, NULL);
            dcp_storage *st = memory_storage();
            dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
            opts.save.storage = st;
            opts.save.stream = stream;
            opts.stage_later = how == 2;
            memset(l->peek(memory), 0, MIB);
            l->kernel(stream, memory, MIB, 40 + how, 100);
            if (how == 0) {
                assert_int_equal(dcp_save(NULL, "", state, &opts.save, NULL, NULL), DCP_OK);
            } else {
                dcp_op *op;
                assert_int_equal(dcp_save_async(NULL, "", state, &opts, &op, NULL), DCP_OK);
                assert_int_equal(dcp_op_wait_staged(op, 0, NULL), DCP_OK);
                l->kernel(other, memory, MIB, 99, 0); /* the state is the caller's again */
                assert_int_equal(dcp_op_wait(op, 0, NULL, NULL), DCP_OK);
                dcp_op_free(op);
                l->await(other);
            }
            dcp_open_opts in = DCP_OPEN_OPTS_INIT;
            dcp_checkpoint *ck;
            in.storage = st;
            assert_int_equal(dcp_checkpoint_open(NULL, "", &in, &ck, NULL), DCP_OK);
            assert_int_equal(dcp_read_tree(ck, true, &loaded, NULL), DCP_OK);
            const uint8_t *bytes = dcp_value_tensor(dcp_dict_get_str(loaded, "x"))->data;
            assert_int_equal(bytes[0], 40 + how);
            assert_int_equal(bytes[MIB - 1], 40 + how);
            dcp_checkpoint_close(ck);
            dcp_value_free(loaded);
            dcp_value_free(state);
            dcp_storage_free(st);
        }
        l->free(memory);
    }
}

/* R7.1, R7.23: a background save of tensors on a device, with pinned and with ordinary blocks, and beyond the cap. */
static void devices__background_saves_store_the_same(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices async");
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 8; i++) {
            const look_alike *l = &both[k];
            l->reset();
            l->delay_us(200);
            twins t = twins_make(l, i % 2, &rnd);
            dcp_storage *host = memory_storage(), *device = memory_storage();
            dcp_async_opts opts = DCP_ASYNC_OPTS_INIT;
            dcp_stager_opts so = DCP_STAGER_OPTS_INIT;
            dcp_op *op;
            so.pin = i & 1 ? DCP_PIN_REQUIRED : DCP_PIN_NEVER;
            so.pin_device = (dcp_device){l->type, i % 2};
            so.is_shared = i & 2;
            so.cap_bytes = i & 4 ? MIB : 0;
            opts.save.save_id = "00000000-0000-4000-8000-000000000000";
            opts.save.checkpoint_id = "x";
            opts.save.storage = device;
            assert_int_equal(dcp_stager_create(NULL, &so, &opts.stager, NULL), DCP_OK);
            dcp_error err = DCP_ERROR_INIT;
            if (dcp_save_async(NULL, "", t.device, &opts, &op, &err) != DCP_OK) {
                fail_msg("%s", err.message);
            }
            memset(l->peek(t.device_memory), 0xEE, t.bytes);
            if (dcp_op_wait(op, 0, NULL, &err) != DCP_OK) {
                fail_msg("%s", err.message);
            }
            dcp_op_free(op);
            save_to(host, t.host, opts.save);
            dcp_value *trees[2];
            for (int side = 0; side < 2; side++) {
                dcp_open_opts in = DCP_OPEN_OPTS_INIT;
                dcp_checkpoint *ck;
                in.storage = side ? device : host;
                in.check_crc = true;
                assert_int_equal(dcp_checkpoint_open(NULL, "", &in, &ck, NULL), DCP_OK);
                assert_int_equal(dcp_read_tree(ck, true, &trees[side], NULL), DCP_OK);
                dcp_checkpoint_close(ck);
            }
            assert_true(dcp_value_equal(trees[0], trees[1]));
            dcp_value_free(trees[0]);
            dcp_value_free(trees[1]);
            dcp_stager_info info = DCP_STAGER_INFO_INIT;
            dcp_stager_get_info(opts.stager, &info, NULL);
            assert_int_equal(info.pinned_bytes, i & 1 ? info.mapped_bytes : 0);
            dcp_stager_free(opts.stager);
            assert_clean(l);
            if (i & 1 && !(i & 4)) {
                assert_int_equal(l->count("asynchronous copy with pageable memory"), 0);
            }
            dcp_storage_free(host);
            dcp_storage_free(device);
            twins_free(&t);
        }
    }
}

/* Content is compared through the devices as well. */
static void devices__content_is_compared(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices content");
    for (int k = 0; k < 2; k++) {
        twins t = twins_make(&both[k], 0, &rnd);
        dcp_storage *st = memory_storage();
        dcp_comm *self;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        assert_int_equal(dcp_comm_self(NULL, &self, NULL), DCP_OK);
        opts.comm = self;
        opts.check_content = true;
        save_to(st, t.device, opts);
        dcp_comm_free(self);
        dcp_storage_free(st);
        twins_free(&t);
    }
}

/* ---- broadcasts ---- */

typedef struct broadcast_case {
    const look_alike *on;
    bool has_own;                /* the communicator has broadcasts between devices */
    int n_ranks, root, bad_rank; /* bad_rank gives no address; -1: all are well */
    size_t bytes;
    char *memory[4]; /* [rank], on devices */
    int n_own;       /* calls of the communicator's */
} broadcast_case;

/* A rank of the communicator under test: what is between devices goes by a copy behind the scenes. */
typedef struct broadcast_rank {
    broadcast_case *of;
    dcp_comm *below;
} broadcast_rank;

static dcp_status below_alltoall(void *user, const dcp_comm_send *send, const dcp_comm_recv *recv, uint32_t timeout_ms,
                                 dcp_error *err)
{
    return dcp_comm_alltoall(((broadcast_rank *)user)->below, send, recv, timeout_ms, err);
}

static dcp_status own_broadcast(void *user, void *device_ptr, size_t bytes, int root, void *stream, uint32_t timeout_ms,
                                dcp_error *err)
{
    broadcast_rank *r = user;
    (void)stream;
    __atomic_fetch_add(&r->of->n_own, 1, __ATOMIC_RELAXED);
    if (r->below->rank != root) {
        memcpy(r->of->on->peek(device_ptr), r->of->on->peek(r->of->memory[root]), bytes);
    }
    return dcp_comm_barrier(r->below, timeout_ms, err);
}

static dcp_status broadcast_on_rank(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    broadcast_case *c = user;
    broadcast_rank self = {c, comm};
    dcp_comm_callbacks callbacks = DCP_COMM_CALLBACKS_INIT;
    dcp_comm *tested;
    callbacks.user = &self;
    callbacks.rank = rank;
    callbacks.size = c->n_ranks;
    callbacks.alltoall = below_alltoall;
    callbacks.broadcast_device = c->has_own ? own_broadcast : NULL;
    dcp_status status = dcp_comm_from_callbacks(NULL, &callbacks, &tested, err);
    if (status == DCP_OK) {
        dcp_device device = {c->on->type, rank % 2};
        void *stream = look_alike_stream(c->on, device.index);
        if (rank == c->root && !c->has_own) { /* the program has work under way that makes what is sent */
            c->on->kernel(stream, c->memory[rank], c->bytes, 7, 20);
        }
        status = dcp_device_broadcast(NULL, tested, device, rank == c->bad_rank ? NULL : c->memory[rank], c->bytes, c->root,
                                      stream, err);
        dcp_comm_free(tested);
    }
    return status;
}

/* R11.14: by the communicator where it can, else through host memory. */
static void devices__broadcasts_reach_the_devices_of_all_ranks(void **unused)
{
    (void)unused;
    for (int i = 0; i < 16; i++) {
        broadcast_case c = {.on = &both[i % 2],
                            .has_own = i / 2 % 2,
                            .n_ranks = i < 8 ? 2 : 4,
                            .root = i < 8 ? 1 : 2,
                            .bad_rank = i % 4 < 2 && i / 4 % 2 ? 0 : -1,
                            .bytes = 9 * MIB + 5};
        rank_thread ranks[4];
        c.on->reset();
        for (int r = 0; r < c.n_ranks; r++) {
            c.memory[r] = c.on->alloc(r % 2, c.bytes);
            memset(c.on->peek(c.memory[r]), r, c.bytes);
        }
        if (c.has_own) { /* which keeps no order with the stream here */
            memset(c.on->peek(c.memory[c.root]), 7, c.bytes);
        }
        run_ranks(c.n_ranks, broadcast_on_rank, &c, ranks);
        assert_int_equal(c.n_own, c.has_own ? c.n_ranks : 0);
        for (int r = 0; r < c.n_ranks; r++) {
            if (ranks[r].status != (c.bad_rank < 0 ? DCP_OK : DCP_PEER)) {
                fail_msg("case %d, rank %d: %s", i, r, ranks[r].err.message);
            }
            const char *got = c.on->peek(c.memory[r]);
            for (size_t k = 0; k < c.bytes && c.bad_rank < 0; k++) {
                assert_int_equal(got[k], 7);
            }
        }
        for (int r = 0; r < c.n_ranks; r++) {
            c.on->free(c.memory[r]);
        }
        assert_clean(c.on);
    }
}

/* ---- states in host memory ---- */

/* R8.5, R8.11, R8.12: what is in the caller's stream is waited for, memory is registered and released. */
static void devices__states_are_moved_to_host_memory(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices offload");
    for (int i = 0; i < 8; i++) {
        const look_alike *l = &both[i % 2];
        l->reset();
        l->delay_us(i < 4 ? 0 : 2000);
        twins t = twins_make(l, 1, &rnd);
        dcp_host_opts opts = DCP_HOST_OPTS_INIT;
        dcp_host_state *h;
        dcp_host_memory where = DCP_HOST_MEMORY_INIT;
        opts.is_pinned = i % 4 < 2;
        opts.is_shared = true;
        opts.pin_device = (dcp_device){l->type, 1};
        assert_int_equal(dcp_host_offload(NULL, t.device, NULL, NULL, 0, &opts, &h, NULL), DCP_OK);
        assert_true(dcp_value_equal(dcp_host_value(h), t.host));
        assert_true(dcp_host_is_similar(dcp_host_value(h), t.device));
        assert_int_equal(l->registrations() > 0, opts.is_pinned);
        const dcp_tensor *line = dcp_value_tensor(dcp_dict_get_str(dcp_host_value(h), "line"));
        assert_int_equal(dcp_host_where(h, line, &where, NULL), DCP_OK);
        assert_true(where.is_shared && where.is_pinned == opts.is_pinned);
        /* The same memory once more, after the source has changed. */
        fill(&rnd, t.host_memory, t.bytes);
        memcpy(l->peek(t.device_memory), t.host_memory, t.bytes);
        dcp_value *copied;
        assert_int_equal(dcp_host_copy(NULL, t.device, dcp_host_value(h), NULL, &copied, NULL), DCP_OK);
        const dcp_tensor *again = dcp_value_tensor(dcp_dict_get_str(copied, "line"));
        assert_ptr_equal(again->data, line->data);
        assert_memory_equal(line->data, t.host_memory + 4096, 700000 * sizeof(double));
        dcp_value_free(copied);
        /* The other way round is not a copy into host memory. */
        assert_int_equal(dcp_host_copy(NULL, dcp_host_value(h), t.device, NULL, NULL, NULL), DCP_UNSUPPORTED);
        dcp_host_free(h);
        twins_free(&t);
        l->delay_us(0);
        assert_clean(l);
    }
}

/* R8.2, R8.3: nothing is registered for tensors without dimensions or elements; and a device that refuses is an error. */
static void devices__what_has_no_memory_is_not_registered(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        int64_t none[] = {0, 8}, some[] = {5};
        float memory[5] = {1};
        dcp_value *state;
        dcp_host_opts opts = DCP_HOST_OPTS_INIT;
        dcp_host_state *h;
        l->reset();
        opts.is_pinned = true;
        opts.pin_device.type = l->type;
        dcp_dict_create(NULL, &state, NULL);
        dcp_tensor t = dcp_tensor_make(DCP_FLOAT32, 2, none, memory);
        dcp_dict_set_tensor(state, "none", &t, NULL);
        t = dcp_tensor_make(DCP_FLOAT32, 0, NULL, memory);
        dcp_dict_set_tensor(state, "scalar", &t, NULL);
        assert_int_equal(dcp_host_create(NULL, state, &opts, &h, NULL), DCP_OK);
        assert_int_equal(l->count(l->register_call), 0);
        dcp_host_free(h);
        t = dcp_tensor_make(DCP_FLOAT32, 1, some, memory);
        dcp_dict_set_tensor(state, "some", &t, NULL);
        l->limit_registration(1);
        assert_int_equal(dcp_host_create(NULL, state, &opts, &h, NULL), DCP_DEVICE);
        l->limit_registration(0);
        dcp_value_free(state);
        assert_clean(l);
    }
}

/* ---- loading ---- */

typedef struct torchfile_job {
    dcp_storage *storage;
    dcp_value *states[2];
} torchfile_job;

static dcp_status load_torchfile(void *user, dcp_comm *comm, int rank, dcp_error *err)
{
    static const char *const apart[] = {"line", "scalar", "bool", "spread"};
    torchfile_job *j = user;
    dcp_torchfile_reader *reader;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    if (dcp_torchfile_reader_open(NULL, "file.pt", 0, &reader, err) != DCP_OK) {
        return DCP_INTERNAL;
    }
    opts.torchfile = reader;
    opts.open.storage = j->storage;
    opts.comm = comm;
    opts.include = apart;
    opts.n_include = 4;
    dcp_status status = dcp_load(NULL, NULL, j->states[rank], &opts, NULL, err);
    dcp_torchfile_reader_close(reader);
    return status;
}

/* R11.14: a torch.save file that one rank reads reaches the devices of another, just as host memory; and a failing copy all
 * ranks. */
static void devices__targets_of_a_torchfile(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices torchfile");
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        l->reset();
        twins saved = twins_make(l, 0, &rnd), target = twins_make(l, 1, &rnd);
        torchfile_job j = {memory_storage(), {target.host, target.device}};
        rank_thread ranks[2];
        dcp_convert_opts co = DCP_CONVERT_OPTS_INIT;
        save_to(j.storage, saved.host, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        co.to = DCP_TO_TORCH;
        co.open.storage = co.storage = j.storage;
        assert_int_equal(dcp_convert(NULL, "", "file.pt", &co, NULL, NULL), DCP_OK);
        run_ranks(2, load_torchfile, &j, ranks);
        for (int r = 0; r < 2; r++) {
            if (ranks[r].status != DCP_OK) {
                fail_msg("rank %d: %s", r, ranks[r].err.message);
            }
        }
        const char *line = dcp_value_tensor(dcp_dict_get_str(saved.host, "line"))->data;
        assert_memory_equal(dcp_value_tensor(dcp_dict_get_str(target.host, "line"))->data, line, 700000 * sizeof(double));
        assert_memory_equal(l->peek(target.device_memory), target.host_memory, target.bytes);
        l->fail_call(l->to_device_call, 1, 700);
        run_ranks(2, load_torchfile, &j, ranks);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(ranks[r].status, DCP_PEER);
            assert_int_equal(ranks[r].err.rank, 1);
        }
        assert_clean(l);
        dcp_storage_free(j.storage);
        twins_free(&saved);
        twins_free(&target);
    }
}

/* R11.7: loaded to a device, from a save of host memory; nothing between the elements of a target is touched. */
static void devices__targets_get_what_host_memory_gets(void **unused)
{
    (void)unused;
    static const char *const apart[][4] = {/* targets that do not overlap each other */
                                           {"line", "scalar", "bool", "spread"},
                                           {"turned"},
                                           {"square"},
                                           {"column"}};
    test_random rnd = test_random_seeded("devices load");
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 4; i++) {
            const look_alike *l = &both[k];
            l->reset();
            l->delay_us(i == 2 ? 1000 : 0);
            twins saved = twins_make(l, 0, &rnd), target = twins_make(l, i % 2, &rnd);
            dcp_storage *st = memory_storage();
            dcp_save_opts so = DCP_SAVE_OPTS_INIT;
            so.transform = i == 3 ? "stream.zstd/1" : NULL;
            save_to(st, saved.host, so);
            dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
            dcp_error err = DCP_ERROR_INIT;
            lo.open.storage = st;
            lo.include = apart[i];
            lo.n_include = i == 0 ? 4 : 1;
            if (dcp_load(NULL, "", target.device, &lo, NULL, &err) != DCP_OK) {
                fail_msg("%s", err.message);
            }
            assert_int_equal(dcp_load(NULL, "", target.host, &lo, NULL, &err), DCP_OK);
            assert_memory_equal(l->peek(target.device_memory), target.host_memory, target.bytes);
            assert_clean(l);
            dcp_storage_free(st);
            twins_free(&saved);
            twins_free(&target);
        }
    }
}

/* A tensor that is larger than the ring, in one piece and by its columns. */
static void devices__large_targets_go_through_the_ring(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices large");
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        l->reset();
        enum { ROWS = 5000, COLUMNS = 1000 };
        const size_t bytes = sizeof(float) * ROWS * COLUMNS;
        int64_t extents[] = {ROWS, COLUMNS}, turned[] = {1, ROWS}, block[] = {COLUMNS / 2, 2 * ROWS};
        char *memory = malloc(bytes);
        fill(&rnd, memory, bytes);
        dcp_tensor x = dcp_tensor_make(DCP_FLOAT32, 2, extents, memory);
        dcp_value *state;
        dcp_dict_create(NULL, &state, NULL);
        dcp_dict_set_tensor(state, "x", &x, NULL);
        dcp_storage *st = memory_storage();
        save_to(st, state, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        char *device = l->alloc(1, bytes);
        (void)turned;
        (void)block;
        x.data = device;
        x.device = (dcp_device){l->type, 1};
        dcp_value *target;
        dcp_dict_create(NULL, &target, NULL);
        dcp_dict_set_tensor(target, "x", &x, NULL);
        dcp_load_opts lo = DCP_LOAD_OPTS_INIT;
        lo.open.storage = st;
        l->delay_us(500);
        assert_int_equal(dcp_load(NULL, "", target, &lo, NULL, NULL), DCP_OK);
        assert_memory_equal(l->peek(device), memory, bytes);
        dcp_storage *again = memory_storage(), *strided = memory_storage(); /* and back */
        save_to(again, target, (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        assert_same_files(st, again, 1);
        dcp_value *views[2];
        for (int side = 0; side < 2; side++) {
            dcp_tensor y = dcp_tensor_make(DCP_FLOAT32, 2, extents, side ? device : memory);
            y.strides = turned;
            y.device = side ? x.device : (dcp_device){DCP_DEVICE_CPU, 0};
            dcp_dict_create(NULL, &views[side], NULL);
            dcp_dict_set_tensor(views[side], "x", &y, NULL);
        }
        l->delay_us(0);
        dcp_storage *host = memory_storage();
        save_to(host, views[0], (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        save_to(strided, views[1], (dcp_save_opts)DCP_SAVE_OPTS_INIT);
        assert_same_files(host, strided, 1);
        assert_clean(l);
        dcp_value_free(views[0]);
        dcp_value_free(views[1]);
        dcp_value_free(state);
        dcp_value_free(target);
        dcp_storage_free(st);
        dcp_storage_free(again);
        dcp_storage_free(strided);
        dcp_storage_free(host);
        free(memory);
        l->free(device);
    }
}

/* ---- failures ---- */

static dcp_status save_from(const twins *t, dcp_error *err)
{
    dcp_storage *st = memory_storage();
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    dcp_status status = dcp_save(NULL, "", t->device, &opts, NULL, err);
    dcp_stat info;
    assert_true(status == DCP_OK || st->ops->stat(st, ".metadata", &info, NULL) == DCP_NOT_FOUND);
    dcp_storage_free(st);
    return status;
}

/* R11.10: whichever call fails, at whatever time, the error has its code, nothing is published, and the next save works. */
static void devices__every_failing_call_is_told_with_its_code(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices failures");
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        const char *calls[] = {l->to_host_call, l->stream_call, l->event_call};
        l->reset();
        twins t = twins_make(l, 0, &rnd);
        for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++) {
            for (int n = 1; n < 4; n++) {
                dcp_error err = DCP_ERROR_INIT;
                l->fail_call(calls[c], n, 507053);
                dcp_status status = save_from(&t, &err);
                if (status == DCP_OK) { /* there were fewer calls */
                    assert_true(n > 1);
                    l->reset();
                    continue;
                }
                assert_int_equal(status, DCP_DEVICE);
                assert_int_equal(err.native_code, 507053);
            }
        }
        for (int n = 1; n < 12; n += 3) {
            dcp_error err = DCP_ERROR_INIT;
            l->reset();
            l->fail_work(n, 507054);
            assert_int_equal(save_from(&t, &err), DCP_DEVICE);
            assert_int_equal(err.native_code, 507054);
        }
        l->reset();
        assert_int_equal(save_from(&t, NULL), DCP_OK);
        assert_clean(l);
        twins_free(&t);
    }
}

static void devices__a_device_that_is_not_there_is_told(void **unused)
{
    (void)unused;
    char byte = 1;
    for (int k = 0; k < 2; k++) {
        both[k].reset();
        for (int index = -1; index < 3; index += 3) {
            int64_t extents[] = {1};
            dcp_tensor x = dcp_tensor_make(DCP_UINT8, 1, extents, &byte);
            dcp_value *state;
            x.device = (dcp_device){both[k].type, index};
            dcp_dict_create(NULL, &state, NULL);
            dcp_dict_set_tensor(state, "x", &x, NULL);
            dcp_storage *st = memory_storage();
            dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
            opts.storage = st;
            assert_int_equal(dcp_save(NULL, "", state, &opts, NULL, NULL), DCP_ARG);
            dcp_value_free(state);
            dcp_storage_free(st);
        }
    }
}

/* A stream of another device, and one that is none. */
static void devices__wrong_streams_are_refused_by_the_driver(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices streams");
    for (int k = 0; k < 2; k++) {
        const look_alike *l = &both[k];
        l->reset();
        twins t = twins_make(l, 0, &rnd);
        char nothing;
        void *streams[] = {look_alike_stream(l, 1), &nothing};
        for (int i = 0; i < 2; i++) {
            dcp_storage *st = memory_storage();
            dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
            dcp_error err = DCP_ERROR_INIT;
            opts.storage = st;
            opts.stream = streams[i];
            assert_int_equal(dcp_save(NULL, "", t.device, &opts, NULL, &err), DCP_DEVICE);
            assert_int_not_equal(err.native_code, 0);
            dcp_storage_free(st);
        }
        twins_free(&t);
    }
}

/* Device memory of the look-alikes is none of the host: reading it there ends the process. So no test above has done so. */
static void devices__host_access_to_device_memory_faults(void **unused)
{
    (void)unused;
    for (int k = 0; k < 2; k++) {
        volatile char *memory = both[k].alloc(0, 10);
        int status;
        pid_t child = fork();
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            _exit(memory[0] & 0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        both[k].free((void *)memory);
    }
}

/* R11.3: the caller's current device stays what it was. */
static void devices__the_current_device_is_kept(void **unused)
{
    (void)unused;
    test_random rnd = test_random_seeded("devices current");
    int (*get_device)(int32_t *), (*get_context)(void **);
    look_alike_find(&both[1], "aclrtGetDevice", &get_device);
    look_alike_find(&both[0], "cuCtxGetCurrent", &get_context);
    for (int k = 0; k < 2; k++) {
        both[k].reset();
        look_alike_stream(&both[k], 1);
        twins t = twins_make(&both[k], 0, &rnd);
        int32_t device = -1;
        void *context = &rnd;
        assert_int_equal(save_from(&t, NULL), DCP_OK);
        if (k) {
            assert_int_equal(get_device(&device), 0);
            assert_int_equal(device, 1);
        } else {
            assert_int_equal(get_context(&context), 0);
            assert_null(context);
        }
        twins_free(&t);
    }
}

static int open_both(void **unused)
{
    (void)unused;
    both[0] = look_alike_open(DCP_DEVICE_CUDA, "libcuda.so.1");
    both[1] = look_alike_open(DCP_DEVICE_NPU, "libascendcl.so");
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices__files_are_those_of_a_save_from_host_memory),
        cmocka_unit_test(devices__hugging_face_files_are_those_of_host_memory),
        cmocka_unit_test(devices__the_callers_stream_is_waited_for),
        cmocka_unit_test(devices__background_saves_store_the_same),
        cmocka_unit_test(devices__content_is_compared),
        cmocka_unit_test(devices__broadcasts_reach_the_devices_of_all_ranks),
        cmocka_unit_test(devices__states_are_moved_to_host_memory),
        cmocka_unit_test(devices__what_has_no_memory_is_not_registered),
        cmocka_unit_test(devices__targets_get_what_host_memory_gets),
        cmocka_unit_test(devices__targets_of_a_torchfile),
        cmocka_unit_test(devices__large_targets_go_through_the_ring),
        cmocka_unit_test(devices__every_failing_call_is_told_with_its_code),
        cmocka_unit_test(devices__a_device_that_is_not_there_is_told),
        cmocka_unit_test(devices__wrong_streams_are_refused_by_the_driver),
        cmocka_unit_test(devices__host_access_to_device_memory_faults),
        cmocka_unit_test(devices__the_current_device_is_kept),
    };
    return cmocka_run_group_tests(tests, open_both, NULL);
}
