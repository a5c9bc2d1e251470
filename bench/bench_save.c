/* Rate of saving 24 large and 2,000 small tensors, beside what the machine can do with the same bytes.
 *
 *     bench_save null [MIB [RUNS]]             into a store that throws everything away, beside CRC-32 and XXH3 alone
 *     bench_save DIRECTORY [MIB [RUNS]]        to files, not made durable, beside plain writes of 1 MiB
 *     bench_save sync:DIRECTORY [MIB [RUNS]]   the same with fsync
 *
 * MIB is 1536 and RUNS 5 unless given otherwise. Both sides take turns, the second going first every other time. */
#include "bench.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/hash.h"

#define BLOCK_BYTES ((size_t)1 << 20)
#define STEP_BYTES ((size_t)128 << 10)

/* ---- a store that keeps no data files: what is written to them is thrown away, the rest is in memory ---- */

typedef struct null_file {
    dcp_file base;
    dcp_file *inner; /* NULL: a data file */
} null_file;

static dcp_storage *rest;

static dcp_status null_open(dcp_storage *st, const char *name, unsigned flags, dcp_file **out, dcp_error *err)
{
    const char *end = strrchr(name, '.');
    null_file *f = calloc(1, sizeof *f);
    dcp_status status = DCP_OK;
    if (!f) {
        return DCP_NOMEM;
    }
    f->base.storage = st;
    if (!end || strcmp(end, ".distcp") != 0) {
        status = rest->ops->open(rest, name, flags, &f->inner, err);
    }
    if (status != DCP_OK) {
        free(f);
        return status;
    }
    *out = &f->base;
    return DCP_OK;
}

static dcp_file *inner_of(dcp_file *f)
{
    return ((null_file *)f)->inner;
}

static dcp_status null_read_at(dcp_file *f, void *buf, size_t n, uint64_t offset, size_t *got, dcp_error *err)
{
    *got = 0;
    return inner_of(f) ? rest->ops->read_at(inner_of(f), buf, n, offset, got, err) : DCP_OK;
}

static dcp_status null_write_at(dcp_file *f, const void *buf, size_t n, uint64_t offset, dcp_error *err)
{
    return inner_of(f) ? rest->ops->write_at(inner_of(f), buf, n, offset, err) : DCP_OK;
}

static dcp_status null_sync(dcp_file *f, dcp_error *err)
{
    (void)f;
    (void)err;
    return DCP_OK;
}

static dcp_status null_close(dcp_file *f, dcp_error *err)
{
    dcp_status status = inner_of(f) ? rest->ops->close(inner_of(f), err) : DCP_OK;
    free(f);
    return status;
}

static dcp_status null_stat(dcp_storage *st, const char *name, dcp_stat *out, dcp_error *err)
{
    (void)st;
    return rest->ops->stat(rest, name, out, err);
}

static dcp_status null_list(dcp_storage *st, const char *name, dcp_list_fn fn, void *user, dcp_error *err)
{
    (void)st;
    return rest->ops->list(rest, name, fn, user, err);
}

static dcp_status null_rename(dcp_storage *st, const char *from, const char *to, dcp_error *err)
{
    (void)st;
    return rest->ops->rename(rest, from, to, err);
}

static dcp_status null_remove(dcp_storage *st, const char *name, dcp_error *err)
{
    (void)st;
    return rest->ops->remove(rest, name, err);
}

static dcp_status null_make_dir(dcp_storage *st, const char *name, dcp_error *err)
{
    (void)st;
    return rest->ops->make_dir(rest, name, err);
}

static void null_free(dcp_storage *st)
{
    (void)st;
}

static const dcp_storage_ops null_ops = {
    .struct_size = sizeof(dcp_storage_ops),
    .abi_version = DCP_STORAGE_ABI,
    .caps = DCP_STORAGE_RENAME | DCP_STORAGE_RANDOM_WRITE,
    .name = "null",
    .open = null_open,
    .read_at = null_read_at,
    .write_at = null_write_at,
    .sync = null_sync,
    .close = null_close,
    .stat = null_stat,
    .list = null_list,
    .rename = null_rename,
    .remove = null_remove,
    .make_dir = null_make_dir,
    .free = null_free,
};

/* ---- the two sides ---- */

typedef struct bench {
    bench_state state;
    const char *dir; /* NULL: the null store */
    bool is_durable;
    uint32_t sink; /* keeps the compiler from leaving the hashing out */
} bench;

/* *cpu: seconds of all threads. */
static double save(bench *b, double *cpu)
{
    static dcp_storage null_store = {&null_ops};
    dcp_error err = DCP_ERROR_INIT;
    dcp_save_opts opts = DCP_SAVE_OPTS_INIT;
    static char path[4096] = "saved";
    opts.overwrite = !b->dir;
    opts.storage = b->dir ? NULL : &null_store;
    opts.no_sync = !b->is_durable;
    if (b->dir) {
        bench_fresh(b->dir, path);
    }
    double start = bench_now(), start_cpu = bench_cpu();
    bench_must(dcp_save(NULL, path, b->state.value, &opts, NULL, &err), &err);
    double took = bench_now() - start;
    *cpu = bench_cpu() - start_cpu;
    if (b->dir) {
        bench_remove(path);
    }
    return took;
}

static double hash(bench *b, double *cpu)
{
    dcp__hasher *hasher = bench_alloc(dcp__hasher_bytes());
    double start = bench_now(), start_cpu = bench_cpu();
    uint32_t crc = 0;
    dcp__hasher_init(hasher);
    for (size_t at = 0; at < b->state.bytes; at += STEP_BYTES) {
        size_t n = b->state.bytes - at < STEP_BYTES ? b->state.bytes - at : STEP_BYTES;
        crc = dcp__crc32(crc, b->state.memory + at, n);
        dcp__hasher_update(hasher, b->state.memory + at, n);
    }
    b->sink ^= crc ^ dcp__hasher_digest(hasher).bytes[0];
    double took = bench_now() - start;
    *cpu = bench_cpu() - start_cpu;
    free(hasher);
    return took;
}

static void check(bool good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

static double write_plainly(const bench *b, double *cpu)
{
    char path[4096], name[4200];
    bench_fresh(b->dir, path);
    snprintf(name, sizeof name, "%s/plain", path);
    double start = bench_now(), start_cpu = bench_cpu();
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    check(fd >= 0, name);
    for (size_t at = 0; at < b->state.bytes;) {
        size_t n = b->state.bytes - at < BLOCK_BYTES ? b->state.bytes - at : BLOCK_BYTES;
        ssize_t put = pwrite(fd, b->state.memory + at, n, (off_t)at);
        check(put > 0, name);
        at += (size_t)put;
    }
    check(!b->is_durable || fsync(fd) == 0, name);
    close(fd);
    double took = bench_now() - start;
    *cpu = bench_cpu() - start_cpu;
    bench_remove(path);
    return took;
}

static double plainly(bench *b, double *cpu)
{
    return b->dir ? write_plainly(b, cpu) : hash(b, cpu);
}

/* ---- */

typedef struct side {
    bench_times wall, cpu;
} side;

static void row(const bench *b, const char *what, const side *times)
{
    char text[4200];
    snprintf(text, sizeof text, "%s: %s%s", what, b->dir ? b->dir : "null store, one core", b->is_durable ? ", durable" : "");
    bench_row_rate(text, &times->wall, b->state.bytes);
    bench_row_number("- CPU seconds per GiB", bench_median(&times->cpu) / ((double)b->state.bytes / (double)(1 << 30)));
}

static void measure(bench *b, double (*fn)(bench *b, double *cpu), side *times)
{
    double cpu;
    bench_add(&times->wall, fn(b, &cpu));
    bench_add(&times->cpu, cpu);
}

/* Of the process so far. */
static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_save null|DIRECTORY|sync:DIRECTORY [MIB [RUNS]]\n");
        return 2;
    }
    bench b = {.state = bench_state_mixed(bench_argument(argc, argv, 2, 1536) << 20)};
    b.is_durable = strncmp(argv[1], "sync:", 5) == 0;
    b.dir = strcmp(argv[1], "null") == 0 ? NULL : argv[1] + (b.is_durable ? 5 : 0);
    uint64_t runs = bench_argument(argc, argv, 3, 5);
    static side saves, plain;
    dcp_error err = DCP_ERROR_INIT;
    double unused;
    bench_must(dcp_storage_memory(NULL, &rest, &err), &err);
    plainly(&b, &unused); /* warms caches, frequency and free pages */
    long before = peak_kib();
    for (uint64_t i = 0; i < runs; i++) {
        measure(&b, i % 2 ? plainly : save, i % 2 ? &plain : &saves);
        measure(&b, i % 2 ? save : plainly, i % 2 ? &saves : &plain);
    }
    row(&b, "save", &saves);
    bench_row_number("- peak memory above the state, MiB", (double)(peak_kib() - before) / 1024);
    row(&b, b.dir ? "plain writes" : "CRC-32 and XXH3 alone", &plain);
    bench_row_number("ratio", bench_median(&plain.wall) / bench_median(&saves.wall));
    bench_state_free(&b.state);
    dcp_storage_free(rest);
    fprintf(stderr, "%08x\r", b.sink); /* so that the hashes are needed */
    return 0;
}
