/*
 * Saves and loads of processes: a rank, or all of them, failing in each phase; a rank that never comes; a part of the group on
 * its own. Run by mpiexec on any number of ranks. Prints one line for each test, on rank 0.
 */
#include <dirent.h>

#include "dcp/mpi.h"
#include "support/comm_suite.h"
#include "support/temp_dir.h"

#include "dcp/dcp.h"

#define ROWS 5 /* of each rank */
#define COLS 300

static int world_rank, world_size;
static dcp_comm *world;
static temp_dir scratch;

/* ---- states ---- */

static float value_of(int generation, int64_t row, int64_t col)
{
    return (float)(generation * 1000 + row) + (float)col / 1024;
}

/* Each rank has some rows of one tensor, and all have the same vector and number. */
typedef struct parts {
    dcp_value *state;
    float rows[ROWS * COLS], vector[COLS];
} parts;

static void parts_make(parts *p, int generation, int rank, int size)
{
    int64_t extents[] = {(int64_t)size * ROWS, COLS}, offsets[] = {(int64_t)rank * ROWS, 0}, sizes[] = {ROWS, COLS}, cols = COLS;
    dcp_tensor rows = dcp_tensor_make(DCP_FLOAT32, 2, sizes, p->rows), vector = dcp_tensor_make(DCP_FLOAT32, 1, &cols, p->vector);
    dcp_box box = {offsets, sizes};
    dcp_value *v;
    for (int i = 0; i < ROWS * COLS; i++) {
        p->rows[i] = value_of(generation, offsets[0] + i / COLS, i % COLS);
        p->vector[i % COLS] = value_of(generation, 900, i % COLS);
    }
    CHECK(dcp_dict_create(NULL, &p->state, NULL) == DCP_OK);
    CHECK(dcp_sharded_create(NULL, DCP_FLOAT32, 2, extents, 1, &rows, &box, &v, NULL) == DCP_OK);
    CHECK(dcp_dict_set(p->state, dcp_key_str("rows"), v, NULL) == DCP_OK);
    CHECK(dcp_dict_set_tensor(p->state, "vector", &vector, NULL) == DCP_OK);
    CHECK(dcp_dict_set_int(p->state, "generation", generation, NULL) == DCP_OK);
}

static bool parts_are(const parts *p, int generation)
{
    parts expected;
    int64_t found = 0;
    parts_make(&expected, generation, world_rank, world_size);
    bool same = dcp_value_int(dcp_dict_get_str(p->state, "generation"), &found) && found == generation;
    same &= memcmp(p->rows, expected.rows, sizeof p->rows) == 0 && memcmp(p->vector, expected.vector, sizeof p->vector) == 0;
    dcp_value_free(expected.state);
    return same;
}

/* ---- what is there afterwards ---- */

static void expect_loads(int generation)
{
    parts p;
    dcp_error err = DCP_ERROR_INIT;
    dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
    opts.comm = world;
    parts_make(&p, generation + 1, world_rank, world_size);
    CHECK_OK(dcp_load(NULL, scratch.path, p.state, &opts, NULL, &err), &err);
    CHECK(parts_are(&p, generation));
    dcp_value_free(p.state);
}

static size_t count_files(void)
{
    size_t n = 0;
    DIR *dir = opendir(scratch.path);
    CHECK(dir);
    for (const struct dirent *e; (e = readdir(dir)) != NULL;) {
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    closedir(dir);
    return n;
}

/* The metadata, and one file of each rank. */
static void expect_no_leftovers(void)
{
    dcp_error err = DCP_ERROR_INIT;
    CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
    CHECK(count_files() == (size_t)world_size + 1);
    CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
}

static void save_ok(int generation)
{
    parts p;
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.comm = world;
    opts.overwrite = true;
    parts_make(&p, generation, world_rank, world_size);
    CHECK_OK(dcp_save(NULL, scratch.path, p.state, &opts, NULL, &err), &err);
    dcp_value_free(p.state);
}

/* ---- faults ---- */

typedef enum where { BY_STORAGE, IN_STATE } where;

typedef struct fault_case {
    const char *name;
    bool load;
    where where;       /* IN_STATE: by what the rank brings */
    dcp_storage_op op; /* BY_STORAGE: each such call fails on files whose names begin with `file` */
    const char *file;
    bool coordinator_only; /* nobody else gets there; in a load, rank 0 */
    dcp_status cause;
} fault_case;

static const fault_case cases[] = {
    {"save, own plan", false, IN_STATE, DCP_OP_COUNT, "", false, DCP_MISMATCH},
    {"save, claim", false, BY_STORAGE, DCP_OP_OPEN, ".libdcp", true, DCP_IO},
    {"save, intent", false, BY_STORAGE, DCP_OP_WRITE, ".libdcp", true, DCP_NOSPACE},
    {"save, making a file", false, BY_STORAGE, DCP_OP_OPEN, "__", false, DCP_IO},
    {"save, writing", false, BY_STORAGE, DCP_OP_WRITE, "__", false, DCP_NOSPACE},
    {"save, syncing", false, BY_STORAGE, DCP_OP_SYNC, "__", false, DCP_IO},
    {"save, metadata", false, BY_STORAGE, DCP_OP_WRITE, ".metadata", true, DCP_NOSPACE},
    {"save, publishing", false, BY_STORAGE, DCP_OP_RENAME, ".metadata", true, DCP_IO},
    {"load, listing", true, BY_STORAGE, DCP_OP_LIST, "", true, DCP_IO},
    {"load, metadata", true, BY_STORAGE, DCP_OP_READ, ".metadata", true, DCP_IO},
    {"load, own plan", true, IN_STATE, DCP_OP_COUNT, "", false, DCP_NOT_FOUND},
    {"load, opening", true, BY_STORAGE, DCP_OP_OPEN, "__", false, DCP_IO},
    {"load, reading", true, BY_STORAGE, DCP_OP_READ, "__", false, DCP_IO},
};

static dcp_status decide(void *user, dcp_storage_op op, const char *name, size_t n, uint64_t offset, dcp_error *err)
{
    const fault_case *c = user;
    (void)n;
    (void)offset;
    (void)err;
    return op == c->op && strncmp(name, c->file, strlen(c->file)) == 0 ? c->cause : DCP_OK;
}

/* A load finds no "a.b"; a save cannot have two items of that name. */
static void spoil(dcp_value *state, bool load)
{
    dcp_value *nested;
    CHECK(dcp_dict_set_int(state, "a.b", 1, NULL) == DCP_OK);
    if (!load) {
        CHECK(dcp_dict_create(NULL, &nested, NULL) == DCP_OK);
        CHECK(dcp_dict_set_int(nested, "b", 1, NULL) == DCP_OK);
        CHECK(dcp_dict_set(state, dcp_key_str("a"), nested, NULL) == DCP_OK);
    }
}

static dcp_status run_case(const fault_case *c, dcp_value *state, dcp_storage *st, int coordinator, dcp_failures *failures,
                           dcp_error *err)
{
    if (c->load) {
        dcp_load_opts opts = DCP_LOAD_OPTS_INIT;
        opts.open.storage = st;
        opts.comm = world;
        opts.failures = failures;
        return dcp_load(NULL, "", state, &opts, NULL, err);
    }
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    opts.storage = st;
    opts.comm = world;
    opts.coordinator = coordinator;
    opts.overwrite = true;
    opts.failures = failures;
    return dcp_save(NULL, "", state, &opts, NULL, err);
}

/* Every rank lists exactly the ranks that failed, with their cause. */
static void check_failures(const dcp_failures *failures, unsigned mask, dcp_status cause)
{
    unsigned listed = 0;
    for (size_t i = 0; i < dcp_failures_count(failures); i++) {
        const dcp_failure *f = dcp_failures_at(failures, i);
        listed |= 1u << f->rank;
        CHECK(f->code == cause && f->message[0]);
    }
    CHECK(listed == mask);
}

static void fail_ranks(const fault_case *c, unsigned mask, int coordinator)
{
    parts p;
    dcp_error err = DCP_ERROR_INIT;
    dcp_storage *disk, *faulty = NULL;
    dcp_failures *failures;
    bool mine = mask >> world_rank & 1;
    CHECK(dcp_failures_create(NULL, &failures, NULL) == DCP_OK);
    CHECK(dcp_storage_posix(NULL, scratch.path, &disk, NULL) == DCP_OK);
    CHECK(dcp_storage_fault(NULL, disk, decide, (void *)(uintptr_t)c, &faulty, NULL) == DCP_OK);
    parts_make(&p, 2, world_rank, world_size);
    if (mine && c->where == IN_STATE) {
        spoil(p.state, c->load);
    }
    bool is_faulty = mine && c->where == BY_STORAGE;
    dcp_status status = run_case(c, p.state, is_faulty ? faulty : disk, coordinator, failures, &err);
    if (status != DCP_PEER || dcp_comm_is_broken(world)) {
        fprintf(stderr, "%s: rank %d: %s: %s\n", c->name, world_rank, dcp_status_name(status), err.message);
        abort();
    }
    check_failures(failures, mask, c->cause);
    dcp_value_free(p.state);
    dcp_storage_free(faulty);
    dcp_storage_free(disk);
    dcp_failures_free(failures);
    expect_no_leftovers();
    expect_loads(1);
}

static void a_failing_rank_in_each_phase_is_heard_of_everywhere(void)
{
    unsigned all = (1u << world_size) - 1;
    save_ok(1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool is_rank_0s = cases[i].load && cases[i].coordinator_only;
        for (int r = 0; r < (is_rank_0s ? 1 : world_size); r++) {
            fail_ranks(&cases[i], 1u << r, r);
            if (!cases[i].coordinator_only) {
                fail_ranks(&cases[i], 1u << r, (r + 1) % world_size);
            }
        }
        if (!cases[i].coordinator_only) {
            fail_ranks(&cases[i], all, 0);
        }
    }
}

/* ---- ranks that disagree ---- */

/* The plans contradict each other: the coordinator tells, once. */
static void another_structure_on_one_rank_fails_on_all(void)
{
    for (int odd = 0; odd < world_size && world_size > 1; odd++) {
        parts p;
        dcp_error err = DCP_ERROR_INIT;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        int coordinator = (odd + 1) % world_size;
        CHECK(dcp_failures_create(NULL, &opts.failures, NULL) == DCP_OK);
        opts.comm = world;
        opts.overwrite = true;
        opts.coordinator = coordinator;
        parts_make(&p, 2, world_rank, world_size);
        if (world_rank == odd) {
            CHECK(dcp_dict_set_int(p.state, "vector", 1, NULL) == DCP_OK); /* a tensor on all others */
        }
        CHECK(dcp_save(NULL, scratch.path, p.state, &opts, NULL, &err) == DCP_PEER);
        check_failures(opts.failures, 1u << coordinator, DCP_MISMATCH);
        dcp_failures_free(opts.failures);
        dcp_value_free(p.state);
        expect_no_leftovers();
        expect_loads(1);
    }
}

/* ---- a rank that does not come ---- */

static void a_rank_that_never_comes_is_named(void)
{
    for (int absent = 0; absent < world_size && world_size > 1; absent++) {
        parts p;
        dcp_error err = DCP_ERROR_INIT;
        dcp_comm *twin = NULL;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        CHECK_OK(dcp_comm_duplicate(world, LONG_MS, &twin, &err), &err);
        dcp_comm_set_timeout(twin, 300);
        opts.comm = twin;
        opts.overwrite = true;
        opts.coordinator = (absent + 1) % world_size;
        parts_make(&p, 2, world_rank, world_size);
        if (world_rank != absent) {
            dcp_status status = dcp_save(NULL, scratch.path, p.state, &opts, NULL, &err);
            /* Whoever is told of it by another rank learns of that as STATE. */
            CHECK((status == DCP_TIMEOUT || status == DCP_STATE) && dcp_comm_is_broken(twin));
            CHECK(err.rank == absent);
        }
        dcp_value_free(p.state);
        CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
        dcp_comm_free(twin);
        expect_no_leftovers();
        expect_loads(1);
    }
    save_ok(1);
    expect_no_leftovers();
}

/* ---- a part of the group ---- */

/* Processes 1 and 3 of 4 save what they have, and all four load it. */
static void a_part_of_the_group_saves_on_its_own(void)
{
    MPI_Comm part;
    int is_odd = world_rank % 2;
    MPI_Comm_split(MPI_COMM_WORLD, is_odd, world_rank, &part);
    if (is_odd) {
        parts p;
        dcp_error err = DCP_ERROR_INIT;
        dcp_comm *comm = NULL;
        dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
        CHECK_OK(dcp_comm_mpi(NULL, part, LONG_MS, &comm, &err), &err);
        opts.comm = comm;
        opts.overwrite = true;
        opts.coordinator = dcp_comm_size(comm) - 1;
        parts_make(&p, 3, dcp_comm_rank(comm), dcp_comm_size(comm));
        CHECK_OK(dcp_save(NULL, scratch.path, p.state, &opts, NULL, &err), &err);
        dcp_value_free(p.state);
        dcp_comm_free(comm);
    }
    MPI_Comm_free(&part);
    dcp_error err = DCP_ERROR_INIT;
    CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
    if (world_size > 1) {
        int64_t extents[] = {(int64_t)world_size / 2 * ROWS, COLS};
        dcp_checkpoint *ck;
        dcp_value *whole;
        CHECK_OK(dcp_checkpoint_open(NULL, scratch.path, NULL, &ck, &err), &err);
        CHECK_OK(dcp_tensor_alloc(NULL, DCP_FLOAT32, 2, extents, &whole, &err), &err);
        CHECK_OK(dcp_read(ck, dcp_checkpoint_find(ck, dcp_str_of("rows")), NULL, dcp_value_tensor(whole), &err), &err);
        const float *data = dcp_value_tensor(whole)->data;
        for (int64_t i = 0; i < extents[0] * COLS; i++) {
            CHECK(data[i] == value_of(3, i / COLS, i % COLS));
        }
        dcp_value_free(whole);
        dcp_checkpoint_close(ck);
    }
    CHECK_OK(dcp_comm_barrier(world, LONG_MS, &err), &err);
}

static void run(const char *name, void (*test)(void))
{
    if (world_rank == 0) {
        printf("mpi_save_%d__%s\n", world_size, name);
        fflush(stdout);
    }
    test();
}

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    CHECK(world_rank != 0 || temp_dir_make(&scratch));
    MPI_Bcast(scratch.path, sizeof scratch.path, MPI_CHAR, 0, MPI_COMM_WORLD);
    CHECK_OK(dcp_comm_mpi(NULL, MPI_COMM_WORLD, LONG_MS, &world, &err), &err);
    run("a_failing_rank_in_each_phase_is_heard_of_everywhere", a_failing_rank_in_each_phase_is_heard_of_everywhere);
    run("another_structure_on_one_rank_fails_on_all", another_structure_on_one_rank_fails_on_all);
    run("a_rank_that_never_comes_is_named", a_rank_that_never_comes_is_named);
    run("a_part_of_the_group_saves_on_its_own", a_part_of_the_group_saves_on_its_own);
    dcp_comm_free(world);
    MPI_Finalize();
    if (world_rank == 0) {
        temp_dir_remove(&scratch);
    }
    return 0;
}
